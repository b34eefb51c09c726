// A libcuda.so.1 whose GPUs run nothing. Triton's launcher builds, binds arguments and launches as on a GPU, and what a
// driver would refuse is refused here, with a sentence. Functions that begin with fake_ say which GPUs there are,
// switch a stream capture on, and count; ctypes and C++ call them by name.
#include <cuda.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr unsigned kWithoutAsking = 48 * 1024;  // bytes of shared memory in a block
constexpr int kMultiprocessors = 132;

// A device is its only context: a CUcontext points to a Device.
struct Device {
  int index;
  int capability;  // 10 * major + minor
};

struct Module {
  const Device* device;  // whose context was current when the module was loaded
  std::string image;
  bool is_loaded = true;
};

struct Function {
  const Module* module;
  std::string name;
  unsigned shared = kWithoutAsking;
};

// Nothing is freed: a test may keep a handle of an earlier device, module or function, and is told that it is old.
struct Driver {
  std::mutex mutex;
  std::vector<std::unique_ptr<Device>> all_devices;
  std::vector<std::unique_ptr<Module>> modules;
  std::vector<std::unique_ptr<Function>> functions;
  std::vector<Device*> devices;  // those there are now
  bool is_capturing = false;
  long launches = 0, loads = 0;
  std::map<std::string, long> launches_of;  // by the name of the kernel
  void* last_stream = nullptr;

  Driver() {
    const int hopper = 90;
    set_devices(1, &hopper);
  }

  void set_devices(int count, const int* capabilities) {
    devices.clear();
    for (int i = 0; i < count; ++i) {
      all_devices.push_back(std::make_unique<Device>(Device{i, capabilities[i]}));
      devices.push_back(all_devices.back().get());
    }
  }
};

Driver& driver() {
  static Driver* const only = new Driver;  // never destroyed: Python unloads modules as the process ends
  return *only;
}

thread_local Device* current = nullptr;
thread_local char reason[512] = "no reason was given";

using Lock = std::lock_guard<std::mutex>;

CUresult refuse_as(CUresult result, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof(reason), format, arguments);
  va_end(arguments);
  return result;
}

template <typename... Arguments>
CUresult refuse(const char* format, Arguments... arguments) {
  return refuse_as(CUDA_ERROR_INVALID_VALUE, format, arguments...);
}

// What a capture forbids begins with this, and ends if the result is not CUDA_SUCCESS.
CUresult outside_of_captures() {
  if (!driver().is_capturing) return CUDA_SUCCESS;
  return refuse_as(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing");
}

const Device* find_device(int index) {
  const auto& devices = driver().devices;
  return index >= 0 && index < static_cast<int>(devices.size()) ? devices[index] : nullptr;
}

Function& of(CUfunction function) { return *reinterpret_cast<Function*>(function); }

// The most shared memory that a block may ask for.
unsigned most_shared(const Device& device) {
  switch (device.capability) {
    case 75:
      return 64 * 1024;
    case 80:
    case 87:
      return 163 * 1024;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 * 1024;
    default:
      return 227 * 1024;
  }
}

// ---------------------------------------------------------------------------------------------------------- ELF files
template <typename T>
T read(const char* image, size_t offset) {
  T value;
  memcpy(&value, image + offset, sizeof(value));
  return value;
}

// The size of an ELF file: one of its two tables comes last.
size_t size_of_image(const char* image) {
  const auto sections = read<uint64_t>(image, 0x28), programs = read<uint64_t>(image, 0x20);
  const uint64_t section_bytes = read<uint16_t>(image, 0x3a) * uint64_t{read<uint16_t>(image, 0x3c)};
  const uint64_t program_bytes = read<uint16_t>(image, 0x36) * uint64_t{read<uint16_t>(image, 0x38)};
  return std::max(sections + section_bytes, programs + program_bytes);
}

// The architecture of a cubin, 90 for sm_90 and sm_90a: ptxas 13 marks the "a" outside of e_flags. From version 8 of
// the ABI on the number is in the second byte.
int architecture_of(const char* image) {
  const auto version = read<uint8_t>(image, 8);
  const auto flags = read<uint32_t>(image, 0x30);
  return version >= 8 ? flags >> 8 & 0xff : flags & 0xff;
}

}  // namespace

