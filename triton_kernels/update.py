"""The update of every optimizer. Gradient, parameter and state are read once; parameter and state are written once.

The optimizer's formula computes the new values of an element, like a struct of csrc/formulas in C++. It is a
`@triton.jit` function in a file with the name of the formula (sgd.py, rmsprop.py, adam.py):

    p, state = formula(p, g, state, has, hyper, lr, factor, step)

    p, g      fp32 parameter and raw gradient, a tile of each
    state     tuple of fp32 tiles; if the tensor lacks a state, its tile is 0, and its new value is not stored
    has       tuple of booleans: which states the tensor has
    hyper     tuple of HYPER_COLUMNS fp32 scalars, those of the tensor's group
    lr        fp32 scalar
    factor    fp32 scalar: factor * g is the unscaled, clipped gradient
    step      int64 scalar: updates applied so far, 0 at the first

Bytes per element, read and written:

    parameter   8   in fp32, or as weight and remainder (remainder.py)
               10   as 16-bit weight with an fp32 master: the weight is only written
    each state  8
    gradient    4 or 2, read

SGD with momentum moves 20 bytes for an fp32 parameter with an fp32 gradient. It moves 18 for a 16-bit weight with a
remainder and a 16-bit gradient. Centered RMSprop with momentum moves 36 and 34 in the same two cases. An average
(`ema_`) of a 16-bit weight with a remainder moves 12: 8 for the fp32 average, and 4 for weight and remainder, which are
only read.

A program of 128 threads updates one chunk, tile by tile. A thread holds two packs of four neighbours. If the chunk
begins at an aligned pack in every array, only the last elements of the chunk, at most three, are updated one by one.
Otherwise all elements of the chunk are updated one by one.

A thread waits when it first uses a loaded value. ptxas decides how many loads of a tile start before the first wait.
On sm_90, RMSprop and AdamW without optional states start all loads of a tile before the first wait. A thread of SGD
with momentum, for 16-bit weights with remainders and 16-bit gradients, loads 80 bytes of a tile. It starts the loads of
only 32 of these bytes before the first wait. Eight programs of this kernel fit on a multiprocessor, so
8 * 128 * 32 bytes can be on their way to it at a time.

    tensor:  | chunk 0              | chunk 1              | chunk 2 |      program 0 takes the last chunk
             | tile 0 | tile 1 | .. |                                       a tile: 1024 elements
    tile:    | t0 t0 t0 t0 | t1 t1 t1 t1 | .. | t127 ..  | t0 t0 t0 t0 | t1 .. | t127 .. |
             | first packs: 512 elements                 | second packs                  |
"""

# ruff: noqa: RUF005 (Triton does not unpack a tuple inside of another)
from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import triton
import triton.language as tl

from ..families import FAMILIES
from .common import (
    FP32,
    GRAD,
    GROUP,
    HYPER_COLUMNS,
    INT8,
    INT16,
    MASTER,
    PARAM,
    SCALE,
    STATE,
    STEP,
    address_of,
    chunk_address,
    chunk_bounds,
    is_aligned,
    is_last,
    launch,
    load,
    load_elements,
    optional_scalar,
    programs_at_a_time,
    store_elements,
    table_entry,
)
from .remainder import join, split
from .states import STATE_GROUP, bf16_at_random, decode, encode, noise, random_words, spread

# Elements of a pack. Four are 16 bytes of an fp32 array, and 8 bytes of a 16-bit array. Eight would suit 16-bit arrays
# (16 bytes), but each fp32 access of a warp would skip every other 16 bytes. With fp32 parameters, fp32 masters or at
# least two states, most of the traffic is fp32.
_VEC = tl.constexpr(4)
_WARPS = 4
# Elements of a tile: eight per thread. If elements are accessed one by one, a thread has two, because each element then
# needs its own address and predicate. With four elements instead of two, registers spill (Adam, sm_90, 48 bytes).
_TILE = tl.constexpr(_WARPS * 32 * 8)
_TILE_BY_ELEMENT = tl.constexpr(_WARPS * 32 * 2)
# How many registers a thread may have. Without this number ptxas uses only 72, and spills 8 bytes (RMSprop with 16-bit
# gradients, sm_75 to sm_86).
_REGISTERS = 96
_LEAN_REGISTERS = 128  # for states of 8 and 16 bits; with 96 registers, SGD on sm_90 spills
_FOLD = tl.constexpr(1024)  # chunks that `_raise_steps` handles at a time


@triton.jit
def _is_skipped(found_inf):
    return optional_scalar(found_inf, 0.0) != 0.0  # 2.0 skips too, since found_inf may be a sum over devices or ranks


