"""Optimizer states of 8 and 16 bits (csrc/formulas/states.h): codes and their scales, and bf16 rounded at random."""

from __future__ import annotations

import triton
import triton.language as tl

STATE_GROUP = tl.constexpr(128)  # kStateGroup in csrc/table.h
LEAST_SCALE = tl.constexpr(2.0**-90)  # kLeastScale
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def spread(per_group, TILE: tl.constexpr):
    """Return the number of each element's group. `per_group` has one for each group of a tile."""
    return tl.reshape(tl.broadcast_to(per_group[:, None], (TILE // STATE_GROUP, STATE_GROUP)), (TILE,))


@triton.jit
def random_words(group, tensor, step):
    """Return the four Philox words of each group (`Noise` in csrc/formulas/states.h), as a tuple.

    Args:
        group: int64, the positions of groups in their tensor.
        tensor: The column of the tensor in the table.
        step: int64, the number of updates before this one, below 2^32.
    """
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(tensor.to(tl.int64) << 32 | step, low, (group >> 32).to(tl.uint32), low * 0, low * 0)


@triton.jit
def noise(words, K: tl.constexpr, TILE: tl.constexpr):
    """Return 16 random bits for each element of a tile, as int32. `words` are the four Philox words of each group."""
    position = tl.arange(0, TILE).to(tl.uint32) % STATE_GROUP
    return ((spread(words[2 * K], TILE) * position + spread(words[2 * K + 1], TILE)) >> 16).to(tl.int32)


@triton.jit
def decode(codes, scale, LEVELS: tl.constexpr, INVERSE: tl.constexpr):
    """Return states in fp32.

    Args:
        codes: int32.
        scale: The scale of each element's group.
        LEVELS: 127 for a momentum, 255 for a second moment.
        INVERSE: 1 / LEVELS.
    """
    fraction = codes.to(tl.float32) * tl.full((), INVERSE, tl.float32)
    square = fraction * tl.abs(fraction)
    if LEVELS == 255:
        square = square * square
    return square * scale


@triton.jit
def encode(x, bits, mask, LEVELS: tl.constexpr, TILE: tl.constexpr):
    """Return the codes of a tile as int32, and the scale of each group.

    Args:
        x: fp32.
        bits: What `noise` returned.
        mask: The elements that exist.
        LEVELS: As in `decode`.
        TILE: Elements of the tile.
    """
    magnitude = tl.where(mask, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    magnitude = tl.max(tl.reshape(magnitude, (TILE // STATE_GROUP, STATE_GROUP)), axis=1)
    is_finite = magnitude < _INFINITY_BITS  # as an integer, NaN is larger than any number
    largest = tl.where(is_finite, magnitude, 0).to(tl.float32, bitcast=True)
    is_coded = is_finite & (largest >= LEAST_SCALE)
    if LEVELS == 255:
        is_coded = is_finite & (magnitude != 0)
    least = tl.where(largest > LEAST_SCALE, largest, LEAST_SCALE)
    scale = tl.where(is_coded, least, tl.where(is_finite, 0.0, float("nan")))
    inverse = spread(tl.where(is_coded, tl.div_rn(tl.full(least.shape, 1.0, tl.float32), least), 0.0), TILE)
    root = tl.sqrt_rn(tl.where(inverse == 0.0, 0.0, tl.abs(x) * inverse))
    if LEVELS == 255:
        root = tl.sqrt_rn(root)
    steps = (root * tl.full((), 65536.0 * LEVELS + 4.0, tl.float32)).to(tl.int32)
    codes = tl.minimum((steps + bits) >> 16, LEVELS)
    if LEVELS == 255:
        return tl.where(inverse == 0.0, 0, tl.maximum(codes, 1)), scale
    return tl.where(x < 0.0, -codes, codes), scale


@triton.jit
def bf16_at_random(x, bits):
    """Return fp32 numbers that bf16 can hold: `x`, rounded at random. NaN is kept."""
    rounded = ((x.to(tl.int32, bitcast=True) + bits) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)
