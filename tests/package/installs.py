#!/usr/bin/env python3
"""Installs the package as its documentation says, from an sdist, and reads what each command prints.

    make installs          # about 2 minutes on two cores

First everything is done wrong: no setuptools, no torch, an isolated build. The messages of these commands must lead to
an install with compiled kernels. The script needs only the standard library. It writes to a temporary folder, and
setuptools leaves metadata in the clone. A CUDA build is not tried, because it needs a CUDA torch of several GB.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = "torch 'setuptools>=77' ninja"
# What README and docs may tell readers to install this package with: below, or by `make build` (-e).
DOCUMENTED = {REQUIREMENTS, "--no-build-isolation .", "--no-build-isolation -e .", "dist/*.whl"}
DOCUMENTED |= {f'--no-build-isolation -e ".[{extra}]"' for extra in ("build", "dev")}

NO_SETUPTOOLS = "amp_kernels: setuptools >= 77 must be installed before the build, got "
NO_TORCH = "amp_kernels: torch >= 2.10 must be installed before the build, got none; run `pip install"
ISOLATED = "the build was isolated and could not see your torch; run `pip install --no-build-isolation .`"
SLOW = "amp_kernels runs its slow reference on CPU tensors"
STEPS = """
import torch, amp_kernels
print(amp_kernels.__file__)
parameter = torch.ones(1000, dtype=torch.float16, requires_grad=True)
parameter.grad = torch.ones_like(parameter)
optimizers = amp_kernels.optim.FusedSGD([parameter], lr=0.5), amp_kernels.optim.FusedAdamW([parameter], lr=0.5)
for optimizer in (*optimizers, *optimizers):
    optimizer.step()
amp_kernels.unscale_([parameter.grad], inv_scale=torch.ones(()), found_inf=torch.zeros(()))
print("steps done")
"""


def undocumented() -> list[str]:
    """Lines of code blocks in README and docs that install this package in a way that nothing tries."""
    wrong = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"(?ms)^ *```(?:bash|sh|shell|console)\n(.*?)^ *```", page.read_text()):
            for line in block.splitlines():
                match = re.match(r"\s*(?:\$ )?(?:\w+=\S+ )*(?:python3? -m )?pip install (.*?)\s*(?:#.*)?$", line)
                words = [word for word in match[1].split() if word not in ("-v", "-q", "-U")] if match else []
                ours = {"torch", "setuptools", "--no-build-isolation", "."} & {*words} or (
                    "install" in line and "amp-kernels" in line
                )
                if (ours or "dist/" in line) and " ".join(words) not in DOCUMENTED:
                    wrong.append(f"{page.relative_to(ROOT)}: {line.strip()}")
    return wrong


class Venv:
    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"

    def run(self, command: str, *, cwd: Path, says: str = "", never: str = "Traceback", fails: bool = False) -> str:
        """Run a command and return its output. End the script with a sentence if the output is not as expected."""
        start = time.monotonic()
        program, *words = shlex.split(command)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AMP_KERNELS_")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        result = subprocess.run([self.bin / program, *words], cwd=cwd, env=environment, text=True, **pipes)
        print(f"{time.monotonic() - start:4.0f} s  {command if len(command) < 100 else program}", flush=True)
        problem = f"exited with {result.returncode}" if (result.returncode != 0) != fails else ""
        problem = problem or (f"did not print {says!r}" if says not in result.stdout else "")
        problem = problem or (f"printed {never!r}" if never in result.stdout else "")
        if problem:
            sys.exit(f"{result.stdout}\ninstalls: `{command}` {problem}")
        return result.stdout


def main() -> None:
    if wrong := undocumented():
        sys.exit("installs: no test runs these lines:\n" + "\n".join(wrong))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        user = Venv(folder / "venv")

        # A venv brings no setuptools from Python 3.12 on, and 65.5 before.
        printed = user.run("pip install --no-build-isolation .", cwd=ROOT, fails=True, says=NO_SETUPTOOLS)
        is_short(printed)
        user.run("pip install -q 'setuptools>=77'", cwd=folder)
        pack = (
            f"import sys; sys.path.insert(0, 'csrc'); import build_backend; build_backend.build_sdist({str(folder)!r})"
        )
        user.run(f"python -c {shlex.quote(pack)}", cwd=ROOT)
        (sdist,) = folder.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked")
        (sources,) = (folder / "unpacked").iterdir()

        # Without torch.
        printed = user.run(f"pip install --no-build-isolation {sdist}", cwd=folder, fails=True, says=NO_TORCH)
        is_short(printed)
        user.run(f"pip install -v --no-deps {sdist}", cwd=folder, says=f"nothing was compiled because {ISOLATED}")

        # With torch, and an isolated build that cannot see it.
        user.run(f"pip install {REQUIREMENTS}", cwd=folder)
        user.run(f"pip install -v {sdist}", cwd=folder, says=f"nothing was compiled because {ISOLATED}")
        user.run("amp-kernels info", cwd=sources, says=f"compiled kernels: nothing was compiled because {ISOLATED}")
        printed = user.run(f"python -c {shlex.quote(STEPS)}", cwd=folder, says="steps done")
        if printed.count(SLOW) != 1 or ISOLATED not in printed:
            sys.exit(f"{printed}\ninstalls: the reference must warn once, and say {ISOLATED!r}")

        # The remedy in that message, over the install that exists.
        user.run("pip install -v --no-build-isolation .", cwd=sources, says="amp_kernels: compiling for the CPU")
        has_kernels(user, sources, folder)

        # The wheel; its objects have been compiled in this folder already.
        user.run("pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .", cwd=sources)
        user.run("pip uninstall -q -y amp-kernels", cwd=folder)
        (wheel,) = (sources / "dist").glob("*.whl")
        user.run(f"pip install {wheel}", cwd=folder)
        has_kernels(user, sources, folder)


def is_short(printed: str) -> None:
    """pip adds its own lines to a refusal, 20 of them; a traceback alone has 75."""
    if len(printed.splitlines()) > 30 or "[1 lines of output]" not in printed:
        sys.exit(f"{printed}\ninstalls: a refusal must be one line and what pip adds")


def has_kernels(user: Venv, sources: Path, folder: Path) -> None:
    user.run("amp-kernels info", cwd=sources, says="compiled kernels: CPU", never="nothing was compiled")
    user.run(f"python -c {shlex.quote(STEPS)}", cwd=folder, says="steps done", never=SLOW)


if __name__ == "__main__":
    main()
