// Quantization, dequantization and the straight-through gradient on a CPU: runs of a layout, eight elements at a time.
#pragma once

#include <cmath>

#include "convert.h"
#include "int8_noise.h"
#include "int8_runs.h"

namespace amp_kernels::cpu {

// ------------------------------------------------------------------------------------------------------- memory
template <class T>
const float* as_float(const T* from, int64_t step, float* staged, int64_t n) {
  if (step == 1) return as_float(from, staged, n);
  for (int64_t i = 0; i < n; ++i) staged[i] = static_cast<float>(from[i * step]);
  return staged;
}

// One element of any dtype (V float), or eight (Lanes).
template <class V, class T>
[[gnu::always_inline]] inline V read(const T* from) {
  if constexpr (std::is_same_v<V, float>)
    return static_cast<float>(*from);
  else
    return load_lanes(from);
}

// n neighbours of x: where they lie, or gathered in `staged`.
template <class T>
const T* in_a_row(const T* x, int64_t step, T* staged, int64_t n) {
  if (step == 1) return x;
  for (int64_t i = 0; i < n; ++i) staged[i] = x[i * step];
  return staged;
}

// out[i * step] = f(i), rounded to T; f is called with a value of the type it is to return, Lanes or float. Before
// every kAsk elements ask(i) may fetch what comes.
constexpr int64_t kAsk = 32;

template <class T, class Ask, class F>
[[gnu::always_inline]] inline void write(T* out, int64_t step, int64_t n, bool streams, const Ask& ask, const F& f) {
  T staged[kRun];
  T* to = step == 1 ? out : staged;
  int64_t i = 0;
  if (streams && to == out && reinterpret_cast<uintptr_t>(out) % sizeof(Lanes) == 0)
    for (; i + kAsk <= n; i += kAsk) {
      ask(i);
      for (int64_t k = 0; k < kAsk; k += kLanes) stream_lanes(f(Lanes{}, i + k), to + i + k);
    }
  for (; i + kLanes <= n; i += kLanes) store_lanes(f(Lanes{}, i), to + i);
  float rest[kLanes];
  for (int64_t k = i; k < n; ++k) rest[k - i] = f(float{}, k);
  store(rest, to + i, n - i);
  for (i = 0; to != out && i < n; ++i) out[i * step] = to[i];
}

// ------------------------------------------------------------------------------------------------------- ranges
// Floats without their sign are ordered as the integers that their bits are, with NaN above all; and of integers a
// maximum is one instruction everywhere. Of 16 bits twice as many go to a register.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int16_t>;
template <class T>
constexpr Bits<T> kSign = std::numeric_limits<Bits<T>>::min();

// A group's extremes as bits: the highest, and of the negative ones the lowest, its sign taken off; of symmetric ranges
// the largest magnitude alone.
struct Range {
  uint32_t high, low;

  Extremes extremes() const { return {std::max(high, low), -as<float>(low), as<float>(high)}; }
};

// Those of a bundle's groups.
struct Ranges {
  int32_t high[kRoom];
  int32_t low[kRoom];

  explicit Ranges(int64_t groups) {
    std::fill_n(high, groups, 0);
    std::fill_n(low, groups, 0);
  }

  Range at(int64_t i) const { return {static_cast<uint32_t>(high[i]), static_cast<uint32_t>(low[i])}; }

  void set(int64_t i, const Range& range) { high[i] = range.high, low[i] = range.low; }

