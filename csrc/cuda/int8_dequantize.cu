// From codes back to numbers, and the gradient of fake quantization: one pass each, walked as int8_walk.cuh draws.
//
//                                                                                bytes an element (16 bits, fp32)
//   dequantize         out = (code - zero_point) * scale                           3, 5
//   straight through   out = grad where low <= rint(x / scale) + zero_point <= 127,
//                      else 0                                                      6, 12
#include "int8_codes.cuh"
#include "int8_walk.cuh"

namespace amp_kernels::cuda {
namespace {

template <class T>
struct DequantizeOp {
  static constexpr int kPack = 16 / sizeof(T);
  // 64 bytes of codes a thread: 64 KB in flight on a multiprocessor, 48 by columns. For fp32, where a fifth of all
  // bytes are reads, 36 and 30.
  static constexpr int kEach = sizeof(T) == 4 ? 6 : 8;
  static constexpr int kResidentRows = sizeof(T) == 4 ? 6 : 4, kResidentColumns = sizeof(T) == 4 ? 5 : 3;
  using Raw = Packed<int8_t, kPack>;
  struct Group : Affine {
    float shift;  // what store() adds to 2^23 + 128 + code

    Group() = default;
    __device__ __forceinline__ explicit Group(const Affine& affine)
        : Affine(affine), shift(-8388736.0f - static_cast<float>(affine.zero_point)) {}

    // Differences that are integers below 2^24 are exact in fp32.
    __device__ __forceinline__ bool is_plain() const { return zero_point > -(1 << 22) && zero_point < 1 << 22; }
  };

  const int8_t* values;
  T* out;
  Scales scales;
  bool wide;

  __device__ __forceinline__ void move(int64_t, int64_t elements) { values += elements, out += elements; }

  __device__ __forceinline__ Affine affine(const Offsets& offsets) const { return scales.at(offsets); }

  template <class AffineAt>
  static __device__ __forceinline__ Vector<T, kPack> convert(const Vector<int8_t, kPack>& codes,
                                                             const AffineAt& affine_at) {
    Vector<T, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      result.data[k] = from_float<T>(value_of(codes.data[k], affine_at(k).scale, affine_at(k).zero_point));
    return result;
  }

  __device__ __forceinline__ void prefetch() const { amp_kernels::prefetch(values); }
  __device__ __forceinline__ Raw load(int64_t, int64_t offset) const { return load_wide<kPack>(values + offset); }

  // 2^23 with a byte in its low bits is the number 2^23 + byte: one instruction in place of a conversion.
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
  __device__ __forceinline__ void narrow(const Offsets& at, int count, const AffineAt& affine_at) const {
    const Vector<int8_t, kPack> codes = load_each<kPack>(values + at.out, 1, count);
    store_each(out + at.out, convert(codes, affine_at), 1, count);
  }
};

template <class T>
struct StraightThroughOp {
  static constexpr int kPack = 16 / sizeof(T);
  static constexpr int kEach = 2;  // of two arrays
  static constexpr int kResidentRows = 4, kResidentColumns = 3;
  using Group = BoundedAffine;
  struct Raw {
    Packed<T, kPack> grad, x;
  };

  const T* grad;
  const T* x;
  T* out;
  Scales scales;
  bool wide;

  __device__ __forceinline__ void move(int64_t x_elements, int64_t elements) {
    grad += elements, x += x_elements, out += elements;
  }

  __device__ __forceinline__ Affine affine(const Offsets& offsets) const { return scales.at(offsets); }

  template <class AffineAt>
  static __device__ __forceinline__ Vector<T, kPack> convert(const Vector<T, kPack>& grad, const Vector<T, kPack>& x,
                                                             const AffineAt& affine_at) {
    Vector<T, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      result.data[k] = keeps_gradient(to_float(x.data[k]), affine_at(k)) ? grad.data[k] : from_float<T>(0.0f);
    return result;
  }

  __device__ __forceinline__ void prefetch() const {
    amp_kernels::prefetch(grad);
    amp_kernels::prefetch(x);
  }

  __device__ __forceinline__ Raw load(int64_t x_offset, int64_t offset) const {
    return {load_wide<kPack>(grad + offset), load_wide<kPack>(x + x_offset)};
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
  __device__ __forceinline__ void narrow(const Offsets& at, int count, const AffineAt& affine_at) const {
    const Vector<T, kPack> result =
        convert(load_each<kPack>(grad + at.out, 1, count), load_each<kPack>(x + at.x, 1, count), affine_at);
    store_each(out + at.out, result, 1, count);
  }
};

}  // namespace

void launch_dequantize(const Dequantize& dequantize, Stream stream) {
  const Axes axes(dequantize.layout);
  with_dtype(dequantize.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Op = DequantizeOp<T>;
    const bool wide = axes.is_wide(dequantize.values, 1, Op::kPack, &Axis::out) &&
                      axes.is_wide(dequantize.out, sizeof(T), Op::kPack, &Axis::out);
    launch_pass(Op{dequantize.values,
                   static_cast<T*>(dequantize.out),
                   {dequantize.scale, dequantize.zero_point, nullptr},
                   wide},
                axes, stream);
  });
}

void launch_straight_through(const StraightThrough& pass, Stream stream) {
  const Axes axes(pass.layout);
  with_dtype(pass.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Op = StraightThroughOp<T>;
    const auto is_wide = [&](const void* p, int64_t Axis::* stride) {
      return axes.is_wide(p, sizeof(T), Op::kPack, stride);
    };
    const bool wide = is_wide(pass.grad, &Axis::out) && is_wide(pass.x, &Axis::x) && is_wide(pass.out, &Axis::out);
    launch_pass(Op{static_cast<const T*>(pass.grad),
                   static_cast<const T*>(pass.x),
                   static_cast<T*>(pass.out),
                   {pass.scale, pass.zero_point, nullptr},
                   wide},
                axes, stream);
  });
}

}  // namespace amp_kernels::cuda
