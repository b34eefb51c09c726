"""onnxruntime runs what `export_onnx` writes: with our results, by integer kernels, and without transposes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from amp_kernels.benchmarks.experiments.images import cnn
from int8_networks import MODES, codes_passed, converted, mobilenet, resnet, unet
from torch import Tensor, nn

from amp_kernels.nn import Int8ConvTranspose2d
from amp_kernels.nn.int8 import Int8ProductLayer
from amp_kernels.quantization import convert_, export_onnx, prepare_, quantize_
from amp_kernels.testing.common import randn

# Operators that multiply integers, after onnxruntime has replaced what it can.
PRODUCTS = "QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger", "MatMulInteger"


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


class Session:
    """An exported model in onnxruntime."""

    def __init__(self, model: nn.Module, example: Tensor | tuple[Tensor, ...], folder: Path, **options: Any) -> None:
        self.path = folder / "model.onnx"
        export_onnx(model, example, self.path, **options)
        onnx.checker.check_model(self.path, full_check=True)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.log_severity_level = 1, 3
        settings.optimized_model_filepath = str(folder / "optimized.onnx")
        self.runtime = onnxruntime.InferenceSession(self.path, settings, providers=["CPUExecutionProvider"])
        self.exported, self.optimized = operators(self.path), operators(folder / "optimized.onnx")

    def __call__(self, *inputs: Tensor) -> Tensor:
        names = [given.name for given in self.runtime.get_inputs()]
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return torch.from_numpy(self.runtime.run(None, feed)[0])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()


def lines() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(8, 16, 3, 2, 2, 2), nn.ReLU(), nn.Conv1d(16, 16, 3, padding="same")).eval()


# A network, the shape of an input, and whether static layers pass codes. onnxruntime rounds their bias, so that some of
# these codes differ by 1.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "digits": (lambda: cnn().eval(), (64,), True),
    "ResNet": (resnet, (3, 64, 64), False),
    "MobileNet": (mobilenet, (3, 32, 32), False),
    "U-Net": (unet, (3, 32, 32), True),
    "MLP": (mlp, (64,), True),
    "MLP of sequences": (mlp, (7, 64), True),
    "encoder": (encoder, (16, 64), False),
    "lines": (lines, (8, 50), True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_network(name: str, mode: str, tmp_path: Path) -> None:
    make, shape, passes_codes = NETWORKS[name]
    x = randn(4, *shape)
    int8 = converted(make(), mode, x)
    session = Session(int8, x[:1], tmp_path)
    for batch in (x, x[:1], torch.cat([x, x[:3]])):
        found, expected = session(batch), int8(batch)
        assert found.shape == expected.shape
        # In the encoder, softmax and layer norms are rounded differently. A code of its dynamic layers may differ by 1.
        if (mode == "static" and passes_codes) or (mode == "dynamic" and name == "encoder"):
            assert (found - expected).norm() <= 0.01 * expected.norm()
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    layers = sum(isinstance(layer, Int8ProductLayer) for layer in int8.modules())
    assert sum(session.optimized[op] for op in PRODUCTS) == (0 if mode == "weight_only" else layers)
    if name != "encoder":  # attention transposes heads
        transposed = sum(isinstance(layer, Int8ConvTranspose2d) for layer in int8.modules())
        assert session.exported["Transpose"] == transposed


def identity(like: nn.Module) -> nn.Module:
    """A layer that returns its input: numbers that the codes of the layer before it stand for."""
    outputs = like.weight.shape[0]
    layer = nn.Linear(outputs, outputs, bias=False)
    if isinstance(like, nn.Conv2d):
        layer = nn.Conv2d(outputs, outputs, 1, bias=False)
    layer.weight.copy_(torch.eye(outputs).reshape(layer.weight.shape))
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@torch.no_grad()
def test_codes_that_a_layer_passes(kind: str, bias: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if kind == "linear":
        first, x = nn.Linear(256, 256, bias), randn(2048, 256)
    else:
        first, x = nn.Conv2d(16, 32, 3, 2, 1, bias=bias), randn(8, 16, 56, 56)
    int8 = converted(nn.Sequential(first, nn.ReLU(), identity(first)).eval(), "static", x)
    assert codes_passed(int8, x) == 1
    session = Session(int8, x, tmp_path)
    quantized = "QLinearConv" if kind == "convolution" else "QGemm" if bias else "QLinearMatMul"
    assert session.optimized[quantized] == session.optimized["QuantizeLinear"] == 1
    codes = ((session(x) - int8(x)) / int8[2].input_scale).round()
    # With a bias, 1 to 2 codes in 10,000 differ.
    assert codes.abs().max() <= 1 and codes.count_nonzero() <= (1e-3 if bias else 1e-5) * codes.numel()


@pytest.mark.parametrize("gamma", [1e-3, 1e-6, 1e-12, 0.0])
@pytest.mark.parametrize("kind", ["linear", "convolution", "transposed"])
@torch.no_grad()
def test_a_bias_beside_tiny_weights(kind: str, gamma: float, tmp_path: Path) -> None:
    """onnxruntime rounds it to an int32 without a check."""
    torch.manual_seed(0)
    if kind == "linear":
        layers, x = [nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)], 100 * randn(64, 32)
        layers[0].weight /= 100
        layers[0].weight[:8] *= gamma
        layers[0].bias.uniform_(0.1, 1)
    else:
        first = nn.Conv2d(8, 16, 3) if kind == "convolution" else nn.ConvTranspose2d(8, 16, 2, 2)
        layers, x = [first, nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)], randn(4, 8, 10, 10)
        layers[1].weight[:8] = gamma
        layers[1].bias.uniform_(0.1, 1)
    int8 = converted(nn.Sequential(*layers).eval(), "static", x)
    assert codes_passed(int8, x) == 1
    session = Session(int8, x, tmp_path)
    assert session.optimized["QGemm" if kind == "linear" else "QLinearConv"] == 1
    assert (session(x) - int8(x)).norm() <= 2e-3 * int8(x).norm()


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_attention_with_two_inputs_and_an_embedding(mode: str, tmp_path: Path) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.attention = nn.Embedding(50, 32), nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, index: Tensor, keys: Tensor) -> Tensor:
            result: Tensor = self.attention(self.table(index), keys, keys)[0]
            return result

    torch.manual_seed(0)
    inputs = torch.arange(24).view(4, 6), randn(4, 9, 32)
    model = Reads().eval()
    if mode == "static":
        prepare_(model)(*inputs)
        convert_(model)
    else:
        quantize_(model, mode)  # type: ignore[arg-type]
    session = Session(model, inputs, tmp_path)
    torch.testing.assert_close(session(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_autocast_changes_nothing(mode: str, tmp_path: Path) -> None:
    x = randn(4, 64)
    model = converted(mlp(), mode, x)
    with torch.autocast("cpu", torch.bfloat16):
        session = Session(model, x, tmp_path)
    assert (session(x) - model(x)).norm() <= (0.01 if mode == "static" else 1e-6) * model(x).norm()


@pytest.mark.parametrize("dynamic_batch", [True, False])
@torch.no_grad()
def test_arguments_of_any_structure(dynamic_batch: bool, tmp_path: Path) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, named: dict[str, Tensor], pair: list[Any], factor: int, *others: Any) -> Tensor:
            result: Tensor = self.layer(named["x"] + pair[0]) * factor + pair[1][0]
            return result + sum(other[0] for other in others)

    torch.manual_seed(0)
    model = quantize_(Reads(), "dynamic").eval()
    x, y, *others = (randn(4, n) for n in (16, 16, 8, 8, 8))

    def arguments(n: int) -> tuple[Any, ...]:
        return {"x": x[:n]}, [y[:n], (others[0][:n],)], 3, [others[1][:n]], (others[2][:n],)

    session = Session(model, arguments(1 if dynamic_batch else 4), tmp_path, dynamic_batch=dynamic_batch)
    assert {given.shape[0] for given in session.runtime.get_inputs()} == {"batch" if dynamic_batch else 4}
    torch.testing.assert_close(session(x, y, *others), model(*arguments(4)))


@pytest.mark.parametrize("how", ["around", "in place", "inside"])
@torch.no_grad()
def test_a_compiled_model(how: str, tmp_path: Path) -> None:
    model, x = quantize_(mlp(), "dynamic"), randn(4, 64)
    expected = model(x)
    if how == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
        model = model if how == "around" else nn.Sequential(model, nn.Identity()).eval()
    torch.testing.assert_close(Session(model, x, tmp_path)(x), expected)


@torch.no_grad()
def test_a_fixed_batch(tmp_path: Path) -> None:
    model, x = quantize_(mlp()), randn(1, 64)
    session = Session(model, x, tmp_path, dynamic_batch=False)
    assert session.runtime.get_inputs()[0].shape == [1, 64]
    torch.testing.assert_close(session(x), model(x))
    assert Session(model, x, tmp_path).runtime.get_inputs()[0].shape == ["batch", 64]


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_weights_are_uint8(mode: str, tmp_path: Path) -> None:
    x = randn(4, 512)
    model = converted(nn.Sequential(nn.Linear(512, 512, bias=False)).eval(), mode, x)
    session = Session(model, x, tmp_path)
    weights = {weight.name: weight.data_type for weight in onnx.load(session.path).graph.initializer}
    assert weights["0.weight_codes"] == onnx.TensorProto.UINT8
    assert session.path.stat().st_size < 1.2 * 512 * 512


@torch.no_grad()
def test_weights_in_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a model of more than 2 GB, which onnx cannot hold in one file."""
    monkeypatch.setattr(torch.onnx._internal.exporter._onnx_program, "_LARGE_MODEL_THRESHOLD", 1000)
    model, x = quantize_(mlp()), randn(4, 64)
    session = Session(model, x, tmp_path)
    assert (tmp_path / "model.onnx.data").exists()
    torch.testing.assert_close(session(x), model(x))


def test_a_model_for_one_batch_size_is_refused(tmp_path: Path) -> None:
    model = quantize_(nn.Sequential(nn.Linear(8, 3), nn.Flatten(0), nn.Unflatten(0, (6,)))).eval()
    with pytest.raises(RuntimeError, match="You marked batch as dynamic but your code specialized it"):
        export_onnx(model, torch.ones(2, 8), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="input of a convolution must have 4 dimensions"):
        export_onnx(quantize_(nn.Sequential(nn.Conv2d(3, 4, 3))).eval(), torch.ones(3, 8, 8), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
