"""What is special to `rmsprop_`, on every backend; what it has in common with `sgd_` is in test_updates.py."""

from __future__ import annotations

import math

import pytest
import torch
from table_kernels import Launcher
from test_update_table import Step

from amp_kernels import rmsprop_, testing

# NumPy, underneath Triton's interpreter, warns of NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def test_a_constant_gradient_has_no_negative_variance(device: torch.device) -> None:
    """torch takes the root of v - a^2 where rounding made it negative, and gets NaN."""
    ours = testing.updates.UpdateInputs("rmsprop_", [torch.linspace(0.1, 3.0, 500)], {"centered": True}, device)
    grads = [torch.linspace(0.1, 3.0, 500, device=device)]
    for _ in range(40):
        ours.step(grads, alpha=0.3, lr=1e-9)
    assert bool(ours.params[0].isfinite().all())


def test_a_nan_in_the_variance_is_kept(device: torch.device) -> None:
    ours = testing.updates.UpdateInputs("rmsprop_", [testing.common.randn(50)], {"centered": True}, device)
    grad = testing.common.randn(50, seed=1).to(device)
    grad[7], grad[8] = math.nan, math.inf  # inf - inf
    ours.step([grad])
    assert torch.equal(ours.params[0].isnan(), ~grad.isfinite())


def test_without_momentum_the_buffer_is_ignored(device: torch.device) -> None:
    p, buffer = torch.zeros(3, device=device), torch.full((3,), 5.0, device=device)
    rmsprop_(
        [p], [torch.full((3,), 2.0, device=device)], [torch.zeros(3, device=device)], [buffer], lr=0.25, alpha=0.75,
        eps=0.0, weight_decay=0.0, momentum=0.0, maximize=False,
    )  # fmt: skip
    assert buffer.tolist() == [5.0] * 3 and p.tolist() == [-0.5] * 3


def test_a_zero_gradient_moves_nothing(device: torch.device) -> None:
    ours = testing.updates.UpdateInputs("rmsprop_", [torch.ones(3)], {}, device)
    before = ours.params[0].clone()
    ours.step([torch.zeros(3, device=device)])
    assert torch.equal(ours.params[0], before)


# ------------------------------------------------------------------------------------------------ the kernels on tables
def test_negative_variance_counts_as_zero_and_nan_stays(launcher: Launcher) -> None:
    step = Step(launcher, "rmsprop", {"centered": True, "alpha": 1.0, "eps": 1.0}, (8,))
    step.states["square_avg"][0].fill_(1.0)
    step.states["grad_avg"][0].fill_(2.0)
    step.states["square_avg"][0][3] = math.nan
    before, grad = step.masters[0].clone(), step.grads[0]
    step.run()
    torch.testing.assert_close(step.masters[0][:3], (before - Step.LR[0] * grad)[:3])
    assert step.masters[0].isnan().tolist() == [i == 3 for i in range(8)]
