"""What users of torch.optim do with an optimizer: closures, hooks, schedulers, groups, options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import (
    ALL,
    DAMPENED,
    EXAMPLES,
    FULL,
    Pair,
    assert_same,
    fp32,
    optimizers,
    parameters,
    randn,
    set_grads,
    snapshot,
    started,
    stock,
    stocks,
)
from torch import Tensor
from torch.optim import lr_scheduler

from amp_kernels.optim import FusedRMSprop, FusedSGD


# --------------------------------------------------------------------------------------------------- closures and hooks
@optimizers
def test_closure(device, family):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = family([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert optimizer.step(closure) < 3


@optimizers
def test_step_hooks(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    set_grads(params, 0)
    optimizer.step()
    assert calls == ["pre", "post"]


@optimizers
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_pre_hook_that_replaces_the_gradients(device, family, max_grad_norm):
    def double(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = 2 * p.grad

    def run(scaler: Any, hook: bool) -> list[Tensor]:
        params = parameters(stocks(ALL, device), device)
        optimizer = family(params, **FULL[family], max_grad_norm=max_grad_norm)
        if hook:
            optimizer.register_step_pre_hook(double)
        for step in range(3):
            set_grads(params, step, scale=1.0 if hook else 2.0)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        return snapshot(optimizer)

    expected = run(None, hook=False)
    for scaler in (None, started(device, init_scale=1.0), stock(device, init_scale=1.0)):
        assert_same(run(scaler, hook=True), expected)


# ---------------------------------------------------------------------------------------------------- the learning rate
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@optimizers
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers(device, family, make, tensor_lr):
    lr = torch.tensor(0.1, device=device) if tensor_lr else 0.1
    pair = Pair(family, parameters(ALL, device), **{**EXAMPLES[family]["momentum"], "lr": lr})
    schedulers = [make(o) for o in (pair.ours, *pair.theirs)]
    for step in range(10):
        set_grads(pair.params, step)
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    if tensor_lr:  # an fp32 rate, not a float's
        for p, q in zip(pair.params, pair.copies[0], strict=True):
            torch.testing.assert_close(fp32(pair.ours, p), q.detach(), rtol=1e-5, atol=1e-5)
        assert isinstance(pair.ours.param_groups[0]["lr"], Tensor)
    else:
        pair.check()


@optimizers
@pytest.mark.parametrize("lrs", [(0.5, 0.0), (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("kind", ["float", "in place", "float to tensor", "tensor to tensor"])
def test_a_changed_lr_takes_effect_at_once(device, family, lrs, kind):
    p = torch.nn.Parameter(torch.ones(5, device=device))
    rate = [torch.tensor(lr, device=device) for lr in lrs]
    optimizer = family([p], lr=lrs[0] if kind.startswith("float") else rate[0])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    assert torch.equal(before, torch.ones_like(p)) == (lrs[0] == 0)
    if kind == "in place":
        rate[0].fill_(lrs[1])
    else:
        optimizer.param_groups[0]["lr"] = lrs[1] if kind == "float" else rate[1]
    optimizer.step()
    assert torch.equal(p, before) == (lrs[1] == 0)


# --------------------------------------------------------------------------------------------------- groups and options
@optimizers
def test_add_param_group_after_steps(device, family):
    params = parameters(ALL, device)
    pair = Pair(family, params[:2], **DAMPENED[family])
    for step in range(6):
        if step == 3:
            pair.add_param_group(params[2:], lr=0.03)
        set_grads(pair.params, step)
        pair.step()
    pair.check()
    assert [int(pair.ours.state_dict()["state"][i]["step"]) for i in range(4)] == [6, 6, 3, 3]


CHANGES = {
    "momentum on": ({"momentum": 0.0, "dampening": 0.0}, {"momentum": 0.9}),
    "momentum on, dampened": ({"momentum": 0.0, "dampening": 0.5}, {"momentum": 0.9}),
    "momentum off": ({"momentum": 0.9}, {"momentum": 0.0}),
    "maximize": ({"momentum": 0.9}, {"maximize": True}),
    "weight_decay": ({"momentum": 0.9}, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("back", [False, True], ids=["", "and back"])
def test_options_changed_while_training(device, change, back):
    options, after = change
    pair = Pair(FusedSGD, parameters(ALL, device), lr=0.1, **options)
    for step in range(9):
        changed = after if step >= 3 else {}
        if back and step >= 6:
            changed = {k: options.get(k, pair.ours.defaults[k]) for k in after}
        for optimizer in (pair.ours, *pair.theirs):
            optimizer.param_groups[0].update(changed)
        set_grads(pair.params, step)
        pair.step()
    pair.check()


def test_rmsprop_options_turned_on_while_training(device):
    """torch raises KeyError here."""
    params = parameters(ALL, device)
    optimizer = FusedRMSprop(params, lr=0.01)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0].update(momentum=0.9, centered=True)
        set_grads(params, step)
        optimizer.step()
    assert set(optimizer.state[params[0]]) == {"step", "square_avg", "momentum_buffer", "grad_avg"}
    assert int(optimizer.state_dict()["state"][0]["step"]) == 4


# -------------------------------------------------------------------------------------------------------------- DTensor
@optimizers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dtensor(device, family, dtype, mesh):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    if device.type != mesh.device_type:
        pytest.skip("gloo and its mesh are on the CPU")
    x, grad = (randn(8, 3, seed=seed, dtype=dtype) for seed in range(2))
    plain = torch.nn.Parameter(x.clone())
    sharded = torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]))
    optimizers = [family([p], **FULL[family]) for p in (plain, sharded)]
    scaler = started(device, init_scale=1.0)

    def step() -> None:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert torch.equal(sharded.to_local(), plain)

    for k in range(3):
        plain.grad = grad * (k + 1)
        sharded.grad = distribute_tensor(plain.grad, mesh, [Shard(0)])
        step()
    states = optimizers[1].state[sharded]
    assert all(isinstance(states[name], DTensor) for name in states.keys() - {"step"})
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    step()
    for p in (sharded, plain):
        family([p], lr=0.1, max_grad_norm=1.0).step()
    assert torch.equal(sharded.to_local(), plain)
