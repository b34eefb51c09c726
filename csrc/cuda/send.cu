// Small tables to the device as kernel arguments: unlike a copy from pinned memory there is nothing to keep
// alive, and a captured launch carries its values.
#include <algorithm>
#include <string>

#include "grid.cuh"

namespace amp_kernels::cuda {
namespace {

// A small launch for the addresses of a step, since all of the parameters are copied, and what a large one may take:
// 32764 bytes, of 4096 before CUDA 12.1. Drivers of CUDA 12.0 (525) run what CUDA 12 built, but not with that.
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
      cudaGetLastError();  // or the next launch would report it
      return cudaGetErrorString(error);
    default:
      check(error);  // out of memory, a capture: the answer may be another one next time
      return "";
  }
}

}  // namespace amp_kernels::cuda
