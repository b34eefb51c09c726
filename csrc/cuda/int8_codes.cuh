// The codes of csrc/formulas/int8.h, bit for bit, by other instructions: a GPU rounds to an integer and converts at an
// eighth of the rate at which it adds, and compares, selects and packs at half of it. Two of the former or ten of the
// latter an element would cost more time than the memory takes.
#pragma once

#include "../formulas/int8.h"
#include "portable.h"

namespace amp_kernels::cuda {

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
constexpr int kMagicBits = 0x4b400000;

// NaN to 0. Beyond 512 a code saturates whatever its zero point.
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

// Where `inverse` is 0 the zero point is 0 or the sum is 0, and the formulas' test for it makes no difference.
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

// With the bounds of the steps from the zero point.
struct BoundedAffine : Affine {
  float lowest, highest;

  BoundedAffine() = default;
  __device__ __forceinline__ explicit BoundedAffine(const Affine& affine)
      : Affine(affine),
        lowest(static_cast<float>(affine.low) - static_cast<float>(affine.zero_point)),
        highest(127.0f - static_cast<float>(affine.zero_point)) {}

  // Whether packs may go by the functions below, if no step is NaN.
  __device__ __forceinline__ bool is_plain() const { return scale == scale && zero_point >= -128 && zero_point <= 127; }
};

// What is known of steps. In a group that has its own scale none is NaN, and if that is symmetric their nearest
// integers are codes: two roundings and a reciprocal add less than 2^-20 to the 127 of the largest.
enum Steps { kAny, kNumbers, kInside };

// Steps clamped and then rounded, which is the same as the other way round since the bounds are integers: kMagic more
// than they are.
template <bool kStochastic, Steps kSteps, int N, class AffineAt>
__device__ __forceinline__ void round_steps(float (&steps)[N], const AffineAt& affine_at) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if constexpr (kSteps != kInside) steps[k] = fminf(fmaxf(steps[k], affine_at(k).lowest), affine_at(k).highest);
    steps[k] = kStochastic ? add_down(steps[k], kMagic) : add_rn(steps[k], kMagic);
  }
}

// From rounded steps. A sum cannot carry from one code to the next if 128 more than each is added up.
template <int N, class AffineAt>
__device__ __forceinline__ void pack_codes(Vector<int8_t, N>& codes, const float (&steps)[N],
                                           const AffineAt& affine_at) {
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    uint32_t sum = 0, zeros = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      sum = (sum << 8) + float_bits(steps[k + i]);
      zeros = (zeros << 8) + static_cast<uint32_t>(affine_at(k + i).zero_point + 128 - kMagicBits);
    }
    const uint32_t word = (sum + zeros) ^ 0x80808080u;
    memcpy(codes.data + k, &word, sizeof(word));
  }
}

__device__ __forceinline__ uint32_t random_word(uint64_t index, uint64_t seed) {
  const RandomWords words = philox(index >> 2, seed);
  const uint32_t low = index & 1 ? words.word[1] : words.word[0];
  const uint32_t high = index & 1 ? words.word[3] : words.word[2];
  return index & 2 ? high : low;
}

// Of N elements with neighbouring indices. A counter gives the words of four.
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
    // Shifts by a constant each, for an array in registers cannot be indexed by a variable.
#pragma unroll
    for (int k = 0; k < N + 3; ++k) words[k] = index & 1 ? words[k + 1] : words[k];
#pragma unroll
    for (int k = 0; k < N; ++k) words[k] = index & 2 ? words[k + 2] : words[k];
  }
#pragma unroll
  for (int k = 0; k < N; ++k) noise[k] = uniform(words[k]);
}

template <int N>
__device__ __forceinline__ void random_noise(float (&noise)[N], uint64_t index, int64_t stride, uint64_t seed) {
  if (stride == 1) return neighbours_noise(noise, index, seed);
#pragma unroll
  for (int k = 0; k < N; ++k) noise[k] = uniform(random_word(index + k * stride, seed));
}

}  // namespace amp_kernels::cuda
