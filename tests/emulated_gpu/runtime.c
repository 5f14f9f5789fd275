/* A CUDA runtime without a GPU. Memory of the "device" is memory of the host, copies are made at once, kernels do nothing.
   The limit of memory is that of CUDA. `libraries.c` has cuDNN, cuBLAS, NCCL and NVML. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MAX_DEVICES 16
#define MAX_BLOCKS 65536
#define GRANULARITY (2ul << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device;
static __thread cudaError_t last_error;

/* ---- Counters: what this process has done so far; `counters.py` reads them. ---- */

_Atomic long emulated_gpu_launches;         /* of kernels */
_Atomic long emulated_gpu_synchronisations; /* of the host with a stream, an event or the device */
_Atomic long emulated_gpu_copies;

static cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

/* ---- Processes: one that was forked from a user of CUDA cannot use it. ---- */

static bool is_initialised, is_forked;

static void after_fork(void) { /* in the child, where no thread is left that could release the lock */
  pthread_mutex_init(&lock, NULL);
  is_forked = is_initialised;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

/* ---- Devices: as many as EMULATED_GPU_COUNT says and CUDA_VISIBLE_DEVICES shows, each with EMULATED_GPU_MEMORY_GIB.
   Not emulated: peers, MIG, several processes that share the memory of a device. ---- */

static _Atomic size_t used_bytes[MAX_DEVICES];

size_t emulated_gpu_memory(void) {
  const char *gib = getenv("EMULATED_GPU_MEMORY_GIB");
  return (size_t)((gib ? atof(gib) : 78.0) * (1ul << 30));
}

size_t emulated_gpu_used(int device) {
  size_t used = used_bytes[device], total = emulated_gpu_memory();
  return used < total ? used : total; /* a test may take memory away */
}

int emulated_gpu_count(void) {
  const char *text = getenv("EMULATED_GPU_COUNT");
  int count = text ? atoi(text) : 1;
  return count < MAX_DEVICES ? count : MAX_DEVICES;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 0;
  if (is_forked) return failed(cudaErrorInitializationError);
  is_initialised = true;
  *count = emulated_gpu_count();
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible) {
    int num_visible = *visible != '\0' && *visible != '-';
    for (const char *c = visible; *c; c++) num_visible += *c == ',';
    if (num_visible < *count) *count = num_visible;
  }
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  int count;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error) return error;
  if (device < 0 || device >= count) return failed(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) {
  *of = (struct cudaDeviceProp){
      .name = "NVIDIA H100 80GB HBM3 (emulated)", .major = 9, .minor = 0, .multiProcessorCount = 132, .warpSize = 32,
      .totalGlobalMem = emulated_gpu_memory(), .maxThreadsPerMultiProcessor = 2048, .maxThreadsPerBlock = 1024,
      .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448, .sharedMemPerMultiprocessor = 233472,
      .regsPerMultiprocessor = 65536, .regsPerBlock = 65536, .l2CacheSize = 50 << 20, .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535}, .textureAlignment = 512, .unifiedAddressing = 1, .managedMemory = 1,
      .concurrentKernels = 1, .cooperativeLaunch = 1, .maxBlocksPerMultiProcessor = 32, .memoryBusWidth = 5120,
      .asyncEngineCount = 3, .canMapHostMemory = 1, .pciBusID = device + 1};
  memset(of->uuid.bytes, 0x10 + device, sizeof of->uuid.bytes);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error) { return error ? "cudaError" : "cudaSuccess"; }

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    default: return "an error of the emulated GPU";
  }
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* ---- Streams and events: all work is done as soon as it is launched, so nothing is ever waited for. No stream is captured:
   `build.py` has CUDA graphs refused. ---- */

struct event {
  struct timespec time;
  bool is_recorded;
};

/* Work enters a stream. */
static cudaError_t enter(void) { return is_forked ? failed(cudaErrorInitializationError) : cudaSuccess; }

cudaError_t emulated_gpu_launch(cudaStream_t stream) {
  cudaError_t error = enter();
  emulated_gpu_launches += !error;
  return error;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                     size_t *num_dependencies) {
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
  *handle = (cudaStream_t)calloc(1, 1);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  emulated_gpu_synchronisations++;
  return enter();
}

cudaError_t cudaDeviceSynchronize(void) { return cudaStreamSynchronize(NULL); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(struct event));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
  struct event *event = (struct event *)handle;
  event->is_recorded = true;
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaStreamSynchronize(NULL); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
  struct event *start = (struct event *)first, *end = (struct event *)last;
  if (!start->is_recorded || !end->is_recorded) return failed(cudaErrorInvalidResourceHandle);
  *milliseconds = (end->time.tv_sec - start->time.tv_sec) * 1e3 + (end->time.tv_nsec - start->time.tv_nsec) / 1e6;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  cudaError_t error = enter();
  if (!error) function(data);
  return error;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

/* ---- Memory: blocks of the host's, of which those of the device count towards its limit. Copies and memsets are real.
   Not emulated: handles for other processes, managed memory. ---- */

struct block {
  char *start;
  size_t size, charged;
  enum cudaMemoryType type;
  int device;
};

static struct block blocks[MAX_BLOCKS];
static int num_blocks;

static bool charge(int device, size_t size) {
  pthread_mutex_lock(&lock);
  bool fits = used_bytes[device] + size <= emulated_gpu_memory();
  if (fits) used_bytes[device] += size;
  pthread_mutex_unlock(&lock);
  return fits;
}

static char *map_memory(size_t size) {
  char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? NULL : start;
}

