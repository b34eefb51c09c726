"""The docstrings of the names in tests/api.txt, which the API pages of the documentation show.

Each has a first line that stands alone. Each function, method and class documents its arguments and its result, and has
an example. All examples run, on a CPU, with only `torch` and `amp_kernels` imported. `make test-clients` runs this file
too, since a module of `amp_kernels.integrations` is tested only where its library is installed.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import pydoc
import re
import typing
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_api import of_absent_integrations, present_integrations

import amp_kernels

API = Path(__file__).parents[1] / "api.txt"
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples")
# griffe, the parser of mkdocstrings, reads such a line as the heading of a section. It knows "Examples", not "Example".
HEADER = re.compile(r"^(\w[\w ]*):\n+ ", re.M)
NAMES = API.read_text().splitlines()


class Public:
    """The thing that a line of tests/api.txt names, and its docstring."""

    def __init__(self, line: str) -> None:
        self.name = re.split(r"[(:]", line, maxsplit=1)[0]
        module, *attributes = _importable(self.name)
        self.thing: Any = module
        self.owner: Any = None
        for attribute in attributes:
            self.owner, self.thing = self.thing, inspect.getattr_static(self.thing, attribute)
        self.thing = getattr(self.thing, "__func__", self.thing)  # of a class method
        self.is_property = isinstance(self.thing, property)
        self.is_class = inspect.isclass(self.thing)
        self.is_function = inspect.isfunction(self.thing)
        self.is_value = not (self.is_property or self.is_class or self.is_function or inspect.ismodule(self.thing))
        self.is_method = self.is_function and inspect.isclass(self.owner)
        # Not inspect.getdoc, which would also find the docstring of torch's base class.
        self.doc = inspect.cleandoc(self.thing.__doc__ or "")

    def parameters(self) -> list[str]:
        if self.is_class and not {"__init__", "__new__"} & {name for kind in _ours(self.thing) for name in vars(kind)}:
            return []
        parameters = list(inspect.signature(self.thing).parameters.values())
        if self.is_method:
            del parameters[0]
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        return [stars.get(p.kind, "") + p.name for p in parameters]

    def entries(self, section: str) -> list[str]:
        """The first lines of the entries of a section, as griffe reads them: lines that are not indented further."""
        found = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", self.doc + "\n", re.M)
        return re.findall(r"^    (\S.*)", found[1], re.M) if found else []

    def names(self, section: str) -> list[str]:
        return [entry.partition(":")[0] for entry in self.entries(section)]

    def examples(self) -> list[doctest.Example]:
        return doctest.DocTestParser().get_examples(self.doc, self.name)

    def result(self) -> str | None:
        """The section of its result; None if it has none."""
        plain = inspect.unwrap(self.thing)
        result = typing.get_type_hints(plain).get("return")
        if plain is not self.thing and inspect.isgeneratorfunction(plain):  # in contextlib.contextmanager
            return None if typing.get_args(result)[0] in (None, type(None)) else "Yields"
        return None if result is type(None) else "Returns"


def _importable(name: str) -> tuple[Any, ...]:
    """The innermost module of a dotted name, and the attributes that follow."""
    parts = name.split(".")
    module, attributes = amp_kernels, parts[1:]
    while attributes and isinstance(getattr(module, attributes[0], None), ModuleType):
        module, *attributes = getattr(module, attributes[0]), *attributes[1:]
    return module, *attributes


def _ours(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "amp_kernels"]


def _everything() -> list[Public]:
    for name in ("grad_scaler", "testing", "audit"):
        importlib.import_module(f"amp_kernels.{name}")
    present_integrations()  # imports them
    absent = of_absent_integrations(NAMES)
    return [public for line in NAMES if line not in absent and not (public := Public(line)).is_value]


def _parameters_of(name: str) -> list[str]:
    """The parameters of a public function or class of torch or of amp_kernels."""
    return list(inspect.signature(pydoc.locate(name)).parameters)  # type: ignore[arg-type]


def _faults(public: Public, by_name: dict[str, Public]) -> Iterator[str]:
    first, *rest = public.doc.split("\n")
    if not first.endswith(".") or (rest and rest[0]):
        yield "its first line must stand alone: a sentence, then an empty line"
    if sections := [name for name in HEADER.findall(public.doc) if name not in SECTIONS]:
        yield f"sections must be of {SECTIONS}, got {sections}"
    if not (public.is_class or public.is_function):
        return
    parameters, documented = public.parameters(), public.names("Args")
    if public.is_class and parameters and not documented:
        documented = public.names("Attributes")  # of a dataclass or a NamedTuple
    if elsewhere := re.search(r"takes the arguments of `([\w.]+)`", public.doc.replace("\n", " ")):
        documented = [name for name in by_name[elsewhere[1]].names("Args") if name in parameters]
    if others := re.search(r"arguments are those of (`[\w.]+`(?: and `[\w.]+`)*)", public.doc.replace("\n", " ")):
        theirs = {name for other in re.findall(r"`([\w.]+)`", others[1]) for name in _parameters_of(other)}
        parameters = [name for name in parameters if name in documented or name not in theirs]
    if parameters != documented:
        yield f"Args must have {parameters}, has {documented}"
    section = public.result() if public.is_function else None
    if section and len(public.entries(section)) != 1:
        yield f"{section} must be one entry, whose further lines are indented"
    calls = ""
    if public.is_method:
        calls = "".join(example.source for example in by_name[public.name.rpartition(".")[0]].examples())
    if not public.examples() and f".{public.thing.__name__}(" not in calls:
        yield "an example must call it, here or in the docstring of its class"


def test_docstrings_are_complete() -> None:
    things = _everything()
    by_name = {thing.name: thing for thing in things}
    faults = [f"{thing.name}: {fault}" for thing in things for fault in _faults(thing, by_name)]
    assert not faults, "\n".join(faults)


def test_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp_kernels.integrations.apex, "_set_up", None)
    report = StringIO()
    failures = 0
    for public in {public.thing: public for public in _everything()}.values():
        names = {"torch": torch, "amp_kernels": amp_kernels}
        test = doctest.DocTest(public.examples(), names, public.name, None, 0, None)
        runner = doctest.DocTestRunner()
        with redirect_stdout(StringIO()), torch.random.fork_rng():
            runner.run(test, out=report.write)
        failures += runner.failures
    assert not failures, report.getvalue()
