"""The square root of codes on a GPU (`root_rn` of csrc/formulas/states.h), which is rounded to nearest."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_instructions_are_those_of_nvcc(arch: str, tmp_path: Path) -> None:
    source, object_ = tmp_path / "roots.cu", tmp_path / "roots.cubin"
    source.write_text(SOURCE)
    nvcc.run(nvcc.nvcc(), "-std=c++17", "-O3", f"-arch={arch}", "-I", ROOT / "csrc", "-cubin", source, "-o", object_)
    listing = nvcc.run(nvcc.cuobjdump(), "-sass", object_)
    found = {}
    for function in listing.split("Function : ")[1:]:
        opcodes = [each.opcode.removesuffix(".FTZ") for each in sass.instructions(function)]
        found[re.sub(r"\W.*", "", function, flags=re.DOTALL)] = [
            opcode for opcode in opcodes if re.match("MUFU|FMUL|FFMA|CALL", opcode)
        ]
    ours, by_nvcc = found["_Z4oursPf"], found["_Z7by_nvccPf"]
    assert ours == ["MUFU.RSQ", "FMUL", "FMUL", "FFMA", "FFMA"]
    assert [opcode for opcode in by_nvcc if not opcode.startswith("CALL")][:5] == ours
    assert len(by_nvcc) > len(ours)  # where its argument is out of range
