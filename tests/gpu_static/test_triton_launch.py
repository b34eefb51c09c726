"""Triton's own launcher on a libcuda that runs nothing (tests/harness/fake_cuda).

Compiling a kernel for a GPU that is not there leaves out all that comes behind: binding arguments, the launcher in C,
tensor maps, shared memory that a kernel asks for. Triton changes these from version to
version, so the oldest version that we support launches too.
"""

from __future__ import annotations

from pathlib import Path

import fake_cuda
import pytest
from conftest import OLDEST_TRITON

VERSIONS: dict[str, Path | None] = {"today": None, "oldest": OLDEST_TRITON}
TODAY = pytest.param(
    "today", marks=pytest.mark.skipif(fake_cuda.why_not() is not None, reason=str(fake_cuda.why_not()))
)
OLDEST = pytest.param(
    "oldest", marks=pytest.mark.skipif(fake_cuda.why_not_oldest() is not None, reason=str(fake_cuda.why_not_oldest()))
)
versions = pytest.mark.parametrize("version", [TODAY, OLDEST])


# No tensor maps before 9.0, and none in Triton for 11.0; for 7.5 zero points take no kernel of their own.
NO_MAPS = ["matmul._descriptor_kernel"]
MISSING = {75: ["int8_matmul._sums_kernel", *NO_MAPS], 80: NO_MAPS, 86: NO_MAPS, 110: NO_MAPS}


@versions
@pytest.mark.parametrize(
    "capability", [pytest.param(c, marks=() if c == 90 else pytest.mark.slow) for c in (75, 80, 86, 90, 100, 110, 120)]
)
def test_every_kernel_is_launched(version: str, capability: int) -> None:
    if (version, capability) == ("oldest", 110):
        pytest.skip("the ptxas of Triton 3.6 does not know sm_110a")
    result = fake_cuda.run("launch.py", str(capability), first=VERSIONS[version])
    assert result["missing"] == MISSING.get(capability, [])
    assert result["triton"].startswith("3.6.") == (version == "oldest")


@versions
def test_the_rules_of_the_fake(version: str) -> None:
    assert fake_cuda.run("rules.py", first=VERSIONS[version]).startswith("3.6.") == (version == "oldest")
