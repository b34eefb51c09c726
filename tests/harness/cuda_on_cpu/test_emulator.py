"""The emulator itself: what a GPU gets right comes out right in every order, and what it gets wrong shows."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import pytest
import torch
from conftest import run_pytest
from torch import Tensor

from .backend import ORDERS
from .banks import counted
from .build import BUILD, missing_headers
from .cases import library, run
from .races import checked

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
orders = pytest.mark.parametrize("order", ORDERS)


def _inputs(n: int = 256) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@orders
@pytest.mark.parametrize("block", [32, 64, 256, 1024])
def test_block_sum(order: str, block: int) -> None:
    x = _inputs(3 * block)
    total = run("sum", order, x, torch.zeros_like(x), grid=3, block=block).view(3, block)
    assert torch.equal(total, total[:, :1].expand(3, block))  # the same bits in every thread
    torch.testing.assert_close(total[:, 0], x.view(3, block).sum(1), rtol=0, atol=1e-12)


def test_block_sum_has_the_same_bits_in_every_order() -> None:
    x = _inputs()
    forwards, backwards, shuffled = (run("sum", order, x, torch.zeros_like(x)) for order in ORDERS)
    assert torch.equal(forwards, backwards) and torch.equal(forwards, shuffled)


@orders
def test_two_reductions_share_their_memory(order: str) -> None:
    x = _inputs()
    out = run("min_and_sum", order, x, torch.zeros_like(x))
    torch.testing.assert_close(out, (x - x.min()).sum().expand(256), rtol=1e-12, atol=0)


def test_a_missing_barrier_between_reductions_shows() -> None:
    x = _inputs()
    right = [torch.allclose(run("hasty_sums", o, x, torch.zeros_like(x)), x.sum().expand(256)) for o in ORDERS]
    assert not all(right)


@orders
def test_barrier(order: str) -> None:
    x = _inputs()
    assert torch.equal(run("rotate", order, x, torch.zeros_like(x)), x.roll(-1))


def test_a_compiler_that_fortifies() -> None:
    """As Ubuntu's g++ does by itself."""
    compiler = BUILD / "fortifying_g++"
    compiler.parent.mkdir(parents=True, exist_ok=True)
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} -D_FORTIFY_SOURCE=2 "$@"\n')
    compiler.chmod(0o755)
    run_pytest(str(Path(__file__)), "-k", "test_barrier", CXX=str(compiler))


@orders
def test_a_missing_barrier_shows(order: str) -> None:
    x = _inputs()
    assert not torch.equal(run("rotate_without_barrier", order, x, torch.zeros_like(x)), x.roll(-1))


@orders
def test_any_keeps_nothing_from_one_call_to_the_next(order: str) -> None:
    x = torch.zeros(256, dtype=torch.float64)
    x[130] = 1.0
    assert torch.equal(run("any", order, x, torch.zeros_like(x)), torch.ones_like(x))


@orders
def test_shared_memory_starts_poisoned_in_every_block(order: str) -> None:
    x = _inputs()
    run("rotate", order, x, torch.zeros_like(x))
    assert run("read_unwritten", order, x, torch.zeros_like(x), grid=2).isnan().all()


@orders
def test_shuffle_waits_for_the_lanes_it_names(order: str) -> None:
    x = _inputs(64)
    low, high = x.view(2, 2, 16).unbind(1)
    swapped = torch.stack([high.view(2, 8, 2).flip(2).view(2, 16), low.view(2, 8, 2).flip(2).view(2, 16)], 1)
    out = run("shuffle_after_different_paths", order, x, torch.zeros_like(x), block=64)
    assert torch.equal(out, swapped.reshape(64))


