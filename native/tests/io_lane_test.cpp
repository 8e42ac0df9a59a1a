// SPDX-License-Identifier: Apache-2.0
// Order, depth, members, cancellation and statistics, over backends that the test holds up.
#include "memascend/io_lane.hpp"

#include <functional>
#include <limits>
#include <numeric>
#include <thread>

#include "check.hpp"
#include "gated_backend.hpp"
#include "memascend/io_engine.hpp"
#include "scratch_file.hpp"

using namespace memascend;
using memascend::test::ScratchFile;
using memascend::testing::GatedBackend;

namespace {

constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kNormalOffset = 1U << 20;

struct Gated {
  Gated(std::size_t members, std::uint32_t queue_depth, std::uint64_t request_bytes = kBlock)
      : file(kBlock), memory(4U << 20) {
    IoOptions options;
    options.queue_depth = queue_depth;
    options.request_bytes = request_bytes;
    std::vector<std::unique_ptr<IoBackend>> owned;
    for (std::size_t i = 0; i < members; ++i) {
      options.fds.push_back(file.fd());
      auto backend = std::make_unique<GatedBackend>();
      gates.push_back(backend.get());
      owned.push_back(std::move(backend));
    }
    engine = std::make_unique<IoEngine>(options, std::move(owned));
  }
  ~Gated() { open(); }
  Gated(const Gated&) = delete;
  Gated& operator=(const Gated&) = delete;

  void open() {
    for (GatedBackend* gate : gates) gate->allow_all();
  }
  std::shared_ptr<Ticket> submit(Direction direction, std::uint64_t blocks,
                                 Priority priority = Priority::kNormal, std::uint32_t member = 0) {
    const std::uint64_t offset = priority == Priority::kUrgent ? 0 : kNormalOffset;
    return engine->submit(direction, {{member, offset, memory.data(), blocks * kBlock}}, priority);
  }

