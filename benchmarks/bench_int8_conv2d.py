"""int8 convolutions: codes in, codes out, as a layer between two int8 layers runs.

Images have one scale, the weight has one for each output channel. The codes of images, weight and result are counted as
read or written once. Peers are torch's convolutions in fp32 and in 16 bits, in channels_last memory. On a CPU,
torch.ao's quantized convolution is a peer twice, by fbgemm and by onednn. Its weight is packed before the first call.
Without VNNI the sums of both libraries saturate. Their results are wrong then, and they are not timed.

    python -m benchmarks.bench_int8_conv2d --help

`--sizes` and `--shapes` have no effect here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import amp_kernels
from amp_kernels import Int8Tensor, reference
from amp_kernels.testing.common import randn
from amp_kernels.testing.int8 import integers

from .bench_int8 import Cases, compiled, contender, nearly
from .common import Case, Contender, Job, Report, by_size, on_other_backends, parse_arguments, run_case

SCALE, WEIGHT_SCALE = 0.01, 0.02
LARGEST = 127.0  # `integers` has codes from -127 to 127, each as often
STANDARD_DEVIATIONS = 3.0  # of the results; so much fits into codes


@dataclass(frozen=True)
class Conv:
    """A convolution of square images with a square kernel."""

    batch: int
    height: int
    channels: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0

    def __str__(self) -> str:
        stride = f" stride {self.stride}" if self.stride > 1 else ""
        taps, pixels = (f"{n}x{n}" for n in (self.kernel, self.height))
        return f"{taps} {self.channels} to {self.outputs} at {pixels}{stride} batch {self.batch}"

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def terms(self) -> int:
        """Products of a sum."""
        return self.kernel**2 * self.channels

    @property
    def images(self) -> tuple[int, ...]:
        return self.batch, self.height, self.height, self.channels

    @property
    def weight(self) -> tuple[int, ...]:
        return self.outputs, self.kernel, self.kernel, self.channels

    @property
    def result(self) -> tuple[int, ...]:
        return self.batch, self.out_height, self.out_height, self.outputs

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.out_height**2 * self.outputs * self.terms


def convolutions(many: int) -> tuple[Conv, ...]:
    """Layers as ResNets have them, for one image and for `many`."""
    return (
        Conv(1, 56, 64, 64, 3, padding=1),
        Conv(many, 56, 64, 64, 3, padding=1),
        Conv(1, 14, 256, 256, 3, padding=1),
        Conv(many, 14, 256, 256, 3, padding=1),
        Conv(1, 56, 256, 64, 1),
        Conv(1, 224, 3, 64, 7, stride=2, padding=3),
        Conv(many, 224, 3, 64, 7, stride=2, padding=3),
        Conv(1, 128, 64, 64, 3, padding=1),
    )


CONVOLUTIONS = {"cpu": convolutions(16), "cuda": convolutions(128)}
SMALL = (Conv(2, 12, 16, 32, 3, padding=1),)  # of a rehearsal


def by_torch_ao(
    engine: str, conv: Conv, x: Int8Tensor, weight: Int8Tensor, bias: Tensor, out_scale: float
) -> Callable[[], Tensor]:
    """torch.ao's quantized convolution. Its images are uint8: the same codes, and a zero point of 128."""
    if engine not in torch.backends.quantized.supported_engines:
        raise RuntimeError(f"torch has no engine {engine}")
    images = (x.values.short() + 128).to(torch.uint8).permute(0, 3, 1, 2)  # NCHW, channels_last
    quantized = torch._make_per_tensor_quantized_tensor(images, SCALE, 128)
    channels = weight.scale.flatten().double(), torch.zeros(conv.outputs, dtype=torch.int64)
    taps = torch._make_per_channel_quantized_tensor(weight.values.permute(0, 3, 1, 2), *channels, 0)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        steps = [conv.stride] * 2, [conv.padding] * 2, [1, 1], 1
        packed = torch.ops.quantized.conv2d_prepack(taps, bias, *steps)
    finally:
        torch.backends.quantized.engine = before
    return partial(torch.ops.quantized.conv2d, quantized, packed, out_scale, 128)


def codes_of(result: Tensor) -> Tensor:
    """The int8 codes `[B, H, W, N]` of a result of torch.ao."""
    return (result.int_repr().short() - 128).permute(0, 2, 3, 1)


