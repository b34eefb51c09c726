"""fp32 masters of 16-bit weights, as weight and remainder (csrc/formulas/remainder.h says which and why)."""

from __future__ import annotations

import torch
from torch import Tensor


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of an fp16 or bf16 weight and its int16 remainder; the weight itself where they do not fit."""
    fp32 = weight.float()
    if weight.dtype is torch.bfloat16:
        master = (fp32.view(torch.int32) + remainder).view(torch.float32)
    else:
        master = fp32 + remainder * _power_of_2(_exponent(fp32) - 26)
    back = master.to(weight.dtype).float()
    return torch.where(back.view(torch.int32) == fp32.view(torch.int32), master, fp32)


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`master` rounded to `dtype`, and the int16 remainder."""
    weight = master.to(dtype)
    fp32 = weight.float()
    if dtype is torch.bfloat16:
        remainder = (master.view(torch.int32) - fp32.view(torch.int32)).clamp(max=32767)
        remainder = torch.where(master.isnan(), 0, remainder)
    else:
        units = ((master - fp32) * _power_of_2(280 - _exponent(fp32))).clamp(-32767, 32767).round()
        remainder = torch.where(fp32.isfinite(), units, 0)
    return weight, remainder.to(torch.int16)


def _exponent(fp32: Tensor) -> Tensor:
    """That of fp16 numbers, biased as in fp32."""
    return (fp32.view(torch.int32) >> 23 & 0xFF).clamp(min=113)


def _power_of_2(biased_exponent: Tensor) -> Tensor:
    return (biased_exponent << 23).view(torch.float32)
