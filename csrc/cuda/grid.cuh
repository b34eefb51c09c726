// The launch over the chunks of a table (../table.h): the size of the grid, how a block walks its chunks, and how it
// divides a chunk among its threads.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "portable.h"

namespace amp_kernels::cuda {

constexpr int kThreads = 256;

// Returns how many blocks of a kernel run at a time on the device. The call loads the kernel, and loading fails during
// a graph capture.
template <class Kernel>
int64_t blocks_at_a_time(Kernel* kernel, size_t shared_bytes) {
  return static_cast<int64_t>(multiprocessor_count()) * resident_blocks(kernel, kThreads, shared_bytes);
}

// Block b takes the chunks b, b + gridDim.x, ... There are at most as many blocks as run at a time, because a second
// wave would leave a part of the multiprocessors idle. In one round each block takes one chunk. The grid is the
// smallest one that needs no more rounds than a grid of all blocks that run at a time. For example, if 264 blocks run
// at a time, 396 chunks take two rounds. 198 blocks are enough for two rounds, and each of them takes two chunks. If
// the grid had 264 blocks, 132 of them would take only one chunk.
template <class Kernel, class Pass>
void launch_over_chunks(Kernel* kernel, size_t shared_bytes, const Pass& pass, Stream stream) {
  const int64_t chunks = std::max<int64_t>(1, pass.table.chunk_count), most = blocks_at_a_time(kernel, shared_bytes);
  const int64_t rounds = (chunks + most - 1) / most;
  launch(kernel, static_cast<unsigned>((chunks + rounds - 1) / rounds), kThreads, shared_bytes, stream, pass);
}

// How the elements of a chunk are divided among threads. A pack is kPack neighbouring elements that a thread accesses
// together. It is aligned to its own size. In the table, chunk c of a tensor begins at element c * chunk_size. In a
// Division, each chunk but the first begins where the next pack begins, 0 to kPack - 1 elements later. So only the head
// and the tail of a tensor lie outside of packs, and each has fewer than kPack elements:
//
//   tensor:  | head | pack | pack | ... | pack | pack | ... | pack | tail |
//            | chunk 0 ..................| chunk 1 ...................... |
template <int kPack>
struct Division {
  int lead;   // elements of the head, if this is the first chunk of its tensor; otherwise 0
  int first;  // the element at which the first pack begins
  int packs;
  int others;  // elements outside of packs: those of the head and of the tail

  // Positions in this struct are counted from element `begin` of the tensor, where the chunk begins according to the
  // table. `rest`: how many elements the tensor has from element `begin` on. `phase`: the position of element `begin`
  // in its aligned pack, 0 to kPack - 1.
  __device__ __forceinline__ Division(int64_t begin, int64_t rest, int64_t chunk_size, int phase)
      : first(-phase & (kPack - 1)) {
    const int64_t next = chunk_size + first;  // where the next chunk begins
    const int end = static_cast<int>(next < rest ? next : rest);
    lead = begin > 0 ? 0 : first < end ? first : end;
    packs = first < end ? (end - first) / kPack : 0;
    others = lead + (first < end ? end - first - packs * kPack : 0);
  }

  // The k-th element outside of packs.
  __device__ __forceinline__ int other(int k) const { return k < lead ? k : k - lead + first + packs * kPack; }
};

// The walk of a block over its chunks. Block b takes the chunks b, b + gridDim.x, ... of a table. If kBackwards, chunks
// are counted from the last one back.
//
// Three loads depend on each other: the entry of a chunk names its tensor, the tensor's column of the table holds
// addresses, and the elements are at these addresses. To hide the latency, a block loads ahead. The header of a chunk
// is the first kRows rows of the tensor's column, the entry of the chunk, and a count (see the constructor). While the
// block works on a chunk, the header of this chunk lies in shared memory, and thread r loads word r of the next header.
// Here c, c + 1, c + 2 are chunks that the block takes one after the other:
//
//   while it works on c:   header of c + 1 -> registers (word_, count_);  tensor of c + 2 -> a register (tensor_)
//   advance():             header of c + 1 -> shared memory
//
// Do not read word_, tensor_ or count_ before publish(), because any use waits for the load. Even a conversion to a
// wider type is such a use.
template <int kRows, bool kBackwards>
class ChunkWalk {
 public:
  static constexpr int kWords = kRows + 2;

