"""Trainings and int8 models that are saved, resumed and continued, for the checkpoints in folders next to this file.

A folder has the name of a release. It holds the checkpoints that the release saved, and the numbers that the release
computed when it continued from them. The present sources must load these checkpoints and compute the same bits
(tests/package/test_saved.py). A folder for another release is made in a clone at that release, built for the CPU:

    python HERE/tests/package/saved/cases.py HERE/tests/package/saved/NAME

Only public names are used, since older releases run this file too. Values are small multiples of powers of two:
they are the same in every dtype and on every torch, and sums of products are exact in any order.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_kernels import GradScaler, Int8Tensor, int8_matmul, quantize_int8
from amp_kernels.optim import FusedRMSprop, FusedSGD
from amp_kernels.quantization import convert_, prepare_, prepare_qat_, quantize_

Numbers = dict[str, list[float]]


def values(*shape: int, seed: int = 0) -> Tensor:
    """Multiples of 1/64 from -50/64 to 50/64."""
    return (((torch.arange(math.prod(shape)) * 37 + seed * 11) % 101 - 50) / 64).view(shape)


def listed(tensor: Tensor) -> list[float]:
    return tensor.detach().cpu().double().flatten().tolist()


# ------------------------------------------------------------------------------------------------------------ trainings
class Training:
    """Parameters of every dtype in two groups, the last of them without a gradient until `LATE`.

    Args:
        family: of the optimizer.
        saved_at: steps before it is saved.
        overflows: steps whose gradients hold an inf.
        scaler: options of a `GradScaler`; None trains without.
        options: of the optimizer.
    """

    STEPS, LATE = 6, 4

    def __init__(
        self,
        family: type[Any],
        *,
        saved_at: int = 3,
        overflows: tuple[int, ...] = (),
        scaler: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.family, self.saved_at, self.overflows, self.options = family, saved_at, overflows, options
        self.scaler_options = scaler

    def start(self) -> None:
        image = values(2, 3, 2, 2, seed=2).to(torch.bfloat16, memory_format=torch.channels_last)
        weights = [values(4, 9), values(33, seed=1).half(), image, values(5, seed=3).half()]
        self.parameters = [nn.Parameter(weight) for weight in weights]
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "weight_decay": 1 / 16}]
        self.optimizer = self.family(groups, **self.options)
        self.scaler = None if self.scaler_options is None else GradScaler("cpu", **self.scaler_options)

    def train(self, steps: range) -> None:
        for step in steps:
            scale = 1.0 if self.scaler is None else float(self.scaler.scale(torch.ones(())))
            for i, parameter in enumerate(self.parameters):
                grad = (values(*parameter.shape, seed=7 * step + i) * scale).to(parameter.dtype)
                parameter.grad = torch.empty_like(parameter).copy_(grad) if i < 3 or step >= self.LATE else None
            if step in self.overflows:
                self.parameters[1].grad[5] = torch.inf
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()

    def save(self) -> dict[str, Any]:
        self.start()
        self.train(range(self.saved_at))
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {
            "model": [p.detach().clone() for p in self.parameters],
            "optimizer": self.optimizer.state_dict(),
        } | scaler

    def resume(self, saved: dict[str, Any]) -> None:
        self.start()
        with torch.no_grad():
            for parameter, value in zip(self.parameters, saved["model"], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])

    def go_on(self) -> Numbers:
        """Parameters and states after the last step, and what the scaler knows after each."""
        numbers: Numbers = {"scale": [], "skipped_steps": []}
        for step in range(self.saved_at, self.STEPS):
            self.train(range(step, step + 1))
            if self.scaler is not None:
                numbers["scale"].append(self.scaler.get_scale())
                numbers["skipped_steps"].append(float(self.scaler.skipped_steps))
        states = self.optimizer.state_dict()["state"]
        for i, parameter in enumerate(self.parameters):
            numbers[f"parameter {i}"] = listed(parameter)
            for key, state in states[i].items():
                numbers[f"{key} {i}"] = [] if state is None else listed(state)
        return numbers


class Lean(Training):
    """A parameter whose states are not fp32, in a state dict that keeps them as they are."""

    def start(self) -> None:
        self.parameters = [nn.Parameter(values(64, 65).bfloat16())]
        self.optimizer = self.family(self.parameters, **self.options)
        self.scaler = None

    def save(self) -> dict[str, Any]:
        self.start()
        self.train(range(self.saved_at))
        weights = [p.detach().clone() for p in self.parameters]
        return {"model": weights, "optimizer": self.optimizer.state_dict(compact=True)}

    def go_on(self) -> Numbers:
        """Every 64th number is kept, and the sum of all."""
        return {name: [*every[::64], math.fsum(every)] for name, every in super().go_on().items()}


PATIENT = {"init_scale": 8.0, "growth_interval": 2, "hysteresis": 2, "min_scale": 0.5}
QUICK = {"init_scale": 4.0, "growth_interval": 2}
TRAININGS = {
    "sgd": Training(FusedSGD, lr=0.1),
    "sgd_momentum": Training(FusedSGD, lr=0.1, momentum=0.9, dampening=0.5, overflows=(1, 4), scaler=QUICK),
    "sgd_nesterov": Training(  # the norm that it clips to is never reached
        FusedSGD, lr=torch.tensor(0.1), momentum=0.9, nesterov=True, maximize=True, max_grad_norm=1e3,
        overflows=(2, 3), scaler=PATIENT,
    ),
    "sgd_skipped": Training(FusedSGD, lr=0.1, momentum=0.9, saved_at=1, overflows=(0,), scaler=QUICK),
    "rmsprop": Training(FusedRMSprop, lr=0.01),
    "rmsprop_momentum": Training(FusedRMSprop, lr=0.01, momentum=0.9, overflows=(2, 3), scaler=PATIENT),
    "rmsprop_centered": Training(FusedRMSprop, lr=0.01, alpha=0.9, centered=True, momentum=0.9, maximize=True),
    "rmsprop_int8": Lean(FusedRMSprop, lr=0.01, momentum=0.9, state_dtype=torch.int8),
    "sgd_bf16": Lean(FusedSGD, lr=0.1, momentum=0.9, state_dtype=torch.bfloat16),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- int8 models
def filled(model: nn.Module) -> nn.Module:
    """Weights that are codes times 1/128, with a code of 127 in every row: their scales are exactly 1/128."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(values(*parameter.shape, seed=seed))
            if parameter.dim() == 2:
                parameter[:, seed] = 127 / 128
    return model


