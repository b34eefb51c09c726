// The layout of an int8 call: the strides of results and scales, and the Int8Layout by which kernels find the elements
// (csrc/int8.h). amp_kernels/ops/int8.py has the same arithmetic, for tracing and for Triton; tests/int8/test_int8.py
// compares the two.
//
// If x is dense, results have its strides; otherwise they are row-major. Kernels see three axes,
// [outer][reduced][inner] (csrc/int8.h). If these describe the groups of a tensor with the strides of the results,
// kernels read x and write the results directly. Otherwise they read a copy of x:
//
//   x                                               kernels read               results
//   dense, three axes describe the groups           x                          written directly
//   gaps or expanded dimensions                     a row-major copy           written directly
//   groups need more than three axes                a copy in which each       copied to their strides
//                                                   group is a row
//   not row-major, with random bits: these are      a row-major copy           copied to their strides
//   numbered in row-major order
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "../int8.h"
#include "operand.h"

namespace amp_kernels {

using Dims = std::vector<int64_t>;

// Elements share a scale if their indices differ in reduced dimensions only. With blocks, only the last dimension is
// reduced, and it is cut into blocks.
struct Groups {
  Dims shape;
  std::vector<bool> kept;  // for each dimension, whether it is not reduced
  int64_t block = 0;       // elements in a block; 0: no blocks

  int64_t dims() const { return static_cast<int64_t>(shape.size()); }

  Dims scale_shape() const {
    Dims sizes(shape);
    for (int64_t d = 0; d < dims(); ++d)
      if (!kept[d]) sizes[d] = 1;
    if (block > 0) sizes.back() = (shape.back() + block - 1) / block;
    return sizes;
  }
};

// Returns the strides of a dense tensor whose dimensions lie in memory in this order, the outermost first.
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

// Returns the dimensions from the outermost to the innermost. If two strides are equal, the first dimension is outside.
inline Dims storage_order(const Dims& strides) {
  Dims order(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

// Returns the layout of a dense tensor with these strides; nullopt if its groups need more than three axes.
inline std::optional<Int8Layout> layout_of(const Groups& groups, const Dims& strides) {
  int64_t sizes[] = {1, 1, 1};  // inner, reduced, outer
  int axis = 0;
  const Dims order = storage_order(strides);
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (groups.shape[*d] <= 1) continue;   // dense_strides, too, takes a size of 0 for 1
    const bool is_group_axis = axis != 1;  // `inner` and `outer` hold dimensions that are kept
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
  // If each element is a group of its own, the kernels walk by columns.
  if (reduced == 1) return Int8Layout{1, 1, outer * inner, row};
  return Int8Layout{outer, reduced, inner, row};
}

struct Plan {
  // is_numbered: kernels number the elements in row-major order, for random bits.
  Plan(const Groups& groups, const Operand& x, bool is_numbered = false) {
    const Dims by_rows = row_major(groups.shape);
    out = x.is_dense() ? dense_strides(groups.shape, storage_order(Dims(x.strides, x.strides + x.dims))) : by_rows;
    walk = is_numbered ? by_rows : out;
    layout = layout_of(groups, walk);
    if (!layout.has_value() && !is_numbered) {
      Dims order = storage_order(out);  // with the kept dimensions outermost, each group is a row
      std::stable_partition(order.begin(), order.end(), [&](int64_t d) { return groups.kept[d]; });
      walk = dense_strides(groups.shape, order);
      layout = layout_of(groups, walk);
    }
    scale = dense_strides(groups.scale_shape(), storage_order(walk));
  }

  Dims out;    // strides of results
  Dims walk;   // strides of the tensors that kernels read and write, which may be copies
  Dims scale;  // strides of scales; their order in memory is that in which kernels number groups

  // Without a layout, is_numbered is true, and in row-major order the groups need more than three axes.
  std::optional<Int8Layout> layout;
};

}  // namespace amp_kernels
