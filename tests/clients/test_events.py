"""Whatever happens between steps, in whatever order: training ends where torch.optim ends on fp64 copies.

A program is data: parameters, options and a list of events. `run` interprets it. After each step every parameter that
was updated is compared with torch's, every other must have kept its bits; at the end so are the states. After every
event the keys in the state that are not the optimizer's must be what they were. A checkpoint that is refused must have
changed nothing. Not among the events: a new ``.data`` at the old address.

States in fewer than 32 bits are compared after each step too. A code must be one of the two around torch's exact
number. Then torch takes our states over, so that both begin the next step with the same numbers.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optim_cases import DTYPES, TORCH, randn
from torch import Tensor

import amp_kernels
from amp_kernels import testing
from amp_kernels.optim import FusedAdam, FusedRMSprop, FusedSGD
from amp_kernels.optim._state import flat, value_of
from amp_kernels.reference.states import GROUP, LEAST_SCALE, MOMENTUM, SECOND_MOMENT, Code, decode, encode

CPU = torch.device("cpu")
INIT_SCALE, GROWTH_INTERVAL = 2.0**10, 3
# Of the largest element, after up to a dozen steps of some 1e-2 each. test_updates.py holds the last bits of a step to
# the error rule.
TOLERANCE = 1e-5
LEAST_LEAN = 4096  # elements of the smallest parameter whose states may have fewer than 32 bits
# How far a state may be from torch's before it is rounded: a share of the element, and a share of its group's largest
# magnitude. A momentum is a sum that may cancel, a second moment is not.
INEXACT = {MOMENTUM: (1e-5, 1e-6), SECOND_MOMENT: (1e-4, 1e-12)}
OURS_ALONE = ("max_grad_norm", "state_dtype")  # options that torch's optimizers lack


DOORS = ("by data", "by detach", "by dlpack", "by numpy")  # of writes in place
# Keys in the state that others own. Not a string: torch loads "x" as "<generator object ...>".
FOREIGN: dict[str, Any] = {"slow": None, "counter": 3, "flag": True, "times": [1, 2]}
BAD_STEPS: dict[str, Any] = {
    "step None": None, "step NaN": torch.tensor(math.nan), "step -5": torch.tensor(-5.0), "step 2^40": 2.0**40,
    "step list": [3], "step vector": torch.ones(2), "step str": "3",
}  # fmt: skip
BAD_STATES: dict[str, Callable[[Any], Any]] = {
    "of another shape": lambda shape: torch.zeros(*shape, 3),
    "int": lambda shape: torch.zeros(shape, dtype=torch.int32),
    "complex": lambda shape: torch.zeros(shape, dtype=torch.complex64),
    "meta": lambda shape: torch.zeros(shape, device="meta"),
    "no tensor": lambda _: 3,
    "sparse": lambda shape: torch.sparse_coo_tensor(size=shape),
}


class Program(NamedTuple):
    """What is printed of a failure is Python: ``run(Program(...))`` repeats it."""

    family: str
    options: dict[str, Any]
    params: list[tuple[tuple[int, ...], str, str]]  # shape, dtype, layout
    scaler: str | None
    events: list[tuple[Any, ...]]  # the name of a method of Training and its arguments


# ------------------------------------------------------------------------------------------------------- gradients
def meddle(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What hooks and overridden steps do to gradients; an overflow stays one, and scaled or not is the same."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for p, what in zip(params, itertools.cycle(("center", "drop", "clone", "halve")), strict=False):
        if what == "center":
            p.grad = p.grad - p.grad.mean()
        elif what == "drop" and p.grad.isfinite().all():
            p.grad = None
        elif what == "halve" and not is_read_only(p.grad):
            p.grad.mul_(0.5)
        else:
            p.grad = p.grad.clone()


class MeddlingSGD(FusedSGD):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            meddle(self)
        return super().step(closure)


class MeddlingRMSprop(FusedRMSprop):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            meddle(self)
        return super().step(closure)


class Container(torch.optim.Optimizer):
    """Holds several optimizers in a list, as torchtitan's container."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__([p for optimizer in optimizers for p in optimizer.param_groups[0]["params"]], {})
        self.optimizers = optimizers

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


FAMILIES = {
    "sgd": FusedSGD,
    "rmsprop": FusedRMSprop,
    "adam": FusedAdam,
    "meddling sgd": MeddlingSGD,
    "meddling rmsprop": MeddlingRMSprop,
}


