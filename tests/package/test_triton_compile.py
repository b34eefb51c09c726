"""Compiles every Triton kernel for GPUs that need not be there, and reads what became of it: wide accesses,
no local memory, no approximate arithmetic. Triton brings ptxas and cuobjdump along.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from amp_kernels.triton_kernels import (
    copy_pad,
    int8_conv2d,
    int8_matmul,
    int8_quantize,
    int8_tiles,
    update,
)
from amp_kernels.triton_kernels.common import INT8 as CODES_OF_STATES
from amp_kernels.triton_kernels.common import INT16
from amp_kernels.triton_kernels.int8_dequantize import _dequantize_kernel, _straight_through_kernel
from amp_kernels.triton_kernels.product import COLUMNS, INT8, NEITHER, ROWS, Tiles
from amp_kernels.triton_kernels.unscale import _NUM_WARPS, _unscale_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from amp_kernels.families import FAMILIES
from amp_kernels.ops.table import DTYPE_CODES

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CODES = {"fp32": DTYPE_CODES[torch.float32], "fp16": DTYPE_CODES[torch.float16], "bf16": DTYPE_CODES[torch.bfloat16]}
POINTERS = {
    "table_ptr": "*i64",
    "chunks_ptr": "*i32",
    "partials_ptr": "*fp64",
    "found_inf_ptr": "*fp32",
    "norm_ptr": "*fp32",
    "record_ptr": "*i64",
    "ticket_ptr": "*i64",
    "hyper_ptr": "*fp32",
    "lr_ptr": "*i64",
}

UPDATE = {"num_warps": update._WARPS, "maxnreg": update._REGISTERS}
FORMULAS = {
    family: {
        **update.formula_of(family),
        "STATES": 2 ** len(known.states) - 1,
        "STATE_DTYPE": CODES["fp32"],
        "CODED": 0,
    }
    for family, known in FAMILIES.items()
}
formulas = pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())


def by_arch(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters that begin with an architecture; those of sm_90 are in `make test`."""
    return [pytest.param(*row, marks=() if row[0] == 90 else pytest.mark.slow) for row in rows]


# Adam on sm_90 for every dtype of each, the others for the extremes. A master is there for 16-bit parameters.
ARCHITECTURES = (75, 80, 100, 120)
SPLIT, FULL, AVERAGE = ("fp16", "int16", "fp16"), ("bf16", "fp32", "bf16"), ("fp32", "int16", "fp16")
SOME_DTYPES = (("fp32", "fp32", "fp32"), SPLIT, FULL, AVERAGE)
updates = [
    (90, "adam", *dtypes)
    for dtypes in (
        *(("fp32", "fp32", grad) for grad in CODES),
        *((low, master, grad) for low in ("fp16", "bf16") for master in ("fp32", "int16") for grad in ("fp32", low)),
        *(("fp32", "int16", low) for low in ("fp16", "bf16")),
    )
]
updates += [
    (arch, family, *dtypes)
    for arch in (90, *ARCHITECTURES)
    for family in FAMILIES
    for dtypes in SOME_DTYPES
    if (arch, family) != (90, "adam")
]


class Compiled:
    def __init__(
        self,
        kernel: Any,
        arch: int,
        options: dict[str, int],
        tmp_path: Path,
        types: dict[str, str] | None = None,
        fp_fusion: bool = True,
        **constants: object,
    ) -> None:
        types = (types or POINTERS) | {p.name: p.annotation_type for p in kernel.params if p.annotation_type}
        signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        binary = triton.compile(
            source, target=GPUTarget("cuda", arch, 32), options=options | {"enable_fp_fusion": fp_fusion}
        )
        self.arch = arch
        self.shared = binary.metadata.shared
        self.ptx = binary.asm["ptx"]
        self._cubin = tmp_path / "kernel.cubin"
        self._cubin.write_bytes(binary.asm["cubin"])

    @functools.cached_property
    def sass(self) -> str:
        """Takes as long as to compile the kernel: for those tests alone that read instructions."""
        return self._dump("-sass")

    def _dump(self, what: str) -> str:
        return subprocess.run([CUOBJDUMP, what, self._cubin], capture_output=True, text=True, check=True).stdout

    def count(self, access: str) -> int:
        """Vector accesses, as `ld.v4.b32`, whatever cache hints stand between."""
        operation, vector, width = access.split(".")
        return len(re.findall(rf"\b{operation}\.global[\w.:]*\.{vector}\.{width}", self.ptx))

    def registers_stack_local(self) -> list[int]:
        usage = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", self._dump("-res-usage"))
        assert usage is not None
        return [int(n) for n in usage.groups()]

    def check(self) -> None:
        registers, stack, local = self.registers_stack_local()
        if self.arch > 75:  # Triton 3.6 spills 8 bytes of one variant there
            assert (stack, local) == (0, 0)
        # Five blocks of 128 threads fit on a multiprocessor.
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


