// Reads and writes optimizer states that are bf16 or codes (formulas/states.h) on a CPU. An update works on fp32 copies
// of a block of elements, which stay in the L1:
//
//   codes, scales -> fp32 in L1 -> formula -> fp32 in L1 -> largest magnitude of each group -> scales, codes
#pragma once

#include <algorithm>

#include "../formulas/states.h"
#include "convert.h"

namespace amp_kernels::cpu {

template <Code kCode>
using CodeType = std::conditional_t<kCode == Code::kMomentum, int8_t, uint8_t>;

// Decodes n elements. The first one begins a group.
template <Code kCode>
void decode(const CodeType<kCode>* codes, const float* scales, float* values, int64_t n) {
  for (int64_t first = 0; first < n; first += kStateGroup) {
    const float scale = scales[first / kStateGroup];
    const int64_t end = std::min(n, first + kStateGroup);
    for (int64_t i = first; i < end; ++i) values[i] = decoded<kCode>(codes[i], scale);
  }
}

// Encodes n elements. The first one begins group `index` of its tensor.
template <Code kCode>
void encode(const float* values, const Noise& noise, int k, int64_t index, CodeType<kCode>* codes, float* scales,
            int64_t n) {
  for (int64_t first = 0; first < n; first += kStateGroup) {
    const int size = static_cast<int>(std::min(n - first, kStateGroup));
    const float* const from = values + first;
    uint32_t magnitude = 0;
    for (int i = 0; i < size; ++i) magnitude = std::max(magnitude, float_bits(from[i]) & 0x7fffffffu);
    const StateGroup group(kCode, magnitude);
    const GroupNoise bits = noise.of(index + first / kStateGroup, k);
    CodeType<kCode>* const to = codes + first;
    // A sum in place of GroupNoise::at(), whose product takes AVX2 as long as a root.
    uint32_t hash = bits.b;
    for (int i = 0; i < size; ++i, hash += bits.a)
      to[i] = static_cast<CodeType<kCode>>(encoded<kCode>(from[i], group, hash >> 16));
    scales[first / kStateGroup] = group.scale;
  }
}

// Prefetches the first elements of a state of a later chunk.
template <class Formula>
void prefetch_state(const Update& update, const Chunk& later, int k) {
  const bool is_lean = update.form.state_dtype != kFloat && (coded_states<Formula>(update.form.states) >> k & 1) != 0;
  if (!is_lean)
    prefetch_head<float>(update.table, later, kState + k);
  else if (update.form.state_dtype == kBFloat16)
    prefetch_head<uint16_t>(update.table, later, kState + k);
  else
    prefetch_head<uint8_t>(update.table, later, kState + k);
}

// The states of a chunk that are bf16 or codes.
template <class Formula, int kMost>
class LeanStates {
 public:
  // `column` is the position of the chunk's tensor in the table.
  LeanStates(const Update& update, const Chunk& chunk)
      : coded_(update.form.state_dtype == kFloat ? 0 : coded_states<Formula>(update.form.states)),
        is_bf16_(update.form.state_dtype == kBFloat16),
        begin_(chunk.begin),
        noise_{coded_ == 0 ? 0 : step_of(update.table, chunk.tensor), chunk.tensor} {
    for (int k = 0; k < kMost; ++k) {
      if (!has(k)) continue;
      arrays_[k] = is_bf16_ ? static_cast<void*>(chunk.in<uint16_t>(update.table, kState + k))
                            : static_cast<void*>(chunk.in<uint8_t>(update.table, kState + k));
      if (!is_bf16_)
        scales_[k] = reinterpret_cast<float*>(update.table.at(kScale + k, chunk.tensor)) + begin_ / kStateGroup;
    }
  }

  bool has(int k) const { return k < kMost && (coded_ >> k & 1) != 0; }

  // Calls f for each array, with a pointer to its first element.
  template <class F>
  void each(const F& f) const {
    for (int k = 0; k < kMost; ++k) {
      if (!has(k)) continue;
      if (is_bf16_)
        f(static_cast<const uint16_t*>(arrays_[k]));
      else
        f(static_cast<const uint8_t*>(arrays_[k]));
    }
  }

  // Returns elements [i, i + n) of state k in fp32. They are in `values`.
  float* load(int k, int64_t i, float* values, int64_t n) const {
    if (is_bf16_) {
      for (int64_t j = 0; j < n; ++j) values[j] = from_bf16_bits(bf16(k)[i + j]);
    } else {
      with_code(k, [&](auto code) {
        decode<code.value>(static_cast<const CodeType<code.value>*>(arrays_[k]) + i, scales_[k] + i / kStateGroup,
                           values, n);
      });
    }
    return values;
  }

  // Stores elements [i, i + n) of state k.
  void store(int k, int64_t i, const float* values, int64_t n) const {
    const int64_t index = (begin_ + i) / kStateGroup;
    if (is_bf16_) {
      for (int64_t first = 0; first < n; first += kStateGroup) {
        const int size = static_cast<int>(std::min(n - first, kStateGroup));
        const GroupNoise bits = noise_.of(index + first / kStateGroup, k);
        uint16_t* const to = bf16(k) + i + first;
        uint32_t hash = bits.b;
        for (int j = 0; j < size; ++j, hash += bits.a)
          to[j] = static_cast<uint16_t>(bf16_bits(values[first + j], hash >> 16));
      }
    } else {
      with_code(k, [&](auto code) {
        encode<code.value>(values, noise_, k, index, static_cast<CodeType<code.value>*>(arrays_[k]) + i,
                           scales_[k] + i / kStateGroup, n);
      });
    }
  }

 private:
  uint16_t* bf16(int k) const { return static_cast<uint16_t*>(arrays_[k]); }

  template <class F>
  static void with_code(int k, const F& f) {
    if (Formula::kCodes[k] == Code::kMomentum)
      f(std::integral_constant<Code, Code::kMomentum>{});
    else
      f(std::integral_constant<Code, Code::kSecondMoment>{});
  }

  int coded_;
  bool is_bf16_;
  int64_t begin_;
  Noise noise_;
  void* arrays_[kMost] = {};
  float* scales_[kMost] = {};
};

}  // namespace amp_kernels::cpu