  ScratchFile file;
  std::vector<std::byte> memory;
  std::vector<GatedBackend*> gates;
  std::unique_ptr<IoEngine> engine;
};

// A thread that a failing check does not leave behind, nor wait for in vain.
class Joined {
 public:
  Joined(Gated& gated, std::function<void()> body) : gated_(gated), thread_(std::move(body)) {}
  ~Joined() {
    gated_.open();
    if (thread_.joinable()) thread_.join();
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;
  void join() { thread_.join(); }

 private:
  Gated& gated_;
  std::thread thread_;
};

std::uint64_t total(const LatencyHistogram& histogram) {
  return std::accumulate(histogram.begin(), histogram.end(), std::uint64_t{0});
}

}  // namespace

TEST(an_urgent_read_begins_at_once_although_write_backs_fill_the_queue) {
  Gated gated(1, 4);
  const auto writes = gated.submit(Direction::kWrite, 20);
  CHECK_EQUAL(gated.gates[0]->begun(4).size(), 4U);
  const auto read = gated.submit(Direction::kRead, 10, Priority::kUrgent);
  // Two more than the depth, then each that ends makes room for the next urgent one.
  const auto begun = gated.gates[0]->begun(6);
  CHECK_EQUAL(begun.size(), 6U);
  CHECK(begun[4].direction == Direction::kRead && begun[5].direction == Direction::kRead);
  gated.gates[0]->allow(8);
  const auto more = gated.gates[0]->begun(14);
  for (std::size_t i = 4; i < 14; ++i) CHECK(more[i].direction == Direction::kRead);
  gated.gates[0]->allow_all();
  read->wait();
  writes->wait();
  const MemberStatistics counts = gated.engine->member(0).statistics();
  CHECK_EQUAL(counts.urgent_requests, 10U);
  CHECK_EQUAL(counts.queue_depth_max, 6U);
}

TEST(normal_requests_never_exceed_the_depth) {
  Gated gated(1, 3);
  const auto ticket = gated.submit(Direction::kWrite, 50);
  for (int round = 0; round < 47; ++round) {
    CHECK_EQUAL(gated.gates[0]->begun(static_cast<std::size_t>(3 + round)).size(),
                static_cast<std::size_t>(3 + round));
    gated.gates[0]->allow(1);
  }
  gated.gates[0]->allow_all();
  ticket->wait();
  CHECK_EQUAL(gated.engine->member(0).statistics().queue_depth_max, 3U);
}

TEST(several_small_requests_are_in_flight_where_a_large_one_would_be) {
  CHECK_EQUAL(Lane::small_per_large(4096), 1U);
  CHECK_EQUAL(Lane::small_per_large(std::uint64_t{1} << 20), 4U);
  CHECK_EQUAL(Lane::small_per_large(std::uint64_t{1} << 30), 16U);
  Gated gated(1, 6, std::uint64_t{512} << 10);
  std::vector<Segment> scattered;
  for (std::uint64_t i = 0; i < 60; ++i)
    scattered.push_back({0, 2 * i * kBlock, gated.memory.data(), kBlock});
  const auto small = gated.engine->submit(Direction::kRead, scattered);
  gated.gates[0]->begun(12);
  gated.gates[0]->allow(20);
  gated.gates[0]->begun(32);
  // Their bytes would leave room for more, their number does not; an urgent one begins all the
  // same.
  const auto urgent = gated.submit(Direction::kRead, 1, Priority::kUrgent);
  CHECK_EQUAL(gated.gates[0]->begun(33)[32].offset, 0U);
  gated.gates[0]->allow_all();
  small->wait();
  urgent->wait();
  CHECK_EQUAL(gated.engine->member(0).statistics().queue_depth_max, 13U);
}

TEST(large_requests_leave_no_room_for_small_ones_beyond_the_depth) {
  Gated gated(1, 3, std::uint64_t{512} << 10);
  const std::uint64_t request_bytes = gated.engine->member(0).request_bytes();
  const auto large = gated.submit(Direction::kWrite, 5 * request_bytes / kBlock);
  gated.gates[0]->begun(3);
  const auto small = gated.submit(Direction::kRead, 1);
  gated.gates[0]->allow(3);
  const auto begun = gated.gates[0]->begun(6);
  CHECK_EQUAL(begun[4].nbytes, request_bytes);
  CHECK_EQUAL(begun[5].nbytes, kBlock);
  gated.gates[0]->allow_all();
  large->wait();
  small->wait();
  CHECK_EQUAL(gated.engine->member(0).statistics().queue_depth_max, 3U);
}

TEST(a_member_that_hangs_holds_up_no_other) {
  Gated gated(2, 2);
  gated.gates[1]->allow_all();
  const auto hanging = gated.submit(Direction::kRead, 10, Priority::kNormal, 0);
  gated.submit(Direction::kRead, 100, Priority::kNormal, 1)->wait();
  CHECK(!hanging->done());
  gated.gates[0]->allow_all();
  hanging->wait();
  CHECK_EQUAL(gated.engine->member(0).statistics().read.requests, 10U);
  CHECK_EQUAL(gated.engine->member(1).statistics().read.bytes, 100 * kBlock);
  CHECK_EQUAL(gated.engine->counters().read_requests, 110U);
}

TEST(a_batch_over_members_ends_with_the_last_and_keeps_its_first_failure) {
  Gated gated(2, 2);
  const auto ticket = gated.engine->submit(
      Direction::kWrite,
      {{0, 0, gated.memory.data(), kBlock}, {1, kBlock, gated.memory.data() + kBlock, kBlock}});
  // Else the failure would spare member 0 its part.
  for (GatedBackend* gate : gated.gates) gate->begun(1);
  gated.gates[1]->spoil(-EIO);
  gated.gates[1]->allow(1);
  CHECK(!ticket->wait_for(std::chrono::milliseconds(20)));
  gated.gates[0]->allow(1);
  CHECK_THROWS(ticket->wait(), SystemError, "at offset 4,096 of member 1");
  CHECK_EQUAL(gated.engine->member(0).statistics().failures, 0U);
  CHECK_EQUAL(gated.engine->member(1).statistics().failures, 1U);
}

TEST(cancelling_ends_what_is_in_flight_and_fails_what_is_queued) {
  Gated gated(1, 2);
  const auto begun = gated.submit(Direction::kWrite, 2);
  gated.gates[0]->begun(2);
  const auto half = gated.submit(Direction::kWrite, 1);
  const auto urgent = gated.submit(Direction::kRead, 5, Priority::kUrgent);
  gated.gates[0]->begun(3);  // and, in reserve, one read
  Joined closing(gated, [&] { gated.engine->close(true); });
  CHECK_THROWS(half->wait(), SystemError,
               "[ECANCELED]; the engine was closed before the request began");
  CHECK(!begun->done());
  CHECK(!urgent->done());  // part of it is in flight
  gated.gates[0]->allow_all();
  closing.join();  // and throws nothing: the caller asked for it
  begun->wait();
  CHECK_THROWS(urgent->wait(), SystemError, "cannot read 16,384 bytes at offset 4,096");
  CHECK_EQUAL(gated.engine->member(0).statistics().cancelled_bytes, 5 * kBlock);
  CHECK_THROWS(gated.submit(Direction::kRead, 1), std::logic_error, "closed");
}

TEST(cancelling_frees_a_submitter_that_waits_for_room) {
  Gated gated(1, 1);
  std::vector<Segment> segments;
  for (std::uint64_t i = 0; i < 3 * Lane::kMaxQueued; ++i)
    segments.push_back({0, 2 * i * kBlock, gated.memory.data(), kBlock});
  std::shared_ptr<Ticket> ticket;
  Joined submitting(gated, [&] { ticket = gated.engine->submit(Direction::kWrite, segments); });
  gated.gates[0]->begun(1);
  Joined closing(gated, [&] { gated.engine->close(true); });
  submitting.join();
  gated.gates[0]->allow_all();
  closing.join();
  CHECK_THROWS(ticket->wait(), SystemError, "[ECANCELED]");
}

TEST(closing_without_cancelling_does_everything) {
  Gated gated(2, 1);
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (std::uint32_t i = 0; i < 40; ++i)
    tickets.push_back(gated.submit(Direction::kWrite, 3, Priority::kNormal, i % 2));
  gated.open();
  gated.engine->close();
  for (const auto& ticket : tickets) ticket->wait();
  CHECK_EQUAL(gated.engine->counters().write_bytes, 120 * kBlock);
}

TEST(statistics_tell_reads_from_writes_and_time_each_request) {
  Gated gated(1, 8);
  const auto reads = gated.submit(Direction::kRead, 4);
  const auto writes = gated.submit(Direction::kWrite, 3);
  gated.gates[0]->begun(7);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  gated.gates[0]->allow_all();
  reads->wait();
  writes->wait();
  gated.engine->close();
  const MemberStatistics counts = gated.engine->member(0).statistics();
  CHECK_EQUAL(counts.read.bytes, 4 * kBlock);
  CHECK_EQUAL(counts.write.bytes, 3 * kBlock);
  CHECK_EQUAL(total(counts.read.latency), 4U);
  CHECK_EQUAL(total(counts.write.latency), 3U);
  // None took less than 4,096 microseconds.
  for (std::size_t bucket = 0; bucket <= 12; ++bucket) {
    CHECK_EQUAL(counts.read.latency[bucket], 0U);
    CHECK_EQUAL(counts.write.latency[bucket], 0U);
  }
  CHECK_EQUAL(counts.queue_depth_max, 7U);
  CHECK(counts.queue_depth > 1 && counts.queue_depth <= 7);
  CHECK(counts.busy_seconds >= 0.005);
}

TEST(a_latency_falls_into_the_bucket_of_its_power_of_two) {
  StatisticsCounter counter;
  const Request request{Direction::kRead, Priority::kNormal, 0, nullptr, kBlock};
  const std::vector<std::pair<std::int64_t, std::size_t>> cases = {
      {0, 0},
      {999, 0},
      {1000, 1},
      {1999, 1},
      {2000, 2},
      {3999, 2},
      {4000, 3},
      {-5, 0},
      {1023999, 10},
      {1024000, 11},
      {std::numeric_limits<std::int64_t>::max(), kLatencyBuckets - 1}};
  LatencyHistogram expected{};
  for (const auto& [ns, bucket] : cases) {
    counter.ended(request, kBlock, std::chrono::nanoseconds(ns));
    ++expected[bucket];
  }
  CHECK(counter.look().read.latency == expected);
}
