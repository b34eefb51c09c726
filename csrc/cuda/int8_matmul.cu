// The product of two matrices of codes, with zero points za and zb, scales sa and sb, and a bias. It takes 2 M N K
// operations:
//
//   out[m, n] = (sum over k of (a[m, k] - za[m]) * (b[k, n] - zb[n])) * (sa[m] * sb[n]) + bias[n]
//             = (sum of a * b - zb[n] * sum of a[m] - za[m] * (sum of b[n] - K * zb[n])) * ...
//
// The sums over k of a * b, of row m of a, and of column n of b are exact in int32. All of them are computed in the
// same pass over a and b.
//
//   tiled_kernel: a block computes a tile of 64 x 64, 128 x 128 or 128 x 256 outputs. Both operands are copied to a
//   ring of stages in shared memory, 64 bytes along k per stage. Each of the 8 warps computes a part of the tile. Its
//   sums stay in registers, as fragments of m16n8k32 (tensor_cores.cuh).
//
//                      b  [columns]
//        a [rows] [k] +------+------+------+------+
//                     | warp | warp | warp | warp |   2 warps down, 4 across
//                     +------+------+------+------+
//                     | warp | warp | warp | warp |
//                     +------+------+------+------+
//
//   few_rows_kernel: a block computes up to 16 rows x 32 columns, or 64 rows x 16 columns. Its warps divide k among
//   them. b is read once, K N bytes in all, straight into fragments. The reads of b limit the speed.
#include <algorithm>

#include "../formulas/int8.h"
#include "int8_codes.cuh"
#include "int8_tiles.cuh"

namespace amp_kernels::cuda {
namespace {

// ---------------------------------------------------------------------------------------- results

// Scales and stores the sums of N neighbouring columns, from column n on. The numbers that all rows share are loaded
// once. If kSums is true, zero points are applied, with the sums of the codes of each row and of each column. kSums may
// be false only if there are no zero points.
template <int N, bool kSums>
struct Columns {
  float scale[N], bias[N];
  int zero_point[N];
  int64_t correction[N];  // to be multiplied by the row's zero point
  Affine affine;          // of the results, if these are codes

  __device__ Columns(const Int8Matmul& matmul, int64_t n, const int* column_sums) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t at = (n + i) * matmul.b_step;
      scale[i] = matmul.b_scale[at];
      bias[i] = matmul.bias == nullptr ? -0.0f : static_cast<const float*>(matmul.bias)[n + i];  // y + -0 is y
      if constexpr (kSums) {
        zero_point[i] = matmul.b_zero_point == nullptr ? 0 : matmul.b_zero_point[at];
        correction[i] = column_sums[i] - matmul.k * zero_point[i];
      }
    }
    if (matmul.out_scale != nullptr) affine = given_affine(*matmul.out_scale, matmul.out_zero_point);
  }

  __device__ __forceinline__ void store(const Int8Matmul& matmul, int64_t m, int64_t n, const Vector<int, N>& sums,
                                        int row_sum) const {
    const float row_scale = matmul.a_scale[m * matmul.a_step];
    const int64_t row_zero_point = kSums && matmul.a_zero_point != nullptr ? matmul.a_zero_point[m * matmul.a_step] : 0;
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kSums) {
        const int64_t row_term = static_cast<int64_t>(zero_point[i]) * row_sum;
        y[i] = static_cast<float>(sums.data[i] - row_term - row_zero_point * correction[i]);
      } else {
        y[i] = static_cast<float>(sums.data[i]);
      }
      y[i] = add_rn(multiply_rn(y[i], multiply_rn(row_scale, scale[i])), bias[i]);
    }
    store_numbers(matmul, m * matmul.n + n, y);
  }

 private:
  __device__ __forceinline__ void store_numbers(const Int8Matmul& matmul, int64_t at, const float (&y)[N]) const {
    const auto store_as = [&](auto zero, const auto& convert) {
      Vector<decltype(zero), N> results;
#pragma unroll
      for (int i = 0; i < N; ++i) results.data[i] = convert(y[i]);
      store_wide(static_cast<decltype(zero)*>(matmul.out) + at, results);
    };
    if (matmul.out_scale != nullptr)
      return store_as(int8_t{}, [&](float v) { return static_cast<int8_t>(nearest_code(v, affine)); });
    switch (matmul.dtype) {
      case kHalf:
        return store_as(__half{}, [](float v) { return from_float<__half>(v); });
      case kBFloat16:
        return store_as(__nv_bfloat16{}, [](float v) { return from_float<__nv_bfloat16>(v); });
      default:
        return store_as(float{}, [](float v) { return v; });
    }
  }
};

