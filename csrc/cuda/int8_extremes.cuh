// Computes the scales and zero points of groups that held_rows_kernel (int8_quantize.cu) cannot hold on chip.
// csrc/int8.h explains groups, bands, pieces and segments. int8_walk.cuh explains packs, teams and columns_kernel.
//
// There are two launches. In the first launch, a block works on a piece of a group (by rows), or of a band of groups
// (by columns). It finds the lowest and the highest number of each group in this piece. The order of the numbers does
// not matter, because minima and maxima are not rounded. This launch reads x once, 2 or 4 bytes per element. The second
// launch combines the pieces of each group into a scale and a zero point.
//
//   by rows                                              by columns
//   group  [piece 0    |piece 1    |piece 2    ]         band  [row           ]  piece 0: block 0
//           block 0     block 1     block 2                    [row           ]
//           the teams of a block take segments in turn         [row           ]  piece 1: block 1
//                                                              ...     threads lie as in columns_kernel
//   partials[group, piece] -> fold_kernel, one warp per group -> scale[group], zero_point[group]
#pragma once

#include "int8_walk.cuh"

namespace amp_kernels {

// The lowest and the highest number of a group. If the lowest number is negative, `below` is its magnitude, otherwise
// `below` is 0. If the highest number is positive, `above` is that number, otherwise `above` is 0. Each is stored as
// the bits of a float without the sign bit. Compared as integers, such bits have the order of the floats, and NaN is
// above all numbers.
struct Reach {
  uint32_t below = 0, above = 0;

  __device__ __forceinline__ void add(const Reach& other) {
    below = other.below > below ? other.below : below;
    above = other.above > above ? other.above : above;
  }

  __device__ __forceinline__ Extremes extremes() const {
    Extremes result;
    result.magnitude = below > above ? below : above;
    memcpy(&result.low, &below, sizeof(below));
    memcpy(&result.high, &above, sizeof(above));
    result.low = -result.low;
    return result;
  }
};

__device__ __forceinline__ Reach warp_shuffle_xor(const Reach& reach, int mask) {
  return {warp_shuffle_xor(reach.below, mask), warp_shuffle_xor(reach.above, mask)};
}

namespace cuda {

struct Fold {
  __device__ __forceinline__ Reach operator()(Reach a, const Reach& b) const {
    a.add(b);
    return a;
  }
};

// Combines the reaches of all threads of a block, and returns the result to each thread. `shared` has room for 32
// reaches, one for each warp. After the call, `shared` may be used for something else.
__device__ __forceinline__ Reach block_reach(Reach reach, Reach* shared) {
  reach = {warp_max(reach.below), warp_max(reach.above)};
  const unsigned lane = threadIdx.x % 32;
  if (lane == 0) shared[threadIdx.x / 32] = reach;
  barrier();
  reach = lane < blockDim.x / 32 ? shared[lane] : Reach{};
  barrier();
  return {warp_max(reach.below), warp_max(reach.above)};
}

// The extremes of the packs that were added so far, in N classes. Class k consists of 0 and of the elements k, k + N,
// k + 2N ... of every pack. `low` holds the lowest number of each class, and `high` the highest. Missing elements of a
// pack are 0, so they change nothing. A word holds one fp32 number, or two 16-bit numbers that one instruction
// compares.
template <class T, int N>
struct Bounds {
  using Word = typename Held<T>::Type;
  Word low[sizeof(T) * N / 4] = {};
  Word high[sizeof(T) * N / 4] = {};

