"""amp_kernels.integrations.lightning: the precision plugin, the average of masters, the monitor and schedulers."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_clients import Automatic, Manual, batches
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    MIXED,
    Make,
    assert_close,
    assert_same_bits,
    cross_entropy,
    families,
    masters,
    on_masters,
    ours,
    torchs,
    weights,
)

from amp_kernels import GradScaler
from amp_kernels.integrations.lightning import FusedEMA, FusedPrecision, OptimizerMonitor
from amp_kernels.optim import FusedSGD, SkipAwareScheduler, fp32_state_dict, load_fp32_state_dict

SCALE = 2.0**10
CLIP = 0.1
DECAY = 0.75
OVERFLOW_AT = (0, 4)
precisions = pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "16-true", "bf16-true"])
clips = pytest.mark.parametrize("clip", [0, CLIP], ids=["plain", "clipped"])
mixed = pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])


def plugin(precision: str, kind: type = GradScaler) -> FusedPrecision:
    """With a scale from which not every step overflows."""
    return FusedPrecision(precision, kind("cpu", init_scale=SCALE) if precision.startswith("16") else None)


def lightnings(precision: str) -> Precision:
    if precision.endswith("true"):
        return HalfPrecision(precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if precision == "16-mixed" else None
    return MixedPrecision(precision, "cpu", scaler)


def trainer(folder: Path, plugin: Precision | None, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    settings = {**quiet, "enable_checkpointing": False, "max_epochs": 1, "limit_val_batches": 0} | options
    return Trainer(default_root_dir=folder, accelerator="cpu", plugins=plugin, **settings)


def fit(folder: Path, module: Any, plugin: Precision | None, *, ckpt_path: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(1)
    trainer(folder, plugin, **options).fit(module, batches(), batches(), ckpt_path=ckpt_path)
    return module


def optimizer_of(module: Any) -> Any:
    return module.trainer.optimizers[0]


def bits(module: Any) -> list[Any]:
    """Two equal runs agree in these: weights, states with the rest of the masters, scaler."""
    return [weights(module), optimizer_of(module).state_dict(), module.trainer.precision_plugin.state_dict()]


# ------------------------------------------------------------------------------------------------ training and clipping
@families
@precisions
@pytest.mark.parametrize("accumulation", [1, 2])
@clips
def test_trains_and_clips(tmp_path: Path, family: type, precision: str, accumulation: int, clip: float) -> None:
    """As torch's default optimizer under Lightning's own plugin. 16-bit weights: as torch's on fp32 copies."""
    options = {"accumulate_grad_batches": accumulation, "gradient_clip_val": clip}
    got = fit(tmp_path, Automatic(ours(family)), plugin(precision), **options)
    if precision.endswith("mixed"):
        want = fit(tmp_path, Automatic(torchs(family)), lightnings(precision), **options)
        assert_close(weights(got), weights(want), MIXED)
    else:
        want = fit(tmp_path, Automatic(on_masters(family)), lightnings(precision), **options)
        assert_close(masters(optimizer_of(got)), masters(optimizer_of(want)), MIXED)
    assert optimizer_of(got).max_grad_norm is None


@families
@precisions
def test_clips_as_max_grad_norm_does(
    tmp_path: Path, family: type, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and without torch's clipping, which would be another pass over the gradients."""
    own = fit(tmp_path, Automatic(ours(family, max_grad_norm=CLIP)), plugin(precision))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", None)
    by_trainer = fit(tmp_path, Automatic(ours(family)), plugin(precision), gradient_clip_val=CLIP)
    both = fit(tmp_path, Automatic(ours(family, max_grad_norm=CLIP)), plugin(precision), gradient_clip_val=CLIP)
    assert_same_bits(weights(by_trainer), weights(own))
    assert_same_bits(bits(both), bits(own))


def test_another_max_grad_norm_is_refused(tmp_path: Path) -> None:
    module = Automatic(ours(FusedSGD, max_grad_norm=1.0))
    with pytest.raises(ValueError, match=r"gradient_clip_val must be the max_grad_norm of FusedSGD, which is 1.0, got"):
        fit(tmp_path, module, plugin("16-mixed"), gradient_clip_val=CLIP)
    assert_same_bits(weights(module), weights(Automatic(ours(FusedSGD))))
    assert optimizer_of(module).max_grad_norm == 1.0


@families
@mixed
def test_clips_by_value(tmp_path: Path, family: type, precision: str) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    want = fit(tmp_path, Automatic(torchs(family)), lightnings(precision), **options)
    got = fit(tmp_path, Automatic(ours(family)), plugin(precision), **options)
    assert_close(weights(got), weights(want), MIXED)


class Looks(Callback):
    def __init__(self) -> None:
        self.norms: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()]))


class ClipsItself(Automatic):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)


