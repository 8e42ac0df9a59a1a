// SPDX-License-Identifier: Apache-2.0
// Slots as DLPack tensors: arrays of other libraries that read our memory in place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memascend/arena.hpp"

namespace memascend {

// The binary layout of DLPack 1.0 (https://dmlc.github.io/dlpack/latest/c_api.html), of which only
// what an exporter of contiguous host memory needs is declared. Field names are the standard's.
namespace dl {

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCudaHost = 3;

struct Device {
  std::int32_t device_type;
  std::int32_t device_id;
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(ManagedTensor*);
};
struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};
struct ManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor dl_tensor;
};

}  // namespace dl

// A tensor over a part of a slot, counted as a reader of it from construction to destruction, as is
// every managed tensor made from it. Deleters run without the GIL on any thread, and hold the slot
// (and so the arena): a consumer that lives past everything else still reads mapped memory.
class SlotExport {
 public:
  // `offset_bytes` must be a multiple of 64, the alignment at which XLA aliases instead of copying.
  // Throws std::invalid_argument or std::out_of_range with the numbers.
  // `device` is what consumers are told: kCpu, or kCudaHost for memory registered with CUDA.
  SlotExport(std::shared_ptr<Slot> slot, const std::string& dtype, std::vector<std::int64_t> shape,
             std::uint64_t offset_bytes, dl::Device device = {dl::kCpu, 0});
  ~SlotExport();
  SlotExport(const SlotExport&) = delete;
  SlotExport& operator=(const SlotExport&) = delete;

  dl::Device device() const noexcept { return device_; }

  // The caller owns the result and must call its deleter once.
  dl::ManagedTensor* managed() const;
  dl::ManagedTensorVersioned* managed_versioned() const;

 private:
  std::shared_ptr<Slot> slot_;
  std::byte* data_;
  dl::DataType dtype_;
  dl::Device device_;
  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> strides_;
};

}  // namespace memascend
