"""What the benchmarks share: cases, interleaved timing against a plain copy, a long CSV and printed tables.

A benchmark gives `run_case` its contenders, ours first. Each is built and compared with the reference; those that are
right take turns in one process, each after a copy. A time is the median of the rounds. Ratios, and shares of the copy's
speed, are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import math
import mmap
import os
import platform
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import amp_kernels
from amp_kernels.report import table

from .summary import COPY, RESULTS

FIELDS = (
    "benchmark", "case", "contender", "scaler", "dtype", "tensors", "elements", "bytes",
    "median_ms", "p20_ms", "p80_ms", "gb_s", "tera_ops", "copy_percent", "ratio_to_ours", "ratio_p20", "ratio_p80",
    "device_name", "torch_version", "amp_kernels_version", "timestamp", "note",
)  # fmt: skip
SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 25_600_000, 100_000_000, 1_000_000_000)
MIN_ROUNDS, MAX_ROUNDS, WARM_UPS = 9, 200, 2
MAX_IN_A_ROW = 50
QUICK_SHAPES = ((64, 64, 64), (1024, 1024, 1024), (1024, 1023, 1023), (1, 4096, 4096))  # products of a quick run
# The copy runs before every timed call and so empties the caches, as the rest of a training step does. On a GPU it must
# be far larger than the L2 (B200: 126 MB). On a CPU it follows the rule of STREAM (McCalpin, 1995): each array is four
# times all last-level caches. Beside an L3 of 32 MB a copy of 64 MB ran at 35 GB/s in some minutes and at 98 in others,
# depending on how much of the cache the machine's other tenants used; a kernel that is timed between two copies finds
# nothing of its own there.
MIN_COPY_BYTES = 2**30
ARRAYS_TO_CACHES = 4
MAX_COPY_BYTES = 2**31
MAX_CACHED_ELEMENTS = 2**18  # 1 MB of fp32
MIN_CASE_BYTES = 30  # per element, that must be free to begin a case: the model that all start from, and our copy of it
# Calls queued back to back between two events: time per step as in a training loop, where the GPU is not idle
# when the step begins. All but the first find in L2 what fits there: below about 5M parameters a GPU's row
# says how fast the host and the L2 are.
CUDA_REPEATS = 10


@dataclass(frozen=True)
class Layout:
    """The shapes of a model's parameters."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    in_a_row: int = 1  # calls between two looks at a CPU's clock

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class Case:
    """One table: the same work, done by every contender."""

    benchmark: str
    name: str
    dtype: torch.dtype
    layout: Layout
    bytes_per_element: int  # what our algorithm must move, hence what GB/s counts for everybody
    traffic: str  # the same in words
    operations: int = 0  # multiplications and additions of a call, for products


@dataclass(frozen=True)
class Job:
    """A contender built for a case."""

    run: Callable[[], object]
    check: Callable[[], str]  # runs it once and compares: "", or why the result is wrong
    # after the check: resets the data to values that stay finite however often `run` is called
    settle: Callable[[], object] = lambda: None
    # on a CPU, before every timed call: touches what the rest of the program would just have touched
    precede: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case; `build` raises where it cannot."""

    name: str
    scaler: str
    memory: int  # bytes per element that it holds
    build: Callable[[], Job]


def few_large(elements: int) -> Layout:
    return Layout("few large", ((elements // 4,),) * 4)


def by_size(name: str, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> list[Layout]:
    """On a CPU what fits a core's cache is timed twice: calls in a row, whose time is that of instructions, and single
    ones after other work, when every object and array has to come from memory again."""
    layout = Layout(name, shapes)
    if layout.elements > MAX_CACHED_ELEMENTS or device.type != "cpu":
        return [layout]
    return [replace(layout, in_a_row=MAX_IN_A_ROW), replace(layout, name=f"{name}, cold caches")]


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Drawn on the device: a CPU takes two minutes for the ten billion numbers of all products on a GPU."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def on_other_backends(
    name: str,
    memory: int,
    device: torch.device,
    build: Callable[[Callable[..., Any]], Job],
    function: Callable[..., Any],
    backends: Sequence[str] = ("cuda", "triton"),
) -> list[Contender]:
    """On a GPU one more contender for each of our backends, forced: the default ought to be as fast as the fastest."""

    def forced(backend: str, *args: Any, **options: Any) -> object:
        with amp_kernels.use_backend(backend):
            return function(*args, **options)

    kernels = backends if device.type == "cuda" else ()
    return [Contender(f"{name}, {b} kernels", "none", memory, partial(build, partial(forced, b))) for b in kernels]


def resnet50() -> Layout:
    """The 161 parameters (25.6M elements) of torchvision's ResNet-50."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            convolutions = [(width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1)]
            convolutions += [(outputs, inputs, 1, 1)] if block == 0 else []
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            inputs = outputs
    return Layout("ResNet-50", (*shapes, (1000, 2048), (1000,)))


