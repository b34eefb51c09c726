// The arguments of the int8 kernels, filled from tensors by csrc/ops/int8.cpp.
#pragma once

#include "table.h"

namespace amp_kernels {

// How a tensor is cut into groups with a scale each (csrc/ops/int8_layout.h): four nested levels in the storage order
// of `out`, kept (G) and reduced (R) in turn: G1, R1, G2, R2. A level that is not needed has size 1. Rows are (G1, 1,
// G2, R2), columns (G1, R1, G2, 1), the channels of NCHW (1, N, C, H * W), blocks of the last dimension rows, or with a
// ragged last one (G1, 1, blocks, block). Strides are in elements and may be anything for `x`; `out` is dense, R2 or,
// where that is 1, G2 innermost, except that a ragged last block is cut off by `length`.
struct Int8Layout {
  enum Level { kG1, kR1, kG2, kR2, kLevels };
  int64_t size[kLevels];
  int64_t x[kLevels];      // strides of the floating-point tensor
  int64_t out[kLevels];    // strides of the codes, or of what is written in their place
  int64_t index[kLevels];  // strides of the index that numbers random bits: as `out`, which is row-major then
  int64_t scale[2];        // strides of scale and zero_point over G1 and G2
  int64_t length;          // an element exists iff g2 * size[kR2] + r2 < length

  AMP_KERNELS_HD int64_t groups() const { return size[kG1] * size[kG2]; }

  int64_t elements() const { return size[kG1] * size[kR1] * length; }
};

struct Quantize {
  const void* x;
  void* out;            // int8 codes, or with `fake` values of x's dtype
  float* scale;         // read if `is_static`, else written
  int32_t* zero_point;  // nullptr: symmetric
  Int8Layout layout;
  Dtype dtype;  // of x
  bool fake;    // writes dequantize(quantize(x)) in place of codes
  bool is_static;
  bool stochastic;
  uint64_t seed;
};

struct Dequantize {
  const int8_t* values;  // laid out by layout.out
  const float* scale;
  const int32_t* zero_point;
  void* out;  // laid out by layout.x
  Int8Layout layout;
  Dtype dtype;  // of out
};

// Gradient of a fake quantization: `grad` where the code was inside the range before clamping, else 0.
struct StraightThrough {
  const void* grad;  // laid out by layout.out, like `out`
  const void* x;     // laid out by layout.x
  const float* scale;
  const int32_t* zero_point;
  void* out;
  Int8Layout layout;
  Dtype dtype;  // of all three
};

// out[m, n] = (sum over k of (a[m, k] - za[m]) * (b[k, n] - zb[n])) * (sa[m] * sb[n]) + bias[n]; the sum is exact.
struct Int8Matmul {
  int64_t m, n, k;
  const int8_t* a;
  int64_t a_strides[2];  // over m and k
  const int8_t* b;
  int64_t b_strides[2];  // over k and n
  const float* a_scale;  // one element, or with a_step 1 one for each row
  const int32_t* a_zero_point;
  int64_t a_step;
  const float* b_scale;  // one element, or with b_step 1 one for each column
  const int32_t* b_zero_point;
  int64_t b_step;
  const void* bias;  // fp32 [n] or nullptr
  void* out;         // [m, n], contiguous
  Dtype dtype;       // of out, unless out_scale is given: then it holds int8 codes
  const float* out_scale;
  const int32_t* out_zero_point;
};

// out[m, n] = (sum over k of x[m, k] * weight[n, k]) * scale[n] + bias[n], accumulated in fp32.
struct Int8Linear {
  int64_t m, n, k;
  const void* x;         // [m, k], rows x_stride apart
  int64_t x_stride;      // in elements
  const int8_t* weight;  // [n, k], contiguous
  const float* scale;    // one element, or with scale_step 1 one for each output
  int64_t scale_step;
  const void* bias;  // [n] of `dtype`, or nullptr
  void* out;         // [m, n], contiguous
  Dtype dtype;       // of x, bias and out
};

}  // namespace amp_kernels
