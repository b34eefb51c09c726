"""The int8 operators in plain torch.

The fp32 operations have a fixed order, and no two of them are fused into one that rounds once. So every backend can
return the same bits. `amp_kernels.quantize_int8` explains the groups of elements that share a scale.

Random numbers come from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MASK = 0xFFFFFFFF


def quantize_int8(
    x: Tensor,
    *,
    dim: Sequence[int] | None = None,
    block_size: int | None = None,
    symmetric: bool = True,
    seed: int | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a tensor in plain torch: the specification of `amp_kernels.quantize_int8`.

    It takes the arguments of `amp_kernels.quantize_int8`. Rounding is stochastic if a `seed` is given.

    Returns:
        The tuple `(values, scale, zero_point)`; `zero_point` is None for symmetric codes.

    Examples:
        >>> amp_kernels.reference.quantize_int8(torch.tensor([-127.0, 0.4, 63.0]))
        (tensor([-127,    0,   63], dtype=torch.int8), tensor([1.]), None)
    """
    if scale is None:
        scale, zero_point, inverse = _affine(x, dim, block_size, symmetric)
    else:
        inverse = 1 / scale
    code = _codes(x, inverse, zero_point, block_size, seed)
    return code.clamp(-127 if zero_point is None else -128, 127).to(torch.int8), scale, zero_point


