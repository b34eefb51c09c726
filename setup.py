"""Builds amp_kernels._C; AMP_KERNELS_BUILD = auto | cpu | cuda | none says what goes into it.

One binary, cudart linked into it, serves every Python >= 3.10 and every torch >= 2.10 of its CUDA major.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, "csrc")
import build_backend  # noqa: F401  # its import refuses an old setuptools, also where no pip builds
import setuptools
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

Nvcc = tuple[tuple[int, int], Path]  # its version and the folder of its toolkit
OLDEST_TORCH = (2, 10)
INSTALL = "pip install --no-build-isolation ."
# pip and `build` unpack setuptools into a folder of this name for an isolated build, uv into the other.
IS_ISOLATED = bool(re.search(r"build-env-|builds-v0", setuptools.__file__))
# Of one core: bindings, CPU kernels and the host's half of CUDA sources; PTX; machine code. Measured with nvcc 13.0.
SECONDS, SECONDS_A_GENERATION, SECONDS_A_GPU = 85, 50, 25
LIMITED_API = "" if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp310"


def find_nvcc() -> Nvcc | None:
    """None if there is none. The compiler itself is asked: the nvcc on PATH may be a wrapper."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which(f"{home}/bin/nvcc" if home else "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return None
    says = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    version = re.search(r"CUDACC_VER_MAJOR__=(\d+) .*?CUDACC_VER_MINOR__=(\d+)", says)
    top = re.search(r"TOP=(.+)", says)
    assert version and top, f"{nvcc} --dryrun printed no version: {says}"
    return (int(version[1]), int(version[2])), Path(top[1]).resolve()


def decide(wanted: str) -> tuple[str, str, Nvcc | None]:
    """What to build, the sentence that says why not more, and the nvcc to use."""
    if wanted not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"setup: AMP_KERNELS_BUILD must be auto, cpu, cuda or none, got {wanted!r}")
    torch = import_module("torch") if find_spec("torch") else None
    compiler, include = (os.environ.get("CXX") or "c++").split()[0], sysconfig.get_path("include")
    what, first = "none", ""
    if wanted == "none":
        why, first = "AMP_KERNELS_BUILD=none was set", "unset it, then "
    elif torch is None and IS_ISOLATED:
        why = "the build was isolated and could not see your torch"
    elif torch is None or tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        why = f"torch >= 2.10 must be installed before the build, got {torch.__version__ if torch else 'none'}"
        first = "run `pip install -U torch setuptools ninja`, then "
        if not {"sdist", "egg_info"} & set(sys.argv):  # neither compiles
            raise SystemExit(f"amp_kernels: {why}; {first}run `{INSTALL}`")
    elif platform.system() == "Windows":
        why, first = "there is no build for Windows", "use WSL, then "
    elif not shutil.which(compiler) or not Path(include, "Python.h").exists():
        why, first = f"there was no {compiler} or no {include}/Python.h", "install g++ and python3-dev, then "
    elif wanted == "cpu":
        what, why, first = "cpu", "AMP_KERNELS_BUILD=cpu was set", "unset it, then "
    elif torch.version.hip:
        what, why = "cpu", f"torch {torch.__version__} is a ROCm build, which is not supported"
        first = "install a CUDA build of torch, then "
    elif torch.version.cuda is None:
        what, why = "cpu", f"torch {torch.__version__} is a build without CUDA"
        first = "to use a GPU, install a CUDA build of torch, then "
    elif (nvcc := find_nvcc()) and nvcc[0][0] == int(torch.version.cuda.split(".")[0]):
        return "cuda", "", nvcc
    else:
        found = "the nvcc that was found is from CUDA {}.{}".format(*nvcc[0]) if nvcc else "no nvcc was found"
        what, why = "cpu", f"torch was built for CUDA {torch.version.cuda} and {found}"
        first = "set CUDA_HOME to a toolkit for that CUDA, then "
    if wanted == "cuda":
        raise SystemExit(f"setup: AMP_KERNELS_BUILD=cuda cannot be done: {why}; {first}run `{INSTALL}`")
    missing = "nothing was compiled" if what == "none" else "the CUDA kernels were not compiled"
    return what, f"{missing} because {why}; {first}run `{INSTALL}`", None


def architectures(version: tuple[int, int]) -> str:
    """Return TORCH_CUDA_ARCH_LIST for nvcc of this version. The binary serves every GPU from 7.5 on.

    Machine code runs on GPUs with the same major version and the same or a higher minor one. PTX runs on every later
    GPU. The PTX of 9.0 serves GPUs for which this nvcc cannot make machine code, and the PTX of 12.0 serves GPUs to
    come. 11.0 needs machine code of its own, because the PTX of 12.0 is too new for it. CUDA 12 calls it 10.1, which
    torch's list does not accept.
    """
    newer = ";10.0;11.0;12.0+PTX" if version >= (13, 0) else ";10.0;12.0+PTX" if version >= (12, 8) else ""
    return "7.5;8.0;8.6;8.9;9.0+PTX" + newer


def gencode(archs: str) -> list[str]:
    """nvcc's flags for a TORCH_CUDA_ARCH_LIST; none for names such as Ampere, which torch translates.

    One PTX for each generation (7.x, 8.x, 9.0, and from 10.0 on), from which the machine code of all of its members is
    made: for 8.6 and 8.9 it is that of their own PTX to the bit. Making PTX takes 1.6 times as long as machine code.
    """
    members: dict[str | int, list[tuple[int, str, str]]] = {}
    for arch in archs.replace(" ", ";").split(";"):
        match = re.fullmatch(r"(\d+)\.(\d)(a?)(\+PTX)?", arch)
        if match is None:
            return []
        major, minor, specific, ptx = match.groups()
        generation = arch if specific else min(int(major), 10)
        members.setdefault(generation, []).append((int(major + minor), specific, ptx))
    flags = []
    for archs_of_one in members.values():
        lowest, specific, _ = min(archs_of_one)
        codes = [f"sm_{number}{specific}" for number, _, _ in archs_of_one]
        codes += [f"compute_{lowest}{specific}"] * any(ptx for _, _, ptx in archs_of_one)
        flags += [f"-gencode=arch=compute_{lowest}{specific},code={code}" for code in codes]
    return flags


