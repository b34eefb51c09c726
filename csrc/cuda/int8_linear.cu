// A linear layer of 16-bit or fp32 numbers with int8 weights: they become numbers in registers, never in memory. The
// products go to tensor cores where those take the dtype, and are accumulated in fp32.
#include "../int8.h"
#include "int8_tiles.cuh"

namespace amp_kernels::cuda {
namespace {

template <class T>
__device__ __forceinline__ float result_of(const Int8Linear& linear, int64_t n, float sum) {
  const float y = sum * linear.scale[n * linear.scale_step];
  return linear.bias == nullptr ? y : y + to_float(static_cast<const T*>(linear.bias)[n]);
}

template <class T, int N>
__device__ __forceinline__ void store_sums(const Int8Linear& linear, int64_t m, int64_t n, const float* sums) {
  if (m >= linear.m || n >= linear.n) return;
  Vector<T, N> results{};
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (n + i < linear.n) results.data[i] = from_float<T>(result_of<T>(linear, n + i, sums[i]));
  store_results(static_cast<T*>(linear.out), linear.n, m, n, results);
}

// ------------------------------------------------------------------------------ codes into numbers
// A code plus 128 is a byte, and a byte below the exponent of 2^10 in fp16, or 2^23 in fp32, is a number: what is left
// is a subtraction, exact as is the result. A conversion instruction runs at an eighth of that rate.

// Four codes to two words of two numbers.
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

__device__ __forceinline__ void expand(uint32_t codes, float (&numbers)[4]) {
  const uint32_t bytes = codes ^ 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t shifted = __byte_perm(bytes, 0x4b000000u, 0x7650 + i);
    float number;
    memcpy(&number, &shifted, sizeof(number));
    numbers[i] = number - (8388608.0f + 128.0f);
  }
}

// A code has 8 significant bits, as bf16 has: the upper half of the fp32 number is all of it.
__device__ __forceinline__ void expand(uint32_t codes, uint32_t (&words)[2], __nv_bfloat16) {
  float numbers[4];
  expand(codes, numbers);
  uint32_t bits[4];
  memcpy(bits, numbers, sizeof(bits));
  words[0] = __byte_perm(bits[0], bits[1], 0x7632);
  words[1] = __byte_perm(bits[2], bits[3], 0x7632);
}

// ------------------------------------------------------------------------------------------ tiles

constexpr int kTileRows = 128;  // of x, and of the weight
constexpr int kTileK = 64;
constexpr int kStages = 2;
constexpr int kXBytes = kTileK * 2;

// A lane reads four neighbours of x and the four codes of the same k: a fragment may hold any k at all, as long as it
// is the same in both. So half a warp reads 32 bytes of four rows of x, and a warp 16 bytes of eight rows of the
// weight, for which the other swizzle serves.
struct NumberSwizzle {
  static __device__ __forceinline__ int at(int row, int chunk) { return chunk ^ (row % 4 * 2); }
};

template <class T>
struct NumberTile {
  static constexpr int kRowTiles = kTileRows / kWarpsDown / 16, kColumnTiles = kTileRows / kWarpsAcross / 8;

  float sum[kRowTiles][kColumnTiles][4] = {};

  __device__ __forceinline__ void multiply(const char* x, const char* weight, int down, int across) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < kTileK; k += 16) {
      uint32_t x_words[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = (down * kRowTiles + i) * 16 + half * 8 + g;
          const uint2 pair = *reinterpret_cast<const uint2*>(x + row * kXBytes +
                                                             NumberSwizzle::at(row, k / 8 + t / 2) * 16 + t % 2 * 8);
          x_words[i][half] = pair.x;
          x_words[i][half + 2] = pair.y;
        }
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const int row = (across * kColumnTiles + j) * 8 + g;
        uint32_t w_words[2];
        expand(
            *reinterpret_cast<const uint32_t*>(weight + row * kTileBytes + MatrixSwizzle::at(row, k / 16) * 16 + t * 4),
            w_words, T{});
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) multiply_numbers<T>(sum[i][j], x_words[i], w_words);
      }
    }
  }
};

template <class T, class LoadX, class LoadWeight>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    tiled_kernel(const Int8Linear linear, const Operand x, const Operand weight) {
  constexpr int kStageBytes = kTileRows * (kXBytes + kTileBytes);
  char* const shared = shared_memory();
  const TilePosition at = TilePosition::of<kTileRows, kTileRows>(linear.m, linear.n, blockIdx.x);
  const int warp = threadIdx.x / 32;
  LoadX load_x(x, at.m);
  LoadWeight load_weight(weight, at.n);
  NumberTile<T> tile;
  for_tiles<kStages, kTileRows * kXBytes, kStageBytes>(
      shared, (linear.k + kTileK - 1) / kTileK, load_x, load_weight, [&](const char* x_tile, const char* weight_tile) {
        tile.multiply(x_tile, weight_tile, warp / kWarpsAcross, warp % kWarpsAcross);
      });
  ResultTile<kTileRows, kTileRows>::for_each<4>(shared, tile.sum, [&](int row, int column, const float* sums) {
    store_sums<T, 4>(linear, at.m + row, at.n + column, sums);
  });
}

