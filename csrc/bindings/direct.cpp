#include "direct.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <vector>

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

// int64 numbers that bytes hold, to be taken one after the other.
class Numbers {
 public:
  // False, with an error set, if there are not as many as they say.
  bool read(PyObject* object, size_t fixed) {
    char* bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &bytes, &size) != 0) return false;
    numbers_.resize(size / sizeof(int64_t));
    std::memcpy(numbers_.data(), bytes, numbers_.size() * sizeof(int64_t));
    const size_t count = numbers_.size();
    const int64_t dims = count > fixed ? numbers_[fixed] : -1;
    if (dims >= 0 && count == fixed + 1 + kPerDimension * dims) return true;
    PyErr_Format(PyExc_ValueError, "amp_kernels._C: %zd bytes are no recipe", size);
    return false;
  }

  const int64_t* take(int64_t count) {
    const int64_t* first = numbers_.data() + taken_;
    taken_ += count;
    return first;
  }

 private:
  static constexpr size_t kPerDimension = 3;  // stride of the result, size and stride of the scales
  std::vector<int64_t> numbers_;
  size_t taken_ = 0;
};

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

// New tensors of a CPU, made as code that Inductor compiles makes its results: torch.empty_strided, whose arguments are
// objects, takes half as long again.
class Results {
 public:
  Results() = default;
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  ~Results() {
    for (size_t i = 0; i < count_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
  }

  // Where it lies, or nullptr if there is none.
  void* add(int64_t dims, const int64_t* size, const int64_t* strides, int32_t dtype) {
    void* data = nullptr;
    AtenTensorHandle& tensor = tensors_[count_];
    if (aoti_torch_empty_strided(dims, size, strides, dtype, aoti_torch_device_type_cpu(), 0, &tensor) != 0)
      return nullptr;
    ++count_;
    return aoti_torch_get_data_ptr(tensor, &data) == 0 ? data : nullptr;
  }

  // A list of them, or nullptr.
  Reference list(PyObject* steal) {
    Reference capsules(PyTuple_New(static_cast<Py_ssize_t>(count_)));
    for (size_t i = 0; i < count_ && capsules; ++i) {
      PyObject* capsule = PyCapsule_New(tensors_[i], nullptr, nullptr);
      if (capsule == nullptr || PyTuple_SetItem(capsules.get(), static_cast<Py_ssize_t>(i), capsule) != 0)
        capsules.reset();
    }
    Reference list;
    if (capsules) {
      list.reset(PyObject_CallFunctionObjArgs(steal, capsules.get(), nullptr));
      count_ = 0;  // they are torch's now, or lost if it failed: perhaps it has some
    }
    if (list && (!PyList_Check(list.get()) || PyList_Size(list.get()) != PyTuple_Size(capsules.get()))) list.reset();
    PyErr_Clear();
    return list;
  }

 private:
  AtenTensorHandle tensors_[3];
  size_t count_ = 0;
};

int32_t torchs(Dtype dtype) {
  return dtype == kHalf       ? aoti_torch_dtype_float16()
         : dtype == kBFloat16 ? aoti_torch_dtype_bfloat16()
                              : aoti_torch_dtype_float32();
}

// What the caller says of torch (direct.h).
class Torch {
 public:
  // Whether this is a torch that describes its tensors.
  bool read(PyObject* tuple) {
    PyObject** const parts[] = {&tensor_, &parameter_, &is_neg_, &steal_, &dtypes_, &watchers_};
    if (PyTuple_Check(tuple) && PyTuple_Size(tuple) == 1 + std::size(parts)) {
      for (size_t i = 0; i < std::size(parts); ++i) *parts[i] = PyTuple_GetItem(tuple, 1 + i);
      if (PyTuple_Check(dtypes_) && PyTuple_Check(watchers_)) api_ = exchange_api(PyTuple_GetItem(tuple, 0));
    }
    if (api_ == nullptr) PyErr_Clear();
    return api_ != nullptr;
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

  // False if there is one that is neither a tensor of a CPU nor None; `plain` ones are of no other class nor negated.
  template <size_t kOperands>
  bool describe(PyObject* const* objects, Operand (&operands)[kOperands], bool plain = true) const {
    for (size_t i = 0; i < kOperands; ++i) {
      PyObject* object = objects[i];
      if (object == Py_None) continue;
      auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
      if (plain && type != tensor_ && type != parameter_) return false;
      if (!operands[i].describe(api_, object) || (plain && is_negated(object))) return false;
    }
    return true;
  }

  // Its Dtype, or -1.
  int64_t code_of(PyObject* dtype) const {
    for (Py_ssize_t i = 0; i < PyTuple_Size(dtypes_); ++i)
      if (PyTuple_GetItem(dtypes_, i) == dtype) return i;
    return -1;
  }

  // Of new tensors a list, or nullptr.
  Reference list_of(Results& results) const { return results.list(steal_); }

  // A new [rows, columns] and where it lies, or nullptr.
  PyObject* empty(int64_t rows, int64_t columns, Dtype dtype, void** data) const {
    const int64_t size[] = {rows, columns}, strides[] = {columns, 1};
    Results results;
    *data = results.add(2, size, strides, torchs(dtype));
    const Reference list = *data == nullptr ? nullptr : list_of(results);
    PyObject* out = list ? PyList_GetItem(list.get(), 0) : nullptr;
    Py_XINCREF(out);
    return out;
  }

 private:
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

PyObject* are_plain(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Torch torch;
  Operand operands[3];
  if (!check_count(count, 4)) return nullptr;
  return PyBool_FromLong(torch.read(arguments[0]) && !torch.is_watched() && torch.describe(arguments + 1, operands) &&
                         operands[0].is_given());
}

PyObject* new_quantize_int8(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Torch torch;
  Numbers numbers;
  Operand operands[3];
  if (!check_count(count, 7) || !numbers.read(arguments[1], 23)) return nullptr;
  const uint64_t seed = PyLong_AsUnsignedLongLongMask(arguments[2]);
  const int symmetric = PyObject_IsTrue(arguments[3]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  const auto& [x, scale, zero_point] = operands;
  if (!torch.read(arguments[0]) || !torch.describe(arguments + 4, operands, false) || !x.is_given()) Py_RETURN_NONE;
  const Int8Layout layout = Int8Layout::from(numbers.take(19));
  const int64_t* options = numbers.take(4);
  const int64_t dims = *numbers.take(1);
  if (dims != x->dims) Py_RETURN_NONE;
  const int64_t *strides = numbers.take(dims), *size = numbers.take(dims), *steps = numbers.take(dims);
  const auto dtype = static_cast<Dtype>(options[0]);
  const bool fake = options[1] != 0, is_static = options[2] != 0;
  Results results;
  void *out = results.add(dims, x->shape, strides, fake ? torchs(dtype) : aoti_torch_dtype_int8()), *scales, *zeros;
  if (is_static) {
    scales = scale.data<void>(), zeros = zero_point.data<void>();
  } else {
    scales = results.add(dims, size, steps, aoti_torch_dtype_float32());
    zeros = symmetric ? nullptr : results.add(dims, size, steps, aoti_torch_dtype_int32());
  }
  if (out == nullptr || scales == nullptr || (zeros == nullptr && !is_static && !symmetric)) Py_RETURN_NONE;
  Reference list = torch.list_of(results);
  if (!list) Py_RETURN_NONE;
  const Quantize args{
      x.data<void>(),  out, static_cast<float*>(scales), static_cast<int32_t*>(zeros), layout, dtype, fake, is_static,
      options[3] != 0, seed};
  return run([&] { cpu::quantize(args); }) ? list.release() : nullptr;
}

PyObject* new_dequantize_int8(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Torch torch;
  Numbers numbers;
  Operand operands[3];
  if (!check_count(count, 5) || !numbers.read(arguments[1], 20)) return nullptr;
  const auto& [values, scale, zero_point] = operands;
  if (!torch.read(arguments[0]) || !torch.describe(arguments + 2, operands, false)) Py_RETURN_NONE;
  const Int8Layout layout = Int8Layout::from(numbers.take(19));
  const auto dtype = static_cast<Dtype>(*numbers.take(1));
  const int64_t dims = *numbers.take(1);
  if (!values.is_given() || !scale.is_given() || dims != values->dims) Py_RETURN_NONE;
  Results results;
  void* out = results.add(dims, values->shape, numbers.take(dims), torchs(dtype));
  const Reference list = out == nullptr ? nullptr : torch.list_of(results);
  if (!list) Py_RETURN_NONE;
  Reference result(PyList_GetItem(list.get(), 0));
  Py_INCREF(result.get());
  const Dequantize args{values.data<int8_t>(), scale.data<float>(), zero_point.data<int32_t>(), out, layout, dtype};
  return run([&] { cpu::dequantize(args); }) ? result.release() : nullptr;
}

PyObject* new_int8_matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Torch torch;
  Operand operands[7];
  void* out = nullptr;
  if (!check_count(count, 9)) return nullptr;
  const auto& [a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias] = operands;
  if (!torch.read(arguments[0]) || torch.is_watched()) Py_RETURN_NONE;
  if (!torch.describe(arguments + 1, operands)) Py_RETURN_NONE;
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
  if (!torch.read(arguments[0]) || torch.is_watched()) Py_RETURN_NONE;
  if (!torch.describe(arguments + 1, operands)) Py_RETURN_NONE;
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
