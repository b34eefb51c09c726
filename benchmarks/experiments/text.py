"""The demo's task for the experiments: the source of Python's standard library, each byte from those before it."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from amp_kernels.quantization import int8_saved_activations

from ..demo.training import Size, Transformer, batches, read_text

EVALUATION = 20, 32  # batches of so many sequences


@functools.cache
def text(device: torch.device) -> tuple[Tensor, Tensor]:
    """For training and held out: the last tenth."""
    whole = read_text().to(device)
    border = len(whole) * 9 // 10
    return whole[:border], whole[border:]


def logits(model: Transformer, inputs: Tensor, recomputes: bool = False, saves_int8: bool = False) -> Tensor:
    """In fp32, of each byte after `inputs`."""
    with int8_saved_activations() if saves_int8 else nullcontext():
        x = model.token(inputs.long()) + model.position.weight
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        return model.head(model.norm(x)).float()


def loss(model: Transformer, batch: Tensor, recomputes: bool = False, saves_int8: bool = False) -> Tensor:
    return F.cross_entropy(
        logits(model, batch[:, :-1], recomputes, saves_int8).flatten(0, 1), batch[:, 1:].long().flatten()
    )


@torch.no_grad()
def evaluate(model: Transformer, context: int, device: torch.device) -> tuple[float, float]:
    """Loss, and percent of the bytes that are predicted, over the same held-out text whichever the model."""
    count, sequences = EVALUATION
    losses, hits = [], []
    for batch in islice(batches(text(device)[1], Size(0, 0, context, sequences), seed=0), count):
        predicted, target = logits(model, batch[:, :-1]), batch[:, 1:].long()
        losses.append(F.cross_entropy(predicted.flatten(0, 1), target.flatten()))
        hits.append((predicted.argmax(-1) == target).float().mean())
    return torch.stack(losses).mean().item(), 100 * torch.stack(hits).mean().item()