@pytest.mark.parametrize(
    ("arch", "family", "param", "master", "grad"),
    by_arch(updates),
    ids=lambda v: f"sm_{v}" if isinstance(v, int) else v,
)
def test_update(arch: int, family: str, param: str, master: str, grad: str, tmp_path: Path) -> None:
    formula = FORMULAS[family]
    codes = CODES | {"int16": INT16.value}
    dtypes = {"PARAM_DTYPE": CODES[param], "MASTER_DTYPE": codes[master], "GRAD_DTYPE": CODES[grad]}
    compiled = Compiled(update._update_kernel, arch, UPDATE, tmp_path, **formula, **dtypes)
    is_split = master == "int16"
    is_average = is_split and param == "fp32"  # the remainder is the gradient's
    fp32 = formula["N_STATES"] + (not is_split or is_average)  # read and written: states, a master or an fp32 parameter
    loads16 = (grad != "fp32") + (param != "fp32" and is_split) + is_split
    stores16 = 0 if is_average else (param != "fp32") + is_split
    check_accesses(compiled, fp32 + (grad == "fp32"), fp32, loads16, stores16)


@formulas
def test_update_without_optional_states(formula: dict[str, Any], tmp_path: Path) -> None:
    """What no tensor has is not accessed."""
    dtypes = {"PARAM_DTYPE": CODES["fp32"], "MASTER_DTYPE": CODES["fp32"], "GRAD_DTYPE": CODES["fp32"]}
    required = formula["N_STATES"] - formula["N_OPTIONAL"]
    options = {**formula, "STATES": 2**required - 1}
    compiled = Compiled(update._update_kernel, 90, UPDATE, tmp_path, **options, **dtypes)
    check_accesses(compiled, required + 2, required + 1, 0, 0)


LEAN = {"int8": CODES_OF_STATES.value, "bf16": CODES["bf16"]}


@pytest.mark.parametrize("state_dtype", LEAN)
@pytest.mark.parametrize("family", ["sgd", pytest.param("rmsprop", marks=pytest.mark.slow), "adam"])
def test_update_of_lean_states(family: str, state_dtype: str, tmp_path: Path) -> None:
    """16-bit weights, with the states that every tensor of the family can have in fewer bits."""
    states = 1 if family == "sgd" else 3
    constants = update._options(family, CODES["bf16"], True, CODES["bf16"], states, LEAN[state_dtype])
    options = {name: constants.pop(name) for name in UPDATE}
    compiled = Compiled(update._update_kernel, 90, options, tmp_path, **constants)
    assert not re.search(r"\b(LDL|STL)\b", compiled.sass)
    assert ".ftz" not in compiled.ptx
    # A thread loads two packs of a tile: of gradient, weight and remainder, and of the states.
    of_states = 2 * states.bit_count()
    assert compiled.count("ld.v2.b32") == 6 + (of_states if state_dtype == "bf16" else 0)
    if state_dtype == "int8":
        assert len(re.findall(r"\bst\.global[\w.:]*\.b32", compiled.ptx)) >= of_states


INT8_KERNELS = [
    int8_quantize._extremes_kernel,
    int8_quantize._quantize_kernel,
    _dequantize_kernel,
    _straight_through_kernel,
    int8_matmul._sums_kernel,
    int8_matmul._matmul_kernel,
    int8_matmul._combine_kernel,
    int8_conv2d._conv2d_kernel,
]


