"""The CUDA kernels, run on the CPU: arrays between guard bands, threads and blocks in every order; and the
shared cases."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_on_cpu import backend
from cuda_on_cpu.arena import Arena
from cuda_on_cpu.build import missing_headers
from torch import Tensor

from amp_kernels import testing

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPES = [pytest.param(dtype, id=name) for dtype, name in zip(CODES, ("fp32", "fp16", "bf16"), strict=True)]
CHUNK = 1024
# Around a 16-byte access, around a chunk, and (as 33 chunks) more chunks than the emulator's grid has blocks.
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, 3 * CHUNK + 5)
LARGE = 65537

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
orders = pytest.mark.parametrize("order", backend.ORDERS)
offsets = pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])


def randn(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(sizes: list[int], chunk: int = CHUNK) -> list[tuple[int, int]]:
    return [(t, k) for t, size in enumerate(sizes) for k in range(-(-size // chunk))]


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, with NaN equal to NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


# -------------------------------------------------------------------------------- the gradient pass
@dataclasses.dataclass
class Pass:
    """One gradient pass over `grads` (None: a tensor that is skipped), its arguments and its results."""

    grads: Sequence[Tensor | None]
    scale: float | None = None
    divide: bool = False
    write: bool = False
    clear: bool = True
    found_inf: float = 0.0
    record: tuple[int, int, int, int] = (0, 4, 2, 1)
    chunks: list[tuple[int, int]] | None = None
    chunk: int = CHUNK
    offset: int = 0

    def run(self, order: str = "forwards") -> Pass:
        arena = Arena(Arena.NAN if order == "forwards" else Arena.FINITE)
        # int64 record, fp64 partials: their own alignment, whatever the gradients' is.
        self.out = [None if g is None else arena.place(g, self.offset) for g in self.grads]
        sizes = [0 if g is None else g.numel() for g in self.grads]
        rows = [
            [s if g is not None else CHUNK for s, g in zip(sizes, self.grads, strict=True)],
            [address(g) for g in self.out],
            [0 if g is None else CODES[g.dtype] for g in self.grads],
        ]
        if self.chunks is None:
            self.chunks = cut(rows[0], self.chunk)
        chunks = torch.tensor(self.chunks, dtype=torch.int32).reshape(-1, 2)
        self.partials = arena.place(torch.full((len(chunks),), math.nan, dtype=torch.float64))
        self.flag = arena.place(torch.tensor([self.found_inf]))[0]
        self.norm = arena.place(torch.tensor([123.0]))[0]
        self.after = arena.place(torch.tensor(self.record))
        scale = None if self.scale is None else arena.place(torch.tensor([self.scale]))[0]
        with backend.scheduled(order, seed=7):
            backend._unscale_table_(
                arena.place(torch.tensor(rows)), arena.place(chunks), self.chunk, scale, self.divide,
                self.write, self.clear, self.partials, self.flag, self.norm, self.after,
            )  # fmt: skip
        arena.check()
        return self

    @property
    def factor(self) -> Tensor:
        scale = torch.tensor(1.0 if self.scale is None else self.scale)
        return 1 / scale if self.divide else scale

    def check_values(self) -> None:
        """Everything a pass over finite gradients promises."""
        sums = []
        for t, k in self.chunks or ():
            grad = self.grads[t]
            part = torch.zeros(0) if grad is None else grad[k * self.chunk : (k + 1) * self.chunk]
            sums.append(part.double().square().sum())
        expected = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)
        torch.testing.assert_close(self.partials, expected, rtol=1e-6, atol=0)
        norm = (expected.sum().sqrt() * self.factor.double()).float()
        torch.testing.assert_close(self.norm, norm, rtol=1e-6, atol=0)
        assert self.flag.item() == (0.0 if self.clear else self.found_inf)
        passes = self.record[1] + self.clear
        assert self.after.tolist() == [0, passes, self.record[2], self.record[3]]
        self.check_gradients()

    def check_gradients(self) -> None:
        for before, after in zip(self.grads, self.out, strict=True):
            if before is not None and after is not None:
                expected = (before.float() * self.factor).to(before.dtype) if self.write else before
                assert same(after, expected)


@orders
@offsets
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_pass(dtype: torch.dtype, write: bool, offset: int, order: str) -> None:
    grads = [randn(size, size, dtype) for size in SIZES]
    Pass(grads, scale=1 / 48, write=write, offset=offset).run(order).check_values()


@orders
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_pass_with_more_chunks_than_blocks(dtype: torch.dtype, order: str) -> None:
    Pass([randn(LARGE, 1, dtype)], scale=3.0, divide=True, write=True, chunk=2 * CHUNK).run(order).check_values()


@orders
def test_gradient_pass_over_mixed_dtypes_and_skipped_tensors(order: str) -> None:
    grads = [None, *(randn(size, size, dtype) for size in (9, 1025) for dtype in CODES), None]
    Pass(grads, scale=0.125, write=True).run(order).check_values()


@orders
@pytest.mark.parametrize("magnitude", [0.0, 1e-40, 1e-30, 1e-13, 1e19, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_pass_over_squares_that_fp32_does_not_hold(dtype: torch.dtype, magnitude: float, order: str) -> None:
    grads = [(randn(size, size).double() * magnitude).to(dtype) for size in SIZES]
    mixed = torch.cat([torch.ones(9).to(dtype), grads[-1], torch.zeros(CHUNK).to(dtype)])
    Pass([*grads, mixed], scale=0.5, write=True).run(order).check_values()


@pytest.mark.parametrize("n", [0, 1, 500, 501, 4000, 4001, 4500, 4501, 12345])
def test_send(n: int) -> None:
    arena = Arena(Arena.NAN)
    values, to = arena.place(torch.arange(n)), arena.place(torch.full((n,), -1))
    backend._send_(values, to)
    arena.check()
    assert torch.equal(to, values)


@pytest.mark.parametrize("grads", [[], [torch.zeros(0)], [None]], ids=["no-tensor", "no-element", "all-skipped"])
@pytest.mark.parametrize("clear", [False, True], ids=["keep", "clear"])
def test_gradient_pass_over_nothing(grads: list[Tensor | None], clear: bool) -> None:
    result = Pass(grads, clear=clear, found_inf=2.0).run()
    result.check_values()
    assert result.norm.item() == 0.0


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, 0.0),
        (torch.float32, -0.0),
        (torch.float32, 3e38),  # its square, and the sum of two, are beyond fp32
        (torch.float32, 1e19),  # its square is not, the sum of a pack is
        (torch.float32, 1e-30),  # its square is below fp32
        (torch.float32, 1e-21),  # its square is a denormal fp32, with few bits left
        (torch.float32, 1e-44),
        (torch.bfloat16, 3e38),
        (torch.bfloat16, 1e-30),
        (torch.float16, 65504.0),
        (torch.float16, 6e-8),
    ],
)
def test_norm_of_extreme_elements(dtype: torch.dtype, value: float, scale: float | None) -> None:
    x = torch.full((2 * CHUNK + 3,), value, dtype=dtype)
    for grads in (
        [x],
        [x[:1]],
        [torch.cat([torch.zeros(CHUNK, dtype=dtype), x[:9], torch.zeros(5, dtype=dtype)])],
    ):
        result = Pass(grads, scale=scale).run()
        expected = grads[0].double().norm() * (1 if scale is None else scale)
        assert result.flag.item() == 0.0
        if expected > torch.finfo(torch.float32).max:
            assert result.norm.item() == math.inf
        else:
            torch.testing.assert_close(result.norm, expected.float(), rtol=1e-6, atol=1e-45)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clear", [False, True], ids=["keep", "clear"])
def test_overflow_is_found_wherever_it_is(clear: bool, dtype: torch.dtype, value: float) -> None:
    size = 2 * CHUNK + 9
    for order, position in zip(itertools.cycle(backend.ORDERS), (0, 6, 7, CHUNK - 1, CHUNK, size - 2, size - 1)):
        grads = [randn(n, n, dtype) for n in (5, size, 20)]
        grads[1][position] = value
        result = Pass(grads, scale=0.5, write=True, clear=clear).run(order)
        assert result.flag.item() == 1.0 and not math.isfinite(result.norm.item())
        assert result.after.tolist() == ([0, 5, 5, 1] if clear else [0, 4, 2, 1])
        bad = [(t, k) == (1, position // CHUNK) for t, k in result.chunks or ()]
        assert result.partials.isfinite().logical_not().tolist() == bad
        result.check_gradients()


@orders
def test_an_opposite_pair_of_infinities_and_a_lone_huge_chunk(order: str) -> None:
    x = torch.full((CHUNK + 1,), 3e38)
    x[CHUNK] = -math.inf
    result = Pass([x, x.neg()]).run(order)
    assert result.partials.isfinite().tolist() == [True, False, True, False]
    assert result.flag.item() == 1.0 and result.after.tolist() == [0, 5, 5, 0]


@orders
def test_first_overflow_is_the_smallest_tensor_whatever_the_order_of_chunks(order: str) -> None:
    grads = [randn(2 * CHUNK, t) for t in range(8)]
    for t in (6, 3, 5):
        grads[t][CHUNK + t] = math.inf
    result = Pass(grads, chunks=cut([2 * CHUNK] * 8)[::-1]).run(order)
    assert result.after.tolist() == [0, 5, 5, 3]


@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("clear", [False, True], ids=["keep", "clear"])
def test_found_inf_of_an_earlier_pass(clear: bool, found_inf: float) -> None:
    Pass([randn(9, 0)], clear=clear, found_inf=found_inf).run().check_values()


def test_gradient_pass_has_the_same_bits_in_every_order() -> None:
    grads = [randn(size, size, dtype) for size in (*SIZES, LARGE) for dtype in CODES]
    results = [Pass(grads).run(order) for order in backend.ORDERS]
    assert len({result.norm.item() for result in results}) == 1
    assert all(torch.equal(result.partials, results[0].partials) for result in results)


# -------------------------------------------------------------------------------------- the updates
@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One configuration, by the arguments of torch.optim, and how a table op is told."""

    name: str
    options: dict[str, Any]

    @property
    def states(self) -> list[str | None]:
        momentum = "momentum_buffer" if self.options.get("momentum") else None
        if self.name == "SGD":
            return [momentum]
        return ["square_avg", momentum, "grad_avg" if self.options.get("centered") else None]

    def hyper(self) -> list[float]:
        get = self.options.get
        sign = -1.0 if get("maximize") else 1.0
        if self.name == "SGD":
            columns = [get("momentum", 0), 1 - get("dampening", 0), get("weight_decay", 0)]
            columns += [float(get("nesterov", False)), sign]
        else:
            alpha = get("alpha", 0.99)
            columns = [alpha, 1 - alpha, get("eps", 1e-8), get("weight_decay", 0), sign, get("momentum", 0)]
        return columns + [0.0] * (8 - len(columns))

    def torch_step(
        self,
        dtype: torch.dtype,
        param: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
        lr: float,
        first: bool,
    ) -> list[Tensor]:
        """Parameter and states after torch's own step in this dtype."""
        p = torch.nn.Parameter(param.to(dtype, copy=True))
        p.grad = grad.to(dtype)
        optimizer = getattr(torch.optim, self.name)([p], lr=lr, foreach=False, **self.options)
        if not (self.name == "SGD" and first):
            copies = {name: state.to(dtype, copy=True) for name, state in states.items()}
            optimizer.state[p] = {"step": torch.tensor(3.0), **copies}
        optimizer.step()
        return [p.detach(), *(optimizer.state[p][name] for name in states)]


