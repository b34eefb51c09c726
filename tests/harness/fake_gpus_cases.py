"""Streams, a second GPU, captures and counts of launches, on the GPUs of cuda_on_cpu/torch_device.py.

Every other test of a device runs there too (test_fake_gpus.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_cases import FULL, TORCH, Operators
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels
from amp_kernels import GradScaler, backends, testing
from amp_kernels.ops.library import DEFINITIONS
from amp_kernels.testing import verify
from amp_kernels.testing.common import DTYPES
from amp_kernels.testing.exponents import results_for
from amp_kernels.testing.matmul import compare, exact
from amp_kernels.testing.updates import UPDATES

OPS = torch.ops.amp_kernels
products: Any = importlib.import_module("amp_kernels.ops.matmul")  # the package's name for it is an operator
families = pytest.mark.parametrize("family", TORCH, ids=UPDATES)


# ------------------------------------------------------------------------------------------------ the GPUs themselves
def test_memory_is_watched(fake_gpus: Any) -> None:
    x = torch.zeros(10, device="cuda")
    assert fake_gpus.damage() is None
    ctypes.memset(x.data_ptr() + 40, 0, 4)
    assert fake_gpus.damage() == "memory behind an allocation of 40 bytes was written"
    ctypes.memset(x.data_ptr() + 40, 0xFF, 4)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (lambda x: torch.zeros(10).data_ptr(), "memory of the host"),
        (lambda x: x.to("cuda:1").data_ptr(), "outside of every tensor|memory of another GPU"),
        (lambda x: (x + 1).data_ptr(), "in one that was freed"),
        (lambda x: x.data_ptr() + 36, "outside of every tensor"),
    ],
    ids=["host", "other GPU", "freed", "past the end"],
)
def test_kernels_read_tensors_of_their_gpu_alone(address: Callable[[Tensor], int], reason: str) -> None:
    x = torch.zeros(10, device="cuda")
    table = torch.tensor([[10], [0], [0], [address(x)]], device="cuda")
    chunks = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    scalars = [torch.zeros((), device="cuda") for _ in range(2)]
    partials, record = (torch.zeros(n, dtype=d, device="cuda") for n, d in ((1, torch.float64), (4, torch.int64)))
    with pytest.raises(RuntimeError, match=reason):
        OPS._unscale_table_(table, chunks, 1024, None, False, False, True, partials, *scalars, record)


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: amp_kernels.quantize_int8(x, dim=-1),  # which no earlier call has loaded
    ],
    ids=["item", "cpu", "copy", "synchronize", "stream", "load"],
)
def test_a_capture_refuses(fake_gpus: Any, refused: Callable[[Tensor], object]) -> None:
    x = torch.zeros(3, device="cuda")
    fake_gpus.unload(0)
    with fake_gpus.capture(), pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        refused(x)
    refused(x)


# ------------------------------------------------------------------------------------------------------------- verify
@pytest.mark.parametrize(
    "op", [op if op == "unscale_" else pytest.param(op, marks=pytest.mark.nightly) for op in testing.CASES]
)
@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_verify(op: str, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.verify(backend, "cuda", [op]) == 0
    assert capsys.readouterr().out.strip().endswith("cases passed")


@pytest.mark.parametrize("op", ["matmul", "addmm", "linear"])
def test_products_on_a_gpu_refuse_the_backend_of_cpus(op: str) -> None:
    a = torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
    operands = (a,) * (3 if op == "addmm" else 2)
    with amp_kernels.use_backend("cpu"), pytest.raises(RuntimeError, match="'cpu' cannot serve cuda tensors"):
        getattr(amp_kernels, op)(*operands)


# --------------------------------------------------------------------------------------------------- padded products
@pytest.fixture
def pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size are padded."""
    monkeypatch.setattr(products, "MIN_WORK", 0)


PRODUCTS = [case for op in ("matmul", "addmm", "linear") for case in testing.CASES[op] if "by_element" not in case.name]


@pytest.mark.usefixtures("pads")
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: f"{case.op}-{case}")
def test_padded_products(case: testing.Case) -> None:
    """One C++ operator pads the operands, and torch multiplies them."""
    for result in case.body(torch.device("cuda")):
        assert result.passed, f"{case}: {result}"