@pytest.mark.parametrize(
    "kernel",
    [
        _unscale_kernel,
        update._update_kernel,
        *INT8_KERNELS,
        copy_pad._copy_kernel,
        copy_pad._fold_kernel,
    ],
    ids=lambda k: f"{k.__module__}.{k.__name__}",
)
def test_values_and_alignment_make_no_variants(kernel: Any) -> None:
    """A new variant would be compiled in the middle of a graph capture."""
    assert all(p.is_constexpr or p.do_not_specialize for p in kernel.params)
    assert not any(p.is_constexpr and p.do_not_specialize for p in kernel.params)
    # Triton types a number without an annotation by its value.
    untyped = {p.name for p in kernel.params if not (p.is_constexpr or p.annotation_type)}
    assert all(name.endswith("_ptr") for name in untyped)


@pytest.mark.parametrize(("arch", "write"), by_arch(itertools.product((90, *ARCHITECTURES), [False, True])))
def test_unscale(arch: int, write: bool, tmp_path: Path) -> None:
    compiled = Compiled(_unscale_kernel, arch, {"num_warps": _NUM_WARPS}, tmp_path, WRITE=write)
    compiled.check()
    # 64 bytes a thread, once for each of three dtypes.
    assert compiled.count("ld.v4.b32") == 4 * 3
    assert compiled.count("st.v4.b32") == 4 * 3 * write


# ----------------------------------------------------------------------------------------------------------- int8
POINTER = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "int8": "*i8"}
INT8_CODES = CODES | {"int8": INT8.value}
SOURCES = {
    "given": int8_quantize.GIVEN,
    "registers": int8_quantize.REGISTERS,
    "two_reads": int8_quantize.TWO_READS,
    "partials": int8_quantize.PARTIALS,
}


def check_exact(compiled: Compiled, may_fuse: bool = False) -> None:
    """No operation that another backend would round otherwise, and registers alone."""
    assert not re.search(r"\.ftz|\bdiv\.(full|approx)", compiled.ptx)
    assert may_fuse or not re.search(r"\bfma\.", compiled.ptx)
    assert compiled.registers_stack_local()[1:] == [0, 0]


def walk(dtype: str, wide: bool) -> dict[str, object]:
    return {"DTYPE": CODES[dtype], "VEC": (4 if dtype == "fp32" else 8) if wide else 1}


def plan_options(plan: int8_tiles.Plan) -> tuple[dict[str, int], dict[str, object]]:
    constants = plan.constants()
    return {"num_warps": constants.pop("num_warps")}, constants


def quantize_plans(size: int8_tiles.Layout, wide: bool) -> list[tuple[str, int8_tiles.Plan]]:
    fitting = int8_tiles.register_plan(size, wide)
    return [
        ("registers", fitting) if fitting is not None else ("partials", int8_tiles.two_pass_plan(size, wide)),
        ("two_reads", int8_tiles.two_pass_plan(size, wide)),
        ("given", int8_tiles.streaming_plan(size, wide)),
    ]


def compile_quantize(
    arch: int, dtype: str, source: str, plan: int8_tiles.Plan, wide: bool, tmp_path: Path, symmetric: bool,
    fake: bool = False, seed: str = "",
) -> Compiled:  # fmt: skip
    options, constants = plan_options(plan)
    constants |= walk(dtype, wide) | {"FROM": SOURCES[source].value, "FAKE": fake}
    constants |= {"STOCHASTIC": bool(seed), "FOURS": seed == "fours"}
    types = {
        "x_ptr": POINTER[dtype], "out_ptr": POINTER[dtype] if fake else "*i8", "scale_ptr": "*fp32",
        "zero_point_ptr": "*i32", "partials_ptr": "*i32",
    }  # fmt: skip
    absent = (["zero_point_ptr"] if symmetric else []) + ([] if source == "partials" else ["partials_ptr"])
    constants |= dict.fromkeys(absent)
    return Compiled(int8_quantize._quantize_kernel, arch, options, tmp_path, types, fp_fusion=False, **constants)


