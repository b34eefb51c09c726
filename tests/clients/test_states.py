"""Memory that moves between steps and inside them; and what a user reads of an optimizer and its scaler."""

from __future__ import annotations

import functools
import gc
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from isolated import backends, case, isolated
from optim_cases import (
    ALL,
    DAMPENED,
    FULL,
    STATES,
    TORCH,
    Pair,
    assert_same,
    assert_within_rule,
    copies,
    dtypes,
    families,
    iterate,
    low_dtypes,
    parameters,
    randn,
    set_grads,
    snapshot,
    started,
    stock,
)
from torch import Tensor
from torch.nn import Parameter

from amp_kernels import rmsprop_, sgd_
from amp_kernels.optim import FusedSGD

CPU = torch.device("cpu")
SCALERS = {"none": lambda device: started(device, enabled=False), "ours": started, "torch's": stock}
scalers = pytest.mark.parametrize("scaler", SCALERS)


# ---------------------------------------------------------------------------------------------------- memory that moves
def by_data(t: Tensor) -> None:
    t.data = t.data.clone()


def by_set(t: Tensor) -> None:
    with torch.no_grad():
        t.set_(t.detach().clone())


def by_sharing(t: Tensor) -> None:
    t.share_memory_()


def by_swapping(t: Tensor) -> None:
    new = t.detach().clone()
    torch.utils.swap_tensors(t, Parameter(new) if isinstance(t, Parameter) else new)


def by_resizing(t: Tensor) -> None:
    """FSDP frees and fills storages so."""
    storage, values = t.untyped_storage(), t.detach().clone()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        t.copy_(values)


MOVES = [by_data, by_set, by_sharing, by_swapping, by_resizing]


def move(t: Tensor, how: Callable[[Tensor], None]) -> Iterator[Tensor]:
    """Moves `t` and poisons where it was; what is yielded keeps that memory from being given to others."""
    before = t.detach()
    how(t)
    poison = torch.nan if t.is_floating_point() else 12345
    if before.data_ptr() != t.data_ptr():
        before.fill_(poison)
        yield before
    for _ in range(8):
        yield torch.full_like(before, poison)


def halve_states(optimizer: torch.optim.Optimizer) -> None:
    """In place, so that a copy of an old state is not taken for the state."""
    for state in optimizer.state.values():
        for key in STATES:
            if key in state:
                state[key].mul_(0.5)


@isolated
@backends
@pytest.mark.parametrize("scaler", ["none", "ours"])
@pytest.mark.parametrize("how", MOVES, ids=lambda how: how.__name__)
@pytest.mark.parametrize("what", ["states", "parameters"])
def test_moved_memory_is_followed(backend, how, what, scaler):
    for family, dtype in itertools.product(TORCH, ALL):
        with case(family.__name__, dtype):
            train_and_move(Pair(family, parameters([dtype], "cpu"), **FULL[family]), how, what, SCALERS[scaler](CPU))


def train_and_move(pair: Pair, how: Callable[[Tensor], None], what: str, scaler: Any) -> None:
    kept: list[Tensor] = []
    for step in range(6):
        if step in (2, 3, 5):
            for p in pair.params:
                p.grad = None
                state = pair.ours.state[p]
                for t in [state[key] for key in (*STATES, "remainder") if key in state] if what == "states" else [p]:
                    kept += move(t, how)
            for optimizer in (pair.ours, *pair.theirs):
                halve_states(optimizer)
        set_grads(pair.params, step)
        pair.step_theirs()
        for p in pair.params:
            p.grad.mul_(scaler.get_scale())
        scaler.step(pair.ours)
        scaler.update()
    pair.check()


@isolated
@backends
@pytest.mark.parametrize("how", ["a new tensor", "a new dict", "all of it"])
def test_replaced_states_are_followed(backend, how):
    for family, dtype in itertools.product(TORCH, ALL):
        with case(family.__name__, dtype):
            train_and_replace(Pair(family, parameters([dtype, torch.float32], "cpu"), **FULL[family]), how)


def train_and_replace(pair: Pair, how: str) -> None:
    for step in range(5):
        if step in (2, 4):
            state = pair.ours.state
            copies = {p: {k: v.clone() for k, v in state[p].items()} for p in pair.params}
            for p in pair.params:
                for t in state[p].values():
                    t.fill_(torch.nan if t.is_floating_point() else 99)
                if how == "a new tensor":
                    for key, value in copies[p].items():
                        state[p][key] = value
                elif how == "a new dict":
                    state[p] = copies[p]
            if how == "all of it":
                pair.ours.state = copies
            for optimizer in (pair.ours, *pair.theirs):
                halve_states(optimizer)
        set_grads(pair.params, step)
        pair.step()
    pair.check()


