"""The GPUs of libcuda.cpp for a script that Triton launches kernels in. CPU tensors are their memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from served import served_by

from amp_kernels import triton_kernels

libcuda = ctypes.CDLL("libcuda.so.1")
for name in ("fake_launches", "fake_loads", "fake_launches_of"):
    getattr(libcuda, name).restype = ctypes.c_long


class FakeDriver(CudaDriver):
    """Triton's driver, except for what it asks torch, which sees no GPU."""

    def __init__(self, capabilities: tuple[int, ...]) -> None:
        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher
        self.get_current_device = libcuda.fake_device
        self.set_current_device = libcuda.fake_set_device
        self.get_current_stream = lambda device=None: 0
        self.get_device_capability = lambda device: divmod(capabilities[device], 10)


@contextlib.contextmanager
def gpus(*capabilities: int) -> Iterator[None]:
    """Devices of these capabilities, 90 for 9.0. Kernels are chosen as for the first one, with an H100's 132
    multiprocessors."""
    libcuda.fake_set_devices(len(capabilities), (ctypes.c_int * len(capabilities))(*capabilities))
    libcuda.fake_set_device(0)
    driver.set_active(FakeDriver(capabilities))
    os.environ["AMP_KERNELS_MULTIPROCESSORS"] = "132"
    for module in modules():
        if hasattr(module, "capability_of"):
            module.capability_of = lambda device: divmod(capabilities[0], 10)
    with served_by(triton_kernels):
        yield


@contextlib.contextmanager
def device(index: int) -> Iterator[None]:
    """Makes a device the current one of this thread."""
    before = libcuda.fake_device()
    libcuda.fake_set_device(index)
    try:
        yield
    finally:
        libcuda.fake_set_device(before)


def modules() -> list[Any]:
    package = triton_kernels.__name__
    return [importlib.import_module(f"{package}.{info.name}") for info in pkgutil.iter_modules(triton_kernels.__path__)]


def name_of(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def kernels() -> dict[str, JITFunction]:
    """Those of all modules. A function that kernels call is not launched, and not called so."""
    found = (value for module in modules() for value in vars(module).values() if isinstance(value, JITFunction))
    return {name_of(kernel): kernel for kernel in found if kernel.fn.__name__.endswith("_kernel")}


def forget_kernels() -> None:
    """As in a new process: no kernel is loaded."""
    for kernel in kernels().values():
        kernel.device_caches.clear()
    for module in modules():
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
