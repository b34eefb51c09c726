"""Runs random programs of test_events.py for a given time; the first that fails is minimised and ends the run.

    python tests/clients/run_events.py --seconds 3600
    make asan-events EVENTS_ARGS="--seconds 3600"  # under AddressSanitizer

A crash, unlike a failed assertion, is not minimised: the program that was running is in the file that the first lines
of the output name, and `--replay FILE` runs it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from hypothesis import Phase, given, seed, settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--backend", choices=["cpu", "reference"], default="cpu")
    parser.add_argument("--seed", type=int, default=None, help="of the first batch; the others count up from it")
    parser.add_argument("--replay", type=Path, help="a file that holds a program")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).parents[1] / "harness"))
    import test_events as events

    if arguments.replay:
        program = eval(arguments.replay.read_text(), vars(events))
        return events.run(program, arguments.backend)

    first = random.randrange(10**9) if arguments.seed is None else arguments.seed
    running = Path(tempfile.mkdtemp(prefix="events-"), "program.txt")
    begin = reported = time.monotonic()
    programs = steps = batch = 0

    @settings(events.SETTINGS, max_examples=200, phases=[Phase.generate, Phase.shrink], print_blob=False)
    @given(events.PROGRAMS)
    def check(program: events.Program) -> None:
        nonlocal programs, steps
        running.write_text(f"{program}\n")
        events.run(program, arguments.backend)
        programs, steps = programs + 1, steps + len(program.events)

    def report() -> None:
        seconds = time.monotonic() - begin
        print(f"{seconds:.0f} s: {programs} programs, {steps} events; seed {first + batch}", flush=True)

    where = find_spec("amp_kernels._C")
    print(f"backend {arguments.backend}, seeds from {first}, kernels of {where and where.origin}", flush=True)
    print(f"the program that runs is in {running}", flush=True)
    while time.monotonic() - begin < arguments.seconds:
        seed(first + batch)(check)()
        batch += 1
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            report()
    report()


if __name__ == "__main__":
    main()
