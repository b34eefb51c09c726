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

from amp_kernels import PrecisionReport
from amp_kernels.optim import FusedSGD, SkipAwareScheduler, _base, _wrappers, ema_, fp32_state_dict

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


class Forwarding(Delegating):
    """NeMo's EMAOptimizer, AdaScale, NoamOpt: attributes that are set on it do not reach the inner optimizer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ByProperty(Delegating):
    @property
    def _step_supports_amp_scaling(self) -> bool:
        inner = self.inner
        return functools.partial(getattr, inner, "_step_supports_amp_scaling")()


class ByGetattribute(Delegating):
    def __getattribute__(self, name: str) -> Any:
        own = ("inner", "param_groups", "state", "step", "grad_scale", "found_inf")
        read = object.__getattribute__
        return read(self, name) if name in own or name.startswith("__") else getattr(read(self, "inner"), name)


class Duck:
    """No Optimizer at all. Attributes that a scaler sets on it do not reach the inner optimizer."""

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
    "forwarding": Forwarding,
    "by a property": ByProperty,
    "by __getattribute__": ByGetattribute,
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
@pytest.mark.parametrize(("wrapper", "scaler", "dtype"), [(name, *case) for name in WRAPPERS for case in CASES])
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
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_optimizer_does_not_take_scales(family, wrapper):
    optimizer = WRAPPERS[wrapper](family(parameters([torch.float32], "cpu"), lr=0.1))
    set_grads([p for group in optimizer.param_groups for p in group["params"]], 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    asked: list[Any] = []
    scaler._maybe_opt_step = lambda *args: asked.append(args)  # the only place where a scaler decides on the host
    scaler.step(optimizer)
    assert asked


@families
def test_who_asks_the_optimizer_itself_is_told_that_it_takes_scales(family):
    """Lightning's plugin asks it, and so does a wrapper that passes the scale on."""

    class Passing(Delegating):
        def step(self, closure: Callable | None = None) -> Any:
            inner_scaler.step(self.inner)

    inner, inner_scaler = family(parameters([torch.float32], "cpu"), lr=0.1), stock(torch.device("cpu"))
    assert inner._step_supports_amp_scaling
    set_grads([p for group in inner.param_groups for p in group["params"]], 0)
    inner_scaler._maybe_opt_step = None  # would raise an error
    stock(torch.device("cpu")).step(Passing(inner))


class Container(torch.optim.Optimizer):
    """torchtitan's OptimizersContainer: an Optimizer with all parameters, and a list of optimizers."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        super().__init__(params, {"lr": 1.0})

    def step(self, closure: Callable | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step(closure)


class PlainContainer:
    """A class that is no Optimizer. Its optimizers have names."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.by_kind = {"all": [(str(i), optimizer) for i, optimizer in enumerate(optimizers)]}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for _, optimizer in self.by_kind["all"] for group in optimizer.param_groups]

    def step(self) -> None:
        for _, optimizer in self.by_kind["all"]:
            optimizer.step()


def known(container: Any) -> Any:
    for optimizer in container.optimizers:
        optimizer.holder = container
    return container


HOLDERS: dict[str, Callable[[list[Any]], Any]] = {
    "a list": Container,
    "pairs in a dict": PlainContainer,
    "containers in a container": lambda os: Container([Container(os[:1]), Container(os[1:])]),
    "wrappers in a container": lambda os: Container([DynamicSubclass(o) for o in os]),
    "a wrapped container": lambda os: Duck(Container(os)),
    "plain containers in one": lambda os: PlainContainer([PlainContainer([o]) for o in os]),
    "a holder that they know": lambda os: known(Container(os)),
}
HOLDERS |= {
    name: lambda os, wrap=wrap: Container([wrap(o) for o in os]) for name, wrap in WRAPPERS.items() if name != "duck"
}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_skip_is_told_to_all_that_are_held(scaler, holder):
    """torch's scaler tells them nothing. The gradients of all optimizers are then checked."""
    device = torch.device("cpu")
    params = parameters([torch.float32], device)
    inner = [FusedSGD(params[:1], lr=1.0, momentum=0.9), FusedSGD(params[1:], lr=1.0)]
    averages = [[o.master(p) for p in ps] for o, ps in zip(inner, (params[:1], params[1:]), strict=True)]
    schedules = [SkipAwareScheduler(lr_scheduler.ExponentialLR(o, 0.5)) for o in inner]
    optimizer = HOLDERS[holder](inner)
    if isinstance(optimizer, torch.optim.Optimizer):  # torch's schedulers take nothing else
        schedules.append(SkipAwareScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5)))
    scale = SCALERS[scaler](device)
    for step in range(6):
        is_skipped = step in (0, 3, 4)
        set_grads(params, step, scale=scale.get_scale())
        for p in {0: params, 3: params[:1], 4: params[1:]}.get(step, []):
            p.grad.view(-1)[-1:] = torch.inf
        weights, before = [t for o in inner for t in snapshot(o)], copy.deepcopy(averages)
        scale.step(optimizer)
        scale.update()
        for p in params if scaler == "ours" else []:  # it tells them, so they need no gradients
            p.grad = None
        for o, average in zip(inner, averages, strict=True):
            for _ in range(2):  # reading it changes nothing
                assert bool(o.step_was_skipped) == is_skipped
            ema_(average, o, 0.5)
        for schedule in schedules:
            schedule.step()
        if is_skipped:
            assert_same([t for o in inner for t in snapshot(o)], weights)
        assert torch.equal(averages[1][0], before[1][0]) == is_skipped
    assert [s.last_epoch for s in schedules] == [3] * len(schedules)


