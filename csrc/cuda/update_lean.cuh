// The update of tensors whose states are bf16 or codes (../formulas/states.h). It is the update of update.cuh, but a
// warp works on a whole group of 128 neighbours, whose codes share a scale:
//
//   group:  | lane 0: 4 neighbours | lane 1: 4 neighbours | ... | lane 31: 4 neighbours |
//
// So the largest magnitude of a group is found in registers. Groups are counted from the first element of the tensor,
// and chunks begin at groups. A thread takes four neighbours of two groups at a time. It starts all loads before it
// uses any element.
//
// Bytes per element, read and written together: 2 for a state in codes, and 1/16 for its scales; 4 for a state in bf16.
// AdamW moves 14 bytes for a 16-bit weight with its remainder, a 16-bit gradient and two states in codes, in place of
// 26.
//
// If an array of the tensor is not aligned to four elements, as a view into a bucket may be, all of its elements are
// accessed one by one. The same is done for the last group of a tensor, if it is not full.
#pragma once

#include "../formulas/states.h"
#include "update.cuh"

namespace amp_kernels::cuda {

// What a kernel is compiled for. F is the formula. Bit k of kPresent says whether the tensors have the k-th state. P
// and G are the types of parameters and gradients. S is the type of the states in coded_states(): uint8_t for codes, or
// uint16_t for bf16. The other states are fp32. 16-bit parameters have remainders.
template <class F, int kPresent_, class P_, class G_, class S>
struct LeanVariant {
  using Formula = F;
  using P = P_;
  using G = G_;
  static constexpr int kStates = F::kStates;
  static constexpr int kPresent = kPresent_, kCoded = coded_states<F>(kPresent);
  static constexpr bool kIsSplit = !std::is_same_v<P, float>;
  static constexpr bool kHasScales = std::is_same_v<S, uint8_t>;
  static constexpr int kRows_ = kHasScales ? kRows : kState + (kPresent >> 2 != 0 ? 3 : kPresent >> 1 != 0 ? 2 : 1);
  // How many blocks share a multiprocessor: as many as possible without spilled registers.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
  static constexpr int kResidentBlocks = kPresent >> 2 != 0 || kHasScales ? 2 : 3;
#else
  static constexpr int kResidentBlocks = 2;
#endif

  static constexpr bool has(int k) { return (kPresent >> k & 1) != 0; }
  static constexpr bool is_coded(int k) { return (kCoded >> k & 1) != 0; }

  template <int k>
  using State = std::conditional_t<is_coded(k), S, float>;
};

// Calls f(k) for each state that the tensors have, with k as an integral_constant.
template <class V, class F>
__device__ __forceinline__ void each_state(const F& f) {
  if constexpr (V::has(0)) f(std::integral_constant<int, 0>{});
  if constexpr (V::has(1)) f(std::integral_constant<int, 1>{});
  if constexpr (V::has(2)) f(std::integral_constant<int, 2>{});
}

// The arrays of a chunk, from its first element on.
template <class V>
struct LeanArrays {
  const typename V::G* grad;
  typename V::P* weight;
  int16_t* remainder;  // nullptr if parameters are fp32
  typename V::template State<0>* state0;
  typename V::template State<1>* state1;
  typename V::template State<2>* state2;
  float* scale[2];  // from the scale of the chunk's first group on

  template <class Walk>
  __device__ __forceinline__ explicit LeanArrays(const Walk& walk)
      : grad(walk.template in<const typename V::G>(kGrad)),
        weight(walk.template in<typename V::P>(kParam)),
        remainder(V::kIsSplit ? walk.template in<int16_t>(kMaster) : nullptr),
        state0(at<0>(walk)),
        state1(at<1>(walk)),
        state2(at<2>(walk)) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      scale[k] = V::kHasScales && V::is_coded(k)
                     ? reinterpret_cast<float*>(walk.row(kScale + k)) + walk.begin() / kStateGroup
                     : nullptr;
  }

  template <int k>
  __device__ __forceinline__ auto* state() const {
    if constexpr (k == 0)
      return state0;
    else if constexpr (k == 1)
      return state1;
    else
      return state2;
  }

