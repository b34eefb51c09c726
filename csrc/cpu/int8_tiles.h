// The innermost loops of the int8 products, one class for each instruction set, all of one form: a tile of up to kRows
// rows by kColumns columns is summed in registers over `groups` groups of four k.
//
//   left:  [groups][rows][4] elements of type Left, made by `widen` of four floats or of four codes plus kShift
//   right: [groups][kColumns][4] codes
//   sums:  [rows][kColumns], written if `first`, else added to
//   ahead: bytes from what is read of `left` to what is asked for meanwhile, the next tile
//
// Few vectors of k, rows of the left operand or columns of the right one, are multiplied without packing, by `dot`:
// `left` are vectors of `k` elements, left_stride apart, k a multiple of kDotDepth; `right` is one of the other
// operand, whose codes are taken plus kDotShift; the sums are sum_stride apart.
//
// kDepth limits the groups of one call: the partial sums of fp32 are added in blocks for the sake of their rounding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "convert.h"
#include "prefetch.h"

namespace amp_kernels::cpu {

constexpr int64_t kAnyDepth = std::numeric_limits<int64_t>::max();
constexpr int64_t kFloatDepth = 32;
constexpr int64_t kDotRows = 4;     // and one of ones
constexpr int64_t kDotAhead = 512;  // bytes

// Sums that a dot product of so many rows keeps in flight for each: with one a row or two wait for their own additions.
constexpr int dot_chains(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

// Asks for kCount elements.
template <int kCount, class Left>
[[gnu::always_inline]] inline void fetch(const Left* left, int64_t ahead) {
  prefetch<Cache::kL2>(reinterpret_cast<const char*>(left) + ahead, kCount * sizeof(Left));
}

// What makes results of sums: (sum - shift * column_sum) * (row * column) + bias, each operation rounded.
struct Scales {
  const int32_t* column_sums;
  int32_t shift;
  const float* column;
  const float* bias;  // read if there is one
  const float* row;
  int64_t row_step;
};

// The epilogue of a tile of kWidth columns.
template <int kWidth>
struct Scaler {
  // `rows` rows of sums; the results' rows are `stride` apart. What belongs to columns stays in registers.
  template <bool kHasBias, class T>
  static void scale_rows(const Scales& scales, const int32_t* sums, int64_t rows, T* to, int64_t stride) {
    constexpr int kVectors = kWidth / kLanes;
    Lanes column[kVectors], bias[kVectors];
    Words shift[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      column[v] = load_lanes(scales.column + v * kLanes);
      if constexpr (kHasBias) bias[v] = load_lanes(scales.bias + v * kLanes);
      std::memcpy(&shift[v], scales.column_sums + v * kLanes, sizeof(shift[v]));
      shift[v] *= static_cast<uint32_t>(scales.shift);
    }
    const float* row_scale = scales.row;
    for (const int64_t step = scales.row_step; rows > 0; --rows, sums += kWidth, to += stride, row_scale += step) {
      const float row = *row_scale;
      for (int v = 0; v < kVectors; ++v) {
        Words sum;
        std::memcpy(&sum, sums + v * kLanes, sizeof(sum));
        Lanes y = as_floats(as<Integers>(sum - shift[v])) * (row * column[v]);
        if constexpr (kHasBias) y += bias[v];
        store_lanes(y, to + v * kLanes);
      }
    }
  }
};

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
inline int32_t multiply_add(int32_t a, int32_t b, int32_t c) { return a * b + c; }

// Sums int32 or float.
template <class SumType>
struct PortableTile : Scaler<16> {
  using Left = SumType;
  using Sum = SumType;
  static constexpr int kRows = 4, kColumns = 16, kShift = 0, kDotShift = 0;
  static constexpr int64_t kDepth = std::is_same_v<Sum, float> ? kFloatDepth : kAnyDepth;
  static constexpr int64_t kDotDepth = 16;

  static bool runs() { return true; }

  template <class T>
  static void widen(const T* four, Left* to) {
    for (int i = 0; i < 4; ++i) to[i] = static_cast<Left>(four[i]);
  }

  template <int kTileRows>
  static void multiply(const Left* left, const int8_t* right, int64_t groups, Sum* sums, bool first, int64_t) {
    Sum sum[kTileRows][kColumns] = {};
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, right += 4 * kColumns)
      for (int r = 0; r < kTileRows; ++r)
        for (int c = 0; c < kColumns; ++c)
          for (int i = 0; i < 4; ++i)
            sum[r][c] = multiply_add(left[4 * r + i], static_cast<Sum>(right[4 * c + i]), sum[r][c]);
    for (int r = 0; r < kTileRows; ++r)
      for (int c = 0; c < kColumns; ++c) sums[r * kColumns + c] = sum[r][c] + (first ? Sum{} : sums[r * kColumns + c]);
  }

  template <int kDots>
  static void dot(const Left* left, int64_t left_stride, const int8_t* right, int64_t k, Sum* sums,
                  int64_t sum_stride) {
    for (int r = 0; r < kDots; ++r) {
      Sum lanes[kDotDepth] = {};
      for (int64_t i = 0; i < k; i += kDotDepth)
        for (int l = 0; l < kDotDepth; ++l)
          lanes[l] = multiply_add(left[r * left_stride + i + l],
                                  static_cast<Sum>(right[std::min(i, k - kDotDepth) + l]), lanes[l]);
      Sum sum{};
      for (const Sum lane : lanes) sum += lane;
      sums[r * sum_stride] = sum;
    }
  }
};

#if defined(__x86_64__)

// vpdpbusd multiplies unsigned by signed bytes, hence the shifts: sums are too large by 128 times the column's sum of
// `right`, modulo 2^32, or those of `dot`, which waits for its loads, by 128 times the vector's of `left`.
struct VnniTile {
  using Left = int8_t;
  using Sum = int32_t;
  static constexpr int kRows = 14, kColumns = 32, kShift = 128, kDotShift = 128;
  static constexpr int64_t kDepth = kAnyDepth;
  static constexpr int64_t kDotDepth = 64;

