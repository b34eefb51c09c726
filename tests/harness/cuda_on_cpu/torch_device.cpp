// torch's CUDA device, on the GPUs of the emulator (gpus.h): a torch without CUDA gets tensors on
// "cuda:0" and "cuda:1" whose memory lies in this process. Operators of amp_kernels run as they are; those of torch run
// on the CPU, on the same memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "gpus.h"

namespace {

using at::Tensor;

// ------------------------------------------------------------------------------------------ devices and streams
thread_local int64_t streams[gpus::kCount] = {};  // the current one of each GPU, in this thread

int gpu_of(c10::Device device) { return device.has_index() ? device.index() : gpus::current(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return {type(), static_cast<c10::DeviceIndex>(gpus::current())}; }
  void setDevice(c10::Device device) const override { gpus::use(gpu_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { gpus::use(gpu_of(device)); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(gpus::kCount); }

  c10::Stream getStream(c10::Device device) const override {
    const int gpu = gpu_of(device);
    return c10::Stream(c10::Stream::UNSAFE, {type(), static_cast<c10::DeviceIndex>(gpu)}, streams[gpu]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }

  // Every operation is finished when it returns, so that events do nothing.
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return gpus::refuse_in_capture("an event is queried"), true; }
  void synchronizeEvent(void*) const override { gpus::refuse_in_capture("an event is waited for"); }
  bool queryStream(const c10::Stream&) const override { return gpus::refuse_in_capture("a stream is queried"), true; }
  void synchronizeStream(const c10::Stream&) const override { gpus::refuse_in_capture("a stream is waited for"); }
  void synchronizeDevice(c10::DeviceIndex) const override { gpus::refuse_in_capture("a device is waited for"); }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(gpus::kCount); }
  int getNumGPUs() const override { return gpus::kCount; }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(gpus::current()); }
  void setCurrentDevice(c10::DeviceIndex gpu) const override { gpus::use(gpu); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex gpu) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    gpus::use(gpu);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex gpu) const override {
    return gpu < 0 ? getCurrentDevice() : exchangeDevice(gpu);
  }
  void deviceSynchronize(c10::DeviceIndex) const override { gpus::refuse_in_capture("a device is waited for"); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int gpu = gpus::current();
    void* const memory = gpus::allocate(bytes, gpu);
    return {memory, memory, &gpus::release, {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(gpu)}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &gpus::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} memory;

REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &memory)
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---------------------------------------------------------------------------------------- torch's own operators
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value());
  return at::detail::empty_generic(sizes, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value());
  return at::detail::empty_strided_generic(sizes, strides, &memory, kKeys, c10::dtype_or_default(dtype));
}

// A tensor on this memory that is otherwise as `like`.
Tensor on_storage(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* const its = tensor.unsafeGetTensorImpl();
  its->set_storage_offset(like.storage_offset());
  its->set_sizes_and_strides(like.sizes(), like.strides());
  its->_set_conj(like.is_conj());
  its->_set_neg(like.is_neg());
  return tensor;
}

// The same elements as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const c10::Device cpu(c10::DeviceType::CPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(tensor.storage().mutable_data(), cpu), c10::GetAllocator(cpu.type()),
                       /*resizable=*/true);
  return on_storage(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.is_cuda()) gpus::refuse_in_capture("a copy to the host is waited for");
  if (!from.is_cuda()) gpus::refuse_in_capture("memory of the host is copied, which a replay would read again");
  (void)non_blocking;
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  gpus::refuse_in_capture("a number is read on the host");
  return on_cpu(tensor).item();
}

// Gives a tensor's storage room for so many bytes.
void grow(const Tensor& tensor, size_t bytes) {
  const size_t before = tensor.storage().nbytes();
  if (bytes <= before) return;
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr larger = memory.allocate(bytes);
  if (before > 0) memcpy(larger.get(), tensor.storage().data(), before);
  tensor.storage().set_data_ptr(std::move(larger));
  tensor.storage().set_nbytes(bytes);
}

