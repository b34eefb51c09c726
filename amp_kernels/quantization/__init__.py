"""Models to int8: conversion, calibration, quantization-aware training, and int8 for what autograd saves.

- `quantize_`: weight-only or dynamic layers, in one call.
- `prepare_`, some batches, `convert_`: static layers with calibrated ranges.
- `prepare_qat_`, training, `convert_`: dynamic or static layers from weights that were trained for them.
- `int8_saved_activations`: training with less memory.

What is converted is `nn.Linear`, transformers' `Conv1D` and `nn.Embedding`: without its embeddings a small sentence
transformer would keep two thirds of its bytes. Every conversion says what it converted and what it left, by name and
share of the bytes, to the logger "amp_kernels": an INFO, or a WARNING, which Python shows unasked, if more than a tenth
of the bytes is left in matrices that neither embeddings nor `filter_fn` explain.

Ranges are those from the smallest to the largest value. Percentiles are not offered: on a small pretrained sentence
transformer clipping at 99.9% cost 6.2 points of R@1, where the range from minimum to maximum cost less than 0.5, since
the outliers of transformers carry signal; on an MLP it made no difference.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch_private
from ..functional import Int8Tensor, fake_quantize_int8, quantize_int8
from ..nn import Int8Embedding, Int8Linear, Linear
from ..nn.conversion import LOG, LoadsItsKind, check_model, is_conv1d, is_transposed, kept_weights, matrix, shares
from ..nn.int8 import FixedDtypes, check_is_not_nested, codes_of_weight, compute_dtype, renormalized, w8a8
from ..ops.int8 import MAX_K
from ..ops.table import DTYPE_CODES
from .saved_activations import int8_saved_activations

__all__ = [
    "MinMaxObserver",
    "ObservedLinear",
    "QATLinear",
    "convert_",
    "int8_saved_activations",
    "prepare_",
    "prepare_qat_",
    "quantize_",
]

FilterFn = Callable[[nn.Module, str], bool]


def quantize_(
    model: nn.Module, mode: Literal["weight_only", "dynamic"] = "weight_only", filter_fn: FilterFn | None = None
) -> nn.Module:
    """Puts int8 layers in the place of `nn.Linear`, transformers' `Conv1D` and `nn.Embedding`.

    Only these very classes: a subclass may do something else (that of `nn.MultiheadAttention` is never called). A
    weight that several layers share is quantized once and stays shared. If a layer that is not replaced shares it, all
    of them are left as they are: else tied layers would part.

    An `nn.TransformerEncoder` with int8 layers returns at padded positions what a float one returns in training mode or
    with gradients. Without gradients in eval mode a float one may return zeros there: give a mean or a maximum over
    positions the mask.

    Args:
        model: changed in place. To load a checkpoint, call this on a new model and then `load_state_dict`.
        mode: see `Int8Linear`. Embeddings are the same in both.
        filter_fn: called with a layer and its name in the model; False leaves it as it is:
            ``lambda layer, _: not isinstance(layer, torch.nn.Embedding)``.

    Returns:
        `model`, or the new layer if the model is itself one.

    Raises:
        ValueError: another mode, no layer to replace, or one with hooks or a `forward` of its own (as accelerate gives
            it), which a new layer would lose.
        TypeError: a weight of another dtype than fp16, bf16 or fp32; `model` is no `nn.Module`.
    """
    if mode not in ("weight_only", "dynamic"):
        raise ValueError(
            f"quantize_: mode must be 'weight_only' or 'dynamic', got {mode!r}; static layers come of prepare_, some "
            "batches and convert_"
        )
    codes = _SharedCodes()
    new: dict[nn.Module, nn.Module] = {}
    found, spared = _find("quantize_", model, filter_fn, needs_int8_input=mode == "dynamic")
    for layer in found:
        if isinstance(layer, nn.Embedding):
            new[layer] = codes.give(layer, partial(Int8Embedding.from_embedding, layer))
        else:
            new[layer] = codes.give(layer, partial(Int8Linear.from_linear, layer, mode))
    return _replaced("quantize_", model, new, spared)


def prepare_(model: nn.Module, filter_fn: FilterFn | None = None) -> nn.Module:
    """Makes every `nn.Linear` and `Conv1D` record the range of its inputs, for `convert_`.

    Run some batches next, in eval mode. Outputs do not change; the ranges stay on the device. Embeddings, whose indices
    have no range, are marked for `convert_`. Arguments, result and errors are those of `quantize_`.
    """
    found, spared = _find("prepare_", model, filter_fn, needs_int8_input=True)
    new = {
        layer: PreparedEmbedding.from_embedding(layer)
        if isinstance(layer, nn.Embedding)
        else ObservedLinear.from_linear(layer)
        for layer in found
    }
    return _replaced("prepare_", model, new, spared)


def prepare_qat_(
    model: nn.Module, mode: Literal["dynamic", "static"] = "dynamic", filter_fn: FilterFn | None = None
) -> nn.Module:
    """Makes every `nn.Linear`, `Conv1D` and `nn.Embedding` compute as the int8 layer that `convert_` will make of it.

    The forward pass is the deployed arithmetic, codes of inputs and weights and `int8_matmul`: predictions in eval mode
    are bit for bit the same before and after `convert_`. The backward pass takes products with the quantized operands
    and passes straight through where a value was inside its range (Jacob et al. 2018). Parameters stay the same
    objects, so that an optimizer may exist already. Code that reads a layer's `weight` itself gets the float parameter
    here, and the dequantized weight after `convert_`.

    Args:
        model: changed in place.
        mode: of the linear layers to come. With ``"static"``, a batch in training mode is quantized by its own range,
            so that activation checkpointing repeats it exactly. The range of all these batches is the one that eval
            mode and the int8 layer use.
        filter_fn: as in `quantize_`.

    Returns, Raises: as `quantize_`.
    """
    if mode not in ("dynamic", "static"):
        raise ValueError(
            f"prepare_qat_: mode must be 'dynamic' or 'static', got {mode!r}; weight-only layers need no training"
        )
    found, spared = _find("prepare_qat_", model, filter_fn, needs_int8_input=True)
    new = {
        layer: QATEmbedding.from_embedding(layer)
        if isinstance(layer, nn.Embedding)
        else QATLinear.from_linear(layer, mode)
        for layer in found
    }
    return _replaced("prepare_qat_", model, new, spared)


def convert_(model: nn.Module) -> nn.Module:
    """Puts `Int8Linear` and `Int8Embedding` in the place of the layers that `prepare_` or `prepare_qat_` made.

    After `prepare_`, a layer that is directly followed by another in an `nn.Sequential`, or with an `nn.ReLU` in
    between, returns the codes which that one would make: in fp32 the results are bit for bit those without. The ReLU
    becomes an `nn.Identity`, since codes of its range end at 0. To load a checkpoint, prepare a new model, run any
    batch, convert, and then call `load_state_dict`.

    Args:
        model: changed in place. Waits for the device.

    Returns:
        `model`, or the new layer if the model is itself one.

    Raises:
        ValueError: nothing was prepared; a layer has seen no batch, or NaN or inf, or has hooks as in `quantize_`, or
            shares its weight with one that was not prepared.
        TypeError: `model` is no `nn.Module`.
    """
    check_model("convert_", model)
    prepared = {
        module: name for name, module in model.named_modules() if isinstance(module, _Prepared | PreparedEmbedding)
    }
    if not prepared:
        raise ValueError(
            "convert_: model must have been prepared, got none of its layers; "
            + (_what_was_done(model).removeprefix("; ") or "call prepare_ first")
        )
    kept = kept_weights(model, prepared)
    for layer, name in prepared.items():
        _check_carries_nothing("convert_", name, layer)
        if id(layer.weight) in kept:
            raise ValueError(
                f"convert_: {name!r} must share its weight with prepared layers alone, got one that was not prepared; "
                "tie layers before preparing the model"
            )
        if isinstance(layer, _Prepared) and layer.observer is not None:
            layer.observer.check(name, " in training mode" if isinstance(layer, QATLinear) else "")
    codes = _SharedCodes()
    new: dict[Any, Any] = {layer: codes.give(layer, layer.convert) for layer in prepared}
    result = _replaced("convert_", model, new, model.modules())  # of what is left preparing it has warned
    _chain(result, {new[layer] for layer in prepared if isinstance(layer, ObservedLinear)})
    return result


# -------------------------------------------------------------------------------------------------- prepared layers
class MinMaxObserver(FixedDtypes):
    """The smallest and largest value of all batches, fp32 on the device; nothing waits for it.

    Called with a batch, it returns the smallest and largest value of that batch alone.
    """

    low: Tensor
    high: Tensor

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((), torch.inf, device=device))
        self.register_buffer("high", torch.full((), -torch.inf, device=device))

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not x.numel():
            return self.low, self.high
        low, high = (end.float() for end in torch.aminmax(x.detach()))
        try:
            self.low.copy_(torch.minimum(self.low, low))
            self.high.copy_(torch.maximum(self.high, high))
        except RuntimeError as error:
            if not torch_private.is_transformed():
                raise
            raise RuntimeError(
                "MinMaxObserver: x must not be a batch inside of a transform of torch.func, which can not record its "
                "range; call eval() on the model first"
            ) from error
        return low, high

    def affine(self) -> tuple[Tensor, Tensor]:
        """fp32 scale and int32 zero point, [1] each; the scale is NaN before the first batch."""
        return _affine(self.low, self.high)

    def check(self, name: str, when: str = "") -> None:
        """That a range was seen, and a finite one; waits for the device."""
        low, high = self.low.item(), self.high.item()
        if low > high:
            raise ValueError(
                f"convert_: layer {name!r} must have seen a batch, got none; run some through the model{when} after "
                "preparing it, or leave the layer out by filter_fn"
            )
        if not (abs(low) < torch.inf and abs(high) < torch.inf):
            raise ValueError(f"convert_: inputs of layer {name!r} must be finite, got a range from {low} to {high}")


def _affine(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    both = quantize_int8(torch.stack([low, high]), symmetric=False)
    assert both.zero_point is not None
    return both.scale, both.zero_point


class _Prepared(LoadsItsKind, nn.Linear):
    """`nn.Linear` with the parameters of another, or of a Conv1D, whose weight stays [in_features, out_features].

    `observer` is None where ranges are those of rows.
    """

    observer: MinMaxObserver | None
    is_transposed: bool

    @classmethod
    def _adopt(cls, linear: Any, observes: bool) -> _Prepared:
        outputs, inputs = matrix(linear).shape
        layer = cls(inputs, outputs, linear.bias is not None, device="meta")
        layer.weight, layer.bias, layer.is_transposed = linear.weight, linear.bias, is_transposed(linear)
        layer.observer = MinMaxObserver(linear.weight.device) if observes else None
        return layer.train(linear.training)

    def convert(self, weight: Int8Tensor) -> Int8Linear:
        """The int8 layer with these codes of the weight."""
        if self.observer is None:
            return Int8Linear.from_linear(self, "dynamic", weight=weight)
        scale, zero_point = self.observer.affine()
        return Int8Linear.from_linear(self, "static", weight=weight, input_scale=scale, input_zero_point=zero_point)


class ObservedLinear(_Prepared):
    """`nn.Linear` that records the range of its inputs."""

    @classmethod
    def from_linear(cls, linear: nn.Module) -> ObservedLinear:
        return cls._adopt(linear, observes=True)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        assert self.observer is not None
        check_is_not_nested("ObservedLinear", x)
        self.observer(x)
        return F.linear(x, matrix(self), self.bias)


class QATLinear(_Prepared):
    """`nn.Linear` that computes as `Int8Linear` and trains its weights; see `prepare_qat_`."""

    @classmethod
    def from_linear(cls, linear: nn.Module, mode: Literal["dynamic", "static"] = "dynamic") -> QATLinear:
        return cls._adopt(linear, observes=mode == "static")  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        check_is_not_nested("QATLinear", x)
        rows = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
        scale = zero_point = None
        if self.observer is not None and self.training:
            # The range of this batch alone: activation checkpointing runs this forward pass a second time in the
            # backward pass, when later batches may have widened the range of all batches.
            scale, zero_point = _affine(*self.observer(rows))
        elif self.observer is not None:
            scale, zero_point = self.observer.affine()
        result = w8a8(rows, matrix(self), None, self.bias, scale, zero_point, compute_dtype(x))
        return result.reshape(*x.shape[:-1], self.out_features)


class PreparedEmbedding(LoadsItsKind, nn.Embedding):
    """`nn.Embedding` with the parameter of another, which `convert_` makes an `Int8Embedding`."""

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding) -> PreparedEmbedding:
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            embedding.max_norm,
            embedding.norm_type,
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            sparse=embedding.sparse,
            device="meta",
        )
        layer.weight = embedding.weight
        return layer.train(embedding.training)

    def convert(self, weight: Int8Tensor) -> Int8Embedding:
        """The int8 layer with these codes of the table."""
        return Int8Embedding.from_embedding(self, weight=weight)


class QATEmbedding(PreparedEmbedding):
    """`nn.Embedding` that computes as `Int8Embedding` and trains its table; see `prepare_qat_`."""

    def forward(self, index: Tensor) -> Tensor:
        return renormalized(fake_quantize_int8(super().forward(index), dim=-1), self.max_norm, self.norm_type)


# -------------------------------------------------------------------------------------------------------- the parts
class _SharedCodes:
    """Codes of weights; layers that shared a parameter share one set of them, and the tensor of their dtype."""

    def __init__(self) -> None:
        self._first: dict[tuple[Tensor, bool], Any] = {}

    def give(self, layer: Any, convert: Callable[..., Any]) -> Any:
        """What `convert` makes of `layer`, with the codes that it is called with."""
        key = layer.weight, is_transposed(layer)
        first = self._first.get(key)
        made = convert(weight=codes_of_weight(layer) if first is None else first._codes())
        made.weight_dtype = self._first.setdefault(key, made).weight_dtype
        return made


def _find(op: str, model: nn.Module, filter_fn: FilterFn | None, needs_int8_input: bool) -> tuple[list[Any], list[Any]]:
    """Layers to replace, each checked before any is, and those that `filter_fn` left out."""
    check_model(op, model)
    known = {layer: name for name, layer in model.named_modules() if _is_known(layer)}
    taken = {layer: name for layer, name in known.items() if filter_fn is None or filter_fn(layer, name)}
    kept = kept_weights(model, taken)
    found = {layer: name for layer, name in taken.items() if id(layer.weight) not in kept}
    for layer, name in found.items():
        weight = matrix(layer)
        if weight.dtype not in DTYPE_CODES:
            raise TypeError(
                f"{op}: the weight of {name!r} must be float32, float16 or bfloat16, got {weight.dtype}; "
                "leave the layer out by filter_fn"
            )
        if needs_int8_input and weight.shape[1] > MAX_K and not isinstance(layer, nn.Embedding):
            raise ValueError(
                f"{op}: {name!r} must have at most {MAX_K} inputs, got {weight.shape[1]}; leave it out by filter_fn"
            )
        _check_carries_nothing(op, name, layer)
    if not found:
        raise ValueError(
            f"{op}: model must have an nn.Linear or nn.Embedding to replace, got {type(model).__name__} without any"
            + (" that shares no weight with a layer that is left" if taken else "")
            + _what_was_done(model)
        )
    return list(found), [layer for layer in known if layer not in taken]


def _what_was_done(model: nn.Module) -> str:
    """Why a model has no layers to replace, if they were replaced earlier."""
    if any(isinstance(layer, Int8Linear | Int8Embedding) for layer in model.modules()):
        return "; it is int8 already: for another mode convert the float model"
    if any(isinstance(layer, _Prepared | PreparedEmbedding) for layer in model.modules()):
        return "; it is prepared already: convert_ makes it int8"
    return ""


def _is_known(layer: nn.Module) -> bool:
    """Exactly of a class that is replaced, or what is the same: our `nn.Linear` without an activation, a Conv1D."""
    if type(layer) is Linear:
        return layer.activation is None
    return type(layer) in (nn.Linear, nn.Embedding) or is_conv1d(layer)


def _check_carries_nothing(op: str, name: str, layer: nn.Module) -> None:
    if _has_hooks(layer):
        raise ValueError(
            f"{op}: {name!r} must have no hooks, which a new layer would lose, nor a forward of its own (accelerate's "
            "hooks); remove them (remove_weight_norm, remove_hook_from_module) or leave the layer out by filter_fn"
        )


def _has_hooks(module: nn.Module) -> bool:
    """Torch's, or those of accelerate, which are a `forward` of the instance."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, kind) for kind in kinds)


