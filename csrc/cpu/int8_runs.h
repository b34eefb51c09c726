// How the int8 kernels walk an Int8Layout on a CPU: in runs of elements that are dense in `out`. Where the innermost
// level is reduced, a run belongs to one group; where it is kept (columns), each element belongs to the next group.
#pragma once

#include <algorithm>
#include <vector>

#include "../formulas/int8.h"
#include "prefetch.h"

namespace amp_kernels::cpu {

constexpr int64_t kRun = 1024;           // elements at most, but of strips: staged as fp32, they stay in L1
constexpr int64_t kColumnRun = 256;      // across groups: 16 cache lines, as many as a core can wait for at once
constexpr int64_t kStripRows = 8;        // across groups, read side by side
constexpr int64_t kGroups = 4096;        // of a bundle at most
constexpr int64_t kRoom = kGroups + 16;  // of an array for them: 2^n apart, all would lie in the same sets of the L1
constexpr int64_t kBundleSize = 4096;    // elements of a bundle of short groups, which are read twice in L1
constexpr int64_t kOneThread = 1 << 16;  // elements, below which waking a second thread costs more than it saves

struct Run {
  int64_t x, out, index;  // offsets of the first element
  int64_t n;
  int64_t group;  // of the bundle, that of the first element
};

// Neighbouring groups that are walked together, row by row.
struct Bundle {
  int64_t x, out, index, scale;  // offsets of the first element of the first group
  int64_t groups;
  int64_t rows;
  int64_t length;       // of a row, in elements
  int64_t last_length;  // of the last row
};

// A bundle is a group with rows along R1; or some columns with rows along R1; or, where groups are short, some whole
// groups, each of them a row.
class Walk {
 public:
  explicit Walk(const Int8Layout& layout)
      : layout_(layout),
        across_(layout.size[Int8Layout::kR2] == 1 && layout.size[Int8Layout::kG2] > 1),
        inner_(across_ ? Int8Layout::kG2 : Int8Layout::kR2),
        outer_(!across_ && layout.size[Int8Layout::kR1] == 1 ? Int8Layout::kG2 : Int8Layout::kR1) {
    const int64_t short_groups = std::max<int64_t>(1, std::min(kGroups, kBundleSize / row_size()));
    most_groups_ = across_ ? kGroups : outer_ == Int8Layout::kG2 ? short_groups : 1;
    strips_ = (layout.size[Int8Layout::kG2] + most_groups_ - 1) / most_groups_;
  }

  bool across() const { return across_; }
  int64_t bundles() const { return layout_.size[Int8Layout::kG1] * strips_; }
  int64_t x_step() const { return layout_.x[inner_]; }
  int64_t row_step() const { return layout_.x[outer_]; }
  int64_t out_row_step() const { return layout_.out[outer_]; }
  int64_t index_step() const { return layout_.index[inner_]; }
  int64_t scale_step() const { return layout_.scale[1]; }

  // Whether what is written goes past the caches (convert.h): it is too large to be found there.
  bool streams() const { return bundles() * bundle_size() >= 1 << 22; }

  // How many bytes ahead of what is read a pass asks for memory: whole rows where it reads several side by side, and
  // where it reads one after the other none, unless the core needs it (with 8 KiB the two passes over 16M fp32 took a
  // Zen 4 2.9 to 3.7 ms, without 2.3 to 3.2).
  int64_t ahead(const Bundle& bundle, int64_t element_size) const {
    if (!across_) return asks_ahead() ? kBytesAhead : 0;
    const int64_t row = bundle.length * element_size;
    return std::max(kStripRows, (kBytesAhead + row - 1) / row) * row_step() * element_size;
  }

  // Of the largest bundle.
  int64_t bundle_size() const {
    const int64_t groups = std::min(most_groups_, layout_.size[Int8Layout::kG2]);
    return groups * layout_.size[Int8Layout::kR1] * layout_.size[Int8Layout::kR2];
  }

  Bundle bundle(int64_t i) const {
    const int64_t g1 = i / strips_, g2 = (i - g1 * strips_) * most_groups_;
    const int64_t groups = std::min(most_groups_, layout_.size[Int8Layout::kG2] - g2);
    const int64_t length = across_ ? groups : row_size();
    const int64_t end = (g2 + groups) * layout_.size[Int8Layout::kR2];
    return {at(layout_.x, g1, g2),
            at(layout_.out, g1, g2),
            at(layout_.index, g1, g2),
            g1 * layout_.scale[0] + g2 * layout_.scale[1],
            groups,
            outer_ == Int8Layout::kG2 ? groups : layout_.size[Int8Layout::kR1],
            length,
            across_ ? length : length - std::max<int64_t>(0, end - layout_.length)};
  }

  int64_t size(const Bundle& bundle) const {
    return outer_ == Int8Layout::kG2 ? (bundle.rows - 1) * bundle.length + bundle.last_length
                                     : bundle.rows * bundle.last_length;
  }

