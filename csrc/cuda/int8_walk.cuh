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
//          one scale, in a register of each thread                         kPack scales in registers, one a column,
//                                                                          which the block loads once
//
// All kEach packs of a thread are asked for before anything waits, for a scale or for a pack: that is how many bytes it
// has in flight. A pack is one access of 16 bytes where addresses allow it; the last pack of a row, and everything
// elsewhere, goes one element at a time.
#pragma once

#include <algorithm>

#include "../formulas/int8.h"
#include "grid.cuh"
#include "pieces.cuh"

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
  int each;                 // packs of a thread
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
  template <int kPack, bool kWholeRows = false>
  static __device__ __forceinline__ Segment of(const RowWalk& walk, int64_t item) {
    Segment segment{};
    segment.stride = walk.lanes * kPack;
    if (item >= walk.items) return segment;
    const unsigned before = walk.lane() * kPack;
    const int whole = segment.stride * walk.each;
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
__global__ void __launch_bounds__(kThreads, Op::kResidentRows) rows_kernel(const Op op, const RowWalk walk) {
  constexpr int kPack = Op::kPack, kEach = Op::kEach;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * walk.teams + walk.team(); item < walk.items;
       item += static_cast<int64_t>(gridDim.x) * walk.teams) {
    const Segment segment = Segment::of<kPack>(walk, item);
    Op here = op;
    here.move(segment.first.x, segment.first.out);
    typename Op::Raw raw[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (op.wide && segment.has<kPack>(j)) raw[j] = here.load(j * segment.stride, j * segment.stride);
    const typename Op::Group group(op.affine(segment.first));
    const auto group_at = [&](int) { return group; };
    bool wide = op.wide && group.is_plain();
    if (wide) {
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (segment.has<kPack>(j)) wide &= here.store(raw[j], j * segment.stride, group_at);
    }
    segment.each_narrow<kPack>(wide, [&](const Offsets& offsets, int count) { op.narrow(offsets, count, group_at); });
  }
}

// --------------------------------------------------------------------------------------------- by columns
struct ColumnWalk {
  Axis inner, outer;           // of the groups
  Axis rows;                   // outer reduced
  int lanes, shift;            // across: 1 << shift, up to 32; the other threads of the block go down
  int64_t bands;               // of lanes * kPack columns
  int64_t step_x, step_out;    // from one row of a thread to its next
  int64_t piece_rows, pieces;  // rows of a piece, pieces of a band
  int64_t items;               // pieces of all bands
};

// What one thread has of a piece: up to a pack of columns, of every (kThreads / lanes)-th row.
struct Columns {
  Offsets first;
  int count;  // of columns
  int rows;

  static __device__ __forceinline__ Columns of(const ColumnWalk& walk, int64_t item, int pack) {
    Columns columns{};
    const int team = threadIdx.x >> walk.shift;
    const int64_t column = (split_off(item, walk.bands) * walk.lanes + threadIdx.x - team * walk.lanes) * pack;
    const int64_t row = split_off(item, walk.pieces) * walk.piece_rows + team;
    const int64_t rest = walk.rows.size - row, of_piece = walk.piece_rows - team,
                  left = rest < of_piece ? rest : of_piece;
    columns.first.move(walk.outer, item);
    columns.first.move(walk.inner, column);
    columns.first.move(walk.rows, row);
    columns.count = clip_count(walk.inner.size - column, pack);
    if (columns.count > 0) columns.rows = clip_count((left * walk.lanes + kThreads - 1) / kThreads, INT32_MAX);
    return columns;
  }

  // Calls f(offsets) for each of the rows.
  template <class F>
  __device__ __forceinline__ void each_narrow(const ColumnWalk& walk, const F& f) const {
    Offsets offsets = first;
#pragma unroll 1
    for (int left = rows; left > 0; --left, offsets.x += walk.step_x, offsets.out += walk.step_out) f(offsets);
  }
};

// The groups of a band in shared memory, word by word: [words of a Group, columns of a band]. To load and invert the
// scales of its own 8 columns would take a thread as many instructions as 4 packs of them do.
template <class Group, int kPack>
struct BandGroups {
  static constexpr int kWords = sizeof(Group) / sizeof(uint32_t);

  uint32_t* const words = reinterpret_cast<uint32_t*>(shared_memory());
  const int columns;

  __device__ explicit BandGroups(const ColumnWalk& walk) : columns(walk.lanes * kPack) {}

  // By the whole block. Whether all groups are plain.
  template <class Op>
  __device__ __forceinline__ bool load(const Op& op, const ColumnWalk& walk, int64_t item) {
    const int64_t first = split_off(item, walk.bands) * columns;
    split_off(item, walk.pieces);
    bool is_plain = true;
    for (int column = threadIdx.x; column < columns && first + column < walk.inner.size; column += kThreads) {
      Offsets offsets;
      offsets.move(walk.outer, item);
      offsets.move(walk.inner, first + column);
      const Group group(op.affine(offsets));
      is_plain &= group.is_plain();
      uint32_t of_group[kWords];
      memcpy(of_group, &group, sizeof(of_group));
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i * columns + column] = of_group[i];
    }
    return !block_any(!is_plain);
  }

  // That of a column.
  __device__ __forceinline__ Group at(int column) const {
    uint32_t of_group[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) of_group[i] = words[i * columns + column];
    Group group;
    memcpy(&group, of_group, sizeof(group));
    return group;
  }
};

