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

// One operand: rows over m or n, and k. Strides in bytes.
struct Operand {
  const char* first;
  int64_t rows, k;
  int64_t row_stride, k_stride;

  // Whether code that was compiled for `sm` can copy rows of codes 16 bytes at a time. `bytes`: from the first to the
  // end of the storage, in which the last copy of the last row must end.
  bool is_direct(int64_t bytes, int sm) const {
    const bool has_parts = copies_parts(sm) && (rows - 1) * row_stride + (k + 15) / 16 * 16 <= bytes;
    return k_stride == 1 && is_aligned16(first) && row_stride % 16 == 0 && (k % 16 == 0 || has_parts);
  }
};

constexpr int kTileBytes = 64;  // of k, for codes
constexpr int kTileChunks = kTileBytes / 16;

// A loader fills one tile a step: rows from `first_row` on, kBytes of k further each time. fetch() starts the loads,
// and store() finishes them after the arithmetic on an earlier tile. A tile is 0 outside of the operand.

// For rows that are contiguous along k and aligned to 16 bytes: asynchronous copies (cp.async).
template <int kRows, int kBytes = kTileBytes, class Swizzle = MatrixSwizzle>
struct DirectLoader {
  static constexpr int kChunks = kBytes / 16;
  static constexpr int kLines = kThreads / kChunks;  // in one go
  static constexpr int kTimes = kRows / kLines;
  static_assert(kLines % 8 == 0, "the chunks of a thread's rows are in the same place");

  uintptr_t next;  // an address: where k is 0 there is no memory, and arithmetic on a null pointer would be undefined
  int64_t line_stride;
  int to;          // offset in the tile
  int lines;       // rows of the operand from this thread's first one to the end of the tile
  int last_bytes;  // of this thread's chunk in the last step

  static __device__ __forceinline__ int clamp(int64_t value, int most) {
    return value < 0 ? 0 : value < most ? static_cast<int>(value) : most;
  }

  __device__ DirectLoader(const Operand& operand, int64_t first_row) {
    const int line = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    next = reinterpret_cast<uintptr_t>(operand.first) + (first_row + line) * operand.row_stride + chunk * 16;
    line_stride = kLines * operand.row_stride;
    to = line * kBytes + Swizzle::at(line, chunk) * 16;
    lines = clamp(operand.rows - first_row - line, kRows);
    last_bytes = clamp(operand.k - (operand.k - 1) / kBytes * kBytes - chunk * 16, 16);
    expect_whole_copies(last_bytes);
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

  __device__ __forceinline__ void store(char*) {}
};

// For rows that are contiguous along k and aligned to their elements of type T only: through registers.
template <int kRows, int kBytes, class Swizzle, class T>
struct ElementLoader {
  static constexpr int kTimes = kRows * kBytes / 4 / kThreads;

  const Operand operand;
  const int64_t first_row;
  int64_t first_k = 0;
  uint32_t word[kTimes];

  __device__ ElementLoader(const Operand& of, int64_t first) : operand(of), first_row(first) {}

  static __device__ __forceinline__ int row(int i) { return (i * kThreads + threadIdx.x) / (kBytes / 4); }
  static __device__ __forceinline__ int k() { return threadIdx.x % (kBytes / 4) * 4; }

  __device__ __forceinline__ void fetch(char*, bool) {
    const int64_t rest = operand.k - first_k - k();
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      word[i] = 0;
      if (first_row + row(i) >= operand.rows) continue;
      const char* p = operand.first + (first_row + row(i)) * operand.row_stride + first_k + k();
      if (rest >= 4 && reinterpret_cast<uintptr_t>(p) % 4 == 0) {
        word[i] = *reinterpret_cast<const uint32_t*>(p);
      } else {
#pragma unroll
        for (int at = 0; at < 4; at += sizeof(T))
          if (at < rest) word[i] |= static_cast<uint32_t>(*reinterpret_cast<const T*>(p + at)) << 8 * at;
      }
    }
    first_k += kBytes;
  }

  __device__ __forceinline__ void store(char* tile) {
#pragma unroll
    for (int i = 0; i < kTimes; ++i)
      *reinterpret_cast<uint32_t*>(tile + row(i) * kBytes + Swizzle::at(row(i), k() / 16) * 16 + k() % 16) = word[i];
  }
};

