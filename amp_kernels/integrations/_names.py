"""The names by which configuration files and command lines choose a fused optimizer and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ops.table import STATE_DTYPES
from ..optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "fused_sgd": FusedSGD,
    "fused_rmsprop": FusedRMSprop,
    "fused_adam": FusedAdam,
    "fused_adamw": FusedAdamW,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STATE_DTYPES}


def with_dtypes(caller: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `options` with a `state_dtype` that is text, such as "int8" or "torch.int8", as a torch.dtype.

    Raises:
        ValueError: `state_dtype` is another text.
    """
    options = dict(options)
    name = options.get("state_dtype")
    if isinstance(name, str):
        if name.removeprefix("torch.") not in _DTYPES:
            raise ValueError(f"{caller}: state_dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
        options["state_dtype"] = _DTYPES[name.removeprefix("torch.")]
    return options