  static bool runs() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni"); }

  static void widen(const int8_t* four, Left* to) { std::memcpy(to, four, 4); }

  template <int kTileRows>
  __attribute__((target("avx512f,avx512vnni"))) static void multiply(const Left* left, const int8_t* right,
                                                                     int64_t groups, Sum* sums, bool first,
                                                                     int64_t ahead) {
    __m512i sum[kTileRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, right += 4 * kColumns) {
      fetch<4 * kTileRows>(left, ahead);
      const __m512i right0 = _mm512_loadu_si512(right), right1 = _mm512_loadu_si512(right + 64);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        int32_t four;
        std::memcpy(&four, left + 4 * r, 4);
        const __m512i row = _mm512_set1_epi32(four);
        sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], row, right0);
        sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], row, right1);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        Sum* to = sums + r * kColumns + 16 * v;
        _mm512_storeu_si512(to, first ? sum[r][v] : _mm512_add_epi32(sum[r][v], _mm512_loadu_si512(to)));
      }
  }

  // As Scaler, in half the instructions: of short sums it was half of the product's time.
  template <bool kHasBias, class T>
  __attribute__((target("avx512f,avx512vnni"))) static void scale_rows(const Scales& scales, const Sum* sums,
                                                                       int64_t rows, T* to, int64_t stride) {
    __m512 column[2], bias[2];
    __m512i shift[2];
    for (int v = 0; v < 2; ++v) {
      column[v] = _mm512_loadu_ps(scales.column + 16 * v);
      if constexpr (kHasBias) bias[v] = _mm512_loadu_ps(scales.bias + 16 * v);
      shift[v] = _mm512_mullo_epi32(_mm512_loadu_si512(scales.column_sums + 16 * v), _mm512_set1_epi32(scales.shift));
    }
    const float* row_scale = scales.row;
    for (const int64_t step = scales.row_step; rows > 0; --rows, sums += kColumns, to += stride, row_scale += step) {
      const __m512 row = _mm512_set1_ps(*row_scale);
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        const __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(sums + 16 * v), shift[v]);
        __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(row, column[v]));
        if constexpr (kHasBias) y = _mm512_add_ps(y, bias[v]);
        store(y, to + 16 * v);
      }
    }
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
  static constexpr int64_t kDepth = kAnyDepth;
  static constexpr int64_t kDotDepth = 16;

  static bool runs() { return __builtin_cpu_supports("avx2"); }

  static void widen(const int8_t* four, Left* to) {
    to[0] = four[0], to[1] = four[2], to[2] = four[1], to[3] = four[3];
  }

  template <int kTileRows>
  __attribute__((target("avx2"))) static void multiply(const Left* left, const int8_t* right, int64_t groups, Sum* sums,
                                                       bool first, int64_t ahead) {
    __m256i sum[kTileRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, right += 4 * kColumns) {
      fetch<4 * kTileRows>(left, ahead);
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

// Byte i of each dword becomes a float in its lane. With few rows every i has sums of its own, for the latency of an
// addition is then what limits.
struct Avx512FloatTile {
  using Left = float;
  using Sum = float;
  static constexpr int kRows = 12, kColumns = 32, kShift = 0, kDotShift = 0;
  static constexpr int64_t kDepth = kFloatDepth;
  static constexpr int64_t kDotDepth = 64;

  static bool runs() { return __builtin_cpu_supports("avx512f"); }

  static void widen(const float* four, Left* to) { std::memcpy(to, four, 16); }

  template <int kTileRows>
  __attribute__((target("avx512f"))) static void multiply(const Left* left, const int8_t* right, int64_t groups,
                                                          Sum* sums, bool first, int64_t ahead) {
    constexpr int kChains = kTileRows <= 3 ? 4 : 1;
    __m512 sum[kChains][kTileRows][2];
#pragma GCC unroll 16
    for (auto& chain : sum)
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) chain[r][0] = chain[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, right += 4 * kColumns) {
      fetch<4 * kTileRows>(left, ahead);
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
          for (int v = 0; v < 2; ++v) sum[i % kChains][r][v] = _mm512_fmadd_ps(row, codes[v], sum[i % kChains][r][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        Sum* to = sums + r * kColumns + 16 * v;
        __m512 all = first ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
#pragma GCC unroll 16
        for (auto& chain : sum) all = _mm512_add_ps(all, chain[r][v]);
        _mm512_storeu_ps(to, all);
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
  __attribute__((target("avx2,fma"))) static void multiply(const Left* left, const int8_t* right, int64_t groups,
                                                           Sum* sums, bool first, int64_t ahead) {
    constexpr int kChains = kTileRows == 1 ? 4 : 1;
    __m256 sum[kChains][kTileRows][2];
#pragma GCC unroll 16
    for (auto& chain : sum)
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) chain[r][0] = chain[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, left += 4 * kTileRows, right += 4 * kColumns) {
      fetch<4 * kTileRows>(left, ahead);
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
          for (int v = 0; v < 2; ++v) sum[i % kChains][r][v] = _mm256_fmadd_ps(row, codes[v], sum[i % kChains][r][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < 2; ++v) {
        Sum* to = sums + r * kColumns + 8 * v;
        __m256 all = first ? _mm256_setzero_ps() : _mm256_loadu_ps(to);
#pragma GCC unroll 16
        for (auto& chain : sum) all = _mm256_add_ps(all, chain[r][v]);
        _mm256_storeu_ps(to, all);
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

// Calls f with the first of the tiles that runs on this CPU; the last one must run on any.
template <class Tile, class... Others, class F>
void with_first_tile(const F& f) {
  if constexpr (sizeof...(Others) > 0)
    if (!Tile::runs()) return with_first_tile<Others...>(f);
  f(Tile{});
}

template <class F>
void with_int8_tile(const F& f) {
#if defined(__x86_64__)
  with_first_tile<VnniTile, Avx2Tile, PortableTile<int32_t>>(f);
#else
  with_first_tile<PortableTile<int32_t>>(f);
#endif
}

template <class F>
void with_float_tile(const F& f) {
#if defined(__x86_64__)
  with_first_tile<Avx512FloatTile, Avx2FloatTile, PortableTile<float>>(f);
#else
  with_first_tile<PortableTile<float>>(f);
#endif
}

}  // namespace amp_kernels::cpu
