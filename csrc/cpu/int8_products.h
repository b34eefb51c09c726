// What is multiplied by the tiles of tiles.h, codes by codes or floats by codes. A product is made of
//   m, n, k; right: the int8 operand as a view of [k, n]
//   kLeftIsCodes; if so left: the other as a view of [k, m], and plain_right, needs_row_sums
//   pack_left(row, rows, groups, to): packs a tile for Tile::multiply, and never throws
//   plain_left(row, to), plain_right(column, to): a row or column for Tile::dot; returns the sum of its codes
//   needs_row_sums(), needs_column_sums(): whether finish needs those of the codes of `left` and `right`
//   Columns(product, column): what finish needs of Tile::kColumns columns, among it their sums, filled in later
//   finish(row, rows, columns, sums, row_sums): the results of some rows; row_sums are those of these rows, if needed
//   multiply(row, rows, left, panels, groups, sums): the results of some rows and panels, with `sums` for scratch
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../formulas/int8.h"
#include "convert.h"
#include "int8_pack.h"
#include "tiles.h"

namespace amp_kernels::cpu {

constexpr int64_t kWideDepth = 16;            // groups
constexpr int64_t kThreadProducts = 1 << 20;  // below which waking a second thread costs more than it saves
constexpr int64_t kThreadBytes = 1 << 17;     // of what is read once, likewise

// Nearly always all of a panel's, for which the compiler needs no loop.
template <int kColumns, class T>
void store_columns(const float* y, T* to, int64_t count) {
  count == kColumns ? store(y, to, kColumns) : store(y, to, count);
}

template <class Tile>
void multiply_tile(int64_t rows, const LeftTile<typename Tile::Left>& left, const int8_t* right, int64_t groups,
                   typename Tile::Sum* sums, bool first) {
  LeftTile<typename Tile::Left> part = left;
  int64_t begin = 0;
  do {
    const int64_t depth = std::min(groups - begin, Tile::kDepth);
    part.data = left.data + begin * left.group_step;
    part.next = left.next + 4 * begin * rows;
    with_count<Tile::kRows>(rows, [&](auto count) {
      Tile::template multiply<count>(part, right + 4 * begin * Tile::kColumns, depth, sums, first && begin == 0);
    });
    begin += depth;
  } while (begin < groups);
}

// The tile times a panel of ones.
template <class Tile>
void sum_rows_by_ones(const LeftTile<typename Tile::Left>& tile, int64_t rows, int64_t groups, int32_t* row_sums) {
  alignas(64) int8_t ones[4 * kWideDepth * Tile::kColumns];
  std::fill_n(ones, sizeof(ones), int8_t{1});
  alignas(64) int32_t sums[Tile::kRows * Tile::kColumns];
  LeftTile<typename Tile::Left> part = tile;
  for (int64_t g = 0; g == 0 || g < groups; g += kWideDepth, part.data += kWideDepth * tile.group_step)
    multiply_tile<Tile>(rows, part, ones, std::min(kWideDepth, groups - g), sums, g == 0);
  for (int64_t r = 0; r < rows; ++r) row_sums[r] = sums[r * Tile::kColumns];
}

// ------------------------------------------------------------------------------------------------- int8 x int8
template <class Tile>
class Int8Product {
 public:
  static constexpr int kColumns = Tile::kColumns;
  using Left = typename Tile::Left;

  static constexpr bool kLeftIsCodes = true;

  explicit Int8Product(const Int8Matmul& args)
      : m(args.m),
        n(args.n),
        k(args.k),
        left{args.a, args.a_strides[1], args.a_strides[0], 0},
        right{args.b, args.b_strides[0], args.b_strides[1], static_cast<int8_t>(Tile::kShift)},
        args_(args),
        has_zero_points_(args.a_zero_point != nullptr || args.b_zero_point != nullptr),
        is_narrow_(k <= kNarrowK && are_codes(args.a_zero_point, args.a_step == 0 ? 1 : m) &&
                   are_codes(args.b_zero_point, args.b_step == 0 ? 1 : n)) {}

