// Counts the updates that 16-bit weights would lose without a master (../formulas/lost.h). The kernel runs before the
// update. It computes what the update computes, and writes nothing but the counts.
//
// Bytes per element, only read: 4 for a weight and its remainder, 2 or 4 for a gradient, and 4, 2 or 1 for a state.
//
// The pass runs only at the steps that `PrecisionReport` samples. So there is only one kernel for each formula and each
// type of weights. The types of gradients and states are arguments of the kernel, and so are the states that there are.
//
// A block takes every gridDim.x-th chunk (csrc/table.h), from the last chunk back, as in the update. A thread takes
// four neighbours at a time:
//
//   chunk:  | t0 t0 t0 t0 | t1 t1 t1 t1 | ... | t255 .. | t0 t0 t0 t0 | t1 .. | ... |
//             counts of a thread -> counts of the block -> added to the counts of the tensor
//
// Chunks begin at groups of 128 elements, so the four neighbours have one scale for each state in codes. If an array is
// aligned to four elements, a thread reads its neighbours in one access. If not, it reads them one by one, as it does
// with the last elements of a tensor, at most three.
#include "../formulas/families.h"
#include "../formulas/lost.h"
#include "update_lean.cuh"

namespace amp_kernels::cuda {
namespace {

// 8-byte words of shared memory for the reduction. Behind them is the header of the walk (grid.cuh).
constexpr int kReduced = 32;
using CountWalk = ChunkWalk<kState, /*kBackwards=*/true>;
constexpr size_t kSharedBytes = (kReduced + CountWalk::kWords) * sizeof(int64_t);

struct CountPass : UpdateCount {
  int coded;  // coded_states() (../formulas/states.h)
};

// A chunk's elements of an array whose type is known at run time. kInt8 stands for codes.
struct Array {
  const char* first = nullptr;  // nullptr if the tensor has no such array
  Dtype dtype = kFloat;
  bool is_aligned = false;  // to kPack elements

  Array() = default;
  __device__ __forceinline__ Array(int64_t address, Dtype dtype, int64_t begin) : dtype(dtype) {
    const int size = dtype == kFloat ? 4 : dtype == kInt8 ? 1 : 2;
    if (address != 0) first = reinterpret_cast<const char*>(address) + begin * size;
    is_aligned = address % (kPack * size) == 0;  // `begin` is a multiple of kStateGroup
  }
};

// Four neighbours of an Array, as they are in memory. load() starts their loads; as() waits for them. In between, a
// thread starts the loads of all other arrays. Only `count` of the four are in the tensor, and the others are 0. kSize
// is the size of the largest elements that the array may have.
template <int kSize>
struct Neighbours {
  uint32_t word[kSize] = {};

  __device__ __forceinline__ void load(const Array& array, int i, int count) {
    if (kSize == 2 || array.dtype == kHalf || array.dtype == kBFloat16)
      load_as<uint16_t>(array, i, count);
    else if (array.dtype == kFloat)
      load_as<float>(array, i, count);
    else
      load_as<uint8_t>(array, i, count);
  }

  template <class T>
  __device__ __forceinline__ Vector<T, kPack> as() const {
    Vector<T, kPack> elements;
    memcpy(elements.data, word, sizeof(elements.data));
    return elements;
  }

  __device__ __forceinline__ Vector<float, kPack> numbers(Dtype dtype) const {
    if (dtype == kFloat) return as<float>();
    if (dtype == kHalf) return floats(as<__half>());
    return floats(as<__nv_bfloat16>());
  }

  template <Code kCode>
  __device__ __forceinline__ Vector<float, kPack> numbers_of_codes(float scale) const {
    const auto codes = as<std::conditional_t<kCode == Code::kMomentum, int8_t, uint8_t>>();
    Vector<float, kPack> values;
#pragma unroll
    for (int j = 0; j < kPack; ++j) values.data[j] = decoded<kCode>(codes.data[j], scale);
    return values;
  }

 private:
  template <class T>
  __device__ __forceinline__ void load_as(const Array& array, int i, int count) {
    if constexpr (sizeof(T) <= kSize) {
      const T* const at = reinterpret_cast<const T*>(array.first) + i;
      if (array.is_aligned && count == kPack) {
        const Packed<T, kPack> packed = load_wide<kPack>(at);
        memcpy(word, packed.word, sizeof(packed.word));
      } else {
        const Vector<T, kPack> elements = load_each<kPack>(at, 1, count);
        memcpy(word, elements.data, sizeof(elements.data));
      }
    }
  }
};

// For each_state() (update_lean.cuh): all states that a parameter can have.
template <class Formula>
struct Every {
  static constexpr bool has(int k) { return k < Formula::kStates; }
};

template <class Formula>
struct CountedArrays {
  Array grad, weight, remainder, state[Formula::kStates];
  const float* scale[Formula::kStates] = {};  // from the scale of the chunk's first group on

