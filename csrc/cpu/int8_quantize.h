// Quantization, dequantization, fake quantization and its gradient on a CPU. A pass goes over one band (int8_walk.h),
// or over a piece of one. The table shows how many bytes a pass reads and writes per element: first if its
// floating-point numbers have 16 bits, and then if they are fp32.
//
//                                                             bytes:  16 bits  fp32
//   codes       x -> clamp(rint(x / scale) + zero_point)                 3        5
//   fake        x -> (code - zero_point) * scale                         4        8
//   dequantize  code -> (code - zero_point) * scale                      3        5
//   gradient    grad where the code was not clamped, else 0              6       12
//
// If the scale is not given, x is read twice, first to compute the scale, and then for the results. The second read is
// from the core's cache, if the band fits there. In each pass a thread converts eight elements of a segment at a time.
// With AVX2 and F16C, it converts 32 at a time if they become codes that are rounded to nearest.
#pragma once

#include "int8_codes.h"
#include "int8_noise.h"

namespace amp_kernels::cpu {

// ------------------------------------------------------------------------------------------------------- memory
// Stores the results of f, rounded to T, as out[0] to out[n - 1]. f(Lanes{}, i) must return eight results. The first of
// them is result i. f(float{}, i) must return only result i. If results are streamed (stored past the caches), ask(i)
// is called before every kAsk elements, and may prefetch.
constexpr int64_t kAsk = 32;

template <class T, class Ask, class F>
[[gnu::always_inline]] inline void write(T* out, int64_t n, bool streams, const Ask& ask, const F& f) {
  int64_t i = 0;
  if (streams && reinterpret_cast<uintptr_t>(out) % sizeof(Lanes) == 0)
    for (; i + kAsk <= n; i += kAsk) {
      ask(i);
      for (int64_t k = 0; k < kAsk; k += kLanes) stream_lanes(f(Lanes{}, i + k), out + i + k);
    }
  for (; i + kLanes <= n; i += kLanes) store_lanes(f(Lanes{}, i), out + i);
  float rest[kLanes];
  for (int64_t k = i; k < n; ++k) rest[k - i] = f(float{}, k);
  store(rest, out + i, n - i);
}

// -------------------------------------------------------------------------------------------------------- passes
// Each pass handles elements [begin, end) of a band, counted row by row.

inline void given_affines(const float* scale, const int32_t* zero_point, const Band& band, Affines& affines) {
  for (int64_t i = 0; i < band.groups; ++i) {
    const int64_t at = band.first_group + i;
    affines.set(i, given_affine(scale[at], zero_point == nullptr ? nullptr : zero_point + at));
    affines.are_codes &= affines.lowest[i] <= 0.0f && affines.highest[i] >= 0.0f;
  }
  affines.finish(band.groups);
}

template <bool kSymmetric, class T>
void find_ranges(const T* x, const Walk& walk, const Band& band, int64_t begin, int64_t end, int64_t ahead,
                 Ranges& ranges) {
  if (walk.by_columns())
    return walk.for_each_strip(band, begin, end, [&](const Segment& first, int64_t rows) {
      add_strip<kSymmetric>(x + first.at, walk.row_size(), rows, first.n, ranges, ahead);
    });
  const auto add = [&](const Segment& part) {
    ranges.add(part.group, range_of<kSymmetric>(x + part.at, part.n, ahead));
  };
  if (walk.are_rows_groups(band, begin, end))
    walk.for_each_row(band, add);
  else
    walk.for_each_segment(band, begin, end, add);
}

template <class T>
void find_ranges(const Quantize& args, const Walk& walk, const Band& band, int64_t begin, int64_t end, int64_t ahead,
                 Ranges& ranges) {
  const auto* x = static_cast<const T*>(args.x);
  if (args.zero_point == nullptr)
    find_ranges<true>(x, walk, band, begin, end, ahead, ranges);
  else
    find_ranges<false>(x, walk, band, begin, end, ahead, ranges);
}

template <bool kSymmetric>
[[gnu::noinline]] void solve_affines(const Ranges& __restrict ranges, int64_t groups, Affines& __restrict affines) {
  for (int64_t i = 0; i < groups; ++i) affines.set(i, affine_of(ranges.at(i).extremes(), kSymmetric));
  affines.finish(groups);
}

// Computes the affines of a band from its ranges, and writes its scales and zero points.
inline void solve_affines(const Quantize& args, const Band& band, const Ranges& ranges, Affines& affines) {
  if (args.zero_point == nullptr)
    solve_affines<true>(ranges, band.groups, affines);
  else
    solve_affines<false>(ranges, band.groups, affines);
  std::copy_n(affines.scale, band.groups, args.scale + band.first_group);
  if (args.zero_point != nullptr) std::copy_n(affines.zero_point, band.groups, args.zero_point + band.first_group);
}

// Encodes what encode_blocks() and encode_strip() cannot: fewer than kBlock columns, and everything without AVX2 and
// F16C. This function is not inlined. If it were, every call of its caller would touch the stack memory of `staged`.
template <int kStep, class T>
[[gnu::noinline]] void encode_rest(const T* x, const Affines& affines, int64_t first, int8_t* out, int64_t n) {
  float staged[kSegment];
  for (int64_t i = 0; i < n; i += kSegment) {
    const int64_t count = std::min(kSegment, n - i);
    encode<kStep>(as_float(x + i, staged, count), affines, first + kStep * i, out + i, count);
  }
}

// Encodes n neighbours of one group, rounding to nearest. If n is less than kBlock, a copy of them is padded with
// zeros.
template <bool kIsFinite, class T>
[[gnu::always_inline]] inline void encode_row(const T* x, int64_t ahead, const float* inverse, const int* zero_point,
                                              bool symmetric, int8_t* out, int64_t n, bool streams) {
  if (n >= kBlock) return encode_blocks<kIsFinite>(x, ahead, inverse, zero_point, symmetric, out, n, streams);
  T few[kBlock] = {};
  int8_t codes[kBlock];
  std::memcpy(few, x, n * sizeof(T));
  encode_blocks<kIsFinite>(few, 0, inverse, zero_point, symmetric, codes, kBlock, false);
  std::memcpy(out, codes, n);
}

template <class T>
[[gnu::always_inline]] inline void encode_row(const T* x, int64_t ahead, const float* inverse, const int* zero_point,
                                              bool symmetric, bool is_finite, int8_t* out, int64_t n, bool streams) {
  if (is_finite)
    encode_row<true>(x, ahead, inverse, zero_point, symmetric, out, n, streams);
  else
    encode_row<false>(x, ahead, inverse, zero_point, symmetric, out, n, streams);
}

// Quantizes a band of short groups. Each group is one row. Rows are handled in batches, in this order:
//
//   range 0   range 1   ...  range 7   solve     range 8   range 9  ...
//                                                encode 0  encode 1 ...
//
// After the range of each row, a row of the previous batch is encoded. So no row waits for the division that makes its
// scale. Memory is also read nearly as evenly as in a single pass.
//
// For 16M fp16 elements in groups of 128, two cores of a Zen 4 take 1.03 ms. If they only move the data, they take
// 0.99 ms. If they read 8 KiB for the ranges, and then the same 8 KiB for the codes, they take 1.22 ms. On a Zen 4
// `ahead` is 0. With prefetching, they would take a tenth longer than 1.03 ms.
constexpr int64_t kBatchRows = 8;      // most rows of a batch: the divisions for eight scales are done at once
constexpr int64_t kBatchBytes = 2048;  // most bytes of x in a batch

template <class T>
bool are_short_rows(const Quantize& args, const Walk& walk, const Band& band) {
  const bool are_short = band.length * static_cast<int64_t>(sizeof(T)) <= kBatchBytes;
  return kBlock > 0 && are_short && walk.are_rows_groups(band, 0, walk.size(band)) && !args.fake && !args.stochastic;
}

// The ranges of the rows of a batch, and later their affines. Each kind of number has an array of its own, so that the
// compiler vectorises solve().
struct RowBatch {
  uint32_t high[kBatchRows], low[kBatchRows];
  float scale[kBatchRows], inverse[kBatchRows];
  int zero_point[kBatchRows];

