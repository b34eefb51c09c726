"""What launches kernels, as amp_kernels.triton_kernels does: on CPU tensors, the CUDA kernels on the emulator."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from arena import Arena
from nvcc import shortened
from served import served_by
from torch import Tensor

from amp_kernels.ops.matmul import ACTIVATIONS, new_result
from amp_kernels.ops.table import RECORD, cut, gradient_table, is_dense
from amp_kernels.testing import Case, Result

from .build import HERE, ROOT, build

ORDERS = ("forwards", "backwards", "shuffled")  # enum Order of emulator.h
_POINTER, _INT64, _INT, _BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_bool
_TABLE = (_POINTER, _INT64, _POINTER, _INT64, _INT64)
_SIGNATURES = {
    "unscale_table": (*_TABLE, _POINTER, _BOOL, _BOOL, _BOOL, _POINTER, _POINTER, _POINTER, _POINTER, _INT),
    "count_exponents": (*_TABLE, *[_POINTER] * 5),
    "send": (_POINTER, _POINTER, _INT64),
    "update_table": (
        ctypes.c_char_p,
        *_TABLE,
        *[_POINTER] * 3,
        _INT,
        _BOOL,
        *[_INT] * 3,
        *[_POINTER] * 3,
        ctypes.c_float,
    ),
    **dict.fromkeys(
        (
            "quantize_int8",
            "dequantize_int8",
            "straight_through_int8",
            "int8_matmul",
            "int8_conv2d",
            "int8_linear",
            "matmul",
            "copy_pad",
        ),
        (_POINTER,),
    ),
}
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum Dtype of csrc/table.h


class _Layout(ctypes.Structure):
    _fields_ = (("numbers", _INT64 * 4),)


def _struct(name: str, **fields: object) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields.items())})


# The structs of csrc/int8.h.
_Quantize = _struct(
    "Quantize", x=_POINTER, out=_POINTER, scale=_POINTER, zero_point=_POINTER, layout=_Layout, dtype=_INT,
    fake=_BOOL, is_static=_BOOL, stochastic=_BOOL, seed=ctypes.c_uint64,
)  # fmt: skip
_Dequantize = _struct(
    "Dequantize", values=_POINTER, scale=_POINTER, zero_point=_POINTER, out=_POINTER, layout=_Layout, dtype=_INT
)
_StraightThrough = _struct(
    "StraightThrough", grad=_POINTER, x=_POINTER, scale=_POINTER, zero_point=_POINTER, out=_POINTER,
    layout=_Layout, dtype=_INT,
)  # fmt: skip
_Int8Matmul = _struct(
    "Int8Matmul", m=_INT64, n=_INT64, k=_INT64, a=_POINTER, a_strides=_INT64 * 2, b=_POINTER,
    b_strides=_INT64 * 2, a_scale=_POINTER, a_zero_point=_POINTER, a_step=_INT64, b_scale=_POINTER,
    b_zero_point=_POINTER, b_step=_INT64, bias=_POINTER, out=_POINTER, dtype=_INT, out_scale=_POINTER,
    out_zero_point=_POINTER,
)  # fmt: skip
_Window = _struct(
    "Window", size=_INT64 * 2, channels=_INT64, out=_INT64 * 2, taps=_INT64 * 2, stride=_INT64 * 2,
    padding=_INT64 * 2, dilation=_INT64 * 2,
)  # fmt: skip
_Int8Conv2d = _struct("Int8Conv2d", rows=_Int8Matmul, window=_Window)
_Int8Linear = _struct(
    "Int8Linear", m=_INT64, n=_INT64, k=_INT64, x=_POINTER, x_stride=_INT64, weight=_POINTER,
    weight_stride=_INT64, scale=_POINTER, scale_step=_INT64, bias=_POINTER, out=_POINTER, dtype=_INT,
)  # fmt: skip

# The structs of csrc/matmul.h.
_Matmul = _struct(
    "Matmul", batch=_INT64, m=_INT64, n=_INT64, k=_INT64, a=_POINTER, a_strides=_INT64 * 3, a_bytes=_INT64,
    b=_POINTER, b_strides=_INT64 * 3, b_bytes=_INT64, input=_POINTER, input_strides=_INT64 * 3, out=_POINTER,
    out_strides=_INT64 * 2, pre=_POINTER, alpha=ctypes.c_float, beta=ctypes.c_float, activation=_INT, dtype=_INT,
    out_dtype=_INT,
)  # fmt: skip
_CopyPad = _struct(
    "CopyPad", rows=_INT64, columns=_INT64, x=_POINTER, x_strides=_INT64 * 2, pre=_POINTER, pre_strides=_INT64 * 2,
    out=_POINTER, pitch=_INT64, bias_grad=_POINTER, activation=_INT, dtype=_INT,
)  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """The CUDA kernels, compiled on first use."""
    lib = build("kernels", [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), *sorted(HERE.glob("driver*.cpp"))])
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = arguments
        function.restype = ctypes.c_char_p
    lib.set_capturing.argtypes = (_BOOL,)
    lib.reads_of.restype = ctypes.c_size_t
    lib.load_unscale.restype = lib.load_exponents.restype = lib.load_update.restype = _INT64
    lib.chunk_size_of.restype, lib.chunk_size_of.argtypes = _INT64, (_INT64,) * 3
    lib.load_update.argtypes = (ctypes.c_char_p, _INT, _BOOL, _INT, _INT, _INT)
    return lib


@contextlib.contextmanager
def scheduled(order: str, seed: int = 0) -> Iterator[None]:
    """Lets threads and blocks run in this order inside the ``with`` block."""
    library().set_order(ORDERS.index(order), seed)
    try:
        yield
    finally:
        library().set_order(0, 0)


@contextlib.contextmanager
def compute_capability(value: int, compiled_for: int | None = None) -> Iterator[None]:
    """Makes the launchers choose as on a GPU of ``sm_<value>``, which runs code that was compiled for that, or for an
    older one: PTX in the binary."""
    library().set_device(value, compiled_for or value)
    try:
        yield
    finally:
        library().set_device(90, 90)


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Whatever takes CPU tensors to kernels takes them to those here inside the ``with`` block."""
    with served_by(sys.modules[__name__]):
        yield


