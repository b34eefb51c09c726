// How sums become results, and the declarations that matmul.cu and matmul_few_rows.cu share.
#pragma once

#include <algorithm>

#include "../formulas/activation.h"
#include "grid.cuh"

namespace amp_kernels::cuda {

// Returns the number of blocks among which the k of a tile is divided. The caller passes the number that it would
// like as `wanted`: above 1 if there are too few tiles for all multiprocessors. If k is divided, a block gets at least
// 512 of k on average, so that it reads more bytes of operands than it writes of sums. Each block then stores its own
// sums, and launch_fold adds the sums of all splits in order. The sums are stored as [splits, batch, m, n].
inline int64_t splits_of(const Matmul& matmul, int64_t wanted) {
  return std::max<int64_t>(1, std::min<int64_t>(wanted, matmul.k / 512));
}

inline int64_t bytes_of_partials(const Matmul& matmul, int64_t splits) {
  return splits == 1 ? 0 : splits * matmul.batch * matmul.m * matmul.n * static_cast<int64_t>(sizeof(float));
}

void launch_fold(const Matmul& matmul, int64_t splits, const float* partials, Stream stream);

constexpr int kFewRows = 16;  // up to this many rows of a, the time of a product is the time to read b

// How few_rows_kernel computes a product.
struct FewRows {
  bool possible;   // m is at most kFewRows, and the columns or the rows of b are dense
  bool along_k;    // the columns of b are dense
  int64_t splits;  // among how many blocks k is divided

  explicit FewRows(const Matmul& matmul);
};
void launch_few_rows(const Matmul& matmul, const FewRows& how, float* partials, Stream stream);

// Whether a tensor of 16-bit elements can be loaded 16 bytes at a time along a dimension of `size` elements. `inner` is
// the stride of this dimension, and `outer` are the other strides, all in elements.
inline bool is_wide(const void* first, int64_t size, int64_t inner, std::initializer_list<int64_t> outer) {
  bool wide = is_aligned16(first) && (size <= 1 || inner == 1);
  for (int64_t stride : outer) wide = wide && stride % 8 == 0;
  return wide;
}

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_row(const T* p, int64_t stride, int count) {
  if constexpr (N > 1) {
    if (count == N && stride == 1 && is_aligned16(p)) return load_wide<N>(p).unpacked();
  }
  return load_each<N>(p, stride, count);
}

template <int kApart, int N, class T>
__device__ __forceinline__ void store_rounded(T* p, const float (&y)[N], int count) {
  Vector<T, N> rounded;
#pragma unroll
  for (int i = 0; i < N; ++i) rounded.data[i] = from_float<T>(y[i]);
  if (kApart == 1 && count == N) {
    store_wide(p, rounded);
  } else {
    store_each(p, rounded, kApart, count);
  }
}

template <int kApart, int N>
__device__ __forceinline__ void store_rounded(void* out, Dtype dtype, int64_t at, const float (&y)[N], int count) {
  switch (dtype) {
    case kHalf:
      return store_rounded<kApart>(static_cast<__half*>(out) + at, y, count);
    case kBFloat16:
      return store_rounded<kApart>(static_cast<__nv_bfloat16*>(out) + at, y, count);
    default:
      return store_rounded<kApart>(static_cast<float*>(out) + at, y, count);
  }
}

template <Activation kActivation, int N>
__device__ __forceinline__ void activate_all(float (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = activate<kActivation>(y[i]);
}

// Computes N results from N sums, and stores them in row m, in the columns n, n + kApart, n + 2 kApart ... Columns that
// do not exist are left out. If N > 1, kApart == 1 and all N columns exist, the results are stored 16 bytes at a time.
// Element [m, n] of `out` and of `pre` must then lie at an address that is a multiple of 16.
template <class T, int N, int kApart = 1>
__device__ __forceinline__ void finish(const Matmul& matmul, int64_t batch, int64_t m, int64_t n,
                                       const float (&sums)[N]) {
  if (m >= matmul.m || n >= matmul.n) return;
  const int64_t left = (matmul.n - n + kApart - 1) / kApart;
  const int count = left < N ? static_cast<int>(left) : N;
  float y[N];
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = matmul.alpha * sums[i];
  if (matmul.input != nullptr) {
    const int64_t (&strides)[3] = matmul.input_strides;
    const T* const p = static_cast<const T*>(matmul.input) + batch * strides[0] + m * strides[1] + n * strides[2];
    const Vector<T, N> input = load_row<N>(p, kApart * strides[2], count);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] += matmul.beta * to_float(input.data[i]);
  }
  const int64_t at = batch * matmul.out_strides[0] + m * matmul.out_strides[1] + n;
  if (matmul.pre != nullptr) store_rounded<kApart>(matmul.pre, matmul.out_dtype, at, y, count);
  switch (matmul.activation) {
    case kRelu:
      activate_all<kRelu>(y);
      break;
    case kGelu:
      activate_all<kGelu>(y);
      break;
    case kGeluTanh:
      activate_all<kGeluTanh>(y);
      break;
    default:
      break;
  }
  store_rounded<kApart>(matmul.out, matmul.out_dtype, at, y, count);
}

}  // namespace amp_kernels::cuda
