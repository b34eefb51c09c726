"""FusedAccelerator in accelerate's own loop: as accelerate's Accelerator with torch's default optimizer."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from accelerate_clients import SCALE
from accelerate_clients import Loop as AnyLoop
from fp16_on_a_cpu import allow_fp16
from training import (
    FP32,
    MIXED,
    assert_close,
    assert_same_bits,
    cross_entropy,
    families,
    masters,
    on_masters,
    ours,
    torchs,
)

from amp_kernels import GradScaler
from amp_kernels.integrations.accelerate import (
    FusedAcceleratedOptimizer,
    FusedAccelerator,
    FusedGradScalerKwargs,
)
from amp_kernels.optim import FusedAdamW, FusedSGD, ema_


@pytest.fixture(autouse=True)
def fp16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_fp16(monkeypatch, init_scale=SCALE)


Loop = functools.partial(AnyLoop, kind=FusedAccelerator, scaler=None)
theirs = functools.partial(AnyLoop, kind=Accelerator, scaler=None)


@families
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("precision", "tolerance"), [("no", FP32), ("bf16", MIXED), ("fp16", MIXED)])
def test_precisions(family: type, clip: float | None, accumulation: int, precision: str, tolerance: float) -> None:
    options: dict[str, Any] = {"accumulation": accumulation, "clip": clip}
    want = theirs(torchs(family), precision, **options).epoch().weights
    assert_close(Loop(ours(family), precision, **options).epoch().weights, want, tolerance)


@families
@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_inside_the_step(family: type, accumulation: int) -> None:
    want = theirs(torchs(family), "fp16", clip=0.1, accumulation=accumulation).epoch().weights
    got = Loop(ours(family, max_grad_norm=0.1), "fp16", accumulation=accumulation).epoch().weights
    assert_close(got, want, MIXED)


@families
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.bfloat16, "no"), (torch.float16, "no"), (torch.float16, "fp16")]
)
def test_16_bit_weights(family: type, dtype: torch.dtype, precision: str) -> None:
    """torch's scaler refuses fp16 gradients, so the run with a scaler is compared with one without."""
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        theirs(torchs(family), "fp16", dtype=torch.float16).epoch()
    want = theirs(on_masters(family), "no", dtype=dtype).epoch()
    got = Loop(ours(family), precision, dtype=dtype).epoch()
    assert_close(masters(got.optimizer), masters(want.optimizer), MIXED)


@families
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
def test_skips(family: type, accumulation: int, clip: float | None) -> None:
    """A skipped step moves neither weights nor learning rate, and `step_was_skipped` says so at once."""
    overflow_at, options = (1, 4, 5), {"accumulation": accumulation, "clip": clip}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's on a scheduler that steps before its optimizer
        got = Loop(ours(family), "fp16", **options).epoch(overflow_at)
    want = theirs(torchs(family), "fp16", **options).epoch(overflow_at)
    assert got.skips == want.skips
    assert any(got.skips)
    assert got.accelerator.scaler.get_scale() == want.accelerator.scaler.get_scale() < SCALE
    assert got.schedule.get_last_lr() == want.schedule.get_last_lr()
    assert_close(got.weights, want.weights, MIXED)


def test_a_skip_is_known_until_the_next_step() -> None:
    """Also after `accelerator.clip_grad_norm_` has looked at the gradients of the next step."""
    answers = []
    for loop in (theirs(torchs(FusedSGD), "fp16"), Loop(ours(FusedSGD), "fp16")):
        skips = []
        for batch, factor in zip(loop.loader, (torch.inf, 1, 1), strict=False):
            loop.accelerator.backward(cross_entropy(loop.model, batch) * factor)
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)
            skips.append(loop.optimizer.step_was_skipped)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            skips.append(loop.optimizer.step_was_skipped)
        answers.append(skips)
    assert answers[1] == answers[0] == [False, True, True, False, False, False]


def test_the_host_does_not_read_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's own wrapper makes the scaler read it in each step."""
    for kind, reads in ((Accelerator, 1), (FusedAccelerator, 0)):
        loop = Loop(ours(FusedSGD), "fp16", kind=kind)
        loop.accelerator.scaler = scaler = loop.optimizer.scaler = GradScaler("cpu", init_scale=SCALE)
        found: list[Any] = []
        step = scaler._maybe_opt_step  # the only place where a scaler reads the verdict on the host
        monkeypatch.setattr(scaler, "_maybe_opt_step", lambda *a, found=found, step=step: (found.append(a), step(*a)))
        (batch, *_) = loop.loader
        loop.accelerator.backward(cross_entropy(loop.model, batch))
        before = [p.grad.clone() for p in loop.model.parameters()]
        loop.optimizer.step()
        after = [p.grad for p in loop.model.parameters()]
        assert len(found) == reads, kind
        assert all(map(torch.equal, before, after)) == (kind is FusedAccelerator), "the step wrote gradients"


