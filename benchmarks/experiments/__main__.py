"""Carries out the experiments and prints the verdict of each claim."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

# Before torch is imported: a thread that waits by spinning takes the time of one that works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from ..common import results_folder
from . import NAMES
from . import __doc__ as usage
from .harness import Experiment, Settings, carry_out, read


def load(name: str) -> Experiment:
    return importlib.import_module(f".{name}", __package__).EXPERIMENT


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=usage, formatter_class=raw)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(NAMES)} (all)")
    parser.add_argument("--device", type=torch.device, default=default, help=f"cpu or cuda (here: {default})")
    parser.add_argument("--quick", action="store_true", help="small sizes that only show that it runs")
    parser.add_argument("--fresh", action="store_true", help="measure again what the CSV has")
    parser.add_argument("--out", type=Path, help="folder of CSVs and PNGs (benchmarks/results/<machine>/experiments)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"names must be of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    if args.out is None:
        args.out = results_folder(args.device, args.quick) / "experiments"
    return args


def main() -> None:
    args = parse_arguments()
    for name in args.names or NAMES:
        experiment = load(name)
        rows = read(carry_out(experiment, Settings(args.device, args.quick), args.out, args.fresh))
        print(f"\n{experiment.title}")
        for claim in experiment.claims:
            verdict = claim.judge(rows)
            print(f"  {verdict.word}: {claim.statement}\n    {verdict.because}")
    print(f"\n{args.out}")


if __name__ == "__main__":
    main()
