// Quantization, dequantization and the straight-through gradient on a CPU: runs of a layout, staged as fp32.
#pragma once

#include "convert.h"
#include "int8_runs.h"

namespace amp_kernels::cpu {

// ------------------------------------------------------------------------------------------------------- memory
template <class T>
const float* as_float(const T* from, int64_t step, float* staged, int64_t n) {
  if (step == 1) return as_float(from, staged, n);
  for (int64_t i = 0; i < n; ++i) staged[i] = static_cast<float>(from[i * step]);
  return staged;
}

template <class T>
void store(const float* from, T* to, int64_t step, int64_t n) {
  if (step == 1) return store(from, to, n);
  T rounded[kRun];
  store(from, rounded, n);
  for (int64_t i = 0; i < n; ++i) to[i * step] = rounded[i];
}

// Asks for a run of the same columns a few rows on; along a row the hardware's own prefetching measured better. Inlined
// by force, since g++ 12 takes a function that only prefetches for one without effect, and drops the calls.
template <class T>
[[gnu::always_inline]] inline void prefetch_rows(const T* x, const Walk& walk, const Run& run) {
  constexpr int64_t kRowsAhead = 4;
  if (!walk.across() || walk.x_step() != 1 || !asks_ahead()) return;
  const char* line = reinterpret_cast<const char*>(x + run.x + kRowsAhead * walk.row_step());
  for (int64_t i = 0; i < run.n * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(line + i);
}

// Where to compute floats that then go to `to`: there, or in `staged`.
inline float* room(float* to, int64_t step, float* staged, bool streams) { return step == 1 && !streams ? to : staged; }

template <class T>
float* room(T*, int64_t, float* staged, bool) {
  return staged;
}

inline void settle(const float* values, float* to, int64_t step, int64_t n, bool streams) {
  if (values == to) return;
  if (streams && step == 1) return stream(values, to, n);
  store(values, to, step, n);
}

template <class T>
void settle(const float* values, T* to, int64_t step, int64_t n, bool streams) {
  if (!streams || step != 1) return store(values, to, step, n);
  alignas(32) T rounded[kRun];
  store(values, rounded, n);
  stream(rounded, to, n);
}

// ------------------------------------------------------------------------------------------------------- ranges
// Extremes of each group of a bundle.
struct Ranges {
  uint32_t magnitude[kGroups];
  float low[kGroups];
  float high[kGroups];

  explicit Ranges(int64_t groups) {
    std::fill_n(magnitude, groups, 0u);
    std::fill_n(low, groups, 0.0f);
    std::fill_n(high, groups, 0.0f);
  }

  Extremes at(int64_t i) const { return {magnitude[i], low[i], high[i]}; }

  void add(int64_t i, const Extremes& other) {
    Extremes both = at(i);
    both.add(other);
    magnitude[i] = both.magnitude, low[i] = both.low, high[i] = both.high;
  }
};

inline uint32_t largest_magnitude(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, float_bits(x[i]) & 0x7fffffffu);
  return largest;
}

// 16-bit numbers are ordered as their fp32 values are, and go twice as many to a register.
template <class T>
uint32_t largest_magnitude(const T* x, int64_t n) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<uint16_t>(x[i].x & 0x7fff));
  return float_bits(static_cast<float>(T(largest, T::from_bits())));
}

// The lowest and highest, with 0; NaN is passed over. g++ does not vectorise this by itself, for it keeps the order of
// comparisons.
inline Extremes low_and_high(const float* x, int64_t n) {
  using Vector = float __attribute__((vector_size(32)));
  constexpr int kVectors = 4, kWidth = 8;
  Vector low[kVectors] = {}, high[kVectors] = {};
  Extremes all;
  int64_t i = 0;
  for (; i + kVectors * kWidth <= n; i += kVectors * kWidth) {
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      Vector v;
      std::memcpy(&v, x + i + k * kWidth, sizeof(v));
      low[k] = v < low[k] ? v : low[k];
      high[k] = v > high[k] ? v : high[k];
    }
  }
