"""Minima and maxima in the Triton kernels: on a GPU they drop NaN, in the interpreter they keep it.

The interpreter hides the difference from every other test. So a formula or a norm may use a minimum or maximum of
floats only with ``propagate_nan``. Every other use is in the list below, as the source has it, with the reason why no
NaN reaches it. An entry whose use is gone fails: it could cover a later use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from conftest import TESTS

SOURCES = sorted((TESTS.parent / "triton_kernels").glob("*.py"))
NAMES = {"minimum", "maximum", "min", "max", "clamp", "fmin", "fmax", "argmin", "argmax", "sort", "topk"}
OFFSETS, CODES, KEYS = "sizes and offsets", "int8 codes and zero points", "floats as ordered integers, NaN the largest"

ALLOWED = {
    "common": {"tl.minimum(rest, chunk_size)": OFFSETS},
    "copy_pad": {"tl.minimum(first + tiles_of_share, tl.cdiv(n_rows, BR))": OFFSETS},
    "int8": {
        "tl.minimum(tl.maximum(zero, -128), 127)": CODES,
        "tl.maximum(zero, -128)": CODES,
        "tl.minimum(tl.maximum(tl.where(inverse == 0.0, zero_point, codes), lowest), 127)": CODES,
        "tl.maximum(tl.where(inverse == 0.0, zero_point, codes), lowest)": CODES,
    },
    "int8_conv2d": {
        "tl.minimum(tl.arange(0, BM).to(tl.int64), m - 1 - first)": OFFSETS,
        "tl.minimum(tap_y, taps_y - 1)": OFFSETS,
    },
    "int8_matmul": {
        "tl.minimum(first + tiles_of_split, tl.cdiv(k, BK).to(tl.int32))": OFFSETS,
        "tl.minimum(k, last.to(tl.int64) * BK)": OFFSETS,
        "tl.minimum(k, first.to(tl.int64) * BK)": OFFSETS,
    },
    "int8_quantize": {
        "tl.maximum(high, x.to(tl.int32, bitcast=True) & 2147483647)": KEYS,
        "tl.minimum(low, key)": KEYS,
        "tl.maximum(high, key)": KEYS,
        "tl.max(high, axis=AXIS, keep_dims=True)": KEYS,
        "tl.min(low, axis=AXIS, keep_dims=True)": KEYS,
        "tl.maximum(high, tl.load(pointers, mask=mask, other=0))": KEYS,
        "tl.minimum(low, tl.load(pointers + n_pieces * n_groups, mask=mask, other=0))": KEYS,
    },
    "int8_tiles": {"tl.minimum(reduced, row - before)": OFFSETS},
    "product": {
        "tl.minimum(tiles_m - band * _GROUP, _GROUP)": OFFSETS,
        "tl.minimum(last, (k // BK).to(tl.int32))": OFFSETS,
    },
    "remainder": {
        "tl.minimum(remainder, 32767)": "int32 remainders",
        "tl.maximum(weight.to(tl.int32, bitcast=True) >> 23 & 255, 113)": "exponents, as int32",
        "tl.minimum(tl.maximum(units, -32767.0), 32767.0)": "floats; tl.where replaces what an inf or NaN weight has",
        "tl.maximum(units, -32767.0)": "floats; tl.where replaces what an inf or NaN weight has",
    },
    "states": {
        "tl.max(tl.reshape(magnitude, (TILE // STATE_GROUP, STATE_GROUP)), axis=1)": KEYS,
        "tl.minimum(steps + bits >> 16, LEVELS)": CODES,
        "tl.maximum(codes, 1)": CODES,
    },
    "unscale": {
        "tl.max(x.to(tl.int32, bitcast=True) & 2147483647)": KEYS,
        "tl.minimum((VEC - address // BYTES % VEC) % VEC, n)": OFFSETS,
        "tl.minimum(first, tensor)": "numbers of tensors",
        "tl.min(first)": "numbers of tensors",
    },
}


def uses(source: str) -> Iterator[str]:
    """The calls of `NAMES` in functions that Triton compiles. It takes Python's builtins for its own functions."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and not any(k.arg == "propagate_nan" for k in node.keywords):
                    name = ast.unparse(node.func)
                    if name.rpartition(".")[2] in NAMES:
                        yield ast.unparse(node)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_minimum_and_maximum_is_of_integers(path) -> None:
    found, allowed = set(uses(path.read_text())), set(ALLOWED.get(path.stem, {}))
    assert found <= allowed, f"may drop NaN on a GPU: {sorted(found - allowed)}"
    assert allowed <= found, f"not there any more: {sorted(allowed - found)}"


def test_all_ways_to_write_one_are_found() -> None:
    bodies = (
        "tl.maximum(x, 0.0)",
        "x.max()",
        "max(x, y)",
        "tl.math.fmax(x, y)",
        "libdevice.fmin(x, y)",
        "tl.clamp(x, 0, 1)",
    )
    for body in bodies:
        assert list(uses(f"@triton.jit\ndef f(x, y):\n    z = 1 + {body}\n    return z")) == [body]
    assert not list(uses("def f(x, y):\n    return max(x, y)"))
    assert not list(uses("@triton.jit\ndef f(x, y):\n    return tl.maximum(x, y, propagate_nan=ALL)"))
