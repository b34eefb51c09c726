"""Batch norms that follow convolutions become part of them, before int8 codes are made.

With running statistics, `norm(conv(x))` is a convolution with other numbers (Jacob et al. 2018, section 3.2):

    factor = norm.weight / sqrt(running_var + eps)          for each output channel
    weight = conv.weight * factor
    bias   = (conv.bias - running_mean) * factor + norm.bias

A pair of layers is found in an `nn.Sequential` by its order. In other modules it is found by `torch.fx`, which runs
`forward` without numbers and writes down what calls what. If a module cannot be traced, because its `forward` branches
on numbers, the modules in it are traced one by one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

_NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d}


def foldable(
    model: nn.Module, convolutions: Collection[nn.Module], is_free: Callable[[nn.Module], bool]
) -> dict[nn.Module, nn.Module]:
    """Return the batch norm of each convolution that is followed by one, and by nothing else.

    Args:
        model: The model. It is not changed.
        convolutions: Only these are considered.
        is_free: Returns whether a batch norm can be taken out: it has no hooks.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))

    def fits(conv: Any, norm: Any) -> bool:
        return (
            conv in convolutions
            and type(norm) is _NORMS.get(type(conv))
            and norm.running_mean is not None
            and norm.num_features == conv.out_channels
            and uses[id(conv)] == uses[id(norm)] == 1
            and all(owners[id(p)] == 1 for p in (*conv.parameters(), *norm.parameters()))
            and is_free(norm)
        )

    pairs = {conv: norm for conv, norm in _in_sequentials(model) if fits(conv, norm)}
    norms = [module for module in model.modules() if type(module) in _NORMS.values()]
    if any(norm not in pairs.values() for norm in norms):  # a trace runs code of the user, so it is made only if needed
        pairs |= {conv: norm for conv, norm in _in_graphs(model) if fits(conv, norm)}
    return pairs


def _in_sequentials(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    for parent in model.modules():
        if type(parent) is nn.Sequential:
            layers = list(parent)
            yield from itertools.pairwise(layers)


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential) and (
            super().is_leaf_module(module, name) or type(module).__module__.startswith("amp_kernels.")
        )


def _graph_of(model: nn.Module) -> torch.fx.Graph | None:
    """Return the graph of `model`, or None if it cannot be traced.

    What `forward` stores in modules during the trace is not a tensor, so the modules get back what they had.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        return _Tracer().trace(model)
    except Exception:  # whatever the code of the user raises if it gets no numbers
        return None
    finally:
        for module, values in before:
            vars(module).clear()
            vars(module).update(values)


def _in_graphs(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the pairs of modules of which the first is called once, and only the second one reads its result."""
    graph = _graph_of(model)
    if graph is None:
        for child in model.children():
            yield from _in_graphs(child)
        return
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        first = node.args[0] if node.op == "call_module" and node.args else None
        if not (isinstance(first, torch.fx.Node) and first.op == "call_module" and len(first.users) == 1):
            continue
        if calls[first.target] == calls[node.target] == 1:
            yield model.get_submodule(str(first.target)), model.get_submodule(str(node.target))


@torch.no_grad()
def fold_(model: nn.Module, pairs: dict[nn.Module, nn.Module]) -> None:
    """Fold batch norms into their convolutions, and put an `nn.Identity` in the place of each batch norm.

    The weight of the convolution and its bias stay the same parameters, so that an optimizer still has them. A
    convolution without a bias gets that of the batch norm.

    Args:
        model: Changed in place.
        pairs: Convolutions with their batch norms, from `foldable`.
    """
    conv: Any
    norm: Any
    for conv, norm in pairs.items():
        bias, scale, shift = (None if side is None else side.float() for side in (conv.bias, norm.weight, norm.bias))
        mean, var = norm.running_mean.float(), norm.running_var.float()
        folded = fuse_conv_bn_weights(conv.weight.float(), bias, mean, var, norm.eps, scale, shift)
        if conv.bias is None:
            fits = norm.bias is not None and norm.bias.dtype == conv.weight.dtype
            conv.bias = norm.bias if fits else nn.Parameter(conv.weight.new_empty(norm.num_features))
        conv.weight.copy_(folded[0])
        conv.bias.copy_(folded[1])
    norms = set(pairs.values())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in norms:
                setattr(parent, name, nn.Identity())
