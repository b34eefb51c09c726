// The tiles (tiles.h) that multiply int8 codes by int8 codes. Sums are exact, modulo 2^32. With VNNI, one instruction
// adds four products of bytes to each of 16 sums. With AVX2, two instructions add two products of 16-bit integers to
// each of 8 sums.
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

// vpdpbusd multiplies unsigned bytes by signed bytes. So 128 is added to the codes of `right`. This makes each sum too
// large, by 128 times the sum of its row's codes in `left`. The correction is modulo 2^32:
//
//   multiply   128 was added when `right` was packed. Each sum starts from -128 times the sum of its row's codes
//   dot        adds 128 itself, while it waits for its loads. DotRows corrects the sums afterwards
struct VnniTile : Scaler<32> {
  using Left = int8_t;
  using Sum = int32_t;
  static constexpr int kRows = 14, kColumns = 32, kShift = 128, kDotShift = 128;
  static constexpr int64_t kDepth = kAnyDepth;
  static constexpr int64_t kDotDepth = 64;

  static bool runs() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni"); }

  static void widen(const int8_t* four, Left* to) { std::memcpy(to, four, 4); }

  template <int kTileRows>
  __attribute__((target("avx512f,avx512vnni"))) static void multiply(const LeftTile<Left>& tile, const int8_t* right,
                                                                     int64_t groups, Sum* sums, bool first) {
    // The type of the sums is not __m512i, which is a vector of 64-bit integers. With that type, g++ 12 would keep each
    // vector of sums in two registers, once as __m512i and once as a vector of 32-bit integers.
    using Vector = int32_t __attribute__((vector_size(64)));
    Vector sum[kTileRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v)
        sum[r][v] = (Vector)(first ? _mm512_set1_epi32(-kShift * tile.sums[r])
                                   : _mm512_loadu_si512(sums + r * kColumns + 16 * v));
    const Left *left = tile.data, *next = tile.next;
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, next += 4 * kTileRows, right += 4 * kColumns) {
      prefetch<Cache::kL2>(next, 4 * kTileRows);
      const __m512i right0 = _mm512_loadu_si512(right), right1 = _mm512_loadu_si512(right + 64);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        int32_t four;
        std::memcpy(&four, left + 4 * r, 4);
        const __m512i row = _mm512_set1_epi32(four);
        sum[r][0] = (Vector)_mm512_dpbusd_epi32((__m512i)sum[r][0], right0, row);
        sum[r][1] = (Vector)_mm512_dpbusd_epi32((__m512i)sum[r][1], right1, row);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) _mm512_storeu_si512(sums + r * kColumns + 16 * v, (__m512i)sum[r][v]);
  }

  template <int kDots>
  __attribute__((target("avx512f,avx512vnni"))) static void dot(const Left* left, int64_t left_stride,
                                                                const int8_t* right, int64_t k, Sum* sums,
                                                                int64_t sum_stride) {
    constexpr int kChains = dot_chains(kDots);
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(kDotShift));  // xor with 128 adds 128 to a code
    __m512i sum[kChains][kDots];
#pragma GCC unroll 16
    for (int r = 0; r < kDots; ++r)
#pragma GCC unroll 16
      for (int c = 0; c < kChains; ++c) sum[c][r] = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + kChains * kDotDepth <= k; i += kChains * kDotDepth) {
#pragma GCC unroll 16
      for (int c = 0; c < kChains; ++c) {
        const int64_t j = i + c * kDotDepth;
        __builtin_prefetch(right + j + kDotAhead);
        const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(right + j), shift);
#pragma GCC unroll 16
        for (int r = 0; r < kDots; ++r)
          sum[c][r] = _mm512_dpbusd_epi32(sum[c][r], codes, _mm512_loadu_si512(left + r * left_stride + j));
      }
    }
    for (; i < k; i += kDotDepth) {
      const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(right + std::min(i, k - kDotDepth)), shift);
#pragma GCC unroll 16
      for (int r = 0; r < kDots; ++r)
        sum[0][r] = _mm512_dpbusd_epi32(sum[0][r], codes, _mm512_loadu_si512(left + r * left_stride + i));
    }
#pragma GCC unroll 16
    for (int r = 0; r < kDots; ++r)
#pragma GCC unroll 16
      for (int c = 1; c < kChains; ++c) sum[0][r] = _mm512_add_epi32(sum[0][r], sum[c][r]);
#pragma GCC unroll 16
    for (int r = 0; r + 4 <= kDots; r += 4) {
      int32_t four[4];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(four), add_lanes(sum[0] + r));
      for (int i = 0; i < 4; ++i) sums[(r + i) * sum_stride] = four[i];
    }
