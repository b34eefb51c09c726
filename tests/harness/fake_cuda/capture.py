"""What Triton loads inside a graph capture, on a GPU that refuses it. The last line is JSON.

Each scenario begins as in a new process, with no kernel loaded, and ends with captured calls. Its result counts the
modules that were loaded before the capture and inside, and the launches inside.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from amp_kernels.triton_kernels import common
from gpus import device, forget_kernels, gpus, libcuda

import amp_kernels
from amp_kernels import grad_scaler
from amp_kernels.families import FAMILIES
from amp_kernels.optim import _base, _plan
from amp_kernels.testing.updates import UPDATES


class Training:
    """An optimizer of 16-bit and fp32 parameters, which has two forms of update, and its scaler."""

    def __init__(self, family: str, state_dtype: torch.dtype = torch.float32) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(4096, dtype=dtype)) for dtype in (torch.float16, torch.float32)]
        for param in self.params:
            param.grad = torch.zeros_like(param)
        self.optimizer = UPDATES[family].optimizer(self.params, lr=0.1, state_dtype=state_dtype)
        self.scaler = amp_kernels.GradScaler("cpu", init_scale=2.0)
        self.scaler.scale(torch.ones(()))

    def clip(self) -> None:
        self.optimizer.max_grad_norm = 1  # an int: Triton would give it another type than a float
        self.optimizer.step()

    def scaler_step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scaler_unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler_step()

    def tensor_lr(self) -> None:
        self.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        self.optimizer.step()


# What precedes the capture, and what is captured.
Scenario = tuple[Callable[[Training], object], Callable[[Training], object]]
SCENARIOS: dict[str, Scenario] = {
    f"{before}, {name}": (call, captured)
    for before, call in {
        "init_state": lambda t: t.optimizer.init_state(),
        "step": lambda t: t.optimizer.step(),
    }.items()
    for name, captured in {
        "step": lambda t: t.optimizer.step(),
        "max_grad_norm": Training.clip,
        "scaler": Training.scaler_step,
        "unscale_": Training.scaler_unscale,
        "tensor lr": Training.tensor_lr,
    }.items()
}


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    for module in (_base, _plan, grad_scaler):
        module.capturing = lambda device: True  # type: ignore[attr-defined]
    libcuda.fake_set_capturing(1)
    try:
        yield
    finally:
        libcuda.fake_set_capturing(0)
        for module in (_base, _plan, grad_scaler):
            module.capturing = lambda device: False  # type: ignore[attr-defined]


def counts() -> Counter[str]:
    return Counter(
        loads=libcuda.fake_loads(),
        passes=libcuda.fake_launches_of(b"_unscale_kernel"),
        updates=libcuda.fake_launches_of(b"_update_kernel"),
    )


def result_of(family: str, scenario: Scenario, state_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    forget_kernels()
    before, captured = scenario
    training = Training(family, state_dtype)
    loads = libcuda.fake_loads()
    before(training)
    start, error = counts(), None
    with capturing():
        try:
            captured(training)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    inside = counts()
    inside.subtract(start)
    return {"loads before": start["loads"] - loads, **inside, "raised": error}


def on_another_device(family: str, scenario: Scenario) -> dict[str, Any]:
    """Where the tensors' device is not the current one, and of another capability."""
    current = common.current
    common.current = lambda of: device(1)
    try:
        return result_of(family, scenario)
    finally:
        common.current = current


def main() -> None:
    results = {}
    with gpus(90):
        for family in FAMILIES:
            for name, scenario in SCENARIOS.items():
                results[f"{family}: {name}"] = result_of(family, scenario)
                if family != "sgd":  # it has no state here
                    results[f"{family} int8: {name}"] = result_of(family, scenario, torch.int8)
    with gpus(90, 80):
        results["another device"] = on_another_device("sgd", SCENARIOS["init_state, scaler"])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
