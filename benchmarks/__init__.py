"""Benchmarks: `python -m benchmarks.bench_<family>` in a clone, `python -m amp_kernels bench` anywhere."""

from pathlib import Path

FAMILIES = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
