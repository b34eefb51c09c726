// Sends small tables to the device as kernel arguments: to[i] = values[i], 8 bytes each. There is one block, and its
// thread t writes i = t, t + 256, ... If a table were copied from pinned memory, that memory would have to stay alive
// until the copy, and in a captured graph until its last replay. A captured launch holds its own values.
#include <algorithm>
#include <string>

#include "grid.cuh"

namespace amp_kernels::cuda {
namespace {

// Values per launch. A launch copies its whole argument, even if the table fills only a part of it. So there is a
// small kernel for short tables, such as the addresses of a step. The large kernel is sized for what CUDA allows as
// arguments: 32764 bytes since CUDA 12.1, and 4096 before. A binary built with CUDA 12 has only the small kernel, since
// it also runs on drivers of CUDA 12.0 (525).
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
      cudaGetLastError();  // clears the error: otherwise the next launch would report it
      return cudaGetErrorString(error);
    default:
      // Other errors, as during a capture or if memory is short, say nothing about the binary. They are thrown.
      check(error);
      return "";
  }
}

}  // namespace amp_kernels::cuda
