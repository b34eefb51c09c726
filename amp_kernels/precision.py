"""`PrecisionReport`: which layers of a model underflow, overflow or lose updates, measured in sampled steps.

A sampled step reads every activation, every gradient and every update once more, and counts exponents
(`ops/exponents.py`) and lost updates (`Plan.count_updates`). The counts stay on the device until a method of the report
reads them. Other steps run no code of this module: hooks are installed before a sampled step and removed after it, and
the optimizer itself counts the steps in between.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from . import torch_private
from .functional.unscale import to_device
from .ops.exponents import count_exponents_
from .ops.library import call
from .ops.table import DTYPE_CODES
from .optim._base import FusedOptimizer
from .optim._plan import Plan, capturing
from .optim._tensors import local
from .optim._wrappers import wrapped
from .reference.exponents import COLUMNS, ZEROS
from .report import table

if TYPE_CHECKING:
    pass

__all__ = ["PrecisionReport", "Row"]

KINDS = ("activation", "activation_grad", "weight_grad")
_BIAS = 127  # column e of the counts holds magnitudes from 2^(e - 127) on
_SUBNORMAL = {torch.float16: _BIAS - 14, torch.bfloat16: 1, torch.float32: 1}  # columns below this one, without zeros
_LOST_IN_FP16 = _BIAS - 25  # magnitudes below 2^-25 round to 0 in fp16
_FP16_MAX = 65504.0
# From which shares and factors on `advice` mentions a layer.
_VANISHED_SHARE = 0.05
_LOST_SHARE = 0.5
_LEAST_HEADROOM = 1.0  # doublings
_SUBNORMAL_SHARE = 0.01


class Row(NamedTuple):
    """What one sample counted in a layer's outputs, in their gradients, or in the gradient of a parameter.

    Attributes:
        name: The name of the layer or of the parameter.
        kind: "activation", "activation_grad" or "weight_grad".
        dtype: The dtype of the elements.
        exponents: int64 ``[257]`` on the CPU, a row of `amp_kernels.reference.count_exponents_`.
        largest: The largest finite magnitude.
        norm: The L2 norm of all elements.
        changed: For a 16-bit parameter, how many masters the step changed. Otherwise 0.
        lost: How many of these changes the 16-bit weight would lose without its master.

    Examples:
        >>> exponents = torch.zeros(257, dtype=torch.int64)
        >>> exponents[[100, 127, 256]] = torch.tensor([1, 2, 1])
        >>> row = amp_kernels.precision.Row("head", "activation_grad", torch.float32, exponents, 1.5, 2.0)
        >>> row.zeros, row.lost_in_fp16
        (0.25, 0.25)
    """

    name: str
    kind: str
    dtype: torch.dtype
    exponents: Tensor
    largest: float
    norm: float
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
        """The share of elements that are subnormal in their dtype. In fp16 these are below 2^-14."""
        return int(self.exponents[: _SUBNORMAL[self.dtype]].sum()) / self.total

    @property
    def nonfinite(self) -> int:
        """The number of elements that are NaN or inf."""
        return int(self.exponents[255])

    @property
    def lost_in_fp16(self) -> float:
        """The share of elements that are not 0 but would be 0 in fp16: those below 2^-25."""
        return int(self.exponents[:_LOST_IN_FP16].sum()) / self.total

    @property
    def headroom(self) -> float:
        """How many doublings, as a real number, separate the largest finite magnitude from 65504."""
        return math.log2(_FP16_MAX / self.largest) if self.largest > 0 else math.inf

    @property
    def lost_updates(self) -> float | None:
        """The share of changes that the 16-bit weight would lose without its master. None if there are no changes."""
        return self.lost / self.changed if self.changed else None

    @property
    def vanished(self) -> float:
        """The share of elements that fp16 has reduced to 0 or to a subnormal number; 0 in other dtypes.

        Zeros count only if other elements are subnormal too, or if there is nothing but zeros. A layer such as ReLU
        makes zeros that no scale changes. If none of its elements is near the smallest number of fp16, its zeros are
        taken for such ones.
        """
        if self.dtype is not torch.float16:
            return 0.0
        if self.zeros == 1.0:
            return 1.0
        nonzero = 1 - self.zeros
        return self.subnormal + (self.zeros if self.subnormal >= _SUBNORMAL_SHARE * nonzero else 0.0)


class _Counts:
    """Results of `count_exponents_` on one device, with a row for each name."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self.dtypes: list[torch.dtype | None] = [None] * len(self.names)
        self.counts = torch.zeros(len(self.names), COLUMNS, dtype=torch.int64, device=device)
        self.largest = torch.zeros(len(self.names), dtype=torch.float32, device=device)
        self.squares = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.updates = torch.zeros(len(self.names), 2, dtype=torch.int64, device=device)

    def add(self, begin: int, tensors: Sequence[Tensor]) -> None:
        """Adds the counts of tensors to the rows from `begin` on."""
        rows = slice(begin, begin + len(tensors))
        call(count_exponents_, list(tensors), self.counts[rows], self.largest[rows], self.squares[rows])

    def rows(self, kind: str) -> Iterator[Row]:
        counts, updates = self.counts.cpu(), self.updates.tolist()
        figures = zip(self.largest.tolist(), self.squares.sqrt().tolist(), updates, strict=True)
        for t, (largest, norm, (changed, lost)) in enumerate(figures):
            dtype = self.dtypes[t]
            if dtype is not None and counts[t].any():
                yield Row(self.names[t], kind, dtype, counts[t], largest, norm, changed, lost)


