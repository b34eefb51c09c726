// How the operands of a product reach shared memory, and how its sums leave it, shared by int8_matmul.cu and
// int8_linear.cu. A tile is kRows rows of an operand by kBytes of k, in chunks of 16 bytes whose places in a row are
// swizzled (tiles.cuh):
//
//   memory                             shared memory
//   row r    [c0 c1 c2 c3] k ->        row r    [c1 c0 c3 c2]     a thread copies one chunk of every kLines-th row
//   row r+1  [c0 c1 c2 c3]             row r+1  [c0 c1 c2 c3]
#pragma once

#include "tiles.cuh"

namespace amp_kernels::cuda {

// One operand: rows over m or n, in bytes. They begin at multiples of 16 bytes, and k is a multiple of 16 too: up to
// there, rows of fewer elements hold zeros, which add nothing to a product (csrc/ops/int8.cpp: in_chunks).
struct Operand {
  const char* first;
  int64_t rows, k, row_stride;
};

// Elements of a row of k with the zeros behind it.
inline int64_t whole_chunks(int64_t k) { return (k + 15) / 16 * 16; }

constexpr int kTileBytes = 64;  // of k, for codes
constexpr int kTileChunks = kTileBytes / 16;

// Fills one tile a step, by asynchronous copies (cp.async): rows from `first_row` on, kBytes of k further each time. A
// tile is 0 outside of the operand.
template <int kRows, int kBytes = kTileBytes, class Swizzle = MatrixSwizzle>
struct Loader {
  static constexpr int kChunks = kBytes / 16;
  static constexpr int kLines = kThreads / kChunks;  // in one go
  static constexpr int kTimes = kRows / kLines;
  static_assert(kLines % 8 == 0, "the chunks of a thread's rows are in the same place");

  uintptr_t next;  // an address: where k is 0 there is no memory, and arithmetic on a null pointer would be undefined
  int64_t line_stride;
  int to;          // offset in the tile
  int lines;       // rows of the operand from this thread's first one to the end of the tile
  int last_bytes;  // of this thread's chunk in the last step, 16 or 0

  static __device__ __forceinline__ int clamp(int64_t value, int most) {
    return value < 0 ? 0 : value < most ? static_cast<int>(value) : most;
  }

  __device__ Loader(const Operand& operand, int64_t first_row) {
    const int line = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    next = reinterpret_cast<uintptr_t>(operand.first) + (first_row + line) * operand.row_stride + chunk * 16;
    line_stride = kLines * operand.row_stride;
    to = line * kBytes + Swizzle::at(line, chunk) * 16;
    lines = clamp(operand.rows - first_row - line, kRows);
    last_bytes = clamp(operand.k - (operand.k - 1) / kBytes * kBytes - chunk * 16, 16);
  }

  __device__ __forceinline__ void fetch(char* tile, bool is_last) {
    const int bytes = is_last ? last_bytes : 16;
    uintptr_t from = next;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      copy_async(tile + to + i * kLines * kBytes, reinterpret_cast<const char*>(from), i * kLines < lines ? bytes : 0);
      from += line_stride;
    }
    next += kBytes;
  }
};

// Calls multiply(first tile, second tile) for every step of k. The tiles are in a ring of kStages stages: one is
// multiplied while the others are filled.
template <int kStages, int kFirstBytes, int kStageBytes, class LoadFirst, class LoadSecond, class Multiply>
__device__ __forceinline__ void for_tiles(char* shared, int64_t k_tiles, LoadFirst& load_first, LoadSecond& load_second,
                                          const Multiply& multiply) {
  const int steps = static_cast<int>(k_tiles);
  const auto fetch = [&](int step, int stage) {
    if (step < steps) {
      load_first.fetch(shared + stage, step == steps - 1);
      load_second.fetch(shared + stage + kFirstBytes, step == steps - 1);
    }
    commit_copies();
  };
  const auto stage_after = [](int stage) { return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes; };
  int filled = 0;  // the stage to be filled next
#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step, filled = stage_after(filled)) fetch(step, filled);
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, filled = stage_after(filled), stage = stage_after(stage)) {
    wait_copies<kStages - 2>();
    barrier();  // every thread's part of this stage has arrived, and every thread is done with the stage before
    fetch(step + kStages - 1, filled);
    multiply(shared + stage, shared + stage + kFirstBytes);
  }
  wait_copies<0>();
  barrier();
}

// The epilogue: hands all sums of a tile, through shared memory, to store(row, sums) for kWide neighbouring columns at
// a time, or for one where rows of results are not aligned. A thread stays in its columns: start(N, first column) is
// called once and returns its `store`. `columns` is how many of the tile's exist.
template <class Results, int kWide, class Sum, int kTall, int kBroad, class Start>
__device__ __forceinline__ void finish(char* shared, const Sum (&sums)[kTall][kBroad][4], bool wide, int64_t columns,
                                       const Start& start) {
  Results::for_halves(shared, sums, [&](int first_row, const Sum* results) {
    const auto finish_all = [&](auto each) {
      constexpr int kEach = decltype(each)::value, kPacks = Results::kColumns * kWarpsAcross / kEach;
      static_assert(kThreads % kPacks == 0);
      const int column = threadIdx.x % kPacks * kEach;
      if (column >= columns) return;
      const auto store = start(each, column);
      Results::template for_each_of<kEach>(first_row, results,
                                           [&](int row, int, const Vector<Sum, kEach>& sums) { store(row, sums); });
    };
    if (wide) {
      finish_all(std::integral_constant<int, kWide>());
    } else {
      finish_all(std::integral_constant<int, 1>());
    }
  });
}

// --------------------------------------------------------------------------------------- few rows
// With few rows a product takes as long as reading the weights. They are read once, from memory straight into
// fragments; the rows are read from L2 by every block. The warps of a block share k.

constexpr int kFewColumns = 16;  // of a block: two fragments of the weights use each fragment of the rows
constexpr int kWarps = kThreads / 32;

// The alternative is tiles of 64 x 64, which walk all of k one step after the other while other multiprocessors have no
// work. But here every block reads all rows, for 16 columns only: with 32 rows that is more to read from L2 than for
// tiles as soon as there are half as many tiles as multiprocessors, with 64 rows a third.
inline bool are_few_rows(int64_t m, int64_t n) {
  const int64_t tiles = (n + 63) / 64, count = multiprocessor_count();
  return m <= 16 || (m <= 32 && 2 * tiles <= count) || (m <= 64 && 3 * tiles <= count);
}

// Calls f with the number of tiles of 16 rows as an integral_constant.
template <class F>
void with_row_tiles(int64_t m, const F& f) {
  if (m <= 16) return f(std::integral_constant<int, 1>());
  if (m <= 32) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 4>());
}

// 16 bytes of a row from byte k on; zeros outside of the operand.
__device__ __forceinline__ int4 load_chunk(const Operand& operand, int64_t row, int64_t k) {
  if (row >= operand.rows || k >= operand.k) return make_int4(0, 0, 0, 0);
  const char* p = operand.first + row * operand.row_stride + k;
  assume_global(p);
  return *reinterpret_cast<const int4*>(p);
}

}  // namespace amp_kernels::cuda
