// SPDX-License-Identifier: Apache-2.0
// Compact states: split against float32 bit for bit, every format between instruction sets, thread
// counts and cuts of the tensor, and what the bytes of int8 decode to.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "block_draws.hpp"
#include "check.hpp"
#include "compact_masters.hpp"
#include "compact_moments.hpp"
#include "float_formats.hpp"
#include "memascend/isa.hpp"
#include "memascend/optimizer.hpp"
#include "memascend/thread_pool.hpp"

using namespace memascend;

namespace {

constexpr CompactFormat kFormats[] = {CompactFormat::kSplit, CompactFormat::kSplitBf16,
                                      CompactFormat::kBf16, CompactFormat::kInt8};
constexpr std::uint64_t kKey = 0x0123456789ABCDEFU;

std::vector<std::string> instruction_sets() {
  std::vector<std::string> found;
  for (const char* name : {"scalar", "avx2", "avx512"}) {
    try {
      use_isa(name);
      found.emplace_back(name);
    } catch (const std::invalid_argument&) {
    }
  }
  return found;
}

struct State {
  std::vector<std::uint16_t> param, residual, mu, nu;
  std::vector<float> wide_mu, wide_nu, scales;

  explicit State(std::uint64_t n)
      : param(n),
        residual(n),
        mu(n),
        nu(n),
        wide_mu(n),
        wide_nu(n),
        scales(2 * ((n + kBlockElements - 1) / kBlockElements)) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (auto& value : param) value = Bfloat16::store(normal(random));
  }

  bool operator==(const State& other) const {
    return param == other.param && residual == other.residual && mu == other.mu && nu == other.nu &&
           wide_mu == other.wide_mu && wide_nu == other.wide_nu && scales == other.scales;
  }
};

CompactTile tile_of(State& s, CompactFormat format, const std::vector<std::uint16_t>& grad,
                    std::uint64_t at, std::uint64_t n) {
  const bool bytes = format == CompactFormat::kInt8;
  const std::uint64_t moment = format == CompactFormat::kSplit ? 4 : (bytes ? 1 : 2);
  void* mu = format == CompactFormat::kSplit ? static_cast<void*>(s.wide_mu.data()) : s.mu.data();
  void* nu = format == CompactFormat::kSplit ? static_cast<void*>(s.wide_nu.data()) : s.nu.data();
  CompactTile tile{};
  tile.param = s.param.data() + at;
  tile.residual = reinterpret_cast<std::byte*>(s.residual.data()) + at * (bytes ? 1 : 2);
  tile.mu = static_cast<std::byte*>(mu) + at * moment;
  tile.nu = static_cast<std::byte*>(nu) + at * moment;
  tile.scales = bytes ? s.scales.data() + 2 * (at / kBlockElements) : nullptr;
  tile.grad = grad.data() + at;
  tile.grad_type = FloatType::kBfloat16;
  tile.n = n;
  tile.first_element = at;
  tile.random_key = kKey;
  return tile;
}

UpdateNumbers numbers_of(int step) {
  return {
      1e-2, 0.9, 0.999, 1e-8, 0.0, 0.01, 1 - std::pow(0.9, step), 1.0, 1 - std::pow(0.999, step),
      0.5};
}

std::vector<std::uint16_t> gradient(std::uint64_t n, int step) {
  std::mt19937 random(static_cast<unsigned>(step));
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> grad(n);
  for (auto& value : grad)
    value = Bfloat16::store(normal(random) * std::exp(3.0F * normal(random)));
  return grad;
}

// The state after three steps, cut into tiles of `tile` elements.
State after_steps(CompactFormat format, std::uint64_t n, std::uint64_t tile) {
  State state(n);
  for (int step = 1; step <= 3; ++step) {
    const std::vector<std::uint16_t> grad = gradient(n, step);
    for (std::uint64_t at = 0; at < n; at += tile)
      compact_update(format, tile_of(state, format, grad, at, std::min(tile, n - at)),
                     numbers_of(step));
  }
  return state;
}

}  // namespace

