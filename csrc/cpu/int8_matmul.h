// Products with int8 codes on a CPU: packed panels of the right operand stay in a core's cache while the tiles of the
// left one pass by. Every tile goes through its epilogue as soon as it is summed.
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <memory>
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

// A worker packs tiles of the left operand for itself, anew for every block: to share them cost a product of 256^3 10
// of its 60 us, and 40 where the cores share no L3. Not if there are more blocks than so many, and narrower ones:
// multiplied by 256 columns a tile takes thirty times as long as to pack. Nor if its columns are packed in several
// turns.
constexpr int64_t kPrivateBlocks = 4, kPrivateColumns = 256;

// A packed tile of the left operand, and where finish needs them the sums of its rows.
template <class Tile>
struct PackedTile {
  typename Tile::Left* left;
  int32_t* row_sums;
};

template <class Tile, class Product>
class Multiplication {
 public:
  using Left = typename Tile::Left;
  using Sum = typename Tile::Sum;
  static constexpr int64_t kColumns = Tile::kColumns, kTile = Tile::kRows * kColumns;

  // Rows into tiles of nearly equal height and spans of tiles; columns into blocks of panels, which a worker packs for
  // itself and which stay in its L2. A block times a span is a unit of work. Blocks are few, since tiles are packed for
  // each, but where there are far more columns than rows each worker has one of its own. The rows of a row-major
  // operand are read a cache line at least at a time, and if there is but one tile, for which packing is most of the
  // work, far more, in blocks of little depth.
  explicit Multiplication(const Product& product)
      : product_(product), threads_(torch::stable::get_num_threads()), panels_(divide_up(product.n, kColumns)) {
    groups_ = divide_up(product.k, 4);
    tile_rows_ = divide_up(product.m, divide_up(product.m, Tile::kRows));
    tiles_ = divide_up(product.m, tile_rows_);
    const bool wide = tiles_ == 1 && product.right.stride == 1;
    depth_ = std::max<int64_t>(1, wide ? std::min(groups_, kWideDepth) : groups_);
    const int64_t units = kUnits * threads_, fit = panel_bytes() / panel_size();
    const int64_t busy = wide ? threads_ : divide_up(units, tiles_), own = product.n > 2 * product.m ? threads_ : 1;
    const int64_t blocks = std::max({busy, own, divide_up(panels_, std::max<int64_t>(1, fit))});
    block_panels_ = std::min(panels_, std::max<int64_t>(64 / kColumns, divide_up(panels_, blocks)));
    blocks_ = divide_up(panels_, block_panels_);
    spans_ = std::min(tiles_, std::max<int64_t>(1, units / blocks_));
    const bool is_packed_often = tiles_ > 1 && blocks_ > kPrivateBlocks && block_panels_ * kColumns < kPrivateColumns;
    is_shared_ = is_packed_often || depth_ < groups_;
  }

  void run() const {
    std::optional<SharedTiles> shared;
    if (is_shared_) shared.emplace(*this);
    const auto make = [&](int64_t i) { return std::make_unique<Worker>(*this, i, shared ? &*shared : nullptr); };
    const int64_t unit_products = (tile_size() + 1) * block_panels_ * kColumns * divide_up(tiles_, spans_);
    in_ranges(blocks_ * spans_, divide_up(kThreadProducts, unit_products), make,
              [&](int64_t begin, int64_t end, Worker& worker) {
                for (int64_t i = begin; i < end; ++i) worker.run(i / spans_, i % spans_);
              });
  }

 private:
  static constexpr int64_t kUnits = 4;  // of work for a thread, so that others can help it

  // The left operand's tiles, each packed by the worker that wants it first. Who finds a tile half packed waits for the
  // one that packs it, which waits for nobody.
  class SharedTiles {
   public:
    explicit SharedTiles(const Multiplication& of)
        : of_(of), left_(of.tiles_ * of.tile_size()), row_sums_(of.product_.m), state_(of.tiles_) {}