#pragma GCC unroll 16
    for (int r = kDots / 4 * 4; r < kDots; ++r) sums[r * sum_stride] = _mm512_reduce_add_epi32(sum[0][r]);
  }

 private:
  // Returns the sum of the lanes of each of four vectors. Four separate reductions would take more than twice as many
  // instructions as this function.
  __attribute__((target("avx512f"))) static __m128i add_lanes(const __m512i* of) {
    const auto interleave = [](__m512i a, __m512i b) __attribute__((target("avx512f"))) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i ab = interleave(of[0], of[1]), cd = interleave(of[2], of[3]);
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }
};

// vpmaddwd multiplies 16-bit integers, and adds each two neighbouring products. The results are exact. A dword of
// `right` holds the codes of four k. `multiply` widens bytes 0 and 2 of each dword (`even`), and then bytes 1 and 3
// (`odd`). So `widen` puts the elements of `left` in the order 0, 2, 1, 3.
struct Avx2Tile : Scaler<16> {
  using Left = int16_t;
  using Sum = int32_t;
  static constexpr int kRows = 5, kColumns = 16, kShift = 0, kDotShift = 0;
  static constexpr int64_t kDepth = kAnyDepth;
  static constexpr int64_t kDotDepth = 16;

  static bool runs() { return __builtin_cpu_supports("avx2"); }

  static void widen(const int8_t* four, Left* to) {
    to[0] = four[0], to[1] = four[2], to[2] = four[1], to[3] = four[3];
  }

  __attribute__((target("avx2"))) static void widen_row(const int8_t* codes, int64_t groups, int64_t stride, Left* to) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    int64_t g = 0;
    for (; g + 4 <= groups; g += 4, to += 4 * stride) {
      const __m128i four_groups = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 4 * g));
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(four_groups, order));
      for (int half = 0; half < 2; ++half) {
        const __m128i two = half == 0 ? _mm256_castsi256_si128(wide) : _mm256_extracti128_si256(wide, 1);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * half * stride), two);
        _mm_storeh_pd(reinterpret_cast<double*>(to + (2 * half + 1) * stride), _mm_castsi128_pd(two));
      }
    }
    for (; g < groups; ++g, to += stride) widen(codes + 4 * g, to);
  }

  template <int kTileRows>
  __attribute__((target("avx2"))) static void multiply(const LeftTile<Left>& tile, const int8_t* right, int64_t groups,
                                                       Sum* sums, bool first) {
    __m256i sum[kTileRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    const Left *left = tile.data, *next = tile.next;
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, next += 4 * kTileRows, right += 4 * kColumns) {
      prefetch<Cache::kL2>(next, 4 * kTileRows);
      __m256i even[2], odd[2];
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        odd[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right + 32 * v));
        even[v] = _mm256_srai_epi16(_mm256_slli_epi16(odd[v], 8), 8);
        odd[v] = _mm256_srai_epi16(odd[v], 8);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        int32_t pair[2];
        std::memcpy(pair, left + 4 * r, 8);
        const __m256i row_even = _mm256_set1_epi32(pair[0]), row_odd = _mm256_set1_epi32(pair[1]);
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) {
          const __m256i both =
              _mm256_add_epi32(_mm256_madd_epi16(even[v], row_even), _mm256_madd_epi16(odd[v], row_odd));
          sum[r][v] = _mm256_add_epi32(sum[r][v], both);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        auto* to = reinterpret_cast<__m256i*>(sums + r * kColumns + 8 * v);
        _mm256_storeu_si256(to, first ? sum[r][v] : _mm256_add_epi32(sum[r][v], _mm256_loadu_si256(to)));
      }
  }

  template <int kDots>
  __attribute__((target("avx2"))) static void dot(const Left* left, int64_t left_stride, const int8_t* right, int64_t k,
                                                  Sum* sums, int64_t sum_stride) {
    __m256i sum[kDots];
#pragma GCC unroll 16
    for (int r = 0; r < kDots; ++r) sum[r] = _mm256_setzero_si256();
    for (int64_t i = 0; i < k; i += kDotDepth) {
      const int8_t* block = right + std::min(i, k - kDotDepth);
      __builtin_prefetch(block + kDotAhead);
      const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block)));
#pragma GCC unroll 16
      for (int r = 0; r < kDots; ++r) {
        const auto* row = reinterpret_cast<const __m256i*>(left + r * left_stride + i);
        sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(codes, _mm256_loadu_si256(row)));
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kDots; ++r) {
      Sum lanes[8];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sum[r]);
      Sum all = 0;
      for (const Sum lane : lanes) all += lane;
      sums[r * sum_stride] = all;
    }
  }
};

#endif

template <class F>
void with_int8_tile(const F& f) {
#if defined(__x86_64__)
  with_first_tile<VnniTile, Avx2Tile, PortableTile<int32_t>>(f);
#else
  with_first_tile<PortableTile<int32_t>>(f);
#endif
}

}  // namespace amp_kernels::cpu
