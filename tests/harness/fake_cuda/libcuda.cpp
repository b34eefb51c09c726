// A libcuda.so.1 that has one H100 and runs nothing: Triton's launcher builds, binds arguments, encodes tensor maps and
// launches as on a GPU, and what a driver would refuse is refused here, with a sentence.
#include <cuda.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

constexpr unsigned kMostShared = 227 * 1024, kWithoutAsking = 48 * 1024;  // of a block
constexpr int kMultiprocessors = 132;

long launches = 0, maps = 0;
char reason[512] = "no reason was given";
std::string binary;  // the module that was loaded last

struct Function {
  std::string name;
  unsigned shared = kWithoutAsking;
};

CUresult refuse(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof(reason), format, arguments);
  va_end(arguments);
  return CUDA_ERROR_INVALID_VALUE;
}

Function& of(CUfunction function) { return *reinterpret_cast<Function*>(function); }

// The size of an ELF file: one of its two tables comes last.
size_t size_of_image(const char* image) {
  uint64_t sections;
  uint16_t size, count;
  memcpy(&sections, image + 0x28, sizeof(sections));
  memcpy(&size, image + 0x3a, sizeof(size));
  memcpy(&count, image + 0x3c, sizeof(count));
  uint64_t programs;
  uint16_t program_size, programs_count;
  memcpy(&programs, image + 0x20, sizeof(programs));
  memcpy(&program_size, image + 0x36, sizeof(program_size));
  memcpy(&programs_count, image + 0x38, sizeof(programs_count));
  return std::max(sections + size * uint64_t{count}, programs + program_size * uint64_t{programs_count});
}

unsigned bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    default:
      return 4;
  }
}

unsigned span_of(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_32B:
      return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      return 128;
    default:
      return 256 * 4;
  }
}

}  // namespace

extern "C" {

long fake_launches() { return launches; }
long fake_maps() { return maps; }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = reason, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = kMostShared;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = 228 * 1024;
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
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    default:
      *value = 1;
  }
  return CUDA_SUCCESS;
}

// One context, which is always current.
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, 0); }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}

// Memory of the host is that of the device.
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute, CUdeviceptr address) {
  return memcpy(data, &address, sizeof(address)), CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr address) {
  for (unsigned i = 0; i < count; ++i)
    if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) memcpy(data[i], &address, sizeof(address));
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const char* const bytes = static_cast<const char*>(image);
  if (memcmp(bytes, "\177ELF", 4) != 0) return refuse("a module that is no cubin");
  binary.assign(bytes, size_of_image(bytes));
  return *module = reinterpret_cast<CUmodule>(1), CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  if (binary.find(std::string(".text.") + name) == std::string::npos) return refuse("no kernel %s in the module", name);
  return *function = reinterpret_cast<CUfunction>(new Function{name}), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  // A driver that does not know an attribute refuses it. Triton 3.9 then takes the way of the drivers of CUDA 12.
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return refuse("no attribute %d", attribute);
  if (value < 0 || value > static_cast<int>(kMostShared))
    return refuse("%s asks for %d bytes of shared memory, of %u", of(function).name.c_str(), value, kMostShared);
  return of(function).shared = value, CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  return *count = kMultiprocessors, CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  const Function& kernel = of(function);
  const char* const name = kernel.name.c_str();
  const unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  if (config->gridDimX == 0 || config->gridDimX > INT32_MAX || config->gridDimY - 1 > 65534 ||
      config->gridDimZ - 1 > 65534)
    return refuse("%s has a grid of %u x %u x %u", name, config->gridDimX, config->gridDimY, config->gridDimZ);
  if (threads == 0 || threads > 1024) return refuse("%s has %u threads in a block", name, threads);
  if (config->sharedMemBytes > kernel.shared && config->sharedMemBytes > kWithoutAsking)
    return refuse("%s has %u bytes of shared memory, and asked for %u", name, config->sharedMemBytes, kernel.shared);
  if (parameters == nullptr) return refuse("%s has no parameters", name);
  return ++launches, CUDA_SUCCESS;
}

// The rules are those of its documentation.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank < 1 || rank > 5) return refuse("a tensor map of rank %u", rank);
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
    return refuse("a tensor map of an address that is no multiple of 16");
  for (unsigned i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32)
      return refuse("a tensor map of %llu elements in dimension %u", static_cast<unsigned long long>(sizes[i]), i);
    if (box[i] == 0 || box[i] > 256) return refuse("a tensor map with a box of %u in dimension %u", box[i], i);
    if (steps[i] == 0 || steps[i] > 8) return refuse("a tensor map with a step of %u in dimension %u", steps[i], i);
  }
  for (unsigned i = 0; i + 1 < rank; ++i)
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40)
      return refuse("a tensor map with a stride of %llu bytes", static_cast<unsigned long long>(strides[i]));
  const unsigned inner = box[0] * bytes_of(type);
  if (inner % 16 != 0 || inner > span_of(swizzle))
    return refuse("a tensor map with an inner box of %u bytes and a swizzle of %u", inner, span_of(swizzle));
  memset(map, 0, sizeof(*map));
  return ++maps, CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const int*, const int*, cuuint32_t, cuuint32_t, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill) {
  return refuse("a tensor map of a convolution");
}
}