  void set(int64_t i, const Range& range) { high[i] = range.high, low[i] = range.low; }

  template <bool kSymmetric>
  [[gnu::noinline]] void solve() {
    for (int64_t i = 0; i < kBatchRows; ++i) {
      const Affine affine = affine_of(Range{high[i], low[i]}.extremes(), kSymmetric);
      scale[i] = affine.scale, inverse[i] = affine.inverse, zero_point[i] = affine.zero_point;
    }
  }
};

template <bool kSymmetric, class T>
void quantize_short_rows(const Quantize& args, const Walk& walk, const Band& band) {
  const bool streams = walk.streams();
  const int64_t ahead = walk.ahead(band, sizeof(T));
  const int64_t rows = band.rows, length = band.length;
  const int64_t batch_rows = std::clamp<int64_t>(kBatchBytes / (length * sizeof(T)), 1, kBatchRows);
  const auto length_of = [&](int64_t row) { return row + 1 == rows ? band.last_length : length; };
  const T *x = static_cast<const T*>(args.x) + band.at, *next = x;
  auto* out = static_cast<int8_t*>(args.out) + band.at;
  int64_t group = band.first_group;
  RowBatch batch{};
  for (int64_t first = 0; first < rows + batch_rows; first += batch_rows) {
    for (int64_t i = 0; i < batch_rows; ++i) {
      const int64_t row = first + i, before = row - batch_rows;
      if (row < rows) batch.set(i, range_of<kSymmetric>(next, length_of(row), ahead)), next += length;
      if (before < 0 || before >= rows) continue;
      const bool is_finite = batch.inverse[i] != 0.0f;
      encode_row(x, 0, batch.inverse + i, batch.zero_point + i, kSymmetric, is_finite, out, length_of(before), streams);
      args.scale[group] = batch.scale[i];
      if constexpr (!kSymmetric) args.zero_point[group] = batch.zero_point[i];
      x += length, out += length, ++group;
    }
    batch.template solve<kSymmetric>();
  }
}

// Encodes columns, a strip of up to kStripRows rows at a time. In fp32, the rows of a strip are encoded side by side:
// 64 columns of every row, then the next 64 columns. For 4096 x 4096 elements, this takes two cores of a Zen 4 an
// eighth less time than encoding row by row. In 16 bits, each row is encoded to its end before the next one. Side by
// side, fp16 would take up to a tenth more time, because it writes more codes for each byte that it reads.
template <class T>
void encode_columns(const Quantize& args, const Walk& walk, const Band& band, int64_t begin, int64_t end,
                    const Affines& affines, int64_t ahead) {
  const bool symmetric = args.zero_point == nullptr, is_finite = !args.is_static && affines.have_inverses;
  const bool are_few = kBlock == 0 || band.length < kBlock;
  const auto encode_some = is_finite ? encode_strip<true, T> : encode_strip<false, T>;
  walk.for_each_strip(band, begin, end, [&](const Segment& strip, int64_t rows) {
    const int64_t side_by_side = are_few || sizeof(T) == 2 ? 1 : rows;
    for (int64_t r = 0; r < rows; r += side_by_side) {
      const T* x = static_cast<const T*>(args.x) + strip.at + r * walk.row_size();
      int8_t* out = static_cast<int8_t*>(args.out) + strip.at + r * walk.row_size();
      if (are_few)
        encode_rest<1>(x, affines, 0, out, strip.n);
      else
        encode_some(x, walk.row_size(), side_by_side, ahead, affines.inverse, affines.zero_point, symmetric, out,
                    strip.n, walk.streams());
    }
  });
}

template <class T, int kStep>
void encode_stochastically(const Quantize& args, const Walk& walk, const Band& band, int64_t begin, int64_t end,
                           const Affines& affines) {
  float staged[kSegment], noise[kSegment];
  walk.for_each_segment(band, begin, end, [&](const Segment& part) {
    fill_noise(noise, part.at, part.n, args.seed);
    const float* x = as_float(static_cast<const T*>(args.x) + part.at, staged, part.n);
    encode<kStep>(x, noise, affines, part.group, static_cast<int8_t*>(args.out) + part.at, part.n);
  });
}

template <class T>
void encode_rows(const Quantize& args, const Walk& walk, const Band& band, int64_t begin, int64_t end,
                 const Affines& affines, int64_t ahead) {
  const bool streams = walk.streams();
  const auto encode_one = [&](const Segment& part) {
    const T* x = static_cast<const T*>(args.x) + part.at;
    int8_t* out = static_cast<int8_t*>(args.out) + part.at;
    const float* inverse = affines.inverse + part.group;
    // If the scale is given, or if the inverse is 0, some x may be infinite or NaN, or far outside of the range that
    // codes cover. encode_row() must then not assume that x * inverse is finite and small.
    const bool is_finite = !args.is_static && *inverse != 0.0f;
    if constexpr (kBlock > 0)
      encode_row(x, ahead, inverse, affines.zero_point + part.group, args.zero_point == nullptr, is_finite, out, part.n,
                 streams);
    else
      encode_rest<0>(x, affines, part.group, out, part.n);
  };
  if (walk.are_rows_groups(band, begin, end))
    walk.for_each_row(band, encode_one);
  else
    walk.for_each_segment(band, begin, end, encode_one);
}

// Fake quantization. kIsRegular promises that every inverse is finite and not 0. x * inverse is then NaN only if x is
// NaN. Such a NaN passes through limited(), so no comparison is needed to keep it.
template <class T, int kStep, bool kIsRegular>
void fake_pass(const Quantize& args, const Walk& walk, const Band& band, int64_t begin, int64_t end,
               const Affines& affines, int64_t ahead) {
  walk.for_each_segment(band, begin, end, [&](const Segment& part) {
    const T* x = static_cast<const T*>(args.x) + part.at;
    const OfGroups<kStep> inverse(affines.inverse, part.group), scale(affines.scale, part.group);
    const OfGroups<kStep> lowest(affines.lowest, part.group), highest(affines.highest, part.group);
    const auto ask = [&](int64_t i) {
      if (ahead != 0) ask_for(x + i, kAsk, ahead);
    };
    write(static_cast<T*>(args.out) + part.at, part.n, walk.streams(), ask, [&](auto width, int64_t i) {
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

// Stores f(i), rounded to T, as out[i]. This function is used if zero points are not codes: f then computes one element
// at a time.
template <class T, class F>
void write_each(T* out, int64_t n, const F& f) {
  float results[kSegment];
  for (int64_t i = 0; i < n; ++i) results[i] = f(i);
  store(results, out, n);
}

template <class T, int kStep>
void fake_pass_by_formula(const Quantize& args, const Walk& walk, const Band& band, int64_t begin, int64_t end,
                          const Affines& affines) {
  walk.for_each_segment(band, begin, end, [&](const Segment& part) {
    const T* x = static_cast<const T*>(args.x) + part.at;
    write_each(static_cast<T*>(args.out) + part.at, part.n, [&](int64_t i) {
      const Affine affine = affines.at(part.group + kStep * i);
      const float value = static_cast<float>(x[i]);
      return fake_of(value, code_of(value, affine), affine);
    });
  });
}

template <class T, int kStep>
void quantize_pass(const Quantize& args, const Walk& walk, const Band& band, int64_t begin, int64_t end,
                   const Affines& affines, int64_t ahead) {
  if (args.fake && !affines.are_codes)
    fake_pass_by_formula<T, kStep>(args, walk, band, begin, end, affines);
  else if (args.fake && affines.have_inverses)
    fake_pass<T, kStep, true>(args, walk, band, begin, end, affines, ahead);
  else if (args.fake)
    fake_pass<T, kStep, false>(args, walk, band, begin, end, affines, ahead);
  else if (args.stochastic)
    encode_stochastically<T, kStep>(args, walk, band, begin, end, affines);
  else if constexpr (kStep == 1)
    encode_columns<T>(args, walk, band, begin, end, affines, ahead);
  else
    encode_rows<T>(args, walk, band, begin, end, affines, ahead);
}

template <class T, int kStep>
void dequantize_pass(const Dequantize& args, const Walk& walk, const Band& band, int64_t begin, int64_t end) {
  Affines affines;
  given_affines(args.scale, args.zero_point, band, affines);
  walk.for_each_segment(band, begin, end, [&](const Segment& part) {
    const int8_t* codes = args.values + part.at;
    const OfGroups<kStep> scale(affines.scale, part.group);
    const auto ask = [&](int64_t i) { ask_for(codes + i, kAsk); };
    write(static_cast<T*>(args.out) + part.at, part.n, walk.streams(), ask, [&](auto width, int64_t i) {
      using V = decltype(width);
      const V steps = steps_of<V, kStep>(codes + i, affines.zero_point + part.group + kStep * i);
      return steps * scale.template at<V>(i);
    });
  });
}

// The gradient of fake quantization. The code of NaN is the zero point. If the zero point is inside the range of codes,
// the gradient is therefore kept where x is NaN.
template <class T, int kStep>
void straight_through_pass(const StraightThrough& args, const Walk& walk, const Band& band, int64_t begin,
                           int64_t end) {
  Affines affines;
  given_affines(args.scale, args.zero_point, band, affines);
  walk.for_each_segment(band, begin, end, [&](const Segment& part) {
    const T* grad = static_cast<const T*>(args.grad) + part.at;
    const T* x = static_cast<const T*>(args.x) + part.at;
    const OfGroups<kStep> inverse(affines.inverse, part.group);
    const OfGroups<kStep> lowest(affines.lowest, part.group), highest(affines.highest, part.group);
    const auto ask = [&](int64_t i) { ask_for(x + i, kAsk), ask_for(grad + i, kAsk); };
    T* out = static_cast<T*>(args.out) + part.at;
    if (!affines.are_codes)
      return write_each(out, part.n, [&](int64_t i) {
        const bool keeps = is_inside(static_cast<float>(x[i]), affines.at(part.group + kStep * i));
        return keeps ? static_cast<float>(grad[i]) : 0.0f;
      });
    write(out, part.n, walk.streams(), ask, [&](auto width, int64_t i) {
      using V = decltype(width);
      const V steps = rounded(read<V>(x + i) * inverse.template at<V>(i));
      const V above = steps < lowest.template at<V>(i) ? V{} : read<V>(grad + i);
      return steps > highest.template at<V>(i) ? V{} : above;
    });
  });
}

}  // namespace amp_kernels::cpu
