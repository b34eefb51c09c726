// The tiles (tiles.h) that multiply fp32 rows by int8 codes. Codes are converted to fp32 in registers, and products are
// added by FMA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tiles.h"

namespace amp_kernels::cpu {

#if defined(__x86_64__)

// In multiply(), each dword (4 bytes) of `right` holds four codes of one column. Step i of the loop over these four
// converts byte i of every dword to fp32. The result stays in the lane of its dword. Avx2FloatTile does the same.
struct Avx512FloatTile {
  using Left = float;
  using Sum = float;
  static constexpr int kRows = 12, kColumns = 32, kShift = 0, kDotShift = 0;
  static constexpr int64_t kDepth = kFloatDepth;
  static constexpr int64_t kDotDepth = 64;

  static bool runs() { return __builtin_cpu_supports("avx512f"); }

  static void widen(const float* four, Left* to) { std::memcpy(to, four, 16); }

  template <int kTileRows>
  __attribute__((target("avx512f"))) static void multiply(const LeftTile<Left>& tile, const int8_t* right,
                                                          int64_t groups, Sum* sums, bool first) {
    __m512 sum[kTileRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const Left *left = tile.data, *next = tile.next;
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, next += 4 * kTileRows, right += 4 * kColumns) {
      prefetch<Cache::kL2>(next, 4 * kTileRows);
#pragma GCC unroll 16
      for (int i = 0; i < 4; ++i) {
        __m512 codes[2];
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) {
          const __m512i bytes = _mm512_loadu_si512(right + 64 * v);
          codes[v] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 24 - 8 * i), 24));
        }
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
          const __m512 row = _mm512_set1_ps(left[4 * r + i]);
#pragma GCC unroll 16
          for (int v = 0; v < 2; ++v) sum[r][v] = _mm512_fmadd_ps(row, codes[v], sum[r][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        Sum* to = sums + r * kColumns + 16 * v;
        _mm512_storeu_ps(to, first ? sum[r][v] : _mm512_add_ps(_mm512_loadu_ps(to), sum[r][v]));
      }
    }
  }

  template <int kDots>
  __attribute__((target("avx512f"))) static void dot(const Left* left, int64_t left_stride, const int8_t* right,
                                                     int64_t k, Sum* sums, int64_t sum_stride) {
    __m512 sum[kDots][4];
#pragma GCC unroll 16
    for (int r = 0; r < kDots; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += kDotDepth) {
      const int8_t* block = right + std::min(i, k - kDotDepth);
      __builtin_prefetch(block + kDotAhead);
#pragma GCC unroll 16
      for (int v = 0; v < 4; ++v) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * v));
        const __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#pragma GCC unroll 16
        for (int r = 0; r < kDots; ++r)
          sum[r][v] = _mm512_fmadd_ps(codes, _mm512_loadu_ps(left + r * left_stride + i + 16 * v), sum[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kDots; ++r) {
      const __m512 all = _mm512_add_ps(_mm512_add_ps(sum[r][0], sum[r][1]), _mm512_add_ps(sum[r][2], sum[r][3]));
      sums[r * sum_stride] = _mm512_reduce_add_ps(all);
    }
  }
};

struct Avx2FloatTile {
  using Left = float;
  using Sum = float;
  static constexpr int kRows = 6, kColumns = 16, kShift = 0, kDotShift = 0;
  static constexpr int64_t kDepth = kFloatDepth;
  static constexpr int64_t kDotDepth = 16;

  static bool runs() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

  static void widen(const float* four, Left* to) { std::memcpy(to, four, 16); }

  template <int kTileRows>
  __attribute__((target("avx2,fma"))) static void multiply(const LeftTile<Left>& tile, const int8_t* right,
                                                           int64_t groups, Sum* sums, bool first) {
    __m256 sum[kTileRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    const Left *left = tile.data, *next = tile.next;
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, next += 4 * kTileRows, right += 4 * kColumns) {
      prefetch<Cache::kL2>(next, 4 * kTileRows);
#pragma GCC unroll 16
      for (int i = 0; i < 4; ++i) {
        __m256 codes[2];
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) {
          const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right + 32 * v));
          codes[v] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 24 - 8 * i), 24));
        }
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
          const __m256 row = _mm256_set1_ps(left[4 * r + i]);
#pragma GCC unroll 16
          for (int v = 0; v < 2; ++v) sum[r][v] = _mm256_fmadd_ps(row, codes[v], sum[r][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        Sum* to = sums + r * kColumns + 8 * v;
        _mm256_storeu_ps(to, first ? sum[r][v] : _mm256_add_ps(_mm256_loadu_ps(to), sum[r][v]));
      }
    }
  }

  template <int kDots>
  __attribute__((target("avx2,fma"))) static void dot(const Left* left, int64_t left_stride, const int8_t* right,
                                                      int64_t k, Sum* sums, int64_t sum_stride) {
    __m256 sum[kDots][2];
#pragma GCC unroll 16
    for (int r = 0; r < kDots; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) sum[r][v] = _mm256_setzero_ps();
    for (int64_t i = 0; i < k; i += kDotDepth) {
      const int8_t* block = right + std::min(i, k - kDotDepth);
      __builtin_prefetch(block + kDotAhead);
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(block + 8 * v));
        const __m256 codes = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#pragma GCC unroll 16
        for (int r = 0; r < kDots; ++r)
          sum[r][v] = _mm256_fmadd_ps(codes, _mm256_loadu_ps(left + r * left_stride + i + 8 * v), sum[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kDots; ++r) {
      Sum lanes[8];
      _mm256_storeu_ps(lanes, _mm256_add_ps(sum[r][0], sum[r][1]));
      Sum all = 0;
      for (const Sum lane : lanes) all += lane;
      sums[r * sum_stride] = all;
    }
  }
};

#endif

template <class F>
void with_float_tile(const F& f) {
#if defined(__x86_64__)
  with_first_tile<Avx512FloatTile, Avx2FloatTile, PortableTile<float>>(f);
#else
  with_first_tile<PortableTile<float>>(f);
#endif
}

}  // namespace amp_kernels::cpu
