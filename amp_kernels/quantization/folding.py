"""Batch norms that follow convolutions become part of them, before int8 codes are made.

With running statistics, `norm(conv(x))` is a convolution with other numbers (Jacob et al. 2018, section 3.2):

    factor = norm.weight / sqrt(running_var + eps)          for each output channel
    weight = conv.weight * factor
    bias   = (conv.bias - running_mean) * factor + norm.bias

Pairs are found by `torch.fx`. It runs `forward` of a copy of the model, without numbers, and writes down which module
reads the result of which. The copy is traced in several ways (`_pairs`), and only pairs that all traces have are
folded. If the model cannot be traced, because its `forward` branches on numbers, nothing is folded.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ..nn.conversion import LoadsItsKind, by_outputs, exchange, has_hooks, is_transposed

_NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.ConvTranspose2d: nn.BatchNorm2d}


class FoldedBatchNorm(LoadsItsKind, nn.Identity):
    """The place of a batch norm that was folded, with its plain attributes.

    It refuses the checkpoint of a model whose batch norm is not folded. Without it, `load_state_dict(strict=False)`
    would load the weight of the convolution, and leave out the statistics.
    """

    _absent = ("running_mean",)
    _why_absent = "this batch norm was folded into a convolution"

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = norm.num_features, norm.eps, norm.momentum
        self.affine, self.track_running_stats = norm.affine, norm.track_running_stats
        self.train(norm.training)


class Folded(NamedTuple):
    """A convolution with its batch norm, and the numbers that stand for both."""

    conv: Any
    norm: Any
    weight: Tensor
    bias: Tensor

    def stand_in(self, *, in_place: bool) -> Any:
        """Return a convolution with the folded numbers. If `in_place`, it has the given parameters until `write`."""
        conv = copy.copy(self.conv)
        conv.__dict__["_parameters"] = dict(self.conv._parameters)
        if in_place:
            conv.bias = self.norm.bias if conv.bias is None else conv.bias
        else:
            trains = conv.weight.requires_grad
            conv.weight, conv.bias = nn.Parameter(self.weight, trains), nn.Parameter(self.bias, trains)
        return conv

    @torch.no_grad()
    def write(self) -> None:
        """Write the numbers into the parameters."""
        self.conv.weight.copy_(self.weight)
        (self.norm.bias if self.conv.bias is None else self.conv.bias).copy_(self.bias)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm, also of a class that is never folded, such as `SyncBatchNorm`."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


@torch.no_grad()
def folded(model: nn.Module, convolutions: Collection[Any], *, in_place: bool) -> list[Folded]:
    """Return those `convolutions` that are followed by a batch norm, and by nothing else, with the folded numbers.

    If `in_place`, the numbers will be written into the parameters. Pairs for which that is not possible, or for which
    others would see it, are left out then.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    kinds = {type(module) for module in named.values()}
    if not convolutions or kinds.isdisjoint(_NORMS.values()):  # a trace runs code of the user
        return []
    uses = Counter(map(id, named.values()))
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    storages = Counter(_storages(model)) if in_place else Counter()
    hooked = {name for name, module in named.items() if name and has_hooks(module)}

    def fits(conv: Any, norm: Any) -> bool:
        if conv not in convolutions or type(norm) is not _NORMS[type(conv)] or norm.running_mean is None:
            return False
        parameters = [*conv.parameters(), *norm.parameters()]
        if norm.num_features != by_outputs(conv).shape[0] or uses[id(conv)] != 1 or uses[id(norm)] != 1:
            return False
        if any(owners[id(p)] != 1 for p in parameters):
            return False
        if not in_place:
            return True
        has_bias = conv.bias is not None or (norm.bias is not None and norm.bias.dtype == conv.weight.dtype)
        return has_bias and not any(
            storages[p.untyped_storage().data_ptr()] > 1 or p.is_inference() or 0 in p.stride() for p in parameters
        )

    traces = [
        set(_pairs(model, training, grad, defaults))
        for training, grad, defaults in itertools.product((True, False), repeat=3)
    ]
    pairs = sorted(set.intersection(*traces))
    # A hook of the convolution, of the norm or of a module that holds one of them may change or read what is between.
    free = [
        pair for pair in pairs if not any(f"{name}.".startswith(f"{module}.") for name in pair for module in hooked)
    ]
    return [_folded(named[conv], named[norm]) for conv, norm in free if fits(named[conv], named[norm])]