def run(case: Case) -> list[Result]:
    """The comparisons of a shared case, by the kernels here."""
    with serving(), scheduled("shuffled"):
        return list(case.body(torch.device("cpu")))


class Launch(NamedTuple):
    kernel: str
    threads: int
    shared_bytes: int


def kernels() -> dict[int, str]:
    """Every kernel in the library by its address."""
    return kernels_of(library(), "set_order")


@functools.cache
def kernels_of(lib: ctypes.CDLL, function: str) -> dict[int, str]:
    """Every kernel of a library that has this C function, by its address. Most kernels are in anonymous namespaces, so
    that only nm knows them."""
    says = subprocess.run(["nm", "--demangle", lib._name], capture_output=True, text=True, check=True).stdout
    symbols = {int(line[:16], 16): line[19:] for line in says.splitlines() if line[:16].strip()}
    known = next(address for address, name in symbols.items() if name == function)
    shift = (ctypes.cast(getattr(lib, function), _POINTER).value or 0) - known
    names = {address + shift: shortened(name) for address, name in symbols.items() if "_kernel" in name}
    return {address: name for address, name in names.items() if re.fullmatch(r"\w+_kernel(<.*>)?", name)}


def launches() -> set[Launch]:
    """Those of this process, or since they were forgotten."""
    found: list[tuple[int, int, int]] = []
    visit = ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_uint, ctypes.c_size_t)
    library().visit_launched(visit(lambda *launch: found.append(launch)))
    return {Launch(kernels()[address], *rest) for address, *rest in found}


def launched() -> set[str]:
    """The kernels of those."""
    return {launch.kernel for launch in launches()}


