// Computes int8 codes with cheaper instructions than csrc/formulas/int8.h, but with the same bits:
//
//   code = clamp(rint(x * (1 / scale)) + zero_point, low, 127)
//
// A GPU rounds and converts numbers at an eighth of the rate at which it adds. It compares, selects and packs at half
// of the rate at which it adds. Two conversions or ten comparisons for each element would take longer than reading and
// writing the element. So the codes of a pack (16 bytes of x) are computed in these steps:
//
//   steps = x * inverse     the distance from the zero point in codes, not rounded yet
//   clamp                   to the steps of the lowest and of the highest code
//   + kMagic                rounds to an integer, which the low bits of the sum then hold
//   pack                    adds the zero points, and puts the low bytes of four results into a word: four codes
//
// The functions up to keeps_gradient() compute one element, and are right for every value and every group. For
// whole packs, QuantizeOp::store() in int8_quantize.cu calls round_steps() and pack_codes(). These two are right only
// for plain groups (is_plain() below).
#pragma once

#include "../formulas/int8.h"
#include "portable.h"

namespace amp_kernels::cuda {

// 1.5 * 2^23. Near this number fp32 holds the integers, and no fractions. So if a small number is added to it, the sum
// is rounded to an integer. The low bits of the sum are then the small number, rounded to an integer.
constexpr float kMagic = 12582912.0f;
constexpr int kMagicBits = 0x4b400000;  // the bits of kMagic

// Limits steps to the range from -512 to 512, as unclamped_code() does. NaN becomes 0. If the zero point is a code
// (-128 to 127), the limits change no code, because more than 512 steps from the zero point every code saturates
// anyway.
__device__ __forceinline__ float bounded(float steps) {
  steps = steps == steps ? steps : 0.0f;
  return fminf(fmaxf(steps, -512.0f), 512.0f);
}

// Rounds to the nearest integer.
__device__ __forceinline__ int nearest(float steps) {
  return static_cast<int>(float_bits(add_rn(bounded(steps), kMagic))) - kMagicBits;
}

// Rounds down to an integer.
__device__ __forceinline__ int below(float steps) {
  const float v = bounded(steps);
  const float shifted = add_rn(v, kMagic);
  const int rounded = static_cast<int>(float_bits(shifted)) - kMagicBits;
  return rounded - (add_rn(shifted, -kMagic) > v ? 1 : 0);
}

// code_of() and stochastic_code_of() in the formulas test whether `inverse` is 0. The functions here need no test. If
// `inverse` is 0, the product with x is 0 or NaN. nearest() then returns 0. So does below(), because noise is less than
// 1. So the code is the zero point, clamped.
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

// An Affine, and the steps of its lowest and highest code.
struct BoundedAffine : Affine {
  float lowest, highest;

  BoundedAffine() = default;
  __device__ __forceinline__ explicit BoundedAffine(const Affine& affine)
      : Affine(affine),
        lowest(static_cast<float>(affine.low) - static_cast<float>(affine.zero_point)),
        highest(127.0f - static_cast<float>(affine.zero_point)) {}

  // Whether the functions for packs give the right codes for this group, if no steps in the pack are NaN. If steps may
  // be NaN (kAny below), QuantizeOp::store() tests them.
  __device__ __forceinline__ bool is_plain() const { return scale == scale && zero_point >= -128 && zero_point <= 127; }
};

// The Affine of a symmetric group whose scale was computed from the elements of the group. The codes of these elements
// need no clamping (kInside below).
struct InsideAffine {
  static constexpr int zero_point = 0;
  float scale, inverse;

  InsideAffine() = default;
  __device__ __forceinline__ explicit InsideAffine(const Affine& affine)
      : scale(affine.scale), inverse(affine.inverse) {}

  __device__ __forceinline__ operator Affine() const { return {scale, inverse, 0, lowest_code(true)}; }
  __device__ __forceinline__ bool is_plain() const { return scale == scale; }
};

// What the compiler may assume about the steps of a plain group:
//
//   kAny       Nothing, because the caller may have given the scale.
//   kNumbers   No steps are NaN, because the scale was computed from the same elements.
//   kInside    No steps are NaN. All steps become codes when they are rounded to the nearest integer, because the
//              scale was computed from the same elements, for symmetric codes. Without rounding errors, steps would be
//              at most 127 in magnitude. Three roundings (of the scale, of its reciprocal, and of the product) change
//              them by a relative error of less than 2^-20.
enum Steps { kAny, kNumbers, kInside };

// Clamps steps and rounds them to integers. The results are these integers plus kMagic. Clamping comes first, which
// gives the same codes as rounding first, because the bounds are integers.
template <bool kStochastic, Steps kSteps, int N, class AffineAt>
__device__ __forceinline__ void round_steps(float (&steps)[N], const AffineAt& affine_at) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if constexpr (kSteps != kInside) steps[k] = fminf(fmaxf(steps[k], affine_at(k).lowest), affine_at(k).highest);
    steps[k] = kStochastic ? add_down(steps[k], kMagic) : add_rn(steps[k], kMagic);
  }
}

// Packs the results of round_steps() as codes, four codes to a word. A result is kMagic plus an integer, and its low
// byte is the low byte of the integer. With kInside, all zero points are 0, and this byte is the code. Otherwise a code
// is the sum of an integer and its zero point. Four such sums are computed in one word, one byte for each sum. 128 is
// added to each sum, so that the sum is not negative, and does not carry into the next byte. The last xor subtracts the
// 128 again.
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

// Computes the uniform random numbers of the N elements from `index` on. philox() returns the random words of four
// successive indices, of which the first is a multiple of 4.
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
    // Shifts the words by index & 3. An array in registers cannot be indexed by a variable, so it is shifted by 1 or
    // not, then by 2 or not.
#pragma unroll
    for (int k = 0; k < N + 3; ++k) words[k] = index & 1 ? words[k + 1] : words[k];
#pragma unroll
    for (int k = 0; k < N; ++k) words[k] = index & 2 ? words[k + 2] : words[k];
  }
#pragma unroll
  for (int k = 0; k < N; ++k) noise[k] = uniform(words[k]);
}

}  // namespace amp_kernels::cuda
