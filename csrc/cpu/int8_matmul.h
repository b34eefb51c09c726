// Products with int8 codes on a CPU: packed panels of the right operand stay in a core's cache while the tiles of the
// left one pass by. Every tile goes through its epilogue as soon as it is summed.
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include <atomic>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "../formulas/int8.h"
#include "convert.h"
#include "int8_pack.h"
#include "int8_tiles.h"
#include "parallel.h"

namespace amp_kernels::cpu {

constexpr int64_t kWideDepth = 16;            // groups
constexpr int64_t kThreadProducts = 1 << 20;  // below which waking a second thread costs more than it saves

// Of the panels packed at a time: half of a core's L2. For every block of panels the left operand is read once, from
// memory where it is large: with 2^18 bytes, a quarter of the L2, 4096^3 took 9 % longer.
inline int64_t panel_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (cache > 0) return cache / 2;
#endif
  return 1 << 18;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Uninitialised memory, aligned to cache lines.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : data_(static_cast<T*>(::operator new(n * sizeof(T), kAlignment))) {}
  ~Buffer() { ::operator delete(data_, kAlignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* operator+(int64_t i) const { return data_ + i; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  T* data_;
};

// Modulo 2^32.
inline int32_t wrapped(int32_t sum, int factor) { return static_cast<int32_t>(static_cast<uint32_t>(sum) * factor); }
inline int32_t difference(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) - b); }

// Nearly always all of a panel's, for which the compiler needs no loop.
template <int kColumns, class T>
void store_columns(const float* y, T* to, int64_t count) {
  count == kColumns ? store(y, to, kColumns) : store(y, to, count);
}

template <class Tile, int... kRowsMinusOne>
void multiply_tile(int64_t rows, const typename Tile::Left* left, const int8_t* right, int64_t groups,
                   typename Tile::Sum* sums, bool first, int64_t ahead, std::integer_sequence<int, kRowsMinusOne...>) {
  static constexpr decltype(&Tile::template multiply<1>) kTiles[] = {&Tile::template multiply<kRowsMinusOne + 1>...};
  kTiles[rows - 1](left, right, groups, sums, first, ahead);
}

template <class Tile>
void multiply_tile(int64_t rows, const typename Tile::Left* left, const int8_t* right, int64_t groups,
                   typename Tile::Sum* sums, bool first, int64_t ahead = 0) {
  int64_t begin = 0;
  do {
    const int64_t depth = std::min(groups - begin, Tile::kDepth);
    multiply_tile<Tile>(rows, left + 4 * begin * rows, right + 4 * begin * Tile::kColumns, depth, sums,
                        first && begin == 0, ahead, std::make_integer_sequence<int, Tile::kRows>{});
    begin += depth;
  } while (begin < groups);
}

template <class Tile, int... kRowsMinusOne>
void dot(int64_t rows, const typename Tile::Left* left, int64_t left_stride, const int8_t* right, int64_t k,
         typename Tile::Sum* sums, std::integer_sequence<int, kRowsMinusOne...>) {
  static constexpr decltype(&Tile::template dot<1>) kDots[] = {&Tile::template dot<kRowsMinusOne + 1>...};
  kDots[rows - 1](left, left_stride, right, k, sums);
}

// Any k: a short column is padded.
template <class Tile>
void dot(int64_t rows, const typename Tile::Left* left, int64_t left_stride, const int8_t* right, int64_t k,
         typename Tile::Sum* sums) {
  constexpr auto kAll = std::make_integer_sequence<int, kDotRows + 1>{};
  if (k >= Tile::kDotDepth) return dot<Tile>(rows, left, left_stride, right, k, sums, kAll);
  int8_t padded[Tile::kDotDepth] = {};
  std::copy_n(right, k, padded);
  dot<Tile>(rows, left, left_stride, padded, Tile::kDotDepth, sums, kAll);
}

// Moves the last of k elements of a row to the end of their block, as `dot` wants them, with zeros before or, if there
// is only one block, after them.
template <class Left>
void align_to_end(Left* row, int64_t k, int64_t depth, int64_t padded) {
  const int64_t rest = k < depth ? 0 : k % depth;
  std::copy_backward(row + k - rest, row + k, row + padded);
  std::fill(row + k - rest, row + padded - rest, Left{0});
}

// Computes a Product<Tile>, made of
//   m, n, k; right: the int8 operand as a view of [k, n]
//   pack_left(row, rows, groups, to): packs a tile for Tile::multiply, and never throws
//   plain_left(row, to): a row for Tile::dot, and its sum if Tile shifts columns
//   needs_column_sums(shift): of the codes of `right`, where those of the left operand were taken plus `shift`
//   Columns(product, column, shift): what finish needs of Tile::kColumns columns, among it their sums, filled in later
//   finish(row, rows, columns, sums): the epilogue of a tile
template <class Tile, class Product>
class Multiplication {
 public:
  using Left = typename Tile::Left;
  using Sum = typename Tile::Sum;
  static constexpr int64_t kColumns = Tile::kColumns, kTile = Tile::kRows * kColumns;

