"""int8 convolutions, transposed ones too, against their formulas, and the conversions of models with convolutions."""

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from int8_networks import codes_passed
from torch import nn

import amp_kernels
from amp_kernels import reference
from amp_kernels.nn import Int8Conv1d, Int8Conv2d, Int8ConvTranspose2d
from amp_kernels.nn.int8_sequential import Int8Sequential
from amp_kernels.quantization import convert_, prepare_, prepare_qat_, quantize_
from amp_kernels.testing.common import DTYPES, error_and_allowed, randn

MODES = ("weight_only", "dynamic", "static")
SCALE, ZERO_POINT = 0.0173, 11
# Arguments of a convolution, and the shape of its input.
CONVOLUTIONS = {
    "3x3": (lambda: nn.Conv2d(5, 7, 3, padding=1), (2, 5, 9, 8)),
    "strided": (lambda: nn.Conv2d(16, 6, (3, 2), (2, 3), (0, 2), (2, 1)), (3, 16, 12, 11)),
    "no_bias": (lambda: nn.Conv2d(4, 6, 1, bias=False), (2, 4, 5, 6)),
    "same": (lambda: nn.Conv2d(4, 6, (3, 2), padding="same", dilation=(1, 2)), (2, 4, 5, 6)),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 5, 6)),
    "one_image": (lambda: nn.Conv2d(5, 7, 3, padding=1), (5, 9, 8)),
    "no_images": (lambda: nn.Conv2d(5, 7, 3), (0, 5, 9, 8)),
    "line": (lambda: nn.Conv1d(5, 7, 3, 2, 1, 2), (2, 5, 20)),
    "one_line": (lambda: nn.Conv1d(5, 7, 4), (5, 20)),
    "up": (lambda: nn.ConvTranspose2d(5, 7, 2, 2), (2, 5, 9, 8)),
    "up_uneven": (lambda: nn.ConvTranspose2d(16, 6, (3, 2), (3, 2), bias=False), (3, 16, 4, 5)),
    "up_one_image": (lambda: nn.ConvTranspose2d(5, 7, 2, 2), (5, 9, 8)),
    "up_no_images": (lambda: nn.ConvTranspose2d(5, 7, 2, 2), (0, 5, 9, 8)),
}
KINDS = {  # the int8 layer, and torch's function
    nn.Conv1d: (Int8Conv1d, F.conv1d),
    nn.Conv2d: (Int8Conv2d, F.conv2d),
    nn.ConvTranspose2d: (Int8ConvTranspose2d, F.conv_transpose2d),
}


def is_up(original):
    return isinstance(original, nn.ConvTranspose2d)


def convolution(name, dtype=torch.float32, device="cpu"):
    make, shape = CONVOLUTIONS[name]
    layer = make()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=i + 1) / max(1, parameter[0].numel()) ** 0.5)
    return layer.to(device, dtype), randn(*shape, dtype=dtype).to(device)


def int8_layer(mode, layer):
    kind = KINDS[type(layer)][0]
    if mode != "static":
        return kind.from_conv(layer, mode)
    scale = torch.tensor([SCALE], device=layer.weight.device)
    return kind.from_conv(layer, mode, input_scale=scale, input_zero_point=torch.full_like(scale, ZERO_POINT).int())


def fake_inputs(layer, x):
    """x with the values of its codes, by the specification. In a dynamic layer each image has its own range.

    In a transposed one each pixel has its own.
    """
    if layer.mode == "static":
        given = {"scale": layer.input_scale, "zero_point": layer.input_zero_point}
        return reference.fake_quantize_int8(x.float(), **given)[0]
    batch = x if x.dim() == layer.weight.dim() else x.unsqueeze(0)
    dims = ranges(layer, batch)
    return reference.fake_quantize_int8(batch.float(), dim=dims, symmetric=False)[0].view_as(x)


def ranges(layer, batch):
    """The dimensions of a batch whose elements share a range in a dynamic layer."""
    is_transposed = isinstance(layer, Int8ConvTranspose2d)
    return (1,) if is_transposed else tuple(range(1, batch.dim()))


def convolved(layer, original, x, weight, bias):
    options = {"stride": original.stride, "padding": original.padding, "dilation": original.dilation}
    return KINDS[type(original)][1](x, weight, bias, **options)


