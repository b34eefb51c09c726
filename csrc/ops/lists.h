// The operators on lists of tensors, each in one call. amp_kernels/ops/lists.py takes the calls that these refuse.
//
// Both functions return True. In three cases they do nothing and return False: kernels cannot walk a tensor as it is, a
// tensor does not fit, or tensors to be written overlap.
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
