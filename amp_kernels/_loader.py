"""The loader of the compiled kernels, amp_kernels._C, and of packages that a plain install does not bring."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from . import torch_private

_PACKAGE = Path(__file__).parent
_REBUILD = "rebuild it with `pip install --no-build-isolation .`"


def load() -> bool:
    """Register the kernels of amp_kernels._C with torch's dispatcher, once. Return False if they cannot be loaded."""
    return load_error() is None


@functools.cache
def load_error() -> str | None:
    """Return None if amp_kernels._C is loaded, otherwise a sentence that says why not and what to do."""
    if importlib.util.find_spec("amp_kernels._C") is None:
        return shadowed() or build_note() or f"amp_kernels._C has not been built; {_REBUILD}"
    try:
        importlib.import_module("amp_kernels._C")
    except ImportError as error:  # for example, _C was built for CUDA, but the installed torch lacks CUDA's libraries
        return f"amp_kernels._C was built for another torch and cannot be loaded ({error}); {_REBUILD}"
    return None


def build_note() -> str | None:
    """Return the note that setup.py wrote, or None: which kernels are missing, why, and what to do."""
    try:
        return (_PACKAGE / "_build.txt").read_text() or None
    except FileNotFoundError:
        return None


def shadowed() -> str | None:
    """Return a sentence if the source folder was imported instead of the installed package, otherwise None."""
    # There may be several distributions, because an install leaves metadata in the repository too. For the metadata in
    # the repository, `installed` is the source folder itself. For an editable install, `installed` does not exist.
    for distribution in importlib.metadata.distributions(name="amp-kernels"):
        installed = Path(str(distribution.locate_file("amp_kernels")))
        if (installed / "__init__.py").exists() and not installed.samefile(_PACKAGE):
            return (
                f"the installed package {installed} is shadowed by the source folder {_PACKAGE}; run Python in another "
                "directory, use the command `amp-kernels` in place of `python -m amp_kernels`, or install with "
                "`pip install --no-build-isolation -e .`"
            )
    return None


def import_extra(op: str, module: str, extra: str) -> ModuleType:
    """Import a module of a package that `extra` in pyproject.toml lists. `op` is the function that needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{op}: {package} must be installed; run pip install 'amp-kernels[{extra}]'") from error


@functools.cache
def reader() -> tuple[Any, tuple[Any, ...]] | None:
    """Return amp_kernels._C, and the functions and types of torch with which it reads tensors from Python objects.

    Return None if _C cannot be loaded or cannot read tensors, for example because torch 2.10 has no DLPack functions.
    """
    api = torch_private.tensor_exchange_api()
    if api is None or not load():
        return None
    # C++ takes the C functions of the tensor's methods. Default dtypes and devices are the user's, so none is left out.
    ones = torch.ones(4, dtype=torch.float32, device="cpu")
    torchs = (api, Tensor, Parameter, ones.is_neg, ones.is_inference, DTensor, *torch_private.dtensor_attributes())
    compiled: Any = importlib.import_module("amp_kernels._C")
    try:
        compiled.sweep([], [], [], (), (1, 0), 0, 0, 0, torchs)
        compiled.same([], [], {}, [], [])
        _ = compiled.make_step, compiled.step, compiled.gradient_pass, compiled.update
    except (AttributeError, TypeError, ValueError, NotImplementedError):  # `_C` or `api` is of another version
        return None
    clone, found_inf = torch_private.lazy_clone(ones), torch.zeros((), dtype=torch.float32, device="cpu")
    compiled.gradient_pass(torchs, [clone], None, found_inf, None, False)  # C++ would write what a lazy clone shares
    return None if torch_private.is_lazy_clone(clone) else (compiled, torchs)


@functools.cache
def has_cuda() -> bool:
    """Return whether amp_kernels._C has kernels for CUDA."""
    return load() and hasattr(importlib.import_module("amp_kernels._C"), "why_no_kernel")
