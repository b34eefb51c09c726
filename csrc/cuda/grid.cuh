// The launch shape that all kernels share.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "portable.h"

namespace amp_kernels::cuda {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;  // 2048 threads fill a multiprocessor of sm_80 and sm_90
// Blocks walk the chunks of a table with a stride, as many as run at a time: more would be a second wave, of which a
// part of the multiprocessors has nothing to do.
template <class Kernel, class Pass>
void launch_over_chunks(Kernel* kernel, size_t shared_bytes, const Pass& pass, Stream stream) {
  const int64_t most = static_cast<int64_t>(multiprocessor_count()) * resident_blocks(kernel, kThreads, shared_bytes);
  const int64_t grid = std::max<int64_t>(1, std::min(pass.table.chunk_count, most));
  launch(kernel, static_cast<unsigned>(grid), kThreads, shared_bytes, stream, pass);
}

// The grid of a launch: beyond what CUDA takes, an error instead of a part of the work.
inline unsigned blocks(int64_t count) {
  if (count > INT32_MAX) throw std::invalid_argument("amp_kernels: " + std::to_string(count) + " blocks are too many");
  return static_cast<unsigned>(count);
}

template <class F>
void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case kHalf:
      return f(__half{});
    case kBFloat16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

template <class F>
void with_16_bits(Dtype dtype, const F& f) {
  if (dtype == kHalf) return f(__half{});
  f(__nv_bfloat16{});
}

}  // namespace amp_kernels::cuda
