// The range [lowest, highest] of each group on a CPU. range_of() finds the range of a row, and add_strip() the ranges
// of columns over some rows. x (fp32, fp16, bf16) is read once. Each vector of x takes two instructions if ranges are
// symmetric, and four if they are not.
//
//   range_of:   a thread keeps two vectors of running maxima for each end of the range. When the row ends, it reduces
//               the two vectors of each end to one number
//   add_strip:  a thread reads one cache line from each of up to 8 rows, reduces these lines to one line of maxima, and
//               then joins this line to the columns' ranges
#pragma once

#include "convert.h"
#include "int8_walk.h"

namespace amp_kernels::cpu {

// Reads one element as a float if V is float, or eight elements if V is Lanes.
template <class V, class T>
[[gnu::always_inline]] inline V read(const T* from) {
  if constexpr (std::is_same_v<V, float>)
    return static_cast<float>(*from);
  else
    return load_lanes(from);
}

// Floats are compared by their bits, as signed integers. If the sign bit is 0, the integers have the order of the
// floats, with NaN above all others. If the sign bit is 1, the integer is negative. It changes no maximum, because each
// maximum starts at 0. For symmetric ranges the sign bit is cleared first, and for `low` it is flipped. The maximum of
// integers is one instruction on every CPU. 16-bit dtypes are compared in 16 bits, because a register holds twice as
// many 16-bit integers as 32-bit ones.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int16_t>;
template <class T>
constexpr Bits<T> kSign = std::numeric_limits<Bits<T>>::min();

// A group's extremes, as bits of floats. `high` is the group's highest element, or 0 if no element is above 0. `low` is
// the group's lowest element without its sign, or 0 if no element is below 0. For a symmetric range, `high` is the
// largest magnitude, and `low` is 0.
struct Range {
  uint32_t high, low;

  Extremes extremes() const { return {std::max(high, low), -as<float>(low), as<float>(high)}; }
};

// The ranges of the groups of a band. int8_walk.h explains bands and kRoom.
struct Ranges {
  int32_t high[kRoom];
  int32_t low[kRoom];

  explicit Ranges(int64_t groups) {
    std::fill_n(high, groups, 0);
    std::fill_n(low, groups, 0);
  }

  Range at(int64_t i) const { return {static_cast<uint32_t>(high[i]), static_cast<uint32_t>(low[i])}; }

