"""Products refuse arguments that do not fit with a sentence that begins with the name of the called function.

A function of two operands gets every pair of odd operands. In calls with more arguments a seed chooses up to three,
which are replaced by odd ones.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import amp_kernels
from amp_kernels import Int8Tensor
from amp_kernels.ops import int8 as ops
from amp_kernels.ops.library import call

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.uint8, torch.uint16,
    torch.bool, torch.complex64, torch.complex32, torch.float8_e4m3fn,
)  # fmt: skip
SHAPES = ((), (6,), (4, 6), (6, 3), (3, 6), (4, 0), (0, 6), (2, 4, 6), (2, 6, 3), (5, 6, 3), (2, 1, 4, 6))
SENTENCE_TYPES = (TypeError, ValueError, RuntimeError)


class Subclass(Tensor):
    """One without rules of its own."""


def odd_tensors() -> list[Tensor]:
    x = torch.ones(4, 6)
    return [
        *(torch.ones(shape, dtype=torch.float16, device="meta") for shape in ((4, 6), (6, 3))),
        *(torch.ones(4, 6, device="meta", dtype=dtype) for dtype in (torch.int8, torch.float32)),
        *(x.to(dtype).to_sparse() for dtype in (torch.float16, torch.float32)),
        x.to_sparse_csr(),
        torch.quantize_per_tensor(x, 0.1, 3, torch.qint8),
        *(torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], dtype=d) for d in (torch.float16, x.dtype)),
        torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], layout=torch.jagged),
        x.to(torch.complex64).conj(),
        x.half().as_subclass(Subclass),
        torch.nn.Parameter(torch.ones(3, 6, dtype=torch.bfloat16)),
        x.half()[:, :1].expand(4, 6),
        x.t().half(),
    ]


def tensors() -> list[Tensor]:
    shapes = [torch.ones(shape, dtype=torch.float16) for shape in SHAPES]
    dtypes = [torch.ones(shape).to(dtype) for dtype in DTYPES for shape in SHAPES[2:4]]
    return [*shapes, *dtypes, *odd_tensors()]


OTHERS: list[Any] = [
    None, "x", 1, 2.5, 1j, True, [], [[1.0, 2.0]], (3, 6), {}, object(), torch.float16, torch.device("cpu"),
    np.ones((4, 6)), np.float32(2), np.ones((4, 6), np.float16), torch.Size([4, 6]), Tensor, float("nan"),
    amp_kernels.quantize_int8(torch.ones(4, 6), dim=-1),
]  # fmt: skip


def check(name: str, function: Callable[[], Any]) -> bool:
    """Whether there was a result; an error has to be a sentence."""
    try:
        function()
    except SENTENCE_TYPES as error:
        message = str(error)
        assert message.startswith(f"{name}: ") and " must " in message and "got " in message, message
        return False
    return True


def told(arguments: Iterable[Any]) -> str:
    return ", ".join(f"{x.dtype} {x.layout}" if isinstance(x, Tensor) else repr(x) for x in arguments)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    yield


CONTEXTS = {
    "plain": plainly,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "reference": lambda: amp_kernels.use_backend("reference"),
}
contexts = pytest.mark.parametrize("context", CONTEXTS)
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about nested, quantized and sparse tensors


def tried(name: str, function: Callable[..., Any], choices: Iterable[tuple[Any, ...]], context: str) -> None:
    found = {True: 0, False: 0}
    with CONTEXTS[context]():
        for arguments in choices:
            try:
                found[check(name, lambda: function(*arguments))] += 1  # noqa: B023
            except BaseException as error:
                error.add_note(told(arguments))
                raise
    assert min(found.values()) > 10  # neither all refused nor all accepted


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_every_pair(name: str) -> None:
    tried(name, getattr(amp_kernels, name), itertools.product([*tensors(), *OTHERS], repeat=2), "plain")


COUNT = 2500


def spoiled(count: int, calls: list[tuple[Any, ...]], pools: tuple[list[Any], ...]) -> Iterator[tuple[Any, ...]]:
    """Calls that fit, with up to three of their arguments replaced."""
    random_ = random.Random(7)
    for _ in range(count):
        arguments = list(random_.choice(calls))
        for at in random_.sample(range(len(pools)), random_.randrange(4)):
            arguments[at] = random_.choice(pools[at])
        yield tuple(arguments)


def ones(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


OUT: list[Any] = [torch.float32, torch.bfloat16, torch.int8, torch.float64, "half", 3, np.ones(2), Tensor]


@contexts
def test_addmm(context: str) -> None:
    pool = [*tensors(), *OTHERS]
    calls = [
        (ones(*shape, dtype=dtype), ones(*batch, 4, 6, dtype=dtype), ones(*batch, 6, 3, dtype=dtype), 1, 0.5, None)
        for shape in ((3,), (4, 3)) for batch in ((), (2,)) for dtype in DTYPES[:4]
    ]  # fmt: skip
    factors = [0, np.float32(2), torch.tensor(2.0), torch.ones(2), None, "x", 1j, [1], np.ones(2), True]

    def addmm(input: Any, a: Any, b: Any, beta: Any, alpha: Any, dtype: Any) -> Tensor:
        return amp_kernels.addmm(input, a, b, beta=beta, alpha=alpha, out_dtype=dtype)

    tried("addmm", addmm, spoiled(COUNT, calls, (pool, pool, pool, factors, factors, OUT)), context)


@contexts
def test_out_dtype(context: str) -> None:
    a, b = torch.ones(4, 6, dtype=torch.bfloat16), torch.ones(6, 3, dtype=torch.bfloat16)
    pairs = [(a, b), (a.float(), b.float()), (a.double(), b.double()), (a.int(), b.int())]
    choices = [(*pair, dtype) for pair in pairs for dtype in [*OUT, *DTYPES, *OTHERS]]
    tried("matmul", lambda a, b, dtype: amp_kernels.matmul(a, b, out_dtype=dtype), choices, context)


@contexts
def test_linear(context: str) -> None:
    pool = [*tensors(), *OTHERS]
    calls = [
        (ones(*shape, dtype=dtype), ones(3, 6, dtype=dtype), bias and ones(3, dtype=dtype), activation)
        for shape in ((6,), (4, 6), (2, 4, 6))
        for dtype in DTYPES[:4]
        for bias in (None, True)
        for activation in (None, "relu", "gelu")
    ]
    activations = ["gelu_tanh", "silu", 1, torch.ones(2), np.ones(2), ["relu"], True, b"relu"]
    choices = spoiled(COUNT, calls, (pool, pool, pool, activations))
    tried("linear", amp_kernels.linear, choices, context)


def test_pad_to_multiple() -> None:
    multiples = [8, 3, True, 0, -1, 2**40, 2**70, None, "8", 2.5, torch.tensor(8), np.int64(8), [8]]
    tried("pad_to_multiple", amp_kernels.pad_to_multiple, itertools.product([*tensors(), *OTHERS], multiples), "plain")


SCALES = [torch.ones(s) for s in ((), (1,), (4, 1), (1, 3), (3,), (4,), (2, 2), (3, 1))]
ZEROS = [None, *(torch.ones(s, dtype=torch.int32) for s in ((), (1,), (4, 1), (1, 3)))]
INT8 = torch.int8


@contexts
def test_int8_matmul(context: str) -> None:
    pool = [*tensors(), *OTHERS]

    def multiply(*arguments: Any) -> Tensor:
        sides = []
        for side in (arguments[0:5:2], arguments[1:6:2]):
            try:
                sides.append(Int8Tensor(*side, None, arguments[6]))
            except TypeError as error:
                assert str(error).startswith("Int8Tensor: ") and " must " in str(error)
                sides.append(side[0])
        names = ("bias", "out_dtype", "out_scale", "out_zero_point")
        return amp_kernels.int8_matmul(*sides, **dict(zip(names, arguments[7:], strict=True)))

    calls = [
        (ones(4, 6, dtype=INT8), ones(6, 3, dtype=INT8), of_a, torch.ones(1), zero, None, None, bias, dtype, None, None)
        for of_a in SCALES[:3]
        for zero in (None, torch.ones(of_a.shape, dtype=torch.int32))
        for bias in (None, torch.ones(3))
        for dtype in DTYPES[:3]
    ]
    scales, zeros = pool + SCALES * 4, pool + ZEROS * 4
    pools = (pool, pool, scales, scales, zeros, zeros, [2, "x", None], scales, OUT, scales, zeros)
    tried("int8_matmul", multiply, spoiled(COUNT, calls, pools), context)


@contexts
def test_int8_linear(context: str) -> None:
    """The operator of `nn.Int8Linear`."""
    pool = [*tensors(), *OTHERS]
    calls = [
        (ones(4, 6, dtype=dtype), ones(3, 6, dtype=INT8), scale, bias and ones(3, dtype=dtype))
        for dtype in DTYPES[:3] for scale in (torch.ones(1), torch.ones(3), torch.ones(3, 1)) for bias in (None, True)
    ]  # fmt: skip
    pools = (pool, pool, pool + SCALES * 4, pool)
    tried("int8_linear", lambda *a: call(ops.int8_linear, *a), spoiled(COUNT, calls, pools), context)
