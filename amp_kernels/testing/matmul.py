"""Test cases for the matmul operators.

Errors are measured against a product in fp64, the truth. The rule of `error_and_allowed` (common.py) bounds them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import forced
from ..functional import addmm, linear, matmul
from ..functional.matmul import rounds_before_activation
from ..reference.matmul import activate
from .common import DTYPES, Case, Result, by_operator, randn, same_kind, surrounded, within

LOW = {name: dtype for name, dtype in DTYPES.items() if dtype is not torch.float32}
SIZES = (0, 1, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 1023)
LONG = (4095, 50257)
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh")


# Functions that copy a matrix, or a batch of matrices, into another layout. If the layout leaves memory between or
# around the elements, that memory is NaN.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": Tensor.clone,
    "column": lambda x: x.mT.clone(memory_format=torch.contiguous_format).mT,
    "padded": lambda x: surrounded(x, (*x.shape[:-1], -(-x.shape[-1] // 8) * 8 + 8), (..., slice(x.shape[-1]))),
    "padded_column": lambda x: LAYOUTS["padded"](x.mT).mT,
    "odd_pitch": lambda x: surrounded(x, (*x.shape[:-1], x.shape[-1] + 5 + x.shape[-1] % 2), (..., slice(x.shape[-1]))),
    "offset": lambda x: surrounded(x, (*x.shape[:-1], x.shape[-1] + 3), (..., slice(1, -2))),
    "every_other": lambda x: surrounded(x, (*x.shape[:-1], 2 * x.shape[-1]), (..., slice(None, None, 2))),
    "every_other_row": lambda x: surrounded(
        x, (*x.shape[:-2], 2 * x.shape[-2], x.shape[-1]), (..., slice(None, None, 2), slice(None))
    ),
}


def compare(name: str, ours: Tensor, theirs: Tensor, truth: Tensor) -> Result:
    """Apply the rule of `error_and_allowed`, but accept every correctly rounded result.

    In a result of few elements, torch's error may happen to be 0. The rule alone would then allow almost no error.
    """
    largest = truth.abs().max().item() if truth.numel() > 0 else 0.0
    rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(ours.dtype, 0.0)
    return within(name, ours.cpu(), theirs, truth, least=(1.001 * rounding if rounding else 2e-6) * largest)


def exact(argument: Tensor, activation: str | None) -> Tensor:
    """Apply an activation to fp64 numbers.

    torch computes gelu_tanh with 1 + tanh(u), which has no digits left for u < -19, not even in fp64.
    """
    if activation == "gelu_tanh":
        return argument * torch.sigmoid(math.sqrt(8 / math.pi) * (argument + 0.044715 * argument**3))
    return activate(argument, activation)


def _product(
    sizes: tuple[int, ...], layouts: tuple[str, str], dtype: torch.dtype, out: torch.dtype, device: torch.device,
    *, multiply: Callable[..., Tensor] = matmul,
) -> Iterator[Result]:  # fmt: skip
    *batch, m, n, k = sizes
    a, b = randn(*batch, m, k, dtype=dtype, seed=1), randn(*batch, k, n, dtype=dtype, seed=2)
    on_device = [LAYOUTS[layout](x.to(device)) for layout, x in zip(layouts, (a, b), strict=True)]
    theirs = a @ b if out == dtype else (a.float() @ b.float()).to(out)
    ours = multiply(*on_device, out_dtype=out)
    yield same_kind("dtype and shape", ours, theirs.shape, out)
    yield compare("product", ours, theirs, a.double() @ b.double())


def _by_element(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Call the operator itself with operands that cannot be read 16 bytes at a time.

    The public functions would copy them first. The code that reads single elements would then not run.
    """
    product: Tensor = torch.ops.amp_kernels.matmul(a, b, None, 1.0, 0.0, None, out_dtype, False, False)[0]
    return product


