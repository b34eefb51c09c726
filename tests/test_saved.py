"""Checkpoints of earlier commits load, and go on with the bits that those computed (tests/saved)."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from saved.cases import INT8, TRAININGS

from amp_kernels import use_backend
from amp_kernels._backends import backend_reasons

SAVED = Path(__file__).with_name("saved")
commits = pytest.mark.parametrize("commit", sorted({path.parent.name for path in SAVED.glob("*/*.pt")}))


def load(commit: str, name: str) -> dict[str, Any]:
    return torch.load(SAVED / commit / f"{name}.pt", weights_only=True)


@commits
def test_every_case_is_there(commit):
    assert {path.stem for path in (SAVED / commit).iterdir()} == {*TRAININGS, *INT8}


@commits
@pytest.mark.parametrize("name", TRAININGS)
def test_training_goes_on(commit, name):
    if reason := backend_reasons("cpu")["cpu"]:
        pytest.skip(reason)  # the bits are its own; other backends keep the error rule
    file = load(commit, name)
    training = TRAININGS[name]
    training.resume(file["saved"])
    with use_backend("cpu"):
        found = training.go_on()
    assert all(map(math.isfinite, chain(*found.values())))
    assert found == file["numbers"]


@commits
@pytest.mark.parametrize("name", INT8)
def test_int8_goes_on(backend, device, commit, name):
    file = load(commit, name)
    INT8[name].resume(file["saved"], device)
    found = INT8[name].go_on()
    assert any(chain(*found.values()))
    assert found == file["numbers"]
