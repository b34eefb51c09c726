"""Test cases for every operator.

`python -m amp_kernels verify` and the tests run the same cases. A case makes its inputs, runs one operator on one
backend, and checks the result. Most results may differ from an fp64 result. `error_and_allowed` in `common.py` computes
how much they may differ, from the error of torch's result. The results of the int8 operators, except `int8_linear`,
must equal those of the reference on the CPU bit for bit. So must the weights, masters and states of updates that round
only once. Unscaled gradients must equal those of torch bit for bit.

This runs all cases of one operator on the CPU:

```python
for case in testing.CASES["sgd_"]:
    for result in case.run("cpu"):
        assert result.passed, f"{case}: {result}"
```
"""

from . import exponents, int8, matmul, unscale, updates
from .common import Case, Result

CASES: dict[str, tuple[Case, ...]] = {
    **unscale.CASES,
    **exponents.CASES,
    **updates.CASES,
    **int8.CASES,
    **matmul.CASES,
}
"""The cases of each operator, by the operator's name."""

__all__ = ["CASES", "Case", "Result"]
