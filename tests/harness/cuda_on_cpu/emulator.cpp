#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "banks.h"
#include "races.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace emulator {

int multiprocessors = 3, compute_capability = 90, compiled_for = 90, device = 0;
std::set<std::tuple<const void*, unsigned, size_t>> launched;
std::set<const void*> loaded, loaded_late;
bool is_capturing = false;
void (*on_load)(const void*) = nullptr;
void (*on_launch)(const void*, cudaStream_t) = nullptr;
const char* (*why_not_readable)(uintptr_t, uintptr_t) = nullptr;
bool has_kernels = true;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kSharedLimit = 99 * 1024;  // of a block on sm_86, sm_89 and sm_120: since sm_80 none has less
constexpr size_t kGuardBytes = 1024;
constexpr unsigned kMaxThreads = 1024;
// As a float, a double or an int: NaN, NaN, -1.
constexpr unsigned char kPoison = 0xff;
constexpr unsigned char kGuard = 0xa5;

enum State : unsigned char { kRunnable, kAtBarrier, kAtShuffle, kFinished };

struct Copy {
  char* shared;
  const char* global;
  int bytes;
  bool is_done;  // in memory. Its thread may have to wait for it all the same
};

struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  std::unique_ptr<unsigned char[]> stack;
  bool started;  // once started, a fiber runs thread after thread, block after block
  const char* waiting_for;
  unsigned mask, source_lane;  // of the shuffle it waits for
  uint64_t bits;               // what it gave, and then what it gets
  unsigned char given[kMostGiven];
  std::vector<std::vector<Copy>> copies;  // groups that were committed, and the one that is being made
};

Order order = kForwards;
std::mt19937 random_source;

std::vector<Fiber> fibers;
State states[kMaxThreads];  // of the fibers, side by side: they are searched after every step
jmp_buf scheduler;
unsigned current;                      // the running fiber
const std::function<void()>* running;  // the kernel; nullptr between launches
std::string error;
alignas(16) unsigned char shared[kSharedLimit + kGuardBytes];
bool barrier_value;
unsigned arrived, first_arrived;  // at the barrier: how many threads, and the first of them
Given exchanged[kMaxThreads / 32];
using Range = std::pair<uintptr_t, uintptr_t>;
std::vector<Range> forbidden;  // addresses, from the first up to the second, in their order
bool is_planning = false;
bool is_counting = false;  // the cycles of shared memory
Banks banks;
bool is_checking_races = false;
Races races;
size_t shared_bytes_of_block;
Range watched;
size_t watched_reads[17];  // in the watched range, by their bytes

// ------------------------------------------------------------------------------------------ fibers
// ucontext makes the stacks; setjmp switches between them, without a system call.

void suspend() {
  if (_setjmp(fibers[current].resume) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
    (*running)();
    states[current] = kFinished;
    suspend();
  }
}

void resume(unsigned thread) {
  current = thread;
  threadIdx = make_uint3(thread, 0, 0);
  Fiber& fiber = fibers[thread];
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

void prepare_fibers(unsigned count) {
  if (fibers.empty()) fibers.resize(kMaxThreads);  // never moved again: a ucontext_t points into itself
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    states[i] = kRunnable;
    fiber.copies.assign(1, {});
    if (fiber.started) continue;
    if (!fiber.stack) fiber.stack.reset(new unsigned char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
}

// --------------------------------------------------------------------------------------- one block

std::string thread_name(unsigned thread) {
  return "thread " + std::to_string(thread) + " of block " + std::to_string(blockIdx.x);
}

// The threads of a block that is reported are left where they are and their fibers made anew.
void fail(const std::string& message) {
  if (error.empty()) error = message;
}

// The next thread to run, or blockDim.x.
unsigned pick() {
  const unsigned count = blockDim.x;
  const unsigned start = order == kShuffled ? random_source() % count : 0;
  const void* found =
      order == kBackwards ? memrchr(states, kRunnable, count) : memchr(states + start, kRunnable, count - start);
  if (found == nullptr && start > 0) found = memchr(states, kRunnable, start);
  return found == nullptr ? count : static_cast<unsigned>(static_cast<const State*>(found) - states);
}

bool same(const char* name, const char* other) { return name == other || strcmp(name, other) == 0; }

void report_deadlock() {
  std::string waiting;
  unsigned finished = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) {
    if (states[i] == kFinished) {
      ++finished;
    } else if (i == 0 || states[i - 1] == kFinished || !same(fibers[i].waiting_for, fibers[i - 1].waiting_for)) {
      waiting += (waiting.empty() ? "" : ", ") + std::to_string(i) + ".. at " + fibers[i].waiting_for;
    }
  }
  if (finished == blockDim.x) return;
  fail("deadlock in block " + std::to_string(blockIdx.x) + ": threads wait for threads that never arrive (" + waiting +
       "; " + std::to_string(finished) + " of " + std::to_string(blockDim.x) + " have left the kernel)");
}

void run_block(size_t shared_bytes, const std::function<void()>& kernel) {
  running = &kernel;
  if (is_checking_races) races.begin_block(blockIdx.x, blockDim.x);
  shared_bytes_of_block = shared_bytes;
  memset(shared, kPoison, shared_bytes);
  memset(shared + shared_bytes, kGuard, kGuardBytes);
  prepare_fibers(blockDim.x);
  barrier_value = false;
  arrived = 0;
  for (unsigned thread; error.empty() && (thread = pick()) != blockDim.x;) resume(thread);
  running = nullptr;
  banks.fold();
  if (error.empty()) report_deadlock();
  for (size_t i = 0; i < kGuardBytes; ++i)
    if (shared[shared_bytes + i] != kGuard)
      fail("block " + std::to_string(blockIdx.x) + " wrote past its " + std::to_string(shared_bytes) +
           " bytes of shared memory, at byte " + std::to_string(shared_bytes + i));
}

}  // namespace