// --------------------------------------------------------------------------------------- few rows

constexpr int kFewRows = 16;
constexpr int kFewColumns = 16;  // of a block: two fragments of the weight use each fragment of x
constexpr int kWarps = kThreads / 32;
constexpr int kFewEach = 2;  // times 64 of k under way in a warp

// Lane (g, t) has numbers 16 t .. 16 t + 15 of 64 of rows g and g + 8, and the codes of the same k of columns g and g
// + 8. The warps of a block share k among them.
template <class T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    few_rows_kernel(const Int8Linear linear, const Operand x, const Operand weight) {
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [kWarps, 8, 32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t first_n = static_cast<int64_t>(blockIdx.x) * kFewColumns;
  float sum[2][4] = {};
#pragma unroll 1
  for (int64_t first = warp * 64; first < linear.k; first += kFewEach * kWarps * 64) {
    uint32_t x_words[kFewEach][2][8], codes[kFewEach][2][4];
#pragma unroll
    for (int i = 0; i < kFewEach; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int64_t k = first + i * kWarps * 64 + t * 16;
        const int4 low = load_chunk(x, g + 8 * j, k * 2), high = load_chunk(x, g + 8 * j, k * 2 + 16);
        const int4 chunk = load_chunk(weight, first_n + g + 8 * j, k);
        memcpy(x_words[i][j], &low, sizeof(low));
        memcpy(x_words[i][j] + 4, &high, sizeof(high));
        memcpy(codes[i][j], &chunk, sizeof(chunk));
      }
#pragma unroll
    for (int i = 0; i < kFewEach; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t w_words[2];
          expand(codes[i][j][w], w_words, T{});
          multiply_numbers<T>(
              sum[j], {x_words[i][0][2 * w], x_words[i][1][2 * w], x_words[i][0][2 * w + 1], x_words[i][1][2 * w + 1]},
              w_words);
        }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) shared[(warp * 8 + j * 4 + c) * 32 + lane] = sum[j][c];
  barrier();
  const int m = threadIdx.x / kFewColumns, n = threadIdx.x % kFewColumns;
  const int value = n / 8 * 4 + m / 8 * 2 + n % 2, from = m % 8 * 4 + n % 8 / 2;
  float total = 0.0f;
  for (int w = 0; w < kWarps; ++w) total += shared[(w * 8 + value) * 32 + from];
  store_sums<T, 1>(linear, m, first_n + n, &total);
}

// ------------------------------------------------------------------------- without tensor cores

constexpr int kVectorRows = 4;

// A warp for an output column and up to four rows.
template <class T>
__global__ void __launch_bounds__(kThreads) vector_kernel(const Int8Linear linear, bool wide) {
  const int lane = threadIdx.x % 32;
  const int64_t blocks = (linear.n + kWarps - 1) / kWarps;
  const int64_t n = blockIdx.x % blocks * kWarps + threadIdx.x / 32, first_m = blockIdx.x / blocks * kVectorRows;
  if (n >= linear.n) return;
  const T* const x = static_cast<const T*>(linear.x) + first_m * linear.x_stride;
  const int8_t* const weight = linear.weight + n * linear.k;
  const int rows = linear.m - first_m < kVectorRows ? static_cast<int>(linear.m - first_m) : kVectorRows;
  float sum[kVectorRows] = {};
  if (wide) {
#pragma unroll 2
    for (int64_t k = lane * 16; k < linear.k; k += 32 * 16) {
      const Packed<int8_t, 16> codes = load_wide<16>(weight + k);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float numbers[4];
        expand(codes.word[w], numbers);
#pragma unroll
        for (int m = 0; m < kVectorRows; ++m) {
          if (m >= rows) continue;
          const Vector<T, 4> four = load_wide<4>(x + m * linear.x_stride + k + w * 4).unpacked();
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[m] += to_float(four.data[i]) * numbers[i];
        }
      }
    }
  } else {
#pragma unroll 4
    for (int64_t k = lane; k < linear.k; k += 32) {
      const float number = weight[k];
#pragma unroll
      for (int m = 0; m < kVectorRows; ++m)
        if (m < rows) sum[m] += to_float(x[m * linear.x_stride + k]) * number;
    }
  }
#pragma unroll
  for (int m = 0; m < kVectorRows; ++m) {
    const float total = lanes_reduce(sum[m], 32, Sum());
    if (lane == 0 && m < rows) store_sums<T, 1>(linear, first_m + m, n, &total);
  }
}

constexpr int kPlainTile = 64;
constexpr int kPlainK = 16;
constexpr int kPlainStride = kPlainTile + 4;  // floats

