// Tiles of codes by codes, exact: sums modulo 2^32.
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

// vpdpbusd multiplies unsigned by signed bytes, hence the shifts: those of `right` add kShift times the row's sum to
// each sum, those of `dot`, which waits for its loads, 128 times the vector's of `left`. All modulo 2^32.
struct VnniTile {
  using Left = int8_t;
  using Sum = int32_t;
  static constexpr int kRows = 14, kColumns = 32, kShift = 128, kDotShift = 128;
  static constexpr bool kReadsRows = true, kMakesResults = true;
  static constexpr int64_t kDepth = kAnyDepth;
  static constexpr int64_t kDotDepth = 64;

  static bool runs() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni"); }

  static void widen(const int8_t* four, Left* to) { std::memcpy(to, four, 4); }

  template <int kTileRows>
  __attribute__((target("avx512f,avx512vnni"))) static void multiply(const LeftTile<Left>& left, const int8_t* right,
                                                                     int64_t groups, Sum* sums, bool first) {
    Vector sum[kTileRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v)
        sum[r][v] = (Vector)(first ? _mm512_set1_epi32(-kShift * left.sums[r])
                                   : _mm512_loadu_si512(sums + r * kColumns + 16 * v));
    accumulate<kTileRows>(left, right, groups, sum);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) _mm512_storeu_si512(sums + r * kColumns + 16 * v, (__m512i)sum[r][v]);
  }

  // Results of whole panels, the first at `to`, `stride` apart by rows: their sums are stored nowhere, which of a
  // product with little k took a quarter. begin(columns) says whether it wrote to `sums` what those of a panel begin
  // with. All panels in one call: its 50 cycles are half of what 14 rows times 32 columns take if k is 16.
  template <int kTileRows, class Columns, class F, class T>
  __attribute__((target("avx512f,avx512vnni"))) static void multiply_and_scale(const LeftTile<Left>& left,
                                                                               const Panels<Columns>& panels,
                                                                               int64_t groups, const F& begin,
                                                                               const Sum* sums, const Scales& scales,
                                                                               T* to, int64_t stride) {
    Sum begins[kTileRows];
    float row[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      begins[r] = -kShift * left.sums[r];
      row[r] = scales.row[r * scales.row_step];
    }
    const int8_t* right = panels.right;
    for (int64_t p = 0; p < panels.count; ++p, right += panels.step, to += kColumns) {
      const Columns& columns = panels.columns[p];
      const bool begun = begin(columns);
      Vector sum[kTileRows][2];
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v)
          sum[r][v] = (Vector)(begun ? _mm512_loadu_si512(sums + r * kColumns + 16 * v) : _mm512_set1_epi32(begins[r]));
      accumulate<kTileRows>(left, right, groups, sum);
      const __m512 column[2] = {_mm512_loadu_ps(columns.scale), _mm512_loadu_ps(columns.scale + 16)};
      T* const rows[] = {to, to + 5 * stride, to + 10 * stride};
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) {
          __m512 y = scaled((__m512i)sum[r][v], _mm512_mul_ps(_mm512_set1_ps(row[r]), column[v]));
          if (scales.bias != nullptr) y = _mm512_add_ps(y, _mm512_loadu_ps(columns.bias + 16 * v));
          store(y, rows[r / 5] + r % 5 * stride + 16 * v);
        }
    }
  }

  // As Scaler, in half the instructions; without `sums` of what those of a row begin with, -kShift times row_sums.
  __attribute__((target("avx512f,avx512vnni"))) static void subtract(const ZeroPoints& zero_points, const Sum* sums,
                                                                     int64_t rows, Sum* to) {
    __m512i column_sums[2], columns[2];
    for (int v = 0; v < 2; ++v) {
      column_sums[v] = _mm512_loadu_si512(zero_points.column_sums + 16 * v);
      columns[v] =
          zero_points.columns == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(zero_points.columns + 16 * v);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const __m512i row = _mm512_set1_epi32(zero_points.row(r)), rest = _mm512_set1_epi32(zero_points.rest(r));
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int64_t i = r * kColumns + 16 * v;
        __m512i sum =
            sums == nullptr ? _mm512_set1_epi32(-kShift * zero_points.row_sums[r]) : _mm512_loadu_si512(sums + i);
        sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(row, column_sums[v]));
        if (zero_points.columns != nullptr) sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(rest, columns[v]));
        _mm512_storeu_si512(to + i, sum);
      }
    }
  }

  // As Scaler, in half the instructions: of short sums it was half of the product's time.
  template <bool kHasBias, class T>
  __attribute__((target("avx512f,avx512vnni"))) static void scale_rows(const Scales& scales, const Sum* sums,
                                                                       int64_t rows, T* to, int64_t stride) {
    __m512 column[2], bias[2];
    for (int v = 0; v < 2; ++v) {
      column[v] = _mm512_loadu_ps(scales.column + 16 * v);
      if constexpr (kHasBias) bias[v] = _mm512_loadu_ps(scales.bias + 16 * v);
    }
    const float* row_scale = scales.row;
    for (const int64_t step = scales.row_step; rows > 0; --rows, sums += kColumns, to += stride, row_scale += step) {
      const __m512 row = _mm512_set1_ps(*row_scale);
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        __m512 y = scaled(_mm512_loadu_si512(sums + 16 * v), _mm512_mul_ps(row, column[v]));
        if constexpr (kHasBias) y = _mm512_add_ps(y, bias[v]);
        store(y, to + 16 * v);
      }
    }
  }

  // Of each row's codes; there is room for a multiple of four. Rows in place, or a packed one, four at a time; several
  // packed ones come 16 groups at a time, as rows x 64 bytes.
  __attribute__((target("avx512f,avx512vnni"))) static void sum_rows(const LeftTile<Left>& tile, int64_t rows,
                                                                     int64_t groups, Sum* sums) {
    if (tile.group_step == 4) {
      for (int64_t r = 0; r < rows; r += 4) {
        const auto row = [&](int64_t i) { return tile.data + std::min(r + i, rows - 1) * tile.row_step; };
        __m512i sum[4];
        sum_four(row(0), row(1), row(2), row(3), groups, sum);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + r), add_lanes(sum));
      }
      return;
    }
    Sum mixed[16 * kRows];
    const int64_t dwords = groups * rows;
    for (int64_t v = 0; v < rows; ++v)
      _mm512_storeu_si512(mixed + 16 * v, sum_vectors(tile.data + 64 * v, 64 * rows, dwords - 16 * v));
    std::copy_n(mixed, rows, sums);
    for (int64_t i = 1; i < 16; ++i)
      for (int64_t r = 0; r < rows; ++r) sums[r] += mixed[i * rows + r];
  }

  template <int kDots>
  __attribute__((target("avx512f,avx512vnni"))) static void dot(const Left* left, int64_t left_stride,
                                                                const int8_t* right, int64_t k, Sum* sums,
                                                                int64_t sum_stride) {
    constexpr int kChains = dot_chains(kDots);
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(kDotShift));
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
  // Of __m512i, which is a vector of 64-bit integers, g++ 12 would keep every sum in two registers, one for each type.
  using Vector = int32_t __attribute__((vector_size(64)));

  template <int kTileRows>
  [[gnu::always_inline]] __attribute__((target("avx512f,avx512vnni"))) static void accumulate(
      const LeftTile<Left>& tile, const int8_t* right, int64_t groups, Vector (&sum)[kTileRows][2]) {
    const int64_t row_step = tile.row_step, group_step = tile.group_step;
    const Left* left[] = {tile.data, tile.data + 5 * row_step, tile.data + 10 * row_step};
    const Left* next = tile.next;
    for (int64_t g = 0; g < groups; ++g, next += 4 * kTileRows, right += 4 * kColumns) {
      prefetch<Cache::kL2>(next, 4 * kTileRows);
      const __m512i right0 = _mm512_loadu_si512(right), right1 = _mm512_loadu_si512(right + 64);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        int32_t four;
        std::memcpy(&four, left[r / 5] + r % 5 * row_step, 4);
        const __m512i row = _mm512_set1_epi32(four);
        sum[r][0] = (Vector)_mm512_dpbusd_epi32((__m512i)sum[r][0], right0, row);
        sum[r][1] = (Vector)_mm512_dpbusd_epi32((__m512i)sum[r][1], right1, row);
      }
      for (const Left*& rows : left) rows += group_step;
    }
  }

  __attribute__((target("avx512f,avx512vnni"))) static void sum_four(const Left* row0, const Left* row1,
                                                                     const Left* row2, const Left* row3, int64_t groups,
                                                                     __m512i* sum) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum0 = _mm512_setzero_si512(), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    for (int64_t i = 0; i < 4 * groups; i += 64) {
      const auto used = static_cast<__mmask16>((1u << std::min<int64_t>(16, groups - i / 4)) - 1);
      sum0 = _mm512_dpbusd_epi32(sum0, ones, _mm512_maskz_loadu_epi32(used, row0 + i));
      sum1 = _mm512_dpbusd_epi32(sum1, ones, _mm512_maskz_loadu_epi32(used, row1 + i));
      sum2 = _mm512_dpbusd_epi32(sum2, ones, _mm512_maskz_loadu_epi32(used, row2 + i));
      sum3 = _mm512_dpbusd_epi32(sum3, ones, _mm512_maskz_loadu_epi32(used, row3 + i));
    }
    sum[0] = sum0, sum[1] = sum1, sum[2] = sum2, sum[3] = sum3;
  }

  // Of the bytes of vectors that are `step` bytes apart, as long as there are dwords at or before their ends.
  __attribute__((target("avx512f,avx512vnni"))) static __m512i sum_vectors(const int8_t* from, int64_t step,
                                                                           int64_t dwords) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum = _mm512_setzero_si512();
    for (; dwords >= 16; dwords -= step / 4, from += step)
      sum = _mm512_dpbusd_epi32(sum, ones, _mm512_loadu_si512(from));
    if (dwords <= 0) return sum;
    const auto used = static_cast<__mmask16>((1u << dwords) - 1);
    return _mm512_dpbusd_epi32(sum, ones, _mm512_maskz_loadu_epi32(used, from));
  }

  __attribute__((target("avx512f"))) static __m512 scaled(__m512i sum, __m512 scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
  }

  __attribute__((target("avx512f"))) static void store(__m512 y, float* to) { _mm512_storeu_ps(to, y); }

  __attribute__((target("avx512f"))) static void store(__m512 y, Half* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
  }

  __attribute__((target("avx512f"))) static void store(__m512 y, BFloat16* to) {  // as store_lanes
    const __m512i bits = _mm512_castps_si512(y),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
    const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(high));
  }

  // Of each of four vectors, in less than half of the instructions that four sums take.
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

// vpmaddwd on 16 bits, exact. In each dword of `right` the bytes 0, 2 and 1, 3 are widened where they lie, so `left`
// has its elements in that order.
struct Avx2Tile : Scaler<16> {
  using Left = int16_t;
  using Sum = int32_t;
  static constexpr int kRows = 5, kColumns = 16, kShift = 0, kDotShift = 0;
  static constexpr bool kReadsRows = false, kMakesResults = false;
  static constexpr int64_t kDepth = kAnyDepth;
  static constexpr int64_t kDotDepth = 16;

  static bool runs() { return __builtin_cpu_supports("avx2"); }

  static void widen(const int8_t* four, Left* to) {
    to[0] = four[0], to[1] = four[2], to[2] = four[1], to[3] = four[3];
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
