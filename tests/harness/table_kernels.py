"""The kernels that walk tables (csrc/table.h), by all that launches them here, and what their tests share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from arena import Arena
from cuda_on_cpu.build import missing_headers
from torch import Tensor

from amp_kernels.backends import backend_reasons

ORDERS = ("forwards", "backwards", "shuffled")
CHUNK = 1024
# Around a 16-byte access, around a chunk, and (as 33 chunks) more chunks than the emulator's grid has blocks.
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, 3 * CHUNK + 5)
LARGE = 65537  # many tiles in a large chunk, and one element more


@dataclass(frozen=True)
class Launcher:
    """Kernels of one backend on tensors of one device: C++, CUDA, CUDA on the emulator, or Triton.

    Attributes:
        order: of the emulator's threads and blocks.
    """

    backend: str
    device: str = "cpu"
    order: str | None = None

    def __str__(self) -> str:
        return f"emulator-{self.order}" if self.order else self.backend

    def arena(self, guard: int = Arena.NAN) -> Arena:
        return Arena(guard, self.device)

    def unscale_table_(self, *arguments: Any) -> None:
        self._launch("_unscale_table_", arguments)

    def update_table_(self, *arguments: Any) -> None:
        self._launch("_update_table_", arguments)

    def count_exponents_(self, *arguments: Any) -> None:
        self._launch("_count_exponents_", arguments)

    def _launch(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.order is None:
            from amp_kernels.backends import kernels

            return getattr(kernels(self.backend), name)(*arguments)
        from cuda_on_cpu import backend

        with backend.scheduled(self.order, seed=7):
            getattr(backend, name)(*arguments)


def why_not_emulated() -> str | None:
    return missing_headers() or ("Triton is interpreted here" if os.environ.get("TRITON_INTERPRET") == "1" else None)


def launchers() -> list[Launcher]:
    """Those that work in this process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [Launcher("triton")]
    if os.environ.get("AMP_KERNELS_FAKE_GPUS"):
        return [Launcher("cuda", "cuda")]
    found = [Launcher("cpu")] if backend_reasons("cpu")["cpu"] is None else []
    if why_not_emulated() is None:
        found += [Launcher("cuda", order=order) for order in ORDERS]
    if torch.cuda.is_available():
        reasons = backend_reasons("cuda")
        found += [Launcher(name, "cuda") for name in ("cuda", "triton") if reasons[name] is None]
    return found


def randn(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed * 1000 + size)).to(dtype)


def cut(numels: Sequence[int], chunk_size: int = CHUNK, first_chunk: int = 0) -> list[tuple[int, int]]:
    """(tensor, chunk of the tensor) of every chunk, those of each tensor from `first_chunk` on."""
    return [(t, first_chunk + k) for t, numel in enumerate(numels) for k in range(-(-numel // chunk_size))]


def address(tensor: Tensor | None, begin: int = 0) -> int:
    """Where an array starts whose elements from `begin` on are `tensor`; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr() - begin * tensor.element_size()
