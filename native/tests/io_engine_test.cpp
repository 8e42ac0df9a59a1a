// SPDX-License-Identifier: Apache-2.0
// Every case runs on every backend that this machine has.
#include "memascend/io_engine.hpp"

#include <sys/file.h>

#include <chrono>
#include <cstring>
#include <random>

#include "check.hpp"
#include "memascend/arena.hpp"
#include "scratch_file.hpp"

using namespace memascend;
using memascend::test::ScratchFile;

namespace {

constexpr std::uint64_t kMib = 1U << 20;

const std::vector<std::string>& backends() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found{"threads"};
    std::string reason;
    int error = 0;
    const ScratchFile file(4096);
    BackendOptions options;
    options.fd = file.fd();
    if (try_uring_backend(options, &reason, &error) != nullptr)
      found.emplace_back("io_uring");
    else
      std::cout << "     (no io_uring: " << reason << ")" << std::endl;
    return found;
  }();
  return names;
}

struct Bench {
  explicit Bench(std::vector<int> fds, const std::string& backend, bool registered = false)
      : arena(PinnedArena::create(24 * kMib, PinMode::kNone, true)) {
    options.fds = std::move(fds);
    options.backend = backend;
    options.request_bytes = kMib;
    if (registered) options.regions = arena->regions();
    engine = std::make_unique<IoEngine>(options);
  }

  std::shared_ptr<Slot> random_slot(std::uint64_t nbytes) const {
    auto slot = arena->allocate(nbytes, "data");
    std::mt19937_64 random(nbytes);
    for (std::uint64_t at = 0; at + 8 <= nbytes; at += 8) {
      const std::uint64_t word = random();
      std::memcpy(slot->data() + at, &word, 8);
    }
    return slot;
  }

  void write(std::vector<Segment> segments) const {
    engine->submit(Direction::kWrite, segments)->wait();
  }
  void read(std::vector<Segment> segments) const {
    engine->submit(Direction::kRead, segments)->wait();
  }

  std::shared_ptr<PinnedArena> arena;
  IoOptions options;
  std::unique_ptr<IoEngine> engine;
};

}  // namespace

TEST(what_was_written_is_on_the_disk_and_is_read_back) {
  for (const auto& backend : backends())
    for (const bool registered : {false, true}) {
      const ScratchFile file(8 * kMib);
      const Bench bench({file.fd()}, backend, registered);
      const auto out = bench.random_slot(5 * kMib + 4096);
      bench.write({{0, 4096, out->data(), out->nbytes()}});
      bench.engine->flush();
      const auto contents = file.contents(8 * kMib);
      CHECK(std::memcmp(contents.data() + 4096, out->data(), out->nbytes()) == 0);
      const auto in = bench.arena->allocate(out->nbytes(), "in");
      bench.read({{0, 4096, in->data(), in->nbytes()}});
      CHECK(std::memcmp(in->data(), out->data(), out->nbytes()) == 0);
      const IoCounters counters = bench.engine->counters();
      CHECK_EQUAL(counters.read_bytes, out->nbytes());
      CHECK_EQUAL(counters.write_bytes, out->nbytes());
      CHECK_EQUAL(counters.write_requests, 6U);
      CHECK_EQUAL(counters.flushes, 1U);
      if (backend == "io_uring" && registered) {
        CHECK(bench.engine->uses_registered_buffers());
      }
    }
}

TEST(scattered_segments_land_where_they_belong) {
  for (const auto& backend : backends()) {
    const ScratchFile first(4 * kMib);
    const ScratchFile second(4 * kMib);
    const Bench bench({first.fd(), second.fd()}, backend);
    const auto out = bench.random_slot(4 * kMib);
    std::vector<Segment> segments;
    for (std::uint64_t block = 0; block < 1024; ++block)
      segments.push_back({static_cast<std::uint32_t>(block % 2), (1023 - block) * 4096,
                          out->data() + block * 4096, 4096});
    bench.write(segments);
    const auto in = bench.arena->allocate(4 * kMib, "in");
    for (Segment& segment : segments)
      segment.address = in->data() + (segment.address - out->data());
    bench.read(segments);
    CHECK(std::memcmp(in->data(), out->data(), in->nbytes()) == 0);
    CHECK(std::memcmp(second.contents(4 * kMib).data() + 1022 * 4096, out->data() + 4096, 4096) ==
          0);
  }
}

