// The update pass of every optimizer: p, states <- formula(p, factor * g, states), and p rounded to 16 bits.
// The formula (csrc/formulas) says what happens to an element, remainder.h how a 16-bit weight is also its master.
//
// Bytes per element, read and written: 8 for the parameter, in fp32 or as weight and remainder (with an fp32 master
// beside the weight 10), and 8 for each state; 4 or 2 for the gradient, read. SGD with momentum moves 20 for fp32
// parameters, 18 for 16-bit weights and gradients; an average that follows a weight and its remainder 12.
//
// A block takes every gridDim.x-th chunk of the table, the last one first. A thread has two packs under way, kThreads
// packs apart, and the elements behind the last whole pack of a chunk go one by one:
//
//   chunk:  | t0 t0 t0 t0 | t1 t1 t1 t1 | ... | t255 .. | t0 t0 t0 t0 | t1 .. | ... | t255 .. | ...
//           | first packs: 1024 elements                | second packs                        |
#pragma once

#include "../formulas/remainder.h"
#include "../formulas/unscale.h"
#include "grid.cuh"

namespace amp_kernels::cuda {

// Four elements: 16 bytes of fp32 a thread, neighbours side by side in a warp; states, which are fp32, are most of what
// moves. Eight would make the fp32 accesses of a warp skip every other 16 bytes.
constexpr int kUpdatePack = 4;

// Two packs a thread need 64 registers for SGD and 96 for centered RMSprop; with three resident blocks asked
// for, ptxas spills the latter. Two blocks x 256 threads x 80 bytes are 41 KB in flight, what 4.8 TB/s over
// 132 multiprocessors takes at a latency of 1.1 us.
constexpr int kResidentBlocks = 2;

template <class T>
constexpr Dtype kDtypeOf = std::is_same_v<T, float>    ? kFloat
                           : std::is_same_v<T, __half> ? kHalf
                                                       : kBFloat16;

// M is int16_t for the remainders of weights of type P, or where P is float of type G, else float.
template <class Formula, class P, class M, class G>
struct Arrays {
  static constexpr bool kJoins = kJoinsGrad<P, M>;
  static constexpr bool kIsFp32 = std::is_same_v<P, float> && !kJoins, kIsSplit = std::is_same_v<M, int16_t> && !kJoins;

  const G* grad;
  P* weight;
  M* master;  // the parameter itself where there is no other
  float* state[Formula::kStates];

  __device__ Arrays(const Table& table, const Chunk& chunk)
      : grad(chunk.in<const G>(table, kGrad)),
        weight(chunk.in<P>(table, kParam)),
        master(chunk.in<M>(table, kIsFp32 ? kParam : kMaster)) {
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) state[k] = chunk.in<float>(table, kState + k);
  }
};

// Which arrays allow wide accesses. Gradients and weights are often views into a bucket and are not; one odd array
// beside them makes all of the others narrow, for masters and states are the optimizer's own allocations.
struct Wide {
  bool grad, weight, own;
};

// fp32 masters of N weights.
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

// N neighbouring elements in registers. Loading, computing and storing are apart, so that a thread can load
// one pack before it stores another: the compiler cannot, since for all it knows the arrays overlap.
template <int N, class Formula>
struct Pack {
  Vector<float, N> g, p, s[Formula::kStates];

  template <class P, class M, class G>
  __device__ __forceinline__ void load(const Arrays<Formula, P, M, G>& arrays, int64_t i, Wide wide) {
    if constexpr (Arrays<Formula, P, M, G>::kJoins) {
      g = join(load_elements<N>(arrays.grad + i, wide.grad), load_elements<N>(arrays.master + i, wide.own));
      p = load_pack<N>(arrays.weight + i, wide.weight);
    } else {
      g = load_pack<N>(arrays.grad + i, wide.grad);
    }
    if constexpr (Arrays<Formula, P, M, G>::kIsSplit) {
      p = join(load_elements<N>(arrays.weight + i, wide.weight), load_elements<N>(arrays.master + i, wide.own));
    } else if constexpr (!Arrays<Formula, P, M, G>::kJoins) {
      p = load_pack<N>(arrays.master + i, wide.own);
    }
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k)
      s[k] = arrays.state[k] == nullptr ? Vector<float, N>{} : load_pack<N>(arrays.state[k] + i, wide.own);
  }

  __device__ __forceinline__ void apply(const Formula& formula) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float element[Formula::kStates];
