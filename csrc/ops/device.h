// The classes Cpu and Cuda: what an operator does differently on a CPU and on a GPU. Kernels take the same structs as
// arguments on both devices.
//
// For each call, an operator makes an object of one of these classes, from a tensor on the device of the call. Both
// classes have these members:
//   run(args)              runs the int8 kernel whose arguments are the struct `args` (csrc/int8.h)
//   kReadsChunks           whether int8 products read operands in chunks of 16 bytes (csrc/int8.h)
//   kernel<Name, f>        the function to register for an operator whose kernel is f (AMP_KERNELS_IMPL)
//
// Only Cuda has these:
//   multiplies_codes_by(dtype)
//                          whether the kernels can multiply x of this dtype by int8 codes on this GPU
//   call(name, ...)        calls another operator through the dispatcher
//   prefers_triton(tensor) whether Triton computes large products of int8 codes on the GPU of the tensor
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <vector>

#include "../cpu/int8.h"
#include "arguments.h"
#ifdef USE_CUDA
#include "on_gpu.h"
#endif

namespace amp_kernels {

class Cpu {
 public:
  static constexpr bool kReadsChunks = false;

  template <class Name, auto kFunction>
  static constexpr auto kernel = kFunction;

  explicit Cpu(const Tensor&) {}

  void run(const Quantize& args) { cpu::quantize(args); }
  void run(const Dequantize& args) { cpu::dequantize(args); }
  void run(const StraightThrough& args) { cpu::straight_through(args); }
  void run(const Int8Matmul& args) { cpu::multiply(args); }
  void run(const Int8Conv2d& args) { cpu::multiply(args); }
  void run(const Int8Linear& args) { cpu::multiply(args); }
};

#ifdef USE_CUDA
class Cuda : public cuda::Dispatch {
 public:
  static constexpr bool kReadsChunks = true;

  explicit Cuda(const Tensor& tensor)
      : tensor_(tensor), guard_(tensor.get_device_index()), stream_(cuda::current_stream(tensor)) {}

  bool multiplies_codes_by(Dtype dtype) const { return cuda::multiplies_codes_by(dtype); }

  template <class Result, class... Arguments>
  static Result call(const OperatorName& name, const Arguments&... arguments) {
    return amp_kernels::call<Result>(name, arguments...);
  }

  // Calls the function `_prefers_triton` in amp_kernels/ops/int8.py once for each GPU, and keeps the answer.
  static bool prefers_triton(const Tensor& tensor) {
    const int64_t gpu = tensor.get_device_index();
    return cuda::kept_answer(tensor.get_device_index(),
                             [gpu] { return amp_kernels::call<bool>({"amp_kernels::_prefers_triton"}, gpu); });
  }

  void run(const Quantize& args) {
    memory_.push_back(cuda::workspace_beside(tensor_, cuda::quantize_workspace(args)));
    cuda::launch_quantize(args, memory_.back().data_ptr(), stream_);
  }
  void run(const Dequantize& args) { cuda::launch_dequantize(args, stream_); }
  void run(const StraightThrough& args) { cuda::launch_straight_through(args, stream_); }
  void run(const Int8Matmul& args) { cuda::launch_int8_matmul(args, stream_); }
  void run(const Int8Conv2d& args) { cuda::launch_int8_conv2d(args, stream_); }
  void run(const Int8Linear& args) { cuda::launch_int8_linear(args, stream_); }

 private:
  Tensor tensor_;
  cuda::Guard guard_;
  Stream stream_;
  // Memory that kernels use. It is freed with this object, perhaps before the kernels have run. workspace_beside()
  // (cuda_device.h) explains why that is safe.
  std::vector<Tensor> memory_;
};
#endif

}  // namespace amp_kernels
