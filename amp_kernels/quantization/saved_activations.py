"""`int8_saved_activations`: what autograd keeps for the backward pass, in int8."""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..functional import Int8Tensor, quantize_int8
from ..ops.table import DTYPE_CODES


class int8_saved_activations(contextlib.ContextDecorator):  # noqa: N801 (called as a function)
    """Save activations for the backward pass in int8, inside a `with` block: 1.06 bytes per element, not 2 or 4.

    Codes are asymmetric, in blocks (Chen et al. 2021, "ActNN"; Liu et al. 2022, "GACT"). Only the forward pass has to
    be inside the block; the backward pass dequantizes. Gradients are computed from the rounded activations. Put the
    loss outside of the block: `log_softmax` saves logarithms, where half a step of the codes is a factor on the
    gradient.

    Not quantized are

    - tensors that are in memory anyway or must be exact: inputs, targets, masks, buffers, the statistics of norms and
      attention, parameters, views of parameters, and what autocast makes of them;
    - dtypes other than fp16, bf16 and fp32, tensors of fewer than `min_numel` elements, tensor subclasses;
    - what a compiled model saves. Choose this or `torch.compile` for each part. Inside a compiled function the block
      breaks the graph.

    A tensor that several operators save is stored once, views included. Activations must not be written through
    `.data`, NumPy or DLPack between the operators that save them. A block that holds NaN or inf comes back as NaN, so
    that a GradScaler skips the step. Under `torch.utils.checkpoint` (`use_reentrant=False`) the inputs of the
    checkpointed parts are quantized.

    Args:
        block_size: Elements that share a scale, neighbours in memory.
        min_numel: Smaller tensors are not quantized.
        rounding: `"nearest"` or `"stochastic"`, which is unbiased except at the ends of a block's range.
        seed: Seed of stochastic rounding. None draws one from torch's default generator, once.

    Raises:
        ValueError: A size is below 1, or `rounding` is unknown.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> with amp_kernels.quantization.int8_saved_activations() as saved:
        ...     output = model(torch.randn(128, 64))
        >>> saved.nbytes, saved.original_nbytes
        (69632, 262144)
        >>> output.square().mean().backward()
    """

    def __init__(
        self,
        block_size: int = 128,
        min_numel: int = 1024,
        *,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int | None = None,
    ) -> None:
        for name, value in (("block_size", block_size), ("min_numel", min_numel)):
            if value < 1:
                raise ValueError(f"int8_saved_activations: {name} must be at least 1, got {value}")
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"int8_saved_activations: rounding must be 'nearest' or 'stochastic', got {rounding!r}")
        if rounding == "stochastic" and seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        self.block_size, self.min_numel, self.rounding, self._seed = block_size, min_numel, rounding, seed
        self._count = 0
        self._codes: weakref.WeakValueDictionary[tuple[Any, ...], _Codes] = weakref.WeakValueDictionary()
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    # Around a compiled function Dynamo would trace the hooks, which look at a tensor's history.
    @torch.compiler.disable
    def __enter__(self) -> int8_saved_activations:
        self._hooks.__enter__()
        return self

    @torch.compiler.disable
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    @property
    def nbytes(self) -> int:
        """Bytes that codes, scales and zero points take now."""
        return sum(codes.tensor.nbytes for codes in self._codes.values())

    @property
    def original_nbytes(self) -> int:
        """Bytes that the same activations would take now without int8."""
        return sum(codes.tensor.values.numel() * codes.dtype.itemsize for codes in self._codes.values())

    @torch.compiler.disable
    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> _Alone | _Packed:
        if not _is_activation(tensor):
            return _Alone(tensor.detach(), tensor._version)  # for the check of `_unpack`
        # An expanded dimension is one element.
        sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        core = tensor.detach().as_strided(sizes, tensor.stride())
        if core.numel() < self.min_numel:
            return _Alone(tensor.detach(), tensor._version)
        flat = _in_memory_order(core)
        strides = core.contiguous().stride() if flat is None else core.stride()
        codes = self._codes_of(core if flat is None else flat, tensor._version)
        return _Packed(codes, torch.Size(sizes), strides, tensor.shape)

    def _codes_of(self, x: Tensor, version: int) -> _Codes:
        # While a weak reference to a storage exists, no other storage gets its address: the key is unique.
        # The version is in the key because an operator in place (`x.relu_()`) between two saves makes another tensor of
        # the same memory. An entry lives as long as the graph nodes that saved it, and is never looked up after a
        # forward pass, so that it outlives no step. A write that counts no version (`.data`, numpy, DLPack) between two
        # saves goes unseen, as torch's own check of saved tensors misses it: there the first operator gets the gradient
        # of values that it never saw. Noticing it would take a read of every shared tensor and a wait for the device;
        # without sharing, codes of the input of q, k and v would be held three times.
        storage = StorageWeakRef(x.untyped_storage())
        key = (storage.cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, version)
        codes = self._codes.get(key)
        if codes is None:
            seed = None if self._seed is None else self._seed + self._count
            self._count += 1
            options = {"block_size": self.block_size, "symmetric": False, "rounding": self.rounding, "seed": seed}
            codes = _Codes(quantize_int8(x.reshape(-1), **options), x.dtype, storage)  # type: ignore[arg-type]
            self._codes[key] = codes
        return codes


class _Alone(NamedTuple):
    tensor: Tensor
    version: int


class _Codes:
    """Codes of a piece of memory, in its order, and what keeps their key from meaning another."""

    __slots__ = ("__weakref__", "dtype", "storage", "tensor")

    def __init__(self, tensor: Int8Tensor, dtype: torch.dtype, storage: StorageWeakRef) -> None:
        self.tensor, self.dtype, self.storage = tensor, dtype, storage


class _Packed(NamedTuple):
    codes: _Codes
    sizes: torch.Size  # without expansion
    strides: tuple[int, ...]
    shape: torch.Size


@torch.compiler.disable
def _unpack(saved: _Alone | _Packed) -> Tensor:
    if isinstance(saved, _Alone):
        # torch makes this check of what it saves, but not of what hooks return. `detach()` shares the counter of the
        # user's tensor: nothing is compared but a number from the forward pass with the number that it has now.
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "int8_saved_activations: a tensor needed for the gradient was modified by an inplace operation: "
                f"{saved.tensor.dtype} of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}, "
                f"expected version {saved.version}"
            )
        return saved.tensor
    flat = saved.codes.tensor.dequantize(saved.codes.dtype)
    return flat.as_strided(saved.sizes, saved.strides).expand(saved.shape)


def _is_activation(tensor: Tensor) -> bool:
    """Made by operators from what has a gradient, and not merely a view or a cast of a leaf."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dtype not in DTYPE_CODES:
        return False
    whole = tensor if tensor._base is None else tensor._base
    maker = whole.grad_fn
    if maker is None:  # a leaf
        return False
    if maker.name() != "ToCopyBackward0":
        return True
    source = maker.next_functions[0][0]
    return source is None or source.name() != "torch::autograd::AccumulateGrad"


def _in_memory_order(tensor: Tensor) -> Tensor | None:
    """The elements in one dimension as they lie in memory; None if there are gaps or overlaps."""
    numel = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != numel:
            return None
        numel *= size
    return tensor.as_strided((numel,), (1,))
