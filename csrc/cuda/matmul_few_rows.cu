// Products with up to 16 rows: out = activation(alpha * a @ b + beta * input). Their time is the time to read b,
// because each number of b has 2 bytes, and takes part in only 2 m operations. So b is read once, straight from memory
// into fragments (tensor_cores.cuh). b may be dense along k or along n, with any alignment.
//
// A block has some columns of b and a part of k (`split`). Its 8 warps take turns along k. If b is dense along k, a
// block has 32 columns, and each warp takes the next 32 of k, as in the picture. If b is dense along n, a block has 64
// columns, and each warp takes the next 16 of k.
//
//             columns of a block
//           +------------------------------+      warps -> shared memory -> sum over warps -> out
//   b:      | warp 0: k = 0 .. 31          |
//   k x n   | warp 1: k = 32 .. 63         |    If k is divided among several blocks:
//           | ..                           |      sum over warps -> partials[split] -> fold_kernel, in a fixed order
#include "matmul_results.cuh"
#include "shifted.cuh"
#include "tensor_cores.cuh"

namespace amp_kernels::cuda {
namespace {

constexpr int kWarps = kThreads / 32;

// A number of the result is a sum over k, and its terms may be added in any order. So a place in a fragment may hold
// any k, if the fragments of a and b have the same k in the places that are multiplied with each other. This lets each
// lane load numbers that are neighbours in memory. With g = lane / 4 and t = lane % 4, a lane loads rows g and g + 8 of
// a, and columns of b that depend on g. Which k a lane loads depends on t.
//
// In both structs below, kK is how much of k a warp takes in one step, and kANumbers is how many of these k a lane
// loads.
//
// For b that is dense along k. A lane loads the k from 8 t to 8 t + 7 of each step, in the columns g, g + 8, g + 16 and
// g + 24 of the block.
struct AlongK {
  static constexpr int kColumns = 32, kK = 32, kANumbers = 8, kTiles = kColumns / 8;
};

// For b that is dense along n. A lane loads the k from 4 t to 4 t + 3 of each step, which are four rows of b. In each
// of these rows it loads the eight columns from 8 g to 8 g + 7 of the block. A word in memory holds two numbers of
// one row, but a word of a fragment holds two numbers of one column. So pairs of rows are merged in registers.
struct AlongN {
  static constexpr int kColumns = 64, kK = 16, kANumbers = 4, kTiles = kColumns / 8;
};

// Loads kNumbers numbers of a row of a. Only the first `count` exist; the others become 0. `has_words`: the aligned
// words of 16 bytes that hold the numbers may be read.
template <bool kWide, int kNumbers, class T>
__device__ __forceinline__ void load_a(const T* p, int64_t stride, int64_t count, bool has_words,
                                       uint32_t (&words)[kNumbers / 2]) {
  if (kWide && count >= kNumbers) {
    const Packed<T, kNumbers> pack = load_wide<kNumbers>(p);
    memcpy(words, pack.word, sizeof(words));
  } else if (kNumbers == 8 && stride == 1 && has_words) {
    Shifted<T> shifted;
    shifted.load(p, count);
    const Packed<T, 8> pack = shifted.first(count);
    memcpy(words, pack.word, sizeof(words));
  } else {
    const int few = count < 0 ? 0 : count < kNumbers ? static_cast<int>(count) : kNumbers;
    const Vector<T, kNumbers> elements = load_each<kNumbers>(p, stride, few);
    memcpy(words, elements.data, sizeof(words));
  }
}

// Reads a thread's numbers of a and b. In place of a row of a or a column of b past the end, an existing one is read,
// or the registers hold undefined numbers. The sums of such a row or column are not stored.
template <class T, class Way, bool kWide>
struct Reader {
  static constexpr bool kAlongK = std::is_same_v<Way, AlongK>;

  const T* a[2];
  const T* b[4];
  int64_t a_stride, a_step, b_step;
  int columns;  // AlongN: how many of the thread's eight columns exist

  // k: the thread's first k.
  __device__ Reader(const Matmul& matmul, int64_t batch, int64_t first_n, int64_t k) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const T* const first_a = static_cast<const T*>(matmul.a) + batch * matmul.a_strides[0];
    const T* const first_b = static_cast<const T*>(matmul.b) + batch * matmul.b_strides[0];
    const int64_t last_m = matmul.m - 1, last_n = matmul.n - 1;
    a_stride = matmul.a_strides[2];
    const bool exists = k < matmul.k;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t row = g + 8 * j < last_m ? g + 8 * j : last_m;
      a[j] = first_a + (exists ? row * matmul.a_strides[1] + k * a_stride : 0);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int64_t column = first_n + (kAlongK ? j * 8 + g : g * 8);
      if (column > last_n) column = kAlongK ? last_n : first_n;
      columns = last_n - column < 7 ? static_cast<int>(last_n - column) + 1 : 8;
      b[j] = first_b + (exists ? (kAlongK ? k : k + j) * matmul.b_strides[1] + column * matmul.b_strides[2] : 0);
    }
    a_step = kWarps * Way::kK * a_stride;
    b_step = kWarps * Way::kK * matmul.b_strides[1];
  }

