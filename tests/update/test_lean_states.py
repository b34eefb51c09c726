"""States of 8 and 16 bits (option `state_dtype`) on every backend.

A step of an optimizer with fp32 states, started from the same states, gives the numbers that have to be stored. The
specification (reference/states.py) says how: no code may differ.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from cuda_on_cpu import backend as emulator
from optim_cases import EXAMPLES, FULL, TORCH, randn
from table_kernels import why_not_emulated
from torch import Tensor

from amp_kernels import use_backend
from amp_kernels.ops.table import LEAST_LEAN
from amp_kernels.optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD
from amp_kernels.optim._state import flat
from amp_kernels.reference.states import MOMENTUM, SECOND_MOMENT, decode, encode, random_bits, to_bf16

FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPUS = bool(os.environ.get("AMP_KERNELS_FAKE_GPUS")) or torch.cuda.is_available()
# Elements of the largest parameter. Its last group and its last pack are not full. There are two chunks on a CPU, and
# more on a GPU. With more elements the interpreter would take minutes.
NUMEL = {"cpu": 16_505, "reference": 16_505, "cuda": 16_505, "emulator": 9_005, "triton": 5_005}
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
lean = pytest.mark.parametrize("state_dtype", [INT8, BF16], ids=["int8", "bf16"])
PLACES = ["triton"] if INTERPRETED else ["reference", *(["cuda"] if ON_GPUS else ["cpu", "emulator"])]


class Place(NamedTuple):
    device: str
    numel: int


@pytest.fixture(params=PLACES)
def place_(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Optimizers run on the backend of the parameter."""
    with contextlib.ExitStack() as stack:
        if request.param == "emulator":
            if why_not_emulated() is not None:
                pytest.skip(str(why_not_emulated()))
            stack.enter_context(emulator.serving())
            stack.enter_context(emulator.scheduled("shuffled"))
        else:
            stack.enter_context(use_backend(request.param))
        yield Place("cuda" if ON_GPUS else "cpu", NUMEL[request.param])


@pytest.fixture
def device(place_: Place) -> str:
    return place_.device


def placed(x: Tensor, layout: str, device: str) -> Tensor:
    """`x`, on the device in this layout."""
    if layout == "transposed":
        return x.to(device).view(-1, 5).t().contiguous().t() if x.numel() % 5 == 0 else x.to(device)
    bucket = torch.zeros(x.numel() + 3, dtype=x.dtype, device=device)
    begin = 1 if layout == "in a bucket" else 0
    return bucket[begin : begin + x.numel()].copy_(x)


def make(
    family: Any, options: dict[str, Any], dtype: torch.dtype, state_dtype: torch.dtype, layout: str, place: Place
) -> Any:
    """An optimizer over a small parameter and two large ones."""
    values = [randn(size, seed=i, dtype=dtype) for i, size in enumerate((5, place.numel, LEAST_LEAN + 1))]
    params = [torch.nn.Parameter(placed(x, layout, place.device)) for x in values]
    return family(params, state_dtype=state_dtype, **options)


def set_grads(optimizer: Any, step: int, layout: str, dtype: torch.dtype | None = None) -> None:
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        grad = randn(p.numel(), seed=100 * step + i, dtype=dtype or p.dtype)
        grad[130:300] = 0.0
        grad[300:400] *= 1e-30
        p.grad = placed(grad, layout, str(p.device)).view_as(p)


