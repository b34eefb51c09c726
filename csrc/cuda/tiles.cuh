// The tile of a product that a block of eight warps computes: how operands lie in shared memory, which tile a block
// takes, and how results go from registers to global memory.
#pragma once

#include "grid.cuh"
#include "tensor_cores.cuh"

namespace amp_kernels::cuda {

// Blocks on a multiprocessor: two, each with up to 48 KB of shared memory, and 128 registers a thread. sm_75 has shared
// memory for only one block of 48 KB.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kResidentBlocks = 1;
#else
constexpr int kResidentBlocks = 2;
#endif

// The place of a chunk in its row. A chunk is 16 bytes of shared memory (unlike a chunk of table.h). A row is four
// chunks, 64 bytes along k. ldmatrix reads chunk c of eight successive rows at once. Shared memory has 32 banks of 4
// bytes, so two rows fill all banks. If chunks were stored in order, chunk c of row r and chunk c of row r + 2 would
// lie in the same banks. Therefore the order of the chunks differs between the four pairs of these eight rows, and the
// eight chunks lie in different banks.
struct MatrixSwizzle {
  static __device__ __forceinline__ int at(int row, int chunk) { return chunk ^ (row >> 1 & 3); }
};

// The eight warps of a block are arranged in two rows of four. Each warp has half of the tile's rows and a quarter of
// its columns.
constexpr int kWarpsDown = 2, kWarpsAcross = 4;

// The first row and column of a block's tile. A band is eight rows of tiles. Successive blocks take the tiles of a band
// column by column. So blocks that run at the same time take tiles near each other. Such tiles have rows of a or
// columns of b in common, so both operands come from L2.
struct TilePosition {
  int64_t m, n;

  template <int kM, int kN>
  static __device__ __forceinline__ TilePosition of(int64_t m, int64_t n, int64_t tile) {
    constexpr int kBand = 8;
    const int64_t down = (m + kM - 1) / kM, across = (n + kN - 1) / kN;
    const int64_t first = tile / (kBand * across) * kBand;
    const int64_t rows = down - first < kBand ? down - first : kBand;
    const int64_t inside = tile - first * across;
    return {(first + inside % rows) * kM, inside / rows * kN};
  }
};

// Results go through shared memory, half of the tile's rows at a time, so that stores to global memory are wide. Rows
// are padded (kStride), so that a warp writes its fragments to different banks. In for_each_of<8>, a lane reads eight
// columns in two reads of four columns (16 bytes). Such a read is served for eight lanes at a time, whose columns are 8
// apart. Columns that are 32 apart lie in the same banks, so lanes 4 apart would wait for each other. Therefore, in
// every odd group of 32 columns (32 to 63, 96 to 127, ...), neighbouring groups of four columns change places. A read
// then takes a warp 4 cycles, not 8. If kTransposed, the sums are fragments of the transposed product.
template <int kM, int kN, bool kTransposed = false>
struct ResultTile {
  // Rows and columns of a warp. A half of the tile has kRows rows.
  static constexpr int kRows = kM / kWarpsDown, kColumns = kN / kWarpsAcross;
  static constexpr int kStride = kN + (kTransposed ? 4 : 8);
  static constexpr int kBytes = kRows * kStride * 4;

  // The place in shared memory of the sum at a row and column of the half.
  static __device__ __forceinline__ int at(int row, int column) { return row * kStride + (column ^ (column >> 3 & 4)); }

  // Calls f(first row of a half, sums of this half in shared memory), first for the upper half of the tile, then for
  // the lower one.
  template <class Sum, int kTall, int kBroad, class F>
  static __device__ __forceinline__ void for_halves(char* shared, const Sum (&sums)[kTall][kBroad][4], const F& f) {
    static_assert(sizeof(Sum) == 4 && kTall * 16 == (kTransposed ? kColumns : kRows) &&
                  kBroad * 8 == (kTransposed ? kRows : kColumns));
    Sum* const results = reinterpret_cast<Sum*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int half = 0; half < kWarpsDown; ++half) {
      if (warp / kWarpsAcross == half) {
#pragma unroll
        for (int i = 0; i < kTall; ++i)
#pragma unroll
          for (int j = 0; j < kBroad; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const int down = i * 16 + c / 2 * 8 + lane / 4, across = j * 8 + lane % 4 * 2 + c % 2;
              results[at(kTransposed ? across : down, warp % kWarpsAcross * kColumns + (kTransposed ? down : across))] =
                  sums[i][j][c];
            }
      }
      barrier();
      f(half * kRows, results);
      barrier();
    }
  }

  // Calls f(row of the tile, column, Vector of kEach neighbouring sums) for all sums of a half.
  template <int kEach, class Sum, class F>
  static __device__ __forceinline__ void for_each_of(int first_row, const Sum* results, const F& f) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kN / kEach; i += kThreads) {
      const int row = i / (kN / kEach), column = i % (kN / kEach) * kEach;
      Vector<Sum, kEach> sums;
      constexpr int kWide = kEach < 4 ? kEach : 4;
#pragma unroll
      for (int k = 0; k < kEach; k += kWide) {
        const auto wide = *reinterpret_cast<const Vector<Sum, kWide>*>(results + at(row, column + k));
        memcpy(sums.data + k, wide.data, sizeof(wide));
      }
      f(first_row + row, column, sums);
    }
  }
};

}  // namespace amp_kernels::cuda
