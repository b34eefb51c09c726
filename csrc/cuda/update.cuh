// The update of every optimizer: p, states <- formula(p, factor * g, states). p is the fp32 parameter or master. A
// 16-bit weight is p, rounded. families.h explains formulas, and remainder.h the split masters of 16-bit weights.
//
// Bytes per element, read and written together:
//   parameter   8   if it is fp32, or a 16-bit weight with its remainder
//              10   if it is a 16-bit weight with an fp32 master: the weight is only written
//   state       8   for each
//   gradient    4 or 2, only read
// SGD with momentum moves 20 bytes for fp32 parameters, and 18 bytes for 16-bit weights with remainders and 16-bit
// gradients. An fp32 average (`ema_`) of a 16-bit weight with its remainder moves 12 bytes: the average is updated (8),
// and weight and remainder are only read (4).
//
// A block takes every gridDim.x-th chunk (csrc/table.h), from the last chunk back. A thread takes two packs of four
// neighbours at a time. It starts the loads of both packs from all arrays before it uses any element:
//
//   chunk:  | head | t0 t0 t0 t0 | t1 t1 t1 t1 | ... | t255 .. | t0 t0 t0 t0 | t1 .. | ... | t255 .. | ... | tail |
//                  | first packs: 1024 elements                | second packs                        |
//
// Packs begin where states and master are aligned to 16 bytes (16-bit remainders to 8 bytes). If there are neither
// states nor a master, packs begin where the weight is aligned. Head and tail of a tensor have at most three elements
// each. These elements go to the last warp, one per thread, because the last warp has the fewest packs in a short
// tensor.
//
// A gradient or weight may be misaligned relative to the states, as a view into a bucket is. If such an array has 16
// bits per element, each pack is read in the aligned words of four elements that hold it (Straddling). At the first and
// the last pack of a tensor, a word may reach beyond the tensor. From such a word, only the elements that are in the
// pack are read, one by one. They are at most three. Other elements of the tensor in this word belong to the head or
// tail.
#pragma once

#include <utility>

#include "../formulas/remainder.h"
#include "../formulas/unscale.h"
#include "grid.cuh"

namespace amp_kernels::cuda {

// Elements of a pack. Four fp32 elements are one 16-byte access, and fp32 states are most of the traffic. If a pack had
// eight elements, each fp32 access of a warp would skip every other 16 bytes.
constexpr int kPack = 4;

template <class T>
constexpr Dtype kDtypeOf = std::is_same_v<T, float>    ? kFloat
                           : std::is_same_v<T, __half> ? kHalf
                                                       : kBFloat16;

// What a kernel is compiled for: a formula, a number of states, the types of parameters (P) and gradients (G), and the
// type that row kMaster of the table points to (M). If that row has remainders, M is int16_t, otherwise float. If M is
// int16_t and P is float, the parameters are averages. The gradients are then the 16-bit weights that are averaged, and
// the remainders belong to these weights. kStates is Formula::kRequired or Formula::kStates. With kRequired, the kernel
// updates only the states that every parameter has, and need not test whether a parameter has them. With
// Formula::kStates, it updates all states that a parameter has.
template <class F, int kStates_, class P_, class M_, class G_>
struct Variant {
  using Formula = F;
  using P = P_;
  using M = M_;
  using G = G_;
  static constexpr int kStates = kStates_;
  static constexpr bool kJoins = kJoinsGrad<P, M>;  // P is an average, and M are the remainders of G
  static constexpr bool kIsFp32 = std::is_same_v<P, float> && !kJoins;
  static constexpr bool kIsSplit = std::is_same_v<M, int16_t> && !kJoins;
  static constexpr bool kReadsWeight = kIsFp32 || kIsSplit || kJoins;
  static constexpr bool kStraddles = sizeof(G) == 2 || kIsSplit;  // reads 16-bit arrays that may be misaligned
  // How many blocks share a multiprocessor: as many as possible without spilled registers. With one state or more, a
  // thread loads 80 bytes (SGD with momentum, 16 bits) to 160 bytes (three states) before it waits. With the number of
  // blocks for sm_90, all threads of a multiprocessor together then load 74 KB or more before they wait.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
  static constexpr int kResidentBlocks = kStates < 2 ? 4 : kStates < 3 ? 3 : 2;
#else  // with one block more, sm_86, sm_89 and sm_100 spill up to 104 bytes
  static constexpr int kResidentBlocks = kStates < 2 ? 3 : 2;
#endif
};

// The position of an element in its aligned pack: 0 to kPack - 1.
template <class T>
__device__ __forceinline__ int phase(const T* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T) % kPack);
}

