"""Averages of weights over steps; the kernel beneath is in `test_update_table.py`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import _places
from optim_cases import ALL, parameters, randn, set_grads, started, step_under
from torch import Tensor
from torch.profiler import profile

import amp_kernels
from amp_kernels import testing
from amp_kernels.families import SGD
from amp_kernels.functional.update import update
from amp_kernels.optim import FusedAdamW, FusedSGD, ema_

# NumPy, underneath Triton's interpreter, warns where IEEE arithmetic overflows.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


def trained(device: torch.device, *dtypes: torch.dtype, shape: tuple[int, ...] = (5, 7, 11)) -> FusedSGD:
    """An optimizer whose masters have more bits than their weights."""
    params = parameters(dtypes, device, [shape] * len(dtypes))
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    set_grads(params, 0)
    optimizer.step()
    return optimizer


def masters(optimizer: FusedSGD) -> list[Tensor]:
    return [optimizer.master(p) for group in optimizer.param_groups for p in group["params"]]


def assert_followed(averages: list[Tensor], before: list[Tensor], optimizer: FusedSGD, decay: float) -> None:
    for average, old, master in zip(averages, before, masters(optimizer), strict=True):
        expected = decay * old.double() + (1 - decay) * master.double()
        assert ((average.double() - expected).abs() <= 2.0**-23 * (old.abs() + master.abs())).all()


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999, 1.0])
def test_an_average_follows_masters(device, decay):
    optimizer = trained(device, *ALL)
    averages = [randn(*m.shape, seed=7, device=device) for m in masters(optimizer)]
    before, weights = [a.clone() for a in averages], [m.clone() for m in masters(optimizer)]
    ema_(averages, optimizer, decay)
    assert_followed(averages, before, optimizer, decay)
    assert sum(map(testing.common.changed, weights, masters(optimizer))) == 0


@pytest.mark.parametrize("of_average", LAYOUTS)
@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("dtype", ALL)
def test_layouts(device, dtype, of_weight, of_average):
    value = randn(3, 33, seed=1, dtype=dtype, device=device)
    params = [torch.nn.Parameter(LAYOUTS[of_weight](value)), torch.nn.Parameter(value.new_empty(0, 4))]
    optimizer = FusedSGD(params, lr=0.1)
    set_grads(params, 0)
    optimizer.step()
    averages = [LAYOUTS[of_average](randn(3, 33, seed=2, device=device)), torch.empty(0, 4, device=device)]
    before, layout = [a.clone() for a in averages], averages[0].stride()
    ema_(averages, optimizer, 0.9)
    assert_followed(averages, before, optimizer, 0.9)
    assert averages[0].stride() == layout


def test_parameters_without_state_or_gradient(device):
    """Frozen, not stepped yet, tied to nothing: the weight is its master."""
    params = parameters(ALL, device)
    params[0].requires_grad_(False)
    optimizer = FusedSGD(params, lr=0.1)
    averages = [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in params]
    ema_(iter(averages), optimizer, 0.5)
    for average, p in zip(averages, params, strict=True):
        torch.testing.assert_close(average, p.detach().float() / 2, rtol=2e-7, atol=0)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64, torch.bool, "meta"], ids=str)
@pytest.mark.parametrize("at", [0, 1])
def test_parameters_that_no_step_trains(device, dtype, at):
    """Frozen ones, as the packed codes of a quantized model: a step passes over them, and so does the average."""
    optimizer = trained(device, torch.bfloat16, torch.float32)
    params = optimizer.param_groups[0]["params"]
    value = torch.ones(3, device="meta") if dtype == "meta" else torch.ones(3, device=device).to(dtype)
    params.insert(at, torch.nn.Parameter(value, requires_grad=False))
    optimizer.step()
    averages = [torch.zeros_like(m) for m in masters(optimizer)]
    frozen = averages[at]
    for _ in range(2):
        before = [a.clone() for a in averages]
        ema_(averages, optimizer, 0.5)
        for i in (i for i in range(3) if i != at):
            torch.testing.assert_close(averages[i], (before[i] + masters(optimizer)[i]) / 2)
    assert frozen.is_meta or not frozen.any()
    with pytest.raises(ValueError, match=r"averages\[2\] must have shape"):
        ema_([*averages[:2], averages[2][:1]], optimizer, 0.5)
    with pytest.raises(ValueError, match=r"averages must hold one tensor for each of the 3 params, got 2"):
        ema_(averages[:2], optimizer, 0.5)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they take minutes there")
@pytest.mark.parametrize(("dtype", "scale"), [*((dtype, 1.0) for dtype in ALL), (torch.bfloat16, 0.02)])
def test_many_steps_stay_near_fp64(device, dtype, scale):
    param = torch.nn.Parameter((scale * randn(5000, seed=0, device=device)).to(dtype))
    optimizer = FusedSGD([param], lr=0.01 * scale, momentum=0.9)
    averages = [optimizer.master(param)]
    exact, rounded = averages[0].double(), averages[0].clone()
    for step in range(400):
        param.grad = randn(5000, seed=step + 1, dtype=dtype, device=device)
        optimizer.step()
        ema_(averages, optimizer, 0.9999)
        exact.lerp_(optimizer.master(param).double(), 1 - 0.9999)
        rounded.lerp_(param.detach().float(), 1 - 0.9999)
    assert (averages[0] - exact).norm() < 1e-6 * exact.norm()
    if dtype is torch.bfloat16:  # what the weights alone would give
        assert (rounded - exact).norm() > 1e-6 * exact.norm()


@pytest.mark.parametrize("found", [1.0, 2.0, math.inf, math.nan])
def test_a_skipped_step_leaves_the_average_alone(device, found):
    optimizer = trained(device, *ALL)
    averages = [torch.zeros_like(m) for m in masters(optimizer)]
    optimizer.found_inf = torch.tensor(found, device=device)
    optimizer.step()
    del optimizer.found_inf
    ema_(averages, optimizer, 0.5)
    assert all(not a.any() for a in averages)
    optimizer.step()
    ema_(averages, optimizer, 0.5)
    assert all(a.any() for a in averages)


def test_loading_forgets_a_skipped_step(device):
    optimizer = trained(device, *ALL)
    saved = optimizer.state_dict()
    step_under(optimizer, found_inf=1.0)
    optimizer.load_state_dict(saved)
    averages = [torch.zeros_like(m) for m in masters(optimizer)]
    ema_(averages, optimizer, 0.5)
    assert_followed(averages, [torch.zeros_like(a) for a in averages], optimizer, 0.5)


class Overridden(FusedSGD):
    """A step that a scaler has to skip on the host."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [amp_kernels.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("optimizer_class", [FusedSGD, FusedAdamW, Overridden])
