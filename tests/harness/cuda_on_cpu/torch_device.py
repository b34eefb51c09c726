"""GPUs for a torch without CUDA: tensors on "cuda:0" and "cuda:1", and the CUDA operators of amp_kernels on them.

`install` gives this process `amp_kernels._C` with the sources of the real one (csrc/ops with class Cuda, csrc/cuda), its
kernels executed by the emulator. torch sees CUDA devices (torch_device.cpp) whose memory is watched (gpus.cpp). The rest
of `torch.cuda` that amp_kernels and its tests use is here, in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any



def install(path: Path) -> None:
    """Makes GPUs of this process. torch asks for CUDA once, while it is imported, so it must not have been."""
    global _library, torch
    assert "torch" not in sys.modules
    libraries = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch

    assert torch.version.cuda is None, "a torch with CUDA has devices of its own"
    _patch_torch()
    _library.gpu_damage.restype = ctypes.c_char_p
    _library.gpu_last_stream.restype = _library.gpu_get_stream.restype = ctypes.c_int64
    _library.gpu_set_stream.argtypes = (ctypes.c_int, ctypes.c_int64)
    sys.meta_path.insert(0, _Finder(str(path)))


def reset() -> None:
    """Two GPUs of sm_90 with three multiprocessors, the first of them current."""
    set_capturing(False)
    _library.gpu_set_count(2)
    _exchange(0)
    for index in range(2):
        _library.gpu_set_stream(index, 0)
        describe(index)
        _library.gpu_forget_launches(index)
    _library.gpu_set_order(2, 0)


def describe(index: int, compute_capability: int = 90, multiprocessors: int = 3, has_kernels: bool = True) -> None:
    """Says what a GPU is, and whether the kernels of `amp_kernels._C` were compiled for it."""
    _library.gpu_set(index, compute_capability, multiprocessors, has_kernels)


def damage() -> str | None:
    """Which memory around an allocation was written since the last question."""
    found = _library.gpu_damage()
    return found.decode() if found else None


def set_capturing(on: bool) -> None:
    if _libcuda is not None:
        _libcuda.fake_set_capturing(on)
    ctypes.c_bool.in_dll(_library, "_ZN8emulator12is_capturingE").value = on


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Refuses inside the ``with`` block what CUDA refuses while a stream captures; launches run all the same."""
    set_capturing(True)
    try:
        yield
    finally:
        set_capturing(False)


def launches(index: int) -> dict[str, int]:
    """How often each kernel was launched on a GPU since `reset`."""
    from .backend import kernels_of  # which imports torch

    found: dict[int, int] = {}
    visit = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    _library.gpu_visit_launches(index, visit(found.__setitem__))
    names = kernels_of(_library, "gpu_set_order") if found else {}  # which takes a quarter of a second
    return {names[address]: count for address, count in found.items()}


def last_stream(index: int) -> int:
    """The stream of the last launch on a GPU, as `torch.cuda.Stream.cuda_stream`."""
    return int(_library.gpu_last_stream(index))


def unload(index: int) -> None:
    """Forgets which kernels a GPU has loaded, as in a new process."""
    _library.gpu_forget_loaded(index)


def follow(libcuda: ctypes.CDLL) -> None:
    """Has the libcuda that Triton launches on (../fake_cuda) use the same GPUs, and refuse the same in a capture."""
    global _libcuda
    _libcuda = libcuda
    _library.gpu_follow(ctypes.cast(libcuda.fake_set_device, ctypes.c_void_p))


def hide(module: str) -> None:
    """As if it were not installed."""
    find_spec = importlib.util.find_spec
    sys.modules[module] = None  # type: ignore[assignment]
    importlib.util.find_spec = lambda name, package=None: None if name == module else find_spec(name, package)


class _Finder:
    """Finds the module `amp_kernels._C` in the library of the fake GPUs."""

    def __init__(self, path: str) -> None:
        self.path = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "amp_kernels._C":
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, self.path)
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


class Stream:
    def __init__(self, device: Any = None, stream_id: int | None = None, **_: Any) -> None:
        self.device_index = _index(device)
        self.device = torch.device("cuda", self.device_index)
        Stream.made += 1
        self.stream_id = Stream.made if stream_id is None else stream_id
        self.cuda_stream = self.device_index * 1000 + self.stream_id

    made = 0

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


def _index(device: Any = None) -> int:
    if device is None:
        return int(_library.gpu_current())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(_library.gpu_current()) if index is None else index


def _exchange(index: int) -> int:
    before = int(_library.gpu_current())
    if index >= 0:
        torch._C._accelerator_setDeviceIndex(index)
    return before


def current_stream(device: Any = None) -> Stream:
    return Stream(device, int(_library.gpu_get_stream(_index(device))))


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    with torch.cuda.device(chosen.device_index):
        before = int(_library.gpu_get_stream(chosen.device_index))
        _library.gpu_set_stream(chosen.device_index, chosen.stream_id)
        try:
            yield
        finally:
            _library.gpu_set_stream(chosen.device_index, before)


def synchronize(device: Any = None) -> None:
    if is_capturing():
        raise RuntimeError("CUDA: operation not permitted when stream is capturing (a device is waited for)")


def properties(device: Any = None) -> SimpleNamespace:
    index = _index(device)
    major, minor = capability(device)
    return SimpleNamespace(
        name=f"fake GPU {index}", major=major, minor=minor, total_memory=1 << 34,
        multi_processor_count=int(_library.gpu_multiprocessors(index)),
    )  # fmt: skip


def capability(device: Any = None) -> tuple[int, int]:
    return divmod(int(_library.gpu_compute_capability(_index(device))), 10)


def is_capturing() -> bool:
    return bool(ctypes.c_bool.in_dll(_library, "_ZN8emulator12is_capturingE").value)


def _patch_torch() -> None:
    torch.cuda._initialized = True
    replaced = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: int(_library.gpu_count()),
        "current_device": lambda: int(_library.gpu_current()),
        "set_device": lambda device: _exchange(_index(device)),
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(device, 0),
        "stream": stream,
        "Stream": Stream,
        "synchronize": synchronize,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": lambda device=None: properties(device).name,
        "is_current_stream_capturing": is_capturing,
        "manual_seed_all": lambda seed: None,
        "manual_seed": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_sync_debug_mode": lambda mode: None,
        "get_sync_debug_mode": lambda: 0,
        "is_bf16_supported": lambda *_: True,
        "empty_cache": lambda: None,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.UntypedStorage.clone = lambda self: _copied(self, self.device)
    torch.storage._to = lambda self, device, non_blocking=False: (
        self if self.device == torch.device(device) else _copied(self, torch.device(device))
    )


def _copied(storage: Any, device: Any) -> Any:
    """torch's own constructor of storages knows the devices that it was compiled for."""
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage().copy_(storage)


_library: Any = None
_libcuda: Any = None
