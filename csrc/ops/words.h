// The words that an operator on a list of tensors sends to a device.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <numeric>
#include <vector>

#include "../chunks.h"
#include "columns.h"
#include "launcher.h"
#include "operand.h"

namespace amp_kernels {

// Describes the argument of an operator. Returns false for other dtypes than fp32, fp16, bf16 and int16.
inline bool describe(const Tensor& tensor, Model* model) {
  const Operand operand(tensor);
  Description& its = model->tensor;
  its.data = reinterpret_cast<char*>(operand.address), its.byte_offset = 0;
  const bool is_on_cpu = operand.device == aoti_torch_device_type_cpu();
  its.device_type = is_on_cpu ? kCpu : kGpu, its.device_index = is_on_cpu ? 0 : operand.index;
  its.dims = static_cast<int32_t>(operand.dims), its.shape = operand.sizes, its.strides = operand.strides;
  its.type = !operand.is_float()           ? Description::kInt
             : operand.code() == kBFloat16 ? Description::kBfloat
                                           : Description::kFloat;
  its.bits = operand.is_fp32() ? 32 : 16, its.lanes = 1;
  model->measure();
  return operand.is_float() || operand.dtype == aoti_torch_dtype_int16();
}

// A table (../table.h) and other words that kernels read.
class Words {
 public:
  Words(const Place& place, int rows, int64_t tensors) : place_(place), tensors_(tensors) {
    words_.reserve((rows + 2) * tensors + 32);  // what small tensors need: a chunk, a partial sum, a count of steps
    words_.resize(rows * tensors);
  }

  int64_t& at(int row, int64_t tensor) { return words_[row * tensors_ + tensor]; }

  // All columns, in their order.
  std::vector<int64_t> columns() const {
    std::vector<int64_t> all(tensors_);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  // Appends words, and returns the position of the first one.
  int64_t add(int64_t count) {
    const auto at = static_cast<int64_t>(words_.size());
    words_.resize(words_.size() + count);
    return at;
  }

  // Cuts tensors into chunks, and appends the entries of the chunks. `blocks` is the number of thread blocks of the
  // kernel that run at a time, or 0 on a CPU.
  struct Chunks {
    int64_t at, count, size;
  };
  Chunks cut(const std::vector<int64_t>& columns, int64_t blocks) {
    int64_t total = 0;
    for (const int64_t t : columns) total += at(kNumel, t);
    Chunks chunks{add(0), 0, chunk_size(total, static_cast<int64_t>(columns.size()), blocks)};
    for (const int64_t t : columns)
      for (int64_t c = 0; c * chunks.size < at(kNumel, t); ++c, ++chunks.count) words_.push_back(t | c << 32);
    return chunks;
  }

  // Returns the address at which kernels will read the words, with memory for `spare` more words behind them. After
  // this call no word can be added, but words can be changed until they are sent.
  int64_t* allocate(int64_t spare) {
    count_ = static_cast<int64_t>(words_.size());
#ifdef USE_CUDA
    if (place_.first == kGpu) {
      // torch's allocator reuses freed memory only for later work on the same stream. So this memory may be freed
      // before the kernels have run.
      const int64_t bytes = (count_ + spare) * int64_t{sizeof(int64_t)}, stride = 1;
      AtenTensorHandle handle = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(),
                                                      aoti_torch_device_type_cuda(), place_.second, &handle));
      memory_ = Tensor(handle);
      return there_ = static_cast<int64_t*>(memory_.data_ptr());
    }
#endif
    words_.resize(count_ + spare);
    return there_ = words_.data();
  }

  void send(const Launcher& launcher) const { launcher.send(words_.data(), there_, count_); }

  Table table(const Chunks& chunks) const {
    return {there_, tensors_, reinterpret_cast<int32_t*>(there_ + chunks.at), chunks.count, chunks.size};
  }

  int64_t* data() { return words_.data(); }

  int64_t elements() {
    return std::accumulate(words_.begin() + kNumel * tensors_, words_.begin() + (kNumel + 1) * tensors_, int64_t{0});
  }

 private:
  Place place_;
  int64_t tensors_, count_ = 0, *there_ = nullptr;
  std::vector<int64_t> words_;
#ifdef USE_CUDA
  Tensor memory_;
#endif
};

}  // namespace amp_kernels