def conv_case(conv: Conv, args: argparse.Namespace) -> list[Contender]:
    device = args.device
    values, taps = integers(*conv.images, seed=1).to(device), integers(*conv.weight, seed=2).to(device)
    x = Int8Tensor(values, torch.full((1,), SCALE, device=device))
    weight = Int8Tensor(taps, torch.full((conv.outputs, 1, 1, 1), WEIGHT_SCALE, device=device), dim=(1, 2, 3))
    shifted = Int8Tensor(values, x.scale, torch.full((1,), 5, dtype=torch.int32, device=device))
    typical = SCALE * WEIGHT_SCALE * LARGEST**2 / 3 * conv.terms**0.5  # standard deviation of a result
    bias, out_scale = typical * randn(conv.outputs, seed=3).to(device), STANDARD_DEVIATIONS * typical / 127
    steps: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding}
    out = torch.tensor(out_scale, device=device)

    def first_and_last(images: Tensor) -> Tensor:
        return images[[0, -1]]

    @cache
    def expected(operand: Int8Tensor) -> Tensor:
        zeros = None if operand.zero_point is None else operand.zero_point.cpu()
        given = (part.cpu() for part in (first_and_last(values), taps, x.scale, weight.scale, bias, out))
        codes, kernel, scale, weight_scale, term, result_scale = given
        pairs: dict[str, Any] = {name: (step, step) for name, step in steps.items()}
        return reference.int8_conv2d(
            codes, kernel, scale, zeros, weight_scale, bias=term, out_scale=result_scale, **pairs
        ).to(device)

    def ours(operand: Int8Tensor, function: Callable[..., Tensor] = amp_kernels.int8_conv2d) -> Job:
        run = partial(function, operand, weight, bias=bias, out_scale=out, **steps)
        return Job(run, nearly(lambda: first_and_last(run()), partial(expected, operand), 0).check)

    def torch_ao(engine: str) -> Job:
        run = by_torch_ao(engine, conv, x, weight, bias, out_scale)
        return Job(run, nearly(lambda: first_and_last(codes_of(run())), partial(expected, x), 1).check)

    def floats(dtype: torch.dtype, by: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda f: f) -> Job:
        operands = (t.to(dtype).permute(0, 3, 1, 2) for t in (values, taps))  # NCHW, channels_last
        run = partial(by(F.conv2d), *operands, bias.to(dtype), **steps)
        return Job(run, lambda: "")

    half, name = (torch.float16, "fp16") if device.type == "cuda" else (torch.bfloat16, "bf16")
    by_compiler = partial(compiled, args)
    plan: list[tuple[str, Callable[[], Job]]] = [
        ("amp_kernels.int8_conv2d", partial(ours, x)),
        ("amp_kernels.int8_conv2d, zero points", partial(ours, shifted)),
        ("fp32 torch conv2d", partial(floats, torch.float32)),
        (f"{name} torch conv2d", partial(floats, half)),
    ]
    if device.type == "cuda":
        plan += [
            ("fp32 torch conv2d, compiled", partial(floats, torch.float32, by_compiler)),
            (f"{name} torch conv2d, compiled", partial(floats, half, by_compiler)),
        ]
    else:
        plan += [(f"torch.ao conv2d, {engine}", partial(torch_ao, engine)) for engine in ("fbgemm", "onednn")]
    forced = on_other_backends(
        "amp_kernels.int8_conv2d", 10, device, lambda function: ours(x, function), amp_kernels.int8_conv2d
    )
    return [*(contender(name, 10, build) for name, build in plan), *forced]


def conv_cases(args: argparse.Namespace) -> Cases:
    chosen = SMALL if args.rehearse else CONVOLUTIONS[args.device.type]
    for conv in chosen[2:4] if args.quick and not args.rehearse else chosen:
        for layout in by_size(str(conv), (conv.images, conv.weight, conv.result), args.device):
            words = "the codes of images, weight and result, once"
            yield (
                Case("int8_conv2d", "int8_conv2d", torch.int8, layout, 1, words, conv.operations),
                conv_case(conv, args),
            )


def main() -> int:
    args = parse_arguments(__doc__)
    if args.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # cuDNN then chooses its fastest algorithm
    report = Report("int8_conv2d", args)
    for case, contenders in conv_cases(args):
        run_case(case, contenders, args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
