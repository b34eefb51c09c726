// From the dimensions of a tensor to the Int8Layout that kernels walk. amp_kernels/ops/int8.py has the same arithmetic
// for Triton and for what the compiler has to know of results; tests/test_int8.py compares the two.
//
//   dimensions      sorted by their strides in the result; neighbours that are one in memory are merged:
//   and levels
//                   [B, T, C] by row        G    G    R         one level G1 (or G1, G2) of rows R2
//                   [B, T, C] per channel   R    R    G         rows R1 of columns G2
//                   [E, N, K] per column    G    R    G         G1 of rows R1 of columns G2
//                   [N, C, H, W] dim=(0, 2, 3)
//                                           R    G    R    R    R1 of channels G2 of rows R2
//
// Where x has gaps that need a fifth level, it is copied. Where kept (G) and reduced (R) dimensions alternate more
// often than that, x is copied with its kept dimensions outside: every group is a row then, and the result keeps these
// strides.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "../int8.h"

namespace amp_kernels {

using Dims = std::vector<int64_t>;

// What shares a scale: the elements that differ in reduced dimensions alone, or in blocks of the last dimension.
struct Groups {
  Dims shape;
  std::vector<bool> kept;  // by dimension; all of them where there are blocks
  int64_t block = 0;       // 0: none

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

// Dense strides of tensors whose dimensions lie in this order, the outermost first.
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

// The dimensions from the outermost to the innermost; of equal strides, as those of dimensions of size 1 are, the first
// is outside.
inline Dims storage_order(const Dims& strides) {
  Dims order(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

// Of the dense layout nearest to these strides: row-major if one dimension is expanded.
inline Dims nearest_dense(const Dims& shape, const Dims& strides) {
  for (size_t d = 0; d < shape.size(); ++d)
    if (strides[d] == 0 && shape[d] > 1) return row_major(shape);
  return dense_strides(shape, storage_order(strides));
}

// Whether kept and reduced dimensions of a dense tensor alternate too often for the levels G1, R1, G2, R2.
inline bool interlock(const Groups& groups, const Dims& strides) {
  const Dims order = storage_order(strides);
  int64_t runs = 0;
  bool is_kept = false, inside = true;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (groups.shape[*d] == 1) continue;
    if (inside && groups.kept[*d]) runs = 1;  // R2 is not needed
    if (inside || groups.kept[*d] != is_kept) ++runs;
    is_kept = groups.kept[*d], inside = false;
  }
  return runs > Int8Layout::kLevels;
}

// Every group is a row.
inline Dims strides_of_rows(const Groups& groups) {
  Dims order(groups.shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_partition(order.begin(), order.end(), [&](int64_t d) { return groups.kept[d]; });
  return dense_strides(groups.shape, order);
}

// Scales lie in the order of their groups, so that kept dimensions that are one in `out` are one here.
inline Dims scale_strides(const Groups& groups, const Dims& out) {
  return dense_strides(groups.scale_shape(), storage_order(out));
}

// Some dimensions, or one, that are walked as one.
struct Level {
  int64_t size, x, out, scale;
  bool kept;

  // Whether `inner` goes on where it ends, in all tensors.
  bool continues_in(const Level& inner) const {
    return kept == inner.kept && x == inner.x * inner.size && out == inner.out * inner.size &&
           scale == inner.scale * inner.size;
  }
};

// For these strides of x, of the dense result and of scales as scale_strides says; nullopt if x needs more levels.
inline std::optional<Int8Layout> layout_of(const Groups& groups, const Dims& x, const Dims& out, const Dims& scale) {
  std::vector<Level> dims, levels;
  for (const int64_t d : storage_order(out))
    dims.push_back({groups.shape[d], x[d], out[d], groups.kept[d] ? scale[d] : 0, groups.kept[d]});
  int64_t ragged = 0;  // the length of rows that blocks do not divide
  if (groups.block > 0) {
    const Level last = dims.back();  // of a contiguous result
    const int64_t count = groups.blocks(), size = count > 1 ? groups.block : last.size;
    dims.back() = {count, last.x * size, last.out * size, last.scale, true};
    dims.push_back({size, last.x, last.out, 0, false});
    ragged = count * size == last.size ? 0 : last.size;
  }
  const size_t apart = ragged > 0 ? dims.size() - 2 : dims.size();  // the length counts blocks of one row
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i].size == 1) continue;
    if (i < apart && !levels.empty() && levels.back().continues_in(dims[i])) {
      dims[i].size *= levels.back().size;
      levels.pop_back();
    }
    levels.push_back(dims[i]);
  }
  Int8Layout layout{{1, 1, 1, 1}, {}, {}, {}, {}, 0};
  int place = Int8Layout::kR2;
  for (; !levels.empty(); levels.pop_back(), --place) {
    const Level& level = levels.back();
    const bool is_kept_place = place == Int8Layout::kG1 || place == Int8Layout::kG2;
    if (level.kept != is_kept_place) --place;
    if (place < 0) return std::nullopt;
    layout.size[place] = level.size;
    layout.x[place] = level.x;
    layout.out[place] = layout.index[place] = level.out;
    if (level.kept) layout.scale[place / 2] = level.scale;
  }
  layout.length = ragged > 0 ? ragged : layout.size[Int8Layout::kG2] * layout.size[Int8Layout::kR2];
  return layout;
}

}  // namespace amp_kernels
