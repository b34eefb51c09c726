// Split masters: the fp32 master of a 16-bit weight is stored as two halves of 16 bits. One half is the weight itself,
// which is the master rounded to nearest even. The other half is an int16 remainder, the distance from the weight to
// the master.
//
//   bf16:  bits(master) = bits(weight) + remainder
//   fp16:  master = weight + remainder * ulp(weight) / 2^16
//
//            weight - ulp/2                 weight                 weight + ulp/2
//                 |----------------------------+----------------------------|
//   remainder  -32768                          0                          32767
//
// Where a stored master differs from the given one:
//   bf16   2^16 + 1 masters round to each even weight, but there are only 2^16 remainders. The master farthest from 0,
//          a tie, has no remainder of its own. It is stored as its neighbour, which is one fp32 unit closer to 0
//   fp16   masters with a magnitude of at least 2^-16 are stored exactly. Smaller masters are stored to within 2^-40.
//          A master that rounds beyond 65504 becomes infinite
//
// Other code may write a weight. The remainder then still belongs to the old weight. Therefore, whenever a master is
// read, weight and remainder are joined, and the result is rounded. If the rounded number is not the weight, bit for
// bit, the weight is taken as the master. Otherwise the joined number is the master, and it is at most half an ulp away
// from the weight.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
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
  static constexpr float kMost = std::numeric_limits<float>::infinity();  // of_finite() takes masters up to this one

  // Joins weight and remainder. The caller must check that the result rounds to `weight`. If it does not, the caller
  // must take `weight` instead.
  static AMP_KERNELS_HD float joined(float weight, int32_t remainder) {
    return float_of(bits_of(weight) + static_cast<uint32_t>(remainder));
  }

  // The remainder of a master. `weight` must be the rounded master.
  static AMP_KERNELS_HD int32_t of(float master, float weight) {
    const auto difference = static_cast<int32_t>(bits_of(master) - bits_of(weight));
    const int32_t fits = difference < 32767 ? difference : 32767;
    return master == master ? fits : 0;
  }

  // The remainder of a master whose magnitude is at most kMost. It takes fewer instructions.
  static AMP_KERNELS_HD int16_t of_finite(float master, float weight) {
    const auto difference = static_cast<int32_t>(bits_of(master) - bits_of(weight));
    return static_cast<int16_t>(difference < 32767 ? difference : 32767);
  }
};

template <>
struct Remainder<kHalf> {
  static constexpr float kMost = 65504.0f;

  static AMP_KERNELS_HD float joined(float weight, int32_t remainder) {
    return weight + static_cast<float>(remainder) * float_of(exponent(weight) - (26 << 23));
  }

  static AMP_KERNELS_HD int32_t of(float master, float weight) {
    const uint32_t e = exponent(weight);
    const float units = (master - weight) * float_of((280u << 23) - e);  // exact, because the factor is a power of 2
    const float fits = units < 32767.0f ? (units > -32767.0f ? units : -32767.0f) : 32767.0f;
    return e == 255 << 23 ? 0 : static_cast<int32_t>(rintf(fits));
  }

  static AMP_KERNELS_HD int16_t of_finite(float master, float weight) {
    constexpr float kZero = 0x1.8p23f;  // its neighbours are 1 apart, and its lower 16 bits are 0
    const float units = fmaf(master - weight, float_of((280u << 23) - exponent(weight)), kZero);
    const float below = units < kZero + 32767.0f ? units : kZero + 32767.0f;
    return static_cast<int16_t>(bits_of(below > kZero - 32767.0f ? below : kZero - 32767.0f));
  }

 private:
  // The bits of 2^e, where e is the exponent of an fp16 number. Subnormal numbers have the exponent of the smallest
  // normal one.
  static AMP_KERNELS_HD uint32_t exponent(float weight) {
    const uint32_t e = bits_of(weight) & 0xff << 23;
    return e < 113 << 23 ? 113 << 23 : e;
  }
};

// Calls f with a zero of the type of the elements to which row kMaster of the table points. The type is int16_t if
// these are remainders (`split`), otherwise float. P is the type of the parameters, and G is the type of the gradients.
// If the parameters are fp32, and there are remainders, then the parameters are averages, and the gradients are 16-bit
// weights (kJoinsGrad). Averages have no states. So for fp32 parameters, f(int16_t) is not compiled if the formula has
// required states or if G is float. A call with `split` then throws.
template <class Formula, class P, class G, class F>
void with_master(bool split, const F& f) {
  if (!split) return f(float{});
  constexpr bool kFollows = !std::is_same_v<G, float> && Formula::kRequired == 0;
  if constexpr (!std::is_same_v<P, float> || kFollows)
    f(int16_t{});
  else
    throw std::invalid_argument(std::string("amp_kernels: an average cannot be updated by ") + Formula::kName);
}

// Whether row kMaster holds remainders of the gradients. It does if the parameters are averages (table.h). P is the
// type of the parameters, and M is the type of the elements of row kMaster.
template <class P, class M>
constexpr bool kJoinsGrad = std::is_same_v<P, float> && std::is_same_v<M, int16_t>;

}  // namespace amp_kernels
