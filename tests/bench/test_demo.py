"""The demo at a small size: its table, figure and sentence, and what an interrupt leaves."""

import csv
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--device", "cpu", "--model", "small", "--layers", "1", "--width", "32")


@pytest.fixture
def start():
    started = []

    def run(*options):
        command = [sys.executable, "-m", "benchmarks.demo", *TINY, *map(str, options)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()


def table(folder):
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    with open(folder / "demo.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_results_of_a_small_run(start, tmp_path):
    demo = start("--steps", 12, "--budget-seconds", 10_000, "--out", tmp_path)
    output, errors = demo.communicate()
    assert demo.returncode == 0, output + errors
    rows = table(tmp_path)
    precisions = ["fp32 SGD", "fp16 FusedSGD", "fp32 RMSprop", "fp16 FusedRMSprop"]
    assert [row["name"] for row in rows] == [*precisions, "drill, fp32", "drill, fp16 + scaler"]
    for row in rows:
        assert row["steps"] == "12"
        assert 2 < float(row["validation_loss"]) < math.log(256) + 1
        for column in ("step_ms", "optimizer_ms_ours", "optimizer_ms_torch", "peak_memory_mb"):
            assert 0 < float(row[column]) < 1e5, column
        # fp32: weight, gradient, state; 16-bit: weight, gradient and remainder of two bytes, fp32 state
        bytes_held = 12 if "fp32" in row["name"] else 10
        assert float(row["bytes_per_parameter"]) == pytest.approx(bytes_held, abs=0.1)
        assert (row["steps_skipped"] != "0") == (row["name"] == "drill, fp16 + scaler")
        assert row["name"] in output
    assert "drill, fp16 + scaler: step 1 skipped, overflow in the gradient of token.weight" in output
    losses = {row["name"]: float(row["validation_loss"]) for row in rows}
    assert losses["drill, fp16 + scaler"] < math.log(256)  # it recovered and learned
    difference = losses["fp16 FusedSGD"] / losses["fp32 SGD"] - 1
    assert abs(difference) < 0.01
    assert "Training with fp16 weights matched fp32: after 12 steps" in output
    assert f"{difference:+.2%} (fp16 FusedSGD)" in output


def test_an_interrupt_leaves_what_was_done(start, tmp_path):
    demo = start("--steps", 100_000, "--budget-seconds", 10_000, "--optimizer", "rmsprop", "--out", tmp_path)
    seen = []
    for line in demo.stdout:
        seen.append(line)
        if "step 2 skipped" in line:
            demo.send_signal(signal.SIGINT)
            break
    output, errors = demo.communicate()
    assert demo.returncode == 130, "".join(seen) + output + errors
    assert "interrupted" in output
    rows = table(tmp_path)
    assert len(rows) == 4
    assert len({row["steps"] for row in rows}) == 1
    assert 2 <= int(rows[0]["steps"]) < 100_000
    assert "weights matched fp32: after" in output
    assert errors == ""


@pytest.mark.slow
def test_the_budget_cuts_the_steps(start, tmp_path):
    demo = start("--steps", 100_000, "--budget-seconds", 5, "--optimizer", "sgd", "--out", tmp_path)
    output, errors = demo.communicate()
    assert demo.returncode == 0, output + errors
    assert "Cut from 100000 to" in output
    assert 0 < int(table(tmp_path)[0]["steps"]) < 100_000