  void add(int64_t i, const Range& other) {
    high[i] = std::max<int32_t>(high[i], other.high);
    low[i] = std::max<int32_t>(low[i], other.low);
  }
};

using Shorts = int16_t __attribute__((vector_size(32)));
template <class T>
using BitLanes = std::conditional_t<sizeof(T) == 4, Integers, Shorts>;

// The largest lane, none of which is negative.
template <class T>
[[gnu::always_inline]] inline Bits<T> largest(const BitLanes<T>& lanes) {
#if defined(__AVX2__)
  const __m256i all = as<__m256i>(lanes);
  __m128i four = _mm256_castsi256_si128(all), other = _mm256_extracti128_si256(all, 1);
  if constexpr (sizeof(T) == 2) {  // x86 finds the smallest of eight in one instruction
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

// `ahead`: bytes from what is read to what is asked for, 0: nothing is.
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
    add(load(x + n - kWidth), 1);  // some of them again
  } else if (n % kWidth != 0) {
    T few[kWidth] = {};  // zeros, which every range contains
    std::memcpy(few, x, n * sizeof(T));
    add(load(few), 1);
  }
  raise(high[0], high[1]), raise(low[0], low[1]);
  const auto wide = [](Bits<T> bits) { return as<uint32_t>(static_cast<float>(as<T>(bits))); };
  return {wide(largest<T>(high[0])), kSymmetric ? 0 : wide(largest<T>(low[0]))};
}

// Groups from `first` on, an element in each of `rows` rows. The rows are read side by side: one after the other they
// would read and write the ranges as often as x, and in runs short enough for L1 memory is fetched late.
template <bool kSymmetric, class T>
void add_strip(const T* x, int64_t row_step, int64_t rows, int64_t n, Ranges& ranges, int64_t first, int64_t ahead) {
  const auto add = [&](auto high, int64_t i) {  // Integers or int32_t
    using V = decltype(high);
    using Floats = std::conditional_t<std::is_same_v<V, Integers>, Lanes, float>;
    const auto raise = [](V& to, const V& bits) { to = bits > to ? bits : to; };
    V low;
    std::memcpy(&high, ranges.high + first + i, sizeof(high));
    std::memcpy(&low, ranges.low + first + i, sizeof(low));
    for (int64_t r = 0; r < rows; ++r) {
      const V bits = as<V>(read<Floats>(x + r * row_step + i));
      raise(high, kSymmetric ? bits & ~kSign<float> : bits);
      if constexpr (!kSymmetric) raise(low, bits ^ kSign<float>);
    }
    std::memcpy(ranges.high + first + i, &high, sizeof(high));
    if constexpr (!kSymmetric) std::memcpy(ranges.low + first + i, &low, sizeof(low));
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (i * sizeof(T) % 64 == 0)
      for (int64_t r = 0; r < rows; ++r) ask_for(x + r * row_step + i, 1, ahead);
    add(Integers{}, i);
  }
  for (; i < n; ++i) add(int32_t{}, i);
}

// -------------------------------------------------------------------------------------------------------- codes
// The affines of a bundle's groups, with the clamp before the rounding: the two commute, as the clamp's ends are
// integers, and then a code takes a third of the instructions of code_of. A zero point is within its range, so that NaN
// taken for 0 gives it, and so does an inverse of 0.
struct Affines {
  float scale[kRoom];
  float inverse[kRoom];
  float lowest[kRoom];  // the clamp's ends, in steps from the zero point
  float highest[kRoom];
  int zero_point[kRoom];
  bool have_inverses;  // all of them, and finite ones

  void set_scale(int64_t i, const Affine& affine) {
    scale[i] = affine.scale, inverse[i] = affine.inverse, zero_point[i] = affine.zero_point;
  }

  void set_ends(int64_t i, const Affine& affine) {
    lowest[i] = static_cast<float>(affine.low - affine.zero_point);
    highest[i] = static_cast<float>(127 - affine.zero_point);
  }

  void set(int64_t i, const Affine& affine) { set_scale(i, affine), set_ends(i, affine); }