def is_read_only(x: Tensor) -> bool:
    """Whether torch refuses to write in place: elements share memory, or their negative bit is set."""
    return x.is_neg() or any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A copy; NaN lies in its gaps."""
    if layout == "channels_last" and x.dim() == 4:
        return x.clone(memory_format=torch.channels_last)
    if layout == "transposed":
        dims = tuple(reversed(range(x.dim())))
        return x.permute(dims).clone(memory_format=torch.contiguous_format).permute(dims)
    if layout == "gaps":
        return x.new_full((*x.shape, 2), math.nan)[..., 0].copy_(x)
    if layout == "misaligned":
        return x.new_full((x.numel() + 1,), math.nan)[1:].view(x.shape).copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


def gradient(p: Tensor, values: Tensor, kind: str) -> Tensor:
    """A new gradient of `p` with fp32 `values`."""
    if kind in DTYPES:
        return values.to(DTYPES[kind], copy=True)
    if kind in ("transposed", "gaps", "misaligned", "channels_last"):
        return laid_out(values.to(p.dtype), kind)
    if kind == "expanded" and values.numel():
        return values.flatten()[0].to(p.dtype, copy=True).expand(p.shape)
    if kind == "negated":  # a view with the negative bit
        return torch.complex(torch.zeros_like(values), -values).conj().imag
    return torch.empty_like(p, requires_grad=False).copy_(values)  # laid out as the parameter


# ----------------------------------------------------------------------------------------------------- comparisons
def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    ours, theirs = ours.detach().cpu().double(), theirs.detach().double()
    assert ours.shape == theirs.shape, what
    size = theirs[theirs.isfinite()].abs().sum() and theirs[theirs.isfinite()].abs().max()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    wrong = ~(same | ((ours - theirs).abs() <= TOLERANCE * size + 1e-6))
    assert not wrong.any(), f"{what}: {ours[wrong][:4].tolist()} for {theirs[wrong][:4].tolist()}"


def assert_same(after: Tensor, before: Tensor, what: str) -> None:
    assert not testing.common.differing(after.detach(), before), f"{what} changed"


@torch.no_grad()
def write(x: Tensor, values: Tensor, door: str) -> None:
    """In place, by ways that autograd's version counter shows or does not."""
    if door == "by data":
        x.data.copy_(values)
    elif door == "by detach":
        x.detach().copy_(values)
    elif door == "by dlpack" and not x.is_neg():
        torch.from_dlpack(x.detach().__dlpack__()).copy_(values)
    elif door == "by numpy" and x.device.type == "cpu" and x.dtype is not torch.bfloat16:
        x.detach().numpy()[...] = values.numpy()
    else:
        x.copy_(values)


def bits(value: Any) -> Any:
    """A copy that ``==`` compares, of a state dict or a part of it."""
    if isinstance(value, Tensor):
        flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(v) for key, v in value.items()}
    return [bits(v) for v in value] if isinstance(value, (list, tuple)) else value


LEAN_CODES = {
    "momentum_buffer": MOMENTUM, "square_avg": SECOND_MOMENT, "exp_avg": MOMENTUM, "exp_avg_sq": SECOND_MOMENT,
}  # fmt: skip


def lean_states(family: type, group: dict[str, Any], p: Tensor) -> dict[str, Code]:
    """The names of the states of `p` that are not in fp32."""
    if group["state_dtype"] is torch.float32 or p.numel() < LEAST_LEAN:
        return {}
    if issubclass(family, FusedAdam):
        found = {"exp_avg": True, "exp_avg_sq": not group["amsgrad"]}
    elif issubclass(family, FusedRMSprop):
        found = {"square_avg": not group["centered"], "momentum_buffer": group["momentum"] != 0}
    else:
        found = {"momentum_buffer": group["momentum"] != 0}
    return {name: LEAN_CODES[name] for name, is_lean in found.items() if is_lean}


def in_memory(value: Tensor, p: Tensor) -> Tensor:
    """The elements of a state of `p` in the order in which they are stored."""
    return flat(torch.empty_like(p, dtype=value.dtype, device="cpu", requires_grad=False).copy_(value.detach()))


def as_stored(value: Tensor, p: Tensor, dtype: torch.dtype, code: Code) -> Tensor:
    """A state of `p`, rounded to nearest."""
    dense = torch.empty_like(p, dtype=torch.float32, device="cpu", requires_grad=False).copy_(value)
    memory = flat(dense)
    memory.copy_(memory.bfloat16() if dtype is torch.bfloat16 else decode(*encode(memory.clone(), code), code))
    return dense


