// A matrix into padded storage, with the derivative of an activation and the sums of its columns, in one pass.
#include "../formulas/activation.h"
#include "grid.cuh"
#include "shifted.cuh"

namespace amp_kernels::cuda {
namespace {

constexpr int kPack = 8;  // numbers of a 16-byte store
constexpr int kMostAcross = 32;
constexpr int kBlocks = 4;  // on a multiprocessor

// A block takes `across` packs of `rows` rows, kThreads / across rows at a time.
struct Grid {
  int across;
  int64_t column_tiles, row_tiles, rows;

  explicit Grid(const CopyPad& pass) {
    const int64_t packs = pass.pitch / kPack;
    across = 1;
    while (across < packs && across < kMostAcross) across *= 2;
    column_tiles = (packs + across - 1) / across;
    // Twice what the threads hold at once, at least: sums of columns are worth a few rows.
    const int64_t least = 8 * kThreads / across;
    const int64_t wanted = (int64_t{multiprocessor_count()} * kBlocks + column_tiles - 1) / column_tiles;
    rows = (pass.rows + wanted - 1) / wanted;
    if (rows < least) rows = least;
    row_tiles = (pass.rows + rows - 1) / rows;
  }
};

// Row `row` of x or pre from column `column` on.
template <int N, class T>
__device__ __forceinline__ void load_rows(const T* x, const int64_t (&strides)[2], int64_t row, int64_t step,
                                          int64_t end, int64_t column, int64_t columns, Packed<T, kPack> (&packs)[N]) {
  const T* const p = x + column * strides[1];
  const int64_t count = columns - column;
  if (strides[1] == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t r = row + i * step;
      packs[i] = load_shifted(p + (r < end ? r * strides[0] : 0), r < end ? count : 0);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t r = row + i * step;
      packs[i] = load_strided(p + (r < end ? r * strides[0] : 0), strides[1], r < end ? count : 0);
    }
  }
}

// The threads' sums of `8 * across` columns, added in a fixed order.
__device__ __forceinline__ void store_sums(const float (&sums)[kPack], int across, int64_t first, int64_t columns,
                                           float* partials) {
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [kThreads / across, 8 * across]
#pragma unroll
  for (int i = 0; i < kPack; ++i) shared[threadIdx.x * kPack + i] = sums[i];
  barrier();
  const int column = threadIdx.x;
  if (column >= across * kPack || first + column >= columns) return;
  float sum = 0.0f;
  for (int row = 0; row < kThreads / across; ++row) sum += shared[row * across * kPack + column];
  partials[first + column] = sum;
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kThreads, kBlocks / 2)
    copy_pad_kernel(const CopyPad pass, const Grid grid, float* partials) {
  constexpr int kRows = kActivation == kIdentity ? 4 : 2;  // under way in a thread
  const int64_t row_tile = blockIdx.x / grid.column_tiles, first_column = blockIdx.x % grid.column_tiles * grid.across;
  const int64_t column = (first_column + threadIdx.x % grid.across) * kPack;
  const int64_t step = kThreads / grid.across, begin = row_tile * grid.rows;
  const int64_t end = begin + grid.rows < pass.rows ? begin + grid.rows : pass.rows;
  const bool aligned = is_aligned16(pass.out);
  float sums[kPack] = {};
  if (column < pass.pitch) {
#pragma unroll 1
    for (int64_t row = begin + threadIdx.x / grid.across; row < end; row += kRows * step) {
      Packed<T, kPack> x[kRows], pre[kRows];
      load_rows(static_cast<const T*>(pass.x), pass.x_strides, row, step, end, column, pass.columns, x);
      if constexpr (kActivation != kIdentity)
        load_rows(static_cast<const T*>(pass.pre), pass.pre_strides, row, step, end, column, pass.columns, pre);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t r = row + i * step;
        if (r >= end) continue;
        const Vector<T, kPack> values = x[i].unpacked();
        float product[kPack];
#pragma unroll
        for (int j = 0; j < kPack; ++j) product[j] = to_float(values.data[j]);
        if constexpr (kActivation != kIdentity) {
          const Vector<T, kPack> arguments = pre[i].unpacked();
#pragma unroll
          for (int j = 0; j < kPack; ++j) product[j] *= derivative<kActivation>(to_float(arguments.data[j]));
        }
#pragma unroll
        for (int j = 0; j < kPack; ++j) sums[j] += product[j];
        T* const out = static_cast<T*>(pass.out) + r * pass.pitch + column;
        if constexpr (kActivation == kIdentity) {
          if (aligned) {
            store_wide(out, values);
          } else {
            store_each(out, values, 1, kPack);
          }
        } else {
          Vector<T, kPack> rounded;
#pragma unroll
          for (int j = 0; j < kPack; ++j) rounded.data[j] = from_float<T>(product[j]);
          if (aligned) {
            store_wide(out, rounded);
          } else {
            store_each(out, rounded, 1, kPack);
          }
        }
      }
    }
  }
  if (partials != nullptr)
    store_sums(sums, grid.across, first_column * kPack, pass.columns, partials + row_tile * pass.columns);
}

// Adds the partial sums [row_tiles, columns], 32 columns in a block.
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const float* partials, int64_t row_tiles, int64_t columns, float* bias_grad) {
  constexpr int kWarps = kThreads / 32;
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [kWarps, 32]
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x % 32;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = threadIdx.x / 32; row < row_tiles; row += kWarps) sum += partials[row * columns + column];
  }
  shared[threadIdx.x] = sum;
  barrier();
  if (threadIdx.x >= 32 || column >= columns) return;
  for (int warp = 1; warp < kWarps; ++warp) sum += shared[warp * 32 + threadIdx.x];
  bias_grad[column] = sum;
}

template <class T>
auto kernel_of(Activation activation) {
  switch (activation) {
    case kRelu:
      return copy_pad_kernel<T, kRelu>;
    case kGelu:
      return copy_pad_kernel<T, kGelu>;
    case kGeluTanh:
      return copy_pad_kernel<T, kGeluTanh>;
    default:
      return copy_pad_kernel<T, kIdentity>;
  }
}

}  // namespace

int64_t copy_pad_workspace(const CopyPad& pass) {
  const Grid grid(pass);
  return pass.bias_grad == nullptr || grid.row_tiles == 1 ? 0 : grid.row_tiles * pass.columns * sizeof(float);
}

void launch_copy_pad(const CopyPad& pass, void* workspace, Stream stream) {
  const Grid grid(pass);
  const bool folds = copy_pad_workspace(pass) > 0;
  float* const partials = folds ? static_cast<float*>(workspace) : pass.bias_grad;
  with_16_bits(pass.dtype, [&](auto zero) {
    launch(kernel_of<decltype(zero)>(pass.activation), blocks(grid.row_tiles * grid.column_tiles), kThreads,
           kThreads * kPack * sizeof(float), stream, pass, grid, partials);
  });
  if (folds)
    launch(fold_kernel, blocks((pass.columns + 31) / 32), kThreads, kThreads * sizeof(float), stream,
           static_cast<const float*>(partials), grid.row_tiles, pass.columns, pass.bias_grad);
}

}  // namespace amp_kernels::cuda
