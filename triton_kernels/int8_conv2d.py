"""Convolutions of int8 codes: products with a left operand that is gathered from images [B, H, W, C].

    out[m, n] = (sum over k of (x[m, k] - zx[m]) * weight[n, k]) * (sx[m] * sw[n]) + bias[n]

A row m is an output pixel, and a column n is an output channel. A convolution takes 2 * M * N * K operations. A row
holds the codes under the kernel:

    row m:   [tap 0,0: channels][tap 0,1: channels] ... [tap 1,0: channels] ...      k = (tap y, tap x, channel)

The rows are not in memory, since together they would be as many times larger than x as the kernel has taps. A program
computes one tile BM x BN of the output. For each tile of K, it reads BM x BK codes from the images:

                 BK                   code [m, k] is at   (image, y, x) of row m     before the loop
       BM  [  ][  ][  ] ...                             + (y, x, channel) of k       in the loop, for all rows at once

The number of channels is a multiple of 16. If it is not, zeros are added to the channels of x and of the weight. So 16
neighbours along K are always channels of one pixel, and each access reads 16 bytes.

The code of padding is the zero point of the image. An access outside the image is redirected to 16 bytes in memory that
hold this code. So it can copy directly to shared memory (cp.async), as all other accesses do. With
`tl.load(..., other=code)`, each tile would pass through registers to get the code: on sm_90, with Triton 3.9, the loop
would have 443 instructions in place of 158.

Most reads of x are from L2, because the programs that run at the same time compute neighbouring pixels
(`place_of_tile` in product.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .common import FP32
from .int8 import launch_unfused
from .int8_matmul import _DTYPES, _LARGE_NARROW, _finish, _sums, _tiles, _zero_points
from .product import INT8, ROWS, Tiles, capability_of, dot, place_of_tile, pointers_of

_CHUNK = tl.constexpr(16)  # codes of one access
_MAX_PIXELS = 2**30  # along one dimension, with padding. Coordinates of pixels are 32-bit integers


# --------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def _divided(number, by):
    """Return (number // by, number % by)."""
    quotient = number // by
    return quotient, number - quotient * by


@triton.jit
def _chunks_at(ptr):
    """Return a pointer to int8 that the compiler knows to be a multiple of 16. `pointers_of` explains the rounding."""
    return tl.multiple_of((ptr.to(tl.int64) // _CHUNK * _CHUNK).to(ptr.dtype), 16)


@triton.jit(do_not_specialize=list(range(29)))
def _conv2d_kernel(
    x_ptr,  # [images, height, width, channels]
    weight_ptr,  # [n, taps_y, taps_x, channels]
    x_scale_ptr,
    x_zero_point_ptr,
    weight_scale_ptr,
    weight_sums_ptr,  # sums of the weight's rows, from _sums_kernel. They are read if x has zero points
    fill_ptr,  # 16 codes of padding for each image, or for all of them. If it is None, the code of padding is 0
    bias_ptr,
    out_ptr,
    out_scale_ptr,
    out_zero_point_ptr,
    m: tl.int64,
    n: tl.int64,
    k: tl.int64,
    height: tl.int32,
    width: tl.int32,
    channels: tl.int32,
    out_height: tl.int32,
    out_width: tl.int32,
    taps_y: tl.int32,
    taps_x: tl.int32,
    stride_y: tl.int64,
    stride_x: tl.int64,
    padding_y: tl.int64,
    padding_x: tl.int64,
    dilation_y: tl.int64,
    dilation_x: tl.int64,
    x_scale_step: tl.int64,
    weight_scale_step: tl.int64,
    AS_HALF: tl.constexpr,  # codes are multiplied as fp16
    DTYPE: tl.constexpr,
    VEC: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tile_row, tile_column = place_of_tile(tl.program_id(0), m, n, BM, BN)
    first = tile_row.to(tl.int64) * BM
    rows = first + tl.arange(0, BM)
    columns = tile_column.to(tl.int64) * BN + tl.arange(0, BN)
    k = k // _CHUNK * _CHUNK
    channels = channels // _CHUNK * _CHUNK

    # The image and the pixel of each row. Only the pixel of the tile's first row takes divisions of 64 bits. Rows
    # beyond m read what the last row reads, so that each row has an image.
    line, x = _divided(first, out_width)
    image, y = _divided(line, out_height)
    lines, x = _divided(
        x.to(tl.int32) + tl.minimum(tl.arange(0, BM).to(tl.int64), m - 1 - first).to(tl.int32), out_width
    )
    images, y = _divided(y.to(tl.int32) + lines, out_height)
    images += image
    y = y * stride_y - padding_y
    x = x * stride_x - padding_x
    row_pointers = _chunks_at(x_ptr) + ((images * height + y) * width + x) * channels
    if fill_ptr is not None:
        fill_pointers = _chunks_at(fill_ptr) + images * x_scale_step * _CHUNK
    y = y.to(tl.int32)
    x = x.to(tl.int32)

    # The place of each k in the kernel is a number with three digits: (tap_y, tap_x, channel). A step of the loop adds
    # the digits of BK. Each carry is 0 or 1. This takes fewer instructions than divisions: 160 for a loop, not 212.
    inner = tl.arange(0, BK)
    taps, channel = _divided(inner, channels)
    tap_y, tap_x = _divided(taps, taps_x)
    step_taps, step_channel = _divided(BK, channels)
    step_y, step_x = _divided(step_taps, taps_x)
    weight_pointers = pointers_of(weight_ptr, inner.to(tl.int64), columns, 1, k, INT8, ROWS, _CHUNK)
    total = tl.zeros((BM, BN), tl.int32)
    for i in range(0, tl.cdiv(k, BK).to(tl.int32)):
        # Beyond k the codes of the weight are 0, so the codes of x may be any. tap_y is limited, since a coordinate of
        # more than 32 bits might seem to be inside the image.
        move_y = tl.minimum(tap_y, taps_y - 1).to(tl.int64) * dilation_y
        move_x = tap_x.to(tl.int64) * dilation_x
        pointers = row_pointers[:, None] + ((move_y * width + move_x) * channels + channel)[None, :]
        # A negative coordinate becomes a large unsigned number. `tl.where` is in place of `&`: with `&`, LLVM packs the
        # comparisons, and Triton 3.9 reserves a stack that is never used.
        at_y = (y[:, None] + move_y.to(tl.int32)[None, :]).to(tl.uint32)
        at_x = (x[:, None] + move_x.to(tl.int32)[None, :]).to(tl.uint32)
        is_inside = tl.where(at_y < height.to(tl.uint32), at_x < width.to(tl.uint32), False)
        if fill_ptr is None:
            left = tl.load(pointers, mask=is_inside, other=0)
        else:
            left = tl.load(tl.where(is_inside, pointers, fill_pointers[:, None] + (inner % _CHUNK)[None, :]))
        right = tl.load(weight_pointers, mask=(i * BK + inner < k)[:, None] & (columns < n)[None, :], other=0)
        total = dot(left, right, total, INT8, AS_HALF)
        weight_pointers += BK
        channel += step_channel
        carry = (channel >= channels).to(tl.int32)
        channel -= carry * channels
        tap_x += step_x + carry
        carry = (tap_x >= taps_x).to(tl.int32)
        tap_x -= carry * taps_x
        tap_y += step_y + carry

    if x_zero_point_ptr is not None:  # a zero point times a sum may need more than 32 bits
        zero_points = _zero_points(x_zero_point_ptr, rows, x_scale_step, rows < m)[:, None]
        sums = tl.load(weight_sums_ptr + columns, mask=columns < n, other=0)
        total = total.to(tl.int64) - zero_points * sums.to(tl.int64)[None, :]
    _finish(
        total, rows[:, None], columns[None, :], m, n, x_scale_ptr, x_scale_step, weight_scale_ptr, weight_scale_step,
        bias_ptr, out_ptr, out_scale_ptr, out_zero_point_ptr, FP32, DTYPE, VEC,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launch
def _in_chunks(codes: torch.Tensor) -> torch.Tensor:
    """Return row-major codes [..., channels] that can be read 16 bytes at a time.

    The result is `codes` itself, or a copy. In the copy, zeros follow the channels, up to a multiple of 16.
    """
    rest = -codes.shape[3] % _CHUNK.value
    if rest > 0:
        return torch.nn.functional.pad(codes, (0, rest))
    return codes if codes.data_ptr() % _CHUNK.value == 0 else codes.clone()


def _conv2d_tiles(m: int, n: int, has_zero_points: bool, capability: tuple[int, int]) -> Tiles:
    """Return the tile sizes for a convolution: one of those that `_tiles` returns, if it does not spill registers.

    A thread holds addresses and coordinates of pixels, in addition to its outputs. So the largest tile of sm_90 would
    spill, and on sm_80, sm_86 and sm_89 also tiles with 128 columns. With zero points, sums have 64 bits, and tiles
    with 128 columns would spill everywhere. On sm_120, the narrow tile spills 8 bytes unless its BK is 64.
    """
    is_wide = n > _LARGE_NARROW.n and not has_zero_points and capability[0] != 8
    tiles = _tiles(torch.int8, m, n, True, is_wide, min(capability, (8, 9)))
    return tiles._replace(k=64) if tiles == _LARGE_NARROW and capability[0] == 12 else tiles


def _int8_conv2d_(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero_point: torch.Tensor | None,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    out_zero_point: torch.Tensor | None,
) -> None:
    pixels = [size + 2 * pad for size, pad in zip(x.shape[1:3], padding, strict=True)]
    if max(pixels) > _MAX_PIXELS:
        raise ValueError(
            f"int8_conv2d: x must have at most {_MAX_PIXELS} pixels in height and width with its padding, got {pixels}"
        )
    x, weight = _in_chunks(x), _in_chunks(weight)
    (images, height, width, channels), (n, *taps, _) = x.shape, weight.shape
    m, k = out.numel() // n, math.prod(taps) * channels
    sums = fill = None
    if x_zero_point is not None:
        sums = _sums(weight.flatten(1))
        if max(padding) > 0:
            of_images = x_zero_point.view(1 if x_zero_point.numel() == 1 else images, -1)[:, :1]
            fill = x.new_empty(len(of_images), _CHUNK.value).copy_(of_images.clamp(-128, 127))
    capability = capability_of(x.device)
    tiles = _conv2d_tiles(m, n, x_zero_point is not None, capability)
    vec = 16 // out.element_size()
    launch_unfused(
        _conv2d_kernel, math.ceil(m / tiles.m) * math.ceil(n / tiles.n), x.device, x, weight, x_scale, x_zero_point,
        weight_scale, sums, fill, bias, out, out_scale, out_zero_point, m, n, k, height, width, channels,
        *out.shape[1:3], *taps, *stride, *padding, *dilation, int(x_scale.numel() > 1), int(weight_scale.numel() > 1),
        AS_HALF=capability < (8, 0), DTYPE=_DTYPES[out.dtype],
        VEC=vec if n % vec == 0 and out.data_ptr() % 16 == 0 else 1, **tiles.constants(),
    )  # fmt: skip