@pytest.mark.parametrize(
    ("handlers", "scale", "most"),
    [
        ([], SCALE, float("inf")),
        ([GradScalerKwargs(init_scale=4.0, growth_interval=7)], 4.0, float("inf")),
        ([FusedGradScalerKwargs(init_scale=4.0, growth_interval=7, max_scale=2.0)], 2.0, 2.0),
    ],
    ids=["default", "accelerates", "fused"],
)
def test_the_options_of_the_scaler(handlers: list[Any], scale: float, most: float) -> None:
    scaler = Loop(ours(FusedSGD), "fp16", handlers=handlers).accelerator.scaler
    assert type(scaler) is GradScaler
    assert scaler.get_scale() == scale
    assert scaler.state_dict()["max_scale"] == most
    assert scaler.get_growth_interval() == (7 if handlers else 2000)


def test_there_is_no_scaler_without_fp16() -> None:
    assert Loop(ours(FusedSGD), "bf16").accelerator.scaler is None


def test_a_scaler_may_be_switched_off() -> None:
    handlers = [GradScalerKwargs(enabled=False)]
    want = theirs(torchs(FusedSGD), "fp16", handlers=handlers).epoch().weights
    got = Loop(ours(FusedSGD), "fp16", handlers=handlers).epoch()
    assert not got.accelerator.scaler.is_enabled()
    assert_close(got.weights, want, MIXED)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GradScaler: max_scale must be a number above 0, got -1"):
        Loop(ours(FusedSGD), "fp16", handlers=[FusedGradScalerKwargs(max_scale=-1.0)])
    with pytest.raises(ValueError, match="only pass one"):
        Loop(ours(FusedSGD), "fp16", handlers=[FusedGradScalerKwargs(), GradScalerKwargs()])


def test_other_optimizers_train_as_under_accelerate() -> None:
    want = theirs(torchs(FusedSGD), "fp16").epoch((2,))
    got = Loop(torchs(FusedSGD), "fp16").epoch((2,))
    assert got.skips == want.skips
    assert_close(got.weights, want.weights, FP32)


def test_an_optimizer_is_wrapped_once() -> None:
    loop = Loop(ours(FusedSGD), "fp16")
    assert type(loop.optimizer) is FusedAcceleratedOptimizer
    assert type(loop.optimizer.optimizer) is FusedSGD
    assert loop.accelerator.prepare(loop.optimizer) is loop.optimizer
    assert loop.accelerator._optimizers == [loop.optimizer]


@families
@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}, {"precision": "fp16", "dtype": torch.float16}], ids=str)
def test_resume_is_bit_equal(tmp_path: Path, family: type, options: dict[str, Any]) -> None:
    whole = Loop(ours(family), **options).epoch(overflow_at=(3,) if "precision" in options else ())
    whole.accelerator.save_state(str(tmp_path))
    whole.epoch()
    again = Loop(ours(family), **options)
    again.accelerator.load_state(str(tmp_path))
    again.epoch()
    assert_same_bits(again.weights, whole.weights)
    assert_same_bits(again.optimizer.state_dict(), whole.optimizer.state_dict())
    if scaler := whole.accelerator.scaler:
        assert again.accelerator.scaler.state_dict() == scaler.state_dict()


def test_moving_average() -> None:
    """`ema_` leaves the averages as they are in a skipped step."""
    loop = Loop(functools.partial(FusedAdamW, lr=0.01), "fp16")
    params = list(loop.model.parameters())
    averages = [loop.optimizer.optimizer.master(p) for p in params]
    wanted = [a.clone() for a in averages]
    for i, batch in enumerate(loop.loader):
        loop.accelerator.backward(cross_entropy(loop.model, batch) * (torch.inf if i == 2 else 1))
        loop.optimizer.step()
        ema_(averages, loop.optimizer.optimizer, decay=0.5)
        if i != 2:
            torch._foreach_lerp_(wanted, params, 0.5)
        loop.optimizer.zero_grad()
    assert_close(*({str(i): t for i, t in enumerate(ts)} for ts in (averages, wanted)), FP32)
