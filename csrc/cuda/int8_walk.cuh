// How the kernels of the int8 family walk a tensor: the four levels of an Int8Layout, each with its strides in
// everything that is indexed, put in the order that makes accesses wide.
#pragma once

#include <algorithm>

#include "../formulas/int8.h"
#include "grid.cuh"

namespace amp_kernels::cuda {

struct Level {
  int64_t size;
  int64_t x, out, index;  // as in Int8Layout
  int64_t scale;          // stride in scale and zero_point
  int64_t group;          // stride in the number of the group, 0 for a reduced level
  int64_t position;       // stride in what Int8Layout::length bounds
};

// Offsets of one element.
struct Place {
  int64_t x = 0, out = 0, index = 0, scale = 0, group = 0, position = 0;

  template <class Integer>
  __device__ __forceinline__ void move(const Level& level, Integer i) {
    x += i * level.x;
    out += i * level.out;
    index += i * level.index;
    scale += i * level.scale;
    group += i * level.group;
    position += i * level.position;
  }

  // Elements of `level` that exist from here on.
  __device__ __forceinline__ int64_t present(const Level& level, int64_t length) const {
    if (level.position == 0) return position < length ? level.size : 0;
    int64_t rest = length - position;
    if (level.position > 1) rest = (rest + level.position - 1) / level.position;
    return rest < 0 ? 0 : rest < level.size ? rest : level.size;
  }
};

// index % size, and index / size in its place. Most walks have levels of size 1.
__device__ __forceinline__ int64_t split_off(int64_t& index, int64_t size) {
  if (index < size) {
    const int64_t inside = index;
    index = 0;
    return inside;
  }
  if (size == 1) return 0;
  const int64_t quotient = index / size;
  const int64_t inside = index - quotient * size;
  index = quotient;
  return inside;
}

// The levels with those merged that are one in memory, and the two that decide how to walk.
struct Levels {
  Level level[Int8Layout::kLevels];
  int64_t length;    // an element exists iff its position is smaller
  int out_fast = 0;  // neighbours in `out`
  int x_fast = 0;    // neighbours in `x`; out_fast where x has none, too

  explicit Levels(const Int8Layout& layout) : length(layout.length) {
    const auto& size = layout.size;
    const bool whole = length >= size[Int8Layout::kG2] * size[Int8Layout::kR2];
    const int64_t group[] = {size[Int8Layout::kG2], 0, 1, 0};
    const int64_t scale[] = {layout.scale[0], 0, layout.scale[1], 0};
    const int64_t position[] = {0, 0, size[Int8Layout::kR2], 1};
    for (int i = 0; i < Int8Layout::kLevels; ++i) {
      level[i] = {1, 0, 0, 0, 0, 0, 0};
      if (size[i] > 1)
        level[i] = {size[i], layout.x[i], layout.out[i], layout.index[i], scale[i], group[i], whole ? 0 : position[i]};
    }
    if (whole) length = 1;
    merge(Int8Layout::kG1, Int8Layout::kR1, Int8Layout::kG2);
    merge(Int8Layout::kR1, Int8Layout::kG2, Int8Layout::kR2);
    out_fast = neighbours(&Level::out, Int8Layout::kR2);
    x_fast = level[out_fast].x == 1 ? out_fast : neighbours(&Level::x, out_fast);
  }

  static bool is_reduced(int i) { return i == Int8Layout::kR1 || i == Int8Layout::kR2; }
  // The other level of the same kind.
  static int twin(int i) { return (i + 2) % Int8Layout::kLevels; }

  int64_t groups() const { return level[Int8Layout::kG1].size * level[Int8Layout::kG2].size; }

  // Whether packs of `pack` elements along `fast` are aligned to their size wherever they begin.
  bool is_wide(const void* first, size_t element_size, int pack, int64_t Level::* stride, int fast) const {
    if (reinterpret_cast<uintptr_t>(first) % (pack * element_size) != 0 || level[fast].*stride != 1) return false;
    for (int i = 0; i < Int8Layout::kLevels; ++i)
      if (i != fast && level[i].*stride % pack != 0) return false;
    return true;
  }

