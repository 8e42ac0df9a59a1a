// SPDX-License-Identifier: Apache-2.0
#include "memascend/arena.hpp"

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "memascend/error.hpp"

using namespace memascend;
using namespace std::chrono_literals;

namespace {

std::shared_ptr<PinnedArena> arena_of(std::uint64_t pages) {
  return PinnedArena::create(pages * page_bytes(), PinMode::kNone, true);
}

}  // namespace

TEST(capacity_is_rounded_to_pages_and_no_further) {
  const auto arena = PinnedArena::create(3 * page_bytes() + 1, PinMode::kNone, true);
  CHECK_EQUAL(arena->capacity_bytes(), 4 * page_bytes());
  CHECK_EQUAL(arena->largest_free_bytes(), 4 * page_bytes());
}

TEST(slots_are_page_aligned_exact_and_writable) {
  const auto arena = arena_of(8);
  const auto slot = arena->allocate(page_bytes() + 1, "a");
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(slot->data()) % page_bytes(), 0U);
  CHECK_EQUAL(slot->nbytes(), page_bytes() + 1);
  CHECK_EQUAL(arena->in_use_bytes(), 2 * page_bytes());
  std::memset(slot->data(), 1, slot->nbytes());
}

TEST(high_water_stays_when_slots_return) {
  const auto arena = arena_of(8);
  arena->allocate(5 * page_bytes(), "a");
  CHECK_EQUAL(arena->in_use_bytes(), 0U);
  CHECK_EQUAL(arena->high_water_bytes(), 5 * page_bytes());
}

TEST(full_arena_says_what_was_asked_and_what_is_left) {
  const auto arena = PinnedArena::create(1 << 20, PinMode::kNone, true);
  const auto slot = arena->allocate(1 << 19, "half");
  CHECK_THROWS(arena->allocate((1 << 19) + 1, "big"), ArenaFull,
               "slot 'big' of 524,289 bytes: the arena of 1,048,576 bytes has 524,288 free");
  CHECK_THROWS(arena->allocate(~std::uint64_t{0}, "huge"), ArenaFull, "huge");
  CHECK_THROWS(arena->allocate(0, "none"), std::invalid_argument, "0 bytes");
}

TEST(regions_cover_the_mapping_in_pieces_of_at_most_one_gib) {
  const std::uint64_t gib = std::uint64_t{1} << 30;
  const auto arena = PinnedArena::create(2 * gib + page_bytes(), PinMode::kNone, true);
  const auto regions = arena->regions();
  CHECK_EQUAL(regions.size(), 3U);
  CHECK_EQUAL(regions[0].second, gib);
  CHECK_EQUAL(regions[2].second, page_bytes());
  CHECK(regions[1].first == regions[0].first + gib);
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(regions[0].first) % (2U << 20), 0U);
}

// What is locked cannot be reclaimed: the rest of the arena works all the same.
TEST(no_more_is_locked_than_there_is_room_for) {
  MappingOptions options;
  options.pin.region_bytes = 2 * page_bytes();
  options.pin.lockable_bytes = 3 * page_bytes();
  const auto arena = PinnedArena::create(5 * page_bytes(), options);
  const auto regions = arena->pinned_regions();
  CHECK_EQUAL(regions.size(), 3U);
  CHECK_EQUAL(regions[1].locked_bytes, 0U);
  CHECK(regions[1].rung() == Rung::kPageable);
  CHECK_EQUAL(regions[1].refusals.size(), 1U);
  CHECK(regions[1].reason().find("has room for " + grouped(page_bytes())) != std::string::npos ||
        regions[0].locked_bytes == 0);
  CHECK(arena->rung() == Rung::kPageable);
  CHECK_EQUAL(arena->pinning_reason(),
              regions[0].locked_bytes == 0 ? regions[0].reason() : regions[1].reason());
  std::memset(arena->allocate(5 * page_bytes(), "all")->data(), 1, 5 * page_bytes());
}

