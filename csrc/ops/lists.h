// The operators on lists of tensors, each in one call. amp_kernels/ops/lists.py takes the calls that these refuse.
//
// Both functions return True. If a list holds a tensor that kernels cannot walk as it is, or that does not fit, or if
// tensors to be written overlap, they do nothing and return False.
#pragma once

#include "python.h"

namespace amp_kernels {

// gradient_pass(torch: tuple, grads: list, scale, found_inf, norm, writes: bool) -> bool
//
// `scale` and `norm` may be None. The gradients are multiplied by `scale`.
PyObject* gradient_pass(PyObject* module, PyObject* arguments);

// update(torch: tuple, family: str, params: list, grads: list, state0, state1, state2, masters, hyper: list, lr: float,
//        tensor_lr, steps_taken: int, grad_scale, found_inf, grad_remainders) -> bool
//
// The arguments are those of the operator `update_` (amp_kernels/ops/update.py). `grad_remainders` may also be the dict
// `optimizer.state`, which has the remainders of the optimizer's parameters.
PyObject* update(PyObject* module, PyObject* arguments);

}  // namespace amp_kernels
