// Reads tensors from Python objects, and those of an optimizer step into the columns of the table (../table.h).
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "../table.h"
#include "operand.h"
#include "python.h"

namespace amp_kernels {

// An owned reference to the result of a Python call. If the call failed, it is null, and a Python error is set.
class Object {
 public:
  explicit Object(PyObject* object) : object_(object) {}
  ~Object() { Py_XDECREF(object_); }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// The table (../table.h) has a column for each parameter. The form of a column is a number that encodes the dtypes of
// the parameter and of its gradient, and which states the parameter has (Columns::form_of). These two take the place of
// a form:
constexpr int64_t kAbsent = -1;  // the parameter has neither a gradient nor a count of steps
constexpr int64_t kUnread = -2;  // the plan has to fill the column in Python (_plan.py)

// Clears the Python error that is set, except one that must reach the user, such as KeyboardInterrupt.
inline void clear_error() {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) != 0) PyErr_Clear();
}

// Returns f(). An exception must not cross Python's C API, so it becomes a Python error.
template <class F>
PyObject* guarded(const F& f) {
  try {
    return f();
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

inline PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

struct Names {
  PyObject* grad = name("grad");
  PyObject* step = name("step");
  PyObject* remainder = name("remainder");
  PyObject* master = name("master");
  PyObject* params = name("params");
  PyObject* param_groups = name("param_groups");
  PyObject* state = name("state");
  PyObject* lr = name("lr");
  PyObject* mesh = name("mesh");
  PyObject* placements = name("placements");

  static const Names& get() {
    static const Names names;
    return names;
  }
};

// Functions and types of torch, borrowed from the tuple that Python passes. `local_tensor` and `spec` are names of
// attributes of a DTensor (amp_kernels/torch_private.py).
struct Torch {
  const ExchangeApi* api = nullptr;
  PyObject *tensor, *parameter, *dtensor, *local_tensor, *spec;
  // Methods of tensors without arguments. A direct call of the C function takes 45 ns, a call by Python's C API 60 ns.
  PyCFunction is_neg, is_inference;

  // If the tuple does not fit, or the DLPack interface is not version 1, sets a Python error and returns false.
  bool read(PyObject* tuple) {
    PyObject *capsule, *methods[2];
    if (!PyArg_ParseTuple(tuple, "OOOOOOOO", &capsule, &tensor, &parameter, &methods[0], &methods[1], &dtensor,
                          &local_tensor, &spec)) {
      return false;
    }
    api = exchange_api(capsule);
    return api != nullptr && function_of(methods[0], &is_neg) && function_of(methods[1], &is_inference);
  }

  // Takes the C function of a method that is bound to a tensor.
  static bool function_of(PyObject* method, PyCFunction* function) {
    const bool is_c = PyObject_TypeCheck(method, &PyCFunction_Type) && PyCFunction_GetFlags(method) == METH_NOARGS;
    if (is_c) *function = PyCFunction_GetFunction(method);
    if (!is_c) PyErr_SetString(PyExc_NotImplementedError, "amp_kernels._C: a method of tensors is not written in C");
    return is_c;
  }

  bool is_dtensor(PyObject* object) const { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == dtensor; }

  // A new reference to the local tensor of a DTensor, or to any other object itself. Null if the DTensor has none.
  PyObject* local(PyObject* object) const {
    if (is_dtensor(object)) {
      PyObject* const memory = PyObject_GetAttr(object, local_tensor);
      if (memory == nullptr) clear_error();
      return memory;
    }
    Py_INCREF(object);
    return object;
  }

  // Whether an object is a tensor or parameter, and of no other class, because a subclass of Tensor may have no memory
  // of its own. The object may be null.
  bool is_plain(PyObject* object) const {
    PyObject* const type = object == nullptr ? nullptr : reinterpret_cast<PyObject*>(Py_TYPE(object));
    return object != nullptr && (type == tensor || type == parameter);
  }

  // Describes a plain tensor. Returns false for any other object. A lazy clone shares the memory of a tensor until one
  // of the two is written. DLPack first gives a lazy clone memory of its own (_loader.py tests that it does).
  bool describe(PyObject* object, Description* description) const {
    if (is_plain(object) && api->describe(object, description) == 0) return true;
    clear_error();  // a sparse tensor
    return false;
  }

  // Whether both are DTensors with the same mesh and placements, or neither is a DTensor. Gradients have specs of their
  // own, usually with the mesh of the parameter. It may be an equal one, because torch caches specs by their values.
  bool are_placed_alike(PyObject* grad, PyObject* param) const {
    if (!is_dtensor(grad) || !is_dtensor(param)) return is_dtensor(grad) == is_dtensor(param);
    const Names& names = Names::get();
    const Object a(PyObject_GetAttr(grad, spec)), b(PyObject_GetAttr(param, spec));
    const bool is_alike = a.get() != nullptr && b.get() != nullptr &&
                          (a.get() == b.get() || (have_equal(names.mesh, a.get(), b.get()) &&
                                                  have_equal(names.placements, a.get(), b.get())));
    clear_error();
    return is_alike;
  }

  static bool have_equal(PyObject* attribute, PyObject* a, PyObject* b) {
    const Object of_a(PyObject_GetAttr(a, attribute)), of_b(PyObject_GetAttr(b, attribute));
    return of_a.get() != nullptr && of_b.get() != nullptr &&
           PyObject_RichCompareBool(of_a.get(), of_b.get(), Py_EQ) == 1;
  }

  bool is_negated(PyObject* object) const { return is(is_neg, object); }

  // Calls a method that tells whether a tensor is of a special kind.
  static bool is(PyCFunction method, PyObject* object) {
    const Object answer(method(object, nullptr));
    if (answer.get() == nullptr) clear_error();
    return answer.get() != Py_False;
  }
};

// The Dtype of a float tensor.
inline int64_t code_of(const Description& tensor) {
  return tensor.bits == 32 ? kFloat : tensor.type == Description::kFloat ? kHalf : kBFloat16;
}

// A device, as DLPack numbers it: its type, and its index.
using Place = std::pair<int32_t, int32_t>;
constexpr int32_t kCpu = 1, kGpu = 2;  // types of devices; the latter is CUDA's

inline Place place_of(const Description& tensor) { return {tensor.device_type, tensor.device_index}; }

// The number for Launcher (launcher.h).
inline int32_t gpu_of(const Place& place) { return place.first == kGpu ? place.second : -1; }

// Whether a tensor of `numel` elements has memory. `torch._efficientzerotensor` has none.
inline bool has_memory(const Description& tensor, int64_t numel) { return tensor.data != nullptr || numel == 0; }

// The description of a tensor, with which the other arrays of its column may be compared. They must be on the same
// device, and have the same shape and the same order of elements (fits()).
struct Model {
  Description tensor;
  int64_t numel = 1;
  bool is_contiguous = true;

  Model() = default;
  explicit Model(const Description& of) : tensor(of) { measure(); }

  // Describes a plain tensor. Returns false for any other object. The description is written in place, since a copy
  // would wait until all of it is in the cache.
  bool describe(const Torch& torch, PyObject* object) {
    if (!torch.describe(object, &tensor)) return false;
    measure();
    return true;
  }

  void measure() {
    numel = 1, is_contiguous = true;
    for (int32_t d = tensor.dims - 1; d >= 0; --d) {
      is_contiguous &= tensor.shape[d] == 1 || tensor.strides[d] == numel;
      numel *= tensor.shape[d];
    }
    is_contiguous |= numel == 0;
  }

  int64_t address() const { return reinterpret_cast<int64_t>(tensor.address()); }

  bool is_dense() const { return is_contiguous || fill_a_range(tensor.dims, tensor.shape, tensor.strides, numel); }

  bool is_on_device_of(const Description& other) const { return place_of(tensor) == place_of(other); }

  bool has_shape_of(const Description& other) const {
    return other.dims == tensor.dims && std::equal(tensor.shape, tensor.shape + tensor.dims, other.shape);
  }

  // Whether `other` is on the device of this tensor, and has the same shape and the same order of elements.
  bool fits(const Description& other) const {
    if (!is_on_device_of(other) || !has_shape_of(other)) return false;
    if (std::equal(tensor.strides, tensor.strides + tensor.dims, other.strides)) return true;
    return is_contiguous && Model(other).is_contiguous;
  }
};

// Whether a tensor is one fp32 number on a device.
inline bool is_number(const Model& model, const Place& place) {
  return model.tensor.is(Description::kFloat, 32) && model.numel == 1 && has_memory(model.tensor, 1) &&
         place_of(model.tensor) == place;
}

// Takes the address of one fp32 number on a device. Returns false if the object is anything else.
inline bool is_number(const Torch& torch, PyObject* tensor, const Place& place, const float** address) {
  Model model;
  if (!model.describe(torch, tensor) || !is_number(model, place) || torch.is_negated(tensor)) return false;
  *address = reinterpret_cast<const float*>(model.address());
  return true;
}

// Does the same. For None the address is null.
inline bool is_scalar(const Torch& torch, PyObject* object, const Place& place, const float** address) {
  *address = nullptr;
  return object == Py_None || is_number(torch, object, place, address);
}

// How a parameter stores its states: `Storage` in amp_kernels/optim/_state.py.
struct Storage {
  int dtype = 0, coded = 0, with_sign = 0;
  PyObject *keys = nullptr, *absent = nullptr;

  // If the tuple does not fit, sets a Python error and returns false.
  bool read(PyObject* tuple) {
    return tuple != nullptr &&
           PyArg_ParseTuple(tuple, "iiiO!O!", &dtype, &coded, &with_sign, &PyTuple_Type, &keys, &PyTuple_Type, &absent);
  }

  bool has_bits(int k, Dtype of) const { return dtype == of && (coded >> k & 1) != 0; }
};

// `small` says how parameters with fewer than kLeastLean elements store their states, and `large` how other parameters
// of the group do.
struct Storages {
  Storage small, large;

  bool read(PyObject* pair) {
    return pair != nullptr && small.read(PyTuple_GetItem(pair, 0)) && large.read(PyTuple_GetItem(pair, 1));
  }
};

// References to gradients, states and learning rates. Other threads may replace them while a step reads the others,
// because some methods of tensors give up the GIL, and while kernels run.
class Held {
 public:
  Held() = default;
  ~Held() { clear(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  void add(PyObject* object) {
    objects_.push_back(object);
    Py_INCREF(object);
  }

  // Adds the values of a dict.
  void add_values(PyObject* dict) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value) != 0) add(value);
  }

  size_t size() const { return objects_.size(); }
  PyObject* operator[](size_t i) const { return objects_[i]; }

  void clear() {
    for (size_t i = 0; i < objects_.size(); ++i) Py_DECREF(objects_[i]);
    objects_.clear();
  }

 private:
  std::vector<PyObject*> objects_;
};

// Writes the columns of the table (../table.h), one for each parameter.
class Columns {
 public:
  Columns(const Torch& torch, Held* held, int64_t* table, int64_t* forms, const int64_t* checked, Py_ssize_t count,
          Place device)
      : torch_(torch), held_(*held), table_(table), forms_(forms), checked_(checked), count_(count), device_(device) {}

  // Writes column t. Returns false if a Python error is set.
  bool take(Py_ssize_t t, PyObject* param, PyObject* state, int64_t group, const Storages& storages) {
    const Object grad(PyObject_GetAttr(param, Names::get().grad));
    if (grad.get() == nullptr) return false;
    if (grad.get() != Py_None) gradients.push_back(grad.get());
    first_held_ = held_.size();
    held_.add(grad.get());
    if (state != Py_None) held_.add_values(state);
    PyObject* const keys = storages.small.keys;
    for (int row = 0; row < kState + PyTuple_Size(keys); ++row) at(row, t) = 0;
    PyObject* const step = state == Py_None ? nullptr : PyDict_GetItemWithError(state, Names::get().step);
    if (step == nullptr && grad.get() == Py_None) {
      forms_[t] = kAbsent;
    } else {
      forms_[t] = step == nullptr ? kUnread : form_of(t, param, grad.get(), state, step, storages);
      if (forms_[t] >= 0 && has_moved(t, PyTuple_Size(keys)) && has_negated(param)) forms_[t] = kUnread;
      unread += forms_[t] == kUnread;
    }
    at(kGroup, t) = forms_[t] < 0 ? 0 : group;
    return PyErr_Occurred() == nullptr;
  }

  int64_t unread = 0;                // how many columns are left to Python
  std::vector<PyObject*> gradients;  // borrowed from `held`

 private:
  int64_t& at(int row, Py_ssize_t t) const { return table_[row * count_ + t]; }

  // The address of a tensor's memory; 0 if it has none.
  int64_t address(const Description& tensor) const { return reinterpret_cast<int64_t>(tensor.address()); }

  // Fills the column, except kGroup, and returns its form: code | grad_code << 2 | states << 4 | dtype << 7 | coded
  // << 9. `code` is the Dtype of the parameter. `grad_code` is the Dtype of the gradient, or `code` if there is no
  // gradient. `states` is the result of take_states(). `dtype` and `coded` are the numbers in the Storage. If the
  // column has to be filled in Python, returns kUnread.
  int64_t form_of(Py_ssize_t t, PyObject* param, PyObject* grad, PyObject* state, PyObject* step,
                  const Storages& storages) {
    const Object memory(torch_.local(param));
    if (memory.get() == nullptr) return kUnread;
    Model model;
    const Description& description = model.tensor;
    if (!model.describe(torch_, memory.get()) || !description.is_float()) return kUnread;
    if (place_of(description) != device_ || !model.is_dense() || !has_memory(description, model.numel)) return kUnread;
    at(kNumel, t) = model.numel;
    at(kParam, t) = address(description);
    if (!take_step(t, model, step)) return kUnread;
    const Storage& storage = model.numel < kLeastLean ? storages.small : storages.large;
    Py_ssize_t others = PyDict_Size(state) - 1;
    const int64_t states = take_states(t, model, state, storage, &others);
    if (states < 0) return kUnread;
    const int64_t code = code_of(description);
    if (code != kFloat) {
      PyObject* const remainder = PyDict_GetItemWithError(state, Names::get().remainder);
      if (remainder == nullptr || !take_array(kMaster, t, model, remainder, Description::kInt, 16)) return kUnread;
      --others;
    }
    if (others > 0 && !(has_no_master(state, code) && has_none(state, storage.absent))) return kUnread;
    int64_t grad_code = code;
    if (grad != Py_None && !(torch_.are_placed_alike(grad, param) && take_gradient(t, model, grad, &grad_code)))
      return kUnread;
    if (storage.coded != 0 && grad_code != code && grad_code != kFloat) return kUnread;  // the plan converts it
    at(kGradDtype, t) = grad_code;
    return code | grad_code << 2 | states << 4 | int64_t{storage.dtype} << 7 | int64_t{storage.coded} << 9;
  }

  // Whether an array that a step writes has moved: its address differs from the one in checked_. When apart() finds no
  // overlap, it copies the table, and so all addresses, to checked_.
  bool has_moved(Py_ssize_t t, Py_ssize_t states) const {
    for (int row = kParam; row < kState + states; ++row)
      if (at(row, t) != checked_[row * count_ + t]) return true;
    return false;
  }

  // Whether the parameter or a state is a negated view, whose memory holds the negative of its values. If every tensor
  // were tested at every step, the tests would take a sixth of the time of the sweep. So only columns with a new or
  // moved tensor are tested. A tensor that becomes negated at its old address is not noticed. This hardly happens: of
  // torch's public functions only `z.conj().imag` returns a negated tensor. If z has more than one element, this tensor
  // is not dense, and the form of its column is kUnread anyway.
  bool has_negated(PyObject* param) const {
    if (is_negated(param)) return true;
    for (size_t i = first_held_ + 1; i < held_.size(); ++i) {
      PyObject* const value = held_[i];
      const bool is_tensor = reinterpret_cast<PyObject*>(Py_TYPE(value)) == torch_.tensor;
      if ((is_tensor || torch_.is_dtensor(value)) && is_negated(value)) return true;
    }
    return false;
  }

  bool is_negated(PyObject* object) const {
    const Object memory(torch_.local(object));
    return memory.get() == nullptr || torch_.is_negated(memory.get());
  }

  static bool has_none(PyObject* state, PyObject* keys) {
    for (Py_ssize_t k = 0; k < PyTuple_Size(keys); ++k)
      if (PyDict_GetItemWithError(state, PyTuple_GetItem(keys, k)) != nullptr) return false;
    return true;
  }

  // Returns false in two cases. Either the parameter is fp32, and the state has a remainder from when the parameter had
  // 16 bits. Or the state has an entry `master`, which only the result of state_dict() should have.
  static bool has_no_master(PyObject* state, int64_t code) {
    if (code == kFloat && PyDict_GetItemWithError(state, Names::get().remainder) != nullptr) return false;
    return PyDict_GetItemWithError(state, Names::get().master) == nullptr;
  }

  bool take_step(Py_ssize_t t, const Model& model, PyObject* step) const {
    Description description;
    if (!torch_.describe(step, &description) || !description.is(Description::kInt, 32)) return false;
    at(kStep, t) = address(description);
    return description.dims == 0 && model.is_on_device_of(description) && description.data != nullptr;
  }

  bool take_array(int row, Py_ssize_t t, const Model& model, PyObject* array, uint8_t type, uint8_t bits) const {
    const Object memory(torch_.local(array));  // the description borrows from it
    Description description;
    if (!torch_.describe(memory.get(), &description) || !description.is(type, bits)) return false;
    at(row, t) = address(description);
    return model.fits(description) && has_memory(description, model.numel);
  }

  // The scales of a state in codes: an fp32 number for each group.
  bool take_scale(int row, Py_ssize_t t, const Model& model, PyObject* scale) const {
    Description description;
    if (!torch_.describe(scale, &description) || !description.is(Description::kFloat, 32)) return false;
    at(row, t) = address(description);
    const int64_t groups = (model.numel + kStateGroup - 1) / kStateGroup;
    return description.dims == 1 && description.shape[0] == groups && Model(description).is_contiguous &&
           model.is_on_device_of(description) && has_memory(description, groups);
  }

  bool take_state(int k, Py_ssize_t t, const Model& model, PyObject* array, const Storage& storage) const {
    uint8_t type = Description::kFloat, bits = 32;
    if (storage.has_bits(k, kInt8))
      type = storage.with_sign >> k & 1 ? Description::kInt : Description::kUInt, bits = 8;
    if (storage.has_bits(k, kBFloat16)) type = Description::kBfloat, bits = 16;
    return take_array(kState + k, t, model, array, type, bits);
  }

  // Writes the rows of states and of their scales. Returns a bit for each state that the parameter uses. If an array is
  // missing or does not fit, returns -1. `others` counts the entries of `state` that have no row yet. Each array that
  // gets a row lowers this count by one.
  int64_t take_states(Py_ssize_t t, const Model& model, PyObject* state, const Storage& storage,
                      Py_ssize_t* others) const {
    int64_t states = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(storage.keys); ++i) {
      PyObject* const key = PyTuple_GetItem(storage.keys, i);
      if (key == Py_None) continue;
      PyObject* const array = PyDict_GetItemWithError(state, key);
      if (array == nullptr) return -1;
      const int k = static_cast<int>(i);
      const bool is_state = kState + k < kScale;
      if (!(is_state ? take_state(k, t, model, array, storage) : take_scale(kState + k, t, model, array))) return -1;
      if (is_state) states |= int64_t{1} << k;
      --*others;
    }
    return states;
  }

  bool take_gradient(Py_ssize_t t, const Model& model, PyObject* grad, int64_t* code) const {
    const Object memory(torch_.local(grad));
    if (memory.get() == nullptr) return false;
    Description description;
    if (!torch_.describe(memory.get(), &description) || !description.is_float() || torch_.is_negated(memory.get()))
      return false;
    if (!model.fits(description) || !has_memory(description, model.numel)) return false;
    // Kernels skip a tensor whose gradient has address 0, and do not count an update of it. An empty gradient may have
    // address 0, but its updates must be counted. So the table holds the address of the count of steps instead.
    at(kGrad, t) = model.numel == 0 ? at(kStep, t) : address(description);
    *code = code_of(description);
    return true;
  }

  const Torch& torch_;
  Held& held_;
  size_t first_held_ = 0;  // where the objects of the present column begin: its gradient, and then its states
  int64_t *table_, *forms_;
  const int64_t* checked_;
  Py_ssize_t count_;
  Place device_;
};

