// The update of an optimizer on a CPU: p, states <- formula(p, factor * g, states). A 16-bit weight becomes p, rounded.
// An element takes as many bytes of reads and writes as on a GPU (csrc/cuda/update.cuh). A thread takes a chunk in
// blocks of 512 elements:
//
//   16-bit gradient   -> fp32 in L1     |
//   weight, remainder -> master in L1   |> formula, in vectors of the host's width -> master -> weight, remainder
//   states            in place          |                                          -> states
//
// States that are bf16 or codes are fp32 in L1 too (states.h).
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../formulas/unscale.h"
#include "convert.h"
#include "remainder.h"
#include "states.h"

namespace amp_kernels::cpu {

// Elements of a block. The fp32 copies of a block stay in the L1. With blocks of 256 elements, an update of arrays in a
// cache took 3 % longer.
constexpr int64_t kUpdateBlock = 512;
// How many elements ahead an update prefetches if asks_ahead() is true (prefetch.h). On a Xeon with 2 MB of L2, an
// update that prefetches 512 elements ahead is a tenth faster than one that does not prefetch, and a tenth faster than
// one that prefetches 2048 ahead.
constexpr int64_t kUpdateAhead = 512;
// How many bytes ahead an update prefetches if asks_ahead() is false and weights are streamed (stream() in convert.h).
// On a Zen 4, with 25M parameters, SGD takes a sixth less time than without prefetching, and RMSprop a tenth less. With
// 32 KiB instead of 16 KiB, both optimizers gain half as much.
constexpr int64_t kUpdateBytesAhead = 1 << 14;

// Applies the formula to n elements. Bit k of kPresent says whether the tensor has the k-th state. A state that the
// tensor does not have is read as 0.
template <class Formula, int kPresent>
void apply(const Formula& formula, float* __restrict p, const float* __restrict g, float* __restrict s0,
           float* __restrict s1, float* __restrict s2, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float s[Formula::kStates] = {};
    if constexpr (kPresent & 1) s[0] = s0[i];
    if constexpr (kPresent & 2) s[1] = s1[i];
    if constexpr (kPresent & 4) s[2] = s2[i];
    p[i] = formula(p[i], g[i], s);
    if constexpr (kPresent & 1) s0[i] = s[0];
    if constexpr (kPresent & 2) s1[i] = s[1];
    if constexpr (kPresent & 4) s2[i] = s[2];
  }
}

// Returns the apply() whose kPresent is `present`.
template <class Formula, int... kPresent>
auto apply_to(int present, std::integer_sequence<int, kPresent...>) {
  static constexpr decltype(&apply<Formula, 0>) kApply[] = {&apply<Formula, kPresent>...};
  return kApply[present];
}

// The parameters of a chunk, read and written as fp32 numbers. P is the type of the weights. R is int16_t if the
// masters are split into weights and remainders, else float.
template <class P, class R>
struct Parameters {
  static constexpr bool kIsFp32 = std::is_same_v<P, float>, kIsSplit = std::is_same_v<R, int16_t>;

  P* weight;
  R* master;

  Parameters(const Table& table, const Chunk& chunk)
      : weight(chunk.in<P>(table, kParam)), master(chunk.in<R>(table, kIsFp32 ? kParam : kMaster)) {}

  // Returns a pointer to elements [i, i + n) in fp32. If the masters are split, joins the elements in `staged`, and
  // returns `staged`. Otherwise the pointer is into `master`: fp32 masters, or fp32 parameters.
  float* load(int64_t i, float* staged, int64_t n) const {
    if constexpr (!kIsSplit) return master + i;
    if constexpr (kIsSplit) join(weight + i, master + i, staged, n);
    return staged;
  }

  void store(int64_t i, const float* values, int64_t n, bool streams) const {
    if constexpr (kIsSplit) {
      split(values, weight + i, master + i, n);
    } else if constexpr (!kIsFp32) {
      if (!streams) return cpu::store(values, weight + i, n);
      P rounded[kUpdateBlock];
      cpu::store(values, rounded, n);
      stream(rounded, weight + i, n);
    }
  }
};

