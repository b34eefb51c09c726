// Products of 16-bit matrices on tensor cores: out = activation(alpha * a @ b + beta * input). Sums are fp32, and a
// result is rounded once. A product takes 2 m n k operations.
//
// `out` is cut into tiles. A block computes one tile, step by step along k. It reads the tile's rows of a and columns
// of b once. While the warps multiply the numbers of one step, asynchronous copies bring the numbers of the next steps
// to shared memory:
//
//               b: kTileK x kN                      memory --16 bytes a copy--> stage 0 | stage 1 | stage 2 ..
//             +----------------+                    shared --ldmatrix--> fragments --mma.m16n8k16--> sums in registers
//   a: kM x   | w0  w1  w2  w3 |  8 warps: each has
//   kTileK    | w4  w5  w6  w7 |  half of the rows and a quarter of the columns
//             +----------------+
//
// WideLoader copies 16 bytes at a time, either along k, or across k: along m for a, along n for b. ElementLoader takes
// operands with any strides. It loads one number at a time, through registers.
#include "matmul_results.cuh"
#include "tiles.cuh"

namespace amp_kernels::cuda {
namespace {

constexpr int kTileK = 32;
constexpr int kTileBytes = kTileK * 2;

// A tile of `out` has kRows rows and kColumns columns. Its block has kDepth stages in shared memory, each for the
// operands of one step. At most kResident blocks share a multiprocessor. A warp computes half of the rows and a quarter
// of the columns.
template <int kRows, int kColumns, int kDepth, int kResident>
struct Shape {
  static constexpr int kM = kRows, kN = kColumns, kStages = kDepth;
  static constexpr int kBlocks = kResident < kResidentBlocks ? kResident : kResidentBlocks;
  static constexpr int kRowTiles = kM / kWarpsDown / 16, kColumnTiles = kN / kWarpsAcross / 8;  // mma tiles of a warp
  static constexpr int kStageBytes = (kM + kN) * kTileBytes;
  static constexpr int kSharedBytes =
      kStages * kStageBytes > ResultTile<kM, kN>::kBytes ? kStages * kStageBytes : ResultTile<kM, kN>::kBytes;
  static_assert(kSharedBytes <= 99 * 1024);

  // kCycles is the time that a multiprocessor of sm_80 takes for a tile if k is 1, in eighths of a cycle. It is the
  // longer of two times, which are calculated, not measured:
  //
  //   kProductCycles   a multiprocessor multiplies 1024 pairs of numbers a cycle
  //   kMemoryCycles    it moves 128 bytes of shared memory a cycle. Each number of an operand is written to shared
  //                    memory once. A number of a is then read by kWarpsAcross warps, and a number of b by kWarpsDown
  static constexpr int kProductCycles = kM * kN / 128;
  static constexpr int kMemoryCycles = (kM + kN + kWarpsAcross * kM + kWarpsDown * kN) * 2 / 16;
  static constexpr int kCycles = kProductCycles > kMemoryCycles ? kProductCycles : kMemoryCycles;
};

using Large = Shape<128, 256, 4, 1>;
using Medium = Shape<128, 128, 3, 2>;
using Small = Shape<64, 64, 4, 2>;

// ---------------------------------------------------------------------------------------- operands

// One of the operands a and b. Its rows are the m rows of a, or the n columns of b. Strides are in bytes.
struct Operand {
  const char* first;
  int64_t rows, k;
  int64_t row_stride, k_stride;

