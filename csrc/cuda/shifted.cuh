// Reads rows of 16-bit numbers 16 bytes at a time, wherever they begin:
//
//   memory, in aligned 16-byte words:  | low             | high            |
//   eight numbers:                            | p[0] ... p[7]    |             shift: bytes from `low` to p
#pragma once

#include <initializer_list>

#include "portable.h"

namespace amp_kernels::cuda {

// The memory from the first to the last element of a tensor, with the gaps between its rows. Kernels that take a Span
// read nothing outside of it, because the allocation may end there, and tools such as compute-sanitizer report reads
// beyond an allocation.
struct Span {
  uintptr_t first, end;

  struct Dimension {
    int64_t size, stride;
  };

  // The span of a tensor of 16-bit elements. The tensor must have at least one element.
  static Span of(const void* tensor, std::initializer_list<Dimension> dimensions) {
    int64_t last = 0;
    for (const Dimension& dimension : dimensions) last += (dimension.size - 1) * dimension.stride;
    const auto first = reinterpret_cast<uintptr_t>(tensor);
    return {first, first + 2 * (last + 1)};
  }

  // Whether the aligned words of 16 bytes that cover [from, to) lie inside the span.
  __device__ __forceinline__ bool has_words(const void* from, const void* to) const {
    return reinterpret_cast<uintptr_t>(from) / 16 * 16 >= first &&
           (reinterpret_cast<uintptr_t>(to) + 15) / 16 * 16 <= end;
  }
};

// Eight elements that are neighbours in memory. load() starts to load them, and all() or first() waits for them. In
// between, a thread starts other loads.
template <class T>
struct Shifted {
  static_assert(sizeof(T) == 2);

  int4 low, high;
  int shift;

  // Loads the aligned words of 16 bytes that hold any of the first `count` elements at p. Callers check with
  // Span::has_words that these words may be read.
  __device__ __forceinline__ void load(const T* p, int64_t count) {
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16);
    const int4* const aligned = reinterpret_cast<const int4*>(reinterpret_cast<uintptr_t>(p) - shift);
    assume_global(aligned);
    assume_global(aligned + 1);
    low = high = make_int4(0, 0, 0, 0);
    if (count > 0) low = aligned[0];
    if (shift != 0 && 2 * count > 16 - shift) high = aligned[1];
  }

  // Sets the eight elements. It is called in place of load() if they were loaded in another way.
  __device__ __forceinline__ void set(const Packed<T, 8>& pack) {
    shift = 0;
    memcpy(&low, pack.word, sizeof(low));
    high = make_int4(0, 0, 0, 0);
  }

  // All eight elements. If load() was called with a `count` below 8, the elements after the first `count` have no
  // defined value.
  __device__ __forceinline__ Packed<T, 8> all() const {
    uint32_t words[8];
    memcpy(words, &low, sizeof(low));
    memcpy(words + 4, &high, sizeof(high));
    // The words are selected step by step, because registers cannot be indexed.
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
    Packed<T, 8> pack;
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.word[i] = __byte_perm(words[i], words[i + 1], shift & 2 ? 0x5432 : 0x3210);
    return pack;
  }

  // The first `count` elements; the others are 0.
  __device__ __forceinline__ Packed<T, 8> first(int64_t count) const {
    Packed<T, 8> pack = all();
    if (count >= 8) return pack;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (count < 2 * i + 2) pack.word[i] = count < 2 * i + 1 ? 0 : pack.word[i] & 0xffff;
    return pack;
  }
};

// The first `count` of eight elements that are `stride` apart; the others are 0.
template <class T>
__device__ __forceinline__ Packed<T, 8> load_strided(const T* p, int64_t stride, int64_t count) {
  const Vector<T, 8> elements = load_each<8>(p, stride, count < 8 ? static_cast<int>(count) : 8);
  Packed<T, 8> result;
  memcpy(result.word, elements.data, sizeof(result.word));
  return result;
}

}  // namespace amp_kernels::cuda
