// Writes lists of tensors into a table (../table.h).
//
// A table has a column for each parameter, with the addresses of the parameter and of its gradient, master and states.
// In the gradient pass the table has a column for each gradient. Kernels walk dense memory in storage order, so the
// tensors of one column must have their elements in the same order. If a tensor has gaps, or if its elements are in
// another order than those of its parameter, kernels get a copy. After a kernel has written a copy, the copy is copied
// back to its tensor.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "../chunks.h"
#include "operand.h"

namespace amp_kernels {

using Tensors = std::vector<Tensor>;

using Operands = std::vector<Operand>;

// Returns the properties of tensors. The tensors must be on the device of `beside`, and must be fp32, fp16 or bf16. If
// `or_remainders` is true, they may also be int16.
inline Operands operands_of(const Tensors& tensors, const Operand& beside, bool or_remainders = false) {
  Operands operands;
  operands.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    operands.emplace_back(tensor);
    const Operand& operand = operands.back();
    require((operand.is_float() || (or_remainders && operand.is_int16())) && operand.is_beside(beside));
  }
  return operands;
}

// Copies the tensors that kernels cannot walk in memory, and keeps the copies.
class Dense {
 public:
  // Returns the operand itself if it is dense, otherwise a row-major copy of it.
  Operand operator()(const Operand& operand) {
    return operand.is_dense() ? operand : copied(operand, row_major(operand));
  }

  // Returns the operand itself if it is dense and has its elements in the same order as `model`. Otherwise returns a
  // copy with the strides of `model`. `model` must be dense, and must have the shape of the operand.
  Operand operator()(const Operand& operand, const Operand& model) {
    if (operand.has_layout_of(model)) return operand;
    return copied(operand, {model.strides, model.strides + model.dims});
  }

  // Writes the copies back to the tensors from which they were made.
  void copy_back() {
    const NoGrad guard;
    for (auto& [tensor, copy] : copies_) torch::stable::copy_(tensor, copy);
  }

 private:
  Operand copied(const Operand& operand, const std::vector<int64_t>& strides) {
    const NoGrad guard;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(operand.dims, operand.sizes, strides.data(), operand.dtype,
                                                    operand.device, operand.index, &handle));
    Tensor copy(handle);
    torch::stable::copy_(copy, operand.tensor);
    copies_.emplace_back(operand.tensor, copy);
    return Operand(copy);
  }

  static std::vector<int64_t> row_major(const Operand& operand) {
    std::vector<int64_t> strides(operand.dims, 1);
    for (int64_t d = operand.dims - 2; d >= 0; --d)
      strides[d] = strides[d + 1] * std::max<int64_t>(1, operand.sizes[d + 1]);
    return strides;
  }

  std::vector<std::pair<Tensor, Tensor>> copies_;
};

// A range of memory with a bit for each `unit` bytes of it. A bit is set if an element of a marked tensor lies there.
class MarkedBytes {
 public:
  MarkedBytes(int64_t begin, int64_t end, int64_t unit) : begin_(begin), unit_(unit), marks_((end - begin) / unit) {}

  // Marks the elements of a tensor. Returns false if one of them was marked before.
  bool mark(const Operand& operand) {
    return mark((operand.address - begin_) / unit_, operand.steps(), 0, operand.element_size() / unit_);
  }

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

// Requires that no two elements of these tensors share memory. If tensors shared memory, results would differ from
// those of torch, because kernels write all tensors at once, but torch writes one after the other. Tensors may be
// interleaved, for example the columns of a fused matrix. The ranges of memory of interleaved tensors overlap, although
// the tensors share no element. So tensors whose ranges overlap are checked element by element. A tensor that is not
// dense is checked in this way, too, because two of its own elements may share memory.
inline void require_apart(const std::vector<const Operand*>& written) {
  struct Span {
    int64_t begin, end;
    const Operand* operand;
  };
  std::vector<Span> spans;
  spans.reserve(written.size());
  for (const Operand* operand : written)
    if (operand->numel > 0) spans.push_back({operand->address, operand->address + operand->span(), operand});
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t first = 0, next; first < spans.size(); first = next) {
    int64_t end = spans[first].end, unit = spans[first].operand->element_size();
    for (next = first + 1; next < spans.size() && spans[next].begin < end; ++next) {
      end = std::max(end, spans[next].end);
      unit = std::min(unit, spans[next].operand->element_size());
    }
    if (next == first + 1 && spans[first].operand->is_dense()) continue;
    MarkedBytes map(spans[first].begin, end, unit);
    for (size_t i = first; i < next; ++i) require(map.mark(*spans[i].operand));
  }
}

// The chunks of a table (../table.h). Each word is the entry of one chunk. It holds two int32, the index of the tensor
// and the index of the chunk in that tensor.
struct Chunks {
  std::vector<int64_t> words;
  int64_t size;  // elements in a chunk

  int64_t count() const { return static_cast<int64_t>(words.size()); }
};

// A table in host memory.
class HostTable {
 public:
  HostTable(int64_t rows, int64_t tensors) : tensors_(tensors), rows_(rows * tensors) {}

  int64_t& at(int row, int64_t tensor) { return rows_[row * tensors_ + tensor]; }

  void put(int64_t t, const Operand& grad) {
    at(kNumel, t) = grad.numel;
    at(kGrad, t) = grad.address;
    at(kGradDtype, t) = grad.code();
  }

  // Cuts the tensors of these columns into chunks. `blocks` is the number of thread blocks of the kernel that run at a
  // time, or 0 on a CPU (chunks.h).
  Chunks cut(const std::vector<int64_t>& columns, int64_t blocks) {
    int64_t total = 0;
    for (const int64_t t : columns) total += at(kNumel, t);
    Chunks chunks{{}, chunk_size(total, static_cast<int64_t>(columns.size()), blocks)};
    for (const int64_t t : columns)
      for (int64_t c = 0; c * chunks.size < at(kNumel, t); ++c) chunks.words.push_back(t | c << 32);
    return chunks;
  }

  int64_t tensors() const { return tensors_; }
  const std::vector<int64_t>& rows() const { return rows_; }

 private:
  int64_t tensors_;
  std::vector<int64_t> rows_;
};

// Words that are sent to a device together. add() appends a part, and returns the position of its first word.
class Words {
 public:
  int64_t add(const std::vector<int64_t>& part) {
    const auto at = static_cast<int64_t>(words_.size());
    words_.insert(words_.end(), part.begin(), part.end());
    return at;
  }

  // Appends fp32 numbers, two in a word.
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
