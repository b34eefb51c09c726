"""The example of data-parallel training, by torchrun on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo")
def test_the_example_of_ddp():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.demo.ddp", "--epochs", "4"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on cpu" in done.stdout
    assert "1 step skipped, masters the same on every rank" in done.stdout
    assert float(done.stdout.partition("accuracy ")[2].split()[0]) > 80
