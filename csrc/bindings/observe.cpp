#include "observe.h"

#include <cstdint>

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

// What of DLPack 1 (https://dmlc.github.io/dlpack) is used here. Torch describes a tensor through it in one call that
// allocates nothing; asked by its Python getters for size, dtype and contiguity, a thousand parameters took twice as
// long as now.
struct Description {
  char* data;
  int32_t device_type, device_index, dims;
  uint8_t type, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;

  int64_t address() const { return reinterpret_cast<int64_t>(data + byte_offset); }
};

struct ExchangeApi {
  uint32_t major, minor;
  const ExchangeApi* previous;
  void (*of_managed_tensors[3])();
  int (*describe)(PyObject*, Description*);  // 0, or -1 with an error set
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

// fp16, bf16 or fp32.
bool is_readable(const Description& tensor) {
  constexpr uint8_t kFloat = 2, kBfloat = 4;
  return tensor.type == kFloat ? tensor.bits == 16 || tensor.bits == 32 : tensor.type == kBfloat && tensor.bits == 16;
}

}  // namespace

PyObject* observe(PyObject*, PyObject* arguments) {
  PyObject *parameters, *capsule;
  unsigned long long seen_address;
  int with_versions;
  if (!PyArg_ParseTuple(arguments, "O!KpO", &PyList_Type, &parameters, &seen_address, &with_versions, &capsule)) {
    return nullptr;
  }
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (api == nullptr) return nullptr;
  if (api->major != 1 || api->describe == nullptr) {
    PyErr_SetString(PyExc_NotImplementedError, "observe: this torch describes no tensors by DLPack 1");
    return nullptr;
  }
  auto* seen = reinterpret_cast<int64_t*>(seen_address);
  const Py_ssize_t n = PyList_Size(parameters);
  for (Py_ssize_t i = 0; i < n; ++i) {
    const auto at = [&](Row row) -> int64_t& { return seen[row * n + i]; };
    PyObject* parameter = PyList_GetItem(parameters, i);
    Description tensor;
    if (api->describe(parameter, &tensor) != 0) return nullptr;
    at(kAddress) = tensor.address();
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
    if (is_described && is_readable(tensor)) {
      at(kGrad) = tensor.address();
      at(kGradLayout) = layout_of(tensor);
    } else {
      at(kGradLayout) = kUnreadable;
    }
  }
  Py_RETURN_NONE;
}

}  // namespace amp_kernels
