// From numbers to int8 codes and back on a CPU. Results are bit for bit those of csrc/formulas/int8.h:
//
//   code = clamp(rint(x * inverse) + zero_point, low, 127)      value = (code - zero_point) * scale
//
// Steps are x * inverse: the distance from the zero point, in units of the scale. For each element, reading x and
// writing the code moves 3 bytes if x has 16 bits, and 5 bytes if x is fp32. With AVX2 and F16C, an Encoder makes 32
// codes at a time: four registers of eight fp32 steps become one register of codes. encode() makes codes in loops that
// the compiler vectorises. It is used for stochastic rounding, for fewer than 32 columns, and for everything if AVX2 or
// F16C is missing.
#pragma once

#include <cmath>

#include "int8_ranges.h"

namespace amp_kernels::cpu {

// The affines (scale, inverse, zero point) of the groups in a band (csrc/int8.h). Steps are clamped before they are
// rounded, while code_of() in csrc/formulas/int8.h rounds them first. Both orders give the same codes, because the ends
// of the clamp are integers. If steps are clamped first, a code takes a third of the instructions of code_of().
//
// If x is NaN or the inverse is 0, steps are 0. If the zero point is itself a code (-128 to 127), 0 lies between the
// ends of the clamp. The code is then the zero point, as in code_of().
struct Affines {
  float scale[kRoom];
  float inverse[kRoom];
  float lowest[kRoom];  // the ends of the clamp, in steps
  float highest[kRoom];
  int zero_point[kRoom];
  bool have_inverses;  // whether every inverse is finite and not 0
  // Whether every zero point is a code. If one is not, an end of the clamp may lie outside of [-512, 512], the interval
  // to which the formulas limit steps. So quantization calls bound(), which moves the ends. Fake quantization and its
  // gradient do not call bound(). If a zero point is not a code, they compute each element with the formulas.
  bool are_codes = true;

  void set(int64_t i, const Affine& affine) {
    scale[i] = affine.scale, inverse[i] = affine.inverse, zero_point[i] = affine.zero_point;
    lowest[i] = static_cast<float>(affine.low - affine.zero_point);
    highest[i] = static_cast<float>(127 - affine.zero_point);
  }

  // Returns the affine of a group, for the functions of formulas/int8.h. Only for groups with asymmetric codes, whose
  // lowest code is -128.
  Affine at(int64_t i) const { return {scale[i], inverse[i], zero_point[i], lowest_code(/*symmetric=*/false)}; }

  // Prepares zero points that the caller gave. Such a zero point may be any int32, but Encoder adds it to steps in 16
  // bits. So zero points are limited to [-1024, 1024]. The formulas limit steps to [-512, 512]. The ends of the clamp
  // are moved to make up for both limits, so that codes stay the same as those of the formulas.
  void bound(int64_t groups) {
    constexpr float kBound = 512.0f;
    for (int64_t i = 0; i < groups; ++i) {
      zero_point[i] = std::clamp(zero_point[i], -1024, 1024);
      set(i, at(i));
      const float low = lowest[i], high = highest[i];
      lowest[i] = std::max(low, std::min(-kBound, high)), highest[i] = std::min(high, std::max(kBound, low));
    }
  }

  void finish(int64_t groups) {
    int without = 0;
    for (int64_t i = 0; i < groups; ++i) without += !(std::fabs(inverse[i]) > 0.0f && std::isfinite(inverse[i]));
    have_inverses = without == 0;
  }
};

template <class V>
[[gnu::always_inline]] inline V limited(const V& steps, const V& lowest, const V& highest) {
  const V raised = steps < lowest ? lowest : steps;  // NaN stays NaN, since this comparison is false
  return raised > highest ? highest : raised;
}

template <class V>
[[gnu::always_inline]] inline V clamped(const V& steps, const V& lowest, const V& highest) {
  return limited(steps == steps ? steps : V{}, lowest, highest);
}

// If |x| < 2^22, the low bits of the float x + kRounder are the integer to which x is rounded (to nearest even).
constexpr float kRounder = 12582912.0f;

// Looks up one number for each element of a segment: the scale, the inverse or an end of the clamp of the element's
// group. If kStep is 0, all elements of the segment belong to one group, whose number stays in a register. If kStep is
// 1, each element belongs to the group that follows the group of the element before it.
template <int kStep>
class OfGroups {
 public:
  OfGroups(const float* of_groups, int64_t group) : first_(of_groups + group), one_(*first_) {}