def layouts(args: argparse.Namespace) -> list[Layout]:
    """Layouts of a run; a line is printed for each that is left out. The thousand small tensors come first, while the
    heap is fresh, as a model's do: in the holes that freed large ones leave, each would lie on a page of its own."""
    sizes = args.sizes or ((1_000_000,) if args.quick else SIZES)
    free = free_bytes(args.device)
    chosen = []
    many_small = [] if args.rehearse else by_size("1000 x 64", ((64,),) * 1000, args.device)
    for layout in many_small + [few_large(n) for n in sizes] + ([] if args.sizes or args.quick else [resnet50()]):
        needed = MIN_CASE_BYTES * layout.elements
        if layout.elements > args.max_elements:
            print(f"left out: {layout.name}, {layout.elements:,} elements: more than --max-elements")
        elif needed > free:
            gigabytes = f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            print(f"left out: {layout.name}, {layout.elements:,} elements: {gigabytes}")
        else:
            chosen.append(layout)
    return chosen


def parse_arguments(description: str | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default, help=f"cpu or cuda (here: {default})")
    limit = "largest model in elements (CPU: 1e8, GPU: 1e9)"
    parser.add_argument("--max-elements", type=lambda text: int(float(text)), help=limit)
    sizes = "of the models of optimizers, instead of all: 1e6,1e8"
    parser.add_argument("--sizes", type=lambda text: [int(float(word)) for word in text.split(",")], help=sizes)
    shapes = "forward products of these alone (rows x outputs x inputs): 64x64x64,8x4096x4096"
    parser.add_argument("--shapes", type=parse_shapes, help=shapes)
    parser.add_argument("--seconds", type=float, default=2.0, help="for the rounds of a case (%(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="leave out the torch.compile'd contenders")
    parser.add_argument("--quick", action="store_true", help="two sizes, no torch.compile: 20 seconds")
    rehearse = "one round beside a small copy, no small tensors: shows that it runs, and no figure means anything"
    parser.add_argument("--rehearse", action="store_true", help=rehearse)
    fresh = "leave malloc as it is: results of over 32 MB then come from fresh pages at every call (CPU)"
    parser.add_argument("--fresh-memory", action="store_true", help=fresh)
    parser.add_argument("--out", type=Path, help="folder of the CSV (in a clone: benchmarks/results/<machine>)")
    args = parser.parse_args()
    if args.fresh_memory and args.device.type != "cpu":
        parser.error(f"--fresh-memory is about a CPU's memory, got --device {args.device}")
    args.max_elements = args.max_elements or (10**9 if args.device.type == "cuda" else 10**8)
    args.no_compile |= args.quick
    args.seconds = min(args.seconds, 1.0) if args.quick else args.seconds
    if args.out is None:
        args.out = results_folder(args.device, args.quick, "-fresh-memory" if args.fresh_memory else "")
    global MIN_ROUNDS, MAX_ROUNDS, ARRAYS_TO_CACHES, MAX_IN_A_ROW
    if args.quick:
        MIN_ROUNDS, MAX_IN_A_ROW = 5, 10
    if args.rehearse:
        MIN_ROUNDS, MAX_ROUNDS, ARRAYS_TO_CACHES = 1, 1, 0
    if args.rehearse or args.quick or args.device.type == "cuda":
        # Without this, each collection between two contenders walks torch's million objects for 0.2 s: 20 of the 30 s
        # that gpu_check.py gives a benchmark.
        gc.freeze()
    if not args.fresh_memory:
        _keep_memory()
    return args


def parse_shapes(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, word.split("x"))) for word in text.split(",")]


