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
using Wide = double __attribute__((vector_size(64)));
constexpr int kLanes = 8;
constexpr int kSums = 4;          // in flight
constexpr int64_t kBlock = 1024;
constexpr int64_t kStep = kSums * kLanes;
constexpr int64_t kAhead = 1024;  // elements

// The squares of a block in Sum: Lanes, or Wide where fp32 is not enough. `each` sees every step of the block.
template <class Sum, class G, class Each>
double sum_of_squares(const G* x, const Each& each) {
  Sum lane[kSums] = {};
  for (int64_t i = 0; i < kBlock; i += kStep) {
    float staged[kStep];
    const float* step = as_float(x + i, staged, kStep);
#pragma GCC unroll 4
    for (int k = 0; k < kSums; ++k) {
      Lanes v;
      std::memcpy(&v, step + k * kLanes, sizeof(v));
      const Sum wide = __builtin_convertvector(v, Sum);
      lane[k] += wide * wide;
    }
    each(i, step);
  }
  const Wide all = __builtin_convertvector(lane[0] + lane[1] + (lane[2] + lane[3]), Wide);
  double sum = 0.0;
  for (int l = 0; l < kLanes; ++l) sum += all[l];
  return sum;
}

// Of a block that the fast sum fails for. Apart: inlined, its registers would spill those of the fast sum.
template <class G>
[[gnu::noinline]] double exact_sum_of_squares(const G* x) {
  return sum_of_squares<Wide>(x, [](int64_t, const float*) {});
}

template <class G>
double checked_sum(const G* grad, bool ahead) {
  const double sum = sum_of_squares<Lanes>(grad, [&](int64_t i, const float*) {
    if (ahead) prefetch(grad + i + kAhead, kStep);
  });
  return fast_sum_is_exact(sum) ? sum : exact_sum_of_squares(grad);
}

// The same, and the block times the factor.
template <class G>
double checked_and_unscaled_sum(G* grad, float factor, bool ahead) {
  float kept[kBlock];
  const double sum = sum_of_squares<Lanes>(grad, [&](int64_t i, const float* step) {
    if (ahead) prefetch(grad + i + kAhead, kStep);
    float scaled[kStep];
    for (int64_t k = 0; k < kStep; ++k) {
      kept[i + k] = step[k];
      scaled[k] = step[k] * factor;
    }
    store(scaled, grad + i, kStep);
  });
  return fast_sum_is_exact(sum) ? sum : exact_sum_of_squares(kept);
}

template <class G>
double pass_over(G* grad, float factor, bool write, int64_t n) {
  const bool ahead = asks_ahead();
  double sum = 0.0;
  int64_t i = 0;
  if (write)
    for (; i + kBlock <= n; i += kBlock) sum += checked_and_unscaled_sum(grad + i, factor, ahead);
  else
    for (; i + kBlock <= n; i += kBlock) sum += checked_sum(grad + i, ahead);
  for (; i < n; ++i) {
    const float x = static_cast<float>(grad[i]);
    sum += static_cast<double>(x) * x;
    if (write) grad[i] = static_cast<G>(x * factor);
  }
  return sum;
}

inline void unscale_chunk(const GradientPass& pass, float factor, int64_t index) {
  const Chunk chunk(pass.table, index);
  if (index + kChunksAhead < pass.table.chunk_count)
    prefetch_head<BFloat16>(pass.table, Chunk(pass.table, index + kChunksAhead), kGrad);
  const Dtype dtype = static_cast<Dtype>(pass.table.at(kGradDtype, chunk.tensor));
  pass.partials[index] = with_dtype(dtype, [&](auto tag) {
    auto* grad = chunk.in<decltype(tag)>(pass.table, kGrad);
    if (grad == nullptr) return 0.0;
    return pass_over(grad, factor, pass.write, chunk.size);
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
