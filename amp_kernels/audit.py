"""Find out why a product or a layer is slow: `explain`, `audit`, and `python -m amp_kernels audit FILE.py:FACTORY`.

Nothing is measured. The command executes FILE.py and calls FACTORY, so name only files that you would run. It also
names the layers that stay in floating point if the model becomes int8 (`amp_kernels.quantization`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import operator
import reprlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from .functional.matmul import Activation, as_matrices, autocast, check_serves, engine_of
from .nn.conversion import is_conv1d, kind_of, matrix, of_all_blocks
from .nn.linear import Linear, converts
from .ops.matmul import (
    CPU,
    DTYPES,
    FEW_ROWS,
    IN_ONE_CALL,
    LIBRARY,
    MULTIPLE,
    ON_TENSOR_CORES,
    TRITON,
    check_activation,
    copies_of,
    is_column_major,
    is_slow,
    round_up,
)
from .quantization import left_in_float
from .report import CannotRun, table

__all__ = ["Explanation", "Finding", "audit"]  # explain is public as amp_kernels.explain

ITEM = 2  # bytes of an element of the 16-bit dtypes
_CONVERSION = "amp_kernels.nn.Linear"  # the remedy that `convert_linear_` applies
# Times in the sentences of an `Explanation`. The source of the second is benchmarks/results/h200/device_times.csv.
_MEASURED_ENGINES = "fp16 4096 x 4096 x 4096 on an H100: 188 us with cuBLAS, 310 us in CUDA C++, 336 us in Triton"
_MEASURED_COPIES = "fp16 4096 x 4095 x 4095 on an H200: 225 us with the copies, 1,025 us without"


# ---------------------------------------------------------------------------------------------------------- products
class Explanation(NamedTuple):
    """How `amp_kernels.matmul(a, b)` is computed. `str()` returns it as a sentence.

    Attributes:
        engine: A backend of amp_kernels, `"cublas"`, or `"torch"` for dtypes that are left to torch.
        reason: Why this engine multiplies.
        copies: The operands that are first copied into padded memory, `"a"` and `"b"`, and the bytes of each copy.

    Examples:
        >>> amp_kernels.explain((65536, 1001), (1001, 512)).copies
        {'a': 132120576, 'b': 1032192}
    """

    engine: str
    reason: str
    copies: dict[str, int]

    def __str__(self) -> str:
        if not self.copies:
            return f"{self.engine}: {self.reason}; nothing is copied"
        verb = "is" if len(self.copies) == 1 else "are"
        measured = f" ({_MEASURED_COPIES})" if self.engine == LIBRARY else ""
        return (
            f"{self.engine}: {self.reason}; {' and '.join(self.copies)} {verb} first copied into padded memory, "
            f"{sum(self.copies.values()):,} bytes{measured}"
        )


def explain(
    a: Tensor | Sequence[int],
    b: Tensor | Sequence[int],
    activation: Activation | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Explanation:
    """Tell which library multiplies two matrices, and what is copied for it.

    Nothing is computed, and no GPU is needed. A meta tensor counts as a tensor on a GPU. The times in the sentence are
    those of the shapes that it names, and not of `a @ b`.

    Args:
        a: A tensor as in `amp_kernels.matmul`, or the shape of a contiguous one.
        b: A tensor or a shape, like `a`.
        activation: The activation that is applied to the product, as in `amp_kernels.linear`.
        dtype: The dtype of `a` and `b` if they are shapes; None means fp16. Leave it out for tensors.
        device: The device of `a` and `b` if they are shapes; None means `"cuda"`. Leave it out for tensors.

    Returns:
        An `Explanation`.

    Raises:
        TypeError: `a` and `b` are not two tensors or two shapes. Or tensors are given together with `dtype` or
            `device`. Or dtypes do not fit, as in `amp_kernels.matmul`.
        ValueError: `a` and `b` cannot be multiplied or are on different devices, or `activation` is unknown.
        RuntimeError: The device is a GPU, inside ``use_backend("cpu")``.

    Examples:
        >>> amp_kernels.explain((64, 1001), (1001, 512), dtype=torch.bfloat16).engine
        'cublas'
        >>> amp_kernels.explain((64, 1001), (1001, 512), device="cpu").engine
        'cpu'
    """
    a_shape, b_shape = _shape(a), _shape(b)
    if isinstance(a, Tensor) != isinstance(b, Tensor) or a_shape is None or b_shape is None:
        raise TypeError(
            f"explain: a and b must be two tensors or two shapes, got {_told(a)} and {_told(b)}; for a product of "
            "[8192, 1024] and [1024, 4096], call explain((8192, 1024), (1024, 4096))"
        )
    check_activation("explain", activation)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if dtype is not None or device is not None:
            raise TypeError("explain: dtype and device must be None for tensors, which have their own; leave them out")
        if a.device != b.device:
            raise ValueError(f"explain: b must be on {a.device} as a is, got {b.device}")
        place = torch.device("cuda") if a.is_meta else a.device
        left, right = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b))
    else:
        place = torch.device(device or "cuda")
        left, right = (torch.empty(x, dtype=dtype or torch.float16, device="meta") for x in (a_shape, b_shape))
    left, right = autocast(place.type, left, right)
    engine = engine_of("explain", left.dtype, place.type)
    if left.dtype not in DTYPES:
        return Explanation(engine, f"products of {str(left.dtype).removeprefix('torch.')} are left to torch", {})
    if engine != TRITON:
        check_serves(engine, place.type)
    left, right = as_matrices("explain", left, right)
    sizes = zip("ab", (left, right), copies_of(engine, left, right), strict=True)
    copies = {name: _copy_bytes(x, size) for name, x, size in sizes if size is not None}
    return Explanation(engine, _reason(engine, left, activation), copies)


def _shape(x: Any) -> tuple[int | torch.SymInt, ...] | None:
    """Return the shape of a tensor, or `x` as a shape. None if `x` is neither of them."""
    if isinstance(x, Tensor):
        return tuple(x.shape)
    try:
        # operator.index would turn a symbolic size into a constant of the graph.
        return tuple(size if isinstance(size, torch.SymInt) else operator.index(size) for size in x)
    except TypeError:
        return None


def _told(x: object) -> str:
    return type(x).__name__ if isinstance(x, Tensor) else reprlib.repr(x)


def _reason(engine: str, a: Tensor, activation: Activation | None) -> str:
    if engine == CPU:
        dtype = "fp32" if is_slow(a) else str(a.dtype).removeprefix("torch.")
        return f"torch multiplies {dtype}; a CPU needs no padding"
    if engine not in ON_TENSOR_CORES:
        return "it pads nothing"
    reason = {
        LIBRARY: f"in measurements it was faster than the kernels of amp_kernels ({_MEASURED_ENGINES})",
        TRITON: "use_backend forces it; it has no kernel for products of 16-bit matrices, so torch multiplies them",
    }.get(engine, "use_backend forces it")
    if engine == LIBRARY and activation in ("gelu", "gelu_tanh"):
        where = " where a gradient is needed or there is no bias" if activation in IN_ONE_CALL else ""
        reason += f", and {activation} is a second pass over the result{where}"
    if a.shape[-2] <= FEW_ROWS:
        reason += f"; a product of {a.shape[-2]} rows takes the time of reading b once"
    return reason


def _copy_bytes(x: Tensor, size: Sequence[int]) -> int:
    """Return how many bytes the padded copy of `x` takes. `size`: rows and columns of each matrix in the copy."""
    columns, rows = size if is_column_major(x) else reversed(size)
    return math.prod(x.shape[:-2]) * rows * round_up(columns, MULTIPLE) * ITEM


# ------------------------------------------------------------------------------------------------------------ models
class Finding(NamedTuple):
    """A layer whose shape is slow on tensor cores. `str()` returns it as a sentence.

    Attributes:
        name: The layer's name in the model; empty for the model itself.
        size: The layer's class, with its features or channels in brackets.
        cause: The features or channels that are not multiples of 8.
        remedy: The change that makes the layer fast.

    Examples:
        >>> print(amp_kernels.audit.audit(torch.nn.Linear(1001, 512))[0])
        the model, Linear(1001, 512): in_features=1001; amp_kernels.nn.Linear, or in_features=1008
    """

    name: str
    size: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}, {self.size}: {self.cause}; {self.remedy}"


def audit(model: nn.Module) -> list[Finding]:
    """List the layers of a model whose shapes are slow on tensor cores in fp16 or bf16.

    It looks at `torch.nn.Linear` and its subclasses (except `amp_kernels.nn.Linear`), transformers' `Conv1D`,
    convolutions, recurrent layers and cells, and `torch.nn.MultiheadAttention`. Only shapes are read, so the model may
    be on the meta device.

    Args:
        model: A model of any dtype.

    Returns:
        A `Finding` per slow layer, in the model's order.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Linear(16, 8))
        >>> [finding.remedy for finding in amp_kernels.audit.audit(model)]
        ['amp_kernels.nn.Linear, or out_features=16']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit: model must be a torch.nn.Module, got {reprlib.repr(model)}")
    # A parametrized weight is no entry of `_parameters`. Each read of `layer.weight` computes a new tensor.
    embeddings = {
        id(layer._parameters["weight"]): name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Embedding) and "weight" in layer._parameters
    }
    of_attention = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    findings = []
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        sizes = {} if is_lazy(weight) or id(layer) in of_attention else _sizes(layer)
        odd = {which: n for which, n in sizes.items() if n % MULTIPLE}
        if not odd:
            continue
        remedy = ", ".join(f"{which}={round_up(n, _multiple(layer, which))}" for which, n in odd.items())
        if isinstance(layer, _ConvNd):
            remedy += ", channels_last"
        if id(weight) in embeddings:
            remedy += f" together with {embeddings[id(weight)]}, which has the same weight"
        if converts(layer):
            remedy = f"{_CONVERSION}, or {remedy}"
        size = f"{type(layer).__name__}({', '.join(map(str, sizes.values()))})"
        findings.append(Finding(name, size, ", ".join(f"{which}={n}" for which, n in odd.items()), remedy))
    return findings


