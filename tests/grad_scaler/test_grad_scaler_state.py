"""What our GradScaler keeps: the scale, the count of skips, the last overflow; and its checkpoints."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from optim_cases import ALL, TORCH, families, iterate, parameters, set_grads, started, stock
from torch.distributed.tensor import Shard, distribute_tensor

import amp_kernels
from amp_kernels import _zero_gradients
from amp_kernels.optim import FusedAdamW, FusedSGD


def run_scales(scaler: Any, device: Any, pattern: str, via: type = FusedSGD) -> list[float]:
    """The scale after each step of `pattern`, in which x is an overflow."""
    p = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer = via([p], lr=0.1)
    scales = []
    for mark in pattern:
        p.grad = torch.full_like(p, torch.inf if mark == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


# ------------------------------------------------------------------------------------------------------------ the scale
@pytest.mark.parametrize("via", [FusedSGD, torch.optim.SGD])
def test_the_scale_moves_as_torchs(device, via):
    options = {"growth_interval": 2, "growth_factor": 3.0, "backoff_factor": 0.25}
    for pattern in ("..x..x.xx....", "xxx......"):
        ours, theirs = started(device, **options), stock(device, **options)
        assert run_scales(ours, device, pattern, via) == run_scales(theirs, device, pattern, torch.optim.SGD)
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()


def test_min_scale(device):
    assert run_scales(started(device, min_scale=0.5), device, "xxxxxx") == [2, 1, 0.5, 0.5, 0.5, 0.5]
    assert run_scales(started(device, min_scale=0.5, growth_interval=1), device, "xxxxx.") == [2, 1, 0.5, 0.5, 0.5, 1]
    assert started(device, init_scale=1.0, min_scale=8.0).get_scale() == 8.0  # it starts no lower either
    for is_running in (False, True):  # torch's checkpoint has no bound, but a scale below ours
        bounded = started(device, min_scale=8.0) if is_running else amp_kernels.GradScaler(device.type, min_scale=8.0)
        bounded.load_state_dict(stock(device, init_scale=1.0).state_dict())
        assert bounded.get_scale() == 8.0
    with pytest.warns(UserWarning, match="50 steps in a row") if device.type == "cpu" else contextlib.nullcontext():
        assert run_scales(started(device), device, "x" * 160)[-1] == 0.0  # torch's way
    with pytest.raises(ValueError, match="min_scale must be a finite number of at least 0, got -1"):
        started(device, min_scale=-1)


def test_max_scale(device):
    scaler = started(device, init_scale=64.0, max_scale=8.0, growth_interval=1)
    assert run_scales(scaler, device, ".x..") == [8, 4, 8, 8]  # it starts no higher either
    assert scaler.state_dict()["max_scale"] == 8.0
    for options in ({}, {"max_scale": 2.0}, {"min_scale": 32.0}):  # the bounds that were saved replace its own
        other = started(device, growth_interval=1, **options)
        other.load_state_dict(scaler.state_dict())
        assert other.get_scale() == 8.0
        assert run_scales(other, device, "..") == [8, 8]
        assert run_scales(other, device, "xxxx") == [4, 2, 1, 0.5]
    for is_running in (False, True):  # torch's checkpoint has no bound, but a scale above ours
        bounded = started(device, max_scale=8.0) if is_running else amp_kernels.GradScaler(device.type, max_scale=8.0)
        bounded.load_state_dict(stock(device, init_scale=64.0).state_dict())
        assert bounded.get_scale() == 8.0
    scaler.update(64.0)
    assert scaler.get_scale() == 64.0  # as given
    with pytest.raises(ValueError, match=r"max_scale must be a number of at least min_scale \(2\), got 1.0"):
        started(device, min_scale=2.0, max_scale=1.0)
    with pytest.raises(ValueError, match=r"max_scale must be a number above 0, got nan"):
        started(device, max_scale=math.nan)
    with pytest.raises(ValueError, match=r"max_scale must be a number above 0, got 0"):
        started(device, max_scale=0)
    for name, wrong in (("max_scale", None), ("max_scale", "8"), ("min_scale", "1"), ("min_scale", True)):
        with pytest.raises(TypeError, match=f"{name} must be a .*number .*, got {wrong!r}"):
            started(device, **{name: wrong})


def test_a_process_group(mesh):
    """What one process can show of it; `tests/clients/test_distributed.py` has two."""
    group = torch.distributed.group.WORLD
    scaler = amp_kernels.GradScaler("cpu", process_group=group)
    # A rank without a loss has no scale() before its step, and others wait for it there.
    p = torch.nn.Parameter(torch.ones(3))
    for optimizer in (FusedSGD([p], lr=0.1), torch.optim.SGD([p], lr=0.1)):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**16
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"with a process_group cannot be copied or pickled, .* save its state_dict"
        ):
            copied(scaler)
    for wrong, error, got in (
        (3, TypeError, "a int"),
        ([0, 1], TypeError, "a list"),
        (torch.distributed.GroupMember.NON_GROUP_MEMBER, ValueError, "a group without this rank"),
    ):
        with pytest.raises(error, match=f"must be a torch.distributed.ProcessGroup that this rank .*, got {got}"):
            amp_kernels.GradScaler("cpu", process_group=wrong)


@pytest.mark.parametrize("low", [False, True], ids=["fp32 loss", "fp16 loss"])
def test_a_loss_in_fp16_takes_a_step_at_once(device, low):
    """65504 is the largest fp16 number."""
    p = torch.nn.Parameter(torch.ones(4, device=device).half())
    optimizer = FusedSGD([p], lr=0.1)
    scaler = amp_kernels.GradScaler(device.type, max_scale=2.0**15)
    loss = p.sum() if low else p.float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert int(scaler.skipped_steps) == 0


@pytest.mark.parametrize("via", [FusedSGD, torch.optim.SGD])
@pytest.mark.parametrize("on_cpu", [True, False], ids=["", "verdict elsewhere"])
def test_fifty_skips_in_a_row_warn_once(device, via, on_cpu, monkeypatch):
    """Where the host knows: on the CPU, and with optimizers whose verdict it waits for."""
    if not on_cpu:  # what the scaler decides of a verdict that it must not read
        warn = amp_kernels.GradScaler._warn_of_skips
        monkeypatch.setattr(
            amp_kernels.GradScaler, "_warn_of_skips", lambda self, found, states: warn(self, found.to("meta"), states)
        )
    named = [(name, torch.nn.Parameter(torch.zeros(3, device=device))) for name in ("first", "second")]
    optimizer, scaler = via(named, lr=0.1), started(device)

    def steps(times: int, skip: bool = True) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                for name, p in named:
                    p.grad = torch.full_like(p, torch.nan if skip and name == "second" else 1.0)
                scaler.step(optimizer)
                scaler.update()
        return [str(w.message) for w in caught]

    is_known = (on_cpu and device.type == "cpu") or via is torch.optim.SGD
    assert steps(49) + steps(1, skip=False) + steps(49) == []  # 98, not in a row
    messages = steps(30)
    assert len(messages) == is_known
    for message in messages:
        assert "50 steps in a row found NaN or inf" in message
        assert ("in the gradient of second" in message) == (via is FusedSGD)
    assert steps(1, skip=False) + steps(49) == []
    assert len(steps(1)) == is_known  # each time anew


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_an_eps_that_is_0_in_fp16_warns_once(device, kind):
    def steps(dtype: torch.dtype, **options: float) -> list[str]:
        p = torch.nn.Parameter(torch.ones(3, device=device, dtype=dtype))
        optimizer, scaler = kind([p], lr=0.1, **options), started(device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                p.grad = torch.ones_like(p)
                scaler.step(optimizer)
                scaler.update()
        return [str(w.message) for w in caught]

    ours = {torch.optim.NAdam: "an optimizer of amp_kernels.optim"}.get(kind, f"amp_kernels.optim.Fused{kind.__name__}")
    (message,) = steps(torch.float16)
    assert f"{kind.__name__} computes in fp16" in message and f"use {ours}, which" in message
    assert steps(torch.float32) == steps(torch.bfloat16) == steps(torch.float16, eps=1e-4) == []
    if kind is not torch.optim.RMSprop and kind is not torch.optim.NAdam:
        assert steps(torch.float16, fused=True) == []  # its kernels compute in fp32


def steps_in(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the warnings of a step whose gradients are 1."""
    scaler = started(torch.device("cpu"))
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.step(optimizer)
        scaler.update()
    return [str(w.message) for w in caught]


