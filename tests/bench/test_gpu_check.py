"""`make gpu-check` without a GPU: that it runs, and that what it found stays, whatever ends it."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import forks
import pytest
from cuda_on_cpu.build import missing_headers

from amp_kernels import testing

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "gpu_check.py"
PARTS = SCRIPT.with_name("gpu_parts.py")
README = ROOT / "README.md"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(SCRIPT)


def logs(out: Path) -> dict[str, str]:
    """What is in the archive, by part."""
    with tarfile.open(out / "results.tar.gz") as archive:
        names = [name for name in archive.getnames() if name.startswith("results/logs/") and name.endswith(".txt")]
        files = {Path(name).stem: archive.extractfile(name) for name in names}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


# --------------------------------------------------------------------------------------------------- the rehearsal
@pytest.mark.slow
def test_rehearsal(script: ModuleType, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--rehearse", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told, end = done.stdout.partition("\n\n")[0].splitlines(), done.stdout[-4000:]
    parts = [name for name in script.SECONDS if name not in ("python_build", "smoke_blocking")]  # after failures alone
    assert [line.split(":")[0] for line in told] == parts
    assert all(": passed" in line for line in told)
    summary = (tmp_path / "summary.txt").read_bytes()
    assert len(summary) <= 4096 and summary.decode("ascii") in end and str(tmp_path) in end
    assert all(f"{name} " in end for name in parts)
    assert "without compute-sanitizer, which needs a GPU" in end
    # A line of the ceilings, and one at least of each table.
    for family in ("ceilings: read", *(f"\n{name} " for name in script.FAMILIES)):
        assert family in end
    assert set(logs(tmp_path)) == set(parts) and "0 failed" in logs(tmp_path)["smoke"]
    # A user's first calls come first. If one of them fails on a GPU, it is known before minutes of benchmarks.
    assert parts[:5] == ["build", "import", "operators", "captured", "send"]
    assert "0 failed" in logs(tmp_path)["operators"] and "weights are equal" in logs(tmp_path)["captured"]
    assert {line.split()[0] for line in logs(tmp_path)["operators"].splitlines()[:-1]} >= set(load(PARTS).TILES)
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert "results/send.csv" in archive.getnames()
    files = ["results.tar.gz", "routes.csv", "summary.txt", "work"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files


# ------------------------------------------------------------------------------------------------------- its death
# Parts that take no time; the last of `count` ends the driver that runs it, as nothing can be told to expect.
DRIVER = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import gpu_check
from pathlib import Path
count, out = int(sys.argv[1]), Path(sys.argv[2])
files = out / "work"
parts = [gpu_check.Part(f"part{{i}}", ["sh", "-c", f"echo log of {{i}}; echo row > {{files}}/table{{i}}.csv"])
         for i in range(count)]
parts.append(gpu_check.Part("killer", ["sh", "-c", "kill -KILL $PPID; sleep 1"]))
{prelude}
check = gpu_check.Check(out, files, "machine", 60, dict.fromkeys((part.name for part in parts), 30))
check.run(parts)
"""
# Ends the driver within the last of its savings, where a function is called that has a file open.
IN_A_FUNCTION = """
import csv, tarfile
savings, save = [], gpu_check.Check.save
gpu_check.Check.save = lambda self: (savings.append(1), save(self))
def dying(function):
    def call(*given, **named):
        if len(savings) == count:
            if function.__name__ == "write_text":
                given[0].open("w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)
    return call
{name} = dying({name})
"""


