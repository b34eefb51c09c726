"""Optimizers that a configuration file names by dotted path and keywords: hydra, and what torchtune and torchtitan do.

Neither torchtune nor torchtitan is installed. `by_component` and `by_dotted_path` are what their loaders do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import ListConfig, OmegaConf
from torch import Tensor, nn
from training import FP32, assert_close, assert_same_bits, classifier, cross_entropy, samples, weights

from amp_kernels.optim import FusedAdamW, FusedSGD

YAML = """
_target_: amp_kernels.optim.FusedAdamW
lr: 1e-2
betas: [0.8, 0.95]
eps: 0.1
weight_decay: 0.1
max_grad_norm: 0.1
"""
INT8 = (
    """
state_dtype:
  _target_: hydra.utils.get_object
  path: torch.int8
""",
    "state_dtype: int8",
)


def by_component(config: Mapping[str, Any], *args: Any) -> Any:
    """Calls `_component_` with the other keys, and makes what is nested first, as torchtune's `instantiate`."""
    keywords = {
        key: by_component(value) if isinstance(value, Mapping) and "_component_" in value else value
        for key, value in config.items()
        if key != "_component_"
    }
    return by_dotted_path(config["_component_"])(*args, **keywords)


def by_dotted_path(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def instantiated(params: Any, extra: str = "", **keywords: Any) -> Any:
    return hydra.utils.instantiate(OmegaConf.create(YAML + extra), params, **keywords)


def component(params: Any) -> Any:
    config = OmegaConf.create(YAML.replace("_target_", "_component_"))
    return by_component(config, params)


def titan(params: Any) -> Any:
    config = OmegaConf.to_container(OmegaConf.create(YAML))
    assert isinstance(config, dict)
    return by_dotted_path(config.pop("_target_"))(params, **config)


WAYS: dict[str, Callable[[Any], Any]] = {
    "hydra": instantiated,
    "hydra-containers": lambda params: instantiated(params, _convert_="all"),
    "hydra-partial": lambda params: hydra.utils.instantiate(OmegaConf.create(YAML), _partial_=True)(params),
    "torchtune": component,
    "torchtitan": titan,
}
ways = pytest.mark.parametrize("way", WAYS)


def trained(make: Callable[[Any], Any], clip: float | None = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = classifier()
    optimizer = make(model.parameters())
    train(model, optimizer, clip)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, clip: float | None = None) -> None:
    for x, y in zip(*(t.split(8) for t in samples()), strict=True):
        cross_entropy(model, (x, y)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


@ways
def test_trains_and_clips(way: str) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 0.1, "weight_decay": 0.1, "foreach": False}
    want, _ = trained(lambda params: torch.optim.AdamW(params, **options), clip=0.1)
    got, optimizer = trained(WAYS[way])
    assert type(optimizer) is FusedAdamW
    assert_close(weights(got), weights(want), FP32)


@ways
def test_resumes_with_the_same_bits(way: str, tmp_path: Path) -> None:
    """A file with the state loads with `weights_only=True`, so no class of OmegaConf may be in it."""
    model, optimizer = trained(WAYS[way])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    train(model, optimizer)
    saved: dict[str, Any] = torch.load(tmp_path / "file.pt", weights_only=True)
    again = classifier()
    other = WAYS[way](again.parameters())
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(again, other)
    assert_same_bits(weights(again), weights(model))
    assert_same_bits(other.state_dict(), optimizer.state_dict())


def test_skips() -> None:
    model, optimizer = trained(instantiated)
    before = weights(model)
    scaler = hydra.utils.instantiate({"_target_": "amp_kernels.GradScaler", "device": "cpu", "init_scale": 1024.0})
    loss: Tensor = cross_entropy(model, [t[:8] for t in samples()]) * torch.inf
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(weights(model), before)
    assert (int(scaler.skipped_steps), scaler.get_scale()) == (1, 512.0)


@pytest.mark.parametrize("yaml", INT8, ids=["object", "text"])
def test_state_dtype(yaml: str) -> None:
    params = list(classifier().parameters())
    optimizer = instantiated(params, yaml)
    assert [group["state_dtype"] for group in optimizer.param_groups] == [torch.int8]
    wanted = FusedAdamW(params, state_dtype=torch.int8).param_groups[0].keys()
    assert optimizer.param_groups[0].keys() == wanted


def by_keyword(groups: Any) -> Any:
    """Without `_convert_` hydra passes each group as a DictConfig, which torch refuses."""
    return hydra.utils.instantiate(OmegaConf.create(YAML), params=groups, _convert_="all")


@pytest.mark.parametrize("way", [instantiated, by_keyword])
def test_groups(way: Callable[[Any], Any]) -> None:
    """The program makes parameter groups. hydra does not change a list of them."""
    model = classifier()
    groups = [{"params": list(model[:2].parameters()), "lr": 0.5}, {"params": list(model[2:].parameters())}]
    optimizer = way(groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-2]
    assert all(
        p is q
        for p, q in zip((p for g in optimizer.param_groups for p in g["params"]), model.parameters(), strict=True)
    )


def test_betas_of_omegaconf_are_checked() -> None:
    params = list(classifier().parameters())
    FusedAdamW(params, betas=ListConfig([0.9, 0.95]))
    for wrong in ([0.9], [0.9, "a"]):
        with pytest.raises(TypeError, match=r"FusedAdamW: betas must be two numbers"):
            FusedAdamW(params, betas=ListConfig(wrong))


def test_scheduler_and_optimizer_by_partial() -> None:
    """As Lightning's hydra template: both are `_partial_`."""
    config = OmegaConf.create(
        """
        optimizer: {_target_: amp_kernels.optim.FusedSGD, _partial_: true, lr: 0.1, momentum: 0.9}
        scheduler: {_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 1, gamma: 0.5}
        """
    )
    made = hydra.utils.instantiate(config)
    optimizer = made.optimizer(classifier().parameters())
    scheduler = made.scheduler(optimizer)
    assert type(optimizer) is FusedSGD
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