TEST(a_ticket_tells_when_each_member_did_its_part) {
  for (const auto& backend : backends()) {
    const ScratchFile first(4 * kMib);
    const ScratchFile second(4 * kMib);
    const ScratchFile idle(4096);
    const Bench bench({first.fd(), second.fd(), idle.fd()}, backend);
    const auto out = bench.random_slot(4 * kMib);
    const auto before = std::chrono::steady_clock::now();
    const auto ticket = bench.engine->submit(
        Direction::kWrite,
        {{0, 0, out->data(), 3 * kMib}, {1, kMib, out->data() + 3 * kMib, kMib}});
    ticket->wait();
    const auto after = std::chrono::steady_clock::now();
    CHECK(ticket->direction() == Direction::kWrite);
    CHECK_EQUAL(ticket->spans().size(), 3U);
    CHECK_EQUAL(ticket->spans()[0].nbytes, 3 * kMib);
    CHECK_EQUAL(ticket->spans()[1].nbytes, kMib);
    CHECK_EQUAL(ticket->spans()[2].nbytes, 0U);
    CHECK(before <= ticket->submitted());
    for (const std::size_t member : {0U, 1U}) {
      const MemberSpan& span = ticket->spans()[member];
      CHECK(ticket->submitted() <= span.begun);
      CHECK(span.begun < span.ended);
      CHECK(span.ended <= after);
    }
  }
}

TEST(neighbouring_segments_become_one_request) {
  for (const auto& backend : backends()) {
    const ScratchFile file(2 * kMib);
    const Bench bench({file.fd()}, backend);
    const auto out = bench.random_slot(kMib);
    std::vector<Segment> segments;
    for (std::uint64_t block = 0; block < 256; ++block)
      segments.push_back({0, block * 4096, out->data() + block * 4096, 4096});
    bench.write(segments);
    CHECK_EQUAL(bench.engine->counters().write_requests, 1U);
  }
}

TEST(more_batches_than_depth_and_queue_all_complete) {
  for (const auto& backend : backends()) {
    const ScratchFile file(kMib);
    IoOptions options;
    options.fds = {file.fd()};
    options.backend = backend;
    options.queue_depth = 2;
    IoEngine engine(options);
    const auto arena = PinnedArena::create(kMib, PinMode::kNone, true);
    const auto slot = arena->allocate(kMib, "s");
    // Not neighbours, and more than kMaxQueued. Written, since several read into one memory race.
    std::vector<Segment> segments;
    for (std::uint64_t i = 0; i < Lane::kMaxQueued + 500; ++i)
      segments.push_back({0, (i * 2 % 256) * 4096, slot->data() + (i * 2 % 256) * 4096, 4096});
    std::vector<std::shared_ptr<Ticket>> tickets;
    tickets.push_back(engine.submit(Direction::kWrite, segments));
    for (int i = 0; i < 50; ++i)
      tickets.push_back(engine.submit(Direction::kWrite, {{0, 0, slot->data(), 4096}}));
    for (const auto& ticket : tickets) ticket->wait();
    CHECK_EQUAL(engine.counters().write_requests, segments.size() + 50);
  }
}

TEST(an_empty_batch_is_done_at_once) {
  for (const auto& backend : backends()) {
    const ScratchFile file(kMib);
    const Bench bench({file.fd()}, backend);
    const auto ticket = bench.engine->submit(Direction::kRead, {});
    CHECK(ticket->done());
    ticket->wait();
    bench.read({{0, 0, nullptr, 0}});
  }
}

