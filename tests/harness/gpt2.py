"""A model of the form of transformers' GPT-2, with its `Conv1D`, from torch alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """A linear layer whose weight is [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.randn(nf) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"  # by which it is known


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.c_fc, self.c_proj = nn.LayerNorm(width), Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c_proj(nn.functional.gelu(self.c_fc(self.norm(x))))


class GPT2(nn.Module):
    """The embedding is the weight of the last layer too."""

    def __init__(self, tokens: int = 50, width: int = 32) -> None:
        super().__init__()
        self.wte = nn.Embedding(tokens, width)
        self.h = nn.ModuleList([Block(width), Block(width)])
        self.lm_head = nn.Linear(width, tokens, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.wte(index)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)