def _storages(model: nn.Module) -> Iterator[int]:
    """Yield the address of the memory of each parameter and buffer that has memory."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        try:
            yield tensor.untyped_storage().data_ptr()
        except (RuntimeError, ValueError):  # a lazy parameter, or a wrapper without memory
            continue


def _folded(conv: Any, norm: Any) -> Folded:
    bias, scale, shift = (None if side is None else side.float() for side in (conv.bias, norm.weight, norm.bias))
    mean, var = norm.running_mean.float(), norm.running_var.float()
    weight, bias = fuse_conv_bn_weights(
        conv.weight.float(), bias, mean, var, norm.eps, scale, shift, transpose=is_transposed(conv)
    )
    return Folded(conv, norm, weight.to(conv.weight.dtype), bias.to(conv.weight.dtype))


class _Tracer(torch.fx.Tracer):
    proxy_buffer_attributes = True  # so that `forward` is seen to read a buffer of a batch norm

    def __init__(self) -> None:
        super().__init__()
        self.proxies: list[weakref.ref[torch.fx.Proxy]] = []

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        made = super().proxy(node)
        self.proxies.append(weakref.ref(made))
        return made

    def stored(self) -> set[torch.fx.Node]:
        """Return the nodes whose results somebody still holds after the trace, for example a module."""
        return {proxy.node for ref in self.proxies if (proxy := ref()) is not None}

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        is_ours = type(module).__module__.startswith("amp_kernels.") and not isinstance(module, nn.Sequential)
        return super().is_leaf_module(module, name) or is_ours


def _pairs(model: nn.Module, training: bool, grad: bool, defaults: bool) -> Iterator[tuple[str, str]]:
    """Yield the names of modules of which the first is called once, and only the second reads its result.

    `forward` of the user may write to tensors, to random generators and to modules. So a copy is traced, whose tensors
    have no memory, and which has no hooks. A trace sees one branch of each `if`. So the caller traces in both modes,
    with gradients and without, and with the default values of optional arguments and without (`defaults`).

    If `forward` reaches a convolution or a batch norm in a way in which `exchange` puts no other layer, for example
    from a set or an object, nothing is yielded. There the layer would stay as it is, and the other of the pair would
    not. To see this, the trace exchanges these layers first. `torch.fx` raises an error if an old one is called.
    """
    tracer, state = _Tracer(), random.getstate()
    try:
        memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
        memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad):
            traced = copy.deepcopy(model, memo).train(training)
            for module in traced.modules():
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()
            layers = [module for module in traced.modules() if type(module) in _NORMS or is_batch_norm(module)]
            exchange(traced, {layer: copy.copy(layer) for layer in layers})
            optional = {
                name: parameter.default
                for name, parameter in inspect.signature(traced.forward).parameters.items()
                if parameter.default is not parameter.empty
            }
            graph = tracer.trace(traced, optional if defaults and optional else None)
    except Exception:  # whatever the code of the user raises if it gets no numbers
        return
    finally:
        random.setstate(state)
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    # `forward` may read parameters of a module itself, and may store results.
    read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    if tracer.stored():
        gc.collect()
    stored = tracer.stored()
    for node in graph.nodes:
        first = node.args[0] if node.op == "call_module" and node.args else None
        if not (isinstance(first, torch.fx.Node) and first.op == "call_module") or first in stored:
            continue
        names = str(first.target), str(node.target)
        is_alone = len(first.users) == 1 and all(calls[name] == 1 for name in names)
        if is_alone and not any(target.startswith(f"{name}.") for target in read for name in names):
            yield names
