"""Parameters and state that someone changes between steps."""

from __future__ import annotations

import pytest
import torch
from optim_cases import (
    ALL,
    DAMPENED,
    DTYPES,
    FULL,
    Pair,
    assert_rounded,
    assert_same,
    dtypes,
    families,
    fp32,
    low_dtypes,
    parameters,
    randn,
    set_grads,
    snapshot,
    started,
)
from torch import Tensor

from amp_kernels.optim import FusedSGD


# ---------------------------------------------------------------------------------------------------- storage and dtype
@families
@dtypes
def test_changed_storage_is_followed(device, family, dtype):
    pair = Pair(family, parameters([dtype], device), **FULL[family])
    for step in range(6):
        if step == 3:
            for p in pair.params:
                p.data = p.data.clone()
        set_grads(pair.params, step)
        pair.step()
    pair.check()


@families
@pytest.mark.parametrize(
    "path", [[torch.float16], [torch.bfloat16], [torch.float32], [torch.float16, torch.bfloat16]], ids=str
)
@pytest.mark.parametrize("before", [torch.float32, torch.float16], ids=str)
def test_a_model_that_changes_its_dtype(device, family, before, path):
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 3)).to(device, before)
    optimizer = family(model.parameters(), **FULL[family])
    params = list(model.parameters())
    for step, dtype in enumerate([before, *path, *path]):
        model.to(dtype)
        optimizer.zero_grad()
        set_grads(params, step)
        states = [optimizer.state[p].get("momentum_buffer") for p in params]
        expected = [p.detach().clone() for p in params]
        optimizer.step()
        assert_rounded(optimizer, params)
        for p, expect, state in zip(params, expected, states, strict=True):
            assert not torch.equal(p, expect)
            assert state is None or optimizer.state[p]["momentum_buffer"] is state
            assert int(optimizer.state[p]["step"]) == step + 1


@families
@pytest.mark.parametrize("before", ALL, ids=DTYPES)
@pytest.mark.parametrize("after", ALL, ids=DTYPES)
def test_a_dtype_that_changes_at_the_same_address(device, family, before, after):
    memory = torch.zeros(64, device=device)
    p = torch.nn.Parameter(memory.view(before)[:64])
    optimizer = family([p], lr=0.05)
    for dtype in (before, after):
        p.grad = None
        p.data = memory.view(dtype)[:64].fill_(1.0)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert_rounded(optimizer, [p])
        assert p.dtype is dtype
        assert ((p > 0) & (p < 1)).all()


@families
@dtypes
def test_to_channels_last_between_steps(device, family, dtype):
    pair = Pair(family, parameters([dtype], device, [(16, 8, 3, 3)]), **FULL[family])
    for step in range(8):
        if step in (2, 5):
            to = torch.channels_last if step == 2 else torch.contiguous_format
            pair.params[0].data = pair.params[0].data.to(memory_format=to)
        set_grads(pair.params, step)
        pair.step()
    pair.check()


@families
def test_a_shape_that_changes_raises_a_sentence(device, family):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = family([p], **FULL[family])
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = None
    p.data = torch.ones(6, device=device)
    p.grad = torch.ones_like(p)
    remedy = r"delete everything except 'remainder' from optimizer\.state"
    with pytest.raises(RuntimeError, match=rf"must have the parameter's shape \(6,\), got \(4,\); {remedy}"):
        optimizer.step()
    optimizer.state[p].clear()  # in fp32 there is no remainder
    optimizer.step()


def test_a_parameter_that_grows_is_updated_whole(device):
    """Without a state of its shape nothing is lost by it."""
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedSGD([p], lr=0.5)
    for size in (4, 100_000, 30_000):  # of several chunks
        p.grad, p.data = None, torch.ones(size, device=device)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert (p == 0.5).all()


@families
def test_inference_tensors_raise(family, device):
    with torch.inference_mode():
        p = torch.ones(3, device=device)
    optimizer = family([torch.nn.Parameter(torch.ones(1, device=device)), p.requires_grad_(False)], lr=0.1)
    with torch.inference_mode():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="must not be an inference tensor"):
        optimizer.step()


# --------------------------------------------------------------------------------------------------------------- values
def write_load_state_dict(model: torch.nn.Module, values: dict[str, Tensor]) -> None:
    model.load_state_dict(values)


def write_in_place(model: torch.nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])