# ----------------------------------------------------------- gradients replaced between a scaler's check and the update
def without_mean(optimizer: torch.optim.Optimizer) -> None:
    """Gradient centralization."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.grad - p.grad.mean()


def without_one(optimizer: torch.optim.Optimizer) -> None:
    p = optimizer.param_groups[0]["params"][1]
    state = optimizer.state.get(p)
    if state and int(state.get("step", 1)) > 0:  # not in its first step, before which a scaler's check may make state
        p.grad = None


def halved_in_place(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)


def clamped(optimizer: torch.optim.Optimizer) -> None:
    """Right only where gradients are unscaled."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.grad.clamp(-0.5, 0.5)


CHANGES = [without_mean, without_one, halved_in_place, clamped]


def overridden(family: type, change: Callable) -> Callable[..., torch.optim.Optimizer]:
    class Overridden(family):
        def step(self, closure=None):
            change(self)
            return super().step(closure)

    return Overridden


def wrapped(family: type, change: Callable, keep: bool) -> Callable[..., torch.optim.Optimizer]:
    def make(*args: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = family(*args, **options)
        inner = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            change(optimizer)
            return inner(*args, **kwargs)

        optimizer.step = functools.wraps(inner)(step) if keep else step
        return optimizer

    return make


def hooked(family: type, change: Callable) -> Callable[..., torch.optim.Optimizer]:
    def make(*args: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = family(*args, **options)
        optimizer.register_step_pre_hook(lambda o, *_: change(o))
        return optimizer

    return make


PLACES = {
    "overridden": overridden,
    "functools.wraps": functools.partial(wrapped, keep=True),
    "a bare function": functools.partial(wrapped, keep=False),
    "pre-hook": hooked,
}


CHANGED = [
    pytest.param(change, where, scaler, id=f"{change.__name__}-{where}-{scaler}")
    for change in CHANGES
    for where in PLACES
    for scaler in SCALERS
    if (change, where) != (clamped, "pre-hook") or scaler == "none"  # documented: a pre-hook sees scaled gradients
]


@isolated
@backends
@pytest.mark.parametrize(("change", "where", "scaler"), CHANGED)
def test_gradients_changed_inside_the_step(backend, scaler, where, change):
    """As torch's optimizer with the same subclass, wrapper or hook under torch's scaler."""
    # Where step is overridden or wrapped gradients are unscaled before it, which torch's scaler refuses to do to fp16.
    dtypes = ALL if scaler != "torch's" or where == "pre-hook" else [torch.float32, torch.bfloat16]
    for family, dtype in itertools.product(TORCH, dtypes):
        with case(family.__name__, dtype):
            change_gradients(family, dtype, SCALERS[scaler](CPU), functools.partial(PLACES[where], change=change))


def change_gradients(family: type, dtype: torch.dtype, scaler: Any, changing: Callable[[type], Callable]) -> None:
    params = parameters([dtype], CPU, [(8, 32), (256,), (16, 16)])
    theirs, truth = copies(params, torch.float32), copies(params, torch.float64)
    runs = [(changing(family)(params, **FULL[family]), params, scaler)]
    for ps in (theirs, truth):
        optimizer = changing(TORCH[family])(ps, **FULL[family], foreach=False)
        runs.append((optimizer, ps, started(CPU, enabled=False)))
    kept = []
    for step in range(4):
        for optimizer, ps, scale in runs:
            for i, p in enumerate(ps):
                p.grad = (scale.get_scale() * integers(p.shape, seed=100 * step + i)).to(p.dtype)
            scale.step(optimizer)
            scale.update()
            kept += [torch.full(p.shape, torch.nan, dtype=dtype) for p in ps]  # where old gradients were
    assert_within_rule(runs[0][0], params, theirs, truth)


def integers(shape: torch.Size, seed: int) -> Tensor:
    """With the mean 1, so that no dtype rounds a change of them."""
    half = (2 * randn(shape.numel() // 2, seed=seed)).round()
    return torch.cat([half, -half]).view(shape) + 1


@isolated
@backends
@families
@pytest.mark.parametrize("scaler", ["ours", "torch's"])
@pytest.mark.parametrize("where", PLACES)
def test_an_overflow_that_a_step_takes_out(backend, family, scaler, where):
    """The verdict on the gradients that the scaler saw, as in torch, whatever a step does to them afterwards."""

    def without_overflow(optimizer: torch.optim.Optimizer) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)

    optimizer = PLACES[where](family, without_overflow)(
        parameters([torch.float32, torch.bfloat16], CPU), **FULL[family]
    )
    scale = SCALERS[scaler](CPU)
    iterate(scale, optimizer, 0)
    before = snapshot(optimizer)
    iterate(scale, optimizer, 1, overflow=True)
    assert_same(snapshot(optimizer), before)
    assert scale.get_scale() == 2.0


# -------------------------------------------------------------------------------------------------------- max_grad_norm
@families
def test_max_grad_norm_is_an_option_of_every_group(device, family):
    params = parameters([torch.float32], device)
    optimizer = family([{"params": params[:2]}, {"params": params[2:3]}], lr=0.1, max_grad_norm=2.0)
    optimizer.add_param_group({"params": params[3:]})
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [2.0] * 3
    assert [group["max_grad_norm"] for group in optimizer.state_dict()["param_groups"]] == [2.0] * 3
    assert repr(optimizer).count("max_grad_norm: 2.0") == 3
    assert optimizer.max_grad_norm == 2.0
    optimizer.max_grad_norm = None
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [None] * 3
    assert family(params, lr=0.1).param_groups[0]["max_grad_norm"] is None


@families
def test_a_resumed_run_clips(device, family):
    def make(max_grad_norm: float | None) -> tuple[list[Parameter], Any]:
        params = parameters([torch.float32, torch.float16], device)
        return params, family(params, **FULL[family], max_grad_norm=max_grad_norm)

    params, optimizer = make(1.0)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed_params, resumed = make(None)
    for p, q in zip(params, resumed_params, strict=True):
        q.data.copy_(p)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.max_grad_norm == 1.0
    for o, ps in ((optimizer, params), (resumed, resumed_params)):
        set_grads(ps, 2)
        o.step()
    assert_same(snapshot(resumed), snapshot(optimizer))


@families
def test_a_checkpoint_without_max_grad_norm_leaves_it(device, family):
    params = parameters([torch.float32], device)
    theirs = TORCH[family](params, **FULL[family])
    ours = family(params, **FULL[family], max_grad_norm=1.5)
    ours.load_state_dict(theirs.state_dict())
    assert ours.max_grad_norm == 1.5
    assert ours.param_groups[0]["max_grad_norm"] == 1.5


@families
@pytest.mark.parametrize("how", ["attribute", "group"])
def test_max_grad_norm_changed_while_training(device, family, how):
    pair = Pair(family, parameters([torch.float32, torch.bfloat16], device), **FULL[family], max_grad_norm=0.5)
    for step, max_norm in enumerate([0.5, None, 3.0, 1e6]):
        if how == "attribute":
            pair.ours.max_grad_norm = max_norm
        else:
            pair.ours.param_groups[0]["max_grad_norm"] = max_norm
        pair.max_grad_norm = max_norm
        set_grads(pair.params, step)
        pair.step()
        pair.check()


@families
@pytest.mark.parametrize("makes_scaler", [None, started, stock], ids=["", "ours", "torch's"])
def test_groups_that_disagree_raise(device, family, makes_scaler):
    params = parameters([torch.float32, torch.float16], device)
    optimizer = family([{"params": params[:2]}, {"params": params[2:]}], **FULL[family], max_grad_norm=1.0)
    scaler = makes_scaler(device) if makes_scaler else started(device, enabled=False)
    iterate(scaler, optimizer, 0)
    before = snapshot(optimizer)
    optimizer.param_groups[1]["max_grad_norm"] = 2.0
    set_grads(params, 1)
    with pytest.raises(ValueError, match=rf"{family.__name__}.*: max_grad_norm must be the same .*, got .*1\.0.*2\.0"):
        scaler.step(optimizer)
    assert_same(snapshot(optimizer), before)


@families
@pytest.mark.parametrize("bad", ["1", -1.0, 0.0, float("nan"), [1.0]], ids=str)
def test_a_max_grad_norm_that_is_none(device, family, bad):
    params = parameters([torch.float32], device)
    with pytest.raises(
        (TypeError, ValueError), match=rf"{family.__name__}: max_grad_norm must be a positive number.*got"
    ):
        family(params, lr=0.1, max_grad_norm=bad)


# ----------------------------------------------------------------------------------------------------- state[p]["step"]
@families
@scalers
def test_the_count_is_true_after_every_step(device, family, scaler):
    params = parameters([torch.float32, torch.float16], device)
    optimizer = family(params, **FULL[family])
    scale = SCALERS[scaler](device)
    expected = 0
    for step in range(5):
        overflow = scaler != "none" and step == 2
        iterate(scale, optimizer, step, overflow=overflow)
        expected += not overflow
        for p in params:
            count = optimizer.state[p]["step"]
            assert count.dtype is torch.int32 and count.dim() == 0 and count.device.type == device.type
            assert int(count) == expected
    params[0].grad = None
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [expected, *[expected + 1] * 3]


@families
@pytest.mark.parametrize("how", ["in place", "int32", "float", "another device's dtype"])
def test_a_written_count_is_followed(device, family, how):
    """With 0 the next step is the first, which sets SGD's momentum buffer."""
    params = parameters([torch.float32, torch.float16], device)
    optimizer = family(params, **DAMPENED[family])
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    name = "momentum_buffer" if "momentum_buffer" in optimizer.state[params[0]] else "exp_avg"
    buffers = [optimizer.state[p][name].clone() for p in params]
    for p in params:
        if how == "in place":
            optimizer.state[p]["step"].zero_()
        else:
            dtype = {"int32": torch.int32, "float": torch.float32}.get(how, torch.int64)
            optimizer.state[p]["step"] = torch.zeros((), dtype=dtype, device=device)
    set_grads(params, 2)
    optimizer.step()
    for p, before in zip(params, buffers, strict=True):
        buffer = optimizer.state[p][name]
        assert int(optimizer.state[p]["step"]) == 1
        assert not torch.equal(buffer, before)
        if family is FusedSGD:
            assert torch.equal(buffer, p.grad.float())
    optimizer.state[params[0]]["step"].fill_(40)
    set_grads(params, 3)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [41, 2, 2, 2]
    assert [int(s["step"]) for s in optimizer.state_dict()["state"].values()] == [41, 2, 2, 2]


# ------------------------------------------------------------------------------------------------------- what is logged
@families
@scalers
def test_logged_norms_keep_their_values(device, family, scaler):
    params = parameters([torch.float32], device)
    optimizer = family(params, lr=0.1, max_grad_norm=1.0)
    scale = SCALERS[scaler](device)
    logged, expected = [], []
    for step in range(3):
        iterate(scale, optimizer, step)
        logged.append(optimizer.grad_norm)
        expected.append(float(optimizer.grad_norm))
    assert [float(norm) for norm in logged] == expected
    assert len(set(expected)) == 3
    optimizer.grad_norm.zero_()
    assert float(optimizer.grad_norm) == expected[-1]


@families
def test_the_last_overflow_outlives_the_optimizer(device, family):
    params = parameters([torch.float32], device)
    optimizer = family([(f"layer{i}.weight", p) for i, p in enumerate(params)], lr=0.1)
    scaler = started(device)
    iterate(scaler, optimizer, 0)
    iterate(scaler, optimizer, 1, overflow=True)
    del optimizer
    gc.collect()
    assert scaler.last_overflow == (2, "layer1.weight")


@families
def test_skipped_steps_counts_iterations(device, family):
    """Not optimizers: both overflow in one iteration."""
    scaler = started(device)
    optimizers = [family(parameters([torch.float32], device), lr=0.1) for _ in range(2)]
    for step, overflows in enumerate([(False, False), (True, True), (True, False), (False, False)]):
        for optimizer, overflow in zip(optimizers, overflows, strict=True):
            params = optimizer.param_groups[0]["params"]
            set_grads(params, step, scale=scaler.get_scale())
            if overflow:
                params[0].grad.fill_(torch.inf)
            scaler.step(optimizer)
        scaler.update()
    assert int(scaler.skipped_steps) == 2
    assert [int(o.state[o.param_groups[0]["params"][0]]["step"]) for o in optimizers] == [2, 3]


@families
@dtypes
@pytest.mark.parametrize("unscale", [False, True])
def test_two_optimizers_under_one_scaler(device, family, dtype, unscale):
    """Each is skipped by its own gradients only."""
    scaler = started(device)
    pairs = [Pair(family, parameters([dtype], device), **FULL[family]) for _ in range(2)]
    for step in range(5):
        for i, pair in enumerate(pairs):
            set_grads(pair.params, 10 * i + step)
            overflow = step == 1 + i
            if not overflow:
                pair.step_theirs()
            for p in pair.params:
                p.grad.mul_(scaler.get_scale())
            if overflow:
                pair.params[0].grad.view(-1)[-1] = torch.nan
            if unscale and i == 0:
                scaler.unscale_(pair.ours)
            scaler.step(pair.ours)
        scaler.update()
    for pair in pairs:
        pair.check()


@families
@pytest.mark.parametrize("makes_scaler", [started, stock], ids=["ours", "torch's"])
@pytest.mark.parametrize("unscale", [False, True])
def test_what_a_step_pre_hook_sees(device, family, makes_scaler, unscale):
    """Scaled gradients; after `unscale_` the true ones."""
    params = parameters([torch.float32], device)
    optimizer = family(params, lr=0.1)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in params))
    scaler = makes_scaler(device)
    iterate(scaler, optimizer, 0, unscale=unscale)
    set_grads(params, 0, scale=1.0 if unscale else 4.0)
    assert_same(seen, [p.grad for p in params])


# ---------------------------------------------------------------------------------------------- in the place of torch's
@families
def test_our_class_in_the_place_of_torchs(monkeypatch, device, family):
    monkeypatch.setattr(torch.optim, TORCH[family].__name__, family, raising=False)
    params = parameters([torch.float32], device)
    optimizer = getattr(torch.optim, TORCH[family].__name__)(params, **FULL[family])
    set_grads(params, 0)
    optimizer.step()
    assert type(optimizer) is family


@families
@low_dtypes
def test_a_model_that_became_fp32_loads_into_torch(device, family, dtype):
    """Also where its first step was skipped: no state but what torch's knows, and no stale master."""
    params = parameters([dtype], device)
    optimizer = family(params, **FULL[family])
    scaler = started(device)
    iterate(scaler, optimizer, 0, overflow=True)
    for p in params:
        p.grad = None
        p.data = p.data.float()
    state_dict = optimizer.state_dict()
    assert all("master" not in state for state in state_dict["state"].values())
    theirs = TORCH[family]([Parameter(p.detach().clone()) for p in params], **FULL[family])
    theirs.load_state_dict(state_dict)
    fresh = TORCH[family]([Parameter(p.detach().clone()) for p in params], **FULL[family])
    for step in range(2):
        for o in (optimizer, theirs, fresh):
            ps = o.param_groups[0]["params"]
            set_grads(ps, step)
            o.step()
    assert_same(snapshot_of_torchs(theirs), snapshot_of_torchs(fresh))


def snapshot_of_torchs(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach() for p in optimizer.param_groups[0]["params"]]


# -------------------------------------------------------------------------------------------- lists that share memory
def _lists(op: Callable) -> dict[str, list[Tensor]]:
    names = ["params", "grads", "momentum_buffers", "masters"] + ["square_avgs"] * (op is rmsprop_)
    lists = {name: [torch.ones(8), torch.ones(8)] for name in names}
    lists["params"] = [torch.ones(8).half(), torch.ones(8).half()]
    return lists


def _run(op: Callable, lists: dict[str, list[Tensor]]) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "maximize": False}
    if op is sgd_:
        options |= {"dampening": 0.0, "nesterov": False, "is_first_step": False}
    else:
        options |= {"alpha": 0.9, "eps": 1e-8}
    op(**lists, **options)


