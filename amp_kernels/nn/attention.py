"""`torch.nn.MultiheadAttention` with projections that are layers of their own, so that they can become int8 layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .conversion import LoadsItsKind, additions, has_hooks, linear_part
from .int8 import check_is_dense

# The last one is a mark that transformers leaves on every module of its models.
_KEPT = {
    "embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn",
    "_is_hf_initialized",
}  # fmt: skip
_PARAMETERS = {
    "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v",
}  # fmt: skip


def can_replace(module: nn.Module) -> bool:
    """Return whether a module is a `torch.nn.MultiheadAttention` to which neither hooks nor attributes were added."""
    if type(module) is not nn.MultiheadAttention or has_hooks(module) or has_hooks(module.out_proj):
        return False
    is_plain = type(module.out_proj) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
    is_plain = is_plain and not additions(module.out_proj)
    added = vars(module).keys() - vars(nn.Module()).keys() - _KEPT - {"_qkv_same_embed_dim", "bias_k", "bias_v"}
    added |= module._parameters.keys() - _PARAMETERS
    return is_plain and not added and not module._buffers and [*module._modules] == ["out_proj"]


class MultiheadAttention(LoadsItsKind):
    """`torch.nn.MultiheadAttention` whose projections are layers of their own.

    The functions of `amp_kernels.quantization` put it in the place of a `torch.nn.MultiheadAttention`, and turn its
    projections into int8 layers. Arguments and results of `forward` are those of the module of torch. The fused kernels
    of torch's transformer layers, which read weights and call no layers, are off.

    If queries, keys and values have the same size, one layer computes all three, as in the module of torch. It is
    called once if all three arguments are the same tensor, and otherwise once for each argument.

    Attributes:
        in_proj: The layer for queries, keys and values, or None if their sizes differ.
        q_proj, k_proj, v_proj: A layer for each of them if their sizes differ, else None.
        biases: The parameters that belong to none of these layers. If the sizes differ, `in_proj_bias` of `[3 *
            embed_dim]`. With `add_bias_kv`, `bias_k` and `bias_v`.
        out_proj: The layer for the result.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> amp_kernels.quantization.quantize_(layer).self_attn
        MultiheadAttention(
          (in_proj): Int8Linear(in_features=16, out_features=48, bias=True, mode=weight_only)
          (out_proj): Int8Linear(in_features=16, out_features=16, bias=True, mode=weight_only)
        )
    """

    # What torch's transformer layers read before they use their fused kernels.
    in_proj_weight = in_proj_bias = None
    _qkv_same_embed_dim = False

    _absent = "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    _why_absent = "the projections are layers of their own here"

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    biases: Any
    in_proj: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    out_proj: Any

    @classmethod
    def from_attention(cls, attention: nn.MultiheadAttention) -> MultiheadAttention:
        """Return a module with the parameters of a module of torch.

        Args:
            attention: The module of torch. Both modules then have the same parameter objects.

        Returns:
            The module, in the training mode of `attention`.

        Examples:
            >>> attention = amp_kernels.nn.MultiheadAttention.from_attention(torch.nn.MultiheadAttention(16, 2))
            >>> attention.in_proj
            Linear(in_features=16, out_features=48, bias=True)
        """
        self = cls()
        for name in _KEPT & vars(attention).keys():
            setattr(self, name, getattr(attention, name))
        packed = attention._qkv_same_embed_dim
        of: Any = attention
        bias = of.in_proj_bias
        self.in_proj = _linear(attention.in_proj_weight, bias) if packed else None
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, None if packed else _linear(getattr(attention, f"{name}_weight"), None))
        # In a module of its own, so that the order of all parameters stays that of torch.
        others = {"in_proj_bias": None if packed else bias, "bias_k": of.bias_k, "bias_v": of.bias_v}
        given = OrderedDict((name, value) for name, value in others.items() if value is not None)
        self.biases = nn.ParameterDict(given) if given else {}
        self.out_proj = _linear(attention.out_proj.weight, attention.out_proj.bias)
        return self.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as `torch.nn.MultiheadAttention` does.

        The other arguments are those of `torch.nn.MultiheadAttention.forward`, with the same shapes.

        Args:
            need_weights: Return the weights, too. This takes more time and memory.

        Returns:
            The result, in the shape of `query`, and the weights `[B, L, S]` (`[B, num_heads, L, S]` if they are not
                averaged, without `B` if `query` has none), or None.

        Raises:
            TypeError: A mask is of integers.
            ValueError: A shape does not fit.
            RuntimeError: `is_causal` is given without `attn_mask`.

        Examples:
            >>> attention = amp_kernels.nn.MultiheadAttention.from_attention(torch.nn.MultiheadAttention(16, 2))
            >>> x = torch.ones(5, 3, 16)
            >>> attention(x, x, x, need_weights=False)[0].shape
            torch.Size([5, 3, 16])
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: attn_mask must be given with is_causal, got None")
        check_is_dense("MultiheadAttention", query)
        is_batched = query.dim() == 3
        _check_shapes(query, key, value, 1 - self.batch_first if is_batched else None)
        q, k, v = self._projected(query, key, value)
        if not (is_batched and self.batch_first):
            q, k, v = (x.transpose(0, 1) if is_batched else x.unsqueeze(0) for x in (q, k, v))
        batch, length, sources = q.shape[0], q.shape[1], k.shape[1]
        if "bias_k" in self.biases:
            k, v = (
                torch.cat([x, self.biases[name].expand(batch, 1, -1).to(x.dtype)], 1)
                for x, name in ((k, "bias_k"), (v, "bias_v"))
            )
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        causal = is_causal and key_padding_mask is None and not need_weights
        pairs = length, sources
        mask = _additive("attn_mask", None if causal else attn_mask, q.dtype, pairs, (batch * self.num_heads, *pairs))
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (batch, self.num_heads))
        shape = (batch, sources) if is_batched else (sources,)
        padding = _additive("key_padding_mask", key_padding_mask, q.dtype, shape)
        if padding is not None:
            padding = padding.view(batch, 1, 1, sources)
            mask = padding if mask is None else mask + padding
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[1] - sources))  # nobody masks what was added
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * math.sqrt(1 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
            attended = weights.to(v.dtype) @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if is_batched else weights.squeeze(0)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        order = (0, 2, 1, 3) if self.batch_first or not is_batched else (2, 0, 1, 3)
        result = self.out_proj(attended.permute(order).flatten(2))
        return result if is_batched else result.squeeze(0), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = self.embed_dim
        if self.in_proj is None:
            biases: Any = self.biases["in_proj_bias"].chunk(3) if "in_proj_bias" in self.biases else (None,) * 3
            layers = self.q_proj, self.k_proj, self.v_proj
            projected = (layer(x) for layer, x in zip(layers, (query, key, value), strict=True))
            q, k, v = (y if bias is None else y + bias.to(y.dtype) for y, bias in zip(projected, biases, strict=True))
        elif query is key and key is value:
            q, k, v = self.in_proj(query).chunk(3, -1)
        elif key is value:
            q = _part(self.in_proj, query, slice(size))
            k, v = _part(self.in_proj, key, slice(size, 3 * size)).chunk(2, -1)
        else:
            parts = slice(size), slice(size, 2 * size), slice(2 * size, 3 * size)
            q, k, v = (_part(self.in_proj, x, part) for x, part in zip((query, key, value), parts, strict=True))
        return q, k, v


def _linear(weight: Any, bias: Any) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias
    return layer


def _part(layer: Any, x: Tensor, outputs: slice) -> Tensor:
    """Return the outputs in the slice `outputs` of a linear layer."""
    return linear_part(layer, x, outputs) if type(layer) is nn.Linear else layer(x, outputs)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, batch: int | None) -> None:
    """Raise an error unless the three fit together. `batch` is the dimension of the batch, or None if there is none."""
    ranks = {x.dim() for x in (query, key, value)}
    fits = ranks == {2 if batch is None else 3} and key.shape[:-1] == value.shape[:-1]
    if not fits or (batch is not None and query.shape[batch] != key.shape[batch]):
        raise ValueError(
            "MultiheadAttention: query, key and value must have 2 or 3 dimensions, one batch size, and key and value "
            f"one length, got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )


def _additive(name: str, mask: Tensor | None, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor | None:
    """Return a mask as floats that are added to scores, or raise an error if its shape is none of `shapes`."""
    if mask is None:
        return None
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"MultiheadAttention: {name} must have shape {expected}, got {tuple(mask.shape)}")
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"MultiheadAttention: {name} must be bool or floating point, got {mask.dtype}")
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    return mask.to(dtype)
