// SPDX-License-Identifier: Apache-2.0
#include "memascend/free_list.hpp"

#include <random>

#include "check.hpp"

using memascend::FreeList;

TEST(takes_from_the_smallest_piece_that_fits) {
  FreeList list(100);
  CHECK_EQUAL(*list.take(40), 0U);
  CHECK_EQUAL(*list.take(10), 40U);
  CHECK_EQUAL(*list.take(50), 50U);
  list.give(0, 40);
  list.give(50, 20);
  // 20 fits both holes; the one of 20 is taken whole and the one of 40 stays whole.
  CHECK_EQUAL(*list.take(20), 50U);
  CHECK_EQUAL(list.largest_free(), 40U);
}

TEST(returned_neighbours_become_one_piece_in_any_order) {
  for (const bool middle_last : {false, true}) {
    FreeList list(30);
    for (int i = 0; i < 3; ++i) list.take(10);
    list.give(0, 10);
    if (!middle_last) list.give(10, 10);
    list.give(20, 10);
    if (middle_last) list.give(10, 10);
    CHECK_EQUAL(list.pieces(), 1U);
    CHECK_EQUAL(list.largest_free(), 30U);
  }
}

TEST(what_does_not_fit_one_piece_is_refused_though_the_sum_would) {
  FreeList list(30);
  for (int i = 0; i < 3; ++i) list.take(10);
  list.give(0, 10);
  list.give(20, 10);
  CHECK_EQUAL(list.free_total(), 20U);
  CHECK(!list.take(11).has_value());
  CHECK(!list.take(0).has_value());
}

TEST(double_return_is_refused_and_changes_nothing) {
  FreeList list(100);
  list.take(50);
  list.give(10, 10);
  CHECK_THROWS(list.give(10, 10), std::logic_error, "already free");
  CHECK_THROWS(list.give(15, 20), std::logic_error, "already free");
  CHECK_THROWS(list.give(5, 10), std::logic_error, "already free");
  CHECK_THROWS(list.give(95, 10), std::logic_error, "outside");
  CHECK_EQUAL(list.free_total(), 60U);
}

// Against the simplest truth: one flag per unit.
TEST(random_operations_never_overlap_and_account_for_every_unit) {
  constexpr std::uint64_t kUnits = 200;
  FreeList list(kUnits);
  std::vector<bool> used(kUnits, false);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> taken;
  std::mt19937 random(7);
  for (int step = 0; step < 20000; ++step) {
    if (taken.empty() || random() % 2 == 0) {
      const std::uint64_t length = 1 + random() % 40;
      if (const auto offset = list.take(length)) {
        for (std::uint64_t i = *offset; i < *offset + length; ++i) {
          CHECK(!used[i]);
          used[i] = true;
        }
        taken.emplace_back(*offset, length);
      } else {
        CHECK(list.largest_free() < length);
      }
    } else {
      const std::size_t chosen = random() % taken.size();
      const auto [offset, length] = taken[chosen];
      taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(chosen));
      list.give(offset, length);
      for (std::uint64_t i = offset; i < offset + length; ++i) used[i] = false;
    }
    std::uint64_t longest = 0;
    std::uint64_t run = 0;
    std::uint64_t free_units = 0;
    for (std::uint64_t i = 0; i < kUnits; ++i) {
      run = used[i] ? 0 : run + 1;
      free_units += used[i] ? 0 : 1;
      longest = std::max(longest, run);
    }
    CHECK_EQUAL(list.free_total(), free_units);
    CHECK_EQUAL(list.largest_free(), longest);
  }
}
