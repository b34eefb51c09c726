"""Host words on their way to a device, as a captured graph replays them."""

from __future__ import annotations

import pytest
import torch
from arena import Arena
from cuda_on_cpu import backend
from cuda_on_cpu.build import missing_headers


@pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
@pytest.mark.parametrize("n", [0, 1, 500, 501, 4000, 4001, 4500, 4501, 12345])
def test_send(n: int) -> None:
    arena = Arena()
    values, to = arena.place(torch.arange(n)), arena.place(torch.full((n,), -1))
    backend._send_(values, to)
    arena.check()
    assert torch.equal(to, values)


def test_values_written_by_value_are_exact() -> None:
    """As under Triton, which has no kernel for it."""
    triton_kernels = pytest.importorskip("amp_kernels.triton_kernels.send")
    host = torch.tensor([0, -1, 2**53 + 1, 2**63 - 1, -(2**63), *range(700)])
    to = torch.full_like(host, -7, device="cuda" if torch.cuda.is_available() else "cpu")
    triton_kernels._write_by_value(host, to)
    assert torch.equal(to.cpu(), host)
