// SPDX-License-Identifier: Apache-2.0
#include "memascend/arena.hpp"

#include <algorithm>
#include <stdexcept>

#include "memascend/error.hpp"

namespace memascend {
namespace {

constexpr const char* kClosed = "the arena is closed";

}  // namespace

std::shared_ptr<PinnedArena> PinnedArena::create(std::uint64_t capacity_bytes,
                                                 const MappingOptions& options) {
  auto mapping = std::make_shared<Mapping>(capacity_bytes, options);
  return std::shared_ptr<PinnedArena>(new PinnedArena(std::move(mapping)));
}

std::shared_ptr<PinnedArena> PinnedArena::create(std::uint64_t capacity_bytes, PinMode pin,
                                                 bool huge_pages) {
  MappingOptions options;
  options.pin.mode = pin;
  options.huge_pages = huge_pages;
  return create(capacity_bytes, options);
}

PinnedArena::PinnedArena(std::shared_ptr<Mapping> mapping)
    : mapping_(std::move(mapping)),
      free_(mapping_->nbytes()),
      capacity_bytes_(mapping_->nbytes()),
      page_bytes_(mapping_->page_bytes()),
      huge_pages_(mapping_->huge_pages()) {}

std::shared_ptr<Slot> PinnedArena::allocate(std::uint64_t nbytes, std::string label) {
  if (nbytes == 0) throw std::invalid_argument("cannot allocate a slot of 0 bytes");
  const std::lock_guard lock(mutex_);
  if (mapping_ == nullptr) throw std::logic_error(kClosed);
  // A request beyond the capacity must not reach round_up, which may overflow.
  const bool possible = nbytes <= capacity_bytes_;
  const auto offset = possible ? free_.take(round_up(nbytes, page_bytes_)) : std::nullopt;
  if (!offset)
    throw ArenaFull("cannot allocate slot '" + label + "' of " + grouped(nbytes) +
                    " bytes: the arena of " + grouped(capacity_bytes_) + " bytes has " +
                    grouped(free_.free_total()) + " free, of which " +
                    grouped(free_.largest_free()) +
                    " in one piece; raise its capacity or release slots");
  high_water_bytes_ = std::max(high_water_bytes_, capacity_bytes_ - free_.free_total());
  return std::make_shared<Slot>(shared_from_this(), mapping_, *offset, nbytes, std::move(label));
}

void PinnedArena::close() {
  const std::lock_guard lock(mutex_);
  const std::uint64_t in_use = capacity_bytes_ - free_.free_total();
  if (in_use > 0)
    throw std::logic_error("cannot close the arena: slots of " + grouped(in_use) +
                           " bytes are outstanding; release them first");
  if (mapping_ != nullptr && mapping_->pinning().registered_elsewhere())
    throw std::logic_error(
        "cannot close the arena: it is registered with a device; undo that first");
  mapping_.reset();
}

std::uint64_t PinnedArena::in_use_bytes() const {
  const std::lock_guard lock(mutex_);
  return capacity_bytes_ - free_.free_total();
}

std::uint64_t PinnedArena::high_water_bytes() const {
  const std::lock_guard lock(mutex_);
  return high_water_bytes_;
}

std::uint64_t PinnedArena::largest_free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_.largest_free();
}

std::vector<PinnedRegion> PinnedArena::pinned_regions() const {
  const std::lock_guard lock(mutex_);
  return mapping_ == nullptr ? std::vector<PinnedRegion>{} : mapping_->pinning().regions();
}

std::vector<std::pair<std::byte*, std::uint64_t>> PinnedArena::regions() const {
  std::vector<std::pair<std::byte*, std::uint64_t>> pieces;
  for (const PinnedRegion& region : pinned_regions())
    pieces.emplace_back(region.begin, region.nbytes);
  return pieces;
}

Rung PinnedArena::rung() const {
  const std::vector<PinnedRegion> regions = pinned_regions();
  Rung lowest = regions.empty() ? Rung::kPageable : Rung::kDevice;
  for (const PinnedRegion& region : regions) lowest = std::min(lowest, region.rung());
  return lowest;
}

