// Launches the kernels that read a table (../table.h).
#pragma once

#include <memory>
#include <string_view>

#include "arguments.h"
#ifdef USE_CUDA
#include "cuda_device.h"
#endif

namespace amp_kernels {

// In unscale.cpp, exponents.cpp and update.cpp, which compile the kernels for CPUs.
void run_on_cpu(const GradientPass& pass);
void run_on_cpu(const ExponentPass& pass);
void run_on_cpu(std::string_view family, const Update& update);

// Launches on a CPU, or on the current stream of a GPU. The GPU is the current one as long as the object lives. The
// load functions load kernels, which a graph capture must not do. They return how many thread blocks of the kernel run
// at a time, or 0 on a CPU.
class Launcher {
 public:
#ifdef USE_CUDA
  // `gpu` is the index of a GPU, or -1 for a CPU.
  explicit Launcher(int32_t gpu) : gpu_(gpu) {
    if (gpu < 0) return;
    guard_ = std::make_unique<cuda::Guard>(gpu);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(gpu, &stream));
    stream_ = static_cast<Stream>(stream);
  }

  void send(const int64_t* words, int64_t* to, int64_t count) const {
    if (gpu_ >= 0) cuda::launch_send(words, to, count, stream_);
  }
  void run(const GradientPass& pass) const { gpu_ < 0 ? run_on_cpu(pass) : cuda::launch_unscale(pass, stream_); }
  void run(const ExponentPass& pass) const { gpu_ < 0 ? run_on_cpu(pass) : cuda::launch_exponents(pass, stream_); }
  void run(std::string_view family, const Update& update) const {
    gpu_ < 0 ? run_on_cpu(family, update) : cuda::launch_update(family, update, stream_);
  }

  int64_t load_pass() const {
    if (gpu_ < 0) return 0;
    cuda::load_send();
    return cuda::load_unscale();
  }
  int64_t load_exponents() const { return gpu_ < 0 ? 0 : cuda::load_exponents(); }
  int64_t load_update(std::string_view family, const Form& form) const {
    return gpu_ < 0 ? 0 : cuda::load_update(family, form);
  }

 private:
  int32_t gpu_;
  std::unique_ptr<cuda::Guard> guard_;
  Stream stream_ = nullptr;
#else
  explicit Launcher(int32_t) {}
  void send(const int64_t*, int64_t*, int64_t) const {}
  void run(const GradientPass& pass) const { run_on_cpu(pass); }
  void run(const ExponentPass& pass) const { run_on_cpu(pass); }
  void run(std::string_view family, const Update& update) const { run_on_cpu(family, update); }
  int64_t load_pass() const { return 0; }
  int64_t load_exponents() const { return 0; }
  int64_t load_update(std::string_view, const Form&) const { return 0; }
#endif
};

// Returns a launcher for the device of a tensor.
inline Launcher launcher_beside(const Tensor& tensor) {
  return Launcher(tensor.is_cuda() ? tensor.get_device_index() : -1);
}

}  // namespace amp_kernels
