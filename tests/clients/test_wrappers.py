"""Optimizers inside others' objects, as trainers wrap them: the scale is applied once, an overflow is skipped."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import (
    FULL,
    assert_same,
    assert_within_rule,
    copies,
    families,
    parameters,
    set_grads,
    snapshot,
    started,
    stock,
    stocks,
)
from torch.optim import lr_scheduler

from amp_kernels.optim import FusedSGD

SCALERS = {"ours": started, "torch's": stock}
# torch's scaler unscales no fp16 gradients, which it must where a wrapper does not pass its verdict on.
CASES = [("ours", torch.float32), ("ours", torch.float16), ("torch's", torch.float32), ("torch's", torch.bfloat16)]
cases = pytest.mark.parametrize(("scaler", "dtype"), CASES, ids=[f"{name}-{dtype}" for name, dtype in CASES])


def scaler_for(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    if name == "torch's" and not stocks([dtype], device):
        pytest.skip(f"torch's GradScaler checks no {dtype} gradients on {device.type}")
    return SCALERS[name](device)


# -------------------------------------------------------------------------------------------------------- the wrappers
class DynamicSubclass:
    """Lightning's Fabric, and its manual optimization: a class of the optimizer's, without its constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure: Callable | None = None) -> Any:
        return self._optimizer.step(closure)

    def zero_grad(self, **options: Any) -> None:
        self._optimizer.zero_grad(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class SharedDict:
    """Lightning's Fabric before 2.1: it copies the optimizer's attributes, but for its methods."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("state_dict", "step", "zero_grad")}
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    def step(self, closure: Callable | None = None) -> Any:
        return self._optimizer.step(closure)


class Delegating(torch.optim.Optimizer):
    """An Optimizer by name only; what it does not have is the inner one's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def step(self, closure: Callable | None = None) -> Any:
        return self.inner.step(closure)


class Duck:
    """No Optimizer at all. Under torch's scaler its `grad_scale` cannot reach the inner step, torch's own included."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer

    def step(self, closure: Callable | None = None) -> Any:
        return self.inner.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def with_wrapped_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = functools.wraps(optimizer.step)(lambda *args, step=optimizer.step, **kw: step(*args, **kw))
    return optimizer


def with_bare_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = lambda *args, step=optimizer.step, **kw: step(*args, **kw)
    return optimizer


def with_bound_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner = optimizer.step
    optimizer.step = types.MethodType(lambda self, closure=None: inner(closure), optimizer)
    return optimizer


def with_scheduler_and_wrapped_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return with_wrapped_step(optimizer)


def with_bound_step_and_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer = with_bound_step(optimizer)
    lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer


def of_overriding_class(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    class Overriding(type(optimizer)):
        def step(self, closure: Callable | None = None) -> Any:
            return super().step(closure)

    optimizer.__class__ = Overriding
    return optimizer


def of_mixed_in_class(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    class Mixin:
        def step(self, closure: Callable | None = None) -> Any:
            return super().step(closure)

    optimizer.__class__ = type("Mixed", (Mixin, type(optimizer)), {})
    return optimizer


WRAPPERS = {
    "dynamic subclass": DynamicSubclass,
    "shared dict": SharedDict,
    "delegating": Delegating,
    "duck": Duck,
    "a wrapper in a wrapper": lambda optimizer: Delegating(DynamicSubclass(optimizer)),
    "wrapped step": with_wrapped_step,
    "bare step": with_bare_step,
    "bound step": with_bound_step,
    "scheduler, wrapped step": with_scheduler_and_wrapped_step,
    "bound step, scheduler": with_bound_step_and_scheduler,
    "overriding class": of_overriding_class,
    "mixed-in class": of_mixed_in_class,
}


# --------------------------------------------------------------------------------------------------------- what it does
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize(
    ("wrapper", "scaler", "dtype"),
    [(wrapper, *case) for wrapper in WRAPPERS for case in CASES if wrapper != "duck" or case[0] == "ours"],
)
def test_scale_and_verdict_arrive(device, scaler, dtype, unscale, wrapper):
    params = parameters([dtype], device)
    inner = FusedSGD(params, **FULL[FusedSGD])
    optimizer = WRAPPERS[wrapper](inner)
    theirs, truth = copies(params, torch.float32), copies(params, torch.float64)
    scale = scaler_for(scaler, dtype, device)
    for step in range(5):
        overflow = step == 2
        set_grads(params, step, scale=scale.get_scale())
        if overflow:
            params[1].grad.view(-1)[0] = torch.inf
        if unscale:
            scale.unscale_(optimizer)
        before = snapshot(inner)
        scale.step(optimizer)
        scale.update()
        if overflow:
            assert_same(snapshot(inner), before)
        assert scale.get_scale() == (4.0 if step < 2 else 2.0)
    for ps in (theirs, truth):
        reference = torch.optim.SGD(ps, **FULL[FusedSGD], foreach=False)
        for step in (0, 1, 3, 4):
            set_grads(params, step)
            for p, q in zip(params, ps, strict=True):
                q.grad = p.grad.to(q.dtype)
            reference.step()
    assert_within_rule(inner, params, theirs, truth)


@families
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "duck"])
def test_a_wrapped_optimizer_does_not_take_scales(family, wrapper):
    optimizer = WRAPPERS[wrapper](family(parameters([torch.float32], "cpu"), lr=0.1))
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


@cases
def test_an_optimizer_that_counts_its_steps(device, scaler, dtype):
    """accelerate replaces `step` for a while and takes a step that was not called for one that was skipped."""

    class Accelerated(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
            self.optimizer, self.scaler, self.was_called = optimizer, scaler, False
            self.original = optimizer.step

        def patched(self, *args: Any, **kwargs: Any) -> Any:
            self.was_called = True
            return self.original(*args, **kwargs)

        def step(self, closure: Callable | None = None) -> None:
            patched = self.patched
            self.optimizer.step = lambda *args, **kwargs: patched(*args, **kwargs)
            self.scaler.step(self.optimizer, closure)
            self.scaler.update()
            self.step_was_skipped, self.was_called = not self.was_called, False
            self.optimizer.step = self.original

    params = parameters([dtype], device)
    inner = FusedSGD(params, **FULL[FusedSGD])
    optimizer = Accelerated(inner, scaler_for(scaler, dtype, device))
    plain = parameters([dtype], device)
    expected = FusedSGD(plain, **FULL[FusedSGD])
    for step in range(5):
        set_grads(params, step, scale=optimizer.scaler.get_scale())
        if step == 2:
            params[0].grad.view(-1)[3] = torch.nan
        else:
            set_grads(plain, step)
            expected.step()
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 2)
    assert_same(snapshot(inner), snapshot(expected))


# -------------------------------------------------------------------------------------------------------- the fast path
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 1.0),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@families
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_leave_the_step_on_the_device(family, make):
    optimizer = family(parameters([torch.float32], "cpu"), **FULL[family])
    make(optimizer)
    assert optimizer._step_supports_amp_scaling


@families
@pytest.mark.parametrize("how", ["fresh", "after a step", "hooks", "a subclass", "deepcopy", "pickle"])
def test_what_else_leaves_the_step_on_the_device(family, how):
    if how == "a subclass":
        family = type("Mine", (family,), {"zero_grad": lambda self, set_to_none=True: None})
    params = parameters([torch.float32], "cpu")
    optimizer = family(params, lr=0.1)
    set_grads(params, 0)
    if how == "after a step":
        optimizer.step()
    elif how == "hooks":
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.register_step_post_hook(lambda *_: None)
    elif how == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    elif how == "pickle":
        optimizer = pickle.loads(pickle.dumps(optimizer))
    assert optimizer._step_supports_amp_scaling


# --------------------------------------------------------------------------------------------------------------- copies
@cases
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("wrapper", ["itself", "dynamic subclass", "wrapped step", "scheduler"])
def test_copies_train_alike_and_apart(device, scaler, dtype, how, wrapper):
    params = parameters([dtype], device)
    optimizer = FusedSGD(params, **FULL[FusedSGD], max_grad_norm=2.0)
    scale = scaler_for(scaler, dtype, device)
    if wrapper == "wrapped step":
        with_wrapped_step(optimizer)
    elif wrapper == "scheduler":
        lr_scheduler.ConstantLR(optimizer, 0.5)
    train(optimizer, scale, [0, 1])
    twin = how(optimizer)
    wrap = DynamicSubclass if wrapper == "dynamic subclass" else lambda o: o
    other_scale = scaler_for(scaler, dtype, device)
    before = snapshot(optimizer)
    train(wrap(twin), other_scale, [2, 3, 4], overflow=3)
    assert_same(snapshot(optimizer), before)
    train(wrap(optimizer), scale, [2, 3, 4], overflow=3)
    assert_same(snapshot(twin), snapshot(optimizer))


def train(optimizer: Any, scaler: Any, steps: list[int], overflow: int | None = None) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        set_grads(params, step, scale=scaler.get_scale())
        if step == overflow:
            params[0].grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
