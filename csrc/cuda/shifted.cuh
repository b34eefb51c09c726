// Rows of 16-bit numbers that begin anywhere, read 16 bytes at a time.
#pragma once

#include <initializer_list>

#include "portable.h"

namespace amp_kernels::cuda {

// The bytes from the first to the last element of a tensor, with what lies between its rows. No kernel reads any other:
// behind them the allocation may end, and tools such as compute-sanitizer report it.
struct Span {
  uintptr_t first, end;

  struct Dimension {
    int64_t size, stride;
  };

  // Of 16-bit elements; there are some.
  static Span of(const void* tensor, std::initializer_list<Dimension> dimensions) {
    int64_t last = 0;
    for (const Dimension& dimension : dimensions) last += (dimension.size - 1) * dimension.stride;
    const auto first = reinterpret_cast<uintptr_t>(tensor);
    return {first, first + 2 * (last + 1)};
  }

  // Whether all aligned words of 16 bytes that hold something of [from, to) lie inside.
  __device__ __forceinline__ bool has_words(const void* from, const void* to) const {
    return reinterpret_cast<uintptr_t>(from) / 16 * 16 >= first &&
           (reinterpret_cast<uintptr_t>(to) + 15) / 16 * 16 <= end;
  }
};

// Eight neighbours in memory, in two steps so that many loads can be under way.
template <class T>
struct Shifted {
  static_assert(sizeof(T) == 2);

  int4 low, high;
  int shift;

  // At p, which is aligned to an element; `count` of them exist. What is read are the aligned words of 16 bytes that
  // hold one of those: callers ask Span::has_words first.
  __device__ __forceinline__ void load(const T* p, int64_t count) {
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16);
    const int4* const aligned = reinterpret_cast<const int4*>(reinterpret_cast<uintptr_t>(p) - shift);
    assume_global(aligned);
    assume_global(aligned + 1);
    low = high = make_int4(0, 0, 0, 0);
    if (count > 0) low = aligned[0];
    if (shift != 0 && 2 * count > 16 - shift) high = aligned[1];
  }

  // Eight that were read in another way.
  __device__ __forceinline__ void set(const Packed<T, 8>& pack) {
    shift = 0;
    memcpy(&low, pack.word, sizeof(low));
    high = make_int4(0, 0, 0, 0);
  }

  // Those that do not exist are whatever memory holds.
  __device__ __forceinline__ Packed<T, 8> all() const {
    uint32_t words[8];
    memcpy(words, &low, sizeof(low));
    memcpy(words + 4, &high, sizeof(high));
    // By selections, because registers have no index.
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
    Packed<T, 8> pack;
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.word[i] = __byte_perm(words[i], words[i + 1], shift & 2 ? 0x5432 : 0x3210);
    return pack;
  }

  // Those from `count` on are 0.
  __device__ __forceinline__ Packed<T, 8> first(int64_t count) const {
    Packed<T, 8> pack = all();
    if (count >= 8) return pack;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (count < 2 * i + 2) pack.word[i] = count < 2 * i + 1 ? 0 : pack.word[i] & 0xffff;
    return pack;
  }
};

// Eight elements `stride` apart; those from `count` on are 0.
template <class T>
__device__ __forceinline__ Packed<T, 8> load_strided(const T* p, int64_t stride, int64_t count) {
  const Vector<T, 8> elements = load_each<8>(p, stride, count < 8 ? static_cast<int>(count) : 8);
  Packed<T, 8> result;
  memcpy(result.word, elements.data, sizeof(result.word));
  return result;
}

}  // namespace amp_kernels::cuda
