"""The benchmarks run at a small size, their rows add up, what is wrong is not timed, losses stand beside wins."""

import argparse
import csv
import importlib
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from amp_kernels.benchmarks import FAMILIES

from amp_kernels import bench
from amp_kernels.__main__ import main as amp_kernels_command
from amp_kernels.report import CannotRun

PACKAGE = "amp_kernels.benchmarks"
PEERS = {
    "unscale": "torch._amp_foreach_non_finite_check_and_unscale_",
    "exponents": "plain torch",
    "sgd": "masters by hand, torch fused SGD",
    "rmsprop": "masters by hand, torch foreach RMSprop",
    "adam": "masters by hand, torch fused AdamW",
    "ema": "torch._foreach_lerp_",
    "lean": "torch fused",
}


def run(module, *options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"{PACKAGE}.{module}", *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def common():
    return importlib.import_module(f"{PACKAGE}.common")


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_rows_of_a_small_run(name, tmp_path, common):
    options = ["--device", "cpu", "--sizes", "4e4", "--seconds", "0.01", "--no-compile", "--rehearse"]
    run(f"bench_{name}", *options, "--out", tmp_path)
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
            assert float(row["ratio_to_ours"]) > 0 and float(row["copy_percent"]) >= 0  # 0.0: below 0.05
            assert row["bytes"] == ours["bytes"]
    run("plot", tmp_path)
    assert (tmp_path / f"{name}.png").exists() and (tmp_path / f"{name}_largest.png").exists()


@pytest.mark.slow
def test_rows_of_a_small_convolution(tmp_path, common):
    options = ["--device", "cpu", "--seconds", "0.01", "--no-compile", "--rehearse", "--out", tmp_path]
    run("bench_int8_conv2d", *options)
    with (tmp_path / "int8_conv2d.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == common.FIELDS and rows[0]["contender"] == "amp_kernels.int8_conv2d"
    timed = [row for row in rows if row["median_ms"]]
    assert {"fp32 torch conv2d", "bf16 torch conv2d", "copy"} <= {row["contender"] for row in timed}
    assert {f"torch.ao conv2d, {engine}" for engine in ("fbgemm", "onednn")} <= {row["contender"] for row in rows}
    elements, operations = 2 * 12**2 * (16 + 32) + 32 * 9 * 16, 2 * (2 * 12**2) * 32 * (9 * 16)
    for row in timed:
        assert int(row["elements"]) == elements
        if row["contender"] != "copy":
            assert float(row["tera_ops"]) == pytest.approx(operations / float(row["median_ms"]) / 1e9, rel=1e-3)
    run("plot", tmp_path)
    assert (tmp_path / "int8_conv2d.png").exists()


@pytest.mark.parametrize(("moves", "told"), [(True, ""), (False, "wrong: error 1 of the change, allowed 0.05")])
def test_a_step_that_leaves_the_weights_is_not_timed(moves, told, common):
    """The rule for 8-bit states."""
    lean, steps = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("bench_lean", "steps"))
    model = steps.Model(lean.FAMILIES["AdamW"], torch.float32, common.few_large(40_000), torch.device("cpu"))
    step = steps.fused_by_us(model, steps.NONE, state_dtype=torch.int8)
    if not moves:
        step.run = lambda: None
    assert model.job(step, most_wrong=lean.MOST_WRONG).check() == told


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
    # the percentiles of 3, 2.5 and 2, which lie between them, not those of the times
    assert [rows[name]["ratio_p20"] for name in ("ours", "peer", "copy")] == ["1.0", "2.2", ""]
    assert [rows[name]["ratio_p80"] for name in ("ours", "peer", "copy")] == ["1.0", "2.8", ""]
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


# --------------------------------------------------------------------------------------------- what the CSVs say
@pytest.fixture
def summary():
    return importlib.import_module(f"{PACKAGE}.summary")


def test_the_committed_pages_say_what_the_csvs_say(summary):
    folders = sorted(path for path in summary.RESULTS.iterdir() if path.is_dir())
    remedy = "run `python -m benchmarks.summary`"
    assert (summary.RESULTS / "README.md").read_text() == summary.page(folders), remedy
    for page in summary.PAGES:
        assert page.read_text() == summary.with_figures(page.read_text()), remedy
    used = {name for page in summary.PAGES for _, name, _ in summary.BLOCK.findall(page.read_text())}
    assert used == {name for name, _ in summary.TEMPLATE.findall(summary.TEMPLATES.read_text())}


COUNT = r"(?:\d[\d.,]*|\b(?:two|three|four|five|six|seven|eight|nine|ten|half an?))"
UNIT = r"(?:times|percent|[mnµu]?s|seconds?|minutes?|hours?|[KMGT]B/s|TFLOPS|TOPS)\b"
TYPED = re.compile(rf"{COUNT}(?:x\b| ?%|[ -]?{UNIT})|\b0\.\d+")


def typed(text):
    """Times, rates, factors and fractions outside of what programs write."""
    blocks = r"<!-- (\w+): python -m benchmarks\.[\w.]+ -->\n.*?<!-- end of \1 -->"
    prose = re.sub(r"^```.*?^```$", "", re.sub(blocks, "", text, flags=re.DOTALL), flags=re.DOTALL | re.MULTILINE)
    return [match[0] for match in TYPED.finditer(prose)]


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "benchmarks/figures.md"])
def test_no_figure_is_typed(page, summary):
    text = (summary.HERE.parent / page).read_text()
    assert typed(summary.BRACES.sub("", text)) == []


