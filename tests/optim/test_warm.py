"""The warm step: one call of C++ (csrc/ops/step.cpp) that reads every tensor again. It leaves unusual ones to Python.

Most tests compare with an optimizer that takes all of its steps in Python.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from optim_cases import dtypes, examples, optimizers
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_kernels import GradScaler, _loader, torch_private, use_backend
from amp_kernels.ops.table import LEAST_LEAN, STATE_DTYPES
from amp_kernels.optim import FusedAdam, FusedAdamW, FusedSGD
from amp_kernels.optim._base import _READ_BY_CPP, FusedOptimizer
from amp_kernels.optim._sweep import sweep

pytestmark = pytest.mark.skipif(sweep().compiled is None, reason="C++ cannot read the tensors of this torch")


class Twins:
    """Two optimizers with equal parameters. The second takes every step in Python."""

    def __init__(self, family: Any, shapes: Any = ((64,), (40, 9)), dtype: Any = torch.float32, **options: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)
        made = [[torch.nn.Parameter(self.randn(*shape, dtype=dtype)) for shape in shapes] for _ in range(2)]
        for ours, theirs in zip(*made, strict=True):
            theirs.data.copy_(ours.data)
        self.params = made
        self.ours, self.python = (family(params, **options) for params in made)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def set_grads(self, make: Callable[[Tensor], Tensor | None] = torch.clone) -> None:
        for ours, theirs in zip(*self.params, strict=True):
            grad = self.randn(*ours.shape, dtype=ours.dtype)
            ours.grad, theirs.grad = make(grad), make(grad)

    def step(self, warm: bool, step: Callable[[Any], Any] = lambda optimizer: optimizer.step()) -> None:
        """`warm`: whether C++ has to take the step."""
        assert (count_of_python_steps(self.ours, step) == 0) == warm
        self.python._warm = None
        step(self.python)
        self.compare()

    def warm_up(self) -> None:
        """The first step makes the states. The second finds them, and the third is warm."""
        for _ in range(2):
            self.set_grads()
            self.step(warm=False)
        self.set_grads()
        self.step(warm=True)

    def compare(self) -> None:
        for ours, theirs in zip(*self.params, strict=True):
            assert torch.equal(ours, theirs)
            states = self.ours.state.get(ours, {}), self.python.state.get(theirs, {})
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def count_of_python_steps(optimizer: FusedOptimizer, step: Callable[[Any], Any]) -> int:
    calls = []
    prepare = FusedOptimizer._prepare
    optimizer._prepare = lambda **options: calls.append(0) or prepare(optimizer, **options)  # type: ignore[method-assign]
    try:
        step(optimizer)
    finally:
        del optimizer._prepare  # type: ignore[method-assign]
    return len(calls)


# ---------------------------------------------------------------------------------------------------------- same bits
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=lambda dtype: str(dtype)[6:])
@dtypes
@examples
def test_same_bits(family, options, dtype, state_dtype):
    twins = Twins(family, ((LEAST_LEAN,), (40, 9), (0,)), dtype, **options, state_dtype=state_dtype)
    twins.warm_up()
    for lr in (0.01, 0.02, 1, 0.5):
        for optimizer in (twins.ours, twins.python):
            optimizer.param_groups[0]["lr"] = lr
        twins.set_grads()
        twins.step(warm=True)


def test_a_schedule_of_momentum_is_warm():
    twins = Twins(FusedSGD, lr=0.1, momentum=0.9)
    twins.warm_up()
    for momentum in (0.8, 0.7, 0.7):
        for optimizer in (twins.ours, twins.python):
            optimizer.param_groups[0]["momentum"] = momentum
        twins.set_grads()
        twins.step(warm=True)


@pytest.mark.parametrize(
    ("family", "option", "make", "change"),
    [
        (FusedSGD, "momentum", lambda: torch.tensor(0.9), lambda value: value.fill_(0.1)),
        (FusedSGD, "weight_decay", lambda: torch.tensor(0.1), lambda value: value.fill_(0.5)),
        (FusedAdam, "betas", lambda: [0.9, 0.99], lambda value: value.__setitem__(0, 0.5)),
        (FusedAdam, "betas", lambda: (torch.tensor(0.9), 0.99), lambda value: value[0].fill_(0.5)),
    ],
    ids=["momentum", "decay", "list", "tuple"],
)
def test_options_that_change_in_place(family, option, make, change):
    twins = Twins(family, lr=0.1, momentum=0.9) if family is FusedSGD else Twins(family, lr=0.1)
    optimizers = twins.ours, twins.python
    for optimizer in optimizers:
        optimizer.param_groups[0][option] = make()
    for i in range(5):
        if i == 3:
            for optimizer in optimizers:
                change(optimizer.param_groups[0][option])
        twins.set_grads()
        twins.step(warm=False)


def test_options_after_a_refused_step():
    """The step has written the new momentum, but not taken. C++ must not take it for the old one."""
    twins = Twins(FusedSGD, lr=0.1, momentum=0.9)
    twins.warm_up()
    group = twins.ours.param_groups[0]
    group["momentum"], group["lr"] = 0.1, "fast"
    with pytest.raises(ValueError, match="could not convert"):
        twins.ours.step()
    group["momentum"], group["lr"] = 0.9, 0.1
    twins.set_grads()
    twins.ours.step()
    twins.python.step()
    twins.compare()


def test_options_that_no_formula_reads():
    twins = Twins(FusedSGD, lr=0.1, momentum=0.9)
    twins.ours.defaults["tag"] = twins.python.defaults["tag"] = "x"
    twins.ours.param_groups[0]["count"] = 0
    twins.warm_up()
    twins.ours.defaults.clear()
    for momentum in (0.9, 0.5):
        twins.ours.param_groups[0]["count"] += 1
        for optimizer in (twins.ours, twins.python):
            optimizer.param_groups[0]["momentum"] = momentum
        twins.set_grads()
        twins.step(warm=True)


@pytest.mark.parametrize(("option", "value"), [("amsgrad", True), ("state_dtype", torch.int8)])
def test_options_with_other_states_are_left_to_python(option, value):
    twins = Twins(FusedAdam, ((LEAST_LEAN,),), lr=0.1)
    twins.warm_up()
    for optimizer in (twins.ours, twins.python):
        optimizer.param_groups[0][option] = value
    for _ in range(2):
        twins.set_grads()
        twins.step(warm=False)
    twins.set_grads()
    twins.step(warm=True)


@optimizers
def test_a_rate_in_a_tensor_is_read_by_the_kernel(family):
    rates = torch.tensor(0.1), torch.tensor(0.1)
    twins = Twins(family, lr=0.1)
    for optimizer, rate in zip((twins.ours, twins.python), rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
    twins.warm_up()
    for rate in rates:
        rate.fill_(0.3)
    twins.set_grads()
    twins.step(warm=True)
    # The host reads the value of any other rate.
    for rate in (0.2, 1, np.float32(0.3), torch.tensor([0.4]), torch.tensor(0.2, dtype=torch.float64)):
        for optimizer in (twins.ours, twins.python):
            optimizer.param_groups[0]["lr"] = rate
        twins.set_grads()
        twins.step(warm=True)
    twins.ours.param_groups[0]["lr"] = "fast"
    with pytest.raises(ValueError, match="could not convert string to float"):
        twins.ours.step()


def test_parameters_without_a_gradient():
    """The step raises the versions of the other parameters alone."""
    twins = Twins(FusedAdam, ((3,), (4,), (5,)), lr=0.1)
    twins.warm_up()
    for params in twins.params:
        params[1].grad = None
    versions = [p._version for p in twins.params[0]]
    twins.step(warm=True)
    assert [p._version - before for p, before in zip(twins.params[0], versions, strict=True)] == [1, 0, 1]
    twins.set_grads()
    twins.step(warm=True)
    for params in twins.params:
        for p in params:
            p.grad = None
    twins.step(warm=False)


# --------------------------------------------------------------------------------------------------- nothing is cached
def convert_gradients(optimizer: Any, convert: Callable[[Tensor], Tensor]) -> None:
    for p in optimizer.param_groups[0]["params"]:
        grad = convert(p.grad)
        p.grad = None
        p.grad_dtype = None
        p.grad = grad


def replace_state(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][0]
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"] * 2


def negate_gradient(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][1]
    p.grad = torch._neg_view(p.grad)


def move_parameter(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][1]
    p.data = p.data.clone()


def transpose_gradient(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][1]
    p.grad = p.grad.t().contiguous().t()


CHANGES: dict[str, tuple[Callable[[Any], None], bool]] = {
    "moved parameter": (move_parameter, True),
    "replaced state": (replace_state, True),
    "count written": (lambda o: [s["step"].fill_(7) for s in o.state.values()], True),
    "negated gradient": (negate_gradient, False),
    "gradient in another order": (transpose_gradient, False),
    "gradients of another dtype": (lambda o: convert_gradients(o, Tensor.half), False),
    "a key of somebody else": (lambda o: next(iter(o.state.values())).update(slow=torch.ones(64)), True),
    "dropped state": (lambda o: o.state.pop(o.param_groups[0]["params"][0]), False),
    "new group": (lambda o: o.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}), False),
    "group of a tuple": (lambda o: o.param_groups[0].update(params=tuple(o.param_groups[0]["params"])), True),
}


@pytest.mark.parametrize(("change", "warm"), CHANGES.values(), ids=CHANGES)
def test_what_other_code_changes_counts(change, warm):
    twins = Twins(FusedAdam, ((64,), (40, 9)), lr=0.1)
    twins.warm_up()
    twins.set_grads()
    change(twins.ours)
    change(twins.python)
    twins.step(warm=warm)
    for _ in range(2):
        twins.set_grads()
        twins.ours.step()
        twins.python.step()
        twins.compare()


def test_overlaps_raise():
    p = torch.nn.Parameter(torch.ones(64))
    optimizer = FusedSGD([p], lr=0.1)
    for _ in range(3):
        p.grad = torch.ones(64)
        optimizer.step()
    p.grad = p.data
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="must not share memory with parameters"):
        optimizer.step()
    assert torch.equal(p, before)


# ----------------------------------------------------------------------------------------------------- what torch does
def test_modes():
    twins = Twins(FusedAdam, lr=0.1)
    twins.warm_up()
    for context in (torch.inference_mode, torch.enable_grad, torch.no_grad):
        versions = [p._version for p in twins.params[0]]
        with context():
            twins.set_grads()
            twins.step(warm=True)
        assert [p._version for p in twins.params[0]] == [before + 1 for before in versions]
        assert all(p.is_leaf and p.requires_grad for p in twins.params[0])
    with use_backend("reference"):
        assert count_of_python_steps(twins.ours, lambda optimizer: optimizer.step()) == 1
    from torch._subclasses.fake_tensor import FakeTensorMode

    for _ in range(2):
        twins.ours.step()
    with FakeTensorMode(), pytest.raises(RuntimeError, match="must not run in a mode that makes fake tensors"):
        twins.ours.step()


def test_autograd_sees_that_weights_were_written():
    twins = Twins(FusedAdam, lr=0.1)
    twins.warm_up()
    p = twins.params[0][0]
    loss = (p.detach().clone().requires_grad_() * p).sum()
    twins.set_grads()
    twins.step(warm=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_schedulers_and_the_profiler():
    twins = Twins(FusedAdam, lr=0.1)
    twins.warm_up()
    calls: list[str] = []
    hooks = [
        twins.ours.register_step_pre_hook(lambda *_: calls.append("pre")),
        twins.ours.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global")),
    ]
    twins.ours.step()
    for hook in hooks:
        hook.remove()
    assert calls == ["pre", "post", "global"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(twins.ours, 1, 0.5)
        assert count_of_python_steps(twins.ours, lambda optimizer: optimizer.step()) == 0
        scheduler.step()
    assert twins.ours.param_groups[0]["lr"] == 0.05
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert count_of_python_steps(twins.ours, lambda optimizer: optimizer.step()) == 0
    assert any(event.name.startswith("Optimizer.step#FusedAdam") for event in profile.events())


def test_closures():
    twins = Twins(FusedAdam, lr=0.1)
    twins.warm_up()

    def step(optimizer: Any) -> None:
        params = optimizer.param_groups[0]["params"]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in params)
            loss.backward()
            return loss

        assert float(optimizer.step(closure)) > 0

    twins.step(True, step)


# ------------------------------------------------------------------------------------------------- scalers and clipping
@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
@dtypes
@optimizers
def test_scalers(family, dtype, scaler, max_grad_norm):
    twins = Twins(family, dtype=dtype, lr=0.01, max_grad_norm=max_grad_norm)
    scalers = {optimizer: scaler("cpu", init_scale=4.0) for optimizer in (twins.ours, twins.python)}
    for own in scalers.values():
        own.scale(torch.ones(()))

    def step(optimizer: Any) -> None:
        scalers[optimizer].step(optimizer)
        scalers[optimizer].update()

    for i, factor in enumerate([1.0, 1.0, 1.0, float("inf"), 1.0, float("nan"), 2.0]):
        twins.set_grads(lambda grad, factor=factor: grad * factor)
        twins.step(i > 1, step)
        assert scalers[twins.ours].get_scale() == scalers[twins.python].get_scale()
        if max_grad_norm is not None:
            torch.testing.assert_close(twins.ours.grad_norm, twins.python.grad_norm, rtol=0, atol=0, equal_nan=True)
        assert bool(twins.ours.step_was_skipped) == (i in (3, 5))
    if scaler is GradScaler:
        assert scalers[twins.ours].last_overflow == scalers[twins.python].last_overflow


def test_gradients_that_a_hook_changes_are_read_again():
    twins = Twins(FusedSGD, lr=1.0)
    scalers = {optimizer: GradScaler("cpu", init_scale=1.0) for optimizer in (twins.ours, twins.python)}
    for optimizer, own in scalers.items():
        own.scale(torch.ones(()))
        optimizer.register_step_pre_hook(lambda optimizer, *_: convert_gradients(optimizer, lambda grad: grad * 2))

    def step(optimizer: Any) -> None:
        scalers[optimizer].step(optimizer)
        scalers[optimizer].update()

    for i in range(4):
        before = twins.params[0][0].detach().clone()
        twins.set_grads()
        gradient = twins.params[0][0].grad.clone()
        twins.step(i > 0, step)  # the check of the first step makes the states, and the step finds them
        assert torch.equal(twins.params[0][0], before - 2 * gradient)


@dtypes
@optimizers
def test_unscaled_gradients(family, dtype):
    """Clipping between `unscale_` and the step, as in torch's examples."""
    twins = Twins(family, ((40, 9), (64,), (0,)), dtype, lr=0.01)
    scalers = {optimizer: GradScaler("cpu", init_scale=4.0) for optimizer in (twins.ours, twins.python)}
    for own in scalers.values():
        own.scale(torch.ones(()))

    def step(optimizer: Any) -> None:
        params = optimizer.param_groups[0]["params"]
        was_skipped, versions = bool(optimizer.step_was_skipped), [p.grad._version for p in params]
        scalers[optimizer].unscale_(optimizer)
        assert [p.grad._version for p in params] == [version + 1 for version in versions]
        assert bool(optimizer.step_was_skipped) == was_skipped
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        scalers[optimizer].step(optimizer)
        scalers[optimizer].update()

    for i, factor in enumerate([1.0, 1.0, 1.0, float("inf"), 1.0]):
        twins.set_grads(lambda grad, factor=factor: grad * factor)
        twins.step(i > 0, step)
        for ours, theirs in zip(*twins.params, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda shared: shared, "must not share memory with itself or another gradient"),
        (lambda shared: torch.inference_mode()(torch.ones)(64), "must not be an inference tensor"),
    ],
    ids=["shared", "inference"],
)
def test_gradients_that_cannot_be_unscaled_are_refused(make, message):
    twins = Twins(FusedSGD, ((64,), (64,)), lr=0.1)
    twins.warm_up()
    shared = torch.ones(64)
    for p in twins.params[0]:
        p.grad = make(shared)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=message):
        scaler.unscale_(twins.ours)
    assert torch.equal(shared, torch.ones(64)) and torch.equal(twins.params[0][0].grad, torch.ones(64))


