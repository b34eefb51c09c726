"""Warns of parameters whose gradients are 0 in every element: the loss scale is too small, or they are not used."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .functional.unscale import to_device
from .ops.exponents import count_exponents_
from .ops.library import call
from .ops.table import DTYPE_CODES
from .optim._base import FusedOptimizer
from .optim._plan import capturing
from .reference.exponents import COLUMNS

# A step in this many looks at the gradients of its optimizer. With 1000 parameters of 64 elements, `step` and `update`
# of the scaler take 6 % longer with looks than without, and with 50 of them 3.5 % (`FusedSGD`, one thread of a CPU).
STEPS_PER_LOOK = 100
# A parameter has to be 0 in this many looks in a row before there is a warning. Some gradients are 0 only now and then:
# at the first step (the first factor of LoRA), or for a layer that is dropped in this step.
LOOKS_BEFORE_WARNING = 3
BATCH = 256  # gradients in one call, because the counts, which are not read here, take 2 KB for each of them


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event after the work that a GPU was given so far, or None for other devices."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class ZeroGradients:
    """Looks at gradients in some steps of a scaler, and warns once of those that stay 0 in every element.

    `look` asks the devices. Their answer is one copy to the host, and `evaluate` reads it when it has arrived, so
    nothing waits for a device. Until then there is no other look. No optimizer and no parameter is kept alive.
    """

    def __init__(self, has_warned: bool = False) -> None:
        self.has_warned = has_warned
        self._updates = 0
        # The ids of optimizers looked at since the last multiple of STEPS_PER_LOOK updates. None before the first one,
        # and after the warning. If a new optimizer has the id of a deleted one, it waits for the next multiple.
        self._looked_at: set[int] | None = None
        # The parameters whose gradients were looked at, and in the same order the largest finite magnitudes of these.
        self._params: list[tuple[str, ReferenceType[Tensor]]] = []
        self._largest: list[Tensor] = []
        # `found_inf`, the scale and the magnitudes, on the host. What comes from a GPU is there after an event.
        self._answer: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None
        # For each parameter whose gradient was 0 at the last look, the number of such looks in a row.
        self._zero_looks = WeakIdKeyDictionary()

    def look(self, optimizer: Any) -> None:
        """Asks which gradients of `optimizer` are 0, if a look is due. Called before gradients are unscaled."""
        if self._looked_at is not None and id(optimizer) not in self._looked_at and self._answer is None:
            self._looked_at.add(id(optimizer))
            self._look(optimizer)

    def evaluate(self, found_inf: Tensor | None, scale: Tensor) -> None:
        """Counts an update, and warns if an answer has arrived and a parameter was 0 in several looks in a row."""
        self._updates += 1
        if self._updates % STEPS_PER_LOOK == 0 and not self.has_warned:
            self._looked_at = set()
        if not self._params or found_inf is None or (answer := self._arrived(found_inf, scale)) is None:
            return
        found, scale_then, *largest = answer
        names = [] if found else self._count(largest)
        self._params, self._largest, self._answer, self._arrival = [], [], None, None
        if names:
            self.has_warned, self._looked_at = True, None
            warnings.warn(
                f"GradScaler: every element of the gradient was 0 for {len(names)} parameters ({names[0]} is the "
                f"first) in each of {LOOKS_BEFORE_WARNING} looks, {STEPS_PER_LOOK} steps apart; if the loss depends on "
                f"them, their gradients underflow at a scale of {scale_then:g}: use a larger init_scale, or a smaller "
                "growth_interval; if it does not depend on them, set their requires_grad to False",
                stacklevel=3,
            )

    @torch.compiler.disable
    def _look(self, optimizer: Any) -> None:
        """Asks which gradients are 0. Left out are empty ones, and those that kernels do not take."""
        # DTensors are left out too. A shard of zeros proves nothing: it may be the rows of positions that no sequence
        # reaches.
        members: dict[torch.device, tuple[list[Any], list[Tensor]]] = defaultdict(lambda: ([], []))
        for name, _, param in FusedOptimizer._named_parameters(optimizer):  # other optimizers have the same groups
            grad = param.grad
            if type(grad) is Tensor and grad.layout is torch.strided and grad.dtype in DTYPE_CODES and grad.numel():
                params, grads = members[grad.device]
                params.append((name, ref(param)))
                grads.append(grad)
            elif self._zero_looks:
                self._zero_looks.pop(param, None)
        if any(capturing(device) or device.type not in ("cpu", "cuda") for device in members):
            return
        for device, (params, grads) in members.items():
            largest = torch.zeros(len(grads), device=device)
            squares = torch.zeros(len(grads), dtype=torch.float64, device=device)
            counts = torch.empty(min(len(grads), BATCH), COLUMNS, dtype=torch.int64, device=device)
            for first in range(0, len(grads), BATCH):
                rows = slice(first, first + BATCH)
                call(count_exponents_, grads[rows], counts[: len(grads) - first], largest[rows], squares[rows])
            self._params += params
            self._largest.append(largest)

    @torch.compiler.disable
    def _arrived(self, found_inf: Tensor, scale: Tensor) -> list[float] | None:
        """Returns the answer if it has arrived. The first call sends for it."""
        if capturing(scale.device):  # an event must not be queried
            return None
        if self._answer is None:
            largest = (to_device(tensor, scale.device) for tensor in self._largest)
            answer = torch.cat([found_inf.reshape(1), scale.reshape(1), *largest])
            self._answer = answer.to("cpu", non_blocking=answer.is_cuda)  # from a GPU into pinned memory
            self._arrival = _recorded(answer.device)
        return self._answer.tolist() if self._arrival is None or self._arrival.query() else None

    def _count(self, largest: list[float]) -> list[str]:
        """Counts zeros, and returns the names of the parameters to warn of."""
        found = []
        for (name, reference), number in zip(self._params, largest, strict=True):
            param = reference()
            if param is not None and number == 0:
                self._zero_looks[param] = self._zero_looks.get(param, 0) + 1
                if self._zero_looks[param] >= LOOKS_BEFORE_WARNING:
                    found.append(name)
            elif param is not None:
                self._zero_looks.pop(param, None)
        return found
