// The length of the chunks of a table (table.h). amp_kernels/ops/table.py has the same function, chunk_size(), in
// Python. Its docstring explains how the length is chosen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace amp_kernels {

// Returns the number of elements in a chunk, for `tensors` tensors that together have `total` elements. `blocks` is the
// number of thread blocks of the kernel that run at a time on a GPU. On a CPU `blocks` is 0.
inline int64_t chunk_size(int64_t total, int64_t tensors, int64_t blocks) {
  constexpr int64_t kUnit = 128, kLeast = 1024, kMost = 1 << 16, kOverhead = 1024;
  if (blocks == 0) return total < 1 << 27 ? 1 << 14 : kMost;
  int64_t best = kMost, least_work = std::numeric_limits<int64_t>::max();
  for (int64_t rounds = tensors / blocks + 1;; ++rounds) {
    const int64_t even = total / std::max<int64_t>(1, rounds * blocks - tensors) + 1;
    const int64_t size = std::max(kLeast, (even + kUnit - 1) / kUnit * kUnit);
    if (size <= kMost && rounds * (size + kOverhead) < least_work) {
      best = size;
      least_work = rounds * (size + kOverhead);
    }
    if (size <= kMost / 8) return best;
  }
}

}  // namespace amp_kernels
