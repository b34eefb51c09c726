"""How an operator is defined: one schema, and a kernel for each dispatch key.

=========================  ===========================================================================================
dispatch key               kernel
=========================  ===========================================================================================
CPU, CUDA                  C++, registered by ``amp_kernels._C`` (csrc/ops), which wins whichever is imported first
CUDA, without ``_C``'s     Triton
CompositeExplicitAutograd  the reference, which serves every device that has no kernel of its own
Autograd                   nothing: the call falls through, unless the operator is differentiable
=========================  ===========================================================================================

If ``_C`` has CUDA kernels, but none for the GPU of a call, the CUDA kernel calls ``_uncompiled_<name>``: Triton if it
is installed, else the reference. This is decided for each GPU (csrc/ops/on_gpu.h).

An operator that `delegates` has a second name, ``_compiled_<name>``. The CUDA kernel of the first name leaves a call to
Triton or to torch where that was measured to be faster (csrc/ops/int8.cpp). The kernel of the second name leaves only
inputs that the C++ kernels cannot multiply.

torch's dispatcher chooses; `amp_kernels.use_backend` intercepts the call before it does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _loader

LIBRARY = torch.library.Library("amp_kernels", "DEF")


Kernel = Callable[..., Any]


class Kernels(Protocol):
    """The kernels that Python launches: those of Triton, or in tests those of the emulator.

    A step plan needs those of tables alone. C++ has these too, as operators (`backends.kernels`).
    """

    _unscale_table_: Kernel
    _update_table_: Kernel
    _load_unscale: Kernel
    _load_update: Kernel
    _send_: Kernel  # not called for tensors on a CPU, whose kernels read the table where it is
    _matmul_: Kernel
    _copy_pad_: Kernel
    _quantize_int8_: Kernel
    _dequantize_int8_: Kernel
    _straight_through_int8_: Kernel
    _int8_matmul_: Kernel
    _int8_linear_: Kernel


class Definition(NamedTuple):
    """What Python knows of an operator; each is called with its arguments."""

    check: Callable[..., None]
    reference: Callable[..., Any]
    launch: Callable[..., Any] | None  # its first argument is the `Kernels`
    compiled: Any  # the operator that runs the C++ kernels alone


DEFINITIONS: dict[Any, Definition] = {}  # by operator


def operator(
    schema: str,
    *,
    check: Callable[..., None],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    launch: Callable[..., Any] | None = None,
    is_differentiable: bool = False,
    delegates: bool = False,
) -> Any:
    """Defines ``torch.ops.amp_kernels.<name>``.

    Args:
        schema: as of `torch.library`, beginning with the name. A list that may be absent is ``Tensor[]?`` and gets
            None: AOTInductor makes None of an empty list. One mutated argument is always there, or Inductor crashes.
        check: raises a sentence if an argument does not fit. C++ looks at its arguments by itself and refuses without
            words; `call` then asks this for them. The three below are called after it.
        reference: the specification in plain torch, without gradients.
        fake: makes what tracing takes for the results.
        launch: calls the kernels that have no C++ before them. They are its first argument, `Kernels`.
        is_differentiable: the caller registers autograd.
        delegates: the CUDA kernel may leave a call to Triton or torch.

    Returns:
        The operator.
    """
    name = schema.partition("(")[0]
    reference = torch.no_grad()(_after(check, reference))
    launch = None if launch is None else torch.no_grad()(_after(lambda _, *args: check(*args), launch))
    LIBRARY.define(schema)
    LIBRARY.impl(name, _reported(reference), "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_kernels::{name}", _after(check, fake), lib=LIBRARY)
    by_triton = None
    if launch is not None and importlib.util.find_spec("triton"):
        by_triton = lambda *args, **kwargs: launch(triton_kernels(), *args, **kwargs)  # noqa: E731
    if _loader.has_cuda():
        LIBRARY.define(f"_uncompiled_{schema}")
        LIBRARY.impl(f"_uncompiled_{name}", _remembered(by_triton or _reported(reference)), "CUDA")
        LIBRARY.impl(f"_uncompiled_{name}", torch.library.fallthrough_kernel, "Autograd")
    elif by_triton is not None:
        LIBRARY.impl(name, by_triton, "CUDA")
    if not is_differentiable:
        LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    op = compiled = getattr(torch.ops.amp_kernels, name).default
    if delegates and _loader.has_cuda():
        LIBRARY.define(f"_compiled_{schema}")
        LIBRARY.impl(f"_compiled_{name}", torch.library.fallthrough_kernel, "Autograd")
        compiled = getattr(torch.ops.amp_kernels, f"_compiled_{name}").default
    DEFINITIONS[op] = Definition(check, reference, launch, compiled)
    return op


def triton_kernels() -> Kernels:
    """The module of the Triton kernels."""
    module: Any = importlib.import_module("amp_kernels.triton_kernels")
    return module


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the operator's result. If C++ refuses an argument, the operator's check raises the sentence.

    The check does not run before the operator: for `int8_matmul` it takes 6 us, as long as the whole call of a small
    product, and C++ has to look at its arguments anyway, to protect memory.
    """
    try:
        return op(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        remembered = vars(_last_error).pop("value", None)  # its traceback keeps the caller's tensors alive
        DEFINITIONS[op].check(*args, **kwargs)
        if remembered is not None and "torch_call_dispatcher" in str(error):  # all that C++ says of such an error
            raise remembered from None
        raise


_last_error = threading.local()


def _remembered(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` for C++ to call, which loses the type and the words of an error on its way."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except Exception as error:
            _last_error.value = error
            raise

    return run


def note_written(*lists: Sequence[Tensor]) -> None:
    """Tells autograd what C++ wrote, which counts no versions: without it a later backward pass is silently wrong.

    In a compiled graph the compiler does.
    """
    if torch.compiler.is_compiling():
        return
    for tensors in lists:
        try:
            torch.autograd.graph.increment_version(tensors)
        except RuntimeError:  # inference tensors have no version
            torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _after(check: Callable[..., None], kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return kernel(*args, **kwargs)

    return checked


def _reported(reference: Callable[..., Any]) -> Callable[..., Any]:
    """`reference` as the dispatcher finds it where there is nothing faster: its user is told, once for each device."""

    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        devices = [tensor.device for tensor in _tensors((*args, *kwargs.values()))]
        if devices:  # a scalar next to tensors on a GPU may be on the CPU
            device = next((device for device in devices if device.type == "cuda"), devices[0])
            importlib.import_module("amp_kernels.backends").automatic(device)
        return reference(*args, **kwargs)

    return run


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    lists = [argument if isinstance(argument, (list, tuple)) else [argument] for argument in arguments]
    return [element for elements in lists for element in elements if isinstance(element, Tensor)]
