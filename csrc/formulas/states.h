// Optimizer states of 8 and 16 bits. amp_kernels/reference/states.py is the specification, and says why these codes
// were chosen.
//
// A state in codes has a code of 8 bits for each element, and an fp32 scale for each group of 128 neighbours in memory:
//
//   momentum        code q from -127 to 127   sign(q) * (q / 127)^2 * scale
//   second moment   code q from 1 to 255      (q / 255)^4 * scale              q is 0 only if the whole group is 0
//
// The scale is the largest magnitude of the group. New states are rounded at random, with 16 random bits for each. The
// arithmetic is products, roots and conversions to integers, in fp32. There is no sum that a compiler could fuse with a
// product, so every backend computes the same bits.
#pragma once

#include <cmath>
#include <limits>

#include "int8.h"

namespace amp_kernels {

enum class Code { kNone, kMomentum, kSecondMoment };

// Returns a bit for each state that may have fewer than 32 bits, if a tensor has the states in `states`. A second
// moment stays in fp32 if the third state is used (Family.coded in amp_kernels/families.py).
template <class Formula>
constexpr int coded_states(int states) {
  const bool has_third = (states >> 2 & 1) != 0;
  int coded = 0;
  for (int k = 0; k < Formula::kStates; ++k) {
    const Code code = Formula::kCodes[k];
    const bool is_coded = code == Code::kMomentum || (code == Code::kSecondMoment && !has_third);
    coded |= (is_coded && (states >> k & 1) != 0) << k;
  }
  return coded;
}

constexpr int kLevels(Code code) { return code == Code::kMomentum ? 127 : 255; }

// 4 is added, because scale * (1 / scale) may be below 1 by 2^-24. The largest magnitude must have the largest code
// nevertheless. Otherwise the scale would change when the decoded group is encoded again.
constexpr float kSteps(Code code) { return 65536.0f * static_cast<float>(kLevels(code)) + 4.0f; }

// With a smaller scale, decoded numbers would be subnormal, and lose bits. A second moment has no smaller scale. A
// group of a momentum with smaller magnitudes becomes 0.
constexpr float kLeastScale = 0x1p-90f;

// A smaller fraction of a group's largest magnitude is raised to this one. That changes no code: the fourth root of
// kLeastFraction, times kSteps, is 0.5, and the code of 0 is rounded from the same integer.
constexpr float kLeastFraction = 0x1p-100f;

// In place of kLeastFraction for a second moment whose group is not 0. The fourth root of this number, times kSteps,
// lies between 65536 and 65537. So this number has the code 1, whatever the random bits are, and no code is below 1.
constexpr float kFractionOf1 = 0x1.040cp-32f;

// Rounded to nearest. x must be kLeastFraction or more. On a GPU these are the instructions that nvcc makes of
// __fsqrt_rn(x), without its branch for numbers below 2^-101. The branch took AdamW's update 16 instructions for an
// element.
AMP_KERNELS_HD float root_rn(float x) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  const float root = __fmul_rn(x, inverse);
  return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(inverse, 0.5f), root);
#else
  return sqrtf(x);
#endif
}

// 1 / x, rounded to nearest. x must be a normal number below 2^126. On a GPU these are the instructions that nvcc makes
// of __frcp_rn(x), without its branch for other numbers.
AMP_KERNELS_HD float reciprocal_rn(float x) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return __fmaf_rn(inverse, __fmaf_rn(-x, inverse, 1.0f), inverse);
#else
  return 1.0f / x;
#endif
}

// b where a is NaN.
AMP_KERNELS_HD float larger_number(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return a > b ? a : b;  // vectorized, unlike fmaxf()
#endif
}

// How a formula takes roots and divides, if nothing else is said: by IEEE.
struct Ieee {
  AMP_KERNELS_HD static float root(float x) { return sqrtf(x); }
  AMP_KERNELS_HD static float quotient(float a, float b) { return a / b; }
};

// The numbers that encode the elements of a group.
struct StateGroup {
  float scale;    // NaN if an element is NaN or inf
  float inverse;  // 1 / scale; 0 if all codes are 0
  float least;    // smaller fractions of the scale are raised to this one

