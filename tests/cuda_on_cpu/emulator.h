// The CUDA built-ins that csrc/cuda/portable.h uses, for a host compiler. One fiber per thread, one block at
// a time; a barrier releases its threads only when all of them have arrived, as on a GPU.
#pragma once

#include <vector_functions.h>
#include <vector_types.h>

#include <cstdint>
#include <cstring>
#include <functional>

#undef __launch_bounds__
#define __launch_bounds__(...)
// A variable declared __shared__ would silently become one variable per thread.
#undef __shared__
#define __shared__ _Pragma("GCC error \"take shared memory from amp_kernels::shared_memory()\"")

using cudaStream_t = struct CUstream_st*;

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace emulator {

constexpr int kMultiprocessors = 3;

// In which order the threads of a block, and the blocks of a grid, get to run. A thread runs until it has to
// wait, so the first of two threads gets ahead of the other by as much as the barriers allow.
enum Order { kForwards, kBackwards, kShuffled };
void set_order(Order order, unsigned seed);

// Runs `kernel` once for every thread of the grid. Throws std::runtime_error for a launch CUDA would refuse
// and for whatever would hang, or be undefined, on a GPU.
void run(unsigned grid, unsigned block, size_t shared_bytes, const std::function<void()>& kernel);

char* shared_memory();
bool block_barrier(bool value, const char* name);  // whether any thread gave true
uint64_t warp_shuffle(unsigned mask, uint64_t bits, unsigned source_lane, const char* name);

}  // namespace emulator

inline void __syncthreads() { emulator::block_barrier(false, "__syncthreads"); }
inline int __syncthreads_or(int value) { return emulator::block_barrier(value != 0, "__syncthreads_or"); }
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* address, unsigned value) { return (*address += value) - value; }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulator::warp_shuffle(mask, bits, (threadIdx.x ^ lane_mask) % 32, "__shfl_xor_sync");
  memcpy(&value, &bits, sizeof(T));
  return value;
}