@orders
def test_product_of_codes(order: str) -> None:
    codes = torch.randint(-128, 128, (24, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    out = run("codes_product", order, codes, torch.zeros(16, 8, dtype=torch.float64), block=32, shared=1024)
    assert torch.equal(out, codes[:16].double() @ codes[16:].double().T)


@orders
def test_product_of_halves(order: str) -> None:
    numbers = torch.randint(-9, 9, (24, 16), generator=torch.Generator().manual_seed(0)).half()
    out = run("halves_product", order, numbers, torch.zeros(16, 8, dtype=torch.float64), block=32)
    assert torch.equal(out, numbers[:16].double() @ numbers[16:].double().T)


def _staged(name: str, order: str) -> bool:
    x = _inputs(256)
    out = run(name, order, x, torch.zeros(64, dtype=torch.float64), block=64, shared=2048)
    return torch.equal(out, x[:128].view(64, 2).roll(-1, 0)[:, 0])


@orders
def test_copies_arrive_by_their_wait(order: str) -> None:
    assert _staged("staged_copies", order)


def test_a_copy_that_is_not_waited_for_shows() -> None:
    assert not _staged("staged_copies_without_wait", "forwards")
    assert not _staged("staged_copies_without_wait", "shuffled")


def test_a_copy_over_what_is_still_read_shows() -> None:
    assert not _staged("staged_copies_into_what_is_read", "backwards")
    assert not _staged("staged_copies_into_what_is_read", "shuffled")


@orders
def test_short_copies_are_filled_with_zeros(order: str) -> None:
    x = _inputs(64)
    expected = torch.zeros_like(x)
    expected[::4] = x[::4]
    assert torch.equal(run("short_copy", order, x, torch.ones_like(x), block=32, shared=512), expected)


def _forbid(*ranges: tuple[int, int]) -> None:
    edges = [edge for both in ranges for edge in both]
    library().forbid_reads((ctypes.c_uint64 * len(edges))(*edges), ctypes.c_size_t(len(ranges)))


# One by one, 16 at a time, and by asynchronous copies of 8 of 16.
@pytest.mark.parametrize(("name", "read"), [("rotate", 256), ("double_packs_float", 1024), ("short_copy", 488)])
@pytest.mark.parametrize(("before", "behind"), [(1, 0), (0, 1)])
def test_a_read_of_a_forbidden_byte_is_reported(name: str, read: int, before: int, behind: int) -> None:
    x, out = _inputs(128), torch.zeros(256, dtype=torch.float64)
    begin, end = x.data_ptr(), x.data_ptr() + read
    try:
        _forbid((end, end + 64), (begin - 64, begin))
        run(name, "shuffled", x, out, block=32, shared=512)
        _forbid((end - behind, end + 64), (begin - 64, begin + before))
        with pytest.raises(RuntimeError, match=r"thread \d+ of block 0 reads \d+ bytes, some of them outside a tensor"):
            run(name, "shuffled", x, out, block=32, shared=512)
    finally:
        _forbid()


@orders
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "half_of_the_block_at_a_barrier",
            r"deadlock in block 0.*0\.\. at __syncthreads; 128 of 256 have left",
        ),
        ("early_exit", r"deadlock in block 0.*8\.\. at __syncthreads; 1 of 256 have left"),
        ("two_kinds_of_barrier", r"is at __syncthreads(_or)? while thread \d+ is at __syncthreads"),
        ("divergent_shuffle", r"deadlock in block 0.*at __shfl_xor_sync"),
        ("half_of_a_warp_at_an_mma", r"deadlock in block 0.*0\.\. at mma.sync"),
        ("misaligned_copy", r"thread \d+ of block 0: cp.async of 16 bytes, or not aligned to 16"),
        ("shuffle_from_an_unnamed_lane", r"its mask does not name both"),
        ("load_misaligned_pack", r"thread \d+ of block 0: undefined behaviour .*misaligned.*portable\.h:\d+"),
        (
            "store_misaligned_pack",
            r"thread \d+ of block 0: undefined behaviour .*misaligned.*portable\.h:\d+",
        ),
        ("write_past_the_end", r"thread \d+ of block 0 wrote past its 2048 bytes of shared memory, at byte 2048"),
        ("read_past_the_end", r"thread \d+ of block 0 read past its 2048 bytes of shared memory, at byte 2048"),
        ("matrix_rows_at_odd_places", r"thread \d+ of block 0: ldmatrix of a row that is not aligned to 16 bytes"),
        ("matrix_rows_of_a_tensor", r"thread \d+ of block 0: ldmatrix of a row outside of shared memory"),
        ("matrix_rows_past_the_end", r"thread \d+ of block 0 read past its 2048 bytes of shared memory, at byte 2048"),
    ],
)
def test_misuse_is_reported_and_the_next_launch_works(order: str, name: str, message: str) -> None:
    x = _inputs()
    with pytest.raises(RuntimeError, match=message):
        run(name, order, x, torch.zeros_like(x))
    assert torch.equal(run("rotate", order, x, torch.zeros_like(x)), x.roll(-1))


@pytest.mark.parametrize(("grid", "block", "shared"), [(0, 32, 0), (1, 0, 0), (1, 1025, 0), (1, 32, 100 << 10)])
def test_what_cuda_would_refuse_to_launch(grid: int, block: int, shared: int) -> None:
    x = _inputs()
    with pytest.raises(RuntimeError, match="invalid launch"):
        run("sum", "forwards", x, x, grid=grid, block=block, shared=shared)


