"""Layers: `Linear` for 16-bit weights of any size, and layers with int8 weights for inference.

The int8 layers are `Int8Linear`, `Int8Conv2d`, `Int8Conv1d`, `Int8ConvTranspose2d` and `Int8Embedding`. The
projections of a `MultiheadAttention` can be int8 layers.
"""

from .attention import MultiheadAttention
from .int8 import Int8Embedding, Int8Linear
from .int8_conv import Int8Conv1d, Int8Conv2d, Int8ConvTranspose2d
from .linear import Linear, convert_linear_

__all__ = [
    "Int8Conv1d",
    "Int8Conv2d",
    "Int8ConvTranspose2d",
    "Int8Embedding",
    "Int8Linear",
    "Linear",
    "MultiheadAttention",
    "convert_linear_",
]

for _layer in (
    Int8Conv1d, Int8Conv2d, Int8ConvTranspose2d, Int8Embedding, Int8Linear, Linear, MultiheadAttention,
):  # fmt: skip
    _layer.__module__ = __name__  # pickle then finds the class by its public name
