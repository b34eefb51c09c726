"""Operators: schemas, fakes, and the choice of a backend. The only file that knows backends.

A list operator (`unscale_`, `grad_norm`, `sgd_`, `rmsprop_`) is plain torch (`reference/`) or a *table op* on a table
of addresses (`_table.py`); the optimizers call table ops directly. Table ops write memory that their schema does not
show, so they are internal and never traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import _checks, _loader, reference
from ._lists import run_gradient_pass, run_update

_UPDATE_TABLE = (
    "(Tensor table, Tensor chunks, int chunk_size, Tensor(a!) steps, Tensor hyper, Tensor lr, int param_dtype, "
    "int grad_dtype, Tensor? grad_scale, Tensor? found_inf, Tensor? grad_norm, float max_norm) -> ()"
)
SCHEMAS = {
    "unscale_": "(Tensor(a!)[] grads, Tensor inv_scale, Tensor(b!) found_inf) -> ()",
    # found_inf is not optional: Inductor crashes on an optional mutable Tensor, and on an empty list beside a result.
    "grad_norm": "(Tensor[] grads, Tensor? inv_scale, Tensor(a!) found_inf) -> Tensor",
    "sgd_": "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, *, float lr, "
    "Tensor? tensor_lr, float momentum, float dampening, float weight_decay, bool nesterov, bool maximize, "
    "bool is_first_step, Tensor? grad_scale, Tensor? found_inf) -> ()",
    "rmsprop_": "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] square_avgs, Tensor(c!)[] momentum_buffers, "
    "Tensor(d!)[] grad_avgs, Tensor(e!)[] masters, *, float lr, Tensor? tensor_lr, float alpha, float eps, "
    "float weight_decay, float momentum, bool maximize, Tensor? grad_scale, Tensor? found_inf) -> ()",
    "_unscale_table_": "(Tensor table, Tensor chunks, int chunk_size, Tensor? scale, bool divide, bool write, "
    "bool clear, Tensor(a!) partials, Tensor(b!) found_inf, Tensor(c!) norm, Tensor(d!) record) -> ()",
    # Bytes travel as kernel arguments: no pinned memory, whose lifetime a captured copy would depend on.
    "_send_": "(Tensor host, Tensor(a!) to) -> ()",
    "_sgd_table_": _UPDATE_TABLE,
    "_rmsprop_table_": _UPDATE_TABLE,
}
LIST_OPS = ("unscale_", "grad_norm", "sgd_", "rmsprop_")
TABLE_OPS = ("_unscale_table_", "_sgd_table_", "_rmsprop_table_", "_send_")
# Automatic choice, first that runs.
PREFERENCE = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}
BACKENDS = ("cuda", "triton", "cpu", "reference")

_library = torch.library.Library("amp_kernels", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)
_loader.load()  # registers the table ops of CPU and, if built for it, CUDA

TableOp = Callable[..., None]


class TableOps(Protocol):
    """A backend: its table ops, called as their schemas say."""

    _unscale_table_: TableOp
    _sgd_table_: TableOp
    _rmsprop_table_: TableOp
    _send_: TableOp


# ------------------------------------------------------------------------------------------------------- backends
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("amp_kernels_backend", default=None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Forces one backend for every operator and optimizer step inside the ``with`` block.

    Args:
        name: ``"cuda"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises:
        ValueError: `name` is none of these.
        RuntimeError: the backend cannot run here at all, with its reason; also raised by an operator whose tensors
            are on a device the backend does not serve.
    """
    if name not in BACKENDS:
        raise ValueError(f"use_backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    reasons = [backend_reasons(device)[name] for device in PREFERENCE]
    if all(reasons):
        raise RuntimeError(f"use_backend: {name} cannot run here: {reasons[0 if name != 'cpu' else 1]}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def backend_reasons(device_type: str) -> dict[str, str | None]:
    """For each backend None if it can run on tensors of this device type here, else why not."""
    return {backend: _reason(backend, device_type) for backend in BACKENDS}


def _reason(backend: str, device_type: str) -> str | None:
    if backend == "reference":
        return None
    if backend == "triton":
        return _why_not_triton(device_type)
    if backend != device_type:
        return f"it serves {backend.upper()} tensors only"
    return _why_not_compiled(backend.upper())


def select(device: torch.device) -> str:
    """The backend that serves tensors of `device` now."""
    forced = _forced.get()
    if forced is not None:
        reason = _reason(forced, device.type)
        if reason is not None:
            raise RuntimeError(f"amp_kernels: the backend {forced!r} cannot serve {device.type} tensors: {reason}")
        return forced
    return _automatic(device.type)


@functools.cache
def _automatic(device_type: str) -> str:
    reasons = {}
    for name in PREFERENCE.get(device_type, ()):
        reasons[name] = _reason(name, device_type)
        if reasons[name] is None:
            return name
    if device_type == "cuda":
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        warnings.warn(f"amp_kernels runs its slow reference on CUDA tensors, since {why}", stacklevel=2)
    return "reference"


@functools.cache
def table_ops(backend: str) -> TableOps | None:
    """The table ops of a backend; None for the reference, which works on lists."""
    if backend == "reference":
        return None
    if backend == "triton":
        return cast(TableOps, importlib.import_module(".triton_kernels", __package__))
    return SimpleNamespace(**{op: getattr(torch.ops.amp_kernels, op).default for op in TABLE_OPS})


def _why_not_compiled(key: str) -> str | None:
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"amp_kernels::{TABLE_OPS[0]}", key):
        return None
    return _loader.load_error() or _loader.build_note() or f"amp_kernels._C was built without {key}"


@functools.cache
def _why_not_triton(device_type: str) -> str | None:
    try:
        importlib.import_module(".triton_kernels", __package__)
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if device_type == "cuda":
        return None if torch.cuda.is_available() else "there is no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "it serves CUDA tensors only (CPU tensors under TRITON_INTERPRET=1)"


# ---------------------------------------------------------------------------------------------------- list operators
def _mutates(*tensors: Sequence[Tensor]) -> None:
    """Tells autograd what a raw-pointer write changed: without it a later backward pass is silently wrong."""
    changed = [t for group in tensors for t in group if not t.is_inference()]
    torch.autograd.graph.increment_version(changed)


def _is_fake(tensors: Sequence[Tensor]) -> bool:
    """While tracing, an update is its checks."""
    return isinstance(tensors[0], FakeTensor) or tensors[0].is_meta


def _unscale(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    if not grads:
        return
    _checks.check_unscale(grads, inv_scale, found_inf)
    ops = table_ops(select(grads[0].device))
    if ops is None:
        reference.unscale_(grads, inv_scale=inv_scale, found_inf=found_inf)
    else:
        run_gradient_pass(ops, grads, inv_scale, found_inf, write=True)
    _mutates(grads, [found_inf])


def _grad_norm(grads: list[Tensor], inv_scale: Tensor | None, found_inf: Tensor) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float32, device=found_inf.device)
    _checks.check_grad_norm(grads, inv_scale, found_inf)
    ops = table_ops(select(grads[0].device))
    if ops is None:
        norm = reference.grad_norm(grads, inv_scale=inv_scale, found_inf=found_inf)
    else:
        norm = run_gradient_pass(ops, grads, inv_scale, found_inf, write=False)
    _mutates([found_inf])
    return norm


def _sgd(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    masters: list[Tensor],
    *,
    lr: float,
    tensor_lr: Tensor | None,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    if not params:
        return
    states = {"momentum_buffers": momentum_buffers} if momentum != 0 else {}
    scalars = {"lr": tensor_lr, "grad_scale": grad_scale, "found_inf": found_inf}
    _checks.check_update("sgd_", params, grads, states, masters, scalars)
    if _is_fake(params):
        return
    ops = table_ops(select(params[0].device))
    if ops is None:
        reference.sgd_(
            params, grads, momentum_buffers if states else (), masters, lr=lr if tensor_lr is None else tensor_lr,
            momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov, maximize=maximize,
            is_first_step=is_first_step, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
    else:
        hyper = (momentum, 1 - dampening, weight_decay, float(nesterov), -1.0 if maximize else 1.0)
        run_update(
            ops._sgd_table_, ops, params, grads, list(states.values()), masters, hyper=hyper, lr=lr,
            tensor_lr=tensor_lr, steps_taken=0 if is_first_step else 1, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
    _mutates(params, masters, *states.values())


def _rmsprop(
    params: list[Tensor],
    grads: list[Tensor],
    square_avgs: list[Tensor],
    momentum_buffers: list[Tensor],
    grad_avgs: list[Tensor],
    masters: list[Tensor],
    *,
    lr: float,
    tensor_lr: Tensor | None,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    if not params:
        return
    states = {"square_avgs": square_avgs}
    if momentum != 0:
        states["momentum_buffers"] = momentum_buffers
    if grad_avgs:
        states["grad_avgs"] = grad_avgs
    scalars = {"lr": tensor_lr, "grad_scale": grad_scale, "found_inf": found_inf}
    _checks.check_update("rmsprop_", params, grads, states, masters, scalars)
    if _is_fake(params):
        return
    ops = table_ops(select(params[0].device))
    momentum_buffers = momentum_buffers if momentum != 0 else []
    if ops is None:
        reference.rmsprop_(
            params, grads, square_avgs, momentum_buffers, grad_avgs, masters, lr=lr if tensor_lr is None else tensor_lr,
            alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, maximize=maximize,
            grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
    else:
        hyper = (alpha, 1 - alpha, eps, weight_decay, -1.0 if maximize else 1.0, momentum)
        run_update(
            ops._rmsprop_table_, ops, params, grads, [square_avgs, momentum_buffers, grad_avgs], masters, hyper=hyper,
            lr=lr, tensor_lr=tensor_lr, steps_taken=1, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
    _mutates(params, masters, *states.values())


def _fake_unscale(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    if grads:
        _checks.check_unscale(grads, inv_scale, found_inf)


def _fake_grad_norm(grads: list[Tensor], inv_scale: Tensor | None, found_inf: Tensor) -> Tensor:
    if not grads:
        return torch.empty_like(found_inf, dtype=torch.float32).view(())
    _checks.check_grad_norm(grads, inv_scale, found_inf)
    return grads[0].new_empty((), dtype=torch.float32)


for _name, _kernel, _fake in (
    ("unscale_", _unscale, _fake_unscale),
    ("grad_norm", _grad_norm, _fake_grad_norm),
    ("sgd_", _sgd, _sgd),
    ("rmsprop_", _rmsprop, _rmsprop),
):
    # One kernel for every device: it selects the backend itself, so that use_backend reaches it.
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_kernels::{_name}", _fake, lib=_library)
