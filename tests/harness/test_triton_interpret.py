"""Runs files of tests in processes of their own, where Triton interprets.

Triton reads TRITON_INTERPRET when it is imported, and an interpreted process can compile nothing. Files of
``*_cases.py`` know no other backend.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TESTS, WHY_NOT, run_pytest

from amp_kernels.families import FAMILIES

pytestmark = pytest.mark.timeout(0)  # each test in such a process has a limit of its own

FOR_TRITON_ALONE = ("int8/triton_int8_cases.py", "matmul/triton_copy_pad_cases.py")
# No planted fault shows in these alone: the kernels below them are in test_update_table.py.
UPDATES = [f"update/test_{name}.py" for name in ("averages", "remainder", *FAMILIES)]
FILES = (
    *FOR_TRITON_ALONE,
    "unscale/test_unscale_table.py",
    "update/test_update_table.py",
    "update/test_lean_states.py",
    pytest.param("precision/test_precision.py", marks=pytest.mark.nightly),
    *(pytest.param(file, marks=pytest.mark.nightly) for file in UPDATES if (TESTS / file).exists()),
)


def stem(file: str) -> str:
    return Path(file).stem


@pytest.mark.parametrize("file", FILES, ids=stem)
@pytest.mark.skipif(WHY_NOT["triton-interpret"]() is not None, reason=str(WHY_NOT["triton-interpret"]()))
def test_under_the_interpreter(file: str) -> None:
    run_pytest(str(TESTS / file), TRITON_INTERPRET="1")


@pytest.mark.parametrize("file", FOR_TRITON_ALONE, ids=stem)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu(file: str) -> None:
    run_pytest(str(TESTS / file))
