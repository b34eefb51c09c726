// How blocks share bands: neighbouring columns with all of their rows, or groups with all of their segments.
//
//   band 0   band 1   band 2
//   [piece]  [piece]  [piece]     a block takes a piece, step by step; a step is a pack of each of its threads, or a
//   [piece]  [piece]  [piece]     segment of each of its teams
#pragma once

#include <algorithm>
#include <cstdint>

namespace amp_kernels::cuda {

struct Pieces {
  int64_t steps;  // of a piece; the last of a band may have fewer
  int64_t count;  // of a band

  // Long pieces, which end together: of the divisions that take 1 to 8 waves of the blocks that are `resident`, the one
  // whose waves take the least time. To begin a piece takes a latency of memory, in which a block makes `in_flight`
  // steps.
  Pieces(int64_t steps_of_band, int64_t bands, int64_t resident, int64_t in_flight) : steps(0), count(0) {
    int64_t least = INT64_MAX;
    for (int waves = 1; waves <= 8; ++waves) {
      const int64_t wanted = std::min(std::max<int64_t>(1, waves * resident / bands), steps_of_band);
      const int64_t of_piece = (steps_of_band + wanted - 1) / wanted,
                    pieces = (steps_of_band + of_piece - 1) / of_piece;
      const int64_t time = (bands * pieces + resident - 1) / resident * (of_piece + in_flight);
      if (time >= least) continue;
      least = time;
      steps = of_piece;
      count = pieces;
    }
  }
};

}  // namespace amp_kernels::cuda
