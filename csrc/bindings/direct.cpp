#include "direct.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>

#include "int8_cpu.h"

namespace amp_kernels {
namespace {

constexpr int64_t kMaxK = 131071;    // as _checks.MAX_K
constexpr int64_t kBrief = 1 << 19;  // products, about: a few microseconds; to let others run meanwhile takes 0.2

bool check_count(Py_ssize_t count, Py_ssize_t expected) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "amp_kernels._C: expected %zd arguments, got %zd", expected, count);
  return false;
}

// Other threads of Python run meanwhile, unless it is brief.
template <class F>
bool run(const F& kernel, bool is_brief = false) {
  PyThreadState* state = is_brief ? nullptr : PyEval_SaveThread();
  const char* error = nullptr;
  try {
    kernel();
  } catch (const std::exception&) {
    error = "amp_kernels._C: a kernel failed; is there memory left?";
  }
  if (state != nullptr) PyEval_RestoreThread(state);
  if (error != nullptr) PyErr_SetString(PyExc_RuntimeError, error);
  return error == nullptr;
}

// Bytes that are int64 numbers, then as many integers as there are words.
template <size_t kNumbers, size_t kWords>
bool read(PyObject* const* arguments, Py_ssize_t count, int64_t (&numbers)[kNumbers], uint64_t (&words)[kWords]) {
  if (!check_count(count, 1 + kWords)) return false;
  char* bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(arguments[0], &bytes, &size) != 0) return false;
  if (size != sizeof(numbers)) {
    PyErr_Format(PyExc_ValueError, "amp_kernels._C: expected %zu bytes, got %zd", sizeof(numbers), size);
    return false;
  }
  std::memcpy(numbers, bytes, sizeof(numbers));
  for (size_t i = 0; i < kWords; ++i) words[i] = PyLong_AsUnsignedLongLongMask(arguments[1 + i]);
  return PyErr_Occurred() == nullptr;
}

template <class T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// A tensor of a CPU, or None.
class Operand {
 public:
  // False if it is of another device or layout, or has no memory: there are zeros that are only promised.
  bool describe(const ExchangeApi* api, PyObject* object) {
    constexpr int32_t kCpu = 1;
    if (api->describe(object, &tensor_) != 0) {
      PyErr_Clear();
      return false;
    }
    is_given_ = true;
    return tensor_.device_type == kCpu && (tensor_.data != nullptr || numel() == 0);
  }

  const Description* operator->() const { return &tensor_; }
  bool is_given() const { return is_given_; }

  template <class T>
  T* data() const {
    return is_given_ ? reinterpret_cast<T*>(tensor_.address()) : nullptr;
  }

  bool is_matrix() const { return is_given_ && tensor_.dims == 2; }
  bool is_codes() const { return is_matrix() && tensor_.is(Description::kInt, 8); }

  int64_t numel() const {
    int64_t product = 1;
    for (int32_t d = 0; d < tensor_.dims; ++d) product *= tensor_.shape[d];
    return product;
  }

  // Whether it is one number, or `n` neighbours along a dimension of 1 or 2 of which the others are 1.
  bool is_one_or_row(int64_t n) const {
    const int64_t count = numel();
    if (!is_given_ || (count != 1 && count != n)) return false;
    for (int32_t d = 0; d < tensor_.dims && count != 1; ++d)
      if (tensor_.shape[d] != 1 && (tensor_.shape[d] != n || tensor_.strides[d] != 1)) return false;
    return true;
  }

  // Whether it is `n` neighbours of a dtype, in one dimension.
  bool is_row(int64_t n, uint8_t type, uint8_t bits) const {
    return is_given_ && tensor_.is(type, bits) && tensor_.dims == 1 && numel() == n && is_one_or_row(n);
  }

  Dtype dtype() const { return tensor_.type == Description::kBfloat ? kBFloat16 : tensor_.bits == 16 ? kHalf : kFloat; }

 private:
  Description tensor_{};
  bool is_given_ = false;
};

// Scales of `n` rows (their columns are dimension `inner`) or columns, and their zero points.
bool is_side(const Operand& scale, const Operand& zero_point, int64_t n, int inner) {
  const auto fits = [&](const Operand& side) {
    return side.is_one_or_row(n) && (side.numel() == 1 || (side->dims == 2 && side->shape[inner] == 1));
  };
  if (!scale.is_given() || !scale->is(Description::kFloat, 32) || !fits(scale)) return false;
  if (!zero_point.is_given()) return true;
  return zero_point->is(Description::kInt, 32) && fits(zero_point) && zero_point.numel() == scale.numel();
}

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, Release>;