class Around(torch.optim.Optimizer):
    def __init__(self, name: str, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.name = name
        setattr(self, name, inner)

    def step(self, closure: None = None) -> None:
        getattr(self, self.name).step()


NAMES = ("optim", "optimizer", "_base_optimizer", "base_optimizer", "opt", "inner", "_Around__hidden")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 2])
def test_an_eps_within_a_wrapper(name, depth):
    def wrapper(make: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        optimizer = make([torch.nn.Parameter(torch.ones(3).half())], lr=0.1)
        optimizer.other = FusedAdamW([torch.nn.Parameter(torch.ones(3).half())], lr=0.1)  # of other parameters
        for _ in range(depth):
            inner, optimizer = optimizer, Around(name, optimizer)
            inner.holder = optimizer
        return optimizer

    assert steps_in(wrapper(FusedAdamW)) == []
    (message,) = steps_in(wrapper(torch.optim.AdamW))
    assert "AdamW computes in fp16" in message


def test_an_eps_warns_for_each_optimizer(device):
    """A new optimizer may have the id of a deleted one, and still gets its warning."""
    scaler = started(device)
    p = torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.float16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            if step % 2 == 0:
                optimizer = torch.optim.AdamW([p], lr=0.1)
            p.grad = torch.ones_like(p)
            scaler.step(optimizer)
            scaler.update()
            if step % 2:
                del optimizer
    assert len(caught) == 5


# ------------------------------------------------------------------------------------------------- gradients of zeros
EVERY = 5  # steps for each look, in place of 100


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setattr(_zero_gradients, "STEPS_PER_LOOK", EVERY)


def warned_in(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def train(scaler: Any, grads_of: Any, steps: int, unscale: bool = False) -> list[str]:
    """Takes steps with the gradients `grads_of(step)`, a dict from optimizers to a list with one for each parameter."""

    def run() -> None:
        for step in range(steps):
            for optimizer, grads in grads_of(step).items():
                for p, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
                    p.grad = grad if grad is None or isinstance(grad, torch.Tensor) else torch.full_like(p, grad)
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                optimizer.zero_grad()  # as some loops do, before `update`
            scaler.update()

    return warned_in(run)


# The third look is at the first step after 3 * EVERY updates.
BEFORE, AT = 3 * EVERY, 3 * EVERY + 1


@pytest.mark.parametrize("via", [FusedSGD, torch.optim.SGD, lambda ps, lr: torch.optim.SGD(ps, lr=lr, fused=True)])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_a_scale_that_is_too_small_warns_once(device, looks_often, via, unscale):
    """A small loss at a scale of 1. All weights have gradients of 0 in fp16, and none at a scale of 2^16."""
    for scale, expected in ((1.0, 1), (2.0**16, 0)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4)).to(device)
        optimizer = via(model.half().named_parameters(), lr=1e-3)
        scaler = amp_kernels.GradScaler(device.type, init_scale=scale)
        x = torch.randn(16, 8, device=device).half()

        def steps(count: int, model=model, optimizer=optimizer, scaler=scaler, x=x) -> list[str]:
            def run() -> None:
                for _ in range(count):
                    optimizer.zero_grad()
                    scaler.scale((model(x).float() * 1e-6 / 64).mean()).backward()
                    if unscale:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()

            return warned_in(run)

        assert steps(BEFORE) == []
        messages = steps(AT - BEFORE) if device.type == "cpu" else steps(EVERY)
        assert len(messages) == expected
        for message in messages:
            assert "was 0 for 4 parameters (0.weight is the first) in each of 3 looks, 5 steps apart" in message
            assert "underflow at a scale of 1: use a larger init_scale" in message
        assert steps(5 * EVERY) == []
        assert scaler.skipped_steps == 0


ZEROS = {
    "in three looks, not in a row": lambda step: 1.0 if step == 2 * EVERY else 0.0,
    "in a skipped step": lambda step: 0.0,  # of which another gradient is NaN
    "missing": lambda step: None if step == 2 * EVERY else 0.0,
    "missing always": lambda step: None,
    "NaN": lambda step: torch.nan if step % EVERY == 0 else 0.0,
    "empty": lambda step: torch.zeros(0),
    "one element": lambda step: torch.eye(40)[:1],
    "one element of a long one": lambda step: torch.eye(1, 1600)[0],
    "the smallest number": lambda step: 1e-45,
}


@pytest.mark.parametrize("via", [FusedSGD, torch.optim.SGD])
@pytest.mark.parametrize("name", ZEROS)
def test_what_is_no_gradient_of_zeros(looks_often, via, name):
    grad = ZEROS[name](1)
    params = [torch.nn.Parameter(torch.zeros(grad.shape if isinstance(grad, torch.Tensor) else 3)) for _ in range(2)]
    optimizer, scaler = via(params, lr=0.1), started(torch.device("cpu"))

    def grads_of(step: int) -> Any:
        other = torch.nan if name == "in a skipped step" and step % EVERY == 0 else 1.0
        return {optimizer: [ZEROS[name](step), other]}

    assert train(scaler, grads_of, 5 * EVERY - 1) == []  # looks at the steps 5, 10, 15 and 20
    messages = train(scaler, lambda _: {optimizer: [0.0, 1.0]}, 4 * EVERY)
    assert len(messages) == (name != "empty")
    assert all("for 1 parameters (param_groups[0]['params'][0] is the first)" in m for m in messages)


def test_sparse_gradients_and_those_of_shards_are_left_out(mesh, looks_often):
    """No look at a DTensor starts a collective, and none reads it."""
    sparse = torch.nn.Parameter(torch.ones(6, 3))
    shards = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
    optimizers = [torch.optim.SGD([sparse], lr=0.1), FusedSGD([shards], lr=0.1)]

    def grads_of(step: int) -> Any:
        zeros = torch.zeros(6, 3).to_sparse(), torch.zeros_like(shards.detach())
        return {optimizer: [grad] for optimizer, grad in zip(optimizers, zeros, strict=True)}

    assert train(started(torch.device("cpu")), grads_of, AT + EVERY) == []


def test_each_optimizer_is_looked_at_whenever_it_steps(looks_often):
    """One that steps in every third iteration too; a proxy, and an object without weak references."""
    often, rarely = (FusedSGD([(name, torch.nn.Parameter(torch.ones(3)))], lr=0.1) for name in ("often", "rarely"))
    scaler = started(torch.device("cpu"))
    (message,) = train(scaler, lambda step: {often: [1.0], **({rarely: [0.0]} if step % 3 == 1 else {})}, 4 * EVERY)
    assert "(rarely is the first)" in message

    class Slotted:
        __slots__ = ("inner",)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    slotted = Slotted()
    slotted.inner = often
    assert len(train(started(torch.device("cpu")), lambda _: {slotted: [0.0]}, AT + 1)) == 1


def test_the_first_of_parameters_of_two_dtypes_is_named(looks_often):
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float16, torch.float32)]
    optimizer = FusedSGD(zip("abc", params, strict=True), lr=0.1)
    (message,) = train(started(torch.device("cpu")), lambda _: {optimizer: [1.0, 0.0, 0.0]}, AT)
    assert "for 2 parameters (b is the first)" in message


