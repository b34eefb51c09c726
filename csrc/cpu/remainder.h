// Joins 16-bit weights and remainders to fp32 masters, and splits masters again (formulas/remainder.h). All steps of a
// join or a split are done in registers for eight elements, and then for the next eight. When instead each step was a
// loop over a block of elements, an update of 1M fp16 weights with remainders took three times as long as an update
// with fp32 masters.
#pragma once

#include "../formulas/remainder.h"
#include "convert.h"

namespace amp_kernels::cpu {

using LaneShorts = int16_t __attribute__((vector_size(2 * kLanes)));

// Whether all bits of a mask are set.
template <class Mask>
bool is_full(const Mask& mask) {
  const Mask full = Mask{} - 1;
  return std::memcmp(&mask, &full, sizeof(full)) == 0;
}

[[gnu::always_inline]] inline Integers load_integers(const int16_t* from) {
#if defined(__AVX2__)
  return as<Integers>(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Integers integers;
  for (int i = 0; i < kLanes; ++i) integers[i] = from[i];
  return integers;
#endif
}

// Stores integers as int16. Integers above 32767 become 32767, and integers below -32768 become -32768.
[[gnu::always_inline]] inline void store_integers(const Integers& integers, int16_t* to) {
#if defined(__AVX2__)
  const __m256i words = as<__m256i>(integers);
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int16_t>(std::clamp(integers[i], -32768, 32767));
#endif
}

// Rounds to the nearest integer, half to even.
[[gnu::always_inline]] inline Integers as_integers(const Lanes& lanes) {
#if defined(__AVX2__)
  return as<Integers>(_mm256_cvtps_epi32(as<__m256>(lanes)));
#else
  Integers integers;
  for (int i = 0; i < kLanes; ++i) integers[i] = static_cast<int32_t>(rintf(lanes[i]));
  return integers;
#endif
}

// Returns the larger number of each pair. If one of the pair is NaN, the result is the number from `others`. g++ 12
// would compile `?` to two instructions, not to one.
[[gnu::always_inline]] inline Lanes larger(const Lanes& lanes, const Lanes& others) {
#if defined(__AVX2__)
  return as<Lanes>(_mm256_max_ps(as<__m256>(lanes), as<__m256>(others)));
#else
  return lanes > others ? lanes : others;
#endif
}

// `weight` are fp16 numbers that were widened to fp32. Returns their exponents, in the bits in which fp32 has its
// exponent. fp16 subnormals get the exponent of the smallest normal fp16 number.
[[gnu::always_inline]] inline Words fp16_exponent(const Lanes& weight) {
  const Integers e = as<Integers>(weight) & 0x7f800000, least = Integers{} + (113 << 23);
  return as<Words>(e > least ? e : least);
}

// Returns weights plus remainders. If no other code has written the weights since the masters were split, the sums are
// the masters that were stored.
template <class P>
[[gnu::always_inline]] inline Lanes sum(const P* weight, const int16_t* remainder) {
  const Lanes widened = load_lanes(weight);
  if constexpr (std::is_same_v<P, BFloat16>) return as<Lanes>(as<Integers>(widened) + load_integers(remainder));
  return widened + as_floats(load_integers(remainder)) * as<Lanes>(fp16_exponent(widened) - (26u << 23));
}

// Returns a mask of the lanes in which the sum of a weight and its remainder rounds to that weight.
[[gnu::always_inline]] inline LaneShorts belongs(const Lanes& sum, const Half* weight, const int16_t*) {
  Half rounded[kLanes];
  store_lanes(sum, rounded);
  LaneShorts found, expected;
  std::memcpy(&found, rounded, sizeof(found));
  std::memcpy(&expected, weight, sizeof(expected));
  return found == expected;
}

// Returns the same mask for bf16. Rounding the sums would take three times as many instructions. Instead, the function
// recognizes the two kinds of sums that do not round to their weight. One is the tie below an odd weight, which rounds
// to the even number below. The other is NaN. Weight plus remainder, as bits, is NaN if it lies beyond infinity, or if
// the weight is 0 and the remainder is negative.
[[gnu::always_inline]] inline Integers belongs(const Lanes& sum, const BFloat16* weight, const int16_t* remainder) {
  const Integers is_tie = load_integers(remainder) == -32768, is_odd = as<Integers>(load_lanes(weight)) << 15 >> 31;
  return (sum == sum) & ~(is_tie & is_odd);
}

// Returns the masters: weight plus remainder, or the weight alone if the sum does not round to the weight.
template <class P>
[[gnu::always_inline]] inline Lanes joined(const P* weight, const int16_t* remainder) {
  const Lanes master = sum(weight, remainder);
  return __builtin_convertvector(belongs(master, weight, remainder), Integers) ? master : load_lanes(weight);
}

// Splits eight masters, as Remainder::of() in formulas/remainder.h does.
template <class P>
[[gnu::always_inline]] inline void split(const Lanes& master, P* weight, int16_t* remainder) {
  if constexpr (std::is_same_v<P, BFloat16>) {
    const Words high = rounded_to_bf16(master), units = as<Words>(master) - (high << 16);
    store_bf16(high, weight);
    store_integers(master == master ? as<Integers>(units) : Integers{}, remainder);
  } else {
    store_lanes(master, weight);
    const Lanes widened = load_lanes(weight);
    const Words e = fp16_exponent(widened);
    const Lanes units = (master - widened) * as<Lanes>((280u << 23) - e), least = Lanes{} - 32767.0f;
    const Lanes bounded = larger(units, least);
    store_integers(e == (255u << 23) ? Integers{} : as_integers(bounded), remainder);
  }
}

// Joins n elements.
template <class P>
void join(const P* weight, const int16_t* remainder, float* master, int64_t n) {
  const int64_t whole = n / kLanes * kLanes;
  auto all = decltype(belongs(Lanes{}, weight, remainder)){} - 1;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Lanes lanes = sum(weight + i, remainder + i);
    all &= belongs(lanes, weight + i, remainder + i);
    store_lanes(lanes, master + i);
  }
  // This loop runs only if other code has written some weights, or if some are NaN. Both are rare. When instead
  // the loop above chose between sum and weight, an update by RMSprop of fp16 weights that were in a cache took 7 %
  // longer.
  if (!is_full(all))
    for (int64_t i = 0; i < whole; i += kLanes) store_lanes(joined(weight + i, remainder + i), master + i);
  if (whole == n) return;
  const int64_t i = whole;
  P weights[kLanes] = {};
  int16_t remainders[kLanes] = {};
  float masters[kLanes];
  std::copy_n(weight + i, n - i, weights);
  std::copy_n(remainder + i, n - i, remainders);
  store_lanes(joined(weights, remainders), masters);
  std::copy_n(masters, n - i, master + i);
}

// Splits n elements.
template <class P>
void split(const float* master, P* weight, int16_t* remainder, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) split(load_lanes(master + i), weight + i, remainder + i);
  if (i == n) return;
  float masters[kLanes] = {};
  P weights[kLanes];
  int16_t remainders[kLanes];
  std::copy_n(master + i, n - i, masters);
  split(load_lanes(masters), weights, remainders);
  std::copy_n(weights, n - i, weight + i);
  std::copy_n(remainders, n - i, remainder + i);
}

}  // namespace amp_kernels::cpu
