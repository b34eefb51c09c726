"""20 steps against torch.optim under the error rule, for every combination of options."""

from __future__ import annotations

import itertools
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
    give_grads,
    parameters,
    randn,
    set_grads,
    snapshot,
)

from amp_kernels import testing
from amp_kernels.optim import FusedRMSprop, FusedSGD

STEPS = 20


def product(**options: Any) -> list[Any]:
    combinations = (dict(zip(options, values, strict=True)) for values in itertools.product(*options.values()))
    return [pytest.param(c, id="-".join(f"{k}={v}" for k, v in c.items())) for c in combinations]


SGD_OPTIONS = [
    p
    for p in product(
        momentum=[0, 0.9],
        dampening=[0, 0.1],
        weight_decay=[0, 0.01],
        nesterov=[False, True],
        maximize=[False, True],
    )
    if not p.values[0]["nesterov"] or (p.values[0]["momentum"] and not p.values[0]["dampening"])  # torch's rule
]
RMSPROP_OPTIONS = product(
    centered=[False, True],
    momentum=[0, 0.9],
    weight_decay=[0, 0.01],
    maximize=[False, True],
    alpha=[0.9],
    eps=[1e-8],
) + product(centered=[False, True], alpha=[0.99], eps=[1e-3])


def run_against_torch(family: type, device: torch.device, options: dict[str, Any], lr: Any, dtypes: Any) -> None:
    params = parameters(dtypes, device)
    theirs, truth = copies(params, torch.float32), copies(params, torch.float64)
    ours = family(params, lr=lr, **options)
    rate = float(lr)
    others = [TORCH[family](ps, lr=rate, **options) for ps in (theirs, truth)]
    for step in range(STEPS):
        set_grads(params, step)
        for ps, optimizer in zip((theirs, truth), others, strict=True):
            give_grads(params, ps)
            optimizer.step()
        ours.step()
    assert_within_rule(ours, params, theirs, truth)
    for p, q, t in zip(params, theirs, truth, strict=True):
        for key in {"momentum_buffer", "square_avg", "grad_avg"} & others[0].state[q].keys():
            states = ours.state[p][key], others[0].state[q][key], others[1].state[t][key]
            error, allowed = testing.error_and_allowed(*states)
            assert error <= allowed, key


@pytest.mark.parametrize("options", SGD_OPTIONS)
def test_sgd(device, options):
    run_against_torch(FusedSGD, device, options, 0.05, list(DTYPES.values()))


@pytest.mark.parametrize("options", RMSPROP_OPTIONS)
def test_rmsprop(device, options):
    run_against_torch(FusedRMSprop, device, options, 0.01, list(DTYPES.values()))


@families
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_one_dtype(device, family, dtype):
    run_against_torch(family, device, {k: v for k, v in FULL[family].items() if k != "lr"}, 0.02, [dtype])


@families
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-dim", "1-element"])
def test_tensor_lr(device, family, shape):
    lr = torch.full(shape, 0.02, device=device)
    run_against_torch(family, device, {"momentum": 0.9}, lr, list(DTYPES.values()))


@families
@pytest.mark.parametrize("lr", [torch.tensor(0.02, dtype=torch.float64), torch.tensor(0.02)], ids=["fp64", "cpu"])
def test_a_tensor_lr_that_kernels_cannot_read(device, family, lr):
    run_against_torch(family, device, {}, lr, [torch.float32])


@families
def test_several_groups_with_different_options(device, family):
    params = parameters(list(DTYPES.values()), device, [(40, 9), (257,), (33, 129), (199,), (30, 20), (9,)])
    second = {
        FusedSGD: {"momentum": 0, "maximize": True},
        FusedRMSprop: {"momentum": 0, "alpha": 0.5, "eps": 1e-4},
    }

    def groups(ps):
        return [
            {"params": ps[:2]},
            {"params": ps[2:5], "lr": 0.003, **second[family]},
            {"params": ps[5:], "lr": 0.0},
        ]

    theirs, truth = copies(params, torch.float32), copies(params, torch.float64)
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    ours = family(groups(params), **options)
    others = [TORCH[family](groups(ps), **options) for ps in (theirs, truth)]
    for step in range(STEPS):
        set_grads(params, step)
        for ps, optimizer in zip((theirs, truth), others, strict=True):
            give_grads(params, ps)
            optimizer.step()
        ours.step()
    assert_within_rule(ours, params, theirs, truth)
    assert_same([params[5]], [randn(9, seed=5, dtype=torch.bfloat16, device=device)])  # lr 0


