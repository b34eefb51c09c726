// How bands are cut into pieces, so that there is work for all blocks. A band is a part of a tensor that is computed
// independently of the other bands: neighbouring columns with all of their rows, or an int8 group with all of its
// segments (int8_extremes.cuh).
//
//   band 0   band 1   band 2
//   [piece]  [piece]  [piece]     A block works on a piece step by step. In one step, each thread of the block
//   [piece]  [piece]  [piece]     takes one pack, or each team of threads takes one segment.
#pragma once

#include <algorithm>
#include <cstdint>

namespace amp_kernels::cuda {

struct Pieces {
  int64_t steps;  // per piece; the last piece of a band may have fewer
  int64_t count;  // pieces per band

  // Compares eight divisions, which aim at 1 to 8 waves, and chooses the one with the least estimated time. A wave is
  // `resident` pieces, which run at the same time. The time of a piece is the time of its steps, plus that of
  // `in_flight` steps for its first load. If pieces are long, there are fewer first loads. If pieces are short, the
  // last wave is fuller.
  Pieces(int64_t steps_of_band, int64_t bands, int64_t resident, int64_t in_flight) : steps(0), count(0) {
    int64_t least = INT64_MAX;
    for (int waves = 1; waves <= 8; ++waves) {
      const int64_t wanted = std::min(std::max<int64_t>(1, waves * resident / bands), steps_of_band);
      const int64_t piece_steps = (steps_of_band + wanted - 1) / wanted,
                    pieces = (steps_of_band + piece_steps - 1) / piece_steps;
      const int64_t time = (bands * pieces + resident - 1) / resident * (piece_steps + in_flight);
      if (time >= least) continue;
      least = time;
      steps = piece_steps;
      count = pieces;
    }
  }
};

}  // namespace amp_kernels::cuda
