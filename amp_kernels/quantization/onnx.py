"""Export int8 models to ONNX.

During the export, a stand-in takes the place of each int8 layer. Stand-ins compute with ONNX operators
(`torch.onnx.ops.symbolic`), in ONNX's order of dimensions, so no transpose is needed around a convolution. torch
translates everything else in the model.

Codes and weights are uint8 here: an int8 code plus 128, with the zero point plus 128. On CPUs without VNNI
instructions, onnxruntime multiplies uint8 by uint8 exactly. It saturates sums of uint8 times int8.

The guide to int8 lists the operators that a product becomes. If a layer passes codes, they are DequantizeLinear, a
product of floats and QuantizeLinear, which runtimes replace by one integer operator. This would not do for layers that
return floats: no QuantizeLinear follows 12 of the 20 convolutions of a ResNet-18, and onnxruntime 1.32 computes such
convolutions in floating point.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .._loader import import_extra
from ..nn import Int8Conv1d, Int8Conv2d, Int8ConvTranspose2d, Int8Embedding, Int8Linear
from ..nn.conversion import ALL, check_model, exchange, has_hooks, terms
from ..nn.int8 import Int8ProductLayer, Int8Weight, scaled_rows
from ..nn.int8_conv import check_output_size, steps_of
from ..nn.int8_sequential import Int8Sequential

OPSET = 18  # torch exports it without a conversion to another version
MAX_TERMS = 2**31 // (255 * 127)  # in runtimes, a code minus its zero point is up to 255, and a sum is an int32


def export_onnx(
    model: nn.Module, example: Tensor | tuple[Any, ...], path: str | os.PathLike[str], *, dynamic_batch: bool = True
) -> None:
    """Write an int8 model to an ONNX file, for runtimes such as onnxruntime.

    Call this after `quantize_` or `convert_`, in eval mode. The file has the ONNX operator set 18 and only standard
    operators. Weights and codes are uint8: int8 codes plus 128.

    Inputs must be finite. The guide to int8 lists the operators and the limits of the file.

    Args:
        model: An fp32 model, converted in any mode. It does not change.
        example: An input, or the tuple of the positional arguments of `model`. Only shapes and dtypes matter. Tensors
            may also be in lists, tuples and dicts.
        path: The file to write. Its folder must exist.
        dynamic_batch: Whether the size of the first dimension may change between calls. It is then the same in all
            tensors of `example`. All other sizes are those of `example`. If `model` needs one batch size, torch.export
            raises an error.

    Raises:
        TypeError: `model` is not an `nn.Module`, or a parameter, layer or input is fp16 or bf16. Or the class of an
            int8 layer is a subclass of those in `amp_kernels.nn`. Or `example` is neither a tensor nor a tuple, or has
            too few or too many arguments.
        ValueError: `model` or a module in it is in training mode. Or `model` has no int8 layers, has prepared layers,
            is not on the CPU, or calls a layer that is not one of its children. Or an int8 layer has hooks, or has a
            zero point outside of int8, or sums more than 66311 products for an output in a mode other than
            `"weight_only"`. Or an input of a convolution has no batch dimension, an `output_size` does not fit, or
            `example` has no tensor.
        FileNotFoundError: The folder of `path` does not exist.
        ImportError: The packages of the extra `onnx` are not installed.

    Examples:
        >>> model = amp_kernels.quantization.quantize_(torch.nn.Sequential(torch.nn.Linear(16, 8))).eval()
        >>> amp_kernels.quantization.export_onnx(model, torch.ones(1, 16), "model.onnx")  # doctest: +SKIP
    """
    arguments = example if isinstance(example, tuple) else (example,)
    _check(model, example, arguments, Path(path))
    batch, shapes = torch.export.Dim("batch"), None
    if dynamic_batch:
        # The parameters of `forward` by name: one of the kind `*inputs` has a tuple.
        named = inspect.signature(model.forward).bind(*arguments).arguments
        shapes = tree_map(lambda x: {0: batch} if _has_batch(x) else None, dict(named))
        # torch.export would take a size of 1 for a constant.
        arguments = tree_map(lambda x: torch.cat([x, x]) if _has_batch(x) and len(x) == 1 else x, arguments)
    # Under autocast the file would have products of bf16, which onnxruntime does not run.
    with (
        _stand_ins(model) as stand_in,
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),  # otherwise layers would pass floats, so that their biases get gradients
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "# The axis name: batch will not be used")  # a second time
        # If `model` needs one batch size, this raises an error. torch.onnx.export would write a file for one size.
        exported = torch.export.export(stand_in, arguments, dynamic_shapes=shapes)
        _check_has_no_operator_of_ours(exported.graph)
        # These name the first dimension "batch" in the inputs of the file, which are the tensors.
        names = [{0: batch} if _has_batch(x) else None for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        program = torch.onnx.export(
            exported,
            dynamo=True,
            dynamic_shapes=names if dynamic_batch else None,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    program.save(path)


def _has_batch(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def _check(model: nn.Module, example: object, arguments: tuple[Any, ...], path: Path) -> None:
    from . import _Prepared  # that file imports this one

    op = "export_onnx"
    check_model(op, model)
    layers: dict[Any, str] = {layer: name for name, layer in model.named_modules() if isinstance(layer, Int8Weight)}
    prepared = [name for name, layer in model.named_modules() if isinstance(layer, _Prepared)]
    if prepared:
        raise ValueError(f"{op}: model must be converted, got the prepared layer {prepared[0]!r}; call convert_")
    if not layers:
        raise ValueError(
            f"{op}: model must have int8 layers, got {type(model).__name__} without any; call quantize_, or prepare_ "
            "and convert_ (for a float model call torch.onnx.export)"
        )
    in_training = next((name for name, module in model.named_modules() if module.training), None)
    if in_training is not None:
        got = f"{in_training!r} in training mode" if in_training else "training mode"
        raise ValueError(f"{op}: model must be in eval mode, got {got}; call model.eval()")
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    if not tensors:
        raise ValueError(f"{op}: example must be a tensor or a tuple with a tensor, got {example!r}")
    if not isinstance(example, Tensor | tuple):
        kind = type(example).__name__
        raise TypeError(
            f"{op}: example must be a tensor or a tuple, got a {kind}; if model takes a {kind}, pass a tuple with it"
        )
    try:
        inspect.signature(model.forward).bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"{op}: example must have the arguments of {type(model).__name__}.forward, got {len(arguments)} of them: "
            f"{error}"
        ) from None
    for tensor in (*model.parameters(), *model.buffers(), *tensors):
        if tensor.device.type != "cpu":
            raise ValueError(f"{op}: model and example must be on the CPU, got {tensor.device}; call .cpu() on both")
    floats = [tensor for tensor in (*model.parameters(), *tensors) if tensor.is_floating_point()]
    for dtype in (*(layer.dtype for layer in layers), *(tensor.dtype for tensor in floats)):
        if dtype is not torch.float32:
            raise TypeError(f"{op}: model and example must be float32, got {dtype}; call .float() on both")
    for layer, name in layers.items():
        if type(layer) not in _STAND_INS:
            known = ", ".join(kind.__name__ for kind in _STAND_INS)
            raise TypeError(f"{op}: {name!r} must be one of {known}, got {type(layer).__name__}; leave it in float")
        zero_point = getattr(layer, "input_zero_point", None)
        if zero_point is not None and not -128 <= zero_point.item() <= 127:
            raise ValueError(
                f"{op}: input_zero_point of {name!r} must be from -128 to 127, as int8 codes are, got "
                f"{zero_point.item()}; take that of prepare_ and convert_"
            )
        products = terms(layer.weight_codes.shape, layer.is_transposed) if isinstance(layer, Int8ProductLayer) else 0
        if products > MAX_TERMS and layer.mode != "weight_only":
            raise ValueError(
                f"{op}: the outputs of {name!r} must sum at most {MAX_TERMS} products, since runtimes sum in int32, "
                f"got {products}; convert the model in the mode 'weight_only', or leave the layer out with filter_fn"
            )
        if has_hooks(layer):
            raise ValueError(f"{op}: {name!r} must have no hooks, since the file would lose them; remove them first")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{op}: the folder of path must exist, got {str(path)!r}; create it first")
    for package in ("onnx", "onnxscript"):
        import_extra(op, package, "onnx")


def _check_has_no_operator_of_ours(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("amp_kernels."):
            raise ValueError(
                f"export_onnx: model must call only layers that are its children, or are in its lists, tuples and "
                f"dicts, got a call of {node.target}, which ONNX does not have, by another layer; assign the layer to "
                "an attribute of the model (and if the layer itself is in torch.compile, take it out)"
            )


# ------------------------------------------------------------------------------------------------- ONNX operators
class _Codes(NamedTuple):
    """uint8 codes with their scale and zero point: what one stand-in passes to the next."""

    values: Tensor
    scale: Tensor
    zero_point: Tensor

    @classmethod
    def of(cls, x: Tensor, scale: Tensor, zero_point: Tensor) -> _Codes:
        values = _onnx("QuantizeLinear", (x, scale, zero_point), torch.uint8, x.shape)
        return cls(values, scale, zero_point)

    def dequantized(self, axis: int = 0) -> Tensor:
        """Return the numbers. If there are several scales, they belong to the dimension `axis`."""
        return _onnx("DequantizeLinear", self, torch.float32, self.values.shape, axis=axis)


def _onnx(op: str, inputs: tuple[Tensor | None, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
    return torch.onnx.ops.symbolic(op, inputs, attributes, dtype=dtype, shape=shape)


def _unsigned(codes: Tensor) -> Tensor:
    """Return int8 codes, or int32 zero points, as uint8."""
    return (codes.int() + 128).to(torch.uint8).contiguous()


def _middle() -> Tensor:
    """Return the zero point of a weight."""
    return torch.full((), 128, dtype=torch.uint8)


def _steps(weight: _Codes) -> Tensor:
    """Return the codes of a weight minus their zero point, as floats."""
    return weight.values.float() - 128


# ----------------------------------------------------------------------------------------------------- stand-ins
class _StandIn(nn.Module):
    """Stands in for a layer, whose other attributes can be read too."""

    def __init__(self, layer: nn.Module, **tensors: Tensor | None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        # Not a child, since torch.export would take its parameters for those of the model. And not earlier, since torch
        # registers no name that `__getattr__` finds.
        vars(self)["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self).get("_layer"), name)


class _Product(_StandIn):
    """Stands in for an int8 layer that multiplies.

    A subclass has the methods `multiply`, `sums` and `sums_of_weights`.
    """

    roomy_codes: Tensor  # the weight of a product whose results are codes (`_with_room`)
    bias: nn.Parameter | None  # as in the layer, for models that read it
    repeats: int  # how many outputs in a row have the same bias
    axis: int  # the dimension of the outputs in `weight_codes`
    order: tuple[int, ...]  # for each dimension of the weight, the dimension of `weight_codes`
    # The shapes in which a number for each output broadcasts with the weight and with a result.
    for_weight: tuple[int, ...]
    for_result: tuple[int, ...]
    reduced: tuple[int, ...]  # the dimensions of an input that share a range in the mode "dynamic"

    def __init__(self, layer: Any, codes: Tensor, repeats: int = 1) -> None:
        scale = layer.weight_scale.flatten().repeat(repeats)
        tensors: dict[str, Tensor | None] = {"weight_codes": _unsigned(codes), "weight_scale": scale}
        tensors["weight_zero_point"] = torch.full_like(scale, 128, dtype=torch.uint8)
        input_scale = layer.input_scale
        if input_scale is not None:
            if layer.bias is not None:
                codes, scale = _with_room(codes.movedim(self.axis, 0), scale, layer.bias.repeat(repeats), input_scale)
                codes = codes.movedim(0, self.axis)
            tensors |= {"roomy_codes": _unsigned(codes), "roomy_scale": scale, "input_scale": input_scale.reshape(())}
            tensors["input_zero_point"] = _unsigned(layer.input_zero_point).reshape(())
        super().__init__(layer, bias=layer.bias, **tensors)
        self.mode, self.repeats = layer.mode, repeats

    def forward(self, x: Tensor | _Codes, outputs: slice = ALL) -> Any:
        return self._compute(x, outputs=outputs)

    def _compute(
        self, x: Tensor | _Codes, passed: tuple[Tensor, Tensor] | None = None, dtype: Any = None, outputs: slice = ALL
    ) -> Any:
        """Return floats. If `passed` has a scale and a zero point, return codes."""
        bias: Tensor | None = self.bias
        if bias is not None and self.repeats > 1:
            bias = bias.repeat(self.repeats)
        if passed is not None:
            codes = x if isinstance(x, _Codes) else self.codes_of(x)
            weight = _Codes(self.roomy_codes, self.roomy_scale, self.weight_zero_point)
            return _Codes.of(self.multiply(codes.dequantized(), weight.dequantized(self.axis), bias), *passed)
        weight = _Codes(self.weight_codes, self.weight_scale, self.weight_zero_point)
        if outputs is not ALL:  # of a linear layer
            weight = _Codes(weight.values[:, outputs], weight.scale[outputs], weight.zero_point[outputs])
            bias = None if bias is None else bias[outputs]
        if self.mode == "weight_only":
            # Not a DequantizeLinear: onnxruntime 1.32 would then quantize the inputs of linear layers too, which
            # changes results by 0.5%.
            return self.multiply(x, self.numbers(weight), bias)
        codes = x if isinstance(x, _Codes) else self.codes_of(x)
        if self.mode == "static":
            sums = self.sums(codes, weight, codes.zero_point)
        else:
            # The operators take one zero point for all rows or images, but here each has its own. So they sum codes as
            # they are, and a product of the zero point is subtracted.
            sums = self.sums(codes, weight, None) - codes.zero_point.int() * self.sums_of_weights(codes, weight).int()
        result = sums.float() * (codes.scale * weight.scale.reshape(self.for_result))
        return result if bias is None else result + bias.reshape(self.for_result)

    @staticmethod
    def _on_codes(layer: nn.Module, x: _Codes) -> _Codes:
        """Apply a layer to codes. Runtimes do so, and drop the operators around it."""
        return _Codes.of(layer(x.dequantized()), x.scale, x.zero_point)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, for models that read it or its dtype."""
        codes = _Codes(self.weight_codes, self.weight_scale, self.weight_zero_point)
        return self.numbers(codes).permute(self.order)

    def numbers(self, weight: _Codes) -> Tensor:
        return _steps(weight) * weight.scale.reshape(self.for_weight)

    def codes_of(self, x: Tensor) -> _Codes:
        """Quantize an input, to the codes of `quantize_int8` plus 128."""
        if self.mode == "static":
            # `quantize_int8` multiplies by 1 / scale, and QuantizeLinear divides. So the product is an operator of its
            # own, and the scale of QuantizeLinear is 1. With a division, 6 of 10 million codes would differ by 1.
            codes = _Codes.of(x * (1 / self.input_scale), torch.ones(()), self.input_zero_point)
            return codes._replace(scale=self.input_scale)
        low, high = x.amin(self.reduced, keepdim=True).clamp(max=0), x.amax(self.reduced, keepdim=True).clamp(min=0)
        scale = high / 255 - low / 255
        scale = torch.where((1 / scale).isinf(), 1.0, scale)  # of zeros
        zero_point = torch.round(-128 - low * (1 / scale)) + 128
        values = (torch.round(x * (1 / scale)) + zero_point).clamp(0, 255).to(torch.uint8)
        return _Codes(values, scale, zero_point)


