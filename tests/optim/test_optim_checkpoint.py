"""Checkpoints, copies and pickles: training continues bit for bit, with torch's and with ours."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from optim_cases import (
    ALL,
    DAMPENED,
    FULL,
    OF_TORCH,
    assert_same,
    assert_within_rule,
    copies,
    dtypes,
    examples,
    fp32,
    give_grads,
    low_dtypes,
    optimizers,
    parameters,
    set_grads,
    snapshot,
)
from torch import Tensor

import amp_kernels


def train(optimizer: torch.optim.Optimizer, steps: range, scaler: Any = None) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        if scaler is None:
            set_grads(params, step)
            optimizer.step()
        else:
            scale = float(scaler.scale(torch.ones((), device=params[0].device)))
            set_grads(params, step, scale=float("inf") if step % 3 == 1 else scale)
            scaler.step(optimizer)
            scaler.update()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --------------------------------------------------------------------------------------------------------- ours to ours
@optimizers
@dtypes
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_training_continues_bit_for_bit(device, family, dtype, at, order):
    params = parameters([dtype], device)
    optimizer = family(params, **DAMPENED[family], max_grad_norm=10.0)
    train(optimizer, range(at))
    saved = through_a_file({"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()})

    fresh = [torch.nn.Parameter(torch.zeros_like(p)) for p in params]
    resumed = family(fresh, lr=123.0, max_grad_norm=10.0)

    def load_model() -> None:
        with torch.no_grad():
            for p, value in zip(fresh, saved["model"], strict=True):
                p.copy_(value)

    if order == "model first":
        load_model()
    resumed.load_state_dict(saved["optimizer"])
    if order != "model first":
        load_model()
    if at:
        assert_same(snapshot(resumed), snapshot(optimizer))
    train(optimizer, range(at, at + 3))
    train(resumed, range(at, at + 3))
    assert_same(snapshot(resumed), snapshot(optimizer))


@low_dtypes
@pytest.mark.parametrize("others", [0, 100], ids=["a few weights", "a layer norm"])
def test_masters_saved_while_weights_are_fp32(device, dtype, others):
    """Fp16 weights may be bf16 numbers too: a cast to fp32 must not lose which dtype they had."""
    weights = [torch.tensor([0.5, 0.25, 1.0, 0.1]), *([torch.ones(others)] if others else [])]
    params = [torch.nn.Parameter(w.to(device, dtype)) for w in weights]
    optimizer = amp_kernels.optim.FusedSGD(params, lr=1.0)
    for p in params:
        p.grad = torch.full_like(p, 2.0**-20)
    optimizer.step()
    masters = [optimizer.master(p).clone() for p in params]
    for i, p in enumerate(params):
        assert not torch.equal(masters[i], p.float())
        p.data = p.data.float()
    saved = optimizer.state_dict()["state"]
    assert all(torch.equal(saved[i]["master"], master) for i, master in enumerate(masters))


@optimizers
@low_dtypes
def test_masters_and_states_stay_fp32(device, family, dtype):
    """torch rounds them to the dtype of the parameter."""
    params = parameters([dtype], device)
    optimizer = family(params, **FULL[family])
    train(optimizer, range(3))
    state = optimizer.state_dict()["state"]
    assert not torch.equal(state[0]["master"], state[0]["master"].to(dtype).float())
    before = [t.clone() for i in range(4) for k, t in sorted(state[i].items())]
    optimizer.load_state_dict(optimizer.state_dict())
    after = optimizer.state_dict()["state"]
    assert_same([t for i in range(4) for k, t in sorted(after[i].items())], before)
    assert all(t.dtype is torch.float32 for t in before)


@optimizers
@dtypes
def test_a_checkpoint_right_after_a_skipped_first_step(device, family, dtype):
    params = parameters([dtype], device)
    optimizer = family(params, **DAMPENED[family])
    set_grads(params, 0)
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    del optimizer.found_inf
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = family(fresh, **DAMPENED[family])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train(optimizer, range(3))
    train(resumed, range(3))
    assert_same(snapshot(resumed), snapshot(optimizer))


@optimizers
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_checkpoint_of_a_first_step_loads_into_torch(device, family, found_inf):
    pair = [parameters([torch.float32], device) for _ in range(2)]
    ours, theirs = family(pair[0], **DAMPENED[family]), OF_TORCH[family](pair[1], **DAMPENED[family])
    set_grads(pair[0], 0)
    ours.found_inf = torch.tensor(found_inf, device=device)
    ours.step()
    del ours.found_inf
    loaded_params = copies(pair[0], torch.float32)
    loaded = OF_TORCH[family](loaded_params, **DAMPENED[family])
    loaded.load_state_dict(ours.state_dict())
    if not found_inf:
        train(theirs, range(1))
    train(loaded, range(1, 3))
    train(theirs, range(1, 3))
    for p, q in zip(loaded_params, pair[1], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@optimizers
def test_a_parameter_without_a_gradient_yet(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, **DAMPENED[family])

    def some(ps: list[Tensor], step: int) -> None:
        set_grads(ps, step)
        ps[1].grad = None if step < 4 else ps[1].grad

    for step in range(2):
        some(params, step)
        optimizer.step()
    saved = through_a_file(optimizer.state_dict())
    assert set(saved["state"]) == {0, 2, 3}
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = family(fresh, **DAMPENED[family])
    resumed.load_state_dict(saved)
    for step in range(2, 6):
        some(params, step)
        some(fresh, step)
        optimizer.step()
        resumed.step()
    assert_same(snapshot(resumed), snapshot(optimizer))


@optimizers
def test_loading_does_not_alias_and_does_not_change_the_checkpoint(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    train(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    expected = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(optimizer, range(2, 4))
    for i, state in expected["state"].items():
        assert_same([saved["state"][i][k] for k in state], list(state.values()))


@optimizers
def test_a_16_bit_checkpoint_in_an_fp32_model_and_back(device, family):
    params = parameters([torch.bfloat16], device)
    optimizer = family(params, **FULL[family])
    train(optimizer, range(2))
    wide = copies(params, torch.float32)
    in_fp32 = family(wide, **FULL[family])
    with pytest.warns(UserWarning, match="hold 16-bit weights"):
        in_fp32.load_state_dict(optimizer.state_dict())
    assert not any("remainder" in in_fp32.state[p] for p in wide)
    train(in_fp32, range(2, 4))
    narrow = copies(wide, torch.float16)
    back = family(narrow, **FULL[family])
    back.load_state_dict(in_fp32.state_dict())
    train(back, range(4, 6))
    assert all(torch.isfinite(p).all() for p in narrow)


# ----------------------------------------------------------------------------------------------------- ours and torch's
@examples
@pytest.mark.parametrize("way", ["torch to ours", "ours to torch"])
def test_checkpoints_of_torch_both_ways(device, family, options, way):
    first, second = (family, OF_TORCH[family]) if way == "ours to torch" else (OF_TORCH[family], family)
    params = parameters([torch.float32], device)
    truth = copies(params, torch.float64)
    theirs = copies(params, torch.float32)
    optimizer = first(params, **options)
    others = [OF_TORCH[family](ps, **options) for ps in (theirs, truth)]
    train(optimizer, range(3))
    loaded = second(params, lr=77.0)
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    train(loaded, range(3, 6))
    for step in range(6):
        set_grads(params, step)
        for ps, other in zip((theirs, truth), others, strict=True):
            give_grads(params, ps)
            other.step()
    assert_within_rule(loaded if second is family else optimizer, params, theirs, truth)


@optimizers
def test_what_a_checkpoint_lacks_is_defaulted(device, family):
    params = parameters([torch.float32], device)
    theirs = OF_TORCH[family](params, **FULL[family])
    train(theirs, range(2))
    saved = theirs.state_dict()
    for group in saved["param_groups"]:
        for key in ("maximize", "foreach", "differentiable", "fused", "nesterov", "centered", "capturable"):
            group.pop(key, None)
    ours = family(params, **FULL[family])
    ours.load_state_dict(saved)
    train(ours, range(2, 4))
    assert all(torch.isfinite(p).all() for p in params)


@optimizers
def test_torch_checkpoint_for_a_16_bit_model(device, family):
    """No masters in it: they come from the parameters, and the states are used as they are."""
    params = parameters([torch.float32], device)
    theirs = OF_TORCH[family](params, **FULL[family])
    train(theirs, range(2))
    low = copies(params, torch.bfloat16)
    ours = family(low, **FULL[family])
    ours.load_state_dict(theirs.state_dict())
    for p, q in zip(low, params, strict=True):
        assert torch.equal(ours.master(p), p.float())
        for name in theirs.state[q].keys() - {"step"}:
            assert torch.equal(ours.state[p][name], theirs.state[q][name])


@optimizers
def test_checkpoint_with_other_parameter_ids(device, family):
    """torch matches them by their order in param_groups, whatever they are."""
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    train(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    names = {i: f"layer.{i}" for i in range(4)}
    saved["state"] = {names[i]: state for i, state in saved["state"].items()}
    saved["param_groups"][0]["params"] = [names[i] for i in saved["param_groups"][0]["params"]]
    resumed = family([torch.nn.Parameter(p.detach().clone()) for p in params], **FULL[family])
    resumed.load_state_dict(saved)
    assert_same(snapshot(resumed), snapshot(optimizer))


@optimizers
def test_several_groups(device, family):
    def groups(ps: list[Tensor]) -> list[dict[str, Any]]:
        return [{"params": ps[2:]}, {"params": ps[:2], "lr": 0.03}]

    params = parameters(ALL, device)
    optimizer = family(groups(params), **FULL[family])
    train(optimizer, range(2))
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = family(groups(fresh), lr=0.0)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert [group["lr"] for group in resumed.param_groups] == [FULL[family]["lr"], 0.03]
    train(optimizer, range(2, 4))
    train(resumed, range(2, 4))
    assert_same(snapshot(resumed), snapshot(optimizer))


@optimizers
def test_a_tensor_lr_travels(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, lr=torch.tensor(0.05, device=device))
    train(optimizer, range(1))
    resumed = family([torch.nn.Parameter(p.detach().clone()) for p in params], lr=1.0)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"].zero_()
    assert resumed.param_groups[0]["lr"] == torch.tensor(0.05)
    train(resumed, range(1, 2))


# ----------------------------------------------------------------------------------------------------- errors and hooks
@optimizers
@pytest.mark.parametrize("which", ["state", "master"])
@pytest.mark.parametrize("shape", [(3,), (129,)], ids=["", "broadcast"])  # the second one could be copied
def test_a_shape_that_does_not_fit_changes_nothing(device, family, which, shape):
    params = parameters([torch.float16], device)
    optimizer = family(params, **FULL[family])
    train(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    key = "master" if which == "master" else family._family.states[0]
    saved["state"][2][key] = torch.zeros(shape)
    saved["param_groups"][0]["lr"] = 99.0
    before = snapshot(optimizer)
    message = rf"load_state_dict: {key} of param.*\[2\] must have shape \(33, 129\), got \({shape[0]},\)"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == FULL[family]["lr"]
    assert_same(snapshot(optimizer), before)
    for wrong in ([], [0], [0, 1, 2, 3, 4]):
        saved["param_groups"][0]["params"] = wrong
        with pytest.raises(ValueError):
            optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), before)
    optimizer.load_state_dict(optimizer.state_dict())  # and no hook of the failed ones is left


@optimizers
def test_load_hooks(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    seen: list[Any] = []

    def pre(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(set(state_dict["state"]))
        return {**state_dict, "state": {0: state_dict["state"][0]}}

    def post(loaded: torch.optim.Optimizer) -> None:
        seen.append([p in loaded.state and "step" in loaded.state[p] for p in fresh])

    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = family(fresh, **FULL[family])
    resumed.register_load_state_dict_pre_hook(pre)
    resumed.register_load_state_dict_post_hook(post)
    resumed.load_state_dict(saved)
    assert seen == [{0, 1, 2, 3}, [True, False, False, False]]
    assert torch.equal(fp32(resumed, fresh[0]), fp32(optimizer, params[0]))


@optimizers
def test_state_dict_hooks(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    train(optimizer, range(2))
    seen: list[Any] = []

    def post(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append((state_dict["state"][0]["step"].dtype, float(state_dict["state"][0]["step"])))
        return {"mine": state_dict}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("pre"))
    optimizer.register_state_dict_post_hook(post)
    assert set(optimizer.state_dict()) == {"mine"}
    assert seen == ["pre", (torch.float32, 2.0)]


@optimizers
def test_state_of_the_users_own(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    optimizer.state[params[0]]["note"] = "mine"
    optimizer.state["global"] = 3
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    assert saved["state"]["global"] == 3
    assert saved["state"][0]["note"] == "mine"
    optimizer.load_state_dict(saved)
    assert optimizer.state["global"] == 3
    train(optimizer, range(2, 4))


# --------------------------------------------------------------------------------------------------- copies and pickles
def copied(objects: Any) -> Any:
    return copy.deepcopy(objects)


def pickled(objects: Any) -> Any:
    return pickle.loads(pickle.dumps(objects))


def saved_whole(objects: Any) -> Any:
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@optimizers
@pytest.mark.parametrize("how", [copied, pickled, saved_whole])
@pytest.mark.parametrize("at", [0, 3])
def test_copies_of_optimizer_and_scaler_continue_bit_for_bit(device, family, how, at):
    optimizer = family(parameters(ALL, device), **DAMPENED[family], max_grad_norm=3.0)
    scaler = amp_kernels.GradScaler(device.type, init_scale=8.0, growth_interval=2, hysteresis=2, min_scale=1.0)
    train(optimizer, range(at), scaler)
    twin, twin_scaler = how((optimizer, scaler))
    assert twin.max_grad_norm == 3.0
    before = snapshot(optimizer)
    train(twin, range(at, at + 4), twin_scaler)
    assert_same(snapshot(optimizer), before)
    train(optimizer, range(at, at + 4), scaler)
    assert_same(snapshot(twin), snapshot(optimizer))
    assert twin_scaler.state_dict() == scaler.state_dict()
    assert torch.equal(twin.grad_norm.isnan(), optimizer.grad_norm.isnan())


@optimizers
def test_distributed_checkpoint_state_dicts(device, family, tmp_path):
    """torch.distributed.checkpoint names parameters, and makes state by a step with lr 0."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(9, 5).to(device, torch.float16)
        return model, family(model.parameters(), **DAMPENED[family])

    (model, optimizer), (twin, resumed) = make(), make()
    train(optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert set(saved["state"]) == {"weight", "bias"}
    set_optimizer_state_dict(twin, resumed, saved)
    train(optimizer, range(3, 6))
    train(resumed, range(3, 6))
    assert_same(snapshot(resumed), snapshot(optimizer))


@optimizers
@low_dtypes
def test_flattened_state_dicts_lose_no_master_unseen(device, family, dtype, tmp_path):
    """torch takes from one what `optimizer.state` has, which is no master. The file has it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def make(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(9, 5).to(device, dtype)
        return model, family(model.parameters(), **DAMPENED[family])

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for kind in (torch.float32, dtype):
        (model, optimizer), (twin, resumed) = make(kind), make(kind)
        train(optimizer, range(3))
        twin.load_state_dict(model.state_dict())
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=flat))
        if kind is dtype:
            assert torch.equal(saved["state.weight.master"], optimizer.master(model.weight))
            with pytest.raises(ValueError, match=r"must be in the state dict, .*flatten_optimizer_state_dict"):
                set_optimizer_state_dict(twin, resumed, saved, options=flat)
            dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
            nested = get_optimizer_state_dict(twin, resumed)
            partial = dcp.DefaultLoadPlanner(allow_partial_load=True)  # groups have other names
            dcp.load(nested, checkpoint_id=tmp_path, no_dist=True, planner=partial)
            set_optimizer_state_dict(twin, resumed, nested)
        else:
            set_optimizer_state_dict(twin, resumed, saved, options=flat)
        assert_same(snapshot(resumed), snapshot(optimizer))
