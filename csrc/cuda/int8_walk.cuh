// How CUDA walks an Int8Layout, in the words of csrc/int8.h. A kernel is an Op, which says what happens to a pack of
// kPack neighbours, in one of two walks:
//
//   rows_kernel: a team of 1 to 256 threads takes a segment         columns_kernel: a block takes a piece of a band;
//   of a row, every thread kEach packs of it                        up to 32 lanes go across, the other threads down
//
//          lane 0  lane 1  lane 2  lane 3                                  lane 0   lane 1   ...
//     row  [pack]  [pack]  [pack]  [pack]   j = 0                     row  [pack]   [pack]   threads 0 to lanes - 1
//          [pack]  [pack]  [pack]  [pack]   j = 1                     row  [pack]   [pack]   the next lanes
//          ...                              kEach                          ...
//          one scale, in a register of each thread                         kPack scales in registers, one a column
//
// All kEach packs of a thread are loaded before the first is stored: that is how many bytes it has in flight. A pack is
// one access of 16 bytes where addresses allow it; the last pack of a row, and everything elsewhere, goes one element
// at a time.
#pragma once

#include <algorithm>

#include "../formulas/int8.h"
#include "grid.cuh"

namespace amp_kernels::cuda {

struct Axis {
  int64_t size;
  int64_t x, out;    // strides, as in Int8Layout
  int64_t scale;     // stride in scale and zero_point
  int64_t group;     // stride in the number of the group, 0 for a reduced axis
  int64_t position;  // stride in what Int8Layout::length bounds
};

// Offsets of one element.
struct Offsets {
  int64_t x = 0, out = 0, scale = 0, group = 0;
  int64_t position = 0;  // where its row begins among those that Int8Layout::length bounds

  template <class Integer>
  __device__ __forceinline__ void move(const Axis& axis, Integer i) {
    x += i * axis.x;
    out += i * axis.out;
    scale += i * axis.scale;
    group += i * axis.group;
    position += i * axis.position;
  }

  // By so many neighbours in a row.
  __device__ __forceinline__ void move_along(int64_t elements) { x += elements, out += elements; }
};

// index % size, and index / size in its place. Most walks have axes of size 1.
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

// An Int8Layout by its axes.
struct Axes {
  Axis axis[Int8Layout::kAxes];
  Int8Layout::Axis inner;
  bool by_columns;
  int64_t length;

  explicit Axes(const Int8Layout& layout)
      : inner(layout.inner()), by_columns(layout.is_by_columns()), length(layout.length) {
    const int64_t scale[] = {layout.scale[0], 0, layout.scale[1], 0};
    const int64_t group[] = {layout.size[Int8Layout::kInnerGroup], 0, 1, 0};
    const int64_t position[] = {0, 0, layout.size[Int8Layout::kInnerReduced], 0};
    for (int i = 0; i < Int8Layout::kAxes; ++i) {
      axis[i] = {1, 0, 0, 0, 0, 0};
      if (layout.size[i] > 1) axis[i] = {layout.size[i], layout.x[i], layout.out[i], scale[i], group[i], position[i]};
    }
  }

  const Axis& operator[](Int8Layout::Axis i) const { return axis[i]; }

  int64_t groups() const { return axis[Int8Layout::kOuterGroup].size * axis[Int8Layout::kInnerGroup].size; }

  // Whether packs of `pack` elements are aligned to their size wherever a row begins.
  bool is_wide(const void* first, size_t element_size, int pack, int64_t Axis::* stride) const {
    if (reinterpret_cast<uintptr_t>(first) % (pack * element_size) != 0) return false;
    for (int i = 0; i < Int8Layout::kAxes; ++i)
      if (i != inner && axis[i].*stride % pack != 0) return false;
    return axis[inner].size > 1;
  }
};

__device__ __forceinline__ int clip_count(int64_t count, int most) {
  return count < 0 ? 0 : count < most ? static_cast<int>(count) : most;
}

// Where a group's scale and zero point come from: the caller, or the launch before.
struct Scales {
  const float* scale;
  const int32_t* zero_point;
  const Affine* computed;  // by the number of the group; nullptr: given

