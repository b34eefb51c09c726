// Small kernels, right and wrong ones, on which test_emulator.py tries the emulator itself.
#include <map>
#include <string>

#include "../../../csrc/cuda/int8_codes.cuh"
#include "../../../csrc/cuda/tensor_cores.cuh"

namespace amp_kernels {
namespace {

using Kernel = void (*)(const double* in, double* out);

__device__ double* shared_doubles() { return reinterpret_cast<double*>(shared_memory()); }

__global__ void sum(const double* in, double* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = block_sum(in[i], shared_doubles());
}

__global__ void min_and_sum(const double* in, double* out) {  // two reductions in a row share their memory
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const double low = block_min(in[i], 1e300, shared_doubles());
  out[i] = block_sum(in[i] - low, shared_doubles());
}

// block_sum without the barrier that lets it use its memory again: warps run ahead into the second reduction.
__device__ double hasty_sum(double value, double* shared) {
  for (int mask = 16; mask > 0; mask /= 2) value += warp_shuffle_xor(value, mask);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  barrier();
  value = 0.0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) value += shared[w];
  return value;
}

__global__ void hasty_sums(const double* in, double* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = hasty_sum(in[i], shared_doubles());
  out[i] = hasty_sum(in[i] * 2, shared_doubles()) - out[i];
}

template <bool kBarrier>
__global__ void rotate(const double* in, double* out) {
  double* shared = shared_doubles();
  shared[threadIdx.x] = in[threadIdx.x];
  if (kBarrier) barrier();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

// A shuffle makes the lanes of a warp wait for each other, and orders no memory.
__global__ void neighbours_through_shared_memory(const double* in, double* out) {
  double* shared = shared_doubles();
  shared[threadIdx.x] = in[threadIdx.x];
  warp_shuffle_xor(0, 1);
  out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

__global__ void read_unwritten(const double*, double* out) { out[threadIdx.x] = shared_doubles()[threadIdx.x]; }

__global__ void write_past_the_end(const double*, double*) { shared_doubles()[blockDim.x] = 0.0; }

__global__ void read_past_the_end(const double*, double* out) { out[threadIdx.x] = shared_doubles()[threadIdx.x + 1]; }

__global__ void load_misaligned_pack(const double* in, double* out) {
  const float* odd = reinterpret_cast<const float*>(in) + 1;
  out[0] = load_wide<4>(odd).unpacked().data[0];
}

__global__ void store_misaligned_pack(const double*, double* out) {
  store_wide(reinterpret_cast<float*>(out) + 1, Vector<float, 4>{});
}

__global__ void half_of_the_block_at_a_barrier(const double*, double*) {
  if (threadIdx.x < blockDim.x / 2) barrier();
}

__global__ void early_exit(const double*, double* out) {
  if (threadIdx.x == 7) return;
  barrier();
  out[threadIdx.x] = 1.0;
}

__global__ void two_kinds_of_barrier(const double*, double*) {
  if (threadIdx.x % 2 == 0) {
    barrier();
  } else {
    block_any(true);
  }
}

__global__ void any(const double* in, double* out) {
  out[threadIdx.x] = block_any(in[threadIdx.x] > 0) + 2 * block_any(in[threadIdx.x] > 1e9);
}

__global__ void divergent_shuffle(const double* in, double* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = warp_shuffle_xor(in[threadIdx.x], 1);
}

__global__ void shuffle_after_different_paths(const double* in, double* out) {
  double value = in[threadIdx.x];
  // The two halves of a warp shuffle among themselves, a different number of times, and then together.
  const unsigned half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  const int times = threadIdx.x % 32 < 16 ? 1 : 3;
  for (int i = 0; i < times; ++i) value = __shfl_xor_sync(half, value, 1);
  out[threadIdx.x] = warp_shuffle_xor(value, 16);
}

__global__ void shuffle_from_an_unnamed_lane(const double* in, double* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, in[threadIdx.x], 16);
}

// is_last_block() of csrc/cuda/portable.h (kBoth), without one of its fences, and with the second fence behind the
// barrier, by all threads (kSecondLate).
enum class Fences { kBoth, kOnlySecond, kOnlyFirst, kSecondLate };
template <Fences kFences>
__device__ bool is_last(unsigned* counter) {
  if (kFences == Fences::kBoth) return is_last_block(counter);
  bool last = false;
  if (threadIdx.x == 0) {
    if (kFences != Fences::kOnlySecond) device_fence();
    last = ticket(counter) == gridDim.x - 1;
    if (kFences == Fences::kOnlySecond) device_fence();
    if (last) *counter = 0;
  }
  last = block_any(last);
  if (kFences == Fences::kSecondLate) device_fence();
  return last;
}

template <Fences kFences>
__global__ void last_block(const double* in, double* out) {
  // out[0 .. grid): partial sums; out[grid]: total; out[grid + 1]: which block was last; out[grid + 2]: the
  // counter
  double* shared = shared_doubles();
  const double partial = block_sum(in[blockIdx.x * blockDim.x + threadIdx.x], shared);
  if (threadIdx.x == 0) out[blockIdx.x] = partial;
  if (!is_last<kFences>(reinterpret_cast<unsigned*>(out + gridDim.x + 2))) return;
  const double total = block_sum(threadIdx.x < gridDim.x ? out[threadIdx.x] : 0.0, shared);
  if (threadIdx.x == 0) out[gridDim.x] = total;
  if (threadIdx.x == 0) out[gridDim.x + 1] = blockIdx.x;
}

// Each thread adds 1 to one of two words of shared memory, and reads the other one.
template <bool kBarrier>
__global__ void shared_counts(const double*, double* out) {
  auto* const words = reinterpret_cast<uint32_t*>(shared_memory());
  if (threadIdx.x < 2) words[threadIdx.x] = 0;
  barrier();
  add_atomically(words + threadIdx.x % 2, 1u);
  if (kBarrier) barrier();
  out[threadIdx.x] = words[1 - threadIdx.x % 2];
}

// ---------------------------------------------------------------------------- tensor cores and copies
// Codes a[16, 32] and then b[8, 32].
__global__ void codes_product(const double* in, double* out) {
  const char* const a = reinterpret_cast<const char*>(in);
  const char* const b = a + 16 * 32;
  char* const shared = shared_memory();
  for (int i = threadIdx.x; i < 24 * 2; i += 32) cuda::copy_async(shared + i * 16, a + i * 16, 16);
  cuda::commit_copies();
  cuda::wait_copies<0>();
  barrier();
  const unsigned lane = threadIdx.x;
  uint32_t a_words[4], b_words[2];
  cuda::load_matrices(a_words, shared + lane % 16 * 32 + lane / 16 * 16);
  for (int i = 0; i < 2; ++i) memcpy(&b_words[i], b + lane / 4 * 32 + i * 16 + lane % 4 * 4, 4);
  int c[4] = {1, 2, 3, 4};
  cuda::multiply_codes(c, a_words, b_words);
  for (int i = 0; i < 4; ++i) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i] - (i + 1);
}

__global__ void halves_product(const double* in, double* out) {
  const __half* const a = reinterpret_cast<const __half*>(in);  // [16, 16]
  const __half* const b = a + 256;                              // [8, 16]
  const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t a_words[4], b_words[2];
  for (unsigned i = 0; i < 4; ++i) memcpy(&a_words[i], a + (g + i % 2 * 8) * 16 + t * 2 + i / 2 * 8, 4);
  for (unsigned i = 0; i < 2; ++i) memcpy(&b_words[i], b + g * 16 + t * 2 + i * 8, 4);
  float c[4] = {};
  cuda::multiply_numbers<__half>(c, a_words, b_words);
  for (unsigned i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}

// The words of a warp's fragments, four of `a` and two of `b` a lane, and of its results. Where in a matrix each of
// them belongs, only the test says, which has it from the PTX ISA.
__device__ const uint32_t* words_of_lane(const double* in) {
  return reinterpret_cast<const uint32_t*>(in) + 6 * threadIdx.x;
}

template <class T>
__global__ void numbers_as_given(const double* in, double* out) {
  const uint32_t* const w = words_of_lane(in);
  float c[4] = {};
  cuda::multiply_numbers<T>(c, {w[0], w[1], w[2], w[3]}, {w[4], w[5]});
  memcpy(reinterpret_cast<float*>(out) + 4 * threadIdx.x, c, sizeof(c));
}

__global__ void codes_as_given(const double* in, double* out) {
  const uint32_t* const w = words_of_lane(in);
  int c[4] = {};
  cuda::multiply_codes(c, {w[0], w[1], w[2], w[3]}, {w[4], w[5]});
  memcpy(reinterpret_cast<int*>(out) + 4 * threadIdx.x, c, sizeof(c));
}

// Lane i names row i of four matrices of 8 rows of 16 bytes.
template <bool kTransposed>
__global__ void matrices_as_given(const double* in, double* out) {
  char* const row = shared_memory() + 16 * threadIdx.x;
  memcpy(row, reinterpret_cast<const char*>(in) + 16 * threadIdx.x, 16);
  barrier();
  uint32_t words[4];
  kTransposed ? cuda::load_transposed(words, row) : cuda::load_matrices(words, row);
  memcpy(reinterpret_cast<uint32_t*>(out) + 4 * threadIdx.x, words, sizeof(words));
}

// ----------------------------------------------------------------------- what lanes do with shared memory
template <int kApart>
__global__ void words_apart(const double*, double* out) {
  out[threadIdx.x] = reinterpret_cast<const uint32_t*>(shared_memory())[kApart * threadIdx.x];
}

template <int kApart>
__global__ void atomics_apart(const double*, double*) {
  add_atomically(reinterpret_cast<uint32_t*>(shared_memory()) + kApart * threadIdx.x, 1u);
}

__global__ void packs_side_by_side(const double*, double* out) {
  reinterpret_cast<int4*>(out)[threadIdx.x] = reinterpret_cast<const int4*>(shared_memory())[threadIdx.x];
}

template <int kApart, int kFirst = 0>
__global__ void matrix_rows_apart(const double*, double* out) {
  uint32_t words[4];
  cuda::load_matrices(words, shared_memory() + kFirst + kApart * threadIdx.x);
  out[threadIdx.x] = words[0];
}

__global__ void matrix_rows_of_a_tensor(const double* in, double* out) {
  uint32_t words[4];
  cuda::load_matrices(words, reinterpret_cast<const char*>(in));
  out[threadIdx.x] = words[0];
}

__global__ void half_of_a_warp_at_an_mma(const double*, double*) {
  int c[4] = {};
  if (threadIdx.x < 16) cuda::multiply_codes(c, {0, 0, 0, 0}, {0, 0});
}

// Two stages of two numbers a thread: kWait groups may be missing when the first stage is read, and only with kKeep
// that is done before it is filled again.
template <int kWait, bool kKeep>
__global__ void staged_copies(const double* in, double* out) {
  double* const shared = shared_doubles();
  const unsigned i = 2 * threadIdx.x, n = 2 * blockDim.x;
  const auto copy = [&](unsigned stage, unsigned from) {
    cuda::copy_async(reinterpret_cast<char*>(shared + stage * n + i), reinterpret_cast<const char*>(in + from + i), 16);
    cuda::commit_copies();
  };
  copy(0, 0);
  copy(1, n);
  cuda::wait_copies<kWait>();
  barrier();
  double first = 0.0;
  if (kKeep) first = shared[(i + 2) % n];
  barrier();
  copy(0, n);
  if (!kKeep) first = shared[(i + 2) % n];
  out[threadIdx.x] = first;
  cuda::wait_copies<0>();
}

__global__ void short_copy(const double* in, double* out) {
  cuda::copy_async(reinterpret_cast<char*>(shared_doubles() + 2 * threadIdx.x),
                   reinterpret_cast<const char*>(in + 2 * threadIdx.x), threadIdx.x % 2 == 0 ? 8 : 0);
  cuda::commit_copies();
  cuda::wait_copies<0>();
  barrier();
  for (unsigned i = 0; i < 2; ++i) out[2 * threadIdx.x + i] = shared_doubles()[2 * threadIdx.x + i];
}

__global__ void misaligned_copy(const double* in, double*) {
  cuda::copy_async(shared_memory(), reinterpret_cast<const char*>(in) + 8, 16);
}

// The random numbers of eight neighbours: in[0] is the index of the first, in[1] the seed.
__global__ void noise(const double* in, double* out) {
  float numbers[8];
  cuda::neighbours_noise(numbers, static_cast<uint64_t>(in[0]), static_cast<uint64_t>(in[1]));
  for (int k = 0; k < 8; ++k) out[k] = numbers[k];
}

template <class T>
__global__ void double_packs(const double* in, double* out) {
  const T* const from = reinterpret_cast<const T*>(in) + 8 * threadIdx.x;
  T* const to = reinterpret_cast<T*>(out) + 8 * threadIdx.x;
  Vector<T, 8> pack = is_aligned16(in) ? load_wide<8>(from).unpacked() : load_elements<8>(from);
  for (int i = 0; i < 8; ++i) pack.data[i] = from_float<T>(2 * to_float(pack.data[i]));
  is_aligned16(out) ? store_wide(to, pack) : store_elements(to, pack);
}

const std::map<std::string, Kernel> kKernels = {
    {"sum", sum},
    {"min_and_sum", min_and_sum},
    {"hasty_sums", hasty_sums},
    {"rotate", rotate<true>},
    {"rotate_without_barrier", rotate<false>},
    {"read_unwritten", read_unwritten},
    {"write_past_the_end", write_past_the_end},
    {"read_past_the_end", read_past_the_end},
    {"load_misaligned_pack", load_misaligned_pack},
    {"store_misaligned_pack", store_misaligned_pack},
    {"half_of_the_block_at_a_barrier", half_of_the_block_at_a_barrier},
    {"early_exit", early_exit},
    {"two_kinds_of_barrier", two_kinds_of_barrier},
    {"any", any},
    {"divergent_shuffle", divergent_shuffle},
    {"shuffle_after_different_paths", shuffle_after_different_paths},
    {"shuffle_from_an_unnamed_lane", shuffle_from_an_unnamed_lane},
    {"last_block", last_block<Fences::kBoth>},
    {"last_block_without_the_first_fence", last_block<Fences::kOnlySecond>},
    {"last_block_without_the_second_fence", last_block<Fences::kOnlyFirst>},
    {"last_block_with_a_late_fence", last_block<Fences::kSecondLate>},
    {"shared_counts", shared_counts<true>},
    {"shared_counts_without_barrier", shared_counts<false>},
    {"neighbours_through_shared_memory", neighbours_through_shared_memory},
    {"codes_product", codes_product},
    {"halves_product", halves_product},
    {"half_of_a_warp_at_an_mma", half_of_a_warp_at_an_mma},
    {"halves_as_given", numbers_as_given<__half>},
    {"bfloat16s_as_given", numbers_as_given<__nv_bfloat16>},
    {"codes_as_given", codes_as_given},
    {"matrices_as_given", matrices_as_given<false>},
    {"transposed_as_given", matrices_as_given<true>},
    {"words_1_apart", words_apart<1>},
    {"words_2_apart", words_apart<2>},
    {"words_32_apart", words_apart<32>},
    {"words_33_apart", words_apart<33>},
    {"one_word", words_apart<0>},
    {"atomics_1_apart", atomics_apart<1>},
    {"atomics_32_apart", atomics_apart<32>},
    {"atomics_on_one_word", atomics_apart<0>},
    {"packs", packs_side_by_side},
    {"matrix_rows_16_apart", matrix_rows_apart<16>},
    {"matrix_rows_32_apart", matrix_rows_apart<32>},
    {"matrix_rows_128_apart", matrix_rows_apart<128>},
    {"matrix_rows_at_odd_places", matrix_rows_apart<0, 8>},
    {"matrix_rows_past_the_end", matrix_rows_apart<0, 2048>},
    {"matrix_rows_of_a_tensor", matrix_rows_of_a_tensor},
    {"staged_copies", staged_copies<1, true>},
    {"staged_copies_without_wait", staged_copies<2, true>},
    {"staged_copies_into_what_is_read", staged_copies<1, false>},
    {"short_copy", short_copy},
    {"misaligned_copy", misaligned_copy},
    {"noise", noise},
    {"double_packs_float", double_packs<float>},
    {"double_packs_half", double_packs<__half>},
    {"double_packs_bfloat16", double_packs<__nv_bfloat16>},
};

}  // namespace
}  // namespace amp_kernels

extern "C" const char* run_case(const char* name, int order, unsigned seed, unsigned grid, unsigned block,
                                size_t shared_bytes, const void* in, void* out) {
  static std::string message;
  emulator::set_order(static_cast<emulator::Order>(order), seed);
  try {
    amp_kernels::launch(amp_kernels::kKernels.at(name), grid, block, shared_bytes, nullptr,
                        static_cast<const double*>(in), static_cast<double*>(out));
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