// The arrays of a chunk.
template <class V>
struct Arrays {
  const typename V::G* grad;
  typename V::P* weight;
  typename V::M* master;  // nullptr if V::kIsFp32
  float* state[V::kStates > 0 ? V::kStates : 1];

  template <class Walk>
  __device__ __forceinline__ explicit Arrays(const Walk& walk)
      : grad(walk.template in<const typename V::G>(kGrad)),
        weight(walk.template in<typename V::P>(kParam)),
        master(V::kIsFp32 ? nullptr : walk.template in<typename V::M>(kMaster)) {
#pragma unroll
    for (int k = 0; k < V::kStates; ++k) state[k] = walk.template in<float>(kState + k);
  }

  __device__ __forceinline__ bool has(int k) const {
    return k < V::Formula::kRequired || (k < V::kStates && state[k] != nullptr);
  }
};

// The elements of the tensor before a pack and after it.
struct Margin {
  int64_t before, after;
};
constexpr Margin kInside{kPack, kPack};  // large enough that no word of a pack reaches beyond the tensor

// The division of a chunk into packs that are aligned in all states and in the master.
template <class V>
struct Packs : Division<kPack> {
  bool is_aligned;  // packs are aligned in gradient and weight, too
  int from, to;  // packs k with from <= k < to have all their words in the tensor. The first and the last pack of the
                 // tensor may be outside of this range

  template <class Walk>
  __device__ __forceinline__ Packs(const Walk& walk, const Arrays<V>& arrays)
      : Division<kPack>(walk.template divide<kPack>(0)) {
    int own = V::kIsFp32 ? -1 : phase(arrays.master);  // the phase of master and states
    bool states_agree = true;
#pragma unroll
    for (int k = 0; k < V::kStates; ++k) {
      if (!arrays.has(k)) continue;
      if (own < 0) own = phase(arrays.state[k]);
      states_agree = states_agree && phase(arrays.state[k]) == own;
    }
    if (own < 0) own = phase(arrays.weight);
    is_aligned = phase(arrays.grad) == own && phase(arrays.weight) == own;
    if (!states_agree) {
      // No element is in a pack. This is rare, because an optimizer allocates all its states with the same alignment.
      lead = others += packs * kPack;
      packs = from = to = 0;
      return;
    }
    if (own != 0) *static_cast<Division<kPack>*>(this) = walk.template divide<kPack>(own);
    from = 0;
    to = packs;
    if (!V::kStraddles || is_aligned || packs == 0) return;
    const bool reaches_before = walk.begin() + first < kPack, reaches_after = margin(walk, packs - 1).after < kPack;
    if (reaches_before) from = 1;
    if (reaches_after && to > from) --to;
  }

  // The first element of a pack.
  __device__ __forceinline__ int at(int pack) const { return first + pack * kPack; }

  template <class Walk>
  __device__ __forceinline__ Margin margin(const Walk& walk, int pack) const {
    return {walk.begin() + at(pack), walk.rest() - at(pack) - kPack};
  }
};

// N neighbours of one array. load() starts their loads; get() waits for them. In between, a thread starts the loads of
// all other arrays.
template <class T, int N>
struct Aligned {
  Packed<T, N> packed;

  __device__ __forceinline__ void load(const T* p, Margin) { packed = load_wide<N>(p); }
  __device__ __forceinline__ Vector<T, N> get() const { return packed.unpacked(); }
};

// Like Aligned, but with one access for each element.
template <class T, int N>
struct OneByOne {
  Vector<T, N> elements;

  __device__ __forceinline__ void load(const T* p, Margin) { elements = load_elements<N>(p); }
  __device__ __forceinline__ Vector<T, N> get() const { return elements; }
};

