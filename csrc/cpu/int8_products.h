// The products with int8 codes. int8_matmul.h and int8_dots.h compute them:
//
//   Int8Product      out[m, n] = (sum of (a[m, k] - za[m]) * (b[k, n] - zb[n])) * (sa[m] * sb[n]) + bias[n]
//   ConvProduct      the same, with rows of a that are gathered from images
//   LinearProduct    out[m, n] = (sum of x[m, k] * weight[n, k]) * scale[n] + bias[n]
//
// Sums are over k. za and zb are zero points, sa and sb scales. In this file, a group is four neighbouring k, as in
// int8_pack.h. Each class packs its left operand, and turns sums into results. Its members:
//   m, n, k
//   right: the right operand, int8 codes, as a view of [k, n]
//   kLeftIsCodes: whether the left operand is int8 codes, too
//   gathered_bytes(): the bytes of memory that pack_left needs for rows that it gathers, or 0
//   pack_left(row, rows, groups, gathered, to): packs a tile for Tile::multiply
//   plain_left(row, to): writes one row for Tile::dot, and returns the sum of its codes
//   needs_row_sums(): whether Tile::multiply or finish() needs the sum of each row's codes
//   needs_column_sums(): whether finish() needs the sum of each column's codes
//   Columns(product, column): what finish() needs for Tile::kColumns columns. If needs_column_sums() is true, the
//     caller fills in the sums of their codes later
//   finish(row, rows, columns, sums, row_sums): stores the results of `rows` rows. row_sums are the sums of their codes
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../formulas/int8.h"
#include "buffer.h"
#include "convert.h"
#include "int8_codes.h"
#include "int8_pack.h"
#include "tiles.h"

