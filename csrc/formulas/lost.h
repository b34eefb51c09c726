// Which updates a 16-bit weight would lose without a master: the weight plus the change of its master, rounded to the
// dtype of the weight, is the weight again. The change is at most about half a unit in the last place of the weight.
//
// Kernels count these updates before the update, and write nothing but the counts (`_count_updates_` in
// amp_kernels/ops/update.py). `count_lost` in amp_kernels/reference/_master.py is the specification.
#pragma once

#include <stdexcept>

#include "../table.h"

namespace amp_kernels {

// Only 16-bit weights with remainders have a master that a kernel can compare with the weight.
inline void require_remainders(const Form& form) {
  if (form.param_dtype == kFloat || !form.split)
    throw std::invalid_argument("amp_kernels: _count_updates_ must be called for 16-bit weights with remainders");
}

// Returns whether an update is lost. If the arguments are vectors, returns a mask.
//
//   weight         the 16-bit weight, converted to fp32
//   master, next   the master before the update, and after it. If they are equal, nothing is lost
//   round(x)       rounds x to the dtype of the weight, and returns the result in fp32
template <class Number, class Round>
AMP_KERNELS_HD auto is_lost(const Number& weight, const Number& master, const Number& next, const Round& round) {
  return (next != master) & (round(weight + (next - master)) == weight);
}

}  // namespace amp_kernels