#pragma GCC unroll 4
  for (int k = 1; k < kVectors; ++k) {
    low[0] = low[k] < low[0] ? low[k] : low[0];
    high[0] = high[k] > high[0] ? high[k] : high[0];
  }
  for (int l = 0; l < kWidth; ++l) all.add({0, low[0][l], high[0][l]});
  for (; i < n; ++i) all.add(x[i]);
  return all;
}

// 16-bit numbers as integers of the same order, but for -0, which Extremes passes over, and NaN.
template <class T>
Extremes low_and_high(const T* x, int64_t n) {
  int16_t low = 0, high = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int16_t bits = static_cast<int16_t>(x[i].x);
    const int16_t key = static_cast<int16_t>(bits ^ ((bits >> 15) & 0x7fff));
    low = std::min(low, key);
    high = std::max(high, key);
  }
  const auto value = [](int16_t key) {
    return static_cast<float>(T(static_cast<uint16_t>(key ^ ((key >> 15) & 0x7fff)), T::from_bits()));
  };
  Extremes all;
  all.add({0, value(low), value(high)});
  return all;
}

template <class T>
void add_run(const T* x, int64_t step, int64_t n, bool symmetric, Ranges& ranges, int64_t group) {
  float staged[kRun];
  if (step != 1) return add_run(as_float(x, step, staged, n), 1, n, symmetric, ranges, group);
  Extremes run = symmetric ? Extremes{} : low_and_high(x, n);
  run.magnitude = largest_magnitude(x, n);
  ranges.add(group, run);
}

// Magnitudes as signed integers, which have a maximum in vectors everywhere.
template <class T>
void raise_magnitudes(const T* x, int64_t n, uint32_t* magnitude) {
  using Integers = int32_t __attribute__((vector_size(sizeof(Lanes))));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Integers bits = as<Integers>(load_lanes(x + i)) & 0x7fffffff;
    Integers largest;
    std::memcpy(&largest, magnitude + i, sizeof(largest));
    largest = bits > largest ? bits : largest;
    std::memcpy(magnitude + i, &largest, sizeof(largest));
  }
  for (; i < n; ++i) magnitude[i] = std::max(magnitude[i], float_bits(static_cast<float>(x[i])) & 0x7fffffffu);
}

inline void widen_ranges(const float* __restrict x, int64_t n, float* __restrict low, float* __restrict high) {
  for (int64_t i = 0; i < n; ++i) {
    low[i] = x[i] < low[i] ? x[i] : low[i];
    high[i] = x[i] > high[i] ? x[i] : high[i];
  }
}

// One element of each group from `first` on.
template <class T>
void add_across(const T* from, int64_t step, int64_t n, bool symmetric, Ranges& ranges, int64_t first) {
  float staged[kRun];
  if (step == 1)
    raise_magnitudes(from, n, ranges.magnitude + first);
  else
    raise_magnitudes(as_float(from, step, staged, n), n, ranges.magnitude + first);
  if (!symmetric) widen_ranges(as_float(from, step, staged, n), n, ranges.low + first, ranges.high + first);
}

// -------------------------------------------------------------------------------------------------------- codes
// The affines of a bundle's groups, with the clamp before the rounding: the two commute, as the clamp's ends are
// integers, and then a code takes a third of the instructions of code_of. A zero point is within its range, so that NaN
// taken for 0 gives it, and so does an inverse of 0.
struct Affines {
  float scale[kGroups];
  float inverse[kGroups];
  float lowest[kGroups];  // the clamp's ends, in steps from the zero point
  float highest[kGroups];
  int zero_point[kGroups];
  int low;
  bool have_inverses = true;  // all of them

  void set(int64_t i, const Affine& affine) {
    scale[i] = affine.scale, inverse[i] = affine.inverse, zero_point[i] = affine.zero_point;
    lowest[i] = static_cast<float>(affine.low - affine.zero_point);
    highest[i] = static_cast<float>(127 - affine.zero_point);
    low = affine.low;
    have_inverses = have_inverses && affine.inverse != 0.0f;
  }
};

inline float clamped(float steps, float lowest, float highest) {
  const float known = steps == steps ? steps : 0.0f;
  const float raised = known < lowest ? lowest : known;
  return raised > highest ? highest : raised;
}

// Added to |x| < 2^22 it leaves x, rounded to nearest even, as an integer in the low bits.
constexpr float kRounder = 12582912.0f;

