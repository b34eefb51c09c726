// The gradient pass on a CPU: check, norm and unscaling.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "../formulas/unscale.h"
#include "convert.h"

namespace amp_kernels::cpu {

// Eight fp32 lanes, which g++ and clang map to AVX2 or a pair of NEON registers. A plain array of 32 sums stays in
// memory in g++ 12, and the pass is then bound by store forwarding at 3 cycles an element.
using Lanes = float __attribute__((vector_size(32)));
constexpr int kLanes = 8;
constexpr int kSums = 4;          // in flight
constexpr int64_t kBlock = 1024;  // 32 squares a lane: at most 1e-6 of rounding even when it is one-sided
constexpr int64_t kAhead = 1024;  // elements

template <class G>
double block_sum_of_squares(const G* x, int64_t n) {
  constexpr int64_t kStep = kSums * kLanes;
  Lanes lane[kSums] = {};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    prefetch(x + i + kAhead, kStep);
    float staged[kStep];
    const float* step = as_float(x + i, staged, kStep);
#pragma GCC unroll 4
    for (int k = 0; k < kSums; ++k) {
      Lanes v;
      std::memcpy(&v, step + k * kLanes, sizeof(v));
      lane[k] += v * v;
    }
  }
  double sum = 0.0;
  for (int k = 0; k < kSums; ++k)
    for (int l = 0; l < kLanes; ++l) sum += lane[k][l];
  for (; i < n; ++i) sum += static_cast<double>(static_cast<float>(x[i])) * static_cast<float>(x[i]);
  return sum;
}

template <class G>
double exact_sum_of_squares(const G* grad, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = static_cast<float>(grad[i]);
    sum += x * x;
  }
  return sum;
}

template <class G>
double sum_of_squares(const G* grad, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; i += kBlock) sum += block_sum_of_squares(grad + i, std::min(kBlock, n - i));
  return fast_sum_is_exact(sum) ? sum : exact_sum_of_squares(grad, n);
}

template <class G>
void multiply(G* grad, float factor, int64_t n) {
  float x[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t m = std::min(kBlock, n - i);
    load(grad + i, x, m);
    for (int64_t j = 0; j < m; ++j) x[j] *= factor;
    store(x, grad + i, m);
  }
}

inline void unscale_chunk(const GradientPass& pass, float factor, int64_t index) {
  const Chunk chunk(pass.table, index);
  if (index + kChunksAhead < pass.table.chunk_count)
    prefetch_head<BFloat16>(pass.table, Chunk(pass.table, index + kChunksAhead), kGrad);
  const Dtype dtype = static_cast<Dtype>(pass.table.at(kGradDtype, chunk.tensor));
  pass.partials[index] = with_dtype(dtype, [&](auto tag) {
    auto* grad = chunk.in<decltype(tag)>(pass.table, kGrad);
    if (grad == nullptr) return 0.0;
    const double sum = sum_of_squares(grad, chunk.size);
    if (pass.write) multiply(grad, factor, chunk.size);
    return sum;
  });
}

// Folds the partial sums in the order of the chunks, whatever thread made them.
inline void finish_pass(const GradientPass& pass, float factor) {
  double sum = 0.0;
  int64_t first_bad = std::numeric_limits<int64_t>::max();
  for (int64_t c = 0; c < pass.table.chunk_count; ++c) {
    sum += pass.partials[c];
    if (!std::isfinite(pass.partials[c])) first_bad = std::min<int64_t>(first_bad, pass.table.chunks[2 * c]);
  }
  const bool bad = !std::isfinite(sum);
  *pass.norm = static_cast<float>(std::sqrt(sum) * factor);
  if (bad || pass.clear) *pass.found_inf = bad ? 1.0f : 0.0f;
  if (!pass.clear) return;
  ++pass.record->passes;
  if (!bad) return;
  pass.record->overflow_pass = pass.record->passes;
  pass.record->overflow_tensor = first_bad;
}

}  // namespace amp_kernels::cpu
