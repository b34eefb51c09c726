// The arguments of every kernel: a table of tensors, a list of chunks, and a few device scalars.
//
// The table is int64 [rows, tensors]. Sizes, dtypes and groups come first: an optimizer keeps these rows on the device,
// next to the chunks that follow from them, and sends the rows of addresses at every step. Addresses point at dense
// memory, which is walked in storage order, and are aligned to their element only.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(AMP_KERNELS_CUDA_ON_CPU)
#define AMP_KERNELS_HD __host__ __device__ __forceinline__
#else
#define AMP_KERNELS_HD inline
#endif

namespace amp_kernels {

// kMaster: of a 16-bit parameter an fp32 master, or the remainder of one (formulas/remainder.h). Of an fp32 parameter
// nothing, or where its 16-bit gradient is a weight (an average follows it) the remainder of that. kStep: an int32
// count of the updates so far, read by every chunk of the tensor and raised once all have read it. kState + i is the
// i-th state; a table may end after the states that every tensor has.
enum Row { kNumel, kGradDtype, kGroup, kGrad, kParam, kMaster, kStep, kState };

enum Dtype { kFloat, kHalf, kBFloat16 };

constexpr int kHyperColumns = 8;

struct Table {
  const int64_t* data;
  int64_t tensors;
  const int32_t* chunks;  // [chunk_count, 2]: tensor, index of the chunk within it; every tensor has a chunk 0
  int64_t chunk_count;
  int64_t chunk_size;  // elements, at most 65536; a multiple of 128, so every chunk is as aligned as its tensor

  AMP_KERNELS_HD int64_t at(int row, int64_t tensor) const { return data[row * tensors + tensor]; }
};

// One chunk: elements [begin, begin + size) of a tensor.
struct Chunk {
  int64_t tensor;
  int64_t begin;
  int64_t size;

  AMP_KERNELS_HD Chunk(const Table& table, int64_t index)
      : tensor(table.chunks[2 * index]), begin(table.chunks[2 * index + 1] * table.chunk_size) {
    const int64_t rest = table.at(kNumel, tensor) - begin;
    size = rest < table.chunk_size ? rest : table.chunk_size;
  }

  // First element of the chunk in an array of the table; nullptr where the tensor has no such array.
  template <class T>
  AMP_KERNELS_HD T* in(const Table& table, int row) const {
    const int64_t address = table.at(row, tensor);
    return address == 0 ? nullptr : reinterpret_cast<T*>(address) + begin;
  }
};

// The count of updates of a tensor (row kStep). Unsigned, so that a count beyond 2^31 is a number too.
AMP_KERNELS_HD uint32_t& step_of(const Table& table, int64_t tensor) {
  return *reinterpret_cast<uint32_t*>(table.at(kStep, tensor));
}

// What the gradient pass leaves for the host to read whenever it likes.
struct Record {
  int64_t ticket;  // blocks done, of this pass or of an update that shares the record; 0 between launches
  int64_t passes;
  int64_t overflow_pass;    // the last pass that met a NaN or inf
  int64_t overflow_tensor;  // and the first tensor that held one
};

struct GradientPass {
  Table table;
  const float* scale;  // nullptr: factor 1
  bool divide;
  bool write;
  bool clear;
  double* partials;  // one per chunk: its sum of squares, finite iff its elements are
  float* found_inf;
  float* norm;
  Record* record;
};

// What the kernel of an update is compiled for.
struct Form {
  Dtype param_dtype;
  bool split;  // whether row kMaster holds remainders
  Dtype grad_dtype;
  int32_t states;  // bit k: some tensor has the k-th state
};

struct Update {
  Table table;
  int32_t* ticket;     // blocks done, on a GPU; 0 between launches
  const float* hyper;  // [groups, kHyperColumns]
  const int64_t* lr;   // [groups]: addresses, so that a tensor lr stays live
  const float* grad_scale;
  const float* found_inf;
  const float* grad_norm;
  float max_norm;
  Form form;
};

// Counts an update of the tensor whose first chunk this is, if it has a gradient.
AMP_KERNELS_HD void raise_step(const Table& table, int64_t chunk) {
  if (table.chunks[2 * chunk + 1] != 0) return;
  const int64_t tensor = table.chunks[2 * chunk];
  if (table.at(kGrad, tensor) != 0) ++step_of(table, tensor);
}

}  // namespace amp_kernels
