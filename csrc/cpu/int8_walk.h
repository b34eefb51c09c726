// How a CPU walks an Int8Layout. A thread takes a band of groups, or a piece of a band, and reads it in segments.
// csrc/int8.h defines these words.
//
//   by rows: a band is one group,                 by columns: a band is up to kGroups columns with all of their rows;
//   or up to kGroups short groups                 a strip is kStripRows of these rows
//
//     thread 0  [aaaa|aaaa|aa]  segments            thread 0        thread 1
//     thread 1  [bbbb|bbbb|bb]                      [abcdefgh       [ijklmnop   strip
//     thread 0  [cccc|cccc|cc]                       abcdefgh]       ijklmnop]
//                                                   [abcdefgh ...   [ijklmnop ...
//
// Most passes read the rows of a strip side by side: the first columns of every row, then the next columns of every
// row, and so on.
#pragma once

#include <algorithm>
#include <vector>

#include "../formulas/int8.h"
#include "../int8.h"
#include "prefetch.h"

namespace amp_kernels::cpu {

// The largest number of elements in a segment that for_each_segment() makes: kSegment by rows, kColumnSegment by
// columns. By rows, the fp32 copy of a segment stays in the L1. By columns, a segment in fp32 is 16 cache lines, as
// many as a core can wait for at once.
constexpr int64_t kSegment = 1024;
constexpr int64_t kColumnSegment = 256;
constexpr int64_t kStripRows = 8;
constexpr int64_t kGroups = 4096;  // the largest number of groups in a band
// Size of an array with one number for each group of a band. Several such arrays lie one after the other in a struct.
// With a size of kGroups they would be 2^14 bytes apart, and the numbers of a group would all share one set of the L1.
constexpr int64_t kRoom = kGroups + 16;
// A band of short groups has at most this many elements. If x is read twice (int8_quantize.h), the second read of the
// band is then from the L1.
constexpr int64_t kBandSize = 4096;
constexpr int64_t kOneThread = 1 << 16;  // with fewer elements, waking a second thread costs more than it saves

// Elements that are neighbours in memory, at most one row.
struct Segment {
  int64_t at;  // offset of the first element
  int64_t n;
  int64_t group;  // group of the first element, counted from the band's first group
};

// By rows, each row of a band is a group. By columns, each row has one element of every group of the band.
struct Band {
  int64_t at;           // offset of the first element
  int64_t first_group;  // counted from the tensor's first group
  int64_t groups;
  int64_t rows;
  int64_t length;       // elements in a row
  int64_t last_length;  // elements in the last row
};

class Walk {
 public:
  explicit Walk(const Int8Layout& layout)
      : by_columns_(layout.is_by_columns()),
        rows_(by_columns_ ? layout.reduced : 0),
        row_size_(by_columns_ ? layout.inner : layout.reduced),
        groups_of_part_(by_columns_ ? layout.inner : layout.groups_of_row()),
        part_size_(by_columns_ ? layout.reduced * layout.inner : layout.row),
        parts_(layout.groups() / groups_of_part_) {
    const int64_t short_groups = std::clamp<int64_t>(kBandSize / row_size_, 1, kGroups);
    most_groups_ = std::min(by_columns_ ? kGroups : short_groups, groups_of_part_);
    bands_of_part_ = (groups_of_part_ + most_groups_ - 1) / most_groups_;
  }

  bool by_columns() const { return by_columns_; }
  int64_t bands() const { return parts_ * bands_of_part_; }
  int64_t row_size() const { return row_size_; }  // elements from one row of a band to the next

  // Whether results are stored past the caches (stream() in convert.h). Results this large would not be found in a
  // cache later.
  bool streams() const { return bands() * band_size() >= 1 << 22; }

  // How many bytes ahead of its reads a pass prefetches. By columns it is the distance to a later row: at least
  // kStripRows rows ahead, because the rows of a strip are read side by side. By rows it is 0, except on cores that
  // need prefetching (asks_ahead). A Zen 4 does not need it: the two passes over 16M fp32 elements took 2.9 to 3.7 ms
  // with prefetching 8 KiB ahead, and 2.3 to 3.2 ms without prefetching.
  int64_t ahead(const Band& band, int64_t element_size) const {
    if (!by_columns_) return asks_ahead() ? kBytesAhead : 0;
    const int64_t row = band.length * element_size;
    return std::max(kStripRows, (kBytesAhead + row - 1) / row) * row_size_ * element_size;
  }

  // The number of elements in the largest band.
  int64_t band_size() const { return most_groups_ * (by_columns_ ? rows_ : row_size_); }

  Band band(int64_t i) const {
    const int64_t part = i / bands_of_part_;
    const int64_t first = (i - part * bands_of_part_) * most_groups_;
    const int64_t groups = std::min(most_groups_, groups_of_part_ - first);
    Band band{part * part_size_, part * groups_of_part_ + first, groups, 0, 0, 0};
    if (by_columns_) {
      band.at += first;
      band.rows = rows_, band.length = band.last_length = groups;
    } else {
      band.at += first * row_size_;
      band.rows = groups, band.length = row_size_;
      band.last_length = std::min(row_size_, part_size_ - (first + groups - 1) * row_size_);
    }
    return band;
  }

