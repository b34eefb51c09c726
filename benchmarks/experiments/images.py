"""Small networks on scikit-learn's digits and photos, for the experiments that train them."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

PATCH = 8  # pixels; times 3 colours


class Halves(Protocol):
    """Images and labels for training and for the test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def cnn(has_norm: bool = True) -> nn.Sequential:
    """Two convolutions and a linear layer for [batch, 64]."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=not has_norm)
        return [convolution, *([nn.BatchNorm2d(outputs)] if has_norm else []), nn.ReLU()]

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *block(1, 16, 1), *block(16, 32, 2), nn.Flatten(), nn.Linear(32 * 16, 10)
    )


def in_16_bits(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Batch norms stay in fp32, as is usual."""
    model.to(dtype)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.float()
    return model


@torch.no_grad()
def evaluate(model: nn.Module, split: Halves, dtype: torch.dtype) -> tuple[float, float]:
    """Loss, and percent of the test images that are recognized."""
    model.eval()
    x, y = split.test
    predicted = model(x.to(dtype)).float()
    model.train()
    return F.cross_entropy(predicted, y).item(), 100 * (predicted.argmax(-1) == y).double().mean().item()


@functools.cache
def patches(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two photos that come with scikit-learn, cut into squares: [squares, 192], from 0 to 1."""

    def cut(image: Any) -> Tensor:
        pixels = torch.from_numpy(image.copy()).permute(2, 0, 1).to(device).float() / 255
        return pixels.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)

    first, second = (cut(image) for image in load_sample_images().images)
    return first, second
