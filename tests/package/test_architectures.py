"""The architectures that a build is for by default: each GPU finds machine code, or PTX that its driver compiles."""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import chain

import nvcc
import pytest
from torch.utils import cpp_extension

GPUS = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
# The first nvcc of CUDA 12, the one that brought 10.0 and 12.0, and the one that brought 11.0.
VERSIONS = ((12, 0), (12, 8), (13, 0))


def architectures(version: tuple[int, int]) -> str:
    """By the function of setup.py, which cannot be imported: it would build."""
    module = ast.parse((nvcc.ROOT / "setup.py").read_text())
    (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "architectures")
    names: dict[str, Callable[[tuple[int, int]], str]] = {}
    exec(compile(ast.Module([function], []), "setup.py", "exec"), names)
    return names["architectures"](version)


def serves(archs: str, gpu: str) -> bool:
    """By the rules of the CUDA programming guide for machine code and for PTX."""
    major, minor = map(int, gpu.split("."))
    for arch in archs.split(";"):
        number, _, ptx = arch.partition("+")
        if number.endswith("a"):  # for this GPU alone, the PTX too
            if number == f"{gpu}a":
                return True
            continue
        its_major, its_minor = map(int, number.split("."))
        if its_major == major and its_minor <= minor:
            return True
        if ptx and (its_major, its_minor) <= (major, minor):
            return True
    return False


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_gpu_is_served(version: tuple[int, int], gpu: str) -> None:
    assert serves(architectures(version), gpu), f"nothing in {architectures(version)} runs on {gpu}"


@pytest.mark.parametrize(
    ("archs", "gpu", "expected"),
    [
        ("8.0", "8.6", True), ("8.6", "8.0", False), ("8.0", "9.0", False), ("8.0+PTX", "9.0", True),
        ("12.0+PTX", "11.0", False), ("9.0+PTX", "11.0", True), ("9.0a", "9.0", True), ("9.0a+PTX", "10.0", False),
        ("10.0", "11.0", False), ("7.5;12.0", "12.1", True),
    ],
)  # fmt: skip
def test_what_serves(archs: str, gpu: str, expected: bool) -> None:
    assert serves(archs, gpu) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_torch_takes_the_list(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    archs = architectures(version)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
    with_ptx = ";".join(arch for arch in archs.split(";") if arch.endswith("+PTX"))
    code = {f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers(archs)}
    ptx = {f"-gencode=arch=compute_{number},code=compute_{number}" for number in numbers(with_ptx)}
    assert set(cpp_extension._get_cuda_arch_flags()) == code | ptx


def test_this_nvcc_knows_the_architectures() -> None:
    known = nvcc.run(nvcc.nvcc(), "--list-gpu-code").split()
    *_, version = nvcc.run(nvcc.nvcc(), "--version").partition("release ")
    major, minor = map(int, version.split(",")[0].split("."))
    assert {f"sm_{arch}" for arch in numbers(architectures((major, minor)))} <= set(known)


def test_tests_compile_for_all_of_them() -> None:
    targets = (nvcc.HOPPER, nvcc.TURING, nvcc.OTHERS)
    assert set(chain(*(chain(*target.values()) for target in targets))) == numbers(architectures((13, 0)))


def numbers(archs: str) -> set[str]:
    return {arch.removesuffix("+PTX").replace(".", "") for arch in archs.split(";")}
