// SPDX-License-Identifier: Apache-2.0
// The engine over a backend that fails on purpose.
#include <cstring>
#include <set>

#include "check.hpp"
#include "fault_backend.hpp"
#include "memascend/arena.hpp"
#include "memascend/io_engine.hpp"
#include "scratch_file.hpp"

using namespace memascend;
using memascend::test::ScratchFile;
using memascend::testing::FaultBackend;
using memascend::testing::FaultPlan;

namespace {

constexpr std::uint64_t kFileBytes = 1U << 20;

struct Faulty {
  explicit Faulty(const FaultPlan& plan)
      : file(kFileBytes), arena(PinnedArena::create(4 * kFileBytes, PinMode::kNone, true)) {
    IoOptions options;
    options.fds = {file.fd()};
    options.request_bytes = 65536;
    auto owned = std::make_unique<FaultBackend>(file.fd(), plan);
    backend = owned.get();
    std::vector<std::unique_ptr<IoBackend>> backends;
    backends.push_back(std::move(owned));
    engine = std::make_unique<IoEngine>(options, std::move(backends));
    out = arena->allocate(kFileBytes, "out");
    in = arena->allocate(kFileBytes, "in");
    for (std::uint64_t at = 0; at < kFileBytes; ++at)
      out->data()[at] = static_cast<std::byte>((at * 7 + at / 4096) & 0xFFU);
  }

  void write_all() { engine->submit(Direction::kWrite, {{0, 0, out->data(), kFileBytes}})->wait(); }
  void read_all() { engine->submit(Direction::kRead, {{0, 0, in->data(), kFileBytes}})->wait(); }
  bool same() const { return std::memcmp(in->data(), out->data(), kFileBytes) == 0; }

  ScratchFile file;
  std::shared_ptr<PinnedArena> arena;
  FaultBackend* backend;
  std::unique_ptr<IoEngine> engine;
  std::shared_ptr<Slot> out, in;
};

}  // namespace

// `require_aligned` makes a resumption off a block boundary fail with EINVAL, as direct I/O does.
TEST(short_transfers_are_resumed_at_the_next_block) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    FaultPlan plan;
    plan.seed = seed;
    plan.short_rate = 0.6;
    plan.require_aligned = true;
    Faulty faulty(plan);
    faulty.write_all();
    faulty.read_all();
    CHECK(faulty.same());
    CHECK(faulty.engine->counters().short_transfers > 0);
    CHECK_EQUAL(faulty.engine->counters().failures, 0U);
  }
}

TEST(interruptions_are_retried_in_any_order) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    FaultPlan plan;
    plan.seed = seed;
    plan.interrupt_rate = 0.3;
    plan.short_rate = 0.1;
    plan.reorder = true;
    Faulty faulty(plan);
    faulty.write_all();
    faulty.read_all();
    CHECK(faulty.same());
    CHECK(faulty.engine->counters().retries > 0);
  }
}

TEST(unaligned_requests_are_resumed_anywhere) {
  FaultPlan plan;
  plan.short_rate = 0.5;
  Faulty faulty(plan);
  for (const std::uint64_t nbytes : {1U, 100U, 4097U, 70001U}) {
    faulty.engine->submit(Direction::kWrite, {{0, 13, faulty.out->data() + 1, nbytes}})->wait();
    faulty.engine->submit(Direction::kRead, {{0, 13, faulty.in->data() + 1, nbytes}})->wait();
    CHECK(std::memcmp(faulty.in->data() + 1, faulty.out->data() + 1, nbytes) == 0);
  }
}

TEST(endless_interruption_is_given_up_with_its_errno) {
  FaultPlan plan;
  plan.interrupt_rate = 1;
  Faulty faulty(plan);
  CHECK_THROWS(faulty.read_all(), SystemError, "cannot read 65,536 bytes");
  plan.interrupt_rate = 0;
  faulty.backend->set_plan(plan);
  faulty.read_all();
}

TEST(an_error_fails_its_batch_only_and_the_engine_works_on) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    FaultPlan plan;
    plan.seed = seed;
    plan.error_rate = 0.5;
    plan.error_number = ENOSPC;
    plan.reorder = true;
    Faulty faulty(plan);
    CHECK_THROWS(faulty.write_all(), SystemError, "No space left on device [ENOSPC]; free space");
    faulty.backend->set_plan({});
    faulty.write_all();
    faulty.read_all();
    CHECK(faulty.same());
  }
}

TEST(after_a_failure_the_rest_of_the_batch_is_not_started) {
  FaultPlan plan;
  plan.error_rate = 1;
  Faulty faulty(plan);
  IoOptions options;
  options.fds = {faulty.file.fd()};
  options.request_bytes = 4096;
  options.queue_depth = 4;
  std::vector<std::unique_ptr<IoBackend>> backends;
  backends.push_back(std::make_unique<FaultBackend>(faulty.file.fd(), plan));
  IoEngine engine(options, std::move(backends));
  const auto ticket = engine.submit(Direction::kRead, {{0, 0, faulty.in->data(), kFileBytes}});
  CHECK_THROWS(ticket->wait(), SystemError, "[EIO]");
  CHECK(engine.counters().read_requests <= 8);
}

TEST(a_failed_sync_is_thrown_with_the_path) {
  FaultPlan plan;
  plan.fail_sync = true;
  Faulty faulty(plan);
  CHECK_THROWS(faulty.engine->flush(), SystemError, "cannot flush member 0");
}

TEST(a_crash_keeps_synced_sectors_and_tears_the_others) {
  std::set<std::uint64_t> persisted_counts;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    FaultPlan plan;
    plan.seed = seed;
    Faulty faulty(plan);
    faulty.write_all();
    faulty.engine->flush();
    const std::vector<std::byte> old = faulty.file.contents(kFileBytes);
    for (std::uint64_t at = 0; at < kFileBytes; ++at) faulty.out->data()[at] ^= std::byte{0xFF};
    faulty.engine->submit(Direction::kWrite, {{0, 8192, faulty.out->data() + 8192, 16384}})->wait();
    faulty.backend->crash();
    CHECK_THROWS(faulty.read_all(), SystemError, "[EIO]");
    const std::vector<std::byte> now = faulty.file.contents(kFileBytes);
    std::uint64_t persisted = 0;
    for (std::uint64_t at = 0; at < kFileBytes; at += FaultBackend::kSector) {
      const bool is_old = std::memcmp(&now[at], &old[at], FaultBackend::kSector) == 0;
      const bool is_new =
          std::memcmp(&now[at], faulty.out->data() + at, FaultBackend::kSector) == 0;
      CHECK(is_old || (is_new && at >= 8192 && at < 8192 + 16384));
      persisted += is_new ? 1 : 0;
    }
    persisted_counts.insert(persisted);
  }
  CHECK(persisted_counts.size() > 3);
}

TEST(a_crash_in_the_middle_replaces_the_chosen_write) {
  FaultPlan plan;
  plan.crash_after_writes = 3;
  Faulty faulty(plan);
  CHECK_THROWS(faulty.write_all(), SystemError, "[EIO]");
  CHECK(faulty.backend->crashed());
  CHECK_THROWS(faulty.engine->flush(), SystemError, "cannot flush");
}
