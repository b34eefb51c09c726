"""RMSprop (Hinton 2012; centered: Graves 2013) as torch.optim writes it, fp32 masters for 16-bit parameters.

g <- factor * grad + weight_decay * p
v <- alpha * v + (1 - alpha) * g^2
centered: a <- a + (1 - alpha) * (g - a)
d <- sqrt(v - a^2) + eps                       (a = 0 unless centered)
b <- momentum * b + g / d,  p <- p - lr * b    (b = g / d without momentum)
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
    STATE1,
    STATE2,
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
def _rmsprop_chunk(
    grad,
    param,
    master,
    square_avg,
    buffer,  # address of the momentum buffer, or 0
    grad_avg,  # address, or 0 unless centered
    n,
    factor,
    lr,
    alpha,
    one_minus_alpha,
    eps,
    weight_decay,
    momentum,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    VEC: tl.constexpr,
):
    centering = tl.where(grad_avg != 0, one_minus_alpha, 0.0)
    if VEC > 1:
        n = n // VEC * VEC
    # Absent state is masked rather than branched around, so that all loads fly together; it reads 0.
    n_buffer = tl.where(buffer == 0, 0, n)
    n_grad_avg = tl.where(grad_avg == 0, 0, n)
    TILE: tl.constexpr = UPDATE_TILE if VEC > 1 else UPDATE_TILE_BY_ELEMENT
    for i in range(0, n, TILE):
        offsets = i + tl.arange(0, TILE)
        mask = offsets < n
        buffer_mask = offsets < n_buffer
        grad_avg_mask = offsets < n_grad_avg
        g = load_elements(grad, offsets, mask, GRAD_DTYPE, VEC)
        p = load_elements(master, offsets, mask, FP32, VEC)
        v = load_elements(square_avg, offsets, mask, FP32, VEC)
        b = load_elements(buffer, offsets, buffer_mask, FP32, VEC)
        a = load_elements(grad_avg, offsets, grad_avg_mask, FP32, VEC)
        g *= factor
        # One fma, see csrc/formulas; and no decay leaves an infinite parameter as it is, as in torch.
        g = tl.where(weight_decay == 0.0, g, tl.fma(weight_decay, p, g))
        v = alpha * v + one_minus_alpha * g * g
        a += centering * (g - a)
        # Rounding can push v - a^2 below 0, where torch takes the root of a negative number. NaN is kept.
        variance = v - a * a
        variance = tl.where(variance < 0.0, 0.0, variance)
        b = momentum * b + tl.div_rn(g, tl.sqrt_rn(variance) + eps)  # plain / and tl.sqrt are approximate
        p -= lr * b
        store_elements(square_avg, offsets, v, mask, FP32, VEC)
        store_elements(grad_avg, offsets, a, grad_avg_mask, FP32, VEC)
        store_elements(buffer, offsets, b, buffer_mask, FP32, VEC)
        store_elements(master, offsets, p, mask, FP32, VEC)
        if PARAM_DTYPE != FP32:
            store_elements(param, offsets, p, mask, PARAM_DTYPE, VEC)


@triton.jit(do_not_specialize=list(range(11)))
def _rmsprop_kernel(
    table_ptr,  # int64 [rows, n_tensors]
    chunks_ptr,  # int32 [n_chunks, 2]
    n_tensors,
    chunk_size,
    steps_ptr,  # int32 [n_chunks]: updates applied so far
    hyper_ptr,  # fp32 [groups, 8]: alpha, 1 - alpha, eps, weight_decay, sign, momentum
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
        square_avg = chunk_address(table_ptr, n_tensors, STATE0, tensor, begin, FP32)
        buffer = chunk_address(table_ptr, n_tensors, STATE1, tensor, begin, FP32)
        grad_avg = chunk_address(table_ptr, n_tensors, STATE2, tensor, begin, FP32)

        group = table_entry(table_ptr, n_tensors, GROUP, tensor)
        hyper = hyper_ptr + group * HYPER_COLUMNS
        alpha = tl.load(hyper)
        one_minus_alpha = tl.load(hyper + 1)
        eps = tl.load(hyper + 2)
        weight_decay = tl.load(hyper + 3)
        factor = tl.load(hyper + 4) * update_factor(grad_scale_ptr, grad_norm_ptr, max_norm)
        momentum = tl.load(hyper + 5)
        lr = tl.load(tl.load(lr_ptr + group).to(tl.pointer_type(tl.float32)))
        step = tl.load(steps_ptr + chunk)

        aligned = is_aligned(grad, GRAD_DTYPE, UPDATE_VEC) & is_aligned(param, PARAM_DTYPE, UPDATE_VEC)
        aligned = aligned & is_aligned(master | square_avg | buffer | grad_avg, FP32, UPDATE_VEC)
        if aligned & (n % UPDATE_VEC == 0):
            _rmsprop_chunk(
                grad, param, master, square_avg, buffer, grad_avg, n, factor, lr, alpha, one_minus_alpha, eps,
                weight_decay, momentum, PARAM_DTYPE, GRAD_DTYPE, UPDATE_VEC,
            )  # fmt: skip
        else:
            _rmsprop_chunk(
                grad, param, master, square_avg, buffer, grad_avg, n, factor, lr, alpha, one_minus_alpha, eps,
                weight_decay, momentum, PARAM_DTYPE, GRAD_DTYPE, 1,
            )  # fmt: skip
        tl.debug_barrier()  # every thread has read the count before one of them stores the next
        tl.store(steps_ptr + chunk, step + 1)


_rmsprop_table_ = functools.partial(launch_update, _rmsprop_kernel)
