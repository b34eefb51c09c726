// The arguments of the gradient pass and of the update: a table of tensors, a list of chunks, and a few device scalars.
//
//   table, int64:   tensor 0   tensor 1   tensor 2     A column for each tensor, a row for each property (enum Row).
//     kNumel          100000       5000         64     Address 0: the tensor has no such array.
//     kGradDtype           0          2          2
//     kGrad          address    address          0     A chunk is a range of at most `chunk_size` elements of one
//     ...                                              tensor; a block, or a thread of a CPU, takes one at a time.
//   chunks, int32:  (0, 0) (0, 1) ... (1, 0) (2, 0)    The entry of a chunk: its tensor, and its index in that tensor.
//
// Arrays are dense, and kernels walk them in storage order. An address is aligned to the element, not to more.
//
// The rows of sizes, dtypes and groups come first. An optimizer keeps them on the device together with the chunks,
// which depend on nothing else, and sends only the rows of addresses at every step.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(AMP_KERNELS_CUDA_ON_CPU)
#define AMP_KERNELS_HD __host__ __device__ __forceinline__  // for code that CPU and GPU kernels share
#else
#define AMP_KERNELS_HD inline
#endif

namespace amp_kernels {

// Row kMaster of a 16-bit parameter holds its fp32 master, or the remainders of a split master (formulas/remainder.h).
// For an fp32 parameter it holds nothing, except in `ema_`: there the parameter is an average, the gradient is the
// 16-bit weight that it follows, and kMaster holds the remainders of that weight.
// Row kStep is an int32 count of the updates so far. Every chunk of the tensor reads it; it is raised when all have.
// Row kState + i holds the i-th state. The table may end after the states that every tensor has.
enum Row { kNumel, kGradDtype, kGroup, kGrad, kParam, kMaster, kStep, kState };

enum Dtype { kFloat, kHalf, kBFloat16 };

constexpr int kHyperColumns = 8;

struct Table {
  const int64_t* data;
  int64_t tensors;
  const int32_t* chunks;  // [chunk_count, 2] entries; an optimizer's empty tensor has one too, which counts its updates
  int64_t chunk_count;
  int64_t chunk_size;  // elements, at most 65536; a multiple of 128, so that a chunk is aligned like its tensor

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

  // The first element of the chunk in the array of this row; nullptr if the tensor has no such array.
  template <class T>
  AMP_KERNELS_HD T* in(const Table& table, int row) const {
    const int64_t address = table.at(row, tensor);
    return address == 0 ? nullptr : reinterpret_cast<T*>(address) + begin;
  }
};

// The number of updates of a tensor (row kStep). Unsigned, so that it stays positive beyond 2^31.
AMP_KERNELS_HD uint32_t& step_of(const Table& table, int64_t tensor) {
  return *reinterpret_cast<uint32_t*>(table.at(kStep, tensor));
}

// Results of the gradient pass in device memory, which the host may read at any time.
struct Record {
  int64_t ticket;  // how many blocks of this pass, or of an update with the same record, have ended; 0 between launches
  int64_t passes;  // so far
  int64_t overflow_pass;    // the last pass that found a NaN or inf
  int64_t overflow_tensor;  // the first tensor with a NaN or inf in that pass
};

struct GradientPass {
  Table table;
  const float* scale;  // the factor is *scale, or with `divide` 1 / *scale; nullptr: 1
  bool divide;
  bool write;        // multiply the gradients by the factor
  bool clear;        // overwrite found_inf and update the record; otherwise found_inf is only ever set to 1
  double* partials;  // one per chunk: its sum of squares, finite iff its elements are
  float* found_inf;
  float* norm;
  Record* record;
};

// What an update kernel is compiled for, other than its formula. One launch updates the tensors of one form.
struct Form {
  Dtype param_dtype;
  bool split;  // row kMaster holds remainders
  Dtype grad_dtype;
  int32_t states;  // bit k: some tensor has the k-th state
};

struct Update {
  Table table;
  int32_t* ticket;     // on a GPU, how many blocks have ended; 0 between launches
  const float* hyper;  // [groups, kHyperColumns], in the order of the formula
  const int64_t* lr;   // [groups]: addresses of fp32 scalars, so that a launch in a graph reads the current lr
  const float* grad_scale;
  const float* found_inf;
  const float* grad_norm;
  float max_norm;
  Form form;
};

// If `chunk` is the first one of a tensor with a gradient, counts an update of the tensor.
AMP_KERNELS_HD void raise_step(const Table& table, int64_t chunk) {
  if (table.chunks[2 * chunk + 1] != 0) return;
  const int64_t tensor = table.chunks[2 * chunk];
  if (table.at(kGrad, tensor) != 0) ++step_of(table, tensor);
}

}  // namespace amp_kernels
