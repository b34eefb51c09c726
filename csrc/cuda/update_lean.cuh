// The update of tensors whose states are bf16 or codes (../formulas/states.h). It is the update of update.cuh, but a
// warp works on a whole group of 128 neighbours, whose codes share a scale:
//
//   group:  | lane 0: 4 neighbours | lane 1: 4 neighbours | ... | lane 31: 4 neighbours |
//
// So the largest magnitude of a group is found in registers. Groups are counted from the first element of the tensor,
// and chunks begin at groups. A thread takes four neighbours of two groups at a time. It starts all loads before it
// uses any element.
//
// Instructions take most of the time, so there is a quick way for ordinary packs: one test of four elements replaces
// the tests that roots, quotients, joined and split masters need for each element. If it fails, the thread computes its
// pack once more (redo()). AdamW with int8 states takes 110 instructions for an element, and 165 with a test for each.
//
// Bytes per element, read and written together: 2 for a state in codes, and 1/16 for its scales; 4 for a state in bf16.
// AdamW moves 14 bytes for a 16-bit weight with its remainder, a 16-bit gradient and two states in codes, in place of
// 26.
//
// If an array of the tensor is not aligned to four elements, as a view into a bucket may be, all of its elements are
// accessed one by one. The same is done for the last group of a tensor, if it is not full.
#pragma once

#include "../formulas/states.h"
#include "update.cuh"

namespace amp_kernels::cuda {

// What a kernel is compiled for. F is the formula. Bit k of kPresent says whether the tensors have the k-th state. P
// and G are the types of parameters and gradients. S is the type of the states in coded_states(): uint8_t for codes, or
// uint16_t for bf16. The other states are fp32. 16-bit parameters have remainders.
template <class F, int kPresent_, class P_, class G_, class S>
struct LeanVariant {
  using Formula = F;
  using P = P_;
  using G = G_;
  static constexpr int kStates = F::kStates;
  static constexpr int kPresent = kPresent_, kCoded = coded_states<F>(kPresent);
  static constexpr bool kIsSplit = !std::is_same_v<P, float>;
  static constexpr bool kHasScales = std::is_same_v<S, uint8_t>;
  static constexpr int kRows_ = kHasScales ? kRows : kState + (kPresent >> 2 != 0 ? 3 : kPresent >> 1 != 0 ? 2 : 1);
  // How many blocks share a multiprocessor: as many as possible without spilled registers.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
  static constexpr int kResidentBlocks = kPresent >> 2 != 0 ? 2 : kPresent >> 1 != 0 ? 3 : 4;
#else
  static constexpr int kResidentBlocks = 2;
#endif

  static constexpr bool has(int k) { return (kPresent >> k & 1) != 0; }
  static constexpr bool is_coded(int k) { return (kCoded >> k & 1) != 0; }

  template <int k>
  using State = std::conditional_t<is_coded(k), S, float>;
};

// Calls f(k) for each state that the tensors have, with k as an integral_constant.
template <class V, class F>
__device__ __forceinline__ void each_state(const F& f) {
  if constexpr (V::has(0)) f(std::integral_constant<int, 0>{});
  if constexpr (V::has(1)) f(std::integral_constant<int, 1>{});
  if constexpr (V::has(2)) f(std::integral_constant<int, 2>{});
}

// Makes nvcc keep a pointer that moves in one register pair. It would keep where it began, and how far it has moved.
template <class T>
__device__ __forceinline__ void move(T*& pointer, int elements) {
  pointer += elements;
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(pointer));
#endif
}

// The arrays of a chunk, from its first element on.
template <class V>
struct LeanArrays {
  const typename V::G* grad;
  typename V::P* weight;
  int16_t* remainder;  // nullptr if parameters are fp32
  typename V::template State<0>* state0;
  typename V::template State<1>* state1;
  typename V::template State<2>* state2;
  float* scale[2];  // from the scale of the chunk's first group on