def layer(on: str = "cuda", odd: int = 1, rows: int = 24) -> list[Tensor]:
    """x, weight and bias of a layer with 40 - odd inputs and 32 - odd outputs."""
    shapes = (rows, 40 - odd), (32 - odd, 40 - odd), (32 - odd,)
    made = [testing.common.randn(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate(shapes)]
    return [tensor.to(on) for tensor in made]


def calls_of(call: Callable[[], Any], fake_gpus: Any) -> tuple[dict[str, int], list[str]]:
    """Our launches of a call, and torch's operators in it that would launch a kernel on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        launched = launches_of(call, fake_gpus)
    names = [event.name.removeprefix("aten::") for event in profile.events()]
    computes = ("mm", "bmm", "addmm", "relu", "gelu", "zero_", "constant_pad_nd", "cat", "sum", "clone")
    return launched, [name for name in names if name in computes]


@pytest.mark.usefixtures("pads")
@pytest.mark.parametrize("with_bias", [False, True])
@torch.no_grad()
def test_launches_of_a_padded_linear(fake_gpus: Any, with_bias: bool) -> None:
    """x, weight and bias are copied, and torch multiplies. Rows of zeros behind the weight are torch's `zero_`."""
    x, weight, bias = layer()
    call = lambda: amp_kernels.linear(x, weight, bias if with_bias else None)  # noqa: E731
    multiplies = "addmm" if with_bias else "mm"
    assert calls_of(call, fake_gpus) == ({"copy_pad_kernel": 2 + with_bias}, ["zero_", multiplies])


@pytest.mark.usefixtures("pads")
@torch.no_grad()
def test_an_operand_at_an_odd_address_is_copied(fake_gpus: Any) -> None:
    x, weight, bias = layer(odd=0)
    x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(24, 40)
    assert launches_of(lambda: amp_kernels.linear(x, weight, bias), fake_gpus) == {"copy_pad_kernel": 1}


@pytest.mark.usefixtures("pads")
def test_launches_of_a_padded_backward_pass(fake_gpus: Any) -> None:
    """The gradient is read once, for its padded copy and for the bias, and multiplied twice."""
    leaves = [tensor.requires_grad_() for tensor in layer()]
    y = amp_kernels.linear(*leaves)
    grad = torch.ones(24, 31, dtype=torch.bfloat16, device="cuda")
    launched, computed = calls_of(lambda: torch.autograd.grad(y, leaves, grad), fake_gpus)
    # The gradient of the weight is a view of a wider tensor, which `clone` makes contiguous.
    assert launched == {"copy_pad_kernel": 1} and computed == ["mm", "mm", "clone"]


def test_launches_of_an_aligned_linear(fake_gpus: Any) -> None:
    for operands, least in ((layer(odd=0), 0), (layer(), products.MIN_WORK)):
        with pytest.MonkeyPatch.context() as patch, Operators() as called:
            patch.setattr(products, "MIN_WORK", least)
            assert launches_of(lambda: amp_kernels.linear(*operands), fake_gpus) == {}  # noqa: B023
        assert not [name for name in called.names if name.startswith("amp_kernels")]


@torch.no_grad()
def test_few_odd_rows_can_go_to_the_kernel_for_few_rows(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This route is off until its row of bench_matmul was measured."""
    x, weight, bias = layer(rows=16)
    call = lambda: amp_kernels.linear(x, weight, bias, "relu")  # noqa: E731
    assert products.ODD_ROWS == 0 and launches_of(call, fake_gpus) == {}
    expected = call()
    monkeypatch.setattr(products, "ODD_ROWS", 16)
    assert "few_rows_kernel" in launches_of(call, fake_gpus)
    torch.testing.assert_close(call().cpu(), expected.cpu())
    aligned, more = layer(odd=0, rows=16), layer(rows=17)
    assert launches_of(lambda: [amp_kernels.linear(*x, "relu") for x in (aligned, more)], fake_gpus) == {}


@pytest.mark.usefixtures("pads")
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_the_gelu_of_a_padded_product(activation: Any, needs_grad: bool) -> None:
    """Between -4 and -2 both forms differ by more than fp16's rounding."""
    x = torch.linspace(-4, -2, 24).half()[:, None]
    one, zero = (make(1, 1).half().to("cuda").requires_grad_(needs_grad) for make in (torch.ones, torch.zeros))
    true = exact(x.double(), activation)
    y = amp_kernels.linear(x.to("cuda"), one, zero[0], activation).detach().cpu()
    assert compare("", y, true.half(), true).passed


@torch.no_grad()
def test_errors_of_torch_keep_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ would lose it. The GPU has no memory for this product."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("there is no memory left")

    x = torch.ones(2**20, 8, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "mm", fails)
    with pytest.raises(torch.OutOfMemoryError, match="there is no memory left"):
        amp_kernels.linear(x, x, None, "relu")


@pytest.mark.usefixtures("pads")
def test_products_that_are_padded_obey_no_autocast() -> None:
    """The backward pass may run under another autocast than the forward pass."""
    leaves = [tensor.requires_grad_() for tensor in layer()]
    y = amp_kernels.linear(*leaves)
    expected = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
    with torch.autocast("cuda", torch.float16):
        found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert all(map(torch.equal, expected, found))


# ---------------------------------------------------------------------------------------------- streams, a second GPU
def parameters(device: str) -> list[torch.nn.Parameter]:
    made = []
    for i, dtype in enumerate(DTYPES.values()):
        values = torch.randn(37 + i, 5, generator=torch.Generator().manual_seed(i)).to(dtype)
        made.append(torch.nn.Parameter(values.to(device)))
        made[-1].grad = (made[-1].detach() + 1).clone()
    return made


CALLS: dict[str, Callable[[str], Any]] = {
    "unscale_": lambda on: unscaled([p.grad for p in parameters(on)], on),
    "grad_norm": lambda on: amp_kernels.grad_norm(
        [p.grad for p in parameters(on)], found_inf=torch.zeros((), device=on)
    ),
    "count_exponents_": lambda on: torch.cat([x.flatten().double() for x in counted(on)]),
    "quantize_int8": lambda on: amp_kernels.quantize_int8(matrix(on), dim=-1, symmetric=False).values,
    "dequantize_int8": lambda on: amp_kernels.quantize_int8(matrix(on), dim=0).dequantize(),
    "fake_quantize_int8": lambda on: amp_kernels.fake_quantize_int8(matrix(on), dim=-1),
    "straight_through_int8": lambda on: straight_through(on),
    "int8_matmul": lambda on: amp_kernels.int8_matmul(codes(on), codes(on).t()),
    "int8_conv2d": lambda on: convolve(matrix_of_codes(on)[:, :30].reshape(2, 4, 5, 30), on),
    "int8_linear": lambda on: OPS.int8_linear(matrix(on), codes(on).values, codes(on).scale.view(-1), None),
    "matmul": lambda on: OPS.matmul(matrix(on), matrix(on).t(), None, 1.0, 0.0, None, torch.float32, True, False)[0],
    "copy_pad": lambda on: OPS.copy_pad(matrix(on), None, None, True, len(matrix(on)))[0],
    "padded_matmul": lambda on: padded(matrix(on), matrix(on).t()),
    "padded_linear_backward": lambda on: backward(matrix(on)[:, :20], matrix(on), matrix(on)[:20]),
    "step": lambda on: stepped(on),
    "sgd_": lambda on: updated(on),
}


def padded(a: Tensor, b: Tensor, input: Tensor | None = None) -> Tensor:
    return OPS.padded_matmul(a, b, input, 1.0, 1.0, None, torch.float16, True, False, 0, 0)[0]


def backward(grad: Tensor, x: Tensor, weight: Tensor, saved: Tensor | None = None) -> Tensor:
    activation = None if saved is None else "gelu"
    return OPS.padded_linear_backward(grad, x, weight, saved, activation, False, True, True, x.shape[1], 0)[1]


def matrix(device: str) -> Tensor:
    return torch.randn(40, 33, generator=torch.Generator().manual_seed(7)).half().to(device)


def straight_through(device: str) -> Tensor:
    leaf = matrix(device).requires_grad_()
    amp_kernels.fake_quantize_int8(leaf, scale=torch.full((40, 1), 0.01, device=device)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def codes(device: str) -> amp_kernels.Int8Tensor:
    return amp_kernels.quantize_int8(matrix(device), dim=-1)


def expanded_codes(device: str, rows: int, columns: int) -> amp_kernels.Int8Tensor:
    """Codes of any number in one element of memory."""
    code = torch.ones((), dtype=torch.int8, device=device)
    return amp_kernels.Int8Tensor(code.expand(rows, columns), torch.ones((), device=device))


def multiply(device: str, m: int, n: int, k: int) -> Tensor:
    return amp_kernels.int8_matmul(expanded_codes(device, m, k), expanded_codes(device, k, n), out_dtype=torch.float16)


def multiply_by_operator(device: str, m: int, n: int, k: int) -> Tensor:
    a, b = expanded_codes(device, m, k), expanded_codes(device, k, n)
    return OPS.int8_matmul(a.values, b.values, a.scale, None, b.scale, None, None, torch.float32, None, None)


def matrix_of_codes(device: str) -> Tensor:
    return codes(device).values


def convolve(x: Tensor, device: str, weight: Tensor | None = None, **others: Any) -> Tensor:
    weight = matrix_of_codes(device)[:27, :30].reshape(3, 3, 3, 30) if weight is None else weight
    return OPS.int8_conv2d(*convolution(x, device, weight, **others))


def convolution(x: Tensor, device: str, weight: Tensor, scales: int = 1, **others: Tensor) -> list[Any]:
    """The arguments of a convolution with padding and with zero points."""
    zero_point = torch.arange(scales, dtype=torch.int32, device=device).view(-1, 1, 1, 1)
    sides = {
        "x_scale": torch.ones(scales, 1, 1, 1, device=device), "x_zero_point": zero_point + 3,
        "weight_scale": torch.ones(1, device=device), "bias": None,
    }  # fmt: skip
    return [x, weight, *(sides | others).values(), *[[1, 1]] * 3, torch.float32, None, None]


def unscaled(grads: list[Tensor], device: str) -> Tensor:
    amp_kernels.unscale_(grads, inv_scale=torch.tensor(0.5, device=device), found_inf=torch.zeros((), device=device))
    return torch.cat([g.float().flatten() for g in grads])


def counted(device: str, **others: Tensor) -> tuple[Tensor, ...]:
    """The results of `count_exponents_`. `others` are arguments in place of the usual ones."""
    tensors = [p.grad for p in parameters(device)]
    names = ("counts", "largest", "squares")
    results = dict(zip(names, results_for(tensors, torch.device(device)), strict=True)) | others
    OPS.count_exponents_(tensors, *results.values())
    return tuple(results.values())


def stepped(device: str) -> Tensor:
    params = parameters(device)
    amp_kernels.optim.FusedAdamW(params, lr=0.1, max_grad_norm=1.0).step()
    return torch.cat([p.detach().float().flatten() for p in params])


def updated(device: str) -> Tensor:
    params = [p.detach() for p in parameters(device)]
    momenta, masters = (
        [torch.zeros_like(p).float() for p in params],
        [p.float() for p in params if p.dtype.itemsize == 2],
    )
    options = {"dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False, "is_first_step": True}
    amp_kernels.sgd_(params, [p + 1 for p in params], momenta, masters, lr=0.1, momentum=0.9, **options)
    return torch.cat([p.float().flatten() for p in params])


@pytest.mark.parametrize("name", CALLS)
def test_the_second_gpu(fake_gpus: Any, name: str) -> None:
    """Kernels run where the tensors are, on the stream that is current there; the caller's device stays current."""
    first = CALLS[name]("cuda:0")
    fake_gpus.reset()
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream), torch.cuda.device(0):
        second = CALLS[name]("cuda:1")
        assert torch.cuda.current_device() == 0
    assert second.device == torch.device("cuda:1") and torch.equal(first.cpu(), second.cpu())
    assert fake_gpus.launches(0) == {} and fake_gpus.launches(1) != {}
    assert fake_gpus.last_stream(1) == stream.cuda_stream != 1000


def test_lists_of_both_gpus() -> None:
    params, alone = [*parameters("cuda:1"), *parameters("cuda:0")], parameters("cuda:0")
    for group in (params, alone):
        scaler = GradScaler("cuda", init_scale=1.0)
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(amp_kernels.optim.FusedAdamW(group, lr=0.1))
    for p, expected, before in zip(params, [*alone, *alone], [*parameters("cuda:0")] * 2, strict=True):
        assert torch.equal(p.cpu(), expected.cpu()) and not torch.equal(p.cpu(), before.cpu())


def test_every_operator_is_called() -> None:
    called = set()

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func)
            return func(*args, **(kwargs or {}))

    with Note():
        for call in CALLS.values():
            call("cuda:0")
    assert set(DEFINITIONS) <= called


def test_forcing_a_backend_asks_the_current_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a GPU gives it a context of hundreds of MB, in every process of a machine."""
    asked = []
    monkeypatch.setattr(backends, "_why_not_on", asked.append)
    with torch.cuda.device(1), amp_kernels.use_backend("cuda"):
        assert asked == [1]


def test_the_first_operator_inside_a_capture_settles_nothing(fake_gpus: Any) -> None:
    """In a process of its own: whether a GPU has kernels could not be asked, and is asked again."""
    script = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from cuda_on_cpu import torch_device as gpus\n"
        "gpus.install(Path(sys.argv[1])); import torch, amp_kernels; x = torch.ones(8, 8, device='cuda');"
        "gpus.set_capturing(True)\n"
        "try: amp_kernels.quantize_int8(x, dim=-1)\n"
        "except RuntimeError as error: assert 'stream is capturing' in str(error)\n"
        "else: raise AssertionError\n"
        "gpus.set_capturing(False); amp_kernels.quantize_int8(x, dim=-1)\n"
        "assert gpus.launches(0) and amp_kernels.backends.select(x.device) == 'cuda'"
    )
    path = [str(Path(__file__).parent), str(Path(amp_kernels.__file__).parents[1])]
    command = [sys.executable, "-W", "error", "-c", script, fake_gpus._library._name, *path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_large_products_of_codes_elsewhere(fake_gpus: Any) -> None:
    """On GPUs that Triton was not measured on. Triton would find no libcuda here."""
    fake_gpus.describe(1, compute_capability=100)
    with fake_gpus.planning():
        multiply("cuda:1", 2624, 2624, 2624)
    assert fake_gpus.launches(1) != {}


def many_rows(dtype: torch.dtype, n: int = 64, per: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, scale and bias of a layer with 2**32 multiplications. The rows of x repeat."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).to("cuda", dtype)
    weight = torch.arange(n * 64).remainder(255).sub(127).to("cuda", torch.int8).view(n, 64)
    scale = torch.rand(per, generator=torch.Generator().manual_seed(4)).add(0.1).to("cuda")
    bias = torch.randn(n, generator=torch.Generator().manual_seed(5)).to("cuda", dtype)
    return x.repeat(2**14, 1), weight, scale, bias


@pytest.mark.parametrize(("dtype", "per"), [(torch.float16, 1), (torch.bfloat16, 64)], ids=["one scale", "scales"])
def test_the_weight_of_many_rows_is_dequantized(fake_gpus: Any, dtype: torch.dtype, per: int) -> None:
    """And torch multiplies; autocast and gradients do not reach that."""
    x, weight, scale, bias = many_rows(dtype, per=per)
    numbers = weight.float().mul(scale.view(-1, 1)).to(dtype)
    expected = torch.nn.functional.linear(x, numbers, bias)
    fake_gpus.reset()
    with fake_gpus.planning():  # the kernels of codes would take hours
        OPS.int8_linear(x, weight, scale, bias)
    assert names_of(fake_gpus) == ["rows_kernel"]  # of int8_dequantize.cu
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    with torch.autocast("cuda", dtype=other):
        product = OPS.int8_linear(x.requires_grad_(), weight, scale, bias.requires_grad_())
    assert product.dtype is dtype and torch.equal(product, expected)


def test_the_weight_of_other_products_is_not_dequantized(fake_gpus: Any) -> None:
    """With fewer rows or multiplications, and where the C++ kernels are forced."""
    x, weight, scale, bias = many_rows(torch.float16)
    wide = ones(1, 4128).expand(255, 4128), int8(1, 4128).expand(4128, 4128)
    with fake_gpus.planning():
        for rows, its_weight in ((x[:-1], weight), wide):
            fake_gpus.reset()
            OPS.int8_linear(rows, its_weight, scale[:1], None)
            assert names_of(fake_gpus) == ["tiled_kernel"]
        fake_gpus.reset()
        with amp_kernels.use_backend("cuda"):
            OPS.int8_linear(x, weight, scale, bias)
        assert names_of(fake_gpus) == ["tiled_kernel"]


def names_of(fake_gpus: Any) -> list[str]:
    """The first words of the kernels' names."""
    return [name.split("<")[0] for name in fake_gpus.launches(0)]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("dtype", "capability"), [(torch.float32, 90), (torch.bfloat16, 75)], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 80), (9, 8, 33), (70, 33, 1), (3, 5, 0)])
