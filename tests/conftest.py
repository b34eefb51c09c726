"""AMP_KERNELS_EXPECT names what this machine must be able to test: absent, it fails and is not skipped.

Fixtures `backend` and `device` run a test on each backend that works here, forced by `use_backend`. `launcher` runs a
test of table kernels with all that launches them here (harness/table_kernels.py), the emulator's threads shuffled, and
`ordered_launcher` with every order of theirs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

# Each process of `make test` has a thread for every core: a thread that waits by spinning takes the time of one that
# works. OpenMP reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Such a process has two CUDA devices that the emulator plays. torch looks for devices when it is imported.
FAKE_GPUS = os.environ.get("AMP_KERNELS_FAKE_GPUS", "")
if FAKE_GPUS:
    # The CPU multiplies for these GPUs. With AMX torch 2.13's bf16 product mixes rows (amp_kernels/torch_private.py).
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    from cuda_on_cpu import torch_device
    from cuda_on_cpu.build import build_gpus

    torch_device.install(build_gpus())
    if FAKE_GPUS == "without-triton":
        torch_device.hide("triton")

import torch  # noqa: E402


def _reasons(device_type: str) -> dict[str, str | None]:
    from amp_kernels.backends import backend_reasons

    return backend_reasons(device_type)


def _interpreter() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    fails = triton < (3, 9) and numpy >= (2, 4)  # seen with Triton 3.6
    return "Triton's interpreter fails with numpy 2.4 before Triton 3.9" if fails else None


def _cuda_on_cpu() -> str | None:
    from cuda_on_cpu.build import header_folders

    try:
        header_folders()
    except RuntimeError as error:
        return str(error)
    return None


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc") or (home and shutil.which(f"{home}/bin/nvcc"))
    return None if found else "there is no nvcc in CUDA_HOME or on PATH"


# The oldest Triton that the package supports. It is in a folder of its own (Makefile), because torch brings
# another one. The folder is not taken from sys.prefix: make test-clients runs in another venv, .venv/clients.
OLDEST_TRITON = Path(__file__).parents[1] / ".venv" / "oldest_triton"


def _fake_gpus() -> str | None:
    if torch.version.cuda is not None:
        return "a torch with CUDA has devices of its own"
    return _cuda_on_cpu()


TESTS = Path(__file__).parent


def run_pytest(*arguments: str, **environment: str) -> None:
    """In a process of its own, whose output is that of the failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    of_this_process = ("AMP_KERNELS_EXPECT", "AMP_KERNELS_FAKE_GPUS", "TRITON_INTERPRET")
    inherited = {key: value for key, value in os.environ.items() if key not in of_this_process}
    result = subprocess.run(command, env=inherited | environment, capture_output=True, text=True)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr


def _oldest_triton() -> str | None:
    there = (OLDEST_TRITON / "triton").exists()
    return None if there else f"there is no Triton in {OLDEST_TRITON}: make test installs it"


WHY_NOT: dict[str, Callable[[], str | None]] = {
    "cpu": lambda: _reasons("cpu")["cpu"],
    "cuda": lambda: _reasons("cuda")["cuda"],
    "triton": lambda: _reasons("cuda")["triton"],
    "triton-interpret": _interpreter,
    "cuda-on-cpu": _cuda_on_cpu,
    "fake-gpus": _fake_gpus,
    "nvcc": _nvcc,
    "oldest-triton": _oldest_triton,
}