TEST(split_is_float32_bit_for_bit) {
  const std::uint64_t n = 40001;
  State split(n);
  std::vector<float> master(n), mu(n), nu(n);
  std::vector<std::uint16_t> rounded(n);
  for (std::size_t i = 0; i < n; ++i) master[i] = Bfloat16::load(split.param[i]);
  for (int step = 1; step <= 50; ++step) {
    const std::vector<std::uint16_t> grad = gradient(n, step);
    FusedTile tile{};
    tile.param = master.data();
    tile.mu = mu.data();
    tile.nu = nu.data();
    tile.grad = grad.data();
    tile.grad_type = FloatType::kBfloat16;
    tile.rounded = rounded.data();
    tile.rounded_type = FloatType::kBfloat16;
    tile.n = n;
    fused_update(UpdateRule::kAdam, tile, numbers_of(step));
    compact_update(CompactFormat::kSplit, tile_of(split, CompactFormat::kSplit, grad, 0, n),
                   numbers_of(step));
  }
  CHECK(split.param == rounded);
  CHECK(split.wide_mu == mu);
  CHECK(split.wide_nu == nu);
  for (std::size_t i = 0; i < n; ++i)
    CHECK_EQUAL(bits_of(SplitMaster::load(split.param[i], split.residual[i])), bits_of(master[i]));
}

TEST(masters_are_rebuilt_exactly_whatever_the_bits) {
  std::mt19937 random(5);
  for (int i = 0; i < 2000000; ++i) {
    const float value = with_plain_nan(float_of(static_cast<std::uint32_t>(random())));
    std::uint16_t param = 0, low = 0;
    SplitMaster::store(value, param, low);
    const float split = SplitMaster::load(param, low);
    const std::uint32_t kept = ByteMaster::store(value, 0);
    const float upper = ByteMaster::load(kept & 0xFFFF0000U, kept);
    if (std::isnan(value)) {
      CHECK(std::isnan(split) && std::isnan(upper) && std::isnan(Bfloat16::load(param)));
      CHECK(std::isnan(float_of(kept & 0xFFFF0000U)));
    } else {
      CHECK_EQUAL(bits_of(split), bits_of(value));
      CHECK_EQUAL(bits_of(upper), bits_of(value) & 0xFFFFFF00U);
      CHECK_EQUAL(kept >> 16, std::uint32_t{param});
      // What the format says of the residual: what the parameter's rounding left, as a number.
      const auto residual = static_cast<std::int8_t>((kept >> 8) ^ (ByteMaster::kFlips & 0xFFU));
      const std::uint32_t left = static_cast<std::uint32_t>(residual) << 8;
      CHECK_EQUAL((std::uint32_t{param} << 16) + left, bits_of(upper));
    }
  }
}

TEST(every_format_agrees_between_instruction_sets_threads_and_cuts) {
  const int before = kernel_pool().threads();
  for (const CompactFormat format : kFormats)
    for (const std::uint64_t n : {1U, 17U, 255U, 256U, 257U, 1000U, 70000U}) {
      use_isa("scalar");
      kernel_pool().resize(1);
      const State expected = after_steps(format, n, n);
      for (const auto& isa : instruction_sets())
        for (const int threads : {1, 3}) {
          use_isa(isa);
          kernel_pool().resize(threads);
          CHECK(after_steps(format, n, n) == expected);
          CHECK(after_steps(format, n, 768) == expected);
        }
    }
  kernel_pool().resize(before);
}

