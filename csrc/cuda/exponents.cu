// Counts of exponents, one launch for any mix of dtypes (amp_kernels/reference/exponents.py). For each tensor t:
//   counts[t][e]   += number of elements that are not 0 and whose biased fp32 exponent is e
//   counts[t][256] += number of zeros
//   largest[t]      = max(largest[t], largest finite |x|)
//   squares[t]     += sum of x^2
//
// Bytes per element: 4 (fp32) or 2 (fp16, bf16) are read.
//
// A block takes every gridDim.x-th chunk of the table. A thread takes packs of 16 bytes (4 or 8 elements), four at a
// time, and starts the loads of all four before it uses one:
//
//   chunk:  | head | pack of thread 0 | thread 1 | ... | thread 255 | thread 0 | ... | tail |
//
// The elements of head and tail, less than a pack each, go one by one to the threads of the last warp.
//
// The counts of a chunk are in shared memory, in words of 32 bits. A word holds the counts of two exponents, 16 bits
// each. There is a word for each of the 32 lanes, which the eight warps share:
//
//            bank 0   bank 1         bank 31
//   row 0:   lane 0 | lane 1 | ... | lane 31      exponents 0 and 1
//   row 1:   lane 0 | lane 1 | ... | lane 31      exponents 2 and 3
//   ...
//   row 128: lane 0 | lane 1 | ... | lane 31      zeros
//
// So the lanes of a warp never wait for each other, even if all of them count the same exponent. A lane counts at most
// 65536 / 32 elements of a chunk, and a few of head and tail, so 16 bits are enough. After the chunk, thread r adds up
// row r. It starts with lane r % 32, so that the threads of a warp read different banks. Sums that are not 0 are added
// to the counts in device memory.
//
// The counts and the largest magnitude are integers, so they do not depend on the order of the blocks. The sums of
// squares of the chunks are added by the block that ends last, in an order that depends only on their number. So the
// same tensors, with the same alignment to 16 bytes, give the same bits on the same GPU.
#include "grid.cuh"
#include "squares.cuh"

namespace amp_kernels::cuda {
namespace {

constexpr int kPacks = 4;  // packs of 16 bytes that a thread loads at a time
// How many blocks of 256 threads a multiprocessor holds. The shared memory of sm_75 (64 KB) holds three.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kResidentBlocks = 3;
#else
constexpr int kResidentBlocks = 5;
#endif

using TensorWalk = ChunkWalk<kGrad + 1, /*kBackwards=*/false>;
constexpr int kReduced =
    32;  // 8-byte words of shared memory for reductions; then come the walk's header and the counts
constexpr int kZeroRow = kExponents / 2, kCountRows = kZeroRow + 1;
constexpr int kMostAlone = 8;  // a thread alone adds the sums of squares of a tensor with so many chunks

// Counts one element. `mine` is this lane's word of row 0. Returns the larger of `largest` and the bits of the
// element's magnitude, if the element is finite.
__device__ __forceinline__ int32_t count(uint32_t* mine, float x, int32_t largest) {
  int32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  bits &= 0x7fffffff;
  add_atomically(mine + (bits == 0 ? kZeroRow : bits >> 24) * 32, bits >> 23 & 1 ? 1u << 16 : 1u);
  return bits < 0x7f800000 && bits > largest ? bits : largest;
}

// Counts this thread's elements of a chunk, and raises `largest`. Returns the sum of their squares.
template <class T>
__device__ double count_chunk(const T* x, const TensorWalk& walk, uint32_t* mine, int32_t& largest) {
  constexpr int kPack = 16 / sizeof(T);
  assume_global(x);
  const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(x) / sizeof(T) % kPack);
  const Division<kPack> division = walk.divide<kPack>(phase);
  const int packs = division.packs;
  double sum = 0.0;
  if (const int k = (threadIdx.x + 32) % kThreads; k < division.others) {
    const T element = x[division.other(k)];
    sum = square(element);
    largest = count(mine, to_float(element), largest);
  }
  const T* const first = x + division.first;
  for (int k = threadIdx.x; k < packs; k += kPacks * kThreads) {
    Packed<T, kPack> packed[kPacks];
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      // If this pack is past the end, pack k is loaded a second time. unscale.cu explains why there is no branch.
      const int at = k + j * kThreads < packs ? k + j * kThreads : k;
      packed[j] = load_wide<kPack>(first + at * kPack);
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (j > 0 && k + j * kThreads >= packs) continue;
      const Vector<float, kPack> elements = floats(packed[j].unpacked());
      sum += sum_of_squares<T>(elements);
#pragma unroll
      for (int i = 0; i < kPack; ++i) largest = count(mine, elements.data[i], largest);
    }
  }
  return sum;
}

