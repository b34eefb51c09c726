// Packs int8 matrices for the tiles of tiles.h. A view of [k, width] codes becomes [groups][width][4]. A group is four
// neighbouring k. In each group, the four codes of a column are neighbours, and make a dword.
//
//   if k is contiguous (a Linear's weight),          if columns are contiguous,
//   8 groups of 8 columns at a time                  one group of 8 or 16 columns at a time:
//   are transposed, as 8 x 8 dwords                  its 4 rows are interleaved byte by byte
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace amp_kernels::cpu {

// How far ahead memory is prefetched: kPackAhead bytes if k is contiguous, and kRowsAhead rows if columns are
// contiguous. The target is the L2, because rows that are 2^n bytes apart would crowd a few sets of the L1.
constexpr int64_t kPackAhead = 128, kRowsAhead = 64;

// A view of [k, width] codes. Each code that is read is xored with `flip`. A `flip` of 0x80 adds 128, modulo 256.
struct Bytes {
  const int8_t* data;
  int64_t k_stride, stride;
  int8_t flip;

  int8_t at(int64_t k, int64_t j) const { return data[k * k_stride + j * stride] ^ flip; }
};

// Packs one group of `used` columns without vector instructions. pack() calls it for everything that the functions
// below do not take. Past the end of k it writes zeros.
inline void pack_group(const Bytes& from, int64_t g, int64_t k, int64_t used, int8_t* to) {
  if (from.k_stride == 1 && 4 * g + 4 <= k) {  // k is contiguous: the four codes of a column at once
    for (int64_t j = 0; j < used; ++j) {
      uint32_t four;
      std::memcpy(&four, from.data + 4 * g + j * from.stride, 4);
      four ^= 0x01010101u * static_cast<uint8_t>(from.flip);
      std::memcpy(to + 4 * j, &four, 4);
    }
    return;
  }
  for (int64_t j = 0; j < used; ++j)
    for (int64_t i = 0; i < 4; ++i) to[4 * j + i] = 4 * g + i < k ? from.at(4 * g + i, j) : 0;
}

#if defined(__AVX2__)
// Packs eight groups of eight columns, whose codes are contiguous along k, by a transposition of 8 x 8 dwords. When
// transpositions of 4 x 4 dwords were used instead, products of 8 rows took 1.1 to 1.3 times as long.
inline void transpose_groups(const Bytes& from, int64_t g, int64_t j, int64_t width, int8_t* to) {
  const __m256i flip = _mm256_set1_epi8(from.flip);
  const auto column = [&](int64_t c) {
    const int8_t* address = from.data + 4 * g + (j + c) * from.stride;
    __builtin_prefetch(address + kPackAhead, 0, 2);
    return _mm256_xor_si256(flip, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
  };
  __m256i half[2][4];  // half[h][i]: groups i and i + 4 of columns 4h to 4h + 3
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

// Loads 8 or 16 bytes.
template <int kBytes>
__m128i load_bytes(const int8_t* from) {
  if constexpr (kBytes == 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
}

// Packs one group of kWidth neighbouring columns by interleaving its four rows. kWidth is 8 or 16.
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

// Calls f(j) for steps [j, j + kWidth) that together cover [begin, end). The range must be at least kWidth long. If its
// length is not a multiple of kWidth, the last step overlaps the one before.
template <int kWidth, class F>
void for_each_step(int64_t begin, int64_t end, const F& f) {
  for (int64_t j = begin; j < end; j += kWidth) f(std::min<int64_t>(j, end - kWidth));
}

// Packs groups [begin, end) of `used` columns to [groups][width][4]. Columns [used, width) of the result are not
// written.
inline void pack(const Bytes& from, int64_t begin, int64_t end, int64_t k, int64_t used, int64_t width, int8_t* to) {
  int64_t g = begin;
#if defined(__AVX2__)
  const int64_t whole = std::min(end, k / 4);
  if (from.k_stride == 1 && used >= 8 && whole - begin >= 8) {
    for_each_step<8>(0, used, [&](int64_t j) {
      for_each_step<8>(begin, whole, [&](int64_t group) { transpose_groups(from, group, j, width, to); });
    });
    g = whole;
  } else if (from.stride == 1 && used >= 8) {
    for (; g < whole; ++g) {
      int8_t* group = to + 4 * g * width;
      if (used >= 16)
        for_each_step<16>(0, used, [&](int64_t j) { interleave_rows<16>(from, g, j, group); });
      else
        for_each_step<8>(0, used, [&](int64_t j) { interleave_rows<8>(from, g, j, group); });
    }
  }
#endif
  for (; g < end; ++g) pack_group(from, g, k, used, to + 4 * g * width);
}

}  // namespace amp_kernels::cpu
