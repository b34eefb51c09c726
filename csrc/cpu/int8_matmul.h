// Products with int8 codes on a CPU. Each takes 2 M N K operations. A thread takes one block of columns at a time,
// packs it, and multiplies it by a span of tiles of the left operand. As soon as a tile has been multiplied by a panel,
// the results of this product are stored. If there is one block, each thread packs a tile just before it multiplies it,
// and the packed tile stays in its cache. If there are more blocks, every tile is needed once for each block. So all
// threads first pack the whole left operand.
//
//                          block 0          block 1            a panel: Tile::kColumns columns, packed
//               right:  [panel][panel]   [panel][panel]        a block fills at most half of a core's L2,
//   left                                                          or has 64 columns
//   span 0  [tile 0]       thread 0         thread 1           a tile: up to Tile::kRows rows, packed; it passes
//           [tile 1]                                           through the L1 once for each panel
//   span 1  [tile 2]       thread 0         thread 1
//           [tile 3]
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include <algorithm>
#include <vector>

#include "buffer.h"
#include "int8_dots.h"
#include "int8_pack.h"
#include "int8_products.h"
#include "parallel.h"
#include "tiles.h"

namespace amp_kernels::cpu {

// Returns how many bytes of panels are packed at a time, as one block: half of a core's L2, or 2^18 bytes if the size
// of the L2 is unknown. Large blocks are better, because the whole left operand is read once for each block, and from
// memory if it is large. On the CPU that was measured, 2^18 bytes are a quarter of the L2. With blocks of 2^18 bytes, a
// product of 4096^3 took 9 % longer there than with blocks of half of the L2.
inline int64_t panel_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (cache > 0) return cache / 2;
#endif
  return 1 << 18;
}

template <class Tile, class Product>
class Multiplication {
 public:
  using Left = typename Tile::Left;
  using Sum = typename Tile::Sum;
  using Columns = typename Product::Columns;
  static constexpr int64_t kColumns = Tile::kColumns, kRows = Tile::kRows;

  // Rows are cut into tiles of nearly equal height. If there are more tiles than threads, the number of tiles is a
  // multiple of the number of threads, so that every thread gets equally many. Neighbouring tiles form a span, and
  // neighbouring panels form a block of columns. One span times one block is a unit of work.
  //
  // There are only as many blocks as two conditions need: there are enough units to keep the threads busy, and no block
  // is larger than panel_bytes(). A third condition comes before these two: a block has at least 64 columns, or all
  // columns if there are fewer.
  explicit Multiplication(const Product& product)
      : product_(product),
        threads_(std::min<int64_t>(divide_up(product.m * product.n * (product.k + 1), kThreadProducts),
                                   torch::stable::get_num_threads())),
        panels_(divide_up(product.n, kColumns)),
        groups_(divide_up(product.k, 4)),
        tiles_(divide_up(product.m, kRows)) {
    if (tiles_ > threads_) tiles_ = divide_up(tiles_, threads_) * threads_;
    const int64_t units = kUnits * threads_, fit = std::max<int64_t>(1, panel_bytes() / (panel_size() + 1));
    const int64_t blocks = std::max(divide_up(units, tiles_), divide_up(panels_, fit));
    block_panels_ = std::min(panels_, std::max<int64_t>(64 / kColumns, divide_up(panels_, blocks)));
    blocks_ = divide_up(panels_, block_panels_);
    spans_ = std::min(tiles_, std::max<int64_t>(1, units / blocks_));
  }

  void run() const {
    const LeftTiles left(*this, packs_by_tile() ? 0 : tiles_);
    if (!packs_by_tile()) pack_all(left);
    const auto make = [&](int64_t) { return Worker(*this, left); };
    in_ranges(blocks_ * spans_, 1, threads_, make,
              [&](int64_t unit, int64_t, Worker& worker) { worker.multiply(unit / spans_, unit % spans_); });
  }

 private:
  // Units of work for each thread. A thread that has done its own units takes over units of other threads.
  static constexpr int64_t kUnits = 4;

  // Packed tiles of the left operand and, if it is needed, the sum of each row's codes.
  class LeftTiles {
   public:
    LeftTiles(const Multiplication& plan, int64_t places)
        : plan_(plan),
          places_(places),
          elements_(places * plan.tile_size()),
          row_sums_(places * kRows),
          gathered_(plan.product_.gathered_bytes()) {}

    // Packs tile `t` into the memory at `place`.
    void pack(int64_t t, int64_t place) const {
      Left* const to = elements_ + place * plan_.tile_size();
      plan_.product_.pack_left(plan_.first_row(t), plan_.rows(t), plan_.groups_, gathered_ + 0, to);
      if constexpr (Product::kLeftIsCodes)
        if (plan_.product_.needs_row_sums())
          sum_rows<kRows>(to, plan_.rows(t), plan_.groups_, row_sums_ + place * kRows);
    }

    LeftTile<Left> at(int64_t place) const {
      const int64_t next = std::min(place + 1, places_ - 1);
      return {elements_ + place * plan_.tile_size(), row_sums_ + place * kRows, elements_ + next * plan_.tile_size()};
    }

   private:
    const Multiplication& plan_;
    const int64_t places_;
    const Buffer<Left> elements_;
    const Buffer<int32_t> row_sums_;
    const Buffer<int8_t> gathered_;
  };

