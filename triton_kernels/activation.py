"""Derivatives of activations in fp32: the Triton counterpart of csrc/formulas/activation.h."""

from __future__ import annotations

import triton
import triton.language as tl

IDENTITY = tl.constexpr(0)
RELU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)

_SQRT_HALF = tl.constexpr(0.70710678118654752440)
_INVERSE_SQRT_TWO_PI = tl.constexpr(0.39894228040143267794)
_TANH_SCALE = tl.constexpr(0.79788456080286535588)  # sqrt(2 / pi)
_TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _half_of_one_plus_tanh(x):
    """Return (1 + tanh(u)) / 2 for u = sqrt(2 / pi) * (x + 0.044715 * x^3).

    The result is computed as 1 / (1 + exp(-2u)). Triton's tanh is a function of libdevice, which Triton's interpreter
    does not have.
    """
    return 1.0 / (1.0 + tl.exp((x + x * x * x * _TANH_CUBIC) * _TANH_SCALE * -2.0))


@triton.jit
def derivative(x, KIND: tl.constexpr):
    """Return the derivative of an activation.

    Args:
        x: The argument of the activation, or for relu its result. The result of relu is above 0 where the
            argument is above 0.
        KIND: The activation.
    """
    tl.static_assert(KIND != IDENTITY)
    if KIND == RELU:
        return tl.where(x > 0.0, 1.0, 0.0)
    elif KIND == GELU:
        return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * _INVERSE_SQRT_TWO_PI * tl.exp(-0.5 * x * x)
    else:
        # GELU_TANH is x * s. Here s = (1 + tanh(u)) / 2, and u is explained in `_half_of_one_plus_tanh`. The derivative
        # of s by u is 2 * s * (1 - s).
        s = _half_of_one_plus_tanh(x)
        return s + 2.0 * x * s * (1.0 - s) * _TANH_SCALE * (1.0 + 3.0 * x * x * _TANH_CUBIC)
