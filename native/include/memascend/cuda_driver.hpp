// SPDX-License-Identifier: Apache-2.0
// What the arena needs of the CUDA driver, found at run time: no toolkit to build, no GPU to load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace memascend {

// A call of the driver failed, or there is no driver. The text names the call and the driver's word
// for the error.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The primary context of one device, which is the one that XLA works in, retained while this lives.
//
// Threading: every method may be called from any thread; the thread's current context is put back.
class CudaDriver {
 public:
  // Loads `libcuda.so.1` and retains the context of the `ordinal`-th visible device. Throws
  // CudaError.
  static std::shared_ptr<CudaDriver> open(int ordinal);
  ~CudaDriver();
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  // Pins [begin, begin + nbytes) for every context, so that copies go by DMA, straight. Throws
  // CudaError.
  void register_host(std::byte* begin, std::uint64_t nbytes) const;

  // Ends what register_host began at `begin`. Runs in destructors, also at exit when the driver is
  // gone already: a failure leaves nothing to do.
  void unregister_host(std::byte* begin) const noexcept;

  // Copies from the device's memory and waits for the end. The source must be complete: the copy
  // is on a stream of its own, ordered after nothing. Throws CudaError.
  void copy_to_host(std::byte* dst, std::uint64_t src_device_address, std::uint64_t nbytes) const;

 private:
  explicit CudaDriver(int ordinal);

  int device_ = 0;
  void* context_ = nullptr;
  void* stream_ = nullptr;
};

}  // namespace memascend