  int64_t size(const Band& band) const { return (band.rows - 1) * band.length + band.last_length; }

  // Calls f(segment) for elements [begin, end) of a band, counted row by row. By columns, these must be whole rows.
  template <class F>
  void for_each_segment(const Band& band, int64_t begin, int64_t end, const F& f) const {
    by_columns_ ? for_each_segment_of_columns(band, begin / band.length, end / band.length, f)
                : for_each_segment_of_rows(band, begin, end, f);
  }

  // Whether elements [begin, end) of a band are all of its rows, and each row is a group.
  bool are_rows_groups(const Band& band, int64_t begin, int64_t end) const {
    return !by_columns_ && begin == 0 && end == size(band);
  }

  // By rows: calls f(segment) for each row of the band. Unlike for_each_segment(), it does not cut long rows. It is
  // also faster: for groups of 128 elements, for_each_segment() itself took as long as reading the elements.
  template <class F>
  void for_each_row(const Band& band, const F& f) const {
    Segment row{band.at, band.length, 0};
    for (; row.group < band.rows; ++row.group, row.at += row_size_) {
      if (row.group + 1 == band.rows) row.n = band.last_length;
      f(row);
    }
  }

  // By columns: calls f(first row of a strip, number of its rows) for the strips of elements [begin, end) of a band.
  template <class F>
  void for_each_strip(const Band& band, int64_t begin, int64_t end, const F& f) const {
    const int64_t end_row = end / band.length;
    for (int64_t row = begin / band.length; row < end_row; row += kStripRows)
      f(Segment{band.at + row * row_size_, band.length, 0}, std::min(kStripRows, end_row - row));
  }

 private:
  template <class F>
  void for_each_segment_of_rows(const Band& band, int64_t begin, int64_t end, const F& f) const {
    const int64_t length = band.length;
    Segment at{band.at + begin, 0, begin / length};
    // `column` and `group` are counted up. When they were computed by a division for each segment, the division took as
    // long as reading a group of 128 elements.
    int64_t column = begin - at.group * length;
    for (int64_t left = end - begin; left > 0; left -= at.n) {
      at.n = std::min({length - column, left, kSegment});
      f(at);
      column += at.n, at.at += at.n;
      if (column == length) column = 0, ++at.group;
    }
  }

  // Goes through all columns of one strip, segment by segment, and then through the next strip. The scales and zero
  // points of a segment's columns (Affines in int8_codes.h) stay in the L1 for all rows of the strip. Successive
  // segments are in different rows, but each segment is a run of kColumnSegment elements in memory. Only the last
  // segment of a row may be shorter.
  template <class F>
  void for_each_segment_of_columns(const Band& band, int64_t begin, int64_t end, const F& f) const {
    for (int64_t strip = begin; strip < end; strip += kStripRows)
      for (int64_t column = 0; column < band.length; column += kColumnSegment)
        for (int64_t row = strip; row < std::min(strip + kStripRows, end); ++row)
          f(Segment{band.at + row * row_size_ + column, std::min(kColumnSegment, band.length - column), column});
  }

  bool by_columns_;
  int64_t rows_;      // by columns: rows of every band
  int64_t row_size_;  // elements from one row of a band to the next
  // The tensor is divided into parts. By columns, a part is a matrix [reduced][inner]. By rows, the whole tensor is one
  // part, with one exception: if the last group of each row of the tensor is shorter than the others, each row of the
  // tensor is a part.
  int64_t groups_of_part_, part_size_, parts_;
  int64_t most_groups_;  // groups of the largest band
  int64_t bands_of_part_;
};

// Elements [begin, end) of a band, counted row by row.
struct Piece {
  Band band;
  int64_t begin, end;
};

// The work that a thread takes at a time: a whole band, or a piece of one. Bands are cut into pieces if there are fewer
// bands than threads, and if the bands together have at least kOneThread elements.
class Pieces {
 public:
  Pieces(const Walk& walk, int64_t threads)
      : each_(walk.bands() < threads && walk.bands() * walk.band_size() >= kOneThread
                  ? (4 * threads + walk.bands() - 1) / walk.bands()
                  : 1) {}

  int64_t each() const { return each_; }  // how many pieces a band has

  // By columns, a band is cut between rows. By rows, it is cut at multiples of 64 elements, which are whole cache
  // lines.
  Piece at(const Walk& walk, int64_t i) const {
    const Band band = walk.band(each_ == 1 ? i : i / each_);
    const int64_t size = walk.size(band);
    if (each_ == 1) return {band, 0, size};
    const int64_t unit = walk.by_columns() ? band.length : 64;
    const int64_t length = ((size + each_ - 1) / each_ + unit - 1) / unit * unit;
    const int64_t begin = std::min(size, i % each_ * length);
    return {band, begin, std::min(size, begin + length)};
  }

 private:
  int64_t each_;
};

}  // namespace amp_kernels::cpu
