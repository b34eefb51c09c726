"""Lightning's Trainer, automatic and manual, and its Fabric: as torch's default optimizer in the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch.optim.swa_utils import get_ema_avg_fn
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
OVERFLOW_AT = (1, 4)
TOLERANCES = {"32-true": FP32, "bf16-mixed": MIXED, "16-mixed": MIXED}
precisions = pytest.mark.parametrize("precision", TOLERANCES)
scalers = pytest.mark.parametrize("scaler", [torch.amp.GradScaler, GradScaler], ids=["torch-scaler", "our-scaler"])


def batches() -> DataLoader:
    return DataLoader(TensorDataset(*samples()), batch_size=8)


class Automatic(LightningModule):
    def __init__(self, make: Make, overflow_at: tuple[int, ...] = (), compiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.make, self.overflow_at = classifier(), make, overflow_at
        if compiled:
            self.layers.compile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        return cross_entropy(self, batch) * (torch.inf if index in self.overflow_at else 1)

    def validation_step(self, batch: Any, index: int) -> None:
        cross_entropy(self, batch)


class Manual(Automatic):
    """`scaler`: one of the user's, which steps what `self.optimizers()` returns, an object that wraps the optimizer."""

    def __init__(self, make: Make, overflow_at: tuple[int, ...] = (), scaler: Any = None, clip: float = 0) -> None:
        super().__init__(make, overflow_at)
        self.automatic_optimization = False
        self.scaler, self.clip = scaler, clip

    def training_step(self, batch: Any, index: int) -> None:
        optimizer, loss = self.optimizers(), super().training_step(batch, index)
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            if self.clip:
                self.scaler.unscale_(optimizer)
                self.clip_gradients(optimizer, self.clip)
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            self.manual_backward(loss)
            if self.clip:
                self.clip_gradients(optimizer, self.clip)
            optimizer.step()
        optimizer.zero_grad()


def trainer(folder: Path, precision: str = "32-true", **options: Any) -> Trainer:
    if precision == "16-mixed":  # as Lightning makes it, but with a scale from which not every step overflows
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    else:
        options["precision"] = precision
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    settings = {"enable_checkpointing": False, "max_epochs": 1, "limit_val_batches": 0} | options
    return Trainer(default_root_dir=folder, accelerator="cpu", **quiet, **settings)


def fit(folder: Path, module: Automatic, *args: Any, ckpt_path: Path | None = None, **options: Any) -> Automatic:
    torch.manual_seed(1)
    trainer(folder, *args, **options).fit(module, batches(), batches(), ckpt_path=ckpt_path)
    return module


# ---------------------------------------------------------------------------------------------------------- the Trainer
@families
@precisions
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0, 0.1], ids=["plain", "clipped"])
def test_automatic(tmp_path: Path, family: type, precision: str, accumulation: int, clip: float) -> None:
    """Lightning's mixed precision clips for no optimizer that unscales: there ours clips inside the step."""
    options: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": accumulation}
    want = fit(tmp_path, Automatic(torchs(family)), **options, gradient_clip_val=clip)
    if precision == "32-true":
        got = fit(tmp_path, Automatic(ours(family)), **options, gradient_clip_val=clip)
    else:
        got = fit(tmp_path, Automatic(ours(family, max_grad_norm=clip or None)), **options)
    assert_close(weights(got), weights(want), TOLERANCES[precision])


@families
def test_clipping_inside_the_step(tmp_path: Path, family: type) -> None:
    want = fit(tmp_path, Automatic(torchs(family)), gradient_clip_val=0.1)
    got = fit(tmp_path, Automatic(ours(family, max_grad_norm=0.1)))
    assert_close(weights(got), weights(want), FP32)


