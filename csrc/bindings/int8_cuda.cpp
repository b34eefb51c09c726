// The int8 ops on CUDA tensors: device guard, current stream, launch.
#include "cuda_device.h"
#include "int8_arguments.h"

namespace amp_kernels::cuda {
namespace {

void quantize(Tensor x, Tensor out, Tensor scale, std::optional<Tensor> zero_point, std::vector<int64_t> layout,
              bool is_static, bool stochastic, int64_t seed) {
  const Guard guard(x.get_device_index());
  const Quantize arguments = make_quantize(x, out, scale, zero_point, layout, is_static, stochastic, seed);
  const Tensor workspace = workspace_beside(x, quantize_workspace(arguments));
  launch_quantize(arguments, workspace.data_ptr(), current_stream(x));
}

void dequantize(Tensor values, Tensor scale, std::optional<Tensor> zero_point, Tensor out,
                std::vector<int64_t> layout) {
  const Guard guard(values.get_device_index());
  launch_dequantize(make_dequantize(values, scale, zero_point, out, layout), current_stream(values));
}

void straight_through(Tensor grad, Tensor x, Tensor scale, std::optional<Tensor> zero_point, Tensor out,
                      std::vector<int64_t> layout) {
  const Guard guard(x.get_device_index());
  launch_straight_through(make_straight_through(grad, x, scale, zero_point, out, layout), current_stream(x));
}

void matmul(Tensor a, Tensor b, Tensor a_scale, std::optional<Tensor> a_zero_point, Tensor b_scale,
            std::optional<Tensor> b_zero_point, std::optional<Tensor> bias, Tensor out, std::optional<Tensor> out_scale,
            std::optional<Tensor> out_zero_point) {
  const Guard guard(a.get_device_index());
  launch_int8_matmul(
      make_matmul(a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out, out_scale, out_zero_point),
      current_stream(a));
}

void linear(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias, Tensor out) {
  const Guard guard(x.get_device_index());
  launch_int8_linear(make_linear(x, weight, scale, bias, out), current_stream(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) {
  m.impl("_quantize_int8_", TORCH_BOX(&quantize));
  m.impl("_dequantize_int8_", TORCH_BOX(&dequantize));
  m.impl("_straight_through_int8_", TORCH_BOX(&straight_through));
  m.impl("_int8_matmul_", TORCH_BOX(&matmul));
  m.impl("_int8_linear_", TORCH_BOX(&linear));
}

}  // namespace amp_kernels::cuda