def test_what_no_kernel_multiplies_is_torchs(
    fake_gpus: Any, m: int, n: int, k: int, dtype: torch.dtype, capability: int, forced: bool
) -> None:
    """fp32, and bf16 before sm_80, on a weight that is dequantized in this dtype."""
    x, weight = torch.randn(m, k).to("cuda", dtype), int8(n, k).random_(-128, 128)
    scale, bias = torch.rand(n, 1).to("cuda"), torch.randn(n).to("cuda", dtype)
    expected = torch.nn.functional.linear(x, weight.float().mul(scale).to(dtype), bias)
    fake_gpus.reset()
    fake_gpus.describe(0, compute_capability=capability)
    with amp_kernels.use_backend("cuda") if forced else contextlib.nullcontext(), torch.autocast("cuda"):
        product = OPS.int8_linear(x.requires_grad_(), weight, scale.expand(-1, 2)[:, 1], bias)
    assert set(names_of(fake_gpus)) <= {"rows_kernel", "columns_kernel"}  # of int8_dequantize.cu
    assert product.dtype is dtype and torch.equal(product, expected)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: x[:, :80],
    "odd pitch": lambda x: x[:, :70],
    "odd k": lambda x: x.repeat(1, 2)[:, : 2 * 97 - 2][:, :70].clone(),
    "misaligned": lambda x: x[:, 1:81],
    "misaligned rows": lambda x: x.view(-1)[1 : 81 * 80 + 1].view(81, 80),
    "padded": lambda x: torch.nn.functional.pad(x[:, :70], (0, 26), value=9)[:, :70],
    "transposed": lambda x: x[:80, :].t(),
    "every other": lambda x: x[:, ::2],
    "one row": lambda x: x[:1, :70].expand(81, 70),
}