  // Whether the aligned words that hold the numbers of the next kSteps steps lie inside the tensors. The check assumes
  // full steps. If k ends within a step, the result may be false although the words that are needed lie inside.
  template <int kSteps>
  __device__ __forceinline__ bool has_words(const Span& a_span, const Span& b_span) const {
    if (!b_span.has_words(b[0], b[3] + (kSteps - 1) * b_step + (kAlongK ? 8 : columns))) return false;
    return !kAlongK || a_span.has_words(a[0], a[1] + (kSteps - 1) * a_step + 8);
  }

  // Reads the numbers of one step. `left`: how many k exist from the thread's first k of this step on. If kIsLast is
  // false, `left` is at least 8.
  template <bool kIsLast>
  __device__ __forceinline__ void read(int64_t left, bool has_words, uint32_t (&a_words)[2][Way::kANumbers / 2],
                                       Packed<T, 8> (&b_packs)[4]) {
    const auto count = [&](int j) { return kAlongK ? (kIsLast ? left : 8) : j < left ? columns : 0; };
    if constexpr (kWide && !kIsLast) {
#pragma unroll
      for (int j = 0; j < 4; ++j) b_packs[j] = load_wide<8>(b[j]);
    } else if (has_words) {
      Shifted<T> shifted[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) shifted[j].load(b[j], count(j));
#pragma unroll
      for (int j = 0; j < 4; ++j) b_packs[j] = kAlongK && kIsLast ? shifted[j].first(left) : shifted[j].all();
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) b_packs[j] = load_strided(b[j], 1, count(j));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) b[j] += b_step;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_a<kWide, Way::kANumbers>(a[j], a_stride, kIsLast ? left : Way::kANumbers, has_words, a_words[j]);
      a[j] += a_step;
    }
  }
};

template <class T>
__device__ __forceinline__ void multiply(float (&sum)[AlongK::kTiles][4], const uint32_t (&a)[2][4],
                                         const Packed<T, 8> (&b)[4]) {
#pragma unroll
  for (int w = 0; w < 4; w += 2)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      multiply_numbers<T>(sum[j], {a[0][w], a[1][w], a[0][w + 1], a[1][w + 1]}, {b[j].word[w], b[j].word[w + 1]});
}

template <class T>
__device__ __forceinline__ void multiply(float (&sum)[AlongN::kTiles][4], const uint32_t (&a)[2][2],
                                         const Packed<T, 8> (&b)[4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t half = j % 2 == 0 ? 0x5410 : 0x7632;
    multiply_numbers<T>(
        sum[j], {a[0][0], a[1][0], a[0][1], a[1][1]},
        {__byte_perm(b[0].word[j / 2], b[1].word[j / 2], half), __byte_perm(b[2].word[j / 2], b[3].word[j / 2], half)});
  }
}

// k is divided among `splits` blocks. Each block divides its part of k among its warps.
template <class T, class Way, bool kWide>
__global__ void __launch_bounds__(kThreads, 2)
    few_rows_kernel(const Matmul matmul, const Span a_span, const Span b_span, const int64_t k_of_split,
                    const int64_t splits, float* partials) {
  constexpr bool kAlongK = std::is_same_v<Way, AlongK>;
  constexpr int kEach = kWide || kAlongK ? 2 : 1, kStep = kWarps * Way::kK, kValues = Way::kTiles * 4;
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [kWarps, kValues, 32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t column_blocks = (matmul.n + Way::kColumns - 1) / Way::kColumns;
  const int64_t first_n = blockIdx.x % column_blocks * Way::kColumns;
  const int64_t split = blockIdx.x / column_blocks % splits, batch = blockIdx.x / column_blocks / splits;
  const int64_t end = (split + 1) * k_of_split < matmul.k ? (split + 1) * k_of_split : matmul.k;
  const int64_t thread_k = lane % 4 * Way::kANumbers;
  int64_t k = split * k_of_split + warp * Way::kK;
  Reader<T, Way, kWide> reader(matmul, batch, first_n, k + thread_k);
  float sum[Way::kTiles][4] = {};
  uint32_t a_words[kEach][2][Way::kANumbers / 2];
  Packed<T, 8> b_packs[kEach][4];
  // An iteration does kEach full steps, or one step that need not be full. It does one step if fewer than kEach full
  // steps are left, or if the words of kEach steps reach beyond a tensor.
#pragma unroll 1
  while (k < end) {
    const bool is_whole = k + (kEach - 1) * kStep + Way::kK <= end;
    if (is_whole && ((kWide && kAlongK) || warp_all(reader.template has_words<kEach>(a_span, b_span)))) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) reader.template read<false>(8, true, a_words[i], b_packs[i]);
#pragma unroll
      for (int i = 0; i < kEach; ++i) multiply<T>(sum, a_words[i], b_packs[i]);
      k += kEach * kStep;
    } else {
      const bool has_words = reader.template has_words<1>(a_span, b_span);
      reader.template read<true>(end - k - thread_k, has_words, a_words[0], b_packs[0]);
      multiply<T>(sum, a_words[0], b_packs[0]);
      k += kStep;
    }
  }
