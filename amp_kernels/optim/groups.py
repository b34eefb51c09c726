"""The usual parameter groups: no weight decay for biases and norms, smaller learning rates for lower layers."""

from __future__ import annotations

import fnmatch
import math
import numbers
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # the weights of torch's other norms have one dimension


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    no_decay: Collection[str] = (),
    layer_decay: float = 1.0,
    layer_of: Callable[[str], int] | None = None,
) -> list[dict[str, Any]]:
    """Make the usual parameter groups of a model: no weight decay for biases and norms, and layer-wise learning rates.

    Weight decay is 0 for parameters with at most one dimension, for biases, for the parameters of torch's norms, and
    for those that match `no_decay`. Formula of the learning rate: ``lr * layer_decay ** (last - layer)``, where `layer`
    is the number of the parameter's layer and `last` is the highest number (Clark et al. 2020, ELECTRA).

    There is one group per pair of learning rate and weight decay. The names come along, so that
    `GradScaler.last_overflow` can name them. Frozen parameters are left out. The fused optimizers update all groups in
    the same launches, however many there are. Any further option, such as `state_dtype`, can be added to the groups.

    Args:
        model: The model.
        lr: Learning rate of the highest layer, at least 0.
        weight_decay: Weight decay of the other parameters, at least 0.
        no_decay: Further parameters without weight decay: names, in which ``*`` stands for any text, such as
            "embeddings.*".
        layer_decay: A number above 0 and up to 1, often 0.65 to 0.9. If it is 1, all layers have the same learning
            rate.
        layer_of: A function of a parameter's name that returns the number of its layer, from 0. By default, the
            longest ModuleList or Sequential of the model holds layers 1, 2, and so on. Parameters that the model
            defines before it (embeddings) are layer 0, those after it (the head) the highest layer. If several lists
            may be meant, as in an encoder with a decoder or in a ResNet, `layer_of` is needed.

    Returns:
        The groups, for the `params` of an optimizer. The keys of each are "params", "lr" and "weight_decay".

    Raises:
        TypeError: `model` is not a Module, `lr`, `weight_decay` or `layer_decay` is not a number, or `no_decay` is a
            str.
        ValueError: A number is out of its range, no parameter matches a pattern, a parameter of a lazy module has no
            shape yet, or `layer_of` returned anything but an integer of at least 0. Or `layer_decay` is not 1, and the
            layers of the model are in no ModuleList or Sequential, or in several.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
        >>> groups = amp_kernels.optim.param_groups(model, 1e-3, weight_decay=0.1)
        >>> [(group["weight_decay"], [name for name, _ in group["params"]]) for group in groups]
        [(0.1, ['0.weight', '2.weight']), (0.0, ['0.bias', '1.weight', '1.bias', '2.bias'])]
        >>> optimizer = amp_kernels.optim.FusedAdamW(groups)
        >>> groups = amp_kernels.optim.param_groups(model, 1e-3, layer_decay=0.5)
        >>> [(group["lr"], [name for name, _ in group["params"]]) for group in groups]
        [(0.00025, ['0.weight', '0.bias']), (0.0005, ['1.weight', '1.bias']), (0.001, ['2.weight', '2.bias'])]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups: model must be a torch Module, got a {type(model).__name__}")
    if isinstance(no_decay, str):
        raise TypeError(f"param_groups: no_decay must be a list of names, got the str {no_decay!r}")
    _check_number("lr", lr, 0, math.inf)
    _check_number("weight_decay", weight_decay, 0, math.inf)
    _check_number("layer_decay", layer_decay, math.ulp(0.0), 1)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in params.items():
        if is_lazy(p):
            raise ValueError(f"param_groups: {name} must have a shape, got a lazy parameter; run the model once before")
    without_decay = _without_decay(model, list(no_decay))
    layers = _layers(model, list(params), layer_of) if layer_decay != 1 else dict.fromkeys(params, 0)
    last = max(layers.values(), default=0)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, p in params.items():
        own = lr * layer_decay ** (last - layers[name]), 0.0 if p in without_decay else weight_decay
        group = groups.setdefault(own, {"params": [], "lr": own[0], "weight_decay": own[1]})
        group["params"].append((name, p))
    return list(groups.values())


def _without_decay(model: nn.Module, patterns: list[str]) -> set[nn.Parameter]:
    """Returns the parameters without weight decay. A tied one matches a pattern by any of its names."""
    named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    found = {p for name, p in named.items() if p.ndim <= 1 or name.rpartition(".")[2] == "bias"}
    for module in model.modules():
        if isinstance(module, _NORMS):
            found.update(module.parameters(recurse=False))
    for pattern in patterns:
        names = fnmatch.filter(named, pattern)
        if not names:
            raise ValueError(
                f"param_groups: no_decay must match parameters that train, got {pattern!r}, which matches none"
            )
        found.update(named[name] for name in names)
    return found


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or value == math.inf:
        error = ValueError if is_number else TypeError
        wanted = "a number above 0 and up to 1" if most == 1 else "a finite number of at least 0"
        raise error(f"param_groups: {name} must be {wanted}, got {value!r}")


def _layers(model: nn.Module, names: list[str], layer_of: Callable[[str], int] | None) -> dict[str, int]:
    """Returns the number of each parameter's layer."""
    if layer_of is None:
        return _layers_of_longest_list(model, names)
    layers = {name: layer_of(name) for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
            raise ValueError(f"param_groups: layer_of must return an integer of at least 0, got {layer!r} for {name!r}")
    return layers


def _layers_of_longest_list(model: nn.Module, names: list[str]) -> dict[str, int]:
    prefix, children = _longest_list(model)
    layers, layer = {}, 0
    for name in names:  # in the order of definition
        child = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else None
        if child in children:
            layer = children.index(child) + 1
        elif layer:
            layer = len(children) + 1
        layers[name] = layer
    return layers


def _longest_list(model: nn.Module) -> tuple[str, list[str]]:
    """Returns the prefix of the names in the longest list of modules, and the names of its elements.

    Raises an error if another list may be meant: one around it, or one of the same layers.
    """
    kinds = (nn.ModuleList, nn.Sequential)
    lists = {f"{name}." if name else "": m for name, m in model.named_modules() if isinstance(m, kinds) and len(m) > 1}
    remedy = "pass layer_of, a function that returns the layer of a parameter's name"
    if not lists:
        raise ValueError(
            f"param_groups: model must have a ModuleList or Sequential of layers, got a {type(model).__name__} without "
            f"one; {remedy}"
        )
    longest = max(lists, key=lambda prefix: len(lists[prefix]))
    classes = {type(element) for element in lists[longest]}
    for prefix, other in lists.items():
        is_around = prefix != longest and longest.startswith(prefix)
        is_alike = not prefix.startswith(longest) and not classes.isdisjoint(map(type, other))
        if is_around or is_alike:
            raise ValueError(
                f"param_groups: model must have its layers in one list, got lists {longest!r} and {prefix!r}; {remedy}"
            )
    return longest, list(dict(lists[longest].named_children()))
