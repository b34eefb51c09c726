// What the CUDA kernels use beyond plain C++. Tensor-core instructions are in tensor_cores.cuh. nvcc compiles this
// file. If AMP_KERNELS_CUDA_ON_CPU is defined, a host compiler compiles it instead, and includes
// tests/harness/cuda_on_cpu/emulator.h first. So tests run the same kernels without a GPU. This file includes no torch
// header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#ifndef AMP_KERNELS_CUDA_ON_CPU
#include <cuda_runtime.h>
#endif

namespace amp_kernels {

using Stream = cudaStream_t;

// ---------------------------------------------------------------------------------- element access
// T is float, __half or __nv_bfloat16. Arithmetic is in float. A float that becomes a T is rounded to nearest even.

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

__host__ __device__ __forceinline__ bool is_aligned16(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// a + b, rounded toward minus infinity.
__device__ __forceinline__ float add_down(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rd(a, b);
#else
  const float sum = a + b;
  return sum > static_cast<double>(a) + b ? std::nextafter(sum, -INFINITY) : sum;
#endif
}

// The type of a 32-bit register that holds elements as they are in memory: one fp32 element, or two 16-bit elements.
template <class T>
struct Held;
template <>
struct Held<float> {
  using Type = float;
};
template <>
struct Held<__half> {
  using Type = __half2;
};
template <>
struct Held<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// larger() and smaller() return NaN if either argument is NaN.
__device__ __forceinline__ float larger(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

__device__ __forceinline__ float smaller(float a, float b) { return -larger(-a, -b); }
__device__ __forceinline__ __half2 larger(__half2 a, __half2 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ __half2 smaller(__half2 a, __half2 b) { return __hmin2_nan(a, b); }
__device__ __forceinline__ __nv_bfloat162 larger(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ __nv_bfloat162 smaller(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmin2_nan(a, b); }

template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  T data[N];
};

// The type in which N elements are accessed: the largest type of 16, 8 or 4 bytes whose size divides the size of the N
// elements. For example, four 16-bit elements are accessed in 8 bytes, and four int8 codes in 4 bytes. If not even 4
// bytes divide the size, it is T. The types of 16, 8 and 4 bytes are integers, because nvcc may split the copy of a
// struct with 16-bit members.
template <class T, int N>
using Access = std::conditional_t<
    sizeof(T) * N % 16 == 0, int4,
    std::conditional_t<sizeof(T) * N % 8 == 0, int2, std::conditional_t<sizeof(T) * N % 4 == 0, int, T>>>;

// Converts a global address to a pointer. It is for addresses that a kernel computes by integer arithmetic. For these
// addresses, assume_global() below would have no effect.
template <class T>
__device__ __forceinline__ const T* global_pointer(uintptr_t address) {
#ifdef __CUDA_ARCH__
  return static_cast<const T*>(__cvta_global_to_generic(address));
#else
  return reinterpret_cast<const T*>(address);
#endif
}

// Tells nvcc that p points to global memory. Kernels read addresses from a table, as integers. Without this function,
// nvcc would emit generic accesses (LD, not LDG) at these addresses.
template <class T>
__device__ __forceinline__ void assume_global(const T* p) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(p));
#else
  (void)p;
#endif
}

// Loads the N neighbours at p, one by one.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_elements(const T* p) {
  assume_global(p);
  Vector<T, N> elements;
#pragma unroll
  for (int i = 0; i < N; ++i) elements.data[i] = p[i];
  return elements;
}

template <int N, class T>
__device__ __forceinline__ void store_elements(T* p, const Vector<T, N>& elements) {
  assume_global(p);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = elements.data[i];
}

// N elements as they are in memory, in words of 32 bits. If they were kept as single elements, each 16-bit element
// would take a whole register.
template <class T, int N>
struct Packed {
  uint32_t word[sizeof(T) * N / 4];

  __device__ __forceinline__ Vector<T, N> unpacked() const {
    Vector<T, N> elements;
    memcpy(elements.data, word, sizeof(word));
    return elements;
  }
};

// Prefetches the sector that holds p into L2. p need not be aligned.
template <class T>
__device__ __forceinline__ void prefetch(const T* p) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
#else
  (void)p;
#endif
}

// Loads the N elements at p, in accesses of type Access<T, N>. p must be aligned to that type.
template <int N, class T>
__device__ __forceinline__ Packed<T, N> load_wide(const T* p) {
  using Word = Access<T, N>;
  constexpr int kWords = sizeof(Word) / 4;
  assume_global(p);
  Packed<T, N> packed;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) * N / 4); i += kWords) {
    const Word word = *reinterpret_cast<const Word*>(reinterpret_cast<const uint32_t*>(p) + i);
    memcpy(packed.word + i, &word, sizeof(Word));
  }
  return packed;
}

