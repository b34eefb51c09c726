// Products with int8 codes on a CPU: packed panels of the right operand stay in a core's cache while the tiles of the
// left one pass by. Every tile goes through its epilogue as soon as it is summed.
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <thread>
#include <vector>

#include "buffer.h"
#include "int8_dots.h"
#include "int8_pack.h"
#include "int8_products.h"
#include "parallel.h"
#include "tiles.h"

namespace amp_kernels::cpu {

// Of the panels packed at a time: half of a core's L2. For every block of panels the left operand is read once, from
// memory where it is large: with 2^18 bytes, a quarter of the L2, 4096^3 took 9 % longer.
inline int64_t panel_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (cache > 0) return cache / 2;
#endif
  return 1 << 18;
}

// A worker packs tiles of the left operand, if they are not read in place, for itself and anew for every block: to
// share them cost a product of 256^3 10 of its 60 us, and 40 where the cores share no L3. Not if there are more blocks
// than so many, and narrower ones: multiplied by 256 columns a tile takes thirty times as long as to pack. Nor if its
// columns are packed in several turns.
constexpr int64_t kPrivateBlocks = 4, kPrivateColumns = 256;

// Of a tile whose rows are read where they lie: half of an L1.
constexpr int64_t kBytesInPlace = 1 << 14;

template <class Tile, class Product>
class Multiplication {
 public:
  using Left = typename Tile::Left;
  using Sum = typename Tile::Sum;
  static constexpr int64_t kColumns = Tile::kColumns, kTile = Tile::kRows * kColumns;

  // Rows into tiles of equal height, nearly, as many for every thread, and spans of tiles; columns into blocks of
  // panels, which a worker packs for itself and which stay in its L2. A block times a span is a unit of work. Blocks
  // are few, since tiles are packed for each, but where there are far more columns than rows each worker has one of its
  // own. The rows of a row-major operand are read a cache line at least at a time, and if there is but one tile, for
  // which packing is most of the work, far more, in blocks of little depth.
  explicit Multiplication(const Product& product)
      : product_(product),
        threads_(std::min<int64_t>(divide_up(product.m * product.n * (product.k + 1), kThreadProducts),
                                   torch::stable::get_num_threads())),
        panels_(divide_up(product.n, kColumns)) {
    groups_ = divide_up(product.k, 4);
    tiles_ = divide_up(product.m, Tile::kRows);
    if (tiles_ > threads_) tiles_ = divide_up(tiles_, threads_) * threads_;
    if constexpr (Tile::kReadsRows)
      in_place_ = product.left.k_stride == 1 && product.k % 4 == 0 &&
                  std::abs(product.left.stride) * Tile::kRows <= kBytesInPlace;
    const bool wide = tiles_ == 1 && product.right.stride == 1;
    depth_ = std::max<int64_t>(1, wide ? std::min(groups_, kWideDepth) : groups_);
    const int64_t units = kUnits * threads_, fit = panel_bytes() / panel_size();
    const int64_t busy = wide ? threads_ : divide_up(units, tiles_);
    const int64_t own = product.n > 2 * product.m ? threads_ : 1;
    const int64_t blocks = std::max({busy, own, divide_up(panels_, std::max<int64_t>(1, fit))});
    block_panels_ = std::min(panels_, std::max<int64_t>(64 / kColumns, divide_up(panels_, blocks)));
    blocks_ = divide_up(panels_, block_panels_);
    spans_ = std::min(tiles_, std::max<int64_t>(1, units / blocks_));
    const bool is_packed_often = tiles_ > 1 && blocks_ > kPrivateBlocks && block_panels_ * kColumns < kPrivateColumns;
    is_shared_ = !in_place_ && (is_packed_often || depth_ < groups_);
  }

  void run() const {
    std::optional<SharedTiles> shared;
    if (is_shared_) shared.emplace(*this);
    const auto make = [&](int64_t i) { return Worker(*this, i, shared ? &*shared : nullptr); };
    in_ranges(blocks_ * spans_, 1, threads_, make,
              [&](int64_t unit, int64_t, Worker& worker) { worker.run(unit / spans_, unit % spans_); });
  }

 private:
  static constexpr int64_t kUnits = 4;  // of work for a thread, so that others can help it
  static constexpr int64_t kRowSums = divide_up(Tile::kRows, 4) * 4;

  // The left operand's tiles, each packed by the worker that wants it first. Who finds a tile half packed waits for the
  // one that packs it, which waits for nobody.
  class SharedTiles {
   public:
    explicit SharedTiles(const Multiplication& of)
        : of_(of), left_(of.tiles_ * of.tile_size()), row_sums_(of.tiles_ * kRowSums), state_(of.tiles_) {}

