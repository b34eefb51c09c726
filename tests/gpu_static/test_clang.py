"""clang reads all sources of a CUDA build with the headers of CUDA 12.6; each of its warnings is an error.

It is a second front end: CUDA 12 has no nvcc among the packages of PyPI, and nvcc of CUDA 13 warns of less.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HEADERS = ROOT / ".venv" / "cuda12"  # make nightly installs them
CLANG = shutil.which("clang++-19")
KERNELS, OPERATORS = sorted((ROOT / "csrc" / "cuda").glob("*.cu")), sorted((ROOT / "csrc").rglob("*.cpp"))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CLANG is None, reason="there is no clang++-19: apt-get install clang-19"),
    pytest.mark.skipif(not (HEADERS / "nvidia").exists(), reason=f"there are no headers in {HEADERS}: make nightly"),
]


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as an installed toolkit has it, of links into the packages."""
    folder = tmp_path_factory.mktemp("cuda")
    for name in ("bin", "lib64", "nvvm/libdevice"):
        (folder / name).mkdir(parents=True)
    for include in (HEADERS / "nvidia").glob("*/include"):
        shutil.copytree(include, folder / "include", copy_function=_link, dirs_exist_ok=True)
    (folder / "include" / "curand_mtgp32_kernel.h").touch()  # clang's own header includes it
    return folder


def _link(source: str, target: str) -> None:
    if not Path(target).exists():
        Path(target).symlink_to(source)


def read(*arguments: str) -> None:
    assert CLANG is not None
    command = [CLANG, "-fsyntax-only", "-std=c++17", "-Wall", "-Wextra", "-Werror", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
def test_kernels(source: Path, arch: int, toolkit: Path) -> None:
    flags = ["-x", "cuda", f"--cuda-path={toolkit}", "-nocudalib", f"--cuda-gpu-arch=sm_{arch}"]
    # clang 19 knows CUDA up to 12.5, without __grid_constant__. It would launch kernels as CUDA 9 does if it knew none.
    flags += ["-Wno-unknown-cuda-version", "-Wno-unknown-attributes", "-Xclang", "-target-sdk-version=12.5"]
    read(*flags, str(source))


@pytest.mark.parametrize("source", OPERATORS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_operators(source: Path, toolkit: Path) -> None:
    torch_include = Path(torch.__file__).parent / "include"
    folders = [toolkit / "include", torch_include, torch_include / "torch/csrc/api/include"]
    folders.append(Path(sysconfig.get_path("include")))
    includes = [argument for folder in folders for argument in ("-isystem", str(folder))]
    # libstdc++ 12 uses what it deprecates in std::stable_sort.
    macros = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Wno-deprecated-declarations"]
    architecture = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
    read(*macros, *architecture, *includes, str(source))
