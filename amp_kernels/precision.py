"""`PrecisionReport`: which layers of a model underflow, overflow or lose updates, measured in sampled steps.

A sampled step counts exponents (`ops/exponents.py`), and compares the masters before the update with those after it.
Other steps run no code of this module: hooks are installed before a sampled step and removed after it, and the
optimizer itself counts the steps in between.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from . import torch_private
from ._loader import import_extra
from .ops.exponents import count_exponents_
from .ops.library import call
from .ops.lists import are_fake
from .ops.table import DTYPE_CODES
from .optim._base import FusedOptimizer
from .optim._plan import Plan, capturing
from .optim._tensors import local
from .optim._wrappers import innermost, wrapped
from .reference._master import count_lost
from .reference.exponents import COLUMNS, ZEROS
from .report import table

__all__ = ["Row"]  # PrecisionReport is public as amp_kernels.PrecisionReport

ACTIVATION, ACTIVATION_GRAD, WEIGHT_GRAD = KINDS = ("activation", "activation_grad", "weight_grad")
_WORDS = {
    ACTIVATION: "activations",
    ACTIVATION_GRAD: "activation gradients",
    WEIGHT_GRAD: "weight gradients",
}
_BIAS = 127  # column e of the counts holds magnitudes from 2^(e - 127) on
_SUBNORMAL = {torch.float16: _BIAS - 14, torch.bfloat16: 1, torch.float32: 1}  # columns below this one, without zeros
_LOST_IN_FP16 = _BIAS - 25
_FP16_MAX = 65504.0
# The figures that `as_dict` returns for each row.
_FIGURES = (
    "zeros", "subnormal", "underflow", "lost_in_fp16", "nonfinite", "largest", "norm", "headroom", "lost_updates",
)  # fmt: skip
# From which figures on `advice` mentions a row.
_LEAST_UNDERFLOW = 0.05
_LEAST_LOST = 0.5
_LEAST_HEADROOM = 1.0


class Row(NamedTuple):
    """The counts for a layer's outputs, for their gradients, or for the gradient of a parameter.

    Attributes:
        name: The name of the layer or of the parameter.
        kind: "activation", "activation_grad" or "weight_grad".
        dtype: The dtype of the elements.
        exponents: int64 ``[257]`` on the CPU, a row of `amp_kernels.reference.count_exponents_`.
        largest: The largest finite magnitude.
        norm: The L2 norm of all elements.
        computed_in: The dtype in which the elements were computed. It differs from `dtype` under autocast: a product in
            fp16 gives the fp32 gradient of an fp32 weight.
        divided_by: The loss scale by which the elements were divided before they were counted, for example by
            `scaler.unscale_`; 1.0 if they were not.
        changed: For a 16-bit parameter, the number of its masters that the step changes. Otherwise 0.
        lost: The number of these changes that the 16-bit weight would lose without its master.

    Examples:
        >>> exponents = torch.zeros(257, dtype=torch.int64)
        >>> exponents[[100, 127, 256]] = torch.tensor([1, 2, 1])
        >>> fp32 = torch.float32
        >>> row = amp_kernels.precision.Row("head", "activation_grad", fp32, exponents, 1.5, 2.0, computed_in=fp32)
        >>> row.zeros, row.lost_in_fp16
        (0.25, 0.25)
    """

    name: str
    kind: str
    dtype: torch.dtype
    exponents: Tensor
    largest: float
    norm: float
    computed_in: torch.dtype
    divided_by: float = 1.0
    changed: int = 0
    lost: int = 0

    @property
    def total(self) -> int:
        """The number of elements."""
        return int(self.exponents.sum())

    @property
    def zeros(self) -> float:
        """The share of elements that are 0."""
        return int(self.exponents[ZEROS]) / self.total

    @property
    def subnormal(self) -> float:
        """The share of elements that are subnormal in `computed_in`: in fp16 those below 2^-14, without zeros."""
        return self._below(_SUBNORMAL[self.computed_in])

    @property
    def nonfinite(self) -> int:
        """The number of elements that are NaN or inf."""
        return int(self.exponents[255])

    @property
    def lost_in_fp16(self) -> float:
        """The share of elements below 2^-25, without zeros. Such elements would be 0 in fp16."""
        return self._below(_LOST_IN_FP16)

    def _below(self, column: int) -> float:
        """Returns the share of elements below this column. Zeros are left out."""
        # Elements that were divided by the scale are counted as if they were still multiplied by it, except in fp16,
        # where the division itself has made them subnormal.
        if self.dtype is not torch.float16 and self.divided_by > 0:
            column -= round(math.log2(self.divided_by))
        return int(self.exponents[: max(column, 0)].sum()) / self.total

    @property
    def underflow(self) -> float:
        """If computed in fp16, the share of subnormal elements among those that are not 0; 1.0 if all are 0. Else 0."""
        if self.computed_in is not torch.float16:
            return 0.0
        return 1.0 if self.zeros == 1 else self.subnormal / (1 - self.zeros)

    @property
    def headroom(self) -> float:
        """The number of doublings, as a real number, until the largest finite magnitude times `divided_by` is 65504."""
        largest = self.largest * self.divided_by
        return math.log2(_FP16_MAX / largest) if largest > 0 else math.inf

    @property
    def lost_updates(self) -> float | None:
        """The share of changes that the 16-bit weight would lose without its master. None if there are no changes."""
        return self.lost / self.changed if self.changed else None


class _Counts:
    """Results of `count_exponents_` on one device, with a row for each name."""

    def __init__(
        self, kind: str, names: Sequence[str], dtypes: Sequence[torch.dtype | None], device: torch.device
    ) -> None:
        self.kind, self.names, self.dtypes = kind, names, dtypes  # a dtype is None if there is nothing to count
        self.counts = torch.zeros(len(names), COLUMNS, dtype=torch.int64, device=device)
        self.largest = torch.zeros(len(names), dtype=torch.float32, device=device)
        self.squares = torch.zeros(len(names), dtype=torch.float64, device=device)
        self.updates = torch.zeros(len(names), 2, dtype=torch.int64, device=device)  # rows of `count_lost`

    def add(self, begin: int, tensors: Sequence[Tensor]) -> None:
        """Adds the counts of tensors to the rows from `begin` on."""
        rows = slice(begin, begin + len(tensors))
        call(count_exponents_, list(tensors), self.counts[rows], self.largest[rows], self.squares[rows])


class _Sample:
    """The counts of one sampled step. They are on the devices of the model."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = layers
        self.counts: list[_Counts] = []
        self.scale: Tensor | None = None
        self.is_divided = False  # whether weight gradients were divided by the scale before the step
        self.has_seen_layers = False
        # During a step, for each 16-bit parameter with a gradient: its row of `_Counts.updates`, its name in the
        # optimizer, the parameter, and its master before the update.
        self.masters: list[tuple[Tensor, str, Tensor, Tensor]] = []
        self._of_layers: dict[tuple[Any, ...], _Counts] = {}

    def of_layers(self, kind: str, tensor: Tensor) -> _Counts:
        key = kind, tensor.device, tensor.dtype
        if key not in self._of_layers:
            self._of_layers[key] = _Counts(kind, self.layers, [tensor.dtype] * len(self.layers), tensor.device)
            self.counts.append(self._of_layers[key])
        return self._of_layers[key]

    def rows(self) -> list[Row]:
        """Returns the rows, in the order of the model. Rows of one name and dtype are added up."""
        merged: dict[tuple[str, str, torch.dtype], list[Any]] = {}
        for counts in self.counts:
            figures = counts.counts.cpu(), counts.largest.tolist(), counts.squares.tolist(), counts.updates.tolist()
            counted: Any = zip(counts.names, counts.dtypes, *figures, strict=True)
            for name, dtype, exponents, largest, squares, (changed, lost) in counted:
                if dtype is not None and exponents.any():
                    sums = merged.setdefault((counts.kind, name, dtype), [0, 0.0, 0.0, 0, 0])
                    sums[0] = sums[0] + exponents
                    sums[1] = max(sums[1], largest)
                    sums[2:] = sums[2] + squares, sums[3] + changed, sums[4] + lost
        in_fp16 = {name for kind, name, dtype in merged if kind == ACTIVATION_GRAD and dtype is torch.float16}
        dtypes = Counter((kind, name) for kind, name, _ in merged)
        rows, divisor = [], self.scale.item() if self.is_divided and self.scale is not None else 1.0
        for (kind, name, dtype), (exponents, largest, squares, changed, lost) in merged.items():
            computed_in = dtype
            if kind == WEIGHT_GRAD and (name.rpartition(".")[0] or ROOT) in in_fp16:
                computed_in = torch.float16
            shown = name if dtypes[kind, name] == 1 else f"{name} ({str(dtype).removeprefix('torch.')})"
            divided_by = divisor if kind == WEIGHT_GRAD else 1.0
            norm = math.sqrt(squares)
            rows.append(Row(shown, kind, dtype, exponents, largest, norm, computed_in, divided_by, changed, lost))
        return rows


