/* A CUDA runtime without a GPU. Memory of the "device" is memory of the host, copies are made at once, kernels do nothing.
   The rules of stream capture and the limit of memory are those of CUDA. `libraries.c` has cuDNN, cuBLAS, NCCL and NVML. */
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
#define MAX_CAPTURES 16
#define MAX_STREAMS 4096
#define MAX_BLOCKS 65536
#define GRANULARITY (2ul << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device;
static __thread cudaError_t last_error;

/* ---- Counters: what this process has done so far; `counters.py` reads them. ---- */

_Atomic long emulated_gpu_launches;          /* of kernels outside of captures */
_Atomic long emulated_gpu_captured_launches; /* of kernels, copies and memsets that went into a graph */
_Atomic long emulated_gpu_stray_launches;    /* of a thread that captures, into a stream that is not captured */
_Atomic long emulated_gpu_synchronisations;  /* of the host with a stream, an event or the device */
_Atomic long emulated_gpu_copies;            /* outside of captures */
_Atomic long emulated_gpu_graph_launches;

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
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "an error of the emulated GPU";
  }
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* ---- Captures: work in a captured stream does not run and is counted. What CUDA forbids meanwhile makes the capture invalid.
   Not emulated: the legacy default stream beside blocking ones, of which torch has none. A graph is its capture, is never
   freed (some dozens of bytes), and a launch of it does nothing: `numbers.py` runs its operations. ---- */

struct capture {
  unsigned long long id;
  enum cudaStreamCaptureMode mode;
  pthread_t thread;
  struct stream *origin;
  size_t num_nodes;
  bool active, invalid;
};

/* Of what a stream has captured, the capture's origin must wait in the end for all, or some stream for which it waits. */
struct stream {
  struct capture *capture;
  size_t num_captured, num_joined;
};

static struct stream legacy, per_thread;
static struct stream *streams[MAX_STREAMS] = {&per_thread};
static struct capture *captures[MAX_CAPTURES];
static int num_streams = 1, num_captures;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static struct stream *stream_of(cudaStream_t stream) {
  if (stream == NULL || stream == cudaStreamLegacy) return &legacy;
  return stream == cudaStreamPerThread ? &per_thread : (struct stream *)stream;
}

static struct capture *capture_of(cudaStream_t stream) { return stream_of(stream)->capture; }

static cudaError_t invalidate(struct capture *capture, cudaError_t error) {
  capture->invalid = true;
  return failed(error);
}

static cudaError_t invalidate_captures(bool all) {
  cudaError_t error = is_forked ? failed(cudaErrorInitializationError) : cudaSuccess;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_captures; i++) {
    bool is_own = pthread_equal(captures[i]->thread, pthread_self()) && captures[i]->mode != cudaStreamCaptureModeRelaxed;
    bool is_global = captures[i]->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (all || is_own || is_global) error = invalidate(captures[i], cudaErrorStreamCaptureUnsupported);
  }
  pthread_mutex_unlock(&lock);
  return error;
}

/* For calls that no thread may make while a capture of the mode `global` is active, nor the capturing one in `thread_local`. */
static cudaError_t unsafe_call(void) {
  return thread_mode == cudaStreamCaptureModeRelaxed ? cudaSuccess : invalidate_captures(false);
}

/* Work enters a stream; `*runs` says whether it is to be done now. */
static cudaError_t enter(cudaStream_t handle, bool *runs) {
  struct stream *stream = stream_of(handle);
  struct capture *capture = stream->capture;
  *runs = capture == NULL && !is_forked;
  if (is_forked) return failed(cudaErrorInitializationError);
  if (capture == NULL) return cudaSuccess;
  if (capture->invalid) return failed(cudaErrorStreamCaptureInvalidated);
  capture->num_nodes++;
  stream->num_captured++;
  emulated_gpu_captured_launches++;
  return cudaSuccess;
}

cudaError_t emulated_gpu_launch(cudaStream_t stream) {
  bool runs;
  cudaError_t error = enter(stream, &runs);
  if (error || !runs) return error;
  emulated_gpu_launches++;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_captures; i++) emulated_gpu_stray_launches += pthread_equal(captures[i]->thread, pthread_self()) != 0;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
  static unsigned long long num_begun;
  struct stream *stream = stream_of(handle);
  if (stream == &legacy) return failed(cudaErrorStreamCaptureUnsupported);
  if (stream->capture || num_captures == MAX_CAPTURES) return failed(cudaErrorIllegalState);
  struct capture *capture = calloc(1, sizeof *capture);
  pthread_mutex_lock(&lock);
  *capture = (struct capture){.id = ++num_begun, .mode = mode, .thread = pthread_self(), .origin = stream, .active = true};
  stream->capture = capture;
  captures[num_captures++] = capture;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  struct stream *stream = stream_of(handle);
  struct capture *capture = stream->capture;
  cudaError_t error = cudaSuccess;
  *graph = NULL;
  if (capture == NULL) return failed(cudaErrorIllegalState);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_streams; i++) {
    if (streams[i]->capture != capture) continue;
    if (streams[i] != capture->origin && streams[i]->num_joined < streams[i]->num_captured) {
      error = cudaErrorStreamCaptureUnjoined;
    }
    streams[i]->capture = NULL;
  }
  for (int i = 0; i < num_captures; i++) {
    if (captures[i] == capture) captures[i--] = captures[--num_captures];
  }
  capture->active = false;
  pthread_mutex_unlock(&lock);
  if (capture->origin != stream) error = cudaErrorStreamCaptureUnmatched;
  if (!pthread_equal(capture->thread, pthread_self()) && capture->mode != cudaStreamCaptureModeRelaxed) {
    error = cudaErrorStreamCaptureWrongThread;
  }
  if (capture->invalid) error = cudaErrorStreamCaptureInvalidated;
  if (error) return failed(error);
  *graph = (cudaGraph_t)capture;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  struct capture *capture = capture_of(stream);
  *status = capture == NULL      ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                     size_t *num_dependencies) {
  struct capture *capture = capture_of(stream);
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = (cudaGraph_t)capture;
  if (dependencies) *dependencies = NULL;
  if (edges) *edges = NULL;
  if (num_dependencies) *num_dependencies = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
  *executable = (cudaGraphExec_t)graph;
  return unsafe_call();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  bool runs;
  cudaError_t error = enter(stream, &runs);
  emulated_gpu_graph_launches += runs;
  return error;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = ((struct capture *)graph)->num_nodes;
  return cudaSuccess;
}

