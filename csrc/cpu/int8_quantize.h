// Quantization, dequantization and the straight-through gradient on a CPU: runs of a layout, eight elements at a time.
#pragma once

#include "int8_codes.h"
#include "int8_noise.h"

namespace amp_kernels::cpu {

// ------------------------------------------------------------------------------------------------------- memory
template <class T>
const float* as_float(const T* from, int64_t step, float* staged, int64_t n) {
  if (step == 1) return as_float(from, staged, n);
  for (int64_t i = 0; i < n; ++i) staged[i] = static_cast<float>(from[i * step]);
  return staged;
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

// -------------------------------------------------------------------------------------------------------- passes
// Each pass takes elements [begin, end) of a bundle.

inline void given_affines(const float* scale, const int32_t* zero_point, const Walk& walk, const Bundle& bundle,
                          Affines& affines) {
  for (int64_t i = 0; i < bundle.groups; ++i) {
    const int64_t at = bundle.scale + i * walk.scale_step();
    affines.set(i, given_affine(scale[at], zero_point == nullptr ? nullptr : zero_point + at));
    affines.are_codes &= affines.lowest[i] <= 0.0f && affines.highest[i] >= 0.0f;
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

// Dense elements of one affine, to the nearest code.
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

// Short groups that are dense rows: some are read for their ranges, each followed by encoding one of those before, so
// that nothing waits for the divisions of a scale, and memory is read nearly as evenly as if once. Two cores of a Zen 4
// take 1.03 ms for 16M fp16 in groups of 128, 0.99 if they only move them, and 1.22 if they read 8 KiB and then again;
// to ask for memory ahead costs a tenth.
constexpr int64_t kTogether = 8;  // at most, as many as are divided at once
constexpr int64_t kBytesTogether = 2048;

template <class T>
bool are_short_rows(const Quantize& args, const Walk& walk, const Bundle& bundle) {
  const bool are_rows = walk.x_step() == 1 && walk.are_rows_groups(bundle, 0, walk.size(bundle));
  const bool are_short = bundle.length * static_cast<int64_t>(sizeof(T)) <= kBytesTogether;
  return kBlock > 0 && are_rows && are_short && !args.fake && !args.stochastic;
}

// The ranges of some rows and then their affines, each number in an array of its own, as vectors take them.
struct Together {
  uint32_t high[kTogether], low[kTogether];
  float scale[kTogether], inverse[kTogether];
  int zero_point[kTogether];

  void set(int64_t i, const Range& range) { high[i] = range.high, low[i] = range.low; }

  template <bool kSymmetric>
  [[gnu::noinline]] void solve() {
    for (int64_t i = 0; i < kTogether; ++i) {
      const Affine affine = affine_of(Range{high[i], low[i]}.extremes(), kSymmetric);
      scale[i] = affine.scale, inverse[i] = affine.inverse, zero_point[i] = affine.zero_point;
    }
  }
};

template <bool kSymmetric, class T>
void quantize_short_rows(const Quantize& args, const Walk& walk, const Bundle& bundle) {
  const Run down = walk.down();
  const bool streams = walk.streams();
  const int64_t ahead = walk.ahead(bundle, sizeof(T));
  const int64_t rows = bundle.rows, length = bundle.length;
  const int64_t together = std::clamp<int64_t>(kBytesTogether / (length * sizeof(T)), 1, kTogether);
  const auto length_of = [&](int64_t row) { return row + 1 == rows ? bundle.last_length : length; };
  const T *x = static_cast<const T*>(args.x) + bundle.x, *next = x;
  auto* out = static_cast<int8_t*>(args.out) + bundle.out;
  int64_t scale = bundle.scale;
  Together some{};
  for (int64_t first = 0; first < rows + together; first += together) {
    for (int64_t i = 0; i < together; ++i) {
      const int64_t row = first + i, before = row - together;
      if (row < rows) some.set(i, range_of<kSymmetric>(next, length_of(row), ahead)), next += down.x;
      if (before < 0 || before >= rows) continue;
      const bool is_finite = some.inverse[i] != 0.0f;
      encode_row(x, 0, some.inverse + i, some.zero_point + i, kSymmetric, is_finite, out, length_of(before), streams);
      args.scale[scale] = some.scale[i];
      if constexpr (!kSymmetric) args.zero_point[scale] = some.zero_point[i];
      x += down.x, out += down.out, scale += walk.scale_step();
    }
    some.solve<kSymmetric>();
  }
}

// Columns that are dense along a row. Of fp32 eight rows are encoded side by side, with which two cores of a Zen 4 take
// an eighth less time for 4096 x 4096; of fp16, which writes more for what it reads, up to a tenth more.
template <class T>
void encode_columns(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                    const Affines& affines, int64_t ahead) {
  const bool symmetric = args.zero_point == nullptr, is_finite = !args.is_static && affines.have_inverses;
  const bool are_few = kBlock == 0 || bundle.length < kBlock;
  const auto encode_some = is_finite ? encode_strip<true, T> : encode_strip<false, T>;
  walk.for_each_strip(bundle, begin, end, [&](const Run& run, int64_t rows) {
    const int64_t together = are_few || sizeof(T) == 2 ? 1 : rows;
    for (int64_t r = 0; r < rows; r += together) {
      const T* x = static_cast<const T*>(args.x) + run.x + r * walk.row_step();
      int8_t* out = static_cast<int8_t*>(args.out) + run.out + r * walk.out_row_step();
      if (are_few)
        encode_rest<1>(x, affines, 0, out, run.n);
      else
        encode_some(x, walk.row_step(), together, ahead, affines.inverse, affines.zero_point, symmetric, out,
                    walk.out_row_step(), run.n, walk.streams());
    }
  });
}

template <class T, int kStep>
void encode_pass(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                 const Affines& affines, int64_t ahead) {
  const auto* x = static_cast<const T*>(args.x);
  auto* out = static_cast<int8_t*>(args.out);
  const bool symmetric = args.zero_point == nullptr, streams = walk.streams();
  const bool is_direct = walk.x_step() == 1 && !args.stochastic;
  if (is_direct && kStep == 1) return encode_columns<T>(args, walk, bundle, begin, end, affines, ahead);
  const auto encode_directly = [&](const Run& run) {
    // In a group without a scale of its own some x may be infinite or NaN.
    const bool is_finite = !args.is_static && affines.inverse[run.group] != 0.0f;
    const float* inverse = affines.inverse + run.group;
    if constexpr (kBlock > 0)
      encode_row(x + run.x, ahead, inverse, affines.zero_point + run.group, symmetric, is_finite, out + run.out, run.n,
                 streams);
    else
      encode_rest<kStep>(x + run.x, affines, run.group, out + run.out, run.n);
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

// out[i] = f(i), rounded to T: an element at a time, where zero points are no codes.
template <class T, class F>
void write_each(T* out, int64_t n, const F& f) {
  float results[kRun];
  for (int64_t i = 0; i < n; ++i) results[i] = f(i);
  store(results, out, n);
}

template <class T, int kStep>
void fake_pass_by_formula(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                          const Affines& affines) {
  T staged[kRun];
  walk.for_each_run(bundle, begin, end, [&](const Run& run) {
    const T* x = in_a_row(static_cast<const T*>(args.x) + run.x, walk.x_step(), staged, run.n);
    write_each(static_cast<T*>(args.out) + run.out, run.n, [&](int64_t i) {
      const Affine affine = affines.at(run.group + kStep * i);
      const float value = static_cast<float>(x[i]);
      return fake_of(value, code_of(value, affine), affine);
    });
  });
}

template <class T, int kStep>
void quantize_pass(const Quantize& args, const Walk& walk, const Bundle& bundle, int64_t begin, int64_t end,
                   const Affines& affines, int64_t ahead) {
  if (args.fake && !affines.are_codes)
    fake_pass_by_formula<T, kStep>(args, walk, bundle, begin, end, affines);
  else if (args.fake && affines.have_inverses)
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
    T* out = static_cast<T*>(args.out) + run.out;
    if (!affines.are_codes)
      return write_each(out, run.n, [&](int64_t i) {
        const bool keeps = is_inside(static_cast<float>(x[i]), affines.at(run.group + kStep * i));
        return keeps ? static_cast<float>(grad[i]) : 0.0f;
      });
    write(out, 1, run.n, walk.streams(), ask, [&](auto width, int64_t i) {
      using V = decltype(width);
      const V steps = rounded(read<V>(x + i) * inverse.template at<V>(i));
      const V above = steps < lowest.template at<V>(i) ? V{} : read<V>(grad + i);
      return steps > highest.template at<V>(i) ? V{} : above;
    });
  });
}

}  // namespace amp_kernels::cpu