using Spans = std::vector<std::pair<int64_t, int64_t>>;  // ranges of memory, as (begin, end)

// Sorts ranges. Returns false if two of them overlap.
inline bool are_apart(Spans* spans) {
  if (!std::is_sorted(spans->begin(), spans->end())) std::sort(spans->begin(), spans->end());
  for (size_t i = 1; i < spans->size(); ++i)
    if ((*spans)[i].first < (*spans)[i - 1].second) return false;
  return true;
}

// The memory that the columns of a table point to.
class Memory {
 public:
  Memory(const int64_t* table, const int64_t* forms, int64_t count, int rows)
      : table_(table), forms_(forms), count_(count), rows_(rows) {}

  // Returns the ranges of memory that a step writes, sorted. If two of them overlap, the result is empty.
  Spans written() const {
    Spans spans;
    spans.reserve(count_ * (rows_ - kParam));
    for (int64_t t = 0; t < count_; ++t)
      if (forms_[t] >= 0)
        for (int row = kParam; row < rows_; ++row) add(row, t, &spans);
    return are_apart(&spans) ? spans : Spans();
  }

  // Whether no two gradients overlap.
  bool has_separate_gradients() const {
    Spans spans;
    for (int64_t t = 0; t < count_; ++t)
      if (at(kGrad, t) != 0) spans.emplace_back(at(kGrad, t), at(kGrad, t) + gradient_bytes(t));
    return are_apart(&spans);
  }

