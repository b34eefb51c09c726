"""The Python blocks of README and docs, which run in tests as a reader would paste them.

A comment in front of a block names what it needs:

- `<!-- test: clients -->`: the packages of `make test-clients`; tests/clients/trainers/readme_clients.py runs it.
- `<!-- test: torchrun -->`: the environment variables of one rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
NEEDS = ("", "clients", "torchrun")

_FENCE = re.compile(
    r"(?:^<!-- test: (?P<marker>\w+) -->\n+)?^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    page: Path
    line: int  # of its first line of code
    needs: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def run(self, namespace: dict[str, object]) -> None:
        """Runs it; tracebacks have the lines of the page."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        needs = match["marker"] or match["info"].strip()
        assert needs in NEEDS, f"{page}: {needs!r} is none of what a block may need, {NEEDS}"
        found.append(Block(page, text[: match.start("code")].count("\n") + 1, needs, match["code"]))
    assert len(found) == text.count("```python"), f"{page}: a block of Python is indented, or has no end"
    return found
