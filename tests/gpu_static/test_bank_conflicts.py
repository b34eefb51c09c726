"""How long kernels wait for the banks of shared memory, by the emulator's count (cuda_on_cpu/banks.h).

A wrong swizzle or padding changes no result. The main loop and the epilogue of a kernel use different instructions, so
the table tells them apart:

    ldmatrix, cp.async                       operands; int8_linear loads them 4 and 8 bytes at a time
    store of 16 bytes                        padding of a convolution
    store of 8 bytes, load of 16 bytes       fragments of sums, which leave as rows; int8_linear stores 4 bytes

nvcc joins neighbouring accesses of a thread by the same rule as the emulator: the SASS of the tiles has STS.64 and
LDS.128 where this table has 8 and 16 bytes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from cuda_on_cpu import backend
from cuda_on_cpu.banks import counted
from cuda_on_cpu.build import missing_headers
from products import int8_conv2d, int8_linear, int8_matmul, matmul

from amp_kernels import testing

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))


@pytest.fixture(autouse=True)
def _one_launch_at_a_time() -> None:
    backend.library().forget_launched()


class Product(NamedTuple):
    kernel: str  # a pattern
    launch: Callable[[], None]
    most: dict[str, float]  # cycles for each that there would be without a conflict; of what is not named, 1


# The epilogue of `matmul` reads 32 bytes a thread, in two loads. Named, so that a product without them fails.
ROWS = {"load of 16 bytes": 1.0}
# Where warps share k, a thread adds an element's sums over the warps, and neighbours in a row are in one bank. That
# takes a block, once, 1,024 cycles in place of 128 for 16 x 32 sums (b along k), 4,096 in place of 256 for 16 x 64.
FEW = "load of 4 bytes"
# A convolution without them would have no padding.
PADDING = {"store of 8 bytes": 2.0}
TILE = r"tiled_kernel<__half, Shape<{}, \d, \d>, WideLoader<\d+, {}>, WideLoader<\d+, {}> >"
PRODUCTS = {
    **{
        f"matmul {m}x{n} {a} {b}": Product(
            TILE.format(f"{m}, {n}", "false" if a else "true", "false" if b else "true"),
            functools.partial(matmul, m, n, 64, a, b, batches),
            ROWS,
        )
        for m, n, batches in ((64, 64, 1), (128, 128, 3), (128, 256, 3))
        for a in (True, False)
        for b in (True, False)
    },
    "matmul by element": Product(
        "tiled_kernel<__half, Shape<64, 64, 4, 2>, ElementLoader<64>, ElementLoader<64> >",
        lambda: matmul(64, 64, 63, batches=1),
        ROWS | {"store of 2 bytes": 1.0},
    ),
    "matmul few rows, b along k": Product(
        "few_rows_kernel<__half, AlongK, true>", lambda: matmul(16, 64, 512, batches=1), {FEW: 8.0}
    ),
    "matmul few rows, b along n": Product(
        "few_rows_kernel<__half, AlongN, true>", lambda: matmul(16, 64, 512, b_along=False, batches=1), {FEW: 16.0}
    ),
    **{
        f"int8_{what} few rows, {columns} columns": Product(
            f"few_rows_kernel<{dtype}1, {columns}>", functools.partial(launch, 16, n, 512), {}
        )
        for what, dtype, launch in (("matmul", "", int8_matmul), ("linear", "__half, ", int8_linear))
        for columns, n in ((16, 48), (32, 64))
    },
    "int8_matmul 64x64": Product("tiled_kernel<Operand, 64, 64, false>", lambda: int8_matmul(65, 64, 128), {}),
    "int8_matmul 128x64": Product("tiled_kernel<Operand, 128, 64, false>", lambda: int8_matmul(384, 64, 128), {}),
    "int8_matmul 128x128": Product("tiled_kernel<Operand, 128, 128, false>", lambda: int8_matmul(384, 128, 128), {}),
    "int8_matmul 128x256": Product("tiled_kernel<Operand, 128, 256, false>", lambda: int8_matmul(384, 256, 128), {}),
    "int8_matmul zero points": Product(
        "tiled_kernel<Operand, 128, 128, true>", lambda: int8_matmul(384, 128, 128, zero_points=True), {}
    ),
    **{
        f"int8_conv2d {m}x{n}, {channels} channels": Product(
            f"tiled_kernel<Images, {m}, {n}, true>", functools.partial(int8_conv2d, pixels, channels, n), PADDING
        )
        for m, n, pixels in (
            (64, 64, (1, 8, 8)),
            (128, 64, (3, 8, 16)),
            (128, 128, (3, 8, 16)),
            (128, 256, (3, 8, 16)),
        )
        for channels in (16, 64, 80)
    },
    "int8_linear 64x64": Product("tiled_kernel<__half, 64, 64>", lambda: int8_linear(128, 64, 128), {}),
    "int8_linear 128x128": Product("tiled_kernel<__half, 128, 128>", lambda: int8_linear(384, 128, 128), {}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_cycles_of_products(name: str) -> None:
    product = PRODUCTS[name]
    with counted(backend.library()) as counts:
        product.launch()
    (kernel,) = backend.launched()
    assert re.fullmatch(product.kernel, kernel), f"{kernel} ran, not {product.kernel}"
    slow = {what: cycles.degree for what, cycles in counts.items() if cycles.degree > product.most.get(what, 1.0)}
    assert slow == {}
    assert set(product.most) <= set(counts)


def test_counts_of_exponents() -> None:
    """No lane waits for another, even if all elements have one exponent."""
    tensors = [torch.ones(9_001), torch.zeros(5_000, dtype=torch.float16), torch.ones(5_000, dtype=torch.bfloat16)]
    with counted(backend.library()) as counts, backend.serving():
        torch.ops.amp_kernels.count_exponents_(tensors, *testing.exponents.results_for(tensors, torch.device("cpu")))
    assert backend.launched() == {"exponents_kernel"}
    assert counts["atomic"].phases >= sum(map(torch.numel, tensors)) / 32
    assert {what: cycles.degree for what, cycles in counts.items() if cycles.degree > 1.0} == {}
