#include "lists.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "call.h"
#include "columns.h"
#include "launcher.h"
#include "words.h"
#ifdef USE_CUDA
#include "on_gpu.h"
#endif

namespace amp_kernels {
namespace {

constexpr int kMaxStates = 3;

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// Whether this binary has kernels for a device.
bool is_served(const Place& place) {
#ifdef USE_CUDA
  if (place.first == kGpu) return cuda::has_kernels_for(place.second);
#endif
  return place.first == kCpu;
}

// Reads the arguments of the functions of amp_kernels._C. An absent argument is None.
struct FromPython {
  using Object = PyObject*;
  static constexpr bool kHoldsGil = true;

  Torch torch;
  PyObject* state = nullptr;  // the `state` of an optimizer, a dict. It has the remainders of weights
  mutable Held held;          // these remainders, which another thread may replace while the kernels run

  // Returns null if there is none.
  PyObject* remainder_of(PyObject* weight) const {
    PyObject* const entry = state == nullptr ? nullptr : PyDict_GetItemWithError(state, weight);
    if (entry == nullptr || !PyDict_Check(entry)) return nullptr;
    PyObject* const remainder = PyDict_GetItemWithError(entry, Names::get().remainder);
    if (remainder != nullptr) held.add(remainder);
    return remainder;
  }

  bool describe(PyObject* tensor, Model* model) const {
    return model->describe(torch, tensor) && !torch.is_negated(tensor);
  }

  // Copies nothing: if kernels cannot walk a tensor as it is, the call fails, and the operator copies the tensor.
  static bool copy(PyObject*, const int64_t*, bool, Model*) { return false; }
  static void copy_back() {}

  static bool is_given(PyObject* argument) { return argument != Py_None; }

  static std::vector<PyObject*> list(PyObject* given) {
    std::vector<PyObject*> objects(PyList_Check(given) ? PyList_Size(given) : 0);
    for (size_t i = 0; i < objects.size(); ++i) objects[i] = PyList_GetItem(given, static_cast<Py_ssize_t>(i));
    return objects;
  }
};

// Reads the arguments of operators. An absent argument is null. The dispatcher has resolved negated tensors. If kernels
// cannot walk a tensor as it is, copy() copies it.
struct FromOperator {
  using Object = const Tensor*;
  static constexpr bool kHoldsGil = false;

  mutable std::vector<std::pair<Tensor, Tensor>> copies;  // a tensor, and its copy
  mutable std::vector<size_t> written;                    // numbers of the copies that kernels write

  static const Tensor* remainder_of(const Tensor*) { return nullptr; }

  // Copies a tensor, and describes the copy. `strides` are those of the copy, or null for a row-major one.
  bool copy(const Tensor* tensor, const int64_t* strides, bool is_written, Model* model) const {
    const std::vector<int64_t> sizes = sizes_of(*tensor);
    Tensor made = strides == nullptr
                      ? new_tensor(sizes, tensor->scalar_type(), *tensor)
                      : new_tensor(sizes, {strides, strides + sizes.size()}, tensor->scalar_type(), *tensor);
    const NoGrad guard;
    torch::stable::copy_(made, *tensor);
    if (is_written) written.push_back(copies.size());
    copies.emplace_back(*tensor, made);
    return amp_kernels::describe(made, model);
  }

  void copy_back() const {
    const NoGrad guard;
    for (const size_t i : written) torch::stable::copy_(copies[i].first, copies[i].second);
  }

  static bool describe(const Tensor* tensor, Model* model) { return amp_kernels::describe(*tensor, model); }

  static bool is_given(const Tensor* argument) { return argument != nullptr; }

