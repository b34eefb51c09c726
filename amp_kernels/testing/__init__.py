"""Test cases for every operator, the rule that bounds errors, and the inputs of the cases.

`python -m amp_kernels verify` and the tests run the same cases. A case makes its inputs, runs one operator on one
backend, and compares the result with fp64 and torch, or bit for bit with the reference on the CPU:

```python
for case in testing.CASES["sgd_"]:
    for result in case.run("cpu"):
        assert result.passed, f"{case}: {result}"
```
"""

from . import int8, matmul, unscale, updates
from .common import (
    DTYPES,
    LAYOUTS,
    SHAPE,
    SIZES,
    Case,
    Result,
    changed,
    differing,
    error_and_allowed,
    mixed,
    randn,
    rounded_once,
    written_outside,
)
from .updates import UpdateInputs, torch_step

CASES: dict[str, tuple[Case, ...]] = {**unscale.CASES, **updates.CASES, **int8.CASES, **matmul.CASES}
"""The cases of every operator, by its name."""

__all__ = [
    "CASES",
    "DTYPES",
    "LAYOUTS",
    "SHAPE",
    "SIZES",
    "Case",
    "Result",
    "UpdateInputs",
    "changed",
    "differing",
    "error_and_allowed",
    "mixed",
    "randn",
    "rounded_once",
    "torch_step",
    "written_outside",
]
