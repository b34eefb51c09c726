// Tensor-core instructions, and the copies to shared memory that feed them. As in portable.h, there is one version for
// nvcc and one for a host compiler.
//
// An instruction computes c += a * b. A fragment is the part of a, b or c that a lane holds. A word is 32 bits: four
// int8 codes or two 16-bit floats along k. Fragments are laid out as for the instructions mma.m16n8k32 (codes) and
// m16n8k16 (floats). With g = lane / 4 and t = lane % 4:
//
//   a[0]   row g,      word t of the first half of k      b[0]         column g, word t of the first half of k
//   a[1]   row g + 8,  word t of the first half           b[1]         column g, word t of the second half
//   a[2]   row g,      word t of the second half          c[0], c[1]   row g,     columns 2t and 2t + 1
//   a[3]   row g + 8,  word t of the second half          c[2], c[3]   row g + 8, columns 2t and 2t + 1
#pragma once

#include "portable.h"

namespace amp_kernels::cuda {

// Returns `sum` plus the four codes of a word.
__device__ __forceinline__ int add_codes(uint32_t codes, int sum) {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(codes >> 8 * i);
  return sum;
#else
  return __dp4a(static_cast<int>(codes), 0x01010101, sum);
#endif
}

// c += a * b, where a is 16 x 32 codes and b is 32 x 8 codes.
__device__ __forceinline__ void multiply_codes(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  emulator::multiply_codes(c, a, b);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)  // each instruction takes half of the rows and half of k
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])
        : "r"(a[i]), "r"(b[i / 2]));
#endif
}

// Whether code compiled for `sm` (75 for sm_75) multiplies bf16 on tensor cores. The tensor cores of sm_75 take only
// fp16 and codes.
inline bool multiplies_bf16(int sm) { return sm >= 80; }

// c += a * b, where a is 16 x 16 numbers and b is 16 x 8 numbers. A word holds two numbers. bf16 kernels are compiled
// for sm_75 too, but must not be launched there. They trap, because otherwise they would return zeros.
template <class T>
__device__ __forceinline__ void multiply_numbers(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if (std::is_same_v<T, __nv_bfloat16> && compiled_before(80)) return trap();
#ifdef AMP_KERNELS_CUDA_ON_CPU
  emulator::multiply_numbers(c, a, b, [](uint16_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(bits));
    return to_float(value);
  });
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
  }
#endif
}

// Loads four matrices from shared memory, each of 8 rows of 16 bytes. Lane 8 i + j passes the address of row j of
// matrix i. Each lane gets word t of row g of all four matrices (t and g as above).
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], const char* row) {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  emulator::load_matrices(words, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
#endif
}

// Loads four such matrices of 16-bit numbers, and transposes them: a word holds the numbers of rows 2t and 2t + 1 in
// column g.
__device__ __forceinline__ void load_transposed(uint32_t (&words)[4], const char* row) {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  emulator::load_transposed(words, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
#endif
}

// Whether code compiled for `sm` can copy less than 16 bytes with copy_async().
inline bool copies_parts(int sm) { return sm >= 80; }

// `bytes` is the length of a row or column that will be copied 16 bytes at a time. If it is not a multiple of 16, the
// last copy has fewer bytes. Code for sm_75 cannot do such a copy, and traps here.
__device__ __forceinline__ void expect_whole_copies(int64_t bytes) {
  if (compiled_before(80) && bytes % 16 != 0) trap();
}

// Writes 16 bytes of shared memory. The first `bytes` of them come from global memory, and the others become 0. If
// copies_parts() is false, `bytes` must be 0 or 16. If `bytes` is not 0, all 16 bytes of global memory are read.
// compute-sanitizer shows this on an H100 for LDGSTS.128.ZFILL, the machine instruction of this copy. So all 16 bytes
// must lie inside an allocation. This thread may read the result after it has waited for the copy (commit_copies and
// wait_copies). Other threads may read it after a barrier that follows this wait.
__device__ __forceinline__ void copy_async(char* shared, const char* global, int bytes) {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  emulator::copy_async(shared, global, bytes);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(__cvta_generic_to_global(global)), "r"(bytes)
      : "memory");
#else
  // Before sm_80 a copy is a load and a store. If `bytes` is 0, a predicate skips the load, and zeros are stored. There
  // is no branch. So when a thread makes several copies, all loads can start before the first store.
  int4 chunk;
  asm("{ .reg .pred p; setp.gt.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      "@p ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4]; }"
      : "=&r"(chunk.x), "=&r"(chunk.y), "=&r"(chunk.z), "=&r"(chunk.w)
      : "l"(__cvta_generic_to_global(global)), "r"(bytes));
  *reinterpret_cast<int4*>(shared) = chunk;
#endif
}

// Puts all copies that this thread started since its last commit_copies() into a group.
__device__ __forceinline__ void commit_copies() {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  emulator::commit_copies();
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the last kPending groups of this thread's copies are complete.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
#ifdef AMP_KERNELS_CUDA_ON_CPU
  emulator::wait_copies(kPending);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace amp_kernels::cuda
