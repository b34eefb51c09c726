"""accelerate's own loop: as torch's default optimizer in the same loop.

On a CPU accelerate has no fp16: there its scaler and autocast are switched on as it does it on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset
from training import (
    FP32,
    MIXED,
    Make,
    assert_close,
    assert_same_bits,
    average,
    classifier,
    cross_entropy,
    families,
    low_dtypes,
    masters,
    on_masters,
    ours,
    samples,
    torchs,
    weights,
)

from amp_kernels import GradScaler
from amp_kernels.optim import FusedSGD

SCALE = 2.0**10
scalers = pytest.mark.parametrize("scaler", [torch.amp.GradScaler, GradScaler], ids=["torch-scaler", "our-scaler"])


class Loop:
    """An epoch is 8 batches; `overflow_at` names batches that are infinite."""

    def __init__(
        self, make: Make, precision: str = "no", *, dtype: torch.dtype = torch.float32, accumulation: int = 1,
        clip: float | None = None, scaler: type | None = torch.amp.GradScaler, compiled: bool = False,
        kind: type[Accelerator] = Accelerator, handlers: Any = (),
    ) -> None:  # fmt: skip
        """With `scaler` None and fp16, the accelerator must have a scaler of its own."""
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        self.clip = clip
        backend = {"dynamo_backend": "inductor"} if compiled else {}
        self.accelerator = kind(
            cpu=True,
            mixed_precision=precision,
            gradient_accumulation_steps=accumulation,
            kwargs_handlers=list(handlers),
            **backend,
        )
        if precision == "fp16" and scaler is not None:
            self.accelerator.native_amp, self.accelerator.scaler = True, scaler("cpu", init_scale=SCALE)
        model = classifier().to(dtype)
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = DataLoader(TensorDataset(*samples(dtype)), batch_size=8)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.model_inside = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self.skips: list[bool] = []

    def epoch(self, overflow_at: tuple[int, ...] = (), averaged: Any = None) -> Loop:
        for i, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model, batch)
                self.accelerator.backward(loss * (torch.inf if i in overflow_at else 1))
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.skips.append(self.optimizer.step_was_skipped)
                self.schedule.step()
                self.optimizer.zero_grad()
            if averaged is not None:
                averaged.update_parameters(self.model_inside)
        return self

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.model_inside)


@families
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("precision", "tolerance"), [("no", FP32), ("bf16", MIXED), ("fp16", MIXED)])
def test_precisions(family: type, clip: float | None, accumulation: int, precision: str, tolerance: float) -> None:
    options: dict[str, Any] = {"accumulation": accumulation, "clip": clip}
    want = Loop(torchs(family), precision, **options).epoch().weights
    assert_close(Loop(ours(family), precision, **options).epoch().weights, want, tolerance)


@families
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_clipping_inside_the_step(family: type, precision: str) -> None:
    want = Loop(torchs(family), precision, clip=0.1).epoch().weights
    got = Loop(ours(family, max_grad_norm=0.1), precision).epoch().weights
    assert_close(got, want, FP32 if precision == "no" else MIXED)


@families
@low_dtypes
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
def test_16_bit_weights(family: type, dtype: torch.dtype, clip: float | None) -> None:
    want, got = (Loop(make(family), dtype=dtype, clip=clip).epoch() for make in (on_masters, ours))
    assert_close(masters(got.optimizer), masters(want.optimizer), MIXED)


@families
@scalers
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
def test_overflow(family: type, scaler: type, clip: float | None) -> None:
    """accelerate tells a skip by whether `step` was called; a skipped step moves neither weights nor learning rate."""
    overflow_at = (1, 4, 5)
    want = Loop(torchs(family), "fp16", clip=clip).epoch(overflow_at)
    got = Loop(ours(family), "fp16", clip=clip, scaler=scaler).epoch(overflow_at)
    assert want.skips == [i in overflow_at for i in range(8)]
    assert got.skips == want.skips
    assert got.accelerator.scaler.get_scale() == want.accelerator.scaler.get_scale() == SCALE / 8
    assert got.schedule.get_last_lr() == want.schedule.get_last_lr()
    assert_close(got.weights, want.weights, MIXED)


@families
def test_step_was_not_skipped_without_overflow(family: type) -> None:
    assert Loop(ours(family), "fp16").epoch().skips == [False] * 8


@families
@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"dtype": torch.bfloat16}], ids=str
)
def test_resume_is_bit_equal(tmp_path: Path, family: type, options: dict[str, Any]) -> None:
    whole = Loop(ours(family), **options).epoch(overflow_at=(3,) if options.get("precision") == "fp16" else ())
    whole.accelerator.save_state(str(tmp_path))
    before = whole.weights
    whole.epoch()
    again = Loop(ours(family), **options)
    again.accelerator.load_state(str(tmp_path))
    assert_same_bits(again.weights, before)
    again.epoch()
    assert_same_bits(again.weights, whole.weights)
    assert_same_bits(again.optimizer.state_dict(), whole.optimizer.state_dict())
    if scaler := whole.accelerator.scaler:
        assert again.accelerator.scaler.state_dict() == scaler.state_dict()


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_training_goes_on_from_the_moving_average(family: type, dtype: torch.dtype) -> None:
    """Masters follow what is loaded into 16-bit weights."""
    ends = []
    for make in (torchs if dtype is torch.float32 else on_masters, ours):
        loop = Loop(make(family), dtype=dtype)
        averaged = average(loop.model_inside)
        loop.epoch(averaged=averaged)
        assert not torch.equal(averaged.module[0].weight, loop.model_inside[0].weight)
        loop.model_inside.load_state_dict(averaged.module.state_dict())
        if isinstance(loop.optimizer.optimizer, on_masters(family).func):
            loop.optimizer.optimizer.reload()
        ends.append(loop.epoch().optimizer)
    if dtype is torch.float32:
        assert_close(*({str(i): p for i, p in enumerate(o.param_groups[0]["params"])} for o in reversed(ends)), FP32)
    else:
        assert_close(masters(ends[1]), masters(ends[0]), MIXED)


def test_compiled_model() -> None:
    want = Loop(torchs(FusedSGD), compiled=True).epoch().weights
    assert_close(Loop(ours(FusedSGD), compiled=True).epoch().weights, want, FP32)


def test_the_optimizer_stays_ours() -> None:
    optimizer = Loop(ours(FusedSGD)).optimizer
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert type(optimizer.optimizer) is FusedSGD