@contextlib.contextmanager
def planning(*multiprocessors: int) -> Iterator[dict[int, set[Launch]]]:
    """Inside the ``with`` block operators launch nothing and leave their results as they were allocated. What they
    would have launched on GPUs with so many multiprocessors is in the dict."""
    planned: dict[int, set[Launch]] = {count: set() for count in multiprocessors}

    def plan(name: str, *arguments: object) -> None:
        for count, found in planned.items():
            library().set_multiprocessors(count)
            library().forget_launched()
            if message := getattr(library(), name)(*arguments):
                raise RuntimeError(message.decode())
            found |= launches()

    library().set_planning(True)
    try:
        with serving(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "_call", plan)
            yield planned
    finally:
        library().set_planning(False)
        library().set_multiprocessors(3)
        library().forget_launched()


def loaded_in_a_capture(plan: Callable[[], object], captured: Callable[[], object]) -> set[str]:
    """The kernels that `captured` loads, run in a process that has loaded nothing but what `plan` did before."""
    library().forget_loaded()
    plan()
    library().set_capturing(True)
    try:
        captured()
    finally:
        library().set_capturing(False)
    return _visited("visit_loaded_late")


def reads_of(tensor: Tensor, launch: Callable[[], object]) -> dict[int, int]:
    """How many reads of each number of bytes `launch` makes of what `tensor` has."""
    begin = tensor.data_ptr()
    library().watch_reads(ctypes.c_size_t(begin), ctypes.c_size_t(begin + tensor.numel() * tensor.element_size()))
    launch()
    return {size: count for size in (2, 4, 8, 16) if (count := library().reads_of(ctypes.c_size_t(size)))}


def _visited(visit: str) -> set[str]:
    addresses: list[int] = []
    getattr(library(), visit)(ctypes.CFUNCTYPE(None, _POINTER)(addresses.append))
    return {kernels()[address] for address in addresses}


def _unscale_table_(
    table: Tensor, chunks: Tensor, chunk_size: int, scale: Tensor | None, divide: bool, write: bool,
    clear: bool, partials: Tensor, found_inf: Tensor, norm: Tensor, record: Tensor, squares: int = 0,
) -> None:  # fmt: skip
    results = [x.data_ptr() for x in (partials, found_inf, norm, record)]
    place = _table(table, chunks, chunk_size)
    _call("unscale_table", *place, _address(scale), divide, write, clear, *results, squares)


def _count_exponents_(
    table: Tensor, chunks: Tensor, chunk_size: int, partials: Tensor, record: Tensor, counts: Tensor, largest: Tensor,
    squares: Tensor,
) -> None:  # fmt: skip
    arrays = [x.data_ptr() for x in (partials, record, counts, largest, squares)]
    _call("count_exponents", *_table(table, chunks, chunk_size), *arrays)


def launch_exponents(tensors: Sequence[Tensor], counts: Tensor, largest: Tensor, squares: Tensor) -> None:
    """As csrc/ops/exponents.cpp."""
    if not tensors:
        return
    dense = [t if is_dense(t) else t.contiguous() for t in tensors]
    chunks = cut([t.numel() for t in dense], blocks=_load_exponents(counts))
    partials = torch.empty(chunks.entries.shape[0], dtype=torch.float64)
    record = torch.zeros(RECORD, dtype=torch.int64)
    _count_exponents_(gradient_table(dense), chunks.entries, chunks.size, partials, record, counts, largest, squares)


def _send_(host: Tensor, to: Tensor) -> None:
    _call("send", host.data_ptr(), to.data_ptr(), host.numel())


def _update_table_(
    family: str, table: Tensor, chunks: Tensor, chunk_size: int, record: Tensor, hyper: Tensor, lr: Tensor,
    param_dtype: int, split: bool, grad_dtype: int, states: int, state_dtype: int, grad_scale: Tensor | None,
    found_inf: Tensor | None, grad_norm: Tensor | None, max_norm: float,
) -> None:  # fmt: skip
    arrays = [_address(x) for x in (record, hyper, lr)]
    scalars = [_address(x) for x in (grad_scale, found_inf, grad_norm)]
    form = (param_dtype, split, grad_dtype, states, state_dtype)
    place = _table(table, chunks, chunk_size)
    _call("update_table", family.encode(), *place, *arrays, *form, *scalars, max_norm)


def _load_unscale(beside: Tensor) -> int:
    return int(library().load_unscale())


