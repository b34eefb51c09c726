// Where tensors lie and what they hold: one call a step, where Python takes 0.2 us a tensor to ask for each.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "../table.h"

namespace amp_kernels {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Twice the dtype's code, plus 1 if the tensor is contiguous; -1 for what kernels do not read.
int64_t kind(const Tensor& tensor) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  if (layout != aoti_torch_layout_strided()) return -1;
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return 2 * kFloat + tensor.is_contiguous();
    case ScalarType::Half:
      return 2 * kHalf + tensor.is_contiguous();
    case ScalarType::BFloat16:
      return 2 * kBFloat16 + tensor.is_contiguous();
    default:
      return -1;
  }
}

void addresses(std::vector<Tensor> tensors, Tensor addresses, Tensor kinds) {
  auto* address = static_cast<int64_t*>(addresses.data_ptr());
  auto* code = static_cast<int64_t*>(kinds.data_ptr());
  for (size_t i = 0; i < tensors.size(); ++i) {
    code[i] = kind(tensors[i]);
    address[i] = code[i] < 0 ? 0 : reinterpret_cast<int64_t>(tensors[i].data_ptr());
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CompositeExplicitAutograd, m) { m.impl("_addresses_", TORCH_BOX(&addresses)); }

}  // namespace amp_kernels