# Rows that fill registers, short rows, columns that fill registers and that do not, one tensor.
SIZES = {
    "longest_rows": int8_tiles.Layout(4096, 16384, 1, 1 << 26),
    "rows": int8_tiles.Layout(4096, 4096, 1, 1 << 24),
    "blocks": int8_tiles.Layout(4096, 32, 1, 1 << 17),
    "columns": int8_tiles.Layout(1, 256, 4096, 1 << 20),
    "tall_columns": int8_tiles.Layout(1, 8192, 4096, 1 << 25),
    "tensor": int8_tiles.Layout(1, 1 << 26, 1, 1 << 26),
}
# sm_90 for every way through the kernels, the others for those that need most registers.
everywhere = pytest.mark.parametrize(
    "arch", by_arch([(75,), (80,), (90,), (100,), (120,)]), ids=lambda arch: f"sm_{arch}"
)
access = pytest.mark.parametrize("wide", [True, False], ids=["wide", "by_element"])
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())


def check_quantize(arch: int, dtype: str, source: str, plan: int8_tiles.Plan, wide: bool, tmp_path: Path) -> None:
    compiled = compile_quantize(arch, dtype, source, plan, wide, tmp_path, symmetric=False)
    check_exact(compiled)
    if wide:
        assert compiled.count("ld.v4.b32") > 0
        assert compiled.count("st.v2.b32") > 0 or dtype == "fp32"  # eight codes; of fp32 four
    if source == "registers" and wide:
        # One read: a load for each 16 bytes of a thread's share of the tile.
        share = plan.rows * plan.width // (32 * plan.warps)
        assert compiled.count("ld.v4.b32") == share // (4 if dtype == "fp32" else 8)


@sizes
@access
def test_int8_quantize(size: int8_tiles.Layout, wide: bool, tmp_path: Path) -> None:
    source, plan = quantize_plans(size, wide)[0]
    check_quantize(90, "bf16", source, plan, wide, tmp_path)


@everywhere
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_int8_quantize_everywhere(arch: int, dtype: str, tmp_path: Path) -> None:
    for size, wide in (("longest_rows", True), ("columns", dtype == "fp16")):
        source, plan = quantize_plans(SIZES[size], wide)[0]
        check_quantize(arch, dtype, source, plan, wide, tmp_path)


def test_int8_quantize_with_extremes_from_elsewhere(tmp_path: Path) -> None:
    for source, plan in quantize_plans(SIZES["rows"], True)[1:]:
        check_quantize(90, "bf16", source, plan, True, tmp_path)


@pytest.mark.parametrize(("arch", "seed"), by_arch([(75, "fours"), (90, "fours"), (90, "each"), (120, "each")]))
def test_int8_stochastic_rounding(arch: int, seed: str, tmp_path: Path) -> None:
    source, plan = quantize_plans(SIZES["rows"], True)[0]
    check_exact(compile_quantize(arch, "fp16", source, plan, True, tmp_path, symmetric=True, seed=seed))


def test_int8_fake_quantize(tmp_path: Path) -> None:
    for source, plan in quantize_plans(SIZES["rows"], True):
        compiled = compile_quantize(90, "fp16", source, plan, True, tmp_path, symmetric=True, fake=True)
        check_exact(compiled)
        assert compiled.count("st.v4.b32") > 0


@access
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_int8_extremes(wide: bool, symmetric: bool, tmp_path: Path) -> None:
    for size in (SIZES["tensor"], SIZES["tall_columns"]):
        options, constants = plan_options(int8_tiles.two_pass_plan(size, wide))
        constants |= walk("bf16", wide) | {"SYMMETRIC": symmetric}
        types = {"x_ptr": "*bf16", "partials_ptr": "*i32"}
        compiled = Compiled(int8_quantize._extremes_kernel, 90, options, tmp_path, types, fp_fusion=False, **constants)
        check_exact(compiled)
        assert (compiled.count("ld.v4.b32") > 0) == wide