    LeftTile<Left> tile(int64_t t) {
      Left* const to = left_ + t * of_.tile_size();
      int32_t* const row_sums = row_sums_ + t * kRowSums;
      int expected = kUntouched;
      if (state_[t].load(std::memory_order_acquire) == kUntouched &&
          state_[t].compare_exchange_strong(expected, kClaimed)) {
        of_.pack_left(t, to, row_sums);
        state_[t].store(kPacked, std::memory_order_release);
      }
      while (state_[t].load(std::memory_order_acquire) != kPacked) std::this_thread::yield();
      return LeftTile<Left>::packed(to, of_.rows(t), row_sums, to + of_.tile_size());
    }

   private:
    enum State : int { kUntouched, kClaimed, kPacked };

    const Multiplication& of_;
    const Buffer<Left> left_;
    const Buffer<int32_t> row_sums_;
    std::vector<std::atomic<int>> state_;
  };

  // A thread's memory, and the panels that it packed last.
  class Worker {
   public:
    Worker(const Multiplication& of, int64_t index, SharedTiles* shared)
        : of_(of),
          index_(index),
          shared_(shared),
          packed_(of.block_panels_ * of.panel_size()),
          ones_(sums_columns() ? 4 * of.depth_ : 0),
          left_(shared == nullptr && !of.in_place_ ? of.tile_size() : 0),
          parts_(of.depth_ < of.groups_ ? of.block_panels_ * kTile : 0) {
      if (sums_columns()) std::fill_n(ones_ + 0, 4 * of.depth_, Left{1});
      columns_.reserve(of.block_panels_);
    }

    // A block of columns times a span of tiles: there is one packing, or else one tile. Of shared tiles every worker
    // begins with another, lest they wait for each other's packing.
    void run(int64_t block, int64_t span) {
      const int64_t first_tile = of_.first_tile(span), count = of_.first_tile(span + 1) - first_tile;
      const int64_t start = shared_ == nullptr ? 0 : index_ * count / of_.threads_;
      const bool is_whole = of_.depth_ >= of_.groups_;
      for (int64_t g = 0; g == 0 || g < of_.groups_; g += of_.depth_) {
        const int64_t depth = std::min(of_.depth_, of_.groups_ - g);
        if (block != block_ || !is_whole) pack_block(block, g, depth);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t t = first_tile + (start + i) % count;
          take_tile(t);
          is_whole ? multiply(t) : multiply(t, g, depth);
        }
      }
    }

   private:
    bool sums_columns() const { return of_.product_.needs_column_sums(); }

    void pack_block(int64_t block, int64_t g, int64_t depth) {
      const int64_t first = block * of_.block_panels_, panels = std::min(of_.block_panels_, of_.panels_ - first);
      if (g == 0) {
        columns_.clear();
        for (int64_t p = first; p < first + panels; ++p) columns_.emplace_back(of_.product_, p * kColumns);
      }
      block_ = block;
      of_.pack_panels(first, panels, g, depth, packed_ + 0);
      if constexpr (Product::kLeftIsCodes) {
        if (!sums_columns()) return;
        const auto used = static_cast<int32_t>(std::min(4 * depth, of_.product_.k - 4 * g));
        const auto ones = LeftTile<Left>::packed(ones_ + 0, 1, &used, ones_ + 0);
        for (int64_t p = 0; p < panels; ++p) {
          int32_t sum[kColumns];
          multiply_tile<Tile>(1, ones, packed_ + p * of_.panel_size(), depth, sum, true);
          for (int64_t c = 0; c < kColumns; ++c) columns_[p].sum[c] += sum[c];
        }
      }
    }

    void take_tile(int64_t t) {
      if (shared_ != nullptr)
        tile_ = shared_->tile(t);
      else if (t != tile_index_)
        tile_ = private_tile(t);
      tile_index_ = t;
    }

    LeftTile<Left> private_tile(int64_t t) {
      if constexpr (Tile::kReadsRows)
        if (of_.in_place_) return of_.rows_in_place(t, row_sums_);
      of_.pack_left(t, left_ + 0, row_sums_);
      return LeftTile<Left>::packed(left_ + 0, of_.rows(t), row_sums_, left_ + 0);
    }