  // The part of the operand from first_k to first_k + count along k.
  __device__ __forceinline__ Operand part(int64_t first_k, int64_t count) const {
    return {first + first_k * k_stride, rows, count, row_stride, k_stride};
  }
};

__device__ __forceinline__ Operand operand_a(const Matmul& matmul, int64_t batch) {
  return {static_cast<const char*>(matmul.a) + batch * matmul.a_strides[0] * 2, matmul.m, matmul.k,
          matmul.a_strides[1] * 2, matmul.a_strides[2] * 2};
}

__device__ __forceinline__ Operand operand_b(const Matmul& matmul, int64_t batch) {
  return {static_cast<const char*>(matmul.b) + batch * matmul.b_strides[0] * 2, matmul.n, matmul.k,
          matmul.b_strides[2] * 2, matmul.b_strides[1] * 2};
}

template <class Int>
__device__ __forceinline__ int clamp(Int value, int most) {
  return value < 0 ? 0 : value < most ? static_cast<int>(value) : most;
}

// A loader copies tiles of an operand into shared memory. A tile consists of kRows rows, and of the next kTileK of k.
// fetch() starts the copy of a tile. Its argument `left` is how many of these k exist. store() ends the copy if the
// numbers go through registers (ElementLoader). wait_copies() ends the asynchronous copies of WideLoader. Until then,
// the block can multiply an earlier tile. Numbers of a tile that lie outside of the operand are 0.
//
// The shape of a tile is [rows, kTileK], or [kTileK, rows] if kAcross. A line of the tile is one row of the operand, or
// one k if kAcross.
template <int kTileRows, bool kIsAcross>
struct WideLoader {
  static constexpr int kRows = kTileRows;
  static constexpr bool kAcross = kIsAcross;
  static constexpr int kChunks = (kAcross ? kRows : kTileK) / 8;  // chunks of 16 bytes in a line of the tile
  static constexpr int kLines = kThreads / kChunks;               // lines that the block copies at once
  static constexpr int kTimes = kRows * kTileBytes / 16 / kThreads;

  // The address to read next. It is an integer, because with k = 0 the operand may be nullptr, and C++ does not allow
  // offsets from nullptr.
  uintptr_t next;
  int64_t line_stride, step_stride;
  int to;    // the offset of this thread's first chunk in the tile, in bytes
  int k;     // this thread's first k, counted from the beginning of the tile
  int rows;  // how many rows the operand has from this thread's first row on; at most kRows

  // The offset of a chunk in the tile, in bytes. ldmatrix reads the same chunk of eight lines at once. These eight
  // chunks lie in different banks.
  static __device__ __forceinline__ int offset(int line, int chunk) {
    return line * kChunks * 16 + (kAcross ? chunk ^ (line & 7) : MatrixSwizzle::at(line, chunk)) * 16;
  }

  __device__ WideLoader(const Operand& operand, int64_t first_row) {
    static_assert(kLines % 8 == 0, "offset() must move the chunks of all lines of a thread alike");
    const int line = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const int64_t stride = kAcross ? operand.k_stride : operand.row_stride;
    next = reinterpret_cast<uintptr_t>(operand.first) + (kAcross ? first_row * 2 : first_row * stride) + line * stride +
           chunk * 16;
    line_stride = kLines * stride;
    step_stride = kAcross ? kTileK * stride : kTileBytes;
    to = offset(line, chunk);
    k = kAcross ? line : chunk * 8;
    rows = clamp(operand.rows - first_row - (kAcross ? chunk * 8 : line), kRows);
    expect_whole_copies((kAcross ? operand.rows : operand.k) * 2);
  }

  __device__ __forceinline__ void fetch(char* tile, int left) {
    const int lines = kAcross ? left - k : rows, bytes = clamp((kAcross ? rows : left - k) * 2, 16);
    uintptr_t from = next;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      copy_async(tile + to + i * kLines * kChunks * 16, reinterpret_cast<const char*>(from),
                 i * kLines < lines ? bytes : 0);
      from += line_stride;
    }
    next += step_stride;
  }

  __device__ __forceinline__ void store(char*) {}
};

// Loads operands with any strides. If rows are neighbours in memory, neighbouring lanes load neighbouring rows.
// Otherwise neighbouring lanes load neighbouring k.
template <int kTileRows>
struct ElementLoader {
  static constexpr int kRows = kTileRows;
  static constexpr bool kAcross = false;
  static constexpr int kTimes = kRows * kTileK / kThreads;

  uintptr_t next;  // address
  int64_t stride, step_stride;
  int row, k;            // the place of this thread's first number in the tile
  int row_step, k_step;  // from one number of this thread to its next one
  int rows;              // how many rows the operand has from the tile's first row on; at most kRows
  uint16_t numbers[kTimes];

  static __device__ __forceinline__ int offset(int line, int chunk) {
    return WideLoader<kRows, false>::offset(line, chunk);
  }

