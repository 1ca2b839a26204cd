#include "base/checked.h"

#include <doctest/doctest.h>

#include <limits>

using namespace pkv;

TEST_CASE("checked_add and checked_multiply notice overflow and leave the result alone") {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  int64_t out = 7;
  CHECK(checked_add<int64_t>(kMost - 1, 1, &out));
  CHECK(out == kMost);
  out = 7;
  CHECK_FALSE(checked_add<int64_t>(kMost, 1, &out));
  CHECK_FALSE(checked_add<int64_t>(kLeast, -1, &out));
  CHECK_FALSE(checked_multiply<int64_t>(kMost / 2 + 1, 2, &out));
  CHECK_FALSE(checked_multiply<int64_t>(kLeast, -1, &out));
  CHECK(out == 7);
  CHECK(checked_multiply<int64_t>(kLeast, 1, &out));
  CHECK(out == kLeast);

  uint64_t size = 7;
  CHECK_FALSE(checked_add<uint64_t>(UINT64_MAX, 1, &size));
  CHECK_FALSE(checked_multiply<uint64_t>(uint64_t{1} << 32, uint64_t{1} << 32, &size));
  CHECK(size == 7);
  CHECK(checked_multiply<uint64_t>(uint64_t{1} << 32, (uint64_t{1} << 32) - 1, &size));
  CHECK(size == UINT64_MAX - (uint64_t{1} << 32) + 1);
  // The result may be one of the factors.
  CHECK(checked_multiply(size, uint64_t{0}, &size));
  CHECK(size == 0);
}

TEST_CASE("checked_round_up") {
  uint64_t out = 7;
  const uint64_t values[] = {0, 1, 255, 256, 257};
  for (uint64_t value : values) {
    CHECK(checked_round_up(value, 256, &out));
    CHECK(out == (value + 255) / 256 * 256);
  }
  CHECK(checked_round_up(UINT64_MAX - 255, 256, &out));
  CHECK(out == UINT64_MAX - 255);
  out = 7;
  CHECK_FALSE(checked_round_up(UINT64_MAX - 254, 256, &out));
  CHECK(out == 7);
  CHECK(checked_round_up(UINT64_MAX, 1, &out));
  CHECK(out == UINT64_MAX);
}

TEST_CASE("divide_up does not overflow") {
  CHECK(divide_up(0, 4) == 0);
  CHECK(divide_up(1, 4) == 1);
  CHECK(divide_up(4, 4) == 1);
  CHECK(divide_up(5, 4) == 2);
  CHECK(divide_up(INT64_MAX, 1) == INT64_MAX);
  CHECK(divide_up(INT64_MAX, 2) == (int64_t{1} << 62));
}
