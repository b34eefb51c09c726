"""Our GradScaler with our optimizers and with torch's, against torch's GradScaler."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from optim_cases import (
    DTYPES,
    FULL,
    TORCH,
    assert_same,
    assert_within_rule,
    copies,
    families,
    fp32,
    low_dtypes,
    parameters,
    randn,
    set_grads,
    snapshot,
)
from torch import Tensor

import amp_kernels
from amp_kernels.optim import FusedRMSprop, FusedSGD

ALL = list(DTYPES.values())
INF, NAN = float("inf"), float("nan")


def started(device: Any, **options: Any) -> amp_kernels.GradScaler:
    scaler = amp_kernels.GradScaler(device.type, **{"init_scale": 4.0, **options})
    scaler.scale(torch.zeros((), device=device))
    return scaler


def stock(device: Any, **options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.type, **{"init_scale": 4.0, **options})
    scaler.scale(torch.zeros((), device=device))
    return scaler


def iterate(scaler: Any, optimizer: Any, step: int, overflow: bool = False, unscale: bool = False) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    set_grads(params, step, scale=scaler.get_scale())
    if overflow:
        params[1].grad.view(-1)[0] = INF
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


# ------------------------------------------------------------------------------------------------- our optimizers in it
@families
@pytest.mark.parametrize("make", [started, stock], ids=["ours", "torch"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_training_with_overflows(device, family, make, max_grad_norm, unscale):
    """Skips and scales as torch's scaler over torch's optimizer on fp32 parameters."""
    # torch's unscale_ takes no fp16.
    dtypes = [torch.float32, torch.bfloat16] if make is stock and unscale else ALL
    params = parameters(dtypes, device)
    sets = [params, copies(params, torch.float32), copies(params, torch.float64)]
    ours = family(params, **FULL[family], max_grad_norm=max_grad_norm)
    optimizers = [ours, *(TORCH[family](ps, **FULL[family]) for ps in sets[1:])]
    scalers = [
        make(device, growth_interval=3),
        stock(device, growth_interval=3),
        stock(device, growth_interval=3),
    ]
    for step in range(12):
        for ps, optimizer, scaler in zip(sets, optimizers, scalers, strict=True):
            scale = scaler.get_scale()
            for i, (p, q) in enumerate(zip(ps, params, strict=True)):
                p.grad = (scale * randn(*p.shape, seed=100 * step + i)).to(q.dtype).to(p.dtype)
                if step % 4 == 0 and i == 2:
                    p.grad.view(-1)[-1] = NAN if step else INF
            if unscale or optimizer is not ours:
                scaler.unscale_(optimizer)
            if optimizer is not ours and max_grad_norm:
                norm = torch.nn.utils.clip_grad_norm_(ps, max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if max_grad_norm and step % 4:
            rel = 2e-3 if unscale else 1e-6  # 16-bit gradients were rounded once more
            assert ours.grad_norm.item() == pytest.approx(norm.item(), rel=rel)
    if not unscale:
        assert_within_rule(ours, *sets)
    for p, q in zip(params, sets[1], strict=True):
        torch.testing.assert_close(fp32(ours, p), q.detach(), rtol=1e-2, atol=1e-2)


@families
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_gradients_are_not_written(device, family, max_grad_norm):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=max_grad_norm)
    scaler = started(device)
    set_grads(params, 0)
    before = [p.grad.clone() for p in params]
    scaler.step(optimizer)
    assert_same([p.grad for p in params], before)


@families
def test_both_scalers_give_the_same_bits(device, family):
    runs = []
    for make in (started, stock):
        optimizer = family(parameters(ALL, device), **FULL[family])
        scaler = make(device)
        for step in range(6):
            iterate(scaler, optimizer, step, overflow=step in (0, 3))
        runs.append([*snapshot(optimizer), torch.tensor(scaler.get_scale())])
    assert_same(*runs)


@low_dtypes
def test_unscale_writes_16_bit_gradients(device, dtype):
    params = parameters([dtype], device)
    optimizer = FusedSGD(params, lr=0.1)
    scaler = started(device, init_scale=3.0)
    set_grads(params, 0)
    expected = [(p.grad.float() * (1 / torch.tensor(3.0, device=device))).to(dtype) for p in params]
    versions = [p.grad._version for p in params]
    scaler.unscale_(optimizer)
    assert_same([p.grad for p in params], expected)
    assert all(p.grad._version > v for p, v in zip(params, versions, strict=True))
    norm = torch.linalg.vector_norm(torch.cat([p.grad.float().flatten() for p in params]))
    assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-3)


def test_unscale_of_gradients_laid_out_otherwise(device):
    p = torch.nn.Parameter(torch.ones(4, 3, device=device))
    optimizer = FusedSGD([p], lr=1.0)
    scaler = started(device)
    p.grad = torch.full((3, 4), 4.0, device=device).t()
    scaler.unscale_(optimizer)
    assert (p.grad == 1).all()
    scaler.step(optimizer)
    assert (p == 0).all()


@families
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_an_overflow_seen_by_unscale_skips_whatever_becomes_of_the_gradients(device, family, max_grad_norm):
    """As with torch: gradients may have been repaired, or clipped away, in between."""
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=max_grad_norm)
    scaler = started(device)
    before = [p.detach().clone() for p in params]
    set_grads(params, 0)
    params[1].grad[0] = NAN
    scaler.unscale_(optimizer)
    for p in params:
        p.grad.nan_to_num_()
    scaler.step(optimizer)
    scaler.update()
    assert_same([p.detach() for p in params], before)
    assert scaler.get_scale() == 2.0
    assert scaler.skipped_steps == 1


def test_protocol_errors_are_those_of_torch(device):
    for make in (started, stock):
        params = parameters([torch.float32], device)
        optimizer = FusedSGD(params, lr=0.1)
        scaler = make(device)
        set_grads(params, 0)
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
            scaler.unscale_(optimizer)
        scaler.update()
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, closure=lambda: None)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        with pytest.raises(AssertionError, match="_scale is None"):
            type(scaler)(device.type).step(optimizer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        started(device).step(optimizer, lambda: None)


def test_an_exception_in_the_step_leaves_nothing_behind(device):
    params = parameters([torch.float32], device)
    optimizer = FusedSGD(params, lr=0.1)
    scaler = started(device)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    set_grads(params, 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    handle.remove()
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_a_grad_scale_of_the_users_own_multiplies(device):
    p = torch.nn.Parameter(torch.zeros(1, device=device))
    for make in (started, stock):
        p.data.zero_()
        optimizer = FusedSGD([p], lr=1.0)
        optimizer.grad_scale = torch.tensor(2.0, device=device)
        p.grad = torch.full_like(p, 8.0)
        make(device).step(optimizer)
        assert p == -1


def test_gradient_accumulation(device):
    params, same = parameters([torch.float32], device), parameters([torch.float32], device)
    ours, theirs = FusedSGD(params, lr=0.1, momentum=0.9), torch.optim.SGD(same, lr=0.1, momentum=0.9)
    scalers = started(device), stock(device)
    for _ in range(3):
        for optimizer, scaler, ps in ((ours, scalers[0], params), (theirs, scalers[1], same)):
            for micro in range(3):
                scaler.scale(sum(((micro + 1) * p**2).sum() for p in ps)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for p, q in zip(params, same, strict=True):
        torch.testing.assert_close(p, q)


def test_several_optimizers_under_one_scaler(device):
    def build(classes: Any) -> list[Any]:
        sets = [parameters([torch.float32], device) for _ in classes]
        return [c(ps, lr=0.01, momentum=0.9) for c, ps in zip(classes, sets, strict=True)]

    ours = build([FusedSGD, FusedRMSprop, torch.optim.SGD])
    theirs = build([torch.optim.SGD, torch.optim.RMSprop, torch.optim.SGD])
    scalers = started(device, growth_interval=2), stock(device, growth_interval=2)
    for step in range(7):
        for scaler, optimizers in zip(scalers, (ours, theirs), strict=True):
            for i, optimizer in enumerate(optimizers):
                params = optimizer.param_groups[0]["params"]
                set_grads(params, step + i, scale=scaler.get_scale())
                if step == 2 + i:
                    params[0].grad[0] = INF  # one skips, the others step
                scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].skipped_steps == 3
    for a, b in zip(ours, theirs, strict=True):
        for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    step, name = scalers[0].last_overflow
    assert (step, name) == (4, "param_groups[0]['params'][0]")


@families
def test_not_enabled(device, family):
    params, same = parameters(ALL, device), parameters(ALL, device)
    ours, plain = family(params, **FULL[family]), family(same, **FULL[family])
    scaler = amp_kernels.GradScaler(device.type, enabled=False)
    assert scaler.scale(3) == 3
    for step in range(2):
        set_grads(params, step)
        set_grads(same, step)
        scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        plain.step()
    assert_same(snapshot(ours), snapshot(plain))
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    assert scaler.get_scale() == 1.0
    assert scaler.last_overflow is None
    assert scaler.skipped_steps == 0
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


# --------------------------------------------------------------------------------------------- torch's optimizers in it
TORCH_OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "rmsprop foreach": lambda ps: torch.optim.RMSprop(ps, lr=0.1, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


@pytest.mark.parametrize("make", TORCH_OPTIMIZERS.values(), ids=TORCH_OPTIMIZERS)
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_torch_optimizers_get_torchs_bits(device, make, unscale, dtype):
    if device.type == "cuda" and dtype is torch.bfloat16:
        pytest.skip("torch's own scaler takes no bf16 on CUDA")
    runs = []
    for scaler in (started(device, init_scale=3.0), stock(device, init_scale=3.0)):
        params = parameters([dtype], device)
        optimizer = make(params)
        for step in range(5):
            # Not at the first step: torch's fused SGD keeps uninitialised memory then.
            iterate(scaler, optimizer, step, overflow=step in (1, 3), unscale=unscale)
        grads = [p.grad for p in params]
        runs.append([*params, *grads, torch.tensor(scaler.get_scale())])
    assert_same(*[[t.detach() for t in run] for run in runs])


def test_sparse_gradients_of_torch_optimizers(device):
    runs = []
    for scaler in (started(device), stock(device)):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(6, 3, sparse=True).to(device)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(embedding(torch.tensor([1, 1, 4], device=device)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append([embedding.weight.detach()])
    assert_same(*runs)


def test_unscale_takes_fp16_for_torch_optimizers(device):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float16, device=device))
    optimizer = torch.optim.SGD([p], lr=1.0)
    p.grad = torch.full_like(p, 4.0)
    scaler = started(device)
    scaler.unscale_(optimizer)
    assert (p.grad == 1).all()
    scaler.step(optimizer)
    assert (p == 0).all()


def test_no_gradients_of_a_torch_optimizer(device):
    for scaler in (started(device), stock(device)):
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(torch.optim.SGD(parameters([torch.float32], device), lr=0.1))


# ------------------------------------------------------------------------------------------------------------ the scale
def run_scales(scaler: Any, device: Any, pattern: str, via: type = FusedSGD) -> list[float]:
    """The scale after each step of `pattern`, in which x is an overflow."""
    p = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer = via([p], lr=0.1)
    scales = []
    for mark in pattern:
        p.grad = torch.full_like(p, INF if mark == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("via", [FusedSGD, torch.optim.SGD])
def test_the_scale_moves_as_torchs(device, via):
    options = {"growth_interval": 2, "growth_factor": 3.0, "backoff_factor": 0.25}
    for pattern in ("..x..x.xx....", "xxx......"):
        ours, theirs = started(device, **options), stock(device, **options)
        assert run_scales(ours, device, pattern, via) == run_scales(theirs, device, pattern, torch.optim.SGD)
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()


def test_min_scale(device):
    assert run_scales(started(device, min_scale=0.5), device, "xxxxxx") == [2, 1, 0.5, 0.5, 0.5, 0.5]
    assert run_scales(started(device, min_scale=0.5, growth_interval=1), device, "xxxxx.") == [
        2,
        1,
        0.5,
        0.5,
        0.5,
        1,
    ]
    assert run_scales(started(device), device, "x" * 160)[-1] == 0.0  # torch's way
    with pytest.raises(ValueError, match="min_scale must be at least 0, got -1"):
        started(device, min_scale=-1)


def test_hysteresis(device):
    assert run_scales(started(device, hysteresis=2), device, "x.xx.x") == [4, 4, 4, 2, 2, 2]
    assert run_scales(started(device, hysteresis=3), device, "xxxxx.xx") == [4, 4, 2, 1, 0.5, 0.5, 0.5, 0.5]
    scaler = started(device, hysteresis=2, growth_interval=2)
    assert run_scales(scaler, device, ".x..") == [
        4,
        4,
        4,
        8,
    ]  # a tolerated overflow restarts the wait for growth
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"hysteresis must be at least 1, got {wrong}"):
            started(device, hysteresis=wrong)


def test_update_with_a_new_scale(device):
    scaler = started(device)
    params = parameters([torch.float32], device)
    optimizer = FusedSGD(params, lr=0.1)
    set_grads(params, 0, scale=INF)
    scaler.step(optimizer)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    assert scaler.skipped_steps == 1
    set_grads(params, 0, scale=32.0)
    scaler.step(optimizer)  # a new iteration
    scaler.update(torch.tensor(16.0, device=device))
    assert scaler.get_scale() == 16.0
    assert scaler.skipped_steps == 1


# ----------------------------------------------------------------------------------------------- skips and the recorder
@pytest.mark.parametrize("via", [FusedSGD, FusedRMSprop, torch.optim.SGD])
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
    for step, bad in enumerate([None, None, 2, None, (3, 1), None], start=1):
        set_grads(params, step)
        for i in () if bad is None else bad if isinstance(bad, tuple) else (bad,):
            params[i].grad.view(-1)[-1] = -INF
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
    params[3].grad.view(-1)[0] = NAN
    scaler.step(optimizer)
    assert scaler.last_overflow == (4, "p3")


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


def test_an_optimizer_is_not_kept_alive(device):
    import gc
    import weakref

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


def test_gradients_with_a_history(device):
    """create_graph: a backward pass through an unscaled gradient must not go unnoticed."""
    p = torch.nn.Parameter(torch.ones(3, device=device))
    scaler = started(device)
    loss = scaler.scale((p**3).sum())
    (p.grad,) = torch.autograd.grad(loss, p, create_graph=True)
    penalty: Tensor = (p.grad**2).sum()
    scaler.unscale_(FusedSGD([p], lr=0.1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_last_overflow_is_the_last_of_several_optimizers_that_step_unevenly():
    params = {name: torch.nn.Parameter(torch.ones(3)) for name in "ab"}
    optimizers = {name: FusedSGD([(name, param)], lr=0.1) for name, param in params.items()}
    scaler = amp_kernels.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for name, overflows in [("a", False), ("a", False), ("a", True), ("b", False), ("b", True)]:
        params[name].grad = torch.full((3,), torch.inf if overflows else 1.0)
        scaler.step(optimizers[name])
        scaler.update()
    assert scaler.last_overflow == (2, "b")


def test_step_takes_a_positional_none_for_the_closure():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    scaler = amp_kernels.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(FusedSGD([param], lr=0.5), None)
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.5))
