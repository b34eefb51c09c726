"""Batch norms that become part of int8 convolutions, and the layers through which codes pass."""

import collections
import copy
import functools
import random
import types

import pytest
import torch
from int8_networks import codes_passed
from torch import nn

from amp_kernels.quantization import convert_, prepare_, prepare_qat_, quantize_
from amp_kernels.testing.common import randn


def trained(model):
    """With statistics and parameters of batch norms that change something, in eval mode."""
    torch.manual_seed(0)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) and norm.running_mean is not None:
            with torch.no_grad():
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.3, 3)
                for parameter in norm.parameters():
                    parameter.normal_()
    return model.eval()


def in_sequence(**options):
    return nn.Sequential(nn.Conv2d(3, 8, 3, **options), nn.BatchNorm2d(8), nn.ReLU())


class Residual(nn.Module):
    """As in a ResNet: layers that `forward` calls in order, and an addition."""

    def __init__(self, width=8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x):
        out = self.bn1(self.conv1(x)).relu()
        return torch.relu(self.bn2(self.conv2(out)) + x)


class Branches(nn.Module):
    """Its `forward` cannot be traced."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.block = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Residual()
        self.seen = 0

    def forward(self, x):
        self.seen = x
        x = self.norm(self.stem(x))
        return self.block(x) if x.mean() > -99 else x


class Reads(nn.Module):
    """The result of the convolution is read twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.conv(x)
        return self.norm(x) + x


class Twice(nn.Module):
    """The batch norm follows two convolutions."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.two(self.norm(self.one(x))))


class Keeps(nn.Module):
    """`forward` stores the result of the convolution, and raises a counter."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.register_buffer("steps", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.steps.add_(1 + 0 * int(random.random()))
        self.register_buffer("shape", torch.tensor([1.0]) + torch.rand(1), persistent=False)
        y = self.conv(x)
        self.seen.append(y)
        return self.norm(y)


class Features(nn.Module):
    """Collects what each layer returns, as networks for style do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*in_sequence(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return torch.cat([y.flatten(1) for y in found], 1)


class ReadsTheWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x)) + nn.functional.conv2d(x, self.conv.weight)


class Optional(nn.Module):
    """`forward` returns the result of the convolution if an argument is absent."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x, skip=None):
        y = self.conv(x)
        return y if skip is None else self.norm(y) + skip


class WithoutGradients(Optional):
    def forward(self, x):
        y = self.conv(x)
        return y + self.norm(y) if torch.is_grad_enabled() else self.norm(y)


class KeepsPrivately(Optional):
    def forward(self, x):
        self._kept = self.conv(x)
        return self.norm(self._kept)


class LeavesGarbage(Optional):
    """A list that holds itself holds the result until the garbage collector runs."""

    def forward(self, x):
        box = [self.conv(x)]
        box.append(box)
        return self.norm(box[0])


class KeepsInAnObject(Optional):
    def __init__(self):
        super().__init__()
        self.kept = types.SimpleNamespace()

    def forward(self, x):
        self.kept.result = self.conv(x)
        return self.norm(self.kept.result)


class ReadsStatistics(Optional):
    def forward(self, x):
        return self.norm(self.conv(x)) * self.norm.running_mean.view(-1, 1, 1)


def hooked(*layers):
    """A module around a layer has a hook that changes what the layer returns or gets."""
    model = nn.Sequential(*layers)
    for module in model:
        if isinstance(module, nn.Sequential):
            module.register_forward_hook(lambda module, given, result: result.abs() + 1)
    return model


class InLists(nn.Module):
    """`forward` calls the convolutions from a list, in which they are not children."""

    def __init__(self):
        super().__init__()
        self.steps = [(1, {"conv": nn.Conv2d(3, 8, 3)}), (2, {"conv": nn.Conv2d(8, 4, 1)})]
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(4)])
        for i, step in self.steps:
            self.add_module(f"conv{i}", step["conv"])

    def forward(self, x):
        for (i, step), norm in zip(self.steps, self.norms, strict=True):
            x = norm(step["conv"](x)) * i
        return x


