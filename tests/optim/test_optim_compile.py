"""torch.compile around the optimizers."""

from __future__ import annotations

import pytest
import torch
from optim_cases import FULL, families, randn, snapshot, started


def model_and_optimizer(family, device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device)
    return model, family(model.parameters(), **FULL[family], max_grad_norm=1.0)


def train(family, device, forward=None, step=None):
    model, optimizer = model_and_optimizer(family, device)
    scaler = started(device, init_scale=16.0)
    run = (forward or (lambda m: m))(model)

    def iterate(x):
        optimizer.zero_grad()
        loss = run(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    one = (step or (lambda f: f))(iterate)
    losses = [float(one(randn(5, 8, seed=i, device=device)).detach()) for i in range(3)]
    return losses, snapshot(optimizer)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@families
def test_a_compiled_model_trains_as_the_eager_one(device, family):
    losses, eager = train(family, device)
    compiled_losses, compiled = train(family, device, forward=torch.compile)
    assert compiled_losses == pytest.approx(losses, rel=1e-4)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@families
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_inside_a_compiled_function(device, family, backend):
    def run(compiled: bool):
        model, optimizer = model_and_optimizer(family, device)

        def iterate(x):
            optimizer.zero_grad()
            loss = (x @ model[0].weight.t()).square().mean()
            for p in model.parameters():
                p.grad = p.detach() * loss.detach()
            optimizer.step()
            return loss.detach() * 2

        one = torch.compile(iterate, backend=backend) if compiled else iterate
        outputs = [one(randn(5, 8, seed=i, device=device)) for i in range(3)]
        return [*outputs, *snapshot(optimizer)]

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@families
def test_a_whole_iteration_inside_a_compiled_function(device, family):
    losses, eager = train(family, device)
    compiled_losses, compiled = train(family, device, step=lambda f: torch.compile(f, backend="aot_eager"))
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
