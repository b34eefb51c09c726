// How long a warp's accesses to shared memory take. It has 32 banks of 4 bytes, and a bank gives one of its words in a
// cycle, to any number of lanes. An instruction moves at most 128 bytes in a cycle: what lanes ask for in pieces of 8
// or 16 bytes goes in 2 or 4 phases of half or a quarter of a warp. A phase takes a cycle for each different word of
// the bank that has most of them. An atomic operation takes a cycle for each lane of the bank that most lanes access,
// even if these lanes access the same word.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace emulator {

enum AccessKind : unsigned char { kLoad, kStore, kMatrices, kCopy, kAtomic, kAccessKinds };  // ldmatrix; cp.async

struct Access {
  const void* code;  // the instruction
  uint32_t offset;   // in shared memory
  uint32_t bytes;
  AccessKind kind;
};

struct BankCounts {
  uint64_t phases, cycles;  // equal where no two words of a phase are in one bank
};

class Banks {
 public:
  static constexpr unsigned kWidths = 5;  // 1, 2, 4, 8, 16 bytes

  // One of a thread's accesses, in the order of its program.
  void note(unsigned thread, const Access& access) {
    if (threads_.size() <= thread) threads_.resize(thread + 1);
    std::vector<Access>& before = threads_[thread];
    if (!before.empty() && are_one(before.back(), access)) {
      before.back().bytes += access.bytes;
    } else {
      before.push_back(access);
    }
  }

  // At the end of a block. The n-th time that the lanes of a warp are at an instruction is one access of the warp.
  void fold() {
    for (size_t first = 0; first < threads_.size(); first += 32) {
      std::map<std::tuple<const void*, AccessKind, unsigned, unsigned>, std::vector<Lane>> of_warp;
      for (unsigned lane = 0; lane < 32 && first + lane < threads_.size(); ++lane) {
        std::map<std::tuple<const void*, AccessKind>, unsigned> times;
        for (const Access& access : threads_[first + lane])
          of_warp[{access.code, access.kind, width_of(access), times[{access.code, access.kind}]++}].push_back(
              {lane, access.offset});
      }
      for (const auto& [key, lanes] : of_warp) count(std::get<1>(key), std::get<2>(key), lanes);
    }
    threads_.clear();
  }

  BankCounts counts[kAccessKinds][kWidths] = {};

 private:
  struct Lane {
    unsigned lane;
    uint32_t offset;
  };

  // nvcc makes one instruction of up to 16 bytes of a thread's neighbouring accesses where the first is aligned to all.
  static bool are_one(const Access& first, const Access& second) {
    const uint32_t bytes = first.bytes + second.bytes;
    const uint32_t alignment = bytes <= 4 ? 4 : bytes <= 8 ? 8 : 16;
    return (first.kind == kLoad || first.kind == kStore) && first.kind == second.kind && bytes <= 16 &&
           second.offset == first.offset + first.bytes && first.offset % alignment == 0;
  }

  static unsigned width_of(const Access& access) {
    unsigned width = 0;
    while (1u << width < access.bytes && width < kWidths - 1) ++width;
    return width;
  }

  void count(AccessKind kind, unsigned width, const std::vector<Lane>& lanes) {
    const unsigned words = width <= 2 ? 1 : 1u << (width - 2), lanes_a_phase = 32 / words;
    for (unsigned first = 0; first < 32; first += lanes_a_phase) {
      std::array<std::set<std::pair<uint32_t, unsigned>>, 32> of_bank;
      for (const Lane& lane : lanes)
        if (lane.lane >= first && lane.lane < first + lanes_a_phase)
          for (uint32_t word = lane.offset / 4; word < lane.offset / 4 + words; ++word)
            of_bank[word % 32].insert({word, kind == kAtomic ? lane.lane : 0});
      size_t most = 0;
      for (const auto& different : of_bank) most = std::max(most, different.size());
      if (most == 0) continue;
      ++counts[kind][width].phases;
      counts[kind][width].cycles += most;
    }
  }

  std::vector<std::vector<Access>> threads_;
};

}  // namespace emulator