@pytest.mark.parametrize(
    "figure",
    ["1.64 times", "3.5 ms", "135 µs", "0.8x", "81 %", "40%", "4.3 TB/s", "900 GB/s", "8 minutes", "half an hour",
     "30 s", "two seconds", "150-minute", "0.61 of the time"],
)  # fmt: skip
def test_a_typed_figure_is_found(figure):
    assert (
        len(typed(f"It takes {figure}.")) == 1
        and typed("16 bits, 4096 x 4096 in fp16, 100 million, a step of 64") == []
    )
    block = "<!-- {}: python -m benchmarks.summary -->\n{}\n<!-- end of {} -->"
    assert typed(block.format("a", figure, "a")) == [] and len(typed(block.format("a", figure, "b"))) == 1


def test_the_first_page_sets_everything_up_with_two_commands(summary):
    text = (summary.HERE.parent / "README.md").read_text()
    install = text.split("\n## Install\n")[1].split("\n## ")[0]
    first, second = re.search(r"```sh\n(.*?)```", install, flags=re.DOTALL)[1].splitlines()[:2]
    assert first.startswith("make demo ") and second.startswith("make test ")
    assert "`AMP_KERNELS_BUILD=cpu`" in install and "`TORCH_CUDA_ARCH_LIST=9.0`" in install
    assert text.count("\n") <= 110


def test_every_peer_of_a_csv_is_named_and_no_exception(summary):
    for folder in (path for path in summary.RESULTS.iterdir() if path.is_dir()):
        for name, rows in summary.benchmarks(folder).items():
            told = "\n".join(summary.section(folder, name, rows))
            peers = {row["contender"] for row in rows} - {summary.COPY}
            assert all(peer in told for peer in peers if not peer.startswith(summary.OURS)), (folder, name)
            assert not re.search(r"\w(Error|Exception)\b", told)
    results = (summary.HERE.parent / "docs" / "results.md").read_text()
    gpus = results.split("\n## H200\n")[1].split("\n## Two cores")[0].split("\n## H100\n")
    for gpu in gpus:
        assert "masters by hand, compiled (sgd)" in gpu
    assert "flashoptim FlashSGD: 26.6x (1000 x 64, float16, 64,000 elements), 0.715x (float16, 1,000,000" in gpus[1]


CASE = {
    "benchmark": "sgd", "case": "step, few large", "dtype": "float16", "elements": "1000", "scaler": "torch",
    "copy_percent": "80", "gb_s": "1", "note": "", "device_name": "a machine", "torch_version": "2",
    "amp_kernels_version": "1", "timestamp": "2026-11-23T00:00:00",
}  # fmt: skip
COLUMNS = (*CASE, "contender", "median_ms", "p20_ms", "p80_ms", "ratio_to_ours", "ratio_p20", "ratio_p80")


