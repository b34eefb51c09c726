"""AMP_KERNELS_EXPECT names what this machine must be able to test: absent, it fails and is not skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable

import pytest


def _backend(name: str, device_type: str) -> str | None:
    from amp_kernels._ops import backend_reasons

    return backend_reasons(device_type)[name]


def _interpreter() -> str | None:
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def _cuda_on_cpu() -> str | None:
    from cuda_on_cpu.build import header_folders

    try:
        header_folders()
    except RuntimeError as error:
        return str(error)
    return None


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc") or (home and shutil.which(f"{home}/bin/nvcc"))
    return None if found else "there is no nvcc in CUDA_HOME or on PATH"


WHY_NOT: dict[str, Callable[[], str | None]] = {
    "cpu": lambda: _backend("cpu", "cpu"),
    "cuda": lambda: _backend("cuda", "cuda"),
    "triton": lambda: _backend("triton", "cuda"),
    "triton-interpret": _interpreter,
    "cuda-on-cpu": _cuda_on_cpu,
    "nvcc": _nvcc,
}


def pytest_sessionstart() -> None:
    for name in filter(None, os.environ.get("AMP_KERNELS_EXPECT", "").split(",")):
        if name not in WHY_NOT:
            raise pytest.UsageError(f"AMP_KERNELS_EXPECT must be of {', '.join(WHY_NOT)}, got {name!r}")
        if reason := WHY_NOT[name]():
            raise pytest.UsageError(f"AMP_KERNELS_EXPECT names {name}, but {reason}")
