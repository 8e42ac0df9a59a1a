// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli polynomial, as in iSCSI, RFC 3720): the store's checksum.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memascend {

// The checksum of `nbytes` at `data` appended to bytes whose checksum is `seed` (0: none).
// One thread.
std::uint32_t crc32c(const std::byte* data, std::uint64_t nbytes, std::uint32_t seed = 0) noexcept;

// The checksum of A followed by B, from theirs and B's length.
std::uint32_t crc32c_combine(std::uint32_t a, std::uint32_t b, std::uint64_t b_nbytes) noexcept;

// As crc32c, on the kernel threads: the value does not depend on their number.
std::uint32_t crc32c_parallel(const std::byte* data, std::uint64_t nbytes,
                              std::uint32_t seed = 0) noexcept;

// out[i] = crc32c(data[i], nbytes[i]) for `count` ranges, on the kernel threads or on one.
void crc32c_many(const std::byte* const* data, const std::uint64_t* nbytes, std::uint32_t* out,
                 std::uint64_t count, bool one_thread = false) noexcept;

}  // namespace memascend