void set_order(Order new_order, unsigned seed) {
  order = new_order;
  random_source.seed(seed);
}

void set_planning(bool planning) { is_planning = planning; }

void set_device(int new_capability, int new_compiled_for) {
  static std::map<std::pair<int, int>, int> numbers{{{90, 90}, 0}};
  compute_capability = new_capability;
  compiled_for = new_compiled_for;
  device = numbers.try_emplace({new_capability, new_compiled_for}, static_cast<int>(numbers.size())).first->second;
}

size_t block_memory() { return compute_capability < 80 ? 64 * 1024 : kSharedLimit; }

void trap() {
  fail(thread_name(current) + ": trap, in code compiled for sm_" + std::to_string(compiled_for));
  suspend();
  std::abort();  // the block is over
}

void run(const void* address, unsigned grid, unsigned block, size_t shared_bytes, cudaStream_t stream,
         const std::function<void()>& kernel) {
  if (grid == 0 || block == 0 || block > kMaxThreads || shared_bytes > block_memory())
    throw std::runtime_error("invalid launch: grid " + std::to_string(grid) + ", block " + std::to_string(block) +
                             ", " + std::to_string(shared_bytes) + " bytes of shared memory");
  if (on_launch != nullptr) on_launch(address, stream);
  launched.insert({address, block, shared_bytes});
  if (is_planning) return;
  gridDim = dim3(grid);
  blockDim = dim3(block);
  if (is_checking_races) races.begin_launch();
  std::vector<unsigned> blocks(grid);
  for (unsigned i = 0; i < grid; ++i) blocks[i] = order == kBackwards ? grid - 1 - i : i;
  if (order == kShuffled) std::shuffle(blocks.begin(), blocks.end(), random_source);
  for (unsigned i : blocks) {
    blockIdx = make_uint3(i, 0, 0);
    run_block(shared_bytes, kernel);
    if (error.empty()) continue;
    for (Fiber& fiber : fibers) fiber.started = false;
    throw std::runtime_error(std::exchange(error, {}));
  }
}

char* shared_memory() { return reinterpret_cast<char*>(shared); }

static void report_race(const std::string& what, const char* does, bool in_shared) {
  if (what.empty()) return;
  fail("race: " + thread_name(current) + does + (in_shared ? "shared" : "global") + " memory " + what +
       ", and nothing orders the two");
  suspend();
}

static void check_race(const void* address, size_t bytes, bool writes, bool in_shared) {
  if (!is_checking_races) return;
  const std::string what = races.note(current, reinterpret_cast<uintptr_t>(address), bytes, writes, in_shared);
  report_race(what, writes ? " writes " : " reads ", in_shared);
}

// Whether these bytes are shared memory; then they must be of what the block asked for.
static bool is_shared(const void* address, size_t bytes, AccessKind kind, const void* code) {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(shared);
  if (running == nullptr || offset >= sizeof(shared)) return false;
  if (offset + bytes > shared_bytes_of_block) {
    const bool writes = kind == kStore || kind == kCopy || kind == kAtomic;
    fail(thread_name(current) + (writes ? " wrote" : " read") + " past its " + std::to_string(shared_bytes_of_block) +
         " bytes of shared memory, at byte " + std::to_string(offset));
    suspend();
  }
  const Access access{code, static_cast<uint32_t>(offset), 0, kind};
  for (size_t done = 0; is_counting && done < bytes; done += 16) {
    Access part = access;
    part.offset += done;
    part.bytes = static_cast<uint32_t>(std::min<size_t>(bytes - done, 16));
    banks.note(current, part);
  }
  if (kind != kAtomic) check_race(address, bytes, kind == kStore || kind == kCopy, true);
  return true;
}

