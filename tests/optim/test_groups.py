"""Parameter groups made for a model, against groups by hand. Options that differ between groups of one optimizer."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from amp_kernels.optim import FusedAdamW, FusedSGD, param_groups

LR, DECAY = 0.1, 0.01


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm((4, 2)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x.unflatten(-1, (4, 2))).flatten(-2))


class Encoder(nn.Module):
    """A table and a position before three blocks, a norm and two heads after them. The first head is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(16, 8), nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.heads = nn.RMSNorm(8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        self.heads[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.heads(self.norm(x))


def by_name(groups: list[dict]) -> dict[str, tuple[float, float]]:
    return {name: (group["lr"], group["weight_decay"]) for group in groups for name, _ in group["params"]}


def test_decay_is_for_matrices_and_no_norm() -> None:
    """One weight of a norm has two dimensions."""
    model = Encoder()
    found = by_name(param_groups(model, LR, weight_decay=DECAY))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == trained and not any(name.startswith("heads.0") for name in trained)
    decayed = {name for name, (_, decay) in found.items() if decay == DECAY}
    assert decayed == {"table.weight", "position", "heads.1.weight", *(f"blocks.{i}.linear.weight" for i in range(3))}
    assert {decay for _, decay in found.values()} == {0, DECAY} and {lr for lr, _ in found.values()} == {LR}
    fewer = by_name(param_groups(model, LR, weight_decay=DECAY, no_decay=["position", "table.*"]))
    assert decayed - {name for name, (_, decay) in fewer.items() if decay == DECAY} == {"position", "table.weight"}


def test_layers_are_those_of_the_longest_list() -> None:
    found = by_name(param_groups(Encoder(), LR, layer_decay=0.5))
    for name, (lr, _) in found.items():
        parts = name.split(".")
        layer = 0 if parts[0] in ("table", "position") else int(parts[1]) + 1 if parts[0] == "blocks" else 4
        assert lr == LR * 0.5 ** (4 - layer), name
    layers = by_name(param_groups(Encoder(), LR, layer_decay=0.5, layer_of=lambda name: 2 * name.startswith("heads")))
    assert {lr for name, (lr, _) in layers.items() if name.startswith("heads")} == {LR}
    assert {lr for name, (lr, _) in layers.items() if not name.startswith("heads")} == {LR / 4}


def test_tied_weights_are_in_one_group_and_have_two_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for name in ("0.weight", "1.weight"):
        found = by_name(param_groups(model, LR, weight_decay=DECAY, layer_decay=0.5, no_decay=iter([name])))
        assert found.keys() == {"0.bias", "0.weight", "1.bias"} and {decay for _, decay in found.values()} == {0}


@pytest.mark.parametrize("how", ["experts", "decoder", "stages"])
def test_several_lists_of_layers_need_layer_of(how: str) -> None:
    """The longest one need not be the layers: learning rates would be wrong without a word."""
    model = nn.Module()
    if how == "experts":
        model.layers = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)) for _ in range(3))
    elif how == "decoder":
        model.encoder, model.decoder = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
    else:
        model.first, model.second = (nn.Sequential(*(Block() for _ in range(count))) for count in (2, 3))
    with pytest.raises(ValueError, match=r"model must have its layers in one list, got lists .*; pass layer_of"):
        param_groups(model, LR, layer_decay=0.5)
    assert len(param_groups(model, LR, layer_decay=0.5, layer_of=lambda name: int(name.split(".")[1]))) >= 2


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0.weight must have a shape, got a lazy parameter; run the model once"):
        param_groups(nn.Sequential(nn.LazyLinear(2)), LR, weight_decay=DECAY)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "lr must be a finite number of at least 0, got '0.1'", {"lr": "0.1"}),
        (ValueError, "lr must be a finite number of at least 0, got -1", {"lr": -1}),
        (ValueError, "weight_decay must be a finite number of at least 0, got inf", {"weight_decay": float("inf")}),
        (ValueError, "layer_decay must be a number above 0 and up to 1, got 0", {"layer_decay": 0}),
        (TypeError, "no_decay must be a list of names, got the str 'position'", {"no_decay": "position"}),
        (ValueError, "must match parameters that train, got 'heads.0.*'", {"no_decay": ["heads.0.*"]}),
        (ValueError, "integer of at least 0, got -1 for 'position'", {"layer_decay": 0.5, "layer_of": lambda name: -1}),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_arguments(error: type, words: str, arguments: dict) -> None:
    with pytest.raises(error, match=f"param_groups: .*{re.escape(words)}"):
        param_groups(Encoder(), **{"lr": LR, **arguments})


def test_models_without_layers_need_layer_of() -> None:
    with pytest.raises(ValueError, match="must have a ModuleList or Sequential of layers, got a Linear"):
        param_groups(nn.Linear(2, 2), LR, layer_decay=0.5)
    with pytest.raises(TypeError, match="model must be a torch Module, got a generator"):
        param_groups(nn.Linear(2, 2).parameters(), LR)


def test_groups_train_as_torch_with_the_same_groups() -> None:
    """Options of groups meet in one step: learning rates, decay, and the dtype of states."""
    torch.manual_seed(0)
    model = Encoder()
    model.table = nn.Embedding(1024, 8)  # 8192 elements: enough for states in int8
    theirs = copy.deepcopy(model)
    groups = param_groups(model, LR, weight_decay=DECAY, layer_decay=0.5)
    for group in groups:
        group["state_dtype"] = (
            torch.int8 if any(name == "table.weight" for name, _ in group["params"]) else torch.float32
        )
    names = [name for group in groups for name, _ in group["params"]]
    ours = FusedAdamW(groups, max_grad_norm=1.0)
    torchs = torch.optim.AdamW(param_groups(theirs, LR, weight_decay=DECAY, layer_decay=0.5), foreach=False)
    x = torch.arange(40).view(8, 5) * 17
    for _ in range(4):
        for net in (model, theirs):
            net.zero_grad()
            net(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_([p for group in torchs.param_groups for p in group["params"]], 1.0)
        ours.step()
        torchs.step()
    assert "exp_avg_codes" in ours.state[model.table.weight] and "exp_avg" in ours.state[model.norm.weight]
    for (name, p), q in zip(model.named_parameters(), theirs.parameters(), strict=True):
        # A code of 8 bits is up to 1 % off.
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-3 if name == "table.weight" else 2e-4, msg=name)
    assert ours._log.names[torch.device("cpu")] == names


def test_a_group_of_its_own_max_grad_norm_is_refused() -> None:
    groups = param_groups(Encoder(), LR, weight_decay=DECAY)
    groups[0]["max_grad_norm"] = 1.0
    optimizer = FusedSGD(groups)
    with pytest.raises(ValueError, match="max_grad_norm must be the same in all parameter groups"):
        optimizer.step()