def mlp() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5)))


def language_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 24), nn.Linear(24, 11))
    model[1].weight = model[0].weight
    return filled(model)


def batch(seed: int) -> Tensor:
    return values(6, 24, seed=seed)


def prepared(prepare: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = prepare(mlp())
    model(batch(0))
    return model


class Int8Model:
    """A model whose state dict is saved; `make` makes it anew, with ranges of a batch where it has some."""

    def __init__(self, make: Callable[[], nn.Module], x: Tensor, is_converted: bool = True) -> None:
        self.make, self.x, self.is_converted = make, x, is_converted

    def save(self) -> dict[str, Tensor]:
        self.model = self.make()
        return self.model.state_dict()

    def resume(self, saved: dict[str, Tensor], device: str = "cpu") -> None:
        self.model = self.make().to(device)
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.zero_()  # so that what is not loaded shows
        self.model.load_state_dict(saved)

    @torch.no_grad()
    def go_on(self) -> Numbers:
        """Outputs; of what is not converted yet those of the int8 model too, after another batch."""
        x = self.x.to(next(iter(self.model.state_dict().values())).device)
        if self.is_converted:
            return {"output": listed(self.model(x))}
        trained = self.model(x)
        return {"trained": listed(trained), "converted": listed(convert_(self.model.eval())(x))}


MODELS = {
    "weight_only": Int8Model(lambda: quantize_(language_model()), torch.arange(11)),
    "weight_only_bf16": Int8Model(lambda: quantize_(language_model().bfloat16()), torch.arange(11)),
    "dynamic": Int8Model(lambda: quantize_(mlp(), "dynamic"), batch(5)),
    "static": Int8Model(lambda: convert_(prepared(prepare_)), batch(5)),
    "prepared": Int8Model(lambda: prepared(prepare_), 2 * batch(5), is_converted=False),
    "qat_dynamic": Int8Model(lambda: prepared(prepare_qat_), batch(5), is_converted=False),
    "qat_static": Int8Model(
        lambda: prepared(lambda model: prepare_qat_(model, "static")), 2 * batch(5), is_converted=False
    ),
}


class Int8Tensors:
    """Codes of a matrix by every kind of group."""

    def save(self) -> dict[str, Int8Tensor]:
        x = values(7, 20) + 1 / 8
        self.codes = {
            "whole": quantize_int8(x),
            "rows": quantize_int8(x, dim=-1, symmetric=False),
            "columns": quantize_int8(x.bfloat16(), dim=0),
            "blocks": quantize_int8(x.half(), block_size=8, symmetric=False),
        }
        return self.codes

    def resume(self, saved: dict[str, Int8Tensor], device: str = "cpu") -> None:
        self.codes = {name: q.to(device) for name, q in saved.items()}

    def go_on(self) -> Numbers:
        numbers = {name: listed(q.dequantize()) for name, q in self.codes.items()}
        return numbers | {"product": listed(int8_matmul(self.codes["rows"], self.codes["rows"].t()))}


INT8: dict[str, Any] = {**MODELS, "int8_tensors": Int8Tensors()}


def main(folder: Path) -> None:
    folder.mkdir()
    for name, case in {**TRAININGS, **INT8}.items():
        saved = copy.deepcopy(case.save())  # state dicts are of tensors that go on
        torch.save({"saved": saved, "numbers": case.go_on()}, folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
