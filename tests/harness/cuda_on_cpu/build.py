"""Compiles CUDA sources with the host's C++ compiler against the emulator."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "cuda_on_cpu"
# -fno-strict-aliasing: nvcc lets device code reach one address through several types. -ffp-contract=off: the
# results must not depend on the host. No -g, which takes a third of the time. The emulator's header comes first, as
# nvcc's own does.
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-class-memaccess"]
# An access through a null pointer ends the process anyway, and the size of an object is known of arrays alone, whose
# bounds are checked: without these two g++ takes a third less time.
SANITIZERS = ["-fsanitize=undefined,float-cast-overflow", "-fno-sanitize=vptr,null,object-size"]
# A call before each read (emulator.cpp has it); nothing else of the address sanitizer.
READS = ["-fsanitize=kernel-address", "--param=asan-instrumentation-with-call-threshold=0"]
READS += [f"--param=asan-{what}=0" for what in ("stack", "globals")]
# And before each write, in sources that use shared memory for more than sums. Elsewhere guards around tensors do.
NO_WRITES = ["--param=asan-instrument-writes=0"]
WITH_WRITES = ("cases.cu", "matmul.cu", "matmul_few_rows.cu", "int8_matmul.cu", "int8_linear.cu")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"]
FLAGS += [*WARNINGS, *SANITIZERS, "-DAMP_KERNELS_CUDA_ON_CPU", "-include", str(HERE / "emulator.h")]


def header_folders() -> list[Path]:
    """Include folders of CUDA 13: of the pip packages, else of an installed toolkit."""
    for include in _candidates():
        folders = [include, include / "cccl"]
        needed = ("cuda_fp16.h", "cuda_bf16.h", "crt/host_defines.h", "nv/target")
        if all(any((folder / name).exists() for folder in folders) for name in needed):
            return folders
    raise RuntimeError(
        "cuda_on_cpu: CUDA 13 headers must be installed, got none; "
        "run: pip install 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'"
    )


def missing_headers() -> str | None:
    """Why the kernels cannot be compiled here, if so. No compiler at all is an error, not a reason."""
    try:
        header_folders()
    except RuntimeError as error:
        return str(error)
    return None


def _candidates() -> Iterator[Path]:
    packages = importlib.util.find_spec("nvidia")
    for location in (packages.submodule_search_locations if packages else None) or ():
        yield Path(location) / "cu13" / "include"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable]) / "include"
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).resolve().parents[1] / "include"
    yield Path("/usr/local/cuda/include")
    yield from sorted(Path("/usr/local").glob("cuda-13*/include"), reverse=True)


def build(name: str, sources: Sequence[Path]) -> ctypes.CDLL:
    """The library of `sources` and the emulator, compiled unless this very text was compiled before."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"cuda_on_cpu: the C++ compiler {compiler!r} must be on PATH; install g++ or set CXX")
    include = header_folders()
    emulator = HERE / "emulator.cpp"
    command = [compiler, *FLAGS, *(argument for folder in include for argument in ("-isystem", str(folder)))]
    reads = {source: READS if source.name in WITH_WRITES else [*READS, *NO_WRITES] for source in sources}
    commands = {source: [*command, *reads[source]] for source in sources} | {emulator: command}

    digest = hashlib.sha256(repr(commands).encode())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout)
    read = {path for folder in (ROOT / "csrc", HERE) for path in folder.rglob("*.*") if path.suffix != ".pyc"}
    for path in sorted(read):
        digest.update(path.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    library = folder / f"{name}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, on all cores; the others wait for it
        if not library.exists():
            _compile(commands, folder / f"{name}.o", library)
    return ctypes.CDLL(str(library))


def longest_first(sources: Iterable[Path]) -> list[Path]:
    """In an order to compile them that leaves no core idle at the end.

    update.cu is the shortest to read and the longest to compile: nvcc takes 37 s for its 92 kernels, and 13 s for
    matmul.cu, the next. Of the others, size is a good guess.
    """
    return sorted(sources, key=lambda source: (source.stem != "update", -source.stat().st_size))


def _compile(commands: dict[Path, list[str]], work: Path, library: Path) -> None:
    """Links the library; an object is compiled unless its preprocessed text was compiled before."""
    work.mkdir(exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _object(source, commands[source], work), longest_first(commands)))
    linked = work / library.name
    compiler = next(iter(commands.values()))[0]
    # No sanitizer here: emulator.cpp has its run-time library.
    _run([compiler, "-shared", "-Wl,-z,defs", *objects, "-o", str(linked)])
    os.replace(linked, library)
    shutil.rmtree(work)


def _object(source: Path, command: list[str], work: Path) -> str:
    text, object_ = work / f"{source.stem}.ii", work / f"{source.stem}.o"
    _run([*command, "-E", "-P", "-x", "c++", str(source), "-o", str(text)])
    flags = repr(command).replace(str(ROOT), "")  # so that a copy of the clone finds its objects
    key = hashlib.sha256(flags.encode() + text.read_bytes()).hexdigest()
    known = BUILD / "objects" / f"{key[:16]}.o"
    if not known.exists():
        known.parent.mkdir(exist_ok=True)
        _run([*command, "-c", "-x", "c++", str(source), "-o", str(object_)])
        os.replace(object_, known)
    return str(known)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"cuda_on_cpu: {' '.join(command)} failed:\n{result.stderr}")
