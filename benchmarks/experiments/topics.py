"""Docstrings of the standard library and the package that each belongs to: a task of text classification.

The names of the packages are removed from all texts, so that no text says its own label.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The packages of Python 3.10 to 3.14 that have at least 80 docstrings. `encodings`, whose docstrings are nearly all the
# same sentence, and packages whose names begin with an underscore are left out.
PACKAGES = (
    "asyncio", "email", "http", "importlib", "inspect", "logging", "multiprocessing", "tarfile", "tkinter", "turtle",
    "unittest", "urllib", "xml",
)  # fmt: skip
LEAST = 40  # characters: shorter docstrings say nothing
MOST = 240  # docstrings of a package
# A word that contains a name, such as HTTPServer or `xmlrpc`. "tarfile" also stands for TarFile.
NAMED = re.compile(rf"\w*(?:{'|'.join(PACKAGES)})\w*", re.IGNORECASE)


@dataclass(frozen=True)
class Texts:
    """texts[i] belongs to PACKAGES[labels[i]]."""

    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, part: slice) -> Texts:
        return Texts(self.texts[part], self.labels[part])


def masked(text: str) -> str:
    """A text on one line, without the words that contain a package's name."""
    return " ".join(NAMED.sub(" ", text).split())


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a file that are long enough, masked."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and len(text := masked(text)) >= LEAST:
            yield text


def files(package: str) -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    inside = sorted((root / package).rglob("*.py"))
    return [path for path in inside or [root / f"{package}.py"] if not {"test", "tests"}.intersection(path.parts)]


@functools.cache
def texts() -> tuple[Texts, Texts]:
    """One half for training, the other for the test. A text that occurs twice is in neither."""
    found = [(text, label) for label, name in enumerate(PACKAGES) for path in files(name) for text in docstrings(path)]
    count = Counter(text for text, _ in found)
    halves: tuple[list[tuple[str, int]], ...] = ([], [])
    shuffle = random.Random(0)
    for label in range(len(PACKAGES)):
        own = [pair for pair in found if pair[1] == label and count[pair[0]] == 1]
        shuffle.shuffle(own)
        for k, pair in enumerate(own[:MOST]):
            halves[k % 2].append(pair)
    for half in halves:
        shuffle.shuffle(half)
    training, test = (Texts(*map(list, zip(*half, strict=True))) for half in halves)
    return training, test
