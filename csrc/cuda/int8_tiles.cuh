// The parts that the kernels of int8_matmul.cu and int8_linear.cu have in common: copies of operands to shared memory,
// finish(), which passes sums to the functions that store results, and the loads of products with few rows.
//
// int8_matmul.cu multiplies a by b, and int8_linear.cu multiplies x by the weight. Here the rows of an operand always
// run along k. For a, x and the weight, they are the rows of the matrix. For b, they are the columns of the matrix. A
// tile is kRows rows of an operand, with kBytes bytes of each row. A thread copies one 16-byte chunk of every kLines-th
// row. In shared memory the order of a row's chunks depends on the row (a swizzle, tiles.cuh). For example, with
// MatrixSwizzle:
//
//   memory                             shared memory
//   row 1    [c0 c1 c2 c3] k ->        row 1    [c0 c1 c2 c3]
//   row 2    [c0 c1 c2 c3]             row 2    [c1 c0 c3 c2]
//   row 4    [c0 c1 c2 c3]             row 4    [c2 c3 c0 c1]
#pragma once

#include "tiles.cuh"

namespace amp_kernels::cuda {

// One operand: a or x, with a row for each m, or b or the weight, with a row for each n. Rows begin at multiples of 16
// bytes, and their length k is a multiple of 16 bytes. If K is not a multiple of 16 elements, in_chunks() in
// csrc/ops/int8.cpp has appended zeros to each row. The zeros add nothing to a product.
struct Operand {
  const char* first;
  int64_t rows, k, row_stride;  // k and row_stride in bytes
};

// The number of elements in a row of an Operand: k elements, and zeros up to a multiple of 16 elements.
inline int64_t whole_chunks(int64_t k) { return (k + 15) / 16 * 16; }

constexpr int kTileBytes = 64;  // in a row of a tile of codes
constexpr int kTileChunks = kTileBytes / 16;

// Each fetch() fills a tile with kBytes bytes of each row from `first_row` on, by asynchronous copies (cp.async). The
// first fetch() begins at the start of the rows. Each later fetch() begins kBytes bytes after the previous one. The
// parts of a tile that lie outside of the operand become 0.
template <int kRows, int kBytes = kTileBytes, class Swizzle = MatrixSwizzle>
struct Loader {
  static constexpr int kChunks = kBytes / 16;
  static constexpr int kLines = kThreads / kChunks;  // rows that all threads together copy at a time
  static constexpr int kTimes = kRows / kLines;
  static_assert(kLines % 8 == 0, "the chunks of a thread's rows are in the same place");

  uintptr_t next;  // an integer, because the address may be 0 if k is 0: arithmetic on a null pointer is undefined
  int64_t line_stride;
  int to;          // offset in the tile
  int lines;       // rows of the operand from this thread's first row to the end of the tile
  int last_bytes;  // bytes of this thread's chunk in the last step: 16, or 0 if the chunk lies behind the row's end

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

// Passes all sums of a tile, through shared memory, to functions that store them. Each thread has N neighbouring
// columns, the same in all of its rows. For each half of the tile, the thread calls start(N, first of its columns),
// which returns a function store(). It then calls store(row, sums) for each of its rows. `sums` are the N sums of this
// row.
//
// N is kWide if `wide` is true, otherwise 1. `wide` must be false if rows of the result are not aligned for stores of
// kWide elements. Only the first `columns` columns of the tile lie in the result. Threads with other columns store
// nothing.
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
// If a product has few rows, its time is the time of reading the second operand, here called the weights (b in
// int8_matmul.cu). Weights are read once, from memory straight into fragments. Every block reads all rows of the first
// operand, from L2. The warps of a block divide k among them.

// A block computes up to 16 * kRowTiles rows and kColumns columns of the result. kRowTiles is 1, 2 or 4. With up to 16
// rows, kColumns is 16 or 32. With more rows it is 16, because there are too few registers for more sums.
//
// With up to 16 rows, a multiprocessor runs one block of 16 warps. Two blocks of 8 warps would have as many loads under
// way. But often there are fewer blocks: 1024 columns make 64 blocks of 16 columns, and an H100 has 132
// multiprocessors. Sharing k among blocks, as in matmul_few_rows.cu, needs a second kernel, which takes 4 us on an
// H100. That is 40 % of the time of a product with 8 rows, K = 4096 and 4096 columns.
template <int kRowTiles>
constexpr int kFewWarps = kRowTiles == 1 ? 16 : 8;
template <int kRowTiles>
constexpr int kFewBlocks = kRowTiles == 1 ? 1 : kResidentBlocks;

// Whether few_rows_kernel computes a product. Otherwise tiled_kernel computes it. `tiles` is the number of 64 x 64
// tiles in a product with at most 64 rows.
//
// A block of tiled_kernel has one tile, and takes all steps of k one after the other. If there are few tiles, most
// multiprocessors have no work. A block of few_rows_kernel with more than 16 rows has 16 columns, so there are more
// blocks. But each of these blocks reads all rows of the first operand from L2. The more tiles there are, the more such
// blocks a multiprocessor runs, and the more it reads. So few_rows_kernel has a limit: for 17 to 64 rows, `tiles` must
// be at most two thirds of the number of multiprocessors. On an H200, which has 132, 64 rows and N = K = 4096 mean 64
// tiles. few_rows_kernel took 14.9 us, and tiled_kernel 21.5 us. For fp16 rows (int8_linear) it was 17.2 us and 27.5
// us.
inline bool are_few_rows(int64_t m, int64_t n) {
  const int64_t tiles = (n + 63) / 64, count = multiprocessor_count();
  return m <= 16 || (m <= 64 && 3 * tiles <= 2 * count);
}

// Calls f with two integral_constants, the template arguments kRowTiles and kColumns of few_rows_kernel. `weights` has
// a row for each column of the result.
//
// For up to 16 rows, kColumns is chosen so that the busiest multiprocessor reads less. With 32 columns there are half
// as many blocks, and each block reads the rows. With 16 columns more multiprocessors have a block.
template <class F>
void with_few_rows(const Operand& rows, const Operand& weights, const F& f) {
  constexpr std::integral_constant<int, 16> kNarrow{};
  constexpr std::integral_constant<int, 32> kBroad{};
  if (rows.rows > 32) return f(std::integral_constant<int, 4>(), kNarrow);
  if (rows.rows > 16) return f(std::integral_constant<int, 2>(), kNarrow);
  const auto most_bytes = [&](int64_t columns) {
    const int64_t blocks = (weights.rows + columns - 1) / columns, count = multiprocessor_count();
    return (blocks + count - 1) / count * (rows.rows * rows.k + columns * weights.k);
  };
  constexpr std::integral_constant<int, 1> kOne{};
  if (most_bytes(kBroad) < most_bytes(kNarrow)) return f(kOne, kBroad);
  f(kOne, kNarrow);
}

// Returns the 16 bytes of a row that begin at byte k. Outside of the operand, returns zeros.
__device__ __forceinline__ int4 load_chunk(const Operand& operand, int64_t row, int64_t k) {
  if (row >= operand.rows || k >= operand.k) return make_int4(0, 0, 0, 0);
  const char* p = operand.first + row * operand.row_stride + k;
  assume_global(p);
  return *reinterpret_cast<const int4*>(p);
}

}  // namespace amp_kernels::cuda
