"""int8 arithmetic that gives the same bits as csrc/formulas/int8.h, and `launch_unfused`, which the arithmetic needs.

    symmetric     scale = absmax / 127                  code = clamp(rint(x * (1 / scale)), -127, 127)
    asymmetric    scale = high / 255 - low / 255        code = clamp(rint(x * (1 / scale)) + zero_point, -128, 127)
                  zero_point = clamp(rint(-128 - low * (1 / scale)), -128, 127)
    stochastic    floor(x * (1 / scale) + u) in place of rint(x * (1 / scale)), with u in [0, 1) from Philox

The elements x of a group share one scale. absmax is their largest magnitude. low is the smallest element, or 0 if all
elements are positive. high is the largest element, or 0 if all elements are negative.

Each product and each sum is rounded separately, without fused multiply-add (`launch_unfused`). Division is `tl.div_rn`,
since plain `/` is approximate. rint and floor are built from additions, because Triton's interpreter has no libdevice,
and `tl.floor` flushes subnormals.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .common import current

INFINITY_BITS = tl.constexpr(0x7F800000)
# 1.5 * 2**23. If the magnitude of x is below 2**22, x + ROUNDER is between 2**23 and 2**24, where every float is an
# integer and every integer is a float. So the addition rounds x to an integer, half to even.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def ordered_key(x):
    """Return int32 keys that compare as the floats do.

    A NaN whose sign bit is 0 has a key above that of inf. A NaN whose sign bit is 1 has a key below that of -inf.
    """
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(key):
    """Return the floats whose `ordered_key` is `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bounded(steps):
    """Clamp `steps`, numbers in units of the scale, to [-512, 512].

    In this range, adding `ROUNDER` rounds correctly, and an int32 can hold the result. NaN stays NaN. With `tl.clamp`
    or `tl.minimum`, that would not be certain.
    """
    return tl.where(steps < -512.0, -512.0, tl.where(steps > 512.0, 512.0, steps))


@triton.jit
def affine_of(low, high, SYMMETRIC: tl.constexpr):
    """Return (scale, inverse, zero point) of groups, from the extremes of their elements.

    Args:
        low: `ordered_key` of each group's low. With SYMMETRIC it is not used.
        high: `ordered_key` of each group's high. With SYMMETRIC, the bits of each group's absmax.
        SYMMETRIC: Whether zero points are 0.
    """
    if SYMMETRIC:
        finite = high < INFINITY_BITS
        scale = tl.div_rn(high.to(tl.float32, bitcast=True), tl.full(high.shape, 127.0, tl.float32))
    else:
        finite = (high < INFINITY_BITS) & (low > -INFINITY_BITS - 1)
        steps = tl.full(high.shape, 255.0, tl.float32)
        scale = tl.div_rn(from_key(high), steps) - tl.div_rn(from_key(low), steps)
    inverse = tl.div_rn(tl.full(high.shape, 1.0, tl.float32), scale)
    # If a scale is 0, or so near 0 that its inverse is infinite, all codes of the group are 0, and the scale becomes 1.
    # If an element of the group is NaN or infinite, all codes of the group are 0, and the scale becomes NaN, so that
    # dequantizing gives NaN.
    usable = finite & ((inverse.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY_BITS)
    inverse = tl.where(usable, inverse, 0.0)
    scale = tl.where(usable, scale, tl.where(finite, 1.0, float("nan")))
    if SYMMETRIC:
        zero_point = tl.zeros(high.shape, tl.int32)
    else:
        zero = bounded(-128.0 - tl.where(usable, from_key(low), 0.0) * inverse)
        zero = ((zero + ROUNDER) - ROUNDER).to(tl.int32)
        zero_point = tl.where(usable, tl.minimum(tl.maximum(zero, -128), 127), 0)
    return scale, inverse, zero_point


@triton.jit
def given_affine(scale_ptr, zero_point_ptr, offsets, mask):
    scale = tl.load(scale_ptr + offsets, mask=mask, other=1.0)
    if zero_point_ptr is None:
        zero_point = tl.zeros(scale.shape, tl.int32)
    else:
        zero_point = tl.load(zero_point_ptr + offsets, mask=mask, other=0)
    return scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), zero_point


@triton.jit
def unclamped_codes(x, inverse, zero_point):
    """Return codes before clamping. The code of NaN is the zero point."""
    steps = bounded(x * inverse)
    steps = (steps + ROUNDER) - ROUNDER
    return tl.where(steps == steps, steps, 0.0).to(tl.int32) + zero_point


@triton.jit
def _clamped(codes, inverse, zero_point, SYMMETRIC: tl.constexpr):
    lowest: tl.constexpr = -127 if SYMMETRIC else -128
    return tl.minimum(tl.maximum(tl.where(inverse == 0.0, zero_point, codes), lowest), 127)


@triton.jit
def codes_of(x, inverse, zero_point, SYMMETRIC: tl.constexpr):
    return _clamped(unclamped_codes(x, inverse, zero_point), inverse, zero_point, SYMMETRIC)


@triton.jit
def stochastic_codes_of(x, noise, inverse, zero_point, SYMMETRIC: tl.constexpr):
    """Return codes, rounded stochastically. `noise` is uniform in [0, 1)."""
    steps = bounded(x * inverse + noise)
    near = (steps + ROUNDER) - ROUNDER
    steps = tl.where(near > steps, near - 1.0, near)
    codes = tl.where(steps == steps, steps, 0.0).to(tl.int32) + zero_point
    return _clamped(codes, inverse, zero_point, SYMMETRIC)


@triton.jit
def values_of(codes, scale, zero_point):
    return (codes.to(tl.int32) - zero_point).to(tl.float32) * scale


@triton.jit
def _words(index, seed):
    """Return the four words of Philox4x32-10 for the counter index // 4. The element `index` uses word index % 4."""
    counter = index >> 2
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, (counter >> 32).to(tl.uint32), low * 0, low * 0)


@triton.jit
def _uniform(word):
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8


@triton.jit
def noise_of_each(index, seed):
    w0, w1, w2, w3 = _words(index, seed)
    word = index & 3
    return _uniform(tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3))))


@triton.jit
def noise_of_fours(index, seed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return noise [ROWS, COLUMNS] for elements whose indices are consecutive along a row.

    Four neighbours in a row use the four words of one counter.

    Args:
        index: [ROWS, COLUMNS / 4], for each four neighbours the index of the first, which is a multiple of 4.
        seed: The key of Philox.
        ROWS: The number of rows.
        COLUMNS: The number of columns.
    """
    w0, w1, w2, w3 = _words(index, seed)
    return _uniform(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, COLUMNS)))


@triton.jit
def code_pointers(codes_ptr, offsets, VEC: tl.constexpr):
    """Return pointers to codes. A thread accesses VEC codes at a time.

    With VEC > 1 the base address is rounded down to a multiple of VEC. The comment on element access in common.py
    explains why.
    """
    if VEC > 1:
        address = codes_ptr.to(tl.int64) // VEC * VEC
        codes_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), VEC)
    return codes_ptr + offsets


def launch_unfused(kernel: Any, n_programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
    """Launch a kernel on `device`. Unlike `common.launch`, forbid fused multiply-add.

    Fused multiply-add computes a product and a sum, and rounds only once.
    """
    with current(device):
        kernel[(n_programs,)](*args, **constants, enable_fp_fusion=False)
