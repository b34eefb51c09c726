// The arguments of the int8 kernels, filled from tensors by csrc/ops/int8.cpp.
#pragma once

#include "table.h"

namespace amp_kernels {

// How a tensor is cut into groups. The elements of a group share one scale and one zero point.
//
// The kernels (CPU, CUDA, Triton) see dense memory of three axes, [outer][reduced][inner]. x, codes and results lie the
// same way: one offset serves all of them. Group g = o * inner + i has the elements at (o * reduced + r) * inner + i,
// for all r. Scales and zero points lie in the order of the groups. An axis that is not needed has size 1.
//
//   outer     reduced      inner
//     1       all           1         the whole tensor
//   rows      columns       1         rows of a matrix; output channels of a channels_last weight
//   blocks    block size    1         blocks of the last dimension
//     1       rows         columns    columns of a matrix; channels of [B, T, C] and of channels_last images
//   experts   N            K          columns of [E, N, K]
//
// A kernel walks in one of two ways, always along memory:
//
//   by rows (inner is 1):                      by columns (inner is above 1):
//   neighbours belong to one group             neighbours belong to different groups
//
//     a a a a a a a a    group 0                 a b c d    groups 0 to 3     r = 0
//     b b b b b b b b    group 1                 a b c d                      r = 1
//     c c c c c c c c    group 2                 e f g h    groups 4 to 7     r = 0
//                                                e f g h                      r = 1
//
// Words that all kernels use:
//
//   band      neighbouring groups that are handled together: by columns some columns with all of their rows,
//             by rows one group or some short ones
//   piece     a part of a band, where there are fewer bands than threads or thread blocks
//   segment   neighbours in memory that are handled at once
//
// If a row of the tensor is no multiple of the block size, its last block is shorter, and the next row follows it
// immediately. `row` is the length of such rows. Elsewhere no block is cut, and `row` counts all elements.
struct Int8Layout {
  int64_t outer, reduced, inner;
  int64_t row;

  AMP_KERNELS_HD bool is_by_columns() const { return inner > 1; }
  AMP_KERNELS_HD int64_t groups() const { return outer * inner; }

  // Groups of a row: by rows alone.
  AMP_KERNELS_HD int64_t groups_of_row() const { return (row + reduced - 1) / reduced; }

  AMP_KERNELS_HD int64_t elements() const {
    return is_by_columns() ? outer * reduced * inner : outer / groups_of_row() * row;
  }
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
  const int8_t* values;
  const float* scale;
  const int32_t* zero_point;
  void* out;
  Int8Layout layout;
  Dtype dtype;  // of out
};

// Gradient of a fake quantization: `grad` where the code was inside the range before clamping, else 0.
struct StraightThrough {
  const void* grad;
  const void* x;
  const float* scale;
  const int32_t* zero_point;
  void* out;
  Int8Layout layout;
  Dtype dtype;  // of all three
};

// The kernels of a GPU read the operands of both products in chunks of 16 bytes. There, rows along k are contiguous and
// begin at multiples of 16 bytes, and hold zeros from k on, up to a multiple of 16 elements.

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
  const int8_t* weight;  // [n, k], rows weight_stride apart
  int64_t weight_stride;
  const float* scale;  // one element, or with scale_step 1 one for each output
  int64_t scale_step;
  const void* bias;  // [n] of `dtype`, or nullptr
  void* out;         // [m, n], contiguous
  Dtype dtype;       // of x, bias and out
};

}  // namespace amp_kernels