  __device__ __forceinline__ Affine at(const Offsets& offsets) const {
    if (computed != nullptr) return computed[offsets.group];
    return given_affine(scale[offsets.scale], zero_point == nullptr ? nullptr : zero_point + offsets.scale);
  }
};

// ------------------------------------------------------------------------------------------------ by rows
struct RowWalk {
  Axis inner, outer[3];  // axes of size 1 come last
  int64_t length;
  int64_t segments, items;  // segments of a row; of all rows
  int lanes;                // of a team: 1 << shift, or the whole block where rows are held on chip
  int shift, teams;         // teams of a block

  __device__ __forceinline__ int team() const { return threadIdx.x >> shift; }
  __device__ __forceinline__ int lane() const { return threadIdx.x - (team() << shift); }
};

// What one thread has of a segment: packs `stride` elements apart.
struct Segment {
  Offsets first;
  int count;  // elements from the first one to the end of the segment; 0 or less past the last segment
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
    for (const Axis& axis : walk.outer) {
      if (item == 0) break;
      segment.first.move(axis, split_off(item, axis.size));
    }
    const int64_t rest = walk.length - segment.first.position;  // a last block may be shorter than the others
    segment.count =
        clip_count((rest < walk.inner.size ? rest : walk.inner.size) - begin, whole) - static_cast<int>(before);
    segment.first.move_along(begin + before);
    return segment;
  }

  // Calls f(offsets, count) for the packs that are not wide.
  template <int kPack, class F>
  __device__ __forceinline__ void each_narrow(bool wide, const F& f) const {
    if (wide && count % kPack == 0) return;
#pragma unroll 1
    for (int element = 0; element < count; element += static_cast<int>(stride)) {
      if (wide && element + kPack <= count) continue;
      Offsets offsets = first;
      offsets.move_along(element);
      f(offsets, clip_count(count - element, kPack));
    }
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
    segment.each_narrow<kPack>(wide, [&](const Offsets& offsets, int count) { op.narrow(offsets, count, affine_at); });
  }
}

// --------------------------------------------------------------------------------------------- by columns
struct ColumnWalk {
  Axis inner, outer;           // of the groups
  Axis rows;                   // outer reduced
  int lanes;                   // across, a power of two up to 32; the other threads of the block go down
  int64_t bands;               // of lanes * kPack columns
  int64_t piece_rows, pieces;  // rows of a piece, pieces of a band
  int64_t items;               // pieces of all bands
};

// What one thread has of a piece: up to a pack of columns, and every `down`-th row.
struct Columns {
  Offsets first;
  int count;
  int64_t begin, end, down;

  static __device__ __forceinline__ Columns of(const ColumnWalk& walk, int64_t item, int pack) {
    Columns columns{};
    const int64_t column = (split_off(item, walk.bands) * walk.lanes + threadIdx.x % walk.lanes) * pack;
    const int64_t first_row = split_off(item, walk.pieces) * walk.piece_rows, rows = walk.rows.size;
    columns.first.move(walk.outer, item);
    columns.first.move(walk.inner, column);
    columns.count = clip_count(walk.inner.size - column, pack);
    columns.down = kThreads / walk.lanes;
    columns.begin = first_row + threadIdx.x / walk.lanes;
    columns.end = columns.count == 0 ? 0 : first_row + walk.piece_rows < rows ? first_row + walk.piece_rows : rows;
    return columns;
  }

  __device__ __forceinline__ Offsets at(const ColumnWalk& walk, int64_t row) const {
    Offsets offsets = first;
    offsets.move(walk.rows, row);
    return offsets;
  }
};

template <class Op>
__global__ void __launch_bounds__(kThreads, 2) columns_kernel(const Op op, const ColumnWalk walk) {
  constexpr int kPack = Op::kPack, kEach = Op::kEach;
  for (int64_t item = blockIdx.x; item < walk.items; item += gridDim.x) {
    const Columns columns = Columns::of(walk, item, kPack);
    typename Op::Group groups[kPack] = {};
    bool wide = op.wide && columns.count == kPack;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      Offsets column = columns.first;
      column.move(walk.inner, k);
      if (k < columns.count) groups[k] = typename Op::Group(op.scales.at(column));
      wide &= groups[k].is_plain();
    }
    const auto affine_at = [&](int k) { return groups[k]; };
    if (wide) {
      for (int64_t row = columns.begin; row < columns.end; row += kEach * columns.down) {
        typename Op::Raw raw[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (row + j * columns.down < columns.end) raw[j] = op.load(columns.at(walk, row + j * columns.down), 0);
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (row + j * columns.down < columns.end)
            wide &= op.store(raw[j], columns.at(walk, row + j * columns.down), 0, affine_at);
      }
    }
    if (!wide) {
#pragma unroll 1
      for (int64_t row = columns.begin; row < columns.end; row += columns.down)
        op.narrow(columns.at(walk, row), columns.count, affine_at);
    }
  }
}

