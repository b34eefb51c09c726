"""Counts of the updates that 16-bit weights would lose without a master (`Plan.count_updates`), on every backend.

Expected counts are computed from the masters before and after a real step. No count may differ.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_on_cpu import backend as emulator
from optim_cases import EXAMPLES, FULL, randn
from table_kernels import CHUNK, Launcher, why_not_emulated
from test_update_table import Step
from torch import Tensor

from amp_kernels import GradScaler, use_backend
from amp_kernels.families import FAMILIES
from amp_kernels.ops.table import DTYPE_CODES, LEAST_LEAN, STATE_DTYPES
from amp_kernels.optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD
from amp_kernels.optim._plan import NativePlan, Plan
from amp_kernels.optim._reference_plan import ReferencePlan
from amp_kernels.reference._master import count_lost

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
FP32, FP16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ARE_FAKE = bool(os.environ.get("AMP_KERNELS_FAKE_GPUS"))
ON_GPUS = ARE_FAKE or torch.cuda.is_available()
PLACES = ["reference", *(["cuda"] if ARE_FAKE else ["cuda", "triton"] if ON_GPUS else ["cpu", "emulator"])]
PLACES = ["triton"] if INTERPRETED else PLACES
low_dtypes = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of parameters. Their optimizers run on the backend of the test."""
    with contextlib.ExitStack() as stack:
        if request.param == "emulator":
            if why_not_emulated() is not None:
                pytest.skip(str(why_not_emulated()))
            stack.enter_context(emulator.serving())
            stack.enter_context(emulator.scheduled("shuffled"))
        else:
            stack.enter_context(use_backend(request.param))
        yield "cuda" if ON_GPUS else "cpu"


# ---------------------------------------------------------------------------------------------- counts of a whole step
def parameters(dtype: torch.dtype, device: str, large: int = 700) -> list[torch.nn.Parameter]:
    """Parameters of every layout; the third is fp32. The first and the last have `large` elements or more."""
    bucket = randn(3000, seed=1, dtype=dtype, device=device)
    made = [
        randn(large + 133, seed=0, dtype=dtype, device=device),  # its last group and its last pack are not full
        bucket[1:1261].view(3, -1),
        randn(7, seed=2, device=device),
        bucket[1263:1268],
        randn(2, 3, 5, 11, seed=3, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last),
        randn(0, seed=4, dtype=dtype, device=device),
        randn(39, 3, seed=5, dtype=dtype, device=device)[:, 1],  # kernels update a copy of it
        randn(12, seed=6, dtype=dtype, device=device),  # never has a gradient
        randn(large, seed=7, dtype=dtype, device=device),  # all of its gradients are misaligned
    ]
    return [torch.nn.Parameter(x) for x in made]


WITHOUT_GRADIENT, MISALIGNED = 7, 8


def set_grads(
    params: list[torch.nn.Parameter], step: int, dtype: torch.dtype | None = None, scale: float = 1.0
) -> None:
    for i, p in enumerate(params):
        p.grad, p.grad_dtype = None, dtype or p.dtype
        if i == WITHOUT_GRADIENT or (i == 0 and step == 1):
            continue
        grad = scale * randn(p.numel() + 1, seed=100 * step + i, device=p.device)
        grad[::3] *= 2.0**-8
        grad = grad.to(dtype or p.dtype)
        p.grad = (
            grad[1:].view_as(p) if i == MISALIGNED else torch.empty_like(p, dtype=grad.dtype).copy_(grad[1:].view_as(p))
        )


def tensors_of(optimizer: Any) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return [t for t in (*params, *(p.grad for p in params if p.grad is not None), *states) if isinstance(t, Tensor)]


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@contextlib.contextmanager
def counting(optimizer: Any) -> Iterator[list[Tensor]]:
    """Inside the ``with`` block, each update is counted before it. The counts are in the list."""
    counts: list[Tensor] = []

    def counted(update: Callable[..., None]) -> Callable[..., None]:
        def count_and_update(self: Plan, *arguments: Any) -> None:
            before = bits(tensors_of(optimizer))
            counts.append(self.count_updates(*arguments).cpu())
            assert bits(tensors_of(optimizer)) == before  # counting has written nothing
            update(self, *arguments)

        return count_and_update

    with pytest.MonkeyPatch.context() as patch:
        for kind in (NativePlan, ReferencePlan):
            patch.setattr(kind, "update", counted(kind.update))
        yield counts


def check(optimizer: Any, params: list[torch.nn.Parameter], step: Callable[[], object]) -> Tensor:
    """Takes a step, and returns what was counted, after a comparison with the masters."""
    before = [(p.detach().clone(), optimizer.master(p).clone()) for p in params]
    with counting(optimizer) as counts:
        step()
    expected = torch.zeros(len(params), 2, dtype=torch.int64)
    for row, p, (weight, master) in zip(expected, params, before, strict=True):
        if p.dtype is not FP32:
            row[:] = count_lost(weight, master, optimizer.master(p)).cpu()
    assert len(counts) == 1
    assert counts[0].tolist() == expected.tolist()
    return counts[0]


