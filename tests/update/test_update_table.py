"""The updates over tables, as every backend's kernels do them, arrays between guard bands."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest
import torch
from cuda_on_cpu import backend as emulator
from table_kernels import CHUNK, LARGE, SIZES, Launcher, address, cut, randn, why_not_emulated
from torch import Tensor

from amp_kernels import testing
from amp_kernels.families import FAMILIES
from amp_kernels.ops.table import DTYPE_CODES, HYPER_COLUMNS, RECORD, STATE_DTYPES, UPDATE_ROWS, Row
from amp_kernels.reference._master import join
from amp_kernels.reference._master import split as split_
from amp_kernels.testing.common import DTYPES, differing, error_and_allowed
from amp_kernels.testing.updates import UPDATES

# NumPy, underneath Triton's interpreter, warns where IEEE arithmetic overflows; that it does is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EXAMPLES = [(family, name) for family, update in UPDATES.items() for name in update.examples]
emulated = pytest.mark.skipif(why_not_emulated() is not None, reason=str(why_not_emulated()))
families = pytest.mark.parametrize("family", FAMILIES)
low_dtypes = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # half a second a case, where others take milliseconds
# In elements of 16 bits. To Triton's interpreter, which has no packs, they are all one case.
offsets = pytest.mark.parametrize("offset", [1] if INTERPRETED else [1, 2, 3])
FORMS = {name: (dtype, False) for name, dtype in DTYPES.items()} | {
    "fp16-split": (FP16, True),
    "bf16-split": (BF16, True),
}
FEW = (9, CHUNK, 2 * CHUNK + 1)
AROUND = (*range(1, 24), 2 * CHUNK - 1, *(2 * CHUNK + n for n in range(9)))  # packs and chunks
AVERAGE = {"weight_decay": 1.0, "maximize": True}  # of the steps that averages are


class Step:
    """Tensors of one parameter dtype and one gradient dtype, in two groups with their own rates and options.

    Args:
        split: whether masters of 16-bit parameters are stored as remainders.
        grad_split: whether the gradients are weights with remainders.
        options: the options of torch's optimizer that differ from its defaults.
        second: the options of the second group, which has every other tensor (default: `options`).
        steps: how many steps the tensors have taken.
        without_grad: the tensors without a gradient, by index.
        first_chunk: the chunk at which the arrays begin. Elements of earlier chunks have no memory.
    """

    LR = (0.1, 0.03)

    def __init__(
        self,
        launcher: Launcher,
        family: str,
        options: Mapping[str, Any] | None = None,
        sizes: tuple[int, ...] = SIZES,
        param_dtype: torch.dtype = FP32,
        grad_dtype: torch.dtype = FP32,
        *,
        split: bool = True,
        grad_split: bool = False,
        second: Mapping[str, Any] | None = None,
        steps: int = 3,
        without_grad: tuple[int, ...] = (),
        chunk: int = 2 * CHUNK,  # of a shorter one the CUDA kernel makes no wide access
        first_chunk: int = 0,
        offset: int = 0,
    ) -> None:
        self.launcher, self.family, self.steps_before = launcher, family, steps
        self.param_dtype, self.grad_dtype, self.without_grad = param_dtype, grad_dtype, without_grad
        self.split = split and param_dtype != FP32
        self.chunk, self.begin, self.arena = chunk, chunk * first_chunk, launcher.arena()
        options = UPDATES[family].examples["full"] if options is None else options
        self.options = (options, options if second is None else second)
        place = self.arena.place
        fp32 = [randn(n, 1) for n in sizes]
        if self.split:
            self.params, self.masters = (
                [place(x, offset) for x in xs] for xs in zip(*(split_(x, param_dtype) for x in fp32), strict=True)
            )
        else:
            self.masters = [place(x, offset) for x in fp32]
            # A 16-bit parameter beside a full master is written, never read: NaN must not get anywhere.
            self.params = self.masters
            if param_dtype != FP32:
                self.params = [place(torch.full((n,), math.nan, dtype=param_dtype), offset) for n in sizes]
        self.grad_remainders: list[Tensor] | None = None
        grads = [randn(n, 2) for n in sizes]
        if grad_split:
            grads, remainders = map(list, zip(*(split_(x, grad_dtype) for x in grads), strict=True))
            self.grad_remainders = [place(x, offset) for x in remainders]
        self.grads: list[Tensor | None] = [
            None if t in without_grad else place(x.to(grad_dtype), offset) for t, x in enumerate(grads)
        ]
        kept = {name for options in self.options for name in UPDATES[family].states(dict(options))}
        self.states = {
            name: [place(self._state(name, n, steps), offset) for n in sizes] if name in kept else []
            for name in FAMILIES[family].states
        }
        self.chunks = place(torch.tensor(cut(sizes, chunk, first_chunk), dtype=torch.int32).reshape(-1, 2))
        self.steps = [place(torch.tensor([steps], dtype=torch.int32)) for _ in sizes]
        self.record = place(torch.zeros(RECORD, dtype=torch.int64))
        hyper = torch.full((2, HYPER_COLUMNS), math.nan)
        for row, group in zip(hyper, self.options, strict=True):
            columns = FAMILIES[family].hyper_of({**UPDATES[family].defaults(), **group})
            row[: len(columns)] = torch.tensor(columns)
        self.hyper = place(hyper)
        self.rates = place(torch.tensor(self.LR))
        self.before = [x.cpu().clone() for x in self.fp32()]
        self.states_before = {name: [x.cpu().clone() for x in states] for name, states in self.states.items()}

    def fp32(self) -> list[Tensor]:
        """What is updated; of split masters copies."""
        if not self.split:
            return self.masters
        return [join(p, m) for p, m in zip(self.params, self.masters, strict=True)]

    def _state(self, name: str, size: int, steps: int) -> Tensor:
        """As they are allocated; what the first step sets must not be read. Then with a variance that is positive."""
        if steps == 0:
            return torch.full((size,), math.nan if name == UPDATES[self.family].optimizer._set_at_first_step else 0.0)
        return randn(size, 3).square() + 0.1 if "sq" in name else 0.05 * randn(size, 4)

    def table(self) -> Tensor:
        count = len(self.masters)
        table = torch.zeros(UPDATE_ROWS, count, dtype=torch.int64)
        rows = {Row.NUMEL: [self.begin + m.numel() for m in self.masters], Row.GROUP: [t % 2 for t in range(count)]}
        rows[Row.GRAD_DTYPE] = [DTYPE_CODES[self.grad_dtype]] * count
        arrays = {Row.GRAD: self.grads, Row.PARAM: self.params, Row.MASTER: self.masters}
        if self.param_dtype == FP32:
            del arrays[Row.MASTER]
        if self.grad_remainders is not None:
            arrays[Row.MASTER] = self.grad_remainders
        arrays |= {Row.STATE + k: tensors for k, tensors in enumerate(self.states.values()) if tensors}
        rows[Row.STEP] = [address(step) for step in self.steps]
        for row, values in (rows | {r: [address(x, self.begin) for x in xs] for r, xs in arrays.items()}).items():
            table[row] = torch.tensor(values)
        return self.arena.place(table)

    def present(self) -> int:
        return sum(bool(tensors) << k for k, tensors in enumerate(self.states.values()))

    def run(
        self,
        *,
        grad_scale: float | None = None,
        found_inf: float | None = None,
        grad_norm: float | None = None,
        max_norm: float = 0.0,
    ) -> Step:
        scalars = [
            None if value is None else self.arena.place(torch.tensor([value]))[0]
            for value in (grad_scale, found_inf, grad_norm)
        ]
        rates = self.arena.place(torch.tensor([address(rate) for rate in self.rates]))
        table = self.table()
        self.frozen = self.arena.bytes()
        self.launcher.update_table_(
            self.family, table, self.chunks, self.chunk, self.record, self.hyper, rates,
            DTYPE_CODES[self.param_dtype], self.split or self.grad_remainders is not None,
            DTYPE_CODES[self.grad_dtype], self.present(), STATE_DTYPES[FP32], *scalars, max_norm,
        )  # fmt: skip
        self.arena.check()
        return self

    def torch_step(self, t: int, dtype: torch.dtype, factor: float) -> list[Tensor]:
        """Parameter and states of tensor `t` after torch's own step in this dtype."""
        grad = self.grads[t]
        assert grad is not None
        param = torch.nn.Parameter(self.before[t].to(dtype, copy=True))
        if self.grad_remainders is not None:
            grad = join(grad, self.grad_remainders[t])
        param.grad = grad.cpu().to(dtype) * factor
        lr = torch.tensor(self.LR[t % 2]).item()  # rounded to fp32, as the device holds it
        optimizer = UPDATES[self.family].plain([param], lr, self.options[t % 2])
        if self.steps_before:
            states = {name: states[t].to(dtype, copy=True) for name, states in self.states_before.items() if states}
            optimizer.state[param] = {"step": torch.tensor(float(self.steps_before)), **states}
        optimizer.step()
        return [param.detach(), *(optimizer.state[param][name] for name, states in self.states.items() if states)]

    def check(self, factor: float = 1.0) -> None:
        """Every tensor against torch.optim in fp64, by the error rule: twice torch's own fp32 error."""
        for t, (master, param) in enumerate(zip(self.fp32(), self.params, strict=True)):
            ours = [master.cpu(), *(states[t].cpu() for states in self.states.values() if states)]
            if self.grads[t] is None:
                before = [self.before[t], *(states[t] for states in self.states_before.values() if states)]
                assert sum(map(differing, ours, before)) == 0
                continue
            results = [self.torch_step(t, dtype, factor) for dtype in (FP32, torch.float64)]
            for mine, plain, exact in zip(ours, *results, strict=True):
                error, allowed = error_and_allowed(mine, plain, exact)
                assert error <= allowed
            if self.param_dtype != FP32:
                assert torch.equal(param, master.to(self.param_dtype))
        begun = [t for t, k in self.chunks.tolist() if k == 0 and self.grads[t] is not None]
        assert [int(step) for step in self.steps] == [self.steps_before + (t in begun) for t in range(len(self.steps))]
        assert not self.record.any()

    def assert_nothing_written(self) -> None:
        assert torch.equal(self.arena.bytes(), self.frozen)


