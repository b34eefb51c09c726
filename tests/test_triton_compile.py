"""Compiles every Triton kernel for GPUs that need not be there, and reads what became of it: wide accesses,
no local memory, no approximate arithmetic. Triton brings ptxas and cuobjdump along.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from amp_kernels.triton_kernels.common import UPDATE_REGISTERS, UPDATE_WARPS
from amp_kernels.triton_kernels.rmsprop import _rmsprop_kernel
from amp_kernels.triton_kernels.sgd import _sgd_kernel
from amp_kernels.triton_kernels.unscale import _NUM_WARPS, _unscale_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CODES = {"fp32": 0, "fp16": 1, "bf16": 2}
POINTERS = {
    "table_ptr": "*i64",
    "chunks_ptr": "*i32",
    "scale_ptr": "*fp32",
    "partials_ptr": "*fp64",
    "found_inf_ptr": "*fp32",
    "norm_ptr": "*fp32",
    "record_ptr": "*i64",
    "steps_ptr": "*i32",
    "hyper_ptr": "*fp32",
    "lr_ptr": "*i64",
    "grad_scale_ptr": "*fp32",
    "grad_norm_ptr": "*fp32",
}
TYPES = POINTERS | {"n_tensors": "i32", "n_chunks": "i32", "chunk_size": "i32", "max_norm": "fp32"}

UPDATE = {"num_warps": UPDATE_WARPS, "maxnreg": UPDATE_REGISTERS}

# sm_90 for every combination, the others for the extremes.
ARCHITECTURES = (75, 80, 100, 120)
every_update = [(90, p, g) for p, g in itertools.product(CODES, CODES)]
some_updates = [(arch, *dtypes) for arch in ARCHITECTURES for dtypes in (("fp32", "fp32"), ("bf16", "fp16"))]
updates = pytest.mark.parametrize(
    ("arch", "param", "grad"),
    every_update + some_updates,
    ids=lambda v: f"sm_{v}" if isinstance(v, int) else v,
)


class Compiled:
    def __init__(self, kernel: Any, arch: int, options: dict[str, int], tmp_path: Path, **constants: object) -> None:
        signature = {arg: "constexpr" if arg in constants else TYPES[arg] for arg in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        binary = triton.compile(
            source, target=GPUTarget("cuda", arch, 32), options=options | {"enable_fp_fusion": True}
        )
        self.arch = arch
        self.ptx = binary.asm["ptx"]
        self._cubin = tmp_path / "kernel.cubin"
        self._cubin.write_bytes(binary.asm["cubin"])
        self.sass = self._dump("-sass")

    def _dump(self, what: str) -> str:
        return subprocess.run([CUOBJDUMP, what, self._cubin], capture_output=True, text=True, check=True).stdout

    def count(self, access: str) -> int:
        """Vector accesses, as `ld.v4.b32`, whatever cache hints stand between."""
        operation, vector, width = access.split(".")
        return len(re.findall(rf"\b{operation}\.global[\w.:]*\.{vector}\.{width}", self.ptx))

    def check(self) -> None:
        usage = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", self._dump("-res-usage"))
        assert usage is not None
        registers, stack, local = map(int, usage.groups())
        if self.arch > 75:  # Triton 3.6 spills 8 bytes of one variant there
            assert (stack, local) == (0, 0)
            assert not re.search(r"\b(LDL|STL)\b", self.sass)
        # Five blocks of 128 threads: 40 KB in flight on a multiprocessor; 4.8 TB/s needs 24.
        assert registers <= 96
        assert not re.search(r"\.ftz|\bdiv\.(full|approx)|\bsqrt\.approx", self.ptx)
        # The widest accesses of the PTX are those of the machine code: ptxas has not split them.
        for operation, access in (("ld", "LDG"), ("st", "STG")):
            assert len(re.findall(rf"{access}\.E\.128", self.sass)) >= self.count(f"{operation}.v4.b32")


def check_accesses(compiled: Compiled, fp32_loads: int, fp32_stores: int, loads16: int, stores16: int) -> None:
    """Eight elements a thread: two 16-byte accesses to each fp32 array, two of 8 bytes to each 16-bit one."""
    compiled.check()
    assert compiled.count("ld.v4.b32") == 2 * fp32_loads
    assert compiled.count("st.v4.b32") == 2 * fp32_stores
    assert compiled.count("ld.v2.b32") == 2 * loads16
    assert compiled.count("st.v2.b32") == 2 * stores16


@updates
def test_sgd(arch: int, param: str, grad: str, tmp_path: Path) -> None:
    constants = {"PARAM_DTYPE": CODES[param], "GRAD_DTYPE": CODES[grad]}
    compiled = Compiled(_sgd_kernel, arch, UPDATE, tmp_path, **constants)
    check_accesses(compiled, 2 + (grad == "fp32"), 2, grad != "fp32", param != "fp32")


@updates
def test_rmsprop(arch: int, param: str, grad: str, tmp_path: Path) -> None:
    constants = {"PARAM_DTYPE": CODES[param], "GRAD_DTYPE": CODES[grad]}
    compiled = Compiled(_rmsprop_kernel, arch, UPDATE, tmp_path, **constants)
    check_accesses(compiled, 4 + (grad == "fp32"), 4, grad != "fp32", param != "fp32")


@pytest.mark.parametrize("kernel", [_sgd_kernel, _rmsprop_kernel], ids=["sgd", "rmsprop"])
def test_update_without_scalars(kernel: Any, tmp_path: Path) -> None:
    absent = dict.fromkeys(["grad_scale_ptr", "found_inf_ptr", "grad_norm_ptr"])
    Compiled(kernel, 90, UPDATE, tmp_path, PARAM_DTYPE=2, GRAD_DTYPE=2, **absent).check()


@pytest.mark.parametrize("kernel", [_unscale_kernel, _sgd_kernel, _rmsprop_kernel], ids=lambda k: k.__name__)
def test_values_and_alignment_make_no_variants(kernel: Any) -> None:
    """A new variant would be compiled in the middle of a graph capture."""
    assert all(p.is_constexpr or p.do_not_specialize for p in kernel.params)
    assert not any(p.is_constexpr and p.do_not_specialize for p in kernel.params)


flags = [(90, *f) for f in itertools.product([False, True], ["1", "scale", "1/scale"], [False, True])]
flags += [(arch, write, "1/scale", True) for arch in ARCHITECTURES for write in (False, True)]


@pytest.mark.parametrize(("arch", "write", "factor", "clear"), flags)
def test_unscale(arch: int, write: bool, factor: str, clear: bool, tmp_path: Path) -> None:
    constants: dict[str, object] = {"WRITE": write, "DIVIDE": factor == "1/scale", "CLEAR": clear}
    if factor == "1":
        constants["scale_ptr"] = None
    compiled = Compiled(_unscale_kernel, arch, {"num_warps": _NUM_WARPS}, tmp_path, **constants)
    compiled.check()
    # 64 bytes a thread, once for each of three dtypes.
    assert compiled.count("ld.v4.b32") == 4 * 3
    assert compiled.count("st.v4.b32") == 4 * 3 * write
