"""The benchmarks of the int8 layers at a small size: their tables add up and their files are there."""

import csv
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def rows_of(script, folder, *options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"amp_kernels.benchmarks.{script}"]
    command += ["--device", "cpu", "--out", str(folder), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / f"{script}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_digits(tmp_path):
    pytest.importorskip("sklearn")
    rows = {row["model"]: row for row in rows_of("digits", tmp_path, "--seeds", "2", "--epochs", "1")}
    expected = ["fp32", "fp16", "bf16", "weight-only", "dynamic", "static", "QAT, dynamic", "QAT, static"]
    assert list(rows) == [*expected, "int8 saved activations"]
    fp32 = rows["fp32"]
    assert float(fp32["delta_points"]) == 0 == int(fp32["flipped"])
    for row in rows.values():
        assert row["predictions"] == "1796"
        delta = float(row["accuracy_percent"]) - float(fp32["accuracy_percent"])
        assert float(row["delta_points"]) == pytest.approx(delta, abs=2e-3)
    parameters = 64 * 128 + 128 * 64 + 64 * 10
    outputs = 128 + 64 + 10
    assert int(fp32["model_bytes"]) == 4 * (parameters + outputs)
    assert int(rows["weight-only"]["model_bytes"]) == parameters + 4 * outputs + 2 * outputs


def test_recompute(tmp_path):
    small = ("--layers", "2", "--width", "32", "--context", "64", "--batches", "1", "4", "--steps", "2")
    rows = rows_of("recompute", tmp_path, *small)
    assert (tmp_path / "recompute.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows) == 8
    for batch in ("1", "4"):
        held = {row["kept"]: float(row["held_mb"]) for row in rows if row["batch"] == batch}
        assert held["int8 checkpoints"] < held["checkpoints"] < 0.3 * held["everything"]
        assert held["int8"] < 0.42 * held["everything"]
        losses = [float(row["loss"]) for row in rows if row["batch"] == batch]
        assert losses[0] == losses[1] and max(losses) - min(losses) < 0.01 * losses[0]
    for row in rows:
        assert 0 < float(row["held_mb"]) <= float(row["peak_mb"]) and 0 < float(row["median_ms"]) < 1e5
    # four times the batch, four times the activations
    assert float(rows[4]["held_mb"]) == pytest.approx(4 * float(rows[0]["held_mb"]), rel=0.2)
