// The activations of a linear layer and their derivatives, in fp32.
// GELU (Hendrycks & Gimpel 2016) has two forms: the exact one uses erf, and an approximate one uses tanh. The constants
// are those of torch.nn.functional.gelu.
#pragma once

#include <cmath>

#include "../matmul.h"

namespace amp_kernels {

constexpr float kSqrtHalf = 0.70710678118654752440f;
constexpr float kTanhScale = 0.79788456080286535588f;  // sqrt(2 / pi)
constexpr float kTanhCubic = 0.044715f;
constexpr float kLog2E = 1.44269504088896340736f;

// 2^x and 1 / x by one instruction of the GPU each. The relative error is at most 2^-22. A subnormal result is 0. exp2f
// and a division have instructions for subnormal results. With them, the derivative of gelu_tanh would take 29
// instructions more than that of relu. Without them it takes 11 more.
AMP_KERNELS_HD float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return exp2f(x);
#endif
}

AMP_KERNELS_HD float fast_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

// Returns (1 + tanh(u)) / 2 for u = sqrt(2 / pi) * (x + 0.044715 * x^3). It is 1 / (1 + exp(-2u)). For a negative x,
// this form loses no digits, but 1 + tanhf(u) does.
AMP_KERNELS_HD float half_of_one_plus_tanh(float x) {
  constexpr float kScale = -2.0f * kTanhScale * kLog2E;
  return fast_reciprocal(1.0f + fast_exp2(x * (kScale + kScale * kTanhCubic * x * x)));
}

template <Activation kind>
AMP_KERNELS_HD float activate(float x) {
  if constexpr (kind == kRelu) return x < 0.0f ? 0.0f : x;  // NaN gives NaN
  if constexpr (kind == kGelu) return 0.5f * x * (1.0f + erff(x * kSqrtHalf));
  if constexpr (kind == kGeluTanh) return x * half_of_one_plus_tanh(x);
  return x;
}

// The derivative of GELU is Phi(x) + x * phi(x). Phi is the cumulative distribution function of the normal
// distribution, and phi is its density. Let product = exp(-x^2 / 2) * P(|x|), where P is a polynomial of degree 11. For
// x < 0 the derivative is the product, and for other x it is 1 - product. P was fitted so that the product is off by at
// most 1.7e-8. The fp32 result of this function is off by at most 1.3e-7, and takes 18 instructions. With erff and
// expf, the result would be off by 1.4e-7, and would take 35 instructions. Infinities give NaN, as in torch.
AMP_KERNELS_HD float gelu_derivative(float x) {
  constexpr float kTail[] = {0.4999999701976776f,    -0.7978828549385071f,   0.24997258186340332f,
                             -0.13280580937862396f,  0.06192397326231003f,   -0.025471867993474007f,
                             0.009003888815641403f,  -0.002590111456811428f, 0.0005636596470139921f,
                             -8.47723931656219e-05f, 7.708938028372359e-06f, -3.155507215524267e-07f};
  const float a = fminf(fabsf(x), 8.0f);  // from 8 on the product is below 1e-10
  float p = kTail[11];
  for (int i = 10; i >= 0; --i) p = p * a + kTail[i];
  const float product = fast_exp2(-0.5f * kLog2E * a * a) * p;
  return (x < 0.0f ? product : 1.0f - product) + 0.0f * x;
}

// The derivative of an activation. `x` is the argument of the activation. For relu, `x` is its result.
template <Activation kind>
AMP_KERNELS_HD float derivative(float x) {
  if constexpr (kind == kRelu) return x > 0.0f ? 1.0f : 0.0f;
  if constexpr (kind == kGelu) return gelu_derivative(x);
  if constexpr (kind == kGeluTanh) {
    // The activation is x * s, and the derivative of s by 2u is s * (1 - s).
    const float s = half_of_one_plus_tanh(x);
    const float slope = 2.0f * kTanhScale + 6.0f * kTanhScale * kTanhCubic * x * x;  // of 2u
    return s + x * s * (1.0f - s) * slope;
  }
  return 1.0f;
}

}  // namespace amp_kernels