static bool is_on_stack_of_fiber(uintptr_t address) {
  const auto begin = reinterpret_cast<uintptr_t>(fibers[current].stack.get());
  return begin <= address && address < begin + kStackBytes;
}

// Each read of a kernel, by the compiler's own calls (below), and each asynchronous copy.
static void check_readable(const void* address, size_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(address);
  if (why_not_readable == nullptr || is_on_stack_of_fiber(first)) return;
  if (const char* const reason = why_not_readable(first, first + bytes - 1)) {
    fail(thread_name(current) + " reads " + std::to_string(bytes) + " bytes: " + reason);
    suspend();
  }
}

static void check_read(const void* address, size_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(address), last = first + bytes - 1;
  if (running != nullptr && bytes <= 16 && watched.first <= last && first < watched.second) ++watched_reads[bytes];
  if (running == nullptr) return;
  check_readable(address, bytes);
  const auto range = std::upper_bound(forbidden.begin(), forbidden.end(), Range{last, UINTPTR_MAX});
  if (range == forbidden.begin() || std::prev(range)->second <= first) return;
  fail(thread_name(current) + " reads " + std::to_string(bytes) + " bytes, some of them outside a tensor");
  suspend();
}

// ---------------------------------------------------------------------------------------- barriers

bool block_barrier(bool value, const char* name) {
  states[current] = kAtBarrier;
  fibers[current].waiting_for = name;
  barrier_value |= value;
  if (arrived == 0) first_arrived = current;
  if (const char* const other = fibers[first_arrived].waiting_for; !same(name, other))
    fail(thread_name(current) + " is at " + name + " while thread " + std::to_string(first_arrived) + " is at " +
         other);
  if (++arrived == blockDim.x) {
    arrived = 0;
    for (unsigned i = 0; i < blockDim.x; ++i) {
      states[i] = kRunnable;
      fibers[i].bits = barrier_value;
    }
    barrier_value = false;
    if (is_checking_races) races.barrier();
  }
  suspend();  // the last one too, so that the order decides who goes first, not who came last
  return fibers[current].bits != 0;
}

void fence() {
  if (is_checking_races) races.fence(current);
}

// Makes an atomic operation on shared or global memory: a number becomes change(number). Returns what it was. `code`:
// the instruction.
template <class T, class Change>
static T atomically(T* address, const Change& change, const void* code) {
  const bool in_shared = is_shared(address, sizeof(T), kAtomic, code);
  if (!in_shared) check_read(address, sizeof(T));
  if (is_checking_races) {
    const auto race = races.atomic(current, reinterpret_cast<uintptr_t>(address), sizeof(T), in_shared);
    report_race(race, " changes ", in_shared);
  }
  return std::exchange(*address, change(*address));
}

unsigned atomic_add(unsigned* address, unsigned value) {
  return atomically(address, [value](unsigned x) { return x + value; }, __builtin_return_address(0));
}

unsigned long long atomic_add(unsigned long long* address, unsigned long long value) {
  return atomically(address, [value](unsigned long long x) { return x + value; }, __builtin_return_address(0));
}

int atomic_max(int* address, int value) {
  return atomically(address, [value](int x) { return std::max(x, value); }, __builtin_return_address(0));
}

// Waits until all lanes that the mask names are here. True for the last of them, which does the work for all and then
// calls `release`; the others are resumed by that.
static bool is_last_to_meet(unsigned mask, const char* name) {
  const unsigned lane = current % 32;
  const Fiber* const warp = &fibers[current - lane];
  Fiber& self = fibers[current];
  states[current] = kAtShuffle;
  self.waiting_for = name;
  self.mask = mask;
  for (unsigned i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const unsigned thread = current - lane + i;
    if (thread >= blockDim.x || states[thread] != kAtShuffle || warp[i].mask != mask ||
        !same(warp[i].waiting_for, name)) {
      suspend();  // a lane that never arrives ends in report_deadlock
      return false;
    }
  }
  return true;
}

static void release(unsigned mask) {
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1) states[current - current % 32 + i] = kRunnable;
  suspend();
}