@pytest.mark.parametrize(("rows", "capability"), [(16, 90), (81, 90), (81, 75)])
@pytest.mark.parametrize("view", VIEWS)
def test_products_read_chunks(fake_gpus: Any, view: str, rows: int, capability: int) -> None:
    """Rows that are contiguous, begin at multiples of 16 bytes and end at one; others are copied first, with zeros.

    Zero points multiply the sums of a row's codes, to which the zeros add nothing.
    """
    fake_gpus.describe(0, compute_capability=capability)
    x = int8(112, 97 if view != "in place" else 96).random_(-128, 128)
    a, b = VIEWS[view](x)[:rows], VIEWS[view](x.roll(5, 0))[:40]
    zero = int32().fill_(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = OPS.int8_matmul(a, b.t(), fp32(), zero, fp32(), zero, None, torch.float32, None, None)
    copies = sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")
    assert copies == (0 if view == "in place" else 2)
    assert torch.equal(found.cpu(), ((a.cpu().int() - 3) @ (b.cpu().int() - 3).t()).float())
    assert names_of(fake_gpus) == ["few_rows_kernel" if rows <= 16 else "tiled_kernel"]
    numbers = a.half() / 64
    found = OPS.int8_linear(numbers, b, fp32(), None)
    torch.testing.assert_close(found.cpu(), (numbers.cpu().float() @ b.cpu().float().t()).half(), rtol=1e-3, atol=0)


IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: x[..., :48].contiguous(),
    "odd channels": lambda x: x[..., :47].contiguous(),
    "between channels": lambda x: x[..., :48],
    "cropped": lambda x: x[:, 1:-1, 2:, :48],
    "channels first": lambda x: x[..., :48].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "misaligned": lambda x: x.reshape(-1)[1 : 1 + 2 * 3 * 3 * 48].view(2, 3, 3, 48),
}