def _addmm(
    sizes: tuple[int, ...], beta: float, alpha: float, layout: str, dtype: torch.dtype, device: torch.device
) -> Iterator[Result]:
    *batch, m, n, k = sizes
    a, b = randn(*batch, m, k, dtype=dtype, seed=1), randn(*batch, k, n, dtype=dtype, seed=2)
    for shape in ((*batch, m, n), (n,), (1,), (m, 1)):
        input = randn(*shape, dtype=dtype, seed=3)
        truth = beta * input.double() + alpha * (a.double() @ b.double())
        theirs = (beta * input.float() + alpha * (a.float() @ b.float())).to(dtype)
        if beta == 0:  # the operator must not read `input`: a NaN would show
            input.fill_(math.nan)
        laid_out = LAYOUTS[layout](input.to(device)) if input.dim() > 1 else input.to(device)
        ours = addmm(laid_out, a.to(device), b.to(device), beta=beta, alpha=alpha)
        yield compare(f"input {tuple(shape)}", ours, theirs, truth)


def _linear(
    sizes: tuple[int, int, int], activation: Any, layouts: tuple[str, str], with_bias: bool, dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Result]:  # fmt: skip
    m, n, k = sizes
    tensors = [randn(m, k, dtype=dtype, seed=1), randn(n, k, dtype=dtype, seed=2) / max(k, 1) ** 0.5]
    tensors = [t.to(dtype) for t in tensors] + ([randn(n, dtype=dtype, seed=3)] if with_bias else [])
    grad = randn(m, n, dtype=dtype, seed=4)
    moved = [LAYOUTS[layout](t.to(device)) for layout, t in zip(layouts, tensors[:2], strict=True)]
    between = dtype if rounds_before_activation(moved[0]) else torch.float32

    def passes(cast: torch.dtype | None) -> list[Tensor]:
        """Return the result and the gradients, computed by torch in the dtype `cast`.

        If it is None, they are computed in fp32 and rounded, with the activation's argument rounded to `between`.
        """
        leaves = [t.to(cast or torch.float32).requires_grad_() for t in tensors]
        argument = F.linear(*leaves)
        result = exact(argument, activation) if cast else activate(argument.to(between).float(), activation)
        grads = torch.autograd.grad(result, leaves, grad.to(result.dtype))
        return [t.detach().to(cast or dtype) for t in (result, *grads)]

    leaves = [t.detach().requires_grad_() for t in (*moved, *(t.to(device) for t in tensors[2:]))]
    ours = linear(leaves[0], leaves[1], leaves[2] if with_bias else None, activation)
    grads = torch.autograd.grad(ours, leaves, LAYOUTS[layouts[0]](grad.to(device)))
    with torch.no_grad():
        again = linear(leaves[0], leaves[1], leaves[2] if with_bias else None, activation)
    # On a GPU cuBLAS multiplies if no backend, or Triton, is forced. If also no gradient is needed and there is a bias,
    # cuBLAS applies relu or gelu_tanh, too. The result may then have other bits than with the activation after the
    # product. So with cuBLAS the results with and without gradients are not compared with each other.
    if forced() not in (None, "triton") or not ours.is_cuda:
        yield Result("without gradients", float(not torch.equal(ours, again)), 0)
    # As in torch, the backward pass reads the argument of the activation (for relu the result) after it was rounded to
    # the operands' dtype. So with an activation, the errors of gradients may be four times the bound.
    slack = 1.0 if activation is None else 4.0
    names = ("result", "grad of x", "grad of weight", "grad of bias")
    theirs, truth = passes(None), passes(torch.float64)
    yield compare("without gradients", again, theirs[0], truth[0])
    for name, our, their, true in zip(names, (ours, *grads), theirs, truth, strict=False):
        result = compare(name, our.detach(), their, true)
        yield result._replace(allowed=result.allowed * (slack if name != "result" else 1.0))


