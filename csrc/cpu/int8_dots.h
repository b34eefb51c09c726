// Products with int8 codes in which one side has few vectors of k: these are prepared, and the vectors of the other
// side, which are contiguous, are read where they lie.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "int8_products.h"
#include "parallel.h"
#include "tiles.h"

namespace amp_kernels::cpu {

constexpr int64_t kDotsAtOnce = kDotRows + 1;

// Modulo 2^32.
inline int32_t wrapped(int32_t sum, int factor) { return static_cast<int32_t>(static_cast<uint32_t>(sum) * factor); }
inline int32_t difference(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) - b); }

// The few vectors: `count` of k elements, of which write(i, to) writes one and returns its sum, and maybe one of ones.
template <class Tile>
class Vectors {
 public:
  using Left = typename Tile::Left;
  using Sum = typename Tile::Sum;

  template <class F>
  Vectors(int64_t count, bool with_ones, int64_t k, const F& write)
      : count_(count + with_ones),
        k_(k),
        padded_(std::max<int64_t>(1, divide_up(k, Tile::kDotDepth)) * Tile::kDotDepth),
        at_once_(divide_up(count_, divide_up(count_, kDotsAtOnce))),
        elements_(count_ * padded_),
        sums_(count_) {
    for (int64_t i = 0; i < count; ++i) sums_[i] = write(i, elements_ + i * padded_);
    if (with_ones) {
      std::fill_n(elements_ + count * padded_, k, Left{1});
      sums_[count] = static_cast<int32_t>(k);
    }
    for (int64_t i = 0; i < count_; ++i) align_to_end(elements_ + i * padded_);
  }

  const int32_t* sums() const { return sums_ + 0; }

  // Their products with `others`, contiguous codes, of which the first are at `from` and the next `stride` on. Those of
  // neighbouring vectors are vector_step apart, those of neighbouring others other_step.
  void multiply(int64_t others, const int8_t* from, int64_t stride, Sum* products, int64_t vector_step,
                int64_t other_step) const {
    for (int64_t i = 0; i < count_; i += at_once_)  // outermost: those of all would not stay in the L1
      for (int64_t j = 0; j < others; ++j)
        multiply_one(i, from + j * stride, products + i * vector_step + j * other_step, vector_step);
  }

 private:
  // Codes of any k: if they are few, they are padded.
  void multiply_one(int64_t i, const int8_t* other, Sum* products, int64_t step) const {
    const int64_t count = std::min(at_once_, count_ - i), k = std::max<int64_t>(k_, Tile::kDotDepth);
    int8_t padded[Tile::kDotDepth];
    if (k_ < Tile::kDotDepth) {
      std::fill(std::copy_n(other, k_, padded), padded + Tile::kDotDepth, int8_t{0});
      other = padded;
    }
    with_count<kDotsAtOnce>(count, [&](auto dots) {
      Tile::template dot<dots>(elements_ + i * padded_, padded_, other, k, products, step);
    });
    if constexpr (Tile::kDotShift != 0)
      for (int64_t v = 0; v < count; ++v)
        products[v * step] = difference(products[v * step], wrapped(sums_[i + v], Tile::kDotShift));
  }

  // Moves the last elements to the end of their block, as Tile::dot wants them, with zeros before or, if there is only
  // one block, after them.
  void align_to_end(Left* vector) const {
    const int64_t rest = k_ < Tile::kDotDepth ? 0 : k_ % Tile::kDotDepth;
    std::copy_backward(vector + k_ - rest, vector + k_, vector + padded_);
    std::fill(vector + k_ - rest, vector + padded_ - rest, Left{0});
  }

  const int64_t count_, k_, padded_, at_once_;
  const Buffer<Left> elements_;
  const Buffer<int32_t> sums_;
};

// The few vectors are rows of the left operand.
template <class Tile, class Product>
void multiply_few_rows(const Product& product) {
  constexpr int64_t kColumns = Tile::kColumns;
  const bool sums_columns = product.needs_column_sums();
  const auto make = [&](int64_t) {
    return Vectors<Tile>(product.m, sums_columns, product.k,
                         [&](int64_t r, typename Tile::Left* to) { return product.plain_left(r, to); });
  };
  const int64_t panels = divide_up(product.n, kColumns), grain = divide_up(kThreadBytes, (product.k + 1) * kColumns);
  in_ranges(panels, grain, torch::stable::get_num_threads(), make,
            [&](int64_t begin, int64_t end, const Vectors<Tile>& rows) {
              alignas(64) typename Tile::Sum sums[kDotsAtOnce * kColumns];
              for (int64_t p = begin; p < end; ++p) {
                typename Product::Columns columns(product, p * kColumns);
                rows.multiply(columns.count, product.right.data + p * kColumns * product.right.stride,
                              product.right.stride, sums, kColumns, 1);
                if (sums_columns) std::copy_n(sums + product.m * kColumns, kColumns, columns.sum);
                product.finish(0, product.m, columns, sums, rows.sums());
              }
            });
}

// They are columns of the right one: of the panel in which a tile would have them, half or more would be multiplied in
// vain, and packing the left operand took a third of a product of 127 x 4096 by 4096 x 16.
template <class Tile, class Product>
void multiply_few_columns(const Product& product) {
  constexpr int64_t kColumns = Tile::kColumns, kRows = 8;
  const bool sums_rows = product.needs_row_sums();
  const auto make = [&](int64_t) {
    return Vectors<Tile>(product.n, sums_rows, product.k,
                         [&](int64_t c, typename Tile::Left* to) { return product.plain_right(c, to); });
  };
  const int64_t blocks = divide_up(product.m, kRows), grain = divide_up(kThreadProducts, product.k * product.n * kRows);
  in_ranges(blocks, grain, torch::stable::get_num_threads(), make,
            [&](int64_t begin, int64_t end, const Vectors<Tile>& vectors) {
              typename Product::Columns columns(product, 0);
              std::copy_n(vectors.sums(), product.n, columns.sum);
              alignas(64) typename Tile::Sum sums[kRows * kColumns] = {};
              int32_t row_sums[kRows];
              for (int64_t row = begin * kRows; row < std::min(end * kRows, product.m); row += kRows) {
                const int64_t rows = std::min(kRows, product.m - row);
                vectors.multiply(rows, product.left.data + row * product.left.stride, product.left.stride, sums, 1,
                                 kColumns);
                if (sums_rows)
                  for (int64_t r = 0; r < rows; ++r) row_sums[r] = sums[r * kColumns + product.n];
                product.finish(row, rows, columns, sums, row_sums);
              }
            });
}

}  // namespace amp_kernels::cpu
