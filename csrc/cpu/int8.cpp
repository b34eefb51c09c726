// The int8 kernels for a CPU. A thread takes a band, or a piece of a band, at a time (int8_walk.h). csrc/int8.h defines
// groups, bands and pieces. Quantization makes one pass or two over x:
//
//   scale given        for each piece:  x -> codes
//   many bands         for each band:   x -> ranges -> scales; then x, now in the core's cache -> codes
//   few large bands    for each piece:  x -> ranges
//                      for each band:   the ranges of its pieces -> scales
//                      for each piece:  x -> codes
//
// Bands are "few large bands" if there are fewer of them than threads, and if together they have at least kOneThread
// elements. Otherwise they are "many bands".
#include "int8.h"

#include <torch/csrc/stable/ops.h>

#include "float_tiles.h"
#include "huge_pages.h"
#include "int8_matmul.h"
#include "int8_quantize.h"
#include "int8_tiles.h"
#include "parallel.h"

namespace amp_kernels::cpu {
namespace {

int64_t size_of(Dtype dtype) { return dtype == kFloat ? sizeof(float) : sizeof(Half); }

// Calls f(i, band, begin, end) for every piece of every band.
template <class F>
void for_each_piece(const Walk& walk, const Pieces& pieces, const F& f) {
  const int64_t count = walk.bands() * pieces.each();
  const int64_t most = walk.bands() * walk.band_size() / kOneThread;  // more threads are not worth waking
  const int64_t threads = std::min<int64_t>({torch::stable::get_num_threads(), count, most});
  for_each(count, threads, [&](int64_t i) {
    const Piece piece = pieces.at(walk, i);
    f(i, piece.band, piece.begin, piece.end);
  });
}

// Calls f with a zero of the dtype's C++ type, and with kStep (see OfGroups in int8_codes.h) as an integral_constant.
template <class F>
void with_types(Dtype dtype, const Walk& walk, const F& f) {
  with_dtype(dtype, [&](auto value) {
    if (walk.by_columns())
      f(value, std::integral_constant<int, 1>{});
    else
      f(value, std::integral_constant<int, 0>{});
  });
}

template <class T, int kStep>
void quantize_static(const Quantize& args, const Walk& walk, const Pieces& pieces) {
  for_each_piece(walk, pieces, [&](int64_t, const Band& band, int64_t begin, int64_t end) {
    Affines affines;
    given_affines(args.scale, args.zero_point, band, affines);
    if (args.zero_point != nullptr && !args.fake) affines.bound(band.groups);
    quantize_pass<T, kStep>(args, walk, band, begin, end, affines, walk.ahead(band, sizeof(T)));
  });
}

// A thread reads each band twice, first for its ranges, and then for its codes. The second read is from the core's
// cache, if the band fits there.
//
// By rows (csrc/int8.h), each pass prefetches the next band while it reads this one. Prefetching in only one pass would
// leave memory idle during the other. The prefetches of the first pass are 4 KiB ahead of its reads: at byte i of this
// band it prefetches byte i + 4 KiB of the next band. Those of the second pass are 8 KiB ahead. There are exceptions.
// Bands of short rows are prefetched differently (quantize_short_rows). The second pass prefetches nothing for
// stochastic rounding, for fake quantization whose results are not streamed, and for codes if AVX2 or F16C is missing.
template <class T, int kStep>
void quantize_bands(const Quantize& args, const Walk& walk, const Pieces& whole) {
  for_each_piece(walk, whole, [&](int64_t i, const Band& band, int64_t begin, int64_t end) {
    const int64_t next = i + 1 == walk.bands() ? 0 : walk.band(i + 1).at - band.at;
    const auto ahead = [&](int64_t beyond) {
      return walk.by_columns() ? walk.ahead(band, sizeof(T)) : next * static_cast<int64_t>(sizeof(T)) + beyond;
    };
    if (are_short_rows<T>(args, walk, band))
      return args.zero_point == nullptr ? quantize_short_rows<true, T>(args, walk, band)
                                        : quantize_short_rows<false, T>(args, walk, band);
    Ranges ranges(band.groups);
    find_ranges<T>(args, walk, band, begin, end, ahead(kBytesAhead / 2), ranges);
    Affines affines;
    solve_affines(args, band, ranges, affines);
    quantize_pass<T, kStep>(args, walk, band, begin, end, affines, ahead(kBytesAhead));
  });
}

// Quantizes few large bands. It finds the ranges of all pieces, then computes the scales of all bands, and then writes
// the codes of all pieces.
template <class T, int kStep>
void quantize_pieces(const Quantize& args, const Walk& walk, const Pieces& pieces) {
  std::vector<Ranges> ranges(walk.bands() * pieces.each(), Ranges(kGroups));
  for_each_piece(walk, pieces, [&](int64_t i, const Band& band, int64_t begin, int64_t end) {
    find_ranges<T>(args, walk, band, begin, end, walk.ahead(band, sizeof(T)), ranges[i]);
  });
  std::vector<Affines> affines(walk.bands());
  for (int64_t b = 0; b < walk.bands(); ++b) {
    const Band band = walk.band(b);
    Ranges* of_pieces = &ranges[b * pieces.each()];
    for (int64_t i = 1; i < pieces.each(); ++i)
      for (int64_t group = 0; group < band.groups; ++group) of_pieces->add(group, of_pieces[i].at(group));
    solve_affines(args, band, *of_pieces, affines[b]);
  }
  for_each_piece(walk, pieces, [&](int64_t i, const Band& band, int64_t begin, int64_t end) {
    quantize_pass<T, kStep>(args, walk, band, begin, end, affines[i / pieces.each()], walk.ahead(band, sizeof(T)));
  });
}

}  // namespace

void quantize(const Quantize& args) {
  advise_huge_pages(args.out, args.layout.elements() * (args.fake ? size_of(args.dtype) : 1));
  const Walk walk(args.layout);
  const Pieces pieces(walk, torch::stable::get_num_threads());
  with_types(args.dtype, walk, [&](auto value, auto step) {
    using T = decltype(value);
    constexpr int kStep = step;
    if (args.is_static)
      quantize_static<T, kStep>(args, walk, pieces);
    else if (pieces.each() == 1)
      quantize_bands<T, kStep>(args, walk, pieces);
    else
      quantize_pieces<T, kStep>(args, walk, pieces);
  });
}

void dequantize(const Dequantize& args) {
  advise_huge_pages(args.out, args.layout.elements() * size_of(args.dtype));
  const Walk walk(args.layout);
  with_types(args.dtype, walk, [&](auto value, auto step) {
    const Pieces pieces(walk, torch::stable::get_num_threads());
    for_each_piece(walk, pieces, [&](int64_t, const Band& band, int64_t begin, int64_t end) {
      dequantize_pass<decltype(value), step>(args, walk, band, begin, end);
    });
  });
}

void straight_through(const StraightThrough& args) {
  advise_huge_pages(args.out, args.layout.elements() * size_of(args.dtype));
  const Walk walk(args.layout);
  with_types(args.dtype, walk, [&](auto value, auto step) {
    const Pieces pieces(walk, torch::stable::get_num_threads());
    for_each_piece(walk, pieces, [&](int64_t, const Band& band, int64_t begin, int64_t end) {
      straight_through_pass<decltype(value), step>(args, walk, band, begin, end);
    });
  });
}

void multiply(const Int8Matmul& args) {
  advise_huge_pages(args.out, args.m * args.n * (args.out_scale == nullptr ? size_of(args.dtype) : 1));
  with_int8_tile([&](auto tile) { multiply<decltype(tile)>(Int8Product<decltype(tile)>(args)); });
}

void multiply(const Int8Conv2d& args) {
  const Int8Matmul& rows = args.rows;
  advise_huge_pages(rows.out, rows.m * rows.n * (rows.out_scale == nullptr ? size_of(rows.dtype) : 1));
  with_int8_tile([&](auto tile) { multiply<decltype(tile)>(ConvProduct<decltype(tile)>(args)); });
}

void multiply(const Int8Linear& args) {
  advise_huge_pages(args.out, args.m * args.n * size_of(args.dtype));
  with_float_tile([&](auto tile) {
    with_dtype(args.dtype,
               [&](auto value) { multiply<decltype(tile)>(LinearProduct<decltype(tile), decltype(value)>(args)); });
  });
}

}  // namespace amp_kernels::cpu