  // Whether four neighbours can be accessed together in all arrays.
  __device__ __forceinline__ bool are_aligned() const {
    bool aligned = phase(grad) == 0 && phase(weight) == 0 && (!V::kIsSplit || phase(remainder) == 0);
    each_state<V>([&](auto k) { aligned = aligned && phase(state<k.value>()) == 0; });
    return aligned;
  }

 private:
  template <int k, class Walk>
  __device__ __forceinline__ static typename V::template State<k>* at(const Walk& walk) {
    if constexpr (V::has(k))
      return walk.template in<typename V::template State<k>>(kState + k);
    else
      return nullptr;
  }
};

// Four neighbours of an array, loaded together if kWide. If not, the first `count` are loaded one by one.
template <class T, bool kWide>
struct Quad {
  std::conditional_t<kWide, Packed<T, kPack>, Vector<T, kPack>> elements;

  __device__ __forceinline__ void load(const T* p, [[maybe_unused]] int count) {
    if constexpr (kWide)
      elements = load_wide<kPack>(p);
    else
      elements = load_each<kPack>(p, 1, count);
  }

  __device__ __forceinline__ Vector<T, kPack> get() const {
    if constexpr (kWide)
      return elements.unpacked();
    else
      return elements;
  }

  __device__ __forceinline__ static void store(T* p, const Vector<T, kPack>& elements, [[maybe_unused]] int count) {
    if constexpr (kWide)
      store_wide(p, elements);
    else
      store_each(p, elements, 1, count);
  }
};

// Four neighbours in all arrays, from element i of the chunk on. A thread holds them. If not kWide, `count`
// of them are in the tensor, and the others are 0. All threads of a warp must call update() together.
template <class V, bool kWide>
class LeanPack {
  template <int k>
  using StateQuad = Quad<typename V::template State<k>, kWide>;
  static constexpr int kAll = V::kStates;

 public:
  __device__ __forceinline__ void load(const LeanArrays<V>& arrays, int i, int count = kPack) {
    grad_.load(arrays.grad + i, count);
    weight_.load(arrays.weight + i, count);
    if constexpr (V::kIsSplit) remainder_.load(arrays.remainder + i, count);
    each_state<V>([&](auto k) {
      quad<k.value>().load(arrays.template state<k.value>() + i, count);
      // One thread reads the scale of a group, and later writes the new scale. If other threads read it too, nothing
      // would order their reads before the write, because a shuffle orders no memory accesses.
      if constexpr (V::kHasScales && V::is_coded(k.value)) {
        const float* const scale = arrays.scale[k.value] + i / kStateGroup;
        assume_global(scale);
        scale_[k.value] = owns_scale(i, count) ? *scale : 0.0f;
      }
    });
  }