@pytest.mark.parametrize("view", IMAGES)
def test_convolutions_read_chunks(fake_gpus: Any, view: str) -> None:
    """Pixels whose channels begin at multiples of 16 bytes and end at one; others are copied first, with zeros."""
    x = IMAGES[view](int8(2, 7, 8, 55).random_(-128, 128))
    weight = IMAGES[view](int8(5, 5, 6, 55).random_(-128, 128))
    arguments = convolution(x, "cuda", weight, scales=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = OPS.int8_conv2d(*arguments)
    copies = sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")
    assert copies == (2 if view == "in place" else 4)  # the scales and the zero points of images are copied to pixels
    assert list(fake_gpus.launches(0)) == ["tiled_kernel<Images, 64, 64, true>"]
    numbers = (x.cpu().double() - torch.arange(3, 5).view(2, 1, 1, 1)).permute(0, 3, 1, 2)
    expected = torch.nn.functional.conv2d(numbers, weight.cpu().double().permute(0, 3, 1, 2), padding=1)
    assert torch.equal(found.cpu().double(), expected.permute(0, 2, 3, 1))


def test_an_index_that_no_gpu_has() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        backends.backend_reasons("cuda:7")


def ones(*shape: int, dtype: torch.dtype = torch.float16, on: str = "cuda:0") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=on)


def fp32(*shape: int, on: str = "cuda:0") -> Tensor:
    return ones(*shape, dtype=torch.float32, on=on)


def int8(*shape: int, on: str = "cuda:0") -> Tensor:
    return ones(*shape, dtype=torch.int8, on=on)


def int32(*shape: int, on: str = "cuda:0") -> Tensor:
    return ones(*shape, dtype=torch.int32, on=on)


def sgd(param: Tensor, grad: Tensor, momentum: Tensor, master: Tensor, *scalars: Tensor | None) -> None:
    hyper = [0.9, 0.0, 0.0, 0.0, 0.0, 1.0]
    lr, grad_scale, found_inf = scalars or (None, None, None)
    OPS.update_("sgd", [param], [grad], [momentum], None, None, [master], hyper, 0.1, lr, 0, grad_scale, found_inf)


def average(average: Tensor, weight: Tensor, remainder: Tensor) -> None:
    hyper = [0.0, 0.0, 0.5, 0.0, 1.0, 1.0]
    OPS.update_("sgd", [average], [weight], None, None, None, [], hyper, 1.0, None, 0, None, None, [remainder])


def product(a: Tensor, b: Tensor, input: Tensor | None = None) -> None:
    OPS.matmul(a, b, input, 1.0, 1.0, None, torch.float32, True, False)


def codes_product(*sides: Tensor | None, bias: Tensor | None = None, out_scale: Tensor | None = None) -> None:
    OPS.int8_matmul(*sides, bias, torch.float32, out_scale, None)


