"""Layers with int8 weights for inference: `Int8Linear` and `Int8Embedding`.

`amp_kernels.quantization` puts them into a model. Their codes and scales are buffers: `.half()` and `.to(dtype)` change
the dtype they compute in, never codes or scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import reference, torch_private
from ..functional import Int8Tensor, dequantize_int8, fake_quantize_int8, int8_matmul, quantize_int8
from ..ops import int8 as ops
from ..ops.checks import why_not_loaded
from ..ops.int8 import MAX_K
from ..ops.library import call
from .conversion import LoadsItsKind, matrix

Mode = Literal["weight_only", "dynamic", "static"]
MODES = ("weight_only", "dynamic", "static")
# Backward passes expand so many weights at a time: 8 MB in 16 bits, and panels wide enough for a fast product.
PANEL = 2**22

_Fn = Callable[[Tensor], Tensor]
# A buffer that two layers share -> where `_apply` put it, and the function that it applied.
_moved: WeakIdKeyDictionary = WeakIdKeyDictionary()


class FixedDtypes(LoadsItsKind):
    """A module whose buffers keep their dtypes, and are still shared by those who shared them, after `.to()`."""

    def _apply(self, fn: _Fn, recurse: bool = True) -> FixedDtypes:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            assert new is not None
            if new.dtype != old.dtype:
                new = old.to(new.device)
            self._buffers[name] = _same_place(old, new, fn)
        return self


def _same_place(old: Tensor, new: Tensor, fn: _Fn) -> Tensor:
    """`new`, or what another module that shares `old` has moved it to.

    Modules that are moved by one call, as of `model.to()`, share `fn`. If each was moved by a call of its own, somebody
    may have written to one of them in between, by ways that raise no version: contents are compared.
    """
    if new is old:
        return new
    place, applied = _moved.get(old, (lambda: None, None))
    other = place()
    if other is not None and other.device == new.device and (fn is applied or _is_equal(other, new)):
        return other
    _moved[old] = ref(new), fn
    return new


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.is_meta or torch.equal(a, b)


class _Int8Weight(FixedDtypes):
    """A layer with codes [N, K] for a weight and a dtype of its own, which follows `.half()`.

    A state dict has the codes as [1, N, K]. The other keys are those of the float layer, and whatever loads that, be it
    torch or `from_pretrained` of transformers, would take codes for floats; it refuses another shape.
    """

    # Of torch, which saves it beside the tensors: 1 had codes as [N, K]. safetensors keep tensors alone.
    _version = 2

    weight: Tensor
    dtype: torch.dtype

    def _apply(self, fn: _Fn, recurse: bool = True) -> FixedDtypes:
        after = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        self.dtype = after if after.is_floating_point else self.dtype
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].unsqueeze(0)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if reason := why_not_loaded(type(self).__name__, local_metadata.get("version"), self._version):
            *_, error_msgs = rest  # load_state_dict raises them all
            error_msgs.append(reason)
            return
        codes = state_dict.get(prefix + "weight")
        if isinstance(codes, Tensor) and codes.dim() == 3:
            state_dict[prefix + "weight"] = codes.squeeze(0)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Int8Linear(_Int8Weight):
    """`nn.Linear` with int8 weights, a symmetric scale for each output.

    - ``"weight_only"``: ``x @ (weight * scale).T + bias`` for fp16, bf16 and fp32 `x`, accumulated in fp32. The weight
      is never expanded in memory; its traffic, which is what small batches wait for, is halved against fp16.
    - ``"dynamic"``: every row of `x` gets asymmetric codes of its own range (outputs of ReLU or GELU are one-sided),
      then `int8_matmul`.
    - ``"static"``: the same with one calibrated range, so that nothing is measured at run time. With `output_scale` the
      layer returns an `Int8Tensor` for the next one.

    Outputs have the dtype of `x`, under autocast autocast's, as those of `nn.Linear`, and `dtype` where `x` is an
    `Int8Tensor`; codes are made of `x` in the dtype that it comes in. The gradient of `x` is ``grad @ weight``, the
    weight expanded at most `PANEL` elements at a time; with codes of `x` it passes straight through inside their range.
    The weight is frozen, the bias an ordinary parameter in the dtype of the original. int8 outputs have no gradient.

    Args:
        in_features, out_features, bias, device, dtype: as of `nn.Linear`. A new layer is 0, to load a state dict into;
            `from_linear` makes one from weights.
        mode: one of the three.

    Attributes:
        weight: int8 [out_features, in_features].
        weight_scale: fp32 [out_features, 1].
        input_scale, input_zero_point: fp32 and int32 [1] of a static layer, else None.
        output_scale, output_zero_point: the same, None unless the layer returns codes.
        dtype: of the original weight; follows `.half()`.

    Raises:
        ValueError: an unknown mode, or more than 131071 inputs in another mode than ``"weight_only"``.
    """

    weight_scale: Tensor
    bias: nn.Parameter | None
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    output_scale: Tensor | None
    output_zero_point: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mode: Mode = "weight_only",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"Int8Linear: mode must be one of {', '.join(MODES)}, got {mode!r}")
        if mode != "weight_only" and in_features > MAX_K:
            raise ValueError(
                f"Int8Linear: in_features must be at most {MAX_K} with int8 activations, got {in_features}; "
                "use mode='weight_only'"
            )
        self.in_features, self.out_features, self.mode = in_features, out_features, mode
        self.dtype = dtype or torch.get_default_dtype()
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("weight_scale", torch.ones(out_features, 1, dtype=torch.float32, device=device))
        values = torch.zeros(out_features, dtype=self.dtype, device=device) if bias else None
        self.bias = None if values is None else nn.Parameter(values)
        for name in ("input", "output"):
            given = mode == "static" and name == "input"
            scale = torch.ones(1, dtype=torch.float32, device=device) if given else None
            self.register_buffer(f"{name}_scale", scale)
            self.register_buffer(f"{name}_zero_point", scale if scale is None else torch.zeros_like(scale).int())

    @classmethod
    def from_linear(
        cls,
        linear: Any,
        mode: Mode = "weight_only",
        *,
        weight: Int8Tensor | None = None,
        input_scale: Tensor | None = None,
        input_zero_point: Tensor | None = None,
    ) -> Int8Linear:
        """The layer that stands in for `linear`, with its bias.

        Args:
            linear: an `nn.Linear`, or a `Conv1D` of transformers.
            weight: codes of its weight (``dim=-1``, symmetric) if there are some already, to share them.
            input_scale, input_zero_point: fp32 and int32 [1] of ``"static"``, and only of it.
        """
        if (input_scale is None or input_zero_point is None) == (mode == "static"):
            raise ValueError(
                "Int8Linear.from_linear: input_scale and input_zero_point must be given for mode='static' and for no "
                f"other, got mode={mode!r}; prepare_, some batches and convert_ find them"
            )
        codes = _codes_to_share("Int8Linear.from_linear", weight, linear)
        outputs, inputs = codes.shape
        layer = cls(inputs, outputs, False, mode, device="meta", dtype=matrix(linear).dtype)
        layer.weight, layer.weight_scale, layer.bias = codes.values, codes.scale, linear.bias
        layer.input_scale, layer.input_zero_point = input_scale, input_zero_point
        return layer.train(linear.training)

    def forward(self, x: Tensor | Int8Tensor) -> Tensor | Int8Tensor:
        """[..., in_features] -> [..., out_features]; an `Int8Tensor` (of one scale) only unless ``"weight_only"``."""
        if self.output_scale is not None and torch_private.is_transformed():
            raise RuntimeError(
                "Int8Linear: a layer that returns codes must be outside of torch.func's transforms and of forward-mode "
                "differentiation, since codes have no derivative; use a model in another mode than 'static'"
            )
        check_is_not_nested("Int8Linear", x)
        shape = x.shape
        if not shape or shape[-1] != self.in_features:
            raise ValueError(f"Int8Linear: x must have shape (..., {self.in_features}), got {tuple(shape)}")
        if isinstance(x, Int8Tensor):
            result = self._of_codes(x)
        elif self.output_scale is not None:
            result = self._of_codes(codes_of(_rows(x), self.input_scale, self.input_zero_point))
        elif self.mode == "weight_only":
            x = x.to(compute_dtype(x))
            bias = None if self.bias is None else self.bias.to(x.dtype)
            # The specification is torch's operators: it serves transforms, for which autograd functions have no rule.
            multiply = reference.int8_linear if torch_private.is_transformed() else _WeightOnly.apply
            result = multiply(_rows(x), self.weight, self.weight_scale, bias)
        else:
            scales = self.input_scale, self.input_zero_point
            result = w8a8(_rows(x), self.weight, self.weight_scale, self.bias, *scales, compute_dtype(x))
        if self.output_scale is None:
            return result.reshape(*shape[:-1], self.out_features)
        values = result.reshape(*shape[:-1], self.out_features)
        return Int8Tensor(values, self.output_scale, self.output_zero_point)

    def _of_codes(self, x: Int8Tensor) -> Tensor:
        if self.mode == "weight_only":
            raise TypeError("Int8Linear: x must be a Tensor with mode='weight_only', got an Int8Tensor; dequantize it")
        rows = Int8Tensor(_rows(x.values), x.scale, x.zero_point, x.dim, x.block_size)
        weight = Int8Tensor(self.weight, self.weight_scale, None, (1,)).t()
        bias = None if self.bias is None else self.bias.detach().float()
        dtype = autocast_dtype(self.weight.device) or self.dtype
        return int8_matmul(
            rows, weight, bias=bias, out_dtype=dtype, out_scale=self.output_scale,
            out_zero_point=self.output_zero_point,
        )  # fmt: skip

    def extra_repr(self) -> str:
        out = ", int8 out" if self.output_scale is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"mode={self.mode}{out}"
        )


class Int8Embedding(_Int8Weight):
    """`nn.Embedding` with int8 weights, a symmetric scale for each row; only rows looked up are dequantized.

    The table is frozen: it has no gradient, so `padding_idx` is merely kept.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as of `nn.Embedding`; a new table is 0.

    Attributes:
        weight: int8 [num_embeddings, embedding_dim].
        weight_scale: fp32 [num_embeddings, 1].
        dtype: of the result; follows `.half()`.
    """

    weight_scale: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.dtype = dtype or torch.get_default_dtype()
        self.register_buffer("weight", torch.zeros(num_embeddings, embedding_dim, dtype=torch.int8, device=device))
        self.register_buffer("weight_scale", torch.ones(num_embeddings, 1, dtype=torch.float32, device=device))

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, weight: Int8Tensor | None = None) -> Int8Embedding:
        """The layer that stands in for `embedding`; `weight` as in `Int8Linear.from_linear`.

        Raises:
            ValueError: `embedding` has `max_norm`, which rewrites the rows looked up.
        """
        check_table(embedding)
        rows, width, dtype = embedding.num_embeddings, embedding.embedding_dim, embedding.weight.dtype
        layer = cls(rows, width, embedding.padding_idx, device="meta", dtype=dtype)
        codes = _codes_to_share("Int8Embedding.from_embedding", weight, embedding)
        layer.weight, layer.weight_scale = codes.values, codes.scale
        return layer.train(embedding.training)

    def forward(self, index: Tensor) -> Tensor:
        """int32 or int64 [...] -> [..., embedding_dim] of `dtype`."""
        rows = Int8Tensor(F.embedding(index, self.weight), F.embedding(index, self.weight_scale), None, (-1,))
        return dequantize_int8(rows, self.dtype)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


# ------------------------------------------------------------------------------------------------------ the product
def w8a8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``int8_matmul`` of the codes of `x` [M, K] and `weight` [N, K], with straight-through gradients.

    Args:
        weight: int8 codes, or floats that are quantized here (training).
        weight_scale: of the codes; None for floats.
        scale, zero_point: of `x`, one element each; None for those of its rows.
    """
    if torch_private.is_transformed():
        return _w8a8_by_torch(x, weight, weight_scale, bias, scale, zero_point, out_dtype)
    return _W8A8.apply(x, weight, weight_scale, bias, scale, zero_point, out_dtype)


