// The module amp_kernels._C. When it is imported, static initializers in csrc/ops register the operators with torch's
// dispatcher. The functions of the module itself take Python objects.
#include "ops/lists.h"
#include "ops/step.h"
#include "ops/sweep.h"
#ifdef USE_CUDA
#include "ops/on_gpu.h"
#endif

#ifdef USE_CUDA
namespace {

// Returns why this binary has no kernels for the GPU with this index, or an empty string if it has kernels for it.
PyObject* why_no_kernel(PyObject*, PyObject* gpu) {
  const long index = PyLong_AsLong(gpu);
  if (index == -1 && PyErr_Occurred() != nullptr) return nullptr;
  try {
    return PyUnicode_FromString(amp_kernels::cuda::why_not_on(static_cast<int32_t>(index)).c_str());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // namespace
#endif

PyMODINIT_FUNC PyInit__C(void) {
  using namespace amp_kernels;
  static PyMethodDef methods[] = {
      {"sweep", sweep, METH_VARARGS, nullptr},
      {"apart", apart, METH_VARARGS, nullptr},
      {"same", same, METH_VARARGS, nullptr},
      {"gradient_pass", gradient_pass, METH_VARARGS, nullptr},
      {"update", update, METH_VARARGS, nullptr},
      {"make_step", make_step, METH_VARARGS, nullptr},
      {"step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(step)), METH_FASTCALL, nullptr},
#ifdef USE_CUDA
      {"why_no_kernel", why_no_kernel, METH_O, nullptr},
#endif
      {}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