  const int64_t m, n, k;
  const Bytes left, right;

  void pack_left(int64_t row, int64_t rows, int64_t groups, Left* to) const noexcept {
    Bytes from = left;
    from.data += row * left.stride;
    if constexpr (std::is_same_v<Left, int8_t>) {
      pack(from, 0, groups, k, rows, rows, to);
    } else {
      int8_t codes[4 * kWideDepth * Tile::kRows];
      for (int64_t g = 0; g < groups; g += kWideDepth, from.data += 4 * kWideDepth * from.k_stride) {
        const int64_t depth = std::min(kWideDepth, groups - g);
        pack(from, 0, depth, k - 4 * g, rows, rows, codes);
        for (int64_t i = 0; i < 4 * depth * rows; i += 4) Tile::widen(codes + i, to + 4 * g * rows + i);
      }
    }
  }

  int32_t plain_left(int64_t row, Left* to) const { return copy(left, row, to); }
  int32_t plain_right(int64_t column, Left* to) const { return copy(right, column, to); }

  bool needs_row_sums() const { return args_.b_zero_point != nullptr; }
  bool needs_column_sums() const { return args_.a_zero_point != nullptr; }

  struct Columns {
    int64_t first, count;
    float scale[kColumns];
    float bias[kColumns];
    int32_t zero_point[kColumns];
    int32_t sum[kColumns];  // of the codes

    Columns(const Int8Product& product, int64_t column)
        : first(column), count(std::min<int64_t>(kColumns, product.n - column)) {
      const Int8Matmul& args = product.args_;
      if (args.b_step == 1)
        std::copy_n(args.b_scale + first, count, scale);
      else
        std::fill_n(scale, count, *args.b_scale);
      if (args.bias != nullptr) std::copy_n(static_cast<const float*>(args.bias) + first, count, bias);
      std::fill_n(sum, kColumns, 0);
      if (!product.has_zero_points_) return;
      std::fill_n(zero_point, kColumns, 0);
      if (args.b_zero_point == nullptr) return;
      for (int64_t c = 0; c < count; ++c) zero_point[c] = args.b_zero_point[(first + c) * args.b_step];
    }
  };

  void multiply(int64_t row, int64_t rows, const LeftTile<Left>& left, const Panels<Columns>& panels, int64_t groups,
                int32_t* sums) const {
    Panels<Columns> whole = panels;
    whole.count = 0;
    if constexpr (Tile::kMakesResults) {
      const bool is_plain = args_.out_scale == nullptr && (!has_zero_points_ || is_narrow_);
      if (is_plain) whole.count = panels.count - (panels.columns[panels.count - 1].count < kColumns);
      if (whole.count > 0) multiply_whole(row, rows, left, whole, groups, sums);
    }
    for (int64_t p = whole.count; p < panels.count; ++p) {
      multiply_tile<Tile>(rows, left, panels.right + p * panels.step, groups, sums, true);
      finish(row, rows, panels.columns[p], sums, left.sums);
    }
  }

  void finish(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums, const int32_t* row_sums) const {
    if (args_.out_scale == nullptr)
      return with_dtype(args_.dtype,
                        [&](auto value) { finish_as<decltype(value)>(row, rows, columns, sums, row_sums); });
    finish_as<int8_t>(row, rows, columns, sums, row_sums);
  }

 private:
  // Up to which the sum of products of differences of codes is below 2^31: 255^2 * 33025.
  static constexpr int64_t kNarrowK = 33025;
  static constexpr int64_t kRowsAtOnce = 4;

  // Zero points are taken away before anything is added, so that sums become results where they are.
  void multiply_whole(int64_t row, int64_t rows, const LeftTile<Left>& left, const Panels<Columns>& panels,
                      int64_t groups, int32_t* sums) const {
    const auto begin = [&](const Columns& columns) {
      if (has_zero_points_) Tile::subtract(zero_points(row, columns, left.sums), nullptr, rows, sums);
      return has_zero_points_;
    };
    with_dtype(args_.dtype, [&](auto value) {
      auto* to = static_cast<decltype(value)*>(args_.out) + row * n + panels.columns->first;
      with_count<Tile::kRows>(rows, [&](auto count) {
        Tile::template multiply_and_scale<count>(left, panels, groups, begin, sums, scales(row, *panels.columns), to,
                                                 n);
      });
    });
  }

