"""matmul: every backend under the error rule, what is padded and when, gradients, errors."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_kernels
from amp_kernels import testing, torch_private
from amp_kernels.ops import matmul as operators
from amp_kernels.testing import matmul as cases

OPS = torch.ops.amp_kernels
FAMILY: Any = importlib.import_module("amp_kernels.functional.matmul")  # the package's name for it is a function
LAYOUTS = cases.LAYOUTS
ALL = [case for op in cases.CASES.values() for case in op]
SMOOTH = ("gelu", "gelu_tanh")
LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.op}-{case}")
def test_case(case: testing.Case, backend: str, device: torch.device) -> None:
    for result in case.body(device):
        assert result.passed, f"{case}: {result}"


def randn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return testing.common.randn(*shape, dtype=dtype, seed=seed)


# ---------------------------------------------------------------------------------------------------- as torch's
@LOW
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 4, 5), (5, 3)), ((2, 4, 5), (5,)), ((5,), (2, 5, 3)),
        ((2, 1, 4, 5), (3, 5, 6)), ((1, 4, 5), (7, 5, 6)), ((2, 0, 5), (5, 3)), ((0, 4, 5), (0, 5, 3)),
        ((4, 0), (0, 3)),
    ],
)  # fmt: skip
def test_shapes_are_torchs(left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b = randn(*left, dtype=dtype), randn(*right, dtype=dtype, seed=1)
    expected = torch.matmul(a.float(), b.float())
    ours = amp_kernels.matmul(a, b)
    assert ours.shape == expected.shape and ours.dtype == dtype
    torch.testing.assert_close(ours.float(), expected, rtol=2e-2, atol=2e-2)


@LOW
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0])
def test_alpha_of_0(
    beta: float, layout: str, batch: tuple[int, ...], dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """torch 2.13's baddbmm of bf16 ignores beta then, of sizes that oneDNN takes."""
    a, b = (LAYOUTS[layout](randn(*batch, *s, dtype=dtype).to(device)) for s in ((5, 40), (40, 48)))
    input = randn(*batch, 5, 48, dtype=dtype, seed=2).to(device)
    y = amp_kernels.addmm(input, a, b, beta=beta, alpha=0)
    assert torch.equal(y, (beta * input.float()).to(dtype))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("has_strides", [(True, False), (False, True), (True, True)], ids=["x", "bias", "both"])
@pytest.mark.parametrize("shape", [(33,), (3, 20, 33), (2, 3, 20, 33)], ids=str)
def test_bf16_is_rounded_once(shape: tuple[int, ...], has_strides: tuple[bool, bool], activation: Any) -> None:
    """torch's linear multiplies, rounds and then adds the bias if it or x has strides, unless x is a matrix."""
    x, weight, bias = randn(*shape), randn(70, 33, seed=1) / 8, randn(70, seed=2)
    x, weight, bias = (t.bfloat16() for t in (x, weight, bias))
    if has_strides[0]:
        x = LAYOUTS["every_other"](x) if x.dim() > 1 else LAYOUTS["every_other"](x[None])[0]
    if has_strides[1]:
        bias = torch.stack([bias, bias], -1)[:, 0]
    argument = F.linear(x.double(), weight.double(), bias.double()).bfloat16()
    once = cases.activate(argument.double(), activation).bfloat16()
    y = amp_kernels.linear(x, weight, bias, activation)
    assert (y != once).float().mean() < 0.01  # fp32 sums may lie on the other side of a tie; two roundings: 25%


@pytest.mark.parametrize("given", [(8, 5), (8, 40)], ids=str)
def test_fp8_is_refused(given: tuple[int, int]) -> None:
    x = randn(*given).to(torch.float8_e4m3fn)
    for call in (
        lambda: amp_kernels.matmul(x, x.t()),
        lambda: amp_kernels.addmm(x, x, x.t()),
        lambda: amp_kernels.linear(x, x),
    ):
        with pytest.raises(TypeError, match=r"at least 16 bits per element, got torch.float8_e4m3fn; convert them"):
            call()


def test_fp32_is_torchs() -> None:
    a, b, bias = torch.randn(4, 5), torch.randn(5, 3), torch.randn(3)
    assert torch.equal(amp_kernels.matmul(a, b), a @ b)
    assert torch.equal(amp_kernels.addmm(bias, a, b, beta=2.0), torch.addmm(bias, a, b, beta=2.0))
    assert torch.equal(amp_kernels.linear(a, b.t(), bias, "gelu"), F.gelu(F.linear(a, b.t(), bias)))
    assert amp_kernels.matmul(a, b, out_dtype=torch.float16).dtype == torch.float16


