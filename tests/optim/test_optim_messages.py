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


OPTIONS = {
    "lr": "0.1", "eps": "1e-8", "momentum": None, "betas": ["0.9", "0.99"], "max_grad_norm": "1.0",
    "amsgrad": "False", "nesterov": "False", "centered": "False",
}  # fmt: skip


@families
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_checkpoint_that_are_text(name: str, family: Any) -> None:
    optimizer = family(parameters([torch.float16], "cpu"))
    if name not in optimizer.defaults:
        return
    saved, before = optimizer.state_dict(), dict(optimizer.param_groups[0])
    saved["param_groups"][0] |= {"weight_decay": 0.5, name: OPTIONS[name]}
    with pytest.raises(TypeError, match=rf"^{family.__name__}\.load_state_dict: {name} must be .*, got "):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups == [before]


@families
def test_fp64_parameters(family: Any) -> None:
    """A frozen one is accepted, since no step reads it."""
    bad, good = (torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float64, torch.float32))
    sentence = r"\[1\]\['params'\]\[0\] must be float32, float16 or bfloat16, got torch\.float64$"
    group = {"params": bad}
    with pytest.raises(TypeError, match=rf"^{family.__name__}: param_groups{sentence}"):
        family([{"params": good}, group])
    optimizer = family([good])
    with pytest.raises(TypeError, match=rf"^{family.__name__}: param_groups{sentence}"):
        optimizer.add_param_group(group)
    with pytest.raises(TypeError, match=rf"^{family.__name__}: weight must be float32"):
        family([("weight", bad)])
    assert group == {"params": bad} and len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": (p for p in [bad.requires_grad_(False)])})
    good.grad = torch.ones(3)
    optimizer.step()


@pytest.mark.parametrize("family", [FusedAdam, FusedAdamW])
@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, None), None], ids=str)
def test_betas_that_are_no_pair(betas: Any, family: Any) -> None:
    sentence = f"{family.__name__}: betas must be two numbers such as (0.9, 0.999), got {betas!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        family(MODEL.parameters(), betas=betas)
    assert family(MODEL.parameters(), lr=torch.tensor(0.1), betas=[0.8, 0.9]).defaults["lr"] == torch.tensor(0.1)