ROOT = "(root)"  # the name of the model itself, if it is a layer


def _nothing(*_: Any) -> None: ...


class _Hook:
    """A hook of a module. Copies of the module, and pickles, get a function that does nothing.

    Otherwise a copy would count into the sample of the original for good, and a pickle would contain the optimizer.
    """

    def __init__(self, module: nn.Module, function: Callable[[Any], None]) -> None:
        self._module, self._function = ref(module), function

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        # Code that is being compiled or exported calls no hook.
        if not torch.compiler.is_compiling() and module is self._module():
            self._function(output)

    def __reduce__(self) -> Any:
        return functools.partial, (_nothing,)


class PrecisionReport:
    """Measures which layers underflow, which overflow, and what the loss scale should be.

    A sampled step counts the exponents of the outputs of every layer (activations), of their gradients in the backward
    pass, and of the gradient of every parameter, as in figures 2 and 3 of Micikevicius et al. 2018. For each 16-bit
    parameter it also counts the updates that the weight would lose without its master. A *layer* is a module without
    submodules, or one with parameters of its own.

    `every=100` samples the 100th, the 200th, ... step of the optimizer. A `with` block samples the steps in it, and
    adds them up. A new sample replaces the last one. Counts are exact, and stay on the device until a method reads
    them. In a sampled step the model runs eagerly, and the masters from before the update take 4 bytes for each 16-bit
    weight. The guide to precision says what the figures mean, and what a report cannot see.

    Args:
        model: The model.
        optimizer: An optimizer of `amp_kernels.optim` that trains the model, or a wrapper of one.
        scaler: The loss scaler of the training, if there is one. The report reads its scale.
        every: Sample each `every`-th step. None: sample only in `with` blocks.

    Raises:
        TypeError: `model` is not an `nn.Module`, `optimizer` is not one of `amp_kernels.optim`, `scaler` is not a
            scaler, or `every` is not an int.
        ValueError: `every` is less than 1, the optimizer trains no parameter of the model, or another report samples
            this optimizer.

    Examples:
        >>> model = torch.nn.Linear(4, 2).half()
        >>> optimizer = amp_kernels.optim.FusedSGD(model.parameters(), lr=0.5)
        >>> report = amp_kernels.PrecisionReport(model, optimizer)
        >>> with report:
        ...     model(torch.full((1, 4), 1e-7).half()).sum().backward()
        ...     optimizer.step()
        >>> report.advice()[0].split("; ")[1]
        'the scale may rise by 2^15 before a gradient of the report overflows'
        >>> report.as_dict()["activation_grad/(root)/largest"]
        1.0
        >>> [(row.kind, row.total) for row in report.rows()]
        [('weight_grad', 8), ('activation_grad', 2), ('weight_grad', 2), ('activation', 2)]
        >>> print(report.table(limit=1).splitlines()[-1].split()[:5])
        ['weight', 'weight_grad', 'float16', '0.0%', '100.0%']
        >>> len(report.plot().axes)
        3
        >>> report.close()
    """

    def __init__(self, model: nn.Module, optimizer: Any, scaler: Any = None, *, every: int | None = None) -> None:
        inner = wrapped(optimizer)
        _check_arguments(model, optimizer, inner, scaler, every)
        self._model, self._optimizer, self._scaler, self._every = model, inner, scaler, every
        self._sample: _Sample | None = None  # the sample that is being taken
        self._last: _Sample | None = None
        self._undo = contextlib.ExitStack()  # removes hooks
        self._in_block = False
        self._wait()
        if every is not None:
            inner._sampler = self

    # -------------------------------------------------------------------------------------------------- sampling
    def __enter__(self) -> PrecisionReport:
        if self._in_block:
            raise RuntimeError("PrecisionReport: `with` blocks of one report must not be nested")
        self._stop()
        self._start()
        # Compiled functions that contain the call of the model run eagerly in the block, too.
        self._undo.enter_context(torch.compiler.set_stance("force_eager"))
        self._in_block = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._in_block = False
        self._finish()
        self._wait()

    def close(self) -> None:
        """Stop sampling, and remove all hooks. The last sample stays readable. `with` blocks still work."""
        self._stop()
        self._every = None
        if self._optimizer._sampler is self:
            self._optimizer._sampler, self._optimizer._steps_to_sample = None, 0

    def _wait(self) -> None:
        """Lets the optimizer count the steps until the next sample, if there is one outside of `with` blocks."""
        if self._every == 1:
            self._start()
        if self._every is not None:
            self._optimizer._steps_to_sample = self._every - 1

    def _start(self) -> None:
        """Begins a sample: installs hooks."""
        if self._optimizer._observer is not None:
            raise RuntimeError("PrecisionReport: another report samples this step; leave its `with` block before")
        layers = [(name or ROOT, layer) for name, layer in self._model.named_modules() if _is_layer(layer)]
        sample = _Sample([name for name, _ in layers])
        eager: list[Any] = []  # the stance inside the model, if it was changed

        def enter(_: Any) -> None:
            eager.append(torch.compiler.set_stance("force_eager"))

        def leave(_: Any) -> None:
            if eager:
                eager.pop().__exit__(None, None, None)

        if not isinstance(self._model, torch.jit.ScriptModule):
            before, after = _Hook(self._model, enter), _Hook(self._model, leave)
            self._undo.callback(self._model.register_forward_pre_hook(before, prepend=True).remove)
            self._undo.callback(self._model.register_forward_hook(after, always_call=True).remove)
        for index, (_, layer) in enumerate(layers):
            hook = _Hook(layer, self._count_outputs(sample, layer, index))
            self._undo.callback(layer.register_forward_hook(hook).remove)
        self._sample, self._optimizer._observer = sample, self

    def _stop(self) -> None:
        """Ends a sample without a result."""
        if self._sample is not None:
            self._sample.masters = []  # a step that raised an error leaves them
            self._sample, self._optimizer._observer = None, None
        self._undo.close()

    def _finish(self) -> None:
        """Ends a sample. If nothing was counted, the last sample stays."""
        sample = self._sample
        if sample is not None and sample.counts:
            if sample.scale is None and self._scaler is not None:
                sample.scale = self._scaler.scale(torch.ones((), device=sample.counts[0].counts.device))
            self._last = sample
        self._stop()

    def _count_outputs(self, sample: _Sample, layer: nn.Module, index: int) -> Callable[[Any], None]:
        """Returns the forward hook of a layer: it counts the outputs, and installs hooks for their gradients."""

        def count(kind: str, tensor: Tensor) -> None:
            if self._sample is not sample or tensor.dtype not in DTYPE_CODES or are_fake([tensor]):
                return
            _refuse_capture(tensor.device)
            sample.of_layers(kind, tensor).add(index, [tensor.detach()])

        def count_outputs(output: Any) -> None:
            sample.has_seen_layers = True
            if torch_private.are_functorch_transforms_active():
                return
            # In a backward pass, a layer runs because its activations are computed again. They were counted before.
            is_recomputed = torch_private.is_in_backward()
            for tensor in _tensors(output):
                if not is_recomputed and (layer.training or tensor.requires_grad):
                    count(ACTIVATION, local(tensor))
                if tensor.requires_grad:
                    handle = tensor.register_hook(lambda gradient: count(ACTIVATION_GRAD, local(gradient)))
                    if tensor.is_leaf:  # a parameter, which would keep the hook
                        self._undo.callback(handle.remove)

        return count_outputs

    def _observe(self, plans: Sequence[Plan], grad_scale: Tensor | None) -> None:
        """Counts the gradients of a step, and keeps the masters. The optimizer calls it before it writes anything."""
        sample = self._sample
        assert sample is not None  # this report is the optimizer's observer only while it takes a sample
        sample.masters = []
        for plan in plans:
            _refuse_capture(plan.device)
        if not sample.has_seen_layers:
            warnings.warn(
                "PrecisionReport: no layer of the model called its hooks in a sampled step, so the report has no "
                "activations; if the model is compiled, pass the result of torch.compile as `model`, or sample in a "
                "`with` block",
                stacklevel=2,
            )
        names = {id(param): name for name, param in self._model.named_parameters()}
        for plan in plans:
            members, device = plan.members, plan.device
            own = [names.get(id(p), name) for p, name in zip(members.params, members.names, strict=True)]
            dtypes = [None if p.grad is None else p.grad.dtype for p in members.params]
            counts = _Counts(WEIGHT_GRAD, own, dtypes, device)
            nothing = torch.empty(0, device=device)
            counts.add(0, [nothing if p.grad is None else local(p.grad) for p in members.params])
            for row, name, param in zip(counts.updates, members.names, members.params, strict=True):
                if param.grad is not None and param.dtype is not torch.float32:
                    sample.masters.append((row, name, param, local(self._optimizer._master(name, param))))
            sample.counts.append(counts)
        sample.is_divided = grad_scale is None
        if grad_scale is not None:
            sample.scale = grad_scale.clone()
        elif self._scaler is not None and plans:
            sample.scale = self._scaler.scale(torch.ones((), device=plans[0].device))

    def _end_step(self) -> None:
        """Counts the updates after a step of the optimizer. Ends the sample, unless it is that of a `with` block."""
        sample = self._sample
        assert sample is not None
        for row, name, param, before in sample.masters:
            row.copy_(count_lost(before, local(self._optimizer._master(name, param)), param.dtype))
        sample.masters = []
        if not self._in_block:
            self._finish()
            self._wait()

    # ---------------------------------------------------------------------------------------------------- results
    @property
    def scale(self) -> float | None:
        """The loss scale of the last sample. 1.0 without a scaler, and None without a sample. Waits for the device."""
        if self._last is None:
            return None
        return 1.0 if self._last.scale is None else self._last.scale.item()

    def rows(self) -> list[Row]:
        """Return what the last sample counted, the worst rows first. Waits for the device.

        Returns:
            A list with a `Row` for the outputs of each layer, for their gradients, and for the gradient of each
                parameter. Layers that did not run, and parameters without a gradient, have none. The list is empty
                before the first sample. Rows with NaN or inf come first. The others are sorted by `Row.underflow`, then
                by `Row.lost_in_fp16` and `Row.headroom`.
        """
        rows = [] if self._last is None else self._last.rows()
        return sorted(rows, key=lambda row: (-row.nonfinite, -row.underflow, -row.lost_in_fp16, row.headroom))

    def as_dict(self) -> dict[str, float]:
        """Return the figures of the last sample, for a logger. Waits for the device.

        Returns:
            A dict whose keys are `kind/name/figure`, for example `"activation_grad/blocks.0.attn/zeros"`. The figures
                are `zeros`, `subnormal`, `underflow`, `lost_in_fp16` and `lost_updates` (shares from 0 to 1),
                `nonfinite` (a count), `largest`, `norm`, and `headroom` (doublings until 65504; it is left out if all
                elements are 0). `"scale"` is the loss scale. The dict is empty before the first sample.
        """
        figures: dict[str, float] = {}
        if (scale := self.scale) is not None:
            figures["scale"] = scale
        for row in self.rows():
            own = {name: getattr(row, name) for name in _FIGURES if name != "headroom" or row.largest > 0}
            figures |= {f"{row.kind}/{row.name}/{name}": x for name, x in own.items() if x is not None}
        return figures

    def advice(self) -> list[str]:
        """Return a sentence for each layer and parameter whose figures call for a change, the worst first.

        Waits for the device.

        Returns:
            A list of sentences. The guide to precision says which figures call for one.
        """
        rows = self.rows()
        if self.scale is None:
            return []
        advisor = _Advisor(rows, self.scale, has_scaler=self._last is not None and self._last.scale is not None)
        sentences = [said for row in rows if (said := advisor.about(row))]
        return sentences + advisor.about_masters()

    def table(self, limit: int | None = 20) -> str:
        """Return the rows of the last sample as text, the worst first. Waits for the device.

        Args:
            limit: The largest number of rows. None: all of them.

        Returns:
            The table, with a line of headers.

        Raises:
            ValueError: `limit` is negative.
        """
        if limit is not None and limit < 0:
            raise ValueError(f"PrecisionReport.table: limit must be at least 0 or None, got {limit}")
        headers = (
            "layer or parameter", "of", "dtype", "zeros", "subnormal", "NaN, inf", "largest", "doublings to 65504",
            "lost in fp16", "lost updates",
        )  # fmt: skip
        cells = [
            (
                row.name,
                row.kind,
                str(row.dtype).removeprefix("torch."),
                f"{row.zeros:.1%}",
                f"{row.subnormal:.1%}",
                str(row.nonfinite),
                f"{row.largest:.2e}",
                f"{row.headroom:.1f}",
                f"{row.lost_in_fp16:.1%}",
                "" if row.lost_updates is None else f"{row.lost_updates:.1%}",
            )
            for row in self.rows()[:limit]
        ]
        return table(headers, cells)

    def __str__(self) -> str:
        """Return the table and the advice, or a sentence if there is no sample. Waits for the device."""
        if self._last is None:
            return "PrecisionReport: no step was sampled yet"
        rows, shown = self.rows(), 20
        more = f"\n... and {len(rows) - shown} more; see table(limit=None)" if len(rows) > shown else ""
        return "\n".join([f"loss scale: {self.scale:g}", self.table(shown) + more, *self.advice()])

    def plot(self, kind: str = "activation_grad") -> Any:
        """Plot the exponents of each layer in the last sample. Needs matplotlib. Waits for the device.

        For each layer the left part shows the share of elements that are 0 or subnormal, and the right part a histogram
        of exponents, as a row of colours. Vertical lines mark the range of fp16.

        Args:
            kind: "activation", "activation_grad" or "weight_grad".

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ValueError: `kind` is none of these, or the last sample has no row of this kind.
            ImportError: matplotlib is not installed.
        """
        if kind not in KINDS:
            raise ValueError(f"PrecisionReport.plot: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        rows = [] if self._last is None else [row for row in self._last.rows() if row.kind == kind]
        if self.scale is None or not rows:
            raise ValueError(f"PrecisionReport.plot: no sampled step has an {kind}; sample a step first")
        figure_of = import_extra("PrecisionReport.plot", "matplotlib.figure", "bench").Figure
        low, high = -40, 17  # the exponents that the histogram shows; others are in its first and last column
        shares = torch.zeros(len(rows), high - low + 1)
        for t, row in enumerate(rows):
            counts = row.exponents[1:255].double()
            inside = counts[low + _BIAS - 1 : high + _BIAS].clone()
            inside[0] += counts[: low + _BIAS - 1].sum()
            inside[-1] += counts[high + _BIAS :].sum()
            shares[t] = inside / row.total
        figure = figure_of(figsize=(10, max(3.0, 1.2 + 0.22 * len(rows))), layout="constrained")
        bars, colours = figure.subplots(1, 2, sharey=True, width_ratios=(1, 3))
        names, y = [row.name for row in rows], range(len(rows))
        zeros = [row.zeros for row in rows]
        bars.barh(y, zeros, color="tab:red", label="zeros")
        bars.barh(y, [row.subnormal for row in rows], left=zeros, color="tab:orange", label="subnormal")
        bars.set(xlim=(0, 1), xlabel="share", yticks=list(y))
        bars.set_yticklabels(names, fontsize=7)
        bars.invert_yaxis()
        figure.legend(*bars.get_legend_handles_labels(), fontsize=7, loc="outside lower left", ncols=2)
        image = colours.imshow(
            shares.numpy(), aspect="auto", cmap="Blues", interpolation="nearest", vmin=0,
            extent=(low, high + 1, len(rows) - 0.5, -0.5),
        )  # fmt: skip
        for position, label in ((-24, "fp16's smallest"), (-14, "normal from here"), (16, "overflow")):
            colours.axvline(position, color="black", linewidth=0.8, linestyle="--")
            colours.text(position, -0.7, label, fontsize=6, ha="center", va="bottom")
        colours.set_xlabel("exponent (log2 of the magnitude)")
        figure.colorbar(image, ax=colours, label="share of elements")
        figure.suptitle(f"{_WORDS[kind]} at a loss scale of {self.scale:g}", fontsize=9)
        return figure


def _check_arguments(model: Any, optimizer: Any, inner: Any, scaler: Any, every: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"PrecisionReport: model must be a torch Module, got a {type(model).__name__}")
    is_fused = isinstance(inner, FusedOptimizer)
    if not is_fused or len(innermost(optimizer)) > 1:
        several = " that holds several; pass one of these, with a report for each"
        raise TypeError(
            "PrecisionReport: optimizer must be one of amp_kernels.optim, or a wrapper of one, got a "
            f"{type(optimizer).__name__}{several if is_fused else '; train with one of amp_kernels.optim'}"
        )
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise TypeError(f"PrecisionReport: scaler must be a GradScaler or None, got a {type(scaler).__name__}")
    if every is not None and (not isinstance(every, int) or isinstance(every, bool)):
        raise TypeError(f"PrecisionReport: every must be an int or None, got {every!r}")
    if every is not None and every < 1:
        raise ValueError(f"PrecisionReport: every must be at least 1, got {every}")
    own = {id(param) for param in model.parameters()}
    if not any(id(param) in own for _, _, param in inner._named_parameters()):
        raise ValueError(
            "PrecisionReport: optimizer must train parameters of the model, got an optimizer that trains none of them; "
            "pass the optimizer of this model"
        )
    if inner._sampler is not None:
        raise ValueError("PrecisionReport: another report samples the optimizer; call close() of that report before")


def _refuse_capture(device: torch.device) -> None:
    if capturing(device):
        raise RuntimeError(
            "PrecisionReport: a sampled step must not be captured in a CUDA graph, since its replays would not be "
            "counted; capture the graph outside of `with report`, or create the report after the capture"
        )


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
        return False
    return next(module.children(), None) is None or bool(module._parameters)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yields the fp16, bf16 and fp32 tensors in the output of a layer: in tuples, lists and dicts too."""
    if isinstance(output, Tensor):
        if output.dtype in DTYPE_CODES and output.layout is torch.strided and not output.is_nested:
            yield output
    elif isinstance(output, (dict, tuple, list)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)


class _Advisor:
    """Makes the sentences of `PrecisionReport.advice`."""

    def __init__(self, rows: Sequence[Row], scale: float, *, has_scaler: bool) -> None:
        self._rows, self._scale, self._has_scaler = rows, scale, has_scaler
        # If an activation is NaN or inf, the gradients say nothing about the scale.
        self._has_bad_activations = any(row.nonfinite for row in rows if row.kind == ACTIVATION)
        headrooms = [row.headroom for row in rows if row.kind != ACTIVATION and row.computed_in is torch.float16]
        # By how many doublings the scale may rise before a gradient overflows; inf if all gradients are 0.
        self._room = min(headrooms, default=math.inf)

    def about(self, row: Row) -> str | None:
        """Returns a sentence about a row, or None if its figures call for no change."""
        if row.kind != ACTIVATION and self._has_bad_activations:
            return None
        if row.nonfinite:
            return self._about_overflow(row)
        if row.kind != ACTIVATION and row.underflow >= _LEAST_UNDERFLOW:
            return self._about_underflow(row)
        if row.kind == ACTIVATION and row.dtype is torch.float16 and row.headroom < _LEAST_HEADROOM:
            return (
                f"{row.name}: its largest activation is {row.largest:.3g}, and fp16 ends at 65504; compute the "
                "layer in bf16 or fp32"
            )
        return None

    def _about_overflow(self, row: Row) -> str:
        said = f"{row.name}: {row.nonfinite} of its {_WORDS[row.kind]} are NaN or inf"
        is_fp16 = row.computed_in is torch.float16
        if row.kind == ACTIVATION:
            remedy = "compute the layer in bf16 or fp32" if is_fp16 else "check the inputs and weights of the layer"
            return f"{said}, and the largest finite one is {row.largest:.3g}; no loss scale changes that; {remedy}"
        if self._has_scaler:
            return f"{said} at a scale of {self._scale:g}; use a smaller scale, or check the loss before it is scaled"
        return f"{said}; check the loss"

    def _about_underflow(self, row: Row) -> str:
        what = _WORDS[row.kind]
        if row.zeros == 1:
            said = f"{row.name}: all of its {what} are 0 at a scale of {self._scale:g}"
            also = ", unless the loss does not depend on them"
        else:
            others = row.underflow
            said = f"{row.name}: {row.zeros:.0%} of its {what} are 0 and {others:.0%} of the others are subnormal"
            also = ""
        if row.dtype is torch.float16 and row.divided_by != 1:
            return (
                f"{said}, since they were divided by the scale in fp16; clip with max_grad_norm, which needs no "
                "unscale_, or keep the parameter in fp32"
            )
        if self._room == math.inf:
            return f"{said}; take a larger scale and sample again{also}"
        if self._room < 1:
            keep = "keep the parameter in fp32" if row.kind == WEIGHT_GRAD else "compute the layer in fp32"
            return f"{said}; the scale cannot rise, since the largest gradient is near 65504; {keep}, or use bf16{also}"
        rise = f"the scale may rise by 2^{math.floor(self._room)} before a gradient of the report overflows"
        return f"{said}; {rise}{also}"

    def about_masters(self) -> list[str]:
        """Returns a sentence about updates that would be lost without masters, or nothing."""
        shares = {row.name: row.lost_updates for row in self._rows if row.lost_updates is not None}
        lost = sorted((name for name, share in shares.items() if share >= _LEAST_LOST), key=lambda name: -shares[name])
        if not lost:
            return []
        named = ", ".join(f"{name} {shares[name]:.0%}" for name in lost[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        return [
            "keep the masters of the fused optimizers: these parameters would lose updates that are too small for "
            f"their 16-bit weights: {named}{more}"
        ]