uint64_t warp_shuffle(unsigned mask, uint64_t bits, unsigned source_lane, const char* name) {
  const unsigned lane = current % 32;
  Fiber* const warp = &fibers[current - lane];
  Fiber& self = fibers[current];
  self.source_lane = source_lane;
  self.bits = bits;
  if ((mask >> lane & 1) == 0 || (mask >> source_lane & 1) == 0) {
    fail(thread_name(current) + ": " + name + " by lane " + std::to_string(lane) + " from lane " +
         std::to_string(source_lane) + ", and its mask does not name both");
    suspend();
  }
  if (is_last_to_meet(mask, name)) {
    uint64_t given[32];
    for (unsigned i = 0; i < 32; ++i) given[i] = warp[i].bits;
    for (unsigned i = 0; i < 32; ++i)
      if (mask >> i & 1) warp[i].bits = given[warp[i].source_lane];
    release(mask);
  }
  return self.bits;
}

const Given& warp_exchange(const void* mine, size_t size, const char* name) {
  const unsigned first = current - current % 32;
  Given& all = exchanged[first / 32];
  memcpy(fibers[current].given, mine, size);
  if (is_last_to_meet(~0u, name)) {
    for (unsigned i = 0; i < 32; ++i) memcpy(all.bytes[i], fibers[first + i].given, kMostGiven);
    release(~0u);
  }
  return all;
}

// ---------------------------------------------------------------------------------------- ldmatrix

// The rows that the lanes of a warp name. `code`: the instruction.
static const Given& exchange_rows(const char* row, const char* name, const void* code) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  if (!is_aligned || !is_shared(row, 16, kMatrices, code)) {
    fail(thread_name(current) + ": " + name + " of a row " +
         (is_aligned ? "outside of shared memory" : "that is not aligned to 16 bytes"));
    suspend();
  }
  return warp_exchange(&row, sizeof(row), name);
}

void load_matrices(uint32_t (&words)[4], const char* row) {
  const Given& given = exchange_rows(row, "ldmatrix", __builtin_return_address(0));
  for (int i = 0; i < 4; ++i)
    memcpy(&words[i], given.of<const char*>(8 * i + threadIdx.x % 32 / 4) + threadIdx.x % 4 * 4, 4);
}

void load_transposed(uint32_t (&words)[4], const char* row) {
  const Given& given = exchange_rows(row, "ldmatrix.trans", __builtin_return_address(0));
  const unsigned column = threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2;
  for (unsigned i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (unsigned j = 0; j < 2; ++j) memcpy(&pair[j], given.of<const char*>(8 * i + first + j) + column * 2, 2);
    memcpy(&words[i], pair, 4);
  }
}

// --------------------------------------------------------------------------------- delayed copies

static void carry_out(Copy& copy) {
  if (copy.is_done) return;
  copy.is_done = true;
  memset(copy.shared, 0, 16);
  if (copy.bytes == 0) return;  // the address may be anything
  check_read(copy.global, copy.bytes);
  check_readable(copy.global, 16);  // as the hardware reads, whatever it keeps
  memcpy(copy.shared, copy.global, copy.bytes);
}

void copy_async(char* shared_address, const char* global, int bytes) {
  Copy copy{shared_address, global, bytes, false};
  if (compiled_for < 80 && bytes % 16 != 0) {
    fail(thread_name(current) + ": before sm_80 a copy is of 16 bytes or of none, not of " + std::to_string(bytes));
    suspend();
  }
  if ((reinterpret_cast<uintptr_t>(shared_address) | reinterpret_cast<uintptr_t>(global)) % 16 != 0 || bytes < 0 ||
      bytes > 16) {
    fail(thread_name(current) + ": cp.async of " + std::to_string(bytes) + " bytes, or not aligned to 16");
    suspend();
  }
  if (!is_shared(shared_address, 16, kCopy, __builtin_return_address(0))) {
    fail(thread_name(current) + ": cp.async to an address outside of shared memory");
    suspend();
  }
  if (is_checking_races) races.copy(current, reinterpret_cast<uintptr_t>(shared_address), false);
  check_race(global, bytes, false, false);
  if (order == kBackwards || (order == kShuffled && random_source() % 2 == 0)) carry_out(copy);
  fibers[current].copies.back().push_back(copy);
}

void commit_copies() { fibers[current].copies.emplace_back(); }

