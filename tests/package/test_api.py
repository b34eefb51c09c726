"""tests/api.txt lists all that users may rely on: what public modules export by `__all__`, with signatures.

`python tests/package/test_api.py --write` writes it again. Run it in the trainers' venv (.venv/clients), which has all
libraries. Elsewhere the lines of `amp_kernels.integrations` whose library is absent stay as they are. A line that goes
or changes breaks somebody's code, so it needs a line in CHANGELOG.md as well; a new one needs a sentence there that
says which need it serves.

Annotations are left out: they may become wider without anybody's code noticing. Members that torch's classes bring
along are left out too, since they differ from torch to torch. A member that several classes inherit is listed once,
under the first of them. Methods that only torch calls, to print a layer or to register a parameter, are not listed.

A thing has one public name. The names of `amp_kernels.functional` are those of `amp_kernels`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amp_kernels
from amp_kernels import integrations

API = Path(__file__).parents[1] / "api.txt"
NOT_PUBLIC = ("functional", "triton_kernels")  # names of the first are in amp_kernels; the second needs Triton
CALLED_BY_TORCH = ("extra_repr", "register_parameter")


def public_modules() -> list[ModuleType]:
    """`amp_kernels` and the modules in it that have an `__all__`."""
    found = sorted(module.name for module in pkgutil.iter_modules(amp_kernels.__path__))
    names = [name for name in found if not name.startswith("_") and name not in NOT_PUBLIC]
    modules = [amp_kernels, *(importlib.import_module(f"amp_kernels.{name}") for name in names)]
    return [module for module in [*modules, *present_integrations().values()] if hasattr(module, "__all__")]


def integrated() -> list[str]:
    """The modules of `amp_kernels.integrations`, one for each library."""
    names = [module.name for module in pkgutil.iter_modules(integrations.__path__)]
    return [f"{integrations.__name__}.{name}" for name in names if not name.startswith("_")]


def present_integrations() -> dict[str, ModuleType]:
    """Integrations whose library is installed here, by name."""
    found = {}
    for name in integrated():
        try:
            found[name] = importlib.import_module(name)
        except ModuleNotFoundError as absent:
            assert absent.name is not None and absent.name.partition(".")[0] not in ("amp_kernels", "torch"), absent
    return found


def of_absent_integrations(lines: list[str]) -> list[str]:
    absent = tuple(f"{name}." for name in integrated() if name not in present_integrations())
    return [line for line in lines if line.startswith(absent)]


def signature(function: Any) -> str:
    """`(a, *, b=1)` without annotations, whose text differs from Python to Python."""
    given = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in given.parameters.values()]
    return str(given.replace(parameters=parameters, return_annotation=given.empty))


def is_ours(thing: Any) -> bool:
    return getattr(thing, "__module__", "").partition(".")[0] == "amp_kernels"


def members(name: str, kind: type, listed: set[int]) -> Iterator[str]:
    """Constructor, methods and properties that `kind` has of us, not of torch or Python, nor of a class listed before.

    Methods that override methods of a trainer's own class are left out, since only the trainer calls them.
    """
    attributes: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if is_ours(base)]):
        attributes |= vars(base)
    if name.startswith(integrations.__name__):
        of_trainer = {attribute for base in kind.__mro__ if not is_ours(base) for attribute in vars(base)}
        attributes = {key: value for key, value in attributes.items() if key == "__init__" or key not in of_trainer}
    has_constructor = attributes.keys() & {"__init__", "__new__"}
    yield name + (signature(kind) if has_constructor else ": class")
    for attribute, value in attributes.items():
        if attribute.startswith("_") or attribute in CALLED_BY_TORCH:
            continue
        own = id(inspect.unwrap(value))  # torch's optimizers wrap their step when they are made
        if own in listed:
            continue
        listed.add(own)
        if isinstance(value, property):
            yield f"{name}.{attribute}: property" + (", can be set" if value.fset else "")
        elif callable(value) or isinstance(value, classmethod | staticmethod):
            is_bound = isinstance(value, classmethod | staticmethod)
            function = value.__func__ if isinstance(value, classmethod) else value
            yield f"{name}.{attribute}{signature(function)}" + (f": {type(value).__name__}" if is_bound else "")


def public_api() -> list[str]:
    lines: list[str] = []
    names: dict[int, str] = {}
    listed: set[int] = set()  # members of classes
    for module in public_modules():
        for attribute in module.__all__:
            name, value = f"{module.__name__}.{attribute}", getattr(module, attribute)
            if isinstance(value, ModuleType):
                lines.append(f"{name}: module")
            elif not (inspect.isfunction(value) or inspect.isclass(value)):
                lines.append(f"{name}: {type(value).__name__}")
            else:
                first = names.setdefault(id(value), name)
                assert first == name, f"{name} must have one public name, has {first} too"
                lines += members(name, value, listed) if inspect.isclass(value) else [name + signature(value)]
    return sorted(lines + of_absent_integrations(API.read_text().splitlines()))


NAMES = [(name, place) for place in ("nn", "optim", "quantization") for name in getattr(amp_kernels, place).__all__]


@pytest.mark.parametrize(("name", "module"), NAMES)
def test_a_name_that_is_sought_in_the_wrong_place(name: str, module: str) -> None:
    """The error says where it is. The name itself is not made public twice."""
    if name in amp_kernels.__all__:
        return
    sentence = f"module 'amp_kernels' has no attribute {name!r}; it is amp_kernels.{module}.{name}"
    with pytest.raises(AttributeError, match=f"^{re.escape(sentence)}$"):
        getattr(amp_kernels, name)
    assert not hasattr(amp_kernels, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
        exec(f"from amp_kernels import {name}")


def test_a_name_that_is_nowhere() -> None:
    for name in ("nowhere", "__wrapped__", "torch"):
        with pytest.raises(AttributeError, match=f"^module 'amp_kernels' has no attribute '{name}'$"):
            getattr(amp_kernels, name)


def test_public_names_are_those_of_api_txt() -> None:
    listed, found = API.read_text().splitlines(), public_api()
    gone, new = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
    remedy = "if meant: python tests/package/test_api.py --write, and CHANGELOG.md"
    assert listed == found, f"gone: {gone}; new: {new}; {remedy}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python tests/package/test_api.py --write")
    API.write_text("\n".join(public_api()) + "\n")
