// Quantization: rows that fit on chip are read once; other groups are read for their extremes first and then again;
// with a scale given there is one pass.
#include "int8_codes.cuh"
#include "int8_extremes.cuh"
#include "int8_walk.cuh"

namespace amp_kernels::cuda {
namespace {

// Out is int8_t, or T for fake quantization.
template <class T, class Out, bool kStochastic>
struct QuantizeOp {
  static constexpr int kPack = 16 / sizeof(T);
  // Fake quantization moves more bytes, and a second way to round would cost it registers.
  static constexpr bool kHasInside = std::is_same_v<Out, int8_t> && !kStochastic;
  static constexpr int kEach = 4;  // 2048 threads x 64 bytes in flight are three times what an H200 needs
  using Element = T;
  using Group = BoundedAffine;
  using Raw = Packed<T, kPack>;

  const T* x;
  Out* out;
  Scales scales;
  bool wide;
  uint64_t seed;

  static __device__ __forceinline__ Out convert(float value, float noise, const Affine& affine) {
    if constexpr (std::is_same_v<Out, int8_t>) {
      return static_cast<int8_t>(kStochastic ? stochastic_code(value, noise, affine) : nearest_code(value, affine));
    } else {
      return from_float<Out>(fake_of(value, nearest_code(value, affine), affine));
    }
  }

  template <class AffineAt>
  static __device__ __forceinline__ Vector<Out, kPack> convert(const Vector<T, kPack>& values,
                                                               const float (&noise)[kPack], const AffineAt& affine_at) {
    Vector<Out, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k) result.data[k] = convert(to_float(values.data[k]), noise[k], affine_at(k));
    return result;
  }

  __device__ __forceinline__ Raw load(const Place& place, unsigned offset) const {
    return load_wide<kPack>(x + place.x + offset);
  }

  // Where groups are plain. Does nothing and returns false if a step is NaN: a sum shows it at a quarter of the price
  // of a comparison and a selection for each.
  template <Steps kSteps = kAny, class AffineAt>
  __device__ __forceinline__ bool store(const Raw& raw, const Place& place, unsigned offset,
                                        const AffineAt& affine_at) const {
    float steps[kPack], noise[kPack], sum = 0.0f;
    if constexpr (kStochastic) neighbours_noise(noise, place.index + offset, seed);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      steps[k] = multiply_rn(to_float(raw.unpacked().data[k]), affine_at(k).inverse);
      if constexpr (kSteps == kAny) sum = add_rn(sum, steps[k]);
      if constexpr (kStochastic) steps[k] = add_rn(steps[k], noise[k]);
    }
    if (sum != sum) return false;
    round_steps<kStochastic, kSteps>(steps, affine_at);
    Vector<Out, kPack> result;
    if constexpr (std::is_same_v<Out, int8_t>) {
      pack_codes(result, steps, affine_at);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        result.data[k] = from_float<Out>(multiply_rn(add_rn(steps[k], -kMagic), affine_at(k).scale));
    }
    store_wide(out + place.out + offset, result);
    return true;
  }

  template <class AffineAt>
  __device__ __forceinline__ void narrow(const Place& place, const Level& level, int count,
                                         const AffineAt& affine_at) const {
    float noise[kPack] = {};
    if constexpr (kStochastic) random_noise(noise, place.index, level.index, seed);
    const Vector<T, kPack> values = load_each<kPack>(x + place.x, level.x, count);
    store_each(out + place.out, convert(values, noise, affine_at), level.out, count);
  }
};

// ------------------------------------------------------------------------------- rows held on chip

constexpr int kHeldPacks = 8;    // of a thread: what a row costs whatever its length is as much as their codes
constexpr int kMostLanes = 512;  // threads of a block: with 64 registers each, as 1024 or two blocks have, some spill