  // The runs of elements [begin, end) of a bundle, counted row by row.
  template <class F>
  void for_each_run(const Bundle& bundle, int64_t begin, int64_t end, const F& f) const {
    if (across_) return for_each_run_across(bundle, begin / bundle.length, end / bundle.length, f);
    const bool is_row_a_group = outer_ == Int8Layout::kG2;
    const int64_t length = is_row_a_group ? bundle.length : bundle.last_length;
    // Copies, and sums in place of products: with groups of 128 elements finding a run took as long as reading it.
    const Run along = steps(inner_), down = steps(outer_);
    int64_t row = begin == 0 ? 0 : begin / length;
    int64_t column = begin - row * length;
    Run at = run(bundle, row, column, 0, is_row_a_group ? row : 0);
    for (int64_t left = end - begin; left > 0; left -= at.n) {
      at.n = std::min({length - column, left, kRun});
      f(at);
      column += at.n;
      at.x += at.n * along.x, at.out += at.n * along.out, at.index += at.n * along.index;
      if (column < length) continue;
      column = 0;
      at.x += down.x - length * along.x, at.out += down.out - length * along.out;
      at.index += down.index - length * along.index, at.group += is_row_a_group;
    }
  }

  // Whether elements [begin, end) of a bundle are whole groups, each of them a row.
  bool are_rows_groups(const Bundle& bundle, int64_t begin, int64_t end) const {
    return !across_ && outer_ == Int8Layout::kG2 && begin == 0 && end == size(bundle);
  }

  // From a row to the next.
  Run down() const { return steps(outer_); }

  // These rows, however long. With groups of 128 elements finding runs took as long as reading them.
  template <class F>
  void for_each_row(const Bundle& bundle, const F& f) const {
    const Run down = steps(outer_);
    Run row{bundle.x, bundle.out, bundle.index, bundle.length, 0};
    for (; row.group < bundle.rows; ++row.group) {
      if (row.group + 1 == bundle.rows) row.n = bundle.last_length;
      f(row);
      row.x += down.x, row.out += down.out, row.index += down.index;
    }
  }

  // Across groups, the elements [begin, end) of a bundle as strips of so many whole rows: calls f(first row, rows).
  template <class F>
  void for_each_strip(const Bundle& bundle, int64_t begin, int64_t end, const F& f) const {
    const int64_t end_row = end / bundle.length;
    for (int64_t row = begin / bundle.length; row < end_row; row += kStripRows)
      f(run(bundle, row, 0, bundle.length, 0), std::min(kStripRows, end_row - row));
  }

 private:
  // A few rows at a time through all columns, so that what the columns need stays in L1 for these rows, and memory is
  // still read in long rows.
  template <class F>
  void for_each_run_across(const Bundle& bundle, int64_t begin, int64_t end, const F& f) const {
    constexpr int64_t kRows = 8;
    for (int64_t block = begin; block < end; block += kRows)
      for (int64_t column = 0; column < bundle.length; column += kColumnRun)
        for (int64_t row = block; row < std::min(block + kRows, end); ++row)
          f(run(bundle, row, column, std::min(kColumnRun, bundle.length - column), column));
  }

  Run steps(int level) const { return {layout_.x[level], layout_.out[level], layout_.index[level], 0, 0}; }

  Run run(const Bundle& bundle, int64_t row, int64_t column, int64_t n, int64_t group) const {
    const auto offset = [&](int64_t first, const int64_t* strides) {
      return first + row * strides[outer_] + column * strides[inner_];
    };
    return {offset(bundle.x, layout_.x), offset(bundle.out, layout_.out), offset(bundle.index, layout_.index), n,
            group};
  }

  int64_t row_size() const { return across_ ? layout_.size[Int8Layout::kG2] : layout_.size[Int8Layout::kR2]; }

  static int64_t at(const int64_t* strides, int64_t g1, int64_t g2) {
    return g1 * strides[Int8Layout::kG1] + g2 * strides[Int8Layout::kG2];
  }

  Int8Layout layout_;
  bool across_;
  int inner_;
  int outer_;
  int64_t most_groups_;
  int64_t strips_;
};

// Elements [begin, end) of a bundle, counted row by row.
struct Piece {
  Bundle bundle;
  int64_t begin, end;
};

// What one thread takes at a time: whole bundles, or pieces of them where there are few.
class Pieces {
 public:
  Pieces(const Walk& walk, int64_t threads)
      : each_(walk.bundles() < threads && walk.bundles() * walk.bundle_size() >= kOneThread
                  ? (4 * threads + walk.bundles() - 1) / walk.bundles()
                  : 1) {}

  int64_t each() const { return each_; }  // pieces of a bundle

  // Cut between rows of a strip, or else between cache lines.
  Piece at(const Walk& walk, int64_t i) const {
    const Bundle bundle = walk.bundle(each_ == 1 ? i : i / each_);
    const int64_t size = walk.size(bundle);
    if (each_ == 1) return {bundle, 0, size};
    const int64_t unit = walk.across() ? bundle.length : 64;
    const int64_t length = ((size + each_ - 1) / each_ + unit - 1) / unit * unit;
    const int64_t begin = std::min(size, i % each_ * length);
    return {bundle, begin, std::min(size, begin + length)};
  }

 private:
  int64_t each_;
};

}  // namespace amp_kernels::cpu
