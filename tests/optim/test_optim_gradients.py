"""Gradients: overflows and scales, missing ones, and those that no kernel takes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from optim_cases import (
    ALL,
    DAMPENED,
    FULL,
    Pair,
    assert_same,
    dtypes,
    families,
    parameters,
    randn,
    set_grads,
    snapshot,
    started,
    step_under,
    stock,
)
from torch import Tensor

from amp_kernels.optim import FusedSGD


# ------------------------------------------------------------------------------------------------- overflows and scales
@families
@dtypes
@pytest.mark.parametrize("found_inf", [1.0, 2.0, torch.nan])
def test_first_step_overflow_leaves_no_trace(device, family, dtype, found_inf):
    def run(overflow: bool) -> list[Tensor]:
        params = parameters([dtype], device)
        optimizer = family(params, **DAMPENED[family])
        if overflow:
            set_grads(params, 99, scale=torch.inf)
            step_under(optimizer, found_inf)
            assert_same(params, parameters([dtype], device))
        for step in range(3):
            set_grads(params, step)
            step_under(optimizer, 0.0)
        return snapshot(optimizer)

    assert_same(run(overflow=True), run(overflow=False))


@families
@pytest.mark.parametrize("found_inf", [1.0, 2.0])
def test_a_later_overflow_changes_nothing(device, family, found_inf):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=1.0)
    set_grads(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    set_grads(params, 1)
    params[1].grad[3] = torch.nan
    step_under(optimizer, found_inf, grad_scale=4.0)
    assert_same(snapshot(optimizer), before)


@families
def test_found_inf_of_one_dimension(device, family):
    """torch.distributed's sharded scaler has it so."""
    p = torch.nn.Parameter(torch.ones((), device=device))
    optimizer = family([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1, device=device), torch.ones(1, device=device)
    optimizer.step()
    assert p < 1


@families
def test_grad_scale_divides(device, family):
    params, same = parameters(ALL, device), parameters(ALL, device)
    ours, unscaled = (family(ps, **FULL[family]) for ps in (params, same))
    for step in range(3):
        set_grads(params, step, scale=8.0)
        step_under(ours, 0.0, grad_scale=8.0)
        set_grads(same, step)
        unscaled.step()
    assert_same(snapshot(ours), snapshot(unscaled))


# ----------------------------------------------------------------------------------------- gradients that are not there
@families
def test_a_late_first_gradient_starts_its_momentum_then(device, family):
    pair = Pair(family, parameters(ALL, device), **DAMPENED[family])
    for step in range(6):
        set_grads(pair.params, step)
        if step < 3:
            pair.params[1].grad = pair.params[2].grad = None
        pair.step()
    pair.check()


@families
def test_a_none_gradient_skips_that_parameter_only(device, family):
    pair = Pair(family, parameters(ALL, device), **DAMPENED[family])
    for step in range(12):
        set_grads(pair.params, step)
        if step:
            skipped = pair.params[step % len(pair.params)]
            skipped.grad, before = None, skipped.detach().clone()
        pair.step()
        if step:
            assert torch.equal(skipped, before)
    pair.check()


SCALERS = {"no scaler": None, "torch scaler": stock, "our scaler": started}


@families
@pytest.mark.parametrize("make_scaler", SCALERS.values(), ids=SCALERS)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_all_gradients_none_is_a_no_op(device, family, make_scaler, max_grad_norm):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=max_grad_norm)
    scaler = make_scaler and make_scaler(device)
    for has_state in (False, True):
        before = snapshot(optimizer)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            if make_scaler is started:
                scaler.update()
            else:
                with pytest.raises(AssertionError):  # torch's own; it clears nothing
                    scaler.update()
                scaler = stock(device)
        assert_same(snapshot(optimizer), before)
        assert optimizer.grad_norm is None
        if not has_state:
            set_grads(params, 0)
            optimizer.step()
            optimizer.zero_grad()


