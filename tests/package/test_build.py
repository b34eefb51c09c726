"""What nvcc makes of the CUDA sources, also where there is no GPU.

They compile for every default architecture, spill nothing, access memory 16 bytes at a time, multiply on tensor cores,
and keep the roundings of int8.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
# Instructions that every kernel has, of those of a source whose names match.
WIDE_LOAD, WIDE_STORE = r"\bLDG\.E\S*\.128\b", r"\bSTG\.E\S*\.128\b"
# SGD without momentum of 16-bit weights and remainders: a pack of four is 8 bytes everywhere.
ALL_16_BIT = r"Li0E(6__half|13__nv_bfloat16)s"
INSTRUCTIONS = [
    ("unscale", "", WIDE_LOAD),
    ("unscale", "", WIDE_STORE),
    ("update", f"^(?!.*{ALL_16_BIT})", WIDE_LOAD),
    ("update", f"^(?!.*{ALL_16_BIT})", WIDE_STORE),
    ("update", ALL_16_BIT, r"\bLDG\.E\S*\.64\b"),
    ("update", ALL_16_BIT, r"\bSTG\.E\S*\.64\b"),
    ("int8_quantize", "rows_kernel|columns_kernel|extremes_kernel", WIDE_LOAD),
    ("int8_quantize", "(rows|columns)_kernel.*QuantizeOpI(6__half|13__nv_bfloat16)a", r"\bSTG\.E\S*\.64\b"),  # codes
    ("int8_dequantize", "", WIDE_STORE),
    ("int8_dequantize", "StraightThrough", WIDE_LOAD),
    ("int8_matmul", "few_rows_kernel", WIDE_LOAD),
    ("int8_matmul", "", r"\bIMMA\."),
    ("int8_matmul", "tiled_kernel.*Lb0E", WIDE_STORE),
    ("int8_linear", "few_rows_kernelI6__half|vector_kernel", WIDE_LOAD),
    ("int8_linear", "(tiled|few_rows)_kernelI6__half", r"\bHMMA\."),
    ("int8_linear", "tiled_kernelI6__half", r"\bSTG\.E\S*\.64\b"),
    ("matmul", "tiled_kernelI6__half", r"\bHMMA\."),
    ("matmul", "tiled_kernel", r"\bLDSM\.16\."),
    ("matmul", "tiled_kernel.*ELb1E", r"\bLDSM\.16\.MT88\."),  # an operand is transposed
    ("matmul", "tiled_kernel", r"\bLDS\.128\b"),
    ("matmul", "tiled_kernel", WIDE_STORE),
    ("matmul_few_rows", "few_rows_kernelI6__half", WIDE_LOAD),
    ("matmul_few_rows", "few_rows_kernelI6__half", r"\bHMMA\."),
    ("copy_pad", "copy_pad_kernel", WIDE_LOAD),
    ("copy_pad", "copy_pad_kernel", WIDE_STORE),
]
# setup.py's default architectures, by the one whose PTX they are compiled from here. The sources ask only whether
# __CUDA_ARCH__ is 800 or more, and nvcc's front end takes more than half of the time.
USUAL = {"80": ("90",)}
OTHERS = {"75": ("75",), "80": ("80", "86", "89", "100", "120"), "90a": ("90a",)}
# The oldest standard that a supported torch compiles extensions with, and the macros torch gives nvcc.
NO_OPERATORS = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", *(f"-D__CUDA_NO_{name}__" for name in NO_OPERATORS)]
FLAGS += ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]


def find(what: str, *candidates: str) -> str:
    for candidate in candidates:
        if path := shutil.which(candidate):
            return path
    reason = f"there is no {what} (looked for {', '.join(candidates)})"
    if "nvcc" in os.environ.get("AMP_KERNELS_EXPECT", "").split(","):
        pytest.fail(f"AMP_KERNELS_EXPECT names nvcc, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return find("CUDA compiler", *([f"{home}/bin/nvcc"] if home else []), "nvcc")


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    triton = importlib.util.find_spec("triton")
    folders = triton.submodule_search_locations if triton else None
    shipped = [f"{folder}/backends/nvidia/bin/cuobjdump" for folder in folders or ()]
    return find("disassembler", *shipped, "cuobjdump")


def run(*command: str | Path) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}", pytrace=False)
    return result.stdout + result.stderr


class Compiled(NamedTuple):
    object: Path
    said: str  # by ptxas
    archs: list[str]


@pytest.fixture(scope="module", params=[USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["usual", "others"])
def compiled(
    request: pytest.FixtureRequest, nvcc: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Compiled]:
    """Every source, for these architectures."""
    folder = tmp_path_factory.mktemp("cuda")
    known = run(nvcc, "--list-gpu-code").split()  # nvcc before 12.8 has no sm_100

    def compile_source(source: Path) -> Compiled:
        targets, object_ = [], folder / f"{source.stem}.o"
        of_ptx = {
            ptx: [arch for arch in archs if f"sm_{arch.rstrip('a')}" in known] for ptx, archs in request.param.items()
        }
        if source.stem.startswith("matmul"):  # by far the longest to compile
            of_ptx = {ptx: [arch for arch in archs if arch in ("80", "90", "90a")] for ptx, archs in of_ptx.items()}
        for ptx, archs in of_ptx.items():
            codes = [*(f"sm_{arch}" for arch in archs), f"compute_{ptx}"] if archs else []
            targets += [f"-gencode=arch=compute_{ptx},code={code}" for code in codes]
        said = run(nvcc, "-c", source, "-o", object_, "-Xptxas", "-v", *FLAGS, *targets)
        return Compiled(object_, said, list(chain(*of_ptx.values())))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_source, SOURCES))
    return {source.stem: result for source, result in zip(SOURCES, results, strict=True)}


BINDINGS = (ROOT / "csrc" / "ops").glob("*.cpp")


@pytest.mark.parametrize("source", sorted(BINDINGS), ids=lambda path: path.stem)
def test_bindings_compile_against_this_torch(source: Path, nvcc: str, tmp_path: Path) -> None:
    folders = (Path(torch.__file__).parent / "include", Path(sysconfig.get_path("include")))
    include = [word for folder in folders for word in ("-I", folder)]
    # nvcc hands a .cpp file to the host compiler, which a build calls directly, with the headers of cudart.
    run(nvcc, "-c", source, "-o", tmp_path / "cuda.o", *FLAGS, "-O0", *include)


@pytest.mark.parametrize("source", [source.stem for source in SOURCES])
def test_nothing_spills(source: str, compiled: dict[str, Compiled]) -> None:
    number = r"(\d+) bytes "
    pattern = rf"properties for (\S+)\s+{number}stack frame, {number}spill stores, {number}spill loads"
    frames = re.findall(pattern, compiled[source].said)
    assert len(frames) >= len(compiled[source].archs)
    assert [frame for frame in frames if frame[1:] != ("0", "0", "0")] == []


@pytest.fixture(scope="module")
def disassembled(compiled: dict[str, Compiled], cuobjdump: str) -> Callable[[str], list[tuple[str, str, str]]]:
    """Of a source all (architecture, name of the function, instructions)."""

    @functools.cache
    def functions(source: str) -> list[tuple[str, str, str]]:
        listing = run(cuobjdump, "-sass", compiled[source].object)
        parts = re.split(r"^arch = (\S+)$", listing, flags=re.MULTILINE)[1:]
        return [
            (arch, *re.split(r"\s", function, maxsplit=1))  # type: ignore[misc]
            for arch, of_arch in zip(parts[::2], parts[1::2], strict=True)
            for function in re.split(r"^\s*Function : ", of_arch, flags=re.MULTILINE)[1:]
        ]

    return functions


@pytest.mark.parametrize(("source", "kernels", "instruction"), INSTRUCTIONS)
def test_kernels_have_their_instructions(
    source: str,
    kernels: str,
    instruction: str,
    disassembled: Callable[..., list[tuple[str, str, str]]],
    compiled: dict[str, Compiled],
) -> None:
    found = set()
    for arch, name, code in disassembled(source):
        if re.search(kernels, name):
            found.add(arch)
            assert re.search(instruction, code), f"{arch}: no {instruction} in {name}"
    assert found == {f"sm_{arch}" for arch in compiled[source].archs}


@pytest.mark.parametrize("source", ["int8_quantize", "int8_dequantize", "int8_matmul"])
def test_int8_keeps_its_roundings(source: str, compiled: dict[str, Compiled], cuobjdump: str) -> None:
    """Fused, approximate and flushing instructions would make other codes than the other backends."""
    text = run(cuobjdump, "-ptx", compiled[source].object)
    assert "mul.rn.f32" in text  # so that the next line has something to look at
    assert re.findall(r"\b(?:fma\.\S+|div\.(?:full|approx)\S*|(?:rcp|ex2|sqrt)\.\S+|\S+\.ftz\S*)", text) == []