  __device__ ElementLoader(const Operand& operand, int64_t first_row) {
    static_assert(kThreads % kRows == 0 && kThreads % kTileK == 0);
    const bool along_rows = operand.row_stride == 2;
    row = along_rows ? threadIdx.x % kRows : threadIdx.x / kTileK;
    k = along_rows ? threadIdx.x / kRows : threadIdx.x % kTileK;
    row_step = along_rows ? 0 : kThreads / kTileK;
    k_step = along_rows ? kThreads / kRows : 0;
    rows = clamp(operand.rows - first_row, kRows);
    next = reinterpret_cast<uintptr_t>(operand.first) + (first_row + row) * operand.row_stride + k * operand.k_stride;
    stride = row_step * operand.row_stride + k_step * operand.k_stride;
    step_stride = kTileK * operand.k_stride;
  }

  __device__ __forceinline__ void fetch(char*, int left) {
    uintptr_t from = next;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const auto* const number = global_pointer<uint16_t>(from);
      numbers[i] = row + i * row_step < rows && k + i * k_step < left ? *number : 0;
      from += stride;
    }
    next += step_stride;
  }

  __device__ __forceinline__ void store(char* tile) {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int at = k + i * k_step;
      *reinterpret_cast<uint16_t*>(tile + offset(row + i * row_step, at / 8) + at % 8 * 2) = numbers[i];
    }
  }
};

// Loads four matrices, each of eight rows by eight of k, in the order in which multiply_numbers takes them. Together
// they are the 16 rows from `first_row` on, by the 16 of k from `first_k` on. If kRowsFirst (for a), words 0 and 1 are
// from different halves of the rows. Otherwise (for b) they are from different halves of k.
template <class Loader, bool kRowsFirst>
__device__ __forceinline__ void load_fragments(uint32_t (&words)[4], const char* tile, int first_row, int first_k) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  const int row_half = kRowsFirst ? matrix % 2 : matrix / 2, k_half = kRowsFirst ? matrix / 2 : matrix % 2;
  if constexpr (Loader::kAcross) {
    load_transposed(words, tile + Loader::offset(first_k + k_half * 8 + lane % 8, first_row / 8 + row_half));
  } else {
    load_matrices(words, tile + Loader::offset(first_row + row_half * 8 + lane % 8, first_k / 8 + k_half));
  }
}

// ------------------------------------------------------------------------------------------ tiles

// The numbers of a and b that a warp multiplies at once, in registers: kK successive k of its rows and of its columns.
template <class Tile, class LoadA, class LoadB>
struct Slice {
  static constexpr int kK = 16;

  uint32_t a[Tile::kRowTiles][4], b[Tile::kColumnTiles / 2][4];

  __device__ __forceinline__ void load(const char* stage, int k) {
    const int warp = threadIdx.x / 32, down = warp / kWarpsAcross, across = warp % kWarpsAcross;
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
      load_fragments<LoadA, true>(a[i], stage, (down * Tile::kRowTiles + i) * 16, k);
#pragma unroll
    for (int j = 0; j < Tile::kColumnTiles / 2; ++j)
      load_fragments<LoadB, false>(b[j], stage + Tile::kM * kTileBytes, (across * Tile::kColumnTiles / 2 + j) * 16, k);
  }