@triton.jit
def _factor(grad_scale, grad_norm, max_norm):
    """Return the factor that unscales and clips gradients."""
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), optional_scalar(grad_scale, 1.0))
    # 1e-6 is the constant of torch.nn.utils.clip_grad_norm_.
    coefficient = tl.div_rn(tl.full((), max_norm, tl.float32), optional_scalar(grad_norm, 0.0) + 1e-6)
    # NaN > 1.0 is false, so a NaN norm makes the factor NaN.
    return factor * tl.where((grad_norm == 0) | (coefficient > 1.0), 1.0, coefficient)


@triton.jit
def _hyper_parameters(hyper_ptr, group):
    row = hyper_ptr + group * HYPER_COLUMNS
    hyper = ()
    for column in tl.static_range(HYPER_COLUMNS):
        hyper = hyper + (tl.load(row + column),)
    return hyper


@triton.jit
def _update_chunk(
    grad,
    param,
    master,
    states,  # tuple of addresses, 0 where the tensor has no such state
    begin,
    end,
    hyper,
    lr,
    factor,
    step,
    FORMULA: tl.constexpr,
    N_STATES: tl.constexpr,
    N_OPTIONAL: tl.constexpr,
    STATES: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    MASTER_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    CODED: tl.constexpr,
    LEVELS: tl.constexpr,
    scales,
    group,
    tensor,
    VEC: tl.constexpr,
):
    """Update elements `begin` to `end` of a chunk.

    Both numbers are multiples of VEC, so the rounding below changes neither. "Element access" in common.py says why
    kernels round such numbers.
    """
    if VEC > 1:
        begin = begin // VEC * VEC
        end = end // VEC * VEC
    JOINS_GRAD: tl.constexpr = PARAM_DTYPE == FP32 and MASTER_DTYPE == INT16
    TILE: tl.constexpr = _TILE if VEC > 1 else _TILE_BY_ELEMENT
    has = [address != 0 for address in states]
    # If this tensor lacks a state, a mask turns off its loads and stores. There is no branch around them, so that all
    # loads start together. States that no tensor may lack use the parameter's mask. If they had masks of their
    # own, RMSprop would spill registers. If no tensor has the k-th state (bit k of STATES is 0), it is not loaded.
    ends = ()
    for k in tl.static_range(N_STATES):
        ends = ends + (end if k < N_STATES - N_OPTIONAL else tl.where(has[k], end, 0),)
    for i in range(begin, end, TILE):
        offsets = i + tl.arange(0, TILE)
        mask = offsets < end
        if CODED:
            groups = i // STATE_GROUP + tl.arange(0, TILE // STATE_GROUP)
            has_group = groups * STATE_GROUP < end
        g = load_elements(grad, offsets, mask, GRAD_DTYPE, VEC)
        p = load_elements(master, offsets, mask, MASTER_DTYPE, VEC)
        if JOINS_GRAD:
            g = join(g, p, GRAD_DTYPE)
            p = load_elements(param, offsets, mask, PARAM_DTYPE, VEC)
        elif MASTER_DTYPE == INT16:
            p = join(load_elements(param, offsets, mask, PARAM_DTYPE, VEC), p, PARAM_DTYPE)
        state = ()
        for k in tl.static_range(N_STATES):
            if CODED >> k & 1:
                x = load_elements(states[k], offsets, mask, STATE_DTYPE, VEC)
                if STATE_DTYPE == INT8:
                    if LEVELS[k] == 255:
                        x = x & 255
                    scale = load_elements(scales[k], groups, has_group, FP32, 1)
                    x = decode(x, spread(scale, TILE), LEVELS[k], 1 / LEVELS[k])
                state = state + (x,)
            elif STATES >> k & 1:
                state = state + (load_elements(states[k], offsets, offsets < ends[k], FP32, VEC),)
            else:
                state = state + (tl.zeros((TILE,), tl.float32),)
        p, state = FORMULA(p, g, state, has, hyper, lr, factor, step)
        if CODED:
            words = random_words(group + groups, tensor, step)
        for k in tl.static_range(N_STATES):
            if CODED >> k & 1:
                bits = noise(words, k, TILE)
                if STATE_DTYPE == INT8:
                    x, scale = encode(state[k], bits, mask, LEVELS[k], TILE)
                    store_elements(scales[k], groups, scale, has_group, FP32, 1)
                else:
                    x = bf16_at_random(state[k], bits)
                store_elements(states[k], offsets, x, mask, STATE_DTYPE, VEC)
            elif STATES >> k & 1:
                store_elements(states[k], offsets, state[k], offsets < ends[k], FP32, VEC)
        if JOINS_GRAD:
            store_elements(param, offsets, p, mask, PARAM_DTYPE, VEC)
        elif MASTER_DTYPE == INT16:
            p, remainder = split(p, PARAM_DTYPE)
            store_elements(master, offsets, remainder, mask, INT16, VEC)
        else:
            store_elements(master, offsets, p, mask, FP32, VEC)
        if PARAM_DTYPE != FP32:
            store_elements(param, offsets, p, mask, PARAM_DTYPE, VEC)


