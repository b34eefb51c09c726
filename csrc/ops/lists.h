// Lists of tensors on their way into the table of csrc/table.h.
//
// Kernels walk dense memory in storage order, so that the tensors of one column of the table must have their elements
// in the same order. A tensor with gaps, or in another order than its parameter, is copied; what a kernel wrote is
// copied back.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "../bindings/arguments.h"

namespace amp_kernels {

using Tensors = std::vector<Tensor>;

// The words of every refusal are Python's (amp_kernels/ops), which looks at the arguments again.
inline void require(bool holds) {
  if (!holds) throw std::invalid_argument("amp_kernels: an argument does not fit; amp_kernels.functional says which");
}

inline bool is_float(const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  const ScalarType type = tensor.scalar_type();
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline bool is_fp32(const Tensor& tensor) { return tensor.scalar_type() == torch::headeronly::ScalarType::Float; }

inline bool is_beside(const Tensor& tensor, const Tensor& other) {
  return tensor.is_cpu() == other.is_cpu() && tensor.is_cuda() == other.is_cuda() &&
         tensor.get_device_index() == other.get_device_index();
}

inline bool is_strided(const Tensor& tensor) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

inline void require_floats(const Tensor& tensor, const Tensor& device) {
  require(is_strided(tensor) && is_float(tensor) && is_beside(tensor, device));
}

// One fp32 element on the device of the tensors.
inline void require_scalar(const std::optional<Tensor>& scalar, const Tensor& device) {
  require(!scalar.has_value() ||
          (is_strided(*scalar) && is_fp32(*scalar) && scalar->numel() == 1 && is_beside(*scalar, device)));
}

inline bool has_shape_of(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

// The dimensions of more than one element, from the largest stride to the smallest.
inline std::vector<std::pair<int64_t, int64_t>> steps_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1) steps.emplace_back(strides[d], sizes[d]);
  std::sort(steps.begin(), steps.end(), std::greater<>());
  return steps;
}

// Whether the elements fill one stretch of memory, each once, in whatever order of dimensions.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const auto steps = steps_of(tensor);
  int64_t expected = 1;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (step->first != expected) return false;
    expected *= step->second;
  }
  return true;
}

// Whether walking the storage of both, of one shape, visits the elements in the same order.
inline bool has_layout_of(const Tensor& a, const Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  const auto x = a.strides(), y = b.strides();
  return std::equal(x.begin(), x.end(), y.begin()) && is_dense(a);
}

// Whether an element stands for several, so that it cannot be written (an expanded tensor).
inline bool is_expanded(const Tensor& tensor) {
  if (tensor.is_contiguous()) return false;
  const auto steps = steps_of(tensor);
  return !steps.empty() && steps.back().first == 0;
}

// torch's own operators below an operator of ours must not see that a tensor requires a gradient.
class NoGrad {
 public:
  NoGrad() : was_enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(was_enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool was_enabled_;
};

inline Tensor empty_strided_like(const Tensor& tensor, const std::vector<int64_t>& strides) {
  AtenTensorHandle handle = nullptr;
  int32_t dtype = 0, device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(tensor.dim(), tensor.sizes().data(), strides.data(), dtype, device,
                                                  tensor.get_device_index(), &handle));
  return Tensor(handle);
}

// Tensors as kernels take them, and the way back.
class Dense {
 public:
  Tensor operator()(const Tensor& tensor) { return is_dense(tensor) ? tensor : copied(tensor, row_major(tensor)); }

  // In the order of `model`, which is dense.
  Tensor operator()(const Tensor& tensor, const Tensor& model) {
    if (has_layout_of(tensor, model)) return tensor;
    const auto strides = model.strides();
    return copied(tensor, {strides.begin(), strides.end()});
  }

  // What kernels wrote.
  void copy_back() {
    const NoGrad guard;
    for (auto& [tensor, copy] : copies_) torch::stable::copy_(tensor, copy);
  }

 private:
  Tensor copied(const Tensor& tensor, const std::vector<int64_t>& strides) {
    const NoGrad guard;
    Tensor copy = empty_strided_like(tensor, strides);
    torch::stable::copy_(copy, tensor);
    copies_.emplace_back(tensor, copy);
    return copy;
  }

  static std::vector<int64_t> row_major(const Tensor& tensor) {
    std::vector<int64_t> strides(tensor.dim(), 1);
    for (int64_t d = tensor.dim() - 2; d >= 0; --d)
      strides[d] = strides[d + 1] * std::max<int64_t>(1, tensor.size(d + 1));
    return strides;
  }

