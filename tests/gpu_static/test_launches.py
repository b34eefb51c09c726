"""Which kernels the shapes of the GPU tests reach, on GPUs of several sizes, and how many blocks of each run at a time.

The emulator's launchers plan every shared case (amp_kernels/testing) as on a GPU with 108 (A100), 132 (H100, H200) or
144 multiprocessors, and with 3, which gpu_check.py pretends: small products then reach the tiles of large ones. Nothing
is computed.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import nvcc
import pytest
import torch
from cuda_on_cpu import backend
from cuda_on_cpu.backend import Launch
from cuda_on_cpu.build import missing_headers
from occupancy import resident_blocks

from amp_kernels import testing
from amp_kernels.ops.table import LEAST_LEAN
from amp_kernels.optim import FusedAdam, FusedRMSprop, FusedSGD, ema_
from amp_kernels.testing.updates import UPDATES

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
from gpu_check import SHAPES
from gpu_parts import LEAN, TILES

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
REAL, PRETENDED = (108, 132, 144), 3


def plan(*calls: Callable[[], object]) -> dict[int, set[Launch]]:
    """What they launch, by the number of multiprocessors."""
    with backend.planning(*REAL, PRETENDED) as found:
        for call in calls:
            call()
    return found


def body(case: testing.Case) -> Callable[[], object]:
    return lambda: list(case.body(torch.device("cpu")))


def kernels_of(launches: Iterable[Launch]) -> set[str]:
    return {launch.kernel for launch in launches}


# ---------------------------------------------------------------------------------------------------- what is reached
# Kernels that no shared case reaches on such a GPU, and why.
ELSEWHERE = {
    "send_kernel": "a CPU tensor's table is where its kernel reads it; a GPU's is sent by every test of an optimizer",
    "plain_kernel": "bf16 products before sm_80",
}


def average(dtype: torch.dtype) -> None:
    """What tests/update/test_averages.py does on every device."""
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = FusedSGD([parameter], lr=0.1)
    optimizer.step()
    ema_([torch.zeros(1000)], optimizer, 0.9)


def lean(family: Any, options: dict[str, Any], dtypes: tuple[torch.dtype, ...]) -> None:
    """A step with states that are not fp32, as in tests/update/test_lean_states.py."""
    dtype, grad_dtype, state_dtype = dtypes
    parameter = torch.nn.Parameter(torch.zeros(LEAST_LEAN, dtype=dtype))
    parameter.grad_dtype = grad_dtype
    parameter.grad = torch.zeros(LEAST_LEAN, dtype=grad_dtype)
    family([parameter], lr=0.1, state_dtype=state_dtype, **options).step()


LEAN_STATES: list[tuple[Any, dict[str, Any]]] = [
    (FusedSGD, {"momentum": 0.9}),
    (FusedRMSprop, {}),
    (FusedRMSprop, {"momentum": 0.9}),
    (FusedRMSprop, {"momentum": 0.9, "centered": True}),
    (FusedAdam, {}),
    (FusedAdam, {"amsgrad": True}),
]
LEAN_DTYPES = [
    (dtype, grad_dtype, state_dtype)
    for state_dtype in (torch.int8, torch.bfloat16)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for grad_dtype in dict.fromkeys((dtype, torch.float32))
]


def is_of_values(case: testing.Case) -> bool:
    """Whether it is a case of values, sizes or layouts of an update, whose kernel dtypes and options alone choose."""
    family = case.op.rstrip("_")
    if family not in UPDATES:
        return False
    examples = UPDATES[family].examples
    return case.name not in {"options", "split", *examples, *(f"split_{name}" for name in examples)}


@functools.cache
def planned() -> dict[int, set[Launch]]:
    cases = itertools.filterfalse(is_of_values, itertools.chain(*testing.CASES.values()))
    averages = [functools.partial(average, dtype) for dtype in (torch.float16, torch.bfloat16)]
    leans = [functools.partial(lean, *states, dtypes) for states in LEAN_STATES for dtypes in LEAN_DTYPES]
    return plan(*map(body, cases), *averages, *leans)


@pytest.mark.parametrize("multiprocessors", REAL)
def test_every_kernel_is_reached(multiprocessors: int) -> None:
    reached = kernels_of(planned()[multiprocessors] | planned()[PRETENDED])
    missing = set(backend.kernels().values()) - reached
    assert {name for name in missing if not any(re.match(pattern, name) for pattern in ELSEWHERE)} == set()


def test_nothing_is_said_to_be_out_of_reach_that_is_not() -> None:
    missing = set(backend.kernels().values()) - kernels_of(set().union(*planned().values()))
    assert all(any(re.match(pattern, name) for name in missing) for pattern in ELSEWHERE)


def test_sanitizers_see_every_kernel_of_some_dtype() -> None:
    """And the smoke test of gpu_check.py, which runs the same cases."""
    chosen = [case for op, names in TILES.items() for case in testing.CASES[op] if str(case) in names]
    leans = [functools.partial(steps.change, "cpu") for steps in LEAN]
    kinds = [
        {re.sub("__half|__nv_bfloat16|float", "T", name) for name in names}
        for names in (backend.kernels().values(), kernels_of(plan(*map(body, chosen), *leans)[PRETENDED]))
    ]
    assert {re.sub("<.*", "", name) for name in kinds[0] - kinds[1]} == {"plain_kernel", "send_kernel"}


# --------------------------------------------------------------------------------------------------- what tiles do what
def matmul(m: int, n: int, k: int) -> Callable[[], None]:
    """As `linear` calls it, whose operands are padded."""
    pitch = -(-k // 8) * 8
    a, b = (torch.empty(1, rows, pitch, dtype=torch.float16)[..., :k] for rows in (m, n))
    out = torch.empty(1, m, n, dtype=torch.float16)
    return lambda: backend._matmul_(a, b.mT, None, out, None, 1.0, 0.0, 0)


def int8_matmul(m: int, n: int, k: int) -> Callable[[], None]:
    a, b = torch.empty(m, k, dtype=torch.int8), torch.empty(n, k, dtype=torch.int8)
    scales, out = (torch.ones(m, 1), torch.ones(1, n)), torch.empty(m, n)
    return lambda: backend._int8_matmul_(a, b.t(), scales[0], None, scales[1], None, None, out, None, None)


def int8_conv2d(batch: int, side: int, channels: int) -> Callable[[], None]:
    """A kernel of 3 x 3 with as many outputs as channels, on square images."""
    x, weight = (torch.empty(*sizes, channels, dtype=torch.int8) for sizes in ((batch, side, side), (channels, 3, 3)))
    scales, ones = (torch.ones(1), None, torch.ones(channels)), (1, 1)
    out = torch.empty(batch, side, side, channels)
    return lambda: backend._int8_conv2d_(x, weight, *scales, None, ones, ones, ones, out, None, None)


def int8_linear(m: int, n: int, k: int) -> Callable[[], None]:
    x, weight = torch.empty(m, k, dtype=torch.float16), torch.empty(n, k, dtype=torch.int8)
    return lambda: backend._int8_linear_(x, weight, torch.ones(n), None, torch.empty(m, n, dtype=torch.float16))


def way_of(launches: set[Launch]) -> str:
    """``128x256``, or ``few rows by 16`` (the columns of a block), and whether a second kernel adds parts of k."""
    (name,) = (name for name in kernels_of(launches) if not name.startswith("fold_kernel"))
    by = " by element" if "ElementLoader" in name else ""
    tile = re.search(r"(\d+), (\d+)", name)
    way = f"{tile[1]}x{tile[2]}{by}" if tile else name
    if name.startswith("few_rows"):
        way = f"few rows by {tile[2]}" if tile else "few rows"
    return way + " in parts" * any(name.startswith("fold_kernel") for name in kernels_of(launches))


# What does a product on 108, 132 and 144 multiprocessors: those that `gpu_check.py` times, and some between.
WAYS = {
    (matmul, 4096, 4096, 4096): ("128x256",) * 3,
    (matmul, 8192, 8192, 8192): ("128x256", "128x256", "128x128"),
    (matmul, 1, 4096, 4096): ("few rows", "few rows in parts", "few rows in parts"),
    (matmul, 4096, 4095, 4095): ("128x256",) * 3,
    (matmul, 8192, 1023, 1023): ("128x128", "128x256", "128x256"),
    (matmul, 16, 4095, 4095): ("few rows", "few rows in parts", "few rows in parts"),
    (matmul, 2048, 2048, 2048): ("128x128", "128x256", "128x256"),
    (matmul, 1024, 1024, 1024): ("128x128", "128x128 in parts", "128x128 in parts"),
    (matmul, 512, 512, 4096): ("128x128 in parts",) * 3,
    (matmul, 128, 1024, 1024): ("64x64",) * 3,
    (matmul, 64, 4096, 4096): ("64x64 in parts",) * 3,
    (int8_matmul, 4096, 4096, 4096): ("128x256",) * 3,
    (int8_matmul, 8192, 8192, 8192): ("128x256", "128x256", "128x128"),
    (int8_matmul, 1, 1024, 4096): ("few rows by 16",) * 3,
    (int8_matmul, 1, 4096, 4096): ("few rows by 16", "few rows by 32", "few rows by 32"),
    (int8_matmul, 4096, 4095, 4095): ("128x256",) * 3,
    (int8_matmul, 8192, 1023, 1023): ("128x128", "128x256", "128x256"),
    (int8_matmul, 16, 4095, 4095): ("few rows by 16", "few rows by 32", "few rows by 32"),
    (int8_matmul, 2048, 2048, 2048): ("128x128", "128x256", "128x256"),
    (int8_matmul, 1024, 1024, 1024): ("64x64",) * 3,
    (int8_matmul, 64, 4096, 4096): ("few rows by 16",) * 3,
    (int8_matmul, 64, 8192, 4096): ("64x64",) * 3,
    (int8_matmul, 32, 4096, 4096): ("few rows by 16",) * 3,
    (int8_conv2d, 32, 56, 64): ("128x64",) * 3,
    (int8_matmul, 100_352, 64, 256): ("128x64",) * 3,  # a convolution of 1 x 1
    (int8_conv2d, 32, 28, 128): ("128x128",) * 3,
    (int8_conv2d, 32, 28, 256): ("128x256", "128x128", "128x128"),
    (int8_conv2d, 32, 14, 256): ("64x64",) * 3,
    (int8_conv2d, 32, 7, 512): ("64x64",) * 3,
    (int8_conv2d, 1, 56, 64): ("64x64",) * 3,
    (int8_conv2d, 1, 7, 512): ("64x64",) * 3,  # no few rows: few_rows_kernel gathers nothing
    (int8_linear, 4096, 4096, 4096): ("128x128",) * 3,
    (int8_linear, 16, 1024, 4096): ("few rows by 16",) * 3,
    (int8_linear, 1, 4096, 4096): ("few rows by 16", "few rows by 32", "few rows by 32"),
    (int8_linear, 16, 4096, 4096): ("few rows by 32",) * 3,
    (int8_linear, 4096, 4095, 4095): ("128x128",) * 3,
    (int8_linear, 8, 4095, 4095): ("few rows by 16", "few rows by 32", "few rows by 32"),
    (int8_linear, 1024, 1024, 1024): ("64x64",) * 3,
    (int8_linear, 32, 4096, 4096): ("few rows by 16",) * 3,
}


def test_shapes_that_a_gpu_times_are_listed() -> None:
    shapes = [tuple(map(int, shape.split("x"))) for shape in SHAPES.split(",")]
    assert {(make, *shape) for make in (matmul, int8_matmul) for shape in shapes} <= set(WAYS)


@pytest.mark.parametrize("shape", WAYS, ids=lambda shape: f"{shape[0].__name__}-{'x'.join(map(str, shape[1:]))}")
def test_what_does_a_product(shape: tuple[Callable[..., Callable[[], None]], int, int, int]) -> None:
    make, *sizes = shape
    found = plan(make(*sizes))
    assert tuple(way_of(found[count]) for count in REAL) == WAYS[shape]


@pytest.mark.parametrize("make", [int8_matmul, int8_linear], ids=lambda make: make.__name__)
def test_a_block_of_few_rows_has_the_warps_of_a_multiprocessor(make: Callable[..., Callable[[], None]]) -> None:
    """1024 columns are 64 blocks. With 8 warps in each, half of the loads that memory needs would be under way."""
    for rows in (1, 16):
        (launch,) = plan(make(rows, 1024, 4096))[132]
        assert launch.threads == 512
    (launch,) = plan(make(17, 1024, 4096))[132]  # too many sums for as many threads
    assert launch.threads == 256


# ------------------------------------------------------------------------------------------------------ what it takes
class Budget(NamedTuple):
    """So many blocks of 256 threads, at least, of each kernel whose name matches, on a multiprocessor of sm_90. Larger
    blocks count as several."""

    source: str
    kernels: str
    blocks: int


LOW = "__(half|nv_bfloat16)"
# The first row of a kernel counts. Streaming kernels hide memory's latency behind other blocks; products hide it behind
# stages in shared memory, and have one or two.
BUDGETS = [
    Budget("unscale", "unscale_kernel", 5),
    Budget("exponents", "exponents_kernel", 5),
    Budget("update", "update_kernel<Variant<SgdFormula, ", 4),
    Budget("update", "update_kernel<Variant<RmspropFormula, 1, ", 4),
    Budget("update", "update_kernel<Variant<AdamFormula, 2, ", 3),
    Budget("update", "update_kernel<Variant<(Adam|Rmsprop)Formula, 3, ", 2),
    Budget("update_lean", r"update_lean_kernel<LeanVariant<\w+, [57], ", 2),
    Budget("update_lean", r"update_lean_kernel<LeanVariant<\w+, 1, ", 4),
    Budget("update_lean", "update_lean_kernel<", 3),
    Budget("send", "send_kernel", 8),
    Budget("int8_quantize", f"(held_)?rows_kernel<QuantizeOp<{LOW}, signed char, true,", 3),  # stochastic
    Budget("int8_quantize", "(held_)?rows_kernel<", 4),
    Budget("int8_quantize", "columns_kernel<QuantizeOp<.*, signed char, true,", 2),
    Budget("int8_quantize", "columns_kernel<QuantizeOp<float, ", 4),
    Budget("int8_quantize", "columns_kernel<", 3),
    Budget("int8_quantize", "row_extremes_kernel<", 6),
    Budget("int8_quantize", "column_extremes_kernel<", 5),
    Budget("int8_quantize", "fold_kernel", 8),
    Budget("int8_dequantize", "rows_kernel<DequantizeOp<float>", 6),
    Budget("int8_dequantize", "rows_kernel<", 4),
    Budget("int8_dequantize", "columns_kernel<DequantizeOp<float>", 5),
    Budget("int8_dequantize", "columns_kernel<DequantizeOp<", 3),
    Budget("int8_dequantize", "columns_kernel<StraightThroughOp<float>", 4),
    Budget("int8_dequantize", "columns_kernel<StraightThroughOp<", 3),
    Budget("copy_pad", "copy_pad_kernel<", 3),
    Budget("copy_pad", "fold_kernel", 8),
    Budget("int8_linear", f"tiled_kernel<{LOW}, 64, 64>", 3),
    Budget("int8_linear", "(tiled|few_rows)_kernel<", 2),
    Budget("int8_matmul", "tiled_kernel<(Operand|Images), 64, 64, ", 3),
    Budget("int8_matmul", "tiled_kernel<(Operand|Images), 128, 256, ", 1),
    Budget("int8_matmul", "tiled_kernel<(Operand|Images), 128, 64, ", 3),
    Budget("int8_matmul", "(tiled|few_rows)_kernel<", 2),
    Budget("matmul", f"tiled_kernel<{LOW}, Shape<128, 256, ", 1),
    Budget("matmul", "tiled_kernel<", 2),
    Budget("matmul", "plain_kernel", 1),
    Budget("matmul_few_rows", "few_rows_kernel<", 2),
    Budget("matmul_few_rows", "fold_kernel<", 8),
]
# Bytes of shared memory that every block of sm_90 has beside its own, and that are listed where a kernel uses more.
_COUNTED = 1024


class Taken(NamedTuple):
    usage: nvcc.Usage
    blocks: int  # the fewest, of all ways to launch it; one of 512 threads counts as two


@pytest.fixture(scope="module", params=nvcc.FEW_AND_ALL)
def sources(request: pytest.FixtureRequest) -> list[Path]:
    return request.param


@pytest.fixture(scope="module")
def compiled(sources: list[Path]) -> dict[str, nvcc.Compiled]:
    return nvcc.compile_sources(nvcc.HOPPER, sources)


@pytest.fixture(scope="module")
def taken(compiled: dict[str, nvcc.Compiled]) -> dict[tuple[str, str], Taken]:
    """By source and name of the kernel."""
    shapes = {launch.kernel: set() for launch in set().union(*planned().values())}
    for launch in set().union(*planned().values()):
        shapes[launch.kernel].add((launch.threads, launch.shared_bytes))
    found = {}
    for source, of_source in compiled.items():
        usages = nvcc.usage(of_source)
        for mangled, name in nvcc.short_names(list(usages)).items():
            usage = usages[mangled]
            own = max(usage.shared - _COUNTED, 0)
            ways = shapes.get(name, {(256, 0)})
            blocks = min(
                resident_blocks(usage.registers, threads, shared + own) * max(1, threads // 256)
                for threads, shared in ways
            )
            found[source, name] = Taken(usage, blocks)
    return found


def test_the_emulator_and_nvcc_know_the_same_kernels(taken: dict[tuple[str, str], Taken], sources: list[Path]) -> None:
    emulated, compiled = set(backend.kernels().values()), {name for _, name in taken}
    assert compiled <= emulated
    left_out = emulated - compiled
    if sources is nvcc.FEW:
        left_out = {name for name in left_out if not name.startswith(("update_kernel<", "update_lean_kernel<"))}
    assert left_out == set()


def test_no_kernel_has_memory_of_its_own(
    taken: dict[tuple[str, str], Taken], compiled: dict[str, nvcc.Compiled]
) -> None:
    """Spilled registers, and arrays with an index that nvcc does not know, lie in memory of the device."""
    assert {name for name, (usage, _) in taken.items() if usage.stack or usage.local} == set()
    for source, of_source in compiled.items():
        for kernel in nvcc.kernels(of_source):
            assert "LDL" not in kernel.code and "STL" not in kernel.code, f"{source}: {kernel.name}"


def test_blocks_of_a_multiprocessor(taken: dict[tuple[str, str], Taken]) -> None:
    used, short = set(), {}
    for (source, name), (usage, blocks) in taken.items():
        row = next((row for row in BUDGETS if row.source == source and re.match(row.kernels, name)), None)
        assert row is not None, f"{source}: {name} has no row in BUDGETS"
        used.add(row)
        if blocks < row.blocks:
            short[name] = f"{blocks} blocks of {usage.registers} registers a thread, not {row.blocks}"
    assert short == {}
    assert set(BUDGETS) - used == set()
