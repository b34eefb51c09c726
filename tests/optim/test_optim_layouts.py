"""Parameters and gradients of any strides, offsets and sizes."""

from __future__ import annotations

import pytest
import torch
from optim_cases import ALL, FULL, Pair, dtypes, families, parameters, randn, set_grads

from amp_kernels import testing

LAYOUTS = {
    "contiguous": testing.common.LAYOUTS["contiguous"],
    "channels_last": testing.common.LAYOUTS["channels_last"],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "with_gaps": testing.common.LAYOUTS["every_other"],
    "a_slice": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, : x.shape[1]],
}
GRAD_LAYOUTS = {**LAYOUTS, "expanded": lambda x: x[:1].expand_as(x)}


param_layouts = pytest.mark.parametrize("param_layout", LAYOUTS.values(), ids=LAYOUTS)


def train(family, device, param_layout, grad_layouts):
    """A step for each layout of the gradients."""
    params = [
        torch.nn.Parameter(param_layout(randn(6, 5, 3, 4, seed=i, device=device).to(t))) for i, t in enumerate(ALL)
    ]
    pair = Pair(family, params, **FULL[family])
    for step, grad_layout in enumerate(grad_layouts):
        for i, p in enumerate(params):
            p.grad = grad_layout(randn(*p.shape, seed=10 * step + i, device=device).to(p.dtype))
        pair.step()
    pair.check()


@families
@param_layouts
@pytest.mark.parametrize("grad_layout", GRAD_LAYOUTS.values(), ids=GRAD_LAYOUTS)
def test_layouts(device, family, param_layout, grad_layout):
    """A gradient whose strides are not the parameter's, and parameters with gaps, which are not written into."""
    train(family, device, param_layout, [grad_layout] * 4)


@families
@param_layouts
def test_gradient_layouts_that_change_between_steps(device, family, param_layout):
    """Each is there for two steps, in the second of which nothing has changed."""
    train(family, device, param_layout, [layout for layout in GRAD_LAYOUTS.values() for _ in range(2)])


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
def test_a_gradient_with_gaps_in_another_parameter_is_read_before_that_is_written(device, family):
    first, second, alone = (torch.nn.Parameter(randn(n, seed=n, device=device)) for n in (8, 4, 4))
    first.grad, second.grad, alone.grad = torch.ones_like(first), first.data[::2], first.data[::2].clone()
    family([first, second], **FULL[family]).step()
    family([alone], **FULL[family]).step()
    assert torch.equal(second, alone)


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
    pair = Pair(family, params, **FULL[family])
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


@pytest.mark.parametrize(("threads", "count"), [(1, 1030), (2, 1111), (3, 1030)])
@families
def test_each_of_many_small_parameters_is_updated_once(device, family, threads, count):
    """Enough elements for several threads, and numbers of parameters that their claims do not divide."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        params = [torch.nn.Parameter(torch.ones(64, device=device)) for _ in range(count)]
        optimizer = family(params, **FULL[family])
        for step in range(2):
            for p in params:
                p.grad = torch.full_like(p, step + 1.0)
            optimizer.step()
        assert len(torch.stack(params).unique()) == 1
    finally:
        torch.set_num_threads(before)