static bool add_block(struct block block) {
  pthread_mutex_lock(&lock);
  bool fits = num_blocks < MAX_BLOCKS;
  if (fits) blocks[num_blocks++] = block;
  pthread_mutex_unlock(&lock);
  return fits;
}

/* The block that contains an address, or with `remove` the one that begins there, taken out of the list; of size 0: none. */
static struct block find_block(const void *address, bool remove) {
  struct block found = {.type = cudaMemoryTypeUnregistered, .device = -2};
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_blocks; i++) {
    size_t offset = (char *)address - blocks[i].start; /* is huge where the address lies before */
    if (remove ? offset > 0 : offset >= blocks[i].size) continue;
    found = blocks[i];
    if (remove) blocks[i] = blocks[--num_blocks];
    break;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static cudaError_t allocate(void **start, size_t size, enum cudaMemoryType type) {
  size = (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  size_t charged = type == cudaMemoryTypeDevice ? size : 0;
  cudaError_t error = enter();
  *start = NULL;
  if (error || size == 0) return error;
  if (!charge(current_device, charged)) return failed(cudaErrorMemoryAllocation);
  char *mapped = map_memory(size);
  if (mapped && add_block((struct block){mapped, size, charged, type, current_device})) {
    *start = mapped;
    return cudaSuccess;
  }
  if (mapped) munmap(mapped, size);
  used_bytes[current_device] -= charged;
  return failed(cudaErrorMemoryAllocation);
}

static cudaError_t release(void *start) {
  cudaError_t error = start ? enter() : cudaSuccess;
  if (start == NULL || error) return error;
  struct block block = find_block(start, true);
  if (block.size == 0) return failed(cudaErrorInvalidValue);
  munmap(block.start, block.size);
  used_bytes[block.device] -= block.charged;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **start, size_t size) { return allocate(start, size, cudaMemoryTypeDevice); }

cudaError_t cudaFree(void *start) { return release(start); }

cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) { return allocate(start, size, cudaMemoryTypeHost); }

cudaError_t cudaMallocHost(void **start, size_t size) { return allocate(start, size, cudaMemoryTypeHost); }

cudaError_t cudaFreeHost(void *start) { return release(start); }

cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
  struct block block = {start, size, 0, cudaMemoryTypeHost, current_device};
  if (find_block(start, false).size) return failed(cudaErrorHostMemoryAlreadyRegistered);
  return add_block(block) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaHostUnregister(void *start) {
  return find_block(start, true).size ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *total_bytes = emulated_gpu_memory();
  *free_bytes = *total_bytes - emulated_gpu_used(current_device);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  struct block block = find_block(address, false);
  *attributes = (struct cudaPointerAttributes){.type = block.type, .device = block.device};
  if (block.type != cudaMemoryTypeUnregistered) attributes->devicePointer = (void *)address;
  if (block.type != cudaMemoryTypeDevice) attributes->hostPointer = (void *)address;
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  cudaError_t error = enter();
  if (error) return error;
  emulated_gpu_copies++;
  for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (char *)from + row * from_pitch, width);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  bool waits = kind == cudaMemcpyDeviceToHost && find_block(to, false).size == 0; /* memory is not pinned */
  emulated_gpu_synchronisations += waits;
  return cudaMemcpy2DAsync(to, 0, from, 0, size, 1, kind, stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  emulated_gpu_synchronisations++;
  cudaError_t error = enter();
  return error ? error : cudaMemcpyAsync(to, from, size, kind, NULL);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
  cudaError_t error = enter();
  if (!error) memset(start, value, size);
  return error;
}

cudaError_t cudaMemset(void *start, int value, size_t size) { return cudaMemsetAsync(start, value, size, NULL); }

/* ---- Kernels: they are counted, and do nothing. ---- */

static __thread struct {
  dim3 grid, block;
  size_t shared_memory;
  cudaStream_t stream;
} configuration;

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_memory, cudaStream_t stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared_memory = shared_memory;
  configuration.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_memory, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_memory = configuration.shared_memory;
  *(cudaStream_t *)stream = configuration.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return emulated_gpu_launch(stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return emulated_gpu_launch(stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return emulated_gpu_launch(stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *launch, const void *kernel, void **arguments) {
  return emulated_gpu_launch(launch->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
  *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90};
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int block_size, size_t shared,
                                                                   unsigned flags) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int block_size, size_t shared) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  *address = (void *)symbol;
  return cudaSuccess;
}

/* ---- The driver: contexts, and the address ranges of torch's expandable segments, whose memory is mapped from the start and
   charged as it is created. Every other function of it succeeds, and does nothing. ---- */

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)&configuration;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags of) {
  *size = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
  struct block block = {map_memory(size), size, 0, cudaMemoryTypeDevice, current_device};
  *start = (CUdeviceptr)block.start;
  if (block.start && add_block(block)) return CUDA_SUCCESS;
  if (block.start) munmap(block.start, size);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
  find_block((void *)start, true);
  munmap((void *)start, size);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  if (!charge(properties->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  struct block *physical = calloc(1, sizeof *physical);
  *physical = (struct block){.charged = size, .device = properties->location.id};
  *handle = (CUmemGenericAllocationHandle)physical;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  struct block *physical = (struct block *)handle;
  used_bytes[physical->device] -= physical->charged;
  free(physical);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
  madvise((void *)start, size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared, CUstream stream, void **arguments, void **extra) {
  return (CUresult)emulated_gpu_launch(stream);
}

static CUresult succeed(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == NULL) *function = (void *)succeed;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
