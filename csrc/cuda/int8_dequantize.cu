// Dequantization, and the gradient of fake quantization ("straight through"). Each is one pass over memory, in one of
// the walks that int8_walk.cuh draws.
//
//                                                                                bytes per element (16-bit, fp32)
//   dequantize         out = (code - zero_point) * scale                           3, 5
//   straight through   out = grad where low <= rint(x * (1 / scale)) + zero_point <= 127,
//                      else 0                                                      6, 12
#include "int8_codes.cuh"
#include "int8_walk.cuh"

namespace amp_kernels::cuda {
namespace {

template <class T>
struct DequantizeOp {
  static constexpr int kPack = 16 / sizeof(T);
  // With 16-bit results, a thread loads 64 bytes of codes before it waits. A multiprocessor then has 64 KB of loads in
  // flight by rows, and 48 KB by columns. With fp32 results, a thread loads 24 bytes before it waits. A multiprocessor
  // then has 36 KB in flight by rows, and 30 KB by columns. That is enough, because only a fifth of all bytes are then
  // reads.
  static constexpr int kEach = sizeof(T) == 4 ? 6 : 8;
  static constexpr int kResidentRows = sizeof(T) == 4 ? 6 : 4, kResidentColumns = sizeof(T) == 4 ? 5 : 3;
  using Raw = Packed<int8_t, kPack>;
  struct Group : Affine {
    float shift;  // -(2^23 + 128 + zero_point): added to 2^23 + 128 + code, it gives code - zero_point

    Group() = default;
    __device__ __forceinline__ explicit Group(const Affine& affine)
        : Affine(affine), shift(-8388736.0f - static_cast<float>(affine.zero_point)) {}

    // Before store() multiplies by the scale, it adds two numbers: 2^23 + 128 + code, and `shift`. If the magnitude of
    // the zero point is below 2^22, these numbers and their sum are integers with magnitudes below 2^24, which fp32
    // holds exactly.
    __device__ __forceinline__ bool is_plain() const { return zero_point > -(1 << 22) && zero_point < 1 << 22; }
  };

  const int8_t* values;
  T* out;
  Scales scales;
  bool wide;

  __device__ __forceinline__ Affine affine(int64_t group) const { return scales.at(group); }

  template <class AffineAt>
  static __device__ __forceinline__ Vector<T, kPack> convert(const Vector<int8_t, kPack>& codes,
                                                             const AffineAt& affine_at) {
    Vector<T, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      result.data[k] = from_float<T>(value_of(codes.data[k], affine_at(k).scale, affine_at(k).zero_point));
    return result;
  }

  __device__ __forceinline__ void prefetch(int64_t offset) const { amp_kernels::prefetch(values + offset); }
  __device__ __forceinline__ Raw load(int64_t offset) const { return load_wide<kPack>(values + offset); }

  // The xor turns each code into an unsigned byte with the value `code + 128`. The fp32 number 2^23 with that byte as
  // its low bits is the number 2^23 + byte. So one __byte_perm replaces a conversion.
  template <class AffineAt>
  __device__ __forceinline__ bool store(const Raw& raw, int64_t offset, const AffineAt& affine_at) const {
    Vector<T, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const uint32_t bits = __byte_perm(raw.word[k / 4] ^ 0x80808080u, 0x4b000000u, 0x7650 + k % 4);
      float shifted;
      memcpy(&shifted, &bits, sizeof(bits));
      result.data[k] = from_float<T>(multiply_rn(add_rn(shifted, affine_at(k).shift), affine_at(k).scale));
    }
    store_wide(out + offset, result);
    return true;
  }

  template <class AffineAt>
  __device__ __forceinline__ void narrow(int64_t offset, int count, const AffineAt& affine_at) const {
    const Vector<int8_t, kPack> codes = load_each<kPack>(values + offset, 1, count);
    store_each(out + offset, convert(codes, affine_at), 1, count);
  }
};

template <class T>
struct StraightThroughOp {
  static constexpr int kPack = 16 / sizeof(T);
  static constexpr int kEach = 2;  // 2 packs of `grad` and 2 packs of x
  static constexpr int kResidentRows = 4, kResidentColumns = sizeof(T) == 4 ? 4 : 3;
  using Group = BoundedAffine;
  struct Raw {
    Packed<T, kPack> grad, x;
  };

  const T* grad;
  const T* x;
  T* out;
  Scales scales;
  bool wide;

  __device__ __forceinline__ Affine affine(int64_t group) const { return scales.at(group); }

  template <class AffineAt>
  static __device__ __forceinline__ Vector<T, kPack> convert(const Vector<T, kPack>& grad, const Vector<T, kPack>& x,
                                                             const AffineAt& affine_at) {
    Vector<T, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      result.data[k] = keeps_gradient(to_float(x.data[k]), affine_at(k)) ? grad.data[k] : from_float<T>(0.0f);
    return result;
  }

  __device__ __forceinline__ void prefetch(int64_t offset) const {
    amp_kernels::prefetch(grad + offset);
    amp_kernels::prefetch(x + offset);
  }

  __device__ __forceinline__ Raw load(int64_t offset) const {
    return {load_wide<kPack>(grad + offset), load_wide<kPack>(x + offset)};
  }

  template <class AffineAt>
  __device__ __forceinline__ bool store(const Raw& raw, int64_t offset, const AffineAt& affine_at) const {
    Vector<T, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float steps = add_rn(multiply_rn(to_float(raw.x.unpacked().data[k]), affine_at(k).inverse), kMagic);
      const bool is_outside = steps < affine_at(k).lowest + kMagic || steps > affine_at(k).highest + kMagic;
      result.data[k] = is_outside ? from_float<T>(0.0f) : raw.grad.unpacked().data[k];
    }
    store_wide(out + offset, result);
    return true;
  }

  template <class AffineAt>
  __device__ __forceinline__ void narrow(int64_t offset, int count, const AffineAt& affine_at) const {
    const Vector<T, kPack> result =
        convert(load_each<kPack>(grad + offset, 1, count), load_each<kPack>(x + offset, 1, count), affine_at);
    store_each(out + offset, result, 1, count);
  }
};

}  // namespace

void launch_dequantize(const Dequantize& dequantize, Stream stream) {
  const Int8Layout& layout = dequantize.layout;
  with_dtype(dequantize.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Op = DequantizeOp<T>;
    const bool wide =
        is_wide(layout, dequantize.values, 1, Op::kPack) && is_wide(layout, dequantize.out, sizeof(T), Op::kPack);
    launch_pass(Op{dequantize.values,
                   static_cast<T*>(dequantize.out),
                   {dequantize.scale, dequantize.zero_point, nullptr},
                   wide},
                layout, stream);
  });
}

void launch_straight_through(const StraightThrough& pass, Stream stream) {
  const Int8Layout& layout = pass.layout;
  with_dtype(pass.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Op = StraightThroughOp<T>;
    const auto takes_packs = [&](const void* array) { return is_wide(layout, array, sizeof(T), Op::kPack); };
    const bool wide = takes_packs(pass.grad) && takes_packs(pass.x) && takes_packs(pass.out);
    launch_pass(Op{static_cast<const T*>(pass.grad),
                   static_cast<const T*>(pass.x),
                   static_cast<T*>(pass.out),
                   {pass.scale, pass.zero_point, nullptr},
                   wide},
                layout, stream);
  });
}

}  // namespace amp_kernels::cuda