  // Given zero points may be no codes: as everywhere steps are then bounded by 512, and whatever is added to 16 bits.
  void bound(int64_t groups) {
    constexpr float kBound = 512.0f;
    for (int64_t i = 0; i < groups; ++i) {
      set(i, {scale[i], inverse[i], std::clamp(zero_point[i], -1024, 1024), lowest_code(/*symmetric=*/false)});
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
  const V raised = steps < lowest ? lowest : steps;  // NaN stays
  return raised > highest ? highest : raised;
}

template <class V>
[[gnu::always_inline]] inline V clamped(const V& steps, const V& lowest, const V& highest) {
  return limited(steps == steps ? steps : V{}, lowest, highest);
}

// Added to |x| < 2^22 it leaves x, rounded to nearest even, as an integer in the low bits.
constexpr float kRounder = 12582912.0f;

// What groups have: with kStep 0 one number of one group, kept in a register, with 1 each of the next.
template <int kStep>
class Side {
 public:
  Side(const float* of_groups, int64_t group) : first_(of_groups + group), one_(*first_) {}

  // For the i-th element of a run (V float) or eight (Lanes).
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

// Codes as steps from their zero points.
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

// The loops over a run's elements: with kStep 0 all share one affine, with 1 each has its own, the first that of group
// `first`. g++ vectorises them only as they are, each a function of its own and every affine's member a scalar: inlined
// it forgets what does not alias, and a struct of members it keeps in memory.
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

// encode() from where x lies, in half the instructions or less, as the packing saturates; returns how many it did.
// What lies `ahead` bytes from what is read is asked for. Out of range _mm256_cvtps_epi32 gives the most
// negative integer. kIsFinite: every |x * inverse| is far below 2^31, as in a group that made its own scale.
template <int kStep, bool kIsFinite, class T>
int64_t encode_blocks(const T* x, int64_t ahead, const Affines& affines, int64_t first, bool symmetric, int8_t* out,
                      int64_t n, bool streams) {
  streams = streams && reinterpret_cast<uintptr_t>(out) % 32 == 0;
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // both packs work in halves of a register
  const __m256 most = _mm256_set1_ps(512.0f), least = _mm256_set1_ps(-512.0f);
  const __m256i lowest = _mm256_set1_epi8(static_cast<int8_t>(lowest_code(symmetric)));
  const __m256 inverse = _mm256_set1_ps(affines.inverse[first]);
  const __m256i zero_point = _mm256_set1_epi16(static_cast<int16_t>(affines.zero_point[first]));
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    if (kStep == 1 || ahead != 0) ask_for(x + i, kBlock, ahead);
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
      if (kStep == 1 && !symmetric)
        steps[k] =
            _mm256_add_epi32(steps[k], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(affines.zero_point + j)));
    }
    __m256i low = _mm256_packs_epi32(steps[0], steps[1]), high = _mm256_packs_epi32(steps[2], steps[3]);
    if (kStep == 0 && !symmetric) low = _mm256_adds_epi16(low, zero_point), high = _mm256_adds_epi16(high, zero_point);
    __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    if constexpr (!kIsFinite) codes = _mm256_max_epi8(codes, lowest);
    if (streams)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), codes);
    else
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), codes);
  }
  return i;
}
#else
constexpr int64_t kBlock = 0;

template <int kStep, bool kIsFinite, class T>
int64_t encode_blocks(const T*, int64_t, const Affines&, int64_t, bool, int8_t*, int64_t, bool) {
  return 0;
}
#endif

// -------------------------------------------------------------------------------------------------------- passes
// Each pass takes elements [begin, end) of a bundle.

inline void given_affines(const float* scale, const int32_t* zero_point, const Walk& walk, const Bundle& bundle,
                          Affines& affines) {
  for (int64_t i = 0; i < bundle.groups; ++i) {
    const int64_t at = bundle.scale + i * walk.scale_step();
    affines.set(i, given_affine(scale[at], zero_point == nullptr ? nullptr : zero_point + at));
  }
  affines.finish(bundle.groups);
}

template <bool kSymmetric, class T>
void find_ranges(const T* x, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end, int64_t ahead,
                 Ranges& ranges) {
  if (walk.across() && walk.x_step() == 1)
    return walk.for_each_strip(bundle, begin, end, [&](const Run& run, int64_t rows) {
      add_strip<kSymmetric>(x + run.x, walk.row_step(), rows, run.n, ranges, 0, ahead);
    });
  if (walk.are_rows_groups(bundle, begin, end) && walk.x_step() == 1)
    return walk.for_each_row(
        bundle, [&](const Run& row) { ranges.add(row.group, range_of<kSymmetric>(x + row.x, row.n, ahead)); });
  T staged[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    const T* row = in_a_row(x + run.x, walk.x_step(), staged, run.n);
    if (walk.across())
      add_strip<kSymmetric>(row, 0, 1, run.n, ranges, run.group, ahead);
    else
      ranges.add(run.group, range_of<kSymmetric>(row, run.n, ahead));
  });
}