@pytest.mark.parametrize("kernel", [_dequantize_kernel, _straight_through_kernel], ids=lambda k: k.__name__)
@pytest.mark.parametrize(
    ("arch", "size", "wide"),
    by_arch(
        [(90, "rows", False), (90, "blocks", True), (90, "columns", True), (90, "columns", False)]
        + [(arch, "rows", True) for arch in (75, 80, 90, 100, 120)]
    ),
)
def test_int8_elementwise(kernel: Any, arch: int, size: str, wide: bool, tmp_path: Path) -> None:
    options, constants = plan_options(int8_tiles.streaming_plan(SIZES[size], wide))
    given = {"scale_ptr": "*fp32", "zero_point_ptr": "*i32", "out_ptr": "*bf16"}
    first = {"codes_ptr": "*i8"} if kernel is _dequantize_kernel else {"grad_ptr": "*bf16", "x_ptr": "*bf16"}
    constants |= walk("bf16", wide)
    compiled = Compiled(kernel, arch, options, tmp_path, first | given, fp_fusion=False, **constants)
    check_exact(compiled)
    assert (compiled.count("st.v4.b32") > 0) == wide


def compile_matmul(
    arch: int, tiles: int8_matmul.Tiles, dtype: str, tmp_path: Path, *, zero_points: bool = False,
    inner: tuple[int, int] = (int8_matmul.COLUMNS.value, int8_matmul.ROWS.value), wide: bool = True,
    codes: bool = False, split: bool = False, odd: bool = False,
) -> Compiled:  # fmt: skip
    """The kernel for an fp32 or bf16 result, for codes, or for one share of K. `odd`: K is not a multiple of 16."""
    out = "int8" if codes else "bf16" if dtype == "int8" else dtype
    bias = "fp32" if dtype == "int8" else dtype
    partials = "*fp32" if dtype != "int8" else "*i64" if zero_points else "*i32"
    types = {
        "a_ptr": POINTER[dtype], "b_ptr": "*i8", "a_scale_ptr": "*fp32", "a_zero_point_ptr": "*i32",
        "b_scale_ptr": "*fp32", "b_zero_point_ptr": "*i32", "bias_ptr": POINTER[bias], "out_ptr": POINTER[out],
        "out_scale_ptr": "*fp32", "out_zero_point_ptr": "*i32", "a_sums_ptr": "*i32", "b_sums_ptr": "*i32",
        "partials_ptr": partials,
    }  # fmt: skip
    absent = [] if codes else ["out_scale_ptr", "out_zero_point_ptr"]
    absent += [] if split else ["partials_ptr"]
    absent += [] if zero_points else ["a_zero_point_ptr", "b_zero_point_ptr"]
    absent += [] if tiles == int8_matmul._LARGE_NARROW else ["a_sums_ptr", "b_sums_ptr"]
    absent += [] if dtype == "int8" else ["a_scale_ptr"]
    vec = {"fp32": 4, "fp16": 8, "bf16": 8, "int8": 16}
    constants = tiles.constants()
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    return Compiled(
        int8_matmul._matmul_kernel, arch, options, tmp_path, types, fp_fusion=False, **constants,
        **dict.fromkeys(absent), A_DTYPE=INT8_CODES[dtype], AS_HALF=dtype == "int8" and arch == 75,
        BIAS_DTYPE=INT8_CODES[bias], DTYPE=INT8_CODES[out], VEC=vec[out] if wide else 1, A_INNER=inner[0],
        A_VEC=vec[dtype] if wide else 1, B_INNER=inner[1], B_VEC=16 if wide else 1,
        K_VEC=16 if wide and not odd else 1,
    )  # fmt: skip


TENSOR_CORES = {
    80: r"mma\.sync\S*\.s32\.s8\.s8\.s32",
    90: r"wgmma\.mma_async\S*\.s32\.s8\.s8|mma\.sync\S*\.s32\.s8\.s8\.s32",
    100: r"tcgen05\.mma\S*kind::i8|mma\.sync\S*\.s32\.s8\.s8\.s32",
    120: r"mma\.sync\S*\.s32\.s8\.s8\.s32",
}
SHARED_MEMORY = {75: 64, 80: 99, 90: 227, 100: 227, 120: 99}  # KB for one block; sm_86 and sm_89 run what sm_80 does


