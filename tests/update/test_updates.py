"""What the functional updates have in common, on every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from amp_kernels import testing
from amp_kernels.families import FAMILIES
from amp_kernels.testing.common import DTYPES, changed, error_and_allowed, randn
from amp_kernels.testing.updates import UPDATES, UpdateInputs, torch_step

# NumPy, underneath Triton's interpreter, warns where IEEE arithmetic overflows; that it does is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
OPTIONS = {f"{name}_": update.examples for name, update in UPDATES.items()}

ops = pytest.mark.parametrize("op", OPTIONS)


def inputs(
    op: str, device: torch.device, *dtypes: torch.dtype, example: str = "full"
) -> tuple[UpdateInputs, list[Tensor]]:
    """Parameters of these dtypes, and gradients for them."""
    values = [randn(50, dtype=dtype, seed=i) for i, dtype in enumerate(dtypes)]
    grads = [randn(50, dtype=dtype, seed=10 + i).to(device) for i, dtype in enumerate(dtypes)]
    return UpdateInputs(op, values, OPTIONS[op][example], device), grads


def assert_follows_torch(ours: UpdateInputs, grads: Sequence[Tensor], lr: float = 0.1) -> None:
    """The error rule after a step of the one parameter with each of these gradients."""
    theirs, truth = (ours.torch_optimizer(dtype, lr) for dtype in (torch.float32, torch.float64))
    for k, grad in enumerate(grads):
        ours.step([grad], first=k == 0, lr=lr)
        torch_step(theirs, [grad])
        torch_step(truth, [grad])
    their, true = (o.param_groups[0]["params"][0] for o in (theirs, truth))
    error, allowed = error_and_allowed(ours.fp32()[0], their, true)
    assert error <= allowed
    assert all(result.passed for result in ours.weight_results())


# ----------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("case", [case for op in OPTIONS for case in testing.CASES[op]], ids=lambda c: f"{c.op}-{c}")
def test_case(case: testing.Case, backend: str, device: torch.device) -> None:
    failed = [result for result in case.run(backend, device) if not result.passed]
    assert not failed


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, every in OPTIONS.items() for name in every])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_twenty_steps_follow_torch(dtype: torch.dtype, op: str, name: str, device: torch.device) -> None:
    ours = UpdateInputs(op, [randn(2000, dtype=dtype)], OPTIONS[op][name], device)
    grads = [randn(2000, dtype=dtype, seed=k + 1).to(device) for k in range(20)]
    assert_follows_torch(ours, grads, lr=UPDATES[op.removesuffix("_")].lr)


@ops
@pytest.mark.parametrize("weight_decay", [0.01, 0.1])
def test_decay_that_nearly_cancels_the_gradient(
    weight_decay: float, op: str, backend: str, device: torch.device
) -> None:
    if backend == "triton" and device.type == "cpu":
        pytest.skip("the interpreter rounds the product of an fma")
    ours = UpdateInputs(op, [randn(20000)], {"weight_decay": weight_decay}, device)
    grad = -weight_decay * ours.params[0] * (1 + 1e-6 * randn(20000, seed=1).to(device))
    # At a usual rate the rounding of so small a gradient would not show in SGD's parameters.
    assert_follows_torch(ours, [grad], lr={"sgd_": 1e6}.get(op, 0.1))


@ops
def test_a_nan_of_any_payload_is_a_nan_in_bf16(op: str, device: torch.device) -> None:
    """Rounded as a number this one would be -0."""
    ours, grads = inputs(op, device, torch.bfloat16)
    ours.masters[0].view(torch.int32).fill_(0x7FFFFFFF)
    ours.step(grads)
    assert ours.params[0].isnan().all()


@ops
def test_without_decay_an_infinite_parameter_stays(op: str, device: torch.device) -> None:
    ours, grads = inputs(op, device, torch.float32, example="plain")
    ours.params[0][3] = -math.inf
    ours.step(grads)
    assert ours.params[0][3].item() == -math.inf


@ops
def test_same_inputs_same_bits(op: str, device: torch.device) -> None:
    results = []
    for _ in range(2):
        ours, grads = inputs(op, device, *DTYPES.values())
        ours.step(grads)
        results.append(ours.written())
    assert sum(map(changed, *results)) == 0


# -------------------------------------------------------------------------------------------------- arguments
@ops
@pytest.mark.parametrize("found", [1.0, 2.0, math.inf, math.nan])
def test_a_skipped_step_changes_no_bit(found: float, op: str, device: torch.device) -> None:
    ours, grads = inputs(op, device, *DTYPES.values())
    before = [x.clone() for x in ours.written()]
    ours.step(grads, found_inf=torch.tensor(found, device=device))
    assert sum(map(changed, before, ours.written())) == 0


@ops
def test_found_inf_is_not_written(op: str, device: torch.device) -> None:
    ours, grads = inputs(op, device, torch.float16)
    found_inf = torch.tensor(2.0, device=device)
    ours.step(grads, found_inf=found_inf)
    assert found_inf.item() == 2.0


@ops
def test_a_tensor_lr_gives_the_bits_of_a_float(op: str, device: torch.device) -> None:
    a, grads = inputs(op, device, torch.float16)
    b, _ = inputs(op, device, torch.float16)
    a.step(grads, lr=0.1)
    b.step(grads, lr=torch.tensor(0.1, device=device))
    assert sum(map(changed, a.written(), b.written())) == 0


@ops
def test_scalars_may_have_one_dimension(op: str, device: torch.device) -> None:
    one, zero, lr = (torch.tensor([x], device=device) for x in (1.0, 0.0, 0.5))
    ours = UpdateInputs(op, [torch.tensor(3.0)], {}, device)
    ours.step([torch.tensor(1.0, device=device)], lr=lr, grad_scale=one, found_inf=zero)
    assert ours.params[0].item() < 3.0


@pytest.mark.parametrize("op", [f"{name}_" for name, f in FAMILIES.items() if "momentum_buffer" in f.states])
def test_without_momentum_the_buffers_are_ignored(op: str, device: torch.device) -> None:
    ours, grads = inputs(op, device, torch.float32, example="plain")
    buffer = torch.full((50,), 7.0, device=device)
    ours.states["momentum_buffer"] = [buffer]
    assert_follows_torch(ours, grads)
    assert (buffer == 7).all()


@ops
def test_generators(op: str, device: torch.device) -> None:
    ours, grads = inputs(op, device, torch.float32, torch.float32)
    before = [p.clone() for p in ours.params]
    ours.step(g for g in grads)  # type: ignore[arg-type]
    assert not any(torch.equal(p, old) for p, old in zip(ours.params, before, strict=True))


@ops
def test_empty_lists(op: str, device: torch.device) -> None:
    UpdateInputs(op, [], {}, device).step([])
    UpdateInputs(op, [], {}, device).step([], lr=torch.tensor(0.1, device=device))  # which names a device


# --------------------------------------------------------------------------------------------------- autograd
@ops
def test_a_step_bumps_versions(op: str, device: torch.device) -> None:
    ours, grads = inputs(op, device, torch.float32, torch.float16)
    before = [x._version for x in ours.written()]
    ours.step(grads)
    assert all(x._version > version for x, version in zip(ours.written(), before, strict=True))
    assert all(grad._version == 0 for grad in grads)


@ops
def test_backward_through_a_stepped_parameter_raises(op: str, device: torch.device) -> None:
    ours, grads = inputs(op, device, torch.float32)
    param = ours.params[0].requires_grad_()
    loss = (param * param).sum()
    ours.step(grads)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@ops
def test_parameters_that_require_grad(op: str, device: torch.device) -> None:
    ours, grads = inputs(op, device, torch.float32, torch.bfloat16)
    before = [p.detach().clone() for p in ours.params]
    for param in ours.params:
        param.requires_grad_()
    ours.step(grads)
    assert all(p.is_leaf and not torch.equal(p, old) for p, old in zip(ours.params, before, strict=True))


@ops
def test_inference_tensors(op: str, device: torch.device) -> None:
    with torch.inference_mode():
        ours, grads = inputs(op, device, torch.float32, torch.float16)
        before = [p.clone() for p in ours.params]
        ours.step(grads)
    assert not any(torch.equal(p, old) for p, old in zip(ours.params, before, strict=True))