// Transposes 4 x 4 bytes: byte j of r[i] becomes byte i of r[j].
__device__ __forceinline__ void transpose_bytes(uint32_t (&r)[4]) {
  const uint32_t a = __byte_perm(r[0], r[1], 0x5140), b = __byte_perm(r[2], r[3], 0x5140);
  const uint32_t c = __byte_perm(r[0], r[1], 0x7362), d = __byte_perm(r[2], r[3], 0x7362);
  r[0] = __byte_perm(a, b, 0x5410);
  r[1] = __byte_perm(a, b, 0x7632);
  r[2] = __byte_perm(c, d, 0x5410);
  r[3] = __byte_perm(c, d, 0x7632);
}

// For codes in any layout: squares of 4 rows by 4 of k, through registers.
template <int kRows>
struct AnyLoader {
  static constexpr int kSquares = kRows / 4 * (kTileBytes / 4) / kThreads;

  const Operand operand;
  const int64_t first_row;
  int64_t first_k = 0;
  uint32_t word[kSquares][4];
  bool along_rows;  // neighbours in memory are neighbouring rows, not neighbours along k
  bool wide;        // four neighbours are one aligned word

  __device__ AnyLoader(const Operand& of, int64_t first)
      : operand(of), first_row(first), along_rows(of.row_stride == 1 && of.k_stride != 1) {
    const bool aligned = reinterpret_cast<uintptr_t>(operand.first) % 4 == 0;
    wide = aligned && (along_rows ? operand.k_stride : operand.row_stride) % 4 == 0 &&
           (along_rows || operand.k_stride == 1);
  }

  struct Square {
    int row, k;
  };

  __device__ __forceinline__ Square square(int j) const {
    const int i = j * kThreads + threadIdx.x;
    if (!along_rows) return {i / 16 * 4, i % 16 * 4};
    // A warp takes eight squares along rows by four along k: it reads 32 bytes of each k.
    const int warp = i / 32, lane = i % 32;
    return {(warp % (kRows / 32) * 8 + lane % 8) * 4, (warp / (kRows / 32) * 4 + lane / 8) * 4};
  }

  // A word has four neighbours in memory, where `wide` allows it.
  __device__ __forceinline__ void fetch(char*, bool) {
    const int64_t word_stride = along_rows ? operand.k_stride : operand.row_stride;
    const int64_t byte_stride = along_rows ? operand.row_stride : operand.k_stride;
#pragma unroll
    for (int j = 0; j < kSquares; ++j) {
      const Square at = square(j);
      const int64_t row = first_row + at.row, k = first_k + at.k;
      const int64_t rows = operand.rows - row, ks = operand.k - k;
      const int64_t words = along_rows ? ks : rows, bytes = along_rows ? rows : ks;
      const char* p = operand.first + row * operand.row_stride + k * operand.k_stride;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[j][i] = 0;
        if (wide && bytes >= 4) {
          if (i < words) word[j][i] = *reinterpret_cast<const uint32_t*>(p + i * word_stride);
        } else {
#pragma unroll
          for (int b = 0; b < 4; ++b)
            if (i < words && b < bytes)
              word[j][i] |= static_cast<uint32_t>(static_cast<unsigned char>(p[i * word_stride + b * byte_stride]))
                            << 8 * b;
        }
      }
    }
    first_k += kTileBytes;
  }

  __device__ __forceinline__ void store(char* tile) {
#pragma unroll
    for (int j = 0; j < kSquares; ++j) {
      const Square at = square(j);
      if (along_rows) transpose_bytes(word[j]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<uint32_t*>(tile + (at.row + i) * kTileBytes + MatrixSwizzle::at(at.row + i, at.k / 16) * 16 +
                                     at.k % 16) = word[j][i];
    }
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
  const auto store = [&](int step, int stage) {
    if (step >= steps) return;
    load_first.store(shared + stage);
    load_second.store(shared + stage + kFirstBytes);
  };
  const auto stage_after = [](int stage) { return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes; };
  int filled = 0;  // the stage to be filled next
#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step, filled = stage_after(filled)) {
    fetch(step, filled);
    store(step, filled);
  }
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, filled = stage_after(filled), stage = stage_after(stage)) {
    wait_copies<kStages - 2>();
    barrier();  // every thread's part of this stage has arrived, and every thread is done with the stage before
    fetch(step + kStages - 1, filled);
    multiply(shared + stage, shared + stage + kFirstBytes);
    store(step + kStages - 1, filled);
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
// tiles as soon as there are half as many tiles as multiprocessors, with 64 rows a third. Rows are whole chunks.
inline bool are_few_rows(int64_t m, int64_t n, int64_t k_bytes) {
  const int64_t tiles = (n + 63) / 64, count = multiprocessor_count();
  return k_bytes % 16 == 0 && (m <= 16 || (m <= 32 && 2 * tiles <= count) || (m <= 64 && 3 * tiles <= count));
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
