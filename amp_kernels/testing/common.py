"""What the cases of all operators use: comparisons, the bound for errors, inputs, the class `Case`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import use_backend

Make = Callable[[], list[Tensor]]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes that operators take, by their names in cases."""
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, 65537)
"""Numbers of elements: 0 and 1, then around 8, around 1024, and one number above the length of the largest chunk.

A 16-byte access holds 8 elements of 16 bits, or 4 elements in fp32. A kernel takes a tensor in chunks of at most 65536
elements (csrc/table.h).
"""


# ------------------------------------------------------------------------------------------------- comparison
@dataclass(frozen=True)
class Difference:
    """The one wrong element that a message about a failed comparison shows.

    `index` is None if shapes or dtypes differ. `got` and `expected` are then texts with dtype and shape.
    """

    shape: tuple[int, ...]
    dtype: str
    index: tuple[int, ...] | None
    got: float | int | str
    expected: float | int | str


class Result(NamedTuple):
    """One comparison of a case.

    Attributes:
        name: What was compared.
        error: The error of the result. If no error is allowed, it is a count, such as the number of elements that
            differ.
        allowed: The largest error that passes.
        at: One wrong element, for the message; None if the comparison passed.

    Examples:
        >>> from amp_kernels import testing
        >>> testing.Result("params[0]", error=1e-8, allowed=1e-7).passed
        True
    """

    name: str
    error: float
    allowed: float
    at: Difference | None = None

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; False for NaN."""
        return self.error <= self.allowed


def _difference(got: Tensor, expected: Tensor, is_wrong: Tensor) -> Difference:
    """Describe the first element for which `is_wrong` is True."""
    index = tuple(is_wrong.nonzero()[0].tolist())
    values = (x.detach()[index].item() for x in (got, expected))
    return Difference(tuple(got.shape), _name(got.dtype), index, *values)


def _kind_difference(got: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Difference:
    """Describe a tensor whose shape or dtype is not the expected one."""
    texts = (f"{_name(d)} {tuple(s)}" for d, s in ((got.dtype, got.shape), (dtype, shape)))
    return Difference(tuple(got.shape), _name(got.dtype), None, *texts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_kind(name: str, got: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Result:
    """Compare the shape and dtype of a tensor with the expected ones."""
    is_right = got.dtype == dtype and tuple(got.shape) == tuple(shape)
    return Result(name, float(not is_right), 0, None if is_right else _kind_difference(got, shape, dtype))


def _none_wrong(name: str, got: Tensor, expected: Tensor, is_wrong: Tensor) -> Result:
    count = int(is_wrong.sum())
    return Result(name, count, 0, _difference(got, expected, is_wrong) if count else None)


def exact(name: str, got: Tensor, expected: Tensor) -> Result:
    """Compare two tensors element by element, as `differing` does."""
    got, expected = got.detach().cpu(), expected.detach().cpu()
    kind = same_kind(name, got, expected.shape, expected.dtype)
    return _none_wrong(name, got, expected, ~_equal(got, expected)) if kind.passed else kind


def unchanged(name: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> Result:
    """Compare tensors from before and after a call, bit by bit."""
    pairs = [(new.cpu(), old.cpu()) for old, new in zip(before, after, strict=True)]
    results = [_none_wrong(name, new, old, _bits(old) != _bits(new)) for new, old in pairs]
    return Result(name, sum(r.error for r in results), 0, next((r.at for r in results if r.at), None))


def within(name: str, ours: Tensor, theirs: Tensor, truth: Tensor, least: float = 0.0) -> Result:
    """Apply the rule of `error_and_allowed`. An error of at most `least` passes even if the rule allows less."""
    error, allowed = error_and_allowed(ours, theirs, truth)
    allowed = max(allowed, least)
    if error <= allowed:
        return Result(name, error, allowed)
    if ours.shape != theirs.shape:
        return Result(name, error, allowed, _kind_difference(ours, theirs.shape, ours.dtype))
    distance = _distances(ours, theirs, truth)
    return Result(name, error, allowed, _difference(ours.cpu(), truth.cpu(), distance == distance.max()))


def _distances(ours: Tensor, theirs: Tensor, truth: Tensor) -> Tensor:
    """Return the distance of each element from the truth: inf for NaN.

    If torch's result is not finite, the distance is 0 or inf, as `error_and_allowed` says.
    """
    ours, theirs, truth = (x.detach().double().cpu() for x in (ours, theirs, truth))
    distance = (ours - truth).abs()
    is_right = (ours == theirs) | ours.isnan() & theirs.isnan()
    is_right |= truth.float().isfinite() & (distance <= 1e-6 * truth.abs())
    return distance.nan_to_num(math.inf, math.inf).where(theirs.isfinite(), torch.where(is_right, 0.0, math.inf))


def error_and_allowed(ours: Tensor, theirs: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the error of a result and the bound for it.

    The rule is `max|ours - fp64| <= 2 * max|torch - fp64| + 1e-7 * max|fp64|`. It applies where torch's result is
    finite. After an overflow in fp32, an element of torch's result may be NaN or inf. `ours` must then be the same
    value, or, if fp32 can hold the truth, a number within a relative 1e-6 of it. If it is neither, or if shapes differ,
    the error is inf. A number near the truth is accepted, because torch's own kernels do not all overflow at the same
    inputs. In `torch.optim.RMSprop`, for example, a GPU multiplies the square `g * g` by `1 - alpha`, but a CPU
    multiplies `(1 - alpha) * g` by `g`.
    """
    if ours.shape != theirs.shape:
        return math.inf, 0.0
    is_finite = theirs.isfinite()
    error = _distances(ours, theirs, truth).max().item() if ours.numel() > 0 else 0.0
    if not is_finite.any():
        return error, 0.0
    theirs, truth = (x.detach().double()[is_finite] for x in (theirs, truth))
    return error, (2 * (theirs - truth).abs().max() + 1e-7 * truth.abs().max()).item()


