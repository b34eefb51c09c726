"""Averages of weights over steps and over models; the kernel beneath is in `test_update_table.py`."""

from __future__ import annotations

import copy
import importlib
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
from amp_kernels.optim import (
    FusedAdamW,
    FusedSGD,
    average_,
    ema_,
    fp32_state_dict,
    greedy_soup,
    load_fp32_state_dict,
)

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
    states, remainders = {"momentum_buffers": [torch.zeros_like(average)]}, [weight.to(torch.int16)]
    options = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 1.0, "nesterov": False, "maximize": True}
    with pytest.raises(ValueError, match=r"^sgd_: grad_remainders must be None if the update has states, got the s"):
        update(
            SGD, [average], [weight], states, (), options, 0.1, steps_taken=0, grad_scale=None, found_inf=None,
            grad_remainders=remainders,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- soups
class Model(torch.nn.Module):
    def __init__(self, seed: int, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.norm = torch.nn.Embedding(13, 9), torch.nn.BatchNorm1d(9)
        self.head = torch.nn.Linear(9, 13)
        self.to(device, dtype)
        self.head.weight = self.embedding.weight
        self.register_buffer("wide", torch.full((3,), float(seed), dtype=torch.float64, device=device))
        self.register_buffer("phase", torch.full((3,), seed + 1j, dtype=torch.complex64, device=device))
        self.norm.num_batches_tracked += seed
        self.norm.running_mean += seed

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_soup_is_the_mean(device, dtype, count):
    models = [Model(seed, dtype, device) for seed in range(count)]
    names = [name for name, v in models[0].state_dict().items() if isinstance(v, Tensor) and not v.is_complex()]
    stacks = {name: torch.stack([m.state_dict()[name].double() for m in models]) for name in names}
    others = [copy.deepcopy(m.state_dict()) for m in models[1:]]
    soup = average_(m for m in models)
    assert soup is models[0] and soup.head.weight is soup.embedding.weight
    for name, value in soup.state_dict().items():
        if name == "norm.num_batches_tracked":
            assert value.item() == 0
        elif name == "phase":
            torch.testing.assert_close(value, torch.full_like(value, (count - 1) / 2 + 1j))
        elif name in stacks:
            mean = stacks[name].mean(0)
            eps = torch.finfo(value.dtype).eps if value.dtype is not torch.float64 else 1e-15
            assert (
                (value.double() - mean).abs() <= 0.51 * eps * mean.abs() + 1e-6 * (value.dtype != torch.float64)
            ).all()
    assert soup.wide.tolist() == [(count - 1) / 2] * 3
    for model, before in zip(models[1:], others, strict=True):
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items() if isinstance(v, Tensor))


def test_a_soup_of_several_dtypes(device):
    models = [Model(seed, dtype, device) for seed, dtype in enumerate(ALL)]
    mean = torch.stack([m.head.bias.detach().double() for m in models]).mean(0)
    assert average_(models).head.bias.dtype is torch.float32
    torch.testing.assert_close(models[0].head.bias.detach().double(), mean, rtol=0, atol=1e-6)


def trained_models(device: torch.device, dtype: torch.dtype) -> list[tuple[Model, FusedSGD]]:
    """With masters that have more bits than their weights."""
    pairs = []
    for seed in range(2):
        model = Model(seed, dtype, device)
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        set_grads(list(model.parameters()), seed)
        optimizer.step()
        pairs.append((model, optimizer))
    return pairs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_optimizer_goes_on_from_the_soup(device, dtype):
    """Its remainders stay, so its masters are near the rounded mean, not equal to it."""
    (soup, optimizer), (other, _) = trained_models(device, dtype)
    remainders = [optimizer.state[p]["remainder"].clone() for p in soup.parameters()]
    average_([soup, other])
    for p, remainder in zip(soup.parameters(), remainders, strict=True):
        assert torch.equal(optimizer.state[p]["remainder"], remainder) and remainder.any()
        master, weight = optimizer.master(p), p.detach()
        half_a_unit = weight.float().abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
        assert torch.equal(master.to(dtype), weight)
        assert ((master - weight.float()).abs() <= half_a_unit).all()
    set_grads(list(soup.parameters()), 7)
    expected = [optimizer.master(p) - 0.1 * p.grad.float() for p in soup.parameters()]
    optimizer.step()
    for p, value in zip(soup.parameters(), expected, strict=True):
        torch.testing.assert_close(optimizer.master(p), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_are_averaged_in_fp32_models(device, dtype):
    """As the docstring says."""
    pairs = trained_models(device, dtype)
    mean = torch.stack([optimizer.master(model.head.bias).double() for model, optimizer in pairs]).mean(0)
    copies = [Model(0, torch.float32, device) for _ in pairs]
    for (model, optimizer), wide in zip(pairs, copies, strict=True):
        wide.load_state_dict(fp32_state_dict(model, optimizer))
    (model, optimizer), _ = pairs
    load_fp32_state_dict(model, optimizer, average_(copies).state_dict())
    torch.testing.assert_close(optimizer.master(model.head.bias).double(), mean, rtol=0, atol=1e-7)


def test_models_that_do_not_fit(device):
    first, second = (Model(seed, torch.float32, device) for seed in range(2))
    before = copy.deepcopy(first.state_dict())
    longer, wider = Model(1, torch.float32, device), Model(1, torch.float32, device)
    longer.register_buffer("extra", torch.zeros(1, device=device))
    wider.head.bias = torch.nn.Parameter(torch.zeros(14, device=device))
    for models, error, sentence in (
        ([], ValueError, "models must contain at least one model, got none"),
        ([first, 3], TypeError, r"models\[1\] must be a torch Module, got a int"),
        ([first, second, longer], ValueError, r"models\[2\] must have the entries of models\[0\], but only one"),
        (
            [first, wider],
            ValueError,
            r"head.bias of models\[1\] must have shape \(13,\) as in models\[0\], got \(14,\)",
        ),
    ):
        with pytest.raises(error, match=f"^average_: {sentence}"):
            average_(models)
    assert all(torch.equal(v, before[n]) for n, v in first.state_dict().items() if isinstance(v, Tensor))


# ------------------------------------------------------------------------------------------------------- greedy soups
def contents(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: v.clone() for name, v in model.state_dict().items() if isinstance(v, Tensor)}


def changed(model: torch.nn.Module, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(v, before[name]) for name, v in contents(model).items())


def fine_tuned(images: Tensor, labels: Tensor, seeds: int) -> list[torch.nn.Module]:
    """Classifiers of digits that start from one training, with other learning rates, batches and wrong labels."""
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def train(model: torch.nn.Module, steps: int, lr: float, noise: float) -> torch.nn.Module:
        optimizer = FusedAdamW(model.parameters(), lr=lr)
        for _ in range(steps):
            rows = torch.randint(len(images), (64,))
            wrong = torch.where(torch.rand(64) < noise, torch.randint(10, (64,)), labels[rows])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[rows]), wrong).backward()
            optimizer.step()
        return model

    train(start, 200, 1e-2, 0.0)
    models = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        models.append(train(copy.deepcopy(start), 100, (2e-3, 4e-3, 1e-1)[seed % 3], 0.4))
    return models


