// Counts of exponents on a CPU (ExponentPass in ../table.h). It reads 4 bytes per element (fp32) or 2 (fp16, bf16). A
// thread takes a chunk in blocks of 4096 elements, which stay in the L1:
//
//   1. x -> fp32:   the sum of squares (unscale.h), the largest magnitude, and the exponents as 4096 bytes
//   2. the bytes:   | 12 exponents: 0 and the 11 largest | the next 12 | ... |    each in one pass over the bytes
//
// A pass compares 32 bytes at a time with each of 12 exponents. On one core of an EPYC (Zen 5) it takes 0.05 ns per
// element. Numbers of a normal distribution take one pass. Counting the bytes one by one (++counts[byte]) takes 0.24 ns
// per element, because a core makes one such increment per cycle. All of it takes 0.15 to 0.19 ns per element and core.
// The gradient pass takes 0.06 (fp16, bf16) or 0.15 ns (fp32).
//
// Zeros and subnormal fp32 numbers have the same exponent. If a block of fp32 or bf16 has any of them, its zeros are
// counted in another pass over its elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "unscale.h"

namespace amp_kernels::cpu {

// What a worker has counted in neighbouring chunks of one tensor.
struct ExponentRow {
  int64_t tensor = -1;  // -1: none
  int64_t counts[kExponentColumns];
  int32_t largest;  // the bits of the largest finite magnitude

