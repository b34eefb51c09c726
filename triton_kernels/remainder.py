"""fp32 masters of 16-bit weights, as weight and remainder: csrc/formulas/remainder.h says what they are."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import BF16, rounded


@triton.jit
def join(weight, remainder, DTYPE: tl.constexpr):
    """Masters in fp32, of weights of DTYPE in fp32 and int32 remainders."""
    if DTYPE == BF16:
        master = (weight.to(tl.int32, bitcast=True) + remainder).to(tl.float32, bitcast=True)
    else:
        master = weight + remainder.to(tl.float32) * _power_of_2(_exponent(weight) - 26)
    back = rounded(master, DTYPE).to(tl.int32, bitcast=True)
    return tl.where(back == weight.to(tl.int32, bitcast=True), master, weight)


@triton.jit
def split(master, DTYPE: tl.constexpr):
    """(weights in fp32, int32 remainders)."""
    weight = rounded(master, DTYPE)
    if DTYPE == BF16:
        remainder = master.to(tl.int32, bitcast=True) - weight.to(tl.int32, bitcast=True)
        remainder = tl.where(master == master, tl.minimum(remainder, 32767), 0)
    else:
        exponent = _exponent(weight)
        units = (master - weight) * _power_of_2(280 - exponent)
        units = tl.where(exponent == 255, 0.0, tl.minimum(tl.maximum(units, -32767.0), 32767.0))
        remainder = ((units + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: to the nearest integer, as by rint
    return weight, remainder


@triton.jit
def _exponent(weight):
    """That of fp16 numbers, biased as in fp32."""
    return tl.maximum((weight.to(tl.int32, bitcast=True) >> 23) & 0xFF, 113)


@triton.jit
def _power_of_2(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)