def _load_exponents(beside: Tensor) -> int:
    return int(library().load_exponents())


def _load_update(
    beside: Tensor, family: str, param_dtype: int, split: bool, grad_dtype: int, states: int, state_dtype: int
) -> int:
    return int(library().load_update(family.encode(), param_dtype, split, grad_dtype, states, state_dtype))


def _quantize_int8_(
    x: Tensor, out: Tensor, scale: Tensor, zero_point: Tensor | None, layout: Sequence[int], is_static: bool,
    stochastic: bool, seed: int,
) -> None:  # fmt: skip
    pointers = [_address(t) for t in (x, out, scale, zero_point)]
    fake = out.dtype != torch.int8
    flags = (_DTYPES[x.dtype], fake, is_static, stochastic, seed % 2**64)
    _call_with("quantize_int8", _Quantize(*pointers, _layout(layout), *flags))


def _dequantize_int8_(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, out: Tensor, layout: Sequence[int]
) -> None:
    pointers = [_address(t) for t in (values, scale, zero_point, out)]
    _call_with("dequantize_int8", _Dequantize(*pointers, _layout(layout), _DTYPES[out.dtype]))


def _straight_through_int8_(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, out: Tensor, layout: Sequence[int]
) -> None:
    pointers = [_address(t) for t in (grad, x, scale, zero_point, out)]
    _call_with("straight_through_int8", _StraightThrough(*pointers, _layout(layout), _DTYPES[out.dtype]))


def in_chunks(rows: Tensor) -> Tensor:
    """What csrc/ops/int8.cpp hands to kernels in the place of [rows, K]: a copy with zeros behind K."""
    return F.pad(rows, (0, -rows.shape[1] % 16)).contiguous()[:, : rows.shape[1]]


def _int8_matmul_(a: Tensor, b: Tensor, *rest: Tensor | None) -> None:
    int8_matmul_of_chunks(in_chunks(a), in_chunks(b.t()), *rest)


def int8_matmul_of_chunks(
    a: Tensor, b: Tensor, a_scale: Tensor, a_zero_point: Tensor | None, b_scale: Tensor,
    b_zero_point: Tensor | None, bias: Tensor | None, out: Tensor, out_scale: Tensor | None,
    out_zero_point: Tensor | None,
) -> None:  # fmt: skip
    """Of a [M, K] and b [N, K]."""
    matmul = _Int8Matmul(
        *out.shape, a.shape[1], _address(a), a.stride(), _address(b), b.t().stride(),
        _address(a_scale), _address(a_zero_point), a_scale.numel() != 1,
        _address(b_scale), _address(b_zero_point), b_scale.numel() != 1,
        _address(bias), _address(out), _DTYPES.get(out.dtype, 0), _address(out_scale), _address(out_zero_point),
    )  # fmt: skip
    _call_with("int8_matmul", matmul)


def _int8_conv2d_(x: Tensor, weight: Tensor, *rest: Any) -> None:
    int8_conv2d_of_chunks(*(F.pad(codes, (0, -codes.shape[3] % 16)) for codes in (x, weight)), *rest)


def int8_conv2d_of_chunks(
    x: Tensor, weight: Tensor, x_scale: Tensor, x_zero_point: Tensor | None, weight_scale: Tensor,
    bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], out: Tensor,
    out_scale: Tensor | None, out_zero_point: Tensor | None,
) -> None:  # fmt: skip
    """Of x [B, H, W, C] and weight [N, kernel height, kernel width, C], where C is a multiple of 16."""
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[3] % 16 == 0
    k = weight[0].numel()
    rows = _Int8Matmul(
        out.shape[:3].numel(), out.shape[3], k, _address(x), (x.shape[3], 1), _address(weight), (1, k),
        _address(x_scale), _address(x_zero_point), x_scale.numel() != 1,
        _address(weight_scale), None, weight_scale.numel() != 1,
        _address(bias), _address(out), _DTYPES.get(out.dtype, 0), _address(out_scale), _address(out_zero_point),
    )  # fmt: skip
    window = _Window(
        x.shape[1:3], x.shape[3], out.shape[1:3], weight.shape[1:3], *map(tuple, (stride, padding, dilation))
    )
    _call_with("int8_conv2d", _Int8Conv2d(rows, window))