 private:
  void merge(int outer, int between, int inner) {
    const Level &from = level[outer], &to = level[inner];
    if (level[between].size != 1) return;
    for (const auto stride : {&Level::x, &Level::out, &Level::index, &Level::scale, &Level::group, &Level::position})
      if (from.size > 1 && to.size > 1 && from.*stride != to.*stride * to.size) return;
    Level merged = to.size > 1 ? to : from;
    merged.size = from.size * to.size;
    level[outer] = {1, 0, 0, 0, 0, 0, 0};
    level[inner] = merged;
  }

  int neighbours(int64_t Level::* stride, int otherwise) const {
    for (int i = Int8Layout::kLevels - 1; i >= 0; --i)
      if (level[i].size > 1 && level[i].*stride == 1) return i;
    return otherwise;
  }
};

__device__ __forceinline__ int clip_count(int64_t count, int most) {
  return count < 0 ? 0 : count < most ? static_cast<int>(count) : most;
}

// Where scale and zero point come from: given, or computed by the launch before.
struct Scales {
  const float* scale;
  const int32_t* zero_point;
  const Affine* computed;  // by number of the group; nullptr: given

  __device__ __forceinline__ Affine at(const Place& place) const {
    if (computed != nullptr) return computed[place.group];
    return given_affine(scale[place.scale], zero_point == nullptr ? nullptr : zero_point + place.scale);
  }
};

// ------------------------------------------------------------------------- a pass over all elements
// Op says what happens to a pack of kPack neighbours along one level. `load` and `store` are apart, so that a thread
// has kEach loads under way before its first store. Where addresses are aligned all packs but the last of a row are
// wide; the last, and everything elsewhere, goes one element at a time.

// Segments of rows: `inner` is a reduced level, so that a row has one scale. A team of `lanes` threads takes a segment.
struct RowWalk {
  Level inner, outer[3];  // levels of size 1 come last
  int64_t length;
  int64_t segments, items;  // of a row; of all rows
  int lanes;                // 1 << shift, or with rows on chip the block
  int shift, teams;         // of a block

  __device__ __forceinline__ int team() const { return threadIdx.x >> shift; }
  __device__ __forceinline__ int lane() const { return threadIdx.x - (team() << shift); }
};

// What one thread has of a segment: packs `stride` elements apart.
struct Segment {
  Place first;
  int count;  // of elements from the first one to the end of the segment; none past the last segment
  unsigned stride;

  // `kWholeRows`: a row is one segment.
  template <int kPack, int kEach, bool kWholeRows = false>
  static __device__ __forceinline__ Segment of(const RowWalk& walk, int64_t item) {
    Segment segment{};
    segment.stride = walk.lanes * kPack;
    if (item >= walk.items) return segment;
    const unsigned before = walk.lane() * kPack;
    const int whole = segment.stride * kEach;
    const int64_t begin = kWholeRows ? 0 : split_off(item, walk.segments) * whole;
#pragma unroll
    for (const Level& level : walk.outer) {
      if (item == 0) break;
      segment.first.move(level, split_off(item, level.size));
    }
    segment.count =
        clip_count(segment.first.present(walk.inner, walk.length) - begin, whole) - static_cast<int>(before);
    segment.first.move(walk.inner, before);
    if (!kWholeRows) segment.first.move(walk.inner, begin);
    return segment;
  }

  __device__ __forceinline__ Place at(const RowWalk& walk, int element) const {
    Place place = first;
    place.move(walk.inner, element);
    return place;
  }

  // Runs f for the packs that are not wide.
  template <int kPack, class F>
  __device__ __forceinline__ void each_narrow(const RowWalk& walk, bool wide, const F& f) const {
    if (wide && count % kPack == 0) return;
#pragma unroll 1
    for (int element = 0; element < count; element += static_cast<int>(stride))
      if (!wide || element + kPack > count) f(at(walk, element), clip_count(count - element, kPack));
  }