def _keep_memory() -> None:
    """Makes glibc keep freed memory, as torch's allocator of GPU memory does, in pages of 2 MB where Linux gives them.

    By default results of more than 32 MB come from fresh pages at every call, which cost ten times what the work does.
    On pages of 4 KB, scattered by what ran before, the time of a copy varied by 28 % with where its arrays lay; on
    pages of 2 MB by 4 %."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc, m_trim_threshold, m_mmap_max, huge, page = ctypes.CDLL(None), -1, -4, 14, mmap.PAGESIZE
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)
    libc.malloc.restype = ctypes.c_void_p
    size = free_bytes(torch.device("cpu")) // 2
    memory = libc.malloc(ctypes.c_size_t(size))
    if memory is not None:
        begin = -(-memory // page) * page
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t((memory + size - begin) // page * page), huge)
        libc.free(ctypes.c_void_p(memory))


def results_folder(device: torch.device, is_quick: bool = False, suffix: str = "") -> Path:
    """Returns the folder of a machine's results: in a clone among the committed ones, else in the current directory.

    A quick run would replace the committed results. It gets a new folder under the machine's temporary folder, where
    other users cannot write.
    """
    parent = RESULTS if RESULTS.is_dir() else Path("amp_kernels-bench")
    parent = Path(tempfile.mkdtemp(prefix="amp_kernels-")) if is_quick else parent
    return parent / (slug(device_name(device)) + suffix)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    model = found[1] if found else platform.processor() or platform.machine()
    return f"CPU, {torch.get_num_threads()} cores, {model}"


def slug(name: str) -> str:
    words = re.sub(r"\((r|tm)\)|nvidia|processor", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 1024 * int(found[1]) if found else half


class Report:
    """Writes rows to the CSV as they come, and a table for each case."""

    def __init__(self, benchmark: str, args: argparse.Namespace) -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        self.path = args.out / f"{benchmark}.csv"
        self._file = self.path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, FIELDS)
        self._writer.writeheader()
        self._device_name = device_name(args.device)
        self.failures: list[str] = []  # cases in which ours was wrong or could not run

    def add(self, case: Case, rows: Sequence[dict[str, object]]) -> None:
        shared = {
            "benchmark": case.benchmark,
            "case": f"{case.name}, {case.layout.name}",
            "dtype": str(case.dtype).removeprefix("torch."),
            "tensors": len(case.layout.shapes),
            "elements": case.layout.elements,
            "bytes": case.bytes_per_element * case.layout.elements,
            "device_name": self._device_name,
            "torch_version": torch.__version__,
            "amp_kernels_version": amp_kernels.__version__,
        }
        for row in rows:
            stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._writer.writerow({**shared, "timestamp": stamp, **row})
            self._file.flush()
        print(f"\n{shared['case']}, {shared['dtype']}, {shared['elements']:,} elements; {case.traffic}")
        columns = ["contender", "scaler", *FIELDS[8:17]]
        columns = [c for c in columns if any(row.get(c, "") != "" for row in rows)]
        print(table(columns, [[str(row.get(c, "")) for c in columns] for row in rows if "median_ms" in row]))
        for row in rows:
            if "median_ms" not in row:
                print(f"not timed: {row['contender']}: {row['note']}")

    def finish(self) -> int:
        """Says where the rows are; the exit code says whether ours was right everywhere."""
        gc.unfreeze()  # else Triton's bindings list what they take for leaks, in twenty lines
        print(f"\n{self.path}")
        for failure in self.failures:
            print(f"FAILED: {failure}")
        return 1 if self.failures else 0


def run_case(case: Case, contenders: Sequence[Contender], args: argparse.Namespace, report: Report) -> None:
    """Builds, checks, times and reports; `contenders[0]` is ours."""
    torch.compiler.reset()
    _free_memory(args.device)
    source, target = (torch.ones(_copy_elements(case, args.device), device=args.device) for _ in range(2))
    jobs: dict[Contender, Job] = {}
    rows: dict[Contender, dict[str, object]] = {
        contender: {"contender": contender.name, "scaler": contender.scaler} for contender in contenders
    }
    for contender in contenders:
        job, why = _build(contender, case, args.device)
        if job is None:
            rows[contender]["note"] = why
        else:
            jobs[contender] = job
    copy_once = partial(target.copy_, source)
    times, copies = _interleave(jobs, copy_once, min(case.layout.in_a_row, MAX_IN_A_ROW), args)
    if contenders[0] not in times:
        report.failures.append(f"{case.name}, {case.layout.name}: {rows[contenders[0]]['note']}")
    ours = times.get(contenders[0], [])
    size, copy_bytes = case.bytes_per_element * case.layout.elements, 2 * source.nbytes
    for contender, samples in times.items():
        share = 100 * size / copy_bytes * _middle_ratio(copies[contender], samples)
        shares = {"copy_percent": round(share, 1), **(_ratio_and_spread(samples, ours) if ours else {})}
        rows[contender] |= _statistics(samples, size) | shares | {"note": case.traffic}
        if case.operations:
            rows[contender]["tera_ops"] = float(f"{case.operations / statistics.median(samples) / 1e9:.4g}")
    copy: dict[str, object] = {
        "contender": COPY,
        "scaler": "none",
        "bytes": copy_bytes,
        "note": "bytes read and written",
    }
    all_copies = [sample for samples in copies.values() for sample in samples]
    copy |= _statistics(all_copies or [milliseconds(copy_once, args.device)], copy_bytes) | {"copy_percent": 100.0}
    report.add(case, [*rows.values(), copy])


def _copy_elements(case: Case, device: torch.device) -> int:
    size = min(case.bytes_per_element * case.layout.elements, MAX_COPY_BYTES)
    return max(size, MIN_COPY_BYTES if device.type == "cuda" else 2 * ARRAYS_TO_CACHES * last_cache_bytes()) // 8


def last_cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Of all CPUs that this process may use; 32 MiB where the system does not say."""
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        cache = cpus / f"cpu{cpu}" / "cache" / "index3"
        if (cache / "size").exists():
            kibibytes = (cache / "size").read_text().strip().removesuffix("K")
            found[(cache / "shared_cpu_list").read_text()] = 1024 * int(kibibytes)
    return sum(found.values()) or 2**25