ELSEWHERE = ["cuda:1", "cpu"]
# What kernels would read or write outside of tensors. `on` is where one of the arguments is.
REFUSED: dict[str, Callable[[str], object]] = {
    "grads": lambda on: OPS.unscale_([fp32(5), fp32(5, on=on)], fp32(), fp32()),
    "inv_scale": lambda on: OPS.unscale_([fp32(5)], fp32(on=on), fp32()),
    "counts": lambda on: counted("cuda:0", counts=torch.zeros(3, 257, dtype=torch.int64, device=on)),
    "largest": lambda on: counted("cuda:0", largest=torch.zeros(3, device=on)),
    "squares": lambda on: counted("cuda:0", squares=torch.zeros(3, dtype=torch.float64, device=on)),
    "param": lambda on: sgd(ones(5), ones(5, on=on), fp32(5), fp32(5)),
    "momentum": lambda on: sgd(ones(5), ones(5), fp32(5, on=on), fp32(5)),
    "master": lambda on: sgd(ones(5), ones(5), fp32(5), fp32(5, on=on)),
    "lr": lambda on: sgd(ones(5), ones(5), fp32(5), fp32(5), fp32(on=on), None, None),
    "grad_scale": lambda on: sgd(ones(5), ones(5), fp32(5), fp32(5), None, fp32(on=on), None),
    "found_inf": lambda on: sgd(ones(5), ones(5), fp32(5), fp32(5), None, None, fp32(on=on)),
    "remainder": lambda on: average(fp32(5), ones(5), ones(5, dtype=torch.int16, on=on)),
    "static scale": lambda on: OPS.quantize_int8(ones(4, 6), fp32(4, 1, on=on), None, None, None, True, None),
    "static zero_point": lambda on: OPS.quantize_int8(ones(4), fp32(), int32(on=on), None, None, False, None),
    "scale of codes": lambda on: OPS.dequantize_int8(int8(4, 6), fp32(4, 1, on=on), None, None, torch.float16),
    "incoming gradient": lambda on: OPS.straight_through_int8(ones(4, on=on), ones(4), fp32(), None, None),
    "b of codes": lambda on: codes_product(int8(4, 6), int8(6, 5, on=on), fp32(), None, fp32(), None),
    "scale of b": lambda on: codes_product(int8(4, 6), int8(6, 5), fp32(), None, fp32(on=on), None),
    "zero_point of a": lambda on: codes_product(int8(4, 6), int8(6, 5), fp32(), int32(on=on), fp32(), None),
    "bias of codes": lambda on: codes_product(int8(4, 6), int8(6, 5), fp32(), None, fp32(), None, bias=fp32(5, on=on)),
    "out_scale": lambda on: codes_product(int8(4, 6), int8(6, 5), fp32(), None, fp32(), None, out_scale=fp32(on=on)),
    "weight of a convolution": lambda on: convolve(int8(1, 5, 5, 3), "cuda", int8(2, 3, 3, 3, on=on)),
    "scale of images": lambda on: convolve(int8(1, 5, 5, 3), "cuda", int8(2, 3, 3, 3), x_scale=fp32(on=on)),
    "zero_point of images": lambda on: convolve(
        int8(1, 5, 5, 3), "cuda", int8(2, 3, 3, 3), x_zero_point=int32(on=on)
    ),
    "bias of a convolution": lambda on: convolve(int8(1, 5, 5, 3), "cuda", int8(2, 3, 3, 3), bias=fp32(2, on=on)),
    "weight of codes": lambda on: OPS.int8_linear(ones(4, 6), int8(5, 6, on=on), fp32(), None),
    "bias of linear": lambda on: OPS.int8_linear(ones(4, 6), int8(5, 6), fp32(), ones(5, on=on)),
    "b": lambda on: product(ones(4, 6), ones(6, 5, on=on)),
    "input": lambda on: product(ones(4, 6), ones(6, 5), ones(4, 5, on=on)),
    "saved": lambda on: OPS.copy_pad(ones(4, 6), ones(4, 6, on=on), "relu", True, 4),
    "padded b": lambda on: padded(ones(20, 6), ones(6, 5, on=on)),
    "padded input": lambda on: padded(ones(20, 6), ones(6, 5), ones(20, 5, on=on)),
    "x of a gradient": lambda on: backward(ones(4, 5), ones(4, 6, on=on), ones(5, 6)),
    "weight of a gradient": lambda on: backward(ones(4, 5), ones(4, 6), ones(5, 6, on=on)),
    "saved of a gradient": lambda on: backward(ones(4, 5), ones(4, 6), ones(5, 6), ones(4, 5, on=on)),
}  # fmt: skip
MISSHAPEN: dict[str, Callable[[], object]] = {
    "gradient": lambda: sgd(ones(500), ones(501), fp32(500), fp32(500)),
    "momentum": lambda: sgd(ones(500), ones(500), fp32(499), fp32(500)),
    "master": lambda: sgd(ones(500), ones(500), fp32(500), fp32(499)),
    "no master": lambda: average(ones(5), ones(5), ones(5, dtype=torch.int16)),
    "dtype of a momentum": lambda: sgd(ones(500), ones(500), ones(500), fp32(500)),
    "remainder": lambda: average(fp32(500), ones(500), ones(499, dtype=torch.int16)),
    "static scale": lambda: OPS.quantize_int8(ones(40, 60), fp32(39, 1), None, None, None, True, None),
    "scales of blocks": lambda: OPS.quantize_int8(ones(40, 60), fp32(40, 3), None, None, 16, True, None),
    "zero_point": lambda: OPS.quantize_int8(ones(40, 60), fp32(40, 1), int32(39, 1), None, None, False, None),
    "incoming gradient": lambda: OPS.straight_through_int8(ones(39, 60), ones(40, 60), fp32(), None, None),
    "b of codes": lambda: codes_product(int8(40, 60), int8(59, 50), fp32(), None, fp32(), None),
    "scale of a": lambda: codes_product(int8(40, 60), int8(60, 50), fp32(39, 1), None, fp32(), None),
    "zero_point of b": lambda: codes_product(int8(40, 60), int8(60, 50), fp32(), None, fp32(1, 50), int32(1, 49)),
    "bias of codes": lambda: codes_product(int8(40, 60), int8(60, 50), fp32(), None, fp32(), None, bias=fp32(49)),
    "channels of a convolution": lambda: convolve(int8(4, 5, 5, 30), "cuda", int8(2, 3, 3, 29)),
    "kernel of a convolution": lambda: convolve(int8(4, 5, 5, 30), "cuda", int8(2, 8, 3, 30)),
    "scale of images": lambda: convolve(int8(4, 5, 5, 30), "cuda", int8(2, 3, 3, 30), scales=3),
    "bias of a convolution": lambda: convolve(int8(4, 5, 5, 30), "cuda", int8(2, 3, 3, 30), bias=fp32(1)),
    "weight of linear": lambda: OPS.int8_linear(ones(40, 60), int8(50, 59), fp32(), None),
    "bias of linear": lambda: OPS.int8_linear(ones(40, 60), int8(50, 60), fp32(), ones(49)),
    "b": lambda: product(ones(40, 60), ones(59, 50)),
    "batches": lambda: product(ones(3, 40, 60), ones(2, 60, 50)),
    "input": lambda: product(ones(40, 60), ones(60, 50), ones(39, 50)),
    "dtype of b": lambda: product(ones(40, 60), fp32(60, 50)),
    "saved": lambda: OPS.copy_pad(ones(40, 60), ones(39, 60), "relu", True, 40),
    "padded b": lambda: padded(ones(40, 60), ones(59, 50)),
    "padded input": lambda: padded(ones(40, 60), ones(60, 50), ones(39, 50)),
    "padded dtype of b": lambda: padded(ones(40, 60), fp32(60, 50)),
    "x of a gradient": lambda: backward(ones(40, 50), ones(39, 60), ones(50, 60)),
    "weight of a gradient": lambda: backward(ones(40, 50), ones(40, 60), ones(49, 60)),
    "inputs of a gradient": lambda: backward(ones(40, 50), ones(40, 60), ones(50, 61)),
    "saved of a gradient": lambda: backward(ones(40, 50), ones(40, 60), ones(50, 60), ones(39, 50)),
}  # fmt: skip


