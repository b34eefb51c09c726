// Direct calls of the int8 kernels on a CPU: from Python, past torch's dispatcher (amp_kernels/_direct.py).
#pragma once

#include "python.h"

namespace amp_kernels {

// Addresses are numbers, 0 for what is not there; the caller vouches for them.
// quantize_int8(numbers: bytes, seed, x, out, scale, zero_point); numbers: the layout, dtype, fake, static, stochastic
PyObject* quantize_int8(PyObject*, PyObject* const* arguments, Py_ssize_t count);
// dequantize_int8(numbers: bytes, values, scale, zero_point, out); numbers: the layout, dtype
PyObject* dequantize_int8(PyObject*, PyObject* const* arguments, Py_ssize_t count);

// Tensors or None are looked at here: None, and nothing was done, if one is not as the kernel takes it, else the
// result. `torch` is (torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, torch.Tensor.is_neg,
// torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs, dtypes, watchers): the dtypes as numbered by Dtype; if one of
// the watchers, called, returns what is true, somebody has to see the call, and the answer is None.
// new_int8_matmul(torch, a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out_dtype)
PyObject* new_int8_matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count);
// new_int8_linear(torch, x, weight, scale, bias)
PyObject* new_int8_linear(PyObject*, PyObject* const* arguments, Py_ssize_t count);

}  // namespace amp_kernels
