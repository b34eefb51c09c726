"""What a step must come to, each outcome by name."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from optim_cases import (
    DTYPES,
    FULL,
    TORCH,
    assert_rounded,
    assert_same,
    assert_within_rule,
    copies,
    dtypes,
    families,
    fp32,
    give_grads,
    low_dtypes,
    parameters,
    randn,
    set_grads,
    snapshot,
)
from torch import Tensor

import amp_kernels
from amp_kernels.optim import FusedRMSprop, FusedSGD

ALL = list(DTYPES.values())
DAMPENED = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}


def under(optimizer: torch.optim.Optimizer, found_inf: float, grad_scale: float | None = None) -> None:
    """A step as torch.amp.GradScaler makes it."""
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.found_inf = torch.tensor(found_inf, device=device)
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale, device=device)
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale


class Pair:
    """The same training with ours and, on fp32 and on fp64 copies of the parameters, with torch's."""

    def __init__(self, family: type, params: list[Any], **options: Any) -> None:
        self.params = params
        self.ours = family(params, **options)
        self.copies = [copies(params, dtype) for dtype in (torch.float32, torch.float64)]
        self.theirs = [TORCH[family](ps, **options) for ps in self.copies]

    def step(self) -> None:
        for ps, optimizer in zip(self.copies, self.theirs, strict=True):
            give_grads(self.params, ps)
            optimizer.step()
        self.ours.step()

    def check(self) -> None:
        assert_within_rule(self.ours, self.params, *self.copies)


# ------------------------------------------------------------------------------------------------------------ overflows
@families
@dtypes
@pytest.mark.parametrize("found_inf", [1.0, 2.0, float("nan")])
def test_first_step_overflow_leaves_no_trace(device, family, dtype, found_inf):
    options = DAMPENED if family is FusedSGD else FULL[family]

    def run(overflow: bool) -> list[Tensor]:
        params = parameters([dtype], device)
        optimizer = family(params, **options)
        if overflow:
            set_grads(params, 99, scale=float("inf"))
            under(optimizer, found_inf)
            assert_same(params, parameters([dtype], device))
        for step in range(3):
            set_grads(params, step)
            under(optimizer, 0.0)
        return snapshot(optimizer)

    assert_same(run(overflow=True), run(overflow=False))