@pytest.fixture(autouse=True)
def convolutions_in_fp32():
    """On a GPU torch's fp32 convolutions have 10 bits of each factor by default (TF32)."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_is_the_convolution_of_what_its_codes_stand_for(mode, name, dtype, device):
    original, x = convolution(name, DTYPES[dtype], device)
    layer = int8_layer(mode, original)
    y = layer(x)
    assert y.shape == original(x).shape and y.dtype == x.dtype
    assert layer.weight.shape == original.weight.shape and layer.weight.dtype == original.weight.dtype
    dims = [d for d in range(original.weight.dim()) if d != is_up(original)]
    weight = reference.fake_quantize_int8(original.weight.detach().float(), dim=dims)[0]
    assert torch.equal(layer.weight.float(), weight.to(x.dtype).float())
    values = None if original.bias is None else original.bias.detach()
    if mode == "weight_only" and not is_up(original):
        weight, inputs = weight.to(x.dtype), x
    elif mode == "weight_only":  # multiplies by codes, as Int8Linear
        inputs, values = x.float(), None if values is None else values.float()
    else:
        inputs = fake_inputs(layer, x)
        values = None if values is None else values.float()
    theirs = convolved(layer, original, inputs, weight, values)
    truth = convolved(layer, original, inputs.double(), weight.double(), None if values is None else values.double())
    error, allowed = error_and_allowed(y.detach().float(), theirs.to(x.dtype).float(), truth)
    assert error <= allowed


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_sums_are_exact(mode, device):
    """Codes into the operator: no rounding of a float convolution between."""
    original, x = convolution("3x3", device=device)
    layer = int8_layer(mode, original)
    images = x.permute(0, 2, 3, 1)
    if mode == "dynamic":
        values, scale, zero_point = reference.quantize_int8(images, dim=(1, 2, 3), symmetric=False)
    else:
        values, scale, zero_point = reference.quantize_int8(
            images, scale=layer.input_scale, zero_point=layer.input_zero_point
        )
    expected = reference.int8_conv2d(
        values, layer.weight_codes, scale, zero_point, layer.weight_scale, bias=original.bias.detach(), padding=(1, 1)
    )
    assert torch.equal(layer(x), expected.permute(0, 3, 1, 2))


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_sums_of_a_transposed_convolution_are_exact(mode, device):
    """Each tap of the kernel alone."""
    original, x = convolution("up_uneven", device=device)
    layer = int8_layer(mode, original)
    pixels = x.permute(0, 2, 3, 1).reshape(-1, 16)
    given = {"scale": layer.input_scale, "zero_point": layer.input_zero_point}
    given = {"dim": (-1,), "symmetric": False} if mode == "dynamic" else given
    values, scale, zero_point = reference.quantize_int8(pixels, **given)
    y = layer(x)
    for i, j in itertools.product(range(3), range(2)):
        weight, of_weight = layer.weight_codes[:, i, j].t(), layer.weight_scale.view(1, -1)
        expected = reference.int8_matmul(values, weight, scale, zero_point, of_weight, None)
        assert torch.equal(y[:, :, i::3, j::2], expected.view(3, 4, 5, 6).permute(0, 3, 1, 2))


@pytest.mark.parametrize("name", ["3x3", "up"])
@pytest.mark.parametrize("mode", MODES)
def test_memory_orders_of_the_input(mode, name, device):
    original, x = convolution(name, device=device)
    layer = int8_layer(mode, original)
    expected = layer(x.to(memory_format=torch.channels_last))
    assert expected.is_contiguous(memory_format=torch.channels_last) or (mode, name) == ("weight_only", "3x3")
    for view in (x, x.transpose(2, 3).contiguous().transpose(2, 3), torch.cat([x, x], 3)[..., : x.shape[3]]):
        torch.testing.assert_close(layer(view), expected, rtol=0, atol=0 if mode != "weight_only" else 1e-5)


@pytest.mark.parametrize("name", ["3x3", "up"])
def test_an_image_has_the_same_result_in_any_batch(name, device):
    original, x = convolution(name, device=device)
    layer, x = int8_layer("dynamic", original), torch.cat([x, 100 * x])
    assert torch.equal(layer(x)[:1], layer(x[:1])) and torch.equal(layer(x)[0], layer(x[0]))


@pytest.mark.parametrize("name", ["3x3", "strided", "line", "up"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_quantized_convolution(mode, name, device):
    original, x = convolution(name, device=device)
    layer = int8_layer(mode, original)
    leaf = (4 * x).requires_grad_()  # a static layer clamps some of these values
    y = layer(leaf)
    grad = randn(*y.shape, seed=9).to(device)
    y.backward(grad)
    weight = layer.weight.clone()
    other = (4 * x).requires_grad_()
    inputs = other
    if mode != "weight_only":
        options = {"dim": ranges(layer, x), "symmetric": False}
        if mode == "static":
            options = {"scale": layer.input_scale, "zero_point": layer.input_zero_point}
        inputs = amp_kernels.fake_quantize_int8(other, **options)
    convolved(layer, original, inputs, weight, None).backward(grad)
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-5, atol=1e-5)
    assert mode != "static" or (leaf.grad == 0).sum() > 10
    dims = [d for d in range(y.dim()) if d != 1]
    torch.testing.assert_close(layer.bias.grad, grad.sum(dims), rtol=1e-5, atol=1e-5)


STRIDED_PIXELS = {  # torch's gradients of the first two weights corrupt memory, if it gets the images as they are
    "image": (lambda: nn.Conv2d(2, 3, 1, (2, 1)), (4, 2, 64, 65)),
    "line": (lambda: nn.Conv1d(2, 3, 1, 2), (4, 2, 8000)),
    "uneven": (lambda: nn.Conv2d(3, 2, 1, (3, 2)), (2, 3, 8, 7)),
    "padded": (lambda: nn.Conv2d(3, 2, 1, 2, 1), (2, 3, 8, 7)),
}


@pytest.mark.parametrize("how", ["backward", "penalty", "torch.func"])
@pytest.mark.parametrize("name", STRIDED_PIXELS)
def test_gradients_of_a_kernel_of_one_pixel_with_a_stride(name, how, device):
    make, shape = STRIDED_PIXELS[name]
    torch.manual_seed(0)
    original, x = make().to(device), randn(*shape).to(device)
    layer = prepare_qat_(copy.deepcopy(original))

    def by_torch(weight, x):
        codes = amp_kernels.quantize_int8(weight.detach(), dim=list(range(1, weight.dim())))
        weight = weight.double() + (codes.dequantize() - weight.detach()).double()
        values = amp_kernels.quantize_int8(x.detach(), dim=list(range(1, x.dim())), symmetric=False).dequantize()
        return convolved(layer, original, x.double() + (values - x.detach()).double(), weight, None)

    def ours(weight, x):
        return torch.func.functional_call(layer, {"weight": weight}, (x,)) - layer.bias.view(-1, *[1] * (x.dim() - 2))

    def gradients(function):
        if how == "torch.func":
            return torch.func.grad(lambda w, x: function(w, x).pow(3).sum(), (0, 1))(original.weight.detach(), x)
        weight, leaf = original.weight.detach().clone().requires_grad_(), x.clone().requires_grad_()
        first = torch.autograd.grad(function(weight, leaf).pow(3).sum(), (weight, leaf), create_graph=how == "penalty")
        return first if how == "backward" else torch.autograd.grad(sum(g.square().sum() for g in first), (weight, leaf))

    for mine, wanted in zip(gradients(ours), gradients(by_torch), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize("how", ["backward", "torch.func"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STRIDED_PIXELS)
def test_gradients_of_an_int8_kernel_of_one_pixel_with_a_stride(name, mode, how, device):
    make, shape = STRIDED_PIXELS[name]
    torch.manual_seed(0)
    original, x = make().to(device), randn(*shape).to(device)
    layer = int8_layer(mode, copy.deepcopy(original))
    weight = layer.weight.double()

    def gradient(function, x):
        if how == "torch.func":
            return torch.func.grad(lambda x: function(x).sum())(x)
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]

    wanted = gradient(lambda x: convolved(layer, original, x, weight, None), x.double()).float()
    for _ in range(10):  # a write outside of memory does not fail each time
        mine = gradient(layer, x)
        inside = mine != 0 if mode == "static" else torch.ones_like(x, dtype=torch.bool)
        torch.testing.assert_close(mine[inside], wanted[inside], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["image", "line"])
def test_torch_gets_no_stride_of_a_kernel_of_one_pixel(name, monkeypatch):
    make, shape = STRIDED_PIXELS[name]
    layer, convolve, strides = int8_layer("weight_only", make()), F.conv2d, []
    monkeypatch.setattr(F, "conv2d", lambda *args, **steps: strides.append(steps["stride"]) or convolve(*args, **steps))
    layer(randn(*shape))
    assert strides == [(1, 1)]


@pytest.mark.parametrize("name", ["3x3", "up"])
def test_second_derivatives_and_transforms(name, device):
    """The truth is torch's convolution of fake-quantized values."""
    original, x = convolution(name, device=device)
    layer = int8_layer("dynamic", original)
    weight, bias = layer.weight.clone(), layer.bias.detach()

    def by_torch(x):
        inputs = amp_kernels.fake_quantize_int8(x, dim=ranges(layer, x), symmetric=False)
        return convolved(layer, original, inputs, weight, bias)

    def second(function):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    torch.testing.assert_close(second(layer), second(by_torch), rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.func.jvp(f, (x,), (torch.ones_like(x),)) for f in (layer, by_torch))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.vmap(layer)(x), torch.stack([layer(image) for image in x]), rtol=1e-5, atol=1e-5)