std::string PinnedArena::pinning_reason() const {
  std::string reason;
  Rung lowest = Rung::kDevice;
  for (const PinnedRegion& region : pinned_regions()) {
    if (region.rung() >= lowest && !reason.empty()) continue;
    if (std::string found = region.reason(); !found.empty()) reason = std::move(found);
    lowest = std::min(lowest, region.rung());
  }
  return reason;
}

// Registering takes long, and must not keep slots from being taken meanwhile.
std::shared_ptr<Mapping> PinnedArena::open_mapping() const {
  const std::lock_guard lock(mutex_);
  if (mapping_ == nullptr) throw std::logic_error(kClosed);
  return mapping_;
}

void PinnedArena::register_with(const std::shared_ptr<CudaDriver>& driver) {
  open_mapping()->pinning().register_with(driver);
}

void PinnedArena::note_registered(std::size_t region, std::string by) {
  open_mapping()->pinning().note_registered(region, std::move(by));
}

void PinnedArena::note_unregistered(std::size_t region) {
  open_mapping()->pinning().note_unregistered(region);
}

void PinnedArena::note_refused(std::size_t region, std::string reason) {
  open_mapping()->pinning().note_refused(region, std::move(reason));
}

std::uint64_t PinnedArena::epoch() const {
  const std::lock_guard lock(epoch_mutex_);
  return epoch_;
}

void PinnedArena::advance_epoch() noexcept {
  {
    const std::lock_guard lock(epoch_mutex_);
    ++epoch_;
  }
  epoch_moved_.notify_all();
}

std::uint64_t PinnedArena::wait_epoch(std::uint64_t seen, std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(epoch_mutex_);
  epoch_moved_.wait_for(lock, timeout, [&] { return epoch_ != seen; });
  return epoch_;
}

// Runs in destructors. The piece was taken from this list, so `give` cannot find it free.
void PinnedArena::take_back(std::uint64_t offset, std::uint64_t length) noexcept {
  const std::lock_guard lock(mutex_);
  free_.give(offset, length);
}

Slot::Slot(std::shared_ptr<PinnedArena> arena, std::shared_ptr<Mapping> mapping,
           std::uint64_t offset, std::uint64_t nbytes, std::string label)
    : arena_(std::move(arena)),
      mapping_(std::move(mapping)),
      offset_(offset),
      nbytes_(nbytes),
      label_(std::move(label)) {}

Slot::~Slot() {
  if (!released_.exchange(true))
    arena_->take_back(offset_, round_up(nbytes_, arena_->page_bytes()));
}

std::byte* Slot::data() const {
  if (released()) throw std::logic_error("slot '" + label_ + "' is released");
  return mapping_->data() + offset_;
}

std::byte* Slot::at(std::uint64_t offset, std::uint64_t length) const {
  if (offset > nbytes_ || length > nbytes_ - offset)
    throw std::out_of_range("[" + grouped(offset) + ", +" + grouped(length) + ") leaves slot '" +
                            label_ + "' of " + grouped(nbytes_) + " bytes");
  return data() + offset;
}

void Slot::release() {
  if (const int alive = readers(); alive > 0)
    throw std::logic_error("cannot release slot '" + label_ + "': " + std::to_string(alive) +
                           " reader(s) are alive; wait for them first");
  if (!released_.exchange(true))
    arena_->take_back(offset_, round_up(nbytes_, arena_->page_bytes()));
}

// Called by the deleter of an export, on whatever thread dropped the array last.
void Slot::remove_reader() noexcept {
  if (readers_.fetch_sub(1, std::memory_order_acq_rel) == 1) arena_->advance_epoch();
}

// The epoch's lock makes "count, then sleep" one step: the last reader advances the epoch after it
// has left, so its wake-up cannot fall between the two.
bool Slot::wait_no_readers(std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(arena_->epoch_mutex_);
  return arena_->epoch_moved_.wait_for(lock, timeout, [&] { return readers() == 0; });
}

}  // namespace memascend