def matmul_tiles(arch: int, dtype: torch.dtype) -> list[tuple[int8_matmul.Tiles, bool, bool]]:
    """Every tile size that this architecture uses, with the other arguments of `_tiles`."""
    capability = divmod(arch, 10)
    products = ((1, 4096), (4096, 1), (100, 100), (8192, 8192))
    kinds = [*itertools.product([False, True], [False, True] if dtype == torch.int8 else [True])]
    return sorted({(int8_matmul._tiles(dtype, *mn, *kind, capability), *kind) for kind in kinds for mn in products})


def check_matmul(compiled: Compiled, wide: bool = True) -> None:
    # Turing multiplies integers with an FMA, which is exact.
    check_exact(compiled, may_fuse=compiled.arch == 75)
    assert compiled.shared <= SHARED_MEMORY[compiled.arch] * 1024
    if compiled.arch > 75:
        assert re.search(TENSOR_CORES[compiled.arch], compiled.ptx)
        # Where neither operand is contiguous along K, both are transposed in registers.
        assert not wide or "cp.async.cg.shared.global" in compiled.ptx or compiled.count("ld.v4.b32") > 0


@pytest.mark.parametrize(("tiles", "wide", "plain"), matmul_tiles(90, torch.int8), ids=str)
def test_int8_matmul(tiles: int8_matmul.Tiles, wide: bool, plain: bool, tmp_path: Path) -> None:
    inner = (2, 1) if wide else (0, 0)
    check_matmul(compile_matmul(90, tiles, "int8", tmp_path, zero_points=not plain, wide=wide, inner=inner), wide)


@everywhere
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "asymmetric"])
def test_int8_matmul_everywhere(arch: int, zero_points: bool, tmp_path: Path) -> None:
    for n, wide in ((8192, True), (100, True), (100, False)):
        tiles = int8_matmul._tiles(torch.int8, n, n, wide, not zero_points, divmod(arch, 10))
        check_matmul(compile_matmul(arch, tiles, "int8", tmp_path, zero_points=zero_points, wide=wide), wide)


def test_int8_matmul_drives_wgmma(tmp_path: Path) -> None:
    tiles = int8_matmul._tiles(torch.int8, 8192, 8192, True, True, (9, 0))
    assert "wgmma.mma_async" in compile_matmul(90, tiles, "int8", tmp_path).ptx


