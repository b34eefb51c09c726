// Small tables to the device as kernel arguments: unlike a copy from pinned memory there is nothing to keep
// alive, and a captured launch carries its values.
#include "grid.cuh"

namespace amp_kernels::cuda {
namespace {

#if CUDART_VERSION >= 12010
constexpr int kValues = 4000;  // of the 32764 bytes that a kernel takes since CUDA 12.1
#else
constexpr int kValues = 500;  // of 4096
#endif

struct Values {
  int64_t data[kValues];
};

__global__ void __launch_bounds__(kThreads) send_kernel(const __grid_constant__ Values values, int64_t* to, int n) {
  for (int i = threadIdx.x; i < n; i += kThreads) to[i] = values.data[i];
}

}  // namespace

void launch_send(const int64_t* host, int64_t* to, int64_t n, Stream stream) {
  for (int64_t i = 0; i < n; i += kValues) {
    const int count = static_cast<int>(n - i < kValues ? n - i : kValues);
    Values values;
    std::memcpy(values.data, host + i, count * sizeof(int64_t));
    launch(send_kernel, 1u, kThreads, 0, stream, values, to + i, count);
  }
}

}  // namespace amp_kernels::cuda
