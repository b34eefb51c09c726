// Scales from the data, for groups that do not fit on chip: each block leaves the extremes of a piece of a group, a
// second launch folds them. Minima and maxima are exact, so the order of the pieces does not matter.
#pragma once

#include "int8_walk.cuh"

namespace amp_kernels {

__device__ __forceinline__ Extremes warp_shuffle_xor(Extremes extremes, int mask) {
  return {warp_shuffle_xor(extremes.magnitude, mask), warp_shuffle_xor(extremes.low, mask),
          warp_shuffle_xor(extremes.high, mask)};
}

namespace cuda {

struct Fold {
  __device__ __forceinline__ Extremes operator()(Extremes a, const Extremes& b) const {
    a.add(b);
    return a;
  }
};

// Missing elements of a pack are 0, which changes no extreme. A symmetric scale needs the magnitude alone.
template <class T, int N>
__device__ __forceinline__ void add(Extremes& extremes, const Vector<T, N>& raw, bool symmetric) {
  if (symmetric) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t magnitude = float_bits(to_float(raw.data[k])) & 0x7fffffffu;
      extremes.magnitude = magnitude > extremes.magnitude ? magnitude : extremes.magnitude;
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) extremes.add(to_float(raw.data[k]));
  }
}

template <class T>
struct ExtremesPass {
  static constexpr int kPack = 16 / sizeof(T);
  static constexpr int kEach = 4;

  const T* x;
  bool wide;
  bool symmetric;
  int64_t pieces;      // of a group
  Extremes* partials;  // [groups, pieces]
};

// Groups with a reduced level along memory: `outer` is the other reduced level, then the kept ones.
template <class T>
__global__ void __launch_bounds__(kThreads) row_extremes_kernel(const ExtremesPass<T> pass, const RowWalk walk) {
  constexpr int kPack = ExtremesPass<T>::kPack, kEach = ExtremesPass<T>::kEach;
  Extremes* shared = reinterpret_cast<Extremes*>(shared_memory());
  const int teams = kThreads / walk.lanes;
  const int64_t segments = walk.outer[0].size * walk.segments;  // of a group
  const int64_t items = walk.outer[1].size * walk.outer[2].size * pass.pieces;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t group = item;
    const int64_t piece = split_off(group, pass.pieces);
    Extremes extremes;
    for (int64_t s = piece * teams + threadIdx.x / walk.lanes; s < segments; s += pass.pieces * teams) {
      const Segment segment = Segment::of<kPack, kEach>(walk, group * segments + s);
      if (pass.wide) {
        Packed<T, kPack> raw[kEach] = {};
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (segment.has<kPack>(j))
            raw[j] = load_wide<kPack>(pass.x + segment.at(walk, segment.begin + j * segment.stride).x);
#pragma unroll
        for (int j = 0; j < kEach; ++j) add(extremes, raw[j].unpacked(), pass.symmetric);
      }
      segment.each_narrow<kPack>(walk, pass.wide, [&](const Place& place, int count) {
        add(extremes, load_each<kPack>(pass.x + place.x, walk.inner.x, count), pass.symmetric);
      });
    }
    extremes = block_reduce(extremes, Extremes{}, shared, Fold());
    if (threadIdx.x == 0) pass.partials[item] = extremes;
  }
}

// Groups with a kept level along memory.
template <class T>
__global__ void __launch_bounds__(kThreads) column_extremes_kernel(const ExtremesPass<T> pass, const ColumnWalk walk) {
  constexpr int kPack = ExtremesPass<T>::kPack, kEach = ExtremesPass<T>::kEach;
  Extremes* shared = reinterpret_cast<Extremes*>(shared_memory());  // [kThreads / lanes, kPack, lanes]
  const int lane = threadIdx.x % walk.lanes, team = threadIdx.x / walk.lanes;
  for (int64_t item = blockIdx.x; item < walk.items; item += gridDim.x) {
    const Stripe stripe = Stripe::of(walk, item, kPack);
    Extremes extremes[kPack];
    if (pass.wide && stripe.count == kPack && walk.inner.position == 0) {
      for (int64_t row = stripe.begin; row < stripe.end; row += kEach * stripe.down) {
        Packed<T, kPack> raw[kEach] = {};
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const Place place = stripe.at(walk, row + j * stripe.down);
          if (row + j * stripe.down < stripe.end && place.position < walk.length)
            raw[j] = load_wide<kPack>(pass.x + place.x);
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j)
#pragma unroll
          for (int k = 0; k < kPack; ++k) extremes[k].add(to_float(raw[j].unpacked().data[k]));
      }
    } else {
#pragma unroll 1
      for (int64_t row = stripe.begin; row < stripe.end; row += stripe.down) {
        const Place place = stripe.at(walk, row);
        const int count = clip_count(place.present(walk.inner, walk.length), stripe.count);
        const Vector<T, kPack> raw = load_each<kPack>(pass.x + place.x, walk.inner.x, count);
#pragma unroll
        for (int k = 0; k < kPack; ++k) extremes[k].add(to_float(raw.data[k]));
      }
    }
#pragma unroll
    for (int k = 0; k < kPack; ++k) shared[(team * kPack + k) * walk.lanes + lane] = extremes[k];
    barrier();
    if (team < kPack) {  // the thread has column `team` of the pack of `lane`, which `down` threads have read
      Extremes column;
      for (int64_t d = 0; d < stripe.down; ++d) column.add(shared[d * kPack * walk.lanes + threadIdx.x]);
      int64_t rest = item;
      const int64_t tile = split_off(rest, walk.tiles), piece = split_off(rest, walk.stretches);
      const int64_t i = (tile * walk.lanes + lane) * kPack + team;
      const int64_t group = rest * walk.outer.group + i * walk.inner.group;
      if (i < walk.inner.size) pass.partials[group * pass.pieces + piece] = column;
    }
    barrier();
  }
}

