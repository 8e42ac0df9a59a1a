// SPDX-License-Identifier: Apache-2.0
// As much of a test framework as these tests need: named cases, checks that tell both values.
#pragma once

#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace memascend::test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

class Failed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename A, typename B>
void check_equal(const A& got, const B& expected, const char* text, const char* file, int line) {
  if (got == expected) return;
  std::ostringstream message;
  message << file << ":" << line << ": " << text << "\n      got " << got << ", expected "
          << expected;
  throw Failed(message.str());
}

inline void check(bool holds, const char* text, const char* file, int line) {
  if (!holds) throw Failed(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

inline int run_all() {
  int failed = 0;
  for (const Case& one : cases()) {
    try {
      one.run();
      std::cout << "ok   " << one.name << std::endl;
    } catch (const std::exception& error) {
      ++failed;
      std::cout << "FAIL " << one.name << "\n      " << error.what() << std::endl;
    }
  }
  std::cout << cases().size() - static_cast<std::size_t>(failed) << " of " << cases().size()
            << " passed" << std::endl;
  return failed == 0 ? 0 : 1;
}

}  // namespace memascend::test

#define TEST(name)                                                          \
  static void name();                                                       \
  static const memascend::test::Registered name##_registered{#name, &name}; \
  static void name()

#define CHECK(condition) memascend::test::check((condition), #condition, __FILE__, __LINE__)
#define CHECK_EQUAL(got, expected) \
  memascend::test::check_equal((got), (expected), #got " == " #expected, __FILE__, __LINE__)

// The statement throws the type, with `part` in its text.
#define CHECK_THROWS(statement, Type, part)                                                \
  do {                                                                                     \
    bool thrown = false;                                                                   \
    try {                                                                                  \
      statement;                                                                           \
    } catch (const Type& error) {                                                          \
      thrown = true;                                                                       \
      const std::string text = error.what();                                               \
      memascend::test::check(text.find(part) != std::string::npos, text.c_str(), __FILE__, \
                             __LINE__);                                                    \
    }                                                                                      \
    memascend::test::check(thrown, #statement " throws " #Type, __FILE__, __LINE__);       \
  } while (false)

int main() {
  return memascend::test::run_all();
}
