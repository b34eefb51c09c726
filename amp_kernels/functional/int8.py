"""Linear int8 codes of tensors, and products of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import Tensor

from .. import torch_private
from ..ops import int8 as ops
from ..ops.checks import check_are_tensors, check_are_tensors_or_none
from ..ops.library import call


@dataclass(frozen=True)
class Int8Tensor:
    """A quantized tensor: ``(values - zero_point) * scale``, with all that undoes it.

    Attributes:
        values: int8 codes, of the shape of what was quantized.
        scale: fp32, one for each group: its shape has 1 in every reduced dimension, or with `block_size` the number of
            blocks last. NaN for a group that held NaN or inf.
        zero_point: int32 of scale's shape, or None for symmetric codes.
        dim: the dimensions that were reduced; None if the tensor is one group, or with `block_size`.
        block_size: the length of a group along the last dimension; None if whole dimensions were reduced.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    dim: tuple[int, ...] | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        values, scale, zero_point = self.values, self.scale, self.zero_point
        # Checks by name cost 1.5 us, and a product of int8 layers makes four of these objects.
        if type(values) is type(scale) is Tensor and (zero_point is None or type(zero_point) is Tensor):
            return
        check_are_tensors("Int8Tensor", values=values, scale=scale)
        check_are_tensors_or_none("Int8Tensor", zero_point=zero_point)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(t.nbytes for t in (self.values, self.scale, self.zero_point) if t is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `dequantize_int8`."""
        return dequantize_int8(self, dtype)

    def to(self, device: torch.device | str | int) -> Int8Tensor:
        """The same codes, scales and zero points on `device`.

        Raises:
            TypeError: a dtype, which codes, scales and zero points have their own of.
        """
        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(f"Int8Tensor.to: device must be a device, got {device!r}; dequantize(dtype) makes floats")
        zero_point = None if self.zero_point is None else self.zero_point.to(device)
        return Int8Tensor(self.values.to(device), self.scale.to(device), zero_point, self.dim, self.block_size)

    # A part of a tensor would need its part of the scales, and `==` of tensors is by element.
    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "Int8Tensor: what is indexed must be a Tensor, got an Int8Tensor; index dequantize(), or values and scale"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Int8Tensor):
            return NotImplemented
        if other is self:
            return True
        raise TypeError(
            "Int8Tensor: what == compares must be Tensors, got Int8Tensors; compare values, scale and zero_point"
        )

    __hash__ = object.__hash__

    def t(self) -> Int8Tensor:
        """The transpose of a matrix that was quantized as a whole or by `dim`; a view."""
        if self.values.dim() != 2 or self.block_size is not None:
            raise ValueError(
                f"Int8Tensor.t: values must be a matrix without blocks, got {self.values.dim()} dimensions and "
                f"block_size {self.block_size}"
            )
        scale = self.scale.t() if self.scale.dim() == 2 else self.scale
        zero_point = (
            self.zero_point.t() if self.zero_point is not None and self.zero_point.dim() == 2 else self.zero_point
        )
        dim = None if self.dim is None else tuple(1 - d % 2 for d in self.dim)
        return Int8Tensor(self.values.t(), scale, zero_point, dim)


torch.serialization.add_safe_globals([Int8Tensor])  # torch.load(weights_only=True) makes one


def quantize_int8(
    x: Tensor,
    *,
    dim: int | Sequence[int] | None = None,
    block_size: int | None = None,
    symmetric: bool = True,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Int8Tensor:
    """Linear int8 codes, bit for bit the same on every backend. Not differentiable; see `fake_quantize_int8`.

    In fp32 IEEE, for each group:

    - symmetric: ``scale = absmax / 127``, codes ``clamp(rint(x * (1 / scale)), -127, 127)``
    - asymmetric, the range widened to contain 0: ``scale = max / 255 - min / 255``,
      ``zero_point = clamp(rint(-128 - min * (1 / scale)), -128, 127)``, codes
      ``clamp(rint(x * (1 / scale)) + zero_point, -128, 127)``
    - a group that holds NaN or inf gets the scale NaN, one too small for ``1 / scale`` the scale 1; both have codes 0

    Args:
        x: fp16, bf16 or fp32, of any shape and strides. Codes keep x's memory layout where it is dense; in blocks and
            with stochastic rounding they are row-major. x is read in place, unless its reduced dimensions lie between
            the others in more than two stretches, as of [A, B, C, D] with ``dim=(0, 2)``: then it is copied with the
            reduced ones innermost, and codes keep that order.
        dim: what is reduced, as in ``torch.amax(x, dim, keepdim=True)``: None the whole tensor, -1 each row or token,
            0 of a matrix each column.
        block_size: groups of so many neighbours in the last dimension, the last one perhaps shorter.
        symmetric: without a zero point; ignored when `scale` is given.
        rounding: ``"nearest"`` to nearest even, or ``"stochastic"``: ``floor(x * (1 / scale) + u)`` in place of rint, u
            uniform in [0, 1) from Philox4x32-10 by the element's row-major index and the seed.
        seed: of stochastic rounding; None draws one from torch's default generator.
        scale: fp32, of one element or with 1 in every reduced dimension: makes the codes in one pass, without a look at
            the range. inf then saturates and NaN gets the zero point.
        zero_point: int32 of scale's shape, codes themselves (not checked), only beside `scale`; None makes symmetric
            codes.

    Raises:
        TypeError, ValueError, IndexError: a dtype, a shape or `dim` does not fit.
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"quantize_int8: rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if rounding == "stochastic":
        seed = _signed(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)
    elif seed is not None:
        raise ValueError("quantize_int8: seed must be None without stochastic rounding; pass rounding='stochastic'")
    dims = _dims(dim)
    _check_is_bool(symmetric)
    values, *own = call(ops.quantize_int8, x, scale, zero_point, dims, block_size, symmetric, seed)
    if scale is None:
        scale, zero_point = own[0], None if symmetric else own[1]
    elif block_size is None and dims is None and scale.numel() > 1:
        dims = tuple(d for d, size in enumerate(scale.shape) if size == 1)
    return Int8Tensor(values, scale, zero_point, None if block_size is not None else dims, block_size)


def dequantize_int8(q: Int8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``(values - zero_point) * scale`` in fp32, rounded once to `dtype` (fp32, fp16 or bf16)."""
    _check_is_quantized("dequantize_int8", "q", q)
    return call(ops.dequantize_int8, q.values, q.scale, q.zero_point, q.block_size, dtype)


def fake_quantize_int8(
    x: Tensor,
    *,
    dim: int | Sequence[int] | None = None,
    block_size: int | None = None,
    symmetric: bool = True,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """``quantize_int8(x, ...).dequantize(x.dtype)`` in one pass, for quantization-aware training.

    The gradient passes straight through where the code was inside the range before clamping and is 0 elsewhere
    (Bengio et al. 2013; Jacob et al. 2018); it is computed from `x` again, so that no mask is kept. NaN stays NaN.

    Args:
        x, dim, block_size, symmetric, scale, zero_point: as in `quantize_int8`.

    Returns:
        A tensor of x's shape and dtype.
    """
    _check_is_bool(symmetric)
    if not torch_private.is_transformed():
        return call(ops.fake_quantize_int8, x, scale, zero_point, _dims(dim), block_size, symmetric)[0]
    # Autograd functions have no rule for transforms: the same value and derivative by torch's operators.
    values, *own = call(ops.fake_quantize_int8, x.detach(), scale, zero_point, _dims(dim), block_size, symmetric)
    if scale is None:
        scale, zero_point = own[0], None if symmetric else own[1]
    return values + ops.straight_through(x - x.detach(), x, scale, zero_point, block_size)


def int8_matmul(
    a: Int8Tensor,
    b: Int8Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """``a.dequantize() @ b.dequantize() + bias`` from the codes: the sum of products is an exact integer.

    Then in fp32, each operation rounded once: ``sum * (a.scale * b.scale) + bias``. Zero points are corrected in 64-bit
    integers. Any M, K and N, and any strides of the codes. Not differentiable.

    Args:
        a: [M, K], quantized as a whole or by row (``dim=-1``).
        b: [K, N], quantized as a whole or by column (``dim=0``). Fastest if it is the transpose (`Int8Tensor.t`) of a
            contiguous [N, K].
        bias: fp32 [N] or None.
        out_dtype: fp32, fp16 or bf16.
        out_scale, out_zero_point: one element each: the result is quantized by them, for the next layer.

    Returns:
        [M, N] of `out_dtype`, or int8 codes if `out_scale` is given.

    Raises:
        TypeError, ValueError: shapes or dtypes do not fit, or K is over 131071, beyond which int32 may overflow.
    """
    for name, operand in (("a", a), ("b", b)):
        _check_is_quantized("int8_matmul", name, operand)
        if operand.block_size is not None:
            raise ValueError(
                f"int8_matmul: {name} must not be quantized in blocks, got block_size {operand.block_size}"
            )
    return call(
        ops.int8_matmul, a.values, b.values, a.scale, a.zero_point, b.scale, b.zero_point, bias, out_dtype, out_scale,
        out_zero_point,
    )  # fmt: skip


def _dims(dim: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if dim is None or type(dim) is int:
        return None if dim is None else (dim,)
    try:
        return tuple(map(operator.index, dim if isinstance(dim, Sequence) else [dim])) or None
    except TypeError:
        raise TypeError(f"quantize_int8: dim must be an int, several, or None, got {dim!r}") from None


def _check_is_bool(symmetric: object) -> None:
    if type(symmetric) is not bool:  # torch's dispatcher makes one of None, too
        raise TypeError(f"quantize_int8: symmetric must be a bool, got {symmetric!r}")


def _check_is_quantized(op: str, name: str, q: object) -> None:
    if not isinstance(q, Int8Tensor):
        raise TypeError(f"{op}: {name} must be an Int8Tensor, got {type(q).__name__}; quantize it first")


def _signed(seed: int) -> int:
    """The same 64 bits as an int64."""
    if not isinstance(seed, (int, torch.SymInt)):  # of a symbolic size the compiler has no index
        if not hasattr(seed, "__index__"):
            raise TypeError(f"quantize_int8: seed must be an int or None, got {seed!r}")
        seed = operator.index(seed)  # numpy's integers overflow in the sum
    return (seed + 2**63) % 2**64 - 2**63
