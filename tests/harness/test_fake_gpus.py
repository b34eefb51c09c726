"""Runs tests in processes of their own that have two CUDA devices, simulated by the emulator.

cuda_on_cpu/torch_device.py makes them. torch's dispatcher takes their tensors to the operators of csrc/ops with class
Cuda. `make test` runs a part of the tests that choose a device, `make nightly` all of them.
"""

from __future__ import annotations

import fake_cuda
import pytest
from conftest import TESTS, WHY_NOT, run_pytest

pytestmark = pytest.mark.skipif(WHY_NOT["fake-gpus"]() is not None, reason=str(WHY_NOT["fake-gpus"]()))

FOLDERS = ("unscale", "update", "grad_scaler", "optim", "int8", "matmul", "clients", "amp", "package")


def run(*arguments: str, **environment: str) -> None:
    run_pytest(*arguments, AMP_KERNELS_FAKE_GPUS="1", **environment)


def test_streams_captures_and_a_second_gpu() -> None:
    run(str(TESTS / "harness" / "fake_gpus_cases.py"))


@pytest.mark.skipif(fake_cuda.why_not() is not None, reason=str(fake_cuda.why_not()))
def test_a_gpu_without_kernels_runs_triton() -> None:
    folder = str(fake_cuda.libcuda())
    paths = {"LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder}
    run(str(TESTS / "harness" / "mixed_gpus_cases.py"), **paths)


def test_a_gpu_without_kernels_and_triton_runs_the_reference() -> None:
    run(str(TESTS / "harness" / "mixed_gpus_cases.py"), AMP_KERNELS_WITHOUT_TRITON="1")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_verify() -> None:
    run("-m", "nightly", str(TESTS / "harness" / "fake_gpus_cases.py"))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", FOLDERS)
def test_all(folder: str) -> None:
    run(str(TESTS / folder))
