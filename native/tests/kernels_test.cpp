// SPDX-License-Identifier: Apache-2.0
// The oracle of every kernel is the plainest code that says what it should do; instruction sets
// and thread counts are compared bit for bit.
#include "memascend/kernels.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "float_formats.hpp"
#include "memascend/isa.hpp"
#include "memascend/optimizer.hpp"
#include "memascend/thread_pool.hpp"

using namespace memascend;

namespace {

const std::vector<std::string>& instruction_sets() {
  static const std::vector<std::string> sets = [] {
    std::vector<std::string> found;
    for (const char* name : {"scalar", "avx2", "avx512"}) {
      try {
        use_isa(name);
        found.emplace_back(name);
      } catch (const std::invalid_argument&) {
        std::cout << "     (no " << name << " on this machine)" << std::endl;
      }
    }
    return found;
  }();
  return sets;
}

// Every tail of the widest vector, and both sides of the chunks that threads share.
std::vector<std::uint64_t> lengths() {
  std::vector<std::uint64_t> all;
  for (std::uint64_t n = 0; n <= 80; ++n) all.push_back(n);
  for (const std::uint64_t n : {32767U, 32768U, 32769U, 65535U, 65536U, 65537U, 131073U, 200003U})
    all.push_back(n);
  return all;
}

std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (auto& value : values) value = normal(random) * std::exp(normal(random) * 3.0F);
  return values;
}

std::vector<std::uint16_t> halves_of(const std::vector<float>& values, FloatType type) {
  std::vector<std::uint16_t> halves(values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    halves[i] =
        type == FloatType::kBfloat16 ? Bfloat16::store(values[i]) : Float16::store(values[i]);
  return halves;
}

struct State {
  std::vector<float> master, mu, nu;
  std::vector<std::uint32_t> param;
};

constexpr UpdateNumbers kScalars{
    1e-3, 0.9, 0.999, 1e-8, 0.0, 0.01, 1 - 0.9 * 0.9, 1 - 0.9 * 0.9 * 0.9, 1 - 0.999 * 0.999, 0.5};

constexpr UpdateRule kRules[] = {UpdateRule::kAdam,     UpdateRule::kAdamNesterov,
                                 UpdateRule::kLion,     UpdateRule::kSgd,
                                 UpdateRule::kMomentum, UpdateRule::kNesterov};

State after_update(UpdateRule rule, std::uint64_t n, FloatType grad_type, bool with_param,
                   FloatType param_type) {
  State s{random_floats(n, 1), random_floats(n, 2), random_floats(n, 3), {}};
  for (auto& v : s.nu) v = std::fabs(v);
  const std::vector<float> grads = random_floats(n, 4);
  const std::vector<std::uint16_t> half_grads = halves_of(grads, grad_type);
  s.param.assign(n + 1, 0xA5A5A5A5U);
  FusedTile tile{};
  tile.param = s.master.data();
  tile.mu = s.mu.data();
  tile.nu = s.nu.data();
  tile.grad = grad_type == FloatType::kFloat32 ? static_cast<const void*>(grads.data())
                                               : static_cast<const void*>(half_grads.data());
  tile.grad_type = grad_type;
  tile.rounded = with_param ? s.param.data() : nullptr;
  tile.rounded_type = param_type;
  tile.n = n;
  if (moments_of(rule) < 2) tile.nu = nullptr;
  if (moments_of(rule) < 1) tile.mu = nullptr;
  fused_update(rule, tile, kScalars);
  return s;
}

State after_adamw(std::uint64_t n, FloatType grad_type, bool with_param, FloatType param_type) {
  return after_update(UpdateRule::kAdam, n, grad_type, with_param, param_type);
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

bool same_bits(const State& a, const State& b) {
  return same_bits(a.master, b.master) && same_bits(a.mu, b.mu) && same_bits(a.nu, b.nu) &&
         same_bits(a.param, b.param);
}

constexpr FloatType kTypes[] = {FloatType::kFloat32, FloatType::kBfloat16, FloatType::kFloat16};

}  // namespace

TEST(bfloat16_rounds_to_nearest_with_ties_away_for_every_high_half) {
  for (std::uint32_t high = 0; high < 0x10000; ++high)
    for (const std::uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const std::uint32_t bits = (high << 16) | low;
      const float value = float_of(bits);
      const std::uint16_t got = Bfloat16::store(value);
      if (std::isnan(value)) {
        CHECK(std::isnan(Bfloat16::load(got)));
        CHECK_EQUAL(got >> 15, static_cast<int>(high >> 15));
      } else {
        // The low half alone decides: this is what rebuilding a split master relies on.
        CHECK_EQUAL(std::uint32_t{got}, high + (low >= 0x8000U ? 1U : 0U));
      }
    }
}

TEST(float16_to_float32_is_exact_for_every_half) {
  for (std::uint32_t half = 0; half < 0x10000; ++half) {
    const auto exponent = static_cast<int>((half >> 10) & 0x1FU);
    const auto mantissa = static_cast<double>(half & 0x3FFU);
    double expected =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0 + mantissa, exponent - 25);
    if ((half & 0x8000U) != 0) expected = -expected;
    const float got = Float16::load(static_cast<std::uint16_t>(half));
    if (exponent == 31 && mantissa > 0) {
      CHECK(std::isnan(got));
    } else if (exponent == 31) {
      CHECK(std::isinf(got) && std::signbit(got) == ((half & 0x8000U) != 0));
    } else {
      CHECK_EQUAL(static_cast<double>(got), expected);
      CHECK_EQUAL(std::signbit(got), (half & 0x8000U) != 0);
    }
  }
}

