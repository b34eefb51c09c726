// The layout of an int8 call: the strides of results and scales, and the Int8Layout (csrc/int8.h), from which kernels
// compute where the elements of a group are. amp_kernels/ops/int8.py has the same arithmetic in Python, which tracing
// and Triton use. tests/int8/test_int8.py compares the two.
//
// If x is dense, results have the strides of x. Otherwise results are row-major. Kernels see a tensor as three axes,
// [outer][reduced][inner] (csrc/int8.h). Which tensors kernels read and write depends on x and its groups:
//
//   x                                               kernels read               results
//   dense, three axes describe the groups           x                          written directly
//   has gaps or expanded dimensions                 a row-major copy           written directly
//   groups need more than three axes                a copy in which each       copied to their strides
//                                                   group is a row
//   dense but not row-major, and kernels use        a row-major copy           copied to their strides
//   random bits, numbered in row-major order
//
// If two of these cases apply to x, the later one counts. With random bits the third case never applies (see
// Plan::layout).
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "../int8.h"
#include "operand.h"

namespace amp_kernels {

using Dims = std::vector<int64_t>;

// How a tensor is divided into groups. The elements of a group share a scale. Two elements are in one group if their
// indices differ only in reduced dimensions. If there are blocks, only the last dimension is reduced, and each group is
// a block of it.
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

// Returns the dimensions from the outermost to the innermost. If two strides are equal, the dimension with the smaller
// index is the outer one.
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
    if (groups.shape[*d] <= 1) continue;   // a size of 0 counts as 1, as in dense_strides
    const bool is_group_axis = axis != 1;  // `inner` and `outer` take dimensions that are kept
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
  // If each element is a group of its own, the layout has one row, and every element is a column of it.
  if (reduced == 1) return Int8Layout{1, 1, outer * inner, row};
  return Int8Layout{outer, reduced, inner, row};
}

struct Plan {
  // `is_numbered`: whether kernels number the elements in row-major order, for random bits.
  Plan(const Groups& groups, const Operand& x, bool is_numbered = false) {
    const Dims by_rows = row_major(groups.shape);
    out = x.is_dense() ? dense_strides(groups.shape, storage_order(Dims(x.strides, x.strides + x.dims))) : by_rows;
    walk = is_numbered ? by_rows : out;
    layout = layout_of(groups, walk);
    if (!layout.has_value() && !is_numbered) {
      Dims order = storage_order(out);  // if all kept dimensions are outer ones, each group is a row
      std::stable_partition(order.begin(), order.end(), [&](int64_t d) { return groups.kept[d]; });
      walk = dense_strides(groups.shape, order);
      layout = layout_of(groups, walk);
    }
    scale = dense_strides(groups.scale_shape(), storage_order(walk));
  }

  Dims out;    // strides of results
  Dims walk;   // strides of the tensors that kernels read and write, which may be copies
  Dims scale;  // strides of scales, which put them in the order in which kernels number the groups

  // The layout is nullopt only if is_numbered is true, and the groups need more than three axes in row-major order.
  std::optional<Int8Layout> layout;
};

}  // namespace amp_kernels
