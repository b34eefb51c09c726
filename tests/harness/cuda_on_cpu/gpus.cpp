#include "gpus.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include "emulator.h"

namespace gpus {
namespace {

constexpr size_t kSpace = size_t{1} << 40;  // addresses of a GPU; memory is taken only where they are written
constexpr size_t kGuard = 512;              // bytes on either side of an allocation
constexpr size_t kAlignment = 512;          // torch's allocator for CUDA has this too
constexpr unsigned char kCanary = 0xff;     // NaN in each dtype, as what is inside
constexpr size_t kPage = 4096;

struct Gpu {
  int compute_capability = 90, compiled_for = 90, multiprocessors = 3;
  bool has_kernels = true;  // whether the binary holds code for it
  char* space = nullptr;
  size_t used = 0;
  std::set<const void*> loaded;  // kernels
  std::map<const void*, int64_t> launches;
  void* last_stream = nullptr;
};

Gpu all[kCount];
thread_local int used_here = 0;
void (*follower)(int) = nullptr;     // is told which GPU a thread uses
std::mutex mutex;                    // of what follows
std::map<uintptr_t, size_t> blocks;  // live allocations: first byte, bytes
std::string damage;                  // the first guard band that was found written
uintptr_t known_first, known_end;    // the allocation that was read last: most reads are in the one of the read before

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

bool is_whole(const unsigned char* band, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    if (band[i] != kCanary) return false;
  return true;
}

void inspect(uintptr_t address, size_t bytes) {
  const auto* const first = reinterpret_cast<const unsigned char*>(address);
  const size_t behind = rounded(bytes, kAlignment) - bytes + kGuard;
  const bool before = !is_whole(first - kGuard, kGuard), after = !is_whole(first + bytes, behind);
  if ((before || after) && damage.empty())
    damage = std::string("memory ") + (before ? "before" : "behind") + " an allocation of " + std::to_string(bytes) +
             " bytes was written";
}

bool is_on_stack(uintptr_t address) {
  thread_local uintptr_t low = 0, high = 0;
  if (high == 0) {
    pthread_attr_t attributes;
    void* stack = nullptr;
    size_t bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &bytes);
    pthread_attr_destroy(&attributes);
    low = reinterpret_cast<uintptr_t>(stack), high = low + bytes;
  }
  return low <= address && address < high;
}

// Constants of the program, which a GPU has copies of.
bool is_constant(uintptr_t address) {
  static std::map<uintptr_t, bool> pages;
  const auto [page, is_new] = pages.try_emplace(address / kPage, false);
  Dl_info info;
  if (is_new) page->second = dladdr(reinterpret_cast<const void*>(address), &info) != 0;
  return page->second;
}

// Why a kernel of this thread's GPU may not read these bytes; nullptr if it may.
const char* why_not_readable(uintptr_t first, uintptr_t last) {
  const int gpu = allocated_in(reinterpret_cast<const void*>(first));
  if (gpu < 0) return is_on_stack(first) || is_constant(first) ? nullptr : "they are memory of the host";
  if (gpu != used_here) return "they are memory of another GPU";
  if (known_first <= first && last < known_end) return nullptr;
  const auto next = blocks.upper_bound(first);
  if (next == blocks.begin()) return "they are outside of every tensor";
  const auto block = std::prev(next);
  if (last >= block->first + block->second) return "they are outside of every tensor, or in one that was freed";
  known_first = block->first, known_end = block->first + block->second;
  return nullptr;
}

void on_load(const void* kernel) {
  if (all[used_here].loaded.insert(kernel).second) refuse_in_capture("a kernel is loaded");
}

void on_launch(const void* kernel, cudaStream_t stream) {
  Gpu& gpu = all[used_here];
  if (!gpu.has_kernels)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(cudaErrorNoKernelImageForDevice));
  if (reinterpret_cast<uintptr_t>(stream) / kStreams != static_cast<uintptr_t>(used_here))
    throw std::runtime_error("CUDA: a launch on a stream of another device than the current one");
  on_load(kernel);
  ++gpu.launches[kernel];
  gpu.last_stream = stream;
}

const bool is_registered = [] {
  emulator::why_not_readable = why_not_readable;
  emulator::on_load = on_load;
  emulator::on_launch = on_launch;
  return true;
}();

}  // namespace

