"""Learning rate schedulers under loss scaling: skipped steps are told, not counted, and torch never warns of them."""

from __future__ import annotations

import bisect
import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import amp_kernels
from amp_kernels import GradScaler, amp
from amp_kernels.optim import FusedAdamW, FusedSGD, SkipAwareScheduler
from amp_kernels.optim import schedulers as module

SKIPPED = (0, 3, 4)
STEPS = 8


def train(
    optimizer: Any, weight: Tensor, scaler: Any, scheduler: Any, skipped: tuple[int, ...] = SKIPPED
) -> list[bool]:
    """Whether each step was skipped, as the optimizer says."""
    said = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = weight.sum() * (torch.inf if step in skipped else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        said.append(bool(getattr(optimizer, "step_was_skipped", False)))
        scheduler.step()
    return said


def weight_of(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torchs"])
def test_skipped_steps_are_told_and_not_counted(scaler: type) -> None:
    weight = weight_of()
    optimizer = FusedSGD([weight], lr=1.0)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    scheduler = SkipAwareScheduler(lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n))
    assert isinstance(scheduler, lr_scheduler.LRScheduler) and scheduler.optimizer is optimizer
    assert not optimizer.step_was_skipped
    said = train(optimizer, weight, scaler("cpu", init_scale=8.0), scheduler)
    assert said == [step in SKIPPED for step in range(STEPS)]
    counted = [sum(before not in SKIPPED for before in range(step - 1)) for step in range(STEPS)]
    assert rates == [0.5**n for n in counted]
    assert scheduler.last_epoch == STEPS - len(SKIPPED) - 1 and scheduler.get_last_lr() == [0.5**scheduler.last_epoch]


def test_nothing_is_late_without_a_scaler() -> None:
    weight = weight_of()
    optimizer = FusedSGD([weight], lr=1.0)
    scheduler = SkipAwareScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))
    train(optimizer, weight, GradScaler("cpu", enabled=False), scheduler, ())
    assert scheduler.get_last_lr() == [0.5**STEPS]


