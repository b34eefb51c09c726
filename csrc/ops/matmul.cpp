// The operators `matmul`, a product by the kernels of csrc/cuda, `copy_pad`, a copy with padded rows, and the products
// that torch computes on padded copies, `padded_matmul` and `padded_linear_backward`. Their schemas are in
// amp_kernels/ops/matmul.py. All have C++ kernels for GPUs only. For CPU tensors the dispatcher calls the reference, in
// plain torch.
#ifdef USE_CUDA
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

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

// Returns a view of x that begins where x does. The dispatcher would take longer for it.
Tensor view_of(const Tensor& x, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                                        strides.data(), 0, &view));
  return Tensor(view);
}

std::vector<int64_t> strides_of(const Tensor& x) { return {x.strides().begin(), x.strides().end()}; }

// Returns the first rows and columns of each matrix.
Tensor narrowed(const Tensor& x, int64_t rows, int64_t columns) {
  std::vector<int64_t> sizes = sizes_of(x);
  const size_t last = sizes.size() - 1;
  sizes[last - 1] = rows, sizes[last] = columns;
  return sizes == sizes_of(x) ? x : view_of(x, sizes, strides_of(x));
}

// Returns a new matrix, or batch of matrices, of these sizes. If `pads_rows` is true, its rows begin at multiples of 16
// bytes, and its memory includes the padding behind the last row. Otherwise the tensor is contiguous.
Tensor new_result(const Tensor& like, std::vector<int64_t> sizes, ScalarType dtype, bool pads_rows) {
  const int64_t rows = sizes[sizes.size() - 2], columns = sizes.back();
  if (pads_rows) sizes.back() = padded(columns, dtype);
  return narrowed(new_tensor(sizes, dtype, like), rows, columns);
}

// Returns a new tensor without elements, which stands for a result that was not asked for.
Tensor nothing(const Tensor& like, ScalarType dtype) { return new_tensor({0}, dtype, like); }

// Writes the strides of an operand over batch, rows and columns. For a single matrix the stride over the batch is 0.
void put_strides(const Operand& operand, int64_t (&strides)[3]) {
  strides[0] = 0;
  std::copy(operand.strides, operand.strides + operand.dims, strides + 3 - operand.dims);
}

// Requires that `b` can be multiplied with `a`, and returns the sizes of the product.
std::vector<int64_t> sizes_of_product(const Operand& a, const Operand& b) {
  const int64_t dims = a.dims;
  require((dims == 2 || dims == 3) && b.dims == dims && a.sizes[dims - 1] == b.sizes[dims - 2]);
  require(dims == 2 || a.sizes[0] == b.sizes[0]);
  std::vector<int64_t> sizes(a.sizes, a.sizes + dims);
  sizes.back() = b.sizes[dims - 1];
  return sizes;
}

std::tuple<Tensor, Tensor> matmul(Tensor a, Tensor b, std::optional<Tensor> input, double alpha, double beta,
                                  std::optional<std::string> activation, ScalarType out_dtype, bool pads_rows,
                                  bool needs_pre) {
  const Operand left = operand_of_16_bits(a), right = operand_like(b, left);
  const std::vector<int64_t> sizes = sizes_of_product(left, right);
  const int64_t dims = left.dims;
  require(out_dtype == ScalarType::Float || out_dtype == ScalarType::Half || out_dtype == ScalarType::BFloat16);

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
  const Tensor pre = needs_pre ? new_result(a, sizes, out_dtype, pads_rows) : nothing(a, out_dtype);
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
  Tensor out = new_tensor({rows, args.pitch}, x.scalar_type(), x);
  if (rows > args.rows) {
    Tensor rest = torch::stable::narrow(out, 0, args.rows, rows - args.rows);
    torch::stable::zero_(rest);
  }
  Tensor sums = new_tensor({needs_sums ? args.columns : 0}, ScalarType::Float, x);
  if (values.numel == 0) return {out, torch::stable::zero_(sums)};
  args.x = x.data_ptr();
  std::copy(values.strides, values.strides + 2, args.x_strides);
  args.out = out.data_ptr();
  args.bias_grad = needs_sums ? data<float>(sums) : nullptr;
  args.dtype = values.code();
  const int64_t bytes = copy_pad_workspace(args);
  const Tensor workspace = bytes == 0 ? sums : workspace_beside(x, bytes);
  launch_copy_pad(args, workspace.data_ptr(), current_stream(x));
  return {out, sums};
}

