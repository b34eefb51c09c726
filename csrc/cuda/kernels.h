// The functions of csrc/cuda that csrc/ops calls. A host compiler builds csrc/ops, so there is no device code here.
#pragma once

#include <string>
#include <string_view>

#include "../int8.h"
#include "../matmul.h"
#include "../table.h"

struct CUstream_st;

namespace amp_kernels {

using Stream = ::CUstream_st*;  // cudaStream_t

namespace cuda {

void launch_unscale(const GradientPass& pass, Stream stream);
void launch_exponents(const ExponentPass& pass, Stream stream);
void launch_update(std::string_view family, const Update& update, Stream stream);
// These functions load kernels, and loading fails during a graph capture. All but load_send return how many blocks of
// the kernel run at a time on the device.
int64_t load_unscale();
int64_t load_exponents();
int64_t load_update(std::string_view family, const Form& form);
// load_update and launch_update call these two for states of 8 and 16 bits.
int64_t load_update_lean(std::string_view family, const Form& form);
void launch_update_lean(std::string_view family, const Update& update, Stream stream);
void load_send();
void launch_send(const int64_t* host, int64_t* to, int64_t n, Stream stream);
std::string why_no_kernel();  // why the binary has no kernel for the current device; "" if it has one

int64_t quantize_workspace(const Quantize& quantize);  // bytes of `workspace`, which must be aligned to 16 bytes
void launch_quantize(const Quantize& quantize, void* workspace, Stream stream);
void launch_dequantize(const Dequantize& dequantize, Stream stream);
void launch_straight_through(const StraightThrough& pass, Stream stream);
void launch_int8_matmul(const Int8Matmul& matmul, Stream stream);
void launch_int8_conv2d(const Int8Conv2d& conv, Stream stream);
bool multiplies_codes_by(Dtype dtype);  // whether launch_int8_linear takes x of this dtype on the current device
void launch_int8_linear(const Int8Linear& linear, Stream stream);

int64_t matmul_workspace(const Matmul& matmul);  // bytes of `workspace`, which must be aligned to 4 bytes
void launch_matmul(const Matmul& matmul, void* workspace, Stream stream);
int64_t copy_pad_workspace(const CopyPad& pass);  // bytes of `workspace`, which must be aligned to 4 bytes
void launch_copy_pad(const CopyPad& pass, void* workspace, Stream stream);

}  // namespace cuda
}  // namespace amp_kernels
