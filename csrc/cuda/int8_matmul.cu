// The product of two matrices of codes, with zero points za and zb, scales sa and sb, and a bias. It takes 2 M N K
// operations:
//
//   out[m, n] = (sum over k of (a[m, k] - za[m]) * (b[k, n] - zb[n])) * (sa[m] * sb[n]) + bias[n]
//             = (sum of a * b - zb[n] * sum of a[m] - za[m] * (sum of b[n] - K * zb[n])) * ...
//
// The sums over k of a * b, of row m of a, and of column n of b are exact in int32. All of them are computed in the
// same pass over a and b.
//
// A convolution is such a product too. Its a is not in memory: the rows of a are gathered from images (../int8.h), and
// b is the weight, whose codes have no zero points. So the sums of rows are not needed.
//
//   tiled_kernel: a block computes a tile of 64 x 64, 128 x 64, 128 x 128 or 128 x 256 outputs. Both operands are
//   copied to a ring of stages in shared memory, 64 bytes along k per stage. Each of the 8 warps computes a part of the
//   tile. Its sums stay in registers, as fragments of m16n8k32 (tensor_cores.cuh).
//
//                      b  [columns]
//        a [rows] [k] +------+------+------+------+
//                     | warp | warp | warp | warp |   2 warps down, 4 across
//                     +------+------+------+------+
//                     | warp | warp | warp | warp |
//                     +------+------+------+------+
//
//   Convolutions take this kernel too, with ConvLoader in the place of Loader for a.
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

// ----------------------------------------------------------------------------------- convolutions

// The left operand of a convolution. It has a row for each output pixel.
struct Images {
  const char* first;
  int64_t rows;
  const int32_t* zero_point;  // one for all rows if zero_point_step is 0; one for each row if it is 1; or nullptr
  int64_t zero_point_step;
  Window window;

  // What the loop over k needs of `window`, in 32 bits.
  uint32_t height, width, channels;
  uint32_t taps;   // in a line of the kernel
  uint32_t right;  // pixels from a tap to the next one
  uint32_t down;   // lines of the image from a line of the kernel to the next one
  uint32_t left;   // pixels from the place behind the last tap of a line to the first tap of a line
};

// Fills tiles as Loader does, with rows that are gathered from images. A thread copies one 16-byte chunk of every
// kLines-th row. A chunk holds 16 channels of a pixel. Each fetch() goes 64 bytes further along k: to later channels of
// the same pixel, or to the pixel under another tap. For example, with 48 channels:
//
//   k ->     [ tap 0,0: c0 c1 c2 ][ tap 0,1: c0 c1 c2 ][ tap 0,2: c0 c1 c2 ][ tap 1,0: c0 c1 c2 ] ...
//   fetch                0  0  0             0  1  1             1  1  2             2  2  2
//
// A pixel outside of the image is not in memory. Its chunks are filled with the code of padding, by ordinary stores.
// Barriers order these stores as they order copies (for_tiles).
//
// The rows of a tile may end before the tile does. The rows after the last one repeat it. Their results are not stored.
// The taps of a tile may also end before the tile does. What is fetched after them is multiplied by zeros of b.
//
// Coordinates and numbers of pixels are computed modulo 2^32. So a negative coordinate becomes a large one, and a
// comparison with the size of the image finds that it lies outside. require_few_pixels makes sure that 32 bits are
// enough. With coordinates of 64 bits, a tile of 128 x 128 spilled registers.
template <int kRows>
struct ConvLoader {
  static constexpr int kLines = kThreads / kTileChunks;  // rows that all threads together copy at a time
  static constexpr int kTimes = kRows / kLines;

  const Images& images;
  uint32_t y[kTimes], x[kTimes];  // the pixel of the chunk
  uint32_t image[kTimes];         // the number of the image's first pixel, among the pixels of all images
  uint32_t padding[kTimes];       // four codes
  uint32_t tap, channel;          // the tap in its line of the kernel, and the first channel of the chunk
  int to;                         // offset in the tile

