// The random numbers for stochastic rounding on a CPU. A random word of 32 bits gives the number (word >> 8) * 2^-24.
// philox() of formulas/int8.h makes four words from a counter, for four elements. With AVX2, fill_noise_block() makes
// 32 numbers from eight counters at a time:
//
//   counter          c        c + 1    ...      c + 7        each in a 64-bit lane: two registers of four lanes
//   elements      4c .. 4c+3                4c+28 .. 4c+31   at the end, the words are transposed into this order
#pragma once

#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../formulas/int8.h"

namespace amp_kernels::cpu {

constexpr int kNoiseBlock = 32;

#if defined(__AVX2__)
// Makes 32 numbers. Philox turns a counter of four 32-bit words, c0 to c3, into four random words. A 64-bit lane holds
// a word in its low half. The multiplications ignore the high half. Each of c0 to c3 is two registers, with the words
// of four counters each. A round for four counters keeps a core busy for only half of the round's latency. In the other
// half, the core works on the other four counters.
inline void fill_noise_block(uint64_t counter, uint64_t seed, float* noise) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53u), m1 = _mm256_set1_epi64x(0xCD9E8D57u);
  __m256i c0[2], c1[2], c2[2], c3[2];
  for (int h = 0; h < 2; ++h) {
    c0[h] = _mm256_add_epi64(_mm256_set1_epi64x(counter + 4 * h), _mm256_setr_epi64x(0, 1, 2, 3));
    c1[h] = _mm256_srli_epi64(c0[h], 32);
    c2[h] = c3[h] = _mm256_setzero_si256();
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int h = 0; h < 2; ++h) {
      const __m256i p0 = _mm256_mul_epu32(m0, c0[h]), p1 = _mm256_mul_epu32(m1, c2[h]);
      c0[h] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1[h], _mm256_set1_epi64x(k0)));
      c2[h] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3[h], _mm256_set1_epi64x(k1)));
      c1[h] = p1, c3[h] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int h = 0; h < 2; ++h) {
    const __m256i words01 = _mm256_blend_epi32(c0[h], _mm256_slli_epi64(c1[h], 32), 0xaa);
    const __m256i words23 = _mm256_blend_epi32(c2[h], _mm256_slli_epi64(c3[h], 32), 0xaa);
    const __m256i even = _mm256_unpacklo_epi64(words01, words23), odd = _mm256_unpackhi_epi64(words01, words23);
    const __m256i all[2] = {_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31)};
    for (int i = 0; i < 2; ++i) {
      const __m256 steps = _mm256_cvtepi32_ps(_mm256_srli_epi32(all[i], 8));
      _mm256_storeu_ps(noise + 16 * h + 8 * i, _mm256_mul_ps(steps, _mm256_set1_ps(0x1p-24f)));
    }
  }
}
#else
inline void fill_noise_block(uint64_t counter, uint64_t seed, float* noise) {
  for (int i = 0; i < kNoiseBlock; ++i) noise[i] = uniform(philox(counter + i / 4, seed).word[i % 4]);
}
#endif

// Writes the random numbers, uniform in [0, 1), of n elements with the indices first, first + 1, ... An index is the
// place of an element in row-major order.
inline void fill_noise(float* noise, int64_t first, int64_t n, uint64_t seed) {
  int64_t i = 0;
  const auto one = [&] {
    const uint64_t index = static_cast<uint64_t>(first + i);
    noise[i++] = uniform(philox(index >> 2, seed).word[index & 3]);
  };
  while (i < n && (first + i) % 4 != 0) one();
  for (; i + kNoiseBlock <= n; i += kNoiseBlock)
    fill_noise_block(static_cast<uint64_t>(first + i) >> 2, seed, noise + i);
  while (i < n) one();
}

}  // namespace amp_kernels::cpu