    PackedTile<Tile> tile(int64_t t) {
      const PackedTile<Tile> tile{left_ + t * of_.tile_size(), row_sums_ + t * of_.tile_rows_};
      if (state_[t].load(std::memory_order_acquire) == kPacked) return tile;
      int expected = kUntouched;
      if (state_[t].compare_exchange_strong(expected, kClaimed)) {
        of_.pack_left(t, tile);
        state_[t].store(kPacked, std::memory_order_release);
      }
      while (state_[t].load(std::memory_order_acquire) != kPacked) std::this_thread::yield();
      return tile;
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
          left_(shared == nullptr ? of.tile_size() : 0),
          sums_((of.depth_ < of.groups_ ? of.block_panels_ : 1) * kTile) {
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
          const PackedTile<Tile> tile = shared_ == nullptr ? private_tile(t) : shared_->tile(t);
          multiply(t, tile, g, depth);
        }
      }
    }

   private:
    bool sums_columns() const { return of_.product_.needs_column_sums(Tile::kShift); }

    void pack_block(int64_t block, int64_t g, int64_t depth) {
      const int64_t first = block * of_.block_panels_, panels = std::min(of_.block_panels_, of_.panels_ - first);
      if (g == 0) {
        columns_.clear();
        for (int64_t p = first; p < first + panels; ++p)
          columns_.emplace_back(of_.product_, p * kColumns, Tile::kShift);
      }
      block_ = block;
      of_.pack_panels(first, panels, g, depth, packed_ + 0);
      if (!sums_columns()) return;
      for (int64_t p = 0; p < panels; ++p)
        multiply_tile<Tile>(1, ones_ + 0, packed_ + p * of_.panel_size(), depth, columns_[p].sum, g == 0);
    }

    PackedTile<Tile> private_tile(int64_t t) {
      const PackedTile<Tile> tile{left_ + 0, row_sums_};
      if (t != tile_) of_.pack_left(t, tile);
      tile_ = t;
      return tile;
    }

    void multiply(int64_t t, const PackedTile<Tile>& tile, int64_t g, int64_t depth) {
      const int64_t rows = of_.rows(t), step = of_.depth_ < of_.groups_ ? kTile : 0;
      const int64_t ahead = shared_ == nullptr ? 0 : of_.tile_size() * sizeof(Left);
      Sum* sums = sums_ + 0;
      for (size_t p = 0; p < columns_.size(); ++p, sums += step) {
        multiply_tile<Tile>(rows, tile.left + 4 * g * rows, packed_ + p * of_.panel_size(), depth, sums, g == 0, ahead);
        if (g + depth >= of_.groups_) of_.product_.finish(t * of_.tile_rows_, rows, columns_[p], sums, tile.row_sums);
      }
    }

    const Multiplication& of_;
    const int64_t index_;
    SharedTiles* const shared_;
    const Buffer<int8_t> packed_;
    const Buffer<Left> ones_;
    const Buffer<Left> left_;
    const Buffer<Sum> sums_;  // of one tile, or if that takes several packings of one for each panel
    int32_t row_sums_[Tile::kRows];
    std::vector<typename Product::Columns> columns_;
    int64_t block_ = -1, tile_ = -1;  // what is packed
  };

  void pack_left(int64_t t, const PackedTile<Tile>& to) const {
    product_.pack_left(t * tile_rows_, rows(t), groups_, to.left, to.row_sums);
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

  int64_t rows(int64_t tile) const { return std::min(tile_rows_, product_.m - tile * tile_rows_); }
  int64_t first_tile(int64_t span) const { return span * tiles_ / spans_; }
  int64_t panel_size() const { return 4 * depth_ * kColumns; }
  int64_t tile_size() const { return 4 * groups_ * tile_rows_; }

  const Product& product_;
  const int64_t threads_;
  const int64_t panels_;  // of kColumns columns
  int64_t groups_;        // of four k
  int64_t tile_rows_;     // of every tile but the last
  int64_t tiles_;
  int64_t depth_;         // groups packed at a time
  int64_t block_panels_;  // panels packed at a time
  int64_t blocks_;
  int64_t spans_;   // of tiles, which are multiplied with a block at a time
  bool is_shared_;  // whether a tile is packed once, for all blocks
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
