// The arguments of the int8 kernels, filled from tensors by csrc/ops/int8.cpp.
#pragma once

#include "table.h"

namespace amp_kernels {

// How a tensor is cut into groups: the elements of a group share one scale and one zero point. csrc/ops/int8_layout.h
// makes a layout of a tensor's shape and strides; every int8 kernel (CPU, CUDA, Triton) walks it, in these words.
//
// The codes are dense. In the order of their memory they are four nested axes, the outermost first; a kept axis tells
// groups apart, a reduced one lies inside a group. An axis that is not needed has size 1.
//
//   kOuterGroup    kOuterReduced    kInnerGroup    kInnerReduced
//        1               1               1               n          the whole tensor
//        1             rows              1               n          the whole tensor, with gaps between its rows
//      batch             1             rows              n          rows: heads, slices of a fused qkv
//      rows              1            blocks         block size     blocks of the last dimension
//        1             rows           columns            1          columns: per channel of [B, T, C]
//     experts          rows           columns            1          columns of [E, N, K]
//        1            images          channels         pixels       channels of NCHW
//
// A row is a run of neighbours in memory, along the inner axis. That axis is the inner reduced one, so that a row
// belongs to one group (by rows), or where this has size 1 the inner group axis, so that a row has an element of each
// of its groups (by columns):
//
//   by rows                                            by columns
//                                                           scale[0] scale[1] ...
//     a a a a a a a a a a a a     scale[0], group a           a b c d   e f g h     outer reduced 0
//     b b b b b b b b b b b b     scale[1], group b           a b c d   e f g h     outer reduced 1
//     |segment|segment|                                       a b c d   e f g h     outer reduced 2
//                                                            | band  | | band  |
//
//   segment   a part of a row that is handled at once
//   band      neighbouring groups that are handled together, with all of their rows: by columns some of a row's groups,
//             by rows one group or some short ones
//   piece     a part of the rows of a band (by rows, of the elements of a long group), where there are fewer bands than
//             threads or thread blocks
//
// Strides count elements. `x` may have gaps or repeat its rows, but along the inner axis its elements are neighbours;
// other tensors are copied first. `out` is dense; the index that numbers the random bits of an element is its place in
// `out`, which is row-major then. A last block that is shorter than the others is cut off by `length`.
struct Int8Layout {
  enum Axis { kOuterGroup, kOuterReduced, kInnerGroup, kInnerReduced, kAxes };
  int64_t size[kAxes];
  int64_t x[kAxes];    // strides of the floating-point tensor that is read
  int64_t out[kAxes];  // strides of the codes, and of floating-point results
  int64_t scale[2];    // strides of scale and zero_point over the two group axes
  int64_t length;      // an element exists iff inner group * size[kInnerReduced] + inner reduced < length

  AMP_KERNELS_HD int64_t groups() const { return size[kOuterGroup] * size[kInnerGroup]; }

  AMP_KERNELS_HD int64_t elements() const { return size[kOuterGroup] * size[kOuterReduced] * length; }

  AMP_KERNELS_HD bool is_by_columns() const { return size[kInnerReduced] == 1 && size[kInnerGroup] > 1; }

  AMP_KERNELS_HD Axis inner() const { return is_by_columns() ? kInnerGroup : kInnerReduced; }
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
  const int8_t* values;  // laid out by layout.out, like `out`; layout.x is not read
  const float* scale;
  const int32_t* zero_point;
  void* out;
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