// What the caller says of torch (direct.h).
class Torch {
 public:
  // Whether this is a torch that describes its tensors, and nobody watches.
  bool read(PyObject* tuple) {
    PyObject** const parts[] = {&tensor_, &parameter_, &is_neg_, &steal_, &dtypes_, &watchers_};
    if (PyTuple_Check(tuple) && PyTuple_Size(tuple) == 1 + std::size(parts)) {
      for (size_t i = 0; i < std::size(parts); ++i) *parts[i] = PyTuple_GetItem(tuple, 1 + i);
      if (PyTuple_Check(dtypes_) && PyTuple_Check(watchers_)) api_ = exchange_api(PyTuple_GetItem(tuple, 0));
    }
    if (api_ == nullptr) PyErr_Clear();
    return api_ != nullptr && !is_watched();
  }

  // False if there is one that is neither a plain tensor of a CPU nor None.
  template <size_t kOperands>
  bool describe(PyObject* const* objects, Operand (&operands)[kOperands]) const {
    for (size_t i = 0; i < kOperands; ++i) {
      PyObject* object = objects[i];
      if (object == Py_None) continue;
      auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
      if (type != tensor_ && type != parameter_) return false;
      if (!operands[i].describe(api_, object) || is_negated(object)) return false;
    }
    return true;
  }

  // Its Dtype, or -1.
  int64_t code_of(PyObject* dtype) const {
    for (Py_ssize_t i = 0; i < PyTuple_Size(dtypes_); ++i)
      if (PyTuple_GetItem(dtypes_, i) == dtype) return i;
    return -1;
  }

  // A new [rows, columns] of a CPU and where it lies, or nullptr, made as code that Inductor compiles makes its
  // results: torch.empty_strided, whose arguments are objects, takes half as long again.
  PyObject* empty(int64_t rows, int64_t columns, Dtype dtype, void** data) const {
    const int64_t size[] = {rows, columns}, strides[] = {columns, 1};
    AtenTensorHandle tensor;
    if (aoti_torch_empty_strided(2, size, strides, torchs(dtype), aoti_torch_device_type_cpu(), 0, &tensor) != 0)
      return nullptr;
    const Reference capsule(PyCapsule_New(tensor, nullptr, nullptr));
    const Reference capsules(capsule ? PyTuple_Pack(1, capsule.get()) : nullptr);
    if (!capsules || aoti_torch_get_data_ptr(tensor, data) != 0) {
      aoti_torch_delete_tensor_object(tensor);
      PyErr_Clear();
      return nullptr;
    }
    const Reference list(PyObject_CallFunctionObjArgs(steal_, capsules.get(), nullptr));
    PyObject* out = list ? PyList_GetItem(list.get(), 0) : nullptr;
    if (out == nullptr) PyErr_Clear();
    Py_XINCREF(out);
    return out;
  }

 private:
  static int32_t torchs(Dtype dtype) {
    return dtype == kHalf       ? aoti_torch_dtype_float16()
           : dtype == kBFloat16 ? aoti_torch_dtype_bfloat16()
                                : aoti_torch_dtype_float32();
  }

  bool is_watched() const {
    for (Py_ssize_t i = 0; i < PyTuple_Size(watchers_); ++i) {
      const Reference answer(PyObject_CallNoArgs(PyTuple_GetItem(watchers_, i)));
      const bool is_watched = !answer || PyObject_IsTrue(answer.get()) != 0;
      PyErr_Clear();
      if (is_watched) return true;
    }
    return false;
  }

  // Whether a tensor's memory is to be read with the other sign.
  bool is_negated(PyObject* tensor) const {
    const Reference answer(PyObject_CallFunctionObjArgs(is_neg_, tensor, nullptr));
    if (!answer) PyErr_Clear();
    return answer.get() != Py_False;
  }

  const ExchangeApi* api_ = nullptr;
  PyObject *tensor_, *parameter_, *is_neg_, *steal_, *dtypes_, *watchers_;
};

// The result, or nullptr with an error set.
template <class Args>
PyObject* multiplied(const Args& args, PyObject* out) {
  Reference result(out);
  const bool is_brief = std::max<int64_t>(args.m, 4) * args.n * (args.k + 64) <= kBrief;  // and has but one thread
  return run([&] { cpu::multiply(args); }, is_brief) ? result.release() : nullptr;
}

}  // namespace

