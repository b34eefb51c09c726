// Reads the tensors of an optimizer step from Python objects. C++ reads these objects in one pass. Python would need
// half a dozen passes, and the objects are not in the caches of the CPU. amp_kernels/optim/_sweep.py says what each
// function does.
#pragma once

#include "python.h"

namespace amp_kernels {

// sweep(parameters: list, states: list, groups: list, keys: tuple, device: tuple, table: int, forms: int, checked: int,
//       torch: tuple, held: list = None) -> (columns left to Python, columns with a gradient)
PyObject* sweep(PyObject* module, PyObject* arguments);

// apart(table: int, forms: int, columns: int, rows: int, checked: int, spans: int) -> int
PyObject* apart(PyObject* module, PyObject* arguments);

// same(lists: list, copies: list, states: dict, keys: list, values: list) -> bool
PyObject* same(PyObject* module, PyObject* arguments);

}  // namespace amp_kernels
