"""fp32 masters of 16-bit weights, as weight and remainder: every weight, on every backend."""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch
from table_kernels import Launcher
from test_update_table import Step, low_dtypes
from torch import Tensor

from amp_kernels import testing
from amp_kernels.reference._master import join, split
from amp_kernels.testing.common import differing

# NumPy, underneath Triton's interpreter, warns where IEEE arithmetic overflows.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
FP16, BF16 = torch.float16, torch.bfloat16


def weights(dtype: torch.dtype) -> Tensor:
    """All 65,536."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def ties(dtype: torch.dtype) -> Tensor:
    """The fp32 numbers halfway between neighbouring weights, and beyond the largest where infinity begins."""
    largest = torch.finfo(dtype).max
    finite = weights(dtype).double().unique()
    finite = finite[finite.isfinite()]
    step = finite[-1] - finite[-2]
    between = (finite[1:] + finite[:-1]) / 2
    ends = torch.tensor([-largest - step / 2, largest + step / 2], dtype=torch.float64)
    every = torch.cat([between, ends])
    assert torch.equal(every.float().double(), every)
    return every.float()


@functools.cache
def masters(dtype: torch.dtype) -> Tensor:
    """Every weight, every tie and its two fp32 neighbours, and what lies anywhere."""
    infinity, tie = torch.tensor(math.inf), ties(dtype)
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.randint(-(2**31), 2**31, (2**14,), generator=generator).to(torch.int32).view(torch.float32)
    special = torch.tensor([1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38])
    return torch.cat(
        [weights(dtype).float(), tie, tie.nextafter(infinity), tie.nextafter(-infinity), anywhere, special]
    )


# -------------------------------------------------------------------------------------------------- the specification
@low_dtypes
def test_what_is_kept_of_a_master(dtype: torch.dtype) -> None:
    given = masters(dtype)
    weight, remainder = split(given, dtype)
    kept = join(weight, remainder)
    assert remainder.dtype is torch.int16 and kept.dtype is torch.float32
    assert differing(weight, given.to(dtype)) == differing(kept.to(dtype), weight) == 0
    if dtype is BF16:
        is_even = weight.view(torch.int16) % 2 == 0
        is_moved = torch.isin(given, ties(BF16)) & is_even & weight.isfinite() & (given.abs() > weight.float().abs())
        expected = torch.where(is_moved, given.nextafter(torch.zeros(())), given)
        assert differing(kept, expected) == 0 and is_moved.sum() == 2**15 - 2**7
    else:
        is_large = given.abs() >= 2.0**-16
        expected = torch.where(weight.isfinite(), given, weight.float())
        assert differing(kept[is_large], expected[is_large]) == 0
        assert (kept - given)[~is_large & ~given.isnan()].abs().max() <= 2.0**-40


@low_dtypes
@pytest.mark.parametrize("remainder", [-32768, -32767, -20000, -8193, -1, 0, 1, 8191, 20000, 32767])
def test_any_remainder_of_any_weight(dtype: torch.dtype, remainder: int) -> None:
    """Somebody wrote the weight: the master still rounds to it."""
    weight = weights(dtype)
    assert differing(join(weight, torch.full_like(weight, remainder, dtype=torch.int16)).to(dtype), weight) == 0


@low_dtypes
def test_a_fresh_remainder_is_the_weight(dtype: torch.dtype) -> None:
    assert differing(join(weights(dtype), torch.zeros(2**16, dtype=torch.int16)), weights(dtype).float()) == 0


# --------------------------------------------------------------------------------------------------------- the kernels
def sgd(launcher: Launcher, weight: Tensor, remainder: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """``master - gradient``"""
    step = Step(launcher, "sgd", {}, (len(weight),), weight.dtype)
    for array, values in zip((step.params, step.masters, step.grads), (weight, remainder, gradient), strict=True):
        array[0].copy_(values)
    step.rates.fill_(1.0)
    step.run()
    return step.params[0].cpu(), step.masters[0].cpu()


def assert_split(found: tuple[Tensor, Tensor], master: Tensor, dtype: torch.dtype) -> None:
    """Bit for bit, NaN apart from its bits."""
    weight, remainder = split(master, dtype)
    assert differing(found[0], weight) == 0
    assert torch.equal(found[1], remainder)


@low_dtypes
def test_masters_are_split_as_specified(dtype: torch.dtype, launcher: Launcher) -> None:
    given = masters(dtype)
    zeros = torch.zeros(len(given))
    found = sgd(launcher, zeros.to(dtype), zeros.to(torch.int16), -given)
    assert_split(found, zeros - -given, dtype)


@low_dtypes
def test_masters_are_joined_as_specified(dtype: torch.dtype, launcher: Launcher) -> None:
    """Pairs that belong together, and pairs that do not."""
    weight, remainder = split(masters(dtype), dtype)
    generator = torch.Generator().manual_seed(0)
    strangers = remainder[torch.randint(len(remainder), (2**16,), generator=generator)]
    weight, remainder = torch.cat([weight, weights(dtype)]), torch.cat([remainder, strangers])
    found = sgd(launcher, weight, remainder, torch.zeros(len(weight)))
    assert_split(found, join(weight, remainder) - 0.0, dtype)


# ----------------------------------------------------------------------------------------------------------- many steps
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="takes minutes where every step is interpreted")
@pytest.mark.parametrize("op", testing.updates.CASES)
@low_dtypes
def test_three_hundred_steps(op: str, dtype: torch.dtype, device: torch.device) -> None:
    """Bit-equal to full masters that are stored as weight and remainder, and next to full masters that are not."""
    start = [testing.common.randn(2000, dtype=dtype)]
    update = testing.updates.UPDATES[op.removesuffix("_")]
    ours, stored, full = (
        testing.updates.UpdateInputs(op, start, update.examples["momentum"], device, masters=how)
        for how in ("split", "full", "full")
    )
    stored.masters[0].copy_(ours.fp32()[0])
    full.masters[0].copy_(stored.masters[0])
    for k in range(300):
        noise = testing.common.randn(2000, seed=k).to(device)
        for inputs in (ours, stored, full):
            gradient = (0.1 * noise + inputs.fp32()[0]).to(dtype)
            inputs.step([gradient], first=k == 0, lr=1e-3)
        stored.masters[0].copy_(join(*split(stored.masters[0], dtype)))
    assert torch.equal(ours.fp32()[0], stored.masters[0])
    assert torch.equal(ours.params[0], stored.params[0])
    assert (ours.fp32()[0] - full.masters[0]).abs().max() <= 1e-6
