// The kernels that walk over an Int8Layout on a GPU. csrc/int8.h explains the layout, and the words band, piece and
// segment. A pack is kPack neighbours in memory: 16 bytes of x, of gradients, or of results in a float dtype. The codes
// of a pack are kPack bytes. A kernel is made of a walk and of an Op. An Op is the code for one pack. There are two
// walks:
//
//   rows_kernel: a team of 1 to 256 threads takes a segment       columns_kernel: a block takes a piece of a band;
//   of a group, and each thread takes kEach packs                 up to 32 threads (lanes) take packs of the same row
//
//          lane 0  lane 1  lane 2  lane 3                                lane 0   lane 1   ...
//          [pack]  [pack]  [pack]  [pack]   j = 0                   row  [pack]   [pack]   threads 0 to lanes - 1
//          [pack]  [pack]  [pack]  [pack]   j = 1                   row  [pack]   [pack]   threads lanes to 2*lanes-1
//          ...                              kEach                        ...
//          one scale, in a register of each thread                       kPack scales in registers, one per column,
//                                                                        which the block loads once
//
// A thread asks for kEach packs before it waits for a scale or for a pack. So it has kEach packs in flight. By rows it
// loads these packs. By columns it prefetches them, then waits for scales, and then loads the packs.
//
// An Op has these members:
//
//   wide                             whether each complete pack can be loaded and stored in one access. It is true if
//                                    addresses are aligned to packs: by rows, wherever a group begins; by columns,
//                                    wherever a row begins
//   prefetch(offset)                 brings a pack to L2 (columns_kernel)
//   load(offset)                     loads a pack, and returns it as it lies in memory (type Raw)
//   store(raw, offset, group_at)     computes and writes the results of a loaded pack. If it returns false, it wrote
//                                    nothing, and narrow() must be called for this pack
//   narrow(offset, count, group_at)  loads up to kPack elements one at a time, and writes their results, whatever their
//                                    values
//   affine(group)                    reads the scale and the zero point of a group
//   Group                            what store() needs to know about a group. group_at(k) is the Group of element k of
//                                    the pack
//   Group::is_plain()                whether store() gives the right results for this group. If it does not, kernels
//                                    call narrow() instead
#pragma once

#include <algorithm>

#include "../formulas/int8.h"
#include "grid.cuh"
#include "pieces.cuh"

namespace amp_kernels::cuda {

// Returns index % size, and sets `index` to index / size. Most calls need no division.
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

__device__ __forceinline__ int clip_count(int64_t count, int most) {
  return count < 0 ? 0 : count < most ? static_cast<int>(count) : most;
}

// The scales and zero points of all groups, from the caller or from an earlier launch.
struct Scales {
  const float* scale;
  const int32_t* zero_point;
  const Affine* computed;  // by the earlier launch; nullptr if the caller gave scales

  __device__ __forceinline__ Affine at(int64_t group) const {
    if (computed != nullptr) return computed[group];
    return given_affine(scale[group], zero_point == nullptr ? nullptr : zero_point + group);
  }
};

// ------------------------------------------------------------------------------------------------ by rows
struct RowWalk {
  int64_t length;  // elements in a group
  // groups_of_row: as in Int8Layout (csrc/int8.h). missing: by how many elements the last group of a row is shorter
  // than the others (0 if it is not).
  int64_t groups_of_row, missing;
  int64_t segments, items;  // segments in a group, and segments in all groups
  int each;                 // packs per thread
  // lanes: threads in a team, 1 << shift. teams: how many teams are in a block. held_rows_kernel is an exception: if a
  // team needs more than 32 threads, it is a whole block of `lanes` threads, and `shift` is so large that team() is 0.
  int lanes;
  int shift, teams;

  __device__ __forceinline__ int team() const { return threadIdx.x >> shift; }
  __device__ __forceinline__ int lane() const { return threadIdx.x - (team() << shift); }
};

// The part of a segment that one thread takes: packs that are `stride` elements apart.
struct Segment {
  int64_t first;  // offset of the thread's first element
  int count;      // elements from there to the end of the segment; 0 or less if the thread has none
  unsigned stride;

  // This thread's part of segment `number` in a group.
  template <int kPack>
  static __device__ __forceinline__ Segment of(const RowWalk& walk, int64_t group, int64_t number) {
    Segment segment{};
    segment.stride = walk.lanes * kPack;
    const unsigned before = walk.lane() * kPack;
    const int whole = segment.stride * walk.each;
    const int64_t begin = number * whole;
    segment.first = group * walk.length + begin + before;
    int64_t length = walk.length;
    if (walk.missing != 0) {
      int64_t row = group;
      const bool is_last = split_off(row, walk.groups_of_row) + 1 == walk.groups_of_row;
      segment.first -= row * walk.missing;
      length -= is_last ? walk.missing : 0;
    }
    segment.count = clip_count(length - begin, whole) - static_cast<int>(before);
    return segment;
  }

