// SPDX-License-Identifier: Apache-2.0
// Source: CUDA Driver API reference, "Primary Context Management" and "Memory Management". Names
// with _v2 are what cuda.h maps the plain names to.
#include "memascend/cuda_driver.hpp"

#include <dlfcn.h>

#include "memascend/error.hpp"

namespace memascend {
namespace {

using Result = int;
using DeviceAddress = unsigned long long;

constexpr Result kSuccess = 0;
constexpr unsigned kRegisterPortable = 1;
constexpr unsigned kStreamNonBlocking = 1;

template <typename Function>
void find(void* library, const char* name, Function*& function) {
  void* symbol = ::dlsym(library, name);
  if (symbol == nullptr)
    throw CudaError(std::string("libcuda.so.1 has no ") + name + "; update the NVIDIA driver");
  function = reinterpret_cast<Function*>(symbol);
}

// The functions used. The library stays loaded: what was registered may be undone at any time.
struct Api {
  Result (*init)(unsigned);
  Result (*get_device)(int*, int);
  Result (*retain_context)(void**, int);
  Result (*release_context)(int);
  Result (*push_context)(void*);
  Result (*pop_context)(void**);
  Result (*register_host)(void*, std::size_t, unsigned);
  Result (*unregister_host)(void*);
  Result (*create_stream)(void**, unsigned);
  Result (*destroy_stream)(void*);
  Result (*synchronize_stream)(void*);
  Result (*copy_to_host)(void*, DeviceAddress, std::size_t, void*);
  Result (*error_name)(Result, const char**);

  Api() {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = ::dlerror();
      throw CudaError(std::string("no CUDA driver: ") + (why == nullptr ? "libcuda.so.1" : why));
    }
    find(library, "cuInit", init);
    find(library, "cuDeviceGet", get_device);
    find(library, "cuDevicePrimaryCtxRetain", retain_context);
    find(library, "cuDevicePrimaryCtxRelease_v2", release_context);
    find(library, "cuCtxPushCurrent_v2", push_context);
    find(library, "cuCtxPopCurrent_v2", pop_context);
    find(library, "cuMemHostRegister_v2", register_host);
    find(library, "cuMemHostUnregister", unregister_host);
    find(library, "cuStreamCreate", create_stream);
    find(library, "cuStreamDestroy_v2", destroy_stream);
    find(library, "cuStreamSynchronize", synchronize_stream);
    find(library, "cuMemcpyDtoHAsync_v2", copy_to_host);
    find(library, "cuGetErrorName", error_name);
  }

  void check(Result result, const std::string& action) const {
    if (result == kSuccess) return;
    const char* name = nullptr;
    if (error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
    throw CudaError("cannot " + action + ": " + name + " (" + std::to_string(result) + ")");
  }
};

// Throws CudaError at every call while the driver cannot be loaded.
const Api& api() {
  static const Api& loaded = *new Api();
  return loaded;
}

// Makes a context the thread's current one while alive. Nothing else is called when that fails.
class CurrentContext {
 public:
  explicit CurrentContext(void* context) : result_(api().push_context(context)) {}
  ~CurrentContext() {
    void* popped = nullptr;
    if (result_ == kSuccess) api().pop_context(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  bool entered() const noexcept { return result_ == kSuccess; }
  void check() const { api().check(result_, "enter the device's context"); }

 private:
  const Result result_;
};

}  // namespace

std::shared_ptr<CudaDriver> CudaDriver::open(int ordinal) {
  return std::shared_ptr<CudaDriver>(new CudaDriver(ordinal));
}

CudaDriver::CudaDriver(int ordinal) {
  api().check(api().init(0), "initialise the CUDA driver");
  api().check(api().get_device(&device_, ordinal), "find CUDA device " + std::to_string(ordinal));
  api().check(api().retain_context(&context_, device_),
              "retain the context of CUDA device " + std::to_string(ordinal));
  try {
    const CurrentContext current(context_);
    current.check();
    api().check(api().create_stream(&stream_, kStreamNonBlocking), "create a CUDA stream");
  } catch (...) {
    api().release_context(device_);
    throw;
  }
}

CudaDriver::~CudaDriver() {
  {
    const CurrentContext current(context_);
    if (current.entered()) api().destroy_stream(stream_);
  }
  api().release_context(device_);
}

void CudaDriver::register_host(std::byte* begin, std::uint64_t nbytes) const {
  const CurrentContext current(context_);
  current.check();
  api().check(api().register_host(begin, nbytes, kRegisterPortable),
              "register " + grouped(nbytes) + " bytes with the CUDA driver");
}

void CudaDriver::unregister_host(std::byte* begin) const noexcept {
  const CurrentContext current(context_);
  if (current.entered()) api().unregister_host(begin);
}

void CudaDriver::copy_to_host(std::byte* dst, std::uint64_t src_device_address,
                              std::uint64_t nbytes) const {
  const CurrentContext current(context_);
  current.check();
  const std::string action = "copy " + grouped(nbytes) + " bytes from the CUDA device";
  api().check(api().copy_to_host(dst, src_device_address, nbytes, stream_), action);
  api().check(api().synchronize_stream(stream_), action);
}

}  // namespace memascend