  __device__ ConvLoader(const Images& operand, int64_t first_row) : images(operand) {
    const Window& window = images.window;
    const int line = threadIdx.x / kTileChunks, chunk = threadIdx.x % kTileChunks;
    tap = 0;
    channel = chunk * 16;
    to = line * kTileBytes + MatrixSwizzle::at(line, chunk) * 16;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int64_t in_tile = first_row + line + i * kLines, row = in_tile < images.rows ? in_tile : images.rows - 1;
      const int64_t number = row / window.out_pixels(), pixel = row % window.out_pixels();
      y[i] = static_cast<uint32_t>(window.first(0, pixel / window.out[1]));
      x[i] = static_cast<uint32_t>(window.first(1, pixel % window.out[1]));
      image[i] = static_cast<uint32_t>(number * window.size[0] * window.size[1]);
      const int zero_point = images.zero_point == nullptr ? 0 : images.zero_point[row * images.zero_point_step];
      padding[i] = 0x01010101u * static_cast<uint8_t>(zero_point < -128 ? -128 : zero_point > 127 ? 127 : zero_point);
    }
  }

  __device__ __forceinline__ void fetch(char* tile, bool) {
#pragma unroll 1
    while (channel >= images.channels) next_tap();
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      char* const chunk = tile + to + i * kLines * kTileBytes;
      if (y[i] < images.height && x[i] < images.width) {
        const uint32_t pixel = image[i] + y[i] * images.width + x[i];
        copy_async(chunk, images.first + (static_cast<uint64_t>(pixel) * images.channels + channel), 16);
      } else {
        // Two stores of 8 bytes. One of 16 bytes would need four registers, and a tile of 128 x 64 would spill.
        auto* const words = reinterpret_cast<volatile uint64_t*>(chunk);
        words[0] = padding[i] * 0x100000001ull;
        words[1] = padding[i] * 0x100000001ull;
      }
    }
    channel += kTileBytes;
  }

 private:
  __device__ __forceinline__ void next_tap() {
    channel -= images.channels;
    ++tap;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) x[i] += images.right;
    if (tap < images.taps) return;
    tap = 0;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      y[i] += images.down;
      x[i] -= images.left;
    }
  }
};

// ------------------------------------------------------------------------------------------ tiles

// Reads of shared memory limit the speed. With a tile of 128 x 256, a warp computes twice as many products as with a
// tile of 128 x 128, but it reads only 4/3 as many bytes. However, sums take most of the registers. With a tile of
// 128 x 256 they take 128 registers of each thread, so a multiprocessor has room for only one block. With a tile of
// 128 x 64 it has room for three. On an H200, 128 images of 56 x 56 with 64 channels then took 144 us, and with two
// blocks 162 us.
template <int kM, int kN>
struct Tile {
  static constexpr int kStages = kM == 128 && kN == 128 ? 3 : 4;
  static constexpr int kBlocks = kN == 256 ? 1 : kN == 64 && kM == 128 ? kResidentBlocks + 1 : kResidentBlocks;
  static constexpr int kRowTiles = kM / kWarpsDown / 16, kColumnTiles = kN / kWarpsAcross / 8;  // of a warp
  static constexpr int kStageBytes = (kM + kN) * kTileBytes;
  static constexpr int kSumsOffset = ResultTile<kM, kN>::kBytes;
  static constexpr int kSharedBytes = std::max(kStages * kStageBytes, kSumsOffset + (kM + kN) * 4);
  static_assert(kSharedBytes <= 99 * 1024);

  int sum[kRowTiles][kColumnTiles][4] = {};
  int row_sum[kRowTiles][2] = {};
  int column_sum[kColumnTiles] = {};