  // `magnitude`: the bits of the largest magnitude. As an integer, NaN is larger than any number.
  AMP_KERNELS_HD StateGroup(Code code, uint32_t magnitude) {
    float absmax;
    memcpy(&absmax, &magnitude, sizeof(absmax));
    if (magnitude >= float_bits(kLeastScale) && magnitude < float_bits(0x1p126f)) {  // nearly always
      scale = absmax;
      inverse = reciprocal_rn(absmax);
      least = code == Code::kSecondMoment ? kFractionOf1 : kLeastFraction;
      return;
    }
    const bool is_zero = code == Code::kMomentum ? absmax < kLeastScale : magnitude == 0;
    const bool is_finite = magnitude < kInfinityBits, is_coded = is_finite && !is_zero;
    const float raised = absmax > kLeastScale ? absmax : kLeastScale;
    scale = is_coded ? raised : is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    inverse = is_coded ? divide_rn(1.0f, raised) : 0.0f;
    least = is_coded && code == Code::kSecondMoment ? kFractionOf1 : kLeastFraction;
  }
};

// Returns 65536 times the magnitude of the code of x. Below, it is rounded down to an integer, and then 16 random bits
// are added and shifted out. If the group holds NaN or inf, its inverse is 0, and the result is below 1.
template <Code kCode>
AMP_KERNELS_HD float steps_of(float x, const StateGroup& group) {
  const float product = multiply_rn(fabsf(x), group.inverse);
  const float fraction = larger_number(product, group.least);  // group.least where the product is NaN
  const float root = kCode == Code::kMomentum ? root_rn(fraction) : root_rn(root_rn(fraction));
  return multiply_rn(root, kSteps(kCode));
}

// Returns the code of x. `bits` are 16 random bits.
template <Code kCode>
AMP_KERNELS_HD int encoded(float x, const StateGroup& group, uint32_t bits) {
  const int steps = static_cast<int>(steps_of<kCode>(x, group)) + static_cast<int>(bits);
  const int magnitude = steps >> 16 > kLevels(kCode) ? kLevels(kCode) : steps >> 16;
  return kCode == Code::kMomentum && x < 0.0f ? -magnitude : magnitude;
}

template <Code kCode>
AMP_KERNELS_HD float decoded(float code, float scale) {
  const float fraction = multiply_rn(code, 1.0f / static_cast<float>(kLevels(kCode)));
  const float square = multiply_rn(fraction, kCode == Code::kMomentum ? fabsf(fraction) : fraction);
  return multiply_rn(kCode == Code::kMomentum ? square : multiply_rn(square, square), scale);
}

AMP_KERNELS_HD float from_bf16_bits(uint16_t high) {
  const uint32_t bits = static_cast<uint32_t>(high) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds to bf16 at random. The result is the upper 16 bits of an fp32 number. NaN is kept.
AMP_KERNELS_HD uint32_t bf16_bits(float x, uint32_t bits) { return x == x ? (float_bits(x) + bits) >> 16 : 0x7fc0u; }

// The random bits of a group of 128 neighbours in a step: element j takes the upper half of a * j + b, modulo 2^32. a
// and b are random. So the bits of each element are uniform. The bits of any two elements are independent (M.
// Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without primes",
// STACS 1996). A sum of rounding errors therefore has the same variance as with a random word for each element. Such
// words take 20 ms for 25M elements on two threads of a Xeon. SGD's whole update with fp32 states takes 19.9 ms there.
struct GroupNoise {
  uint32_t a, b;

  AMP_KERNELS_HD uint32_t at(int j) const { return (a * static_cast<uint32_t>(j) + b) >> 16; }
};

// The random bits of a tensor's states in a step. The key of Philox is the number of updates before the step, and the
// position of the tensor in the table. The counter is the position of the group in the tensor. The first two of
// the four words are for the first state, the others for the second.
struct Noise {
  uint32_t step;
  int64_t column;

  AMP_KERNELS_HD RandomWords words(int64_t group) const {
    return philox(static_cast<uint64_t>(group), static_cast<uint64_t>(column) << 32 | step);
  }

  AMP_KERNELS_HD GroupNoise of(int64_t group, int k) const { return of(words(group), k); }

  AMP_KERNELS_HD static GroupNoise of(const RandomWords& words, int k) {
    return {words.word[2 * k], words.word[2 * k + 1]};
  }
};

}  // namespace amp_kernels