// ------------------------------------------------------------------------------------------ tiles

// Reads of shared memory limit the speed. With a tile of 128 x 256, a warp computes twice as many products as with a
// tile of 128 x 128, but it reads only 4/3 as many bytes. However, sums take most of the registers. With a tile of
// 128 x 256 they take 128 registers of each thread, so a multiprocessor has room for only one block.
template <int kM, int kN>
struct Tile {
  static constexpr int kStages = kM == 128 && kN == 128 ? 3 : 4;
  static constexpr int kBlocks = kN == 256 ? 1 : kResidentBlocks;
  static constexpr int kRowTiles = kM / kWarpsDown / 16, kColumnTiles = kN / kWarpsAcross / 8;  // of a warp
  static constexpr int kStageBytes = (kM + kN) * kTileBytes;
  static constexpr int kSumsOffset = ResultTile<kM, kN>::kBytes;
  static constexpr int kSharedBytes = std::max(kStages * kStageBytes, kSumsOffset + (kM + kN) * 4);
  static_assert(kSharedBytes <= 99 * 1024);

  int sum[kRowTiles][kColumnTiles][4] = {};
  int row_sum[kRowTiles][2] = {};
  int column_sum[kColumnTiles] = {};

  template <bool kSums>
  __device__ __forceinline__ void multiply(const char* a, const char* b, int down, int across) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < kTileChunks; chunk += 2) {
      uint32_t a_words[kRowTiles][4], b_words[kColumnTiles][2];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const int row = (down * kRowTiles + i) * 16 + lane % 16;
        load_matrices(a_words[i], a + row * kTileBytes + MatrixSwizzle::at(row, chunk + lane / 16) * 16);
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 2) {
        const int row = (across * kColumnTiles + j) * 8 + lane / 16 * 8 + lane % 8;
        uint32_t words[4];
        load_matrices(words, b + row * kTileBytes + MatrixSwizzle::at(row, chunk + lane / 8 % 2) * 16);
        b_words[j][0] = words[0];
        b_words[j][1] = words[1];
        b_words[j + 1][0] = words[2];
        b_words[j + 1][1] = words[3];
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) multiply_codes(sum[i][j], a_words[i], b_words[j]);
      if constexpr (kSums) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int w = 0; w < 4; ++w) row_sum[i][w % 2] = add_codes(a_words[i][w], row_sum[i][w % 2]);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
          column_sum[j] = add_codes(b_words[j][1], add_codes(b_words[j][0], column_sum[j]));
      }
    }
  }

  // Stores the sums of codes in shared memory. Each sum is divided among four lanes, whose parts are added up first.
  __device__ __forceinline__ void store_sums(int* row_sums, int* column_sums, int down, int across) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int total = lanes_reduce(row_sum[i][half], 4, Sum());
        if (across == 0 && lane % 4 == 0) row_sums[(down * kRowTiles + i) * 16 + half * 8 + lane / 4] = total;
      }
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const int total = lanes_reduce(column_sum[j], 4, Sum());
      if (down == 0 && lane % 4 == 0) column_sums[(across * kColumnTiles + j) * 8 + lane / 4] = total;
    }
  }
};