  template <class Walk>
  __device__ __forceinline__ explicit LeanArrays(const Walk& walk)
      : grad(walk.template in<const typename V::G>(kGrad)),
        weight(walk.template in<typename V::P>(kParam)),
        remainder(V::kIsSplit ? walk.template in<int16_t>(kMaster) : nullptr),
        state0(at<0>(walk)),
        state1(at<1>(walk)),
        state2(at<2>(walk)) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      scale[k] = V::kHasScales && V::is_coded(k)
                     ? reinterpret_cast<float*>(walk.row(kScale + k)) + walk.begin() / kStateGroup
                     : nullptr;
  }

  template <int k>
  __device__ __forceinline__ auto* state() const {
    if constexpr (k == 0)
      return state0;
    else if constexpr (k == 1)
      return state1;
    else
      return state2;
  }

  __device__ __forceinline__ void advance(int elements) {
    move(grad, elements);
    move(weight, elements);
    if constexpr (V::kIsSplit) move(remainder, elements);
    if constexpr (V::has(0)) move(state0, elements);
    if constexpr (V::has(1)) move(state1, elements);
    if constexpr (V::has(2)) move(state2, elements);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (V::kHasScales && V::is_coded(k)) move(scale[k], elements / static_cast<int>(kStateGroup));
  }

  // Whether four neighbours can be accessed together in all arrays.
  __device__ __forceinline__ bool are_aligned() const {
    bool aligned = phase(grad) == 0 && phase(weight) == 0 && (!V::kIsSplit || phase(remainder) == 0);
    each_state<V>([&](auto k) { aligned = aligned && phase(state<k.value>()) == 0; });
    return aligned;
  }

 private:
  template <int k, class Walk>
  __device__ __forceinline__ static typename V::template State<k>* at(const Walk& walk) {
    if constexpr (V::has(k))
      return walk.template in<typename V::template State<k>>(kState + k);
    else
      return nullptr;
  }
};

// Four neighbours of an array, loaded together if kWide. If not, the first `count` are loaded one by one.
template <class T, bool kWide>
struct Quad {
  std::conditional_t<kWide, Packed<T, kPack>, Vector<T, kPack>> elements;

  __device__ __forceinline__ void load(const T* p, [[maybe_unused]] int count) {
    if constexpr (kWide)
      elements = load_wide<kPack>(p);
    else
      elements = load_each<kPack>(p, 1, count);
  }

  __device__ __forceinline__ Vector<T, kPack> get() const {
    if constexpr (kWide)
      return elements.unpacked();
    else
      return elements;
  }

  __device__ __forceinline__ static void store(T* p, const Vector<T, kPack>& elements, [[maybe_unused]] int count) {
    if constexpr (kWide)
      store_wide(p, elements);
    else
      store_each(p, elements, 1, count);
  }
};

// The codes of four neighbours, as they are in memory. The result is that of encoded(). It computes on four bytes at
// once.
template <Code kCode>
__device__ __forceinline__ uint32_t four_codes(const Vector<float, kPack>& values, const StateGroup& group,
                                               const GroupNoise& noise, int at) {
  uint32_t steps[kPack];  // byte 2 is the code, and byte 3 is ignored
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const float exact = steps_of<kCode>(values.data[j], group);
    if constexpr (kCode == Code::kMomentum) {
      // Below 2^23, a sum is an integer in the lower bits. A conversion takes four times as long.
      steps[j] = float_bits(add_down(exact, 0x1p23f)) + noise.at(at + j);
    } else {
      const uint32_t rounded = static_cast<uint32_t>(static_cast<int>(exact)) + noise.at(at + j);
      steps[j] = rounded < 0xffffff ? rounded : 0xffffff;
    }
  }
  const auto bytes = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t of_two) {
    return __byte_perm(__byte_perm(a, b, of_two), __byte_perm(c, d, of_two), 0x5410);
  };
  const uint32_t rounded = bytes(steps[0], steps[1], steps[2], steps[3], 0x62);  // byte 2 of each
  if (kCode == Code::kSecondMoment) return rounded;
  const uint32_t magnitudes = rounded - (rounded >> 7 & 0x01010101u);  // 128 becomes 127
  const uint32_t x0 = float_bits(values.data[0]), x1 = float_bits(values.data[1]), x2 = float_bits(values.data[2]),
                 x3 = float_bits(values.data[3]);
  const uint32_t negative = (bytes(x0, x1, x2, x3, 0x73) >> 7 & 0x01010101u) * 0xff;
  const uint32_t negated = (0x80808080u - magnitudes) ^ 0x80808080u;
  return (negated & negative) | (magnitudes & ~negative);
}

