// The update pass of every optimizer: one read of gradient, fp32 parameter and state, one write of all but the
// gradient. A formula (csrc/formulas) says what happens to an element.
#pragma once

#include "../formulas/unscale.h"
#include "grid.cuh"

namespace amp_kernels::cuda {

// Four elements: 16 bytes of fp32 a thread, neighbours side by side in a warp; 18 of the 22 bytes of a 16-bit
// parameter are fp32. Eight would make the fp32 accesses of a warp skip every other 16 bytes.
constexpr int kUpdatePack = 4;

// Without this ptxas aims at more blocks and spills (sm_90a: 48 registers and 16 bytes of stack for SGD; it needs 52,
// centered RMSprop 67). Three blocks keep 768 threads x 40 bytes in flight, enough for 4.8 TB/s at 800 ns.
constexpr int kResidentBlocks = 3;

template <class Formula, class P, class G>
struct Arrays {
  const G* grad;
  P* weight;      // the 16-bit copy; the parameter itself where P is float
  float* param;   // master, or the fp32 parameter
  float* state[Formula::kStates];

  __device__ Arrays(const Table& table, const Chunk& chunk)
      : grad(chunk.in<const G>(table, kGrad)), weight(chunk.in<P>(table, kParam)) {
    if constexpr (std::is_same_v<P, float>) {
      param = weight;
    } else {
      param = chunk.in<float>(table, kMaster);
    }
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) state[k] = chunk.in<float>(table, kState + k);
  }
};

// Which arrays allow wide accesses. Gradients and weights are often views into a bucket and are not; one odd fp32
// array makes all of them narrow, for masters and states are the optimizer's own allocations.
struct Wide {
  bool grad, weight, fp32;
};

// Elements [i, i + N), all of them inside the chunk.
template <int N, class Formula, class P, class G>
__device__ __forceinline__ void update_pack(const Arrays<Formula, P, G>& arrays, const Formula& formula, int64_t i,
                                            Wide wide) {
  const Vector<float, N> g = load_pack<N>(arrays.grad + i, wide.grad);
  Vector<float, N> p = load_pack<N>(arrays.param + i, wide.fp32);
  Vector<float, N> s[Formula::kStates];
#pragma unroll
  for (int k = 0; k < Formula::kStates; ++k)
    s[k] = arrays.state[k] == nullptr ? Vector<float, N>{} : load_pack<N>(arrays.state[k] + i, wide.fp32);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float element[Formula::kStates];
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) element[k] = s[k].data[j];
    p.data[j] = formula(p.data[j], g.data[j], element);
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) s[k].data[j] = element[k];
  }
  store_pack<N>(arrays.param + i, p.data, wide.fp32);
#pragma unroll
  for (int k = 0; k < Formula::kStates; ++k)
    if (arrays.state[k] != nullptr) store_pack<N>(arrays.state[k] + i, s[k].data, wide.fp32);
  if constexpr (!std::is_same_v<P, float>) store_pack<N>(arrays.weight + i, p.data, wide.weight);
}

template <class Formula, class P, class G>
__global__ void __launch_bounds__(kThreads, kResidentBlocks) update_kernel(const Update update) {
  if (is_skipped(update)) return;
  const float factor = update_factor(update);
  for (int64_t i = blockIdx.x; i < update.table.chunk_count; i += gridDim.x) {
    // Last chunk first: the gradient pass has just left the tail of the gradients in L2.
    const int64_t index = update.table.chunk_count - 1 - i;
    const Chunk chunk(update.table, index);
    const Arrays<Formula, P, G> arrays(update.table, chunk);
    if (arrays.grad == nullptr) continue;
    bool has[Formula::kStates];
    Wide wide{is_aligned16(arrays.grad), is_aligned16(arrays.weight), is_aligned16(arrays.param)};
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) {
      has[k] = arrays.state[k] != nullptr;
      wide.fp32 = wide.fp32 && is_aligned16(arrays.state[k]);
    }
    const int64_t group = update.table.at(kGroup, chunk.tensor);
    const int32_t step = update.steps[index];
    const Formula formula(update.hyper + group * kHyperColumns, *reinterpret_cast<const float*>(update.lr[group]),
                          factor, step == 0, has);
    for (int64_t e = threadIdx.x * kUpdatePack; e < chunk.size; e += kThreads * kUpdatePack) {
      if (e + kUpdatePack <= chunk.size) {
        update_pack<kUpdatePack>(arrays, formula, e, wide);
      } else {
        for (int64_t k = e; k < chunk.size; ++k) update_pack<1>(arrays, formula, k, Wide{});
      }
    }
    barrier();  // every thread has read the count
    if (threadIdx.x == 0) update.steps[index] = step + 1;
  }
}

template <class F>
void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case kHalf:
      return f(__half{});
    case kBFloat16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

template <class Formula>
void launch_update(const Update& update, Stream stream) {
  if (update.table.chunk_count == 0) return;
  with_dtype(update.param_dtype, [&](auto param) {
    with_dtype(update.grad_dtype, [&](auto grad) {
      launch(update_kernel<Formula, decltype(param), decltype(grad)>, grid_size(update.table), kThreads, 0, stream,
             update);
    });
  });
}

}  // namespace amp_kernels::cuda
