"""Layers with int8 weights for inference: `Int8Linear` and `Int8Embedding`. int8_conv.py has the convolutions.

`amp_kernels.quantization` puts them into a model. A layer stores its weight as int8 codes and fp32 scales, in buffers.
`.half()` and `.to(dtype)` change the dtype of the layer. They do not change codes or scales. The results of an
`Int8Embedding` have the layer's dtype. If the input of an `Int8Linear` is an `Int8Tensor`, its results have the layer's
dtype too, except under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import reference, torch_private
from ..functional import Int8Tensor, fake_quantize_int8, int8_conv2d, int8_matmul, quantize_int8
from ..ops import int8 as ops
from ..ops.checks import check_are_tensors, why_not_loaded
from ..ops.int8 import MAX_K
from ..ops.library import call
from .conversion import ALL, LoadsItsKind, by_outputs, factor_of, is_transposed, terms

Mode = Literal["weight_only", "weight-only", "dynamic", "static"]
MODES: tuple[Mode, ...] = ("weight_only", "dynamic", "static")
# A backward pass dequantizes about this many elements of a weight at a time. They take 8 MB in 16 bits, and are enough
# for a fast product.
PANEL = 2**22

_Fn = Callable[[Tensor], Tensor]
# A function of an input, a weight with its scale, and a bias. It returns the product, or with steps the convolution.
Multiply = Callable[..., Tensor]
Affine = tuple[Tensor, Tensor] | None  # scale and zero point of a result in codes
Steps = dict[str, Any]  # stride, padding and dilation of a convolution, each for height and width
# A layer stores the name of its mode in a tensor. The names differ in length, so the mode is read from the shape of the
# tensor, without a wait for the device. In a checkpoint of another mode the tensor has another shape, so every function
# that loads checkpoints refuses such a checkpoint.
_MODE_OF_LENGTH = {len(mode): mode for mode in MODES}


class FixedDtypes(LoadsItsKind):
    """A module whose buffers keep their dtypes in `.to()`, except the buffer `_dtype_of`, and stay shared."""

    _dtype_of = ""  # name of the buffer whose dtype is the layer's dtype; `.to()` changes this dtype

    def _apply(self, fn: _Fn, recurse: bool = True) -> FixedDtypes:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None:
                continue
            if new.dtype != old.dtype and not (name == self._dtype_of and new.is_floating_point()):
                new = old.to(new.device)
            self._buffers[name] = old
            if new is old:
                continue
            # Other modules may share `old`, so it becomes `new` in place. torch moves parameters in these two ways.
            try:
                old.data = new
            except RuntimeError:  # tensors of different kinds, for example if one is a meta tensor
                try:
                    torch.utils.swap_tensors(old, new)
                except RuntimeError:  # an autograd graph or a weak reference holds `old`, so the sharing ends
                    self._buffers[name] = new
        return self


class DequantizedWeight(Tensor):
    """The dequantized weight of an int8 layer. Every operator that needs its elements computes them from the codes.

    Its dtype, shape and device are known without its elements. T5 reads `wo.weight.dtype` in every forward pass, and in
    a large output layer the elements would take a gigabyte. No elements are kept, so a weight that was read before
    `load_state_dict` has the new values afterwards, except with `assign=True`, which replaces the codes.

    An in-place operator that changes an element raises an error, since the codes would not change. One that changes no
    element raises none, because RWKV models divide a weight by 1. A view or a copy is an ordinary tensor.
    """

    codes: Int8Tensor
    dtype_of: Tensor
    order: tuple[int, ...]  # for each dimension of the weight, the dimension of the codes

    __torch_function__ = torch_private.no_torch_function  # type: ignore[assignment]
    __dlpack_c_exchange_api__ = None  # this interface would export memory, which the tensor does not have

    @staticmethod
    def of(codes: Int8Tensor, order: tuple[int, ...], dtype_of: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a wrapper of codes with their dimensions permuted by `order`, or if none can be made, their numbers.

        Both have attributes by which `layer.weight = weight` finds the codes.
        """
        oriented = _permuted(codes, order)
        self: Any = None
        # While compiling, no wrapper is made. It would save nothing, because the compiler drops a dequantization whose
        # result is not used. Inside a transform of torch.func, no wrapper is made either. In torch.vmap it would
        # dequantize the batched codes later, when that is no longer possible.
        if not (torch.compiler.is_compiling() or torch_private.are_functorch_transforms_active()):
            self = torch_private.wrapper_tensor(DequantizedWeight, oriented.values, dtype)
        if self is None:
            self = oriented.dequantize(dtype)
        self.codes, self.dtype_of, self.order = codes, dtype_of, order
        return self

    def elements(self) -> Tensor:
        """Return the dequantized weight as an ordinary tensor."""
        # In inference mode the elements would be an inference tensor. If an operator returned a view of them, the view
        # would be an inference tensor too. torch would then raise an error, because it gives this view the version
        # counter of this weight, and an inference tensor must not get one.
        with torch.inference_mode(False):
            return _permuted(self.codes, self.order).dequantize(self.dtype)

    def _write(self, name: str, write: Callable[[Tensor], object]) -> Tensor:
        """Apply an in-place operator to a copy of the elements. Raise an error if an element changes."""
        elements = self.elements()
        write(elements)
        if not torch.allclose(elements, self.elements(), rtol=0, atol=0, equal_nan=True):
            raise _written(name)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # `.data` calls `detach` too. The result is again of this class, so that it refuses writes in place.
        if func is torch.ops.aten.detach.default:
            return DequantizedWeight.of(args[0].codes, args[0].order, args[0].dtype_of, args[0].dtype)
        schema = func._schema.arguments
        given = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
        leaves = tree_leaves([given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write])
        written = [leaf for leaf in leaves if isinstance(leaf, DequantizedWeight)]
        if any(tensor is not args[0] for tensor in written):
            raise _written(func.__name__)
        plain_args, plain_kwargs = tree_map_only(DequantizedWeight, DequantizedWeight.elements, (args, kwargs))
        if written:
            return written[0]._write(func.__name__, lambda elements: func(elements, *plain_args[1:], **plain_kwargs))
        return func(*plain_args, **plain_kwargs)

    # torch's versions of the next two methods write into a view. A view of this weight is an ordinary tensor, so the
    # write would be lost.
    def __setitem__(self, index: Any, value: Any) -> None:
        self._write("an assignment to elements", lambda elements: elements.__setitem__(index, value))

    def fill_diagonal_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise an error if an element would change, as other in-place operators do."""
        return self._write("fill_diagonal_", lambda elements: elements.fill_diagonal_(*args, **kwargs))

    @property
    def data(self) -> Tensor:
        """The same weight, detached from autograd."""
        return self.detach()

    @data.setter
    def data(self, value: object) -> None:
        raise _written("an assignment to its data")


def _is_dtype(value: object) -> bool:
    """Return whether a value is like the entry `weight` of an int8 layer in a state dict."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _permuted(codes: Int8Tensor, order: tuple[int, ...]) -> Int8Tensor:
    if order == tuple(range(len(order))):
        return codes
    return Int8Tensor(codes.values.permute(order), codes.scale.permute(order))


