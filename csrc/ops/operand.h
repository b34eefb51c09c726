// The properties of a tensor that operators check before they call a kernel.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "arguments.h"

namespace amp_kernels {

// Throws an error without details if `holds` is false. Python (`call` in amp_kernels/ops/library.py) then checks the
// arguments again, and raises an error with details.
inline void require(bool holds) {
  if (!holds)
    throw std::invalid_argument("amp_kernels: an argument does not fit; call the function of amp_kernels to see which");
}

// Whether elements fill one range of memory, each once, in any order of dimensions.
inline bool fill_a_range(int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t numel) {
  int64_t expected = 1;
  for (int64_t found = 1; expected < numel && found != 0;) {
    found = 0;
    for (int64_t d = 0; d < dims; ++d) {
      if (sizes[d] == 1 || strides[d] != expected) continue;
      expected *= sizes[d], found = 1;
      break;
    }
  }
  return expected == numel;
}

// The properties of a tensor. The constructor reads each property once, because each read through torch's C interface
// takes 5 ns.
struct Operand {
  Tensor tensor;
  int64_t address = 0, numel = 0, dims = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device = 0, index = 0, layout = 0;
  bool is_contiguous = false;

  explicit Operand(const Tensor& of) : tensor(of) {
    AtenTensorHandle handle = of.get();
    void* data = nullptr;
    int64_t *sizes_there = nullptr, *strides_there = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
    require(layout == aoti_torch_layout_strided());
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &index));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &numel));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dims));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes_there));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides_there));
    address = reinterpret_cast<int64_t>(data), sizes = sizes_there, strides = strides_there;
    int64_t expected = 1;
    is_contiguous = true;
    for (int64_t d = dims - 1; d >= 0; --d) {
      if (sizes[d] != 1 && strides[d] != expected) is_contiguous = false;
      expected *= sizes[d];
    }
    is_contiguous |= numel == 0;
  }

  bool is_fp32() const { return dtype == aoti_torch_dtype_float32(); }

  bool is_float() const {
    return is_fp32() || dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_bfloat16();
  }

  bool is_dense() const { return is_contiguous || fill_a_range(dims, sizes, strides, numel); }

  Dtype code() const { return is_fp32() ? kFloat : dtype == aoti_torch_dtype_float16() ? kHalf : kBFloat16; }
  bool is_beside(const Operand& other) const { return device == other.device && index == other.index; }
  bool has_shape_of(const Operand& other) const {
    return dims == other.dims && std::equal(sizes, sizes + dims, other.sizes);
  }
};

// Returns the number of bytes from the first element of a tensor to the end of its storage.
inline int64_t bytes_behind(const Tensor& tensor) {
  int64_t bytes = 0, offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
  return bytes - offset * static_cast<int64_t>(tensor.element_size());
}

// Requires that the scalar, if there is one, is a single fp32 element on the device of `beside`.
inline void require_scalar(const std::optional<Tensor>& scalar, const Operand& beside) {
  if (!scalar.has_value()) return;
  const Operand operand(*scalar);
  require(operand.is_fp32() && operand.numel == 1 && operand.is_beside(beside));
}

// Returns uninitialized memory on the device of `beside`.
inline Tensor new_tensor(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                         torch::headeronly::ScalarType dtype, const Tensor& beside) {
  AtenTensorHandle handle = nullptr;
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(beside.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  static_cast<int32_t>(dtype), device, beside.get_device_index(),
                                                  &handle));
  return Tensor(handle);
}

// Returns new contiguous memory on the device of `beside`.
inline Tensor new_tensor(const std::vector<int64_t>& sizes, torch::headeronly::ScalarType dtype, const Tensor& beside) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d > 1; --d) strides[d - 2] = strides[d - 1] * std::max<int64_t>(sizes[d - 1], 1);
  return new_tensor(sizes, strides, dtype, beside);
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// Turns autograd off while an operator of this library calls operators of torch.
class NoGrad {
 public:
  NoGrad() : was_enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(was_enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool was_enabled_;
};

}  // namespace amp_kernels
