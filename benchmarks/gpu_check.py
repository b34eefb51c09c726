"""Builds for the GPU that is here, tests, looks for memory errors, measures; prints one table at the end.

It uses the Python and torch that run it, needs no network and installs nothing: the build is in build/gpu.
Every part has its own time limit, and a failing part stops no other. The results, in
benchmarks/results/<gpu>/, are all that we need from you to add your GPU to the README's table.

    make gpu-check          # or: python benchmarks/gpu_check.py
"""

from __future__ import annotations

import csv
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu"
PYTHON = sys.executable
# Seconds; all together under ten minutes, for whoever borrows the GPU.
TOTAL = 590
LIMITS = {
    "build": 110,
    "info": 20,
    "tests": 190,
    "memcheck": 30,
    "racecheck": 30,
    "benchmark": 65,
    "plot": 20,
}
# Under compute-sanitizer a kernel is tens of times slower: heads, tails and 16-byte accesses, and no more.
SANITIZED = {"memcheck": ("sizes", "misaligned", "many_tensors"), "racecheck": ("sizes",)}


class Check:
    """The parts, their results, and the folder that keeps them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {"PYTHONPATH": str(BUILD / "lib"), "PYTHONUNBUFFERED": "1"}
        self.results: list[tuple[str, str, float]] = []
        self.start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def run(self, name: str, *command: str | Path, limit: int, cwd: Path = BUILD, **environment: str) -> bool:
        """Runs a part, shows what it prints and keeps it in logs/<name>.txt."""
        limit = min(limit, int(TOTAL - self.elapsed()))
        if limit <= 0:
            self.skip(name, f"no time was left of the {TOTAL} s")
            return False
        print(f"\n==== {name}: {' '.join(map(str, command))}", flush=True)
        start = self.elapsed()
        words = [str(part) for part in command]
        with (self.folder / "logs" / f"{name}.txt").open("w") as log:
            result = _run_and_copy(words, cwd, self.environment | environment, limit, log)
        self.results.append((name, result, self.elapsed() - start))
        return result == "passed"

    def skip(self, name: str, why: str) -> None:
        print(f"\n==== {name}: {why}", flush=True)
        self.results.append((name, f"FAILED: {why}", 0.0))


def _run_and_copy(command: list[str], cwd: Path, environment: dict[str, str], limit: int, log: TextIO) -> str:
    """`timeout` ends the whole process group, compilers and test processes too."""
    command = ["timeout", "--kill-after=5", str(limit), *command]
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
    shutil.rmtree(BUILD / "lib", ignore_errors=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [PYTHON, "setup.py", "build", f"--build-base={BUILD}", f"--build-lib={BUILD / 'lib'}"]
    major, minor = capability
    arch = f"{major}.{minor}{'a' if capability == (9, 0) else ''}"
    options = {"AMP_KERNELS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": arch}
    built = check.run("build", *command, limit=LIMITS["build"], cwd=ROOT, **options)
    if not built:
        check.run("build_without_cuda", *command, limit=LIMITS["build"], cwd=ROOT, AMP_KERNELS_BUILD="cpu")
    return built


def sanitize(names: list[str]) -> int:
    """What runs under compute-sanitizer."""
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
            best = min(peers, key=lambda row: float(row["median_ms"]), default=None)
            ratio = f"{float(best['median_ms']) / float(ours['median_ms']):.2f}" if best else "-"
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


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: needs a CUDA device, and torch {torch.__version__} of {PYTHON} sees none")
        return 1
    gpu = torch.cuda.get_device_name()
    check = Check(Path(__file__).parent / "results" / gpu.lower().replace("nvidia", "").strip().replace(" ", "-"))
    compiled = build(check, torch.cuda.get_device_capability())
    check.run("info", PYTHON, "-m", "amp_kernels", "info", limit=LIMITS["info"])

    expect = "cpu,triton-interpret,triton" + (",cuda" if compiled else "")
    parallel = ["-n", "4"] if find_spec("xdist") else []
    tests = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel]
    check.run("tests", *tests, limit=LIMITS["tests"], cwd=ROOT / "tests", AMP_KERNELS_EXPECT=expect)
    for tool, names in SANITIZED.items():
        sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if compiled and sanitizer:
            command = [
                sanitizer,
                "--tool",
                tool,
                "--error-exitcode",
                "1",
                PYTHON,
                Path(__file__).resolve(),
                *names,
            ]
            # torch's caching allocator would hide an access just past a tensor inside its blocks.
            check.run(tool, *command, limit=LIMITS[tool], PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        else:
            check.skip(tool, "there is no compute-sanitizer on PATH" if compiled else "no CUDA kernels were built")
    for family in ("unscale", "sgd", "rmsprop", "int8", "matmul"):
        script = ROOT / "benchmarks" / f"bench_{family}.py"
        options = ["--out", check.folder, "--seconds", "0.5"]
        check.run(f"bench_{family}", PYTHON, script, *options, limit=LIMITS["benchmark"])
    check.run("plot", PYTHON, ROOT / "benchmarks" / "plot.py", check.folder, limit=LIMITS["plot"])

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
    print(f"\n{text}\n{check.folder.relative_to(ROOT)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(sanitize(sys.argv[1:]) if len(sys.argv) > 1 else main())