PyObject* quantize_int8(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  int64_t numbers[23];
  uint64_t words[5];
  if (!read(arguments, count, numbers, words)) return nullptr;
  const auto [seed, x, out, scale, zero_point] = words;
  const Quantize args{at<void>(x),
                      at<void>(out),
                      at<float>(scale),
                      at<int32_t>(zero_point),
                      Int8Layout::from(numbers),
                      static_cast<Dtype>(numbers[19]),
                      numbers[20] != 0,
                      numbers[21] != 0,
                      numbers[22] != 0,
                      seed};
  if (!run([&] { cpu::quantize(args); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* dequantize_int8(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  int64_t numbers[20];
  uint64_t words[4];
  if (!read(arguments, count, numbers, words)) return nullptr;
  const auto [values, scale, zero_point, out] = words;
  const Dequantize args{at<int8_t>(values), at<float>(scale),          at<int32_t>(zero_point),
                        at<void>(out),      Int8Layout::from(numbers), static_cast<Dtype>(numbers[19])};
  if (!run([&] { cpu::dequantize(args); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* new_int8_matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Torch torch;
  Operand operands[7];
  void* out = nullptr;
  if (!check_count(count, 9)) return nullptr;
  const auto& [a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias] = operands;
  if (!torch.read(arguments[0]) || !torch.describe(arguments + 1, operands)) Py_RETURN_NONE;
  if (!a.is_codes() || !b.is_codes()) Py_RETURN_NONE;
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1], dtype = torch.code_of(arguments[8]);
  if (b->shape[0] != k || m == 0 || n == 0 || k > kMaxK || dtype < 0) Py_RETURN_NONE;
  if (!is_side(a_scale, a_zero_point, m, 1) || !is_side(b_scale, b_zero_point, n, 0)) Py_RETURN_NONE;
  if (bias.is_given() && !bias.is_row(n, Description::kFloat, 32)) Py_RETURN_NONE;
  PyObject* result = torch.empty(m, n, static_cast<Dtype>(dtype), &out);
  if (result == nullptr) Py_RETURN_NONE;
  const Int8Matmul args{m,
                        n,
                        k,
                        a.data<int8_t>(),
                        {a->strides[0], a->strides[1]},
                        b.data<int8_t>(),
                        {b->strides[0], b->strides[1]},
                        a_scale.data<float>(),
                        a_zero_point.data<int32_t>(),
                        a_scale.numel() == 1 ? 0 : 1,
                        b_scale.data<float>(),
                        b_zero_point.data<int32_t>(),
                        b_scale.numel() == 1 ? 0 : 1,
                        bias.data<void>(),
                        out,
                        static_cast<Dtype>(dtype),
                        nullptr,
                        nullptr};
  return multiplied(args, result);
}

PyObject* new_int8_linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Torch torch;
  Operand operands[4];
  void* out = nullptr;
  if (!check_count(count, 5)) return nullptr;
  const auto& [x, weight, scale, bias] = operands;
  if (!torch.read(arguments[0]) || !torch.describe(arguments + 1, operands)) Py_RETURN_NONE;
  if (!x.is_matrix() || !x->is_float() || !weight.is_codes()) Py_RETURN_NONE;
  const int64_t m = x->shape[0], k = x->shape[1], n = weight->shape[0];
  if (m == 0 || n == 0 || k < 2 || weight->shape[1] != k || x->strides[1] != 1) Py_RETURN_NONE;
  if (weight->strides[1] != 1 || (n > 1 && weight->strides[0] != k)) Py_RETURN_NONE;
  if (!scale.is_given() || !scale->is(Description::kFloat, 32) || !scale.is_one_or_row(n)) Py_RETURN_NONE;
  if (bias.is_given() && !bias.is_row(n, x->type, x->bits)) Py_RETURN_NONE;
  PyObject* result = torch.empty(m, n, x.dtype(), &out);
  if (result == nullptr) Py_RETURN_NONE;
  const Int8Linear args{m,
                        n,
                        k,
                        x.data<void>(),
                        x->strides[0],
                        weight.data<int8_t>(),
                        scale.data<float>(),
                        scale.numel() == 1 ? 0 : 1,
                        bias.data<void>(),
                        out,
                        x.dtype()};
  return multiplied(args, result);
}

}  // namespace amp_kernels
