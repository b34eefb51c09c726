"""Runs triton_cases.py in a process of its own: Triton reads TRITON_INTERPRET when it is imported, and an
interpreted process can compile nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(**environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(command, env=inherited | environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_kernels_under_the_interpreter() -> None:
    run_cases(TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_the_gpu() -> None:
    run_cases()
