// The arithmetic of int8 quantization: fp32 IEEE operations in a fixed order, none of them fused. So every backend
// computes the same bits. The random numbers come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011).
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "../int8.h"

namespace amp_kernels {

// nvcc contracts a * b + c to an FMA, but it does not contract the intrinsics below. The host compiler contracts
// nothing, because it gets -ffp-contract=off.
AMP_KERNELS_HD float multiply_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

AMP_KERNELS_HD float add_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

AMP_KERNELS_HD float divide_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

AMP_KERNELS_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

constexpr uint32_t kInfinityBits = 0x7f800000u;

// The extremes of the elements of a group. A group is a set of elements that share a scale and a zero point
// (../int8.h). Scale and zero point are computed from the extremes. Magnitudes are compared by their bits, as integers.
// As an integer, NaN is larger than any number, so `magnitude` keeps NaN. A comparison of floats would drop NaN.
struct Extremes {
  uint32_t magnitude = 0;  // the bits of the largest magnitude
  float low = 0.0f;        // never above 0, because one of the codes has to stand for 0
  float high = 0.0f;       // never below 0

  AMP_KERNELS_HD void add(float x) {
    const uint32_t bits = float_bits(x) & 0x7fffffffu;
    magnitude = bits > magnitude ? bits : magnitude;
    low = x < low ? x : low;
    high = x > high ? x : high;
  }

  AMP_KERNELS_HD void add(const Extremes& other) {
    magnitude = other.magnitude > magnitude ? other.magnitude : magnitude;
    low = other.low < low ? other.low : low;
    high = other.high > high ? other.high : high;
  }
};

// The parameters with which the elements of a group are converted to codes and back.
struct Affine {
  float scale;
  // 1 / scale. If a group has NaN or inf, or if its range is so small that 1 / scale is inf, affine_of() sets `inverse`
  // and `zero_point` to 0, so that all codes are 0.
  float inverse;
  int zero_point;
  int low;  // the lowest code; the highest is 127
};

AMP_KERNELS_HD int lowest_code(bool symmetric) { return symmetric ? -127 : -128; }

// Computes scale and zero point of a group. It has no branches, so that host compilers compute eight groups at a time.
AMP_KERNELS_HD Affine affine_of(const Extremes& group, bool symmetric) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float absmax;
  memcpy(&absmax, &group.magnitude, sizeof(absmax));
  const float scale =
      symmetric ? divide_rn(absmax, 127.0f) : add_rn(divide_rn(group.high, 255.0f), -divide_rn(group.low, 255.0f));
  const float inverse = divide_rn(1.0f, scale);
  const bool is_finite = group.magnitude < kInfinityBits;
  const bool has_inverse = is_finite & ((float_bits(inverse) & 0x7fffffffu) < kInfinityBits);
  const float zero = rintf(add_rn(-128.0f, -multiply_rn(group.low, inverse)));
  const float bounded = zero < -128.0f ? -128.0f : zero > 127.0f ? 127.0f : zero;
  const float known = (has_inverse & !symmetric) ? bounded : 0.0f;
  return {is_finite ? (has_inverse ? scale : 1.0f) : nan, has_inverse ? inverse : 0.0f, static_cast<int>(known),
          lowest_code(symmetric)};
}

// The Affine of a group whose scale and zero point the caller gave. If there is no zero point (nullptr), the codes are
// symmetric.
AMP_KERNELS_HD Affine given_affine(float scale, const int32_t* zero_point) {
  return {scale, divide_rn(1.0f, scale), zero_point == nullptr ? 0 : *zero_point, lowest_code(zero_point == nullptr)};
}

// The code before clamping. `steps` is x * inverse, rounded to an integer by the caller. It is bounded to the range
// from -512 to 512, because an int cannot hold every float. If `steps` is NaN, the code is the zero point.
AMP_KERNELS_HD int unclamped_code(float steps, int zero_point) {
  const float bounded = steps < -512.0f ? -512.0f : steps > 512.0f ? 512.0f : steps;
  return (bounded == bounded ? static_cast<int>(bounded) : 0) + zero_point;
}

AMP_KERNELS_HD int clamped(int code, int low) { return code < low ? low : code > 127 ? 127 : code; }

AMP_KERNELS_HD int code_of(float x, const Affine& affine) {
  if (affine.inverse == 0.0f) return clamped(affine.zero_point, affine.low);
  return clamped(unclamped_code(rintf(multiply_rn(x, affine.inverse)), affine.zero_point), affine.low);
}

// `noise` is uniform in [0, 1).
AMP_KERNELS_HD int stochastic_code_of(float x, float noise, const Affine& affine) {
  if (affine.inverse == 0.0f) return clamped(affine.zero_point, affine.low);
  const float steps = floorf(add_rn(multiply_rn(x, affine.inverse), noise));
  return clamped(unclamped_code(steps, affine.zero_point), affine.low);
}

// Whether the code of x needs no clamping.
AMP_KERNELS_HD bool is_inside(float x, const Affine& affine) {
  const int code = unclamped_code(rintf(multiply_rn(x, affine.inverse)), affine.zero_point);
  return code >= affine.low && code <= 127;
}

AMP_KERNELS_HD float value_of(int code, float scale, int zero_point) {
  return multiply_rn(static_cast<float>(code - zero_point), scale);
}

// Fake quantization keeps NaN, for which there is no code.
AMP_KERNELS_HD float fake_of(float x, int code, const Affine& affine) {
  return x == x ? value_of(code, affine.scale, affine.zero_point) : x;
}

// Four random words from one counter. The element with row-major index i takes word i & 3 from counter i >> 2. The
// index i depends on the dimensions of the tensor, not on its strides.
struct RandomWords {
  uint32_t word[4];
};

AMP_KERNELS_HD RandomWords philox(uint64_t counter, uint64_t seed) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A number in [0, 1) from the upper 24 bits of a random word.
AMP_KERNELS_HD float uniform(uint32_t word) { return static_cast<float>(word >> 8) * 5.9604644775390625e-8f; }

}  // namespace amp_kernels