#pragma unroll
  for (int j = 0; j < Way::kTiles; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) shared[(warp * kValues + j * 4 + c) * 32 + lane] = sum[j][c];
  barrier();
#pragma unroll 1
  for (int i = threadIdx.x; i < kFewRows * Way::kColumns; i += kThreads) {
    const int m = i / Way::kColumns, column = i % Way::kColumns;
    const int64_t n = first_n + column;
    if (m >= matmul.m || n >= matmul.n) continue;
    const int tile = kAlongK ? column / 8 : column % 8, in_tile = kAlongK ? column % 8 : column / 8;
    const int value = tile * 4 + m / 8 * 2 + in_tile % 2, from = m % 8 * 4 + in_tile / 2;
    float total[1] = {};
    for (int w = 0; w < kWarps; ++w) total[0] += shared[(w * kValues + value) * 32 + from];
    if (splits == 1) {
      finish<T, 1>(matmul, batch, m, n, total);
    } else {
      partials[((split * matmul.batch + batch) * matmul.m + m) * matmul.n + n] = total[0];
    }
  }
}

// Adds the sums of the splits, in the order of k.
template <class T>
__global__ void __launch_bounds__(kThreads) fold_kernel(const Matmul matmul, int64_t splits, const float* partials) {
  const int64_t count = matmul.batch * matmul.m * matmul.n;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  float total[1] = {};
#pragma unroll 16  // 16 loads are in flight at a time, because a small result may have a hundred splits
  for (int64_t split = 0; split < splits; ++split) total[0] += partials[split * count + i];
  finish<T, 1>(matmul, i / matmul.n / matmul.m, i / matmul.n % matmul.m, i % matmul.n, total);
}

int64_t column_blocks(const Matmul& matmul, bool along_k) {
  const int64_t columns = along_k ? AlongK::kColumns : AlongN::kColumns;
  return matmul.batch * ((matmul.n + columns - 1) / columns);
}

template <class T, class Way>
void launch_way(const Matmul& matmul, int64_t splits, float* partials, Stream stream) {
  constexpr bool kAlongK = std::is_same_v<Way, AlongK>;
  const int64_t (&a)[3] = matmul.a_strides, (&b)[3] = matmul.b_strides;
  const bool wide =
      is_wide(matmul.a, matmul.k, a[2], {a[0], a[1]}) &&
      (kAlongK ? is_wide(matmul.b, matmul.k, b[1], {b[0], b[2]}) : is_wide(matmul.b, matmul.n, b[2], {b[0], b[1]}));
  // k_of_split is a multiple of kStep, which is how much of k a block takes in one step.
  constexpr int64_t kStep = kWarps * Way::kK;
  const int64_t k_of_split = ((matmul.k + splits - 1) / splits + kStep - 1) / kStep * kStep;
  launch(wide ? few_rows_kernel<T, Way, true> : few_rows_kernel<T, Way, false>,
         blocks(splits * column_blocks(matmul, kAlongK)), kThreads, kThreads * Way::kTiles * 4 * sizeof(float), stream,
         matmul, Span::of(matmul.a, {{matmul.batch, a[0]}, {matmul.m, a[1]}, {matmul.k, a[2]}}),
         Span::of(matmul.b, {{matmul.batch, b[0]}, {matmul.k, b[1]}, {matmul.n, b[2]}}), k_of_split, splits, partials);
}

}  // namespace

FewRows::FewRows(const Matmul& matmul) {
  along_k = matmul.k <= 1 || matmul.b_strides[1] == 1;
  possible = matmul.m <= kFewRows && (along_k || matmul.n == 1 || matmul.b_strides[2] == 1);
  splits = splits_of(matmul, 2 * multiprocessor_count() / column_blocks(matmul, along_k));
}

void launch_few_rows(const Matmul& matmul, const FewRows& how, float* partials, Stream stream) {
  with_16_bits(matmul.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (how.along_k) return launch_way<T, AlongK>(matmul, how.splits, partials, stream);
    launch_way<T, AlongN>(matmul, how.splits, partials, stream);
  });
}

void launch_fold(const Matmul& matmul, int64_t splits, const float* partials, Stream stream) {
  const int64_t count = matmul.batch * matmul.m * matmul.n;
  with_16_bits(matmul.dtype, [&](auto zero) {
    launch(fold_kernel<decltype(zero)>, blocks((count + kThreads - 1) / kThreads), kThreads, 0, stream, matmul, splits,
           partials);
  });
}

}  // namespace amp_kernels::cuda
