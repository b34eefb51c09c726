// A linear layer with int8 weights:
//
//   out[m, n] = (sum over k of x[m, k] * weight[n, k]) * scale[n] + bias[n]        2 M N K operations, in fp32
//
// The weight is read as codes, one byte per element. The codes are converted to 16-bit numbers in registers. There are
// two kernels. In both kernels a block sums over all of k, for these outputs:
//
//   tiled_kernel       64 rows of x by 64 outputs, or 128 by 128. Its 8 warps share this tile. x and weight are copied
//                      to a ring of stages in shared memory
//   few_rows_kernel    up to 16 rows of x by 32 outputs, or 64 rows by 16 outputs. Its warps divide k among them.
//                      Weights are read once, K N bytes in all, straight into registers
//
// In both kernels x is fp16 or bf16. If x is fp32, or bf16 on a GPU before sm_80, torch multiplies (csrc/ops/int8.cpp).
//
// Tensor cores compute the transposed product, out^T = weight * x^T, because x then needs no work in registers: the
// words of a fragment of x (tensor_cores.cuh) are neighbours in memory, and are used as they are loaded. The words of a
// fragment of the weight have to be computed from codes in any case.
#include "../int8.h"
#include "int8_tiles.cuh"

namespace amp_kernels::cuda {
namespace {

// Scales and stores sums of N neighbouring outputs, from output n on. The scales and biases, which all rows share, are
// loaded once.
template <class T, int N>
struct Columns {
  float scale[N], bias[N];

  __device__ Columns(const Int8Linear& linear, int64_t n) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scale[i] = linear.scale[(n + i) * linear.scale_step];
      bias[i] = linear.bias == nullptr ? -0.0f : to_float(static_cast<const T*>(linear.bias)[n + i]);  // y + -0 is y
    }
  }

  __device__ __forceinline__ void store(const Int8Linear& linear, int64_t m, int64_t n, const float* sums) const {
    Vector<T, N> results;
#pragma unroll
    for (int i = 0; i < N; ++i) results.data[i] = from_float<T>(sums[i] * scale[i] + bias[i]);
    store_wide(static_cast<T*>(linear.out) + m * linear.n + n, results);
  }
};

// ------------------------------------------------------------------------------ codes into numbers
// A code plus 128 is an unsigned byte. The fp16 number 2^10 with this byte as its lowest bits is the number
// 2^10 + 128 + code. Subtracting 2^10 + 128 leaves the code, exactly. A GPU converts numbers at an eighth of the rate
// at which it subtracts.

// Converts four codes to fp16 numbers, two in a word.
__device__ __forceinline__ void expand(uint32_t codes, uint32_t (&words)[2], __half) {
  const uint32_t bytes = codes ^ 0x80808080u;
  const __half2 offset = __float2half2_rn(1024.0f + 128.0f);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t shifted = __byte_perm(bytes, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
    __half2 pair;
    memcpy(&pair, &shifted, sizeof(pair));
    pair = __hsub2(pair, offset);
    memcpy(&words[i], &pair, sizeof(pair));
  }
}

// Converts four codes to bf16 numbers, two in a word. The lowest bits of a bf16 number have room for 7 bits of the
// code, not for 8. So the code is computed from two numbers, as the first minus the second. Their bf16 bits:
//   0x4300 | (code & 0x7f)    128 plus the lower 7 bits of the code
//   0x4300 | (code & 0x80)    256 if the code is negative, otherwise 128
__device__ __forceinline__ void expand(uint32_t codes, uint32_t (&words)[2], __nv_bfloat16) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t shifted = __byte_perm(codes, 0x43434343u, i == 0 ? 0x4140 : 0x4342);
    const uint32_t low = shifted & 0xff7fff7fu, sign = shifted & 0xff80ff80u;
    __nv_bfloat162 pair, offset;
    memcpy(&pair, &low, sizeof(pair));
    memcpy(&offset, &sign, sizeof(offset));
    pair = __hsub2(pair, offset);
    memcpy(&words[i], &pair, sizeof(pair));
  }
}

// ------------------------------------------------------------------------------------------ tiles
constexpr int kTileK = 64;
constexpr int kXBytes = kTileK * 2;  // in a row of a tile of x