  explicit Multiplication(Product& product)
      : product_(product), threads_(torch::stable::get_num_threads()), panels_(divide_up(product.n, kColumns)) {}

  void run() {
    if (product_.m <= kDotRows && product_.right.k_stride == 1) return run_dots();
    cut();
    run_tiles();
  }

 private:
  // Calls f(begin, end, worker) for all of [0, n), `grain` at a time or less.
  template <class F>
  void in_ranges(int64_t n, int64_t grain, const F& f) const {
    if (n < grain * threads_) grain = divide_up(n, divide_up(n, grain));  // evenly
    const int64_t ranges = divide_up(n, grain);
    share(ranges, std::min(threads_, ranges),
          [&](int64_t i, int64_t worker) { f(i * grain, std::min(n, (i + 1) * grain), worker); });
  }

  // Few rows by columns that are contiguous: nothing is packed, every column is read once.
  void run_dots() {
    const int64_t rows = product_.m, k = product_.k;
    const int64_t padded = std::max<int64_t>(1, divide_up(k, Tile::kDotDepth)) * Tile::kDotDepth;
    const bool sums_columns = product_.needs_column_sums(0);
    const int64_t all_rows = rows + sums_columns;
    Buffer<Left> left(all_rows * padded);
    int32_t excess[kDotRows + 1];  // of a row, where columns are shifted
    for (int64_t r = 0; r < all_rows; ++r) {
      int32_t sum = static_cast<int32_t>(k);
      if (r < rows)
        sum = product_.plain_left(r, left + r * padded);
      else
        std::fill_n(left + r * padded, k, Left{1});
      excess[r] = wrapped(sum, Tile::kDotShift);
      align_to_end(left + r * padded, k, Tile::kDotDepth, padded);
    }
    const int64_t grain = divide_up(kThreadProducts / 8, padded * kColumns);
    in_ranges(panels_, grain, [&](int64_t begin, int64_t end, int64_t) {
      alignas(64) Sum sums[(kDotRows + 1) * kColumns];
      for (int64_t p = begin; p < end; ++p) {
        typename Product::Columns columns(product_, p * kColumns, 0);
        for (int64_t c = 0; c < columns.count; ++c)
          dot<Tile>(all_rows, left + 0, padded, product_.right.data + (p * kColumns + c) * product_.right.stride, k,
                    sums + c);
        if constexpr (Tile::kDotShift != 0)
          for (int64_t i = 0; i < all_rows * kColumns; ++i) sums[i] = difference(sums[i], excess[i / kColumns]);
        if (sums_columns) std::copy_n(sums + rows * kColumns, kColumns, columns.sum);
        product_.finish(0, rows, columns, sums);
      }
    });
  }

  // Rows into tiles of nearly equal height; columns into blocks of panels, which a thread packs at a time, so deep that
  // they stay in its L2. The rows of a row-major operand are read a cache line at least at a time, and if there is but
  // one tile, for which packing is most of the work, far more, in blocks of little depth.
  void cut() {
    const Product& product = product_;
    groups_ = divide_up(product.k, 4);
    tile_rows_ = divide_up(product.m, divide_up(product.m, Tile::kRows));
    tiles_ = divide_up(product.m, tile_rows_);
    const bool wide = tiles_ == 1 && product.right.stride == 1;
    depth_ = std::max<int64_t>(1, wide ? std::min(groups_, kWideDepth) : groups_);
    const int64_t fit = panel_bytes() / (4 * depth_ * kColumns);
    const int64_t fair = panels_ / (wide ? threads_ : 4 * threads_);
    block_panels_ = std::min(panels_, std::max<int64_t>(64 / kColumns, std::min(fit, fair)));
    blocks_ = divide_up(panels_, block_panels_);
    const int64_t spans = std::max<int64_t>(1, std::min(4 * threads_ / blocks_, tiles_ / 4));
    span_tiles_ = divide_up(tiles_, spans);
    spans_ = divide_up(tiles_, span_tiles_);
  }

