"""What we and others make of the encoder: 16 bits, int8 weights, int8 products."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import torch
from torch import nn

from amp_kernels.nn import convert_linear_
from amp_kernels.quantization import convert_, prepare_, quantize_

from .encoder import embed, pairs, pretrained, tokens
from .peers import first_line

FP32, TORCH_AO = "fp32", "dynamic, torch.ao"
WEIGHT_ONLY, DYNAMIC, STATIC = OURS = "weight-only, ours", "dynamic, ours", "static, ours"


def static(model: nn.Module, calibrated: int, longest: int, device: torch.device) -> nn.Module:
    """With the ranges of the first `calibrated` training pairs."""
    prepare_(model)
    training = pairs()[0][:calibrated]
    for texts in (training.queries, training.documents):
        embed(model, texts, longest, device)
    return convert_(model)


def by_torch_ao(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def by_torchao(model: nn.Module, config: str) -> nn.Module:
    import torchao.quantization

    torchao.quantization.quantize_(model, getattr(torchao.quantization, config)())
    return model


def by_bitsandbytes(model: nn.Module, device: torch.device) -> nn.Module:
    """LLM.int8: rows of weights and of inputs in int8."""
    import bitsandbytes

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                new = bitsandbytes.nn.Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False)
                new.load_state_dict(layer.state_dict())
                setattr(parent, name, new)
    return model.to(device)  # which quantizes


def by_flashoptim(model: nn.Module) -> nn.Module:
    import flashoptim

    others = [name for name in dir(flashoptim) if "quant" in name.lower() or "int8" in name.lower()]
    assert not others, f"flashoptim quantizes models now, see {others}"
    raise NotImplementedError("flashoptim has optimizers and a cast of models to 16 bits, no int8 layers")


def makers(calibrated: int, longest: int, device: torch.device) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What each does to the fp32 encoder."""
    return {
        FP32: lambda model: model,
        "fp16, ours": lambda model: convert_linear_(model.half()),
        WEIGHT_ONLY: lambda model: quantize_(model, "weight_only"),
        DYNAMIC: lambda model: quantize_(model, "dynamic"),
        STATIC: lambda model: static(model, calibrated, longest, device),
        TORCH_AO: by_torch_ao,
        "weight-only, torchao": lambda model: by_torchao(model, "Int8WeightOnlyConfig"),
        "dynamic, torchao": lambda model: by_torchao(model, "Int8DynamicActivationInt8WeightConfig"),
        "dynamic, bitsandbytes": lambda model: by_bitsandbytes(model, device),
        "dynamic, flashoptim": by_flashoptim,
    }


@torch.no_grad()
def make(name: str, calibrated: int, longest: int, device: torch.device) -> nn.Module | str:
    """The contender, or why there is none: what it raised when it was made or first called."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peers: what they deprecate
            model = makers(calibrated, longest, device)[name](pretrained(device))
            for texts in (pairs()[0].queries[:1], pairs()[0].documents[:2]):  # few rows are what GPUs' products refuse
                model(tokens(texts, longest, device))
        return model
    except Exception as error:  # whatever a peer raises is its reason
        return first_line(error)


def file_bytes(model: nn.Module) -> int:
    """Of the saved state dict: tensors of torch.ao and torchao do not tell their own bytes."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()
