// The arguments of the gradient pass and of the update: a table of tensors, a list of chunks, and a few device scalars.
//
//   table, int64:   tensor 0   tensor 1   tensor 2     The table has a column for each tensor, and a row for each
//     kNumel          100000       5000         64     property (enum Row). An address of 0 means that the tensor has
//     kGradDtype           0          2          2     no such array.
//     kGrad          address    address          0
//     ...
//   chunks, int32:  (0, 0) (0, 1) ... (1, 0) (2, 0)    The entry of a chunk: its tensor, and its index in that tensor.
//
// A chunk is a range of at most `chunk_size` elements of one tensor. A thread block of a GPU, or a thread of a CPU,
// takes one chunk at a time.
//
// Arrays are dense, and kernels walk them in storage order. An address need only be aligned to one element.
//
// The rows of sizes, dtypes and groups come first. The list of chunks depends on these rows alone. So an optimizer
// keeps the list and these rows on the device, and sends only the rows of addresses at every step.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(AMP_KERNELS_CUDA_ON_CPU)
#define AMP_KERNELS_HD __host__ __device__ __forceinline__  // for code that CPU and GPU kernels share
#else
#define AMP_KERNELS_HD inline
#endif

namespace amp_kernels {

// What the rows from kMaster on hold:
//
//   kMaster      the address of a 16-bit parameter's fp32 master, or of its remainders (formulas/remainder.h). For an
//                fp32 parameter the row holds 0, except in `ema_`. In `ema_` the parameter is an average, and the
//                "gradient" is the weight that the average follows. If this weight has remainders, the row holds their
//                address
//   kStep        the address of an int32, the number of updates so far. All chunks of the tensor read this number.
//                After all of them have read it, it is increased
//   kState + i   the address of the i-th state. Every tensor has the first kRequired states (formulas/families.h). If
//                no tensor has other states, the table may end after the rows of these kRequired states
//   kScale + i   the address of the scales of the i-th state, if it is in codes (formulas/states.h)
enum Row { kNumel, kGradDtype, kGroup, kGrad, kParam, kMaster, kStep, kState, kScale = kState + 3, kRows = kScale + 2 };

enum Dtype { kFloat, kHalf, kBFloat16, kInt8 };

constexpr int64_t kStateGroup = 128;  // neighbours in memory whose codes share a scale
constexpr int64_t kLeastLean = 4096;  // tensors with fewer elements have fp32 states

constexpr int kHyperColumns = 8;

struct Table {
  const int64_t* data;  // in the memory of the device, or in the arguments of the kernel
  int64_t tensors;
  // [chunk_count, 2] entries. In an optimizer, an empty tensor has a chunk too, so that its updates are counted.
  const int32_t* chunks;
  int64_t chunk_count;
  // In elements: at most 65536. It is a multiple of 128, so that each chunk has the same alignment as its tensor.
  int64_t chunk_size;
  // The number of a row with fp64 factors, or 0 if the table has none. The squares of a tensor count in the norm as
  // often as its factor says. For example, if ranks hold copies of a shard, each of them counts a part of its squares.
  int32_t squares = 0;

  AMP_KERNELS_HD int64_t at(int row, int64_t tensor) const { return data[row * tensors + tensor]; }
};

// Returns the sum of squares of a chunk, multiplied by the factor of its tensor. Factors are above 0 and at most 1, so
// the result is finite exactly if the sum is.
AMP_KERNELS_HD double counted(double sum, const Table& table, int64_t tensor) {
  if (table.squares == 0) return sum;
  const int64_t bits = table.at(table.squares, tensor);
  double factor;
  std::memcpy(&factor, &bits, sizeof(factor));
  return sum * factor;
}

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

// The number of updates of a tensor (row kStep). It is read as unsigned, so that it stays positive beyond 2^31.
AMP_KERNELS_HD uint32_t& step_of(const Table& table, int64_t tensor) {
  return *reinterpret_cast<uint32_t*>(table.at(kStep, tensor));
}

// Results of the gradient pass in device memory, which the host may read at any time.
struct Record {
  // How many blocks of the current launch have ended; 0 between launches. The launch is a gradient pass, or an update
  // whose Update::ticket points to this number.
  int64_t ticket;
  int64_t passes;           // the number of passes that updated the record so far
  int64_t overflow_pass;    // the last pass that found a NaN or inf
  int64_t overflow_tensor;  // the first tensor with a NaN or inf in that pass
};

struct GradientPass {
  Table table;
  const float* scale;  // the factor is *scale, or with `divide` 1 / *scale. If `scale` is nullptr, the factor is 1
  bool divide;
  bool write;  // multiply the gradients by the factor
  // Write 0 or 1 to found_inf, and update the record. If false: write 1 or nothing to found_inf, and leave the record.
  bool clear;
  double* partials;  // a sum of squares for each chunk. It is finite exactly if all elements of the chunk are finite
  float* found_inf;
  float* norm;
  Record* record;
};

// The columns of ExponentPass::counts: one for each biased exponent of fp32, and one for zeros.
constexpr int kExponents = 256, kExponentColumns = kExponents + 1;

// Counts of exponents. amp_kernels/reference/exponents.py specifies the results of each tensor.
struct ExponentPass {
  Table table;       // its chunks are in the order of the tensors, and the chunks of each tensor are in order
  double* partials;  // a sum of squares for each chunk
  int64_t* counts;   // [tensors, kExponentColumns], increased
  float* largest;    // [tensors], which become larger or stay
  double* squares;   // [tensors], increased
  Record* record;    // only its ticket is used
};

// An update kernel is compiled for a formula and for one of these forms. One launch updates the tensors of one form.
struct Form {
  Dtype param_dtype;
  bool split;  // row kMaster holds remainders
  Dtype grad_dtype;
  int32_t states;  // bit k: some tensor has the k-th state
  // kFloat; or the type of the states in coded_states() (formulas/states.h): kBFloat16, or kInt8 for codes. Then every
  // tensor has exactly the states in `states`.
  Dtype state_dtype;
};

struct Update {
  Table table;
  int32_t* ticket;     // on a GPU, how many blocks of this launch have ended; 0 between launches
  const float* hyper;  // [groups, kHyperColumns], in the order of the formula
  const int64_t* lr;   // [groups], addresses of fp32 scalars, so that a launch in a CUDA graph reads the current lr
  const float* grad_scale;
  const float* found_inf;
  const float* grad_norm;
  float max_norm;
  Form form;
};

// If `chunk` is the first chunk of its tensor, and the tensor has a gradient, counts an update of the tensor.
AMP_KERNELS_HD void raise_step(const Table& table, int64_t chunk) {
  if (table.chunks[2 * chunk + 1] != 0) return;
  const int64_t tensor = table.chunks[2 * chunk];
  if (table.at(kGrad, tensor) != 0) ++step_of(table, tensor);
}

}  // namespace amp_kernels
