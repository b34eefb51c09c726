"""Cases of the gradient pass and of the updates; the truth is torch's formula in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..functional import clip_grad_norm_, grad_norm, rmsprop_, sgd_, unscale_
from .common import (
    DTYPES,
    LAYOUTS,
    LENGTH,
    NORM_TOLERANCE,
    VALUES,
    Case,
    Result,
    changed,
    clones,
    differing,
    error_and_allowed,
    many,
    mixed,
    of_sizes,
    place,
    randn,
    shaped,
    values,
    with_element,
    written_outside,
)

Make = Callable[[], list[Tensor]]


def _gradient_inputs() -> Iterator[tuple[str, str, Make, str]]:
    """(dtype, name, tensors, layout) for the operators that read gradients only."""
    for name, dtype in DTYPES.items():
        yield name, "sizes", partial(of_sizes, dtype), "contiguous"
        yield name, "many_tensors", partial(many, dtype), "contiguous"
        for layout in LAYOUTS:
            yield name, layout, partial(shaped, dtype), layout
        for kind in VALUES:
            yield name, kind, partial(values, kind, dtype), "contiguous"
    yield "mixed", "sizes", mixed, "contiguous"


def _non_finite_inputs() -> Iterator[tuple[str, str, Make]]:
    for name, dtype in DTYPES.items():
        for value in (math.nan, math.inf, -math.inf):
            for position in ("first", "middle", "last"):
                yield name, f"{value}_{position}", partial(with_element, value, position, dtype)


def _unscale(
    make: Make, layout: str, inv_scale: float, found: float, expected: float, device: torch.device
) -> Iterator[Result]:
    grads = place(make(), device, layout)
    before = clones(grads)
    factor, found_inf = torch.tensor(inv_scale, device=device), torch.tensor(found, device=device)
    unscale_(grads, inv_scale=factor, found_inf=found_inf)
    for i, (grad, old) in enumerate(zip(grads, before, strict=True)):
        yield Result(f"grads[{i}]", differing(grad, (old.float() * factor).to(grad.dtype)), 0)
    yield Result("found_inf", differing(found_inf, torch.tensor(expected, device=device)), 0)
    yield Result("memory around grads", sum(map(written_outside, grads)), 0)


def _norm_result(norm: Tensor, grads: Sequence[Tensor], factor: Tensor | None) -> Result:
    squares = torch.stack([g.double().square().sum() for g in grads]).sum()
    truth = squares.sqrt().item() * (1.0 if factor is None else factor.double().item())
    if not math.isfinite(truth) or truth > torch.finfo(torch.float32).max:
        return Result("norm", float(math.isfinite(norm.item())), 0)
    return Result("norm", abs(norm.item() - truth), NORM_TOLERANCE * truth + 2.0**-150)  # half a denormal


def _grad_norm(
    make: Make, layout: str, inv_scale: float | None, found: float, expected: float, device: torch.device
) -> Iterator[Result]:
    grads = place(make(), device, layout)
    before = clones(grads)
    factor = None if inv_scale is None else torch.tensor(inv_scale, device=device)
    found_inf = torch.tensor(found, device=device)
    norm = grad_norm(grads, inv_scale=factor, found_inf=found_inf)
    yield _norm_result(norm, grads, factor)
    yield Result("dtype and shape", float(norm.dtype != torch.float32 or norm.dim() != 0), 0)
    yield Result("found_inf", differing(found_inf, torch.tensor(expected, device=device)), 0)
    yield Result("bits of a second run", changed(norm, grad_norm(grads, inv_scale=factor)), 0)
    yield Result("grads written", sum(map(changed, before, grads)), 0)


def _gradient_cases(op: str, body: Callable[..., Iterator[Result]], usual: float | None) -> Iterator[Case]:
    def case(
        dtype: str, name: str, make: Make, layout: str = "contiguous", *, inv_scale: float | None = usual,
        found: float = 0.0, expected: float | None = None,
    ) -> Case:  # fmt: skip
        expected = found if expected is None else expected
        return Case(op, dtype, name, partial(body, make, layout, inv_scale, found, expected))

    for dtype, name, make, layout in _gradient_inputs():
        yield case(dtype, name, make, layout)
    for dtype, name, make in _non_finite_inputs():
        yield case(dtype, name, make, expected=1.0)
    for dtype, torch_dtype in DTYPES.items():
        make = partial(of_sizes, torch_dtype, (9, 1025))
        # A product that overflows or vanishes is no overflow of the gradient.
        for inv_scale in (2.0**-16, 1.0, 3e38, 1e-40, 0.0):
            yield case(dtype, f"times_{inv_scale:g}", make, inv_scale=inv_scale)
        for found in (1.0, 2.0, math.nan):
            yield case(dtype, f"found_{found}_kept", make, found=found)


def _clip(make: Make, layout: str, max_norm: float, device: torch.device) -> Iterator[Result]:
    grads = place(make(), device, layout)
    params = [torch.empty_like(g, requires_grad=True) for g in grads]
    theirs = [torch.empty_like(g, requires_grad=True) for g in grads]
    truth = [torch.empty_like(g, dtype=torch.float64, requires_grad=True) for g in grads]
    for grad, ours, other, exact in zip(grads, params, theirs, truth, strict=True):
        ours.grad, other.grad, exact.grad = grad, grad.clone(), grad.double()
    expected = _norm_result(torch.zeros(()), grads, None)
    norm = clip_grad_norm_(params, max_norm)
    yield Result("norm", abs(norm.item() - expected.error), expected.allowed)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.nn.utils.clip_grad_norm_(truth, max_norm)
    groups = ([p.grad for p in group if p.grad is not None] for group in (params, theirs, truth))
    yield from _compare("grads", *groups)


def _clip_cases() -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        sizes = partial(of_sizes, dtype, (0, 9, 1025))
        for max_norm in (0.5, 1e6):
            yield Case("clip_grad_norm_", name, f"to_{max_norm:g}", partial(_clip, sizes, "contiguous", max_norm))
        for layout in LAYOUTS:
            yield Case("clip_grad_norm_", name, layout, partial(_clip, partial(shaped, dtype), layout, 1.0))


def _compare(name: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], truth: Sequence[Tensor]) -> Iterator[Result]:
    """The error rule for each large tensor, and for all small ones together: on one element torch's error may
    happen to be 0."""
    rows = list(zip(ours, theirs, truth, strict=True))
    for i, row in enumerate(rows):
        if row[0].numel() >= 1000:
            yield Result(f"{name}[{i}]", *error_and_allowed(*row))
    small = [[x.flatten().double() for x in row] for row in rows if row[0].numel() < 1000]
    if small:
        columns = (torch.cat(column) for column in zip(*small, strict=True))
        yield Result(f"small {name}", *error_and_allowed(*columns))


# ---------------------------------------------------------------------------------------------------- updates
SGD_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight_decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01, "maximize": True},
}
RMSPROP_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight_decay": {"weight_decay": 0.1, "alpha": 0.9, "eps": 1e-3},
    "momentum": {"momentum": 0.9},
    "centered": {"centered": True},
    "centered_momentum": {"centered": True, "momentum": 0.9, "weight_decay": 0.01},
    "maximize": {"centered": True, "momentum": 0.9, "weight_decay": 0.01, "maximize": True},
}
_SGD_DEFAULTS: dict[str, Any] = {
    "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False,
}  # fmt: skip
_RMSPROP_DEFAULTS: dict[str, Any] = {
    "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "maximize": False,
}  # fmt: skip
# The list operators' states, as torch's optimizers call them.
_STATES = {"sgd_": ("momentum_buffer",), "rmsprop_": ("square_avg", "momentum_buffer", "grad_avg")}
_TORCH = {"sgd_": torch.optim.SGD, "rmsprop_": torch.optim.RMSprop}


class UpdateInputs:
    """Parameters, masters and state of `sgd_` or `rmsprop_`, as it takes them.

    Args:
        op: ``"sgd_"`` or ``"rmsprop_"``.
        values: the parameters; a 16-bit one is the rounding of its fp32 master.
        options: those of torch's optimizer that are not its defaults.
    """

    def __init__(
        self,
        op: str,
        values: Sequence[Tensor],
        options: dict[str, Any],
        device: str | torch.device = "cpu",
        layout: str = "contiguous",
    ) -> None:
        device = torch.device(device)
        self.op, self.options = op, dict(options)
        fp32 = [x.float() + 1e-4 * randn(*x.shape, seed=i) for i, x in enumerate(values)]
        self.params = place([x.to(v.dtype) for x, v in zip(fp32, values, strict=True)], device, layout)
        self.masters = place([x for x, v in zip(fp32, values, strict=True) if v.dtype != torch.float32], device, layout)
        kept = {"momentum_buffer": "momentum", "grad_avg": "centered"}
        self.states: dict[str, list[Tensor]] = {}
        for name in _STATES[op]:
            present = name not in kept or bool(options.get(kept[name]))
            # SGD's first step must not read the buffer.
            fill = math.nan if op == "sgd_" else 0.0
            self.states[name] = place([torch.full_like(x, fill) for x in fp32 if present], device, layout)

    def step(self, grads: Sequence[Tensor], *, first: bool = True, **arguments: Any) -> None:
        """One call of the operator."""
        lists: dict[str, Any] = {f"{name}s": tensors for name, tensors in self.states.items()}
        options = {**self.options, "lr": 0.1, **arguments}
        options.pop("centered", None)
        if self.op == "sgd_":
            options = {**_SGD_DEFAULTS, **options}
            sgd_(self.params, grads, masters=self.masters, is_first_step=first, **lists, **options)
        else:
            options = {**_RMSPROP_DEFAULTS, **options}
            rmsprop_(self.params, grads, masters=self.masters, **lists, **options)

    def fp32(self) -> list[Tensor]:
        """For each parameter the fp32 tensor that is updated."""
        masters = iter(self.masters)
        return [p if p.dtype == torch.float32 else next(masters) for p in self.params]

    def written(self) -> list[Tensor]:
        """All that a step may write."""
        return [*self.params, *self.masters, *(x for state in self.states.values() for x in state)]

    def torch_optimizer(self, dtype: torch.dtype, lr: float = 0.1) -> torch.optim.Optimizer:
        """torch's optimizer on copies of the masters, in fp32 or fp64."""
        params = [torch.nn.Parameter(x.to(dtype, copy=True)) for x in self.fp32()]
        return _TORCH[self.op](params, lr=lr, foreach=False, **self.options)

    def weight_results(self) -> Iterator[Result]:
        """16-bit weights are their masters, rounded."""
        for i, (param, fp32) in enumerate(zip(self.params, self.fp32(), strict=True)):
            if param is not fp32:
                yield Result(f"params[{i}] from master", differing(param, fp32.to(param.dtype)), 0)


