"""PrecisionReport: its counts against plain torch, what it samples, what it leaves alone, and what it advises."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_kernels
from amp_kernels import PrecisionReport, precision
from amp_kernels.optim import FusedAdamW, FusedSGD

LOW = torch.float16


class Last(nn.Linear):
    """A layer whose code is not torch's, so that it can be compiled alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Outside(nn.LayerNorm):
    """A layer that computes in fp32 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


class Scale(nn.Module):
    """The identity, whose backward pass multiplies the gradient by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x if self.factor == 1 else _Scale.apply(x, self.factor)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def network(device: Any, dtype: torch.dtype = LOW, *, factor: float = 1.0) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(24, 40),
        nn.ReLU(inplace=True),
        Scale(factor),
        nn.Linear(40, 40, bias=False),
        nn.Tanh(),
        Last(40, 5),
    )
    return model.to(device, dtype)


def batch(device: Any, dtype: torch.dtype = LOW, *, rows: int = 33, seed: int = 0) -> Tensor:
    return torch.randn(rows, 24, generator=torch.Generator().manual_seed(seed), device="cpu").to(device, dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def train(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, x)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def by_key(report: PrecisionReport) -> dict[tuple[str, str], precision.Row]:
    rows = report.rows()
    keyed = {(row.kind, row.name): row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


def assert_counts(row: precision.Row, tensor: Tensor) -> None:
    """The figures of a row, computed from the tensor by other means than the reference of the operator."""
    x = tensor.detach().cpu()
    wide = x.double()
    finite = wide[wide.isfinite()]
    smallest = torch.finfo(x.dtype).smallest_normal
    assert (row.dtype, row.total) == (x.dtype, x.numel())
    assert row.zeros * row.total == pytest.approx((wide == 0).sum().item())
    assert row.nonfinite == (~wide.isfinite()).sum().item()
    assert row.subnormal * row.total == pytest.approx(((finite != 0) & (finite.abs() < smallest)).sum().item())
    assert row.lost_in_fp16 * row.total == pytest.approx(((finite != 0) & (finite.abs() < 2.0**-25)).sum().item())
    assert row.largest == (finite.abs().max().item() if finite.numel() else 0.0)
    exponents = torch.frexp(finite[finite != 0])[1] - 1 + 127
    assert torch.equal(row.exponents[1:255], torch.bincount(exponents.clamp(min=0), minlength=255)[1:255])
    if not row.nonfinite:
        assert row.norm == pytest.approx(torch.linalg.vector_norm(wide).item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------------ what is counted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_counts_are_those_of_torch(device, dtype):
    model = network(device, dtype, factor=2.0**-12)
    optimizer = FusedSGD(model.parameters(), lr=2.0**-9)
    scaler = amp_kernels.GradScaler(device, init_scale=8.0)
    expected: dict[tuple[str, str], Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            expected["activation", name] = output.detach().clone()
            output.register_hook(lambda gradient: expected.update({("activation_grad", name): gradient.clone()}))

        return hook

    handles = [layer.register_forward_hook(keep(name)) for name, layer in model.named_children()]
    report = PrecisionReport(model, optimizer, scaler)
    with report:
        scaler.scale(loss_of(model, batch(device, dtype))).backward()
        masters = {name: optimizer.master(p).clone() for name, p in model.named_parameters()}
        scaler.step(optimizer)
    for handle in handles:
        handle.remove()
    weights = dict(model.named_parameters())
    expected |= {("weight_grad", name): p.grad for name, p in weights.items()}
    found = by_key(report)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_counts(found[key], tensor)
    assert report.scale == 8.0
    for name, master in masters.items():
        row, change = found["weight_grad", name], optimizer.master(weights[name]) - master
        before = master.to(dtype)
        lost = (change != 0) & ((before.float() + change).to(dtype) == before)
        expected_counts = (0, 0) if dtype is torch.float32 else ((change != 0).sum().item(), lost.sum().item())
        assert (row.changed, row.lost) == expected_counts
    assert dtype is torch.float32 or sum(row.lost for row in found.values()) > 0


def test_a_step_with_inf_loses_no_updates_and_names_it(device):
    model = network(device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    scaler = amp_kernels.GradScaler(device, init_scale=4.0)
    with PrecisionReport(model, optimizer, scaler) as report:
        scaler.scale(loss_of(model, batch(device))).backward()
        model[3].weight.grad[3, 5] = torch.inf
        scaler.step(optimizer)
    found = by_key(report)
    assert found["weight_grad", "3.weight"].nonfinite == 1
    assert all(row.changed == row.lost == 0 for row in found.values())
    assert report.advice()[0].startswith("3.weight: 1 of its weight gradients are NaN or inf at a scale of 4;")


without_layers = pytest.mark.filterwarnings("ignore:PrecisionReport. no layer of the model")
# An update of a weight of 1, whose neighbours are 1 - ulp / 2 and 1 + ulp. In ulps of the weight: where its master is,
# what is added to it, and whether that is lost.
ULP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
UPDATES = [
    (0, 0, False),  # nothing is changed
    (0, 1 / 64, True),
    (0, 1 / 2, True),  # a tie goes to the even weight
    (0, 1 / 2 + 1 / 64, False),
    (0, -1 / 64, True),
    (0, -1 / 4, True),
    (0, -1 / 4 - 1 / 64, False),
    (1 / 4, 3 / 8, True),  # the weight becomes 1 + ulp because of its master
    (1 / 4, 1 / 2 + 1 / 64, False),
    (1 / 4, -1 / 4, True),  # the master becomes the weight
    (-1 / 8, -3 / 16, True),
    (3 / 8, -5 / 8, False),  # the weight stays 1 because of its master
]


@without_layers
@pytest.mark.parametrize("dtype", ULP, ids=str)
def test_what_is_lost(device, dtype):
    place, add, lost = torch.tensor(UPDATES).unbind(1)
    model = nn.ParameterList([torch.ones(len(UPDATES), dtype=dtype, device=device)])
    optimizer = FusedSGD(model.parameters(), lr=1.0)
    for distance in (place, add):
        model[0].grad_dtype = torch.float32
        assert torch.equal(model[0].detach().float().cpu(), torch.ones(len(UPDATES)))
        with PrecisionReport(model, optimizer) as report:
            model[0].grad = (-ULP[dtype] * distance).to(device)
            optimizer.step()
    (row,) = report.rows()
    assert (row.changed, row.lost) == ((add != 0).sum().item(), lost.sum().item())


@without_layers
def test_updates_of_every_kind_are_counted(device):
    """int8 states, weights with gaps, one without a gradient, writes by other code, and steps that add up."""
    base = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2), device="cpu")
    weights = [base[0], base[:, ::7], base[1, :50], base[1, :9]]
    model = nn.ParameterList([nn.Parameter(w.to(device, torch.bfloat16)) for w in weights[:3]])
    model.append(nn.Parameter(torch.empty(9, 3, device=device, dtype=torch.bfloat16)[:, 1].copy_(weights[3])))
    optimizer = FusedAdamW(model.parameters(), lr=2.0**-8, state_dtype=torch.int8)
    changed, lost = torch.zeros(4).long(), torch.zeros(4).long()
    with PrecisionReport(model, optimizer) as report:
        for step in range(3):
            for i, p in enumerate(model):
                p.grad = None if i == 2 else torch.full_like(p, 0.5 - step)
                if step == 1:
                    p.data[::2] = 1.5
            before = [optimizer.master(p).double() for p in model]
            optimizer.step()
            for i, (p, master) in enumerate(zip(model, before, strict=True)):
                change, weight = optimizer.master(p).double() - master, master.bfloat16()
                changed[i] += (change != 0).sum().item()
                lost[i] += ((change != 0) & ((weight.double() + change).float().bfloat16() == weight)).sum().item()
            assert not report._sample.masters  # the memory is free again
    found = by_key(report)
    names = [f"{i}" for i in (0, 1, 3)]
    counted = [found["weight_grad", name] for name in names]
    assert [row.changed for row in counted] == [changed[int(name)] for name in names]
    assert [row.lost for row in counted] == [lost[int(name)] for name in names]
    assert changed[2] == 0 and all(row.changed > row.lost > 0 for row in counted[:2])


@without_layers
def test_masters_that_stay_nan_are_not_changed(device):
    model = nn.ParameterList([torch.tensor([torch.nan, 1.0], dtype=torch.float16, device=device)])
    optimizer = FusedSGD(model.parameters(), lr=1.0)
    scaler = amp_kernels.GradScaler(device, init_scale=1.0)
    for bad, changed in ((torch.inf, 0), (1.0, 1)):
        with PrecisionReport(model, optimizer, scaler) as report:
            model[0].grad = torch.tensor([1.0, bad], dtype=torch.float16, device=device)
            scaler.scale(torch.zeros((), device=device))
            scaler.step(optimizer)
            scaler.update(1.0)
        assert report.rows()[0].changed == changed


def test_micro_batches_are_added(device):
    model = network(device)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    for seed in range(3):
        loss_of(model, batch(device, seed=seed, rows=10)).backward()
    optimizer.step()
    found = by_key(report)
    assert found["activation", "0"].total == found["activation_grad", "0"].total == 3 * 10 * 40
    assert found["weight_grad", "0.weight"].total == 24 * 40


class Outputs(nn.Module):
    """A layer that runs twice, one that returns its parameter, and layers with several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.many, self.own = nn.Linear(24, 24), Many(), Own()

    def forward(self, x: Tensor) -> Tensor:
        out = self.many(self.twice(self.twice(x)))
        return out["a"][0] * out["b"] + self.own().sum()


class Many(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": [x * 2, None], "b": x + 1, "c": torch.arange(3), "d": "text", "e": x.double()}


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))

    def forward(self) -> Tensor:
        return self.weight


def test_outputs_of_any_kind():
    model = Outputs()
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        with report:
            model(torch.randn(6, 24)).sum().backward()
            optimizer.step()
        found = by_key(report)
        assert found["activation", "twice"].total == found["activation_grad", "twice"].total == 2 * 6 * 24
        assert found["activation", "many"].total == found["activation_grad", "many"].total == 2 * 6 * 24
        assert found["activation", "own"].total == found["activation_grad", "own"].total == 7
    assert not model.own.weight._backward_hooks  # a hook on a parameter would stay for good


def test_validation_is_not_counted():
    model = network("cpu")
    outer = nn.ModuleDict({"model": model})  # in training mode, as a wrapper whose inner model is validated
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(outer, optimizer, every=1)
    with torch.no_grad():
        model.eval()(batch("cpu", rows=100))
    train(model.train(), optimizer, None, batch("cpu"))
    assert by_key(report)["activation", "model.0"].total == 33 * 40


def test_a_model_that_trains_in_evaluation_mode():
    model = network("cpu").eval()
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    train(model, optimizer, None, batch("cpu"))
    assert by_key(report)["activation", "0"].total == 33 * 40


def test_steps_of_a_block_are_added_up_with_other_dtypes_and_groups():
    model = network("cpu", torch.float32)
    first, rest = [model[0].weight], [model[0].bias, *model[1:].parameters()]
    optimizer = FusedSGD(first, lr=0.5)
    with PrecisionReport(model, optimizer) as report:
        train(model, optimizer, None, batch("cpu", torch.float32))
        optimizer.add_param_group({"params": rest})
        model.half()
        train(model, optimizer, None, batch("cpu", rows=10))
    found = by_key(report)
    assert found["weight_grad", "0.bias"].total == 40 and found["weight_grad", "0.bias"].dtype is torch.float16
    for name, rows in (("float32", 33), ("float16", 10)):
        assert found["activation", f"0 ({name})"].total == found["activation_grad", f"0 ({name})"].total == rows * 40
        assert found["weight_grad", f"0.weight ({name})"].total == 24 * 40


@pytest.mark.parametrize("factors", [(8.0, 1.0), (1.0, 8.0)], ids=["falls", "rises"])
def test_the_largest_of_several_steps_is_kept(factors):
    model = network("cpu", torch.float32)
    optimizer = FusedSGD(model.parameters(), lr=0.0)
    largest: dict[str, float] = {}
    with PrecisionReport(model, optimizer) as report:
        for factor in factors:
            optimizer.zero_grad()
            (factor * loss_of(model, batch("cpu", torch.float32))).backward()
            for name, p in model.named_parameters():
                largest[name] = max(largest.get(name, 0.0), float(p.grad.abs().max()))
            optimizer.step()
    assert {row.name: row.largest for row in report.rows() if row.kind == "weight_grad"} == largest


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_counted_once(reentrant):
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    with PrecisionReport(model, optimizer) as report:
        x = batch("cpu").requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).float().square().mean().backward()
        optimizer.step()
    found = by_key(report)
    assert {name for _, name in found} >= {"0", "1", "2", "3", "4", "5"}
    assert all(found["activation", str(i)].total == found["activation_grad", str(i)].total for i in range(6))
    assert found["activation", "0"].total == 33 * 40


@pytest.mark.parametrize("compiled", ["model", "layers", "original", "step"])
def test_compiled_code_runs_eagerly_in_a_sampled_step(compiled):
    model = network("cpu", torch.float32)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            graphs.append(graph)
            return graph(*args)

        return run

    step, reported = train, model
    if compiled == "model":
        model = reported = torch.compile(model, backend=backend)  # type: ignore[assignment]
    elif compiled == "layers":
        for layer in model:
            layer.compile(backend=backend)
    elif compiled == "original":
        model = torch.compile(model, backend=backend)  # type: ignore[assignment]
    else:
        step = torch.compile(train, backend=backend)
    is_seen = compiled in ("model", "layers")  # by hooks, so that the report can count every third step
    report = PrecisionReport(reported, optimizer, every=3 if is_seen else None)
    ran = []
    for seed in range(6):
        graphs.clear()
        with nullcontext() if is_seen or seed % 3 < 2 else report:
            step(model, optimizer, None, batch("cpu", torch.float32, seed=seed))
        ran.append(len(graphs))
    assert [count > 0 for count in ran] == [True, True, False] * 2
    found = {(kind, name.removeprefix("_orig_mod.")): row for (kind, name), row in by_key(report).items()}
    kinds = ("activation", "activation_grad")
    assert all(found[kind, str(layer)].total == 33 * (5 if layer == 5 else 40) for kind in kinds for layer in range(6))
    assert found["weight_grad", "3.weight"].total == 40 * 40
    torch._dynamo.reset()


def test_a_report_that_sees_no_layer_says_so():
    model = network("cpu", torch.float32)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    with pytest.warns(UserWarning, match="no layer of the model called its hooks"):
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()
    assert {kind for kind, _ in by_key(report)} == {"weight_grad"}
    report.close()


def test_the_stance_of_the_compiler_is_changed_in_the_model_alone():
    def stance() -> str:
        return torch._dynamo.eval_frame._stance.stance

    seen = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(stance())
            if len(x) == 1:
                raise ValueError
            return x

    model = nn.Sequential(nn.Linear(24, 24), Spy())
    pairs = [FusedSGD([param], lr=0.5) for param in model.parameters()]
    reports = [PrecisionReport(model, optimizer, every=1) for optimizer in pairs]
    with torch.compiler.set_stance("eager_on_recompile"):
        model(batch("cpu", torch.float32)).sum().backward()
        assert stance() == "eager_on_recompile"
    with pytest.raises(ValueError):
        model(batch("cpu", torch.float32, rows=1))
    assert stance() == "default" and seen == ["force_eager"] * 2
    for optimizer, report in zip(pairs, reports, strict=True):
        optimizer.step()
        report.close()
    assert stance() == "default"
    model(batch("cpu", torch.float32))
    assert seen[-1] == "default"


def test_a_whole_graph_may_be_demanded():
    model = network("cpu", torch.float32)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with PrecisionReport(model, optimizer, every=1) as report:
        with torch.no_grad():
            compiled.eval()(batch("cpu", torch.float32))
        train(compiled.train(), optimizer, None, batch("cpu", torch.float32))
    assert by_key(report)["activation", "0"].total == 33 * 40
    step = torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=True)
    step(batch("cpu", torch.float32))  # the hooks are there, and are not traced
    report.close()
    torch._dynamo.reset()


def test_export_sees_no_hooks():
    model = network("cpu", torch.float32)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    program = torch.export.export(model, (batch("cpu", torch.float32),))
    assert "count_exponents" not in str(program.graph)
    train(model, optimizer, None, batch("cpu", torch.float32))
    assert by_key(report)["activation", "0"].total == 33 * 40


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_are_not_sampled(duplicate):
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    copied = duplicate(model)
    copied(batch("cpu", rows=100))
    train(model, optimizer, None, batch("cpu"))
    assert by_key(report)["activation", "0"].total == 33 * 40


# ------------------------------------------------------------------------------------------------ what it leaves alone
def test_other_steps_run_no_code_of_the_report(device):
    model = network(device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    scaler = amp_kernels.GradScaler(device, init_scale=4.0)
    report = PrecisionReport(model, optimizer, scaler, every=4)
    sampled = []
    for seed in range(9):
        called = False

        def watch(frame: Any, event: str, argument: Any) -> None:
            nonlocal called
            called = called or frame.f_code.co_filename == precision.__file__

        hooks = sum(len(layer._forward_hooks) for layer in model)
        sys.setprofile(watch)
        try:
            train(model, optimizer, scaler, batch(device, seed=seed))
        finally:
            sys.setprofile(None)
        # The step before a sample installs the hooks, and the sample itself removes them.
        sampled.append((hooks > 0, called))
    off, installs, samples = (False, False), (False, True), (True, True)
    assert sampled == [off, off, installs, samples, off, off, installs, samples, off]
    assert by_key(report)["activation", "0"].total == 33 * 40
    report.close()
    for seed in range(4):
        train(model, optimizer, scaler, batch(device, seed=seed))
    assert optimizer._observer is None and not any(layer._forward_hooks for layer in model)


def test_training_is_the_same_with_a_report(device):
    def weights(every: int | None) -> list[Tensor]:
        model = network(device)
        optimizer = FusedAdamW(model.parameters(), lr=1e-3, max_grad_norm=0.5, state_dtype=torch.bfloat16)
        scaler = amp_kernels.GradScaler(device, init_scale=2.0**20, growth_interval=2)
        report = None if every is None else PrecisionReport(model, optimizer, scaler, every=every)
        for seed in range(5):
            train(model, optimizer, scaler, batch(device, seed=seed))
        assert report is None or report.rows()
        masters = [optimizer.master(p) for p in model.parameters()]
        return [*masters, *(t for s in optimizer.state.values() for t in s.values()), scaler._scale]

    for with_report, without in zip(weights(1), weights(None), strict=True):
        assert torch.equal(with_report, without)


def test_a_sample_can_end_without_a_step():
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer)
    with pytest.raises(ZeroDivisionError), report:
        loss_of(model, batch("cpu")).backward()
        _ = 1 / 0
    assert {kind for kind, _ in by_key(report)} == {"activation", "activation_grad"}
    assert optimizer._observer is None and not any(layer._forward_hooks for layer in model)


@pytest.mark.parametrize("scaler", [amp_kernels.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("unscales", [False, True])
def test_scalers(scaler, unscales):
    model = network("cpu", torch.float32)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    scaler = scaler("cpu", init_scale=2.0**10)
    with PrecisionReport(model, optimizer, scaler) as report:
        scaler.scale(loss_of(model, batch("cpu", torch.float32))).backward()
    assert report.scale == 2.0**10  # also without a step
    optimizer.zero_grad()
    with report:
        scaler.scale(loss_of(model, batch("cpu", torch.float32))).backward()
        largest = model[0].weight.grad.abs().max().item()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert report.scale == 2.0**10
    row = by_key(report)["weight_grad", "0.weight"]
    assert row.largest == pytest.approx(largest / 2**10 if unscales else largest)


# ------------------------------------------------------------------------------------------------------------- advice
def test_a_layer_whose_gradients_vanish_is_named(device):
    model = network(device, factor=2.0**-26)
    optimizer = FusedSGD(model.parameters(), lr=0.0)
    scaler = amp_kernels.GradScaler(device, init_scale=2.0**4)
    with PrecisionReport(model, optimizer, scaler) as report:
        scaler.scale(loss_of(model, batch(device))).backward()
        scaler.step(optimizer)
    found, advice = by_key(report), report.advice()
    assert {said.partition(":")[0] for said in advice} == {"0", "1", "0.weight", "0.bias"}
    assert found["activation", "1"].zeros > 0.3  # the zeros of ReLU call for no advice
    room = math.floor(math.log2(65504 / max(row.largest for row in found.values() if row.kind != "activation")))
    assert room > 3
    ending = f"; the scale may rise by 2^{room} before a gradient of the report overflows"
    assert all(said.endswith((ending, ending + ", unless the loss does not depend on them")) for said in advice)
    # At a scale that is 2^room times as large nothing overflows; at twice that scale, something does.
    for more, overflows in ((room, False), (room + 1, True)):
        optimizer.zero_grad()
        scaler = amp_kernels.GradScaler(device, init_scale=2.0 ** (4 + more))
        with report:
            scaler.scale(loss_of(model, batch(device))).backward()
            scaler.step(optimizer)
        assert any(row.nonfinite for row in report.rows()) == overflows


def test_gradients_that_are_all_0():
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    with PrecisionReport(model, optimizer) as report:
        (loss_of(model, batch("cpu")) * 1e-9).backward()
        optimizer.step()
    advice = report.advice()
    assert len(advice) == 6 + 5
    for said in advice:
        assert "gradients are 0 at a scale of 1; take a larger scale and sample again, unless the loss does not" in said


def test_autocast_computes_gradients_of_fp32_weights_in_fp16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), Outside(40), nn.Linear(40, 1))
    optimizer = FusedSGD(model.parameters(), lr=0.0)
    report = PrecisionReport(model, optimizer, scaler := amp_kernels.GradScaler("cpu", init_scale=2.0**6))

    def sample(scale: float, unscales: bool = False) -> dict[tuple[str, str], precision.Row]:
        optimizer.zero_grad()
        scaler.update(scale)
        with report:
            with torch.autocast("cpu", torch.float16):
                output = model(batch("cpu", torch.float32, rows=4096))
            scaler.scale(output.float().square().mean()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        return by_key(report)

    scaler.scale(torch.ones(()))
    found = sample(2.0**6)
    row = found["weight_grad", "2.weight"]
    assert (row.dtype, row.computed_in) == (torch.float32, torch.float16)
    assert found["weight_grad", "1.weight"].computed_in is torch.float32
    advisor = precision._Advisor(list(found.values()), 2.0**6, has_scaler=True)
    room = math.floor(advisor._room)
    assert not any(row.nonfinite for row in sample(2.0 ** (6 + room)).values())
    assert any(row.nonfinite for row in sample(2.0 ** (7 + room)).values())
    # Fewer digits are left at a small scale, also if unscale_ has divided the gradients in fp32 since.
    small, divided = (sample(2.0**-6, unscales)["weight_grad", "0.weight"] for unscales in (False, True))
    assert small.underflow > 0.1 and divided.divided_by == 2.0**-6
    assert divided.underflow == small.underflow and divided.headroom == pytest.approx(small.headroom)
    assert divided.lost_in_fp16 == small.lost_in_fp16


def test_gradients_that_were_divided_in_fp16_are_no_matter_of_the_scale():
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.0)
    scaler = amp_kernels.GradScaler("cpu", init_scale=2.0**14)
    with PrecisionReport(model, optimizer, scaler) as report:
        scaler.scale(loss_of(model, batch("cpu")) / 100).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    advice = report.advice()
    assert advice and all("divided by the scale in fp16; clip with max_grad_norm" in said for said in advice)


def test_zeros_that_no_scale_changes_are_no_underflow():
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 5)).half()
    with torch.no_grad():
        model[0].bias.fill_(-1.0)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    with PrecisionReport(model, optimizer) as report:
        (model(batch("cpu")).sum()).backward()
        optimizer.step()
    row = by_key(report)["activation_grad", "0"]
    assert row.zeros > 0.5 and row.subnormal == 0 and row.underflow == 0
    assert not any(said.startswith("0:") for said in report.advice())


def test_layers_that_overflow_are_named():
    model = network("cpu")
    with torch.no_grad():
        model[3].weight.mul_(3000)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    with PrecisionReport(model, optimizer) as report:
        loss_of(model, 100 * batch("cpu")).backward()
    first, *others = report.advice()
    bad = int((~model[3](model[:3](100 * batch("cpu"))).isfinite()).sum())
    assert bad > 0 and first.startswith(f"3: {bad} of its activations are NaN or inf, and the largest finite one is ")
    assert not any("at a scale" in said for said in others)  # the gradients are NaN because of the activations


def row_of(name: str, kind: str, dtype: torch.dtype, column: int, largest: float) -> precision.Row:
    """A row of 4 elements of the same exponent."""
    exponents = torch.zeros(257, dtype=torch.int64)
    exponents[column] = 4
    return precision.Row(name, kind, dtype, exponents, largest, 1.0, computed_in=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_are_not_computed_in_fp16_do_not_bound_the_scale(dtype):
    """A gradient of 6e4 is near the end of fp16, but far from that of the other dtypes."""
    small = row_of("small", "weight_grad", LOW, 127 - 15, 2.0**-15)
    large = row_of("large", "weight_grad", dtype, 127 + 15, 6e4)
    advisor = precision._Advisor([small, large], 1.0, has_scaler=True)
    said = advisor.about(small)
    assert said is not None and "the scale may rise by 2^30 before a gradient of the report overflows" in said
    bounded = precision._Advisor([small, large._replace(computed_in=LOW)], 1.0, has_scaler=True).about(small)
    assert bounded is not None and "the scale cannot rise" in bounded


@pytest.mark.parametrize("dtype", [LOW, torch.bfloat16], ids=str)
def test_an_activation_that_overflows_outside_of_fp16_comes_from_the_inputs(dtype):
    row = row_of("layer", "activation", dtype, 255, 1.0)
    said = precision._Advisor([row], 1.0, has_scaler=False).about(row)
    remedy = "compute the layer in bf16 or fp32" if dtype is LOW else "check the inputs and weights of the layer"
    assert said is not None and said.endswith(remedy)


def test_activations_near_the_largest_number_are_named():
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).half()
    nn.init.eye_(model[0].weight)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    with PrecisionReport(model, optimizer) as report:
        model(torch.full((2, 4), 40000.0).half())
    assert report.advice() == [
        "0: its largest activation is 4e+04, and fp16 ends at 65504; compute the layer in bf16 or fp32"
    ]


def test_parameters_whose_updates_are_lost_are_named(device):
    model = network(device, torch.bfloat16)
    groups = [{"params": list(model[:3].parameters()), "lr": 2.0**-16}, {"params": list(model[3:].parameters())}]
    optimizer = FusedSGD(groups, lr=2.0)
    with PrecisionReport(model, optimizer) as report:
        loss_of(model, batch(device, torch.bfloat16)).backward()
        optimizer.step()
    (said,) = (said for said in report.advice() if said.startswith("keep the masters"))
    shares = {name: row.lost_updates for (_, name), row in by_key(report).items() if row.lost_updates is not None}
    assert {name for name, share in shares.items() if share >= 0.5} == {"0.weight", "0.bias"}
    listed = sorted((f"{name} {shares[name]:.0%}" for name in ("0.weight", "0.bias")), key=lambda x: x.split()[1])
    assert all(each in said for each in listed) and "3.weight" not in said


# ------------------------------------------------------------------------------------------------------------- results
def test_a_plot_without_matplotlib_names_the_install(monkeypatch):
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    train(model, optimizer, None, batch("cpu"))
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    sentence = r"PrecisionReport.plot: matplotlib must be installed; run pip install 'amp-kernels\[bench\]'"
    with pytest.raises(ImportError, match=sentence):
        report.plot()


def test_results_before_and_after_a_sample(tmp_path):
    pytest.importorskip("matplotlib")
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    assert (report.rows(), report.as_dict(), report.advice(), report.scale) == ([], {}, [], None)
    assert str(report) == "PrecisionReport: no step was sampled yet"
    with pytest.raises(ValueError, match="no sampled step has an activation_grad"):
        report.plot()
    train(model, optimizer, None, batch("cpu"))
    figures = report.as_dict()
    row = by_key(report)["weight_grad", "3.weight"]
    assert figures["scale"] == 1.0 and figures["weight_grad/3.weight/zeros"] == row.zeros
    assert figures["weight_grad/3.weight/lost_updates"] == row.lost_updates == row.lost / row.changed
    assert all(isinstance(figure, (int, float)) and math.isfinite(figure) for figure in figures.values())
    text = str(report).splitlines()
    assert text[0] == "loss scale: 1" and len([line for line in text if " float16 " in line]) == len(report.rows())
    assert len(report.table(limit=2).splitlines()) == 4
    for kind in precision.KINDS:
        figure = report.plot(kind)
        bars, colours, *_ = figure.axes
        rows = [row for row in report.rows() if row.kind == kind]
        assert sorted(label.get_text() for label in bars.get_yticklabels()) == sorted(row.name for row in rows)
        shown = torch.as_tensor(colours.images[0].get_array()).sum(1)
        names = [label.get_text() for label in bars.get_yticklabels()]
        for name, share in zip(names, shown.tolist(), strict=True):
            (row,) = (row for row in rows if row.name == name)
            assert share == pytest.approx(1 - row.zeros - row.nonfinite / row.total, abs=1e-6)
        figure.savefig(tmp_path / f"{kind}.png")


# -------------------------------------------------------------------------------------------------------------- errors
def test_a_capture_is_refused_before_anything_changes(monkeypatch):
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    loss_of(model, batch("cpu")).backward()
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(precision, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="must not be captured in a CUDA graph"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="must not be captured in a CUDA graph"):
        model(batch("cpu"))
    report.close()
    optimizer.step()


def test_arguments():
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    theirs = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(TypeError, match="model must be a torch Module, got a list"):
        PrecisionReport([model], optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be one of amp_kernels\.optim.*got a SGD"):
        PrecisionReport(model, theirs)
    for every in (1.0, True, "1"):
        with pytest.raises(TypeError, match="every must be an int or None"):
            PrecisionReport(model, optimizer, every=every)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        PrecisionReport(model, optimizer, every=0)
    report = PrecisionReport(model, optimizer, every=1)
    with pytest.raises(ValueError, match="another report samples the optimizer"):
        PrecisionReport(model, optimizer)
    with pytest.raises(ValueError, match="limit must be at least 0 or None, got -1"):
        report.table(-1)
    with pytest.raises(TypeError, match="scaler must be a GradScaler or None, got a float"):
        PrecisionReport(model, optimizer, 1024.0)
    with pytest.raises(ValueError, match="must train parameters of the model, got an optimizer that trains none"):
        PrecisionReport(network("cpu"), optimizer)
    with pytest.raises(ValueError, match="kind must be one of activation, activation_grad, weight_grad, got 'x'"):
        report.plot("x")
    with report, pytest.raises(RuntimeError, match="must not be nested"), report:
        pass
    report.close()
    PrecisionReport(model, optimizer, every=1).close()


def test_a_block_of_a_report_that_also_samples_every_step():
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=3)
    train(model, optimizer, None, batch("cpu"))
    with report:
        for rows in (2, 3):
            train(model, optimizer, None, batch("cpu", rows=rows))
    assert by_key(report)["activation", "0"].total == 5 * 40
    for rows, expected in ((7, 5), (8, 5), (9, 9), (10, 9)):
        train(model, optimizer, None, batch("cpu", rows=rows))
        assert by_key(report)["activation", "0"].total == expected * 40


def test_copies_of_an_optimizer_are_not_sampled():
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied._observer is None and copied._sampler is None
    train(model, optimizer, None, batch("cpu"))
    assert report.rows()


def test_reports_in_odd_states():
    model = network("cpu")
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer, every=1)
    train(model, optimizer, None, batch("cpu"))
    with report:  # counts nothing
        pass
    assert by_key(report)["activation", "0"].total == 33 * 40
    with PrecisionReport(model, other := FusedSGD(model.parameters(), lr=0.5)) as block:
        with pytest.raises(RuntimeError, match="another report samples this step"):
            PrecisionReport(model, other, every=1)
        block.close()
    assert other._sampler is None and PrecisionReport(model, other, every=1).rows() == []
    with report:
        train(model, optimizer, None, batch("cpu", rows=7))
        report.close()
        train(model, optimizer, None, batch("cpu", rows=7))
    assert by_key(report)["activation", "0"].total == 33 * 40  # the last sample that has ended
    with report:
        train(model, optimizer, None, batch("cpu", rows=7))
    assert by_key(report)["activation", "0"].total == 7 * 40 and optimizer._observer is None


def test_a_step_that_fails_leaves_no_masters(monkeypatch):
    """They take 4 bytes for each weight. Perhaps they are why the memory ran out."""
    model = network("cpu").half()
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    report = PrecisionReport(model, optimizer)

    def fails(*_):
        raise MemoryError

    with pytest.raises(MemoryError), report:
        model(torch.ones(3, 24).half()).float().sum().backward()
        for plan in optimizer._prepare():
            monkeypatch.setattr(type(plan), "update", fails)
        optimizer.step()
    assert report._last is not None and report._last.masters == []


class Overridden(FusedSGD):
    """A step that a scaler skips on the host."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_that_is_skipped_on_the_host_ends_a_sample():
    model = network("cpu")
    optimizer = Overridden(model.parameters(), lr=0.5)
    scaler = amp_kernels.GradScaler("cpu", init_scale=2.0)
    report = PrecisionReport(model, optimizer, scaler, every=1)
    scaler.scale(loss_of(model, batch("cpu"))).backward()
    model[3].weight.grad[3, 5] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert by_key(report)["weight_grad", "3.weight"].nonfinite == 1 and report.scale == 2.0
    train(model, optimizer, scaler, batch("cpu", rows=7))
    assert by_key(report)["activation", "0"].total == 7 * 40 and report.scale == 1.0


class Proxy:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def test_wrapped_optimizers():
    model = network("cpu")
    optimizer = Proxy(FusedSGD(model.parameters(), lr=0.5))
    report = PrecisionReport(model, optimizer, every=1)
    train(model, optimizer, None, batch("cpu"))
    assert by_key(report)["weight_grad", "0.weight"].total == 24 * 40
