// The gradient pass on a CPU. It computes norm = sqrt(sum of g^2) * factor, and sets found_inf to 1 if any g is NaN or
// inf. With `write` it also computes g <- g * factor. It reads 4 bytes per element (fp32) or 2 (fp16, bf16). With
// `write` it also writes as many bytes. A thread takes a chunk in blocks of 1024 elements:
//
//   block:  | 8 lanes of sum 0 | sum 1 | sum 2 | sum 3 | sum 0 | ...     in fp32; and again in fp64, if the fp32 sum
//                                                                        may be inexact (fast_sum_is_exact)
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "../formulas/unscale.h"
#include "convert.h"

namespace amp_kernels::cpu {

// Eight lanes of fp64, in two halves. In one vector of 64 bytes GCC 12 keeps them in memory, and the gradient pass over
// 64 elements takes 78 ns instead of 52.
struct Wide {
  using Half = double __attribute__((vector_size(4 * kLanes)));
  Half low, high;
};
constexpr int kSums = 4;  // independent sums, whose additions do not wait for each other
constexpr int64_t kStride = kSums * kLanes;
// Elements of a block. Each lane of each sum adds 32 squares. With so few additions, the relative error of the norm is
// at most 1e-6, even if all roundings go one way.
constexpr int64_t kUnscaleBlock = 1024;

[[gnu::always_inline]] inline void add_squares(const Lanes& v, Lanes* sums) { *sums += v * v; }

[[gnu::always_inline]] inline Wide widened(const Lanes& v) {
  float __attribute__((vector_size(2 * kLanes))) halves[2];
  std::memcpy(halves, &v, sizeof(v));
  return {__builtin_convertvector(halves[0], Wide::Half), __builtin_convertvector(halves[1], Wide::Half)};
}

[[gnu::always_inline]] inline void add_squares(const Lanes& v, Wide* sums) {
  const Wide wide = widened(v);
  sums->low += wide.low * wide.low, sums->high += wide.high * wide.high;
}

// Adds the lanes of all sums, first those with the same number.
[[gnu::always_inline]] inline double total_of(const Wide (&sums)[kSums]) {
  Wide all = {};
  for (const Wide& sum : sums) all.low += sum.low, all.high += sum.high;
  double total = 0.0;
  for (int l = 0; l < kLanes / 2; ++l) total += all.low[l];
  for (int l = 0; l < kLanes / 2; ++l) total += all.high[l];
  return total;
}

[[gnu::always_inline]] inline double total_of(const Lanes (&sums)[kSums]) {
  Wide wide[kSums];
  for (int k = 0; k < kSums; ++k) wide[k] = widened(sums[k]);
  return total_of(wide);
}

// Returns the sum of squares of n elements. n must be a multiple of kStride. Sum is Lanes (fp32), or Wide (fp64) where
// fp32 is not enough. load(x + i, k) returns the k-th eight of kStride elements from x[i] on, as fp32, in any order
// that it likes. For every eight elements, calls each(i, k, v), where v are the elements that were loaded. i is a
// multiple of kStride, and k is a constant to the compiler.
template <class Sum, class G, class Load, class Each>
[[gnu::always_inline]] inline double inlined_sum_of_squares(const G* x, int64_t n, const Load& load, const Each& each) {
  Sum sums[kSums];
#pragma GCC unroll 4
  for (int k = 0; k < kSums; ++k) sums[k] = Sum{};  // GCC 12 would zero an array with `rep stos`, which takes 10 ns
  for (int64_t i = 0; i < n; i += kStride) {
#pragma GCC unroll 4
    for (int k = 0; k < kSums; ++k) {
      const Lanes v = load(x + i, k);
      add_squares(v, &sums[k]);
      each(i, k, v);
    }
  }
  return total_of(sums);
}

// As above, in the order of memory. For every eight elements, calls each(i, v), where v are the elements x[i] to
// x[i + 7] as fp32.
template <class Sum, class G, class Each>
double sum_of_squares(const G* x, int64_t n, const Each& each) {
  return inlined_sum_of_squares<Sum>(
      x, n, [](const G* from, int k) __attribute__((always_inline)) { return load_lanes(from + k * kLanes); },
      [&](int64_t i, int k, const Lanes& v) __attribute__((always_inline)) { each(i + k * kLanes, v); });
}

// Returns the sum of squares of a block, in fp64. This function is not inlined. If it were, the fast sum would have to
// spill registers for it.
template <class G>
[[gnu::noinline]] double exact_sum_of_squares(const G* x) {
  return sum_of_squares<Wide>(x, kUnscaleBlock, [](int64_t, const Lanes&) {});
}

// Returns the sum of squares of a block. With `ahead`, also prefetches the next block.
template <class G>
double checked_sum(const G* grad, bool ahead) {
  if (ahead) prefetch(grad + kUnscaleBlock, kUnscaleBlock);
  const double sum = sum_of_squares<Lanes>(grad, kUnscaleBlock, [](int64_t, const Lanes&) {});
  return fast_sum_is_exact(sum) ? sum : exact_sum_of_squares(grad);
}

// Multiplies the elements of a block by the factor. Returns the sum of their squares from before the multiplication.
template <class G>
double checked_and_unscaled_sum(G* grad, float factor, bool ahead) {
  float kept[kUnscaleBlock];
  if (ahead) prefetch(grad + kUnscaleBlock, kUnscaleBlock);
  const double sum =
      sum_of_squares<Lanes>(grad, kUnscaleBlock, [&](int64_t i, const Lanes& v) __attribute__((always_inline)) {
        std::memcpy(kept + i, &v, sizeof(v));
        store_lanes(v * factor, grad + i);
      });
  return fast_sum_is_exact(sum) ? sum : exact_sum_of_squares(kept);
}

// Returns the sum of squares of less than a block, in fp64. With kWrite, also multiplies the elements by the factor.
template <bool kWrite, class G>
double rest_of_sum(G* grad, float factor, int64_t n) {
  const int64_t whole = n - n % kStride;
  double sum = sum_of_squares<Wide>(grad, whole, [&](int64_t i, const Lanes& v) __attribute__((always_inline)) {
    if constexpr (kWrite) store_lanes(v * factor, grad + i);
  });
  for (int64_t i = whole; i < n; ++i) {
    const float x = static_cast<float>(grad[i]);
    sum += static_cast<double>(x) * x;
    if constexpr (kWrite) grad[i] = static_cast<G>(x * factor);
  }
  return sum;
}

template <bool kWrite, class G>
double pass_over(G* grad, float factor, int64_t n) {
  const bool ahead = asks_ahead();
  double sum = 0.0;
  int64_t i = 0;
  for (; i + kUnscaleBlock <= n; i += kUnscaleBlock) {
    if constexpr (kWrite) {
      sum += checked_and_unscaled_sum(grad + i, factor, ahead);
    } else {
      sum += checked_sum(grad + i, ahead);
    }
  }
  return sum + rest_of_sum<kWrite>(grad + i, factor, n - i);
}

inline void unscale_chunk(const GradientPass& pass, float factor, int64_t index) {
  const Chunk chunk(pass.table, index);
  if (index + kChunksAhead < pass.table.chunk_count)
    prefetch_head<BFloat16>(pass.table, Chunk(pass.table, index + kChunksAhead), kGrad);
  const Dtype dtype = static_cast<Dtype>(pass.table.at(kGradDtype, chunk.tensor));
  const double sum = with_dtype(dtype, [&](auto tag) {
    auto* grad = chunk.in<decltype(tag)>(pass.table, kGrad);
    if (grad == nullptr) return 0.0;
    return pass.write ? pass_over<true>(grad, factor, chunk.size) : pass_over<false>(grad, factor, chunk.size);
  });
  pass.partials[index] = counted(sum, pass.table, chunk.tensor);
}

// Writes norm, found_inf and record. The partial sums are added in the order of the chunks, no matter which threads
// computed them.
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
