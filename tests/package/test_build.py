"""What nvcc makes of the CUDA sources, also where there is no GPU.

They compile for every default architecture, spill nothing, access memory 16 bytes at a time, multiply on tensor cores,
and keep the roundings of int8.
"""

from __future__ import annotations

import re

import nvcc
import pytest
import sass
from nvcc import SOURCES, Compiled, cuobjdump, run

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
    ("int8_matmul", "tiled_kernelI.*Images", r"\bSTS\.64\b"),  # padding of a convolution
    ("int8_linear", "few_rows_kernelI6__half", WIDE_LOAD),
    ("int8_linear", "(tiled|few_rows)_kernelI6__half", r"\bHMMA\."),
    ("int8_linear", "tiled_kernelI6__half", r"\bSTG\.E\S*\.64\b"),
    ("matmul", "tiled_kernelI6__half", r"\bHMMA\."),
    ("matmul", "tiled_kernel", r"\bLDSM\.16\."),
    ("matmul", "tiled_kernel.*ELb1E", r"\bLDSM\.16\.MT88\."),  # an operand is transposed
    ("matmul", "tiled_kernel", r"\bLDS\.(U\.)?128\b"),  # U: on sm_75
    ("matmul", "tiled_kernel", WIDE_STORE),
    ("matmul_few_rows", "few_rows_kernelI6__half", WIDE_LOAD),
    ("matmul_few_rows", "few_rows_kernelI6__half", r"\bHMMA\."),
    ("copy_pad", "copy_pad_kernel", WIDE_LOAD),
    ("copy_pad", "copy_pad_kernel", WIDE_STORE),
]


# Architectures, and sources that are compiled for them.
COMPILED = {
    "usual": (nvcc.HOPPER, nvcc.FEW),
    "hopper": (nvcc.HOPPER, SOURCES),
    "turing": (nvcc.TURING, SOURCES),
    "others": (nvcc.OTHERS, SOURCES),
    "rest": (nvcc.REST, SOURCES),
}


@pytest.fixture(
    scope="module",
    params=[
        "usual",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("hopper", "turing", "others")),
        pytest.param("rest", marks=pytest.mark.nightly),
    ],
)
def compiled(request: pytest.FixtureRequest) -> dict[str, nvcc.Compiled]:
    return nvcc.compile_sources(*COMPILED[request.param])


@pytest.mark.parametrize("source", [source.stem for source in SOURCES])
def test_nothing_spills(source: str, compiled: dict[str, Compiled]) -> None:
    number = r"(\d+) bytes "
    pattern = rf"properties for (\S+)\s+{number}stack frame, {number}spill stores, {number}spill loads"
    frames = re.findall(pattern, compiled[source].said)
    assert len(frames) >= len(compiled[source].archs)
    assert [frame for frame in frames if frame[1:] != ("0", "0", "0")] == []


@pytest.mark.parametrize(("source", "kernels", "instruction"), INSTRUCTIONS)
def test_kernels_have_their_instructions(
    source: str, kernels: str, instruction: str, compiled: dict[str, Compiled]
) -> None:
    found = set()
    for kernel in nvcc.kernels(compiled[source]):
        if re.search(kernels, kernel.mangled) and not nvcc.has_no_tensor_cores(kernel):
            found.add(kernel.arch)
            assert re.search(instruction, kernel.code), f"{kernel.arch}: no {instruction} in {kernel.mangled}"
    assert found == {f"sm_{arch}" for arch in compiled[source].archs}


def test_gelu_tanh_has_no_instructions_for_subnormals(compiled: dict[str, Compiled]) -> None:
    """The derivative of gelu_tanh takes 11 instructions more than the derivative of relu. With exp2f and a division it
    would take 29 more."""
    kernels: dict[tuple[str, str], list[str]] = {}
    for kernel in nvcc.kernels(compiled["copy_pad"]):
        if match := re.search(r"copy_pad_kernelI(\w+)LNS_10ActivationE(\d)E", kernel.mangled):
            kernels.setdefault((kernel.arch, match[1]), ["", "", "", ""])[int(match[2])] = kernel.code
    assert {arch for arch, _ in kernels} == {f"sm_{arch}" for arch in compiled["copy_pad"].archs}
    for (arch, dtype), (_, relu, _, gelu_tanh) in kernels.items():
        more = len(sass.instructions(gelu_tanh)) - len(sass.instructions(relu))
        each = more / gelu_tanh.count("MUFU.EX2")  # there is one for each element
        assert each <= 14, f"{arch}, {dtype}: {each}"


@pytest.mark.parametrize("source", ["int8_quantize", "int8_dequantize", "int8_matmul"])
def test_int8_keeps_its_roundings(source: str, compiled: dict[str, Compiled]) -> None:
    """Fused, approximate and flushing instructions would make other codes than the other backends."""
    text = run(cuobjdump(), "-ptx", compiled[source].object)
    assert "mul.rn.f32" in text  # so that the next line has something to look at
    assert re.findall(r"\b(?:fma\.\S+|div\.(?:full|approx)\S*|(?:rcp|ex2|sqrt)\.\S+|\S+\.ftz\S*)", text) == []
