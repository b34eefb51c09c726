// Where the elements of an int8 call lie: the strides of results and of scales, and the Int8Layout that kernels walk
// (csrc/int8.h). amp_kernels/ops/int8.py has the same arithmetic, for tracing and for Triton; tests/int8/test_int8.py
// compares the two.
//
// Results have the strides of x if x is dense, else they are row-major. If three axes describe the groups of a tensor
// with these strides, kernels read x and write results there. Other x are copied first:
//
//   x                                               kernels read               results
//   dense, three axes                               x                          written in place
//   gaps or expanded dimensions                     a row-major copy           written in place
//   groups need more than three axes                a copy in which each       copied into their strides
//                                                   group is a row
//   random bits, which are numbered in row-major    a row-major copy           copied into their strides
//   order, and x has another order
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "../int8.h"
#include "operand.h"

namespace amp_kernels {

using Dims = std::vector<int64_t>;

// Elements share a scale if their indices differ in reduced dimensions only. With blocks the last dimension is the
// reduced one, and is cut.
struct Groups {
  Dims shape;
  std::vector<bool> kept;  // of each dimension: not reduced
  int64_t block = 0;       // elements of a block; 0: no blocks

  int64_t dims() const { return static_cast<int64_t>(shape.size()); }

  Dims scale_shape() const {
    Dims sizes(shape);
    for (int64_t d = 0; d < dims(); ++d)
      if (!kept[d]) sizes[d] = 1;
    if (block > 0) sizes.back() = (shape.back() + block - 1) / block;
    return sizes;
  }
};

// Strides of a dense tensor that has its dimensions in this order, the outermost first.
inline Dims dense_strides(const Dims& shape, const Dims& order) {
  Dims strides(shape.size());
  int64_t step = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = step;
    step *= std::max<int64_t>(1, shape[*d]);
  }
  return strides;
}

inline Dims row_major(const Dims& shape) {
  Dims order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  return dense_strides(shape, order);
}

// The dimensions from the outermost to the innermost. Of equal strides the first one counts as the outer one.
inline Dims storage_order(const Dims& strides) {
  Dims order(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

// The layout of a dense tensor with these strides; nullopt if it takes more than three axes.
inline std::optional<Int8Layout> layout_of(const Groups& groups, const Dims& strides) {
  int64_t sizes[] = {1, 1, 1};  // inner, reduced, outer
  int axis = 0;
  const Dims order = storage_order(strides);
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (groups.shape[*d] <= 1) continue;  // where a size is 0, strides are as if it were 1
    const bool is_group_axis = axis != 1;
    if (groups.kept[*d] != is_group_axis) ++axis;
    if (axis > 2) return std::nullopt;
    sizes[axis] *= groups.shape[*d];
  }
  auto [inner, reduced, outer] = sizes;
  int64_t row = inner * reduced * outer;
  if (groups.block > 0 && reduced > groups.block) {
    if (inner > 1) return std::nullopt;
    if (reduced % groups.block != 0) row = reduced;
    outer *= groups.scale_shape().back();
    reduced = groups.block;
  }
  if (reduced == 1) return Int8Layout{1, 1, outer * inner, row};  // each element has a scale: neighbours are columns
  return Int8Layout{outer, reduced, inner, row};
}

struct Plan {
  // is_numbered: whether kernels number elements in row-major order, for random bits.
  Plan(const Groups& groups, const Operand& x, bool is_numbered = false) {
    const Dims by_rows = row_major(groups.shape);
    out = x.is_dense() ? dense_strides(groups.shape, storage_order(Dims(x.strides, x.strides + x.dims))) : by_rows;
    walk = is_numbered ? by_rows : out;
    layout = layout_of(groups, walk);
    if (!layout.has_value() && !is_numbered) {
      Dims order = storage_order(out);  // with kept dimensions outside every group is a row
      std::stable_partition(order.begin(), order.end(), [&](int64_t d) { return groups.kept[d]; });
      walk = dense_strides(groups.shape, order);
      layout = layout_of(groups, walk);
    }
    scale = dense_strides(groups.scale_shape(), storage_order(walk));
  }

  Dims out;                          // strides of results
  Dims walk;                         // strides of what kernels read and write: those of `out`, or of copies
  Dims scale;                        // strides of scales: groups in the order in which kernels number them
  std::optional<Int8Layout> layout;  // nullopt: numbered, and the groups of row-major memory need more than three axes
};

}  // namespace amp_kernels