@families
@pytest.mark.parametrize("found_inf", [1.0, 2.0])
def test_a_later_overflow_changes_nothing(device, family, found_inf):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=1.0)
    set_grads(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    set_grads(params, 1)
    params[1].grad[3] = float("nan")
    under(optimizer, found_inf, grad_scale=4.0)
    assert_same(snapshot(optimizer), before)


@families
def test_found_inf_of_one_dimension(device, family):
    """torch.distributed's sharded scaler has it so."""
    p = torch.nn.Parameter(torch.ones((), device=device))
    optimizer = family([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1, device=device), torch.ones(1, device=device)
    optimizer.step()
    assert p < 1


@families
def test_grad_scale_divides(device, family):
    params, same = parameters(ALL, device), parameters(ALL, device)
    ours, unscaled = (family(ps, **FULL[family]) for ps in (params, same))
    for step in range(3):
        set_grads(params, step, scale=8.0)
        under(ours, 0.0, grad_scale=8.0)
        set_grads(same, step)
        unscaled.step()
    assert_same(snapshot(ours), snapshot(unscaled))


# ----------------------------------------------------------------------------------------- gradients that are not there
@families
def test_a_late_first_gradient_starts_its_momentum_then(device, family):
    pair = Pair(family, parameters(ALL, device), **(DAMPENED if family is FusedSGD else FULL[family]))
    for step in range(6):
        set_grads(pair.params, step)
        if step < 3:
            pair.params[1].grad = pair.params[2].grad = None
        pair.step()
    pair.check()


@families
def test_a_none_gradient_skips_that_parameter_only(device, family):
    pair = Pair(family, parameters(ALL, device), **(DAMPENED if family is FusedSGD else FULL[family]))
    for step in range(12):
        set_grads(pair.params, step)
        if step:
            skipped = pair.params[step % len(pair.params)]
            skipped.grad, before = None, skipped.detach().clone()
        pair.step()
        if step:
            assert torch.equal(skipped, before)
    pair.check()


SCALERS = {
    "no scaler": None,
    "torch scaler": lambda: torch.amp.GradScaler("cpu", init_scale=4.0),
    "our scaler": lambda: amp_kernels.GradScaler("cpu", init_scale=4.0),
}
scalers = pytest.mark.parametrize("make_scaler", SCALERS.values(), ids=SCALERS)


@families
@scalers
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_all_gradients_none_is_a_no_op(device, family, make_scaler, max_grad_norm):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=max_grad_norm)
    scaler = make_scaler and make_scaler()
    for has_state in (False, True):
        before = snapshot(optimizer)
        if scaler is None:
            optimizer.step()
        else:
            scaler.scale(torch.zeros((), device=device))
            scaler.step(optimizer)
            if isinstance(scaler, amp_kernels.GradScaler):
                scaler.update()
            else:
                with pytest.raises(AssertionError):  # torch's own; it clears nothing
                    scaler.update()
                scaler = make_scaler()
        assert_same(snapshot(optimizer), before)
        assert optimizer.grad_norm is None
        if not has_state:
            set_grads(params, 0)
            optimizer.step()
            optimizer.zero_grad()


@families
def test_frozen_parameters_are_left_alone(device, family):
    params = parameters(ALL, device)
    params[1].requires_grad_(False)
    frozen = params[1].clone()
    pair = Pair(family, params, **FULL[family])
    for step in range(3):
        set_grads(pair.params, step)
        params[1].grad = None
        pair.step()
    assert torch.equal(params[1], frozen)
    assert not pair.ours.state.get(params[1])
    params[1].requires_grad_(True)
    for step in range(3, 6):
        set_grads(pair.params, step)
        pair.step()
    pair.check()


@families
def test_sparse_gradients_raise_a_sentence(device, family):
    params = parameters([torch.float32], device, [(4, 3), (5,)])
    optimizer = family(params, **FULL[family])
    set_grads(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    params[0].grad = torch.ones(4, 3, device=device).to_sparse()
    with pytest.raises(RuntimeError, match=r"params.*\[0\] must be dense, got torch.sparse_coo; use torch.optim"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


@families
def test_a_gradient_of_another_dtype_than_ours_raises_a_sentence(device, family):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad_dtype = None
    p.grad = torch.ones(3, dtype=torch.float64, device=device)
    with pytest.raises(TypeError, match=r"must be float32, float16 or bfloat16, got torch\.float64"):
        family([p], lr=0.1).step()
    assert torch.equal(p, torch.ones_like(p))


# ----------------------------------------------------------------------------------------------- parameters that change
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


@families
def test_a_dtype_that_changes_at_the_same_address(device, family):
    memory = torch.ones(64, dtype=torch.float16, device=device)
    p = torch.nn.Parameter(memory)
    optimizer = family([p], lr=0.05)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = None
    p.data = memory.view(torch.bfloat16).fill_(1.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert_rounded(optimizer, [p])
    assert p.dtype is torch.bfloat16
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
    scaler = amp_kernels.GradScaler(device.type, init_scale=1.0, enabled=use_scaler)
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
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    assert_same([p.detach() for p in params], list(new.values()))
    masters[0][::2] = new["weight"][::2].float()
    assert_same([fp32(optimizer, p) for p in params], masters)  # elsewhere every bit is kept
    assert not any(fp32(optimizer, p).requires_grad for p in params)


@families
@low_dtypes
def test_a_write_through_data_and_reload_masters(device, family, dtype):
    p = torch.nn.Parameter(randn(64, seed=0, dtype=dtype, device=device))
    optimizer = family([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.reload_masters()  # nothing yet
    optimizer.step()
    master = fp32(optimizer, p).clone()
    p.data[:32] = 7.0
    optimizer.reload_masters()
    assert (fp32(optimizer, p)[:32] == 7.0).all()
    assert torch.equal(fp32(optimizer, p)[32:], master[32:])
    optimizer.step()
    assert (p[:32] > 6).all()
    assert_rounded(optimizer, [p])


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
@pytest.mark.parametrize("how", ["all", "one", "clear"])
def test_emptied_state_starts_anew(device, family, how):
    params = parameters(ALL, device)
    optimizer = family(params, **(DAMPENED if family is FusedSGD else FULL[family]))
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    if how == "all":
        optimizer.state.clear()
    for p in params:
        optimizer.state.pop(p, None) if how == "one" else optimizer.state[p].clear()
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    expected = family(fresh, **(DAMPENED if family is FusedSGD else FULL[family]))
    for step in range(2, 4):
        set_grads(params, step)
        set_grads(fresh, step)
        optimizer.step()
        expected.step()
    assert_same(snapshot(optimizer), snapshot(expected))


@families
def test_a_shape_that_changes_raises_a_sentence(device, family):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = family([p], **FULL[family])
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = None
    p.data = torch.ones(6, device=device)
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"must keep its shape \(4,\), got \(6,\); delete optimizer.state"):
        optimizer.step()
    del optimizer.state[p]
    optimizer.step()


@families
def test_inference_tensors_raise(family, device):
    with torch.inference_mode():
        p = torch.ones(3, device=device)
    optimizer = family([torch.nn.Parameter(torch.ones(1)), p.requires_grad_(False)], lr=0.1)
    with torch.inference_mode():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="must not be an inference tensor"):
        optimizer.step()


# ------------------------------------------------------------------------------------------------------- memory layouts
def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, 9.0)], dim=-1)[..., 0]


def a_slice(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x, 9.0)], dim=1)[:, : x.shape[1]]


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