    void multiply(int64_t t) {
      const Panels<typename Product::Columns> panels{packed_ + 0, of_.panel_size(), columns_.data(),
                                                     static_cast<int64_t>(columns_.size())};
      of_.product_.multiply(of_.first_row(t), of_.rows(t), tile_, panels, of_.groups_, sums_);
    }

    // With a part of k, the last of which makes the results.
    void multiply(int64_t t, int64_t g, int64_t depth) {
      LeftTile<Left> part = tile_;
      part.data += g * tile_.group_step;
      for (size_t p = 0; p < columns_.size(); ++p) {
        Sum* const sums = parts_ + p * kTile;
        multiply_tile<Tile>(of_.rows(t), part, packed_ + p * of_.panel_size(), depth, sums, g == 0);
        if (g + depth >= of_.groups_) of_.product_.finish(of_.first_row(t), of_.rows(t), columns_[p], sums, tile_.sums);
      }
    }

    const Multiplication& of_;
    const int64_t index_;
    SharedTiles* const shared_;
    const Buffer<int8_t> packed_;
    const Buffer<Left> ones_;
    const Buffer<Left> left_;
    const Buffer<Sum> parts_;  // the sums so far of a tile for each panel, if that takes several packings
    alignas(64) Sum sums_[kTile];
    int32_t row_sums_[kRowSums];
    std::vector<typename Product::Columns> columns_;
    int64_t block_ = -1, tile_index_ = -1;  // what is packed
    LeftTile<Left> tile_{};
  };

  void pack_left(int64_t t, Left* to, int32_t* row_sums) const {
    product_.pack_left(first_row(t), rows(t), groups_, to);
    if constexpr (Product::kLeftIsCodes) sum_rows(t, LeftTile<Left>::packed(to, rows(t), nullptr, to), row_sums);
  }

  LeftTile<Left> rows_in_place(int64_t t, int32_t* row_sums) const {
    const int64_t stride = product_.left.stride;
    const Left* const data = product_.left.data + first_row(t) * stride;
    const LeftTile<Left> tile{data, stride, 4, row_sums, data + rows(t) * stride};
    sum_rows(t, tile, row_sums);
    return tile;
  }

  void sum_rows(int64_t t, const LeftTile<Left>& tile, int32_t* row_sums) const {
    if constexpr (Tile::kShift != 0)
      Tile::sum_rows(tile, rows(t), groups_, row_sums);
    else if (product_.needs_row_sums())
      sum_rows_by_ones<Tile>(tile, rows(t), groups_, row_sums);
  }

  // A few groups at a time through all panels: the rows of a row-major operand are then in cache, and in the TLB, when
  // the second panel wants them.
  void pack_panels(int64_t first, int64_t panels, int64_t begin, int64_t depth, int8_t* to) const {
    for (int64_t g = 0; g < depth; g += kWideDepth) {
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t column = (first + p) * kColumns;
        Bytes from = product_.right;
        from.data += column * from.stride + 4 * begin * from.k_stride;
        pack(from, g, std::min(g + kWideDepth, depth), product_.k - 4 * begin, std::min(kColumns, product_.n - column),
             kColumns, to + p * panel_size());
      }
    }
  }

  int64_t first_row(int64_t tile) const { return tile * (product_.m / tiles_) + std::min(tile, product_.m % tiles_); }
  int64_t rows(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
  int64_t first_tile(int64_t span) const { return span * tiles_ / spans_; }
  int64_t panel_size() const { return 4 * depth_ * kColumns; }
  int64_t tile_size() const { return 4 * groups_ * Tile::kRows; }

  const Product& product_;
  const int64_t threads_;  // that are worth waking
  const int64_t panels_;   // of kColumns columns
  int64_t groups_;         // of four k
  int64_t tiles_;
  int64_t depth_;         // groups packed at a time
  int64_t block_panels_;  // panels packed at a time
  int64_t blocks_;
  int64_t spans_;   // of tiles, which are multiplied with a block at a time
  bool is_shared_;  // whether a tile is packed once, for all blocks
  bool in_place_ = false;
};

template <class Tile, class Product>
void multiply(const Product& product) {
  if (product.m <= kDotRows && product.right.k_stride == 1) return multiply_few_rows<Tile>(product);
  if constexpr (Product::kLeftIsCodes) {
    // A dot costs about 12 cycles more than its products.
    const bool are_few = product.n <= Tile::kColumns / 2 && product.k >= 32 * product.n;
    if (are_few && product.left.k_stride == 1) return multiply_few_columns<Tile>(product);
  }
  Multiplication<Tile, Product>(product).run();
}

}  // namespace amp_kernels::cpu
