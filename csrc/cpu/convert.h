// Converts blocks of fp32, fp16 or bf16 to fp32 and back, rounding to nearest even.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../table.h"
#include "prefetch.h"

namespace amp_kernels::cpu {

using Half = torch::headeronly::Half;
using BFloat16 = torch::headeronly::BFloat16;

template <class T>
constexpr Dtype kDtypeOf = std::is_same_v<T, float>  ? kFloat
                           : std::is_same_v<T, Half> ? kHalf
                                                     : kBFloat16;

// Calls f with a zero of the dtype's C++ type. f uses only the type of this argument.
template <class F>
auto with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case kHalf:
      return f(Half{});
    case kBFloat16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

// While a thread works on chunk c, it calls prefetch_head() for chunk c + kChunksAhead.
constexpr int64_t kChunksAhead = 8;

// Prefetches the first elements of a later chunk, in the array whose address is in row `row` of the table. While a
// thread works on a chunk, it may also prefetch within the chunk, some distance ahead. A small tensor has only one
// chunk, which is too short for that. Without prefetch_head(), each array of such a chunk would begin with a cache
// miss.
template <class T>
void prefetch_head(const Table& table, const Chunk& chunk, int row) {
  prefetch(chunk.in<const T>(table, row), std::min<int64_t>(chunk.size, 256));
}

// Eight fp32 lanes, which g++ and clang map to AVX2 or a pair of NEON registers.
constexpr int kLanes = 8;
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Integers = int32_t __attribute__((vector_size(4 * kLanes)));

// Returns the bits of `from`, unchanged, as a value of type To. This function, and those below that take or return
// vectors, are always inlined, because a call would pass vectors through memory.
template <class To, class From>
[[gnu::always_inline]] inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

[[gnu::always_inline]] inline Lanes load_lanes(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

[[gnu::always_inline]] inline void store_lanes(const Lanes& lanes, float* to) {
  std::memcpy(to, &lanes, sizeof(lanes));
}

[[gnu::always_inline]] inline Lanes load_lanes(const Half* from) {
#if defined(__F16C__) && defined(__AVX2__)  // without intrinsics, g++ 12 does not use F16C for vectors
  return as<Lanes>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(from[i]);
  return lanes;
#endif
}

[[gnu::always_inline]] inline void store_lanes(const Lanes& lanes, Half* to) {
#if defined(__F16C__) && defined(__AVX2__)
  const __m128i rounded = _mm256_cvtps_ph(as<__m256>(lanes), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), rounded);
#else
  for (int i = 0; i < kLanes; ++i) to[i] = Half(lanes[i]);
#endif
}

// bf16 is converted to fp32 and back by integer arithmetic. With AVX2 this takes intrinsics, because g++ 12 would split
// the conversion of a generic vector of eight integers into two halves.
[[gnu::always_inline]] inline Lanes load_lanes(const BFloat16* from) {
#if defined(__AVX2__)
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return as<Lanes>(_mm256_slli_epi32(words, 16));
#else
  Words words;
  for (int i = 0; i < kLanes; ++i) words[i] = static_cast<uint32_t>(from[i].x) << 16;
  return as<Lanes>(words);
#endif
}

// Rounds each lane to bf16. The result is in the low 16 bits of the word.
[[gnu::always_inline]] inline Words rounded_to_bf16(const Lanes& lanes) {
  const Words bits = as<Words>(lanes);
  // Without `nan`, a NaN whose payload is in the low 16 bits could be rounded to inf.
  const Words nan = Words{} + 0x7fc0u, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return lanes == lanes ? rounded : nan;
}

[[gnu::always_inline]] inline void store_bf16(const Words& high, BFloat16* to) {
#if defined(__AVX2__)
  const __m256i words = as<__m256i>(high);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
#else
  for (int i = 0; i < kLanes; ++i) to[i].x = static_cast<uint16_t>(high[i]);
#endif
}

[[gnu::always_inline]] inline void store_lanes(const Lanes& lanes, BFloat16* to) {
  store_bf16(rounded_to_bf16(lanes), to);
}

// Stores like store_lanes(), but past the caches (stream() below explains this). `to` must be aligned to 16 bytes.
template <class T>
[[gnu::always_inline]] inline void stream_lanes(const Lanes& lanes, T* to) {
#if defined(__SSE2__)
  T row[kLanes];
  store_lanes(lanes, row);
  for (size_t byte = 0; byte < sizeof(row); byte += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(reinterpret_cast<char*>(to) + byte),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(reinterpret_cast<const char*>(row) + byte)));
#else
  store_lanes(lanes, to);
#endif
}

// Converts int32 to fp32. With AVX2 this takes an intrinsic, because g++ 12 would split the conversion into two halves.
[[gnu::always_inline]] inline Lanes as_floats(const Integers& integers) {
#if defined(__AVX2__)
  return as<Lanes>(_mm256_cvtepi32_ps(as<__m256i>(integers)));
#else
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(integers[i]);
  return lanes;
#endif
}

// Converts n elements of type T to fp32.
template <class T>
void load(const T* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_lanes(load_lanes(from + i), to + i);
  if (i == n) return;
  T rest[kLanes] = {};
  float staged[kLanes];
  std::copy_n(from + i, n - i, rest);
  store_lanes(load_lanes(rest), staged);
  std::copy_n(staged, n - i, to + i);
}

// Converts n fp32 elements to type T, rounding to nearest even.
template <class T>
void store(const float* from, T* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_lanes(load_lanes(from + i), to + i);
  if (i == n) return;
  float staged[kLanes] = {};
  T rest[kLanes];
  std::copy_n(from + i, n - i, staged);
  store_lanes(load_lanes(staged), rest);
  std::copy_n(rest, n - i, to + i);
}

// Returns n elements as fp32. If `from` is fp32 already, returns `from` itself. Otherwise writes a converted copy to
// `staged`, and returns `staged`.
inline const float* as_float(const float* from, float*, int64_t) { return from; }

template <class T>
const float* as_float(const T* from, float* staged, int64_t n) {
  load(from, staged, n);
  return staged;
}

// Copies n elements by stores that bypass the caches. An ordinary store first reads the cache line that it overwrites.
// In an update, such reads of the weights would be a tenth of the memory traffic. Nothing is lost if the new weights
// are not in a cache, because they are not read before the next forward pass.
//
// Another thread may read the copy only after this thread has called fence_streams(). share() (parallel.h) calls
// fence_streams() once, at the end of a thread's work. A call takes a few hundred nanoseconds, which would be too long
// for a call after each row of a matrix.
template <class T>
void stream(const T* from, T* to, int64_t n) {
  int64_t i = 0;
#if defined(__SSE2__)
  constexpr int64_t kStep = 16 / sizeof(T);
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
    for (; i + kStep <= n; i += kStep)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
  std::memcpy(to + i, from + i, (n - i) * sizeof(T));
}

// Waits until everything that this thread has streamed is in memory.
inline void fence_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace amp_kernels::cpu
