#include "observe.h"

#include <algorithm>

namespace amp_kernels {
namespace {

// A reference that this code owns; null after an error, which Python then holds.
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

enum Row : int64_t { kAddress, kLayout, kGrad, kGradLayout };
constexpr int64_t kNoGradient = -2, kUnreadable = -1;

PyObject* grad_name() {
  static PyObject* const interned = PyUnicode_InternFromString("grad");
  return interned;
}

// Dtype, shape and strides in 63 bits.
int64_t layout_of(const Description& tensor) {
  uint64_t hash = tensor.type << 8 | tensor.bits;
  const auto mix = [&](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  };
  for (int32_t d = 0; d < tensor.dims; ++d) {
    mix(tensor.shape[d]);
    mix(tensor.strides[d]);
  }
  return static_cast<int64_t>(hash >> 1);
}

// What a sweep needs of torch, borrowed from the tuple that Python passes.
struct Torch {
  const ExchangeApi* api = nullptr;
  PyObject *tensor, *parameter, *is_neg, *data_ptr;

  // False, with an error set, if this is another torch.
  bool read(PyObject* tuple) {
    PyObject* capsule;
    if (!PyArg_ParseTuple(tuple, "OOOOO", &capsule, &tensor, &parameter, &is_neg, &data_ptr)) return false;
    api = exchange_api(capsule);
    return api != nullptr;
  }

  // Whether `object` is a tensor with memory of its own: a subclass may have none.
  bool describe(PyObject* object, Description* description) const {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != tensor && type != parameter) return false;
    if (api->describe(object, description) == 0) return true;
    PyErr_Clear();  // a sparse one
    return false;
  }

  // Asks for the address in order to write there: a tensor that shares its memory with a lazy clone gets memory of its
  // own. DLPack only looks.
  bool claim(PyObject* object) const {
    const Object address(PyObject_CallFunctionObjArgs(data_ptr, object, nullptr));
    if (address.get() == nullptr) PyErr_Clear();  // there is none, which `describe` will say
    return address.get() != nullptr;
  }

  bool is_negated(PyObject* object) const {
    const Object answer(PyObject_CallFunctionObjArgs(is_neg, object, nullptr));
    if (answer.get() == nullptr) PyErr_Clear();
    return answer.get() != Py_False;
  }
};

int64_t bytes_of(const Description& tensor) {
  int64_t bytes = tensor.bits / 8;
  for (int32_t d = 0; d < tensor.dims; ++d) bytes *= tensor.shape[d];
  return bytes;
}

// Stretches of memory in order, apart from each other.
struct Spans {
  const int64_t *starts, *ends;
  int64_t count;

  bool meet(int64_t start, int64_t bytes) const {
    const int64_t* const end = std::upper_bound(ends, ends + count, start);
    return bytes > 0 && end != ends + count && starts[end - ends] < start + bytes;
  }
};

// Columns of an int64 [rows, count] tensor.
struct Columns {
  int64_t* data;
  Py_ssize_t count;

  int64_t& at(Row row, Py_ssize_t i) const { return data[row * count + i]; }

  void place(Py_ssize_t i, const Torch& torch, PyObject* object) const {
    Description tensor;
    const bool is_plain = torch.describe(object, &tensor);
    at(kAddress, i) = is_plain ? reinterpret_cast<int64_t>(tensor.address()) : 0;
    at(kLayout, i) = is_plain ? layout_of(tensor) : kUnreadable;
  }

  // A gradient with gaps that is taken to meet `written` is looked at again in Python.
  void gradient(Py_ssize_t i, const Torch& torch, PyObject* grad, const Spans& written, bool writes) const {
    at(kGrad, i) = 0;
    at(kGradLayout, i) = grad == Py_None ? kNoGradient : kUnreadable;
    if (grad == Py_None) return;
    if (writes) torch.claim(grad);
    Description tensor;
    if (!torch.describe(grad, &tensor) || !tensor.is_float() || torch.is_negated(grad)) return;
    const int64_t address = reinterpret_cast<int64_t>(tensor.address()), bytes = bytes_of(tensor);
    if (tensor.data == nullptr && bytes > 0) return;  // zeros that have no memory
    if (written.meet(address, bytes)) return;
    at(kGrad, i) = address;
    at(kGradLayout, i) = layout_of(tensor);
  }
};

}  // namespace

PyObject* observe(PyObject*, PyObject* arguments) {
  PyObject *parameters, *states, *tuple;
  unsigned long long starts, ends, seen_address, places_address;
  long long count;
  int writes;
  if (!PyArg_ParseTuple(arguments, "O!O!(KKL)KKpO", &PyList_Type, &parameters, &PyList_Type, &states, &starts, &ends,
                        &count, &seen_address, &places_address, &writes, &tuple)) {
    return nullptr;
  }
  Torch torch;
  if (!torch.read(tuple)) return nullptr;
  const Spans written{reinterpret_cast<int64_t*>(starts), reinterpret_cast<int64_t*>(ends), count};
  const Columns seen{reinterpret_cast<int64_t*>(seen_address), PyList_Size(parameters)};
  const Columns places{reinterpret_cast<int64_t*>(places_address), PyList_Size(states)};
  for (Py_ssize_t i = 0; i < seen.count; ++i) {
    PyObject* parameter = PyList_GetItem(parameters, i);
    torch.claim(parameter);
    seen.place(i, torch, parameter);
    const Object grad(PyObject_GetAttr(parameter, grad_name()));
    if (grad.get() == nullptr) return nullptr;
    seen.gradient(i, torch, grad.get(), written, writes);
  }
  for (Py_ssize_t i = 0; i < places.count; ++i) places.place(i, torch, PyList_GetItem(states, i));
  Py_RETURN_NONE;
}

}  // namespace amp_kernels
