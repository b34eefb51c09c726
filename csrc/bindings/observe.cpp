#include "observe.h"

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

enum Row : int64_t { kAddress, kLayout, kVersion, kGrad, kGradLayout };
constexpr int64_t kNoGradient = -2, kUnreadable = -1;

struct Names {
  PyObject* grad = PyUnicode_InternFromString("grad");
  PyObject* version = PyUnicode_InternFromString("_version");
};

const Names& names() {
  static const Names interned;
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

}  // namespace

PyObject* observe(PyObject*, PyObject* arguments) {
  PyObject *parameters, *capsule;
  unsigned long long seen_address;
  int with_versions;
  if (!PyArg_ParseTuple(arguments, "O!KpO", &PyList_Type, &parameters, &seen_address, &with_versions, &capsule)) {
    return nullptr;
  }
  const ExchangeApi* api = exchange_api(capsule);
  if (api == nullptr) return nullptr;
  auto* seen = reinterpret_cast<int64_t*>(seen_address);
  const Py_ssize_t n = PyList_Size(parameters);
  for (Py_ssize_t i = 0; i < n; ++i) {
    const auto at = [&](Row row) -> int64_t& { return seen[row * n + i]; };
    PyObject* parameter = PyList_GetItem(parameters, i);
    Description tensor;
    if (api->describe(parameter, &tensor) != 0) return nullptr;
    at(kAddress) = reinterpret_cast<int64_t>(tensor.address());
    at(kLayout) = layout_of(tensor);
    if (with_versions) {
      const Object version(PyObject_GetAttr(parameter, names().version));
      if (version.get() == nullptr) return nullptr;
      at(kVersion) = PyLong_AsLongLong(version.get());
    }
    const Object grad(PyObject_GetAttr(parameter, names().grad));
    if (grad.get() == nullptr) return nullptr;
    at(kGrad) = 0;
    at(kGradLayout) = kNoGradient;
    if (grad.get() == Py_None) continue;
    const bool is_described = api->describe(grad.get(), &tensor) == 0;  // not what is sparse
    if (!is_described) PyErr_Clear();
    if (is_described && tensor.is_float()) {
      at(kGrad) = reinterpret_cast<int64_t>(tensor.address());
      at(kGradLayout) = layout_of(tensor);
    } else {
      at(kGradLayout) = kUnreadable;
    }
  }
  Py_RETURN_NONE;
}

}  // namespace amp_kernels