# -------------------------------------------------------------------------------------------------------------- values
def _pairs() -> list[Any]:
    """The formula reads fp32, whatever the dtypes are. So one family has all pairs in the interpreter."""
    return [
        pytest.param(family, *FORMS[form], grad_dtype, id=f"{family}-{form}-{grad}")
        for family in FAMILIES
        for form in FORMS
        for grad, grad_dtype in DTYPES.items()
        if not INTERPRETED or family == "sgd" or grad_dtype == FORMS[form][0]
    ]


@pytest.mark.parametrize(("family", "param_dtype", "split", "grad_dtype"), _pairs())
def test_every_pair_of_dtypes(
    family: str, param_dtype: torch.dtype, split: bool, grad_dtype: torch.dtype, launcher: Launcher
) -> None:
    dtypes = tuple(DTYPES.values())
    offset = (0, 1, 3)[(dtypes.index(param_dtype) + dtypes.index(grad_dtype)) % 3]  # of each dtype, all of them
    Step(launcher, family, None, SIZES, param_dtype, grad_dtype, split=split, offset=offset).run().check()


@pytest.mark.parametrize(("offset", "sizes"), [(0, SIZES), (1, SIZES), (3, SIZES), (0, (LARGE,))])
@low_dtypes
def test_gradients_that_are_weights_with_remainders(
    dtype: torch.dtype, sizes: tuple[int, ...], offset: int, launcher: Launcher
) -> None:
    step = Step(launcher, "sgd", AVERAGE, sizes, FP32, dtype, grad_split=True, offset=offset)
    read = [*(grad for grad in step.grads if grad is not None), *(step.grad_remainders or ())]
    before = [x.clone() for x in read]
    step.run(grad_scale=3.0).check(1 / 3)
    assert sum(map(differing, read, before)) == 0


