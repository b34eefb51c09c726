"""`make gpu-check` without a GPU: its parts, their limits, and that what it names is there."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from amp_kernels import testing

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sanitized_cases_are_there(script: ModuleType) -> None:
    for names in script.SANITIZED.values():
        ops = {op: {case.name for case in cases} & set(names) for op, cases in testing.CASES.items()}
        assert set(names) == set().union(*ops.values())
        families = ("unscale_", "sgd_", "rmsprop_", "int8_matmul", "int8_linear", "matmul", "linear")
        assert all(ops[op] for op in families), ops


def test_benchmarks_and_files_are_there(script: ModuleType) -> None:
    benchmarks = [part for part in script.SECONDS if part.startswith("bench_")]
    assert len(benchmarks) == 5 and all((SCRIPT.parent / f"{name}.py").exists() for name in benchmarks)
    assert all((Path(__file__).parent / name).exists() for name in script.TRITON_KERNELS)


def test_a_part_keeps_its_output_and_its_limit(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setitem(script.SECONDS, "info", 2)
    check = script.Check(tmp_path, ["info", "plot"], seconds=60)
    waits = "import os, time; print(os.environ['PYTHONPATH'], flush=True)\ntry: time.sleep(60)\nfinally: print('said')"
    assert not check.run("info", sys.executable, "-c", waits, cwd=tmp_path)
    log = (tmp_path / "logs" / "info.txt").read_text()
    assert log.splitlines()[0] == f"{script.BUILD / 'lib'}{os.pathsep}/somewhere" and "said" in log
    assert not check.run("build", sys.executable, "-c", "1", cwd=tmp_path)  # nobody asked for it
    assert check.run("plot", sys.executable, "-c", "1", cwd=tmp_path)
    assert [(name, result) for name, result, _ in check.results] == [
        ("info", "FAILED: took more than 2 s"),
        ("plot", "passed"),
    ]


def test_the_time_for_all_parts_ends(script: ModuleType, tmp_path: Path) -> None:
    check = script.Check(tmp_path, ["info"], seconds=0)
    assert not check.run("info", sys.executable, "-c", "1")
    assert check.results[0][1] == "FAILED: no time was left of the 0 s"


def test_only_a_finished_build_for_cuda_has_its_kernels(script: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "amp_kernels"
    package.mkdir()
    (package / "_build.txt").write_text("")
    assert not script.has_cuda_kernels(tmp_path)  # nvcc failed after the Python files were copied
    (package / "_C.abi3.so").touch()
    assert script.has_cuda_kernels(tmp_path)
    (package / "_build.txt").write_text("the CUDA kernels were not compiled because ...")
    assert not script.has_cuda_kernels(tmp_path)


def test_an_unknown_part() -> None:
    run = subprocess.run([sys.executable, SCRIPT, "--parts", "info,tests"], capture_output=True, text=True)
    assert (
        run.returncode == 2
        and "--parts must be of build, build_without_cuda, info" in run.stderr
        and "got tests" in run.stderr
    )


def test_the_summary_names_the_fastest_peer(script: ModuleType, tmp_path: Path) -> None:
    fields = ("case", "contender", "scaler", "dtype", "elements", "median_ms", "copy_percent", "ratio_to_ours")
    rows = [
        ("step", "amp_kernels.FusedSGD", "ours", "float16", "1000", "2.0", "80", "1.0"),
        ("step", "without a scaler", "none", "float16", "1000", "1.0", "160", "0.5"),
        ("step", "torch", "torch", "float16", "1000", "3.0", "53", "1.5"),
        ("step", "torch, slow", "torch", "float16", "1000", "5.0", "32", "2.5"),
        ("step", "not timed", "torch", "float16", "1000", "", "", ""),
        ("step", "copy", "none", "float16", "1000", "1.6", "100", ""),
        ("rows", "amp_kernels.quantize_int8", "none", "float16", "1000", "", "", ""),
        ("rows", "amp_kernels.quantize_int8, triton", "none", "float16", "1000", "2.0", "80", ""),
        ("rows", "torch", "none", "float16", "1000", "3.0", "53", ""),
    ]
    with (tmp_path / "sgd.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([fields, *rows])
    assert script.summary(tmp_path) == [
        ("sgd", "step, float16", "1e+03", "2.0", "torch", "1.50", "80"),
        ("sgd", "rows, float16", "1e+03", "2.0", "-", "-", "80"),
    ]