// ---------------------------------------------------------------------------------------------- host side
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of one size, several waves of them so that the last wave is a small part.
inline unsigned grid_of(int64_t blocks) {
  return static_cast<unsigned>(std::min<int64_t>(blocks, static_cast<int64_t>(multiprocessor_count()) * 64));
}

// Threads of a team for a row of so many packs, `each` packs in flight in a thread. In short rows threads take
// neighbouring packs as far as the 32 codes of a memory sector go, even with fewer packs each.
inline int lanes_for(int64_t packs, int pack, int each, int most) {
  int64_t lanes = 1;
  while (lanes < most && (lanes < std::min<int64_t>(packs, 32 / pack) || lanes * each < packs)) lanes *= 2;
  return static_cast<int>(lanes);
}

inline RowWalk row_walk(const Axes& axes, int pack, int each, int most_lanes) {
  RowWalk walk{};
  walk.inner = axes[Int8Layout::kInnerReduced];
  int64_t rows = 1;
  int next = 0;
  for (Axis& axis : walk.outer) axis.size = 1;
  for (const auto i : {Int8Layout::kInnerGroup, Int8Layout::kOuterReduced, Int8Layout::kOuterGroup}) {
    if (axes[i].size == 1) continue;
    walk.outer[next++] = axes[i];
    rows *= axes[i].size;
  }
  walk.length = axes.length;
  const int64_t packs = ceil_div(walk.inner.size, pack);
  walk.lanes = lanes_for(packs, pack, each, most_lanes);
  while (1 << walk.shift < walk.lanes) ++walk.shift;
  walk.teams = kThreads >> walk.shift;
  walk.segments = ceil_div(packs, static_cast<int64_t>(walk.lanes) * each);
  walk.items = rows * walk.segments;
  return walk;
}

// `blocks` is how many to aim at.
inline ColumnWalk column_walk(const Axes& axes, int pack, int each, int64_t blocks) {
  ColumnWalk walk{};
  walk.inner = axes[Int8Layout::kInnerGroup];
  walk.outer = axes[Int8Layout::kOuterGroup];
  walk.rows = axes[Int8Layout::kOuterReduced];
  const int64_t packs = ceil_div(walk.inner.size, pack), rows = walk.rows.size;
  walk.lanes = 1;
  while (walk.lanes < 32 && walk.lanes < packs) walk.lanes *= 2;
  walk.bands = ceil_div(packs, walk.lanes);
  const int64_t round = each * (kThreads / walk.lanes);  // rows that a block has in flight
  const int64_t wanted = std::max<int64_t>(1, blocks / (walk.bands * walk.outer.size));
  walk.piece_rows = ceil_div(ceil_div(rows, std::min(wanted, ceil_div(rows, round))), round) * round;
  walk.pieces = ceil_div(rows, walk.piece_rows);
  walk.items = walk.bands * walk.pieces * walk.outer.size;
  return walk;
}

template <class Op>
void launch_pass(const Op& op, const Axes& axes, Stream stream) {
  if (axes.by_columns) {
    const int64_t wanted = static_cast<int64_t>(multiprocessor_count()) * 32;
    const ColumnWalk walk = column_walk(axes, Op::kPack, Op::kEach, wanted);
    launch(columns_kernel<Op>, grid_of(walk.items), kThreads, 0, stream, op, walk);
  } else {
    const RowWalk walk = row_walk(axes, Op::kPack, Op::kEach, kThreads);
    launch(rows_kernel<Op>, grid_of(ceil_div(walk.items, walk.teams)), kThreads, 0, stream, op, walk);
  }
}

}  // namespace amp_kernels::cuda