// Like Aligned, but for a misaligned pack of 16-bit elements. It is read as the one or two aligned words of 8 bytes
// that hold the pack. If a word reaches beyond the tensor, only those of its elements that are in the pack are read.
template <class T>
struct Straddling {
  static_assert(sizeof(T) == 2);
  uint64_t low, high;
  int shift;  // in bits

  __device__ __forceinline__ void load(const T* p, Margin margin) {
    const int in_high = phase(p), in_low = kPack - in_high;  // elements of the pack in each of the two words
    shift = in_high * 16;
    const auto* const words = reinterpret_cast<const uint64_t*>(p - in_high);
    assume_global(words);
    assume_global(words + 1);
    low = margin.before >= in_high ? words[0] : bits(p, in_low) << shift;
    high = in_high == 0 ? 0 : margin.after >= in_low ? words[1] : bits(p + in_low, in_high);
  }

  __device__ __forceinline__ Vector<T, kPack> get() const {
    const uint64_t bits = shift == 0 ? low : low >> shift | high << (64 - shift);
    Vector<T, kPack> elements;
    memcpy(elements.data, &bits, sizeof(bits));
    return elements;
  }

 private:
  __device__ __forceinline__ static uint64_t bits(const T* p, int count) {
    const Vector<T, kPack> elements = load_each<kPack>(p, 1, count);
    uint64_t bits;
    memcpy(&bits, elements.data, sizeof(bits));
    return bits;
  }
};

// How N neighbours are loaded. Misaligned fp32 elements are loaded one by one, because four words of 4 bytes take no
// more registers than one word of 16 bytes.
template <class T, int N, bool kAligned>
using Loading = std::conditional_t<
    N == 1, OneByOne<T, N>,
    std::conditional_t<kAligned, Aligned<T, N>, std::conditional_t<sizeof(T) == 4, OneByOne<T, N>, Straddling<T>>>>;

template <bool kAligned, int N, class T>
__device__ __forceinline__ void store(T* p, const Vector<T, N>& elements) {
  if constexpr (kAligned && N > 1)
    store_wide(p, elements);
  else
    store_elements<N>(p, elements);
}

template <bool kAligned, class T, int N>
__device__ __forceinline__ void store_rounded(T* p, const Vector<float, N>& values) {
  Vector<T, N> elements;
#pragma unroll
  for (int j = 0; j < N; ++j) elements.data[j] = from_float<T>(values.data[j]);
  store<kAligned>(p, elements);
}

// The fp32 masters of N weights. If other code wrote a weight, the stored remainder may not fit the new weight
// (remainder.h). Then the weight itself is the master.
template <class P, int N>
__device__ __forceinline__ Vector<float, N> join(const Vector<P, N>& weights, const Vector<int16_t, N>& remainders) {
  Vector<float, N> masters;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float weight = to_float(weights.data[j]);
    const float master = Remainder<kDtypeOf<P>>::joined(weight, remainders.data[j]);
    masters.data[j] = bits_of(to_float(from_float<P>(master))) == bits_of(weight) ? master : weight;
  }
  return masters;
}

template <class P, int N>
__device__ __forceinline__ void split(const Vector<float, N>& masters, Vector<P, N>& weights,
                                      Vector<int16_t, N>& remainders) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float master = masters.data[j];
    weights.data[j] = from_float<P>(master);
    remainders.data[j] = static_cast<int16_t>(Remainder<kDtypeOf<P>>::of(master, to_float(weights.data[j])));
  }
}

// N neighbours in all arrays. Loading and updating are separate functions, so that a thread can load its second pack
// before it stores the first. The compiler cannot move these loads itself, since it must assume that arrays overlap.
template <class V, int N, bool kAligned>
struct Pack {
  Loading<typename V::G, N, kAligned> grad;
  Loading<typename V::P, N, kAligned> weight;
  Loading<typename V::M, N, true> master;
  Loading<float, N, true> state[V::kStates > 0 ? V::kStates : 1];