def write(path, *rows):
    """A CSV of (contender, ms, times as long as ours or "") and what is special about a row. Times are within a tenth,
    ratios within a fiftieth."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for contender, ms, ratio, *special in rows:
            own = {"contender": contender, "median_ms": ms, "ratio_to_ours": ratio}
            if ms:
                own |= {"p20_ms": str(0.9 * float(ms)), "p80_ms": str(1.1 * float(ms))}
            if ratio:
                own |= {"ratio_p20": str(0.98 * float(ratio)), "ratio_p80": str(1.02 * float(ratio))}
            writer.writerow(CASE | own | (special[0] if special else {}))


ROWS = (
    ("amp_kernels FusedSGD", "2.0", "1.0"),
    ("torch", "3.0", "1.5"),
    ("no scaler", "0.5", "0.25", {"scaler": "none"}),  # does less
    ("fp32 model, torch", "1.8", "0.9"),
    ("fp32 model, slow", "9.0", "4.5"),
    ("copy", "0.1", "", {"scaler": "none"}),
    ("absent", "", "", {"note": "ModuleNotFoundError: No module named 'nosuch'"}),
    ("amp_kernels FusedSGD", "0.1", "1.0", {"elements": "10"}),
    ("torch", "0.05", "0.5", {"elements": "10"}),
    ("absent", "", "", {"elements": "10", "note": "RuntimeError: left out below 100 elements"}),
    ("amp_kernels FusedSGD", "4.0", "1.0", {"case": "step, ResNet-50"}),
    ("torch", "3.0", "0.75", {"case": "step, ResNet-50"}),
    ("amp_kernels FusedSGD", "", "", {"case": "step, broken", "note": "wrong: error 1"}),
    ("torch", "3.0", "", {"case": "step, broken"}),
)


def test_a_line_has_the_fastest_peer_of_its_size_and_fp32_apart(summary, tmp_path):
    write(tmp_path / "sgd.csv", *ROWS)
    rows = summary.benchmarks(tmp_path)["sgd"]
    win, small, loss = summary.lines(rows)
    faster, slower = "1.50 (1.47 to 1.53)", "**0.750 (0.735 to 0.765)**"
    assert win.cells("**") == ["step", "float16", "1,000", "2.00", "1.00", "80", "torch", "3.00", faster, "**1.80**"]
    assert small.cells()[2] == "10" and small.cells("**")[-2:] == ["**0.500 (0.490 to 0.510)**", ""]
    assert loss.cells("**") == [
        "step, ResNet-50",
        "float16",
        "1,000",
        "4.00",
        "1.00",
        "80",
        "torch",
        "3.00",
        slower,
        "",
    ]
    assert (win.verdict, loss.verdict, win.verdict_of_fp32) == ("faster", "slower", "slower")
    said = "wrong: error 1, in step, broken, float16, 1,000 elements"
    absent, broken = ("absent", "nosuch is not installed"), ("amp_kernels FusedSGD", said)
    assert summary.not_timed(rows) == {absent: 1, ("absent", "left out below 100 elements"): 1, broken: 1}
    assert summary.missing_packages(rows) == ["nosuch"]


def test_a_machine_s_section_counts_its_losses_at_every_size(summary, tmp_path):
    write(tmp_path / "sgd.csv", *ROWS)
    (tmp_path / "sgd.png").touch()
    told = "\n".join(summary.machine(tmp_path))
    counts = "amp_kernels is faster than the fastest peer in 1 of 3 cases and slower in 2."
    assert f"a machine, torch 2, amp_kernels 1, 2026-11-23. {counts}" in told
    assert f"[sgd.png]({tmp_path.name}/sgd.png)" in told
    said = "wrong: error 1, in step, broken, float16, 1,000 elements"
    assert "- absent: nosuch is not installed (1 case)\n- absent: left out below 100 elements (1 case)\n" in told
    assert f"- amp_kernels FusedSGD: {said} (1 case)" in told
    assert "\nPeers: torch; fp32 model, torch; fp32 model, slow.\n" in told
    assert "Not compared, because they have no scaler:\n\n- no scaler: 0.250x (float16, 1,000 elements)\n" in told


def test_a_table_of_wins_names_the_work_that_is_lost(summary, tmp_path):
    machine = tmp_path / "machine"
    machine.mkdir()
    write(machine / "sgd.csv", *ROWS)
    write(machine / "adam.csv", *ROWS[:2])
    adam, sgd, total = summary.TABLES["counts"](machine)[2:]
    assert adam.endswith("| 1 | 1 | 0 | 0 | 1.50x |  |  |")
    assert sgd.endswith(
        "| 3 | 1 | 2 | 0 | 0.500x to 1.50x | step: 2 of 3, down to 0.500x | step: 1 of 1, down to 0.900x |"
    )
    assert total == "| all | 4 | 2 | 2 | 0 |  |  | 1 of 1 |"
    assert summary.totals(machine)[2] == "| a machine | 4 | 2 | 2 | 0 | 1 of 1 |"
    assert summary.absent(machine) == [
        "- nosuch is not installed: absent (sgd)",
        "- left out below 100 elements: absent (sgd)",
    ]


def test_times_on_the_device_are_compared_with_the_fastest_peer(summary, tmp_path):
    header = "family,case,dtype,way,microseconds,tb_s,tera_ops,note"
    ways = {"a": (("ours", 10), ("torch", 20), ("copy", 1)), "b": (("default", 10), ("cuda", 1), ("torch", 9.9))}
    ways |= {"c": (("ours", 10), ("triton", 1), ("torch", 5), ("F.pad", 4)), "ours failed": (("torch", 5),)}
    rows = [f"products,{case},float16,{way},{us},,," for case, found in ways.items() for way, us in found]
    (tmp_path / "device_times.csv").write_text("\n".join([header, *rows, "products,d,float16,torch,,,,refused"]))
    (row,) = summary.on_the_device(tmp_path)[2:]
    assert row == "| products | 3 | 1 | 1 | 1 | 0.400x to 2.00x |"
    assert "| products | c | float16 | 10.0 | F.pad | 4.00 | 0.400 |" in "\n".join(summary.machine(tmp_path))


def test_a_section_shows_the_figures_of_its_own_benchmark(summary, tmp_path):
    for name in ("int8", "int8_conv2d"):
        write(tmp_path / f"{name}.csv", *ROWS)
        (tmp_path / f"{name}.png").touch()
    (tmp_path / "int8_largest.png").touch()
    at = tmp_path.name
    told = [line for line in summary.machine(tmp_path) if line.startswith("Figures:")]
    assert told == [
        f"Figures: [int8.png]({at}/int8.png) [int8_largest.png]({at}/int8_largest.png)",
        f"Figures: [int8_conv2d.png]({at}/int8_conv2d.png)",
    ]


@pytest.mark.parametrize(
    ("ratio", "bounds", "verdict"),
    [
        ("1.1", ("1.01", "1.2"), "faster"), ("1.1", ("0.99", "1.2"), "no verdict"), ("0.9", ("0.8", "0.99"), "slower"),
        ("0.9", ("0.8", "1.01"), "no verdict"), ("1.1", ("", ""), "no verdict"), ("1.3", ("", ""), "faster"),
        ("0.9", ("", ""), "no verdict"),
    ],
)  # fmt: skip
def test_there_is_no_verdict_inside_the_spread(ratio, bounds, verdict, summary, tmp_path):
    """Without percentiles of ratios, as in older CSVs, those of the times bound them."""
    special = dict(zip(("ratio_p20", "ratio_p80"), bounds, strict=True))
    ours = ("amp_kernels FusedSGD", "2.0", "1.0")
    write(tmp_path / "sgd.csv", ours, ("torch", str(2 * float(ratio)), ratio, special))
    (line,) = summary.lines(summary.benchmarks(tmp_path)["sgd"])
    assert line.verdict == verdict and ("**" in line.cells("**")[-2]) == (verdict == "slower")
    told = {"faster": "in 1 of 1 cases and slower in 0", "slower": "in 0 of 1 cases and slower in 1"}
    even = "in 0 of 1 cases and slower in 0. 1 case has no verdict"
    assert summary.verdicts([line]).endswith(told.get(verdict, even))


def test_the_page_opens_with_wins_and_losses(summary, tmp_path):
    (tmp_path / "machine").mkdir()
    write(tmp_path / "machine" / "sgd.csv", *ROWS, ("amp_kernels FusedSGD", "4.0", "1.0", {"case": "step, alone"}))
    row = "| machine | [sgd](#sgd-on-machine) | 3 | 1 | 2 | 0 | 0.500x to 1.50x | step: 2 of 3, down to 0.500x |"
    page = summary.page([tmp_path / "machine"])
    assert row in page.split("## ")[0] and "### sgd on machine\n" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0.0065377", "0.00654"),
        ("59.707", "59.7"),
        ("9999.6", "10,000"),
        (1.0, "1.00"),
        (-0.02, "-0.0200"),
        ("0", "0"),
        ("", ""),
    ],
)
def test_numbers_have_one_format(value, text, summary):
    assert summary.number(value) == text


@pytest.fixture
def one_machine(summary, tmp_path, monkeypatch):
    """A folder of results with the machine `there`, and templates of figures."""
    (tmp_path / "there").mkdir()
    write(tmp_path / "there" / "sgd.csv", *ROWS)
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    monkeypatch.setattr(summary, "TEMPLATES", tmp_path / "figures.md")
    return tmp_path


def test_figures_are_written_between_their_marks(summary, one_machine):
    template = "a {in there/sgd | step, *}step: {median_ms, ratio_to_ours | fp32 model, slow}, {elements | copy}"
    (one_machine / "figures.md").write_text(f"<!-- one -->\n{template}\n<!-- two -->\n{{totals there}}\n")
    begin, end = "<!-- {}: python -m benchmarks.summary -->\n", "<!-- end of {} -->"
    page = f"above\n{begin.format('one')}%s{end.format('one')}\nbetween\n{begin.format('two')}"
    written = summary.with_figures(page % "an old figure\n" + end.format("two"))
    assert written.startswith(page % "a step: 9.00 ms, 4.50x, 1,000\n" + "| machine |")
    assert "| a machine | 3 | 1 | 2 | 0 | 1 of 1 |\n" in written and written == summary.with_figures(written)


@pytest.mark.parametrize(
    ("column", "cells", "told"),
    [
        ("median_ms", ("1000", "fp32 model, *"), "1.80 ms to 9.00 ms"),
        ("ratio_to_ours", ("1000", "fp32 model, torch"), "0.900x"),
        ("median_ms", ("amp_kernels FusedSGD",), None),  # in several cases
        ("median_ms", ("1000", "no such peer"), None),
        ("median_ms", ("1000", "absent"), None),  # not timed
        ("median_ms", ("1000", "no such peer*"), None),
        ("elements", ("*", "fp32 model, *"), None),  # is never a range
    ],
)
def test_a_figure_has_one_row(column, cells, told, summary, one_machine):
    if told is not None:
        assert summary.figure(column, "there/sgd", cells) == told
        return
    with pytest.raises(ValueError, match=rf"figure: there/sgd.csv must have one {column} of .*, got [023]$"):
        summary.figure(column, "there/sgd", cells)


# -------------------------------------------------------------------------------------------------------- the figures
@pytest.fixture
def plot():
    return importlib.import_module(f"{PACKAGE}.plot")


@pytest.fixture
def drawn(plot, monkeypatch):
    """The figures that are saved, by file name, which stay open."""
    figures = {}
    monkeypatch.setattr(plot.plt.Figure, "savefig", lambda self, path, **_: figures.__setitem__(path.name, self))
    monkeypatch.setattr(plot.plt, "close", lambda _: None)
    yield figures
    monkeypatch.undo()
    plot.plt.close("all")


@pytest.mark.parametrize("benchmark", ["int8", "matmul", "sgd", "unscale"])
def test_no_two_series_of_a_committed_figure_look_alike(benchmark, plot, summary, drawn):
    """Of 14 peers too, and amp_kernels alone is blue."""
    folder = summary.RESULTS / "cpu-2-cores-amd-epyc"
    rows = summary.read(folder / f"{benchmark}.csv")
    peers = [{**rows[1], "contender": f"peer {i}"} for i in range(14)]
    style = plot.styles([*rows, *peers]).items()
    looks = {name: (look["color"], look.get("marker")) for name, look in style}
    assert len(set(looks.values())) == len(looks) >= 16
    blues = {name for name, (colour, _) in looks.items() if colour in plot.BLUES}
    assert blues == {name for name in looks if name.startswith("amp_kernels")} and blues
    assert looks[min(blues, key=list(looks).index)][0] == "tab:blue"


def ratio_rows():
    for case, ratio in (("step, a", "0.25"), ("step, b", "4.0")):
        yield "amp_kernels.step", "2.0", "1.0", {"case": case, "scaler": "none"}
        yield "torch", str(2 * float(ratio)), ratio, {"case": case, "scaler": "none"}
    yield "amp_kernels.step", "2.0", "1.0", {"case": "step, alone", "scaler": "none"}
    yield "torch", "", "", {"case": "step, alone", "scaler": "none", "note": "needs a GPU"}


def test_a_figure_of_ratios_says_which_side_is_better_and_what_is_not_there(plot, drawn, tmp_path):
    write(tmp_path / "sgd.csv", *ratio_rows())
    plot.draw(tmp_path)
    (axes,) = drawn["sgd.png"].axes
    assert "left of 1 the peer is faster, right of 1 amp_kernels" in axes.get_xlabel()
    assert [text.get_text() for text in axes.texts] == [" not timed: needs a GPU"]
    drawn["sgd.png"].canvas.draw()
    boxes = [t.get_window_extent() for t in axes.get_xticklabels(which="both") if t.get_text()]
    inside = sorted((box for box in boxes if axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1), key=lambda box: box.x0)
    assert len(inside) >= 3 and all(a.x1 < b.x0 for a, b in itertools.pairwise(inside))


def test_figures_of_many_cases_have_panels(plot, drawn, tmp_path):
    cases = [(f"{work}, {size}", dtype) for work in ("mm", "mm + gelu") for dtype in ("a", "b") for size in range(11)]
    rows = (
        (name, "2.0", "1.0", {"case": case, "dtype": dtype})
        for case, dtype in cases
        for name in ("amp_kernels.mm", "torch")
    )
    write(tmp_path / "matmul.csv", *rows)
    plot.draw(tmp_path)
    titles = [axes.get_title() for axes in drawn["matmul.png"].axes]
    assert titles == ["mm, a", "mm, b", "mm + gelu, a", "mm + gelu, b"]
    assert [label.get_text() for label in drawn["matmul.png"].axes[0].get_yticklabels()] == [str(k) for k in range(11)]


def test_figures_of_sizes_name_the_class_and_say_what_was_not_timed(plot, drawn, tmp_path):
    absent = {"case": "other, few large", "note": "needs 9 GB"}
    write(tmp_path / "sgd.csv", *ROWS, ("amp_kernels FusedSGD", "", "", absent), ("copy", "1", "", absent))
    plot.draw(tmp_path)
    speed, bars = drawn["sgd.png"], drawn["sgd_largest.png"]
    assert speed.get_suptitle() == bars.get_suptitle() == "FusedSGD on a machine, torch 2"
    (nothing, there), labels = bars.axes, [text.get_text() for text in bars.axes[1].texts]
    assert nothing.texts[0].get_text() == "not timed: needs 9 GB" and "lower is better" in there.get_xlabel()
    assert "higher is better" in speed.axes[1].get_ylabel()
    assert "not timed: nosuch is not installed" in [text.replace("\n", " ") for text in labels]
    (ours,) = (line for line in speed.axes[1].lines if line.get_label() == "amp_kernels FusedSGD, torch")
    assert ours.get_color() == "tab:blue"


# ----------------------------------------------------------------------------------------- python -m amp_kernels bench
def test_bench_puts_another_run_beside(tmp_path, capsys, monkeypatch):
    def run(family, out, to):
        out.mkdir()
        write(out / f"{family}.csv", *ROWS)
        return True

    earlier = tmp_path / "earlier"
    earlier.mkdir()
    write(earlier / "sgd.csv", ("amp_kernels FusedSGD", "1.6", "1.0"))  # of one of the two cases
    monkeypatch.setattr(bench, "_run", run)
    assert bench.bench(["sgd"], compare=earlier, out=tmp_path / "out") == 0
    told = capsys.readouterr().out
    lines = [line for line in told.splitlines() if line.startswith("sgd")]
    assert lines[0].split()[-5:] == ["1.60", "1.25", "(1.02", "to", "1.53)"] and lines[2].endswith("0.765)")
    assert "is faster than the fastest peer in 1 of 3 cases and slower in 2." in told
    assert re.search(r"^amp_kernels  \S+, commit \S+$", told, re.MULTILINE) and re.search(
        "^threads  +\\d", told, re.MULTILINE
    )


def test_bench_prints_json(tmp_path, capsys, monkeypatch):
    def run(family, out, to):
        print("progress", file=to)
        out.mkdir(exist_ok=True)
        write(out / f"{family}.csv", *ROWS)
        return family != "adam"

    earlier = tmp_path / "earlier"
    earlier.mkdir()
    write(earlier / "sgd.csv", ("amp_kernels FusedSGD", "1.6", "1.0"))
    monkeypatch.setattr(bench, "_run", run)
    monkeypatch.setattr(importlib.import_module(f"{PACKAGE}.plot"), "draw", lambda _: None)
    assert bench.bench(["sgd", "adam"], compare=earlier, out=tmp_path / "out", as_json=True) == 1
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert told.err == "progress\nprogress\n" and document["failed"] == ["adam"]
    assert {"torch", "CUDA", "GPU", "CPU", "threads", "amp_kernels"} == set(document["environment"])
    win = document["cases"][3]
    assert (win["case"], win["times_faster"], win["spread"], win["verdict"]) == (
        "step, few large",
        1.5,
        [1.47, 1.53],
        "faster",
    )
    assert win["amp_kernels"]["gb_s"] == 1 and win["amp_kernels"]["copy_percent"] == 80
    assert (win["other_ms"], win["times_as_long"]) == (1.6, 1.25) and "other_ms" not in document["cases"][4]
    assert {"name": "absent", "why": "nosuch is not installed", "cases": 2} in document["not_timed"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "sgd.csv must be a CSV file, got a folder"),
        ("fast", "median_ms must be a positive number in all of .*sgd.csv, got 'fast'"),
        ("0", "median_ms must be a positive number in all of .*sgd.csv, got '0'"),
        ("nan", "median_ms must be a positive number in all of .*sgd.csv, got 'nan'"),
        (b"benchmark,contender\nsgd,\xff\xfa", "sgd.csv must be text in UTF-8, got other bytes"),
        ("benchmark,contender\n".encode("utf-16-le"), "sgd.csv must be text in UTF-8, got other bytes"),
        (b"benchmark;contender\nsgd;amp_kernels\n", "--compare must be a folder with the CSVs of another run"),
    ],
    ids=["folder", "text", "zero", "nan", "bytes", "no mark", "semicolons"],
)
def test_another_run_that_cannot_be_read_is_told_before_any_case_runs(content, sentence, tmp_path, capsys, monkeypatch):
    path = tmp_path / "sgd.csv"
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, ("amp_kernels FusedSGD", "1.6", "1.0"))
        path.write_text(path.read_text().replace("1.6", f'"{content}"'))
    monkeypatch.setattr(bench, "_run", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr(sys, "argv", ["amp_kernels", "bench", "sgd", "--compare", f"{tmp_path}", "--out", "out"])
    assert amp_kernels_command() == 2
    told = capsys.readouterr().err
    assert told.startswith("bench: --compare") and re.search(sentence, told) and told.count("\n") == 1


def test_bench_refuses_in_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(CannotRun, match=f"^FAMILY must be one of {', '.join(FAMILIES)}, got 'nosuch'$"):
        bench.bench(["sgd", "nosuch"], out=tmp_path / "out")
    with pytest.raises(CannotRun, match=r"^--compare must be a folder with the CSVs of another run, got"):
        bench.bench([], compare=tmp_path, out=tmp_path / "out")
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(CannotRun, match=r"install with `pip install --no-build-isolation -e .`"):
        bench.bench([], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def plain_install(tmp_path):
    """The environment of processes without these packages, which a plain install lacks."""
    absent = 'import sys; sys.modules.update(dict.fromkeys(("matplotlib", "sklearn", "tabulate", "tqdm")))'
    (tmp_path / "sitecustomize.py").write_text(absent)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def test_bench_runs_after_a_plain_install(plain_install, tmp_path):
    code = """
import subprocess, sys
from pathlib import Path
from amp_kernels import bench
run = subprocess.run
bench.subprocess.run = lambda command, **how: run([*command, "--rehearse", "--sizes", "1000"], **how)
sys.exit(bench.bench(["unscale"], out=Path("out")))
"""
    done = subprocess.run([sys.executable, "-c", code], env=plain_install, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^unscale +grad_norm +float32 +1,000 ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("out: CSV; run `pip install matplotlib` to have figures drawn\n")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unscale.csv"]


def test_a_benchmark_that_fails_is_told_and_the_rest_stays(tmp_path, capsys, monkeypatch):
    write(tmp_path / "sgd.csv", *ROWS)
    monkeypatch.setattr(bench, "SECONDS", "no number")
    assert bench.bench(["sgd"], out=tmp_path) == 1
    told = capsys.readouterr().out
    assert "sgd: FAILED" in told and "invalid float value: 'no number'" in told
    assert "ResNet-50" in told  # what is there is shown
