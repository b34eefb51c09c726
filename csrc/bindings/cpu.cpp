// The table ops on CPU tensors.
#include "../cpu/parallel.h"
#include "../cpu/unscale.h"
#include "../cpu/update.h"
#include "../formulas/rmsprop.h"
#include "../formulas/sgd.h"
#include "arguments.h"
#include "gradient_table.h"

namespace amp_kernels::cpu {
namespace {

int64_t elements(const Table& table) {
  int64_t sum = 0;
  for (int64_t c = 0; c < table.chunk_count; ++c) sum += Chunk(table, c).size;
  return sum;
}

// A chunk of a model of small tensors may hold a few elements only, so it is elements that decide: below
// 65536 of them waking a second thread costs more than it saves.
template <class F>
void for_each_chunk(const Table& table, int64_t elements, const F& f) {
  const int64_t threads = elements < 65536 ? 1 : torch::stable::get_num_threads();
  for_each(table.chunk_count, std::min(threads, table.chunk_count), f);
}

void run_pass(const GradientPass& pass) {
  const float factor = unscale_factor(pass);
  for_each_chunk(pass.table, elements(pass.table), [&](int64_t c) { unscale_chunk(pass, factor, c); });
  finish_pass(pass, factor);
}

void unscale_table(Tensor table, Tensor chunks, int64_t chunk_size, std::optional<Tensor> scale, bool divide,
                   bool write, bool clear, Tensor partials, Tensor found_inf, Tensor norm, Tensor record) {
  run_pass(make_pass(table, chunks, chunk_size, scale, divide, write, clear, partials, found_inf, norm, record));
}

// The gradient pass over a list; false, with nothing done, if there is no table of it.
bool gradient_pass(std::vector<Tensor> grads, std::optional<Tensor> scale, bool write, Tensor found_inf, Tensor norm) {
  constexpr int64_t kChunk = 1 << 16;
  if (!grads[0].is_cpu()) return false;
  const std::optional<GradientTable> made = gradient_table(grads, kChunk);
  if (!made) return false;
  std::vector<double> partials(made->chunk_count());
  Record record{};
  const auto count = static_cast<int64_t>(grads.size());
  const GradientPass pass{{made->rows.data(), count, made->chunks.data(), made->chunk_count(), kChunk},
                          data<float>(scale),
                          /*divide=*/false,
                          write,
                          /*clear=*/false,
                          partials.data(),
                          data<float>(found_inf),
                          data<float>(norm),
                          &record};
  run_pass(pass);
  return true;
}

template <class Formula>
void update_table(Tensor table, Tensor chunks, int64_t chunk_size, Tensor steps, Tensor hyper, Tensor lr,
                  int64_t param_dtype, int64_t grad_dtype, std::optional<Tensor> grad_scale,
                  std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm, double max_norm) {
  const Update update = make_update(table, chunks, chunk_size, steps, hyper, lr, param_dtype, grad_dtype, grad_scale,
                                    found_inf, grad_norm, max_norm);
  if (is_skipped(update)) return;
  const float factor = update_factor(update);
  const int64_t size = elements(update.table);
  // From 8 MB of weights on. With RMSprop's division and root between the bursts a Xeon took 40% longer than with
  // ordinary stores (25M parameters: 17.8 ms for 12.9), an EPYC (Zen 4) 15% less; with SGD both take less.
  const bool streams = update.param_dtype != kFloat && (Formula::kStates == 1 || !is_intel()) && size >= 1 << 22;
  with_dtype(update.param_dtype, [&](auto param) {
    with_dtype(update.grad_dtype, [&](auto grad) {
      for_each_chunk(update.table, size, [&](int64_t c) {
        update_chunk<Formula, decltype(param), decltype(grad)>(update, factor, streams, c);
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  m.impl("_unscale_table_", TORCH_BOX(&unscale_table));
  m.impl("_sgd_table_", TORCH_BOX(&update_table<SgdFormula>));
  m.impl("_rmsprop_table_", TORCH_BOX(&update_table<RmspropFormula>));
}

// For every kind of tensor, since it is here that they are looked at.
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CompositeExplicitAutograd, m) {
  m.impl("_gradient_pass_", TORCH_BOX(&gradient_pass));
}

}  // namespace amp_kernels::cpu