  template <class T>
  __device__ __forceinline__ void multiply(float (&sum)[Tile::kRowTiles][Tile::kColumnTiles][4]) const {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kColumnTiles; ++j)
        multiply_numbers<T>(sum[i][j], a[i], {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
  }
};

// k is divided into splits. A split is k_of_split long, but the last one may be shorter. Each split has its own sums.
// The sums of split s and batch b are stored as batch s * matmul.batch + b of `out`.
template <class T, class Tile, class LoadA, class LoadB>
__global__ void __launch_bounds__(kThreads, Tile::kBlocks)
    tiled_kernel(const Matmul matmul, const int64_t tiles, const int64_t k_of_split) {
  char* const shared = shared_memory();
  const int64_t result = blockIdx.x / tiles, batch = result % matmul.batch;
  const int64_t first_k = result / matmul.batch * k_of_split;
  const int64_t k = matmul.k - first_k < k_of_split ? matmul.k - first_k : k_of_split;
  const TilePosition at = TilePosition::of<Tile::kM, Tile::kN>(matmul.m, matmul.n, blockIdx.x % tiles);
  const int steps = static_cast<int>((k + kTileK - 1) / kTileK);
  const int last_k = static_cast<int>(k - (steps - 1) * int64_t{kTileK});
  LoadA load_a(operand_a(matmul, batch).part(first_k, k), at.m);
  LoadB load_b(operand_b(matmul, batch).part(first_k, k), at.n);
  const auto fetch = [&](int step, char* stage) {
    const int left = step < steps - 1 ? kTileK : step == steps - 1 ? last_k : 0;
    load_a.fetch(stage, left);
    load_b.fetch(stage + Tile::kM * kTileBytes, left);
    commit_copies();
  };
  const auto store = [&](char* stage) {
    load_a.store(stage);
    load_b.store(stage + Tile::kM * kTileBytes);
  };
  const auto stage_after = [&](char* stage) {
    return stage == shared + (Tile::kStages - 1) * Tile::kStageBytes ? shared : stage + Tile::kStageBytes;
  };
  char* stage = shared;
#pragma unroll 1
  for (int step = 0; step < Tile::kStages; ++step, stage = stage_after(stage)) {
    fetch(step, stage);
    store(stage);
  }
  // While tensor cores multiply a slice of a stage, the next slice is loaded from shared memory. A warp arrives at the
  // barrier when it has the last slice of a stage in registers, and multiplies this slice after the barrier. So after
  // the barrier no warp reads this stage any more, and it may be filled again. Before the barrier, each thread waits
  // for its own copies of the next stage. So after the barrier the next stage is complete.
  using Numbers = Slice<Tile, LoadA, LoadB>;
  static_assert(kTileK == 2 * Numbers::kK);
  // If a multiprocessor holds only one block, there are registers for kAhead: the first slice of the next stage is
  // loaded before the last slice of this stage is multiplied. Otherwise all eight warps wait for the first slice at the
  // beginning of a stage. While they wait, a second block of the multiprocessor can work.
  constexpr bool kAhead = Tile::kBlocks == 1;
  Numbers first, second;
  float sum[Tile::kRowTiles][Tile::kColumnTiles][4] = {};
  wait_copies<Tile::kStages - 1>();
  barrier();
  if constexpr (kAhead) first.load(stage, 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if constexpr (!kAhead) first.load(stage, 0);
    second.load(stage, Numbers::kK);
    first.template multiply<T>(sum);
    char* const done = stage;
    stage = stage_after(stage);
    wait_copies<Tile::kStages - 2>();
    barrier();
    if constexpr (kAhead) first.load(stage, 0);
    fetch(step + Tile::kStages, done);
    second.template multiply<T>(sum);
    store(done);
  }
  wait_copies<0>();
  barrier();
  const int in_16_bytes = matmul.out_dtype == kFloat ? 4 : 8;
  const bool wide = is_aligned16(matmul.out) && is_aligned16(matmul.pre) && matmul.out_strides[0] % in_16_bytes == 0 &&
                    matmul.out_strides[1] % in_16_bytes == 0;
  using Results = ResultTile<Tile::kM, Tile::kN>;
  Results::for_halves(shared, sum, [&](int first_row, const float* results) {
    if (wide) {
      Results::template for_each_of<8>(first_row, results, [&](int row, int column, const Vector<float, 8>& sums) {
        finish<T>(matmul, result, at.m + row, at.n + column, sums.data);
      });
      return;
    }
    // If rows of results are not aligned to 16 bytes, a warp stores a whole row of the tile, and neighbouring lanes
    // store neighbouring columns. If instead each thread stored eight neighbouring columns one by one, the stores would
    // take as long as the arithmetic of a product with k = 4096.
    constexpr int kEach = Tile::kN / 32;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < Results::kRows; row += kThreads / 32) {
      const int column = threadIdx.x % 32;
      float sums[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[i] = results[Results::at(row, column + i * 32)];
      finish<T, kEach, 32>(matmul, result, at.m + first_row + row, at.n + column, sums);
    }
  });
}

// -------------------------------------------------------------------------- without tensor cores

constexpr int kPlainTile = 64;
constexpr int kPlainK = 16;
constexpr int kPlainStride = kPlainTile + 4;  // floats

// Products of bf16 on sm_75, where tensor cores do not take bf16. A thread computes four rows by four columns of a
// tile.
__global__ void __launch_bounds__(kThreads) plain_kernel(const Matmul matmul, const int64_t tiles) {
  using T = __nv_bfloat16;
  float* const a_tile = reinterpret_cast<float*>(shared_memory());  // [kPlainK, kPlainStride]
  float* const b_tile = a_tile + kPlainK * kPlainStride;
  const int64_t batch = blockIdx.x / tiles;
  const TilePosition at = TilePosition::of<kPlainTile, kPlainTile>(matmul.m, matmul.n, blockIdx.x % tiles);
  const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
  const auto load = [&](const Operand& operand, float* tile, int64_t first_row, int64_t first_k) {
    const bool along_rows = operand.row_stride == 2;
#pragma unroll
    for (int i = threadIdx.x; i < kPlainTile * kPlainK; i += kThreads) {
      const int row = along_rows ? i % kPlainTile : i / kPlainK, k = along_rows ? i / kPlainTile : i % kPlainK;
      const int64_t r = first_row + row, j = first_k + k;
      tile[k * kPlainStride + row] =
          r < operand.rows && j < operand.k
              ? to_float(*reinterpret_cast<const T*>(operand.first + r * operand.row_stride + j * operand.k_stride))
              : 0.0f;
    }
  };
  float sum[4][4] = {};
  for (int64_t k = 0; k < matmul.k; k += kPlainK) {
    barrier();
    load(operand_a(matmul, batch), a_tile, at.m, k);
    load(operand_b(matmul, batch), b_tile, at.n, k);
    barrier();
    float part[4][4] = {};  // a separate sum for each kPlainK of k keeps rounding errors small
#pragma unroll
    for (int i = 0; i < kPlainK; ++i) {
      const float4 a = *reinterpret_cast<const float4*>(a_tile + i * kPlainStride + m);
      const float4 b = *reinterpret_cast<const float4*>(b_tile + i * kPlainStride + n);
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
  barrier();
  float* const results = a_tile;  // [kPlainTile, kPlainStride]
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) results[(m + r) * kPlainStride + n + c] = sum[r][c];
  barrier();
#pragma unroll 1
  for (int i = threadIdx.x; i < kPlainTile * kPlainTile; i += kThreads) {
    const int row = i / kPlainTile, column = i % kPlainTile;
    finish<T, 1>(matmul, batch, at.m + row, at.n + column, {results[row * kPlainStride + column]});
  }
}

// ------------------------------------------------------------------------------------- host side

int64_t tiles_of(const Matmul& matmul, int m, int n) { return (matmul.m + m - 1) / m * ((matmul.n + n - 1) / n); }

// If a dimension has at most one element, its stride is never used. Such a stride becomes 0, which is a multiple of any
// alignment. If k is 0, nothing of a and b is read, and all of their strides become 0.
Matmul normalized(Matmul matmul) {
  const auto normalize = [](int64_t size, int64_t& stride) {
    if (size <= 1) stride = 0;
  };
  for (int64_t* stride : {&matmul.a_strides[0], &matmul.b_strides[0], &matmul.out_strides[0]})
    normalize(matmul.k == 0 && stride != matmul.out_strides ? 0 : matmul.batch, *stride);
  normalize(matmul.k == 0 ? 0 : matmul.m, matmul.a_strides[1]);
  normalize(matmul.m, matmul.out_strides[1]);
  normalize(matmul.k == 0 ? 0 : matmul.n, matmul.b_strides[2]);
  normalize(matmul.k, matmul.a_strides[2]);
  normalize(matmul.k, matmul.b_strides[1]);
  if (matmul.beta == 0.0f) matmul.input = nullptr;
  return matmul;
}

// Returns the architecture for which nvcc compiled the code that the current device runs. The first call loads a
// kernel, and loading fails during a graph capture. Every product whose `out` is not empty calls this function, even if
// it does not need the answer. So one such product before the capture is enough.
int compiled_for_sm() {
  return compiled_for<tiled_kernel<__nv_bfloat16, Small, ElementLoader<Small::kM>, ElementLoader<Small::kN>>>();
}

// How an operand can be loaded: 16 bytes at a time along k (kAlong); 16 bytes at a time along m (operand a) or n
// (operand b) (kAcross); or one number at a time (kNeither).
enum Layout { kAlong, kAcross, kNeither };

// `bytes`: from the first number to the end of the storage. A copy of 16 bytes must not go beyond that end.
Layout layout_of(const void* first, int64_t bytes, int64_t rows, int64_t k, int64_t last_batch, int64_t row_stride,
                 int64_t k_stride, int64_t batch_stride) {
  const auto last_copy_fits = [&](int64_t size, int64_t lines, int64_t stride) {
    const int64_t last = last_batch * batch_stride + (lines - 1) * stride;
    return size % 8 == 0 || (copies_parts(compiled_for_sm()) && (last + (size + 7) / 8 * 8) * 2 <= bytes);
  };
  if (is_wide(first, k, k_stride, {batch_stride, row_stride}) && last_copy_fits(k, rows, row_stride)) return kAlong;
  const bool is_across = is_wide(first, rows, row_stride, {batch_stride, k_stride});
  return is_across && last_copy_fits(rows, k, k_stride) ? kAcross : kNeither;
}

enum Size { kLarge, kMedium, kSmall };

// How tiled_kernel computes a product: the size of tiles and the number of splits for which the estimated time is
// least. The estimate, in eighths of a cycle, is the time of a tile, times the number of tiles of the busiest
// multiprocessor. If k is divided, each split of a tile counts as a tile, and the time of such a tile includes moving
// its sums. kFoldTime is then added once, for the launch of fold_kernel, which adds the sums of the splits
// (matmul_few_rows.cu). kFoldTime and kBytesACycle are assumed, not measured.
//
// If two sizes of tiles take the same time, the larger one is taken, because it moves fewer bytes of shared memory and
// of L2. For example, the product with m = n = k = 4096 takes the same time with Large as with Medium, on 108 and on
// 132 multiprocessors.
struct Tiled {
  static constexpr int64_t kFoldTime = 8 * 4000;  // 4000 cycles to launch fold_kernel
  static constexpr int kBytesACycle = 32;         // bytes that a multiprocessor moves to or from L2

  Layout a, b;
  Size size;
  int64_t splits, k_of_split, time = INT64_MAX;

  explicit Tiled(const Matmul& matmul) {
    const int64_t (&as)[3] = matmul.a_strides, (&bs)[3] = matmul.b_strides, last = matmul.batch - 1;
    a = layout_of(matmul.a, matmul.a_bytes, matmul.m, matmul.k, last, as[1], as[2], as[0]);
    b = layout_of(matmul.b, matmul.b_bytes, matmul.n, matmul.k, last, bs[2], bs[1], bs[0]);
    const int64_t multiprocessors = multiprocessor_count();
    if (is_wide()) {
      if (Large::kSharedBytes <= block_memory()) consider<Large>(kLarge, matmul, multiprocessors);
      consider<Medium>(kMedium, matmul, multiprocessors);
    }
    consider<Small>(kSmall, matmul, multiprocessors);
  }

  bool is_wide() const { return a != kNeither && b != kNeither; }

 private:
  template <class Tile>
  void consider(Size its_size, const Matmul& matmul, int64_t multiprocessors) {
    const int64_t tiles = matmul.batch * tiles_of(matmul, Tile::kM, Tile::kN);
    for (int resident = 0; resident <= Tile::kBlocks; ++resident) {
      const int64_t wanted = splits_of(matmul, resident * multiprocessors / tiles);
      const int64_t ks = ((matmul.k + wanted - 1) / wanted + kTileK - 1) / kTileK * kTileK;
      const int64_t its_splits = wanted == 1 ? 1 : (matmul.k + ks - 1) / ks;
      int64_t tile_time = Tile::kCycles * ks;
      if (its_splits > 1) tile_time += 8 * 2 * Tile::kM * Tile::kN * static_cast<int>(sizeof(float)) / kBytesACycle;
      const int64_t its_time =
          (tiles * its_splits + multiprocessors - 1) / multiprocessors * tile_time + (its_splits > 1 ? kFoldTime : 0);
      if (its_time >= time) continue;
      size = its_size;
      splits = its_splits;
      k_of_split = ks;
      time = its_time;
    }
  }
};

template <class T, class Tile, class LoadA, class LoadB>
void launch_tiled(const Matmul& matmul, const Tiled& how, Stream stream) {
  const int64_t tiles = tiles_of(matmul, Tile::kM, Tile::kN);
  launch(tiled_kernel<T, Tile, LoadA, LoadB>, blocks(how.splits * matmul.batch * tiles), kThreads, Tile::kSharedBytes,
         stream, matmul, tiles, how.k_of_split);
}

template <class T, class Tile>
void launch_wide(const Matmul& matmul, const Tiled& how, Stream stream) {
  const auto with_a = [&](auto a) {
    using LoadA = WideLoader<Tile::kM, decltype(a)::value>;
    if (how.b == kAcross) return launch_tiled<T, Tile, LoadA, WideLoader<Tile::kN, true>>(matmul, how, stream);
    launch_tiled<T, Tile, LoadA, WideLoader<Tile::kN, false>>(matmul, how, stream);
  };
  if (how.a == kAcross) return with_a(std::true_type());
  with_a(std::false_type());
}

template <class T>
void launch_on_tensor_cores(const Matmul& matmul, const Tiled& how, Stream stream) {
  if (!how.is_wide())
    return launch_tiled<T, Small, ElementLoader<Small::kM>, ElementLoader<Small::kN>>(matmul, how, stream);
  switch (how.size) {
    case kSmall:
      return launch_wide<T, Small>(matmul, how, stream);
    case kMedium:
      return launch_wide<T, Medium>(matmul, how, stream);
    default:
      return launch_wide<T, Large>(matmul, how, stream);
  }
}

// Returns the arguments for the product alone, with its fp32 sums in `partials`. launch_fold applies alpha, input and
// activation afterwards.
Matmul partial(Matmul matmul, float* partials) {
  matmul.out = partials;
  matmul.out_dtype = kFloat;
  matmul.out_strides[0] = matmul.m * matmul.n;
  matmul.out_strides[1] = matmul.n;
  matmul.input = nullptr;
  matmul.pre = nullptr;
  matmul.alpha = 1.0f;
  matmul.activation = kIdentity;
  return matmul;
}

bool is_empty(const Matmul& matmul) { return matmul.batch == 0 || matmul.m == 0 || matmul.n == 0; }
bool has_tensor_cores(const Matmul& matmul) { return multiplies_bf16(compiled_for_sm()) || matmul.dtype == kHalf; }

}  // namespace

int64_t matmul_workspace(const Matmul& matmul) {
  const Matmul normal = normalized(matmul);
  if (!has_tensor_cores(normal) || is_empty(normal)) return 0;
  const FewRows few_rows(normal);
  return bytes_of_partials(normal, few_rows.possible ? few_rows.splits : Tiled(normal).splits);
}

void launch_matmul(const Matmul& matmul, void* workspace, Stream stream) {
  const Matmul normal = normalized(matmul);
  float* const partials = static_cast<float*>(workspace);
  if (is_empty(normal)) return;
  if (!has_tensor_cores(normal)) {
    const int64_t tiles = tiles_of(normal, kPlainTile, kPlainTile);
    launch(plain_kernel, blocks(normal.batch * tiles), kThreads, kPlainTile * kPlainStride * sizeof(float), stream,
           normal, tiles);
    return;
  }
  int64_t splits;
  if (const FewRows few_rows(normal); few_rows.possible) {
    splits = few_rows.splits;
    launch_few_rows(normal, few_rows, partials, stream);
  } else {
    const Tiled how(normal);
    splits = how.splits;
    const Matmul product = splits > 1 ? partial(normal, partials) : normal;
    with_16_bits(normal.dtype, [&](auto zero) { launch_on_tensor_cores<decltype(zero)>(product, how, stream); });
  }
  if (splits > 1) launch_fold(normal, splits, partials, stream);
}

}  // namespace amp_kernels::cuda
