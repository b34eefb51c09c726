// Copies a matrix into rows that are a multiple of 16 bytes apart, in one pass:
//   out[r, c]    = x[r, c] * derivative(pre[r, c])     without `pre`: x[r, c]
//   out[r, c]    = 0                                   after the last column of x
//   bias_grad[c] = sum over r of out[r, c] before rounding
//
// `derivative` is the derivative of an activation. `pre` is the argument of the activation, or its result if the
// activation is relu.
//
// Bytes per element: 2 read (4 with `pre`), 2 written.
//
// A block copies a tile that is `rows` rows high and `across` packs wide. A pack is 8 neighbouring columns of a row. A
// thread copies one pack in every (kThreads / across)-th row of the tile. It loads the packs of four rows at a time, or
// of two rows if there is an activation. If x or `pre` cannot be read in aligned words of 16 bytes, or if `out` cannot
// be written in them, it loads the packs of half as many rows at a time. The threads of a tile:
//
//           pack 0          pack 1     ..   pack across - 1
//   row 0 | thread 0      | thread 1 | .. | thread across - 1 |
//   row 1 | thread across | ..                                |
//   ...
//
// Another run gives the same bits, because the sums of columns (bias_grad) are added in a fixed order. First, each
// thread adds the rows that it copies. Then store_sums adds the sums of a tile's threads in shared memory, which gives
// one partial for each column of the tile. If there are several row tiles, fold_kernel adds their partials.
#include "../formulas/activation.h"
#include "grid.cuh"
#include "pieces.cuh"
#include "shifted.cuh"

namespace amp_kernels::cuda {
namespace {

constexpr int kPack = 8;         // columns: 16-bit numbers in one 16-byte store
constexpr int kMostAcross = 32;  // packs across a tile, at most
constexpr int kMostRows = 4;     // most rows that a thread loads at a time: 64 bytes a thread, 48 KB a multiprocessor
constexpr int kResident = 3;     // blocks on a multiprocessor; with three, a thread may have 80 registers

// The size and the number of tiles. `rows` is the number of rows of a tile. It is below 2^31, since otherwise `out`
// would not fit in memory.
struct Grid {
  int across;  // packs
  int64_t column_tiles, row_tiles, rows;
  int64_t x_step, pre_step, out_step;  // elements from one row of a thread to its next row

  explicit Grid(const CopyPad& pass) {
    const int64_t packs = pass.pitch / kPack;
    across = 1;
    while (across < packs && across < kMostAcross) across *= 2;
    column_tiles = (packs + across - 1) / across;
    const int64_t down = kThreads / across;
    const Pieces pieces((pass.rows + down - 1) / down, column_tiles, int64_t{multiprocessor_count()} * kResident,
                        kMostRows);
    rows = pieces.steps * down;
    row_tiles = pieces.count;
    x_step = down * pass.x_strides[0];
    pre_step = down * pass.pre_strides[0];
    out_step = down * pass.pitch;
  }
};

// Reads a thread's packs of x or of `pre`, row after row.
template <class T>
struct Reader {
  const T* next;
  int columns;            // how many of the pack's 8 columns the tensor has: 0 to 8
  bool can_read_aligned;  // false if columns are not neighbours, or an aligned 16-byte read would leave the tensor

  // The reader begins with `row`, and reads only rows before `end`.
  __device__ Reader(const void* x, const Span& span, const int64_t (&strides)[2], int64_t row, int64_t end,
                    int64_t column, int64_t columns_of_x)
      : next(static_cast<const T*>(x)) {
    const int64_t left = columns_of_x - column;
    columns = left < 0 ? 0 : left < kPack ? static_cast<int>(left) : kPack;
    if (columns > 0) next += row * strides[0] + column * strides[1];
    can_read_aligned = strides[1] == 1 && span.has_words(next, next + (end - 1 - row) * strides[0] + columns);
  }

