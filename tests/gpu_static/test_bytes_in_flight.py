"""A streaming kernel asks for all that an iteration needs before it waits for any of it.

Memory answers late, so a multiprocessor needs many bytes under way at every moment (docs/internals/estimates.md says
how many). A kernel that waits between its loads has only a part of them. nvcc decides where the waits are, and only the
machine code shows it (tests/harness/sass.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import nvcc
import pytest
import sass

from amp_kernels.families import FAMILIES


class Row(NamedTuple):
    """Of each kernel whose name matches, so many loops have so many bytes of a thread in flight when they wait."""

    source: str
    kernels: str
    loops: int
    bytes: int
    width: int = 8  # of loads that count: narrower ones are scales, or ways for what is not aligned


LOW = "__(half|nv_bfloat16)"
# A thread of int8 and copy_pad has as many packs of 16 bytes under way as kEach, kHeldPacks or kRows says. These are
# today's figures, to be raised and never lowered.
TABLE = [
    Row("unscale", "unscale_kernel", 3, 64),  # of three dtypes
    Row("exponents", "exponents_kernel", 2, 64, width=16),  # of fp16 and bf16
    # In the loop of fp32, nvcc 13.0 starts the fourth load after the first three have arrived.
    Row("exponents", "exponents_kernel", 3, 48, width=16),
    Row("int8_quantize", "held_rows_kernel<", 1, 128),
    Row("int8_quantize", "rows_kernel<", 1, 64),
    Row("int8_quantize", "columns_kernel<", 1, 64),
    Row("int8_quantize", "row_extremes_kernel<", 1, 64),
    Row("int8_quantize", "column_extremes_kernel<", 1, 64),
    Row("int8_dequantize", "rows_kernel<DequantizeOp<float>", 1, 32, width=4),
    Row("int8_dequantize", "columns_kernel<DequantizeOp<float>", 1, 24, width=4),
    Row("int8_dequantize", f"(rows|columns)_kernel<DequantizeOp<{LOW}>", 1, 64),
    Row("int8_dequantize", "(rows|columns)_kernel<StraightThroughOp<", 1, 64),
    Row("copy_pad", f"copy_pad_kernel<{LOW}, .Activation.0>", 1, 128),
    Row("copy_pad", f"copy_pad_kernel<{LOW}, .Activation.[123]>", 2, 128),
    # In int8_matmul, 128 of these bytes belong to b. In int8_linear, 64 of them belong to the weight if a block has 16
    # columns, and 128 if it has 32. The others belong to a or x, which L2 holds.
    Row("int8_matmul", "few_rows_kernel<1, 16>", 1, 256),
    Row("int8_matmul", "few_rows_kernel<1, 32>", 1, 192),
    Row("int8_matmul", "few_rows_kernel<", 1, 128),
    Row("int8_linear", f"few_rows_kernel<{LOW}, 1, 16>", 1, 192),
    Row("int8_linear", f"few_rows_kernel<{LOW}, 1, 32>", 1, 256),
    Row("int8_linear", f"few_rows_kernel<{LOW}, ", 1, 128),
]
# A fold_kernel reads only the partial sums that the kernels above wrote. A tiled_kernel loads by cp.async, but sass.py
# sees only loads into registers.
NO_STREAMS = {
    "int8_quantize": "fold_kernel", "copy_pad": "fold_kernel",
    "int8_matmul": "tiled_kernel", "int8_linear": "tiled_kernel",
}  # fmt: skip
STREAMING = {row.source for row in TABLE}


@pytest.fixture(scope="module", params=nvcc.FEW_AND_ALL)
def kernels(request: pytest.FixtureRequest) -> Mapping[str, list[nvcc.Kernel]]:
    """By source."""
    compiled = nvcc.compile_sources(nvcc.HOPPER, request.param)
    with ThreadPoolExecutor() as pool:  # a disassembler is a process, and a cold one takes 4 s for update.cu
        return dict(zip(compiled, pool.map(nvcc.kernels, compiled.values()), strict=True))


def in_flight(code: str, width: int) -> list[int]:
    """The most bytes at a wait of each loop, largest first."""
    loops = sass.waits_of_loops(sass.instructions(code), width)
    return sorted((max(wait.bytes for wait in waits) for waits in loops.values()), reverse=True)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.source}-{row.kernels}")
def test_loops_ask_for_everything_before_they_wait(row: Row, kernels: Mapping[str, list[nvcc.Kernel]]) -> None:
    chosen = {name: code for name, code in named(kernels[row.source]).items() if re.match(row.kernels, name)}
    assert chosen, f"{row.source} has no kernel {row.kernels}"
    best = {name: in_flight(code, row.width)[: row.loops] for name, code in chosen.items()}
    short = {name: found for name, found in best.items() if len(found) < row.loops or found[-1] < row.bytes}
    assert not short, f"less than {row.bytes} bytes in flight in {row.loops} loops: {short}"


def iteration_of(update: str) -> int:
    """What a thread loads for two packs of four elements: gradient, weight or master or both, states."""
    match = re.fullmatch(r"update_kernel<Variant<\w+, (\d), (\w+), (\w+), (\w+)> >", update)
    assert match, update
    states, weight, master, grad = match.groups()
    size = {"float": 4, "short": 2, "__half": 2, "__nv_bfloat16": 2}
    # A 16-bit weight beside an fp32 master is written alone, and an fp32 weight is its own master.
    parameter = size[weight] + 2 if master == "short" else 4
    return 2 * 4 * (size[grad] + parameter + 4 * int(states))


def test_updates_ask_for_everything_before_they_wait(kernels: Mapping[str, list[nvcc.Kernel]]) -> None:
    """In both loops: of packs that lie as the states do, and of those that straddle aligned words."""
    short = {}
    for name, code in named(kernels["update"]).items():
        found = in_flight(code, width=4)[:2]
        if len(found) < 2 or found[1] < iteration_of(name):
            short[name] = (found, iteration_of(name))
    assert short == {}


def lean_iteration_of(update: str) -> int:
    """The bytes that a thread loads for four elements of each of two groups, with the scales of both groups."""
    match = re.fullmatch(r"update_lean_kernel<LeanVariant<(\w+), (\d), (\w+), (\w+), unsigned (\w+)> >", update)
    assert match, update
    formula, present, _, grad, state = match.groups()
    size = {"float": 4, "__half": 2, "__nv_bfloat16": 2, "short": 2, "char": 1}
    family = FAMILIES[formula.removesuffix("Formula").lower()]
    names = [name if int(present) >> k & 1 else None for k, name in enumerate(family.states)]
    coded, all_states = family.coded(names).bit_count(), int(present).bit_count()
    states = coded * size[state] + (all_states - coded) * 4
    scales = 4 * coded if state == "char" else 0
    return 2 * (4 * (size[grad] + 4 + states) + scales)  # a weight and its remainder have 4 bytes, as an fp32 weight


def test_updates_of_lean_states_ask_for_everything_before_they_wait(kernels: Mapping[str, list[nvcc.Kernel]]) -> None:
    """In the loop of full groups."""
    found = {name: in_flight(code, width=4)[0] for name, code in named(kernels["update_lean"]).items()}
    assert found
    assert {
        name: (bytes_, lean_iteration_of(name)) for name, bytes_ in found.items() if bytes_ < lean_iteration_of(name)
    } == {}


def test_updates_draw_their_ticket_behind_a_barrier(kernels: Mapping[str, list[nvcc.Kernel]]) -> None:
    """Else a thread of the block could read a count that the last block has raised. test_races.py sees that in the
    sources; this is what nvcc made of them."""
    for name, code in [*named(kernels["update"]).items(), *named(kernels["update_lean"]).items()]:
        opcodes = [instruction.opcode for instruction in sass.instructions(code)]
        ticket = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("ATOM"))
        before = [opcode for opcode in opcodes[:ticket] if opcode.startswith(("BAR.SYNC", "LDG.", "LD."))]
        assert before[-1].startswith("BAR"), name


@pytest.mark.parametrize("source", sorted(STREAMING))
def test_every_streaming_kernel_is_in_the_table(source: str, kernels: Mapping[str, list[nvcc.Kernel]]) -> None:
    patterns = [row.kernels for row in TABLE if row.source == source] + [NO_STREAMS.get(source, "^$")]
    left_out = [name for name in named(kernels[source]) if not any(re.match(pattern, name) for pattern in patterns)]
    assert left_out == []


def named(kernels: list[nvcc.Kernel]) -> dict[str, str]:
    """The code by the short name."""
    names = nvcc.short_names([kernel.mangled for kernel in kernels])
    return {names[kernel.mangled]: kernel.code for kernel in kernels}