def test_the_host_reads_a_verdict_one_iteration_after_its_copy_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a read waits for the copy, so the copy of the newest verdict must not be read."""
    events: list[tuple[str, int]] = []

    class Verdict:
        def __init__(self, found_inf: Tensor) -> None:
            self.value, self.number = bool(found_inf), len([1 for what, _ in events if what == "copy"])
            events.append(("copy", self.number))

        def __bool__(self) -> bool:
            events.append(("read", self.number))
            return self.value

    monkeypatch.setattr(module, "_ask", Verdict)
    weight = weight_of()
    optimizer = FusedSGD([weight], lr=1.0)
    train(optimizer, weight, GradScaler("cpu"), SkipAwareScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5)))
    assert events == [("copy", 0), *(pair for n in range(1, STEPS) for pair in [("copy", n), ("read", n - 1)])]


@pytest.mark.parametrize("saved_after", [1, 4, 6], ids="after-{}".format)
def test_resuming_continues_exactly(saved_after: int) -> None:
    """Also where the verdict that was not counted yet is "skipped", and reading it for a checkpoint changes nothing."""

    def start() -> tuple[Any, ...]:
        weight = weight_of(torch.float16)
        optimizer = FusedAdamW([weight], lr=1.0)
        scheduler = SkipAwareScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))
        return weight, optimizer, GradScaler("cpu", init_scale=8.0), scheduler

    def run(steps: range, weight: Any, optimizer: Any, scaler: Any, scheduler: Any) -> None:
        for step in steps:
            train_one(step, weight, optimizer, scaler, scheduler)

    def train_one(step: int, weight: Any, optimizer: Any, scaler: Any, scheduler: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (torch.inf if step in SKIPPED else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    whole, again = start(), start()
    run(range(saved_after), *whole)
    saved = [part.state_dict() for part in whole[1:]]
    assert saved[2]["was_skipped"] == (saved_after - 1 in SKIPPED)
    again[0].data.copy_(whole[0].data)
    for part, state in zip(again[1:], saved, strict=True):
        part.load_state_dict(state)
    pickle.dumps(whole[3])
    for parts in (whole, again):
        run(range(saved_after, STEPS), *parts)
    assert torch.equal(again[1].master(again[0]), whole[1].master(whole[0]))
    assert again[3].state_dict() == whole[3].state_dict()


# ------------------------------------------------------------------------------------ what the scheduler itself decides
WRITES: dict[str, tuple[Any, str, Any]] = {
    "base_lrs": (lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.5**n), "base_lrs", [8.0]),
    "gamma": (lambda o: lr_scheduler.ExponentialLR(o, 0.5), "gamma", 0.25),
    "T_max": (lambda o: lr_scheduler.CosineAnnealingLR(o, 4), "T_max", 8),
    "lr_lambdas": (lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.5**n), "lr_lambdas", [lambda n: 1 / (1 + n)]),
    "last_epoch": (lambda o: lr_scheduler.StepLR(o, 3), "last_epoch", 1),
}


@pytest.mark.parametrize("how", WRITES)
def test_writes_reach_the_scheduler(how: str) -> None:
    make, name, value = WRITES[how]
    plain, held = (make(FusedSGD([weight_of()], lr=1.0)) for _ in range(2))
    scheduler = SkipAwareScheduler(held)
    setattr(plain, name, value)
    setattr(scheduler, name, value)
    assert getattr(held, name) is getattr(scheduler, name) is value and name not in vars(scheduler)
    for one in (plain, scheduler):
        one.optimizer.step()
        one.step()
    assert scheduler.get_last_lr() == plain.get_last_lr()
    assert set(vars(scheduler)) == {"scheduler", "_was_skipped", "_steps_before"}


def test_reads_reach_the_scheduler() -> None:
    """Also what LRScheduler itself has, or answers with an error."""
    held = lr_scheduler.OneCycleLR(FusedSGD([weight_of()], lr=1.0), 1.0, total_steps=4)
    scheduler = SkipAwareScheduler(held)
    for name in ("base_lrs", "_last_lr", "_step_count", "last_epoch", "optimizer", "total_steps", "_schedule_phases"):
        assert getattr(scheduler, name) == getattr(held, name)
    scheduler._step_count += 3  # accelerate, while gradients are accumulated
    assert held._step_count == 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "use get_last_lr()"
        assert scheduler.get_lr() == held.get_lr()
    with pytest.raises(AttributeError, match="'OneCycleLR' object has no attribute 'gamma'"):
        scheduler.gamma  # noqa: B018


@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torchs"])
@pytest.mark.parametrize("skipped", [(), (2, 5, 8), (0, 1, 2)], ids=["", "last of each", "a whole epoch"])
def test_an_epoch_is_an_epoch(scaler: type, skipped: tuple[int, ...]) -> None:
    weight = weight_of()
    optimizer = FusedSGD([weight], lr=1.0)
    scheduler = SkipAwareScheduler(lr_scheduler.ExponentialLR(optimizer, 0.1))
    scale, rates = scaler("cpu", init_scale=8.0), []
    for step in range(9):
        train_one(step, weight, optimizer, scale, skipped)
        if step % 3 == 2:
            scheduler.step()
            rates += scheduler.get_last_lr()
    assert rates == pytest.approx([0.1, 0.01, 0.001])


def train_one(step: int, weight: Any, optimizer: Any, scaler: Any, skipped: tuple[int, ...]) -> None:
    optimizer.zero_grad()
    scaler.scale(weight.sum() * (torch.inf if step in skipped else 1)).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("how", ["state dict", "deepcopy", "pickle", "copy"])
@pytest.mark.parametrize("saved_after", [1, 2, 4, 5])
def test_resuming_within_an_epoch_continues_exactly(saved_after: int, how: str) -> None:
    """A copy, or a new process, counts the optimizer's steps from 0."""
    parts = epochs()
    run_epochs(range(saved_after), *parts)
    if how == "state dict":
        others = epochs()
        for part, other in zip(parts[1:], others[1:], strict=True):
            other.load_state_dict(part.state_dict())
    elif how == "copy":
        others = (*parts[:3], copy.copy(parts[3]))
    else:
        others = copy.deepcopy(parts) if how == "deepcopy" else pickle.loads(pickle.dumps(parts))
    run_epochs(range(saved_after, 9), *others)
    assert others[3].get_last_lr() == pytest.approx([0.001])


def epochs() -> tuple[Any, ...]:
    weight = weight_of()
    optimizer = FusedSGD([weight], lr=1.0)
    scheduler = SkipAwareScheduler(lr_scheduler.ExponentialLR(optimizer, 0.1))
    return weight, optimizer, GradScaler("cpu", init_scale=8.0), scheduler


