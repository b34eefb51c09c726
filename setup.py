"""Builds amp_kernels._C; AMP_KERNELS_BUILD = auto | cpu | cuda | none says what goes into it.

One binary, cudart linked into it, serves every Python >= 3.10 and every torch >= 2.10 of its CUDA major.
"""

import os
import platform
import re
import shutil
import subprocess
import sysconfig
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

LIMITED_API = "" if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp310"


def find_nvcc():
    """(version, toolkit folder) or None. The compiler itself is asked: the nvcc on PATH may be a wrapper."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which(f"{home}/bin/nvcc" if home else "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return None
    says = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    version = re.search(r"CUDACC_VER_MAJOR__=(\d+) .*?CUDACC_VER_MINOR__=(\d+)", says).groups()
    return tuple(map(int, version)), Path(re.search(r"TOP=(.+)", says)[1]).resolve()


def decide(wanted):
    """What to build, the sentence that says why not more, and the nvcc to use."""
    if wanted not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"setup: AMP_KERNELS_BUILD must be auto, cpu, cuda or none, got {wanted!r}")
    torch = import_module("torch") if find_spec("torch") else None
    compiler, include = (os.environ.get("CXX") or "c++").split()[0], sysconfig.get_path("include")
    if torch is None:
        what, why = "none", "torch could not be imported by the build; install torch >= 2.10"
    elif platform.system() == "Windows":
        what, why = "none", "there is no build for Windows; use WSL"
    elif not shutil.which(compiler) or not Path(include, "Python.h").exists():
        what, why = "none", f"there was no {compiler} or no {include}/Python.h; install g++ and python3-dev"
    elif wanted in ("cpu", "none"):
        what, why = wanted, f"AMP_KERNELS_BUILD={wanted} was set; unset it"
    elif torch.version.hip:
        what, why = "cpu", f"torch {torch.__version__} is of ROCm, which is not supported; install one of CUDA"
    elif torch.version.cuda is None:
        what, why = "cpu", f"torch {torch.__version__} has no CUDA; install one that has"
    elif (nvcc := find_nvcc()) and nvcc[0][0] == int(torch.version.cuda.split(".")[0]):
        return "cuda", "", nvcc
    else:
        found = "nvcc is of CUDA {}.{}".format(*nvcc[0]) if nvcc else "no nvcc was found"
        what, why = "cpu", f"torch is of CUDA {torch.version.cuda} and {found}; set CUDA_HOME to its toolkit"
    if wanted == "cuda":
        raise SystemExit(f"setup: AMP_KERNELS_BUILD=cuda cannot be done: {why}")
    missing = "nothing was compiled" if what == "none" else "the CUDA kernels were not compiled"
    return what, f"{missing} because {why}, then run `pip install --no-build-isolation -e .`", ()


def architectures(version):
    """Return TORCH_CUDA_ARCH_LIST for nvcc of this version. The binary serves every GPU from 7.5 on.

    Machine code runs on GPUs with the same major version and the same or a higher minor one. PTX runs on every later
    GPU. The PTX of 9.0 serves GPUs for which this nvcc cannot make machine code, and the PTX of 12.0 serves GPUs to
    come. 11.0 needs machine code of its own, because the PTX of 12.0 is too new for it. CUDA 12 calls it 10.1, which
    torch's list does not accept.
    """
    newer = ";10.0;11.0;12.0+PTX" if version >= (13, 0) else ";10.0;12.0+PTX" if version >= (12, 8) else ""
    return "7.5;8.0;8.6;8.9;9.0+PTX" + newer


def extension(version=None, toolkit=None):
    from torch.utils import cpp_extension

    x86 = platform.machine().lower() in ("x86_64", "amd64")
    arch = os.environ.get("AMP_KERNELS_CPU_ARCH") or ("x86-64-v3" if x86 else "")
    flags = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
    flags += ["-ffp-contract=off", *([f"-march={arch}" if x86 else f"-mcpu={arch}"] if arch else [])]
    sources = ["csrc/module.cpp", *sorted(glob("csrc/ops/*.cpp") + glob("csrc/cpu/*.cpp"))]
    ext = Extension("amp_kernels._C", sources, language="c++")
    ext.include_dirs, ext.library_dirs = cpp_extension.include_paths(), cpp_extension.library_paths()
    ext.libraries, ext.define_macros = ["torch_cpu"], [("TORCH_TARGET_VERSION", "0x020a000000000000")]
    ext.extra_compile_args = {"cxx": flags, "nvcc": ["-O3", "-Xcompiler=-fvisibility=hidden"]}
    ext.depends, ext.py_limited_api = glob("csrc/**/*.*h", recursive=True), bool(LIMITED_API)
    if toolkit:
        cpp_extension.CUDA_HOME = str(toolkit)  # torch looks beside the wrapper, where there are no headers
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(version))
        folders = [toolkit, *toolkit.glob("targets/*")]
        ext.include_dirs += [f"{f}/include" for f in folders]
        ext.library_dirs += [f"{f}/{lib}" for f in folders for lib in ("lib64", "lib")]
        ext.libraries += ["torch_cuda", "cudart_static", "rt", "dl", "pthread"]
        ext.define_macros.append(("USE_CUDA", None))
        ext.sources += sorted(glob("csrc/cuda/*.cu"))
    return [ext], {"build_ext": cpp_extension.BuildExtension}


class BuildPy(build_py):
    def run(self):
        super().run()
        root = self.get_package_dir("") if self.editable_mode else self.build_lib
        Path(root, "amp_kernels/_build.txt").write_text(NOTE)  # for `python -m amp_kernels info`

    def get_source_files(self):  # for an sdist packed where nothing can be compiled
        return [*super().get_source_files(), *glob("csrc/**/*.*", recursive=True)]


WHAT, NOTE, NVCC = decide(os.environ.get("AMP_KERNELS_BUILD", "auto"))
print(f"amp_kernels: compiling for {WHAT}{'; ' if NOTE else ''}{NOTE}")
MODULES, COMMANDS = ([], {}) if WHAT == "none" else extension(*NVCC)
COMMANDS["build_py"] = BuildPy
setup(ext_modules=MODULES, cmdclass=COMMANDS, options={"bdist_wheel": {"py_limited_api": LIMITED_API}})
