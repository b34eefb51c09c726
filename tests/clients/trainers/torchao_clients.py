"""torchao's quantized training: ours refuses its weights in a sentence, or trains them as torch's default does.

They are wrappers without memory of their own, which crashes whoever asks for their address: each runs in a process of
its own, this file.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from training import Make, classifier, cross_entropy, ours, samples, torchs

from amp_kernels import optim

STEPS = 4
# Of a tensor's largest weight. Codes of int8 are rounded at random at each step, bf16 to the nearest: a step each.
TOLERANCES = {
    "int8_weight_only_quantized_training": STEPS / 127,
    "int8_mixed_precision_training": 1e-6,
    "bitnet_training": 1e-6,
}
ROUNDINGS = {"float32": 0.0, "bfloat16": STEPS * 2.0**-8}


@pytest.mark.parametrize(("name", "dtype"), [("FusedSGD", "float32"), ("FusedRMSprop", "bfloat16")])
@pytest.mark.parametrize("weights", TOLERANCES)
def test_says_no_or_trains(weights: str, name: str, dtype: str) -> None:
    command = [sys.executable, __file__, weights, name, dtype]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    said = result.stdout.splitlines()[-1]
    assert said == "as torch" or (said.startswith(name) and " must " in said and ", got " in said), said


def values(model: torch.nn.Module) -> list[Tensor]:
    """What the weights stand for, as copies that no step writes."""
    inside = [p.dequantize() if hasattr(p, "int_data") else getattr(p, "_data", p) for p in model.parameters()]
    return [value.detach().double() for value in inside]


def train(make: Make, weights: str, dtype: torch.dtype) -> list[Tensor] | str:
    """The weights after it, or why not."""
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

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


def main(weights: str, name: str, dtype: str) -> None:
    family, tolerance = getattr(optim, name), TOLERANCES[weights] + ROUNDINGS[dtype]
    options = {"weight_decay": 0}  # which int8 weights do not have, nor under torch's
    got = train(ours(family, **options), weights, getattr(torch, dtype))
    if not isinstance(got, str):
        want = train(torchs(family, **options), weights, getattr(torch, dtype))
        assert not isinstance(want, str)
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=0.01)
    print(got if isinstance(got, str) else "as torch")


if __name__ == "__main__":
    main(*sys.argv[1:])