class _Sample:
    """The counts of one sampled step."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, torch.device], _Counts] = {}
        self.scale: Tensor | None = None
        self.is_scaled = False  # whether weight gradients were multiplied by the scale when the step read them

    def of(self, kind: str, names: Sequence[str], device: torch.device) -> _Counts:
        if (kind, device) not in self.counts:
            self.counts[kind, device] = _Counts(names, device)
        return self.counts[kind, device]


class PrecisionReport:
    """Measures which layers underflow, which overflow, and what the loss scale should be.

    A sampled step counts, for every layer and every parameter of the model:

    - the outputs of the layer (activations), and their gradients in the backward pass: zeros, subnormal numbers, NaN
      and inf, the largest magnitude, the norm and a histogram of exponents, as in figures 2 and 3 of Micikevicius et
      al. 2018;
    - the same for the gradient of each parameter, as the optimizer's step reads it;
    - for each 16-bit parameter, the share of updates that are lost if they are added to the 16-bit weight. The fused
      optimizers do not lose them, because they keep masters.

    There are two ways to sample. `every=100` samples the 100th, the 200th, ... step of the optimizer. A `with` block
    samples the steps in it.

    A *layer* is a module without submodules, or one with parameters of its own. All counts are exact. They stay on the
    device, and the host does not wait before a method reads them. A new sample replaces the last one. The step of the
    optimizer ends a sample, so a sample covers all micro-batches of an accumulated step. Other steps run no code of the
    report.

    In a sampled step, code under `torch.compile` runs eagerly, since compiled layers call no hooks. With `every`, this
    needs the result of `torch.compile` as `model`. In a `with` block any compiled code runs eagerly. Recomputed
    activations (`torch.utils.checkpoint`) are counted once. Activations are counted only while `model.training` is
    True, so that a validation between two steps is not counted. A CUDA graph cannot be sampled, and its replays are not
    counted as steps. Under FSDP2 each rank reports its own shards.

    Args:
        model: The model.
        optimizer: An optimizer of `amp_kernels.optim` that trains the model, or a wrapper of one.
        scaler: The loss scaler of the training, if there is one. The report reads its scale.
        every: Sample each `every`-th step. None: sample only in `with` blocks.

    Raises:
        TypeError: `model` is not an `nn.Module`, `optimizer` is not one of `amp_kernels.optim`, or `every` is not an
            int.
        ValueError: `every` is less than 1, or another report samples this optimizer.

    Examples:
        >>> model = torch.nn.Linear(4, 2).half()
        >>> optimizer = amp_kernels.optim.FusedSGD(model.parameters(), lr=0.5)
        >>> report = amp_kernels.PrecisionReport(model, optimizer)
        >>> with report:
        ...     model(torch.full((1, 4), 1e-7).half()).sum().backward()
        ...     optimizer.step()
        >>> print(report.advice()[0])
        weight: 100% of its weight gradients are 0 or subnormal; the scale may rise by 2^15 before fp16 overflows
        >>> report.as_dict()["activation_grad/Linear/largest"]
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
        if not isinstance(model, nn.Module):
            raise TypeError(f"PrecisionReport: model must be a torch Module, got a {type(model).__name__}")
        inner = wrapped(optimizer)
        if not isinstance(inner, FusedOptimizer):
            raise TypeError(
                "PrecisionReport: optimizer must be one of amp_kernels.optim, or a wrapper of one, got a "
                f"{type(optimizer).__name__}; train with one of amp_kernels.optim"
            )
        if every is not None and (not isinstance(every, int) or isinstance(every, bool)):
            raise TypeError(f"PrecisionReport: every must be an int or None, got {every!r}")
        if every is not None and every < 1:
            raise ValueError(f"PrecisionReport: every must be at least 1, got {every}")
        if inner._sampler is not None:
            raise ValueError(
                "PrecisionReport: another report samples the optimizer; call close() of that report before"
            )
        self._model, self._optimizer, self._scaler, self._every = model, inner, scaler, every
        self._sample: _Sample | None = None  # the sample that is being taken
        self._last: _Sample | None = None
        self._undo = contextlib.ExitStack()  # removes hooks
        self._in_block = self._is_eager = False
        if every is not None:
            inner._sampler = self
            self._wait()

    # -------------------------------------------------------------------------------------------------- sampling
    def __enter__(self) -> PrecisionReport:
        if self._in_block:
            raise RuntimeError("PrecisionReport: `with` blocks of one report must not be nested")
        self._stop()
        self._start()
        self._run_eagerly()
        self._in_block = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._in_block = False
        self._finish()
        if self._every is not None:
            self._wait()

    def close(self) -> None:
        """Stop sampling, and remove all hooks. The last sample stays readable."""
        self._stop()
        if self._optimizer._sampler is self:
            self._optimizer._sampler, self._optimizer._steps_to_sample = None, 0

    def _wait(self) -> None:
        """Lets the optimizer count the steps until the next sample."""
        assert self._every is not None
        self._optimizer._steps_to_sample = self._every - 1
        if self._every == 1:
            self._start()

    def _start(self) -> None:
        """Begins a sample: installs hooks."""
        if self._optimizer._observer is not None:
            raise RuntimeError(
                "PrecisionReport: another report is sampling the optimizer; leave its `with` block before"
            )
        self._sample = sample = _Sample()
        self._undo.callback(self._model.register_forward_pre_hook(self._leave_compiled_code, prepend=True).remove)
        layers = [
            (name or type(layer).__name__, layer)
            for name, layer in self._model.named_modules()
            if next(layer.children(), None) is None or layer._parameters
        ]
        names = [name for name, _ in layers]
        for index, (_, layer) in enumerate(layers):
            self._undo.callback(layer.register_forward_hook(self._hook(sample, names, index)).remove)
        self._optimizer._observer = self

    @torch.compiler.disable
    def _leave_compiled_code(self, module: nn.Module, args: Any) -> None:
        """Makes compiled code run eagerly, until the sample ends. Compiled code calls no hooks of the layers in it.

        With `every` this is done when the model runs, and not when a sample begins. After the last step of a training,
        a report may wait for a step that never comes. Compiled code would then run eagerly for good.
        """
        if self._model.training:
            self._run_eagerly()

    def _run_eagerly(self) -> None:
        if not self._is_eager:
            self._is_eager = True
            self._undo.enter_context(torch.compiler.set_stance("force_eager"))

    def _stop(self) -> None:
        """Ends a sample without a result."""
        if self._sample is not None:
            self._sample, self._optimizer._observer = None, None
        self._undo.close()
        self._is_eager = False

    def _finish(self) -> None:
        self._last = self._sample
        self._stop()

    def _hook(self, sample: _Sample, names: Sequence[str], index: int) -> Callable[[nn.Module, Any, Any], None]:
        """Returns the forward hook of a layer, which counts its outputs, and installs hooks for their gradients."""

        def count(kind: str, tensor: Tensor) -> None:
            _refuse_capture(tensor.device)
            counts = sample.of(kind, names, tensor.device)
            counts.dtypes[index] = tensor.dtype
            counts.add(index, [tensor.detach()])

        def count_gradient(gradient: Tensor) -> None:
            if self._sample is sample and gradient.dtype in DTYPE_CODES:
                count("activation_grad", local(gradient))

        @torch.compiler.disable
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch_private.are_functorch_transforms_active():
                return
            # In a backward pass, a layer runs because its activations are computed again. They were counted before.
            counts = self._model.training and not torch_private.is_in_backward()
            for tensor in _tensors(output):
                if counts:
                    count("activation", local(tensor))
                if tensor.requires_grad:
                    self._undo.callback(tensor.register_hook(count_gradient).remove)

        return hook

    def _observe(
        self,
        plans: Sequence[Plan],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_norm: float,
    ) -> None:
        """Counts the gradients and the updates of a step. The optimizer calls it before it writes anything."""
        sample = self._sample
        assert sample is not None  # this report is the optimizer's observer only while it takes a sample
        for plan in plans:
            _refuse_capture(plan.device)
        if not any(kind == "activation" for kind, _ in sample.counts):
            warnings.warn(
                "PrecisionReport: no layer of the model called its hooks in a sampled step, so the report has no "
                "activations; if the model is compiled, pass the result of torch.compile, or sample in a `with` block",
                stacklevel=4,
            )
        names = {id(param): name for name, param in self._model.named_parameters()}
        for plan in plans:
            members, device = plan.members, plan.device
            own = [names.get(id(p), name) for p, name in zip(members.params, members.names, strict=True)]
            counts = sample.of("weight_grad", own, device)
            none = torch.empty(0, device=device)
            gradients = [none if p.grad is None else local(p.grad) for p in members.params]
            counts.dtypes = [gradient.dtype for gradient in gradients]
            counts.add(0, gradients)
            scalars = (None if s is None else to_device(s, device) for s in (grad_scale, found_inf, grad_norm))
            counts.updates += plan.count_updates(*scalars, max_norm)
        sample.is_scaled = grad_scale is not None
        if grad_scale is not None:
            sample.scale = grad_scale.clone()
        elif self._scaler is not None and plans:
            sample.scale = self._scaler.scale(torch.ones((), device=plans[0].device))

    def _end_step(self) -> None:
        """Ends the sample, unless it is that of a `with` block. The optimizer calls it after a step."""
        if self._in_block:
            return
        self._finish()
        if self._every is not None:
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

        Rows with NaN or inf come first. The others are sorted by `Row.vanished`, then by `Row.lost_in_fp16` and
        `Row.headroom`.

        Returns:
            A list with a `Row` for the outputs of each layer, for their gradients, and for the gradient of each
                parameter. Layers that did not run, and parameters without a gradient, have none. The list is empty
                before the first sample.
        """
        if self._last is None:
            return []
        found = [row for (kind, _), counts in self._last.counts.items() for row in counts.rows(kind)]
        return sorted(found, key=lambda row: (-row.nonfinite, -row.vanished, -row.lost_in_fp16, row.headroom))

    def as_dict(self) -> dict[str, float]:
        """Return the figures of the last sample, for a logger. Waits for the device.

        Returns:
            A dict whose keys are `kind/name/figure`, for example `"activation_grad/blocks.0.attn/zeros"`. The figures
                are `zeros`, `subnormal`, `vanished`, `lost_in_fp16` and `lost_updates` (shares from 0 to 1),
                `nonfinite` (a count), `largest`, `norm`, and `headroom` (doublings until 65504; it is left out if all
                elements are 0). `"scale"` is the loss scale. The dict is empty before the first sample.
        """
        figures: dict[str, float] = {}
        if (scale := self.scale) is not None:
            figures["scale"] = scale
        for row in self.rows():
            own = {
                "zeros": row.zeros, "subnormal": row.subnormal, "vanished": row.vanished,
                "lost_in_fp16": row.lost_in_fp16, "nonfinite": row.nonfinite, "largest": row.largest,
                "norm": row.norm, "headroom": row.headroom if row.largest > 0 else None,
                "lost_updates": row.lost_updates,
            }  # fmt: skip
            figures |= {f"{row.kind}/{row.name}/{name}": x for name, x in own.items() if x is not None}
        return figures

    def advice(self) -> list[str]:
        """Return a sentence for each layer and parameter whose figures call for a change, the worst first.

        Waits for the device. The sentences follow from these figures: NaN and inf; at least 5 % of gradients that fp16
        made 0 or subnormal; activations within a factor of 2 of 65504; at least half of the updates lost without a
        master.

        Returns:
            A list of sentences.
        """
        rows, scale = self.rows(), self.scale
        room = self._room(rows, scale or 1.0)
        overflows = any(row.nonfinite for row in rows if row.kind == "activation")
        return [said for row in rows if (said := _advice(row, scale or 1.0, room, overflows))]

    def _room(self, rows: Sequence[Row], scale: float) -> int | None:
        """Returns by how many doublings the scale may rise before an fp16 gradient overflows. None without fp16."""
        room = [
            row.headroom - (math.log2(scale) if row.kind == "weight_grad" and not self._is_scaled else 0)
            for row in rows
            if row.kind != "activation" and row.dtype is torch.float16
        ]
        finite = [doublings for doublings in room if math.isfinite(doublings)]
        return math.floor(min(finite)) if finite else None

    @property
    def _is_scaled(self) -> bool:
        return self._last is not None and self._last.is_scaled

    def table(self, limit: int | None = 20) -> str:
        """Return the rows of the last sample as text, the worst first. Waits for the device.

        Args:
            limit: The largest number of rows. None: all of them.

        Returns:
            The table, with a line of headers.
        """
        rows = self.rows()
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
            for row in rows[:limit]
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

        The left part shows for each layer the share of elements that are 0 or subnormal. The right part is a histogram
        of exponents for each layer, as a row of colours. Vertical lines mark the range of fp16: below 2^-24 numbers
        become 0, below 2^-14 they are subnormal, and above 65504 they become inf.

        Args:
            kind: "activation", "activation_grad" or "weight_grad".

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ValueError: `kind` is none of these, or the last sample has no row of this kind.
        """
        if kind not in KINDS:
            raise ValueError(f"PrecisionReport.plot: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        order = [] if self._last is None else [row for (k, _), c in self._last.counts.items() for row in c.rows(k)]
        rows = [row for row in order if row.kind == kind]  # in the order of the model
        if not rows:
            raise ValueError(f"PrecisionReport.plot: no sampled step has an {kind}; sample a step first")
        return _plot(rows, kind, self.scale or 1.0)


def _refuse_capture(device: torch.device) -> None:
    if capturing(device):
        raise RuntimeError(
            "PrecisionReport: a sampled step must not be captured in a CUDA graph, since its replays would not be "
            "counted; capture the graph outside of `with report`, or create the report after the capture"
        )


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yields the fp16, bf16 and fp32 tensors in the output of a layer: in tuples, lists and dicts too."""
    if isinstance(output, Tensor):
        if output.dtype in DTYPE_CODES and output.layout is torch.strided and not output.is_meta:
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)


_WORDS = {"activation": "activations", "activation_grad": "activation gradients", "weight_grad": "weight gradients"}


def _advice(row: Row, scale: float, room: int | None, overflows: bool) -> str | None:
    """Returns a sentence about a row, or None if its figures call for no change.

    `overflows`: whether an activation of the model is NaN or inf. Gradients are NaN or inf then, whatever the scale.
    """
    what = _WORDS[row.kind]
    if row.nonfinite and row.kind == "activation":
        return (
            f"{row.name}: {row.nonfinite} of its activations are NaN or inf, and the largest finite one is "
            f"{row.largest:.3g}; the loss scale does not change activations; compute the layer in bf16 or fp32"
        )
    if row.nonfinite:
        if overflows:
            return None
        return (
            f"{row.name}: {row.nonfinite} of its {what} are NaN or inf at a scale of {scale:g}; use a smaller scale, "
            "or compute the layer in bf16 or fp32"
        )
    if row.kind != "activation" and row.vanished >= _VANISHED_SHARE:
        remedy = "keep the parameter in fp32, or use bf16" if row.kind == "weight_grad" else "use bf16"
        if room is None or room < 1:
            rise = f"the scale has no room to rise before fp16 overflows; {remedy}"
        else:
            rise = f"the scale may rise by 2^{room} before fp16 overflows"
        return f"{row.name}: {row.vanished:.0%} of its {what} are 0 or subnormal; {rise}"
    if row.kind == "activation" and row.dtype is torch.float16 and row.headroom < _LEAST_HEADROOM:
        return (
            f"{row.name}: its largest activation is {row.largest:.3g}, and fp16 ends at 65504; compute the layer in "
            "bf16 or fp32"
        )
    if row.lost_updates is not None and row.lost_updates >= _LOST_SHARE:
        return (
            f"{row.name}: {row.lost_updates:.0%} of its updates are lost without a master, since they are too small "
            f"for {str(row.dtype).removeprefix('torch.')} weights; keep the master (the fused optimizers do)"
        )
    return None


def _plot(rows: Sequence[Row], kind: str, scale: float) -> Any:
    from matplotlib.figure import Figure

    low, high = -40, 17  # the exponents that the histogram shows; others are in its first and last column
    shares = torch.zeros(len(rows), high - low + 1)
    for t, row in enumerate(rows):
        counts = row.exponents[1:255].double()
        inside = counts[low + _BIAS - 1 : high + _BIAS].clone()
        inside[0] += counts[: low + _BIAS - 1].sum()
        inside[-1] += counts[high + _BIAS :].sum()
        shares[t] = inside / row.total
    figure = Figure(figsize=(10, 1.2 + 0.22 * len(rows)), layout="constrained")
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
    figure.suptitle(f"{_WORDS[kind]} at a loss scale of {scale:g}", fontsize=9)
    return figure
