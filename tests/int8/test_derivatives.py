"""Derivatives of int8 and QAT layers beyond one backward pass: second ones, `torch.func`, forward mode,
checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import amp_kernels
from amp_kernels.nn import Int8Linear
from amp_kernels.quantization import _affine, convert_, prepare_, prepare_qat_, quantize_
from amp_kernels.testing.common import randn


class StraightThrough(torch.autograd.Function):
    """Fake quantization whose gradient is a product with a mask, which torch differentiates by itself."""

    @staticmethod
    def forward(ctx, x, options):
        q = amp_kernels.quantize_int8(x, **options)
        steps = torch.round(x * (1 / q.scale)) + (0 if q.zero_point is None else q.zero_point)
        ctx.save_for_backward((steps >= (-127 if q.zero_point is None else -128)) & (steps <= 127))
        return q.dequantize()

    @staticmethod
    def backward(ctx, gradient):
        (inside,) = ctx.saved_tensors
        return gradient * inside, None


def penalty(function: Callable[[Tensor], Tensor], x: Tensor, others: list[Tensor]) -> list[Tensor]:
    """Gradients of a squared norm of a gradient."""
    wanted = [x, *others]
    first = torch.autograd.grad(function(x).pow(3).sum(), wanted, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))


def assert_all_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for mine, wanted in zip(ours, expected, strict=True):
        assert wanted.norm() > 0
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


SCALE, ZERO_POINT = torch.tensor([0.0173]), torch.tensor([11], dtype=torch.int32)  # of a range that inputs exceed
OPTIONS = {
    "rows": {"dim": -1},
    "blocks": {"block_size": 8, "symmetric": False},
    "clamped": {"scale": SCALE, "zero_point": ZERO_POINT},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_gradient_penalty_through_fake_quantization(options, device):
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    x, weight = (2 * randn(6, 16)).to(device).requires_grad_(), randn(5, 16, seed=1).to(device).requires_grad_()
    if "block_size" in options:
        blocks = {"dim": -1, "symmetric": False}
        wanted = penalty(
            lambda x: F.linear(StraightThrough.apply(x.view(12, 8), blocks).view(6, 16), weight), x, [weight]
        )
    else:
        wanted = penalty(lambda x: F.linear(StraightThrough.apply(x, options), weight), x, [weight])
    ours = penalty(lambda x: F.linear(amp_kernels.fake_quantize_int8(x, **options), weight), x, [weight])
    assert_all_close(ours, wanted)
    assert bool((ours[0] == 0).any()) == ("scale" in options)


def layers(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(16, 9).to(device)
    if kind in ("weight_only", "dynamic"):
        return quantize_(layer, kind)
    if kind.startswith("qat"):
        layer = prepare_qat_(layer, kind.removeprefix("qat "))
        layer(randn(8, 16).to(device))  # a range that later inputs exceed
        return layer.eval()
    layer = prepare_(layer)
    layer(randn(8, 16).to(device))
    return convert_(layer)


def by_torch(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer as a product of dequantized values."""
    if isinstance(layer, Int8Linear):
        weight = layer.weight.detach()
        mode, ranges = layer.mode, (layer.input_scale, layer.input_zero_point)
    else:
        weight = None
        mode = "dynamic" if layer.observer is None else "static"
        ranges = (None, None) if layer.observer is None else _affine(layer.observer.low, layer.observer.high)
    options = {"dim": -1, "symmetric": False}
    if mode == "static":
        options = dict(zip(("scale", "zero_point"), ranges, strict=True))

    def call(x: Tensor) -> Tensor:
        w = StraightThrough.apply(layer.weight, {"dim": -1}) if weight is None else weight
        return F.linear(x if mode == "weight_only" else StraightThrough.apply(x, options), w, layer.bias)

    return call


KINDS = ("weight_only", "dynamic", "static", "qat dynamic", "qat static")
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_a_gradient_penalty_through_a_layer(kind, device):
    layer = layers(kind, device)
    x = (2 * randn(6, 16, seed=1)).to(device).requires_grad_()
    parameters = list(layer.parameters())
    assert_all_close(penalty(layer, x, parameters), penalty(by_torch(layer), x, parameters))