// If the fragments of x and the fragments of the weight have the elements along k in the same order, it does not matter
// which order this is. Here a lane reads four neighbours of x, and the four codes by which they are multiplied.
//
// At a time, half a warp reads 32 bytes from each of four rows of x. NumberSwizzle puts these bytes in different banks.
// At a time, a warp reads 16 bytes from each of eight rows of the weight. MatrixSwizzle (tiles.cuh) puts these bytes in
// different banks.
struct NumberSwizzle {
  static __device__ __forceinline__ int at(int row, int chunk) { return chunk ^ (row % 4 * 2); }
};

template <class T, int kM, int kN>
struct NumberTile {
  static constexpr int kWeightTiles = kN / kWarpsAcross / 16, kRowTiles = kM / kWarpsDown / 8;  // of a warp
  static constexpr int kStages = kM == 64 ? 4 : 2;
  static constexpr int kStageBytes = kM * kXBytes + kN * kTileBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;

  float sum[kWeightTiles][kRowTiles][4] = {};

  __device__ __forceinline__ void multiply(const char* x, const char* weight, int down, int across) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < kTileK; k += 16) {
      uint32_t w_words[kWeightTiles][4];
#pragma unroll
      for (int i = 0; i < kWeightTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = (across * kWeightTiles + i) * 16 + half * 8 + g;
          uint32_t words[2];
          expand(*reinterpret_cast<const uint32_t*>(weight + row * kTileBytes + MatrixSwizzle::at(row, k / 16) * 16 +
                                                    t * 4),
                 words, T{});
          w_words[i][half] = words[0];
          w_words[i][half + 2] = words[1];
        }
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        const int row = (down * kRowTiles + j) * 8 + g;
        const uint2 numbers =
            *reinterpret_cast<const uint2*>(x + row * kXBytes + NumberSwizzle::at(row, k / 8 + t / 2) * 16 + t % 2 * 8);
#pragma unroll
        for (int i = 0; i < kWeightTiles; ++i) multiply_numbers<T>(sum[i][j], w_words[i], {numbers.x, numbers.y});
      }
    }
  }
};

template <class T, int kM, int kN>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    tiled_kernel(const Int8Linear linear, const Operand x, const Operand weight) {
  using TileOf = NumberTile<T, kM, kN>;
  using Results = ResultTile<kM, kN, true>;
  static_assert(TileOf::kSharedBytes >= Results::kBytes);
  char* const shared = shared_memory();
  const TilePosition at = TilePosition::of<kM, kN>(linear.m, linear.n, blockIdx.x);
  const int warp = threadIdx.x / 32;
  Loader<kM, kXBytes, NumberSwizzle> load_x(x, at.m);
  Loader<kN> load_weight(weight, at.n);
  TileOf tile;
  for_tiles<TileOf::kStages, kM * kXBytes, TileOf::kStageBytes>(
      shared, (linear.k + kTileK - 1) / kTileK, load_x, load_weight, [&](const char* x_tile, const char* weight_tile) {
        tile.multiply(x_tile, weight_tile, warp / kWarpsAcross, warp % kWarpsAcross);
      });
  finish<Results, 4>(shared, tile.sum, linear.n % 4 == 0 && is_aligned16(linear.out), linear.n - at.n,
                     [&](auto each, int column) {
                       constexpr int kEach = decltype(each)::value;
                       const Columns<T, kEach> columns(linear, at.n + column);
                       return [=](int row, const Vector<float, kEach>& sums) {
                         if (at.m + row < linear.m) columns.store(linear, at.m + row, at.n + column, sums.data);
                       };
                     });
}

// --------------------------------------------------------------------------------------- few rows