@pytest.mark.parametrize("steps", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize(("family", "example"), EXAMPLES)
def test_every_example(family: str, example: str, steps: int, launcher: Launcher) -> None:
    options = UPDATES[family].examples[example]
    for dtype in (BF16,) if INTERPRETED else (FP32, BF16):
        Step(launcher, family, options, FEW, dtype, steps=steps).run().check()


@families
def test_groups_of_different_options(family: str, ordered_launcher: Launcher) -> None:
    examples = UPDATES[family].examples
    Step(ordered_launcher, family, examples["full"], SIZES, BF16, FP16, second=examples["maximize"]).run().check()


@pytest.mark.parametrize("family", ["adam"] if INTERPRETED else FAMILIES)
def test_more_chunks_than_blocks(family: str, ordered_launcher: Launcher) -> None:
    Step(ordered_launcher, family, None, (LARGE,), FP16, FP16).run().check()


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, BF16)], ids=["fp32", "16-bit"])
@families
def test_more_than_32_bits_of_elements(
    family: str, dtypes: tuple[torch.dtype, torch.dtype], launcher: Launcher
) -> None:
    Step(launcher, family, None, (1000,), *dtypes, first_chunk=2**23).run().check()


@families
@pytest.mark.parametrize("array", ["grads", "params", "masters", "states"])
@pytest.mark.parametrize("split", [False, True], ids=["full", "split"])
def test_one_misaligned_array(family: str, split: bool, array: str, launcher: Launcher) -> None:
    """Each array alone decides that 16-byte accesses are off, wherever it stands in the table."""
    step = Step(launcher, family, None, FEW, FP16, BF16, split=split)
    lists = list(step.states.values()) if array == "states" else [getattr(step, array)]
    lists[-1][:] = [step.arena.place(x, 1) for x in lists[-1]]
    step.run().check()


