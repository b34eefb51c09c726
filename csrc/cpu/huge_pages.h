// Memory for a result that was allocated a moment ago.
#pragma once

#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace amp_kernels::cpu {

// 32 MiB and more malloc takes from the kernel anew each time (DEFAULT_MMAP_THRESHOLD_MAX of glibc), and the first
// write to each page of 4 KB waits for it: of dequantizing 16M codes to fp16 (Linux 6.18, two cores) 14 of 17 ms. Of
// pages of 2 MB 16 do, which took half as long; the kernel gives them to who asks (`madvise` in
// /sys/kernel/mm/transparent_hugepage/enabled). Where it gives none, nothing has changed.
inline void advise_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kFresh = int64_t{32} << 20;
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  if (bytes < kFresh) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (at + kPage - 1) / kPage * kPage, end = (at + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace amp_kernels::cpu
