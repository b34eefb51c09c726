"""The emulator's tensor cores hold numbers where a GPU's do.

The tables come from the text of the PTX ISA ("Matrix Fragments for mma.m16n8k16 with floating point type", "Matrix
Fragments for mma.m16n8k32", "ldmatrix"). They do not come from the kernels, because a kernel would agree with an
emulator that makes the same mistake. `i` counts the elements of a lane's fragment, the lowest bits of the first
register first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_on_cpu.build import missing_headers
from cuda_on_cpu.cases import run
from torch import Tensor

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
Place = Callable[[int, int, int], tuple[int, int]]  # (row, column) of element i; the lane's groupID, threadID_in_group


def a_of_16_bits(group: int, thread: int, i: int) -> tuple[int, int]:
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, thread * 2 + (i & 1) + (0 if i < 4 else 8)


def b_of_16_bits(group: int, thread: int, i: int) -> tuple[int, int]:
    return thread * 2 + (i & 1) + (0 if i < 2 else 8), group


def a_of_codes(group: int, thread: int, i: int) -> tuple[int, int]:
    row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
    return row, thread * 4 + (i & 3) + (0 if i < 8 else 16)


def b_of_codes(group: int, thread: int, i: int) -> tuple[int, int]:
    return thread * 4 + (i & 3) + (0 if i < 4 else 16), group


def sums(group: int, thread: int, i: int) -> tuple[int, int]:
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def fragments(matrix: Tensor, place: Place, count: int) -> Tensor:
    """[32, count]: what each lane holds of the matrix."""
    return torch.stack(
        [matrix[place(lane >> 2, lane % 4, i)] for lane in range(32) for i in range(count)]
    ).view(32, count)  # fmt: skip


def product(case: str, a: Tensor, b: Tensor, out: torch.dtype, a_place: Place, b_place: Place) -> Tensor:
    """What the lanes of a warp hold of a @ b."""
    each = 4 // a.element_size()  # elements of a register
    given = torch.cat([fragments(a, a_place, 4 * each), fragments(b, b_place, 2 * each)], 1).contiguous()
    return run(case, "shuffled", given, torch.zeros(32, 4, dtype=out), block=32)


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("case", "dtype"), [("halves_as_given", torch.float16), ("bfloat16s_as_given", torch.bfloat16)]
)
def test_m16n8k16(case: str, dtype: torch.dtype) -> None:
    a, b = integers(16, 16, seed=1).to(dtype), integers(16, 8, seed=2).to(dtype)
    found = product(case, a, b, torch.float32, a_of_16_bits, b_of_16_bits)
    assert torch.equal(found, fragments(a.float() @ b.float(), sums, 4))


def test_m16n8k32_of_codes() -> None:
    a, b = integers(16, 32, seed=1).to(torch.int8), integers(32, 8, seed=2).to(torch.int8)
    found = product("codes_as_given", a, b, torch.int32, a_of_codes, b_of_codes)
    assert torch.equal(found, fragments(a.int() @ b.int(), sums, 4))


@pytest.mark.parametrize(("case", "is_transposed"), [("matrices_as_given", False), ("transposed_as_given", True)])
def test_ldmatrix(case: str, is_transposed: bool) -> None:
    """Lanes 8 m to 8 m + 7 name the rows of matrix m. Of each, lane l gets two elements from 2 (l % 4) on of row l / 4,
    with .trans of column l / 4."""
    matrices = torch.arange(4 * 8 * 8, dtype=torch.int16).view(4, 8, 8)
    words = run(case, "shuffled", matrices, torch.zeros(32, 4, 2, dtype=torch.int16), block=32, shared=512)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for matrix in range(4):
            of_row = matrices[matrix].T[group] if is_transposed else matrices[matrix][group]
            assert words[lane, matrix].tolist() == of_row[2 * thread : 2 * thread + 2].tolist()
