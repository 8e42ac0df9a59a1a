// SPDX-License-Identifier: Apache-2.0
#include "memascend/dlpack.hpp"

#include <cstring>
#include <thread>

#include "check.hpp"

using namespace memascend;

namespace {

std::shared_ptr<PinnedArena> small_arena() {
  return PinnedArena::create(16 * page_bytes(), PinMode::kNone, true);
}

}  // namespace

TEST(an_export_describes_the_slot_and_counts_as_reader) {
  const auto arena = small_arena();
  const auto slot = arena->allocate(4096, "s");
  {
    const SlotExport exported(slot, "bfloat16", {4, 8}, 64);
    CHECK_EQUAL(slot->readers(), 1);
    dl::ManagedTensor* managed = exported.managed();
    CHECK_EQUAL(slot->readers(), 2);
    const dl::Tensor& tensor = managed->dl_tensor;
    CHECK(tensor.data == slot->data() + 64);
    CHECK_EQUAL(int{tensor.dtype.code}, 4);
    CHECK_EQUAL(int{tensor.dtype.bits}, 16);
    CHECK_EQUAL(tensor.ndim, 2);
    CHECK_EQUAL(tensor.shape[1], 8);
    CHECK_EQUAL(tensor.strides[0], 8);
    CHECK_EQUAL(tensor.strides[1], 1);
    managed->deleter(managed);
  }
  CHECK_EQUAL(slot->readers(), 0);
}

TEST(the_versioned_form_says_version_one) {
  const auto arena = small_arena();
  const auto slot = arena->allocate(4096, "s");
  const SlotExport exported(slot, "float32", {}, 0);
  dl::ManagedTensorVersioned* managed = exported.managed_versioned();
  CHECK_EQUAL(managed->version.major, 1U);
  CHECK_EQUAL(managed->dl_tensor.ndim, 0);
  managed->deleter(managed);
}

TEST(what_leaves_the_slot_or_would_be_copied_is_refused) {
  const auto arena = small_arena();
  const auto slot = arena->allocate(4096, "s");
  CHECK_THROWS(SlotExport(slot, "float32", {1025}, 0), std::out_of_range, "leaves slot");
  CHECK_THROWS(SlotExport(slot, "float32", {std::int64_t{1} << 62, 64}, 0), std::out_of_range,
               "64 bits");
  CHECK_THROWS(SlotExport(slot, "float32", {4}, 4), std::invalid_argument, "multiple of 64");
  CHECK_THROWS(SlotExport(slot, "float8", {4}, 0), std::invalid_argument, "float8");
  CHECK_THROWS(SlotExport(slot, "float32", {-1}, 0), std::invalid_argument, "negative");
  CHECK_EQUAL(slot->readers(), 0);
}

TEST(a_consumer_on_another_thread_may_outlive_slot_and_arena) {
  auto arena = small_arena();
  auto slot = arena->allocate(4096, "s");
  dl::ManagedTensor* managed = SlotExport(slot, "uint8", {4096}, 0).managed();
  slot.reset();
  arena.reset();
  std::thread consumer([managed] {
    std::memset(managed->dl_tensor.data, 3, 4096);
    managed->deleter(managed);
  });
  consumer.join();
}