  std::vector<std::pair<Tensor, Tensor>> copies_;
};

// Marks the elements of tensors in a picture of their memory, a bit for each unit.
class Picture {
 public:
  Picture(int64_t begin, int64_t end, int64_t unit) : begin_(begin), unit_(unit), marks_((end - begin) / unit) {}

  // Whether all elements were unmarked.
  bool mark(const Tensor& tensor) {
    const int64_t width = static_cast<int64_t>(tensor.element_size()) / unit_;
    return mark((address_of(tensor) - begin_) / unit_, steps_of(tensor), 0, width);
  }

  static int64_t address_of(const Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.data_ptr()); }

 private:
  bool mark(int64_t at, const std::vector<std::pair<int64_t, int64_t>>& steps, size_t step, int64_t width) {
    if (step < steps.size()) {
      for (int64_t i = 0; i < steps[step].second; ++i)
        if (!mark(at + i * steps[step].first * width, steps, step + 1, width)) return false;
      return true;
    }
    for (int64_t i = at; i < at + width; ++i) {
      if (marks_[i]) return false;
      marks_[i] = true;
    }
    return true;
  }

  int64_t begin_, unit_;
  std::vector<bool> marks_;
};

// Kernels write all tensors at once, torch one after the other: where elements are shared, results differ. Tensors
// whose memory interleaves, as the columns of a fused matrix do, are looked at element by element.
inline void require_apart(const Tensors& written) {
  struct Span {
    int64_t begin, end;
    const Tensor* tensor;
  };
  std::vector<Span> spans;
  for (const Tensor& tensor : written) {
    if (tensor.numel() == 0) continue;
    int64_t last = 0;
    for (const auto& [stride, size] : steps_of(tensor)) last += stride * (size - 1);
    const int64_t begin = Picture::address_of(tensor);
    spans.push_back({begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()), &tensor});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t first = 0, next; first < spans.size(); first = next) {
    int64_t end = spans[first].end, unit = static_cast<int64_t>(spans[first].tensor->element_size());
    for (next = first + 1; next < spans.size() && spans[next].begin < end; ++next) {
      end = std::max(end, spans[next].end);
      unit = std::min(unit, static_cast<int64_t>(spans[next].tensor->element_size()));
    }
    if (next == first + 1 && is_dense(*spans[first].tensor)) continue;
    Picture picture(spans[first].begin, end, unit);
    for (size_t i = first; i < next; ++i) require(picture.mark(*spans[i].tensor));
  }
}

// The rows of a table, and how its tensors are cut.
class HostTable {
 public:
  HostTable(int64_t rows, int64_t tensors) : tensors_(tensors), rows_(rows * tensors) {}

  int64_t& at(int row, int64_t tensor) { return rows_[row * tensors_ + tensor]; }

  void put(int64_t t, const Tensor& grad) {
    at(kNumel, t) = grad.numel();
    at(kGrad, t) = Picture::address_of(grad);
    at(kGradDtype, t) = dtype_of(grad);
    elements_ += grad.numel();
  }

  // 16384 elements are 1560 chunks for ResNet-50, enough to go round 132 multiprocessors. From 2^27 elements on 65536
  // do as well and keep the last block's fold over all chunks short. (amp_kernels/ops/tables.py says the same.)
  int64_t chunk_size() const { return elements_ < 1 << 27 ? 1 << 14 : 1 << 16; }

  // Appends the chunks of a tensor to a list of words: (tensor, chunk within it) in int32.
  void cut(int64_t t, std::vector<int64_t>& chunks) {
    for (int64_t c = 0; c * chunk_size() < at(kNumel, t); ++c) chunks.push_back(t | c << 32);
  }

  int64_t tensors() const { return tensors_; }
  const std::vector<int64_t>& rows() const { return rows_; }

 private:
  int64_t tensors_, elements_ = 0;
  std::vector<int64_t> rows_;
};

// Words that are sent together; `add` says where a part begins.
class Words {
 public:
  int64_t add(const std::vector<int64_t>& part) {
    const auto at = static_cast<int64_t>(words_.size());
    words_.insert(words_.end(), part.begin(), part.end());
    return at;
  }

  // fp32 numbers, two in a word.
  int64_t add(const std::vector<float>& numbers) {
    std::vector<int64_t> part((numbers.size() + 1) / 2);
    std::memcpy(part.data(), numbers.data(), numbers.size() * sizeof(float));
    return add(part);
  }

  std::vector<int64_t>& get() { return words_; }

 private:
  std::vector<int64_t> words_;
};

}  // namespace amp_kernels
