// The gradient pass, one launch for any mix of dtypes:
//   norm      = sqrt(sum of g^2) * factor
//   found_inf = 1 if any g is NaN or inf; the Record (table.h) names the first tensor that has such a g
//   g        <- g * factor                                  (only if `write` is set)
//
// Bytes per element: 4 (fp32) or 2 (fp16, bf16) are read. If `write` is set, as many are written.
//
// A block takes every gridDim.x-th chunk of the table. A thread takes packs of 16 bytes (4 or 8 elements), four at a
// time, and starts the loads of all four before it uses one:
//
//   chunk:  | head | pack of thread 0 | thread 1 | ... | thread 255 | thread 0 | ... | tail |
//             fp32 sum of a pack -> fp64 sum of a thread -> fp64 sum of the block -> partials[chunk]
//
// Packs begin where the gradient is aligned to 16 bytes. Each chunk ends at the end of a pack, except the last chunk of
// a tensor. So only the first chunk of a tensor has a head, and only the last chunk has a tail. Both are shorter than a
// pack. Their elements are divided as follows:
//
// - If a head or tail has four or more 16-bit elements, the four elements next to the packs are a half pack. A thread
//   of the last warp but one accesses the 8 bytes of a half pack at once.
// - At most three other elements are left in the head, and at most three in the tail. Each of these elements goes to a
//   thread of the last warp.
// - Exception: if a tensor ends before its first pack begins, it has no half packs. Each of its elements (at most six)
//   goes to a thread of the last warp.
//
// If `write` is set, elements are multiplied while they are still in registers. So each gradient is read only once.
//
// The block that ends last adds all partials, in an order that depends only on the number of chunks. So the same
// gradients, with the same alignment to 16 bytes, give the same bits on the same GPU. On a GPU with another number of
// multiprocessors, chunks have another length. The fp32 sums of packs are the same there, but they are added (in fp64)
// in another order. The norm, rounded to fp32, then differs in its last bit in about one of ten million cases (an
// estimate).
#include "grid.cuh"
#include "squares.cuh"

namespace amp_kernels::cuda {
namespace {

constexpr int kPacks = 4;  // packs of 16 bytes that a thread loads at a time
// How many blocks of 256 threads a multiprocessor holds. If it holds five, its threads load 80 KB at a time. A
// multiprocessor of sm_75 holds only four.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kResidentBlocks = 4;
#else
constexpr int kResidentBlocks = 5;
#endif

using GradientWalk = ChunkWalk<kGrad + 1, /*kBackwards=*/false>;
constexpr int kReduced = 32;  // 8-byte words of shared memory for reductions; then comes the walk's header (grid.cuh)

// Returns the sum of squares of N neighbours that were loaded from `at`. If `write` is set, stores their products with
// `factor` at `at`.
template <class T, int N>
__device__ __forceinline__ double take(const Vector<T, N>& loaded, T* at, float factor, bool write) {
  const Vector<float, N> x = floats(loaded);
  if (write) {
    Vector<T, N> products;
#pragma unroll
    for (int i = 0; i < N; ++i) products.data[i] = from_float<T>(x.data[i] * factor);
    store_wide(at, products);
  }
  return sum_of_squares<T>(x);
}

// Returns the sum of squares of this thread's elements of head and tail. If `write` is set, these elements are
// multiplied by `factor` in memory.
template <class T, int kPack>
__device__ __forceinline__ double take_ends(T* grad, const Division<kPack>& division, float factor, bool write) {
  // A half pack lies next to a pack, so it is aligned to 8 bytes. If the tensor ends before its first pack begins, it
  // has no half packs: `lead` is then less than `first`, and `tail` is 0.
  const int packs_end = division.first + division.packs * kPack, tail = division.others - division.lead;
  const int half_head = division.lead == division.first ? division.lead & 4 : 0, half_tail = tail & 4;
  const int head = division.lead - half_head, others = division.others - half_head - half_tail;
  double sum = 0.0;
  if (const int k = (threadIdx.x + 32) % kThreads; k < others) {
    T* const at = grad + (k < head ? k : k - head + packs_end + half_tail);
    const T x = *at;
    sum = square(x);
    if (write) *at = from_float<T>(to_float(x) * factor);
  }
  if constexpr (kPack == 8) {
    const int k = (threadIdx.x + 64) % kThreads;
    if (k == 0 ? half_head > 0 : k == 1 && half_tail > 0) {
      T* const at = grad + (k == 0 ? division.first - 4 : packs_end);
      sum = take(load_wide<4>(at).unpacked(), at, factor, write);
    }
  }
  return sum;
}

// Returns the sum of squares of this thread's elements of a chunk. If `write` is set, these elements are multiplied by
// `factor` in memory.
template <class T>
__device__ double pass_over(T* grad, const GradientWalk& walk, float factor, bool write) {
  constexpr int kPack = 16 / sizeof(T);
  assume_global(grad);
  const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(grad) / sizeof(T) % kPack);
  const Division<kPack> division = walk.divide<kPack>(phase);
  const int packs = division.packs;
  double sum = take_ends(grad, division, factor, write);
  T* const first = grad + division.first;
  for (int k = threadIdx.x; k < packs; k += kPacks * kThreads) {
    Packed<T, kPack> packed[kPacks];
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      // If this pack is past the end, pack k is loaded a second time, which is free. If there were a branch instead,
      // the compiler would wait before the branch for the loads that were already started.
      const int at = k + j * kThreads < packs ? k + j * kThreads : k;
      packed[j] = load_wide<kPack>(first + at * kPack);
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (j > 0 && k + j * kThreads >= packs) continue;
      sum += take(packed[j].unpacked(), first + (k + j * kThreads) * kPack, factor, write);
    }
  }
  return sum;
}