  // Returns the column of a gradient that overlaps one of `count` sorted ranges, or -1 if there is no such gradient.
  int64_t overlapping_gradient(const int64_t* starts, const int64_t* ends, int64_t count) const {
    for (int64_t t = 0; t < count_; ++t) {
      const int64_t grad = at(kGrad, t), bytes = gradient_bytes(t);
      if (grad == 0 || bytes == 0) continue;
      const int64_t* const end = std::upper_bound(ends, ends + count, grad);
      if (end != ends + count && starts[end - ends] < grad + bytes) return t;
    }
    return -1;
  }

 private:
  int64_t at(int row, int64_t t) const { return table_[row * count_ + t]; }

  int64_t gradient_bytes(int64_t t) const { return at(kNumel, t) * (at(kGradDtype, t) == kFloat ? 4 : 2); }

  // Adds the range of one array.
  void add(int row, int64_t t, Spans* spans) const {
    const int64_t begin = at(row, t);
    const int64_t bytes = row == kStep    ? 4
                          : row >= kScale ? (at(kNumel, t) + kStateGroup - 1) / kStateGroup * 4
                                          : at(kNumel, t) * element_bytes(row, forms_[t]);
    if (begin != 0 && bytes != 0) spans->emplace_back(begin, begin + bytes);
  }