  // `first` is the position of the chunk's first element in its tensor.
  __device__ __forceinline__ void update(const LeanArrays<V>& arrays, const typename V::Formula& formula,
                                         const Noise& noise, int64_t first, int i, int count = kPack) {
    const Vector<float, kPack> g = floats(grad_.get());
    Vector<float, kPack> p, s[3] = {};
    if constexpr (V::kIsSplit)
      p = join(weight_.get(), remainder_.get());
    else
      p = weight_.get();
    each_state<V>([&](auto k) { s[k.value] = values<k.value>(); });
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      float element[kAll];
#pragma unroll
      for (int k = 0; k < kAll; ++k) element[k] = s[k].data[j];
      p.data[j] = formula(p.data[j], g.data[j], element);
#pragma unroll
      for (int k = 0; k < kAll; ++k) s[k].data[j] = element[k];
    }
    store_parameters(arrays, p, i, count);
    each_state<V>([&](auto k) { store<k.value>(arrays, s[k.value], noise, first, i, count); });
  }

 private:
  template <int k>
  __device__ __forceinline__ auto& quad() {
    if constexpr (k == 0)
      return state0_;
    else if constexpr (k == 1)
      return state1_;
    else
      return state2_;
  }

  // Whether this thread holds the first element of the group.
  __device__ __forceinline__ static bool owns_scale(int i, int count) {
    return i % static_cast<int>(kStateGroup) == 0 && count > 0;
  }

  template <int k>
  __device__ __forceinline__ Vector<float, kPack> values() {
    const auto elements = quad<k>().get();
    float scale = 0.0f;
    if constexpr (V::kHasScales && V::is_coded(k)) {
      const uint32_t bits = warp_max(float_bits(scale_[k]));  // scale_ is 0 in all threads but one
      memcpy(&scale, &bits, sizeof(scale));
    }
    Vector<float, kPack> values;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if constexpr (!V::is_coded(k)) {
        values.data[j] = elements.data[j];
      } else if constexpr (!V::kHasScales) {
        values.data[j] = from_bf16_bits(elements.data[j]);
      } else {
        constexpr Code kCode = V::Formula::kCodes[k];
        const int code = kCode == Code::kMomentum ? static_cast<int8_t>(elements.data[j]) : elements.data[j];
        values.data[j] = decoded<kCode>(code, scale);
      }
    }
    return values;
  }

  template <int k>
  __device__ __forceinline__ static void store(const LeanArrays<V>& arrays, const Vector<float, kPack>& values,
                                               const Noise& noise, int64_t first, int i, int count) {
    using T = typename V::template State<k>;
    Vector<T, kPack> elements;
    if constexpr (!V::is_coded(k)) {
      elements = values;
    } else {
      const int64_t group = (first + i) / kStateGroup;
      const GroupNoise bits = noise.of(group, k);
      const int at = i % static_cast<int>(kStateGroup);
      if constexpr (V::kHasScales) {
        constexpr Code kCode = V::Formula::kCodes[k];
        Vector<float, kPack> own = values;
        uint32_t magnitude = 0;
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          if (j >= count) own.data[j] = 0.0f;  // beyond the tensor, where the formula may have made NaN
          const uint32_t bits_of_own = float_bits(own.data[j]) & 0x7fffffffu;
          magnitude = bits_of_own > magnitude ? bits_of_own : magnitude;
        }
        const StateGroup of(kCode, warp_max(magnitude));
#pragma unroll
        for (int j = 0; j < kPack; ++j)
          elements.data[j] = static_cast<uint8_t>(encoded<kCode>(own.data[j], of, bits.at(at + j)));
        if (owns_scale(i, count)) {
          float* const scale = arrays.scale[k] + i / kStateGroup;
          assume_global(scale);
          *scale = of.scale;
        }
      } else {
#pragma unroll
        for (int j = 0; j < kPack; ++j)
          elements.data[j] = static_cast<uint16_t>(bf16_bits(values.data[j], bits.at(at + j)));
      }
    }
    Quad<T, kWide>::store(arrays.template state<k>() + i, elements, count);
  }

  __device__ __forceinline__ static void store_parameters(const LeanArrays<V>& arrays, const Vector<float, kPack>& p,
                                                          int i, int count) {
    using P = typename V::P;
    if constexpr (V::kIsSplit) {
      Vector<P, kPack> weights;
      Vector<int16_t, kPack> remainders;
      split(p, weights, remainders);
      Quad<P, kWide>::store(arrays.weight + i, weights, count);
      Quad<int16_t, kWide>::store(arrays.remainder + i, remainders, count);
    } else {
      Quad<P, kWide>::store(arrays.weight + i, p, count);
    }
  }

  Quad<typename V::G, kWide> grad_;
  Quad<typename V::P, kWide> weight_;
  Quad<int16_t, kWide> remainder_;
  StateQuad<0> state0_;
  StateQuad<1> state1_;
  StateQuad<2> state2_;
  float scale_[2];
};

// Updates the groups of a chunk from group `from` on. The elements of the last one, up to `size`, may be fewer.
template <class V>
__device__ __forceinline__ void update_each(const LeanArrays<V>& arrays, const typename V::Formula& formula,
                                            const Noise& noise, int64_t first, int from, int size) {
  constexpr int kGroup = static_cast<int>(kStateGroup);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int group = from + warp; group * kGroup < size; group += kThreads / 32) {
    const int i = group * kGroup + lane * kPack, left = size - i;
    const int count = left < 0 ? 0 : left < kPack ? left : kPack;
    LeanPack<V, false> pack;
    pack.load(arrays, count > 0 ? i : group * kGroup, count);
    pack.update(arrays, formula, noise, first, i, count);
  }
}

