"""`int8_saved_activations`, a context in which autograd saves activations for the backward pass in int8."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..functional import Int8Tensor, quantize_int8
from ..ops.table import DTYPE_CODES


class int8_saved_activations(contextlib.ContextDecorator):  # noqa: N801 (called as a function)
    """Save activations for the backward pass in int8, inside a `with` block.

    The codes are asymmetric (Chen et al. 2021, "ActNN"; Liu et al. 2022, "GACT"): each block of `block_size` elements
    has one scale and one zero point. With the default `block_size`, an element takes 1.06 bytes instead of 2 or 4. Only
    the forward pass has to be inside the `with` block; the backward pass dequantizes. Gradients are computed from the
    rounded activations.

    Put the loss outside of the `with` block: `log_softmax` saves logarithms, and `exp` in its backward pass turns the
    error of a logarithm into a factor on the gradient.

    These tensors are not quantized:

    - tensors that are in memory anyway or must be exact: inputs, targets, masks, buffers, the statistics of norms and
      attention, parameters, views of parameters, and casts of parameters by autocast;
    - dtypes other than fp16, bf16 and fp32, tensors of fewer than `min_numel` elements, tensor subclasses;
    - tensors that a compiled model saves. For each part of a model use either this or `torch.compile`. Inside a
      compiled function the `with` block breaks the graph.

    A tensor that several operators save is stored once, a view of all its elements too, but not a view of a part.
    Between them it must not be written through `.data`, NumPy or DLPack, because such a write is not noticed. If one of
    the elements that share a scale is NaN or inf, all of them are dequantized to NaN. Under `torch.utils.checkpoint`
    the inputs of the checkpointed parts are quantized.

    Args:
        block_size: Number of elements, adjacent in memory, that share a scale.
        min_numel: Tensors with fewer elements are not quantized.
        rounding: `"nearest"` or `"stochastic"`, which is unbiased except at the ends of a range.
        seed: Seed of stochastic rounding. If it is None, the constructor draws one from torch's default generator.

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

    # The hooks read `grad_fn`. Without `disable`, Dynamo would trace them into a compiled function.
    @torch.compiler.disable
    def __enter__(self) -> int8_saved_activations:
        self._hooks.__enter__()
        return self

    @torch.compiler.disable
    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def nbytes(self) -> int:
        """Number of bytes that codes, scales and zero points take now."""
        return sum(codes.tensor.nbytes for codes in self._codes.values())

    @property
    def original_nbytes(self) -> int:
        """Number of bytes that the same activations would take now without int8."""
        return sum(codes.tensor.values.numel() * codes.dtype.itemsize for codes in self._codes.values())

    @torch.compiler.disable
    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> partial[Tensor]:
        """Return a function that returns the tensor in the backward pass."""
        if not _is_activation(tensor):
            return partial(_kept, tensor.detach(), tensor._version)
        # An expanded dimension has stride 0. Only one of its elements is in memory, and only one is stored.
        sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        core = tensor.detach().as_strided(sizes, tensor.stride())
        if core.numel() < self.min_numel:
            return partial(_kept, tensor.detach(), tensor._version)
        flat = _in_memory_order(core)
        strides = core.contiguous().stride() if flat is None else core.stride()
        codes = self._codes_of(core if flat is None else flat, tensor._version)
        return partial(_dequantized, codes, sizes, strides, tensor.shape)

    def _codes_of(self, x: Tensor, version: int) -> _Codes:
        # Operators that save the same values share one `_Codes`; otherwise the input of q, k and v would be stored
        # three times. `_codes` holds its values weakly: an entry lives as long as the graph nodes that saved it.
        # The key holds the address of the storage. As long as the entry lives, no other storage gets this address,
        # because a `_Codes` has a weak reference to its storage.
        # The key holds the version, because an in-place operator (`x.relu_()`) between two saves changes the values.
        # A write through `.data`, NumPy or DLPack does not raise the version. Such a write between two saves is not
        # noticed here, nor by torch's own check of saved tensors. To notice it, this method would have to read every
        # shared tensor, with a wait for the device.
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


@dataclass
class _Codes:
    """The codes of a tensor, and a weak reference to its storage. The reference keeps the key in `_codes` unique."""

    tensor: Int8Tensor
    dtype: torch.dtype
    storage: StorageWeakRef


@torch.compiler.disable
def _unpack(saved: partial[Tensor]) -> Tensor:
    return saved()


def _kept(tensor: Tensor, version: int) -> Tensor:
    # torch checks the version of tensors that it saves, but not of tensors that hooks return. `tensor` was made by
    # `detach()`, so it shares the version counter of the user's tensor.
    if tensor._version != version:
        raise RuntimeError(
            "int8_saved_activations: a tensor needed for the gradient was modified by an inplace operation: "
            f"{tensor.dtype} of shape {tuple(tensor.shape)} is at version {tensor._version}, expected version {version}"
        )
    return tensor


def _dequantized(codes: _Codes, sizes: list[int], strides: tuple[int, ...], shape: torch.Size) -> Tensor:
    return codes.tensor.dequantize(codes.dtype).as_strided(sizes, strides).expand(shape)


def _is_activation(tensor: Tensor) -> bool:
    """Return whether autograd has recorded how `tensor` was made, other than as a view or a cast of a leaf."""
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
    """Return a 1-dim view of the elements in their order in memory, or None if there are gaps or overlaps."""
    numel = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != numel:
            return None
        numel *= size
    return tensor.as_strided((numel,), (1,))
