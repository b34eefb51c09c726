// The launch shape that all kernels share, and how a block walks the chunks of a table.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "portable.h"

namespace amp_kernels::cuda {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;  // 2048 threads fill a multiprocessor of sm_80 and sm_90

// How many blocks of a kernel run at a time. Loads the kernel, which a graph capture may not do.
template <class Kernel>
int64_t blocks_at_a_time(Kernel* kernel, size_t shared_bytes) {
  return static_cast<int64_t>(multiprocessor_count()) * resident_blocks(kernel, kThreads, shared_bytes);
}

// Blocks walk the chunks of a table with a stride, at most as many as run at a time: more would be a second wave, of
// which a part of the multiprocessors has nothing to do. No more than go round evenly: of 396 chunks and 264 blocks at
// a time 198 blocks take two each, for otherwise 132 would take two and 132 one.
template <class Kernel, class Pass>
void launch_over_chunks(Kernel* kernel, size_t shared_bytes, const Pass& pass, Stream stream) {
  const int64_t chunks = std::max<int64_t>(1, pass.table.chunk_count), most = blocks_at_a_time(kernel, shared_bytes);
  const int64_t rounds = (chunks + most - 1) / most;
  launch(kernel, static_cast<unsigned>((chunks + rounds - 1) / rounds), kThreads, shared_bytes, stream, pass);
}

// How elements are divided: aligned packs of neighbours, and the others beside them. These are less than a pack before
// and behind all packs of a tensor, if its chunks take packs as they lie, and begin and end where they do:
//
//   tensor:  | head | pack | pack | ... | pack | pack | ... | pack | tail |
//            | chunk 0 ..................| chunk 1 ...................... |
template <int kPack>
struct Division {
  int lead;   // others before the packs
  int first;  // element of the first pack
  int packs;
  int others;

  // Of a chunk whose first element by the table stands at place `phase` of an aligned pack; `begin` elements of its
  // tensor are before it, `rest` from it on.
  __device__ __forceinline__ Division(int64_t begin, int64_t rest, int64_t chunk_size, int phase)
      : first(-phase & (kPack - 1)) {
    const int64_t next = chunk_size + first;  // where the next chunk begins
    const int end = static_cast<int>(next < rest ? next : rest);
    lead = begin > 0 ? 0 : first < end ? first : end;
    packs = first < end ? (end - first) / kPack : 0;
    others = lead + (first < end ? end - first - packs * kPack : 0);
  }

  // The element that is the k-th of the others.
  __device__ __forceinline__ int other(int k) const { return k < lead ? k : k - lead + first + packs * kPack; }
};

// Every gridDim.x-th chunk of a table, from the first or (kBackwards) from the last one on.
//
// What a block has to know of a chunk is three loads deep: its entry names a tensor, the tensor's column holds
// addresses, and they lead to the elements. A header is the entry, the column's first kRows rows and a count. It lies
// in shared memory; thread r fetches row r of the next one while this chunk is worked on:
//
//   chunk c:   [ elements of c;  header of c + 1 to registers;  tensor of c + 2 ]  [ header of c + 1 to shared memory ]
//
// Nothing but publish() may look at what was fetched, not even to widen a number: it would wait.
template <int kRows, bool kBackwards>
class ChunkWalk {
 public:
  static constexpr int kWords = kRows + 2;

  // `counts` are one for each chunk, or nullptr; `shared` is for kWords words. All threads of the block call. No kernel
  // passes counts. They stay because nvcc 13.0, without this load, asks for 32 bytes in place of 64 before it waits, in
  // one of the three loops of unscale_kernel (tests/gpu_static/test_bytes_in_flight.py).
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
  __device__ int64_t begin() const { return (header_[kRows] >> 32) * table_.chunk_size; }
  __device__ int64_t rest() const { return row(kNumel) - begin(); }  // elements of the tensor from `begin` on

  // By packs as they lie in the tensor.
  template <int kPack>
  __device__ Division<kPack> divide(int phase) const {
    return {begin(), rest(), table_.chunk_size, phase};
  }

  // First element of the chunk in an array of the table; nullptr where the tensor has no such array.
  template <class T>
  __device__ T* in(int row) const {
    const int64_t address = header_[row];
    return address == 0 ? nullptr : reinterpret_cast<T*>(address) + begin();
  }

 private:
  __device__ int index_of(int at) const { return kBackwards ? static_cast<int>(table_.chunk_count) - 1 - at : at; }
  __device__ const int32_t* entry(int at) const { return table_.chunks + 2 * static_cast<int64_t>(index_of(at)); }

  // Only the threads that fetch look up and fetch: of a number that all have nvcc makes a uniform register, and waits.
  __device__ bool fetches(int at) const { return threadIdx.x < kWords && at < table_.chunk_count; }

  __device__ void look_up(int at) {
    if (fetches(at)) tensor_ = entry(at)[0];
  }

  // Of a chunk that was looked up; and looks up the one after it.
  __device__ void fetch(int at) {
    if (!fetches(at)) return;
    const int word = static_cast<int>(threadIdx.x);
    const int64_t* const from =
        word < kRows ? table_.data + word * table_.tensors + tensor_ : reinterpret_cast<const int64_t*>(entry(at));
    word_ = *from;
    if (counts_ != nullptr && word == kRows + 1) count_ = counts_[index_of(at)];
    look_up(at + gridDim.x);
  }

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
  int tensor_ = 0;    // of the chunk behind the one that is fetched
  int64_t word_ = 0;  // of the next header
  int count_ = 0;
};

template <class T, int N>
__device__ __forceinline__ Vector<float, N> floats(const Vector<T, N>& elements) {
  Vector<float, N> values;
#pragma unroll
  for (int j = 0; j < N; ++j) values.data[j] = to_float(elements.data[j]);
  return values;
}

// The grid of a launch: beyond what CUDA takes, an error instead of a part of the work.
inline unsigned blocks(int64_t count) {
  if (count > INT32_MAX) throw std::invalid_argument("amp_kernels: " + std::to_string(count) + " blocks are too many");
  return static_cast<unsigned>(count);
}

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

template <class F>
void with_16_bits(Dtype dtype, const F& f) {
  if (dtype == kHalf) return f(__half{});
  f(__nv_bfloat16{});
}

}  // namespace amp_kernels::cuda