// Adds the counts in shared memory to a row of the results, and sets them to 0.
__device__ void move_counts(uint32_t* shared_counts, int64_t* counts) {
  const int row = threadIdx.x;
  if (row >= kCountRows) return;
  uint32_t even = 0, odd = 0;
#pragma unroll 8
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t& word = shared_counts[row * 32 + ((row - lane) & 31)];
    even += word & 0xffff;
    odd += word >> 16;
    word = 0;
  }
  if (even != 0) add_atomically(counts + 2 * row, static_cast<int64_t>(even));
  if (odd != 0) add_atomically(counts + 2 * row + 1, static_cast<int64_t>(odd));
}

// Returns the number of a tensor's chunks in the table, if chunk c is the first of them. Otherwise returns 0.
__device__ int64_t chunks_from(const Table& table, int64_t c) {
  if (c >= table.chunk_count) return 0;
  const int64_t tensor = table.chunks[2 * c];
  if (c > 0 && table.chunks[2 * (c - 1)] == tensor) return 0;
  return (table.at(kNumel, tensor) + table.chunk_size - 1) / table.chunk_size - table.chunks[2 * c + 1];
}

// Adds the partial sums of each tensor to its sum of squares. Only the last block calls it. A thread looks for the
// first chunk of a tensor, every 256th chunk. If the tensor has few chunks, the thread adds their sums alone. Otherwise
// its warp does.
__device__ void add_squares(const ExponentPass& pass) {
  const Table& table = pass.table;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t begin = threadIdx.x - lane; begin < table.chunk_count; begin += kThreads) {
    const int64_t own = begin + lane, chunks = chunks_from(table, own);
    if (chunks > 0 && chunks <= kMostAlone) {
      double sum = 0.0;
      for (int64_t c = own; c < own + chunks; ++c) sum += pass.partials[c];
      pass.squares[table.chunks[2 * own]] += sum;
    }
    uint32_t waiting = chunks > kMostAlone ? lane + 1 : 0;
    while (const uint32_t chosen = warp_max(waiting)) {
      const int64_t first = begin + chosen - 1, end = first + chunks_from(table, first);
      double sum = 0.0;
#pragma unroll 4
      for (int64_t c = first + lane; c < end; c += 32) sum += pass.partials[c];
      sum = lanes_reduce(sum, 32, Sum());
      if (waiting != chosen) continue;
      pass.squares[table.chunks[2 * first]] += sum;
      waiting = 0;
    }
  }
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks) exponents_kernel(const ExponentPass pass) {
  double* const shared = reinterpret_cast<double*>(shared_memory());
  auto* const counts = reinterpret_cast<uint32_t*>(shared + kReduced + TensorWalk::kWords);
  for (int i = threadIdx.x; i < kCountRows * 32; i += kThreads) counts[i] = 0;
  TensorWalk walk(pass.table, nullptr, reinterpret_cast<int64_t*>(shared + kReduced));
  for (; walk.has_chunk(); walk.advance()) {
    uint32_t* const mine = counts + threadIdx.x % 32;
    int32_t largest = 0;
    const auto count_chunk_of = [&](auto type) {
      return count_chunk(walk.in<const decltype(type)>(kGrad), walk, mine, largest);
    };
    double sum;
    switch (walk.row(kGradDtype)) {
      case kHalf:
        sum = count_chunk_of(__half{});
        break;
      case kBFloat16:
        sum = count_chunk_of(__nv_bfloat16{});
        break;
      default:
        sum = count_chunk_of(0.0f);
    }
    largest = static_cast<int32_t>(warp_max(largest));
    if (threadIdx.x % 32 == 0) raise_atomically(reinterpret_cast<int32_t*>(pass.largest + walk.tensor()), largest);
    sum = block_sum(sum, shared);  // its barriers are behind the counts of all threads
    if (threadIdx.x == 0) pass.partials[walk.index()] = sum;
    move_counts(counts, pass.counts + walk.tensor() * kExponentColumns);
  }
  if (is_last_block(reinterpret_cast<unsigned*>(&pass.record->ticket))) add_squares(pass);
}

constexpr size_t kSharedBytes = (kReduced + TensorWalk::kWords) * sizeof(double) + kCountRows * 32 * sizeof(uint32_t);

}  // namespace

int64_t load_exponents() { return blocks_at_a_time(exponents_kernel, kSharedBytes); }

void launch_exponents(const ExponentPass& pass, Stream stream) {
  launch_over_chunks(exponents_kernel, kSharedBytes, pass, stream);
}

}  // namespace amp_kernels::cuda
