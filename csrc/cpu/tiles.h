// The innermost loops of the int8 products, one class for each instruction set, all of one form: a tile of up to kRows
// rows by kColumns columns is summed in registers over `groups` groups of four k.
//
//   left:  [groups][rows][4] elements of type Left, made by `widen` of four floats or of four codes plus kShift
//   right: [groups][kColumns][4] codes
//   sums:  [rows][kColumns], written if `first`, else added to
//   ahead: bytes from what is read of `left` to what is asked for meanwhile, the next tile
//
// Few vectors of k, rows of the left operand or columns of the right one, are multiplied without packing, by `dot`:
// `left` are vectors of `k` elements, left_stride apart, k a multiple of kDotDepth; `right` is one of the other
// operand, whose codes are taken plus kDotShift; the sums are sum_stride apart.
//
// kDepth limits the groups of one call: the partial sums of fp32 are added in blocks for the sake of their rounding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "convert.h"
#include "prefetch.h"

namespace amp_kernels::cpu {

constexpr int64_t kAnyDepth = std::numeric_limits<int64_t>::max();
constexpr int64_t kFloatDepth = 32;
constexpr int64_t kDotRows = 4;     // and one of ones
constexpr int64_t kDotAhead = 512;  // bytes

// Sums that a dot product of so many rows keeps in flight for each: with one a row or two wait for their own additions.
constexpr int dot_chains(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

// Asks for kCount elements.
template <int kCount, class Left>
[[gnu::always_inline]] inline void fetch(const Left* left, int64_t ahead) {
  prefetch<Cache::kL2>(reinterpret_cast<const char*>(left) + ahead, kCount * sizeof(Left));
}

// What makes results of sums: (sum - shift * column_sum) * (row * column) + bias, each operation rounded.
struct Scales {
  const int32_t* column_sums;
  int32_t shift;
  const float* column;
  const float* bias;  // read if there is one
  const float* row;
  int64_t row_step;
};

// The epilogue of a tile of kWidth columns.
template <int kWidth>
struct Scaler {
  // `rows` rows of sums; the results' rows are `stride` apart. What belongs to columns stays in registers.
  template <bool kHasBias, class T>
  static void scale_rows(const Scales& scales, const int32_t* sums, int64_t rows, T* to, int64_t stride) {
    constexpr int kVectors = kWidth / kLanes;
    Lanes column[kVectors], bias[kVectors];
    Words shift[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      column[v] = load_lanes(scales.column + v * kLanes);
      if constexpr (kHasBias) bias[v] = load_lanes(scales.bias + v * kLanes);
      std::memcpy(&shift[v], scales.column_sums + v * kLanes, sizeof(shift[v]));
      shift[v] *= static_cast<uint32_t>(scales.shift);
    }
    const float* row_scale = scales.row;
    for (const int64_t step = scales.row_step; rows > 0; --rows, sums += kWidth, to += stride, row_scale += step) {
      const float row = *row_scale;
      for (int v = 0; v < kVectors; ++v) {
        Words sum;
        std::memcpy(&sum, sums + v * kLanes, sizeof(sum));
        Lanes y = as_floats(as<Integers>(sum - shift[v])) * (row * column[v]);
        if constexpr (kHasBias) y += bias[v];
        store_lanes(y, to + v * kLanes);
      }
    }
  }
};

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
inline int32_t multiply_add(int32_t a, int32_t b, int32_t c) { return a * b + c; }

// Sums int32 or float.
template <class SumType>
struct PortableTile : Scaler<16> {
  using Left = SumType;
  using Sum = SumType;
  static constexpr int kRows = 4, kColumns = 16, kShift = 0, kDotShift = 0;
  static constexpr int64_t kDepth = std::is_same_v<Sum, float> ? kFloatDepth : kAnyDepth;
  static constexpr int64_t kDotDepth = 16;

  static bool runs() { return true; }

  template <class T>
  static void widen(const T* four, Left* to) {
    for (int i = 0; i < 4; ++i) to[i] = static_cast<Left>(four[i]);
  }

  template <int kTileRows>
  static void multiply(const Left* left, const int8_t* right, int64_t groups, Sum* sums, bool first, int64_t) {
    Sum sum[kTileRows][kColumns] = {};
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, right += 4 * kColumns)
      for (int r = 0; r < kTileRows; ++r)
        for (int c = 0; c < kColumns; ++c)
          for (int i = 0; i < 4; ++i)
            sum[r][c] = multiply_add(left[4 * r + i], static_cast<Sum>(right[4 * c + i]), sum[r][c]);
    for (int r = 0; r < kTileRows; ++r)
      for (int c = 0; c < kColumns; ++c) sums[r * kColumns + c] = sum[r][c] + (first ? Sum{} : sums[r * kColumns + c]);
  }

  template <int kDots>
  static void dot(const Left* left, int64_t left_stride, const int8_t* right, int64_t k, Sum* sums,
                  int64_t sum_stride) {
    for (int r = 0; r < kDots; ++r) {
      Sum lanes[kDotDepth] = {};
      for (int64_t i = 0; i < k; i += kDotDepth)
        for (int l = 0; l < kDotDepth; ++l)
          lanes[l] = multiply_add(left[r * left_stride + i + l],
                                  static_cast<Sum>(right[std::min(i, k - kDotDepth) + l]), lanes[l]);
      Sum sum{};
      for (const Sum lane : lanes) sum += lane;
      sums[r * sum_stride] = sum;
    }
  }
};

// Calls f with the first of the tiles that runs on this CPU; the last one must run on any.
template <class Tile, class... Others, class F>
void with_first_tile(const F& f) {
  if constexpr (sizeof...(Others) > 0)
    if (!Tile::runs()) return with_first_tile<Others...>(f);
  f(Tile{});
}

}  // namespace amp_kernels::cpu
