// The operators of updates, for all families (../formulas/families.h). `update_` takes lists. `_update_table_` and
// `_load_update` are called by the step plan of an optimizer (amp_kernels/optim/_plan.py). The schemas of all three are
// in amp_kernels/ops/update.py.
#include <limits>
#include <map>
#include <tuple>

#include "device.h"
#include "lists.h"
#include "step.h"

namespace amp_kernels {
namespace {

using MaybeTensors = std::optional<Tensors>;
constexpr int kMaxStates = 3;

auto as_tuple(const Form& form) { return std::tie(form.param_dtype, form.split, form.grad_dtype, form.states); }

// The table of an update, with a column for each parameter, and the Form of each column (../table.h). `masters` has an
// entry for each 16-bit parameter, and `grad_remainders` one for each 16-bit gradient.
class UpdateTable {
 public:
  UpdateTable(const Tensors& params, const Tensors& grads, const MaybeTensors (&states)[kMaxStates],
              const MaybeTensors& masters, const MaybeTensors& grad_remainders)
      : first_(params[0]),
        params_(operands_of(params, first_)),
        grads_(operands_of(grads, first_)),
        table_(kState + kMaxStates, static_cast<int64_t>(params.size())) {
    for (int k = 0; k < kMaxStates; ++k)
      if (states[k].has_value()) states_[k] = operands_of(*states[k], first_);
    if (masters.has_value()) masters_ = operands_of(*masters, first_, /*or_remainders=*/true);
    if (grad_remainders.has_value()) {
      grad_remainders_ = operands_of(*grad_remainders, first_, /*or_remainders=*/true);
      check_remainders();
    }
    check(states);
    int32_t kept = 0;
    for (int k = 0; k < kMaxStates; ++k) kept |= !states_[k].empty() << k;
    for (size_t t = 0, low = 0, low_grads = 0; t < params_.size(); ++t) {
      const auto column = static_cast<int64_t>(t);
      const Operand param = written_(params_[t]);
      const Operand grad = read_(grads_[t], param);
      table_.put(column, grad);
      table_.at(kParam, column) = param.address;
      bool split = false;
      if (!param.is_fp32()) {
        const Operand master = written_(masters_[low++], param);
        table_.at(kMaster, column) = master.address;
        split = !master.is_fp32();
      }
      if (!grad_remainders_.empty() && !grad.is_fp32()) {
        table_.at(kMaster, column) = read_(grad_remainders_[low_grads++], param).address;
        split = true;
      }
      for (int k = 0; k < kMaxStates; ++k)
        if (!states_[k].empty()) table_.at(kState + k, column) = written_(states_[k][t], param).address;
      forms_.push_back({param.code(), split, grad.code(), kept, kFloat});
    }
  }

  HostTable& table() { return table_; }
  void copy_back() { written_.copy_back(); }

  // Calls f(form, columns) for each Form, with the columns that have it.
  template <class F>
  void each_form(const F& f) const {
    const auto before = [](const Form& a, const Form& b) { return as_tuple(a) < as_tuple(b); };
    std::map<Form, std::vector<int64_t>, decltype(before)> columns(before);
    for (size_t t = 0; t < forms_.size(); ++t) columns[forms_[t]].push_back(static_cast<int64_t>(t));
    for (const auto& [form, own] : columns) f(form, own);
  }

 private:
  // Checks the operands, before anything is written.
  void check(const MaybeTensors (&states)[kMaxStates]) const {
    std::vector<const Operand*> low, all, written;
    for (const Operand& param : params_) {
      all.push_back(&param);
      if (!param.is_fp32()) low.push_back(&param);
    }
    written = all;
    require(grads_.size() == params_.size());
    for (size_t t = 0; t < params_.size(); ++t) require(grads_[t].has_shape_of(params_[t]));
    check_fit(masters_, low, written);
    for (int k = 0; k < kMaxStates; ++k)
      if (states[k].has_value()) check_fit(states_[k], all, written);
    require_apart(written);
  }

  // Only `ema_` passes remainders of gradients (../table.h). Its parameters are averages, which are fp32 and have no
  // states. Its "gradients" are the weights that the averages follow.
  void check_remainders() const {
    require(grads_.size() == params_.size());
    for (const Operands& state : states_) require(state.empty());
    size_t low = 0;
    for (size_t t = 0; t < params_.size(); ++t) {
      require(params_[t].is_fp32());
      if (grads_[t].is_fp32()) continue;
      require(low < grad_remainders_.size());
      const Operand& remainder = grad_remainders_[low++];
      require(remainder.has_shape_of(params_[t]) && remainder.is_int16());
    }
    require(low == grad_remainders_.size());
  }

  static void check_fit(const Operands& operands, const std::vector<const Operand*>& params,
                        std::vector<const Operand*>& written) {
    require(operands.size() == params.size());
    for (size_t t = 0; t < params.size(); ++t) {
      require(operands[t].has_shape_of(*params[t]));
      require(operands[t].is_fp32() || operands[t].is_int16());
      written.push_back(&operands[t]);
    }
  }

