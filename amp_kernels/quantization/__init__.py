"""Convert models to int8, calibrate, train for int8, and save activations in int8.

- `quantize_`: weight-only or dynamic layers, in one call.
- `prepare_`, some batches, `convert_`: static layers with calibrated ranges.
- `prepare_qat_`, training, `convert_`: dynamic or static layers from weights that were trained for them.
- `int8_saved_activations`: training with less memory.
- `export_onnx`: a file for onnxruntime and other runtimes.

`amp_kernels.nn.Int8Linear` explains the modes weight-only, dynamic and static. The guide to int8 lists the layers that
are converted, and says what each of these functions writes to the log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from .. import torch_private
from ..functional import Int8Tensor, fake_quantize_int8, quantize_int8
from ..nn import (
    Int8Conv1d,
    Int8Conv2d,
    Int8ConvTranspose2d,
    Int8Embedding,
    Int8Linear,
    Linear,
    MultiheadAttention,
)
from ..nn.attention import can_replace
from ..nn.conversion import (
    ALL,
    CONVOLUTIONS,
    LOG,
    LoadsItsKind,
    additions,
    by_outputs,
    check_model,
    exchange,
    factor_of,
    has_hooks,
    is_conv1d,
    is_transposed,
    kept_weights,
    kind_in_torch,
    linear_part,
    matrix,
    of_all_blocks,
    shares,
    terms,
    why_not_int8,
)
from ..nn.int8 import (
    FixedDtypes,
    Int8Weight,
    Mode,
    Steps,
    apply_linear,
    check_is_dense,
    codes_of_weight,
    compute_dtype,
    known_mode,
    scaled_rows,
    w8a8,
)
from ..nn.int8_conv import apply_convolution, check_output_size
from ..nn.int8_sequential import Int8Sequential
from ..ops.int8 import MAX_K
from ..ops.table import DTYPE_CODES
from .folding import FoldedBatchNorm, folded, is_batch_norm
from .onnx import export_onnx
from .saved_activations import int8_saved_activations

__all__ = [
    "convert_",
    "export_onnx",
    "int8_saved_activations",
    "prepare_",
    "prepare_qat_",
    "quantize_",
]

FilterFn = Callable[[nn.Module, str], bool]


def quantize_(
    model: nn.Module,
    mode: Literal["weight_only", "weight-only", "dynamic"] = "weight_only",
    filter_fn: FilterFn | None = None,
) -> nn.Module:
    """Replace linear layers, convolutions and embeddings of a model by int8 layers for inference.

    The guide to int8 lists the layers that are replaced, among them the projections of `torch.nn.MultiheadAttention`.
    All others stay in floating point, and the log names them. Layers that share a weight share its codes. A batch norm
    that follows a convolution is folded into it first, and becomes an identity.

    Scheme: symmetric codes per output row or channel, `scale = absmax / 127` (Jacob et al. 2018; Wu et al. 2020); see
    `quantize_int8`.

    Args:
        model: Changed in place. To load an int8 checkpoint, call this on a new model first, then `load_state_dict`.
        mode: `"weight_only"` (or `"weight-only"`) or `"dynamic"`; see `Int8Linear` and `Int8Conv2d`. Embeddings are the
            same in both.
        filter_fn: Called with a layer and its name in the model. If it returns False, the layer is left unchanged. For
            example `lambda layer, name: not isinstance(layer, torch.nn.Embedding)`.

    Returns:
        `model`, or the new layer if `model` is a layer.

    Raises:
        TypeError: `model` is not an `nn.Module`, or a weight is not fp16, bf16 or fp32.
        ValueError: `mode` is unknown, or there is no layer to replace. Or `mode` is `"dynamic"`, and an output of a
            linear layer or a convolution sums more than 131071 products. Or a layer has something that a new layer
            would lose: hooks, a `forward` that was assigned to the instance, as accelerate does, or parameters, buffers
            and modules that were added.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU())
        >>> amp_kernels.quantization.quantize_(model)[0]
        Int8Linear(in_features=16, out_features=8, bias=True, mode=weight_only)
    """
    if known_mode(mode) not in ("weight_only", "dynamic"):
        raise ValueError(
            f"quantize_: mode must be 'weight_only' or 'dynamic', got {mode!r}; for static layers call prepare_, run "
            "some batches, and call convert_"
        )
    return _exchange_layers("quantize_", model, filter_fn, _to_int8(mode), needs_int8_input=mode == "dynamic")


def prepare_(model: nn.Module, filter_fn: FilterFn | None = None) -> nn.Module:
    """Make linear layers and convolutions record the range of their inputs, for `convert_`.

    After this call, run some batches in eval mode. Recording changes no output, and does not wait for the device.
    Embeddings have no input range; they are only marked for `convert_`. Batch norms are folded into convolutions first,
    as in `quantize_`. In eval mode this changes outputs only by the rounding of the new weights.

    Args:
        model: Changed in place.
        filter_fn: As in `quantize_`.

    Returns:
        `model`, or the new layer if `model` is a layer.

    Raises:
        TypeError: As `quantize_`.
        ValueError: As `quantize_`, or a layer has more than 131071 inputs.

    Examples:
        >>> model = amp_kernels.quantization.prepare_(torch.nn.Sequential(torch.nn.Linear(16, 8))).eval()
        >>> _ = model(torch.ones(4, 16))
        >>> amp_kernels.quantization.convert_(model)[0]
        Int8Linear(in_features=16, out_features=8, bias=True, mode=static)
    """
    make = partial(Observed.of, observes=True)
    return _exchange_layers("prepare_", model, filter_fn, make, needs_int8_input=True)


def prepare_qat_(
    model: nn.Module, mode: Literal["dynamic", "static"] = "dynamic", filter_fn: FilterFn | None = None
) -> nn.Module:
    """Make the layers of a model compute in int8 during training, for `convert_` (quantization-aware training).

    The forward pass computes with the codes of inputs and weights, as the int8 layers will. The gradient ignores the
    rounding. It is 0 for values outside of the range of the codes (Jacob et al. 2018). In eval mode, predictions before
    and after `convert_` have the same bits, unless code other than the layers reads their weights. Parameters stay the
    same objects. Batch norms are folded into those of convolutions first.

    Args:
        model: Changed in place.
        mode: `"dynamic"` or `"static"`, the mode of the linear layers and convolutions that `convert_` will make.
        filter_fn: As in `quantize_`.

    Returns:
        `model`, or the new layer if `model` is a layer.

    Raises:
        TypeError: As `quantize_`.
        ValueError: As `quantize_`, or a layer has more than 131071 inputs.

    Examples:
        >>> model = amp_kernels.quantization.prepare_qat_(torch.nn.Sequential(torch.nn.Linear(16, 8)))
        >>> model(torch.ones(4, 16)).sum().backward()
        >>> before = model.eval()(torch.ones(4, 16))
        >>> torch.equal(amp_kernels.quantization.convert_(model)(torch.ones(4, 16)), before)
        True
    """
    if mode not in ("dynamic", "static"):
        raise ValueError(
            f"prepare_qat_: mode must be 'dynamic' or 'static', got {mode!r}; weight-only layers need no training"
        )
    make = partial(QAT.of, observes=mode == "static")
    return _exchange_layers("prepare_qat_", model, filter_fn, make, needs_int8_input=True, in_place=True)


def convert_(model: nn.Module) -> nn.Module:
    """Turn the layers of `prepare_` or `prepare_qat_` into `Int8Linear`, `Int8Conv2d` and other int8 layers.

    Inside a call of an `nn.Sequential`, a layer that comes from `prepare_` may pass its codes directly to the next one.
    This function waits for the device. To load an int8 checkpoint, prepare a new model, run any batch through it,
    convert it, and call `load_state_dict`.

    Args:
        model: Changed in place.

    Returns:
        `model`, or the new layer if `model` is a layer.

    Raises:
        TypeError: `model` is not an `nn.Module`.
        ValueError: Nothing was prepared; or a layer has seen no batch, has seen NaN or inf, has hooks or an added
            parameter, buffer or module, or shares its weight with a layer that was not prepared.

    Examples:
        >>> model = amp_kernels.quantization.prepare_qat_(torch.nn.Sequential(torch.nn.Embedding(10, 8)))
        >>> amp_kernels.quantization.convert_(model)[0]
        Int8Embedding(10, 8)
    """
    check_model("convert_", model)
    prepared: dict[Any, str] = {module: name for name, module in model.named_modules() if isinstance(module, _Prepared)}
    if not prepared:
        raise ValueError(
            f"convert_: model must have layers that were prepared, got {type(model).__name__} without any; "
            + (_what_was_done(model).removeprefix("; ") or "call prepare_ first")
        )
    kept = kept_weights(model, prepared)
    for layer, name in prepared.items():
        _check_loses_nothing("convert_", name, layer)
        if id(layer.weight) in kept:
            raise ValueError(
                f"convert_: {name!r} must share its weight only with prepared layers, got one that was not prepared; "
                "tie layers before preparing the model"
            )
        if layer.observer is not None:
            layer.observer.check(name, " in training mode" if isinstance(layer, QAT) else "")
    make = _to_int8("dynamic")
    new = {layer: make(layer) for layer in prepared}
    if read := [name for layer, name in prepared.items() if isinstance(layer, QAT) and layer.is_read]:
        LOG.info(
            "convert_: code outside of these layers has read their weights, in forward or elsewhere. The weights were "
            "floats and are dequantized int8 from now on, so what is computed from them may change: %s",
            ", ".join(dict.fromkeys(map(of_all_blocks, read))),
        )
    result = _replace_layers("convert_", model, model, new, None)  # `prepare_` or `prepare_qat_` has warned already
    observed = {new[layer] for layer in prepared if isinstance(layer, Observed) and layer.observer is not None}
    for parent in result.modules():
        if type(parent) is nn.Sequential and sum(layer in observed for layer in parent) > 1:
            parent.__class__ = Int8Sequential  # the object stays the same
    return result


# -------------------------------------------------------------------------------------------------- prepared layers
class MinMaxObserver(FixedDtypes):
    """Record the smallest and the largest value of all batches on the device, without waiting for it.

    `low` is inf and `high` is -inf before the first batch. Both are 0-dim fp32.
    """

    low: Tensor
    high: Tensor

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((), torch.inf, device=device))
        self.register_buffer("high", torch.full((), -torch.inf, device=device))

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Widen the range by a batch. Return the range of the batch, or if it is empty that of all batches so far."""
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
                "MinMaxObserver: a range must be recorded outside of the transforms of torch.func; before using such a "
                "transform, call eval() on a model of prepare_qat_, or convert_ on a model of prepare_"
            ) from error
        return low, high

    def check(self, name: str, when: str = "") -> None:
        """Raise ValueError unless the layer `name` has recorded a finite range. Waits for the device."""
        low, high = self.low.item(), self.high.item()
        if low > high:
            raise ValueError(
                f"convert_: layer {name!r} must have seen a batch, got none; run some batches through the prepared "
                f"model{when}, or, if its input never reaches the layer, leave it out of the float model's preparation "
                f"with filter_fn=lambda layer, name: name != {name!r}"
            )
        if not (abs(low) < torch.inf and abs(high) < torch.inf):
            raise ValueError(f"convert_: inputs of layer {name!r} must be finite, got a range from {low} to {high}")


