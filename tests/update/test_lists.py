"""Calls on lists of tensors. C++ takes plain lists in one call (csrc/ops/lists.h), and leaves others to operators."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import ALL, Operators, parameters, randn, set_grads
from torch import Tensor

import amp_kernels
from amp_kernels import _loader, testing, torch_private, use_backend
from amp_kernels.functional import unscale as functional_unscale
from amp_kernels.functional import update as functional_update
from amp_kernels.optim import FusedSGD, ema_

DEVICE = torch.device("cuda" if os.environ.get("AMP_KERNELS_FAKE_GPUS") else "cpu")
pytestmark = pytest.mark.skipif(
    _loader.reader() is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="C++ cannot read tensors from Python objects here, or this process interprets",
)
FAMILY = [
    case
    for op in ("unscale_", "grad_norm", "clip_grad_norm_", "sgd_", "rmsprop_", "adam_")
    for case in testing.CASES[op]
]
OPTIONS = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
PLAIN = {**OPTIONS, "momentum": 0.0}


@pytest.mark.parametrize("case", FAMILY, ids=lambda case: f"{case.op}-{case}")
def test_case(case: testing.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests force a backend, by a mode that has to see operators."""
    monkeypatch.setattr(torch_private, "is_watched", lambda: False)
    assert all(result.passed for result in case.run(DEVICE.type, DEVICE))


# ------------------------------------------------------------------------------------------ what calls no operator
def gradients() -> list[Tensor]:
    return [randn(5, 7, seed=i, dtype=dtype, device=DEVICE) for i, dtype in enumerate(ALL)] + [
        torch.empty(0, 3, device=DEVICE),
        randn(2, 3, 4, 5, seed=9, device=DEVICE).to(memory_format=torch.channels_last),
    ]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def unscaled(grads: list[Tensor]) -> list[Tensor]:
    found_inf = scalar(0.0)
    amp_kernels.unscale_(grads, inv_scale=scalar(0.3), found_inf=found_inf)
    return [*grads, found_inf]


def normed(grads: list[Tensor]) -> list[Tensor]:
    found_inf = scalar(0.0)
    return [amp_kernels.grad_norm(grads), amp_kernels.grad_norm(grads, inv_scale=scalar(3.0), found_inf=found_inf)]


def stepped(grads: list[Tensor], lr: float | Tensor = 0.1) -> list[Tensor]:
    params = [g.flip(0).clone(memory_format=torch.preserve_format) for g in grads]
    buffers = [torch.ones_like(p, dtype=torch.float32) for p in params]
    low = [p for p in params if p.dtype is not torch.float32]
    masters = [low[0].float(), *(torch.zeros_like(p, dtype=torch.int16) for p in low[1:])]
    scalars = {"grad_scale": scalar(2.0), "found_inf": scalar(0.0)}
    amp_kernels.sgd_(params, grads, buffers, masters, lr=lr, is_first_step=False, **OPTIONS, **scalars)
    return [*params, *buffers, *masters]


def averaged(grads: list[Tensor]) -> list[Tensor]:
    params = parameters(ALL, DEVICE)
    optimizer = FusedSGD(params, lr=0.1)
    set_grads(params, 0)
    optimizer.step()
    averages = [torch.ones_like(p, dtype=torch.float32) for p in params]
    ema_(averages, optimizer, 0.75)
    return averages


CALLS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "unscale_": unscaled,
    "grad_norm": normed,
    "sgd_": stepped,
    "sgd_ with a rate on the device": lambda grads: stepped(grads, scalar(0.1)),
    "ema_": averaged,
}


@pytest.mark.parametrize("name", CALLS)
def test_plain_lists_call_no_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "is_watched", lambda: True)
    expected = CALLS[name](gradients())
    monkeypatch.setattr(torch_private, "is_watched", lambda: False)
    monkeypatch.setattr(functional_update, "call", None)
    monkeypatch.setattr(functional_unscale, "_on_each_device", None)
    found = CALLS[name](gradients())
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found, expected, strict=True))