// The packs of a row stay in registers from their only load to the store of their codes. What is not wide is read
// again, from cache.
template <class Op>
__global__ void __launch_bounds__(kMostLanes, 1)
    held_rows_kernel(const Op op, const RowWalk walk, float* scale, int32_t* zero_point) {
  constexpr int kPack = Op::kPack, kEach = kHeldPacks;
  Reach* shared = reinterpret_cast<Reach*>(shared_memory());
  const bool symmetric = zero_point == nullptr;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * walk.teams; first < walk.items;
       first += static_cast<int64_t>(gridDim.x) * walk.teams) {
    const int64_t item = first + walk.team();
    const Segment row = Segment::of<kPack, kEach, true>(walk, item);
    typename Op::Raw raw[kEach] = {};
    RowBounds<typename Op::Element> bounds;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (op.wide && row.has<kPack>(j)) raw[j] = op.load(row.first, j * row.stride);
#pragma unroll
    for (int j = 0; j < kEach; ++j) bounds.add(raw[j]);
    row.each_narrow<kPack>(walk, op.wide, [&](const Place& place, int count) {
      bounds.add(load_each<kPack>(op.x + place.x, walk.inner.x, count));
    });
    const Reach reach =
        walk.lanes > 32 ? block_reach(bounds.reach(), shared) : lanes_reduce(bounds.reach(), walk.lanes, Fold());
    const Affine affine = affine_of(reach.extremes(), symmetric);
    if (item < walk.items && walk.lane() == 0) {
      scale[row.first.scale] = affine.scale;
      if (!symmetric) zero_point[row.first.scale] = affine.zero_point;
    }
    const typename Op::Group group(affine);
    const auto affine_at = [&](int) { return group; };
    const bool wide = op.wide && group.is_plain();
    const auto store = [&](auto steps) {
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (row.has<kPack>(j)) op.template store<steps>(raw[j], row.first, j * row.stride, affine_at);
    };
    if (wide && symmetric && Op::kHasInside) {
      store(std::integral_constant<Steps, kInside>());
    } else if (wide) {
      store(std::integral_constant<Steps, kNumbers>());
    }
    row.each_narrow<kPack>(walk, wide,
                           [&](const Place& place, int count) { op.narrow(place, walk.inner, count, affine_at); });
  }
}

bool fits_on_chip(const Levels& levels, int pack) {
  const int row = levels.out_fast;
  return Levels::is_reduced(row) && levels.x_fast == row && levels.level[Levels::twin(row)].size == 1 &&
         levels.level[row].size <= static_cast<int64_t>(kMostLanes) * kHeldPacks * pack;
}

template <class Op>
void launch_held(const Op& op, const Levels& levels, float* scale, int32_t* zero_point, Stream stream) {
  RowWalk walk = row_walk(levels, levels.out_fast, Op::kPack, kHeldPacks, kMostLanes);
  int block = kThreads;
  if (walk.lanes > 32) {  // a block for a row, of just the warps it takes
    block = static_cast<int>(ceil_div(ceil_div(walk.inner.size, Op::kPack * kHeldPacks), 32) * 32);
    walk.lanes = block;
    walk.shift = 10;
    walk.teams = 1;
  }
  launch(held_rows_kernel<Op>, grid_of(ceil_div(walk.items, walk.teams)), block, 32 * sizeof(Reach), stream, op, walk,
         scale, zero_point);
}

// ------------------------------------------------------------------ neighbours in x and out differ

struct TileWalk {
  Level across;  // neighbours in x
  Level along;   // neighbours in out
  Level outer[2];
  int64_t length;
  int64_t tiles_across, tiles_along, items;
};

constexpr int kTile = 64;  // a warp reads 128 bytes of 16-bit elements and writes 128 bytes of codes
constexpr int kTileRow = kTile + 1;
constexpr int kTilePack = 4;  // elements that a thread writes

template <class T, class Out, bool kStochastic>
__global__ void __launch_bounds__(kThreads, 2)
    transposing_kernel(const QuantizeOp<T, Out, kStochastic> op, const TileWalk walk) {
  using Op = QuantizeOp<T, Out, kStochastic>;
  float* tile = reinterpret_cast<float*>(shared_memory());  // [along, across]
  for (int64_t item = blockIdx.x; item < walk.items; item += gridDim.x) {
    int64_t rest = item;
    const int64_t across = split_off(rest, walk.tiles_across) * kTile,
                  along = split_off(rest, walk.tiles_along) * kTile;
    Place place;
    place.move(walk.outer[0], split_off(rest, walk.outer[0].size));
    place.move(walk.outer[1], rest);
    place.move(walk.across, across);
    place.move(walk.along, along);
#pragma unroll 4
    for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
      const int row = i / kTile, column = i % kTile;
      Place at = place;
      at.move(walk.across, column);
      at.move(walk.along, row);
      const bool exists =
          across + column < walk.across.size && along + row < walk.along.size && at.position < walk.length;
      tile[row * kTileRow + column] = exists ? to_float(op.x[at.x]) : 0.0f;
    }
    barrier();
    for (int i = threadIdx.x; i < kTile * kTile / kTilePack; i += kThreads) {
      const int row = i % (kTile / kTilePack) * kTilePack, column = i / (kTile / kTilePack);
      Place at = place;
      at.move(walk.across, column);
      at.move(walk.along, row);
      // No level is cut off but R2, which is `along` or whole.
      const int present = clip_count(at.present(walk.along, walk.length), kTilePack);
      const int count = clip_count(walk.along.size - along - row, present);
      if (count == 0 || across + column >= walk.across.size) continue;
      float noise[kTilePack] = {};
      if constexpr (kStochastic) random_noise(noise, at.index, walk.along.index, op.seed);
      Vector<Out, kTilePack> result{};
      Place scale = at;
#pragma unroll
      for (int k = 0; k < kTilePack; ++k) {
        if (k < count) result.data[k] = Op::convert(tile[(row + k) * kTileRow + column], noise[k], op.scales.at(scale));
        scale.move(walk.along, 1);
      }
      if (op.wide && count == kTilePack) {
        store_wide(op.out + at.out, result);
      } else {
        store_each(op.out + at.out, result, walk.along.out, count);
      }
    }
    barrier();
  }
}

