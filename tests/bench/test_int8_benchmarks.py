"""The accuracy of int8 on the digits at a small size: its table adds up."""

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
    names = 3 * (len("weight_only") + 2)  # of a layer: the name of its mode, and a 0 in its dtype
    assert int(rows["weight-only"]["model_bytes"]) == parameters + 4 * outputs + 2 * outputs + names