// Computes norm, found_inf and record from all partials. Only the last block calls it.
__device__ void finish_pass(const GradientPass& pass, float factor, double* shared) {
  double sum = 0.0;
  int64_t first_bad = INT64_MAX;
#pragma unroll 4  // nvcc would unroll eight iterations, which would spill registers on sm_120
  for (int64_t c = threadIdx.x; c < pass.table.chunk_count; c += kThreads) {
    const double partial = pass.partials[c];
    sum += partial;
    if (!is_finite(partial) && pass.table.chunks[2 * c] < first_bad) first_bad = pass.table.chunks[2 * c];
  }
  sum = block_sum(sum, shared);
  first_bad = block_min(first_bad, static_cast<int64_t>(INT64_MAX), reinterpret_cast<int64_t*>(shared));
  if (threadIdx.x != 0) return;
  const bool bad = !is_finite(sum);
  *pass.norm = static_cast<float>(sqrt(sum) * factor);
  if (bad || pass.clear) *pass.found_inf = bad ? 1.0f : 0.0f;
  if (!pass.clear) return;
  ++pass.record->passes;
  if (!bad) return;
  pass.record->overflow_pass = pass.record->passes;
  pass.record->overflow_tensor = first_bad;
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks) unscale_kernel(const GradientPass pass) {
  double* shared = reinterpret_cast<double*>(shared_memory());
  GradientWalk walk(pass.table, nullptr, reinterpret_cast<int64_t*>(shared + kReduced));
  const float factor = unscale_factor(pass);
  for (; walk.has_chunk(); walk.advance()) {
    const auto pass_over_chunk = [&](auto type) {
      auto* const grad = walk.in<decltype(type)>(kGrad);
      return grad == nullptr ? 0.0 : pass_over(grad, walk, factor, pass.write);
    };
    double sum;
    switch (walk.row(kGradDtype)) {
      case kHalf:
        sum = pass_over_chunk(__half{});
        break;
      case kBFloat16:
        sum = pass_over_chunk(__nv_bfloat16{});
        break;
      default:
        sum = pass_over_chunk(0.0f);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) pass.partials[walk.index()] = counted(sum, pass.table, walk.tensor());
  }
  if (is_last_block(reinterpret_cast<unsigned*>(&pass.record->ticket))) finish_pass(pass, factor, shared);
}

constexpr size_t kSharedBytes = (kReduced + GradientWalk::kWords) * sizeof(double);

}  // namespace

int64_t load_unscale() { return blocks_at_a_time(unscale_kernel, kSharedBytes); }

void launch_unscale(const GradientPass& pass, Stream stream) {
  launch_over_chunks(unscale_kernel, kSharedBytes, pass, stream);
}

}  // namespace amp_kernels::cuda
