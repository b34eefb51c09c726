// Memory as a binding gives it to a launch: NaN, as shared memory is, so that what is read before it is written shows.
#pragma once

#include <cstring>
#include <memory>
#include <stdexcept>

class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(bytes), memory_(new int4[bytes / 16 + 2]) {
    memset(memory_.get(), 0xff, bytes);
    memset(end(), kGuard, kGuardBytes);
  }

  void* get() const { return memory_.get(); }

  void check() const {
    for (int i = 0; i < kGuardBytes; ++i)
      if (end()[i] != kGuard) throw std::runtime_error("a kernel wrote past its workspace");
  }

 private:
  static constexpr int kGuardBytes = 16;
  static constexpr char kGuard = 0x5a;

  char* end() const { return reinterpret_cast<char*>(memory_.get()) + bytes_; }

  int64_t bytes_;
  std::unique_ptr<int4[]> memory_;
};
