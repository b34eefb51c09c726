"""Layers: `Linear` for 16-bit weights of any size, `Int8Linear` and `Int8Embedding` for inference with int8 weights."""

from .int8 import Int8Embedding, Int8Linear
from .linear import Linear, convert_linear_

__all__ = ["Int8Embedding", "Int8Linear", "Linear", "convert_linear_"]

for _layer in (Int8Embedding, Int8Linear, Linear):
    _layer.__module__ = __name__  # pickle then finds the class by its public name