  __device__ __forceinline__ void load(const Arrays<V>& arrays, int i, Margin margin = kInside) {
    grad.load(arrays.grad + i, margin);
    if constexpr (V::kReadsWeight) weight.load(arrays.weight + i, margin);
    if constexpr (!V::kIsFp32) master.load(arrays.master + i, margin);
#pragma unroll
    for (int k = 0; k < V::kStates; ++k) {
      state[k] = {};
      if (arrays.has(k)) state[k].load(arrays.state[k] + i, margin);
    }
  }

  __device__ __forceinline__ void update(const Arrays<V>& arrays, const typename V::Formula& formula, int i) const {
    constexpr int kAll = V::Formula::kStates;
    const Vector<float, N> g = gradients();
    Vector<float, N> p = parameters(), s[kAll];
#pragma unroll
    for (int k = 0; k < kAll; ++k) s[k] = k < V::kStates ? state[k < V::kStates ? k : 0].get() : Vector<float, N>{};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float element[kAll];
#pragma unroll
      for (int k = 0; k < kAll; ++k) element[k] = s[k].data[j];
      p.data[j] = formula(p.data[j], g.data[j], element);
#pragma unroll
      for (int k = 0; k < kAll; ++k) s[k].data[j] = element[k];
    }
    store_parameters(arrays, p, i);
#pragma unroll
    for (int k = 0; k < V::kStates; ++k)
      if (arrays.has(k)) store<true>(arrays.state[k] + i, s[k]);
  }

 private:
  __device__ __forceinline__ Vector<float, N> gradients() const {
    if constexpr (V::kJoins)
      return join(grad.get(), master.get());
    else
      return floats(grad.get());
  }

  __device__ __forceinline__ Vector<float, N> parameters() const {
    if constexpr (V::kIsSplit)
      return join(weight.get(), master.get());
    else if constexpr (V::kReadsWeight)
      return floats(weight.get());
    else
      return floats(master.get());
  }

  __device__ __forceinline__ static void store_parameters(const Arrays<V>& arrays, const Vector<float, N>& p, int i) {
    using P = typename V::P;
    if constexpr (V::kIsSplit) {
      Vector<P, N> weights;
      Vector<int16_t, N> remainders;
      split(p, weights, remainders);
      store<kAligned>(arrays.weight + i, weights);
      store<true>(arrays.master + i, remainders);
    } else {
      if constexpr (!V::kIsFp32 && !V::kJoins) store<true>(arrays.master + i, p);
      store_rounded<kAligned>(arrays.weight + i, p);
    }
  }
};

template <class V, bool kAligned>
__device__ __forceinline__ void update_packs(const Arrays<V>& arrays, const Packs<V>& packs,
                                             const typename V::Formula& formula) {
  for (int k = packs.from + threadIdx.x; k < packs.to; k += 2 * kThreads) {
    // If there is no second pack, the first one is loaded twice. If there were a branch instead, the compiled code
    // would wait before the branch for the loads that were already started.
    const bool has_second = k + kThreads < packs.to;
    const int i = packs.at(k), j = has_second ? i + kThreads * kPack : i;
    Pack<V, kPack, kAligned> first, second;
    first.load(arrays, i);
    second.load(arrays, j);
    first.update(arrays, formula, i);
    if (has_second) second.update(arrays, formula, j);
  }
}

// Updates the first and the last pack of a tensor, each only if a word that holds some of its elements may reach beyond
// the tensor: fewer than kPack elements of the tensor lie on that side of the pack. Each of the two packs has one
// thread, in the second to last warp.
template <class V, class Walk>
__device__ __forceinline__ void update_ends(const Arrays<V>& arrays, const Packs<V>& packs, const Walk& walk,
                                            const typename V::Formula& formula) {
  const int end = (threadIdx.x + 64) % kThreads;
  if (end == 0 ? packs.from == 0 : end > 1 || packs.to == packs.packs) return;
  const int k = end == 0 ? 0 : packs.to;
  Pack<V, kPack, false> pack;
  pack.load(arrays, packs.at(k), packs.margin(walk, k));
  pack.update(arrays, formula, packs.at(k));
}