@families
@pytest.mark.parametrize("grad", list(DTYPES.values()), ids=[f"grad-{name}" for name in DTYPES])
def test_gradients_of_another_dtype(device, family, grad):
    params = parameters(list(DTYPES.values()), device)
    for p in params:
        p.grad_dtype = None  # any
    theirs, truth = copies(params, torch.float32), copies(params, torch.float64)
    ours = family(params, **FULL[family])
    others = [TORCH[family](ps, **FULL[family]) for ps in (theirs, truth)]
    for step in range(STEPS):
        set_grads(params, step, grad)
        for ps, optimizer in zip((theirs, truth), others, strict=True):
            give_grads(params, ps)
            optimizer.step()
        ours.step()
    assert_within_rule(ours, params, theirs, truth)


@families
def test_gradient_dtypes_that_change_between_steps(device, family):
    params = parameters(list(DTYPES.values()), device)
    for p in params:
        p.grad_dtype = None
    theirs, truth = copies(params, torch.float32), copies(params, torch.float64)
    ours = family(params, **FULL[family])
    others = [TORCH[family](ps, **FULL[family]) for ps in (theirs, truth)]
    for step in range(STEPS):
        for i, p in enumerate(params):
            set_grads([p], step, list(DTYPES.values())[(step + i) % 3])
        for ps, optimizer in zip((theirs, truth), others, strict=True):
            give_grads(params, ps)
            optimizer.step()
        ours.step()
    assert_within_rule(ours, params, theirs, truth)


@families
@pytest.mark.parametrize("max_norm", [0.5, 1e4], ids=["clipped", "not clipped"])
def test_max_grad_norm_is_clip_grad_norm(device, family, max_norm):
    params = parameters(list(DTYPES.values()), device)
    theirs, truth = copies(params, torch.float32), copies(params, torch.float64)
    ours = family(params, **FULL[family], max_grad_norm=max_norm)
    others = [TORCH[family](ps, **FULL[family]) for ps in (theirs, truth)]
    for step in range(STEPS):
        set_grads(params, step)
        before = [p.grad.clone() for p in params]
        for ps, optimizer in zip((theirs, truth), others, strict=True):
            give_grads(params, ps)
            norm = torch.nn.utils.clip_grad_norm_(ps, max_norm)
            optimizer.step()
        ours.step()
        assert_same([p.grad for p in params], before)
        assert ours.grad_norm.device.type == device.type
        assert ours.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert_within_rule(ours, params, theirs, truth)


@families
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic_algorithms"])
def test_same_inputs_same_bits(device, family, deterministic):
    def run():
        params = parameters(list(DTYPES.values()), device, [(9,), (5, 7), (65537,)])
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
    params = parameters(list(DTYPES.values()), device, [(size,)] * 3)
    theirs, truth = copies(params, torch.float32), copies(params, torch.float64)
    ours = family(params, **FULL[family], max_grad_norm=100.0)
    others = [TORCH[family](ps, **FULL[family]) for ps in (theirs, truth)]
    for step in range(2):
        set_grads(params, step)
        for ps, optimizer in zip((theirs, truth), others, strict=True):
            give_grads(params, ps)
            torch.nn.utils.clip_grad_norm_(ps, 100.0)
            optimizer.step()
        ours.step()
    assert_within_rule(ours, params, theirs, truth)
    assert (ours.grad_norm == 0) == (size == 0)


# ------------------------------------------------------------------------------------------------------------ arguments
@families
@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": -0.1}, {"weight_decay": -1}, {"lr": torch.tensor([0.1, 0.2])}],
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
    for name in ("foreach", "fused", "capturable")[: 2 if family is FusedSGD else 3]:
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
