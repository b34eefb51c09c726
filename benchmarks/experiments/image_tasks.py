"""What int8_images trains: a CNN that reads digits, and a U-Net that removes noise from photos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .digits import Split
from .harness import Settings
from .images import cnn
from .networks import NOISE, Batch, UNet, some_patches, squared_error

DIGITS, PHOTOS = "digits CNN", "U-Net"


@dataclass(frozen=True)
class Data:
    """What one seed trains, calibrates and tests with."""

    draw: Callable[[torch.Generator], Batch]
    calibration: Tensor
    test: Batch


@dataclass(frozen=True)
class Task:
    """A network, its data and the score of each image."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[int], Data]
    loss: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[[Tensor, Tensor], Tensor]  # higher is better, one for each image
    lr: float
    steps: int
    qat_steps: int
    images: int  # in the larger latency
    rounds: int

    def trained(self, model: nn.Module, data: Data, seed: int, steps: int, lr: float) -> nn.Module:
        """Train with a learning rate that falls to 2%."""
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
        model.train()
        for _ in range(steps):
            x, y = data.draw(generator)
            self.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return model.eval()


def by_pixels(x: Tensor) -> Tensor:
    """Photos in channels_last memory, where every contender reads them fastest."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def digits(calibrated: int, device: torch.device, seed: int) -> Data:
    split = Split(seed, device)
    x, y = split.train

    def draw(generator: torch.Generator) -> Batch:
        picked = torch.randint(len(y), (64,), generator=generator)
        return x[picked], y[picked]

    return Data(draw, x[:calibrated], split.test)


def photos(calibrated: int, tested: int, size: int, device: torch.device, seed: int) -> Data:
    """Training patches are smaller than the others, which saves time."""

    def patches(count: int, size: int, generator: torch.Generator, is_held_out: bool = False) -> Batch:
        noisy, noise = some_patches(count, size, generator, is_held_out)
        return by_pixels(noisy.to(device)), by_pixels(noise.to(device))

    held_out, of_training = (torch.Generator().manual_seed(1000 * k + seed) for k in (1, 2))
    calibration, _ = patches(calibrated, size, of_training)
    return Data(lambda generator: patches(16, size // 2, generator), calibration, patches(tested, size, held_out, True))


def recognized(output: Tensor, labels: Tensor) -> Tensor:
    """In percent: 0 or 100 for each image."""
    return 100 * (output.argmax(-1) == labels).double()


def psnr(output: Tensor, noise: Tensor) -> Tensor:
    """Of the photos without the noise that the network found, in dB."""
    return -10 * (NOISE**2 * (output - noise).double().square().mean((1, 2, 3))).log10()


def of_the_input(y: Tensor) -> float:
    """The score of an answer of zeros: 0 for digits, and the PSNR of the noisy photos for the U-Net."""
    return psnr(torch.zeros_like(y), y).mean().item() if y.dim() == 4 else 0.0


def tasks(settings: Settings) -> tuple[Task, Task]:
    pick, device = settings.pick, settings.device
    net = partial(UNet, *pick(cpu=(32, 3), cuda=(64, 3), quick=(4, 2)))
    calibrated, tested, size = pick(cpu=(32, 64, 64), cuda=(64, 128, 128), quick=(2, 2, 16))
    rounds = pick(cpu=15, cuda=50, quick=1)
    return (
        Task(
            DIGITS, cnn, partial(digits, pick(cpu=256, cuda=256, quick=16), device), F.cross_entropy, recognized,
            lr=3e-3, steps=pick(cpu=450, cuda=450, quick=2), qat_steps=pick(cpu=45, cuda=45, quick=1),
            images=pick(cpu=256, cuda=256, quick=2), rounds=4 * rounds,
        ),
        Task(
            PHOTOS, net, partial(photos, calibrated, tested, size, device), squared_error, psnr,
            lr=2e-3, steps=pick(cpu=120, cuda=600, quick=2), qat_steps=pick(cpu=12, cuda=60, quick=1),
            images=pick(cpu=16, cuda=16, quick=2), rounds=rounds,
        ),
    )  # fmt: skip