TEST(the_end_of_the_file_is_an_error_with_both_numbers_and_the_path) {
  for (const auto& backend : backends()) {
    const ScratchFile file(2 * kMib);
    file.truncate(kMib + 8192);
    const Bench bench({file.fd()}, backend);
    const auto slot = bench.arena->allocate(kMib, "s");
    const auto ticket = bench.engine->submit(Direction::kRead, {{0, kMib, slot->data(), kMib}});
    CHECK_THROWS(ticket->wait(), SystemError,
                 "cannot read 1,048,576 bytes at offset 1,048,576 of member 0: the file ends after "
                 "8,192 of them");
    try {
      ticket->wait();
    } catch (const SystemError& error) {
      CHECK_EQUAL(error.path(), file.path());
      CHECK_EQUAL(error.code().value(), EIO);
    }
    bench.read({{0, 0, slot->data(), kMib}});  // and the engine still works
  }
}

TEST(an_error_of_the_kernel_reaches_the_waiter_with_its_number) {
  for (const auto& backend : backends()) {
    const ScratchFile file(kMib);
    const int read_only = ::open(file.path().c_str(), O_RDONLY | O_CLOEXEC);
    const Bench bench({read_only}, backend);
    ::close(read_only);  // the engine has its own
    const auto slot = bench.arena->allocate(4096, "s");
    bench.read({{0, 0, slot->data(), 4096}});
    const auto ticket = bench.engine->submit(Direction::kWrite, {{0, 0, slot->data(), 4096}});
    CHECK_THROWS(ticket->wait(), SystemError, "[EBADF]");
  }
}

TEST(a_failed_write_that_nobody_waited_for_is_thrown_by_flush_once) {
  for (const auto& backend : backends()) {
    const ScratchFile file(kMib);
    const int read_only = ::open(file.path().c_str(), O_RDONLY | O_CLOEXEC);
    const Bench bench({read_only}, backend);
    ::close(read_only);
    const auto slot = bench.arena->allocate(4096, "s");
    bench.engine->submit(Direction::kWrite, {{0, 0, slot->data(), 4096}})
        ->wait_for(std::chrono::seconds(10));
    CHECK_THROWS(bench.engine->flush(), SystemError, "cannot write 4,096 bytes");
    bench.engine->flush();
    const auto waited = bench.engine->submit(Direction::kWrite, {{0, 0, slot->data(), 4096}});
    CHECK_THROWS(waited->wait(), SystemError, "cannot write 4,096 bytes");
    bench.engine->flush();
    bench.engine->close();
  }
}

TEST(segments_outside_members_or_address_space_are_refused) {
  for (const auto& backend : backends()) {
    const ScratchFile file(kMib);
    const Bench bench({file.fd()}, backend);
    const auto slot = bench.arena->allocate(4096, "s");
    CHECK_THROWS(bench.read({{1, 0, slot->data(), 4096}}), std::invalid_argument, "member 1 of 1");
    CHECK_THROWS(bench.read({{0, ~std::uint64_t{0} - 5, slot->data(), 4096}}),
                 std::invalid_argument, "address space");
    CHECK_THROWS(bench.read({{0, 0, nullptr, 4096}}), std::invalid_argument, "address 0");
  }
}

TEST(close_drains_what_is_in_flight_and_refuses_more) {
  for (const auto& backend : backends()) {
    const ScratchFile file(16 * kMib);
    const Bench bench({file.fd()}, backend);
    const auto slot = bench.random_slot(16 * kMib);
    const auto ticket = bench.engine->submit(Direction::kWrite, {{0, 0, slot->data(), 16 * kMib}});
    bench.engine->close();
    CHECK(ticket->done());
    ticket->wait();
    CHECK(std::memcmp(file.contents(16 * kMib).data(), slot->data(), 16 * kMib) == 0);
    CHECK_THROWS(bench.read({{0, 0, slot->data(), 4096}}), std::logic_error, "closed");
    CHECK_THROWS(bench.engine->flush(), std::logic_error, "closed");
    bench.engine->close();
  }
}