// Updates the full groups of a chunk. `end` is the number of packs in them.
template <class V>
__device__ __forceinline__ void update_full(const LeanArrays<V>& arrays, const typename V::Formula& formula,
                                            const Noise& noise, int64_t first, int end) {
  for (int k = static_cast<int>(threadIdx.x); k < end; k += 2 * kThreads) {
    // All threads of a warp take the same branch, because `end` is a multiple of 32. As in update_packs(), the first
    // pack is loaded twice if there is no second one.
    const bool has_second = k + kThreads < end;
    const int i = k * kPack, j = has_second ? i + kThreads * kPack : i;
    LeanPack<V, true> one, other;
    one.load(arrays, i);
    other.load(arrays, j);
    one.update(arrays, formula, noise, first, i);
    if (has_second) other.update(arrays, formula, noise, first, j);
  }
}

template <class V>
using LeanWalk = ChunkWalk<V::kRows_, /*kBackwards=*/true>;

template <class V>
__global__ void __launch_bounds__(kThreads, V::kResidentBlocks) update_lean_kernel(const Update update) {
  using Formula = typename V::Formula;
  LeanWalk<V> walk(update.table, nullptr, reinterpret_cast<int64_t*>(shared_memory()));
  if (is_skipped(update)) return;
  const float factor = update_factor(update);
  for (; walk.has_chunk(); walk.advance()) {
    const LeanArrays<V> arrays(walk);
    if (arrays.grad == nullptr) continue;
    bool has[Formula::kStates];
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) has[k] = V::has(k);
    const Noise noise{step_of(walk), walk.tensor()};
    const Formula formula = formula_of<Formula>(update, walk, factor, has);
    const int64_t rest = walk.rest();
    const int size = static_cast<int>(rest < update.table.chunk_size ? rest : update.table.chunk_size);
    const int full = arrays.are_aligned() ? size / static_cast<int>(kStateGroup) : 0;
    update_each(arrays, formula, noise, walk.begin(), full, size);
    update_full(arrays, formula, noise, walk.begin(), full * 32);
  }
  end_update(update);
}

// Calls f with the kernel for a form, and with the bytes of shared memory that the kernel needs.
template <class Formula, class P, class G, class S, int kPresent, class F>
void with_lean_states(const Form& form, const F& f) {
  if constexpr (kPresent >= 1 << Formula::kStates) {
    throw std::invalid_argument("amp_kernels: no kernel has these states");
  } else {
    constexpr int kRequired = (1 << Formula::kRequired) - 1;
    if constexpr ((kPresent & kRequired) == kRequired && coded_states<Formula>(kPresent) != 0) {
      if (form.states == kPresent) {
        using V = LeanVariant<Formula, kPresent, P, G, S>;
        return f(update_lean_kernel<V>, LeanWalk<V>::kWords * sizeof(int64_t));
      }
    }
    with_lean_states<Formula, P, G, S, kPresent + 1>(form, f);
  }
}

template <class Formula, class F>
void with_lean_kernel(const Form& form, const F& f) {
  if (form.split != (form.param_dtype != kFloat) || (form.grad_dtype != kFloat && form.grad_dtype != form.param_dtype))
    throw std::invalid_argument("amp_kernels: no kernel has these dtypes");
  with_dtype(form.param_dtype, [&](auto param) {
    using P = decltype(param);
    const auto with_grad = [&](auto grad) {
      using G = decltype(grad);
      if (form.state_dtype == kInt8)
        with_lean_states<Formula, P, G, uint8_t, 0>(form, f);
      else
        with_lean_states<Formula, P, G, uint16_t, 0>(form, f);
    };
    if (form.grad_dtype == kFloat)
      with_grad(float{});
    else
      with_grad(P{});
  });
}

}  // namespace amp_kernels::cuda