def _cases() -> Iterator[Case]:
    plain = ("row", "row")
    for dtype_name, dtype in LOW.items():

        def case(op: str, name: str, body: Callable[..., Iterator[Result]], *rest: Any, d: str = dtype_name) -> Case:
            return Case(op, d, name, partial(body, *rest))

        for size in SIZES:
            for sizes in ((size, 33, 40), (33, size, 40), (33, 40, size)):
                yield case("matmul", "x".join(map(str, sizes)), _product, sizes, plain, dtype, dtype)
        for size in LONG:
            for sizes in ((size, 3, 5), (3, size, 5), (3, 5, size)):
                yield case("matmul", "x".join(map(str, sizes)), _product, sizes, plain, dtype, dtype)
        for left in LAYOUTS:
            for right in LAYOUTS:
                yield case("matmul", f"{left}_{right}", _product, (37, 41, 43), (left, right), dtype, dtype)
        for pair in (("row", "row"), ("row", "column"), ("column", "row"), ("column", "column")):
            name = "_".join(pair)
            yield case("matmul", f"aligned_{name}", _product, (136, 144, 96), pair, dtype, dtype)
            yield case("matmul", f"batched_{name}", _product, (3, 17, 19, 23), pair, dtype, dtype)
            yield case("matmul", f"few_rows_{name}", _product, (2, 130, 129), pair, dtype, dtype)
            yield case("matmul", f"few_rows_aligned_{name}", _product, (2, 136, 144), pair, dtype, dtype)
            yield case("matmul", f"fp32_out_{name}", _product, (33, 70, 65), pair, dtype, torch.float32)
        # These cases are made for 3 multiprocessors. If the environment variable AMP_KERNELS_MULTIPROCESSORS is 3, the
        # launcher counts 3 on any GPU (csrc/cuda/portable.h). It takes the tiles and splits with the least estimated
        # time: tiles of 128 x 128 for the "medium" sizes, and tiles of 128 x 256 for the "large" sizes. Each matrix of
        # these sizes is one tile. So a batch of 3 matrices gives every multiprocessor one tile. The tile of a single
        # matrix ("in_splits") is divided along k into three splits.
        for tile, (m, n), k in (("medium", (120, 125), 1600), ("large", (121, 250), 2600)):
            for left, right in itertools.product(("padded", "padded_column"), repeat=2):
                yield case("matmul", f"{tile}_{left}_{right}", _product, (3, m, n, 40), (left, right), dtype, dtype)
            yield case("matmul", f"{tile}_in_splits", _product, (m, n, k), ("padded", "padded_column"), dtype, dtype)
        for left, right in (("odd_pitch", "every_other"), ("every_other_row", "offset")):
            product = partial(_product, multiply=_by_element)
            yield case("matmul", f"by_element_{left}_{right}", product, (1, 37, 41, 43), (left, right), dtype, dtype)
        for beta, alpha in ((1.0, 1.0), (0.5, -2.0), (0.0, 1.0)):
            for layout in ("row", "column", "every_other"):
                name = f"beta_{beta:g}_alpha_{alpha:g}_{layout}"
                yield case("addmm", name, _addmm, (19, 21, 33), beta, alpha, layout, dtype)
        yield case("addmm", "batched", _addmm, (2, 19, 21, 33), 0.5, 2.0, "row", dtype)
        yield case("addmm", "nothing_to_sum", _addmm, (5, 6, 0), 0.5, 2.0, "row", dtype)
        for activation in ACTIVATIONS:
            for sizes in ((33, 40, 48), (17, 23, 23), (1, 9, 7), (5, 1, 3), (65, 130, 127)):
                name = f"{activation}_{'x'.join(map(str, sizes))}"
                yield case("linear", name, _linear, sizes, activation, plain, True, dtype)
            for layouts in (("column", "column"), ("odd_pitch", "offset"), ("every_other", "padded")):
                name = f"{activation}_{'_'.join(layouts)}"
                yield case("linear", name, _linear, (18, 21, 30), activation, layouts, True, dtype)
            yield case("linear", f"{activation}_no_bias", _linear, (18, 21, 30), activation, plain, False, dtype)


CASES = by_operator(_cases())
