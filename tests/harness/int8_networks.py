"""Networks for tests of int8 layers: a ResNet, a MobileNet and a U-Net, with few channels and random weights."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_kernels.nn.int8 import Int8ProductLayer
from amp_kernels.quantization import convert_, prepare_, quantize_

MODES = ("weight_only", "dynamic", "static")


def converted(model, mode, x):
    if mode != "static":
        return quantize_(model, mode)
    prepare_(model)(x)
    return convert_(model)


class _Quantizations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func) == "amp_kernels.quantize_int8.default"
        return func(*args, **kwargs or {})


@torch.no_grad()
def codes_passed(model, x):
    """Return how many int8 layers get codes from the layer before. The others quantize their inputs."""
    with _Quantizations() as quantizations:
        model(x)
    return sum(isinstance(layer, Int8ProductLayer) for layer in model.modules()) - quantizations.count


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
    from amp_kernels.benchmarks.experiments.networks import UNet  # the module imports scikit-learn

    torch.manual_seed(0)
    return batch_norms(UNet(8, 3))