namespace amp_kernels::cpu {

constexpr int64_t kPackGroups = 16;  // groups that are packed at a time
// With fewer multiplications for each thread, waking another thread costs more than it saves.
constexpr int64_t kThreadProducts = 1 << 20;
// With fewer bytes for each thread, waking another thread does not pay either, if the work reads each byte once.
constexpr int64_t kThreadBytes = 1 << 17;

// Stores the results of `count` columns. `count` is nearly always kColumns. For this constant, the compiler needs no
// loop.
template <int kColumns, class T>
void store_columns(const float* y, T* to, int64_t count) {
  count == kColumns ? store(y, to, kColumns) : store(y, to, count);
}

// Computes sums = left * right, kDepth groups at a time.
template <class Tile>
void multiply_tile(int64_t rows, const LeftTile<typename Tile::Left>& left, const int8_t* right, int64_t groups,
                   typename Tile::Sum* sums) {
  LeftTile<typename Tile::Left> part = left;
  int64_t begin = 0;
  do {
    const int64_t depth = std::min(groups - begin, Tile::kDepth);
    part.data = left.data + 4 * begin * rows;
    part.next = left.next + 4 * begin * rows;
    with_count<Tile::kRows>(rows, [&](auto count) {
      Tile::template multiply<count>(part, right + 4 * begin * Tile::kColumns, depth, sums, begin == 0);
    });
    begin += depth;
  } while (begin < groups);
}

// Sums the codes of each packed row. The loop adds codes in the order in which they are packed. For this, each row has
// four sums, one for each place in a group of four codes. The four are added up at the end.
template <int kRows, class Left>
void sum_rows(const Left* packed, int64_t rows, int64_t groups, int32_t* row_sums) {
  int32_t sums[4 * kRows] = {};
  with_count<kRows>(rows, [&](auto count) {
    for (int64_t g = 0; g < groups; ++g)
      for (int i = 0; i < 4 * count; ++i) sums[i] += packed[4 * count * g + i];
  });
  for (int64_t r = 0; r < rows; ++r) row_sums[r] = sums[4 * r] + sums[4 * r + 1] + sums[4 * r + 2] + sums[4 * r + 3];
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
        is_narrow_(!has_zero_points_ || (k <= kNarrowK && are_codes(args.a_zero_point, args.a_step == 0 ? 1 : m) &&
                                         are_codes(args.b_zero_point, args.b_step == 0 ? 1 : n))) {}

  const int64_t m, n, k;
  const Bytes left, right;

  int64_t gathered_bytes() const { return 0; }

  void pack_left(int64_t row, int64_t rows, int64_t groups, int8_t*, Left* to) const noexcept {
    Bytes from = left;
    from.data += row * left.stride;
    pack_rows(from, rows, groups, to);
  }

  // Packs the first `rows` rows of `from`.
  void pack_rows(Bytes from, int64_t rows, int64_t groups, Left* to) const noexcept {
    if constexpr (std::is_same_v<Left, int8_t>) {
      pack(from, 0, groups, k, rows, rows, to);
    } else if (from.k_stride == 1) {
      const int64_t whole = k / 4;
      for (int64_t r = 0; r < rows; ++r) {
        const int8_t* const row = from.data + r * from.stride;
        Tile::widen_row(row, whole, 4 * rows, to + 4 * r);
        int8_t rest[4] = {};
        std::copy(row + 4 * whole, row + k, rest);
        if (whole < groups) Tile::widen(rest, to + 4 * (whole * rows + r));
      }
    } else {
      int8_t codes[4 * kPackGroups * Tile::kRows];
      for (int64_t g = 0; g < groups; g += kPackGroups, from.data += 4 * kPackGroups * from.k_stride) {
        const int64_t depth = std::min(kPackGroups, groups - g);
        pack(from, 0, depth, k - 4 * g, rows, rows, codes);
        for (int64_t i = 0; i < 4 * depth * rows; i += 4) Tile::widen(codes + i, to + 4 * g * rows + i);
      }
    }
  }

  int32_t plain_left(int64_t row, Left* to) const { return copy(left, row, to); }

  bool needs_row_sums() const { return Tile::kShift != 0 || args_.b_zero_point != nullptr; }
  bool needs_column_sums() const { return args_.a_zero_point != nullptr; }

  struct Columns {
    int64_t first, count;
    float scale[kColumns];
    float bias[kColumns];
    int32_t zero_point[kColumns];
    int32_t sum[kColumns];  // of each column's codes

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

  void finish(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums, const int32_t* row_sums) const {
    if (args_.out_scale == nullptr)
      return with_dtype(args_.dtype,
                        [&](auto value) { finish_as<decltype(value)>(row, rows, columns, sums, row_sums); });
    finish_as<int8_t>(row, rows, columns, sums, row_sums);
  }

 protected:
  // Copies one row, and returns the sum of its codes. The call with the constant stride 1 is inlined as a separate
  // loop, which the compiler vectorises.
  int32_t copy(const Bytes& from, int64_t j, Left* to) const {
    const int8_t* codes = from.data + j * from.stride;
    return from.k_stride == 1 ? copy(codes, k, 1, to) : copy(codes, k, from.k_stride, to);
  }

 private:
  // If all zero points are codes (-128 to 127), |code - zero_point| is at most 255. So a sum of k products
  // (a - za) * (b - zb) is at most 255^2 * k. kNarrowK is the largest k for which this is below 2^31: 255^2 * 33025 is,
  // and 255^2 * 33026 is not.
  static constexpr int64_t kNarrowK = 33025;

  // Whether all zero points, if there are any, are codes (-128 to 127). The zero points that quantize_int8 computes are
  // codes.
  static bool are_codes(const int32_t* zero_point, int64_t count) {
    uint32_t beyond = 0;
    for (int64_t i = 0; zero_point != nullptr && i < count; ++i)
      beyond |= (static_cast<uint32_t>(zero_point[i]) + 128u) >> 8;
    return beyond == 0;
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
    int32_t differences[Tile::kRows * kColumns];
    if (is_narrow_ && has_zero_points_) {
      Tile::subtract(zero_points(row, columns, row_sums), sums, rows, differences);
      sums = differences;
    }
    if constexpr (!std::is_same_v<Out, int8_t>)
      if (is_narrow_ && columns.count == kColumns) return scale(row, rows, columns, sums, to, n);
    float y[Tile::kRows * kColumns];
    if (is_narrow_)
      scale(row, rows, columns, sums, y, kColumns);
    else
      for (int64_t r = 0; r < rows; ++r)
        corrected(row + r, columns, sums + r * kColumns, row_sums == nullptr ? 0 : row_sums[r], y + r * kColumns);
    if constexpr (std::is_same_v<Out, int8_t>)
      write_codes(y, rows, to, columns.count);
    else
      for (int64_t r = 0; r < rows; ++r) store_columns<kColumns>(y + r * kColumns, to + r * n, columns.count);
  }

  // Returns the zero points for Tile::subtract. Tile::subtract computes in 32 bits, and corrected() in doubles.
  // finish_as() calls Tile::subtract only if 32 bits hold every sum. When it called corrected() for such sums, too, a
  // product of 512 rows in a layer of 512 x 512 took 1.14 times as long.
  ZeroPoints zero_points(int64_t row, const Columns& columns, const int32_t* row_sums) const {
    return {args_.a_zero_point == nullptr ? nullptr : args_.a_zero_point + row * args_.a_step,
            args_.a_step,
            row_sums,
            args_.b_zero_point == nullptr ? nullptr : columns.zero_point,
            columns.sum,
            static_cast<int32_t>(k)};
  }

  // Stores sum * (sa * sb) + bias for kColumns columns.
  template <class T>
  void scale(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums, T* to, int64_t stride) const {
    const Scales scales{columns.scale, columns.bias, args_.a_scale + row * args_.a_step, args_.a_step};
    args_.bias == nullptr ? Tile::template scale_rows<false>(scales, sums, rows, to, stride)
                          : Tile::template scale_rows<true>(scales, sums, rows, to, stride);
  }

  // Computes y = float(sum - za * sum(b) - zb * sum(a) + k * za * zb) * (sa * sb) + bias. If the zero points are codes,
  // the argument of float() is an integer below 2^35, which a double holds exactly.
  void corrected(int64_t r, const Columns& columns, const int32_t* sums, int32_t row_sum, float* y) const {
    const float scale = args_.a_scale[r * args_.a_step];
    const double zero_point = args_.a_zero_point == nullptr ? 0 : args_.a_zero_point[r * args_.a_step];
    for (int c = 0; c < kColumns; ++c) {
      const double exact = sums[c] - zero_point * columns.sum[c] + (k * zero_point - row_sum) * columns.zero_point[c];
      y[c] = static_cast<float>(exact) * (scale * columns.scale[c]);
      if (args_.bias != nullptr) y[c] += columns.bias[c];
    }
  }

  // Stores the first `count` columns of y [rows, kColumns] as codes. With code_of() for each element, a convolution of
  // 56 x 56 x 64 with 3 x 3 x 64 took 1.17 times as long, and one of 224 x 224 x 3 with 7 x 7 x 64 1.3 times.
  void write_codes(const float* y, int64_t rows, int8_t* to, int64_t count) const {
    const Affine affine = given_affine(*args_.out_scale, args_.out_zero_point);
    int8_t codes[Tile::kRows * kColumns];
    if constexpr (kBlock > 0) {
      static_assert(Tile::kRows * kColumns >= kBlock);
      // If there are fewer than kBlock results, the codes of what follows them in y are not used.
      //
      // An Encoder adds zero points in 16 bits. Beyond +-1024 all codes are the same end of the range.
      const int zero_point = std::clamp(affine.zero_point, -1024, 1024);
      encode_blocks<false>(y, 0, &affine.inverse, &zero_point, args_.out_zero_point == nullptr, codes,
                           std::max(rows * kColumns, kBlock), false);
    } else {
      for (int64_t i = 0; i < rows * kColumns; ++i) codes[i] = static_cast<int8_t>(code_of(y[i], affine));
    }
    for (int64_t r = 0; r < rows; ++r)
      count == kColumns ? std::memcpy(to + r * n, codes + r * kColumns, kColumns)
                        : std::memcpy(to + r * n, codes + r * kColumns, count);
  }

 protected:
  const Int8Matmul args_;

 private:
  const bool has_zero_points_;
  const bool is_narrow_;  // whether 32 bits hold every sum of (a - za) * (b - zb)
};

// ------------------------------------------------------------------------------------------------- convolution
template <class Tile>
class ConvProduct : public Int8Product<Tile> {
 public:
  using Base = Int8Product<Tile>;
  using Left = typename Base::Left;
  using Base::args_;
  using Base::k;

  explicit ConvProduct(const Int8Conv2d& conv) : Base(conv.rows), window_(conv.window) {}

  int64_t gathered_bytes() const { return Tile::kRows * k; }

  void pack_left(int64_t row, int64_t rows, int64_t groups, int8_t* gathered, Left* to) const noexcept {
    Pixel pixel(window_, row);
    for (int64_t r = 0; r < rows; ++r, pixel.advance(window_)) gather(pixel, code_of_zero(row + r), gathered + r * k);
    this->pack_rows({gathered, 1, k, 0}, rows, groups, to);
  }

  int32_t plain_left(int64_t row, Left* to) const {
    const Buffer<int8_t> gathered(k);
    gather(Pixel(window_, row), code_of_zero(row), gathered + 0);
    return this->copy({gathered + 0, 1, k, 0}, 0, to);
  }

 private:
  // An output pixel. Divisions are slow, so the pixel of a row is computed from the pixel of the row before.
  struct Pixel {
    int64_t image, y, x;

    Pixel(const Window& w, int64_t row)
        : image(row / w.out_pixels()), y(row % w.out_pixels() / w.out[1]), x(row % w.out[1]) {}

    void advance(const Window& w) {
      if (++x < w.out[1]) return;
      x = 0;
      if (++y == w.out[0]) y = 0, ++image;
    }
  };

  int8_t code_of_zero(int64_t row) const {
    return args_.a_zero_point == nullptr ? 0 : std::clamp(args_.a_zero_point[row * args_.a_step], -128, 127);
  }

  // Writes the row of an output pixel. Taps of a line of the kernel that are neighbours in memory are copied together.
  void gather(const Pixel& pixel, int8_t zero, int8_t* to) const {
    const Window& w = window_;
    const int64_t together = w.dilation[1] == 1 ? w.taps[1] : 1;
    int64_t y = w.first(0, pixel.y);
    for (int64_t i = 0; i < w.taps[0]; ++i, y += w.dilation[0]) {
      const bool is_inside = y >= 0 && y < w.size[0];
      const int8_t* const line = is_inside ? args_.a + (pixel.image * w.size[0] + y) * w.size[1] * w.channels : nullptr;
      int64_t x = w.first(1, pixel.x);
      for (int64_t j = 0; j < w.taps[1]; j += together, x += w.dilation[1], to += together * w.channels) {
        const int64_t begin = is_inside ? std::clamp<int64_t>(-x, 0, together) : together;
        const int64_t end = std::clamp(w.size[1] - x, begin, together);
        if (begin < end)
          std::memcpy(to + begin * w.channels, line + (x + begin) * w.channels, (end - begin) * w.channels);
        if (begin > 0) std::memset(to, zero, begin * w.channels);
        if (end < together) std::memset(to + end * w.channels, zero, (together - end) * w.channels);
      }
    }
  }

  const Window window_;
};

// ------------------------------------------------------------------------------------------------ float x int8
template <class Tile, class T>
class LinearProduct {
 public:
  static constexpr int kColumns = Tile::kColumns;
  static constexpr bool kLeftIsCodes = false;

  explicit LinearProduct(const Int8Linear& args)
      : m(args.m), n(args.n), k(args.k), right{args.weight, 1, args.weight_stride, 0}, args_(args) {}

  const int64_t m, n, k;
  const Bytes right;

  int64_t gathered_bytes() const { return 0; }

  void pack_left(int64_t row, int64_t rows, int64_t groups, int8_t*, float* to) const noexcept {
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = static_cast<const T*>(args_.x) + (row + r) * args_.x_stride;
      for (int64_t begin = 0; begin < groups; begin += kPackGroups) {
        const int64_t depth = std::min(kPackGroups, groups - begin), used = std::min(4 * depth, k - 4 * begin);
        float x[4 * kPackGroups];
        load(from + 4 * begin, x, used);
        std::fill(x + used, x + 4 * depth, 0.0f);
        for (int64_t g = 0; g < depth; ++g) Tile::widen(x + 4 * g, to + 4 * ((begin + g) * rows + r));
      }
    }
  }

  int32_t plain_left(int64_t row, float* to) const {
    load(static_cast<const T*>(args_.x) + row * args_.x_stride, to, k);
    return 0;  // not used: the float tiles shift no codes
  }

  bool needs_row_sums() const { return false; }
  bool needs_column_sums() const { return false; }

  struct Columns {
    int64_t first, count;
    float scale[kColumns];
    float bias[kColumns];
    float sum[kColumns];  // never read: needs_column_sums() is false

    Columns(const LinearProduct& product, int64_t column)
        : first(column), count(std::min<int64_t>(kColumns, product.n - column)) {
      const Int8Linear& args = product.args_;
      for (int64_t c = 0; c < count; ++c) scale[c] = args.scale[(first + c) * args.scale_step];
      if (args.bias != nullptr) load(static_cast<const T*>(args.bias) + first, bias, count);
    }
  };

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
