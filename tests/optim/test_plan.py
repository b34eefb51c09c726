"""The arithmetic of tables and chunks, and what layouts have in common."""

from __future__ import annotations

import itertools
import operator
import random

import pytest
import torch
from cuda_on_cpu import backend as emulator
from table_kernels import why_not_emulated
from torch import Tensor

from amp_kernels import sgd_
from amp_kernels.ops import table as tables
from amp_kernels.ops.table import (
    DTYPE_CODES,
    Row,
    chunk_size,
    cut,
    gradient_table,
    int64_tensor,
    is_dense,
    same_layout,
    shares_memory,
)
from amp_kernels.optim import FusedSGD

SMALL, LARGE = 1 << 14, 1 << 16


def covered(numels: list[int], entries: Tensor, size: int) -> dict[int, int]:
    """Elements of each tensor that the chunks hold, in the kernels' arithmetic (csrc/table.h)."""
    elements: dict[int, int] = {}
    for tensor, chunk in entries.tolist():
        begin = chunk * size
        assert begin == elements.get(tensor, 0)  # one after the other, without a gap
        elements[tensor] = begin + min(numels[tensor] - begin, size)
    return elements


@pytest.mark.parametrize(
    "numels",
    [
        [],
        [0],
        [0, 0],
        [1],
        [7, 0, 65537],
        [SMALL - 1, SMALL, SMALL + 1],
        [64] * 1000,
        [0, (1 << 27) + 1, 0, 5],
    ],
    ids=str,
)
def test_chunks_cover_every_element_once(numels):
    entries, size = cut(numels)
    assert entries.dtype is torch.int32
    assert entries.shape[1] == 2
    assert entries.is_contiguous()
    assert size % 1024 == 0
    assert covered(numels, entries, size) == {t: n for t, n in enumerate(numels) if n}
    assert entries[:, 0].tolist() == sorted(entries[:, 0].tolist())


def test_an_entry_of_more_than_2_to_the_31_elements():
    numels = [3, (1 << 33) + 5, 7]
    entries, size = cut(numels)
    assert size == LARGE
    assert covered(numels, entries, size) == dict(enumerate(numels))
    last = entries[-2]
    assert last.tolist() == [1, 1 << 17]
    assert last[1].item() * size == 1 << 33  # 64-bit, where an int32 product would be 0
    assert numels[1] - last[1].item() * size == 5


def test_chunk_size_depends_on_the_sum():
    assert cut([(1 << 27) - 1]).size == SMALL
    assert cut([1 << 26, 1 << 26]).size == LARGE


