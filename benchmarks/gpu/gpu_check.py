"""Builds for the GPU that is here, tries every kernel, measures, tests; one folder of three small files holds it all.

It uses the Python and torch that run it, needs no network and installs nothing. There are three stages. The first takes
at most nine minutes on 16 cores. It imports the package, calls each operator once, captures a step, times a send, and
then measures what matters. The second runs the tests, the third the whole benchmarks.

The folder of the results gets its files after every part, and every few seconds while a part runs. results.tar.gz has
all logs and tables so far. summary.txt has what passed, what failed and the main ratios. routes.csv has the fastest
backend of each case. Each file is complete at any moment: whatever ends this program later, they stay. A part that
fails, hangs or crashes ends itself alone. What is printed last is the summary; please send us the folder.

    make gpu-check                                          # all three stages: 35 minutes at most
    python benchmarks/gpu/gpu_check.py --parts first            # the first one
    python benchmarks/gpu/gpu_check.py --parts build,smoke,sgd --minutes 5
    python benchmarks/gpu/gpu_check.py --rehearse               # every part, small, on a CPU: no result means anything
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent
ROOT = BENCHMARKS.parent
FAMILIES = sorted(path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py"))


def of_families(prefix: str, limit: int, **others: int) -> dict[str, int]:
    """A limit for each benchmark; `others` are of those that need another one. A limit of 0 leaves it out."""
    limits = {name: others.get(name, limit) for name in FAMILIES}
    return {prefix + name: limit for name, limit in limits.items() if limit}


# Of each part, in seconds, and of the stages, with 15 s to spare for what is between their parts. On an H100 with 16
# cores the build took 61, smoke 16, ceilings 8, matmul 35, sgd 30, rmsprop 27, overhead 18, ncu 24, memcheck 21 and
# racecheck 31. adam, unscale and ema were not done after 30, 26 and 15.
LIMITS = {
    "first": {
        "build": 80, "python_build": 20, "import": 10, "operators": 12, "captured": 15, "send": 12,
        "smoke": 24, "smoke_blocking": 30, "ceilings": 10,
        **of_families("", 20, matmul=40, int8=38, sgd=32, adam=40, rmsprop=30, unscale=32, ema=22, exponents=0, lean=0,
                      int8_conv2d=0),
        "routes": 15, "ncu": 28, "memcheck": 26, "racecheck": 36,
    },
    "tests": {
        "cuda_tests": 240, "cuda_few": 45, "triton_tests": 150, "triton_kernels": 120, "initcheck": 60,
    },
    "benchmarks": {
        "device_times": 90, **of_families("bench_", 75, matmul=170, sgd=160, rmsprop=120, int8=120, lean=80),
        "kernel_table": 5, "goals": 5, "plot": 60,
    },
}  # fmt: skip
STAGES = {"first": 9 * 60 - 15, "tests": 10 * 60 - 15, "benchmarks": 14 * 60 - 15}
SECONDS = {name: seconds for parts in LIMITS.values() for name, seconds in parts.items()}
SAVE_EVERY = 5.0  # seconds between two savings while a part runs
GRACE = 10  # between an interrupt, after which pytest says what failed, and the end
# 4,096 bytes for a file, 4,000 characters for the end of what is printed: the same text is both.
SUMMARY_BYTES, FAILURES_BYTES = 3800, 1700

# A test's id begins with the place of its tensors (tests/conftest.py). Tests with tensors on a CPU are left out.
CUDA_TESTS = "[cuda- or [cuda] or [default-on-cuda or test_replayed"
TRITON_TESTS = "[triton- or [triton]"
# The cases that the emulator runs, on 3 multiprocessors as there: with all that a large GPU has, the smallest tile does
# most of them (tests/gpu_static/test_launches.py).
FEW_TESTS = ("matmul/test_matmul.py", "int8/test_int8.py", "-k", "test_case and [cuda-")
# pytest does not collect these by itself: tests/harness/test_triton_interpret.py runs them in processes of their own.
TRITON_KERNELS = ("int8/triton_int8_cases.py", "matmul/triton_copy_pad_cases.py")
SIZES = "1e6,25.6e6,1e8"
# (rows, outputs, inputs), those first that say most: a part that is ended has measured those before.
SHAPES = "4096x4096x4096,8192x8192x8192,1x4096x4096,4096x4095x4095,8192x1023x1023,16x4095x4095"
# What reading SASS can only estimate: the shares of the speed of memory and of tensor cores, and what limits them.
METRICS = (
    "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__warps_active.avg.pct_of_peak_sustained_active,sm__inst_issued.avg.pct_of_peak_sustained_active,"
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active,l1tex__data_bank_conflicts_pipe_lsu.sum,"
    "launch__registers_per_thread,launch__occupancy_limit_registers"
)


@dataclass(frozen=True)
class Part:
    """A command with a limit. `why_not` returns why it cannot run here, or ""; with `after` it runs only if the part of
    that name failed."""

    name: str
    command: Sequence[str | Path]
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path = HERE
    why_not: Callable[[], str] = str
    after: str = ""
    note: str = ""  # what the part does without a GPU, in a rehearsal


class Check:
    """Runs parts one after the other. They write to the folder `files`. Three files in the folder `out` hold it all."""

    def __init__(self, out: Path, files: Path, machine: str, seconds: float, limits: dict[str, int] = SECONDS) -> None:
        self.out, self.files, self.machine, self.limits = out, files, machine, limits
        self._end = time.monotonic() + seconds
        for folder in (out, files / "logs", files / "first"):
            folder.mkdir(parents=True, exist_ok=True)
        self._table = files / "parts.csv"
        self.results: dict[str, tuple[str, float]] = {}  # (result, seconds) by part, of earlier runs too
        if self._table.exists():
            with self._table.open(newline="") as file:
                self.results = {row["part"]: (row["result"], float(row["seconds"])) for row in csv.DictReader(file)}

    def run(self, parts: Sequence[Part]) -> bool:
        """Runs and saves them; returns whether none failed."""
        for part in parts:
            self.results.pop(part.name, None)
            (self.files / "logs" / f"{part.name}.txt").unlink(missing_ok=True)
        for part in parts:
            if part.after and not self.has_failed(part.after):
                continue
            print(f"{part.name}: ", end="", flush=True)
            start = time.monotonic()
            result = f"skipped: {why}" if (why := part.why_not()) else self._run(part)
            self.results[part.name] = result, time.monotonic() - start
            self.save()
            print(f"{result}, {time.monotonic() - start:.0f} s", flush=True)
        return not any(self.has_failed(part.name) for part in parts)

    def has_failed(self, name: str) -> bool:
        return self.results.get(name, ("", 0.0))[0].startswith("FAILED")

    def _run(self, part: Part) -> str:
        limit = min(self.limits[part.name], self._end - time.monotonic())
        if limit <= 0:
            return "FAILED: no time was left for it"
        with (self.files / "logs" / f"{part.name}.txt").open("wb") as log:
            process = subprocess.Popen(
                list(map(str, part.command)), cwd=part.cwd, env=os.environ | part.environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_may_be_interrupted,
            )  # fmt: skip
            try:
                code = self._wait(process, limit)
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                return f"FAILED: took more than {limit:.0f} s"
            finally:  # compilers and test processes too
                _signal(process, signal.SIGKILL)
        if code:
            return f"FAILED: exit code {code}" if code > 0 else f"FAILED: {signal.Signals(-code).name}"
        return f"passed{part.note and f' ({part.note})'}"

    def _wait(self, process: subprocess.Popen[bytes], limit: float) -> int:
        """Waits for the exit code. Saves now and then what the part has written so far."""
        end = time.monotonic() + limit
        while True:
            try:
                return process.wait(min(SAVE_EVERY, max(end - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end:
                    raise
            # The part may be replacing a file, or have written half a row. The next saving then has it.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self.save()

    def save(self) -> None:
        """Writes the files, each replaced in one step: whoever is killed here leaves the old one or the new."""
        with _replacing(self._table) as path, path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("part", "result", "seconds"))
            writer.writerows((name, result, f"{seconds:.1f}") for name, (result, seconds) in self.results.items())
        if (routes := self.files / "routes.csv").exists():
            with _replacing(self.out / "routes.csv") as path:
                shutil.copyfile(routes, path)
        with _replacing(self.out / "results.tar.gz") as path, tarfile.open(path, "w:gz") as archive:
            archive.add(self.files, "results")
        with _replacing(self.out / "summary.txt") as path:
            path.write_text(self.summary(), "ascii")

    def summary(self) -> str:
        """Lists what passed, what failed (with the end of its log), and the main ratios, in SUMMARY_BYTES."""
        lines = [self.machine]
        of = {
            word: [(name, result, s) for name, (result, s) in self.results.items() if result.startswith(word)]
            for word in ("passed", "skipped", "FAILED")
        }
        passed = ", ".join(f"{name}{result.removeprefix('passed')} {s:.0f} s" for name, result, s in of["passed"])
        lines.append(f"passed: {passed or 'nothing'}")
        lines += [f"{name}: {result}" for name, result, _ in of["skipped"]]
        room = FAILURES_BYTES // max(len(of["FAILED"]), 1)
        for name, result, seconds in of["FAILED"]:
            head = f"{name}: {result}, {seconds:.0f} s"
            log = self.files / "logs" / f"{name}.txt"
            ends = last_lines(log, room - len(head) - 3) if log.exists() else []
            lines += [head, *(f"  {line}" for line in ends)]
        text = _ascii("\n".join(lines))[: SUMMARY_BYTES - 100] + "\n"
        ratios = headlines(self.files, SUMMARY_BYTES - len(text) - 1)
        return "\n".join([text, *ratios, ""])


def _may_be_interrupted() -> None:
    """Whoever starts this program by `nohup` and `&` has it ignore interrupts, which its children would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signals the whole process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
    if number == signal.SIGKILL:
        with contextlib.suppress(subprocess.TimeoutExpired):  # of a process that its driver does not let go
            process.wait(GRACE)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    beside = path.with_name(path.name + ".new")
    yield beside
    os.replace(beside, path)


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def last_lines(log: Path, room: int) -> list[str]:
    """The first line that mentions an error, which a compiler prints far from the end, and as many last ones as fit."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2**20))
        lines = [_ascii(line.strip())[:160] for line in file.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    first = next((i for i, line in enumerate(lines) if re.search(r"error:|Error:|ERROR|^E  ", line)), len(lines))
    kept: list[str] = []
    room -= len(lines[first]) + 3 if first < len(lines) else 0
    for line in reversed(lines[first + 1 :] if first < len(lines) else lines):
        room -= len(line) + 3
        if room < 0:
            break
        kept.append(line)
    return lines[first : first + 1] + kept[::-1]


# ------------------------------------------------------------------------------------------------- headline ratios
def headlines(files: Path, room: int) -> list[str]:
    """A line of each family in turn, until `room` is used up. Tables of whole benchmarks replace the first stage's."""
    families: dict[str, list[str]] = {"ceilings": _ceilings(files / "ceilings.csv")}
    for path in (*sorted((files / "first").glob("*.csv")), *sorted(files.glob("*.csv"))):
        if path.stem in FAMILIES:
            families[path.stem] = _ratios(path)
    names = list(itertools.chain(*itertools.zip_longest(*([key] * len(of) for key, of in families.items()))))
    count: dict[str, int] = defaultdict(int)
    left = room - 160
    for name in filter(None, names):
        left -= len(families[name][count[name]]) + 1
        if left < 0:
            break
        count[name] += 1
    kept = [line for name, of in families.items() for line in of[: count[name]]]
    missing = sum(map(len, families.values())) - len(kept)
    legend = [
        "of a size: ours in ms, fastest peer's time / ours, share of a copy's speed; T/s: trillions of operations"
    ]
    return [*(legend if kept else []), *kept, *([f"{missing} more lines in results.tar.gz"] if missing else [])]