/* ---- Streams and events: all work is done as soon as it is launched, so nothing is ever waited for.
   An event knows the capture in which it was recorded, and passes it to the streams that wait for it. ---- */

struct event {
  struct timespec time;
  struct capture *capture;
  struct stream *stream;
  size_t num_captured; /* by its stream before it */
};

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
  struct stream *stream = calloc(1, sizeof *stream); /* is never freed: events refer to it */
  pthread_mutex_lock(&lock);
  bool fits = num_streams < MAX_STREAMS;
  if (fits) streams[num_streams++] = stream;
  pthread_mutex_unlock(&lock);
  *handle = (cudaStream_t)stream;
  return fits ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  struct capture *capture = capture_of(stream);
  return capture ? invalidate(capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  emulated_gpu_synchronisations++;
  return cudaStreamQuery(stream);
}

cudaError_t cudaDeviceSynchronize(void) {
  emulated_gpu_synchronisations++;
  return invalidate_captures(true); /* in whatever mode: a captured stream is part of the device */
}

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
  struct capture *capture = capture_of(stream);
  if (capture && capture->invalid) return failed(cudaErrorStreamCaptureInvalidated);
  event->stream = stream_of(stream);
  event->capture = flags & cudaEventRecordExternal ? NULL : capture;
  event->num_captured = event->stream->num_captured;
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

static cudaError_t wait_on_host(struct event *event) {
  if (event->capture == NULL) return unsafe_call();
  if (event->capture->active) event->capture->invalid = true;
  return failed(cudaErrorCapturedEvent);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return wait_on_host((struct event *)event); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  emulated_gpu_synchronisations++;
  return wait_on_host((struct event *)event);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
  struct event *start = (struct event *)first, *end = (struct event *)last;
  if (start->stream == NULL || end->stream == NULL) return failed(cudaErrorInvalidResourceHandle);
  if (start->capture || end->capture) return failed(cudaErrorCapturedEvent);
  *milliseconds = (end->time.tv_sec - start->time.tv_sec) * 1e3 + (end->time.tv_nsec - start->time.tv_nsec) / 1e6;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited_for, unsigned flags) {
  struct event *event = (struct event *)waited_for;
  struct stream *stream = stream_of(handle), *from = event->stream;
  struct capture *capture = event->capture && event->capture->active ? event->capture : NULL;
  if (from == NULL || flags & cudaEventWaitExternal) return cudaSuccess;
  if (stream->capture && stream->capture != capture) return invalidate(stream->capture, cudaErrorStreamCaptureIsolation);
  if (capture == NULL || from == stream) return cudaSuccess;
  bool is_new = stream->capture == NULL;
  bool joins = from != capture->origin && from->num_joined < event->num_captured;
  if (is_new) *stream = (struct stream){.capture = capture};
  if (joins) from->num_joined = event->num_captured;
  stream->num_captured += is_new || joins;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  bool runs;
  cudaError_t error = enter(stream, &runs);
  if (runs) function(data);
  return error;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  cudaError_t error = cudaStreamQuery(stream); /* which is not captured either */
  if (!error) function(stream, cudaSuccess, data);
  return error;
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
  cudaError_t error = unsafe_call();
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
  cudaError_t error = start ? unsafe_call() : cudaSuccess;
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
  bool runs;
  cudaError_t error = enter(stream, &runs);
  if (error || !runs) return error;
  emulated_gpu_copies++;
  for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (char *)from + row * from_pitch, width);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  bool waits = kind == cudaMemcpyDeviceToHost && find_block(to, false).size == 0; /* memory is not pinned */
  emulated_gpu_synchronisations += waits && capture_of(stream) == NULL;
  return cudaMemcpy2DAsync(to, 0, from, 0, size, 1, kind, stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  emulated_gpu_synchronisations++;
  cudaError_t error = unsafe_call();
  return error ? error : cudaMemcpyAsync(to, from, size, kind, NULL);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
  bool runs;
  cudaError_t error = enter(stream, &runs);
  if (!error && runs) memset(start, value, size);
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
