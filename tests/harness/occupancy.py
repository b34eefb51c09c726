"""How many blocks of a kernel a multiprocessor of sm_90 holds at a time, by the rules of the CUDA programming guide."""

from __future__ import annotations

_REGISTERS, _REGISTERS_OF_A_PORTION = 65536, 256  # of a multiprocessor; a warp gets whole portions
_SUBPARTITIONS = 4  # each has a quarter of the registers and takes whole warps
_SHARED, _SHARED_OF_A_BLOCK, _SHARED_RESERVED, _SHARED_OF_A_PORTION = 228 * 1024, 227 * 1024, 1024, 128
_THREADS, _BLOCKS = 2048, 32


def resident_blocks(registers: int, threads: int, shared_bytes: int) -> int:
    """0: it cannot be launched. `registers` of a thread, `threads` and `shared_bytes` of a block."""
    warps = -(-threads // 32)
    of_warp = _rounded_up(registers * 32, _REGISTERS_OF_A_PORTION)
    by_registers = _REGISTERS // _SUBPARTITIONS // of_warp * _SUBPARTITIONS // warps
    if shared_bytes > _SHARED_OF_A_BLOCK:
        return 0
    by_shared = _SHARED // _rounded_up(shared_bytes + _SHARED_RESERVED, _SHARED_OF_A_PORTION)
    return min(by_registers, by_shared, _THREADS // (32 * warps), _BLOCKS)


def _rounded_up(value: int, portion: int) -> int:
    return -(-value // portion) * portion