inline int8_t code_at(float steps, int zero_point) {
  return static_cast<int8_t>(float_bits(steps + kRounder) + static_cast<uint32_t>(zero_point));
}

// The loops over a run's elements: with kStep 0 all share one affine, with 1 each has its own, the first that of
// group `first`. g++ vectorises
// them only as they are, each a function of its own and every affine's member a scalar: inlined it forgets what does
// not alias, and a struct of members it keeps in memory.
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

template <int kStep>
[[gnu::noinline]] void fake(const float* __restrict x, const Affines& __restrict affines, int64_t first,
                            float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t j = first + kStep * i;
    const float steps = clamped(x[i] * affines.inverse[j], affines.lowest[j], affines.highest[j]);
    const float value = ((steps + kRounder) - kRounder) * affines.scale[j];
    out[i] = x[i] == x[i] ? value : x[i];
  }
}

template <int kStep>
[[gnu::noinline]] void decode(const int8_t* __restrict codes, const Affines& __restrict affines, int64_t first,
                              float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t j = first + kStep * i;
    out[i] = static_cast<float>(codes[i] - affines.zero_point[j]) * affines.scale[j];
  }
}

#if defined(__AVX2__) && defined(__F16C__)
// encode() from where x lies, in half the instructions or less, as the packing saturates; returns how many it did.
// Meanwhile as many from `next` on, unless it is null, come into L2. Out of range _mm256_cvtps_epi32 gives the most
// negative integer. kIsFinite: every |x * inverse| is far below 2^31, as in a group that made its own scale.
template <int kStep, bool kIsFinite, class T>
int64_t encode_blocks(const T* x, const T* next, const Affines& affines, int64_t first, int8_t* out, int64_t n,
                      bool streams) {
  streams = streams && reinterpret_cast<uintptr_t>(out) % 32 == 0;
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // both packs work in halves of a register
  const __m256 most = _mm256_set1_ps(512.0f), least = _mm256_set1_ps(-512.0f);
  const __m256i lowest = _mm256_set1_epi8(static_cast<int8_t>(affines.low));
  const __m256 inverse = _mm256_set1_ps(affines.inverse[first]);
  const __m256i zero_point = _mm256_set1_epi16(static_cast<int16_t>(affines.zero_point[first]));
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    if (next != nullptr)
      for (int line = 0; line < 32 * static_cast<int>(sizeof(T)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(next + i) + line, 0, 2);
    __m256i steps[4];
    for (int k = 0; k < 4; ++k) {
      const int64_t j = first + i + 8 * k;
      __m256 v = _mm256_mul_ps(as<__m256>(load_lanes(x + i + 8 * k)),
                               kStep == 0 ? inverse : _mm256_loadu_ps(affines.inverse + j));
      if constexpr (!kIsFinite) {
        v = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
        v = _mm256_max_ps(_mm256_min_ps(v, most), least);
      }
      steps[k] = _mm256_cvtps_epi32(v);
      if constexpr (kStep == 1)
        steps[k] =
            _mm256_add_epi32(steps[k], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(affines.zero_point + j)));
    }
    __m256i low = _mm256_packs_epi32(steps[0], steps[1]), high = _mm256_packs_epi32(steps[2], steps[3]);
    if constexpr (kStep == 0) low = _mm256_adds_epi16(low, zero_point), high = _mm256_adds_epi16(high, zero_point);
    const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    const __m256i clamped = _mm256_max_epi8(codes, lowest);
    if (streams)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), clamped);
    else
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), clamped);
  }
  return i;
}
#else
template <int kStep, bool kIsFinite, class T>
int64_t encode_blocks(const T*, const T*, const Affines&, int64_t, int8_t*, int64_t, bool) {
  return 0;
}
#endif

// NaN, which stands on the zero point, is inside the range.
template <int kStep>
[[gnu::noinline]] void mask(const float* __restrict grad, const float* __restrict x, const Affines& __restrict affines,
                            int64_t first, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t j = first + kStep * i;
    const float steps = rintf(x[i] * affines.inverse[j]);
    const bool is_outside = (steps < affines.lowest[j]) | (steps > affines.highest[j]);  // || would be a branch
    out[i] = is_outside ? 0.0f : grad[i];
  }
}