template <int kM, int kN, bool kSums>
__global__ void __launch_bounds__(kThreads, Tile<kM, kN>::kBlocks)
    tiled_kernel(const Int8Matmul matmul, const Operand a, const Operand b) {
  using TileOf = Tile<kM, kN>;
  char* const shared = shared_memory();
  const TilePosition at = TilePosition::of<kM, kN>(matmul.m, matmul.n, blockIdx.x);
  const int warp = threadIdx.x / 32, down = warp / kWarpsAcross, across = warp % kWarpsAcross;
  Loader<kM> load_a(a, at.m);
  Loader<kN> load_b(b, at.n);
  TileOf tile;
  for_tiles<TileOf::kStages, kM * kTileBytes, TileOf::kStageBytes>(
      shared, (matmul.k + kTileBytes - 1) / kTileBytes, load_a, load_b,
      [&](const char* a_tile, const char* b_tile) { tile.template multiply<kSums>(a_tile, b_tile, down, across); });
  int* const row_sums = reinterpret_cast<int*>(shared + TileOf::kSumsOffset);
  int* const column_sums = row_sums + kM;
  if constexpr (kSums) tile.store_sums(row_sums, column_sums, down, across);
  // The number of columns that a thread finishes at a time. With zero points, four columns would take more registers
  // than the sums leave free.
  constexpr int kWide = kSums ? 2 : 4;
  finish<ResultTile<kM, kN>, kWide>(
      shared, tile.sum, matmul.n % kWide == 0 && is_aligned16(matmul.out), matmul.n - at.n, [&](auto each, int column) {
        constexpr int kEach = decltype(each)::value;
        const Columns<kEach, kSums> columns(matmul, at.n + column, column_sums + column);
        return [=](int row, const Vector<int, kEach>& sums) {
          if (at.m + row < matmul.m) columns.store(matmul, at.m + row, at.n + column, sums, kSums ? row_sums[row] : 0);
        };
      });
}

// --------------------------------------------------------------------------------------- few rows

// The warps take steps of 64 bytes along k in turn. Lane (g, t) is the lane with g = lane / 4 and t = lane % 4. In a
// step, it loads bytes 16 t to 16 t + 15 along k from several rows and columns. They are the rows g, g + 8, ... of a,
// and the columns g, g + 8, ... of b. The fragments then have the elements along k in another order than the
// instruction (mma, tensor_cores.cuh) expects. That does no harm, because a and b have the same order.
template <int kRowTiles, int kColumnTiles>
struct FewSums {
  int sum[kRowTiles][kColumnTiles][4];
  int row_sum[kRowTiles][2], column_sum[kColumnTiles];

  // The struct as an array of kValues ints: the sums of products, the sums of rows, and the sums of columns.
  static constexpr int kProducts = kRowTiles * kColumnTiles * 4, kRows = kRowTiles * 2;
  static constexpr int kValues = kProducts + kRows + kColumnTiles;

  __device__ __forceinline__ void add(const int4 (&a)[kRowTiles][2], const int4 (&b)[kColumnTiles]) {
    uint32_t a_words[kRowTiles][2][4], b_words[kColumnTiles][4];
    memcpy(a_words, a, sizeof(a_words));
    memcpy(b_words, b, sizeof(b_words));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) column_sum[j] = add_codes(b_words[j][w], column_sum[j]);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) row_sum[i][half] = add_codes(a_words[i][half][w], row_sum[i][half]);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
          if (w % 2 == 0)
            multiply_codes(sum[i][j], {a_words[i][0][w], a_words[i][1][w], a_words[i][0][w + 1], a_words[i][1][w + 1]},
                           {b_words[j][w], b_words[j][w + 1]});
      }
    }
  }

  // The sum of a row's codes is divided among four lanes, and so is the sum of a column's codes. After gather(), each
  // of the four lanes has the whole sum.
  __device__ __forceinline__ void gather() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum[i][half] = lanes_reduce(row_sum[i][half], 4, Sum());
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) column_sum[j] = lanes_reduce(column_sum[j], 4, Sum());
  }
};

template <int kRowTiles, int kColumns>
__global__ void __launch_bounds__(kFewWarps<kRowTiles> * 32, kFewBlocks<kRowTiles>)
    few_rows_kernel(const Int8Matmul matmul, const Operand a, const Operand b) {
  constexpr int kWarps = kFewWarps<kRowTiles>, kColumnTiles = kColumns / 8;
  using Sums = FewSums<kRowTiles, kColumnTiles>;
  // How many steps along k a warp has in flight. With up to 16 rows, a thread has 128 bytes of b in flight.
  constexpr int kEach = kRowTiles == 1 ? 8 / kColumnTiles : 4 / kRowTiles;
  int* const shared = reinterpret_cast<int*>(shared_memory());  // [kWarps, Sums::kValues, 32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  const int64_t first_n = static_cast<int64_t>(blockIdx.x) * kColumns;
  Sums sums = {};
#pragma unroll 1
  for (int64_t k = warp * 64 + lane % 4 * 16; k - lane % 4 * 16 < matmul.k; k += kEach * kWarps * 64) {
    int4 a_chunks[kEach][kRowTiles][2], b_chunks[kEach][kColumnTiles];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) b_chunks[e][j] = load_chunk(b, first_n + g + 8 * j, k + e * kWarps * 64);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) a_chunks[e][i / 2][i % 2] = load_chunk(a, g + 8 * i, k + e * kWarps * 64);
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums.add(a_chunks[e], b_chunks[e]);
  }
  sums.gather();
  static_assert(sizeof(Sums) == Sums::kValues * sizeof(int));
  const int* const values = reinterpret_cast<const int*>(&sums);