def kill(tmp_path: Path, count: int, prelude: str = "") -> None:
    code = DRIVER.format(folder=str(SCRIPT.parent), prelude=prelude)
    done = subprocess.run([sys.executable, "-c", code, str(count), tmp_path], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_what_was_finished_outlives_the_driver(tmp_path: Path) -> None:
    kill(tmp_path, 2)
    assert logs(tmp_path) == {"part0": "log of 0\n", "part1": "log of 1\n"}
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert {"results/table0.csv", "results/table1.csv"} <= set(archive.getnames())
    summary = (tmp_path / "summary.txt").read_text()
    assert re.search(r"part0 \d+ s, part1 \d+ s", summary) and "killer" not in summary


def test_tables_of_other_kinds_are_saved_too(script: ModuleType, tmp_path: Path) -> None:
    """send.csv and routes.csv have no median_ms."""
    rows = "printf 'words,microseconds\\n10,2.5\\n' > send.csv; printf 'case,route\\na,keep\\n' > routes.csv"
    check = script.Check(tmp_path, tmp_path / "work", "machine", 60, {"send": 30})
    assert check.run([script.Part("send", ["sh", "-c", rows], cwd=tmp_path / "work")])
    assert (tmp_path / "routes.csv").read_text() == "case,route\na,keep\n"


def test_what_a_part_has_written_outlives_the_driver(tmp_path: Path) -> None:
    saves = "gpu_check.SAVE_EVERY = 0.1"
    ends = "; echo half > $0; echo half; sleep 2; kill -KILL $PPID; sleep 1"
    kill(tmp_path, 0, f"parts[-1] = gpu_check.Part('killer', ['sh', '-c', 'true{ends}', files / 'half.csv'])\n{saves}")
    assert logs(tmp_path) == {"killer": "half\n"}
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert "results/half.csv" in archive.getnames()


@pytest.mark.parametrize("name", ["csv.writer", "os.replace", "tarfile.TarFile.addfile", "gpu_check.Path.write_text"])
def test_a_death_among_the_files_leaves_each_complete(script: ModuleType, name: str, tmp_path: Path) -> None:
    kill(tmp_path, 3, IN_A_FUNCTION.format(name=name))
    assert {"part0", "part1"} <= set(logs(tmp_path))
    assert re.search(r"part0 \d+ s, part1 \d+ s", (tmp_path / "summary.txt").read_text())
    assert {"part0", "part1"} <= set(script.Check(tmp_path, tmp_path / "work", "machine", 60).results)


def test_a_later_call_adds_to_what_is_there(script: ModuleType, tmp_path: Path) -> None:
    def call(*names: str, code: str = "1") -> None:
        parts = [script.Part(name, [sys.executable, "-S", "-c", code], cwd=tmp_path) for name in names]
        script.Check(tmp_path, tmp_path / "work", "machine", 60, dict.fromkeys(names, 30)).run(parts)

    call("build", "smoke")
    call("sgd", "smoke", code="raise SystemExit('it broke')")
    summary = (tmp_path / "summary.txt").read_text()
    assert re.match(r"machine\npassed: build \d+ s\n", summary)
    assert summary.count("FAILED: exit code 1") == 2 and summary.count("it broke") == 2


# -------------------------------------------------------------------------------------------------------- one part
def run(script: ModuleType, tmp_path: Path, limit: float, *parts: tuple[str, str], **rest: str) -> dict[str, str]:
    made = [script.Part(name, ["sh", "-c", command], cwd=tmp_path, **rest) for name, command in parts]
    limits = {name: limit if name == "hangs" else 60 for name, _ in parts}
    check = script.Check(tmp_path, tmp_path / "work", "machine", 600, limits)
    check.run(made)
    return {name: result for name, (result, _) in check.results.items()}


def test_a_part_that_hangs_or_crashes_ends_alone(script: ModuleType, tmp_path: Path) -> None:
    waits = "trap 'echo interrupted; exit' INT; sleep 600 & echo $! > child; wait"
    hangs, dies, works = ("hangs", waits), ("dies", "echo 'error: why'; kill -SEGV $$"), ("works", "true")
    results = run(script, tmp_path, 2, hangs, dies, works)
    assert results == {"hangs": "FAILED: took more than 2 s", "dies": "FAILED: SIGSEGV", "works": "passed"}
    assert "interrupted" in logs(tmp_path)["hangs"]
    summary = (tmp_path / "summary.txt").read_text()
    assert "hangs: FAILED: took more than 2 s" in summary and "  error: why" in summary
    child = int((tmp_path / "child").read_text())
    for _ in range(1000):  # its parent has ended: until init has collected it
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rpartition(") ")[2][0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {child} of the part still runs")


def test_the_time_for_all_parts_ends(script: ModuleType, tmp_path: Path) -> None:
    check = script.Check(tmp_path, tmp_path / "work", "machine", 0)
    assert not check.run([script.Part("import", ["true"])])
    assert check.results["import"][0] == "FAILED: no time was left for it"


def test_the_first_stage_takes_nine_minutes(script: ModuleType) -> None:
    assert script.STAGES["first"] + script.GRACE <= 9 * 60
    unconditional = {"python_build", "smoke_blocking"} ^ set(script.LIMITS["first"])
    assert sum(script.LIMITS["first"][name] for name in unconditional) <= script.STAGES["first"]
    assert "initcheck" not in script.LIMITS["first"]  # may miss what torch's kernels wrote, for it looks at ours


def test_the_parts_for_a_gpu(script: ModuleType, tmp_path: Path) -> None:
    parts = {part.name: part for part in script.all_parts(tmp_path / "results", tmp_path, (9, 0))}
    assert list(parts) == list(script.SECONDS)
    assert parts["build"].environment["TORCH_CUDA_ARCH_LIST"] == "9.0"
    for name in ("operators", "smoke", "smoke_blocking", "memcheck", "racecheck", "initcheck", "cuda_few"):
        assert parts[name].environment["AMP_KERNELS_MULTIPROCESSORS"] == "3"
    for name in ("memcheck", "racecheck", "initcheck"):
        assert parts[name].environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        assert parts[name].command[-len(parts["smoke"].command) :] == parts["smoke"].command
    for name in ("operators", "smoke_blocking"):
        assert parts[name].environment["CUDA_LAUNCH_BLOCKING"] == "1"
    for name in ("cuda_tests", "cuda_few", "triton_tests", "triton_kernels"):
        assert "--continue-on-collection-errors" in parts[name].command
    assert parts["cuda_tests"].why_not() == "no CUDA kernels were built"
    assert all((ROOT / "tests" / name).exists() for name in script.TRITON_KERNELS)


def test_only_a_finished_build_for_cuda_has_its_kernels(script: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "amp_kernels"
    package.mkdir()
    (package / "_build.txt").write_text("")
    assert not script.has_cuda_kernels(tmp_path)  # nvcc failed after the Python files were copied
    (package / "_C.abi3.so").touch()
    assert script.has_cuda_kernels(tmp_path)
    (package / "_build.txt").write_text("the CUDA kernels were not compiled because ...")
    assert not script.has_cuda_kernels(tmp_path)


# ----------------------------------------------------------------------------------------------------- the summary
FIELDS = (
    "case", "contender", "scaler", "dtype", "elements", "median_ms", "tera_ops", "copy_percent", "ratio_to_ours"
)  # fmt: skip


def write(path: Path, *rows: tuple[str, ...]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([FIELDS, *rows])


def test_headlines_name_ours_and_the_fastest_peer(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    rows = [
        (f"step, {layout}", *row)
        for layout, elements in (("few large", "1000000"), ("1000 x 64", "64000"))
        for row in (
            ("amp_kernels.FusedSGD", "ours", "float16", elements, "2.0", "", "80", "1.0"),
            ("without a scaler", "none", "float16", elements, "1.0", "", "160", "0.5"),
            ("torch", "torch", "float16", elements, "3.0", "", "53", "1.5"),
            ("torch, slow", "torch", "float16", elements, "5.0", "", "32", "2.5"),
            ("not timed", "torch", "float16", elements, "", "", "", ""),
            ("copy", "none", "float16", elements, "1.6", "", "100", ""),
        )
    ]
    write(tmp_path / "first" / "sgd.csv", *rows)
    product = ("linear, 64x64x64", "none", "bfloat16", "8192", "1.0")
    names = ("amp_kernels.linear", "torch linear", "F.pad, torch linear", "amp_kernels.linear, triton kernels")
    speeds = [(product[0], name, *product[1:], str(400 + i), "9", "1") for i, name in enumerate(names)]
    write(tmp_path / "first" / "matmul.csv", *speeds)
    assert script.headlines(tmp_path, 1000)[1:] == [
        "matmul linear bfloat16: 64x64x64 ours 400 triton 403 F.pad 402 T/s",
        "sgd step float16: 1M 2.0 ms 1.50x 80%; 1000 x 64 2.0 ms 1.50x 80%",
    ]
    write(tmp_path / "sgd.csv", *rows[:6])
    assert script.headlines(tmp_path, 1000)[2] == "sgd step float16: 1M 2.0 ms 1.50x 80%"
    assert script.headlines(tmp_path, 230)[2:] == ["1 more lines in results.tar.gz"]


def test_a_summary_has_room_for_everything_that_fails(script: ModuleType, tmp_path: Path) -> None:
    noise = "echo 'x.cu(1): error: no such kernel'; for i in $(seq 500); do echo \"line $i of é many\"; done; exit 3"
    names = [f"part{i}" for i in range(len(script.SECONDS))]
    run(script, tmp_path, 30, *((name, noise) for name in names))
    write(tmp_path / "work" / "sgd.csv", *(
        (f"step {i}, few large", "amp_kernels", "none", "float16", "1000000", "2.0", "", "80", "1.0") for i in range(99)
    ))  # fmt: skip
    check = script.Check(tmp_path, tmp_path / "work", "machine", 60)
    check.save()
    summary = (tmp_path / "summary.txt").read_bytes()
    assert len(summary) <= script.SUMMARY_BYTES
    assert all(f"{name}: FAILED: exit code 3".encode() in summary for name in names)
    assert b"sgd step 0 float16: 1M" in summary and b"more lines in results.tar.gz" in summary
    script.Check(tmp_path / "one", tmp_path / "one" / "work", "machine", 60, {"a": 30}).run(
        [script.Part("a", ["sh", "-c", noise])]
    )
    one = (tmp_path / "one" / "summary.txt").read_text()
    assert "  x.cu(1): error: no such kernel" in one and "line 500 of ? many" in one


def test_routes_say_what_was_faster_than_the_default(tmp_path: Path) -> None:
    parts = load(PARTS)
    times = {"": "2.0", ", cuda kernels": "2.1", ", triton kernels": "1.5", ", zero points": "0.1"}
    rows = [("int8_matmul, 64x64x64", f"amp_kernels.int8_matmul{name}", "none", "float32", "1", ms, "", "", "")
            for name, ms in times.items()]  # fmt: skip
    peer = ("torch", "none", "float16", "1", "0.1", "", "", "")
    kept = [("linear, 8x8x8", "amp_kernels.linear" + name, *peer[1:4], ms, *peer[5:])
            for name, ms in (("", "1.04"), (", cuda kernels", "1.0"), (", triton kernels", ""))]  # fmt: skip
    alone = [("step", "amp_kernels.FusedSGD", *peer[1:]), ("step", *peer), ("linear, 8x8x8", *peer)]
    write(tmp_path / "table.csv", *rows, *kept, *alone)
    (tmp_path / "first").mkdir()
    write(tmp_path / "first" / "table.csv", *([*row[:5], "9.0", *row[6:]] for row in rows))
    assert parts.routes(argparse.Namespace(tables=[tmp_path / "first", tmp_path], out=tmp_path)) == 0
    with (tmp_path / "routes.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["route"] == "change to triton" and (first["default_ms"], first["fastest_ms"]) == ("2.0", "1.5")
    assert "_prefers_triton" in first["chosen_by"]
    assert second["route"] == "keep" and second["fastest"] == "cuda"
    assert parts.routes(argparse.Namespace(tables=[tmp_path / "nothing"], out=tmp_path)) == 1


def test_the_log_of_ncu_becomes_a_table(tmp_path: Path) -> None:
    parts = load(PARTS)
    kernel = "void amp_kernels::cuda::<unnamed>::unscale_kernel(GradientPass)"
    rows = [
        ("0", kernel, "(256, 1, 1)", "(660, 1, 1)", "gpu__time_duration.sum", "ns", "53,600"),
        ("0", kernel, "(256, 1, 1)", "(660, 1, 1)", parts.COLUMNS["dram_percent_of_peak"], "%", "78.53"),
        ("1", kernel, "(256, 1, 1)", "(9, 1, 1)", "gpu__time_duration.sum", "us", "5.5"),
    ]
    with (tmp_path / "ncu.txt").open("w", newline="") as file:
        file.write("==PROF== Connected\ngrad_norm: 0.1 s\n")
        names = ("ID", "Kernel Name", "Block Size", "Grid Size", "Metric Name", "Metric Unit", "Metric Value")
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([names, *rows])
        file.write("unscale_: 0.1 s\n")
    assert parts.kernel_table(argparse.Namespace(tables=[tmp_path], out=tmp_path)) == 0
    with (tmp_path / "kernels.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["kernel"] == "unscale_kernel(GradientPass)" and first["grid"] == "(660, 1, 1)"
    assert (first["microseconds"], first["dram_percent_of_peak"], first["registers"]) == ("53.6", "78.53", "")
    assert second["microseconds"] == "5.5"


def test_goals_are_judged_by_the_tables() -> None:
    goals = load(SCRIPT.with_name("goals.py"))

    def times(family: str, case: str, **ways: str) -> list[dict[str, str]]:
        return [
            {
                "family": family,
                "case": case,
                "dtype": "float16",
                "way": way,
                "microseconds": us,
                "tb_s": f"{90 / float(us)}",
            }
            for way, us in ways.items()
        ]

    def row(contender: str, ms: str, elements: str) -> dict[str, str]:
        case, scaler = "fp16 weights + fp32 masters", "GradScaler ours"
        return {"case": case, "contender": contender, "scaler": scaler, "dtype": "float16", "elements": elements,
                "median_ms": ms}  # fmt: skip

    tables = {
        "device_times": [
            *times("streaming", "AdamW, 100M", ours="100", copy="89"),
            *times("streaming", "unscale_, 25.6M", ours="102", copy="130"),
            *times("streaming", "AdamW, int8 states, 100M", ours="900", copy="100"),
            *times("int8_products", "64x64x64", default="20", cuda="20", triton="13"),
        ],
        "sgd": [
            *(row("amp_kernels FusedSGD", ms, n) for ms, n in (("1.0", "100000000"), ("0.6", "64000"))),
            *(row("fp32 model, torch fused SGD", ms, n) for ms, n in (("1.5", "100000000"), ("2.3", "64000"))),
            row("fp32 model, torch foreach SGD", "9.0", "64000"),
        ],
    }
    found = [
        (found["case"], found["measured"], found["met"], bool(found["limiter"])) for found in goals.rows_of(tables)
    ]
    small, large = (f"fp16 weights + fp32 masters, float16, {n}" for n in ("64,000", "100,000,000"))
    assert found == [
        ("AdamW, 100M, float16", "89", "yes", False),
        ("unscale_, 25.6M, float16", "87.3", "no", True),
        (large, "1.5", "yes", False),
        ("amp_kernels FusedSGD, float16", "0.6", "no", True),
        (small, "3.83", "no", True),
        ("64x64x64", "0.65", "no", True),
    ]


def test_what_chooses_a_route_is_there() -> None:
    for by in load(PARTS).CHOSEN_BY.values():
        for what, file in re.findall(r"(\w+) in ([\w/.]+)", by):
            assert what in (ROOT / file).read_text()


# ------------------------------------------------------------------------------------------- the cases on all tiles
def reach(multiprocessors: str, *ops: str) -> tuple[set[str], set[str]]:
    """(kernels that the cases ran on the emulator, all that there are), whatever their dtypes."""
    command = [sys.executable, ROOT / "tests" / "harness" / "reach_tiles.py", *ops]
    environment = os.environ | {"AMP_KERNELS_MULTIPROCESSORS": multiprocessors}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = [{re.sub(r"__half|__nv_bfloat16|float", "T", name) for name in json.loads(line)} for line in
             done.stdout.splitlines()]  # fmt: skip
    return kinds[0], kinds[1]


@pytest.mark.nightly  # 140 s; test_launches.py plans the same cases without their arithmetic
@pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
def test_smoke_cases_reach_every_tile_of_three_multiprocessors_alone() -> None:
    ran, there = reach("3")
    # Whether codes have zero points is a branch of the epilogue.
    tiled = [{re.sub(", (true|false)>$", "", name) for name in names if "tiled" in name} for names in (ran, there)]
    assert tiled[1] == tiled[0] and len(tiled[1]) > 15
    functions = [{name.split("<")[0] for name in names} for names in (ran, there)]
    # plain_kernel multiplies bf16 on sm_75, which the emulated GPU is not. Lists of CPU tensors are not sent.
    assert functions[1] - functions[0] == {"plain_kernel", "send_kernel"}
    ran_on_132, _ = reach("132", "int8_linear")
    assert not any(re.search(r"tiled_kernel<T, 128", name) for name in ran_on_132)


def test_every_operator_is_smoked() -> None:
    parts = load(PARTS)
    for op, names in parts.TILES.items():
        assert set(names) <= {str(case) for case in testing.CASES[op]}
    assert set(testing.CASES) - set(parts.TILES) == {"clip_grad_norm_"}  # grad_norm and torch's multiplication


def test_a_case_that_takes_the_context_away_leaves_the_rest_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = load(PARTS)

    def body(_: object) -> list[testing.Result]:
        raise RuntimeError("an illegal memory access was encountered")

    class Replaced(Exception):
        pass

    def execv(_: str, words: list[str]) -> None:
        raise Replaced(words)

    cases = tuple(testing.Case("matmul", "fp16", name, body) for name in ("one", "two", "three"))
    monkeypatch.setitem(testing.CASES, "matmul", cases)
    monkeypatch.setattr(parts, "TILES", {"matmul": tuple(map(str, cases))})
    monkeypatch.setattr(parts, "LEAN", [])
    monkeypatch.setattr(os, "execv", execv)
    args = argparse.Namespace(device="cpu", first=1, failures=1, one=False)
    assert parts.cases(args) == 1  # the context is there
    monkeypatch.setattr(parts, "lost_context", lambda device: "CUDA error")
    with pytest.raises(Replaced, match="'--device', 'cpu', '--first', '2', '--failures', '2'"):
        parts.cases(args)


# ---------------------------------------------------------------------------------------------- what a stranger reads
def test_the_readme_and_info_say_which_gpus_ran_the_kernels() -> None:
    info = forks.command("-m", "amp_kernels", "info").stdout
    (sentence,) = re.findall(r"^\*\*(The kernels have run on .*)\*\*$", README.read_text(), flags=re.MULTILINE)
    assert "verify --device cuda" in sentence
    assert sentence in info.splitlines()


# ----------------------------------------------------------------------------------------- the tests that it runs
def pytest_of(tmp_path: Path, text: str, *options: str, name: str = "test_lost.py") -> str:
    (tmp_path / name).write_text(text)
    arguments = ["-p", "conftest", "-p", "no:cacheprovider", "-rA", *options, str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "AMP_KERNELS_"))}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout


LOSES = """
import torch

def test_fails():
    assert False, "only this"

def test_loses():
    def gone(*_):
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, gone
    gone()

def test_after():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
"""


@pytest.mark.slow
def test_a_lost_context_fails_one_test(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    says = pytest_of(tmp_path, LOSES, "-n", "1")
    assert "FAILED test_lost.py::test_loses - RuntimeError: an illegal memory access" in says
    assert "PASSED test_lost.py::test_after" in says
    assert "crashed while running 'test_lost.py::test_loses'" in says
    assert "crashed while running 'test_lost.py::test_fails'" not in says
    alone = pytest_of(tmp_path, LOSES)
    assert "test_loses lost the CUDA context" in alone and "test_after" not in alone


def test_the_default_rounds_once_on_cuda(tmp_path: Path) -> None:
    text = """
        import conftest, torch
        conftest._places = lambda: ["default-on-cuda"]
        def test_it(backend):
            settings = torch.backends.cuda.matmul
            assert backend == "default" and not settings.allow_fp16_reduced_precision_reduction
            assert not settings.allow_bf16_reduced_precision_reduction
        def test_later():
            assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    """
    says = pytest_of(tmp_path, "\n".join(line[8:] for line in text.splitlines()), name="test_matmul.py")
    assert "2 passed" in says, says