def codes_of(x: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Int8Tensor:
    """Codes of activations: with a given scale, or asymmetric ones by row."""
    if scale is None:
        return quantize_int8(x, dim=-1, symmetric=False)
    return quantize_int8(x, scale=scale, zero_point=zero_point)


def check_is_not_nested(op: str, x: Tensor | Int8Tensor) -> None:
    """An `nn.TransformerEncoder` passes nested tensors on, if its layers were converted without the encoder itself."""
    if getattr(x, "is_nested", False):
        raise TypeError(
            f"{op}: x must be a dense tensor, got a nested one; pad it, or if an nn.TransformerEncoder made it, set "
            "its use_nested_tensor to False"
        )


def check_table(embedding: nn.Embedding) -> None:
    if embedding.max_norm is not None:
        raise ValueError(
            f"Int8Embedding: max_norm must be None, got {embedding.max_norm}: it rewrites rows at every look-up; "
            "renormalize the table once and set it to None"
        )


def codes_of_weight(layer: nn.Module) -> Int8Tensor:
    """Contiguous codes [out_features, in_features], symmetric by row."""
    return quantize_int8(matrix(layer).detach().contiguous(), dim=-1)


def _codes_to_share(op: str, codes: Int8Tensor | None, layer: nn.Module) -> Int8Tensor:
    """The given codes of the weight, checked, or those that `codes_of_weight` makes."""
    if codes is None:
        return codes_of_weight(layer)
    shape = matrix(layer).shape
    expected = torch.int8, shape, torch.float32, (shape[0], 1), codes.values.device
    values, scale = codes.values, codes.scale
    is_by_row = codes.zero_point is None and codes.block_size is None
    if not is_by_row or (values.dtype, values.shape, scale.dtype, scale.shape, scale.device) != expected:
        raise ValueError(
            f"{op}: weight must be what quantize_int8(weight, dim=-1) makes of {tuple(shape)}, codes and scales on one "
            f"device, got {values.dtype} {tuple(values.shape)} on {values.device} with scales {scale.dtype} "
            f"{tuple(scale.shape)} on {scale.device}, {'no' if codes.zero_point is None else 'a'} zero point and "
            f"block_size {codes.block_size}"
        )
    return codes


def _weight_codes(weight: Tensor, scale: Tensor | None) -> Int8Tensor:
    return quantize_int8(weight, dim=-1) if scale is None else Int8Tensor(weight, scale, None, (1,))


class _W8A8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        zero_point: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        # Codes are made again in the backward pass: all that is kept is what nn.Linear keeps.
        ctx.save_for_backward(x, weight, weight_scale, scale, zero_point)
        ctx.bias_dtype = None if bias is None else bias.dtype
        codes = _weight_codes(weight, weight_scale).t()
        bias = None if bias is None else bias.float()
        return int8_matmul(codes_of(x, scale, zero_point), codes, bias=bias, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, weight_scale, scale, zero_point = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if torch.is_grad_enabled():  # this gradient will be differentiated
            return _w8a8_backward_by_torch(ctx, grad)
        inputs, codes = codes_of(x, scale, zero_point), _weight_codes(weight, weight_scale)
        if needs_x:
            grad_x = times_codes(grad, codes).to(x.dtype)
            grad_x = ops.straight_through_int8(grad_x, x, inputs.scale, inputs.zero_point, None)
        if needs_weight:
            # Codes of a symmetric range of its own are never clamped: nothing to mask.
            grad_weight = (grad.t() @ inputs.dequantize(grad.dtype)).to(weight.dtype)
        if needs_bias:
            grad_bias = grad.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, grad_bias, None, None, None


def _w8a8_by_torch(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`w8a8` as a product of dequantized values in fp32, by operators that transforms know."""
    with torch.autocast(x.device.type, enabled=False):
        inputs, values = _fake_inputs(x, scale, zero_point), _fake_weight(weight, weight_scale)
        return F.linear(inputs, values, None if bias is None else bias.float()).to(out_dtype)


def _w8a8_backward_by_torch(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of `_W8A8`, by operators that can be differentiated again."""
    x, weight, weight_scale, scale, zero_point = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if needs_x:
        codes = codes_of(x.detach(), scale, zero_point)
        grad_x = (grad.float() @ _fake_weight(weight, weight_scale)).to(x.dtype)
        grad_x = ops.straight_through(grad_x, x, codes.scale, codes.zero_point)
    if needs_weight:
        grad_weight = (grad.float().t() @ _fake_inputs(x, scale, zero_point)).to(weight.dtype)
    return grad_x, grad_weight, None, grad.sum(0).to(ctx.bias_dtype) if needs_bias else None, None, None, None


def _fake_inputs(x: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """The dequantized `codes_of`, fp32 and differentiable."""
    if scale is None:
        return fake_quantize_int8(x.float(), dim=-1, symmetric=False)
    return fake_quantize_int8(x.float(), scale=scale, zero_point=zero_point)


def _fake_weight(weight: Tensor, scale: Tensor | None) -> Tensor:
    """The dequantized weight, fp32, and differentiable if it is given as floats."""
    if scale is None:
        return fake_quantize_int8(weight.float(), dim=-1)
    return dequantize_int8(Int8Tensor(weight, scale, None, (1,)))


class _WeightOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return call(ops.int8_linear, x, weight, scale, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        grad_x = times_codes(grad, Int8Tensor(weight, scale, None, (1,))) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad.sum(0) if ctx.needs_input_grad[3] else None


def times_codes(grad: Tensor, weight: Int8Tensor) -> Tensor:
    """``grad @ weight.dequantize(grad.dtype)`` of [N, K] codes, in panels of columns: each is rounded once."""
    outputs, inputs = weight.shape
    width = max(1, PANEL // max(1, outputs))
    if width >= inputs:
        return grad @ weight.dequantize(grad.dtype)
    result = grad.new_empty(grad.shape[0], inputs)
    for start in range(0, inputs, width):
        part = slice(start, start + width)
        panel = Int8Tensor(weight.values[:, part], weight.scale, None, (1,))
        result[:, part] = grad @ panel.dequantize(grad.dtype)
    return result


# -------------------------------------------------------------------------------------------------------- the parts
def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Where autocast is on, its dtype."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Of the result of a linear layer."""
    return autocast_dtype(x.device) or x.dtype
