// is_last_block() of csrc/cuda/portable.h for Relacy, a checker of the memory model of C++: two blocks of two threads, in
// 20,000 random runs. Like PTX, that model has fences and relaxed atomic operations. test_litmus.py puts the function's
// own text into is_last_block.h. The program prints "sound" or what Relacy found.
#include <relacy/relacy.hpp>

namespace {

struct Index {
  unsigned x;
};

struct Counter {
  rl::atomic<unsigned> value;
  void operator=(unsigned v) { value.store(v, rl::mo_relaxed, $); }
};

constexpr unsigned kBlocks = 2, kThreads = 2;

struct LastBlock : rl::test_suite<LastBlock, kBlocks * kThreads> {
  Counter counter;
  rl::var<int> partials[kBlocks];
  rl::atomic<int> arrived[kBlocks];  // threads at the barrier of a block, and those that gave true
  rl::atomic<int> given[kBlocks];
  rl::atomic<int> last_threads;

  void before() {
    counter.value.store(0, rl::mo_relaxed, $);
    last_threads.store(0, rl::mo_relaxed, $);
    for (unsigned b = 0; b < kBlocks; ++b) {
      arrived[b].store(0, rl::mo_relaxed, $);
      given[b].store(0, rl::mo_relaxed, $);
      partials[b]($) = 0;
    }
  }

  // One thread of the GPU. The names are those of CUDA and of portable.h.
  struct Thread {
    LastBlock& grid;
    Index threadIdx, blockIdx, gridDim{kBlocks};

    static void device_fence() { rl::atomic_thread_fence(rl::mo_acq_rel, $); }
    static unsigned ticket(Counter* counter) { return counter->value.fetch_add(1, rl::mo_relaxed, $); }
    // A block has one barrier here, so that nobody has to wait for the next.
    bool block_any(bool value) {
      const unsigned b = blockIdx.x;
      if (value) grid.given[b].fetch_add(1, rl::mo_relaxed, $);
      grid.arrived[b].fetch_add(1, rl::mo_acq_rel, $);
      while (grid.arrived[b].load(rl::mo_acquire, $) != kThreads) rl::yield(1, $);
      return grid.given[b].load(rl::mo_relaxed, $) != 0;
    }

#include "is_last_block.h"
  };

  void thread(unsigned index) {
    Thread self{*this, {index % kThreads}, {index / kThreads}};
    if (self.threadIdx.x == 0) partials[self.blockIdx.x]($) = 1;
    if (!self.is_last_block(&counter)) return;
    int sum = 0;
    for (unsigned b = 0; b < kBlocks; ++b) sum += partials[b]($);
    RL_ASSERT(sum == kBlocks);
    last_threads.fetch_add(1, rl::mo_relaxed, $);
  }

  void after() {
    RL_ASSERT(last_threads.load(rl::mo_relaxed, $) == kThreads);
    RL_ASSERT(counter.value.load(rl::mo_relaxed, $) == 0);
  }
};

// A std::ostringstream would allocate, by the operator new that Relacy replaces.
struct Nowhere : std::streambuf {
  int overflow(int c) override { return c; }
};

}  // namespace

int main() {
  rl::test_params params;
  params.iteration_count = 20000;
  Nowhere nowhere;
  std::ostream history(&nowhere);
  params.output_stream = params.progress_stream = &history;
  const bool sound = rl::simulate<LastBlock>(params);
  std::cout << (sound ? "sound" : rl::test_result_str(params.test_result)) << std::endl;
}
