// Blocks of fp32, fp16 or bf16 to fp32 and back, rounding to nearest even.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../table.h"

namespace amp_kernels::cpu {

using Half = torch::headeronly::Half;
using BFloat16 = torch::headeronly::BFloat16;

// Calls f with a value of the C++ type that the code stands for.
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

// Whether a core reads long streams faster when it is told what comes. On a Xeon (Sapphire Rapids, 2 cores) the gradient
// pass gains half as much again; an EPYC (Zen 4, 2 cores) fetches ahead better by itself, and asking costs it a fifth.
inline bool asks_ahead() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel");
#else
  return true;
#endif
}

// Asks for n elements that will be read soon; addresses past the end are harmless.
template <class T>
void prefetch(const T* from, int64_t n) {
  const char* line = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(line + i);
}

constexpr int64_t kChunksAhead = 8;

// The same for the head of a chunk that comes later: with small tensors no chunk is long enough to prefetch itself, and
// each of its arrays begins with a miss.
template <class T>
void prefetch_head(const Table& table, const Chunk& chunk, int row) {
  prefetch(chunk.in<const T>(table, row), std::min<int64_t>(chunk.size, 256));
}

inline void load(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

inline void store(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

inline void load(const Half* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX2__)  // g++ 12 does not vectorise _Float16 with F16C by itself
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

inline void store(const float* from, Half* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) to[i] = Half(from[i]);
}

// bf16 in integer arithmetic, which g++ vectorises; the constructors of torch's BFloat16 it does not.
inline void load(const BFloat16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i].x) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

inline void store(const float* from, BFloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // A NaN whose payload sits in the low bits would round to inf.
    to[i].x = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

// n elements as fp32: where they lie, or converted into `staged`.
inline const float* as_float(const float* from, float*, int64_t) { return from; }

template <class T>
const float* as_float(const T* from, float* staged, int64_t n) {
  load(from, staged, n);
  return staged;
}

// Copies past the caches. An ordinary store reads a line before it overwrites it, which for a weight that
// nobody reads before the next forward pass is a tenth of an update's traffic. Call fence_streams before
// another thread may read.
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

inline void fence_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace amp_kernels::cpu