  template <int kPack>
  __device__ __forceinline__ void add(const Packed<T, kPack>& raw) {
    constexpr int kWords = sizeof(T) * N / 4;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) * kPack / 4); ++i) {
      Word word;
      memcpy(&word, raw.word + i, sizeof(word));
      low[i % kWords] = smaller(low[i % kWords], word);
      high[i % kWords] = larger(high[i % kWords], word);
    }
  }

  template <int kPack>
  __device__ __forceinline__ void add(const Vector<T, kPack>& elements) {
    Packed<T, kPack> raw;
    memcpy(raw.word, elements.data, sizeof(raw.word));
    add(raw);
  }

  __device__ __forceinline__ Reach at(int k) const {
    T ends[2][N];
    memcpy(ends[0], low, sizeof(low));
    memcpy(ends[1], high, sizeof(high));
    return {float_bits(to_float(ends[0][k])) & 0x7fffffffu, float_bits(to_float(ends[1][k])) & 0x7fffffffu};
  }
};

// The extremes of packs that all belong to one group.
template <class T>
struct RowBounds : Bounds<T, 4 / sizeof(T)> {
  __device__ __forceinline__ Reach reach() const {
    Reach all;
#pragma unroll
    for (int k = 0; k < static_cast<int>(4 / sizeof(T)); ++k) all.add(this->at(k));
    return all;
  }
};

constexpr int kResidentExtremes = 5;  // blocks on a multiprocessor: together they have 80 KB of loads in flight

template <class T>
struct ExtremesPass {
  static constexpr int kPack = 16 / sizeof(T);
  static constexpr int kEach = 4;  // packs that a thread loads before it waits: 64 bytes

  const T* x;
  bool wide;
  int64_t groups;
  int64_t pieces;   // of a group
  Reach* partials;  // [groups, pieces]
};

// By rows.
template <class T>
__global__ void __launch_bounds__(kThreads, kResidentExtremes)
    row_extremes_kernel(const ExtremesPass<T> pass, const RowWalk walk) {
  constexpr int kPack = ExtremesPass<T>::kPack, kEach = ExtremesPass<T>::kEach;
  Reach* shared = reinterpret_cast<Reach*>(shared_memory());
  const int64_t items = pass.groups * pass.pieces;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t group = item;
    const int64_t piece = split_off(group, pass.pieces);
    RowBounds<T> bounds;
    for (int64_t s = piece * walk.teams + walk.team(); s < walk.segments; s += pass.pieces * walk.teams) {
      const Segment segment = Segment::of<kPack>(walk, group, s);
      if (pass.wide) {
        Packed<T, kPack> raw[kEach] = {};
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (segment.has<kPack>(j)) raw[j] = load_wide<kPack>(pass.x + segment.first + j * segment.stride);
#pragma unroll
        for (int j = 0; j < kEach; ++j) bounds.add(raw[j]);
      }
      segment.each_narrow<kPack>(
          pass.wide, [&](int64_t offset, int count) { bounds.add(load_each<kPack>(pass.x + offset, 1, count)); });
    }
    const Reach reach = block_reach(bounds.reach(), shared);
    if (threadIdx.x == 0) pass.partials[item] = reach;
  }
}

// By columns.
template <class T>
__global__ void __launch_bounds__(kThreads, kResidentExtremes)
    column_extremes_kernel(const ExtremesPass<T> pass, const ColumnWalk walk) {
  constexpr int kPack = ExtremesPass<T>::kPack, kEach = ExtremesPass<T>::kEach;
  Reach* shared = reinterpret_cast<Reach*>(shared_memory());  // [kThreads / lanes, kPack, lanes]
  const int team = threadIdx.x >> walk.shift, lane = threadIdx.x - team * walk.lanes;
  for (int64_t item = blockIdx.x; item < walk.items; item += gridDim.x) {
    const Columns columns = Columns::of(walk, item, kPack);
    Bounds<T, kPack> bounds;
    if (pass.wide && columns.count == kPack) {
      const T* from = pass.x + columns.first;
#pragma unroll 1
      for (int left = columns.rows; left > 0; left -= kEach, from += kEach * walk.step) {
        Packed<T, kPack> raw[kEach] = {};
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (j < left) raw[j] = load_wide<kPack>(from + j * walk.step);
#pragma unroll
        for (int j = 0; j < kEach; ++j) bounds.add(raw[j]);
      }
    } else {
      columns.each_narrow(walk,
                          [&](int64_t offset) { bounds.add(load_each<kPack>(pass.x + offset, 1, columns.count)); });
    }
#pragma unroll
    for (int k = 0; k < kPack; ++k) shared[(team * kPack + k) * walk.lanes + lane] = bounds.at(k);
    barrier();
    // The packs of one lane cover kPack columns. For each of these columns, one thread combines what all teams found.
    if (team < kPack) {
      Reach column;
      for (int d = 0; d < kThreads / walk.lanes; ++d) column.add(shared[d * kPack * walk.lanes + threadIdx.x]);
      int64_t rest = item;
      const int64_t band = split_off(rest, walk.bands), piece = split_off(rest, walk.pieces);
      const int64_t i = (band * walk.lanes + lane) * kPack + team;
      if (i < walk.columns) pass.partials[(rest * walk.columns + i) * pass.pieces + piece] = column;
    }
    barrier();
  }
}