  // Adds the counts to the results. Other workers may do the same for the same tensor. The results are integers (the
  // bits of magnitudes are in the order of the magnitudes), so they do not depend on the order of the workers.
  void add_to(const ExponentPass& pass) const {
    if (tensor < 0) return;
    for (int column = 0; column < kExponentColumns; ++column)
      if (counts[column] != 0)
        __atomic_fetch_add(pass.counts + tensor * kExponentColumns + column, counts[column], __ATOMIC_RELAXED);
    auto* const there = reinterpret_cast<int32_t*>(pass.largest + tensor);
    int32_t known = __atomic_load_n(there, __ATOMIC_RELAXED);
    while (known < largest &&
           !__atomic_compare_exchange_n(there, &known, largest, /*weak=*/true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

  void begin(int64_t of) {
    tensor = of;
    std::fill_n(counts, kExponentColumns, 0);
    largest = 0;
  }
};

using ByteLanes = uint8_t __attribute__((vector_size(32)));
using ShortLanes = int16_t __attribute__((vector_size(32)));
constexpr int64_t kByteLanes = sizeof(ByteLanes);
static_assert(kByteLanes == kStride);

// Returns the k-th eight of 32 elements as fp32. The elements are in any order.
template <class T>
[[gnu::always_inline]] inline Lanes load_unordered(const T* from, int k) {
  return load_lanes(from + k * kLanes);
}

// Takes the even or the odd ones of 16 elements, which is one instruction. Eight neighbours take two, and these run on
// only two of the four vector units of a Zen 5.
template <>
[[gnu::always_inline]] inline Lanes load_unordered(const BFloat16* from, int k) {
  Words pairs;
  std::memcpy(&pairs, from + k / 2 * (2 * kLanes), sizeof(pairs));
  return as<Lanes>(k % 2 == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

// Converts 32 integers from 0 to 255 to bytes. The bytes are in another order than the integers.
[[gnu::always_inline]] inline ByteLanes as_bytes(const Integers (&from)[kSums]) {
#if defined(__AVX2__)
  const __m256i low = _mm256_packus_epi32(as<__m256i>(from[0]), as<__m256i>(from[1]));
  const __m256i high = _mm256_packus_epi32(as<__m256i>(from[2]), as<__m256i>(from[3]));
  return as<ByteLanes>(_mm256_packus_epi16(low, high));
#else
  using Eight = uint8_t __attribute__((vector_size(kLanes)));
  Eight parts[kSums];
  for (int k = 0; k < kSums; ++k) parts[k] = __builtin_convertvector(from[k], Eight);
  return as<ByteLanes>(parts);
#endif
}

[[gnu::always_inline]] inline uint32_t sum_of(const ByteLanes& bytes) {
  uint32_t sum = 0;
#if defined(__AVX2__)
  using Sums = uint64_t __attribute__((vector_size(sizeof(ByteLanes))));
  const Sums sums = as<Sums>(_mm256_sad_epu8(as<__m256i>(bytes), __m256i{}));  // each of 8 bytes
  for (int l = 0; l < 4; ++l) sum += sums[l];
#else
  for (int l = 0; l < kByteLanes; ++l) sum += bytes[l];
#endif
  return sum;
}

// Returns a bit for each byte. A byte is 0xff or 0.
[[gnu::always_inline]] inline uint32_t mask_of(const ByteLanes& bytes) {
#if defined(__AVX2__)
  return _mm256_movemask_epi8(as<__m256i>(bytes));
#else
  uint32_t mask = 0;
  for (int l = 0; l < kByteLanes; ++l) mask |= static_cast<uint32_t>(bytes[l] & 1) << l;
  return mask;
#endif
}

// Counts the exponents of a chunk.
class ExponentCounter {
 public:
  // Counts n elements. Returns the sum of their squares.
  template <class T>
  double take(const T* x, int64_t n) {
    double sum = 0.0;
    int64_t i = 0;
    while (i + kStride <= n) {
      const int64_t size = std::min(kBlock, (n - i) / kStride * kStride);
      sum += take_block(x + i, size);
      i += size;
    }
    for (; i < n; ++i) sum += take_one(static_cast<float>(x[i]));
    return sum;
  }

  // Adds the counts to a row, and raises its largest magnitude.
  void add_to(ExponentRow& row) const {
    row.largest = std::max(row.largest, largest_);
    for (int e = 0; e < kExponents; ++e) row.counts[e] += histogram_[e];
    row.counts[0] -= zeros_;
    row.counts[kExponents] += zeros_;
  }

 private:
  static constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;  // all bits but the sign; the bits of inf
  static constexpr int64_t kBlock = 4 * kUnscaleBlock;  // count_equal() counts at most 255 * 32 bytes
  static constexpr int kTogether = 12, kPasses = 4;
  static constexpr uint8_t kNone = 255;  // an exponent that finite numbers do not have

  // n must be a multiple of kStride, and at most kBlock.
  template <class T>
  double take_block(const T* x, int64_t n) {
    alignas(ByteLanes) uint8_t exponents[kBlock];
    Integers magnitudes = {};
    const bool ahead = asks_ahead();
    double sum = 0.0;
    int64_t i = 0;
    for (; i + kUnscaleBlock <= n; i += kUnscaleBlock) {
      if (ahead) prefetch(x + i + kUnscaleBlock, kUnscaleBlock);
      const double fast = read<Lanes>(x + i, kUnscaleBlock, exponents + i, magnitudes);
      sum += fast_sum_is_exact(fast) ? fast : exact_sum_of_squares(x + i);
    }
    sum += read<Wide>(x + i, n - i, exponents + i, magnitudes);

    const uint32_t before = histogram_[0];
    if (const int32_t largest = max_lane(magnitudes); largest < kInfinity) {
      largest_ = std::max(largest_, largest);
      count<sizeof(T)>(exponents, n, largest >> 23, reinterpret_cast<const char*>(x + n));
    } else {
      largest_ = std::max(largest_, largest_finite(x, n));
      count_one_by_one(exponents, n);
    }
    if (const uint32_t zeros = histogram_[0] - before; zeros > 0) zeros_ += zeros_of(x, n, zeros);
    return sum;
  }

  double take_one(float x) {
    const int32_t bits = as<int32_t>(x) & kMagnitude;
    ++histogram_[bits >> 23];
    zeros_ += bits == 0;
    if (bits < kInfinity) largest_ = std::max(largest_, bits);
    return static_cast<double>(x) * x;
  }

  // Returns the sum of squares of n elements, writes their exponents, and raises the bits of the largest magnitudes.
  template <class Sum, class T>
  [[gnu::noinline]] static double read(const T* x, int64_t n, uint8_t* exponents, Integers& magnitudes) {
    Integers four[kSums], largest = magnitudes;  // a copy, which stays in a register
    const auto load = [](const T* from, int k) __attribute__((always_inline)) { return load_unordered(from, k); };
    const auto each = [&](int64_t i, int k, const Lanes& v) __attribute__((always_inline)) {
      const Integers bits = as<Integers>(v) & kMagnitude;
      largest = bits > largest ? bits : largest;
      four[k] = bits >> 23;
      if (k + 1 < kSums) return;
      const ByteLanes bytes = as_bytes(four);
      std::memcpy(exponents + i, &bytes, sizeof(bytes));
    };
    const double sum = inlined_sum_of_squares<Sum>(x, n, load, each);
    magnitudes = largest;
    return sum;
  }

  static int32_t max_lane(const Integers& lanes) {
    int32_t max = 0;
    for (int l = 0; l < kLanes; ++l) max = std::max(max, lanes[l]);
    return max;
  }

  // Returns the bits of the largest finite magnitude of n elements.
  template <class T>
  [[gnu::noinline]] static int32_t largest_finite(const T* x, int64_t n) {
    Integers largest = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      const Integers bits = as<Integers>(load_lanes(x + i)) & kMagnitude;
      largest = ((bits < kInfinity) & (bits > largest)) ? bits : largest;
    }
    return max_lane(largest);
  }

  // Returns how many of n elements are 0, if `zeros` of them have the exponent 0. For fp16 these are all of them,
  // because its subnormal numbers are normal fp32 numbers.
  static int64_t zeros_of(const Half*, int64_t, int64_t zeros) { return zeros; }

  template <class T>
  [[gnu::noinline]] static int64_t zeros_of(const T* x, int64_t n, int64_t) {
    using Bits = std::conditional_t<sizeof(T) == 4, Integers, ShortLanes>;
    constexpr int64_t kWords = sizeof(Bits) / sizeof(T);
    Bits zeros[2] = {};  // independent, so that one addition does not wait for the other
    for (int64_t i = 0; i < n; i += 2 * kWords)
      for (int k = 0; k < 2; ++k) {
        Bits bits;
        std::memcpy(&bits, x + i + k * kWords, sizeof(bits));
        zeros[k] -= (bits + bits) == 0;  // the sum lacks the sign
      }
    int64_t sum = 0;
    for (int64_t l = 0; l < kWords; ++l) sum += zeros[0][l] + zeros[1][l];
    return sum;
  }

  // Counts n exponents, whose maximum is `top`. All numbers must be finite. Meanwhile, prefetches the next block from
  // address `ahead` on, which has elements of kBytes bytes.
  template <int kBytes>
  void count(const uint8_t* exponents, int64_t n, int top, const char* ahead) {
    uint8_t values[kPasses * kTogether];
    uint32_t counts[kPasses * kTogether];
    for (int k = 0; k < kTogether; ++k) values[k] = k == 0 ? 0 : top > 0 ? top-- : kNone;
    int64_t left = n - count_equal<kBytes>(exponents, n, values, counts, ahead);
    int passes = 1;
    // A pass takes as long as count_up_to() takes for some 30 of 4096 exponents.
    for (; left > n / 128 && passes < kPasses; ++passes) {
      const int first = passes * kTogether;
      for (int k = 0; k < kTogether; ++k) values[first + k] = top > 0 ? top-- : kNone;
      left -= count_equal<0>(exponents, n, values + first, counts + first, nullptr);
    }
    if (left > n / 32) return count_one_by_one(exponents, n);
    for (int k = 0; k < passes * kTogether; ++k) histogram_[values[k]] += counts[k];
    if (left > 0) count_up_to(exponents, n, top);
  }

  // Writes how many of n exponents equal each of kTogether values. Returns the sum of these counts. If kBytes is not 0,
  // also prefetches n * kBytes bytes, a cache line or two for each 32 exponents. While the core counts, it would
  // otherwise not read memory. With this prefetching, counting 25M elements takes 14% (fp16) to 28% (fp32) less time on
  // one core of an EPYC (Zen 5). If all lines are asked for at once, before the count, it takes as long as without.
  template <int kBytes>
  static int64_t count_equal(const uint8_t* exponents, int64_t n, const uint8_t* values, uint32_t* counts,
                             const char* ahead) {
    ByteLanes wanted[kTogether], equal[kTogether] = {};
    for (int k = 0; k < kTogether; ++k) wanted[k] = ByteLanes{} + values[k];
    for (int64_t i = 0; i < n; i += kByteLanes) {
      for (int byte = 0; byte < kByteLanes * kBytes; byte += 64) fetch_line<Cache::kL1>(ahead + i * kBytes + byte);
      ByteLanes bytes;
      std::memcpy(&bytes, exponents + i, sizeof(bytes));
#pragma GCC unroll 12
      for (int k = 0; k < kTogether; ++k) equal[k] -= as<ByteLanes>(bytes == wanted[k]);
    }
    int64_t sum = 0;
    for (int k = 0; k < kTogether; ++k) {
      counts[k] = sum_of(equal[k]);
      sum += counts[k];
    }
    return sum;
  }

  // Counts the exponents from 1 to `last`, which are few. So it looks for them in several vectors at once.
  void count_up_to(const uint8_t* exponents, int64_t n, int last) {
    const ByteLanes limit = ByteLanes{} + static_cast<uint8_t>(last);
    const auto load = [&](int64_t i) __attribute__((always_inline)) {
      ByteLanes bytes;
      std::memcpy(&bytes, exponents + i, sizeof(bytes));
      return bytes - 1;  // 0 becomes 255
    };
    constexpr int64_t kAtOnce = 4 * kByteLanes;
    for (int64_t begin = 0; begin < n; begin += kAtOnce) {
      const int64_t end = std::min(n, begin + kAtOnce);
      ByteLanes least = load(begin);
      for (int64_t i = begin + kByteLanes; i < end; i += kByteLanes) {
        const ByteLanes bytes = load(i);
        least = bytes < least ? bytes : least;
      }
      if (mask_of(as<ByteLanes>(least < limit)) == 0) continue;
      for (int64_t i = begin; i < end; i += kByteLanes)
        for (uint32_t mask = mask_of(as<ByteLanes>(load(i) < limit)); mask != 0; mask &= mask - 1)
          ++histogram_[exponents[i + __builtin_ctz(mask)]];
    }
  }

  // Counts n exponents. n must be a multiple of 8.
  [[gnu::noinline]] void count_one_by_one(const uint8_t* exponents, int64_t n) {
    // Neighbours often have the same exponent. If they were counted in the same word, each increment would have to wait
    // for the one before it.
    constexpr int kHistograms = 8;
    uint32_t histograms[kHistograms][kExponents] = {};
    for (int64_t i = 0; i < n; i += kHistograms) {
      uint8_t neighbours[kHistograms];
      std::memcpy(neighbours, exponents + i, sizeof(neighbours));
#pragma GCC unroll 8
      for (int k = 0; k < kHistograms; ++k) ++histograms[k][neighbours[k]];
    }
    for (const auto& counts : histograms)
      for (int e = 0; e < kExponents; ++e) histogram_[e] += counts[e];
  }

  int64_t zeros_ = 0;
  int32_t largest_ = 0;
  uint32_t histogram_[kExponents] = {};
};

// Counts the exponents of a chunk. `row` has what this worker counted before. If that was in another tensor, the row is
// first added to the results.
inline void count_exponents_of_chunk(const ExponentPass& pass, int64_t index, ExponentRow& row) {
  const Chunk chunk(pass.table, index);
  if (index + kChunksAhead < pass.table.chunk_count)
    prefetch_head<BFloat16>(pass.table, Chunk(pass.table, index + kChunksAhead), kGrad);
  if (row.tensor != chunk.tensor) {
    row.add_to(pass);
    row.begin(chunk.tensor);
  }
  ExponentCounter counter;
  with_dtype(static_cast<Dtype>(pass.table.at(kGradDtype, chunk.tensor)), [&](auto tag) {
    pass.partials[index] = counter.take(chunk.in<const decltype(tag)>(pass.table, kGrad), chunk.size);
  });
  counter.add_to(row);
}

// Adds the sums of squares of the chunks to those of their tensors, in the order of the chunks, no matter which threads
// computed them.
inline void add_squares(const ExponentPass& pass) {
  int64_t c = 0;
  while (c < pass.table.chunk_count) {
    const int64_t tensor = pass.table.chunks[2 * c];
    double sum = 0.0;
    for (; c < pass.table.chunk_count && pass.table.chunks[2 * c] == tensor; ++c) sum += pass.partials[c];
    pass.squares[tensor] += sum;
  }
}

}  // namespace amp_kernels::cpu