def test_a_look_keeps_nothing_alive_and_is_not_saved(looks_often):
    scaler = started(torch.device("cpu"))
    optimizers = [FusedSGD([("first", torch.nn.Parameter(torch.ones(3)))], lr=0.1)]
    keys = scaler.state_dict().keys()

    def zeros(_: int) -> Any:
        return {optimizer: [0.0] for optimizer in optimizers}

    assert train(scaler, zeros, BEFORE) == []
    assert scaler.state_dict().keys() == keys
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        other.scale(torch.ones(()))
        assert train(other, zeros, BEFORE) == []  # it begins to count again
        assert len(train(other, zeros, EVERY + 1)) == 1
        again = copy.deepcopy(other)
        again.scale(torch.ones(()))
        assert train(again, zeros, 5 * EVERY) == []
    param = optimizers[0].param_groups[0]["params"][0]
    param.grad = torch.zeros(3)
    scaler.step(optimizers[0])  # the third look, which no `update` has seen
    references = [weakref.ref(optimizers.pop()), weakref.ref(param)]
    del param
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert warned_in(scaler.update) == []


class LateEvent:
    """An event of a GPU that has to finish other work first. Nothing waits for it, and no capture asks it."""

    is_late = True

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        assert not LateEvent.is_capturing
        return not LateEvent.is_late


