"""Backends: what implements the operators, which of them can run here, and `use_backend`.

torch's dispatcher chooses a kernel by the device of the tensors (`ops/library.py`). A step plan works below the
operators, on *kernel ops*, which write memory that their schema does not show (through a table of addresses,
`ops/table.py`): they are internal, never traced, and `kernels` finds those of a backend.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import itertools
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _loader, torch_private
from .ops.library import DEFINITIONS, Kernels, triton_kernels

# Automatic choice, first that runs.
PREFERENCE = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}
BACKENDS = ("cuda", "triton", "cpu", "reference")

_loader.load()  # registers the kernel ops of CPU and, if built for it, CUDA

PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses may be no memory at all
_entries = 0  # of `use_backend` in all threads
_entered: contextvars.ContextVar[str | None] = contextvars.ContextVar("amp_kernels_backend", default=None)


def forced() -> str | None:
    """The backend that the caller's `use_backend` forces, or None.

    Searches torch's modes, not a context variable: the backward pass on a GPU runs in a thread of autograd, which
    inherits modes but no context variables.
    """
    if _entries == 0:  # the usual case, in 0.05 us
        return None
    modes = torch_private.dispatch_modes()
    if modes is None:
        return _entered.get()
    return next((mode.backend for mode in reversed(modes) if isinstance(mode, _Interceptor)), None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend for every operator and optimizer step inside a `with` block.

    Outside such a block the device of the tensors decides. CUDA tensors are served by `"cuda"`, or else by `"triton"`;
    CPU tensors by `"cpu"`. If none of these can run, plain torch (`"reference"`) serves them. On GPUs of
    compute capability 9.0 `"cuda"` leaves large products of int8 codes to `"triton"` (see `int8_matmul`). On every GPU
    it leaves some products of int8 weights to torch (see `nn.Int8Linear`). Where it is forced it leaves only those that
    its kernels cannot multiply.

    Args:
        name: `"cuda"`, `"triton"`, `"cpu"` or `"reference"`.

    Raises:
        ValueError: `name` is not a backend.
        RuntimeError: The backend cannot run on this machine; the message has the reason. An operator inside the block
            raises it too if its tensors are on a device that the backend does not serve.

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
    """Takes the operators to one backend: those of compiled graphs too, and those of autograd's threads."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile takes no notice of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        definition = DEFINITIONS.get(func)
        if definition is None or types:  # fake tensors, and other subclasses, have ways of their own
            return func(*args, **kwargs)
        arguments = itertools.chain.from_iterable(a if isinstance(a, (list, tuple)) else (a,) for a in args)
        device = next((a.device for a in arguments if isinstance(a, torch.Tensor)), None)
        if device is not None:
            _refuse(self.backend, device)
        if self.backend == "reference":
            return definition.reference(*args, **kwargs)
        if self.backend == "triton" and definition.launch is not None:
            return definition.launch(triton_kernels(), *args, **kwargs)
        return (definition.compiled if self.backend == "cuda" else func)(*args, **kwargs)


def backend_reasons(device: str | torch.device) -> dict[str, str | None]:
    """For each backend None if it can run on tensors of this device here, else why not. ``"cuda"``: the current GPU."""
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
    """Why no tensor can be served; None if some can.

    The current GPU is asked first: asking makes a context, which takes hundreds of MB of a GPU.
    """
    current = torch.device("cuda")
    others = (torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    reasons = []
    for device in itertools.chain([torch.device("cpu"), current], others):
        reasons.append(_reason(backend, device))
        if reasons[-1] is None:
            return None
    return reasons[0 if backend == "cpu" else 1]


def _gpu(device: torch.device) -> int | None:
    """The index of a GPU; None if there is none."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def select(device: torch.device) -> str:
    """The backend that serves tensors of `device` now."""
    name = forced()
    if name is None:
        return automatic(device)
    _refuse(name, device)
    return name


def _refuse(backend: str, device: torch.device) -> None:
    """If it cannot serve such tensors."""
    reason = _reason(backend, device)
    if reason is not None:
        raise RuntimeError(f"amp_kernels: the backend {backend!r} cannot serve {device.type} tensors: {reason}")


@functools.cache
def automatic(device: torch.device) -> str:
    """For a tensor's device, whose index is known."""
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
    """The kernels of tables that a backend has; None for the reference, which works on lists."""
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
    """Why `amp_kernels._C`, which is compiled for CUDA, cannot run on this GPU; None if it can."""
    error = "" if gpu is None else importlib.import_module("amp_kernels._C").why_no_kernel(gpu)
    if not error:
        return None
    return (
        f"amp_kernels._C cannot run on {torch.cuda.get_device_name(gpu)} ({error}); build it where that GPU is, or "
        "with its compute capability in TORCH_CUDA_ARCH_LIST"
    )


@functools.cache
def _why_not_triton(device_type: str) -> str | None:
    try:
        importlib.import_module(".triton_kernels", __package__)
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if device_type == "cuda":
        if torch.version.hip:  # Triton for ROCm refuses `maxnreg`, which updates are launched with
            return "its kernels are for CUDA, and torch is of ROCm"
        return None if torch.cuda.is_available() else "there is no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "it serves CUDA tensors only (CPU tensors under TRITON_INTERPRET=1)"
