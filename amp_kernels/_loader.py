"""Loads the compiled kernels, amp_kernels._C, and keeps the reason when it cannot."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path

_PACKAGE = Path(__file__).parent
_REBUILD = "rebuild it with `pip install --no-build-isolation .`"


def load() -> bool:
    """Registers the kernels of amp_kernels._C with the dispatcher, once; False if they cannot be had."""
    return load_error() is None


@functools.cache
def load_error() -> str | None:
    """None if amp_kernels._C is loaded, else a sentence that says why not and what to do."""
    if importlib.util.find_spec("amp_kernels._C") is None:
        return shadowed() or build_note() or f"amp_kernels._C has not been built; {_REBUILD}"
    try:
        importlib.import_module("amp_kernels._C")
    except ImportError as error:  # also what the dynamic linker says, e.g. of a CUDA build under a CPU torch
        return f"amp_kernels._C was built for another torch and cannot be loaded ({error}); {_REBUILD}"
    return None


def build_note() -> str | None:
    """What the build left out, why, and what to do (written by setup.py); None if it left out nothing."""
    try:
        return (_PACKAGE / "_build.txt").read_text() or None
    except FileNotFoundError:
        return None


def shadowed() -> str | None:
    """A sentence if this is not the installed package but the source folder, as Python runs in the clone.

    That folder holds neither the compiled kernels nor the Triton ones.
    """
    # Several, since an install leaves its metadata in the clone too. An editable install has no such folder.
    for distribution in importlib.metadata.distributions(name="amp-kernels"):
        installed = Path(str(distribution.locate_file("amp_kernels")))
        if (installed / "__init__.py").exists() and not installed.samefile(_PACKAGE):
            return (
                f"the installed package {installed} is shadowed by the source folder {_PACKAGE}; run Python in another "
                "directory, call `amp-kernels`, or install with `pip install --no-build-isolation -e .`"
            )
    return None


@functools.cache
def has_cuda() -> bool:
    """Whether amp_kernels._C holds kernels for CUDA."""
    return load() and hasattr(importlib.import_module("amp_kernels._C"), "why_no_kernel")
