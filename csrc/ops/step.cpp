#include "step.h"

#include <memory>
#include <numeric>
#include <string>

#include "columns.h"
#include "launcher.h"

namespace amp_kernels {
namespace {

constexpr const char* kName = "amp_kernels.step";

// What a plan keeps for the steps with the same sizes, dtypes and groups (`Layout` in amp_kernels/optim/_plan.py).
struct Layout {
  const int64_t* key;
  int64_t* block;  // where kernels read the words. On a CPU they are those of the host
  const int32_t* entries;
  double* partials;
  int64_t chunk_size, chunks = 0;
  std::vector<std::pair<Form, int64_t>> buckets;  // how many chunks each Form has, in the order of the chunks

  // If the tuple does not fit, sets a Python error and returns false.
  bool read(PyObject* tuple) {
    unsigned long long addresses[4];
    long long size;
    PyObject* own;
    if (!PyArg_ParseTuple(tuple, "KKKKLO!", &addresses[0], &addresses[1], &addresses[2], &addresses[3], &size,
                          &PyList_Type, &own)) {
      return false;
    }
    key = pointer_to(addresses[0]), block = pointer_to(addresses[1]);
    entries = reinterpret_cast<const int32_t*>(addresses[2]), partials = reinterpret_cast<double*>(addresses[3]);
    chunk_size = size;
    for (Py_ssize_t i = 0; i < PyList_Size(own); ++i) {
      int param_dtype, split, grad_dtype, states, state_dtype;
      long long count;
      if (!PyArg_ParseTuple(PyList_GetItem(own, i), "(ipiii)L", &param_dtype, &split, &grad_dtype, &states,
                            &state_dtype, &count)) {
        return false;
      }
      const Form form{static_cast<Dtype>(param_dtype), split != 0, static_cast<Dtype>(grad_dtype), states,
                      static_cast<Dtype>(state_dtype)};
      buckets.emplace_back(form, count);
      chunks += count;
    }
    return true;
  }
};

class Step {
 public:
  // If the arguments do not fit, sets a Python error and returns false.
  bool read(PyObject* arguments) {
    PyObject *torch, *groups, *storages, *layouts, *kept;
    unsigned long long stream, words, checked, spans, record, found_inf, norm;
    const char* family;
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!O!O!O!O!O!OO(ii)KiiKKKKKKsO!O", &PyTuple_Type, &torch, &PyList_Type,
                          &params_, &PyList_Type, &states_, &PyList_Type, &groups, &PyTuple_Type, &storages,
                          &PyList_Type, &plan_params_, &PyList_Type, &plan_keys_, &PyList_Type, &plan_values_,
                          &PyList_Type, &options_, &modes_, &increment_, &device_.first, &device_.second, &stream,
                          &rows_, &squares_, &words, &checked, &spans, &record, &found_inf, &norm, &family,
                          &PyList_Type, &layouts, &kept)) {
      return false;
    }
    if (!torch_.read(torch)) return false;
    count_ = PyList_Size(params_);
    for (Py_ssize_t t = 0; t < count_; ++t) groups_.push_back(PyLong_AsLong(PyList_GetItem(groups, t)));
    storages_.resize(PyTuple_Size(storages));
    for (size_t g = 0; g < storages_.size(); ++g)
      if (!storages_[g].read(PyTuple_GetItem(storages, static_cast<Py_ssize_t>(g)))) return false;
    layouts_.resize(PyList_Size(layouts));
    for (size_t i = 0; i < layouts_.size(); ++i) {
      if (!layouts_[i].read(PyList_GetItem(layouts, static_cast<Py_ssize_t>(i)))) return false;
      const int64_t* const numels = layouts_[i].key + (1 + kNumel) * count_;
      releases_ |= is_long(std::accumulate(numels, numels + count_, int64_t{0}));
    }
    stream_ = stream, words_ = pointer_to(words), checked_ = pointer_to(checked), spans_ = pointer_to(spans);
    record_ = reinterpret_cast<Record*>(record), found_inf_ = reinterpret_cast<float*>(found_inf);
    norm_ = reinterpret_cast<float*>(norm), family_ = family;
    return PyErr_Occurred() == nullptr;
  }