def twin(optimizer: Any, options: dict[str, Any]) -> Any:
    """An optimizer with fp32 states, and with the values of this one."""
    params = [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
    other = type(optimizer)(params, **options)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(optimizer.param_groups[0]["params"], params, strict=True):
        q.grad_dtype = p.grad.dtype
        q.grad = p.grad
    return other


def expected(state: Tensor, name: str, state_dtype: torch.dtype, step: int, column: int, k: int) -> list[Tensor]:
    """The tensors in which a state has to be stored after `step` updates."""
    bits = random_bits(state.numel(), step, column, state.device)[k]
    if state_dtype is BF16:
        return [to_bf16(flat(state), bits)]
    return list(encode(flat(state), SECOND_MOMENT if "sq" in name else MOMENTUM, bits))


def assert_alike(ours: Tensor, theirs: Tensor) -> None:
    """Equal, except on a real GPU. There nvcc fuses products and sums, so that a code may differ by one."""
    if torch.cuda.is_available() and not os.environ.get("AMP_KERNELS_FAKE_GPUS"):
        apart = (ours.float() - theirs.float()).abs()
        assert (apart > 0).float().mean() < 1e-3
        assert ours.dtype.is_floating_point or apart.max() <= 1
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def check_step(optimizer: Any, options: dict[str, Any], state_dtype: torch.dtype, steps: int) -> None:
    """Takes a step, and compares everything that it stores. `steps` updates were taken before."""
    exact = twin(optimizer, options)
    optimizer.step()
    exact.step()
    names = optimizer._state_names(optimizer.param_groups[0])
    in_fewer_bits = optimizer._family.coded(names)
    params = optimizer.param_groups[0]["params"], exact.param_groups[0]["params"]
    for column, (p, q) in enumerate(zip(*params, strict=True)):
        assert_alike(p.detach(), q.detach())
        assert_alike(optimizer.master(p), exact.master(q))
        if "remainder" in optimizer.state[p]:
            assert_alike(optimizer.state[p]["remainder"], exact.state[q]["remainder"])
        for k, name in enumerate(names):
            if name is None:
                continue
            state, stored = exact.state[q][name], optimizer.state[p]
            if p.numel() < LEAST_LEAN or not in_fewer_bits >> k & 1:
                assert_alike(stored[name], state)
                continue
            keys = [name] if state_dtype is BF16 else [f"{name}_codes", f"{name}_scale"]
            assert not {name, f"{name}_codes", f"{name}_scale"} - set(keys) & stored.keys()
            wanted = expected(state, name, state_dtype, steps, column, k)
            for key, value in zip(keys, wanted, strict=True):
                assert_alike(flat(stored[key]), value)
        assert int(optimizer.state[p]["step"]) == steps + 1


# Two examples of each family reach every way through the kernels of a backend.
EVERY = [
    pytest.param(place, family, options, id=f"{place}-{family.__name__}-{name}")
    for place in PLACES
    for family in TORCH
    for name, options in EXAMPLES[family].items()
    if (family is not FusedSGD or "momentum" in options) and (place == "cpu" or name in ("plain", "full"))
]


@lean
@pytest.mark.parametrize(("place_", "family", "options"), EVERY, indirect=["place_"])
def test_a_step_stores_what_the_specification_says(place_, family, options, state_dtype):
    optimizer = make(family, options, FP32, state_dtype, "dense", place_)
    for step in range(2):
        set_grads(optimizer, step, "dense")
        check_step(optimizer, options, state_dtype, step)


@lean
@pytest.mark.parametrize("layout", ["in a bucket"] if INTERPRETED else ["dense", "in a bucket", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", [FusedSGD] if INTERPRETED else [FusedSGD, FusedAdam])
def test_weights_of_16_bits_and_layouts(place_, family, dtype, layout, state_dtype):
    options = {**FULL[family], "amsgrad": False} if family is FusedAdam else FULL[family]
    optimizer = make(family, options, dtype, state_dtype, layout, place_)
    for step in range(2):
        set_grads(optimizer, step, "in a bucket" if layout == "dense" and step else layout)
        check_step(optimizer, options, state_dtype, step)


@lean
@pytest.mark.skipif(INTERPRETED, reason="The plan converts such gradients. It is the same for every backend.")
@pytest.mark.parametrize("grads", [torch.float16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["weight-fp32", "weight-bf16"])
def test_gradients_of_another_dtype(place_, dtype, grads, state_dtype):
    optimizer = make(FusedAdam, {"lr": 0.1}, dtype, state_dtype, "dense", place_)
    for p in optimizer.param_groups[0]["params"]:
        p.grad_dtype = grads
    for step in range(2):
        set_grads(optimizer, step, "dense", grads)
        check_step(optimizer, {"lr": 0.1}, state_dtype, step)


@lean
@pytest.mark.skipif(INTERPRETED, reason="Triton has one way to split and join, for all states")
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["fp16", "bf16"])
def test_masters_at_the_edges(place_, dtype, state_dtype):
    """Masters halfway between two weights, beyond 65504, and of weights that other code wrote; and a NaN.

    On a GPU, a pack with such a master is computed once more, by slower code (redo() in update_lean.cuh).
    """
    options = {"lr": 1.0, "momentum": 0.9}
    optimizer = make(FusedSGD, options, dtype, state_dtype, "dense", place_)
    steps = torch.tensor([2.0**-11, 3 * 2.0**-11, 2.0**-8, 3 * 2.0**-8, 2.0**-12, 0.0, 3e4, -2.0])
    for step in range(3):
        for p in optimizer.param_groups[0]["params"]:
            which = torch.arange(p.numel()) * (2 * step + 1) % 11 % 8
            if step == 0:
                p.data = torch.where(which == 6, 4e4, 1.0).to(p)
            else:
                p.data[step::7] = 2.0 if dtype is torch.float16 else 1 + 2.0**-7  # some remainders do not fit
            p.grad = -steps[which].to(p)
            if step == 2:
                p.grad[p.numel() // 2] = math.nan
        check_step(optimizer, options, state_dtype, step)


EXTREMES = {
    "zeros": (0.0,),
    "smallest": (2.0**-149, 0.0),
    "subnormal": (1e-40, 3e-39, -2e-42),
    "least scale": (2.0**-90, 2.0**-91, -(2.0**-97)),
    "squares below the least scale": (2.0**-46, -(2.0**-60), 2.0**-74),
    "largest": (3.4e38, -1.0, 1e-38),
    "apart": (1.0, -1e-9, 1e-5),
    "nan": (1.0, math.nan),
    "inf": (-math.inf, 2.0),
}


@lean
@pytest.mark.parametrize("family", [FusedSGD, FusedRMSprop])
def test_groups_of_extreme_numbers(device, family, state_dtype):
    """The momentum after the first step of SGD is the gradient. With alpha = 0, RMSprop's average is its square."""
    options = {"momentum": 0.9} if family is FusedSGD else {"alpha": 0.0}
    name, code = ("momentum_buffer", MOMENTUM) if family is FusedSGD else ("square_avg", SECOND_MOMENT)
    values = torch.cat([torch.tensor(v).repeat(64)[:128] for v in EXTREMES.values()])
    grad = values.repeat(5)[: LEAST_LEAN + 3]
    param = torch.nn.Parameter(torch.zeros(grad.numel(), device=device))
    optimizer = family([param], lr=0.0, state_dtype=state_dtype, **options)
    param.grad = grad.to(device)
    optimizer.step()
    state, bits = optimizer.state[param], random_bits(grad.numel(), 0, 0, param.grad.device)[0]
    exact = param.grad if family is FusedSGD else param.grad * param.grad
    if state_dtype is BF16:
        torch.testing.assert_close(state[name], to_bf16(exact, bits), rtol=0, atol=0, equal_nan=True)
        return
    codes, scale = encode(exact, code, bits)
    torch.testing.assert_close(state[f"{name}_scale"], scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(state[f"{name}_codes"], codes)
    decoded = decode(codes, scale, code)
    assert torch.equal(decoded.isnan(), ~torch.isfinite(scale).repeat_interleave(128)[: grad.numel()])
    again = encode(decoded, code)
    assert torch.equal(again[0], codes)
    torch.testing.assert_close(again[1], scale, rtol=0, atol=0, equal_nan=True)
    if family is FusedRMSprop:
        assert not ((codes == 0) & (scale > 0).repeat_interleave(128)[: grad.numel()]).any()


@pytest.mark.parametrize("payload", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], ids=hex)
def test_a_nan_of_any_payload_is_a_nan_in_bf16(device, payload):
    """Rounded as numbers, these could become -0, 0 and infinity."""
    param = torch.nn.Parameter(torch.zeros(LEAST_LEAN, device=device))
    optimizer = FusedSGD([param], lr=0.0, momentum=0.9, state_dtype=BF16)
    nan = (payload + 2**31) % 2**32 - 2**31  # as an int32
    param.grad = torch.full((LEAST_LEAN,), nan, dtype=torch.int32, device=device).view(torch.float32)
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter a minute")
@pytest.mark.parametrize("family", [FusedSGD, FusedRMSprop])
def test_the_largest_magnitude_has_the_largest_code(device, family):
    """Even if scale * (1 / scale) is below 1, and the random bits of the element are all 0. And if they are all 1."""
    every = torch.linspace(1, 2, 10_000)
    every = (
        every[(every * every) * (1 / (every * every)) < 1] if family is FusedRMSprop else every[every * (1 / every) < 1]
    )
    numel = 300_000
    bits = random_bits(numel, 0, 0, torch.device("cpu"))[0]
    where = ((bits == 0) | (bits == 0xFFFF)).nonzero().flatten()
    assert len(bits[where].unique()) == 2 and len(every) > 100
    grad = torch.full((numel,), 0.125)
    grad[where] = every[0]
    param = torch.nn.Parameter(torch.zeros(numel, device=device))
    param.grad = grad.to(device)
    options = {"momentum": 0.9} if family is FusedSGD else {"alpha": 0.0}
    optimizer = family([param], lr=0.0, state_dtype=INT8, **options)
    optimizer.step()
    codes = optimizer.state[param]["momentum_buffer_codes" if family is FusedSGD else "square_avg_codes"]
    assert set(codes[where].tolist()) == {127 if family is FusedSGD else 255}


@lean
@pytest.mark.parametrize("found", [2.0] if INTERPRETED else [1.0, 2.0, math.nan])
def test_a_skipped_step_changes_nothing(place_, found, state_dtype):
    optimizer = make(FusedAdamW, {"lr": 0.1}, BF16, state_dtype, "dense", place_)
    set_grads(optimizer, 0, "dense")
    optimizer.step()
    before = [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]
    set_grads(optimizer, 1, "dense")
    optimizer.grad_scale = torch.ones((), device=place_.device)
    optimizer.found_inf = torch.tensor(found, device=place_.device)
    optimizer.step()
    for state, old in zip(optimizer.state.values(), before, strict=True):
        for key, value in state.items():
            assert torch.equal(value, old[key]), key


@lean
@pytest.mark.parametrize("moved", ["exp_avg", "remainder"])
def test_states_that_are_not_aligned(place_, moved, state_dtype):
    """States are not aligned, for example, if other code has read a checkpoint into one buffer."""
    optimizer = make(FusedAdam, {"lr": 0.1}, BF16, state_dtype, "dense", place_)
    set_grads(optimizer, 0, "dense")
    optimizer.step()
    for state in optimizer.state.values():
        for key in [key for key in state if key in (moved, f"{moved}_codes")]:
            state[key] = placed(state[key].flatten(), "in a bucket", place_.device)
    set_grads(optimizer, 1, "dense")
    check_step(optimizer, {"lr": 0.1}, state_dtype, 1)


@lean
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_elements_beyond_the_tensor_do_not_count(place_, momentum, state_dtype):
    """With eps = 0 the update of an element that is all zeros is NaN, and must not reach the scale of its group."""
    param = torch.nn.Parameter(torch.ones(LEAST_LEAN + 3, device=place_.device))
    param.grad = torch.ones_like(param)
    optimizer = FusedRMSprop([param], lr=0.1, eps=0.0, momentum=momentum, state_dtype=state_dtype)
    optimizer.step()
    optimizer.step()
    assert all(value.isfinite().all() for value in (param, *optimizer.state[param].values()))


# -------------------------------------------------------------------------------------------- averages that move slowly
# As in benchmarks/experiments/state_codes.py. There independent random numbers round in plain torch, and the error of a
# second moment in these codes is 0.11 to 0.17 at random, and 0.50 to 0.71 to nearest.
def magnitudes() -> Tensor:
    """Gradients whose magnitudes are log-normal."""
    return randn(LEAST_LEAN, seed=5).exp() * randn(LEAST_LEAN, seed=6).sign()


# Every backend has the same bits, so this is tried on one.
@pytest.mark.skipif(INTERPRETED or ON_GPUS, reason="runs where CPU kernels run")
@lean
def test_a_slow_second_moment_follows_its_gradients(state_dtype):
    """Half of them become 30 % larger, for 1400 steps. Rounded to nearest, most elements would not move at all."""
    grad = magnitudes()
    param = torch.nn.Parameter(torch.zeros(LEAST_LEAN))
    optimizer = FusedRMSprop([param], lr=0.0, alpha=0.999, state_dtype=state_dtype)
    param.grad = grad.clone()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["square_avg"] = grad * grad
    optimizer.load_state_dict(saved)
    half = torch.arange(LEAST_LEAN) % 2 == 0
    param.grad[half] *= 1.3
    for _ in range(1400):
        optimizer.step()
    rise = 1 + (1 - 0.999**1400) * (1.3**2 - 1)
    moved = optimizer.state_dict()["state"][0]["square_avg"][half]
    exact = grad[half].double().square() * rise
    error = (moved.double().sqrt() / exact.sqrt() - 1).square().mean().sqrt()
    assert error / (1 - rise**-0.5) <= 0.2


@pytest.mark.skipif(INTERPRETED or ON_GPUS, reason="runs where CPU kernels run")
@lean
def test_a_momentum_ends_with_its_gradients(state_dtype):
    """Half of the gradients become 0, and the weights move by the rest of the momentum: in sum 9 times as far."""
    grad = magnitudes()
    param = torch.nn.Parameter(torch.zeros(LEAST_LEAN))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.9, dampening=0.1, state_dtype=state_dtype)
    param.grad = grad.clone()
    optimizer.step()
    half = torch.arange(LEAST_LEAN) % 2 == 0
    param.grad[half] = 0.0
    with torch.no_grad():
        param.zero_()
    for _ in range(300):
        optimizer.step()
    assert abs((param[half] * grad[half].sign()).sum() / (-9 * grad[half].abs().sum()) - 1) <= 0.05