def compare(name: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], truth: Sequence[Tensor]) -> Iterator[Result]:
    """Apply the rule of `error_and_allowed` to each large tensor, and once to all small tensors together.

    Small tensors have fewer than 1000 elements. They share one bound, because a bound for each of them could be too
    tight. For example, torch's error for a tensor with a single element may happen to be 0.
    """
    rows = list(zip(ours, theirs, truth, strict=True))
    for i, row in enumerate(rows):
        if row[0].numel() >= 1000:
            yield within(f"{name}[{i}]", *row)
    small = {i: row for i, row in enumerate(rows) if row[0].numel() < 1000}
    if small:
        flat = [[x.flatten().double() for x in row] for row in small.values()]
        ours_flat, theirs_flat, truth_flat = (torch.cat(column) for column in zip(*flat, strict=True))
        result = within(f"small {name}", ours_flat, theirs_flat, truth_flat)
        if not result.passed:  # find the small tensor that is wrong
            i = max(small, key=lambda i: error_and_allowed(*small[i])[0])
            result = result._replace(name=f"{name}[{i}]", at=within(name, *small[i]).at)
        yield result


def norms(name: str, ours: Tensor, truth: Tensor) -> Result:
    """Compare norms with the fp64 norms `truth`, to a relative 1e-6. NaN must be NaN, and inf must be inf."""
    if truth.numel() == 0:
        return Result(name, 0, 0)
    error = _distances(ours, truth, truth)
    # If a result is a denormal, rounding it changes it by up to 2^-150, half of the smallest positive fp32 number.
    allowed = (1e-6 * truth.cpu()).nan_to_num(0.0, 0.0) + 2.0**-150
    is_worst = error - allowed == (error - allowed).max()
    result = Result(name, error[is_worst][0].item(), allowed[is_worst][0].item())
    return result if result.passed else result._replace(at=_difference(ours.cpu(), truth.cpu(), is_worst))


def differing(ours: Tensor, expected: Tensor) -> int:
    """Return the number of elements that differ. If shapes or dtypes differ, all elements count as different.

    0.0 differs from -0.0. All NaNs are equal.
    """
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return max(ours.numel(), expected.numel(), 1)
    return int((~_equal(ours, expected)).sum())


def _equal(ours: Tensor, expected: Tensor) -> Tensor:
    equal = (ours == expected) & (ours.signbit() == expected.signbit())
    return equal | (ours.isnan() & expected.isnan())


