"""Helpers of the commands `verify`, `audit` and `bench`: tables as text, and facts about the machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

import amp_kernels


class CannotRun(Exception):
    """A command cannot do its work. The message is a sentence for the user."""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, with columns that are padded with spaces."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = (headers, ["-" * width for width in widths], *rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def environment() -> dict[str, str]:
    """Return the facts on which times and failures can depend: versions, the commit, devices, clocks, threads."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "amp_kernels": f"{amp_kernels.__version__}{_commit()}",
        "torch": f"{torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
        "CUDA": torch.version.cuda or "none",
        "GPU": _gpu() if torch.cuda.is_available() else "none",
        "CPU": _cpu(),
        "threads": f"{torch.get_num_threads()}, CPUs for this process: {cpus}",
    }


def _commit() -> str:
    """Return the commit, such as ", commit 1a2b3c4". Return "" if the folder above the package is not a git clone."""
    # git alone would also find a repository further up, such as a project with this package in its virtual environment.
    clone = Path(amp_kernels.__path__[0]).resolve().parent
    if not (clone / ".git").exists():
        return ""
    return f", commit {_output(['git', '-C', str(clone), 'describe', '--always', '--dirty']) or 'unknown'}"


def _gpu() -> str:
    """Return the GPU's name, and from nvidia-smi its driver and clocks. Each clock has its maximum in brackets."""
    names = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")
    # The UUID names the GPU, since CUDA_VISIBLE_DEVICES changes torch's indices but not those of nvidia-smi.
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", "")
    asked = _output(["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id=GPU-{uuid}"])
    said = [word.strip() for word in asked.split(",")]
    if len(said) != len(names):
        return f"{torch.cuda.get_device_name()}, driver and clocks unknown (no nvidia-smi)"
    driver, sm, max_sm, memory, max_memory = said
    return (
        f"{torch.cuda.get_device_name()}, driver {driver}, SM clock {sm} (at most {max_sm}), "
        f"memory clock {memory} (at most {max_memory})"
    )


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = [re.search(rf"{name}\s*: (.+)", text) for name in ("model name", "cpu MHz")]
    name, clock = (match[1] if match else "" for match in found)
    return (name or platform.processor() or platform.machine()) + (f", clock {float(clock):.0f} MHz" if clock else "")


def _output(command: Sequence[str]) -> str:
    """Return what a command prints, or "" if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