def write_new_data(model: torch.nn.Module, values: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.data = values[name].to(p.dtype)


def write_swap(model: torch.nn.Module, values: dict[str, Tensor]) -> None:
    """An EMA swap: out, evaluate, and in its place another."""
    for name, p in model.named_parameters():
        kept = p.data
        p.data = values[name].to(p.dtype)
        p.data = kept
        with torch.no_grad():
            p.lerp_(values[name].to(p.dtype), 1.0)


WRITES = [write_load_state_dict, write_in_place, write_new_data, write_swap]


@families
@low_dtypes
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("use_scaler", [False, True], ids=["", "scaler"])
def test_a_model_rewritten_between_steps_is_not_undone(device, family, dtype, write, use_scaler):
    model = torch.nn.Linear(9, 5).to(device, dtype)
    optimizer = family(model.parameters(), **FULL[family])
    scaler = started(device, init_scale=1.0, enabled=use_scaler)
    params = list(model.parameters())
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    masters = [fp32(optimizer, p).clone() for p in params]
    new = {k: v.detach().clone() for k, v in model.state_dict().items()}
    new["weight"][::2] += 1  # half of a tensor; the rest and the bias as they were
    write(model, new)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    set_grads(params, 2)
    scaler.step(optimizer)
    assert_same([p.detach() for p in params], list(new.values()))
    written = torch.zeros_like(params[0], dtype=torch.bool)
    written[::2] = True
    masters[0][written] = fp32(optimizer, params[0])[written]  # which `assert_rounded` looks at
    assert_same([fp32(optimizer, p) for p in params], masters)  # elsewhere every bit is kept
    assert_rounded(optimizer, params)
    assert not any(fp32(optimizer, p).requires_grad for p in params)


HIDDEN_WRITES = {
    "data": lambda p: p.data,
    "storage": lambda p: torch.empty(0, dtype=p.dtype, device=p.device).set_(p.untyped_storage()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
}


@families
@low_dtypes
@pytest.mark.parametrize("how", HIDDEN_WRITES)
def test_a_write_that_no_counter_shows_is_followed(device, family, dtype, how):
    """By ``.data``, a view of the storage, DLPack."""
    p = torch.nn.Parameter(randn(64, seed=0, dtype=dtype, device=device))
    optimizer = family([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    master, version = fp32(optimizer, p), p._version
    HIDDEN_WRITES[how](p)[:32] = 7.0
    assert p._version == version
    assert ((fp32(optimizer, p)[:32] - 7.0).abs() <= torch.finfo(dtype).eps * 2).all()
    assert torch.equal(fp32(optimizer, p)[32:], master[32:])
    optimizer.step()
    assert (p[:32] > 6).all()
    assert_rounded(optimizer, [p])


@families
@low_dtypes
def test_new_data_where_the_old_lay(device, family, dtype):
    """The allocator hands the memory of one ``.data`` to the next but one."""
    p = torch.nn.Parameter(randn(512, 512, seed=0, dtype=dtype, device=device))
    optimizer = family([p], lr=0.1)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    for _ in range(4):
        expected = p.detach() * 0.25
        p.data = p.data * 0.5
        p.data = p.data * 0.5
        optimizer.step()
        assert torch.equal(p, expected)


@families
def test_master_of_any_parameter(device, family):
    """A copy, with and without state; of a stranger a sentence."""
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    for step in range(2):
        for p in params:
            master = optimizer.master(p)
            assert master.dtype is torch.float32 and not master.requires_grad
            assert torch.equal(master.to(p.dtype), p)
            assert (step > 0 and p.dtype is not torch.float32) or torch.equal(master, p.float())
            assert master.data_ptr() != p.data_ptr() or p.numel() == 0
        set_grads(params, step)
        optimizer.step()
    with pytest.raises(
        ValueError, match=r"master: param must be one of the optimizer's parameters, got a torch.float32"
    ):
        optimizer.master(torch.nn.Parameter(params[0].detach().float()))


# ---------------------------------------------------------------------------------------- parameters and state replaced
@families
def test_parameters_replaced_in_their_group(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    set_grads(params, 0)
    optimizer.step()
    new = parameters(ALL, device)
    optimizer.param_groups[0]["params"][:] = new
    old = [p.detach().clone() for p in params]
    set_grads(new, 1)
    optimizer.step()
    assert_same([p.detach() for p in params], old)
    fresh = parameters(ALL, device)
    expected = family(fresh, **FULL[family])
    set_grads(fresh, 1)
    expected.step()
    assert_same([p.detach() for p in new], [p.detach() for p in fresh])


@families
@pytest.mark.parametrize("how", ["all at once", "one by one", "emptied"])
def test_emptied_state_starts_anew(device, family, how):
    params = parameters(ALL, device)
    optimizer = family(params, **DAMPENED[family])
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    if how == "all at once":
        optimizer.state.clear()
    for p in params:
        if how == "one by one":
            del optimizer.state[p]
        elif how == "emptied":
            optimizer.state[p].clear()
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    expected = family(fresh, **DAMPENED[family])
    for step in range(2, 4):
        set_grads(params, step)
        set_grads(fresh, step)
        optimizer.step()
        expected.step()
    assert_same(snapshot(optimizer), snapshot(expected))


def test_replaced_state_is_followed():
    """Offloading state between steps replaces its tensors."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedSGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.ones(4)
    optimizer.step()
    state = optimizer.state[param]
    for key, value in list(state.items()):
        state[key] = value.clone()
    optimizer.step()
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["momentum_buffer"], torch.full((4,), 1.9))
    torch.testing.assert_close(param.detach(), torch.full((4,), 1 - 0.1 - 0.19))