def _build(contender: Contender, case: Case, device: torch.device) -> tuple[Job | None, str]:
    """The job, or None and why there is none."""
    # 6 bytes: what a step may allocate while it runs (foreach RMSprop: 4) and fragmentation
    needed = (contender.memory + 6) * case.layout.elements
    if needed > free_bytes(device):
        return None, f"needs about {needed / 1e9:.1f} GB, {free_bytes(device) / 1e9:.1f} GB are free"
    job, why = None, ""
    _free_memory(device)
    try:
        job = contender.build()
        why = job.check()
        if not why:
            job.settle()
            for _ in range(WARM_UPS):
                job.run()
    except Exception as error:  # a peer that cannot run is a row that says so, whatever it raised
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if why:
        job = None
        _free_memory(device)
    return job, why


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _interleave(
    jobs: dict[Contender, Job], copy: Callable[[], object], calls: int, args: argparse.Namespace
) -> tuple[dict[Contender, list[float]], dict[Contender, list[float]]]:
    """Milliseconds of a call, and of the copy before it, in rounds of all contenders.

    Each round has another order: the copy does not empty every cache, so a contender pays for the one before it. In a
    fixed order torch's bf16 product of 512^3, called through ours, had 0.90 of its own speed; so it has 0.97."""
    times: dict[Contender, list[float]] = {contender: [] for contender in jobs}
    copies: dict[Contender, list[float]] = {contender: [] for contender in jobs}
    order, shuffle = list(jobs.items()), random.Random(0).shuffle
    copy()
    deadline = time.perf_counter() + args.seconds
    for done in _rounds():
        if done >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        shuffle(order)
        for contender, job in order:
            copies[contender].append(milliseconds(copy, args.device))
            if args.device.type == "cpu":
                job.precede()
            times[contender].append(milliseconds(job.run, args.device, calls))
    return times, copies


def _rounds() -> Iterable[int]:
    """Shows a bar on a terminal if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return range(MAX_ROUNDS)
    return tqdm(range(MAX_ROUNDS), desc="rounds", leave=False, delay=1, disable=None)


def _middle_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of the rounds.

    It is not the ratio of two medians. The memory of a shared machine may have two speeds (33 and 50 GB/s), each for
    seconds. Then one contender's median may come from slow rounds and another's from fast ones.
    """
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _ratio_and_spread(samples: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Of the ratios within a round: the median, and what lies around three fifths of them."""
    p20, p80 = _percentiles([a / b for a, b in zip(samples, ours, strict=True)])
    ratios = {"ratio_to_ours": _middle_ratio(samples, ours), "ratio_p20": p20, "ratio_p80": p80}
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


def _percentiles(samples: Sequence[float]) -> tuple[float, float]:
    """The 20th and the 80th."""
    p20, *_, p80 = statistics.quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else [*samples, *samples]
    return p20, p80


def milliseconds(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """The time of a call, averaged over `calls` in a row."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - start) / calls
    calls = max(calls, CUDA_REPEATS)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def _statistics(samples: Sequence[float], size: int) -> dict[str, object]:
    """Columns of a row."""
    p20, p80 = _percentiles(samples)
    median = statistics.median(samples)
    return {
        "median_ms": float(f"{median:.5g}"),
        "p20_ms": float(f"{p20:.5g}"),
        "p80_ms": float(f"{p80:.5g}"),
        "gb_s": float(f"{size / median / 1e6:.4g}"),
    }


def sample(tensors: Sequence[Tensor], count: int = 2**16) -> Tensor:
    """Up to `count` elements of each tensor, evenly spread, with the first and the last."""
    picked = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        last, k = flat.numel() - 1, min(flat.numel(), count)
        picked.append(flat[torch.arange(k, device=flat.device) * last // max(k - 1, 1)])
    return torch.cat(picked)


def disagreement(ours: Tensor, by_torch: Tensor, exact: Tensor, slack: float = 0.0) -> str:
    """The error rule: at most twice the error of torch in the same dtype; "" or a sentence.

    Args:
        slack: allowed on top, relative to the largest value, for peers that are less precise by design.
    """
    error = (ours.double() - exact).abs().max().item()
    largest = exact.abs().max().item()
    allowed = 2 * (by_torch.double() - exact).abs().max().item() + (1e-7 + slack) * largest
    return "" if error <= allowed else f"wrong: error {error:.3g}, allowed {allowed:.3g}"