  // Whether zero points, if there are any, are codes, as quantize_int8 makes them.
  static bool are_codes(const int32_t* zero_point, int64_t count) {
    uint32_t beyond = 0;
    for (int64_t i = 0; zero_point != nullptr && i < count; ++i)
      beyond |= (static_cast<uint32_t>(zero_point[i]) + 128u) >> 8;
    return beyond == 0;
  }

  // Contiguous codes, as those of a Linear's weight, in vectors: with one loop for both, copying 16 of 4096 took half
  // of their product with 127.
  int32_t copy(const Bytes& from, int64_t j, Left* to) const {
    const int8_t* codes = from.data + j * from.stride;
    return from.k_stride == 1 ? copy(codes, k, 1, to) : copy(codes, k, from.k_stride, to);
  }

  [[gnu::always_inline]] static int32_t copy(const int8_t* codes, int64_t count, int64_t stride, Left* to) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = codes[i * stride];
      sum += codes[i * stride];
    }
    return sum;
  }

  template <class Out>
  void finish_as(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums,
                 const int32_t* row_sums) const {
    Out* to = static_cast<Out*>(args_.out) + row * n + columns.first;
    if constexpr (!std::is_same_v<Out, int8_t>)
      if (!has_zero_points_ && columns.count == kColumns) return plain(row, rows, columns, sums, to, n);
    for (int64_t begin = 0; begin < rows; begin += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows - begin);
      float y[kRowsAtOnce * kColumns];
      finish_rows(row + begin, count, columns, sums + begin * kColumns, needs_row_sums() ? row_sums + begin : nullptr,
                  y);
      for (int64_t r = 0; r < count; ++r) write(y + r * kColumns, to + (begin + r) * n, columns.count);
    }
  }

  void finish_rows(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums, const int32_t* row_sums,
                   float* y) const {
    if (!has_zero_points_) return plain(row, rows, columns, sums, y, kColumns);
    for (int64_t r = 0; !is_narrow_ && r < rows; ++r)
      corrected(row + r, columns, sums + r * kColumns, row_sums == nullptr ? 0 : row_sums[r], y + r * kColumns);
    if (!is_narrow_) return;
    int32_t exact[kRowsAtOnce * kColumns];
    Tile::subtract(zero_points(row, columns, row_sums), sums, rows, exact);
    plain(row, rows, columns, exact, y, kColumns);
  }

  // As corrected(), modulo 2^32: in doubles 127 x 16 by 16 x 4096 took half as long again.
  ZeroPoints zero_points(int64_t row, const Columns& columns, const int32_t* row_sums) const {
    return {args_.a_zero_point == nullptr ? nullptr : args_.a_zero_point + row * args_.a_step,
            args_.a_step,
            row_sums,
            args_.b_zero_point == nullptr ? nullptr : columns.zero_point,
            columns.sum,
            static_cast<int32_t>(k)};
  }

  Scales scales(int64_t row, const Columns& columns) const {
    return {columns.scale, args_.bias == nullptr ? nullptr : columns.bias, args_.a_scale + row * args_.a_step,
            args_.a_step};
  }

  template <class T>
  void plain(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums, T* to, int64_t stride) const {
    args_.bias == nullptr ? Tile::template scale_rows<false>(scales(row, columns), sums, rows, to, stride)
                          : Tile::template scale_rows<true>(scales(row, columns), sums, rows, to, stride);
  }

  // float(sum - za * sum(b) - zb * sum(a) + k * za * zb) * (sa * sb): an integer below 2^35, which a double holds.
  void corrected(int64_t r, const Columns& columns, const int32_t* sums, int32_t row_sum, float* y) const {
    const float scale = args_.a_scale[r * args_.a_step];
    const double zero_point = args_.a_zero_point == nullptr ? 0 : args_.a_zero_point[r * args_.a_step];
    for (int c = 0; c < kColumns; ++c) {
      const double exact = sums[c] - zero_point * columns.sum[c] + (k * zero_point - row_sum) * columns.zero_point[c];
      y[c] = static_cast<float>(exact) * (scale * columns.scale[c]);
      if (args_.bias != nullptr) y[c] += columns.bias[c];
    }
  }

  void write(const float* y, int8_t* to, int64_t count) const {
    const Affine affine = given_affine(*args_.out_scale, args_.out_zero_point);
    for (int64_t c = 0; c < count; ++c) to[c] = static_cast<int8_t>(code_of(y[c], affine));
  }

  template <class Out>
  static void write(const float* y, Out* to, int64_t count) {
    store_columns<kColumns>(y, to, count);
  }

  const Int8Matmul args_;
  const bool has_zero_points_;
  const bool is_narrow_;  // whether results without their scales have 32 bits
};

