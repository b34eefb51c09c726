// The gradient pass, one launch for any mix of dtypes:
//   norm      = sqrt(sum of g^2) * factor
//   found_inf = 1 if any g is NaN or inf, and the first tensor that holds one
//   g        <- g * factor                                  (with `write`)
//
// Bytes per element: 4 (fp32) or 2 read; with `write` as many written, and read once more, from L2 where the chunk is
// still there.
//
// A block takes every gridDim.x-th chunk of the table (at most 16384 or 65536 elements of one tensor):
//
//   chunk:  | pack of thread 0 | thread 1 | ... | thread 255 | thread 0 | ...    a pack: 16 bytes, 4 or 8 elements
//             fp32 sum of a pack -> fp64 sum of a thread -> fp64 sum of the block -> partials[chunk]
//
// The block that finishes last adds all partials in the order of the chunks, whatever block wrote them, so that the
// same gradients give the same bits.
#include "../formulas/unscale.h"
#include "grid.cuh"

namespace amp_kernels::cuda {
namespace {

// fp64 runs at 1/64 of the fp32 rate on consumer GPUs: squares are added in fp32 within a pack and in fp64
// between packs, one fp64 addition for 16 bytes, which stays hidden behind memory on all of them. Four or
// eight additions in fp32 keep the norm within 1e-6 even when every rounding goes the same way.
template <class T, int kPack, bool kRescales>
__device__ double sum_of_squares(const T* x, int64_t n, float scale) {
  const bool aligned = is_aligned16(x);
  double sum = 0.0;
  const int64_t whole = n / kPack;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < whole; i += kThreads) {
    const Vector<float, kPack> v = load_pack<kPack>(x + i * kPack, aligned);
    float pack_sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float element = kRescales ? v.data[k] * scale : v.data[k];
      pack_sum += element * element;
    }
    sum += pack_sum;
  }
  const int64_t rest = whole * kPack + threadIdx.x;
  if (rest < n) {
    const double element = static_cast<double>(to_float(x[rest])) * (kRescales ? scale : 1.0f);
    sum += element * element;
  }
  return sum;
}

template <class T, int kPack>
__device__ void multiply(T* x, float factor, int64_t n) {
  const bool aligned = is_aligned16(x);
  const int64_t whole = n / kPack;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < whole; i += kThreads) {
    Vector<float, kPack> v = load_pack<kPack>(x + i * kPack, aligned);
#pragma unroll
    for (int k = 0; k < kPack; ++k) v.data[k] *= factor;
    store_pack<kPack>(x + i * kPack, v.data, aligned);
  }
  const int64_t rest = whole * kPack + threadIdx.x;
  if (rest < n) x[rest] = from_float<T>(to_float(x[rest]) * factor);
}

template <class T>
__device__ double unscale_chunk(const GradientPass& pass, const Chunk& chunk, float factor, double* shared) {
  constexpr int kPack = 16 / sizeof(T);
  T* grad = chunk.in<T>(pass.table, kGrad);
  if (grad == nullptr) return 0.0;
  double sum = block_sum(sum_of_squares<T, kPack, false>(grad, chunk.size, 1.0f), shared);
  if (!fast_sum_is_exact(sum)) {
    const float scale = rescue_scale(sum);
    sum = block_sum(sum_of_squares<T, kPack, true>(grad, chunk.size, scale), shared);
    sum /= static_cast<double>(scale) * scale;
  }
  // block_sum ends with a barrier: the sums have read what other threads now overwrite.
  if (pass.write) multiply<T, kPack>(grad, factor, chunk.size);
  return sum;
}

__device__ void finish_pass(const GradientPass& pass, float factor, double* shared) {
  double sum = 0.0;
  int64_t first_bad = INT64_MAX;
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

__global__ void __launch_bounds__(kThreads) unscale_kernel(const GradientPass pass) {
  double* shared = reinterpret_cast<double*>(shared_memory());
  const float factor = unscale_factor(pass);
  for (int64_t c = blockIdx.x; c < pass.table.chunk_count; c += gridDim.x) {
    const Chunk chunk(pass.table, c);
    double sum;
    switch (pass.table.at(kGradDtype, chunk.tensor)) {
      case kHalf:
        sum = unscale_chunk<__half>(pass, chunk, factor, shared);
        break;
      case kBFloat16:
        sum = unscale_chunk<__nv_bfloat16>(pass, chunk, factor, shared);
        break;
      default:
        sum = unscale_chunk<float>(pass, chunk, factor, shared);
    }
    if (threadIdx.x == 0) pass.partials[c] = sum;
  }
  if (is_last_block(reinterpret_cast<unsigned*>(&pass.record->ticket))) finish_pass(pass, factor, shared);
}

}  // namespace

void launch_unscale(const GradientPass& pass, Stream stream) {
  launch_over_chunks(unscale_kernel, 32 * sizeof(double), pass, stream);
}

}  // namespace amp_kernels::cuda
