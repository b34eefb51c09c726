"""Convolutions with int8 weights for inference: `Int8Conv2d`, `Int8Conv1d` and `Int8ConvTranspose2d`.

Inputs and results have torch's order of dimensions, `[B, C, H, W]` or `[B, C, L]`. In memory the results have the order
of channels_last, because the kernels read and write pixels with their channels next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import Int8Tensor
from .conversion import is_transposed, why_not_int8
from .int8 import Int8ProductLayer, Mode, Multiply, Steps, arranged, check_is_dense


def steps_of(conv: Any) -> Steps:
    """Return the arguments of `int8_conv2d` for a convolution. One over a line has the height 1."""
    if conv.padding == "valid":
        padding = (0,) * len(conv.kernel_size)
    elif conv.padding == "same":
        padding = tuple((size - 1) * step // 2 for size, step in zip(conv.kernel_size, conv.dilation, strict=True))
    else:
        padding = conv.padding
    of_a_line = {"stride": (1,), "padding": (0,), "dilation": (1,)}
    given = {"stride": conv.stride, "padding": padding, "dilation": conv.dilation}
    return {name: tuple((of_a_line[name] if len(value) == 1 else ()) + tuple(value)) for name, value in given.items()}


def apply_convolution(
    layer: Any,
    x: Tensor | Int8Tensor,
    weight: Tensor,
    scale: Tensor | None,
    multiply: Multiply,
    output_size: Sequence[int] | None = None,
) -> Tensor:
    """Apply an int8 layer or a layer of `prepare_qat_` to images or lines, with or without a batch.

    `weight` is codes or floats in the order of codes.
    """
    kind, dims = type(layer).__name__, weight.dim() - 2
    check_is_dense(kind, x)
    rank = len(x.shape)
    if rank not in (dims + 1, dims + 2) or x.shape[-dims - 1] != layer.in_channels:
        sizes = f"{layer.in_channels}, {('L', 'H, W')[dims - 1]}"
        raise ValueError(f"{kind}: x must have shape (B, {sizes}) or ({sizes}), got {tuple(x.shape)}")
    check_output_size(layer, x, output_size)
    images = arranged(x, partial(_images_of, dims=dims))
    if is_transposed(layer):
        result = _up_convolve(images, weight, scale, layer.bias, multiply)
    else:
        if dims == 1:
            weight, scale = weight.unsqueeze(1), None if scale is None else scale.unsqueeze(1)
        result = multiply(images, weight, scale, layer.bias, steps_of(layer))
    result = result.permute(0, 3, 1, 2)
    result = result.squeeze(2) if dims == 1 else result
    return result.squeeze(0) if rank == dims + 1 else result


def _images_of(x: Tensor, dims: int) -> Tensor:
    """Return [B, C, H, W] or [B, C, L], or either without B, as [B, H, W, C], a view."""
    if x.dim() == dims + 1:
        x = x.unsqueeze(0)
    return (x.unsqueeze(2) if dims == 1 else x).permute(0, 2, 3, 1)


def _up_convolve(
    images: Tensor | Int8Tensor, weight: Tensor, scale: Any, bias: Tensor | None, multiply: Multiply
) -> Tensor:
    """Apply a transposed convolution whose kernels do not overlap, by one product for all pixels of [B, H, W, C].

    A pixel `x` becomes a block of pixels: pixel (i, j) of the block is `weight[:, i, j] @ x + bias`. The result is
    [B, H * kernel height, W * kernel width, N].
    """
    outputs, height, width, channels = weight.shape
    taps = height * width
    batch, rows, columns, _ = images.shape
    pixels = arranged(images, lambda values: values.reshape(-1, channels))
    # With the outputs of a pixel next to each other, the blocks are moved in long pieces. With `weight` as it is, each
    # element would be moved alone, which takes a CPU 2 to 4 times as long (int8: 9 times or more). The copy of the
    # weight takes 1% of the time of the product.
    weight = weight.movedim(0, -2).reshape(taps * outputs, channels)
    scale = scale.flatten().repeat(taps).unsqueeze(1)
    result = multiply(pixels, weight, scale, None if bias is None else bias.repeat(taps))
    blocks = result.view(batch, rows, columns, height, width, outputs).transpose(2, 3)
    return blocks.reshape(batch, rows * height, columns * width, outputs)


def check_output_size(layer: Any, x: Tensor | Int8Tensor, output_size: Sequence[int] | None = None) -> None:
    """Raise ValueError if `output_size` is not the size of the result for `x`."""
    if output_size is None:
        return
    given = tuple(output_size)
    size = tuple(n * k for n, k in zip(x.shape[-2:], layer.kernel_size, strict=False))
    given = given[-2:] if len(given) == len(x.shape) else given
    if given != size or any(isinstance(n, float) for n in given):
        raise ValueError(
            f"{type(layer).__name__}: output_size must be {size}, the size of the input times that of the kernel, got "
            f"{tuple(output_size)}; leave the layer out with filter_fn"
        )


class _Int8Conv(Int8ProductLayer):
    _inputs = "in_channels times the size of the kernel"
    _operation = apply_convolution
    _float_class: Any
    groups, padding_mode = 1, "zeros"  # for code that reads them

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        mode: Mode = "weight_only",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # The float layer checks these arguments, and turns each into a tuple.
        steps: Steps = {"stride": stride, "padding": padding, "dilation": dilation}
        like = self._float_class(in_channels, out_channels, kernel_size, **steps, bias=False, device="meta")
        kind = type(self).__name__
        if why_not_int8(like):
            raise ValueError(
                f"{kind}: padding must add as many pixels at the end of a dimension as at its beginning, got 'same' "
                f"for a kernel of {like.kernel_size} with dilation {like.dilation}; pad the input yourself"
            )
        super().__init__((out_channels, *like.kernel_size, in_channels), bias, mode, device, dtype)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, like.kernel_size
        self.stride, self.padding, self.dilation = like.stride, like.padding, like.dilation

    @classmethod
    def from_conv(
        cls,
        conv: Any,
        mode: Mode = "weight_only",
        *,
        weight: Int8Tensor | None = None,
        input_scale: Tensor | None = None,
        input_zero_point: Tensor | None = None,
    ) -> Any:
        """Return an int8 layer with the weights and the bias of a float layer.

        The other arguments are those of `amp_kernels.nn.Int8Linear.from_linear`.

        Args:
            conv: A layer of the class of torch that this class replaces, for example `torch.nn.Conv2d` for
                `Int8Conv2d`. It must have `groups=1`, and `padding_mode="zeros"`. The kernels of a transposed
                convolution must not overlap; see `Int8ConvTranspose2d`.
            weight: Codes to share: symmetric, `[out_channels, *kernel_size, in_channels]`, with one scale for each
                output channel. If it is None, the weight of `conv` is quantized.

        Returns:
            The int8 layer, on the device and in the training mode of `conv`.

        Raises:
            TypeError: `conv` is of another class.
            ValueError: As `Int8Linear.from_linear`. Or an output sums more than 131071 products, and `mode` is not
                `"weight_only"`. Or `conv` has groups or another `padding_mode`, pads the ends of a dimension
                differently, or has kernels that overlap.

        Examples:
            >>> amp_kernels.nn.Int8Conv2d.from_conv(torch.nn.Conv2d(3, 8, 3, padding=1))
            Int8Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), mode=weight_only)
        """
        op, kind = f"{cls.__name__}.from_conv", cls._float_class
        if not isinstance(conv, kind):
            raise TypeError(f"{op}: conv must be a torch.nn.{kind.__name__}, got {type(conv).__name__}")
        steps = () if cls.is_transposed else (conv.stride, conv.padding, conv.dilation)
        made = cls._of_float(op, conv, mode, weight, (input_scale, input_zero_point), conv.kernel_size, *steps)
        cls._check_fits(op, conv)
        return made

    @classmethod
    def _check_fits(cls, op: str, conv: Any) -> None:
        if conv.groups != 1 or conv.padding_mode != "zeros":
            raise ValueError(
                f"{op}: conv must have groups=1 and padding_mode='zeros', got groups={conv.groups} and "
                f"padding_mode={conv.padding_mode!r}; leave it in floating point"
            )

    def extra_repr(self) -> str:
        """Return what `print(layer)` shows between the brackets."""
        shown = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        shown += [f"padding={self.padding!r}"] * any(steps_of(self)["padding"])
        shown += [f"dilation={self.dilation}"] * any(step != 1 for step in self.dilation)
        return ", ".join([*shown, *["bias=False"] * (self.bias is None), f"mode={self.mode}"])

    def forward(self, x: Tensor | Int8Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: `[B, in_channels, H, W]` (for `Int8Conv1d` `[B, in_channels, L]`), or the same without `B`; fp16, bf16
                or fp32. In the modes `"dynamic"` and `"static"` also an `Int8Tensor` of this shape with one scale.

        Returns:
            `[B, out_channels, H, W]`, with the sizes that `torch.nn.Conv2d` gives them, in channels_last memory.

        Raises:
            TypeError: As `Int8Linear`.
            ValueError: The shape of `x` does not fit.

        Examples:
            >>> layer = amp_kernels.nn.Int8Conv2d(3, 8, 3, mode="dynamic")
            >>> layer(torch.ones(2, 3, 10, 10)).shape
            torch.Size([2, 8, 8, 8])
        """
        return self._compute(x)