  // Returns an Answer; -1 if a Python error is set.
  int take(PyObject* optimizer, PyObject* grad_scale, PyObject* found_inf, PyObject* max_norm, long work) {
    if (is_busy_) {  // this call would write the table that the kernels of the other thread read
      PyErr_SetString(PyExc_RuntimeError,
                      "step: two threads must not step an optimizer at the same time; use a lock around the step");
      return -1;
    }
    Busy busy(this);
    const Object modes(PyObject_CallFunctionObjArgs(modes_, nullptr));
    if (modes.get() == nullptr) return -1;
    if (PyLong_AsLong(modes.get()) != 0 || !is_on_stream()) return kForPython;
    const float *scale, *flag;
    if (!is_scalar(torch_, grad_scale, device_, &scale) || !is_scalar(torch_, found_inf, device_, &flag))
      return kForPython;
    if ((work & kRead) != 0) {
      forget();
      const int answer = read_optimizer(optimizer);
      if (answer != kTaken) return answer;
      const int read = read_tensors(work);
      if (read != kTaken) return read;
    }
    if (layout_ == nullptr || ((work & kWrite) != 0 && !can_write_gradients())) return kForPython;
    const double clip = max_norm == Py_None ? 0.0 : PyFloat_AsDouble(max_norm);
    if (PyErr_Occurred() != nullptr) return -1;
    {
      const WithoutGil guard(releases_);
      launch(scale, flag, max_norm == Py_None ? nullptr : norm_, static_cast<float>(clip), work);
    }
    if ((work & kWrite) != 0 && !raise_versions_of_gradients()) return -1;
    if ((work & kUpdate) != 0 && !raise_versions_of_parameters()) return -1;
    if ((work & kKeep) != 0) busy.keep();
    return kTaken;
  }

 private:
  // Marks a call. At its end, what was read is forgotten, unless it is kept for the next call.
  class Busy {
   public:
    explicit Busy(Step* step) : step_(step) { step->is_busy_ = true; }
    ~Busy() {
      if (!keeps_) step_->forget();
      step_->is_busy_ = false;
    }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;
    void keep() { keeps_ = true; }

   private:
    Step* step_;
    bool keeps_ = false;
  };

  void forget() {
    layout_ = nullptr;
    gradients_.clear();
    held_.clear();
  }

  // Whether the current stream is the one on which this memory was used before. On another one, torch's allocator has
  // to be told first (NativePlan._keep_for_stream).
  bool is_on_stream() const {
#ifdef USE_CUDA
    if (device_.first == kGpu) {
      void* stream = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_.second, &stream));
      return reinterpret_cast<uint64_t>(stream) == stream_;
    }