  template <bool kRowSums, bool kColumnSums>
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
      if constexpr (kRowSums) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int w = 0; w < 4; ++w) row_sum[i][w % 2] = add_codes(a_words[i][w], row_sum[i][w % 2]);
      }
      if constexpr (kColumnSums) {
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

// `Left` is Operand, or Images for a convolution. kSums may be false only if there are no zero points. In a
// convolution, only a has zero points.
template <class Left, int kM, int kN, bool kSums>
__global__ void __launch_bounds__(kThreads, Tile<kM, kN>::kBlocks)
    tiled_kernel(const Int8Matmul matmul, const Left a, const Operand b) {
  using TileOf = Tile<kM, kN>;
  constexpr bool kConvolves = std::is_same_v<Left, Images>, kRowSums = kSums && !kConvolves;
  char* const shared = shared_memory();
  TilePosition at = TilePosition::of<kM, kN>(matmul.m, matmul.n, blockIdx.x);
  const int warp = threadIdx.x / 32, down = warp / kWarpsAcross, across = warp % kWarpsAcross;
  std::conditional_t<kConvolves, ConvLoader<kM>, Loader<kM>> load_a(a, at.m);
  Loader<kN> load_b(b, at.n);
  TileOf tile;
  for_tiles<TileOf::kStages, kM * kTileBytes, TileOf::kStageBytes>(
      shared, (matmul.k + kTileBytes - 1) / kTileBytes, load_a, load_b, [&](const char* a_tile, const char* b_tile) {
        tile.template multiply<kRowSums, kSums>(a_tile, b_tile, down, across);
      });
  // A convolution needs all registers in the loop over k. Therefore the position of the tile is computed again.
  at = TilePosition::of<kM, kN>(matmul.m, matmul.n, blockIdx.x);
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
          if (at.m + row < matmul.m)
            columns.store(matmul, at.m + row, at.n + column, sums, kRowSums ? row_sums[row] : 0);
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

// For convolutions there is no kernel without sums. Their activations nearly always have zero points.
template <int kM, int kN, class Left>
void launch_tiled(const Int8Matmul& matmul, const Left& a, const Operand& b, Stream stream) {
  const int64_t tiles = tiles_of(matmul, kM, kN);
  auto kernel = tiled_kernel<Left, kM, kN, true>;
  if constexpr (std::is_same_v<Left, Operand>)
    if (matmul.a_zero_point == nullptr && matmul.b_zero_point == nullptr) kernel = tiled_kernel<Left, kM, kN, false>;
  launch(kernel, static_cast<unsigned>(tiles), kThreads, Tile<kM, kN>::kSharedBytes, stream, matmul, a, b);
}

// Chooses a tile. Results with up to 64 columns leave half of a wider tile unused: with tiles of 128 x 128, the
// convolution above took 228 us.
template <class Left>
void launch_tiled_product(const Int8Matmul& matmul, const Left& a, const Operand& b, Stream stream) {
  const int64_t count = multiprocessor_count(), medium = tiles_of(matmul, 128, 128);
  const int64_t large_rounds = (tiles_of(matmul, 128, 256) + count - 1) / count;
  if (matmul.n <= 64 && medium >= count) {
    launch_tiled<128, 64>(matmul, a, b, stream);
  } else if (medium < count) {
    launch_tiled<64, 64>(matmul, a, b, stream);
  } else if (2 * large_rounds <= (medium + count - 1) / count && Tile<128, 256>::kSharedBytes <= block_memory()) {
    launch_tiled<128, 256>(matmul, a, b, stream);
  } else {
    launch_tiled<128, 128>(matmul, a, b, stream);
  }
}

// Throws unless 32 bits hold the numbers of all pixels, and the coordinates of all pixels with padding (ConvLoader).
void require_few_pixels(const Int8Conv2d& conv) {
  const Window& window = conv.window;
  const int64_t pixels = conv.rows.m / window.out_pixels() * window.size[0] * window.size[1];
  const int64_t most = std::max({pixels, window.size[0] + window.padding[0], window.size[1] + window.padding[1]});
  if (most >> 32 == 0) return;
  throw std::invalid_argument(
      "int8_conv2d: x must have fewer than 2^32 pixels, also along each dimension with padding, got " +
      std::to_string(most) + "; give fewer images at a time");
}

Images images_of(const Int8Conv2d& conv) {
  const Window& window = conv.window;
  const auto narrow = [](int64_t value) { return static_cast<uint32_t>(value); };
  return {reinterpret_cast<const char*>(conv.rows.a),
          conv.rows.m,
          conv.rows.a_zero_point,
          conv.rows.a_step,
          window,
          narrow(window.size[0]),
          narrow(window.size[1]),
          narrow(window.channels),
          narrow(window.taps[1]),
          narrow(window.dilation[1]),
          narrow(window.dilation[0]),
          narrow(window.taps[1] * window.dilation[1])};
}

}  // namespace

void launch_int8_matmul(const Int8Matmul& matmul, Stream stream) {
  const int64_t k = whole_chunks(matmul.k);
  const Operand a{reinterpret_cast<const char*>(matmul.a), matmul.m, k, matmul.a_strides[0]};
  const Operand b{reinterpret_cast<const char*>(matmul.b), matmul.n, k, matmul.b_strides[1]};
  if (are_few_rows(matmul.m, matmul.n)) {
    with_few_rows(a, b, [&](auto row_tiles, auto few_columns) {
      constexpr int kRowTiles = decltype(row_tiles)::value, kColumns = decltype(few_columns)::value;
      constexpr int kFewThreads = kFewWarps<kRowTiles> * 32;
      launch(few_rows_kernel<kRowTiles, kColumns>, static_cast<unsigned>((matmul.n + kColumns - 1) / kColumns),
             kFewThreads, kFewThreads * sizeof(FewSums<kRowTiles, kColumns / 8>), stream, matmul, a, b);
    });
  } else {
    launch_tiled_product(matmul, a, b, stream);
  }
}

void launch_int8_conv2d(const Int8Conv2d& conv, Stream stream) {
  require_few_pixels(conv);
  const Int8Matmul& rows = conv.rows;
  const Operand weight{reinterpret_cast<const char*>(rows.b), rows.n, rows.k, rows.b_strides[1]};
  launch_tiled_product(rows, images_of(conv), weight, stream);
}

}  // namespace amp_kernels::cuda