// ------------------------------------------------------------------------------------ products by torch, padded copies
// amp_kernels/ops/matmul.py has the reasons for these numbers, and the same rules (`_copies_of`, `is_aligned`).
constexpr int64_t kMultiple = 8, kFewRows = 16;

int64_t rounded_up(int64_t n) { return (n + kMultiple - 1) / kMultiple * kMultiple; }

Tensor transposed(const Tensor& x) {
  std::vector<int64_t> sizes = sizes_of(x), strides = strides_of(x);
  std::swap(sizes.end()[-1], sizes.end()[-2]), std::swap(strides.end()[-1], strides.end()[-2]);
  return view_of(x, sizes, strides);
}

bool is_column_major(const Tensor& x) { return x.stride(x.dim() - 2) == 1 && x.stride(x.dim() - 1) != 1; }

// Whether a matrix, or every matrix of a batch, can be loaded 16 bytes at a time.
bool is_aligned(const Tensor& x) {
  const int64_t dims = x.dim(), row = x.stride(dims - 2), column = x.stride(dims - 1);
  if (x.numel() == 0) return true;
  if (x.storage_offset() % kMultiple != 0 || (dims == 3 && x.stride(0) % kMultiple != 0)) return false;
  return (column == 1 && (x.size(dims - 2) == 1 || row % kMultiple == 0)) ||
         (row == 1 && (x.size(dims - 1) == 1 || column % kMultiple == 0));
}

// Returns a copy that is padded with zeros. If x is column-major, the copy is column-major too.
Tensor copied(const Tensor& x, int64_t rows, int64_t columns) {
  if (is_column_major(x)) return transposed(copied(transposed(x), columns, rows));
  if (x.dim() == 2) return narrowed(std::get<0>(copy_pad(x, {}, {}, false, rows)), rows, columns);
  return torch::stable::contiguous(torch::stable::pad(x, {0, columns - x.size(2), 0, rows - x.size(1)}));
}

// Replaces the operands of a product by padded copies where cuBLAS needs them. Returns the copies. A tensor without
// elements stands for an operand that is not copied.
std::pair<Tensor, Tensor> pad(Tensor& a, Tensor& b, int64_t min_work) {
  const int64_t dims = a.dim(), m = a.size(dims - 2), k = rounded_up(a.size(dims - 1)), n = b.size(dims - 1);
  const bool may_copy = m > kFewRows && a.numel() * n > min_work;
  const auto pad_one = [&](Tensor& x, int64_t rows, int64_t columns) {
    const bool fits = x.size(dims - 2) == rows && x.size(dims - 1) == columns && is_aligned(x);
    if (!may_copy || fits) return nothing(x, x.scalar_type());
    return x = copied(x, rows, columns);
  };
  Tensor left = pad_one(a, is_column_major(a) ? rounded_up(m) : m, k);
  return {left, pad_one(b, k, rounded_up(n))};
}

// Multiplies by operators with an argument `out`, to which autocast does not apply.
Tensor multiply_by_torch(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias = {}) {
  std::vector<int64_t> sizes = sizes_of(a);
  sizes.back() = b.size(b.dim() - 1);
  const Tensor out = new_tensor(sizes, a.scalar_type(), a);
  if (bias.has_value()) return call<Tensor>({"aten::linear", "out"}, a, transposed(b), bias, out);
  return call<Tensor>({a.dim() == 2 ? "aten::mm" : "aten::bmm", "out"}, a, b, out);
}

