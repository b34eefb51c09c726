"""timm: our optimizers by name, its schedulers, scaler, clipping, averages, Lookahead and checkpoints.

`Loop` is the loop of timm's training script. Ours is compared with timm's own name for torch's optimizer in it.
"""

from __future__ import annotations

import argparse
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm import optim, utils
from timm.models import load_checkpoint, resume_checkpoint
from timm.scheduler import CosineLRScheduler
from training import FP32, MIXED, OnMasters, assert_close, assert_same_bits, cross_entropy, low_dtypes, masters, weights

from amp_kernels.integrations.timm import ModelEma, NativeScaler
from amp_kernels.optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD

SCALE = 2.0**10
CLASSES = {
    "sgd": FusedSGD, "momentum": FusedSGD, "rmsprop": FusedRMSprop, "adam": FusedAdam, "adamw": FusedAdamW,
}  # fmt: skip
# Why eps is not torch's default: see OPTIONS in training.py.
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1}, "momentum": {"lr": 0.1}, "rmsprop": {"lr": 0.02, "eps": 0.1}, "adam": {"lr": 0.02, "eps": 0.1},
    "adamw": {"lr": 0.02, "eps": 0.1},
}  # fmt: skip
names = pytest.mark.parametrize("name", list(CLASSES))
some_names = pytest.mark.parametrize("name", ["sgd", "adamw"])


def vit() -> torch.nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5
    )


