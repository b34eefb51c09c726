"""How an operator is defined: one schema, and a kernel for each dispatch key.

docs/internals/walks.md says which kernel serves which tensors. The reference has the key CompositeExplicitAutograd. A
kernel for a device has precedence over it, in whatever order they are registered. On the key Autograd a call falls
through to the next key. A differentiable operator registers its own autograd instead.

``_C`` may have CUDA kernels, but no code for the GPU of a call. The CUDA kernel in ``_C`` then calls the operator
``_uncompiled_<name>``, which runs Triton if it is installed and has a kernel, else the reference. This is decided for
each GPU (csrc/ops/on_gpu.h).

An operator with `delegates` has a second name, ``_compiled_<name>``. Under the first name, the CUDA kernel passes a
call on to Triton or to torch if that was measured to be faster (csrc/ops/int8.cpp). Under the second name, it passes on
only inputs that the C++ kernels cannot multiply.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _loader, reference

LIBRARY = torch.library.Library("amp_kernels", "DEF")


Kernel = Callable[..., Any]


class Kernels(Protocol):
    """The kernels that Python launches: Triton kernels, or in tests CUDA kernels on the emulator.

    The first five take the table of tensors (ops/table.py): two read it, two load kernels for them, and one sends it to
    a GPU. C++ has these five too, as operators: see `backends.kernels`.
    """

    _unscale_table_: Kernel
    _update_table_: Kernel
    _load_unscale: Kernel
    _load_update: Kernel
    _send_: Kernel  # not called on a CPU, where kernels read the table in host memory
    _copy_pad_: Kernel
    _quantize_int8_: Kernel
    _dequantize_int8_: Kernel
    _straight_through_int8_: Kernel
    _int8_matmul_: Kernel
    _int8_conv2d_: Kernel
    _int8_linear_: Kernel


class Definition(NamedTuple):
    """The functions of an operator that can be called from Python. They take the operator's arguments."""

    check: Callable[..., None]
    reference: Callable[..., Any]
    launch: Callable[..., Any] | None  # its first argument is the `Kernels`
    compiled: Any  # what `use_backend("cuda")` calls: ``_compiled_<name>`` if there is one, else the operator


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
    by_table: bool = False,
) -> Any:
    """Define ``torch.ops.amp_kernels.<name>``, and return it.

    Args:
        schema: The schema as in `torch.library`, beginning with the name. A list that may be absent has the type
            ``Tensor[]?``. Pass None for it, not an empty list. AOTInductor turns an empty list into None, so the
            operator would get other arguments there than in eager mode. If an operator mutates arguments, at least one
            of them must always be present, or Inductor crashes.
        check: Raises an error with a full message if an argument does not fit. It runs before `reference`, `fake` and
            `launch`. C++ kernels do not run it: they check their arguments and raise an error without details. `call`
            then runs `check` for the message.
        reference: The specification in plain torch, without gradients.
        fake: Returns tensors without memory that stand for the results while a graph is traced.
        launch: Allocates the results and launches kernels from Python. Its first argument is the `Kernels` to launch.
            None if there is no Triton kernel. The reference then takes its place.
        by_table: Whether `launch` also launches the C++ kernels, by their operators that take a table (ops/lists.py).
            The C++ kernel of the operator passes calls that it does not serve on to ``_uncompiled_<name>``.
        is_differentiable: Whether the caller registers autograd.
        delegates: Whether the CUDA kernel may pass a call on to Triton or torch.
    """
    name = schema.partition("(")[0]
    reference = torch.no_grad()(_after(check, reference))
    launch = None if launch is None else torch.no_grad()(_after(lambda _, *args: check(*args), launch))
    LIBRARY.define(schema)
    everywhere = _automatic(reference, launch if by_table else None)
    LIBRARY.impl(name, everywhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_kernels::{name}", _after(check, fake), lib=LIBRARY)
    by_triton = None
    if launch is not None and importlib.util.find_spec("triton"):
        by_triton = lambda *args, **kwargs: launch(triton_kernels(), *args, **kwargs)  # noqa: E731
    if by_table or _loader.has_cuda():
        kernel, key = (everywhere, "CompositeExplicitAutograd") if by_table else (by_triton or everywhere, "CUDA")
        LIBRARY.define(f"_uncompiled_{schema}")
        LIBRARY.impl(f"_uncompiled_{name}", _remembered(kernel), key)
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


class Arguments:
    """The arguments of an operator. A subclass is a dataclass that has them as fields, in the order of the schema.

    Its methods are the functions that `operator` takes. If there is no Triton kernel, it has no `launch`.
    """

    name: ClassVar[str]  # of the operator, and of its specification in `amp_kernels.reference`; `define` sets it
    check: Callable[[], None]
    fake: Callable[[], Any]

    def in_torch(self) -> Any:
        """Return what the specification returns, in memory of any strides."""
        return getattr(reference, self.name)(**vars(self))

    def reference(self) -> Any:
        """Return the results of the specification, with the strides that `fake` chooses."""
        results, values = self.fake(), self.in_torch()
        one = isinstance(results, Tensor)
        for result, value in zip([results] if one else results, [values] if one else values, strict=True):
            if result.numel() > 0:  # the value may be None if the result has no elements
                result.copy_(value)
        return results


def define(name: str, arguments: Any, returns: str = "Tensor", **options: bool) -> Any:
    """Define an operator that mutates nothing by its class of `Arguments`. `options` are those of `operator`.

    The schema is made from the text of the annotations, so these must not be aliases: `int | None` becomes `int?`.
    """
    arguments.name = name
    types = {"Sequence[int]": "int[]", "torch.dtype": "ScalarType"}
    fields = [(field.name, *field.type.partition(" | ")) for field in dataclasses.fields(arguments)]
    columns = (f"{types.get(kind, kind)}{'?' if none else ''} {field}" for field, kind, _, none in fields)
    return operator(
        f"{name}({', '.join(columns)}) -> {returns}",
        check=lambda *args: arguments(*args).check(),
        reference=lambda *args: arguments(*args).reference(),
        fake=lambda *args: arguments(*args).fake(),
        launch=(lambda kernels, *args: arguments(*args).launch(kernels)) if hasattr(arguments, "launch") else None,
        **options,
    )


def triton_kernels() -> Kernels:
    """Return the module of the Triton kernels."""
    module: Any = importlib.import_module("amp_kernels.triton_kernels")
    return module


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the operator's result. If C++ refuses an argument, the operator's check raises an error that names it.

    The check does not run before the operator. For `int8_matmul` it takes 6 us, as long as the whole call of a small
    product, and C++ has to check its arguments anyway, to protect memory.
    """
    try:
        return op(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        # The error that `_remembered` kept is removed from `_last_error`, because its traceback would keep the caller's
        # tensors alive.
        remembered = vars(_last_error).pop("value", None)
        DEFINITIONS[op].check(*args, **kwargs)
        # If C++ called `_uncompiled_<name>`, and that failed, the error from C++ says only which call failed.
        if remembered is not None and "torch_call_dispatcher" in str(error):
            raise remembered from None
        raise


_last_error = threading.local()


def _remembered(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel that C++ calls. Its errors are kept for `call`, since C++ loses their type and their message."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except Exception as error:
            _last_error.value = error
            raise

    return run


def note_written(*lists: Sequence[Tensor]) -> None:
    """Increment the version counters of tensors that an operator wrote.

    C++ kernels do not increment them. If this call is missing, autograd does not notice the write, and a later backward
    pass is silently wrong. In a compiled graph the compiler takes care of the version counters.
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


def _automatic(reference: Callable[..., Any], launch: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the kernel for all devices for which the dispatcher has no other kernel.

    It launches the kernels of the device's backend by `launch`, or calls the reference. `backends.automatic` warns once
    for each CPU or GPU that only the reference can serve.
    """

    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        devices = [tensor.device for tensor in tensors_of((*args, *kwargs.values()))]
        kernels = None
        if devices:
            # If any tensor is on a GPU, the operator runs for that GPU: its CPU tensors are scalars.
            device = next((device for device in devices if device.type == "cuda"), devices[0])
            backends = importlib.import_module("amp_kernels.backends")
            kernels = backends.kernels(backends.automatic(device))
        if launch is None or kernels is None:
            return reference(*args, **kwargs)
        return launch(kernels, *args, **kwargs)

    return run


def tensors_of(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Return the tensors among the arguments of an operator, and in lists among them."""
    lists = (argument if isinstance(argument, (list, tuple)) else [argument] for argument in arguments)
    return (element for elements in lists for element in elements if isinstance(element, Tensor))