  void add(int64_t i, const Range& other) {
    high[i] = std::max<int32_t>(high[i], other.high);
    low[i] = std::max<int32_t>(low[i], other.low);
  }
};

using Shorts = int16_t __attribute__((vector_size(32)));
template <class T>
using BitLanes = std::conditional_t<sizeof(T) == 4, Integers, Shorts>;

// Returns the largest lane. No lane may be negative.
template <class T>
[[gnu::always_inline]] inline Bits<T> largest(const BitLanes<T>& lanes) {
#if defined(__AVX2__)
  const __m256i all = as<__m256i>(lanes);
  __m128i four = _mm256_castsi256_si128(all), other = _mm256_extracti128_si256(all, 1);
  if constexpr (sizeof(T) == 2) {  // x86 has an instruction for the smallest of eight integers, none for the largest
    const __m128i mirror = _mm_set1_epi16(0x7fff);
    four = _mm_minpos_epu16(_mm_sub_epi16(mirror, _mm_max_epi16(four, other)));
    return static_cast<Bits<T>>(0x7fff - _mm_cvtsi128_si32(four));
  } else {
    four = _mm_max_epi32(four, other);
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
#else
  Bits<T> most = 0;
  for (size_t i = 0; i < 32 / sizeof(T); ++i) most = std::max<Bits<T>>(most, lanes[i]);
  return most;
#endif
}

// Returns the range of the n contiguous elements at x. Prefetches `ahead` bytes ahead, or nothing if `ahead` is 0.
template <bool kSymmetric, class T>
[[gnu::always_inline]] inline Range range_of(const T* x, int64_t n, int64_t ahead) {
  using V = BitLanes<T>;
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  const auto raise = [](V& to, const V& bits) { to = bits > to ? bits : to; };
  V high[2] = {}, low[2] = {};
  const auto add = [&](const V& bits, int chain) {
    raise(high[chain], kSymmetric ? bits & static_cast<Bits<T>>(~kSign<T>) : bits);
    if constexpr (!kSymmetric) raise(low[chain], bits ^ kSign<T>);
  };
  const auto load = [](const T* from) {
    V bits;
    std::memcpy(&bits, from, sizeof(bits));
    return bits;
  };
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {  // a cache line
    if (ahead != 0) ask_for(x + i, 2 * kWidth, ahead);
    add(load(x + i), 0), add(load(x + i + kWidth), 1);
  }
  if (i + kWidth <= n) add(load(x + i), 0);
  if (n % kWidth != 0 && n > kWidth) {
    add(load(x + n - kWidth), 1);  // reads some elements again, which changes no maximum
  } else if (n % kWidth != 0) {
    T few[kWidth] = {};  // zeros, which every range contains
    std::memcpy(few, x, n * sizeof(T));
    add(load(few), 1);
  }
  raise(high[0], high[1]), raise(low[0], low[1]);
  const auto wide = [](Bits<T> bits) { return as<uint32_t>(static_cast<float>(as<T>(bits))); };
  return {wide(largest<T>(high[0])), kSymmetric ? 0 : wide(largest<T>(low[0]))};
}

// Extends the ranges of n columns by the elements of some rows. The rows are read side by side. If whole rows were read
// one after the other, the ranges would be read and written as often as x. Segments of a row so short that their ranges
// stay in the L1 would avoid this, but their elements would arrive late from memory.
//
// Each row is read by whole cache lines. Rows that are 4 KiB * 2^n apart share one set of the L1. If such rows were
// read by half lines, the L1 would evict a line before its second half is read. This function is not inlined. When it
// was inlined, columns of fp16 took 1.15 to 1.5 times as long.
template <bool kSymmetric, class T>
[[gnu::noinline]] void add_strip(const T* x, int64_t row_step, int64_t rows, int64_t n, Ranges& ranges, int64_t ahead) {
  using V = BitLanes<T>;
  constexpr int64_t kLine = 64 / sizeof(T), kVectors = 64 / sizeof(V);
  const auto raise = [](auto& to, const auto& bits) { to = bits > to ? bits : to; };
  const auto add_wide = [&](int32_t* to, const V& bits) {
    T lanes[sizeof(V) / sizeof(T)];
    std::memcpy(lanes, &bits, sizeof(bits));
    for (size_t k = 0; k < sizeof(V) / sizeof(T); k += kLanes) {
      Integers most;
      std::memcpy(&most, to + k, sizeof(most));
      raise(most, as<Integers>(load_lanes(lanes + k)));
      std::memcpy(to + k, &most, sizeof(most));
    }
  };
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    V high[kVectors] = {}, low[kVectors] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const T* line = x + r * row_step + i;
      ask_for(line, 1, ahead);
      for (int64_t k = 0; k < kVectors; ++k) {
        V bits;
        std::memcpy(&bits, line + k * kLine / kVectors, sizeof(bits));
        raise(high[k], kSymmetric ? bits & static_cast<Bits<T>>(~kSign<T>) : bits);
        if constexpr (!kSymmetric) raise(low[k], bits ^ kSign<T>);
      }
    }
    for (int64_t k = 0; k < kVectors; ++k) {
      add_wide(ranges.high + i + k * kLine / kVectors, high[k]);
      if constexpr (!kSymmetric) add_wide(ranges.low + i + k * kLine / kVectors, low[k]);
    }
  }
  for (; i < n; ++i)
    for (int64_t r = 0; r < rows; ++r) {
      const auto bits = as<int32_t>(static_cast<float>(x[r * row_step + i]));
      raise(ranges.high[i], kSymmetric ? bits & ~kSign<float> : bits);
      if constexpr (!kSymmetric) raise(ranges.low[i], bits ^ kSign<float>);
    }
}

}  // namespace amp_kernels::cpu
