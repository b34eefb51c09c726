"""CUDA graphs: what a capture must not do, shown on any device, and a whole captured iteration on a GPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from cuda_on_cpu import backend as emulator
from optim_cases import FULL, TORCH
from table_kernels import why_not_emulated

from amp_kernels import GradScaler, grad_scaler
from amp_kernels.ops.table import LEAST_LEAN, STATE_DTYPES, Row
from amp_kernels.optim import FusedAdam, FusedRMSprop, FusedSGD, _base, _plan
from amp_kernels.testing.common import DTYPES
from amp_kernels.testing.updates import UPDATES


@pytest.fixture
def capture(monkeypatch):
    """Says that a capture is under way; table ops run all the same."""

    def switch(on: bool) -> None:
        for module in (_base, _plan, grad_scaler):
            monkeypatch.setattr(module, "capturing", lambda device: on)

    return switch


def one_parameter(dtype: torch.dtype = torch.float16, numel: int = 33) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.randn(numel).to(dtype))
    param.grad = torch.randn(numel).to(dtype)
    return param


each_state_dtype = pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=lambda dtype: str(dtype)[6:])


def test_captured_step_has_tables_of_its_own(capture):
    param = one_parameter()
    optimizer = FusedSGD([param], lr=0.1, momentum=0.9)
    optimizer.step()
    eager = optimizer._plans[0]._block.words
    capture(True)
    optimizer.step()
    block = optimizer._plans[0]._block
    captured = block.words
    assert eager.data_ptr() != captured.data_ptr()
    assert block.rates.tolist() == [block.hyper[0, _plan.LR_COLUMN].data_ptr()]  # a later lr is not the graph's
    before = captured.clone()
    capture(False)
    old_gradient, param.grad = param.grad, torch.randn(33).half()  # both live: another address
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert torch.equal(before, captured)
    assert any(kept.words is captured for kept in optimizer._plans[0]._kept if isinstance(kept, _plan.Block))
    assert optimizer._plans[0]._block.table[Row.GRAD, 0] == param.grad.data_ptr() != old_gradient.data_ptr()


@each_state_dtype
def test_steps_before_in_and_after_a_capture_agree_with_eager_ones(capture, state_dtype):
    params = [one_parameter(torch.float32, LEAST_LEAN), one_parameter(torch.float32, LEAST_LEAN)]
    params[1].data.copy_(params[0].data)
    optimizers = [FusedRMSprop([p], lr=0.01, momentum=0.9, state_dtype=state_dtype) for p in params]
    for step in range(6):
        gradient = torch.randn(LEAST_LEAN)
        for k, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            param.grad = gradient.clone()
            capture(k == 0 and step in (2, 3))
            optimizer.step()
    assert torch.equal(params[0], params[1])


def test_capture_with_states_in_another_dtype_raises(capture):
    """Their codes would be allocated in the capture."""
    param = one_parameter(numel=LEAST_LEAN)
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.step()
    before = dict(optimizer.state[param])
    optimizer.param_groups[0]["state_dtype"] = torch.int8
    capture(True)
    with pytest.raises(RuntimeError, match="a capture must follow a step"):
        optimizer.step()
    assert optimizer.state[param].keys() == before.keys()
    assert all(optimizer.state[param][key] is value for key, value in before.items())


def test_capture_before_state_exists_raises(capture):
    capture(True)
    optimizer = FusedSGD([one_parameter()], lr=0.1, momentum=0.9)
    with pytest.raises(RuntimeError, match="a capture must follow a step"):
        optimizer.step()
    assert not optimizer.state  # allocated in a capture, it would never be filled
    with pytest.raises(RuntimeError, match="a capture must follow a step"):
        optimizer.init_state()
    assert not optimizer.state


@pytest.mark.parametrize("optimizer_class", TORCH, ids=UPDATES)
def test_capture_may_follow_init_state(capture, optimizer_class):
    params = [one_parameter(), one_parameter()]
    params[1].data.copy_(params[0].data)
    params[1].grad.copy_(params[0].grad)
    optimizers = [optimizer_class([p], **FULL[optimizer_class]) for p in params]
    optimizers[0].init_state()
    capture(True)
    optimizers[0].step()
    capture(False)
    optimizers[1].step()
    assert torch.equal(params[0], params[1])


@pytest.mark.skipif(why_not_emulated() is not None, reason=str(why_not_emulated()))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 1.0}, {"state_dtype": torch.int8}, {"state_dtype": torch.bfloat16}],
    ids=["plain", "clipping", "int8", "bf16"],
)
@pytest.mark.parametrize("optimizer_class", TORCH, ids=UPDATES)
def test_kernels_are_loaded_before_a_capture(capture, optimizer_class, options, dtype):
    """The driver may refuse to load one inside."""
    numel = LEAST_LEAN if "state_dtype" in options else 33
    params = [one_parameter(dtype, numel), one_parameter(torch.float32, numel)]
    # A large rate: with a small one a clipped step may round to no change of 33 weights in bf16.
    optimizer = optimizer_class([{"params": params[:1]}, {"params": params[1:]}], lr=0.5, **options)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))

    def captured() -> None:
        capture(True)
        scaler.step(optimizer)
        optimizer.step()

    before = [p.detach().clone() for p in params]
    with emulator.serving():
        assert emulator.loaded_in_a_capture(lambda: None, lambda: emulator._load_unscale(params[0])) != set()
        assert emulator.loaded_in_a_capture(optimizer.init_state, captured) == set()
    assert not any(map(torch.equal, before, params))


def test_what_a_graph_points_to_outlives_rebuilt_plans(capture):
    param = one_parameter()
    optimizer = FusedSGD([param], lr=0.1, momentum=0.9)
    optimizer.step()
    capture(True)
    optimizer.step()
    capture(False)
    plan = optimizer._plans[0]
    layout = plan._layouts[0]
    owned = [weakref.ref(t) for t in (layout.partials, layout.entries, plan._block.words, plan.found_inf)]
    del plan, layout
    optimizer.add_param_group({"params": [one_parameter()]})
    optimizer.step()
    gc.collect()
    assert all(ref() is not None for ref in owned)


def test_capture_with_other_gradient_dtypes_raises(capture):
    param = one_parameter(torch.float32)
    optimizer = FusedSGD([param], lr=0.1)
    optimizer.step()
    param.grad_dtype = None
    param.grad = torch.randn(33).half()
    capture(True)
    with pytest.raises(RuntimeError, match="gradients of the same dtypes"):
        optimizer.step()
    capture(False)
    expected = param.detach() - 0.1 * param.grad.float()
    optimizer.step()  # what the sentence asks for
    torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=1e-7)


def test_scale_allocated_in_a_capture_raises(capture):
    capture(True)
    with pytest.raises(RuntimeError, match="must follow an ordinary iteration"):
        GradScaler("cpu").scale(torch.ones(()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_state_dtype
@pytest.mark.parametrize("optimizer_class", TORCH, ids=UPDATES)
def test_replayed_iterations_equal_eager_ones(optimizer_class, state_dtype):
    """Scaling, backward, check, clip, update and the scale's own update, captured whole; one replay overflows."""

    def trainer():
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64, device="cuda").half()
        options = {} if optimizer_class is FusedAdam else {"momentum": 0.9}
        options |= {"max_grad_norm": 1.0, "state_dtype": state_dtype}
        optimizer = optimizer_class(model.parameters(), lr=0.01, **options)
        scaler = GradScaler("cuda", init_scale=1024.0, growth_interval=3)
        x = torch.zeros(16, 64, device="cuda", dtype=torch.float16)

        def iteration():
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(model(x).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        return model, scaler, x, iteration

    torch.manual_seed(1)
    inputs = [torch.randn(16, 64, device="cuda").half() for _ in range(12)]
    inputs[7][0, 0] = float("inf")
    eager_model, eager_scaler, eager_x, eager = trainer()
    model, scaler, x, iteration = trainer()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in inputs[:3]:
            x.copy_(batch)
            iteration()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    for batch in inputs[3:]:
        x.copy_(batch)
        graph.replay()
    for batch in inputs:
        eager_x.copy_(batch)
        eager()
    for a, b in zip(model.parameters(), eager_model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert scaler.get_scale() == eager_scaler.get_scale()
    assert int(scaler.skipped_steps) == int(eager_scaler.skipped_steps) == 1
