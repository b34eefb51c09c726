"""Find out why a product or a layer is slow: `explain`, `audit`, and `python -m amp_kernels audit FILE.py:FACTORY`.

The command executes FILE.py and calls FACTORY. Name only files that you would run.

Nothing is measured. `audit` reads only shapes. `explain` reads shapes, strides, dtypes and devices.

The command also names the layers that stay in floating point if the model becomes int8 (`amp_kernels.quantization`).

With 16-bit weights and activations (autocast included), cuBLAS is fast if the layer's numbers of features are multiples
of 8. Otherwise cuBLAS uses kernels that were made for older GPUs, which are slower.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from .functional.matmul import (
    CPU,
    FEW_ROWS,
    IN_ONE_CALL,
    LIBRARY,
    ON_TENSOR_CORES,
    TRITON,
    Activation,
    as_matrices,
    autocast,
    check_serves,
    copies_of,
    engine_of,
    is_slow,
)
from .nn.conversion import is_conv1d, kind_of, matrix, of_all_blocks
from .nn.linear import Linear, converts
from .ops.matmul import DTYPES, check_activation, round_up
from .padding import MULTIPLE, is_column_major
from .quantization import left_in_float
from .report import table

__all__ = ["Explanation", "Finding", "audit", "explain"]

ITEM = 2  # bytes of an element of the 16-bit dtypes
# Times in the sentences of an `Explanation`. The source of the second is benchmarks/results/h200/device_times.csv.
_MEASURED_ENGINES = "fp16 4096 x 4096 x 4096 on an H100: 188 us with cuBLAS, 310 us in CUDA C++, 336 us in Triton"
_MEASURED_COPIES = "fp16 4096 x 4095 x 4095 on an H200: 225 us with the copies, 1,025 us without"


# ---------------------------------------------------------------------------------------------------------- products
class Explanation(NamedTuple):
    """How `amp_kernels.matmul(a, b)` is computed. `str()` returns it as a sentence.

    Attributes:
        engine: A backend of amp_kernels, `"cublas"`, or `"torch"` for dtypes that are left to torch.
        reason: Why this engine multiplies.
        padded: The operands that are first copied into padded memory: `"a"`, `"b"`, both or none.
        padding_bytes: Bytes that these copies take.

    Examples:
        >>> explanation = amp_kernels.explain((65536, 1001), (1001, 512))
        >>> explanation.padded, explanation.padding_bytes
        (('a', 'b'), 133152768)
    """

    engine: str
    reason: str
    padded: tuple[str, ...]
    padding_bytes: int

    def __str__(self) -> str:
        if not self.padded:
            return f"{self.engine}: {self.reason}; nothing is copied"
        verb = "is" if len(self.padded) == 1 else "are"
        measured = f" ({_MEASURED_COPIES})" if self.engine == LIBRARY else ""
        return (
            f"{self.engine}: {self.reason}; {' and '.join(self.padded)} {verb} first copied into padded memory, "
            f"{self.padding_bytes:,} bytes{measured}"
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

    Nothing is computed. A machine without a GPU gives the same answer as a machine with a GPU and compiled kernels, if
    `a` and `b` are shapes, meta tensors, or fake tensors of a GPU. A meta tensor counts as a tensor on a GPU.

    The times in the sentence were measured with the shapes that it names, and are the reason for the choice. They are
    not times of `a @ b`. `python -m amp_kernels bench matmul` times products on your machine.

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
        return Explanation(engine, f"products of {str(left.dtype).removeprefix('torch.')} are left to torch", (), 0)
    check_serves(engine, place.type)
    left, right = as_matrices("explain", left, right)
    sizes = zip("ab", (left, right), copies_of(engine, left, right), strict=True)
    copies = {name: _copy_bytes(x, size) for name, x, size in sizes if size is not None}
    return Explanation(engine, _reason(engine, left, activation), tuple(copies), sum(copies.values()))


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
    """Return how many bytes the padded copy of `x` takes. `size`: rows and columns of each matrix in the copy.

    Each row is padded to a multiple of 16 bytes. If `x` is column-major, each column is padded instead.
    """
    columns, rows = size if is_column_major(x) else reversed(size)
    return math.prod(x.shape[:-2]) * rows * round_up(columns, MULTIPLE) * ITEM


# ------------------------------------------------------------------------------------------------------------ models
class Finding(NamedTuple):
    """A layer whose shape is slow on tensor cores. `str()` returns it as a sentence.

    Attributes:
        name: The layer's name in the model; empty for the model itself.
        kind: The layer's class.
        size: The layer's features or channels.
        cause: Each number of features or channels that is not a multiple of 8. For a linear layer, the number is
            followed by the matrices whose rows have this length, in brackets. For a recurrent layer and for
            `torch.nn.MultiheadAttention`, it is followed by the parameters with a dimension of this size. For an
            embedding, `cause` names the linear layer that has the same weight.
        remedy: The change that makes the layer fast.
        converts: Whether `amp_kernels.nn.convert_linear_` is a remedy.
        weight_bytes: Bytes that padding takes for the weight. For a linear layer these are all bytes of the padded
            copy. For all other layers they are the bytes that the additional channels or features take.
        row_bytes: Bytes, at most, that padding takes per row (token, pixel) of activations in a training step. Again
            these are whole padded copies for a linear layer, and only the additional channels or features for all
            other layers.

    Examples:
        >>> finding = amp_kernels.audit.audit(torch.nn.Linear(1001, 512))[0]
        >>> finding.kind, finding.converts, finding.weight_bytes
        ('Linear', True, 1032192)
    """

    name: str
    kind: str
    size: str
    cause: str
    remedy: str
    converts: bool
    weight_bytes: int
    row_bytes: int

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind}, {self.size}): {self.cause}; {self.remedy}"


def audit(model: nn.Module) -> list[Finding]:
    """List the layers of a model whose shapes are slow on tensor cores in fp16 or bf16.

    The layers that can be listed are `torch.nn.Linear` and its subclasses (except `amp_kernels.nn.Linear`),
    transformers' `Conv1D`, convolutions, recurrent layers and cells (`LSTM`, `GRU`, `RNN`),
    `torch.nn.MultiheadAttention` with all its projections, and embeddings that share the weight of a listed linear
    layer. Only shapes are read, so the model may be on the meta device.

    Args:
        model: A model of any dtype.

    Returns:
        A `Finding` per slow layer, in the model's order.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Linear(16, 8))
        >>> print(amp_kernels.audit.audit(model)[0])
        0 (Linear, 64 -> 10): out_features=10 (y, dy); amp_kernels.nn.Linear, or 64 -> 16
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit: model must be a torch.nn.Module, got {reprlib.repr(model)}")
    findings: list[Finding] = []
    slow: dict[int, tuple[str, nn.Module]] = {}  # the slow linear layers, by the id of the weight
    of_attention = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for name, layer in model.named_modules():
        if is_lazy(layer._parameters.get("weight")) or id(layer) in of_attention:
            continue
        if is_conv1d(layer) or (isinstance(layer, nn.Linear) and not isinstance(layer, Linear)):
            found = _linear(name, layer)
            # `_parameters` has no parametrized weight. Such a weight is left out of `slow`, because each read of
            # `layer.weight` computes a new tensor.
            weight = layer._parameters.get("weight")
            if found and weight is not None:
                slow[id(weight)] = (name, layer)
        elif isinstance(layer, _ConvNd):
            found = _conv(name, layer)
        elif isinstance(layer, nn.RNNBase | nn.RNNCellBase):
            found = _recurrent(name, layer)
        else:
            found = _attention(name, layer) if isinstance(layer, nn.MultiheadAttention) else None
        findings += [found] if found else []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding) and id(layer.weight) in slow:
            findings.append(_tied(name, layer, *slow[id(layer.weight)]))
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(findings, key=lambda finding: order[finding.name])