def rounds_and_fill(numels: list[int], blocks: int) -> tuple[int, float]:
    """How many chunks the busiest block takes, and which part of the last round has something to do."""
    count = len(cut(numels, blocks=blocks).entries)
    rounds = -(-count // blocks)
    return rounds, count / blocks - (rounds - 1)


@pytest.mark.parametrize("total", [10**6, 1 << 20, 10**7, 10 << 20, 25_557_032, 10**8, 100 << 20, 10**9])
@pytest.mark.parametrize("multiprocessors", [108, 132, 144])
def test_the_last_round_of_blocks_is_full(multiprocessors, total):
    for resident in (2, 3, 4, 5, 6):  # blocks of a kernel on a multiprocessor
        blocks = multiprocessors * resident
        rounds, fill = rounds_and_fill([total], blocks)
        assert fill >= 0.9
        size = cut([total], blocks=blocks).size
        assert size % 128 == 0 and 1024 <= size <= LARGE
        assert rounds * blocks * size <= 1.11 * total  # what they could do, by what there is to do


RESNET50 = [
    9408, 64, 64,
    *(n for w, count in ((64, 3), (128, 4), (256, 6), (512, 3)) for _ in range(count)
      for n in (4 * w * w, w, w, 9 * w * w, w, w, 4 * w * w, 4 * w, 4 * w)),
    2048000, 1000,
]  # fmt: skip


@pytest.mark.parametrize("multiprocessors", [108, 132, 144])
def test_chunks_of_models_are_done_nearly_as_soon_as_one_tensor(multiprocessors):
    """The busiest block's elements, by what each would have if all were cut evenly."""
    for resident in (2, 3, 4):
        blocks = multiprocessors * resident
        for numels in (RESNET50, [768 * 3072, 3072] * 24, [1 << 24] * 3 + [4096] * 7):
            entries, size = cut(numels, blocks=blocks)
            work = [0] * blocks
            for i, (tensor, place) in enumerate(entries.tolist()):
                work[i % blocks] += min(size, numels[tensor] - place * size)
            assert max(work) <= 1.2 * sum(numels) / blocks


@pytest.mark.skipif(why_not_emulated() is not None, reason=str(why_not_emulated()))
def test_chunks_of_lists_are_those_of_plans():
    """csrc/chunks.h and `chunk_size`, two texts of one function."""
    rng = random.Random(0)
    for _ in range(2000):
        given = int(2 ** rng.uniform(0, 31)), int(2 ** rng.uniform(0, 12)), rng.choice([0, 1, 24, 216, 396, 528, 864])
        assert emulator.library().chunk_size_of(*given) == chunk_size(*given)


@pytest.mark.skipif(why_not_emulated() is not None, reason=str(why_not_emulated()))
@pytest.mark.parametrize("low", [20_000, 9_000])
def test_plans_and_lists_are_cut_for_the_kernels_that_run_them(monkeypatch, low):
    """The chunks of a plan have the length for the update of most elements. Lists have one for each dtype."""
    fp16, fp32 = DTYPE_CODES[torch.float16], DTYPE_CODES[torch.float32]
    blocks, lengths = {fp16: 5, fp32: 3}, []
    run = emulator._update_table_
    monkeypatch.setattr(emulator, "_load_update", lambda beside, family, param, *rest: blocks[param])
    monkeypatch.setattr(emulator, "_update_table_", lambda *given: (lengths.append(given[3]), run(*given)))
    params = [torch.nn.Parameter(torch.zeros(low).half()), torch.nn.Parameter(torch.zeros(10_000))]
    grads = [torch.ones_like(p) for p in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    with emulator.serving():
        FusedSGD(params, lr=0.1).step()
        weights, momenta = [p.detach() for p in params], [torch.zeros(p.shape) for p in params]
        options = {"dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
        sgd_(weights, grads, momenta, [weights[0].float()], lr=0.1, momentum=0.9, **options)
    most = blocks[fp16 if low > 10_000 else fp32]
    of_plan = chunk_size(low + 10_000, 2, most)
    assert lengths == [of_plan, of_plan, chunk_size(10_000, 1, 3), chunk_size(low, 1, 5)]
    assert of_plan not in (chunk_size(low + 10_000, 2, 8 - most), chunk_size(low + 10_000, 2, 0))


def test_order():
    numels = [SMALL + 1, 5, 0, 9]
    assert cut(numels, [3, 0]).entries.tolist() == [[3, 0], [0, 0], [0, 1]]
    assert cut(numels, [2]).entries.shape == (0, 2)
    assert cut(numels, []).entries.shape == (0, 2)


def test_int64_tensor():
    values = [0, 1, (1 << 47) + 3, -(1 << 63), (1 << 63) - 1]
    tensor = int64_tensor(values)
    assert tensor.tolist() == values
    assert tensor.dtype is torch.int64
    assert int64_tensor(iter(values)).tolist() == values
    assert int64_tensor([]).shape == (0,)
    tensor[0] = 5  # writable, and its own memory
    assert values[0] == 0


def test_gradient_table():
    grads = [torch.zeros(3), torch.zeros(0, dtype=torch.float16), torch.zeros(2, 2, dtype=torch.bfloat16)]
    table = gradient_table(grads)
    assert table[Row.NUMEL].tolist() == [3, 0, 4]
    assert table[Row.GRAD].tolist() == [g.data_ptr() for g in grads]
    assert table[Row.GRAD_DTYPE].tolist() == [0, 1, 2]
    assert gradient_table([]).shape == (4, 0)


def test_rows_are_those_of_csrc_table_h():
    names = ["NUMEL", "GRAD_DTYPE", "GROUP", "GRAD", "PARAM", "MASTER", "STEP", "STATE", "SCALE"]
    assert [row.name for row in Row] == names
    assert [int(row) for row in Row] == [*range(8), 10]
    assert (tables.FIXED_ROWS, tables.GRADIENT_ROWS, tables.UPDATE_ROWS) == (3, 4, 12)


# -------------------------------------------------------------------------------------------------------------- layouts
def storage_order(tensor: Tensor) -> list[tuple[int, tuple[int, ...]]]:
    """(offset, index) of every element, by offset."""
    indices = itertools.product(*map(range, tensor.shape))
    return sorted((sum(i * s for i, s in zip(index, tensor.stride(), strict=True)), index) for index in indices)


def fills_one_stretch(tensor: Tensor) -> bool:
    return [offset for offset, _ in storage_order(tensor)] == list(range(tensor.numel()))


def random_tensor(rng: random.Random) -> Tensor:
    """A few dimensions of a few elements, some of size 1 or 0, permuted, sliced, expanded or with odd strides."""
    shape = [rng.choice([1, 1, 2, 3, 0 if rng.random() < 0.1 else 2]) for _ in range(rng.randint(0, 4))]
    tensor = torch.zeros(shape)
    for _ in range(rng.randint(0, 2)):
        kind = rng.randrange(4)
        if kind == 0 and shape:
            tensor = tensor.permute(rng.sample(range(tensor.dim()), tensor.dim()))
        elif kind == 1 and tensor.dim():
            tensor = tensor[..., :: rng.choice([1, 2])]
        elif kind == 2 and tensor.dim() and tensor.shape[0] == 1:
            tensor = tensor.expand(rng.choice([1, 2]), *tensor.shape[1:])
        elif kind == 3:
            sizes = list(tensor.shape)
            strides = [rng.choice([0, 1, 2, 3, 4, 6]) if n > 1 or rng.random() < 0.5 else 7 for n in sizes]
            tensor = torch.zeros(200).as_strided(sizes, strides)
    return tensor


def test_is_dense_for_random_strides():
    rng = random.Random(0)
    answers = set()
    for _ in range(4000):
        tensor = random_tensor(rng)
        expected = fills_one_stretch(tensor)
        answers.add(expected)
        assert is_dense(tensor) == expected, (tensor.shape, tensor.stride())
    assert answers == {False, True}


def test_same_layout_for_random_strides():
    """True promises that both are walked in the same order; it must be found where strides are equal."""
    rng = random.Random(1)
    answers = []
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for _ in range(1500):
        tensor = random_tensor(rng)
        by_shape.setdefault(tuple(tensor.shape), []).append(tensor)
    for tensors in by_shape.values():
        for _ in range(60):
            a, b = rng.choice(tensors), rng.choice(tensors)
            same = same_layout(a, b)
            answers.append(same)
            order_a, order_b = storage_order(a), storage_order(b)
            if same:
                assert fills_one_stretch(a)
                assert order_a == order_b, (a.shape, a.stride(), b.stride())
            elif fills_one_stretch(a):
                assert a.stride() != b.stride()
    assert 0.1 < sum(answers) / len(answers) < 0.95


@pytest.mark.parametrize("shape", [(4, 1, 3, 3), (1, 4, 3, 3), (4, 3, 1, 1), (1, 1, 1, 1)], ids=str)
def test_same_layout_with_dimensions_of_size_one(shape):
    a = torch.zeros(shape)
    b = a.to(memory_format=torch.channels_last)
    if same_layout(a, b):
        assert storage_order(a) == storage_order(b)
    assert same_layout(a, a.clone())
    assert same_layout(b, b.clone())


def random_views(rng: random.Random, memory: torch.Tensor) -> list[torch.Tensor]:
    """Dense ones, columns, expanded and overlapping ones, of two dtypes, in one memory."""
    views = []
    for _ in range(rng.randint(1, 4)):
        base = rng.choice([memory, memory.view(torch.float16)])
        sizes = [rng.randint(0 if rng.random() < 0.1 else 1, 4) for _ in range(rng.randint(0, 3))]
        strides = [rng.choice([0, 1, 2, 3, 4, 5, 8, 12, 16]) for _ in sizes]
        views.append(base.as_strided(sizes, strides, rng.randint(0, 100)))
    return views


def addresses(tensor: torch.Tensor) -> list[int]:
    """Of every half word of every element."""
    starts = [tensor.data_ptr() + tensor.element_size() * sum(map(operator.mul, at, tensor.stride()))
              for at in itertools.product(*map(range, tensor.shape))]  # fmt: skip
    return [start + k for start in starts for k in range(0, tensor.element_size(), 2)]


def test_shares_memory_for_random_views():
    rng, memory = random.Random(0), torch.zeros(300)
    found = 0
    for _ in range(3000):
        views = random_views(rng, memory)
        shared = [a for view in views for a in addresses(view)]
        position = shares_memory(views)
        assert (position is not None) == (len(set(shared)) < len(shared)), [(v.shape, v.stride()) for v in views]
        if position is not None:
            found += 1
            mine = addresses(views[position])
            others = {a for i, view in enumerate(views) if i != position for a in addresses(view)}
            assert len(set(mine)) < len(mine) or others & set(mine)
    assert 500 < found < 2500
    whole = torch.zeros(8, 30)
    assert shares_memory([whole[:, :10], whole[:, 10:20], whole[:, 20:]]) is None  # a fused matrix
    assert shares_memory([]) is None