int current() { return used_here; }

// The emulator runs one operator at a time, on the GPU that its thread chose last.
void use(int gpu) {
  if (gpu < 0 || gpu >= kCount) throw std::runtime_error("CUDA: invalid device ordinal");
  used_here = gpu;
  if (follower != nullptr) follower(gpu);
  emulator::set_device(all[gpu].compute_capability, all[gpu].compiled_for);
  emulator::multiprocessors = all[gpu].multiprocessors;
  emulator::has_kernels = all[gpu].has_kernels;
}

void* allocate(size_t bytes, int gpu) {
  if (bytes == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  Gpu& its = all[gpu];
  if (its.space == nullptr) {
    void* const space =
        mmap(nullptr, kSpace, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) throw std::runtime_error("fake GPU: there are no addresses for its memory");
    its.space = static_cast<char*>(space);
  }
  const size_t inside = rounded(bytes, kAlignment), taken = inside + 2 * kGuard;
  if (its.used + taken > kSpace) throw std::runtime_error("fake GPU: every address was used once");
  char* const memory = its.space + its.used + kGuard;
  memset(memory - kGuard, kCanary, taken);
  its.used += taken;
  blocks[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return memory;
}

void release(void* memory) {
  if (memory == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto block = blocks.find(reinterpret_cast<uintptr_t>(memory));
  inspect(block->first, block->second);
  // Whole pages go back to the system.
  const uintptr_t first = rounded(block->first, kPage), end = (block->first + block->second) / kPage * kPage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
  blocks.erase(block);
  known_first = known_end = 0;
}

int allocated_in(const void* address) {
  for (int gpu = 0; gpu < kCount; ++gpu)
    if (all[gpu].space != nullptr && all[gpu].space <= address && address < all[gpu].space + kSpace) return gpu;
  return -1;
}

void* stream(int gpu, int64_t id) { return reinterpret_cast<void*>(static_cast<uintptr_t>(gpu) * kStreams + id); }

void refuse_in_capture(const char* what) {
  if (emulator::is_capturing)
    throw std::runtime_error(std::string("CUDA: operation not permitted when stream is capturing (") + what + ")");
}

}  // namespace gpus

// For tests, by ctypes.
extern "C" {

void gpu_set_capturing(bool on) { emulator::is_capturing = on; }
bool gpu_is_capturing() { return emulator::is_capturing; }
void gpu_set_planning(bool on) { emulator::set_planning(on); }
void gpu_set_order(int order, unsigned seed) { emulator::set_order(static_cast<emulator::Order>(order), seed); }
void gpu_use(int gpu) { gpus::use(gpu); }
void gpu_follow(void (*follower)(int)) { gpus::follower = follower; }
int gpu_current() { return gpus::current(); }
int gpu_count() { return gpus::kCount; }
void gpu_visit_launches(int gpu, void (*visit)(const void*, int64_t)) {
  for (const auto& [kernel, count] : gpus::all[gpu].launches) visit(kernel, count);
}
void gpu_forget_launches(int gpu) { gpus::all[gpu].launches.clear(); }
void gpu_forget_loaded(int gpu) { gpus::all[gpu].loaded.clear(); }
int64_t gpu_last_stream(int gpu) { return reinterpret_cast<int64_t>(gpus::all[gpu].last_stream); }

void gpu_set(int gpu, int compute_capability, int multiprocessors, bool has_kernels) {
  gpus::all[gpu].compute_capability = gpus::all[gpu].compiled_for = compute_capability;
  gpus::all[gpu].multiprocessors = multiprocessors;
  gpus::all[gpu].has_kernels = has_kernels;
  gpus::use(gpus::current());
}
int gpu_compute_capability(int gpu) { return gpus::all[gpu].compute_capability; }
int gpu_multiprocessors(int gpu) { return gpus::all[gpu].multiprocessors; }

// The first guard band that was written since the last call, or nullptr.
const char* gpu_damage() {
  static std::string found;
  const std::lock_guard<std::mutex> lock(gpus::mutex);
  for (const auto& [address, bytes] : gpus::blocks) gpus::inspect(address, bytes);
  found = std::exchange(gpus::damage, {});
  return found.empty() ? nullptr : found.c_str();
}
}