// Updates one chunk. M is the type of row kMaster: int16_t if it holds remainders, else float. If `streams` is true,
// weights are stored past the caches (stream() in convert.h). `streams` is true only if the model is too large for its
// weights to stay in a cache until they are used.
template <class Formula, class P, class M, class G>
void update_chunk(const Update& update, float factor, bool streams, int64_t index) {
  const Chunk chunk(update.table, index);
  const G* grad = chunk.in<G>(update.table, kGrad);
  if (grad == nullptr) return;
  constexpr bool kJoins = kJoinsGrad<P, M>;
  using Params = Parameters<P, std::conditional_t<kJoins, float, M>>;
  if (index + kChunksAhead < update.table.chunk_count) {
    const Chunk later(update.table, index + kChunksAhead);
    prefetch_head<G>(update.table, later, kGrad);
    prefetch_head<M>(update.table, later, Params::kIsFp32 && !kJoins ? kParam : kMaster);
    if constexpr (std::is_same_v<M, int16_t>) prefetch_head<P>(update.table, later, kParam);
    for (int k = 0; k < Formula::kStates; ++k)
      if (update.form.states >> k & 1) prefetch_state<Formula>(update, later, k);
  }
  const Params params(update.table, chunk);
  const int16_t* const grad_remainders = kJoins ? chunk.in<int16_t>(update.table, kMaster) : nullptr;
  constexpr int kLean = Formula::kStates < 2 ? Formula::kStates : 2;
  const LeanStates<Formula, kLean> lean(update, chunk);
  float* state[3] = {};
  bool has[Formula::kStates];
  int present = 0;
  for (int k = 0; k < Formula::kStates; ++k) {
    if (update.form.states >> k & 1 && !lean.has(k)) state[k] = chunk.in<float>(update.table, kState + k);
    has[k] = state[k] != nullptr || lean.has(k);
    present |= has[k] << k;
  }
  const auto apply_here = apply_to<Formula>(present, std::make_integer_sequence<int, 1 << Formula::kStates>{});
  const int64_t group = update.table.at(kGroup, chunk.tensor);
  const Formula formula(update.hyper + group * kHyperColumns, *reinterpret_cast<const float*>(update.lr[group]), factor,
                        step_of(update.table, chunk.tensor), has);

  const bool ahead = asks_ahead();
  float staged[kUpdateBlock], joined[kUpdateBlock], states[kLean][kUpdateBlock];
  for (int64_t i = 0; i < chunk.size; i += kUpdateBlock) {
    const int64_t n = std::min(kUpdateBlock, chunk.size - i);
    const auto ask = [&](const auto* from) {
      if (from == nullptr) return;
      if (ahead)
        prefetch(from + i + kUpdateAhead, n);
      else if (streams)
        ask_for(from + i, n, kUpdateBytesAhead);
    };
    ask(grad), ask(params.master), ask(grad_remainders);
    if constexpr (Params::kIsSplit) ask(params.weight);
    for (const float* array : state) ask(array);
    lean.each(ask);
    const auto s = [&](int k) -> float* {
      if (lean.has(k)) return lean.load(k, i, states[k], n);
      return state[k] == nullptr ? nullptr : state[k] + i;
    };
    float* const p = params.load(i, joined, n);
    const float* g = staged;
    if constexpr (kJoins)
      join(grad + i, grad_remainders + i, staged, n);
    else
      g = as_float(grad + i, staged, n);
    apply_here(formula, p, g, s(0), s(1), s(2), n);
    params.store(i, p, n, streams);
    for (int k = 0; k < kLean; ++k)
      if (lean.has(k)) lean.store(k, i, states[k], n);
  }
}

}  // namespace amp_kernels::cpu