template <class Op>
__global__ void __launch_bounds__(kThreads, Op::kResidentColumns) columns_kernel(const Op op, const ColumnWalk walk) {
  constexpr int kPack = Op::kPack, kEach = Op::kEach;
  using Group = typename Op::Group;
  BandGroups<Group, kPack> band(walk);
  for (int64_t item = blockIdx.x; item < walk.items; item += gridDim.x) {
    const Columns columns = Columns::of(walk, item, kPack);
    bool wide = op.wide && columns.count == kPack;
    Op here = op;
    here.move(columns.first.x, columns.first.out);
    if (wide) {
      // The first packs come to L2 while scales are loaded and inverted.
      Op next = here;
#pragma unroll
      for (int j = 0; j < kEach; ++j, next.move(walk.step_x, walk.step_out))
        if (j < columns.rows) next.prefetch();
    }
    wide &= band.load(op, walk, item);
    const int first = (threadIdx.x & (walk.lanes - 1)) * kPack;
    if (wide) {
      Group groups[kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k) groups[k] = band.at(first + k);
      const auto group_at = [&](int k) { return groups[k]; };
#pragma unroll 1
      for (int left = columns.rows; left > 0; left -= kEach) {
        typename Op::Raw raw[kEach];
        Op next = here;
#pragma unroll
        for (int j = 0; j < kEach; ++j, next.move(walk.step_x, walk.step_out))
          if (j < left) raw[j] = next.load(0, 0);
#pragma unroll
        for (int j = 0; j < kEach; ++j, here.move(walk.step_x, walk.step_out))
          if (j < left) wide &= here.store(raw[j], 0, group_at);
      }
    }
    const auto from_band = [&](int k) { return band.at(first + k); };
    if (!wide) columns.each_narrow(walk, [&](const Offsets& offsets) { op.narrow(offsets, columns.count, from_band); });
    barrier();
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
  walk.each = each;
  const int64_t packs = ceil_div(walk.inner.size, pack);
  walk.lanes = lanes_for(packs, pack, each, most_lanes);
  while (1 << walk.shift < walk.lanes) ++walk.shift;
  walk.teams = kThreads >> walk.shift;
  walk.segments = ceil_div(packs, static_cast<int64_t>(walk.lanes) * each);
  walk.items = rows * walk.segments;
  return walk;
}

inline ColumnWalk column_walk(const Axes& axes, int pack, int each, int resident) {
  ColumnWalk walk{};
  walk.inner = axes[Int8Layout::kInnerGroup];
  walk.outer = axes[Int8Layout::kOuterGroup];
  walk.rows = axes[Int8Layout::kOuterReduced];
  const int64_t packs = ceil_div(walk.inner.size, pack);
  while (walk.shift < 5 && int64_t{1} << walk.shift < packs) ++walk.shift;
  walk.lanes = 1 << walk.shift;
  walk.bands = ceil_div(packs, walk.lanes);
  const int64_t down = kThreads / walk.lanes;
  walk.step_x = down * walk.rows.x;
  walk.step_out = down * walk.rows.out;
  const int64_t bands = walk.bands * walk.outer.size;
  const Pieces pieces(ceil_div(walk.rows.size, down), bands, int64_t{multiprocessor_count()} * resident, each);
  walk.piece_rows = pieces.steps * down;
  walk.pieces = pieces.count;
  walk.items = bands * walk.pieces;
  return walk;
}

template <class Op>
void launch_pass(const Op& op, const Axes& axes, Stream stream) {
  if (axes.by_columns) {
    const ColumnWalk walk = column_walk(axes, Op::kPack, Op::kEach, Op::kResidentColumns);
    launch(columns_kernel<Op>, grid_of(walk.items), kThreads, walk.lanes * Op::kPack * sizeof(typename Op::Group),
           stream, op, walk);
    return;
  }
  // A tensor that is too small for so many packs a thread is spread over all multiprocessors.
  int each = Op::kEach;
  RowWalk walk = row_walk(axes, Op::kPack, each, kThreads);
  while (each > 1 && ceil_div(walk.items, walk.teams) < multiprocessor_count())
    walk = row_walk(axes, Op::kPack, each /= 2, kThreads);
  launch(rows_kernel<Op>, grid_of(ceil_div(walk.items, walk.teams)), kThreads, 0, stream, op, walk);
}

}  // namespace amp_kernels::cuda
