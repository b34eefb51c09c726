// What a step has to know of every parameter, as Python sees it: one call where Python's own getters take half a dozen
// sweeps over objects that a step finds cold.
#pragma once

#include "python.h"

namespace amp_kernels {

// observe(parameters: list, states: list, (starts: int, ends: int, count: int), seen: int, places: int, writes: bool,
//         (dlpack_exchange_api, Tensor, Parameter, Tensor.is_neg, Tensor.data_ptr)), see
// amp_kernels/optim/_observe.py.
PyObject* observe(PyObject* module, PyObject* arguments);

}  // namespace amp_kernels
