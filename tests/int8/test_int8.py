"""int8: every backend against the reference, bit for bit, and the reference against numpy and known answers."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import itertools
import math
import mmap
import pathlib
import pickle
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import amp_kernels
from amp_kernels import Int8Tensor, _loader, reference, testing
from amp_kernels.ops import int8 as ops
from amp_kernels.ops.library import DEFINITIONS
from amp_kernels.testing import int8 as cases
from amp_kernels.testing.common import DTYPES, LAYOUTS, differing, randn

OPS = torch.ops.amp_kernels
ALL = [case for op in cases.CASES.values() for case in op]


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.op}-{case}")
def test_case(case: testing.Case, backend: str, device: torch.device) -> None:
    for result in case.body(device):
        assert result.passed, f"{case}: {result}"


def has_huge_pages() -> bool:
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def flags_of_mapping(address: int) -> list[str]:
    """What the kernel notes of the mapping that the address is in."""
    found = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(not _loader.load() or not has_huge_pages(), reason="needs the CPU backend, and huge pages")
def test_large_results_are_backed_by_huge_pages() -> None:
    q = Int8Tensor(torch.zeros(2**12, 2**12, dtype=torch.int8), torch.ones(()))
    small, large = amp_kernels.dequantize_int8(q, torch.float16)[:, :64].clone(), amp_kernels.dequantize_int8(q)
    assert "hg" in flags_of_mapping(large.data_ptr() + large.nbytes // 2)
    assert "hg" not in flags_of_mapping(small.data_ptr())


# ------------------------------------------------------------------------------------------ the reference by numpy
def by_numpy(x: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.float32, int]:
    """Codes, scale and zero point of one group, in scalars of numpy's IEEE fp32."""
    one, f32 = np.float32(1), np.float32
    zeros = np.zeros(x.shape, np.int64)
    if not np.isfinite(x).all():
        return zeros, f32(np.nan), 0
    low, high = min(f32(0), x.min()), max(f32(0), x.max())
    scale = np.abs(x).max() / f32(127) if symmetric else high / f32(255) - low / f32(255)
    with np.errstate(all="ignore"):
        inverse = one / scale
    if not np.isfinite(inverse):
        return zeros, one, 0
    if symmetric:
        return np.clip(np.rint(x * inverse), -127, 127).astype(np.int64), scale, 0
    zero = int(np.clip(np.rint(f32(-128) - low * inverse), -128, 127))
    return np.clip(np.rint(x * inverse).astype(np.int64) + zero, -128, 127), scale, zero


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("kind", cases.VALUES)
def test_reference_is_the_formula(kind: str, dtype: torch.dtype, symmetric: bool) -> None:
    x = cases.VALUES[kind](dtype).to(dtype)
    values, scale, zero_point = reference.quantize_int8(x, dim=(-1,), symmetric=symmetric)
    for row in range(x.shape[0]):
        codes, expected, zero = by_numpy(x[row].float().numpy(), symmetric)
        np.testing.assert_array_equal(values[row].numpy(), codes)
        np.testing.assert_array_equal(scale[row, 0].numpy(), expected)
        assert zero_point is None if symmetric else int(zero_point[row, 0]) == zero  # type: ignore[index]
        with np.errstate(all="ignore"):
            back = (codes - zero).astype(np.float32) * expected
        ours = reference.dequantize_int8(values, scale, zero_point)[row].numpy()
        np.testing.assert_array_equal(ours, back)


def philox_by_numpy(counter: list[int], key: list[int]) -> list[int]:
    c, k = [int(x) for x in counter], list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


# The known answers of Random123 (kat_vectors, philox4x32 10).
ONES = 0xFFFFFFFF
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert philox_by_numpy(counter, key) == words


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 5, -(2**63)])
def test_philox_of_the_reference(seed: int) -> None:
    counters = [0, 1, 2**32 - 1, 2**32, 2**61 + 7]
    words = reference.int8.philox(torch.tensor(counters), seed)
    for counter, ours in zip(counters, words.tolist(), strict=True):
        key = [seed & ONES, seed >> 32 & ONES]
        assert ours == philox_by_numpy([counter & ONES, counter >> 32, 0, 0], key)


def test_stochastic_rounding_is_unbiased(backend: str, device: torch.device) -> None:
    x = torch.full((2**18,), 0.3, device=device)
    x[0] = 127.0  # scale 1
    q = amp_kernels.quantize_int8(x, rounding="stochastic", seed=3)
    rest = q.values[1:].double()
    assert set(rest.unique().tolist()) == {0.0, 1.0}
    # A mean of n Bernoulli variables: five standard deviations.
    assert abs(rest.mean().item() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / rest.numel())


