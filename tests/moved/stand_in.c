/* CUDA's runtime and driver, as far as torch calls them while it traces and generates code. There is no GPU; nothing is launched. */
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

static int current(void) { const char *set = getenv("STAND_IN_GPU"); return set ? atoi(set) : 0; }

int cudaGetDevice(int *index) { *index = current(); return 0; }
int cudaSetDevice(int index) { return 0; }
int cudaGetDeviceCount(int *count) { *count = 8; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 1024; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -3; return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaStreamQuery(void *stream) { return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cudaMemGetInfo(size_t *available, size_t *all) { *available = *all = (size_t)1 << 33; return 0; }
int cudaMalloc(void **place, size_t size) { *place = calloc(1, size + 512); return *place ? 0 : 2; }
int cudaFree(void *place) { free(place); return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { memcpy(to, from, size); return 0; }
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) { memset(to, value, size); return 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { memcpy(to, from, size); return 0; }
int cudaHostAlloc(void **place, size_t size, unsigned flags) { *place = calloc(1, size + 64); return *place ? 0 : 2; }
int cudaFreeHost(void *place) { free(place); return 0; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *place) { memset(found, 0, sizeof *found); return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)1; return 0; }
int cudaEventRecord(void *event, void *stream) { return 0; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaEventSynchronize(void *event) { return 0; }
int cudaEventDestroy(void *event) { return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = (void *)2; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
int cudaLaunchKernel(const void *kernel, long a, int b, long c, int d, void **values, size_t shared, void *stream) { return 0; }
int cudaLaunchKernelExC(const void *config, const void *kernel, void **values) { return 0; }
int cudaFuncSetAttribute(const void *kernel, int attribute, int value) { return 0; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) { memset(found, 0, sizeof *found); return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int block, size_t shared) { *count = 2; return 0; }
int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    found->major = 9, found->multiProcessorCount = 132, found->warpSize = 32, found->totalGlobalMem = (size_t)80 << 30;
    found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = 2048, found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152, found->sharedMemPerBlockOptin = 232448, found->sharedMemPerMultiprocessor = 233472;
    found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    return 0;
}
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *found, int device) { return cudaGetDeviceProperties(found, device); }
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "there is no GPU"; return 0; }
