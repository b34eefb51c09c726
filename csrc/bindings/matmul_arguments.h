// From the arguments of the matmul ops (schemas: amp_kernels/_backends.py) to the structs the kernels take. Everything
// was checked in Python.
#pragma once

#include "../matmul.h"
#include "arguments.h"

namespace amp_kernels {

inline Matmul make_matmul(const Tensor& a, const Tensor& b, const std::optional<Tensor>& input, const Tensor& out,
                          std::optional<Tensor>& pre, double alpha, double beta, int64_t activation) {
  Matmul matmul = {};
  matmul.batch = out.size(0);
  matmul.m = out.size(1);
  matmul.n = out.size(2);
  matmul.k = a.size(2);
  matmul.a = a.data_ptr();
  matmul.b = b.data_ptr();
  matmul.input = data<char>(input);
  matmul.out = out.data_ptr();
  matmul.pre = data<char>(pre);
  for (int i = 0; i < 3; ++i) {
    matmul.a_strides[i] = a.stride(i);
    matmul.b_strides[i] = b.stride(i);
    if (input.has_value()) matmul.input_strides[i] = input->stride(i);
  }
  matmul.out_strides[0] = out.stride(0);
  matmul.out_strides[1] = out.stride(1);
  matmul.alpha = static_cast<float>(alpha);
  matmul.beta = static_cast<float>(beta);
  matmul.activation = static_cast<Activation>(activation);
  matmul.dtype = dtype_of(a);
  matmul.out_dtype = dtype_of(out);
  return matmul;
}

inline CopyPad make_copy_pad(const Tensor& x, const std::optional<Tensor>& pre, const Tensor& out,
                             std::optional<Tensor>& bias_grad, int64_t activation) {
  CopyPad pass = {};
  pass.rows = x.size(0);
  pass.columns = x.size(1);
  pass.x = x.data_ptr();
  pass.pre = data<char>(pre);
  for (int i = 0; i < 2; ++i) {
    pass.x_strides[i] = x.stride(i);
    if (pre.has_value()) pass.pre_strides[i] = pre->stride(i);
  }
  pass.out = out.data_ptr();
  pass.pitch = out.size(1);
  pass.bias_grad = data<float>(bias_grad);
  pass.activation = static_cast<Activation>(activation);
  pass.dtype = dtype_of(x);
  return pass;
}

}  // namespace amp_kernels