def _affine(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point for asymmetric codes of a range. The scale is NaN before a batch."""
    both = quantize_int8(torch.stack([low, high]), symmetric=False)
    assert both.zero_point is not None
    return both.scale, both.zero_point


class _Prepared(LoadsItsKind):
    """A layer that takes the place of a float layer until `convert_`, with its parameters and its plain attributes."""

    observer: Any  # a MinMaxObserver, or None if each row or image is quantized by its own range
    is_transposed: bool  # whether this is a linear layer with the weight [in_features, out_features] of a Conv1D
    embed_scale: float  # of an embedding

    @classmethod
    def of(cls, layer: Any, observes: bool) -> Any:
        """Return a layer in place of a float layer. It records the range of inputs if `observes`."""
        kind: Any = next(c for c in _PREPARED if issubclass(c, cls) and issubclass(c, kind_in_torch(layer)))
        made = kind.__new__(kind)
        nn.Module.__init__(made)
        vars(made).update((name, value) for name, value in vars(layer).items() if name not in vars(made))
        made._parameters.update(layer._parameters)
        made.observer = MinMaxObserver(layer.weight.device) if observes and not issubclass(kind, nn.Embedding) else None
        if issubclass(kind, nn.Linear):
            made.is_transposed = is_transposed(layer)
            made.out_features, made.in_features = matrix(layer).shape
        elif issubclass(kind, nn.Embedding):
            factor = factor_of(layer)
            made.embed_scale = 1.0 if factor is None else factor
        return made.train(layer.training)


class Observed(_Prepared):
    """A layer of `prepare_`. It computes in floating point, and records the range of its inputs."""

    def _record(self, x: Tensor) -> None:
        check_is_dense(type(self).__name__, x)
        self.observer(x)


class QAT(_Prepared):
    """A layer of `prepare_qat_`. It computes in int8, and trains its float weight.

    It notes whether code of another package than torch and this one reads its weight. A `forward` that does so computes
    with floats until `convert_`. A compiled function leaves no note.
    """

    is_read = False

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not torch.compiler.is_compiling():
            reader: str = sys._getframe(1).f_globals.get("__name__", "")
            if reader.partition(".")[0] not in ("torch", "amp_kernels"):
                vars(self)["is_read"] = True
        return super().__getattr__(name)

    def _multiply(
        self, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, steps: Steps | None = None
    ) -> Tensor:
        """Multiply or convolve codes, and record the range of `x` in training; see `w8a8`."""
        of_x: tuple[Tensor | None, Tensor | None] = None, None
        if self.observer is not None:
            # In training the range of this batch alone is used, because activation checkpointing runs this forward pass
            # a second time in the backward pass. By then later batches may have widened the range of all batches.
            seen = self.observer
            of_x = _affine(*(seen(x) if self.training else (seen.low, seen.high)))
        return w8a8(x, weight, scale, bias, *of_x, compute_dtype(x), not self.training, steps)


# Each of these classes is also of the class of torch that it replaces, for code that looks for this class.
class ObservedLinear(Observed, nn.Linear):
    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        self._record(x)
        return linear_part(self, x, outputs)


class QATLinear(QAT, nn.Linear):
    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        return apply_linear(self, x, matrix(self), None, self._multiply, outputs)


class _ObservedConv(Observed):
    def forward(self, x: Tensor) -> Any:
        self._record(x)
        return super().forward(x)


class _QATConv(QAT):
    def forward(self, x: Tensor) -> Tensor:
        return apply_convolution(self, x, by_outputs(self), None, self._multiply)


class ObservedConv1d(_ObservedConv, nn.Conv1d): ...


class ObservedConv2d(_ObservedConv, nn.Conv2d): ...


class QATConv1d(_QATConv, nn.Conv1d): ...


class QATConv2d(_QATConv, nn.Conv2d): ...


class ObservedConvTranspose2d(_ObservedConv, nn.ConvTranspose2d):
    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Any:
        check_output_size(self, x, output_size)
        return super().forward(x)


class QATConvTranspose2d(QAT, nn.ConvTranspose2d):
    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        # The convolution multiplies by several rows for each output (`_up_convolve`). They share a scale.
        scale = codes_of_weight(self).scale
        return apply_convolution(self, x, by_outputs(self), scale, self._multiply, output_size)


class ObservedEmbedding(Observed, nn.Embedding):
    def forward(self, index: Tensor) -> Tensor:
        rows = super().forward(index)
        return rows if self.embed_scale == 1 else rows * self.embed_scale


class QATEmbedding(QAT, nn.Embedding):
    def forward(self, index: Tensor) -> Tensor:
        return scaled_rows(self, fake_quantize_int8(super().forward(index), dim=-1))


_PREPARED = (
    ObservedLinear, ObservedConv1d, ObservedConv2d, ObservedConvTranspose2d, ObservedEmbedding, QATLinear, QATConv1d,
    QATConv2d, QATConvTranspose2d, QATEmbedding,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- helpers
_FROM_FLOAT: dict[Any, Any] = {
    nn.Linear: Int8Linear.from_linear,
    nn.Conv1d: Int8Conv1d.from_conv,
    nn.Conv2d: Int8Conv2d.from_conv,
    nn.ConvTranspose2d: Int8ConvTranspose2d.from_conv,
}


def _int8_layer(layer: Any, mode: Mode, weight: Int8Tensor) -> Any:
    """Return the int8 layer with these codes for a float layer, or for a prepared one, static if it has an observer."""
    if isinstance(layer, nn.Embedding):
        made = Int8Embedding.from_embedding(layer, weight=weight)
        made.embed_scale = layer.embed_scale if isinstance(layer, _Prepared) else made.embed_scale
        return made
    make = partial(_FROM_FLOAT[kind_in_torch(layer)], layer, weight=weight)
    if not isinstance(layer, _Prepared) or layer.observer is None:
        return make(mode)
    scale, zero_point = _affine(layer.observer.low, layer.observer.high)
    return make("static", input_scale=scale, input_zero_point=zero_point)


def _to_int8(mode: Mode) -> Callable[[Any], Any]:
    """Return a function that makes int8 layers. For a weight that layers share, these share codes, scales and dtype."""
    first: dict[tuple[Tensor, bool], Any] = {}

    def make(layer: Any) -> Any:
        key = layer.weight, is_transposed(layer)
        made = _int8_layer(layer, mode, first[key]._codes() if key in first else codes_of_weight(layer))
        made.weight_dtype = first.setdefault(key, made).weight_dtype
        return made

    return make


def _exchange_layers(
    op: str,
    model: nn.Module,
    filter_fn: FilterFn | None,
    make: Callable[[Any], nn.Module],
    *,
    needs_int8_input: bool,
    in_place: bool = False,
) -> nn.Module:
    """Put the layers that `make` returns in the place of those that can be int8. After an error nothing has changed.

    If `in_place`, the new layers keep the parameters, and batch norms are folded into these.
    """
    check_model(op, model)
    # The projections of a `torch.nn.MultiheadAttention` are not layers. A `MultiheadAttention` of this package takes
    # its place, with the same parameters.
    attentions: list[Any] = [module for module in model.modules() if can_replace(module)]
    split: dict[nn.Module, nn.Module] = {module: MultiheadAttention.from_attention(module) for module in attentions}
    root = split.get(model, model)
    try:
        exchange(model, split)
        found, spared = _find(op, root, filter_fn, needs_int8_input)
        pairs = folded(root, [layer for layer in found if isinstance(layer, CONVOLUTIONS)], in_place=in_place)
        stand_ins = {pair.conv: pair.stand_in(in_place=in_place) for pair in pairs}
        new = {layer: make(stand_ins.get(layer, layer)) for layer in found}
    except BaseException:
        exchange(model, {ours: theirs for theirs, ours in split.items()})
        raise
    exchange(model, {ours: theirs for theirs, ours in split.items() if not any(c in new for c in ours.children())})
    norms = sum(map(is_batch_norm, root.modules()))
    for pair in pairs if in_place else ():
        pair.write()
    exchange(root, {pair.norm: FoldedBatchNorm(pair.norm) for pair in pairs})
    if norms:
        LOG.info("folded %d of %d batch norms into convolutions", len(pairs), norms)
    return _replace_layers(op, model, root, new, spared)


def _find(op: str, model: nn.Module, filter_fn: FilterFn | None, needs_int8_input: bool) -> tuple[list[Any], list[Any]]:
    """Find and check the layers to replace. Return them, and the layers that `filter_fn` left out."""
    known = {layer: name for name, layer in model.named_modules() if _is_known(layer)}
    taken = {layer: name for layer, name in known.items() if filter_fn is None or filter_fn(layer, name)}
    kept = kept_weights(model, taken)
    found = {layer: name for layer, name in taken.items() if id(layer.weight) not in kept}
    for layer, name in found.items():
        if layer.weight.dtype not in DTYPE_CODES:
            raise TypeError(
                f"{op}: the weight of {name!r} must be float32, float16 or bfloat16, got {layer.weight.dtype}; "
                "leave the layer out with filter_fn"
            )
        inputs = terms(by_outputs(layer).shape, is_transposed(layer))
        if needs_int8_input and inputs > MAX_K and not isinstance(layer, nn.Embedding):
            raise ValueError(
                f"{op}: {name!r} must have at most {MAX_K} inputs, got {inputs}; leave it out with filter_fn"
            )
        _check_loses_nothing(op, name, layer)
    if not found:
        raise ValueError(
            f"{op}: model must have an nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d or nn.Embedding to "
            f"replace, got {type(model).__name__}"
            + (", where each of these shares its weight with a layer that is not replaced" if taken else " without any")
            + ("" if known else _why_layers_stay(model))
            + _what_was_done(model)
        )
    return list(found), [layer for layer in known if layer not in taken]


def _what_was_done(model: nn.Module) -> str:
    """Return the end of an error message about a model that was converted or prepared earlier, or else ""."""
    if any(isinstance(layer, Int8Weight) for layer in model.modules()):
        return "; the model is int8 already: for another mode convert the float model"
    if any(isinstance(layer, _Prepared) for layer in model.modules()):
        return "; the model is prepared already: call convert_ to make it int8"
    return ""


def _why_layers_stay(model: nn.Module) -> str:
    """Return the part of an error message that says why the layers of a model cannot be replaced."""
    kinds = {type(layer) for layer in model.modules()}
    reason = ""
    if any(map(is_parametrized, model.modules())):
        reason += "; call torch.nn.utils.parametrize.remove_parametrizations for layers with a weight_norm"
    if not kinds.isdisjoint((nn.Conv1d, nn.Conv2d)):
        reason += "; a convolution must have groups=1, and pad both ends of a dimension with as many zeros"
    if nn.ConvTranspose2d in kinds:
        reason += (
            "; a transposed convolution must have kernels that do not overlap: a stride equal to the size of its "
            "kernel, no padding, no dilation and groups=1"
        )
    return reason


def _is_known(layer: nn.Module) -> bool:
    """Return whether a layer can be replaced. It may be of a subclass that computes the same; see `factor_of`."""
    if isinstance(layer, Linear):
        return type(layer) is Linear and layer.activation is None
    if isinstance(layer, _Prepared):
        return False
    if not isinstance(layer, (nn.Linear, nn.Embedding, *CONVOLUTIONS)):
        return is_conv1d(layer)
    return not (isinstance(layer, CONVOLUTIONS) and why_not_int8(layer)) and factor_of(layer) is not None


def left_in_float(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with matrices that `quantize_` leaves in floating point or refuses, by their names."""
    done: set[Any] = {layer for layer in model.modules() if _is_known(layer) and not _is_refused(layer)}
    for module in model.modules():
        if can_replace(module) and not _is_refused(module.out_proj):
            done |= {module, module.out_proj}
    kept = kept_weights(model, done)

    def is_left(layer: nn.Module) -> bool:
        own = [p for p in layer.parameters(recurse=False) if is_lazy(p) or p.dim() > 1]
        return bool(own) and (layer not in done or any(id(p) in kept for p in own))

    return {name: layer for name, layer in model.named_modules() if is_left(layer)}


def _is_refused(layer: Any) -> bool:
    """Return whether `quantize_` raises an error for a layer that could be replaced otherwise."""
    return layer.weight.dtype not in DTYPE_CODES or has_hooks(layer) or bool(additions(layer))


def _check_loses_nothing(op: str, name: str, layer: nn.Module) -> None:
    if has_hooks(layer):
        raise ValueError(
            f"{op}: {name!r} must have no hooks, and no forward that was assigned to the object (as accelerate does), "
            "since the new layer would lose them; remove them (remove_weight_norm, remove_hook_from_module), or leave "
            "the layer out with filter_fn"
        )
    if added := [key for key in additions(layer) if not (isinstance(layer, _Prepared) and key == "observer")]:
        raise ValueError(
            f"{op}: {name!r} must have no parameters, buffers or modules other than weight and bias, got "
            f"{', '.join(added)}, since the new layer would lose them; leave the layer out with filter_fn"
        )


def _replace_layers(
    op: str, model: nn.Module, root: nn.Module, new: Mapping[Any, nn.Module], spared: Iterable[Any] | None
) -> nn.Module:
    """Replace layers of `root` in place, and log this. Return `root`, or the new layer if `root` is a layer.

    `root` is the `model` of the user, or what took its place. `spared` holds the layers that `filter_fn` left out. If
    it is None, the level of the log line is always INFO.
    """
    line, is_unexpected = shares(root, new.keys(), spared or ())
    warns = is_unexpected and spared is not None
    exchange(root, new)
    # In eval mode the fused kernels of torch's transformer layers read the weights of linear layers and do not call the
    # layers. So they are switched off around new layers.
    made = set(new.values())
    encoders = nn.TransformerEncoderLayer, nn.TransformerEncoder
    for parent in (m for m in root.modules() if isinstance(m, encoders) and not made.isdisjoint(m.modules())):
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0
        else:  # with a padding mask the encoder would make nested tensors, which only the fused kernels can read
            parent.use_nested_tensor = False
    LOG.log(logging.WARNING if warns else logging.INFO, "%s: %s", op, line)
    result = new.get(root, root)
    if result is not model:
        kind = type(model).__name__
        LOG.warning("%s: a %s by itself cannot be replaced in place; use the layer that %s returns", op, kind, op)
    return result