# ---------------------------------------------------------------------------------------------------- the layout
def groups_by_offset(layout: Sequence[int]) -> Tensor:
    """The number of the group of each element, in the order of memory, as csrc/int8.h says."""
    outer, reduced, inner, row = layout
    if inner > 1:
        return torch.arange(outer * inner).view(outer, 1, inner).expand(-1, reduced, -1).flatten()
    sizes = [min(reduced, row - begin) for begin in range(0, row, reduced)]
    return torch.arange(outer).repeat_interleave(torch.tensor(sizes * (outer // max(1, len(sizes)))))


VIEWS: dict[str, Callable[[], Tensor]] = {
    **{name: (lambda f=f: f(torch.zeros(2, 3, 4, 5))) for name, f in LAYOUTS.items()},
    "vector": lambda: torch.zeros(7),
    "matrix": lambda: torch.zeros(5, 7),
    "transposed matrix": lambda: torch.zeros(7, 5).t(),
    "sliced batches": lambda: torch.zeros(4, 6, 8)[:, 1:4, 2:7],
    "expanded": lambda: torch.zeros(3, 1, 5).expand(3, 4, 5),
    "five dimensions": lambda: torch.zeros(2, 3, 2, 3, 2),
    "five sliced dimensions": lambda: torch.zeros(2, 4, 3, 4, 3)[:, ::2, 1:, ::3, :2],
    "scalar": lambda: torch.zeros(()),
    "ones": lambda: torch.zeros(1, 1, 1),
}


LARGE_GROUPS = [
    {"dim": -1}, {"dim": -1, "symmetric": False}, {"dim": 0}, {}, {"block_size": 100}, {"block_size": 128},
    {"block_size": 257}, {"block_size": 514, "symmetric": False}, {"block_size": 1028}, {"seed": 3},
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("options", LARGE_GROUPS, ids=str)
def test_large_results(options: dict[str, Any], dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """From 2^22 elements on a CPU's kernels write past its caches where an address is aligned: here every 4th row."""
    if backend == "reference":
        pytest.skip("it is what the others are compared with")
    if "seed" in options:
        options = {**options, "rounding": "stochastic"}
    x = randn(2048, 2056, dtype=dtype)
    x[100], x[:, 9] = 0.0, 1e4
    if options:  # else all is one group
        x[5, 7] = float("nan")
    ours = amp_kernels.quantize_int8(x.to(device), **options)
    with amp_kernels.use_backend("reference"):
        expected = amp_kernels.quantize_int8(x, **options)
        plain = {k: v for k, v in options.items() if k not in ("seed", "rounding")}
        fake = amp_kernels.fake_quantize_int8(x, **plain)
        decoded = expected.dequantize(dtype)
    assert differing(ours.values.cpu(), expected.values) == 0
    assert differing(ours.scale.cpu(), expected.scale) == 0
    assert differing(ours.dequantize(dtype).cpu(), decoded) == 0
    assert differing(amp_kernels.fake_quantize_int8(x.to(device), **plain).cpu(), fake) == 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_every_length(backend: str, device: torch.device, symmetric: bool, dtype: torch.dtype) -> None:
    """Rows and blocks about the widths of registers and of what is walked together; with groups that have no scale."""
    if backend == "reference":
        pytest.skip("it is what the others are compared with")
    for length in (*range(1, 34), 47, 63, 64, 65, 96, 127, 129, 257, 341, 511, 1000, 1023, 1025, 1040):
        x = randn(21, 2 * length, dtype=dtype)
        x[2, 0], x[3, -1], x[4], x[5] = float("nan"), -float("inf"), 0.0, 1e-42
        x[6] = x[6].abs()
        sliced = randn(21, 2 * length + 3, dtype=dtype)[:, 1 : 2 * length + 1]
        for options in (
            {"dim": (-1,)},
            {"block_size": length},
            {"block_size": length + 1},
            {"block_size": 2 * length - 1},
        ):
            for given in (x[:, :length], x, x[:1], sliced):
                ours = amp_kernels.quantize_int8(given.to(device), symmetric=symmetric, **options)
                values, scale, zero_point = reference.quantize_int8(given, symmetric=symmetric, **options)
                assert differing(ours.values.cpu(), values) == 0, (length, options)
                assert differing(ours.scale.cpu(), scale) == 0, (length, options)
                if not symmetric:
                    assert torch.equal(ours.zero_point.cpu(), zero_point), (length, options)


def guarded(x: Tensor) -> Tensor:
    """A copy of x, behind which lies a page that nobody may read."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    flat = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes)
    return flat.view(x.shape).copy_(x)


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="mprotect as on Linux")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_nothing_is_read_behind_a_tensor(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu":
        pytest.skip("guards memory of a CPU")
    for length in (1, 7, 8, 15, 17, 31, 32, 33, 63, 100, 127, 1000, 1025):
        x = randn(3, length, dtype=dtype)
        for options in ({"dim": -1}, {"dim": 0}, {}, {"block_size": 20}, {"block_size": length}):
            for symmetric in (True, False):
                expected = amp_kernels.quantize_int8(x, symmetric=symmetric, **options)
                q = amp_kernels.quantize_int8(guarded(x), symmetric=symmetric, **options)
                assert torch.equal(q.values, expected.values) and torch.equal(q.scale, expected.scale)
                moved = Int8Tensor(guarded(q.values), q.scale, q.zero_point, q.dim, q.block_size)
                assert torch.equal(moved.dequantize(dtype), expected.dequantize(dtype))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("block_size", [None, 1, 2, 4, 100])
def test_the_layout_has_every_element_in_its_group(view: str, block_size: int | None) -> None:
    x = VIEWS[view]()
    if block_size is not None and x.dim() == 0:
        return
    every = range(x.dim())
    choices = itertools.chain.from_iterable(itertools.combinations(every, n) for n in range(x.dim() + 1))
    for dim in choices if block_size is None else [None]:
        groups = ops.groups_of(x, None, dim, block_size)
        plan = ops.Plan.of(x, None, dim, block_size)
        assert plan.layout is not None, "a copy in which groups are rows fits"
        # Scales that hold their own offsets, and codes that hold the number of their group.
        scales = torch.arange(math.prod(groups.scale_shape)).as_strided(groups.scale_shape, plan.scale)
        expected = reference.int8._spread(scales, x.shape, block_size).broadcast_to(x.shape)
        assert torch.equal(groups_by_offset(plan.layout).as_strided(x.shape, plan.walk), expected), (view, dim)


CONV = torch.zeros(4, 6, 3, 3).to(memory_format=torch.channels_last)
PERMUTED = torch.zeros(2, 9, 3, 8).transpose(1, 2)  # dense [B, H, T, D]


@pytest.mark.parametrize(
    ("x", "dim", "block", "layout"),
    [
        (torch.zeros(5, 7), None, None, (1, 35, 1, 35)),
        (torch.zeros(5, 7), (-1,), None, (5, 7, 1, 35)),
        (torch.zeros(5, 7), (0,), None, (1, 5, 7, 35)),
        (torch.zeros(7, 5).t(), (-1,), None, (1, 7, 5, 35)),
        (torch.zeros(5, 7), (), None, (1, 35, 1, 35)),  # nothing named: all
        (torch.zeros(5, 8), None, 4, (10, 4, 1, 40)),
        (torch.zeros(5, 7), None, 4, (10, 4, 1, 7)),
        (torch.zeros(5, 7), None, 1, (1, 1, 35, 35)),
        (torch.zeros(5, 7), None, 100, (5, 7, 1, 35)),
        (torch.zeros(7, 5).t(), None, 100, (1, 7, 5, 35)),
        (torch.zeros(4, 6, 8), (0, 1), None, (1, 24, 8, 192)),  # per channel of [B, T, C]
        (torch.zeros(4, 6, 8), (1,), None, (4, 6, 8, 192)),  # per column of experts [E, N, K]
        (CONV, (1, 2, 3), None, (4, 54, 1, 216)),  # per output channel of a convolution's weight
        (CONV, (0, 2, 3), None, (1, 36, 6, 216)),  # per channel of images
        (PERMUTED, (-1,), None, (54, 8, 1, 432)),  # per token and head
        (PERMUTED, None, 4, (108, 4, 1, 432)),
    ],
    ids=lambda value: f"{tuple(value.shape)}-{value.stride()}" if isinstance(value, Tensor) else str(value),
)
def test_three_axes(x: Tensor, dim: tuple[int, ...] | None, block: int | None, layout: tuple[int, ...]) -> None:
    plan = ops.Plan.of(x, None, dim, block)
    assert plan.out == plan.walk == x.stride() and plan.layout == layout


@pytest.mark.parametrize(
    ("x", "dim", "block"),
    [
        (torch.zeros(4, 6, 3, 3), (0, 2, 3), None),  # per channel of NCHW images
        (torch.zeros(4, 6, 8), (0, 2), None),
        (PERMUTED, (2, 3), None),  # per head
        (torch.zeros(7, 5).t(), None, 4),
    ],
    ids=lambda value: f"{tuple(value.shape)}-{value.stride()}" if isinstance(value, Tensor) else str(value),
)
def test_more_than_three_axes_are_copied(x: Tensor, dim: tuple[int, ...] | None, block: int | None) -> None:
    plan = ops.Plan.of(x, None, dim, block)
    assert plan.out == x.stride() != plan.walk and plan.layout is not None


def test_the_layout_of_more_than_2_31_elements() -> None:
    row = 2**31 + 7
    assert ops.layout_of(ops.Groups((3, row), (True, False)), (row, 1)) == (3, row, 1, 3 * row)
    assert ops.layout_of(ops.Groups((3, row), (True, False), 8), (row, 1)) == (3 * 2**28 + 3, 8, 1, row)


def any_view(numbers: random.Random) -> Tensor:
    """A tensor whose dimensions are permuted, sliced and expanded."""
    x = torch.randn([numbers.choice([1, 2, 3, 4]) for _ in range(numbers.randint(0, 6))])
    x = x.permute(numbers.sample(range(x.dim()), x.dim()))
    for d in range(x.dim()):
        kind = numbers.choice(["slice", "step", "expand", "keep", "keep", "keep", "keep"])
        if kind == "slice":
            x = x.narrow(d, x.shape[d] // 2, x.shape[d] - x.shape[d] // 2)
        elif kind == "step":
            x = x[(slice(None),) * d + (slice(None, None, 2),)]
        elif kind == "expand" and x.shape[d] == 1:
            x = x.expand([3 if i == d else n for i, n in enumerate(x.shape)])
    return x


def some_layout(x: Tensor, numbers: random.Random) -> Tensor:
    """The same elements in memory in another order."""
    order = numbers.sample(range(x.dim()), x.dim())
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


@pytest.mark.parametrize("seed", range(100))
def test_any_view_and_groups_on_all_sides_of_the_layout(seed: int, backend: str, device: torch.device) -> None:
    """Kernels plan in C++, tracing and Triton in Python: results are the reference's, laid out as tracing knows, and as
    x is where it is dense."""
    numbers = random.Random(seed)
    x = any_view(numbers).to(numbers.choice([torch.float32, torch.float16])).to(device)
    blocks = numbers.randint(1, 5) if x.dim() > 0 and numbers.random() < 0.25 else None
    dim = None if blocks is not None else numbers.sample(range(x.dim()), numbers.randint(0, x.dim()))
    symmetric, rounds = numbers.random() < 0.5, numbers.choice([None, None, 5])
    own = (x, None, None, dim, blocks, symmetric, rounds)
    codes, scale, zero_point = compared("quantize_int8", *own)
    zeros = None if symmetric else zero_point
    if x.dim() > 0 and numbers.random() < 0.5:
        codes, scale, zeros = (t if t is None else some_layout(t, numbers) for t in (codes, scale, zeros))
    results = [
        compared("quantize_int8", x, scale, zeros, None, blocks, symmetric, rounds)[0],
        compared("fake_quantize_int8", x, scale, zeros, None, blocks, symmetric)[0],
        compared("straight_through_int8", torch.randn_like(x), x, 0.5 * scale, zeros, blocks),
    ]
    assert all(strides(result) == strides(x if is_dense(x) else x.contiguous()) for result in results)
    assert strides(compared("dequantize_int8", codes, scale, zeros, blocks, x.dtype)) == strides(codes)


def compared(name: str, *arguments: Any) -> Any:
    """What the operator makes: the reference's bits with the strides that tracing knows."""
    op = getattr(ops, name)
    ours, expected = op(*arguments), DEFINITIONS[op].reference(*arguments)
    with FakeTensorMode() as mode:
        traced = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    results = ((t,) if isinstance(t, Tensor) else t for t in (ours, expected, traced))
    for a, b, c in zip(*results, strict=True):
        assert torch.equal(a, b) and strides(a) == strides(c) and (a.shape, a.dtype) == (c.shape, c.dtype)
    return ours


def is_dense(x: Tensor) -> bool:
    """Whether its elements fill a range of memory, each in a place of its own."""
    offsets = sum(torch.arange(n).view(-1, *[1] * (x.dim() - d - 1)) * x.stride(d) for d, n in enumerate(x.shape))
    return x.dim() == 0 or torch.equal(offsets.flatten().sort()[0], torch.arange(x.numel()))  # type: ignore[union-attr]


def strides(x: Tensor) -> list[int]:
    """Those that tell where elements are."""
    return [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1 and x.numel() > 0]


def test_more_than_2_31_elements(backend: str, device: torch.device) -> None:
    if backend in ("reference", "triton") or (device.type == "cpu" and torch.get_num_threads() < 2):
        pytest.skip("takes minutes, or 20 GB")
    n = 2**31 + 2**16
    x = torch.ones(2**16, dtype=torch.float16, device=device).expand(n >> 16, -1)
    codes = amp_kernels.quantize_int8(x, scale=torch.tensor(0.1, device=device)).values.view(-1)
    assert codes.shape == (n,) and bool((codes[-100:] == 10).all()) and bool((codes[:100] == 10).all())


# ---------------------------------------------------------------------------------------------- convolutions
@pytest.mark.parametrize("name", [name for name, conv in cases.CONVOLUTIONS.items() if conv.batch and conv.outputs])
def test_the_reference_convolves_as_torch_does(name: str) -> None:
    """torch pads with 0, in numbers. Sums of integers in fp64 are exact."""
    conv = cases.CONVOLUTIONS[name]
    x, weight = (
        cases.integers(conv.batch, *conv.pixels, conv.channels),
        cases.integers(conv.outputs, *conv.taps, conv.channels),
    )
    zero_point = cases.integers(conv.batch, 1, 1, 1, seed=3).int()
    steps = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    one = torch.ones(())
    ours = reference.int8_conv2d(x, weight, one.expand(conv.batch, 1, 1, 1), zero_point, one, **steps)
    theirs = torch.nn.functional.conv2d(
        (x - zero_point).double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2), **steps
    )
    assert torch.equal(ours, theirs.permute(0, 2, 3, 1).float())


def test_a_convolution_with_gaps_in_scales_and_bias(backend: str, device: torch.device) -> None:
    x, weight = cases.integers(3, 5, 6, 7).to(device), cases.integers(4, 3, 3, 7, seed=1).to(device)
    image = torch.stack([randn(3).abs() + 0.1, torch.full((3,), 9.0)], 1).to(device)[:, 0].view(3, 1, 1, 1)
    zero = torch.stack([torch.tensor([5, -7, 100]), torch.full((3,), 9)], 1).int().to(device)[:, 0].view(3, 1, 1, 1)
    output, bias = (torch.stack([randn(4, seed=i)] * 2, 1).to(device)[:, 0] for i in range(2))

    def convolved(lay: Callable[[Tensor], Tensor]) -> Tensor:
        q = Int8Tensor(x, lay(image), lay(zero))
        return amp_kernels.int8_conv2d(q, Int8Tensor(weight, lay(output.view(4, 1, 1, 1))), bias=lay(bias), padding=1)

    assert torch.equal(convolved(lambda t: t), convolved(Tensor.contiguous))


def test_a_convolution_stores_no_rows() -> None:
    """The rows of 3 x 3 pixels would take 151 MB. 6 MB cover the packed weight and a tile for each thread."""
    if not _loader.load():
        pytest.skip("needs the CPU backend")
    script = """
import resource, torch, amp_kernels
x = amp_kernels.Int8Tensor(torch.ones(4, 256, 256, 64, dtype=torch.int8), torch.ones(1))
weight = amp_kernels.Int8Tensor(torch.ones(8, 3, 3, 64, dtype=torch.int8), torch.ones(1))
out = {"padding": 1, "out_scale": torch.ones(1)}
amp_kernels.int8_conv2d(amp_kernels.Int8Tensor(x.values[:1, :8, :8], x.scale), weight, **out)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
y = amp_kernels.int8_conv2d(x, weight, **out)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - y.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 6 << 20


# ------------------------------------------------------------------------------------------------- the operators
def samples() -> list[Any]:
    x, codes = randn(4, 6), cases.integers(4, 6)
    deep = randn(2, 3, 2, 3)  # kept and reduced dimensions alternate: more than three axes
    leaf = x.clone().requires_grad_()
    scale, zero = torch.tensor([[0.1], [0.2], [0.3], [0.4]]), torch.zeros(4, 1, dtype=torch.int32)
    columns = torch.tensor([[0.1, 0.2, 0.3]])
    b = cases.integers(6, 3)
    images, taps, floats = cases.integers(2, 4, 5, 6), cases.integers(3, 2, 2, 6), (torch.float32, None, None)
    return [
        pytest.param("quantize_int8", (x, None, None, [-1], None, True, None), id="quantize-rows"),
        pytest.param("quantize_int8", (x.t(), None, None, None, 4, False, 7), id="quantize-blocks"),
        pytest.param("quantize_int8", (deep, None, None, [0, 2], None, False, None), id="quantize-a-copy"),
        pytest.param("quantize_int8", (deep, None, None, [0, 2], None, False, 7), id="quantize-by-element"),
        pytest.param("quantize_int8", (x.half(), scale, zero, None, None, True, None), id="quantize-static"),
        pytest.param("fake_quantize_int8", (leaf, None, None, [0], None, False), id="fake"),
        pytest.param("fake_quantize_int8", (x, scale, None, None, None, True), id="fake-static"),
        pytest.param("straight_through_int8", (x, x, scale, zero, None), id="straight_through"),
        pytest.param("dequantize_int8", (codes, scale, zero, None, torch.bfloat16), id="dequantize"),
        pytest.param(
            "int8_matmul", (codes, b, scale, zero, columns, None, None, torch.float32, None, None), id="matmul"
        ),
        pytest.param(
            "int8_matmul",
            (codes, b, scale, None, columns, None, columns[0], torch.float16, torch.tensor(0.5), zero[0]),
            id="matmul-int8-out",
        ),
        pytest.param("int8_linear", (x, cases.integers(3, 6), columns, None), id="linear"),
        pytest.param(
            "int8_conv2d",
            (images, taps, scale[0], zero[:1], columns.view(3, 1, 1, 1), columns[0], [2, 1], [1, 0], [1, 2], *floats),
            id="conv2d",
        ),
        pytest.param(
            "int8_conv2d",
            (
                images,
                taps,
                scale[:2].view(2, 1, 1, 1),
                None,
                scale[0],
                None,
                [1, 1],
                [1, 1],
                [1, 1],
                *floats[:1],
                torch.tensor(0.5),
                zero[0],
            ),
            id="conv2d-int8-out",
        ),
    ]


@pytest.mark.parametrize(("op", "arguments"), samples())
def test_opcheck(op: str, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(getattr(OPS, op).default, arguments)


def _weights(x: Tensor) -> Int8Tensor:
    return amp_kernels.quantize_int8(x, dim=-1).t()


def _images(x: Tensor) -> Int8Tensor:
    return amp_kernels.quantize_int8(x, dim=(1, 2, 3))


COMPILED: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "rows": (
        lambda x: amp_kernels.quantize_int8(x * 2, dim=-1, symmetric=False).dequantize() + 1,
        lambda: (randn(5, 9),),
    ),
    "blocks": (
        lambda x: amp_kernels.quantize_int8(x, block_size=4, rounding="stochastic", seed=3).dequantize(x.dtype),
        lambda: (randn(5, 9, dtype=torch.float16),),
    ),
    "static": (
        lambda x, s: amp_kernels.quantize_int8(x, scale=s).values,
        lambda: (randn(5), torch.tensor(0.1)),
    ),
    "fake": (
        lambda x: amp_kernels.fake_quantize_int8(x * 3, dim=0) * 2,
        lambda: (randn(5, 9).requires_grad_(),),
    ),
    "matmul": (
        lambda x, w: amp_kernels.int8_matmul(amp_kernels.quantize_int8(x, dim=-1), _weights(w)).relu(),
        lambda: (randn(5, 9), randn(7, 9)),
    ),
    "conv2d": (
        lambda x, w: amp_kernels.int8_conv2d(_images(x), _images(w), stride=2, padding=(0, 1)).relu(),
        lambda: (randn(2, 9, 7, 3), randn(4, 3, 2, 3)),
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_eager(name: str) -> None:
    function, make = COMPILED[name]
    torch.compiler.reset()
    results, grads = [], []
    for call in (function, torch.compile(function, fullgraph=True)):
        arguments = make()
        result = call(*arguments)
        if result.requires_grad:
            result.sum().backward()
            grads.append(arguments[0].grad)
        results.append(result.detach())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    if grads:
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


# -------------------------------------------------------------------------------------------------- what users see
def test_a_tensor_knows_how_it_was_made(backend: str, device: torch.device) -> None:
    x = randn(6, 10).to(device)
    for options in ({}, {"dim": 0}, {"dim": (-1,)}, {"block_size": 4}, {"symmetric": False}):
        q = amp_kernels.quantize_int8(x, **options)
        steps = reference.int8._spread(q.scale, x.shape, q.block_size)
        assert bool(((q.dequantize() - x).abs() <= steps * 0.5001 + 1e-6).all() | (q.zero_point is not None))
        assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16
        assert q.shape == x.shape and q.nbytes == 60 + 4 * q.scale.numel() * (1 if q.zero_point is None else 2)
        copy = pickle.loads(pickle.dumps(q))
        assert torch.equal(copy.values, q.values) and copy.dim == q.dim and copy.block_size == q.block_size


@pytest.mark.parametrize("zero_point", [-300, 5, 300])
@pytest.mark.parametrize("scale", [math.inf, 3e38])
def test_results_by_a_scale_without_inverse(backend: str, device: torch.device, scale: float, zero_point: int) -> None:
    a, b = (
        amp_kernels.quantize_int8(randn(*shape).to(device), dim=dim) for shape, dim in (((9, 40), -1), ((40, 33), 0))
    )
    given = (torch.tensor([scale], device=device), torch.tensor([zero_point], dtype=torch.int32, device=device))
    codes = amp_kernels.int8_matmul(a, b, out_scale=given[0], out_zero_point=given[1])
    assert codes.unique().tolist() == [min(max(zero_point, -128), 127)]


@pytest.mark.parametrize("zero_point", [-2_000_000_000, -40_000, -600, -385, 300, 600, 32_768, 65_536])
def test_results_by_a_zero_point_that_is_no_code(backend: str, device: torch.device, zero_point: int) -> None:
    """The results of 9 rows of 33 are encoded in whole blocks and in parts of one."""
    a = amp_kernels.quantize_int8(randn(9, 40).to(device), dim=-1).to("cpu")
    b = amp_kernels.quantize_int8(randn(40, 33).to(device), dim=0).to("cpu")
    a.scale[0], a.scale[1] = math.nan, math.inf
    given = torch.tensor([0.02]), torch.tensor([zero_point], dtype=torch.int32)
    floats = reference.int8_matmul(a.values, b.values, a.scale, None, b.scale, None)
    expected = reference.quantize_int8(floats, scale=given[0], zero_point=given[1])[0]
    out = dict(zip(("out_scale", "out_zero_point"), (t.to(device) for t in given), strict=True))
    a, b = a.to(device), b.to(device)
    assert torch.equal(amp_kernels.int8_matmul(a, b, **out).cpu(), expected)
    images, taps = (
        Int8Tensor(values.reshape(-1, 1, 2, 20), scale.reshape(-1, 1, 1, 1))
        for values, scale in ((a.values, a.scale), (b.values.t(), b.scale))
    )
    assert torch.equal(amp_kernels.int8_conv2d(images, taps, **out).cpu().view(9, 33), expected)


@pytest.mark.parametrize("zero_point", [-2_000_000_000, -40_000, -600, -385, 300, 385, 600, 640, 32_768, 65_536])
def test_a_zero_point_that_is_no_code(backend: str, device: torch.device, zero_point: int) -> None:
    for length in (8, 31, 32, 40, 100):
        for shape, dim in (((3, length), (-1,)), ((length, 3), (0,)), ((3, length), (0,))):
            x = 400 * randn(*shape)
            x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
            scale = torch.ones(1 if 0 in dim else shape[0], 1 if -1 in dim else shape[1])
            zeros = torch.full_like(scale, zero_point, dtype=torch.int32)
            expected = reference.quantize_int8(x, scale=scale, zero_point=zeros)[0]
            ours = amp_kernels.quantize_int8(x.to(device), scale=scale.to(device), zero_point=zeros.to(device))
            assert torch.equal(ours.values.cpu(), expected), (shape, dim)


def test_codes_keep_the_layout(backend: str, device: torch.device) -> None:
    x = randn(2, 3, 4, 5).to(device).to(memory_format=torch.channels_last)
    for options in ({"dim": 1}, {"dim": (0, 2)}, {"block_size": 4}, {"rounding": "stochastic"}, {}):
        q = amp_kernels.quantize_int8(x, **options)
        assert q.values.stride() == q.dequantize().stride() == x.stride()
        assert amp_kernels.quantize_int8(x[:, :, 1:], **options).values.is_contiguous()
    w = randn(4, 6).to(device)
    q = amp_kernels.quantize_int8(w, dim=-1)
    transposed = amp_kernels.quantize_int8(w.t(), dim=0)
    assert torch.equal(transposed.values, q.t().values) and transposed.values.stride() == (1, 6)
    assert torch.equal(transposed.scale, q.t().scale) and q.t().dim == (0,)


def _there_and_back(x: Tensor) -> Tensor:
    return amp_kernels.quantize_int8(x, dim=-1).dequantize()


def _square(x: Tensor) -> Tensor:
    q = amp_kernels.quantize_int8(x, dim=-1)
    return amp_kernels.int8_matmul(q, q.t())


@pytest.mark.parametrize(
    ("function", "names"),
    [(_there_and_back, ["quantize_int8", "dequantize_int8"]), (_square, ["quantize_int8", "int8_matmul"])],
)
def test_who_watches_sees_the_operators(function: Callable[[Tensor], Tensor], names: list[str]) -> None:
    x = randn(3, 8, 16)
    each = torch.stack([function(matrix) for matrix in x])
    assert torch.equal(torch.vmap(function)(x), each)
    ops = [getattr(torch.ops.amp_kernels, name).default for name in names]
    targets = [node.target for node in make_fx(function)(x[0]).graph.nodes]
    assert [target for target in targets if target in ops] == ops
    with torch.no_grad():
        traced = str(torch.jit.trace(function, x[0]).graph)
    assert all(f"amp_kernels::{name}" in traced for name in names)
    on_meta = function(x[0].to("meta"))
    assert on_meta.is_meta and on_meta.shape == each[0].shape


def test_lazily_negated_views() -> None:
    x = torch.complex(randn(64, 33), randn(64, 33, seed=1)).conj().imag
    assert x.is_neg()
    for options in ({"dim": -1}, {"dim": 0}, {"scale": torch.tensor(0.02)}):
        ours, plain = (amp_kernels.quantize_int8(t, **options) for t in (x, x.resolve_neg().contiguous()))
        assert torch.equal(ours.values, plain.values) and torch.equal(ours.scale, plain.scale)


def test_blocks_with_scales_in_another_order(backend: str, device: torch.device) -> None:
    x = randn(4, 6, 70).to(device)
    scale = randn(6, 4, 3).abs().to(device).transpose(0, 1) + 0.01
    ours, plain = (amp_kernels.quantize_int8(x, block_size=32, scale=s) for s in (scale, scale.contiguous()))
    assert torch.equal(ours.values, plain.values)
    assert torch.equal(ours.dequantize(), plain.dequantize())


@pytest.mark.parametrize("apart", ["bias", "scales", "zero points"])
def test_products_by_vectors_with_gaps(backend: str, device: torch.device, apart: str) -> None:
    a, b = (cases.integers(*shape, seed=i).to(device) for i, shape in enumerate(((20, 33), (33, 17))))
    bias, rows, columns = (randn(n, seed=n).abs().to(device) + 0.1 for n in (17, 20, 17))
    row, column = (cases.integers(n, seed=n).int().to(device) for n in (20, 17))

    def laid_out(x: Tensor, name: str) -> Tensor:
        return torch.stack([x, torch.full_like(x, 99)], 1)[:, 0] if apart == name else x

    def product(lay: Callable[[Tensor, str], Tensor]) -> Tensor:
        left = Int8Tensor(a, lay(rows, "scales")[:, None], lay(row, "zero points")[:, None])
        right = Int8Tensor(b, lay(columns, "scales")[None], lay(column, "zero points")[None])
        return amp_kernels.int8_matmul(left, right, bias=lay(bias, "bias"))

    assert torch.equal(product(laid_out), product(lambda x, _: x))


def test_products_read_nothing_behind_a_storage(backend: str, device: torch.device) -> None:
    """Rows that are 32 apart, the last without padding behind it."""

    def ending(*shape: int) -> Int8Tensor:
        codes = torch.empty_strided(shape, (32, 1), dtype=torch.int8, device=device)
        return Int8Tensor(codes.copy_(cases.integers(*shape, seed=shape[0])), torch.ones((), device=device))

    a, b = ending(20, 17), ending(33, 17).t()
    expected = a.values.cpu().int() @ b.values.cpu().int()
    assert torch.equal(amp_kernels.int8_matmul(a, b).cpu(), expected.float())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("apart", range(4), ids=["x", "weight", "scale", "bias"])
def test_linear_of_operands_with_gaps(backend: str, device: torch.device, apart: int, dtype: torch.dtype) -> None:
    x, bias = randn(20, 33, dtype=dtype).to(device), randn(17, dtype=dtype).to(device)
    weight, scale = cases.integers(17, 33).to(device), randn(17).abs().to(device) + 0.1
    arguments = [x, weight, scale, bias]
    expected = ops.int8_linear(*arguments)
    arguments[apart] = torch.stack([arguments[apart], torch.full_like(arguments[apart], 99)], -1)[..., 0]
    is_by_torch = device.type == "cuda" and dtype == torch.float32  # cuBLAS adds in another order for other strides
    torch.testing.assert_close(ops.int8_linear(*arguments), expected, rtol=1e-5 * is_by_torch, atol=1e-4 * is_by_torch)


def test_modes_see_the_operators() -> None:
    seen: list[str] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func).removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    x = randn(4, 8)
    with Seen():
        amp_kernels.quantize_int8(x, dim=-1).dequantize()
    assert {"amp_kernels.quantize_int8", "amp_kernels.dequantize_int8"} <= set(seen)


def test_autograd_sees_who_needs_it() -> None:
    x = randn(4, 8).requires_grad_()
    assert amp_kernels.fake_quantize_int8(x, dim=-1).requires_grad
    q = amp_kernels.quantize_int8(x, dim=-1)
    assert not q.values.requires_grad and not q.scale.requires_grad


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_results_have_the_dtype_asked_for_whatever_the_default_is(default: torch.dtype) -> None:
    q = amp_kernels.quantize_int8(randn(4, 6), dim=-1)
    torch.set_default_dtype(default)
    try:
        for dtype in DTYPES.values():
            assert amp_kernels.int8_matmul(q, q.t(), out_dtype=dtype).dtype == dtype
            x = randn(5, 6, dtype=dtype)
            assert ops.int8_linear(x, q.values, q.scale, randn(4, dtype=dtype)).dtype == dtype
            assert amp_kernels.quantize_int8(x).scale.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("inference", [False, True])
def test_results_are_tensors_as_others(inference: bool, backend: str, device: torch.device) -> None:
    with torch.inference_mode(inference):
        x = randn(4, 6).to(device)
        q = amp_kernels.quantize_int8(x, dim=-1, symmetric=False)
        weight = amp_kernels.quantize_int8(x, dim=-1)
        results = (
            q.dequantize(),
            amp_kernels.int8_matmul(q, q.t()),
            ops.int8_linear(x, weight.values, weight.scale, None),
        )
        for result in (q.values, q.scale, q.zero_point, *results):
            assert type(result) is Tensor and result.is_inference() == inference
            assert result.is_leaf and not result.requires_grad and result.untyped_storage().resizable()
            assert result.is_contiguous() and result.storage_offset() == 0


def test_results_are_released() -> None:
    """Kernels make tensors by handles that nobody else counts."""
    x, wide = torch.zeros(2048, 2048), Int8Tensor(cases.integers(2048, 64), torch.ones(1, 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    for _ in range(64):
        amp_kernels.int8_matmul(wide, wide.t())  # 16 MiB
        amp_kernels.quantize_int8(x, dim=-1).dequantize()  # 4 and 16 MiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


def test_a_result_that_torch_cannot_make() -> None:
    wide = Int8Tensor(torch.empty(1, dtype=torch.int8).expand(2**31, 1), torch.ones(1, 1))
    with pytest.raises(RuntimeError):
        amp_kernels.int8_matmul(wide, wide.t())


def test_gradients_of_codes_and_scales_are_none() -> None:
    """As of other functions with steps: an operator without a gradient warns in a backward pass."""
    x, scale = randn(4, 6).requires_grad_(), torch.ones(4, 1).requires_grad_()
    values = amp_kernels.quantize_int8(x, dim=-1).values
    results = (
        amp_kernels.quantize_int8(x, scale=scale).values,
        Int8Tensor(values, scale).dequantize(),
        amp_kernels.int8_matmul(Int8Tensor(values, scale), Int8Tensor(values.t(), scale.t())),
        ops.int8_linear(x, values, scale, None),
        ops.straight_through_int8(x, x, scale, None, None),
    )
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("name", ["a", "b"])
def test_scales_along_the_inner_dimension_are_refused(name: str) -> None:
    q = amp_kernels.quantize_int8(randn(8, 8), dim=-1)
    sides = {"a": q, "b": q.t()}
    sides[name] = Int8Tensor(q.values, sides[name].scale.t(), dim=(-1,))
    with pytest.raises(ValueError, match=f"int8_matmul: {name} must be quantized"):
        amp_kernels.int8_matmul(sides["a"], sides["b"])


def test_seeds() -> None:
    x = randn(100)
    first, again = (amp_kernels.quantize_int8(x, rounding="stochastic", seed=5).values for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, amp_kernels.quantize_int8(x, rounding="stochastic", seed=6).values)
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(amp_kernels.quantize_int8(x, rounding="stochastic").values)
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], amp_kernels.quantize_int8(x, rounding="stochastic").values)
    big = [amp_kernels.quantize_int8(x, rounding="stochastic", seed=s).values for s in (2**64 - 1, -1)]
    assert torch.equal(*big)
    of_numpy = amp_kernels.quantize_int8(x, rounding="stochastic", seed=np.int64(5))
    assert torch.equal(of_numpy.values, first)


def test_a_quantized_tensor_is_moved_and_saved(tmp_path: pathlib.Path, device: torch.device) -> None:
    x = X.to(device)
    for q in (amp_kernels.quantize_int8(x, dim=-1, symmetric=False), amp_kernels.quantize_int8(x, block_size=4)):
        torch.save({"q": q}, tmp_path / "q.pt")
        loaded = torch.load(tmp_path / "q.pt", weights_only=True)["q"]
        for other in (loaded, q.to("cpu").to(device), q.to("cpu").to(str(device))):
            assert (other.dim, other.block_size) == (q.dim, q.block_size)
            assert torch.equal(other.dequantize(), q.dequantize())
        on_meta = q.to("meta")
        assert on_meta.values.is_meta and on_meta.scale.is_meta
        assert (on_meta.zero_point is None) == (q.zero_point is None)
        assert q != None and q in {q}  # noqa: E711


BAD_FIELDS: dict[str, tuple[Any, str]] = {
    "dim 99": (("dim", (99,)), r"dim must be None or a tuple of dimensions from -2 to 1, got \(99,\)"),
    "dim 99, no tuple": (("dim", 99), "dim must be None or a tuple"),
    "dim x": (("dim", "x"), "dim must be None or a tuple"),
    "dim of text": (("dim", ("x",)), "dim must be None or a tuple"),
    "block_size x": (("block_size", "x"), "block_size must be an int or None, got 'x'"),
    "block_size 0": (("block_size", 0), "block_size must be at least 1, got 0"),
    "values": (("values", [1, 2]), "values must be a Tensor, got list"),
}


@pytest.mark.parametrize(("field", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_file_with_other_fields_is_refused(tmp_path: pathlib.Path, field: tuple[str, Any], message: str) -> None:
    q = amp_kernels.quantize_int8(randn(4, 6), dim=-1)
    q.__dict__[field[0]] = field[1]
    torch.save(q, tmp_path / "q.pt")
    with pytest.raises((TypeError, ValueError), match=f"^Int8Tensor: {message}"):
        torch.load(tmp_path / "q.pt", weights_only=True)
    with pytest.raises((TypeError, ValueError), match=f"^Int8Tensor: {message}"):
        pickle.loads(pickle.dumps(q))


@pytest.mark.parametrize("dim", [-1, 1])
def test_a_dimension_may_be_an_int(dim: Any) -> None:
    codes, scale = amp_kernels.quantize_int8(randn(4, 6), dim=-1).values, torch.ones(4, 1)
    q = Int8Tensor(codes, scale, None, dim)
    assert q.dim == copy.deepcopy(q).dim == pickle.loads(pickle.dumps(q)).dim == (dim,)
    assert q.t().dim == (0,)


@pytest.mark.parametrize(("field", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_constructor_refuses_what_a_file_must_not_hold(field: tuple[str, Any], message: str) -> None:
    q = amp_kernels.quantize_int8(randn(4, 6), dim=-1)
    with pytest.raises((TypeError, ValueError), match=f"^Int8Tensor: {message}"):
        dataclasses.replace(q, **{field[0]: field[1]})


def test_fake_quantization_keeps_no_mask() -> None:
    x = randn(64, 64, dtype=torch.float16).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = amp_kernels.fake_quantize_int8(x, dim=-1)
    y.sum().backward()
    beside_x = [t for t in saved if t.data_ptr() != x.data_ptr()]
    assert sum(t.nbytes for t in beside_x) <= 64 * 4


def test_rows_of_a_product_do_not_depend_on_each_other(backend: str, device: torch.device) -> None:
    a = amp_kernels.quantize_int8(randn(40, 33).to(device), dim=-1, symmetric=False)
    b = amp_kernels.quantize_int8(randn(33, 20).to(device), dim=0)
    product = amp_kernels.int8_matmul(a, b)
    row = Int8Tensor(a.values[7:8], a.scale[7:8], a.zero_point[7:8])  # type: ignore[index]
    assert torch.equal(amp_kernels.int8_matmul(row, b), product[7:8])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_that_no_number_holds(backend: str, device: torch.device, dtype: torch.dtype, with_bias: bool) -> None:
    a, b = cases.integers(16, 40, seed=1), cases.integers(64, 40, seed=2).t()
    scales = torch.full((16, 1), 0.25)
    scales[3], scales[7], scales[9] = torch.nan, 3e38, 1e3
    columns, bias = torch.linspace(0.5, 2, 64)[None], randn(64) if with_bias else None
    sides = (t.to(device) for t in (a, b, scales, columns))
    left, right, of_rows, of_columns = sides
    ours = amp_kernels.int8_matmul(
        Int8Tensor(left, of_rows, dim=(-1,)), Int8Tensor(right, of_columns, dim=(0,)),
        bias=None if bias is None else bias.to(device), out_dtype=dtype,
    )  # fmt: skip
    expected = reference.int8_matmul(a, b, scales, None, columns, None, bias=bias, out_dtype=dtype)
    assert expected[3].isnan().all() and expected[7].isinf().any()
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("inner", [33025, 33026])
@pytest.mark.parametrize(("of_a", "of_b"), [(127, 127), (127, -128), (1000, 127), (-100_000, 1000)])
def test_sums_about_32_bits(backend: str, device: torch.device, inner: int, of_a: int, of_b: int) -> None:
    """255^2 * 33025 is the last below 2^31; a zero point that no quantization makes counts too."""
    codes = torch.full((6, inner), -128, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    sides = (
        Int8Tensor(values, one, torch.tensor([zero_point], dtype=torch.int32, device=device))
        for values, zero_point in ((codes, of_a), (codes[:5].t(), of_b))
    )
    exact = torch.tensor(inner * (-128 - of_a) * (-128 - of_b)).float()
    assert (amp_kernels.int8_matmul(*sides).cpu() == exact).all()


@pytest.mark.parametrize("rows", [5, 14, 29])
@pytest.mark.parametrize(
    ("inner", "stride"), [(4, 4), (16, 19), (60, 60), (64, 128), (100, 0), (256, 257), (1168, 1168), (1172, 1172)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_that_are_neighbours_in_memory_or_not(
    backend: str, device: torch.device, rows: int, inner: int, stride: int, dtype: torch.dtype
) -> None:
    """A CPU reads them where they lie, if they fit its cache: up to 1170 bytes apart."""
    a = cases.integers(rows * stride + inner, seed=1).as_strided((rows, inner), (stride, 1))
    scale, row = randn(rows, 1, seed=3), cases.integers(rows, 1, seed=4).int()
    for columns in (32, 70):
        b, bias = cases.integers(columns, inner, seed=2).t(), randn(columns, seed=5)
        column, one = cases.integers(1, columns, seed=6).int(), torch.ones(1, columns)
        for of_a, of_b, plus in ((None, None, None), (row, None, bias), (None, column, None), (row, column, bias)):
            left = Int8Tensor(a.to(device), scale.to(device), None if of_a is None else of_a.to(device))
            right = Int8Tensor(b.to(device), one.to(device), None if of_b is None else of_b.to(device))
            on_device = None if plus is None else plus.to(device)
            ours = amp_kernels.int8_matmul(left, right, bias=on_device, out_dtype=dtype)
            expected = reference.int8_matmul(a, b, scale, of_a, one, of_b, bias=plus, out_dtype=dtype)
            assert torch.equal(ours.cpu(), expected)


def test_a_sum_of_zero_has_the_sign_of_its_scale(backend: str, device: torch.device) -> None:
    for rows, columns in ((1, 1), (6, 40)):
        a = Int8Tensor(torch.zeros(rows, 1, dtype=torch.int8, device=device), torch.ones(1, device=device))
        b = torch.full((1, columns), -5, dtype=torch.int8, device=device)
        for scale in (1.0, -1.0):
            ours = amp_kernels.int8_matmul(a, Int8Tensor(b, torch.full((1,), scale, device=device)))
            assert (ours == 0).all() and (ours.signbit() == (scale < 0)).all()


@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(30, 600, 20001), (20, 700, 1000), (300, 300, 300)])
def test_threads_share_what_is_packed(threads: int, rows: int, columns: int, inner: int) -> None:
    """Tiles that many blocks need, as with 20001, and blocks that one thread takes over from another."""
    a, b = cases.integers(rows, inner, seed=1), cases.integers(columns, inner, seed=2).t()
    zero_point = cases.integers(columns, seed=3).to(torch.int32)[None]
    one = torch.ones(1)
    expected = a.double() @ (b - zero_point).double()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            ours = amp_kernels.int8_matmul(Int8Tensor(a, one), Int8Tensor(b, torch.ones(1, columns), zero_point))
            assert torch.equal(ours, expected.float())
    finally:
        torch.set_num_threads(before)


X = randn(4, 6)
Q = Int8Tensor(cases.integers(4, 6), torch.ones(4, 1), dim=(-1,))
B = Int8Tensor(cases.integers(6, 3), torch.ones(1, 3), dim=(0,))
IMAGES = _images(torch.ones(2, 4, 5, 6))
TWO = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: amp_kernels.quantize_int8(X.double()), TypeError, "x must be float32, float16 or bfloat16"),
        (lambda: amp_kernels.quantize_int8(X.to_sparse()), ValueError, "x must be a dense tensor"),
        (lambda: amp_kernels.quantize_int8(X, dim=2), IndexError, r"dim must be in \[-2, 1\], got 2"),
        (lambda: amp_kernels.quantize_int8(X, dim=(0, -2)), ValueError, "dim must name each dimension at most once"),
        (lambda: amp_kernels.quantize_int8(X, block_size=0), ValueError, "block_size must be at least 1, got 0"),
        (lambda: amp_kernels.quantize_int8(X, dim=0, block_size=2), ValueError, "dim must be None or -1 with block"),
        (lambda: amp_kernels.quantize_int8(X[0, 0], block_size=2), ValueError, "must have a last dimension"),
        (lambda: amp_kernels.quantize_int8(X, rounding="up"), ValueError, "rounding must be 'nearest' or"),
        (lambda: amp_kernels.quantize_int8(X, seed=1), ValueError, "seed must be None with rounding='nearest'"),
        (lambda: amp_kernels.quantize_int8(X, scale=TWO), ValueError, r"scale must have one element, or .* \(4, 6\)"),
        (
            lambda: amp_kernels.quantize_int8(X, scale=TWO[0].half()),
            TypeError,
            "scale must be float32, got torch.float16",
        ),
        (
            lambda: amp_kernels.quantize_int8(X, scale=TWO[0], zero_point=TWO[0]),
            TypeError,
            "zero_point must be int32, got torch.float32",
        ),
        (
            lambda: amp_kernels.quantize_int8(X, zero_point=torch.tensor(1, dtype=torch.int32)),
            ValueError,
            "zero_point must be None without scale",
        ),
        (lambda: amp_kernels.dequantize_int8(Q, torch.int8), TypeError, "dtype must be float32, float16 or bfloat16"),
        (
            lambda: amp_kernels.quantize_int8(X, dim=[0.5]),
            TypeError,
            r"an int, a sequence of ints, or None, got \[0.5",
        ),
        (lambda: amp_kernels.quantize_int8(X, dim="all"), TypeError, "an int, a sequence of ints, or None, got 'all'"),
        (lambda: amp_kernels.quantize_int8(None), TypeError, "x must be a Tensor, got NoneType"),
        (lambda: amp_kernels.fake_quantize_int8([1.0]), TypeError, "^fake_quantize_int8: x must be a Tensor, got list"),
        (lambda: amp_kernels.quantize_int8(X, scale=0.5), TypeError, "scale must be a Tensor, got float"),
        (
            lambda: amp_kernels.quantize_int8(X, scale=TWO[0], zero_point=3),
            TypeError,
            "zero_point must be a Tensor, got int",
        ),
        (lambda: amp_kernels.quantize_int8(X, block_size=2.5), TypeError, "block_size must be an int or None, got 2.5"),
        (
            lambda: amp_kernels.quantize_int8(X, block_size=[2]),
            TypeError,
            r"block_size must be an int or None, got \[2",
        ),
        (lambda: amp_kernels.quantize_int8(X, symmetric=[]), TypeError, r"symmetric must be a bool, got \[\]"),
        (lambda: amp_kernels.quantize_int8(X, symmetric=None), TypeError, "symmetric must be a bool, got None"),
        (
            lambda: amp_kernels.fake_quantize_int8(X, symmetric="no"),
            TypeError,
            "^fake_quantize_int8: symmetric must be a bool, got 'no'",
        ),
        (lambda: amp_kernels.quantize_int8(X[0, 0], dim=-1), IndexError, r"dim must be None for a 0-dim tensor.*, got"),
        (lambda: amp_kernels.quantize_int8(X, dim=torch.tensor(0.5)), TypeError, "dim must be an int, a sequence"),
        (lambda: amp_kernels.quantize_int8(X, dim=np.array([0, 1])), TypeError, "dim must be an int, a sequence"),
        (lambda: amp_kernels.quantize_int8(X, dim=-1)[0], TypeError, "indexing is not supported; index deq"),
        (
            lambda: amp_kernels.quantize_int8(X) == amp_kernels.quantize_int8(X),
            TypeError,
            "== is not supported; compare",
        ),
        (lambda: amp_kernels.quantize_int8(X).to(torch.float16), TypeError, "device must be a device, got torch.float"),
        (
            lambda: amp_kernels.quantize_int8(X, rounding="stochastic", seed="1"),
            TypeError,
            "seed must be an int or None, got '1'",
        ),
        (lambda: Int8Tensor(Q.values, None).t(), TypeError, "Int8Tensor: scale must be a Tensor, got NoneType"),
        (lambda: Int8Tensor(None, Q.scale).to("cpu"), TypeError, "Int8Tensor: values must be a Tensor, got NoneType"),
        (lambda: amp_kernels.int8_matmul(Q, Int8Tensor(B.values, 1.0)), TypeError, "scale must be a Tensor, got float"),
        (
            lambda: Int8Tensor(Q.values, Q.scale, 3).nbytes,
            TypeError,
            "Int8Tensor: zero_point must be a Tensor, got int",
        ),
        (lambda: Int8Tensor(Q.values, Q.scale.to("meta")).dequantize(), ValueError, "scale must be on cpu as val"),
        (lambda: amp_kernels.int8_matmul(Q, B, bias=[1.0]), TypeError, "bias must be a Tensor, got list"),
        (lambda: amp_kernels.int8_matmul(Q, B, out_dtype="half"), TypeError, "out_dtype must be .* got 'half'; pass a"),
        (lambda: amp_kernels.dequantize_int8(X), TypeError, "q must be an Int8Tensor, got Tensor"),
        (lambda: amp_kernels.dequantize_int8(Q, [torch.int8]), TypeError, "dtype must be .* pass a torch.dtype"),
        (lambda: amp_kernels.int8_matmul(X, B), TypeError, "a must be an Int8Tensor, got Tensor"),
        (lambda: amp_kernels.int8_matmul(Q, Q), ValueError, "b must be quantized as a whole or with dim=0"),
        (lambda: amp_kernels.int8_matmul(Q.t(), B), ValueError, "a must be quantized as a whole or with dim=-1"),
        (
            lambda: amp_kernels.int8_matmul(amp_kernels.quantize_int8(X, block_size=2), B),
            ValueError,
            "a must not be quantized in blocks",
        ),
        (
            lambda: amp_kernels.int8_matmul(Q, amp_kernels.quantize_int8(X, dim=0)),
            ValueError,
            "b must have 6 rows, as many as a has columns, got 4",
        ),
        (lambda: amp_kernels.int8_matmul(Q, B, bias=TWO), ValueError, r"bias must have shape \(3,\), got \(2,\)"),
        (lambda: amp_kernels.int8_matmul(Q, B, out_dtype=torch.int32), TypeError, "out_dtype must be float32"),
        (lambda: amp_kernels.quantize_int8(X, block_size=2).t(), ValueError, "values must have 2 dimensions and"),
        (lambda: amp_kernels.int8_conv2d(X, IMAGES), TypeError, "int8_conv2d: x must be an Int8Tensor, got Tensor"),
        (lambda: amp_kernels.int8_conv2d(Q, IMAGES), ValueError, "x must have 4 dimensions.*got 2; give a line"),
        (lambda: amp_kernels.int8_conv2d(IMAGES, B), ValueError, "weight must have 4 dimensions, with channels as"),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, _images(torch.ones(3, 2, 2, 5))),
            ValueError,
            "weight must have 6 channels on cpu as x has, got 5",
        ),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, _images(torch.ones(3, 0, 2, 6))),
            ValueError,
            "weight must have from 1 to 131071 elements for each output channel, .* got 0",
        ),
        (
            lambda: amp_kernels.int8_conv2d(*[_images(torch.ones(1, 364, 361, 1))] * 2),
            ValueError,
            "weight must have from 1 to 131071 elements .* got 131404",
        ),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, amp_kernels.quantize_int8(torch.ones(3, 2, 2, 6), symmetric=False)),
            ValueError,
            "weight must be symmetric, got a zero point",
        ),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, amp_kernels.quantize_int8(torch.ones(3, 2, 2, 6), block_size=2)),
            ValueError,
            "weight must not be quantized in blocks, got block_size 2",
        ),
        (
            lambda: amp_kernels.int8_conv2d(amp_kernels.quantize_int8(torch.ones(2, 4, 5, 6), dim=0), IMAGES),
            ValueError,
            r"x must be quantized as a whole or per image \(dim=\(1, 2, 3\), .* got scales of shape \(1, 4, 5, 6\)",
        ),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, amp_kernels.quantize_int8(torch.ones(3, 2, 2, 6), dim=-1)),
            ValueError,
            "weight must be quantized as a whole or per output channel",
        ),
        (lambda: amp_kernels.int8_conv2d(IMAGES, IMAGES, stride=0), ValueError, r"stride must be .* got \(0, 0\)"),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, IMAGES, padding=(0, -1)),
            ValueError,
            "padding must be one or two ints",
        ),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, IMAGES, dilation=(1, 1, 1)),
            ValueError,
            "dilation must be one or two",
        ),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, IMAGES, stride="same"),
            TypeError,
            "stride must be an int or two ints",
        ),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, IMAGES, dilation=2),
            ValueError,
            r"x must be at least as large as the dilated kernel after padding, got \(4, 5\) pixels for a kernel of",
        ),
        (
            lambda: amp_kernels.int8_conv2d(
                Int8Tensor(torch.zeros(1, dtype=torch.int8).expand(1, 2**16, 2**16, 1), torch.ones(1)),
                _images(torch.ones(1, 1, 1, 1)),
            ),
            ValueError,
            r"x must have fewer than 2\^32 pixels, got \(1, 65536, 65536\); give fewer images at a time",
        ),
        (lambda: amp_kernels.int8_conv2d(IMAGES, IMAGES, bias=TWO[:1]), ValueError, r"bias must have shape \(2,\)"),
        (
            lambda: amp_kernels.int8_conv2d(IMAGES, IMAGES, out_zero_point=torch.zeros(1, dtype=torch.int32)),
            ValueError,
            "out_zero_point must have one element, and be given only with out_scale",
        ),
    ],
)
def test_bad_input_gets_a_sentence(call: Callable[[], Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()


@pytest.mark.parametrize("shape", [(1035, 4080), (1029, 4088), (20000, 3, 80), (1035, 4081), (4097, 1040)])
def test_streamed_columns_of_any_width_and_last_strip(shape: tuple[int, ...]) -> None:
    """Past the caches only where every row of a strip begins on a boundary: else the store faults."""
    x = randn(*shape)
    dim = len(shape) - 2
    ours = amp_kernels.quantize_int8(x, dim=dim)
    scale = x.abs().amax(dim, keepdim=True) / 127
    assert torch.equal(ours.scale, scale)
    assert torch.equal(ours.values, (x * (1 / scale)).round().to(torch.int8))
    given = amp_kernels.quantize_int8(x, scale=ours.scale)
    assert torch.equal(given.values, ours.values)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: amp_kernels.quantize_int8(x, block_size=n).values,
        lambda x, n: amp_kernels.quantize_int8(x, block_size=x.shape[1] // 2).values,
        lambda x, n: amp_kernels.quantize_int8(x, rounding="stochastic", seed=n).values,
    ],
)
def test_symbolic_sizes_and_seeds(function: Callable[..., torch.Tensor]) -> None:
    x = randn(6, 64)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, 16), function(x, 16))


def test_too_long_a_sum_is_refused() -> None:
    one = torch.tensor(1.0)
    a, b = (Int8Tensor(torch.zeros(shape, dtype=torch.int8), one) for shape in ((1, 131072), (131072, 1)))
    with pytest.raises(ValueError, match="inner dimension must be at most 131071"):
        amp_kernels.int8_matmul(a, b)