class InTraining(nn.Module):
    """`forward` also returns the result of the convolution in training mode."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.conv(x)
        return (self.norm(y), y) if self.training else self.norm(y)


class Activated(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, x):
        return super().forward(x).relu()


MODELS = {  # the model, the channels of its input, and how many of its batch norms are folded
    "sequence": (in_sequence, 3, 1),
    "without bias": (lambda: in_sequence(bias=False), 3, 1),
    "without affine": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, affine=False)), 3, 1),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU()), 8, 1),
    "other transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)),
        3,
        0,
    ),
    "transposed without bias": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, (2, 3), (2, 3), bias=False), nn.BatchNorm2d(8)),
        3,
        1,
    ),
    "residual": (Residual, 8, 2),
    "nested": (lambda: nn.Sequential(in_sequence(padding=1), Residual(), nn.Sequential(Residual())), 3, 5),
    "branches": (Branches, 3, 0),
    "read twice": (Reads, 3, 0),
    "kept": (Keeps, 3, 0),
    "features": (Features, 3, 0),
    "weight read": (ReadsTheWeight, 3, 0),
    "result in training": (InTraining, 3, 0),
    "optional": (Optional, 3, 0),
    "without gradients": (WithoutGradients, 3, 0),
    "kept privately": (KeepsPrivately, 3, 0),
    "kept in an object": (KeepsInAnObject, 3, 0),
    "garbage": (LeavesGarbage, 3, 1),
    "statistics read": (ReadsStatistics, 3, 0),
    "hook around the convolution": (lambda: hooked(nn.Sequential(nn.Conv2d(3, 8, 3)), nn.BatchNorm2d(8)), 3, 0),
    "hook around the norm": (lambda: hooked(nn.Conv2d(3, 8, 3), nn.Sequential(nn.BatchNorm2d(8))), 3, 0),
    "used twice": (Twice, 3, 0),
    "in lists": (InLists, 3, 2),
    "activated": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Activated(8)), 3, 0),
    "synchronized": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8)), 3, 0),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)), 4, 0),
    "before": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3)), 3, 0),
}


def norms(model):
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm
    return sum(isinstance(module, kinds) for module in model.modules())


class Held(Optional):
    """`forward` finds a layer in an attribute."""

    def __init__(self, name, hold, reach):
        super().__init__()
        self.name, self.reach = name, reach
        vars(self)["held"] = hold(getattr(self, name))

    def forward(self, x):
        held = self.reach(self.held)
        return self.norm(held(x)) if self.name == "conv" else held(self.conv(x))


def first(held):
    return next(iter(held))


HOLDERS = {  # ways to hold a layer, and to reach it
    "alone": (lambda layer: layer, lambda held: held, True),
    "list": (lambda layer: [layer], first, True),
    "tuple": (lambda layer: (layer,), first, True),
    "named tuple": (collections.namedtuple("Pair", "layer"), first, True),
    "deque": (lambda layer: collections.deque([layer]), first, True),
    "ordered dict": (lambda layer: collections.OrderedDict(a=layer), lambda held: held["a"], True),
    # In these, no other layer is put.
    "set": (lambda layer: {layer}, first, False),
    "frozenset": (lambda layer: frozenset([layer]), first, False),
    "keys": (lambda layer: {layer: 1}, first, False),
    "partial": (functools.partial, lambda held: held, False),
    "object": (lambda layer: types.SimpleNamespace(layer=layer), lambda held: held.layer, False),
    "user list": (lambda layer: collections.UserList([layer]), first, False),
    "forward": (lambda layer: layer.forward, lambda held: held, False),
}


@pytest.mark.parametrize("which", ["conv", "norm"])
@pytest.mark.parametrize("name", HOLDERS)
@torch.no_grad()
def test_a_layer_that_is_reached_in_another_way(name, which):
    """No batch norm is lost, and none is applied twice."""
    hold, reach, is_folded = HOLDERS[name]
    model, x = trained(Held(which, hold, reach)), randn(4, 3, 10, 9)
    before = model(x)
    for convert, error in ((prepare_, 1e-5), (quantize_, 0.04), (prepare_qat_, 0.06)):
        made = convert(copy.deepcopy(model))
        assert norms(made) == (not is_folded)
        assert (made(x) - before).abs().max() <= error * before.abs().max()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()  # some models keep results, and a graph of autograd cannot be copied
def test_what_is_folded_computes_the_same(name, caplog):
    make, channels, count_folded = MODELS[name]
    model = trained(make())
    x = randn(4, channels, 10, 9)
    before, count = model(x), norms(model)
    with caplog.at_level("INFO", "amp_kernels"):
        prepared = prepare_(copy.deepcopy(model))
    assert norms(prepared) == count - count_folded
    assert f"folded {count_folded} of {count} batch norms into convolutions" in caplog.messages
    torch.testing.assert_close(prepared(x), before, rtol=1e-4, atol=1e-5)
    weight_only = quantize_(copy.deepcopy(model))
    assert norms(weight_only) == count - count_folded
    for int8 in (weight_only, convert_(prepared)):
        assert (int8(x) - before).abs().max() <= 0.04 * before.abs().max()


@torch.no_grad()
def test_a_trace_changes_nothing():
    model = trained(Keeps())
    log = []
    model.register_forward_hook(lambda *_: log.append(1))
    x = randn(1, 3, 9, 9)
    model(x)
    seen, shape, state, other = list(model.seen), model.shape, torch.get_rng_state(), random.getstate()
    quantize_(model)
    assert float(model.steps) == 1 and model.shape is shape and log == [1]
    assert len(model.seen) == len(seen) and model.seen[0] is seen[0]
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == other


@pytest.mark.parametrize("convert", [quantize_, prepare_])
def test_parameters_that_others_hold_keep_their_values(convert):
    model = trained(in_sequence())
    held, bias = model[0].weight, model[0].bias
    before = held.detach().clone(), bias.detach().clone()
    convert(model)
    assert norms(model) == 0
    assert torch.equal(held, before[0]) and torch.equal(bias, before[1])


@pytest.mark.parametrize("convert", [quantize_, prepare_, prepare_qat_])
def test_a_refused_call_changes_nothing(convert):
    model = trained(nn.Sequential(in_sequence(), nn.Linear(4, 4).double()))
    layers, state = list(model.modules()), {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(TypeError, match="the weight of '1' must be float32"):
        convert(model)
    assert list(model.modules()) == layers
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_a_float_checkpoint_is_refused_where_a_batch_norm_is_gone():
    model = trained(in_sequence(bias=False))
    checkpoint = {name: t.clone() for name, t in model.state_dict().items()}
    prepare_(model)
    with pytest.raises(RuntimeError, match=r"1\.running_mean must not be given, since this batch norm was folded"):
        model.load_state_dict(checkpoint, strict=False)


def test_training_for_int8_leaves_pairs_that_an_optimizer_would_lose():
    """Without a bias that both the optimizer and the convolution can have, and with memory that others share."""
    mixed = trained(in_sequence(bias=False))
    mixed[0].bfloat16()
    no_bias = trained(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, affine=False)))
    memory = torch.randn(2, 8, 3, 3, 3)
    views = trained(nn.Sequential(in_sequence(), nn.Conv2d(8, 4, 1)))
    views[0][0].weight, views.other = nn.Parameter(memory[0]), nn.Parameter(memory[1])
    expanded = trained(in_sequence())  # its elements lie at one place, and folding would give them different values
    expanded[0].weight = nn.Parameter(torch.randn(1, 3, 3, 3).expand_as(expanded[0].weight))
    for model in (mixed, no_bias, views, expanded):
        parameters = {id(p) for p in model.parameters()}
        prepare_qat_(model)
        assert norms(model) == 1 and {id(p) for p in model.parameters()} == parameters


def test_hooks_and_other_owners_keep_a_batch_norm():
    hooked = trained(in_sequence())
    hooked[1].register_forward_hook(lambda *_: None)
    assert norms(quantize_(hooked)) == 1
    shared = trained(nn.Sequential(*in_sequence(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)))
    shared[4].bias = shared[1].bias
    assert norms(quantize_(shared)) == 2
    batch = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)))
    assert norms(quantize_(batch)) == 1


def test_lines_and_16_bits():
    model = nn.Sequential(nn.Conv1d(3, 8, 3, 3), nn.BatchNorm1d(8))
    model = trained(model)
    x = randn(4, 3, 20)
    before = model(x)
    half = quantize_(copy.deepcopy(model).bfloat16())
    assert norms(half) == 0 and half[0].bias.dtype == half[0].weight.dtype == torch.bfloat16
    assert (half(x.bfloat16()).float() - before).abs().max() <= 0.03 * before.abs().max()
    mixed = trained(nn.Sequential(nn.Conv1d(3, 8, 3, 3, bias=False), nn.BatchNorm1d(8)))
    before = mixed(x)
    mixed[0].bfloat16()
    mixed = quantize_(mixed)
    assert mixed[0].bias.dtype == torch.bfloat16
    assert (mixed(x.bfloat16()).float() - before).abs().max() <= 0.03 * before.abs().max()


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_training_for_int8_keeps_the_parameters_of_an_optimizer(mode):
    model = trained(nn.Sequential(in_sequence(bias=False, padding=1), Residual(), nn.Flatten(), nn.Linear(8 * 36, 4)))
    kept = [model[0][0].weight, model[0][1].bias, model[1].conv1.weight, model[1].bn2.bias]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    prepare_qat_(model, mode).train()
    assert norms(model) == 0
    now = [model[0][0].weight, model[0][0].bias, model[1].conv1.weight, model[1].conv2.bias]
    assert all(a is b for a, b in zip(kept, now, strict=True))
    x = randn(8, 3, 6, 6)
    before = [p.detach().clone() for p in kept]
    model(x).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
    expected = model.eval()(x)
    assert torch.equal(convert_(model)(x), expected)


def test_a_folded_norm_keeps_its_plain_attributes():
    model = quantize_(trained(in_sequence()))
    assert (model[1].num_features, model[1].eps, model[1].training) == (8, 1e-5, False)


def test_models_without_batch_norms_are_not_traced():
    """Lazy parameters have no memory, and a trace of this forward would fail."""
    model = quantize_(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)))
    assert type(model[0]) is not nn.Linear
    lazy = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(3))
    for convert in (quantize_, prepare_qat_):
        assert type(convert(copy.deepcopy(lazy))[0]) is not nn.Conv2d


def test_a_buffer_that_shares_memory_keeps_its_values():
    model = trained(in_sequence())
    model.register_buffer("average", model[0].weight.detach())
    before = model.average.clone()
    prepare_qat_(model)
    assert torch.equal(model.average, before) and norms(model) == 1


def test_a_relu_that_nobody_calls():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = between(nn.ReLU())

        def forward(self, x):
            return self.layers[2](self.layers[0](x))

    torch.manual_seed(0)
    model, x = Skips().eval(), randn(2, 3, 12, 12)
    before = model(x)
    prepare_(model)(x)
    assert (convert_(model)(x) - before).abs().max() <= 0.05 * before.abs().max()


@torch.no_grad()
def test_a_batch_norm_in_a_sequential_that_is_partly_int8():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    model, x = trained(nn.Sequential(*layers)), randn(2, 3, 9, 9)
    before = model(x)
    prepare_(model, lambda layer, name: name != "4")(x)
    convert_(model)
    assert norms(model) == 1 and codes_passed(model, x) == 1
    quantize_(model)
    assert norms(model) == 0 and (model(x) - before).abs().max() <= 0.04 * before.abs().max()


def test_a_checkpoint_loads_into_a_new_model():
    model, x = trained(nn.Sequential(in_sequence(bias=False), nn.Conv2d(8, 4, 1))), randn(2, 3, 8, 8)
    int8 = quantize_(model, "dynamic")
    fresh = quantize_(nn.Sequential(in_sequence(bias=False), nn.Conv2d(8, 4, 1)), "dynamic")  # in training mode
    fresh.load_state_dict(int8.state_dict())
    assert torch.equal(fresh.eval()(x), int8(x))


# ------------------------------------------------------------------------------------- what codes pass through
def between(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 4, 3, padding=1)).eval()


@pytest.mark.parametrize(
    ("layers", "passes"),
    [
        ((), True),
        ((nn.ReLU(),), True),
        ((nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), True),
        ((nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), nn.ReLU()), True),
        ((nn.Identity(),), True),
        (
            (nn.ReLU(), nn.MaxPool2d(2, 1, padding=1, dilation=10)),
            True,
        ),  # a window of a small image lies in the padding alone
        ((nn.AvgPool2d(2),), False),
        ((nn.ReLU6(),), False),
        ((nn.GELU(),), False),
    ],
    ids=lambda value: "-".join(type(layer).__name__ for layer in value) if isinstance(value, tuple) else str(value),
)
def test_codes_pass_only_through_layers_that_change_nothing(layers, passes):
    model, x = trained(between(*copy.deepcopy(layers))), randn(2, 3, 12, 12)
    before = model(x)
    prepare_(model)(x)
    int8 = convert_(model)
    assert codes_passed(int8, x) == passes
    y = int8(x)
    assert (y - before).abs().max() <= 0.05 * before.abs().max()
    # The same bits as if the first layer passed numbers.
    small = x[..., :9, :9]
    for image in (x, small):
        expected = int8(image)
        for layer in int8:
            image = layer(image)
        assert torch.equal(image, expected)


def test_codes_pass_from_a_convolution_to_a_linear_layer():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 25, 6), nn.ReLU()]
    model, x = nn.Sequential(*layers, nn.Linear(6, 4)).eval(), randn(4, 3, 12, 12)
    before = model(x)
    prepare_(model)(x)
    int8 = convert_(model)
    assert codes_passed(int8, x) == 2
    assert (int8(x) - before).abs().max() <= 0.03 * before.abs().max()


def test_layers_that_are_used_twice():
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)]
    model = nn.Sequential(
        convolutions[0], relu, convolutions[1], relu, convolutions[2], pool, convolutions[3], pool
    ).eval()
    x = randn(2, 3, 12, 12)
    before = model(x)
    prepare_(model)(x)
    int8 = convert_(model)
    assert codes_passed(int8, x) == 3 and int8[1] is relu and int8[5] is pool
    assert (int8(x) - before).abs().max() <= 0.05 * before.abs().max()
