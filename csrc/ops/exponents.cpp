// The operator that counts the exponents of a list of tensors (ExponentPass in ../table.h). Its schema is in
// amp_kernels/ops/exponents.py.
#include "device.h"
#include "lists.h"

namespace amp_kernels {
namespace {

// Requires that `result` is contiguous, and has this dtype and shape.
void require_result(const Operand& result, int32_t dtype, const std::vector<int64_t>& shape) {
  require(result.dtype == dtype && result.dims == static_cast<int64_t>(shape.size()) &&
          std::equal(shape.begin(), shape.end(), result.sizes) && result.is_contiguous);
}

// The table, the entries of the chunks and the record are sent to the device (device.h), in this order. Behind them
// there is memory for the partial sums.
template <class Device>
void count_exponents(Tensors tensors, Tensor counts, Tensor largest, Tensor squares) {
  const auto count = static_cast<int64_t>(tensors.size());
  const Operand rows(counts), magnitudes(largest), sums(squares);
  require_result(rows, aoti_torch_dtype_int64(), {count, kExponentColumns});
  require_result(magnitudes, aoti_torch_dtype_float32(), {count});
  require_result(sums, aoti_torch_dtype_float64(), {count});
  require(magnitudes.is_beside(rows) && sums.is_beside(rows));
  const Operands operands = operands_of(tensors, rows);
  if (count == 0) return;

  Device device(counts);
  Dense dense;
  HostTable table(kGrad + 1, count);
  for (int64_t t = 0; t < count; ++t) table.put(t, dense(operands[t]));
  std::vector<int64_t> columns(count);
  std::iota(columns.begin(), columns.end(), 0);
  const Chunks chunks = table.cut(columns, device.load_exponents());

  Words words;
  words.add(table.rows());
  const int64_t chunks_at = words.add(chunks.words);
  const int64_t record_at = words.add(std::vector<int64_t>(sizeof(Record) / sizeof(int64_t)));
  const auto partials_at = static_cast<int64_t>(words.get().size());
  int64_t* const at = device.send(words.get(), chunks.count(), [](int64_t*) {});
  device.run(ExponentPass{{at, count, reinterpret_cast<int32_t*>(at + chunks_at), chunks.count(), chunks.size},
                          reinterpret_cast<double*>(at + partials_at),
                          data<int64_t>(counts),
                          data<float>(largest),
                          data<double>(squares),
                          reinterpret_cast<Record*>(at + record_at)});
}

template <class Device, class Library>
void register_kernels(Library& m) {
  AMP_KERNELS_IMPL(m, Device, "count_exponents_", count_exponents<Device>);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { register_kernels<Cpu>(m); }
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { register_kernels<Cuda>(m); }
#endif

}  // namespace amp_kernels
