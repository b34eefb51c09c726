"""Optimizers under our GradScaler, ours and torch's, against torch's GradScaler."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from optim_cases import (
    ALL,
    FULL,
    TORCH,
    assert_same,
    assert_within_rule,
    copies,
    families,
    fp32,
    iterate,
    low_dtypes,
    parameters,
    randn,
    set_grads,
    snapshot,
    started,
    stock,
    stocks,
)
from torch import Tensor

import amp_kernels
from amp_kernels.optim import FusedRMSprop, FusedSGD


# ------------------------------------------------------------------------------------------------- our optimizers in it
@families
@pytest.mark.parametrize("make", [started, stock], ids=["ours", "torch"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_training_with_overflows(device, family, make, max_grad_norm, unscale):
    """Skips and scales as torch's scaler over torch's optimizer on fp32 parameters."""
    # torch's unscale_ takes no fp16.
    dtypes = [torch.float32, torch.bfloat16] if make is stock and unscale else ALL
    if make is stock:
        dtypes = stocks(dtypes, device)
    params = parameters(dtypes, device)
    sets = [params, copies(params, torch.float32), copies(params, torch.float64)]
    ours = family(params, **FULL[family], max_grad_norm=max_grad_norm)
    optimizers = [ours, *(TORCH[family](ps, **FULL[family]) for ps in sets[1:])]
    scalers = [kind(device, growth_interval=3) for kind in (make, stock, stock)]
    for step in range(12):
        for ps, optimizer, scaler in zip(sets, optimizers, scalers, strict=True):
            scale = scaler.get_scale()
            for i, (p, q) in enumerate(zip(ps, params, strict=True)):
                p.grad = (scale * randn(*p.shape, seed=100 * step + i)).to(p.device, q.dtype).to(p.dtype)
                if step % 4 == 0 and i == 2:
                    p.grad.view(-1)[-1] = torch.nan if step else torch.inf
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
        optimizer = family(parameters(stocks(ALL, device), device), **FULL[family])
        scaler = make(device)
        for step in range(6):
            iterate(scaler, optimizer, step, overflow=step in (0, 3))
        runs.append([*snapshot(optimizer), torch.tensor(scaler.get_scale())])
    assert_same(*runs)


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
                    params[0].grad[0] = torch.inf  # one skips, the others step
                scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].skipped_steps == 3
    for a, b in zip(ours, theirs, strict=True):
        for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    step, name = scalers[0].last_overflow
    assert (step, name) == (4, "param_groups[0]['params'][0]")


def test_a_grad_scale_of_the_users_own_multiplies(device):
    p = torch.nn.Parameter(torch.zeros(1, device=device))
    for make in (started, stock):
        p.data.zero_()
        optimizer = FusedSGD([p], lr=1.0)
        optimizer.grad_scale = torch.tensor(2.0, device=device)
        p.grad = torch.full_like(p, 8.0)
        make(device).step(optimizer)
        assert p == -1


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


# ------------------------------------------------------------------------------------------------------------- unscale_
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
    params[1].grad[0] = torch.nan
    scaler.unscale_(optimizer)
    for p in params:
        p.grad.nan_to_num_()
    scaler.step(optimizer)
    scaler.update()
    assert_same([p.detach() for p in params], before)
    assert scaler.get_scale() == 2.0
    assert scaler.skipped_steps == 1


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


# --------------------------------------------------------------------------------------------------------- the protocol
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


def test_step_takes_a_positional_none_for_the_closure(device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones_like(p)
    started(device, init_scale=1.0).step(FusedSGD([p], lr=0.5), None)
    assert (p == 0.5).all()


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
    if not stocks([dtype], device):
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
