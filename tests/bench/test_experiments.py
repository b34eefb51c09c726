"""Experiments at their quick size: their rows add up, and a second call measures nothing."""

import csv
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def carried_out(name, folder):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "amp_kernels.benchmarks.experiments", name]
    command += ["--quick", "--device", "cpu", "--out", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with (folder / f"{name}.csv").open(newline="") as file:
        return done.stdout, list(csv.DictReader(file))


def test_recompute(tmp_path):
    pytest.importorskip("matplotlib")
    said, rows = carried_out("recompute", tmp_path)
    assert (said, rows) == carried_out("recompute", tmp_path)  # the second call reads what the first has measured
    steps = {row["way"]: row for row in rows if row["run"] == "batch 2"}
    held = {way: float(row["held_mb"]) for way, row in steps.items()}
    assert held["int8 checkpoints"] < held["checkpoints"] < 0.5 * held["everything kept"]
    assert held["int8 checkpoints"] < held["int8 kept"] < 0.55 * held["everything kept"]
    assert all(0 < float(row["held_mb"]) <= float(row["peak_mb"]) for row in steps.values())
    largest = {row["way"]: row for row in rows if row["part"] == "largest"}
    assert all(float(row["peak_mb"]) <= float(row["budget_mb"]) for row in largest.values())
    assert int(largest["checkpoints"]["batch"]) > int(largest["everything kept"]["batch"])
    trained = {row["way"]: row for row in rows if row["part"] == "trained" and row["fills"] == "0"}
    loss = {way: float(row["loss"]) for way, row in trained.items()}
    assert loss["checkpoints"] == loss["everything kept"]  # a CPU repeats the same bits
    assert max(loss.values()) < 1.01 * min(loss.values())
    assert all(row["note"] or float(row["time"]) > 0 for row in rows if row["run"] == "peers")