def rounding_of(exact: Tensor, codes: Tensor, scale: Tensor, code: Code) -> Tensor:
    """Finds the codes that are neither the one below `exact` nor the one above.

    It computes in fp64, and allows for INEXACT.
    """
    groups = torch.nn.functional.pad(exact, (0, -len(exact) % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(1)
    is_finite, is_zero = largest.isfinite(), largest < (0 if code is SECOND_MOMENT else LEAST_SCALE)
    wanted = torch.where(is_zero, 0.0, largest if code is MOMENTUM else largest.clamp(min=LEAST_SCALE))
    wanted = torch.where(largest == 0, 0.0, wanted)
    is_scale = torch.where(is_finite, (scale - wanted).abs() <= 1e-5 * wanted, scale.isnan())
    relative, of_largest = INEXACT[code]
    fraction = (groups.abs() / largest.clamp(min=LEAST_SCALE)[:, None]).nan_to_num()
    apart = relative * fraction + of_largest

    def position(x: Tensor) -> Tensor:
        return code.levels * x.clamp(0, 1) ** (0.5**code.roots)

    least, most = position(fraction - apart).floor(), position(fraction + apart).floor() + 1
    ours = torch.nn.functional.pad(codes.double(), (0, -len(exact) % GROUP)).view(-1, GROUP)
    has_sign = (ours * groups.nan_to_num() >= 0) | (ours.abs() <= most) & (fraction <= of_largest)
    is_near = (ours.abs() >= least) & (ours.abs() <= most.clamp(max=code.levels)) & has_sign
    is_near &= (ours >= 1) | (code is MOMENTUM)
    is_near = torch.where((is_finite & (wanted > 0))[:, None], is_near, ours == 0)
    return ~(is_near & is_scale[:, None]).flatten()[: len(exact)]


class Training:
    """A program under way. Methods without underscore are its events, on ours and on torch's.

    torch's runs on fp64 copies: in fp32 its norm of 20,000 gradients alone is up to 2e-6 off.
    """

    def __init__(self, program: Program, backend: str, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self.other = "reference"
        self.kind, self.options = FAMILIES[program.family], program.options
        family = next(base for base in self.kind.__mro__ if base in TORCH)
        self.is_rmsprop, self.is_counted = family is FusedRMSprop, family is not FusedSGD
        self.numbers = itertools.count()
        self.params = [self._parameter(spec) for spec in program.params]
        self.ours: Any = self.kind(self.params, **program.options)
        self.copies = [self._copy(p) for p in self.params]
        options = {k: v for k, v in program.options.items() if k not in OURS_ALONE}
        self.theirs = TORCH[family](self.copies, foreach=False, **options)
        kind = {None: None, "ours": amp_kernels.GradScaler, "torch": torch.amp.GradScaler}[program.scaler]
        self.is_torchs_scaler = program.scaler == "torch"
        self.scaler: Any = kind and kind(device.type, init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
        self.scale, self.good_steps, self.skipped_steps = (INIT_SCALE if kind else 1.0), 0, 0
        self.meddles = program.family.startswith("meddling")
        self.saved: dict[str, Any] | None = None
        self.foreign: list[dict[str, Any]] = [{} for _ in self.params]
        self.is_shared = False  # a state lies in shared memory, where other processes expect it
        self.was_converted = False  # or will be at the next step
        self.has_written_early = False
        self.poison: list[Tensor] = []
        self.held: dict[tuple[Tensor, str], Tensor] = {}  # the values of states before a step

    def _values(self, shape: Iterable[int]) -> Tensor:
        return randn(*shape, seed=next(self.numbers), device=self.device)

    def _parameter(self, spec: tuple[tuple[int, ...], str, str]) -> torch.nn.Parameter:
        shape, dtype, layout = spec
        return torch.nn.Parameter(laid_out(self._values(shape).to(DTYPES[dtype]), layout))

    @staticmethod
    def _copy(p: Tensor, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
        return torch.nn.Parameter(p.detach().to("cpu", dtype).clone(memory_format=torch.contiguous_format))

    # ---------------------------------------------------------------------------------------------------------- steps
    def step(self, kinds: list[str], overflow: int | None, unscale: bool, clip: str | None, closure: bool) -> None:
        def backward() -> None:
            self._set_gradients(kinds, overflow)

        closure = closure and self.scaler is None
        self.held = {
            (p, name): value.detach().clone()
            for group in self.ours.param_groups
            for p in group["params"]
            for name, code in LEAN_CODES.items()
            if (value := value_of(self.ours.state.get(p, {}), name, code)) is not None
        }
        if not closure:
            backward()
        given = [p for p in self.params if p.grad is not None]
        is_plain = self.scaler is not None and not self.ours._step_supports_amp_scaling
        if (self.is_torchs_scaler or is_plain) and not given:
            return  # the scaler raises
        dtypes = {p.grad.dtype for p in given}
        if self.is_torchs_scaler and self.device.type == "cuda" and torch.bfloat16 in dtypes:
            return
        refuses = self.is_torchs_scaler and torch.float16 in dtypes  # to unscale
        if is_plain and refuses:
            return
        unscale = unscale and self.scaler is not None and not refuses
        scale = self.scale
        if unscale:
            self._make_writable()
            self.scaler.unscale_(self.ours)
            scale = 1.0
        if clip and not closure and scale == 1.0:
            self._make_writable()
            clipping = torch.nn.utils.clip_grad_norm_ if clip == "torch" else amp_kernels.clip_grad_norm_
            clipping(self.params, 1.0)
        if is_plain:  # the scaler unscales all the same
            self._make_writable()
            scale = 1.0
        weights = [p.detach().clone() for p in self.params]
        grads = (
            None
            if closure or is_plain or self.meddles
            else [None if p.grad is None else p.grad.clone() for p in self.params]
        )
        if self.scaler is None:
            self.ours.step(backward if closure else None)
        else:
            self.scaler.step(self.ours)
            self.scaler.update()
        self._check_step(scale, weights, grads)

    def _set_gradients(self, kinds: list[str], overflow: int | None) -> None:
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=self.device))
        for p, kind in zip(self.params, itertools.cycle(kinds), strict=False):
            values = self.scale * self._values(p.shape)
            values.view(-1)[50::50] = 0.0  # no second moment may become 0 for that
            if not p.requires_grad or kind == "kept":
                continue
            p.grad_dtype = None  # any
            can_write = p.grad is not None and not is_read_only(p.grad)
            if kind == "none":
                p.grad = None
            elif kind == "written" and can_write:
                p.grad.copy_(values)
            elif kind == "moved" and can_write:
                p.grad.data = values.to(p.grad.dtype, copy=True)
            elif kind == "backward" and (p.grad is None or (can_write and p.grad.dtype is p.dtype)):
                with torch.enable_grad():
                    (p * values.to(p.dtype)).sum().backward()
            else:
                if self.is_torchs_scaler and kind in ("expanded", "negated"):
                    kind = "plain"  # that scaler writes
                p.grad = gradient(p, values, kind)
        given = [p.grad for p in self.params if p.grad is not None and p.numel()]
        if overflow is not None and given:
            grad = given[overflow % len(given)]
            grad[(0,) * grad.dim()] = math.nan if overflow % 2 else math.inf

    def _make_writable(self) -> None:
        for p in self.params:
            if p.grad is not None and is_read_only(p.grad):
                p.grad = p.grad.clone(memory_format=torch.contiguous_format)

    def _check_step(self, scale: float, weights: list[Tensor], grads: list[Tensor | None] | None) -> None:
        """Takes torch's step with the gradients that ours left, which are those it used."""
        for p, q in zip(self.params, self.copies, strict=True):
            q.grad = None if p.grad is None else self._copy(p.grad).detach() / scale
        given = [q for q in self.copies if q.grad is not None]
        is_skipped = self.scaler is not None and not all(q.grad.isfinite().all() for q in given)
        self._round_states(is_skipped)
        if self.options["max_grad_norm"] is not None and given:
            norm = torch.nn.utils.clip_grad_norm_(given, self.options["max_grad_norm"])
            if norm.isfinite():
                assert_close(self.ours.grad_norm, norm, "grad_norm")
        if not is_skipped:
            self.theirs.step()
        if self.scaler is not None:
            self._check_scale(is_skipped, bool(given))
        for i, (p, q) in enumerate(zip(self.params, self.copies, strict=True)):
            if grads is not None and grads[i] is not None:
                assert_same(p.grad, grads[i], f"the gradient of parameter {i}")
            if is_skipped or p.grad is None:
                assert_same(p, weights[i], f"parameter {i}")
            elif p.dtype is torch.float32:
                assert_close(p, q, f"parameter {i}")
            else:
                master = self.ours.master(p)
                assert_close(master, q, f"the master of parameter {i}")
                assert_same(p, master.to(p.dtype), f"parameter {i}, which is its master rounded,")
        self._take_states_over(is_skipped)

    def _lean_states(self, is_skipped: bool) -> Iterator[tuple[Tensor, str, torch.dtype, Code, Tensor]]:
        """(parameter, name, dtype, code, torch's state) of states with fewer than 32 bits.

        If a parameter has no gradient, the CPU kernels convert its states, and the reference leaves them. A scaler may
        skip a step without calling it.
        """
        copies = dict(zip(self.params, self.copies, strict=True))
        for group in self.ours.param_groups:
            for p in group["params"]:
                for name, code in lean_states(self.kind, group, p).items():
                    dtype, state = group["state_dtype"], self.ours.state.get(p, {})
                    theirs = self.theirs.state.get(copies[p], {}).get(name)
                    array = state.get(f"{name}_codes" if dtype is torch.int8 else name)
                    # A state that the program wrote lies next to the codes until a step converts it.
                    is_stored = name not in state if dtype is torch.int8 else getattr(array, "dtype", None) is dtype
                    is_dtype = array is not None and is_stored
                    is_converted = is_dtype and array.stride() == torch.empty_like(p).stride()
                    must_be = p.grad is not None and not is_skipped
                    if theirs is not None and (must_be or is_converted):
                        yield p, name, dtype, code, theirs

    def _round_states(self, is_skipped: bool) -> None:
        """Gives torch the states that our step began with, after it converted them to the group's `state_dtype`.

        States that needed no conversion stay as they are. torch's own numbers are compared, but not rounded: they may
        lie on the other side of a half.
        """
        for p, name, dtype, code, theirs in self._lean_states(is_skipped):
            if (value := self.held.get((p, name))) is not None:
                assert_close(value, theirs, f"{name} before the step")
                theirs.copy_(as_stored(value, p, dtype, code))

    def _take_states_over(self, is_skipped: bool) -> None:
        for p, name, dtype, code, theirs in self._lean_states(is_skipped):
            state, exact = self.ours.state[p], in_memory(theirs, p)
            if dtype is torch.int8:
                assert name not in state
                codes, scale = in_memory(state[f"{name}_codes"], p), state[f"{name}_scale"].cpu()
                ours = decode(codes, scale, code)
                wrong = rounding_of(exact, codes, scale.double(), code)
            else:
                assert state[name].dtype is torch.bfloat16 and f"{name}_codes" not in state
                ours = in_memory(state[name], p).float()
                finite = exact[exact.isfinite()]
                most = 2**-7 * exact.abs() + (1e-5 * finite.abs().max() if len(finite) else 0.0) + 1e-12
                wrong = ~(((ours - exact).abs() <= most) | (ours == exact) | (ours.isnan() & ~exact.isfinite()))
            if is_skipped:
                wrong = ~((ours == exact) | (ours.isnan() & exact.isnan()))
            assert not wrong.any(), f"{name}: {ours[wrong][:4].tolist()} for {exact[wrong][:4].tolist()}"
            flat(dense := torch.empty_like(p, dtype=torch.float32, device="cpu", requires_grad=False)).copy_(ours)
            theirs.copy_(dense)

    def _check_scale(self, is_skipped: bool, is_checked: bool) -> None:
        if is_skipped:
            self.scale, self.good_steps, self.skipped_steps = self.scale / 2, 0, self.skipped_steps + 1
        elif is_checked:
            self.good_steps += 1
            if self.good_steps == GROWTH_INTERVAL:
                self.scale, self.good_steps = self.scale * 2, 0
        assert self.scaler.get_scale() == self.scale
        assert self.is_torchs_scaler or self.scaler.skipped_steps == self.skipped_steps

    # ----------------------------------------------------------------------------------------------- between the steps
    def zero_grad(self, set_to_none: bool) -> None:
        self._make_writable()
        self.ours.zero_grad(set_to_none=set_to_none)

    def hyper(self, g: int, name: str, value: float, how: str) -> None:
        ours, theirs = (o.param_groups[g % len(o.param_groups)] for o in (self.ours, self.theirs))
        if name == "state_dtype" and not self.is_shared:  # else it would need another state
            ours[name] = DTYPES.get(str(value), torch.int8)
            self.was_converted = True
        if name not in theirs or (self.is_rmsprop and name == "momentum" and bool(theirs[name]) != bool(value)):
            return  # torch's RMSprop does not follow that
        theirs[name] = value
        if name == "lr" and how == "fill" and isinstance(ours["lr"], Tensor):
            ours["lr"].fill_(value)
        elif name == "lr" and how != "float":
            ours["lr"] = torch.tensor(value, dtype=torch.float64 if how == "tensor64" else torch.float32)
        else:
            ours[name] = value

    def freeze(self, i: int) -> None:
        p = self.params[i % len(self.params)]
        p.requires_grad_(not p.requires_grad)

    def new_data(self, i: int, how: str) -> None:
        """The same values in other memory, or new ones: plus 3, so that no remainder fits."""
        i %= len(self.params)
        p = self.params[i]
        if self.is_shared and how not in ("share", "clone", "new", "in place", *DOORS):
            return  # it would need another state
        if how == "share":
            p.share_memory_()
        elif how == "clone":
            p.data = p.data.clone()
        elif how in ("contiguous", "transposed", "gaps", "channels_last", "misaligned"):
            p.data = laid_out(p.data, how)
        else:
            if how == "in place" or how in DOORS:
                write(p, p.detach() + 3, how)
            else:
                p.data = (p.data + 3).to(DTYPES.get(how, p.dtype))
            master = self.ours.master(p)
            assert_same(p, master.to(p.dtype), f"parameter {i}, which its master rounds to,")
            self.copies[i].data.copy_(master)
        if how in DTYPES:
            self.saved = None

    def new_state(self, k: int, how: str) -> None:
        """Other memory for one of all states, or half its values, by the door that is named."""
        found = [
            (p, q, key)
            for p, q in zip(self.params, self.copies, strict=True)
            for key in self.ours.state.get(p, ())
            if key not in FOREIGN and isinstance(self.ours.state[p][key], Tensor)  # a step may be an int for now
        ]
        if not found:
            return
        p, q, key = found[k % len(found)]
        state = self.ours.state[p]
        value = state[key]
        if how == "data":
            value.data = value.data.clone()
        elif how == "share":
            groups = self.ours.param_groups
            stays = any(
                other is p and self.ours._is_fitted(name, p, groups[g])
                for name, g, other in self.ours._named_parameters()
            )
            if not self.was_converted and stays:  # a step does not replace what is in shared memory, but raises
                value.share_memory_()
                self.is_shared = True
        elif how == "set":
            value.set_(value.clone())
        elif how == "swap":
            torch.utils.swap_tensors(value, value.clone())
        elif how == "entry":
            state[key] = value.clone()
        elif how == "dict":
            self.ours.state[p] = {**state, key: value.clone()}
        elif key not in ("remainder", "step") and not key.endswith("_codes"):
            write(value, value * 0.5, how)
            name = key.removesuffix("_scale")
            if self.theirs.state.get(q, {}).get(name) is not None:
                self.theirs.state[q][name].mul_(0.5)

    def count(self, k: int, steps: int, how: str) -> None:
        """Another count of steps, written in place by a door or as an entry."""
        found = [
            (p, q) for p, q in zip(self.params, self.copies, strict=True) if self.theirs.state.get(q, {}).get("step")
        ]
        if not found:
            return
        p, q = found[k % len(found)]
        state = self.ours.state[p]
        if how == "int" or not isinstance(state["step"], Tensor):
            state["step"] = steps
        elif how == "float":
            state["step"] = torch.tensor(float(steps))
        else:
            write(state["step"], torch.full_like(state["step"], steps), how)
        self.theirs.state[q]["step"].fill_(steps)

    def reset(self, i: int, how: str) -> None:
        """A new start of the states: by the documented way, which keeps the master, or by deleting everything."""
        everyone = range(len(self.params))
        for j in everyone if how == "clear" else [i % len(self.params)]:
            p, q = self.params[j], self.copies[j]
            if how == "documented":
                state = self.ours.state.get(p, {})
                for key in state.keys() - {"remainder", *FOREIGN}:
                    del state[key]
            else:
                self.foreign[j] = {}
                if p.dtype is not torch.float32:  # the weight becomes the master
                    q.data.copy_(p)
            self.theirs.state.pop(q, None)
        if how == "clear":
            self.ours.state.clear()
        elif how == "delete":
            self.ours.state.pop(self.params[i % len(self.params)], None)

    def write_early(self, i: int) -> None:
        """A state of a parameter that was not updated yet. Written states of no elements are not told from new ones."""
        p, q = self.params[i % len(self.params)], self.copies[i % len(self.params)]
        group = next(group for group in self.ours.param_groups if any(p is other for other in group["params"]))
        names = [name for name in self.ours._state_names(group) if name is not None]
        step = self.ours.state.get(p, {}).get("step")
        if not (p.requires_grad and names and p.numel()):
            return
        if step is not None and (not self.is_counted or int(step) > 0):
            return
        if self.is_counted:  # torch's SGD has its buffer alone
            if step is None and self.has_written_early:
                return  # init_state would round what was written before, to the dtype of the group
            if step is None:
                self.ours.init_state()
            self.theirs.state[q] = {"step": torch.tensor(0.0), **{name: torch.zeros_like(q) for name in names}}
        value = self._values(p.shape).abs()
        self.has_written_early = True
        self.ours.state[p][names[0]] = torch.empty_like(p, dtype=torch.float32, requires_grad=False).copy_(value)
        self.theirs.state[q][names[0]] = value.to("cpu", torch.float64)

    def new_scale(self, value: float) -> None:
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=self.device))
            self.scaler.update(value)
            self.scale = value

    def contained(self, overflow: bool) -> None:
        """A step of several optimizers in a container. After an overflow they stand still, and each says so."""
        kind = next(base for base in self.kind.__mro__ if base in TORCH)
        dtypes = (torch.float32, torch.bfloat16)  # torch's scaler unscales no fp16
        params = [torch.nn.Parameter(p.detach().clone()) for p in self.params if p.dtype in dtypes and p.numel()]
        if not params:
            return
        options = {**self.options, "max_grad_norm": None}
        container = Container([kind([p], **options) for p in params])
        scaler: Any = (amp_kernels.GradScaler if self.scaler is None else type(self.scaler))(self.device.type)
        scaler.scale(torch.zeros((), device=self.device))
        for p in params:
            p.grad = torch.full_like(p, 8.0)
        # Under torch's scaler, only an optimizer's own gradients are checked before its first step.
        for p in params[-1:] if isinstance(scaler, amp_kernels.GradScaler) else params:
            p.grad[(0,) * p.dim()] = math.inf if overflow else 8.0
        before = [p.detach().clone() for p in params]
        scaler.step(container)
        scaler.update()
        for optimizer, p, old in zip(container.optimizers, params, before, strict=True):
            assert bool(optimizer.step_was_skipped) == overflow, "step_was_skipped of an optimizer in a container"
            if overflow:
                assert_same(p, old, "a parameter of a container")

    def attach(self, i: int, key: str) -> None:
        """Adds a key of another library to the state, as Lookahead's slow weights. torch casts floats on loading."""
        i %= len(self.params)
        p = self.params[i]
        value = FOREIGN[key]
        if key == "slow":
            value = torch.full(p.shape, float(next(self.numbers) % 128), device=self.device)
        self.ours.state[p][key] = value
        self.foreign[i][key] = copy.deepcopy(value)

    def _check_foreign(self) -> None:
        for i, (p, expected) in enumerate(zip(self.params, self.foreign, strict=True)):
            found = {key: value for key, value in self.ours.state.get(p, {}).items() if key in FOREIGN}
            assert found.keys() == expected.keys(), f"keys of others in the state of parameter {i}"
            for key, value in expected.items():
                is_same = torch.equal(found[key].float(), value.float()) if key == "slow" else found[key] == value
                assert is_same, f"{key} of parameter {i}"

    def cast_around(self, reads: list[str]) -> None:
        """Weights are cast to fp32, as for an evaluation, and back; what reads the optimizer meanwhile changes nothing.

        A checkpoint made meanwhile has the masters if the weights tell which 16-bit dtype they had.
        """
        low = [(i, p, p.dtype) for i, p in enumerate(self.params) if p.dtype is not torch.float32]
        dtypes = {dtype for _, _, dtype in low}
        is_ambiguous = any(torch.equal(p.bfloat16().float(), p.float()) for _, p, _ in low)
        is_told = dtypes <= {torch.bfloat16} or (dtypes == {torch.float16} and not is_ambiguous)
        masters = [self.ours.master(p) for _, p, _ in low]
        for _, p, _ in low:
            p.data = p.data.float()
        for read in reads:
            if read == "save" and is_told:
                self.save()
            elif read == "master":
                for p in self.params:
                    self.ours.master(p)
            else:
                self.ours.state_dict()
        for _, p, dtype in low:
            p.data = p.data.to(dtype)
        for (i, p, _), master in zip(low, masters, strict=True):
            assert_same(self.ours.master(p), master, f"the master of parameter {i}")

    def add_group(self, spec: tuple[tuple[int, ...], str, str], lr: float) -> None:
        if len(self.params) > 6:
            return
        p = self._parameter(spec)
        q = self._copy(p)
        self.params.append(p)
        self.copies.append(q)
        self.foreign.append({})
        self.ours.add_param_group({"params": [p], "lr": lr})
        self.theirs.add_param_group({"params": [q], "lr": lr})
        self.saved = None

    def hook(self) -> None:
        self.meddles = True
        self.ours.register_step_pre_hook(meddle)

    def wrap(self) -> None:
        """As a profiler wraps a step."""
        self.meddles = True
        step, optimizer = self.ours.step, self.ours

        def meddling(closure: Callable[[], Any] | None = None) -> Any:
            if closure is None:
                meddle(optimizer)
            return step(closure)

        optimizer.step = meddling

    # ---------------------------------------------------------------------------------------------------- checkpoints
    def save(self) -> None:
        self.saved = copy.deepcopy(
            {
                "weights": [p.detach() for p in self.params],
                "copies": [q.detach() for q in self.copies],
                "ours": self.ours.state_dict(),
                "theirs": self.theirs.state_dict(),
                "scaler": self.scaler and self.scaler.state_dict(),
                "expected": (self.scale, self.good_steps, self.skipped_steps),
                "foreign": self.foreign,
            }
        )

    def load(self, how: str, weights_first: bool) -> None:
        if self.saved is None:
            return
        saved = copy.deepcopy(self.saved)
        state = saved["ours"]
        if how != "same":
            groups = [{"params": group["params"]} for group in self.ours.param_groups]
            self.ours = self.kind(groups, **self.options)
        # torch needs a step where there are other keys.
        has_steps = all("step" in entry for entry in state["state"].values())
        if how == "torch" and has_steps and all(p.dtype is torch.float32 for p in self.params):
            groups = [{"params": [self._copy(p, p.dtype) for p in group["params"]]} for group in self.ours.param_groups]
            between = type(self.theirs)(groups, lr=0.1)
            between.load_state_dict(state)
            state = between.state_dict()
        if not weights_first:
            self.ours.load_state_dict(state)
        with torch.no_grad():
            for p, weight in zip(self.params, saved["weights"], strict=True):
                p.copy_(weight)
            for q, weight in zip(self.copies, saved["copies"], strict=True):
                q.copy_(weight)
        if weights_first:
            self.ours.load_state_dict(state)
        self.theirs.load_state_dict(saved["theirs"])
        for i, (p, q) in enumerate(zip(self.params, self.copies, strict=True)):
            if p.dtype is not torch.float32 and "master" not in state["state"].get(i, {}):
                # Not stepped before it was saved. A checkpoint without any master leaves the remainders of now.
                master = self.ours.master(p)
                assert_same(p, master.to(p.dtype), f"parameter {i}, which its master rounds to,")
                q.data.copy_(master)
        self._check_loaded(state["state"])
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        self.scale, self.good_steps, self.skipped_steps = saved["expected"]
        self.foreign = saved["foreign"]

    def _check_loaded(self, saved: dict[int, dict[str, Any]]) -> None:
        """A group keeps its `state_dtype`: the fp32 states of a checkpoint are rounded to nearest."""
        places = {p: i for i, p in enumerate(self.params)}
        for group in self.ours.param_groups:
            for p in group["params"]:
                for name, code in lean_states(self.kind, group, p).items():
                    value = saved.get(places[p], {}).get(name)
                    if value is not None:
                        loaded = value_of(self.ours.state[p], name, code)
                        rounded = as_stored(value, p, group["state_dtype"], code)
                        assert_same(loaded.cpu().float(), rounded, f"loaded {name}")
                        self.theirs.state[self.copies[places[p]]][name].copy_(loaded)

    def refused(self, k: int, how: str) -> None:
        """A checkpoint with a fault in it."""
        state = copy.deepcopy(self.ours.state_dict())
        counted = [entry for entry in state["state"].values() if entry.get("step")]
        if not counted:
            return
        entry = counted[k % len(counted)]
        needed = sorted(entry.keys() - {"step", "master", *FOREIGN})  # these are there after a step
        tensors = sorted(entry.keys() - {"step", *FOREIGN})
        shape = next((entry[key].shape for key in tensors), ())
        if how == "missing" and needed and self.is_counted:
            del entry[needed[k % len(needed)]]
        elif how in BAD_STEPS:
            entry["step"] = BAD_STEPS[how]
        elif how in BAD_STATES and tensors:
            entry[tensors[k % len(tensors)]] = BAD_STATES[how](shape)
        elif how == "family":
            other = next(kind for kind in TORCH if not issubclass(self.kind, kind))
            state = other([p.detach().clone() for p in self.params], lr=99.0).state_dict()
            assert len(state["param_groups"]) == 1
            sizes = [len(group["params"]) for group in self.ours.param_groups]
            numbers = iter(range(sum(sizes)))
            groups = [{**state["param_groups"][0], "params": [next(numbers) for _ in range(n)]} for n in sizes]
            state["param_groups"] = groups
        else:
            return
        for group in state["param_groups"]:
            group["lr"] = 99.0

        def everything() -> Any:
            states = [dict(self.ours.state.get(p, {})) for p in self.params]
            groups = [{k: v for k, v in group.items() if k != "params"} for group in self.ours.param_groups]
            return bits([self.params, states, groups, self.ours.state_dict()["state"]])

        before = everything()
        try:
            self.ours.load_state_dict(state)
        except (TypeError, ValueError) as error:
            assert "load_state_dict" in str(error), error
        else:
            raise AssertionError(f"a wrong checkpoint ({how}) was loaded")
        assert everything() == before, f"a refused checkpoint ({how}) changed something"

    def copied(self, how: str) -> None:
        """All that a training script holds; gradients, hooks and wrapped steps stay behind, as with torch."""
        everything = (self.params, self.ours, self.scaler)
        if how == "deepcopy":
            everything = copy.deepcopy(everything)
        elif how == "pickle":
            everything = pickle.loads(pickle.dumps(everything))
        else:
            file = io.BytesIO()
            torch.save(everything, file)
            everything = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        self.params, self.ours, self.scaler = everything

    # ------------------------------------------------------------------------------------------------ the surroundings
    def other_backend(self) -> None:
        self.backend, self.other = self.other, self.backend

    def collect(self) -> None:
        gc.collect(1)  # what a program leaves is young; all of torch takes 0.3 s

    def _poison(self) -> None:
        """Takes the memory that an event freed: who reads it by an old address gets NaN, who writes it is seen."""
        assert all(x.isnan().all() for x in self.poison), "freed memory was written"
        self.poison = []
        dtypes = [(p.numel(), dtype) for p in self.params for dtype in {torch.float32, p.dtype}]
        self.poison = [torch.full((n,), math.nan, dtype=dtype, device=self.device) for n, dtype in dtypes]

    def _check_states(self) -> None:
        ours, theirs = self.ours.state_dict()["state"], self.theirs.state_dict()["state"]
        for i in range(len(self.params)):
            ignored = {"master", *FOREIGN, *(() if self.is_counted else ("step",))}
            mine = {k: v for k, v in ours.get(i, {}).items() if k not in ignored}
            other = {k: v for k, v in theirs.get(i, {}).items() if v is not None}
            assert mine.keys() == other.keys(), f"states of parameter {i}: {sorted(mine)} for {sorted(other)}"
            for key, value in other.items():
                assert_close(torch.as_tensor(mine[key]), torch.as_tensor(value), f"{key} of parameter {i}")


def run(program: Program, backend: str = "cpu", device: torch.device = CPU) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GradScaler: optimizers stepped, but none of their")
        _run(Training(program, backend, device), program)


def _run(training: Training, program: Program) -> None:
    for name, *arguments in program.events:
        with amp_kernels.use_backend(training.backend):
            getattr(training, name)(*arguments)
        training._poison()
        training._check_foreign()
    training._check_states()


# ------------------------------------------------------------------------------------------------------- programs
def choices(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


LRS = choices(0.1, 0.05, 0.01)
SMALL = st.integers(0, 3)
LAYOUTS = choices("contiguous", "transposed", "gaps", "channels_last", "misaligned")
SPECS = st.tuples(choices((7,), (67, 71), (2, 3, 5, 4), (), (0,), (3, 0, 2), (1,), (20000,)), choices(*DTYPES), LAYOUTS)
GRADIENTS = choices(
    "plain", "written", "moved", "kept", "none", "backward", *DTYPES,
    "transposed", "gaps", "channels_last", "misaligned", "expanded", "negated",
)  # fmt: skip
STEP = st.tuples(
    st.just("step"),
    st.lists(GRADIENTS, min_size=1, max_size=4),
    choices(None, None, None, 0, 1, 2),  # which gradient overflows
    choices(False, False, True),
    choices(None, None, "torch", "ours"),
    choices(False, False, True),
)
HYPER = choices(
    ("momentum", 0.5), ("momentum", 0.9), ("momentum", 0.0), ("dampening", 0.5),
    ("weight_decay", 0.0), ("weight_decay", 0.02), ("nesterov", True), ("nesterov", False), ("maximize", True),
    ("alpha", 0.9), ("eps", 1e-2), ("betas", (0.5, 0.9)), ("state_dtype", "int8"), ("state_dtype", "bf16"),
    ("state_dtype", "fp32"),
)  # fmt: skip
OTHER = st.one_of(
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.builds(lambda g, hyper: ("hyper", g, *hyper, "float"), SMALL, HYPER),
    st.tuples(
        st.just("hyper"),
        choices(0, 0, 1),
        st.just("lr"),
        choices(0.05, 0.02, 0.01),
        choices("float", "tensor", "tensor", "tensor64", "fill"),
    ),
    st.tuples(st.just("freeze"), SMALL),
    st.tuples(
        st.just("new_data"),
        SMALL,
        choices("clone", "share", "contiguous", "transposed", "gaps", "misaligned", "new", "in place", *DOORS, *DTYPES),
    ),
    st.tuples(st.just("new_state"), st.integers(0, 11), choices("data", "share", "set", "swap")),
    st.tuples(st.just("new_state"), st.integers(0, 11), choices("entry", "dict", "halve", *DOORS)),
    st.tuples(st.just("count"), SMALL, choices(1, 7, 100), choices("int", "float", "in place", *DOORS)),
    st.tuples(st.just("reset"), SMALL, choices("documented", "documented", "delete", "clear")),
    st.tuples(st.just("write_early"), SMALL),
    st.tuples(st.just("new_scale"), choices(2.0**5, 2.0**8, 2.0**12)),
    st.tuples(st.just("contained"), st.booleans()),
    st.tuples(st.just("attach"), SMALL, choices(*FOREIGN)),
    st.tuples(st.just("cast_around"), st.lists(choices("state_dict", "master", "save"), min_size=1, max_size=2)),
    st.tuples(st.just("refused"), SMALL, choices("missing", "missing", "family", *BAD_STEPS, *BAD_STATES)),
    st.tuples(st.just("save")),
    st.tuples(st.just("load"), choices("same", "new", "torch"), st.booleans()),
    st.tuples(st.just("copied"), choices("deepcopy", "pickle", "save")),
    st.tuples(st.just("add_group"), SPECS, LRS),
    st.tuples(choices("hook", "wrap", "other_backend", "collect")),
)
OPTIONS = {
    "lr": LRS, "momentum": choices(0.0, 0.9), "weight_decay": choices(0.0, 0.01), "maximize": st.booleans(),
    "max_grad_norm": choices(None, 1.0), "state_dtype": choices(torch.float32, torch.int8, torch.bfloat16),
}  # fmt: skip
SGD = st.fixed_dictionaries({**OPTIONS, "dampening": choices(0.0, 0.5), "nesterov": st.booleans()}).map(
    lambda o: {**o, "nesterov": bool(o["nesterov"] and o["momentum"] and not o["dampening"])}
)
# A small eps would enlarge the last bit of a gradient that clipping and weight decay nearly cancel.
RMSPROP = st.fixed_dictionaries(
    {**OPTIONS, "alpha": choices(0.99, 0.9), "eps": st.just(1e-3), "centered": st.booleans()}
)
ADAM = st.fixed_dictionaries(
    {
        **{key: value for key, value in OPTIONS.items() if key != "momentum"},
        "betas": choices((0.9, 0.99), (0.0, 0.9)),
        "eps": st.just(1e-3),
        "amsgrad": st.booleans(),
        "decoupled_weight_decay": st.booleans(),
    }
)
PROGRAMS = st.builds(
    lambda family, *rest: Program(*family, *rest),
    st.one_of(
        st.tuples(choices("sgd", "sgd", "meddling sgd"), SGD),
        st.tuples(choices("rmsprop", "rmsprop", "meddling rmsprop"), RMSPROP),
        st.tuples(st.just("adam"), ADAM),
    ),
    st.lists(SPECS, min_size=1, max_size=4),
    choices(None, "ours", "torch"),
    st.lists(st.tuples(st.lists(OTHER, max_size=3), STEP), min_size=1, max_size=8).map(
        lambda rounds: [event for others, step in rounds for event in (*others, step)]
    ),
)
SETTINGS = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def test_events(device, backend):
    @settings(SETTINGS, max_examples=100, derandomize=True)  # `make nightly` runs others for 10 minutes
    @given(PROGRAMS)
    def check(program: Program) -> None:
        run(program, backend, device)

    check()
