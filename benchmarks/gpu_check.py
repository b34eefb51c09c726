"""Builds for the GPU that is here, tests, looks for memory errors, measures; prints one table at the end.

It uses the Python and torch that run it, needs no network and installs nothing: the build is in build/gpu.
Every part has its own time limit, and a failing part stops no other; what was measured before a limit is kept. The
results, in benchmarks/results/<gpu>/, are all that we need from you to add your GPU to the README's table. Peers that
torch.compile has to build first are left to `make bench`.

    make gpu-check                                    # all of it: half an hour
    python benchmarks/gpu_check.py --parts build,cuda_tests --minutes 9
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu"
PYTHON = sys.executable
SECONDS = {
    "build": 300,
    "build_without_cuda": 120,
    "info": 30,
    "cuda_tests": 300,
    "triton_tests": 300,
    "triton_kernels": 300,
    "memcheck": 150,
    "initcheck": 150,
    "racecheck": 150,
    "bench_sgd": 180,
    "bench_rmsprop": 150,
    "bench_int8": 150,
    "bench_matmul": 180,
    "bench_unscale": 90,
    "plot": 60,
}
# Ids begin with the place of a test's tensors (tests/conftest.py); those of a CPU say nothing about a GPU.
CUDA_TESTS = "[cuda- or [cuda] or [default-on-cuda or test_capture"
TRITON_TESTS = "[triton- or [triton]"
# Files of their own, which other processes run otherwise (tests/test_triton_interpret.py).
TRITON_KERNELS = ("triton_cases.py", "triton_int8_cases.py", "triton_matmul_cases.py")
# Cases under compute-sanitizer, where a kernel is tens of times slower: heads, tails and 16-byte accesses, tiles of
# every family. Products of odd pitches are left to racecheck: their loads end up to 15 bytes behind a tensor, in memory
# that the allocator rounds up, but memcheck does not.
ALIGNED = ("sizes", "misaligned", "many_tensors", "1x64x64", "64x64x64", "33x40x64", "33x64x40", "gelu_33x40x48")
ODD = ("sizes", "1x127x1023", "17x33x65", "130x129x127", "33x40x1023", "33x129x40", "relu_65x130x127")
SANITIZED = {"memcheck": ALIGNED, "initcheck": ALIGNED, "racecheck": ODD}


class Check:
    """The parts, their results, and the folder that keeps them."""

    def __init__(self, folder: Path, parts: Sequence[str], seconds: float) -> None:
        self.folder = folder
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        places = [str(BUILD / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1"}
        self.results: list[tuple[str, str, float]] = []
        self.start = time.monotonic()
        self.parts = parts
        self._seconds = seconds

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def run(self, name: str, *command: str | Path, cwd: Path = BUILD, **environment: str) -> bool:
        """Runs a part, if it was asked for, shows what it prints and keeps it in logs/<name>.txt."""
        if name not in self.parts:
            return False
        limit = min(SECONDS[name], int(self._seconds - self.elapsed()))
        if limit <= 0:
            self.skip(name, f"no time was left of the {self._seconds:.0f} s")
            return False
        print(f"\n==== {name}: {' '.join(map(str, command))}", flush=True)
        start = self.elapsed()
        words = [str(part) for part in command]
        with (self.folder / "logs" / f"{name}.txt").open("w") as log:
            result = _run_and_copy(words, cwd, self.environment | environment, limit, log)
        self.results.append((name, result, self.elapsed() - start))
        return result == "passed"

    def skip(self, name: str, why: str) -> None:
        if name not in self.parts:
            return
        print(f"\n==== {name}: {why}", flush=True)
        self.results.append((name, f"FAILED: {why}", 0.0))


def _run_and_copy(command: list[str], cwd: Path, environment: dict[str, str], limit: int, log: TextIO) -> str:
    """`timeout` ends the whole process group, compilers and test processes too, first as Ctrl-C does: pytest then says
    what failed before."""
    command = ["timeout", "--signal=INT", "--kill-after=15", str(limit), *command]
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        log.write(line)
    code = process.wait()
    if code == 0:
        return "passed"
    return f"FAILED: took more than {limit} s" if code in (124, 137) else f"FAILED: exit code {code}"


def build(check: Check, capability: tuple[int, int]) -> bool:
    """True if the CUDA kernels are there; without them everything else still runs, on Triton."""
    if "build" in check.parts:
        shutil.rmtree(BUILD / "lib", ignore_errors=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    major, minor = capability
    arch = f"{major}.{minor}{'a' if capability == (9, 0) else ''}"
    command = [PYTHON, "setup.py", "build", f"--build-base={BUILD}", f"--build-lib={BUILD / 'lib'}"]
    check.run("build", *command, cwd=ROOT, AMP_KERNELS_BUILD="cuda", TORCH_CUDA_ARCH_LIST=arch)
    if not has_cuda_kernels(BUILD / "lib"):
        check.run("build_without_cuda", *command, cwd=ROOT, AMP_KERNELS_BUILD="cpu")
    return has_cuda_kernels(BUILD / "lib")


def has_cuda_kernels(lib: Path) -> bool:
    """Of a finished build: a note says what a build left out."""
    note = lib / "amp_kernels" / "_build.txt"
    return any(lib.glob("amp_kernels/_C.*")) and note.exists() and not note.read_text()


def test(check: Check, compiled: bool) -> None:
    workers = min(12, os.cpu_count() or 1)
    parallel = ["-n", str(workers), "--dist", "worksteal"] if find_spec("xdist") else []
    pytest = [PYTHON, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider"]
    places = {"cwd": ROOT / "tests", "AMP_KERNELS_EXPECT": "triton,cuda" if compiled else "triton"}
    if compiled:
        check.run("cuda_tests", *pytest, *parallel, "-k", CUDA_TESTS, **places)
    else:
        check.skip("cuda_tests", "no CUDA kernels were built")
    check.run("triton_tests", *pytest, *parallel, "-k", TRITON_TESTS, **places)
    check.run("triton_kernels", *pytest, *parallel, *TRITON_KERNELS, **places)


def look_for_memory_errors(check: Check, compiled: bool) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not (compiled and sanitizer):
        why = "there is no compute-sanitizer on PATH" if compiled else "no CUDA kernels were built"
        for tool in SANITIZED:
            check.skip(tool, why)
        return
    options = ["--error-exitcode", "1", *filters(sanitizer)]
    for tool, names in SANITIZED.items():
        command = [sanitizer, "--tool", tool, *options, PYTHON, Path(__file__).resolve(), "--sanitized", *names]
        # torch's caching allocator would hide an access just past a tensor inside its blocks.
        check.run(tool, *command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def filters(sanitizer: str) -> list[str]:
    """Our kernels alone, and no errors of API calls, some of which torch expects; as this version spells it."""
    says = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    quiet = ["--report-api-errors", "no"] if "--report-api-errors" in says else []
    option = next((o for o in ("--kernel-name", "--kernel-regex") if f"{o} " in says), None)
    return [*quiet, *([option, "kns=amp_kernels"] if option else [])]


def sanitize(names: Sequence[str]) -> int:
    """Runs the cases of these names."""
    from amp_kernels import testing

    failures = 0
    for op, cases in testing.CASES.items():
        for case in cases:
            if case.name in names:
                wrong = [result for result in case.run("cuda") if not result.passed]
                failures += len(wrong)
                print(op, case, *(wrong or ["ok"]), flush=True)
    return min(failures, 1)


def summary(folder: Path) -> list[tuple[str, ...]]:
    """The rows of the table; a peer without a scaler does less than one of ours that has one."""
    lines = []
    for path in sorted(folder.glob("*.csv")):
        cases: dict[tuple[str, str, int], list[dict[str, str]]] = defaultdict(list)
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["median_ms"]:
                    cases[row["case"], row["dtype"], int(row["elements"])].append(row)
        for (case, dtype, elements), rows in cases.items():
            ours = next((row for row in rows if row["contender"].startswith("amp_kernels")), None)
            if ours is None:
                continue
            others = [row for row in rows if not row["contender"].startswith(("amp_kernels", "copy"))]
            peers = [row for row in others if row["scaler"] != "none" or ours["scaler"] == "none"]
            rated = [row for row in peers if row["ratio_to_ours"]]  # none where our first could not run
            best = min(rated, key=lambda row: float(row["ratio_to_ours"]), default=None)
            ratio = f"{float(best['ratio_to_ours']):.2f}" if best else "-"
            peer = best["contender"] if best else "-"
            share = f"{float(ours['copy_percent']):.0f}"
            work = f"{case}, {dtype}"
            lines.append((path.stem, work, f"{elements:.3g}", ours["median_ms"], peer, ratio, share))
    return lines


def text_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    line = "  ".join("-" * width for width in widths)
    body = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["  ".join(cell.ljust(w) for cell, w in zip(header, widths, strict=True)), line, *body])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(SECONDS), help="some of %(default)s")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of them (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the results (benchmarks/results/<gpu>)")
    parser.add_argument("--sanitized", nargs="+", help=argparse.SUPPRESS)  # what runs under compute-sanitizer
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    unknown = [part for part in args.parts if part not in SECONDS]
    if unknown:
        parser.error(f"--parts must be of {', '.join(SECONDS)}, got {', '.join(unknown)}")
    return args


def main() -> int:
    args = parse_arguments()
    if args.sanitized:
        return sanitize(args.sanitized)
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: needs a CUDA device, and torch {torch.__version__} of {PYTHON} sees none")
        return 1
    gpu = torch.cuda.get_device_name()
    slug = gpu.lower().replace("nvidia", "").strip().replace(" ", "-")
    check = Check(args.out or Path(__file__).parent / "results" / slug, args.parts, 60 * args.minutes)
    compiled = build(check, torch.cuda.get_device_capability())
    check.run("info", PYTHON, "-m", "amp_kernels", "info")
    test(check, compiled)
    look_for_memory_errors(check, compiled)
    for name in [part for part in SECONDS if part.startswith("bench_")]:
        options = ["--out", check.folder, "--seconds", "0.5", "--no-compile"]
        check.run(name, PYTHON, ROOT / "benchmarks" / f"{name}.py", *options)
    check.run("plot", PYTHON, ROOT / "benchmarks" / "plot.py", check.folder)

    header = ("operator", "work", "elements", "ours, ms", "fastest peer", "peer / ours", "% of copy")
    parts = [(name, result, f"{seconds:.0f}") for name, result, seconds in check.results]
    passed = all(result == "passed" for _, result, _ in check.results)
    text = "\n".join(
        [
            f"{gpu}, compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}, "
            f"torch {torch.__version__}, Python {platform.python_version()}",
            "",
            text_table(("part", "result", "seconds"), parts),
            "",
            text_table(header, summary(check.folder)),
            "",
            f"{'all passed' if passed else 'SOMETHING FAILED'} in {check.elapsed():.0f} s",
        ]
    )
    (check.folder / "summary.txt").write_text(text + "\n")
    print(f"\n{text}\n{check.folder}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
