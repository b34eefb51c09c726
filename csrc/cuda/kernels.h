// What the CUDA sources offer to the bindings.
#pragma once

#include "../table.h"
#include "portable.h"

namespace amp_kernels::cuda {

void launch_unscale(const GradientPass& pass, Stream stream);
void launch_sgd(const Update& update, Stream stream);
void launch_rmsprop(const Update& update, Stream stream);
void launch_send(const int64_t* host, int64_t* to, int64_t n, Stream stream);

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;  // 2048 threads fill a multiprocessor of sm_80 and sm_90

// Blocks walk the chunks with a stride, so that a launch needs one wave whatever the model's size.
inline unsigned grid_size(const Table& table) {
  const int64_t most = static_cast<int64_t>(multiprocessor_count()) * kBlocksPerMultiprocessor;
  return static_cast<unsigned>(table.chunk_count < most ? table.chunk_count : most);
}

}  // namespace amp_kernels::cuda
