"""The accuracy of int8 on the digits: how far it is from fp32, and that its table adds up."""

import csv
import importlib
import os
import subprocess
import sys

import pytest
import torch

PACKAGE = "amp_kernels.benchmarks.experiments"


def rows_of(script, folder, *options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"{PACKAGE}.{script}"]
    command += ["--device", "cpu", "--out", str(folder), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / f"{script}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_within_half_a_point_of_fp32():
    pytest.importorskip("sklearn")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = importlib.import_module(f"{PACKAGE}.digits").measure(3, device, epochs=12)
    finally:
        torch.set_num_threads(threads)
    rows = {row["model"]: row for row in measured}
    assert len(rows) == 9 and rows["fp32"]["accuracy_percent"] > 94
    for name, row in rows.items():
        assert row["delta_points"] >= -0.5, row
        if not name.startswith(("QAT", "int8 saved")):  # the same weights: only what is near the border may flip
            assert row["flipped"] <= 0.005 * row["predictions"], row
    assert rows["weight-only"]["model_bytes"] < 0.56 * rows["fp16"]["model_bytes"]


@pytest.mark.slow
def test_the_table(tmp_path):
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
