"""The backends: which ones can run here, which one serves a tensor, and `use_backend`.

A backend is an implementation of the operators. torch's dispatcher chooses one by the device of the tensors
(`ops/library.py`). The plan of an optimizer's step calls no operators, but what `kernels` returns.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _loader, torch_private
from .ops.library import DEFINITIONS, Kernels, tensors_of, triton_kernels

# For each device type, the backends to try without `use_backend`. The first one that can run is taken.
PREFERENCE = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}
BACKENDS = ("cuda", "triton", "cpu", "reference")

_loader.load()  # registers the C++ kernels for the CPU and, if they were built, for CUDA

# The classes of ordinary tensors. A tensor of another subclass of Tensor may have no memory of its own.
PLAIN = (torch.Tensor, torch.nn.Parameter)
_entries = 0  # number of open `use_backend` blocks, in all threads
_entered: contextvars.ContextVar[str | None] = contextvars.ContextVar("amp_kernels_backend", default=None)


def forced() -> str | None:
    """Return the backend that an enclosing `use_backend` forces, or None."""
    if _entries == 0:  # the usual case, which takes 0.05 us
        return None
    # The backward pass on a GPU runs in a thread of autograd, which inherits dispatch modes but no context variables.
    modes = torch_private.dispatch_modes()
    if modes is None:
        return _entered.get()
    return next((mode.backend for mode in reversed(modes) if isinstance(mode, _Interceptor)), None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend for every operator and optimizer step inside a `with` block.

    Outside such a block the device of the tensors decides. CUDA tensors are served by `"cuda"`, or by `"triton"` if
    `"cuda"` cannot run. CPU tensors are served by `"cpu"`. If none of these can run, plain torch (`"reference"`) serves
    the tensors. Some int8 products of CUDA tensors are left to Triton or torch (see `int8_matmul` and
    `nn.Int8Linear`). Inside `use_backend("cuda")` torch computes only products that the CUDA kernels cannot compute.

    Triton has no kernel for 16-bit products (`matmul`, `addmm`, `linear`). Inside `use_backend("triton")` it pads the
    operands that need it, and torch multiplies. Triton has no kernel for the counts of `PrecisionReport`: torch counts.

    Args:
        name: `"cuda"`, `"triton"`, `"cpu"` or `"reference"`.

    Raises:
        ValueError: `name` is not a backend.
        RuntimeError: The backend cannot run on this machine; the message has the reason. An operator inside the block
            also raises this error if its tensors are on a device that the backend does not serve.

    Examples:
        >>> with amp_kernels.use_backend("reference"):
        ...     norm = amp_kernels.grad_norm([torch.tensor([3.0, 4.0])])
        >>> norm
        tensor(5.)
    """
    if name not in BACKENDS:
        raise ValueError(f"use_backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    if reason := _why_nowhere(name):
        raise RuntimeError(f"use_backend: {name} cannot run here: {reason}")
    global _entries
    token = _entered.set(name)
    _entries += 1
    try:
        with _Interceptor(name):
            yield
    finally:
        _entries -= 1
        _entered.reset(token)


class _Interceptor(TorchDispatchMode):
    """A dispatch mode that sends operators to one backend, in compiled graphs and in autograd's threads too."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # under a mode that returns False, torch.compile falls back to eager code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        definition = DEFINITIONS.get(func)
        # `types` lists the tensor subclasses among the arguments, such as fake tensors. For such arguments `func`
        # calls their own `__torch_dispatch__`.
        if definition is None or types:
            return func(*args, **kwargs)
        device = next((tensor.device for tensor in tensors_of(args)), None)
        if device is not None:
            refuse(self.backend, device)
        if self.backend == "triton" and definition.launch is not None:
            return definition.launch(triton_kernels(), *args, **kwargs)
        if self.backend in ("triton", "reference"):
            return definition.reference(*args, **kwargs)
        return (definition.compiled if self.backend == "cuda" else func)(*args, **kwargs)


def backend_reasons(device: str | torch.device) -> dict[str, str | None]:
    """Return, for each backend, why it cannot serve tensors of this device, or None if it can."""
    return {backend: _reason(backend, torch.device(device)) for backend in BACKENDS}


def _reason(backend: str, device: torch.device) -> str | None:
    if backend == "reference":
        return None
    if backend == "triton":
        return _why_not_triton(device.type)
    if backend != device.type:
        return f"it serves {backend.upper()} tensors only"
    return _why_not_compiled(backend.upper()) or (_why_not_on(_gpu(device)) if backend == "cuda" else None)


def _why_nowhere(backend: str) -> str | None:
    """Return why the backend cannot serve tensors of any device here, or None if it can serve some."""
    cpu, current = torch.device("cpu"), torch.device("cuda")
    # Other GPUs come last, because a test creates a context on the tested GPU, which takes hundreds of MB.
    others = (torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    if any(_reason(backend, device) is None for device in (cpu, current, *others)):
        return None
    return _reason(backend, cpu if backend == "cpu" else current)


def _gpu(device: torch.device) -> int | None:
    """Return the index of a GPU, or None if torch finds no GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def select(device: torch.device) -> str:
    """Return the backend that serves tensors of `device` now."""
    name = forced()
    if name is None:
        return automatic(device)
    refuse(name, device)
    return name


def refuse(backend: str, device: torch.device) -> None:
    """Raise RuntimeError if the backend cannot serve tensors of this device."""
    reason = _reason(backend, device)
    if reason is not None:
        raise RuntimeError(f"amp_kernels: the backend {backend!r} cannot serve {device.type} tensors: {reason}")


@functools.cache
def automatic(device: torch.device) -> str:
    """Return the backend that serves tensors of `device`, a GPU with its index. Warn if it is the slow reference."""
    reasons = {}
    for name in PREFERENCE.get(device.type, ()):
        reasons[name] = _reason(name, device)
        if reasons[name] is None:
            return name
    if reasons:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        tensors = f"{device.type.upper()} tensors"
        warnings.warn(f"amp_kernels runs its slow reference on {tensors}: {why}", stacklevel=2)
    return "reference"


@functools.cache
def kernels(backend: str) -> Kernels | None:
    """Return the kernels that read a table. Return None for the reference, which reads lists of tensors."""
    if backend == "reference":
        return None
    if backend == "triton":
        return triton_kernels()
    names = ("_unscale_table_", "_update_table_", "_load_unscale", "_load_update", "_send_")
    return SimpleNamespace(**{name: getattr(torch.ops.amp_kernels, name).default for name in names})


def _why_not_compiled(key: str) -> str | None:
    if _loader.has_cuda() if key == "CUDA" else _loader.load():
        return None
    return _loader.load_error() or _loader.build_note() or f"amp_kernels._C was built without {key}"


@functools.cache
def _why_not_on(gpu: int | None) -> str | None:
    """Return why the CUDA kernels of `amp_kernels._C` cannot run on this GPU (None: no GPU), or None if they can."""
    if gpu is None:
        return "there is no CUDA device"
    error = importlib.import_module("amp_kernels._C").why_no_kernel(gpu)
    if not error:
        return None
    return (
        f"amp_kernels._C cannot run on {torch.cuda.get_device_name(gpu)} ({error}); build it on the machine "
        "with that GPU, or set TORCH_CUDA_ARCH_LIST to its compute capability for the build"
    )


@functools.cache
def _why_not_triton(device_type: str) -> str | None:
    try:
        importlib.import_module(".triton_kernels", __package__)
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if device_type == "cuda":
        if torch.version.hip:  # Triton for ROCm refuses the option `maxnreg`, with which update kernels are launched
            return "its kernels are for CUDA, and this torch is a ROCm build"
        return None if torch.cuda.is_available() else "there is no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "it serves CUDA tensors only (CPU tensors under TRITON_INTERPRET=1)"