@families
def test_frozen_parameters_are_left_alone(device, family):
    params = parameters(ALL, device)
    params[1].requires_grad_(False)
    frozen = params[1].clone()
    pair = Pair(family, params, **FULL[family])
    for step in range(3):
        set_grads(pair.params, step)
        params[1].grad = None
        pair.step()
    assert torch.equal(params[1], frozen)
    assert not pair.ours.state.get(params[1])
    params[1].requires_grad_(True)
    for step in range(3, 6):
        set_grads(pair.params, step)
        pair.step()
    pair.check()


# --------------------------------------------------------------------------------------------- gradients of other kinds
@families
def test_sparse_gradients_raise_a_sentence(device, family):
    params = parameters([torch.float32], device, [(4, 3), (5,)])
    optimizer = family(params, **FULL[family])
    set_grads(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    params[0].grad = torch.ones(4, 3, device=device).to_sparse()
    with pytest.raises(RuntimeError, match=r"params.*\[0\] must be dense, got torch.sparse_coo; use torch.optim"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


@families
@pytest.mark.parametrize("size", [16, 4])
def test_a_gradient_kept_from_before_its_parameter_was_resized_raises_a_sentence(device, family, size):
    p = torch.nn.Parameter(torch.ones(8, device=device))
    optimizer = family([p], lr=0.1)
    p.grad = torch.ones(8, device=device)
    optimizer.step()
    optimizer.state[p].clear()
    p.data = torch.zeros(size, device=device)
    with pytest.raises(RuntimeError, match=rf"must have the parameter's shape \({size},\), got \(8,\); set it to None"):
        optimizer.step()
    assert p.eq(0).all()


@families
def test_a_gradient_of_another_dtype_than_ours_raises_a_sentence(device, family):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad_dtype = None
    p.grad = torch.ones(3, dtype=torch.float64, device=device)
    with pytest.raises(TypeError, match=r"must be float32, float16 or bfloat16, got torch\.float64"):
        family([p], lr=0.1).step()
    assert torch.equal(p, torch.ones_like(p))


# ------------------------------------------------------------------------------------------------------------ zero_grad
@families
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(device, family, set_to_none):
    for foreach in (None, True):
        params = parameters(ALL, device)
        optimizer = family(params, lr=0.1, foreach=foreach)
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            assert all(p.grad is None if set_to_none else not p.grad.any() for p in params)


@families
def test_gradients_are_released(device, family):
    """zero_grad must free their memory: the plan keeps no gradient."""
    params = [torch.nn.Parameter(randn(6, 5, 3, 4, seed=0, device=device).to(memory_format=torch.channels_last))]
    params += parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    for step in range(2):
        set_grads(params, step)
        if step:
            params[2].grad = None
        grads = [weakref.ref(p.grad) for p in params if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert not any(grad() is not None for grad in grads)


# ------------------------------------------------------------------------------------------- sums of many micro-batches
def accumulated(dtype, grad_dtype, device):
    """The gradient of a small classifier over 256 micro-batches, in fp64; weights and inputs are bf16 numbers."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    net = net.bfloat16().to(device, dtype)
    for p in net.parameters():
        p.grad_dtype = grad_dtype
    inputs, labels = torch.randn(256, 4, 32).bfloat16().to(device, dtype), torch.randint(0, 10, (256, 4), device=device)
    for x, y in zip(inputs, labels, strict=True):
        torch.nn.functional.cross_entropy(net(x), y).backward()
    return net, torch.cat([p.grad.double().flatten() for p in net.parameters()])


def test_accumulation_in_fp32(device):
    """The recipe of the README and its figures; the step takes what it gives."""
    _, truth = accumulated(torch.float64, torch.float64, device)
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        net, grad = accumulated(torch.bfloat16, dtype, device)
        errors[dtype] = float((grad - truth).norm() / truth.norm())
        assert all(p.grad.dtype is dtype for p in net.parameters())
    assert 0.015 < errors[torch.bfloat16] < 0.045 and 0.002 < errors[torch.float32] < 0.0045
    p = net[0].weight
    expected = p.detach().float() - p.grad
    FusedSGD(net.parameters(), lr=1.0).step()
    assert torch.equal(p, expected.bfloat16())
