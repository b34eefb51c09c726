"""The table ops (schemas: amp_kernels/_ops.py) on CPU tensors, by the CUDA kernels on the emulator."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from torch import Tensor

from .build import HERE, ROOT, build

ORDERS = ("forwards", "backwards", "shuffled")  # enum Order of emulator.h
_POINTER, _INT64, _INT, _BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_bool
_TABLE = (_POINTER, _INT64, _POINTER, _INT64, _INT64)
_UPDATE = (*_TABLE, _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, ctypes.c_float)
_SIGNATURES = {
    "unscale_table": (*_TABLE, _POINTER, _BOOL, _BOOL, _BOOL, _POINTER, _POINTER, _POINTER, _POINTER),
    "sgd_table": _UPDATE,
    "rmsprop_table": _UPDATE,
}


@functools.cache
def library() -> ctypes.CDLL:
    """The CUDA kernels, compiled on first use."""
    lib = build("kernels", [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), HERE / "driver.cpp"])
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = arguments
        function.restype = ctypes.c_char_p
    return lib


@contextlib.contextmanager
def scheduled(order: str, seed: int = 0) -> Iterator[None]:
    """Lets threads and blocks run in this order inside the ``with`` block."""
    library().set_order(ORDERS.index(order), seed)
    try:
        yield
    finally:
        library().set_order(0, 0)


def _unscale_table_(
    table: Tensor, chunks: Tensor, chunk_size: int, scale: Tensor | None, divide: bool, write: bool,
    clear: bool, partials: Tensor, found_inf: Tensor, norm: Tensor, record: Tensor,
) -> None:  # fmt: skip
    results = [x.data_ptr() for x in (partials, found_inf, norm, record)]
    _call("unscale_table", *_table(table, chunks, chunk_size), _address(scale), divide, write, clear, *results)


def _sgd_table_(*arguments: object) -> None:
    _update("sgd_table", *arguments)  # type: ignore[arg-type]


def _rmsprop_table_(*arguments: object) -> None:
    _update("rmsprop_table", *arguments)  # type: ignore[arg-type]


def _update(
    name: str, table: Tensor, chunks: Tensor, chunk_size: int, steps: Tensor, hyper: Tensor, lr: Tensor,
    param_dtype: int, grad_dtype: int, grad_scale: Tensor | None, found_inf: Tensor | None,
    grad_norm: Tensor | None, max_norm: float,
) -> None:  # fmt: skip
    arrays = [x.data_ptr() for x in (steps, hyper, lr)]
    scalars = [_address(x) for x in (grad_scale, found_inf, grad_norm)]
    _call(name, *_table(table, chunks, chunk_size), *arrays, param_dtype, grad_dtype, *scalars, max_norm)


def _table(table: Tensor, chunks: Tensor, chunk_size: int) -> tuple[int, int, int, int, int]:
    assert table.is_contiguous() and chunks.is_contiguous()
    return table.data_ptr(), table.shape[1], chunks.data_ptr(), chunks.shape[0], chunk_size


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _call(name: str, *arguments: object) -> None:
    message = getattr(library(), name)(*arguments)
    if message is not None:
        raise RuntimeError(message.decode())
