"""The reader of machine code, on functions of a few instructions."""

from __future__ import annotations

import pytest
from occupancy import resident_blocks
from sass import instructions, waits_of_loops


def waits(*lines: str) -> dict[int, list[int]]:
    """The bytes in flight at each wait of each loop. Instructions are 0x10 apart, as in a listing."""
    text = "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines))
    assert len(instructions(text)) == len(lines)
    return {first: [wait.bytes for wait in found] for first, found in waits_of_loops(instructions(text)).items()}


END = ("@P0 BRA 0x0", "EXIT")
LOAD_4, LOAD_8, LOAD_12 = (f"LDG.E.128 R{first}, desc[UR4][R2.64]" for first in (4, 8, 12))


def test_loads_that_are_issued_together_are_one_wait() -> None:
    assert waits(LOAD_4, LOAD_8, "FADD R4, R4, R5", "FADD R8, R8, R9", *END) == {0: [32]}


def test_narrow_loads_can_be_left_out() -> None:
    text = "\n".join(
        f"  /*{16 * i:04x}*/ {line} ;" for i, line in enumerate((LOAD_4, "LDG.E R8, [R2.64]", "MOV R9, R4"))
    )
    assert [[wait.bytes for wait in waits_of_loops(instructions(text), width)[-1]] for width in (1, 8)] == [[20], [16]]


def test_a_use_between_loads_is_a_wait() -> None:
    assert waits(LOAD_4, "FADD R20, R4, R5", LOAD_8, "FADD R8, R8, R9", *END) == {0: [16, 16]}


@pytest.mark.parametrize(
    ("use", "is_wait"),
    [
        ("FADD R20, R7, R21", True),  # the last of four registers
        ("FADD R20, R20, R21", False),
        ("STG.E.128 desc[UR4][R22.64], R4", True),
        ("STG.E.128 desc[UR4][R22.64], R20", False),  # R20 to R23
        ("STG.E.64 desc[UR4][R22.64+0x10], R2", False),  # R2 and R3
        ("LDG.E R20, desc[UR4][R4.64]", True),  # an address
        ("MOV R5, RZ", True),  # may not overtake the load
        ("@!P1 ISETP.GE.AND P2, PT, R7, R20, PT", True),
        ("HADD2.F32 R20, -RZ, R6.H0_H0", True),
    ],
)
def test_what_waits(use: str, is_wait: bool) -> None:
    assert waits(LOAD_4, use, "EXIT") == ({-1: [16]} if is_wait else {})


def test_loads_of_the_next_iteration_are_in_flight_too() -> None:
    assert waits(LOAD_4, LOAD_8, "FADD R20, R8, R9", LOAD_8, "@P0 BRA 0x20", "EXIT") == {0x20: [16]}
    assert waits("NOP", "FADD R20, R4, R5", LOAD_4, LOAD_8, "@P0 BRA 0x10", "EXIT") == {0x10: [32]}


def test_of_two_ways_the_one_with_more_bytes_counts() -> None:
    by_element = ("LDG.E.U16 R4, desc[UR4][R2.64]", "FADD R20, R4, R5")
    assert waits("@P1 BRA 0x40", *by_element, "BRA 0x60", LOAD_4, LOAD_8, "FADD R4, R4, R8", *END) == {0: [2, 32]}


def test_a_piece_at_the_end_is_part_of_its_loop() -> None:
    # The loop is 0x0 to 0x30; what is at 0x50 is done in it, out of the way, and no loop of its own.
    assert waits(LOAD_4, "@P1 BRA 0x50", "FADD R4, R4, R5", *END, LOAD_8, "BRA 0x20") == {0: [32]}


def test_a_wait_is_of_the_innermost_loop() -> None:
    inner = ("NOP", LOAD_4, "FADD R4, R4, R5", "@P0 BRA 0x10")
    assert waits("LDG.E R30, desc[UR4][R2.64]", *inner, "@P1 BRA 0x0", "EXIT") == {0x10: [16]}


# By NVIDIA's occupancy calculator, for compute capability 9.0.
@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [
        (32, 256, 0, 8), (40, 256, 0, 6), (48, 256, 0, 5), (64, 256, 0, 4), (65, 256, 0, 3), (80, 256, 0, 3),
        (81, 256, 0, 2), (128, 256, 0, 2), (129, 256, 0, 1), (255, 256, 0, 1), (128, 512, 0, 1), (16, 32, 0, 32),
        (16, 1024, 0, 2), (128, 256, 99 * 1024, 2), (32, 256, 48 * 1024, 4), (32, 256, 227 * 1024, 1),
        (32, 256, 228 * 1024, 0),
    ],
)  # fmt: skip
def test_resident_blocks(registers: int, threads: int, shared: int, blocks: int) -> None:
    assert resident_blocks(registers, threads, shared) == blocks
