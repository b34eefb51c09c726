"""Run in a process of its own, `check.py <library>`: the library takes the place of amp_kernels' CPU kernels."""

import itertools
import sys

import torch

import amp_kernels
from amp_kernels import reference
from amp_kernels.testing import int8
from amp_kernels.testing.common import error_and_allowed, randn

TILES = {"portable": 0, "avx2": 1, "avx512": 2}
SIZES = [(1, 1, 1), (2, 64, 5), (4, 129, 33), (5, 7, 3), (13, 0, 17), (15, 100, 31), (29, 333, 70), (60, 64, 129)]
SIZES += [(3, 200, 2), (29, 333, 7), (9, 513, 16), (13, 100, 300), (5, 100, 700)]  # few columns, several blocks
FORMS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "apart": lambda x: torch.cat([x, x[:, :3]], 1)[:, : x.shape[1]],
    "sliced": lambda x: x.repeat_interleave(3, 0).repeat_interleave(2, 1)[::3, ::2],
}


def product_failures(tile, size):
    m, k, n = size
    a, b = int8.integers(m, k, seed=1), int8.integers(k, n, seed=2)
    one, zeros = torch.ones(1, 1), torch.full((1, 1), 7, dtype=torch.int32)
    for (left, at), (right, bt) in itertools.product(FORMS.items(), repeat=2):
        for za, zb in itertools.product((None, zeros), repeat=2):
            out = torch.full((m, n), torch.nan)
            operands = (at(a), bt(b), one, za, one, zb)
            if not torch.ops.amp_kernels_tiles.int8_matmul(TILES[tile], *operands, out):
                return
            if not torch.equal(out, reference.int8_matmul(*operands)):
                yield f"{tile} tile, {size}, {left} by {right}, zero points {za is not None}, {zb is not None}"


def largest_failures(tile):
    """K at its limit, where the sums are nearest to 2^31."""
    for code in (-128, 127):
        a = torch.full((2, 131071), -128, dtype=torch.int8)
        for b in (torch.full((131071, 3), code, dtype=torch.int8), torch.full((3, 131071), code, dtype=torch.int8).t()):
            out, one = torch.empty(2, 3), torch.ones(1)
            if not torch.ops.amp_kernels_tiles.int8_matmul(TILES[tile], a, b, one, None, one, None, out):
                return
            if not (out == torch.tensor(131071 * -128 * code).float()).all():
                yield f"{tile} tile, largest sum of {code}"


def convolution_failures(tile):
    for name, conv in int8.CONVOLUTIONS.items():
        x, weight = (
            int8.integers(conv.batch, *conv.pixels, conv.channels),
            int8.integers(conv.outputs, *conv.taps, conv.channels),
        )
        one, zeros, steps = (
            torch.ones(1),
            torch.full((1,), 7, dtype=torch.int32),
            (conv.stride, conv.padding, conv.dilation),
        )
        if 0 in (conv.batch, conv.outputs):
            continue
        for za, out_scale in itertools.product((None, zeros), (None, torch.tensor(999.0))):
            named = dict(zip(("stride", "padding", "dilation"), steps, strict=True))
            expected = reference.int8_conv2d(x, weight, one, za, one, **named, out_scale=out_scale)
            out = torch.full_like(expected, 99)
            operands = (x, weight, one, za, one, *steps, out_scale, out)
            if not torch.ops.amp_kernels_tiles.int8_conv2d(TILES[tile], *operands):
                return
            if not torch.equal(out, expected):
                yield f"{tile} tile, convolution {name}, zero points {za is not None}, codes {out_scale is not None}"


def linear_failures(tile, size):
    m, k, n = size
    scale, weight = randn(n, 1, seed=4).abs(), int8.integers(n, k, seed=3)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, bias = randn(m, k, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
        out = torch.empty(m, n, dtype=dtype)
        if not torch.ops.amp_kernels_tiles.int8_linear(TILES[tile], x, weight, scale, bias, out):
            return
        truth = x.double() @ weight.double().t() * scale.double().t() + bias.double()
        theirs = (x.float() @ weight.float().t() * scale.t() + bias.float()).to(dtype)
        error, allowed = error_and_allowed(out, theirs, truth)
        if not error <= allowed:
            yield f"{tile} linear tile, {size}, {dtype}: error {error:.3g}, allowed {allowed:.3g}"


def case_failures():
    with amp_kernels.use_backend("cpu"):
        for case in itertools.chain(*int8.CASES.values()):
            for result in case.body(torch.device("cpu")):
                if not result.passed:
                    yield f"{case.op} {case}: {result}"


def main():
    torch.ops.load_library(sys.argv[1])
    failures = list(case_failures())
    for tile in TILES:
        failures += largest_failures(tile)
        failures += convolution_failures(tile)
        for size in SIZES:
            failures += product_failures(tile, size)
            failures += linear_failures(tile, size)
    print(*failures[:20], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