def _sizes(layer: nn.Module) -> dict[str, int]:
    """Return the arguments of a layer's constructor that are dimensions of its matrices. {} for any other layer."""
    if is_conv1d(layer):
        return dict(zip(("nf", "nx"), matrix(layer).shape, strict=True))
    names: tuple[str, ...] = ()
    if isinstance(layer, nn.Linear) and not isinstance(layer, Linear):
        names = "in_features", "out_features"
    elif isinstance(layer, _ConvNd):
        names = "in_channels", "out_channels"
    elif isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        names = "input_size", "hidden_size", *(["proj_size"] if getattr(layer, "proj_size", 0) else [])
    elif isinstance(layer, nn.MultiheadAttention):
        names = ("embed_dim",) if layer._qkv_same_embed_dim else ("embed_dim", "kdim", "vdim")
    return {name: getattr(layer, name) for name in names}


def _multiple(layer: Any, size: str) -> int:
    """Return the number that a fast `size` is a multiple of."""
    if isinstance(layer, _ConvNd):
        return math.lcm(MULTIPLE, layer.groups)
    return math.lcm(MULTIPLE, layer.num_heads) if size == "embed_dim" else MULTIPLE


# ------------------------------------------------------------------------------------------------------ command line
def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``audit`` to the command line."""
    parser = commands.add_parser(
        "audit",
        help="Lists layers of a model whose shapes are slow on tensor cores, and why; executes the file you name.",
        description="Lists layers of a model whose shapes are slow on tensor cores, and why. It executes FILE.py and "
        "calls FACTORY: name only files that you would run.",
    )
    parser.add_argument(
        "model", metavar="FILE.py:FACTORY", help="a function without arguments that returns the model, or the model"
    )
    parser.set_defaults(run=lambda args: run(args.model))


def run(target: str) -> int:
    """Print the table and a summary. Return 0. Raise CannotRun if the model cannot be loaded."""
    model = _load(target)
    findings = audit(model)
    if findings:
        rows = [(finding.name or "(the model)", *finding[1:]) for finding in findings]
        print(table(("layer", "size", "slow for", "instead"), rows), end="\n\n")
    print(_summary(findings))
    if left := left_in_float(model):
        print(_int8(left))
    return 0


def _summary(findings: Sequence[Finding]) -> str:
    if not findings:
        return "No layer has a shape that is slow on tensor cores in fp16 or bf16."
    count, ours = len(findings), sum(finding.remedy.startswith(_CONVERSION) for finding in findings)
    parts = []
    if ours:
        parts.append(f"amp_kernels.nn.convert_linear_(model) pads for {ours} of them and changes no shape")
    if count > ours:
        parts.append(f"{count - ours} must have other sizes to be fast")
    what = "layer has a shape that is" if count == 1 else "layers have shapes that are"
    return f"{count} {what} slow on tensor cores in fp16 or bf16: {'; '.join(parts)}."


def _int8(left: Mapping[str, nn.Module]) -> str:
    """Count and name the layers that stay in floating point in an int8 model."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, layer in left.items():
        kinds[kind_of(layer)].append(of_all_blocks(name) or "the model")
    listed = (f"{len(names)} {kind} ({', '.join(dict.fromkeys(names))})" for kind, names in kinds.items())
    what = "1 layer with a matrix stays" if len(left) == 1 else f"{len(left)} layers with matrices stay"
    return f"In int8, by amp_kernels.quantization, {what} in floating point: {', '.join(listed)}."