// Stores a word by a PTX instruction. If a word was put together from single elements, nvcc mostly splits an ordinary
// store of the word into stores of 4 bytes.
__device__ __forceinline__ void store_word(int4* p, int4 word) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(word.x), "r"(word.y),
               "r"(word.z), "r"(word.w)
               : "memory");
#else
  *p = word;
#endif
}

__device__ __forceinline__ void store_word(int2* p, int2 word) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(word.x), "r"(word.y)
               : "memory");
#else
  *p = word;
#endif
}

template <class T>
__device__ __forceinline__ void store_word(T* p, T word) {
  *p = word;
}

template <int N, class T>
__device__ __forceinline__ void store_wide(T* p, const Vector<T, N>& elements) {
  using Word = Access<T, N>;
  constexpr int kElements = sizeof(Word) / sizeof(T);
  assume_global(p);
#pragma unroll
  for (int i = 0; i < N; i += kElements) {
    Word word;
    memcpy(&word, elements.data + i, sizeof(Word));
    store_word(reinterpret_cast<Word*>(p + i), word);
  }
}

// Loads the first `count` of N elements that are `stride` apart, one by one. The others are 0.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_each(const T* p, int64_t stride, int count) {
  assume_global(p);
  Vector<T, N> elements{};
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) elements.data[i] = p[i * stride];
  return elements;
}

template <int N, class T>
__device__ __forceinline__ void store_each(T* p, const Vector<T, N>& elements, int64_t stride, int count) {
  assume_global(p);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) p[i * stride] = elements.data[i];
}

// ---------------------------------------------------------------------------------- architectures

// Whether this code is compiled for an architecture before `sm` (80 for sm_80). nvcc evaluates it at compile time.
__device__ __forceinline__ bool compiled_before([[maybe_unused]] int sm) {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  return emulator::compiled_for < sm;
#elif defined(__CUDA_ARCH__)
  return __CUDA_ARCH__ < 10 * sm;
#else
  return false;
#endif
}

// Ends the kernel with an error, which later calls of CUDA return. It is for branches for which this architecture has
// no instructions.
__device__ __forceinline__ void trap() {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  emulator::trap();
#elif defined(__CUDA_ARCH__)
  __trap();
#endif
}

// ------------------------------------------------------------------------------- block cooperation
// Blocks are one-dimensional, and blockDim.x is a multiple of 32, at most 1024. All threads of a block must call
// barrier(), is_last_block() and the functions named block_... together. All threads of a warp must call lanes_reduce()
// and the functions named warp_... together.

// The only shared memory that a kernel may use. launch() sets its size. Before each block, the emulator fills it with
// bytes 0xff, which are NaN in fp32.
__device__ __forceinline__ char* shared_memory() {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  return emulator::shared_memory();
#else
  extern __shared__ int4 amp_kernels_shared_memory[];
  return reinterpret_cast<char*>(amp_kernels_shared_memory);
#endif
}

__device__ __forceinline__ void barrier() { __syncthreads(); }
__device__ __forceinline__ void device_fence() { __threadfence(); }
__device__ __forceinline__ unsigned ticket(unsigned* counter) { return atomicAdd(counter, 1u); }

// Adds to an integer in device memory, to which other threads may add at the same time. The sum does not depend on the
// order of the additions.
__device__ __forceinline__ void add_atomically(int64_t* sum, int64_t value) {
  using Unsigned = unsigned long long;  // CUDA has no signed addition of 64 bits
  atomicAdd(reinterpret_cast<Unsigned*>(sum), static_cast<Unsigned>(value));
}

// Adds to an integer in shared or device memory.
__device__ __forceinline__ void add_atomically(uint32_t* sum, uint32_t value) { atomicAdd(sum, value); }

// Raises an integer in device memory to `value` if it is smaller.
__device__ __forceinline__ void raise_atomically(int32_t* maximum, int32_t value) { atomicMax(maximum, value); }

__device__ __forceinline__ bool block_any(bool value) { return __syncthreads_or(value) != 0; }

__device__ __forceinline__ bool warp_all(bool value) { return __all_sync(0xffffffffu, value) != 0; }

template <class T>
__device__ __forceinline__ T warp_shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, value);
#else
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint32_t other = warp_shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
#endif
}

// Reduces over groups of `lanes` neighbouring threads in a warp; `lanes` is a power of two.
template <class T, class Combine>
__device__ __forceinline__ T lanes_reduce(T value, int lanes, Combine combine) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) value = combine(value, warp_shuffle_xor(value, mask));
  return value;
}