TileWalk tile_walk(const Levels& levels) {
  TileWalk walk{};
  walk.across = levels.level[levels.x_fast];
  walk.along = levels.level[levels.out_fast];
  int next = 0;
  for (int i = Int8Layout::kLevels - 1; i >= 0; --i)
    if (i != levels.x_fast && i != levels.out_fast) walk.outer[next++] = levels.level[i];
  walk.length = levels.length;
  walk.tiles_across = ceil_div(walk.across.size, kTile);
  walk.tiles_along = ceil_div(walk.along.size, kTile);
  walk.items = walk.tiles_across * walk.tiles_along * walk.outer[0].size * walk.outer[1].size;
  return walk;
}

// ------------------------------------------------------------------------------------- host side

template <class T, class Out, bool kStochastic>
void launch_codes(const Quantize& quantize, const Levels& levels, const Affine* computed, Stream stream) {
  using Op = QuantizeOp<T, Out, kStochastic>;
  const int inner = levels.out_fast;
  const bool has_random_words = !kStochastic || levels.level[inner].index == 1;
  Op op{static_cast<const T*>(quantize.x),
        static_cast<Out*>(quantize.out),
        {quantize.scale, quantize.zero_point, computed},
        has_random_words && levels.is_wide(quantize.x, sizeof(T), Op::kPack, &Level::x, inner) &&
            levels.is_wide(quantize.out, sizeof(Out), Op::kPack, &Level::out, inner),
        quantize.seed};
  if (levels.x_fast != inner) {
    op.wide = levels.is_wide(quantize.out, sizeof(Out), kTilePack, &Level::out, inner);
    const TileWalk walk = tile_walk(levels);
    launch(transposing_kernel<T, Out, kStochastic>, grid_of(walk.items), kThreads, kTile * kTileRow * sizeof(float),
           stream, op, walk);
  } else if (quantize.is_static || computed != nullptr) {
    launch_pass(op, levels, stream);
  } else {
    launch_held(op, levels, quantize.scale, quantize.zero_point, stream);
  }
}

// Whether scales come from a pass of their own, and that pass.
struct Scaling {
  static constexpr int kEach = 4;

  Levels levels;
  int pack;
  bool is_pass;
  ExtremesPlan plan;

  explicit Scaling(const Quantize& quantize)
      : levels(quantize.layout),
        pack(quantize.dtype == kFloat ? 4 : 8),
        is_pass(!quantize.is_static && !fits_on_chip(levels, pack)),
        plan(levels, pack, kEach) {}
};

}  // namespace

int64_t quantize_workspace(const Quantize& quantize) {
  const Scaling scaling(quantize);
  return scaling.is_pass ? scaling.plan.bytes() : 0;
}

void launch_quantize(const Quantize& quantize, void* workspace, Stream stream) {
  const Scaling scaling(quantize);
  const Levels& levels = scaling.levels;
  with_dtype(quantize.dtype, [&](auto zero) {
    using T = decltype(zero);
    Affine* computed = nullptr;
    if (scaling.is_pass) {
      computed = static_cast<Affine*>(workspace);
      const bool wide = levels.is_wide(quantize.x, sizeof(T), scaling.pack, &Level::x, levels.x_fast);
      scaling.plan.launch(static_cast<const T*>(quantize.x), wide, computed, levels, quantize.scale,
                          quantize.zero_point, stream);
    }
    if (quantize.fake) {
      launch_codes<T, T, false>(quantize, levels, computed, stream);
    } else if (quantize.stochastic) {
      launch_codes<T, int8_t, true>(quantize, levels, computed, stream);
    } else {
      launch_codes<T, int8_t, false>(quantize, levels, computed, stream);
    }
  });
}

}  // namespace amp_kernels::cuda
