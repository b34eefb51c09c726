"""The update families: the facts about each optimizer formula that several layers of the package need.

The name of a family is also the name of its files:

- ``csrc/formulas/<name>.h`` has the arithmetic in C++. ``csrc/formulas/families.h`` lists the formulas.
- ``triton_kernels/<name>.py`` has the arithmetic in Triton.
- ``amp_kernels/reference/<name>.py`` is the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from . import reference
from .reference.states import MOMENTUM, SECOND_MOMENT, Code


class HyperType(Protocol):
    """A type of hyper-parameters: a NamedTuple of floats, in the order in which kernels read them."""

    def __call__(self, *columns: Any) -> Any:
        """Make the tuple from its values."""

    def of(self, options: Mapping[str, Any]) -> tuple[float, ...]:
        """Make the tuple from the options of an optimizer."""


class Family(NamedTuple):
    """An optimizer formula: ``p, states <- formula(p, g, states, hyper, lr)``.

    Attributes:
        name: Name of the formula.
        options: Options that no other optimizer of torch has together. They tell whether a checkpoint belongs to this
            family.
        states: Names of the states, in the order of their rows in the kernels' table (csrc/table.h).
        codes: How each state is stored in 8 bits. None for a state that is always fp32; it is the last one.
        optional: How many states are optional. They are the last ones in `states`. The options of the optimizer decide
            whether a parameter has them.
        hyper: Type of the hyper-parameters, which do not include the learning rate.
        reference: The update in plain torch, called as ``(params, grads, states, masters, hyper, *, lr, steps_taken,
            grad_scale, found_inf)``. The argument `states` has one list of tensors for each name in the attribute
            `states`. A list is empty if its state is not used. `steps_taken` is an int or a 0-dim int64 tensor.
    """

    name: str
    options: tuple[str, ...]
    states: tuple[str, ...]
    codes: tuple[Code | None, ...]
    optional: int
    hyper: HyperType
    reference: Callable[..., None]

    def coded(self, names: Sequence[str | None]) -> int:
        """Return a bit for each of the first two states that may have fewer than 32 bits.

        Args:
            names: The states in use, in the order of `states`. None stands for a state that is not used.

        A second moment stays in fp32 if the third state is used, because rounding would change the result of comparing
        the two. Centered RMSprop takes the root of ``square_avg - grad_avg^2``, in which nearly all digits may cancel.
        AMSGrad keeps the largest `exp_avg_sq`. It would keep the largest rounding error.
        """
        has_third = len(names) > 2 and names[2] is not None
        bits = 0
        for k, (name, code) in enumerate(zip(names, self.codes, strict=True)):
            bits |= (name is not None and code is not None and not (code is SECOND_MOMENT and has_third)) << k
        return bits


def _sign(options: Mapping[str, Any]) -> float:
    return -1.0 if options["maximize"] else 1.0


# ---------------------------------------------------------------------------------------------------------------- SGD
class SgdHyper(NamedTuple):
    """The hyper-parameters of SGD, in the order in which `csrc/formulas/sgd.h` reads them."""

    momentum: float
    one_minus_dampening: float
    weight_decay: float
    nesterov: float
    sign: float

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SgdHyper:
        """Make the tuple from the options of an optimizer."""
        return cls(
            float(options["momentum"]),
            1.0 - options["dampening"],
            float(options["weight_decay"]),
            float(options["nesterov"]),
            _sign(options),
        )


def _sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    masters: Sequence[Tensor],
    hyper: SgdHyper,
    *,
    steps_taken: int | Tensor,
    **rest: Any,
) -> None:
    (momentum_buffers,) = states
    reference.sgd_(
        params, grads, momentum_buffers, masters, momentum=hyper.momentum, dampening=1 - hyper.one_minus_dampening,
        weight_decay=hyper.weight_decay, nesterov=bool(hyper.nesterov), maximize=hyper.sign < 0,
        is_first_step=steps_taken == 0, **rest,
    )  # fmt: skip


SGD = Family("sgd", ("dampening",), ("momentum_buffer",), (MOMENTUM,), 1, SgdHyper, _sgd)


# ------------------------------------------------------------------------------------------------------------ RMSprop
class RmspropHyper(NamedTuple):
    """The hyper-parameters of RMSprop, in the order in which `csrc/formulas/rmsprop.h` reads them."""

    alpha: float
    one_minus_alpha: float
    eps: float
    weight_decay: float
    sign: float
    momentum: float

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RmspropHyper:
        """Make the tuple from the options of an optimizer."""
        return cls(
            float(options["alpha"]),
            1.0 - options["alpha"],
            float(options["eps"]),
            float(options["weight_decay"]),
            _sign(options),
            float(options["momentum"]),
        )


def _rmsprop(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    masters: Sequence[Tensor],
    hyper: RmspropHyper,
    *,
    steps_taken: int | Tensor,
    **rest: Any,
) -> None:
    square_avgs, momentum_buffers, grad_avgs = states
    reference.rmsprop_(
        params, grads, square_avgs, momentum_buffers, grad_avgs, masters, alpha=hyper.alpha, eps=hyper.eps,
        weight_decay=hyper.weight_decay, momentum=hyper.momentum, maximize=hyper.sign < 0, **rest,
    )  # fmt: skip


RMSPROP = Family(
    "rmsprop", ("alpha", "momentum"), ("square_avg", "momentum_buffer", "grad_avg"), (SECOND_MOMENT, MOMENTUM, None), 2,
    RmspropHyper, _rmsprop,
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- Adam
class AdamHyper(NamedTuple):
    """The hyper-parameters of Adam, in the order in which `csrc/formulas/adam.h` reads them."""

    one_minus_beta1: float
    one_minus_beta2: float
    eps: float
    weight_decay: float
    sign: float
    decoupled_weight_decay: float

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AdamHyper:
        """Make the tuple from the options of an optimizer."""
        beta1, beta2 = options["betas"]
        return cls(
            1.0 - float(beta1),
            1.0 - float(beta2),
            float(options["eps"]),
            float(options["weight_decay"]),
            _sign(options),
            float(options["decoupled_weight_decay"]),
        )


def _adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    masters: Sequence[Tensor],
    hyper: AdamHyper,
    **rest: Any,
) -> None:
    exp_avgs, exp_avg_sqs, max_exp_avg_sqs = states
    reference.adam_(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters,
        betas=(1 - hyper.one_minus_beta1, 1 - hyper.one_minus_beta2), eps=hyper.eps,
        weight_decay=hyper.weight_decay, maximize=hyper.sign < 0,
        decoupled_weight_decay=bool(hyper.decoupled_weight_decay), **rest,
    )  # fmt: skip


ADAM = Family(
    "adam", ("amsgrad",), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), (MOMENTUM, SECOND_MOMENT, None), 1, AdamHyper,
    _adam,
)  # fmt: skip

FAMILIES = {family.name: family for family in (SGD, RMSPROP, ADAM)}