@optimizers
def test_clipping_without_a_scaler(family):
    twins = Twins(family, lr=0.01, max_grad_norm=0.1)
    twins.warm_up()
    twins.set_grads()
    twins.step(warm=True)
    assert torch.equal(twins.ours.grad_norm, twins.python.grad_norm)


def test_a_step_that_cpp_refuses_after_its_check_is_taken_in_python():
    twins = Twins(FusedSGD, lr=0.1)
    twins.warm_up()
    twins.set_grads()
    for params in twins.params:
        params[1].grad = None  # the plan does not know it yet
    versions = [p._version for p in twins.params[0]]
    verdict = twins.ours._check(torch.ones(()))
    assert verdict.plans is _READ_BY_CPP
    twins.ours._step_under(verdict._replace(grad_scale=torch.ones(1)[0]._neg_view()))
    assert [p._version - before for p, before in zip(twins.params[0], versions, strict=True)] == [1, 0]
    twins.python.grad_scale, twins.python.found_inf = -torch.ones(()), torch.zeros(())
    twins.python.step()
    twins.compare()


# ------------------------------------------------------------------------------------------------------ memory, threads
def test_an_optimizer_in_a_cycle_is_collected():
    """The garbage collector cannot look into a capsule, so a capsule must not own what may refer to the optimizer."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = p.optimizer = FusedSGD([p], lr=0.1)
    for _ in range(4):
        p.sum().backward()
        optimizer.step()
    assert optimizer._warm is not None
    alive = weakref.ref(optimizer)
    del p, optimizer
    gc.collect()
    assert alive() is None


def test_nothing_is_held_after_a_call():
    twins = Twins(FusedAdam, lr=0.1)
    twins.warm_up()
    p, scaler = twins.params[0][0], GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))

    def unscale() -> None:
        scaler.unscale_(twins.ours)
        scaler._per_optimizer_states.clear()

    def refused() -> None:
        twins.params[0][1].grad = twins.params[0][1].grad.to_sparse()
        with pytest.raises(RuntimeError, match="must be dense"):
            twins.ours.step()

    for call in (twins.ours.step, unscale, twins.ours.init_state, refused):
        for warm in (twins.ours._warm, None):
            twins.set_grads()
            twins.ours._warm = warm
            found = weakref.ref(p.grad)
            call()
            p.grad = None
            assert found() is None, call


def test_gradients_and_states_are_given_back():
    twins = Twins(FusedAdam, lr=0.1)
    twins.warm_up()
    p = twins.params[0][0]
    found = [weakref.ref(p.grad), weakref.ref(twins.ours.state[p]["exp_avg"])]
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(twins.ours)
    p.grad = None
    del twins.ours.state[p]["exp_avg"]
    assert [ref() for ref in found] == [None, None]


# Another thread replaces the gradient while the kernel runs without the GIL, and fills freed memory with inf.
RACE = """
import sys, threading, time, torch
from amp_kernels import GradScaler
from amp_kernels.optim import FusedAdamW
torch.set_num_threads(1)
n = 10_000_000  # 40 MB: glibc gives memory of more than 32 MB back at once
p = torch.nn.Parameter(torch.zeros(n))
p.grad = torch.ones(n)
optimizer, scaler = FusedAdamW([p], lr=1e-3), GradScaler("cpu", init_scale=1.0)
scaler.scale(torch.ones(()))
stop, replaced = [False], [0]
def replace():
    while not stop[0]:
        p.grad = torch.ones(n)
        torch.full((n,), float("inf"))
        replaced[0] += 1
        time.sleep(0.001)
