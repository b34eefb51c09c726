"""What time_memory trains: a tiny feed-forward network, a U-Net and a BERT-shaped encoder, and their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn

from ..demo.training import read_text
from .harness import Settings

FEED_FORWARD, U_NET, ENCODER = "feed-forward", "U-Net", "encoder"
TASKS = (FEED_FORWARD, U_NET, ENCODER)
MASKED, MASK = 0.15, 0  # BERT's share of masked tokens; a byte that no source file has
NOISE = 0.1  # its standard deviation, of pixels from 0 to 1
Batch = tuple[Tensor, Tensor]


# --------------------------------------------------------------------------------------------------------- the networks
class UNet(nn.Module):
    """Two convolutions on each level, halves the size and doubles the channels from one to the next, and back again."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in pairwise([3, *widths]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.across = nn.ModuleList(_convolutions(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The noise in an image [batch, 3, height, width]."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = self.across[level](torch.cat([self.up[level](x), kept[level]], 1))
        return self.last(x)


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Layer(nn.Module):
    """Attention and two linear layers, each added to its input and normed, as in BERT; 64 channels to a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT's layers over bytes, and a head that says what a masked byte was."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.norm(self.token(tokens) + self.position.weight)))


# ------------------------------------------------------------------------------------------------------------ the tasks
@dataclass(frozen=True)
class Task:
    """A network and its data; `draw` makes a batch for training or of what is held out."""

    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, bool], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    lr: float
    rounds: int

    def batches(self, seed: int, device: torch.device, is_held_out: bool = False) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            x, y = self.draw(generator, is_held_out)
            yield x.to(device), y.to(device)


@cache
def digits() -> Batch:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]


def some_digits(batch: int, generator: torch.Generator, is_held_out: bool) -> Batch:
    images, labels = digits()
    border = len(labels) * 4 // 5
    part = slice(border, None) if is_held_out else slice(border)
    picked = torch.randint(len(labels[part]), (batch,), generator=generator)
    return images[part][picked], labels[part][picked]


@cache
def photographs() -> Tensor:
    return torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images]).permute(0, 3, 1, 2)


def some_patches(batch: int, size: int, generator: torch.Generator, is_held_out: bool) -> Batch:
    """Noisy patches and their noise; the right fifth of both photographs is held out."""
    photos = photographs()
    border = photos.shape[3] * 4 // 5
    photos = photos[..., border:] if is_held_out else photos[..., :border]
    ends = (end - size + 1 for end in photos.shape[2:])
    tops, lefts = (torch.randint(end, (batch,), generator=generator).tolist() for end in ends)
    patches = [photos[k % 2, :, y : y + size, x : x + size] for k, (y, x) in enumerate(zip(tops, lefts, strict=True))]
    noise = NOISE * torch.randn(batch, 3, size, size, generator=generator)
    return torch.stack(patches) / 255 + noise, noise / NOISE


@cache
def text() -> Tensor:
    return read_text()


def some_text(batch: int, context: int, generator: torch.Generator, is_held_out: bool) -> Batch:
    """Bytes of which some are masked, and the bytes that are asked for (-100: not this one)."""
    border = len(text()) * 9 // 10
    source = text()[border:] if is_held_out else text()[:border]
    begin = torch.randint(len(source) - context, (batch, 1), generator=generator)
    tokens = source[begin + torch.arange(context)].long()
    masked = torch.rand(tokens.shape, generator=generator) < MASKED
    return tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, -100)


def cross_entropy(output: Tensor, expected: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), expected.flatten())


def squared_error(output: Tensor, expected: Tensor) -> Tensor:
    return F.mse_loss(output.float(), expected)


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def task(name: str, settings: Settings) -> Task:
    if name == FEED_FORWARD:
        rounds = settings.pick(cpu=300, cuda=300, quick=8)
        return Task(feed_forward, partial(some_digits, 64), cross_entropy, 1e-3, rounds)
    if name == U_NET:
        sizes = settings.pick(cpu=(16, 3, 8, 32, 200), cuda=(64, 4, 32, 128, 60), quick=(4, 2, 1, 16, 2))
        width, levels, batch, size, rounds = sizes
        return Task(partial(UNet, width, levels), partial(some_patches, batch, size), squared_error, 1e-3, rounds)
    sizes = settings.pick(cpu=(2, 512, 64, 4, 90), cuda=(12, 768, 128, 32, 60), quick=(1, 64, 16, 2, 2))
    layers, width, context, batch, rounds = sizes
    make, draw = partial(Encoder, layers, width, context), partial(some_text, batch, context)
    return Task(make, draw, cross_entropy, 3e-4, rounds)
