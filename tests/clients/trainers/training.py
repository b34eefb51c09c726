"""What the trainers' tests share: an optimizer of ours and what it is held to, tiny models, comparisons."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amp_kernels.optim import FusedRMSprop, FusedSGD

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

TORCH = {FusedSGD: torch.optim.SGD, FusedRMSprop: torch.optim.RMSprop}
OPTIONS: dict[type, dict[str, Any]] = {
    FusedSGD: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    # With torch's eps, 1e-8, a gradient that is 0 but for its rounding moves a weight as far as any other: after a few
    # steps two runs that began one bit apart would be compared by their noise.
    FusedRMSprop: {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, "centered": True, "eps": 0.1},
}
families = pytest.mark.parametrize("family", [FusedSGD, FusedRMSprop], ids=["sgd", "rmsprop"])
low_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])

# Of a tensor's largest weight. A weight whose last bit differs may round to another 16-bit number, 2^-9 away, and the
# next gradients are taken with that: up to 2e-3 was seen.
FP32, MIXED = 1e-6, 1e-2


def ours(family: type, **options: Any) -> Make:
    return functools.partial(family, **OPTIONS[family] | options)


def torchs(family: type, **options: Any) -> Make:
    """torch's default optimizer; with foreach False it is not fused either."""
    return functools.partial(TORCH[family], **OPTIONS[family] | options, foreach=False)


def on_masters(family: type) -> Make:
    return functools.partial(OnMasters, torchs(family))


class OnMasters(torch.optim.Optimizer):
    """torch's default optimizer, and clipping, on fp32 copies: what ours does for 16-bit parameters."""

    def __init__(self, make: Make, params: Iterable[torch.nn.Parameter], max_grad_norm: float | None = None) -> None:
        super().__init__(params, {"lr": 0.0})
        self.masters = [p.detach().to(torch.float32, copy=True) for p in self._params()]
        self.inner, self.max_grad_norm = make(self.masters), max_grad_norm
        self.param_groups[0]["lr"] = self.inner.param_groups[0]["lr"]

    def _params(self) -> list[Tensor]:
        (group,) = self.param_groups
        return group["params"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for param, master in zip(self._params(), self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.to(torch.float32, copy=True)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm, foreach=False)
        self.inner.step()
        for param, master in zip(self._params(), self.masters, strict=True):
            param.copy_(master)
        return loss

    @torch.no_grad()
    def reload(self) -> None:
        for param, master in zip(self._params(), self.masters, strict=True):
            master.copy_(param)


def classifier() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.LayerNorm(33), torch.nn.GELU(), torch.nn.Linear(33, 5))


def samples(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Eight batches of eight."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 16, generator=generator).to(dtype), torch.randint(5, (64,), generator=generator)


def cross_entropy(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x).float(), y)


def average(model: torch.nn.Module) -> AveragedModel:
    """Its exponential moving average, from now on."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """`tolerance` is of each tensor's largest weight, or of 0.01: BERT's key biases have no gradient but rounding."""
    assert got.keys() == wanted.keys()
    for name in wanted:
        error = (got[name].double() - wanted[name].double()).abs().max()
        assert error <= tolerance * wanted[name].abs().max().clamp(min=0.01), f"{name}: {error}"


def masters(optimizer: Any) -> dict[str, Tensor]:
    """fp32 copies of 16-bit weights, of which the weights are roundings to the bit."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # inside a trainer's own
    params = [p for group in optimizer.param_groups for p in group["params"]]
    is_by_hand = isinstance(optimizer, OnMasters)
    found = optimizer.masters if is_by_hand else [optimizer.master(p) for p in params]
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in zip(params, found, strict=True))
    return {str(i): master.clone() for i, master in enumerate(found)}


def assert_same_bits(got: Any, wanted: Any, at: str = "") -> None:
    """Tensors in nested dicts and lists must have the same bits. Other values must be equal, and of the same type."""
    assert type(got) is type(wanted), at
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), at
        for key in wanted:
            assert_same_bits(got[key], wanted[key], f"{at}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), at
        for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_same_bits(one, other, f"{at}[{i}]")
    elif isinstance(wanted, Tensor):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), at
        assert torch.equal(*(t.detach().flatten().view(torch.uint8) for t in (got, wanted))), at
    else:
        assert got == wanted, at