def _rounded(n: int, multiple: int = MULTIPLE) -> int:
    return round_up(n, multiple)


def _linear(name: str, layer: Any) -> Finding | None:
    if is_conv1d(layer):  # the weight is [in_features, out_features], so its rows are as long as the rows of y
        (outputs, inputs), of_inputs, of_outputs = matrix(layer).shape, "nx={} (x, dx)", "nf={} (W, y, dW, dy)"
        weight_bytes = ITEM * inputs * _rounded(outputs) if outputs % MULTIPLE else 0
    else:
        inputs, of_inputs = layer.in_features, "in_features={} (x, W, dx, dW)"
        outputs, of_outputs = layer.out_features, "out_features={} (y, dy)"
        weight_bytes = ITEM * outputs * _rounded(inputs) if inputs % MULTIPLE else 0
    odd = {said: size for said, size in ((of_inputs, inputs), (of_outputs, outputs)) if size % MULTIPLE}
    causes = [said.format(size) for said, size in odd.items()]
    row_bytes = sum(ITEM * _rounded(size) for size in odd.values())
    if not causes:
        return None
    remedy = f"{_rounded(inputs)} -> {_rounded(outputs)}"
    if converts(layer):
        remedy = f"amp_kernels.nn.Linear, or {remedy}"
    kind, size = type(layer).__name__, f"{inputs} -> {outputs}"
    return Finding(name, kind, size, ", ".join(causes), remedy, converts(layer), weight_bytes, row_bytes)


