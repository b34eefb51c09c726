"""`unscale_`, `grad_norm` and `clip_grad_norm_` on every backend."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_kernels import clip_grad_norm_, grad_norm, testing, unscale_
from amp_kernels.functional import unscale as functional

pytestmark = [
    pytest.mark.usefixtures("backend"),
    # NumPy, underneath Triton's interpreter, warns where IEEE arithmetic overflows; that it does is tested.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
FAMILY = [case for op in ("unscale_", "grad_norm", "clip_grad_norm_") for case in testing.CASES[op]]


def scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


@pytest.mark.parametrize("case", FAMILY, ids=lambda case: f"{case.op}-{case}")
def test_case(case: testing.Case, backend: str, device: torch.device) -> None:
    failed = [result for result in case.run(backend, device) if not result.passed]
    assert not failed


# --------------------------------------------------------------------------------------------------- unscale_
def test_unscale_returns_nothing(device: torch.device) -> None:
    assert unscale_([torch.ones(3, device=device)], inv_scale=scalar(0.5, device), found_inf=scalar(0, device)) is None


def test_unscale_takes_a_generator(device: torch.device) -> None:
    grads = [torch.ones(3, device=device), torch.ones(2, device=device)]
    unscale_((g for g in grads), inv_scale=scalar(0.5, device), found_inf=scalar(0.0, device))
    assert [g.tolist() for g in grads] == [[0.5] * 3, [0.5] * 2]


def test_unscale_of_an_empty_list_leaves_found_inf(device: torch.device) -> None:
    found_inf = scalar(2.0, device)
    unscale_([], inv_scale=scalar(0.5, device), found_inf=found_inf)
    assert found_inf.item() == 2.0


def test_unscale_of_only_empty_tensors_leaves_found_inf(device: torch.device) -> None:
    found_inf = scalar(2.0, device)
    unscale_(
        [torch.ones(0, device=device), torch.ones(3, 0, device=device)],
        inv_scale=scalar(0.5, device),
        found_inf=found_inf,
    )
    assert found_inf.item() == 2.0


def test_overflow_of_the_product_is_not_found(device: torch.device) -> None:
    grad, found_inf = torch.tensor([60000.0], dtype=torch.float16, device=device), scalar(0.0, device)
    unscale_([grad], inv_scale=scalar(2.0, device), found_inf=found_inf)
    assert grad.item() == math.inf and found_inf.item() == 0.0


def test_overflow_of_many_products_is_not_found(device: torch.device) -> None:
    grad, found_inf = torch.full((5000,), 1e30, device=device), torch.zeros((), device=device)
    unscale_([grad], inv_scale=torch.tensor(1e10, device=device), found_inf=found_inf)
    assert grad.isinf().all() and found_inf == 0


def test_nan_beside_a_view_is_not_seen(device: torch.device) -> None:
    memory, found_inf = torch.full((8, 9), math.nan, device=device), scalar(0.0, device)
    view = memory[1:-1, 2:-2].fill_(1.0)
    unscale_([view], inv_scale=scalar(0.5, device), found_inf=found_inf)
    assert found_inf.item() == 0.0 and bool((view == 0.5).all()) and int(memory.isnan().sum()) == 72 - 30


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-dim", "1-dim"])
def test_scalars_may_have_one_dimension(shape: tuple[int, ...], device: torch.device) -> None:
    grad = torch.tensor(3.0, device=device)
    inv_scale, found_inf = torch.full(shape, 0.5, device=device), torch.zeros(shape, device=device)
    unscale_([grad], inv_scale=inv_scale, found_inf=found_inf)
    norm = grad_norm([grad], inv_scale=inv_scale, found_inf=found_inf)
    assert grad.item() == 1.5 and norm.shape == () and norm.item() == 0.75 and found_inf.shape == shape


def test_unscale_is_torchs_with_the_scalars_named(device: torch.device) -> None:
    ours, theirs = testing.common.randn(1000).to(device), testing.common.randn(1000).to(device)
    unscale_([ours], inv_scale=scalar(0.37, device), found_inf=scalar(0.0, device))
    torch._amp_foreach_non_finite_check_and_unscale_([theirs], scalar(0.0, device), scalar(0.37, device))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", testing.common.DTYPES.values(), ids=testing.common.DTYPES)
def test_every_single_position_is_checked(dtype: torch.dtype, device: torch.device) -> None:
    clean = torch.zeros(70, dtype=dtype, device=device)
    for i in range(70):
        bad, found_inf = clean.clone(), scalar(0.0, device)
        bad[i] = math.inf
        unscale_([bad], inv_scale=scalar(1.0, device), found_inf=found_inf)
        assert found_inf.item() == 1.0, i


@pytest.mark.parametrize("position", [255, 256, 767, 1023, 1024, 2047, 2048, 2303, 3071, 3072, 4095, 4864, 5000])
def test_shared_cases_see_a_fault_at_any_border(position: int) -> None:
    def misses(grads: list[torch.Tensor], found_inf: torch.Tensor) -> None:
        bad = grads[0].isfinite().logical_not()
        bad[position : position + 1] = False
        found_inf.fill_(float(bad.any()))

    find = testing.unscale._positions(misses, torch.float16, (math.nan, math.inf), torch.device("cpu"))
    assert not all(result.passed for result in find)
    assert not testing.unscale.at_borders(torch.float16)[-1][position].isfinite()


# ---------------------------------------------------------------------------------------- gradients, autograd
def test_unscale_of_a_saved_tensor_makes_backward_raise(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = x * 1.0
    z = y * y
    unscale_([y], inv_scale=scalar(0.5, device), found_inf=scalar(0.0, device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_unscale_bumps_versions(device: torch.device) -> None:
    grad, found_inf = torch.ones(3, device=device), scalar(0.0, device)
    before = grad._version, found_inf._version
    unscale_([grad], inv_scale=scalar(0.5, device), found_inf=found_inf)
    assert grad._version > before[0] and found_inf._version > before[1]


def test_grad_norm_leaves_versions_of_gradients(device: torch.device) -> None:
    grad = torch.ones(3, device=device)
    before = grad._version
    grad_norm([grad], found_inf=scalar(0.0, device))
    assert grad._version == before


def test_a_leaf_that_requires_grad_can_be_unscaled(device: torch.device) -> None:
    grad = torch.ones(3, device=device, requires_grad=True)
    unscale_([grad], inv_scale=scalar(0.5, device), found_inf=scalar(0.0, device))
    assert grad.tolist() == [0.5] * 3 and grad.requires_grad and grad.grad_fn is None


def test_an_expanded_gradient_is_refused(device: torch.device) -> None:
    """Before anything is written."""
    grad, found_inf = torch.full((1,), math.inf, device=device).expand(5), scalar(0.0, device)
    with pytest.raises(ValueError, match=r"unscale_: grads\[0\] must not be an expanded tensor"):
        unscale_([grad], inv_scale=scalar(0.5, device), found_inf=found_inf)
    assert found_inf.item() == 0.0


def test_grad_norm_is_not_differentiable(device: torch.device) -> None:
    assert not grad_norm([torch.ones(3, device=device, requires_grad=True)]).requires_grad


def test_inference_tensors(device: torch.device) -> None:
    with torch.inference_mode():
        grad, found_inf = torch.ones(3, device=device), scalar(0.0, device)
        unscale_([grad], inv_scale=scalar(0.5, device), found_inf=found_inf)
        assert grad.tolist() == [0.5] * 3
        assert grad_norm([grad]).item() == pytest.approx(0.75**0.5)


# -------------------------------------------------------------------------------------------------- grad_norm
def test_grad_norm_of_an_empty_list_is_zero() -> None:
    assert grad_norm([]).item() == 0.0


def test_grad_norm_of_only_empty_tensors_is_zero(device: torch.device) -> None:
    assert grad_norm([torch.ones(0, device=device)]).item() == 0.0


def test_grad_norm_takes_a_generator(device: torch.device) -> None:
    assert grad_norm(torch.ones(2, device=device) for _ in range(2)).item() == 2.0


def test_grad_norm_beyond_fp32_is_inf_and_no_overflow(device: torch.device) -> None:
    found_inf = scalar(0.0, device)
    norm = grad_norm([torch.full((2,), 3e38, device=device)], found_inf=found_inf)
    assert norm.item() == math.inf and found_inf.item() == 0.0


def test_inv_scale_brings_a_norm_beyond_fp32_back(device: torch.device) -> None:
    norm = grad_norm([torch.full((4,), 3e38, device=device)], inv_scale=scalar(0.25, device))
    assert norm.item() == pytest.approx(1.5e38, rel=1e-6)


def test_a_huge_element_does_not_hide_the_check(device: torch.device) -> None:
    found_inf = scalar(0.0, device)
    grad_norm([torch.tensor([3e38, math.nan, 3e38], device=device)], found_inf=found_inf)
    assert found_inf.item() == 1.0


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="too slow in the interpreter")
@pytest.mark.parametrize("value", [0.1, 65504.0], ids=["constant", "largest"])
def test_grad_norm_of_100_million_elements(value: float, backend: str, device: torch.device) -> None:
    if backend == "reference":
        pytest.skip("fp64 throughout")
    grad = torch.full((100_000_000,), value, dtype=torch.float16, device=device)
    exact = grad[0].item() * 1e4
    assert grad_norm([grad]).item() == pytest.approx(exact, rel=1e-6)


def test_norm_does_not_depend_on_threads(backend: str) -> None:
    if backend != "cpu":
        pytest.skip("CPU threads")
    grads = [*testing.common.mixed(), testing.common.randn(300_000)]
    threads = torch.get_num_threads()
    norms = []
    try:
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            norms.append(grad_norm(grads))
    finally:
        torch.set_num_threads(threads)
    assert len({norm.item() for norm in norms}) == 1


# -------------------------------------------------------------------------------------------- clip_grad_norm_
def parameters(device: torch.device, *dtypes: torch.dtype) -> list[Tensor]:
    params = [torch.zeros(50, dtype=dtype, device=device, requires_grad=True) for dtype in dtypes]
    for i, param in enumerate(params):
        param.grad = testing.common.randn(50, dtype=param.dtype, seed=i).to(device)
    return params


def test_clip_takes_one_tensor(device: torch.device) -> None:
    (param,) = parameters(device, torch.float32)
    clip_grad_norm_(param, 1.0)
    assert grad_norm([param.grad]).item() == pytest.approx(1.0, rel=1e-5)


def test_clip_passes_over_missing_gradients(device: torch.device) -> None:
    params = parameters(device, torch.float32, torch.float32)
    params[0].grad = None
    clip_grad_norm_((p for p in params), 1.0)
    assert params[0].grad is None and params[1].grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_clip_without_any_gradient_is_zero() -> None:
    assert clip_grad_norm_([torch.zeros(3, requires_grad=True)], 1.0).item() == 0.0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clip_warns_of_a_generator_that_was_used_before(norm_type: float) -> None:
    """As torch does, at the line of the caller."""
    net = torch.nn.Linear(3, 2)
    params = net.parameters()
    torch.optim.SGD(params, lr=0.1)
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        with pytest.warns(UserWarning, match="`parameters` is an empty generator, no gradient clipping") as caught:
            assert clip(params, 1.0, norm_type).item() == 0.0
        assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_(net.parameters(), 1.0, norm_type)
        clip_grad_norm_([], 1.0, norm_type)


def test_clip_does_not_scale_up(device: torch.device) -> None:
    params = parameters(device, torch.float16)
    before = params[0].grad.clone()
    clip_grad_norm_(params, 1e6)
    assert torch.equal(params[0].grad, before)


def test_clip_of_a_nan_is_nan_like_torchs(device: torch.device) -> None:
    params = parameters(device, torch.float32)
    params[0].grad[3] = math.nan
    assert clip_grad_norm_(params, 1.0).isnan() and bool(params[0].grad.isnan().all())


def test_clip_error_if_nonfinite_writes_nothing(device: torch.device) -> None:
    params = parameters(device, torch.float32)
    params[0].grad[3] = math.inf
    before = params[0].grad.clone()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: the norm of the gradients must be finite, got inf"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert torch.equal(params[0].grad, before)


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_other_norms_are_torchs(norm_type: float, device: torch.device) -> None:
    ours, theirs = parameters(device, torch.float32), parameters(device, torch.float32)
    norm = clip_grad_norm_(ours, 0.5, norm_type)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
    assert torch.equal(ours[0].grad, theirs[0].grad)


def test_clip_leaves_fp64_to_torch(device: torch.device) -> None:
    params = parameters(device, torch.float64)
    assert clip_grad_norm_(params, 0.5).dtype == torch.float64


# -------------------------------------------------------------------------------------------- several devices
@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Lists are split as if every other tensor were elsewhere: compared as devices, `cpu:0` is not `cpu`."""
    if device.type != "cpu":
        pytest.skip("the stand-in for a second device is on the CPU")
    names = itertools.cycle([torch.device("cpu"), torch.device("cpu", 0)])

    def by_device(*arguments: object) -> dict[torch.device, list[Tensor]]:
        groups: dict[torch.device, list[Tensor]] = {}
        for tensor in arguments[-1]:  # type: ignore[attr-defined]
            groups.setdefault(next(names), []).append(tensor)
        return groups

    def on_device(op: Any, device: torch.device, grads: list[Tensor], *scalars: Tensor | None) -> Tensor:
        if len(grads) > 1:
            raise ValueError("they are on two devices")
        return by_itself(op, device, grads, *scalars)

    by_itself = functional._on_device
    monkeypatch.setattr(functional, "_by_device", by_device)
    monkeypatch.setattr(functional, "_on_device", on_device)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_on_any_device_is_found(bad: int, device: torch.device) -> None:
    grads, found_inf = [torch.ones(3), torch.ones(3)], scalar(0.0, device)
    grads[bad][1] = math.inf
    unscale_(grads, inv_scale=scalar(0.5, device), found_inf=found_inf)
    assert found_inf.item() == 1.0 and grads[1 - bad].tolist() == [0.5] * 3


@pytest.mark.usefixtures("two_devices")
def test_devices_do_not_clear_each_others_overflow(device: torch.device) -> None:
    found_inf = scalar(2.0, device)
    unscale_([torch.ones(3), torch.ones(3)], inv_scale=scalar(0.5, device), found_inf=found_inf)
    assert found_inf.item() == 2.0


@pytest.mark.usefixtures("two_devices")
def test_norm_over_devices(device: torch.device) -> None:
    found_inf = scalar(0.0, device)
    norm = grad_norm(
        [torch.full((4,), 1e38), torch.full((5,), 1e38)], inv_scale=scalar(0.5, device), found_inf=found_inf
    )
    assert norm.item() == pytest.approx(1.5e38, rel=1e-6) and found_inf.item() == 0.0
