"""What holds of every step, whatever torch's defaults and whatever came before: no wait, no memory, no graph."""

from __future__ import annotations

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
    set_grads,
    snapshot,
    started,
    step_under,
    waits_raise,
)
from torch import Tensor

import amp_kernels
from amp_kernels.optim import FusedSGD, ema_


# ------------------------------------------------------------------------------------------------------------- defaults
@families
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_default_dtype(device, family, default):
    def run() -> list[Tensor]:
        params = parameters(ALL, device)
        optimizer = family(params, **FULL[family], max_grad_norm=1.0)
        scaler = started(device, min_scale=1.0, hysteresis=2)
        for step in range(3):
            set_grads(params, step, scale=torch.inf if step == 1 else 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in params]

    expected = run()
    torch.set_default_dtype(default)
    try:
        assert_same(run(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@families
def test_default_device(device, family):
    params = parameters(ALL, device)
    pair = Pair(family, params, **FULL[family])
    for step in range(3):
        set_grads(params, step)
        pair.step_theirs()
        with torch.device("meta"):
            pair.ours.step()
    pair.check()


# ------------------------------------------------------------------------------------------------------ time and memory
@families
@pytest.mark.parametrize("use_scaler", [False, True], ids=["", "scaler"])
def test_a_step_does_not_wait(device, family, use_scaler, monkeypatch):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=1.0)
    scaler = started(device, enabled=use_scaler, hysteresis=2, min_scale=1.0)
    for step in range(4):
        set_grads(params, step, scale=torch.inf if step == 1 else 1.0)
        with waits_raise(device, monkeypatch, first=step == 0):
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_ranks_that_agree_do_not_wait(device, unscale, mesh, monkeypatch):
    if device.type != mesh.device_type:
        pytest.skip("gloo and its mesh are on the CPU")
    params = parameters(ALL, device)
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    scaler = started(device, process_group=torch.distributed.group.WORLD)
    for step in range(4):
        set_grads(params, step, scale=torch.inf if step == 1 else 1.0)
        with waits_raise(device, monkeypatch, first=step == 0):
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.skipped_steps == 1


def test_an_average_does_not_wait(device, monkeypatch):
    params = parameters(ALL, device)
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    averages = [optimizer.master(p) for p in params]
    for step, found_inf in enumerate((0.0, 1.0, 0.0)):
        set_grads(params, step)
        step_under(optimizer, found_inf)
        with waits_raise(device, monkeypatch):
            ema_(averages, optimizer, 0.9)


@families
def test_a_steady_step_allocates_nothing_proportional_to_the_model(family):
    params = parameters(ALL, "cpu", [(300_000,), (257, 1000), (200_000,)])
    with amp_kernels.use_backend("cpu"):
        optimizer = family(params, **FULL[family], max_grad_norm=1.0)
        scaler = started(torch.device("cpu"))
        set_grads(params, 0)
        for step in range(4):
            if step == 2:
                for p in params:
                    p.grad = p.grad.clone()  # other addresses
            with torch.profiler.profile(profile_memory=True) as profile:
                scaler.step(optimizer)
                scaler.update()
            if step:
                taken = sum(max(0, e.self_cpu_memory_usage) for e in profile.events())
                assert taken < 10_000


# ------------------------------------------------------------------------------------------------------------- autograd
@families
@pytest.mark.parametrize("skip", [False, True], ids=["", "skipped"])
@dtypes
def test_backward_through_an_old_graph_raises(device, family, dtype, skip):
    p = torch.nn.Parameter(torch.ones(3, device=device, dtype=dtype))
    loss = (p**2).sum()
    optimizer = family([p], lr=0.1)
    p.grad = torch.ones_like(p)
    step_under(optimizer, float(skip))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@families
def test_no_graph_grows(device, family):
    """With create_graph gradients have a history, which norms and states must not."""
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=1.0)
    scaler = started(device)
    for _ in range(2):
        loss = scaler.scale(sum((p.float() ** 3).sum() for p in params))
        for p, grad in zip(params, torch.autograd.grad(loss, params, create_graph=True), strict=True):
            assert grad.requires_grad
            p.grad = grad
        scaler.step(optimizer)
        scaler.update()
        assert not optimizer.grad_norm.requires_grad
        assert not any(t.requires_grad for t in snapshot(optimizer)[len(params) :])


# ------------------------------------------------------------------------------------------------------------ histories
@families
def test_backends_take_over_from_each_other(family):
    params = parameters(ALL, "cpu")
    pair = Pair(family, params, **DAMPENED[family])
    for step in range(8):
        with amp_kernels.use_backend("reference" if step // 2 % 2 else "cpu"):
            set_grads(params, step)
            pair.step()
    pair.check()
