"""`amp_kernels.amp`: each level is its handwritten counterpart, and scripts that were written for apex.amp run."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import itertools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optim_cases import FULL, TORCH, randn
from torch import Tensor

from amp_kernels import GradScaler, amp
from amp_kernels.integrations import apex
from amp_kernels.optim import FusedAdamW, FusedRMSprop, FusedSGD
from amp_kernels.optim._base import FusedOptimizer

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, OVERFLOW = 20, 5


@pytest.fixture(autouse=True)
def once_a_test(monkeypatch):
    """Tests begin as a process does, before `initialize`."""
    monkeypatch.setattr(apex, "_set_up", None)


def network(device: Any = "cpu", seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(12, 24), torch.nn.BatchNorm1d(24), torch.nn.ReLU(), torch.nn.Linear(24, 4)]
    return torch.nn.Sequential(*layers).to(device)


def batch(step: int, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    x = randn(32, 12, seed=step, device=device)
    return x, x[:, :4].argmax(1)


def with_fp32_norms(net: torch.nn.Module) -> torch.nn.Module:
    net[0].half(), net[3].half()
    return net


def scale_of(loss_id: int = 0) -> float:
    return amp.state_dict()[f"loss_scaler{loss_id}"]["scale"]


# ------------------------------------------------------------------------------------------------------------- levels
def by_hand(
    net: torch.nn.Module,
    optimizer: FusedOptimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    scaler: GradScaler,
    device: Any,
) -> None:
    for step in range(STEPS):
        loss = loss_of(*batch(step, device))
        if step == OVERFLOW and scaler.is_enabled():
            loss = loss * torch.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def by_amp(net: torch.nn.Module, optimizer: Any, device: Any, overflows: bool = True) -> None:
    for step in range(STEPS):
        x, y = batch(step, device)
        loss = F.cross_entropy(net(x), y)
        if step == OVERFLOW and overflows:
            loss = loss * torch.inf
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def assert_same_training(ours: Any, theirs: Any) -> None:
    """Of two pairs of a network and an optimizer all that training changes, bit for bit."""
    (net, optimizer), (other, other_optimizer) = ours, theirs
    for (name, x), y in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert x.dtype is y.dtype and torch.equal(x, y), name
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.master(p), other_optimizer.master(q))
        state, other_state = optimizer.state[p], other_optimizer.state[q]
        assert state.keys() == other_state.keys()
        for key in state:
            assert torch.equal(state[key], other_state[key]), key


# AdamW too, which shares Adam's family.
OPTIONS = {**FULL, FusedAdamW: {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}}
CLASSES = {**TORCH, FusedAdamW: torch.optim.AdamW}
classes = pytest.mark.parametrize("ours", CLASSES, ids=lambda c: c.__name__)


@classes
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_level_is_its_handwritten_counterpart(device, ours, level):
    net = network(device)
    net, optimizer = amp.initialize(net, CLASSES[ours](net.parameters(), **OPTIONS[ours]), opt_level=level, verbosity=0)
    assert type(optimizer) is ours
    by_amp(net, optimizer, device, overflows=level in ("O1", "O2"))

    other = network(device)
    if level in ("O2", "O3"):
        other = with_fp32_norms(other) if level == "O2" else other.half()
    scaler = GradScaler(device.type, enabled=level in ("O1", "O2"), max_scale=2.0**24)
    other_optimizer = ours(other.parameters(), **OPTIONS[ours])

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.float16, enabled=level == "O1"):
            output = other(x.to(other[0].weight.dtype))
        return F.cross_entropy(output.float(), y)  # CUDA's autocast would round what log_softmax returns to fp16

    by_hand(other, other_optimizer, loss_of, scaler, device)
    assert_same_training((net, optimizer), (other, other_optimizer))
    if scaler.is_enabled():
        assert scale_of() == scaler.get_scale() < 2.0**16
        assert int(scaler.skipped_steps) >= 1


@pytest.mark.parametrize(
    ("options", "layers", "norms"),
    [
        ({"opt_level": "O2"}, torch.float16, torch.float32),
        ({"opt_level": "O2", "keep_batchnorm_fp32": False}, torch.float16, torch.float16),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "True"}, torch.float16, torch.float32),
        ({"opt_level": "O3", "keep_batchnorm_fp32": True}, torch.float16, torch.float32),
        ({"opt_level": "O3", "keep_batchnorm_fp32": "False"}, torch.float16, torch.float16),
        ({"opt_level": "O1"}, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_dtypes_of_weights(options, layers, norms):
    net = network()
    amp.initialize(net, FusedSGD(net.parameters()), verbosity=0, **options)
    assert {p.dtype for layer in (net[0], net[3]) for p in layer.parameters()} == {layers}
    assert net[1].weight.dtype is net[1].bias.dtype is net[1].running_mean.dtype is norms
    assert net[1].num_batches_tracked.dtype is torch.int64
    assert net(batch(0)[0]).dtype is torch.float32


@pytest.mark.parametrize("loss_scale", [128.0, "128.0"])
def test_a_static_scale_stays_and_skips(loss_scale):
    net = network()
    net, optimizer = amp.initialize(
        net, FusedSGD(net.parameters(), lr=0.1), opt_level="O3", loss_scale=loss_scale, verbosity=0
    )
    by_amp(net, optimizer, "cpu")
    assert scale_of() == 128 and all(p.isfinite().all() for p in net.parameters())


def test_bounds_of_the_scale():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, min_loss_scale=2.0, max_loss_scale=8.0, verbosity=0)
    assert scale_of() == 8
    for _ in range(4):
        with amp.scale_loss(net(batch(0)[0]).sum() * torch.inf, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert scale_of() == 2


# ---------------------------------------------------------------------------------------------------------- scale_loss
def prepared(level: str = "O2", **options: Any) -> tuple[torch.nn.Module, Any]:
    net = network()
    return amp.initialize(
        net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), opt_level=level, verbosity=0, **options
    )


def backward(net: torch.nn.Module, optimizer: Any, step: int, factor: float = 1.0, **options: Any) -> None:
    x, y = batch(step)
    with amp.scale_loss(factor * F.cross_entropy(net(x), y), optimizer, **options) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_and_halves(level):
    net, optimizer = prepared(level, max_loss_scale=256.0)
    backward(net, optimizer, 0)
    optimizer.step()
    before, state = copy.deepcopy(list(net.parameters())), copy.deepcopy(optimizer.state_dict()["state"])
    backward(net, optimizer, 1, torch.inf)
    optimizer.step()
    assert scale_of() == 128
    for p, q in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, q)
    for key, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[key][name]) for name, value in entry.items())
    optimizer.zero_grad()
    backward(net, optimizer, 2)
    optimizer.step()
    assert scale_of() == 128
    assert any(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_gradients_are_unscaled_in_fp32():
    """At a scale of 2^16 a gradient of 2^-30 is an fp16 number, unscaled it is not."""
    net, optimizer = prepared()
    weight = net[3].weight
    with amp.scale_loss((weight.float() * 2.0**-30).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert weight.grad.dtype is torch.float32
    assert torch.equal(weight.grad, torch.full_like(weight.grad, 2.0**-30))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_of_several_losses_add_up(level):
    """Each loss is unscaled by its own scale."""
    net, optimizer = prepared(level, num_losses=2, max_loss_scale=1024.0)
    net.eval()  # else each forward pass changes the statistics of the next one
    backward(net, optimizer, 7, torch.inf, loss_id=1)
    optimizer.step()
    assert (scale_of(0), scale_of(1)) == (1024, 512)
    apart = []
    for loss_id in (0, 1):
        optimizer.zero_grad()
        backward(net, optimizer, loss_id, loss_id=loss_id)
        apart.append([p.grad for p in net.parameters()])
    optimizer.zero_grad()
    for loss_id in (0, 1):
        backward(net, optimizer, loss_id, loss_id=loss_id)
    for p, first, second in zip(net.parameters(), *apart, strict=True):
        assert p.grad.dtype is torch.float32 and torch.equal(p.grad, first + second)


def test_an_overflow_of_one_loss_skips_the_step_of_both():
    net, optimizer = prepared("O1", num_losses=2, max_loss_scale=64.0)
    before = copy.deepcopy(list(net.parameters()))
    backward(net, optimizer, 0, torch.inf, loss_id=0)
    backward(net, optimizer, 1, loss_id=1)
    optimizer.step()
    assert (scale_of(0), scale_of(1)) == (32, 64)
    for p, q in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, q)


def test_a_loss_of_two_optimizers():
    one, two = network(seed=0), network(seed=1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.RMSprop(two.parameters(), lr=0.1)]
    (one, two), optimizers = amp.initialize([one, two], optimizers, opt_level="O1", verbosity=0)
    assert [type(o) for o in optimizers] == [FusedSGD, FusedRMSprop]
    before = copy.deepcopy([*one.parameters(), *two.parameters()])
    x, _ = batch(0)
    loss = one(x).sum() + two(x)[:, 0].sum()
    two[3].weight.register_hook(lambda grad: grad * torch.inf)
    with amp.scale_loss(loss, optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip([*one.parameters(), *two.parameters()], before, strict=True))


def test_a_failed_backward_leaves_earlier_gradients():
    net, optimizer = prepared("O2")
    backward(net, optimizer, 0)
    before = [p.grad.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match="out of memory"), amp.scale_loss(net(batch(1)[0]).sum(), optimizer) as loss:
        loss.backward()
        raise RuntimeError("out of memory")
    for p, grad in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


def test_a_failed_check_leaves_the_scale_usable():
    one, two = network(seed=0), torch.nn.Embedding(8, 4, sparse=True)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, two)]
    (one, two), optimizers = amp.initialize([one, two], optimizers, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="sparse"):
        loss = one(batch(0)[0]).sum() + two(torch.tensor([1])).sum()
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
    backward(one, [optimizers[0], optimizers[0]], 1)
    backward(one, optimizers[0], 1)
    optimizers[0].step()


def test_a_parameter_in_two_optimizers():
    net = network()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)]
    net, optimizers = amp.initialize(net, optimizers, verbosity=0)
    with pytest.raises(ValueError, match="got one parameter in two of them"):
        backward(net, optimizers, 0)


def test_a_verdict_goes_with_its_gradients():
    """A loop that looks at the norm, and throws gradients away instead of calling `step`."""
    net, optimizer = prepared("O1", max_loss_scale=64.0)
    backward(net, optimizer, 0, torch.inf)
    optimizer.zero_grad()
    before = net[0].weight.detach().clone()
    backward(net, optimizer, 1)
    optimizer.step()
    assert not torch.equal(net[0].weight, before)


def test_earlier_gradients_of_parameters_that_a_loss_does_not_reach():
    net, optimizer = prepared("O1")
    backward(net, optimizer, 0)
    before = net[0].weight.grad.clone()
    with amp.scale_loss(net[3].weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert torch.equal(net[0].weight.grad, before)


def test_a_loss_in_fp16_is_scaled_in_fp32():
    net, optimizer = prepared("O1")
    with amp.scale_loss(4 * net[3].bias.sum().half() + 4, optimizer) as scaled_loss:
        assert scaled_loss.isfinite() and scaled_loss.dtype is torch.float32
        scaled_loss.backward()


def test_clipping_sees_unscaled_gradients():
    net, optimizer = prepared("O2")
    backward(net, optimizer, 0)
    expected = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    assert 0.01 < expected < 100
    total = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5 * float(expected))
    torch.testing.assert_close(total, expected)
    clipped = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    torch.testing.assert_close(clipped, 0.5 * expected)
    optimizer.step()


# ----------------------------------------------------------------------------------------------- without scale_loss
def unscaled_step(net: torch.nn.Module, optimizer: Any, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def warnings_of(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


@classes
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("mixed", [False, True], ids=["no scale_loss", "every other one"])
def test_a_loop_without_scale_loss_trains_with_a_scale_of_1(ours, level, mixed):
    """Bit for bit as without a scaler, and it says so once where a scale was set."""
    net, other = network(), network()
    net, optimizer = amp.initialize(
        net, CLASSES[ours](net.parameters(), **OPTIONS[ours]), opt_level=level, max_loss_scale=2.0**10, verbosity=0
    )
    if level in ("O2", "O3"):
        other = with_fp32_norms(other) if level == "O2" else other.half()
    other_optimizer = ours(other.parameters(), **OPTIONS[ours])
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled=level in ("O1", "O2"))

    def run() -> None:
        for step in range(6):
            if mixed and step % 2:
                optimizer.zero_grad()
                backward(net, optimizer, step)
                optimizer.step()
            else:
                unscaled_step(net, optimizer, step)

    messages = warnings_of(run)
    for step in range(6):
        x, y = batch(step)
        with torch.autocast("cpu", torch.float16, enabled=level == "O1"):
            loss = F.cross_entropy(other(x.to(other[0].weight.dtype)).float(), y)
        other_optimizer.zero_grad()
        if mixed and step % 2:
            scaler.scale(loss).backward()
            scaler.step(other_optimizer)
            scaler.update()
        else:
            loss.backward()
            other_optimizer.step()
    assert_same_training((net, optimizer), (other, other_optimizer))
    assert len(messages) == (level in ("O1", "O2"))
    for message in messages:
        assert f"{ours.__name__}.step() took gradients that do not come from amp.scale_loss" in message


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"opt_level": "O1"}, 1),
        ({"opt_level": "O1", "loss_scale": 1}, 0),
        ({"opt_level": "O2", "loss_scale": "1.0"}, 0),
        ({"opt_level": "O3", "loss_scale": 128}, 1),
        ({"opt_level": "O0", "loss_scale": 128}, 0),
    ],
    ids=str,
)
def test_a_scale_that_is_not_used_warns_once_for_each_initialize(options, count):
    net = network()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (net[0], net[3])]
    for _ in range(2):
        amp.initialize(net, optimizers, verbosity=0, **options)
        idle = optimizers[0]
        idle.zero_grad()
        assert warnings_of(idle.step) == []  # nothing to scale

        def steps() -> None:
            for step in range(3):
                for optimizer in optimizers:
                    unscaled_step(net, optimizer, step)

        assert len(warnings_of(steps)) == count


def test_gradients_of_which_some_are_from_scale_loss():
    """They are added up unscaled, whichever comes first. A second step on them, or one with a closure, is no other."""
    net, optimizer = prepared("O2", max_loss_scale=512.0)
    net.eval()
    apart = []
    for step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(batch(step)[0]), batch(step)[1]).backward()
        apart.append([p.grad.float() for p in net.parameters()])

    def accumulate() -> Tensor:
        optimizer.zero_grad()
        F.cross_entropy(net(batch(0)[0]), batch(0)[1]).backward()
        backward(net, optimizer, 1)
        F.cross_entropy(net(batch(2)[0]), batch(2)[1]).backward()
        return torch.zeros(())

    accumulate()
    for p, *grads in zip(net.parameters(), *apart, strict=True):
        torch.testing.assert_close(p.grad, sum(grads), rtol=2e-3, atol=1e-4)
    assert warnings_of(optimizer.step) == warnings_of(optimizer.step) == []
    assert warnings_of(lambda: optimizer.step(accumulate)) == []
    optimizer.zero_grad()
    assert len(warnings_of(lambda: unscaled_step(net, optimizer, 0))) == 1


@pytest.mark.filterwarnings("ignore:amp. FusedSGD.step:UserWarning")
@pytest.mark.parametrize("is_stepped", [True, False], ids=["stepped", "thrown away"])
def test_steps_without_a_loss_are_not_judged(is_stepped):
    """The verdict is on the step after the block, and on no other."""
    net, optimizer = prepared("O1")
    backward(net, optimizer, 0, torch.inf)
    if is_stepped:
        optimizer.step()
    before = net[0].weight.detach().clone()
    optimizer.zero_grad(set_to_none=not is_stepped)  # after a step the same tensors may be used again
    net(batch(1)[0]).sum().backward()
    optimizer.step()
    assert not torch.equal(net[0].weight, before)


def test_a_verdict_holds_for_gradients_that_were_replaced():
    """By their mean over ranks, for example."""
    net, optimizer = prepared("O1")
    before = net[0].weight.detach().clone()
    backward(net, optimizer, 0, torch.inf)
    for p in net.parameters():
        p.grad = p.grad / 2
    assert warnings_of(optimizer.step) == []
    assert torch.equal(net[0].weight, before)


@pytest.mark.parametrize("make", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_a_scaler_of_the_users_own(make, factor):
    """In place of `scale_loss`, on fp32 weights that torch's scaler takes too."""
    net, optimizer = prepared("O1")
    scaler, before = make("cpu", init_scale=64.0), net[0].weight.detach().clone()

    def run() -> None:
        x, y = batch(0)
        scaler.scale(factor * F.cross_entropy(net(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    assert warnings_of(run) == []
    assert torch.equal(net[0].weight, before) == (factor != 1)
    assert scaler.get_scale() == (64 if factor == 1 else 32)


# ------------------------------------------------------------------------------------------------------------ replacing
@classes
def test_state_and_groups_are_kept(ours):
    """Training that began with torch's optimizer goes on with ours, under a scheduler that was made before."""
    finals = []
    for switches in (False, True):
        net = network()
        groups = [{"params": [*net[0].parameters()], "lr": 0.01}, {"params": [*net[3].parameters()], "name": "head"}]
        given = optimizer = CLASSES[ours](groups, **OPTIONS[ours])
        head = optimizer.param_groups[1]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        for step in range(8):
            if switches and step == 3:
                net, optimizer = amp.initialize(net, optimizer, opt_level="O0", verbosity=0)
                assert optimizer is given and type(optimizer) is ours and optimizer.param_groups[1] is head
                assert optimizer._step_supports_amp_scaling  # not torch's step, which the scheduler wrapped
            optimizer.zero_grad()
            F.cross_entropy(net(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[1]["name"] == "head"
        finals.append((list(net.parameters()), [group["lr"] for group in optimizer.param_groups]))
    (theirs, their_rates), (switched, our_rates) = finals
    assert our_rates == their_rates == [0.01 / 4, OPTIONS[ours]["lr"] / 4]
    for p, q in zip(switched, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_ours_stay_what_they_are():
    net = network()
    ours = FusedAdamW(net.parameters(), max_grad_norm=1.0)
    _, optimizer = amp.initialize(net, ours, opt_level="O2", verbosity=0)
    assert optimizer is ours and optimizer.max_grad_norm == 1.0


# ------------------------------------------------------------------------------------------------------------- forward
class Everything(torch.nn.Module):
    """Inputs and outputs in containers, an LSTM over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 5)

    def forward(self, packed: Any, *, options: dict[str, Any]) -> dict[str, Any]:
        assert options["ids"].dtype is torch.int64 and options["name"] == "x"
        assert options["nested"][0].dtype is packed.data.dtype is self.lstm.weight_ih_l0.dtype
        output, (h, c) = self.lstm(packed)
        return {"output": output, "state": (h, c), "ids": options["ids"]}


def test_tensors_in_containers_are_cast():
    net = amp.initialize(Everything(), opt_level="O3", verbosity=0)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    got = net(packed, options={"ids": torch.arange(3), "name": "x", "nested": [torch.ones(2)]})
    assert got["output"].data.dtype is got["state"][1].dtype is torch.float32
    assert got["ids"].dtype is torch.int64


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_copy_computes_with_its_own_weights(level):
    net, _ = prepared(level)
    other = copy.deepcopy(net.eval())
    x, _ = batch(0)
    assert torch.equal(other(x), net(x))
    torch.nn.init.zeros_(other[3].weight)
    torch.nn.init.zeros_(other[3].bias)
    assert other(x).abs().max() == 0 < net(x).abs().max()


def test_replicas_compute_with_their_own_weights():
    """Those of DataParallel, which makes them by the class and the dict of a module."""
    net, _ = prepared("O2")
    replica = net._replicate_for_data_parallel()
    replica._modules = copy.deepcopy(net._modules)
    torch.nn.init.zeros_(replica[3].weight), torch.nn.init.zeros_(replica[3].bias)
    assert replica(batch(0)[0]).abs().max() == 0 < net(batch(0)[0]).abs().max()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_models(level):
    net, _ = prepared(level)
    compiled = torch.compile(net.eval(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch(0)[0]), net(batch(0)[0]))


class Named(torch.nn.Module):
    def forward(self, dtype, model=None, *, self_=None, autocast=None):
        assert dtype.dtype is model.dtype is self_.dtype is autocast.dtype is torch.float16
        return dtype


def test_arguments_of_any_name():
    net = amp.initialize(Named(), opt_level="O3", verbosity=0)
    x = torch.ones(2)
    assert net(dtype=x, model=x, self_=x, autocast=x).dtype is torch.float32
    assert list(inspect.signature(net.forward).parameters) == ["dtype", "model", "self_", "autocast"]


class Containers(torch.nn.Module):
    def forward(self, x, head, cache):
        assert head.weight.dtype is torch.float32
        cache.append(1)
        found = collections.defaultdict(list, logits=[x])
        return found, torch.max(x, 0), head


def test_containers_keep_their_classes_and_modules_their_weights():
    net = amp.initialize(Containers(), opt_level="O2", verbosity=0)
    head, cache = torch.nn.Linear(2, 2), []
    found, largest, same = net(torch.ones(3, 2), head, cache)
    assert same is head and head.weight.dtype is torch.float32 and cache == [1]
    assert type(found) is collections.defaultdict
    assert found["logits"][0].dtype is largest.values.dtype is torch.float32
    assert found["other"] == [] and largest.indices.dtype is torch.int64


@dataclasses.dataclass
class Output:
    name: str
    hidden: list[Tensor]


@dataclasses.dataclass
class Slots:
    __slots__ = ("hidden",)
    hidden: list[Tensor]


@dataclasses.dataclass
class Derived(Slots):
    """The slots of the class alone, "mask", are not all that it has."""

    __slots__ = ("mask",)


class Batch:
    def __init__(self, hidden: list[Tensor]) -> None:
        self.hidden = hidden
        self.parts = [self]  # a cycle

    def to(self, dtype: torch.dtype) -> Batch:
        raise AssertionError("may cast integers too")


class Wraps(torch.nn.Module):
    """Returns in an object what it takes in one."""

    def __init__(self, wrap: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, given: Any, dtype: torch.dtype) -> list[Any]:
        return [self.wrap([given.hidden[0].to(dtype)])]


@pytest.mark.parametrize("wrap", [functools.partial(Output, "x"), Slots, Derived, Batch])
def test_other_objects_must_have_the_dtypes_of_the_level(wrap):
    """They are passed on as they are. An fp16 loss is never silent."""
    net = amp.initialize(Wraps(wrap), opt_level="O2", verbosity=0)
    of_fp16 = wrap([torch.ones(2).half()])
    (same,) = net(of_fp16, torch.float32)
    assert type(same) is type(of_fp16) and same.hidden[0].dtype is torch.float32
    with pytest.raises(TypeError, match=r"inside a \w+ must be torch.float32, got another dtype in hidden; cast them"):
        net(of_fp16, torch.float16)
    with pytest.raises(TypeError, match=r"inside a \w+ must be torch.float16, got another dtype in hidden; cast them"):
        net(wrap([torch.ones(2)]), torch.float32)
    under_autocast = amp.initialize(Wraps(wrap), opt_level="O1", verbosity=0)
    assert under_autocast(wrap([torch.ones(2).double()]), torch.float32)[0].hidden[0].dtype is torch.float32


# ---------------------------------------------------------------------------------------------------------- once again
@pytest.mark.parametrize("ours", [FusedSGD, FusedAdamW])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_cell_that_is_run_twice(ours, level):
    """The same model and optimizer, trained a while: they go on bit for bit, under a new scale."""
    options = {"opt_level": level, "verbosity": 0, "max_loss_scale": 64.0}
    runs = []
    for again in (False, True):
        net = network()
        net, optimizer = amp.initialize(net, CLASSES[ours](net.parameters(), **OPTIONS[ours]), **options)
        for step in range(4):
            if again and step == 2:
                same = amp.initialize(net, optimizer, **options)
                assert same[0] is net and same[1] is optimizer and type(optimizer) is ours
            backward(net, optimizer, step)
            optimizer.step(), optimizer.zero_grad()
        runs.append((net, optimizer))
    assert type(runs[0][0]).__mro__ == type(runs[1][0]).__mro__ and len(optimizer._optimizer_step_post_hooks) == 1
    assert_same_training(*runs)


@pytest.mark.parametrize("new", ["nothing", "model and optimizer", "optimizer"])
def test_a_second_call_starts_again(new):
    net, optimizer = prepared("O1", num_losses=2, max_loss_scale=64.0)
    backward(net, optimizer, 0, torch.inf)  # a verdict that no step has taken
    earlier = optimizer
    if new == "model and optimizer":
        net = network(seed=1)
    if new != "nothing":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O2", max_loss_scale=512.0, verbosity=0)
    assert amp.state_dict().keys() == {"loss_scaler0"} and scale_of() == 512
    assert net[0].weight.dtype is torch.float16 and net[1].weight.dtype is torch.float32
    seen = []
    net[0].register_forward_pre_hook(lambda _, x: seen.append((x[0].dtype, torch.is_autocast_enabled("cpu"))))
    optimizer.zero_grad()
    before = net[3].weight.detach().clone()
    backward(net, optimizer, 1)
    optimizer.step()
    assert seen == [(torch.float16, False)]  # cast once, and not by the level before
    assert not torch.equal(net[3].weight, before)
    if optimizer is not earlier:
        with pytest.raises(TypeError, match=r"the last amp\.initialize returned, got another FusedSGD"):
            backward(net, earlier, 2)


@pytest.mark.parametrize("again", [True, False], ids=["same optimizer", "new optimizer"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_weights_that_become_fp32_again_are_their_masters(level, again):
    net, optimizer = prepared("O2", max_loss_scale=64.0)
    for step in range(2):
        backward(net, optimizer, step)
        optimizer.step(), optimizer.zero_grad()
    masters = [optimizer.master(p) for p in net.parameters()]
    assert any(not torch.equal(m.half().float(), m) for m in masters)
    if not again:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    assert all(p.dtype is torch.float32 for p in net.parameters())
    assert all(map(torch.equal, net.parameters(), masters))
    backward(net, optimizer, 2)
    optimizer.step()
    assert not torch.equal(net[3].weight, masters[-2])


def test_a_refused_second_call_changes_nothing():
    net, optimizer = prepared("O2")
    other = network(seed=1).double()
    for arguments, message in (((net, 3), "optimizers must be"), (([net, other], optimizer), "0.weight of models.1.")):
        with pytest.raises(TypeError, match=message):
            amp.initialize(*arguments, opt_level="O1", verbosity=0)
    assert net[0].weight.dtype is torch.float16
    backward(net, optimizer, 0)  # still at O2
    optimizer.step()


# --------------------------------------------------------------------------------------------------------- checkpoints
def test_checkpoints_go_on_bit_for_bit(monkeypatch):
    net, optimizer = prepared("O2", max_loss_scale=512.0)
    for step in range(3):
        backward(net, optimizer, step, torch.inf if step == 1 else 1.0)
        optimizer.step(), optimizer.zero_grad()
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), amp.state_dict()))
    monkeypatch.setattr(apex, "_set_up", None)
    other, other_optimizer = prepared("O2", max_loss_scale=512.0)
    other.load_state_dict(saved[0]), other_optimizer.load_state_dict(saved[1]), amp.load_state_dict(saved[2])
    assert scale_of() == 256
    for step in range(3, 6):
        backward(other, other_optimizer, step)
        other_optimizer.step(), other_optimizer.zero_grad()
    final = scale_of()
    monkeypatch.setattr(apex, "_set_up", None)
    third, third_optimizer = prepared("O2", max_loss_scale=512.0)
    for step in range(6):
        backward(third, third_optimizer, step, torch.inf if step == 1 else 1.0)
        third_optimizer.step(), third_optimizer.zero_grad()
    assert scale_of() == final
    assert_same_training((other, other_optimizer), (third, third_optimizer))


def test_state_dicts_of_apex_load():
    prepared("O1", num_losses=2)
    amp.load_state_dict(
        {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 17}, "loss_scaler1": {"loss_scale": 2.0, "unskipped": 0}}
    )
    assert (scale_of(0), scale_of(1)) == (4096, 2)
    assert amp.state_dict()["loss_scaler0"]["_growth_tracker"] == 17
    assert amp.state_dict()["loss_scaler0"]["growth_interval"] == 2000


@pytest.mark.parametrize(
    ("saved", "options", "scale"),
    [({}, {"loss_scale": 128.0}, 128), ({}, {"max_loss_scale": 64.0}, 64), ({"loss_scale": 128.0}, {}, 128)],
    ids=["dynamic into static", "into a lower bound", "static into dynamic"],
)
def test_a_checkpoint_brings_no_bounds(monkeypatch, saved, options, scale):
    prepared("O1", **saved)
    state = amp.state_dict()
    monkeypatch.setattr(apex, "_set_up", None)
    net, optimizer = prepared("O1", **options)
    amp.load_state_dict(state)
    assert scale_of() == scale
    backward(net, optimizer, 0, torch.inf)
    assert scale_of() == (128 if "loss_scale" in options else scale / 2)


# ----------------------------------------------------------------------------------------------------------- sentences
def bare(**options: Any) -> Any:
    net = network()
    return amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), verbosity=0, **options)


def with_model(change: Callable[[torch.nn.Module], Any], **options: Any) -> Any:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return amp.initialize(change(net), optimizer, **options)


def replaced_forward(net: torch.nn.Module) -> torch.nn.Module:
    net.forward = lambda x: x
    return net


def replaced_step() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    optimizer.step = lambda: None
    return optimizer


def of_fp64() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).double())], lr=0.1)


SENTENCES = {
    "level": (lambda: bare(opt_level="02"), ValueError, "opt_level must be one of O0, O1, O2, O3, got '02'"),
    "unknown": (lambda: bare(cast_model_type=None), TypeError, "arguments must be .*, got cast_model_type; remove"),
    "batch norm": (lambda: bare(opt_level="O2", keep_batchnorm_fp32="x"), ValueError, "must be True, False or None"),
    "batch norm at O1": (lambda: bare(keep_batchnorm_fp32=True), ValueError, "must be None at O1, got True"),
    "scale": (lambda: bare(loss_scale="dynamical"), ValueError, 'loss_scale must be "dynamic" or a positive number'),
    "scale of 0": (lambda: bare(loss_scale=0), ValueError, "loss_scale must be .*, got 0"),
    "losses": (lambda: bare(num_losses=0), ValueError, "num_losses must be an integer of at least 1, got 0"),
    "bounds": (
        lambda: bare(min_loss_scale=4.0, max_loss_scale=2.0),
        ValueError,
        "max_loss_scale must be .* at least 4",
    ),
    "least": (lambda: bare(min_loss_scale=-1.0), ValueError, "min_loss_scale must be a number of at least 0, got -1"),
    "lists": (lambda: bare(opt_level=["O1"]), ValueError, "opt_level must be one of"),
    "forward": (lambda: with_model(replaced_forward), TypeError, "must have the forward of its class, got one that"),
    "step": (lambda: amp.initialize(network(), replaced_step()), TypeError, "must have the step of its class, or a"),
    "fp64": (lambda: amp.initialize(network(), of_fp64()), TypeError, "parameter 1 of optimizers.0. must be float32"),
    "buffer": (lambda: with_model(lambda net: net[1].half()), TypeError, "weight of models.0. must be float32"),
    "models": (lambda: with_model(lambda net: net.parameters()), TypeError, "models must be a torch Module or a list"),
    "half": (lambda: with_model(lambda net: net.half()), TypeError, "0.weight of models.0. must be float32"),
    "parallel": (lambda: with_model(torch.nn.DataParallel), TypeError, "must be a bare module, got a DataParallel"),
    "optimizers": (lambda: amp.initialize(network(), 3), TypeError, "optimizers must be a torch Optimizer or a list"),
    "before": (lambda: next(iter(amp.scale_loss(torch.ones(()), None).gen)), RuntimeError, "initialize must be called"),
    "state": (amp.state_dict, RuntimeError, "amp.state_dict: amp.initialize must be called first"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_errors_are_sentences(name):
    call, error, message = SENTENCES[name]
    with pytest.raises(error, match=message):
        call()
    assert apex._set_up is None


@pytest.mark.parametrize("bad", ["another", "differentiable", "subclass", "level"])
def test_nothing_changes_before_an_error(bad):
    net, second = network(), network(seed=1)
    good = torch.optim.SGD(net.parameters(), lr=0.1)
    kind = {"another": torch.optim.Adagrad, "subclass": type("Mine", (torch.optim.SGD,), {})}.get(bad, torch.optim.SGD)
    options = {"differentiable": True} if bad == "differentiable" else {}
    other = kind(second.parameters(), lr=0.1, **options)
    with pytest.raises((TypeError, ValueError), match=r"optimizers\[1\] must|opt_level must"):
        amp.initialize([net, second], [good, other], opt_level="O4" if bad == "level" else "O2", verbosity=0)
    assert type(good) is torch.optim.SGD and type(other) is kind
    for model in (net, second):
        assert {p.dtype for p in model.parameters()} == {torch.float32} and "forward" not in vars(model)


def test_sentences_of_scale_loss():
    net, optimizer = prepared("O2")
    loss = net(batch(0)[0]).sum()
    with pytest.raises(TypeError, match="loss must be a Tensor, got a float"), amp.scale_loss(3.0, optimizer):
        pass
    for options, error, message in (
        ({"loss_id": 1}, ValueError, "loss_id must be from 0 to 0, got 1"),
        ({"delay_unscale": True}, TypeError, "arguments must be loss, optimizers and loss_id, got delay_unscale"),
    ):
        with pytest.raises(error, match=message), amp.scale_loss(loss, optimizer, **options):
            pass
    stranger = FusedSGD(network().parameters())
    with (
        pytest.raises(TypeError, match=r"that the last amp\.initialize returned, got another FusedSGD"),
        amp.scale_loss(loss, stranger),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"must run inside the with block .*, got no gradient"),
        amp.scale_loss(loss, optimizer),
    ):
        pass
    backward(net, optimizer, 0)  # which still works


def test_sentences_of_load_state_dict():
    prepared("O1")
    of_apex = {"loss_scale": 1.0, "unskipped": 0}
    for wrong in ({}, {"loss_scaler0": {}}, {"loss_scaler0": {"x": 1}}, {"loss_scaler0": of_apex, "loss_scaler1": {}}):
        with pytest.raises(ValueError, match="state_dict must hold the scale of loss_scaler0, got"):
            amp.load_state_dict(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_scale": math.inf, "unskipped": 0},
        {"loss_scale": "64.0", "unskipped": 0},
        {"loss_scale": 64.0, "unskipped": -1},
        {"scale": math.nan, "_growth_tracker": 0},
        {"scale": 64.0, "_growth_tracker": 1.5},
        {"scale": 64.0, "_growth_tracker": 0, "skipped_steps": -1},
    ],
    ids=str,
)
def test_a_refused_scale_changes_none(wrong):
    """A bad scale for one loss leaves the scales of all losses as they were."""
    prepared("O1", num_losses=2)
    before = amp.state_dict()
    with pytest.raises((TypeError, ValueError), match=r"amp\.load_state_dict: loss_scaler1: \w+ must be"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 7}, "loss_scaler1": wrong})
    assert amp.state_dict() == before


@pytest.mark.parametrize("verbosity", [0, 1])
def test_what_is_printed(capsys, verbosity):
    net = network()
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.AdamW(net[3].parameters())]
    amp.initialize(net, optimizers, opt_level="O2", verbosity=verbosity)
    expected = "amp_kernels.amp O2: weights fp16 (batch norms fp32), forward fp16, loss scale dynamic; "
    assert capsys.readouterr().out == verbosity * (expected + "FusedSGD for SGD, FusedAdamW for AdamW\n")


# ------------------------------------------------------------------------------------------------------------- scripts
@functools.cache
def losses_of(name: str, *arguments: str) -> list[float]:
    """The losses that a script prints. One of its lines is changed before: the import of apex."""
    source = (SCRIPTS / name).read_text()
    assert source.count("from apex import amp\n") == 1
    done = subprocess.run(
        [sys.executable, "-", *arguments],
        input=source.replace("from apex import amp\n", "from amp_kernels import amp\n"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(line.removeprefix("loss ")) for line in done.stdout.splitlines() if line.startswith("loss ")]


def test_the_script_of_the_documentation():
    losses = losses_of("simple.py")
    assert len(losses) == 12 and all(after < before for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize("level", [("O1",), ("O2", "--loss_scale", "1024"), ("O3",)], ids=lambda level: level[0])
def test_a_script_of_fine_tuning(level):
    fp32 = losses_of("fine_tune.py")
    losses = losses_of("fine_tune.py", "--fp16", "--fp16_opt_level", *level)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert losses == pytest.approx(fp32, abs=0.05)


def test_a_script_of_two_models_and_three_losses():
    distances = losses_of("gan.py")
    assert min(distances[-30:]) < 0.5 * distances[0]


def test_a_weight_of_an_earlier_model_is_refused_in_another_model():
    earlier, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    earlier = amp.initialize(earlier, opt_level="O2", verbosity=0)
    other.weight = earlier.weight
    with pytest.raises(TypeError, match=r"weight of models\[1\] must be float32 at every opt_level"):
        amp.initialize([earlier, other], opt_level="O2", verbosity=0)
