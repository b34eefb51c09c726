"""What libcuda.cpp refuses, and what it counts. The last line is JSON: the version of Triton, whose ptxas compiles."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable

import triton
import triton.language as tl
from gpus import device, libcuda
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MAJOR, MINOR, MOST_SHARED = 75, 76, 97  # of CUdevice_attribute


@triton.jit
def _store_one(x):
    tl.store(x, 1)


def cubin(architecture: int) -> bytes:
    source = ASTSource(fn=_store_one, signature={"x": "*i32"}, constexprs={})
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["cubin"]


def have(*capabilities: int) -> None:
    libcuda.fake_set_devices(len(capabilities), (ctypes.c_int * len(capabilities))(*capabilities))
    libcuda.fake_set_device(0)


def why(result: int) -> str | None:
    """The sentence of a refusal."""
    text = ctypes.c_char_p()
    libcuda.cuGetErrorString(result, ctypes.byref(text))
    return text.value.decode() if result and text.value else None


def refusal(image: bytes) -> str | None:
    return why(libcuda.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), image))


def load(image: bytes) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert libcuda.cuModuleLoadData(ctypes.byref(module), image) == 0
    assert libcuda.cuModuleGetFunction(ctypes.byref(function), module, b"_store_one") == 0
    return function


def launch(function: ctypes.c_void_p, stream: int = 0) -> str | None:
    parameters = (ctypes.c_void_p * 1)()
    return why(libcuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, ctypes.c_void_p(stream), parameters, None))


def attribute(number: int, index: int) -> int:
    value = ctypes.c_int()
    assert libcuda.cuDeviceGetAttribute(ctypes.byref(value), number, index) == 0
    return value.value


def devices() -> None:
    have(90, 75)
    assert [attribute(a, d) for d in (0, 1) for a in (MAJOR, MINOR)] == [9, 0, 7, 5]
    assert [attribute(MOST_SHARED, d) for d in (0, 1)] == [227 * 1024, 64 * 1024]
    assert why(libcuda.cuDeviceGet(ctypes.byref(ctypes.c_int()), 2)) == "no device 2"
    with device(1):
        assert libcuda.fake_device() == 1
    assert libcuda.fake_device() == 0


def architectures() -> None:
    """A cubin runs on the same major version, from its own minor version on."""
    images = {architecture: cubin(architecture) for architecture in (75, 80, 86, 90, 100, 120)}
    for capability in images:
        have(capability)
        for architecture, image in images.items():
            fits = capability // 10 == architecture // 10 and capability >= architecture
            expected = f"a cubin for sm_{architecture} on device 0, which is of {capability // 10}.{capability % 10}"
            assert refusal(image) == (None if fits else expected)


def contexts() -> None:
    have(80, 86)
    function = load(cubin(80))
    assert launch(function) is None
    with device(1):
        assert launch(function) == "_store_one was loaded on device 0 (80), and is launched on device 1 (86)"
    have(80)
    assert "was loaded on device 0" in str(launch(function))
    libcuda.cuCtxSetCurrent(None)
    assert launch(function) == "_store_one is launched where no context is current"


def captures() -> None:
    have(80)
    image, status = cubin(80), ctypes.c_int()
    function = load(image)
    calls: list[Callable[[], int]] = [
        lambda: libcuda.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), image),
        lambda: libcuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(16)),
        libcuda.cuCtxSynchronize,
        lambda: libcuda.cuStreamSynchronize(None),
        lambda: libcuda.cuStreamQuery(None),
        lambda: libcuda.cuEventSynchronize(None),
        lambda: libcuda.cuEventQuery(None),
    ]
    for is_capturing in (1, 0):
        libcuda.fake_set_capturing(is_capturing)
        libcuda.cuStreamIsCapturing(None, ctypes.byref(status))
        assert status.value == is_capturing
        expected = "operation not permitted when stream is capturing" if is_capturing else None
        assert [why(call()) for call in calls] == [expected] * len(calls)
        assert launch(function) is None


def counters() -> None:
    have(80)
    loads, launches, named = libcuda.fake_loads(), libcuda.fake_launches(), libcuda.fake_launches_of(b"store")
    function = load(cubin(80))
    libcuda.fake_last_stream.restype = ctypes.c_void_p
    assert launch(function, stream=7) is None
    assert libcuda.fake_last_stream() == 7
    assert libcuda.fake_loads() == loads + 1
    assert libcuda.fake_launches() == launches + 1
    assert libcuda.fake_launches_of(b"store") == named + 1
    assert libcuda.fake_launches_of(b"another") == 0


if __name__ == "__main__":
    for rule in (devices, architectures, contexts, captures, counters):
        rule()
    print(json.dumps(triton.__version__))