def test_versions_rise() -> None:
    grads = gradients()
    leaf = grads[0].requires_grad_()
    square = leaf.square()
    amp_kernels.unscale_(grads, inv_scale=scalar(0.5), found_inf=scalar(0.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


# --------------------------------------------------------------------------------------------- what operators take
def by_a_mode(call: Callable[[], object]) -> list[str]:
    with Operators() as seen:
        call()
    return seen.names


def by_the_profiler(call: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.key for event in profile.key_averages()]


@pytest.mark.parametrize("watch", [by_a_mode, by_the_profiler])
@pytest.mark.parametrize(
    ("name", "operator"), [("unscale_", "unscale_"), ("grad_norm", "grad_norm"), ("sgd_", "update_")]
)
def test_what_watches_sees_operators(watch: Callable[..., list[str]], name: str, operator: str) -> None:
    grads = gradients()
    assert f"amp_kernels::{operator}" in watch(lambda: CALLS[name](grads))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_watches() -> None:
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        seen.append(torch_private.is_watched())
        return x + 1

    torch.jit.trace(run, torch.ones(1), check_trace=False)
    torch.func.vmap(run)(torch.ones(1))
    assert seen == [True] * len(seen) != []
    with torch.overrides.BaseTorchFunctionMode():
        run(torch.ones(1))
    assert seen.pop()
    run(torch.ones(1))
    assert not seen[-1]


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "negated": lambda x: torch._neg_view(-x),
    "negated, of one element": lambda x: torch.complex(x * 0, -x).conj().imag if x.numel() == 1 else x.clone(),
    "a lazy clone": lambda x: torch._lazy_clone(x),
    "another order": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("size", [(3, 4), (1, 1)], ids=str)
def test_strange_tensors_are_read_and_written_rightly(kind: str, size: tuple[int, int]) -> None:
    values = randn(*size, seed=0, device=DEVICE)
    sources = [values.clone() for _ in range(3)]
    param, grad, buffer = map(STRANGE[kind], sources)
    if DEVICE.type == "cuda" and (param.is_neg() or kind == "a lazy clone"):
        pytest.skip("the emulator's devices have no such tensors")
    if kind.startswith("negated") and param.is_neg():  # torch refuses to write these in lists
        for written in ({"params": [param]}, {"buffers": [buffer]}):
            with pytest.raises((RuntimeError, ValueError), match=r"negation|must not be negated"):
                stepped_with(**{"grads": [values], "params": [values.clone()], "buffers": [values.clone()]} | written)
        assert torch.equal(param, values) and torch.equal(buffer, values)
        param, buffer = values.clone(), values.clone()
    amp_kernels.sgd_([param], [grad], [buffer], lr=0.5, is_first_step=False, **OPTIONS)
    torch.testing.assert_close(buffer, 1.9 * values)
    torch.testing.assert_close(param, values - 0.95 * values)
    torch.testing.assert_close(amp_kernels.grad_norm([grad]), values.norm())
    if not grad.is_neg():
        amp_kernels.unscale_([grad], inv_scale=scalar(4.0), found_inf=scalar(0.0))
        torch.testing.assert_close(grad, 4 * values)
    if kind == "a lazy clone":
        assert all(torch.equal(source, values) for source in sources)


def test_written_tensors_may_interleave_but_not_overlap() -> None:
    both = torch.zeros(3, 2, device=DEVICE)
    ones = [torch.ones(3, device=DEVICE)] * 2
    amp_kernels.sgd_([both[:, 0], both[:, 1]], ones, [], lr=1.0, is_first_step=True, **PLAIN)
    assert both.eq(-1).all()
    rows = torch.zeros(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="must not share memory"):
        amp_kernels.sgd_(
            [rows[:, ::2]], [torch.ones(2, 2, device=DEVICE)], [rows[:, 2:]], lr=1.0, is_first_step=True, **OPTIONS
        )
    line = torch.zeros(5, device=DEVICE)
    with pytest.raises(ValueError, match="must not share memory"):
        square = line.as_strided((2, 2), (1, 1))
        amp_kernels.sgd_([square], [torch.ones(2, 2, device=DEVICE)], [], lr=1.0, is_first_step=True, **PLAIN)
    for params, grads in (([line[:3], line[2:]], ones), ([line[:3]], [ones[0]])):
        buffers = [torch.zeros(3, device=DEVICE) for _ in params] if len(params) == 2 else [line[2:]]
        with pytest.raises(ValueError, match="must not share memory"):
            amp_kernels.sgd_(params, grads, buffers, lr=1.0, is_first_step=True, **OPTIONS)
    assert line.eq(0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: stepped_with(grads=[torch.ones(4)]),
        lambda: stepped_with(grads=[]),
        lambda: stepped_with(grads=[torch.ones(3, dtype=torch.int16)]),
        lambda: stepped_with(params=[torch.ones(3, dtype=torch.int16)]),
        lambda: stepped_with(buffers=[torch.zeros(3).half()]),
        lambda: stepped_with(buffers=[]),
        lambda: stepped_with(masters=[torch.zeros(3)]),
        lambda: stepped_with(params=[torch.ones(3).half()]),
        lambda: stepped_with(params=[torch.ones(3).half()], masters=[torch.zeros(3).half()]),
        lambda: stepped_with(lr=torch.ones(2)),
        lambda: stepped_with(found_inf=torch.ones((), dtype=torch.float64)),
        lambda: adam_of(2**70),
        lambda: adam_of(-1),
        lambda: adam_of(1.5),
        lambda: adam_of(None),
        lambda: stepped_with(params=[None]),
        lambda: amp_kernels.unscale_([torch.ones(3)], inv_scale=None, found_inf=torch.zeros(())),
        lambda: amp_kernels.unscale_([torch.ones(3)], inv_scale=torch.ones(2), found_inf=torch.zeros(())),
        lambda: amp_kernels.unscale_([torch.ones(3)], inv_scale=torch.ones(()), found_inf=torch.zeros(2)),
        lambda: amp_kernels.unscale_([torch.ones(1).expand(3)], inv_scale=torch.ones(()), found_inf=torch.zeros(())),
        lambda: amp_kernels.grad_norm([torch.ones(3), 1.0]),
    ],
    ids=lambda call: " ".join(call.__code__.co_names + tuple(map(str, call.__code__.co_consts[1:]))),
)
def test_what_does_not_fit_changes_nothing(wrong: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^(sgd|adam|unscale|grad_norm)_?: "):
        wrong()


def adam_of(steps_taken: Any) -> None:
    params, grads, first, second = ([torch.ones(3)] for _ in range(4))
    options = {"eps": 1e-8, "weight_decay": 0, "maximize": False, "decoupled_weight_decay": False}
    amp_kernels.adam_(params, grads, first, second, lr=0.1, betas=(0.9, 0.99), steps_taken=steps_taken, **options)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the emulator's devices have no such tensors")
def test_scalars_without_memory() -> None:
    zero = torch._efficientzerotensor(())
    grads = [torch.tensor([1.0, math.inf])]
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        amp_kernels.unscale_(grads, inv_scale=torch.ones(()), found_inf=zero)
    grads = [torch.ones(2)]
    assert amp_kernels.grad_norm(grads, inv_scale=zero).item() == 0.0
    amp_kernels.unscale_(grads, inv_scale=zero, found_inf=torch.zeros(()))
    assert grads[0].tolist() == [0.0, 0.0]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the emulator's devices have no such tensors")
def test_tensors_without_memory() -> None:
    zeros = torch._efficientzerotensor((3,))
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        amp_kernels.unscale_([zeros], inv_scale=torch.ones(()), found_inf=torch.zeros(()))
    param, buffer = torch.ones(3), torch.ones(3)
    amp_kernels.sgd_([param], [zeros], [buffer], lr=1.0, is_first_step=False, **{**OPTIONS, "weight_decay": 0.5})
    assert buffer.unique().tolist() == [pytest.approx(1.4)] and param.unique().tolist() == [pytest.approx(-0.4)]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the emulator's devices have no such tensors")
@pytest.mark.parametrize("watched", [contextlib.nullcontext, torch.profiler.profile, lambda: use_backend("reference")])
def test_negated_states_are_refused_whoever_watches(watched: Callable[[], Any]) -> None:
    with watched(), pytest.raises(ValueError, match="must not be negated"):
        stepped_with(buffers=[torch._neg_view(torch.ones(3))])
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer, averages = FusedSGD([weight], lr=0.1), [torch.zeros(3)]
    optimizer.state[weight]["remainder"] = torch._neg_view(torch.ones(3, dtype=torch.int16))
    with watched(), pytest.raises(ValueError, match="must not be negated"):
        ema_(averages, optimizer, 0.5)
    assert averages[0].tolist() == [0.0] * 3


def stepped_with(**given: Any) -> None:
    params = given.pop("params", [torch.ones(3)])
    grads, masters = given.pop("grads", [torch.ones(3)]), given.pop("masters", [])
    buffers = given.pop("buffers", [torch.zeros(3)])
    written = [t for t in [*params, *buffers, *masters] if isinstance(t, Tensor)]
    before = [t.clone() for t in written]
    try:
        amp_kernels.sgd_(params, grads, buffers, masters, is_first_step=False, **{"lr": 0.1, **OPTIONS, **given})
    finally:
        assert all(map(torch.equal, written, before)), "something was modified"


# ------------------------------------------------------------------------------------------------------- averages
def test_the_average_of_a_weight_without_a_state() -> None:
    """Its master is the weight itself. C++ finds no remainder, and leaves the call to Python."""
    weights = [
        torch.nn.Parameter(torch.ones(3, dtype=dtype, device=DEVICE)) for dtype in (torch.float16, torch.float32)
    ]
    averages = [torch.zeros(3, device=DEVICE) for _ in weights]
    ema_(averages, FusedSGD(weights, lr=0.1), 0.5)
    assert [a.tolist() for a in averages] == [[0.5] * 3] * 2


# Another thread replaces remainders while the kernel reads them.
RACE = """
import threading, time, torch
from amp_kernels.optim import FusedSGD, ema_
n = 10_000_000  # 20 MB
p = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16))
p.grad = torch.zeros_like(p)
optimizer, average = FusedSGD([p], lr=1.0), torch.zeros(n)
optimizer.step()
stop, replaced = [False], [0]
def replace():
    while not stop[0]:
        optimizer.state[p]["remainder"] = torch.zeros(n, dtype=torch.int16)
        torch.full((n,), 77, dtype=torch.int16)
        replaced[0] += 1
        time.sleep(0.001)
thread = threading.Thread(target=replace, daemon=True)
thread.start()
while replaced[0] < 15:
    ema_([average], optimizer, 0.5)
stop[0] = True
thread.join()
assert not average.any()
"""


def test_another_thread_replaces_remainders() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------- without the reader of C++
def test_without_the_reader_operators_take_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torch 2.10, whose tensors C++ cannot read from Python objects."""
    expected = [call(gradients()) for call in CALLS.values()]
    monkeypatch.setattr(_loader, "reader", lambda: None)
    for call, results in zip(CALLS.values(), expected, strict=True):
        assert all(map(torch.equal, call(gradients()), results))


def test_a_torch_whose_dlpack_leaves_clones_lazy_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ would write memory that a lazy clone shares."""
    monkeypatch.setattr(torch_private, "is_lazy_clone", lambda tensor: torch.equal(tensor, torch.ones(4)))
    _loader.reader.cache_clear()
    try:
        assert _loader.reader() is None
    finally:
        _loader.reader.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_default_dtype_does_not_stop_the_reader(dtype: torch.dtype) -> None:
    _loader.reader.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        assert _loader.reader() is not None
    finally:
        torch.set_default_dtype(torch.float32)
        _loader.reader.cache_clear()


def test_a_torch_that_cannot_tell_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_private.is_watched()
    for name in ("_is_transforming", "_has_modes", "_is_tracing", "_is_profiling"):
        with monkeypatch.context() as patch:
            patch.setattr(torch_private, name, torch_private._watches)
            assert torch_private.is_watched()
