// The activations of a linear layer and their derivatives, in fp32.
// GELU: Hendrycks & Gimpel 2016, exact (erf) and by tanh, with the constants of torch.nn.functional.gelu.
#pragma once

#include <cmath>

#include "../matmul.h"

namespace amp_kernels {

constexpr float kSqrtHalf = 0.70710678118654752440f;
constexpr float kInverseSqrtTwoPi = 0.39894228040143267794f;
constexpr float kTanhScale = 0.79788456080286535588f;  // sqrt(2 / pi)
constexpr float kTanhCubic = 0.044715f;

template <Activation kind>
AMP_KERNELS_HD float activate(float x) {
  if constexpr (kind == kRelu) return x < 0.0f ? 0.0f : x;  // NaN stays
  if constexpr (kind == kGelu) return 0.5f * x * (1.0f + erff(x * kSqrtHalf));
  if constexpr (kind == kGeluTanh) return 0.5f * x * (1.0f + tanhf(kTanhScale * (x + kTanhCubic * x * x * x)));
  return x;
}

// Of relu by its result, of the others by their argument.
template <Activation kind>
AMP_KERNELS_HD float derivative(float x) {
  if constexpr (kind == kRelu) return x > 0.0f ? 1.0f : 0.0f;
  if constexpr (kind == kGelu) return 0.5f * (1.0f + erff(x * kSqrtHalf)) + x * kInverseSqrtTwoPi * expf(-0.5f * x * x);
  if constexpr (kind == kGeluTanh) {
    const float t = tanhf(kTanhScale * (x + kTanhCubic * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kTanhScale * (1.0f + 3.0f * kTanhCubic * x * x);
  }
  return 1.0f;
}

}  // namespace amp_kernels