@pytest.mark.parametrize(
    "make", [ours(FusedSGD), lambda p: torch.optim.SGD(p, fused=True)], ids=["ours", "torch-fused"]
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_refuses_to_clip(tmp_path: Path, precision: str, make: Make) -> None:
    """Also without a scaler, as with torch's fused optimizer. README: `max_grad_norm`."""
    module = Automatic(make)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping because it performs unscaling"):
        fit(tmp_path, module, precision, gradient_clip_val=0.1)
    assert_same_bits(weights(module), weights(Automatic(make)))


@families
@low_dtypes
@pytest.mark.parametrize("clip", [0, 0.1], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_16_bit_weights(tmp_path: Path, family: type, dtype: torch.dtype, clip: float, kind: type) -> None:
    name = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}[dtype]
    by_trainer, by_module = ({}, {"clip": clip}) if kind is Manual else ({"gradient_clip_val": clip}, {})
    want, got = (fit(tmp_path, kind(make(family), **by_module), name, **by_trainer) for make in (on_masters, ours))
    assert weights(got)["layers.0.weight"].dtype is dtype
    assert_close(masters(got.trainer.optimizers[0]), masters(want.trainer.optimizers[0]), MIXED)


@families
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_overflow(tmp_path: Path, family: type, kind: type) -> None:
    want, got = (fit(tmp_path, kind(make(family), OVERFLOW_AT), "16-mixed") for make in (torchs, ours))
    scales = [module.trainer.precision_plugin.scaler.get_scale() for module in (want, got)]
    assert scales == [SCALE / 4, SCALE / 4]
    assert_close(weights(got), weights(want), MIXED)


@families
@precisions
def test_manual(tmp_path: Path, family: type, precision: str) -> None:
    want, got = (fit(tmp_path, Manual(make(family)), precision) for make in (torchs, ours))
    assert_close(weights(got), weights(want), TOLERANCES[precision])


@families
@scalers
@pytest.mark.parametrize("clip", [0, 0.1], ids=["plain", "clipped"])
def test_scaler_of_the_user_in_manual_optimization(tmp_path: Path, family: type, scaler: type, clip: float) -> None:
    """It steps an object that delegates to the optimizer, and sees only that."""
    modules = []
    for make, kind in ((torchs, torch.amp.GradScaler), (ours, scaler)):
        its = kind("cpu", init_scale=SCALE)
        modules.append(fit(tmp_path, Manual(make(family), OVERFLOW_AT, its, clip)))
        assert its.get_scale() == SCALE / 4
    assert_close(weights(modules[1]), weights(modules[0]), FP32)


@families
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_resume_is_bit_equal(tmp_path: Path, family: type, precision: str, kind: type) -> None:
    callback = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": callback}
    whole = fit(tmp_path, kind(ours(family)), precision, **options)
    again = fit(tmp_path, kind(ours(family)), precision, max_epochs=2, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_same_bits(weights(again), weights(whole))
    states = [module.trainer.optimizers[0].state_dict() for module in (again, whole)]
    assert_same_bits(*states)
    assert states[0]["state"][0]["step"] == 16


def averaging() -> WeightAveraging:
    """Not with `multi_avg_fn`: Lightning copies the model before it rounds it, and that takes one dtype."""
    return WeightAveraging(avg_fn=get_ema_avg_fn(0.5))


@families
def test_moving_average(tmp_path: Path, family: type) -> None:
    """Lightning's callback validates with the average, puts the weights back, and ends with the average."""
    options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 4}
    plain = fit(tmp_path, Automatic(ours(family)))
    want, got = (fit(tmp_path, Automatic(make(family)), callbacks=averaging(), **options) for make in (torchs, ours))
    assert_close(weights(got), weights(want), FP32)
    assert not torch.equal(got.layers[0].weight, plain.layers[0].weight)


@low_dtypes
def test_moving_average_of_16_bit_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """The callback swaps weights for averages and back through `.data`: every step finds the masters that it left. In
    the end the weights are the averages, and masters follow them."""
    name = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}[dtype]
    options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 4}
    plain = fit(tmp_path, Automatic(ours(FusedSGD)), name)
    averaged = fit(tmp_path, Automatic(ours(FusedSGD)), name, callbacks=averaging(), **options)
    optimizers = [module.trainer.optimizers[0] for module in (averaged, plain)]
    assert_same_bits(*([dict(state) for state in optimizer.state.values()] for optimizer in optimizers))
    for p in averaged.parameters():
        assert torch.equal(optimizers[0].master(p).to(dtype), p)
    assert not torch.equal(averaged.layers[0].weight, plain.layers[0].weight)


def test_compiled_model(tmp_path: Path) -> None:
    want, got = (fit(tmp_path, Automatic(make(FusedSGD), compiled=True)) for make in (torchs, ours))
    assert_close(weights(got), weights(want), FP32)


