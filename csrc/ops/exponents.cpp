// The operator that counts the exponents of a list of tensors (ExponentPass in ../table.h). Its schema is in
// amp_kernels/ops/exponents.py.
#include "../cpu/run.h"
#include "device.h"
#include "operand.h"
#include "words.h"

namespace amp_kernels {
namespace {

// Requires that `result` is contiguous, and has this dtype and shape.
void require_result(const Operand& result, int32_t dtype, const std::vector<int64_t>& shape) {
  require(result.dtype == dtype && result.dims == static_cast<int64_t>(shape.size()) &&
          std::equal(shape.begin(), shape.end(), result.sizes) && result.is_contiguous);
}

// The words are the table, the entries of the chunks and the record. Behind them there is memory for the partial sums.
void count_exponents(std::vector<Tensor> tensors, Tensor counts, Tensor largest, Tensor squares) {
  const auto count = static_cast<int64_t>(tensors.size());
  const Operand rows(counts), magnitudes(largest), sums(squares);
  require_result(rows, aoti_torch_dtype_int64(), {count, kExponentColumns});
  require_result(magnitudes, aoti_torch_dtype_float32(), {count});
  require_result(sums, aoti_torch_dtype_float64(), {count});
  require(magnitudes.is_beside(rows) && sums.is_beside(rows));
  if (count == 0) return;

  const Launcher launcher = launcher_beside(counts);
  const Place place = counts.is_cuda() ? Place(kGpu, counts.get_device_index()) : Place(kCpu, 0);
  Words words(place, kGrad + 1, count);
  std::vector<Model> models(count);
  for (int64_t t = 0; t < count; ++t)
    require(describe(tensors[t], &models[t]) && models[t].tensor.is_float() && place_of(models[t].tensor) == place);
  for (int64_t t = 0; t < count; ++t) {
    if (!models[t].is_dense()) describe(tensors[t] = torch::stable::contiguous(tensors[t]), &models[t]);
    words.at(kNumel, t) = models[t].numel, words.at(kGradDtype, t) = code_of(models[t].tensor);
    words.at(kGrad, t) = models[t].address();
  }
  const Words::Chunks chunks = words.cut(words.columns(), launcher.load_exponents());
  const int64_t record_at = words.add(sizeof(Record) / sizeof(int64_t)), partials_at = words.add(0);
  int64_t* const there = words.allocate(chunks.count);
  words.send(launcher);
  launcher.run(ExponentPass{words.table(chunks), reinterpret_cast<double*>(there + partials_at), data<int64_t>(counts),
                            data<float>(largest), data<double>(squares), reinterpret_cast<Record*>(there + record_at)});
}

template <class D, class Library>
void register_kernels(Library& m) {
  AMP_KERNELS_IMPL(m, D, "count_exponents_", count_exponents);
}

}  // namespace

void run_on_cpu(const ExponentPass& pass) { cpu::run_exponents(pass); }

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { register_kernels<Cpu>(m); }
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { register_kernels<Cuda>(m); }
#endif

}  // namespace amp_kernels
