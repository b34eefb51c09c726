"""The kernels that gpu_parts.py's cases run on the emulator, and all that there are: two lines of JSON."""

import json
import sys
from pathlib import Path

import torch
from cuda_on_cpu import backend

from amp_kernels import testing

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
from gpu_parts import LEAN, TILES

with backend.serving():
    for op, names in TILES.items():
        for case in testing.CASES[op]:
            if str(case) in names and (len(sys.argv) == 1 or op in sys.argv[1:]):
                wrong = [result for result in case.body(torch.device("cpu")) if not result.passed]
                assert not wrong, (op, str(case), wrong)
    for steps in LEAN if len(sys.argv) == 1 else ():
        steps.run("cpu")
print(json.dumps(sorted(backend.launched())))
print(json.dumps(sorted(set(backend.kernels().values()))))
