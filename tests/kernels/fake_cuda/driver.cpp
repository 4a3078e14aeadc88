// CUDA's runtime and driver on host memory, as far as cupy asks for them. Fresh memory holds 0xCB; a module's image is
// the path of a shared library that kernels.py made, and a launch calls a function of it.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

extern "C" {

#define YES(name, ...) \
  cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
YES(cudaGetLastError)

// --- the card ---
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
YES(cudaSetDevice, int)
YES(cudaDeviceSynchronize)
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  std::memset(found, 0, sizeof *found);
  std::strcpy(found->name, "host memory");
  found->major = 9, found->warpSize = 32, found->maxThreadsPerBlock = 1024, found->multiProcessorCount = 132;
  return cudaSuccess;
}

// --- memory ---
cudaError_t cudaMalloc(void** memory, size_t size) {
  if (posix_memalign(memory, 256, size ? size : 256)) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xCB, size);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, size_t size, cudaStream_t) { return cudaMalloc(memory, size); }
cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) { return cudaMalloc(memory, size); }
cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = 1ul << 37, cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return std::memmove(to, from, size), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemset(void* memory, int value, size_t size) { return std::memset(memory, value, size), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* memory, int value, size_t size, cudaStream_t) {
  return cudaMemset(memory, value, size);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* memory) {
  std::memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeDevice;
  found->devicePointer = const_cast<void*>(memory);
  return cudaSuccess;
}

// --- streams and events: everything is done at once ---
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = (cudaStream_t)std::malloc(8), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
YES(cudaStreamDestroy, cudaStream_t)
YES(cudaStreamSynchronize, cudaStream_t)
YES(cudaStreamQuery, cudaStream_t)
YES(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* found) {
  return *found = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = (cudaEvent_t)std::malloc(8), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
YES(cudaEventDestroy, cudaEvent_t)
YES(cudaEventQuery, cudaEvent_t)
YES(cudaEventRecord, cudaEvent_t, cudaStream_t)
YES(cudaEventSynchronize, cudaEvent_t)
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }

// --- kernels ---
CUresult cuGetErrorName(CUresult, const char** name) { return *name = "CUDA_ERROR", CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "see stderr", CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
  if (!*module) std::fprintf(stderr, "%s\n", dlerror());
  return *module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = (CUfunction)dlsym(module, (std::string("run__") + name).c_str());
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return *value = 0, CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block,
                        unsigned block_y, unsigned block_z, unsigned, CUstream, void** arguments, void**) {
  if (!grid || !block || block > 1024 || grid_y * grid_z * block_y * block_z != 1) return CUDA_ERROR_INVALID_VALUE;
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> guard(one_at_a_time);
  ((void (*)(void**, unsigned, unsigned))function)(arguments, grid, block);
  return CUDA_SUCCESS;
}
}
