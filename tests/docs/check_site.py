"""Checks the built documentation: `python tests/docs/check_site.py build/site`; `make docs` runs it.

Every link and picture on a page must lead to a file of the site. Every fragment must lead to an element with that id.
Every name in tests/api.txt must have an entry. mkdocs checks only the links in Markdown. This script reads the HTML, so
it also sees links from docstrings and from the theme.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

API = Path(__file__).parents[1] / "api.txt"
NOT_FOUND = "404.html"  # its links are absolute, since it is served at any depth


class Document(HTMLParser):
    """The ids and the references of a page, and the kind of each entry that mkdocstrings made."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.references: list[str] = []
        self.entries: dict[str, str] = {}  # "function", "class", "attribute" or "module"
        self._kind: str | None = None  # of an entry whose id comes next
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "class" and value and "doc-object" in value:
                self._kind = value.split("doc-")[-1]
            elif name == "id" and value:
                self.ids.add(value)
                if self._kind is not None:
                    self.entries[value] = self._kind
                    self._kind = None
            elif name in ("href", "src") and value:
                self.references.append(value)


def read(site: Path) -> dict[Path, Document]:
    return {path: Document(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def broken_links(site: Path, pages: dict[Path, Document]) -> Iterator[str]:
    for path, page in pages.items():
        if path.name == NOT_FOUND:
            continue
        for reference in dict.fromkeys(page.references):
            url = urlsplit(reference)
            if url.scheme or url.netloc:  # other sites: never asked, CI may have no network
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            where = path.relative_to(site)
            if not target.is_relative_to(site) or not target.is_file():
                yield f"{where}: {reference} leads nowhere"
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
                yield f"{where}: {reference}: {target.relative_to(site)} has no element with that id"


def missing_names(lines: list[str], pages: dict[Path, Document]) -> Iterator[str]:
    """Names of tests/api.txt without an entry, or with one of something else that has the same name."""
    entries = {name: kind for page in pages.values() for name, kind in page.entries.items()}
    for line in lines:
        name, kinds = kinds_of(line)
        if entries.get(name) not in kinds:
            found = f"the entry of a {entries[name]}" if name in entries else "no entry"
            yield f"{name} must have the entry of a {' or '.join(kinds)} on a page in docs/api, got {found}"


def kinds_of(line: str) -> tuple[str, tuple[str, ...]]:
    """The name in a line of tests/api.txt, and what its entry may be of."""
    name = re.split(r"[(:]", line)[0]
    if line.startswith((f"{name}(", f"{name}: class")):
        return name, ("function", "class")
    return name, ("module",) if line == f"{name}: module" else ("attribute",)


def main(site: Path) -> int:
    site = site.resolve()
    pages = read(site)
    wrong = [*broken_links(site, pages), *missing_names(API.read_text().splitlines(), pages)]
    print(*wrong, f"{len(pages)} pages, {len(wrong)} faults", sep="\n")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