def _conv(name: str, layer: _ConvNd) -> Finding | None:
    multiple = math.lcm(MULTIPLE, layer.groups)
    channels = {"in_channels": layer.in_channels, "out_channels": layer.out_channels}
    odd = {which: n for which, n in channels.items() if n % MULTIPLE}
    if not odd:
        return None
    rounded = {which: _rounded(n, multiple) if which in odd else n for which, n in channels.items()}
    cause = ", ".join(f"{which}={n}" for which, n in odd.items())
    remedy = " -> ".join(map(str, rounded.values())) + ", channels_last"
    added = math.prod(rounded.values()) - math.prod(channels.values())
    weight_bytes = ITEM * math.prod(layer.kernel_size) * added // layer.groups
    row_bytes = ITEM * (sum(rounded.values()) - sum(channels.values()))
    size = " -> ".join(map(str, channels.values()))
    return Finding(name, type(layer).__name__, size, cause, remedy, False, weight_bytes, row_bytes)


def _recurrent(name: str, layer: Any) -> Finding | None:
    gates = 4 if isinstance(layer, nn.LSTM | nn.LSTMCell) else 3 if isinstance(layer, nn.GRU | nn.GRUCell) else 1
    layers, directions = getattr(layer, "num_layers", 1), 1 + getattr(layer, "bidirectional", False)
    projected = getattr(layer, "proj_size", 0)

    def counted(size: Mapping[str, int]) -> tuple[int, int]:
        """Return the elements of the weights, and of the activations of a row."""
        hidden = size["hidden_size"]
        result = size["proj_size"] if projected else hidden
        inputs = size["input_size"] + (layers - 1) * directions * result  # the inputs of all layers
        weights = gates * hidden * (inputs + layers * result) + (layers * result * hidden if projected else 0)
        return directions * weights, size["input_size"] + layers * directions * (gates * hidden + result)

    weights = {"input_size": ["weight_ih"], "hidden_size": ["weight_ih", "weight_hh"]}
    if projected:
        weights = {**weights, "proj_size": ["weight_hh", "weight_hr"]}
        weights["hidden_size"].append("weight_hr")
    sizes = {which: getattr(layer, which) for which in weights}
    rounded = {which: _rounded(n) for which, n in sizes.items()}
    return _of_parameters(name, layer, sizes, rounded, weights, counted)


def _attention(name: str, layer: nn.MultiheadAttention) -> Finding | None:
    """Look at all four projections. A size of one of them alone cannot be changed."""
    embed, packed = layer.embed_dim, layer._qkv_same_embed_dim

    def counted(size: Mapping[str, int]) -> tuple[int, int]:
        embed = size["embed_dim"]
        inputs = embed + size.get("kdim", embed) + size.get("vdim", embed)
        return embed * (inputs + embed), inputs + 5 * embed

    weights = {"embed_dim": ["in_proj_weight", "out_proj.weight"]}
    sizes, rounded = {"embed_dim": embed}, {"embed_dim": _rounded(embed, math.lcm(MULTIPLE, layer.num_heads))}
    if not packed:
        weights = {
            "embed_dim": ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
            "kdim": ["k_proj_weight"],
            "vdim": ["v_proj_weight"],
        }
        sizes |= {"kdim": layer.kdim, "vdim": layer.vdim}
        rounded |= {which: _rounded(sizes[which]) for which in ("kdim", "vdim")}
    return _of_parameters(name, layer, sizes, rounded, weights, counted)