def changed(before: Tensor, after: Tensor) -> int:
    """Return the number of elements with a changed bit, of 16 or 32 bits each."""
    return int((_bits(before) != _bits(after)).sum())


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def written_outside(view: Tensor) -> int:
    """Return how many elements around a view no longer have the value of `LAYOUTS`. This overwrites the view."""
    if view._base is None:
        return 0
    view.fill_(_poison(view.dtype))
    return differing(view._base, torch.full_like(view._base, _poison(view.dtype)))


def _poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min


# ----------------------------------------------------------------------------------------------------- inputs
_seeds_begin_at = 0


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Set the seed of the inputs that are made inside a ``with`` block. Outside, as in the tests, the seed is 0."""
    global _seeds_begin_at
    _seeds_begin_at = seed
    try:
        yield
    finally:
        _seeds_begin_at = 0


def generator(seed: int) -> torch.Generator:
    """Return a generator of random numbers. The numbers depend on this seed and on the seed of `seeded`."""
    return torch.Generator().manual_seed(1_000_003 * _seeds_begin_at + seed)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a CPU tensor of normally distributed random numbers, the same on every machine.

    The numbers are drawn in fp32, then rounded to `dtype`.
    """
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def surrounded(x: Tensor, shape: Sequence[int], index: Any) -> Tensor:
    """Copy `x` into the part `[index]` of a tensor of this shape, whose other elements are NaN or the least integer."""
    return torch.full(tuple(shape), _poison(x.dtype), dtype=x.dtype, device=x.device)[index].view_as(x).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "transposed": lambda x: x.mT.clone(memory_format=torch.contiguous_format).mT,
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "reversed": lambda x: x.permute(3, 2, 1, 0).clone(memory_format=torch.contiguous_format).permute(3, 2, 1, 0),
    "sliced": lambda x: surrounded(x, (*x.shape[:-1], x.shape[-1] + 5), (..., slice(2, -3))),
    "every_other": lambda x: surrounded(x, (*x.shape[:-1], 2 * x.shape[-1]), (..., slice(None, None, 2))),
    "misaligned": lambda x: surrounded(x, (x.numel() + 2,), slice(1, -1)),
}
"""Functions that copy a tensor of four dimensions into another layout.

The memory around the copy is filled with NaN, or with the smallest integer of the dtype.
"""
SHAPE = (3, 5, 7, 11)
"""The shape of the inputs in these layouts."""

LENGTH = 4099  # elements in each tensor of VALUES


def _spread(dtype: torch.dtype) -> Tensor:
    powers = 28 if dtype is not torch.float16 else 4
    exponents = torch.linspace(-powers, powers, LENGTH, dtype=torch.float64)
    return randn(LENGTH).double() * 10**exponents


# Each function takes a dtype, and returns numbers for which arithmetic in that dtype may go wrong. The numbers are fp32
# or fp64. `values` below rounds them to the dtype.
VALUES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "zeros": lambda _: torch.zeros(LENGTH, dtype=torch.float64),
    "negative_zeros": lambda _: -torch.zeros(LENGTH, dtype=torch.float64),
    "denormals": lambda dtype: (torch.arange(LENGTH) % 7 - 3) * (torch.finfo(dtype).smallest_normal / 4),
    "tiny": lambda dtype: torch.full((LENGTH,), max(1e-30, torch.finfo(dtype).smallest_normal)).double(),
    "largest": lambda dtype: (1.0 - 2.0 * (torch.arange(LENGTH) % 2)) * torch.finfo(dtype).max,
    "one_largest": lambda dtype: (torch.arange(LENGTH) == 2000) * torch.finfo(dtype).max,
    # All rounding errors have the same sign, so they add up.
    "constant": lambda _: torch.full((LENGTH,), 0.1, dtype=torch.float64),
    "spread": _spread,
}