@clips
def test_hooks_see_unscaled_gradients(tmp_path: Path, clip: float) -> None:
    callbacks = Looks(), Looks()
    makes = [(torchs(FusedSGD), lightnings("16-mixed")), (ours(FusedSGD), plugin("16-mixed"))]
    want, got = (
        fit(tmp_path, Automatic(make), its, callbacks=[looks], gradient_clip_val=clip)
        for (make, its), looks in zip(makes, callbacks, strict=True)
    )
    torch.testing.assert_close(callbacks[1].norms, callbacks[0].norms, rtol=MIXED, atol=0)
    assert_close(weights(got), weights(want), MIXED)


def test_own_clipping_sees_unscaled_gradients(tmp_path: Path) -> None:
    want = fit(tmp_path, ClipsItself(torchs(FusedSGD)), lightnings("16-mixed"))
    got = fit(tmp_path, ClipsItself(ours(FusedSGD)), plugin("16-mixed"))
    assert_close(weights(got), weights(want), MIXED)


class ClipsTwice(Automatic):
    """Between the two, reads the norm and changes the gradients."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.norms: list[torch.Tensor] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 2 * CLIP, "norm")
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))
        for param in self.layers[0].parameters():
            param.grad.mul_(4)
        self.clip_gradients(optimizer, 3 * CLIP, "norm")


@mixed
def test_clipping_in_a_hook_of_the_module_is_done_at_once(tmp_path: Path, precision: str) -> None:
    want = fit(tmp_path, ClipsTwice(torchs(FusedSGD)), lightnings(precision))
    got = fit(tmp_path, ClipsTwice(ours(FusedSGD)), plugin(precision))
    torch.testing.assert_close(got.norms, want.norms, rtol=MIXED, atol=0)
    assert_close(weights(got), weights(want), MIXED)


class AddsGroup(Automatic):
    """Trains another layer from the third batch on."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.layers[1:].parameters())

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        if index == 2:
            optimizer_of(self).add_param_group({"params": list(self.layers[0].parameters())})
        return super().training_step(batch, index)


@mixed
def test_group_that_a_training_step_adds(tmp_path: Path, precision: str) -> None:
    want = fit(tmp_path, AddsGroup(torchs(FusedSGD)), lightnings(precision), gradient_clip_val=CLIP)
    got = fit(tmp_path, AddsGroup(ours(FusedSGD)), plugin(precision), gradient_clip_val=CLIP)
    assert_close(weights(got), weights(want), MIXED)
    assert [group["max_grad_norm"] for group in optimizer_of(got).param_groups] == [None, None]


class SetsNorm(Automatic):
    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        optimizer_of(self).max_grad_norm = CLIP
        return super().training_step(batch, index)


@mixed
def test_max_grad_norm_that_a_training_step_sets(tmp_path: Path, precision: str) -> None:
    want = fit(tmp_path, Automatic(ours(FusedSGD, max_grad_norm=CLIP)), plugin(precision))
    got = fit(tmp_path, SetsNorm(ours(FusedSGD)), plugin(precision))
    assert_same_bits(weights(got), weights(want))
    assert optimizer_of(got).max_grad_norm == CLIP


class Two(Manual):
    """Two optimizers. Each clips and steps in every batch."""

    def configure_optimizers(self) -> Any:
        return [self.make(self.layers[0].parameters()), self.make(self.layers[1:].parameters())]

    def training_step(self, batch: Any, index: int) -> None:
        loss = Automatic.training_step(self, batch, index)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            if self.clip:
                self.clip_gradients(optimizer, self.clip)
            optimizer.step()


@families
@precisions
@clips
@pytest.mark.parametrize("kind", [Manual, Two])
def test_manual_optimization(tmp_path: Path, family: type, precision: str, clip: float, kind: type) -> None:
    """Lightning's own plugin clips scaled gradients here, so fp16 is compared with its bf16 plugin or without."""
    if precision.endswith("mixed"):
        make, reference = torchs(family), None
    else:
        make, reference = on_masters(family), lightnings(precision)
    want = fit(tmp_path, kind(make, clip=clip), reference)
    got = fit(tmp_path, kind(ours(family), clip=clip), plugin(precision))
    for one, other in zip(got.trainer.optimizers, want.trainer.optimizers, strict=True):
        if precision.endswith("true"):
            assert_close(masters(one), masters(other), MIXED)
    assert_close(weights(got), weights(want), 2 * MIXED)


class Closures(Two):
    """Clips inside of a closure, where the step is in progress."""

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()[0]

        def closure() -> None:
            optimizer.zero_grad()
            self.manual_backward(cross_entropy(self, batch))
            self.clip_gradients(optimizer, CLIP)

        optimizer.step(closure=closure)


@mixed
def test_closure_in_manual_optimization(tmp_path: Path, precision: str) -> None:
    want = fit(tmp_path, Closures(torchs(FusedSGD)), None)
    got = fit(tmp_path, Closures(ours(FusedSGD)), plugin(precision))
    assert_close(weights(got), weights(want), MIXED)


class ClipsBoth(Two):
    """Clips for both optimizers, and then steps both."""

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(Automatic.training_step(self, batch, index))
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, CLIP)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class ClipsEach(Manual):
    """Clips after each backward pass, and steps after every second one."""

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(Automatic.training_step(self, batch, index))
        self.clip_gradients(self.optimizers(), CLIP)
        if index % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@precisions
