// The arguments of the matmul kernels, filled from tensors by csrc/ops/matmul.cpp.
#pragma once

#include "table.h"

namespace amp_kernels {

enum Activation { kIdentity, kRelu, kGelu, kGeluTanh };

// out = activation(alpha * a @ b + beta * input), accumulated in fp32 and rounded once, for each of `batch` matrices.
// Strides are in elements. Those of a, b and input may have any value, 0 included. Within a row, out and pre have
// stride 1.
struct Matmul {
  int64_t batch, m, n, k;
  const void* a;
  int64_t a_strides[3];  // over batch, m, k
  int64_t a_bytes;       // from `a` to the end of its storage
  const void* b;
  int64_t b_strides[3];  // over batch, k, n
  int64_t b_bytes;
  const void* input;  // of `dtype`, or nullptr. A bias is an input with stride 0 over the rows
  int64_t input_strides[3];
  void* out;
  int64_t out_strides[2];  // over batch and m
  // If not nullptr, the argument of the activation is written here, rounded to out_dtype, in the layout of out.
  void* pre;
  float alpha;
  float beta;
  Activation activation;
  Dtype dtype;      // of a, b and input: fp16 or bf16
  Dtype out_dtype;  // of out and pre
};

// Copies x so that a tensor-core kernel can load it 16 bytes at a time. out[r, c] is x[r, c] * derivative(pre[r, c])
// for c < columns, and 0 for columns <= c < pitch. `bias_grad[c]` is the sum of column c of `out` before rounding.
struct CopyPad {
  int64_t rows, columns;
  const void* x;
  int64_t x_strides[2];
  const void* pre;  // the argument of the activation; for relu its result; for kIdentity nullptr
  int64_t pre_strides[2];
  void* out;         // [rows, pitch], contiguous
  int64_t pitch;     // a multiple of 8
  float* bias_grad;  // [columns] or nullptr
  Activation activation;
  Dtype dtype;  // of x, pre and out: fp16 or bf16
};

}  // namespace amp_kernels
