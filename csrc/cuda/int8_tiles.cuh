// Tiles of a product of codes on their way into shared memory, rows of 16-byte chunks along k.
#pragma once

#include "tiles.cuh"

namespace amp_kernels::cuda {

// One operand: rows over m or n, and k. Strides in bytes.
struct Operand {
  const char* first;
  int64_t rows, k;
  int64_t row_stride, k_stride;

  bool is_direct(int element_size) const {
    return k_stride == element_size && is_aligned16(first) && row_stride % 16 == 0;
  }
};

constexpr int kTileBytes = 64;  // of k, for codes
constexpr int kTileChunks = kTileBytes / 16;

// Rows along k, aligned to 16 bytes: copied by the hardware, with zeros past the edges. k is in bytes.
template <int kRows, int kBytes = kTileBytes, class Swizzle = MatrixSwizzle>
struct DirectLoader {
  __device__ explicit DirectLoader(const Operand&) {}

  __device__ __forceinline__ void fetch(const Operand& operand, char* tile, int64_t first_row, int64_t first_k) {
    constexpr int kChunks = kBytes / 16;
#pragma unroll 1  // or nvcc keeps the address of every chunk from step to step, and spills
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int64_t rest = first_row + row < operand.rows ? operand.k - first_k - chunk * 16 : 0;
      const int bytes = rest <= 0 ? 0 : rest < 16 ? static_cast<int>(rest) : 16;
      const int64_t offset = bytes == 0 ? 0 : (first_row + row) * operand.row_stride + first_k + chunk * 16;
      copy_async(tile + row * kBytes + Swizzle::at(row, chunk) * 16, operand.first + offset, bytes);
    }
  }

  __device__ __forceinline__ void store(const Operand&, char*, int64_t, int64_t) {}
};

// Rows along k in elements of type Word, aligned to that alone.
template <int kRows, int kBytes, class Swizzle, class Word>
struct ElementLoader {
  __device__ explicit ElementLoader(const Operand&) {}

  __device__ __forceinline__ void fetch(const Operand&, char*, int64_t, int64_t) {}

  __device__ __forceinline__ void store(const Operand& operand, char* tile, int64_t first_row, int64_t first_k) {
    constexpr int kSize = sizeof(Word), kElements = kBytes / kSize;
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * kElements; i += kThreads) {
      const int row = i / kElements, k = i % kElements * kSize;
      Word word = 0;
      if (first_row + row < operand.rows && first_k + k < operand.k)
        word = *reinterpret_cast<const Word*>(operand.first + (first_row + row) * operand.row_stride + first_k + k);
      *reinterpret_cast<Word*>(tile + row * kBytes + Swizzle::at(row, k / 16) * 16 + k % 16) = word;
    }
  }
};

// c[j] gets byte i of r[j], for all i, j: the transpose of 4 x 4 bytes.
__device__ __forceinline__ void transpose_bytes(uint32_t (&r)[4]) {
  const uint32_t a = __byte_perm(r[0], r[1], 0x5140), b = __byte_perm(r[2], r[3], 0x5140);
  const uint32_t c = __byte_perm(r[0], r[1], 0x7362), d = __byte_perm(r[2], r[3], 0x7362);
  r[0] = __byte_perm(a, b, 0x5410);
  r[1] = __byte_perm(a, b, 0x7632);
  r[2] = __byte_perm(c, d, 0x5410);
  r[3] = __byte_perm(c, d, 0x7632);
}

// Codes in any layout, in squares of 4 rows and 4 along k, by way of registers: `fetch` starts the loads, `store`
// comes after the arithmetic on the tile before.
template <int kRows>
struct AnyLoader {
  static constexpr int kSquares = kRows / 4 * (kTileBytes / 4) / kThreads;

  uint32_t word[kSquares][4];
  // Which are neighbours in memory, and so in a warp; and whether four of them are aligned to a word.
  bool along_rows, wide;

  __device__ explicit AnyLoader(const Operand& operand) : along_rows(operand.row_stride == 1 && operand.k_stride != 1) {
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
    // Eight squares of rows by four of k in a warp: 32 bytes of each k, and four words apart in shared memory.
    const int warp = i / 32, lane = i % 32;
    return {(warp % (kRows / 32) * 8 + lane % 8) * 4, (warp / (kRows / 32) * 4 + lane / 8) * 4};
  }

  // Words along rows where they are neighbours, else along k.
  __device__ __forceinline__ void fetch(const Operand& operand, char*, int64_t first_row, int64_t first_k) {
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
  }

  __device__ __forceinline__ void store(const Operand&, char* tile, int64_t, int64_t) {
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

// ---------------------------------------------------------------------------------------- results

// Row m of `out` from column n on, up to the end of the row at `columns`.
template <class T, int N>
__device__ __forceinline__ void store_results(T* out, int64_t columns, int64_t m, int64_t n,
                                              const Vector<T, N>& results) {
  T* const p = out + m * columns + n;
  if (n + N <= columns && reinterpret_cast<uintptr_t>(p) % (N * sizeof(T)) == 0) {
    store_wide(p, results);
  } else {
    store_each(p, results, 1, columns - n < N ? static_cast<int>(columns - n) : N);
  }
}

// --------------------------------------------------------------------------------------- few rows

// 16 bytes of a row, or as many as there are before its end. k is in bytes.
__device__ __forceinline__ int4 load_chunk(const Operand& operand, int64_t row, int64_t k) {
  int4 chunk = make_int4(0, 0, 0, 0);
  if (row >= operand.rows || k >= operand.k) return chunk;
  const char* p = operand.first + row * operand.row_stride + k;
  assume_global(p);
  if (k + 16 <= operand.k) return *reinterpret_cast<const int4*>(p);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (k + i < operand.k) words[i / 4] |= static_cast<uint32_t>(static_cast<unsigned char>(p[i])) << 8 * (i % 4);
  memcpy(&chunk, words, sizeof(chunk));
  return chunk;
}

}  // namespace amp_kernels::cuda
