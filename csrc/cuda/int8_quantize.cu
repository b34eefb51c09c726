// Quantization to int8, and fake quantization, with the same bits as csrc/formulas/int8.h:
//
//   code = clamp(rint(x * (1 / scale)) + zero_point, low, 127)         fake = (code - zero_point) * scale
//
//   kernels                                                  when                       bytes per element (fp16, fp32)
//   held_rows_kernel                                         a group is one row         3, 5
//                                                            that fits on chip
//   row_ or column_extremes_kernel, fold_kernel, and then    other groups               5, 9
//   rows_kernel or columns_kernel
//   rows_kernel or columns_kernel                            the scale is given         3, 5
//
// The bytes are those of quantization to codes. Fake quantization writes an element of x's dtype instead of a code: 1
// byte more for fp16, and 3 bytes more for fp32.
//
// int8_walk.cuh has rows_kernel and columns_kernel, and explains packs, teams and lanes. held_rows_kernel is in this
// file. Its teams have 1 to 512 threads. A team reads a row once, and holds it in registers until its codes are stored:
//
//   row  [pack][pack] ... [pack]   lane 0 ... lane n       a thread loads 8 packs -> extremes of the team -> scale ->
//        [pack][pack] ... [pack]                           codes, from the same registers
#include "int8_codes.cuh"
#include "int8_extremes.cuh"
#include "int8_walk.cuh"

namespace amp_kernels::cuda {
namespace {

// The Op (int8_walk.cuh) that quantizes. Out is int8_t, or T for fake quantization. Steps are the products
// x * (1 / scale). kKnown is what store() may assume about them (`enum Steps` in int8_codes.cuh).
template <class T, class Out, bool kStochastic, Steps kKnown = kAny>
struct QuantizeOp {
  static constexpr int kPack = 16 / sizeof(T);
  // Whether store() may be called with kInside, which leaves out the clamping. Only codes that are rounded to nearest
  // use kInside. Fake quantization moves more bytes than quantization to codes. So in fake quantization kInside would
  // only take registers, and save no time.
  static constexpr bool kHasInside = std::is_same_v<Out, int8_t> && !kStochastic;
  static_assert(kHasInside || kKnown != kInside);
  static constexpr int kEach = 4;  // 64 bytes per thread: four blocks have 64 KB in flight on a multiprocessor
  // Blocks on a multiprocessor: as many as its registers allow. With random bits, a thread takes up to 80 registers by
  // rows, and up to 112 registers by columns. Without random bits, the registers by columns depend on what a thread
  // holds for each column. With the lowest and highest steps it takes 80 registers for 16-bit x, and fewer for fp32,
  // whose packs have half as many columns. With only the inverse (kInside) it takes 56 registers.
  static constexpr int kResidentRows = kStochastic ? 3 : 4;
  static constexpr int kResidentColumns = kStochastic ? 2 : kKnown == kInside || sizeof(T) == 4 ? 4 : 3;
  using Element = T;
  using Group = std::conditional_t<kKnown == kInside, InsideAffine, BoundedAffine>;
  using Raw = Packed<T, kPack>;

  const T* x;
  Out* out;
  Scales scales;
  bool wide;
  uint64_t seed;

  __device__ __forceinline__ Affine affine(int64_t group) const {
    return kKnown == kInside ? scales.computed[group] : scales.at(group);
  }

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

  __device__ __forceinline__ void prefetch(int64_t offset) const { amp_kernels::prefetch(x + offset); }
  __device__ __forceinline__ Raw load(int64_t offset) const { return load_wide<kPack>(x + offset); }

  // With kAny, steps may be NaN. If any steps of the pack are NaN, this function stores nothing and returns false, and
  // the kernel then calls narrow(). NaN is found by adding up all steps: if any are NaN, the sum is NaN. (inf and -inf
  // add up to NaN too. narrow() gives the right codes in every case.) The sum takes a quarter of the time of a
  // comparison and a selection for each element.
  template <Steps kSteps = kKnown, class AffineAt>
  __device__ __forceinline__ bool store(const Raw& raw, int64_t offset, const AffineAt& affine_at) const {
    float steps[kPack], noise[kPack], sum = 0.0f;
    if constexpr (kStochastic) neighbours_noise(noise, offset, seed);
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
      pack_codes<kSteps>(result, steps, affine_at);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        result.data[k] = from_float<Out>(multiply_rn(add_rn(steps[k], -kMagic), affine_at(k).scale));
    }
    store_wide(out + offset, result);
    return true;
  }