@emulated
@pytest.mark.parametrize("rest", range(4))
@pytest.mark.parametrize("offset", range(4))
@low_dtypes
def test_few_elements_go_one_by_one(dtype: torch.dtype, offset: int, rest: int) -> None:
    """At most three at either end of a tensor; the rest goes in words of 8 bytes."""
    launcher, size = Launcher("cuda", order="shuffled"), 6 * CHUNK + rest
    for family in FAMILIES:
        step = Step(launcher, family, None, (size,), dtype, dtype, offset=offset)
        reads = emulator.reads_of(step.params[0], step.run)
        head = -offset % 4
        assert reads.get(2, 0) == head + (size - head) % 4
        step.check()


@emulated
@pytest.mark.parametrize("rest", range(4))
@pytest.mark.parametrize("offset", range(4))
@low_dtypes
def test_few_elements_go_one_by_one_wherever_arrays_lie(dtype: torch.dtype, offset: int, rest: int) -> None:
    """`offset`: of the states and the remainder. Gradient and weight lie otherwise, and as the other does or not."""
    launcher, size = Launcher("cuda", order="shuffled"), 4 * CHUNK + rest
    for of_grad in range(4):
        step = Step(launcher, "sgd", None, (size,), dtype, dtype, offset=offset)
        step.grads[0] = step.arena.place(step.grads[0], of_grad)
        step.params[0] = step.arena.place(step.params[0], (of_grad + rest) % 4)
        reads = [emulator.reads_of(step.grads[0], step.run)]
        step.check()
        reads += [emulator.reads_of(step.params[0], step.run)]
        for of_array in reads:
            assert of_array.get(2, 0) <= 6
            assert set(of_array) <= {2, 8} and of_array[8] >= (size - 6) // 4


@pytest.mark.parametrize("dtype", [FP16] if INTERPRETED else [FP16, BF16], ids=str)
@offsets
@families
def test_gradients_and_weights_that_lie_otherwise_than_states(
    family: str, offset: int, dtype: torch.dtype, launcher: Launcher
) -> None:
    """No byte beside a tensor is read."""
    step = Step(launcher, family, None, AROUND, dtype, dtype)
    step.grads[:] = [step.arena.place(x, offset) for x in step.grads]
    if offset > 1:
        step.params[:] = [step.arena.place(x, 5 - offset) for x in step.params]
    step.run().check()


@low_dtypes
@offsets
def test_averages_of_weights_that_lie_otherwise(offset: int, dtype: torch.dtype, launcher: Launcher) -> None:
    step = Step(launcher, "sgd", AVERAGE, AROUND, FP32, dtype, grad_split=True)
    step.grads[:] = [step.arena.place(x, offset) for x in step.grads]
    step.run().check()


@families
def test_tensors_without_a_gradient(family: str, ordered_launcher: Launcher) -> None:
    Step(ordered_launcher, family, None, (9, 1025, 1025, 8), without_grad=(1, 3)).run().check()


@families
def test_a_late_gradient_finds_its_first_step(family: str, launcher: Launcher) -> None:
    """Whatever the other tensors have done before: each tensor has its own count."""
    step = Step(launcher, family, None, (2 * CHUNK + 1, 4 * CHUNK + 1), BF16, steps=0)
    late, step.grads[0] = step.grads[0], None
    step.run().check()
    step.run()
    step.grads[0] = late
    step.run()
    assert [int(count) for count in step.steps] == [1, 3]
    expected = Step(launcher, family, None, (2 * CHUNK + 1, 4 * CHUNK + 1), BF16, steps=0).run()
    assert torch.equal(step.fp32()[0], expected.fp32()[0])


@families
def test_a_count_is_raised_once_all_have_read_it(family: str, ordered_launcher: Launcher) -> None:
    """More chunks of one tensor than blocks, at its first step: a block that reads a raised count would not set the
    momentum buffer, or correct no bias. An empty tensor has a chunk to count with."""
    many, one = (
        Step(ordered_launcher, family, None, (0, 40 * CHUNK, 5), BF16, steps=0, chunk=chunk)
        for chunk in (CHUNK, 40 * CHUNK)
    )
    many.grads[0] = many.arena.place(torch.zeros(1))  # an address
    many.chunks = many.arena.place(torch.tensor([[0, 0], *many.chunks.tolist()], dtype=torch.int32))
    many.run()
    one.run()
    assert [int(count) for count in many.steps] == [1, 1, 1]
    assert sum(map(differing, many.fp32(), one.fp32())) == 0