@pytest.mark.parametrize("on", ELSEWHERE)
@pytest.mark.parametrize("argument", REFUSED)
def test_what_is_elsewhere_is_refused(fake_gpus: Any, argument: str, on: str) -> None:
    """Before any kernel runs: torch's dispatcher looks at one of the tensors."""
    REFUSED[argument]("cuda:0")
    fake_gpus.reset()
    with pytest.raises(ValueError, match="an argument does not fit"):
        REFUSED[argument](on)
    assert fake_gpus.launches(0) == fake_gpus.launches(1) == {}


@pytest.mark.parametrize("argument", MISSHAPEN)
def test_what_does_not_fit_is_refused(fake_gpus: Any, argument: str) -> None:
    with pytest.raises(ValueError, match="an argument does not fit"):
        MISSHAPEN[argument]()
    assert fake_gpus.launches(0) == {}


def test_copies_are_written_back_below_autograd() -> None:
    """No backend is forced: `use_backend` would run the operators below autograd in any case."""
    grad, param, momentum = (fp32(3, 4)[:, ::2].requires_grad_() for _ in range(3))
    amp_kernels.unscale_([grad], inv_scale=fp32() / 2, found_inf=torch.zeros((), device="cuda"))
    options = {"dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
    amp_kernels.sgd_([param], [fp32(3, 2)], [momentum], [], lr=0.25, momentum=0.5, **options)
    assert torch.is_grad_enabled() and all(x.is_leaf for x in (grad, param, momentum))
    assert [x.unique().tolist() for x in (grad, param, momentum)] == [[0.5], [0.625], [1.5]]


def test_threads_of_autograd_inherit_a_forced_backend() -> None:
    """torch runs the backward pass of CUDA tensors in a thread of its own."""
    seen: list[str | None] = []
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(backends.forced()))
    with amp_kernels.use_backend("reference"):
        y.sum().backward()
    y = x * 2
    y.register_hook(lambda _: seen.append(backends.forced()))
    y.sum().backward()
    assert seen == ["reference", None]


# ----------------------------------------------------------------------------------------------------------- captures
def plain(optimizer: Any) -> None:
    optimizer.step()


def scaled(optimizer: Any) -> None:
    optimizer.scaler.step(optimizer)


