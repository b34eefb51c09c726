// The int8 CPU kernels compiled for the oldest CPU of this architecture, in place of those of amp_kernels._C, and their
// products by a tile of the caller's choice instead of the best that runs.
#include "../../csrc/bindings/int8_cpu.cpp"

namespace amp_kernels::cpu {
namespace {

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

bool int8_matmul_by(int64_t tile, Tensor a, Tensor b, Tensor a_scale, std::optional<Tensor> a_zero_point,
                    Tensor b_scale, std::optional<Tensor> b_zero_point, Tensor out) {
  const Int8Matmul args = make_matmul(a, b, a_scale, a_zero_point, b_scale, b_zero_point, {}, out, {}, {});
  const auto run = [&](auto tile) { multiply<decltype(tile)>(Int8Product<decltype(tile)>(args)); };
#if defined(__x86_64__)
  return with_one_of<PortableTile<int32_t>, Avx2Tile, VnniTile>(tile, run);
#else
  return with_one_of<PortableTile<int32_t> >(tile, run);
#endif
}

bool int8_linear_by(int64_t tile, Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias, Tensor out) {
  const Int8Linear args = make_linear(x, weight, scale, bias, out);
  const auto run = [&](auto tile) {
    with_dtype(args.dtype,
               [&](auto value) { multiply<decltype(tile)>(LinearProduct<decltype(tile), decltype(value)>(args)); });
  };
#if defined(__x86_64__)
  return with_one_of<PortableTile<float>, Avx2FloatTile, Avx512FloatTile>(tile, run);
#else
  return with_one_of<PortableTile<float> >(tile, run);
#endif
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

}  // namespace amp_kernels::cpu