def test_steps_without_a_scaler_look_at_no_gradient(monkeypatch):
    """Nothing skips them, even where the gradients hold NaN."""
    params = parameters([torch.float32], "cpu")
    optimizer = FusedSGD(params, lr=0.1)
    averages = [optimizer.master(p) for p in params]
    monkeypatch.setattr(_base, "grad_norm", None)
    for _ in range(2):
        set_grads(params, 0)
        params[0].grad.fill_(torch.nan)
        Container([optimizer]).step()
        for p in params:
            p.grad = p.grad + 0
        for _ in range(2):
            assert not optimizer.step_was_skipped
            ema_(averages, optimizer, 0.5)
    assert averages[0].isnan().all()


def test_a_step_that_torchs_scaler_takes_looks_at_no_gradient(monkeypatch):
    """They are those that the step took."""
    params = parameters([torch.float32], "cpu")
    optimizer, scaler = FusedSGD(params, lr=0.1), stock(torch.device("cpu"))
    monkeypatch.setattr(_base, "grad_norm", None)
    set_grads(params, 0, scale=scaler.get_scale())
    scaler.step(Container([optimizer]))
    for _ in range(2):
        assert not optimizer.step_was_skipped


def test_a_skip_is_seen_in_gradients_that_are_written_in_place():
    """zero_grad(set_to_none=False) keeps the gradients of the last step."""
    weight = torch.nn.Parameter(torch.ones(3))
    inner, scaler = FusedSGD([weight], lr=0.1), stock(torch.device("cpu"))
    optimizer = Container([inner])
    said = []
    for factor in (1.0, torch.inf, 1.0):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        said.append(bool(inner.step_was_skipped))
        optimizer.zero_grad(set_to_none=False)
    assert said == [False, True, False]


@pytest.mark.parametrize("kind", SCALERS)
def test_a_disabled_scaler_skips_nothing(monkeypatch, kind):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([weight], lr=0.1)
    scaler = type(SCALERS[kind](torch.device("cpu")))("cpu", enabled=False)
    weight.grad = torch.ones(3)
    scaler.step(optimizer)
    monkeypatch.setattr(_base, "grad_norm", None)
    weight.grad = torch.full((3,), torch.inf)  # of the next iteration
    assert not optimizer.step_was_skipped


def test_gradients_of_which_a_rank_has_a_part_are_not_looked_at(monkeypatch):
    """The ranks would say different things."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([weight], lr=0.1)
    weight.grad = torch.full((3,), torch.inf)
    assert optimizer.step_was_skipped
    weight._fsdp_flattened = True
    monkeypatch.setattr(_base, "grad_norm", None)
    assert not optimizer.step_was_skipped


def test_the_verdict_on_a_step_lasts_until_the_next_one():
    """Gradients may be unscaled before. A graph goes on writing the flag that it has captured."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = FusedSGD([weight], lr=0.1), started(torch.device("cpu"))
    flags = []
    for factor in (torch.inf, 1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        flags.append(optimizer._last_found_inf)
        scaler.update()
    assert all(flag is flags[0] for flag in flags)
    for _ in range(3):  # no step follows
        weight.grad = torch.full((3,), torch.inf)
        scaler.unscale_(optimizer)
        scaler.update()
        assert not optimizer.step_was_skipped


def test_a_long_list_of_numbers_is_not_searched():
    class Losses(list):
        def __iter__(self):
            yield self[0]
            raise AssertionError("searched")

    holder = Duck(FusedSGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
    holder.losses = Losses([0.5] * 1000)
    assert _wrappers.wrapped(holder) is holder.inner


def test_other_functions_refuse_a_holder_of_several():
    """They work with the masters or the gradients of one optimizer. Those of the others would be missing."""
    model = torch.nn.Linear(2, 2).bfloat16()
    container = Container([FusedSGD([p], lr=0.1) for p in model.parameters()])
    with pytest.raises(TypeError, match="got a Container that holds several; pass one of these"):
        PrecisionReport(model, container)
    with pytest.raises(TypeError, match="got a Container around it; pass the FusedSGD"):
        fp32_state_dict(model, container)


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
