"""CUDA devices for a torch without CUDA, with the CUDA operators of amp_kernels on them.

`install` gives this process two GPUs. Tensors on "cuda:0" and "cuda:1" lie in memory of the process that is watched
(gpus.cpp). `amp_kernels._C` is built from the sources of a CUDA build: csrc/ops with class Cuda as it is, csrc/cuda for
the emulator. Operators of torch run on the CPU, on the same memory (torch_device.cpp). The part of `torch.cuda` that
amp_kernels and its tests use is here, in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_library: Any = None
_libcuda: Any = None  # of ../fake_cuda, if Triton launches kernels on it
torch: Any = None
STREAMS = 1000  # a stream's number is its GPU's index times this, plus its own (gpus.h)


def install(path: Path) -> None:
    """Makes the GPUs. torch asks whether there are any while it is imported, so that comes after."""
    global _library, torch
    assert "torch" not in sys.modules
    folder = Path(importlib.util.find_spec("torch").origin).parent / "lib"  # type: ignore[union-attr, arg-type]
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _library.gpu_damage.restype = ctypes.c_char_p
    _library.gpu_last_stream.restype = _library.gpu_get_stream.restype = ctypes.c_int64
    _library.gpu_set_stream.argtypes = (ctypes.c_int, ctypes.c_int64)
    torch = importlib.import_module("torch")
    assert torch.version.cuda is None, "a torch with CUDA has devices of its own"
    _replace_functions_of_torch()
    sys.meta_path.insert(0, _Finder(str(path)))  # type: ignore[arg-type]


class _Finder:
    """Finds `amp_kernels._C` in the library."""

    def __init__(self, path: str) -> None:
        self.path = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "amp_kernels._C":
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, self.path)
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


def hide(module: str) -> None:
    """Makes a module look as if it were not installed."""
    find_spec = importlib.util.find_spec
    sys.modules[module] = None  # type: ignore[assignment]
    importlib.util.find_spec = lambda name, package=None: None if name == module else find_spec(name, package)


# ---------------------------------------------------------------------------------------------------------- for tests
def reset() -> None:
    """Two GPUs of sm_90 with three multiprocessors each; the first is current. Nothing was launched."""
    set_capturing(False)
    _exchange(0)
    for index in range(2):
        _library.gpu_set_stream(index, 0)
        describe(index)
        _library.gpu_forget_launches(index)
    _library.gpu_set_order(2, 0)  # threads and blocks are shuffled


def describe(index: int, compute_capability: int = 90, multiprocessors: int = 3, has_kernels: bool = True) -> None:
    """Says what a GPU is. `has_kernels`: whether `amp_kernels._C` was compiled for it."""
    _library.gpu_set(index, compute_capability, multiprocessors, has_kernels)


def damage() -> str | None:
    """Which memory around an allocation was written since the last call."""
    found = _library.gpu_damage()
    return found.decode() if found else None


def launches(index: int) -> dict[str, int]:
    """How often each kernel was launched on a GPU since `reset`."""
    from .backend import kernels_of  # imports torch

    found: dict[int, int] = {}
    visit = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    _library.gpu_visit_launches(index, visit(found.__setitem__))
    names = kernels_of(_library, "gpu_set_order")
    return {names[address]: count for address, count in found.items()}


def last_stream(index: int) -> int:
    """The stream of the last launch on a GPU, as `torch.cuda.Stream.cuda_stream`."""
    return int(_library.gpu_last_stream(index))


def unload(index: int) -> None:
    """Forgets which kernels a GPU has loaded, as in a new process."""
    _library.gpu_forget_loaded(index)


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Refuses inside the ``with`` block what CUDA refuses while a stream captures. Launches run all the same."""
    set_capturing(True)
    try:
        yield
    finally:
        set_capturing(False)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Inside the ``with`` block kernels of `amp_kernels._C` are counted as launched, and do not run."""
    _library.gpu_set_planning(True)
    try:
        yield
    finally:
        _library.gpu_set_planning(False)


def set_capturing(on: bool) -> None:
    if _libcuda is not None:
        _libcuda.fake_set_capturing(on)
    _library.gpu_set_capturing(on)


def follow(libcuda: ctypes.CDLL) -> None:
    """Makes the libcuda on which Triton launches use the same current GPU, and capture at the same time."""
    global _libcuda
    _libcuda = libcuda
    _library.gpu_follow(ctypes.cast(libcuda.fake_set_device, ctypes.c_void_p))


# --------------------------------------------------------------------------------------------------------- torch.cuda
class Stream:
    made = 0

    def __init__(self, device: Any = None, stream_id: int | None = None, **_: Any) -> None:
        self.device_index = _index(device)
        self.device = torch.device("cuda", self.device_index)
        Stream.made += 1
        self.stream_id = Stream.made if stream_id is None else stream_id
        self.cuda_stream = self.device_index * STREAMS + self.stream_id

    def wait_stream(self, other: Any) -> None:
        pass  # everything is done in order

    def record_event(self, event: Any = None) -> Event:
        return Event() if event is None else event

    def synchronize(self) -> None:
        _synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        if _is_capturing():
            raise RuntimeError("CUDA: operation not permitted when stream is capturing (an event is queried)")
        return True  # everything is done in order


@contextlib.contextmanager
def _stream(chosen: Stream) -> Iterator[None]:
    with torch.cuda.device(chosen.device_index):
        before = int(_library.gpu_get_stream(chosen.device_index))
        _library.gpu_set_stream(chosen.device_index, chosen.stream_id)
        try:
            yield
        finally:
            _library.gpu_set_stream(chosen.device_index, before)


def _index(device: Any = None) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return int(_library.gpu_current()) if index is None else index


def _exchange(index: int) -> int:
    before = int(_library.gpu_current())
    if index >= 0:
        torch._C._accelerator_setDeviceIndex(index)
    return before


def _synchronize(device: Any = None) -> None:
    if _is_capturing():
        raise RuntimeError("CUDA: operation not permitted when stream is capturing (a device is waited for)")


def _capability(device: Any = None) -> tuple[int, int]:
    return divmod(int(_library.gpu_compute_capability(_index(device))), 10)


def _properties(device: Any = None) -> SimpleNamespace:
    index = _index(device)
    major, minor = _capability(device)
    count = int(_library.gpu_multiprocessors(index))
    return SimpleNamespace(name=f"fake GPU {index}", major=major, minor=minor, multi_processor_count=count)


def _is_capturing() -> bool:
    return bool(_library.gpu_is_capturing())


def _copied(storage: Any, device: Any) -> Any:
    """A storage on another device. torch's own constructor of storages knows none that it was not compiled for."""
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage().copy_(storage)


def _replace_functions_of_torch() -> None:
    functions = {
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "current_device": lambda: int(_library.gpu_current()),
        "current_stream": lambda device=None: Stream(device, int(_library.gpu_get_stream(_index(device)))),
        "Event": Event,
        "default_stream": lambda device=None: Stream(device, 0),
        "device_count": lambda: int(_library.gpu_count()),
        "get_device_capability": _capability,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_properties": _properties,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": _is_capturing,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,  # random numbers are those of the CPU
        "manual_seed_all": lambda seed: None,
        "set_device": lambda device: _exchange(_index(device)),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_sync_debug_mode": lambda mode: None,
        "stream": _stream,
        "Stream": Stream,
        "synchronize": _synchronize,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.cuda._initialized = True
    torch.Tensor.record_stream = lambda self, stream: None  # memory that is freed here is never given away again
    torch.UntypedStorage.clone = lambda self: _copied(self, self.device)
    torch.storage._to = lambda self, device, non_blocking=False: (
        self if self.device == torch.device(device) else _copied(self, torch.device(device))
    )