#pragma unroll
  for (int i = 0; i < Sums::kValues; ++i) shared[(warp * Sums::kValues + i) * 32 + lane] = values[i];
  barrier();
  // Each thread adds up one lane's sum of products over the warps, so that neighbouring threads read neighbouring
  // addresses.
#pragma unroll 1
  for (int i = threadIdx.x; i < Sums::kProducts * 32; i += kWarps * 32) {
    const int value = i / 32, half = value % 4 / 2, column_tile = value / 4 % kColumnTiles;
    const int row_tile = value / 4 / kColumnTiles, in_tile = lane % 4 * 2 + value % 2;
    const int64_t m = row_tile * 16 + half * 8 + g, n = first_n + column_tile * 8 + in_tile;
    if (m >= matmul.m || n >= matmul.n) continue;
    const auto total = [&](int of, int from) {
      int sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared[(w * Sums::kValues + of) * 32 + from];
      return sum;
    };
    const int column_sum = total(Sums::kProducts + Sums::kRows + column_tile, in_tile * 4);
    const Columns<1, true> columns(matmul, n, &column_sum);
    columns.store(matmul, m, n, {total(value, lane)}, total(Sums::kProducts + row_tile * 2 + half, lane));
  }
}

// ------------------------------------------------------------------------------------- host side

int64_t tiles_of(const Int8Matmul& matmul, int m, int n) { return (matmul.m + m - 1) / m * ((matmul.n + n - 1) / n); }

template <int kM, int kN>
void launch_tiled(const Int8Matmul& matmul, const Operand& a, const Operand& b, Stream stream) {
  const int64_t tiles = tiles_of(matmul, kM, kN);
  const auto kernel = matmul.a_zero_point != nullptr || matmul.b_zero_point != nullptr ? tiled_kernel<kM, kN, true>
                                                                                       : tiled_kernel<kM, kN, false>;
  launch(kernel, static_cast<unsigned>(tiles), kThreads, Tile<kM, kN>::kSharedBytes, stream, matmul, a, b);
}

}  // namespace

void launch_int8_matmul(const Int8Matmul& matmul, Stream stream) {
  const int64_t k = whole_chunks(matmul.k);
  const Operand a{reinterpret_cast<const char*>(matmul.a), matmul.m, k, matmul.a_strides[0]};
  const Operand b{reinterpret_cast<const char*>(matmul.b), matmul.n, k, matmul.b_strides[1]};
  const int64_t count = multiprocessor_count(), medium = tiles_of(matmul, 128, 128);
  const int64_t large_rounds = (tiles_of(matmul, 128, 256) + count - 1) / count;
  if (are_few_rows(matmul.m, matmul.n)) {
    with_few_rows(a, b, [&](auto row_tiles, auto few_columns) {
      constexpr int kRowTiles = decltype(row_tiles)::value, kColumns = decltype(few_columns)::value;
      constexpr int kFewThreads = kFewWarps<kRowTiles> * 32;
      launch(few_rows_kernel<kRowTiles, kColumns>, static_cast<unsigned>((matmul.n + kColumns - 1) / kColumns),
             kFewThreads, kFewThreads * sizeof(FewSums<kRowTiles, kColumns / 8>), stream, matmul, a, b);
    });
  } else if (medium < count) {
    launch_tiled<64, 64>(matmul, a, b, stream);
  } else if (2 * large_rounds <= (medium + count - 1) / count && Tile<128, 256>::kSharedBytes <= block_memory()) {
    launch_tiled<128, 256>(matmul, a, b, stream);
  } else {
    launch_tiled<128, 128>(matmul, a, b, stream);
  }
}

}  // namespace amp_kernels::cuda
