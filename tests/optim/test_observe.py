"""What a step sees of its parameters: the compiled sweep and the one in Python see the same."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from amp_kernels import _loader
from amp_kernels.optim import FusedSGD, _observe
from amp_kernels.optim._observe import NO_GRADIENT, PLACE, UNREADABLE, Seen, Spans, are_plain, observe

SWEEPS = ["python", pytest.param("compiled", marks=pytest.mark.skipif(not _loader.load(), reason="not built"))]


@pytest.fixture(params=SWEEPS)
def sweep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(_observe, "_compiled_sweep", lambda: None)
    else:
        assert _observe._compiled_sweep() is not None
    return request.param


class Sub(torch.Tensor):
    pass


def parameter(grad: Tensor | None = None, shape: tuple[int, ...] = (3, 4)) -> Tensor:
    """With a gradient of any dtype and layout, which autograd itself would not accept."""
    param = torch.nn.Parameter(torch.zeros(shape))
    if grad is not None:
        param.grad = torch.zeros_like(param)
        param.grad.data = grad
    return param


def look(params: list[Tensor]) -> Tensor:
    seen, places = torch.full((len(Seen), len(params)), 99), torch.full((PLACE, len(params)), 99)
    observe(params, [p.detach() for p in params], Spans([]), seen, places, plain=are_plain(params))
    assert torch.equal(places, seen[:PLACE])  # states are seen as parameters are
    return seen


GRADIENTS = {
    "none": None,
    "fp32": torch.zeros(3, 4),
    "transposed": torch.zeros(4, 3).t(),
    "fp16": torch.zeros(3, 4).half(),
    "bf16": torch.zeros(3, 4).bfloat16(),
    "bf16, sliced": torch.zeros(3, 8).bfloat16()[:, ::2],
    "fp64": torch.zeros(3, 4).double(),
    "int16": torch.zeros(3, 4, dtype=torch.int16),
    "int8": torch.zeros(3, 4, dtype=torch.int8),
}
MARKS = {"none": NO_GRADIENT, "fp64": UNREADABLE, "int16": UNREADABLE, "int8": UNREADABLE}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(sweep, name):
    param = parameter(GRADIENTS[name])
    seen = look([param])[:, 0].tolist()
    assert seen[Seen.ADDRESS] == param.data_ptr()
    if name in MARKS:
        assert seen[Seen.GRAD :] == [0, MARKS[name]]
    else:
        assert seen[Seen.GRAD] == param.grad.data_ptr() and seen[Seen.GRAD_LAYOUT] >= 0


def test_a_layout_is_a_dtype_a_shape_and_strides(sweep):
    memory = torch.zeros(64)
    views = [memory, memory[:63], memory.view(8, 8), memory.view(8, 8).t()[:, :7], memory.view(8, 8)[:, :7]]
    views += [memory.view(4, 16), memory.view(16, 4), memory.view(8, 1, 8), memory[::2], memory.half()[:32]]
    views += [memory.bfloat16()[:32], memory[0], memory[:0], memory[:0].view(0, 3)]
    layouts = look(views)[Seen.LAYOUT].tolist()
    assert len(set(layouts)) == len(views) and min(layouts) >= 0
    assert look([parameter(view, view.shape) for view in views])[Seen.GRAD_LAYOUT].tolist() == layouts
    assert look([view.clone() for view in views[:3]])[Seen.LAYOUT].tolist() == layouts[:3]


def test_sparse_gradients(sweep):
    param = torch.nn.Parameter(torch.zeros(3, 4))
    param.grad = torch.zeros(3, 4).to_sparse()
    assert look([param])[Seen.GRAD :, 0].tolist() == [0, UNREADABLE]


def test_columns_are_in_the_order_of_the_parameters(sweep):
    params = [parameter(grad) for grad in GRADIENTS.values()] + [parameter(shape=(0,))]
    seen = look(params)
    assert seen[Seen.ADDRESS].tolist() == [p.data_ptr() for p in params]
    alone = torch.cat([look([p]) for p in params], dim=1)
    assert torch.equal(seen[Seen.LAYOUT], alone[Seen.LAYOUT])
    assert torch.equal(seen[Seen.GRAD :], alone[Seen.GRAD :])


def test_no_parameters(sweep):
    assert look([]).shape == (len(Seen), 0)


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")], ids=str)
def test_what_has_no_memory(sweep, tensor):
    assert look([tensor])[:PLACE, 0].tolist() == [0, UNREADABLE]


def test_a_subclass_is_seen_in_python_alone(sweep):
    param = Sub(torch.zeros(3, 4))
    assert not are_plain([param])
    seen = look([param])[:, 0].tolist()
    assert seen[Seen.ADDRESS] == param.data_ptr() and seen[Seen.LAYOUT] >= 0
    became = parameter(Sub(torch.zeros(3, 4)))
    torch.utils.swap_tensors(became, param)  # after the plan was built
    places, seen = torch.zeros(PLACE, 0), torch.zeros(len(Seen), 1, dtype=torch.int64)
    observe([became], [], Spans([]), seen, places, plain=True)
    assert sweep == "python" or seen[Seen.LAYOUT].item() == UNREADABLE


@pytest.mark.parametrize("make", [torch._neg_view, torch._efficientzerotensor, TwoTensor], ids=lambda f: f.__name__)
def test_gradients_that_memory_does_not_hold(sweep, make):
    param = parameter()
    ones = torch.ones(3, 4)
    arguments = {torch._efficientzerotensor: ((3, 4),), TwoTensor: (ones, ones)}.get(make, (ones,))
    param.grad = make(*arguments)
    assert look([param])[Seen.GRAD :, 0].tolist() == [0, UNREADABLE]


def test_gradients_in_written_memory(sweep):
    memory = torch.zeros(1000)
    written = Spans([memory[10:20], memory[:0], memory[20:30], memory[900:]])
    places = torch.zeros(PLACE, 0)
    for begin, end in [(0, 10), (30, 900), (20, 20), (15, 15), (0, 11), (29, 40), (15, 16), (0, 1000), (899, 901)]:
        param = parameter(memory[begin:end], (end - begin,))
        seen = torch.zeros(len(Seen), 1, dtype=torch.int64)
        observe([param], [], written, seen, places, plain=True)
        meets = any(begin < stop and start < end for start, stop in ((10, 30), (900, 1000))) and begin < end
        assert (seen[Seen.GRAD_LAYOUT].item() == UNREADABLE) == meets == written.meet(param.grad)


def test_what_shares_memory_with_a_lazy_clone_gets_memory_of_its_own(sweep):
    param = parameter(torch.ones(3, 4))
    clones = [torch._lazy_clone(param), torch._lazy_clone(param.grad)]
    seen, places = torch.zeros(len(Seen), 1, dtype=torch.int64), torch.zeros(PLACE, 0)
    observe([param], [], Spans([]), seen, places, plain=True, writes=True)
    for row, tensor, clone in zip((Seen.ADDRESS, Seen.GRAD), (param, param.grad), clones, strict=True):
        assert seen[row].item() == tensor.data_ptr() != clone.const_data_ptr()


def test_references_are_given_back(sweep):
    param = parameter(torch.zeros(3, 4))
    objects = [param, param.grad, torch.float32]
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(100):
        look([param] * 3)
    assert [sys.getrefcount(o) for o in objects] == before


def test_references_are_given_back_after_errors(sweep):
    sparse, wide = parameter(), parameter(torch.zeros(3, 4).double())
    sparse.grad = torch.zeros(3, 4).to_sparse()
    objects = [sparse, sparse.grad, wide, wide.grad, torch.float64]
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(100):
        with pytest.raises(Exception, match="object"):
            look([sparse, wide, object()])
    assert [sys.getrefcount(o) for o in objects] == before


def test_a_parameter_that_shrinks_where_it_lies(sweep):
    param = torch.nn.Parameter(torch.ones(100))
    memory = param.data
    optimizer = FusedSGD([param], lr=1.0, momentum=0.9)
    param.grad = torch.ones(100)
    optimizer.step()
    param.grad, param.data = None, memory[:10]
    param.grad = torch.ones(10)
    with pytest.raises(RuntimeError, match="keep its shape"):
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
    _observe._compiled_sweep.cache_clear()
    monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", 0, raising=False)
    try:
        assert _observe._compiled_sweep() is None
    finally:
        _observe._compiled_sweep.cache_clear()


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
