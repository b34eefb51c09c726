"""Code that all conversions of models use: recognizing linear layers, checking state dicts, describing the result."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

LOG = logging.getLogger("amp_kernels")
# There is a warning if more than this share of the parameters' bytes stays in unconverted matrices. Layers that
# `filter_fn` left out do not count.
WARNING_SHARE = 0.1
ALL = slice(None)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)  # those that may become int8 layers


def check_model(op: str, model: object) -> None:
    """Raise TypeError unless `model` is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be an nn.Module, got {type(model).__name__}")


# ----------------------------------------------------------------------------------------------------------- Conv1D
def is_conv1d(layer: nn.Module) -> bool:
    """Return whether `layer` is transformers' `Conv1D` (GPT-2), a linear layer whose weight begins with its inputs."""
    # By its name, so that this package need not import transformers. A subclass may compute something else.
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


def is_transposed(layer: Any) -> bool:
    """Return whether the weight begins with its inputs: that of a Conv1D or a transposed convolution, also in int8."""
    return is_conv1d(layer) or getattr(layer, "is_transposed", False) or isinstance(layer, nn.ConvTranspose2d)


def matrix(layer: Any) -> Tensor:
    """Return the weight as [out_features, in_features]. For a Conv1D it is a transposed view."""
    return layer.weight.t() if is_transposed(layer) else layer.weight


def linear_part(layer: Any, x: Tensor, outputs: slice = ALL) -> Tensor:
    """Return some outputs of a linear layer in floating point."""
    return F.linear(x, matrix(layer)[outputs], None if layer.bias is None else layer.bias[outputs])


def by_outputs(layer: Any) -> Tensor:
    """Return the weight in the order of int8 codes, [out_channels, *kernel_size, in_channels] for a convolution."""
    if isinstance(layer, CONVOLUTIONS):
        return layer.weight.movedim(0 if is_transposed(layer) else 1, -1)
    return matrix(layer)


def terms(codes: Sequence[int], transposed: bool) -> int:
    """Return how many products an output sums. In a transposed convolution kernels must not overlap."""
    return codes[-1] if transposed else math.prod(codes[1:])