template <class P>
__device__ __forceinline__ Packed<P, kPack> rounded(const Vector<float, kPack>& values) {
  typename Held<P>::Type two[2];
  if constexpr (std::is_same_v<P, __half>) {
    two[0] = __floats2half2_rn(values.data[0], values.data[1]);
    two[1] = __floats2half2_rn(values.data[2], values.data[3]);
  } else {
    two[0] = __floats2bfloat162_rn(values.data[0], values.data[1]);
    two[1] = __floats2bfloat162_rn(values.data[2], values.data[3]);
  }
  Packed<P, kPack> packed;
  memcpy(packed.word, two, sizeof(two));
  return packed;
}

// Roots and quotients by the instructions that nvcc makes of sqrtf() and /, without its branches for special cases.
// They are exact, and so equal to nvcc's, if no intermediate result is subnormal or overflows:
//   root(x)         x is 0, as in rows of an embedding that were never used, or x >= 2^-101, as for root_rn(). The root
//                   of inf and of a negative number becomes NaN
//   quotient(a, b)  a is 0, or |a| >= 2^-100; and b <= 2^20. Then a / b >= 2^-120, and its remainder is a multiple of
//                   2^-147. A quotient that overflows, and one by 0 or by a subnormal b, becomes inf or NaN
// is_exact() tests that for all elements of a pack, after they are computed. It needs the sum of the magnitudes of
// what the formula returned, because every formula makes NaN of such an inf or NaN, or keeps it.
class Quick {
 public:
  __device__ __forceinline__ float root(float x) {
    const uint32_t above = float_bits(x) - 1;  // of 0 it is the largest number
    square_ = above < square_ ? above : square_;
    return x == 0.0f ? x : root_rn(x);
  }

  __device__ __forceinline__ float quotient(float a, float b) {
    const uint32_t above = 2 * float_bits(a) - 1;  // without the sign; of 0 it is the largest number
    dividend_ = above < dividend_ ? above : dividend_;
    divisor_ = float_bits(b) > divisor_ ? float_bits(b) : divisor_;
#ifdef __CUDA_ARCH__
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    inverse = __fmaf_rn(inverse, __fmaf_rn(-b, inverse, 1.0f), inverse);
    const float near = __fmul_rn(a, inverse);
    return __fmaf_rn(-__fmaf_rn(b, near, -a), inverse, near);  // with these signs -0 / b is -0
#else
    return a / b;
#endif
  }

  __device__ __forceinline__ bool is_exact(float sum) const {
    const auto bits = [](int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; };
    return square_ >= bits(-101) - 1 && dividend_ >= 2 * bits(-100) - 1 && divisor_ <= bits(20) && is_finite(sum);
  }

 private:
  uint32_t square_ = ~0u, dividend_ = ~0u, divisor_ = 0;  // the least, the least and the largest, as bits
};

// Four neighbours in all arrays, from element i of the chunk on. A thread holds them. If not kWide, `count`
// of them are in the tensor, and the others are 0. All threads of a warp must call update() together.
template <class V, bool kWide>
class LeanPack {
  using P = typename V::P;
  template <int k>
  using StateQuad = Quad<typename V::template State<k>, kWide>;
  static constexpr int kAll = V::kStates;

 public:
  __device__ __forceinline__ void load(const LeanArrays<V>& arrays, int i, int count = kPack) {
    grad_.load(arrays.grad + i, count);
    weight_.load(arrays.weight + i, count);
    if constexpr (V::kIsSplit) remainder_.load(arrays.remainder + i, count);
    each_state<V>([&](auto k) {
      quad<k.value>().load(arrays.template state<k.value>() + i, count);
      // One thread reads the scale of a group, and later writes the new scale. If other threads read it too, nothing
      // would order their reads before the write, because a shuffle orders no memory accesses.
      if constexpr (V::kHasScales && V::is_coded(k.value)) {
        const float* const scale = arrays.scale[k.value] + group_of(i);
        assume_global(scale);
        scale_[k.value] = owns_scale() ? *scale : 0.0f;
      }
    });
  }