TEST(the_lowest_rung_is_the_arenas_and_a_registration_bars_closing) {
  MappingOptions options;
  options.pin.mode = PinMode::kNone;
  options.pin.region_bytes = page_bytes();
  const auto arena = PinnedArena::create(2 * page_bytes(), options);
  arena->note_registered(0, "runtime");
  CHECK(arena->rung() == Rung::kPageable);
  CHECK_EQUAL(arena->pinning_reason(), "not asked for");
  arena->note_registered(1, "runtime");
  CHECK(arena->rung() == Rung::kDevice);
  CHECK_EQUAL(arena->pinning_reason(), "");
  CHECK_THROWS(arena->note_registered(1, "other"), std::logic_error, "by runtime already");
  CHECK_THROWS(arena->close(), std::logic_error, "undo that first");
  arena->note_unregistered(0);
  arena->note_unregistered(1);
  CHECK_THROWS(arena->note_unregistered(1), std::logic_error, "not registered elsewhere");
  arena->close();
  CHECK_THROWS(arena->note_registered(0, "late"), std::logic_error, "closed");
}

TEST(pages_may_be_larger_than_the_systems) {
  MappingOptions options;
  options.pin.mode = PinMode::kNone;
  options.page_bytes = 65536;
  const auto arena = PinnedArena::create(65536 + 1, options);
  CHECK_EQUAL(arena->capacity_bytes(), 2U * 65536U);
  const auto first = arena->allocate(1, "a");
  const auto second = arena->allocate(65536, "b");
  CHECK(second->data() == first->data() + 65536);
  CHECK_THROWS(arena->allocate(1, "c"), ArenaFull, "0 free");
  options.page_bytes = 3 * 65536;
  CHECK_THROWS(PinnedArena::create(1, options), std::invalid_argument, "power of two");
}

TEST(release_is_refused_while_a_reader_lives) {
  const auto arena = arena_of(2);
  const auto slot = arena->allocate(16, "read");
  slot->add_reader();
  CHECK_THROWS(slot->release(), std::logic_error, "1 reader(s)");
  slot->remove_reader();
  slot->release();
  slot->release();
  CHECK_EQUAL(arena->in_use_bytes(), 0U);
  CHECK_THROWS(slot->data(), std::logic_error, "'read' is released");
}

TEST(ranges_outside_the_slot_are_refused_without_overflow) {
  const auto arena = arena_of(2);
  const auto slot = arena->allocate(100, "s");
  CHECK(slot->at(100, 0) == slot->data() + 100);
  CHECK_THROWS(slot->at(99, 2), std::out_of_range, "leaves slot 's'");
  CHECK_THROWS(slot->at(1, ~std::uint64_t{0}), std::out_of_range, "leaves slot");
}

TEST(close_waits_for_nobody_and_refuses_while_slots_are_out) {
  const auto arena = arena_of(2);
  auto slot = arena->allocate(16, "s");
  CHECK_THROWS(arena->close(), std::logic_error, "outstanding");
  slot->release();
  arena->close();
  arena->close();
  CHECK(arena->regions().empty());
  CHECK_THROWS(arena->allocate(16, "late"), std::logic_error, "closed");
}

TEST(a_slot_keeps_the_memory_mapped_after_everyone_else_is_gone) {
  auto arena = arena_of(2);
  const auto slot = arena->allocate(page_bytes(), "last");
  std::byte* data = slot->data();
  arena.reset();
  std::memset(data, 7, page_bytes());
  CHECK_EQUAL(static_cast<int>(data[page_bytes() - 1]), 7);
}

TEST(the_last_reader_wakes_who_waits) {
  const auto arena = arena_of(2);
  const auto slot = arena->allocate(16, "s");
  CHECK(slot->wait_no_readers(0s));
  slot->add_reader();
  CHECK(!slot->wait_no_readers(1ms));
  const std::uint64_t epoch = arena->epoch();
  std::thread reader([&] {
    std::this_thread::sleep_for(20ms);
    slot->remove_reader();
  });
  CHECK(slot->wait_no_readers(10s));
  CHECK(arena->wait_epoch(epoch, 10s) != epoch);
  reader.join();
}

TEST(slots_taken_and_returned_by_many_threads_add_up) {
  const auto arena = arena_of(64);
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 4; ++id)
    threads.emplace_back([&, id] {
      for (int i = 0; i < 500; ++i) {
        const auto slot =
            arena->allocate((1 + (id + static_cast<unsigned>(i)) % 8) * page_bytes(), "t");
        std::memset(slot->data(), static_cast<int>(id), slot->nbytes());
        if (slot->data()[slot->nbytes() - 1] != static_cast<std::byte>(id)) std::abort();
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(arena->in_use_bytes(), 0U);
  CHECK_EQUAL(arena->largest_free_bytes(), 64 * page_bytes());
}
