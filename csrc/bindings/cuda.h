// What Python may ask of a build for CUDA.
#pragma once

#include "python.h"

namespace amp_kernels::cuda {

// why_no_kernel(): why nothing of this binary runs on the current device; "" if it does.
PyObject* why_no_kernel(PyObject*, PyObject*);

}  // namespace amp_kernels::cuda