  Operand first_;
  Operands params_, grads_, masters_, grad_remainders_, states_[kMaxStates];
  HostTable table_;
  // The copies of operands that kernels cannot walk in memory. copy_back() copies those in `written_` to the operands.
  Dense read_, written_;
  std::vector<Form> forms_;
};

// Sends words to the device, and then launches a kernel for each Form. The words are, in this order:
//
//   table | hyper-parameters, lr | address of lr | ticket | counts of updates | entries of the chunks of each Form
//
// ../table.h explains the table, the ticket, chunks and Forms.
template <class Device>
void update(std::string family, Tensors params, Tensors grads, MaybeTensors first, MaybeTensors second,
            MaybeTensors third, MaybeTensors masters, std::vector<double> hyper, double lr,
            std::optional<Tensor> tensor_lr, int64_t steps_taken, std::optional<Tensor> grad_scale,
            std::optional<Tensor> found_inf, MaybeTensors grad_remainders) {
  if (params.empty()) return;
  const Operand beside(params[0]);
  for (const auto* scalar : {&tensor_lr, &grad_scale, &found_inf}) require_scalar(*scalar, beside);
  require(hyper.size() <= kHyperColumns && steps_taken >= 0 && steps_taken < std::numeric_limits<int32_t>::max());
  UpdateTable operands(params, grads, {first, second, third}, masters, grad_remainders);
  HostTable& table = operands.table();

  Device device(params[0]);
  Words words;
  words.add(table.rows());
  std::vector<float> numbers(kHyperColumns + 1);
  std::copy(hyper.begin(), hyper.end(), numbers.begin());
  numbers[kHyperColumns] = static_cast<float>(lr);
  const int64_t hyper_at = words.add(numbers), rate_at = words.add(std::vector<int64_t>(2)), ticket_at = rate_at + 1;
  const int64_t steps_at = words.add(std::vector<int64_t>((table.tensors() + 1) / 2, steps_taken | steps_taken << 32));
  struct Launch {
    Form form;
    Chunks chunks;
    int64_t at;
  };
  std::vector<Launch> launches;
  operands.each_form([&](const Form& form, const std::vector<int64_t>& columns) {
    Chunks chunks = table.cut(columns, device.load_update(family, form));
    const int64_t chunks_at = words.add(chunks.words);
    launches.push_back({form, std::move(chunks), chunks_at});
  });
  int64_t* const at = device.send(words.get(), 0, [&](int64_t* there) {
    const auto* const steps = reinterpret_cast<int32_t*>(there + steps_at);
    for (int64_t t = 0; t < table.tensors(); ++t)
      words.get()[kStep * table.tensors() + t] = reinterpret_cast<int64_t>(steps + t);
    const float* const own = reinterpret_cast<float*>(there + hyper_at) + kHyperColumns;
    words.get()[rate_at] = reinterpret_cast<int64_t>(tensor_lr.has_value() ? data<float>(tensor_lr) : own);
  });
  for (const auto& [form, chunks, chunks_at] : launches)
    device.run(family, {{at, table.tensors(), reinterpret_cast<int32_t*>(at + chunks_at), chunks.count(), chunks.size},
                        reinterpret_cast<int32_t*>(at + ticket_at),
                        reinterpret_cast<float*>(at + hyper_at),
                        at + rate_at,
                        data<float>(grad_scale),
                        data<float>(found_inf),
                        /*grad_norm=*/nullptr,
                        /*max_norm=*/0.0f,
                        form});
  operands.copy_back();
}

template <class Device>
void update_table(std::string family, Tensor table, Tensor chunks, int64_t chunk_size, Tensor record, Tensor hyper,
                  Tensor lr, int64_t param_dtype, bool split, int64_t grad_dtype, int64_t states, int64_t state_dtype,
                  std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm,
                  double max_norm) {
  const Form form = make_form(param_dtype, split, grad_dtype, states, state_dtype);
  Device(table).run(family, make_update(table, chunks, chunk_size, record, hyper, lr, form, grad_scale, found_inf,
                                        grad_norm, max_norm));
}

template <class Device>
int64_t load_update(Tensor beside, std::string family, int64_t param_dtype, bool split, int64_t grad_dtype,
                    int64_t states, int64_t state_dtype) {
  return Device(beside).load_update(family, make_form(param_dtype, split, grad_dtype, states, state_dtype));
}

template <class Device, class Library>
void register_kernels(Library& m) {
  AMP_KERNELS_IMPL(m, Device, "update_", update<Device>);
  m.impl("_update_table_", TORCH_BOX(&update_table<Device>));
  m.impl("_load_update", TORCH_BOX(&load_update<Device>));
}

}  // namespace

void run_on_cpu(std::string_view family, const Update& update) {
  Families::with(family, [&](auto formula) { cpu::run_update<typename decltype(formula)::type>(update); });
}

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { register_kernels<Cpu>(m); }
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { register_kernels<Cuda>(m); }
#endif

}  // namespace amp_kernels