WRITTEN = ["params", "momentum_buffers", "masters", "square_avgs"]


SHARING = [
    (op, one, other)
    for op in (sgd_, rmsprop_)
    for one, other in itertools.combinations_with_replacement(WRITTEN, 2)
    if op is rmsprop_ or "square_avgs" not in (one, other)
]


@pytest.mark.parametrize(("op", "one", "other"), SHARING)
@pytest.mark.parametrize("how", ["the same", "partly"])
def test_lists_whose_written_tensors_overlap_raise(backend, device, op, one, other, how):
    lists = {k: [t.to(device) for t in v] for k, v in _lists(op).items()}
    memory = torch.ones(16, device=device)
    first = memory.view(lists[one][0].dtype)[:8]
    second = memory.view(lists[other][0].dtype)[0 if how == "the same" else 2 :][:8]
    lists[one][0] = first
    lists[other][1 if one == other else 0] = second
    before = {k: [t.clone() for t in v] for k, v in lists.items()}
    with pytest.raises((RuntimeError, ValueError), match=rf"{op.__name__}: ({one}|{other}).* must "):
        _run(op, lists)
    for k, v in lists.items():
        assert_same(v, before[k])


@pytest.mark.parametrize("op", [sgd_, rmsprop_])
def test_lists_may_share_gradients_and_memory_that_does_not_overlap(backend, device, op):
    lists = {k: [t.to(device) for t in v] for k, v in _lists(op).items()}
    expected = {k: [t.clone() for t in v] for k, v in lists.items()}
    lists["grads"] = [lists["grads"][0]] * 2
    for key in ("params", "masters"):
        lists[key] = list(torch.ones(8, 2, dtype=lists[key][0].dtype, device=device).unbind(1))
    _run(op, lists)
    _run(op, expected)
    for k, v in lists.items():
        assert_same(v, expected[k])
