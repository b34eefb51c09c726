"""`torch.nn.MultiheadAttention` with projections that are layers of their own, so that they can become int8 layers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` whose projections are layers of their own.

    The functions of `amp_kernels.quantization` put it in the place of a `torch.nn.MultiheadAttention`, and turn its
    projections into int8 layers. Arguments and results of `forward` are those of the module of torch. The fused kernels
    of torch's transformer layers, which read weights and call no layers, are off.

    If queries, keys and values have the same size, one layer computes all three, as in the module of torch. It is
    called once if all three arguments are the same tensor, and otherwise once for each argument.

    Attributes:
        in_proj: The layer for queries, keys and values, or None if their sizes differ.
        q_proj, k_proj, v_proj: A layer for each of them if their sizes differ, else None.
        in_proj_bias: `[3 * embed_dim]` for these three layers, which have no biases of their own, or None.
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
    in_proj_weight = None
    _qkv_same_embed_dim = False

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
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
        for name in ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn"):
            setattr(self, name, getattr(attention, name))
        packed = attention._qkv_same_embed_dim
        of: Any = attention
        bias = of.in_proj_bias
        self.in_proj = _linear(attention.in_proj_weight, bias) if packed else None
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, None if packed else _linear(getattr(attention, f"{name}_weight"), None))
        self.register_parameter("in_proj_bias", None if packed else bias)
        self.register_parameter("bias_k", of.bias_k)
        self.register_parameter("bias_v", of.bias_v)
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

        Args:
            query: `[L, B, embed_dim]`, or `[B, L, embed_dim]` if `batch_first`, or `[L, embed_dim]`.
            key: The same with length S and size `kdim`.
            value: The same with length S and size `vdim`.
            key_padding_mask: `[B, S]` or `[S]`: True for keys to leave out, or floats to add to the scores.
            need_weights: Return the weights, too. This takes more time and memory.
            attn_mask: `[L, S]` or `[B * num_heads, L, S]`: True for pairs to leave out, or floats to add to the scores.
            average_attn_weights: Return the mean of the weights over the heads.
            is_causal: A promise that `attn_mask` is the causal mask.

        Returns:
            The result, in the shape of `query`, and the weights `[B, L, S]` (`[B, num_heads, L, S]` if they are not
                averaged, without `B` if `query` has none), or None.

        Raises:
            ValueError: A mask has another shape.
            RuntimeError: `is_causal` is given without `attn_mask`.

        Examples:
            >>> attention = amp_kernels.nn.MultiheadAttention.from_attention(torch.nn.MultiheadAttention(16, 2))
            >>> x = torch.ones(5, 3, 16)
            >>> attention(x, x, x, need_weights=False)[0].shape
            torch.Size([5, 3, 16])
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: attn_mask must be given with is_causal, got None")
        is_batched = query.dim() == 3
        q, k, v = (self._batch_first(x, is_batched) for x in self._projected(query, key, value))
        batch, length, sources = q.shape[0], q.shape[1], k.shape[1]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(batch, 1, -1).to(k.dtype)], 1)
            v = torch.cat([v, self.bias_v.expand(batch, 1, -1).to(v.dtype)], 1)
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = (
            None
            if causal
            else _additive(
                "attn_mask", attn_mask, q.dtype, (length, sources), (batch * self.num_heads, length, sources)
            )
        )
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (batch, self.num_heads))
        padding = _additive(
            "key_padding_mask", key_padding_mask, q.dtype, (batch, sources) if is_batched else (sources,)
        )
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
        result = self.out_proj(attended.transpose(1, 2).flatten(2))
        if not is_batched:
            return result.squeeze(0), weights
        return result if self.batch_first else result.transpose(0, 1), weights

    def _batch_first(self, x: Tensor, is_batched: bool) -> Tensor:
        if not is_batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = self.embed_dim
        if self.in_proj is None:
            biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            layers = self.q_proj, self.k_proj, self.v_proj
            q, k, v = (
                layer(x) if bias is None else layer(x) + bias
                for layer, x, bias in zip(layers, (query, key, value), biases, strict=True)
            )
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
    if type(layer) is nn.Linear:
        return F.linear(x, layer.weight[outputs], None if layer.bias is None else layer.bias[outputs])
    result: Tensor = layer(x, outputs)
    return result


def _additive(name: str, mask: Tensor | None, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor | None:
    """Return a mask as floats that are added to scores, or raise an error if its shape is none of `shapes`."""
    if mask is None:
        return None
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"MultiheadAttention: {name} must have shape {expected}, got {tuple(mask.shape)}")
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    return mask.to(dtype)
