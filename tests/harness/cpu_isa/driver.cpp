// The int8 CPU kernels compiled for the oldest CPU of this architecture, in place of those of amp_kernels._C, and their
// products by a tile of the caller's choice instead of the best that runs.
#include "../../../csrc/cpu/int8.cpp"
#include "../../../csrc/ops/int8.cpp"

namespace amp_kernels {
namespace {

using namespace cpu;

// Whether there is such a tile and it ran.
template <class F, class Tile, class... Others>
bool with_tile(int64_t index, const F& f) {
  if (index == 0) {
    if (Tile::runs()) f(Tile{});
    return Tile::runs();
  }
  if constexpr (sizeof...(Others) > 0) return with_tile<F, Others...>(index - 1, f);
  return false;
}

template <class... Tiles, class F>
bool with_one_of(int64_t index, const F& f) {
  return with_tile<F, Tiles...>(index, f);
}

// In place of Cpu (csrc/ops/device.h): one tile, which writes to memory of the caller's.
class OneTile {
 public:
  static inline int64_t tile;
  static inline void* out;
  static inline bool ran;

  explicit OneTile(const Tensor&) {}
  static constexpr bool kReadsChunks = false;

  void run(Int8Matmul args) {
    args.out = out;
    const auto multiply_by = [&](auto tile) { multiply<decltype(tile)>(Int8Product<decltype(tile)>(args)); };
#if defined(__x86_64__)
    ran = with_one_of<PortableTile<int32_t>, Avx2Tile, VnniTile>(tile, multiply_by);
#else
    ran = with_one_of<PortableTile<int32_t> >(tile, multiply_by);
#endif
  }

  void run(Int8Linear args) {
    args.out = out;
    const auto multiply_by = [&](auto tile) {
      with_dtype(args.dtype,
                 [&](auto value) { multiply<decltype(tile)>(LinearProduct<decltype(tile), decltype(value)>(args)); });
    };
#if defined(__x86_64__)
    ran = with_one_of<PortableTile<float>, Avx2FloatTile, Avx512FloatTile>(tile, multiply_by);
#else
    ran = with_one_of<PortableTile<float> >(tile, multiply_by);
#endif
  }
};

bool int8_matmul_by(int64_t tile, Tensor a, Tensor b, Tensor a_scale, std::optional<Tensor> a_zero_point,
                    Tensor b_scale, std::optional<Tensor> b_zero_point, Tensor out) {
  OneTile::tile = tile, OneTile::out = out.data_ptr();
  int8_matmul<OneTile>(a, b, a_scale, a_zero_point, b_scale, b_zero_point, {}, out.scalar_type(), {}, {});
  return OneTile::ran;
}

bool int8_linear_by(int64_t tile, Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias, Tensor out) {
  OneTile::tile = tile, OneTile::out = out.data_ptr();
  int8_linear<OneTile>(x, weight, scale, bias);
  return OneTile::ran;
}

}  // namespace

STABLE_TORCH_LIBRARY(amp_kernels_tiles, m) {
  m.def(
      "int8_matmul(int tile, Tensor a, Tensor b, Tensor a_scale, Tensor? a_zero_point, Tensor b_scale, "
      "Tensor? b_zero_point, Tensor(a!) out) -> bool");
  m.def("int8_linear(int tile, Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor(a!) out) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(amp_kernels_tiles, CPU, m) {
  m.impl("int8_matmul", TORCH_BOX(&int8_matmul_by));
  m.impl("int8_linear", TORCH_BOX(&int8_linear_by));
}

}  // namespace amp_kernels