  template <int kPack>
  __device__ __forceinline__ bool has(int j) const {
    return static_cast<int>(j * stride) + kPack <= count;
  }
};

template <class Op>
__global__ void __launch_bounds__(kThreads, 2) rows_kernel(const Op op, const RowWalk walk) {
  constexpr int kPack = Op::kPack, kEach = Op::kEach;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * walk.teams + walk.team(); item < walk.items;
       item += static_cast<int64_t>(gridDim.x) * walk.teams) {
    const Segment segment = Segment::of<kPack, kEach>(walk, item);
    const typename Op::Group group(op.scales.at(segment.first));
    const auto affine_at = [&](int) { return group; };
    bool wide = op.wide && group.is_plain();
    if (wide) {
      typename Op::Raw raw[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (segment.has<kPack>(j)) raw[j] = op.load(segment.first, j * segment.stride);
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (segment.has<kPack>(j)) wide &= op.store(raw[j], segment.first, j * segment.stride, affine_at);
    }
    segment.each_narrow<kPack>(walk, wide,
                               [&](const Place& place, int count) { op.narrow(place, walk.inner, count, affine_at); });
  }
}

// Stripes of columns: `inner` is a kept level, and each element of a pack has a scale of its own.
struct ColumnWalk {
  Level inner, outer;  // of the groups
  Level rows[2];       // reduced, the second one inner; one of size 1 is the second
  int64_t length;
  int lanes;                   // across, a power of two up to 32; the other threads of the block go down
  int64_t tiles;               // stripes across
  int64_t stretch, stretches;  // rows of a block, blocks of a stripe
  int64_t items;
};

struct Stripe {
  Place column;              // the thread's first one
  int count;                 // of its columns
  int64_t begin, end, down;  // its rows, `down` apart

  static __device__ __forceinline__ Stripe of(const ColumnWalk& walk, int64_t item, int pack) {
    Stripe stripe{};
    const int64_t column = (split_off(item, walk.tiles) * walk.lanes + threadIdx.x % walk.lanes) * pack;
    const int64_t first = split_off(item, walk.stretches) * walk.stretch;
    const int64_t rows = walk.rows[0].size * walk.rows[1].size;
    stripe.column.move(walk.outer, item);
    stripe.column.move(walk.inner, column);
    stripe.count = clip_count(walk.inner.size - column, pack);
    stripe.down = kThreads / walk.lanes;
    stripe.begin = first + threadIdx.x / walk.lanes;
    stripe.end = stripe.count == 0 ? 0 : first + walk.stretch < rows ? first + walk.stretch : rows;
    return stripe;
  }

