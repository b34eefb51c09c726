"""`fp32_state_dict` and `load_fp32_state_dict`: every bit of what is trained, in and out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from optim_cases import FULL, OF_TORCH, assert_same, low_dtypes, optimizers, randn

from amp_kernels.optim import FusedSGD, fp32_state_dict, load_fp32_state_dict
from amp_kernels.reference._master import join, split


class Model(torch.nn.Module):
    """Tied and frozen parameters, buffers of floats and of integers, an entry that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.embedding(x))))


def model(dtype: torch.dtype, device: torch.device, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().to(device, dtype)


def train(net: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    params = [p for p in net.parameters() if p.requires_grad]
    for step in steps:
        for i, p in enumerate(params):
            p.grad = randn(*p.shape, seed=100 * step + i, dtype=p.dtype, device=p.device)
        optimizer.step()


@optimizers
@low_dtypes
def test_from_16_bits_to_fp32_and_back(device, family, dtype):
    net = model(dtype, device)
    optimizer = family(net.parameters(), **FULL[family])
    train(net, optimizer, range(3))
    saved = fp32_state_dict(net, optimizer)
    assert saved.keys() == net.state_dict().keys()
    for name, p in net.named_parameters():
        assert saved[name].dtype is torch.float32 and torch.equal(saved[name], optimizer.master(p))
        assert torch.equal(saved[name].to(dtype), p)
    assert not torch.equal(saved["embedding.weight"], net.embedding.weight.float())
    assert saved["head.weight"] is saved["embedding.weight"]
    assert saved["norm.num_batches_tracked"].dtype is torch.int64
    assert torch.equal(saved["norm.running_mean"], net.norm.running_mean.float())
    assert saved["_extra_state"] == {"version": 3}

    wide = model(torch.float32, device, seed=1)
    wide.load_state_dict(saved)
    in_fp32 = family(wide.parameters(), **FULL[family])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_fp32.load_state_dict(optimizer.state_dict())
    train(wide, in_fp32, range(3, 5))

    back = model(dtype, device, seed=2)
    resumed = family(back.parameters(), **FULL[family])
    resumed.load_state_dict(in_fp32.state_dict())
    load_fp32_state_dict(back, resumed, fp32_state_dict(wide, in_fp32))
    for p, q in zip(back.parameters(), wide.parameters(), strict=True):
        weight, remainder = split(q.detach(), dtype)
        assert torch.equal(p, weight) and torch.equal(resumed.master(p), join(weight, remainder))
    assert back.head.weight is back.embedding.weight
    train(back, resumed, range(5, 6))


@optimizers
@low_dtypes
@pytest.mark.parametrize("weights_first", [False, True])
def test_training_goes_on_bit_for_bit(device, family, dtype, weights_first):
    net = model(dtype, device)
    optimizer = family(net.parameters(), **FULL[family])
    train(net, optimizer, range(3))
    weights, state = fp32_state_dict(net, optimizer), optimizer.state_dict()
    other = model(dtype, device, seed=1)
    resumed = family(other.parameters(), **FULL[family])
    train(other, resumed, range(7, 8))
    if not weights_first:
        resumed.load_state_dict(state)
    load_fp32_state_dict(other, resumed, weights)
    if weights_first:
        resumed.load_state_dict(state)
    for step in (3, 4):
        train(net, optimizer, range(step, step + 1))
        train(other, resumed, range(step, step + 1))
    expected, found = fp32_state_dict(net, optimizer), fp32_state_dict(other, resumed)
    tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    assert_same([found[name] for name in tensors], [expected[name] for name in tensors])


@optimizers
def test_with_torchs_optimizer(device, family):
    net = model(torch.float32, device)
    theirs = OF_TORCH[family](net.parameters(), **FULL[family])
    train(net, theirs, range(2))
    saved = fp32_state_dict(net, theirs)
    assert torch.equal(saved["head.bias"], net.head.bias)
    assert saved["head.bias"].data_ptr() != net.head.bias.data_ptr()  # a copy
    low = model(torch.bfloat16, device, seed=1)
    ours = family(low.parameters(), **FULL[family])
    load_fp32_state_dict(low, ours, saved)
    assert torch.equal(ours.master(low.head.bias), join(*split(net.head.bias.detach(), torch.bfloat16)))
    load_fp32_state_dict(net, theirs, fp32_state_dict(low, ours))
    assert torch.equal(net.head.bias, ours.master(low.head.bias))


def test_what_does_not_fit_raises_before_masters_change(device):
    net = model(torch.bfloat16, device)
    optimizer = FusedSGD(net.parameters(), lr=0.1)
    train(net, optimizer, range(1))
    saved = fp32_state_dict(net, optimizer)
    masters = [optimizer.master(p) for p in net.parameters()]
    del saved["head.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        load_fp32_state_dict(net, optimizer, saved)
    assert_same([optimizer.master(p) for p in net.parameters()], masters)


@optimizers
@low_dtypes
def test_bits_that_would_be_lost_warn(device, family, dtype):
    """The state of a 16-bit optimizer in fp32 parameters that hold 16-bit weights."""
    net = model(dtype, device)
    optimizer = family(net.parameters(), **FULL[family])
    train(net, optimizer, range(2))
    wide = model(torch.float32, device, seed=1)
    other = family(wide.parameters(), **FULL[family])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(optimizer.state_dict())  # before the weights: there is nothing to lose yet
    wide.load_state_dict(net.state_dict())
    with pytest.warns(UserWarning, match=r"hold 16-bit weights, .* with amp_kernels.optim.fp32_state_dict\(model"):
        other.load_state_dict(optimizer.state_dict())


@optimizers
@low_dtypes
@pytest.mark.parametrize("weights_first", [False, True])
def test_an_fp32_state_keeps_loaded_masters(device, family, dtype, weights_first):
    """It has none of its own: neither ours of fp32 parameters nor torch's."""
    wide = model(torch.float32, device)
    theirs = OF_TORCH[family](wide.parameters(), **FULL[family])
    train(wide, theirs, range(2))
    low = model(dtype, device, seed=1)
    ours = family(low.parameters(), **FULL[family])
    if not weights_first:
        ours.load_state_dict(theirs.state_dict())
    load_fp32_state_dict(low, ours, fp32_state_dict(wide, theirs))
    if weights_first:
        ours.load_state_dict(theirs.state_dict())
    for p, q in zip(low.parameters(), wide.parameters(), strict=True):
        assert torch.equal(ours.master(p), join(*split(q.detach(), dtype)))
    assert "momentum_buffer" in ours.state[low.head.bias] or "exp_avg" in ours.state[low.head.bias]


@low_dtypes
def test_a_state_of_torch_without_entries_keeps_loaded_masters(device, dtype):
    """torch's SGD has no state without momentum. Ours has none before its first step, when masters are weights."""
    wide, low = model(torch.float32, device), model(dtype, device, seed=1)
    theirs, ours = torch.optim.SGD(wide.parameters(), lr=0.1), FusedSGD(low.parameters(), lr=0.1)
    load_fp32_state_dict(low, ours, fp32_state_dict(wide, theirs))
    ours.load_state_dict(theirs.state_dict())
    for p, q in zip(low.parameters(), wide.parameters(), strict=True):
        assert torch.equal(ours.master(p), join(*split(q.detach(), dtype)))
    ours.load_state_dict(FusedSGD(model(dtype, device).parameters(), lr=0.1).state_dict())
    assert all(torch.equal(ours.master(p), p.float()) for p in low.parameters())


class Mixed(torch.nn.Module):
    """Parameters of dtypes that have no masters, some of which no optimizer of ours steps."""

    def __init__(self) -> None:
        super().__init__()
        self.low = torch.nn.Parameter(torch.linspace(0, 1, 7).bfloat16())
        self.wide = torch.nn.Parameter(torch.linspace(0, 1, 7).double(), requires_grad=False)
        self.complex_ = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.integer_ = torch.nn.Parameter(torch.arange(3), requires_grad=False)
        self.float8_ = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)


def test_other_dtypes_stay_as_they_are(device):
    net = Mixed().to(device)
    optimizer = FusedSGD(net.parameters(), lr=0.1, momentum=0.9)
    saved = fp32_state_dict(net, optimizer)
    dtypes = {name: p.dtype for name, p in net.named_parameters()}
    assert {name: value.dtype for name, value in saved.items()} == {**dtypes, "low": torch.float32}
    saved["low"] += 1e-4
    load_fp32_state_dict(net, optimizer, saved)
    assert torch.equal(optimizer.master(net.low), join(*split(saved["low"], torch.bfloat16)))
    assert list(optimizer.state) == [net.low]


def test_frozen_parameters_get_no_states(device):
    net = model(torch.bfloat16, device)
    optimizer = FusedSGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, optimizer, range(1))
    saved = {name: value + 1e-4 if value.is_floating_point() else value for name, value in tensors(net, optimizer)}
    load_fp32_state_dict(net, optimizer, {**saved, "_extra_state": {"version": 3}})
    weight = net.frozen.weight
    expected = join(*split(saved["frozen.weight"], torch.bfloat16))
    assert optimizer.state[weight].keys() == {"remainder"}
    other = FusedSGD(net.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    train(net, other, range(2, 3))
    assert other.state[weight].keys() == {"remainder"} and torch.equal(other.master(weight), expected)
    weight.requires_grad_(True)
    train(net, other, range(3, 4))
    assert "momentum_buffer" in other.state[weight]


def tensors(net: Model, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [(name, v) for name, v in fp32_state_dict(net, optimizer).items() if isinstance(v, torch.Tensor)]


class Detached(Model):
    """Its state dict holds other tensors than its parameters, as that of FSDP1 does."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def test_a_state_dict_of_other_tensors(device):
    net = Detached().to(device, torch.bfloat16)
    optimizer = FusedSGD(net.parameters(), lr=0.1)
    train(net, optimizer, range(1))
    before = [optimizer.master(p) for p in net.parameters()]
    saved = {name: torch.zeros_like(v) for name, v in net.state_dict().items() if isinstance(v, torch.Tensor)}
    sentence = r"the model's own parameters, but lacks 6 of them \(embedding.weight is the first\), so their masters"
    with pytest.raises(RuntimeError, match=f"^fp32_state_dict: .*{sentence}"):
        fp32_state_dict(net, optimizer)
    with pytest.raises(RuntimeError, match=f"^load_fp32_state_dict: .*{sentence}"):
        load_fp32_state_dict(net, optimizer, saved)
    assert_same([optimizer.master(p) for p in net.parameters()], before)


def test_names_that_a_hook_of_the_model_renames(device):
    net = model(torch.bfloat16, device)
    optimizer = FusedSGD(net.parameters(), lr=0.1)
    train(net, optimizer, range(1))
    saved = fp32_state_dict(net, optimizer)
    saved["old"] = saved.pop("head.bias")

    def rename(_: object, state: dict[str, Any], prefix: str, *__: object) -> None:
        state["head.bias"] = state.pop("old")

    net.register_load_state_dict_pre_hook(rename)
    with pytest.warns(UserWarning, match=r"a hook of the model renames 1 of them \(head.bias is the first\)"):
        load_fp32_state_dict(net, optimizer, saved)
    assert torch.equal(optimizer.master(net.head.bias), net.head.bias.float())
    assert not torch.equal(optimizer.master(net.head.weight), net.head.weight.float())


def test_what_is_no_model_or_no_optimizer(device):
    net = model(torch.bfloat16, device)
    optimizer = FusedSGD(net.parameters(), lr=0.1)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    for arguments, sentence in (
        ((3, optimizer), "model must be a torch Module, got a int"),
        ((net, 3), "optimizer must be a torch Optimizer, got a int"),
        ((net, Wrapper()), "must be the FusedSGD that keeps the masters, got a Wrapper around it; pass the FusedSGD"),
    ):
        with pytest.raises(TypeError, match=f"^fp32_state_dict: .*{sentence}"):
            fp32_state_dict(*arguments)
        with pytest.raises(TypeError, match=f"^load_fp32_state_dict: .*{sentence}"):
            load_fp32_state_dict(*arguments, net.state_dict())
    with pytest.raises(ValueError, match=r"FusedSGD.master: param must be one of .* parameters, got a int"):
        optimizer.master(3)
