"""README's Python blocks run, top to bottom, as a user would paste them."""

import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from amp_kernels import backends
from amp_kernels.__main__ import info

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".py")
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_readme_has_blocks() -> None:
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_block_runs(index: int) -> None:
    torch.manual_seed(0)
    exec(compile(BLOCKS[index], f"README.md block {index}", "exec"), {"__name__": "readme"})


def sources() -> Iterator[Path]:
    yield ROOT / "setup.py"
    for folder in ("amp_kernels", "benchmarks", "csrc", "tests", "triton_kernels"):
        yield from (path for path in (ROOT / folder).rglob("*.*") if path.suffix in SUFFIXES)


def test_the_table_of_variables_is_complete() -> None:
    reads = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()"(AMP_KERNELS_\w+)""")
    read = {name for path in sources() for name in reads.findall(path.read_text())}
    assert read == set(re.findall(r"^\| `(AMP_KERNELS_\w+)`", README.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("system", "hip", "name"), [("Windows", None, "Windows"), ("Darwin", None, "macOS"), ("Linux", "7.0", "ROCm")]
)
def test_info_says_what_the_readme_says_of_a_platform(monkeypatch, capsys, system, hip, name) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(torch.version, "hip", hip)
    backends._why_not_triton.cache_clear()
    try:
        assert info() == 0
    finally:
        backends._why_not_triton.cache_clear()
    (note,) = re.findall(f"^- ({name}: .*)$", README.read_text(), flags=re.MULTILINE)
    printed = capsys.readouterr().out
    assert note in printed.splitlines()
    assert ("not triton: its kernels are for CUDA, and torch is of ROCm" in printed) == (hip is not None)