  // `words` are those of the chunk's groups.
  __device__ __forceinline__ void update(const LeanArrays<V>& arrays, const typename V::Formula& formula,
                                         const RandomWords* words, int i, int count = kPack) {
    float scale[2] = {};
    if constexpr (V::kHasScales) {
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (V::is_coded(k)) scale[k] = float_of(warp_max(bits_of(scale_[k])));  // scale_ is 0 in all threads but one
    }
    Numbers now;
    bool is_done = false;
    if constexpr (kWide) {
      Quick quick;
      bool joins = read_quickly(now, scale);
      now.apply(formula, quick);
      is_done = now.split_quickly(quick) && joins;
    }
    if constexpr (!kWide) {
      read(now, scale);
      now.apply(formula, Ieee());
      now.replace_nan(count);
      now.split();
    } else if (!is_done) {
      now.redo(arrays, formula, scale, i);
    }
    now.store_parameters(arrays, i, count);
    each_state<V>([&](auto k) { store<k.value>(arrays, now.s[k.value], words, i, count); });
  }

 private:
  template <int k>
  __device__ __forceinline__ auto& quad() {
    if constexpr (k == 0)
      return state0_;
    else if constexpr (k == 1)
      return state1_;
    else
      return state2_;
  }

  // The fp32 number that is stored as `element`.
  template <int k>
  __device__ __forceinline__ static float value(typename V::template State<k> element, [[maybe_unused]] float scale) {
    if constexpr (!V::is_coded(k)) {
      return element;
    } else if constexpr (!V::kHasScales) {
      return from_bf16_bits(element);
    } else {
      constexpr Code kCode = V::Formula::kCodes[k];
      return decoded<kCode>(kCode == Code::kMomentum ? static_cast<int8_t>(element) : element, scale);
    }
  }

  // Four elements in fp32.
  struct Numbers {
    Vector<float, kPack> p, g, s[3] = {};
    Packed<P, kPack> weights;
    Packed<int16_t, kPack> remainders;