def test_answers_of_a_gpu_are_read_when_they_have_arrived(looks_often, monkeypatch):
    """Played on the CPU: `update` asks an event, and goes on if the copy is not done."""
    LateEvent.is_late, LateEvent.is_capturing = True, False
    monkeypatch.setattr(_zero_gradients, "_recorded", lambda device: LateEvent())
    monkeypatch.setattr(_zero_gradients, "capturing", lambda device: LateEvent.is_capturing)
    optimizer, scaler = FusedSGD([torch.nn.Parameter(torch.ones(3))], lr=0.1), started(torch.device("cpu"))

    def steps(grad: float, count: int = EVERY) -> list[str]:
        return train(scaler, lambda _: {optimizer: [grad]}, count)

    assert steps(0.0, AT + 2 * EVERY) == []  # the first answer is on its way, and there is no other look
    LateEvent.is_capturing, LateEvent.is_late = True, False
    assert steps(1.0) == []
    LateEvent.is_capturing = False
    assert steps(0.0, 1) == []  # reads the first answer
    LateEvent.is_capturing = True
    assert steps(1.0, EVERY - 2) == []  # no look in a capture
    LateEvent.is_capturing = False
    assert steps(0.0) == []
    assert len(steps(0.0, 1)) == 1


def params_with_gradients(device: torch.device, *has_gradient: bool) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in has_gradient]
    for p, has in zip(params, has_gradient, strict=True):
        p.grad = torch.ones_like(p) if has else None
    return params


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("make", [FusedSGD, FusedAdamW, "two of them", "of no parameters"])
def test_no_gradient_at_all_warns_once(device, unscale, make):
    """torch's scaler raises there."""
    scaler = started(device)
    if make == "of no parameters":
        optimizers = [FusedSGD([{"params": []}], lr=0.1)]
    else:
        kinds = [FusedSGD, FusedAdamW] if make == "two of them" else [make]
        optimizers = [kind(params_with_gradients(device, False, False), lr=0.1) for kind in kinds]

    def iteration() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for optimizer in optimizers:
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
        assert all(w.filename == __file__ for w in caught)
        return [str(w.message) for w in caught]

    (message,) = iteration()
    assert "none of their parameters has a gradient" in message
    assert iteration() == [] and scaler.get_scale() == 4.0
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(torch.optim.SGD(params_with_gradients(device, False), lr=0.1))


