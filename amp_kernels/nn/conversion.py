"""What all conversions of models share: which layers are linear, what they load, and what they say."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

LOG = logging.getLogger("amp_kernels")
SIZABLE = 0.1


def check_model(op: str, model: object) -> None:
    """A model can be converted only if it is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be an nn.Module, got {type(model).__name__}")


# ----------------------------------------------------------------------------------------------------------- Conv1D
def is_conv1d(layer: nn.Module) -> bool:
    """Whether it is the `Conv1D` of transformers (GPT-2), a linear layer whose weight is [in_features, out_features].

    By its name, so that nothing is imported; a subclass may do something else.
    """
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


def is_transposed(layer: Any) -> bool:
    """Whether its weight is [in_features, out_features]: a Conv1D, or what `prepare_` made of one."""
    return is_conv1d(layer) or getattr(layer, "is_transposed", False)


def matrix(layer: Any) -> Tensor:
    """The weight as [out_features, in_features]; of a Conv1D a view."""
    return layer.weight.t() if is_transposed(layer) else layer.weight


# ------------------------------------------------------------------------------------------------------ checkpoints
# A float layer's weight, and the codes of an int8 layer.
_OTHER_KIND = {"weight": "weight_codes", "weight_codes": "weight"}


class LoadsItsKind(nn.Module):
    """A module that loads floats into floats and codes into codes.

    torch copies either into the other, and with ``strict=False`` nobody sees the keys that do not fit.
    """

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if wrong := self._why_not_loaded(state_dict, prefix, local_metadata):
            error_msgs += wrong  # load_state_dict raises them all, whatever `strict` is
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _why_not_loaded(self, state_dict: Any, prefix: str, local_metadata: Any) -> list[str]:
        """Sentences; none if the state dict has what this module loads."""
        reasons = []
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            for key in (name, _OTHER_KIND.get(name)):
                given = state_dict.get(f"{prefix}{key}")
                if own is None or not isinstance(given, Tensor):
                    continue
                if key == name and own.is_floating_point() == given.is_floating_point():
                    continue
                expected = "floats" if own.is_floating_point() else "codes"
                expected += "" if key == name else f" called {name}"
                if own.is_floating_point():
                    remedy = "make the model int8 first, as that of the checkpoint was"
                else:
                    remedy = "load floats first and quantize the model then"
                reasons.append(f"load_state_dict: {prefix}{key} must be {expected}, got {given.dtype}; {remedy}")
        return reasons


# ------------------------------------------------------------------------------------------------------ what is said
def kept_weights(model: nn.Module, taken: Collection[Any]) -> set[int]:
    """Ids of the parameters that layers of the model other than `taken` hold."""
    return {id(p) for m in model.modules() if m not in taken for p in m.parameters(recurse=False)}


def shares(model: nn.Module, taken: Collection[Any], spared: Iterable[nn.Module] = ()) -> tuple[str, bool]:
    """What is converted of a model and what is left, by name and share of the parameters' bytes, in a line.

    Numbered layers share a name, and what is less than 1% has none. What is left is named with the class that holds it,
    which says why: only the weights of some classes are converted. A weight that another layer keeps counts as left.

    Args:
        model: as it is before.
        taken: the layers whose weights are converted.
        spared: layers that `filter_fn` left out.

    Returns:
        The line, and whether more than `SIZABLE` is left in matrices that neither embeddings nor `spared` hold.
    """
    done = {id(layer.weight) for layer in taken} - kept_weights(model, taken)
    spared = set(spared)
    owners = [*spared, *(m for m in model.modules() if isinstance(m, nn.Embedding))]
    excused = {id(p) for owner in owners for p in owner.parameters(recurse=False)}
    converted: Counter[str] = Counter()
    left: Counter[str] = Counter()
    unexpected = 0
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            continue
        of_all_layers = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)  # h.0.weight and h.1.weight: h.*.weight
        if id(parameter) in done:
            converted[of_all_layers] += parameter.nbytes
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        left[f"{of_all_layers} of {type(owner).__name__}{' by filter_fn' * (owner in spared)}"] += parameter.nbytes
        if parameter.dim() > 1 and id(parameter) not in excused:
            unexpected += parameter.nbytes
    total = max(1, converted.total() + left.total())
    line = f"converted {_listed(converted, total)} of the parameters' bytes; left {_listed(left, total)}"
    return line, unexpected > SIZABLE * total


def _listed(sizes: Counter[str], total: int) -> str:
    names = [f"{name} {size / total:.1%}" for name, size in sizes.most_common() if size >= 0.01 * total]
    return f"{sizes.total() / total:.1%}" + (f" ({', '.join(names)})" if names else "")
