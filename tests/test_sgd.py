"""`sgd_` on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_kernels import sgd_, testing

pytestmark = [
    pytest.mark.usefixtures("backend"),
    # NumPy, underneath Triton's interpreter, warns where IEEE arithmetic overflows; that it does is tested.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
OPTIONS: dict[str, Any] = {
    "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False,
    "is_first_step": True,
}  # fmt: skip


@pytest.mark.parametrize("case", testing.CASES["sgd_"], ids=str)
def test_case(case: testing.Case, backend: str, device: torch.device) -> None:
    failed = [result for result in case.run(backend, device) if not result.passed]
    assert not failed


def inputs(device: torch.device, *dtypes: torch.dtype, **options: Any) -> tuple[testing.UpdateInputs, list[Tensor]]:
    """Parameters of these dtypes, and gradients for them."""
    values = [testing.randn(50, dtype=dtype, seed=i) for i, dtype in enumerate(dtypes)]
    grads = [testing.randn(50, dtype=dtype, seed=10 + i).to(device) for i, dtype in enumerate(dtypes)]
    return testing.UpdateInputs("sgd_", values, options, device), grads


# -------------------------------------------------------------------------------------------------- semantics
@pytest.mark.parametrize("options", testing.SGD_OPTIONS.values(), ids=testing.SGD_OPTIONS)
@pytest.mark.parametrize("dtype", testing.DTYPES.values(), ids=testing.DTYPES)
def test_twenty_steps_follow_torch(dtype: torch.dtype, options: dict[str, Any], device: torch.device) -> None:
    ours = testing.UpdateInputs("sgd_", [testing.randn(2000, dtype=dtype)], options, device)
    theirs, truth = ours.torch_optimizer(torch.float32), ours.torch_optimizer(torch.float64)
    for k in range(20):
        grads = [testing.randn(2000, dtype=dtype, seed=k + 1).to(device)]
        ours.step(grads, first=k == 0)
        testing.torch_step(theirs, grads)
        testing.torch_step(truth, grads)
    their, true = (o.param_groups[0]["params"][0] for o in (theirs, truth))
    error, allowed = testing.error_and_allowed(ours.fp32()[0], their, true)
    assert error <= allowed
    assert all(result.passed for result in ours.weight_results())


def test_the_first_step_ignores_dampening_and_the_buffer(device: torch.device) -> None:
    p, buffer = torch.zeros(3, device=device), torch.full((3,), math.nan, device=device)
    sgd_([p], [torch.ones(3, device=device)], [buffer], lr=1.0, **OPTIONS | {"momentum": 0.9, "dampening": 0.5})
    assert buffer.tolist() == [1.0] * 3 and p.tolist() == [-1.0] * 3


def test_later_steps_read_the_buffer(device: torch.device) -> None:
    p, buffer = torch.zeros(3, device=device), torch.full((3,), 2.0, device=device)
    later = OPTIONS | {"momentum": 0.5, "dampening": 0.5, "is_first_step": False}
    sgd_([p], [torch.ones(3, device=device)], [buffer], lr=1.0, **later)
    assert buffer.tolist() == [1.5] * 3 and p.tolist() == [-1.5] * 3


def test_without_momentum_the_buffers_are_ignored(device: torch.device) -> None:
    p, buffer = torch.zeros(3, device=device), torch.full((3,), 7.0, device=device)
    sgd_([p], [torch.ones(3, device=device)], [buffer], lr=1.0, **OPTIONS)
    assert buffer.tolist() == [7.0] * 3 and p.tolist() == [-1.0] * 3


def test_nesterov_without_momentum_is_plain(device: torch.device) -> None:
    p = torch.zeros(3, device=device)
    sgd_([p], [torch.ones(3, device=device)], [], lr=1.0, **OPTIONS | {"nesterov": True})
    assert p.tolist() == [-1.0] * 3


@pytest.mark.parametrize("weight_decay", [0.01, 0.1])
def test_decay_that_nearly_cancels_the_gradient(weight_decay: float, backend: str, device: torch.device) -> None:
    if backend == "triton" and device.type == "cpu":
        pytest.skip("the interpreter rounds the product of an fma")
    ours = testing.UpdateInputs("sgd_", [testing.randn(20000)], {"weight_decay": weight_decay}, device)
    grads = [-weight_decay * ours.params[0] * (1 + 1e-6 * testing.randn(20000, seed=1).to(device))]
    theirs, truth = ours.torch_optimizer(torch.float32), ours.torch_optimizer(torch.float64)
    ours.step(grads)
    testing.torch_step(theirs, grads)
    testing.torch_step(truth, grads)
    their, true = (o.param_groups[0]["params"][0] for o in (theirs, truth))
    error, allowed = testing.error_and_allowed(ours.params[0], their, true)
    assert error <= allowed


def test_without_decay_an_infinite_parameter_stays(device: torch.device) -> None:
    ours, grads = inputs(device, torch.float32)
    ours.params[0][3] = -math.inf
    ours.step(grads)
    assert ours.params[0][3].item() == -math.inf


@pytest.mark.parametrize("found", [1.0, 2.0, math.inf, math.nan])
def test_a_skipped_step_changes_no_bit(found: float, device: torch.device) -> None:
    ours, grads = inputs(device, *testing.DTYPES.values(), momentum=0.9)
    before = [x.clone() for x in ours.written()]
    ours.step(grads, found_inf=torch.tensor(found, device=device))
    assert sum(map(testing.changed, before, ours.written())) == 0


def test_found_inf_is_not_written(device: torch.device) -> None:
    ours, grads = inputs(device, torch.float16)
    found_inf = torch.tensor(2.0, device=device)
    ours.step(grads, found_inf=found_inf)
    assert found_inf.item() == 2.0


def test_same_inputs_same_bits(device: torch.device) -> None:
    results = []
    for _ in range(2):
        ours, grads = inputs(device, *testing.DTYPES.values(), momentum=0.9, weight_decay=0.1)
        ours.step(grads)
        results.append(ours.written())
    assert sum(map(testing.changed, *results)) == 0


def test_a_tensor_lr_gives_the_bits_of_a_float(device: torch.device) -> None:
    a, grads = inputs(device, torch.float16)
    b, _ = inputs(device, torch.float16)
    a.step(grads, lr=0.1)
    b.step(grads, lr=torch.tensor(0.1, device=device))
    assert sum(map(testing.changed, a.written(), b.written())) == 0


def test_scalars_may_have_one_dimension(device: torch.device) -> None:
    one, zero, lr = (torch.tensor([x], device=device) for x in (1.0, 0.0, 0.5))
    ours = testing.UpdateInputs("sgd_", [torch.tensor(3.0)], {}, device)
    ours.step([torch.tensor(1.0, device=device)], lr=lr, grad_scale=one, found_inf=zero)
    assert ours.params[0].item() < 3.0


def test_a_step_bumps_versions(device: torch.device) -> None:
    ours, grads = inputs(device, torch.float32, torch.float16, momentum=0.9)
    before = [x._version for x in ours.written()]
    ours.step(grads)
    assert all(x._version > version for x, version in zip(ours.written(), before, strict=True))
    assert all(grad._version == 0 for grad in grads)


def test_backward_through_a_stepped_parameter_raises(device: torch.device) -> None:
    ours, grads = inputs(device, torch.float32)
    param = ours.params[0].requires_grad_()
    loss = (param * param).sum()
    ours.step(grads)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_require_grad(device: torch.device) -> None:
    ours, grads = inputs(device, torch.float32, torch.bfloat16)
    before = [p.detach().clone() for p in ours.params]
    for param in ours.params:
        param.requires_grad_()
    ours.step(grads)
    assert all(p.is_leaf and not torch.equal(p, old) for p, old in zip(ours.params, before, strict=True))


def test_inference_tensors(device: torch.device) -> None:
    with torch.inference_mode():
        ours, grads = inputs(device, torch.float32, torch.float16)
        before = [p.clone() for p in ours.params]
        ours.step(grads)
    assert not any(torch.equal(p, old) for p, old in zip(ours.params, before, strict=True))


def test_generators(device: torch.device) -> None:
    ours, grads = inputs(device, torch.float32, torch.float32)
    before = [p.clone() for p in ours.params]
    ours.step(g for g in grads)  # type: ignore[arg-type]
    assert not any(torch.equal(p, old) for p, old in zip(ours.params, before, strict=True))


def test_empty_lists(device: torch.device) -> None:
    testing.UpdateInputs("sgd_", [], {}, device).step([])


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_written_past_the_caches(dtype: torch.dtype, offset: int, backend: str, device: torch.device) -> None:
    """From 2^22 elements on the C++ kernel streams 16-bit weights; neighbours of the parameter are canaries."""
    if backend == "triton" and device.type == "cpu":
        pytest.skip("the interpreter takes minutes, and the path is that of C++")
    size = (1 << 22) + 5
    storage = torch.full((offset + size + 16,), 7.0, dtype=dtype, device=device)
    param = storage[offset : offset + size]
    param.copy_(testing.randn(size, dtype=dtype))
    master, grad = param.float(), testing.randn(size, dtype=dtype, seed=1).to(device)
    expected = master - 0.5 * grad.float()
    options: dict[str, Any] = {"dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    sgd_([param], [grad], [], [master], lr=0.5, momentum=0.0, is_first_step=True, **options)
    torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(param, master.to(dtype))
    assert bool((storage[:offset] == 7).all() and (storage[offset + size :] == 7).all())


def test_a_nan_of_any_payload_is_a_nan_in_bf16(device: torch.device) -> None:
    """Rounded as a number this one would be -0."""
    master = torch.full((40,), 0x7FFFFFFF, dtype=torch.int32, device=device).view(torch.float32)
    weight, buffer = torch.zeros(40, dtype=torch.bfloat16, device=device), torch.zeros(40, device=device)
    sgd_(
        [weight], [torch.zeros_like(weight)], [buffer], [master], lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0,
        nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip
    assert weight.isnan().all()
