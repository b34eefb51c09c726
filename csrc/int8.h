// The arguments of the int8 kernels, filled from tensors by csrc/ops/int8.cpp.
#pragma once

#include "table.h"

namespace amp_kernels {

// How a tensor is cut into groups. The elements of a group share one scale and one zero point.
//
// The kernels (CPU, CUDA, Triton) see dense memory with three axes, [outer][reduced][inner]. An axis that is not needed
// has size 1. An element has the same offset in x, in the codes and in the results. Group g = o * inner + i consists of
// the elements at offsets (o * reduced + r) * inner + i, for all r. Scales and zero points are in the order of the
// groups.
//
//   outer     reduced      inner
//     1       all           1         the whole tensor
//   rows      columns       1         rows of a matrix; output channels of a channels_last weight
//   blocks    block size    1         blocks of the last dimension
//     1       rows         columns    columns of a matrix; channels of [B, T, C] and of channels_last images
//   experts   N            K          columns of [E, N, K]
//
// A kernel walks over the elements in one of two ways, both in the order of memory:
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
//   band      neighbouring groups that are computed together. By columns, a band is some columns with all of their
//             rows. By rows, a band is one group, or several short groups
//   piece     a part of a band. If there are fewer bands than threads or thread blocks, bands are divided into pieces
//   segment   neighbours in memory that are read together
//
// If the length of a row of the tensor is not a multiple of the block size, the last block of each row is shorter, and
// the next row follows it immediately. Only in this case `row` is the length of a row of the tensor. In all other cases
// `row` is the number of all elements.
struct Int8Layout {
  int64_t outer, reduced, inner;
  int64_t row;

  AMP_KERNELS_HD bool is_by_columns() const { return inner > 1; }
  AMP_KERNELS_HD int64_t groups() const { return outer * inner; }

  // The number of groups in `row` elements. It has a meaning only if kernels walk by rows.
  AMP_KERNELS_HD int64_t groups_of_row() const { return (row + reduced - 1) / reduced; }

  AMP_KERNELS_HD int64_t elements() const {
    return is_by_columns() ? outer * reduced * inner : outer / groups_of_row() * row;
  }
};

struct Quantize {
  const void* x;
  void* out;            // int8 codes. If `fake` is true: numbers in x's dtype
  float* scale;         // read if `is_static`, else written
  int32_t* zero_point;  // read if `is_static`, else written; nullptr for symmetric codes
  Int8Layout layout;
  Dtype dtype;  // of x
  bool fake;    // writes dequantize(quantize(x)), not codes
  bool is_static;
  bool stochastic;  // rounds at random, with numbers from `seed`. If false: rounds to nearest even
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

// The gradient of fake quantization. It is `grad` where the code of x needs no clamping, else 0.
struct StraightThrough {
  const void* grad;
  const void* x;
  const float* scale;
  const int32_t* zero_point;
  void* out;
  Int8Layout layout;
  Dtype dtype;  // of grad, x and out
};

// The CUDA kernels for the products below read their operands in chunks of 16 bytes. Here a row is the elements
// that a product sums for one m (in a or x) or for one n (in b or the weight): there are k of them. The elements of a
// row must be contiguous, and each row must begin at a multiple of 16 bytes. If k is not a multiple of 16, zeros must
// fill up each row to a multiple of 16 elements.

// out[m, n] = (sum over k of (a[m, k] - za[m]) * (b[k, n] - zb[n])) * (sa[m] * sb[n]) + bias[n]. The sum is exact.
struct Int8Matmul {
  int64_t m, n, k;
  const int8_t* a;
  int64_t a_strides[2];  // over m and k
  const int8_t* b;
  int64_t b_strides[2];  // over k and n
  const float* a_scale;  // one element if a_step is 0; one for each row if it is 1
  const int32_t* a_zero_point;
  int64_t a_step;
  const float* b_scale;  // one element if b_step is 0; one for each column if it is 1
  const int32_t* b_zero_point;
  int64_t b_step;
  const void* bias;  // fp32 [n] or nullptr
  void* out;         // [m, n], contiguous
  Dtype dtype;       // of out; not used if out_scale is given, because out then holds int8 codes
  const float* out_scale;
  const int32_t* out_zero_point;
};

// The image, the kernel and the steps of a convolution. Arrays hold a number for the height and one for the width.
struct Window {
  int64_t size[2], channels;  // of the image
  int64_t out[2];             // pixels of the output
  int64_t taps[2];            // pixels of the kernel
  int64_t stride[2], padding[2], dilation[2];

  AMP_KERNELS_HD int64_t out_pixels() const { return out[0] * out[1]; }

  // The pixel along dimension `d` that the first tap reads for output pixel `at`. It may lie in the padding.
  AMP_KERNELS_HD int64_t first(int d, int64_t at) const { return at * stride[d] - padding[d]; }
};

// A convolution is a product with a left operand that is not in memory. The kernels gather its rows from the images
// x, [batch, height, width, channels]. A row belongs to an output pixel, and holds the codes under the kernel:
//
//   row m:  [tap 0,0: channels][tap 0,1: channels] ... [tap 1,0: channels] ...      k = taps * channels
//
// In `rows`, m is the number of output pixels of all images, and `a` points to the images. a_strides[0] is the distance
// from one pixel to the next, in elements. The code of padding is the row's zero point, clamped to int8.
struct Int8Conv2d {
  Int8Matmul rows;
  Window window;
};

// out[m, n] = (sum over k of x[m, k] * weight[n, k]) * scale[n] + bias[n], accumulated in fp32.
struct Int8Linear {
  int64_t m, n, k;
  const void* x;         // [m, k], rows x_stride apart
  int64_t x_stride;      // in elements
  const int8_t* weight;  // [n, k], rows weight_stride apart
  int64_t weight_stride;
  const float* scale;  // one element if scale_step is 0; one for each output if it is 1
  int64_t scale_step;
  const void* bias;  // [n] of `dtype`, or nullptr
  void* out;         // [m, n], contiguous
  Dtype dtype;       // of x, bias and out
};

}  // namespace amp_kernels
