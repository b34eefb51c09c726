"""Codes of optimizer states: each is the inverse of its decoding, and what is stored keeps the bounds of the code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

codes: Any = pytest.importorskip("amp_kernels.benchmarks.experiments.codes")  # not in a wheel
NEAREST, STOCHASTIC, SIGNED, UNSIGNED = codes.NEAREST, codes.STOCHASTIC, codes.SIGNED, codes.UNSIGNED
stored = codes.stored

MOMENTA = [codes.linear(SIGNED), codes.root(SIGNED), codes.softsign(), codes.dynamic(is_signed=True)]
SECONDS = [
    codes.linear(UNSIGNED),
    codes.dynamic(is_signed=False),
    *(make(lowest) for lowest in (0, 1) for make in (codes.fourth_root, codes.logarithmic)),
    codes.root(UNSIGNED),
    codes.root(UNSIGNED, lowest=1),
]
every_code = pytest.mark.parametrize("code", MOMENTA + SECONDS, ids=lambda code: f"{code.name}-{code.levels}")


@every_code
def test_encoding_inverts_decoding(code: Any) -> None:
    whole = torch.arange(code.levels + 1).float()
    numbers = code.decode(whole)
    assert numbers[0] == 0 and numbers[-1] == 1 and bool((numbers.diff() > 0).all())
    torch.testing.assert_close(code.encode(numbers), whole, rtol=0, atol=1e-3)


@every_code
def test_what_is_stored_lies_between_neighbours_of_the_code(code: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * 32, generator=generator).exp()
    x[:64] = 0
    if code.levels < UNSIGNED:
        x *= torch.where(torch.rand(len(x), generator=generator) < 0.5, -1.0, 1.0)
    scale = x.view(-1, 64).abs().amax(1).repeat_interleave(64)
    exact = code.encode(torch.where(scale > 0, x.abs() / scale, 0.0))
    for rounding, most in ((NEAREST, 0.501), (STOCHASTIC, 1.001)):
        kept = stored(x, code, rounding, 64, generator)
        assert torch.equal(kept[:64], torch.zeros(64)) and bool((kept * x >= 0).all())
        found = code.encode(torch.where(scale > 0, kept.abs() / scale, 0.0))
        bounded = exact[64:].clamp(min=code.lowest)
        assert (found[64:] - bounded).abs().max() <= most
        assert found[64:].min() >= code.lowest - 1e-3


def test_rounding_at_random_keeps_the_mean() -> None:
    """Here of a linear code. With a curved one the mean moves by the curvature within a step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.full((128 * 1000,), 0.3002)
    x[::128] = 1.0
    kept = stored(x, codes.linear(UNSIGNED), STOCHASTIC, 128, generator)
    assert abs(kept.mean().item() - x.mean().item()) < 3e-5
    assert abs(stored(x, codes.linear(UNSIGNED), NEAREST, 128).mean().item() - x.mean().item()) > 1e-4
