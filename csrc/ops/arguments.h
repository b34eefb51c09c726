// Converts the arguments of operators to the structs that kernels take. The schemas of the operators are in
// amp_kernels/ops. The operators that take a table do not check their arguments, because Python has built the table.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "../table.h"

namespace amp_kernels {

using torch::stable::Tensor;

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

template <class T>
T* data(std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

// Registers a function with the library `m` as a kernel of the operator `operator_`. D is Cpu or Cuda (device.h), or
// cuda::Dispatch (on_gpu.h) for an operator that has C++ kernels for GPUs only. If the binary has no code for the GPU
// of a call, another operator is called instead of the function. Name::uncompiled() returns the name of that operator.
#define AMP_KERNELS_IMPL(m, D, operator_, ...)                                          \
  do {                                                                                  \
    struct Name {                                                                       \
      static const char* uncompiled() { return "amp_kernels::_uncompiled_" operator_; } \
    };                                                                                  \
    m.impl(operator_, TORCH_BOX((D::template kernel<Name, &__VA_ARGS__>)));             \
  } while (false)

inline Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::Half:
      return kHalf;
    case torch::headeronly::ScalarType::BFloat16:
      return kBFloat16;
    default:
      return kFloat;
  }
}

inline Table make_table(const Tensor& table, const Tensor& chunks, int64_t chunk_size, int64_t squares = 0) {
  return {data<int64_t>(table), table.size(1), data<int32_t>(chunks),
          chunks.size(0),       chunk_size,    static_cast<int32_t>(squares)};
}

inline GradientPass make_pass(const Tensor& table, const Tensor& chunks, int64_t chunk_size,
                              const std::optional<Tensor>& scale, bool divide, bool write, bool clear,
                              const Tensor& partials, const Tensor& found_inf, const Tensor& norm, const Tensor& record,
                              int64_t squares) {
  return {make_table(table, chunks, chunk_size, squares),
          data<float>(scale),
          divide,
          write,
          clear,
          data<double>(partials),
          data<float>(found_inf),
          data<float>(norm),
          data<Record>(record)};
}

inline Form make_form(int64_t param_dtype, bool split, int64_t grad_dtype, int64_t states, int64_t state_dtype) {
  return {static_cast<Dtype>(param_dtype), split, static_cast<Dtype>(grad_dtype), static_cast<int32_t>(states),
          static_cast<Dtype>(state_dtype)};
}

inline Update make_update(const Tensor& table, const Tensor& chunks, int64_t chunk_size, const Tensor& record,
                          const Tensor& hyper, const Tensor& lr, const Form& form,
                          const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                          const std::optional<Tensor>& grad_norm, double max_norm) {
  return {make_table(table, chunks, chunk_size),
          reinterpret_cast<int32_t*>(&data<Record>(record)->ticket),
          data<float>(hyper),
          data<int64_t>(lr),
          data<float>(grad_scale),
          data<float>(found_inf),
          data<float>(grad_norm),
          static_cast<float>(max_norm),
          form};
}

}  // namespace amp_kernels