def scaler_of(kind: type) -> Any:
    scaler = kind("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "scale": SCALE})
    return scaler


class Loop:
    """An epoch is 8 batches. Batches in `overflow_at` have an infinite loss.

    `masters_by_hand` runs torch's optimizer on fp32 copies of 16-bit weights. `amp` is the dtype of autocast.
    """

    def __init__(
        self, name: str, *, dtype: torch.dtype = torch.float32, amp: torch.dtype | None = None,
        scaler: type | None = None, clip_grad: float | None = None, clip_mode: str = "norm",
        masters_by_hand: bool = False, accumulation: int = 1, layer_decay: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        self.batches = list(
            zip(
                torch.randn(8, 8, 3, 8, 8, generator=generator).to(dtype),
                torch.randint(5, (8, 8), generator=generator),
                strict=True,
            )
        )
        self.amp, self.clip_grad, self.clip_mode, self.accumulation = amp, clip_grad, clip_mode, accumulation
        self.model = vit().to(dtype)
        torchs = name.split("_")[-1].removeprefix("fused-")
        options = {"weight_decay": 0.05, **OPTIONS[torchs], **options}
        if masters_by_hand:
            make = functools.partial(optim.create_optimizer_v2, opt=name, foreach=False, **options)
            # A parameter group of its own for OnMasters, which takes one. A model would come with two.
            self.optimizer: Any = OnMasters(make, self.model.parameters(), None if scaler else clip_grad)
        elif dtype is torch.float32:
            options |= {"layer_decay": layer_decay, "foreach": False}
            self.optimizer = optim.create_optimizer_v2(self.model, name, **options)
        else:
            self.optimizer = optim.create_optimizer_v2(self.model.parameters(), name, **options)
        self.scheduler = CosineLRScheduler(self.optimizer, t_initial=16, warmup_t=3, t_in_epochs=False)
        self.scaler = scaler_of(scaler) if scaler else None
        self.updates = 0
        self.ema: Any = None

    def epoch(self, overflow_at: tuple[int, ...] = ()) -> Loop:
        for i, (x, y) in enumerate(self.batches):
            needs_update = (i + 1) % self.accumulation == 0
            with torch.autocast("cpu", self.amp, enabled=self.amp is not None):
                loss = cross_entropy(self.model, (x, y)) / self.accumulation
            self._backward(loss * (torch.inf if i in overflow_at else 1), needs_update)
            if not needs_update:
                continue
            self.optimizer.zero_grad()
            self.updates += 1
            if self.ema is not None:
                self.ema.update(self.model, step=self.updates)
            self.scheduler.step_update(self.updates)
        return self

    def _backward(self, loss: torch.Tensor, needs_update: bool) -> None:
        clipping = {"clip_grad": self.clip_grad, "clip_mode": self.clip_mode}
        if self.scaler is not None:
            params = self.model.parameters()
            self.scaler(loss, self.optimizer, parameters=params, need_update=needs_update, **clipping)
            return
        loss.backward()
        if needs_update:
            if self.clip_grad is not None and not isinstance(self.optimizer, OnMasters):
                utils.dispatch_clip_grad(self.model.parameters(), self.clip_grad, mode=self.clip_mode)
            self.optimizer.step()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.model)

    @property
    def scale(self) -> float:
        return self.scaler.state_dict()["scale"]


# ------------------------------------------------------------------------------------------------------- the registry
@names
def test_a_name_is_the_fused_class_with_timms_defaults(name: str) -> None:
    params = list(torch.nn.Linear(2, 2).parameters())
    theirs = optim.create_optimizer_v2(params, name)
    for ours in (f"fused-{name}", f"fused_{name}", f"Fused_{name.upper()}"):
        optimizer = optim.create_optimizer_v2(params, ours)
        assert type(optimizer) is CLASSES[name]
        assert {key: optimizer.defaults[key] for key in theirs.defaults} == theirs.defaults
    for listed in (f"fused-{name}", f"fused_{name}"):
        assert listed in optim.list_optimizers()
        assert type(optim.get_optimizer_class(listed, bind_defaults=False)(params)) is CLASSES[name]


def test_names_of_others_stay_theirs() -> None:
    params = list(torch.nn.Linear(2, 2).parameters())
    for name, kind in {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}.items():
        assert type(optim.create_optimizer_v2(params, name)) is kind
    assert optim.get_optimizer_info("fusedadamw").opt_class == "apex.optimizers.FusedAdam"


def test_options_of_the_command_line() -> None:
    """As in timm's training script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=2e-5)
    parser.add_argument("--opt-betas", type=float, nargs="+")
    parser.add_argument("--opt-kwargs", dest="opt_args", nargs="*", default={}, action=utils.ParseKwargs)
    line = "--opt fused_adamw --lr 1e-3 --opt-betas 0.8 0.99 --opt-kwargs state_dtype=int8 max_grad_norm=2"
    optimizer = optim.create_optimizer_v2(vit(), **optim.optimizer_kwargs(parser.parse_args(line.split())))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 2e-5]
    for group in optimizer.param_groups:
        assert (group["state_dtype"], group["max_grad_norm"], group["lr"]) == (torch.int8, 2, 1e-3)
        assert tuple(group["betas"]) == (0.8, 0.99)


def test_a_wrong_dtype_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"FusedAdamW: state_dtype must be torch.*int8, got 'int4'"):
        optim.create_optimizer_v2(vit(), "fused-adamw", state_dtype="int4")


# ----------------------------------------------------------------------------------------------------------- training
@names
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"layer_decay": 0.75}, FP32),
        ({"amp": torch.bfloat16, "accumulation": 2}, MIXED),
        ({"amp": torch.float16}, MIXED),
    ],
    ids=["fp32-layer-decay", "bf16-accumulation", "fp16"],
)
def test_trains(name: str, clip: float | None, options: dict[str, Any], tolerance: float) -> None:
    is_fp16 = options.get("amp") is torch.float16
    theirs = {"scaler": utils.NativeScaler} if is_fp16 else {}
    ours = {"scaler": NativeScaler} if is_fp16 else {}
    want = Loop(name, clip_grad=clip, **options, **theirs).epoch()
    got = Loop(f"fused-{name}", clip_grad=clip, **options, **ours).epoch()
    assert_close(got.weights, want.weights, tolerance)
    inside = Loop(f"fused-{name}", max_grad_norm=clip, **options, **ours).epoch()
    assert_close(inside.weights, want.weights, tolerance)
    assert [g["lr"] for g in got.optimizer.param_groups] == [g["lr"] for g in want.optimizer.param_groups]


def test_layer_decay_has_groups_of_several_learning_rates() -> None:
    """Without this `test_trains` could compare two runs that ignore `layer_decay`."""
    groups = Loop("fused-adamw", layer_decay=0.75).epoch().optimizer.param_groups
    assert len({group["lr"] for group in groups}) == 4  # patch embedding, two blocks, head


@names
@low_dtypes
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
def test_16_bit_weights(name: str, dtype: torch.dtype, clip: float | None) -> None:
    want = Loop(name, dtype=dtype, masters_by_hand=True, clip_grad=clip).epoch()
    inside = Loop(f"fused-{name}", dtype=dtype, max_grad_norm=clip).epoch()
    assert_close(masters(inside.optimizer), masters(want.optimizer), MIXED)
    # timm writes the clipped gradients, which rounds them to 16 bits again.
    got = Loop(f"fused-{name}", dtype=dtype, clip_grad=clip).epoch()
    assert_close(masters(got.optimizer), masters(want.optimizer), 2 * MIXED)


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_modes_of_clipping(mode: str) -> None:
    """Under a scaler, which unscales first. `agc` is adaptive gradient clipping."""
    options: dict[str, Any] = {"amp": torch.float16, "clip_grad": 0.01, "clip_mode": mode}
    want = Loop("adamw", scaler=utils.NativeScaler, **options).epoch()
    assert_close(Loop("fused-adamw", scaler=NativeScaler, **options).epoch().weights, want.weights, MIXED)
    plain = Loop("adamw", scaler=utils.NativeScaler, amp=torch.float16).epoch()
    with pytest.raises(AssertionError):
        assert_close(plain.weights, want.weights, MIXED)


@pytest.mark.parametrize("mode", ["norm", "agc"])
def test_our_scaler_clips_fp16_weights(mode: str) -> None:
    """timm's own raises "Attempting to unscale FP16 gradients"."""
    clip = {"norm": 0.1, "agc": 0.01}[mode]
    options: dict[str, Any] = {"dtype": torch.float16, "clip_grad": clip, "clip_mode": mode}
    with pytest.raises(ValueError, match="unscale FP16"):
        Loop("fused-adamw", scaler=utils.NativeScaler, **options).epoch()
    # Without a scaler the gradients are the same, except for tiny ones.
    want = Loop("fused-adamw", **options).epoch()
    got = Loop("fused-adamw", scaler=NativeScaler, **options).epoch()
    assert got.scale == SCALE
    assert_close(masters(got.optimizer), masters(want.optimizer), MIXED)


# ---------------------------------------------------------------------------------------------------------- skipping
@names
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
@pytest.mark.parametrize("scaler", [NativeScaler, utils.NativeScaler], ids=["our-scaler", "timms-scaler"])
def test_skips(name: str, clip: float | None, scaler: type) -> None:
    overflow_at = (0, 4, 5)
    options: dict[str, Any] = {"amp": torch.float16, "clip_grad": clip}
    want = Loop(name, scaler=utils.NativeScaler, **options).epoch(overflow_at)
    got = Loop(f"fused-{name}", scaler=scaler, **options).epoch(overflow_at)
    assert_close(got.weights, want.weights, MIXED)
    assert got.scale == want.scale == SCALE / 8
    assert {int(state["step"]) for state in got.optimizer.state.values()} == {5}


@some_names
def test_schedulers_count_what_the_loop_counts(name: str) -> None:
    """As with torch's optimizers: timm passes the number of updates to its schedulers, skipped ones too."""
    want, got = (
        Loop(opt, amp=torch.float16, scaler=scaler).epoch((1, 2))
        for opt, scaler in ((name, utils.NativeScaler), (f"fused-{name}", NativeScaler))
    )
    assert [g["lr"] for g in got.optimizer.param_groups] == [g["lr"] for g in want.optimizer.param_groups]
    # The number without the skipped ones.
    got.scheduler.step_update(got.updates - int(got.scaler.state_dict()["skipped_steps"]))
    unskipped = Loop(f"fused-{name}")
    unskipped.scheduler.step_update(6)
    assert [g["lr"] for g in got.optimizer.param_groups] == [g["lr"] for g in unskipped.optimizer.param_groups]


# --------------------------------------------------------------------------------------------------------- Lookahead
@some_names
@pytest.mark.parametrize("amp", [None, torch.float16], ids=["fp32", "fp16"])
def test_lookahead(name: str, amp: torch.dtype | None) -> None:
    overflow_at = (3, 6) if amp else ()
    theirs, ours = ({"amp": amp, "scaler": kind} if amp else {} for kind in (utils.NativeScaler, NativeScaler))
    want, got = Loop(f"lookahead_{name}", **theirs), Loop(f"lookahead_fused_{name}", **ours)
    for loop in (want, got):
        for group in loop.optimizer.param_groups:
            group["lookahead_k"] = 2
        loop.epoch(overflow_at)
    assert type(got.optimizer) is type(want.optimizer) is optim.Lookahead
    assert type(got.optimizer._base_optimizer) is CLASSES[name]
    assert {g["lookahead_step"] for g in got.optimizer.param_groups} == {6 if amp else 8}
    assert_close(got.weights, want.weights, MIXED if amp else FP32)


# ---------------------------------------------------------------------------------------------------------- resuming
@names
@pytest.mark.parametrize(
    "options",
    [
        {"layer_decay": 0.75},
        {"amp": torch.float16, "scaler": NativeScaler},
        {"dtype": torch.float16, "scaler": NativeScaler, "max_grad_norm": 0.1},
        {"dtype": torch.bfloat16, "state_dtype": "int8"},
    ],
    ids=["fp32", "fp16-autocast", "fp16-weights", "bf16-weights-int8-states"],
)
def test_resumes_with_the_same_bits(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """By timm's `CheckpointSaver` and `resume_checkpoint`, with the averages of `ModelEma`."""
    overflow_at = (3,) if "scaler" in options else ()
    whole, again = Loop(f"fused-{name}", **options), Loop(f"fused-{name}", **options)
    for loop in (whole, again):
        loop.ema = ModelEma(loop.model, loop.optimizer, decay=0.5)
    whole.epoch(overflow_at)
    files = {"checkpoint_dir": str(tmp_path), "recovery_dir": str(tmp_path)}
    saver = utils.CheckpointSaver(whole.model, whole.optimizer, model_ema=whole.ema, amp_scaler=whole.scaler, **files)
    saver.save_checkpoint(epoch=0)
    file = str(tmp_path / "last.pth.tar")
    whole.epoch()
    assert resume_checkpoint(again.model, file, again.optimizer, again.scaler) == 1
    load_checkpoint(again.ema.module, file, use_ema=True)
    again.updates = 8
    again.scheduler.step_update(again.updates)
    again.epoch()
    assert_same_bits(again.weights, whole.weights)
    assert_same_bits(again.ema.module.state_dict(), whole.ema.module.state_dict())
    assert_same_bits(again.optimizer.state_dict(), whole.optimizer.state_dict())
    if whole.scaler is not None:
        assert again.scaler.state_dict() == whole.scaler.state_dict()


@some_names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lookahead_resumes_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    whole = Loop(f"lookahead_fused-{name}", dtype=dtype).epoch()
    saved = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict()))
    whole.epoch()
    again = Loop(f"lookahead_fused-{name}", dtype=dtype)
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    again.updates = 8
    again.scheduler.step_update(again.updates)
    assert_same_bits(again.epoch().weights, whole.weights)
    assert_same_bits(again.optimizer.state_dict(), whole.optimizer.state_dict())


