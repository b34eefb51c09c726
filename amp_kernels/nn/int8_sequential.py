"""`Int8Sequential`: an `nn.Sequential` in which static int8 layers pass codes to each other."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import torch_private
from ..functional import Int8Tensor
from .conversion import has_hooks
from .int8 import Int8Linear, compute_dtype
from .int8_conv import Int8Conv1d, Int8Conv2d, Int8ConvTranspose2d


class Int8Sequential(nn.Sequential):
    """`nn.Sequential` whose static int8 layers pass codes to the next static int8 layer, inside one call of it.

    Between the two there may be layers of the classes `nn.ReLU`, `nn.MaxPool2d`, `nn.Flatten` and `nn.Identity`. A
    layer with hooks gets floats and returns floats. So does a layer whose input or bias needs a gradient. So do all
    layers in transforms of `torch.func`, and while torch has hooks for all modules. In fp32, results have the same bits
    with floats and with codes.
    """

    # Instances of these classes pass codes. A subclass of them may compute something else.
    products: ClassVar[set[type[nn.Module]]] = {Int8Linear, Int8Conv1d, Int8Conv2d, Int8ConvTranspose2d}

    def forward(self, input: Any) -> Any:
        """Call the layers one after the other, as `nn.Sequential` does."""
        layers: list[Any] = list(self)
        scales = self._scales(layers, input)
        x, dtype = input, None  # if `x` is codes, `dtype` is the dtype of the floats before them
        position = 0
        while position < len(layers):
            layer = layers[position]
            end = _receiver(layers, scales, position)
            if end is None or _needs_gradients(x):
                x = layer(x) if dtype is None else layer._compute(x, dtype=dtype)
                dtype, position = None, position + 1
                continue
            between = layers[position + 1 : end]
            dtype = compute_dtype(x) if isinstance(x, Tensor) else dtype
            x = layer._compute(x, (scales[end], layers[end].input_zero_point), dtype)
            for each in between:
                if type(each) in (nn.ReLU, nn.MaxPool2d, nn.Flatten):
                    x = layer._on_codes(each, x)
            position = end
        return x

    def _scales(self, layers: list[Any], input: Any) -> list[Tensor | None]:
        """Return the scale of the codes that each layer takes. It is None if the layer must be called with floats."""
        if (
            not isinstance(input, Tensor | Int8Tensor)  # torch.fx traces with something else
            or torch_private.is_transformed()
            or torch_private.has_global_hooks()
        ):
            return [None] * len(layers)
        return [
            layer.input_scale
            if type(layer) in self.products and not has_hooks(layer) and not _needs_gradients(layer.bias)
            else None
            for layer in layers
        ]


def _needs_gradients(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def _receiver(layers: list[Any], scales: list[Tensor | None], position: int) -> int | None:
    """Return the position of the layer that gets the codes of the one at `position`, or None."""
    if scales[position] is not None:
        for end in range(position + 1, len(layers)):
            if scales[end] is not None:
                return end
            if not _lets_codes_pass(layers[end]):
                break
    return None


def _lets_codes_pass(layer: Any) -> bool:
    """Return whether a layer without a weight computes the same from codes as from the numbers they stand for."""
    kind = type(layer)
    if kind is nn.MaxPool2d and layer.return_indices:
        return False
    is_known = kind in (nn.ReLU, nn.MaxPool2d, nn.Flatten) or kind.forward is nn.Identity.forward
    return is_known and not has_hooks(layer)