def test_out_dtype_under_an_autocast_to_another() -> None:
    a, b = testing.common.randn(3, 8, dtype=torch.bfloat16), testing.common.randn(8, 5, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16):
        assert amp_kernels.matmul(a, b).dtype == torch.float16
        assert amp_kernels.matmul(a, b, out_dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("under", [torch.float16, torch.bfloat16], ids=str)
@LOW
def test_fp32_results_stay_exact_under_autocast(dtype: torch.dtype, under: torch.dtype) -> None:
    a, b = randn(20, 256, dtype=dtype), randn(256, 30, dtype=dtype, seed=1)
    with torch.autocast("cpu", under):
        ours = amp_kernels.matmul(a, b, out_dtype=torch.float32)
    a, b = a.to(under), b.to(under)
    assert (ours - a.double() @ b.double()).abs().max() < 1e-4


@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_traced(activation: Any) -> None:
    x, weight = randn(4, 16, dtype=torch.bfloat16), randn(8, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: amp_kernels.linear(x, weight, None, activation), (x,))
        torch.testing.assert_close(traced(2 * x), amp_kernels.linear(2 * x, weight, None, activation))


@LOW
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_nothing_to_sum(activation: Any, rows: int, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    x, weight, bias = (randn(*s, dtype=dtype).to(device) for s in ((rows, 0), (4, 0), (4,)))
    y = amp_kernels.linear(x, weight, bias, activation)
    expected = cases.activate(bias.float(), activation).to(dtype)
    torch.testing.assert_close(y, expected.expand(rows, 4))


def test_autocast() -> None:
    x, weight = torch.randn(3, 4), torch.nn.Parameter(torch.randn(5, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = amp_kernels.linear(x, weight, torch.randn(5))
        assert y.dtype == amp_kernels.matmul(x, weight.t()).dtype == torch.bfloat16
    y.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
@pytest.mark.parametrize("dtype", cases.LOW.values(), ids=cases.LOW)
@pytest.mark.parametrize("rows", [5, 40])
def test_nan_stays_in_its_row(rows: int, dtype: torch.dtype, activation: Any, keeps: bool) -> None:
    x = randn(rows, 33, dtype=dtype)
    x[2] = torch.nan
    if activation not in SMOOTH:  # whose GELU is inf or NaN, by torch's own kernels too
        x[3, 7] = torch.inf
    weight, bias = randn(7, 33, dtype=dtype), randn(7, dtype=dtype)
    y = amp_kernels.linear(x, weight.requires_grad_(keeps), bias, activation)
    true = cases.activate(F.linear(x.float(), weight.float(), bias.float()), activation)
    assert torch.equal(y.isnan(), true.isnan()) and y[2].isnan().all()
    assert torch.equal(y.isposinf(), true.isposinf()) and y[[0, 1, 4]].isfinite().all()


@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_a_bias_with_strides(activation: Any) -> None:
    x, weight, bias = randn(20, 33, dtype=torch.bfloat16), randn(7, 33, dtype=torch.bfloat16), randn(2, 7).bfloat16()
    y = amp_kernels.linear(x, weight, bias.T.contiguous().T[1], activation)
    truth = cases.activate(F.linear(x.double(), weight.double(), bias[1].double()), activation)
    assert cases.compare("linear", y, truth.bfloat16(), truth).passed


def test_the_bias_is_added_before_rounding_to_x_with_gaps(backend: str, device: torch.device) -> None:
    """torch's `linear` adds it afterwards if x has three dimensions and is not contiguous: 257 becomes 256, then 0."""
    x = torch.ones(2, 3, 264, dtype=torch.bfloat16, device=device).transpose(0, 1)
    weight = (torch.arange(264) < 257).repeat(8, 1).to(x)
    assert amp_kernels.linear(x, weight, torch.full_like(weight[:, 0], -256)).eq(1).all()


@pytest.mark.parametrize("dtype", cases.LOW.values(), ids=cases.LOW)
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_transforms_of_torch_func(activation: Any, dtype: torch.dtype) -> None:
    x, weight = randn(3, 5, 8, dtype=dtype), randn(7, 8, dtype=dtype)

    def ours(x: Tensor) -> Tensor:
        return amp_kernels.linear(x, weight, None, activation)

    def torchs(x: Tensor) -> Tensor:
        return cases.activate(F.linear(x, weight), activation)

    tolerance = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(torch.func.vmap(ours)(x), torchs(x), **tolerance)
    for our, their in zip(*(torch.func.jvp(f, (x,), (x,)) for f in (ours, torchs)), strict=True):
        torch.testing.assert_close(our, their, **tolerance)


def test_a_torch_that_cannot_say_whether_a_transform_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    x, weight, bias = randn(20, 33), randn(7, 33, seed=1), randn(7, seed=2)
    assert torch.equal(amp_kernels.linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(amp_kernels.matmul(x, weight.t()), x @ weight.t())


# ------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_double_backward(activation: Any) -> None:
    # So many that the largest errors of two ways to round are about the same.
    tensors = [randn(64, 33), randn(40, 33, seed=1) / 6, randn(40, seed=2)]

    def penalty(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        wide = torch.promote_types(dtype, torch.float32)
        (grad,) = torch.autograd.grad(function(*leaves).to(wide).square().sum(), leaves[0], create_graph=True)
        return list(torch.autograd.grad(grad.to(wide).square().sum(), leaves[:2]))

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return cases.activate(F.linear(x, weight, bias), activation)

    ours = penalty(lambda *t: amp_kernels.linear(*t, activation), torch.float16)
    for our, their, true in zip(ours, penalty(by_torch, torch.float16), penalty(by_torch, torch.float64), strict=True):
        error, allowed = testing.common.error_and_allowed(our, their, true)
        assert error <= allowed


@LOW
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_gradients_of_addmm_have_its_factors(
    batch: tuple[int, ...], dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    tensors = [randn(*batch, *shape, dtype=dtype, seed=i) for i, shape in enumerate([(40, 33), (40, 50), (50, 33)])]
    grad = randn(*batch, 40, 33, dtype=dtype, seed=3)

    def gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*leaves), leaves, grad.to(device, dtype))

    def by_torch(input: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return 0.5 * input - 2 * (a @ b)

    ours = gradients(lambda *t: amp_kernels.addmm(*t, beta=0.5, alpha=-2.0), dtype)
    for our, their, true in zip(ours, gradients(by_torch, dtype), gradients(by_torch, torch.float64), strict=True):
        error, allowed = testing.common.error_and_allowed(our, their, true)
        assert error <= allowed


@pytest.mark.parametrize("again", [False, True], ids=["once", "to_be_differentiated"])
@pytest.mark.parametrize("activation", SMOOTH)
@LOW
def test_the_derivative_is_of_this_gelu(
    dtype: torch.dtype, activation: Any, again: bool, backend: str, device: torch.device
) -> None:
    """Between -4 and -3, where those of both differ by 3% of the largest, and elsewhere by less than bf16 shows."""
    x = torch.linspace(-4, -3, 65).to(device, dtype)[:, None].requires_grad_()
    one = torch.ones(1, 1, dtype=dtype, device=device)
    y = amp_kernels.linear(x, one, None, activation)
    (ours,) = torch.autograd.grad(y.sum(), x, create_graph=again)
    wide = x.detach().cpu().double().requires_grad_()
    (true,) = torch.autograd.grad(cases.activate(wide, activation).sum(), wide)
    assert cases.compare("gradient", ours.detach(), true.to(dtype), true).passed


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool]]:
    """The shape of each product that an autograd function makes, and whether an activation's argument is kept."""
    made: list[tuple[tuple[int, ...], bool]] = []
    multiply = operators.multiply

    def counting(engine: str, a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Any:
        made.append(((a.shape[-2], b.shape[-1]), options.get("needs_pre", False)))
        return multiply(engine, a, b, *rest, **options)

    monkeypatch.setattr(operators, "multiply", counting)
    return made


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_operands_are_saved_once(activation: Any) -> None:
    """A hook for saved tensors, as one that compresses activations, would otherwise keep `x` twice."""
    x, weight = randn(20, 9).requires_grad_(), randn(5, 9).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        amp_kernels.linear(x, weight, None, activation)
    assert len(saved) == 2 + (activation is not None) and {t.data_ptr() for t in (x, weight)} <= {
        t.data_ptr() for t in saved
    }


@pytest.mark.parametrize("needed", range(3))
def test_only_what_is_needed_is_computed(needed: int, products: list[Any]) -> None:
    tensors = [randn(6, 9), randn(5, 9), randn(5)]
    tensors[needed].requires_grad_()
    amp_kernels.linear(*tensors).sum().backward()
    assert [shape for shape, _ in products[1:]] == [[(6, 9)], [(5, 9)], []][needed]


def test_gelu_without_gradients_writes_no_argument(products: list[Any]) -> None:
    x, weight = randn(6, 9), randn(5, 9)
    amp_kernels.linear(x, weight, None, "gelu")
    with torch.no_grad():
        amp_kernels.linear(x, weight.requires_grad_(), None, "gelu")
    amp_kernels.linear(x, weight, None, "gelu")
    amp_kernels.linear(x, weight, None, "relu")
    assert [keeps for _, keeps in products] == [False, False, True, False]


# ---------------------------------------------------------------------------------------------- compiler and checks
def samples() -> list[Any]:
    a, b, input = randn(4, 6), randn(6, 3, seed=1), randn(3, seed=2).expand(4, 3)
    batches = randn(4, 6).expand(2, 4, 6), randn(2, 6, 5)
    low, wide = torch.float16, torch.float32
    return [
        pytest.param("matmul", (a, b, None, 1.0, 0.0, None, wide, False, False), id="mm"),
        pytest.param("matmul", (a, b, input, 2.0, 0.5, "gelu", low, True, True), id="addmm-gelu"),
        pytest.param("matmul", (a, b, input, 2.0, 0.5, "relu", low, True, False), id="addmm-relu"),
        pytest.param("matmul", (*batches, None, 1.0, 0.0, None, low, True, False), id="bmm"),
        pytest.param("copy_pad", (a, None, None, False, len(a)), id="copy"),
        pytest.param("copy_pad", (a, None, None, False, 7), id="more-rows"),
        pytest.param("copy_pad", (a, randn(4, 6, seed=3), "gelu_tanh", True, 4), id="derivative-and-sums"),
        pytest.param("copy_pad", (randn(4, 8), None, None, True, 4), id="sums-of-what-is-aligned"),
        pytest.param("copy_pad", (randn(0, 6), None, None, True, 8), id="nothing"),
        *padded_samples(),
    ]


def padded_samples() -> Iterator[Any]:
    """Products of torch, with operands of every layout. Some operands are padded."""
    low = torch.float16
    x, weight, bias = randn(18, 21), randn(20, 21, seed=1), randn(20, seed=2)
    term, fine = bias.expand(18, 20), (randn(24, 40), randn(40, 16, seed=1))
    for name, operands, input, activation, needs_pre, most in (
        ("mm", (x, weight.t()), None, None, False, 0),
        ("small", (x, weight.t()), None, None, False, 18 * 20 * 21),
        ("few", (x[:16], weight.t()), None, None, False, 0),
        ("no-rows", (x[:0], weight.t()), None, None, False, 0),
        ("nothing-to-sum", (x[:, :0], weight[:, :0].t()), term, "relu", False, 0),
        ("bias", (x, weight.t()), term, None, False, 0),
        ("row-of-one", (x[:1], weight.t()), bias[None], "relu", False, 0),
        ("relu", (x, weight.t()), term, "relu", False, 0),
        ("relu-no-bias", (x, weight.t()), None, "relu", False, 0),
        ("gelu", (x, weight.t()), term, "gelu", True, 0),
        ("gelu_tanh", (x, weight.t()), term, "gelu_tanh", False, 0),
        ("gelu_tanh-kept", (x, weight.t()), term, "gelu_tanh", True, 0),
        ("aligned", fine, randn(16, seed=3).expand(24, 16), "relu", False, 0),
        ("columns", (randn(21, 18).t(), randn(21, 20)), None, None, False, 0),
        ("batches", (randn(2, 18, 21), randn(2, 20, 21).mT), None, None, False, 0),
        ("term", (x, weight.t()), randn(18, 20), None, False, 0),
    ):
        factors = (1.0, 1.0, activation, low, True, needs_pre, most, 0)
        yield pytest.param("padded_matmul", (*operands, input, *factors), id=f"padded-{name}")
    yield pytest.param(
        "padded_matmul", (x, weight.t(), randn(18, 20), 2.0, 0.5, None, low, True, False, 0, 0), id="padded-factors"
    )
    for name, saved, activation, needs in (
        ("linear", None, None, (True, True, True)),
        ("no-bias", None, None, (True, True, False)),
        ("weight-alone", None, None, (False, True, False)),
        ("x-alone", None, None, (True, False, False)),
        ("relu", randn(18, 20), "relu", (True, True, True)),
        ("gelu", randn(18, 20), "gelu", (True, True, False)),
    ):
        for kind, operands in (("padded", (F.pad(x, (0, 3)), F.pad(weight, (0, 3, 0, 4)))), ("odd", (x, weight))):
            arguments = (randn(18, 20, seed=4), *operands, saved, activation, *needs, 21, 0)
            yield pytest.param("padded_linear_backward", arguments, id=f"{kind}-backward-{name}")
    # The copy of a column-major x has 24 rows. With 8 outputs, neither operand of the second product is padded.
    arguments = (
        randn(18, 8, seed=4),
        F.pad(x, (0, 3, 0, 6)),
        F.pad(weight[:8], (0, 3)),
        None,
        None,
        True,
        True,
        False,
        21,
        0,
    )
    yield pytest.param("padded_linear_backward", arguments, id="few-outputs-backward")


@pytest.mark.parametrize(("op", "arguments"), samples())
def test_opcheck(op: str, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(getattr(OPS, op).default, arguments)


@pytest.mark.parametrize(("op", "arguments"), samples())
def test_operators_are_their_reference(op: str, arguments: tuple[Any, ...], backend: str, device: torch.device) -> None:
    """Shapes and strides as tracing is told, values under the error rule."""
    on_device = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    ours = getattr(OPS, op)(*on_device)
    with FakeTensorMode() as mode:
        fakes = getattr(OPS, op)(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in on_device))
    with amp_kernels.use_backend("reference"):
        theirs = getattr(OPS, op)(*on_device)
    for our, fake, their in zip(ours, fakes, theirs, strict=True):
        assert (our.shape, our.stride(), our.dtype) == (fake.shape, fake.stride(), fake.dtype)
        assert cases.compare(op, our.cpu(), their.cpu(), their.cpu().double()).passed


# What compiled code does is as precise, but Inductor's GELU and fused additions round elsewhere.
@pytest.mark.parametrize(
    ("dtype", "rows", "activation"),
    [
        (torch.float16, 7, None),
        (torch.bfloat16, 20, "gelu"),
    ],
    ids=str,
)
def test_compiled_is_eager(dtype: torch.dtype, rows: int, activation: Any) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = amp_kernels.linear(x, weight, bias, activation)
        return amp_kernels.matmul(hidden, weight).float().square().mean()

    torch.compiler.reset()
    results = []
    for call in (function, torch.compile(function, fullgraph=True)):
        leaves = [randn(1, rows, 5).to(dtype), randn(9, 5, seed=1).to(dtype), randn(9).to(dtype)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        loss = call(*leaves)
        loss.backward()
        results.append([loss.detach(), *(t.grad for t in leaves)])
    tolerance = 2e-3 if dtype is torch.float16 else 2e-2
    for ours, eager in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@LOW
@pytest.mark.parametrize("rows", [7, 40])
def test_compiled_is_eager_to_the_bit_where_torch_multiplies(rows: int, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    x, weight, bias = randn(rows, 33).to(dtype), randn(9, 33, seed=1).to(dtype), randn(9).to(dtype)
    for activation in (None, "relu"):
        compiled = torch.compile(amp_kernels.linear, fullgraph=True)
        arguments = (x, weight, bias, activation)
        assert torch.equal(compiled(*arguments), amp_kernels.linear(*arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda x, w: amp_kernels.matmul(x, w.t().bfloat16()),
            TypeError,
            "b must be torch.float16 as the first operand",
        ),
        (lambda x, w: amp_kernels.matmul(x, w), ValueError, r"b must be a matrix that a can be multiplied with"),
        (lambda x, w: amp_kernels.matmul(x, w.t(), out_dtype=torch.int8), TypeError, "out_dtype must be float32"),
        (lambda x, w: amp_kernels.matmul(x, w.t(), out_dtype="x"), TypeError, "matmul: out_dtype must be .* got 'x'"),
        (
            lambda x, w: amp_kernels.matmul(x.float(), w.t().float(), out_dtype=torch.int8),
            TypeError,
            "matmul: out_dtype must be float32, .* got torch.int8; leave it out",
        ),
        (
            lambda x, w: amp_kernels.addmm(x[:, :3], x, w.t(), out_dtype="x"),
            TypeError,
            "addmm: out_dtype must be .* got 'x'",
        ),
        (lambda x, w: amp_kernels.matmul(None, w, out_dtype=torch.float16), TypeError, "matmul: a must be a Tensor"),
        (lambda x, w: amp_kernels.matmul(x, x[0, 0]), ValueError, "at least 1 dimension"),
        (
            lambda x, w: amp_kernels.matmul(x.float(), x[0, 0].float()),
            RuntimeError,
            r"matmul: operands must be .*, got float32 \(4, 6\) on cpu, float32 \(\) on cpu; torch says: both",
        ),
        (lambda x, w: amp_kernels.addmm(x, x[0], w.t()), ValueError, "must be two matrices or two batches of them"),
        (
            lambda x, w: amp_kernels.linear(x[0, 0], w),
            ValueError,
            r"linear: x and weight must be .*, got \(\) and \(3, 6",
        ),
        (
            lambda x, w: amp_kernels.linear(x[0, 0].float(), w.float()),
            RuntimeError,
            r"linear: operands must be valid for torch, got float32 \(\) on cpu",
        ),
        (
            lambda x, w: amp_kernels.linear(x[0, 0].bfloat16(), w.bfloat16(), None, "gelu"),
            ValueError,
            "x and weight must",
        ),
        (lambda x, w: amp_kernels.addmm(x.bfloat16()[:, :3], x, w.t()), TypeError, "input must be torch.float16"),
        (
            lambda x, w: amp_kernels.linear(x, w.t()),
            ValueError,
            r"x and weight must be \[..., in_features\] and .*, got \(4, 6\) and \(6, 3\)",
        ),
        (lambda x, w: amp_kernels.linear(x, w, randn(4)), ValueError, r"bias must have shape \(3,\), got \(4,\)"),
        (
            lambda x, w: amp_kernels.linear(x.bfloat16(), w.bfloat16(), randn(1, 3).bfloat16(), "relu"),
            ValueError,
            r"bias must have shape \(3,\), got \(1, 3\)",
        ),
        (
            lambda x, w: amp_kernels.linear(x, w, activation="silu"),
            ValueError,
            "activation must be one of None, 'relu'",
        ),
        (lambda x, w: amp_kernels.matmul(x, None), TypeError, "matmul: b must be a Tensor, got NoneType"),
        (lambda x, w: amp_kernels.addmm(1.0, x, w.t()), TypeError, "addmm: input must be a Tensor, got float"),
        (lambda x, w: amp_kernels.linear(x, None), TypeError, "linear: weight must be a Tensor, got NoneType"),
        (lambda x, w: amp_kernels.linear(x, w, 1.0), TypeError, "linear: bias must be a Tensor, got float"),
        (lambda x, w: amp_kernels.pad_to_multiple(x, 0), ValueError, "multiple must be at least 1, got 0"),
        (lambda x, w: amp_kernels.pad_to_multiple(None), TypeError, "x must be a Tensor, got NoneType"),
        (lambda x, w: amp_kernels.pad_to_multiple(x, None), TypeError, "multiple must be an int, got None"),
        (lambda x, w: amp_kernels.pad_to_multiple(x, 2.5), TypeError, "multiple must be an int, got 2.5"),
        (lambda x, w: amp_kernels.pad_to_multiple(x[0, 0]), ValueError, "must have a last dimension to pad"),
    ],
)
def test_bad_input_gets_a_sentence(call: Callable[..., Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call(randn(4, 6), randn(3, 6))


def test_the_package_can_be_imported_where_tensors_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    with FakeTensorMode():
        assert torch_private._mixes_rows()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not torch_private._mixes_rows()


# ---------------------------------------------------------------------------------------------------------- padding
def test_pad_to_multiple() -> None:
    x = randn(3, 1023).requires_grad_()
    view = amp_kernels.pad_to_multiple(x)
    assert view.shape == x.shape and view.stride() == (1024, 1) and torch.equal(view, x)
    assert view.detach().as_strided((3, 1), (1024, 1), 1023).count_nonzero() == 0
    view.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]
    assert amp_kernels.pad_to_multiple(torch.ones(2, 16)).stride() == (16, 1)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda: torch.empty(5, 16), True),
        (lambda: torch.empty(5, 17), False),
        (lambda: torch.empty(5, 24)[:, :17], True),  # only the pitch counts
        (lambda: torch.empty(16, 5).t(), False),
        (lambda: torch.empty(5, 16).t(), True),
        (lambda: torch.empty(5, 17).t(), False),
        (lambda: torch.empty(1, 17), True),
        (lambda: torch.empty(16, 32)[:, ::2], False),
        (lambda: torch.empty(3, 5, 16), True),
        (lambda: torch.empty(3, 5, 24)[:, ::2, :17], True),
        (lambda: torch.empty(3, 81)[:, :80].view(3, 5, 16), False),  # matrices that begin unaligned
        (lambda: torch.empty(81)[1:].view(5, 16), False),
        (lambda: torch.empty(88)[8:].view(5, 16), True),
    ],
)
def test_what_can_be_loaded_16_bytes_at_a_time(view: Callable[[], Tensor], expected: bool) -> None:
    x = view()
    memory = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.float16)
    assert operators.is_aligned(memory.as_strided(x.shape, x.stride(), x.storage_offset())) is expected


@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_is_read_behind_a_storage(transposed: bool, backend: str, device: torch.device) -> None:
    """Rows that are 40 apart, the last without padding behind it."""

    def ending(*shape: int, seed: int) -> Tensor:
        return torch.empty_strided(shape, (40, 1), dtype=torch.float16, device=device).copy_(randn(*shape, seed=seed))

    a, b = ending(33, 35, seed=1), ending(35, 37, seed=2)
    if transposed:
        a, b = b.t(), a.t()
    expected = (a.cpu().double() @ b.cpu().double()).half()
    torch.testing.assert_close(amp_kernels.matmul(a, b).cpu(), expected, rtol=2e-2, atol=2e-2)


def test_odd_operands_are_padded_on_a_gpu() -> None:
    sizes = ((1024, 1024), (1024, 50264))
    with FakeTensorMode():
        x, weight = (torch.empty(s, dtype=torch.float16, device="cuda") for s in ((1024, 1023), (50257, 1023)))
        assert FAMILY.engine_of("linear", x.dtype, "cuda") == "cublas"
        assert operators.copies_of("cublas", x, weight.t()) == sizes
        assert operators.copies_of("cuda", x, weight.t()) == ((1024, 1023), (1023, 50257))
        assert operators.copies_of("triton", x.narrow(0, 0, 17), weight.t()) == ((17, 1024), (1024, 50264))
        assert operators.copies_of("reference", x, weight.t()) == (None, None)
        assert operators.copies_of("cublas", x.narrow(0, 0, 8), weight.t()) == (None, None)  # bound by the weight
        empty = x.narrow(1, 0, 0), weight.t().narrow(0, 0, 0)
        assert operators.copies_of("cublas", *empty) == (None, None)
        assert amp_kernels.linear(x, weight, None, "gelu").shape == (1024, 50257)  # torch's
        # Without a GPU autograd takes none of its tensors, not even fake ones. So the operators are called.
        arguments = (None, 1.0, 1.0, "gelu", x.dtype, True, True, operators.MIN_WORK, 0)
        out, pre, left, right = operators.padded_matmul(x, weight.t(), *arguments)
        assert out.stride() == pre.stride() == (50264, 1)
        assert (left.shape, left.stride()) == (sizes[0], (1024, 1))
        assert (right.shape, right.stride()) == (sizes[1], (1, 1024))
        needs = (True, True, True)
        grad_x, grad_weight, sums = operators.padded_linear_backward(
            out, left, right.t(), pre, "gelu", *needs, 1023, operators.MIN_WORK
        )
        assert (grad_x.shape, grad_x.stride()) == (x.shape, (1024, 1)) and sums.shape == (50257,)
        assert grad_weight.is_contiguous() and grad_weight.shape == weight.shape  # as a parameter's gradient must be


@pytest.mark.parametrize("op", ["matmul", "addmm", "linear"])
def test_products_without_memory_have_shapes_whatever_backend_is_forced(op: str) -> None:
    operands = (torch.empty(8, 8, dtype=torch.bfloat16, device="meta"),) * (3 if op == "addmm" else 2)
    with amp_kernels.use_backend("cpu"):
        assert getattr(amp_kernels, op)(*operands).shape == (8, 8)


def test_explain_refuses_the_backend_of_cpus_for_a_gpu() -> None:
    with amp_kernels.use_backend("cpu"), pytest.raises(RuntimeError, match="'cpu' cannot serve cuda tensors"):
        amp_kernels.explain((8, 8), (8, 8))


@pytest.mark.parametrize("rows", [1, 2])
def test_cublas_gets_a_bias_for_one_row_too(rows: int) -> None:
    """Whose stride is not 0, unlike that of a row that is repeated."""
    bias = operators._bias_of(torch.arange(5.0).expand(rows, 5), torch.ones(3, 8))
    assert bias.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert operators._bias_of(torch.ones(2, 5), torch.ones(3, 8)) is None


@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
@pytest.mark.parametrize("rows", [8, 64])
def test_our_kernels_multiply_on_a_gpu_only_where_they_are_forced(
    rows: int, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unforced = amp_kernels.explain((rows, 1023), (1023, 4096), activation)
    is_pass = activation not in (None, "relu")
    assert unforced.engine == "cublas" and (f"{activation} is a second pass" in unforced.reason) == is_pass
    monkeypatch.setattr(FAMILY, "forced", lambda: "cuda")
    assert amp_kernels.explain((rows, 1023), (1023, 4096), activation).engine == "cuda"


def test_triton_pads_and_torch_multiplies_where_triton_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILY, "forced", lambda: "triton")
    explanation = amp_kernels.explain((17, 1023), (1023, 4096))
    assert explanation.engine == "triton" and [*explanation.copies] == ["a", "b"]
    assert "so torch multiplies them" in explanation.reason


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton serves CPU tensors here")
@pytest.mark.parametrize("op", ["matmul", "addmm", "linear"])
def test_products_refuse_triton_where_it_cannot_serve(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILY, "forced", lambda: "triton")
    a = torch.ones(8, 8, dtype=torch.bfloat16)  # needs no copy, so that no operator is called
    with pytest.raises(RuntimeError, match="'triton' cannot serve cpu tensors"):
        getattr(amp_kernels, op)(*(a,) * (3 if op == "addmm" else 2))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Products of CPU tensors are computed as those of CUDA tensors: by torch, on padded copies, with activations.

    The list gets the argument `use_gelu` of each call of `_addmm_activation`.
    """
    calls = []

    def addmm_activation(bias: Tensor, a: Tensor, b: Tensor, *, use_gelu: bool = False) -> Tensor:
        """As for a CUDA tensor: gelu is the tanh form. For a CPU tensor torch would take erf."""
        calls.append(use_gelu)
        argument = torch.addmm(bias.float(), a.float(), b.float())
        return cases.activate(argument, "gelu_tanh" if use_gelu else "relu").to(a.dtype)

    monkeypatch.setattr(torch, "_addmm_activation", addmm_activation)
    monkeypatch.setattr(FAMILY, "engine_of", lambda *_: operators.LIBRARY)
    monkeypatch.setattr(operators, "MIN_WORK", 0)
    monkeypatch.setattr(operators, "FEW_ROWS", 0)
    return calls


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_activations_that_cublas_applies(
    activation: Any, with_bias: bool, requires_grad: bool, as_on_a_gpu: list[bool]
) -> None:
    """In inference relu and gelu_tanh. A backward pass needs the argument of gelu_tanh, which cuBLAS does not keep."""
    x, weight = (randn(*shape, dtype=torch.bfloat16).requires_grad_(requires_grad) for shape in ((20, 33), (7, 33)))
    bias = randn(7, dtype=torch.bfloat16) if with_bias else None
    y = amp_kernels.linear(x, weight, bias, activation)
    expected = {"relu": [False], "gelu_tanh": [] if requires_grad else [True]}
    assert as_on_a_gpu == (expected.get(activation, []) if with_bias else [])
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(y.double(), cases.activate(wide, activation), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "case",
    [case for case in ALL if case.dtype == "bf16" and "fp32_out" not in case.name],  # which torch has on a GPU alone
    ids=lambda case: f"{case.op}-{case}",
)
def test_case_as_a_gpu_does_it(case: testing.Case) -> None:
    for result in case.body(torch.device("cpu")):
        is_equality = result.name == "without gradients" and result.allowed == 0  # which cuBLAS does not promise
        assert is_equality or result.passed, f"{case}: {result}"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_padded_results_may_be_written_in_place() -> None:
    x, weight = (randn(*s, dtype=torch.bfloat16).requires_grad_() for s in ((20, 33), (7, 33)))
    y = amp_kernels.linear(x, weight)
    assert y.stride() == (8, 1)
    y.relu_().sum().backward()
    expected = torch.autograd.grad(F.relu(F.linear(x, weight)).sum(), (x, weight))
    for ours, theirs in zip((x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def _by_data(weight: Tensor) -> None:
    weight.data.mul_(2)


def _by_numpy(weight: Tensor) -> None:
    weight.detach().view(torch.int16).numpy()[:] = (weight.detach() * 2).view(torch.int16).numpy()


def _by_dlpack(weight: Tensor) -> None:
    torch.from_dlpack(weight.detach().__dlpack__()).mul_(2)


def _as_a_graph_does(weight: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(2)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("double", [_by_data, _by_numpy, _by_dlpack, _as_a_graph_does])
@torch.no_grad()
def test_inference_sees_every_write_to_a_weight(double: Any) -> None:
    """Not all of them raise the version: an EMA swap writes through `.data`."""
    layer = amp_kernels.nn.Linear(9, 5, bias=False, dtype=torch.bfloat16)
    x = randn(20, 9, dtype=torch.bfloat16)
    before = layer(x)
    double(layer.weight)
    assert torch.equal(layer(x), 2 * before)


@torch.no_grad()
def test_a_weight_in_padded_storage_is_not_copied() -> None:
    layer = amp_kernels.nn.Linear(9, 5, dtype=torch.bfloat16)
    assert not operators.is_aligned(layer.weight)
    layer.weight = torch.nn.Parameter(amp_kernels.pad_to_multiple(layer.weight.data))
    assert operators.is_aligned(layer.weight)
