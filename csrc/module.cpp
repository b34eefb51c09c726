// `import amp_kernels._C` runs the static registrations of the bindings; the module itself is empty.
// torch's build flags set Py_LIMITED_API too; the wheel's tag says cp310 (setup.py).
#ifdef Py_LIMITED_API
#undef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