def test_a_gradient_beside_others_without_one_does_not_warn(device):
    """Frozen parameters, experts that no token was routed to, an optimizer that has none in this iteration."""
    scaler = started(device)
    some = FusedSGD(params_with_gradients(device, False, True), lr=0.1)
    some.param_groups[0]["params"][0].requires_grad_(False)
    none = FusedSGD(params_with_gradients(device, False), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizers in ([some], [none, some]):
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()


def test_hysteresis(device):
    assert run_scales(started(device, hysteresis=2), device, "x.xx.x") == [4, 4, 4, 2, 2, 2]
    assert run_scales(started(device, hysteresis=3), device, "xxxxx.xx") == [4, 4, 2, 1, 0.5, 0.5, 0.5, 0.5]
    scaler = started(device, hysteresis=2, growth_interval=2)
    assert run_scales(scaler, device, ".x..") == [4, 4, 4, 8]  # a tolerated overflow restarts the wait for growth
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"hysteresis must be an integer of at least 1, got {wrong}"):
            started(device, hysteresis=wrong)


def test_hysteresis_counts_an_overflow_of_two_optimizers_once(device):
    """Their flags are summed, so they are 2 together."""
    params = parameters([torch.float32], device)[:2]
    optimizers = [FusedSGD([p], lr=0.1) for p in params]
    scaler = started(device, hysteresis=2)
    scales = []
    for _ in range(3):
        set_grads(params, 0, scale=torch.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4, 2, 1] and scaler.skipped_steps == 3


def test_update_with_a_new_scale(device):
    scaler = started(device)
    params = parameters([torch.float32], device)
    optimizer = FusedSGD(params, lr=0.1)
    set_grads(params, 0, scale=torch.inf)
    scaler.step(optimizer)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    assert scaler.skipped_steps == 1
    set_grads(params, 0, scale=32.0)
    scaler.step(optimizer)  # a new iteration
    scaler.update(torch.tensor(16.0, device=device))
    assert scaler.get_scale() == 16.0
    assert scaler.skipped_steps == 1
    scaler.update(8)  # torch's scaler ends an int with an AttributeError
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ("16", TypeError, "new_scale must be a finite number of at least 0, got '16'"),
        (math.nan, ValueError, "new_scale must be a finite number of at least 0, got nan"),
        (torch.ones(2), ValueError, r"got a tensor of shape \[2\] on "),
        (torch.ones((), requires_grad=True), ValueError, r"got a tensor of shape \[\] on \S+ that requires a gradient"),
        (torch.ones((), device="meta"), ValueError, r"got a tensor of shape \[\] on meta"),
    ],
)
def test_update_refuses_a_wrong_scale_before_it_counts_a_skip(device, wrong, error, says):
    scaler = started(device)
    params = parameters([torch.float32], device)
    optimizer = FusedSGD(params, lr=0.1)
    set_grads(params, 0, scale=torch.inf)
    scaler.step(optimizer)
    if isinstance(wrong, torch.Tensor) and wrong.device.type == "cpu":
        wrong = wrong.detach().to(device).requires_grad_(wrong.requires_grad)
    with pytest.raises(error, match=says):
        scaler.update(wrong)
    assert scaler.skipped_steps == 0
    scaler.update()
    assert scaler.skipped_steps == 1


# ------------------------------------------------------------------------------------------ skips and the last overflow
@pytest.mark.parametrize("via", [*TORCH, torch.optim.SGD])
def test_skipped_steps(device, via):
    scaler = started(device)
    assert scaler.skipped_steps == 0
    run_scales(scaler, device, "x.xx.", via)
    assert scaler.skipped_steps == 3
    assert scaler.skipped_steps.dtype is torch.int64
    assert scaler.skipped_steps.device.type == device.type


@families
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("hook", [False, True], ids=["", "hook"])
def test_last_overflow(device, family, named, unscale, max_grad_norm, hook):
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(3, 2)).to(device, torch.float16)
    params = list(model.parameters())
    optimizer = family(model.named_parameters() if named else params, lr=0.1, max_grad_norm=max_grad_norm)
    if hook:
        optimizer.register_step_pre_hook(lambda *_: None)
    scaler = started(device)
    assert scaler.last_overflow is None
    for step, bad in enumerate([(), (), (2,), (), (3, 1), ()], start=1):
        set_grads(params, step)
        for i in bad:
            params[i].grad.view(-1)[-1] = -torch.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step < 3:
            assert scaler.last_overflow is None
        elif step < 5:
            assert scaler.last_overflow == (3, "1.weight" if named else "param_groups[0]['params'][2]")
        else:  # the first of several
            assert scaler.last_overflow == (5, "0.bias" if named else "param_groups[0]['params'][1]")
    assert scaler.last_overflow.step == 5
    assert scaler.last_overflow.parameter.endswith("bias" if named else "[1]")


