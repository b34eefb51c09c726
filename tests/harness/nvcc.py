"""What nvcc makes of the CUDA sources. Each is compiled once, for all tests and all processes of a session.

A result is kept in build/nvcc under a name that is made of all that it depends on, so that a second session, or another
process of this one, finds it there.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from cuda_on_cpu.build import longest_first

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
# update.cu and update_lean.cu take half of the time of all sources, for 152 kernels that differ in types alone.
# `make test` compiles 17 of these, and `make test-slow` all.
FEW = [few if (few := ROOT / "tests/harness/few" / source.name).exists() else source for source in SOURCES]
FEW_AND_ALL = [pytest.param(FEW, id="few"), pytest.param(SOURCES, id="all", marks=pytest.mark.slow)]
BUILD = ROOT / "build" / "nvcc"
# The oldest standard that a supported torch compiles extensions with, and the macros torch gives nvcc.
NO_OPERATORS = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", *(f"-D__CUDA_NO_{name}__" for name in NO_OPERATORS)]
FLAGS += ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]

# setup.py's default architectures, by the one whose PTX they are compiled from here. The sources ask only whether
# __CUDA_ARCH__ is below 800 and whether it is 900, and nvcc's front end takes more than half of the time.
Targets = Mapping[str, Sequence[str]]
HOPPER: Targets = {"90": ("90",)}
TURING: Targets = {"75": ("75",)}
OTHERS: Targets = {"80": ("80", "120")}
# Compiled by `make nightly` alone. 86 and 89 are near relatives of 80. No source has code of its own for 100 or 110.
REST: Targets = {"80": ("86", "89", "100", "110")}


class Compiled(NamedTuple):
    object: Path
    said: str  # by ptxas
    archs: list[str]


class Kernel(NamedTuple):
    """A kernel of a source as it is on one architecture."""

    arch: str
    mangled: str
    code: str

    @property
    def name(self) -> str:
        return short_names([self.mangled])[self.mangled]


def find(what: str, *candidates: str) -> str:
    for candidate in candidates:
        if path := shutil.which(candidate):
            return path
    reason = f"there is no {what} (looked for {', '.join(candidates)})"
    if "nvcc" in os.environ.get("AMP_KERNELS_EXPECT", "").split(","):
        pytest.fail(f"AMP_KERNELS_EXPECT names nvcc, but {reason}")
    pytest.skip(reason)


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return find("CUDA compiler", *([f"{home}/bin/nvcc"] if home else []), "nvcc")


def cuobjdump() -> str:
    triton = importlib.util.find_spec("triton")
    folders = triton.submodule_search_locations if triton else None
    shipped = [f"{folder}/backends/nvidia/bin/cuobjdump" for folder in folders or ()]
    return find("disassembler", *shipped, "cuobjdump")


def run(*command: str | Path) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}", pytrace=False)
    return result.stdout + result.stderr


# ------------------------------------------------------------------------------------------------------- compiling
def compile_sources(targets: Targets, sources: Sequence[Path]) -> dict[str, Compiled]:
    """Every source by its stem. Processes that compile the same ones at the same time share the work."""
    compiler = nvcc()
    known = run(compiler, "--list-gpu-code").split()  # nvcc before 12.8 has no sm_100, before 13.0 no sm_110
    commands = {source: _command(compiler, source, targets, known) for source in sources}
    done: dict[str, Compiled] = {}

    def compile_next(waiting: deque[Path]) -> None:
        refused = 0  # sources in a row that another process is compiling
        while True:
            try:
                source = waiting.popleft()
            except IndexError:
                return
            result = _compiled(source, *commands[source], wait=refused > len(waiting))
            if result is None:
                refused += 1
                waiting.append(source)
            else:
                refused = 0
                done[source.stem] = result

    waiting = deque(longest_first(sources))
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(compile_next, waiting) for _ in range(workers)]:
            future.result()
    return {source.stem: done[source.stem] for source in sources}


def _command(compiler: str, source: Path, targets: Targets, known: Sequence[str]) -> tuple[list[str], list[str]]:
    if source.stem.startswith("matmul"):  # by far the longest to compile: for sm_120 too at night
        targets = {"80": ("80",)} if targets is OTHERS else targets
        targets = {"80": (*REST["80"], "120")} if targets is REST else targets
    of_ptx = {ptx: [arch for arch in archs if f"sm_{arch}" in known] for ptx, archs in targets.items()}
    gencode = []
    for ptx, archs in of_ptx.items():
        codes = [*(f"sm_{arch}" for arch in archs), f"compute_{ptx}"] if archs else []
        gencode += [f"-gencode=arch=compute_{ptx},code={code}" for code in codes]
    return [compiler, "-c", "-Xptxas", "-v", *FLAGS, *gencode], list(chain(*of_ptx.values()))


def _compiled(source: Path, command: list[str], archs: list[str], *, wait: bool) -> Compiled | None:
    """None if another process compiles it, unless this one is to wait for that."""
    folder = BUILD / f"{source.stem}-{_key(source, command)}"
    object_, said = folder / "kernels.o", folder / "said.txt"
    if not said.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, wait) as is_ours:
            if not is_ours:
                return None
            if not said.exists():
                text = run(*command, source, "-o", object_)
                _write(said, text)
    return Compiled(object_, said.read_text(), archs)


def _key(source: Path, command: list[str]) -> str:
    digest = hashlib.sha256(repr(command).encode() + _version(command[0]).encode())
    for path in sorted(_read_by(source)):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _version(compiler: str) -> str:
    return run(compiler, "--version")


def _read_by(source: Path) -> set[Path]:
    """The source and our headers that it includes, which are all in quotes."""
    found, left = set(), [source]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'^#include "(.*)"', path.read_text(), flags=re.MULTILINE)
            left += [(path.parent / name).resolve() for name in names]
    return found


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[bool]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


# ----------------------------------------------------------------------------------------------------- what came out
def kernels(compiled: Compiled) -> list[Kernel]:
    """The disassembled kernels of a source, for each of its architectures."""
    listing = compiled.object.with_name("sass.txt")
    if not listing.exists():
        with _locked(compiled.object.parent, wait=True):
            if not listing.exists():
                _write(listing, run(cuobjdump(), "-sass", compiled.object))
    parts = re.split(r"^arch = (\S+)$", listing.read_text(), flags=re.MULTILINE)[1:]
    return [
        Kernel(arch, *re.split(r"\s", function, maxsplit=1))
        for arch, of_arch in zip(parts[::2], parts[1::2], strict=True)
        for function in re.split(r"^\s*Function : ", of_arch, flags=re.MULTILINE)[1:]
    ]


def has_no_tensor_cores(kernel: Kernel) -> bool:
    """Whether it is a product of bf16 for sm_75, which is compiled and ends in a trap."""
    return kernel.arch == "sm_75" and re.match(r"(tiled|few_rows)_kernel<__nv_bfloat16\b", kernel.name) is not None


def short_names(mangled: Sequence[str]) -> dict[str, str]:
    """Names as people read them: ``rows_kernel<DequantizeOp<__half> >``."""
    if not mangled:
        return {}
    says = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    return dict(zip(mangled, map(shortened, says.splitlines()), strict=True))


def shortened(demangled: str) -> str:
    name = re.sub(r"^void |amp_kernels::|cuda::|\(anonymous namespace\)::", "", demangled)
    return re.sub(r"(?<=[>\w])\(.*", "", name)


class Usage(NamedTuple):
    registers: int
    stack: int
    shared: int  # declared in the source, beside what a launch asks for
    local: int


def usage(compiled: Compiled) -> dict[str, Usage]:
    """What each kernel of a source takes, by its mangled name; of an object for one architecture."""
    says = run(cuobjdump(), "-res-usage", compiled.object)
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    return {name: Usage(*map(int, numbers)) for name, *numbers in re.findall(pattern, says)}
