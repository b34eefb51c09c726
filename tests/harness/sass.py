"""Reads a kernel's machine code (SASS): its instructions, its loops, and how many bytes it has in flight when it waits.

A load does not stop a thread; the first instruction that reads its register does. If a thread issues all loads of an
iteration before it uses one, it waits for memory once. If it uses the first before it issues the second, it waits
twice, each time with half of the bytes in flight.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Instruction(NamedTuple):
    address: int
    predicate: str
    opcode: str
    operands: str

    def is_load(self) -> bool:
        """Of global memory into registers. `LD` is one of any memory, where nvcc could not know."""
        return re.match(r"LDG\.|LD\.", self.opcode) is not None

    def bytes(self) -> int:
        parts = self.opcode.split(".")
        return next((width for name, width in _BYTES.items() if name in parts), 4)

    def writes(self) -> set[int]:
        """The registers of its first operand, if that is a result."""
        if self.opcode.startswith(_WITHOUT_RESULT):
            return set()
        first = re.match(r"R(\d+)\b", self.operands)
        words = -(-self.bytes() // 4) if self.is_load() else 1
        return set(range(int(first[1]), int(first[1]) + words)) if first else set()

    def reads(self) -> set[int]:
        operands = self.operands if not self.writes() else self.operands.partition(",")[2]
        found: set[int] = set()
        for number, is_pair in re.findall(r"\bR(\d+)(\.64)?", operands):
            found |= {int(number), int(number) + bool(is_pair)}
        if self.opcode.startswith("ST"):  # the number of registers is in the name of the instruction alone
            value = re.search(r"\bR(\d+)$", operands)
            found |= set(range(int(value[1]), int(value[1]) + -(-self.bytes() // 4))) if value else set()
        return found


_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "16": 2, "8": 1}
_WITHOUT_RESULT = ("ST", "RED", "BRA", "BAR", "ISETP", "FSETP", "HSETP2", "DSETP", "LDGSTS", "BSYNC", "WARPSYNC")


def instructions(code: str) -> list[Instruction]:
    """Of a function in a listing of `cuobjdump -sass`."""
    line = r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*(.*?)\s*;"
    return [
        Instruction(int(address, 16), predicate.strip(), opcode, operands)
        for address, predicate, opcode, operands in re.findall(line, code, flags=re.MULTILINE)
    ]


# ---------------------------------------------------------------------------------------------------------- the flow
class Flow:
    """Straight pieces of a function, by number, and who follows whom."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        index = {instruction.address: i for i, instruction in enumerate(code)}
        targets = [_target(instruction, index) for instruction in code]
        ends = [t is not None or i.opcode in ("EXIT", "RET") for i, t in zip(code, targets, strict=True)]
        firsts = {0} | {t for t in targets if t is not None} | {i + 1 for i, end in enumerate(ends) if end}
        starts = sorted(first for first in firsts if first < len(code))
        number = {start: i for i, start in enumerate(starts)}
        self.pieces = [code[a:b] for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
        self.after: list[list[int]] = []
        for start, piece in zip(starts, self.pieces, strict=True):
            last, target = piece[-1], targets[start + len(piece) - 1]
            follows = [] if target is None else [number[target]]
            leaves = not _is_conditional(last) and (target is not None or last.opcode in ("EXIT", "RET"))
            if not leaves and start + len(piece) < len(code):
                follows.append(number[start + len(piece)])
            self.after.append(follows)
        self.before: list[list[int]] = [[] for _ in self.pieces]
        for piece_number, follows in enumerate(self.after):
            for other in follows:
                self.before[other].append(piece_number)
        self.order = self._order()
        self.loops = self._loops()

    def _order(self) -> list[int]:
        """Orders the pieces so that each follows those that lead to it. The jumps back of loops do not count."""
        seen, order = {0}, []
        stack = [(0, iter(self.after[0]))]
        while stack:
            piece, follows = stack[-1]
            other = next((o for o in follows if o not in seen), None)
            if other is None:
                order.append(piece)
                stack.pop()
            else:
                seen.add(other)
                stack.append((other, iter(self.after[other])))
        return order[::-1]

    def _loops(self) -> dict[int, set[int]]:
        """The pieces of each loop, by its first one: which every way into the loop goes through."""
        everything = (1 << len(self.pieces)) - 1
        dominators = [everything] * len(self.pieces)  # bits of pieces
        dominators[0] = 1
        changed = True
        while changed:
            changed = False
            for piece in self.order[1:]:
                common = everything
                for other in self.before[piece]:
                    common &= dominators[other]
                common |= 1 << piece
                changed |= common != dominators[piece]
                dominators[piece] = common
        loops: dict[int, set[int]] = {}
        for end in self.order:
            for first in self.after[end]:
                if dominators[end] >> first & 1:
                    loops.setdefault(first, {first}).update(self._between(first, end))
        return loops

    def _between(self, first: int, end: int) -> set[int]:
        found, left = {first}, [end]
        while left:
            piece = left.pop()
            if piece not in found:
                found.add(piece)
                left += self.before[piece]
        return found

    def is_end_of_loop(self, piece: int, follower: int) -> bool:
        return follower in self.loops and piece in self.loops[follower]


def _is_conditional(instruction: Instruction) -> bool:
    has_predicate = instruction.predicate != "" or re.match(r"!?U?P\d", instruction.operands) is not None
    return has_predicate or "DIV" in instruction.opcode


def _target(instruction: Instruction, index: dict[int, int]) -> int | None:
    if not instruction.opcode.startswith("BRA"):
        assert not instruction.opcode.startswith(("BRX", "JMX")), f"a jump to a computed address: {instruction}"
        return None
    address = re.search(r"0x([0-9a-f]+)\)?$", instruction.operands)
    assert address, instruction
    return index[int(address[1], 16)]


# ------------------------------------------------------------------------------------------------------- in flight
class Wait(NamedTuple):
    """For memory: where, and how many bytes were on their way."""

    address: int
    bytes: int


class _Pending:
    """Loads that were issued and not waited for: their bytes, by the registers that they fill."""

    def __init__(self, width: int, loads: dict[frozenset[int], int] | None = None) -> None:
        self.width, self.loads = width, dict(loads or {})

    def copy(self) -> _Pending:
        return _Pending(self.width, self.loads)

    def bytes(self) -> int:
        return sum(self.loads.values())

    def run(self, instruction: Instruction) -> Wait | None:
        """A wait is for everything: what was issued together arrives at about the same time."""
        touched = instruction.reads() | instruction.writes()
        wait = None
        if any(registers & touched for registers in self.loads):
            wait = Wait(instruction.address, self.bytes())
            self.loads.clear()
        if instruction.is_load() and instruction.bytes() >= self.width:
            self.loads[frozenset(instruction.writes())] = instruction.bytes()
        return wait


def waits_of_loops(code: Sequence[Instruction], width: int = 1) -> dict[int, list[Wait]]:
    """The waits of an iteration of each loop, by the address it begins at, for loads of at least `width` bytes.

    They are the waits on all ways through the loop. If two ways meet, the one with more bytes in flight counts from
    there on: on that way all arrays exist and are aligned. Code outside of loops counts as a loop at address -1.
    """
    flow = Flow(code)
    inner: dict[int, int] = {}  # the smallest loop that a piece is in
    for first, body in sorted(flow.loops.items(), key=lambda loop: -len(loop[1])):
        inner |= dict.fromkeys(body, first)
    found: dict[int, list[Wait]] = {}
    for first, body in [*flow.loops.items(), (-1, set(flow.order))]:
        own = {piece for piece in body if inner.get(piece, -1) == first}
        waits = [wait for piece, wait in _walk(flow, body, first, _Pending(width)) if piece in own]
        if waits:
            found[flow.pieces[first][0].address if first >= 0 else -1] = waits
    return found


def _walk(flow: Flow, body: set[int], first: int, nothing: _Pending) -> list[tuple[int, Wait]]:
    """The waits of a loop's second iteration: what the one before it asked for is in flight when it begins."""
    waits, leaving = _walk_once(flow, body, first, nothing)
    return _walk_once(flow, body, first, leaving)[0] if first >= 0 else waits


def _walk_once(flow: Flow, body: set[int], first: int, start: _Pending) -> tuple[list[tuple[int, Wait]], _Pending]:
    """The waits, each with its piece, and what is in flight at the end."""
    waits: list[tuple[int, Wait]] = []
    at_end: dict[int, _Pending] = {}
    for piece in filter(body.__contains__, flow.order):
        entries = [at_end[p] for p in flow.before[piece] if p in at_end and not flow.is_end_of_loop(p, piece)]
        pending = max(entries, key=_Pending.bytes, default=start).copy()
        for instruction in flow.pieces[piece]:
            if wait := pending.run(instruction):
                waits.append((piece, wait))
        at_end[piece] = pending
    ends = [at_end[p] for p in flow.before[first] if p in body] if first >= 0 else []
    return waits, max(ends, key=_Pending.bytes, default=start)
