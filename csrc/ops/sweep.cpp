#include "sweep.h"

#include <memory>

#include "columns.h"

namespace amp_kernels {
namespace {

PyObject* run_sweep(PyObject* arguments) {
  PyObject *parameters, *states, *groups, *keys, *tuple, *list = Py_None;
  int device_type, device_index;
  unsigned long long table, forms, checked;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O!(ii)KKKO|O", &PyList_Type, &parameters, &PyList_Type, &states, &PyList_Type,
                        &groups, &PyTuple_Type, &keys, &device_type, &device_index, &table, &forms, &checked, &tuple,
                        &list)) {
    return nullptr;
  }
  Torch torch;
  if (!torch.read(tuple)) return nullptr;
  auto held = std::make_unique<Held>();
  const Py_ssize_t count = PyList_Size(parameters);
  Columns columns(torch, held.get(), pointer_to(table), pointer_to(forms), pointer_to(checked), count,
                  {device_type, device_index});
  std::vector<Storages> storages(PyTuple_Size(keys));
  for (size_t g = 0; g < storages.size(); ++g)
    if (!storages[g].read(PyTuple_GetItem(keys, static_cast<Py_ssize_t>(g)))) return nullptr;
  for (Py_ssize_t t = 0; t < count; ++t) {
    const long group = PyLong_AsLong(PyList_GetItem(groups, t));
    if (PyTuple_GetItem(keys, group) == nullptr) return nullptr;
    PyObject *const parameter = PyList_GetItem(parameters, t), *const state = PyList_GetItem(states, t);
    if (!columns.take(t, parameter, state, group, storages[group])) return nullptr;
  }
  const auto gradients = static_cast<long long>(columns.gradients.size());
  if (list != Py_None) {
    const Object capsule(PyCapsule_New(
        held.get(), nullptr, [](PyObject* of) { delete static_cast<Held*>(PyCapsule_GetPointer(of, nullptr)); }));
    if (capsule.get() == nullptr) return nullptr;
    held.release();
    if (PyList_Append(list, capsule.get()) != 0) return nullptr;
  }
  return Py_BuildValue("(LL)", columns.unread, gradients);
}

}  // namespace

PyObject* sweep(PyObject*, PyObject* arguments) {
  return guarded([&] { return run_sweep(arguments); });
}

PyObject* apart(PyObject*, PyObject* arguments) {
  unsigned long long table, forms, checked, spans;
  long long count;
  int rows;
  if (!PyArg_ParseTuple(arguments, "KKLiKK", &table, &forms, &count, &rows, &checked, &spans)) return nullptr;
  return guarded([&] {
    return PyLong_FromLongLong(
        overlap(pointer_to(table), pointer_to(forms), count, rows, pointer_to(checked), pointer_to(spans)));
  });
}

PyObject* same(PyObject*, PyObject* arguments) {
  PyObject *lists, *copies, *states, *keys, *values;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O!O!", &PyList_Type, &lists, &PyList_Type, &copies, &PyDict_Type, &states,
                        &PyList_Type, &keys, &PyList_Type, &values)) {
    return nullptr;
  }
  const Py_ssize_t size = PyList_Size(lists);
  bool is_alike = size == PyList_Size(copies) && is_same_state(states, keys, values);
  for (Py_ssize_t i = 0; is_alike && i < size; ++i)
    is_alike = is_same(PyList_GetItem(lists, i), PyList_GetItem(copies, i));
  return PyBool_FromLong(is_alike);
}

}  // namespace amp_kernels
