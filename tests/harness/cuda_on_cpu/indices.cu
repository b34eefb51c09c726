// The index arithmetic of the kernels as C functions, for tests/gpu_static/test_indices.py.
#include "../../../csrc/cuda/int8_walk.cuh"
#include "../../../csrc/cuda/tiles.cuh"

using namespace amp_kernels::cuda;  // NOLINT: this file is nothing but an interface to it

namespace {

template <int kPack>
void divide(int64_t begin, int64_t rest, int64_t chunk_size, int phase, int k, int* to) {
  const Division<kPack> division(begin, rest, chunk_size, phase);
  const int values[] = {division.lead, division.first, division.packs, division.others, division.other(k)};
  std::copy(std::begin(values), std::end(values), to);
}

}  // namespace

extern "C" {

void division(int pack, int64_t begin, int64_t rest, int64_t chunk_size, int phase, int k, int* to) {
  (pack == 4 ? divide<4> : divide<8>)(begin, rest, chunk_size, phase, k, to);
}

void tile_position(int tile_m, int tile_n, int64_t m, int64_t n, int64_t tile, int64_t* to) {
  const auto of = tile_m == 64    ? TilePosition::of<64, 64>
                  : tile_n == 128 ? TilePosition::of<128, 128>
                                  : TilePosition::of<128, 256>;
  const TilePosition position = of(m, n, tile);
  to[0] = position.m;
  to[1] = position.n;
}

int64_t split_off_(int64_t* index, int64_t size) { return split_off(*index, size); }

void pieces(int64_t steps_of_band, int64_t bands, int64_t resident, int64_t in_flight, int64_t* to) {
  const Pieces cut(steps_of_band, bands, resident, in_flight);
  to[0] = cut.steps;
  to[1] = cut.count;
}
}