TEST(rows_get_the_parameters_that_their_tile_gets) {
  const std::uint64_t columns = 96, rows = 50, n = columns * rows;
  const std::uint64_t wanted[] = {0, 3, 4, 31, 49};
  for (const CompactFormat format : kFormats) {
    State whole = after_steps(format, n, n);
    State apart(5 * columns);
    const std::vector<std::uint16_t> grad = gradient(n, 9);
    std::vector<std::uint16_t> rows_grad(5 * columns);
    std::vector<std::int64_t> starts;
    std::vector<float> scales;
    auto* whole_bytes = reinterpret_cast<std::uint8_t*>(whole.residual.data());
    for (std::size_t row = 0; row < 5; ++row) {
      const std::uint64_t from = wanted[row] * columns;
      starts.push_back(static_cast<std::int64_t>(from));
      for (std::uint64_t j = 0; j < columns; ++j) {
        const std::uint64_t to = row * columns + j;
        apart.param[to] = whole.param[from + j];
        apart.wide_mu[to] = whole.wide_mu[from + j];
        apart.wide_nu[to] = whole.wide_nu[from + j];
        rows_grad[to] = grad[from + j];
        if (format == CompactFormat::kInt8) {
          reinterpret_cast<std::uint8_t*>(apart.residual.data())[to] = whole_bytes[from + j];
          reinterpret_cast<std::uint8_t*>(apart.mu.data())[to] =
              reinterpret_cast<std::uint8_t*>(whole.mu.data())[from + j];
          reinterpret_cast<std::uint8_t*>(apart.nu.data())[to] =
              reinterpret_cast<std::uint8_t*>(whole.nu.data())[from + j];
        } else {
          apart.residual[to] = whole.residual[from + j];
          apart.mu[to] = whole.mu[from + j];
          apart.nu[to] = whole.nu[from + j];
        }
      }
      for (std::uint64_t k = 0; k < 2; ++k) {
        const std::uint64_t block =
            std::min(from / kBlockElements + k, whole.scales.size() / 2 - 1);
        scales.push_back(whole.scales[2 * block]);
        scales.push_back(whole.scales[2 * block + 1]);
      }
    }
    CompactTile tile = tile_of(apart, format, rows_grad, 0, 5 * columns);
    if (format == CompactFormat::kInt8) tile.scales = scales.data();
    tile.row_starts = starts.data();
    tile.row_elements = columns;
    tile.row_blocks = 2;
    compact_update(format, tile, numbers_of(4));
    compact_update(format, tile_of(whole, format, grad, 0, n), numbers_of(4));
    for (std::size_t row = 0; row < 5; ++row)
      for (std::uint64_t j = 0; j < columns; ++j)
        CHECK_EQUAL(apart.param[row * columns + j], whole.param[wanted[row] * columns + j]);
  }
}

TEST(positions_beyond_32_bits_draw_other_numbers_and_cuts_there_change_nothing) {
  const std::uint64_t n = 4096;
  const std::vector<float> values(n, 1.0F + 0.25F / 128.0F);
  std::vector<std::uint16_t> low(n), high(n), across(2 * n), second(n);
  to_bfloat16_stochastic(low.data(), values.data(), n, 0, kKey);
  to_bfloat16_stochastic(high.data(), values.data(), n, std::uint64_t{1} << 32, kKey);
  CHECK(low != high);
  const std::vector<float> twice(2 * n, values[0]);
  to_bfloat16_stochastic(across.data(), twice.data(), 2 * n, (std::uint64_t{1} << 32) - n, kKey);
  CHECK(std::equal(high.begin(), high.end(), across.begin() + static_cast<std::ptrdiff_t>(n)));
}

TEST(bytes_decode_to_zero_the_scale_and_rising_values_between) {
  const auto mu = [](std::uint32_t code) { return MuByte::take<0>(code); };
  const auto nu = [](std::uint32_t code) { return NuByte::take<0>(code) - NuByte::lowest(); };
  CHECK_EQUAL(mu(0), 0.0F);
  CHECK_EQUAL(nu(0), 0.0F);
  for (std::uint32_t code = 1; code < 120; ++code) {
    CHECK(mu(code) > mu(code - 1));
    CHECK_EQUAL(mu(code | 0x80U), -mu(code));
  }
  for (std::uint32_t code = 1; code < 248; ++code) CHECK(nu(code) > nu(code - 1));
  CHECK(std::fabs(mu(120) - 1.0F) < 1e-4F);
  CHECK_EQUAL(nu(248), 1.0F);
  // The largest of a block, whatever is drawn, and the least that is not nothing.
  for (const std::uint32_t drawn : {0U, 1U, 0x7FFFFU, 0xFFFFFU, 0xFFFFFFFFU}) {
    const std::uint32_t random = byte_draw(drawn);
    CHECK_EQUAL(NuByte::put<0>(1.0F, 2.0F, random), 248U);
    CHECK_EQUAL(NuByte::put<0>(NuByte::lowest(), 1e-30F, random), 1U);
    CHECK_EQUAL(NuByte::put<0>(NuByte::lowest(), 0.0F, random), 0U);
    CHECK_EQUAL(MuByte::put<0>(0.0F, 0.5F, random), 0U);
  }
}

