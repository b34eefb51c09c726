// The warm step: a step whose optimizer, parameters and states are the objects of an earlier step. One call of C++
// reads their tensors again, and launches the kernels. amp_kernels/optim/_plan.py takes every other step.
#pragma once

#include "python.h"

namespace amp_kernels {

// make_step(torch: tuple, parameters: list, states: list, groups: list, storages: tuple, plan_params: list,
//           plan_keys: list, plan_values: list, options: list, modes: callable, increment_version: callable,
//           device: tuple, stream: int, rows: int, squares: int, words: int, checked: int, spans: int, record: int,
//           found_inf: int, norm: int, family: str, layouts: list, kept: tuple) -> capsule
//
// The caller keeps the arguments as long as the capsule. `kept` holds the memory of all addresses. `options` has a
// tuple (name, value, name, value, ...) for each group. A layout is (key, block, entries, partials, chunk_size,
// buckets), with an address for each of the first four. A bucket is (Form, number of chunks).
PyObject* make_step(PyObject* module, PyObject* arguments);

// step(capsule, optimizer, grad_scale, found_inf, max_norm, work) -> Answer. `work` is a sum of `Work`.
PyObject* step(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

enum Work {
  kRead = 1,    // read the tensors. Without it, those that a call with kKeep has read are used
  kPass = 2,    // run the gradient pass
  kClear = 4,   // the pass is the first over these gradients (GradientPass::clear)
  kUpdate = 8,  // update the parameters
  kWrite = 16,  // the pass writes the gradients
  kKeep = 32,   // keep what was read for the next call
};

enum Answer {
  kTaken,
  kChanged,    // nothing was done: an option has another value. Python has to make the capsule again
  kForPython,  // nothing was done: Python has to take this step
};

}  // namespace amp_kernels