  // Starts the loads of N packs, one in each of N rows that are `step` elements apart. Columns are `stride` elements
  // apart. `left` is how many rows the thread still has to copy. If it is less than N, the packs after the first `left`
  // are set to 0. Later, packs[i].first() waits for the load of pack i.
  template <bool kAligned, int N>
  __device__ __forceinline__ void load(int left, int64_t step, int64_t stride, Shifted<T> (&packs)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i, next += step) {
      if constexpr (kAligned) {
        packs[i].load(next, i < left ? columns : 0);
      } else {
        packs[i].set(load_strided(next, stride, i < left ? columns : 0));
      }
    }
  }
};

// Adds the sums of all threads, separately for each of the tile's 8 * across columns, in a fixed order. The results go
// to `partials`, from partials[first] on.
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
__global__ void __launch_bounds__(kThreads, kResident)
    copy_pad_kernel(const CopyPad pass, const Span x_span, const Span pre_span, const Grid grid, float* partials) {
  const int64_t row_tile = blockIdx.x / grid.column_tiles, first_column = blockIdx.x % grid.column_tiles * grid.across;
  const int64_t column = (first_column + threadIdx.x % grid.across) * kPack;
  const int64_t begin = row_tile * grid.rows + threadIdx.x / grid.across;
  const int64_t end = (row_tile + 1) * grid.rows < pass.rows ? (row_tile + 1) * grid.rows : pass.rows;
  float sums[kPack] = {};
  if (column < pass.pitch && begin < end) {
    Reader<T> x(pass.x, x_span, pass.x_strides, begin, end, column, pass.columns);
    Reader<T> pre(pass.pre, pre_span, pass.pre_strides, begin, end, column, pass.columns);
    T* out = static_cast<T*>(pass.out) + begin * pass.pitch + column;
    const int rows = static_cast<int>(((end - begin) * grid.across + kThreads - 1) / kThreads);  // rows of this thread
    const auto copy = [&](auto aligned) {
      constexpr int kRows = kMostRows / (kActivation == kIdentity ? 1 : 2) / (aligned ? 1 : 2);
#pragma unroll 1
      for (int left = rows; left > 0; left -= kRows) {
        Shifted<T> numbers[kRows];
        [[maybe_unused]] Shifted<T> arguments[kRows];
        x.template load<aligned>(left, grid.x_step, pass.x_strides[1], numbers);
        if constexpr (kActivation != kIdentity)
          pre.template load<aligned>(left, grid.pre_step, pass.pre_strides[1], arguments);
#pragma unroll
        for (int i = 0; i < kRows; ++i, out += grid.out_step) {
          if (i >= left) continue;
          Vector<T, kPack> pack = numbers[i].first(x.columns).unpacked();
          float product[kPack];
#pragma unroll
          for (int j = 0; j < kPack; ++j) product[j] = to_float(pack.data[j]);
          if constexpr (kActivation != kIdentity) {
            const Vector<T, kPack> argument = arguments[i].first(pre.columns).unpacked();
#pragma unroll
            for (int j = 0; j < kPack; ++j) {
              product[j] *= derivative<kActivation>(to_float(argument.data[j]));
              pack.data[j] = from_float<T>(product[j]);
            }
          }
          if (partials != nullptr) {
#pragma unroll
            for (int j = 0; j < kPack; ++j) sums[j] += product[j];
          }
          if constexpr (aligned) {
            store_wide(out, pack);
          } else {
            store_each(out, pack, 1, kPack);
          }
        }
      }
    };
    if (x.can_read_aligned && (kActivation == kIdentity || pre.can_read_aligned) && is_aligned16(pass.out)) {
      copy(std::true_type());
    } else {
      copy(std::false_type());
    }
  }
  if (partials != nullptr)
    store_sums(sums, grid.across, first_column * kPack, pass.columns, partials + row_tile * pass.columns);
}

// Adds the partials [row_tiles, columns] over the row tiles. A block does this for 32 columns.
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
  const auto span_of = [&](const void* x, const int64_t (&strides)[2]) {
    return Span::of(x, {{pass.rows, strides[0]}, {pass.columns, strides[1]}});
  };
  with_16_bits(pass.dtype, [&](auto zero) {
    launch(kernel_of<decltype(zero)>(pass.activation), blocks(grid.row_tiles * grid.column_tiles), kThreads,
           kThreads * kPack * sizeof(float), stream, pass, span_of(pass.x, pass.x_strides),
           span_of(pass.pre, pass.pre_strides), grid, partials);
  });
  if (folds)
    launch(fold_kernel, blocks((pass.columns + 31) / 32), kThreads, kThreads * sizeof(float), stream,
           static_cast<const float*>(partials), grid.row_tiles, pass.columns, pass.bias_grad);
}

}  // namespace amp_kernels::cuda
