"""Every Triton kernel through Triton's own launcher, on a libcuda that runs nothing (tests/harness/fake_cuda).

Compiling a kernel for a GPU that is not there leaves out all that comes behind: binding arguments, the launcher in C,
tensor maps, shared memory that a kernel asks for. Triton changes these from version to version, so the oldest version
that we support launches too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import OLDEST_TRITON, WHY_NOT

FAKE = Path(__file__).parents[1] / "harness" / "fake_cuda"


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1."""
    if torch.cuda.is_available():
        pytest.skip("a real libcuda is loaded in every process here, and all tests of Triton use it")
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.submodule_search_locations
    include = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "include"
    folder = tmp_path_factory.mktemp("fake_cuda")
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-isystem", str(include)]
    subprocess.run([*command, str(FAKE / "libcuda.cpp"), "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


def launch(libcuda: Path, *first: Path) -> str:
    """The version of Triton that launched them all; `first`: folders before the installed packages."""
    path = os.pathsep.join(filter(None, [*map(str, first), os.environ.get("PYTHONPATH", "")]))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"LD_LIBRARY_PATH": str(libcuda), "TRITON_LIBCUDA_PATH": str(libcuda), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(FAKE / "launch.py")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["missing"] == []
    return last["triton"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_is_launched(libcuda: Path) -> None:
    launch(libcuda)


@pytest.mark.skipif(WHY_NOT["oldest-triton"]() is not None, reason=str(WHY_NOT["oldest-triton"]()))
def test_every_kernel_is_launched_by_the_oldest_triton(libcuda: Path) -> None:
    assert launch(libcuda, OLDEST_TRITON).startswith("3.6.")