def _int8_linear_(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if x.dtype is torch.float32:  # csrc/ops/int8.cpp leaves it to torch
        torch.ops.aten.linear.out(x, weight * scale.view(-1, 1), bias, out=out)
    else:
        int8_linear_of_chunks(in_chunks(x), in_chunks(weight), scale, bias, out)


def int8_linear_of_chunks(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    linear = _Int8Linear(
        *out.shape, x.shape[1], _address(x), x.stride(0), _address(weight), weight.stride(0), _address(scale),
        scale.numel() != 1, _address(bias), _address(out), _DTYPES[x.dtype],
    )  # fmt: skip
    _call_with("int8_linear", linear)


def _matmul_(
    a: Tensor, b: Tensor, input: Tensor | None, out: Tensor, pre: Tensor | None, alpha: float, beta: float,
    activation: int,
) -> None:  # fmt: skip
    assert out.stride(2) == 1 and (pre is None or pre.stride() == out.stride())
    matmul = _Matmul(
        *out.shape, a.shape[2], _address(a), a.stride(), _bytes_behind(a), _address(b), b.stride(), _bytes_behind(b),
        _address(input), (0, 0, 0) if input is None else input.stride(), _address(out), out.stride()[:2],
        _address(pre), alpha, beta, activation, _DTYPES[a.dtype], _DTYPES[out.dtype],
    )  # fmt: skip
    _call_with("matmul", matmul)


def launch_matmul(
    a: Tensor, b: Tensor, input: Tensor | None, alpha: float, beta: float, activation: str | None,
    out_dtype: torch.dtype, pads_rows: bool, needs_pre: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As csrc/ops/matmul.cpp."""
    shape = (*a.shape[:-1], b.shape[-1])
    out, pre = (new_result(a, size, out_dtype, pads_rows=pads_rows) for size in (shape, shape if needs_pre else (0,)))
    if out.numel() > 0:
        tensors = (a, b, input, out, pre if needs_pre else None)
        batches = (t if t is None or t.dim() == 3 else t.unsqueeze(0) for t in tensors)
        _matmul_(*batches, alpha, beta, ACTIVATIONS.index(activation))
    return out, pre


def _copy_pad_(x: Tensor, pre: Tensor | None, out: Tensor, bias_grad: Tensor | None, activation: int) -> None:
    assert out.is_contiguous()
    copy_pad = _CopyPad(
        *x.shape, _address(x), x.stride(), _address(pre), (0, 0) if pre is None else pre.stride(),
        _address(out), out.shape[1], _address(bias_grad), activation, _DTYPES[x.dtype],
    )  # fmt: skip
    _call_with("copy_pad", copy_pad)


# Operators that C++ and the emulator launch on a GPU, but not Triton.
LAUNCHES: dict[Any, Callable[..., Any]] = {
    torch.ops.amp_kernels.count_exponents_.default: launch_exponents,
    torch.ops.amp_kernels.matmul.default: launch_matmul,
}


def _layout(numbers: Sequence[int]) -> _Layout:
    return _Layout((_INT64 * 4)(*numbers))


def _table(table: Tensor, chunks: Tensor, chunk_size: int) -> tuple[int, int, int, int, int]:
    assert table.is_contiguous() and chunks.is_contiguous()
    return table.data_ptr(), table.shape[1], chunks.data_ptr(), chunks.shape[0], chunk_size


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _bytes_behind(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()


def _call(name: str, *arguments: object) -> None:
    guards = [guard for arena in Arena.alive for guard in arena.guards]
    edges = [edge for guard in guards for edge in guard]
    library().forbid_reads((ctypes.c_uint64 * len(edges))(*edges), ctypes.c_size_t(len(guards)))
    message = getattr(library(), name)(*arguments)
    if message is not None:
        raise RuntimeError(message.decode())


def _call_with(name: str, struct: ctypes.Structure) -> None:
    _call(name, ctypes.addressof(struct))