// Runs an operator of torch on the CPU, on the same memory.
class Fallback {
 public:
  Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const size_t first = stack->size() - op.schema().arguments().size();
    for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = argument((*stack)[i]);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (const auto& [input, copy] : inputs_) follow(input, copy);
    for (c10::IValue& value : *stack) value = result(value);
  }

 private:
  c10::IValue argument(const c10::IValue& value) {
    if (value.isTensor()) return on_cpu_noted(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_cpu_noted(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor.has_value() ? std::optional(on_cpu_noted(*tensor)) : tensor);
      return list;
    }
    if (!value.isDevice() || !value.toDevice().is_cuda()) return value;
    device_ = value.toDevice();
    return c10::Device(c10::DeviceType::CPU);
  }

  Tensor on_cpu_noted(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    device_ = tensor.device();
    inputs_.emplace_back(tensor, on_cpu(tensor));
    return inputs_.back().second;
  }

  c10::IValue result(const c10::IValue& value) const {
    if (value.isTensor()) return on_gpu(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_gpu(tensor));
    return list;
  }

  // An input that was given as a result may have been resized.
  static void follow(const Tensor& input, const Tensor& copy) {
    if (copy.sizes() == input.sizes() && copy.strides() == input.strides()) return;
    const bool is_elsewhere = copy.storage().data() != input.storage().data();
    if (is_elsewhere) grow(input, copy.storage().nbytes());
    input.unsafeGetTensorImpl()->set_sizes_and_strides(copy.sizes(), copy.strides());
    if (is_elsewhere) on_cpu(input).copy_(copy);
  }

  // An input that was written, a view of one, or a new tensor.
  Tensor on_gpu(const Tensor& tensor) const {
    if (!tensor.defined() || !device_.has_value()) return tensor;
    for (const auto& [input, copy] : inputs_) {
      if (tensor.is_same(copy)) return input;
      if (tensor.storage().data() != nullptr && tensor.storage().data() == input.storage().data())
        return on_storage(input.storage(), kKeys, tensor);
    }
    const c10::DeviceGuard guard(*device_);
    Tensor moved =
        at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &memory, kKeys, tensor.scalar_type());
    on_cpu(moved).copy_(tensor);
    return moved;
  }

  std::optional<c10::Device> device_;
  std::vector<std::pair<Tensor, Tensor>> inputs_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Fallback(op, stack); }

const Tensor& resize_(const Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  int64_t elements = 1;
  for (const int64_t size : sizes) elements *= size;
  grow(tensor, (elements + tensor.storage_offset()) * tensor.element_size());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                    at::IntArrayRef strides) {
  auto* const its = tensor.unsafeGetTensorImpl();
  its->set_storage_keep_dtype(std::move(source));
  its->set_storage_offset(offset);
  its->set_sizes_and_strides(sizes, strides);
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(source), 0, {elements}, {1});
}

// Products of 16 bits with results of 32, which torch has for CUDA alone.
Tensor mm(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return a.to(dtype).mm(b.to(dtype)); }
Tensor bmm(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return a.to(dtype).bmm(b.to(dtype)); }
Tensor addmm(const Tensor& input, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
             const at::Scalar& alpha) {
  return input.to(dtype).addmm(a.to(dtype), b.to(dtype), beta, alpha);
}
Tensor baddbmm(const Tensor& input, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
               const at::Scalar& alpha) {
  return input.to(dtype).baddbmm(a.to(dtype), b.to(dtype), beta, alpha);
}

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch looks for this name
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("mm.dtype", TORCH_FN(mm));
  m.impl("bmm.dtype", TORCH_FN(bmm));
  m.impl("addmm.dtype", TORCH_FN(addmm));
  m.impl("baddbmm.dtype", TORCH_FN(baddbmm));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  // torch has one kernel of these for all devices, which looks for CUDA kernels by itself.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// csrc/ops takes these functions from libtorch_cuda, which is not there.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  const int gpu = device < 0 ? gpus::current() : device;
  *stream = gpus::stream(gpu, streams[gpu]);
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  *guard = reinterpret_cast<DeviceGuardHandle>(
      new c10::DeviceGuard({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)}));
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  delete reinterpret_cast<c10::DeviceGuard*>(guard);
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_cuda__addmm_activation(AtenTensorHandle self, AtenTensorHandle a,
                                                            AtenTensorHandle b, double beta, double alpha,
                                                            int32_t use_gelu, AtenTensorHandle* result) {
  const auto tensor = [](AtenTensorHandle handle) { return *reinterpret_cast<Tensor*>(handle); };
  const Tensor sum = tensor(self).addmm(tensor(a), tensor(b), beta, alpha);
  *result = reinterpret_cast<AtenTensorHandle>(new Tensor(use_gelu != 0 ? at::gelu(sum, "tanh") : sum.relu()));
  return AOTI_TORCH_SUCCESS;
}

extern "C" void gpu_set_stream(int gpu, int64_t stream) { streams[gpu] = stream; }
extern "C" int64_t gpu_get_stream(int gpu) { return streams[gpu]; }