// The warps take steps of 64 elements along k in turn. Lane (g, t) is the lane with g = lane / 4 and t = lane % 4. In a
// step it loads elements 16 t to 16 t + 15 along k from several rows. They are the rows g, g + 8, ... of x, and the
// rows of the weight for the block's outputs g, g + 8, ... At the end the sums of all warps are added through shared
// memory.
template <class T, int kRowTiles, int kColumns>
__global__ void __launch_bounds__(kFewWarps<kRowTiles> * 32, kFewBlocks<kRowTiles>)
    few_rows_kernel(const Int8Linear linear, const Operand x, const Operand weight) {
  constexpr int kWarps = kFewWarps<kRowTiles>, kEach = kRowTiles == 1 ? 2 : 1;  // steps that a warp has in flight
  constexpr int kWeightTiles = kColumns / 16, kHalves = 2 * kRowTiles, kValues = kWeightTiles * kHalves * 4;
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [kWarps, kValues, 32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t first_n = static_cast<int64_t>(blockIdx.x) * kColumns;
  float sum[kWeightTiles][kHalves][4] = {};
#pragma unroll 1
  for (int64_t first = warp * 64; first < linear.k; first += kEach * kWarps * 64) {
    uint32_t x_words[kEach][kHalves][8], codes[kEach][2 * kWeightTiles][4];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t k = first + e * kWarps * 64 + t * 16;
#pragma unroll
      for (int i = 0; i < 2 * kWeightTiles; ++i) {
        const int4 chunk = load_chunk(weight, first_n + g + 8 * i, k);
        memcpy(codes[e][i], &chunk, sizeof(chunk));
      }
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        const int4 low = load_chunk(x, g + 8 * j, k * 2), high = load_chunk(x, g + 8 * j, k * 2 + 16);
        memcpy(x_words[e][j], &low, sizeof(low));
        memcpy(x_words[e][j] + 4, &high, sizeof(high));
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e)
#pragma unroll
      for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int i = 0; i < kWeightTiles; ++i) {
          uint32_t low[2], high[2];
          expand(codes[e][2 * i][w], low, T{});
          expand(codes[e][2 * i + 1][w], high, T{});
#pragma unroll
          for (int j = 0; j < kHalves; ++j)
            multiply_numbers<T>(sum[i][j], {low[0], high[0], low[1], high[1]},
                                {x_words[e][j][2 * w], x_words[e][j][2 * w + 1]});
        }
  }
#pragma unroll
  for (int i = 0; i < kWeightTiles; ++i)
#pragma unroll
    for (int j = 0; j < kHalves; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        shared[((warp * kWeightTiles + i) * kHalves * 4 + j * 4 + c) * 32 + lane] = sum[i][j][c];
  barrier();
  // Each thread adds up one lane's sum over the warps, so that neighbouring threads read neighbouring addresses.
#pragma unroll 1
  for (int i = threadIdx.x; i < kValues * 32; i += kWarps * 32) {
    const int value = i / 32;
    const int64_t m = value / 4 % kHalves * 8 + t * 2 + value % 2;
    const int64_t n = first_n + value / 4 / kHalves * 16 + value % 4 / 2 * 8 + g;
    if (m >= linear.m || n >= linear.n) continue;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared[(w * kValues + value) * 32 + lane];
    Columns<T, 1>(linear, n).store(linear, m, n, &total);
  }
}

// ------------------------------------------------------------------------------------- host side

unsigned tiles(const Int8Linear& linear, int size) {
  return static_cast<unsigned>((linear.m + size - 1) / size * ((linear.n + size - 1) / size));
}

template <class T, int kSize>
void launch_tiled(const Int8Linear& linear, const Operand& x, const Operand& weight, Stream stream) {
  launch(tiled_kernel<T, kSize, kSize>, tiles(linear, kSize), kThreads, NumberTile<T, kSize, kSize>::kSharedBytes,
         stream, linear, x, weight);
}

}  // namespace

bool multiplies_codes_by(Dtype dtype) {
  return dtype == kHalf ||
         (dtype == kBFloat16 && multiplies_bf16(compiled_for<few_rows_kernel<__nv_bfloat16, 1, 16>>()));
}

void launch_int8_linear(const Int8Linear& linear, Stream stream) {
  const int64_t k = whole_chunks(linear.k);
  const Operand x{static_cast<const char*>(linear.x), linear.m, k * 2, linear.x_stride * 2};
  const Operand weight{reinterpret_cast<const char*>(linear.weight), linear.n, k, linear.weight_stride};
  with_16_bits(linear.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (are_few_rows(linear.m, linear.n)) {
      with_few_rows(x, weight, [&](auto row_tiles, auto few_columns) {
        constexpr int kRowTiles = decltype(row_tiles)::value, kColumns = decltype(few_columns)::value;
        constexpr int kFewThreads = kFewWarps<kRowTiles> * 32;
        launch(few_rows_kernel<T, kRowTiles, kColumns>, static_cast<unsigned>((linear.n + kColumns - 1) / kColumns),
               kFewThreads, kFewThreads * kRowTiles * kColumns / 2 * sizeof(float), stream, linear, x, weight);
      });
    } else if (tiles(linear, 128) < static_cast<unsigned>(multiprocessor_count())) {
      launch_tiled<T, 64>(linear, x, weight, stream);
    } else {
      launch_tiled<T, 128>(linear, x, weight, stream);
    }
  });
}

}  // namespace amp_kernels::cuda