  // Returns the number for element i of a segment (V is float), or for the eight elements from i on (V is Lanes).
  template <class V>
  [[gnu::always_inline]] V at(int64_t i) const {
    if constexpr (std::is_same_v<V, float>)
      return first_[kStep * i];
    else if constexpr (kStep == 1)
      return load_lanes(first_ + i);
    else
      return Lanes{one_, one_, one_, one_, one_, one_, one_, one_};
  }

 private:
  const float* first_;
  float one_;
};

[[gnu::always_inline]] inline Integers load_codes(const int8_t* codes) {
#if defined(__AVX2__)
  return as<Integers>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
#else
  Integers wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = codes[i];
  return wide;
#endif
}

// Returns code - zero_point as a float: for one code if V is float, and for eight codes if V is Lanes. `zero_point`
// points to the zero point of the first code's group. OfGroups explains kStep.
template <class V, int kStep>
[[gnu::always_inline]] inline V steps_of(const int8_t* codes, const int* zero_point) {
  if constexpr (std::is_same_v<V, float>) {
    return static_cast<float>(*codes - *zero_point);
  } else {
    Integers zero;
    if constexpr (kStep == 1)
      std::memcpy(&zero, zero_point, sizeof(zero));
    else
      zero = Integers{} + *zero_point;
    return as_floats(load_codes(codes) - zero);
  }
}

[[gnu::always_inline]] inline float rounded(float x) { return rintf(x); }

[[gnu::always_inline]] inline Lanes rounded(const Lanes& x) {
#if defined(__AVX2__)
  return as<Lanes>(_mm256_round_ps(as<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  Lanes whole;
  for (int i = 0; i < kLanes; ++i) whole[i] = rintf(x[i]);
  return whole;
#endif
}

inline int8_t code_at(float steps, int zero_point) {
  return static_cast<int8_t>(float_bits(steps + kRounder) + static_cast<uint32_t>(zero_point));
}

// Encodes n elements of a segment, rounding to nearest even. The overload with `noise` rounds stochastically. The first
// element belongs to group `first`. OfGroups explains kStep.
//
// g++ vectorises the loops of these two functions only as they are written here. If the functions are inlined, g++
// forgets which arrays do not alias. If the members of an affine are in a struct and not in separate scalars, g++ keeps
// this struct in memory.
template <int kStep>
[[gnu::noinline]] void encode(const float* __restrict x, const Affines& __restrict affines, int64_t first,
                              int8_t* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t j = first + kStep * i;
    const float steps = clamped(x[i] * affines.inverse[j], affines.lowest[j], affines.highest[j]);
    out[i] = code_at(steps, affines.zero_point[j]);
  }
}

template <int kStep>
[[gnu::noinline]] void encode(const float* __restrict x, const float* __restrict noise,
                              const Affines& __restrict affines, int64_t first, int8_t* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t j = first + kStep * i;
    const float steps = clamped(x[i] * affines.inverse[j] + noise[i], affines.lowest[j], affines.highest[j]);
    out[i] = code_at(floorf(steps), affines.zero_point[j]);
  }
}

#if defined(__AVX2__) && defined(__F16C__)
constexpr int64_t kBlock = 32;

// Encodes blocks of kBlock neighbouring elements. x may be fp32, fp16 or bf16, while encode() takes only fp32.
// An Encoder takes at most half the instructions of encode(), because the instructions that pack steps into bytes also
// clamp them. `inverse` and `zero_point` point to the numbers of the first element's group. OfGroups explains kStep.
//
// kIsFinite promises that every |x * inverse| is far below 2^31. That is so if the scale was computed from the group's
// own elements, and all of these are finite. Without the promise, steps are limited to [-512, 512] first, because
// _mm256_cvtps_epi32 turns every number that does not fit int32 into the most negative integer.
template <int kStep, bool kIsFinite, class T>
class Encoder {
 public:
  Encoder(const float* inverse, const int* zero_point, bool symmetric)
      : inverse_(inverse),
        zero_point_(zero_point),
        factor_(_mm256_set1_ps(*inverse)),
        zero_(_mm256_set1_epi16(static_cast<int16_t>(*zero_point))),
        lowest_(_mm256_set1_epi8(static_cast<int8_t>(lowest_code(symmetric)))),
        symmetric_(symmetric) {}

