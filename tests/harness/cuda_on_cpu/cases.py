"""The small kernels of cases.cu, on which the emulator itself is tried."""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

from .backend import ORDERS
from .build import HERE, build


@functools.cache
def library() -> ctypes.CDLL:
    """Compiled on first use."""
    lib = build("cases", [HERE / "cases.cu"])
    lib.run_case.restype = ctypes.c_char_p
    lib.run_case.argtypes = [ctypes.c_char_p, ctypes.c_int, *[ctypes.c_uint] * 3, ctypes.c_size_t]
    lib.run_case.argtypes += [ctypes.c_void_p] * 2
    return lib


def run(
    name: str, order: str, x: Tensor, out: Tensor, *, grid: int = 1, block: int = 256, shared: int | None = None
) -> Tensor:
    """`out`, once the kernel has written it."""
    shape = (grid, block, block * 8 if shared is None else shared)
    message = library().run_case(name.encode(), ORDERS.index(order), 1, *shape, x.data_ptr(), out.data_ptr())
    if message is not None:
        raise RuntimeError(message.decode())
    return out
