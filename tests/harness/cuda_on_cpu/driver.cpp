// C functions for ctypes: csrc/cuda's launchers of the table ops, by the arguments of their structs.
#include "../../../csrc/chunks.h"
#include "../../../csrc/cuda/kernels.h"
#include "guarded.h"

using namespace amp_kernels;  // NOLINT: this file is nothing but an interface to it

extern "C" {

void set_order(int order, unsigned seed) { emulator::set_order(static_cast<emulator::Order>(order), seed); }

void set_multiprocessors(int count) { emulator::multiprocessors = count; }
void set_planning(bool planning) { emulator::set_planning(planning); }

void visit_launched(void (*visit)(const void*, unsigned, size_t)) {
  for (const auto& [kernel, block, shared_bytes] : emulator::launched) visit(kernel, block, shared_bytes);
}
void forget_launched() { emulator::launched.clear(); }

void forget_loaded() {
  emulator::loaded.clear();
  emulator::loaded_late.clear();
}

void set_capturing(bool on) { emulator::is_capturing = on; }

void visit_loaded_late(void (*visit)(const void*)) {
  for (const void* kernel : emulator::loaded_late) visit(kernel);
}

const char* unscale_table(const int64_t* table, int64_t tensors, const int32_t* chunks, int64_t chunk_count,
                          int64_t chunk_size, const float* scale, bool divide, bool write, bool clear, double* partials,
                          float* found_inf, float* norm, Record* record, int32_t squares) {
  return guarded([&] {
    cuda::launch_unscale({{table, tensors, chunks, chunk_count, chunk_size, squares},
                          scale,
                          divide,
                          write,
                          clear,
                          partials,
                          found_inf,
                          norm,
                          record},
                         nullptr);
  });
}

const char* count_exponents(const int64_t* table, int64_t tensors, const int32_t* chunks, int64_t chunk_count,
                            int64_t chunk_size, double* partials, Record* record, int64_t* counts, float* largest,
                            double* squares) {
  return guarded([&] {
    cuda::launch_exponents(
        {{table, tensors, chunks, chunk_count, chunk_size}, partials, counts, largest, squares, record}, nullptr);
  });
}

const char* send(const int64_t* host, int64_t* to, int64_t n) {
  return guarded([&] { cuda::launch_send(host, to, n, nullptr); });
}

const char* update_table(const char* family, const int64_t* table, int64_t tensors, const int32_t* chunks,
                         int64_t chunk_count, int64_t chunk_size, int32_t* ticket, const float* hyper,
                         const int64_t* lr, int param_dtype, bool split, int grad_dtype, int states, int state_dtype,
                         const float* grad_scale, const float* found_inf, const float* grad_norm, float max_norm) {
  return guarded([&] {
    cuda::launch_update(family,
                        {{table, tensors, chunks, chunk_count, chunk_size},
                         ticket,
                         hyper,
                         lr,
                         grad_scale,
                         found_inf,
                         grad_norm,
                         max_norm,
                         {static_cast<Dtype>(param_dtype), split, static_cast<Dtype>(grad_dtype), states,
                          static_cast<Dtype>(state_dtype)}},
                        nullptr);
  });
}

int64_t chunk_size_of(int64_t total, int64_t tensors, int64_t blocks) { return chunk_size(total, tensors, blocks); }

int64_t load_unscale() {
  cuda::load_send();
  return cuda::load_unscale();
}

int64_t load_exponents() {
  cuda::load_send();
  return cuda::load_exponents();
}

int64_t load_update(const char* family, int param_dtype, bool split, int grad_dtype, int states, int state_dtype) {
  return cuda::load_update(family, {static_cast<Dtype>(param_dtype), split, static_cast<Dtype>(grad_dtype), states,
                                    static_cast<Dtype>(state_dtype)});
}
}