class Int8Conv2d(_Int8Conv):
    """`torch.nn.Conv2d` with symmetric int8 weights for inference, with one scale per output channel.

    | mode | what it computes |
    |---|---|
    | `"weight_only"` | `torch.nn.functional.conv2d` with the dequantized weight. It saves memory, not time. |
    | `"dynamic"` | `int8_conv2d` of codes. Each image is quantized, asymmetrically, by its own range. |
    | `"static"` | Like `"dynamic"`, with one range for all images. |

    During a call of a weight-only layer, `weight_codes * weight_scale` is in memory, rounded to the dtype of `x`.

    An input in channels_last memory is read in place. Results are in this memory too. An input in any other order costs
    a copy of its codes, one byte for each element.

    Attributes, dtypes, gradients, and NaN and inf in a static layer are as in `Int8Linear`. `weight_codes` is int8
    `[out_channels, kernel height, kernel width, in_channels]`, and `weight_scale` is fp32 `[out_channels, 1, 1, 1]`.

    The weights of a new layer are 0: load a state dict, or use `from_conv`. The other arguments are those of
    `torch.nn.Conv2d`.

    Args:
        padding: As in `torch.nn.Conv2d`. `"same"` is refused if it would pad the end of a dimension more than its
            beginning. Padding is always with zeros.
        mode: `"weight_only"`, `"dynamic"` or `"static"`.

    Raises:
        ValueError: `mode` is unknown, `padding` does not fit, or an output sums more than 131071 products and `mode` is
            not `"weight_only"`.

    Examples:
        >>> layer = amp_kernels.nn.Int8Conv2d.from_conv(torch.nn.Conv2d(16, 4, 3), mode="dynamic")
        >>> layer
        Int8Conv2d(16, 4, kernel_size=(3, 3), stride=(1, 1), mode=dynamic)
        >>> layer(torch.ones(2, 16, 8, 8)).shape, layer.weight.shape, layer.weight_codes.shape
        (torch.Size([2, 4, 6, 6]), torch.Size([4, 16, 3, 3]), torch.Size([4, 3, 3, 16]))
    """

    _float_class = nn.Conv2d