@pytest.mark.parametrize(
    ("kind", "says"), [(ClipsBoth, "the step of another optimizer"), (ClipsEach, "a backward pass")]
)
def test_manual_step_must_follow_its_clipping(tmp_path: Path, precision: str, kind: type, says: str) -> None:
    """Under a scaler: otherwise gradients would be divided twice, or scaled ones added to unscaled ones."""
    module = kind(ours(FusedSGD))
    if precision.startswith("16"):
        with pytest.raises(RuntimeError, match=f"gradients must be scaled before {says}, got unscaled ones of"):
            fit(tmp_path, module, plugin(precision))
        assert_same_bits(weights(module), weights(kind(ours(FusedSGD)).to(module.dtype)))
    elif precision == "bf16-mixed":
        want = fit(tmp_path, kind(torchs(FusedSGD)), None)
        assert_close(weights(fit(tmp_path, module, plugin(precision))), weights(want), 2 * MIXED)


@precisions
@clips
def test_torch_optimizer_trains_as_under_the_plugin_of_lightning(tmp_path: Path, precision: str, clip: float) -> None:
    """Bits are equal except with "16-true", where Lightning has no scaler."""
    want = fit(tmp_path, Automatic(torchs(FusedSGD)), lightnings(precision), gradient_clip_val=clip)
    got = fit(tmp_path, Automatic(torchs(FusedSGD)), plugin(precision), gradient_clip_val=clip)
    if precision == "16-true":
        assert_close(weights(got), weights(want), MIXED)
    else:
        assert_same_bits(weights(got), weights(want))


@mixed
def test_fused_optimizer_of_torch_clips(tmp_path: Path, precision: str) -> None:
    """Which Lightning refuses."""
    make: Make = lambda params: torch.optim.SGD(params, lr=0.1, fused=True)  # noqa: E731
    default: Make = lambda params: torch.optim.SGD(params, lr=0.1, foreach=False)  # noqa: E731
    want = fit(tmp_path, Automatic(default), lightnings(precision), gradient_clip_val=CLIP)
    got = fit(tmp_path, Automatic(make), plugin(precision), gradient_clip_val=CLIP)
    assert_close(weights(got), weights(want), MIXED)


class Skips(Automatic):
    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        return None if index in (0, 3) else super().training_step(batch, index)


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
ACCUMULATED = {"accumulate_grad_batches": 2}


@mixed
@pytest.mark.parametrize("make", [ours, torchs])
@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": CLIP}, {"gradient_clip_val": CLIP, **ACCUMULATED}, {**BY_VALUE, **ACCUMULATED}],
    ids=["norm", "accumulated-norm", "accumulated-value"],
)
def test_no_loss(tmp_path: Path, precision: str, make: Any, options: dict[str, Any]) -> None:
    """In batches without a loss there is no step under a scaler. Otherwise there is one with the gradients so far."""
    want = fit(tmp_path, Skips(torchs(FusedSGD)), lightnings(precision), **options)
    got = fit(tmp_path, Skips(make(FusedSGD)), plugin(precision), **options)
    assert_close(weights(got), weights(want), MIXED)


@mixed
def test_disabled_scaler(tmp_path: Path, precision: str) -> None:
    """Does nothing, and clipping does not ask it."""
    its = FusedPrecision(precision, GradScaler("cpu", enabled=False) if precision == "16-mixed" else None)
    want = fit(tmp_path, Automatic(torchs(FusedSGD)), lightnings("bf16-mixed"), **BY_VALUE)
    assert_close(weights(fit(tmp_path, Automatic(ours(FusedSGD)), its, **BY_VALUE)), weights(want), 2 * MIXED)


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="AMP and the LBFGS optimizer are not compatible"):
        fit(tmp_path, Automatic(torch.optim.LBFGS), plugin("16-mixed"))


class Sharded(Automatic):
    def configure_model(self) -> None:
        for layer in (self.layers[0], self.layers[1], self.layers[3]):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Lightning sets LOCAL_RANK. accelerate would later look for a launcher."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
@pytest.mark.usefixtures("own_environment")
def test_sharded_parameters(tmp_path: Path, precision: str) -> None:
    """FSDP2 in one process. There `max_grad_norm` raises an error, so the plugin clips by torch's function."""
    overflow_at = OVERFLOW_AT if precision == "16-mixed" else ()
    options: dict[str, Any] = {"gradient_clip_val": CLIP, "use_distributed_sampler": False, "devices": 1}
    want = fit(tmp_path, Automatic(ours(FusedSGD), overflow_at), plugin(precision), **options)
    try:
        strategies = [ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1) for _ in range(2)]
        options["strategy"] = strategies[0]
        got = fit(tmp_path, Sharded(ours(FusedSGD), overflow_at), plugin(precision), **options)
        assert all(isinstance(param, DTensor) for param in got.parameters())
        whole = {name: param.full_tensor().detach() for name, param in got.named_parameters()}
        assert_close(whole, weights(want), MIXED)
        options |= {"strategy": strategies[1], "callbacks": [FusedEMA()]}
        with pytest.raises(TypeError, match="FusedEMA: parameters must not be sharded, got a DTensor"):
            fit(tmp_path, Sharded(ours(FusedSGD)), plugin(precision), **options)
    finally:
        dist.destroy_process_group()


