"""Whatever a parameter, a gradient or a state is: right, or a sentence before anything changed.

Each row of the tables has a verdict. Right means torch's default optimizer on plain copies, in fp32 for 16-bit
parameters. A plain parameter on either side shows whether anything changed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from isolated import BACKENDS, backends, case, isolated
from optim_cases import FULL, STATES, TORCH, assert_within_rule, randn, started
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import amp_kernels
from amp_kernels.optim import FusedRMSprop, FusedSGD

DEVICE = torch.device("cpu")
SHAPE = (6, 5)
SUBJECT = "subject.weight"


class Verdict(Enum):
    RIGHT = "right"
    SENTENCE = "sentence"
    EITHER = "right or sentence"  # torch itself raises, or its result depends on the order of its operations


RIGHT, SENTENCE, EITHER = Verdict

MODES = ["step", "clipped", "scaler", "unscale_"]
# The reference reads gradients for a norm as it does for a scaler.
PLACES = [(backend, mode) for backend in BACKENDS for mode in MODES if backend == "cpu" or mode in ("step", "unscale_")]
FAMILIES = tuple(TORCH)
DTYPES = (torch.float32, torch.float16)


def runs(dtypes: Sequence[torch.dtype]) -> list[tuple[type, torch.dtype]]:
    """Each family and each dtype once."""
    return list(zip(FAMILIES, itertools.cycle((dtypes[0], dtypes[-1])), strict=False))


def numbers(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/8, which every dtype of ours holds exactly, and never zero."""
    x = (8 * randn(*shape, seed=seed)).round() / 8
    return torch.where(x == 0, 0.5, x)


# ------------------------------------------------------------------------------------------------------------- kinds
class Subclass(Tensor):
    pass