def overwrite(params: list[torch.nn.Parameter]) -> None:
    """Writes weights as other code does. Some remainders do not fit then."""
    for i, p in enumerate(params):
        p.data[i % 5 :: 7] = 1.5


def slowed(examples: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """With rates at which a part of the updates is lost."""
    return {name: {**options, "lr": options["lr"] / 16} for name, options in examples.items()}


CASES = [
    pytest.param(
        place, family, options, dtype, id=f"{place}-{family.__name__}-{name}-{'fp16' if dtype is FP16 else 'bf16'}"
    )
    for place in PLACES
    for family, every in EXAMPLES.items()
    for name, options in slowed(every).items()
    for dtype in (FP16, BF16)
    # On the emulator and in the interpreter, a case takes tenths of a second.
    if place in ("cpu", "cuda") or (dtype is FP16) == (family in (FusedSGD, FusedAdamW))
    if place in ("cpu", "cuda", "emulator") or (name == "full" and family is not FusedAdam)
]


@pytest.mark.parametrize(("where", "family", "options", "dtype"), CASES, indirect=["where"])
def test_counts_are_those_of_the_step(where, family, options, dtype):
    params = parameters(dtype, where)
    optimizer = family(params, **options)
    for step in range(INTERPRETED, 3):
        set_grads(params, step)
        if step == 2:
            overwrite(params)
            params[1].grad.view(-1)[40] = math.nan
        counts = check(optimizer, params, optimizer.step)
    assert counts[:, 0].sum() > counts[:, 1].sum() > 5


LEAN = [
    (FusedSGD, {"lr": 0.01, "momentum": 0.9}),
    (FusedRMSprop, {"lr": 0.001}),
    (FusedRMSprop, {**FULL[FusedRMSprop], "lr": 0.001}),
    (FusedAdam, {**FULL[FusedAdam], "lr": 0.001}),
    (FusedAdamW, {"lr": 0.001}),
]


@pytest.mark.parametrize(
    ("family", "options"), LEAN[::2] if INTERPRETED else LEAN, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("state_dtype", [INT8, BF16], ids=["int8", "bf16"])
def test_states_of_8_and_16_bits(where, family, options, state_dtype):
    if INTERPRETED and (family is FusedSGD or (state_dtype is BF16) != (family is FusedRMSprop)):
        pytest.skip("takes the interpreter seconds")
    dtype, grads = (BF16, None) if state_dtype is INT8 else (FP16, FP32)
    params = parameters(dtype, where, LEAST_LEAN)
    optimizer = family(params, state_dtype=state_dtype, **options)
    for step in range(INTERPRETED, 3):
        set_grads(params, step, grads)
        counts = check(optimizer, params, optimizer.step)
    assert counts[:, 0].sum() > counts[:, 1].sum() > 5


@pytest.mark.parametrize("max_grad_norm", [2.0] if INTERPRETED else [None, 2.0])
def test_under_a_scaler(where, max_grad_norm):
    """Gradients are unscaled and clipped before they are counted. A skipped step counts nothing."""
    params = parameters(BF16, where)
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9, max_grad_norm=max_grad_norm)
    scaler = GradScaler(where, init_scale=1024.0)
    for step in range(3):
        set_grads(params, step, scale=1024.0)
        if step == 1:
            params[3].grad[2] = math.inf
        scaler.scale(torch.zeros((), device=where))
        counts = check(optimizer, params, lambda: scaler.step(optimizer))
        scaler.update(1024.0)
        assert (counts.sum() == 0) == (step == 1)


def test_groups_have_their_own_options(where):
    params = parameters(FP16, where)
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": torch.tensor(0.25), "momentum": 0.0}]
    optimizer = FusedSGD(groups, lr=0.01, momentum=0.9, nesterov=False)
    for step in range(2):
        set_grads(params, 2 * step, FP32 if step else None)
        check(optimizer, params, optimizer.step)


# ------------------------------------------------------------------------------------------------------- what is lost
# An update of a weight of 1, whose neighbours are 1 - ulp / 2 and 1 + ulp. In ulps of the weight: where its master is,
# what is added to it, and whether that is lost.
ULP = {FP16: 2.0**-10, BF16: 2.0**-7}
UPDATES = [
    (0, 0, False),  # nothing is changed
    (0, 1 / 64, True),
    (0, 1 / 2, True),  # a tie goes to the even weight
    (0, 1 / 2 + 1 / 64, False),
    (0, -1 / 64, True),
    (0, -1 / 4, True),
    (0, -1 / 4 - 1 / 64, False),
    (1 / 4, 3 / 8, True),  # the weight becomes 1 + ulp because of its master
    (1 / 4, 1 / 2 + 1 / 64, False),
    (1 / 4, -1 / 4, True),  # the master becomes the weight
    (-1 / 8, -3 / 16, True),
    (3 / 8, -5 / 8, False),  # the weight stays 1 because of its master
]


@low_dtypes
def test_what_is_lost(where, dtype):
    place, add, lost = torch.tensor(UPDATES).unbind(1)
    params = [torch.nn.Parameter(torch.ones(len(UPDATES), dtype=dtype, device=where))]
    optimizer = FusedSGD(params, lr=1.0)
    for distance in (place, add):
        params[0].grad, params[0].grad_dtype = None, FP32
        params[0].grad = (-ULP[dtype] * distance).to(where)
        assert torch.equal(params[0].detach().float().cpu(), torch.ones(len(UPDATES)))
        counts = check(optimizer, params, optimizer.step)
    assert counts.tolist() == [[int((add != 0).sum()), int(lost.sum())]]


# --------------------------------------------------------------------------------------------- tables between guards
def count(step: Step, **scalars: float) -> Tensor:
    """Counts what `step.run(**scalars)` will change. Compares the whole memory before and after."""
    place = step.arena.place
    given = [scalars.get(name) for name in ("grad_scale", "found_inf", "grad_norm")]
    pointers = [None if value is None else place(torch.tensor([value]))[0] for value in given]
    rates = place(torch.tensor([rate.data_ptr() for rate in step.rates]))
    table, counts = step.table(), place(torch.full((len(step.params), 2), 5, dtype=torch.int64))
    form = (DTYPE_CODES[step.param_dtype], step.split, DTYPE_CODES[step.grad_dtype], step.present(), STATE_DTYPES[FP32])
    frozen = step.arena.bytes()
    step.launcher.count_updates_(
        step.family, table, step.chunks, step.chunk, step.hyper, rates, *form, *pointers, scalars.get("max_norm", 0.0),
        counts,
    )  # fmt: skip
    found = counts.cpu() - 5  # counts are added
    counts.fill_(5)
    assert torch.equal(step.arena.bytes(), frozen)
    step.arena.check()
    return found


def compare(step: Step, **scalars: float) -> Tensor:
    found, weights = count(step, **scalars), [p.clone() for p in step.params]
    step.run(**scalars)
    masters = zip(weights, step.before, step.fp32(), strict=True)
    expected = [count_lost(weight.cpu(), before, after.cpu()).tolist() for weight, before, after in masters]
    assert found.tolist() == expected
    return found


# Around a pack, and around a chunk; the second tensor has no gradient.
SIZES = (0, 3, 9, 2 * CHUNK - 1, 2 * CHUNK, 4 * CHUNK + 5)


@pytest.mark.parametrize(("offset", "first_chunk"), [(0, 0), (1, 0), (0, 2**20)])
@pytest.mark.parametrize("family", ["adam"] if INTERPRETED else FAMILIES)
def test_only_the_arrays_are_read(family: str, offset: int, first_chunk: int, launcher: Launcher) -> None:
    dtypes = (FP16, FP32) if offset else (BF16, BF16)
    sizes = SIZES[:5] if INTERPRETED else SIZES
    step = Step(launcher, family, None, sizes, *dtypes, without_grad=(1,), first_chunk=first_chunk, offset=offset)
    assert (compare(step).sum(0) > 0).all()


def test_same_counts_in_every_order(ordered_launcher: Launcher) -> None:
    assert (compare(Step(ordered_launcher, "sgd", None, (2 * CHUNK + 5, 70), FP16, BF16)).sum(0) > 0).all()


def test_states_that_are_not_in_the_table(launcher: Launcher) -> None:
    """The table ends after the rows that every tensor has."""
    step = Step(launcher, "adam", {}, (700,), BF16, BF16)
    rows = step.table
    step.table = lambda: step.arena.place(rows()[:9].clone())  # type: ignore[method-assign]
    compare(step)


@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0, math.nan])
def test_a_skipped_step_counts_nothing(found_inf: float, launcher: Launcher) -> None:
    found = compare(Step(launcher, "sgd", {}, (700,), BF16, BF16), found_inf=found_inf, grad_norm=2.0, max_norm=1.0)
    assert bool(found.any()) == (found_inf == 0)


@pytest.mark.skipif(INTERPRETED, reason="the C++ operators refuse other forms")
def test_parameters_without_remainders_are_refused(launcher: Launcher) -> None:
    step = Step(launcher, "sgd", {}, (7,))
    with pytest.raises((ValueError, RuntimeError), match="16-bit weights with remainders"):
        count(step)
