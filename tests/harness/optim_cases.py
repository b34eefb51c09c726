"""What the optimizer tests share: the families with their options, inputs and comparisons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_kernels import GradScaler, testing
from amp_kernels.optim import FusedAdam, FusedAdamW
from amp_kernels.testing.updates import UPDATES

# By optimizer: torch's, of one optimizer for each family and of all of them, and options.
TORCH = {update.optimizer: update.torch for update in UPDATES.values()}
OF_TORCH = {**TORCH, FusedAdamW: torch.optim.AdamW}
EXAMPLES = {
    update.optimizer: {name: {"lr": update.lr, **options} for name, options in update.examples.items()}
    for update in UPDATES.values()
}
EXAMPLES[FusedAdamW] = {
    name: {key: value for key, value in options.items() if key != "decoupled_weight_decay"}  # as it always is
    for name, options in EXAMPLES[FusedAdam].items()
    if name != "decoupled"
}
# Every state that a family can have is there.
FULL = {optimizer: examples["full"] for optimizer, examples in EXAMPLES.items()}
# Where a family has it, a first step under which the momentum buffer is not dampened.
DAMPENED = {optimizer: examples.get("dampening", examples["full"]) for optimizer, examples in EXAMPLES.items()}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ALL = list(DTYPES.values())
STATES = tuple(dict.fromkeys(name for update in UPDATES.values() for name in update.family.states))
# Of one element torch's error may happen to be 0, and twice that is no yardstick.
SHAPES = ((40, 9), (257,), (33, 129), (2, 3, 5, 11))

families = pytest.mark.parametrize("family", TORCH, ids=UPDATES)
optimizers = pytest.mark.parametrize("family", OF_TORCH, ids=[*UPDATES, "adamw"])
examples = pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(o, options, id=f"{o.__name__}-{name}")
        for o, every in EXAMPLES.items()
        for name, options in every.items()
    ],
)
dtypes = pytest.mark.parametrize("dtype", ALL, ids=DTYPES)
low_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@functools.lru_cache(maxsize=1000)
def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
    return _numbers(shape, seed).to(device, dtype, copy=True)


def parameters(
    dtypes: Sequence[torch.dtype], device: Any, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(randn(*shape, seed=i, dtype=dtypes[i % len(dtypes)], device=device))
        for i, shape in enumerate(shapes)
    ]


def set_grads(params: Sequence[Tensor], step: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> None:
    """New gradient tensors, the same for the same step."""
    for i, p in enumerate(params):
        grad = scale * randn(*p.shape, seed=1000 * step + i)
        p.grad = grad.to(p.device, p.dtype if dtype is None else dtype)


def copies(params: Sequence[Tensor], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(dtype, copy=True)) for p in params]


def give_grads(params: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    for p, q in zip(params, to, strict=True):
        q.grad = None if p.grad is None else p.grad.detach().to(q.dtype, copy=True)


def fp32(optimizer: Any, param: Tensor) -> Tensor:
    """What the update is computed on: the master, or the fp32 parameter."""
    return optimizer.master(param)


def assert_within_rule(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    theirs: Sequence[Tensor],
    truth: Sequence[Tensor],
) -> None:
    """The error rule, and 16-bit weights that are what their masters round to."""
    for i, (p, q, t) in enumerate(zip(params, theirs, truth, strict=True)):
        error, allowed = testing.common.error_and_allowed(fp32(optimizer, p), q, t)
        if 0 < p.numel() < 100:
            allowed += 1e-6
        assert error <= allowed, f"parameter {i}: {error} > {allowed}"
        assert_rounded(optimizer, [p])


def assert_rounded(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    for p in params:
        assert torch.equal(p.detach(), fp32(optimizer, p).to(p.dtype))
        assert ("remainder" in optimizer.state[p]) == (p.dtype is not torch.float32)


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all parameters and their states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state_dict()  # brings the step counts up to date
    states = [v for p in params for k, v in sorted(optimizer.state.get(p, {}).items())]
    return [t.detach().clone() for t in (*params, *states)]


def assert_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Bit for bit."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


class Pair:
    """The same training with ours and, on fp32 and on fp64 copies of the parameters, with torch's."""

    def __init__(
        self, family: type, params: list[torch.nn.Parameter], max_grad_norm: float | None = None, **options: Any
    ) -> None:
        self.params, self.max_grad_norm = params, max_grad_norm
        self.ours = family(params, max_grad_norm=max_grad_norm, **options)
        self.copies = [copies(params, dtype) for dtype in (torch.float32, torch.float64)]
        options["lr"] = float(options["lr"])
        self.theirs = [OF_TORCH[family](ps, **options) for ps in self.copies]
        self.norm: Tensor | None = None  # before clipping, by torch in fp64

    def add_param_group(self, params: list[torch.nn.Parameter], **options: Any) -> None:
        self.params = [*self.params, *params]
        self.ours.add_param_group({"params": params, **options})
        for ps, optimizer in zip(self.copies, self.theirs, strict=True):
            added = copies(params, ps[0].dtype)
            ps += added
            optimizer.add_param_group({"params": added, **options})

    def step(self) -> None:
        self.step_theirs()
        self.ours.step()

    def step_theirs(self) -> None:
        for ps, optimizer in zip(self.copies, self.theirs, strict=True):
            give_grads(self.params, ps)
            if self.max_grad_norm is not None:
                self.norm = torch.nn.utils.clip_grad_norm_(ps, self.max_grad_norm)
            optimizer.step()

    def check(self) -> None:
        assert_within_rule(self.ours, self.params, *self.copies)


