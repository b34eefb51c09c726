"""`amp_kernels.nn.Linear`, and putting it in the place of `nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..functional.matmul import Activation, linear
from ..ops.matmul import check_activation
from .conversion import LOG, LoadsItsKind, check_model, shares


class Linear(LoadsItsKind, nn.Linear):
    """`nn.Linear` whose speed does not depend on features being multiples of 8, with an activation behind it.

    Parameters, initial values and state dict are those of `nn.Linear`, and parameters stay dense, so that optimizers,
    checkpoints, FSDP2 and tied weights see no difference. fp16 and bf16, under autocast too, go through
    `amp_kernels.linear`. torch computes what that does not: fp32 and fp64, tensor subclasses such as DTensor and
    nested tensors, meta tensors, and anything inside a transform of `torch.func` or forward-mode differentiation.

    On a GPU the rows of the result are a multiple of 16 bytes apart: if `out_features` is odd it is a view of a wider
    tensor, and ``y.view(...)`` that merges the last dimension with others must be ``y.reshape(...)``.

    Args:
        in_features, out_features, bias, device, dtype: as of `nn.Linear`.
        activation: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, or None; an attribute, not part of the state dict.

    Raises:
        ValueError: `activation` is none of these.
    """

    # Of the class, so that a layer which was an nn.Linear before `convert_linear_` or unpickling has it.
    activation: Activation | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
    ) -> None:
        check_activation("Linear", activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(x, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation}" if self.activation else "")


def convert_linear_(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> nn.Module:
    """Makes every `nn.Linear` of `model` an `amp_kernels.nn.Linear`, in place. Nothing is fused by it.

    Layers stay the same objects and change their class: parameters, hooks, attributes, tied weights and whatever refers
    to them stay as they are, so that an optimizer may exist already. Left alone are

    - subclasses, also those that torch makes: parametrized layers, layers that `fully_shard` wrapped (convert first,
      then parametrize or shard), and the projection of `nn.MultiheadAttention`, whose forward is never called;
    - layers with an attribute `activation` or a `forward` of their own.

    What was converted and what was left goes to the logger "amp_kernels", as an INFO: whatever is left is only slower.

    Args:
        model: changed in place; may itself be a layer.
        filter_fn: called with a layer and its name in the model; False leaves it as it is.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: there is no `nn.Linear` that could change, and no layer is ours already.
    """
    check_model("convert_linear_", model)
    found = [
        layer for name, layer in model.named_modules() if converts(layer) and (not filter_fn or filter_fn(layer, name))
    ]
    if not found and not any(isinstance(layer, Linear) for layer in model.modules()):
        raise ValueError(
            f"convert_linear_: model must have an nn.Linear to convert, got {type(model).__name__} without any"
            + (" that filter_fn takes" if filter_fn else "")
        )
    for layer in found:
        layer.__class__ = Linear
    ours = {layer for layer in model.modules() if isinstance(layer, Linear)}
    LOG.info("convert_linear_: %s", shares(model, ours)[0])
    return model


def converts(layer: nn.Module) -> bool:
    """Whether `convert_linear_` changes this layer."""
    return type(layer) is nn.Linear and not hasattr(layer, "activation") and "forward" not in vars(layer)