  // The memory of one thread. It holds the block of panels that this thread packed last, and the tile that this thread
  // packed last if `packs_by_tile`.
  class Worker {
   public:
    Worker(const Multiplication& plan, const LeftTiles& left)
        : plan_(plan),
          left_(left),
          own_(plan, plan.packs_by_tile() ? 1 : 0),
          packed_(plan.block_panels_ * plan.panel_size()),
          ones_(plan.product_.needs_column_sums() ? 4 * plan.groups_ : 0) {
      if (plan.product_.needs_column_sums()) std::fill_n(ones_ + 0, 4 * plan.groups_, Left{1});
      columns_.reserve(plan.block_panels_);
    }

    void multiply(int64_t block, int64_t span) {
      if (block != block_) pack(block);
      for (int64_t t = plan_.first_tile(span); t < plan_.first_tile(span + 1); ++t) {
        if (plan_.packs_by_tile()) own_.pack(t, 0);
        const LeftTile<Left> tile = plan_.packs_by_tile() ? own_.at(0) : left_.at(t);
        for (size_t p = 0; p < columns_.size(); ++p) {
          multiply_tile<Tile>(plan_.rows(t), tile, packed_ + p * plan_.panel_size(), plan_.groups_, sums_);
          plan_.product_.finish(plan_.first_row(t), plan_.rows(t), columns_[p], sums_, tile.sums);
        }
      }
    }

   private:
    void pack(int64_t block) {
      block_ = block;
      const int64_t first = block * plan_.block_panels_, end = std::min(first + plan_.block_panels_, plan_.panels_);
      plan_.pack_panels(first, end - first, packed_ + 0);
      columns_.clear();
      for (int64_t p = first; p < end; ++p) columns_.emplace_back(plan_.product_, p * kColumns);
      if constexpr (Product::kLeftIsCodes)
        if (plan_.product_.needs_column_sums()) sum_columns();
    }

    // Sums the codes of each column, by multiplying a row of ones by each panel.
    void sum_columns() {
      const auto ones = static_cast<int32_t>(plan_.product_.k);
      for (size_t p = 0; p < columns_.size(); ++p)
        multiply_tile<Tile>(1, {ones_ + 0, &ones, ones_ + 0}, packed_ + p * plan_.panel_size(), plan_.groups_,
                            columns_[p].sum);
    }

    const Multiplication& plan_;
    const LeftTiles& left_;
    const LeftTiles own_;
    const Buffer<int8_t> packed_;
    const Buffer<Left> ones_;
    alignas(64) Sum sums_[kRows * kColumns];
    std::vector<Columns> columns_;
    int64_t block_ = -1;
  };

  // Whether each thread packs a tile just before it multiplies it. When all tiles were packed first, a product of
  // 50176 x 64 x 576 (M x N x K) took 1.55 times as long on a CPU with AVX2, and 1.07 times on one with VNNI. A product
  // of 128 x 128 x 784 took 1.6 times as long, because threads had to wait for each other twice.
  //
  // The rows of a convolution are always gathered by tile. All of them take as many bytes as x, times the number of
  // taps.
  bool packs_by_tile() const { return product_.gathered_bytes() > 0 || blocks_ == 1; }

  void pack_all(const LeftTiles& left) const {
    const auto nothing = [](int64_t) { return 0; };
    const int64_t grain = divide_up(kThreadBytes, tile_size() * sizeof(Left) + 1);
    in_ranges(tiles_, grain, threads_, nothing, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) left.pack(t, t);
    });
  }

  // Packs the first kPackGroups groups of every panel, then the next kPackGroups groups of every panel, and so on. A
  // group is four elements along k. If the operand is row-major, all panels read the same rows for these groups. So
  // when the second panel is packed, the rows are already in the cache and in the TLB.
  void pack_panels(int64_t first, int64_t panels, int8_t* to) const {
    for (int64_t g = 0; g < groups_; g += kPackGroups)
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t column = (first + p) * kColumns;
        Bytes from = product_.right;
        from.data += column * from.stride;
        pack(from, g, std::min(g + kPackGroups, groups_), product_.k, std::min(kColumns, product_.n - column), kColumns,
             to + p * panel_size());
      }
  }

  int64_t first_row(int64_t tile) const { return tile * (product_.m / tiles_) + std::min(tile, product_.m % tiles_); }
  int64_t rows(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
  int64_t first_tile(int64_t span) const { return span * tiles_ / spans_; }
  int64_t panel_size() const { return 4 * groups_ * kColumns; }
  int64_t tile_size() const { return 4 * groups_ * kRows; }

  const Product& product_;
  const int64_t threads_;  // more threads are not worth waking
  const int64_t panels_;   // each of kColumns columns
  const int64_t groups_;   // each of four elements along k
  int64_t tiles_;
  int64_t block_panels_;  // panels in a block
  int64_t blocks_;
  int64_t spans_;  // a thread multiplies the tiles of one span by one block at a time
};

template <class Tile, class Product>
void multiply(const Product& product) {
  if (product.m <= kDotRows && product.right.k_stride == 1) return multiply_few_rows<Tile>(product);
  Multiplication<Tile, Product>(product).run();
}

}  // namespace amp_kernels::cpu