  static const Tensor* pointer(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

  static std::vector<const Tensor*> list(const Tensors& tensors) {
    std::vector<const Tensor*> pointers;
    for (const Tensor& tensor : tensors) pointers.push_back(&tensor);
    return pointers;
  }
};

// Takes the address of a tensor with one fp32 number. If the tensor is absent, the address is null. Returns false if
// the tensor has another dtype or size, or is on another device.
template <class From>
bool take_scalar(const From& from, typename From::Object tensor, const Place& place, float** address) {
  *address = nullptr;
  if (!From::is_given(tensor)) return true;
  Model model;
  if (!from.describe(tensor, &model) || !is_number(model, place)) return false;
  *address = reinterpret_cast<float*>(model.address());
  return true;
}

// Returns how many elements after the first element of a tensor the last one lies. Returns nothing if elements of the
// tensor may share memory: if a stride is not larger than what the smaller strides reach.
std::optional<int64_t> reach_of(const Model& model) {
  if (model.is_dense()) return model.numel - 1;
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (int32_t d = 0; d < model.tensor.dims; ++d)
    if (model.tensor.shape[d] > 1) steps.emplace_back(model.tensor.strides[d], model.tensor.shape[d]);
  std::sort(steps.begin(), steps.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : steps) {
    if (stride <= reach) return {};
    reach += stride * (size - 1);
  }
  return reach;
}

// Describes a tensor that kernels can walk: the given one or, in an operator, a copy of it. With `like`, the tensor
// must have the shape and gets the order of elements of `like`. Returns false if the tensor does not fit, or is not on
// this device. If the call writes the tensor, its memory is added to `spans`, if these are given.
template <class From>
bool read(const From& from, typename From::Object tensor, bool is_written, const Place& place, Model* model,
          const Model* like = nullptr, Spans* spans = nullptr) {
  if (!from.describe(tensor, model) || place_of(model->tensor) != place) return false;
  if (!has_memory(model->tensor, model->numel) || (like != nullptr && !like->has_shape_of(model->tensor))) return false;
  const bool is_walkable = like == nullptr ? model->is_dense() : like->fits(model->tensor);
  if (is_written && model->numel > 0 && (spans != nullptr || !is_walkable)) {
    const auto reach = reach_of(*model);
    if (!reach) return false;
    const int64_t begin = model->address();
    if (spans != nullptr) spans->emplace_back(begin, begin + (*reach + 1) * model->tensor.bits / 8);
  }
  return is_walkable || from.copy(tensor, like == nullptr ? nullptr : like->tensor.strides, is_written, model);
}

// The words are the table, the entries of the chunks and the record. Behind them there is memory for the partial sums
// and for a norm that nobody asked for.
template <class From>
bool run_pass(const From& from, const std::vector<typename From::Object>& grads, typename From::Object scale,
              typename From::Object found_inf, typename From::Object norm, bool writes) {
  Model flag;
  float *factor, *found, *result;
  if (!from.describe(found_inf, &flag)) return false;
  const Place place = place_of(flag.tensor);
  if (!is_served(place) || !take_scalar(from, found_inf, place, &found) || !take_scalar(from, scale, place, &factor) ||
      !take_scalar(from, norm, place, &result)) {
    return false;
  }
  const auto count = static_cast<int64_t>(grads.size());
  Words words(place, kGrad + 1, count);
  for (int64_t t = 0; t < count; ++t) {
    Model grad;
    if (!read(from, grads[t], writes, place, &grad) || !grad.tensor.is_float()) return false;
    words.at(kNumel, t) = grad.numel, words.at(kGradDtype, t) = code_of(grad.tensor);
    words.at(kGrad, t) = grad.address();
  }
  const WithoutGil guard(From::kHoldsGil && is_long(words.elements()));
  const Launcher launcher(gpu_of(place));
  const Words::Chunks chunks = words.cut(words.columns(), launcher.load_pass());
  const int64_t record_at = words.add(sizeof(Record) / sizeof(int64_t)), partials_at = words.add(0);
  int64_t* const there = words.allocate(chunks.count + 1);
  words.send(launcher);
  auto* const partials = reinterpret_cast<double*>(there + partials_at);
  launcher.run(GradientPass{words.table(chunks), factor, /*divide=*/false, writes, /*clear=*/false, partials, found,
                            result == nullptr ? reinterpret_cast<float*>(partials + chunks.count) : result,
                            reinterpret_cast<Record*>(there + record_at)});
  from.copy_back();
  return true;
}

// The lists of an update.
template <class From>
struct Lists {
  using Object = typename From::Object;

