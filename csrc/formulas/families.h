// The formulas of the update families. A new optimizer adds its formula to `Families` below and to
// amp_kernels/families.py.
//
// A formula is a struct that updates one element in fp32:
//
//   kName       name of the family
//   kStates     the largest number of states that a parameter can have
//   kRequired   the number of states that every parameter has. They come first
//   kCodes      how each state is stored in 8 bits (states.h)
//   Formula(hyper, lr, factor, step, has)
//               hyper-parameters and learning rate of the parameter's group. factor * g is the unscaled, clipped
//               gradient. step is the number of updates before this one. has[k] says whether the parameter has the k-th
//               state
//   operator()(p, g, s)
//               returns the new parameter; g is its gradient. Replaces the states s by the new ones
#pragma once

#include <stdexcept>
#include <string_view>

#include "adam.h"
#include "rmsprop.h"
#include "sgd.h"

namespace amp_kernels {

template <class... Formulas>
struct FamilyList {
  // Calls f with Type<Formula>{} for the formula that has this name.
  template <class F>
  static void with(std::string_view name, const F& f) {
    const bool is_known = (... || (name == Formulas::kName && (f(Type<Formulas>{}), true)));
    if (!is_known) throw std::invalid_argument("amp_kernels: no update family has this name");
  }

  template <class Formula>
  struct Type {
    using type = Formula;
  };
};

using Families = FamilyList<SgdFormula, RmspropFormula, AdamFormula>;

}  // namespace amp_kernels
