#include "direct.h"

#include <cstring>
#include <exception>

#include "int8_cpu.h"

namespace amp_kernels {
namespace {

constexpr int64_t kMaxK = 131071;  // as _checks.MAX_K

bool check_count(Py_ssize_t count, Py_ssize_t expected) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "amp_kernels._C: expected %zd arguments, got %zd", expected, count);
  return false;
}

// Other threads of Python run meanwhile.
template <class F>
bool run(const F& kernel) {
  PyThreadState* state = PyEval_SaveThread();
  const char* error = nullptr;
  try {
    kernel();
  } catch (const std::exception&) {
    error = "amp_kernels._C: a kernel failed; is there memory left?";
  }
  PyEval_RestoreThread(state);
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

// Whether a tensor's memory is to be read with the other sign.
bool is_negated(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* result = name == nullptr ? nullptr : PyObject_CallMethodObjArgs(tensor, name, nullptr);
  if (result == nullptr) PyErr_Clear();
  Py_XDECREF(result);
  return result != Py_False;
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

// False if there is one that is neither a plain tensor of a CPU nor None, or this torch describes none.
template <size_t kOperands>
bool describe(PyObject* const* arguments, Operand (&operands)[kOperands]) {
  PyObject *capsule, *tensor_type, *parameter_type;
  const ExchangeApi* api = nullptr;
  if (PyArg_ParseTuple(arguments[0], "OOO", &capsule, &tensor_type, &parameter_type)) api = exchange_api(capsule);
  if (api == nullptr) {
    PyErr_Clear();
    return false;
  }
  for (size_t i = 0; i < kOperands; ++i) {
    PyObject* object = arguments[1 + i];
    if (object == Py_None) continue;
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != tensor_type && type != parameter_type) return false;
    if (!operands[i].describe(api, object) || is_negated(object)) return false;
  }
  return true;
}

PyObject* answer(bool served) { return PyBool_FromLong(served); }

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

PyObject* int8_matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Operand operands[8];
  if (!check_count(count, 9)) return nullptr;
  const auto& [a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out] = operands;
  if (!describe(arguments, operands) || !a.is_codes() || !b.is_codes()) return answer(false);
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
  if (b->shape[0] != k || m == 0 || n == 0 || k > kMaxK) return answer(false);
  if (!is_side(a_scale, a_zero_point, m, 1) || !is_side(b_scale, b_zero_point, n, 0)) return answer(false);
  const bool is_bias = bias.is_given() && bias->is(Description::kFloat, 32) && bias->dims == 1 && bias.numel() == n &&
                       bias.is_one_or_row(n);
  if (bias.is_given() && !is_bias) return answer(false);
  if (!out.is_matrix() || !out->is_float() || out.numel() != m * n) return answer(false);
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
                        out.data<void>(),
                        out.dtype(),
                        nullptr,
                        nullptr};
  return run([&] { cpu::multiply(args); }) ? answer(true) : nullptr;
}

PyObject* int8_linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Operand operands[5];
  if (!check_count(count, 6)) return nullptr;
  const auto& [x, weight, scale, bias, out] = operands;
  if (!describe(arguments, operands) || !x.is_matrix() || !x->is_float() || !weight.is_codes()) return answer(false);
  const int64_t m = x->shape[0], k = x->shape[1], n = weight->shape[0];
  if (m == 0 || n == 0 || k < 2 || weight->shape[1] != k || x->strides[1] != 1) return answer(false);
  if (weight->strides[1] != 1 || (n > 1 && weight->strides[0] != k)) return answer(false);
  if (!scale.is_given() || !scale->is(Description::kFloat, 32) || !scale.is_one_or_row(n)) return answer(false);
  const bool is_bias =
      bias.is_given() && bias->is(x->type, x->bits) && bias->dims == 1 && bias.numel() == n && bias.is_one_or_row(n);
  if (bias.is_given() && !is_bias) return answer(false);
  if (!out.is_matrix() || !out->is(x->type, x->bits) || out.numel() != m * n) return answer(false);
  const Int8Linear args{m,
                        n,
                        k,
                        x.data<void>(),
                        x->strides[0],
                        weight.data<int8_t>(),
                        scale.data<float>(),
                        scale.numel() == 1 ? 0 : 1,
                        bias.data<void>(),
                        out.data<void>(),
                        x.dtype()};
  return run([&] { cpu::multiply(args); }) ? answer(true) : nullptr;
}

}  // namespace amp_kernels