@triton.jit
def _step_address(table_ptr, n_tensors, tensor):
    return table_entry(table_ptr, n_tensors, STEP, tensor).to(tl.pointer_type(tl.uint32))


@triton.jit
def _raise_steps(table_ptr, chunks_ptr, n_tensors):
    """Add 1 to the step of each tensor in this launch that has a gradient. A tensor is counted at its first chunk."""
    for i in range(0, tl.num_programs(0), _FOLD):
        chunks = i + tl.arange(0, _FOLD)
        entry = chunks_ptr + 2 * chunks.to(tl.int64)
        is_first = (chunks < tl.num_programs(0)) & (tl.load(entry + 1, mask=chunks < tl.num_programs(0), other=1) == 0)
        tensor = tl.load(entry, mask=is_first, other=0)
        column = table_ptr + tensor.to(tl.int64)
        row = n_tensors.to(tl.int64)
        is_first = is_first & (tl.load(column + GRAD * row, mask=is_first, other=0) != 0)
        step = tl.load(column + STEP * row, mask=is_first, other=0).to(tl.pointer_type(tl.uint32))
        tl.store(step, tl.load(step, mask=is_first, other=0) + 1, mask=is_first)


@triton.jit(do_not_specialize=list(range(11)))
def _update_kernel(
    table_ptr,  # int64 [rows, n_tensors]
    chunks_ptr,  # int32 [n_chunks, 2]
    n_tensors: tl.int32,
    chunk_size: tl.int32,
    ticket_ptr,  # int64: how many programs have ended; 0 between launches
    hyper_ptr,  # fp32 [groups, HYPER_COLUMNS]
    lr_ptr,  # int64 [groups]: addresses of fp32 scalars, so that a launch in a graph reads the current lr
    grad_scale: tl.int64,  # address of an fp32 scalar; 0 if there is none
    found_inf: tl.int64,  # as grad_scale
    grad_norm: tl.int64,  # as grad_scale
    max_norm: tl.float32,
    FORMULA: tl.constexpr,
    N_STATES: tl.constexpr,  # rows STATE, STATE + 1, ... of the table
    N_OPTIONAL: tl.constexpr,  # how many of these states a tensor may lack; they are the last ones
    STATES: tl.constexpr,  # bit k: some tensor has the k-th state
    PARAM_DTYPE: tl.constexpr,
    MASTER_DTYPE: tl.constexpr,  # INT16: remainders of the parameters; if PARAM_DTYPE is FP32 (`ema_`), of the weights
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    CODED: tl.constexpr,  # bit k: the k-th state has STATE_DTYPE; the others are fp32
    LEVELS: tl.constexpr,  # of each state's code
):
    # Chunks are updated from the last to the first. The gradient pass read them from the first to the last, so the last
    # gradients may still be in L2.
    chunk = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    tensor, begin, n = chunk_bounds(table_ptr, chunks_ptr, n_tensors, chunk, chunk_size)
    grad = chunk_address(table_ptr, n_tensors, GRAD, tensor, begin, GRAD_DTYPE)
    skipped = _is_skipped(found_inf)
    if (grad != 0) & (not skipped):
        param = chunk_address(table_ptr, n_tensors, PARAM, tensor, begin, PARAM_DTYPE)
        master = param
        if PARAM_DTYPE != FP32 or MASTER_DTYPE == INT16:
            master = chunk_address(table_ptr, n_tensors, MASTER, tensor, begin, MASTER_DTYPE)
        states = ()
        # Bitwise or of all states' addresses. It is aligned if each of them is.
        state_bits = tl.zeros((), tl.int64)
        lean_bits = tl.zeros((), tl.int64)
        for k in tl.static_range(N_STATES):
            state = state_bits * 0
            if CODED >> k & 1:
                state = chunk_address(table_ptr, n_tensors, STATE + k, tensor, begin, STATE_DTYPE)
                lean_bits = lean_bits | state
            elif STATES >> k & 1:
                state = chunk_address(table_ptr, n_tensors, STATE + k, tensor, begin, FP32)
                state_bits = state_bits | state
            states = states + (state,)
        scales = ()
        for k in tl.static_range(2):
            scale = state_bits * 0
            if STATE_DTYPE == INT8 and CODED >> k & 1:
                scale = chunk_address(table_ptr, n_tensors, SCALE + k, tensor, begin // STATE_GROUP, FP32)
            scales = scales + (scale,)
        aligned = is_aligned(grad, GRAD_DTYPE, _VEC) & is_aligned(param, PARAM_DTYPE, _VEC)
        aligned = aligned & is_aligned(master, MASTER_DTYPE, _VEC) & is_aligned(state_bits, FP32, _VEC)
        aligned = aligned & is_aligned(lean_bits, STATE_DTYPE, _VEC)

        group = table_entry(table_ptr, n_tensors, GROUP, tensor)
        hyper = _hyper_parameters(hyper_ptr, group)
        lr = tl.load(tl.load(lr_ptr + group).to(tl.pointer_type(tl.float32)))
        factor = _factor(grad_scale, grad_norm, max_norm)
        step = tl.load(_step_address(table_ptr, n_tensors, tensor)).to(tl.int64)
        if CODED:
            whole = tl.where(aligned, n // STATE_GROUP * STATE_GROUP, 0)  # a tile begins with a group
        else:
            whole = tl.where(aligned, n // _VEC * _VEC, 0)
        # The elements from `whole` on are updated first. If they came second, the values that they need would occupy
        # registers while the other elements are updated.
        _update_chunk(
            grad,
            param,
            master,
            states,
            whole,
            n,
            hyper,
            lr,
            factor,
            step,
            FORMULA,
            N_STATES,
            N_OPTIONAL,
            STATES,
            PARAM_DTYPE,
            MASTER_DTYPE,
            GRAD_DTYPE,
            STATE_DTYPE,
            CODED,
            LEVELS,
            scales,
            begin // STATE_GROUP,
            tensor,
            1,
        )
        _update_chunk(
            grad,
            param,
            master,
            states,
            0,
            whole,
            hyper,
            lr,
            factor,
            step,
            FORMULA,
            N_STATES,
            N_OPTIONAL,
            STATES,
            PARAM_DTYPE,
            MASTER_DTYPE,
            GRAD_DTYPE,
            STATE_DTYPE,
            CODED,
            LEVELS,
            scales,
            begin // STATE_GROUP,
            tensor,
            _VEC,
        )
    if not skipped:  # noqa: SIM102
        # The tests are nested, since Triton evaluates both sides of an `and`. A program reads the step of its tensor
        # before it calls is_last(). So when the last program raises the steps, every program has read its step.
        if is_last(ticket_ptr):
            _raise_steps(table_ptr, chunks_ptr, n_tensors)


def formula_of(family: str) -> dict[str, Any]:
    """Return the kernel's constants that depend on the family."""
    known = FAMILIES[family]
    formula = importlib.import_module(f".{family}", __package__).formula
    levels = tuple(0 if code is None else code.levels for code in known.codes)
    return {"FORMULA": formula, "N_STATES": len(known.states), "N_OPTIONAL": known.optional, "LEVELS": levels}


def _options(
    family: str, param_dtype: int, split: bool, grad_dtype: int, states: int, state_dtype: int
) -> dict[str, Any]:
    names = [name if states >> k & 1 else None for k, name in enumerate(FAMILIES[family].states)]
    return {
        "STATE_DTYPE": state_dtype,
        "CODED": 0 if state_dtype == FP32.value else FAMILIES[family].coded(names),
        "PARAM_DTYPE": param_dtype,
        "MASTER_DTYPE": INT16.value if split else FP32.value,
        "GRAD_DTYPE": grad_dtype,
        "STATES": states,
        **formula_of(family),
        "num_warps": _WARPS,
        "maxnreg": _REGISTERS if state_dtype == FP32.value else _LEAN_REGISTERS,
    }


def _update_table_(
    family: str,
    table: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
    record: torch.Tensor,
    hyper: torch.Tensor,
    lr: torch.Tensor,
    param_dtype: int,
    split: bool,
    grad_dtype: int,
    states: int,
    state_dtype: int,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    grad_norm: torch.Tensor | None,
    max_norm: float,
) -> None:
    launch(
        _update_kernel,
        chunks.shape[0],
        table,
        chunks,
        table.shape[1],
        chunk_size,
        record,
        hyper,
        lr,
        address_of(grad_scale),
        address_of(found_inf),
        address_of(grad_norm),
        max_norm,
        **_options(family, param_dtype, split, grad_dtype, states, state_dtype),
    )


def _load_update(
    beside: torch.Tensor, family: str, param_dtype: int, split: bool, grad_dtype: int, states: int, state_dtype: int
) -> int:
    _load(beside.device, family, param_dtype, split, grad_dtype, states, state_dtype)
    return programs_at_a_time(beside)


@functools.cache  # because every call of `update_` calls this function
def _load(device: torch.device, *form: Any) -> None:
    fp32, int32, int64 = torch.float32, torch.int32, torch.int64
    load(_update_kernel, device, int64, int32, 0, 0, int64, fp32, int64, 0, 0, 0, 0.0, **_options(*form))
