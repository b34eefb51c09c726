// What the CUDA sources offer to the bindings, which a host compiler builds: no device code here.
#pragma once

#include "../table.h"

struct CUstream_st;

namespace amp_kernels {

using Stream = ::CUstream_st*;  // cudaStream_t

namespace cuda {

void launch_unscale(const GradientPass& pass, Stream stream);
void launch_sgd(const Update& update, Stream stream);
void launch_rmsprop(const Update& update, Stream stream);
void launch_send(const int64_t* host, int64_t* to, int64_t n, Stream stream);

}  // namespace cuda
}  // namespace amp_kernels