  __device__ __forceinline__ Place at(const ColumnWalk& walk, int64_t row) const {
    Place place = column;
    if (walk.rows[1].size > 1) place.move(walk.rows[1], split_off(row, walk.rows[1].size));
    place.move(walk.rows[0], row);
    return place;
  }
};

template <class Op>
__global__ void __launch_bounds__(kThreads, 2) columns_kernel(const Op op, const ColumnWalk walk) {
  constexpr int kPack = Op::kPack, kEach = Op::kEach;
  for (int64_t item = blockIdx.x; item < walk.items; item += gridDim.x) {
    const Stripe stripe = Stripe::of(walk, item, kPack);
    typename Op::Group groups[kPack] = {};
    bool wide = op.wide && stripe.count == kPack;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      Place column = stripe.column;
      column.move(walk.inner, k);
      if (k < stripe.count) groups[k] = typename Op::Group(op.scales.at(column));
      wide &= groups[k].is_plain();
    }
    const auto affine_at = [&](int k) { return groups[k]; };
    if (wide) {
      for (int64_t row = stripe.begin; row < stripe.end; row += kEach * stripe.down) {
        typename Op::Raw raw[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (row + j * stripe.down < stripe.end) raw[j] = op.load(stripe.at(walk, row + j * stripe.down), 0);
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (row + j * stripe.down < stripe.end)
            wide &= op.store(raw[j], stripe.at(walk, row + j * stripe.down), 0, affine_at);
      }
    }
    if (!wide) {
#pragma unroll 1
      for (int64_t row = stripe.begin; row < stripe.end; row += stripe.down)
        op.narrow(stripe.at(walk, row), walk.inner, stripe.count, affine_at);
    }
  }
}

// ------------------------------------------------------------------------------------- host side

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of one size, several waves of them so that the last is short.
inline unsigned grid_of(int64_t blocks) {
  return static_cast<unsigned>(std::min<int64_t>(blocks, static_cast<int64_t>(multiprocessor_count()) * 64));
}

// Threads for a row of packs: `each` in flight in a thread, but in short rows side by side for the 32 codes of a
// sector.
inline int lanes_for(int64_t packs, int pack, int each, int most) {
  int64_t lanes = 1;
  while (lanes < most && (lanes < std::min<int64_t>(packs, 32 / pack) || lanes * each < packs)) lanes *= 2;
  return static_cast<int>(lanes);
}

inline RowWalk row_walk(const Levels& levels, int inner, int pack, int each, int most_lanes) {
  RowWalk walk{};
  walk.inner = levels.level[inner];
  int64_t rows = 1;
  int next = 0;
  for (Level& level : walk.outer) level.size = 1;
  for (int i = Int8Layout::kLevels - 1; i >= 0; --i) {
    if (i == inner || levels.level[i].size == 1) continue;
    walk.outer[next++] = levels.level[i];
    rows *= levels.level[i].size;
  }
  walk.length = levels.length;
  const int64_t packs = ceil_div(walk.inner.size, pack);
  walk.lanes = lanes_for(packs, pack, each, most_lanes);
  while (1 << walk.shift < walk.lanes) ++walk.shift;
  walk.teams = kThreads >> walk.shift;
  walk.segments = ceil_div(packs, static_cast<int64_t>(walk.lanes) * each);
  walk.items = rows * walk.segments;
  return walk;
}

// `blocks` is how many to aim at.
inline ColumnWalk column_walk(const Levels& levels, int inner, int pack, int each, int64_t blocks) {
  ColumnWalk walk{};
  walk.inner = levels.level[inner];
  walk.outer = levels.level[Levels::twin(inner)];
  walk.rows[0] = levels.level[Int8Layout::kR1];
  walk.rows[1] = levels.level[Int8Layout::kR2];
  if (walk.rows[0].size == 1) std::swap(walk.rows[0], walk.rows[1]);
  walk.length = levels.length;
  const int64_t packs = ceil_div(walk.inner.size, pack), rows = walk.rows[0].size * walk.rows[1].size;
  walk.lanes = 1;
  while (walk.lanes < 32 && walk.lanes < packs) walk.lanes *= 2;
  walk.tiles = ceil_div(packs, walk.lanes);
  const int64_t round = each * (kThreads / walk.lanes);  // rows that a block has under way
  const int64_t wanted = std::max<int64_t>(1, blocks / (walk.tiles * walk.outer.size));
  walk.stretch = ceil_div(ceil_div(rows, std::min(wanted, ceil_div(rows, round))), round) * round;
  walk.stretches = ceil_div(rows, walk.stretch);
  walk.items = walk.tiles * walk.stretches * walk.outer.size;
  return walk;
}

template <class Op>
void launch_pass(const Op& op, const Levels& levels, Stream stream) {
  const int inner = levels.out_fast;
  if (Levels::is_reduced(inner)) {
    const RowWalk walk = row_walk(levels, inner, Op::kPack, Op::kEach, kThreads);
    launch(rows_kernel<Op>, grid_of(ceil_div(walk.items, walk.teams)), kThreads, 0, stream, op, walk);
  } else {
    const int64_t wanted = static_cast<int64_t>(multiprocessor_count()) * 32;
    const ColumnWalk walk = column_walk(levels, inner, Op::kPack, Op::kEach, wanted);
    launch(columns_kernel<Op>, grid_of(walk.items), kThreads, 0, stream, op, walk);
  }
}

}  // namespace amp_kernels::cuda
