"""ignite: its supervised trainer with our optimizers and scaler, its schedules, checkpoints and search for a rate."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import (
    FastaiLRFinder,
    LinearCyclicalScheduler,
    LRScheduler,
    ModelCheckpoint,
    create_lr_scheduler_with_warmup,
)
from torch.optim.lr_scheduler import ExponentialLR
from training import (
    FP32,
    MIXED,
    OPTIONS,
    OnMasters,
    assert_close,
    assert_same_bits,
    classifier,
    families,
    low_dtypes,
    masters,
    on_masters,
    ours,
    samples,
    torchs,
    weights,
)

import amp_kernels
from amp_kernels.optim import FusedSGD, SkipAwareScheduler

BATCHES = 8


def loss_of(y_pred: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(y_pred.float(), y)


class Run:
    """A model, its optimizer and ignite's trainer. `amp` is the dtype of autocast, which ignite has for GPUs alone.

    With a scaler the third batch of each epoch is NaN, so its step is skipped.
    """

    def __init__(
        self, make: Any, dtype: torch.dtype = torch.float32, amp: torch.dtype | None = None, scaler: Any = None,
        **how: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.model = classifier().to(dtype)
        self.optimizer, self.scaler = make(self.model.parameters()), scaler
        self.rates: list[float] = []

        def forward(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", amp, enabled=amp is not None):
                return model(x)

        how |= {"amp_mode": "amp", "scaler": scaler} if scaler else {}
        self.trainer = create_supervised_trainer(self.model, self.optimizer, loss_of, model_fn=forward, **how)
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: self.rates.append(self.optimizer.param_groups[0]["lr"])
        )

    def train(self, epochs: int = 2) -> Run:
        x, y = samples(next(self.model.parameters()).dtype)
        if self.scaler:
            x[16:24] = torch.nan
        self.trainer.run(list(zip(x.split(8), y.split(8), strict=True)), max_epochs=epochs)
        return self

    def to_save(self) -> dict[str, Any]:
        objects = {"model": self.model, "optimizer": self.optimizer, "trainer": self.trainer, "scaler": self.scaler}
        return {name: each for name, each in objects.items() if each is not None}


@families
@pytest.mark.parametrize("how", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulation"])
def test_fp32(family: type, how: dict[str, Any]) -> None:
    run, theirs = (Run(make(family), **how).train() for make in (ours, torchs))
    assert_close(weights(run.model), weights(theirs.model), FP32)


@families
@low_dtypes
def test_16_bit_weights_have_masters(family: type, dtype: torch.dtype) -> None:
    run, theirs = (Run(make(family), dtype).train() for make in (ours, on_masters))
    assert isinstance(theirs.optimizer, OnMasters)
    assert_close(masters(run.optimizer), masters(theirs.optimizer), MIXED)


@families
@low_dtypes
def test_a_scaler_skips_where_torchs_does(family: type, dtype: torch.dtype) -> None:
    pairs = (ours, amp_kernels.GradScaler), (torchs, torch.amp.GradScaler)
    run, theirs = (Run(make(family), amp=dtype, scaler=kind("cpu", init_scale=1024.0)).train() for make, kind in pairs)
    assert int(run.scaler.skipped_steps) == 2
    assert run.scaler.get_scale() == theirs.scaler.get_scale()
    assert_close(weights(run.model), weights(theirs.model), MIXED)


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "fp16-weights-scaled"])
def test_resume_is_bit_equal(scaled: bool, tmp_path: Path) -> None:
    """ModelCheckpoint writes all objects into one file, and puts them back in place."""

    def make() -> Run:
        how = {"dtype": torch.float16, "scaler": amp_kernels.GradScaler("cpu", init_scale=64.0)} if scaled else {}
        return Run(ours(FusedSGD), **how)

    whole = make()
    saver = ModelCheckpoint(str(tmp_path), "run")
    whole.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), saver, whole.to_save())
    whole.train()
    again = make()
    ModelCheckpoint.load_objects(again.to_save(), torch.load(saver.last_checkpoint))
    again.train()
    assert len(again.rates) == BATCHES == len(whole.rates) // 2
    assert_same_bits(weights(again.model), weights(whole.model))
    assert_same_bits(again.optimizer.state_dict(), whole.optimizer.state_dict())
    assert not scaled or again.scaler.state_dict() == whole.scaler.state_dict()


def of_torch(optimizer: Any) -> Any:
    return LRScheduler(ExponentialLR(optimizer, 0.9))


def with_warmup(optimizer: Any) -> Any:
    return create_lr_scheduler_with_warmup(ExponentialLR(optimizer, 0.9), 0.01, 4)


def of_ours(optimizer: Any) -> Any:
    """ignite reads and writes the attributes of the scheduler inside."""
    scheduler = ExponentialLR(optimizer, 0.9)
    return LRScheduler(SkipAwareScheduler(scheduler) if isinstance(optimizer, FusedSGD) else scheduler)


SCHEDULES = {
    "torch": of_torch,
    "skip-aware": of_ours,
    "warmup": with_warmup,
    "cyclical": functools.partial(
        LinearCyclicalScheduler, param_name="lr", start_value=0.1, end_value=0.01, cycle_size=8
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_ignites_schedules(schedule: Any) -> None:
    runs = [Run(make(FusedSGD)) for make in (ours, torchs)]
    for run in runs:
        run.trainer.add_event_handler(Events.ITERATION_STARTED, schedule(run.optimizer))
        run.train()
    assert runs[0].rates == runs[1].rates and len(set(runs[0].rates)) > BATCHES // 2
    assert_close(weights(runs[0].model), weights(runs[1].model), FP32)


def test_a_schedule_of_steps_that_were_not_skipped() -> None:
    """Its `step` is the handler. ignite's LRScheduler counts by itself, and never calls `step`."""
    run = Run(ours(FusedSGD), amp=torch.float16, scaler=amp_kernels.GradScaler("cpu", init_scale=1024.0))
    scheduler = SkipAwareScheduler(ExponentialLR(run.optimizer, 0.5))
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    run.train(1)
    first = OPTIONS[FusedSGD]["lr"]
    # A learning rate comes one iteration late.
    assert scheduler.get_last_lr() == [first * 0.5 ** (BATCHES - 2)]


def test_a_search_for_a_rate_leaves_no_trace() -> None:
    run = Run(ours(FusedSGD), torch.bfloat16)
    run.train(1)
    before = weights(run.model), copy.deepcopy(run.optimizer.state_dict())
    finder = FastaiLRFinder()
    with finder.attach(run.trainer, {"model": run.model, "optimizer": run.optimizer}, num_iter=6) as search:
        assert isinstance(search, Engine)
        x, y = samples(torch.bfloat16)
        search.run(list(zip(x.split(8), y.split(8), strict=True)))
    assert len(finder.get_results()["lr"]) > 1
    assert_same_bits(weights(run.model), before[0])
    assert_same_bits(run.optimizer.state_dict(), before[1])