def dequantize_int8(
    values: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the numbers that int8 codes stand for: the specification of `amp_kernels.dequantize_int8`.

    Args:
        values: int8 codes.
        scale: fp32 scales, as in `Int8Tensor`.
        zero_point: int32 zero points, or None for symmetric codes.
        block_size: Length of a group along the last dimension, or None.
        dtype: fp32, fp16 or bf16.

    Returns:
        `(values - zero_point) * scale`, rounded once to `dtype`.

    Examples:
        >>> amp_kernels.reference.dequantize_int8(torch.tensor([-4, 4], dtype=torch.int8), torch.tensor([0.5]))
        tensor([-2.,  2.])
    """
    steps = values.to(torch.int32) - (0 if zero_point is None else _spread(zero_point, values.shape, block_size))
    return (steps.float() * _spread(scale, values.shape, block_size)).to(dtype)


def fake_quantize_int8(
    x: Tensor,
    *,
    dim: Sequence[int] | None = None,
    block_size: int | None = None,
    symmetric: bool = True,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round a tensor to the values of its int8 codes: the specification of `amp_kernels.fake_quantize_int8`.

    It takes the arguments of `amp_kernels.quantize_int8`. NaN stays NaN.

    Returns:
        The tuple `(values, scale, zero_point)`, with dequantized values in the dtype of `x`.

    Examples:
        >>> amp_kernels.reference.fake_quantize_int8(torch.tensor([-127.0, 0.4]))[0]
        tensor([-127.,    0.])
    """
    values, scale, zero_point = quantize_int8(
        x, dim=dim, block_size=block_size, symmetric=symmetric, scale=scale, zero_point=zero_point
    )
    result = dequantize_int8(values, scale, zero_point, block_size=block_size, dtype=x.dtype)
    return torch.where(x.isnan(), x, result), scale, zero_point


def straight_through_int8(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, block_size: int | None = None
) -> Tensor:
    """Return the gradient of `fake_quantize_int8` for given scales.

    It is `grad` where the code was not clamped, and 0 elsewhere (Bengio et al. 2013). The other arguments are those of
    `amp_kernels.reference.dequantize_int8`.

    Args:
        grad: Gradient of the result, in the shape of `x`.
        x: The tensor that was quantized.

    Returns:
        The gradient of `x`, in the dtype of `grad`.

    Examples:
        >>> amp_kernels.reference.straight_through_int8(torch.ones(2), torch.tensor([1.0, 200.0]), torch.ones(1))
        tensor([1., 0.])
    """
    code = _codes(x, 1 / scale, zero_point, block_size, None)
    inside = (code >= (-127 if zero_point is None else -128)) & (code <= 127)
    return torch.where(inside, grad, torch.zeros_like(grad))


def int8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor | None,
    b_scale: Tensor,
    b_zero_point: Tensor | None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """Multiply int8 codes in plain torch: the specification of `amp_kernels.int8_matmul`.

    The result is `(a - a_zero_point) @ (b - b_zero_point) * (a_scale * b_scale) + bias`; the sum of products is exact.
    The other arguments are those of `amp_kernels.int8_matmul`.

    Args:
        a: int8 `[M, K]`.
        b: int8 `[K, N]`.
        a_scale: fp32, with one element, or with one element per row of `a`.
        a_zero_point: int32, with as many elements as `a_scale`, or None.
        b_scale: fp32, with one element, or with one element per column of `b`.
        b_zero_point: int32, with as many elements as `b_scale`, or None.

    Returns:
        `[M, N]` in `out_dtype`, or int8 codes if `out_scale` is given.

    Examples:
        >>> a, b, one = torch.tensor([[1, 2]]).char(), torch.tensor([[3], [4]]).char(), torch.ones(1)
        >>> amp_kernels.reference.int8_matmul(a, b, one, None, one, None)
        tensor([[11.]])
    """
    left, right = a.double(), b.double()  # exact, since the sums are integers below 2^53
    if a_zero_point is not None:
        left = left - a_zero_point.reshape(-1, 1)
    if b_zero_point is not None:
        right = right - b_zero_point.reshape(1, -1)
    total = (left @ right + 0.0).float()  # in fp64, 0 * -1 is -0; adding 0.0 turns a sum of -0 into 0
    result = total * (a_scale.reshape(-1, 1) * b_scale.reshape(1, -1))
    if bias is not None:
        result = result + bias
    if out_scale is None:
        return result.to(out_dtype)
    return quantize_int8(result, scale=out_scale, zero_point=out_zero_point)[0]


def int8_conv2d(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    out_dtype: torch.dtype = torch.float32,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """Convolve int8 codes in plain torch: the specification of `amp_kernels.int8_conv2d`.

    The other arguments are those of `amp_kernels.int8_conv2d`.

    Args:
        x: int8 `[B, H, W, C]`.
        weight: int8 `[N, kernel height, kernel width, C]`.
        x_scale: fp32, with one element, or with one element per image.
        x_zero_point: int32, with as many elements as `x_scale`, or None.
        weight_scale: fp32, with one element, or with one element per output channel.

    Returns:
        `[B, output height, output width, N]` in `out_dtype`, or int8 codes if `out_scale` is given.

    Examples:
        >>> x, weight, one = torch.ones(1, 3, 3, 1).char(), torch.ones(1, 2, 2, 1).char(), torch.ones(1)
        >>> amp_kernels.reference.int8_conv2d(x, weight, one, None, one).flatten()
        tensor([4., 4., 4., 4.])
    """
    fill = torch.zeros(1, dtype=torch.int32, device=x.device) if x_zero_point is None else x_zero_point
    batch, pixels = x.shape[0], [n + 2 * pad for n, pad in zip(x.shape[1:3], padding, strict=True)]
    padded = fill.clamp(-128, 127).to(torch.int8).reshape(-1, 1, 1, 1).expand(batch, *pixels, x.shape[3]).clone()
    padded[:, padding[0] : padding[0] + x.shape[1], padding[1] : padding[1] + x.shape[2]] = x
    # For each dimension, the pixels that each output pixel reads: [output size, kernel size].
    (rows, columns) = (
        torch.arange(0, n - step * (taps - 1), by, device=x.device)[:, None]
        + torch.arange(taps, device=x.device) * step
        for n, taps, by, step in zip(pixels, weight.shape[1:3], stride, dilation, strict=True)
    )
    # [batch, output height, output width, kernel height, kernel width, channels]
    under = padded[:, rows[:, None, :, None], columns[None, :, None, :]]
    scale, zero_point = (of_pixels(side, len(rows) * len(columns)) for side in (x_scale, x_zero_point))
    out = int8_matmul(
        under.flatten(0, 2).flatten(1), weight.flatten(1).t(), scale, zero_point, weight_scale, None, bias=bias,
        out_dtype=out_dtype, out_scale=out_scale, out_zero_point=out_zero_point,
    )  # fmt: skip
    return out.reshape(batch, len(rows), len(columns), weight.shape[0])


def of_pixels(side: Any, pixels: int) -> Any:
    """Return scales or zero points with one element for each output pixel, if there is one for each image."""
    return side if side is None or side.numel() == 1 else side.flatten().repeat_interleave(pixels)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply floats by int8 weights: `x @ weight.T * scale + bias` in fp32, then rounded to x's dtype.

    Args:
        x: `[M, K]`, fp16, bf16 or fp32.
        weight: int8 `[N, K]`.
        scale: fp32 with 1 or N elements.
        bias: `[N]` in the dtype of `x`, or None.

    Returns:
        `[M, N]` in the dtype of `x`.

    Examples:
        >>> amp_kernels.reference.int8_linear(torch.ones(1, 2), torch.tensor([[3, 4]]).char(), torch.tensor([0.5]))
        tensor([[3.5000]])
    """
    with torch.autocast(x.device.type, enabled=False):  # autocast would multiply in 16 bits
        result = (x.float() @ weight.float().T) * scale.reshape(-1)
    return (result if bias is None else result + bias.float()).to(x.dtype)


# ------------------------------------------------------------------------------------------------------- the parts
def _affine(
    x: Tensor, dim: Sequence[int] | None, block_size: int | None, symmetric: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the scale and the zero point of each group, and the inverse of the scale.

    If the group has a NaN or inf, or if ``1 / scale`` is not finite, the inverse is set to 0, so that all codes are 0.
    """
    grouped = _blocks(x, block_size).float()
    dims = tuple(dim or range(x.dim())) if block_size is None else (-1,)
    if x.numel() == 0:  # a group without elements gets the same scale as a group of zeros
        reduced = {d % grouped.dim() for d in dims}
        shape = [1 if d in reduced else n for d, n in enumerate(grouped.shape)]
        grouped = torch.zeros(shape, device=x.device)
    magnitude = grouped.abs().amax(dims, keepdim=True)  # NaN if the group has a NaN
    low, high = (grouped.amin(dims, keepdim=True).clamp(max=0), grouped.amax(dims, keepdim=True).clamp(min=0))
    if block_size is not None:
        magnitude, low, high = (t.squeeze(-1) for t in (magnitude, low, high))
    # The divisors are tensors. If they were Python numbers, torch would multiply a CUDA tensor by their reciprocals,
    # and the results would be rounded differently.
    n127, n255 = torch.full_like(magnitude, 127), torch.full_like(magnitude, 255)
    scale = magnitude / n127 if symmetric else high / n255 - low / n255
    inverse = 1 / scale
    is_finite, usable = magnitude.isfinite(), inverse.isfinite()
    scale = torch.where(is_finite, torch.where(usable, scale, 1.0), torch.nan)
    inverse = torch.where(is_finite & usable, inverse, 0.0)
    if symmetric:
        return scale, None, inverse
    zero_point = torch.round(-128 - low * inverse).clamp(-128, 127)
    return scale, torch.where(inverse == 0, 0, zero_point).to(torch.int32), inverse


def _blocks(x: Tensor, block_size: int | None) -> Tensor:
    """Return `x` as [..., blocks, block_size]. Zeros fill up the last block.

    They do not change its scale, because the range from which a scale is computed always contains 0.
    """
    if block_size is None:
        return x
    blocks = -(-x.shape[-1] // block_size)
    padded = F.pad(x, (0, blocks * block_size - x.shape[-1]))
    # Not `unflatten`: in some versions of torch it returns one block, not none, for a dimension of length 0.
    return padded.reshape(*x.shape[:-1], blocks, block_size)


def _spread(group: Tensor, shape: Sequence[int], block_size: int | None) -> Tensor:
    """Return scales or zero points, one for each group, in a shape that broadcasts to the shape of the elements."""
    if group.numel() == 1:
        return group.reshape([1] * len(shape))
    if block_size is None:
        return group
    return group.repeat_interleave(block_size, dim=-1)[..., : shape[-1]]


def _codes(x: Tensor, inverse: Tensor, zero_point: Tensor | None, block_size: int | None, seed: int | None) -> Tensor:
    """Return the codes before they are clamped to int8, as int32. The code of NaN is the zero point."""
    factor = _spread(inverse, x.shape, block_size)
    steps = x.float() * factor
    steps = torch.round(steps) if seed is None else torch.floor(steps + uniform(x.shape, seed, x.device))
    steps = torch.where(factor == 0, 0.0, steps).nan_to_num(0.0, 512.0, -512.0).clamp(-512, 512).to(torch.int32)
    return steps if zero_point is None else steps + _spread(zero_point, x.shape, block_size)


def uniform(shape: Sequence[int], seed: int, device: torch.device | None = None) -> Tensor:
    """Return random fp32 numbers in [0, 1).

    Philox returns four words for each counter. In row-major order, element i is made from word ``i & 3`` of the
    counter ``i >> 2``.
    """
    numel = torch.Size(shape).numel()
    words = philox(torch.arange(-(-numel // 4), device=device), seed)
    return ((words.flatten()[:numel] >> 8).float() * 2.0**-24).reshape(tuple(shape))


def philox(counter: Tensor, seed: int | Tensor) -> Tensor:
    """Return the four Philox4x32-10 words of each 64-bit counter, as int64 `[..., 4]`. `seed` is the 64-bit key."""
    zero = torch.zeros_like(counter)
    c = [counter & _MASK, counter >> 32 & _MASK, zero, zero]
    keys = [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(10):
        # An int64 product may overflow to a negative number, but its 64 bits are those of the unsigned product.
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32 & _MASK) ^ c[1] ^ keys[0], p1 & _MASK, (p0 >> 32 & _MASK) ^ c[3] ^ keys[1], p0 & _MASK]
        keys = [(keys[0] + 0x9E3779B9) & _MASK, (keys[1] + 0xBB67AE85) & _MASK]
    return torch.stack(c, dim=-1)