def run_epochs(steps: range, weight: Any, optimizer: Any, scaler: Any, scheduler: Any) -> None:
    for step in steps:
        train_one(step, weight, optimizer, scaler, (2, 5, 8))
        if step % 3 == 2:
            scheduler.step()


class OlderSequentialLR(lr_scheduler.SequentialLR):
    """That of torch 2.10 begins a scheduler with `step(0)`."""

    def step(self) -> None:  # type: ignore[override]
        self.last_epoch += 1
        index = bisect.bisect_right(self._milestones, self.last_epoch)
        scheduler = self._schedulers[index]
        starts = index > 0 and self._milestones[index - 1] == self.last_epoch
        scheduler.step(*[0] * starts)
        self._last_lr = scheduler.get_last_lr()


@pytest.mark.parametrize("kind", [lr_scheduler.SequentialLR, OlderSequentialLR], ids=["newer", "older"])
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_inside_a_sequence(kind: Any) -> None:
    """Where nothing is skipped or late, rates are those without the wrapper."""
    rates: list[list[float]] = []
    for wrap in (lambda s: s, SkipAwareScheduler):
        weight = weight_of()
        optimizer = FusedSGD([weight], lr=1.0)
        warm, rest = lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 3), lr_scheduler.ExponentialLR(optimizer, 0.5)
        scheduler = kind(optimizer, [wrap(warm), wrap(rest)], [3])
        rates.append(scheduler.get_last_lr())
        for step in range(STEPS):
            train_one(step, weight, optimizer, GradScaler("cpu", enabled=False), ())
            scheduler.step()
            rates[-1] += scheduler.get_last_lr()
        saved = scheduler.state_dict()
        scheduler.load_state_dict(saved)
        assert scheduler.state_dict() == saved
    assert rates[0] == rates[1] and len(set(rates[0])) > 3


def test_the_next_scheduler_of_a_sequence_counts_no_skips() -> None:
    """The steps before its start are not its own."""
    weight = weight_of()
    optimizer = FusedSGD([weight], lr=1.0)
    parts = [lr_scheduler.ConstantLR(optimizer, 1.0), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    scheduler = lr_scheduler.SequentialLR(optimizer, [SkipAwareScheduler(part) for part in parts], [3])
    rates = []
    for step in range(STEPS):
        train_one(step, weight, optimizer, scaler := GradScaler("cpu", init_scale=8.0), (3, 4))
        scheduler.step()
        rates += scheduler.get_last_lr()
    assert scaler.is_enabled() and rates == [1, 1, 1, 1, 1, 1, 0.5, 0.25]


def test_a_chain_has_the_verdict_for_each_scheduler() -> None:
    weight = weight_of()
    optimizer = FusedSGD([weight], lr=1.0)
    parts = [lr_scheduler.ExponentialLR(optimizer, rate) for rate in (0.5, 0.25)]
    chained = lr_scheduler.ChainedScheduler([SkipAwareScheduler(part) for part in parts])
    train(optimizer, weight, GradScaler("cpu", init_scale=8.0), chained)
    assert [part.last_epoch for part in parts] == [STEPS - len(SKIPPED) - 1] * 2
    assert chained.get_last_lr() == [0.125 ** (STEPS - len(SKIPPED) - 1)]


def test_several_calls_for_one_step_are_steps_of_the_scheduler() -> None:
    """accelerate calls it once for each process, and looks for the end of a OneCycleLR."""
    weight = weight_of()
    optimizer = FusedSGD([weight], lr=1.0)
    scheduler = SkipAwareScheduler(lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9))
    for step in range(STEPS):
        train_one(step, weight, optimizer, GradScaler("cpu", enabled=False), ())
        for _ in range(2):
            if scheduler._step_count <= scheduler.total_steps:
                scheduler.step()
    assert scheduler.last_epoch == 9


def test_a_subclass_has_its_own_methods() -> None:
    class Sub(SkipAwareScheduler):
        def get_last_lr(self) -> list[Any]:
            return ["own", *super().get_last_lr()]

        def twice(self) -> None:
            self.step()
            self.step()

    scheduler = Sub(lr_scheduler.ExponentialLR(FusedSGD([weight_of()], lr=1.0), 0.5))
    scheduler.twice()
    assert scheduler.get_last_lr() == ["own", 0.25]


