"""`amp_kernels._C` has no code for the second GPU of this machine. Triton launches on fake_cuda's libcuda.

A process of its own (test_fake_gpus.py): which GPUs have kernels is asked once in a process. What Triton launches runs
nothing, so that results are not looked at.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import fake_gpus_cases as cases
import pytest
import torch
from cuda_on_cpu import torch_device

import amp_kernels
from amp_kernels import backends

HAS_TRITON = os.environ["AMP_KERNELS_FAKE_GPUS"] != "without-triton"
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
OF_THE_REFERENCE = ("count_exponents_", "matmul")  # operators without a Triton kernel


@pytest.fixture(scope="module")
def libcuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_launches.restype = ctypes.c_long
    library.fake_set_devices(2, (ctypes.c_int * 2)(90, 75))
    torch_device.follow(library)
    return library


def reset() -> None:
    torch_device.reset()
    torch_device.describe(1, compute_capability=75, has_kernels=False)


@pytest.fixture(autouse=True)
def mixed(fake_gpus: Any) -> None:
    reset()


def test_reasons() -> None:
    assert backends.backend_reasons(FIRST)["cuda"] is None
    reason = backends.backend_reasons(SECOND)["cuda"]
    assert reason is not None and reason.startswith("amp_kernels._C cannot run on fake GPU 1 (no kernel image is")
    assert backends.select(FIRST) == "cuda"
    with amp_kernels.use_backend("cuda"), pytest.raises(RuntimeError, match="cannot run on fake GPU 1"):
        amp_kernels.quantize_int8(cases.matrix("cuda:1"))


@pytest.mark.skipif(not HAS_TRITON, reason="triton is hidden")
@pytest.mark.parametrize("name", cases.CALLS)
@pytest.mark.filterwarnings("error:amp_kernels runs its slow reference")
def test_every_operator_runs_on_triton_where_nothing_was_compiled(fake_gpus: Any, libcuda: Any, name: str) -> None:
    assert backends.select(SECOND) == "triton"
    before = libcuda.fake_launches()
    cases.CALLS[name]("cuda:0")
    assert libcuda.fake_launches() == before and fake_gpus.launches(0) != {}
    reset()
    cases.CALLS[name]("cuda:1")
    assert (libcuda.fake_launches() > before) == (name not in OF_THE_REFERENCE)
    assert fake_gpus.launches(0) == fake_gpus.launches(1) == {}
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(HAS_TRITON, reason="triton is there")
@pytest.mark.parametrize("name", cases.CALLS)
@pytest.mark.filterwarnings("ignore:amp_kernels runs its slow reference")
def test_every_operator_runs_on_the_reference_without_triton(fake_gpus: Any, name: str) -> None:
    assert backends.select(SECOND) == "reference"
    result = cases.CALLS[name]("cuda:1")
    assert fake_gpus.launches(0) == fake_gpus.launches(1) == {}
    expected = cases.CALLS[name]("cuda:0")
    torch.testing.assert_close(result.cpu(), expected.cpu(), rtol=2e-3, atol=1e-5)


def counts(fake_gpus: Any, libcuda: Any, call: Callable[[], object]) -> tuple[bool, bool]:
    """Whether `call` launches kernels of `amp_kernels._C` on the first GPU, and of Triton."""
    reset()
    before = libcuda.fake_launches()
    with fake_gpus.planning():
        call()
    return fake_gpus.launches(0) != {}, libcuda.fake_launches() > before


@pytest.mark.skipif(not HAS_TRITON, reason="triton is hidden")
@pytest.mark.parametrize("multiply", [cases.multiply, cases.multiply_by_operator])
def test_large_products_of_codes_are_those_of_triton(fake_gpus: Any, libcuda: Any, multiply: Any) -> None:
    """On sm_90, where they were measured to be faster."""
    large, small = (2624, 2624, 2624), (1024, 4096, 4096)  # 2**34 products of codes are not large
    assert counts(fake_gpus, libcuda, lambda: multiply("cuda:0", *large)) == (False, True)
    assert counts(fake_gpus, libcuda, lambda: multiply("cuda:0", *small)) == (True, False)
    assert counts(fake_gpus, libcuda, lambda: multiply("cuda:0", 16, 10_000, 131_071)) == (True, False)
    assert counts(fake_gpus, libcuda, lambda: multiply("cuda:0", 10_000, 16, 131_071)) == (True, False)
    with amp_kernels.use_backend("cuda"):
        assert counts(fake_gpus, libcuda, lambda: multiply("cuda:0", *large)) == (True, False)
    with amp_kernels.use_backend("triton"):
        assert counts(fake_gpus, libcuda, lambda: multiply("cuda:0", *small)) == (False, True)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is hidden")
def test_large_convolutions_are_those_of_triton(fake_gpus: Any, libcuda: Any) -> None:
    """As large products are: 1600 images of 36 output pixels mean 2**34.5 products of codes."""
    large, small = (torch.ones(images, 8, 8, 64, dtype=torch.int8, device="cuda:0") for images in (1600, 160))
    weight = torch.ones(256, 5, 5, 64, dtype=torch.int8, device="cuda:0")
    convolve = functools.partial(cases.convolve, device="cuda:0", weight=weight)
    assert counts(fake_gpus, libcuda, lambda: convolve(large)) == (False, True)
    assert counts(fake_gpus, libcuda, lambda: convolve(small)) == (True, False)
    few_channels = large[..., :3].contiguous(), torch.ones(1024, 5, 5, 3, dtype=torch.int8, device="cuda:0")
    assert counts(fake_gpus, libcuda, lambda: cases.convolve(few_channels[0], "cuda:0", few_channels[1])) == (
        False,
        True,
    )
    with amp_kernels.use_backend("cuda"):
        assert counts(fake_gpus, libcuda, lambda: convolve(large)) == (True, False)


@pytest.mark.skipif(HAS_TRITON, reason="triton is there")
def test_large_products_of_codes_without_triton(fake_gpus: Any) -> None:
    with fake_gpus.planning():
        cases.multiply("cuda:0", 2624, 2624, 2624)
    assert fake_gpus.launches(0) != {}


@pytest.mark.skipif(HAS_TRITON, reason="triton is there")
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_the_reference_says_why(call: str) -> None:
    backends.automatic.cache_clear()
    with pytest.warns(UserWarning, match="slow reference on CUDA tensors: cuda: .* cannot run on fake GPU 1 .*triton"):
        cases.CALLS[call]("cuda:1")


@pytest.mark.skipif(not HAS_TRITON, reason="triton is hidden")
def test_errors_keep_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++, which is between a call and its kernel, would lose them."""

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("there is no memory left")

    monkeypatch.setattr(amp_kernels.ops.library.triton_kernels(), "_quantize_int8_", fails)
    with pytest.raises(torch.OutOfMemoryError, match="there is no memory left"):
        amp_kernels.quantize_int8(cases.matrix("cuda:1"), dim=-1)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is hidden")
@cases.families
@pytest.mark.parametrize("prepare", [lambda optimizer: optimizer.init_state(), cases.plain], ids=["init_state", "step"])
@pytest.mark.parametrize(
    "captured", [cases.plain, cases.scaled, cases.clipped, cases.with_tensor_lr], ids=lambda f: f.__name__
)
def test_a_captured_step_of_triton(fake_gpus: Any, libcuda: Any, family: Any, prepare: Any, captured: Any) -> None:
    optimizer = family(cases.parameters("cuda:1"), **cases.FULL[family])
    optimizer.rate = torch.tensor(0.1, device="cuda:1")
    optimizer.scaler = amp_kernels.GradScaler("cuda", init_scale=2.0)
    optimizer.scaler.scale(torch.ones((), device="cuda:1"))
    prepare(optimizer)
    before = libcuda.fake_launches()
    with fake_gpus.capture():
        captured(optimizer)
    assert libcuda.fake_launches() > before
