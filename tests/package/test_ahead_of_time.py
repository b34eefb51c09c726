"""Operators in compiled programs: no Python of ours runs in them, and their bits are those of the plain calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from int8_networks import MODES, converted
from torch import Tensor, nn

import amp_kernels
from amp_kernels import backends
from amp_kernels.testing import int8 as cases
from amp_kernels.testing.common import randn

pytestmark = pytest.mark.skipif(
    backends.backend_reasons("cpu")["cpu"] is not None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="there are no C++ kernels here, or nothing compiles in an interpreted process",
)
OURS = str(Path(amp_kernels.__file__).parent)


def gradients() -> tuple[Tensor, ...]:
    return (
        randn(9),
        randn(3, 4, dtype=torch.float16),
        torch.tensor(0.5),
        torch.tensor(0.0),
    )


def unscale(a: Tensor, b: Tensor, factor: Tensor, flag: Tensor) -> tuple[Tensor, ...]:
    grads = [a * 2, b * 2]
    amp_kernels.unscale_(grads, inv_scale=factor, found_inf=flag)
    return *grads, amp_kernels.grad_norm(grads), flag


def parameters() -> tuple[Tensor, ...]:
    params = randn(9), randn(3, 4).to(torch.bfloat16)
    return (
        *params,
        randn(9),
        randn(3, 4),
        torch.zeros(9),
        torch.zeros(3, 4),
        params[1].float(),
    )


def sgd(p: Tensor, q: Tensor, g: Tensor, h: Tensor, b: Tensor, c: Tensor, master: Tensor) -> tuple[Tensor, ...]:
    params, states, masters = [p * 1, q * 1], [b * 1, c * 1], [master * 1]
    amp_kernels.sgd_(
        params, [g, h], states, masters, lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.1, nesterov=True,
        maximize=False, is_first_step=False,
    )  # fmt: skip
    return *params, *states, *masters


def matrices() -> tuple[Tensor, ...]:
    """Of 16 bits from the start: Inductor leaves out that a value is rounded to fp16 and widened again."""
    shapes = (20, 33), (7, 33), (7,)
    return tuple(randn(*shape, dtype=dtype) for dtype in (torch.float16, torch.bfloat16) for shape in shapes)


@torch.no_grad()
def products(*tensors: Tensor) -> tuple[Tensor, ...]:
    results = []
    for x, weight, bias in (tensors[:3], tensors[3:]):
        results += [amp_kernels.linear(x, weight, bias, "relu"), amp_kernels.linear(x[:5], weight, bias)]
        results += [amp_kernels.matmul(x, weight.t(), out_dtype=torch.float32)]
        results += [amp_kernels.addmm(bias, x, weight.t(), beta=0.5)]
    return tuple(results)


def codes() -> tuple[Tensor, ...]:
    return randn(5, 9), cases.integers(7, 9), randn(7, 1).abs()


def int8(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    q, right = amp_kernels.quantize_int8(x, dim=-1, symmetric=False), amp_kernels.Int8Tensor(weight, scale, None, (1,))
    images = amp_kernels.quantize_int8(x.view(5, 1, 3, 3), dim=(1, 2, 3), symmetric=False)
    taps = amp_kernels.Int8Tensor(weight.view(7, 1, 3, 3), scale.view(7, 1, 1, 1))
    return (
        amp_kernels.int8_matmul(q, right.t(), bias=scale.reshape(-1)),
        amp_kernels.int8_matmul(q, right.t(), out_scale=scale[:1]),
        q.dequantize(torch.float16),
        amp_kernels.quantize_int8(x, block_size=4, rounding="stochastic", seed=3).values,
        amp_kernels.fake_quantize_int8(x, dim=0),
        torch.ops.amp_kernels.int8_linear(x, weight, scale, None),
        amp_kernels.int8_conv2d(images, taps, padding=(0, 1), bias=scale.reshape(-1)),
        amp_kernels.int8_conv2d(images, taps, stride=(1, 2), out_scale=scale[:1]),
    )


PROGRAMS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]] = {
    "unscale": (unscale, gradients),
    "update": (sgd, parameters),
    "products": (products, matrices),
    "int8": (int8, codes),
}


def functions_called(run: Callable[[], object]) -> list[str]:
    """The Python functions of this package that run in it."""
    called = []

    def note(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_filename.startswith(OURS):
            called.append(f"{code.co_filename}:{code.co_qualname}" if hasattr(code, "co_qualname") else code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize(("program", "arguments"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_compiled_graph_runs_no_python_of_ours(
    program: Callable[..., tuple[Tensor, ...]], arguments: Callable[[], tuple[Tensor, ...]]
) -> None:
    torch.compiler.reset()
    compiled, expected = torch.compile(program, fullgraph=True), program(*arguments())
    torch.testing.assert_close(compiled(*arguments()), expected, rtol=0, atol=0)
    inputs = arguments()
    assert functions_called(lambda: program(*arguments()))  # which shows that they would be seen
    assert functions_called(lambda: compiled(*inputs)) == []


def packaged(program: nn.Module, inputs: tuple[object, ...], folder: Path) -> Callable[..., tuple[object, ...]]:
    """Compile a program into a package, and load it."""
    # One package does not earn back the 10 s that its precompiled headers take.
    options = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with torch._inductor.config.patch(options):
        exported = torch.export.export(program, inputs)
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "programs.pt2"))
    return torch._inductor.aoti_load_package(package)


def test_a_package_has_the_bits_of_the_calls(tmp_path: Path) -> None:
    """All programs are in one package, because a package takes seconds to compile."""

    class Programs(nn.Module):
        def forward(self, *inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
            return tuple(program(*of) for (program, _), of in zip(PROGRAMS.values(), inputs, strict=True))

    def inputs() -> tuple[tuple[Tensor, ...], ...]:
        return tuple(arguments() for _, arguments in PROGRAMS.values())

    results = packaged(Programs(), inputs(), tmp_path)(*inputs())
    torch.testing.assert_close(results, Programs()(*inputs()), rtol=0, atol=0)


@pytest.mark.slow
@torch.no_grad()
def test_a_package_of_int8_networks(tmp_path: Path) -> None:
    """A CNN and an encoder in each mode. Inductor rounds softmax and layer norms of the encoder differently."""

    class Networks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cnns, self.encoders = nn.ModuleList(), nn.ModuleList()
            for mode in MODES:
                torch.manual_seed(0)
                layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3), nn.ReLU()
                cnn = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
                encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
                self.cnns.append(converted(cnn, mode, images))
                self.encoders.append(converted(encoder, mode, texts))

        def forward(self, images: Tensor, texts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            return [cnn(images) for cnn in self.cnns], [encoder(texts) for encoder in self.encoders]

    images, texts = randn(4, 3, 16, 16), randn(4, 16, 64)
    networks = Networks()
    cnns, encoders = packaged(networks, (images, texts), tmp_path)(images, texts)
    expected = networks(images, texts)
    torch.testing.assert_close(cnns, expected[0], rtol=0, atol=0)
    # A code of an input may differ by 1 after that: half a percent of the largest result.
    torch.testing.assert_close(encoders, expected[1], rtol=0, atol=0.02)
