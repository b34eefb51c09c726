// The innermost loops of the int8 products. Each instruction set has a class. All classes have the functions multiply
// and dot, and the function `widen`, which puts four elements of the left operand in the type and order that multiply
// needs. If the left operand is codes, but Left is a wider type, widen_row widens the groups of a row of contiguous
// codes. The groups of the row then lie `stride` elements apart.
//
// multiply: a tile of up to kRows rows times kColumns columns, over `groups` groups of four k. Sums are in registers.
//
//                            right: packed [groups][kColumns][4] codes, each plus kShift
//                            +-----------------------------+
//   left: packed             | sums [rows][kColumns]:      |   for each group: 2 * rows * kColumns * 4 operations,
//   [groups][rows][4]        | written if `first`,         |   kColumns * 4 bytes of `right` loaded, and 4 elements of
//   by `widen`               | else added to               |   each row of `left` broadcast
//                            +-----------------------------+
//
// dot: few rows times one vector of codes, `right`, which is not packed. `left` has kDots vectors, which begin
// left_stride elements apart. The sums are sum_stride elements apart. dot adds kDotShift to each code. It reads blocks
// of kDotDepth codes, and k is at least kDotDepth. If k is not a multiple of kDotDepth, the last block of `right` ends
// at k and overlaps the block before. For the codes that are read a second time in this last block, `left` has zeros
// (DotRows in int8_dots.h).
//
// kShift and kDotShift make codes unsigned for instructions that need unsigned codes. multiply itself subtracts the
// effect of kShift from the sums. After dot, DotRows subtracts the effect of kDotShift.
//
// A call of multiply takes at most kDepth groups. So fp32 sums are added up in parts, which keeps rounding errors
// small.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "convert.h"
#include "prefetch.h"

namespace amp_kernels::cpu {

constexpr int64_t kAnyDepth = std::numeric_limits<int64_t>::max();
constexpr int64_t kFloatDepth = 32;
constexpr int64_t kDotRows = 4;     // most rows for dot, not counting a row of ones, which sums the codes of `right`
constexpr int64_t kDotAhead = 512;  // bytes that dot prefetches ahead

// Returns how many independent sums VnniTile::dot keeps for each row, in a product of `rows` rows. If it kept only one
// sum for each row, a product of one or two rows would wait for its own additions. A product of one row then took up to
// 1.2 times as long.
constexpr int dot_chains(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

// Some packed rows of the left operand.
template <class T>
struct LeftTile {
  const T* data;        // [groups][rows][4]
  const int32_t* sums;  // sums of each row's codes, if the tile or the product needs them
  const T* next;        // the tile after this one, which is prefetched while this one is multiplied
};

// The scales of rows and columns, and the bias. A result is sum * (row * column) + bias, where each operation is
// rounded.
struct Scales {
  const float* column;
  const float* bias;  // read only if kHasBias
  const float* row;
  int64_t row_step;
};

// The zero points of rows and columns. `sum` is the sum over k of a * b. If a row has the zero point `row`, and a
// column the zero point `column`, the sum over k of (a - row) * (b - column) is, modulo 2^32:
//   sum - row * column_sum - (row_sum - k * row) * column
struct ZeroPoints {
  const int32_t* rows;  // nullptr: the left operand has none
  int64_t row_step;
  const int32_t* row_sums;  // read only if `columns` is not nullptr
  const int32_t* columns;   // nullptr: the right operand has none
  const int32_t* column_sums;
  int32_t k;

  uint32_t row(int64_t r) const { return rows == nullptr ? 0 : rows[r * row_step]; }
  uint32_t rest(int64_t r) const { return columns == nullptr ? 0 : row_sums[r] - k * row(r); }
};

// Turns the sums of a tile into results, after the multiplication. The tile has kWidth columns.
template <int kWidth>
struct Scaler {
  static void subtract(const ZeroPoints& zero_points, const int32_t* sums, int64_t rows, int32_t* to) {
    for (int c = 0; c < kWidth; c += kLanes) {
      const Words column_sums = words(zero_points.column_sums + c);
      const Words columns = words(zero_points.columns == nullptr ? nullptr : zero_points.columns + c);
      for (int64_t r = 0; r < rows; ++r) {
        const Words sum =
            words(sums + r * kWidth + c) - zero_points.row(r) * column_sums - zero_points.rest(r) * columns;
        std::memcpy(to + r * kWidth + c, &sum, sizeof(sum));
      }
    }
  }

  // Stores the results of `rows` rows of sums, as rows that are `stride` elements apart. The scales and biases of the
  // columns stay in registers.
  template <bool kHasBias, class T>
  static void scale_rows(const Scales& scales, const int32_t* sums, int64_t rows, T* to, int64_t stride) {
    constexpr int kVectors = kWidth / kLanes;
    Lanes column[kVectors], bias[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      column[v] = load_lanes(scales.column + v * kLanes);
      if constexpr (kHasBias) bias[v] = load_lanes(scales.bias + v * kLanes);
    }
    const float* row_scale = scales.row;
    for (const int64_t step = scales.row_step; rows > 0; --rows, sums += kWidth, to += stride, row_scale += step) {
      const float row = *row_scale;
      for (int v = 0; v < kVectors; ++v) {
        Integers sum;
        std::memcpy(&sum, sums + v * kLanes, sizeof(sum));
        Lanes y = as_floats(sum) * (row * column[v]);
        if constexpr (kHasBias) y += bias[v];
        store_lanes(y, to + v * kLanes);
      }
    }
  }

 private:
  // Loads eight words, or returns zeros if `from` is nullptr.
  static Words words(const int32_t* from) {
    Words lanes{};
    if (from != nullptr) std::memcpy(&lanes, from, sizeof(lanes));
    return lanes;
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

// A tile for any CPU. SumType is int32_t for products of codes, and float for products of floats with codes.
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

  static void widen_row(const int8_t* codes, int64_t groups, int64_t stride, Left* to) {
    for (int64_t g = 0; g < groups; ++g) widen(codes + 4 * g, to + g * stride);
  }

  template <int kTileRows>
  static void multiply(const LeftTile<Left>& tile, const int8_t* right, int64_t groups, Sum* sums, bool first) {
    Sum sum[kTileRows][kColumns] = {};
    const Left* left = tile.data;
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

template <class F, int... kMinusOne>
void with_count(int64_t count, const F& f, std::integer_sequence<int, kMinusOne...>) {
  static constexpr void (*kCalls[])(const F&) = {
      [](const F& call) { call(std::integral_constant<int, kMinusOne + 1>{}); }...};
  kCalls[count - 1](f);
}

// Calls f with `count`, which must be from 1 to kMost, as an integral_constant.
template <int kMost, class F>
void with_count(int64_t count, const F& f) {
  with_count(count, f, std::make_integer_sequence<int, kMost>{});
}

// Calls f with the first of the tiles that runs on this CPU. The last one must run on every CPU.
template <class Tile, class... Others, class F>
void with_first_tile(const F& f) {
  if constexpr (sizeof...(Others) > 0)
    if (!Tile::runs()) return with_first_tile<Others...>(f);
  f(Tile{});
}

}  // namespace amp_kernels::cpu
