"""Inputs, the error rule, and the cases that the tests and ``python -m amp_kernels verify`` share.

A case makes its inputs, runs one operator on one backend, and compares with fp64 and with torch:

    for case in testing.CASES["sgd_"]:
        for result in case.run("cpu"):
            assert result.passed, f"{case}: {result}"

Nothing here looks at `amp_kernels.reference`: the truth is torch's formula in fp64, and the reference is one
of the backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._ops import use_backend
from .functional import clip_grad_norm_, grad_norm, rmsprop_, sgd_, unscale_

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Around a 16-byte access, around a block of 1024, and more than one chunk of a table.
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, 65537)
NORM_TOLERANCE = 1e-6


# ------------------------------------------------------------------------------------------------- comparison
class Result(NamedTuple):
    """One comparison of a case."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def error_and_allowed(ours: Tensor, theirs: Tensor, truth: Tensor) -> tuple[float, float]:
    """The error rule: ``max|ours - fp64| <= 2 * max|torch - fp64| + 1e-7 * max|fp64|``.

    Where torch got NaN or inf (an overflow of fp32 that fp64 does not have), ours must be the same, else the
    error is inf.
    """
    ours, theirs, truth = (x.detach().double().flatten() for x in (ours, theirs, truth))
    if ours.shape != theirs.shape:
        return math.inf, 0.0
    odd = ~theirs.isfinite()
    if bool((odd & (ours != theirs) & ~(ours.isnan() & theirs.isnan())).any()):
        return math.inf, 0.0
    ours, theirs, truth = (x[~odd] for x in (ours, theirs, truth))
    if ours.numel() == 0:
        return 0.0, 0.0
    allowed = 2 * (theirs - truth).abs().max() + 1e-7 * truth.abs().max()
    return (ours - truth).abs().max().item(), allowed.item()


def differing(ours: Tensor, expected: Tensor) -> int:
    """Number of elements that differ, -0.0 from 0.0 too; any NaN equals any other."""
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return max(ours.numel(), expected.numel(), 1)
    equal = (ours == expected) & (ours.signbit() == expected.signbit())
    return int((~(equal | (ours.isnan() & expected.isnan()))).sum())


def changed(before: Tensor, after: Tensor) -> int:
    """Number of elements of which any bit changed."""
    code = torch.int32 if after.element_size() == 4 else torch.int16
    return int((before.view(code) != after.view(code)).sum())


def written_outside(view: Tensor) -> int:
    """Elements of the memory around a `view` (a LAYOUT) that are no longer NaN; overwrites the view."""
    if view._base is None:
        return 0
    view.fill_(math.nan)
    return int((~view._base.isnan()).sum())


# ----------------------------------------------------------------------------------------------------- inputs
def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same normal numbers on every machine, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _nan_around(x: Tensor, shape: Sequence[int], index: Any) -> Tensor:
    return torch.full(tuple(shape), math.nan, dtype=x.dtype, device=x.device)[index].view_as(x).copy_(x)


# Copies in other layouts; memory around them is NaN. For tensors of four dimensions.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "transposed": lambda x: x.mT.clone(memory_format=torch.contiguous_format).mT,
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "reversed": lambda x: x.permute(3, 2, 1, 0).clone(memory_format=torch.contiguous_format).permute(3, 2, 1, 0),
    "sliced": lambda x: _nan_around(x, (*x.shape[:-1], x.shape[-1] + 5), (..., slice(2, -3))),
    "every_other": lambda x: _nan_around(x, (*x.shape[:-1], 2 * x.shape[-1]), (..., slice(None, None, 2))),
    "misaligned": lambda x: _nan_around(x, (x.numel() + 2,), slice(1, -1)),
}
SHAPE = (3, 5, 7, 11)

_LENGTH = 4099


def _spread(dtype: torch.dtype) -> Tensor:
    powers = 28 if dtype is not torch.float16 else 4
    exponents = torch.linspace(-powers, powers, _LENGTH, dtype=torch.float64)
    return randn(_LENGTH).double() * 10**exponents


# Elements at the ends of a dtype's range, as fp64.
VALUES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "zeros": lambda _: torch.zeros(_LENGTH, dtype=torch.float64),
    "negative_zeros": lambda _: -torch.zeros(_LENGTH, dtype=torch.float64),
    "denormals": lambda dtype: (torch.arange(_LENGTH) % 7 - 3) * (torch.finfo(dtype).smallest_normal / 4),
    "tiny": lambda dtype: torch.full((_LENGTH,), max(1e-30, torch.finfo(dtype).smallest_normal)).double(),
    "largest": lambda dtype: (1.0 - 2.0 * (torch.arange(_LENGTH) % 2)) * torch.finfo(dtype).max,
    "one_largest": lambda dtype: (torch.arange(_LENGTH) == 2000) * torch.finfo(dtype).max,
    "constant": lambda _: torch.full((_LENGTH,), 0.1, dtype=torch.float64),  # rounding errors of one sign
    "spread": _spread,
}