class OverflowsOnOneRank(Automatic):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        factor = torch.inf if index in OVERFLOW_AT and self.global_rank == self.trainer.world_size - 1 else 1
        return cross_entropy(self, batch) * factor

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["world_size"] = self.trainer.world_size


@pytest.mark.usefixtures("own_environment")
def test_two_processes(tmp_path: Path) -> None:
    """Both get the same batches, so their weights are those of one process. Both skip an overflow of one."""
    options: dict[str, Any] = {
        "gradient_clip_val": CLIP,
        "use_distributed_sampler": False,
        "enable_checkpointing": True,
    }
    runs = []
    # Not "ddp_fork": a fork of a process whose threads hold locks may wait for ever.
    for name, more in (("one", {}), ("two", {"strategy": "ddp_spawn", "devices": 2})):
        saves = ModelCheckpoint(tmp_path, name)
        its = [saves, FusedEMA(DECAY)]
        fit(tmp_path, OverflowsOnOneRank(ours(FusedSGD)), plugin("16-mixed"), callbacks=its, **options, **more)
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        runs.append([saved[key] for key in ("state_dict", "optimizer_states", "FusedPrecision", "ema_state_dict")])
    assert_same_bits(runs[1], runs[0])
    assert saved["world_size"] == 2
    assert runs[0][2]["skipped_steps"] == 2


@pytest.mark.parametrize(
    ("error", "arguments", "says"),
    [
        (ValueError, ("32-true",), "precision must be one of 16-mixed, bf16-mixed, 16-true, bf16-true, got '32-true'"),
        (ValueError, ("bf16-true", GradScaler("cpu")), "scaler must be None with bf16-true"),
        (TypeError, ("16-true", "cpu"), "scaler must be a torch.amp.GradScaler, got a str"),
    ],
)
def test_errors_of_the_plugin(error: type, arguments: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        FusedPrecision(*arguments)


# --------------------------------------------------------------------------------------------------- skipping and scale
@families
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler], ids=["torch-scaler", "our-scaler"])
@clips
def test_skips(tmp_path: Path, family: type, kind: type, clip: float) -> None:
    options = {"gradient_clip_val": clip}
    want = fit(tmp_path, Automatic(torchs(family), OVERFLOW_AT), lightnings("16-mixed"), **options)
    got = fit(tmp_path, Automatic(ours(family), OVERFLOW_AT), plugin("16-mixed", kind), **options)
    assert [module.trainer.scaler.get_scale() for module in (want, got)] == [SCALE / 4, SCALE / 4]
    assert_close(weights(got), weights(want), MIXED)


