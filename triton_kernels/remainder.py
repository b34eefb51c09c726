"""Split masters: the fp32 master of a 16-bit weight, stored as weight and remainder (csrc/formulas/remainder.h)."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import BF16, rounded


@triton.jit
def join(weight, remainder, DTYPE: tl.constexpr):
    """Return the fp32 masters of weights.

    Args:
        weight: The weights of dtype DTYPE, converted to fp32.
        remainder: The remainders, as int32.
        DTYPE: FP16 or BF16.
    """
    if DTYPE == BF16:
        master = (weight.to(tl.int32, bitcast=True) + remainder).to(tl.float32, bitcast=True)
    else:
        master = weight + remainder.to(tl.float32) * _power_of_2(_exponent(weight) - 26)
    back = rounded(master, DTYPE).to(tl.int32, bitcast=True)
    return tl.where(back == weight.to(tl.int32, bitcast=True), master, weight)


@triton.jit
def split(master, DTYPE: tl.constexpr):
    """Return the weights and int32 remainders of fp32 masters. The weights are rounded to DTYPE, but stay fp32."""
    weight = rounded(master, DTYPE)
    if DTYPE == BF16:
        remainder = master.to(tl.int32, bitcast=True) - weight.to(tl.int32, bitcast=True)
        remainder = tl.where(master == master, tl.minimum(remainder, 32767), 0)
    else:
        exponent = _exponent(weight)
        units = (master - weight) * _power_of_2(280 - exponent)
        units = tl.where(exponent == 255, 0.0, tl.minimum(tl.maximum(units, -32767.0), 32767.0))
        remainder = ((units + 12582912.0) - 12582912.0).to(tl.int32)  # adding 1.5 * 2^23 rounds like rint
    return weight, remainder


@triton.jit
def _exponent(weight):
    """Return the exponents of fp16 numbers, biased as in fp32. Subnormals get the smallest normal exponent."""
    return tl.maximum((weight.to(tl.int32, bitcast=True) >> 23) & 0xFF, 113)


@triton.jit
def _power_of_2(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)