#pragma unroll
      for (int k = 0; k < Formula::kStates; ++k) element[k] = s[k].data[j];
      p.data[j] = formula(p.data[j], g.data[j], element);
#pragma unroll
      for (int k = 0; k < Formula::kStates; ++k) s[k].data[j] = element[k];
    }
  }

  template <class P, class M, class G>
  __device__ __forceinline__ void store(const Arrays<Formula, P, M, G>& arrays, int64_t i, Wide wide) const {
    if constexpr (Arrays<Formula, P, M, G>::kIsSplit) {
      Vector<P, N> weights;
      Vector<int16_t, N> remainders;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        weights.data[j] = from_float<P>(p.data[j]);
        remainders.data[j] = static_cast<int16_t>(Remainder<kDtypeOf<P>>::of(p.data[j], to_float(weights.data[j])));
      }
      store_elements<N>(arrays.weight + i, weights, wide.weight);
      store_elements<N>(arrays.master + i, remainders, wide.own);
    } else {
      if constexpr (!Arrays<Formula, P, M, G>::kJoins) store_pack<N>(arrays.master + i, p.data, wide.own);
      if constexpr (!Arrays<Formula, P, M, G>::kIsFp32) store_pack<N>(arrays.weight + i, p.data, wide.weight);
    }
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k)
      if (arrays.state[k] != nullptr) store_pack<N>(arrays.state[k] + i, s[k].data, wide.own);
  }
};

template <class Formula, class P, class M, class G>
__device__ __forceinline__ void update_elements(const Arrays<Formula, P, M, G>& arrays, const Formula& formula,
                                                int64_t size, Wide wide) {
  constexpr int64_t kStride = kThreads * kUpdatePack;
  int64_t i = threadIdx.x * kUpdatePack;
  for (; i + kStride + kUpdatePack <= size; i += 2 * kStride) {
    Pack<kUpdatePack, Formula> first, second;
    first.load(arrays, i, wide);
    second.load(arrays, i + kStride, wide);
    first.apply(formula);
    second.apply(formula);
    first.store(arrays, i, wide);
    second.store(arrays, i + kStride, wide);
  }
  for (; i < size; i += kStride) {
    for (int64_t k = i; k < i + kUpdatePack && k < size; ++k) {
      Pack<1, Formula> one;
      one.load(arrays, k, Wide{});
      one.apply(formula);
      one.store(arrays, k, Wide{});
    }
  }
}

template <class Formula, class P, class M, class G>
__global__ void __launch_bounds__(kThreads, kResidentBlocks) update_kernel(const Update update) {
  if (is_skipped(update)) return;
  const float factor = update_factor(update);
  for (int64_t i = blockIdx.x; i < update.table.chunk_count; i += gridDim.x) {
    // Last chunk first: the gradient pass has just left the tail of the gradients in L2.
    const int64_t index = update.table.chunk_count - 1 - i;
    const Chunk chunk(update.table, index);
    const Arrays<Formula, P, M, G> arrays(update.table, chunk);
    if (arrays.grad == nullptr) continue;
    bool has[Formula::kStates];
    Wide wide{is_aligned16(arrays.grad), is_aligned16(arrays.weight), is_aligned16(arrays.master)};
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) {
      has[k] = arrays.state[k] != nullptr;
      wide.own = wide.own && is_aligned16(arrays.state[k]);
    }
    const int64_t group = update.table.at(kGroup, chunk.tensor);
    const int32_t step = update.steps[index];
    const Formula formula(update.hyper + group * kHyperColumns, *reinterpret_cast<const float*>(update.lr[group]),
                          factor, step, has);
    update_elements(arrays, formula, chunk.size, wide);
    barrier();  // every thread has read the count
    if (threadIdx.x == 0) update.steps[index] = step + 1;
  }
}

template <class Formula>
void launch_update(const Update& update, Stream stream) {
  if (update.table.chunk_count == 0) return;
  with_dtype(update.param_dtype, [&](auto param) {
    with_dtype(update.grad_dtype, [&](auto grad) {
      with_master<decltype(param), decltype(grad)>(update.split, [&](auto master) {
        launch_over_chunks(update_kernel<Formula, decltype(param), decltype(master), decltype(grad)>, 0, update,
                           stream);
      });
    });
  });
}

}  // namespace amp_kernels::cuda