def test_a_penalty_where_some_layers_are_qat():
    """A penalty of a whole model, also where its first layer is a float one and panels cut a weight."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), layers("qat dynamic", "cpu"), nn.Tanh())
    x = randn(6, 16).requires_grad_()
    expected = nn.Sequential(model[0], model[1], nn.Module(), model[3])
    expected[2].forward = by_torch(model[2])
    parameters = list(model.parameters())
    assert_all_close(penalty(model, x, parameters), penalty(expected, x, parameters))


def test_a_penalty_in_panels(monkeypatch):
    layer, x = layers("weight_only", "cpu"), randn(6, 16).requires_grad_()
    whole = penalty(layer, x, [layer.bias])
    monkeypatch.setattr("amp_kernels.nn.int8.PANEL", 40)
    assert_all_close(penalty(layer, x, [layer.bias]), whole)


def test_a_penalty_of_a_table():
    table, weight = nn.Embedding(10, 16), randn(16, seed=1).requires_grad_()
    index = torch.tensor([1, 2, 1])

    def of(look_up: Callable[[Tensor], Tensor]) -> list[Tensor]:
        (first,) = torch.autograd.grad((look_up(index) @ weight).pow(3).sum(), table.weight, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [weight, table.weight]))

    expected = of(lambda index: StraightThrough.apply(table(index), {"dim": -1}))
    assert_all_close(of(prepare_qat_(table)), expected)


# ------------------------------------------------------------------------------------ torch.func and forward mode
def transforms(function: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Each transform gives what it gives of `expected`, made of torch's backward pass where that tells the same."""
    scalar, leaf = lambda x: function(x).sin().sum(), x.clone().requires_grad_()
    value = expected(leaf).sin().sum()
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(grad(scalar)(x), gradient, **close)
    torch.testing.assert_close(vmap(function)(x), expected(x), **close)
    torch.testing.assert_close(vmap(grad(scalar))(x), gradient, **close)
    direction = randn(*x.shape, seed=5).to(x.device)
    out, tangent = jvp(scalar, (x,), (direction,))
    torch.testing.assert_close(out, value, **close)
    torch.testing.assert_close(tangent, (gradient * direction).sum(), **close)
    for records in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(records):
            tangent = forward_ad.unpack_dual(scalar(forward_ad.make_dual(x, direction))).tangent
        torch.testing.assert_close(tangent, (gradient * direction).sum(), **close)
    second = torch.autograd.grad((gradient * direction).sum(), leaf)[0]
    assert second.norm() > 0
    torch.testing.assert_close((hessian(scalar)(x) * direction).flatten(2).sum(-1), second, **close)


