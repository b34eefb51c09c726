// Direct calls of the int8 kernels on a CPU: from Python, past torch's dispatcher (amp_kernels/_direct.py).
#pragma once

#include "python.h"

namespace amp_kernels {

// Tensors or None are looked at here: None, and nothing was done, if one is not as the kernel takes it, else the
// result. `torch` is (torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, torch.Tensor.is_neg,
// torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs, dtypes, watchers): the dtypes as numbered by Dtype; if one
// of the watchers, called, returns what is true, somebody has to see the call, and the answer is None. A recipe is
// bytes of int64: the layout, the dtype of the floats, of quantization whether it is fake, static and stochastic, the
// number of dimensions, in each the result's stride, the scales' size and their stride; the caller vouches for it.
// are_plain(torch, tensor, tensor, tensor): whether the others may be called with these
PyObject* are_plain(PyObject*, PyObject* const* arguments, Py_ssize_t count);
// Of tensors of which that was so a moment ago:
// new_quantize_int8(torch, recipe, seed, symmetric, x, scale, zero_point): a list of the result and of what was not
// given
PyObject* new_quantize_int8(PyObject*, PyObject* const* arguments, Py_ssize_t count);
// new_dequantize_int8(torch, recipe, values, scale, zero_point)
PyObject* new_dequantize_int8(PyObject*, PyObject* const* arguments, Py_ssize_t count);
// new_int8_matmul(torch, a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out_dtype)
PyObject* new_int8_matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count);
// new_int8_linear(torch, x, weight, scale, bias)
PyObject* new_int8_linear(PyObject*, PyObject* const* arguments, Py_ssize_t count);

}  // namespace amp_kernels