@pytest.mark.parametrize("arch", by_arch([(80,), (90,)]))
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "asymmetric"])
def test_int8_matmul_of_an_odd_k(arch: int, zero_points: bool, tmp_path: Path) -> None:
    """The end of K is masked behind the loop, which copies 16 bytes at a time."""
    tiles = int8_matmul._tiles(torch.int8, 4096, 4096, True, not zero_points, (arch // 10, 0))
    compiled = compile_matmul(arch, tiles, "int8", tmp_path, zero_points=zero_points, odd=True)
    check_matmul(compiled)
    assert "cp.async.cg.shared.global" in compiled.ptx


@pytest.mark.parametrize("arch", by_arch([(80,), (90,)]))
@pytest.mark.parametrize("inner", [(2, 2), (1, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "asymmetric"])
def test_int8_matmul_layouts(arch: int, inner: tuple[int, int], zero_points: bool, tmp_path: Path) -> None:
    plain = not zero_points and inner != (1, 2)
    tiles = int8_matmul._tiles(torch.int8, 8192, 8192, True, plain, (arch // 10, 0))
    check_matmul(compile_matmul(arch, tiles, "int8", tmp_path, zero_points=zero_points, inner=inner))


@pytest.mark.parametrize("arch", by_arch([(80,), (90,), (120,)]))
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "asymmetric"])
def test_int8_matmul_of_codes(arch: int, zero_points: bool, tmp_path: Path) -> None:
    tiles = int8_matmul._tiles(torch.int8, 8192, 8192, True, False, divmod(arch, 10))
    check_matmul(compile_matmul(arch, tiles, "int8", tmp_path, zero_points=zero_points, codes=True))


@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "asymmetric"])
def test_int8_matmul_of_shares(zero_points: bool, tmp_path: Path) -> None:
    tiles = int8_matmul._tiles(torch.int8, 100, 100, True, not zero_points, (9, 0))
    check_matmul(compile_matmul(90, tiles, "int8", tmp_path, zero_points=zero_points, split=True))


def compile_conv2d(arch: int, tiles: Tiles, out: str, tmp_path: Path, *, zero_points: bool) -> Compiled:
    """With zero points, padding has a code of its own."""
    types = {
        "x_ptr": "*i8", "weight_ptr": "*i8", "x_scale_ptr": "*fp32", "x_zero_point_ptr": "*i32",
        "weight_scale_ptr": "*fp32", "weight_sums_ptr": "*i32", "fill_ptr": "*i8", "bias_ptr": "*fp32",
        "out_ptr": POINTER[out], "out_scale_ptr": "*fp32", "out_zero_point_ptr": "*i32",
    }  # fmt: skip
    absent = [] if zero_points else ["x_zero_point_ptr", "weight_sums_ptr", "fill_ptr"]
    absent += [] if out == "int8" else ["out_scale_ptr", "out_zero_point_ptr"]
    constants = tiles.constants()
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    return Compiled(
        int8_conv2d._conv2d_kernel, arch, options, tmp_path, types, fp_fusion=False, **constants,
        **dict.fromkeys(absent), AS_HALF=arch == 75, DTYPE=INT8_CODES[out],
        VEC={"fp32": 4, "fp16": 8, "bf16": 8, "int8": 16}[out],
    )  # fmt: skip


def check_conv2d(compiled: Compiled) -> None:
    """All codes are read 16 bytes at a time: those of the weight, of x, and of padding."""
    check_matmul(compiled)
    assert not re.search(r"ld\.global[\w.:]*\.[bsu]8\b", compiled.ptx)
    copies = re.findall(r"cp\.async\.\w+\.shared\.global[\w.:]* \[[^]]*\], \[[^]]*\], (\w+)", compiled.ptx)
    assert set(copies) == ({"0x10"} if compiled.arch > 75 else set())
    if compiled.arch == 90:
        assert set(re.findall(r"LDGSTS[\w.]*\.(\d+)", compiled.sass)) == {"128"}


def conv2d_tiles(arch: int) -> list[tuple[Tiles, bool]]:
    """Every tile size that this architecture uses, with whether x has zero points."""
    products = ((1, 4096), (4096, 1), (100, 100), (8192, 8192), (100_000, 64))
    of = int8_conv2d._conv2d_tiles
    return sorted({(of(*mn, zeros, divmod(arch, 10)), zeros) for mn in products for zeros in (False, True)})


convolutions = [(arch, *kind) for arch in (75, 80, 90, 100, 120) for kind in conv2d_tiles(arch)]


@pytest.mark.parametrize(("arch", "tiles", "zero_points"), by_arch(convolutions), ids=str)
def test_int8_conv2d(arch: int, tiles: Tiles, zero_points: bool, tmp_path: Path) -> None:
    for out in ("fp32", "bf16", "int8"):
        check_conv2d(compile_conv2d(arch, tiles, out, tmp_path, zero_points=zero_points))


def test_int8_conv2d_drives_wgmma(tmp_path: Path) -> None:
    for n, zero_points in ((256, False), (64, True)):
        tiles = int8_conv2d._conv2d_tiles(1 << 20, n, zero_points, (9, 0))
        assert "wgmma.mma_async" in compile_conv2d(90, tiles, "int8", tmp_path, zero_points=zero_points).ptx


TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
linears = [(90, dtype, *kind[:2]) for dtype in CODES for kind in matmul_tiles(90, TORCH_DTYPES[dtype])]
linears += [
    (arch, dtype, int8_matmul._tiles(TORCH_DTYPES[dtype], 8192, 8192, True, True, divmod(arch, 10)), True)
    for arch in (75, 80, 100, 120)
    for dtype in ("fp32", "bf16")
]


@pytest.mark.parametrize(("arch", "dtype", "tiles", "wide"), by_arch(linears), ids=str)
def test_int8_linear(arch: int, dtype: str, tiles: int8_matmul.Tiles, wide: bool, tmp_path: Path) -> None:
    compiled = compile_matmul(arch, tiles, dtype, tmp_path, wide=wide)
    assert compiled.registers_stack_local()[1:] == [0, 0]
    assert compiled.shared <= SHARED_MEMORY[arch] * 1024
    assert "tf32" not in compiled.ptx
    if arch > 75 and dtype != "fp32":
        assert re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", compiled.ptx)


@pytest.mark.parametrize(("inner", "vec"), [(1, 16), (2, 16), (0, 1)])
def test_int8_sums(inner: int, vec: int, tmp_path: Path) -> None:
    bm, bk = (128, 32) if inner == 1 else (8, 512)
    types = {"a_ptr": "*i8", "sums_ptr": "*i32"}
    constants = {"INNER": inner, "VEC": vec, "BM": bm, "BK": bk}
    compiled = Compiled(int8_matmul._sums_kernel, 90, {"num_warps": 4}, tmp_path, types, fp_fusion=False, **constants)
    check_exact(compiled)
    assert (compiled.count("ld.v4.b32") > 0) == (vec > 1)


@pytest.mark.parametrize(("partials", "codes"), [("*i32", False), ("*i64", True), ("*fp32", False)])
def test_int8_combination(partials: str, codes: bool, tmp_path: Path) -> None:
    types = {
        "partials_ptr": partials, "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "bias_ptr": "*fp32",
        "out_ptr": "*i8" if codes else "*bf16", "out_scale_ptr": "*fp32", "out_zero_point_ptr": "*i32",
    }  # fmt: skip
    constants: dict[str, object] = {"BIAS_DTYPE": 0, "DTYPE": 3 if codes else 2}
    if not codes:
        constants |= dict.fromkeys(["out_scale_ptr", "out_zero_point_ptr"])
    kernel = int8_matmul._combine_kernel
    check_exact(Compiled(kernel, 90, {"num_warps": 4}, tmp_path, types, fp_fusion=False, **constants))


# -------------------------------------------------------------------------------------------------------- copy_pad
GELU = 2


def compile_copy(
    arch: int, dtype: str, tmp_path: Path, *, inner: int = COLUMNS.value, wide: bool = True, activation: int = 0
) -> Compiled:
    types = {"out_ptr": POINTER[dtype], "x_ptr": POINTER[dtype], "pre_ptr": POINTER[dtype], "sums_ptr": "*fp32"}
    rows, columns = copy_pad._tile(4096, wide)
    vec = 8 if wide else 1
    return Compiled(
        copy_pad._copy_kernel, arch, {"num_warps": 4}, tmp_path, types, ACTIVATION=activation, DTYPE=CODES[dtype],
        X_INNER=inner, X_VEC=vec, PRE_INNER=inner, PRE_VEC=vec, OUT_VEC=8, BR=rows, BC=columns,
        **({} if activation else {"pre_ptr": None}),
    )  # fmt: skip


@everywhere
@pytest.mark.parametrize("activation", [0, GELU], ids=["copy", "gelu"])
def test_copy_pad(arch: int, activation: int, tmp_path: Path) -> None:
    dtype = "fp16" if arch == 75 else "bf16"
    for inner, wide in ((COLUMNS.value, True), (COLUMNS.value, False), (ROWS.value, True), (NEITHER.value, False)):
        compiled = compile_copy(arch, dtype, tmp_path, inner=inner, wide=wide, activation=activation)
        assert compiled.registers_stack_local()[1:] == [0, 0]
        assert compiled.count("st.v4.b32") == (2 if wide else 1)  # 16 elements a thread, or 8
        assert compiled.count("ld.v4.b32") == (compiled.count("st.v4.b32") * (1 + (activation > 0)) if wide else 0)


def test_fold_of_sums(tmp_path: Path) -> None:
    types = {"sums_ptr": "*fp32", "out_ptr": "*fp32"}
    compiled = Compiled(copy_pad._fold_kernel, 90, {"num_warps": 4}, tmp_path, types)
    assert compiled.registers_stack_local()[1:] == [0, 0]
    assert "atom" not in compiled.ptx and "red.global" not in compiled.ptx
