// The update of an optimizer on a CPU: p, states <- formula(p, factor * g, states). A 16-bit weight becomes p, rounded.
// An element takes as many bytes of reads and writes as on a GPU (csrc/cuda/update.cuh). A thread takes a chunk in
// blocks of 512 elements:
//
//   16-bit gradient   -> fp32 in L1     |
//   weight, remainder -> master in L1   |> formula, in vectors of the host's width -> master -> weight, remainder
//   states            in place          |                                          -> states
//
// States that are bf16 or codes are fp32 in L1 too (states.h).
//
// The pass that counts lost updates (../formulas/lost.h) reads and computes the same, and stores nothing.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../formulas/lost.h"
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
// tensor does not have is read as 0. If not kStores, the new states are dropped.
template <class Formula, int kPresent, bool kStores>
void apply(const Formula& formula, float* __restrict p, const float* __restrict g, float* __restrict s0,
           float* __restrict s1, float* __restrict s2, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float s[Formula::kStates] = {};
    if constexpr (kPresent & 1) s[0] = s0[i];
    if constexpr (kPresent & 2) s[1] = s1[i];
    if constexpr (kPresent & 4) s[2] = s2[i];
    p[i] = formula(p[i], g[i], s);
    if constexpr (kStores && (kPresent & 1) != 0) s0[i] = s[0];
    if constexpr (kStores && (kPresent & 2) != 0) s1[i] = s[1];
    if constexpr (kStores && (kPresent & 4) != 0) s2[i] = s[2];
  }
}

// Returns the apply() whose kPresent is `present`.
template <class Formula, bool kStores, int... kPresent>
auto apply_to(int present, std::integer_sequence<int, kPresent...>) {
  static constexpr decltype(&apply<Formula, 0, kStores>) kApply[] = {&apply<Formula, kPresent, kStores>...};
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

// How many masters an update changes, and how many of these changes the weights would lose without a master.
struct LostCount {
  int64_t changed = 0, lost = 0;

  // Counts n elements.
  template <class P>
  void add(const P* weight, const float* master, const float* next, int64_t n) {
    Integers changes{}, losses{};  // a lane counts down, because each bit of a mask is set
    for (int64_t i = 0; i + kLanes <= n; i += kLanes) add_lanes(weight + i, master + i, next + i, changes, losses);
    if (const int64_t rest = n % kLanes; rest > 0) {
      P weights[kLanes] = {};
      float masters[kLanes] = {}, nexts[kLanes] = {};  // equal where there is no element
      std::copy_n(weight + n - rest, rest, weights);
      std::copy_n(master + n - rest, rest, masters);
      std::copy_n(next + n - rest, rest, nexts);
      add_lanes(weights, masters, nexts, changes, losses);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      changed -= changes[lane];
      lost -= losses[lane];
    }
  }

 private:
  template <class P>
  [[gnu::always_inline]] static void add_lanes(const P* weight, const float* master, const float* next,
                                               Integers& changes, Integers& losses) {
    const auto round = [](const Lanes& lanes) {
      P rounded[kLanes];
      store_lanes(lanes, rounded);
      return load_lanes(rounded);
    };
    const Lanes before = load_lanes(master), after = load_lanes(next);
    changes += after != before;
    losses += is_lost(load_lanes(weight), before, after, round);
  }
};

// Updates one chunk. M is the type of row kMaster: int16_t if it holds remainders, else float. If `streams` is true,
// weights are stored past the caches (stream() in convert.h). `streams` is true only if the model is too large for its
// weights to stay in a cache until they are used.
//
// If kCounts, nothing is stored, and `count` counts what the update would change. The tensors must be 16-bit weights
// with remainders.
template <class Formula, class P, class M, class G, bool kCounts = false>
void update_chunk(const Update& update, float factor, bool streams, int64_t index,
                  [[maybe_unused]] LostCount* count = nullptr) {
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
  const auto apply_here =
      apply_to<Formula, !kCounts>(present, std::make_integer_sequence<int, 1 << Formula::kStates>{});
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
    [[maybe_unused]] float before[kCounts ? kUpdateBlock : 1];
    if constexpr (kCounts) load(p, before, n);
    const float* g = staged;
    if constexpr (kJoins)
      join(grad + i, grad_remainders + i, staged, n);
    else
      g = as_float(grad + i, staged, n);
    apply_here(formula, p, g, s(0), s(1), s(2), n);
    if constexpr (kCounts) {
      count->add(params.weight + i, before, p, n);
    } else {
      params.store(i, p, n, streams);
      for (int k = 0; k < kLean; ++k)
        if (lean.has(k)) lean.store(k, i, states[k], n);
    }
  }
}

}  // namespace amp_kernels::cpu
