"""The square root of codes on a GPU (`root_rn` of csrc/formulas/states.h), which is rounded to nearest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nvcc
import pytest
import sass

ROOT = Path(__file__).parents[2]
SOURCE = """
#include "formulas/states.h"
__global__ void by_nvcc(float* x) { *x = __fsqrt_rn(*x); }
__global__ void ours(float* x) { *x = amp_kernels::root_rn(*x); }
"""


def arithmetic(function: str) -> Iterator[str]:
    """The first five instructions of a listing that compute, with a name for each value in place of its register."""
    computing = (each for each in sass.instructions(function) if re.match("MUFU|FMUL|FFMA", each.opcode))
    names: dict[str, str] = {}
    for each, name in zip(computing, ("inverse", "root", "half", "rest", "result"), strict=False):
        result, *operands = each.operands.split(", ")
        operands = [re.sub(r"R\d+", lambda found: names.setdefault(found[0], "x"), operand) for operand in operands]
        names[result] = name
        yield f"{each.opcode.replace('FMUL.FTZ', 'FMUL')} {', '.join([name, *operands])}"


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_instructions_are_those_of_nvcc(arch: str, tmp_path: Path) -> None:
    source, object_ = tmp_path / "roots.cu", tmp_path / "roots.cubin"
    source.write_text(SOURCE)
    nvcc.run(nvcc.nvcc(), "-std=c++17", "-O3", f"-arch={arch}", "-I", ROOT / "csrc", "-cubin", source, "-o", object_)
    listing = nvcc.run(nvcc.cuobjdump(), "-sass", object_)
    functions = listing.split("Function : ")[1:]
    found = {re.sub(r"\W.*", "", function, flags=re.DOTALL): list(arithmetic(function)) for function in functions}
    inverse = ["MUFU.RSQ inverse, x", "FMUL root, x, inverse", "FMUL half, inverse, 0.5"]
    assert found["_Z4oursPf"] == [*inverse, "FFMA rest, -root, root, x", "FFMA result, rest, half, root"]
    assert found["_Z7by_nvccPf"] == found["_Z4oursPf"]
