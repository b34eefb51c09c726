"""The architectures that a build is for by default: each GPU finds machine code, or PTX that its driver compiles."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import nvcc
import pytest
from torch.utils import cpp_extension

GPUS = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
# The first nvcc of CUDA 12, the one that brought 10.0 and 12.0, and the one that brought 11.0.
VERSIONS = ((12, 0), (12, 8), (13, 0))


def of_setup(name: str, **names: Any) -> Callable[..., Any]:
    """A function of setup.py, which cannot be imported: it would build."""
    module = ast.parse((nvcc.ROOT / "setup.py").read_text())
    (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names["re"] = re
    exec(compile(ast.Module([function], []), "setup.py", "exec"), names)
    return names[name]


architectures, gencode = of_setup("architectures"), of_setup("gencode")


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


GENERATIONS = {"7": "75", "8": "80", "9": "90", "10": "100", "11": "100", "12": "100"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_generation_shares_its_ptx(version: tuple[int, int]) -> None:
    """Machine code for every GPU of the list, from the oldest PTX of its generation; each PTX that the list keeps."""
    archs = architectures(version)
    expected = {
        (GENERATIONS[arch.partition(".")[0]], f"sm_{number}") for arch in archs.split(";") for number in numbers(arch)
    }
    kept = [arch for arch in archs.split(";") if arch.endswith("+PTX")]
    expected |= {(ptx, f"compute_{ptx}") for ptx in (GENERATIONS[arch.partition(".")[0]] for arch in kept)}
    flags = [re.fullmatch(r"-gencode=arch=compute_(\d+),code=(\w+)", flag) for flag in gencode(archs)]
    assert sorted(flag.groups() for flag in flags if flag) == sorted(expected)
    assert all(flags)


@pytest.mark.parametrize(
    ("archs", "codes"),
    [
        ("8.6", ["86:sm_86"]),
        ("8.9 8.6+PTX", ["86:sm_89", "86:sm_86", "86:compute_86"]),
        ("9.0a;9.0", ["90a:sm_90a", "90:sm_90"]),  # what is for one GPU alone serves no other
        ("Ampere", []),  # torch translates names
        ("native", []),
    ],
)
def test_flags_of_a_list_of_the_user(archs: str, codes: list[str]) -> None:
    expected = [f"-gencode=arch=compute_{ptx},code={code}" for ptx, code in (code.split(":") for code in codes)]
    assert gencode(archs) == expected


def test_estimate_of_a_build(capsys: pytest.CaptureFixture[str]) -> None:
    """On one core, if a generation takes 10 minutes, a GPU one, and the rest 100."""
    announce = of_setup("announce", SECONDS=6000, SECONDS_A_GENERATION=600, SECONDS_A_GPU=60)
    for archs, minutes in ((architectures((13, 0)), 100 + 4 * 10 + 8), ("8.6;8.9+PTX", 100 + 10 + 2), ("Ampere", 111)):
        announce(archs, gencode(archs), 1)
        told = capsys.readouterr().out
        assert f"GPU architectures {archs}: about {minutes} minutes with 1 job on idle cores\n" in told
        announce(archs, gencode(archs), 200)
        assert f"GPU architectures {archs}: about 1 minute with 200 jobs on idle cores\n" in capsys.readouterr().out
    announce("", [], 1)
    told = capsys.readouterr().out
    assert told == "amp_kernels: GPU architectures none: about 100 minutes with 1 job on idle cores\n"


def test_this_nvcc_knows_the_architectures() -> None:
    known = nvcc.run(nvcc.nvcc(), "--list-gpu-code").split()
    *_, version = nvcc.run(nvcc.nvcc(), "--version").partition("release ")
    major, minor = map(int, version.split(",")[0].split("."))
    assert {f"sm_{arch}" for arch in numbers(architectures((major, minor)))} <= set(known)


def test_tests_compile_for_all_of_them() -> None:
    targets = (nvcc.HOPPER, nvcc.TURING, nvcc.OTHERS, nvcc.REST)
    known = [f"sm_{arch}" for arch in numbers(architectures((13, 0)))]
    for source in nvcc.SOURCES:
        compiled = [arch for target in targets for arch in nvcc._command("nvcc", source, target, known)[1]]
        assert sorted(compiled) == sorted(numbers(architectures((13, 0)))), source.name


def numbers(archs: str) -> set[str]:
    return {arch.removesuffix("+PTX").replace(".", "") for arch in archs.split(";")}