@pytest.mark.parametrize("options", [OPTIONS["rows"], OPTIONS["clamped"]], ids=["rows", "clamped"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_fake_quantization(options):
    x = 2 * randn(4, 16)
    transforms(lambda x: amp_kernels.fake_quantize_int8(x, **options), lambda x: StraightThrough.apply(x, options), x)
    # Under a transform the values are bit for bit the operator's, inf and NaN included.
    x[0, 0], x[1, 0] = torch.inf, torch.nan
    found = vmap(lambda x: amp_kernels.fake_quantize_int8(x, **options))(x)
    torch.testing.assert_close(found, amp_kernels.fake_quantize_int8(x, **options), rtol=0, atol=0, equal_nan=True)


@kinds
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_layers(kind):
    layer, x = layers(kind, "cpu"), 2 * randn(4, 16, seed=1)
    transforms(layer, by_torch(layer), x)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    expected = torch.autograd.grad(by_torch(layer)(x).sum(), list(layer.parameters()))
    ours = grad(lambda p: functional_call(layer, p, (x,)).sum())(parameters)
    assert_all_close(list(ours.values()), list(expected))
    per_sample = vmap(grad(lambda p, x: functional_call(layer, p, (x,)).sum()), (None, 0))(parameters, x)
    assert_all_close([g.sum(0) for g in per_sample.values()], list(expected))


class ReadsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(16, 16), nn.Embedding(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight) + self.table.weight[: x.shape[0]]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_over_several_int8_models_that_read_weights():
    """An ensemble: the codes are batched, which a wrapper that dequantizes them later can not read."""
    models, x = [quantize_(ReadsWeights()) for _ in range(3)], randn(4, 16)
    state, empty = stack_module_state(models), copy.deepcopy(models[0]).to("meta")

    def one(parameters, buffers, x):
        return functional_call(empty, (parameters, buffers), (x,))

    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(vmap(one, (0, 0, None))(*state, x), expected)
    gradient = grad(lambda p, b, x: one(p, b, x).sin().sum(), argnums=2)
    expected = torch.stack([grad(lambda x, m=model: m(x).sin().sum())(x) for model in models])
    torch.testing.assert_close(vmap(gradient, (0, 0, None))(*state, x), expected)


def test_what_no_transform_knows_says_so():
    layer, x = layers("qat static", "cpu").train(), randn(4, 16)
    ranges = layer.observer.low.clone()
    for transform in (lambda: vmap(layer)(x), lambda: grad(lambda x: layer(x).sum())(x)):
        with pytest.raises(RuntimeError, match=r"range must be recorded outside of .* torch\.func; .* call eval\(\)"):
            transform()
    assert torch.equal(layer.observer.low, ranges)


@pytest.mark.parametrize("training", [False, True])
def test_layers_that_may_pass_codes_have_derivatives(training):
    model, x = prepare_(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))), randn(4, 16)
    model(x)
    convert_(model).train(training)
    x.requires_grad_()
    parameters = [x, *model.parameters()]
    expected, *of_biases = torch.autograd.grad(model[2](model[1](model[0](x))).sum(), parameters)
    found = torch.autograd.grad(model(x).sum(), parameters)
    torch.testing.assert_close(found, (expected, *of_biases))
    x = x.detach()
    if training:
        torch.testing.assert_close(torch.autograd.grad(model(x).sum(), parameters[1:]), tuple(of_biases))
    torch.testing.assert_close(grad(lambda x: model(x).sum())(x), expected)
    torch.testing.assert_close(jvp(model, (x,), (torch.ones_like(x),))[1].sum(), expected.sum())
    torch.testing.assert_close(jacrev(model)(x).sum((0, 1)), expected)


# ---------------------------------------------------------------------------------------- activation checkpointing
class Block(nn.Module):
    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.first, self.second, self.twice = nn.Linear(16, 16), nn.Linear(16, 16), twice

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        return self.second(F.gelu(self.first(9 * x)) if self.twice else x)


# Wider ranges between a forward pass and its repetition come from later batches, or from a second call of a layer. Not
# both: torch's reentrant checkpoint then adds the gradients of a parameter in another order, in float models too.
@pytest.mark.parametrize("together", [False, True], ids=["a layer called twice", "three batches at once"])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_checkpointing_repeats_the_forward_pass(mode, together, device):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(twice=not together) for _ in range(2))).to(device)
    prepare_qat_(model, mode).train()
    batches = [(scale * randn(8, 16, seed=scale)).to(device) for scale in (1, 4, 2)]

    def gradients(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        trained = copy.deepcopy(model)
        inputs = [x.detach().clone().requires_grad_() for x in batches]
        losses = []
        for x in inputs:
            for block in trained:
                x = run(block, x)
            losses.append(x.square().mean())
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()
        return [*(x.grad for x in inputs), *(p.grad for p in trained.parameters()), *trained.buffers()]

    expected = gradients(lambda block, x: block(x))
    for reentrant in (False, True):
        found = gradients(lambda block, x, reentrant=reentrant: checkpoint(block, x, use_reentrant=reentrant))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_training_batch_is_quantized_by_its_own_range(device):
    layer = prepare_qat_(nn.Linear(16, 9).to(device), "static")
    wide, narrow = (scale * randn(8, 16).to(device) for scale in (4.0, 1.0))
    first = layer(narrow)
    layer(wide)
    assert torch.equal(layer(narrow), first)
    layer.eval()
    assert not torch.equal(layer(narrow), first)  # by the range of all batches, as the int8 layer
    predicted = layer(narrow)
    assert torch.equal(convert_(layer)(narrow), predicted)
