"""Runs tests in processes of their own that have two CUDA devices, simulated by the emulator.

cuda_on_cpu/torch_device.py makes them. torch's dispatcher takes their tensors to the operators of csrc/ops with class
Cuda. `make test-slow` runs a part of the tests that choose a device, `make nightly` all of them.
"""

from __future__ import annotations

from pathlib import Path

import fake_cuda
import pytest
from conftest import TESTS, WHY_NOT, run_pytest

pytestmark = [
    pytest.mark.skipif(WHY_NOT["fake-gpus"]() is not None, reason=str(WHY_NOT["fake-gpus"]())),
    pytest.mark.timeout(0),  # each test in such a process has a limit of its own
]

FOLDERS = (
    "unscale",
    "exponents",
    "update",
    "grad_scaler",
    "optim",
    "int8",
    "matmul",
    "clients",
    "amp",
    "package",
    "precision",
)


# What `make test-slow` has time for: each operator once for each class of dtypes and of layouts, and what notices the
# planted faults of csrc/ops (tests/faults/operator_*). The expressions are for pytest -k.
PART = {
    "unscale/test_unscale.py": "not bf16 and not 100_million",
    "exponents/test_exponents.py": "(test_case and fp16) or layouts or wrong or added or nothing",
    "update/test_updates.py": """(mixed or fp32 or fp16-split or fp16-sliced or empty_lists or tensor_lr)
        and not grads_with and not negative and not denormals""",
    "update/test_adam.py": "turned_off",
    "update/test_averages.py": "follows_masters or skipped_step or under_scalers or layouts or no_step_trains",
    "int8/test_int8.py": """((int8-fp32 or int8_matmul-fp16 or int8_matmul-int8 or 17x33x65 or int8_linear-bf16
        or int8_conv2d-fp32 or int8_conv2d-int8)
        and not long_rows and not many_rows and not stochastic-)
        or (int8-fp16 and (transposed or channels_last or sliced or misaligned or empty or static_tensor))
        or gaps or keep_the_layout or another_order or behind_a_storage""",
    "matmul/test_matmul.py": """(matmul-fp16-row or matmul-fp16-padded or batched or aligned or medium_in_splits
        or matmul-fp16-0x or addmm or linear-fp16 or their_reference or behind_a_storage) and not 65x130""",
    "matmul/test_nn_linear.py": "shapes_of_x or leading_dimension",
    "optim/test_optim.py": "one_dtype or max_grad_norm or another_dtype or test_tensor_lr",
    "optim/test_optim_layouts.py": "test_layouts and sgd",
    "optim/test_optim_parameters.py": "inference",
    "grad_scaler/test_grad_scaler.py": "(overflows or same_bits) and not bf16",
    "clients/test_states.py": "sgd_ and (overlap_raise or not_overlap)",
    "amp/test_amp.py": "handwritten and SGD",
    "package/test_saved.py": "goes_on",
    "precision/test_precision.py": "counts_are_those_of_torch or step_with_inf or training_is_the_same",
}


def run(*arguments: str, **environment: str) -> None:
    run_pytest(*arguments, **{"AMP_KERNELS_FAKE_GPUS": "1", **environment})


def test_streams_captures_and_a_second_gpu() -> None:
    run(str(TESTS / "harness" / "fake_gpus_cases.py"))


@pytest.mark.skipif(fake_cuda.why_not() is not None, reason=str(fake_cuda.why_not()))
def test_a_gpu_without_kernels_runs_triton() -> None:
    folder = str(fake_cuda.libcuda())
    paths = {"LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder}
    run(str(TESTS / "harness" / "mixed_gpus_cases.py"), **paths)


def test_a_gpu_without_kernels_and_triton_runs_the_reference() -> None:
    run(str(TESTS / "harness" / "mixed_gpus_cases.py"), AMP_KERNELS_FAKE_GPUS="without-triton")


@pytest.mark.slow
def test_each_operator_and_layout() -> None:
    words = " or ".join(f"({Path(file).name} and ({chosen}))" for file, chosen in PART.items())
    run(*(str(TESTS / file) for file in PART), "-k", " ".join(words.split()))


@pytest.mark.nightly
def test_verify() -> None:
    run("-m", "nightly", str(TESTS / "harness" / "fake_gpus_cases.py"))


@pytest.mark.nightly
@pytest.mark.parametrize("folder", FOLDERS)
def test_all(folder: str) -> None:
    run(str(TESTS / folder))
