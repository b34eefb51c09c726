"""The whole optimizer step as contenders: `scaler.step(optimizer)` and `scaler.update()`, ours and its peers.

Gradients hold finite scaled values, as after backward. Every contender starts from the same weights and
gradients; its fp32 weights after two steps are compared with torch.optim in fp64 before it is timed.

Peers of 16-bit weights with fp32 masters:

- masters by hand: fp32 copies under torch.optim; gradients go up and weights down with
  torch._foreach_copy_, the stock scaler checks (and, without fused=True, unscales) the fp32 gradients.
- masters by hand, compiled: conversion, unscaling, update and weight in one compiled function, a flag that
  makes the stock scaler check the 16-bit gradients, one read of found_inf by the host. The best we know.
- an fp32 model under torch.optim and the stock scaler, what most people do with autocast.
- flashoptim: 16-bit weights with an error term, no scaler.

Peers of the fp32 model: torch.optim, compiled or not, and bitsandbytes, all under the stock scaler.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import amp_kernels
from amp_kernels.optim import FusedAdamW, FusedRMSprop, FusedSGD

from .common import (
    Case,
    Contender,
    Job,
    Layout,
    Report,
    disagreement,
    layouts,
    parse_arguments,
    run_case,
    sample,
)
from .summary import OUR_SCALER

CHECK_SCALE, CHECKED_STEPS = 1024.0, 2
OURS, STOCK, NONE = OUR_SCALER, "torch GradScaler", "none"
SCALERS: dict[str, type[torch.amp.GradScaler]] = {OURS: amp_kernels.GradScaler, STOCK: torch.amp.GradScaler}
# For CPUs Inductor compiles each tensor of a list apart: 25 s for 161 tensors, more than 3 minutes for 1000.
MAX_COMPILED_TENSORS = 200
MIN_COMPILED_ELEMENTS = 10_000_000  # of few large tensors: to compile for every size would take minutes

Update = Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor], None]


@dataclass(frozen=True)
class Family:
    """An optimizer: our class, torch's class, and names in other packages, with one set of options."""

    name: str
    ours: type[FusedSGD | FusedRMSprop | FusedAdamW]
    torch_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    variants: tuple[str, ...]  # of torch: "fused", "foreach"
    update: Update | None  # the same as a function over (weights, grads, masters, states, inv_scale), to be compiled
    traffic: dict[torch.dtype, tuple[int, str]]  # bytes that a parameter costs, and the sum in words
    held_bytes: int = 16  # per parameter, by the largest contender: weight, gradient, fp32 master, its gradient, state
    flashoptim: str = ""  # name of the class, if it has one


@dataclass
class Step:
    """One contender's model, optimizer and scaler."""

    run: Callable[[], object]
    params: Sequence[Tensor]  # that the model computes with
    weights: Callable[[], Sequence[Tensor]]  # the fp32 weights
    low: Sequence[Tensor] = ()  # the 16-bit weights
    scaler: torch.amp.GradScaler | None = None
    slack: float = 0.0


