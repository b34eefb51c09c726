// From the arguments of the int8 ops (schemas: amp_kernels/_ops.py) to the structs the kernels take. Everything was
// checked in Python.
#pragma once

#include <vector>

#include "../int8.h"
#include "arguments.h"

namespace amp_kernels {

inline bool is_int8(const Tensor& tensor) { return tensor.scalar_type() == torch::headeronly::ScalarType::Char; }

inline Quantize make_quantize(const Tensor& x, const Tensor& out, const Tensor& scale,
                              std::optional<Tensor>& zero_point, const std::vector<int64_t>& layout, bool is_static,
                              bool stochastic, int64_t seed) {
  return {x.data_ptr(),
          out.data_ptr(),
          data<float>(scale),
          data<int32_t>(zero_point),
          Int8Layout::from(layout.data()),
          dtype_of(x),
          !is_int8(out),
          is_static,
          stochastic,
          static_cast<uint64_t>(seed)};
}

inline Dequantize make_dequantize(const Tensor& values, const Tensor& scale, const std::optional<Tensor>& zero_point,
                                  const Tensor& out, const std::vector<int64_t>& layout) {
  return {data<int8_t>(values),
          data<float>(scale),
          data<int32_t>(zero_point),
          out.data_ptr(),
          Int8Layout::from(layout.data()),
          dtype_of(out)};
}

inline StraightThrough make_straight_through(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                             const std::optional<Tensor>& zero_point, const Tensor& out,
                                             const std::vector<int64_t>& layout) {
  return {grad.data_ptr(),    x.data_ptr(),
          data<float>(scale), data<int32_t>(zero_point),
          out.data_ptr(),     Int8Layout::from(layout.data()),
          dtype_of(out)};
}

inline Int8Matmul make_matmul(const Tensor& a, const Tensor& b, const Tensor& a_scale,
                              const std::optional<Tensor>& a_zero_point, const Tensor& b_scale,
                              const std::optional<Tensor>& b_zero_point, const std::optional<Tensor>& bias,
                              const Tensor& out, const std::optional<Tensor>& out_scale,
                              const std::optional<Tensor>& out_zero_point) {
  return {a.size(0),
          b.size(1),
          a.size(1),
          data<int8_t>(a),
          {a.stride(0), a.stride(1)},
          data<int8_t>(b),
          {b.stride(0), b.stride(1)},
          data<float>(a_scale),
          data<int32_t>(a_zero_point),
          a_scale.numel() == 1 ? 0 : 1,
          data<float>(b_scale),
          data<int32_t>(b_zero_point),
          b_scale.numel() == 1 ? 0 : 1,
          data<char>(bias),
          out.data_ptr(),
          dtype_of(out),
          data<float>(out_scale),
          data<int32_t>(out_zero_point)};
}

inline Int8Linear make_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                              const std::optional<Tensor>& bias, const Tensor& out) {
  return {x.size(0),        weight.size(0),       x.size(1),          x.data_ptr(),
          x.stride(0),      data<int8_t>(weight), data<float>(scale), scale.numel() == 1 ? 0 : 1,
          data<char>(bias), out.data_ptr(),       dtype_of(x)};
}

}  // namespace amp_kernels
