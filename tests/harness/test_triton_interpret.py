"""Runs files of tests in processes of their own, where Triton interprets: Triton reads TRITON_INTERPRET when it is
imported, and an interpreted process can compile nothing. Files of ``*_cases.py`` know no other backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import TESTS, WHY_NOT, run_pytest

from amp_kernels.families import FAMILIES

UPDATES = [file for name in FAMILIES if (TESTS / (file := f"update/test_{name}.py")).exists()]
TABLES = (
    "unscale/test_unscale_table.py",
    "update/test_update_table.py",
    "update/test_remainder.py",
    "update/test_averages.py",
    *UPDATES,
)
CASES = {"int8": ("int8/triton_int8_cases.py",), "matmul": ("matmul/triton_matmul_cases.py",)}


@pytest.mark.parametrize("files", [TABLES, *CASES.values()], ids=("tables", *CASES))
@pytest.mark.skipif(WHY_NOT["triton-interpret"]() is not None, reason=str(WHY_NOT["triton-interpret"]()))
def test_under_the_interpreter(files: Sequence[str]) -> None:
    run_pytest(*(str(TESTS / file) for file in files), TRITON_INTERPRET="1")


@pytest.mark.parametrize("files", [*CASES.values()], ids=CASES)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu(files: Sequence[str]) -> None:
    run_pytest(*(str(TESTS / file) for file in files))