class Faint(Automatic):
    """Its gradients round to 0 in fp16."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return super().training_step(batch, index) * 2.0**-30

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return FusedSGD(self.parameters(), lr=0.1 * 2.0**30)


def test_small_gradients_of_16_bit_weights(tmp_path: Path) -> None:
    begin = weights(Automatic(ours(FusedSGD)).half())
    lost = fit(tmp_path, Faint(ours(FusedSGD)), lightnings("16-true"))
    kept = fit(tmp_path, Faint(ours(FusedSGD)), FusedPrecision("16-true", GradScaler("cpu", init_scale=2.0**30)))
    want = fit(tmp_path, Automatic(ours(FusedSGD, momentum=0, nesterov=False, weight_decay=0)), plugin("16-true"))
    assert_same_bits(weights(lost), begin)
    assert_close(weights(kept), weights(want), MIXED)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_scaler_is_made_for_the_device(tmp_path: Path, precision: str) -> None:
    module = fit(tmp_path, Automatic(ours(FusedSGD)), FusedPrecision(precision))
    assert type(module.trainer.scaler) is GradScaler and "device='cpu'" in repr(module.trainer.scaler)


# ----------------------------------------------------------------------------------------------------------- schedulers
class Scheduled(Automatic):
    def __init__(self, make: Make, interval: str) -> None:
        super().__init__(make, overflow_at=(0,))
        self.interval, self.rates = interval, []

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def false_warnings(run: Callable[[], Any]) -> tuple[Any, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, sum("lr_scheduler.step()" in str(warning.message) for warning in caught)


@families
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_under_skips(tmp_path: Path, family: type, interval: str) -> None:
    """A step that the device skips was called, so torch does not warn. One that the host skips was not."""
    options = {"max_epochs": 2, "limit_train_batches": 1 if interval == "epoch" else 1.0}
    run = lambda make, its: false_warnings(lambda: fit(tmp_path, Scheduled(make, interval), its, **options))  # noqa: E731
    want, warned = run(torchs(family), lightnings("16-mixed"))
    got, falsely = run(ours(family), plugin("16-mixed"))
    assert (warned, falsely) == (1, 0)
    assert got.rates == want.rates and len(set(got.rates)) > 1
    assert_close(weights(got), weights(want), MIXED)


class ScheduledBySkips(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizers, (options,) = super().configure_optimizers()
        return optimizers, [{**options, "scheduler": SkipAwareScheduler(options["scheduler"])}]


def test_scheduler_that_does_not_count_skips(tmp_path: Path) -> None:
    """In each of two epochs one step of eight is skipped. A resumed run goes on where the checkpoint was saved."""
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": CLIP}
    whole = ScheduledBySkips(ours(FusedSGD), "step")
    fit(tmp_path, whole, plugin("16-mixed"), callbacks=[saves], enable_checkpointing=True, **options)
    counts = [0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 12, 13]  # one late, so the last step of 14 is missing
    assert whole.rates == pytest.approx([0.1 * 0.8**count for count in counts])
    again = ScheduledBySkips(ours(FusedSGD), "step")
    fit(tmp_path, again, plugin("16-mixed"), ckpt_path=tmp_path / "epoch=0.ckpt", **options)
    assert again.rates == whole.rates[8:]
    assert_same_bits(bits(again), bits(whole))


# ---------------------------------------------------------------------------------------------------------- checkpoints
@families
@precisions
def test_resume_is_bit_equal(tmp_path: Path, family: type, precision: str) -> None:
    """Weights, states, scaler and averages, with clipping, skips and validation."""
    options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": CLIP, "val_check_interval": 4}
    options["limit_val_batches"] = 1
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    make = lambda: Automatic(ours(family), OVERFLOW_AT if precision.startswith("16") else ())  # noqa: E731
    averages = FusedEMA(DECAY), FusedEMA(DECAY)
    whole = fit(
        tmp_path, make(), plugin(precision), enable_checkpointing=True, callbacks=[saves, averages[0]], **options
    )
    path = tmp_path / "epoch=0.ckpt"
    again = fit(tmp_path, make(), plugin(precision), ckpt_path=path, callbacks=[averages[1]], **options)
    assert_same_bits(bits(again), bits(whole))
    assert_same_bits(*[list(one._averages.values()) for one in averages])
    if precision.startswith("16"):
        assert again.trainer.precision_plugin.state_dict()["skipped_steps"] == 4


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
@pytest.mark.parametrize("direction", ["from Lightning's", "to Lightning's"])
def test_resume_with_the_other_plugin(tmp_path: Path, precision: str, direction: str) -> None:
    """As one run under the plugin that resumes: the scaler goes on from the scale that the other plugin saved."""
    first, second = (lightnings, plugin) if direction == "from Lightning's" else (plugin, lightnings)
    overflow_at = OVERFLOW_AT if precision.startswith("16") else ()
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": saves}
    whole = fit(tmp_path, Automatic(ours(FusedSGD), overflow_at), first(precision), **options)
    path = tmp_path / "epoch=0.ckpt"
    again = fit(tmp_path, Automatic(ours(FusedSGD), overflow_at), second(precision), max_epochs=2, ckpt_path=path)
    assert_same_bits(bits(again)[:2], bits(whole)[:2])
    if precision == "16-mixed":
        assert again.trainer.scaler.get_scale() == SCALE / 16


class SavesMasters(Automatic):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.optimizers:  # there are none in `validate` and `test`
            (optimizer,) = self.trainer.optimizers
            checkpoint["state_dict"] = fp32_state_dict(self, optimizer)

    def test_step(self, batch: Any, index: int) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "tested.ckpt")


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_saves_fp32_weights(tmp_path: Path, precision: str) -> None:
    """The recipe of the guide: also with `save_weights_only`, and a full checkpoint resumes bit-equal."""
    saves = [
        ModelCheckpoint(tmp_path, "full-{epoch}", save_top_k=-1),
        ModelCheckpoint(tmp_path, "weights-{epoch}", save_weights_only=True, every_n_epochs=2),
    ]
    options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": CLIP}
    make = lambda: SavesMasters(ours(FusedSGD))  # noqa: E731
    whole = fit(tmp_path, make(), plugin(precision), callbacks=saves, enable_checkpointing=True, **options)
    again = fit(tmp_path, make(), plugin(precision), ckpt_path=tmp_path / "full-epoch=0.ckpt", **options)
    assert_same_bits(bits(again), bits(whole))

    saved = torch.load(tmp_path / "weights-epoch=1.ckpt", weights_only=True)["state_dict"]
    want = fp32_state_dict(whole, optimizer_of(whole))
    assert_same_bits(dict(saved), dict(want))
    fresh = Automatic(ours(FusedSGD)).to(whole.dtype)
    optimizer = fresh.configure_optimizers()
    load_fp32_state_dict(fresh, optimizer, saved)
    assert_same_bits(masters(optimizer), masters(optimizer_of(whole)))

    tested = make()
    trainer(tmp_path, plugin(precision), limit_test_batches=1).test(tested, batches(), verbose=False)
    saved = torch.load(tmp_path / "tested.ckpt", weights_only=True)["state_dict"]
    assert_same_bits(dict(saved), weights(tested))


# ---------------------------------------------------------------------------------------------------------- the monitor
class Memory(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.setdefault(step, {}).update(metrics)


class CountReads(TorchDispatchMode):
    """Counts how often the host reads a tensor, which on a GPU waits for the device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_logs(tmp_path: Path) -> None:
    looks, memory = Looks(), Memory()
    callbacks = [OptimizerMonitor(), looks]
    options: dict[str, Any] = {"logger": memory, "log_every_n_steps": 2, "gradient_clip_val": CLIP}
    fit(tmp_path, Automatic(ours(FusedSGD), OVERFLOW_AT), plugin("16-mixed"), callbacks=callbacks, **options)
    got = {step: row for step, row in memory.rows.items() if "grad_norm" in row}
    assert list(got) == [1, 3, 5, 7]
    assert [row["skipped_steps"] for row in got.values()] == [1, 1, 2, 2]
    assert [row["loss_scale"] for row in got.values()] == [SCALE / 2, SCALE / 2, SCALE / 4, SCALE / 4]
    for step, row in got.items():
        assert row["grad_norm"] == pytest.approx(float(looks.norms[step]), rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("bf16-mixed", {"grad_norm-0", "grad_norm-1"}),
        ("16-mixed", {"grad_norm-0", "grad_norm-1", "loss_scale", "skipped_steps"}),
    ],
)
def test_logs_of_several_optimizers(tmp_path: Path, precision: str, names: set[str]) -> None:
    module = fit(tmp_path, Two(ours(FusedSGD, max_grad_norm=CLIP)), plugin(precision), callbacks=[OptimizerMonitor()])
    assert module.trainer.callback_metrics.keys() == names


