// The CUDA built-ins that csrc/cuda/portable.h uses, for a host compiler. One fiber per thread, one block at
// a time; a barrier releases its threads only when all of them have arrived, as on a GPU.
#pragma once

#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>

// Inlined wherever nvcc inlines it, the code of 92 updates, with a check of each access, takes g++ 100 s in place
// of 25.
#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
// A variable declared __shared__ would silently become one variable per thread.
#undef __shared__
#define __shared__ _Pragma("GCC error \"take shared memory from amp_kernels::shared_memory()\"")

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace emulator {

constexpr int kResidentBlocks = 8;
extern int multiprocessors;
// The GPU, and the architecture for which its code was compiled: 90 and 75 if the driver compiled the PTX of sm_75.
// Each such pair has a device number of its own, because portable.h keeps what a device answered.
extern int compute_capability, compiled_for, device;
void set_device(int compute_capability, int compiled_for);
size_t block_memory();  // that a block can ask for
[[noreturn]] void trap();

extern std::set<std::tuple<const void*, unsigned, size_t>> launched;  // (kernel, block, bytes of shared memory)

// A question about a kernel loads it (resident_blocks), if no earlier one did; a graph capture is too late for that.
extern std::set<const void*> loaded, loaded_late;
extern bool is_capturing;

extern bool has_kernels;  // whether the binary holds code that the GPU can run

// What gpus.cpp adds where it is linked. The first two throw what CUDA would return. The third says why a kernel may
// not read the bytes from `first` to `last`; nullptr if it may.
extern void (*on_load)(const void* kernel);
extern void (*on_launch)(const void* kernel, cudaStream_t stream);
extern const char* (*why_not_readable)(uintptr_t first, uintptr_t last);

inline void load(const void* kernel) {
  if (on_load != nullptr) on_load(kernel);
  if (loaded.insert(kernel).second && is_capturing) loaded_late.insert(kernel);
}

// In which order the threads of a block, and the blocks of a grid, get to run. A thread runs until it has to
// wait, so the first of two threads gets ahead of the other by as much as the barriers allow.
enum Order { kForwards, kBackwards, kShuffled };
void set_order(Order order, unsigned seed);

void set_planning(bool planning);  // launches are noted, and nothing runs

// Runs `kernel` once for every thread of the grid. Throws std::runtime_error for a launch CUDA would refuse
// and for whatever would hang, or be undefined, on a GPU. `address`: of the kernel, for `launched`. While planning,
// it ends there.
void run(const void* address, unsigned grid, unsigned block, size_t shared_bytes, cudaStream_t stream,
         const std::function<void()>& kernel);

char* shared_memory();
bool block_barrier(bool value, const char* name);  // whether any thread gave true
void fence();
unsigned atomic_add(unsigned* address, unsigned value);
unsigned long long atomic_add(unsigned long long* address, unsigned long long value);
int atomic_max(int* address, int value);
uint64_t warp_shuffle(unsigned mask, uint64_t bits, unsigned source_lane, const char* name);

// The bytes that each of the 32 lanes gave. Every lane gets all of them, until it calls again.
constexpr size_t kMostGiven = 48;
struct Given {
  unsigned char bytes[32][kMostGiven];

  template <class T>
  T of(unsigned lane) const {
    static_assert(sizeof(T) <= kMostGiven);
    T value;
    memcpy(&value, bytes[lane], sizeof(T));
    return value;
  }
};
const Given& warp_exchange(const void* mine, size_t size, const char* name);

// Copies happen at the last moment when threads run forwards, at once when they run backwards, and now so, now so when
// they are shuffled: a missing wait shows in one order, a buffer that is still being read in the other.
void copy_async(char* shared, const char* global, int bytes);
void commit_copies();
void wait_copies(unsigned pending);

// ldmatrix.x4 and ldmatrix.x4.trans. Each lane names a row, which must lie in shared memory, aligned to 16 bytes.
void load_matrices(uint32_t (&words)[4], const char* row);
void load_transposed(uint32_t (&words)[4], const char* row);

// The operands of a warp's mma, 16 rows and 8 columns of k numbers each, from fragments of words. The lane that
// has a word turns it into numbers with `read`, once for all lanes that multiply it.
template <class Word>
struct Fragments {
  Word a[4], b[2];
};

// c += a * b, where `dot` multiplies two words.
template <class C, class Read, class Dot>
void multiply_fragments(C (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const Read& read, const Dot& dot) {
  using Words = Fragments<decltype(read(a[0]))>;
  const Words mine{{read(a[0]), read(a[1]), read(a[2]), read(a[3])}, {read(b[0]), read(b[1])}};
  const Given& given = warp_exchange(&mine, sizeof(mine), "mma.sync");
  const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (unsigned lane = 0; lane < 4; ++lane) {
    const Words row = given.of<Words>(g * 4 + lane);
    for (unsigned i = 0; i < 2; ++i) {
      const Words column = given.of<Words>((t * 2 + i) * 4 + lane);
      for (unsigned half = 0; half < 2; ++half) {
        c[i] += dot(row.a[2 * half], column.b[half]);
        c[i + 2] += dot(row.a[2 * half + 1], column.b[half]);
      }
    }
  }
}

inline void multiply_codes(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto read = [](uint32_t word) { return word; };
  multiply_fragments(c, a, b, read, [](uint32_t x, uint32_t y) {
    int sum = 0;
    for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(x >> i) * static_cast<int8_t>(y >> i);
    return sum;
  });
}

template <class ToFloat>
void multiply_numbers(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const ToFloat& to_float) {
  struct Two {
    float low, high;
  };
  const auto read = [&](uint32_t word) {
    return Two{to_float(static_cast<uint16_t>(word)), to_float(static_cast<uint16_t>(word >> 16))};
  };
  multiply_fragments(c, a, b, read, [](const Two& x, const Two& y) { return x.low * y.low + x.high * y.high; });
}

}  // namespace emulator

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    default:
      return "the emulator does not know this attribute";
  }
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulator::device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) {
    *value = emulator::multiprocessors;
  } else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
    *value = static_cast<int>(emulator::block_memory());
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  if (!emulator::has_kernels) return cudaErrorNoKernelImageForDevice;
  try {
    emulator::load(kernel);
  } catch (const std::runtime_error&) {
    return cudaErrorStreamCaptureUnsupported;
  }
  *attributes = {};
  attributes->ptxVersion = emulator::compiled_for;
  attributes->binaryVersion = emulator::compute_capability;
  return cudaSuccess;
}

inline void __syncthreads() { emulator::block_barrier(false, "__syncthreads"); }
inline int __syncthreads_or(int value) { return emulator::block_barrier(value != 0, "__syncthreads_or"); }
inline void __threadfence() { emulator::fence(); }
inline unsigned atomicAdd(unsigned* address, unsigned value) { return emulator::atomic_add(address, value); }
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return emulator::atomic_add(address, value);
}
inline int atomicMax(int* address, int value) { return emulator::atomic_max(address, value); }

namespace emulator {

template <class T>
T shuffle(unsigned mask, T value, unsigned source_lane, const char* name) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = warp_shuffle(mask, bits, source_lane % 32, name);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return emulator::shuffle(mask, value, threadIdx.x ^ lane_mask, "__shfl_xor_sync");
}

inline int __all_sync(unsigned, int value) {
  const emulator::Given& given = emulator::warp_exchange(&value, sizeof(value), "__all_sync");
  bool all = true;
  for (unsigned lane = 0; lane < 32; ++lane) all = all && given.of<int>(lane) != 0;
  return all;
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