  template <class AffineAt>
  __device__ __forceinline__ void narrow(int64_t offset, int count, const AffineAt& affine_at) const {
    float noise[kPack] = {};
    if constexpr (kStochastic) neighbours_noise(noise, offset, seed);
    const Vector<T, kPack> values = load_each<kPack>(x + offset, 1, count);
    store_each(out + offset, convert(values, noise, affine_at), 1, count);
  }
};

// ------------------------------------------------------------------------------- rows held on chip

// Packs that a thread holds. Each row has a cost that does not depend on its length, and that is as high as the cost of
// 8 packs. With fewer packs, a thread would spend more time on this cost than on its packs.
constexpr int kHeldPacks = 8;
// Threads of the largest team, which is a whole block. Without random bits, a multiprocessor holds two such blocks, and
// one of them loads while the other stores. With random bits, it holds one such block.
constexpr int kMostLanes = 512;

// A team computes the scale of a row and its codes. Elements that are not in a complete, aligned pack are read twice,
// the second time from cache.
template <class Op>
__global__ void __launch_bounds__(kMostLanes, Op::kResidentRows* kThreads / kMostLanes)
    held_rows_kernel(const Op op, const RowWalk walk, float* scale, int32_t* zero_point) {
  constexpr int kPack = Op::kPack, kEach = kHeldPacks;
  Reach* shared = reinterpret_cast<Reach*>(shared_memory());
  const bool symmetric = zero_point == nullptr;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * walk.teams; first < walk.items;
       first += static_cast<int64_t>(gridDim.x) * walk.teams) {
    const int64_t item = first + walk.team();
    const Segment row = item < walk.items ? Segment::of<kPack>(walk, item, 0) : Segment{};
    typename Op::Raw raw[kEach] = {};
    RowBounds<typename Op::Element> bounds;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (op.wide && row.has<kPack>(j)) raw[j] = op.load(row.first + j * row.stride);
#pragma unroll
    for (int j = 0; j < kEach; ++j) bounds.add(raw[j]);
    row.each_narrow<kPack>(op.wide,
                           [&](int64_t offset, int count) { bounds.add(load_each<kPack>(op.x + offset, 1, count)); });
    const Reach reach =
        walk.lanes > 32 ? block_reach(bounds.reach(), shared) : lanes_reduce(bounds.reach(), walk.lanes, Fold());
    const Affine affine = affine_of(reach.extremes(), symmetric);
    if (item < walk.items && walk.lane() == 0) {
      scale[item] = affine.scale;
      if (!symmetric) zero_point[item] = affine.zero_point;
    }
    const BoundedAffine group(affine);
    const auto affine_at = [&](int) { return group; };
    const bool wide = op.wide && group.is_plain();
    const auto store = [&](auto steps) {
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (row.has<kPack>(j)) op.template store<steps>(raw[j], row.first + j * row.stride, affine_at);
    };
    if (wide && symmetric && Op::kHasInside) {
      store(std::integral_constant<Steps, kInside>());
    } else if (wide) {
      store(std::integral_constant<Steps, kNumbers>());
    }
    row.each_narrow<kPack>(wide, [&](int64_t offset, int count) { op.narrow(offset, count, affine_at); });
  }
}

bool fits_on_chip(const Int8Layout& layout, int pack) {
  return !layout.is_by_columns() && layout.reduced <= static_cast<int64_t>(kMostLanes) * kHeldPacks * pack;
}

template <class Op>
void launch_held(const Op& op, const Int8Layout& layout, float* scale, int32_t* zero_point, Stream stream) {
  RowWalk walk = row_walk(layout, Op::kPack, kHeldPacks, kMostLanes);
  int block = kThreads;
  if (walk.lanes > 32) {  // a block takes one row, and has only as many warps as the row needs
    block = static_cast<int>(ceil_div(ceil_div(walk.length, Op::kPack * kHeldPacks), 32) * 32);
    walk.lanes = block;
    walk.shift = 10;
    walk.teams = 1;
  }
  launch(held_rows_kernel<Op>, grid_of(ceil_div(walk.items, walk.teams)), block, 32 * sizeof(Reach), stream, op, walk,
         scale, zero_point);
}

// ------------------------------------------------------------------------------------- host side

template <class T, class Out, bool kStochastic>
void launch_codes(const Quantize& quantize, const Affine* computed, Stream stream) {
  using Op = QuantizeOp<T, Out, kStochastic>;
  using InsideOp = QuantizeOp<T, Out, kStochastic, Op::kHasInside ? kInside : kAny>;
  const Int8Layout& layout = quantize.layout;
  const Op op{
      static_cast<const T*>(quantize.x),
      static_cast<Out*>(quantize.out),
      {quantize.scale, quantize.zero_point, computed},
      is_wide(layout, quantize.x, sizeof(T), Op::kPack) && is_wide(layout, quantize.out, sizeof(Out), Op::kPack),
      quantize.seed};
  if (computed != nullptr && quantize.zero_point == nullptr) {
    launch_pass(InsideOp{op.x, op.out, op.scales, op.wide, op.seed}, layout, stream);
  } else if (quantize.is_static || computed != nullptr) {
    launch_pass(op, layout, stream);
  } else {
    launch_held(op, layout, quantize.scale, quantize.zero_point, stream);
  }
}

// Whether scales are computed by a separate pass (int8_extremes.cuh), and the plan of that pass.
struct Scaling {
  static constexpr int kEach = 4;

  int pack;
  bool is_pass;
  ExtremesPlan plan;

  explicit Scaling(const Quantize& quantize)
      : pack(quantize.dtype == kFloat ? 4 : 8),
        is_pass(!quantize.is_static && !fits_on_chip(quantize.layout, pack)),
        plan(quantize.layout, pack, kEach) {}
};

}  // namespace

int64_t quantize_workspace(const Quantize& quantize) {
  const Scaling scaling(quantize);
  return scaling.is_pass ? scaling.plan.bytes() : 0;
}

void launch_quantize(const Quantize& quantize, void* workspace, Stream stream) {
  const Scaling scaling(quantize);
  with_dtype(quantize.dtype, [&](auto zero) {
    using T = decltype(zero);
    Affine* computed = nullptr;
    if (scaling.is_pass) {
      computed = static_cast<Affine*>(workspace);
      const bool wide = is_wide(quantize.layout, quantize.x, sizeof(T), scaling.pack);
      scaling.plan.launch(static_cast<const T*>(quantize.x), wide, computed, quantize.scale, quantize.zero_point,
                          stream);
    }
    if (quantize.fake) {
      launch_codes<T, T, false>(quantize, computed, stream);
    } else if (quantize.stochastic) {
      launch_codes<T, int8_t, true>(quantize, computed, stream);
    } else {
      launch_codes<T, int8_t, false>(quantize, computed, stream);
    }
  });
}

}  // namespace amp_kernels::cuda