def _replaced(op: str, model: nn.Module, new: Mapping[Any, nn.Module], spared: Iterable[Any]) -> nn.Module:
    said, is_unexpected = shares(model, new.keys(), spared)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child in new:
                setattr(parent, key, new[child])
    _leave_fused_kernels(model, set(new.values()))
    LOG.log(logging.WARNING if is_unexpected else logging.INFO, "%s: %s", op, said)
    return new.get(model, model)


def _leave_fused_kernels(model: nn.Module, new: set[nn.Module]) -> None:
    """In eval mode torch's transformer layers would not call their linear layers, but read the weights themselves."""
    for parent in model.modules():
        if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerEncoder) and not new.isdisjoint(
            parent.modules()
        ):
            if isinstance(parent, nn.TransformerEncoderLayer):
                parent.activation_relu_or_gelu = 0
            else:  # given a padding mask, it would make a nested tensor, which only the fused kernel takes
                parent.use_nested_tensor = False


def _chain(model: nn.Module, static: set[Int8Linear]) -> None:
    """int8 from one static layer to the next where nothing or a ReLU is between them and nobody else sees it."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for parent in model.modules():
        if type(parent) is not nn.Sequential:
            continue
        layers = list(parent)
        for i, first in enumerate(layers):
            has_relu = i + 1 < len(layers) and type(layers[i + 1]) is nn.ReLU and not _has_hooks(layers[i + 1])
            second = layers[i + 1 + has_relu] if i + 1 + has_relu < len(layers) else None
            if first not in static or second not in static or not uses[id(first)] == uses[id(second)] == 1:
                continue
            assert second.input_scale is not None and second.input_zero_point is not None
            if has_relu:
                # The range begins at 0, so this is its zero point already, but for a range of nothing but 0.
                second.input_zero_point = torch.full_like(second.input_zero_point, -128)
                parent[i + 1] = nn.Identity()
            # Copies: safetensors refuses tensors that share memory.
            first.output_scale = second.input_scale.clone()
            first.output_zero_point = second.input_zero_point.clone()