using Products = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Products padded_matmul(Tensor a, Tensor b, std::optional<Tensor> input, double alpha, double beta,
                       std::optional<std::string> activation, ScalarType out_dtype, bool pads_rows, bool needs_pre,
                       int64_t min_work, int64_t odd_rows) {
  const Operand left = operand_of_16_bits(a), right = operand_like(b, left);
  const std::vector<int64_t> sizes = sizes_of_product(left, right);
  const int64_t dims = left.dims, m = sizes[dims - 2], n = sizes[dims - 1];
  const Activation applied = activation_of(activation);
  if (m <= odd_rows && !(is_aligned(a) && is_aligned(b))) {
    const auto [out, pre] = matmul(a, b, input, alpha, beta, activation, out_dtype, false, needs_pre);
    return {out, pre, nothing(a, a.scalar_type()), nothing(b, b.scalar_type())};
  }
  // Torch's C interface calls no operator with a factor that may be a number of any type.
  bool is_plain = alpha == 1 && out_dtype == a.scalar_type() && m > 0 && left.sizes[dims - 1] > 0;
  if (input.has_value()) {
    const Operand term = operand_like(*input, left);
    require(std::equal(sizes.begin(), sizes.end(), term.sizes, term.sizes + term.dims));
    is_plain &= beta == 1 && dims == 2 && (term.strides[0] == 0 || m == 1);
  }
  if (!is_plain)
    return call<Products>({"amp_kernels::_uncompiled_padded_matmul"}, a, b, input, alpha, beta, activation, out_dtype,
                          pads_rows, needs_pre, min_work, odd_rows);
  const Guard guard(a.get_device_index());
  const NoGrad no_grad;
  const auto [a_copy, b_copy] = pad(a, b, min_work);
  std::optional<Tensor> bias;
  if (input.has_value()) {
    const int64_t columns = b.size(1);
    const Tensor row = narrowed(*input, 1, n);
    bias = view_of(columns == n ? row : copied(row, 1, columns), {columns}, {columns == n ? row.stride(1) : 1});
  }
  if (bias.has_value() && !needs_pre && (applied == kRelu || applied == kGeluTanh)) {
    // cuBLAS applies the activation: see `_multiply_by_torch` in amp_kernels/ops/matmul.py.
    AtenTensorHandle out = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_cuda__addmm_activation(bias->get(), a.get(), b.get(), 1, 1, applied == kGeluTanh, &out));
    return {narrowed(Tensor(out), m, n), nothing(a, out_dtype), a_copy, b_copy};
  }
  const Tensor argument = multiply_by_torch(a, b, bias);
  Tensor out = needs_pre && applied != kIdentity ? torch::stable::empty_like(argument) : argument;
  if (applied == kRelu) out = call<Tensor>({"aten::relu", "out"}, argument, out);
  if (applied == kGelu || applied == kGeluTanh)
    out = call<Tensor>({"aten::gelu", "out"}, argument, std::string(applied == kGelu ? "none" : "tanh"), out);
  return {narrowed(out, m, n), needs_pre ? narrowed(argument, m, n) : nothing(a, out_dtype), a_copy, b_copy};
}

// `_linear_backward` in amp_kernels/ops/matmul.py does the same in Python.
std::tuple<Tensor, Tensor, Tensor> padded_linear_backward(Tensor grad, Tensor x, Tensor weight,
                                                          std::optional<Tensor> saved,
                                                          std::optional<std::string> activation, bool needs_x,
                                                          bool needs_weight, bool needs_bias, int64_t inner,
                                                          int64_t min_work) {
  const Operand values = operand_of_16_bits(grad), left = operand_like(x, values), right = operand_like(weight, values);
  require(values.dims == 2 && left.dims == 2 && right.dims == 2);
  require(left.sizes[1] == right.sizes[1] && right.sizes[0] >= values.sizes[1] &&
          right.sizes[0] <= padded(values.sizes[1], grad.scalar_type()) && inner >= 0 && inner <= left.sizes[1]);
  const int64_t rows = values.sizes[0], columns = values.sizes[1];
  const Guard guard(grad.get_device_index());
  const NoGrad no_grad;
  Tensor sums = nothing(grad, ScalarType::Float);
  const int64_t x_rows = left.sizes[0], weight_rows = right.sizes[0];
  if (saved.has_value() || needs_bias || x_rows != rows || weight_rows != columns || !is_aligned(grad)) {
    std::tie(grad, sums) = copy_pad(grad, saved, activation, needs_bias, x_rows);
    grad = narrowed(grad, x_rows, weight_rows);
  }
  const auto multiply = [&](bool is_needed, Tensor a, Tensor b, int64_t m, int64_t n) {
    if (!is_needed) return nothing(a, a.scalar_type());
    pad(a, b, min_work);
    return narrowed(multiply_by_torch(a, b), m, n);
  };
  return {multiply(needs_x, grad, weight, rows, inner),
          torch::stable::contiguous(multiply(needs_weight, transposed(grad), x, columns, inner)), sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) {
  AMP_KERNELS_IMPL(m, Dispatch, "matmul", matmul);
  AMP_KERNELS_IMPL(m, Dispatch, "copy_pad", copy_pad);
  AMP_KERNELS_IMPL(m, Dispatch, "padded_matmul", padded_matmul);
  AMP_KERNELS_IMPL(m, Dispatch, "padded_linear_backward", padded_linear_backward);
}

}  // namespace amp_kernels::cuda
#endif