void wait_copies(unsigned pending) {
  auto& copies = fibers[current].copies;  // the last group is not committed
  const size_t done = copies.size() - 1 > pending ? copies.size() - 1 - pending : 0;
  for (size_t i = 0; i < done; ++i) {
    for (Copy& copy : copies[i]) {
      carry_out(copy);
      if (is_checking_races) races.copy(current, reinterpret_cast<uintptr_t>(copy.shared), true);
    }
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

}  // namespace emulator

// Counts the cycles of shared memory from now on, or no longer. `counts` gets those so far, unless it is null.
extern "C" void count_banks(bool counting, emulator::BankCounts* counts) {
  if (counts != nullptr) memcpy(counts, emulator::banks.counts, sizeof(emulator::banks.counts));
  memset(emulator::banks.counts, 0, sizeof(emulator::banks.counts));
  emulator::is_counting = counting;
}

// Whether each access is checked for races from now on.
extern "C" void check_races(bool checking) { emulator::is_checking_races = checking; }

// ------------------------------------------------------------------------------------------- reads
// The compiler calls these before each read of a kernel, as it calls the run-time library of the address sanitizer. A
// launch that reads a byte of what forbid_reads was given fails, whatever it does with that byte: kernels that take an
// aligned word and drop a part of it give right results.

extern "C" void forbid_reads(const emulator::Range* ranges, size_t count) {
  emulator::forbidden.assign(ranges, ranges + count);
  std::sort(emulator::forbidden.begin(), emulator::forbidden.end());
}

// Counts reads of these addresses, by their bytes.
extern "C" void watch_reads(uintptr_t from, uintptr_t to) {
  emulator::watched = {from, to};
  memset(emulator::watched_reads, 0, sizeof(emulator::watched_reads));
}

extern "C" size_t reads_of(size_t bytes) { return emulator::watched_reads[bytes]; }

// Before each write too: shared memory is a kernel's to the byte.

namespace emulator {

static void on_read(const void* address, size_t size, const void* code) {
  if (is_shared(address, size, kLoad, code)) return;
  check_read(address, size);
  if (running != nullptr && !is_on_stack_of_fiber(reinterpret_cast<uintptr_t>(address)))
    check_race(address, size, false, false);
}

static void on_write(const void* address, size_t size, const void* code) {
  if (!is_shared(address, size, kStore, code) && running != nullptr &&
      !is_on_stack_of_fiber(reinterpret_cast<uintptr_t>(address)))
    check_race(address, size, true, false);
}

}  // namespace emulator

#define ACCESS(size)                                                  \
  extern "C" void __asan_load##size##_noabort(const void* address) {  \
    emulator::on_read(address, size, __builtin_return_address(0));    \
  }                                                                   \
  extern "C" void __asan_store##size##_noabort(const void* address) { \
    emulator::on_write(address, size, __builtin_return_address(0));   \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
extern "C" void __asan_loadN_noabort(const void* address, size_t size) {
  emulator::on_read(address, size, __builtin_return_address(0));
}
extern "C" void __asan_storeN_noabort(const void* address, size_t size) {
  emulator::on_write(address, size, __builtin_return_address(0));
}
extern "C" void __asan_handle_no_return() {}
extern "C" void __asan_before_dynamic_init(const char*) {}
extern "C" void __asan_after_dynamic_init() {}

// ----------------------------------------------------------------------------- undefined behaviour
// In place of the sanitizer's run-time library, which would end the process: the launch fails, with the
// place. The thread never goes on. Each handler gets a struct that begins with the source location.

namespace {

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

void undefined_behaviour(const char* what, const SourceLocation* where) {
  std::string message =
      std::string("undefined behaviour (") + what + ") at " + where->file + ":" + std::to_string(where->line);
  if (emulator::running == nullptr) {
    fprintf(stderr, "%s\n", message.c_str());
    abort();
  }
  emulator::fail(emulator::thread_name(emulator::current) + ": " + message);
  emulator::suspend();
}

}  // namespace

#define HANDLER(name, what) \
  extern "C" void __ubsan_handle_##name(const SourceLocation* where) { undefined_behaviour(what, where); }
HANDLER(type_mismatch_v1, "null or misaligned pointer, or not enough room behind it")
HANDLER(out_of_bounds, "index out of bounds")
HANDLER(add_overflow, "overflow of +")
HANDLER(sub_overflow, "overflow of -")
HANDLER(mul_overflow, "overflow of *")
HANDLER(negate_overflow, "overflow of unary -")
HANDLER(divrem_overflow, "division by zero")
HANDLER(shift_out_of_bounds, "shift out of bounds")
HANDLER(load_invalid_value, "invalid bool or enum")
HANDLER(nonnull_arg, "null argument")
HANDLER(builtin_unreachable, "unreachable code")
HANDLER(missing_return, "missing return")
HANDLER(invalid_builtin, "invalid builtin argument")
HANDLER(vla_bound_not_positive, "array bound not positive")
HANDLER(float_cast_overflow, "float cast out of range")