@families
def test_last_overflow_survives_what_changes_the_optimizer(device, family):
    params = parameters(ALL, device)
    optimizer = family([(f"p{i}", p) for i, p in enumerate(params[:2])], lr=0.1)
    scaler = started(device)
    iterate(scaler, optimizer, 0, overflow=True)
    expected = (1, "p1")
    assert scaler.last_overflow == expected
    optimizer.add_param_group({"params": [("p2", params[2]), ("p3", params[3])]})
    assert scaler.last_overflow == expected
    iterate(scaler, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert scaler.last_overflow == expected
    optimizer.param_groups[0]["lr"] = 0.2
    iterate(scaler, optimizer, 2)
    assert scaler.last_overflow == expected
    set_grads(params, 3)
    params[0].grad = None  # a hole does not shift the numbers
    params[3].grad.view(-1)[0] = torch.nan
    scaler.step(optimizer)
    assert scaler.last_overflow == (4, "p3")


def test_last_overflow_is_the_last_of_several_optimizers_that_step_unevenly(device):
    params = {name: torch.nn.Parameter(torch.ones(3, device=device)) for name in "ab"}
    optimizers = {name: FusedSGD([(name, param)], lr=0.1) for name, param in params.items()}
    scaler = started(device)
    for name, overflows in [("a", False), ("a", False), ("a", True), ("b", False), ("b", True)]:
        params[name].grad = torch.full_like(params[name], torch.inf if overflows else 1.0)
        scaler.step(optimizers[name])
        scaler.update()
    assert scaler.last_overflow == (2, "b")


def test_the_largest_elements_are_no_overflow(device):
    """Their squares overflow; found_inf comes from elements."""
    for dtype in ALL:
        p = torch.nn.Parameter(torch.zeros(70000, dtype=dtype, device=device))
        optimizer = FusedSGD([p], lr=0.0)
        scaler = started(device, init_scale=1.0)
        p.grad = torch.full_like(p, torch.finfo(dtype).max)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped_steps == 0
        assert scaler.last_overflow is None


def test_an_optimizer_is_not_kept_alive(device):
    scaler = started(device)
    params = parameters([torch.float32], device)
    optimizer = FusedSGD(params, lr=0.1)
    set_grads(params, 0)
    scaler.step(optimizer)
    scaler.update()
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert scaler.last_overflow is None


def objects() -> int:
    gc.collect()
    found = gc.get_objects()
    return len(found) + sum(issubclass(type(o), torch.Tensor) for o in found)


@pytest.mark.parametrize("via", [FusedSGD, torch.optim.SGD])
def test_what_belongs_to_an_optimizer_goes_with_it(device, via):
    """Except for the last overflow in one."""
    scaler = started(device, min_scale=1.0)
    lives = FusedSGD([("lives", torch.nn.Parameter(torch.ones(3, device=device)))], lr=0.1)

    def step(optimizer: Any, overflows: bool) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, torch.inf if overflows else 1.0)
        scaler.step(optimizer)

    def optimizers(count: int, overflow: int = -1) -> None:
        for i in range(count):
            named = [(f"parameter {j} of {i}", torch.nn.Parameter(torch.ones(3, device=device))) for j in range(9)]
            step(via(named, lr=0.1), i == overflow)
            step(lives, False)
            scaler.update()

    optimizers(5)
    before = objects()
    optimizers(40, overflow=3)
    optimizers(2)
    assert objects() - before < 40
    last = (1, "parameter 0 of 3")
    assert scaler.last_overflow == (None if via is torch.optim.SGD else last)
    for name in ("lives", "parameter 0 of 0"):  # later ones
        if name == "lives":
            step(lives, True)
            scaler.update()
        else:
            optimizers(1, overflow=0)
        assert via is torch.optim.SGD or scaler.last_overflow.parameter == name
    assert pickle.loads(pickle.dumps(scaler)).last_overflow is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a capture needs a GPU, or a fake one")
def test_a_capture_does_not_wait_for_what_is_gone(device, monkeypatch):
    scaler = started(device)
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedSGD([("gone", p)], lr=0.1)
    p.grad = torch.full_like(p, torch.inf)
    scaler.step(optimizer)
    del optimizer
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        scaler._forget_the_gone()
    assert len(scaler._logs) == 1
    scaler.update()
    assert len(scaler._logs) == 0 and scaler.last_overflow == (1, "gone")