// Four rows and four columns a thread.
template <class T>
__global__ void __launch_bounds__(kThreads) plain_kernel(const Int8Linear linear) {
  float* const x_tile = reinterpret_cast<float*>(shared_memory());  // [kPlainK, kPlainStride]
  float* const w_tile = x_tile + kPlainK * kPlainStride;
  const TilePosition at = TilePosition::of<kPlainTile, kPlainTile>(linear.m, linear.n, blockIdx.x);
  const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
  float sum[4][4] = {};
  for (int64_t k = 0; k < linear.k; k += kPlainK) {
    barrier();
#pragma unroll
    for (int i = threadIdx.x; i < kPlainTile * kPlainK; i += kThreads) {
      const int row = i / kPlainK, column = i % kPlainK;
      const bool inside = k + column < linear.k;
      x_tile[column * kPlainStride + row] =
          inside && at.m + row < linear.m
              ? to_float(static_cast<const T*>(linear.x)[(at.m + row) * linear.x_stride + k + column])
              : 0.0f;
      w_tile[column * kPlainStride + row] =
          inside && at.n + row < linear.n ? linear.weight[(at.n + row) * linear.k + k + column] : 0.0f;
    }
    barrier();
    float part[4][4] = {};  // summed up apart, which keeps rounding errors small
#pragma unroll
    for (int i = 0; i < kPlainK; ++i) {
      const float4 a = *reinterpret_cast<const float4*>(x_tile + i * kPlainStride + m);
      const float4 b = *reinterpret_cast<const float4*>(w_tile + i * kPlainStride + n);
      const float rows[] = {a.x, a.y, a.z, a.w}, columns[] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) part[r][c] += rows[r] * columns[c];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[r][c] += part[r][c];
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) store_sums<T, 4>(linear, at.m + m + r, at.n + n, sum[r]);
}

// ------------------------------------------------------------------------------------- host side

unsigned tiles(const Int8Linear& linear, int size) {
  return static_cast<unsigned>((linear.m + size - 1) / size * ((linear.n + size - 1) / size));
}

template <class T>
void launch_plain(const Int8Linear& linear, bool wide, Stream stream) {
  if (linear.m <= 2 * kVectorRows) {
    const int64_t blocks = (linear.n + kWarps - 1) / kWarps * ((linear.m + kVectorRows - 1) / kVectorRows);
    launch(vector_kernel<T>, static_cast<unsigned>(blocks), kThreads, 0, stream, linear, wide);
  } else {
    launch(plain_kernel<T>, tiles(linear, kPlainTile), kThreads, 2 * kPlainK * kPlainStride * sizeof(float), stream,
           linear);
  }
}

template <class T>
void launch_on_tensor_cores(const Int8Linear& linear, bool wide, Stream stream) {
  const Operand x{static_cast<const char*>(linear.x), linear.m, linear.k * 2, linear.x_stride * 2, 2};
  const Operand weight{reinterpret_cast<const char*>(linear.weight), linear.n, linear.k, linear.k, 1};
  constexpr int kSharedBytes = kStages * kTileRows * (kXBytes + kTileBytes);
  static_assert(kSharedBytes >= ResultTile<kTileRows, kTileRows>::kBytes);
  if (wide && linear.m <= kFewRows) {
    launch(few_rows_kernel<T>, static_cast<unsigned>((linear.n + kFewColumns - 1) / kFewColumns), kThreads,
           kThreads * 8 * sizeof(float), stream, linear, x, weight);
  } else if (wide) {
    launch(tiled_kernel<T, DirectLoader<kTileRows, kXBytes, NumberSwizzle>,
                        DirectLoader<kTileRows, kTileBytes, MatrixSwizzle>>,
           tiles(linear, kTileRows), kThreads, kSharedBytes, stream, linear, x, weight);
  } else {
    launch(tiled_kernel<T, ElementLoader<kTileRows, kXBytes, NumberSwizzle, uint16_t>,
                        ElementLoader<kTileRows, kTileBytes, MatrixSwizzle, uint8_t>>,
           tiles(linear, kTileRows), kThreads, kSharedBytes, stream, linear, x, weight);
  }
}

}  // namespace

void launch_int8_linear(const Int8Linear& linear, Stream stream) {
  with_dtype(linear.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool wide = linear.k % 16 == 0 && is_aligned16(linear.x) && is_aligned16(linear.weight) &&
                      linear.x_stride * sizeof(T) % 16 == 0;
    if constexpr (std::is_same_v<T, float>) {
      launch_plain<T>(linear, wide, stream);
    } else {
      const bool no_tensor_cores = std::is_same_v<T, __nv_bfloat16> && compute_capability() < 80;
      if (no_tensor_cores || (!wide && linear.m <= 2 * kVectorRows)) {
        launch_plain<T>(linear, wide, stream);
      } else {
        launch_on_tensor_cores<T>(linear, wide, stream);
      }
    }
  });
}

}  // namespace amp_kernels::cuda