def kind_in_torch(layer: Any) -> Any:
    """Return the class of torch that a layer belongs to. For a Conv1D it is `nn.Linear`."""
    return next((kind for kind in (nn.Embedding, *CONVOLUTIONS) if isinstance(layer, kind)), nn.Linear)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of torch, or a hook of accelerate, which is a `forward` of the instance."""
    # Without a loop, because an Int8Sequential asks in each call.
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return "forward" in vars(module) or bool(hooks)


def additions(layer: nn.Module) -> list[str]:
    """Return the names of the parameters, buffers and modules in a float layer, except its weight and its bias.

    In a subclass of `nn.Embedding`, an unsaved buffer with one element is no addition. `factor_of` reads its value.
    """
    known = {"weight", "bias"}
    if isinstance(layer, nn.Embedding) and type(layer) is not nn.Embedding:
        buffers = layer._buffers
        known |= {n for n in layer._non_persistent_buffers_set if (b := buffers[n]) is not None and b.numel() == 1}
    return [name for name in (*layer._parameters, *layer._buffers, *layer._modules) if name not in known]


# ---------------------------------------------------------------------------------------------------------- subclasses
def factor_of(layer: Any) -> float | None:
    """Return the factor by which a layer multiplies what an `nn.Linear`, `nn.Embedding` or convolution would return.

    `layer` is of such a class or of a subclass. If it does anything else, or has something that a new layer would lose,
    return None. A subclass may inherit `forward`, compute the same in another way, as the linear layers of Falcon and
    timm do, or scale the rows of a table, as Gemma and BART do. To find out, `forward` of copies with small random
    weights is called. A class with public names that the base class lacks also gives None: other code may use them.
    """
    base = kind_in_torch(layer)
    kind, weight = type(layer), layer._parameters.get("weight")
    if kind is base:
        return 1.0
    # An nn.MultiheadAttention reads the weight of a NonDynamicallyQuantizableLinear and does not call it.
    is_read = kind is NonDynamicallyQuantizableLinear
    if weight is None or is_lazy(weight) or is_read or has_hooks(layer) or additions(layer):
        return None
    if any(not name.startswith("_") for name in {*dir(kind)} - {*dir(base)}):
        return None
    if all(getattr(kind, name) is getattr(base, name) for name in ("forward", "_conv_forward") if hasattr(base, name)):
        return 1.0
    if base in CONVOLUTIONS or [*inspect.signature(layer.forward).parameters.values()][1:]:
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            exact, own = (_results(base, layer, dtype) for dtype in (torch.float64, weight.dtype))
            # The first number of a table is 1. In 16 bits the factor itself may have been rounded.
            factors = [1.0] if base is nn.Linear else [results[0][1].flatten()[0].item() for results in (exact, own)]
            if not _differs(exact, factors[0], 1e-12):
                return next((f for f in factors if base is nn.Linear or not _differs(own, f, 0)), None)
    except Exception:  # whatever the code of the user raises
        pass
    return None


def _results(base: Any, layer: Any, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the results of `base` and of copies of `layer`, one with all its outputs and one with all its inputs.

    Raise TypeError if a copy accepts what `base` refuses, or if a linear layer changes the dtype of its input.
    """
    random, pairs, is_table = torch.Generator().manual_seed(0), [], base is nn.Embedding
    outputs, inputs = layer.weight.shape
    # All rows of a table are read, because a layer may treat one of them in another way, for example `padding_idx`.
    for sizes, shape in (((outputs, 8), (outputs if is_table else 7,)), ((5, inputs), (2, 3, 4))):
        small, has_all_outputs = copy.copy(layer), len(shape) == 1
        # The numbers have many magnitudes and both signs, so that a limit or a ReLU shows.
        weight, bias = (torch.randn(n, generator=random).pow(5) for n in (sizes, sizes[:1]))
        weight[0, 0] = 1
        values = {"weight": weight, "bias": bias}
        parameters = {n: p if p is None else nn.Parameter(values[n].to(dtype)) for n, p in layer._parameters.items()}
        buffers = {n: b if b is None else b.to("cpu", copy=True) for n, b in layer._buffers.items()}
        vars(small).update(_parameters=parameters, _buffers=buffers, training=has_all_outputs)
        refused, converted = [], []
        if is_table:
            small.max_norm, small.padding_idx = None, layer.padding_idx if has_all_outputs else None
            x = torch.arange(math.prod(shape)).remainder(sizes[0]).view(shape)
            refused = [torch.tensor([index]) for index in (-1, sizes[0], 0.0)]
        else:
            x = torch.randn((*shape, sizes[1]), generator=random).pow(5).to(dtype)
            refused = [x[..., 1:], torch.cat((x, x), -1)]
            converted = [x.to(other) for other in (torch.float32, torch.float16, torch.bfloat16)]
        accepts = any(_result(small, wrong) is not None for wrong in refused)
        if accepts or any((y := _result(small, given)) is not None and y.dtype != given.dtype for given in converted):
            raise TypeError
        pairs.append((base.forward(small, x), small.forward(x)))
    return pairs


def _result(layer: nn.Module, x: Tensor) -> Any:
    """Return what `forward` returns, or None if it raises an error."""
    try:
        return layer.forward(x)
    except Exception:
        return None


def _differs(pairs: list[tuple[Tensor, Tensor]], factor: float, tolerance: float) -> bool:
    """Return whether a second tensor is not the first one times `factor`, up to a share of its largest element."""
    return any(
        found.shape != of_base.shape
        or found.dtype != of_base.dtype
        or not bool((found - of_base * factor).abs().max() <= tolerance * found.abs().max())
        for of_base, found in pairs
    )