def clipped(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["max_grad_norm"] = 1.0
    optimizer.step()


def with_tensor_lr(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = optimizer.rate
    optimizer.step()


@families
@pytest.mark.parametrize("prepare", [lambda optimizer: optimizer.init_state(), plain], ids=["init_state", "step"])
@pytest.mark.parametrize("captured", [plain, scaled, clipped, with_tensor_lr], ids=lambda f: f.__name__)
def test_a_capture_loads_and_waits_for_nothing(fake_gpus: Any, family: Any, prepare: Any, captured: Any) -> None:
    optimizer = family(parameters("cuda"), **FULL[family])
    optimizer.rate = torch.tensor(0.1, device="cuda")
    fake_gpus.unload(0)
    prepare(optimizer)
    optimizer.scaler = GradScaler("cuda", init_scale=2.0)
    optimizer.scaler.scale(torch.ones((), device="cuda"))
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    with fake_gpus.capture():
        captured(optimizer)
    assert not any(map(torch.equal, before, optimizer.param_groups[0]["params"]))


class Arguments(TorchDispatchMode):
    """Collects the addresses of tensors that the kernels of tables get."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split("::_")[-1] in ("unscale_table_", "update_table_", "send_"):
            self.addresses |= {
                arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor) and arg.is_cuda
            }
        return func(*args, **(kwargs or {}))


def test_scratch_memory_is_kept_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may drop memory after a step on another stream than the one it was allocated on.

    torch's allocator must know of both.
    """
    recorded: dict[int, set[int]] = {}

    def record(tensor: Tensor, stream: Any) -> None:
        recorded.setdefault(stream.cuda_stream, set()).add(tensor.untyped_storage().data_ptr())

    monkeypatch.setattr(Tensor, "record_stream", record)
    optimizer = amp_kernels.optim.FusedAdam(parameters("cuda"), lr=0.5, max_grad_norm=1.0)
    optimizer.step()
    side = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(side), Arguments() as used:
        optimizer.step()
    assert len(used.addresses) >= 6 and used.addresses <= recorded[side.cuda_stream]
    gaps = torch.nn.Parameter(fp32(3, 8)[:, ::2])  # the kernel updates a copy of it,
    gaps.grad = fp32(4, 3).t()  # and reads a copy of this
    before = len(recorded[side.cuda_stream])
    optimizer.add_param_group({"params": [gaps]})
    optimizer.step()
    with torch.cuda.stream(side):
        optimizer.step()
    assert len(recorded[side.cuda_stream]) >= before + 2 + 5  # and the memory of a new plan


def test_a_capture_sends_its_table_once(fake_gpus: Any) -> None:
    optimizer = amp_kernels.optim.FusedSGD(parameters("cuda"), lr=0.1)
    optimizer.init_state()
    fake_gpus.reset()
    with fake_gpus.capture():
        optimizer.step()
    assert sum(count for name, count in fake_gpus.launches(0).items() if name.startswith("send_kernel")) == 1


def test_a_capture_sends_a_long_table(fake_gpus: Any) -> None:
    """Words of more than 500 parameters travel by another kernel than those of a few (csrc/cuda/send.cu)."""
    params = [torch.nn.Parameter(fp32(1)) for _ in range(600)]
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, i % 7)
    optimizer = amp_kernels.optim.FusedSGD(params, lr=0.5)
    fake_gpus.unload(0)
    optimizer.init_state()
    with fake_gpus.capture():
        optimizer.step()
    assert torch.cat(params).tolist() == [1.0 - 0.5 * (i % 7) for i in range(600)]


# ------------------------------------------------------------------------------------------------------------- tables
def test_a_step_follows_rates_and_addresses(fake_gpus: Any) -> None:
    """A table on a device has what was sent there; on a CPU kernels read the host's."""
    param, kept, expected = torch.nn.Parameter(fp32(3)), [], 1.0
    optimizer = amp_kernels.optim.FusedSGD([param], lr=1.0)
    on_device = [torch.tensor(lr, device="cuda") for lr in (0.5, 0.25)]
    for i, lr in enumerate((1.0, 0.5, *on_device, 2.0, 0.25), start=1):
        optimizer.param_groups[0]["lr"] = lr
        kept += [param.data, param.grad]  # old values are still there
        param.data, param.grad = param.data.clone(), torch.full_like(param, i)
        optimizer.step()
        expected -= float(lr) * i
    assert param.tolist() == [expected] * 3


# ------------------------------------------------------------------------------------------------------------- counts
def test_launches_of_a_step(fake_gpus: Any) -> None:
    """A clipped step launches one gradient pass, one send and an update for each combination of dtypes."""
    optimizer = amp_kernels.optim.FusedSGD(parameters("cuda"), lr=0.1, momentum=0.9, max_grad_norm=1.0)
    optimizer.step()
    for _ in range(2):
        assert launches_of(optimizer.step, fake_gpus) == {
            "unscale_kernel": 1,
            "update_kernel": len(DTYPES),
            "send_kernel": 1,
        }
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.grad.clone()


def test_launches_of_a_warm_step(fake_gpus: Any) -> None:
    """One call of C++ launches them all, in a step and in both calls of a scaler. It calls no operator of torch."""
    optimizer = amp_kernels.optim.FusedAdam(parameters("cuda"), lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert optimizer._warm is not None
    scale = torch.ones((), device="cuda")
    verdicts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_prepare", None)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert launches_of(optimizer.step, fake_gpus) == {"update_kernel": len(DTYPES), "send_kernel": 1}
            check = lambda: verdicts.append(optimizer._check(scale))  # noqa: E731
            assert launches_of(check, fake_gpus) == {"unscale_kernel": 1, "send_kernel": 1}
            update = lambda: optimizer._step_under(verdicts[0])  # noqa: E731
            assert launches_of(update, fake_gpus) == {"update_kernel": len(DTYPES)}
    assert not [event.name for event in profile.events() if "::" in event.name]


def test_a_warm_step_on_another_stream_or_in_a_capture_is_taken_in_python(fake_gpus: Any) -> None:
    optimizer = amp_kernels.optim.FusedAdam(parameters("cuda"), lr=0.1)
    for _ in range(3):
        optimizer.step()
    first = optimizer._warm
    with torch.cuda.stream(torch.cuda.Stream()):
        optimizer.step()
        assert optimizer._warm is not first and optimizer._warm.arguments[12] == torch.cuda.current_stream().cuda_stream
        optimizer.step()
    for _ in range(2):
        optimizer.step()
    with fake_gpus.capture():
        optimizer.step()
    assert optimizer._plans[0].is_captured and optimizer._warm is None


def test_sends_of_a_thousand_tensors(fake_gpus: Any) -> None:
    """With arguments of 32 KB (CUDA 12.1 and later) at most 3, with 4 KB 16."""
    params = [torch.nn.Parameter(fp32(1).bfloat16()) for _ in range(1000)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = amp_kernels.optim.FusedAdam(params, lr=0.5, amsgrad=True)
    optimizer.step()
    assert launches_of(optimizer.step, fake_gpus) == {"update_kernel": 1, "send_kernel": 2}
    plan = optimizer._plans[0]
    assert math.ceil((len(plan._host.words) - len(plan._key)) / 500) == 15


def launches_of(call: Callable[[], Any], fake_gpus: Any) -> dict[str, int]:
    """Those of a call, by the first word of a kernel's name."""
    fake_gpus.reset()
    call()
    found: Counter[str] = Counter()
    for name, count in fake_gpus.launches(0).items():
        found[name.split("<")[0]] += count
    return dict(found)
