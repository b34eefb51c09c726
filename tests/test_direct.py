"""Calls that go from Python straight to the CPU's kernels: the operators' results, or no call at all."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels
from amp_kernels import _backends, _direct, testing
from amp_kernels.testing.int8 import integers

needs_kernels = _backends.backend_reasons("cpu")["cpu"]
pytestmark = pytest.mark.skipif(needs_kernels is not None, reason=str(needs_kernels))
OPS = torch.ops.amp_kernels
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def equal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# -------------------------------------------------------------------------------------------------- the same results
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(
    ("dim", "block_size"), [(None, None), ((-1,), None), ((0,), None), ((0, 1), None), (None, 32), (None, 7)]
)
@pytest.mark.parametrize(("symmetric", "seed", "fake"), [(True, None, False), (False, 5, False), (False, None, True)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (67, 129), (300, 257)])
def test_quantize(
    shape: tuple[int, ...],
    dim: tuple[int, ...] | None,
    block_size: int | None,
    symmetric: bool,
    seed: int | None,
    fake: bool,
    dtype: torch.dtype,
) -> None:
    for x in (testing.randn(*shape, dtype=dtype), testing.randn(*shape[::-1], dtype=dtype).t()):
        ours = _direct.quantize_int8(x, None, None, dim, block_size, symmetric, seed, fake=fake)
        theirs = OPS.quantize_int8(x, None, None, dim, block_size, symmetric, seed, fake)
        assert ours is not None and ours[0].dtype == (dtype if fake else torch.int8)
        assert ours[0].stride() == theirs[0].stride() and ours[1].shape == theirs[1].shape
        assert (ours[2] is None) == symmetric and equal(ours[: 2 + (not symmetric)], theirs[: 2 + (not symmetric)])
        given = ours[1], ours[2]
        again = _direct.quantize_int8(x, *given, dim, block_size, symmetric, seed, fake=fake)
        expected = OPS.quantize_int8(x, *given, dim, block_size, symmetric, seed, fake)[0]
        assert again is not None and torch.equal(again[0], expected) and again[1] is given[0]


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("dim", "block_size"), [(None, None), ((-1,), None), ((0,), None), (None, 32)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantize(dim: Any, block_size: int | None, symmetric: bool, dtype: torch.dtype) -> None:
    values, scale, zero_point = OPS.quantize_int8(
        testing.randn(67, 129), None, None, dim, block_size, symmetric, None, False
    )
    arguments = values, scale, None if symmetric else zero_point, block_size, dtype
    ours = _direct.dequantize_int8(*arguments)
    assert ours is not None and ours.dtype == dtype and torch.equal(ours, OPS.dequantize_int8(*arguments))


def sides(n: int, inner: int, several: bool, seed: int) -> tuple[Tensor, Tensor]:
    shape = [n if several else 1, 1]
    scale = testing.randn(*shape, seed=seed).abs() + 0.01
    zero_point = integers(*shape, seed=seed).int()
    return (scale, zero_point) if inner == 1 else (scale.t(), zero_point.t())


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 33, 64), (3, 5, 0), (14, 32, 16), (67, 129, 257), (33, 8, 9)])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(("shifted", "biased"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("out_dtype", [F16, BF16, F32])
def test_matmul(m: int, n: int, k: int, several: bool, shifted: bool, biased: bool, out_dtype: torch.dtype) -> None:
    (a_scale, a_zero), (b_scale, b_zero) = sides(m, 1, several, 1), sides(n, 0, several, 2)
    zeros = (a_zero, b_zero) if shifted else (None, None)
    rest = a_scale, zeros[0], b_scale, zeros[1], testing.randn(n) if biased else None, out_dtype
    wide = integers(m, 2 * k, seed=3)
    for a in (wide[:, :k], wide[:, k:].contiguous(), wide[:, ::2], integers(k, m, seed=3).t()):
        for b in (integers(n, k, seed=4).t(), integers(k, n, seed=4)):
            ours = _direct.int8_matmul(a, b, *rest)
            assert ours is not None and torch.equal(ours, OPS.int8_matmul(a, b, *rest, None, None))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 2), (1, 33, 64), (14, 32, 16), (67, 129, 257)])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_linear(m: int, n: int, k: int, several: bool, biased: bool, dtype: torch.dtype) -> None:
    weight, scale = integers(n, k, seed=1), sides(n, 1, several, 2)[0]
    bias = testing.randn(n, dtype=dtype) if biased else None
    wide = testing.randn(m, 2 * k, dtype=dtype)
    for x in (wide[:, :k], wide[:, k:].contiguous()):
        ours = _direct.int8_linear(x, weight, scale, bias)
        assert ours is not None and torch.equal(ours, OPS.int8_linear(x, weight, scale, bias))


# ------------------------------------------------------------------------------------------------------- or no call
class Subclass(torch.Tensor):
    pass


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def quantized(x: Tensor, *, fake: bool = False, **options: Any) -> Any:
    arguments = {"dim": (-1,), "block_size": None, "symmetric": True, "seed": None, **options}
    scale, zero_point = arguments.pop("scale", None), arguments.pop("zero_point", None)
    return _direct.quantize_int8(x, scale, zero_point, **arguments, fake=fake)


X, CODES, SCALE = testing.randn(6, 8), integers(6, 8), torch.full((6, 1), 0.5)
LINEAR = X, integers(5, 8), torch.ones(5, 1), None
MATMUL = CODES, integers(5, 8).t(), SCALE, None, torch.ones(1, 5), None, None, F32


def changed(arguments: tuple[Any, ...], **at: Any) -> tuple[Any, ...]:
    return tuple(at.get(f"at_{i}", argument) for i, argument in enumerate(arguments))


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantized(X.to_sparse()),
        lambda: quantized(torch.nested.nested_tensor([X[0], X[1]])),
        lambda: quantized(X.to("meta")),
        lambda: quantized(X[:0]),
        lambda: quantized(X.as_subclass(Subclass)),
        lambda: quantized(torch.complex(X, X).conj().imag),
        lambda: quantized(torch._efficientzerotensor((6, 8))),
        lambda: quantized(X, block_size=True, dim=None),
        lambda: quantized(X, symmetric=1),
        lambda: quantized(X, scale=SCALE.as_subclass(Subclass)),
        lambda: quantized(X.clone().requires_grad_(), fake=True),
        lambda: _direct.dequantize_int8(CODES[:, ::2], SCALE, None, None, F32),  # takes a copy
        lambda: _direct.dequantize_int8(CODES, SCALE, None, None, "float32"),  # type: ignore[arg-type]
        lambda: _direct.dequantize_int8(CODES, SCALE.clone().requires_grad_(), None, None, F32),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_0=CODES[0])),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_0=CODES.as_subclass(Subclass))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_0=torch.nested.nested_tensor([CODES[0], CODES[1]]))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_0=CODES.to_sparse())),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_0=CODES.to("meta"))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=SCALE.as_subclass(Subclass))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_0=torch._neg_view(CODES))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=torch._neg_view(SCALE))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=torch._efficientzerotensor((6, 1)))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=0.5)),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_0=CODES.int())),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_0=CODES[:, :7])),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=SCALE.half())),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=SCALE[:5])),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=SCALE[:, 0])),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=torch.ones(6, 2)[:, :1])),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_2=SCALE.to("meta"))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_3=SCALE)),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_3=torch.ones((), dtype=torch.int32))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_4=torch.ones(5, 1))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_6=torch.ones(5, dtype=F16))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_6=torch.ones(10)[::2])),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_6=torch.ones(1))),
        lambda: _direct.int8_matmul(*changed(MATMUL, at_7=torch.float64)),
        lambda: _direct.int8_linear(*changed(LINEAR, at_0=X.double())),
        lambda: _direct.int8_linear(*changed(LINEAR, at_0=X.t().contiguous().t())),
        lambda: _direct.int8_linear(*changed(LINEAR, at_0=X.clone().requires_grad_())),
        lambda: _direct.int8_linear(*changed(LINEAR, at_1=integers(8, 5).t())),
        lambda: _direct.int8_linear(*changed(LINEAR, at_1=integers(5, 7))),
        lambda: _direct.int8_linear(*changed(LINEAR, at_2=torch.ones(4, 1))),
        lambda: _direct.int8_linear(*changed(LINEAR, at_2=0.5)),
        lambda: _direct.int8_linear(*changed(LINEAR, at_0=torch._neg_view(X))),
        lambda: _direct.int8_linear(*changed(LINEAR, at_3=torch.ones(5, dtype=F16))),
    ],
)
def test_what_is_not_plain_is_left_alone(call: Callable[[], object]) -> None:
    assert call() is None


@pytest.mark.parametrize(
    "watch",
    [Mode, Dispatch, lambda: amp_kernels.use_backend("reference"), lambda: torch.profiler.profile()],
    ids=["function mode", "dispatch mode", "reference", "profiler"],
)
def test_who_watches_is_not_passed_by(watch: Callable[[], Any]) -> None:
    calls = (
        lambda: quantized(X),
        lambda: _direct.dequantize_int8(CODES, SCALE, None, None, F32),
        lambda: _direct.int8_matmul(*MATMUL),
        lambda: _direct.int8_linear(*LINEAR),
    )
    assert all(call() is not None for call in calls)
    with watch():
        assert all(call() is None for call in calls)


def test_no_memory_is_taken_for_products_on_other_devices() -> None:
    huge = torch.empty(2**40, 8, dtype=torch.int8, device="meta")
    assert _direct.int8_matmul(*changed(MATMUL, at_0=huge, at_1=huge.t())) is None
    assert _direct.int8_linear(torch.empty(2**40, 8, device="meta"), huge, SCALE, None) is None


def test_the_profiler_sees_the_operators() -> None:
    with torch.profiler.profile() as profile:
        amp_kernels.quantize_int8(X, dim=-1).dequantize()
    assert {"amp_kernels::quantize_int8", "amp_kernels::dequantize_int8"} <= {
        event.key for event in profile.key_averages()
    }


def test_compiled_functions_look_at_their_arguments() -> None:
    module = _direct.importlib.import_module("amp_kernels._C")
    quantize, dequantize = module.new_quantize_int8, module.new_dequantize_int8
    with pytest.raises(TypeError, match="expected 4 arguments, got 1"):
        module.are_plain(_direct._TORCH)
    with pytest.raises(TypeError, match="expected 7 arguments, got 1"):
        quantize(b"")
    for recipe in (b"abc", bytes(8 * 23), bytes(8 * 25), bytes(8 * 23) + b"\xff" * 8):
        with pytest.raises(ValueError, match=f"{len(recipe)} bytes are no recipe"):
            quantize(_direct._TORCH, recipe, 0, True, X, None, None)
    with pytest.raises(TypeError):
        quantize(_direct._TORCH, bytes(8 * 24), "x", True, X, None, None)
    with pytest.raises(TypeError):
        dequantize(_direct._TORCH, "", CODES, SCALE, None)
    assert quantize(_direct._TORCH, bytes(8 * 24), 0, True, X, None, None) is None  # for a tensor without dimensions
    assert dequantize(_direct._TORCH, bytes(8 * 21), CODES, SCALE, None) is None
    assert dequantize(_direct._TORCH, bytes(8 * 21), torch.tensor(1, dtype=torch.int8), None, None) is None
    for first in (None, 0.5, X.double().to_sparse()):
        assert module.are_plain(_direct._TORCH, first, None, None) is False
    with pytest.raises(TypeError, match="expected 9 arguments, got 2"):
        module.new_int8_matmul(None, None)
    assert module.new_int8_linear(_direct._TORCH, *LINEAR) is not None
    for torchs in (None, (), _direct._TORCH[:-1], (None, *_direct._TORCH[1:])):  # one that describes no tensors
        assert module.new_int8_linear(torchs, *LINEAR) is None
    assert module.new_int8_linear((*_direct._TORCH[:-2], [], ()), *LINEAR) is None
    for bad in (object(), lambda: 1 / 0, lambda: torch.ones(2)):  # none says yes or no
        assert module.new_int8_linear((*_direct._TORCH[:-1], (bad,)), *LINEAR) is None


@pytest.mark.parametrize("default", [F32, torch.float64, F16])
def test_results_have_the_dtype_asked_for_whatever_the_default_is(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        for dtype in (F16, BF16, F32):
            product = _direct.int8_matmul(*changed(MATMUL, at_7=dtype))
            assert product is not None and product.dtype == dtype
            bias = testing.randn(5, dtype=dtype)
            linear = _direct.int8_linear(X.to(dtype), *LINEAR[1:3], bias)
            assert linear is not None and linear.dtype == dtype
    finally:
        torch.set_default_dtype(F32)


def test_products_whose_result_torch_does_not_make_are_left_to_the_operators() -> None:
    module = _direct.importlib.import_module("amp_kernels._C")
    for steal in (None, lambda _: 1 / 0, lambda _: [], lambda _: ()):
        torchs = (*_direct._TORCH[:4], steal, *_direct._TORCH[5:])
        assert module.new_int8_linear(torchs, *LINEAR) is None
        assert module.new_int8_matmul(torchs, *MATMUL) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_direct, "_TORCH", torchs)
            assert quantized(X) is None and _direct.dequantize_int8(CODES, SCALE, None, None, F32) is None


def test_what_torch_says_of_a_result_that_cannot_be_made_is_raised() -> None:
    scale = torch.ones(1, 1)
    wide = torch.empty(1, dtype=torch.int8).expand(2**31, 1)
    assert _direct.int8_matmul(wide, wide.t(), scale, None, scale, None, None, F32) is None
    with pytest.raises(RuntimeError, match="overflow"):
        amp_kernels.int8_matmul(amp_kernels.Int8Tensor(wide, scale), amp_kernels.Int8Tensor(wide.t(), scale))


def test_results_are_tensors_as_others() -> None:
    for inference in (False, True):
        with torch.inference_mode(inference):
            decoded = _direct.dequantize_int8(CODES, SCALE, None, None, F32)
            quantized_x = quantized(X, symmetric=False)
            for result in (_direct.int8_matmul(*MATMUL), _direct.int8_linear(*LINEAR), decoded, *quantized_x):
                assert type(result) is Tensor and result.is_inference() == inference
                assert result.is_leaf and not result.requires_grad and result.untyped_storage().resizable()
                assert result.is_contiguous() and result.storage_offset() == 0
    assert sys.getrefcount(_direct.int8_linear(*LINEAR)) == sys.getrefcount(torch.empty(1))


def test_results_are_released() -> None:
    wide = integers(2048, 64)
    operands = wide, wide.t(), torch.ones(1, 1), None, torch.ones(1, 1), None, None, F32
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    x, one = torch.zeros(2048, 2048), torch.ones(1, 1)
    for _ in range(64):
        assert _direct.int8_matmul(*operands) is not None  # 16 MiB
        codes, *_ = quantized(x)  # 4 MiB
        assert _direct.dequantize_int8(codes, one, None, None, F32) is not None  # 16 MiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024
