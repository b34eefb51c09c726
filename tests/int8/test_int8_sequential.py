"""Static int8 layers pass codes inside a call of their container. All other code that calls them gets floats."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from int8_networks import codes_passed, converted
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from amp_kernels.nn import Int8Linear
from amp_kernels.nn.int8_sequential import Int8Sequential
from amp_kernels.quantization import ObservedLinear, convert_, prepare_, quantize_
from amp_kernels.testing.common import randn


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 16)).eval()


def images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 16)).eval()


def one_by_one(net, x):
    for layer in net:
        x = layer(x)
    return x


# ----------------------------------------------------------------------------------- what else reads a layer's result
class Reads(nn.Module):
    """A model of `net` and `aux`; `how` calls their layers."""

    def __init__(self, how):
        super().__init__()
        self.how, self.net, self.aux = how, mlp(), nn.Linear(24, 16)

    def forward(self, x):
        return self.how(self.net, self.aux, x)


def second_head(net, aux, x):
    h = net[0](x)
    return net[2](net[1](h))[..., :16] + aux(h)


def shortcut(net, aux, x):
    h = net[0](x)
    return net[2](net[1](h)) + 4 * h


def other_range(net, aux, x):
    """`net` is called as a whole too, and a layer in it with other numbers."""
    return net(x) + net[4](net[2](-20 * net[0](x)))


def after_a_slice(net, aux, x):
    return net[3:](net[:3](x)) + aux(net[:1](x))


def experts(net, aux, x):
    """Which layers are called depends on the input."""
    h = net[0](x)
    return torch.where(x[..., :1] > 0, net[4](net[2](F.gelu(h))), net[4](net[1](h)))


def taps(net, aux, x):
    total = 0
    for layer in net:
        x = layer(x)
        total = total + F.gelu(x).mean(-1, keepdim=True)
    return x + total


def residual(net, aux, x):
    h = net[0](x)
    return net[4](h + F.gelu(net[2](h)))


def backwards(net, aux, x):
    x = net[0](x)
    for layer in list(reversed(net))[1:3]:
        x = F.gelu(layer(x))
    return net[-1](x)


def early_exit(net, aux, x):
    first = net[:1](x)
    return aux(first) if first.abs().mean() > 1e3 else F.gelu(net[1:3](first)).mean() + net(x)


HOW = (second_head, shortcut, other_range, after_a_slice, experts, taps, residual, backwards, early_exit)


@pytest.mark.parametrize("how", HOW)
@torch.no_grad()
def test_a_layer_that_is_called_alone_returns_floats(how):
    model, x = Reads(how).eval(), randn(32, 16)
    expected = model(x)
    static = prepare_(copy.deepcopy(model))
    static(x)
    for layer in (static.aux, *static.net):
        if isinstance(layer, ObservedLinear) and layer.observer.low > layer.observer.high:
            layer(torch.zeros(1, layer.in_features))  # `how` does not call it
    dynamic, static = (
        (int8(x) - expected).norm() / expected.norm() for int8 in (quantize_(model, "dynamic"), convert_(static))
    )
    assert dynamic <= 0.015 and static <= 2 * dynamic, (how, dynamic, static)


@pytest.mark.parametrize("make", [mlp, images])
@torch.no_grad()
def test_later_calls_may_be_others(make):
    """Calibrated by calls of the whole, then called layer by layer, and the other way round."""
    x = randn(8, 16) if make is mlp else randn(8, 16, 8, 8)
    net = converted(make(), "static", x)
    assert type(net) is Int8Sequential and codes_passed(net, x) == 2
    assert torch.equal(net(x), one_by_one(net, x)) and torch.equal(net[3:](net[:3](x)), net(x))
    assert all(type(layer(x)) is torch.Tensor for layer in (net[0], net[:2], net[:-1]))
    h = net[0](x)
    assert h.min() < 0 and torch.equal(net[1](h), h.relu())
    assert torch.equal(nn.Sequential(*net)(x), net(x))

    other = prepare_(make())
    one_by_one(other, x)
    assert torch.equal(convert_(other)(x), net(x))


@torch.no_grad()
def test_a_receiver_that_was_calibrated_with_negative_numbers_still_gets_the_relu():
    x = randn(64, 16)
    net = mlp()
    expected = net(x)
    prepare_(net)(x)
    net[2](-3 * net[0](x))
    convert_(net)
    assert codes_passed(net, x) == 2 and net[2].input_zero_point.item() > -128
    assert (net(x) - expected).norm() <= 0.03 * expected.norm()
    for times in (1, 20):  # some numbers are then outside the range of the codes
        assert torch.equal(net(times * x), one_by_one(net, times * x))


@torch.no_grad()
def test_a_relu_before_or_after_a_pool_is_that_of_floats():
    x = randn(4, 16, 8, 8)
    for order in (nn.ReLU(), nn.MaxPool2d(2, padding=1)), (nn.MaxPool2d(2, padding=1), nn.ReLU()):
        net = prepare_(nn.Sequential(nn.Conv2d(16, 8, 3), *order, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()).eval())
        net(x)
        net[3](-randn(4, 8, 5, 5))
        convert_(net)
        assert codes_passed(net, x) == 1 and net[3].input_zero_point.item() > -128
        for times in (1, 3):
            assert torch.equal(net(times * x), one_by_one(net, times * x))


@pytest.mark.parametrize("make", [mlp, images])
@pytest.mark.parametrize("frozen", [(), (0,), (0, 1), (1, 2)])
def test_biases_get_their_gradients(make, frozen):
    x = randn(8, 16) if make is mlp else randn(8, 16, 8, 8)
    net = converted(make(), "static", x)
    biases = [layer.bias for layer in net if hasattr(layer, "bias")]
    for position in frozen:
        biases[position].requires_grad_(False)
    trained = [bias for bias in biases if bias.requires_grad]
    found, expected = (torch.autograd.grad(y.pow(3).sum(), trained) for y in (net(x), one_by_one(net, x)))
    assert len(found) == 3 - len(frozen) and all(map(torch.equal, found, expected))


# ------------------------------------------------------------------------------------------------------------- hooks
@pytest.mark.parametrize("position", range(7))
@torch.no_grad()
def test_hooks_see_floats(position):
    """As feature extractors and perceptual losses register them."""
    x = randn(4, 16, 8, 8)
    float_net = images()
    net = converted(copy.deepcopy(float_net), "static", x)
    expected, seen = net(x), {}
    for name, model in (("float", float_net), ("int8", net)):
        model[position].register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: (inputs[0], out)}))
        model(x)
    for found, wanted in zip(seen["int8"], seen["float"], strict=True):
        assert type(found) is torch.Tensor and (found - wanted).norm() <= 0.03 * wanted.norm()
    assert torch.equal(net(x), expected)
    net[position].register_forward_pre_hook(lambda _, inputs: (0 * inputs[0],))
    assert not torch.equal(net(x), expected)


@torch.no_grad()
def test_hooks_of_all_modules_and_forwards_of_objects_see_floats(monkeypatch):
    x = randn(4, 16)
    net = converted(mlp(), "static", x)
    expected, seen = net(x), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, _, out: seen.append((type(module), type(out))))
    assert torch.equal(net(x), expected)
    hook.remove()
    assert [kind for kind, _ in seen] == [Int8Linear, nn.ReLU, Int8Linear, nn.ReLU, Int8Linear, Int8Sequential]
    assert {out for _, out in seen} == {torch.Tensor}
    with FlopCounterMode(display=False):
        assert torch.equal(net(x), expected)
    with monkeypatch.context() as torch_without:
        torch_without.delattr(nn.modules.module, "_has_any_global_hook")
        assert codes_passed(net, x) == 0 and torch.equal(net(x), expected)
    original = net[1].forward
    net[1].forward = lambda x: seen.append(type(x)) or original(x)
    assert torch.equal(net(x), expected) and seen[-1] is torch.Tensor


# --------------------------------------------------------------------------------------------- it stays a Sequential
@torch.no_grad()
def test_it_stays_a_sequential(tmp_path):
    x = randn(4, 16)
    net = mlp()
    assert converted(net, "static", x) is net and isinstance(net, nn.Sequential)
    expected = net(x)
    saved = io.BytesIO()
    torch.save(net, saved)
    saved.seek(0)
    for same in (copy.deepcopy(net), torch.load(saved, weights_only=False), torch.compile(net, fullgraph=True)):
        assert torch.equal(same(x), expected)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), expected)
    assert torch.equal(checkpoint_sequential(net, 2, x, use_reentrant=False), expected)
    net[1] = nn.GELU()
    assert codes_passed(net, x) == 1 and torch.equal(net(x), one_by_one(net, x))
    net.append(nn.ReLU()).insert(0, nn.Identity())
    assert torch.equal(net(x), one_by_one(net, x))
    assert not any("output" in key for key in net.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@torch.no_grad()
def test_results_have_the_dtype_of_the_input(dtype):
    """Layers that are called one by one return it too."""
    x = randn(4, 16)
    net = converted(mlp(), "static", x).half()
    assert net(x.to(dtype)).dtype == one_by_one(net, x.to(dtype)).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16


@torch.no_grad()
def test_a_state_dict_with_scales_of_results():
    """Layers that pass codes used to hold a copy of the next layer's scale."""
    x = randn(4, 16)
    net, other = converted(mlp(), "static", x), converted(mlp(), "static", 2 * x)
    state = net.state_dict()
    state |= {f"{i}.output_{name}": state[f"{i + 2}.input_{name}"] for i in (0, 2) for name in ("scale", "zero_point")}
    other.load_state_dict(state)
    assert torch.equal(other(x), net(x))