// Reduces over a block in a fixed order. `combine` must be commutative, so that every thread gets the same bits.
// `shared`: room for 32 values, which may be used for something else after the call.
template <class T, class Combine>
__device__ __forceinline__ T block_reduce(T value, T identity, T* shared, Combine combine) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = combine(value, warp_shuffle_xor(value, mask));
  if (lane == 0) shared[threadIdx.x / 32] = value;
  barrier();
  value = lane < blockDim.x / 32 ? shared[lane] : identity;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = combine(value, warp_shuffle_xor(value, mask));
  barrier();
  return value;
}

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Min {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

__device__ __forceinline__ double block_sum(double value, double* shared) {
  return block_reduce(value, 0.0, shared, Sum());
}

template <class T>
__device__ __forceinline__ T block_min(T value, T identity, T* shared) {
  return block_reduce(value, identity, shared, Min());
}

// Returns true in all threads of the block that calls it last. From then on this block sees everything that each other
// block wrote before its last barrier, and everything that thread 0 of each other block wrote before its call.
// `counter` counts the blocks of a launch that have called. It must be 0 before the launch, and the last block sets it
// to 0 again.
//
// By the PTX memory model, the two fences and the tickets between them order thread 0 of each other block before thread
// 0 of the last block. The barrier in block_any() then orders the other threads of the last block. So the second fence
// must come before this barrier.
__device__ __forceinline__ bool is_last_block(unsigned* counter) {
  bool last = false;
  if (threadIdx.x == 0) {
    device_fence();
    last = ticket(counter) == gridDim.x - 1;
    if (last) {
      device_fence();
      *counter = 0;
    }
  }
  return block_any(last);
}

// --------------------------------------------------------------------------------------- host side

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, because otherwise the next launch, even one by torch, would report it again
  throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device));
  return device;
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, current_device()));
  return value;
}

inline int device_multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Bytes of shared memory that a block can have at most: 64 KB on sm_75, 99 KB or more from sm_80 on.
inline int block_memory() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Returns the architecture for which nvcc compiled the code of kKernel that the current device runs: a number from 75
// (for sm_75) to 120. The binary may also hold code of kKernel for other architectures. In the code that runs,
// __CUDA_ARCH__ is ten times the number, so the number tells which branches this code has. If the binary has only older
// PTX for a device, the driver compiles that PTX, and the branches for the older architecture apply. The number is kept
// for each device, since the query loads the kernel and may wait for a lock of the driver.
template <auto kKernel>
int compiled_for() {
  static std::atomic<int> known[64];  // 0: not known yet. Devices from 64 on are queried each time
  const int device = current_device();
  std::atomic<int>* const kept = device < 64 ? &known[device] : nullptr;
  if (kept != nullptr && *kept != 0) return *kept;
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)));
  const int answer = attributes.ptxVersion;  // not binaryVersion, which is the architecture of the device
  if (kept != nullptr) *kept = answer;
  return answer;
}

#ifdef AMP_KERNELS_CUDA_ON_CPU

template <class Kernel>
int resident_blocks(Kernel* kernel, unsigned, size_t) {
  emulator::load(reinterpret_cast<const void*>(kernel));
  return emulator::kResidentBlocks;
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned grid, unsigned block, size_t shared_bytes, Stream stream,
            Arguments... arguments) {
  // `call` refers to the arguments on this stack. They stay there, because run() returns after the kernel has ended.
  const auto call = [&] { kernel(arguments...); };
  emulator::run(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream, std::ref(call));
}

#else

// How many blocks of a kernel a multiprocessor holds at a time. Loads the kernel.
template <class Kernel>
int resident_blocks(Kernel* kernel, unsigned block, size_t shared_bytes) {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(block), shared_bytes));
  return blocks;
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned grid, unsigned block, size_t shared_bytes, Stream stream,
            Arguments... arguments) {
  if (shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  check(cudaGetLastError());
}

#endif

// The value of AMP_KERNELS_MULTIPROCESSORS; 0 if it is not set.
inline int pretended_multiprocessors() {
  const char* text = std::getenv("AMP_KERNELS_MULTIPROCESSORS");
  if (text == nullptr) return 0;
  if (const int count = std::atoi(text); count > 0) return count;
  throw std::invalid_argument("amp_kernels: AMP_KERNELS_MULTIPROCESSORS must be a positive number, got " +
                              std::string(text));
}

// The number of multiprocessors among which launchers divide work. AMP_KERNELS_MULTIPROCESSORS overrides the number of
// the device. If it is 3, the small products of tests use tiles of every size. With the 132 multiprocessors of an H100
// they would use only the smallest tiles. The variable is read once in a process.
inline int multiprocessor_count() {
  static const int pretended = pretended_multiprocessors();
  return pretended > 0 ? pretended : device_multiprocessors();
}

}  // namespace amp_kernels
