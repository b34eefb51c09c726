"""Whole networks in int8: what is converted, what stays, how far results move, and that a checkpoint has the bits."""

import copy
import importlib
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_kernels.nn import Int8Conv2d, Int8Linear
from amp_kernels.quantization import convert_, prepare_, prepare_qat_, quantize_
from amp_kernels.testing import randn

pytest.importorskip("sklearn")  # the networks of the experiments import it
pytest.importorskip("amp_kernels.benchmarks.experiments", reason="a wheel has no experiments")
from amp_kernels.benchmarks.experiments.images import cnn
from amp_kernels.benchmarks.experiments.networks import UNet

MODES = ("weight_only", "dynamic", "static")


def converted(model, mode, x):
    if mode != "static":
        return quantize_(model, mode)
    prepare_(model)(x)
    return convert_(model)


def left(model):
    """The names of the weights in floating point with more than one dimension."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]


def batch_norms(model):
    """Return the model in eval mode, with random statistics in its batch norms."""
    torch.manual_seed(0)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.2)
            norm.running_var.uniform_(0.5, 2)
    return model.eval()


class Block(nn.Module):
    """A block of a ResNet."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def resnet():
    """ResNet-18 with an eighth of its channels."""
    torch.manual_seed(0)
    widths = (8, 16, 32, 64)
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks = [
        Block(widths[max(0, i - 1)] if j == 0 else width, width, 2 if i and j == 0 else 1)
        for i, width in enumerate(widths)
        for j in range(2)
    ]
    return batch_norms(nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)))


class Inverted(nn.Module):
    """A block of a MobileNetV2: the convolution in the middle is depthwise."""

    def __init__(self, width, wide):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return x + self.layers(x)


def mobilenet():
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    blocks = [Inverted(16, 64) for _ in range(3)]
    return batch_norms(nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)))


def unet():
    torch.manual_seed(0)
    return batch_norms(UNet(8, 3))


NETWORKS = {  # the network, the size of its images, and the weights that stay in floating point
    "ResNet": (resnet, 64, []),
    "MobileNet": (mobilenet, 32, [f"{i}.layers.3.weight" for i in (3, 4, 5)]),
    "U-Net": (unet, 32, ["up.0.weight", "up.1.weight"]),  # transposed convolutions
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network(name, mode, channels_last, caplog):
    make, size, stay = NETWORKS[name]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model, x = make().to(memory_format=layout), randn(4, 3, size, size).to(memory_format=layout)
    count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    with torch.no_grad(), caplog.at_level("INFO", "amp_kernels"):
        expected = model(x)
        int8 = converted(copy.deepcopy(model), mode, x)
        found = int8(x)
    assert left(int8) == stay
    # The norms of depthwise convolutions stay with them.
    kept = sum(isinstance(module, nn.BatchNorm2d) for module in int8.modules())
    assert kept == (3 if name == "MobileNet" else 0)
    assert f"folded {count - kept} of {count} batch norms into convolutions" in caplog.messages
    assert (found - expected).norm() <= 0.03 * expected.norm()
    saved = io.BytesIO()
    torch.save(int8.state_dict(), saved)
    saved.seek(0)
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
        other = converted(other, mode, x)
        other.load_state_dict(torch.load(saved, weights_only=True))
        assert torch.equal(other(x), found)


def test_a_cnn_that_reads_digits(caplog):
    """int8 throughout, within half a point of fp32, after training for int8 too."""
    digits = importlib.import_module("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:900], order[900:]

    def epoch(model, optimizer):
        for batch in train[torch.randperm(len(train))].split(64):
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def accuracy(model):
        return 100 * (model.eval()(x[test]).argmax(1) == y[test]).float().mean().item()

    torch.manual_seed(0)
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(8):
        epoch(model, optimizer)
    in_fp32 = accuracy(model)
    assert in_fp32 > 95
    for mode in MODES:
        caplog.clear()
        with caplog.at_level("INFO", "amp_kernels"), torch.no_grad():
            int8 = converted(copy.deepcopy(model), mode, x[train])
        assert left(int8) == []
        assert "converted 99.9% (*.weight 99.9%) of the parameters' bytes" in caplog.text
        assert accuracy(int8) >= in_fp32 - 0.5, mode
        layers = [module for module in int8 if isinstance(module, Int8Conv2d | Int8Linear)]
        passes = [layer.output_scale is not None for layer in layers]
        assert passes == ([True, True, False] if mode == "static" else [False] * 3)
    trained = prepare_qat_(model, "static").train()
    epoch(trained, torch.optim.AdamW(trained.parameters(), 3e-4))
    before = accuracy(trained)
    predictions = trained(x[test])
    assert torch.equal(convert_(trained)(x[test]), predictions) and before >= in_fp32 - 0.5