class Int8Conv1d(_Int8Conv):
    """`torch.nn.Conv1d` with symmetric int8 weights for inference, with one scale per output channel.

    Its arguments are those of `amp_kernels.nn.Int8Conv2d`. Everything is as there, for lines `[B, C, L]` in place of
    images. `weight_codes` is int8 `[out_channels, kernel size, in_channels]`, and `weight_scale` is fp32
    `[out_channels, 1, 1]`.

    Examples:
        >>> layer = amp_kernels.nn.Int8Conv1d.from_conv(torch.nn.Conv1d(16, 4, 3, padding="same"), mode="dynamic")
        >>> layer(torch.ones(2, 16, 50)).shape
        torch.Size([2, 4, 50])
    """

    _float_class = nn.Conv1d


class Int8ConvTranspose2d(_Int8Conv):
    """`torch.nn.ConvTranspose2d` with symmetric int8 weights, if its stride is the size of its kernel.

    Such a layer, for example an up-convolution of a U-Net, turns each pixel into a block of pixels of its own. So its
    result is one product of the pixels by a matrix `[in_channels, kernel height * kernel width * out_channels]`, put
    into another order. All other transposed convolutions stay in floating point.

    The modes are those of `Int8Linear`, with the pixels as rows. In the mode `"dynamic"` each pixel is quantized by the
    range of its channels.

    There is one scale per output channel. A call copies the codes of the weight into the order of the result. Images
    that are not channels_last are copied before they are quantized. Anything else is as in `Int8Conv2d`. The arguments
    are those of `amp_kernels.nn.Int8Conv2d`, except those for steps. The size of the kernel is the stride, too.

    The weights of a new layer are 0: load a state dict, or use `from_conv`.

    Raises:
        ValueError: `mode` is unknown, or `in_channels` is above 131071 and `mode` is not `"weight_only"`.

    Examples:
        >>> layer = amp_kernels.nn.Int8ConvTranspose2d.from_conv(torch.nn.ConvTranspose2d(16, 4, 2, 2), mode="dynamic")
        >>> layer
        Int8ConvTranspose2d(16, 4, kernel_size=(2, 2), stride=(2, 2), mode=dynamic)
        >>> layer(torch.ones(2, 16, 8, 8)).shape, layer.weight.shape, layer.weight_codes.shape
        (torch.Size([2, 4, 16, 16]), torch.Size([16, 4, 2, 2]), torch.Size([4, 2, 2, 16]))
    """

    _float_class: Any = nn.ConvTranspose2d
    _inputs = "in_channels"
    is_transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        bias: bool = True,
        mode: Mode = "weight_only",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, kernel_size, bias=bias, mode=mode, device=device, dtype=dtype
        )
        self.output_padding = (0, 0)

    @classmethod
    def _check_fits(cls, op: str, conv: Any) -> None:
        if why_not_int8(conv):
            given = ("stride", "padding", "output_padding", "dilation", "groups")
            raise ValueError(
                f"{op}: conv must have a stride equal to the size of its kernel {tuple(conv.weight.shape[2:])}, no "
                "padding, no dilation and groups=1, got "
                + ", ".join(f"{name}={getattr(conv, name)}" for name in given)
                + "; leave it in floating point"
            )

    def forward(self, x: Tensor | Int8Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Apply the layer.

        Args:
            x: As in `Int8Conv2d`.
            output_size: None, or the size of the result, as in `torch.nn.ConvTranspose2d`. No other size is possible.

        Returns:
            `[B, out_channels, H * kernel height, W * kernel width]` in channels_last memory.

        Raises:
            TypeError: As `Int8Conv2d`.
            ValueError: As `Int8Conv2d`, or `output_size` is not the size of the result.

        Examples:
            >>> layer = amp_kernels.nn.Int8ConvTranspose2d(8, 3, 2, mode="dynamic")
            >>> layer(torch.ones(2, 8, 10, 10)).shape
            torch.Size([2, 3, 20, 20])
        """
        return self._compute(x, output_size=output_size)