# --------------------------------------------------------------------------------------------------- exchanging modules
_OWN = vars(nn.Module()).keys()  # what every module has
_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = {type(None), bool, int, float, complex, str, bytes}  # types of values that are no modules


def exchange(model: nn.Module, new: Mapping[Any, nn.Module]) -> None:
    """Put modules in the place of others, wherever these are children, or are in other attributes of a module.

    A `forward` may call its layers from a list, as in transformers' Mask2Former. Lists, dicts and deques stay the same
    objects. Tuples are replaced. Other containers are left alone.
    """
    of = {id(old): module for old, module in new.items()}  # a module in a list may have no hash
    seen: dict[int, tuple[Any, Any]] = {}  # containers, each with what takes its place

    def exchanged(value: Any) -> Any:
        kind = type(value)
        is_tuple = kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_make"))
        if not (is_tuple or kind in _DICTS or kind in (list, deque)):
            return of.get(id(value), value)
        if id(value) not in seen:
            seen[id(value)] = value, value  # a container may hold itself
            values = value.values() if kind in _DICTS else value
            if _PLAIN.issuperset(map(type, values)):
                return value
            items = value.items() if kind in _DICTS else enumerate(value)
            made = {key: module for key, item in items if (module := exchanged(item)) is not item}
            if is_tuple and made:
                parts = (made.get(i, item) for i, item in enumerate(value))
                seen[id(value)] = value, tuple(parts) if kind is tuple else kind._make(parts)
            for key in () if is_tuple else made:
                value[key] = made[key]
        return seen[id(value)][1]

    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if id(child) in of:
                setattr(parent, key, of[id(child)])
        for key, value in vars(parent).items():
            if key not in _OWN and (made := exchanged(value)) is not value:
                vars(parent)[key] = made


# ------------------------------------------------------------------------------------------------------ checkpoints
# Maps the key of a float layer's weight to that of an int8 layer's codes, and back.
_OTHER_KIND = {"weight": "weight_codes", "weight_codes": "weight"}


class LoadsItsKind(nn.Module):
    """A module whose `load_state_dict` refuses floats in place of int8 codes, and codes in place of floats.

    torch itself would copy the values without an error. With ``strict=False`` torch would also skip an entry that has
    the key of the other kind, for example `weight` in place of `weight_codes`.
    """

    _absent: tuple[str, ...] = ()  # entries of the float module for which this one has no place
    _why_absent = ""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        if wrong := self._why_not_loaded(state_dict, prefix, local_metadata):
            errors = others[-1]
            errors += wrong  # load_state_dict raises an error with all messages, whatever `strict` is
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def _why_not_loaded(self, state_dict: Any, prefix: str, local_metadata: Any) -> list[str]:
        """Return an error message for each entry of the wrong kind."""
        reasons = [
            f"load_state_dict: {prefix}{name} must not be given, since {self._why_absent}; load the checkpoint of the "
            "float model first, then convert the model"
            for name in self._absent
            if f"{prefix}{name}" in state_dict
        ]
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            for key in (name, _OTHER_KIND.get(name)):
                given = state_dict.get(f"{prefix}{key}")
                if own is None or not isinstance(given, Tensor):
                    continue
                is_float, are_integers = own.is_floating_point(), not given.is_floating_point()
                if key == name and (own.dtype == given.dtype or (is_float and not are_integers)):
                    continue
                expected = "floats" if is_float else "codes"
                expected += "" if key == name else f" called {name}"
                if is_float:
                    remedy = "make the model int8 first, in the same way as the saved model"
                elif key == name and are_integers:
                    expected, remedy = str(own.dtype), "save it in the dtype that the int8 layer has"
                else:
                    remedy = "load floats first, then quantize the model"
                reasons.append(f"load_state_dict: {prefix}{key} must be {expected}, got {given.dtype}; {remedy}")
        return reasons