template <class T>
void find_ranges(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                 int64_t ahead, Ranges& ranges) {
  const auto* x = static_cast<const T*>(args.x);
  if (args.zero_point == nullptr)
    find_ranges<true>(x, walk, bundle, begin, end, ahead, ranges);
  else
    find_ranges<false>(x, walk, bundle, begin, end, ahead, ranges);
}

template <bool kSymmetric>
[[gnu::noinline]] void solve_affines(const Ranges& __restrict ranges, int64_t groups, Affines& __restrict affines) {
  for (int64_t i = 0; i < groups; ++i) affines.set(i, affine_of(ranges.at(i).extremes(), kSymmetric));
  affines.finish(groups);
}

// Writes scales and zero points too.
inline void solve_affines(const Quantize& args, const Walk& walk, const Bundle& bundle, const Ranges& ranges,
                          Affines& affines) {
  if (args.zero_point == nullptr)
    solve_affines<true>(ranges, bundle.groups, affines);
  else
    solve_affines<false>(ranges, bundle.groups, affines);
  for (int64_t i = 0; i < bundle.groups; ++i) {
    const int64_t at = bundle.scale + i * walk.scale_step();
    args.scale[at] = affines.scale[i];
    if (args.zero_point != nullptr) args.zero_point[at] = affines.zero_point[i];
  }
}

// What is too short for encode_blocks. Apart, since the stack that it takes is touched at every call.
template <int kStep, class T>
[[gnu::noinline]] void encode_rest(const T* x, const Affines& affines, int64_t first, int8_t* out, int64_t n) {
  float staged[kRun];
  for (int64_t i = 0; i < n; i += kRun) {
    const int64_t count = std::min(kRun, n - i);
    encode<kStep>(as_float(x + i, staged, count), affines, first + kStep * i, out + i, count);
  }
}

// Dense elements, to the nearest code.
template <int kStep, class T>
[[gnu::always_inline]] inline void encode_row(const T* x, int64_t ahead, const Affines& affines, bool symmetric,
                                              bool is_finite, int64_t group, int8_t* out, int64_t n, bool streams) {
  const auto encode = [&](const T* from, int64_t first, int8_t* to, int64_t count, bool may_stream) {
    const int64_t of = group + kStep * first;
    return is_finite ? encode_blocks<kStep, true>(from, ahead, affines, of, symmetric, to, count, may_stream)
                     : encode_blocks<kStep, false>(from, ahead, affines, of, symmetric, to, count, may_stream);
  };
  const int64_t done = encode(x, 0, out, n, streams), last = n - kBlock;
  if (done == n) return;
  if (done > 0) {
    encode(x + last, last, out + last, kBlock, false);  // some of them again
    return;
  }
  if constexpr (kBlock > 0 && kStep == 0) {
    T few[kBlock] = {};
    int8_t codes[kBlock];
    std::memcpy(few, x, n * sizeof(T));
    encode(few, 0, codes, kBlock, false);
    std::memcpy(out, codes, n);
  } else {
    encode_rest<kStep>(x, affines, group, out, n);
  }
}

// Short groups that are dense rows: some are read for their ranges, then those before them are encoded, so that nothing
// waits for the divisions of a scale, and memory is read nearly as evenly as if once. Two cores of a Zen 4 take 1.03 ms
// for 16M fp16 in groups of 128, 0.99 if they only move them, and 1.22 if they read 8 KiB and then again; to ask for
// memory ahead costs a tenth.
constexpr int64_t kTogether = 8;  // at most, as many as are divided at once
constexpr int64_t kBytesTogether = 2048;

