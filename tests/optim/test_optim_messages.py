"""What is refused when an optimizer is made, in a sentence that names the argument and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from optim_cases import families, parameters
from torch import nn

from amp_kernels.optim import FusedAdam, FusedAdamW

MODEL = nn.Linear(3, 4)


@families
@pytest.mark.parametrize(
    ("params", "got"),
    [
        (MODEL, "got the module Linear; pass model.parameters()"),
        (MODEL.state_dict(), "got one OrderedDict; pass model.parameters(), or a list of groups [{'params': ...}]"),
        (None, "got None; pass model.parameters()"),
    ],
    ids=["model", "state_dict", "None"],
)
def test_params_that_are_none(params: Any, got: str, family: Any) -> None:
    sentence = f"{family.__name__}: params must be an iterable of parameters or of parameter groups, {got}"
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        family(params)
    group = {"params": params}  # of a group too
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        family([group])
    assert group == {"params": params}


@families
@pytest.mark.parametrize(("name", "value"), [("lr", None), ("lr", "1e-3"), ("weight_decay", None), ("eps", None)])
def test_options_that_are_no_numbers(name: str, value: Any, family: Any) -> None:
    params = parameters([torch.float16], "cpu")
    if name not in family(params).defaults:
        return
    sentence = f"{family.__name__}: {name} must be a number or a Tensor of one element, got {value!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        family(params, **{name: value})
    optimizer = family(params)
    added = parameters([torch.float16], "cpu")
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        optimizer.add_param_group({"params": added, name: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("family", [FusedAdam, FusedAdamW])
@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, None), None], ids=str)
def test_betas_that_are_no_pair(betas: Any, family: Any) -> None:
    sentence = f"{family.__name__}: betas must be two numbers such as (0.9, 0.999), got {betas!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        family(MODEL.parameters(), betas=betas)
    assert family(MODEL.parameters(), lr=torch.tensor(0.1), betas=[0.8, 0.9]).defaults["lr"] == torch.tensor(0.1)