// ------------------------------------------------------------------------------------------------ float x int8
template <class Tile, class T>
class LinearProduct {
 public:
  static constexpr int kColumns = Tile::kColumns;
  static constexpr bool kLeftIsCodes = false;

  explicit LinearProduct(const Int8Linear& args)
      : m(args.m), n(args.n), k(args.k), right{args.weight, 1, args.k, 0}, args_(args) {}

  const int64_t m, n, k;
  const Bytes right;

  void pack_left(int64_t row, int64_t rows, int64_t groups, float* to) const noexcept {
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = static_cast<const T*>(args_.x) + (row + r) * args_.x_stride;
      for (int64_t begin = 0; begin < groups; begin += kWideDepth) {
        const int64_t depth = std::min(kWideDepth, groups - begin), used = std::min(4 * depth, k - 4 * begin);
        float x[4 * kWideDepth];
        load(from + 4 * begin, x, used);
        std::fill(x + used, x + 4 * depth, 0.0f);
        for (int64_t g = 0; g < depth; ++g) Tile::widen(x + 4 * g, to + 4 * ((begin + g) * rows + r));
      }
    }
  }

  int32_t plain_left(int64_t row, float* to) const {
    load(static_cast<const T*>(args_.x) + row * args_.x_stride, to, k);
    return 0;  // floats are not shifted
  }

  bool needs_column_sums() const { return false; }

  struct Columns {
    int64_t first, count;
    float scale[kColumns];
    float bias[kColumns];
    float sum[kColumns];  // unused

    Columns(const LinearProduct& product, int64_t column)
        : first(column), count(std::min<int64_t>(kColumns, product.n - column)) {
      const Int8Linear& args = product.args_;
      for (int64_t c = 0; c < count; ++c) scale[c] = args.scale[(first + c) * args.scale_step];
      if (args.bias != nullptr) load(static_cast<const T*>(args.bias) + first, bias, count);
    }
  };

  void multiply(int64_t row, int64_t rows, const LeftTile<float>& left, const Panels<Columns>& panels, int64_t groups,
                float* sums) const {
    for (int64_t p = 0; p < panels.count; ++p) {
      multiply_tile<Tile>(rows, left, panels.right + p * panels.step, groups, sums, true);
      finish(row, rows, panels.columns[p], sums, nullptr);
    }
  }

  void finish(int64_t row, int64_t rows, const Columns& columns, const float* sums, const int32_t*) const {
    for (int64_t r = row; r < row + rows; ++r, sums += kColumns) {
      float y[kColumns];
      for (int64_t c = 0; c < columns.count; ++c) y[c] = sums[c] * columns.scale[c];
      if (args_.bias != nullptr)
        for (int64_t c = 0; c < columns.count; ++c) y[c] += columns.bias[c];
      store_columns<kColumns>(y, static_cast<T*>(args_.out) + r * n + columns.first, columns.count);
    }
  }

 private:
  const Int8Linear args_;
};

}  // namespace amp_kernels::cpu