def step_under(optimizer: torch.optim.Optimizer, found_inf: float, grad_scale: float | None = None) -> None:
    """A step as torch.amp.GradScaler makes it."""
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.found_inf = torch.tensor(found_inf, device=device)
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale, device=device)
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale


def started(device: torch.device, kind: type = GradScaler, **options: Any) -> Any:
    """A scaler that has scaled a loss."""
    scaler = kind(device.type, **{"init_scale": 4.0, **options})
    scaler.scale(torch.zeros((), device=device))
    return scaler


stock = functools.partial(started, kind=torch.amp.GradScaler)


def stocks(dtypes: Sequence[torch.dtype], device: torch.device) -> list[torch.dtype]:
    """Those of gradients that torch's own scaler checks: on CUDA not bf16 (pytorch#127176; so in torch 2.11)."""
    return [dtype for dtype in dtypes if _checks(dtype, device.type)]


@functools.cache
def _checks(dtype: torch.dtype, device: str) -> bool:
    one = torch.ones(1, device=device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([one.to(dtype)], torch.zeros_like(one), one)
    except NotImplementedError:
        return False
    return True


def iterate(
    scaler: Any, optimizer: torch.optim.Optimizer, step: int, overflow: bool = False, unscale: bool = False
) -> None:
    """A step with new gradients and the update of the scale."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    set_grads(params, step, scale=scaler.get_scale())
    if overflow:
        params[1].grad.view(-1)[0] = torch.inf
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


class Operators(TorchDispatchMode):
    """Collects the names of operators that are called from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


WAITS = ("item", "tolist", "__bool__", "cpu", "__int__", "__float__", "__index__", "numpy", "nonzero")


@contextlib.contextmanager
def waits_raise(device: torch.device, monkeypatch: pytest.MonkeyPatch, first: bool = False) -> Iterator[None]:
    """On a GPU also those inside of torch. The first step may make its table of Python numbers."""

    def wait(*_: Any, **__: Any) -> None:
        raise AssertionError("waits for the device")

    with monkeypatch.context() as patch:
        for name in WAITS:
            if not (first and name == "tolist"):
                patch.setattr(torch.Tensor, name, wait)
        if device.type == "cpu":  # Here the scaler reads a flag that is on the host already, to warn of skips.
            patch.setattr(GradScaler, "_warn_of_skips", lambda *_: None)
        if device.type == "cuda" and not first:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