struct ScaleFold {
  const Reach* partials;
  int64_t groups, pieces;
  Affine* affine;
  float* scale;
  int32_t* zero_point;
};

// Each warp combines the pieces of a group.
static __global__ void __launch_bounds__(kThreads) fold_kernel(const ScaleFold fold) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t group = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32; group < fold.groups;
       group += warps) {
    Reach reach;
    for (int64_t piece = threadIdx.x % 32; piece < fold.pieces; piece += 32)
      reach.add(fold.partials[group * fold.pieces + piece]);
    reach = lanes_reduce(reach, 32, Fold());
    if (threadIdx.x % 32 != 0) continue;
    const Affine affine = affine_of(reach.extremes(), fold.zero_point == nullptr);
    fold.affine[group] = affine;
    fold.scale[group] = affine.scale;
    if (fold.zero_point != nullptr) fold.zero_point[group] = affine.zero_point;
  }
}

// ------------------------------------------------------------------------------------- host side

// Divides groups into pieces, and launches the two kernels. The caller provides device memory of bytes() bytes. This
// memory holds the Affine of each group, followed by the Reach of each piece of each group.
struct ExtremesPlan {
  bool by_columns;
  RowWalk rows;
  ColumnWalk columns;
  int64_t groups, pieces;

  ExtremesPlan(const Int8Layout& layout, int pack, int each)
      : by_columns(layout.is_by_columns()), rows{}, columns{}, groups(layout.groups()) {
    if (by_columns) {
      columns = column_walk(layout, pack, each, kResidentExtremes);
      pieces = columns.pieces;
    } else {
      rows = row_walk(layout, pack, each, kThreads);
      const int64_t resident = int64_t{multiprocessor_count()} * kResidentExtremes;
      pieces = Pieces(ceil_div(rows.segments, rows.teams), groups, resident, 1).count;
    }
  }

  int64_t bytes() const { return groups * (sizeof(Affine) + pieces * sizeof(Reach)); }

  template <class T>
  void launch(const T* x, bool wide, Affine* affine, float* scale, int32_t* zero_point, Stream stream) const {
    Reach* partials = reinterpret_cast<Reach*>(affine + groups);
    const ExtremesPass<T> pass{x, wide, groups, pieces, partials};
    if (by_columns) {
      amp_kernels::launch(column_extremes_kernel<T>, grid_of(columns.items), kThreads,
                          kThreads * ExtremesPass<T>::kPack * sizeof(Reach), stream, pass, columns);
    } else {
      amp_kernels::launch(row_extremes_kernel<T>, grid_of(groups * pieces), kThreads, 32 * sizeof(Reach), stream, pass,
                          rows);
    }
    const ScaleFold fold{partials, groups, pieces, affine, scale, zero_point};
    amp_kernels::launch(fold_kernel, grid_of(ceil_div(groups, kThreads / 32)), kThreads, 0, stream, fold);
  }
};

}  // namespace cuda
}  // namespace amp_kernels
