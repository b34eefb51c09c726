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
    with_int8_tile([&](auto tile) { multiply<decltype(tile)>(Int8Product<decltype(tile)>(args)); });
  }

  void run(Int8Conv2d args) {
    args.rows.out = out;
    with_int8_tile([&](auto tile) { multiply<decltype(tile)>(ConvProduct<decltype(tile)>(args)); });
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

 private:
  template <class F>
  static void with_int8_tile(const F& f) {
#if defined(__x86_64__)
    ran = with_one_of<PortableTile<int32_t>, Avx2Tile, VnniTile>(tile, f);
#else
    ran = with_one_of<PortableTile<int32_t> >(tile, f);
#endif
  }
};

bool int8_matmul_by(int64_t tile, Tensor a, Tensor b, Tensor a_scale, std::optional<Tensor> a_zero_point,
                    Tensor b_scale, std::optional<Tensor> b_zero_point, Tensor out) {
  OneTile::tile = tile, OneTile::out = out.data_ptr();
  int8_matmul<OneTile>(a, b, a_scale, a_zero_point, b_scale, b_zero_point, {}, out.scalar_type(), {}, {});
  return OneTile::ran;
}

bool int8_conv2d_by(int64_t tile, Tensor x, Tensor weight, Tensor x_scale, std::optional<Tensor> x_zero_point,
                    Tensor weight_scale, Dims stride, Dims padding, Dims dilation, std::optional<Tensor> out_scale,
                    Tensor out) {
  OneTile::tile = tile, OneTile::out = out.data_ptr();
  int8_conv2d<OneTile>(x, weight, x_scale, x_zero_point, weight_scale, {}, stride, padding, dilation,
                       torch::headeronly::ScalarType::Float, out_scale, {});
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
  m.def(
      "int8_conv2d(int tile, Tensor x, Tensor weight, Tensor x_scale, Tensor? x_zero_point, Tensor weight_scale, "
      "int[] stride, int[] padding, int[] dilation, Tensor? out_scale, Tensor(a!) out) -> bool");
  m.def("int8_linear(int tile, Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor(a!) out) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(amp_kernels_tiles, CPU, m) {
  m.impl("int8_matmul", TORCH_BOX(&int8_matmul_by));
  m.impl("int8_conv2d", TORCH_BOX(&int8_conv2d_by));
  m.impl("int8_linear", TORCH_BOX(&int8_linear_by));
}

}  // namespace amp_kernels
