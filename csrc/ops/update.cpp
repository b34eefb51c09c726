// The updates of all families: `update_` of lists, and `_update_table_` of the step plan (schemas:
// amp_kernels/ops/update.py).
#include "device.h"
#include "lists.h"

namespace amp_kernels {
namespace {

using MaybeTensors = std::optional<Tensors>;
constexpr int kMaxStates = 3;

// Gradients, states and masters as kernels take them, in a table whose columns are the parameters.
class Operands {
 public:
  Operands(const Tensors& params, const Tensors& grads, const MaybeTensors (&states)[kMaxStates],
           const MaybeTensors& masters)
      : params_(params), table_(kState + kMaxStates, static_cast<int64_t>(params.size())) {
    check(grads, states, masters);
    auto master = masters.has_value() ? masters->begin() : Tensors::const_iterator();
    for (size_t t = 0; t < params.size(); ++t) {
      const auto column = static_cast<int64_t>(t);
      const Tensor param = written_(params[t]);
      const Tensor grad = read_(grads[t], param);
      table_.put(column, grad);
      table_.at(kParam, column) = Picture::address_of(param);
      if (!is_fp32(param)) table_.at(kMaster, column) = Picture::address_of(written_(*master++, param));
      for (int k = 0; k < kMaxStates; ++k)
        if (states[k].has_value())
          table_.at(kState + k, column) = Picture::address_of(written_((*states[k])[t], param));
      dtypes_.emplace_back(dtype_of(param), dtype_of(grad));
    }
  }

  HostTable& table() { return table_; }
  void copy_back() { written_.copy_back(); }

  // Calls f(dtypes, columns) for each combination of dtypes.
  template <class F>
  void each_combination(const F& f) const {
    std::vector<std::pair<Dtype, Dtype>> combinations = dtypes_;
    std::sort(combinations.begin(), combinations.end());
    combinations.erase(std::unique(combinations.begin(), combinations.end()), combinations.end());
    for (const auto& combination : combinations) {
      std::vector<int64_t> columns;
      for (size_t t = 0; t < dtypes_.size(); ++t)
        if (dtypes_[t] == combination) columns.push_back(static_cast<int64_t>(t));
      f(combination, columns);
    }
  }

 private:
  // Before anything is written.
  void check(const Tensors& grads, const MaybeTensors (&states)[kMaxStates], const MaybeTensors& masters) const {
    Tensors low, written;
    require(grads.size() == params_.size());
    for (size_t t = 0; t < params_.size(); ++t) {
      require_floats(params_[t], params_[0]);
      require_floats(grads[t], params_[0]);
      require(has_shape_of(grads[t], params_[t]));
      if (!is_fp32(params_[t])) low.push_back(params_[t]);
    }
    written.insert(written.end(), params_.begin(), params_.end());
    check_states(masters.has_value() ? *masters : Tensors(), low, written);
    for (const MaybeTensors& state : states)
      if (state.has_value()) check_states(*state, params_, written);
    require_apart(written);
  }

  void check_states(const Tensors& states, const Tensors& params, Tensors& written) const {
    require(states.size() == params.size());
    for (size_t t = 0; t < params.size(); ++t) {
      require_floats(states[t], params_[0]);
      require(is_fp32(states[t]) && has_shape_of(states[t], params[t]));
    }
    written.insert(written.end(), states.begin(), states.end());
  }

  const Tensors& params_;
  HostTable table_;
  Dense read_, written_;
  std::vector<std::pair<Dtype, Dtype>> dtypes_;
};

// One launch for each combination of dtypes.
template <class Device>
void update(std::string family, Tensors params, Tensors grads, MaybeTensors first, MaybeTensors second,
            MaybeTensors third, MaybeTensors masters, std::vector<double> hyper, double lr,
            std::optional<Tensor> tensor_lr, int64_t steps_taken, std::optional<Tensor> grad_scale,
            std::optional<Tensor> found_inf) {
  if (params.empty()) return;
  for (const auto* scalar : {&tensor_lr, &grad_scale, &found_inf}) require_scalar(*scalar, params[0]);
  require(hyper.size() <= kHyperColumns);
  Operands operands(params, grads, {first, second, third}, masters);
  HostTable& table = operands.table();

  Device device(params[0]);
  Words words;
  words.add(table.rows());
  std::vector<float> numbers(kHyperColumns + 1);
  std::copy(hyper.begin(), hyper.end(), numbers.begin());
  numbers[kHyperColumns] = static_cast<float>(lr);
  const int64_t hyper_at = words.add(numbers);
  int64_t* const at = device.send(words.get());
  auto* const hyper_there = reinterpret_cast<float*>(at + hyper_at);
  const float* const rate = tensor_lr.has_value() ? data<float>(tensor_lr) : hyper_there + kHyperColumns;

  operands.each_combination([&](const std::pair<Dtype, Dtype>& dtypes, const std::vector<int64_t>& columns) {
    std::vector<int64_t> chunks;
    for (const int64_t column : columns) table.cut(column, chunks);
    Words more;
    more.add(std::vector<int64_t>{reinterpret_cast<int64_t>(rate)});
    const int64_t chunks_at = more.add(chunks);
    const auto count = static_cast<int64_t>(chunks.size());
    const int64_t steps_at = more.add(std::vector<int64_t>((count + 1) / 2, steps_taken | steps_taken << 32));
    int64_t* const there = device.send(more.get());
    device.run(family, {{at, table.tensors(), reinterpret_cast<int32_t*>(there + chunks_at), count, table.chunk_size()},
                        reinterpret_cast<int32_t*>(there + steps_at),
                        hyper_there,
                        there,
                        data<float>(grad_scale),
                        data<float>(found_inf),
                        /*grad_norm=*/nullptr,
                        /*max_norm=*/0.0f,
                        dtypes.first,
                        dtypes.second});
  });
  operands.copy_back();
}

template <class Device>
void update_table(std::string family, Tensor table, Tensor chunks, int64_t chunk_size, Tensor steps, Tensor hyper,
                  Tensor lr, int64_t param_dtype, int64_t grad_dtype, std::optional<Tensor> grad_scale,
                  std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm, double max_norm) {
  Device(table).run(family, make_update(table, chunks, chunk_size, steps, hyper, lr, param_dtype, grad_dtype,
                                        grad_scale, found_inf, grad_norm, max_norm));
}

template <class Device, class Library>
void register_kernels(Library& m) {
  m.impl("update_", TORCH_BOX(&update<Device>));
  m.impl("_update_table_", TORCH_BOX(&update_table<Device>));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { register_kernels<Cpu>(m); }
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { register_kernels<Cuda>(m); }
#endif

}  // namespace amp_kernels
