// The codes of csrc/formulas/int8.h, bit for bit, by cheaper instructions:
//
//   code = clamp(rint(x * (1 / scale)) + zero_point, low, 127)
//
// Per element, two conversions or ten comparisons would take longer than memory does: a GPU rounds and converts at an
// eighth of the rate at which it adds, and compares, selects and packs at half of it. So a pack is made of cheap steps:
//
//   steps = x * inverse
//   clamp       between the steps of the lowest and of the highest code
//   + kMagic    rounds to an integer, which the low bits then hold
//   pack        the low bytes of four such numbers are a word of four codes
//
// The functions up to keeps_gradient() treat one element and every value that it can have. Those below treat a pack of
// a plain group, as an Op's store() does (int8_walk.cuh).
#pragma once

#include "../formulas/int8.h"
#include "portable.h"

namespace amp_kernels::cuda {

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
constexpr int kMagicBits = 0x4b400000;

// NaN becomes 0. Beyond 512 steps a code saturates, whatever its zero point is.
__device__ __forceinline__ float bounded(float steps) {
  steps = steps == steps ? steps : 0.0f;
  return fminf(fmaxf(steps, -512.0f), 512.0f);
}

__device__ __forceinline__ int nearest(float steps) {
  return static_cast<int>(float_bits(add_rn(bounded(steps), kMagic))) - kMagicBits;
}

__device__ __forceinline__ int below(float steps) {
  const float v = bounded(steps);
  const float shifted = add_rn(v, kMagic);
  const int rounded = static_cast<int>(float_bits(shifted)) - kMagicBits;
  return rounded - (add_rn(shifted, -kMagic) > v ? 1 : 0);
}

// The formulas test whether `inverse` is 0. That is not needed here: the steps are 0 then, so the code is the zero
// point.
__device__ __forceinline__ int nearest_code(float x, const Affine& affine) {
  return clamped(nearest(multiply_rn(x, affine.inverse)) + affine.zero_point, affine.low);
}

__device__ __forceinline__ int stochastic_code(float x, float noise, const Affine& affine) {
  return clamped(below(add_rn(multiply_rn(x, affine.inverse), noise)) + affine.zero_point, affine.low);
}

__device__ __forceinline__ bool keeps_gradient(float x, const Affine& affine) {
  const int code = nearest(multiply_rn(x, affine.inverse)) + affine.zero_point;
  return code >= affine.low && code <= 127;
}

// An Affine, and the bounds between which steps from the zero point are codes.
struct BoundedAffine : Affine {
  float lowest, highest;

  BoundedAffine() = default;
  __device__ __forceinline__ explicit BoundedAffine(const Affine& affine)
      : Affine(affine),
        lowest(static_cast<float>(affine.low) - static_cast<float>(affine.zero_point)),
        highest(127.0f - static_cast<float>(affine.zero_point)) {}

  // Whether the functions below are exact for packs without NaN steps.
  __device__ __forceinline__ bool is_plain() const { return scale == scale && zero_point >= -128 && zero_point <= 127; }
};

// For a symmetric group whose scale was measured: its codes need no bounds.
struct InsideAffine {
  static constexpr int zero_point = 0;
  float scale, inverse;

  InsideAffine() = default;
  __device__ __forceinline__ explicit InsideAffine(const Affine& affine)
      : scale(affine.scale), inverse(affine.inverse) {}

  __device__ __forceinline__ operator Affine() const { return {scale, inverse, 0, lowest_code(true)}; }
  __device__ __forceinline__ bool is_plain() const { return scale == scale; }
};

// What is known of the steps of a plain group.
enum Steps {
  kAny,      // nothing: the scale was given
  kNumbers,  // none is NaN: the scale was measured
  kInside    // and their nearest integers are codes, since the scale is symmetric: the largest step is 127, to which
             // two roundings and a reciprocal add less than 2^-20
};

// Clamps and rounds steps, and leaves them kMagic too large. To clamp first is the same as to round first, because the
// bounds are integers.
template <bool kStochastic, Steps kSteps, int N, class AffineAt>
__device__ __forceinline__ void round_steps(float (&steps)[N], const AffineAt& affine_at) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if constexpr (kSteps != kInside) steps[k] = fminf(fmaxf(steps[k], affine_at(k).lowest), affine_at(k).highest);
    steps[k] = kStochastic ? add_down(steps[k], kMagic) : add_rn(steps[k], kMagic);
  }
}

// Packs the codes of rounded steps, four to a word. The low byte of a rounded step is the low byte of its integer. If
// the zero point is 0, that is the code. Otherwise four steps and four zero points are added as one word. Each of the
// four sums has 128 added, so that it is not negative and does not carry into the next code.
template <Steps kSteps, int N, class AffineAt>
__device__ __forceinline__ void pack_codes(Vector<int8_t, N>& codes, const float (&steps)[N],
                                           const AffineAt& affine_at) {
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    uint32_t word;
    if constexpr (kSteps == kInside) {
      const uint32_t low = __byte_perm(float_bits(steps[k]), float_bits(steps[k + 1]), 0x0040);
      const uint32_t high = __byte_perm(float_bits(steps[k + 2]), float_bits(steps[k + 3]), 0x0040);
      word = __byte_perm(low, high, 0x5410);
    } else {
      uint32_t sum = 0, zeros = 0;
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        sum = (sum << 8) + float_bits(steps[k + i]);
        zeros = (zeros << 8) + static_cast<uint32_t>(affine_at(k + i).zero_point + 128 - kMagicBits);
      }
      word = (sum + zeros) ^ 0x80808080u;
    }
    memcpy(codes.data + k, &word, sizeof(word));
  }
}

// The uniform numbers of N elements with neighbouring indices. A counter of Philox makes the words of four indices.
template <int N>
__device__ __forceinline__ void neighbours_noise(float (&noise)[N], uint64_t index, uint64_t seed) {
  uint32_t words[N + 4];
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    const RandomWords four = philox((index >> 2) + k / 4, seed);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[k + i] = four.word[i];
  }
  if ((index & 3) != 0) {
    const RandomWords four = philox((index >> 2) + N / 4, seed);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[N + i] = four.word[i];
    // Shifts by 1 and by 2, since an array in registers cannot be indexed by a variable.
#pragma unroll
    for (int k = 0; k < N + 3; ++k) words[k] = index & 1 ? words[k + 1] : words[k];
#pragma unroll
    for (int k = 0; k < N; ++k) words[k] = index & 2 ? words[k + 2] : words[k];
  }
#pragma unroll
  for (int k = 0; k < N; ++k) noise[k] = uniform(words[k]);
}

}  // namespace amp_kernels::cuda