// Updates the elements outside of packs, one per thread, beginning with the threads of the last warp.
template <class V>
__device__ __forceinline__ void update_others(const Arrays<V>& arrays, const Packs<V>& packs,
                                              const typename V::Formula& formula) {
#pragma unroll 1
  for (int k = (threadIdx.x + 32) % kThreads; k < packs.others; k += kThreads) {
    const int i = packs.other(k);
    Pack<V, 1, true> one;
    one.load(arrays, i);
    one.update(arrays, formula, i);
  }
}

// The walk begins with the last chunk, because the gradient pass read that chunk last. So its gradients may still be in
// L2.
template <class V>
using UpdateWalk = ChunkWalk<kState + V::kStates, /*kBackwards=*/true>;

// The number of updates of a chunk's tensor before this one.
template <class Walk>
__device__ __forceinline__ uint32_t step_of(const Walk& walk) {
  return *reinterpret_cast<const uint32_t*>(walk.row(kStep));
}

template <class Formula, class Walk>
__device__ __forceinline__ Formula formula_of(const Update& update, const Walk& walk, float factor,
                                              const bool (&has)[Formula::kStates]) {
  const int64_t group = walk.row(kGroup);
  const float lr = *reinterpret_cast<const float*>(update.lr[group]);
  return Formula(update.hyper + group * kHyperColumns, lr, factor, step_of(walk), has);
}

// The last block raises the update counts, which the threads of all blocks read as `step`. The barrier makes each block
// call is_last_block() only after all its threads have read them. So the last block raises no count too early.
__device__ __forceinline__ void end_update(const Update& update) {
  barrier();
  if (!is_last_block(reinterpret_cast<unsigned*>(update.ticket))) return;
  for (int64_t c = threadIdx.x; c < update.table.chunk_count; c += kThreads) raise_step(update.table, c);
}

template <class V>
__global__ void __launch_bounds__(kThreads, V::kResidentBlocks) update_kernel(const Update update) {
  using Formula = typename V::Formula;
  UpdateWalk<V> walk(update.table, nullptr, reinterpret_cast<int64_t*>(shared_memory()));
  if (is_skipped(update)) return;
  const float factor = update_factor(update);
  for (; walk.has_chunk(); walk.advance()) {
    const Arrays<V> arrays(walk);
    if (arrays.grad == nullptr) continue;
    bool has[Formula::kStates];
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) has[k] = arrays.has(k);
    const Formula formula = formula_of<Formula>(update, walk, factor, has);
    const Packs<V> packs(walk, arrays);
    update_others(arrays, packs, formula);
    if (packs.is_aligned) {
      update_packs<V, true>(arrays, packs, formula);
    } else {
      if constexpr (V::kStraddles) update_ends(arrays, packs, walk, formula);
      update_packs<V, false>(arrays, packs, formula);
    }
  }
  end_update(update);
}

// Calls f with a Variant{}. Bit k of `states` is set if some tensor has the k-th state. If no tensor has more than the
// required states, the variant has only these. Otherwise it has all states.
template <class Formula, class P, class M, class G, class F>
void with_states(int states, const F& f) {
  constexpr int kRequired = (1 << Formula::kRequired) - 1;
  if ((states & kRequired) != kRequired)
    throw std::invalid_argument(std::string("amp_kernels: ") + Formula::kName + " lacks a state that it requires");
  if constexpr (Formula::kRequired < Formula::kStates)
    if (states == kRequired) return f(Variant<Formula, Formula::kRequired, P, M, G>{});
  if constexpr (kJoinsGrad<P, M>)
    throw std::invalid_argument("amp_kernels: an average must have no states");
  else
    f(Variant<Formula, Formula::kStates, P, M, G>{});
}

// Calls f with the kernel for a form, and with the bytes of shared memory that the kernel needs.
template <class Formula, class F>
void with_kernel(const Form& form, const F& f) {
  with_dtype(form.param_dtype, [&](auto param) {
    with_dtype(form.grad_dtype, [&](auto grad) {
      with_master<Formula, decltype(param), decltype(grad)>(form.split, [&](auto master) {
        with_states<Formula, decltype(param), decltype(master), decltype(grad)>(form.states, [&](auto variant) {
          using V = decltype(variant);
          f(update_kernel<V>, UpdateWalk<V>::kWords * sizeof(int64_t));
        });
      });
    });
  });
}

}  // namespace amp_kernels::cuda