    template <class Arithmetic>
    __device__ __forceinline__ void apply(const typename V::Formula& formula, Arithmetic&& arithmetic) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        float element[kAll];
#pragma unroll
        for (int k = 0; k < kAll; ++k) element[k] = s[k].data[j];
        p.data[j] = formula(p.data[j], g.data[j], element, arithmetic);
#pragma unroll
        for (int k = 0; k < kAll; ++k) s[k].data[j] = element[k];
      }
    }

    // store() takes only numbers and inf. An inf makes the scale of its group NaN, too.
    template <int k>
    __device__ __forceinline__ static float without_nan(float x) {
      if (!V::is_coded(k) || x == x) return x;
      return float_of(V::kHasScales ? kInfinityBits : 0x7fc00000u);
    }

    __device__ __forceinline__ void replace_nan(int count) {
      each_state<V>([&](auto k) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          float& x = s[k.value].data[j];
          x = j < count ? without_nan<k.value>(x) : 0.0f;  // beyond the tensor the formula may have made NaN
        }
      });
    }

    // Returns false if the parameters have to be computed once more, by read(), apply() and split().
    __device__ __forceinline__ bool split_quickly(const Quick& quick) {
      const float sum = fabsf(p.data[0]) + fabsf(p.data[1]) + fabsf(p.data[2]) + fabsf(p.data[3]);  // NaN if one is NaN
      if constexpr (!V::kIsSplit) return quick.is_exact(sum);
      if constexpr (V::kIsSplit) {
        using Remainder = Remainder<kDtypeOf<P>>;
        weights = rounded<P>(p);
        const Vector<P, kPack> elements = weights.unpacked();
        Vector<int16_t, kPack> of;
#pragma unroll
        for (int j = 0; j < kPack; ++j) of.data[j] = Remainder::of_finite(p.data[j], to_float(elements.data[j]));
        memcpy(remainders.word, of.data, sizeof(of));
        return quick.is_exact(sum) && sum <= Remainder::kMost;
      }
    }

    __device__ __forceinline__ void split() {
      if constexpr (V::kIsSplit) {
        Vector<P, kPack> elements;
        Vector<int16_t, kPack> of;
        cuda::split(p, elements, of);
        memcpy(weights.word, elements.data, sizeof(elements));
        memcpy(remainders.word, of.data, sizeof(of));
      }
    }

    // Reads and computes everything once more, with join(), split() and Ieee. That is done for one element after
    // another, because the registers of four were not enough.
    __device__ __forceinline__ void redo(const LeanArrays<V>& arrays, const typename V::Formula& formula,
                                         const float (&scale)[2], int i) {
#pragma unroll 1
      for (int end = i + kPack; i < end; ++i) {
        float element[kAll] = {}, parameter;
        if constexpr (V::kIsSplit)
          parameter = join(load_elements<1>(arrays.weight + i), load_elements<1>(arrays.remainder + i)).data[0];
        else
          parameter = load_elements<1>(arrays.weight + i).data[0];
        each_state<V>([&](auto k) {
          element[k.value] =
              value<k.value>(load_elements<1>(arrays.template state<k.value>() + i).data[0], scale[k.value & 1]);
        });
        const float grad = floats(load_elements<1>(arrays.grad + i)).data[0];
        parameter = formula(parameter, grad, element, Ieee());
        push(p, parameter);
        each_state<V>([&](auto k) { push(s[k.value], without_nan<k.value>(element[k.value])); });
        if constexpr (V::kIsSplit) {
          Vector<P, 1> weight;
          Vector<int16_t, 1> remainder;
          cuda::split(Vector<float, 1>{{parameter}}, weight, remainder);
          push(weights, weight.data[0]);
          push(remainders, remainder.data[0]);
        }
      }
    }

    __device__ __forceinline__ static void push(Vector<float, kPack>& numbers, float last) {
#pragma unroll
      for (int j = 1; j < kPack; ++j) numbers.data[j - 1] = numbers.data[j];
      numbers.data[kPack - 1] = last;
    }

    template <class T>
    __device__ __forceinline__ static void push(Packed<T, kPack>& packed, T last) {
      uint16_t bits;
      memcpy(&bits, &last, sizeof(bits));
      packed.word[0] = __byte_perm(packed.word[0], packed.word[1], 0x5432);
      packed.word[1] = packed.word[1] >> 16 | static_cast<uint32_t>(bits) << 16;
    }

    __device__ __forceinline__ void store_parameters(const LeanArrays<V>& arrays, int i, int count) const {
      if constexpr (V::kIsSplit) {
        Quad<P, kWide>::store(arrays.weight + i, weights.unpacked(), count);
        Quad<int16_t, kWide>::store(arrays.remainder + i, remainders.unpacked(), count);
      } else {
        Quad<P, kWide>::store(arrays.weight + i, p, count);
      }
    }
  };

  __device__ __forceinline__ void read_others(Numbers& now, const float (&scale)[2]) {
    now.g = floats(grad_.get());
    each_state<V>(
        [&](auto k) { now.s[k.value] = values<k.value>(k.value < 2 ? scale[k.value < 2 ? k.value : 0] : 0.0f); });
  }

  __device__ __forceinline__ void read(Numbers& now, const float (&scale)[2]) {
    read_others(now, scale);
    if constexpr (V::kIsSplit)
      now.p = join(weight_.get(), remainder_.get());
    else
      now.p = weight_.get();
  }

  // Returns false if a joined number does not round to its weight.
  __device__ __forceinline__ bool read_quickly(Numbers& now, const float (&scale)[2]) {
    read_others(now, scale);
    if constexpr (!V::kIsSplit) {
      now.p = weight_.get();
      return true;
    } else {
      const Vector<P, kPack> weights = weight_.get();
      const Vector<int16_t, kPack> remainders = remainder_.get();
#pragma unroll
      for (int j = 0; j < kPack; ++j)
        now.p.data[j] = Remainder<kDtypeOf<P>>::joined(to_float(weights.data[j]), remainders.data[j]);
      const Packed<P, kPack> found = rounded<P>(now.p);
      return ((found.word[0] ^ weight_.elements.word[0]) | (found.word[1] ^ weight_.elements.word[1])) == 0;
    }
  }

  // Whether this thread holds the first element of a group.
  __device__ __forceinline__ static bool owns_scale() { return threadIdx.x % 32 == 0; }

  __device__ __forceinline__ static unsigned group_of(int i) { return static_cast<unsigned>(i) / kStateGroup; }

  template <int k>
  __device__ __forceinline__ Vector<float, kPack> values([[maybe_unused]] float scale) {
    const auto elements = quad<k>().get();
    Vector<float, kPack> values;
    if constexpr (!V::kHasScales || !V::is_coded(k)) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) values.data[j] = value<k>(elements.data[j], scale);
    } else {
      // The code is put into the lower bits of 2^23. A conversion takes four times as long as this subtraction.
      constexpr Code kCode = V::Formula::kCodes[k];
      constexpr uint32_t kRaised = kCode == Code::kMomentum ? 128 : 0;  // makes codes with a sign positive
      uint32_t codes;
      memcpy(&codes, elements.data, sizeof(codes));
      codes ^= kRaised * 0x01010101u;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float code = float_of(__byte_perm(codes, 0x4b000000u, 0x7440u + j)) - (0x1p23f + kRaised);
        values.data[j] = decoded<kCode>(code, scale);
      }
    }
    return values;
  }

  template <int k>
  __device__ __forceinline__ static void store(const LeanArrays<V>& arrays, const Vector<float, kPack>& values,
                                               const RandomWords* words, int i, int count) {
    using T = typename V::template State<k>;
    Vector<T, kPack> elements;
    if constexpr (!V::is_coded(k)) {
      elements = values;
    } else {
#ifdef __CUDA_ARCH__
      __builtin_assume(__isShared(words));
#endif
      const GroupNoise bits = Noise::of(words[group_of(i)], k);
      const int at = static_cast<int>(threadIdx.x) % 32 * kPack;
      if constexpr (V::kHasScales) {
        constexpr Code kCode = V::Formula::kCodes[k];
        const float largest = larger_number(larger_number(fabsf(values.data[0]), fabsf(values.data[1])),
                                            larger_number(fabsf(values.data[2]), fabsf(values.data[3])));
        const StateGroup of(kCode, warp_max(bits_of(largest)));
        const uint32_t codes = four_codes<kCode>(values, of, bits, at);
        memcpy(elements.data, &codes, sizeof(codes));
        if (owns_scale()) {
          float* const scale = arrays.scale[k] + group_of(i);
          assume_global(scale);
          *scale = of.scale;
        }
      } else {
        uint32_t rounded[kPack];  // the upper 16 bits
#pragma unroll
        for (int j = 0; j < kPack; ++j) rounded[j] = float_bits(values.data[j]) + bits.at(at + j);
        const uint32_t words_of[2] = {__byte_perm(rounded[0], rounded[1], 0x7632),
                                      __byte_perm(rounded[2], rounded[3], 0x7632)};
        memcpy(elements.data, words_of, sizeof(words_of));
      }
    }
    Quad<T, kWide>::store(arrays.template state<k>() + i, elements, count);
  }

  Quad<typename V::G, kWide> grad_;
  Quad<typename V::P, kWide> weight_;
  Quad<int16_t, kWide> remainder_;
  StateQuad<0> state0_;
  StateQuad<1> state1_;
  StateQuad<2> state2_;
  float scale_[2];
};