LAYOUTS = [contiguous, channels_last, transposed, with_gaps, a_slice]


@families
@pytest.mark.parametrize("param_layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", [*LAYOUTS, expanded])
def test_layouts(device, family, param_layout, grad_layout):
    """D8: a gradient whose strides are not the parameter's, and parameters with gaps, which are not written into."""
    params = [
        torch.nn.Parameter(param_layout(randn(6, 5, 3, 4, seed=i, device=device).to(t))) for i, t in enumerate(ALL)
    ]
    pair = Pair(family, params, **FULL[family])
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = grad_layout(randn(*p.shape, seed=10 * step + i, device=device).to(p.dtype))
        pair.step()
    pair.check()


@families
def test_what_lies_between_a_parameters_elements_is_not_written(device, family):
    memory = torch.full((8, 6), 3.0, dtype=torch.float16, device=device)
    p = torch.nn.Parameter(memory[1::2, 2:5])
    assert p.data_ptr() == memory[1, 2:].data_ptr()
    optimizer = family([p], **FULL[family])
    for step in range(3):
        set_grads([p], step)
        optimizer.step()
    untouched = torch.ones_like(memory, dtype=torch.bool)
    untouched[1::2, 2:5] = False
    assert (memory[untouched] == 3).all()
    assert (memory[~untouched] != 3).all()


