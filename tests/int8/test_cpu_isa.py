"""The int8 CPU kernels as other CPUs run them: compiled without AVX2, and with every tile of the products that runs."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parents[1] / "harness" / "cpu_isa"
FLAGS = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler {compiler!r}")
    built = tmp_path_factory.mktemp("cpu_isa") / "kernels.so"
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    command = [compiler, *FLAGS, *(["-march=x86-64"] if x86 else []), "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += [part for folder in cpp_extension.include_paths() for part in ("-isystem", folder)]
    torch_folder = Path(torch.__file__).parent / "lib"
    command += [str(HERE / "driver.cpp"), "-o", str(built), f"-L{torch_folder}", "-ltorch_cpu"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return built


@pytest.mark.slow
def test_kernels_of_the_oldest_cpu_and_every_tile(library: Path) -> None:
    result = subprocess.run([sys.executable, str(HERE / "check.py"), str(library)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