thread = threading.Thread(target=replace, daemon=True)
thread.start()
while replaced[0] < 15:
    if sys.argv[1] == "python":
        optimizer._warm = None
    if sys.argv[1] == "scaler":
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
stop[0] = True
thread.join()
assert bool(p.isfinite().all()) and bool(optimizer.state[p]["exp_avg"].isfinite().all())
"""


# Another thread executes `replace` again and again, while the step reads its small tensors.
SMALL_RACE = """
import sys, threading, torch
from amp_kernels.optim import FusedSGD
torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
params = [torch.nn.Parameter(torch.zeros(32)) for _ in range({count})]
for p in params:
    p.grad = torch.ones(32)
optimizer = FusedSGD({groups}, lr={lr}, momentum=0.9)
for _ in range(3):
    optimizer.step()
stop = [False]
def replace():
    while not stop[0]:
        {replace}
        junk = [[1] * 21 for _ in range(5)], [torch.full((32,), float("inf")) for _ in range(2)]
thread = threading.Thread(target=replace, daemon=True)
thread.start()
for _ in range({steps}):
    optimizer.step()
stop[0] = True
thread.join()
assert all(bool(p.isfinite().all()) for p in params)
"""
STATES = """for p in params:
            p.grad = torch.ones(32)
            optimizer.state[p]["momentum_buffer"] = torch.ones(32)"""
RATES = 'optimizer.param_groups = [{**group, "lr": torch.tensor(1e-3)} for group in optimizer.param_groups]'
ONE_GROUP_EACH = '[{"params": [p]} for p in params]'
RACES = {
    **dict.fromkeys(("warm", "python", "scaler"), RACE),
    "states": SMALL_RACE.format(count=300, groups="params", lr=1e-3, steps=1000, replace=STATES),
    "rates": SMALL_RACE.format(count=20, groups=ONE_GROUP_EACH, lr="torch.tensor(1e-3)", steps=20000, replace=RATES),
}


@pytest.mark.parametrize("kind", RACES)
def test_another_thread_replaces_gradients(kind):
    program = RACES[kind]
    done = subprocess.run([sys.executable, "-c", program, kind], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_two_threads_that_step_an_optimizer_at_the_same_time_are_refused():
    p = torch.nn.Parameter(torch.zeros(8_000_000))
    p.grad = torch.ones_like(p)
    optimizer, errors, barrier = FusedSGD([p], lr=1.0), [], threading.Barrier(2)
    for _ in range(3):
        optimizer.step()

    def step() -> None:
        barrier.wait()
        for _ in range(20):
            try:
                optimizer.step()
            except RuntimeError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=step) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors and all("two threads must not step an optimizer at the same time" in error for error in errors)
    assert torch.equal(p, torch.full_like(p, -(3.0 + 40 - len(errors))))


def test_an_interruption_reaches_the_user(monkeypatch, mesh):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    p = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = FusedSGD([p], lr=0.5)

    def step() -> None:
        other = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        p.grad = distribute_tensor(torch.ones(4), other, [Shard(0)])
        optimizer.step()

    for _ in range(3):
        step()

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    before = p.detach().full_tensor()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_prepare", None)
        grad = distribute_tensor(torch.ones(4), torch.distributed.device_mesh.init_device_mesh("cpu", (1,)), [Shard(0)])
        p.grad = grad
        patch.setattr(DeviceMesh, "__eq__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert torch.equal(p.detach().full_tensor(), before)


# ------------------------------------------------------------------------------------------------------------- DTensors
@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@dtypes
@optimizers
def test_dtensors(mesh, family, dtype):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    twins = Twins(family, dtype=dtype, lr=0.1)
    placements = [Shard(0)], [Replicate()]
    twins.params[0] = [
        torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placed))
        for p, placed in zip(twins.params[0], placements, strict=True)
    ]
    twins.ours = family(twins.params[0], lr=0.1)

    def step(warm: bool, odd: bool = False) -> None:
        for ours, theirs in zip(*twins.params, strict=True):
            theirs.grad = twins.randn(*theirs.shape, dtype=dtype)
            on = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # an equal one
            ours.grad = distribute_tensor(theirs.grad.clone(), on, [Replicate()] if odd else ours.placements)
        assert (count_of_python_steps(twins.ours, lambda optimizer: optimizer.step()) == 0) == warm
        twins.python.step()
        for ours, theirs in zip(*twins.params, strict=True):
            assert torch.equal(ours.full_tensor(), theirs)

    for warm in (False, False, True, True):
        step(warm)
    step(False, odd=True)  # a replicated gradient of a sharded parameter
    for warm in (False, True):
        step(warm)


@pytest.mark.parametrize("names", [("no_tensor", "_spec"), ("_local_tensor", "no_spec")], ids=["tensor", "spec"])
def test_a_torch_that_names_the_attributes_of_dtensors_otherwise(monkeypatch, mesh, names):
    from torch.distributed.tensor import Shard, distribute_tensor

    monkeypatch.setattr(torch_private, "dtensor_attributes", lambda: names)
    sweep.cache_clear()
    _loader.reader.cache_clear()
    try:
        p = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = FusedSGD([p], lr=0.5)
        for _ in range(4):
            p.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
            assert count_of_python_steps(optimizer, lambda optimizer: optimizer.step()) == 1
        assert torch.equal(p.to_local(), torch.full((4,), -1.0))
    finally:
        sweep.cache_clear()
        _loader.reader.cache_clear()


def test_a_torch_that_does_not_count_modes(monkeypatch):
    monkeypatch.setattr(torch_private, "dispatch_mode_count", lambda: None)
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedSGD([p], lr=0.5)
    for _ in range(4):
        p.grad = torch.ones(4)
        assert count_of_python_steps(optimizer, lambda optimizer: optimizer.step()) == 1
    assert torch.equal(p.detach(), torch.full((4,), -1.0))


def test_steps_of_the_reference_stay_in_python():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdamW([p], lr=0.5)
    with use_backend("reference"):
        for _ in range(3):
            p.grad = torch.ones(4)
            optimizer.step()
    assert optimizer._warm is None
