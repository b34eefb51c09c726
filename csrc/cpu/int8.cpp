// The int8 kernels of a CPU: which pieces of a tensor each thread takes.
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

void prepare(void* out, int64_t elements, Dtype dtype) {
  ask_for_huge_pages(out, elements * (dtype == kFloat ? 4 : 2));
}

// Calls f(i, bundle, begin, end) for every piece of every bundle.
template <class F>
void for_each_piece(const Walk& walk, const Pieces& pieces, const F& f) {
  const int64_t count = walk.bundles() * pieces.each();
  const int64_t most = walk.bundles() * walk.bundle_size() / kOneThread;  // threads that are worth waking
  const int64_t threads = std::min<int64_t>({torch::stable::get_num_threads(), count, most});
  for_each(count, threads, [&](int64_t i) {
    const Piece piece = pieces.at(walk, i);
    f(i, piece.bundle, piece.begin, piece.end);
  });
}

// Calls f with a value of the dtype's C++ type and the kStep of the runs as an integral_constant.
template <class F>
void with_types(Dtype dtype, const Walk& walk, const F& f) {
  with_dtype(dtype, [&](auto value) {
    if (walk.across())
      f(value, std::integral_constant<int, 1>{});
    else
      f(value, std::integral_constant<int, 0>{});
  });
}

template <class T, int kStep>
void quantize_static(const Quantize& args, const Walk& walk, const Pieces& pieces) {
  for_each_piece(walk, pieces, [&](int64_t, const Bundle& bundle, int64_t begin, int64_t end) {
    Affines affines;
    given_affines(args.scale, args.zero_point, walk, bundle, affines);
    if (args.zero_point != nullptr && !args.fake) affines.bound(bundle.groups);
    quantize_pass<T, kStep>(args, walk, bundle, begin, end, affines, walk.ahead(bundle, sizeof(T)));
  });
}

// A thread reads a bundle for its ranges, and again, from its cache, for the codes. In both passes over a row it asks
// for the next, and a little beyond: asked for in one of them alone, memory is idle during the other.
template <class T, int kStep>
void quantize_bundles(const Quantize& args, const Walk& walk, const Pieces& whole) {
  for_each_piece(walk, whole, [&](int64_t i, const Bundle& bundle, int64_t begin, int64_t end) {
    const int64_t next = i + 1 == walk.bundles() ? 0 : walk.bundle(i + 1).x - bundle.x;
    const auto ahead = [&](int64_t beyond) {
      return walk.across() ? walk.ahead(bundle, sizeof(T)) : next * static_cast<int64_t>(sizeof(T)) + beyond;
    };
    if (are_short_rows<T>(args, walk, bundle))
      return args.zero_point == nullptr ? quantize_short_rows<true, T>(args, walk, bundle)
                                        : quantize_short_rows<false, T>(args, walk, bundle);
    Ranges ranges(bundle.groups);
    find_ranges<T>(args, walk, bundle, begin, end, ahead(kBytesAhead / 2), ranges);
    Affines affines;
    solve_affines(args, walk, bundle, ranges, affines);
    quantize_pass<T, kStep>(args, walk, bundle, begin, end, affines, ahead(kBytesAhead));
  });
}

// Few large bundles: the ranges of all pieces first.
template <class T, int kStep>
void quantize_pieces(const Quantize& args, const Walk& walk, const Pieces& pieces) {
  std::vector<Ranges> ranges(walk.bundles() * pieces.each(), Ranges(kGroups));
  for_each_piece(walk, pieces, [&](int64_t i, const Bundle& bundle, int64_t begin, int64_t end) {
    find_ranges<T>(args, walk, bundle, begin, end, walk.ahead(bundle, sizeof(T)), ranges[i]);
  });
  std::vector<Affines> affines(walk.bundles());
  for (int64_t b = 0; b < walk.bundles(); ++b) {
    const Bundle bundle = walk.bundle(b);
    Ranges* of_pieces = &ranges[b * pieces.each()];
    for (int64_t i = 1; i < pieces.each(); ++i)
      for (int64_t group = 0; group < bundle.groups; ++group) of_pieces->add(group, of_pieces[i].at(group));
    solve_affines(args, walk, bundle, *of_pieces, affines[b]);
  }
  for_each_piece(walk, pieces, [&](int64_t i, const Bundle& bundle, int64_t begin, int64_t end) {
    quantize_pass<T, kStep>(args, walk, bundle, begin, end, affines[i / pieces.each()], walk.ahead(bundle, sizeof(T)));
  });
}

}  // namespace

void quantize(const Quantize& args) {
  if (args.fake)
    prepare(args.out, args.layout.elements(), args.dtype);
  else
    ask_for_huge_pages(args.out, args.layout.elements());
  const Walk walk(args.layout);
  const Pieces pieces(walk, torch::stable::get_num_threads());
  with_types(args.dtype, walk, [&](auto value, auto step) {
    using T = decltype(value);
    constexpr int kStep = step;
    if (args.is_static)
      quantize_static<T, kStep>(args, walk, pieces);
    else if (pieces.each() == 1)
      quantize_bundles<T, kStep>(args, walk, pieces);
    else
      quantize_pieces<T, kStep>(args, walk, pieces);
  });
}

void dequantize(const Dequantize& args) {
  prepare(args.out, args.layout.elements(), args.dtype);
  const Walk walk(args.layout);
  with_types(args.dtype, walk, [&](auto value, auto step) {
    const Pieces pieces(walk, torch::stable::get_num_threads());
    for_each_piece(walk, pieces, [&](int64_t, const Bundle& bundle, int64_t begin, int64_t end) {
      dequantize_pass<decltype(value), step>(args, walk, bundle, begin, end);
    });
  });
}

void straight_through(const StraightThrough& args) {
  prepare(args.out, args.layout.elements(), args.dtype);
  const Walk walk(args.layout);
  with_types(args.dtype, walk, [&](auto value, auto step) {
    const Pieces pieces(walk, torch::stable::get_num_threads());
    for_each_piece(walk, pieces, [&](int64_t, const Bundle& bundle, int64_t begin, int64_t end) {
      straight_through_pass<decltype(value), step>(args, walk, bundle, begin, end);
    });
  });
}

void multiply(const Int8Matmul& args) {
  if (args.out_scale == nullptr)
    prepare(args.out, args.m * args.n, args.dtype);
  else
    ask_for_huge_pages(args.out, args.m * args.n);
  with_int8_tile([&](auto tile) { multiply<decltype(tile)>(Int8Product<decltype(tile)>(args)); });
}

void multiply(const Int8Linear& args) {
  prepare(args.out, args.m * args.n, args.dtype);
  with_float_tile([&](auto tile) {
    with_dtype(args.dtype,
               [&](auto value) { multiply<decltype(tile)>(LinearProduct<decltype(tile), decltype(value)>(args)); });
  });
}

}  // namespace amp_kernels::cpu