// Updates the groups of a chunk from group `from` on. The elements of the last one, up to `size`, may be fewer.
template <class V>
__device__ __forceinline__ void update_each(const LeanArrays<V>& arrays, const typename V::Formula& formula,
                                            const RandomWords* words, int from, int size) {
  constexpr int kGroup = static_cast<int>(kStateGroup);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int group = from + warp; group * kGroup < size; group += kThreads / 32) {
    const int i = group * kGroup + lane * kPack, left = size - i;
    const int count = left < 0 ? 0 : left < kPack ? left : kPack;
    LeanPack<V, false> pack;
    pack.load(arrays, count > 0 ? i : group * kGroup, count);
    pack.update(arrays, formula, words, i, count);
  }
}

// Updates one pack of each thread, or two that are kThreads packs apart, and moves the pointers behind them.
template <int kPacks, class V>
__device__ __forceinline__ void update_together(LeanArrays<V>& arrays, const typename V::Formula& formula,
                                                const RandomWords*& words) {
  constexpr int kRow = kThreads * kPack;
  LeanPack<V, true> packs[kPacks];
#pragma unroll
  for (int n = 0; n < kPacks; ++n) packs[n].load(arrays, n * kRow);
#pragma unroll
  for (int n = 0; n < kPacks; ++n) packs[n].update(arrays, formula, words, n * kRow);
  arrays.advance(kPacks * kRow);
  move(words, kPacks * kRow / static_cast<int>(kStateGroup));
}

