"""What an architecture cannot do ends in a trap, and not in a wrong result.

A binary for sm_75 alone, with PTX, runs on every GPU. Its products of bf16 have no tensor cores and its asynchronous
copies are of 16 bytes or of none, so that launchers must choose other kernels there. If one chooses wrongly, its kernel
ends in an error.
"""

from __future__ import annotations

import re

import nvcc
import pytest

# The kernels for sm_75 that trap, by source: those that multiply bf16, and those that copy 16 bytes at a time. Kernels
# for later architectures do both, and none traps.
TRAPS = {
    "matmul": "tiled_kernel<(__nv_bfloat16|.*WideLoader)",
    "matmul_few_rows": "few_rows_kernel<__nv_bfloat16",
    "int8_linear": "(tiled|few_rows)_kernel<__nv_bfloat16",
}


def trapping(source: str, targets: nvcc.Targets) -> list[tuple[str, bool]]:
    """The kernels of a source of the products, and whether each has a trap."""
    (path,) = (path for path in nvcc.SOURCES if path.stem == source)
    compiled = nvcc.compile_sources(targets, [path])[source]
    return [(kernel.name, "BPT.TRAP" in kernel.code) for kernel in nvcc.kernels(compiled)]


# int8_linear is the least to compile for sm_75.
@pytest.mark.parametrize(
    "source", [pytest.param(source, marks=() if source == "int8_linear" else pytest.mark.slow) for source in TRAPS]
)
def test_sm_75_traps_where_it_must(source: str) -> None:
    kernels = trapping(source, nvcc.TURING)
    expected = {name for name, _ in kernels if re.match(TRAPS[source], name)}
    assert expected and {name for name, traps in kernels if traps} == expected


@pytest.mark.parametrize("targets", [nvcc.HOPPER, pytest.param(nvcc.OTHERS, marks=pytest.mark.slow)], ids="-".join)
@pytest.mark.parametrize("source", TRAPS)
def test_later_architectures_never_trap(source: str, targets: nvcc.Targets) -> None:
    kernels = trapping(source, targets)
    assert kernels and [name for name, traps in kernels if traps] == []
