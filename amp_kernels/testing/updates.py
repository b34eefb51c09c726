"""Test cases for the updates (`sgd_`, `rmsprop_`, `adam_`), and helpers to call an update and torch's optimizer.

The rule of `error_and_allowed` (common.py) bounds the errors. The truth is torch's optimizer on fp64 tensors.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import functional, optim
from ..backends import use_backend
from ..families import FAMILIES, Family
from ..reference._master import split
from ..reference.update import fp32 as fp32_of
from .common import (
    DTYPES,
    LAYOUTS,
    LENGTH,
    VALUES,
    Case,
    Make,
    Result,
    clones,
    compare,
    exact,
    many,
    mixed,
    of_sizes,
    place,
    randn,
    shaped,
    unchanged,
    values,
    with_element,
    written_outside,
)

LR = {"sgd": 0.1}  # 0.01 for the others
_WEIGHT_DECAY = {"weight_decay": 0.1, "alpha": 0.9, "betas": (0.5, 0.9), "eps": 1e-3}
# Options of the optimizers as users write them. Each optimizer takes those that it has, and an example that then equals
# an earlier one is left out. The examples of an optimizer together reach every branch of its formula. With "full" and
# with "maximize" it has every state of its family.
EXAMPLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight_decay": _WEIGHT_DECAY,
    "momentum": {"momentum": 0.9, "betas": (0.95, 0.99)},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "betas": (0.95, 0.99)},
    "decoupled": {**_WEIGHT_DECAY, "decoupled_weight_decay": True},
    "centered": {"centered": True},
    "amsgrad": {"amsgrad": True, "betas": (0.9, 0.5)},
    "full": {"momentum": 0.9, "nesterov": True, "centered": True, "amsgrad": True, "weight_decay": 0.01},
    "maximize": {
        "momentum": 0.9, "dampening": 0.5, "centered": True, "amsgrad": True, "weight_decay": 0.01,
        "decoupled_weight_decay": True, "maximize": True,
    },
}  # fmt: skip
# With these options an update rounds only once, when it subtracts the step from the master, whatever the learning rate.
# So every backend must compute the same bits. The gradients must be powers of 2, the states must be 0, and the step
# must have a high number, so that the bias corrections of Adam are 1. With other options backends may differ in the
# last bit, because some round a product before they add it, and some do not.
EXACT: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.5, "dampening": 0.5, "nesterov": False},
    "rmsprop": {"alpha": 0.75, "eps": 0.0},
    "adam": {"betas": (0.5, 0.75), "eps": 0.0},
}
SMALL = (1e-3, 1e-5, 1e-6)  # sizes of weights; fp16 remainders of the last are rounded to 2^-40


class Update:
    """An update family: its functional update, its fused optimizer, and the torch optimizer from which that is derived.

    `examples` has options by the name of the example. Their learning rate is `lr`.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.function: Callable[..., None] = getattr(functional, f"{family.name}_")
        ours = (getattr(optim, name) for name in optim.__all__)
        self.optimizer: Any = next(kind for kind in ours if getattr(kind, "_family", None) is family)
        self.torch: Any = next(k for k in self.optimizer.__mro__ if not k.__module__.startswith(optim.__name__))
        self.lr = LR.get(family.name, 0.01)
        self.examples: dict[str, dict[str, Any]] = {}
        for name, options in EXAMPLES.items():
            own = {option: value for option, value in options.items() if option in self.defaults()}
            if own not in self.examples.values() or name in ("momentum", "full"):  # which tests ask for
                self.examples[name] = own

    def defaults(self) -> dict[str, Any]:
        """Return all options of torch's optimizer, with their defaults."""
        return self.torch([torch.zeros(1)], lr=self.lr).defaults

    def plain(self, params: Sequence[Tensor], lr: float, options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return torch's optimizer over `params`, with `foreach=False` if it has that option."""
        choice = {"foreach": False} if "foreach" in inspect.signature(self.torch).parameters else {}
        return self.torch(params, lr=lr, **choice, **options)

    def arguments(self, options: dict[str, Any], *, steps_taken: int = 0) -> dict[str, Any]:
        """Return keyword arguments for `function`: `options`, and torch's defaults for all other options."""
        everything = {**self.defaults(), **options, "is_first_step": steps_taken == 0, "steps_taken": steps_taken}
        return {name: everything[name] for name in inspect.signature(self.function).parameters if name in everything}

    def states(self, options: dict[str, Any]) -> list[str]:
        """Return the names of the states that torch's optimizer has with these options, in the order of the family."""
        param = torch.zeros(1, requires_grad=True)
        param.grad = torch.ones(1)
        optimizer = self.plain([param], self.lr, options)
        optimizer.step()
        kept = [name for name, value in optimizer.state[param].items() if isinstance(value, Tensor)]
        return [name for name in self.family.states if name in kept]


UPDATES = {name: Update(family) for name, family in FAMILIES.items()}


class UpdateInputs:
    """The lists of parameters, masters and states that a functional update, such as `"sgd_"`, takes.

    Random numbers with the standard deviation `noise` are added to `values` in fp32. The sum, rounded to the dtype of
    the value, is the parameter. If this dtype has 16 bits, the sum itself is the master. It is stored in fp32 if
    `masters` is "full", and as a remainder of the weight (int16) if it is "split". With "both", every third is split.
    """

    def __init__(
        self,
        op: str,
        values: Sequence[Tensor],
        options: dict[str, Any],
        device: str | torch.device = "cpu",
        layout: str = "contiguous",
        masters: str = "full",
        noise: float = 1e-4,
    ) -> None:
        device = torch.device(device)
        self.op, self.options, self.steps_taken = op, dict(options), 0
        fp32 = [x.float() + noise * randn(*x.shape, seed=i) for i, x in enumerate(values)]
        self.params = place([x.to(v.dtype) for x, v in zip(fp32, values, strict=True)], device, layout)
        low = [(x, v.dtype) for x, v in zip(fp32, values, strict=True) if v.dtype != torch.float32]
        # Every third, so that fp16 and bf16 parameters that alternate have masters of both kinds. If every second one
        # were split, all split masters would belong to the same dtype.
        is_split = itertools.cycle({"full": [False], "split": [True], "both": [True, False, False]}[masters])
        kept = [split(x, dtype)[1] if next(is_split) else x for x, dtype in low]
        self.masters = place(kept, device, layout)
        self.states: dict[str, list[Tensor]] = {name: [] for name in self._update.family.states}
        for name in self._update.states(self.options):
            # A state that the first step must overwrite without reading it begins as NaN. If an implementation reads it
            # nevertheless, its results are NaN, and the test fails.
            fill = math.nan if name == self._update.optimizer._set_at_first_step else 0.0
            self.states[name] = place([torch.full_like(x, fill) for x in fp32], device, layout)

    @property
    def _update(self) -> Update:
        return UPDATES[self.op.removesuffix("_")]

    def step(self, grads: Sequence[Tensor], *, first: bool = True, **arguments: Any) -> None:
        """Call the functional update once. `arguments` replace those from the options."""
        lists = {f"{name}s": tensors for name, tensors in self.states.items()}
        self.steps_taken = 0 if first else self.steps_taken + 1
        options = self._update.arguments({**self.options, "lr": 0.1}, steps_taken=self.steps_taken)
        self._update.function(self.params, grads, masters=self.masters, **lists, **{**options, **arguments})

    def fp32(self) -> list[Tensor]:
        """Return, for each parameter, the fp32 tensor that the update changes: the parameter itself or its master.

        If a master is stored as a remainder, the tensor is an fp32 copy of it.
        """
        masters = iter(self.masters)
        return [fp32_of(p, None if p.dtype is torch.float32 else next(masters)) for p in self.params]

    def written(self) -> list[Tensor]:
        """Return all tensors that a step may write: parameters, masters and states."""
        return [*self.params, *self.masters, *(x for state in self.states.values() for x in state)]

    def torch_optimizer(self, dtype: torch.dtype, lr: float = 0.1) -> torch.optim.Optimizer:
        """Return torch's optimizer with the same options on copies of the masters."""
        params = [torch.nn.Parameter(x.to(dtype, copy=True)) for x in self.fp32()]
        return self._update.plain(params, lr, self.options)

    def weight_results(self) -> Iterator[Result]:
        """Compare 16-bit weights with their rounded masters."""
        for i, (param, fp32) in enumerate(zip(self.params, self.fp32(), strict=True)):
            if param is not fp32:
                yield exact(f"params[{i}] from master", param, fp32.to(param.dtype))


def torch_step(optimizer: torch.optim.Optimizer, grads: Sequence[Tensor], scale: float | None = None) -> None:
    """Take a step of a torch optimizer with gradients of any dtype, divided by `scale` after the cast."""
    params = optimizer.param_groups[0]["params"]
    for param, grad in zip(params, grads, strict=True):
        value = grad.to(param.dtype, copy=True)
        param.grad = value if scale is None else value * torch.tensor(scale, dtype=param.dtype).reciprocal()
    optimizer.step()


def _update(
    op: str, options: dict[str, Any], make_params: Make, make_grads: Sequence[Make], device: torch.device, *,
    masters: str = "full", layouts: tuple[str, str] = ("contiguous", "contiguous"), scale: float | None = None,
    tensor_lr: bool = False,
) -> Iterator[Result]:  # fmt: skip
    ours = UpdateInputs(op, make_params(), options, device, layouts[0], masters)
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
        yield unchanged("grads written", before, grads)
        all_grads += grads

    their_params, true_params = (o.param_groups[0]["params"] for o in (theirs, truth))
    yield from compare("params", ours.fp32(), their_params, true_params)
    yield from ours.weight_results()
    for name, state in ours.states.items():
        if state:
            pair = ([o.state[p][name] for p in o.param_groups[0]["params"]] for o in (theirs, truth))
            yield from compare(f"{name}s", state, *pair)
    yield Result("memory around tensors", sum(map(written_outside, [*ours.written(), *all_grads])), 0)


def _skipped(
    op: str, options: dict[str, Any], make: Make, found: float, masters: str, device: torch.device
) -> Iterator[Result]:
    ours = UpdateInputs(op, make(), options, device, masters=masters)
    before = clones(ours.written())
    grads = [torch.full_like(p, math.inf) for p in ours.params]
    ours.step(grads, first=False, found_inf=torch.tensor(found, device=device))
    yield unchanged("bits changed by a skipped step", before, ours.written())


def _small_weights(op: str, dtype: torch.dtype, masters: str, device: torch.device) -> Iterator[Result]:
    """Compare weights, masters and states bit for bit with those of the reference on the CPU. See `EXACT`."""

    def stepped(on: torch.device | str) -> UpdateInputs:
        values = [size * randn(1025, seed=i) for i, size in enumerate(SMALL)]
        options = EXACT[op.removesuffix("_")]
        inputs = UpdateInputs(op, [x.to(dtype) for x in values], options, on, masters=masters, noise=1e-7)
        grads = [randn(1025, seed=7 + i).sign() * 2.0 ** (torch.arange(1025) % 5 - 2) for i in range(len(SMALL))]
        for state in itertools.chain(*inputs.states.values()):
            state.zero_()
        inputs.steps_taken = 1000
        inputs.step([g.to(on, dtype) for g in grads], first=False, lr=1e-6)
        return inputs

    ours = stepped(device)
    with use_backend("reference"):
        expected = stepped("cpu")
    yield unchanged("bits of parameters, masters and states", expected.written(), ours.written())


def _update_cases(op: str) -> Iterator[Case]:
    every = UPDATES[op.removesuffix("_")].examples
    most = every["maximize"]
    few = (9, 1025)

    def case(dtype: str, name: str, options: dict[str, Any], params: Make, grads: Sequence[Make], **rest: Any) -> Case:
        return Case(op, dtype, name, partial(_update, op, options, params, grads, **rest))

    # Kernels have separate code for weights with remainders, so most cases are repeated with "split" masters.
    for masters, (dtype_name, dtype) in itertools.product(("full", "split"), DTYPES.items()):
        if masters == "split" and dtype is torch.float32:
            continue
        prefix = "split_" if masters == "split" else ""
        of_dtype = partial(case, dtype_name, masters=masters)
        params = partial(of_sizes, dtype, few)
        grads = [partial(of_sizes, dtype, few, 10 * k + 5) for k in range(3)]
        for name, options in every.items():
            yield of_dtype(f"{prefix}{name}", options, params, grads)
        for grad_name, grad_dtype in DTYPES.items():
            if grad_name != dtype_name:
                others = [partial(of_sizes, grad_dtype, few, 10 * k + 5) for k in range(2)]
                for name, options in (("split" if prefix else "options", most), (f"{prefix}plain", every["plain"])):
                    yield case(f"{dtype_name}/{grad_name}", name, options, params, others, scale=3.0, masters=masters)
        yield of_dtype(f"{prefix}sizes", most, partial(of_sizes, dtype), [partial(of_sizes, dtype, seed=5)])
        weights, *gradients = (partial(shaped, dtype, k) for k in range(3))
        for layout in LAYOUTS:
            yield of_dtype(f"{prefix}{layout}", most, weights, gradients, layouts=(layout, layout))
        three, with_nan = (partial(with_element, value, "middle", dtype) for value in (1.0, math.nan))
        yield of_dtype(f"{prefix}grads_with_nan", most, three, [with_nan])
        yield Case(op, dtype_name, f"{prefix}small_weights", partial(_small_weights, op, dtype, masters))
        if masters == "split":
            for kind in VALUES:
                three_steps = [partial(of_sizes, dtype, (LENGTH,), k) for k in range(3)]
                name, start = f"split_params_{kind}", partial(values, kind, dtype)
                yield of_dtype(name, every["momentum"], start, three_steps)
            yield Case(op, dtype_name, "split_skipped", partial(_skipped, op, most, params, 2.0, "split"))
            continue
        yield of_dtype("scaled", most, params, grads, scale=65536.0)
        yield of_dtype("scaled_by_3", most, params, grads, scale=3.0)
        yield of_dtype("tensor_lr", most, params, grads, tensor_lr=True)
        yield of_dtype("many_tensors", most, partial(many, dtype), [partial(many, dtype)] * 2)
        for layout in ("channels_last", "every_other"):
            for name, layouts in (("grads", ("contiguous", layout)), ("params", (layout, "contiguous"))):
                yield of_dtype(f"{name}_{layout}", most, weights, gradients, layouts=layouts)
        one = partial(of_sizes, dtype, (LENGTH,))
        for kind in VALUES:
            # These cases use the example "momentum", because there the option `centered` of RMSprop is off. If
            # `centered` were on and a square overflowed, the variance would be NaN in some implementations and not in
            # others. That depends on whether they use an fma.
            yield of_dtype(f"grads_{kind}", every["momentum"], one, [partial(values, kind, dtype)] * 2)
        yield of_dtype("grads_with_inf", most, three, [partial(with_element, math.inf, "middle", dtype)])
        for found in (1.0, 2.0, math.nan):
            yield Case(op, dtype_name, f"skipped_by_{found}", partial(_skipped, op, most, params, found, "full"))
    scaled = [partial(mixed, seed, 1024.0) for seed in (5, 7)]
    for name, options in every.items():
        yield case("mixed", name, options, mixed, scaled, scale=1024.0, masters="both")


CASES: dict[str, tuple[Case, ...]] = {f"{name}_": tuple(_update_cases(f"{name}_")) for name in UPDATES}
