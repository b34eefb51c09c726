// Runs the gradient pass, the counts of exponents and the update over all chunks of a table, on the threads of torch's
// pool.
#pragma once

#include "../formulas/families.h"
#include "exponents.h"
#include "parallel.h"
#include "unscale.h"
#include "update.h"

namespace amp_kernels::cpu {

// Returns the number of elements in all chunks of a table.
inline int64_t elements(const Table& table) {
  int64_t sum = 0;
  for (int64_t c = 0; c < table.chunk_count; ++c) sum += Chunk(table, c).size;
  return sum;
}

// Returns how many threads take the chunks of a table. If there are fewer than 65536 elements, one thread takes all
// chunks, however many there are, because waking a second thread would cost more than it saves.
inline int64_t threads_for(const Table& table) {
  const int64_t threads = torch::stable::get_num_threads();
  return threads == 1 || elements(table) < 65536 ? 1 : std::min(threads, table.chunk_count);
}

// Calls f(c) for every chunk c.
template <class F>
void for_each_chunk(const Table& table, const F& f) {
  for_each(table.chunk_count, threads_for(table), f);
}

inline void run_pass(const GradientPass& pass) {
  const float factor = unscale_factor(pass);
  for_each_chunk(pass.table, [&](int64_t c) { unscale_chunk(pass, factor, c); });
  finish_pass(pass, factor);
}

inline void run_exponents(const ExponentPass& pass) {
  const int64_t threads = threads_for(pass.table);
  std::vector<ExponentRow> rows(threads);
  share(pass.table.chunk_count, threads,
        [&](int64_t c, int64_t worker) { count_exponents_of_chunk(pass, c, rows[worker]); });
  for (const ExponentRow& row : rows) row.add_to(pass);
  add_squares(pass);
}

template <class Formula>
void run_update(const Update& update) {
  if (is_skipped(update)) return;
  const float factor = update_factor(update);
  // If the 16-bit weights of an update have 8 MB or more, and no remainders, they are streamed past the caches
  // (convert.h). Streaming makes SGD faster on both CPUs that were measured. RMSprop has a division and a root between
  // its stores. With streaming, an update of 25M parameters by RMSprop took 15% less time on an EPYC (Zen 4), but 40%
  // more time on a Xeon (17.8 ms instead of 12.9 ms). So on Intel, formulas with more than one state do not stream.
  const bool streams = update.form.param_dtype != kFloat && !update.form.split &&
                       (Formula::kStates == 1 || !is_intel()) && elements(update.table) >= 1 << 22;
  with_dtype(update.form.param_dtype, [&](auto param) {
    with_dtype(update.form.grad_dtype, [&](auto grad) {
      with_master<Formula, decltype(param), decltype(grad)>(update.form.split, [&](auto master) {
        for_each_chunk(update.table, [&](int64_t c) {
          update_chunk<Formula, decltype(param), decltype(master), decltype(grad)>(update, factor, streams, c);
        });
      });
    });
  });
  for (int64_t c = 0; c < update.table.chunk_count; ++c) raise_step(update.table, c);
}

}  // namespace amp_kernels::cpu