TEST(float16_rounds_to_nearest_even_around_every_half) {
  for (std::uint32_t half = 0; half < 0x7BFF; ++half) {
    const auto lower = static_cast<std::uint16_t>(half);
    const auto upper = static_cast<std::uint16_t>(half + 1);
    const float a = Float16::load(lower);
    const float b = Float16::load(upper);
    const float middle = (a + b) / 2;  // exact: a float32 has 13 more bits
    CHECK_EQUAL(Float16::store(a), lower);
    CHECK_EQUAL(Float16::store(middle), (half & 1U) == 0 ? lower : upper);
    CHECK_EQUAL(Float16::store(std::nextafter(middle, 0.0F)), lower);
    CHECK_EQUAL(Float16::store(std::nextafter(middle, 1e6F)), upper);
    CHECK_EQUAL(Float16::store(-a), static_cast<std::uint16_t>(half | 0x8000U));
  }
  CHECK_EQUAL(Float16::store(65519.0F), std::uint16_t{0x7BFF});
  CHECK_EQUAL(Float16::store(65520.0F), std::uint16_t{0x7C00});
  CHECK_EQUAL(Float16::store(1e30F), std::uint16_t{0x7C00});
  CHECK(std::isnan(Float16::load(Float16::store(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(conversions_agree_between_instruction_sets_at_every_length) {
  for (const std::uint64_t n : lengths()) {
    const std::vector<float> values = random_floats(n, 5);
    const std::vector<std::uint16_t> bf16 = halves_of(values, FloatType::kBfloat16);
    const std::vector<std::uint16_t> f16 = halves_of(values, FloatType::kFloat16);
    for (const auto& isa : instruction_sets()) {
      use_isa(isa);
      std::vector<std::uint16_t> halves(n + 1, 0x1234);
      to_bfloat16(halves.data(), values.data(), n);
      CHECK_EQUAL(halves[n], 0x1234);
      halves.pop_back();
      CHECK(same_bits(halves, bf16));
      to_float16(halves.data(), values.data(), n);
      CHECK(same_bits(halves, f16));
      std::vector<float> back(n + 1, 9.0F);
      to_float32(back.data(), f16.data(), FloatType::kFloat16, n);
      for (std::size_t i = 0; i < n; ++i)
        CHECK_EQUAL(bits_of(back[i]), bits_of(Float16::load(f16[i])));
      to_float32(back.data(), bf16.data(), FloatType::kBfloat16, n);
      for (std::size_t i = 0; i < n; ++i)
        CHECK_EQUAL(bits_of(back[i]), bits_of(Bfloat16::load(bf16[i])));
      CHECK_EQUAL(back[n], 9.0F);
    }
  }
}

TEST(adamw_is_the_formula) {
  use_isa("scalar");
  const std::uint64_t n = 1000;
  const std::vector<float> w0 = random_floats(n, 1);
  const std::vector<float> m0 = random_floats(n, 2);
  const std::vector<float> v0 = random_floats(n, 3);
  const std::vector<float> g0 = random_floats(n, 4);
  const State got = after_adamw(n, FloatType::kFloat32, true, FloatType::kFloat32);
  for (std::size_t i = 0; i < n; ++i) {
    const float g = g0[i] * 0.5F;
    const float m = 0.9F * m0[i] + static_cast<float>(1.0 - 0.9) * g;
    const float v = 0.999F * std::fabs(v0[i]) + static_cast<float>(1.0 - 0.999) * (g * g);
    const auto bias1 = static_cast<float>(1.0 / kScalars.bias1);
    const auto bias2 = static_cast<float>(1.0 / kScalars.bias2);
    const float u = (m * bias1) / (std::sqrt(v * bias2) + 1e-8F) + 0.01F * w0[i];
    const float w = w0[i] - 1e-3F * u;
    CHECK_EQUAL(bits_of(got.mu[i]), bits_of(m));
    CHECK_EQUAL(bits_of(got.nu[i]), bits_of(v));
    CHECK_EQUAL(bits_of(got.master[i]), bits_of(w));
    CHECK_EQUAL(got.param[i], bits_of(w));
  }
}

TEST(adamw_agrees_between_instruction_sets_for_every_type_at_every_length) {
  for (const FloatType grad : kTypes)
    for (const FloatType param : kTypes)
      for (const std::uint64_t n : lengths()) {
        if (n > 40000) continue;
        use_isa("scalar");
        const State expected = after_adamw(n, grad, true, param);
        const State without = after_adamw(n, grad, false, param);
        CHECK(same_bits(expected.master, without.master));
        for (const auto& isa : instruction_sets()) {
          use_isa(isa);
          CHECK(same_bits(after_adamw(n, grad, true, param), expected));
          CHECK(same_bits(after_adamw(n, grad, false, param), without));
        }
      }
}

TEST(every_rule_agrees_between_instruction_sets) {
  for (const UpdateRule rule : kRules)
    for (const FloatType grad : kTypes)
      for (const std::uint64_t n : {0U, 1U, 15U, 16U, 17U, 63U, 79U, 32769U}) {
        use_isa("scalar");
        const State expected = after_update(rule, n, grad, true, FloatType::kBfloat16);
        for (const auto& isa : instruction_sets()) {
          use_isa(isa);
          CHECK(same_bits(after_update(rule, n, grad, true, FloatType::kBfloat16), expected));
        }
      }
}

TEST(lion_passes_a_nan_on) {
  float param = 1.0F;
  float mu = std::numeric_limits<float>::quiet_NaN();
  const float grad = 1.0F;
  FusedTile tile{};
  tile.param = &param;
  tile.mu = &mu;
  tile.grad = &grad;
  tile.n = 1;
  fused_update(UpdateRule::kLion, tile, kScalars);
  CHECK(std::isnan(param) && std::isnan(mu));
}

TEST(adamw_writes_the_rounded_master_as_parameter_and_nothing_behind_it) {
  const std::uint64_t n = 77;
  const State s = after_adamw(n, FloatType::kBfloat16, true, FloatType::kBfloat16);
  const auto* param = reinterpret_cast<const std::uint16_t*>(s.param.data());
  for (std::size_t i = 0; i < n; ++i) CHECK_EQUAL(param[i], Bfloat16::store(s.master[i]));
  CHECK_EQUAL(param[n], 0xA5A5);
}

TEST(kernels_do_not_depend_on_the_number_of_threads) {
  const std::uint64_t n = 300007;
  const std::vector<float> values = random_floats(n, 6);
  const int before = kernel_pool().threads();
  kernel_pool().resize(1);
  const State expected = after_adamw(n, FloatType::kBfloat16, true, FloatType::kBfloat16);
  const double sum = norm_squared(values.data(), FloatType::kFloat32, n).sum;
  for (const int threads : {2, 3, 8}) {
    kernel_pool().resize(threads);
    CHECK(same_bits(after_adamw(n, FloatType::kBfloat16, true, FloatType::kBfloat16), expected));
    CHECK_EQUAL(norm_squared(values.data(), FloatType::kFloat32, n).sum, sum);
  }
  kernel_pool().resize(before);
}

TEST(norm_squared_agrees_between_instruction_sets_and_with_long_double) {
  for (const FloatType type : kTypes)
    for (const std::uint64_t n : lengths()) {
      std::vector<float> floats = random_floats(n, 7);
      for (auto& value : floats) value = std::fmin(std::fmax(value, -6e4F), 6e4F);
      const std::vector<std::uint16_t> halves = halves_of(floats, type);
      const void* data = type == FloatType::kFloat32 ? static_cast<const void*>(floats.data())
                                                     : static_cast<const void*>(halves.data());
      long double exact = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const auto value = static_cast<long double>(type == FloatType::kFloat32
                                                        ? floats[i]
                                                        : (type == FloatType::kBfloat16
                                                               ? Bfloat16::load(halves[i])
                                                               : Float16::load(halves[i])));
        exact += value * value;
      }
      use_isa("scalar");
      const SquareSum expected = norm_squared(data, type, n);
      const double within = type == FloatType::kFloat32 ? 1e-12 : 1.2e-7;
      CHECK(std::fabs(static_cast<double>(exact) - expected.sum) <= within * expected.sum);
      CHECK(!expected.nonfinite);
      for (const auto& isa : instruction_sets()) {
        use_isa(isa);
        CHECK_EQUAL(norm_squared(data, type, n).sum, expected.sum);
      }
    }
}

TEST(one_nonfinite_element_anywhere_is_seen) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()})
    for (const std::size_t at : {0U, 15U, 16U, 63U, 65535U, 65536U, 70000U}) {
      std::vector<float> values(70001, 1e-3F);
      values[at] = bad;
      CHECK(norm_squared(values.data(), FloatType::kFloat32, values.size()).nonfinite);
      const auto halves = halves_of(values, FloatType::kBfloat16);
      CHECK(norm_squared(halves.data(), FloatType::kBfloat16, halves.size()).nonfinite);
      const auto f16 = halves_of(values, FloatType::kFloat16);
      CHECK(norm_squared(f16.data(), FloatType::kFloat16, f16.size()).nonfinite);
    }
  // The largest finite values must not look like an overflow, nor the smallest like nothing.
  const std::vector<std::uint16_t> most(70001, 0x7F7F);
  CHECK(!norm_squared(most.data(), FloatType::kBfloat16, most.size()).nonfinite);
  const std::vector<std::uint16_t> least(70001, 0x0080);
  CHECK(norm_squared(least.data(), FloatType::kBfloat16, least.size()).sum > 0);
  const std::vector<float> large(70001, std::numeric_limits<float>::max());
  CHECK(!norm_squared(large.data(), FloatType::kFloat32, large.size()).nonfinite);
}

TEST(reading_sees_every_word) {
  std::vector<std::uint64_t> words(200003);
  std::mt19937_64 random(9);
  std::uint64_t expected = 0;
  for (auto& word : words) expected ^= word = random();
  for (const auto& isa : instruction_sets()) {
    use_isa(isa);
    CHECK_EQUAL(read_words(words.data(), words.size() * 8), expected);
    CHECK_EQUAL(read_words(words.data(), 8 + 7), words[0]);
  }
}

TEST(copy_moves_every_byte_and_no_other_at_any_alignment) {
  const std::size_t large = (std::size_t{9} << 20) + 77;
  std::vector<std::byte> source(large + 64);
  std::mt19937 random(8);
  for (auto& byte : source) byte = static_cast<std::byte>(random());
  for (const std::size_t count :
       {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{5000}, large})
    for (const std::size_t from : {0U, 1U, 13U})
      for (const std::size_t to : {64U, 65U, 79U}) {
        std::vector<std::byte> target(large + 256, std::byte{0xEE});
        copy_bytes(target.data() + to, source.data() + from, count);
        CHECK(count == 0 || std::memcmp(target.data() + to, source.data() + from, count) == 0);
        CHECK(target[to - 1] == std::byte{0xEE} && target[to + count] == std::byte{0xEE});
      }
}