# ---------------------------------------------------------------------------------------------------------- checkpoints
def test_state_dicts_go_both_ways(device):
    options = {"init_scale": 16.0, "growth_interval": 3}
    ours, theirs = started(device, **options, min_scale=0.5, hysteresis=2), stock(device, **options)
    run_scales(ours, device, "x.xx.")
    run_scales(theirs, device, "x..")
    saved = ours.state_dict()
    assert theirs.state_dict().keys() < saved.keys()
    assert saved["skipped_steps"] == 3

    loaded = stock(device)
    loaded.load_state_dict(saved)
    assert loaded.state_dict() == {k: saved[k] for k in loaded.state_dict()}

    for fresh in (amp_kernels.GradScaler(device.type), started(device)):
        fresh.load_state_dict(saved)
        assert fresh.state_dict() == saved
        fresh.scale(torch.zeros((), device=device))
        assert fresh.skipped_steps == 3
        rest = copy.deepcopy(fresh)
        rest.scale(torch.zeros((), device=device))
        assert run_scales(rest, device, "x.xx") == run_scales(fresh, device, "x.xx")

    from_torch = started(device, min_scale=2.0, hysteresis=3)
    from_torch.load_state_dict(theirs.state_dict())
    assert {k: from_torch.state_dict()[k] for k in theirs.state_dict()} == theirs.state_dict()
    assert from_torch.state_dict()["min_scale"] == 2.0
    assert from_torch.state_dict()["hysteresis"] == 3
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        from_torch.load_state_dict({})


@pytest.mark.parametrize("outside", [2.0, 64.0], ids=["below", "above"])
def test_a_scale_outside_of_the_bounds_is_saved(device, outside):
    """`update` sets it, and copies keep it. A scale that torch's scaler saved has no bounds, and is clamped."""
    bounded = started(device, min_scale=4.0, max_scale=32.0)
    bounded.update(outside)
    for fresh in (amp_kernels.GradScaler(device.type), started(device), copy.deepcopy(bounded)):
        fresh.load_state_dict(bounded.state_dict())
        assert fresh.get_scale() == copy.deepcopy(bounded).get_scale() == outside
        assert fresh.state_dict() == bounded.state_dict()
    bounded.load_state_dict(torch.amp.GradScaler.state_dict(bounded))
    assert bounded.get_scale() == min(max(outside, 4.0), 32.0)


@pytest.mark.parametrize("at", range(5))
def test_resumed_in_the_middle(device, at):
    pattern = "x.xx."
    whole = started(device, hysteresis=2, growth_interval=1)
    expected = run_scales(whole, device, pattern)
    first = started(device, hysteresis=2, growth_interval=1)
    begin = run_scales(first, device, pattern[:at])
    for how in ("load", "pickle", "deepcopy"):
        if how == "load":
            second = started(device)
            second.load_state_dict(first.state_dict())
        else:
            second = pickle.loads(pickle.dumps(first)) if how == "pickle" else copy.deepcopy(first)
            second.scale(torch.zeros((), device=device))
        assert begin + run_scales(second, device, pattern[at:]) == expected
        assert second.skipped_steps == whole.skipped_steps


REFUSED = [
    ("scale", math.inf), ("scale", -math.inf), ("scale", math.nan), ("scale", 1e39), ("scale", -1.0),
    ("scale", "65536"), ("scale", None), ("scale", True), ("scale", 1 + 2j), ("scale", torch.ones(2)),
    ("growth_factor", 1.0), ("growth_factor", math.nan), ("growth_factor", "2"),
    ("backoff_factor", 1.0), ("backoff_factor", math.nan), ("backoff_factor", -0.5),
    ("growth_interval", 2.5), ("growth_interval", 2**63), ("growth_interval", "2000"),
    ("_growth_tracker", -1), ("_growth_tracker", 2**31), ("_growth_tracker", 0.5),
    ("min_scale", math.inf), ("min_scale", math.nan), ("min_scale", -1), ("min_scale", 2.0**13),
    ("max_scale", 0), ("max_scale", math.nan), ("max_scale", 0.25), ("max_scale", None),
    ("hysteresis", 0), ("hysteresis", -1), ("hysteresis", 1.5), ("hysteresis", "2"), ("hysteresis", 2**31),
    ("_hysteresis_tracker", 0.5), ("_hysteresis_tracker", 2**31), ("skipped_steps", -1), ("skipped_steps", 0.5),
]  # fmt: skip


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("saved_by", ["ours", "torch's"])
def test_a_refused_state_dict_changes_nothing(device, is_running, saved_by):
    """Options have to pass the constructor's checks. Counts have to be numbers that a scaler can reach."""
    options = {"min_scale": 0.5, "max_scale": 2.0**12, "hysteresis": 2}
    scaler = started(device, **options) if is_running else amp_kernels.GradScaler(device.type, **options)
    if is_running:
        run_scales(scaler, device, "x.xx")
    before = scaler.state_dict()
    other = stock(device, init_scale=8.0) if saved_by == "torch's" else started(device, **options | {"init_scale": 8.0})
    saved = other.state_dict()
    for name, wrong in REFUSED:
        if name in saved or name == "min_scale":
            with pytest.raises((TypeError, ValueError), match=r"GradScaler\.load_state_dict: \w+ must be .*, got"):
                scaler.load_state_dict({**saved, name: wrong})
            assert scaler.state_dict() == before, (name, wrong)
    for name in stock(device).state_dict():
        with pytest.raises(ValueError, match=f"state_dict must hold scale, .*, got no {name}"):
            scaler.load_state_dict({k: v for k, v in saved.items() if k != name})
        assert scaler.state_dict() == before
    for wrong in (None, [saved], 3):
        with pytest.raises(TypeError, match="state_dict must be a dict, got a"):
            scaler.load_state_dict(wrong)
    assert scaler.state_dict() == before
    scaler.load_state_dict({k: torch.tensor(v) for k, v in saved.items() if k != "format"})
    after = {**before, **saved}
    if saved_by == "torch's":
        after |= {"skipped_steps": 0, "_hysteresis_tracker": 2}
    assert scaler.state_dict() == after