def test_a_layer_that_was_changed_after_it_was_made(device):
    original, x = convolution("3x3", device=device)
    layer = int8_layer("dynamic", original)
    layer.stride = (2, 2)
    assert torch.equal(layer(x), int8_layer("dynamic", original)(x)[:, :, ::2, ::2])
    gray = nn.Conv2d(3, 4, 3, device=device)
    gray.weight = nn.Parameter(gray.weight.sum(1, keepdim=True))
    image = randn(2, 1, 8, 8).to(device)
    expected = gray(image)
    for int8 in (quantize_(copy.deepcopy(gray), "dynamic"), convert_(prepare_qat_(copy.deepcopy(gray)))):
        assert (int8(image) - expected).abs().max() <= 0.02 * expected.abs().max()


def test_who_is_not_calibrated_is_told_how():
    with pytest.raises(ValueError, match="run some batches through the prepared model in training mode"):
        convert_(prepare_qat_(nn.Conv2d(3, 4, 3), "static"))


def test_codes_pass_from_layer_to_layer(device):
    first, x = convolution("3x3", device=device)
    second = nn.Conv2d(7, 4, 3, 2).to(device)
    one, two = int8_layer("static", first), int8_layer("static", second)
    both = Int8Sequential(one, two).eval()
    assert codes_passed(both, x) == 1
    assert torch.equal(both(x), two(one(x)))