// ------------------------------------------------------------------------------------------------------- random
constexpr int kNoiseBlock = 32;

#if defined(__AVX2__)
// philox() of eight counters. Every 64-bit lane holds a word in its low half; what is in the high half no
// multiplication sees. Two registers of each word, since the latency of a round is twice its work.
inline void fill_noise_block(uint64_t counter, uint64_t seed, float* noise) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53u), m1 = _mm256_set1_epi64x(0xCD9E8D57u);
  __m256i c0[2], c1[2], c2[2], c3[2];
  for (int h = 0; h < 2; ++h) {
    c0[h] = _mm256_add_epi64(_mm256_set1_epi64x(counter + 4 * h), _mm256_setr_epi64x(0, 1, 2, 3));
    c1[h] = _mm256_srli_epi64(c0[h], 32);
    c2[h] = c3[h] = _mm256_setzero_si256();
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int h = 0; h < 2; ++h) {
      const __m256i p0 = _mm256_mul_epu32(m0, c0[h]), p1 = _mm256_mul_epu32(m1, c2[h]);
      c0[h] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1[h], _mm256_set1_epi64x(k0)));
      c2[h] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3[h], _mm256_set1_epi64x(k1)));
      c1[h] = p1, c3[h] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int h = 0; h < 2; ++h) {
    const __m256i words01 = _mm256_blend_epi32(c0[h], _mm256_slli_epi64(c1[h], 32), 0xaa);
    const __m256i words23 = _mm256_blend_epi32(c2[h], _mm256_slli_epi64(c3[h], 32), 0xaa);
    const __m256i even = _mm256_unpacklo_epi64(words01, words23), odd = _mm256_unpackhi_epi64(words01, words23);
    const __m256i all[2] = {_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31)};
    for (int i = 0; i < 2; ++i) {
      const __m256 steps = _mm256_cvtepi32_ps(_mm256_srli_epi32(all[i], 8));
      _mm256_storeu_ps(noise + 16 * h + 8 * i, _mm256_mul_ps(steps, _mm256_set1_ps(0x1p-24f)));
    }
  }
}
#else
inline void fill_noise_block(uint64_t counter, uint64_t seed, float* noise) {
  for (int i = 0; i < kNoiseBlock; ++i) noise[i] = uniform(philox(counter + i / 4, seed).word[i % 4]);
}
#endif

// Uniform numbers of the elements with logical indices first, first + step, ...
inline void fill_noise(float* noise, int64_t first, int64_t step, int64_t n, uint64_t seed) {
  int64_t i = 0;
  const auto one = [&] {
    const uint64_t index = static_cast<uint64_t>(first + i * step);
    noise[i++] = uniform(philox(index >> 2, seed).word[index & 3]);
  };
  if (step == 1) {
    while (i < n && (first + i) % 4 != 0) one();
    for (; i + kNoiseBlock <= n; i += kNoiseBlock)
      fill_noise_block(static_cast<uint64_t>(first + i) >> 2, seed, noise + i);
  }
  while (i < n) one();
}

// -------------------------------------------------------------------------------------------------------- passes
// Each pass takes elements [begin, end) of a bundle.

inline void given_affines(const float* scale, const int32_t* zero_point, const Walk& walk, const Bundle& bundle,
                          Affines& affines) {
  for (int64_t i = 0; i < bundle.groups; ++i) {
    const int64_t at = bundle.scale + i * walk.scale_step();
    affines.set(i, given_affine(scale[at], zero_point == nullptr ? nullptr : zero_point + at));
  }
}

template <class T>
void find_ranges(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                 Ranges& ranges) {
  const auto* x = static_cast<const T*>(args.x);
  const bool symmetric = args.zero_point == nullptr;
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    prefetch_rows(x, walk, run);
    if (walk.across())
      add_across(x + run.x, walk.x_step(), run.n, symmetric, ranges, run.group);
    else
      add_run(x + run.x, walk.x_step(), run.n, symmetric, ranges, run.group);
  });
}