def _written(write: str) -> RuntimeError:
    return RuntimeError(
        f"the weight of an int8 layer must not be changed, since it is computed from int8 codes, got {write}; change a "
        "clone, or change the float layer before converting it (for RWKV set rescale_every=0)"
    )


def _method_of_elements(name: str) -> Callable[..., Any]:
    def method(self: DequantizedWeight, *args: Any, **kwargs: Any) -> Any:
        return getattr(nn.Parameter(self.elements(), self.requires_grad), name)(*args, **kwargs)

    return method


# torch's versions of these methods read memory without an operator, so `__torch_dispatch__` is not called. Here the
# methods are called on a parameter with the elements.
for _name in (
    "__deepcopy__", "__dlpack__", "__reduce_ex__", "numpy", "share_memory_", "storage", "tolist", "untyped_storage",
):  # fmt: skip
    setattr(DequantizedWeight, _name, _method_of_elements(_name))


class Int8Weight(FixedDtypes):
    """A layer with int8 codes in place of a weight, one scale for each output, and a dtype that `.half()` changes.

    The first dimension of the codes is that of the outputs.
    """

    _version = 1  # torch saves this number in state dicts

    weight_codes: Tensor
    weight_scale: Tensor
    weight_dtype: Tensor
    _dtype_of = "weight_dtype"
    is_transposed = False  # whether `weight` begins with its inputs, as in a Conv1D or a transposed convolution

    def __init__(self, shape: Sequence[int], device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        scales = (shape[0], *[1] * (len(shape) - 1))
        self.register_buffer("weight_codes", torch.zeros(*shape, dtype=torch.int8, device=device))
        self.register_buffer("weight_scale", torch.ones(scales, dtype=torch.float32, device=device))
        # The dtype is stored as the dtype of a tensor, since state dicts hold only tensors. accelerate looks for
        # persistent buffers under their own names in a state dict. This one has another name there.
        self.register_buffer("weight_dtype", torch.zeros((), dtype=dtype, device=device), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `weight`: that of the original weight, until `.half()` or `.to(dtype)` changes it."""
        return self.weight_dtype.dtype

    @property
    def weight(self) -> Tensor:
        """The dequantized weight in the layer's `dtype`, in the shape of the original weight.

        Read-only. Each read makes a new tensor.
        """
        return DequantizedWeight.of(self._codes(), self._order, self.weight_dtype, self.dtype)

    @property
    def _order(self) -> tuple[int, ...]:
        """For each dimension of the weight, the dimension of the codes."""
        last = self.weight_codes.dim() - 1
        return (*((last, 0) if self.is_transposed else (0, last)), *range(1, last))

    def __setattr__(self, name: str, value: Any) -> None:
        # A setter of the property would not be called for a Parameter, because nn.Module registers a Parameter before
        # it looks for a setter.
        if name == "weight":
            self._tie(value)
        else:
            super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, as `nn.Module` does, but refuse the weight of an int8 layer."""
        # torch.nn.utils.prune calls this method. Without the error here, `prune` would fail later and leave `param` in
        # the layer.
        if isinstance(param, DequantizedWeight):
            raise TypeError(
                f"{type(self).__name__}: {name} must be a parameter with memory of its own, got the weight of an int8 "
                "layer; prune or reparametrize the float layer before converting it"
            )
        super().register_parameter(name, param)

    def _codes(self) -> Int8Tensor:
        return codes_of(self.weight_codes, self.weight_scale)

    def _tie(self, weight: Any) -> None:
        """Share codes and dtype of the int8 layer that `weight` belongs to.

        If `weight` is the entry of a state dict, take its dtype. Raise TypeError for any other value.

        `torch.func.functional_call` exchanges the entries of a state dict one by one, in any order. It reads
        `layer.weight` before it assigns the entry, and assigns what it read afterwards. This weight gives only the
        dtype back, because its codes may be those of the state dict already. Then `functional_call` writes into the
        state dict the weight that it replaces, so this weight is taken as the entry in the next call.
        """
        dtype_of = getattr(weight, "dtype_of", None)
        if getattr(self.weight_dtype, "replaced", None) is dtype_of is not None:
            self.weight_dtype.replaced = None  # type: ignore[attr-defined]
            self.weight_dtype = dtype_of
            return
        if _is_dtype(weight) or getattr(dtype_of, "replaced", self) is None:
            entry: Any = (weight if dtype_of is None else dtype_of).detach()
            entry.replaced, self.weight_dtype = self.weight_dtype, entry
            return
        shape, is_of_layer = self.weight.shape, isinstance(getattr(weight, "codes", None), Int8Tensor)
        if not is_of_layer or (weight.shape, weight.order) != (shape, self._order):
            got = type(weight).__name__ + (f" of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else "")
            raise TypeError(
                f"{type(self).__name__}: weight must be the weight of another int8 layer of shape "
                f"{tuple(shape)}, so that the layers share codes, got a {got}; for other values load a state dict, or "
                "assign to the float layer before converting it"
            )
        self.weight_codes, self.weight_scale = weight.codes.values, weight.codes.scale
        self.weight_dtype = weight.dtype_of

    def _share(self, codes: Int8Tensor, layer: Any) -> None:
        """Share `codes`, and take the dtype and the training mode of the float layer that this layer replaces."""
        self.weight_codes, self.weight_scale = codes.values, codes.scale
        self.weight_dtype = torch.zeros((), dtype=layer.weight.dtype, device=codes.values.device)
        self.train(layer.training)

    # State dicts hold `weight_dtype` under the key `weight`. A float layer refuses this entry, since its shape differs.
    # Without the entry, a float layer that is loaded with strict=False would silently get no weight.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight_dtype if keep_vars else self.weight_dtype.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any) -> None:
        key, (missing, _, errors) = f"{prefix}weight", others
        given, before = state_dict.get(key), len(errors)
        is_dtype, buffers = _is_dtype(given), {prefix + name for name in self._buffers}
        # Older state dicts hold a copy of the next layer's input scale for each layer that passed codes.
        older = ("output_scale", "output_zero_point") if isinstance(self, Int8ProductLayer) else ()
        left_out = {*(prefix + name for name in older), *[key] * is_dtype}
        # With `assign=True` torch would register a parameter in place of a buffer.
        state_dict = {
            name: value.detach() if name in buffers and isinstance(value, nn.Parameter) else value
            for name, value in state_dict.items()
            if name not in left_out
        }
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *others)
        if len(errors) > before:
            return
        if is_dtype and metadata.get("assign_to_params_buffers"):  # otherwise the layer keeps its own dtype
            self.weight_dtype = given.detach()
        elif strict and not is_dtype:
            missing.append(key)

    def _why_not_loaded(self, state_dict: Any, prefix: str, local_metadata: Any) -> list[str]:
        newer = why_not_loaded(type(self).__name__, local_metadata.get("version"), self._version)
        return [newer] if newer else super()._why_not_loaded(state_dict, prefix, local_metadata)


class Int8ProductLayer(Int8Weight):
    """An int8 layer with a mode (`Int8Linear`), a bias, and a scale for its inputs if the mode is "static"."""

    mode_name: Tensor
    bias: nn.Parameter | None
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    _inputs: str  # what a product sums over
    _operation: Any  # `apply_linear` or `apply_convolution`

    def __init__(
        self, shape: Sequence[int], bias: bool, mode: Mode, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        kind, inputs, mode = type(self).__name__, terms(shape, self.is_transposed), known_mode(mode)
        if mode not in MODES:
            raise ValueError(f"{kind}: mode must be one of {', '.join(MODES)}, got {mode!r}")
        if mode != "weight_only" and inputs > MAX_K:
            raise ValueError(
                f"{kind}: {self._inputs} must be at most {MAX_K} with int8 activations, got {inputs}; "
                "use mode='weight_only'"
            )
        super().__init__(shape, device, dtype)
        self.register_buffer("mode_name", _ascii(mode, device))
        self.bias = nn.Parameter(torch.zeros(shape[0], dtype=self.dtype, device=device)) if bias else None
        scale = torch.ones(1, dtype=torch.float32, device=device) if mode == "static" else None
        self.register_buffer("input_scale", scale)
        self.register_buffer("input_zero_point", scale if scale is None else torch.zeros_like(scale).int())

    @property
    def mode(self) -> Mode:
        """`"weight_only"`, `"dynamic"` or `"static"`."""
        return _MODE_OF_LENGTH[int(self.mode_name.numel())]  # in torch.jit.trace, numel() returns a tensor

    @classmethod
    def _of_float(
        cls, op: str, layer: Any, mode: Mode, weight: Int8Tensor | None, affine: Sequence[Tensor | None], *steps: Any
    ) -> Any:
        """Return an int8 layer in place of a float one, for `from_linear` or `from_conv`, whose name is `op`.

        `affine` is the scale and the zero point of inputs. `steps` are the arguments of the constructor between the
        numbers of inputs and outputs and `bias`.
        """
        if any(part is None for part in affine) == (mode == "static"):
            raise ValueError(
                f"{op}: input_scale and input_zero_point must both be given with mode='static', and with no other "
                f"mode, got mode={mode!r}; to find them, call prepare_, run some batches, and call convert_"
            )
        codes = codes_to_share(op, weight, layer)
        of_class: Any = cls  # the constructors of the subclasses differ in their arguments
        outputs, *_, inputs = codes.shape
        made = of_class(inputs, outputs, *steps, bias=False, mode=mode, device="meta", dtype=layer.weight.dtype)
        made._share(codes, layer)
        made.mode_name = _ascii(made.mode, codes.values.device)
        made.bias, (made.input_scale, made.input_zero_point) = layer.bias, affine
        return made

    def _compute(
        self, x: Tensor | Int8Tensor, codes: Affine = None, dtype: torch.dtype | None = None, **options: Any
    ) -> Any:
        """Return what `forward` returns, without hooks.

        If `codes`, the scale and the zero point of the result, are given, it is an `Int8Tensor` without a gradient.
        Floats that are computed from an `Int8Tensor` have the given `dtype`, else that of autocast or the layer.
        """
        multiply = partial(self._product, codes=codes, dtype=dtype)
        values = self._operation(x, self.weight_codes, self.weight_scale, multiply, **options)
        return values if codes is None else Int8Tensor(values, *codes)

    @staticmethod
    def _on_codes(layer: nn.Module, x: Int8Tensor) -> Int8Tensor:
        """Apply a ReLU, max pooling or flattening layer to codes. The largest code stands for the largest number."""
        if isinstance(layer, nn.ReLU):
            assert x.zero_point is not None
            # In place: one pass over one byte for each element. By an int32 it would take a CPU 15 times as long.
            values = x.values.clamp_(min=x.zero_point.to(torch.int8))
        elif isinstance(layer, nn.MaxPool2d):
            # torch has no max pooling of int8, except for few pixels. bf16 holds every code. Pooled in this way, codes
            # of 4 x 64 x 112 x 112 take a CPU 1.24 times as long as floats. A window in the padding alone gives -inf.
            values = layer(x.values.bfloat16()).clamp(min=-128).to(torch.int8)
        else:
            values = layer(x.values)
        return Int8Tensor(values, x.scale, x.zero_point)

    def _product(
        self,
        x: Tensor | Int8Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        steps: Steps | None = None,
        *,
        codes: Affine,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """Multiply or convolve `x` by codes, as the mode says; see `w8a8`. `codes` and `dtype` are as in `_compute`."""
        if codes is not None and not isinstance(x, Int8Tensor):
            x = codes_of(x, self.input_scale, self.input_zero_point, symmetric=False)
        if isinstance(x, Int8Tensor):
            if self.mode == "weight_only":
                raise TypeError(
                    f"{type(self).__name__}: x must be a Tensor if mode='weight_only', got an Int8Tensor; dequantize it"
                )
            out_scale, out_zero_point = codes or (None, None)
            return _product_of_codes(
                x,
                codes_of(weight, scale),
                steps,
                bias=None if bias is None else bias.detach().float(),
                out_dtype=dtype or compute_dtype(self.weight_dtype),
                out_scale=out_scale,
                out_zero_point=out_zero_point,
            )
        dtype = compute_dtype(x)
        if self.mode != "weight_only":
            return w8a8(x, weight, scale, bias, self.input_scale, self.input_zero_point, dtype, steps=steps)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        if steps is not None:
            return convolve(x, codes_of(weight, scale).dequantize(dtype), bias, steps)
        # Transforms have no rule for the autograd function `_WeightOnly`. They get the reference, which consists of
        # torch's operators.
        multiply = reference.int8_linear if torch_private.is_transformed() else _WeightOnly.apply
        return multiply(x, weight, scale, bias)

    def _why_not_loaded(self, state_dict: Any, prefix: str, local_metadata: Any) -> list[str]:
        reasons = super()._why_not_loaded(state_dict, prefix, local_metadata)
        name, codes = (state_dict.get(prefix + key) for key in ("mode_name", "weight_codes"))
        if reasons or (name is None and codes is None):
            return reasons
        if type(name) is not Tensor or name.is_meta:  # without values
            given: str | None = None if name is None else _MODE_OF_LENGTH.get(name.numel())
        else:
            given = bytes(name.flatten().tolist()).decode(errors="replace")
        if given == self.mode:
            return []
        return [
            f"load_state_dict: {prefix}mode_name must be {self.mode!r}, got {given!r}; convert the model in the mode "
            "that its checkpoint has"
        ]


def known_mode(mode: Mode) -> Mode:
    """Return the name of a mode as layers store it."""
    return "weight_only" if mode == "weight-only" else mode


def apply_linear(
    layer: Any, x: Tensor | Int8Tensor, weight: Tensor, scale: Tensor | None, multiply: Multiply, outputs: slice = ALL
) -> Tensor:
    """Apply an int8 layer or a layer of `prepare_qat_` to rows `[..., K]`; see `apply_convolution`."""
    kind = type(layer).__name__
    check_is_dense(kind, x)
    shape, bias = x.shape, layer.bias
    if not shape or shape[-1] != layer.in_features:
        raise ValueError(f"{kind}: x must have shape (..., {layer.in_features}), got {tuple(shape)}")
    if outputs is not ALL:
        weight, (scale, bias) = weight[outputs], (None if t is None else t[outputs] for t in (scale, bias))
    rows = arranged(x, lambda values: values.unsqueeze(0) if values.dim() == 1 else values.flatten(0, -2))
    result = multiply(rows, weight, scale, bias)
    return result.reshape(*shape[:-1], weight.shape[0])


class Int8Linear(Int8ProductLayer):
    """`torch.nn.Linear` with symmetric int8 weights for inference, with one scale per output.

    | mode | what it computes |
    |---|---|
    | `"weight_only"` | `x @ (weight_codes * weight_scale).T + bias`, in fp32, from the codes. |
    | `"dynamic"` | `int8_matmul` of codes. Each row of `x` is quantized, asymmetrically, by its own range. |
    | `"static"` | Like `"dynamic"`, with one range for all of `x`. |

    A weight-only layer multiplies by its codes. There are three exceptions, in which the compiled CUDA kernels
    dequantize the weight and torch multiplies:

    - fp32 inputs;
    - bf16 inputs on a GPU below compute capability 8.0;
    - 256 or more rows, if the product takes `2**32` multiplications or more. Under `use_backend("cuda")` the layer
      multiplies by its codes in this case too.

    During a call with one of these exceptions, `weight_codes * weight_scale` is in memory, rounded to the dtype of `x`.
    For fp32 inputs `torch.backends.cuda.matmul.allow_tf32` decides whether TF32 is used.

    Except in these three cases, the compiled CUDA kernels first copy the codes into padded rows if `in_features` is not
    a multiple of 16.

    A static layer turns NaN into 0, and inf into the end of its range.

    Under autocast results have the dtype of autocast. Otherwise they have the dtype of `x`, or the layer's `dtype` if
    `x` is an `Int8Tensor`. The gradient of `x` is `grad @ weight`. In the modes `"dynamic"` and `"static"` the gradient
    is 0 for values of `x` outside the range of the codes (Jacob et al. 2018). The weight is frozen. The bias is a
    parameter in the dtype of the original layer.

    The weights of a new layer are 0: load a state dict, or use `from_linear`. The other arguments are those of
    `torch.nn.Linear`.

    Args:
        mode: `"weight_only"`, `"dynamic"` or `"static"`.

    Attributes:
        weight_codes: int8 `[out_features, in_features]`.
        weight_scale: fp32 `[out_features, 1]`.
        weight_dtype: A 0 in the layer's dtype. State dicts hold it under the key `weight`.
        mode_name: The mode in ASCII, uint8. State dicts hold it.
        bias: `[out_features]`, or None.
        input_scale: fp32 `[1]` of a static layer, else None.
        input_zero_point: int32 `[1]` of a static layer, else None.

    Raises:
        ValueError: `mode` is unknown, or `in_features` is above 131071 and `mode` is not `"weight_only"`.

    Examples:
        >>> layer = amp_kernels.nn.Int8Linear.from_linear(torch.nn.Linear(16, 4), mode="dynamic")
        >>> layer
        Int8Linear(in_features=16, out_features=4, bias=True, mode=dynamic)
        >>> layer(torch.ones(2, 16)).shape, layer.weight_codes.dtype
        (torch.Size([2, 4]), torch.int8)
    """

    _inputs = "in_features"
    _operation = apply_linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mode: Mode = "weight_only",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((out_features, in_features), bias, mode, device, dtype)
        self.in_features, self.out_features = in_features, out_features

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
        """Return an int8 layer with the weights and the bias of a float layer.

        Args:
            linear: A `torch.nn.Linear`, or a `Conv1D` of transformers.
            mode: `"weight_only"`, `"dynamic"` or `"static"`.
            weight: Codes to share, as `quantize_int8(linear.weight, dim=-1)` makes them. If it is None, the weight of
                `linear` is quantized.
            input_scale: fp32 `[1]`, for `"static"` only.
            input_zero_point: int32 `[1]`, for `"static"` only.

        Returns:
            The int8 layer, on the device and in the training mode of `linear`.

        Raises:
            TypeError: `linear` has no weight.
            ValueError: `mode` is unknown, `input_scale` and `input_zero_point` do not fit the mode, `weight` does not
                fit the layer, `linear` is lazy and was not called yet, or `linear` has more than 131071 inputs and
                `mode` is not `"weight_only"`.

        Examples:
            >>> amp_kernels.nn.Int8Linear.from_linear(torch.nn.Linear(16, 4, bias=False))
            Int8Linear(in_features=16, out_features=4, bias=False, mode=weight_only)
        """
        affine = input_scale, input_zero_point
        layer: Int8Linear = cls._of_float("Int8Linear.from_linear", linear, mode, weight, affine)
        layer.is_transposed = is_transposed(linear)
        return layer

    def forward(self, x: Tensor | Int8Tensor, outputs: slice = ALL) -> Tensor:
        """Apply the layer.

        Args:
            x: `[..., in_features]`, fp16, bf16 or fp32; or an `Int8Tensor` with one scale, in the modes `"dynamic"` and
                `"static"`.
            outputs: Only these outputs are computed.

        Returns:
            `[..., out_features]`, or with as many outputs as `outputs` selects.

        Raises:
            TypeError: `x` is no tensor, has another dtype, is nested, or is an `Int8Tensor` in the mode
                `"weight_only"`.
            ValueError: The last dimension of `x` is not `in_features`.

        Examples:
            >>> layer = amp_kernels.nn.Int8Linear(16, 4, dtype=torch.bfloat16)
            >>> layer(torch.ones(2, 3, 16)).shape
            torch.Size([2, 3, 4])
        """
        return self._compute(x, outputs=outputs)

    def extra_repr(self) -> str:
        """Return what `print(layer)` shows between the brackets."""
        return f"{nn.Linear.extra_repr(self)}, mode={self.mode}"  # type: ignore[arg-type]


class Int8Embedding(Int8Weight):
    """`torch.nn.Embedding` with a symmetric int8 table for inference, with one scale per row.

    Only rows that are looked up are dequantized. The table is frozen: it has no gradient, and `padding_idx` has no
    effect. With `max_norm`, rows of the result whose norm is above `max_norm` are scaled down to this norm. The table
    does not change. Rows of the result are multiplied by `embed_scale`, as in the tables of words of Gemma and BART.

    The table of a new layer is 0: load a state dict, or use `from_embedding`. The other arguments are those of
    `torch.nn.Embedding`.

    Args:
        padding_idx: Stored for code that reads it; it has no effect.
        embed_scale: Factor of the result. `weight` does not contain it.

    Attributes:
        weight_codes: int8 `[num_embeddings, embedding_dim]`.
        weight_scale: fp32 `[num_embeddings, 1]`.
        weight_dtype: A 0 in the layer's dtype. State dicts hold it under the key `weight`.

    Examples:
        >>> layer = amp_kernels.nn.Int8Embedding.from_embedding(torch.nn.Embedding(100, 8))
        >>> layer(torch.tensor([[1, 2, 3]])).shape, layer.weight.shape
        (torch.Size([1, 3, 8]), torch.Size([100, 8]))
    """

    scale_grad_by_freq = sparse = False  # code may pass them on to F.embedding; without a gradient they have no effect

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        embed_scale: float = 1.0,
    ) -> None:
        super().__init__((num_embeddings, embedding_dim), device, dtype)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm, self.norm_type, self.embed_scale = max_norm, norm_type, embed_scale

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, weight: Int8Tensor | None = None) -> Int8Embedding:
        """Return an int8 layer with the table of a float layer.

        Args:
            embedding: The float layer, of a class that returns rows of its table, or their product with one factor.
            weight: Codes to share, as `quantize_int8(embedding.weight, dim=-1)` makes them. If it is None, the table is
                quantized.

        Returns:
            The int8 layer, on the device and in the training mode of `embedding`.

        Raises:
            TypeError: `embedding` has no weight.
            ValueError: `weight` does not fit the table.

        Examples:
            >>> amp_kernels.nn.Int8Embedding.from_embedding(torch.nn.Embedding(100, 8, padding_idx=0))
            Int8Embedding(100, 8, padding_idx=0)
        """
        codes = codes_to_share("Int8Embedding.from_embedding", weight, embedding)
        rows, width = codes.shape
        factor = factor_of(embedding)
        layer = cls(rows, width, embedding.padding_idx, "meta", embed_scale=1.0 if factor is None else factor)
        layer.max_norm, layer.norm_type = embedding.max_norm, embedding.norm_type
        layer._share(codes, embedding)
        return layer

    def forward(self, index: Tensor) -> Tensor:
        """Look up rows and dequantize them.

        Args:
            index: int32 or int64 of any shape `[...]`.

        Returns:
            `[..., embedding_dim]` in the layer's dtype.

        Examples:
            >>> amp_kernels.nn.Int8Embedding(100, 8, dtype=torch.float16)(torch.tensor([1, 2])).dtype
            torch.float16
        """
        codes, scale = F.embedding(index, self.weight_codes), F.embedding(index, self.weight_scale)
        # The operator is called without an Int8Tensor, whose checks would take a tenth of the time of a look-up.
        rows = call(ops.dequantize_int8, codes, scale, None, None, self.dtype)
        return scaled_rows(self, rows)

    def extra_repr(self) -> str:
        """Return what `print(layer)` shows between the brackets."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        norm = "" if self.max_norm is None else f", max_norm={self.max_norm}"
        scale = "" if self.embed_scale == 1 else f", embed_scale={self.embed_scale}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{norm}{scale}"


# ------------------------------------------------------------------------------------------------------ the product
def w8a8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
    clamps: bool = True,
    steps: Steps | None = None,
) -> Tensor:
    """Multiply or convolve the codes of `x` and `weight`, with straight-through gradients.

    Args:
        x: [M, K] for a product, [B, H, W, C] for a convolution.
        weight: [N, K] or [N, kernel height, kernel width, C]. int8 codes, or floats in training.
        weight_scale, scale, zero_point: For `weight` and `x`. Without a scale, floats are quantized here, each output,
            row or image by its own range.
        clamps: Whether values of `x` may lie outside the range of the given scale. They get the gradient 0. If it is
            False or no scale is given, the gradient does not depend on rounding: the backward pass may see an `x` that
            `int8_saved_activations` has rounded up to the end of its range or past it.
        steps: Of a convolution.
    """
    if not torch_private.is_transformed():
        clamps = clamps and scale is not None
        return _W8A8.apply(x, weight, weight_scale, bias, scale, zero_point, out_dtype, clamps, steps)
    # Transforms have no rule for the autograd function. They get operators of torch, on dequantized values.
    with torch.autocast(x.device.type, enabled=False):
        inputs, values = _numbers_of(x, scale, zero_point, False), _numbers_of(weight, weight_scale)
        bias = None if bias is None else bias.float()
        result = F.linear(inputs, values, bias) if steps is None else convolve(inputs, values, bias, steps)
        return result.to(out_dtype)


def _scheme(x: Tensor, scale: Tensor | None, zero_point: Tensor | None = None, symmetric: bool = True) -> Any:
    """Return the arguments of `quantize_int8` for a scale. Without one, each row or image has its own range."""
    if scale is None:
        return {"dim": tuple(range(1, x.dim())), "symmetric": symmetric}
    return {"scale": scale, "zero_point": zero_point}


def codes_of(x: Tensor, scale: Tensor | None, zero_point: Tensor | None = None, symmetric: bool = True) -> Int8Tensor:
    """Quantize a weight or, if not `symmetric`, activations. A weight may also be codes, which get their scale."""
    if x.is_floating_point() or not symmetric:
        return quantize_int8(x, **_scheme(x, scale, zero_point, symmetric))
    assert scale is not None
    return Int8Tensor(x, scale, None, tuple(range(1, x.dim())))


def _numbers_of(x: Tensor, *scheme: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return what `codes_of(x, *scheme)` stands for: in `dtype`, or in fp32 and differentiable if `x` is floats."""
    if dtype is None and x.is_floating_point():
        return fake_quantize_int8(x.float(), **_scheme(x, *scheme))
    return codes_of(x, *scheme).dequantize(dtype or torch.float32)


def check_is_dense(op: str, x: Tensor | Int8Tensor) -> None:
    """Raise TypeError unless `x` is a dense tensor. An `nn.TransformerEncoder` that was not converted passes others."""
    if not isinstance(x, Int8Tensor):
        check_are_tensors(op, x=x)
    if getattr(x, "is_nested", False):
        raise TypeError(
            f"{op}: x must be a dense tensor, got a nested one; pad it, or if an nn.TransformerEncoder made it, set "
            "use_nested_tensor of the encoder to False"
        )


def scaled_rows(table: Any, rows: Tensor) -> Tensor:
    """Apply `max_norm` and `embed_scale` of an embedding to rows [..., N] that were looked up.

    As in `nn.Embedding`, the gradient treats the factors of `max_norm` as constants.
    """
    if table.max_norm is not None:
        values = rows.float()
        norms = torch.linalg.vector_norm(values.detach(), table.norm_type, -1, keepdim=True)
        factors = torch.where(norms > table.max_norm, table.max_norm / (norms + 1e-7), torch.ones_like(norms))
        rows = (values * factors).to(rows.dtype)
    return rows if table.embed_scale == 1 else rows * table.embed_scale


def codes_of_weight(layer: nn.Module) -> Int8Tensor:
    """Quantize a layer's weight to contiguous symmetric codes in the order of `by_outputs`, with a scale per output."""
    return codes_of(by_outputs(layer).detach().contiguous(), None)


def codes_to_share(op: str, codes: Int8Tensor | None, layer: nn.Module) -> Int8Tensor:
    """Check and return the given codes of a weight. If `codes` is None, quantize the weight of `layer`."""
    own = getattr(layer, "weight", None)
    if not isinstance(own, Tensor):
        raise TypeError(f"{op}: the float layer must be an nn.Module with a weight, got {type(layer).__name__}")
    if is_lazy(own):
        raise ValueError(
            f"{op}: the weight of the float layer must have a shape, got an uninitialized one in a "
            f"{type(layer).__name__}; run a batch through the layer first"
        )
    if codes is None:
        return codes_of_weight(layer)
    shape = by_outputs(layer).shape
    expected = torch.int8, shape, torch.float32, (shape[0], *[1] * (len(shape) - 1)), codes.values.device
    values, scale = codes.values, codes.scale
    dims = -1 if len(shape) == 2 else tuple(range(1, len(shape)))
    is_by_row = codes.zero_point is None and codes.block_size is None
    if not is_by_row or (values.dtype, values.shape, scale.dtype, scale.shape, scale.device) != expected:
        raise ValueError(
            f"{op}: weight must be what quantize_int8(weight, dim={dims}) returns for a weight of shape "
            f"{tuple(shape)}, with codes and scales on one device, got {values.dtype} {tuple(values.shape)} on "
            f"{values.device} with scales {scale.dtype} {tuple(scale.shape)} on {scale.device}, "
            f"{'no' if codes.zero_point is None else 'a'} zero point and block_size {codes.block_size}"
        )
    return codes


def _product_of_codes(x: Int8Tensor, weight: Int8Tensor, steps: Steps | None, **options: Any) -> Tensor:
    return int8_matmul(x, weight.t(), **options) if steps is None else int8_conv2d(x, weight, **steps, **options)


class _W8A8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        x, weight, weight_scale, bias, scale, zero_point, out_dtype, clamps, steps = given  # as in `w8a8`
        # `x` and the weight are saved, as by nn.Linear. The codes that are computed from them are not saved. The
        # backward pass computes these codes again.
        ctx.save_for_backward(x, weight, weight_scale, scale, zero_point)
        ctx.bias_dtype, ctx.clamps, ctx.steps = None if bias is None else bias.dtype, clamps, steps
        inputs, codes = codes_of(x, scale, zero_point, symmetric=False), codes_of(weight, weight_scale)
        bias = None if bias is None else bias.float()
        return _product_of_codes(inputs, codes, steps, bias=bias, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, weight_scale, scale, zero_point = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        # If this gradient will be differentiated again, operators that can be differentiated compute it, in fp32.
        is_differentiated = torch.is_grad_enabled()
        own = None if is_differentiated else grad.dtype
        inputs = partial(_numbers_of, x, scale, zero_point, False, dtype=own)
        values = partial(_numbers_of, weight, weight_scale, dtype=own)
        dtype = own or torch.float32
        grad_x: Any = None
        grad_weight: Any = None
        if ctx.steps is not None:
            if needs_x or needs_weight:
                mask = [needs_x, needs_weight, False]
                grad_x, grad_weight = _gradients_of_convolution(grad.to(dtype), inputs(), values(), ctx.steps, mask)
        else:
            if needs_x and is_differentiated:
                grad_x = grad.to(dtype) @ values()
            elif needs_x:
                grad_x = times_codes(grad, codes_of(weight, weight_scale))
            if needs_weight:
                grad_weight = grad.to(dtype).t() @ inputs()
        if needs_x:
            grad_x = grad_x.to(x.dtype)
            if ctx.clamps:
                straight = ops.straight_through if is_differentiated else ops.straight_through_int8
                grad_x = straight(grad_x, x, scale, zero_point, None)
        if needs_weight:
            # Unlike `grad_x`, this gradient needs no mask that sets it to 0 for clamped values. The codes of a weight
            # are symmetric and made by its own range, so none of them was clamped.
            grad_weight = grad_weight.to(weight.dtype)
        grad_bias = grad.sum(tuple(range(grad.dim() - 1))).to(ctx.bias_dtype) if needs_bias else None
        return grad_x, grad_weight, None, grad_bias, None, None, None, None, None


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None, steps: Steps) -> Tensor:
    """Convolve floats [B, H, W, C] with a weight [N, kernel height, kernel width, C], by torch."""
    images, steps = _pixels_of_a_stride(images, weight, steps)
    return F.conv2d(images.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), bias, **steps).permute(0, 2, 3, 1)


def _gradients_of_convolution(
    grad: Tensor, inputs: Tensor, weight: Tensor, steps: Steps, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the inputs and of the weight, each in the order of `convolve`. `mask` says which."""
    images, own = _pixels_of_a_stride(inputs, weight, steps)
    nchw = (t.permute(0, 3, 1, 2) for t in (grad, images, weight))
    options = {**own, "transposed": False, "output_padding": (0, 0), "groups": 1, "output_mask": mask}
    results = torch.ops.aten.convolution_backward(*nchw, None, **options)
    of_inputs, of_weight = (None if result is None else result.permute(0, 2, 3, 1) for result in results[:2])
    if of_inputs is not None and images is not inputs:
        height, width = steps["stride"]
        of_pixels, of_inputs = of_inputs, torch.zeros_like(inputs)
        of_inputs[:, ::height, ::width] = of_pixels
    return of_inputs, of_weight


def _pixels_of_a_stride(images: Tensor, taps: Tensor, steps: Steps) -> tuple[Tensor, Steps]:
    """Return images with only those pixels that a kernel of one pixel reads, and steps with a stride of 1.

    For a larger kernel or with padding, return both as they are. oneDNN, which torch calls, writes past the end of its
    memory when it computes the gradient of such a kernel, if there is a stride, fewer than 16 input channels and
    channels_last images (uxlfoundation/oneDNN#6035, seen in torch 2.13). So torch gets no such stride.
    """
    height, width = steps["stride"]
    if (height, width) == (1, 1) or tuple(taps.shape[1:3]) != (1, 1) or any(steps["padding"]):
        return images, steps
    return images[:, ::height, ::width], {**steps, "stride": (1, 1)}


class _WeightOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return call(ops.int8_linear, x, weight, scale, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        grad_x = times_codes(grad, codes_of(weight, scale)) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad.sum(0) if ctx.needs_input_grad[3] else None


def times_codes(grad: Tensor, weight: Int8Tensor) -> Tensor:
    """Return ``grad @ weight.dequantize(grad.dtype)`` for codes [N, K].

    A large weight is dequantized in panels of columns, one at a time. Each element of the result belongs to one panel,
    so it is rounded once.
    """
    outputs, inputs = weight.shape
    width = max(1, PANEL // max(1, outputs))
    if width >= inputs:
        return grad @ weight.dequantize(grad.dtype)
    result = grad.new_empty(grad.shape[0], inputs)
    for start in range(0, inputs, width):
        part = slice(start, start + width)
        result[:, part] = grad @ codes_of(weight.values[:, part], weight.scale).dequantize(grad.dtype)
    return result


# ---------------------------------------------------------------------------------------------------------- helpers
def _ascii(text: str, device: torch.device | str | None) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def arranged(x: Any, arrange: _Fn) -> Any:
    """Apply a function that only moves elements to a tensor, or to the values of codes with one scale."""
    if isinstance(x, Int8Tensor):
        return Int8Tensor(arrange(x.values), x.scale, x.zero_point, x.dim, x.block_size)
    return arrange(x)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of autocast if autocast is on, otherwise that of `x`."""
    kind = x.device.type
    # torch raises an error if it is asked for autocast on the device "meta".
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else x.dtype
