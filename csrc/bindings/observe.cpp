#include "observe.h"

#include <cstdint>
#include <exception>

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

// Of torch, for code that Inductor generates: the address of a tensor's memory. Throws where there is none.
using DataPtr = void* (*)(PyObject*);

enum Row : int64_t { kAddress, kNumel, kVersion, kGrad, kGradKind };
constexpr int64_t kNoGradient = -2, kUnreadable = -1;

struct Names {
  PyObject* grad = PyUnicode_InternFromString("grad");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* version = PyUnicode_InternFromString("_version");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
};

const Names& names() {
  static const Names interned;
  return interned;
}

// Whether the tensor has memory, and where.
bool find(PyObject* tensor, DataPtr data_ptr, int64_t& address) {
  try {
    address = reinterpret_cast<int64_t>(data_ptr(tensor));
    return true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
}

// Twice the index of the dtype, plus 1 if it is contiguous. A sparse gradient raises.
int64_t kind_of(PyObject* grad, PyObject* dtypes) {
  const Object dtype(PyObject_GetAttr(grad, names().dtype));
  if (dtype.get() == nullptr) return kUnreadable;
  const Object is_contiguous(PyObject_CallMethodObjArgs(grad, names().is_contiguous, nullptr));
  if (is_contiguous.get() == nullptr) return kUnreadable;
  for (Py_ssize_t i = 0; i < PyTuple_Size(dtypes); ++i) {
    if (PyTuple_GetItem(dtypes, i) == dtype.get()) return 2 * i + (is_contiguous.get() == Py_True);
  }
  return kUnreadable;
}

}  // namespace

PyObject* observe(PyObject*, PyObject* arguments) {
  PyObject *parameters, *dtypes;
  unsigned long long seen_address, data_ptr_address;
  int with_versions;
  if (!PyArg_ParseTuple(arguments, "O!KpKO!", &PyList_Type, &parameters, &seen_address, &with_versions,
                        &data_ptr_address, &PyTuple_Type, &dtypes)) {
    return nullptr;
  }
  auto* seen = reinterpret_cast<int64_t*>(seen_address);
  const auto data_ptr = reinterpret_cast<DataPtr>(data_ptr_address);
  const Py_ssize_t n = PyList_Size(parameters);
  for (Py_ssize_t i = 0; i < n; ++i) {
    const auto at = [&](Row row) -> int64_t& { return seen[row * n + i]; };
    PyObject* parameter = PyList_GetItem(parameters, i);
    if (!find(parameter, data_ptr, at(kAddress))) return nullptr;
    const Object numel(PyObject_CallMethodObjArgs(parameter, names().numel, nullptr));
    if (numel.get() == nullptr) return nullptr;
    at(kNumel) = PyLong_AsLongLong(numel.get());
    if (with_versions) {
      const Object version(PyObject_GetAttr(parameter, names().version));
      if (version.get() == nullptr) return nullptr;
      at(kVersion) = PyLong_AsLongLong(version.get());
    }
    const Object grad(PyObject_GetAttr(parameter, names().grad));
    if (grad.get() == nullptr) return nullptr;
    at(kGrad) = 0;
    at(kGradKind) = grad.get() == Py_None ? kNoGradient : kind_of(grad.get(), dtypes);
    if (at(kGradKind) >= 0 && !find(grad.get(), data_ptr, at(kGrad))) at(kGradKind) = kUnreadable;
    if (at(kGradKind) == kUnreadable) PyErr_Clear();
  }
  Py_RETURN_NONE;
}

}  // namespace amp_kernels