def torch_step(optimizer: torch.optim.Optimizer, grads: Sequence[Tensor], scale: float | None = None) -> None:
    """A step of torch's optimizer with gradients of any dtype, unscaled in the dtype of its parameters."""
    params = optimizer.param_groups[0]["params"]
    for param, grad in zip(params, grads, strict=True):
        value = grad.to(param.dtype, copy=True)
        param.grad = value if scale is None else value * torch.tensor(scale, dtype=param.dtype).reciprocal()
    optimizer.step()


def _update(
    op: str,
    options: dict[str, Any],
    make_params: Make,
    make_grads: Sequence[Make],
    layouts: tuple[str, str],
    scale: float | None,
    tensor_lr: bool,
    device: torch.device,
) -> Iterator[Result]:
    ours = UpdateInputs(op, make_params(), options, device, layouts[0])
    theirs, truth = ours.torch_optimizer(torch.float32), ours.torch_optimizer(torch.float64)
    arguments: dict[str, Any] = {"lr": torch.tensor(0.1, device=device)} if tensor_lr else {}
    if scale is not None:
        arguments["grad_scale"] = torch.tensor(scale, device=device)
        arguments["found_inf"] = torch.zeros((), device=device)
    all_grads = []
    for k, make in enumerate(make_grads):
        grads = place(make(), device, layouts[1])
        before = clones(grads)
        ours.step(grads, first=k == 0, **arguments)
        torch_step(theirs, grads, scale)
        torch_step(truth, grads, scale)
        yield Result("grads written", sum(map(changed, before, grads)), 0)
        all_grads += grads

    their_params, true_params = (o.param_groups[0]["params"] for o in (theirs, truth))
    yield from _compare("params", ours.fp32(), their_params, true_params)
    yield from ours.weight_results()
    for name, state in ours.states.items():
        if state:
            pair = ([o.state[p][name] for p in o.param_groups[0]["params"]] for o in (theirs, truth))
            yield from _compare(f"{name}s", state, *pair)
    yield Result("memory around tensors", sum(map(written_outside, [*ours.written(), *all_grads])), 0)


