"""The update families: the facts about each optimizer formula that several layers of the package need.

The name of a family is also the name of its files in ``csrc/formulas/``, ``triton_kernels/`` and ``reference/``.
"""

from __future__ import annotations

import functools
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
        optional: For each optional state, the option that decides whether a parameter has it. The optional states are
            the last ones in `states`.
        hyper: Type of the hyper-parameters, without the learning rate: a named tuple of floats in the order in which
            `csrc/formulas/<name>.h` reads them. `hyper_of` explains the names of its fields.
        formula: The formula in plain torch. `reference.update_` explains its arguments.
    """

    name: str
    options: tuple[str, ...]
    states: tuple[str, ...]
    codes: tuple[Code | None, ...]
    optional: tuple[str, ...]
    hyper: Any
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

    def hyper_of(self, options: Mapping[str, Any]) -> Any:
        """Return the hyper-parameters for the options of an optimizer.

        A field has the name of an option. A field `one_minus_x` is 1 minus the option x. `sign` is -1 if `maximize` is
        set, and 1 otherwise. `beta1` and `beta2` are the two numbers in `betas`.
        """
        values = {**options, "sign": -1.0 if options["maximize"] else 1.0}
        if "betas" in options:
            values["beta1"], values["beta2"] = options["betas"]
        columns = _columns(self.hyper)
        return self.hyper(*[1.0 - float(values[x]) if is_rest else float(values[x]) for x, is_rest in columns])


@functools.cache
def _columns(hyper: Any) -> list[tuple[str, bool]]:
    """Returns the option that each field is made from, and whether the field is 1 minus this option."""
    return [(field.removeprefix("one_minus_"), field.startswith("one_minus_")) for field in hyper._fields]


SGD = Family(
    "sgd", ("dampening",), ("momentum_buffer",), (MOMENTUM,), ("momentum",),
    namedtuple("SgdHyper", "momentum one_minus_dampening weight_decay nesterov sign"), reference.sgd.formula,
)  # fmt: skip

RMSPROP = Family(
    "rmsprop", ("alpha", "momentum"), ("square_avg", "momentum_buffer", "grad_avg"), (SECOND_MOMENT, MOMENTUM, None),
    ("momentum", "centered"),
    namedtuple("RmspropHyper", "alpha one_minus_alpha eps weight_decay sign momentum"), reference.rmsprop.formula,
)  # fmt: skip

ADAM = Family(
    "adam", ("amsgrad",), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), (MOMENTUM, SECOND_MOMENT, None), ("amsgrad",),
    namedtuple("AdamHyper", "one_minus_beta1 one_minus_beta2 eps weight_decay sign decoupled_weight_decay"),
    reference.adam.formula,
)  # fmt: skip

FAMILIES = {family.name: family for family in (SGD, RMSPROP, ADAM)}
