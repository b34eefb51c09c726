"""The benchmarks run at a small size, their rows add up, and what is wrong is not timed."""

import argparse
import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS = {
    "unscale": "torch._amp_foreach_non_finite_check_and_unscale_",
    "sgd": "masters by hand, torch fused SGD",
    "rmsprop": "masters by hand, torch foreach RMSprop",
}


def run(script, *options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("common")
    sys.modules.pop("common", None)


@pytest.mark.parametrize("name", PEERS)
def test_rows_of_a_small_run(name, tmp_path, common):
    options = ("--device", "cpu", "--max-elements", "1e4", "--seconds", "0.01", "--no-compile")
    run(f"bench_{name}.py", *options, "--out", tmp_path)
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == common.FIELDS
    timed = [row for row in rows if row["median_ms"]]
    assert all(row["note"] for row in rows)
    assert {PEERS[name], "copy"} <= {row["contender"] for row in timed}
    for row in timed:
        median = float(row["median_ms"])
        assert 0 < float(row["p20_ms"]) <= median <= float(row["p80_ms"])
        assert float(row["gb_s"]) == pytest.approx(int(row["bytes"]) / median / 1e6, rel=1e-3)
    for case in {(row["case"], row["dtype"]) for row in rows}:
        here = [row for row in timed if (row["case"], row["dtype"]) == case]
        ours, copy = here[0], here[-1]
        assert ours["contender"].startswith("amp_kernels") and float(ours["ratio_to_ours"]) == 1
        assert copy["contender"] == "copy" and float(copy["copy_percent"]) == 100
        for row in here[1:-1]:
            assert float(row["ratio_to_ours"]) > 0 and float(row["copy_percent"]) > 0
            assert row["bytes"] == ours["bytes"]
    run("plot.py", tmp_path)
    assert (tmp_path / f"{name}.png").exists() and (tmp_path / f"{name}_largest.png").exists()
    table = run("plot.py", "--table", tmp_path)
    assert name == "unscale" or "fp16 weights + fp32 masters" in table


@pytest.mark.parametrize(("options", "is_kept"), [((), True), (("--fresh-memory",), False)])
def test_fresh_memory_leaves_malloc_alone_and_has_a_folder_of_its_own(options, is_kept, common, monkeypatch):
    calls = []
    monkeypatch.setattr(common, "_keep_memory", lambda: calls.append(1))
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", *options])
    folder = common.parse_arguments(None).out
    assert (bool(calls), folder.name.endswith("-fresh-memory")) == (is_kept, not is_kept)


def test_ratios_are_of_rounds_as_memory_may_have_two_speeds(common):
    slow_rounds = [False, True, False, True, True]
    ours = [2.0 if slow else 1.0 for slow in slow_rounds]
    peer = [3.0 if slow else 1.5 for slow in slow_rounds]
    assert common._middle_ratio(peer, ours) == 1.5
    with pytest.raises(ValueError):  # of all rounds, or none is a pair
        common._middle_ratio(peer, ours[:-1])


def test_shares_and_ratios_are_of_what_was_timed_side_by_side(tmp_path, common, monkeypatch):
    args = argparse.Namespace(device=torch.device("cpu"), seconds=0.0, out=tmp_path)
    case = common.Case("toy", "toy", torch.float32, common.few_large(64), 4, "4 bytes")
    ours, peer = (common.Contender(n, "none", 4, lambda: common.Job(int, str)) for n in ("ours", "peer"))
    monkeypatch.setattr(common, "_copy_elements", lambda *_: 64)
    monkeypatch.setattr(common, "WARM_UPS", 0)
    times = {ours: [1.0, 2.0, 4.0], peer: [3.0, 5.0, 8.0]}
    copies = {ours: [2.0, 3.0, 8.0], peer: [6.0, 9.0, 8.0]}
    monkeypatch.setattr(common, "_interleave", lambda *_: (times, copies))
    report = common.Report("toy", args)
    common.run_case(case, [ours, peer], args, report)
    with report.path.open(newline="") as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    # half the bytes of the copy; it took 2, 1.5, 2 times as long as ours, 2, 1.8, 1 times as long as the peer
    assert [float(rows[name]["copy_percent"]) for name in ("ours", "peer", "copy")] == [100.0, 90.0, 100.0]
    assert [rows[name]["ratio_to_ours"] for name in ("ours", "peer", "copy")] == ["1.0", "2.5", ""]
    assert [float(rows[name]["median_ms"]) for name in ("ours", "peer", "copy")] == [2.0, 5.0, 7.0]


def test_what_is_wrong_is_not_timed(tmp_path, common):
    args = argparse.Namespace(device=torch.device("cpu"), seconds=0.0, out=tmp_path)
    case = common.Case("toy", "toy", torch.float32, common.few_large(64), 4, "4 bytes")
    runs = {"ours": 0, "peer": 0}

    def job(name, verdict):
        def step():
            runs[name] += 1

        return common.Contender(name, "none", 4, lambda: common.Job(step, lambda: verdict))

    def broken():
        raise ImportError("no such package")

    report = common.Report("toy", args)
    others = [job("peer", "wrong: error 1"), common.Contender("absent", "none", 4, broken)]
    common.run_case(case, [job("ours", ""), *others], args, report)
    with report.path.open(newline="") as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert runs["ours"] == common.WARM_UPS + common.MIN_ROUNDS and runs["peer"] == 0
    assert rows["peer"]["median_ms"] == "" and rows["peer"]["note"] == "wrong: error 1"
    assert rows["absent"]["note"] == "ImportError: no such package"
    assert report.finish() == 0
    common.run_case(case, [job("peer", "wrong")], args, report)
    assert report.finish() == 1


def test_what_does_not_fit_is_not_built(tmp_path, common, monkeypatch):
    args = argparse.Namespace(device=torch.device("cpu"), seconds=0.0, out=tmp_path)
    monkeypatch.setattr(common, "free_bytes", lambda device: 100)
    case = common.Case("toy", "toy", torch.float32, common.few_large(64), 4, "4 bytes")
    report = common.Report("toy", args)
    common.run_case(case, [common.Contender("ours", "none", 4, lambda: pytest.fail("built"))], args, report)
    assert "needs about" in report.failures[0]


def test_the_copy_is_larger_than_all_caches(common, tmp_path, monkeypatch):
    for cpu, shared in enumerate(("0-1", "0-1", "2", "3")):
        cache = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        cache.mkdir(parents=True)
        (cache / "size").write_text("98304K\n")
        (cache / "shared_cpu_list").write_text(shared)
    monkeypatch.setattr(common.os, "sched_getaffinity", lambda _: {0, 1, 2, 7}, raising=False)
    assert common.last_cache_bytes(tmp_path) == 2 * 96 * 2**20
    assert common.last_cache_bytes(tmp_path / "none") == 32 * 2**20
    layout = common.Layout("vector", ((1000,),))
    case = common.Case("int8", "test", torch.int8, layout, 2, "")
    assert 4 * common._copy_elements(case, torch.device("cpu")) == 4 * common.last_cache_bytes()


def test_the_resnet_is_the_real_one(common):
    layout = common.resnet50()
    assert len(layout.shapes) == 161 and layout.elements == 25_557_032