# ---------------------------------------------------------------------------------------------------------- averages
@some_names
def test_ema_of_fp32_weights_is_timms(name: str) -> None:
    """With the warm-up of the decay."""
    options = {"decay": 0.9, "use_warmup": True, "update_after_step": 1}
    loop = Loop(f"fused-{name}")
    loop.ema, timms = ModelEma(loop.model, loop.optimizer, **options), utils.ModelEmaV3(loop.model, **options)
    ours = loop.ema.update

    def both(model: torch.nn.Module, step: int) -> None:
        ours(model, step)
        timms.update(model, step)

    loop.ema.update = both
    loop.epoch()
    assert_close(weights(loop.ema.module), weights(timms.module), FP32)
    with pytest.raises(AssertionError):
        assert_close(weights(loop.ema.module), loop.weights, MIXED)


@some_names
@low_dtypes
def test_ema_averages_masters(name: str, dtype: torch.dtype) -> None:
    loop, again = Loop(f"fused-{name}", dtype=dtype), Loop(f"fused-{name}", dtype=dtype)
    loop.ema = ModelEma(loop.model, loop.optimizer, decay=0.75)
    rounded = utils.ModelEmaV3(again.model, decay=0.75, dtype=torch.float32)
    wanted = {key: p.detach().float() for key, p in again.model.named_parameters()}

    class ByHand:
        def update(self, model: torch.nn.Module, step: int) -> None:
            rounded.update(model)
            for key, p in model.named_parameters():
                wanted[key] = 0.75 * wanted[key] + 0.25 * again.optimizer.master(p)

    again.ema = ByHand()
    loop.epoch()
    again.epoch()
    assert all(p.dtype is torch.float32 for p in loop.ema.module.parameters())
    assert_close(weights(loop.ema.module), wanted, FP32)
    with pytest.raises(AssertionError):  # averages of weights are not that exact
        assert_close(weights(rounded.module), wanted, 10 * FP32)