def test_codes_pass_through_transposed_convolutions(device):
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, 2), nn.BatchNorm2d(6), nn.ReLU()]
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.MaxPool2d(3, 2), nn.ConvTranspose2d(6, 4, 3, 3), nn.Flatten(), nn.Linear(576, 5))
    model, x = model.eval().to(device), randn(4, 3, 5, 5).to(device)
    expected = model(x)
    prepare_(model)(x)
    int8 = convert_(model)
    assert codes_passed(int8, x) == 3
    y = int8(x)
    assert (y - expected).abs().max() <= 0.03 * expected.abs().max()
    # The same bits as if all layers passed numbers.
    for layer in int8:
        x = layer(x)
    assert torch.equal(x, y)


def test_output_size_is_checked(device):
    """U-Nets may ask for the size of an earlier result, which is odd if that was pooled."""
    original, x = convolution("up", device=device)
    expected, wrong = original(x), (19, 17)
    assert original(x, output_size=wrong).shape == (2, 7, 19, 17)
    layers = [prepare_(copy.deepcopy(original)), *(prepare_qat_(copy.deepcopy(original), m) for m in MODES[1:])]
    layers += [int8_layer(mode, original) for mode in MODES]
    for layer in layers:
        for size in ((18, 16), [18, 16], expected.shape):
            assert torch.equal(layer(x, output_size=size), layer(x))
        assert layer(x[0], output_size=expected.shape[1:]).shape == expected.shape[1:]
        for size in ((7, 18, 16), (2, 2, 2, 7, 18, 16), (18.0, 16.0)):  # as torch does
            with pytest.raises((TypeError, ValueError)):
                original(x, output_size=size)
            with pytest.raises(ValueError, match=r"output_size must be \(18, 16\)"):
                layer(x, output_size=size)
        with pytest.raises(
            ValueError, match=r"output_size must be \(18, 16\), the size of the input .* got \(19, 17\)"
        ):
            layer(x, output_size=wrong)


