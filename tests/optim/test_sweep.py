"""The sweep of a step: compiled code reads the same as Python, or leaves a parameter to Python."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from amp_kernels import _loader
from amp_kernels.families import ADAM
from amp_kernels.ops.table import DTYPE_CODES, STATE_DTYPES, Row
from amp_kernels.optim import FusedSGD, _sweep
from amp_kernels.optim._state import Storage, storages
from amp_kernels.optim._sweep import ABSENT, UNREAD

CPU = torch.device("cpu")
KEYS = ("exp_avg", "exp_avg_sq", None)
SWEEPS = ["python", pytest.param("compiled", marks=pytest.mark.skipif(not _loader.load(), reason="not built"))]
compiled = pytest.mark.skipif(not _loader.load(), reason="not built")


@pytest.fixture(params=SWEEPS)
def sweep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr("amp_kernels.optim._plan.sweep", lambda: _sweep._IN_PYTHON)
        monkeypatch.setattr("amp_kernels.optim._base.sweep", lambda: _sweep._IN_PYTHON)
    else:
        assert _sweep.sweep() is not _sweep._IN_PYTHON
    return request.param


class Sub(torch.Tensor):
    pass


def parameter(
    grad: Tensor | None = None, shape: tuple[int, ...] = (3, 4), dtype: torch.dtype = torch.float32
) -> Tensor:
    """With a gradient of any dtype and layout, which autograd itself would not accept."""
    param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    if grad is not None:
        param.grad = torch.zeros_like(param)
        param.grad.data = grad
    return param


def state_of(param: Tensor) -> dict[str, Any]:
    """What a step of Adam needs."""
    state = {"step": torch.zeros((), dtype=torch.int32)}
    state |= {key: torch.zeros_like(param, dtype=torch.float32, requires_grad=False) for key in KEYS if key}
    if param.dtype != torch.float32:
        state["remainder"] = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
    return state


def read(
    params: list[Tensor],
    states: list[Any],
    *,
    keys: Any = KEYS,
    lean: Storage | None = None,
    device: torch.device = CPU,
    checked: Tensor | None = None,
) -> tuple[Tensor, list[int]]:
    """Table and forms by compiled code. `lean`: how large parameters store their states, if not in fp32."""
    keys = (*keys, *[None] * (0 if lean is None else len(lean.keys) - len(keys)))
    small = Storage(0, 0, 0, keys, ())
    empty = Storage(0, 0, 0, (), ())
    table = torch.full((Row.STATE + len(keys), len(params)), 99)
    forms = torch.full((len(params),), 99)
    checked = torch.full_like(table, -1) if checked is None else checked
    unread, gradients = _sweep.sweep().columns(
        params,
        states,
        [7] * len(params),
        ((empty, empty),) * 7 + ((small, lean or small),),
        device,
        table,
        forms,
        checked,
    )
    assert unread == forms.tolist().count(UNREAD) and gradients == sum(p.grad is not None for p in params)
    return table, forms.tolist()


def form_of(param: Tensor, state: Any) -> int:
    return read([param], [state])[1][0]


@compiled
@pytest.mark.parametrize("grad_dtype", DTYPE_CODES)
@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_a_column(dtype, grad_dtype):
    param = parameter(torch.ones(3, 4, dtype=grad_dtype), dtype=dtype)
    state = state_of(param)
    state["somebody's"] = "own"
    table, (form,) = read([param], [state])
    codes = DTYPE_CODES[dtype], DTYPE_CODES[grad_dtype]
    arrays = [param, state.get("remainder"), state["step"], state["exp_avg"], state["exp_avg_sq"], None]
    addresses = [0 if x is None else x.data_ptr() for x in arrays]
    assert table[:, 0].tolist() == [12, codes[1], 7, param.grad.data_ptr(), *addresses]
    assert form == codes[0] | codes[1] << 2 | 3 << 4


@compiled
def test_columns_are_in_the_order_of_the_parameters():
    params = [parameter(torch.ones(3, 4)), parameter(), parameter(shape=(0,)), parameter(torch.ones(5), (5,))]
    states = [state_of(p) for p in params]
    params.append(parameter())
    states.append(None)  # neither gradient nor state
    table, forms = read(params, states)
    assert forms == [3 << 4] * 4 + [ABSENT] and not table[:, 4].any()
    for t in range(4):
        alone, _ = read([params[t]], [states[t]])
        assert torch.equal(table[:, t], alone[:, 0])
    assert table[Row.GRAD].tolist() == [params[0].grad.data_ptr(), 0, 0, params[3].grad.data_ptr(), 0]
    assert read([], [])[1] == []


@compiled
def test_updates_of_an_empty_tensor_count():
    param = parameter(torch.zeros(0), (0,))
    table, _ = read([param], [state_of(param)])
    assert table[Row.GRAD, 0] != 0


LEAN = storages(ADAM.name, KEYS, torch.int8)[1]


def lean_state_of(param: Tensor) -> dict[str, Any]:
    state = {"step": torch.zeros((), dtype=torch.int32)}
    for name, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        state[f"{name}_codes"] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        state[f"{name}_scale"] = torch.zeros(-(-param.numel() // 128))
    return state


@compiled
def test_a_column_with_codes():
    param = parameter(torch.ones(64, 65), (64, 65))
    state = lean_state_of(param)
    state["somebody's"] = "own"
    table, (form,) = read([param], [state], lean=LEAN)
    keys = ("exp_avg_codes", "exp_avg_sq_codes", None, "exp_avg_scale", "exp_avg_sq_scale")
    assert table[Row.STATE :, 0].tolist() == [0 if key is None else state[key].data_ptr() for key in keys]
    assert form == 3 << 4 | STATE_DTYPES[torch.int8] << 7 | 3 << 9
    small = parameter(torch.ones(3, 4))
    assert read([small, param], [state_of(small), state], lean=LEAN)[1] == [3 << 4, form]
    halves = {"step": state["step"], **{k: torch.zeros(64, 65, dtype=torch.bfloat16) for k in KEYS if k}}
    form = 3 << 4 | STATE_DTYPES[torch.bfloat16] << 7 | 3 << 9
    assert read([param], [halves], lean=storages(ADAM.name, KEYS, torch.bfloat16)[1])[1] == [form]


UNREADABLE_CODES = {
    "signed codes": lambda s: s.update(exp_avg_sq_codes=s["exp_avg_sq_codes"].view(torch.int8)),
    "unsigned codes": lambda s: s.update(exp_avg_codes=s["exp_avg_codes"].view(torch.uint8)),
    "transposed codes": lambda s: s.update(exp_avg_codes=torch.zeros(65, 64, dtype=torch.int8).t()),
    "a short scale": lambda s: s.update(exp_avg_scale=torch.zeros(32)),
    "a scale of two dimensions": lambda s: s.update(exp_avg_scale=torch.zeros(33, 1)),
    "a scale with gaps": lambda s: s.update(exp_avg_scale=torch.zeros(66)[::2]),
    "a scale of fp64": lambda s: s.update(exp_avg_scale=torch.zeros(33).double()),
    "no scale": lambda s: s.pop("exp_avg_sq_scale"),
    "no codes": lambda s: s.pop("exp_avg_codes"),
    "an fp32 state, too": lambda s: s.update(exp_avg=torch.zeros(64, 65)),
}


@compiled
@pytest.mark.parametrize("spoil", UNREADABLE_CODES.values(), ids=UNREADABLE_CODES)
def test_which_codes_are_left_to_python(spoil):
    param = parameter(torch.ones(64, 65), (64, 65))
    state = lean_state_of(param)
    spoil(state)
    assert read([param], [state], lean=LEAN)[1] == [UNREAD]


@compiled
@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("grad_dtype", DTYPE_CODES)
def test_gradients_that_are_converted_for_lean_states_are_left_to_python(dtype, grad_dtype):
    param = parameter(torch.ones(64, 65, dtype=grad_dtype), (64, 65), dtype)
    state = lean_state_of(param)
    if dtype is not torch.float32:
        state["remainder"] = torch.zeros(64, 65, dtype=torch.int16)
    (form,) = read([param], [state], lean=LEAN)[1]
    assert (form == UNREAD) == (grad_dtype not in (dtype, torch.float32))


@compiled
def test_codes_that_an_fp32_optimizer_does_not_use_are_left_to_python():
    param = parameter(torch.ones(64, 65), (64, 65))
    fp32 = storages(ADAM.name, KEYS, torch.float32)[1]
    assert read([param], [state_of(param)], lean=fp32)[1] == [3 << 4]
    assert read([param], [{**state_of(param), **lean_state_of(param)}], lean=fp32)[1] == [UNREAD]


UNREADABLE = {
    "a subclass": lambda p, s: torch.utils.swap_tensors(p, Sub(torch.zeros(3, 4))),
    "another dtype": lambda p, s: setattr(p, "data", p.data.double()),
    "gaps": lambda p, s: setattr(p, "data", torch.zeros(3, 8)[:, ::2]),
    "a transposed state": lambda p, s: s.update(exp_avg=torch.zeros(4, 3).t()),
    "a state of another shape": lambda p, s: s.update(exp_avg=torch.zeros(4, 3)),
    "a state of another dtype": lambda p, s: s.update(exp_avg=torch.zeros(3, 4).half()),
    "a sparse state": lambda p, s: s.update(exp_avg=torch.zeros(3, 4).to_sparse()),
    "a state without memory": lambda p, s: s.update(exp_avg=torch.zeros(3, 4, device="meta")),
    "no state": lambda p, s: s.pop("exp_avg_sq"),
    "a state that is no tensor": lambda p, s: s.update(exp_avg=1.0),
    "no step": lambda p, s: s.pop("step"),
    "a step of floats": lambda p, s: s.update(step=torch.zeros(())),
    "a step of one dimension": lambda p, s: s.update(step=torch.zeros(1, dtype=torch.int32)),
    "a step that is no tensor": lambda p, s: s.update(step=3),
    "a master": lambda p, s: s.update(master=torch.zeros(3, 4)),
    "a remainder of fp32": lambda p, s: s.update(remainder=torch.zeros(3, 4, dtype=torch.int16)),
    "a transposed gradient": lambda p, s: setattr(p, "grad", torch.zeros(4, 3).t()),
    "a sparse gradient": lambda p, s: setattr(p, "grad", torch.zeros(3, 4).to_sparse()),
    "a negated state": lambda p, s: s.update(exp_avg=torch._neg_view(torch.ones(3, 4))),
    "a negated parameter": lambda p, s: setattr(p, "data", torch._neg_view(torch.ones(3, 4))),
    "a negated gradient": lambda p, s: setattr(p, "grad", torch._neg_view(torch.ones(3, 4))),
    "zeros without memory": lambda p, s: setattr(p, "grad", torch._efficientzerotensor((3, 4))),
    "a wrapper": lambda p, s: setattr(p, "grad", TwoTensor(torch.ones(3, 4), torch.ones(3, 4))),
}


@compiled
@pytest.mark.parametrize("spoil", UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_left_to_python(spoil):
    param = parameter(torch.ones(3, 4))
    state = state_of(param)
    assert form_of(param, state) == 3 << 4
    spoil(param, state)
    assert form_of(param, state) == UNREAD


@compiled
def test_another_gradient_dtype_shape_or_device_is_left_to_python():
    for grad in (torch.zeros(3, 4).double(), torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.int16)):
        param = parameter(grad)
        assert form_of(param, state_of(param)) == UNREAD
    param = parameter(dtype=torch.half)
    state = state_of(param)
    del state["remainder"]
    assert form_of(param, state) == UNREAD
    param = parameter(torch.zeros(3, 4))
    assert read([param], [state_of(param)], device=torch.device("cuda", 0))[1] == [UNREAD]


@compiled
@pytest.mark.parametrize("state", [False, True], ids=["gradient", "state"])
def test_vectors_with_gaps_are_left_to_python(state):
    """A vector has one stride. It counts, except for a single element."""
    for vector in (torch.ones(24)[::2], torch.ones(1).expand(12), torch.ones(12, 1), torch.ones(10)[::10]):
        param = parameter(torch.ones(len(vector)) if state else vector, (len(vector),))
        states = {**state_of(param), **({"exp_avg": vector} if state else {})}
        assert form_of(param, states) == (3 << 4 if len(vector) == 1 else UNREAD)


@compiled
def test_any_dense_layout_is_read():
    for view in (torch.zeros(4, 3).t(), torch.zeros(2, 5, 3, 4).permute(0, 3, 1, 2), torch.zeros(1, 3, 1)):
        param = torch.nn.Parameter(view)
        param.grad = torch.ones_like(param)
        assert form_of(param, state_of(param)) == 3 << 4
        param.grad = torch.ones(view.shape)
        assert form_of(param, state_of(param)) == (3 << 4 if view.is_contiguous() else UNREAD)


@compiled
def test_what_shares_memory_with_a_lazy_clone_gets_memory_of_its_own():
    param = parameter(torch.ones(3, 4))
    clones = [torch._lazy_clone(param), torch._lazy_clone(param.grad)]
    table, _ = read([param], [state_of(param)])
    for row, tensor, clone in zip((Row.PARAM, Row.GRAD), (param, param.grad), clones, strict=True):
        assert table[row, 0] == tensor.data_ptr() != clone.const_data_ptr()


@compiled
def test_references_are_given_back():
    param, sparse = parameter(torch.zeros(3, 4)), parameter()
    sparse.grad = torch.zeros(3, 4).to_sparse()
    state = state_of(param)
    objects = [param, param.grad, sparse, sparse.grad, *state.values(), state, KEYS, torch.float32]
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(100):
        read([param, sparse], [state, state])
        with pytest.raises(Exception, match="object"):
            read([param, object()], [state, state])
    assert [sys.getrefcount(o) for o in objects] == before


# -------------------------------------------------------------------------------------------------------------- memory
class Memory:
    """Parameters of fp32 with a step each, in one stretch of memory, and what was found of them."""

    def __init__(self, *spans: tuple[int, int]) -> None:
        self.memory = torch.zeros(2000)
        self.params = [torch.nn.Parameter(self.memory[a:b]) for a, b in spans]
        self.states = [{"step": torch.zeros((), dtype=torch.int32)} for _ in spans]
        rows, count = int(Row.STATE), len(spans)
        self.checked = torch.full(((rows + 1) * count + 1,), -1)
        self.spans = torch.zeros(2 * count * (rows - Row.PARAM), dtype=torch.int64)

    def apart(self) -> int:
        table, forms = read(self.params, self.states, keys=())
        return _sweep.sweep().apart(table, torch.tensor(forms), self.checked, self.spans)


@compiled
def test_gradients_in_written_memory():
    found = Memory((10, 20), (5, 5), (20, 30), (900, 1000))
    for begin, end in [(0, 10), (30, 900), (20, 20), (15, 15), (0, 11), (29, 40), (15, 16), (0, 1000), (899, 901)]:
        grad = found.memory[begin:end]
        found.params.append(parameter(grad, grad.shape))
        found.states.append({"step": torch.zeros((), dtype=torch.int32)})
        again = Memory()
        again.params, again.states = found.params, found.states
        again.checked, again.spans = torch.full((8 * 5 + 1,), -1), torch.zeros(2 * 5 * 3, dtype=torch.int64)
        meets = any(begin < stop and start < end for start, stop in ((10, 30), (900, 1000))) and begin < end
        assert [again.apart() for _ in range(3)] == [4 if meets else -1] * 3
        found.params.pop(), found.states.pop()


@compiled
def test_written_tensors_that_meet():
    assert Memory((0, 10), (10, 20)).apart() == -1
    assert Memory((0, 11), (10, 20)).apart() == -2
    found = Memory((0, 10), (10, 20))
    assert found.apart() == -1
    found.states[1] = found.states[0]  # one count for two
    assert found.apart() == -2
    found.states[1] = {"step": torch.zeros((), dtype=torch.int32)}
    assert found.apart() == -1
    found.params[1].data = found.memory[9:19]
    assert [found.apart(), found.apart()] == [-2, -2]
    found.params[1].data = found.memory[10:20]
    assert found.apart() == -1
    found.params[0].grad = found.memory[15:25]
    assert [found.apart(), found.apart()] == [1 - 1, 0]
    found.params[0].grad = found.memory[20:30]
    assert found.apart() == -1
    assert Memory().apart() == -1


@pytest.mark.parametrize("kind", SWEEPS)
def test_the_same_objects_in_the_same_order(kind):
    same = (_sweep._IN_PYTHON if kind == "python" else _sweep.sweep()).same
    a, b, c = (parameter() for _ in range(3))
    state = {a: {}, b: {}, "global": 1}
    keys, values = list(state), list(state.values())
    lists, copies = [[a, b], [c]], [[a, b], [c]]
    assert same(lists, copies, state, keys, values)
    for others in ([[a, b]], [[b, a], [c]], [[a, b], [c, c]], [[a, b], [a]]):
        assert not same(others, copies, state, keys, values)
    assert not same(lists, copies, {**state, a: {}}, keys, values)  # another dict, equal to it
    assert not same(lists, copies, {**state, c: {}}, keys, values)
    assert not same(lists, copies, {b: values[1], a: values[0], "global": 1}, keys, values)
    assert not same(lists, copies, {}, keys, values)
    assert same([], [], {}, [], [])


# --------------------------------------------------------------------------------------------------------------- steps
def test_a_parameter_that_shrinks_where_it_lies(sweep):
    param = torch.nn.Parameter(torch.ones(100))
    memory = param.data
    optimizer = FusedSGD([param], lr=1.0, momentum=0.9)
    param.grad = torch.ones(100)
    optimizer.step()
    param.grad, param.data = None, memory[:10]
    param.grad = torch.ones(10)
    with pytest.raises(RuntimeError, match=r"must have the parameter's shape \(10,\), got \(100,\)"):
        optimizer.step()
    assert memory.eq(0).all()


def test_a_parameter_that_is_transposed_where_it_lies(sweep):
    values = torch.arange(9.0).view(3, 3)
    param = torch.nn.Parameter(values.clone())
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    expected = torch.nn.Parameter(values.clone())
    torchs = torch.optim.SGD([expected], lr=1.0, momentum=0.5)
    for _ in range(3):
        for p in (param, expected):
            p.grad = values.clone()
        optimizer.step()
        torchs.step()
        param.data, expected.data = param.data.t(), expected.data.t()
        assert torch.equal(param, expected)


def test_without_the_interface_python_sweeps(monkeypatch):
    _sweep.sweep.cache_clear()
    _loader.reader.cache_clear()
    monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", 0, raising=False)
    try:
        assert _sweep.sweep() is _sweep._IN_PYTHON
    finally:
        _sweep.sweep.cache_clear()
        _loader.reader.cache_clear()


def train(optimizer_class: type[torch.optim.Optimizer], *, in_fp32: bool) -> list[Tensor]:
    """Weights after steps with gradients that come, go, move and change their layout."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.half, torch.float)

    def normal(dtype: torch.dtype) -> Tensor:
        values = torch.randn(5, 7, generator=generator).to(dtype)
        return values.float() if in_fp32 else values

    params = [torch.nn.Parameter(normal(dtype)) for dtype in dtypes]
    optimizer = optimizer_class(params, lr=0.1, momentum=0.9)
    for step in range(12):
        for i, (p, dtype) in enumerate(zip(params, dtypes, strict=True)):
            grad = normal(dtype)
            if step % 3 == i:
                p.grad = None
            elif step % 4 == 1 and p.grad is not None:
                p.grad.copy_(grad)
            else:
                p.grad = grad.t().contiguous().t() if step % 4 == 2 else grad
        if step == 7:
            with torch.no_grad():
                params[0].mul_(0.5)  # the master follows
        optimizer.step()
    return [p.detach().float() for p in params]


def test_steps_follow_what_the_sweep_sees(sweep):
    ours, torchs = train(FusedSGD, in_fp32=False), train(torch.optim.SGD, in_fp32=True)
    torch.testing.assert_close(ours, torchs, rtol=2e-3, atol=2e-3)  # 16-bit weights