  void run_tiles() {
    LeftTiles left(*this);
    const int64_t unit_products = (left.tile_size() + 1) * span_tiles_ * block_panels_ * kColumns;
    std::vector<std::unique_ptr<Scratch>> scratch(threads_);
    in_ranges(blocks_ * spans_, divide_up(kThreadProducts, unit_products), [&](int64_t begin, int64_t end, int64_t t) {
      if (scratch[t] == nullptr) scratch[t] = std::make_unique<Scratch>(*this);
      for (int64_t i = begin; i < end; ++i) run_unit(left, i / spans_, i % spans_ * span_tiles_, t, *scratch[t]);
    });
  }

  // The left operand's tiles, each packed by the thread that wants it first: a parallel region for that alone took 5 us
  // of a product of 256^3, which takes 50. Who finds a tile half packed waits for the packing thread, which waits for
  // nobody.
  class LeftTiles {
   public:
    explicit LeftTiles(const Multiplication& of)
        : of_(of), packed_(of.tiles_ * tile_size()), state_(new std::atomic<State>[of.tiles_]()) {}

    int64_t tile_size() const { return 4 * of_.groups_ * of_.tile_rows_; }

    const Left* tile(int64_t t) const {
      Left* to = packed_ + t * tile_size();
      std::atomic<State>& state = state_[t];
      if (State seen = state.load(std::memory_order_acquire); seen == State::kPacked) return to;
      State expected = State::kUntouched;
      if (state.compare_exchange_strong(expected, State::kClaimed)) {
        of_.product_.pack_left(t * of_.tile_rows_, of_.rows(t), of_.groups_, to);
        state.store(State::kPacked, std::memory_order_release);
      }
      while (state.load(std::memory_order_acquire) != State::kPacked) std::this_thread::yield();
      return to;
    }

   private:
    enum class State : uint8_t { kUntouched, kClaimed, kPacked };

    const Multiplication& of_;
    const Buffer<Left> packed_;
    const std::unique_ptr<std::atomic<State>[]> state_;
  };

  struct Scratch {
    Buffer<int8_t> packed;
    Buffer<Left> ones;
    Buffer<Sum> sums;  // of one tile, or if that takes several packings of one for each panel
    std::vector<typename Product::Columns> columns;

    explicit Scratch(const Multiplication& of)
        : packed(of.block_panels_ * of.panel_size()),
          ones(of.product_.needs_column_sums(Tile::kShift) ? 4 * of.depth_ : 0),
          sums(of.block_panels_ * kTile) {
      if (of.product_.needs_column_sums(Tile::kShift)) std::fill_n(ones + 0, 4 * of.depth_, Left{1});
    }
  };

  // A block of columns times a span of tiles: there is one packing, or else one tile. Every worker begins with another
  // tile, lest they wait for each other's packing.
  void run_unit(const LeftTiles& left, int64_t block, int64_t first_tile, int64_t worker, Scratch& scratch) {
    const int64_t first = block * block_panels_, panels = std::min(block_panels_, panels_ - first);
    scratch.columns.clear();
    for (int64_t p = 0; p < panels; ++p) scratch.columns.emplace_back(product_, (first + p) * kColumns, Tile::kShift);
    for (int64_t g = 0; g == 0 || g < groups_; g += depth_) {
      const int64_t depth = std::min(depth_, groups_ - g);
      pack_panels(first, panels, g, depth, scratch.packed + 0);
      if (product_.needs_column_sums(Tile::kShift))
        for (int64_t p = 0; p < panels; ++p)
          multiply_tile<Tile>(1, scratch.ones + 0, scratch.packed + p * panel_size(), depth, scratch.columns[p].sum,
                              g == 0);
      const int64_t count = std::min(span_tiles_, tiles_ - first_tile);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t t = first_tile + (i + worker * count / threads_) % count;
        const Left* tile = left.tile(t) + 4 * g * rows(t);
        for (int64_t p = 0; p < panels; ++p) {
          Sum* sums = scratch.sums + p * kTile;
          multiply_tile<Tile>(rows(t), tile, scratch.packed + p * panel_size(), depth, sums, g == 0, tile_bytes());
          if (g + depth == groups_) product_.finish(t * tile_rows_, rows(t), scratch.columns[p], sums);
        }
      }
    }
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
  int64_t panel_size() const { return 4 * depth_ * kColumns; }
  int64_t tile_bytes() const { return 4 * groups_ * tile_rows_ * sizeof(Left); }