// Updates the full groups of a chunk. `packs` is the number of packs in them. All threads of a warp have equally many,
// because it is a multiple of 32.
template <class V>
__device__ __forceinline__ void update_full(LeanArrays<V>& arrays, const typename V::Formula& formula,
                                            const RandomWords* words, int packs) {
  int left = packs - static_cast<int>(threadIdx.x);
  arrays.advance(static_cast<int>(threadIdx.x) * kPack);
  move(words, static_cast<int>(threadIdx.x) / 32);
#pragma unroll 1
  for (; left > kThreads; left -= 2 * kThreads) update_together<2>(arrays, formula, words);
  if (left > 0) update_together<1>(arrays, formula, words);
}

template <class V>
using LeanWalk = ChunkWalk<V::kRows_, /*kBackwards=*/true>;

// Shared memory: the header of the walk, and then the random words of the groups of a chunk.
constexpr int kMostGroups = 65536 / kStateGroup;  // of a chunk (table.h)
template <class V>
constexpr int kWordsAt = (LeanWalk<V>::kWords * sizeof(int64_t) + 15) / 16 * 16;
template <class V>
constexpr size_t kLeanBytes = kWordsAt<V> + kMostGroups * sizeof(RandomWords);

template <class V>
__global__ void __launch_bounds__(kThreads, V::kResidentBlocks) update_lean_kernel(const Update update) {
  using Formula = typename V::Formula;
  LeanWalk<V> walk(update.table, nullptr, reinterpret_cast<int64_t*>(shared_memory()));
  auto* const words = reinterpret_cast<RandomWords*>(shared_memory() + kWordsAt<V>);
  if (is_skipped(update)) return;
  for (; walk.has_chunk(); walk.advance()) {
    LeanArrays<V> arrays(walk);
    if (arrays.grad == nullptr) continue;
    bool has[Formula::kStates];
#pragma unroll
    for (int k = 0; k < Formula::kStates; ++k) has[k] = V::has(k);
    // update_factor() is called for each chunk, because its result would take a register of the loops.
    const Formula formula = formula_of<Formula>(update, walk, update_factor(update), has);
    const int64_t rest = walk.rest();
    const int size = static_cast<int>(rest < update.table.chunk_size ? rest : update.table.chunk_size);
    // All threads of a warp need the same words. One thread computes the words of a group.
    const Noise noise{step_of(walk), walk.tensor()};
    for (int group = static_cast<int>(threadIdx.x); group * kStateGroup < size; group += kThreads)
      words[group] = noise.words(walk.begin() / kStateGroup + group);
    barrier();
    const int full = arrays.are_aligned() ? size / static_cast<int>(kStateGroup) : 0;
    update_each(arrays, formula, words, full, size);
    update_full(arrays, formula, words, full * 32);
  }
  end_update(update);
}

// Calls f with the kernel for a form, and with the bytes of shared memory that the kernel needs.
template <class Formula, class P, class G, class S, int kPresent, class F>
void with_lean_states(const Form& form, const F& f) {
  if constexpr (kPresent >= 1 << Formula::kStates) {
    throw std::invalid_argument("amp_kernels: no kernel has these states");
  } else {
    constexpr int kRequired = (1 << Formula::kRequired) - 1;
    if constexpr ((kPresent & kRequired) == kRequired && coded_states<Formula>(kPresent) != 0) {
      if (form.states == kPresent) {
        using V = LeanVariant<Formula, kPresent, P, G, S>;
        return f(update_lean_kernel<V>, kLeanBytes<V>);
      }
    }
    with_lean_states<Formula, P, G, S, kPresent + 1>(form, f);
  }
}

template <class Formula, class F>
void with_lean_kernel(const Form& form, const F& f) {
  if (form.split != (form.param_dtype != kFloat) || (form.grad_dtype != kFloat && form.grad_dtype != form.param_dtype))
    throw std::invalid_argument("amp_kernels: no kernel has these dtypes");
  with_dtype(form.param_dtype, [&](auto param) {
    using P = decltype(param);
    const auto with_grad = [&](auto grad) {
      using G = decltype(grad);
      if (form.state_dtype == kInt8)
        with_lean_states<Formula, P, G, uint8_t, 0>(form, f);
      else
        with_lean_states<Formula, P, G, uint16_t, 0>(form, f);
    };
    if (form.grad_dtype == kFloat)
      with_grad(float{});
    else
      with_grad(P{});
  });
}

}  // namespace amp_kernels::cuda
