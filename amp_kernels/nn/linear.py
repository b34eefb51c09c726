"""`amp_kernels.nn.Linear`, and the conversion of `nn.Linear` layers to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..functional.matmul import Activation, linear
from ..ops.matmul import check_activation
from .conversion import LOG, LoadsItsKind, check_model, shares


class Linear(LoadsItsKind, nn.Linear):
    """`torch.nn.Linear` that is fast even if its features are not multiples of 8, with an optional activation.

    Parameters, initial values and state dict are those of `torch.nn.Linear`. Parameters are not padded, so optimizers,
    checkpoints, FSDP2 and tied weights work as before. For fp16 and bf16 inputs, and for fp32 inputs that autocast
    casts, `amp_kernels.linear` computes the result. torch computes it for all other fp32 inputs, for fp64, for tensor
    subclasses (DTensor, nested) and for meta tensors. torch also computes it in transforms of `torch.func` and in
    forward-mode differentiation.

    On a GPU the result `y` may be a view of a wider tensor if `out_features` is not a multiple of 8. A `y.view(...)`
    that merges the last dimension with others then raises an error. Write `y.reshape(...)` instead.

    The other arguments are those of `torch.nn.Linear`.

    Args:
        bias: Whether the layer has a bias. It is added before the result is rounded.
        activation: `"relu"`, `"gelu"` (by erf), `"gelu_tanh"` or None. It is not part of the state dict.

    Raises:
        ValueError: `activation` is not one of these.

    Examples:
        >>> layer = amp_kernels.nn.Linear(10, 3, dtype=torch.bfloat16, activation="relu")
        >>> layer
        Linear(in_features=10, out_features=3, bias=True, activation=relu)
        >>> layer(torch.ones(4, 10, dtype=torch.bfloat16)).shape
        torch.Size([4, 3])
    """

    # A layer that `convert_linear_` has changed has no attribute `activation` of its own and reads this one.
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
        """Return `activation(x @ weight.T + bias)`; see `amp_kernels.linear`.

        Args:
            x: `[..., in_features]`.

        Returns:
            `[..., out_features]` in the dtype of `x`, or under autocast in the dtype of autocast.

        Examples:
            >>> amp_kernels.nn.Linear(10, 3)(torch.ones(4, 10)).shape
            torch.Size([4, 3])
        """
        return linear(x, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        """Return what `print(layer)` shows between the brackets."""
        return super().extra_repr() + (f", activation={self.activation}" if self.activation else "")


def convert_linear_(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> nn.Module:
    """Turn every `torch.nn.Linear` of a model into an `amp_kernels.nn.Linear`, in place.

    A layer stays the same object and changes its class. Parameters, hooks, tied weights and references to the layer
    stay. The activation of a converted layer is None. These layers are left unchanged:

    - subclasses of `torch.nn.Linear`: for example parametrized layers, layers wrapped by `fully_shard` (convert first,
      then parametrize or shard), and the output projection in `nn.MultiheadAttention` (the attention never calls the
      projection's forward);
    - layers with an attribute `activation`, or with a `forward` that was assigned to the instance.

    The logger "amp_kernels" gets a line of level INFO that lists the converted parameters and the others.

    Args:
        model: Changed in place. It may be a layer itself.
        filter_fn: Called with a layer and its name in the model. If it returns False, the layer is left unchanged.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not an `nn.Module`.
        ValueError: The model has no `torch.nn.Linear` to convert, and no `amp_kernels.nn.Linear` either.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 3), torch.nn.ReLU())
        >>> type(amp_kernels.nn.convert_linear_(model)[0])
        <class 'amp_kernels.nn.Linear'>
    """
    check_model("convert_linear_", model)
    found = [
        layer for name, layer in model.named_modules() if converts(layer) and (not filter_fn or filter_fn(layer, name))
    ]
    if not found and not any(isinstance(layer, Linear) for layer in model.modules()):
        raise ValueError(
            f"convert_linear_: model must have an nn.Linear to convert, got {type(model).__name__} without any"
            + (" that filter_fn accepts" if filter_fn else "")
        )
    for layer in found:
        layer.__class__ = Linear
    ours = {layer for layer in model.modules() if isinstance(layer, Linear)}
    LOG.info("convert_linear_: %s", shares(model, ours)[0])
    return model


def converts(layer: nn.Module) -> bool:
    """Return whether `convert_linear_` changes this layer."""
    return type(layer) is nn.Linear and not hasattr(layer, "activation") and "forward" not in vars(layer)