@families
@dtypes
def test_gradients_that_are_views_into_a_bucket(device, family, dtype):
    """As DDP makes them: one flat tensor, at whatever offset."""
    params = parameters([dtype], device, [(257,), (3, 111), (40, 9), (1025,)])
    pair = Pair(family, params, **FULL[family])
    bucket = torch.zeros(sum(p.numel() for p in params) + 1, dtype=dtype, device=device)
    offset = 1
    for p in params:
        p.grad = bucket[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    for step in range(4):
        bucket.copy_(randn(bucket.numel(), seed=step))
        pair.step()
    pair.check()


@families
@dtypes
def test_parameters_at_odd_offsets(device, family, dtype):
    memory = randn(1500, seed=0, dtype=dtype, device=device)
    pair = Pair(family, [torch.nn.Parameter(memory[o : o + 333]) for o in (1, 337, 675, 1100)], **FULL[family])
    for step in range(4):
        set_grads(pair.params, step)
        pair.step()
    pair.check()


@families
def test_zero_size_parameters(device, family):
    params = parameters(ALL, device, [(0,), (300,), (4, 0), (0, 3), (200,), (2, 300)])
    pair = Pair(
        family,
        params,
        **FULL[family],
    )
    for step in range(3):
        set_grads(params, step)
        pair.step()
    pair.check()
    empty = family(parameters(ALL, device, [(0,), (0, 2)]), **FULL[family], max_grad_norm=1.0)
    set_grads(empty.param_groups[0]["params"], 0)
    empty.step()
    assert empty.grad_norm == 0
    empty.load_state_dict(empty.state_dict())
    empty.step()


# --------------------------------------------------------------------------------------------------------- torch's ways
@families
def test_closure(device, family):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = family([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert optimizer.step(closure) < 3


@families
def test_step_hooks(device, family):
    params = parameters(ALL, device)
    optimizer = family(params, lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    set_grads(params, 0)
    optimizer.step()
    assert calls == ["pre", "post"]


@families
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_pre_hook_that_replaces_the_gradients(device, family, max_grad_norm):
    def run(scaler: Any, hook: bool) -> list[Tensor]:
        params = parameters(ALL, device)
        optimizer = family(params, **FULL[family], max_grad_norm=max_grad_norm)
        if hook:
            optimizer.register_step_pre_hook(
                lambda *_: [setattr(p, "grad", p.grad.clone().mul_(2)) for p in params] and None
            )
        for step in range(3):
            set_grads(params, step, scale=1.0 if hook else 2.0)
            if scaler:
                scaler.scale(torch.zeros((), device=device))
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        return snapshot(optimizer)

    expected = run(None, hook=False)
    assert_same(run(None, hook=True), expected)
    for make in SCALERS.values():
        if make is not None:
            scaler = make()
            scaler.update(1.0) if scaler._scale is not None else scaler.__init__(device.type, init_scale=1.0)
            assert_same(run(scaler, hook=True), expected)


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=False),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [3],
    ),
}


@families
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers(device, family, make, tensor_lr):
    params = parameters(ALL, device)
    sets = [params, copies(params, torch.float32), copies(params, torch.float64)]
    optimizers = []
    for f, ps in zip((family, TORCH[family], TORCH[family]), sets, strict=True):
        lr = torch.tensor(0.1, device=device) if tensor_lr and f is family else 0.1
        optimizers.append(f(ps, lr=lr, momentum=0.8))
    schedulers = [make(o) for o in optimizers]
    for step in range(10):
        set_grads(params, step)
        for ps in sets[1:]:
            give_grads(params, ps)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    if tensor_lr:  # an fp32 rate, not a float's
        for p, q in zip(params, sets[1], strict=True):
            torch.testing.assert_close(fp32(optimizers[0], p), q.detach(), rtol=1e-5, atol=1e-5)
        assert isinstance(optimizers[0].param_groups[0]["lr"], Tensor)
    else:
        assert_within_rule(optimizers[0], *sets)


@families
@pytest.mark.parametrize("lrs", [(0.5, 0.0), (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("kind", ["float", "in place", "float to tensor", "tensor to tensor"])
def test_a_changed_lr_takes_effect_at_once(device, family, lrs, kind):
    p = torch.nn.Parameter(torch.ones(5, device=device))
    rate = [torch.tensor(lr, device=device) for lr in lrs]
    optimizer = family([p], lr=lrs[0] if kind.startswith("float") else rate[0])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    assert torch.equal(before, torch.ones_like(p)) == (lrs[0] == 0)
    if kind == "in place":
        rate[0].fill_(lrs[1])
    else:
        optimizer.param_groups[0]["lr"] = lrs[1] if kind == "float" else rate[1]
    optimizer.step()
    assert torch.equal(p, before) == (lrs[1] == 0)


@families
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(device, family, set_to_none):
    for foreach in (None, True):
        params = parameters(ALL, device)
        optimizer = family(params, lr=0.1, foreach=foreach)
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            assert all(p.grad is None if set_to_none else not p.grad.any() for p in params)


@families
def test_gradients_are_released(device, family):
    """zero_grad must free their memory: the plan keeps no gradient."""
    params = [torch.nn.Parameter(channels_last(randn(6, 5, 3, 4, seed=0, device=device)))]
    params += parameters(ALL, device)
    optimizer = family(params, **FULL[family])
    for step in range(2):
        set_grads(params, step)
        if step:
            params[2].grad = None
        grads = [weakref.ref(p.grad) for p in params if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert not any(grad() is not None for grad in grads)


@families
def test_add_param_group_after_steps(device, family):
    options = DAMPENED if family is FusedSGD else FULL[family]
    params = parameters(ALL, device)
    pair = Pair(family, params[:2], **options)
    for step in range(6):
        if step == 3:
            pair.ours.add_param_group({"params": params[2:], "lr": 0.03})
            for ps, optimizer in zip(pair.copies, pair.theirs, strict=True):
                ps += copies(params[2:], ps[0].dtype)
                optimizer.add_param_group({"params": ps[2:], "lr": 0.03})
            pair.params = params
        set_grads(pair.params, step)
        pair.step()
    pair.check()
    assert [int(pair.ours.state_dict()["state"][i]["step"]) for i in range(4)] == [6, 6, 3, 3]


CHANGES = {
    "momentum on": ({"momentum": 0.0, "dampening": 0.0}, {"momentum": 0.9}),
    "momentum on, dampened": ({"momentum": 0.0, "dampening": 0.5}, {"momentum": 0.9}),
    "momentum off": ({"momentum": 0.9}, {"momentum": 0.0}),
    "maximize": ({"momentum": 0.9}, {"maximize": True}),
    "weight_decay": ({"momentum": 0.9}, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("back", [False, True], ids=["", "and back"])
def test_options_changed_while_training(device, change, back):
    options, after = change
    pair = Pair(FusedSGD, parameters(ALL, device), lr=0.1, **options)
    for step in range(9):
        changed = after if step >= 3 else {}
        if back and step >= 6:
            changed = {k: options.get(k, pair.ours.defaults[k]) for k in after}
        for optimizer in (pair.ours, *pair.theirs):
            optimizer.param_groups[0].update(changed)
        set_grads(pair.params, step)
        pair.step()
    pair.check()


def test_rmsprop_options_turned_on_while_training(device):
    """torch raises KeyError here."""
    params = parameters(ALL, device)
    optimizer = FusedRMSprop(params, lr=0.01)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0].update(momentum=0.9, centered=True)
        set_grads(params, step)
        optimizer.step()
    assert set(optimizer.state[params[0]]) == {"step", "square_avg", "momentum_buffer", "grad_avg"}
    assert int(optimizer.state_dict()["state"][0]["step"]) == 4


@families
def test_backends_take_over_from_each_other(family):
    params = parameters(ALL, "cpu")
    pair = Pair(family, params, **(DAMPENED if family is FusedSGD else FULL[family]))
    for step in range(8):
        with amp_kernels.use_backend("reference" if step // 2 % 2 else "cpu"):
            set_grads(params, step)
            pair.step()
    pair.check()


# ----------------------------------------------------------------------------------------------------------- guarantees
@families
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_default_dtype(device, family, default):
    def run() -> list[Tensor]:
        params = parameters(ALL, device)
        optimizer = family(params, **FULL[family], max_grad_norm=1.0)
        scaler = amp_kernels.GradScaler(device.type, init_scale=4.0, min_scale=1.0, hysteresis=2)
        for step in range(3):
            set_grads(params, step, scale=float("inf") if step == 1 else 1.0)
            scaler.scale(torch.zeros((), device=device))
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in params]

    expected = run()
    torch.set_default_dtype(default)
    try:
        assert_same(run(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@families
def test_default_device(device, family):
    params = parameters(ALL, device)
    pair = Pair(family, params, **FULL[family])
    for step in range(3):
        set_grads(params, step)
        for ps, optimizer in zip(pair.copies, pair.theirs, strict=True):
            give_grads(params, ps)
            optimizer.step()
        with torch.device("meta"):
            pair.ours.step()
    pair.check()


@families
@pytest.mark.parametrize("use_scaler", [False, True], ids=["", "scaler"])
def test_a_step_does_not_wait(device, family, use_scaler, monkeypatch):
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=1.0)
    scaler = amp_kernels.GradScaler(device.type, init_scale=4.0, enabled=use_scaler, hysteresis=2, min_scale=1.0)
    scaler.scale(torch.zeros((), device=device))

    def wait(*_: Any, **__: Any) -> None:
        raise AssertionError("waits for the device")

    for step in range(4):
        set_grads(params, step, scale=float("inf") if step == 1 else 1.0)
        with monkeypatch.context() as patch:
            for name in (
                "item",
                "tolist",
                "__bool__",
                "cpu",
                "__int__",
                "__float__",
                "__index__",
                "numpy",
                "nonzero",
            ):
                # The table is made of Python numbers, once; only what the device computed must not be asked for.
                if step or name != "tolist":
                    patch.setattr(torch.Tensor, name, wait)
            scaler.step(optimizer)
            scaler.update()
    scaler.step(optimizer)


@families
def test_a_steady_step_allocates_nothing_proportional_to_the_model(family):
    params = parameters(ALL, "cpu", [(300_000,), (257, 1000), (200_000,)])
    with amp_kernels.use_backend("cpu"):
        optimizer = family(params, **FULL[family], max_grad_norm=1.0)
        scaler = amp_kernels.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        set_grads(params, 0)
        for step in range(4):
            if step == 2:
                for p in params:
                    p.grad = p.grad.clone()  # other addresses
            with torch.profiler.profile(profile_memory=True) as profile:
                scaler.step(optimizer)
                scaler.update()
            if step:
                taken = sum(max(0, e.self_cpu_memory_usage) for e in profile.events())
                assert taken < 10_000


@families
@pytest.mark.parametrize("skip", [False, True], ids=["", "skipped"])
@dtypes
def test_backward_through_an_old_graph_raises(device, family, dtype, skip):
    p = torch.nn.Parameter(torch.ones(3, device=device, dtype=dtype))
    loss = (p**2).sum()
    optimizer = family([p], lr=0.1)
    p.grad = torch.ones_like(p)
    under(optimizer, float(skip))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@families
def test_no_graph_grows(device, family):
    """With create_graph gradients have a history, which norms and states must not."""
    params = parameters(ALL, device)
    optimizer = family(params, **FULL[family], max_grad_norm=1.0)
    scaler = amp_kernels.GradScaler(device.type, init_scale=4.0)
    for _ in range(2):
        loss = scaler.scale(sum((p.float() ** 3).sum() for p in params))
        for p, grad in zip(params, torch.autograd.grad(loss, params, create_graph=True), strict=True):
            assert grad.requires_grad
            p.grad = grad
        scaler.step(optimizer)
        scaler.update()
        assert not optimizer.grad_norm.requires_grad
        assert not any(t.requires_grad for t in snapshot(optimizer)[len(params) :])


# -------------------------------------------------------------------------------------------------------------- DTensor
DTENSOR = """
import sys, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import amp_kernels
from amp_kernels.optim import FusedRMSprop, FusedSGD

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for family in (FusedSGD, FusedRMSprop):
    for backend in ("cpu", "reference"):
        for dtype in (torch.float32, torch.bfloat16):
            with amp_kernels.use_backend(backend):
                torch.manual_seed(0)
                x, g = torch.randn(8, 3).to(dtype), torch.randn(8, 3).to(dtype)
                plain = torch.nn.Parameter(x.clone())
                sharded = torch.nn.Parameter(distribute_tensor(x.clone(), mesh, [Shard(0)]))
                ours = [family([p], lr=0.1, momentum=0.9) for p in (plain, sharded)]
                scaler = amp_kernels.GradScaler("cpu", init_scale=1.0)
                scaler.scale(torch.zeros(()))
                for step in range(3):
                    plain.grad = g * (step + 1)
                    sharded.grad = distribute_tensor(g * (step + 1), mesh, [Shard(0)])
                    for o in ours:
                        scaler.step(o)
                    scaler.update()
                assert torch.equal(sharded.to_local(), plain)
                assert isinstance(ours[1].state[sharded]["momentum_buffer"], DTensor)
                saved = ours[1].state_dict()
                ours[1].load_state_dict(saved)
                for o in ours:
                    scaler.step(o)
                scaler.update()
                assert torch.equal(sharded.to_local(), plain)
                clipped = family([sharded], lr=0.1, max_grad_norm=1.0)
                before = sharded.to_local().clone()
                try:
                    clipped.step()
                except RuntimeError as error:
                    assert "max_grad_norm must be None with DTensor" in str(error), error
                else:
                    raise AssertionError("no sentence")
                assert torch.equal(sharded.to_local(), before)
torch.distributed.destroy_process_group()
print("passed")
"""


def test_dtensor(tmp_path):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", DTENSOR, str(tmp_path / "store")], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.endswith("passed\n"), done.stderr


# ----------------------------------------------------------------------------------------------------- random histories
@families
@pytest.mark.parametrize("seed", range(6))
def test_random_histories(device, family, seed):
    """Whatever happens between steps, in whatever order, ends where torch.optim ends."""
    rng = torch.Generator().manual_seed(seed)

    def choose(n: int) -> int:
        return int(torch.randint(n, (), generator=rng))

    options = {**FULL[family], "nesterov": False, "dampening": 0.5} if family is FusedSGD else FULL[family]
    pair = Pair(family, parameters(ALL, device, [(300,), (33, 41), (4, 8, 5, 6), (17000,)]), **options)
    shapes_of = itertools.cycle([contiguous, with_gaps])
    for step in range(12):
        set_grads(pair.params, step)
        event = choose(7)
        target = pair.params[choose(4)]
        if event == 0:
            target.grad = None
        elif event == 1:
            target.grad = next(shapes_of)(target.grad) if target.dim() else target.grad
        elif event == 2:
            target.data = target.data.clone()
        elif event == 3:
            pair.ours.load_state_dict(pair.ours.state_dict())
        elif event == 4:
            pair.ours.param_groups[0]["lr"] *= 0.5
            for optimizer in pair.theirs:
                optimizer.param_groups[0]["lr"] *= 0.5
        elif event == 5:
            before = snapshot(pair.ours)
            under(pair.ours, 1.0 + choose(2))
            if step:
                assert_same(snapshot(pair.ours), before)
        elif event == 6:
            target.grad_dtype = None
            target.grad = target.grad.to(ALL[choose(3)])
        pair.step()
    pair.check()


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
