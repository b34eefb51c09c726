"""Runs each file of Triton cases in a process of its own: Triton reads TRITON_INTERPRET when it is imported, and an
interpreted process can compile nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import WHY_NOT

cases = pytest.mark.parametrize("cases", ["triton_cases.py", "triton_int8_cases.py", "triton_matmul_cases.py"])


def run_cases(cases: str, **environment: str) -> None:
    file = Path(__file__).with_name(cases)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(command, env=inherited | environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@cases
@pytest.mark.skipif(WHY_NOT["triton-interpret"]() is not None, reason=str(WHY_NOT["triton-interpret"]()))
def test_kernels_under_the_interpreter(cases: str) -> None:
    run_cases(cases, TRITON_INTERPRET="1")


@cases
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_the_gpu(cases: str) -> None:
    run_cases(cases)
