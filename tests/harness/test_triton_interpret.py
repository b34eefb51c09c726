"""Runs files of tests in processes of their own, where Triton interprets: Triton reads TRITON_INTERPRET when it is
imported, and an interpreted process can compile nothing. Files of ``*_cases.py`` know no other backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import WHY_NOT

from amp_kernels.families import FAMILIES

TESTS = Path(__file__).parents[1]
UPDATES = [file for name in FAMILIES if (TESTS / (file := f"update/test_{name}.py")).exists()]
TABLES = (
    "unscale/test_unscale_table.py",
    "update/test_update_table.py",
    "update/test_remainder.py",
    "update/test_averages.py",
    *UPDATES,
)
CASES = {"int8": ("int8/triton_int8_cases.py",), "matmul": ("matmul/triton_matmul_cases.py",)}


def run(files: Sequence[str], **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / file) for file in files)]
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(command, env=inherited | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("files", (TABLES, *CASES.values()), ids=("tables", *CASES))
@pytest.mark.skipif(WHY_NOT["triton-interpret"]() is not None, reason=str(WHY_NOT["triton-interpret"]()))
def test_under_the_interpreter(files: Sequence[str]) -> None:
    run(files, TRITON_INTERPRET="1")


@pytest.mark.parametrize("files", CASES.values(), ids=CASES)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu(files: Sequence[str]) -> None:
    run(files)
