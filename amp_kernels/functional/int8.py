"""int8 quantization of tensors by a scale and a zero point, and matrix products of the int8 codes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import Tensor

from .. import torch_private
from ..ops import int8 as ops
from ..ops.checks import check_are_tensors
from ..ops.library import call


@dataclass(frozen=True)
class Int8Tensor:
    """A tensor in int8 codes, with the scales and zero points that turn the codes back into numbers.

    An element is `(values - zero_point) * scale` (Jacob et al. 2018). The elements that share a scale are a group: all
    of the tensor, a block of its last dimension, or the elements whose indices differ only in certain dimensions, which
    are called reduced.

    An `Int8Tensor` can be saved by `torch.save` and loaded by `torch.load(weights_only=True)`. Indexing raises a
    TypeError. So does `==` with another `Int8Tensor`.

    Attributes:
        values: int8 codes, in the shape of the quantized tensor.
        scale: fp32 tensor with one scale per group. It has size 1 in every reduced dimension. With a `block_size`, the
            size of its last dimension is the number of blocks. If the scales were computed from the range of the
            tensor, the scale of a group that held NaN or inf is NaN.
        zero_point: int32 in the shape of `scale`, or None for symmetric codes.
        dim: The dimensions that were reduced. None stands for all dimensions, or for blocks if there is a `block_size`.
        block_size: Length of a group along the last dimension. None if there are no blocks.

    Examples:
        >>> q = amp_kernels.quantize_int8(torch.tensor([[-127.0, 64.0], [0.5, 1.27]]), dim=-1)
        >>> q.values.tolist(), q.scale.shape, q.nbytes
        ([[-127, 64], [50, 127]], torch.Size([2, 1]), 12)
        >>> q.t().dim, q.to("cpu").dequantize(torch.float16)[0]
        ((0,), tensor([-127.,   64.], dtype=torch.float16))
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    dim: tuple[int, ...] | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        values, scale, zero_point = self.values, self.scale, self.zero_point
        # If all are plain tensors, the usual case, these checks are skipped. They take 1.5 us, and an int8 layer makes
        # three to five objects of this class for one product.
        if not (type(values) is type(scale) is Tensor and (zero_point is None or type(zero_point) is Tensor)):
            check_are_tensors("Int8Tensor", values=values, scale=scale)
            if zero_point is not None:
                check_are_tensors("Int8Tensor", zero_point=zero_point)
        if self.block_size is not None:
            ops.check_blocks("Int8Tensor", values, self.block_size)
        if self.dim is not None:
            if isinstance(self.dim, int):
                object.__setattr__(self, "dim", (self.dim,))
            n = values.dim()
            for d in self.dim if isinstance(self.dim, tuple) else [self.dim]:
                if not isinstance(d, int) or not -n <= d < n:
                    raise ValueError(
                        f"Int8Tensor: dim must be None or a tuple of dimensions from {-n} to {n - 1}, got {self.dim!r}"
                    )

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a copy or a saved object, whose fields may be anything."""
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def shape(self) -> torch.Size:
        """The shape of the quantized tensor."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(t.nbytes for t in (self.values, self.scale, self.zero_point) if t is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers that the codes stand for; this takes the arguments of `amp_kernels.dequantize_int8`.

        Returns:
            A tensor of this dtype, in the shape of `values`.
        """
        return dequantize_int8(self, dtype)

    def to(self, device: torch.device | str | int) -> Int8Tensor:
        """Copy codes, scales and zero points to a device.

        Args:
            device: The device. Codes, scales and zero points keep their dtypes.

        Returns:
            The `Int8Tensor` on the device.

        Raises:
            TypeError: `device` is not a device, for example a dtype.
        """
        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(f"Int8Tensor.to: device must be a device, got {device!r}; use dequantize(dtype) for floats")
        zero_point = None if self.zero_point is None else self.zero_point.to(device)
        return Int8Tensor(self.values.to(device), self.scale.to(device), zero_point, self.dim, self.block_size)

    # Indexing is not supported, because it would have to select the matching scales too. `==` is not supported, because
    # `==` of two tensors compares element by element, and so returns no single bool.
    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError("Int8Tensor: indexing is not supported; index dequantize(), or values and scale")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Int8Tensor):
            return NotImplemented
        if other is self:
            return True
        raise TypeError("Int8Tensor: == is not supported; compare values, scale and zero_point")

    __hash__ = object.__hash__

    def t(self) -> Int8Tensor:
        """Return the transpose of a quantized matrix, as a view.

        Returns:
            An `Int8Tensor` of shape `[N, M]` for one of shape `[M, N]`.

        Raises:
            ValueError: The codes are not a matrix, or are quantized in blocks.
        """
        if self.values.dim() != 2 or self.block_size is not None:
            raise ValueError(
                f"Int8Tensor.t: values must have 2 dimensions and block_size must be None, got {self.values.dim()} "
                f"dimensions and block_size {self.block_size}"
            )
        scale, zero_point = self.scale, self.zero_point
        scale = scale.t() if scale.dim() == 2 else scale
        zero_point = zero_point.t() if zero_point is not None and zero_point.dim() == 2 else zero_point
        dim = None if self.dim is None else tuple(1 - d % 2 for d in self.dim)
        return Int8Tensor(self.values.t(), scale, zero_point, dim)


torch.serialization.add_safe_globals([Int8Tensor])  # torch.load(weights_only=True) loads only registered classes


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
    """Quantize a tensor to int8 codes.

    Codes and scales have the same bits on every backend. Not differentiable; see `fake_quantize_int8`.

    The elements that share a scale are a group. The scale, the zero point and the codes of a group are computed in fp32
    IEEE arithmetic (Jacob et al. 2018; Wu et al. 2020):

    - Symmetric: `scale = absmax / 127` and codes `clamp(rint(x * (1 / scale)), -127, 127)`.
    - Asymmetric: the range from `min` to `max` of the group is widened to contain 0. `scale = max / 255 - min / 255`,
      `zero_point = clamp(rint(-128 - min * (1 / scale)), -128, 127)` and codes `clamp(rint(x * (1 / scale)) +
      zero_point, -128, 127)`.
    - Stochastic rounding: in the codes, `floor(x * (1 / scale) + u)` replaces `rint(x * (1 / scale))`. `u` is uniform
      in [0, 1). It is computed from the seed and the element's row-major index by Philox4x32-10 (Salmon et al. 2011).
    - A group that holds NaN or inf gets codes 0 and the scale NaN. A group whose `1 / scale` is not finite gets codes 0
      and the scale 1.

    `x` is dense if its elements fill one range of memory, in any order of dimensions. A dense `x` is read in place if
    its dimensions, from the outermost to the innermost in memory, are first kept ones, then those in `dim`, then kept
    ones. Any of these three parts may be missing. That covers a scale for each row or column of a matrix, for each
    channel of `[B, T, C]`, for each column of every expert in `[E, N, K]`, for each output channel of a channels_last
    weight, and for each token of a `[B, H, T, D]` view of `[B, T, H, D]` memory. With `block_size` a dense `x` is read
    in place if its last dimension is the innermost in memory.

    Every other `x` is copied first, for example a slice with gaps, or NCHW images with a scale for each channel. The
    copy takes as many bytes as `x`, and is freed when the call returns. If `x` is dense, the codes are copied too, into
    memory with x's strides. Stochastic rounding copies every `x` that is not row-major.

    Args:
        x: fp16, bf16 or fp32, of any shape and strides. If `x` is dense, the codes have its strides. Otherwise they are
            row-major.
        dim: The dimensions to reduce, as in `torch.amax(x, dim, keepdim=True)`. Elements whose indices differ only in
            these dimensions share a scale. None makes one scale for the whole tensor, -1 one per row or token, and 0
            one per column of a matrix.
        block_size: Length of a group along the last dimension. The last group may be shorter.
        symmetric: Make codes without a zero point. Ignored if `scale` is given.
        rounding: `"nearest"` (ties to even) or `"stochastic"`.
        seed: Seed of stochastic rounding. None draws one from torch's default generator.
        scale: fp32, of one element or with size 1 in every reduced dimension. If it is given, `x` is read only once,
            because its range is not measured. The code of inf is then the largest one, that of -inf the smallest one,
            and that of NaN the zero point (0 for symmetric codes).
        zero_point: int32 in the shape of `scale`. It may be given only together with `scale`. If only `scale` is given,
            the codes are symmetric. The values must be from -128 to 127, which is not checked.

    Returns:
        An `Int8Tensor` of x's shape.

    Raises:
        TypeError: A dtype or a type does not fit.
        ValueError: A shape does not fit, or two arguments exclude each other.
        IndexError: `dim` is out of range.

    Examples:
        >>> q = amp_kernels.quantize_int8(torch.tensor([[0.0, 2.55], [-1.0, 1.55]]), dim=-1, symmetric=False)
        >>> q.values.tolist(), q.zero_point.tolist()
        ([[-128, 127], [-128, 127]], [[-128], [-28]])
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"quantize_int8: rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if rounding == "stochastic":
        seed = _signed(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)
    elif seed is not None:
        raise ValueError("quantize_int8: seed must be None with rounding='nearest'; pass rounding='stochastic'")
    dims = _dims("quantize_int8", dim)
    _check_is_bool("quantize_int8", symmetric)
    values, *own = call(ops.quantize_int8, x, scale, zero_point, dims, block_size, symmetric, seed)
    if scale is None:
        scale, zero_point = own[0], None if symmetric else own[1]
    elif block_size is None and dims is None and scale.numel() > 1:
        dims = tuple(d for d, size in enumerate(scale.shape) if size == 1)
    return Int8Tensor(values, scale, zero_point, None if block_size is not None else dims, block_size)


