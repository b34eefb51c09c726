"""fp32 masters split into a 16-bit weight and an int16 remainder; csrc/formulas/remainder.h explains the format."""

from __future__ import annotations

import torch
from torch import Tensor


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master of an fp16 or bf16 weight and its remainder.

    The master must round to the weight. If it does not, other code has written the weight. The weight is then returned,
    in fp32.
    """
    fp32 = weight.float()
    if weight.dtype is torch.bfloat16:
        master = (fp32.view(torch.int32) + remainder).view(torch.float32)
    else:
        # The unit of the remainder is 2^(E - 26), where E is the exponent of the weight. fp16 has 10 bits after the
        # leading one, and the remainder adds 16.
        master = fp32 + remainder * _power_of_2(_exponent(fp32) - 26)
    back = master.to(weight.dtype).float()
    return torch.where(back.view(torch.int32) == fp32.view(torch.int32), master, fp32)


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `master` rounded to `dtype`, and the remainder."""
    weight = master.to(dtype)
    fp32 = weight.float()
    if dtype is torch.bfloat16:
        remainder = (master.view(torch.int32) - fp32.view(torch.int32)).clamp(max=32767)
        remainder = torch.where(master.isnan(), 0, remainder)
    else:
        # Multiplies by 2^(26 - E), to divide by the unit, 2^(E - 26). `_exponent` returns e = E + 127. The biased
        # exponent of 2^(26 - E) is 26 - E + 127, which is 280 - e.
        units = ((master - fp32) * _power_of_2(280 - _exponent(fp32))).clamp(-32767, 32767).round()
        remainder = torch.where(fp32.isfinite(), units, 0)
    return weight, remainder.to(torch.int16)


def count_lost(master: Tensor, new: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the masters that an update changes, and the changes that are lost if they are added to the weights alone.

    `master` are the fp32 masters before the update, `new` those after it. The weights are masters, rounded to `dtype`.
    A master that was NaN before is not counted. A change is lost if the weight plus the change, rounded to `dtype`, is
    the weight. The result is int64 ``[2]``.
    """
    weight = master.to(dtype)
    changed = (new != master) & ~master.isnan()
    is_lost = changed & ((weight.float() + (new - master)).to(dtype) == weight)
    return torch.stack([changed.sum(), is_lost.sum()])


def _exponent(fp32: Tensor) -> Tensor:
    """Return the exponents of fp16 numbers plus 127, the bias of fp32.

    A subnormal number has the exponent of the smallest normal number.
    """
    return (fp32.view(torch.int32) >> 23 & 0xFF).clamp(min=113)


def _power_of_2(biased_exponent: Tensor) -> Tensor:
    return (biased_exponent << 23).view(torch.float32)