// Writes scales and zero points too.
inline void solve_affines(const Quantize& args, const Walk& walk, const Bundle& bundle, const Ranges& ranges,
                          Affines& affines) {
  for (int64_t i = 0; i < bundle.groups; ++i) {
    const Affine affine = affine_of(ranges.at(i), args.zero_point == nullptr);
    const int64_t at = bundle.scale + i * walk.scale_step();
    args.scale[at] = affine.scale;
    if (args.zero_point != nullptr) args.zero_point[at] = affine.zero_point;
    affines.set(i, affine);
  }
}

// `ahead`: from an element to the one of the next bundle, whose memory is asked for while this one is in cache, or 0.
template <class T, int kStep>
void encode_pass(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                 const Affines& affines, int64_t ahead) {
  const auto* x = static_cast<const T*>(args.x);
  const bool is_direct = walk.x_step() == 1 && !args.stochastic, streams = walk.streams();
  float staged[kRun], noise[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    auto* out = static_cast<int8_t*>(args.out) + run.out;
    int64_t done = 0;
    prefetch_rows(x, walk, run);
    if (is_direct) {
      // In a group without a scale of its own some x may be infinite or NaN.
      const bool has_inverse = kStep == 0 ? affines.inverse[run.group] != 0.0f : affines.have_inverses;
      const bool is_finite = !args.is_static && has_inverse;
      const T* next = ahead == 0 ? nullptr : x + run.x + ahead;
      done = is_finite ? encode_blocks<kStep, true>(x + run.x, next, affines, run.group, out, run.n, streams)
                       : encode_blocks<kStep, false>(x + run.x, next, affines, run.group, out, run.n, streams);
      if (done == run.n) return;
    }
    const float* from = as_float(x + run.x + done * walk.x_step(), walk.x_step(), staged, run.n - done);
    if (args.stochastic) {
      fill_noise(noise, run.index, walk.index_step(), run.n, args.seed);
      encode<kStep>(from, noise, affines, run.group, out, run.n);
    } else {
      encode<kStep>(from, affines, run.group + kStep * done, out + done, run.n - done);
    }
  });
}

template <class T, int kStep>
void fake_pass(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
               const Affines& affines) {
  const bool streams = walk.streams();
  alignas(32) float staged[kRun], staged_out[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    const float* from = as_float(static_cast<const T*>(args.x) + run.x, walk.x_step(), staged, run.n);
    T* out = static_cast<T*>(args.out) + run.out;
    float* values = room(out, 1, staged_out, streams);
    fake<kStep>(from, affines, run.group, values, run.n);
    settle(values, out, 1, run.n, streams);
  });
}

template <class T, int kStep>
void quantize_pass(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                   const Affines& affines, int64_t ahead = 0) {
  if (args.fake)
    fake_pass<T, kStep>(args, walk, bundle, begin, end, affines);
  else
    encode_pass<T, kStep>(args, walk, bundle, begin, end, affines, ahead);
}

template <class T, int kStep>
void dequantize_pass(const Dequantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end) {
  Affines affines;
  given_affines(args.scale, args.zero_point, walk, bundle, affines);
  const bool streams = walk.streams();
  alignas(32) float staged[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    T* out = static_cast<T*>(args.out) + run.x;
    float* values = room(out, walk.x_step(), staged, streams);
    decode<kStep>(args.values + run.out, affines, run.group, values, run.n);
    settle(values, out, walk.x_step(), run.n, streams);
  });
}

template <class T, int kStep>
void straight_through_pass(const StraightThrough& args, const Walk& walk, const Bundle& bundle, int64_t begin,
                           int64_t end) {
  Affines affines;
  given_affines(args.scale, args.zero_point, walk, bundle, affines);
  const bool streams = walk.streams();
  alignas(32) float staged_grad[kRun], staged_x[kRun], staged_out[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    const float* grad = as_float(static_cast<const T*>(args.grad) + run.out, staged_grad, run.n);
    const float* x = as_float(static_cast<const T*>(args.x) + run.x, walk.x_step(), staged_x, run.n);
    T* out = static_cast<T*>(args.out) + run.out;
    float* values = room(out, 1, staged_out, streams);
    mask<kStep>(grad, x, affines, run.group, values, run.n);
    settle(values, out, 1, run.n, streams);
  });
}

}  // namespace amp_kernels::cpu