def _of_parameters(
    name: str,
    layer: nn.Module,
    sizes: Mapping[str, int],
    rounded: Mapping[str, int],
    weights: Mapping[str, Sequence[str]],
    count: Callable[[Mapping[str, int]], tuple[int, int]],
) -> Finding | None:
    """Return the finding for a layer that multiplies by several parameters.

    Args:
        name: The layer's name.
        layer: The layer.
        sizes: The arguments of its constructor.
        rounded: Sizes that are fast.
        weights: The parameters with a dimension of each size.
        count: Returns for sizes how many elements the weights have, and how many the activations of a row.
    """
    odd = [which for which, n in sizes.items() if n % MULTIPLE]
    if not odd:
        return None
    cause = ", ".join(f"{which}={sizes[which]} ({', '.join(weights[which])})" for which in odd)
    remedy = ", ".join(f"{which}={rounded[which]}" for which in odd)
    better = {which: rounded[which] if which in odd else n for which, n in sizes.items()}
    added, added_to_rows = (ITEM * (new - now) for new, now in zip(count(better), count(sizes), strict=True))
    size = ", ".join(map(str, sizes.values()))
    return Finding(name, type(layer).__name__, size, cause, remedy, False, added, added_to_rows)


def _tied(name: str, layer: nn.Embedding, other: str, linear: nn.Module) -> Finding:
    rows, columns = layer.num_embeddings, layer.embedding_dim
    remedy = f"{_rounded(rows)} x {_rounded(columns)}"
    if converts(linear):
        remedy = f"nothing, or {remedy} together with {other}"
    cause = f"shares the weight of {other}"
    return Finding(name, type(layer).__name__, f"{rows} x {columns}", cause, remedy, converts(linear), 0, 0)


# ------------------------------------------------------------------------------------------------------ command line
class CannotLoad(Exception):
    """The model cannot be loaded. The message is a sentence for the user."""


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
    parser.add_argument(
        "--batch",
        type=_rows,
        metavar="ROWS",
        help="rows of the activations in a step (tokens, pixels); shows the bytes of padding for this many rows",
    )
    parser.set_defaults(run=lambda args: run(args.model, args.batch))


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"ROWS must be a positive integer, got {text!r}")
    return int(text)


def run(target: str, rows: int | None = None) -> int:
    """Print the table and a summary. Return 0, or 2 if the model cannot be loaded."""
    try:
        model = _load(target)
    except CannotLoad as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    findings = audit(model)
    if findings:
        headers = ("layer", "class", "size", "slow for", "instead", f"padding{f' at {rows:,} rows' if rows else ''}")
        print(table(headers, [_cells(finding, rows) for finding in findings]), end="\n\n")
    print(_summary(findings))
    if left := left_in_float(model):
        print(_int8(left))
    return 0


def _cells(finding: Finding, rows: int | None) -> list[str]:
    name, kind, size, cause, remedy, _, weight, row = finding
    if not (weight or row):
        cost = "none"
    elif rows is None:
        cost = " + ".join([f"{weight:,} B"] * bool(weight) + [f"{row:,} B a row"] * bool(row))
    else:
        cost = f"{weight + rows * row:,} B"
    return [name or "(the model)", kind, size, cause, remedy, cost]


def _summary(findings: Sequence[Finding]) -> str:
    if not findings:
        return "No layer has a shape that is slow on tensor cores in fp16 or bf16."
    layers = [finding for finding in findings if finding.kind != "Embedding"]
    ours = sum(finding.converts for finding in layers)
    count, rest = len(layers), len(layers) - ours
    parts = []
    if ours:
        parts.append(f"amp_kernels.nn.convert_linear_(model) pads for {ours} of them and changes no shape")
    if rest:
        parts.append(f"{rest} must have other sizes to be fast")
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
        raise CannotLoad(f"the model must be given as FILE.py:FACTORY, got {target!r}")
    if not path.is_file():
        raise CannotLoad(f"FILE.py must exist, got {file!r}")
    as_name = path.stem if path.stem not in sys.modules else f"audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(as_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE.py` does
    sys.modules[as_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CannotLoad(f"{file} cannot be imported: {_describe(error)}") from error
    if not hasattr(module, name):
        raise CannotLoad(f"FACTORY must be a name in {file}, got {name!r}")
    factory = getattr(module, name)
    model = factory if isinstance(factory, nn.Module) else _call_factory(factory, target)
    if not isinstance(model, nn.Module):
        raise CannotLoad(f"{target} must return an nn.Module, got {type(model).__name__}")
    return model


def _call_factory(factory: Any, target: str) -> Any:
    if not callable(factory):
        raise CannotLoad(f"{target} must be a function or an nn.Module, got {type(factory).__name__}")
    # On the meta device a model of any size takes no memory. A factory that fails on the meta device is called again
    # without this device.
    with contextlib.suppress(Exception, SystemExit), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return factory()
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise CannotLoad(f"{target} must run without arguments, got: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
