"""All private interfaces of torch that this package uses: what for, and what happens in a torch that lacks one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.utils import _python_dispatch


def _watches() -> bool:
    return True


# What tells whether something in torch watches the calls of operators.
_is_transforming = getattr(torch._C, "_are_functorch_transforms_active", _watches)
_has_modes = getattr(torch._C, "_len_torch_dispatch_stack", _watches)
_has_function_modes = getattr(torch._C, "_len_torch_function_stack", _watches)
_is_tracing = getattr(torch._C, "_is_tracing", _watches)
_is_profiling = getattr(torch.autograd, "_profiler_enabled", _watches)


def tensor_exchange_api() -> Any:
    """Return the capsule of DLPack's C functions, with which C++ reads tensors in a step (optim/_sweep.py).

    If torch has none, the answer is None. The step then reads tensors in Python, which takes twelve times as long.
    """
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def lazy_clone(tensor: Tensor) -> Tensor:
    """Return a clone that shares the memory of `tensor` until one of the two is written.

    A torch without this function makes no such clones. The answer is then an ordinary clone.
    """
    clone: Tensor = getattr(torch, "_lazy_clone", torch.clone)(tensor)
    return clone


def is_lazy_clone(tensor: Tensor) -> bool:
    """Return whether a tensor still shares its memory as a lazy clone. If torch cannot tell, the answer is False."""
    ask = getattr(torch._C, "_is_cow_tensor", None)
    return ask is not None and bool(ask(tensor))


def dtensor_attributes() -> tuple[str, str]:
    """Return the attributes of a DTensor that C++ reads in a step: its local tensor, and its spec (csrc/ops/columns.h).

    `DTensor.to_local()` returns the same tensor, but takes 14 us, a thousand times as long. A spec has the public
    `mesh` and `placements`. If a DTensor lacks one of the attributes, C++ leaves it to Python.
    """
    return "_local_tensor", "_spec"


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the device mesh that `mesh` was sliced or flattened from, or `mesh` itself (_shards.py).

    If torch lacks the method, a mesh without all ranks raises an error, since it may be a slice.
    """
    ask = getattr(mesh, "_get_root_mesh", None)
    if ask is None and mesh.size() < torch.distributed.get_world_size():
        raise RuntimeError(
            "amp_kernels: this torch cannot tell whether a device mesh is a slice; use torch 2.10 to 2.13"
        )
    root: DeviceMesh = mesh if ask is None else ask()
    return root


def is_flattened_by_fsdp1(param: Tensor) -> bool:
    """Return whether a parameter is a flat parameter of FSDP1, or is part of one. False in a torch without FSDP1."""
    return getattr(param, "_fsdp_flattened", False)


def are_cut_by_fsdp1(params: Sequence[Tensor]) -> list[bool]:
    """Return for each parameter whether FSDP1 has cut it, so that every rank has another part of it.

    With the strategy NO_SHARD it cuts none. Only the flat parameter has attributes that tell. The original parameters
    (``use_orig_params=True``) do not refer to it, so this function searches all objects for it, which takes 0.1 s. A
    parameter whose flat parameter is not found counts as cut.
    """
    flat = {id(p): p for p in params if hasattr(p, "_unpadded_unsharded_size")}
    if any(is_flattened_by_fsdp1(p) and id(p) not in flat for p in params):
        for found in (x for x in gc.get_objects() if type(x) is Parameter and hasattr(x, "_is_flat_param")):
            flat.update((id(p), found) for p in getattr(found, "_params", None) or ())

    def is_cut(p: Tensor) -> bool:
        whole = flat.get(id(p))
        return whole is None or hasattr(whole, "_full_param_padded") or whole._unpadded_unsharded_size != whole.size()

    return [is_flattened_by_fsdp1(p) and is_cut(p) for p in params]


def dispatch_mode_count() -> Callable[[], int] | None:
    """Return the function that counts the dispatch modes of this thread, for C++ (optim/_plan.py).

    `use_backend` and the modes that make fake tensors are such modes. If torch has no function for it, the answer is
    None. Every step is then taken in Python.
    """
    return None if _has_modes is _watches else _has_modes