  // Calls f(offset, count) for packs of this thread. `wide` says whether the complete packs are already done. If it is
  // true, f is called for at most one pack: the last one, if that is incomplete. If it is false, f is called for every
  // pack.
  template <int kPack, class F>
  __device__ __forceinline__ void each_narrow(bool wide, const F& f) const {
    if (wide && count % kPack == 0) return;
#pragma unroll 1
    for (int element = 0; element < count; element += static_cast<int>(stride)) {
      if (wide && element + kPack <= count) continue;
      f(first + element, clip_count(count - element, kPack));
    }
  }

  // Whether the thread has a j-th pack that is complete.
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
    int64_t group = item;
    const int64_t number = split_off(group, walk.segments);
    const Segment segment = Segment::of<kPack>(walk, group, number);
    typename Op::Raw raw[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (op.wide && segment.has<kPack>(j)) raw[j] = op.load(segment.first + j * segment.stride);
    const typename Op::Group affine(op.affine(group));
    const auto group_at = [&](int) { return affine; };
    bool wide = op.wide && affine.is_plain();
    if (wide) {
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (segment.has<kPack>(j)) wide &= op.store(raw[j], segment.first + j * segment.stride, group_at);
    }
    segment.each_narrow<kPack>(wide, [&](int64_t offset, int count) { op.narrow(offset, count, group_at); });
  }
}

// --------------------------------------------------------------------------------------------- by columns
struct ColumnWalk {
  int64_t columns, rows;       // size of a matrix [reduced][inner]; the tensor has `outer` of them
  int lanes, shift;            // lanes = 1 << shift: threads that take packs of the same row, at most 32
  int64_t bands;               // bands in a matrix, of lanes * kPack columns each
  int64_t step;                // elements from one row of a thread to its next
  int64_t piece_rows, pieces;  // rows in a piece, pieces in a band
  int64_t items;               // pieces in all bands of all matrices
};

// The part of a piece that one thread takes: up to kPack neighbouring columns, in every (kThreads / lanes)-th row.
struct Columns {
  int64_t first;  // offset of the first element
  int count;      // how many columns
  int rows;       // how many rows

  static __device__ __forceinline__ Columns of(const ColumnWalk& walk, int64_t item, int pack) {
    Columns columns{};
    const int team = threadIdx.x >> walk.shift;
    const int64_t column = (split_off(item, walk.bands) * walk.lanes + threadIdx.x - team * walk.lanes) * pack;
    const int64_t row = split_off(item, walk.pieces) * walk.piece_rows + team;  // leaves the matrix's number in `item`
    const int64_t rest = walk.rows - row, of_piece = walk.piece_rows - team, left = rest < of_piece ? rest : of_piece;
    columns.first = (item * walk.rows + row) * walk.columns + column;
    columns.count = clip_count(walk.columns - column, pack);
    if (columns.count > 0) columns.rows = clip_count((left * walk.lanes + kThreads - 1) / kThreads, INT32_MAX);
    return columns;
  }

  // Calls f(offset) for each of the rows.
  template <class F>
  __device__ __forceinline__ void each_narrow(const ColumnWalk& walk, const F& f) const {
    int64_t offset = first;
#pragma unroll 1
    for (int left = rows; left > 0; --left, offset += walk.step) f(offset);
  }
};

// The Groups of a band in shared memory, stored as an array of words, [words of a Group, columns of a band]. The block
// loads and inverts each scale once. Otherwise each thread would load and invert the scales of its own columns. For 8
// columns this would take as many instructions as computing the codes of 4 packs.
template <class Group, int kPack>
struct BandGroups {
  static constexpr int kWords = sizeof(Group) / sizeof(uint32_t);

  uint32_t* const words = reinterpret_cast<uint32_t*>(shared_memory());
  const int columns;

  __device__ explicit BandGroups(const ColumnWalk& walk) : columns(walk.lanes * kPack) {}

  // Called by the whole block. Returns whether all groups are plain.
  template <class Op>
  __device__ __forceinline__ bool load(const Op& op, const ColumnWalk& walk, int64_t item) {
    const int64_t first = split_off(item, walk.bands) * columns;
    split_off(item, walk.pieces);
    bool is_plain = true;
    for (int column = threadIdx.x; column < columns && first + column < walk.columns; column += kThreads) {
      const Group group(op.affine(item * walk.columns + first + column));
      is_plain &= group.is_plain();
      uint32_t group_words[kWords];
      memcpy(group_words, &group, sizeof(group_words));
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i * columns + column] = group_words[i];
    }
    return !block_any(!is_plain);
  }