extern "C" {

// --------------------------------------------------------------------------------------------- for tests: what there
// is Replaces the devices, {90, 75} for one of capability 9.0 and one of 7.5. Modules of the devices before are no
// longer launched. This thread has no current device then.
void fake_set_devices(int count, const int* capabilities) {
  Lock lock(driver().mutex);
  driver().set_devices(count, capabilities);
  current = nullptr;
}

// The current device of this thread; 0 before any was made current, as for cudaGetDevice.
int fake_device() { return current == nullptr ? 0 : current->index; }
void fake_set_device(int index) { current = const_cast<Device*>(find_device(index)); }

void fake_set_capturing(int is_capturing) { driver().is_capturing = is_capturing != 0; }

long fake_launches() { return driver().launches; }
long fake_loads() { return driver().loads; }
void* fake_last_stream() { return driver().last_stream; }

// Launches of kernels whose names contain this.
long fake_launches_of(const char* substring) {
  Lock lock(driver().mutex);
  long sum = 0;
  for (const auto& [name, count] : driver().launches_of)
    if (name.find(substring) != std::string::npos) sum += count;
  return sum;
}

// ------------------------------------------------------------------------------------------------ devices and contexts
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = reason, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = static_cast<int>(driver().devices.size()), CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice* device, int index) {
  if (find_device(index) == nullptr) return refuse("no device %d", index);
  return *device = index, CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice index) {
  const Device* const device = find_device(index);
  if (device == nullptr) return refuse("no device %d", index);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = static_cast<int>(most_shared(*device));
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = static_cast<int>(most_shared(*device)) + (device->capability == 75 ? 0 : 1024);
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      *value = 65536;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = kMultiprocessors;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = device->capability / 10;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = device->capability % 10;
      break;
    default:
      *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice index) {
  const Device* const device = find_device(index);
  if (device == nullptr) return refuse("no device %d", index);
  return *context = reinterpret_cast<CUcontext>(const_cast<Device*>(device)), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = reinterpret_cast<CUcontext>(current), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = reinterpret_cast<Device*>(context), CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) {
  if (current == nullptr) return refuse_as(CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread");
  return *device = current->index, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

// ------------------------------------------------------------------------------------------- streams, events and
// memory
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = driver().is_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() { return outside_of_captures(); }
CUresult cuStreamSynchronize(CUstream) { return outside_of_captures(); }
CUresult cuStreamQuery(CUstream) { return outside_of_captures(); }
CUresult cuEventSynchronize(CUevent) { return outside_of_captures(); }
CUresult cuEventQuery(CUevent) { return outside_of_captures(); }

// Memory of the host is that of the device.
static CUresult allocate(void** address, size_t bytes) {
  if (const CUresult refused = outside_of_captures()) return refused;
  return *address = malloc(bytes), CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) { return allocate(reinterpret_cast<void**>(address), bytes); }
CUresult cuMemAllocHost(void** address, size_t bytes) { return allocate(address, bytes); }
CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned) { return allocate(address, bytes); }
static CUresult release(void* address) {
  if (const CUresult refused = outside_of_captures()) return refused;
  return free(address), CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) { return release(reinterpret_cast<void*>(address)); }
CUresult cuMemFreeHost(void* address) { return release(address); }
static CUresult copy(void* to, const void* from, size_t bytes) {
  if (const CUresult refused = outside_of_captures()) return refused;
  return memcpy(to, from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return copy(reinterpret_cast<void*>(to), from, bytes);
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return copy(to, reinterpret_cast<const void*>(from), bytes);
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute, CUdeviceptr address) {
  return memcpy(data, &address, sizeof(address)), CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr address) {
  for (unsigned i = 0; i < count; ++i)
    if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) memcpy(data[i], &address, sizeof(address));
  return CUDA_SUCCESS;
}

// ----------------------------------------------------------------------------------------------- modules and functions
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (const CUresult refused = outside_of_captures()) return refused;
  if (current == nullptr) return refuse_as(CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread");
  const char* const bytes = static_cast<const char*>(image);
  if (memcmp(bytes, "\177ELF", 4) != 0) return refuse("a module that is no cubin");
  const int architecture = architecture_of(bytes), capability = current->capability;
  if (architecture / 10 != capability / 10 || architecture % 10 > capability % 10)
    return refuse_as(CUDA_ERROR_NO_BINARY_FOR_GPU, "a cubin for sm_%d on device %d, which is of %d.%d", architecture,
                     current->index, capability / 10, capability % 10);
  Lock lock(driver().mutex);
  driver().modules.push_back(std::make_unique<Module>(Module{current, {bytes, size_of_image(bytes)}}));
  ++driver().loads;
  return *module = reinterpret_cast<CUmodule>(driver().modules.back().get()), CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleUnload(CUmodule module) { return reinterpret_cast<Module*>(module)->is_loaded = false, CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  const Module* const module = reinterpret_cast<const Module*>(handle);
  if (module->image.find(std::string(".text.") + name) == std::string::npos)
    return refuse("no kernel %s in the module", name);
  Lock lock(driver().mutex);
  driver().functions.push_back(std::make_unique<Function>(Function{module, name}));
  return *function = reinterpret_cast<CUfunction>(driver().functions.back().get()), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  // A driver that does not know an attribute refuses it. Triton 3.9 then takes the way of the drivers of CUDA 12.
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return refuse("no attribute %d", attribute);
  const int most = static_cast<int>(most_shared(*of(function).module->device));
  if (value < 0 || value > most)
    return refuse("%s asks for %d bytes of shared memory, of %d", of(function).name.c_str(), value, most);
  return of(function).shared = value, CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  return *count = kMultiprocessors, CUDA_SUCCESS;
}

// ------------------------------------------------------------------------------------------------------------ launches
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  const Function& kernel = of(function);
  const char* const name = kernel.name.c_str();
  if (current == nullptr)
    return refuse_as(CUDA_ERROR_INVALID_CONTEXT, "%s is launched where no context is current", name);
  if (!kernel.module->is_loaded) return refuse("%s is launched after its module was unloaded", name);
  if (kernel.module->device != current)
    return refuse_as(CUDA_ERROR_INVALID_HANDLE, "%s was loaded on device %d (%d), and is launched on device %d (%d)",
                     name, kernel.module->device->index, kernel.module->device->capability, current->index,
                     current->capability);
  const unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  if (config->gridDimX == 0 || config->gridDimX > INT32_MAX || config->gridDimY - 1 > 65534 ||
      config->gridDimZ - 1 > 65534)
    return refuse("%s has a grid of %u x %u x %u", name, config->gridDimX, config->gridDimY, config->gridDimZ);
  if (threads == 0 || threads > 1024) return refuse("%s has %u threads in a block", name, threads);
  if (config->sharedMemBytes > kernel.shared && config->sharedMemBytes > kWithoutAsking)
    return refuse("%s has %u bytes of shared memory, and asked for %u", name, config->sharedMemBytes, kernel.shared);
  if (parameters == nullptr) return refuse("%s has no parameters", name);
  Lock lock(driver().mutex);
  ++driver().launches;
  ++driver().launches_of[kernel.name];
  return driver().last_stream = config->hStream, CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void** parameters,
                        void** extra) {
  const CUlaunchConfig config{grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, nullptr, 0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}
}
