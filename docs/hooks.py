"""What mkdocs adds to the pages of this folder: files from elsewhere in the repository, each under its own path.

So a page has one source, and its relative links hold on the site as in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent, indent

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")
RESULTS = ROOT / "benchmarks" / "results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    results = [path for path in RESULTS.rglob("*") if path.suffix in {".csv", ".md", ".png"}]
    for path in (*(ROOT / page for page in PAGES), *sorted(results)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Includes what `<!-- include NAME from FILE -->` names, and turns links in the repository into links on the site.

    On the site this folder is the root: a page of the root reaches it without ``docs/``, and a page of this folder
    leaves it with one ``../`` less.
    """
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"]({up}docs/", f"]({up}")
    if page.file.src_uri in PAGES:
        return markdown
    markdown = re.sub(rf"\]\({re.escape(up)}\.\./(?=\w)", f"]({up}", markdown)
    include = r"^( *)<!-- include (\w+) from (\S+) -->$"
    return re.sub(include, lambda match: indent(marked(*match.groups()[1:]), match[1]), markdown, flags=re.MULTILINE)


def marked(name: str, path: str) -> str:
    """The lines of a file from `<!-- NAME: ... -->` to `<!-- end of NAME -->`, without what all are indented by."""
    found = re.search(rf"<!-- {name}: [^\n]*-->\n(.*?)<!-- end of {name} -->", (ROOT / path).read_text(), re.DOTALL)
    if found is None:
        raise PluginError(f"docs/hooks.py: {path} must have lines from <!-- {name}: ... --> to <!-- end of {name} -->")
    return dedent(found[1])