def pytest_sessionstart() -> None:
    for name in filter(None, os.environ.get("AMP_KERNELS_EXPECT", "").split(",")):
        if name not in WHY_NOT:
            raise pytest.UsageError(f"AMP_KERNELS_EXPECT must be of {', '.join(WHY_NOT)}, got {name!r}")
        if reason := WHY_NOT[name]():
            raise pytest.UsageError(f"AMP_KERNELS_EXPECT names {name}, but {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no process is idle while another has one of them left at the end."""
    if FAKE_GPUS:
        items[:] = filter(_runs_on_fake_gpus, items)
    folders = ("package", "harness", "gpu_static")
    items.sort(key=lambda item: (item.path.name != "test_gpu_check.py", item.path.parent.name not in folders))


def _runs_on_fake_gpus(item: pytest.Item) -> bool:
    """Whether a test chooses a device, and needs nothing that these GPUs lack: compiled graphs and sparse tensors."""
    if item.path.name in ("fake_gpus_cases.py", "mixed_gpus_cases.py"):
        return True
    chooses = {"place", "launcher"} & set(item.fixturenames)
    return bool(chooses) and not re.search("compile|inductor|sparse|trains_a_table", item.name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[HAS_FAILED] = report.failed or item.stash.get(HAS_FAILED, False)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """After an illegal address every later call on the device fails, in this process alone: pytest-xdist starts another
    for the other tests. All that this test has to say was said."""
    result = yield
    if item.stash.get(HAS_FAILED, False) and (error := _lost_context()):
        if os.environ.get("PYTEST_XDIST_WORKER"):
            os._exit(1)
        pytest.exit(f"{item.nodeid} lost the CUDA context: {error}", returncode=1)
    return result


HAS_FAILED = pytest.StashKey[bool]()


def _lost_context() -> RuntimeError | None:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return error
    return None


# id: (backend, device of its tensors)
PLACES = {
    "cpu": ("cpu", "cpu"),
    "reference": ("reference", "cpu"),
    "cuda": ("cuda", "cuda"),
    "triton": ("triton", "cuda"),
    "reference-on-cuda": ("reference", "cuda"),
    "default-on-cuda": (None, "cuda"),
}
# Where the default is not one of the backends: torch's product.
HAVE_A_DEFAULT = ("test_matmul", "test_nn_linear")
# Triton reads the variable when it is imported, and then cannot compile: such a process tests nothing else.
INTERPRETED = {"triton-interpret": ("triton", "cpu")}


def _places() -> list[str]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return list(INTERPRETED)
    if FAKE_GPUS:
        return ["cuda", "default-on-cuda"]
    usable = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    reasons = {on: _reasons(on) for on in usable}
    return [name for name, (backend, on) in PLACES.items() if on in usable and reasons[on].get(backend) is None]


def pytest_report_header() -> str:
    return f"amp_kernels backends: {', '.join(_places())}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if names := {"launcher", "ordered_launcher"} & set(metafunc.fixturenames):
        from table_kernels import launchers

        (name,) = names
        unordered = [launcher for launcher in launchers() if launcher.order in (None, "shuffled")]
        metafunc.parametrize(name, launchers() if name == "ordered_launcher" else unordered, ids=str)
    if "place" in metafunc.fixturenames:
        left_out = () if metafunc.module.__name__ in HAVE_A_DEFAULT else ("default-on-cuda",)
        metafunc.parametrize("place", [name for name in _places() if name not in left_out])


@pytest.fixture
def backend(place: str) -> Iterator[str]:
    """The backend's name; operators inside the test run on it."""
    from amp_kernels import use_backend
    from amp_kernels.testing.common import rounded_once

    name = {**PLACES, **INTERPRETED}[place][0]
    with use_backend(name) if name else rounded_once():
        yield name or "default"


@pytest.fixture
def device(place: str, backend: str) -> torch.device:
    """Where the tensors of this backend's tests are; what they call runs on it."""
    return torch.device({**PLACES, **INTERPRETED}[place][1])


@pytest.fixture(autouse=bool(FAKE_GPUS))
def fake_gpus() -> Iterator[Any]:
    """The module cuda_on_cpu.torch_device, its GPUs as new. A write outside of an allocation fails the test."""
    if not FAKE_GPUS:
        pytest.skip("needs AMP_KERNELS_FAKE_GPUS=1")
    torch_device.reset()
    yield torch_device
    torch_device.reset()
    assert torch_device.damage() is None


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
