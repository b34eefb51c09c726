"""Commands about this install and this machine.

`info` shows which backend handles each device. `verify` compares the operators with their specification. `audit` finds
layers with slow shapes. `bench` times the operators, and other libraries at the same work.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

import amp_kernels

from . import _loader, audit, backends, bench
from .report import CannotRun
from .testing import verify


def info() -> int:
    """Prints versions, what was compiled, which backend serves each device, and why the other backends do not."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"amp_kernels {amp_kernels.__version__} in {amp_kernels.__path__[0]}")
    print(f"Python {platform.python_version()}, {platform.platform()}, {platform.machine()}")
    platforms = f"CUDA {torch.version.cuda or 'none'}" + (f", ROCm {torch.version.hip}" if torch.version.hip else "")
    print(f"torch {torch.__version__}, {platforms}, {gpu}")
    print(f"triton {_version('triton')}")
    print(f"compiled kernels: {_loader.load_error() or _compiled()}")
    print(HAVE_RUN)
    if platform.system() in PLATFORMS:
        print(PLATFORMS[platform.system()])
    if torch.version.hip:
        print("ROCm: not supported; the reference serves tensors on its GPUs.")

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for device in [*(gpus if len(gpus) > 1 else ["cuda"]), "cpu"]:
        order, reasons = backends.PREFERENCE[device.partition(":")[0]], backends.backend_reasons(device)
        serving = next((name for name in order if reasons[name] is None), "reference")
        absent = "" if device == "cpu" or torch.cuda.is_available() else " (no GPU here)"
        print(f"\nOperators on {device} tensors{absent}: {serving}")
        for name, reason in reasons.items():
            if name != serving:
                print(f"  not {name}: {reason or 'it is slower; amp_kernels.use_backend forces it'}")
    return 0


def _compiled() -> str:
    note = _loader.build_note()
    return ("CPU and CUDA" if _loader.has_cuda() else "CPU") + (f"; {note}" if note else "")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


HAVE_RUN = (
    "The kernels have run on an H100 and an H200. "
    "On any other GPU run `python -m amp_kernels verify --device cuda` first."
)
PLATFORMS = {
    "Darwin": "macOS: never tried; CPU kernels are compiled as on Linux, and the reference serves MPS tensors.",
    "Windows": "Windows: nothing is compiled, and the reference serves every tensor; WSL counts as Linux.",
}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose error for a mistyped option or command suggests the most similar one."""

    def error(self, message: str) -> NoReturn:
        typed = [word.partition("=")[0] for word in sys.argv[1:]]
        known = list(_names(self, typed))
        suggestions = []
        for i, word in enumerate(typed):
            is_name = word.startswith("--") or (i == 0 and word not in self.prog.split())
            if is_name and word not in known and (close := difflib.get_close_matches(word, known, 1, 0.7)):
                suggestions.append(f"unknown {word}; did you mean {close[0]}?")
        super().error(" ".join(suggestions) or message)


def _names(parser: argparse.ArgumentParser, typed: list[str]) -> Iterator[str]:
    """Yield the names of the options and commands of `parser`, and the options of each command in `typed`."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices
            for word in {*typed} & {*action.choices}:
                yield from _names(action.choices[word], typed)


def main() -> int:
    """Run the command line. Return the exit code."""
    name = "python -m amp_kernels" if Path(sys.argv[0]).name == "__main__.py" else "amp-kernels"
    parser: argparse.ArgumentParser = _Parser(prog=name, description=__doc__)
    parser.add_argument("--version", action="version", version=f"amp_kernels {amp_kernels.__version__}")
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("info", help=(info.__doc__ or "").splitlines()[0])
    command.set_defaults(run=lambda _: info())
    verify.add_command(commands)
    audit.add_command(commands)
    bench.add_command(commands)
    arguments = parser.parse_args()
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except CannotRun as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has exited
        # Python flushes stdout again at exit. stdout now goes to devnull, so that this second flush does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
