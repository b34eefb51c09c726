"""SGD (Sutskever et al. 2013) as torch.optim writes it, with fp32 masters for 16-bit parameters.

g <- factor * grad + weight_decay * p
b <- momentum * b + (1 - dampening) * g        (b <- g at the first step)
p <- p - lr * (nesterov ? g + momentum * b : b)
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from .common import (
    FP32,
    GRAD,
    GROUP,
    HYPER_COLUMNS,
    MASTER,
    PARAM,
    STATE0,
    UPDATE_TILE,
    UPDATE_TILE_BY_ELEMENT,
    UPDATE_VEC,
    chunk_address,
    chunk_bounds,
    is_aligned,
    is_skipped,
    launch_update,
    load_elements,
    store_elements,
    table_entry,
    update_factor,
)


@triton.jit
def _sgd_chunk(
    grad,
    param,
    master,
    buffer,  # address of the momentum buffer, or 0
    n,
    factor,
    lr,
    momentum,
    one_minus_dampening,
    weight_decay,
    lookahead,  # momentum if nesterov, else 0
    first,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    VEC: tl.constexpr,
):
    if VEC > 1:
        n = n // VEC * VEC
    # Absent state is masked rather than branched around, so that all loads fly together.
    n_buffer = tl.where(buffer == 0, 0, n)
    TILE: tl.constexpr = UPDATE_TILE if VEC > 1 else UPDATE_TILE_BY_ELEMENT
    for i in range(0, n, TILE):
        offsets = i + tl.arange(0, TILE)
        mask = offsets < n
        buffer_mask = offsets < n_buffer
        g = load_elements(grad, offsets, mask, GRAD_DTYPE, VEC)
        p = load_elements(master, offsets, mask, FP32, VEC)
        b = load_elements(buffer, offsets, buffer_mask, FP32, VEC)
        g *= factor
        # One fma, see csrc/formulas; and no decay leaves an infinite parameter as it is, as in torch.
        g = tl.where(weight_decay == 0.0, g, tl.fma(weight_decay, p, g))
        b = tl.where(first, g, momentum * b + one_minus_dampening * g)
        p -= lr * tl.where(lookahead != 0.0, g + lookahead * b, b)
        store_elements(buffer, offsets, b, buffer_mask, FP32, VEC)
        store_elements(master, offsets, p, mask, FP32, VEC)
        if PARAM_DTYPE != FP32:
            store_elements(param, offsets, p, mask, PARAM_DTYPE, VEC)


@triton.jit(do_not_specialize=list(range(11)))
def _sgd_kernel(
    table_ptr,  # int64 [rows, n_tensors]
    chunks_ptr,  # int32 [n_chunks, 2]
    n_tensors,
    chunk_size,
    steps_ptr,  # int32 [n_chunks]: updates applied so far
    hyper_ptr,  # fp32 [groups, 8]: momentum, 1 - dampening, weight_decay, nesterov, sign
    lr_ptr,  # int64 [groups]: addresses of fp32 scalars, so that a tensor lr stays live
    grad_scale_ptr,  # fp32 scalars, or None
    found_inf_ptr,
    grad_norm_ptr,
    max_norm,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
):
    # Backwards: the gradient pass went forwards, so the last gradients it read may still be in L2.
    chunk = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    tensor, begin, n = chunk_bounds(table_ptr, chunks_ptr, n_tensors, chunk, chunk_size)
    grad = chunk_address(table_ptr, n_tensors, GRAD, tensor, begin, GRAD_DTYPE)
    if (grad != 0) & (not is_skipped(found_inf_ptr)):
        param = chunk_address(table_ptr, n_tensors, PARAM, tensor, begin, PARAM_DTYPE)
        master = param
        if PARAM_DTYPE != FP32:
            master = chunk_address(table_ptr, n_tensors, MASTER, tensor, begin, FP32)
        buffer = chunk_address(table_ptr, n_tensors, STATE0, tensor, begin, FP32)

        group = table_entry(table_ptr, n_tensors, GROUP, tensor)
        hyper = hyper_ptr + group * HYPER_COLUMNS
        momentum = tl.load(hyper)
        one_minus_dampening = tl.load(hyper + 1)
        weight_decay = tl.load(hyper + 2)
        lookahead = tl.where((tl.load(hyper + 3) != 0.0) & (buffer != 0), momentum, 0.0)
        factor = tl.load(hyper + 4) * update_factor(grad_scale_ptr, grad_norm_ptr, max_norm)
        lr = tl.load(tl.load(lr_ptr + group).to(tl.pointer_type(tl.float32)))
        step = tl.load(steps_ptr + chunk)
        first = (step == 0) | (buffer == 0)  # without a buffer every step is a first one: b = g

        aligned = is_aligned(grad, GRAD_DTYPE, UPDATE_VEC) & is_aligned(param, PARAM_DTYPE, UPDATE_VEC)
        aligned = aligned & is_aligned(master | buffer, FP32, UPDATE_VEC) & (n % UPDATE_VEC == 0)
        if aligned:
            _sgd_chunk(
                grad, param, master, buffer, n, factor, lr, momentum, one_minus_dampening,
                weight_decay, lookahead, first, PARAM_DTYPE, GRAD_DTYPE, UPDATE_VEC,
            )  # fmt: skip
        else:
            _sgd_chunk(
                grad, param, master, buffer, n, factor, lr, momentum, one_minus_dampening,
                weight_decay, lookahead, first, PARAM_DTYPE, GRAD_DTYPE, 1,
            )  # fmt: skip
        tl.debug_barrier()  # every thread has read the count before one of them stores the next
        tl.store(steps_ptr + chunk, step + 1)


_sgd_table_ = functools.partial(launch_update, _sgd_kernel)
