// SPDX-License-Identifier: Apache-2.0
#include "memascend/dlpack.hpp"

#include <limits>
#include <stdexcept>
#include <utility>

#include "memascend/error.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kAliasAlignment = 64;

struct NamedType {
  const char* name;
  dl::DataType type;
};

constexpr NamedType kTypes[] = {
    {"bfloat16", {dl::kBfloat, 16, 1}}, {"float16", {dl::kFloat, 16, 1}},
    {"float32", {dl::kFloat, 32, 1}},   {"float64", {dl::kFloat, 64, 1}},
    {"int8", {dl::kInt, 8, 1}},         {"uint8", {dl::kUInt, 8, 1}},
    {"int16", {dl::kInt, 16, 1}},       {"uint16", {dl::kUInt, 16, 1}},
    {"int32", {dl::kInt, 32, 1}},       {"uint32", {dl::kUInt, 32, 1}},
    {"int64", {dl::kInt, 64, 1}},       {"uint64", {dl::kUInt, 64, 1}},
    {"bool", {dl::kBool, 8, 1}},
};

dl::DataType type_named(const std::string& name) {
  for (const auto& known : kTypes)
    if (name == known.name) return known.type;
  throw std::invalid_argument("unknown dtype '" + name + "' for an export");
}

std::uint64_t bytes_of(const std::vector<std::int64_t>& shape, std::uint64_t item_bytes) {
  std::uint64_t total = item_bytes;
  for (const std::int64_t extent : shape) {
    if (extent < 0) throw std::invalid_argument("a shape cannot have a negative extent");
    const auto count = static_cast<std::uint64_t>(extent);
    if (count != 0 && total > std::numeric_limits<std::uint64_t>::max() / count)
      throw std::out_of_range("the shape's size does not fit 64 bits");
    total *= count;
  }
  return total;
}

// What a deleter frees. It owns copies of shape and strides: the consumer may outlive the export.
template <typename Managed>
struct Context {
  Managed managed;
  std::shared_ptr<Slot> slot;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

template <typename Managed>
void delete_managed(Managed* managed) noexcept {
  auto* context = static_cast<Context<Managed>*>(managed->manager_ctx);
  const std::shared_ptr<Slot> slot = std::move(context->slot);
  delete context;
  slot->remove_reader();
}

template <typename Managed>
Managed* new_managed(const std::shared_ptr<Slot>& slot, std::byte* data, dl::DataType dtype,
                     dl::Device device, const std::vector<std::int64_t>& shape,
                     const std::vector<std::int64_t>& strides) {
  auto context = std::make_unique<Context<Managed>>();
  context->slot = slot;
  context->shape = shape;
  context->strides = strides;
  Managed& managed = context->managed;
  managed = Managed{};
  managed.manager_ctx = context.get();
  managed.deleter = [](Managed* self) { delete_managed(self); };
  managed.dl_tensor = {data,
                       device,
                       static_cast<std::int32_t>(shape.size()),
                       dtype,
                       context->shape.data(),
                       context->strides.data(),
                       0};
  slot->add_reader();
  return &context.release()->managed;
}

}  // namespace

SlotExport::SlotExport(std::shared_ptr<Slot> slot, const std::string& dtype,
                       std::vector<std::int64_t> shape, std::uint64_t offset_bytes,
                       dl::Device device)
    : slot_(std::move(slot)), dtype_(type_named(dtype)), device_(device), shape_(std::move(shape)) {
  if (offset_bytes % kAliasAlignment != 0)
    throw std::invalid_argument("an export must begin at a multiple of 64 bytes, got offset " +
                                grouped(offset_bytes));
  data_ = slot_->at(offset_bytes, bytes_of(shape_, dtype_.bits / 8U));
  strides_.resize(shape_.size());
  std::int64_t stride = 1;
  for (std::size_t axis = shape_.size(); axis-- > 0;) {
    strides_[axis] = stride;
    stride *= shape_[axis] > 0 ? shape_[axis] : 1;
  }
  slot_->add_reader();
}

SlotExport::~SlotExport() {
  slot_->remove_reader();
}

dl::ManagedTensor* SlotExport::managed() const {
  return new_managed<dl::ManagedTensor>(slot_, data_, dtype_, device_, shape_, strides_);
}

dl::ManagedTensorVersioned* SlotExport::managed_versioned() const {
  auto* managed =
      new_managed<dl::ManagedTensorVersioned>(slot_, data_, dtype_, device_, shape_, strides_);
  managed->version = {1, 0};
  return managed;
}

}  // namespace memascend
