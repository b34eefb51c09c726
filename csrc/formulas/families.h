// The update families: a new optimizer's formula is added to this list, and to that of amp_kernels/families.py.
#pragma once

#include <stdexcept>
#include <string_view>

#include "adam.h"
#include "rmsprop.h"
#include "sgd.h"

namespace amp_kernels {

template <class... Formulas>
struct FamilyList {
  // Calls f with Type<Formula>{} of the formula that has this name.
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
