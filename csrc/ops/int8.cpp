// The int8 operators: quantization and products. Their schemas are in amp_kernels/ops/int8.py. Each operator checks its
// arguments, allocates its results and launches a kernel. The operators of quantization also plan the layout of the
// groups (int8_layout.h). If an argument does not fit, an operator throws an error without details. Python then checks
// the arguments again, and raises an error with details (`require` in operand.h).
#include "../int8.h"

#include <algorithm>
#include <tuple>

#include "device.h"
#include "int8_layout.h"
#include "operand.h"

namespace amp_kernels {
namespace {

using torch::headeronly::ScalarType;
using MaybeTensor = std::optional<Tensor>;

// How many products of codes int32 can surely sum: (2^31 - 1) / 128^2, rounded down.
constexpr int64_t kMaxTerms = 131071;

// Returns a copy of `from` in new memory, broadcast to `sizes`.
Tensor copied(const Tensor& from, const Dims& sizes, const Dims& strides, ScalarType dtype) {
  const NoGrad guard;
  Tensor copy = new_tensor(sizes, strides, dtype, from);
  torch::stable::copy_(copy, from);
  return copy;
}

// Returns the tensor itself if it has these strides and this dtype, otherwise a copy that has them.
Tensor with_strides(const Tensor& tensor, const Dims& strides, ScalarType dtype) {
  const auto sizes = tensor.sizes(), its = tensor.strides();
  bool fits = tensor.scalar_type() == dtype;
  for (size_t d = 0; d < strides.size(); ++d) fits &= sizes[d] == 1 || its[d] == strides[d];
  return fits ? tensor : copied(tensor, sizes_of(tensor), strides, dtype);
}

Tensor with_strides(const Tensor& tensor, const Dims& strides) {
  return with_strides(tensor, strides, tensor.scalar_type());
}

Tensor as_row_major(const Tensor& tensor) { return with_strides(tensor, row_major(sizes_of(tensor))); }

MaybeTensor as_row_major(const MaybeTensor& tensor) {
  return tensor.has_value() ? MaybeTensor(as_row_major(*tensor)) : tensor;
}

void require_kind(const Tensor& tensor, ScalarType dtype, const Operand& beside) {
  const Operand operand(tensor);
  require(operand.dtype == static_cast<int32_t>(dtype) && operand.is_beside(beside));
}

bool is_float(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

// ------------------------------------------------------------------------------------------------------- groups
// Returns the groups of x for the arguments `dim` and `block_size` of an operator.
Groups groups_over(const Tensor& x, const std::optional<Dims>& dim, const std::optional<int64_t>& block) {
  const int64_t dims = x.dim();
  Groups groups{sizes_of(x), std::vector<bool>(dims, block.has_value() || (dim.has_value() && !dim->empty()))};
  Dims reduced = dim.value_or(Dims());
  for (int64_t& d : reduced) {
    require(-dims <= d && d < dims);
    d = d < 0 ? d + dims : d;
    if (block.has_value()) continue;
    require(groups.kept[d]);  // each dimension once
    groups.kept[d] = false;
  }
  if (block.has_value()) {
    require(*block > 0 && dims > 0 && (!dim.has_value() || reduced == Dims{dims - 1}));
    groups.block = *block;
    groups.kept.back() = false;
  }
  return groups;
}

// Returns the groups of x for a given scale. If there is a block size, the groups are blocks. Otherwise a scale of one
// element means that all of x is one group. With any other scale, the dimensions in which the scale has size 1 are
// reduced.
Groups groups_of(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point,
                 const std::optional<int64_t>& block) {
  Groups groups = groups_over(x, std::nullopt, block);
  const Operand beside(x);
  require_kind(scale, ScalarType::Float, beside);
  const Dims sizes = sizes_of(scale);
  if (zero_point.has_value()) {
    require_kind(*zero_point, ScalarType::Int, beside);
    require(sizes_of(*zero_point) == sizes);
  }
  if (block.has_value()) {
    require(sizes == groups.scale_shape());
  } else if (scale.numel() != 1) {
    require(sizes.size() == groups.shape.size());
    for (int64_t d = 0; d < groups.dims(); ++d) {
      require(sizes[d] == 1 || sizes[d] == groups.shape[d]);
      groups.kept[d] = sizes[d] != 1;
    }
  }
  return groups;
}

// Returns scales or zero points with these strides (Plan::scale), which put them in the order in which kernels number
// the groups. If there is only one scale or zero point, it is returned as it is.
MaybeTensor in_order(const MaybeTensor& side, const Dims& strides) {
  return side.has_value() && side->numel() > 1 ? MaybeTensor(with_strides(*side, strides)) : side;
}

// --------------------------------------------------------------------------------------------------- quantization
// What quantize() returns: codes or dequantized values, the scale, the zero point. If the caller passed a scale, the
// last two are tensors without elements. For symmetric codes, the zero point is a tensor without elements too.
using Quantized = std::tuple<Tensor, Tensor, Tensor>;

Tensor none(ScalarType dtype, const Tensor& beside) { return new_tensor({0}, dtype, beside); }

template <class Device>
Quantized quantize(const Tensor& x, MaybeTensor scale, MaybeTensor zero_point, const std::optional<Dims>& dim,
                   const std::optional<int64_t>& block, bool symmetric, const std::optional<int64_t>& seed, bool fake) {
  const Operand input(x);
  require(input.is_float());
  Groups groups = groups_over(x, dim, block);
  const bool is_static = scale.has_value();
  require(is_static || !zero_point.has_value());
  if (is_static) groups = groups_of(x, *scale, zero_point, block);

  const Plan plan(groups, input, seed.has_value());
  if (!plan.layout.has_value()) {
    // Random bits are numbered in row-major order. In that order the groups of x need more than three axes, so they
    // have no layout (int8_layout.h). Therefore each element becomes a group of its own, with the scale of the group
    // that it was in. If no scale is given, a call without random bits computes the scales first.
    const Tensor dense = as_row_major(x);
    Tensor own_scale = none(ScalarType::Float, x), own_zero_point = none(ScalarType::Int, x);
    if (!is_static) {
      std::tie(std::ignore, own_scale, own_zero_point) =
          quantize<Device>(dense, scale, zero_point, dim, std::nullopt, symmetric, std::nullopt, false);
      scale = own_scale;
      if (!symmetric) zero_point = own_zero_point;
    }
    scale = copied(*scale, groups.shape, plan.walk, ScalarType::Float);
    if (zero_point.has_value()) zero_point = copied(*zero_point, groups.shape, plan.walk, ScalarType::Int);
    const Quantized codes =
        quantize<Device>(dense, scale, zero_point, std::nullopt, std::nullopt, symmetric, seed, false);
    return {with_strides(std::get<0>(codes), plan.out), own_scale, own_zero_point};
  }

  if (is_static) {
    scale = in_order(scale, plan.scale), zero_point = in_order(zero_point, plan.scale);
  } else {
    scale = new_tensor(groups.scale_shape(), plan.scale, ScalarType::Float, x);
    if (!symmetric) zero_point = new_tensor(groups.scale_shape(), plan.scale, ScalarType::Int, x);
  }
  const Tensor out = new_tensor(groups.shape, plan.walk, fake ? x.scalar_type() : ScalarType::Char, x);
  if (x.numel() > 0) {
    const Tensor walked = with_strides(x, plan.walk);
    Device(x).run(Quantize{walked.data_ptr(), out.data_ptr(), data<float>(scale), data<int32_t>(zero_point),
                           *plan.layout, dtype_of(x), fake, is_static, seed.has_value(),
                           static_cast<uint64_t>(seed.value_or(0))});
  } else if (!is_static) {  // a group without elements gets the same scale and zero point as a group of zeros
    torch::stable::fill_(*scale, 1.0);
    if (zero_point.has_value()) torch::stable::zero_(*zero_point);
  }
  const bool has_zero_point = !is_static && zero_point.has_value();
  return {with_strides(out, plan.out), is_static ? none(ScalarType::Float, x) : *scale,
          has_zero_point ? *zero_point : none(ScalarType::Int, x)};
}

template <class Device>
Quantized quantize_int8(Tensor x, MaybeTensor scale, MaybeTensor zero_point, std::optional<Dims> dim,
                        std::optional<int64_t> block_size, bool symmetric, std::optional<int64_t> seed) {
  return quantize<Device>(x, scale, zero_point, dim, block_size, symmetric, seed, false);
}

template <class Device>
Quantized fake_quantize_int8(Tensor x, MaybeTensor scale, MaybeTensor zero_point, std::optional<Dims> dim,
                             std::optional<int64_t> block_size, bool symmetric) {
  return quantize<Device>(x, scale, zero_point, dim, block_size, symmetric, std::nullopt, true);
}

template <class Device>
Tensor dequantize_int8(Tensor values, Tensor scale, MaybeTensor zero_point, std::optional<int64_t> block_size,
                       ScalarType dtype) {
  const Operand codes(values);
  require(codes.dtype == static_cast<int32_t>(ScalarType::Char) && is_float(dtype));
  const Groups groups = groups_of(values, scale, zero_point, block_size);
  const Plan plan(groups, codes);
  if (values.numel() == 0) return new_tensor(groups.shape, plan.out, dtype, values);
  const Tensor out = new_tensor(groups.shape, plan.walk, dtype, values);
  const MaybeTensor side = in_order(scale, plan.scale), zeros = in_order(zero_point, plan.scale);
  const Tensor walked = with_strides(values, plan.walk);
  Device(values).run(Dequantize{data<int8_t>(walked), data<float>(side), data<int32_t>(zeros), out.data_ptr(),
                                *plan.layout, dtype_of(out)});
  return with_strides(out, plan.out);
}

template <class Device>
Tensor straight_through_int8(Tensor grad, Tensor x, Tensor scale, MaybeTensor zero_point,
                             std::optional<int64_t> block_size) {
  const Operand incoming(grad), input(x);
  require(input.is_float() && incoming.is_beside(input) && incoming.has_shape_of(input));
  const Groups groups = groups_of(x, scale, zero_point, block_size);
  const Plan plan(groups, input);
  if (x.numel() == 0) return new_tensor(groups.shape, plan.out, x.scalar_type(), x);
  const Tensor out = new_tensor(groups.shape, plan.walk, x.scalar_type(), x);
  const MaybeTensor side = in_order(scale, plan.scale), zeros = in_order(zero_point, plan.scale);
  const Tensor walked = with_strides(x, plan.walk), walked_grad = with_strides(grad, plan.walk, x.scalar_type());
  Device(x).run(StraightThrough{walked_grad.data_ptr(), walked.data_ptr(), data<float>(side), data<int32_t>(zeros),
                                out.data_ptr(), *plan.layout, dtype_of(x)});
  return with_strides(out, plan.out);
}

// -------------------------------------------------------------------------------------------------------- products
// The scales and zero points of an operand. If `step` is 0, the operand has one scale. If `step` is 1, a left operand
// or a weight has one scale for each row, and a right operand has one for each column. There are as many zero points as
// scales, or none.
struct Side {
  Side(const Tensor& given, const MaybeTensor& given_zero_point, int64_t count, const Operand& codes)
      : scale(given), zero_point(given_zero_point), step(given.numel() == 1 ? 0 : 1) {
    require_kind(scale, ScalarType::Float, codes);
    require(step == 0 || scale.numel() == count);
    scale = as_row_major(scale);
    if (!zero_point.has_value()) return;
    require_kind(*zero_point, ScalarType::Int, codes);
    require(zero_point->numel() == scale.numel());
    zero_point = as_row_major(zero_point);
  }

  Tensor scale;
  MaybeTensor zero_point;
  int64_t step;
};

void require_row(const MaybeTensor& bias, int64_t n, ScalarType dtype, const Operand& beside) {
  if (!bias.has_value()) return;
  require_kind(*bias, dtype, beside);
  require(bias->dim() == 1 && bias->size(0) == n);
}

// Requires that what becomes of the sums fits a result with n columns.
void require_result(int64_t n, const MaybeTensor& bias, const MaybeTensor& out_scale, const MaybeTensor& out_zero_point,
                    const Operand& beside) {
  require_row(bias, n, ScalarType::Float, beside);
  require_scalar(out_scale, beside);
  if (!out_zero_point.has_value()) return;
  require_kind(*out_zero_point, ScalarType::Int, beside);
  require(out_scale.has_value() && out_zero_point->numel() == 1);
}

// Requires one scale, or one for each index of the first of four dimensions.
void require_of_first(const Tensor& scale) {
  require(scale.numel() == 1 || (scale.dim() == 4 && scale.size(0) == scale.numel()));
}

Int8Matmul matmul_of(int64_t m, int64_t n, int64_t k, const Tensor& a, const Tensor& b, const Side& rows,
                     const Side& columns, const MaybeTensor& bias, const Tensor& out, const MaybeTensor& out_scale,
                     const MaybeTensor& out_zero_point) {
  return {m,
          n,
          k,
          data<int8_t>(a),
          {a.stride(0), a.stride(1)},
          data<int8_t>(b),
          {b.stride(0), b.stride(1)},
          data<float>(rows.scale),
          data<int32_t>(rows.zero_point),
          rows.step,
          data<float>(columns.scale),
          data<int32_t>(columns.zero_point),
          columns.step,
          data<char>(bias),
          out.data_ptr(),
          dtype_of(out),
          data<float>(out_scale),
          data<int32_t>(out_zero_point)};
}

// Products for Triton. Triton multiplies with the instruction wgmma. The CUDA kernels of this package use mma.sync, and
// the peak rate of mma.sync is at most 62 % of the peak rate of wgmma. But a call takes the host 17 us with the CUDA
// kernels, and about 100 us with Triton. Time on the device, an H200 (torch 2.11, Triton 3.6), in us:
//
//   M x N x K            CUDA  Triton
//   1024 x 4096 x 4096   61    50         2^34 multiplications. With Triton, the host takes longer than the device
//   4096 x 4096 x 4096   237   148
//   8192 x 8192 x 8192   1716  1025
//
// With few rows or columns the CUDA kernels are faster on the device too: 16 x 4096 x 4096 took an earlier form of them
// 8.1 us, and Triton 9.7 us.
//
// In a convolution, a row is an output pixel, and K counts the channels with their padding. The first layer of a
// ResNet, with 128 images, takes 949 us with the CUDA kernel and 660 us with Triton.
//
// So Triton gets a product or a convolution if M * N * K is above kTritonProducts, M and N are both above kFewRows, and
// `prefers_triton` is true for the GPU (device.h).
constexpr double kTritonProducts = 1LL << 34;
constexpr int64_t kFewRows = 16;

// During the capture of a CUDA graph, Triton gets the same products. Its kernel is already loaded then, since torch
// asks for a warm-up with the same shapes before the capture.
template <class Device>
bool is_for_triton(const Tensor& a, int64_t m, int64_t n, int64_t k) {
  return std::min(m, n) > kFewRows && static_cast<double>(m) * n * k > kTritonProducts && Device::prefers_triton(a);
}

// The kernels of a GPU read the rows of an operand in chunks of 16 bytes (csrc/int8.h). A row extends along the
// dimension of K, which is dimension `along` of the matrix. Returns the given matrix if the kernels can read its rows.
// Otherwise returns a copy, in which zeros fill up each row to a multiple of 16 elements. On an H200, a product with
// M x N x K = 4096 x 4096 x 4095 took 2953 us while its kernel read single elements. With K = 4096, a product that
// reads chunks takes 237 us.
Tensor in_chunks(const Tensor& rows, int along) {
  const int64_t k = rows.size(along), pitch = (k + 15) / 16 * 16, distance = rows.stride(1 - along);
  const bool is_aligned = reinterpret_cast<uintptr_t>(rows.data_ptr()) % 16 == 0 &&
                          distance * static_cast<int64_t>(rows.element_size()) % 16 == 0;
  if (k == pitch && is_aligned && rows.stride(along) == 1) return rows;
  const NoGrad guard;
  Dims sizes = sizes_of(rows), strides{1, 1};
  sizes[along] = strides[1 - along] = pitch;
  Tensor memory = new_tensor(sizes, strides, rows.scalar_type(), rows);
  Tensor copy = torch::stable::narrow(memory, along, 0, k), rest = torch::stable::narrow(memory, along, k, pitch - k);
  torch::stable::copy_(copy, rows);
  if (pitch > k) torch::stable::zero_(rest);
  return copy;
}

// If kDelegates is true, Triton may compute large products. Inside use_backend("cuda"), the operator
// `_compiled_int8_matmul` is called instead, which is registered with kDelegates = false.
template <class Device, bool kDelegates = false>
Tensor int8_matmul(Tensor a, Tensor b, Tensor a_scale, MaybeTensor a_zero_point, Tensor b_scale,
                   MaybeTensor b_zero_point, MaybeTensor bias, ScalarType out_dtype, MaybeTensor out_scale,
                   MaybeTensor out_zero_point) {
  const Operand left(a);
  require_kind(a, ScalarType::Char, left);
  require_kind(b, ScalarType::Char, left);
  require(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.size(1) <= kMaxTerms && is_float(out_dtype));
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  const Side rows(a_scale, a_zero_point, m, left), columns(b_scale, b_zero_point, n, left);
  require(rows.step == 0 || (a_scale.dim() == 2 && a_scale.size(1) == 1));
  require(columns.step == 0 || (b_scale.dim() == 2 && b_scale.size(0) == 1));
  require_result(n, bias, out_scale, out_zero_point, left);
  if constexpr (kDelegates) {
    if (is_for_triton<Device>(a, m, n, k))
      return Device::template call<Tensor>({"amp_kernels::_uncompiled_int8_matmul"}, a, b, a_scale, a_zero_point,
                                           b_scale, b_zero_point, bias, out_dtype, out_scale, out_zero_point);
  }
  const Tensor out = new_tensor({m, n}, out_scale.has_value() ? ScalarType::Char : out_dtype, a);
  if (m == 0 || n == 0) return out;
  bias = as_row_major(bias);
  if constexpr (Device::kReadsChunks) a = in_chunks(a, 1), b = in_chunks(b, 0);
  Device(a).run(matmul_of(m, n, k, a, b, rows, columns, bias, out, out_scale, out_zero_point));
  return out;
}

// The convolution of `x` with `weight`, or an error if the sizes do not fit.
Window window_of(const Tensor& x, const Tensor& weight, const Dims& stride, const Dims& padding, const Dims& dilation) {
  require(stride.size() == 2 && padding.size() == 2 && dilation.size() == 2);
  Window window{};
  window.channels = x.size(3);
  for (int d = 0; d < 2; ++d) {
    require(stride[d] >= 1 && padding[d] >= 0 && dilation[d] >= 1);
    require(std::max({stride[d], padding[d], dilation[d]}) < 1LL << 31);
    window.size[d] = x.size(1 + d), window.taps[d] = weight.size(1 + d);
    window.stride[d] = stride[d], window.padding[d] = padding[d], window.dilation[d] = dilation[d];
    const int64_t last = x.size(1 + d) + 2 * padding[d] - dilation[d] * (weight.size(1 + d) - 1) - 1;
    require(last >= 0);
    window.out[d] = last / stride[d] + 1;
  }
  return window;
}

// Scales or zero points with one element for each output pixel, if there is one for each image.
Tensor of_pixels(const Tensor& side, int64_t step, int64_t pixels) {
  if (step == 0) return side;
  const Tensor column = torch::stable::reshape(side, {side.numel(), 1});
  return copied(column, {side.numel(), pixels}, row_major(Dims{side.numel(), pixels}), side.scalar_type());
}

// If kDelegates is true, Triton may compute large convolutions, as in int8_matmul.
template <class Device, bool kDelegates = false>
Tensor int8_conv2d(Tensor x, Tensor weight, Tensor x_scale, MaybeTensor x_zero_point, Tensor weight_scale,
                   MaybeTensor bias, Dims stride, Dims padding, Dims dilation, ScalarType out_dtype,
                   MaybeTensor out_scale, MaybeTensor out_zero_point) {
  const Operand images(x);
  require_kind(x, ScalarType::Char, images);
  require_kind(weight, ScalarType::Char, images);
  require(x.dim() == 4 && weight.dim() == 4 && x.size(3) == weight.size(3) && is_float(out_dtype));
  const int64_t n = weight.size(0), terms = weight.size(1) * weight.size(2) * weight.size(3);
  require(terms > 0 && terms <= kMaxTerms);
  require(x.size(0) * std::max<int64_t>(x.size(1), 1) * std::max<int64_t>(x.size(2), 1) < 1LL << 32);
  Window window = window_of(x, weight, stride, padding, dilation);
  Side rows(x_scale, x_zero_point, x.size(0), images), columns(weight_scale, std::nullopt, n, images);
  require_of_first(x_scale), require_of_first(weight_scale);
  require_result(n, bias, out_scale, out_zero_point, images);

  const int64_t padded_channels = (window.channels + 15) / 16 * 16;
  const int64_t m = x.size(0) * window.out_pixels();
  if constexpr (kDelegates) {
    if (is_for_triton<Device>(x, m, n, terms / window.channels * padded_channels))
      return Device::template call<Tensor>({"amp_kernels::_uncompiled_int8_conv2d"}, x, weight, x_scale, x_zero_point,
                                           weight_scale, bias, stride, padding, dilation, out_dtype, out_scale,
                                           out_zero_point);
  }
  const Tensor out =
      new_tensor({x.size(0), window.out[0], window.out[1], n}, out_scale.has_value() ? ScalarType::Char : out_dtype, x);
  if (m == 0 || n == 0) return out;
  bias = as_row_major(bias);
  rows.scale = of_pixels(rows.scale, rows.step, window.out_pixels());
  if (rows.zero_point.has_value()) rows.zero_point = of_pixels(*rows.zero_point, rows.step, window.out_pixels());
  // Each pixel is a row of channels. If kernels read chunks, zeros fill up the rows of x and of the weight.
  Tensor pixels = torch::stable::reshape(as_row_major(x), {x.numel() / window.channels, window.channels});
  Tensor taps = torch::stable::reshape(as_row_major(weight), {weight.numel() / window.channels, window.channels});
  if constexpr (Device::kReadsChunks) {
    pixels = in_chunks(pixels, 1), taps = in_chunks(taps, 1);
    window.channels = padded_channels;
  }
  const int64_t k = window.taps[0] * window.taps[1] * window.channels;
  Int8Matmul matmul = matmul_of(m, n, k, pixels, taps, rows, columns, bias, out, out_scale, out_zero_point);
  matmul.a_strides[0] = window.channels, matmul.a_strides[1] = 1;
  matmul.b_strides[0] = 1, matmul.b_strides[1] = k;
  Device device(x);
  if (k == window.channels && window.stride[0] * window.stride[1] == 1 && window.padding[0] + window.padding[1] == 0)
    device.run(matmul);  // each output pixel reads one pixel, the one in its place
  else
    device.run(Int8Conv2d{matmul, window});
  return out;
}

// In int8_linear with kDelegates, if x has at least kDequantizeRows rows, and the product at least kDequantizeProducts
// multiplications, the weight is dequantized once, to the dtype of x, and torch multiplies. For such products, this is
// faster on an H100 (torch 2.11) than the kernel that multiplies by codes. Times in us, for fp16 and a weight of 4096 x
// 4096:
//
//   rows of x                  128   256   512   1024   2048   4096
//   kernel for codes           27    44    78    105    200    408
//   dequantized, then torch    51    38    47    67     112    198      51 us is the time of the host
constexpr int64_t kDequantizeRows = 256;
constexpr double kDequantizeProducts = 1LL << 32;

// Dequantizes the weight, and calls `aten::linear.out`, because autocast does not apply to operators with an argument
// `out`. Under autocast, `aten::linear` might compute in another dtype.
template <class Device>
Tensor multiply_by_torch(const Tensor& x, const Tensor& weight, const Side& outputs, const MaybeTensor& bias,
                         const Tensor& out) {
  const NoGrad guard;
  const Tensor of_rows = torch::stable::reshape(outputs.scale, {outputs.step == 0 ? 1 : weight.size(0), 1});
  const Tensor numbers = dequantize_int8<Device>(weight, of_rows, std::nullopt, std::nullopt, x.scalar_type());
  return Device::template call<Tensor>({"aten::linear", "out"}, x, numbers, bias, out);
}

// On a GPU, the kernels take x in fp16. From sm_80 on they also take x in bf16. For other dtypes of x, torch
// multiplies. If kDelegates is true, torch also multiplies large products with many rows, in all dtypes. Inside
// use_backend("cuda"), the operator `_compiled_int8_linear` is called instead. It is registered with
// kDelegates = false.
template <class Device, bool kDelegates = false>
Tensor int8_linear(Tensor x, Tensor weight, Tensor scale, MaybeTensor bias) {
  const Operand input(x);
  require(input.is_float());
  require_kind(weight, ScalarType::Char, input);
  require(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1));
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  const Side outputs(scale, std::nullopt, n, input);
  require_row(bias, n, x.scalar_type(), input);
  const Tensor out = new_tensor({m, n}, x.scalar_type(), x);
  if (m == 0 || n == 0) return out;
  Device device(x);
  if constexpr (Device::kReadsChunks) {
    const bool has_many_rows = m >= kDequantizeRows && static_cast<double>(m) * n * k >= kDequantizeProducts;
    if ((kDelegates && has_many_rows) || !device.multiplies_codes_by(input.code()))
      return multiply_by_torch<Device>(x, weight, outputs, bias, out);
    x = in_chunks(x, 1), weight = in_chunks(weight, 1);
  } else {
    x = x.stride(1) == 1 || k == 1 ? x : as_row_major(x);
    weight = as_row_major(weight);
  }
  bias = as_row_major(bias);
  device.run(Int8Linear{m, n, k, x.data_ptr(), x.stride(0), data<int8_t>(weight), weight.stride(0),
                        data<float>(outputs.scale), outputs.step, data<char>(bias), out.data_ptr(), dtype_of(x)});
  return out;
}

template <class Device, class Library>
void register_kernels(Library& m) {
  AMP_KERNELS_IMPL(m, Device, "quantize_int8", quantize_int8<Device>);
  AMP_KERNELS_IMPL(m, Device, "fake_quantize_int8", fake_quantize_int8<Device>);
  AMP_KERNELS_IMPL(m, Device, "dequantize_int8", dequantize_int8<Device>);
  AMP_KERNELS_IMPL(m, Device, "straight_through_int8", straight_through_int8<Device>);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  register_kernels<Cpu>(m);
  AMP_KERNELS_IMPL(m, Cpu, "int8_matmul", int8_matmul<Cpu>);
  AMP_KERNELS_IMPL(m, Cpu, "int8_linear", int8_linear<Cpu>);
  AMP_KERNELS_IMPL(m, Cpu, "int8_conv2d", int8_conv2d<Cpu>);
}
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) {
  register_kernels<Cuda>(m);
  AMP_KERNELS_IMPL(m, Cuda, "int8_matmul", int8_matmul<Cuda, true>);
  AMP_KERNELS_IMPL(m, Cuda, "int8_linear", int8_linear<Cuda, true>);
  AMP_KERNELS_IMPL(m, Cuda, "int8_conv2d", int8_conv2d<Cuda, true>);
  m.impl("_compiled_int8_matmul", TORCH_BOX((&int8_matmul<Cuda>)));
  m.impl("_compiled_int8_linear", TORCH_BOX((&int8_linear<Cuda>)));
  m.impl("_compiled_int8_conv2d", TORCH_BOX((&int8_conv2d<Cuda>)));
}
#endif

}  // namespace amp_kernels
