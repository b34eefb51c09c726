// `import amp_kernels._C` runs the static registrations of the bindings, which serve torch's dispatcher; the module
// itself holds what takes Python objects.
#include "bindings/observe.h"

PyMODINIT_FUNC PyInit__C(void) {
  static PyMethodDef methods[] = {{"observe", amp_kernels::observe, METH_VARARGS, nullptr}, {}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