#endif
    return true;
  }

  // Compares the objects of the optimizer with those of the plan, and writes the learning rates.
  int read_optimizer(PyObject* optimizer) {
    const Names& names = Names::get();
    const Object attributes(PyObject_GenericGetDict(optimizer, nullptr));
    if (attributes.get() == nullptr) return -1;
    PyObject* const groups = PyDict_GetItemWithError(attributes.get(), names.param_groups);
    PyObject* const state = PyDict_GetItemWithError(attributes.get(), names.state);
    if (groups == nullptr || !PyList_Check(groups) || state == nullptr || !PyDict_Check(state)) return kForPython;
    if (PyList_Size(groups) != PyList_Size(plan_params_) || !is_same_state(state, plan_keys_, plan_values_))
      return kForPython;
    const size_t first = held_.size();
    for (Py_ssize_t g = 0; g < PyList_Size(groups); ++g) {
      PyObject* const group = PyList_GetItem(groups, g);
      if (!PyDict_Check(group)) return kForPython;
      PyObject* const params = PyDict_GetItemWithError(group, names.params);
      if (params == nullptr || !is_same(params, PyList_GetItem(plan_params_, g))) return kForPython;
      PyObject* const options = PyList_GetItem(options_, g);
      for (Py_ssize_t i = 0; i < PyTuple_Size(options); i += 2) {
        if (PyDict_GetItemWithError(group, PyTuple_GetItem(options, i)) != PyTuple_GetItem(options, i + 1))
          return kChanged;
      }
      PyObject* const lr = PyDict_GetItemWithError(group, names.lr);
      if (lr == nullptr) return kForPython;
      held_.add(lr);
    }
    for (int64_t g = 0; g < groups_count(); ++g)
      if (!write_rate(g, held_[first + g])) return kForPython;
    return kTaken;
  }

  // Writes the learning rate of a group, and its address if kernels read it from a tensor. A rate that is a number lies
  // in the block, among the hyper-parameters. Its address is written when it is known which block kernels read.
  bool write_rate(int64_t g, PyObject* lr) {
    rates()[g] = 0;
    const float* address;
    if (is_number(torch_, lr, device_, &address)) {
      rates()[g] = reinterpret_cast<int64_t>(address);
      return true;
    }
    const Object number(PyNumber_Float(lr));
    if (number.get() != nullptr)
      hyper()[(g + 1) * kHyperColumns - 1] = static_cast<float>(PyFloat_AsDouble(number.get()));
    clear_error();  // Python raises it again, in words
    return number.get() != nullptr;
  }

  // Reads the tensors into the table, checks their memory, and finds the layout.
  int read_tensors(long work) {
    Columns columns(torch_, &held_, table(), words_, checked_, count_, device_);
    for (Py_ssize_t t = 0; t < count_; ++t) {
      PyObject *const param = PyList_GetItem(params_, t), *const state = PyList_GetItem(states_, t);
      if (!columns.take(t, param, state, groups_[t], storages_[groups_[t]])) return -1;
    }
    gradients_ = std::move(columns.gradients);
    if (columns.unread != 0 || gradients_.empty()) return kForPython;
    if (overlap(table(), words_, count_, rows_, checked_, spans_) != -1) return kForPython;
    for (const Layout& layout : layouts_) {
      if (std::memcmp(layout.key, words_, key_words() * sizeof(int64_t)) != 0) continue;
      layout_ = &layout;
      const int64_t hyper_there = reinterpret_cast<int64_t>(layout.block + (hyper_words() - words_));
      for (int64_t g = 0; g < groups_count(); ++g) {
        if (rates()[g] == 0) rates()[g] = hyper_there + ((g + 1) * kHyperColumns - 1) * int64_t{sizeof(float)};
      }
      is_sent_ = false;
      return kTaken;
    }
    return kForPython;
  }

  void launch(const float* scale, const float* flag, const float* norm, float max_norm, long work) {
    const int64_t* const table = layout_->block + count_;
    const auto table_of = [&](int64_t begin, int64_t chunks) {
      return Table{table, count_, layout_->entries + 2 * begin, chunks, layout_->chunk_size, squares_};
    };
    const Launcher device(gpu_of(device_));
    if (!is_sent_) device.send(words_ + key_words(), layout_->block + key_words(), words_count() - key_words());
    is_sent_ = true;
    if ((work & kPass) != 0) {
      device.run(GradientPass{table_of(0, layout_->chunks), scale, /*divide=*/true, (work & kWrite) != 0,
                              (work & kClear) != 0, layout_->partials, found_inf_, norm_, record_});
    }
    if ((work & kUpdate) == 0) return;
    const auto* const hyper_there = reinterpret_cast<const float*>(layout_->block + (hyper_words() - words_));
    const int64_t* const rates_there = layout_->block + (rates() - words_);
    int64_t begin = 0;
    for (const auto& [form, chunks] : layout_->buckets) {
      device.run(family_, Update{table_of(begin, chunks), reinterpret_cast<int32_t*>(&record_->ticket), hyper_there,
                                 rates_there, scale, flag, norm, max_norm, form});
      begin += chunks;
    }
  }

  bool can_write_gradients() const {
    if (!Memory(table(), words_, count_, rows_).has_separate_gradients()) return false;
    for (PyObject* grad : gradients_) {
      const Object memory(torch_.local(grad));
      if (memory.get() == nullptr || Torch::is(torch_.is_inference, memory.get())) return false;
    }
    return true;
  }

  // Tells autograd that the parameters with a gradient were written. Returns false if a Python error is set.
  bool raise_versions_of_parameters() const {
    if (static_cast<Py_ssize_t>(gradients_.size()) == count_) return raise_versions_of(params_);
    const Object written(PyList_New(0));
    for (Py_ssize_t t = 0; written.get() != nullptr && t < count_; ++t) {
      const bool has_gradient = table()[kGrad * count_ + t] != 0;
      if (has_gradient && PyList_Append(written.get(), PyList_GetItem(params_, t)) != 0) return false;
    }
    return raise_versions_of(written.get());
  }

  bool raise_versions_of_gradients() const {
    const Object written(PyList_New(0));
    for (PyObject* grad : gradients_) {
      const Object memory(torch_.local(grad));
      if (written.get() == nullptr || memory.get() == nullptr || PyList_Append(written.get(), memory.get()) != 0)
        return false;
    }
    return raise_versions_of(written.get());
  }

  bool raise_versions_of(PyObject* tensors) const {
    return tensors != nullptr && Object(PyObject_CallFunctionObjArgs(increment_, tensors, nullptr)).get() != nullptr;
  }

  // The words of a step, as amp_kernels/optim/_plan.py lays them out: forms | table | weights | rates | numbers.
  int64_t* table() const { return words_ + count_; }
  int64_t* rates() const { return table() + (rows_ + (squares_ != 0 ? 1 : 0)) * count_; }
  int64_t* hyper_words() const { return rates() + groups_count(); }
  float* hyper() const { return reinterpret_cast<float*>(hyper_words()); }
  int64_t groups_count() const { return static_cast<int64_t>(storages_.size()); }
  int64_t key_words() const { return (1 + kGrad) * count_; }  // the forms, and the rows before the addresses
  int64_t words_count() const {
    return hyper_words() - words_ + groups_count() * kHyperColumns * int64_t{sizeof(float)} / int64_t{sizeof(int64_t)};
  }

  // Python's garbage collector cannot look into a capsule. So the capsule borrows these objects, and the object that
  // holds it holds them, too (NativePlan.warm).
  Torch torch_;
  PyObject *params_, *states_, *plan_params_, *plan_keys_, *plan_values_, *options_, *modes_, *increment_;
  Place device_;
  std::vector<long> groups_;
  std::vector<Storages> storages_;
  std::vector<Layout> layouts_;
  Py_ssize_t count_ = 0;
  int rows_ = 0;
  int squares_ = 0;  // the row behind these that holds the weights of squares; 0 if there is none
  uint64_t stream_ = 0;
  int64_t *words_ = nullptr, *checked_ = nullptr, *spans_ = nullptr;
  Record* record_ = nullptr;
  float *found_inf_ = nullptr, *norm_ = nullptr;
  std::string family_;
  bool releases_ = false;  // whether the kernels run without the GIL
  bool is_busy_ = false;   // whether a call runs
  // What the last call has read:
  const Layout* layout_ = nullptr;  // null if nothing is kept
  bool is_sent_ = false;            // whether the block on the device is up to date
  std::vector<PyObject*> gradients_;
  Held held_;
};

Step* step_of(PyObject* capsule) { return static_cast<Step*>(PyCapsule_GetPointer(capsule, kName)); }

}  // namespace

PyObject* make_step(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    auto made = std::make_unique<Step>();
    if (!made->read(arguments)) return nullptr;
    PyObject* const capsule = PyCapsule_New(made.get(), kName, [](PyObject* of) { delete step_of(of); });
    if (capsule != nullptr) made.release();
    return capsule;
  });
}

PyObject* step(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 6) return PyErr_SetString(PyExc_TypeError, "step: expects 6 arguments"), nullptr;
  Step* const of = step_of(arguments[0]);
  const long work = PyLong_AsLong(arguments[5]);
  if (of == nullptr || PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    const int answer = of->take(arguments[1], arguments[2], arguments[3], arguments[4], work);
    return answer < 0 || PyErr_Occurred() != nullptr ? nullptr : PyLong_FromLong(answer);
  });
}

}  // namespace amp_kernels
