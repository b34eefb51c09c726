// From the shape and strides of a tensor to the Int8Layout that kernels walk, whose axes are drawn in csrc/int8.h.
// amp_kernels/ops/int8.py has the same arithmetic for Triton, and for the compiler, which has to know the strides of
// results; tests/test_int8.py compares the two.
//
// Dimensions are sorted by their strides in the result, and neighbours that are one in memory are merged. If at most
// the four axes of a layout are left, and the innermost one is contiguous in x, x is read in place. Otherwise it is
// copied:
// - into the strides of the result, where only x has gaps or another order;
// - with its kept dimensions outside, where kept and reduced dimensions of the result alternate more often than the
// four
//   axes do. Every group is then a row, and the result has these strides.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "../int8.h"

namespace amp_kernels {

using Dims = std::vector<int64_t>;

// Elements share a scale if their indices differ in reduced dimensions only, or if they are in one block of the last
// dimension.
struct Groups {
  Dims shape;
  std::vector<bool> kept;  // of each dimension; all true where there are blocks
  int64_t block = 0;       // elements of a block; 0: no blocks

  int64_t dims() const { return static_cast<int64_t>(shape.size()); }
  int64_t blocks() const { return (shape.back() + block - 1) / block; }

  Dims scale_shape() const {
    Dims sizes(shape);
    for (int64_t d = 0; d < dims(); ++d)
      if (!kept[d]) sizes[d] = 1;
    if (block > 0) sizes.back() = blocks();
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

// The dimensions from the outermost to the innermost. Where strides are equal (dimensions of size 1) the first one
// counts as the outer one.
inline Dims storage_order(const Dims& strides) {
  Dims order(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

// Strides of a dense tensor with the same order of dimensions: row-major if one of them is expanded.
inline Dims nearest_dense(const Dims& shape, const Dims& strides) {
  for (size_t d = 0; d < shape.size(); ++d)
    if (strides[d] == 0 && shape[d] > 1) return row_major(shape);
  return dense_strides(shape, storage_order(strides));
}

// Whether kept and reduced dimensions of a dense tensor alternate more often than the four axes of a layout.
inline bool alternates_too_often(const Groups& groups, const Dims& strides) {
  const Dims order = storage_order(strides);
  int64_t runs = 0;
  bool is_kept = false, inside = true;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (groups.shape[*d] == 1) continue;
    if (inside && groups.kept[*d]) runs = 1;  // the inner reduced axis is not needed
    if (inside || groups.kept[*d] != is_kept) ++runs;
    is_kept = groups.kept[*d], inside = false;
  }
  return runs > Int8Layout::kAxes;
}

// Strides of a dense tensor in which every group is a row.
inline Dims strides_of_rows(const Groups& groups) {
  Dims order(groups.shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_partition(order.begin(), order.end(), [&](int64_t d) { return groups.kept[d]; });
  return dense_strides(groups.shape, order);
}

// Scales have the order of their groups in `out`, so that kept dimensions which merge there merge here.
inline Dims scale_strides(const Groups& groups, const Dims& out) {
  return dense_strides(groups.scale_shape(), storage_order(out));
}

// One dimension, or several that are walked as one.
struct Dimension {
  int64_t size, x, out, scale;
  bool kept;

  // Whether this one and `inner` are one in memory: in every tensor a step of this one goes as far as all of `inner`.
  bool continues_in(const Dimension& inner) const {
    return kept == inner.kept && x == inner.x * inner.size && out == inner.out * inner.size &&
           scale == inner.scale * inner.size;
  }
};

// The layout of a tensor with the strides `x`, a dense result with the strides `out` and scales with those of
// scale_strides(); nullopt if x cannot be read in place.
inline std::optional<Int8Layout> layout_of(const Groups& groups, const Dims& x, const Dims& out, const Dims& scale) {
  std::vector<Dimension> dims, merged;
  for (const int64_t d : storage_order(out))
    dims.push_back({groups.shape[d], x[d], out[d], groups.kept[d] ? scale[d] : 0, groups.kept[d]});
  int64_t ragged = 0;  // the length of rows whose last block is shorter than the others
  if (groups.block > 0) {
    const Dimension last = dims.back();  // of a contiguous result
    const int64_t count = groups.blocks(), size = count > 1 ? groups.block : last.size;
    dims.back() = {count, last.x * size, last.out * size, last.scale, true};
    dims.push_back({size, last.x, last.out, 0, false});
    ragged = count * size == last.size ? 0 : last.size;
  }
  const size_t mergeable =
      ragged > 0 ? dims.size() - 2 : dims.size();  // Int8Layout::length is that of one row's blocks
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i].size == 1) continue;
    if (i < mergeable && !merged.empty() && merged.back().continues_in(dims[i])) {
      dims[i].size *= merged.back().size;
      merged.pop_back();
    }
    merged.push_back(dims[i]);
  }
  if (!merged.empty() && merged.back().x != 1) return std::nullopt;
  Int8Layout layout{{1, 1, 1, 1}, {}, {}, {}, 0};
  int axis = Int8Layout::kInnerReduced;
  for (; !merged.empty(); merged.pop_back(), --axis) {
    const Dimension& dim = merged.back();
    const bool is_group_axis = axis == Int8Layout::kOuterGroup || axis == Int8Layout::kInnerGroup;
    if (dim.kept != is_group_axis) --axis;
    if (axis < 0) return std::nullopt;
    layout.size[axis] = dim.size;
    layout.x[axis] = dim.x;
    layout.out[axis] = dim.out;
    if (dim.kept) layout.scale[axis / 2] = dim.scale;
  }
  layout.length = ragged > 0 ? ragged : layout.size[Int8Layout::kInnerGroup] * layout.size[Int8Layout::kInnerReduced];
  return layout;
}

}  // namespace amp_kernels