  // All threads of the block must call the constructor. `shared`: room for kWords words of 8 bytes. `counts`: a count
  // for each chunk, or nullptr.
  //
  // Every kernel passes nullptr for `counts`. The parameter and its load stay because of nvcc 13.0. Without them, a
  // thread in one of the three loops of unscale_kernel loads only 32 bytes, not 64, before it waits
  // (tests/gpu_static/test_bytes_in_flight.py).
  __device__ ChunkWalk(const Table& table, const int32_t* counts, int64_t* shared)
      : table_(table), counts_(counts), header_(shared), at_(static_cast<int>(blockIdx.x)) {
    if (!has_chunk()) return;
    look_up(at_);
    fetch(at_);
    publish();
  }

  __device__ bool has_chunk() const { return at_ < table_.chunk_count; }

  __device__ void advance() {
    at_ += gridDim.x;
    if (!has_chunk()) return;
    barrier();  // every thread has read the header that is overwritten now
    publish();
  }

  __device__ int index() const { return index_of(at_); }
  __device__ int64_t row(int row) const { return header_[row]; }
  __device__ int32_t count() const { return static_cast<int32_t>(header_[kRows + 1]); }
  __device__ int64_t tensor() const { return header_[kRows] & 0xffffffff; }  // the column of the table
  __device__ int64_t begin() const { return (header_[kRows] >> 32) * table_.chunk_size; }
  __device__ int64_t rest() const { return row(kNumel) - begin(); }  // elements of the tensor from `begin` on

  // Divides the chunk into packs. `phase` is the argument of Division.
  template <int kPack>
  __device__ Division<kPack> divide(int phase) const {
    return {begin(), rest(), table_.chunk_size, phase};
  }

  // A pointer to element begin() of the tensor, in the array whose address is in this row of the header. It is nullptr
  // if the tensor has no such array.
  template <class T>
  __device__ T* in(int row) const {
    const int64_t address = header_[row];
    return address == 0 ? nullptr : reinterpret_cast<T*>(address) + begin();
  }

 private:
  __device__ int index_of(int at) const { return kBackwards ? static_cast<int>(table_.chunk_count) - 1 - at : at; }
  __device__ const int32_t* entry(int at) const { return table_.chunks + 2 * static_cast<int64_t>(index_of(at)); }

  // Only threads that need a value load it. If all threads loaded it, nvcc would put it into a uniform register and
  // wait for it.
  __device__ bool fetches(int at) const { return threadIdx.x < kWords && at < table_.chunk_count; }

  // Loads the index of a chunk's tensor.
  __device__ void look_up(int at) {
    if (fetches(at)) tensor_ = entry(at)[0];
  }

  // Loads the header of a chunk. look_up() must have been called for this chunk before. Then calls look_up() for the
  // next chunk of the block.
  __device__ void fetch(int at) {
    if (!fetches(at)) return;
    const int word = static_cast<int>(threadIdx.x);
    const int64_t* const from =
        word < kRows ? table_.data + word * table_.tensors + tensor_ : reinterpret_cast<const int64_t*>(entry(at));
    word_ = *from;
    if (counts_ != nullptr && word == kRows + 1) count_ = counts_[index_of(at)];
    look_up(at + gridDim.x);
  }

  // Writes the loaded header to shared memory, and starts to load the next one.
  __device__ void publish() {
    if (threadIdx.x <= kRows) header_[threadIdx.x] = word_;
    if (threadIdx.x == kRows + 1) header_[kRows + 1] = count_;
    barrier();
    fetch(at_ + gridDim.x);
  }

  const Table& table_;
  const int32_t* counts_;
  int64_t* header_;
  int at_;
  int tensor_ = 0;    // the index of the tensor of the chunk after the next
  int64_t word_ = 0;  // this thread's word of the next header
  int count_ = 0;     // the count of the next chunk
};

template <class T, int N>
__device__ __forceinline__ Vector<float, N> floats(const Vector<T, N>& elements) {
  Vector<float, N> values;
#pragma unroll
  for (int j = 0; j < N; ++j) values.data[j] = to_float(elements.data[j]);
  return values;
}

// Returns `count` as the size of a grid. Throws if CUDA does not take that many blocks, because a truncated count would
// launch only a part of them.
inline unsigned blocks(int64_t count) {
  if (count > INT32_MAX)
    throw std::invalid_argument("amp_kernels: a launch must have at most 2^31 - 1 blocks, got " +
                                std::to_string(count));
  return static_cast<unsigned>(count);
}

// Calls f with a zero of the type that `dtype` stands for.
template <class F>
void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case kHalf:
      return f(__half{});
    case kBFloat16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

// Calls f as with_dtype does. `dtype` must be fp16 or bf16.
template <class F>
void with_16_bits(Dtype dtype, const F& f) {
  if (dtype == kHalf) return f(__half{});
  f(__nv_bfloat16{});
}

}  // namespace amp_kernels::cuda