@orders
def test_atomic_additions_in_shared_memory(order: str) -> None:
    x = _inputs(64)
    assert (run("shared_counts", order, x, torch.zeros_like(x), block=64) == 32).all()


# What 32 lanes do, and the cycles it takes by the rules of banks.h: words of 4 bytes so many words apart, one word for
# all, 16 bytes side by side, and rows of ldmatrix so many bytes apart.
@pytest.mark.parametrize(
    ("name", "what", "phases", "cycles"),
    [
        ("words_1_apart", "load of 4 bytes", 1, 1),
        ("words_2_apart", "load of 4 bytes", 1, 2),
        ("words_32_apart", "load of 4 bytes", 1, 32),
        ("words_33_apart", "load of 4 bytes", 1, 1),
        ("one_word", "load of 4 bytes", 1, 1),
        ("atomics_1_apart", "atomic", 1, 1),
        ("atomics_32_apart", "atomic", 1, 32),
        ("atomics_on_one_word", "atomic", 1, 32),
        ("packs", "load of 16 bytes", 4, 4),
        ("matrix_rows_16_apart", "ldmatrix", 4, 4),
        ("matrix_rows_32_apart", "ldmatrix", 4, 8),
        ("matrix_rows_128_apart", "ldmatrix", 4, 32),
    ],
)
def test_cycles_of_shared_memory(name: str, what: str, phases: int, cycles: int) -> None:
    with counted(library()) as counts:
        run(name, "shuffled", _inputs(), torch.zeros(1024, dtype=torch.float64), block=32, shared=8192)
    assert counts[what] == (phases, cycles)


# What a launch of one block of 64 threads, or of some, does with shared memory or with the memory of other blocks.
RACES = {
    "rotate_without_barrier": "shared memory that thread .* of block 0 (wrote|read)",
    "hasty_sums": "shared memory that thread.* (wrote|read)",
    "shared_counts_without_barrier": "shared memory that thread.* (changed atomically|read)",
    "neighbours_through_shared_memory": "shared memory that thread .* of block 0 (wrote|read)",
    "staged_copies_without_wait": "reads shared memory that a copy of thread .* of block 0 may still write",
    "staged_copies_into_what_is_read": "shared memory that .* of block 0 (may still write|wrote|read)",
    "last_block_without_the_first_fence": "reads global memory that thread 0 of block . wrote",
    "last_block_without_the_second_fence": "global memory that thread 0 of block . wrote",
    "last_block_with_a_late_fence": "thread [1-6] of block . reads global memory that thread 0 of block . wrote",
}


@orders
@pytest.mark.parametrize("name", ["min_and_sum", "rotate", "staged_copies", "shared_counts", "last_block", *RACES])
def test_races(order: str, name: str) -> None:
    """Whether the results are right in this order or not."""
    grid = 7 if name.startswith("last_block") else 1
    x = _inputs(grid * 64 if grid > 1 else 256)
    with checked(library()), contextlib.ExitStack() as stack:
        if name in RACES:
            stack.enter_context(pytest.raises(RuntimeError, match=f"race: .*{RACES[name]}, and nothing orders the two"))
        run(name, order, x, torch.zeros(512, dtype=torch.float64), grid=grid, block=64, shared=2048)


@orders
def test_last_block(order: str) -> None:
    grid, block = 7, 64
    x = _inputs(grid * block)
    out = torch.zeros(grid + 3, dtype=torch.float64)
    totals, last = [], set()
    for _ in range(3):  # the counter is left as it was found
        run("last_block", order, x, out, grid=grid, block=block)
        totals.append(out[grid].item())
        last.add(int(out[grid + 1]))
        assert out[grid + 2].item() == 0.0
    assert len(set(totals)) == 1
    torch.testing.assert_close(out[grid], x.sum(), rtol=0, atol=1e-12)
    assert last == {"forwards": {6}, "backwards": {0}}.get(order, last)


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_packs(dtype: torch.dtype, offset: int) -> None:
    name = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype]
    x = _inputs(8 * 32 + offset).to(dtype)[offset:]
    out = torch.zeros(8 * 32 + 2 + offset, dtype=dtype)[offset:]
    run(f"double_packs_{name}", "forwards", x, out, block=32)
    assert torch.equal(out[:-2], x * 2)
    assert torch.equal(out[-2:], torch.zeros(2, dtype=dtype))