def test_a_greedy_soup_is_at_least_as_good_as_the_best_model():
    images, labels = (torch.tensor(x) for x in importlib.import_module("sklearn.datasets").load_digits(return_X_y=True))
    images = images.float() / 16
    models = fine_tuned(images[:1200], labels[:1200], 8)

    def metric(model: torch.nn.Module) -> float:
        return -torch.nn.functional.cross_entropy(model(images[1200:]), labels[1200:]).item()

    before = [contents(model) for model in models]
    soup, members = greedy_soup(models, metric)
    singles = [metric(model) for model in models]
    assert metric(soup) > max(singles)
    assert 1 < len(members) < len(models)  # a learning rate of 0.1 leads too far away
    assert not any(map(changed, models, before)) and all(soup is not model for model in models)

    # Recipe 1, with an average of copies at each step.
    expected: list[int] = []
    score = -math.inf
    for i in sorted(range(len(models)), key=lambda i: -singles[i]):
        tried = metric(average_([copy.deepcopy(models[j]) for j in (*expected, i)]))
        if tried >= score:
            expected.append(i)
            score = tried
    assert members == expected and metric(soup) == pytest.approx(score, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_greedy_soup_of_masters_is_their_mean_rounded_once(device, dtype):
    pairs = trained_models(device, dtype)
    soup, members = greedy_soup(pairs, lambda model: 1.0)
    assert members == [0, 1] and soup.head.weight is soup.embedding.weight
    differing = 0
    for name, value in soup.named_parameters():
        masters_of = [optimizer.master(dict(model.named_parameters())[name]) for model, optimizer in pairs]
        mean = torch.stack(masters_of).double().mean(0)
        weights = torch.stack([dict(model.named_parameters())[name].detach() for model, _ in pairs]).double().mean(0)
        assert value.dtype is dtype and torch.equal(value.detach(), mean.to(dtype))
        differing += int((mean.to(dtype) != weights.to(dtype)).sum())
    assert differing > 0  # the mean of the weights is another one


def test_what_a_greedy_soup_does_not_average(device):
    """Integers are those of the best model, whatever the metric does to the model that it gets."""
    models = [Model(seed, dtype, device) for seed, dtype in enumerate([torch.bfloat16, *ALL])]
    before, modes = [contents(model) for model in models], [model.training for model in models]
    scores = iter([0.0, 1.0, 3.0, 2.0, 3.0, 2.0, 3.5])  # of the models; then of 2 with 3, with 1, and with 0

    def metric(model: Model) -> Tensor:
        model.eval().norm.num_batches_tracked += 100
        model.norm.running_mean.fill_(torch.nan)
        return torch.tensor([next(scores)])

    soup, members = greedy_soup(iter(models), metric)
    assert members == [2, 3, 0]
    assert soup.norm.num_batches_tracked == 2 and soup.head.bias.dtype is torch.bfloat16
    assert soup.norm.running_mean.tolist() == pytest.approx([5 / 3] * 9, rel=1e-2)
    assert soup.wide.tolist() == [5 / 3] * 3 and soup.phase.tolist() == pytest.approx([5 / 3 + 1j] * 3)
    assert not any(map(changed, models, before)) and modes == [model.training for model in models]


def test_sentences_of_greedy_soup():
    first, second = (Model(seed, torch.float16, "cpu") for seed in range(2))
    before = contents(first), contents(second)
    wider = Model(1, torch.float16, "cpu")
    wider.head.bias = torch.nn.Parameter(torch.zeros(14))
    optimizer = FusedSGD(first.parameters())
    around = torch.optim.SGD(first.parameters())
    around.optimizer = optimizer
    values = iter([1.0, 2.0, math.nan])

    def fails(model: Model) -> float:
        model.head.bias.data.fill_(7.0)
        raise ZeroDivisionError

    for models, metric, error, sentence in (
        ([], len, ValueError, "models must contain at least one model, got none"),
        ([first, 3], len, TypeError, r"models\[1\] must be a torch Module, or a pair of .*, got a int"),
        ([(first, optimizer, 3)], len, TypeError, r"models\[0\] must be .*, got \(a Model, a FusedSGD, a int\)"),
        ([first, (second, 3)], len, TypeError, r"models\[1\]: optimizer must be a torch Optimizer, got a int"),
        ([(first, around)], len, TypeError, r"models\[0\]: optimizer must be the FusedSGD that keeps the masters"),
        ([first, wider], len, ValueError, r"head.bias of models\[1\] must have shape \(13,\) as in models\[0\]"),
        ([first], 1.0, TypeError, "metric must be a function of a model, got a float"),
        ([first], lambda model: None, TypeError, r"metric must return a number, got a NoneType for models\[0\]"),
        ([first, second], lambda model: next(values), ValueError, r"got NaN for the mean of models \[1, 0\]"),
        ([first], lambda model: math.nan, ValueError, r"metric must return a number to .*, got NaN for models\[0\]"),
        ([first, second], fails, ZeroDivisionError, ""),
    ):
        with pytest.raises(error, match=f"^greedy_soup: .*{sentence}" if sentence else None):
            greedy_soup(models, metric)
    assert not changed(first, before[0]) and not changed(second, before[1])
