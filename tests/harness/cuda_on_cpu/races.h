// Which accesses of a launch are ordered. Two accesses of one byte by different threads, at least one of them a write,
// are a race unless the first happens before the second, whatever order the emulator runs them in. These rules are the
// part of the PTX memory model that the kernels use:
//
// - Within a block, a barrier orders what threads did before it with what they do after it. A shuffle orders nothing.
// - Between blocks, four steps are needed. A thread of the first block makes a fence, and then an atomic operation at
//   some address. Later a thread of the second block makes an atomic operation at this address, and then a fence. The
//   first fence covers what its thread did before it, and what its block did before the block's last barrier. The
//   second fence orders what its own thread does after it, and from the next barrier on what its whole block does.
// - Atomic operations do not race with each other. A plain access races with them unless its thread made the last one,
//   or something above orders it.
// - A copy by cp.async is a write that goes on until its thread has waited for it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulator {

class Races {
 public:
  void begin_launch() { *this = Races(); }

  void begin_block(unsigned block, unsigned threads) {
    block_ = block;
    epoch_ = 0;
    known_.clear();
    threads_.assign(threads, {});
    shared_.clear();
  }

  void barrier() {
    ++epoch_;
    for (Thread& thread : threads_) {
      add(known_, thread.known);
      thread.known.clear();
    }
  }

  void fence(unsigned thread) {
    Thread& self = threads_[thread];
    ++self.fences;
    add(self.known, self.seen);
    self.seen.clear();
    self.released = known_;
    add(self.released, self.known);
    self.released[block_].push_back({epoch_, thread, self.fences});
  }

  // Notes an atomic operation, and returns what it races with, or "".
  std::string atomic(unsigned thread, uintptr_t address, size_t bytes, bool is_shared) {
    for (size_t i = 0; i < bytes; ++i) {
      Cell& cell = (is_shared ? shared_ : global_)[address + i];
      if (cell.is_written && !is_ordered(cell.write, thread)) return "that " + name_of(cell.write) + " wrote";
      for (const Access& read : cell.reads)
        if (is_shared && !is_ordered(read, thread)) return "that " + name_of(read) + " read";
      cell.last_atomic = {block_, epoch_, thread, threads_[thread].fences};
      cell.is_atomic = true;
    }
    if (is_shared) return "";  // orders nothing: in a block, barriers do
    Known& there = atomics_[address];
    add(threads_[thread].seen, there);
    add(there, threads_[thread].released);
    return "";
  }

  // Notes an access, and returns what it races with, or "".
  std::string note(unsigned thread, uintptr_t address, size_t bytes, bool writes, bool is_shared) {
    for (size_t i = 0; i < bytes; ++i) {
      Cell& cell = (is_shared ? shared_ : global_)[address + i];
      if (cell.is_copied) return "that a copy of " + name_of(cell.write) + " may still write";
      if (cell.is_written && !is_ordered(cell.write, thread)) return "that " + name_of(cell.write) + " wrote";
      if (cell.is_atomic && !is_ordered(cell.last_atomic, thread))
        return "that " + name_of(cell.last_atomic) + " changed atomically";
      const Access access{block_, epoch_, thread, threads_[thread].fences};
      if (!writes) {
        add(cell.reads, access);
        continue;
      }
      for (const Access& read : cell.reads)
        if (!is_ordered(read, thread)) return "that " + name_of(read) + " read";
      cell.reads.clear();
      cell.write = access;
      cell.is_written = true;
    }
    return "";
  }

  // A copy into 16 bytes of shared memory begins, once note() has said that nothing races with it, or has arrived.
  void copy(unsigned thread, uintptr_t address, bool has_arrived) {
    for (size_t i = 0; i < 16; ++i) {
      Cell& cell = shared_[address + i];
      cell.is_copied = !has_arrived;
      cell.write = {block_, epoch_, thread, threads_[thread].fences};
    }
  }

 private:
  static constexpr unsigned kSeveral = ~0u;

  struct Access {
    unsigned block, epoch;  // how many barriers of the block came before
    unsigned thread;        // kSeveral for reads by more than one thread of the block
    unsigned fences;        // how many fences of the thread came before
  };
  struct Cell {
    Access write, last_atomic;
    bool is_written = false, is_copied = false, is_atomic = false;
    std::vector<Access> reads;  // since the last write, the latest of each block: what orders it orders those before
  };
  struct Fence {
    unsigned epoch, thread, fences;
  };
  using Known = std::map<unsigned, std::vector<Fence>>;  // by block: fences whose accesses happened before
  struct Thread {
    unsigned fences = 0;
    Known seen;      // by atomic operations since the last fence
    Known known;     // by fences since the last barrier
    Known released;  // what the next atomic operation tells
  };

  static void add(Known& to, const Known& from) {
    for (const auto& [block, fences] : from) to[block].insert(to[block].end(), fences.begin(), fences.end());
  }

  static void add(std::vector<Access>& reads, const Access& access) {
    for (Access& read : reads) {
      if (read.block != access.block) continue;
      const bool several = read.epoch == access.epoch && read.thread != access.thread;
      read = access;
      if (several) read.thread = kSeveral;
      return;
    }
    reads.push_back(access);
  }

  static bool is_known(const Known& known, const Access& access) {
    const auto fences = known.find(access.block);
    if (fences == known.end()) return false;
    for (const Fence& fence : fences->second)
      if (access.epoch < fence.epoch ||
          (access.epoch == fence.epoch && access.thread == fence.thread && access.fences < fence.fences))
        return true;
    return false;
  }

  bool is_ordered(const Access& access, unsigned thread) const {
    if (access.block == block_) return access.thread == thread || access.epoch < epoch_;
    return is_known(known_, access) || is_known(threads_[thread].known, access);
  }

  static std::string name_of(const Access& access) {
    const std::string thread = access.thread == kSeveral ? "threads" : "thread " + std::to_string(access.thread);
    return thread + " of block " + std::to_string(access.block);
  }

  unsigned block_ = 0, epoch_ = 0;
  Known known_;  // to the whole block
  std::vector<Thread> threads_;
  std::unordered_map<uintptr_t, Cell> shared_, global_;
  std::unordered_map<uintptr_t, Known> atomics_;
};

}  // namespace emulator