template <class T>
bool are_short_rows(const Quantize& args, const Walk& walk, const Bundle& bundle) {
  const bool are_rows = walk.x_step() == 1 && walk.are_rows_groups(bundle, 0, walk.size(bundle));
  const bool are_short = bundle.length * static_cast<int64_t>(sizeof(T)) <= kBytesTogether;
  return are_rows && are_short && !args.fake && !args.stochastic;
}

template <bool kSymmetric>
[[gnu::noinline]] void solve_together(const Ranges& __restrict ranges, Affines& __restrict affines, int64_t first) {
  for (int64_t i = 0; i < kTogether; ++i) {
    const Affine affine = affine_of(ranges.at(i).extremes(), kSymmetric);
    affines.set_scale(first + i, affine);
    if constexpr (kBlock == 0) affines.set_ends(first + i, affine);  // else nothing is clamped
  }
}

template <bool kSymmetric, class T>
[[gnu::flatten]] void quantize_short_rows(const Quantize& args, const Walk& walk, const Bundle& bundle) {
  const Run down = walk.down();
  const bool streams = walk.streams();
  const int64_t ahead = walk.ahead(bundle, sizeof(T));
  const int64_t rows = bundle.rows, length = bundle.length, step = walk.scale_step();
  const int64_t together = std::clamp<int64_t>(kBytesTogether / (length * sizeof(T)), 1, kTogether);
  const auto length_of = [&](int64_t row) { return row + 1 == rows ? bundle.last_length : length; };
  const T *x = static_cast<const T*>(args.x) + bundle.x, *next = x;
  auto* out = static_cast<int8_t*>(args.out) + bundle.out;
  Ranges ranges(kTogether);
  Affines affines;
  for (int64_t first = 0; first < rows + together; first += together) {
    const int64_t end = std::min(first + together, rows);
    for (int64_t row = first; row < end; ++row, next += down.x)
      ranges.set(row - first, range_of<kSymmetric>(next, length_of(row), ahead));
    if (first < rows) solve_together<kSymmetric>(ranges, affines, first);
    for (int64_t row = first; row < end; ++row) {
      args.scale[bundle.scale + row * step] = affines.scale[row];
      if constexpr (!kSymmetric) args.zero_point[bundle.scale + row * step] = affines.zero_point[row];
    }
    const int64_t solved = std::min(first, rows);
    for (int64_t row = std::max<int64_t>(0, first - together); row < solved; ++row, x += down.x, out += down.out) {
      const bool is_finite = affines.inverse[row] != 0.0f;
      encode_row<0>(x, 0, affines, kSymmetric, is_finite, row, out, length_of(row), streams);
    }
  }
}

template <class T, int kStep>
void encode_pass(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                 const Affines& affines, int64_t ahead) {
  const auto* x = static_cast<const T*>(args.x);
  auto* out = static_cast<int8_t*>(args.out);
  const bool symmetric = args.zero_point == nullptr, streams = walk.streams();
  const bool is_direct = walk.x_step() == 1 && !args.stochastic;
  if (is_direct && kStep == 1) {
    const bool is_finite = !args.is_static && affines.have_inverses;
    return walk.for_each_strip(bundle, begin, end, [&](const Run& run, int64_t rows) {
      for (int64_t r = 0; r < rows; ++r)
        encode_row<kStep>(x + run.x + r * walk.row_step(), ahead, affines, symmetric, is_finite, 0,
                          out + run.out + r * walk.out_row_step(), run.n, streams);
    });
  }
  const auto encode_directly = [&](const Run& run) {
    // In a group without a scale of its own some x may be infinite or NaN.
    const bool is_finite = !args.is_static && affines.inverse[run.group] != 0.0f;
    encode_row<kStep>(x + run.x, ahead, affines, symmetric, is_finite, run.group, out + run.out, run.n, streams);
  };
  if (is_direct && walk.are_rows_groups(bundle, begin, end)) return walk.for_each_row(bundle, encode_directly);
  float staged[kRun], noise[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    if (is_direct) return encode_directly(run);
    const float* from = as_float(x + run.x, walk.x_step(), staged, run.n);
    if (args.stochastic) {
      fill_noise(noise, run.index, walk.index_step(), run.n, args.seed);
      encode<kStep>(from, noise, affines, run.group, out + run.out, run.n);
    } else {
      encode<kStep>(from, affines, run.group, out + run.out, run.n);
    }
  });
}