# ----------------------------------------------------------------------------------------------------------- log line
def kept_weights(model: nn.Module, taken: Collection[Any]) -> set[int]:
    """Return the ids of the parameters that modules other than those in `taken` hold."""
    return {id(p) for m in model.modules() if m not in taken for p in m.parameters(recurse=False)}


def shares(model: nn.Module, taken: Collection[Any], spared: Iterable[nn.Module] = ()) -> tuple[str, bool]:
    """Describe which parameters of a model are converted and which are left, with their shares of the bytes.

    `taken` holds the layers whose weights are converted, and `spared` those that `filter_fn` left out. Names that
    differ only in numbers are one entry, and a share below 1% is not listed. A weight that an unconverted layer also
    has counts as left. Return the line, and whether more than `WARNING_SHARE` of the bytes is left in matrices of
    layers not in `spared`.
    """
    done = {id(layer.weight) for layer in taken} - kept_weights(model, taken)
    spared = set(spared)
    excused = {id(p) for owner in spared for p in owner.parameters(recurse=False)}
    converted: Counter[str] = Counter()
    left: Counter[str] = Counter()
    unexpected = 0
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            continue
        of_all_layers = of_all_blocks(name)
        if id(parameter) in done:
            converted[of_all_layers] += parameter.nbytes
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        left[f"{of_all_layers} of {kind_of(owner)}{' by filter_fn' * (owner in spared)}"] += parameter.nbytes
        if parameter.dim() > 1 and id(parameter) not in excused:
            unexpected += parameter.nbytes
    total = max(1, converted.total() + left.total())
    line = f"converted {_listed(converted, total)} of the parameters' bytes; left {_listed(left, total)}"
    return line, unexpected > WARNING_SHARE * total


def kind_of(layer: Any) -> str:
    """Return the class of a layer and, if that is not the reason why it stays in floating point, the reason.

    A class that is neither torch's nor ours is named with its module.
    """
    kind = type(layer)
    if is_parametrized(layer) or isinstance(layer, ParametrizationList):
        return f"{kind.__name__}, see torch.nn.utils.parametrize.remove_parametrizations"
    is_known = kind.__module__.partition(".")[0] in ("torch", "amp_kernels")
    name = kind.__name__ if is_known else f"{kind.__module__}.{kind.__qualname__}"
    found = why_not_int8(layer) if isinstance(layer, CONVOLUTIONS) else {}
    return name + (" with " + ", ".join(f"{key}={value!r}" for key, value in found.items()) if found else "")


def why_not_int8(conv: Any) -> dict[str, object]:
    """Return the attributes of a float convolution because of which no int8 layer can compute it.

    A transposed convolution must turn each pixel into a block of pixels of its own. Other convolutions must pad both
    ends of a dimension alike. With `padding="same"` a kernel that covers an even number of pixels needs one more at the
    end.
    """
    plain: dict[str, object] = {"groups": 1, "padding_mode": "zeros"}
    if is_transposed(conv):
        plain |= {"kernel_size": tuple(conv.stride), "stride": tuple(conv.kernel_size)}
        zeros = (0,) * len(conv.stride)
        plain |= {"padding": zeros, "output_padding": zeros, "dilation": (1,) * len(conv.stride)}
    elif conv.padding == "same" and any((k - 1) * d % 2 for k, d in zip(conv.kernel_size, conv.dilation, strict=True)):
        plain |= {"kernel_size": None, "padding": None}
    found = {key: getattr(conv, key) for key in plain}
    return {key: now for key, now in found.items() if (tuple(now) if isinstance(now, list) else now) != plain[key]}


def of_all_blocks(name: str) -> str:
    """Return a name in a model without its numbers: h.0.weight and h.1.weight become h.*.weight."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _listed(sizes: Counter[str], total: int) -> str:
    names = [f"{name} {size / total:.1%}" for name, size in sizes.most_common() if size >= 0.01 * total]
    return f"{sizes.total() / total:.1%}" + (f" ({', '.join(names)})" if names else "")