  Product& product_;
  const int64_t threads_;
  const int64_t panels_;  // of kColumns columns
  int64_t groups_;        // of four k
  int64_t tile_rows_;     // of every tile but the last
  int64_t tiles_;
  int64_t depth_;         // groups packed at a time
  int64_t block_panels_;  // panels packed at a time
  int64_t blocks_;
  int64_t span_tiles_;  // that one thread multiplies with a block: all, or fewer where there are few blocks
  int64_t spans_;
};

// ------------------------------------------------------------------------------------------------- int8 x int8
template <class Tile>
class Int8Product {
 public:
  static constexpr int kColumns = Tile::kColumns;
  using Left = typename Tile::Left;

  explicit Int8Product(const Int8Matmul& args)
      : m(args.m),
        n(args.n),
        k(args.k),
        right{args.b, args.b_strides[0], args.b_strides[1], 0},
        args_(args),
        row_sums_(args.b_zero_point == nullptr ? 0 : args.m) {}

  const int64_t m, n, k;
  const Bytes right;

  void pack_left(int64_t row, int64_t rows, int64_t groups, Left* to) noexcept {
    Bytes from{args_.a + row * args_.a_strides[0], args_.a_strides[1], args_.a_strides[0],
               static_cast<int8_t>(Tile::kShift)};
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
    if (args_.b_zero_point != nullptr) sum_rows(to, row, rows, groups);
  }

  int32_t plain_left(int64_t row, Left* to) {
    const int8_t* from = args_.a + row * args_.a_strides[0];
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      to[i] = from[i * args_.a_strides[1]];
      sum += from[i * args_.a_strides[1]];
    }
    if (args_.b_zero_point != nullptr) row_sums_[row] = sum;
    return sum;
  }

  bool needs_column_sums(int shift) const { return args_.a_zero_point != nullptr || shift != 0; }

  struct Columns {
    int64_t first, count;
    int shift;
    float scale[kColumns];
    float bias[kColumns];
    double zero_point[kColumns];
    int32_t sum[kColumns];  // of the codes

    Columns(const Int8Product& product, int64_t column, int shift)
        : first(column), count(std::min<int64_t>(kColumns, product.n - column)), shift(shift) {
      const Int8Matmul& args = product.args_;
      for (int64_t c = 0; c < count; ++c) {
        scale[c] = args.b_scale[(first + c) * args.b_step];
        bias[c] = args.bias == nullptr ? 0.0f : static_cast<const float*>(args.bias)[first + c];
        zero_point[c] = args.b_zero_point == nullptr ? 0 : args.b_zero_point[(first + c) * args.b_step];
      }
      std::fill_n(sum, kColumns, 0);
    }
  };

  void finish(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums) const {
    if (args_.out_scale == nullptr)
      return with_dtype(args_.dtype, [&](auto value) { finish_as<decltype(value)>(row, rows, columns, sums); });
    finish_as<int8_t>(row, rows, columns, sums);
  }

 private:
  // The tile times a panel of ones.
  void sum_rows(const Left* tile, int64_t row, int64_t rows, int64_t groups) noexcept {
    alignas(64) int8_t ones[4 * kWideDepth * kColumns];
    std::fill_n(ones, sizeof(ones), int8_t{1});
    alignas(64) int32_t sums[Tile::kRows * kColumns];
    for (int64_t g = 0; g == 0 || g < groups; g += kWideDepth)
      multiply_tile<Tile>(rows, tile + 4 * g * rows, ones, std::min(kWideDepth, groups - g), sums, g == 0);
    for (int64_t r = 0; r < rows; ++r) row_sums_[row + r] = static_cast<int32_t>(sums[r * kColumns] - Tile::kShift * k);
  }

