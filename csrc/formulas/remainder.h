// Split masters: the fp32 master of a 16-bit weight, kept in 32 bits. One half is the weight itself, which is the
// master rounded to nearest even. The other is an int16 remainder: the distance from the weight to the master.
//
//   bf16:  bits(master) = bits(weight) + remainder
//   fp16:  master = weight + remainder * ulp(weight) / 2^16
//
//            weight - ulp/2                 weight                 weight + ulp/2
//                 |----------------------------+----------------------------|
//   remainder  -32768                          0                          32767
//
// What is lost:
//   bf16   2^16 + 1 masters round to an even weight; of its two ties, the one farther from 0 is stored as its neighbour
//   fp16   nothing from 2^-16 on; a smaller master is stored to within 2^-40; one that rounds beyond 65504 is infinite
//
// If other code writes a weight, the remainder stays that of the old weight. If weight and remainder then join to a
// number that does not round to the weight, bit for bit, the master is the weight. Otherwise the master is at most half
// an ulp away from the weight.
#pragma once

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../table.h"

namespace amp_kernels {

AMP_KERNELS_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

AMP_KERNELS_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

template <Dtype kWeight>
struct Remainder;

template <>
struct Remainder<kBFloat16> {
  // The master, if it rounds to `weight`. If not, the caller takes the weight.
  static AMP_KERNELS_HD float joined(float weight, int32_t remainder) {
    return float_of(bits_of(weight) + static_cast<uint32_t>(remainder));
  }

  // The remainder of a master. `weight` is the master, rounded.
  static AMP_KERNELS_HD int32_t of(float master, float weight) {
    const auto difference = static_cast<int32_t>(bits_of(master) - bits_of(weight));
    const int32_t fits = difference < 32767 ? difference : 32767;
    return master == master ? fits : 0;
  }
};

template <>
struct Remainder<kHalf> {
  static AMP_KERNELS_HD float joined(float weight, int32_t remainder) {
    return weight + static_cast<float>(remainder) * float_of((exponent(weight) - 26) << 23);
  }

  static AMP_KERNELS_HD int32_t of(float master, float weight) {
    const uint32_t e = exponent(weight);
    const float units = (master - weight) * float_of((280 - e) << 23);  // a power of 2: exact
    const float fits = units < 32767.0f ? (units > -32767.0f ? units : -32767.0f) : 32767.0f;
    return e == 255 ? 0 : static_cast<int32_t>(rintf(fits));
  }

 private:
  // The exponent of an fp16 number, biased as in fp32. Subnormal numbers have the exponent of the smallest normal one.
  static AMP_KERNELS_HD uint32_t exponent(float weight) {
    const uint32_t e = bits_of(weight) >> 23 & 0xff;
    return e < 113 ? 113 : e;
  }
};

// Calls f with a zero of the type of row kMaster: int16_t if it holds remainders (`split`), else float. P and G are the
// types of parameters and gradients. fp32 parameters with remainders are averages (kJoinsGrad). They have no states, so
// that formulas with required states get no kernels for them.
template <class Formula, class P, class G, class F>
void with_master(bool split, const F& f) {
  if (!split) return f(float{});
  constexpr bool kFollows = !std::is_same_v<G, float> && Formula::kRequired == 0;
  if constexpr (!std::is_same_v<P, float> || kFollows)
    f(int16_t{});
  else
    throw std::invalid_argument(std::string("amp_kernels: no average is made by ") + Formula::kName);
}

// Whether row kMaster, of type M, holds the remainders of the gradients. It does for averages (table.h).
template <class P, class M>
constexpr bool kJoinsGrad = std::is_same_v<P, float> && std::is_same_v<M, int16_t>;

}  // namespace amp_kernels