@some_names
def test_ema_does_not_move_after_a_skip(name: str) -> None:
    loop = Loop(f"fused-{name}", dtype=torch.float16, scaler=NativeScaler).epoch()
    ema = ModelEma(loop.model, loop.optimizer, decay=0.5)
    before = weights(ema.module)
    loop.ema, loop.batches = ema, loop.batches[:1]
    loop.epoch(overflow_at=(0,))
    assert_same_bits(weights(ema.module), before)
    loop.epoch()
    assert all(not torch.equal(a, before[key]) for key, a in weights(ema.module).items() if key.endswith("weight"))


@pytest.mark.parametrize("exclude", [False, True])
def test_ema_of_buffers_and_of_other_parameters_is_timms(exclude: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = optim.create_optimizer_v2(model[:2], "fused-sgd", lr=0.1)
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)
    options = {"decay": 0.5, "exclude_buffers": exclude}
    ours, timms = ModelEma(model, optimizer, **options), utils.ModelEmaV3(model, **options)
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        other.step()
        ours.update(torch.nn.DataParallel(model))  # a wrapper, whose names have a prefix
        timms.update(model)
    want = timms.module.state_dict()
    assert_close(ours.module.state_dict(), want, FP32)
    assert (want["1.running_mean"] == model[1].running_mean).all() == exclude


def test_ema_refuses_before_anything_changes() -> None:
    model = vit()
    optimizer = optim.create_optimizer_v2(model, "fused-adamw")
    with pytest.raises(TypeError, match=r"ModelEma: optimizer must be one of amp_kernels.optim, got a AdamW"):
        ModelEma(model, optim.create_optimizer_v2(model, "adamw"))
    with pytest.raises(TypeError, match=r"ModelEma: options must be .*, got device"):
        ModelEma(model, optimizer, device="cuda")
    ema = ModelEma(model, optimizer)
    before = weights(ema.module)
    with pytest.raises(ValueError, match=r"ModelEma.update: model must hold all parameters of the optimizer"):
        ema.update(vit())
    for other in (torch.nn.Linear(2, 2), torch.nn.ModuleList([model, torch.nn.BatchNorm2d(2, affine=False)])):
        with pytest.raises(ValueError, match=r"model must have the parameters and buffers of the averaged model, got"):
            ema.update(other)
    assert_same_bits(weights(ema.module), before)
