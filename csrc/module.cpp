// `import amp_kernels._C` runs the static registrations of the bindings, which serve torch's dispatcher; the module
// itself holds what takes Python objects.
#include "bindings/direct.h"
#include "bindings/observe.h"
#ifdef USE_CUDA
#include "cuda/kernels.h"
#endif

namespace {

template <class F>
PyMethodDef fast_call(const char* name, F* function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

#ifdef USE_CUDA
// Why nothing of this binary runs on the current device; "" if it does.
PyObject* why_no_kernel(PyObject*, PyObject*) {
  return PyUnicode_FromString(amp_kernels::cuda::why_no_kernel().c_str());
}
#endif

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  using namespace amp_kernels;
  static PyMethodDef methods[] = {{"observe", observe, METH_VARARGS, nullptr},
                                  fast_call("are_plain", are_plain),
                                  fast_call("new_quantize_int8", new_quantize_int8),
                                  fast_call("new_dequantize_int8", new_dequantize_int8),
                                  fast_call("new_int8_matmul", new_int8_matmul),
                                  fast_call("new_int8_linear", new_int8_linear),
#ifdef USE_CUDA
                                  {"why_no_kernel", why_no_kernel, METH_NOARGS, nullptr},
#endif
                                  {}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
