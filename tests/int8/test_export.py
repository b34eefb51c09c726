"""Exported int8 models: torch.export keeps the bits, and what `export_onnx` writes computes the codes of the layers.

In tests/clients/trainers/onnx_clients.py onnxruntime runs the files. Here the stand-ins of `export_onnx` run, with the
ONNX operators written in torch.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from int8_networks import MODES, codes_passed, converted, mobilenet, resnet
from torch import nn

import amp_kernels
from amp_kernels.nn import Int8Conv2d, Int8Linear
from amp_kernels.quantization import export_onnx, onnx, prepare_, quantize_
from amp_kernels.testing.common import randn


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()


def chain():
    """A network whose static layers pass codes."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*first, nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()


# --------------------------------------------------------------------------------------------------- torch.export
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "shape"), [(chain, (3, 16, 16)), (encoder, (16, 64)), (resnet, (3, 32, 32))])
@torch.no_grad()
def test_torch_export_keeps_the_bits(make, shape, mode):
    x = randn(4, *shape)
    model = converted(make(), mode, x)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    for batch in (x, x[:3]):
        assert torch.equal(exported(batch), model(batch))


# ------------------------------------------------------------------------------------------------------ stand-ins
def by_torch(op, inputs, dtype, shape, *, axis=0, strides=(), pads=(), dilations=()):
    """An ONNX operator. Sums of integers are exact."""
    x, *others = inputs
    if op.endswith("Linear"):
        scale, zero_point = (side.reshape(-1, *[1] * (x.dim() - axis - 1)) if side.dim() else side for side in others)
        if op == "QuantizeLinear":
            result = (torch.round(x / scale) + zero_point).clamp(0, 255)
        else:
            result = (x.float() - zero_point.float()) * scale
    else:
        weight, x_zero_point, weight_zero_point = others
        x, weight = x.double() - (0 if x_zero_point is None else x_zero_point.double()), weight.double()
        weight = weight - weight_zero_point.double()
        if op == "MatMulInteger":
            result = x @ weight
        else:
            convolve = F.conv1d if x.dim() == 3 else F.conv2d
            result = convolve(x, weight, None, strides, pads[len(pads) // 2 :], dilations)
    assert result.shape == tuple(shape)
    return result.to(dtype)


@pytest.fixture
def run(monkeypatch):
    """Runs a model with stand-ins in the place of its int8 layers."""
    monkeypatch.setattr(onnx, "_onnx", by_torch)

    @torch.no_grad()
    def run(model, *arguments):
        with onnx._stand_ins(model) as stand_in:
            assert not any(isinstance(layer, Int8Linear | Int8Conv2d) for layer in stand_in.modules())
            return stand_in(*arguments)

    return run


LAYERS = {
    "rows": (lambda: nn.Linear(40, 9), (6, 40)),
    "batches of rows": (lambda: nn.Linear(40, 9, bias=False), (2, 3, 40)),
    "images": (lambda: nn.Conv2d(5, 7, 3, padding=1), (3, 5, 9, 8)),
    "steps": (lambda: nn.Conv2d(5, 7, (3, 2), (2, 1), (1, 2), (1, 3), bias=False), (3, 5, 9, 8)),
    "lines": (lambda: nn.Conv1d(5, 7, 3, 2, 2, 2), (3, 5, 20)),
    "blocks": (lambda: nn.ConvTranspose2d(5, 7, (2, 3), (2, 3)), (3, 5, 9, 8)),
    "blocks without a bias": (lambda: nn.ConvTranspose2d(5, 7, 2, 2, bias=False), (3, 5, 9, 8)),
}


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_returns_floats_has_the_bits(name, mode, run):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    x = randn(*shape) + 0.5  # zero points are not in the middle
    x[0] = 0
    x[1] = x[1].abs()
    layer = nn.Sequential(make())
    int8 = converted(layer.eval(), mode, x)
    if mode == "static":
        x *= 1.5  # beyond the range
    assert torch.equal(run(int8, x), int8(x))


def test_a_row_of_zeros():
    """Its scale is 1, because not every runtime turns NaN into the same integer."""
    layer = quantize_(nn.Linear(4, 2), "dynamic")
    codes = onnx._Linear(layer).codes_of(torch.zeros(1, 4))
    assert (codes.scale.item(), codes.zero_point.item(), codes.values.tolist()) == (1.0, 0.0, [[0] * 4])


@pytest.mark.parametrize("name", LAYERS)
def test_a_weight_only_layer(name, run):
    make, shape = LAYERS[name]
    layer, x = quantize_(make().eval()), randn(*shape)
    torch.testing.assert_close(run(layer, x), layer(x))


@pytest.mark.parametrize("make", [resnet, mobilenet])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_network(make, mode, run):
    x = randn(4, 3, 32, 32)
    int8 = converted(make(), mode, x)
    torch.testing.assert_close(run(int8, x), int8(x))


@torch.no_grad()
def test_codes_between_layers(run):
    """The last layer is the identity. Its results are numbers that the codes of the layer before it stand for."""
    torch.manual_seed(0)
    last = nn.Linear(8 * 49, 8 * 49, bias=False)
    last.weight.copy_(torch.eye(8 * 49))
    layers = [nn.Conv2d(16, 8, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.Flatten(), last]
    x = randn(64, 16, 14, 14)
    int8 = converted(nn.Sequential(*layers).eval(), "static", x)
    assert codes_passed(int8, x) == 1
    codes = ((run(int8, x) - int8(x)) / int8[-1].input_scale).round()
    # A tie may be rounded differently, because the product is one of floats here.
    assert codes.abs().max() <= 1 and codes.count_nonzero() <= 1e-4 * codes.numel()


PAIRS = {
    "rows": (lambda: nn.Linear(40, 8), lambda: nn.Linear(8, 3), (6, 40)),
    "images": (lambda: nn.Conv2d(5, 8, 3), lambda: nn.Conv2d(8, 3, 1), (3, 5, 9, 8)),
    "blocks": (lambda: nn.ConvTranspose2d(5, 8, 2, 2), lambda: nn.Conv2d(8, 3, 1), (3, 5, 9, 8)),
    "long sums": (lambda: nn.Linear(60000, 8), lambda: nn.Linear(8, 3), (2, 60000)),
}


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e-6, 1e-12, 1e-30, 0.0])
@pytest.mark.parametrize("name", PAIRS)
@torch.no_grad()
def test_a_bias_fits_in_the_sums(name, factor):
    """Runtimes round it to an int32 without a check. It is large where the weights of an output are tiny."""
    make, make_next, shape = PAIRS[name]
    torch.manual_seed(0)
    first = make()
    outputs = first.weight.transpose(0, 1) if name == "blocks" else first.weight
    outputs[:4] *= factor
    outputs[4] = outputs[4].abs().max()  # the largest codes
    first.bias.copy_(torch.tensor([0.3, -1, 0, 20, 2e4, -0.2, 0.1, 0]) / (1 if name == "long sums" else 20))
    x = randn(*shape)
    model = converted(nn.Sequential(first, make_next()).eval(), "static", x)
    assert codes_passed(model, x) == 1
    product = onnx._STAND_INS[type(model[0])](model[0])
    product.weight_codes, product.weight_scale = product.roomy_codes, product.roomy_scale
    codes = (product.weight_codes.movedim(product.axis, 0).flatten(1).double() - 128).abs().sum(1)
    step = product.input_scale.double() * product.weight_scale.double()
    bias = product.bias.double().repeat(product.repeats)
    assert (255 * codes + (bias / step).abs() < 2**31 - 1).all()
    # The scale of an output stays, or grows until the bias has 30 bits. Weights of 0 have no scale to keep.
    old = (model[0].input_scale.double() * model[0].weight_scale.double().flatten()).repeat(product.repeats)
    old[(codes == 0) & (bias != 0)] = 0
    assert (step <= 1.02 * old.maximum(bias.abs() / 2**30)).all()
    # Weights change only if the bias is much larger than what they add.
    change = (product.weight - model[0].weight).abs()
    change = (change.movedim(0, 1) if name == "blocks" else change).flatten(1).sum(1) * 255 * model[0].input_scale
    assert (change <= 1e-2 * model[0].bias.abs()).all()
    assert not change[5:].any()


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_attention_whose_queries_are_not_its_keys(mode, run):
    """Its layer for all three computes some of its outputs at a time."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, both):
            return self.attention(*both[:, :6].chunk(1), both[:, 6:], both[:, 6:])[0]

    torch.manual_seed(0)
    x = randn(3, 11, 32)
    model = converted(Attends().eval(), mode, x)
    torch.testing.assert_close(run(model, x), model(x))


@torch.no_grad()
def test_an_embedding(run):
    torch.manual_seed(0)
    model, index = quantize_(nn.Sequential(nn.Embedding(50, 16, max_norm=3.0))).eval(), torch.arange(12).view(2, 6)
    assert torch.equal(run(model, index), model(index))


@pytest.mark.parametrize("make", [*(make for make, _ in LAYERS.values()), lambda: nn.Embedding(50, 16)])
def test_models_may_read_weights(make):
    model = quantize_(nn.Sequential(make()))
    expected = model[0].weight.clone()
    with onnx._stand_ins(model) as stand_in:
        torch.testing.assert_close(stand_in[0].weight, expected)


@torch.no_grad()
def test_models_may_read_all_that_layers_have(run):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.up, self.head = nn.Embedding(9, 16, 3), nn.ConvTranspose2d(4, 2, 2, 2), nn.Linear(32, 5)

        def forward(self, index):
            x = self.table(index).to(next(self.parameters()).dtype) * (index != self.table.padding_idx)[:, None]
            x = F.conv_transpose2d(x.view(-1, 4, 2, 2), self.up.weight, self.up.bias, self.up.stride)
            return self.head(x.flatten(1)).view(-1, self.head.out_features)

    torch.manual_seed(0)
    model, index = quantize_(Reads()).eval(), torch.arange(9)
    torch.testing.assert_close(run(model, index), model(index))
    with onnx._stand_ins(model) as stand_in:
        assert [name for name, _ in stand_in.named_parameters()] == ["up.bias", "head.bias"]
        with pytest.raises(AttributeError, match="nothing"):
            stand_in.head.nothing  # noqa: B018


@torch.no_grad()
def test_another_output_size_is_refused(run):
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 2, 2, 2)

        def forward(self, x, size):
            return self.up(x, output_size=size)

    model, x = quantize_(Up(), "dynamic"), randn(2, 3, 5, 4)
    assert torch.equal(run(model, x, (10, 8)), model(x, (10, 8)))
    with pytest.raises(ValueError, match=r"output_size must be \(10, 8\), .* got \(11, 8\)"):
        run(model, x, (11, 8))


def test_the_weight_of_a_conv1d_of_transformers():
    layer = Int8Linear.from_linear(nn.Linear(6, 4))
    layer.is_transposed = True
    with onnx._stand_ins(layer) as stand_in:
        torch.testing.assert_close(stand_in.weight, layer.weight.clone())


@torch.no_grad()
def test_the_graph_has_integer_products_and_no_permutation():
    x = randn(2, 3, 32, 32)
    with onnx._stand_ins(converted(resnet(), "static", x)) as stand_in:
        graph = torch.export.export(stand_in, (x,)).graph
    ops = [argument for node in graph.nodes for argument in node.args if isinstance(argument, str)]
    assert (ops.count("ConvInteger"), ops.count("MatMulInteger")) == (20, 1)
    assert not any("permute" in str(node.target) or "transpose" in str(node.target) for node in graph.nodes)


def test_layers_return_after_an_error():
    model = quantize_(nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4)))
    layers = list(model)
    with pytest.raises(ZeroDivisionError), onnx._stand_ins(model):
        assert not set(layers) & set(model)
        raise ZeroDivisionError
    assert list(model) == layers


def test_layers_return_after_an_error_half_way(monkeypatch):
    exchange, calls = onnx.exchange, []

    def fails_once(*arguments):
        exchange(*arguments)
        calls.append(arguments)
        if len(calls) == 1:
            raise ZeroDivisionError

    monkeypatch.setattr(onnx, "exchange", fails_once)
    layers = [Int8Linear(4, 4), Int8Linear(4, 4)]
    model = nn.Sequential(*layers)
    with pytest.raises(ZeroDivisionError), onnx._stand_ins(model):
        pass
    assert list(model) == layers


# --------------------------------------------------------------------------------------------------------- errors
X = torch.ones(2, 16)


def model(mode="weight_only"):
    return quantize_(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), mode).eval()


def hooked():
    made = model()
    made[0].register_forward_hook(lambda *_: None)
    return made


def beyond_int8(zero_point):
    made = converted(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)).eval(), "static", X)
    made[0].input_zero_point.fill_(zero_point)
    return made


def half_in_training():
    made = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5))
    made = quantize_(made).eval()
    made[1].train()
    return made


class Inherits(Int8Linear):
    pass


def too_long():
    return nn.Sequential(Int8Linear(66312, 1, mode="dynamic")).eval()


REFUSED = {
    "no module": (lambda: "model", X, TypeError, "model must be an nn.Module, got str"),
    "float": (
        lambda: nn.Linear(16, 8).eval(), X, ValueError,
        "model must have int8 layers, got Linear without any; call quantize_, or prepare_ and convert_",
    ),
    "prepared": (
        lambda: prepare_(nn.Sequential(nn.Linear(16, 8))).eval(), X, ValueError,
        "model must be converted, got the prepared layer '0'; call convert_",
    ),
    "in training": (
        lambda: model().train(), X, ValueError, "model must be in eval mode, got training mode; call model.eval()",
    ),
    "no tensor": (model, (3,), ValueError, r"example must be a tensor or a tuple with a tensor, got \(3,\)"),
    "bf16 model": (
        lambda: model().bfloat16(), X, TypeError,
        r"model and example must be float32, got torch.bfloat16; call .float\(\) on both",
    ),
    "fp16 example": (model, X.half(), TypeError, "model and example must be float32, got torch.float16"),
    "fp16 in a list": (model, ({"x": [X.half()]},), TypeError, "model and example must be float32, got torch.float16"),
    "a list": (
        model, [X], TypeError,
        "example must be a tensor or a tuple, got a list; if model takes a list, pass a tuple with it",
    ),
    "two arguments": (
        model, (X, X), TypeError,
        "example must have the arguments of Sequential.forward, got 2 of them: too many positional arguments",
    ),
    "another device": (
        lambda: model().to("meta"), X, ValueError,
        r"model and example must be on the CPU, got meta; call .cpu\(\) on both",
    ),
    "example on another device": (
        model, ([X, X.to("meta")],), ValueError, "model and example must be on the CPU, got meta",
    ),
    "a layer in training": (
        half_in_training, X, ValueError,
        r"model must be in eval mode, got '1' in training mode; call model.eval\(\)",
    ),
    "zero point of inputs": (
        lambda: beyond_int8(300), X, ValueError,
        "input_zero_point of '0' must be from -128 to 127, .* got 300",
    ),
    "hooks": (hooked, X, ValueError, "'0' must have no hooks, since the file would lose them"),
    "a subclass": (
        lambda: nn.Sequential(Inherits(4, 4)).eval(), X, TypeError,
        "'0' must be one of Int8Linear, Int8Conv1d, .*, Int8Embedding, got Inherits; leave it in float",
    ),
    "long sums": (
        too_long, torch.ones(1, 66312), ValueError,
        "the outputs of '0' must sum at most 66311 products, since runtimes sum in int32, got 66312; convert the model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, tmp_path):
    make, example, error, message = REFUSED[name]
    with pytest.raises(error, match=f"^export_onnx: {message}"):
        export_onnx(make(), example, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"export_onnx: the folder of path must exist, got '.*no/model.onnx'"):
        export_onnx(model(), X, tmp_path / "no" / "model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_packages_that_are_missing(package, tmp_path, monkeypatch):
    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None if name == package else amp_kernels)
    with pytest.raises(ImportError, match=rf"{package} must be installed; run pip install 'amp-kernels\[onnx\]'"):
        export_onnx(model(), X, tmp_path / "model.onnx")


def test_a_layer_that_is_no_child(tmp_path, monkeypatch):
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Int8Linear(16, 8, mode="dynamic")
            self.layers = {self.layer}

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, amp_kernels)
    model = Hides().eval()
    with pytest.raises(
        ValueError, match=r"^export_onnx: model must call only .*, got a call of amp_kernels\..*by another"
    ):
        export_onnx(model, X, tmp_path / "model.onnx")
    assert isinstance(model.layer, Int8Linear)


@torch.no_grad()
def test_images_without_a_batch(run):
    with pytest.raises(ValueError, match="input of a convolution must have 4 dimensions, the first for the batch, got"):
        run(quantize_(nn.Conv2d(3, 4, 3)), torch.ones(3, 8, 8))