def increment_version() -> Callable[[Any], None]:
    """Return the function that raises the version counters of tensors in a list, for C++ (optim/_plan.py).

    It is the C function that `torch.autograd.graph.increment_version` calls, or in a torch without it that one. Python
    in between takes 0.2 us, a fiftieth of the shortest step.
    """
    public: Callable[[Any], None] = torch.autograd.graph.increment_version
    return getattr(torch._C, "_increment_version", public)


def is_watched() -> bool:
    """Return whether something in torch has to see the calls of operators. Otherwise C++ can do their work directly.

    It is so while torch compiles or traces, inside transforms and modes, and under the profiler. If torch cannot tell,
    the answer is True.
    """
    if torch.compiler.is_compiling():  # first, because dynamo cannot trace the other functions
        return True
    is_in_mode = _has_modes() or _has_function_modes() or _is_transforming()
    return bool(is_in_mode or _is_tracing() or _is_profiling())


def are_functorch_transforms_active() -> bool:
    """Return whether a transform of `torch.func` is active.

    Inside a transform, an autograd function that has no rule for this transform raises an error. There, this package
    calls torch's own operators instead of its autograd functions. If torch cannot tell, the answer is True.
    """
    ask = getattr(torch._C, "_are_functorch_transforms_active", None)
    return ask is None or ask()


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode differentiation is active.

    An autograd function without a rule for forward mode may return a derivative of 0.
    """
    return are_functorch_transforms_active() or getattr(forward_ad, "_current_level", 0) >= 0


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass, so that a layer runs only to compute its activations again.

    If torch cannot tell, the answer is False. `PrecisionReport` then counts recomputed activations twice.
    """
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return ask is not None and ask() != -1


def has_global_hooks() -> bool:
    """Return whether torch has hooks for the calls of all modules, as counters of operations register them.

    An `nn.Sequential` with int8 layers then calls each layer as a module. If torch cannot tell, the answer is True.
    """
    ask = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return ask is None or bool(ask())


def note_skipped_step(optimizer: Any) -> None:
    """Tell torch's schedulers that a step of `optimizer` was due, although the host skipped it.

    Otherwise the first step of a scheduler would warn that it "was called before `optimizer.step()`", when only the
    first step overflowed. A torch whose schedulers read another attribute warns as it does under its own scaler.
    """
    if isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def dispatch_modes() -> list[Any] | None:
    """Return the dispatch modes of this thread, the innermost last, among them that of `use_backend`.

    If torch has no function for it, the answer is None. A forced backend then does not reach autograd's threads.
    """
    ask = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
    return None if ask is None else ask()


# If a tensor subclass has this `__torch_function__`, the results of operators are not wrapped in the subclass. torch
# documents this function for authors of subclasses.
no_torch_function = getattr(torch._C, "_disabled_torch_function_impl", None)


def wrapper_tensor(kind: type[Any], like: Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of class `kind` with the shape, strides and device of `like`, but without memory.

    C code that reads the memory of this tensor raises an error, or, in a torch without the function
    `_set_throw_on_mutable_data_ptr`, reads from address 0. If torch cannot make such tensors, None is returned. The
    weight of an int8 layer is then dequantized whenever it is read.
    """
    make = getattr(Tensor, "_make_wrapper_subclass", None)
    if make is None or no_torch_function is None:
        return None
    made = make(kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device)
    getattr(torch._C, "_set_throw_on_mutable_data_ptr", bool)(made)
    # This attribute makes isinstance(made, nn.Parameter) True, which `tie_weights` of transformers requires. If a
    # version of torch tests another attribute, `tie_weights` raises an error.
    made._is_param = True
    return made


def _mixes_rows() -> bool:
    """Return whether a NaN in one row of the left matrix reaches other rows of torch's bf16 product on this CPU.

    Let the left matrix be [M, K]. On a CPU with AMX, torch 2.13 reads past the end of a row, into the next row, and
    multiplies what it reads there by 0, which is NaN for NaN and inf. It does so if M is at least 17, for most K that
    are not multiples of 32, for example for 33 and 1000. torch 2.11 does not.
    """
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if has_amx is not None and not has_amx():
        return False
    x, ones = (torch.ones(shape, dtype=torch.bfloat16, device="cpu") for shape in ((40, 33), (33, 8)))
    x[1] = torch.nan
    try:
        return bool((x @ ones)[0].isnan().any())
    except RuntimeError:  # a fake tensor has no values
        return True


MIXES_ROWS = _mixes_rows()
