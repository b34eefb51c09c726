"""The Python blocks of README and docs run as a reader would paste them, and their tables are true."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pages import DOCS, README, ROOT, blocks

from amp_kernels import backends
from amp_kernels.__main__ import info

SUPPORT = ROOT / "docs" / "support.md"
OPTIMIZERS = ROOT / "docs" / "guides" / "optimizers.md"
SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".py")
PAGES = [page for page in DOCS if blocks(page)]
QUESTIONS = 10


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts a test in an empty folder, with torch's default generator seeded."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the variables that torchrun sets for a job of one process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_there_are_pages() -> None:
    assert len(blocks(README)) >= 1 and len(PAGES) >= 9


@pytest.mark.parametrize("block", [b for b in blocks(README) if b.needs != "clients"], ids=lambda b: b.name)
@pytest.mark.usefixtures("reader")
def test_block_of_readme(block) -> None:
    block.run({"__name__": "readme"})


# The blocks of a page follow each other: what one names the next may use.
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("reader", "one_rank")
def test_page(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page):
        if block.needs != "clients":
            block.run(namespace)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as Python-Markdown makes them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_table_of_trainers_names_tests() -> None:
    """Column by column: the file, and functions in it."""
    clients, page = ROOT / "tests" / "clients", (ROOT / "docs" / "guides" / "trainers.md").read_text()
    section = page.partition("## Which test proves it")[2]
    rows = [line[1:-1].split("|") for line in section.splitlines() if line.startswith("|")][2:]
    columns = [[name.strip().strip("`") for name in column] for column in zip(*rows, strict=True)][1:]
    assert len(columns) == 6 and all(len(set(filter(None, tests))) >= 4 for _, *tests in columns)
    for file, *tests in columns:
        (path,) = (path for path in (clients / file, clients / "trainers" / file) if path.exists())
        defined = set(re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE))
        missing = set(filter(None, tests)) - defined
        assert not missing, f"{file} has no {missing}"


# Pages that are missing are found by mkdocs, which is strict.
@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        if there.suffix == ".md" and there.exists():
            assert anchor in anchors(there), f"{page.name} points to #{anchor} of {there.name}"


def test_the_questions_are_answered_in_sections() -> None:
    section = (ROOT / "docs" / "start.md").read_text().split("\n## Questions\n")[1].split("\n## ")[0]
    questions = section.split("\n- ")[1:]
    assert len(questions) >= QUESTIONS
    for question in questions:
        assert re.fullmatch(r"\*\*.*\?\*\*\s.*\]\([\w./-]+#[\w-]+\)\s*", question, flags=re.DOTALL), question


def test_the_table_of_bytes() -> None:
    """Rows of torch and its peers are not measured again: `python -m benchmarks.experiments.bytes` printed them."""
    table = pytest.importorskip("amp_kernels.benchmarks.experiments.bytes")  # not in a wheel
    rows = [row for row in OPTIMIZERS.read_text().splitlines() if re.match(r"\| \w+ `\w+` \|", row)]
    assert len(rows) == len(table.ROWS)
    cells, peaks = zip(*(re.fullmatch(r"(\|.* \|) ([^|]+) \|", row).groups() for row in rows), strict=True)
    with table.only_new_objects():
        for row, printed, peak in zip(table.ROWS, cells, peaks, strict=True):
            assert printed.startswith(f"| {row.library} `{row.optimizer}` | {row.option} |")
            if row.library in ("amp_kernels", "flashoptim"):
                assert table.line(row) == printed
            if row.library == "amp_kernels":  # the peak is what is alive, and what a step allocates besides
                totals = [float(total) for total in re.findall(r"\*\*([\d.]+)\*\*", printed)]
                assert [float(x) for x in peak.split(" and ")] == pytest.approx(totals, abs=0.1)
        adamw = next(row for row in table.ROWS if row.optimizer == "FusedAdamW")
        low, full = (sum(table.bytes_of(adamw, dtype)) for dtype in (torch.float16, torch.float32))
        lean = next(row for row in table.ROWS if (row.optimizer, row.option) == ("FusedAdamW", "states in int8"))
        least = sum(table.bytes_of(lean, torch.bfloat16))
    answer = f"{low:.0f} bytes a parameter with 16-bit weights, {full:.0f} with fp32 weights"
    assert answer in (ROOT / "docs" / "start.md").read_text()
    readme = " ".join(README.read_text().split())
    assert f"takes {low:.0f} bytes per parameter" in readme and f"it takes {least:.0f} in all" in readme
    migrating = (ROOT / "docs" / "guides" / "migrating.md").read_text()
    assert f"`state_dtype=torch.int8`: {least:.0f} bytes a parameter with 16-bit weights" in migrating


def sources() -> Iterator[Path]:
    yield ROOT / "setup.py"
    for folder in ("amp_kernels", "benchmarks", "csrc", "tests", "triton_kernels"):
        yield from (path for path in (ROOT / folder).rglob("*.*") if path.suffix in SUFFIXES)


def test_the_table_of_variables_is_complete() -> None:
    reads = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()"(AMP_KERNELS_\w+)""")
    read = {name for path in sources() for name in reads.findall(path.read_text())}
    assert read == set(re.findall(r"^\| `(AMP_KERNELS_\w+)`", SUPPORT.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("system", "hip", "name"), [("Windows", None, "Windows"), ("Darwin", None, "macOS"), ("Linux", "7.0", "ROCm")]
)
def test_info_says_what_the_page_says_of_a_platform(monkeypatch, capsys, system, hip, name) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(torch.version, "hip", hip)
    backends._why_not_triton.cache_clear()
    try:
        assert info() == 0
    finally:
        backends._why_not_triton.cache_clear()
    (note,) = re.findall(f"^- ({name}: .*)$", SUPPORT.read_text(), flags=re.MULTILINE)
    printed = capsys.readouterr().out
    assert note in printed.splitlines()
    assert ("not triton: its kernels are for CUDA, and this torch is a ROCm build" in printed) == (hip is not None)