def test_the_constructor_refuses_the_same(device):
    by_torch = r"must be [<>] 1|not supported between instances of 'str'"
    for name, wrong in REFUSED:
        if name != "skipped_steps" and not name.startswith("_"):
            options = {"min_scale": 0.5, "max_scale": 2.0**12} | {"init_scale" if name == "scale" else name: wrong}
            with pytest.raises((TypeError, ValueError, AssertionError), match=rf"GradScaler: \w+ must be|{by_torch}"):
                amp_kernels.GradScaler(device.type, **options)


@pytest.mark.parametrize("scale", [0.0, 2.0**100])
def test_a_scale_that_is_reached_is_loaded(device, scale):
    """160 overflows end at 0, as with torch's scaler."""
    scaler, other = started(device), started(device)
    scaler.update(scale)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == scale and other.state_dict() == scaler.state_dict()


# ------------------------------------------------------------------------------------------------------ what it says
@pytest.mark.parametrize(("device", "error"), [("gpu", ValueError), ("CPU", ValueError), (None, TypeError)], ids=str)
def test_a_device_that_torch_does_not_know(device, error):
    with pytest.raises(error, match=r"^GradScaler: device must be a device type like 'cuda' or 'cpu', got"):
        amp_kernels.GradScaler(device)
    with pytest.raises(ValueError, match=r"got 'gpu'; for a GPU pass 'cuda'$"):
        amp_kernels.GradScaler("gpu", enabled=False)


@pytest.mark.parametrize(
    "options", [{}, {"device": "cuda", "init_scale": 8.0, "hysteresis": 2}], ids=["default", "cuda"]
)
@pytest.mark.parametrize(
    "kind", [amp_kernels.GradScaler, type("Own", (amp_kernels.GradScaler,), {})], ids=["", "derived"]
)
def test_without_cuda_one_warning_names_this_scaler(monkeypatch, kind, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = kind(**options)
    (warning,) = caught
    assert str(warning.message).startswith("amp_kernels.GradScaler: device is 'cuda', but CUDA is not available")
    assert warning.filename == __file__
    assert not scaler.is_enabled() and scaler.scale(3.0) == 3.0 and scaler.state_dict() == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_kernels.GradScaler(enabled=False)


def test_repr_shows_the_scale():
    scaler = amp_kernels.GradScaler("cpu", init_scale=8.0, max_scale=1024.0, hysteresis=2)
    shown = (
        "GradScaler(device='cpu', scale={}, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, "
        "min_scale=0.0, max_scale=1024.0, hysteresis=2)"
    )
    assert repr(scaler) == shown.format(8.0)  # before there is a tensor
    scaler.scale(torch.ones(()))
    scaler.update(4.0)
    assert repr(scaler) == shown.format(4.0) == repr(pickle.loads(pickle.dumps(scaler)))
    scaler._scale = torch.ones((), device="meta")  # as after an error of CUDA, when nothing can be read
    assert "scale=unreadable: " in repr(scaler) and "\n" not in repr(scaler)
    assert repr(amp_kernels.GradScaler("cpu", enabled=False)) == "GradScaler(enabled=False)"


def test_repr_leaves_a_capture_alone(monkeypatch):
    scaler = amp_kernels.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    monkeypatch.setattr("amp_kernels.grad_scaler.capturing", lambda device: True)
    assert "scale=unknown during a capture, " in repr(scaler)
