// Counts the updates that 16-bit weights would lose without a master (../formulas/lost.h). The update is computed as in
// update.h, in copies in the L1, and is not stored.
//
// This is a source of its own, because g++ would inline less of the update if both were compiled together.
#include "update_lost.h"

#include "run.h"

namespace amp_kernels::cpu {
namespace {

template <class Formula, class P, class G>
void count_chunk(const UpdateCount& count, float factor, int64_t index) {
  LostCount own;
  update_chunk<Formula, P, int16_t, G, /*kCounts=*/true>(count, factor, /*streams=*/false, index, &own);
  // Other threads may have chunks of the same tensor.
  int64_t* const sums = count.counts + 2 * Chunk(count.table, index).tensor;
  __atomic_fetch_add(sums, own.changed, __ATOMIC_RELAXED);
  __atomic_fetch_add(sums + 1, own.lost, __ATOMIC_RELAXED);
}

template <class Formula, class P>
void count_with(const UpdateCount& count) {
  const float factor = update_factor(count);
  const int64_t size = elements(count.table);
  with_dtype(count.form.grad_dtype, [&](auto grad) {
    for_each_chunk(count.table, size, [&](int64_t c) { count_chunk<Formula, P, decltype(grad)>(count, factor, c); });
  });
}

}  // namespace

void count_updates(std::string_view family, const UpdateCount& count) {
  require_remainders(count.form);
  if (is_skipped(count)) return;
  Families::with(family, [&](auto formula) {
    using Formula = typename decltype(formula)::type;
    if (count.form.param_dtype == kHalf)
      count_with<Formula, Half>(count);
    else
      count_with<Formula, BFloat16>(count);
  });
}

}  // namespace amp_kernels::cpu
