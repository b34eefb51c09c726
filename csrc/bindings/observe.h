// What a step has to know of every parameter, as Python sees it: one call where Python's own getters take half a dozen
// sweeps over objects that a step finds cold.
#pragma once

// torch's build flags set Py_LIMITED_API too; the wheel's tag says cp310 (setup.py).
#ifdef Py_LIMITED_API
#undef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

namespace amp_kernels {

// observe(parameters: list, seen: int, versions: bool, dlpack_exchange_api: capsule), see
// amp_kernels/optim/_observe.py.
PyObject* observe(PyObject* module, PyObject* arguments);

}  // namespace amp_kernels