def dequantize_int8(q: Int8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers that int8 codes stand for.

    The formula is `(values - zero_point) * scale`, in fp32, rounded once to `dtype`.

    Args:
        q: The codes with their scales and zero points.
        dtype: fp32, fp16 or bf16.

    Returns:
        A tensor of this dtype, in q's shape. If the codes are dense, it has their strides. Otherwise it is row-major.

    Raises:
        TypeError: `q` is not an `Int8Tensor`, or `dtype` is not one of the three.

    Examples:
        >>> amp_kernels.dequantize_int8(amp_kernels.quantize_int8(torch.tensor([-127.0, 0.4, 63.0])))
        tensor([-127.,    0.,   63.])
    """
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
    """Quantize a tensor to int8 codes and dequantize it again, with straight-through gradients.

    The result is `quantize_int8(x, ...).dequantize(x.dtype)` in one pass, for quantization-aware training. The gradient
    passes through unchanged. If `scale` is given, it is 0 where the code had to be clamped (Bengio et al. 2013; Jacob
    et al. 2018). The backward pass then computes the codes again from `x`, so no mask is kept.

    The result differs from `quantize_int8(x, ...).dequantize(x.dtype)` in one case. If `scale` is given,
    `quantize_int8` gives NaN the same code as 0, but here NaN stays NaN.

    The errors and the other arguments are those of `amp_kernels.quantize_int8`.

    Args:
        x: fp16, bf16 or fp32, of any shape and strides.

    Returns:
        A tensor of x's shape and dtype. If `x` is dense, it has x's strides. Otherwise it is row-major.

    Examples:
        >>> x = torch.tensor([0.4, 1.0, 200.0], requires_grad=True)
        >>> y = amp_kernels.fake_quantize_int8(x, scale=torch.ones(1))
        >>> y.sum().backward()
        >>> y.detach(), x.grad
        (tensor([  0.,   1., 127.]), tensor([1., 1., 0.]))
    """
    dims = _dims("fake_quantize_int8", dim)
    _check_is_bool("fake_quantize_int8", symmetric)
    if not torch_private.is_transformed():
        return call(ops.fake_quantize_int8, x, scale, zero_point, dims, block_size, symmetric)[0]
    # In transforms (`torch.func`) and in forward-mode differentiation, the autograd function of the operator fails, or
    # returns a derivative of 0. So a sum of two terms is returned. The first term is the operator's result, without a
    # derivative. The value of the second term is 0. Torch's operators compute this term from `x`, so it has a
    # derivative: the one that the autograd function returns outside of transforms and forward mode.
    values = call(ops.fake_quantize_int8, x.detach(), scale, zero_point, dims, block_size, symmetric)[0]
    zeros = x - x.detach()
    return values + (zeros if scale is None else ops.straight_through(zeros, x, scale, zero_point, block_size))


def int8_matmul(
    a: Int8Tensor,
    b: Int8Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """Multiply two quantized matrices: sum the products of their codes exactly, then apply the scales.

    The result is `a.dequantize() @ b.dequantize() + bias`, computed from the codes. The sum of the products of codes is
    an exact integer. The correction of this sum for zero points from -128 to 127 is exact, too. Then
    `sum * (a.scale * b.scale) + bias` is computed in fp32, and each of its operations rounds once (Jacob et al. 2018).
    Not differentiable.

    On a GPU a CUDA C++ kernel multiplies, with one exception. A Triton kernel, which returns the same bits, multiplies
    if the compute capability is 9.0, Triton is installed, `M * N * K` is above `2**34`, and both `M` and `N` are above
    16. On such a GPU it also takes less time for smaller products of 64 rows or more, but more time on the host. So
    `use_backend("triton")` makes these products faster inside a CUDA graph, which saves the time on the host.

    The CUDA C++ kernel reads an operand in place if `K` is a multiple of 16, and if the rows of `a` (or the columns of
    `b`) are contiguous and begin at multiples of 16 bytes. Otherwise the operand is copied first.

    Args:
        a: `[M, K]`, with one scale or one per row (`dim=-1`). Any strides.
        b: `[K, N]`, with one scale or one per column (`dim=0`). Any strides; fastest if it is the transpose
            (`Int8Tensor.t`) of a contiguous `[N, K]`.
        bias: fp32 `[N]`, or None.
        out_dtype: fp32, fp16 or bf16.
        out_scale: One fp32 element. The result is then quantized with it, for the next layer.
        out_zero_point: One int32 element. It may be given only together with `out_scale`.

    Returns:
        `[M, N]` in `out_dtype`, or int8 codes if `out_scale` is given.

    Raises:
        TypeError: A dtype does not fit, or an operand is not an `Int8Tensor`.
        ValueError: A shape does not fit, an operand is quantized in blocks, or K is above 131071. For a larger K,
            the int32 sum of K products could overflow.

    Examples:
        >>> a = amp_kernels.quantize_int8(torch.tensor([[127.0, 2.0]]), dim=-1)
        >>> b = amp_kernels.quantize_int8(torch.tensor([[1.0], [127.0]]), dim=0)
        >>> amp_kernels.int8_matmul(a, b)
        tensor([[381.]])
    """
    _check_operands("int8_matmul", a=a, b=b)
    return call(
        ops.int8_matmul, a.values, b.values, a.scale, a.zero_point, b.scale, b.zero_point, bias, out_dtype, out_scale,
        out_zero_point,
    )  # fmt: skip


def int8_conv2d(
    x: Int8Tensor,
    weight: Int8Tensor,
    *,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    out_dtype: torch.dtype = torch.float32,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """Convolve quantized images: sum the products of their codes exactly, then apply the scales.

    Dimensions are in the order of channels_last memory: batch, height, width, channels. Codes for an NCHW tensor of
    this memory format are `quantize_int8(x.permute(0, 2, 3, 1))`, which copies nothing. For a line of pixels,
    `[B, L, C]`, give `x` and `weight` a height of 1.

    Each output pixel is a row of `int8_matmul`: the codes of `x` under the kernel, times the codes of the weight. So
    sums are exact, and results are rounded as `int8_matmul` rounds them (Jacob et al. 2018). Padding has the code that
    stands for 0, which is the zero point, or 0 for symmetric codes. A zero point that is not from -128 to 127 is
    clamped to this range first. The rows are not stored. Not differentiable.

    The other errors and the other arguments are those of `amp_kernels.int8_matmul`.

    Args:
        x: `[B, H, W, C]`, with one scale or one per image (`dim=(1, 2, 3)`). If the codes are not row-major, they are
            copied first. The CUDA C++ kernel also copies codes whose `C` is not a multiple of 16.
        weight: `[N, kernel height, kernel width, C]`, symmetric, with one scale or one per output channel
            (`dim=(1, 2, 3)`).
        stride: One int, or one each for height and width.
        padding: The same. At each end, this many pixels are added.
        dilation: The same.

    Returns:
        Row-major `[B, output height, output width, N]` in `out_dtype`, or int8 codes if `out_scale` is given. The
            output sizes are those of `torch.nn.Conv2d`.

    Raises:
        ValueError: The weight has a zero point, the kernel is larger than the padded image, or `x` has 2^32 pixels or
            more. Or the weight has more than 131071 elements for each output channel, whose sum could overflow.

    Examples:
        >>> image = torch.tensor([[1.0, 2.0, 127.0]]).view(1, 1, 3, 1)
        >>> x = amp_kernels.quantize_int8(image, dim=(1, 2, 3))
        >>> weight = amp_kernels.quantize_int8(torch.ones(1, 1, 3, 1), scale=torch.ones(1))
        >>> amp_kernels.int8_conv2d(x, weight, padding=(0, 1)).flatten()
        tensor([  3., 130., 129.])
    """
    _check_operands("int8_conv2d", x=x, weight=weight)
    if weight.zero_point is not None:
        raise ValueError("int8_conv2d: weight must be symmetric, got a zero point; quantize it with symmetric=True")
    return call(
        ops.int8_conv2d, x.values, weight.values, x.scale, x.zero_point, weight.scale, bias,
        _pair("stride", stride), _pair("padding", padding), _pair("dilation", dilation), out_dtype, out_scale,
        out_zero_point,
    )  # fmt: skip


def _pair(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    values = value if isinstance(value, Sequence) else [value]
    try:
        return tuple(map(operator.index, [*values, *values] if len(values) == 1 else values))
    except TypeError:
        raise TypeError(f"int8_conv2d: {name} must be an int or two ints, got {value!r}") from None


def _dims(op: str, dim: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if dim is None or type(dim) is int:
        return None if dim is None else (dim,)
    try:
        return tuple(map(operator.index, dim if isinstance(dim, Sequence) else [dim])) or None
    except TypeError:
        raise TypeError(f"{op}: dim must be an int, a sequence of ints, or None, got {dim!r}") from None


def _check_is_bool(op: str, symmetric: object) -> None:
    if type(symmetric) is not bool:  # torch's dispatcher would convert None or a float to a bool
        raise TypeError(f"{op}: symmetric must be a bool, got {symmetric!r}")


def _check_is_quantized(op: str, name: str, q: object) -> None:
    if not isinstance(q, Int8Tensor):
        raise TypeError(f"{op}: {name} must be an Int8Tensor, got {type(q).__name__}; quantize it first")


def _check_operands(op: str, **operands: Int8Tensor) -> None:
    for name, q in operands.items():
        _check_is_quantized(op, name, q)
        if q.block_size is not None:
            raise ValueError(f"{op}: {name} must not be quantized in blocks, got block_size {q.block_size}")


def _signed(seed: int) -> int:
    """Return the int64 that has the same 64 bits as `seed`."""
    if not isinstance(seed, (int, torch.SymInt)):  # the compiler cannot trace operator.index of a symbolic size
        if not hasattr(seed, "__index__"):
            raise TypeError(f"quantize_int8: seed must be an int or None, got {seed!r}")
        seed = operator.index(seed)  # a numpy integer would overflow in the sum below
    return (seed + 2**63) % 2**64 - 2**63