OPTIMIZERS = [
    Optimizer("SGD", {}),
    Optimizer("SGD", {"weight_decay": 0.1, "maximize": True}),
    Optimizer("SGD", {"momentum": 0.9}),
    Optimizer("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    Optimizer("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True}),
    Optimizer("RMSprop", {}),
    Optimizer("RMSprop", {"alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    Optimizer("RMSprop", {"momentum": 0.9}),
    Optimizer("RMSprop", {"centered": True, "momentum": 0.7, "weight_decay": 0.01}),
    Optimizer("RMSprop", {"centered": True}),
]
optimizers = pytest.mark.parametrize(
    "optimizer",
    OPTIMIZERS,
    ids=lambda o: "-".join([o.name.lower(), *(f"{k}={v}" for k, v in o.options.items())]),
)
SGD, RMSPROP = OPTIMIZERS[3], OPTIMIZERS[8]
families = pytest.mark.parametrize("optimizer", [SGD, RMSPROP], ids=["sgd", "rmsprop"])


class Step:
    """One update of tensors of these sizes, with two groups that differ in learning rate."""

    LR = (0.1, 0.03)

    def __init__(
        self,
        optimizer: Optimizer,
        sizes: tuple[int, ...] = SIZES,
        param_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        *,
        first: bool = False,
        without_grad: tuple[int, ...] = (),
        chunk: int = CHUNK,
        offset: int = 0,
    ) -> None:
        self.optimizer, self.first, self.param_dtype, self.grad_dtype = (
            optimizer,
            first,
            param_dtype,
            grad_dtype,
        )
        self.chunk = chunk
        self.arena = arena = Arena()
        low = param_dtype != torch.float32
        self.masters = [arena.place(randn(n, n), offset) for n in sizes]
        # A 16-bit parameter is written, never read: NaN must not get anywhere.
        self.params = [
            arena.place(torch.full((n,), math.nan, dtype=param_dtype), offset) if low else master
            for n, master in zip(sizes, self.masters, strict=True)
        ]
        self.grads = [arena.place(randn(n, n + 1, grad_dtype), offset) for n in sizes]
        self.states = {name: [self._state(name, n, offset) for n in sizes] for name in optimizer.states if name}
        rows: list[list[int]] = [
            list(sizes),
            [0 if t in without_grad else address(g) for t, g in enumerate(self.grads)],
            [CODES[grad_dtype]] * len(sizes),
            [t % 2 for t in range(len(sizes))],
            [address(p) for p in self.params],
            [address(m) if low else 0 for m in self.masters],
        ]
        for name in (*optimizer.states, None, None):
            rows.append([address(s) for s in self.states[name]] if name else [0] * len(sizes))
        self.without_grad = without_grad
        self.table = arena.place(torch.tensor(rows[:9]))
        self.chunks = arena.place(torch.tensor(cut(list(sizes), chunk), dtype=torch.int32).reshape(-1, 2))
        self.steps = arena.place(torch.full((len(self.chunks),), 0 if first else 3, dtype=torch.int32))
        self.hyper = arena.place(torch.tensor([optimizer.hyper()] * 2))
        self.rates = arena.place(torch.tensor(self.LR))
        self.lr = arena.place(torch.tensor([address(rate) for rate in self.rates]))
        self.before = [x.clone() for x in self.masters]
        self.states_before = {name: [x.clone() for x in states] for name, states in self.states.items()}

    def _state(self, name: str, size: int, offset: int) -> Tensor:
        if name == "momentum_buffer":
            # SGD's first step does not read the buffer.
            unread = self.first and self.optimizer.name == "SGD"
            values = torch.full((size,), math.nan) if unread else randn(size, size + 2)
        else:
            values = randn(size, size + 3) * 0.1 if name == "grad_avg" else randn(size, size + 3).square() + 0.1
        return self.arena.place(values, offset)

    def run(
        self,
        order: str = "forwards",
        *,
        grad_scale: float | None = None,
        found_inf: float | None = None,
        grad_norm: float | None = None,
        max_norm: float = 0.0,
    ) -> Step:
        def scalar(value: float | None) -> Tensor | None:
            return None if value is None else self.arena.place(torch.tensor([value]))[0]

        scalars = [scalar(grad_scale), scalar(found_inf), scalar(grad_norm)]
        self.frozen = self.arena.bytes()
        with backend.scheduled(order, seed=11):
            backend._update_table_(
                self.optimizer.name.lower(), self.table, self.chunks, self.chunk, self.steps, self.hyper, self.lr,
                CODES[self.param_dtype], CODES[self.grad_dtype], *scalars, max_norm,
            )  # fmt: skip
        self.arena.check()
        return self

    def check(self, factor: float = 1.0) -> None:
        """Every tensor against torch.optim in fp64, by the error rule: twice torch's own fp32 error."""
        for t, (master, param) in enumerate(zip(self.masters, self.params, strict=True)):
            states = {name: state[t] for name, state in self.states_before.items()}
            ours = [master, *(state[t] for state in self.states.values())]
            if t in self.without_grad:
                exact = [self.before[t], *states.values()]
                assert all(same(a, b) for a, b in zip(ours, exact, strict=True))
                continue
            # float(): torch rounds the learning rate to fp32 as the device holds it
            lr = torch.tensor(self.LR[t % 2]).item()
            results = [
                self.optimizer.torch_step(
                    dtype, self.before[t], self.grads[t].to(dtype) * factor, states, lr, self.first
                )
                for dtype in (torch.float64, torch.float32)
            ]
            for mine, exact, single in zip(ours, *results, strict=True):
                if mine.numel() == 0:
                    continue
                bound = 2 * (single.double() - exact).abs().max() + 1e-7 * exact.abs().max()
                assert (mine.double() - exact).abs().max() <= bound
            if self.param_dtype != torch.float32:
                assert torch.equal(param, master.to(self.param_dtype))
        expected = [(0 if self.first else 3) + (t not in self.without_grad) for t, _ in self.chunks.tolist()]
        assert self.steps.tolist() == expected

    def assert_nothing_written(self) -> None:
        assert torch.equal(self.arena.bytes(), self.frozen)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
@families
def test_update_for_every_pair_of_dtypes(
    optimizer: Optimizer, param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    for order, offset in zip(backend.ORDERS, (0, 1, 3), strict=True):
        Step(optimizer, SIZES, param_dtype, grad_dtype, offset=offset).run(order).check()


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@optimizers
def test_update_for_every_configuration(optimizer: Optimizer, first: bool) -> None:
    Step(optimizer, (9, 2 * CHUNK + 1), torch.bfloat16, first=first).run().check()
    Step(optimizer, (9, 2 * CHUNK + 1), first=first).run("shuffled").check()


@orders
@families
def test_update_with_more_chunks_than_blocks(optimizer: Optimizer, order: str) -> None:
    Step(optimizer, (LARGE,), torch.float16, torch.float16, chunk=2 * CHUNK).run(order).check()


@orders
@families
def test_update_skips_tensors_without_gradient(optimizer: Optimizer, order: str) -> None:
    Step(optimizer, (9, 1025, 1025, 8), without_grad=(1, 3)).run(order).check()


@pytest.mark.parametrize("found_inf", [1.0, 2.0, math.nan])
@families
def test_a_skipped_step_writes_nothing(optimizer: Optimizer, found_inf: float) -> None:
    Step(optimizer, param_dtype=torch.float16).run(found_inf=found_inf).assert_nothing_written()


@families
def test_update_of_nothing(optimizer: Optimizer) -> None:
    Step(optimizer, (0,)).run().assert_nothing_written()
    Step(optimizer, (9,), without_grad=(0,)).run().assert_nothing_written()


@pytest.mark.parametrize(
    ("scalars", "factor"),
    [
        ({"found_inf": 0.0}, 1.0),
        ({"grad_scale": 8.0, "found_inf": 0.0}, 0.125),
        ({"grad_norm": 10.0, "max_norm": 2.5}, 2.5 / (10.0 + 1e-6)),
        ({"grad_norm": 0.5, "max_norm": 2.5}, 1.0),
        ({"grad_norm": 0.0, "max_norm": 2.5}, 1.0),
        ({"grad_scale": 4.0, "grad_norm": 10.0, "max_norm": 5.0}, 0.125),
    ],
)
@families
def test_scale_and_clip(optimizer: Optimizer, scalars: dict[str, Any], factor: float) -> None:
    Step(optimizer, (1025,), torch.bfloat16, torch.bfloat16).run(**scalars).check(factor)


@families
def test_nan_stays_in_its_element(optimizer: Optimizer) -> None:
    step = Step(optimizer, (1025,))
    step.grads[0][[3, 1024]] = torch.tensor([math.nan, math.inf])
    step.run()
    assert step.masters[0].isfinite().logical_not().nonzero().flatten().tolist() == [3, 1024]


def test_centered_rmsprop_survives_a_variance_rounded_below_zero() -> None:
    step = Step(RMSPROP, (1025,))
    step.grads[0].fill_(0.1)
    step.states["square_avg"][0].copy_(step.states["grad_avg"][0].fill_(0.1).square() * (1 - 1e-6))
    assert step.run().masters[0].isfinite().all()


@families
def test_update_has_the_same_bits_in_every_order(optimizer: Optimizer) -> None:
    results = [torch.cat(Step(optimizer, param_dtype=torch.float16).run(order).masters) for order in backend.ORDERS]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# ----------------------------------------------------------------------------------------- shared cases
SHARED = [case for family in (testing.lists, testing.int8) for cases in family.CASES.values() for case in cases]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: f"{case.op}-{case}")
def test_shared_case(case: testing.Case) -> None:
    with backend.serving(), backend.scheduled("shuffled"):
        for result in case.body(torch.device("cpu")):
            assert result.passed, f"{case}: {result}"