@dataclass(frozen=True)
class Model:
    """Weights and gradients that every contender of a case starts from."""

    family: Family
    dtype: torch.dtype
    layout: Layout
    device: torch.device
    weights: list[Tensor] = field(init=False)
    grads: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

        object.__setattr__(self, "weights", [normal(shape) for shape in self.layout.shapes])
        object.__setattr__(self, "grads", [normal(shape) for shape in self.layout.shapes])

    def parameters(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(weight.to(dtype, copy=True)) for weight in self.weights]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        return parameters

    def preset(self, step: Step, scale: float) -> None:
        grads = grads_of(step.params)
        torch._foreach_copy_(grads, self.grads)
        torch._foreach_mul_(grads, scale if step.scaler is not None else 1.0)

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """Sampled weights after the checked steps by torch in fp32 and in fp64."""
        results = []
        for dtype in (torch.float32, torch.float64):
            weight = torch.nn.Parameter(sample(self.weights).to(dtype))
            optimizer = self.family.torch_class([weight], **self.family.options)
            weight.grad = sample(self.grads).to(dtype)
            for _ in range(CHECKED_STEPS):
                optimizer.step()
            results.append(weight.detach())
        return results[0], results[1]

    def job(self, step: Step, most_wrong: float | None = None) -> Job:
        """`most_wrong`: the largest error that is allowed, in the 2-norm, relative to what the checked steps change.
        None stands for the error rule.
        """

        def check() -> str:
            for _ in range(CHECKED_STEPS):
                self.preset(step, CHECK_SCALE)
                step.run()
            weights = sample(step.weights())
            if step.low and not torch.equal(sample(step.low), weights.to(self.dtype)):
                return f"wrong: {self.dtype} weights are not the rounded fp32 weights"
            if most_wrong is None:
                return disagreement(weights, *self.expected, slack=step.slack)
            exact = self.expected[1]
            error = ((weights - exact).norm() / (sample(self.weights) - exact).norm()).item()
            return "" if error <= most_wrong else f"wrong: error {error:.3g} of the change, allowed {most_wrong}"

        def settle() -> None:
            # Fused torch writes unscaled gradients back: only with a scale of 1 do they stay what they are.
            self.preset(step, 1.0)
            if step.scaler is not None:
                step.scaler.update(1.0)

        def precede() -> None:
            # A step comes after Python has walked the model: forward read every weight, backward wrote every gradient.
            # After the copy alone, a small model would begin with thousands of cold Python objects.
            for p, own, grad in zip(step.params, grads_of(step.params), self.grads, strict=True):
                p.detach().norm()
                own.copy_(grad)

        return Job(step.run, check, settle, precede)


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, which every parameter has."""
    return [p.grad for p in params if p.grad is not None]


def make_scaler(kind: str, device: torch.device) -> torch.amp.GradScaler | None:
    if kind == NONE:
        return None
    scaler = SCALERS[kind](device.type, init_scale=CHECK_SCALE, growth_interval=10**9)
    scaler.scale(torch.ones((), device=device))  # creates its tensors, as the loss would
    return scaler


def user_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> Callable[[], None]:
    if scaler is None:
        return optimizer.step

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def fused_by_us(model: Model, kind: str, **options: Any) -> Step:
    params = model.parameters(model.dtype)
    optimizer, scaler = model.family.ours(params, **model.family.options, **options), make_scaler(kind, model.device)
    low = params if model.dtype != torch.float32 else ()

    def weights() -> Sequence[Tensor]:
        return [optimizer.master(p) for p in params] if low else params

    return Step(user_step(optimizer, scaler), params, weights, low, scaler)


def torch_fp32(model: Model, variant: str, compiled: bool = False, kind: str = STOCK) -> Step:
    params, scaler = model.parameters(torch.float32), make_scaler(kind, model.device)
    optimizer: Any = model.family.torch_class(params, **{**model.family.options, variant: True})
    if compiled:
        optimizer.step = torch.compile(optimizer.step, dynamic=False)
    return Step(user_step(optimizer, scaler), params, lambda: params, (), scaler)


def masters_by_hand(model: Model, variant: str) -> Step:
    low = model.parameters(model.dtype)
    masters, scaler = model.parameters(torch.float32), make_scaler(STOCK, model.device)
    optimizer = model.family.torch_class(masters, **{**model.family.options, variant: True})
    grads, master_grads = grads_of(low), grads_of(masters)
    update = user_step(optimizer, scaler)

    def step() -> None:
        with torch.no_grad():
            torch._foreach_copy_(master_grads, grads)
            update()
            torch._foreach_copy_((*low,), (*masters,))

    return Step(step, low, lambda: masters, low, scaler)


class CompiledMasters(torch.optim.Optimizer):
    """What a careful user would write around a compiled update of masters, to run under the stock scaler."""

    grad_scale: Tensor
    found_inf: Tensor
    _step_supports_amp_scaling = True  # the scaler only checks the 16-bit gradients; the step unscales them

    def __init__(self, params: Sequence[Tensor], update: Update) -> None:
        super().__init__(params, {})
        self.low = [p.detach() for p in params]
        self.masters = [p.float() for p in self.low]
        self.states = [torch.zeros_like(m) for m in self.masters]
        self._update = torch.compile(update, dynamic=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.found_inf.item():
            grads = grads_of(self.param_groups[0]["params"])
            self._update(self.low, grads, self.masters, self.states, self.grad_scale.reciprocal())


def masters_compiled(model: Model, update: Update) -> Step:
    params, scaler = model.parameters(model.dtype), make_scaler(STOCK, model.device)
    optimizer = CompiledMasters(params, update)
    return Step(user_step(optimizer, scaler), params, lambda: optimizer.masters, params, scaler)


def flashoptim(model: Model, quantize: bool = False) -> Step:
    import flashoptim

    params = model.parameters(model.dtype)
    options = {"master_weight_bits": 32, "quantize": quantize}
    optimizer = getattr(flashoptim, model.family.flashoptim)(params, **model.family.options, **options)

    def weights() -> list[Tensor]:
        return [flashoptim.reconstruct_fp32_param(p.detach(), optimizer.state[p]["error_bits"]) for p in params]

    # its momentum has the 16 bits of the weights
    return Step(optimizer.step, params, weights, params, slack=1e-4)


def bitsandbytes_fp32(model: Model) -> Step:
    import bitsandbytes

    params, scaler = model.parameters(torch.float32), make_scaler(STOCK, model.device)
    optimizer = getattr(bitsandbytes.optim, model.family.torch_class.__name__)(params, **model.family.options)
    return Step(user_step(optimizer, scaler), params, lambda: params, (), scaler)


def contenders(model: Model, args: argparse.Namespace) -> list[Contender]:
    family, low = model.family, model.dtype != torch.float32
    ours, theirs = f"amp_kernels {family.ours.__name__}", family.torch_class.__name__
    fp32 = "fp32 model, " if low else ""
    compiled_fp32 = partial(torch_fp32, model, "foreach", compiled=True)
    plan = [(ours, kind, partial(fused_by_us, model, kind)) for kind in (OURS, STOCK)]
    if low:
        by_hand = "masters by hand, "
        for v in family.variants:
            plan += [(f"{by_hand}torch {v} {theirs}", STOCK, partial(masters_by_hand, model, v))]
        if family.update is not None:
            compiled = partial(masters_compiled, model, family.update)
            plan += [(f"{by_hand}compiled", STOCK, partial(unless_slow, model, args, compiled))]
    plan += [(f"{fp32}torch {v} {theirs}", STOCK, partial(torch_fp32, model, v)) for v in family.variants]
    plan += [(f"{fp32}torch {theirs}, compiled", STOCK, partial(unless_slow, model, args, compiled_fp32))]
    if low and family.flashoptim:
        plan += [(f"flashoptim {family.flashoptim}", NONE, partial(flashoptim, model))]
    if not low:
        plan += [(f"bitsandbytes {theirs}", STOCK, partial(bitsandbytes_fp32, model))]

    def build(make: Callable[[], Step]) -> Job:
        return model.job(make())

    return [Contender(name, scaler, family.held_bytes, partial(build, make)) for name, scaler, make in plan]


def unless_slow(model: Model, args: argparse.Namespace, build: Callable[[], Step]) -> Step:
    """A compiled contender, or an error that says why compiling is not worth the time."""
    tensors = len(model.layout.shapes)
    if args.no_compile:
        raise RuntimeError("left out by --no-compile or --quick")
    if tensors > MAX_COMPILED_TENSORS:
        raise RuntimeError(f"takes minutes to compile; left out above {MAX_COMPILED_TENSORS} tensors")
    if tensors < 10 and model.layout.elements < MIN_COMPILED_ELEMENTS:
        raise RuntimeError(f"left out below {MIN_COMPILED_ELEMENTS:,} elements")
    return build()


def main(family: Family, description: str | None) -> int:
    """Runs the benchmark of a family from the command line; returns the exit code."""
    args = parse_arguments(description)
    report = Report(family.name, args)
    names = {torch.float16: "fp16 weights + fp32 masters", torch.float32: "fp32 model"}
    for layout, dtype in product(layouts(args), names):
        case = Case(family.name, names[dtype], dtype, layout, *family.traffic[dtype])
        run_case(case, contenders(Model(family, dtype, layout, args.device), args), args, report)
    return report.finish()