// kIsRegular: products with the inverses are NaN for NaN alone, which then stays by itself.
template <class T, int kStep, bool kIsRegular>
void fake_pass(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
               const Affines& affines, int64_t ahead) {
  T staged[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    const T* x = in_a_row(static_cast<const T*>(args.x) + run.x, walk.x_step(), staged, run.n);
    const Side<kStep> inverse(affines.inverse, run.group), scale(affines.scale, run.group);
    const Side<kStep> lowest(affines.lowest, run.group), highest(affines.highest, run.group);
    const auto ask = [&](int64_t i) {
      if (ahead != 0) ask_for(x + i, kAsk, ahead);
    };
    write(static_cast<T*>(args.out) + run.out, 1, run.n, walk.streams(), ask, [&](auto width, int64_t i) {
      using V = decltype(width);
      const V value = read<V>(x + i), exact = value * inverse.template at<V>(i);
      const V low = lowest.template at<V>(i), high = highest.template at<V>(i);
      const V steps = kIsRegular ? limited(exact, low, high) : clamped(exact, low, high);
      const V faked = ((steps + kRounder) - kRounder) * scale.template at<V>(i);
      if constexpr (kIsRegular) return faked;
      return value == value ? faked : value;
    });
  });
}

template <class T, int kStep>
void quantize_pass(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                   const Affines& affines, int64_t ahead) {
  if (args.fake && affines.have_inverses)
    fake_pass<T, kStep, true>(args, walk, bundle, begin, end, affines, ahead);
  else if (args.fake)
    fake_pass<T, kStep, false>(args, walk, bundle, begin, end, affines, ahead);
  else
    encode_pass<T, kStep>(args, walk, bundle, begin, end, affines, ahead);
}

template <class T, int kStep>
void dequantize_pass(const Dequantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end) {
  Affines affines;
  given_affines(args.scale, args.zero_point, walk, bundle, affines);
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    const int8_t* codes = args.values + run.out;
    const Side<kStep> scale(affines.scale, run.group);
    const auto ask = [&](int64_t i) { ask_for(codes + i, kAsk); };
    write(static_cast<T*>(args.out) + run.x, walk.x_step(), run.n, walk.streams(), ask, [&](auto width, int64_t i) {
      using V = decltype(width);
      const V steps = steps_of<V, kStep>(codes + i, affines.zero_point + run.group + kStep * i);
      return steps * scale.template at<V>(i);
    });
  });
}

// NaN, which stands on the zero point, is inside the range.
template <class T, int kStep>
void straight_through_pass(const StraightThrough& args, const Walk& walk, const Bundle& bundle, int64_t begin,
                           int64_t end) {
  Affines affines;
  given_affines(args.scale, args.zero_point, walk, bundle, affines);
  T staged[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    const T* grad = static_cast<const T*>(args.grad) + run.out;
    const T* x = in_a_row(static_cast<const T*>(args.x) + run.x, walk.x_step(), staged, run.n);
    const Side<kStep> inverse(affines.inverse, run.group);
    const Side<kStep> lowest(affines.lowest, run.group), highest(affines.highest, run.group);
    const auto ask = [&](int64_t i) { ask_for(x + i, kAsk), ask_for(grad + i, kAsk); };
    write(static_cast<T*>(args.out) + run.out, 1, run.n, walk.streams(), ask, [&](auto width, int64_t i) {
      using V = decltype(width);
      const V steps = rounded(read<V>(x + i) * inverse.template at<V>(i));
      const V above = steps < lowest.template at<V>(i) ? V{} : read<V>(grad + i);
      return steps > highest.template at<V>(i) ? V{} : above;
    });
  });
}

}  // namespace amp_kernels::cpu