struct ScaleFold {
  const Extremes* partials;
  int64_t groups, pieces;
  Level inner, outer;  // kept
  Affine* affine;
  float* scale;
  int32_t* zero_point;
};

// A warp for each group.
static __global__ void __launch_bounds__(kThreads) fold_kernel(const ScaleFold fold) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t group = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32; group < fold.groups;
       group += warps) {
    Extremes extremes;
    for (int64_t piece = threadIdx.x % 32; piece < fold.pieces; piece += 32)
      extremes.add(fold.partials[group * fold.pieces + piece]);
    extremes = lanes_reduce(extremes, 32, Fold());
    if (threadIdx.x % 32 != 0) continue;
    const Affine affine = affine_of(extremes, fold.zero_point == nullptr);
    fold.affine[group] = affine;
    int64_t outer = group;
    Place place;
    place.move(fold.inner, split_off(outer, fold.inner.size));
    place.move(fold.outer, outer);
    fold.scale[place.scale] = affine.scale;
    if (fold.zero_point != nullptr) fold.zero_point[place.scale] = affine.zero_point;
  }
}

// ------------------------------------------------------------------------------------- host side

// Who reads which piece, and the memory between the launches: an Affine for each group, then the partial extremes.
struct ExtremesPlan {
  bool by_rows;
  RowWalk rows;
  ColumnWalk columns;
  int64_t groups, pieces;

  ExtremesPlan(const Levels& levels, int pack, int each)
      : by_rows(Levels::is_reduced(levels.x_fast)), rows{}, columns{}, groups(levels.groups()) {
    const int64_t blocks = static_cast<int64_t>(multiprocessor_count()) * kBlocksPerMultiprocessor;
    if (by_rows) {
      rows = row_walk(levels, levels.x_fast, pack, each, kThreads);
      rows.outer[0] = levels.level[Levels::twin(levels.x_fast)];
      rows.outer[1] = levels.level[Int8Layout::kG2];
      rows.outer[2] = levels.level[Int8Layout::kG1];
      const int64_t rounds = ceil_div(rows.outer[0].size * rows.segments, kThreads / rows.lanes);
      pieces = std::min(rounds, ceil_div(blocks, groups));
    } else {
      columns = column_walk(levels, levels.x_fast, pack, each, blocks);
      pieces = columns.stretches;
    }
  }

  int64_t bytes() const { return groups * (sizeof(Affine) + pieces * sizeof(Extremes)); }

  template <class T>
  void launch(const T* x, bool wide, Affine* affine, const Levels& levels, float* scale, int32_t* zero_point,
              Stream stream) const {
    Extremes* partials = reinterpret_cast<Extremes*>(affine + groups);
    const ExtremesPass<T> pass{x, wide, zero_point == nullptr, pieces, partials};
    if (by_rows) {
      amp_kernels::launch(row_extremes_kernel<T>, grid_of(groups * pieces), kThreads, 32 * sizeof(Extremes), stream,
                          pass, rows);
    } else {
      amp_kernels::launch(column_extremes_kernel<T>, grid_of(columns.items), kThreads,
                          kThreads * ExtremesPass<T>::kPack * sizeof(Extremes), stream, pass, columns);
    }
    const ScaleFold fold{partials, groups, pieces,    levels.level[Int8Layout::kG2], levels.level[Int8Layout::kG1],
                         affine,   scale,  zero_point};
    amp_kernels::launch(fold_kernel, grid_of(ceil_div(groups, kThreads / 32)), kThreads, 0, stream, fold);
  }
};

}  // namespace cuda
}  // namespace amp_kernels
