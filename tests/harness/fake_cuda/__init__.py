"""Runs scripts of this folder in processes of their own, whose libcuda.so.1 is libcuda.cpp: GPUs that run nothing.

``gpus.py`` is what the scripts share.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import WHY_NOT

HERE = Path(__file__).parent
BUILD = HERE.parents[2] / "build" / "fake_cuda"


def why_not() -> str | None:
    if torch.cuda.is_available():
        return "a real libcuda is loaded in every process here, and all tests of Triton use it"
    return "triton is not installed" if importlib.util.find_spec("triton") is None else None


def why_not_oldest() -> str | None:
    return why_not() or WHY_NOT["oldest-triton"]()


@functools.cache
def libcuda() -> Path:
    """The folder of libcuda.so.1, compiled against the cuda.h that Triton brings."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.submodule_search_locations
    include = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "include"
    source = HERE / "libcuda.cpp"
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    folder = BUILD / hashlib.sha256(f"{compiler} {source.read_text()}".encode()).hexdigest()[:16]
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{os.getpid()}.so"  # other processes compile it too, and none may load half a library
        subprocess.run([*compiler, "-isystem", str(include), str(source), "-o", str(part)], check=True)
        part.replace(library)
    return folder


def run(script: str, *arguments: str, first: Path | None = None) -> Any:
    """What a script prints in its last line, JSON. `first`: a folder before the installed packages."""
    path = os.pathsep.join(filter(None, [str(first or ""), os.environ.get("PYTHONPATH", "")]))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"LD_LIBRARY_PATH": str(libcuda()), "TRITON_LIBCUDA_PATH": str(libcuda()), "PYTHONPATH": path}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
