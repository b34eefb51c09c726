// The operators `matmul`, a product on tensor cores, and `copy_pad`, a copy with padded rows. Their schemas are in
// amp_kernels/ops/matmul.py. Both operators have C++ kernels for GPUs only. For CPU tensors the dispatcher calls the
// reference, in plain torch.
#ifdef USE_CUDA
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <tuple>

#include "on_gpu.h"
#include "operand.h"

namespace amp_kernels::cuda {
namespace {

using torch::headeronly::ScalarType;

// In bytes. If the rows of an operand begin at multiples of this, kernels can load the operand 16 bytes at a time.
constexpr int64_t kAlignment = 16;

int64_t padded(int64_t columns, ScalarType dtype) {
  const int64_t elements = kAlignment / (dtype == ScalarType::Float ? 4 : 2);
  return (columns + elements - 1) / elements * elements;
}

// Returns the properties of a tensor, which must be fp16 or bf16.
Operand operand_of_16_bits(const Tensor& tensor) {
  Operand operand(tensor);
  require(operand.is_float() && !operand.is_fp32());
  return operand;
}

// Returns the properties of a tensor, which must have the dtype and the device of the first operand.
Operand operand_like(const Tensor& tensor, const Operand& first) {
  Operand operand(tensor);
  require(operand.dtype == first.dtype && operand.is_beside(first));
  return operand;
}

Activation activation_of(const std::optional<std::string>& name) {
  // In the order of enum Activation.
  constexpr std::array<std::string_view, 4> kNames = {"", "relu", "gelu", "gelu_tanh"};
  const auto* const found = std::find(kNames.begin(), kNames.end(), name.value_or(""));
  require(found != kNames.end() && name != "");
  return static_cast<Activation>(found - kNames.begin());
}

// Returns a new tensor of these sizes. If `pads_rows` is true, its rows begin at multiples of 16 bytes, and its memory
// includes the padding behind the last row. Otherwise the tensor is contiguous.
Tensor new_result(const Tensor& like, std::vector<int64_t> sizes, ScalarType dtype, bool pads_rows) {
  const int64_t columns = sizes.back();
  if (pads_rows) sizes.back() = padded(columns, dtype);
  const Tensor memory = torch::stable::new_empty(like, sizes, dtype);
  if (sizes.back() == columns) return memory;
  const auto strides = memory.strides();
  sizes.back() = columns;
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(memory.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                                        strides.data(), 0, &view));
  return Tensor(view);
}

// Writes the strides of an operand over batch, rows and columns. For a single matrix the stride over the batch is 0.
void put_strides(const Operand& operand, int64_t (&strides)[3]) {
  strides[0] = 0;
  std::copy(operand.strides, operand.strides + operand.dims, strides + 3 - operand.dims);
}

std::tuple<Tensor, Tensor> matmul(Tensor a, Tensor b, std::optional<Tensor> input, double alpha, double beta,
                                  std::optional<std::string> activation, ScalarType out_dtype, bool pads_rows,
                                  bool needs_pre) {
  const Operand left = operand_of_16_bits(a), right = operand_like(b, left);
  const int64_t dims = left.dims;
  require((dims == 2 || dims == 3) && right.dims == dims && left.sizes[dims - 1] == right.sizes[dims - 2]);
  require(dims == 2 || left.sizes[0] == right.sizes[0]);
  require(out_dtype == ScalarType::Float || out_dtype == ScalarType::Half || out_dtype == ScalarType::BFloat16);
  std::vector<int64_t> sizes(left.sizes, left.sizes + dims);
  sizes.back() = right.sizes[dims - 1];

  Matmul args = {};
  args.activation = activation_of(activation);
  if (input.has_value()) {
    const Operand term = operand_like(*input, left);
    require(std::equal(sizes.begin(), sizes.end(), term.sizes, term.sizes + term.dims));
    args.input = input->data_ptr();
    put_strides(term, args.input_strides);
  }
  const Guard guard(a.get_device_index());
  const Tensor out = new_result(a, sizes, out_dtype, pads_rows);
  const Tensor pre = needs_pre ? new_result(a, sizes, out_dtype, pads_rows) : new_result(a, {0}, out_dtype, false);
  if (out.numel() == 0) return {out, pre};
  args.batch = dims == 3 ? sizes[0] : 1;
  args.m = sizes[dims - 2];
  args.n = sizes[dims - 1];
  args.k = left.sizes[dims - 1];
  args.a = a.data_ptr();
  put_strides(left, args.a_strides);
  args.a_bytes = bytes_behind(a);
  args.b = b.data_ptr();
  put_strides(right, args.b_strides);
  args.b_bytes = bytes_behind(b);
  args.out = out.data_ptr();
  args.out_strides[0] = dims == 3 ? out.stride(0) : 0;
  args.out_strides[1] = out.stride(dims - 2);
  args.pre = needs_pre ? pre.data_ptr() : nullptr;
  args.alpha = static_cast<float>(alpha);
  args.beta = static_cast<float>(beta);
  args.dtype = left.code();
  args.out_dtype = dtype_of(out);
  const Tensor workspace = workspace_beside(a, matmul_workspace(args));
  launch_matmul(args, workspace.data_ptr(), current_stream(a));
  return {out, pre};
}

std::tuple<Tensor, Tensor> copy_pad(Tensor x, std::optional<Tensor> saved, std::optional<std::string> activation,
                                    bool needs_sums, int64_t rows) {
  const Operand values = operand_of_16_bits(x);
  require(values.dims == 2 && rows >= values.sizes[0] && saved.has_value() == activation.has_value());

  CopyPad args = {};
  args.activation = activation_of(activation);
  if (saved.has_value()) {
    const Operand argument = operand_like(*saved, values);
    require(argument.has_shape_of(values));
    args.pre = saved->data_ptr();
    std::copy(argument.strides, argument.strides + 2, args.pre_strides);
  }
  const Guard guard(x.get_device_index());
  args.rows = values.sizes[0];
  args.columns = values.sizes[1];
  args.pitch = padded(args.columns, x.scalar_type());
  Tensor out = torch::stable::new_empty(x, {rows, args.pitch});
  if (rows > args.rows) {
    Tensor rest = torch::stable::narrow(out, 0, args.rows, rows - args.rows);
    torch::stable::zero_(rest);
  }
  Tensor sums = torch::stable::new_empty(x, {needs_sums ? args.columns : 0}, ScalarType::Float);
  if (values.numel == 0) return {out, torch::stable::zero_(sums)};
  args.x = x.data_ptr();
  std::copy(values.strides, values.strides + 2, args.x_strides);
  args.out = out.data_ptr();
  args.bias_grad = needs_sums ? data<float>(sums) : nullptr;
  args.dtype = values.code();
  const Tensor workspace = workspace_beside(x, copy_pad_workspace(args));
  launch_copy_pad(args, workspace.data_ptr(), current_stream(x));
  return {out, sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) {
  AMP_KERNELS_IMPL(m, Dispatch, "matmul", matmul);
  AMP_KERNELS_IMPL(m, Dispatch, "copy_pad", copy_pad);
}

}  // namespace amp_kernels::cuda
#endif