def test_products_of_a_transposed_convolution_are_over_channels():
    """A kernel may be larger than the longest sum of int8 products, as in decoders of vision transformers."""
    original = nn.ConvTranspose2d(32, 1, 64, 64)
    x = randn(1, 32, 2, 2)
    expected = original(x)
    for int8 in (quantize_(copy.deepcopy(original), "dynamic"), convert_(prepare_qat_(copy.deepcopy(original)))):
        assert (int8(x) - expected).norm() <= 0.02 * expected.norm()


def test_a_weight_that_a_convolution_shares_with_a_transposed_one():
    """As in an autoencoder. Their outputs are different dimensions of the weight, so each has codes of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.ConvTranspose2d(8, 3, 2, 2))
    model[1].weight, x = model[0].weight, randn(2, 3, 8, 8)
    expected = model(x)
    for int8 in (quantize_(copy.deepcopy(model), "dynamic"), convert_(prepare_qat_(copy.deepcopy(model)))):
        assert int8[0].weight_codes.shape == (8, 2, 2, 3) and int8[1].weight_codes.shape == (3, 2, 2, 8)
        assert (int8(x) - expected).norm() <= 0.03 * expected.norm()
    with pytest.raises(TypeError, match="weight must be the weight of another int8 layer of shape"):
        int8[1].weight = int8[0].weight
    two = nn.ModuleList([nn.ConvTranspose2d(8, 3, 2, 2), nn.ConvTranspose2d(8, 3, 2, 2)])
    two[1].weight = two[0].weight
    assert quantize_(two)[0].weight_codes is two[1].weight_codes


# ------------------------------------------------------------------------------------------------------- models
def network():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def up_network():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, (2, 3), (2, 3), bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 8, 2, 2),
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    with torch.no_grad():
        model[3].running_mean.normal_()
        model[3].running_var.uniform_(0.3, 3)
    return model


@pytest.mark.parametrize("mode", MODES)
def test_a_network_is_converted_and_saved(mode, backend, device, tmp_path):
    model, x = network().to(device), randn(4, 3, 12, 12).to(device)

    def made(model):
        if mode != "static":
            return quantize_(model, mode)
        prepare_(model)(x)
        return convert_(model)

    expected = model(x)
    converted = made(copy.deepcopy(model))
    kinds = [type(layer).__name__ for layer in converted]
    assert kinds[0] == kinds[2] == "Int8Conv2d" and kinds[4] == "Conv2d" and kinds[7] == "Int8Linear"
    y = converted(x)
    assert (y - expected).abs().max() <= 0.02 * expected.abs().max()
    if mode == "static":
        assert codes_passed(converted, x) == 1 and kinds[1] == "ReLU"
    saved = io.BytesIO()
    torch.save(converted.state_dict(), saved)
    saved.seek(0)
    other = network().to(device)
    with torch.no_grad():
        other[0].weight.zero_()
    other = made(other)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(other(x), y)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        network().to(device).load_state_dict(converted.state_dict())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_training_for_int8_of_transposed_convolutions_ends_in_the_same_bits(mode, dtype, backend, device):
    model, x = up_network().to(device, DTYPES[dtype]), randn(8, 3, 12, 12, dtype=DTYPES[dtype]).to(device)
    with torch.no_grad():
        model[5].weight[:, 2] = 0  # a channel without a range
    expected, weight, bias = model(x), model[2].weight, model[3].bias
    prepare_qat_(model, mode)
    assert type(model[3]) is not nn.BatchNorm2d and model[2].weight is weight and model[2].bias is bias
    model.train()(x).square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    trained = model.eval()(x)
    assert (trained - expected).norm() <= 0.03 * expected.norm()
    converted = convert_(model)
    assert [type(converted[i]) for i in (2, 5)] == [Int8ConvTranspose2d] * 2 and converted[2].mode == mode
    assert torch.equal(converted(x), trained)


def test_gradients_of_a_weight_in_training_are_those_of_torch(device):
    original, x = convolution("up", device=device)
    layer = prepare_qat_(copy.deepcopy(original))
    grad = randn(*original(x).shape, seed=9).to(device)
    layer(x).backward(grad)
    inputs = amp_kernels.fake_quantize_int8(x, dim=1, symmetric=False)
    original(inputs).backward(grad)
    torch.testing.assert_close(layer.weight.grad, original.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, original.bias.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_training_for_int8_ends_in_the_same_bits(mode, backend, device):
    model = prepare_qat_(network().to(device), mode).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    x = randn(8, 3, 12, 12).to(device)
    losses = []
    for _ in range(4):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = model.eval()(x)
    converted = convert_(model)
    assert type(converted[0]) is Int8Conv2d and converted[0].mode == mode
    assert torch.equal(converted(x), trained)


def test_observers_change_no_output(device):
    model, x = network().to(device), randn(4, 3, 12, 12).to(device)
    before = model(x)
    assert torch.equal(prepare_(model)(x), before)
    assert float(model[0].observer.high) == float(x.max()) and float(model[0].observer.low) == float(x.min())


def test_what_stays_in_floating_point_is_named(caplog):
    layers = {
        "grouped": nn.Conv2d(4, 4, 3, groups=2),
        "more_at_the_end_of_a_line": nn.Conv1d(4, 4, 4, padding="same", dilation=3),
        "converted_same": nn.Conv1d(4, 4, 4, padding="same", dilation=2),
        "reflected": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        "more_at_the_end": nn.Conv2d(4, 4, 2, padding="same"),
        "overlapping": nn.ConvTranspose2d(4, 4, 3),
        "with_gaps": nn.ConvTranspose2d(4, 4, 2, 3),
        "turned": nn.ConvTranspose2d(4, 4, (2, 3), (3, 2)),
        "cut": nn.ConvTranspose2d(4, 4, 2, 2, padding=1),
        "longer": nn.ConvTranspose2d(4, 4, 2, 2, output_padding=1),
        "dilated": nn.ConvTranspose2d(4, 4, 2, 2, dilation=2),
        "grouped_up": nn.ConvTranspose2d(4, 4, 2, 2, groups=2),
        "up_line": nn.ConvTranspose1d(4, 4, 2, 2),
        "volume": nn.Conv3d(4, 4, 3),
        "volume_up": nn.ConvTranspose3d(4, 4, 2, 2),
        "converted": nn.Conv2d(4, 4, 3),
        "converted_up": nn.ConvTranspose2d(4, 4, 2, 2),
        "converted_line": nn.Conv1d(4, 4, 2, 2),
    }
    reasons = {
        "grouped": "groups=2",
        "more_at_the_end_of_a_line": "kernel_size=(4,), padding='same'",
        "reflected": "padding_mode='reflect'",
        "more_at_the_end": "kernel_size=(2, 2), padding='same'",
        "overlapping": "kernel_size=(3, 3), stride=(1, 1)",
        "with_gaps": "kernel_size=(2, 2), stride=(3, 3)",
        "turned": "kernel_size=(2, 3), stride=(3, 2)",
        "cut": "padding=(1, 1)",
        "longer": "output_padding=(1, 1)",
        "dilated": "dilation=(2, 2)",
        "grouped_up": "groups=2",
    }
    model = nn.ModuleDict(layers)
    with caplog.at_level("INFO", "amp_kernels"):
        quantize_(model, "dynamic")
    (line,) = caplog.messages
    for name, layer in layers.items():
        reason = f" with {reasons[name]}" if name in reasons else ""
        is_left = f"{name}.weight of {type(layer).__name__}{reason} " in line
        assert is_left == (not name.startswith("converted")) and (type(model[name]) is type(layer)) == is_left
    assert caplog.records[0].levelname == "WARNING"


def test_a_shared_weight_stays_shared():
    one, two = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    two.weight = one.weight
    model = quantize_(nn.Sequential(one, two))
    assert model[0].weight_codes is model[1].weight_codes and model[0].weight_scale is model[1].weight_scale
    other = Int8Conv2d.from_conv(nn.Conv2d(4, 4, 3))
    other.weight = model[0].weight
    assert other.weight_codes is model[0].weight_codes


ROWS = amp_kernels.quantize_int8(torch.ones(4, 36), dim=-1)


@pytest.mark.parametrize("name", ["3x3", "up"])
def test_compiled_and_under_autocast(name, device):
    original, x = convolution(name, device=device)
    for mode in MODES:
        layer = int8_layer(mode, original)
        compiled = torch.compile(layer, fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0 if mode != "weight_only" else 1e-5)
        with torch.autocast(device.type, torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert layer.half().weight.dtype == torch.float16 and layer.weight_codes.dtype == torch.int8


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: Int8Conv2d(4, 4, 3)(torch.ones(2, 5, 6, 6)), ValueError, r"shape \(B, 4, H, W\) or \(4, H, W\), got"),
        (lambda: Int8Conv1d(4, 4, 3)(torch.ones(4)), ValueError, r"Int8Conv1d: x must have shape \(B, 4, L\)"),
        (lambda: Int8Conv2d(4, 4, 3, mode="fast"), ValueError, "Int8Conv2d: mode must be one of weight_only, dynamic"),
        (lambda: Int8Conv2d(4, 4, 2, padding="same"), ValueError, "padding must add as many pixels at the end"),
        (
            lambda: Int8Conv2d(32768, 1, 2, mode="static", device="meta"),
            ValueError,
            "in_channels times the size of the kernel must be at most 131071 with int8 activations, got 131072",
        ),
        (lambda: Int8Conv2d.from_conv(nn.Conv2d(4, 4, 3, groups=2)), ValueError, "must have groups=1 .* got groups=2"),
        (lambda: Int8Conv2d.from_conv(nn.Conv2d(4, 4, 3), "static"), ValueError, "input_zero_point must both"),
        (
            lambda: Int8ConvTranspose2d.from_conv(nn.ConvTranspose2d(4, 4, 2, 2, 1)),
            ValueError,
            r"conv must have a stride equal to the size of its kernel \(2, 2\), no padding, .* padding=\(1, 1\)",
        ),
        (
            lambda: Int8ConvTranspose2d(4, 4, 3)(torch.ones(2, 5, 6, 6)),
            ValueError,
            r"Int8ConvTranspose2d: x must have shape \(B, 4, H, W\) or \(4, H, W\), got \(2, 5, 6, 6\)",
        ),
        (
            lambda: Int8ConvTranspose2d(131072, 1, 2, mode="static", device="meta"),
            ValueError,
            "in_channels must be at most 131071 with int8 activations, got 131072",
        ),
        (
            lambda: Int8Conv2d.from_conv(nn.Conv2d(4, 4, 3), weight=ROWS),
            ValueError,
            r"must be what quantize_int8\(weight, dim=\(1, 2, 3\)\) returns for a weight of shape \(4, 3, 3, 4\)",
        ),
        (lambda: Int8Conv2d(4, 4, 3)([1]), TypeError, "Int8Conv2d: x must be a Tensor, got list"),
        (lambda: Int8ConvTranspose2d(4, 4, 3)([1]), TypeError, "Int8ConvTranspose2d: x must be a Tensor, got list"),
        *(
            (lambda kind=kind, ours=ours: ours.from_conv(kind(4, 3)), ValueError, "must have a shape, got an uninitial")
            for kind, ours in ((nn.LazyConv2d, Int8Conv2d), (nn.LazyConvTranspose2d, Int8ConvTranspose2d))
        ),
        (
            lambda: Int8Conv2d(4, 4, 3)(amp_kernels.quantize_int8(torch.ones(2, 4, 6, 6))),
            TypeError,
            "Int8Conv2d: x must be a Tensor if mode='weight_only', got an Int8Tensor",
        ),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", ["3x3", "line", "up"])
def test_training_checks_shapes_as_the_int8_layer(name, mode):
    original, x = convolution(name)
    layer = prepare_qat_(original, mode)
    for wrong in (x[:, :-1], x[0, 0], x.unsqueeze(0)):
        with pytest.raises(ValueError, match=rf"{type(layer).__name__}: x must have shape \(B, 5, .*L|W\) or \(5, "):
            layer(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_made_of_its_class_alone(kind):
    for other, (ours, _) in KINDS.items():
        if other is kind:
            assert type(ours.from_conv(prepare_(kind(4, 4, 1)))) is ours
            continue
        with pytest.raises(
            TypeError, match=rf"from_conv: conv must be a torch.nn.{other.__name__}, got {kind.__name__}"
        ):
            ours.from_conv(kind(4, 4, 1))


def test_steps_of_every_kind_reach_the_operator():
    """Each argument alone, so that none takes the place of another."""
    x = randn(1, 3, 13, 14)
    for stride, padding, dilation in itertools.product(((1, 1), (2, 3)), ((0, 0), (1, 4)), ((1, 1), (3, 2))):
        original = nn.Conv2d(3, 2, (2, 3), stride, padding, dilation)
        with torch.no_grad():
            ours, theirs = int8_layer("dynamic", original)(x), original(x)
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 0.03 * theirs.abs().max()
