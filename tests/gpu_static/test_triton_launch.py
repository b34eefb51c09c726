"""Triton's own launcher on a libcuda that runs nothing (tests/harness/fake_cuda): every kernel, and captures.

Compiling a kernel for a GPU that is not there leaves out all that comes behind: binding arguments, the launcher in C,
shared memory that a kernel asks for, and when a kernel is loaded. Triton changes these from version to version, so the
oldest version that we support launches too.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from conftest import OLDEST_TRITON

from amp_kernels.families import FAMILIES

VERSIONS: dict[str, Path | None] = {"today": None, "oldest": OLDEST_TRITON}
TODAY = pytest.param(
    "today", marks=pytest.mark.skipif(fake_cuda.why_not() is not None, reason=str(fake_cuda.why_not()))
)
OLDEST = pytest.param(
    "oldest",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(fake_cuda.why_not_oldest() is not None, reason=str(fake_cuda.why_not_oldest())),
    ],
)
versions = pytest.mark.parametrize("version", [TODAY, OLDEST])


# `make nightly` has 8.6, a near relative of 8.0, and 10.0, for which no kernel has code of its own.
@versions
@pytest.mark.parametrize(
    "capability",
    [
        90,
        *(pytest.param(c, marks=pytest.mark.slow) for c in (75, 80, 110, 120)),
        *(pytest.param(c, marks=pytest.mark.nightly) for c in (86, 100)),
    ],
)
def test_every_kernel_is_launched(version: str, capability: int) -> None:
    if (version, capability) == ("oldest", 110):
        pytest.skip("the ptxas of Triton 3.6 does not know sm_110a")
    result = fake_cuda.run("launch.py", str(capability), first=VERSIONS[version])
    assert result["missing"] == []
    assert result["triton"].startswith("3.6.") == (version == "oldest")


@functools.cache
def captured(version: str) -> Any:
    return fake_cuda.run("capture.py", first=VERSIONS[version])


# The modules before a capture: the gradient pass that writes and the one that does not, and an update for each of two
# combinations of dtypes. An option that needed another variant would make them more.
def counts(passes: int) -> dict[str, object]:
    return {"loads before": 4, "loads": 0, "passes": passes, "updates": 2, "raised": None}


CHECKS = {"step": 0, "max_grad_norm": 1, "scaler": 1, "unscale_": 1, "tensor lr": 0}


@versions
@pytest.mark.parametrize("call", CHECKS)
@pytest.mark.parametrize("before", ["init_state", "step"])
@pytest.mark.parametrize("family", [*FAMILIES, "rmsprop int8", "adam int8"])  # plain SGD has no state
def test_a_captured_step_loads_nothing(version: str, family: str, before: str, call: str) -> None:
    """CUDA refuses to load a kernel inside a capture."""
    assert captured(version)[f"{family}: {before}, {call}"] == counts(CHECKS[call])


@versions
def test_kernels_are_loaded_on_the_device_of_their_tensors(version: str) -> None:
    assert captured(version)["another device"] == counts(1)


@versions
def test_the_rules_of_the_fake(version: str) -> None:
    assert fake_cuda.run("rules.py", first=VERSIONS[version]).startswith("3.6.") == (version == "oldest")
