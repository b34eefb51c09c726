// Pages of 2 MB for large results.
#pragma once

#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace amp_kernels::cpu {

// Asks Linux for pages of 2 MB in memory that was just allocated. From 32 MiB on (DEFAULT_MMAP_THRESHOLD_MAX of glibc)
// malloc takes new memory from Linux each time, and the first write to each page of 4 KB waits for Linux: 14 of the 17
// ms of dequantizing 16M codes to fp16 (Linux 6.18, two cores). With 16 pages of 2 MB it took half as long. Linux gives
// them if /sys/kernel/mm/transparent_hugepage/enabled is `madvise`. If it gives none, nothing changes.
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