TEST(a_byte_is_the_same_wherever_in_a_word_it_is) {
  std::mt19937 random(6);
  for (std::uint32_t code = 0; code < 256; ++code) {
    const std::uint32_t beside = static_cast<std::uint32_t>(random()) & 0xFFFF00FFU;
    const std::uint32_t word = beside | code << 8;
    CHECK_EQUAL(bits_of(MuByte::take<1>(word)), bits_of(MuByte::take<0>(code)));
    CHECK_EQUAL(bits_of(MuByte::take<3>(code << 24 | beside >> 8)), bits_of(MuByte::take<0>(code)));
    CHECK_EQUAL(bits_of(NuByte::take<1>(word)), bits_of(NuByte::take<0>(code)));
    CHECK_EQUAL(bits_of(NuByte::take<2>(code << 16 | (beside & 0xFFFFU))),
                bits_of(NuByte::take<0>(code)));
    // Without a draw every code comes back, in each place.
    const float m = MuByte::take<0>(code), x = NuByte::take<0>(code);
    const std::uint32_t none = byte_draw(0);
    if ((code & 0x7FU) < 120) {
      CHECK_EQUAL(MuByte::put<0>(m, 1.0F, none), code);
      CHECK_EQUAL(MuByte::put<3>(m, 1.0F, none), code << 24);
    }
    CHECK_EQUAL(NuByte::put<2>(x, x - NuByte::lowest(), none), code << 16);
  }
}

TEST(draws_of_a_block_are_uniform_and_tell_nothing_of_each_other) {
  // Of 2^16 keys: every bit of three elements, and whether bits of two of them agree, is set in
  // half of them: 5 sigma of a fair coin, for 261 of them.
  constexpr std::uint32_t kKeys = 1U << 16;
  constexpr double kAllowed = 5 * 128.0;
  double bits[3][32] = {}, agree[3][32] = {}, own[3][31] = {};
  for (std::uint32_t key = 0; key < kKeys; ++key) {
    const BlockDraws draws({key, 7}, 5);
    const std::uint32_t drawn[] = {draws.at<0>(0), draws.at<1>(0), draws.at<2>(41)};
    for (int i = 0; i < 3; ++i)
      for (int bit = 0; bit < 32; ++bit) {
        const std::uint32_t equal = ~(drawn[i] ^ drawn[(i + 1) % 3]);
        bits[i][bit] += drawn[i] >> bit & 1U;
        // Lowest bits of the numbers are those of a permutation: their products are one, too.
        if (bit >= 8) agree[i][bit] += equal >> bit & 1U;
        if (bit < 31) own[i][bit] += (drawn[i] ^ drawn[i] >> 1) >> bit & 1U;
      }
  }
  for (int i = 0; i < 3; ++i)
    for (int bit = 0; bit < 32; ++bit) {
      CHECK(std::fabs(bits[i][bit] - kKeys / 2.0) < kAllowed);
      if (bit >= 8) CHECK(std::fabs(agree[i][bit] - kKeys / 2.0) < kAllowed);
      if (bit < 31) CHECK(std::fabs(own[i][bit] - kKeys / 2.0) < kAllowed);
    }
}

TEST(one_nonfinite_gradient_makes_nan_and_no_ordinary_number) {
  for (const CompactFormat format : kFormats)
    for (const std::uint16_t bad : {std::uint16_t{0x7FC0}, std::uint16_t{0x7F80},
                                    std::uint16_t{0x7FFF}, std::uint16_t{0xFFFF}}) {
      State state = after_steps(format, 512, 512);
      std::vector<std::uint16_t> grad = gradient(512, 4);
      grad[77] = bad;
      compact_update(format, tile_of(state, format, grad, 0, 512), numbers_of(4));
      CHECK(std::isnan(Bfloat16::load(state.param[77])));
      if (format == CompactFormat::kInt8) {
        CHECK(std::isnan(state.scales[1]));
        CHECK(!std::isnan(state.scales[3]));
      }
    }
}
