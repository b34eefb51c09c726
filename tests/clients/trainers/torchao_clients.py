"""torchao's quantized training: ours refuses its weights in a sentence, or trains them as torch's default does.

They are wrappers without memory of their own, which crashes whoever asks for their address.
"""

from __future__ import annotations

import pytest
import torch
from isolated import isolated
from torch import Tensor
from torchao.prototype import quantized_training
from torchao.quantization import quantize_
from training import Make, classifier, cross_entropy, ours, samples, torchs

from amp_kernels.optim import FusedRMSprop, FusedSGD

STEPS = 4
# Of a tensor's largest weight. Codes of int8 are rounded at random at each step, bf16 to the nearest: a step each.
TOLERANCES = {
    "int8_weight_only_quantized_training": STEPS / 127,
    "int8_mixed_precision_training": 1e-6,
    "bitnet_training": 1e-6,
}
ROUNDINGS = {torch.float32: 0.0, torch.bfloat16: STEPS * 2.0**-8}
WITHOUT_DECAY = {"weight_decay": 0}  # int8 weights have none under torch's either


def values(model: torch.nn.Module) -> list[Tensor]:
    """What the weights stand for, as copies that no step writes."""
    inside = [p.dequantize() if hasattr(p, "int_data") else getattr(p, "_data", p) for p in model.parameters()]
    return [value.detach().double() for value in inside]


def train(make: Make, weights: str, dtype: torch.dtype) -> list[Tensor] | str:
    """The weights after it, or why not."""
    torch.manual_seed(0)
    model = classifier().to(dtype)
    quantize_(model, getattr(quantized_training, weights)())
    before = values(model)
    try:
        optimizer = make(model.parameters())
        for _ in range(STEPS):
            cross_entropy(model, samples(dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except (RuntimeError, TypeError, ValueError) as error:
        assert all(map(torch.equal, before, values(model)))
        return str(error)
    return values(model)


@pytest.mark.parametrize(
    ("family", "dtype"), [(FusedSGD, torch.float32), (FusedRMSprop, torch.bfloat16)], ids=["sgd-fp32", "rmsprop-bf16"]
)
@pytest.mark.parametrize("weights", TOLERANCES)
@isolated
def test_says_no_or_trains(weights: str, family: type, dtype: torch.dtype) -> None:
    got = train(ours(family, **WITHOUT_DECAY), weights, dtype)
    if isinstance(got, str):
        assert got.startswith(family.__name__) and " must " in got and ", got " in got, got
        return
    want = train(torchs(family, **WITHOUT_DECAY), weights, dtype)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= (TOLERANCES[weights] + ROUNDINGS[dtype]) * b.abs().max().clamp(min=0.01)