# ------------------------------------------------------------------------------------------------------------- Fabric
class Loop:
    """`scaler`: the user's, which steps what `setup()` returns; under "16-mixed" it is Fabric's."""

    def __init__(self, make: Make, precision: str = "32-true", *, scaler: Any = None, compiled: bool = False) -> None:
        torch.manual_seed(0)
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if scaler is None else scaler
            self.fabric = Fabric(accelerator="cpu", plugins=FabricMixedPrecision("16-mixed", "cpu", scaler))
            self.scaler = None
        else:
            self.fabric = Fabric(accelerator="cpu", precision=precision)
            self.scaler = scaler
        model = classifier()
        if precision in ("bf16-true", "16-true"):
            model.to({"bf16-true": torch.bfloat16, "16-true": torch.float16}[precision])
        optimizer = make(model.parameters())
        self.model, self.optimizer = self.fabric.setup(torch.compile(model) if compiled else model, optimizer)
        self.loader = self.fabric.setup_dataloaders(batches())

    def epoch(self, *, accumulation: int = 1, clip: float = 0, overflow_at: tuple[int, ...] = ()) -> Loop:
        for i, batch in enumerate(self.loader):
            is_last = (i + 1) % accumulation == 0
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                loss = cross_entropy(self.model, batch) * (torch.inf if i in overflow_at else 1)
                self.fabric.backward(loss if self.scaler is None else self.scaler.scale(loss))
            if not is_last:
                continue
            if clip:
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=clip, error_if_nonfinite=False)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
        return self

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.model)


@families
@precisions
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0, 0.1], ids=["plain", "clipped"])
def test_fabric(family: type, precision: str, accumulation: int, clip: float) -> None:
    want = Loop(torchs(family), precision).epoch(accumulation=accumulation, clip=clip)
    if precision == "16-mixed":  # as in the Trainer; Fabric clips without a scaler
        got = Loop(ours(family, max_grad_norm=clip or None), precision).epoch(accumulation=accumulation)
    else:
        got = Loop(ours(family), precision).epoch(accumulation=accumulation, clip=clip)
    assert_close(got.weights, want.weights, TOLERANCES[precision])


def test_fabric_with_a_scaler_refuses_to_clip() -> None:
    loop = Loop(ours(FusedSGD), "16-mixed")
    before = loop.weights
    with pytest.raises(NotImplementedError, match="Gradient clipping is not implemented for optimizers handling"):
        loop.epoch(clip=0.1)
    assert_same_bits(loop.weights, before)


@families
@scalers
def test_overflow_in_fabric(family: type, scaler: type) -> None:
    want, got = (
        Loop(make(family), "16-mixed", scaler=kind("cpu", init_scale=SCALE)).epoch(overflow_at=OVERFLOW_AT)
        for make, kind in ((torchs, torch.amp.GradScaler), (ours, scaler))
    )
    assert_close(got.weights, want.weights, MIXED)


@families
@scalers
@pytest.mark.parametrize("clip", [0, 0.1], ids=["plain", "clipped"])
@pytest.mark.parametrize("overflow_at", [(), OVERFLOW_AT], ids=["finite", "overflow"])
def test_scaler_of_the_user_in_fabric(family: type, scaler: type, clip: float, overflow_at: tuple[int, ...]) -> None:
    want, got = (
        Loop(make(family), scaler=kind("cpu", init_scale=SCALE)).epoch(clip=clip, overflow_at=overflow_at)
        for make, kind in ((torchs, torch.amp.GradScaler), (ours, scaler))
    )
    assert got.scaler.get_scale() == want.scaler.get_scale() == SCALE / 2 ** len(overflow_at)
    assert_close(got.weights, want.weights, FP32)


@families
@low_dtypes
@pytest.mark.parametrize("clip", [0, 0.1], ids=["plain", "clipped"])
def test_16_bit_weights_in_fabric(family: type, dtype: torch.dtype, clip: float) -> None:
    name = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}[dtype]
    want, got = (Loop(make(family), name).epoch(clip=clip) for make in (on_masters, ours))
    assert_close(masters(got.optimizer), masters(want.optimizer), MIXED)


@families
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_resume_in_fabric_is_bit_equal(tmp_path: Path, family: type, precision: str) -> None:
    whole = Loop(ours(family), precision).epoch()
    whole.fabric.save(tmp_path / "saved", {"model": whole.model, "optimizer": whole.optimizer})
    again = Loop(ours(family), precision)
    again.fabric.load(tmp_path / "saved", {"model": again.model, "optimizer": again.optimizer})
    assert_same_bits(again.weights, whole.weights)
    whole.epoch()
    again.epoch()
    assert_same_bits(again.weights, whole.weights)
    assert_same_bits(again.optimizer.state_dict(), whole.optimizer.state_dict())


def test_moving_average_in_fabric() -> None:
    averages = []
    for make in (torchs, ours):
        loop = Loop(make(FusedSGD))
        averaged = average(loop.model.module)
        for _ in range(2):
            loop.epoch()
            averaged.update_parameters(loop.model.module)
        averages.append(weights(averaged))
    assert_close(averages[1], averages[0], FP32)


def test_compiled_model_in_fabric() -> None:
    want, got = (Loop(make(FusedSGD), compiled=True).epoch() for make in (torchs, ours))
    assert_close(got.weights, want.weights, FP32)
