// Chooses what computes an operator on a GPU. If this binary has code for the GPU of the call, the C++ kernel runs.
// Otherwise the call goes to the operator `_uncompiled_<name>`, which Python registers (amp_kernels/ops/library.py).
// That operator runs a Triton kernel. If Triton is not installed, it runs the reference.
#pragma once

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "cuda_device.h"

namespace amp_kernels::cuda {

// Returns why this binary has no code for a GPU, or an empty string if it has such code.
inline std::string why_not_on(int32_t gpu) {
  const Guard guard(gpu);
  return why_no_kernel();
}

// Returns the answer of ask() for a GPU. For the first 64 GPUs the answer is kept, and ask() is not called again. If
// ask() throws, no answer is kept.
template <class Ask>
bool kept_answer(int32_t gpu, const Ask& ask) {
  enum Answer : signed char { kUnknown, kYes, kNo };
  static std::atomic<Answer> known[64];  // one array for each type Ask, and each lambda has a type of its own
  if (gpu < 0 || gpu >= 64) return ask();
  if (known[gpu] == kUnknown) known[gpu] = ask() ? kYes : kNo;
  return known[gpu] == kYes;
}

// Whether this binary has code for a GPU.
inline bool has_kernels_for(int32_t gpu) {
  return kept_answer(gpu, [gpu] { return why_not_on(gpu).empty(); });
}

// Returns the index of the GPU of an operator's first argument, and -1 if it is not on a GPU. The other tensors of an
// operator are on the same device. For an empty list no kernel runs.
inline int32_t gpu_of(const Tensor& tensor) { return tensor.get_device_index(); }
inline int32_t gpu_of(const std::vector<Tensor>& tensors) { return tensors.empty() ? -1 : gpu_of(tensors[0]); }

template <class Name, auto kFunction>
struct OnGpu;
template <class Name, class Result, class First, class... Rest, Result (*kFunction)(First, Rest...)>
struct OnGpu<Name, kFunction> {
  static Result run(First first, Rest... rest) {
    const int32_t gpu = gpu_of(first);
    if (gpu < 0 || has_kernels_for(gpu)) return kFunction(std::move(first), std::move(rest)...);
    return call<Result>({Name::uncompiled()}, first, rest...);
  }
};

// Wraps a kernel. If this binary has no code for the GPU of a call, the call goes to the operator `_uncompiled_<name>`.
struct Dispatch {
  template <class Name, auto kFunction>
  static constexpr auto kernel = &OnGpu<Name, kFunction>::run;
};

}  // namespace amp_kernels::cuda
