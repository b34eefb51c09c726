// Products of up to kDotRows rows with int8 codes that are contiguous along k. The weight of a Linear is stored in this
// way. The rows are copied and padded. The codes, K * N bytes, are read once and are not copied. Reading the codes is
// what limits the speed of these products. When the codes were packed for tiles (int8_matmul.h) instead, products of
// one row took 1.7 to 4 times as long, and products of four rows 1.2 to 2.2 times as long (in layers of 512 to 4096
// features).
//
//   rows  [row 0 ... k]      thread 0: columns 0 to 31, 32 to 63 ...       one dot: all rows times one column
//         [row 1 ... k]      thread 1: the columns after these
//         [1 1 1 ... 1]
//
// The row of ones times a column is the sum of the column's codes. The row is only there if the product's finish()
// (int8_products.h) needs these sums.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "int8_products.h"
#include "parallel.h"
#include "tiles.h"

namespace amp_kernels::cpu {

constexpr int64_t kDotsAtOnce = kDotRows + 1;

// The product and the difference of two integers, modulo 2^32.
inline int32_t wrapped(int32_t sum, int factor) { return static_cast<int32_t>(static_cast<uint32_t>(sum) * factor); }
inline int32_t difference(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) - b); }

// The rows, padded for Tile::dot. write(i, to) must write row i to `to`, and return the sum of its codes. With
// `with_ones`, a row of ones follows the other rows.
template <class Tile>
class DotRows {
 public:
  using Left = typename Tile::Left;
  using Sum = typename Tile::Sum;

  template <class F>
  DotRows(int64_t count, bool with_ones, int64_t k, const F& write)
      : count_(count + with_ones),
        k_(k),
        padded_(std::max<int64_t>(1, divide_up(k, Tile::kDotDepth)) * Tile::kDotDepth),
        elements_(count_ * padded_) {
    for (int64_t i = 0; i < count; ++i) sums_[i] = write(i, elements_ + i * padded_);
    if (with_ones) {
      std::fill_n(elements_ + count * padded_, k, Left{1});
      sums_[count] = static_cast<int32_t>(k);
    }
    for (int64_t i = 0; i < count_; ++i) align_to_end(elements_ + i * padded_);
  }

  const int32_t* sums() const { return sums_; }

  // Multiplies every row by `count` vectors of contiguous codes. The first vector begins at `from`, and each vector
  // begins `stride` bytes after the one before. products[row * kColumns + vector] is the result for a row and a vector.
  void multiply(int64_t count, const int8_t* from, int64_t stride, Sum* products) const {
    for (int64_t i = 0; i < count; ++i) multiply_one(from + i * stride, products + i);
  }

 private:
  // Multiplies every row by one vector of codes. Tile::dot reads blocks of kDotDepth codes. If there are fewer codes
  // than that, it reads a copy that is padded with zeros.
  void multiply_one(const int8_t* codes, Sum* products) const {
    int8_t padded[Tile::kDotDepth];
    if (k_ < Tile::kDotDepth) {
      std::fill(std::copy_n(codes, k_, padded), padded + Tile::kDotDepth, int8_t{0});
      codes = padded;
    }
    with_count<kDotsAtOnce>(count_, [&](auto dots) {
      const int64_t k = std::max<int64_t>(k_, Tile::kDotDepth);
      Tile::template dot<dots>(elements_ + 0, padded_, codes, k, products, Tile::kColumns);
    });
    if constexpr (Tile::kDotShift != 0)
      for (int64_t r = 0; r < count_; ++r)
        products[r * Tile::kColumns] = difference(products[r * Tile::kColumns], wrapped(sums_[r], Tile::kDotShift));
  }

  // If the last block of a row is only partly filled, moves its elements to the end of the block, and writes zeros
  // before them. Tile::dot multiplies this block by the last kDotDepth codes. The first of these codes are also in the
  // block before, so here they are multiplied by the zeros. If there is only one block, its elements stay where they
  // are, and the zeros follow them.
  void align_to_end(Left* vector) const {
    const int64_t rest = k_ < Tile::kDotDepth ? 0 : k_ % Tile::kDotDepth;
    std::copy_backward(vector + k_ - rest, vector + k_, vector + padded_);
    std::fill(vector + k_ - rest, vector + padded_ - rest, Left{0});
  }

  const int64_t count_, k_, padded_;
  const Buffer<Left> elements_;
  int32_t sums_[kDotsAtOnce];
};

template <class Tile, class Product>
void multiply_few_rows(const Product& product) {
  constexpr int64_t kColumns = Tile::kColumns;
  const bool sums_columns = product.needs_column_sums();
  const auto make = [&](int64_t) {
    return DotRows<Tile>(product.m, sums_columns, product.k,
                         [&](int64_t r, typename Tile::Left* to) { return product.plain_left(r, to); });
  };
  const int64_t panels = divide_up(product.n, kColumns), grain = divide_up(kThreadBytes, (product.k + 1) * kColumns);
  in_ranges(panels, grain, torch::stable::get_num_threads(), make,
            [&](int64_t begin, int64_t end, const DotRows<Tile>& rows) {
              alignas(64) typename Tile::Sum sums[kDotsAtOnce * kColumns];
              for (int64_t p = begin; p < end; ++p) {
                typename Product::Columns columns(product, p * kColumns);
                rows.multiply(columns.count, product.right.data + p * kColumns * product.right.stride,
                              product.right.stride, sums);
                if (sums_columns) std::copy_n(sums + product.m * kColumns, kColumns, columns.sum);
                product.finish(0, product.m, columns, sums, rows.sums());
              }
            });
}

}  // namespace amp_kernels::cpu