def test_under_scalers(device, kind, unscale, optimizer_class):
    if optimizer_class is Overridden and kind is torch.amp.GradScaler:
        pytest.skip("as the docstring says")
    params = parameters([torch.float32], device)
    optimizer, scaler = optimizer_class(params, lr=0.1), started(device, kind)
    averages = [torch.zeros_like(p, requires_grad=False) for p in params]
    moved = []
    for step, is_finite in enumerate((True, False, False, True)):
        before = [a.clone() for a in averages]
        set_grads(params, step, scale=1.0 if is_finite else math.inf)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        ema_(averages, optimizer, 0.5)
        moved.append(any(map(testing.common.changed, before, averages)))
    assert moved == [True, False, False, True]


@pytest.mark.skipif("cpu" not in _places(), reason="the C++ kernels are not here")
def test_one_operator_for_any_number_of_parameters():
    """It launches once for each combination of dtypes."""
    optimizer = trained(torch.device("cpu"), *ALL * 3)
    averages = masters(optimizer)
    with profile() as record:
        ema_(averages, optimizer, 0.9)
    (event,) = [e for e in record.key_averages() if e.key == "amp_kernels::update_"]
    assert event.count == 1


def test_what_does_not_fit(device):
    optimizer = trained(device, *ALL)
    averages = masters(optimizer)
    before = [a.clone() for a in averages]

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    params = optimizer.param_groups[0]["params"]
    for arguments, error, sentence in (
        ((averages[:2], optimizer, 0.5), ValueError, r"averages must hold one tensor for each of the 3 params, got 2"),
        (([*averages[:2], averages[2].half()], optimizer, 0.5), TypeError, r"averages\[2\] must be float32, got torch"),
        (([*averages[:2], averages[2][1:]], optimizer, 0.5), ValueError, r"averages\[2\] must have shape \(5, 7, 11\)"),
        (
            ([averages[0], averages[1], averages[0]], optimizer, 0.5),
            ValueError,
            r"averages\[2\] must not share memory",
        ),
        (
            (averages, torch.optim.SGD(params), 0.5),
            TypeError,
            r"must be one of amp_kernels.optim, got a SGD; for other",
        ),
        ((averages, Wrapper(), 0.5), TypeError, r"got a Wrapper; pass the optimizer that it wraps"),
        ((averages, optimizer, 1.5), ValueError, r"decay must be a number from 0 to 1, got 1.5"),
        ((averages, optimizer, math.nan), ValueError, r"decay must be a number from 0 to 1, got nan"),
        ((averages, optimizer, "0.5"), TypeError, r"decay must be a number from 0 to 1, got '0.5'"),
        ((averages[0].sum(), optimizer, 0.5), TypeError, r"averages must be a list of Tensors"),
    ):
        with pytest.raises(error, match=f"^ema_: .*{sentence}"):
            ema_(*arguments)
    assert sum(map(testing.common.changed, before, averages)) == 0


def test_what_has_a_state_follows_no_remainders(device: torch.device) -> None:
    average, weight = torch.zeros(4, device=device), torch.zeros(4, dtype=torch.float16, device=device)
    states, remainders = [[torch.zeros_like(average)]], [weight.to(torch.int16)]
    options = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 1.0, "nesterov": False, "maximize": True}
    with pytest.raises(ValueError, match=r"^sgd_: grad_remainders must be None if the update has states, got the s"):
        update(
            SGD, [average], [weight], states, (), options, 0.1, steps_taken=0, grad_scale=None, found_inf=None,
            grad_remainders=remainders,
        )  # fmt: skip
