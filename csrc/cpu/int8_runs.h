// How the int8 kernels walk an Int8Layout on a CPU: in runs of elements that are dense in `out`. Where the innermost
// level is reduced, a run belongs to one group; where it is kept (columns), each element belongs to the next group.
#pragma once

#include <algorithm>
#include <vector>

#include "../formulas/int8.h"

namespace amp_kernels::cpu {

constexpr int64_t kRun = 1024;           // elements at most: staged as fp32, they stay in L1
constexpr int64_t kStrip = 256;          // columns of a bundle: their scales stay in L1
constexpr int64_t kOneThread = 1 << 16;  // elements, below which waking a second thread costs more than it saves

struct Run {
  int64_t x, out, index;  // offsets of the first element
  int64_t n;
};

// Groups that are walked together: one, or a strip of columns.
struct Bundle {
  int64_t x, out, index, scale;  // offsets of the first element of the first group
  int64_t groups;
  int64_t rows;    // size of R1
  int64_t length;  // of a row, in elements
};

class Walk {
 public:
  explicit Walk(const Int8Layout& layout)
      : layout_(layout),
        across_(layout.size[Int8Layout::kR2] == 1 && layout.size[Int8Layout::kG2] > 1),
        inner_(across_ ? Int8Layout::kG2 : Int8Layout::kR2),
        strips_(across_ ? (layout.size[Int8Layout::kG2] + kStrip - 1) / kStrip : layout.size[Int8Layout::kG2]) {}

  bool across() const { return across_; }
  int64_t bundles() const { return layout_.size[Int8Layout::kG1] * strips_; }
  int64_t x_step() const { return layout_.x[inner_]; }
  int64_t index_step() const { return layout_.index[inner_]; }
  int64_t scale_step() const { return layout_.scale[1]; }

  // Of the largest bundle.
  int64_t bundle_size() const {
    const int64_t row = across_ ? std::min(kStrip, layout_.size[Int8Layout::kG2]) : layout_.size[Int8Layout::kR2];
    return layout_.size[Int8Layout::kR1] * row;
  }

  Bundle bundle(int64_t i) const {
    const int64_t g1 = i / strips_;
    const int64_t g2 = i % strips_ * (across_ ? kStrip : 1);
    const int64_t end = across_ ? layout_.size[Int8Layout::kG2] : layout_.length;
    const int64_t begin = across_ ? g2 : g2 * layout_.size[Int8Layout::kR2];
    const int64_t most = across_ ? kStrip : layout_.size[Int8Layout::kR2];
    return {at(layout_.x, g1, g2),
            at(layout_.out, g1, g2),
            at(layout_.index, g1, g2),
            g1 * layout_.scale[0] + g2 * layout_.scale[1],
            across_ ? std::min(kStrip, end - g2) : 1,
            layout_.size[Int8Layout::kR1],
            std::min(most, end - begin)};
  }

  // Of elements [begin, end) of a bundle, counted row by row.
  template <class F>
  void for_each_run(const Bundle& bundle, int64_t begin, int64_t end, const F& f) const {
    const int64_t first_row = begin == 0 ? 0 : begin / bundle.length;  // a division costs as much as a block of 32
    int64_t column = begin - first_row * bundle.length;
    for (int64_t row = first_row, left = end - begin; left > 0; ++row, column = 0) {
      for (; column < bundle.length && left > 0;) {
        const int64_t n = std::min({bundle.length - column, left, kRun});
        const auto offset = [&](int64_t first, const int64_t* strides) {
          return first + row * strides[Int8Layout::kR1] + column * strides[inner_];
        };
        f(Run{offset(bundle.x, layout_.x), offset(bundle.out, layout_.out), offset(bundle.index, layout_.index), n});
        column += n;
        left -= n;
      }
    }
  }

 private:
  static int64_t at(const int64_t* strides, int64_t g1, int64_t g2) {
    return g1 * strides[Int8Layout::kG1] + g2 * strides[Int8Layout::kG2];
  }

  Int8Layout layout_;
  bool across_;
  int inner_;
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

  int64_t each() const { return each_; }  // bundle

  // Cut between rows of a strip, or else between cache lines.
  Piece at(const Walk& walk, int64_t i) const {
    const Bundle bundle = walk.bundle(each_ == 1 ? i : i / each_);
    const int64_t size = bundle.rows * bundle.length;
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
