"""matmul: which engine a product takes, what is padded for it, and the operators made of kernel ops.

Tensor cores are fed 16 bytes at a time, so what decides is the distance between rows (the pitch), not M, N or K: cuBLAS
has no Hopper kernel for a pitch that is not a multiple of 16 bytes and falls back to ones for Ampere or Turing. An
operand with such a pitch is copied into padded storage, its tail zeroed; results are made in such storage.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import _backends, reference
from ._backends import HAS_CPU, PLAIN, forced

if TYPE_CHECKING:
    from ._backends import DeviceKernels

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh")
SMOOTH = ("gelu", "gelu_tanh")  # whose derivative takes their argument; that of relu its result
DTYPES = (torch.float16, torch.bfloat16)
ALIGNMENT = 16  # bytes
# A product with so few rows is bound by reading the other matrix once, which takes no tensor core and no padding.
FEW_ROWS = 16
LIBRARY = "cublas"

# By names of this module: with cold caches each look-up in torch's large ones costs a microsecond or two.
_BF16, _is_autocast, _is_traced = torch.bfloat16, torch._C._is_any_autocast_enabled, torch.compiler.is_dynamo_compiling


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Choice(NamedTuple):
    """How a product will be done."""

    engine: str  # a backend, or the library
    pads: tuple[bool, bool]  # whether a and b are copied into padded storage first
    reason: str


def choose(a: Tensor, b: Tensor, activation: str | None = None, backend: str | None = None) -> Choice:
    """The engine for ``a @ b`` (matrices, or batches of them), and what is padded for it.

    `backend`: as if it served the tensors.
    """
    backend = backend or _backends.select(a.device)
    if a.device.type == "cpu" and backend == "cpu":
        dtype = "fp32" if _in_fp32(a, activation) else str(a.dtype).removeprefix("torch.")
        return Choice("cpu", (False, False), f"torch multiplies {dtype}; a CPU needs no padding")
    if a.device.type != "cuda" or backend == "reference":
        return Choice(backend, (False, False), "nothing is padded there")
    # Our kernels multiply on request alone: none has been measured against the library. By arithmetic those of
    # mma.sync reach 55 to 65% of cuBLAS, so that from K ~ 850 on cuBLAS and a pass for the activation win.
    if _backends.is_forced():
        engine, reason = backend, "it is forced"
    else:
        engine, reason = LIBRARY, "no kernel of ours was measured faster there"
        if activation is not None:
            reason += f", and {activation} is a pass over its result"
    if a.shape[-2] <= FEW_ROWS:
        return Choice(engine, (False, False), f"{reason}; {a.shape[-2]} rows are bound by reading b once")
    return Choice(engine, (not is_aligned(a), not is_aligned(b)), reason)


def is_aligned(x: Tensor) -> bool:
    """Whether a matrix can be loaded 16 bytes at a time: row- or column-major with an aligned pitch."""
    elements = ALIGNMENT // x.element_size()
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if x.storage_offset() % elements != 0:
        return False
    by_row = column == 1 and (rows == 1 or row % elements == 0)
    by_column = row == 1 and (columns == 1 or column % elements == 0)
    return (by_row or by_column) and all(stride % elements == 0 for stride in x.stride()[:-2])


def is_torchs(x: Tensor) -> bool:
    """Whether a product of `x` is a call of torch: on a CPU of bf16, where an operator of ours would make the same
    call and costs 0.4 ms with cold caches. The compiler, which pays nothing for it, is given the operator; so is who
    may get another dtype, under autocast, and every subclass: export's fake tensors, and those with a way of their own.

    A product of 64 rows takes 18 us, and each of these tests a quarter of a percent of that.
    """
    return (
        not _is_traced()
        and type(x) in PLAIN
        and x.dtype is _BF16
        and x.is_cpu
        and not _is_autocast()
        and forced() in (None, "cpu")
        and HAS_CPU
    )


# ------------------------------------------------------------------------------------------------------- padding
def new_output(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """On a GPU with a pitch of a multiple of 16 bytes, so that the next product finds it aligned."""
    if like.device.type != "cuda":
        return like.new_empty(shape, dtype=dtype)
    pitch = padded(shape[-1], ALIGNMENT // dtype.itemsize)
    return like.new_empty((*shape[:-1], pitch), dtype=dtype).narrow(-1, 0, shape[-1])


def padded_like(x: Tensor) -> Tensor:
    """Memory for what `pad_copy` makes of a matrix."""
    if x.stride(0) == 1 and x.stride(1) != 1:
        return padded_like(x.t()).t()
    pitch = padded(x.shape[1], ALIGNMENT // x.element_size())
    return x.new_empty((x.shape[0], pitch)).narrow(1, 0, x.shape[1])


def pad_copy(x: Tensor) -> Tensor:
    """A matrix, or a batch of them, in padded storage; what was column-major stays so."""
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        return pad_copy(x.mT).mT
    rows = x.reshape(-1, x.shape[-1])
    out, _ = copy_pad(rows, None, 0, needs_bias_grad=False)
    return out.view(*x.shape[:-1], -1).narrow(-1, 0, x.shape[-1])


def copy_pad(x: Tensor, saved: Tensor | None, activation: int, *, needs_bias_grad: bool) -> tuple[Tensor, Tensor]:
    """(x * activation'(saved) in padded storage [R, P], column sums) in one pass; the tail is zero."""
    out = x.new_empty((x.shape[0], padded(x.shape[1], ALIGNMENT // x.element_size())))
    sums = x.new_zeros(x.shape[1] if needs_bias_grad else 0, dtype=torch.float32)
    if x.numel() == 0:
        return out.zero_(), sums
    ops = _kernels(_backends.select(x.device))
    if ops is not None:
        ops._copy_pad_(x, saved, out, sums if needs_bias_grad else None, activation)
        return out, sums
    grad = x.float() if saved is None else reference.matmul.activation_backward(x, saved, ACTIVATIONS[activation])
    out.zero_()[:, : x.shape[1]] = grad.to(x.dtype)
    return out, grad.sum(0) if needs_bias_grad else sums


class _Weights:
    """Padded copies of weights for inference, each valid while its weight has the version and the address it had, and
    on the stream that made it: another could read it before it is there, or after its memory is another's.

    They are not kept where a change could go unnoticed: in training, where the copy lives from forward to backward; in
    a process group (FSDP gathers a weight anew without a new version); and once a CUDA graph used a weight, since its
    replays change weights without one. Memory: as much as the weight, for weights with such a pitch.
    """

    def __init__(self) -> None:
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def padded(self, weight: Tensor, *, keeps: bool) -> Tensor:
        """`keeps`: a backward pass will follow."""
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._copies[weight] = None  # from now on anew each time
            return pad_copy(weight)
        known = weight in self._copies
        entry = self._copies.get(weight)
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        if keeps or shared or weight.is_inference() or (known and entry is None):
            if entry is not None:
                del self._copies[weight]
            return pad_copy(weight)
        stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
        key = (weight._version, weight.data_ptr(), stream)
        if entry is None or entry[0] != key:
            entry = self._copies[weight] = (key, pad_copy(weight))
        return entry[1]


weights = _Weights()


# ------------------------------------------------------------------------------------------------------ products
def _kernels(engine: str) -> DeviceKernels | None:
    """None where torch's operators do the work."""
    return None if engine == "cpu" else cast("DeviceKernels | None", _backends.kernels(engine))


def _in_fp32(a: Tensor, activation: str | None) -> bool:
    """Whether a CPU multiplies in fp32: fp16 of many rows, whose product in torch took a second where fp32 took 19 ms
    ([2048, 256] @ [256, 1024] and back, two cores), and for an activation that takes the unrounded sums, unless oneDNN
    applies it to them. (ReLU may as well come after rounding.)"""
    if a.dtype is torch.float16:
        return activation in SMOOTH or a.shape[-2] > FEW_ROWS
    return activation in SMOOTH and not has_onednn_bf16()


@functools.cache
def has_onednn_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """A bf16 `linear` with a GELU in oneDNN's pass, rounded once. (Its ReLU makes 0 of NaN.)

    RuntimeError where it does not take the shapes.
    """
    bias = bias if bias is None else bias.contiguous()  # whose stride it does not look at
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], approximate)


def product(
    a: Tensor,
    b: Tensor,
    input: Tensor | None = None,
    *,
    out: Tensor,
    pre: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: int = 0,
) -> None:
    """``out = activation(alpha * a @ b + beta * input)`` of matrices or batches of them."""
    choice = choose(a, b, ACTIVATIONS[activation])
    a, b = (pad_copy(x) if pads else x for x, pads in zip((a, b), choice.pads, strict=True))
    if beta == 0:
        input = None
    name = ACTIVATIONS[activation]
    if choice.engine == LIBRARY:
        argument = out if pre is None else pre
        _by_library(a, b, input, argument, alpha, beta)
        return _activate(argument, name, out)
    if choice.engine == "cpu":
        return _on_cpu(a, b, input, out, pre, alpha, beta, name)
    ops = _kernels(choice.engine)
    if ops is None:
        result, argument = reference.matmul.addmm(
            input, a, b, beta=beta, alpha=alpha, activation=name, out_dtype=out.dtype
        )
        out.copy_(result)
        if pre is not None:
            pre.copy_(argument)
        return
    three = [x if x is None or x.dim() == 3 else x.unsqueeze(0) for x in (a, b, input, out, pre)]
    ops._matmul_(*three, alpha, beta, activation)


def _on_cpu(
    a: Tensor,
    b: Tensor,
    input: Tensor | None,
    out: Tensor,
    pre: Tensor | None,
    alpha: float,
    beta: float,
    activation: str | None,
) -> None:
    """By torch, whose fp32 and bf16 products are the fastest there are on a CPU."""
    if _in_fp32(a, activation) or out.dtype != a.dtype or a.shape[-1] == 0:
        argument = reference.matmul.sums(input, a, b, beta=beta, alpha=alpha)
        if pre is not None:
            pre.copy_(argument)
        out.copy_(reference.matmul.activate(argument, activation))
    elif activation in SMOOTH:
        out.copy_(gelu_linear(a, b.mT, input if input is None else input[0], activation))
        if pre is not None:  # two products in bf16 take less than one in fp32: 12 ms for 15 of 1024^3
            _by_library(a, b, input, pre, alpha, beta)
    else:
        _by_library(a, b, input, out, alpha, beta)
        _activate(out, activation, out)


def _activate(argument: Tensor, activation: str | None, out: Tensor) -> None:
    """In one pass, into `out`, which may be `argument` itself."""
    if activation == "relu":
        torch.ops.aten.relu.out(argument, out=out)
    elif activation is not None:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        torch.ops.aten.gelu.out(argument, approximate=approximate, out=out)


def _by_library(a: Tensor, b: Tensor, input: Tensor | None, out: Tensor, alpha: float, beta: float) -> None:
    """torch's product, whose accumulation in fp32 and rounding are ours."""
    batched = a.dim() == 3
    if alpha == 0:  # where torch 2.13's baddbmm of bf16 on a CPU ignores beta
        _ = out.zero_() if input is None else out.copy_(beta * input.float())
        return
    if input is None and alpha == 1:
        multiply = torch.bmm if batched else torch.mm
        if out.dtype == a.dtype:
            multiply(a, b, out=out)
        else:  # from 16 bits torch gives the same type or fp32
            out.copy_(multiply(a, b, out_dtype=torch.float32))
        return
    add = torch.baddbmm if batched else torch.addmm
    term = a.new_zeros(()).expand(out.shape) if input is None else input
    beta = 0.0 if input is None else beta
    if not batched and term.stride(0) == 0:
        term = term[0]  # one row for all is a bias, which cuBLASLt adds; of two dimensions torch copies it first
    if out.dtype == a.dtype:
        add(term, a, b, beta=beta, alpha=alpha, out=out)
    else:
        out.copy_(add(term.float(), a, b, out_dtype=torch.float32, beta=beta, alpha=alpha))
