// The classes Cpu and Cuda: what an operator does differently on a CPU and on a GPU. Kernels take the same structs as
// arguments on both devices.
//
// For each call, an operator makes an object of one of these classes, from a tensor on the device of the call. Both
// classes have these members:
//   send(words, spare, fill)
//                          returns the address at which kernels read the int64 words. Behind the words there is memory
//                          for `spare` more. The address is valid as long as this object and `words` exist.
//                          fill(address) is called before the words are sent. It may store the address of one word in
//                          another word
//   run(pass)              runs the gradient pass, or counts exponents
//   run(family, update)    runs the update of the tensors of one Form (../table.h)
//   load_send(), load_pass(), load_exponents(), load_update(family, form)
//                          load the kernels that send(), run(pass) and run(family, update) launch. All but load_send
//                          return how many thread blocks of the kernel run at a time, or 0 on a CPU
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
#include "../cpu/run.h"
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

  template <class Fill>
  int64_t* send(std::vector<int64_t>& words, int64_t spare, const Fill& fill) {
    words.resize(words.size() + spare);
    fill(words.data());
    return words.data();
  }

  void load_send() const {}
  int64_t load_pass() const { return 0; }
  int64_t load_exponents() const { return 0; }
  int64_t load_update(std::string_view, const Form&) const { return 0; }

  void run(const GradientPass& pass) { cpu::run_pass(pass); }
  void run(const ExponentPass& pass) { cpu::run_exponents(pass); }

  void run(std::string_view family, const Update& update) {
    Families::with(family, [&](auto formula) { cpu::run_update<typename decltype(formula)::type>(update); });
  }

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

  // Words are sent as kernel arguments (send.cu) and not copied from host memory. So the host does not wait for a copy,
  // and a captured graph needs no host memory.
  template <class Fill>
  int64_t* send(std::vector<int64_t>& words, int64_t spare, const Fill& fill) {
    const auto count = static_cast<int64_t>(words.size());
    memory_.push_back(cuda::workspace_beside(tensor_, (count + spare) * static_cast<int64_t>(sizeof(int64_t))));
    auto* const at = data<int64_t>(memory_.back());
    fill(at);
    cuda::launch_send(words.data(), at, count, stream_);
    return at;
  }

  void load_send() const { cuda::load_send(); }
  int64_t load_pass() const { return cuda::load_unscale(); }
  int64_t load_exponents() const { return cuda::load_exponents(); }
  int64_t load_update(std::string_view family, const Form& form) const { return cuda::load_update(family, form); }
  bool multiplies_codes_by(Dtype dtype) const { return cuda::multiplies_codes_by(dtype); }

  void run(const GradientPass& pass) { cuda::launch_unscale(pass, stream_); }
  void run(const ExponentPass& pass) { cuda::launch_exponents(pass, stream_); }
  void run(std::string_view family, const Update& update) { cuda::launch_update(family, update, stream_); }

  template <class Result, class... Arguments>
  static Result call(const cuda::OperatorName& name, const Arguments&... arguments) {
    return cuda::call<Result>(name, arguments...);
  }

  // Calls the function `_prefers_triton` in amp_kernels/ops/int8.py once for each GPU, and keeps the answer.
  static bool prefers_triton(const Tensor& tensor) {
    const int64_t gpu = tensor.get_device_index();
    return cuda::kept_answer(tensor.get_device_index(),
                             [gpu] { return cuda::call<bool>({"amp_kernels::_prefers_triton"}, gpu); });
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