class WithoutFunction(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class WithFunction(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(cls) if type(result) is Tensor else result


class Int8Weight(Tensor):
    """A weight kept as codes and a scale a row, as torchao's quantized training has it."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def from_float(cls, x: Tensor) -> Int8Weight:
        scale = x.abs().amax(1, keepdim=True) / 127
        return cls((x / scale).round().to(torch.int8), scale)

    def __repr__(self) -> str:
        return "Int8Weight()"

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale)
        plain = [a.codes * a.scale if isinstance(a, cls) else a for a in args]
        result = func(*plain, **(kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], cls):
            new = cls.from_float(result)
            args[0].codes.copy_(new.codes)
            args[0].scale.copy_(new.scale)
            return args[0]
        return result


def parameter_of(x: Tensor) -> Tensor:
    if isinstance(x, WithoutFunction):  # `Parameter` refuses it, an optimizer does not
        return x.requires_grad_()
    with torch.inference_mode(x.is_inference()):
        return Parameter(x, requires_grad=x.is_floating_point() or x.is_complex())


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def conjugated(x: Tensor) -> Tensor:
    return torch.complex(x.float(), -x.float()).conj()


def diagonals(x: Tensor) -> Tensor:
    """Each row begins one element of memory after the row before."""
    return torch.cat([x[:, 0], x[-1, 1:]]).as_strided(x.shape, (1, 1))


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x.clone(), _offsets())


@functools.cache
def _offsets() -> Tensor:  # one object, which makes tensors of the same jagged shape
    return torch.tensor([0, 2, 6])


@functools.cache
def fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


@functools.cache
def lazily_cloned_from() -> list[tuple[Tensor, Tensor]]:
    """Tensors and what they must still hold at the end."""
    return []


def lazily_cloned(x: Tensor) -> Tensor:
    """Shares its memory with another tensor until either is written."""
    source = x.clone()
    lazily_cloned_from().append((source, x.clone()))
    return torch._lazy_clone(source)


class Kind(NamedTuple):
    make: Callable[[Tensor], Tensor]  # of this kind, with the values of a plain tensor
    parameter: Verdict | None  # None: no optimizer has such a parameter
    gradient: Verdict | None
    unscale: Verdict | None  # of `unscale_`, which writes the gradient, where that differs
    state: Verdict | None
    values: Callable[[Tensor], Tensor] = Tensor.clone  # where the kind cannot have every value
    context: Callable[[], Any] = contextlib.nullcontext  # the step is taken in it
    dtypes: tuple[torch.dtype, ...] = DTYPES


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


# fmt: off
KINDS = {
    # name                           make                                   parameter gradient  unscale_  state
    "plain":                    Kind(Tensor.clone,                          RIGHT,    RIGHT,    None,     RIGHT),
    "Parameter":                Kind(lambda x: Parameter(x.clone(), x.is_floating_point()), RIGHT, RIGHT, None, RIGHT),
    "subclass":                 Kind(lambda x: x.clone().as_subclass(Subclass), RIGHT, RIGHT,   None,     RIGHT),
    "subclass, no function":    Kind(lambda x: x.clone().as_subclass(WithoutFunction), RIGHT, RIGHT, None,     RIGHT),
    "subclass with function":   Kind(lambda x: x.clone().as_subclass(WithFunction), RIGHT, RIGHT, None, RIGHT),
    "strided view":             Kind(lambda x: torch.stack([x, x], -1)[..., 1], RIGHT, RIGHT,   None,     RIGHT),
    "transposed":               Kind(lambda x: x.t().clone().t(),           RIGHT,    RIGHT,    None,     RIGHT),
    "shared memory":            Kind(lambda x: x.clone().share_memory_(),   RIGHT,    RIGHT,    None,     RIGHT),
    "copy on write":            Kind(lazily_cloned,                         RIGHT,    RIGHT,    None,     RIGHT),
    "negated view":             Kind(lambda x: torch._neg_view(-x),         RIGHT,    RIGHT,    None,     EITHER),
    "imaginary of conjugated":  Kind(lambda x: conjugated(x).imag,          RIGHT,    RIGHT,    None,     EITHER,
                                     dtypes=(torch.float32,)),
    "real of conjugated":       Kind(lambda x: conjugated(x).real,      RIGHT,    RIGHT,    None,     RIGHT,
                                     dtypes=(torch.float32,)),
    "zero-tensor":              Kind(lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
                                                                            SENTENCE, RIGHT,    EITHER,   EITHER,
                                     values=torch.zeros_like),
    "inference":                Kind(in_inference_mode,                     SENTENCE, RIGHT,    EITHER,   EITHER),
    "expanded":                 Kind(lambda x: x[:1].clone().expand_as(x),  SENTENCE, RIGHT,    EITHER,   SENTENCE,
                                     values=lambda x: x[:1].expand_as(x).clone()),
    "rows that overlap":        Kind(diagonals,                             SENTENCE, RIGHT,    EITHER,   SENTENCE,
                                     values=lambda x: diagonals(x).clone()),
    "collective, not awaited":  Kind(lambda x: AsyncCollectiveTensor(x.clone()), SENTENCE, RIGHT, None,   EITHER),
    "two tensors":              Kind(lambda x: TwoTensor(x.clone(), x.clone()), SENTENCE, SENTENCE, None, EITHER),
    "nested two tensors":       Kind(lambda x: TwoTensor(*(TwoTensor(x.clone(), x.clone()) for _ in "ab")),
                                                                            SENTENCE, SENTENCE, None,     EITHER),
    "int8 weight":              Kind(Int8Weight.from_float,                 SENTENCE, SENTENCE, None,     SENTENCE),
    "jagged":                   Kind(jagged,                                SENTENCE, None,     None,     None),
    "sparse COO":               Kind(Tensor.to_sparse,                      SENTENCE, SENTENCE, None,     EITHER),
    "sparse CSR":               Kind(Tensor.to_sparse_csr,                  SENTENCE, None,     None,     EITHER),
    "mkldnn":                   Kind(lambda x: x.float().to_mkldnn(),       SENTENCE, None,     None,     None,
                                     dtypes=(torch.float32,)),
    "complex":                  Kind(to(torch.complex64),                   SENTENCE, SENTENCE, None,     SENTENCE),
    "complex, conjugated":      Kind(conjugated,                            SENTENCE, SENTENCE, None,     SENTENCE),
    # The constructor refuses fp64 parameters: test_fp64_parameters.
    "fp64":                     Kind(to(torch.float64),                     None,     SENTENCE, None,     EITHER),
    "e4m3":                     Kind(to(torch.float8_e4m3fn),               SENTENCE, SENTENCE, None,     None),
    "e5m2":                     Kind(to(torch.float8_e5m2),                 SENTENCE, SENTENCE, None,     None),
    "int32":                    Kind(to(torch.int32),                       SENTENCE, SENTENCE, None,     None),
    "int8":                     Kind(to(torch.int8),                        SENTENCE, SENTENCE, None,     None),
    "bool":                     Kind(to(torch.bool),                        SENTENCE, SENTENCE, None,     None),
    "meta":                     Kind(lambda x: x.to("meta"),                SENTENCE, None,     None,     SENTENCE),
    "fake":                     Kind(lambda x: fake_mode().from_tensor(x),  SENTENCE, SENTENCE, None,     SENTENCE),
    "fake, in its mode":        Kind(lambda x: fake_mode().from_tensor(x),  SENTENCE, SENTENCE, None,     SENTENCE,
                                     context=fake_mode),
    "real, in a fake mode":     Kind(Tensor.clone,                          SENTENCE, SENTENCE, None,     SENTENCE,
                                     context=fake_mode),
}
# fmt: on


# ---------------------------------------------------------------------------------------------------------- trainings
class Training:
    """Parameters by name, and their gradients at each step."""

    params: dict[str, Tensor]

    def give(self, step: int, scale: float, overflow: bool = False) -> None:
        """New gradients; in step 0 ordinary ones."""
        raise NotImplementedError

    def after_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def mend(self, step: int, scale: float) -> None:
        """Gradients with which everybody can make a step."""
        raise NotImplementedError


def gradient_of(p: Tensor, step: int, seed: int, scale: float) -> Tensor:
    return (scale * numbers(*p.shape, seed=100 * step + seed)).to(p.dtype)


class WithSubject(Training):
    """A parameter, gradient or state of some kind between two plain parameters."""

    def __init__(self, kind: Kind, role: str, dtype: torch.dtype, neighbours: tuple[torch.dtype, torch.dtype]) -> None:
        self.kind, self.role, self.dtype = kind, role, dtype
        values = numbers(*SHAPE, seed=1)
        if role == "parameter":
            values = kind.values(values)
        values = values.to(dtype)
        self.params = {
            "first.weight": Parameter(numbers(33, seed=0).to(neighbours[0])),
            SUBJECT: parameter_of(kind.make(values)) if role == "parameter" else Parameter(values),
            "last.weight": Parameter(numbers(4, 9, seed=2).to(neighbours[1])),
        }

    def give(self, step: int, scale: float, overflow: bool = False) -> None:
        for i, (name, p) in enumerate(self.params.items()):
            if name != SUBJECT:
                p.grad = gradient_of(p, step, i, scale)
        subject = self.params[SUBJECT]
        grad = (scale * numbers(*SHAPE, seed=100 * step + 1)).to(self.dtype)
        if overflow:
            grad[0, 0] = torch.inf
        if self.role == "parameter" and step > 0:
            assign(subject, self._gradients_of_this_kind(subject, grad))
        elif self.role == "gradient" and step > 0:
            assign(subject, [self.kind.make(self.kind.values(grad))])
        elif self.role != "parameter":
            assign(subject, [grad])

    def _gradients_of_this_kind(self, subject: Tensor, grad: Tensor) -> Iterable[Tensor]:
        yield grad.to(subject.dtype)
        yield self.kind.make(grad)
        yield torch.ones_like(subject.detach())

    def after_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.role == "state":
            state = optimizer.state[self.params[SUBJECT]]
            keys = list(STATES)
            if self.kind.values is Tensor.clone and self.kind.state is RIGHT:
                keys.append("remainder")
            for key in keys:
                if key in state:
                    state[key] = self.kind.make(self.kind.values(state[key]))

    def mend(self, step: int, scale: float) -> None:
        self.give(step, scale)
        subject = self.params[SUBJECT]
        subject.grad = gradient_of(subject, step, 1, scale) if self.role == "gradient" else None


def assign(p: Tensor, grads: Iterable[Tensor]) -> None:
    """The first gradient that torch takes for `p`."""
    with contextlib.suppress(AttributeError, RuntimeError):
        p.grad_dtype = None  # any
    errors = []
    for grad in grads:
        try:
            p.grad = grad
            return
        except (RuntimeError, TypeError) as error:
            errors.append(error)
    raise AssertionError(f"no gradient can be given to this parameter: {errors}")


# -------------------------------------------------------------------------------------------------------- what is held
def bits(t: Tensor | None) -> list[Tensor]:
    """Copies of all that a tensor holds, as plain tensors; nothing of one without memory."""
    if t is None or isinstance(t, FakeTensor) or t.is_meta:
        return []
    t = t.detach()
    if isinstance(t, AsyncCollectiveTensor):
        return bits(t.elem)
    if is_traceable_wrapper_subclass(t):
        return [copy for name in t.__tensor_flatten__()[0] for copy in bits(getattr(t, name))]
    if t.layout is torch.sparse_coo:
        return [t._indices().clone(), t._values().clone()]
    if t.layout is torch.sparse_csr:
        return [t.crow_indices().clone(), t.col_indices().clone(), t.values().clone()]
    if t.layout is not torch.strided:
        return [t.to_dense()]
    plain = t.as_subclass(Tensor).resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return [plain.to(torch.float64, copy=True)]  # exact for every dtype here


def everything(optimizer: torch.optim.Optimizer, params: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    counts = optimizer.state_dict()["state"]  # brings the states' counts up to date
    held = {name: bits(p) for name, p in params.items()}
    held |= {f"the gradient of {name}": bits(p.grad) for name, p in params.items()}
    for name, p in params.items():
        held |= {f"{key} of {name}": bits(value) for key, value in dict(optimizer.state.get(p, {})).items()}
    for i, state in counts.items():
        if "step" in state:
            held[f"the count of {i}"] = bits(torch.as_tensor(state["step"]))
    return held


def assert_unchanged(before: dict[str, list[Tensor]], after: dict[str, list[Tensor]]) -> None:
    for name, copies in before.items():
        for x, y in zip(copies, after[name], strict=True):
            assert torch.equal(x, y), f"{name} changed"


def assert_sentence(error: Exception, family: type, names: Iterable[str]) -> None:
    """`{op}: {argument} must be {expected}, ...`, where the argument says which parameter."""
    text = str(error)
    assert re.match(rf"({family.__name__}(\.\w+)?|step|GradScaler(\.\w+)?|unscale_): ", text), text
    assert " must " in text, text
    assert any(name in text for name in names), text


# ------------------------------------------------------------------------------------------------------------ the steps
class Trainings(NamedTuple):
    ours: Training
    theirs: Training  # torch's, in fp32
    truth: Training  # torch's, in fp64


def play(
    family: type,
    mode: str,
    verdict: Verdict,
    trainings: Trainings,
    about: Iterable[str] = (SUBJECT,),  # a sentence names one of them
    context: Callable[[], Any] = contextlib.nullcontext,
    overflows: bool = False,  # whether the gradients can hold inf
) -> None:
    ours, *theirs = trainings
    max_norm = 3.0 if mode == "clipped" else None
    optimizer = family(list(ours.params.items()), **FULL[family], max_grad_norm=max_norm)
    references = [TORCH[family](list(t.params.values()), **FULL[family], foreach=False) for t in theirs]
    scaler = started(DEVICE, enabled=mode in ("scaler", "unscale_"))

    def act() -> None:
        if mode == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)

    def compare() -> None:
        names = [name for name, p in ours.params.items() if p.grad is not None]
        assert_within_rule(optimizer, *([t.params[name] for name in names] for t in trainings))

    for step in range(3):
        scale = scaler.get_scale()
        ours.give(step, scale)
        before = everything(optimizer, ours.params)
        error = None
        try:
            with context() if step > 0 else contextlib.nullcontext():
                act()
        except (RuntimeError, TypeError, ValueError) as raised:
            error = raised
            assert step > 0 and verdict is not RIGHT, f"raises {error!r}"
            assert_sentence(error, family, about)
            assert_unchanged(before, everything(optimizer, ours.params))
            ours.mend(step, scale)
            act()
        assert step == 0 or verdict is not SENTENCE or error, "nothing was raised"
        scaler.update()
        for training, reference in zip(theirs, references, strict=True):
            training.mend(step, 1.0) if error else training.give(step, 1.0)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(training.params.values()), max_norm)
            reference.step()
        compare()
        if step == 0:
            for training, o in zip(trainings, (optimizer, *references), strict=True):
                training.after_first_step(o)
        if error:
            return
    if overflows and scaler.is_enabled():
        before = {k: v for k, v in everything(optimizer, ours.params).items() if "gradient" not in k}
        ours.give(5, scaler.get_scale(), overflow=True)
        act()
        scaler.update()
        assert_unchanged(before, everything(optimizer, ours.params))
        assert scaler.skipped_steps == 1
    for source, values in lazily_cloned_from():
        assert torch.equal(source, values), "the tensor that was cloned lazily changed"


@isolated
@pytest.mark.parametrize(
    ("role", "name"),
    [(role, name) for role in ("parameter", "gradient", "state") for name in KINDS if getattr(KINDS[name], role)],
)
def test_kinds(name: str, role: str) -> None:
    for backend, mode in PLACES:  # in one fork, whose first calls take longer than all others
        with case(backend, mode), amp_kernels.use_backend(backend):
            play_kind(KINDS[name], name, role, mode)


def play_kind(kind: Kind, name: str, role: str, mode: str) -> None:
    verdict = getattr(kind, role)
    if role == "gradient" and mode == "unscale_" and kind.unscale:
        verdict = kind.unscale
    plain = kind._replace(make=Tensor.clone)
    for family, dtype in runs(kind.dtypes):
        trainings = Trainings(
            WithSubject(kind, role, dtype, (torch.float32, torch.bfloat16)),
            WithSubject(plain, role, torch.float32, (torch.float32, torch.float32)),
            WithSubject(plain, role, torch.float64, (torch.float64, torch.float64)),
        )
        overflows = role == "gradient" and verdict is RIGHT and name != "zero-tensor"
        with case(family.__name__, dtype):
            about = (SUBJECT, "fake tensors")  # a mode concerns all parameters
            play(family, mode, verdict, trainings, about, context=kind.context, overflows=overflows)


# ---------------------------------------------------------------------------------------------------------- overlapping
class Overlap(NamedTuple):
    """Tensors that share memory: parameters, or the gradients or states of ordinary parameters."""

    verdict: Verdict
    parameters: Callable[[torch.dtype], Iterable[Tensor]] | None = None
    gradients: Callable[[list[Tensor], float], Iterable[Tensor]] | None = None  # of parameters and a scale
    states: Callable[[torch.optim.Optimizer, list[Tensor]], None] | None = None
    unscale: Verdict | None = None  # of `unscale_`, where that differs
    trained: tuple[bool, bool] = (True, True)  # which of both parameters gets gradients
    dtypes: tuple[torch.dtype, ...] = DTYPES
    modes: tuple[str, ...] = tuple(MODES)


NAMES = ("one.weight", "two.weight")


class WithOverlap(Training):
    def __init__(self, row: Overlap, dtype: torch.dtype, is_theirs: bool) -> None:
        self.row = row
        self.is_separate = is_theirs and row.verdict is RIGHT  # torch clips gradients in place, one for two twice
        memory = row.parameters or (lambda dtype: [numbers(*SHAPE, seed=i).to(dtype) for i in range(2)])
        one, two = memory(dtype)
        self.both = [Parameter(one), one if two is one else Parameter(two)]
        if two is one:
            self.both[1] = self.both[0]
        self.last = Parameter(numbers(4, 9, seed=2).to(dtype))
        self.params = dict(zip((*NAMES, "last.weight"), (*self.both, self.last), strict=True))

    def give(self, step: int, scale: float, overflow: bool = False) -> None:
        for i, (p, is_trained) in enumerate(zip((*self.both, self.last), (*self.row.trained, True), strict=True)):
            p.grad = gradient_of(p, step, i, scale) if is_trained and (step > 0 or not self.row.parameters) else None
        if step > 0 and self.row.gradients:
            for p, grad in zip(self.both, self.row.gradients(self.both, scale), strict=True):
                p.grad = grad.clone() if self.is_separate else grad
        if overflow:
            with torch.no_grad():
                self.both[1].grad.view(-1)[0] = torch.inf

    def after_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        for p in self.both:
            state = optimizer.state.get(p, {})
            p.buffer = state[buffer_of(state)] if state else None
        if self.row.states:
            self.row.states(optimizer, self.both)

    def mend(self, step: int, scale: float) -> None:
        self.give(step, scale)
        for i, p in enumerate(self.both):
            p.grad = gradient_of(p, step, i, scale) if self.row.gradients else None


def fused(dtype: torch.dtype) -> Tensor:
    """The weight of several layers in one tensor."""
    return numbers(8, 12, seed=1).to(dtype)


def flat(scale: float = 1.0) -> Tensor:
    return scale * numbers(60, seed=5)


def same(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def momentum_buffer(p: Tensor) -> Tensor:
    return p.buffer


def buffer_of(state: dict[str, Tensor]) -> str:
    """The name of the state that averages gradients."""
    return "exp_avg" if "exp_avg" in state else "momentum_buffer"


def share_states(between: Callable[[dict[str, Tensor], dict[str, Tensor]], None]) -> Any:
    return lambda optimizer, params: between(*(optimizer.state[p] for p in params))


def one_buffer(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    two[buffer_of(two)] = one[buffer_of(one)]


def buffers_that_overlap(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    memory = torch.zeros(35)
    one[buffer_of(one)], two[buffer_of(two)] = memory[:30].view(SHAPE), memory[5:].view(SHAPE)


def buffers_side_by_side(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    one[buffer_of(one)], two[buffer_of(two)] = torch.stack([one[buffer_of(one)], two[buffer_of(two)]])


def one_tensor_for_two_states(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    square = next((name for name in ("square_avg", "exp_avg_sq") if name in one), None)
    if square:
        one[buffer_of(one)] = one[square]


def the_parameter_as_a_state(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    state = optimizer.state[params[0]]
    state[buffer_of(state)] = params[1].detach()


# fmt: off
OVERLAPS = {
    "parameters: one memory":            Overlap(SENTENCE, lambda d: (x := fused(d), x.view(-1).view(8, 12))),
    "parameters: one part":              Overlap(SENTENCE, lambda d: (x := fused(d), x[2:4])),
    "parameters: partly":                Overlap(SENTENCE, lambda d: ((x := fused(d))[:5], x[4:])),
    "parameters: columns, partly":       Overlap(SENTENCE, lambda d: ((x := fused(d))[:, :7], x[:, 6:])),
    "parameters: transposed":            Overlap(SENTENCE, lambda d: (x := fused(d), x.t())),
    "parameters: two dtypes":            Overlap(SENTENCE, lambda d: (x := fused(d), x.view(torch.bfloat16))),
    "parameters: one, twice":            Overlap(SENTENCE, lambda d: same(fused(d))),
    "parameters: one of them idle":      Overlap(RIGHT, lambda d: (x := fused(d), x.view(-1).view(8, 12)),
                                                 trained=(True, False)),
    "parameters: rows":                  Overlap(RIGHT, lambda d: ((x := fused(d))[:4], x[4:])),
    "parameters: columns":               Overlap(RIGHT, lambda d: ((x := fused(d))[:, :5], x[:, 5:])),
    "parameters: every other":           Overlap(RIGHT, lambda d: ((x := fused(d))[:, ::2], x[:, 1::2])),
    "parameters: a checkerboard":        Overlap(RIGHT, lambda d: ((x := fused(d))[::2, ::2], x[1::2, 1::2])),
    "parameters: an empty one":          Overlap(RIGHT, lambda d: (x := fused(d), x[:0])),
    "gradients: one for two":            Overlap(RIGHT, unscale=EITHER,
                                                 gradients=lambda ps, s: same(
                                                 flat(s).to(ps[0].dtype)[:30].view(SHAPE))),
    "gradients: partly":                 Overlap(RIGHT, unscale=EITHER, gradients=lambda ps, s: (
                                                 (x := flat(s).to(ps[0].dtype))[:30].view(SHAPE), x[5:35].view(SHAPE))),
    "gradients: of one flat":            Overlap(RIGHT, gradients=lambda ps, s: (
                                                 (x := flat(s).to(ps[0].dtype))[:30].view(SHAPE), x[30:].view(SHAPE))),
    "gradients: every other of one":     Overlap(RIGHT, gradients=lambda ps, s: (
                                                 (x := flat(s).to(ps[0].dtype))[::2].view(SHAPE), x[1::2].view(SHAPE))),
    "gradients: the parameter":          Overlap(EITHER, gradients=lambda ps, s: [p.detach() for p in ps],
                                                 dtypes=(torch.float32,), modes=("step",)),
    "gradients: the other parameter":    Overlap(EITHER, gradients=lambda ps, s: [p.detach() for p in ps[::-1]],
                                                 dtypes=(torch.float32,), modes=("step",)),
    "gradients: the momentum buffers":   Overlap(EITHER, gradients=lambda ps, s: [momentum_buffer(p) for p in ps],
                                                 dtypes=(torch.float32,), modes=("step",)),
    "states: one for two":               Overlap(SENTENCE, states=share_states(one_buffer)),
    "states: partly":                    Overlap(SENTENCE, states=share_states(buffers_that_overlap)),
    "states: side by side":              Overlap(RIGHT, states=share_states(buffers_side_by_side)),
    "states: a parameter":               Overlap(SENTENCE, states=the_parameter_as_a_state, dtypes=(torch.float32,)),
    "states: two of one parameter":      Overlap(SENTENCE, states=share_states(one_tensor_for_two_states)),
}
# fmt: on


@isolated
@pytest.mark.parametrize("name", OVERLAPS)
def test_overlaps(name: str) -> None:
    for backend, mode in PLACES:
        if mode in OVERLAPS[name].modes:
            with case(backend, mode), amp_kernels.use_backend(backend):
                play_overlap(OVERLAPS[name], name, mode)


def play_overlap(row: Overlap, name: str, mode: str) -> None:
    verdict = row.unscale if mode == "unscale_" and row.unscale else row.verdict
    for family, dtype in runs(row.dtypes):
        if family is FusedSGD and name == "states: two of one parameter":
            continue  # it has one state
        trainings = Trainings(
            WithOverlap(row, dtype, False),
            WithOverlap(row, torch.float32, True),
            WithOverlap(row, torch.float64, True),
        )
        overflows = verdict is RIGHT and name != "parameters: an empty one" and all(row.trained)
        with case(family.__name__, dtype):
            play(family, mode, verdict, trainings, about=NAMES, overflows=overflows)


# --------------------------------------------------------------------------------------------------------------- others
UNSUPPORTED = [name for name, kind in KINDS.items() if kind.parameter is SENTENCE and kind.context is not fake_mode]


@isolated
@backends
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_frozen_parameters_of_any_kind_are_ignored(backend: str, name: str) -> None:
    """Also by checkpoints and `init_state`."""
    for family, mode in zip(FAMILIES, itertools.cycle(("clipped", "scaler")), strict=False):
        kind = KINDS[name]
        frozen = kind.make(kind.values(numbers(*SHAPE, seed=1)).to(kind.dtypes[-1]))
        if not frozen.is_inference():
            frozen = Parameter(frozen, requires_grad=False)
        trained = [Parameter(numbers(33, seed=0).to(dtype)) for dtype in (torch.float16, torch.float32)]
        twins = [Parameter(p.detach().clone()) for p in trained]
        max_norm = 3.0 if mode == "clipped" else None
        optimizer = family([trained[0], frozen, trained[1]], **FULL[family], max_grad_norm=max_norm)
        expected = family(twins, **FULL[family], max_grad_norm=max_norm)
        optimizer.init_state()
        before = bits(frozen)
        scaler = started(DEVICE, enabled=mode == "scaler")
        for step in range(3):
            for p, twin in zip(trained, twins, strict=True):
                twin.grad = gradient_of(p, step, 0, 1.0)
                p.grad = scaler.get_scale() * twin.grad
            scaler.step(optimizer)
            scaler.update()
            expected.step()
            optimizer.load_state_dict(optimizer.state_dict())
        for p, twin in zip(trained, twins, strict=True):
            assert torch.equal(p, twin)
        for x, y in zip(before, bits(frozen), strict=True):
            assert torch.equal(x, y)


@isolated
@backends
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_gets_its_shape_later(backend: str, mode: str) -> None:
    """The optimizer is made, and takes a step, while its parameters are uninitialized."""

    def build(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
        torch.manual_seed(0)
        return torch.nn.LazyLinear(4, dtype=dtype), torch.nn.Linear(3, 2, dtype=dtype)

    for family in FAMILIES:
        max_norm = 3.0 if mode == "clipped" else None
        ours, theirs, truth = (torch.nn.ModuleList(build(d)) for d in (torch.float32, torch.float32, torch.float64))
        optimizer = family(ours.parameters(), **FULL[family], max_grad_norm=max_norm)
        optimizers = [optimizer, *(TORCH[family](m.parameters(), **FULL[family]) for m in (theirs, truth))]
        scaler = started(DEVICE, enabled=mode in ("scaler", "unscale_"))
        for step in range(4):
            if step == 1:
                for module in (ours, theirs, truth):
                    module[0](torch.ones(2, 5, dtype=module[1].weight.dtype))
                    with torch.no_grad():
                        for i, p in enumerate(module[0].parameters()):
                            p.copy_(numbers(*p.shape, seed=i))
            for module, o in zip((ours, theirs, truth), optimizers, strict=True):
                scale = scaler.get_scale() if module is ours else 1.0
                for i, p in enumerate(module.parameters()):
                    if not isinstance(p, torch.nn.UninitializedParameter):
                        p.grad = gradient_of(p, step, i, scale)
                if module is not ours:
                    if max_norm is not None:
                        torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], max_norm)
                    o.step()
                    continue
                if mode == "unscale_":
                    scaler.unscale_(o)
                scaler.step(o)
                scaler.update()
        assert_within_rule(optimizer, *(list(m.parameters()) for m in (ours, theirs, truth)))


@isolated
@backends
@pytest.mark.parametrize("mode", MODES)
def test_steps_inside_inference_mode(backend: str, mode: str) -> None:
    """The first step is taken inside, so that states are inference tensors; later ones outside and inside."""
    kind = Kind(Tensor.clone, RIGHT, RIGHT, None, RIGHT)
    for family, dtype in ((FusedSGD, torch.float16), (FusedRMSprop, torch.float32)):
        trainings = [WithSubject(kind, "state", d, (d, d)) for d in (dtype, torch.float32, torch.float64)]
        max_norm = 3.0 if mode == "clipped" else None
        params = [list(t.params.values()) for t in trainings]
        optimizer = family(list(trainings[0].params.items()), **FULL[family], max_grad_norm=max_norm)
        references = [TORCH[family](ps, **FULL[family]) for ps in params[1:]]
        scaler = started(DEVICE, enabled=mode in ("scaler", "unscale_"))
        for step in range(4):
            trainings[0].give(step, scaler.get_scale())
            before = everything(optimizer, trainings[0].params)
            try:
                with torch.inference_mode(step % 2 == 0):
                    if mode == "unscale_":
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
            except (RuntimeError, TypeError, ValueError) as error:
                assert step == 1, error  # torch's raises too, since its states are inference tensors
                assert_sentence(error, family, trainings[0].params)
                assert_unchanged(before, everything(optimizer, trainings[0].params))
                break
            scaler.update()
            for training, reference in zip(trainings[1:], references, strict=True):
                training.give(step, 1.0)
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(list(training.params.values()), max_norm)
                reference.step()
            assert_within_rule(optimizer, *params)