  // The Group of a column.
  __device__ __forceinline__ Group at(int column) const {
    uint32_t group_words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) group_words[i] = words[i * columns + column];
    Group group;
    memcpy(&group, group_words, sizeof(group));
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
    if (wide) {
      // The first packs travel to L2 while scales are loaded and inverted.
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (j < columns.rows) op.prefetch(columns.first + j * walk.step);
    }
    wide &= band.load(op, walk, item);
    const int first = (threadIdx.x & (walk.lanes - 1)) * kPack;
    if (wide) {
      Group groups[kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k) groups[k] = band.at(first + k);
      const auto group_at = [&](int k) { return groups[k]; };
      int64_t at = columns.first;
#pragma unroll 1
      for (int left = columns.rows; left > 0; left -= kEach, at += kEach * walk.step) {
        typename Op::Raw raw[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (j < left) raw[j] = op.load(at + j * walk.step);
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (j < left) wide &= op.store(raw[j], at + j * walk.step, group_at);
      }
    }
    const auto from_band = [&](int k) { return band.at(first + k); };
    if (!wide) {
      // `columns` is computed again. If it were kept until here, a thread would take one register more than it can have
      // on sm_75.
      const Columns again = Columns::of(walk, item, kPack);
      again.each_narrow(walk, [&](int64_t offset) { op.narrow(offset, again.count, from_band); });
    }
    barrier();
  }
}

// ---------------------------------------------------------------------------------------------- host side
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of blocks to launch for the work of `blocks` blocks: at most 64 per multiprocessor. A multiprocessor runs
// only a few blocks at a time (a wave), so 64 blocks run in several waves. The last wave may be incomplete. With
// several waves it is a small part of the time.
inline unsigned grid_of(int64_t blocks) {
  return static_cast<unsigned>(std::min<int64_t>(blocks, static_cast<int64_t>(multiprocessor_count()) * 64));
}

// The number of threads in a team for a group of `packs` packs, if a thread takes up to `each` packs. It is a power of
// 2, and at most `most`. 32 codes are a sector of memory. So a team has a thread for each pack of the group's first 32
// codes, even if a thread then has fewer than `each` packs.
inline int lanes_for(int64_t packs, int pack, int each, int most) {
  int64_t lanes = 1;
  while (lanes < most && (lanes < std::min<int64_t>(packs, 32 / pack) || lanes * each < packs)) lanes *= 2;
  return static_cast<int>(lanes);
}

// Whether packs of `pack` elements in `array` are aligned to their size: by rows, wherever a group begins; by columns,
// wherever a row begins.
inline bool is_wide(const Int8Layout& layout, const void* array, size_t element_size, int pack) {
  if (reinterpret_cast<uintptr_t>(array) % (pack * element_size) != 0) return false;
  if (layout.is_by_columns()) return layout.outer * layout.reduced == 1 || layout.inner % pack == 0;
  const bool is_one_row = layout.outer == layout.groups_of_row();
  return (layout.outer == 1 || layout.reduced % pack == 0) && (is_one_row || layout.row % pack == 0);
}

inline RowWalk row_walk(const Int8Layout& layout, int pack, int each, int most_lanes) {
  RowWalk walk{};
  walk.length = layout.reduced;
  walk.groups_of_row = layout.groups_of_row();
  walk.missing = walk.groups_of_row * layout.reduced - layout.row;
  walk.each = each;
  const int64_t packs = ceil_div(layout.reduced, pack);
  walk.lanes = lanes_for(packs, pack, each, most_lanes);
  while (1 << walk.shift < walk.lanes) ++walk.shift;
  walk.teams = kThreads >> walk.shift;
  walk.segments = ceil_div(packs, static_cast<int64_t>(walk.lanes) * each);
  walk.items = layout.outer * walk.segments;
  return walk;
}

inline ColumnWalk column_walk(const Int8Layout& layout, int pack, int each, int resident) {
  ColumnWalk walk{};
  walk.columns = layout.inner;
  walk.rows = layout.reduced;
  const int64_t packs = ceil_div(walk.columns, pack);
  while (walk.shift < 5 && int64_t{1} << walk.shift < packs) ++walk.shift;
  walk.lanes = 1 << walk.shift;
  walk.bands = ceil_div(packs, walk.lanes);
  const int64_t down = kThreads / walk.lanes;
  walk.step = down * walk.columns;
  const int64_t bands = walk.bands * layout.outer;
  const Pieces pieces(ceil_div(walk.rows, down), bands, int64_t{multiprocessor_count()} * resident, each);
  walk.piece_rows = pieces.steps * down;
  walk.pieces = pieces.count;
  walk.items = bands * walk.pieces;
  return walk;
}

template <class Op>
void launch_pass(const Op& op, const Int8Layout& layout, Stream stream) {
  if (layout.is_by_columns()) {
    const ColumnWalk walk = column_walk(layout, Op::kPack, Op::kEach, Op::kResidentColumns);
    launch(columns_kernel<Op>, grid_of(walk.items), kThreads, walk.lanes * Op::kPack * sizeof(typename Op::Group),
           stream, op, walk);
    return;
  }
  // If there are fewer blocks than multiprocessors, threads take fewer packs, so that there are more blocks.
  int each = Op::kEach;
  RowWalk walk = row_walk(layout, Op::kPack, each, kThreads);
  while (each > 1 && ceil_div(walk.items, walk.teams) < multiprocessor_count())
    walk = row_walk(layout, Op::kPack, each /= 2, kThreads);
  launch(rows_kernel<Op>, grid_of(ceil_div(walk.items, walk.teams)), kThreads, 0, stream, op, walk);
}

}  // namespace amp_kernels::cuda