def announce(archs: str, flags: list[str], jobs: int) -> None:
    """Print what a build is for, about how long it takes, and how to shorten it. pip shows it with -v.

    `archs` is "" if the CUDA kernels are not compiled.
    """
    generations = len({flag.partition(",")[0] for flag in flags})
    gpus = len(re.findall("code=sm_", " ".join(flags))) or len(archs.split(";")) * bool(archs)
    seconds = SECONDS + SECONDS_A_GENERATION * (generations or gpus) + SECONDS_A_GPU * gpus
    minutes = max(round(seconds / jobs / 60), 1)
    time = f"{minutes} minute{'s' * (minutes > 1)} with {jobs} job{'s' * (jobs > 1)} on idle cores"
    print(f"amp_kernels: GPU architectures {archs or 'none'}: about {time}")
    if archs:
        print("amp_kernels: to shorten it, name your GPU's alone (TORCH_CUDA_ARCH_LIST=9.0) or raise MAX_JOBS", end="")
        print("; AMP_KERNELS_BUILD=cpu leaves the CUDA kernels out; progress is shown by `pip install -v`")


def extension(nvcc: Nvcc | None) -> tuple[list[Extension], dict[str, Any]]:
    from torch.utils import cpp_extension

    x86 = platform.machine().lower() in ("x86_64", "amd64")
    arch = os.environ.get("AMP_KERNELS_CPU_ARCH") or ("x86-64-v3" if x86 else "")
    flags = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
    flags += ["-ffp-contract=off", *([f"-march={arch}" if x86 else f"-mcpu={arch}"] if arch else [])]
    if not cpp_extension.is_ninja_available():
        print("amp_kernels: without ninja one file is compiled at a time; `pip install ninja` is faster")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = int(os.environ.get("MAX_JOBS") or cores) if cpp_extension.is_ninja_available() else 1
    sources = ["csrc/module.cpp", *sorted(glob("csrc/ops/*.cpp") + glob("csrc/cpu/*.cpp"))]
    ext = Extension("amp_kernels._C", sources, language="c++")
    ext.include_dirs, ext.library_dirs = cpp_extension.include_paths(), cpp_extension.library_paths()
    ext.libraries, ext.define_macros = ["torch_cpu"], [("TORCH_TARGET_VERSION", "0x020a000000000000")]
    ext.extra_compile_args = {"cxx": flags, "nvcc": ["-O3", "-Xcompiler=-fvisibility=hidden"]}
    ext.depends, ext.py_limited_api = glob("csrc/**/*.*h", recursive=True), bool(LIMITED_API)
    if nvcc:
        version, toolkit = nvcc
        cpp_extension.CUDA_HOME = str(toolkit)  # torch looks beside the wrapper, where there are no headers
        archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or architectures(version)
        flags = gencode(archs)
        announce(archs, flags, jobs)
        # Without this the longest source takes as long as all others together on 16 cores; 280 MB a thread.
        threads = [f"--threads={min(cores // 4, 4)}"] * (cores >= 8)
        ext.extra_compile_args["nvcc"] += [*flags, *threads]
        folders = [toolkit, *toolkit.glob("targets/*")]
        ext.include_dirs += [f"{f}/include" for f in folders]
        ext.library_dirs += [f"{f}/{lib}" for f in folders for lib in ("lib64", "lib")]
        ext.libraries += ["torch_cuda", "cudart_static", "rt", "dl", "pthread"]
        ext.define_macros.append(("USE_CUDA", None))
        ext.sources += sorted(glob("csrc/cuda/*.cu"))
    else:
        announce("", [], jobs)
    return [ext], {"build_ext": cpp_extension.BuildExtension}


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        root = self.get_package_dir("") if self.editable_mode else self.build_lib
        Path(root, "amp_kernels/_build.txt").write_text(NOTE)  # for `python -m amp_kernels info`

    def get_source_files(self) -> list[str]:  # for an sdist packed where nothing can be compiled
        return [*super().get_source_files(), *glob("csrc/**/*.*", recursive=True)]


WHAT, NOTE, NVCC = decide(os.environ.get("AMP_KERNELS_BUILD", "auto"))
TARGETS = {"none": "nothing", "cpu": "the CPU", "cuda": "the CPU and CUDA"}
print(f"amp_kernels: compiling for {TARGETS[WHAT]}", *([f"with {NVCC[1]}/bin/nvcc"] if NVCC else []))
if NOTE:
    print(f"amp_kernels: {NOTE}")
MODULES, COMMANDS = ([], {}) if WHAT == "none" else extension(NVCC)
COMMANDS["build_py"] = BuildPy
# A release's wheels for CUDA 12 and 13 are 0.1.0+cu12 and 0.1.0+cu13: without this all have one name.
LOCAL = os.environ.get("AMP_KERNELS_LOCAL_VERSION")
OPTIONS = {"bdist_wheel": {"py_limited_api": LIMITED_API}, "egg_info": {"tag_build": f"+{LOCAL}" if LOCAL else ""}}
setup(ext_modules=MODULES, cmdclass=COMMANDS, options=OPTIONS)