def _with_room(codes: Tensor, scale: Tensor, bias: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes of a weight [N, ...] and their scales [N], so that runtimes can add the bias to an int32 sum.

    Runtimes round `bias / (input_scale * scale)` to an int32 and do not check that it fits. It does not if the weights
    of an output are tiny, as after a batch norm whose weight is nearly 0. Such an output gets a larger scale, with
    smaller codes. Its weights hardly count beside its bias.

    If all codes of an output are 0, its scale may have any value. A scale of 1 would round the bias to multiples of
    `input_scale`, so it becomes as small as possible.
    """
    old, step = scale.double(), input_scale.double()
    totals = codes.flatten(1).double().abs().sum(1)
    largest = 255 * totals * old + bias.detach().double().abs() / step  # a sum and the bias, in units of `step`
    least = largest / (0.99 * 2**31)  # the rounding of the new codes adds at most 0.4%
    new = torch.where(largest > (2**31 - 2) * old, least, old)
    # `input_scale` times the scale must be a normal fp32 number.
    new = torch.where((totals == 0) & (largest > 0), least.clamp(min=1e-37 / step.item()), new).float()
    ratio = (old / new.double()).reshape(-1, *[1] * (codes.dim() - 1))
    return torch.where(ratio == 1, codes, torch.round(codes * ratio).to(torch.int8)), new


class _Linear(_Product):
    axis, for_weight, for_result, reduced = 1, (-1,), (-1,), (-1,)

    def __init__(self, layer: Int8Linear) -> None:
        super().__init__(layer, layer.weight_codes.t())
        self.order = (0, 1) if layer.is_transposed else (1, 0)

    def multiply(self, x: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight if bias is None else x @ weight + bias

    def sums(self, codes: _Codes, weight: _Codes, zero_point: Tensor | None) -> Tensor:
        """Return the int32 sums of products of codes, after a zero point is subtracted from the input's codes."""
        shape = (*codes.values.shape[:-1], weight.values.shape[1])
        return _onnx("MatMulInteger", (codes.values, weight.values, zero_point, _middle()), torch.int32, shape)

    def sums_of_weights(self, codes: _Codes, weight: _Codes) -> Tensor:
        """Return for each output the sum of the weights that multiply inputs, as floats."""
        return _steps(weight).sum(0)


class _Conv(_Product):
    axis = 0

    def __init__(self, layer: Any, codes: Tensor | None = None, repeats: int = 1) -> None:
        super().__init__(layer, layer.weight_codes.movedim(-1, 1) if codes is None else codes, repeats)
        dims = len(layer.kernel_size)
        self.for_weight, self.for_result = (-1, *[1] * (dims + 1)), (-1, *[1] * dims)
        self.order, self.reduced = tuple(range(dims + 2)), tuple(range(1, dims + 2))
        self.steps = {name: step[-dims:] for name, step in steps_of(layer).items()}

    def _compute(self, x: Tensor | _Codes, *passed: Any, **outputs: Any) -> Any:
        dims, expected = (x.values if isinstance(x, _Codes) else x).dim(), self.weight_codes.dim()
        if dims != expected:
            raise ValueError(
                f"export_onnx: the input of a convolution must have {expected} dimensions, the first for the batch, "
                f"got {dims}"
            )
        return super()._compute(x, *passed, **outputs)

    def multiply(self, x: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = F.conv1d if weight.dim() == 3 else F.conv2d
        return convolve(x, weight, bias, **self.steps)

    def sums(self, codes: _Codes, weight: _Codes, zero_point: Tensor | None) -> Tensor:
        strides, pads, dilations = (self.steps[name] for name in ("stride", "padding", "dilation"))
        outputs, _, *kernel = weight.values.shape
        images, _, *pixels = codes.values.shape
        sizes = zip(pixels, kernel, strides, pads, dilations, strict=True)
        shape = images, outputs, *((n + 2 * pad - step * (k - 1) - 1) // by + 1 for n, k, by, pad, step in sizes)
        inputs = codes.values, weight.values, zero_point, _middle()
        return _onnx(
            "ConvInteger", inputs, torch.int32, shape, strides=strides, pads=(*pads, *pads), dilations=dilations
        )

    def sums_of_weights(self, codes: _Codes, weight: _Codes) -> Tensor:
        # At the edges of an image some weights multiply padding, not inputs.
        ones = torch.ones((1, 1, *codes.values.shape[2:]), device=codes.values.device)
        return self.multiply(ones, _steps(weight).sum(1, keepdim=True), None)


class _ConvTranspose(_Conv):
    """Stands in for a transposed convolution, whose kernels do not overlap.

    It is a convolution with kernels of one pixel. For each pixel, the outputs are then put in the place of a block of
    pixels.
    """

    def __init__(self, layer: Int8ConvTranspose2d) -> None:
        codes = layer.weight_codes.movedim(0, -2).flatten(0, -2)  # an output for each pixel of a block and each channel
        super().__init__(layer, codes[..., None, None], math.prod(layer.kernel_size))
        self.kernel, self.reduced = layer.kernel_size, (1,)
        self.steps = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}

    @property
    def weight(self) -> Tensor:
        weight = super().weight.flatten(1)
        return weight.unflatten(0, (*self.kernel, -1)).movedim((-1, -2), (0, 1))

    def forward(self, x: Tensor | _Codes, output_size: Any = None) -> Any:
        check_output_size(self._layer, x.values if isinstance(x, _Codes) else x, output_size)
        return self._compute(x)

    def _compute(self, x: Tensor | _Codes, *passed: Any, **outputs: Any) -> Any:
        y = super()._compute(x, *passed, **outputs)
        return y._replace(values=self.blocks(y.values)) if isinstance(y, _Codes) else self.blocks(y)

    def blocks(self, x: Tensor) -> Tensor:
        """Return [B, N, H * kernel height, W * kernel width] for [B, kernel height * kernel width * N, H, W]."""
        pixels = [n * k for n, k in zip(x.shape[2:], self.kernel, strict=True)]
        x = x.unflatten(1, (*self.kernel, -1)).permute(0, 3, 4, 1, 5, 2)
        return x.reshape(*x.shape[:2], *pixels)


class _Embedding(_StandIn):
    def __init__(self, layer: Int8Embedding) -> None:
        super().__init__(layer, weight_codes=layer.weight_codes, weight_scale=layer.weight_scale)

    @property
    def weight(self) -> Tensor:
        return self.weight_codes * self.weight_scale

    def forward(self, index: Tensor) -> Tensor:
        rows = F.embedding(index, self.weight_codes) * F.embedding(index, self.weight_scale)
        return scaled_rows(self, rows)


_STAND_INS: dict[type[nn.Module], Any] = {
    Int8Linear: _Linear,
    Int8Conv1d: _Conv,
    Int8Conv2d: _Conv,
    Int8ConvTranspose2d: _ConvTranspose,
    Int8Embedding: _Embedding,
}
Int8Sequential.products |= {_Linear, _Conv, _ConvTranspose}


@contextlib.contextmanager
def _stand_ins(model: nn.Module) -> Iterator[nn.Module]:
    """Put stand-ins into a model while the context is open. If the model is an int8 layer, the stand-in is yielded."""
    new = {layer: _STAND_INS[type(layer)](layer) for layer in model.modules() if type(layer) in _STAND_INS}
    try:
        exchange(model, new)
        yield new.get(model, model)
    finally:
        exchange(model, {stand_in: layer for layer, stand_in in new.items()})