def values(kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Return one tensor, with the numbers of `VALUES[kind]`."""
    return [VALUES[kind](dtype).to(dtype)]


def of_sizes(dtype: torch.dtype, sizes: Sequence[int] = SIZES, seed: int = 0) -> list[Tensor]:
    """Return a random vector for each size."""
    return [randn(n, dtype=dtype, seed=seed + n) for n in sizes]


def mixed(seed: int = 0, factor: float = 1.0) -> list[Tensor]:
    """Return random tensors of all `SIZES` and 0-dim ones, with dtypes that alternate between fp32, fp16 and bf16."""
    cycle = list(DTYPES.values())
    tensors = [randn(n, dtype=cycle[i % 3], seed=seed + n) for i, n in enumerate((*SIZES, *SIZES[:-1], 0, 5))]
    return [factor * x for x in (*tensors, *(randn(dtype=dtype, seed=seed) for dtype in cycle))]


def shaped(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return one random tensor of shape `SHAPE`, which every one of `LAYOUTS` takes."""
    return [randn(*SHAPE, dtype=dtype, seed=seed)]


def many(dtype: torch.dtype) -> list[Tensor]:
    """Return 40 random vectors of 1 to 13 elements."""
    return [randn(1 + i % 13, dtype=dtype, seed=i) for i in range(40)]


def with_element(value: float, position: str, dtype: torch.dtype) -> list[Tensor]:
    """Return three random vectors, whose "first", "middle" or "last" element is replaced by `value`.

    The "middle" one is in the second vector, which kernels divide into several chunks. (Chunks have their maximum of
    65536 elements only if all tensors together have far more elements than these three.)
    """
    tensors = [randn(n, dtype=dtype, seed=n) for n in (7, 40001, 1033)]
    tensor, index = {"first": (0, 0), "middle": (1, 20000), "last": (2, -1)}[position]
    tensors[tensor][index] = value
    return tensors


def place(tensors: Sequence[Tensor], device: torch.device, layout: str = "contiguous") -> list[Tensor]:
    """Copy tensors to a device, into one of the `LAYOUTS`."""
    return [LAYOUTS[layout](x.to(device)) for x in tensors]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of each tensor."""
    return [x.clone() for x in tensors]


# ------------------------------------------------------------------------------------------------------ cases
def lost_context(device: torch.device | str) -> str:
    """Return CUDA's error message if the process has lost its CUDA context, otherwise "".

    After a read of an illegal address, for example, CUDA refuses all further calls of the process.
    """
    try:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@contextlib.contextmanager
def rounded_once() -> Iterator[None]:
    """Make cuBLAS round each sum only once inside a `with` block.

    By default cuBLAS may split a sum and round the parts to 16 bits. The rule of `error_and_allowed` does not allow for
    those roundings.
    """
    settings = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(settings, name) for name in names]
    try:
        for name in names:
            setattr(settings, name, False)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)


class Case(NamedTuple):
    """One operator with one set of inputs and options. `str(case)` is its id.

    Attributes:
        op: Name of the operator, such as `"sgd_"`.
        dtype: A key of `DTYPES`; two keys, of parameters and of gradients, with a slash between them; `"mixed"`; or
            `"int8"`.
        name: Name of the inputs and options.
        body: Runs the operator on tensors of a device, and yields the comparisons.

    Examples:
        >>> from amp_kernels import testing
        >>> str(testing.CASES["sgd_"][0])
        'fp32-plain'
    """

    op: str
    dtype: str
    name: str
    body: Callable[[torch.device], Iterator[Result]]

    def __str__(self) -> str:
        return f"{self.dtype}-{self.name}"

    def run(self, backend: str, device: str | torch.device | None = None) -> list[Result]:
        """Run the case on a backend.

        Args:
            backend: A name as in `use_backend`, or `"default"` to force none.
            device: Device of the tensors. If None, it is CUDA for the backend `"cuda"`, and the CPU for all others.

        Returns:
            The comparisons.

        Examples:
            >>> from amp_kernels import testing
            >>> all(result.passed for result in testing.CASES["sgd_"][0].run("reference"))
            True
        """
        with rounded_once() if backend == "default" else use_backend(backend):
            return list(self.body(torch.device(device or ("cuda" if backend == "cuda" else "cpu"))))


def by_operator(cases: Iterable[Case]) -> dict[str, tuple[Case, ...]]:
    """Return the cases of each operator, by the operator's name."""
    every = tuple(cases)
    return {op: tuple(case for case in every if case.op == op) for op in dict.fromkeys(case.op for case in every)}