def test_steps_that_are_not_logged_do_not_wait(tmp_path: Path) -> None:
    counts = []
    for callbacks, every in (([], 1), ([OptimizerMonitor()], 100), ([OptimizerMonitor()], 1)):
        with CountReads() as reads:
            options: dict[str, Any] = {"logger": Memory(), "log_every_n_steps": every}
            fit(tmp_path, Automatic(ours(FusedSGD)), plugin("16-mixed"), callbacks=callbacks, **options)
        counts.append(reads.count)
    assert counts[1] == counts[0] < counts[2]


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_steps_do_not_wait_for_the_verdict(tmp_path: Path, kind: type) -> None:
    """With torch's scaler, since on a CPU amp_kernels.GradScaler reads the verdict to count skips in a row."""
    counts = []
    for its in (plugin("bf16-mixed"), plugin("16-mixed", torch.amp.GradScaler)):
        with CountReads() as reads:
            fit(tmp_path, kind(ours(FusedSGD, max_grad_norm=CLIP)), its)
        counts.append(reads.count)
    assert counts[0] == counts[1]


# ----------------------------------------------------------------------------------------------- the average of masters
class Watches(Automatic):
    """Remembers the masters after each step, and the weights in evaluation."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[list[torch.Tensor]] = []
        self.evaluated: list[dict[str, torch.Tensor]] = []

    def on_train_start(self) -> None:
        self.look()

    def look(self) -> None:
        optimizer = optimizer_of(self)
        self.seen.append([optimizer.master(param) for param in self.parameters()])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look()  # after each step but the last, and once more at the beginning

    def on_train_end(self) -> None:
        self.look()

    def validation_step(self, batch: Any, index: int) -> None:
        self.evaluated.append(weights(self))

    test_step = predict_step = validation_step


def by_hand(seen: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    averages = [master.clone() for master in seen[0]]
    for before, after in itertools.pairwise(seen):
        if any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            for average, master in zip(averages, after, strict=True):
                average.lerp_(master, 1 - DECAY)
    return averages


@families
@precisions
@pytest.mark.parametrize("accumulation", [1, 2])
def test_average_is_of_the_masters(tmp_path: Path, family: type, precision: str, accumulation: int) -> None:
    """One update for each optimizer step that was not skipped, and evaluation with the rounded averages."""
    ema = FusedEMA(DECAY)
    module = Watches(ours(family), (0, 4) if precision.startswith("16") else ())
    options: dict[str, Any] = {"limit_val_batches": 1, "accumulate_grad_batches": accumulation}
    fit(tmp_path, module, plugin(precision), callbacks=[ema], gradient_clip_val=CLIP, **options)
    want = by_hand(module.seen)
    for got, wanted in zip(ema._averages.values(), want, strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    (evaluated,) = module.evaluated[-1:]
    expected = {name: ema._averages[p].to(p.dtype) for name, p in module.named_parameters()}
    assert_same_bits(evaluated, expected)


@families
@precisions
def test_averages_do_not_change_the_training(tmp_path: Path, family: type, precision: str) -> None:
    """To the bit: weights and masters come back from each evaluation, in training and afterwards."""
    options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 3, "gradient_clip_val": CLIP}
    plain = fit(tmp_path, Watches(ours(family)), plugin(precision), **options)
    module = fit(tmp_path, Watches(ours(family)), plugin(precision), callbacks=[FusedEMA(DECAY)], **options)
    assert_same_bits(bits(module), bits(plain))
    assert_same_bits(module.seen, plain.seen)
    before = bits(module)
    module.evaluated.clear()
    for run in (module.trainer.test, module.trainer.validate, module.trainer.predict):
        run(module, batches(), verbose=False) if run.__name__ != "predict" else run(module, batches())
        assert_same_bits(bits(module)[0], before[0])
    assert len(module.evaluated) == 2 * len(batches()) + 1
    first, *others = module.evaluated
    for other in others:
        assert_same_bits(other, first)
    assert any(not torch.equal(first[name], value) for name, value in before[0].items())


class Saves(Automatic):
    """Saves checkpoints in the midst of validation, where the averages are in place of the weights."""

    def validation_step(self, batch: Any, index: int) -> None:
        for name, weights_only in (("amid", False), ("weights", True)):
            path = Path(self.trainer.default_root_dir) / f"{name}.ckpt"
            self.trainer.save_checkpoint(path, weights_only=weights_only)


class LeavesOut(Saves):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "bias" not in name}


@pytest.mark.parametrize("kind", [Saves, LeavesOut])
def test_checkpoints_amid_validation(tmp_path: Path, kind: type) -> None:
    """A full one holds the weights. One of the weights only holds the averages, since callbacks are not asked."""
    ema = FusedEMA(DECAY)
    module = fit(tmp_path, kind(ours(FusedSGD)), plugin("bf16-true"), callbacks=[ema], limit_val_batches=1)
    saved = torch.load(tmp_path / "amid.ckpt", weights_only=True)
    assert_same_bits(dict(saved["state_dict"]), {name: weights(module)[name] for name in module.state_dict()})
    averages = {name: ema._averages[param] for name, param in module.named_parameters()}
    assert_same_bits(saved["ema_state_dict"], averages)
    rounded = {name: averages[name].bfloat16() for name in module.state_dict()}
    assert_same_bits(dict(torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]), rounded)


class SavesAtTheEnd(Automatic):
    """Saves when validation is over, but the averages are still in place of the weights."""

    def on_validation_epoch_end(self) -> None:
        path = Path(self.trainer.default_root_dir) / f"{self.trainer.state.fn.value}-{self.trainer.current_epoch}.ckpt"
        if not self.trainer.sanity_checking:
            self.trainer.save_checkpoint(path)


@families
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_resumes_from_the_end_of_validation(tmp_path: Path, family: type, precision: str) -> None:
    """The optimizer saves the masters of its weights, not those that the averages would give."""
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 1}
    averages, saves = (FusedEMA(DECAY), FusedEMA(DECAY)), ModelCheckpoint(tmp_path, "after-{epoch}", save_top_k=-1)
    whole = fit(
        tmp_path, SavesAtTheEnd(ours(family)), plugin(precision), enable_checkpointing=True,
        callbacks=[averages[0], saves], **options,
    )  # fmt: skip
    during, after = (torch.load(tmp_path / name) for name in ("fit-0.ckpt", "after-epoch=0.ckpt"))
    for part in ("state_dict", "optimizer_states", "ema_state_dict"):
        assert_same_bits(during[part], after[part])
    again = SavesAtTheEnd(ours(family))
    fit(tmp_path, again, plugin(precision), ckpt_path=tmp_path / "fit-0.ckpt", callbacks=[averages[1]], **options)
    assert_same_bits(bits(again), bits(whole))
    assert_same_bits(*[list(one._averages.values()) for one in averages])


def test_an_optimizer_that_is_saved_in_a_validation_after_training(tmp_path: Path) -> None:
    """The trainer keeps the optimizer of the training. Validation leaves no hooks in it."""
    module = fit(tmp_path, SavesAtTheEnd(ours(FusedSGD)), plugin("bf16-true"), callbacks=[FusedEMA(DECAY)])
    optimizer = optimizer_of(module)
    before = optimizer.state_dict()
    module.trainer.limit_val_batches = 1
    module.trainer.validate(module, batches(), verbose=False)
    (saved,) = torch.load(tmp_path / "validate-1.ckpt")["optimizer_states"] or [before]
    assert_same_bits(saved, before)
    assert_same_bits(optimizer.state_dict(), before)
    assert not optimizer._optimizer_state_dict_pre_hooks and not optimizer._optimizer_state_dict_post_hooks


def test_checkpoint_evaluates_with_its_averages(tmp_path: Path) -> None:
    """In another process, so to say: a new module and a new callback."""
    ema = FusedEMA(DECAY)
    saves = ModelCheckpoint(tmp_path, "saved")
    fit(tmp_path, Watches(ours(FusedSGD)), plugin("bf16-true"), callbacks=[ema, saves], enable_checkpointing=True)
    fresh = Watches(ours(FusedSGD))
    its = trainer(tmp_path, plugin("bf16-true"), callbacks=[FusedEMA(DECAY)], limit_test_batches=1)
    its.test(fresh, batches(), ckpt_path=tmp_path / "saved.ckpt", verbose=False)
    for got, average in zip(fresh.evaluated[0].values(), ema._averages.values(), strict=True):
        assert torch.equal(got, average.to(torch.bfloat16))


@pytest.mark.parametrize("weights_only", [True, False], ids=["weights-only", "without-averages"])
def test_checkpoint_without_averages_evaluates_with_its_weights(tmp_path: Path, weights_only: bool) -> None:
    saves = ModelCheckpoint(tmp_path, "saved", save_weights_only=weights_only)
    fit(tmp_path, Watches(ours(FusedSGD)), plugin("bf16-true"), callbacks=[saves], enable_checkpointing=True)
    want = dict(torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"])
    options: dict[str, Any] = {"max_epochs": 3, "callbacks": [FusedEMA(DECAY)], "limit_val_batches": 1}
    module = fit(tmp_path, Watches(ours(FusedSGD)), plugin("bf16-true"), **options)
    for run in (module.trainer.test, module.trainer.validate):
        module.evaluated.clear()
        run(module, batches(), ckpt_path=tmp_path / "saved.ckpt", verbose=False)
        assert_same_bits(module.evaluated[0], want)
        assert_same_bits(weights(module), want)


def test_another_fit_begins_with_the_masters(tmp_path: Path) -> None:
    ema, module = FusedEMA(DECAY), Watches(ours(FusedSGD))
    options: dict[str, Any] = {"callbacks": [ema], "limit_val_batches": 1}
    for _ in range(2):
        module.seen.clear()
        module.evaluated.clear()
        before = weights(module.bfloat16())
        fit(tmp_path, module, plugin("bf16-true"), **options)
        assert_same_bits(module.evaluated[0], before)  # in the sanity check before training
        torch.testing.assert_close(list(ema._averages.values()), by_hand(module.seen), rtol=1e-6, atol=1e-6)


class Fails(Automatic):
    def validation_step(self, batch: Any, index: int) -> None:
        raise KeyError("in validation")


def test_weights_come_back_after_an_error(tmp_path: Path) -> None:
    plain = fit(tmp_path, Automatic(ours(FusedSGD)), plugin("bf16-true"))
    module = Fails(ours(FusedSGD))
    options: dict[str, Any] = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "callbacks": [FusedEMA(DECAY)]}
    with pytest.raises(KeyError, match="in validation"):
        fit(tmp_path, module, plugin("bf16-true"), **options)
    assert_same_bits(bits(module), bits(plain))
    assert not optimizer_of(module)._optimizer_step_post_hooks


class Unfreezes(Automatic):
    """Trains another layer from the second epoch on."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.layers[1:].parameters())

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            optimizer_of(self).add_param_group({"params": list(self.layers[0].parameters())})