  __device__ __forceinline__ CountedArrays(const CountPass& pass, const CountWalk& walk)
      : grad(walk.row(kGrad), pass.form.grad_dtype, walk.begin()),
        weight(walk.row(kParam), pass.form.param_dtype, walk.begin()),
        remainder(walk.row(kMaster), kHalf, walk.begin()) {  // 16 bits
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) {
      // The table may lack the row of a state that no tensor has, and the rows of scales.
      if (k >= Formula::kRequired && (pass.form.states >> k & 1) == 0) continue;
      const Dtype dtype = (pass.coded >> k & 1) != 0 ? pass.form.state_dtype : kFloat;
      state[k] = Array(pass.table.at(kState + k, walk.tensor()), dtype, walk.begin());
      if (dtype == kInt8)
        scale[k] =
            reinterpret_cast<const float*>(pass.table.at(kScale + k, walk.tensor())) + walk.begin() / kStateGroup;
    }
  }
};

// How many masters of the four elements the update changes. The upper 32 bits are how many of the changes are lost.
template <class Formula, class P>
__device__ __forceinline__ int64_t count_pack(const CountedArrays<Formula>& arrays, const Formula& formula, int i,
                                              int count) {
  constexpr int kStates = Formula::kStates;
  Neighbours<2> weight, remainder;
  Neighbours<4> grad, state[kStates];
  float scale[kStates] = {};
  grad.load(arrays.grad, i, count);
  weight.load(arrays.weight, i, count);
  remainder.load(arrays.remainder, i, count);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (arrays.state[k].first != nullptr) state[k].load(arrays.state[k], i, count);
    if (arrays.scale[k] != nullptr) scale[k] = load_elements<1>(arrays.scale[k] + i / kStateGroup).data[0];
  }
  const Vector<float, kPack> g = grad.numbers(arrays.grad.dtype), weights = floats(weight.template as<P>()),
                             masters = join(weight.template as<P>(), remainder.template as<int16_t>());
  Vector<float, kPack> s[kStates];
  each_state<Every<Formula>>([&](auto k) {
    constexpr Code kCode = Formula::kCodes[k.value];
    if constexpr (kCode != Code::kNone) {
      if (arrays.state[k.value].dtype == kInt8) {
        s[k.value] = state[k.value].template numbers_of_codes<kCode>(scale[k.value]);
        return;
      }
    }
    s[k.value] = state[k.value].numbers(arrays.state[k.value].dtype);
  });
  const auto round = [](float x) { return to_float(from_float<P>(x)); };
  int64_t counts = 0;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    float element[kStates];
#pragma unroll
    for (int k = 0; k < kStates; ++k) element[k] = s[k].data[j];
    const float next = formula(masters.data[j], g.data[j], element);
    if (j >= count) continue;  // beyond the tensor the formula may have made NaN
    counts += next != masters.data[j];
    counts += static_cast<int64_t>(is_lost(weights.data[j], masters.data[j], next, round)) << 32;
  }
  return counts;
}

template <class Formula, class P>
__global__ void __launch_bounds__(kThreads, 3) count_updates_kernel(const CountPass pass) {
  auto* const shared = reinterpret_cast<int64_t*>(shared_memory());
  CountWalk walk(pass.table, nullptr, shared + kReduced);
  if (is_skipped(pass)) return;
  const float factor = update_factor(pass);
  for (; walk.has_chunk(); walk.advance()) {
    const CountedArrays<Formula> arrays(pass, walk);
    if (arrays.grad.first == nullptr) continue;
    bool has[Formula::kStates];
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) has[k] = arrays.state[k].first != nullptr;
    const auto formula = formula_of<Formula>(pass, walk, factor, has);
    const int64_t rest = walk.rest();
    const int size = static_cast<int>(rest < pass.table.chunk_size ? rest : pass.table.chunk_size);
    int64_t counts = 0;
    for (int i = static_cast<int>(threadIdx.x) * kPack; i < size; i += kThreads * kPack)
      counts += count_pack<Formula, P>(arrays, formula, i, size - i < kPack ? size - i : kPack);
    counts = block_reduce<int64_t>(counts, 0, shared, Sum());
    if (threadIdx.x != 0) continue;
    int64_t* const sums = pass.counts + 2 * walk.tensor();
    add_atomically(sums, counts & 0xffffffff);
    add_atomically(sums + 1, counts >> 32);
  }
}

}  // namespace

void launch_count_updates(std::string_view family, const UpdateCount& count, Stream stream) {
  require_remainders(count.form);
  if (count.table.chunk_count == 0) return;
  Families::with(family, [&](auto formula) {
    using Formula = typename decltype(formula)::type;
    const int coded = count.form.state_dtype == kFloat ? 0 : coded_states<Formula>(count.form.states);
    with_16_bits(count.form.param_dtype, [&](auto param) {
      launch_over_chunks(count_updates_kernel<Formula, decltype(param)>, kSharedBytes, CountPass{count, coded}, stream);
    });
  });
}

}  // namespace amp_kernels::cuda
