// Scratch memory for the CPU kernels.
#pragma once

#include <cstdint>
#include <new>

namespace amp_kernels::cpu {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Uninitialised memory, aligned to cache lines. The class allocates a cache line more than it needs, and rounds the
// address up itself. If glibc were asked for an aligned block, it would cut this block out of a larger one. That took a
// twentieth of the time of a product of 64^3.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : memory_(n == 0 ? nullptr : ::operator new(n * sizeof(T) + kAlignment)) {
    const auto address = reinterpret_cast<uintptr_t>(memory_);
    data_ = reinterpret_cast<T*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }
  ~Buffer() { ::operator delete(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* operator+(int64_t i) const { return data_ + i; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr size_t kAlignment = 64;
  void* memory_;
  T* data_;
};

}  // namespace amp_kernels::cpu