def values(kind: str, dtype: torch.dtype) -> list[Tensor]:
    return [VALUES[kind](dtype).to(dtype)]


def of_sizes(dtype: torch.dtype, sizes: Sequence[int] = SIZES, seed: int = 0) -> list[Tensor]:
    return [randn(n, dtype=dtype, seed=seed + n) for n in sizes]


def mixed(seed: int = 0, factor: float = 1.0) -> list[Tensor]:
    """Every size in another dtype than its neighbours', 0-dim tensors too."""
    cycle = list(DTYPES.values())
    tensors = [randn(n, dtype=cycle[i % 3], seed=seed + n) for i, n in enumerate((*SIZES, *SIZES[:-1], 0, 5))]
    return [factor * x for x in (*tensors, *(randn(dtype=dtype, seed=seed) for dtype in cycle))]


def _shaped(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [randn(*SHAPE, dtype=dtype, seed=seed)]


def many(dtype: torch.dtype) -> list[Tensor]:
    return [randn(1 + i % 13, dtype=dtype, seed=i) for i in range(40)]


def with_element(value: float, position: str, dtype: torch.dtype) -> list[Tensor]:
    """Three tensors, the second of several chunks; `value` is the first, middle or last element of all."""
    tensors = [randn(n, dtype=dtype, seed=n) for n in (7, 40001, 1033)]
    tensor, index = {"first": (0, 0), "middle": (1, 20000), "last": (2, -1)}[position]
    tensors[tensor][index] = value
    return tensors


def _place(tensors: Sequence[Tensor], device: torch.device, layout: str = "contiguous") -> list[Tensor]:
    return [LAYOUTS[layout](x.to(device)) for x in tensors]


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


# ------------------------------------------------------------------------------------------------------ cases
class Case(NamedTuple):
    """One operator on one kind of input; ``str(case)`` is its id."""

    op: str
    dtype: str
    name: str
    body: Callable[[torch.device], Iterator[Result]]

    def __str__(self) -> str:
        return f"{self.dtype}-{self.name}"

    def run(self, backend: str, device: str | torch.device | None = None) -> list[Result]:
        """The comparisons, on tensors of `device` (default: CUDA for "cuda", else the CPU)."""
        with use_backend(backend):
            return list(self.body(torch.device(device or ("cuda" if backend == "cuda" else "cpu"))))


Make = Callable[[], list[Tensor]]


def _gradient_inputs() -> Iterator[tuple[str, str, Make, str]]:
    """(dtype, name, tensors, layout) for the operators that read gradients only."""
    for name, dtype in DTYPES.items():
        yield name, "sizes", partial(of_sizes, dtype), "contiguous"
        yield name, "many_tensors", partial(many, dtype), "contiguous"
        for layout in LAYOUTS:
            yield name, layout, partial(_shaped, dtype), layout
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
    grads = _place(make(), device, layout)
    before = _clones(grads)
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
    grads = _place(make(), device, layout)
    before = _clones(grads)
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
    grads = _place(make(), device, layout)
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
            yield Case("clip_grad_norm_", name, layout, partial(_clip, partial(_shaped, dtype), layout, 1.0))


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
        self.params = _place([x.to(v.dtype) for x, v in zip(fp32, values, strict=True)], device, layout)
        self.masters = _place(
            [x for x, v in zip(fp32, values, strict=True) if v.dtype != torch.float32], device, layout
        )
        kept = {"momentum_buffer": "momentum", "grad_avg": "centered"}
        self.states: dict[str, list[Tensor]] = {}
        for name in _STATES[op]:
            present = name not in kept or bool(options.get(kept[name]))
            # SGD's first step must not read the buffer.
            fill = math.nan if op == "sgd_" else 0.0
            self.states[name] = _place([torch.full_like(x, fill) for x in fp32 if present], device, layout)

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
        grads = _place(make(), device, layouts[1])
        before = _clones(grads)
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
    before = _clones(ours.written())
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
        shaped, *gradients = (partial(_shaped, dtype, k) for k in range(3))
        for layout in LAYOUTS:
            yield case(dtype_name, layout, most, shaped, gradients, layouts=(layout, layout))
        for layout in ("channels_last", "every_other"):
            for name, layouts in (("grads", ("contiguous", layout)), ("params", (layout, "contiguous"))):
                yield case(dtype_name, f"{name}_{layout}", most, shaped, gradients, layouts=layouts)
        one = partial(of_sizes, dtype, (_LENGTH,))
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
