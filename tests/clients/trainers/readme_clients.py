"""The recipes of docs and README run as they are there, and train as torch's default optimizer and clipping would."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from lightning.pytorch import LightningModule
from pages import DOCS, README, Block, blocks
from torch.utils.data import DataLoader
from training import MIXED, OnMasters, assert_close, weights
from transformers import BertConfig, BertForSequenceClassification, set_seed

OURS = "from amp_kernels.optim import FusedSGD"
BLOCKS = [block for page in (README, *DOCS) for block in blocks(page) if block.needs == "clients"]
RECIPES = [block for block in BLOCKS if OURS in block.code]
TRAINERS = ["transformers", "accelerate", "lightning"]


def by_hand(params: Any, *, max_grad_norm: float | None = None, **options: Any) -> torch.optim.Optimizer:
    make = functools.partial(torch.optim.SGD, foreach=False, **options)
    return OnMasters(make, params, max_grad_norm)


def run(recipe: Block) -> dict[str, torch.Tensor]:
    """The recipe's `model` after it, which begins with weights of which the first step is clipped."""
    AcceleratorState._reset_state(reset_partial_state=True)
    set_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**small, intermediate_size=64, max_position_embeddings=16))
    torch.nn.init.normal_(model.classifier.weight)
    rows = torch.randint(1, 64, (64, 8))
    dataset = [{"input_ids": row, "labels": row[0] % 2} for row in rows]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch).loss

    names = {"model": model, "dataset": dataset, "loader": DataLoader(dataset, batch_size=8), "Module": Module}
    before = weights(model)
    recipe.run({"__name__": "readme", "by_hand": by_hand, **names})
    after = weights(model)
    assert all(not torch.equal(before[name], after[name]) for name in before if "key.bias" not in name)
    return after


def test_there_is_one_for_each_trainer() -> None:
    found = [trainer for trainer in TRAINERS for recipe in RECIPES if f"from {trainer} import" in recipe.code]
    assert set(found) == set(TRAINERS) and len(found) == len(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe(recipe: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    want = run(recipe._replace(code=recipe.code.replace(OURS, "FusedSGD = by_hand")))
    assert_close(run(recipe), want, MIXED)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b not in RECIPES], ids=lambda block: block.name)
def test_block_without_training(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block.run({"__name__": "readme"})
