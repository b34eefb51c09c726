// Sums of squares of elements, for the kernels that read gradients.
#pragma once

#include "../formulas/unscale.h"
#include "portable.h"

namespace amp_kernels::cuda {

// Returns the sum of squares of a pack, which takes four or eight additions in fp32. Even if all of them round in the
// same direction, the relative error of the norm stays below 1e-6. Callers add the sums of packs in fp64. On consumer
// GPUs fp64 runs at 1/64 of the fp32 rate. But even on these GPUs, one fp64 addition for each 16 bytes takes less time
// than loading the 16 bytes.
template <class T, int N>
__device__ __forceinline__ double sum_of_squares(const Vector<float, N>& x) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) sum += x.data[k] * x.data[k];
  // If the fp32 sum may have overflowed or lost small squares, the elements are scaled and summed again. fp16 never
  // needs this, because the squares of its finite numbers, except 0, are between 3e-15 and 5e9.
  if (std::is_same_v<T, __half> || fast_sum_is_exact(sum)) return sum;
  const float scale = rescue_scale(sum);
  sum = 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float element = x.data[k] * scale;
    sum += element * element;
  }
  return sum == 0.0f ? 0.0 : sum * (scale > 1.0f ? 0x1p-200 : 0x1p140);  // 1 / scale^2
}

template <class T>
__device__ __forceinline__ double square(T x) {
  const double wide = to_float(x);
  return wide * wide;
}

}  // namespace amp_kernels::cuda
