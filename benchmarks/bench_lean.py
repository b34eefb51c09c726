"""Optimizer steps with states in int8, bf16 and fp32, and the 8-bit optimizers of other packages.

16-bit weights are bf16. There is no scaler, so a step is `optimizer.step()`. A parameter costs these bytes with int8
states:

- bf16 weights: 12 = 2 gradient + 4 weight + 4 remainder + 2 codes. AdamW has two states, which makes 14.
- an fp32 model: 14 = 4 gradient + 8 weight + 2 codes. AdamW: 16.

A state in fp32 costs 8 bytes, and a state in bf16 costs 4. The scales of a state's codes add a sixteenth of a byte.
Parameters below 4,096 elements keep fp32 states, here and in bitsandbytes and torchao.

    python -m benchmarks.bench_lean --help
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from functools import partial
from itertools import product

import torch

from amp_kernels.ops.table import LEAST_LEAN

from . import bench_adam, bench_rmsprop, bench_sgd
from .common import Case, Contender, Job, Layout, Report, layouts, parse_arguments, run_case
from .steps import NONE, Family, Model, Step, flashoptim, fused_by_us, torch_fp32

SIZES = [1_000_000, 10_000_000, 25_600_000, 100_000_000]
FAMILIES = {"AdamW": bench_adam.FAMILY, "RMSprop": bench_rmsprop.FAMILY, "SGD": bench_sgd.FAMILY}
DTYPES = {torch.bfloat16: "bf16 weights + fp32 masters", torch.float32: "fp32 model"}
STATES = {"int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}
# Of what two steps change, in the 2-norm: ours are 0.003 (SGD) to 0.009 (AdamW) away from fp64, bitsandbytes 0.026.
MOST_WRONG = 0.05


def fp32_model(model: Model, package: str, name: str) -> Step:
    """An optimizer of another package, without a scaler."""
    params = model.parameters(torch.float32)
    optimizer = getattr(importlib.import_module(package), name)(params, **model.family.options)
    return Step(optimizer.step, params, lambda: params)


def torchao(model: Model, args: argparse.Namespace) -> Step:
    if args.no_compile:  # it compiles its step
        raise RuntimeError("left out by --no-compile or --quick")
    return fp32_model(model, "torchao.optim", "AdamW8bit")


def name_of(family: Family) -> str:
    return family.torch_class.__name__


def contenders(model: Model, args: argparse.Namespace) -> list[Contender]:
    family, name, low = model.family, name_of(model.family), model.dtype != torch.float32
    fp32 = "fp32 model, " if low else ""
    plan = [
        (f"amp_kernels, {states} states", partial(fused_by_us, model, NONE, state_dtype=dtype))
        for states, dtype in STATES.items()
    ]
    plan += [(f"{fp32}torch {v}", partial(torch_fp32, model, v, kind=NONE)) for v in family.variants]
    plan += [(f"{fp32}bitsandbytes 8-bit", partial(fp32_model, model, "bitsandbytes.optim", f"{name}8bit"))]
    if name == "AdamW":
        plan += [(f"{fp32}torchao 8-bit", partial(torchao, model, args))]
        plan += [(f"{fp32}deepspeed CPUAdam", partial(fp32_model, model, "deepspeed.ops.adam", "DeepSpeedCPUAdam"))]
    if low and family.flashoptim:
        plan += [("flashoptim", partial(flashoptim, model, quantize=True))]

    def build(make: partial[Step]) -> Job:
        return model.job(make(), most_wrong=MOST_WRONG)

    return [Contender(label, NONE, family.held_bytes, partial(build, make)) for label, make in plan]


def case(family: Family, dtype: torch.dtype, layout: Layout) -> Case:
    states = 2 if name_of(family) == "AdamW" else 1
    is_lean = math.prod(layout.shapes[0]) >= LEAST_LEAN
    parts = {"gradient": dtype.itemsize, "weight": 2 * dtype.itemsize, "remainder": 4 if dtype.itemsize == 2 else 0}
    parts["codes" if is_lean else "fp32 states"] = states * (2 if is_lean else 8)
    size = sum(parts.values())
    told = " + ".join(f"{bytes_} {part}" for part, bytes_ in parts.items() if bytes_)
    return Case("lean", f"{name_of(family)}, {DTYPES[dtype]}", dtype, layout, size, f"{size} bytes a parameter: {told}")


def main() -> int:
    args = parse_arguments(__doc__)
    if not (args.sizes or args.quick):
        args.sizes = SIZES
    report = Report("lean", args)
    # 50 steps of 1000 small tensors in a row would take minutes: torchao needs 0.4 s for one, bitsandbytes 0.1 s
    chosen = [layout for layout in layouts(args) if layout.in_a_row == 1]
    for family, layout, dtype in product(FAMILIES.values(), chosen, DTYPES):
        model = Model(family, dtype, layout, args.device)
        run_case(case(family, dtype, layout), contenders(model, args), args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
