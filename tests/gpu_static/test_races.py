"""No two accesses of a kernel race, by the rules of the PTX memory model (cuda_on_cpu/races.h).

On the emulator a missing barrier changes results in some order of threads at best, and a missing fence never does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from cuda_on_cpu import backend
from cuda_on_cpu.build import missing_headers
from cuda_on_cpu.races import checked
from products import int8_conv2d, int8_linear, int8_matmul, matmul

from amp_kernels import testing
from amp_kernels.ops.table import LEAST_LEAN
from amp_kernels.optim import FusedAdam

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))


def lean_states() -> None:
    """Several chunks of full groups, a group that is not full, and gradients that are not aligned."""
    params = [torch.nn.Parameter(torch.ones(numel)) for numel in (9_001, LEAST_LEAN)]
    optimizer = FusedAdam(params, state_dtype=torch.int8)
    with backend.serving():
        for _ in range(2):
            for p in params:
                p.grad = torch.ones(p.numel() + 1)[1:]
            optimizer.step()


# Eight steps of k or more, so that each stage of shared memory is filled again.
PRODUCTS: dict[str, Callable[[], None]] = {
    "matmul 64x64": lambda: matmul(64, 64, 512, batches=1),
    "matmul 64x64, transposed": lambda: matmul(64, 64, 512, a_along=False, b_along=False, batches=1),
    "matmul 128x128": lambda: matmul(128, 128, 512),
    "matmul 128x128, transposed": lambda: matmul(128, 128, 512, a_along=False, b_along=False),
    "matmul 128x256": lambda: matmul(128, 256, 512),
    "matmul by element": lambda: matmul(65, 65, 511, batches=1),
    "matmul few rows": lambda: matmul(16, 64, 2048, batches=1),
    "matmul few rows, b along n": lambda: matmul(16, 64, 2048, b_along=False, batches=1),
    "int8_matmul few rows": lambda: int8_matmul(16, 64, 2048),
    "int8_matmul 33 rows": lambda: int8_matmul(33, 40, 2048),
    "int8_matmul 64x64": lambda: int8_matmul(65, 64, 1024),
    "int8_matmul 128x64": lambda: int8_matmul(384, 64, 512),
    "int8_matmul 128x128": lambda: int8_matmul(384, 128, 512),
    "int8_matmul 128x256": lambda: int8_matmul(384, 256, 512),
    "int8_matmul zero points": lambda: int8_matmul(384, 128, 512, zero_points=True),
    "int8_conv2d 64x64": lambda: int8_conv2d((1, 8, 8), 64, 64),
    "int8_conv2d 64x64, many taps": lambda: int8_conv2d((1, 8, 8), 16, 64, kernel=7),
    "int8_conv2d 128x64": lambda: int8_conv2d((3, 8, 16), 64, 64),
    "int8_conv2d 128x128": lambda: int8_conv2d((3, 8, 16), 64, 128),
    "int8_conv2d 128x256": lambda: int8_conv2d((3, 8, 16), 64, 256),
    "int8_linear few rows": lambda: int8_linear(16, 64, 2048),
    "int8_linear 64x64": lambda: int8_linear(128, 64, 1024),
    "int8_linear 128x128": lambda: int8_linear(384, 128, 512),
    "lean states": lean_states,
}
# Shared cases with more chunks, rows or columns than a block has, for each way through the other kernels.
CASES = {
    "unscale_": ("fp16", ["sizes"]),
    "grad_norm": ("mixed", ["sizes"]),
    "count_exponents_": ("mixed", ["sizes"]),
    "sgd_": ("fp16", ["sizes", "split_contiguous"]),
    "rmsprop_": ("fp16", ["contiguous"]),
    "adam_": ("fp16", ["contiguous"]),
    "quantize_int8": ("fp16", ["rows_of_5", "rows_of_32769", "contiguous", "channels_last", "stochastic"]),
    "dequantize_int8": ("fp16", ["every_other"]),
    "fake_quantize_int8": ("fp16", ["channels_last", "denormals"]),
    "matmul": ("fp16", ["3x5x4095"]),
    "linear": ("fp16", ["gelu_tanh_every_other_padded", "gelu_1x9x7", "relu_65x130x127"]),
}
# Kernels of one thread an element, which share nothing.
ALONE = {"send_kernel", "plain_kernel", "fold_kernel"}


@functools.cache
def launched(name: str) -> set[str]:
    """Runs a product or the cases of an operator, and returns the names of its kernels up to their types."""
    backend.library().forget_launched()
    with checked(backend.library()):
        if name in PRODUCTS:
            with backend.scheduled("shuffled"):
                PRODUCTS[name]()
        else:
            dtype, names = CASES[name]
            cases = [c for c in testing.CASES[name] if c.dtype == dtype and c.name in names]
            assert sorted(c.name for c in cases) == sorted(names)
            assert all(result.passed for case in cases for result in backend.run(case))
    return {kernel.split("<")[0] for kernel in backend.launched()}


@pytest.mark.parametrize("name", [*PRODUCTS, *CASES])
def test_nothing_races(name: str) -> None:
    assert launched(name)


def test_every_kernel_is_checked() -> None:
    expected = {kernel.split("<")[0] for kernel in backend.kernels().values()}
    assert set().union(*map(launched, [*PRODUCTS, *CASES])) | ALONE >= expected >= ALONE
