// Sizes, and scratch memory, of the CPU kernels.
#pragma once

#include <cstdint>
#include <new>

namespace amp_kernels::cpu {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Uninitialised memory, aligned to cache lines.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : data_(static_cast<T*>(::operator new(n * sizeof(T), kAlignment))) {}
  ~Buffer() { ::operator delete(data_, kAlignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* operator+(int64_t i) const { return data_ + i; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  T* data_;
};

}  // namespace amp_kernels::cpu
