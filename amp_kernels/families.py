"""The update families: the facts about each optimizer formula that several layers of the package need.

The name of a family is also the name of its files in ``csrc/formulas/``, ``triton_kernels/`` and ``reference/``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import reference
from .reference.states import MOMENTUM, SECOND_MOMENT, Code
from .reference.update import States


class Family(NamedTuple):
    """An optimizer formula: ``p, s <- formula(p, g, s, hyper, lr, step)``.

    Attributes:
        name: Name of the formula.
        options: Options that no other optimizer of torch has together. They tell whether a checkpoint belongs to this
            family.
        states: Names of the states, in the order of their rows in the kernels' table (csrc/table.h).
        codes: How each state is stored in 8 bits. None for a state that is always fp32; it is the last one.
        optional: How many states are optional. They are the last ones in `states`. The options of the optimizer decide
            whether a parameter has them.
        hyper: Type of the hyper-parameters, without the learning rate: a named tuple of floats in the order in which
            `csrc/formulas/<name>.h` reads them.
        hyper_of: Makes the hyper-parameters from the options of an optimizer.
        formula: The formula in plain torch. `reference.update_` explains its arguments.
    """

    name: str
    options: tuple[str, ...]
    states: tuple[str, ...]
    codes: tuple[Code | None, ...]
    optional: int
    hyper: Any
    hyper_of: Callable[[Mapping[str, Any]], Any]
    formula: Callable[..., tuple[Tensor, States]]

    def coded(self, names: Sequence[str | None]) -> int:
        """Return a bit for each state that may have fewer than 32 bits. In `names`, None stands for an unused state.

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


SgdHyper = namedtuple("SgdHyper", "momentum one_minus_dampening weight_decay nesterov sign")


def _sgd(options: Mapping[str, Any]) -> SgdHyper:
    decay, nesterov = float(options["weight_decay"]), float(options["nesterov"])
    return SgdHyper(float(options["momentum"]), 1.0 - options["dampening"], decay, nesterov, _sign(options))


RmspropHyper = namedtuple("RmspropHyper", "alpha one_minus_alpha eps weight_decay sign momentum")


def _rmsprop(options: Mapping[str, Any]) -> RmspropHyper:
    alpha, eps, decay = float(options["alpha"]), float(options["eps"]), float(options["weight_decay"])
    return RmspropHyper(alpha, 1.0 - options["alpha"], eps, decay, _sign(options), float(options["momentum"]))


AdamHyper = namedtuple("AdamHyper", "one_minus_beta1 one_minus_beta2 eps weight_decay sign decoupled_weight_decay")


def _adam(options: Mapping[str, Any]) -> AdamHyper:
    beta1, beta2 = options["betas"]
    eps, decay = float(options["eps"]), float(options["weight_decay"])
    is_decoupled = float(options["decoupled_weight_decay"])
    return AdamHyper(1.0 - float(beta1), 1.0 - float(beta2), eps, decay, _sign(options), is_decoupled)


SGD = Family("sgd", ("dampening",), ("momentum_buffer",), (MOMENTUM,), 1, SgdHyper, _sgd, reference.sgd.formula)
RMSPROP = Family(
    "rmsprop", ("alpha", "momentum"), ("square_avg", "momentum_buffer", "grad_avg"), (SECOND_MOMENT, MOMENTUM, None), 2,
    RmspropHyper, _rmsprop, reference.rmsprop.formula,
)  # fmt: skip
ADAM = Family(
    "adam", ("amsgrad",), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), (MOMENTUM, SECOND_MOMENT, None), 1,
    AdamHyper, _adam, reference.adam.formula,
)  # fmt: skip
FAMILIES = {family.name: family for family in (SGD, RMSPROP, ADAM)}
