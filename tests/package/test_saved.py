"""Checkpoints of releases load, and go on with the bits that those computed (tests/package/saved)."""

from __future__ import annotations

import copy
import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from saved.cases import INT8, MODELS, TRAININGS

from amp_kernels import use_backend
from amp_kernels.backends import backend_reasons

SAVED = Path(__file__).with_name("saved")
releases = pytest.mark.parametrize("release", sorted({path.parent.name for path in SAVED.glob("*/*.pt")}))


def load(release: str, name: str) -> dict[str, Any]:
    return torch.load(SAVED / release / f"{name}.pt", weights_only=True)


@releases
def test_every_case_is_there(release):
    assert {path.stem for path in (SAVED / release).iterdir()} == {*TRAININGS, *INT8}


@releases
@pytest.mark.parametrize("name", TRAININGS)
def test_training_goes_on(release, name):
    if reason := backend_reasons("cpu")["cpu"]:
        pytest.skip(reason)  # the bits are its own; other backends keep the error rule
    file = load(release, name)
    training = TRAININGS[name]
    training.resume(file["saved"])
    with use_backend("cpu"):
        found = training.go_on()
    assert all(map(math.isfinite, chain(*found.values())))
    assert found == file["numbers"]


@releases
@pytest.mark.parametrize("name", INT8)
def test_int8_goes_on(backend, device, release, name):
    file = load(release, name)
    with use_backend("reference"):  # models are made on the CPU, and then moved
        INT8[name].resume(file["saved"], device)
    found = INT8[name].go_on()
    assert any(chain(*found.values()))
    assert found == file["numbers"]


# -------------------------------------------------------------------------------------- formats of releases to come
NEWER = "the format of the state dict must be at most {}, got {!r}: a later release of amp_kernels saved it"


@pytest.mark.parametrize("part", ["optimizer", "scaler"])
@pytest.mark.parametrize("name", ["sgd_momentum", "rmsprop_momentum"])
@pytest.mark.parametrize("newer", [2, "2"])
def test_newer_formats_change_nothing(name, part, newer):
    training = TRAININGS[name]
    saved = copy.deepcopy(training.save())
    assert saved[part]["format"] == 1
    training.train(range(training.saved_at, training.STEPS))
    before = copy.deepcopy([training.optimizer.state_dict(), training.scaler.state_dict()])
    saved[part]["format"] = newer
    with pytest.raises(ValueError, match=re.escape(NEWER.format(1, newer))):
        getattr(training, part).load_state_dict(saved[part])
    after = [training.optimizer.state_dict(), training.scaler.state_dict()]
    for optimizer, _ in (after, before):
        for group in optimizer["param_groups"]:
            assert group.pop("state_dtype") == "torch.float32"  # assert_close compares no strings
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_torch_loads_what_has_a_format():
    training = TRAININGS["sgd_momentum"]
    saved = copy.deepcopy(training.save())
    halves = training.parameters[:2], training.parameters[2:]
    groups = [{"params": [torch.nn.Parameter(p.detach().float()) for p in ps]} for ps in halves]
    theirs = torch.optim.SGD(groups, lr=1.0)
    theirs.load_state_dict(saved["optimizer"])
    assert theirs.param_groups[0]["momentum"] == 0.9
    assert "format" not in theirs.state_dict()
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(saved["scaler"])
    assert scaler.get_scale() == saved["scaler"]["scale"]


@pytest.mark.parametrize("name", ["weight_only", "dynamic", "static"])
def test_newer_int8_layers(name):
    state = MODELS[name].save()
    layers = [layer for layer in state._metadata if f"{layer}.weight_codes" in state]
    assert layers
    for layer in layers:
        state._metadata[layer]["version"] = 2
    with pytest.raises(RuntimeError, match=re.escape(NEWER.format(1, 2))) as error:
        MODELS[name].resume(state)
    assert str(error.value).count("must be at most 1, got 2") == len(layers)
    MODELS[name].resume(dict(state))  # without torch's metadata, as safetensors keep it
