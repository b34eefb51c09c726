// GPUs whose kernels the emulator runs: which of them a thread uses, what memory they have, what a capture refuses.
//
// A GPU's memory is a stretch of addresses of its own. Each allocation lies between guard bands and holds NaN until it
// is written. No address is used twice, so that a kernel that reads freed memory is found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace gpus {

constexpr int kCount = 2;

int current();  // of this thread
void use(int gpu);

// Like cudaMalloc and cudaFree. `allocated_in` is -1 for memory of the host.
void* allocate(size_t bytes, int gpu);
void release(void* memory);
int allocated_in(const void* address);

// The stream `id` of a GPU as launches take it; 0 is the default stream.
constexpr int kStreams = 1000;  // of a GPU
void* stream(int gpu, int64_t id);

// Throws what CUDA says of a call that waits, or that loads a kernel, while a stream captures.
void refuse_in_capture(const char* what);

}  // namespace gpus