  static int64_t element_bytes(int row, int64_t form) {
    if (row == kMaster) return 2;
    if (row == kParam) return (form & 3) == kFloat ? 4 : 2;
    const bool is_coded = (form >> 9 >> (row - kState) & 1) != 0;
    return !is_coded ? 4 : (form >> 7 & 3) == kInt8 ? 1 : 2;
  }

  const int64_t *table_, *forms_;
  int64_t count_;
  int rows_;
};

// Returns -2 if two of the ranges of memory that the step writes overlap. Otherwise returns the column of a gradient
// that overlaps one of these ranges, or -1 if there is no such gradient.
//
// `checked` holds the table and the forms of the last call that found no overlap. Behind them is the number of ranges
// that a step writes. It is -1 if no call has been made yet, or if the last call found an overlap. `starts` and the
// words behind it hold the ranges. If table and forms have not changed, nothing is checked. If forms, sizes and the
// addresses that the step writes have not changed, only the gradients are checked.
inline int64_t overlap(const int64_t* table, const int64_t* forms, int64_t count, int rows, int64_t* checked,
                       int64_t* starts) {
  const int64_t most = count * (rows - kParam), size = rows * count;
  int64_t *const ends = starts + most, *const ranges = checked + size + count;
  const Memory memory(table, forms, count, rows);
  const auto is_known = [&](int64_t begin, int64_t end) {
    return std::memcmp(table + begin, checked + begin, (end - begin) * sizeof(int64_t)) == 0;
  };
  const bool forms_known = *ranges >= 0 && std::memcmp(forms, checked + size, count * sizeof(int64_t)) == 0;
  const bool memory_known =
      forms_known && is_known(kNumel * count, (kNumel + 1) * count) && is_known(kParam * count, size);
  if (memory_known && is_known(0, size)) return -1;
  if (!memory_known) {
    const auto spans = memory.written();
    *ranges = -1;
    if (spans.empty() && count > 0 && std::any_of(forms, forms + count, [](int64_t form) { return form >= 0; }))
      return -2;
    for (size_t i = 0; i < spans.size(); ++i) starts[i] = spans[i].first, ends[i] = spans[i].second;
    *ranges = static_cast<int64_t>(spans.size());
  }
  const int64_t overlapping = memory.overlapping_gradient(starts, ends, *ranges);
  if (overlapping >= 0) {
    *ranges = -1;
    return overlapping;
  }
  std::memcpy(checked, table, size * sizeof(int64_t));
  std::memcpy(checked + size, forms, count * sizeof(int64_t));
  return -1;
}

