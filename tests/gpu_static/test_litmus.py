"""The pattern of the last block under Relacy, a checker of the memory model of C++ (Debian's package relacy-dev).

It is a second opinion on the rules of cuda_on_cpu/races.h, which the same faults break in test_races.py.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PORTABLE = HERE.parents[1] / "csrc" / "cuda" / "portable.h"
RELACY = Path("/usr/include/relacy/relacy.hpp")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not RELACY.exists(), reason="there is no Relacy: apt-get install relacy-dev"),
]

FIRST, SECOND = r"    device_fence\(\);\n    last", r"      device_fence\(\);\n"
LATE = "last = block_any(last);\n  device_fence();\n  return last;"


def is_last_block() -> str:
    found = re.search(r"^__device__ \S+ (bool is_last_block\(.*?^\})", PORTABLE.read_text(), flags=re.M | re.S)
    assert found is not None
    return found[1].replace("unsigned* counter", "Counter* counter")


def simulated(text: str, folder: Path) -> str:
    (folder / "is_last_block.h").write_text(text)
    program = folder / "litmus"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-w", f"-I{folder}", str(HERE / "litmus.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.strip()


def test_the_last_block_sees_what_the_others_wrote(tmp_path: Path) -> None:
    assert simulated(is_last_block(), tmp_path) == "sound"


@pytest.mark.parametrize(
    ("removed", "instead", "late"),
    [(FIRST, "    last", False), (SECOND, "", False), (SECOND, "", True)],
    ids=["no first fence", "no second fence", "second fence behind the barrier"],
)
def test_a_missing_fence_is_a_race(removed: str, instead: str, late: bool, tmp_path: Path) -> None:
    text, count = re.subn(removed, instead, is_last_block())
    assert count == 1
    if late:
        assert "return block_any(last);" in text
        text = text.replace("return block_any(last);", LATE)
    assert simulated(text, tmp_path) == "DATA RACE"