@families
def test_counts_beyond_2_to_the_31_are_unsigned(family: str, launcher: Launcher) -> None:
    """-5 is what an int32 tensor shows of 2^32 - 5."""
    step = Step(launcher, family, None, FEW, BF16, steps=0)
    for tensors in step.states.values():
        for state in tensors:
            state.fill_(0.25)
    for count, before in zip(step.steps, (2**31 - 1, -(2**31), -5), strict=True):
        count.fill_(before)
    step.run()
    assert [int(count) for count in step.steps] == [-(2**31), 1 - 2**31, -4]
    assert all(x.isfinite().all() for x in step.fp32())


@families
def test_nothing_to_update(family: str, launcher: Launcher) -> None:
    Step(launcher, family, None, (0,)).run().assert_nothing_written()
    Step(launcher, family, None, (9,), without_grad=(0,)).run().assert_nothing_written()


@families
def test_same_bits_in_every_order(family: str, ordered_launcher: Launcher) -> None:
    first, second = (Step(launcher, family, None, param_dtype=FP16).run() for launcher in (ordered_launcher,) * 2)
    assert torch.equal(torch.cat(first.fp32()), torch.cat(second.fp32()))


# -------------------------------------------------------------------------------------------- overflow, scale, clipping
@pytest.mark.parametrize("steps", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("found_inf", [1.0, 2.0, math.inf, math.nan])
@families
def test_a_skipped_step_writes_nothing(family: str, found_inf: float, steps: int, launcher: Launcher) -> None:
    step = Step(launcher, family, None, FEW, FP16, FP16, steps=steps)
    step.run(found_inf=found_inf).assert_nothing_written()


@pytest.mark.parametrize(
    ("scalars", "factor"),
    [
        ({"found_inf": -0.0}, 1.0),
        ({"grad_scale": 8.0, "found_inf": 0.0}, 0.125),
        ({"grad_norm": 10.0, "max_norm": 2.5}, 2.5 / (10.0 + 1e-6)),
        ({"grad_norm": 0.5, "max_norm": 2.5}, 1.0),
        ({"grad_norm": 0.0, "max_norm": 2.5}, 1.0),
        ({"grad_scale": 4.0, "grad_norm": 10.0, "max_norm": 5.0}, 0.125),
    ],
)
@families
def test_scale_and_clip(family: str, scalars: dict[str, Any], factor: float, launcher: Launcher) -> None:
    Step(launcher, family, None, (1025,), BF16, BF16).run(**scalars).check(factor)


@families
def test_nan_norm_is_not_hidden(family: str, launcher: Launcher) -> None:
    step = Step(launcher, family, None, FEW).run(grad_norm=math.nan, max_norm=1.0)
    assert all(m.isnan().all() for m in step.fp32())


@families
def test_nan_stays_in_its_element(family: str, launcher: Launcher) -> None:
    step = Step(launcher, family, None, (1025,))
    step.grads[0][[3, 1024]] = math.nan  # type: ignore[index]
    step.run()
    assert step.masters[0].isfinite().logical_not().nonzero().flatten().tolist() == [3, 1024]


# ------------------------------------------------------------------------------------------------------------- rounding
@low_dtypes
def test_weights_round_to_nearest_even(dtype: torch.dtype, launcher: Launcher) -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16  # ties, and their neighbours, of every exponent
    shift = 0 if dtype == BF16 else 3
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]) >> shift
    values = (upper[:, None] + lower).view(-1).to(torch.int32).view(FP32)
    special = torch.tensor([65504.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, -0.0, 3.3961e38])
    values = torch.cat([special, values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]])
    step = Step(launcher, "sgd", {}, (40000,), dtype, split=False)
    step.masters[0].copy_(values[:40000])
    step.grads[0].zero_()  # type: ignore[union-attr]
    step.run()
    ours, expected = step.params[0].cpu(), step.masters[0].cpu().to(dtype)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])


# -------------------------------------------------------------------------------------------------------- shared cases
@pytest.mark.skipif(why_not_emulated() is not None, reason=str(why_not_emulated()))
@pytest.mark.parametrize("case", list(chain(*testing.updates.CASES.values())), ids=lambda case: f"{case.op}-{case}")
def test_shared_case_on_the_emulator(case: testing.Case) -> None:
    assert all(result.passed for result in emulator.run(case))