// Whether kernels for so many elements run without the GIL. For fewer, giving it up takes longer than the kernels.
inline bool is_long(int64_t elements) { return elements >= 1 << 15; }

// Gives up the GIL for as long as it lives. It takes the GIL again before an exception is caught.
class WithoutGil {
 public:
  explicit WithoutGil(bool releases) : state_(releases ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Whether a list or tuple holds the objects of a list, in the same order.
inline bool is_same(PyObject* objects, PyObject* list) {
  const bool is_list = PyList_Check(objects);
  if (!is_list && !PyTuple_Check(objects)) return false;
  const Py_ssize_t size = is_list ? PyList_Size(objects) : PyTuple_Size(objects);
  if (size != PyList_Size(list)) return false;
  for (Py_ssize_t i = 0; i < size; ++i)
    if ((is_list ? PyList_GetItem(objects, i) : PyTuple_GetItem(objects, i)) != PyList_GetItem(list, i)) return false;
  return true;
}

// Whether a dict holds the same objects as keys and as values, in the same order.
inline bool is_same_state(PyObject* dict, PyObject* keys, PyObject* values) {
  if (PyDict_Size(dict) != PyList_Size(keys)) return false;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  for (Py_ssize_t i = 0; PyDict_Next(dict, &position, &key, &value) != 0; ++i)
    if (key != PyList_GetItem(keys, i) || value != PyList_GetItem(values, i)) return false;
  return true;
}

inline int64_t* pointer_to(unsigned long long address) { return reinterpret_cast<int64_t*>(address); }

}  // namespace amp_kernels
