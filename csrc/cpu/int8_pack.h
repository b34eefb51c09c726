// Packing of int8 matrices for the tiles of tiles.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace amp_kernels::cpu {

// How far ahead memory is asked for, into the L2: a power-of-two stride crowds the lines of a few sets of the L1.
constexpr int64_t kPackAhead = 128, kRowsAhead = 64;

// A view of [k, width] codes, each to be xored with `flip`: 0x80 adds 128.
struct Bytes {
  const int8_t* data;
  int64_t k_stride, stride;
  int8_t flip;

  int8_t at(int64_t k, int64_t j) const { return data[k * k_stride + j * stride] ^ flip; }
};

// One group, element by element; past the end of k there are zeros.
inline void pack_scalar(const Bytes& from, int64_t g, int64_t k, int64_t used, int8_t* to) {
  for (int64_t j = 0; j < used; ++j)
    for (int64_t i = 0; i < 4; ++i) to[4 * j + i] = 4 * g + i < k ? from.at(4 * g + i, j) : 0;
}

#if defined(__SSE2__)
// Four groups of four columns whose k is contiguous: a transposition of 4 x 4 dwords.
inline void transpose_groups(const Bytes& from, int64_t g, int64_t j, int64_t width, int8_t* to) {
  const __m128i flip = _mm_set1_epi8(from.flip);
  __m128i column[4];
  for (int64_t c = 0; c < 4; ++c) {
    __builtin_prefetch(from.data + 4 * g + kPackAhead + (j + c) * from.stride, 0, 2);
    column[c] = _mm_xor_si128(
        flip, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.data + 4 * g + (j + c) * from.stride)));
  }
  const __m128i low01 = _mm_unpacklo_epi32(column[0], column[1]), high01 = _mm_unpackhi_epi32(column[0], column[1]);
  const __m128i low23 = _mm_unpacklo_epi32(column[2], column[3]), high23 = _mm_unpackhi_epi32(column[2], column[3]);
  const __m128i group[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
                            _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)};
  for (int64_t i = 0; i < 4; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * ((g + i) * width + j)), group[i]);
}

#if defined(__AVX2__)
// Eight groups of eight columns, in half the instructions: of a product of 1024^3 packing was an eighth.
inline void transpose_eight_groups(const Bytes& from, int64_t g, int64_t j, int64_t width, int8_t* to) {
  const __m256i flip = _mm256_set1_epi8(from.flip);
  const auto column = [&](int64_t c) {
    const int8_t* address = from.data + 4 * g + (j + c) * from.stride;
    __builtin_prefetch(address + kPackAhead, 0, 2);
    return _mm256_xor_si256(flip, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
  };
  __m256i half[2][4];  // of four columns: groups i and i + 4
  for (int64_t h = 0; h < 2; ++h) {
    const __m256i c0 = column(4 * h), c1 = column(4 * h + 1), c2 = column(4 * h + 2), c3 = column(4 * h + 3);
    const __m256i low01 = _mm256_unpacklo_epi32(c0, c1), high01 = _mm256_unpackhi_epi32(c0, c1);
    const __m256i low23 = _mm256_unpacklo_epi32(c2, c3), high23 = _mm256_unpackhi_epi32(c2, c3);
    half[h][0] = _mm256_unpacklo_epi64(low01, low23), half[h][1] = _mm256_unpackhi_epi64(low01, low23);
    half[h][2] = _mm256_unpacklo_epi64(high01, high23), half[h][3] = _mm256_unpackhi_epi64(high01, high23);
  }
  for (int64_t i = 0; i < 4; ++i) {
    const auto store = [&](int64_t group, const __m256i& all) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4 * (group * width + j)), all);
    };
    store(g + i, _mm256_permute2x128_si256(half[0][i], half[1][i], 0x20));
    store(g + i + 4, _mm256_permute2x128_si256(half[0][i], half[1][i], 0x31));
  }
}
#endif

// kBytes of 4, 8 or 16; by way of memory the load would wait for the store.
template <int kBytes>
__m128i load_bytes(const int8_t* from) {
  if constexpr (kBytes == 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (kBytes == 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm_cvtsi32_si128(four);
}

// One group of kWidth neighbouring columns, 4, 8 or 16: four rows interleaved.
template <int kWidth>
void interleave_rows(const Bytes& from, int64_t g, int64_t j, int8_t* to) {
  const __m128i flip = _mm_set1_epi8(from.flip);
  __m128i row[4];
  for (int64_t i = 0; i < 4; ++i) {
    const int8_t* address = from.data + (4 * g + i) * from.k_stride + j;
    __builtin_prefetch(address + kRowsAhead * from.k_stride, 0, 2);
    row[i] = _mm_xor_si128(load_bytes<kWidth>(address), flip);
  }
  const __m128i low01 = _mm_unpacklo_epi8(row[0], row[1]), high01 = _mm_unpackhi_epi8(row[0], row[1]);
  const __m128i low23 = _mm_unpacklo_epi8(row[2], row[3]), high23 = _mm_unpackhi_epi8(row[2], row[3]);
  const __m128i columns[4] = {_mm_unpacklo_epi16(low01, low23), _mm_unpackhi_epi16(low01, low23),
                              _mm_unpacklo_epi16(high01, high23), _mm_unpackhi_epi16(high01, high23)};
  for (int i = 0; i < kWidth / 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * j) + i, columns[i]);
}
#endif

// Calls f(j) for steps of kWidth through [0, n), n >= kWidth; the last one may overlap the one before.
template <int kWidth, class F>
void for_each_step(int64_t n, const F& f) {
  for (int64_t j = 0; j < n; j += kWidth) f(std::min<int64_t>(j, n - kWidth));
}

// Groups [begin, end) of `used` columns to [groups][width][4]; the columns from `used` on are left alone.
inline void pack(const Bytes& from, int64_t begin, int64_t end, int64_t k, int64_t used, int64_t width, int8_t* to) {
  int64_t g = begin;
#if defined(__SSE2__)
  const int64_t whole = std::min(end, k / 4);
  if (from.k_stride == 1 && used >= 4) {
#if defined(__AVX2__)
    if (used >= 8)
      for_each_step<8>(used, [&](int64_t j) {
        for (g = begin; g + 8 <= whole; g += 8) transpose_eight_groups(from, g, j, width, to);
      });
#endif
    const int64_t rest = g;
    for_each_step<4>(used, [&](int64_t j) {
      for (g = rest; g + 4 <= whole; g += 4) transpose_groups(from, g, j, width, to);
    });
  } else if (from.stride == 1 && used >= 4) {
    for (; g < whole; ++g) {
      int8_t* group = to + 4 * g * width;
      if (used >= 16)
        for_each_step<16>(used, [&](int64_t j) { interleave_rows<16>(from, g, j, group); });
      else if (used >= 8)
        for_each_step<8>(used, [&](int64_t j) { interleave_rows<8>(from, g, j, group); });
      else
        for_each_step<4>(used, [&](int64_t j) { interleave_rows<4>(from, g, j, group); });
    }
  }
#endif
  for (; g < end; ++g) pack_scalar(from, g, k, used, to + 4 * g * width);
}

}  // namespace amp_kernels::cpu