def _skipped(op: str, options: dict[str, Any], make: Make, found: float, device: torch.device) -> Iterator[Result]:
    ours = UpdateInputs(op, make(), options, device)
    before = clones(ours.written())
    grads = [torch.full_like(p, math.inf) for p in ours.params]
    ours.step(grads, first=False, found_inf=torch.tensor(found, device=device))
    yield Result("bits changed by a skipped step", sum(map(changed, before, ours.written())), 0)


def _update_cases(op: str) -> Iterator[Case]:
    every = SGD_OPTIONS if op == "sgd_" else RMSPROP_OPTIONS
    most = every["maximize"]
    same = ("contiguous", "contiguous")
    few = (9, 1025)

    def case(dtype: str, name: str, options: dict[str, Any], params: Make, grads: Sequence[Make], **rest: Any) -> Case:
        arguments = {"layouts": same, "scale": None, "tensor_lr": False, **rest}
        return Case(op, dtype, name, partial(_update, op, options, params, grads, *arguments.values()))

    for dtype_name, dtype in DTYPES.items():
        params = partial(of_sizes, dtype, few)
        grads = [partial(of_sizes, dtype, few, 10 * k + 5) for k in range(3)]
        for name, options in every.items():
            yield case(dtype_name, name, options, params, grads)
        for grad_name, grad_dtype in DTYPES.items():
            if grad_name != dtype_name:
                others = [partial(of_sizes, grad_dtype, few, 10 * k + 5) for k in range(2)]
                yield case(f"{dtype_name}/{grad_name}", "options", most, params, others, scale=3.0)
        yield case(dtype_name, "scaled", most, params, grads, scale=65536.0)
        yield case(dtype_name, "scaled_by_3", most, params, grads, scale=3.0)
        yield case(dtype_name, "tensor_lr", most, params, grads, tensor_lr=True)
        yield case(dtype_name, "sizes", most, partial(of_sizes, dtype), [partial(of_sizes, dtype, seed=5)])
        yield case(dtype_name, "many_tensors", most, partial(many, dtype), [partial(many, dtype)] * 2)
        weights, *gradients = (partial(shaped, dtype, k) for k in range(3))
        for layout in LAYOUTS:
            yield case(dtype_name, layout, most, weights, gradients, layouts=(layout, layout))
        for layout in ("channels_last", "every_other"):
            for name, layouts in (("grads", ("contiguous", layout)), ("params", (layout, "contiguous"))):
                yield case(dtype_name, f"{name}_{layout}", most, weights, gradients, layouts=layouts)
        one = partial(of_sizes, dtype, (LENGTH,))
        for kind in VALUES:
            # Not centered: the overflow of a square would make it inf - inf with an fma, or NaN, without one.
            yield case(dtype_name, f"grads_{kind}", every["momentum"], one, [partial(values, kind, dtype)] * 2)
        three = partial(with_element, 1.0, "middle", dtype)
        for value in (math.nan, math.inf):
            yield case(
                dtype_name,
                f"grads_with_{value}",
                most,
                three,
                [partial(with_element, value, "middle", dtype)],
            )
        for found in (1.0, 2.0, math.nan):
            yield Case(op, dtype_name, f"skipped_by_{found}", partial(_skipped, op, most, params, found))
    scaled = [partial(mixed, seed, 1024.0) for seed in (5, 7)]
    for name, options in every.items():
        yield case("mixed", name, options, mixed, scaled, scale=1024.0)


CASES: dict[str, tuple[Case, ...]] = {
    "unscale_": tuple(_gradient_cases("unscale_", _unscale, 0.37)),
    "grad_norm": tuple(_gradient_cases("grad_norm", _grad_norm, None)),
    "clip_grad_norm_": tuple(_clip_cases()),
    "sgd_": tuple(_update_cases("sgd_")),
    "rmsprop_": tuple(_update_cases("rmsprop_")),
}
