"""Roots, reciprocals and quotients without nvcc's branches for special cases: `root_rn` and `reciprocal_rn` of
csrc/formulas/states.h, and `Quick` of csrc/cuda/update_lean.cuh. They are rounded to nearest, because they are nvcc's
own instructions."""

from __future__ import annotations

import re
from pathlib import Path

import nvcc
import pytest
import sass

ROOT = Path(__file__).parents[2]
SOURCE = """
#include "cuda/update_lean.cuh"
extern "C" {
__global__ void root_of_nvcc(float* x) { *x = __fsqrt_rn(*x); }
__global__ void root(float* x) { *x = amp_kernels::root_rn(*x); }
__global__ void reciprocal_of_nvcc(float* x) { *x = __frcp_rn(*x); }
__global__ void reciprocal(float* x) { *x = amp_kernels::reciprocal_rn(*x); }
__global__ void quotient_of_nvcc(float* x) { *x = __fdiv_rn(x[0], x[1]); }
__global__ void quotient(float* x) { amp_kernels::cuda::Quick quick; *x = quick.quotient(x[0], x[1]); }
}
"""
ROOT_CODE = [
    "MUFU.RSQ inverse, x", "FMUL root, x, inverse", "FMUL half, inverse, 0.5", "FFMA rest, -root, root, x",
    "FFMA result, rest, half, root",
]  # fmt: skip
INVERSE = ["MUFU.RCP near, x", "FFMA rest, -x, near, 1", "FFMA inverse, near, rest, near"]
NEGATED = ["MUFU.RCP near, x", "FFMA below, x, near, -1", "FADD rest, -below, -RZ", "FFMA inverse, near, rest, near"]
# Both compute the same numbers. But nvcc's sum with RZ makes 0 of a dividend of -0, which it has branched off before.
QUOTIENT = ["FMUL first, a, inverse", "FFMA below, x, first, -a", "FFMA result, inverse, -below, first"]
OF_NVCC = ["FFMA first, a, inverse, RZ", "FFMA above, -x, first, a", "FFMA result, inverse, above, first"]
WANTED = {
    "root": ROOT_CODE, "root_of_nvcc": ROOT_CODE, "reciprocal": INVERSE, "reciprocal_of_nvcc": NEGATED,
    "quotient": [*INVERSE, *QUOTIENT], "quotient_of_nvcc": [*INVERSE, *OF_NVCC],
}  # fmt: skip


def arithmetic(function: str, wanted: list[str]) -> list[str]:
    """The first instructions of a listing that compute, with the names of `wanted` in place of registers."""
    computing = [each for each in sass.instructions(function) if re.match("MUFU|FMUL|FFMA|FADD", each.opcode)]
    names: dict[str, str] = {}
    found = []
    for each, like in zip(computing, wanted, strict=False):
        result, *operands = each.operands.split(", ")
        _, name, *likes = re.split(r",? ", like)
        for operand, alike in zip(operands, likes, strict=False):  # a register that nothing has written is an argument
            if register := re.search(r"R\d+", operand):
                names.setdefault(register[0], alike.lstrip("-"))
        operands = [re.sub(r"R\d+", lambda register: names[register[0]], operand) for operand in operands]
        names[result] = name
        found.append(f"{each.opcode.replace('.FTZ', '')} {', '.join([name, *operands])}")
    return found


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_instructions_are_those_of_nvcc(arch: str, tmp_path: Path) -> None:
    source, object_ = tmp_path / "roots.cu", tmp_path / "roots.cubin"
    source.write_text(SOURCE)
    nvcc.run(nvcc.nvcc(), *nvcc.FLAGS, f"-arch={arch}", "-I", ROOT / "csrc", "-cubin", source, "-o", object_)
    listing = nvcc.run(nvcc.cuobjdump(), "-sass", object_)
    functions = {re.sub(r"\W.*", "", part, flags=re.DOTALL): part for part in listing.split("Function : ")[1:]}
    assert {name: arithmetic(functions[name], wanted) for name, wanted in WANTED.items()} == WANTED
