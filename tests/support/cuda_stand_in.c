/* SPDX-License-Identifier: Apache-2.0
 *
 * A libcuda.so.1 for machines without a GPU: "device memory" is host memory. Every call is appended to the file named
 * by CUDA_STAND_IN_LOG, so that a test sees what was called, in which order, on memory that was still mapped.
 *
 * CUDA_STAND_IN_REFUSE: "init" (no device), "piece:N" (the N-th registration fails, from 0), "memory" (all fail),
 * "copy" (copies fail).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, NOT_REGISTERED = 713 };
enum { MOST = 64 };

static struct {
  void* begin;
  size_t nbytes;
} registered[MOST];
static int registrations;
static int depth;
static int context;

static void note(const char* call, void* address, size_t nbytes, int result) {
  const char* path = getenv("CUDA_STAND_IN_LOG");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s %zu %zu %d\n", call, (size_t)address, nbytes, result);
  fclose(file);
}

static int refused(const char* what) {
  const char* asked = getenv("CUDA_STAND_IN_REFUSE");
  return asked && strcmp(asked, what) == 0;
}

/* Whether the first page is mapped: what is unmapped has no residency to ask for. */
static int mapped(void* begin) {
  unsigned char resident;
  return mincore(begin, (size_t)sysconf(_SC_PAGESIZE), &resident) == 0;
}

int cuInit(unsigned flags) {
  int result = flags == 0 && !refused("init") ? SUCCESS : NO_DEVICE;
  note("cuInit", NULL, 0, result);
  return result;
}

int cuDeviceGet(int* device, int ordinal) {
  if (ordinal != 0) return 101;
  *device = 0;
  return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = &context;
  note("retain", NULL, (size_t)device, SUCCESS);
  return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  note("release", NULL, (size_t)device, SUCCESS);
  return SUCCESS;
}

int cuCtxPushCurrent_v2(void* pushed) {
  if (pushed != &context) return INVALID_CONTEXT;
  __atomic_add_fetch(&depth, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

int cuCtxPopCurrent_v2(void** popped) {
  if (__atomic_sub_fetch(&depth, 1, __ATOMIC_SEQ_CST) < 0) abort();
  *popped = &context;
  return SUCCESS;
}

int cuMemHostRegister_v2(void* begin, size_t nbytes, unsigned flags) {
  char piece[32];
  snprintf(piece, sizeof piece, "piece:%d", registrations);
  int result = SUCCESS;
  if (depth == 0) result = INVALID_CONTEXT;
  else if (flags != 1 || nbytes > ((size_t)1 << 30) || !mapped(begin)) result = INVALID_VALUE;
  else if (refused("memory") || refused(piece)) result = OUT_OF_MEMORY;
  if (registrations == MOST) abort();
  if (result == SUCCESS) {
    registered[registrations].begin = begin;
    registered[registrations].nbytes = nbytes;
  }
  ++registrations;
  note("register", begin, nbytes, result);
  return result;
}

int cuMemHostUnregister(void* begin) {
  int result = depth == 0 ? INVALID_CONTEXT : NOT_REGISTERED;
  for (int i = 0; i < registrations && result == NOT_REGISTERED; ++i)
    if (registered[i].begin == begin && begin) {
      registered[i].begin = NULL;
      result = mapped(begin) ? SUCCESS : INVALID_VALUE;
    }
  note("unregister", begin, 0, result);
  return result;
}

int cuStreamCreate(void** stream, unsigned flags) {
  if (depth == 0) return INVALID_CONTEXT;
  *stream = &context;
  return flags == 1 ? SUCCESS : INVALID_VALUE;
}

int cuStreamDestroy_v2(void* stream) { return stream == &context ? SUCCESS : INVALID_VALUE; }

int cuStreamSynchronize(void* stream) { return stream == &context ? SUCCESS : INVALID_VALUE; }

/* As the driver does, takes host memory that is in one registration or in none. */
int cuMemcpyDtoHAsync_v2(void* dst, unsigned long long src, size_t nbytes, void* stream) {
  char* begin = dst;
  int result = stream == &context && depth > 0 && !refused("copy") ? SUCCESS : INVALID_VALUE;
  for (int i = 0; i < registrations; ++i) {
    char* first = registered[i].begin;
    char* last = first + registered[i].nbytes;
    if (first && begin < last && begin + nbytes > first && (begin < first || begin + nbytes > last)) result = INVALID_VALUE;
  }
  if (result == SUCCESS) memcpy(dst, (const void*)(size_t)src, nbytes);
  note("copy", dst, nbytes, result);
  return result;
}

int cuGetErrorName(int code, const char** name) {
  switch (code) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return SUCCESS;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return SUCCESS;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; return SUCCESS;
    default: return INVALID_VALUE;
  }
}
