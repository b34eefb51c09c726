// The table of a list of gradients (csrc/table.h) and how they are cut: made in Python it takes 2 us a tensor.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arguments.h"

namespace amp_kernels {

struct GradientTable {
  std::vector<int64_t> rows;
  std::vector<int32_t> chunks;

  int64_t chunk_count() const { return static_cast<int64_t>(chunks.size()) / 2; }
};

// None if a tensor is not contiguous, not of a dtype that kernels read, or not on the first one's device.
inline std::optional<GradientTable> gradient_table(const std::vector<Tensor>& grads, int64_t chunk_size) {
  const auto count = static_cast<int64_t>(grads.size());
  GradientTable table{std::vector<int64_t>(3 * count), {}};
  table.chunks.reserve(2 * count);
  for (int64_t t = 0; t < count; ++t) {
    const Tensor& grad = grads[t];
    const int64_t kind = kind_of(grad), numel = grad.numel();
    const bool is_beside = grad.is_cpu() == grads[0].is_cpu() && grad.is_cuda() == grads[0].is_cuda() &&
                           grad.get_device_index() == grads[0].get_device_index();
    if (kind < 0 || kind % 2 == 0 || !is_beside) return std::nullopt;
    table.rows[kNumel * count + t] = numel;
    table.rows[kGrad * count + t] = reinterpret_cast<int64_t>(grad.data_ptr());
    table.rows[kGradDtype * count + t] = kind / 2;
    for (int64_t c = 0; c * chunk_size < numel; ++c) {
      table.chunks.push_back(static_cast<int32_t>(t));
      table.chunks.push_back(static_cast<int32_t>(c));
    }
  }
  return table;
}

}  // namespace amp_kernels
