"""What is special about Adam and AdamW; the shared cases are in `amp_kernels/testing/updates.py`."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.nn.functional as F
from optim_cases import ALL, Pair, parameters, randn, set_grads
from torch._dynamo.testing import CompileCounter

import amp_kernels
from amp_kernels import testing
from amp_kernels.optim import FusedAdam, FusedAdamW

OPTIONS = {
    "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False,
    "decoupled_weight_decay": True,
}  # fmt: skip


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fused_adamw_is_torchs(device, amsgrad, weight_decay):
    options = {"lr": 0.01, "amsgrad": amsgrad, "weight_decay": weight_decay}
    params = parameters(ALL, device)
    pair = Pair(FusedAdam, params, decoupled_weight_decay=True, **options)
    pair.ours = FusedAdamW(params, **options)
    for step in range(4):
        set_grads(params, step)
        pair.step()
    pair.check()
    expected = {key for key, value in torch.optim.AdamW(params).defaults.items()}
    assert pair.ours.defaults.keys() == expected | {"max_grad_norm", "state_dtype"}
    assert pair.ours.defaults["decoupled_weight_decay"] is True


def test_the_default_decay_is_torchs():
    for ours, theirs in ((FusedAdam, torch.optim.Adam), (FusedAdamW, torch.optim.AdamW)):
        parameter = [torch.nn.Parameter(torch.zeros(1))]
        assert {**ours(parameter).defaults, **theirs(parameter).defaults} == ours(parameter).defaults | {
            "foreach": None
        }


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.99, 0.9999), (0.0, 0.999999), (0.9, 0.0)])
def test_bias_correction_is_right_from_the_first_step_on(device, betas):
    """The power itself, taken in fp32, would leave 1 - 0.999 1e-5 off."""
    for steps in (0, 1, 9, 999, 10**6):
        param = torch.zeros(64, device=device)
        states = [torch.full((64,), x, device=device) for x in (0.3, 0.2)]
        correct = [1 - beta ** (steps + 1) for beta in betas]
        m = betas[0] * states[0][0].item() + (1 - betas[0]) * 0.5
        v = betas[1] * states[1][0].item() + (1 - betas[1]) * 0.25
        expected = -0.1 * (m / correct[0]) / (math.sqrt(v / correct[1]) + 1e-8)
        options = {**OPTIONS, "betas": betas, "weight_decay": 0.0}
        amp_kernels.adam_(
            [param], [torch.full_like(param, 0.5)], [states[0]], [states[1]], steps_taken=steps, **options
        )
        assert (param / expected - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_momentum_that_is_turned_off_leaves_no_trace(device, dtype):
    """With beta1 = 0 the average is the gradient, exactly; 1e8 + (1 - 1e8) would be 0 in fp32."""
    params = [torch.ones(n, dtype=dtype, device=device) for n in (37, 4100)]
    masters = [] if dtype is torch.float32 else [torch.zeros(p.shape, dtype=torch.int16, device=device) for p in params]
    averages, squares = ([torch.zeros(p.shape, device=device) for p in params] for _ in range(2))
    for step, (beta1, gradient) in enumerate([(0.9, 1e9), (0.0, 1.0)]):
        grads = [torch.full(p.shape, gradient, device=device) for p in params]
        options = {**OPTIONS, "betas": (beta1, 0.999), "weight_decay": 0.0}
        amp_kernels.adam_(params, grads, averages, squares, masters=masters, steps_taken=step, **options)
    assert all(torch.equal(average, torch.ones_like(average)) for average in averages)


def test_a_compiled_step_serves_every_count(device):
    """One graph of the first count and one of all others: a graph for each would end at torch's limit of eight."""
    counter = CompileCounter()
    lists = [[testing.common.randn(100).to(device)] for _ in range(2)] + [
        [torch.zeros(100, device=device)] for _ in range(2)
    ]
    copies = [[t.clone() for t in tensors] for tensors in lists]
    compiled = torch.compile(lambda step: amp_kernels.adam_(*lists, steps_taken=step, **OPTIONS), backend=counter)
    for step in range(12):
        compiled(step)
        amp_kernels.adam_(*copies, steps_taken=step, **OPTIONS)
    assert counter.frame_count <= 3
    assert torch.equal(lists[0][0], copies[0][0])


@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, 2**40, 1.5, None])
def test_counts_that_are_none(device, wrong):
    param = torch.ones(3, device=device)
    lists = [[param]] + [[torch.zeros(3, device=device)] for _ in range(3)]
    with pytest.raises(ValueError, match=r"^adam_: steps_taken must be an int from 0 to 2\^31 - 2, got"):
        amp_kernels.adam_(*lists, steps_taken=wrong, **OPTIONS)
    with pytest.raises(ValueError, match=r"^adam_: betas must be two numbers, got \(0.9,\)"):
        amp_kernels.adam_(*lists, steps_taken=0, **{**OPTIONS, "betas": (0.9,)})
    assert torch.equal(param, torch.ones_like(param))


def test_skipped_steps_do_not_count(device):
    """Three overflows before and between leave no trace in the bias correction."""
    params = [torch.nn.Parameter(randn(100, seed=0, device=device)) for _ in range(2)]
    skipping, plain = (FusedAdamW([p], lr=0.1) for p in params)
    scaler = amp_kernels.GradScaler(device.type, init_scale=1.0, growth_interval=1000)
    for step in range(4):
        gradient = randn(100, seed=step, device=device)
        if step < 3:
            scaler.scale(torch.ones((), device=device))
            params[0].grad = gradient * math.inf
            scaler.step(skipping)
            scaler.update()
        params[0].grad = gradient * scaler.scale(torch.ones((), device=device))
        params[1].grad = gradient
        scaler.step(skipping)
        scaler.update()
        plain.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=0)
    assert int(scaler.skipped_steps) == 3


def train(optimizer_class, dtype, device):
    """The loss after 60 steps of a small classifier, at a scale under which nothing overflows."""
    torch.manual_seed(0)
    x = torch.randn(256, 20, device=device)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 2)).to(device, dtype)
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="120 steps take 22 s in the interpreter")
def test_fp16_weights_train_where_torchs_adamw_is_nan(device):
    """1e-8 is 0 in fp16, and so are squares of gradients: 0 / 0."""
    expected = train(torch.optim.AdamW, torch.float32, device)
    assert math.isnan(train(torch.optim.AdamW, torch.float16, device))
    assert abs(train(FusedAdamW, torch.float16, device) - expected) < 0.01
    assert abs(train(FusedAdamW, torch.bfloat16, device) - expected) < 0.03