  template <class Out>
  void finish_as(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums) const {
    const bool is_plain = args_.a_zero_point == nullptr && args_.b_zero_point == nullptr;
    Out* to = static_cast<Out*>(args_.out) + row * n + columns.first;
    if constexpr (!std::is_same_v<Out, int8_t>)
      if (is_plain && columns.count == kColumns)  // for short sums half of the product's time
        return plain(row, rows, columns, sums, to, n);
    for (int64_t r = 0; r < rows; ++r) {
      float y[kColumns];
      if (is_plain)
        plain(row + r, 1, columns, sums + r * kColumns, y, kColumns);
      else
        corrected(row + r, args_.a_scale[(row + r) * args_.a_step], columns, sums + r * kColumns, y);
      write(y, to + r * n, columns.count);
    }
  }

  // What belongs to the columns stays in registers from row to row.
  template <bool kHasBias, class T>
  void plain(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums, T* to, int64_t stride) const {
    constexpr int kVectors = kColumns / kLanes;
    Lanes scale[kVectors], bias[kVectors];
    Words shift[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = load_lanes(columns.scale + v * kLanes);
      bias[v] = load_lanes(columns.bias + v * kLanes);
      Words column_sum;
      std::memcpy(&column_sum, columns.sum + v * kLanes, sizeof(column_sum));
      shift[v] = column_sum * static_cast<uint32_t>(columns.shift);
    }
    for (int64_t r = row; r < row + rows; ++r, sums += kColumns, to += stride) {
      const float row_scale = args_.a_scale[r * args_.a_step];
      for (int v = 0; v < kVectors; ++v) {
        Words sum;
        std::memcpy(&sum, sums + v * kLanes, sizeof(sum));
        Lanes y = as_floats(as<Integers>(sum - shift[v])) * (row_scale * scale[v]);
        if constexpr (kHasBias) y += bias[v];
        store_lanes(y, to + v * kLanes);
      }
    }
  }

  template <class T>
  void plain(int64_t row, int64_t rows, const Columns& columns, const int32_t* sums, T* to, int64_t stride) const {
    args_.bias == nullptr ? plain<false>(row, rows, columns, sums, to, stride)
                          : plain<true>(row, rows, columns, sums, to, stride);
  }

  // float(sum - za * sum(b) - zb * sum(a) + k * za * zb) * (sa * sb): an integer below 2^35, which a double holds.
  void corrected(int64_t r, float scale, const Columns& columns, const int32_t* sums, float* y) const {
    const double zero_point = args_.a_zero_point == nullptr ? 0 : args_.a_zero_point[r * args_.a_step];
    const double row_sum = args_.b_zero_point == nullptr ? 0 : row_sums_[r];
    for (int c = 0; c < kColumns; ++c) {
      const double exact = difference(sums[c], wrapped(columns.sum[c], columns.shift)) - zero_point * columns.sum[c] +
                           (k * zero_point - row_sum) * columns.zero_point[c];
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
  Buffer<int32_t> row_sums_;
};

// ------------------------------------------------------------------------------------------------ float x int8
template <class Tile, class T>
class LinearProduct {
 public:
  static constexpr int kColumns = Tile::kColumns;

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

  bool needs_column_sums(int) const { return false; }

  struct Columns {
    int64_t first, count;
    float scale[kColumns];
    float bias[kColumns];
    float sum[kColumns];  // unused

    Columns(const LinearProduct& product, int64_t column, int)
        : first(column), count(std::min<int64_t>(kColumns, product.n - column)) {
      const Int8Linear& args = product.args_;
      for (int64_t c = 0; c < count; ++c) scale[c] = args.scale[(first + c) * args.scale_step];
      if (args.bias != nullptr) load(static_cast<const T*>(args.bias) + first, bias, count);
    }
  };

  void finish(int64_t row, int64_t rows, const Columns& columns, const float* sums) const {
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