def test_average_of_an_added_group_and_of_another_fit(tmp_path: Path) -> None:
    ema, module = FusedEMA(DECAY), Unfreezes(ours(FusedSGD))
    fit(tmp_path, module, plugin("bf16-mixed"), callbacks=[ema], max_epochs=2)
    assert ema._averages.keys() == set(module.parameters())
    other = fit(tmp_path, Automatic(ours(FusedSGD)), plugin("bf16-mixed"), callbacks=[ema])
    assert ema._averages.keys() == set(other.parameters())


def test_errors_of_the_average(tmp_path: Path) -> None:
    for decay, error in ((1.5, ValueError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match="FusedEMA: decay must be a number from 0 to 1, got"):
            FusedEMA(decay)
    with pytest.raises(TypeError, match=r"optimizers must be of amp_kernels.optim, got a SGD; use lightning"):
        fit(tmp_path, Automatic(torchs(FusedSGD)), plugin("bf16-mixed"), callbacks=[FusedEMA()])
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `FusedEMA`"):
        trainer(tmp_path, None, callbacks=[FusedEMA(0.9), FusedEMA(0.99)])
    saves = [FusedEMA(), ModelCheckpoint(tmp_path, "saved")]
    fit(tmp_path, Automatic(ours(FusedSGD)), plugin("bf16-mixed"), callbacks=saves, enable_checkpointing=True)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    for averages, says in (
        ({"other": torch.ones(1)}, "a parameter of the module"),
        ({"layers.3.bias": torch.ones(2)}, "of shape"),
    ):
        torch.save({**saved, "ema_state_dict": averages}, tmp_path / "other.ckpt")
        module, options = Automatic(ours(FusedSGD)), {"callbacks": [FusedEMA()], "ckpt_path": tmp_path / "other.ckpt"}
        with pytest.raises(ValueError, match=f"of the checkpoint must be {says}"):
            fit(tmp_path, module, plugin("bf16-mixed"), max_epochs=2, **options)
        assert_same_bits(weights(module), dict(saved["state_dict"]))


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_a_subclass_may_override_what_half_precision_does(precision: str) -> None:
    class Own(FusedPrecision):
        def convert_input(self, data: Any) -> Any:
            return "own"

    assert Own(precision).convert_input(torch.ones(2)) == "own"
    assert FusedPrecision(precision).convert_input(torch.ones(2)).dtype is not torch.float32
