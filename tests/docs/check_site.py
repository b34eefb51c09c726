"""Checks the built documentation: `python tests/docs/check_site.py build/site`; `make docs` runs it.

Every link and picture of a page must lead to a file of the site, every fragment to an element with that id, and every
name of tests/api.txt must have an entry. mkdocs checks the links in Markdown; this reads the HTML, so that it also sees
links from docstrings and from the theme.
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
    """The ids of a page, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
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
    """Names of tests/api.txt without an entry; an alias (`name is other`) needs none."""
    ids = set().union(*(page.ids for page in pages.values()))
    for line in lines:
        name = re.split(r"[(:]| is ", line)[0]
        if " is " not in line and name not in ids:
            yield f"{name} has no entry in docs/api"


def main(site: Path) -> int:
    site = site.resolve()
    pages = read(site)
    wrong = [*broken_links(site, pages), *missing_names(API.read_text().splitlines(), pages)]
    print(*wrong, f"{len(pages)} pages, {len(wrong)} faults", sep="\n")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
