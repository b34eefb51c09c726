"""20 steps against torch.optim under the error rule, for every example of options."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from optim_cases import (
    ALL,
    DTYPES,
    EXAMPLES,
    FULL,
    TORCH,
    Pair,
    assert_same,
    dtypes,
    examples,
    families,
    parameters,
    randn,
    set_grads,
    snapshot,
)

from amp_kernels import testing
from amp_kernels.optim import FusedSGD

STEPS = 20


def train(pair: Pair) -> None:
    for step in range(STEPS):
        set_grads(pair.params, step)
        pair.step()
    pair.check()


def run_against_torch(family: type, device: torch.device, options: dict[str, Any], dtypes: Any) -> None:
    pair = Pair(family, parameters(dtypes, device), **options)
    train(pair)
    optimizers = (pair.ours, *pair.theirs)
    for params in zip(pair.params, *pair.copies, strict=True):
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, params, strict=True)]
        for key in states[0].keys() - {"remainder", "step"}:
            error, allowed = testing.common.error_and_allowed(*(state[key] for state in states))
            assert error <= allowed, key


@examples
def test_every_example(device, family, options):
    run_against_torch(family, device, options, ALL)


@families
@dtypes
def test_one_dtype(device, family, dtype):
    run_against_torch(family, device, FULL[family], [dtype])


@families
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-dim", "1-element"])
def test_tensor_lr(device, family, shape):
    lr = torch.full(shape, 0.02, device=device)
    run_against_torch(family, device, {**FULL[family], "lr": lr}, ALL)


@families
@pytest.mark.parametrize("lr", [torch.tensor(0.02, dtype=torch.float64), torch.tensor(0.02)], ids=["fp64", "cpu"])
def test_a_tensor_lr_that_kernels_cannot_read(device, family, lr):
    run_against_torch(family, device, {"lr": lr}, [torch.float32])
    p = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16, device=device))  # 0-dim: fp64 lr would promote it
    optimizer = family([p], lr=lr)
    p.grad = torch.ones_like(p)
    optimizer.step()
    master = optimizer.master(p)
    assert master.dtype is torch.float32 and master < 1


@families
def test_several_groups_with_different_options(device, family):
    params = parameters(ALL, device, [(40, 9), (257,), (33, 129), (199,), (30, 20), (9,)])
    pair = Pair(family, params[:2], **FULL[family])
    pair.add_param_group(params[2:5], **{**TORCH[family](params).defaults, **EXAMPLES[family]["maximize"], "lr": 0.003})
    pair.add_param_group(params[5:], lr=0.0)
    train(pair)
    assert_same([params[5]], [randn(9, seed=5, dtype=torch.bfloat16, device=device)])


@families
@pytest.mark.parametrize("grad", ALL, ids=[f"grad-{name}" for name in DTYPES])
def test_gradients_of_another_dtype(device, family, grad):
    pair = Pair(family, parameters(ALL, device), **FULL[family])
    for p in pair.params:
        p.grad_dtype = None  # any
    for step in range(STEPS):
        set_grads(pair.params, step, grad)
        pair.step()
    pair.check()


@families
def test_gradient_dtypes_that_change_between_steps(device, family):
    pair = Pair(family, parameters(ALL, device), **FULL[family])
    for p in pair.params:
        p.grad_dtype = None
    for step in range(STEPS):
        for i, p in enumerate(pair.params):
            set_grads([p], step, ALL[(step + i) % 3])
        pair.step()
    pair.check()


@families
@pytest.mark.parametrize("max_norm", [0.5, 1e4], ids=["clipped", "not clipped"])
def test_max_grad_norm_is_clip_grad_norm(device, family, max_norm):
    pair = Pair(family, parameters(ALL, device), max_grad_norm=max_norm, **FULL[family])
    for step in range(STEPS):
        set_grads(pair.params, step)
        before = [p.grad.clone() for p in pair.params]
        pair.step()
        assert_same([p.grad for p in pair.params], before)
        assert pair.ours.grad_norm.device.type == device.type
        assert pair.ours.grad_norm.item() == pytest.approx(pair.norm.item(), rel=1e-6)
    pair.check()


@families
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic_algorithms"])
def test_same_inputs_same_bits(device, family, deterministic):
    def run():
        params = parameters(ALL, device, [(9,), (5, 7), (65537,)])
        optimizer = family(params, **FULL[family], max_grad_norm=0.5)
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        return [*snapshot(optimizer), optimizer.grad_norm.clone()]

    torch.use_deterministic_algorithms(deterministic)
    try:
        assert_same(run(), run())
    finally:
        torch.use_deterministic_algorithms(False)


@families
@pytest.mark.parametrize("size", [0, 1, 7, 65537])
def test_sizes(device, family, size):
    pair = Pair(family, parameters(ALL, device, [(size,)] * 3), max_grad_norm=100.0, **FULL[family])
    for step in range(2):
        set_grads(pair.params, step)
        pair.step()
    pair.check()
    assert (pair.ours.grad_norm == 0) == (size == 0)


# ------------------------------------------------------------------------------------------------------------ arguments
@families
@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"weight_decay": -1}, {"lr": torch.tensor([0.1, 0.2])}],
    ids=str,
)
def test_arguments_that_torch_refuses(family, options):
    for optimizer in (TORCH[family], family):
        with pytest.raises(ValueError):
            optimizer([torch.nn.Parameter(torch.zeros(1))], **options)


def test_nesterov_needs_momentum_and_no_dampening():
    with pytest.raises(ValueError, match="Nesterov"):
        FusedSGD([torch.nn.Parameter(torch.zeros(1))], nesterov=True)


@families
def test_defaults_are_those_of_torch(family):
    ours, theirs = (f([torch.nn.Parameter(torch.zeros(1))]).defaults for f in (family, TORCH[family]))
    assert {k: v for k, v in ours.items() if k in theirs and k not in ("foreach", "fused")} == {
        k: v for k, v in theirs.items() if k not in ("foreach", "fused")
    }


@families
def test_accepted_and_refused(family):
    p = torch.nn.Parameter(torch.zeros(1))
    for name in {"foreach", "fused", "capturable"} & inspect.signature(TORCH[family]).parameters.keys():
        for value in (False, True):
            family([p], **{name: value})
    with pytest.raises(ValueError, match="differentiable must be False"):
        family([p], differentiable=True)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_grad_norm must be"):
            family([p], max_grad_norm=wrong)
    assert family([p], fused=True)._step_supports_amp_scaling


@families
def test_named_parameters(family):
    model = torch.nn.Linear(3, 2)
    optimizer = family(model.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@families
def test_a_parameter_of_another_dtype_is_refused(device, family):
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64, device=device))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match=r"params.*must be float32, float16 or bfloat16, got torch.float64"):
        family([p]).step()


@families
def test_an_infinite_max_grad_norm_measures_and_clips_nothing(device, family):
    measured, plain = (
        family(parameters(ALL, device), **FULL[family], max_grad_norm=norm) for norm in (float("inf"), None)
    )
    for optimizer in (measured, plain):
        params = optimizer.param_groups[0]["params"]
        set_grads(params, 0)
        optimizer.step()
    norm = torch.cat([p.grad.double().flatten() for p in params]).norm()
    assert measured.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6) and plain.grad_norm is None
    assert_same(snapshot(measured), snapshot(plain))
