"""Gradients of 16-bit weights that add up in fp32 under `torch.nn.parallel.DistributedDataParallel` (DDP)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["fp32_accumulation"]

_BUCKET_BYTES = 25 * 2**20  # as DDP's default


@contextmanager
def fp32_accumulation(model: DistributedDataParallel) -> Iterator[None]:
    """Add up the gradients of several backward passes in fp32, and average the sums over all processes at the end.

    DDP averages gradients in the dtype of their parameters, and refuses fp32 gradients of 16-bit weights. In this block
    DDP averages nothing (`no_sync`), and torch's `grad_dtype` has autograd add up in fp32. When the block ends, each
    parameter has the mean of all processes in its fp32 `grad`. No process waits for its device, unless the model was
    made with ``find_unused_parameters=True``. The guide to trainers says what belongs in the block.

    A communication hook of the model is not called. If an error leaves the block, nothing is averaged. The gradients of
    16-bit weights take 4 bytes per parameter (2 without the block), and the averages 25 MB.

    Args:
        model: A model of DDP, with fp16, bf16 or fp32 weights in any mix. Every process must use the block.

    Yields:
        Nothing.

    Raises:
        TypeError: `model` is not a DistributedDataParallel.
        ValueError: `model` was made with ``static_graph=True``.
        RuntimeError: Before the block, a 16-bit parameter has a gradient that is not fp32. After it, a parameter has no
            gradient or a sparse one. Parameters without a gradient are allowed with ``find_unused_parameters=True``.
            If this happens in one process only, the others wait until their group times out, as under DDP.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).bfloat16())
        >>> optimizer = amp_kernels.optim.FusedSGD(model.named_parameters(), lr=0.1)
        >>> with amp_kernels.integrations.ddp.fp32_accumulation(model):
        ...     for _ in range(3):
        ...         (model(torch.ones(1, 2, dtype=torch.bfloat16)).sum() / 3).backward()
        >>> model.module.weight.grad
        tensor([[1.0020, 1.0020]])
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"fp32_accumulation: model must be a DistributedDataParallel, got a {type(model).__name__}; in one process "
            "set p.grad_dtype = torch.float32 for each parameter; compile a model before it is wrapped"
        )
    if model.static_graph:
        raise ValueError(
            "fp32_accumulation: model must have static_graph=False, got True; DistributedDataParallel then supports no "
            "no_sync() in the first iteration"
        )
    named = model.module.named_parameters()
    params = {name: p for name, p in named if p.requires_grad and name not in model.parameters_to_ignore}
    low = {name: p for name, p in params.items() if p.dtype in (torch.float16, torch.bfloat16)}
    for name, p in low.items():
        if p.grad is not None and p.grad.dtype is not torch.float32:
            raise RuntimeError(
                f"fp32_accumulation: the gradient of {name} must be None or fp32 before the block, got {p.grad.dtype}; "
                "call optimizer.zero_grad() first"
            )
    for p in low.values():
        p.grad_dtype = torch.float32
    with model.no_sync():
        yield
    _average(model, params)
    # As after a backward pass in which DDP averages: its next forward pass sends the buffers of the first process, such
    # as the running means of batch norms, to the others.
    model.require_forward_param_sync = True


def _average(model: DistributedDataParallel, params: dict[str, nn.Parameter]) -> None:
    """Replaces the gradients by their means over all processes."""
    for name, p in params.items():
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(f"fp32_accumulation: the gradient of {name} must be dense, got {p.grad.layout}")
    used = _used_anywhere(model, params)
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    with torch.no_grad():
        for bucket in _buckets([p.grad for p in used if p.grad is not None]):
            is_whole = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0] if is_whole else torch.cat([grad.flatten() for grad in bucket])
            flat /= dist.get_world_size(model.process_group)  # before the sum, as DDP does
            dist.all_reduce(flat, group=model.process_group)
            if not is_whole:
                for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                    grad.copy_(mean.view_as(grad))


def _used_anywhere(model: DistributedDataParallel, params: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters that have a gradient in any process. All processes must average the same tensors."""
    missing = next((name for name, p in params.items() if p.grad is None), None)
    if not model.find_unused_parameters:
        if missing is not None:
            raise RuntimeError(
                f"fp32_accumulation: each parameter must have a gradient after the block, got none for {missing}; "
                "freeze it by requires_grad_(False), or pass find_unused_parameters=True to DistributedDataParallel"
            )
        return list(params.values())
    device = next(iter(params.values())).device
    has_grad = torch.tensor([p.grad is not None for p in params.values()], dtype=torch.int32).to(device)
    dist.all_reduce(has_grad, dist.ReduceOp.MAX, group=model.process_group)
    return [p for p, used in zip(params.values(), has_grad.tolist(), strict=True) if used]


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields lists of gradients of one device and dtype, which have 25 MB together, or one gradient that has more."""
    waiting: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        bucket = waiting.setdefault((grad.device, grad.dtype), [])
        if bucket and sum(g.nbytes for g in bucket) + grad.nbytes > _BUCKET_BYTES:
            yield bucket.copy()
            bucket.clear()
        bucket.append(grad)
    yield from waiting.values()
