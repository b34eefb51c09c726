// Sends small tables to the device as kernel arguments: to[i] = values[i], 8 bytes each. There is one block. Its thread
// t writes the values i = t, t + 256, ... A table could also be copied from pinned memory. But that memory would have
// to stay alive until the copy is done, and in a captured graph until the last replay. Kernel arguments avoid this,
// because every launch holds its own values, a captured launch too.
#include <algorithm>
#include <string>

#include "grid.cuh"

namespace amp_kernels::cuda {
namespace {

// Values per launch. A launch copies its whole argument, even if the table fills only a part of it. So there is a small
// kernel (kFew) for short tables, such as the addresses of a step. The large kernel (kMany) is sized for what CUDA
// allows as arguments: 32764 bytes since CUDA 12.1. Before, CUDA allowed 4096 bytes, enough for the small kernel. A
// binary built with CUDA 12 has only the small kernel, since the binary also runs on drivers of CUDA 12.0 (525).
constexpr int kFew = 500, kMany = CUDART_VERSION >= 13000 ? 4000 : kFew;

template <int kValues>
struct Values {
  int64_t data[kValues];
};

template <int kValues>
__global__ void __launch_bounds__(kThreads)
    send_kernel(const __grid_constant__ Values<kValues> values, int64_t* to, int n) {
  for (int i = threadIdx.x; i < n; i += kThreads) to[i] = values.data[i];
}

template <int kValues>
void send(const int64_t* host, int64_t* to, int64_t n, Stream stream) {
  Values<kValues> values;
  std::memcpy(values.data, host, n * sizeof(int64_t));
  launch(send_kernel<kValues>, 1u, kThreads, 0, stream, values, to, static_cast<int>(n));
}

}  // namespace

void launch_send(const int64_t* host, int64_t* to, int64_t n, Stream stream) {
  for (; n > kFew; n -= std::min<int64_t>(n, kMany), host += kMany, to += kMany)
    send<kMany>(host, to, std::min<int64_t>(n, kMany), stream);
  if (n > 0) send<kFew>(host, to, n, stream);
}

void load_send() {
  resident_blocks(send_kernel<kFew>, kThreads, 0);
  if constexpr (kMany != kFew) resident_blocks(send_kernel<kMany>, kThreads, 0);
}

std::string why_no_kernel() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(send_kernel<kFew>));
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorInvalidPtx:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorJitCompilerNotFound:
      cudaGetLastError();  // clears the error, because otherwise the next launch would report it
      return cudaGetErrorString(error);
    default:
      // Other errors, as during a capture or if memory is short, say nothing about the binary. They are thrown.
      check(error);
      return "";
  }
}

}  // namespace amp_kernels::cuda