  // Returns the codes of elements [i, i + kBlock).
  [[gnu::always_inline]] __m256i operator()(const T* x, int64_t i) const {
    // The pack instructions work within each half of a register. Permuting by `order` restores the order of the
    // elements.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i steps[4];
    for (int k = 0; k < 4; ++k) steps[k] = steps_of_eight(x, i + 8 * k);
    __m256i low = _mm256_packs_epi32(steps[0], steps[1]), high = _mm256_packs_epi32(steps[2], steps[3]);
    if (kStep == 0 && !symmetric_) low = _mm256_adds_epi16(low, zero_), high = _mm256_adds_epi16(high, zero_);
    const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    return kIsFinite ? codes : _mm256_max_epi8(codes, lowest_);
  }

 private:
  [[gnu::always_inline]] __m256i steps_of_eight(const T* x, int64_t i) const {
    const __m256 most = _mm256_set1_ps(512.0f), least = _mm256_set1_ps(-512.0f);
    __m256 v = _mm256_mul_ps(as<__m256>(load_lanes(x + i)), kStep == 0 ? factor_ : _mm256_loadu_ps(inverse_ + i));
    if constexpr (!kIsFinite) {
      v = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
      v = _mm256_max_ps(_mm256_min_ps(v, most), least);
    }
    const __m256i steps = _mm256_cvtps_epi32(v);
    if (kStep == 0 || symmetric_) return steps;
    return _mm256_add_epi32(steps, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(zero_point_ + i)));
  }

  const float* inverse_;
  const int* zero_point_;
  __m256 factor_;
  __m256i zero_, lowest_;
  bool symmetric_;
};

[[gnu::always_inline]] inline void store_codes(const __m256i& codes, int8_t* out, bool streams) {
  if (streams)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out), codes);
  else
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), codes);
}

// Encodes n >= kBlock neighbours of one group. If n is not a multiple of kBlock, the last block overlaps the one
// before. Prefetches `ahead` bytes ahead, or nothing if `ahead` is 0. With `streams`, codes are stored past the caches
// (convert.h).
template <bool kIsFinite, class T>
[[gnu::always_inline]] inline void encode_blocks(const T* x, int64_t ahead, const float* inverse, const int* zero_point,
                                                 bool symmetric, int8_t* out, int64_t n, bool streams) {
  streams = streams && reinterpret_cast<uintptr_t>(out) % 32 == 0;
  const Encoder<0, kIsFinite, T> encode(inverse, zero_point, symmetric);
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    if (ahead != 0) ask_for(x + i, kBlock, ahead);
    store_codes(encode(x, i), out + i, streams);
  }
  if (i < n) store_codes(encode(x, n - kBlock), out + n - kBlock, false);
}

// Encodes `rows` rows, `row_step` elements apart, of n >= kBlock columns. Each column has its own affine.
template <bool kIsFinite, class T>
void encode_strip(const T* x, int64_t row_step, int64_t rows, int64_t ahead, const float* inverse,
                  const int* zero_point, bool symmetric, int8_t* out, int64_t n, bool streams) {
  constexpr int64_t kLine = 64;  // codes in a cache line
  // A streaming store of 32 bytes faults if its address is not a multiple of 32.
  streams = streams && (reinterpret_cast<uintptr_t>(out) | (rows > 1 ? row_step : 0)) % 32 == 0;
  const Encoder<1, kIsFinite, T> encode(inverse, zero_point, symmetric);
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = i; k < i + kLine; k += kBlock) {
        ask_for(x + r * row_step + k, kBlock, ahead);
        store_codes(encode(x + r * row_step, k), out + r * row_step + k, streams);
      }
  for (; i < n; i += kBlock) {  // the last block may overlap the one before
    const int64_t k = std::min(i, n - kBlock);
    for (int64_t r = 0; r < rows; ++r) store_codes(encode(x + r * row_step, k), out + r * row_step + k, false);
  }
}
#else
constexpr int64_t kBlock = 0;

template <bool kIsFinite, class T>
void encode_blocks(const T*, int64_t, const float*, const int*, bool, int8_t*, int64_t, bool) {}

template <bool kIsFinite, class T>
void encode_strip(const T*, int64_t, int64_t, int64_t, const float*, const int*, bool, int8_t*, int64_t, bool) {}
#endif

}  // namespace amp_kernels::cpu
