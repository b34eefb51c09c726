"""What is special to `sgd_`, on every backend; what it has in common with `rmsprop_` is in test_updates.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from amp_kernels import sgd_, testing

DAMPENED: dict[str, Any] = {
    "lr": 1.0, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.0, "nesterov": False, "maximize": False,
}  # fmt: skip
PLAIN = DAMPENED | {"momentum": 0.0, "dampening": 0.0}


def test_the_first_step_ignores_dampening_and_the_buffer(device: torch.device) -> None:
    p, buffer = torch.zeros(3, device=device), torch.full((3,), math.nan, device=device)
    sgd_([p], [torch.ones(3, device=device)], [buffer], is_first_step=True, **DAMPENED)
    assert buffer.tolist() == [1.0] * 3 and p.tolist() == [-1.0] * 3


def test_without_momentum_the_buffer_is_ignored(device: torch.device) -> None:
    p, buffer = torch.zeros(3, device=device), torch.full((3,), 2.0, device=device)
    sgd_([p], [torch.ones(3, device=device)], [buffer], is_first_step=False, **PLAIN | {"dampening": 0.5})
    assert buffer.tolist() == [2.0] * 3 and p.tolist() == [-1.0] * 3


def test_later_steps_read_the_buffer(device: torch.device) -> None:
    p, buffer = torch.zeros(3, device=device), torch.full((3,), 2.0, device=device)
    sgd_([p], [torch.ones(3, device=device)], [buffer], is_first_step=False, **DAMPENED)
    assert buffer.tolist() == [1.5] * 3 and p.tolist() == [-1.5] * 3


def test_nesterov_without_momentum_is_plain(device: torch.device) -> None:
    p = torch.zeros(3, device=device)
    sgd_([p], [torch.ones(3, device=device)], [], is_first_step=True, **PLAIN | {"nesterov": True})
    assert p.tolist() == [-1.0] * 3


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_written_past_the_caches(dtype: torch.dtype, offset: int, backend: str, device: torch.device) -> None:
    """From 2^22 elements on the C++ kernel streams 16-bit weights; neighbours of the parameter are canaries."""
    if backend == "triton" and device.type == "cpu":
        pytest.skip("the interpreter takes minutes, and the path is that of C++")
    size = (1 << 22) + 5
    storage = torch.full((offset + size + 16,), 7.0, dtype=dtype, device=device)
    param = storage[offset : offset + size]
    param.copy_(testing.common.randn(size, dtype=dtype))
    master, grad = param.float(), testing.common.randn(size, dtype=dtype, seed=1).to(device)
    expected = master - grad.float()
    sgd_([param], [grad], [], [master], is_first_step=True, **PLAIN)
    torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(param, master.to(dtype))
    assert bool((storage[:offset] == 7).all() and (storage[offset + size :] == 7).all())
