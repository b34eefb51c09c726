"""Compiles CUDA sources with the host's C++ compiler against the emulator."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
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
# bounds are checked: without these two g++ takes a third less time. Without a check of each sum of
# an address and an index it takes a quarter less again: what is read is checked, and guards show what is written.
SANITIZERS = ["-fsanitize=undefined,float-cast-overflow", "-fno-sanitize=vptr,null,object-size,pointer-overflow"]
# A call before each read and each write (emulator.cpp has it); nothing else of the address sanitizer.
ACCESSES = ["-fsanitize=kernel-address", "--param=asan-instrumentation-with-call-threshold=0"]
ACCESSES += [f"--param=asan-{what}=0" for what in ("stack", "globals")]
NOT_WATCHED = ("emulator.cpp", "gpus.cpp")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"]
# Ubuntu's g++ defines it, and glibc then ends a process whose longjmp goes to another stack, as fibers do.
FLAGS += ["-U_FORTIFY_SOURCE"]
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
    """The library of `sources` and the emulator."""
    return ctypes.CDLL(str(_library(name, _for_emulator([*sources, HERE / "emulator.cpp"]), ["-Wl,-z,defs"])))


def build_gpus() -> Path:
    """The library of ``amp_kernels._C`` as it is built for CUDA, its kernels for the emulator, and of torch's device
    (torch_device.cpp). Does not import torch, which has to be imported after this library is loaded."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    includes = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    # -O0: tests run little of what is not a kernel, and it compiles a quarter faster than with -O1.
    command = [_compiler(), "-O0", "-fPIC", "-w", "-ffp-contract=off", *_system(includes)]
    csrc = ROOT / "csrc"
    device = {HERE / "torch_device.cpp": [*command, "-std=c++20"]}  # torch's own headers want it
    command += ["-std=c++17", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]  # as setup.py
    command += ["-fno-math-errno", "-fno-trapping-math"]
    command += ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
    operators = [csrc / "module.cpp", *(csrc / "ops").glob("*.cpp"), *(csrc / "cpu").glob("*.cpp")]
    kernels = [*(csrc / "cuda").glob("*.cu"), HERE / "emulator.cpp", HERE / "gpus.cpp"]
    # Inline functions that both have are those of the kernels, whose reads are watched: the linker takes the first.
    commands = _for_emulator(kernels) | dict.fromkeys(operators, command) | device
    # The definitions here of torch's C interface take precedence over those of torch.
    link = ["-Wl,-Bsymbolic-functions", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    return _library("_C", commands, link)


def _for_emulator(sources: Iterable[Path]) -> dict[Path, list[str]]:
    """The command that compiles each of them, up to its name."""
    command = [_compiler(), *FLAGS, *_system(header_folders())]
    return {s: command if s.name in NOT_WATCHED else [*command, *ACCESSES] for s in sources}


def _system(folders: Iterable[Path]) -> list[str]:
    return [argument for folder in folders for argument in ("-isystem", str(folder))]


def _compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"cuda_on_cpu: the C++ compiler {compiler!r} must be on PATH; install g++ or set CXX")
    return compiler


def _library(name: str, commands: dict[Path, list[str]], link: Sequence[str]) -> Path:
    """Compiled unless this very text was compiled before."""
    digest = hashlib.sha256(repr((commands, link)).encode())
    digest.update(subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout)
    read = {path for folder in (ROOT / "csrc", HERE) for path in folder.rglob("*.*") if path.suffix != ".pyc"}
    for path in sorted(read | set(commands)):
        digest.update(path.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    library = folder / f"{name}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, on all cores; the others wait for it
        if not library.exists():
            _compile(commands, link, folder / f"{name}.o", library)
    return library


def longest_first(sources: Iterable[Path]) -> list[Path]:
    """Sort sources so that those that compile longest come first, and no core is idle at the end.

    update.cu takes longest, with its 92 kernels. The other sources are sorted by size.
    """
    return sorted(sources, key=lambda source: (source.stem != "update", -source.stat().st_size))


def _compile(commands: dict[Path, list[str]], link: Sequence[str], work: Path, library: Path) -> None:
    """Links the library; an object is compiled unless its preprocessed text was compiled before."""
    work.mkdir(exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = {source: pool.submit(_object, source, commands[source], work) for source in longest_first(commands)}
        objects = [compiled[source].result() for source in commands]
    linked = work / library.name
    # No sanitizer here: emulator.cpp has its run-time library.
    _run([_compiler(), "-shared", *objects, *link, "-o", str(linked)])
    os.replace(linked, library)
    shutil.rmtree(work)


def _object(source: Path, command: list[str], work: Path) -> str:
    stem = f"{source.parent.name}_{source.stem}"
    text, object_ = work / f"{stem}.ii", work / f"{stem}.o"
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
