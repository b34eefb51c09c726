"""Files import what the table of folders in docs/internals/index.md allows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "internals" / "index.md"
# Names of installed packages, and their folders in a clone.
PACKAGES = {"amp_kernels.benchmarks": "benchmarks", "amp_kernels.triton_kernels": "triton_kernels"}


class Row(NamedTuple):
    """Places are files, or folders with "/" at their end: of these the files, not the folders in them."""

    places: tuple[str, ...]
    allowed: tuple[str, ...]
    trees: tuple[str, ...]
    may_include_torch: bool

    def allows(self, place: str) -> bool:
        return place in (*self.places, *self.allowed) or place.startswith(self.trees or "nothing")


def rows() -> Iterator[Row]:
    for line in TABLE.read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        places = tuple(re.findall(r"`([^`]+)`", cells[0]))
        if len(cells) != 3 or not places or places[0].startswith("tests/"):
            continue
        top = "csrc/" if places[0].startswith("csrc/") else "amp_kernels/"
        trees = tuple(re.findall(r"all of `([^`]+)`", cells[2]))
        names = [name for name in re.findall(r"`([^`]+)`", cells[2]) if name not in trees]
        allowed = tuple(name if (ROOT / name).exists() else top + name for name in names)
        missing = [place for place in (*places, *allowed, *trees) if not (ROOT / place).exists()]
        assert not missing, f"{TABLE.name} names {missing}, which are not there"
        yield Row(places, allowed, trees, cells[2].endswith("torch"))


ROWS = list(rows())


def place_of(path: Path) -> str:
    """The file, if it has a row of its own, or its folder."""
    name = str(path.relative_to(ROOT))
    return name if any(name in row.places for row in ROWS) else f"{Path(name).parent}/"


def file_of(module: str) -> Path | None:
    """The file of a module of ours."""
    for package, folder in PACKAGES.items():
        module = re.sub(rf"^{package}(?=\.|$)", folder, module)
    path = ROOT / module.replace(".", "/")
    for found in (path.with_suffix(".py"), path / "__init__.py"):
        if found.exists() and not found.is_relative_to(ROOT / "tests"):
            return found
    return None


def imports(path: Path) -> Iterator[Path]:
    """Files of ours that a Python file imports, also within functions and for types alone."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = [*(["amp_kernels"] if parts[0] != "amp_kernels" else []), *parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [file_of(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found = [file_of(f"{module}.{alias.name}") or file_of(module) for alias in node.names]
        else:
            continue
        yield from filter(None, found)


def includes(path: Path) -> Iterator[Path]:
    for name in re.findall(r'^#include "([^"]+)"', path.read_text(), flags=re.MULTILINE):
        yield (path.parent / name).resolve()


SOURCES = [
    path
    for folder in ("amp_kernels", "benchmarks", "csrc", "triton_kernels")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".h", ".cuh", ".cpp", ".cu") and path.name != "build_backend.py"
]


def wrong_in(path: Path) -> Iterator[str]:
    place, name, is_python = place_of(path), path.relative_to(ROOT), path.suffix == ".py"
    row = next((row for row in ROWS if place in row.places), None)
    if row is None:
        yield f"{name}: no row names {place}"
        return
    for file in imports(path) if is_python else includes(path):
        if not row.allows(place_of(file)):
            yield f"{name} imports {file.relative_to(ROOT)}"
    if not is_python and "#include <torch/" in path.read_text() and not row.may_include_torch:
        yield f"{name} includes torch"


def test_files_import_what_the_table_allows() -> None:
    assert len(SOURCES) > 150
    wrong = [sentence for path in SOURCES for sentence in wrong_in(path)]
    assert not wrong, f"not allowed by {TABLE.relative_to(ROOT)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("amp_kernels/ops/unscale.py", "from ..optim import adam"),
        ("amp_kernels/ops/unscale.py", "if TYPE_CHECKING:\n    from ..backends import use_backend"),
        ("amp_kernels/reference/sgd.py", "def f():\n    import amp_kernels.families"),
        ("benchmarks/steps.py", "from .experiments import harness"),
        ("triton_kernels/sgd.py", "from ..optim._plan import Plan"),
        ("csrc/cpu/update.h", '#include "../ops/lists.h"'),
        ("csrc/cuda/unscale.cu", "#include <torch/csrc/stable/tensor.h>"),
    ],
)
def test_an_import_that_is_not_allowed_is_found(file: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = ROOT / file, (ROOT / file).read_text()
    monkeypatch.setattr(Path, "read_text", lambda _: f"{text}\n{line}\n")
    (sentence,) = wrong_in(path)
    assert sentence.startswith(f"{file} i")