  std::vector<Object> params, grads, states[kMaxStates], masters;
  bool has_state[kMaxStates];
  // In `ema_` params are averages, and grads are the weights that they follow. The list holds the remainders of 16-bit
  // weights. If it ends, From::remainder_of() finds the others.
  bool is_average;
  std::vector<Object> remainders;

  // Writes the table, and the Form of each column. Returns false if a tensor does not fit.
  bool fill(const From& from, const Place& place, Words* words, std::vector<Form>* forms) const {
    if (grads.size() != params.size()) return false;
    int32_t kept = 0;
    for (int k = 0; k < kMaxStates; ++k) {
      kept |= has_state[k] << k;
      if (has_state[k] && (states[k].size() != params.size() || is_average)) return false;
    }
    Spans written;
    written.reserve(2 * params.size());
    forms->reserve(params.size());
    size_t low = 0, low_grads = 0;  // how many masters and remainders have been taken
    for (size_t t = 0; t < params.size(); ++t) {
      Model param, grad, other;
      if (!read(from, params[t], true, place, &param, nullptr, &written) || !param.tensor.is_float()) return false;
      // Writes the address of another array of the column. Returns false if the array does not fit the parameter.
      const auto take = [&](int row, Object array, bool is_written, Model* model) {
        if (!read(from, array, is_written, place, model, &param, &written)) return false;
        words->at(row, t) = model->address();
        return true;
      };
      if (!take(kGrad, grads[t], false, &grad) || !grad.tensor.is_float()) return false;
      words->at(kNumel, t) = param.numel, words->at(kParam, t) = param.address();
      words->at(kGradDtype, t) = code_of(grad.tensor);
      Form form{static_cast<Dtype>(code_of(param.tensor)), false, static_cast<Dtype>(code_of(grad.tensor)), kept,
                kFloat};
      if (form.param_dtype != kFloat) {
        if (is_average || low == masters.size() || !take(kMaster, masters[low++], true, &other)) return false;
        form.split = other.tensor.is(Description::kInt, 16);
        if (!form.split && !other.tensor.is(Description::kFloat, 32)) return false;
      } else if (is_average && form.grad_dtype != kFloat) {
        form.split = true;
        const Object remainder = low_grads < remainders.size() ? remainders[low_grads++] : from.remainder_of(grads[t]);
        if (remainder == nullptr || !take(kMaster, remainder, false, &other)) return false;
        if (!other.tensor.is(Description::kInt, 16)) return false;
      }
      for (int k = 0; k < kMaxStates; ++k) {
        if (!has_state[k]) continue;
        if (!take(kState + k, states[k][t], true, &other) || !other.tensor.is(Description::kFloat, 32)) return false;
      }
      forms->push_back(form);
    }
    return low == masters.size() && low_grads == remainders.size() && are_apart(&written);
  }
};

auto as_tuple(const Form& form) { return std::tie(form.param_dtype, form.split, form.grad_dtype, form.states); }

// The words are the table, the hyper-parameters and the learning rate, the address of the rate, a ticket, the counts of
// steps, and the entries of the chunks of each Form.
template <class From>
bool run_update(const From& from, std::string_view family, const Lists<From>& lists, const std::vector<double>& hyper,
                double lr, typename From::Object tensor_lr, int64_t steps_taken, typename From::Object grad_scale,
                typename From::Object found_inf) {
  Model first;
  float *rate, *scale, *flag;
  if (!from.describe(lists.params[0], &first)) return false;
  const Place place = place_of(first.tensor);
  if (!is_served(place) || !take_scalar(from, tensor_lr, place, &rate) ||
      !take_scalar(from, grad_scale, place, &scale) || !take_scalar(from, found_inf, place, &flag)) {
    return false;
  }
  if (hyper.size() > kHyperColumns || steps_taken < 0 || steps_taken >= std::numeric_limits<int32_t>::max())
    return false;
  const auto count = static_cast<int64_t>(lists.params.size());
  Words words(place, kState + kMaxStates, count);
  std::vector<Form> forms;
  if (!lists.fill(from, place, &words, &forms)) return false;
  std::vector<float> numbers(kHyperColumns + 2);
  std::transform(hyper.begin(), hyper.end(), numbers.begin(), [](double x) { return static_cast<float>(x); });
  numbers[kHyperColumns] = static_cast<float>(lr);

  const auto before = [](const Form& a, const Form& b) { return as_tuple(a) < as_tuple(b); };
  std::map<Form, std::vector<int64_t>, decltype(before)> columns(before);
  std::vector<int64_t>* own_columns = nullptr;  // of the last form, since a list mostly has one form
  for (int64_t t = 0; t < count; ++t) {
    if (t == 0 || as_tuple(forms[t]) != as_tuple(forms[t - 1])) own_columns = &columns[forms[t]];
    own_columns->push_back(t);
  }
  const WithoutGil guard(From::kHoldsGil && is_long(words.elements()));
  const Launcher launcher(gpu_of(place));
  const int64_t numbers_at = words.add(numbers.size() * sizeof(float) / sizeof(int64_t));
  const int64_t rate_at = words.add(2), ticket_at = rate_at + 1, steps_at = words.add((count + 1) / 2);
  std::vector<Words::Chunks> chunks;
  for (const auto& [form, own] : columns) chunks.push_back(words.cut(own, launcher.load_update(family, form)));
  int64_t* const there = words.allocate(0);
  std::memcpy(words.data() + numbers_at, numbers.data(), numbers.size() * sizeof(float));
  const auto* const numbers_there = reinterpret_cast<float*>(there + numbers_at);
  words.data()[rate_at] = reinterpret_cast<int64_t>(rate == nullptr ? numbers_there + kHyperColumns : rate);
  std::fill_n(words.data() + steps_at, (count + 1) / 2, steps_taken | steps_taken << 32);
  for (int64_t t = 0; t < count; ++t)
    words.at(kStep, t) = reinterpret_cast<int64_t>(reinterpret_cast<int32_t*>(there + steps_at) + t);
  words.send(launcher);
  size_t i = 0;
  for (const auto& [form, own] : columns) {
    launcher.run(family, Update{words.table(chunks[i++]), reinterpret_cast<int32_t*>(there + ticket_at), numbers_there,
                                there + rate_at, scale, flag, /*grad_norm=*/nullptr, /*max_norm=*/0.0f, form});
  }
  from.copy_back();
  return true;
}

PyObject* answer(bool is_done) { return PyErr_Occurred() != nullptr ? nullptr : PyBool_FromLong(is_done); }

// ------------------------------------------------------------------------------------------------------- operators
// Passes what these do not serve on to the operator `_uncompiled_<name>`, which is in Python
// (amp_kernels/ops/library.py). C++ does not get the error that Python raises. `call` of library.py raises it again.
template <class Result, class... Arguments>
Result call_python(const OperatorName& name, const Arguments&... arguments) {
  try {
    return call<Result>(name, arguments...);
  } catch (const std::exception& error) {
    throw std::invalid_argument(std::string("amp_kernels: an argument does not fit, or memory is full; call the "
                                            "function of amp_kernels to see which: ") +
                                error.what());
  }
}

void unscale_operator(Tensors grads, Tensor inv_scale, Tensor found_inf) {
  const auto is_done = run_pass(FromOperator(), FromOperator::list(grads), &inv_scale, &found_inf, nullptr, true);
  if (!is_done) call_python<void>({"amp_kernels::_uncompiled_unscale_"}, grads, inv_scale, found_inf);
}

Tensor grad_norm_operator(Tensors grads, std::optional<Tensor> inv_scale, Tensor found_inf) {
  const Tensor norm = torch::stable::new_empty(found_inf, {}, torch::headeronly::ScalarType::Float);
  const auto* const scale = FromOperator::pointer(inv_scale);
  if (run_pass(FromOperator(), FromOperator::list(grads), scale, &found_inf, &norm, false)) return norm;
  return call_python<Tensor>({"amp_kernels::_uncompiled_grad_norm"}, grads, inv_scale, found_inf);
}

void update_operator(std::string family, Tensors params, Tensors grads, std::optional<Tensors> first,
                     std::optional<Tensors> second, std::optional<Tensors> third, std::optional<Tensors> masters,
                     std::vector<double> hyper, double lr, std::optional<Tensor> tensor_lr, int64_t steps_taken,
                     std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                     std::optional<Tensors> grad_remainders) {
  const auto list = [](const std::optional<Tensors>& tensors) {
    return tensors ? FromOperator::list(*tensors) : std::vector<const Tensor*>();
  };
  const Lists<FromOperator> lists{FromOperator::list(params),
                                  FromOperator::list(grads),
                                  {list(first), list(second), list(third)},
                                  list(masters),
                                  {first.has_value(), second.has_value(), third.has_value()},
                                  grad_remainders.has_value(),
                                  list(grad_remainders)};
  if (params.empty() || !run_update(FromOperator(), family, lists, hyper, lr, FromOperator::pointer(tensor_lr),
                                    steps_taken, FromOperator::pointer(grad_scale), FromOperator::pointer(found_inf))) {
    call_python<void>({"amp_kernels::_uncompiled_update_"}, family, params, grads, first, second, third, masters, hyper,
                      lr, tensor_lr, steps_taken, grad_scale, found_inf, grad_remainders);
  }
}

template <class Library>
void register_kernels(Library& m) {
  m.impl("unscale_", TORCH_BOX(&unscale_operator));
  m.impl("grad_norm", TORCH_BOX(&grad_norm_operator));
  m.impl("update_", TORCH_BOX(&update_operator));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { register_kernels(m); }
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { register_kernels(m); }
#endif

PyObject* gradient_pass(PyObject*, PyObject* arguments) {
  PyObject *tuple, *grads, *scale, *found_inf, *norm;
  int writes;
  if (!PyArg_ParseTuple(arguments, "OO!OOOp", &tuple, &PyList_Type, &grads, &scale, &found_inf, &norm, &writes))
    return nullptr;
  FromPython from;
  if (!from.torch.read(tuple)) return nullptr;
  return guarded([&] { return answer(run_pass(from, from.list(grads), scale, found_inf, norm, writes != 0)); });
}

PyObject* update(PyObject*, PyObject* arguments) {
  PyObject *tuple, *params, *grads, *states[kMaxStates], *masters, *numbers, *tensor_lr, *grad_scale, *found_inf;
  PyObject* remainders;
  const char* family;
  double lr;
  PyObject* steps_taken;
  if (!PyArg_ParseTuple(arguments, "OsO!O!OOOOO!dOOOOO", &tuple, &family, &PyList_Type, &params, &PyList_Type, &grads,
                        &states[0], &states[1], &states[2], &masters, &PyList_Type, &numbers, &lr, &tensor_lr,
                        &steps_taken, &grad_scale, &found_inf, &remainders)) {
    return nullptr;
  }
  FromPython from;
  if (!from.torch.read(tuple)) return nullptr;
  std::vector<double> hyper(PyList_Size(numbers));
  for (size_t i = 0; i < hyper.size(); ++i)
    hyper[i] = PyFloat_AsDouble(PyList_GetItem(numbers, static_cast<Py_ssize_t>(i)));
  if (PyErr_Occurred() != nullptr) return nullptr;
  int overflow = 0;
  const long long steps = PyLong_Check(steps_taken) ? PyLong_AsLongLongAndOverflow(steps_taken, &overflow) : -1;
  if (steps < 0) return answer(false);
  const Lists<FromPython> lists{from.list(params),
                                from.list(grads),
                                {from.list(states[0]), from.list(states[1]), from.list(states[2])},
                                from.list(masters),
                                {from.is_given(states[0]), from.is_given(states[1]), from.is_given(states[2])},
                                from.is_given(remainders),
                                from.list(remainders)};
  if (PyDict_Check(remainders)) from.state = remainders;
  return guarded(
      [&] { return answer(run_update(from, family, lists, hyper, lr, tensor_lr, steps, grad_scale, found_inf)); });
}

}  // namespace amp_kernels