TEST(members_share_the_registered_memory) {
  for (const auto& backend : backends()) {
    const ScratchFile first(4 * kMib);
    const ScratchFile second(4 * kMib);
    const Bench bench({first.fd(), second.fd(), first.fd()}, backend, true);
    if (backend == "io_uring") {
      CHECK(bench.engine->uses_registered_buffers());
      CHECK(bench.engine->uses_registered_files());
      CHECK_EQUAL(bench.engine->registration_reason(), "");
    }
    const auto out = bench.random_slot(2 * kMib);
    bench.write({{0, 0, out->data(), kMib}, {1, kMib, out->data() + kMib, kMib}});
    const auto in = bench.arena->allocate(2 * kMib, "in");
    bench.read({{2, 0, in->data(), kMib}, {1, kMib, in->data() + kMib, kMib}});
    CHECK(std::memcmp(in->data(), out->data(), in->nbytes()) == 0);
  }
}

// The kernel takes a ring apart some time after it was closed: what it holds must be gone before.
TEST(a_closed_engine_holds_no_file_any_more) {
  for (const auto& backend : backends())
    for (int round = 0; round < 20; ++round) {
      const ScratchFile file(kMib);
      const int locked = ::open(file.path().c_str(), O_RDWR | O_CLOEXEC);
      CHECK(::flock(locked, LOCK_EX | LOCK_NB) == 0);
      const Bench bench({locked}, backend, true);
      ::close(locked);
      CHECK(::flock(file.fd(), LOCK_EX | LOCK_NB) != 0);
      const auto slot = bench.random_slot(kMib);
      bench.write({{0, 0, slot->data(), kMib}});
      bench.engine->close();
      CHECK(::flock(file.fd(), LOCK_EX | LOCK_NB) == 0);
    }
}

TEST(urgent_and_normal_batches_mix) {
  for (const auto& backend : backends()) {
    const ScratchFile file(8 * kMib);
    const Bench bench({file.fd()}, backend, true);
    const auto out = bench.random_slot(8 * kMib);
    bench.write({{0, 0, out->data(), 8 * kMib}});
    const auto in = bench.arena->allocate(4 * kMib, "in");
    for (std::uint64_t round = 0; round < 20; ++round) {
      const auto written = bench.engine->submit(Direction::kWrite,
                                                {{0, 4 * kMib, out->data() + 4 * kMib, 4 * kMib}});
      bench.engine->submit(Direction::kRead, {{0, 0, in->data(), 4 * kMib}}, Priority::kUrgent)
          ->wait();
      CHECK(std::memcmp(in->data(), out->data(), 4 * kMib) == 0);
      written->wait();
    }
    CHECK(bench.engine->member(0).statistics().urgent_requests >= 80);
  }
}

TEST(many_threads_share_an_engine) {
  for (const auto& backend : backends()) {
    const ScratchFile file(4 * kMib);
    const Bench bench({file.fd()}, backend, true);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (std::uint64_t id = 0; id < 4; ++id)
      threads.emplace_back([&, id] {
        const auto slot = bench.arena->allocate(kMib, "s");
        for (int round = 0; round < 20; ++round) {
          std::memset(slot->data(), round + static_cast<int>(id), kMib);
          bench.write({{0, id * kMib, slot->data(), kMib}});
          std::memset(slot->data(), 0xEE, kMib);
          bench.read({{0, id * kMib, slot->data(), kMib}});
          const auto expected = static_cast<std::byte>(round + static_cast<int>(id));
          for (std::uint64_t at = 0; at < kMib; at += 512)
            if (slot->data()[at] != expected) ++wrong;
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK_EQUAL(wrong.load(), 0);
  }
}

TEST(unusable_options_are_named) {
  const ScratchFile file(kMib);
  IoOptions options;
  CHECK_THROWS(IoEngine{options}, std::invalid_argument, "at least one member");
  options.fds = {file.fd()};
  options.backend = "aio";
  CHECK_THROWS(IoEngine{options}, std::invalid_argument, "'aio'");
  options.backend = "threads";
  options.queue_depth = 0;
  CHECK_THROWS(IoEngine{options}, std::invalid_argument, "queue_depth");
  options.queue_depth = 4;
  options.request_bytes = 1000;
  CHECK_THROWS(IoEngine{options}, std::invalid_argument, "request_bytes");
  options.request_bytes = kMib;
  options.fds = {9999};
  CHECK_THROWS(IoEngine{options}, SystemError, "[EBADF]");
}
