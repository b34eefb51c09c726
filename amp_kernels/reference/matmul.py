"""Products of 16-bit matrices in plain torch: sums in fp32, one rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sums(input: Tensor | None, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return ``alpha * a @ b + beta * input`` in fp32."""
    if torch.is_autocast_enabled(a.device.type):  # autocast would compute the product in 16 bits
        with torch.autocast(a.device.type, enabled=False):
            return sums(input, a, b, beta=beta, alpha=alpha)
    left, right = a.float(), b.float()
    if input is not None and beta != 0:
        multiply = torch.addmm if a.dim() == 2 else torch.baddbmm
        return multiply(input.float(), left, right, beta=beta, alpha=alpha)
    return left @ right if alpha == 1 else alpha * (left @ right)


def addmm(
    input: Tensor | None,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``activation(alpha * a @ b + beta * input)`` and the activation's argument, both rounded to `out_dtype`.

    If `out_dtype` is None, they are rounded to the dtype of `a`.
    """
    argument = sums(input, a, b, beta=beta, alpha=alpha)
    dtype = out_dtype or a.dtype
    return activate(argument, activation).to(dtype), argument.to(dtype)


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Apply the activation that has this name. None is the identity."""
    if activation is None:
        return x
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activation_backward(grad: Tensor, saved: Tensor, activation: str | None) -> Tensor:
    """Return the fp32 gradient of the activation's argument.

    For gelu and gelu_tanh, `saved` is the argument of the activation. For relu, `saved` is its result.
    """
    grad = grad.float()
    if activation is None:
        return grad
    if activation == "relu":
        return torch.where(saved > 0, grad, 0.0)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, saved.float(), approximate=approximate)
