// Python's C API, limited to the functions that every Python since 3.10 has, and DLPack's description of tensors.
#pragma once

// torch's build flags define Py_LIMITED_API as the oldest Python that torch supports. It is set to Python 3.10 here,
// because the tag of the wheel is cp310 (setup.py).
#ifdef Py_LIMITED_API
#undef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

#include <cstdint>

namespace amp_kernels {

// DLTensor of DLPack 1 (https://dmlc.github.io/dlpack). torch fills this struct in one call, which allocates nothing. A
// sweep (sweep.h) that called Python's getters for size, dtype and contiguity instead took twice as long for a thousand
// parameters.
struct Description {
  char* data;
  int32_t device_type, device_index, dims;
  uint8_t type, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;

  char* address() const { return data + byte_offset; }

  bool is(uint8_t its_type, uint8_t its_bits) const { return type == its_type && bits == its_bits; }

  // Whether the dtype is fp16, bf16 or fp32.
  bool is_float() const { return is(kFloat, 16) || is(kFloat, 32) || is(kBfloat, 16); }

  static constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4;
};

// DLPackExchangeAPI of DLPack 1.
struct ExchangeApi {
  uint32_t major, minor;
  const ExchangeApi* previous;
  void (*of_managed_tensors[3])();
  int (*describe)(PyObject*, Description*);  // returns 0, or -1 with a Python error set
};

// Returns the interface in the capsule torch.Tensor.__dlpack_c_exchange_api__. If the interface is not version 1, sets
// a Python error and returns nullptr.
inline const ExchangeApi* exchange_api(PyObject* capsule) {
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (api == nullptr || (api->major == 1 && api->describe != nullptr)) return api;
  PyErr_SetString(PyExc_NotImplementedError, "amp_kernels._C: this torch has no C functions of DLPack 1");
  return nullptr;
}

}  // namespace amp_kernels