def test_an_optimizer_that_has_a_count_of_steps_or_others_first() -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
            self.optimizers, self._steps = optimizers, 0
            super().__init__([p for o in optimizers for p in o.param_groups[0]["params"]], {"lr": 1.0})

        def step(self, closure: Any = None) -> None:
            self._steps += 1
            for optimizer in self.optimizers:
                optimizer.step()

    optimizer = Counting([torch.optim.SGD([weight_of()], lr=1.0), FusedSGD([weight_of()], lr=1.0)])
    scheduler = SkipAwareScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_what_is_refused() -> None:
    theirs, ours = torch.optim.SGD([weight_of()], lr=1.0), FusedSGD([weight_of()], lr=1.0)
    with pytest.raises(
        TypeError, match=r"scheduler must be one of torch.optim.lr_scheduler that counts steps, got a Fused"
    ):
        SkipAwareScheduler(ours)
    with pytest.raises(TypeError, match="that counts steps, got a ReduceLROnPlateau"):
        SkipAwareScheduler(lr_scheduler.ReduceLROnPlateau(ours))
    with pytest.raises(TypeError, match=r"optimizer of scheduler must be one of amp_kernels.optim, got a SGD"):
        SkipAwareScheduler(lr_scheduler.StepLR(theirs, 2))
    plain = lr_scheduler.StepLR(ours, 2)
    scheduler = SkipAwareScheduler(plain)
    with pytest.raises(TypeError, match="that counts steps, got a SkipAwareScheduler"):
        SkipAwareScheduler(scheduler)
    with pytest.raises(TypeError, match="state_dict must be a dict, got a NoneType"):
        scheduler.load_state_dict(None)
    with pytest.raises(ValueError, match="must have the keys"):
        scheduler.load_state_dict({"scheduler": plain.state_dict(), "was_skipped": "no"})
    with pytest.raises(
        ValueError, match=r"must have the keys scheduler and was_skipped \(a bool or None\), got step_size"
    ):
        scheduler.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="epoch must be None, got 3"):
        scheduler.step(3)


def test_nothing_is_late_where_the_host_decides() -> None:
    weight = weight_of()
    optimizer = Overridden([weight], lr=1.0)
    scheduler = SkipAwareScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))
    train(optimizer, weight, GradScaler("cpu"), scheduler)
    assert scheduler.get_last_lr() == [0.5 ** (STEPS - len(SKIPPED))]


class Overridden(FusedSGD):
    """The scaler skips its steps on the host, without a call of `step`."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD, Overridden], ids=["torchs", "ours", "overridden"])
def test_torch_warns_of_no_skip(make: Any) -> None:
    """torch says "Detected call of `lr_scheduler.step()` before `optimizer.step()`", if the first step is skipped."""
    wrappers = [lambda s: s, SkipAwareScheduler] if issubclass(make, FusedSGD) else [lambda s: s]
    for wrapper in wrappers:
        weight = weight_of()
        optimizer = make([weight], lr=1.0)
        scheduler = wrapper(lr_scheduler.StepLR(optimizer, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(optimizer, weight, GradScaler("cpu"), scheduler)


class Forwarding(torch.optim.Optimizer):
    """A wrapper around an optimizer, with its groups."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Slots:
    """A proxy that takes no attribute."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: Any) -> None:
        object.__setattr__(self, "optimizer", optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD], ids=["torchs", "ours"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_torch_warns_of_no_skip_in_wrappers(make: Any, depth: int) -> None:
    """The scheduler may have any optimizer of a chain, which a proxy without attributes may end."""
    weight = weight_of()
    chain = [make([weight], lr=1.0)]
    for _ in range(2):
        chain.append(Forwarding(chain[-1]))
    scheduler = lr_scheduler.StepLR(chain[depth], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Slots(chain[-1]), weight, GradScaler("cpu"), scheduler)


def test_torch_still_warns_of_a_scheduler_that_steps_first() -> None:
    optimizer = torch.optim.SGD([weight_of()], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    with pytest.warns(UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_amp_initialize_leaves_schedulers_without_a_warning(level: str) -> None:
    """A scheduler made before it had wrapped the step of torch's optimizer."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 4), lr_scheduler.ConstantLR(optimizer, 1.0)], [4]
    )
    before = optimizer.param_groups[0]["lr"]
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert optimizer.param_groups[0]["lr"] == before == 0.25 and optimizer._step_supports_amp_scaling
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amp_kernels.amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        scheduler.step()
