// Shares work among the threads of torch's pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.h"
#include "convert.h"

namespace amp_kernels::cpu {

// In share() below, a worker claims some neighbouring indices at a time. kClaims is about how many claims it makes for
// its own share of the indices. A claim is a locked instruction. It waits until everything that the thread has streamed
// is in memory. When each row of a matrix took a claim of its own, the claims took a tenth of the time of quantizing
// the matrix.
constexpr int64_t kClaims = 128;

// Calls f(i, worker) once for every i in [0, n). There are `threads` workers. Two calls with the same worker never
// overlap. After share() returns, every thread sees what the calls streamed (convert.h).
//
// Each worker begins with a share of its own: a range of consecutive indices. The data for these indices may still be
// in the cache of the worker's core, from the pass before. When a worker has finished its share, it takes indices from
// the shares of others, because cores are seldom equally fast. When another process used a part of one core, an update
// of 25M parameters took 3 to 20 percent longer without this help.
template <class F>
void share(int64_t n, int64_t threads, const F& f) {
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) f(i, 0);
    return fence_streams();
  }
  std::vector<Share> shares(threads);
  for (int64_t t = 0; t < threads; ++t) {
    shares[t].next = t * n / threads;
    shares[t].end = (t + 1) * n / threads;
  }
  const int64_t claim = std::max<int64_t>(1, n / (threads * kClaims));
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t k = 0; k < threads; ++k) {
        Share& share = shares[(t + k) % threads];
        for (int64_t i; (i = share.next.fetch_add(claim, std::memory_order_relaxed)) < share.end;)
          for (const int64_t end = std::min(i + claim, share.end); i < end; ++i) f(i, t);
      }
    fence_streams();
  });
}

// Calls f(begin, end, state) for ranges of at most `grain` indices, which together cover [0, n). There are up to
// `threads` workers. Each worker has a state of its own, made by make(worker). If there is only one worker, its state
// is on the stack.
//
// If each worker can compute some data for itself, these data should be in its state. If workers share the data
// instead, one core writes them and another core reads them, so they go through the caches of both cores. A product
// that takes 30 us without shared data took 40 us more with 64 KiB of shared data.
template <class Make, class F>
void in_ranges(int64_t n, int64_t grain, int64_t threads, const Make& make, const F& f) {
  // Makes the ranges nearly equal in length. Their number does not change.
  if (n < grain * threads) grain = divide_up(n, divide_up(n, grain));
  const int64_t ranges = divide_up(n, grain), workers = std::min(threads, ranges);
  using State = decltype(make(0));
  if (workers == 1) {
    State state = make(0);
    for (int64_t i = 0; i < n; i += grain) f(i, std::min(n, i + grain), state);
    return fence_streams();
  }
  std::vector<std::unique_ptr<State>> states(workers);
  share(ranges, workers, [&](int64_t i, int64_t worker) {
    if (states[worker] == nullptr) states[worker].reset(new State(make(worker)));
    f(i * grain, std::min(n, (i + 1) * grain), *states[worker]);
  });
}

// Calls f(i) once for every i in [0, n), as share() does.
template <class F>
void for_each(int64_t n, int64_t threads, const F& f) {
  share(n, threads, [&](int64_t i, int64_t) { f(i); });
}

}  // namespace amp_kernels::cpu