def _load(target: str) -> nn.Module:
    """Return the model of ``FILE.py:FACTORY``."""
    file, colon, name = target.rpartition(":")
    path = Path(file)
    if not colon or not name or path.suffix != ".py":
        raise CannotRun(f"the model must be given as FILE.py:FACTORY, got {target!r}")
    if not path.is_file():
        raise CannotRun(f"FILE.py must exist, got {file!r}")
    as_name = path.stem if path.stem not in sys.modules else f"audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(as_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE.py` does
    sys.modules[as_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CannotRun(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise CannotRun(f"FACTORY must be a name in {file}, got {name!r}")
    factory = getattr(module, name)
    model = factory if isinstance(factory, nn.Module) else _call_factory(factory, target)
    if not isinstance(model, nn.Module):
        raise CannotRun(f"{target} must return an nn.Module, got {type(model).__name__}")
    return model


def _call_factory(factory: Any, target: str) -> Any:
    if not callable(factory):
        raise CannotRun(f"{target} must be a function or an nn.Module, got {type(factory).__name__}")
    # On the meta device a model of any size takes no memory. A factory that fails on the meta device is called again
    # without this device.
    with contextlib.suppress(Exception, SystemExit), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return factory()
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise CannotRun(f"{target} must run without arguments, got: {type(error).__name__}: {error}") from error