def _ceilings(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = ", ".join(f"{row['what']} {row['rate']} {row['unit']}" for row in csv.DictReader(file))
    return [f"ceilings: {rows}"] if rows else []


def _ratios(path: Path) -> list[str]:
    """A line for each kind of work, with all its sizes: our time, the fastest peer's over ours, our share of a copy's
    speed; for products, the speeds."""
    cases: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["median_ms"]:
                cases[row["case"], row["dtype"]].append(row)
    lines: dict[str, list[str]] = defaultdict(list)
    for (case, dtype), rows in cases.items():
        work, _, layout = case.rpartition(", ")
        size = f"{int(rows[0]['elements']) / 1e6:g}M" if layout == "few large" else layout
        told = _speeds(rows) if any(row["tera_ops"] for row in rows) else _ratio(rows)
        if told:
            lines[f"{path.stem} {work} {dtype}"].append(f"{size} {told}")
    return [_ascii(f"{name}: {'; '.join(told)}") for name, told in lines.items()]


def _ratio(rows: list[dict[str, str]]) -> str:
    """Our time, the fastest peer's over ours, our share. Where ours has a scaler, a peer without one does less work."""
    ours = next((row for row in rows if row["contender"].startswith("amp_kernels")), None)
    if ours is None:
        return ""
    others = [row for row in rows if not row["contender"].startswith(("amp_kernels", "copy"))]
    peers = [row for row in others if row["scaler"] != "none" or ours["scaler"] == "none"]
    best = min((float(row["ratio_to_ours"]) for row in peers if row["ratio_to_ours"]), default=None)
    return f"{ours['median_ms']} ms {f'{best:.2f}x' if best else '-'} {float(ours['copy_percent']):.0f}%"


def _speeds(rows: list[dict[str, str]]) -> str:
    said = {}
    for row in rows:
        name = row["contender"]
        if name.startswith("amp_kernels"):
            forced = re.search(r", (\w+) kernels$", name)
            said[forced[1] if forced else "zeros" if name.endswith("zero points") else "ours"] = row["tera_ops"]
    peers = [row for row in rows if row["tera_ops"] and not row["contender"].startswith("amp_kernels")]
    if peers:
        best = max(peers, key=lambda row: float(row["tera_ops"]))
        said[best["contender"].split(",")[0]] = best["tera_ops"]
    return " ".join(f"{name} {speed}" for name, speed in said.items()) + " T/s"


# ------------------------------------------------------------------------------------------------------- the parts
def has_cuda_kernels(lib: Path) -> bool:
    """Whether a finished build has them; its note, `_build.txt`, says what it left out."""
    note = lib / "amp_kernels" / "_build.txt"
    return any(lib.glob("amp_kernels/_C.*")) and note.exists() and not note.read_text()


def all_parts(files: Path, work: Path, capability: tuple[int, int] | None) -> list[Part]:
    """All parts, in order. Without a capability it is a rehearsal, which runs the installed package on the CPU."""
    rehearsal, lib, python = capability is None, work / "lib", sys.executable
    device = "cpu" if rehearsal else "cuda"
    places = [*([] if rehearsal else [str(lib)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {"PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1"}
    shared |= {"OMP_NUM_THREADS": "1"} if rehearsal else {}
    few = shared | {"AMP_KERNELS_MULTIPROCESSORS": "3"}
    own = [python, str(HERE / "gpu_parts.py")]  # this and the tests are not in the build

    def compiled() -> str:
        return "" if rehearsal or has_cuda_kernels(lib) else "no CUDA kernels were built"

    def module(name: str) -> list[str]:
        return [python, "-m", f"amp_kernels.benchmarks.{name}"]

    def build(name: str, what: str, after: str = "") -> Part:
        command = [python, "setup.py", "build", f"--build-base={work}", f"--build-lib={lib}"]
        arch = {} if capability is None else {"TORCH_CUDA_ARCH_LIST": "{}.{}".format(*capability)}
        note = "the Python files alone" if rehearsal else ""
        return Part(name, command, {"AMP_KERNELS_BUILD": what, **arch}, ROOT, after=after, note=note)

    def cases(name: str, *options: str, blocking: bool = False, after: str = "") -> Part:
        environment = few | ({"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {})
        return Part(name, [*own, "cases", "--device", device, *options], environment, why_not=compiled, after=after)

    def under(name: str, tool: str, options: Callable[[str], list[str]], *command: str | Path) -> Part:
        """A part under one of CUDA's tools, alone in a rehearsal."""
        path = shutil.which(tool) or shutil.which(f"/usr/local/cuda/bin/{tool}")
        environment = few | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "compute-sanitizer" else shared
        if rehearsal:
            return Part(name, command, environment, note=f"without {tool}, which needs a GPU")
        prefix = [path, *options(path)] if path else []

        def why_not() -> str:
            return compiled() or ("" if path else f"there is no {tool} on PATH or in /usr/local/cuda/bin")

        return Part(name, [*prefix, *command], environment, why_not=why_not)

    def sanitizer(name: str) -> Part:
        # torch's caching allocator would hide an access just past a tensor inside its blocks.
        return under(
            name,
            "compute-sanitizer",
            lambda path: ["--tool", name, "--error-exitcode", "1", "--print-limit", "20", *filters(path)],
            *cases(name).command,
        )

    def bench(prefix: str, family: str, out: Path, seconds: str, *options: str) -> Part:
        timed = ["--device", device, "--no-compile", "--seconds", seconds, "--out", str(out)]
        timed += ["--rehearse"] if rehearsal else []
        return Part(prefix + family, [*module(f"bench_{family}"), *timed, *options], shared)

    def tests(
        name: str,
        *chosen: str,
        expect: str = "triton",
        why_not: Callable[[], str] = str,
        environment: dict[str, str] = shared,
    ) -> Part:
        workers = min(12, os.cpu_count() or 1)
        parallel = ["-n", str(workers), "--dist", "worksteal"] if find_spec("xdist") and not rehearsal else []
        pytest = [python, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        expected = {"AMP_KERNELS_EXPECT": "cpu" if rehearsal else expect}
        note = "one test, on the CPU" if rehearsal else ""
        return Part(name, [*pytest, *parallel, *chosen], environment | expected, ROOT / "tests", why_not, note=note)

    ncu = ("--clock-control", "none", "--csv", "--kernel-name-base", "demangled", "--kernel-name", "regex:amp_kernels")
    first = files / "first"
    eager, copied = ("eager: a CPU captures nothing", "a copy: a CPU needs no send") if rehearsal else ("", "")
    sizes, shapes = ("1e4", "32x48x64") if rehearsal else (SIZES, SHAPES)
    few_cases = ("--sizes", sizes, "--shapes", shapes)
    selections = [("-k", CUDA_TESTS), ("-k", TRITON_TESTS), TRITON_KERNELS, FEW_TESTS]
    if rehearsal:
        selections = [("bench/test_benchmarks.py", "-k", "resnet")] * len(selections)
    return [
        build("build", "none" if rehearsal else "cuda"),
        build("python_build", "none", after="build"),
        Part("import", [python, "-m", "amp_kernels", "info"], shared),
        cases("operators", "--one", blocking=True),
        Part("captured", [*own, "captured", "--device", device], shared, note=eager),
        Part("send", [*own, "send", "--device", device, "--out", files], shared, why_not=compiled, note=copied),
        cases("smoke"),
        cases("smoke_blocking", blocking=True, after="smoke"),
        Part("ceilings", [*own, "ceilings", "--device", device, "--out", files], shared),
        *(bench("", family, first, "0.2", *few_cases) for family in FAMILIES if family in LIMITS["first"]),
        Part("routes", [*own, "routes", "--tables", first, files, "--out", files], shared),
        under("ncu", "ncu", lambda _: [*ncu, "--metrics", METRICS], *own, "kernels", "--device", device),
        sanitizer("memcheck"),
        sanitizer("racecheck"),
        tests("cuda_tests", *selections[0], expect="triton,cuda", why_not=compiled),
        tests("cuda_few", *selections[3], expect="triton,cuda", why_not=compiled, environment=few),
        tests("triton_tests", *selections[1]),
        tests("triton_kernels", *selections[2]),
        sanitizer("initcheck"),
        Part("device_times", [python, HERE / "device_times.py", "--device", device, "--out", files], shared),
        *(bench("bench_", family, files, "0.5", *(few_cases if rehearsal else ())) for family in FAMILIES),
        Part("kernel_table", [*own, "kernel_table", "--tables", files / "logs", "--out", files], shared),
        Part("goals", [python, HERE / "goals.py", files], shared),
        Part("plot", [*module("plot"), files], shared),
    ]


def filters(sanitizer: str) -> list[str]:
    """Options for our kernels alone, without failed API calls, some of which torch expects; in this version's words."""
    says = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    quiet = ["--report-api-errors", "no"] if "--report-api-errors" in says else []
    option = next((o for o in ("--kernel-name", "--kernel-regex") if f"{o} " in says), None)
    return [*quiet, *([option, "kns=amp_kernels"] if option else [])]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(STAGES), help=f"stages ({', '.join(STAGES)}) or parts of them")
    parser.add_argument("--minutes", type=float, help="for all of them (what their stages may take)")
    parser.add_argument("--out", type=Path, help="folder of the results (benchmarks/results/<gpu>)")
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU; the folder is then build/rehearsal")
    args = parser.parse_args()
    args.parts = list(itertools.chain(*(LIMITS.get(word, [word]) for word in args.parts.split(","))))
    unknown = [part for part in args.parts if part not in SECONDS]
    if unknown:
        parser.error(f"--parts must be of {', '.join([*STAGES, *SECONDS])}, got {', '.join(unknown)}")
    if args.minutes is None:
        used = [min(STAGES[name], sum(of[part] for part in of if part in args.parts)) for name, of in LIMITS.items()]
        args.minutes = sum(used) / 60
    return args


ASK = """import json, torch
there = torch.cuda.is_available()
of = [torch.cuda.get_device_name(), torch.cuda.get_device_capability()] if there else []
print(json.dumps([torch.__version__, *of]))"""


def main() -> int:
    args = parse_arguments()
    # Another process asks, so that this one holds no CUDA context and survives whatever happens to the device.
    says = subprocess.run([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True, check=True).stdout
    torch, *gpu = json.loads(says.splitlines()[-1])
    machine = f"torch {torch}, Python {platform.python_version()}"
    if args.rehearse:
        out = args.out or ROOT / "build" / "rehearsal"
        work, capability = out / "work", None
        machine = f"A rehearsal on a CPU: its figures mean nothing. {machine}"
    elif not gpu:
        print(f"gpu-check: needs a CUDA device, and torch {torch} of {sys.executable} sees none")
        return 1
    else:
        name, capability = gpu[0], tuple(gpu[1])
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")
        out, work = args.out or BENCHMARKS / "results" / slug, ROOT / "build" / "gpu" / slug
        machine = f"{name}, compute capability {'.'.join(map(str, capability))}, {machine}"
    out, work = out.resolve(), work.resolve()
    if "build" in args.parts:
        shutil.rmtree(work / "lib", ignore_errors=True)
    # A rehearsal may run on a busy CPU, so it does not test the limits.
    limits, seconds = (dict.fromkeys(SECONDS, 600), 3600.0) if args.rehearse else (SECONDS, 60 * args.minutes)
    check = Check(out, work / "results", machine, seconds, limits)
    parts = all_parts(work / "results", work, capability)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that runs
    passed = check.run([part for part in parts if {part.name, part.after} & set(args.parts)])
    print(f"\n{check.summary()}\n{out}: the folder to send, please")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
