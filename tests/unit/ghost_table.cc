// The table of ghosts beside a list of the last evictions.
#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <random>

#include "cache/ghost_table.h"

using namespace pkv;

TEST_CASE("GhostTable: remembers exactly the last evictions") {
  for (int64_t capacity : {0, 1, 2, 3, 7, 64, 100}) {
    GhostTable table(capacity);
    std::deque<int> model;  // -1: forgotten since
    std::mt19937 generator(static_cast<unsigned>(capacity));
    // Few different hashes, and in few buckets.
    const auto make_hash = [](int i) { return Hash128{1, static_cast<uint64_t>(i % 5) << 32 | static_cast<uint64_t>(i)}; };
    for (int round = 0; round < 5000; ++round) {
      const int i = static_cast<int>(generator() % (2 * static_cast<unsigned>(capacity) + 5));
      const auto found = std::find(model.rbegin(), model.rend(), i);
      const bool is_remembered = found != model.rend();
      if (generator() % 2 == 0) {
        CHECK(table.erase(make_hash(i)) == is_remembered);
        if (is_remembered) *found = -1;
      } else {
        table.insert(make_hash(i));
        model.push_back(i);
        if (static_cast<int64_t>(model.size()) > capacity) model.pop_front();
      }
      if (round % 1000 == 999) {
        table.clear();
        model.assign(model.size(), -1);
      }
    }
  }
}

TEST_CASE("GhostTable: after a resize it remembers what still has a place, and no more than that") {
  const auto make_hash = [](int i) { return Hash128{1, static_cast<uint64_t>(i % 5) << 32 | static_cast<uint64_t>(i)}; };
  GhostTable table(4, 10);
  int next = 0;
  std::mt19937 generator(3);
  for (int round = 0; round < 500; ++round) {
    const int64_t capacity = static_cast<int64_t>(generator() % 11);
    table.resize(capacity);
    const int num_inserted = static_cast<int>(generator() % 25);
    for (int i = 0; i < num_inserted; ++i) table.insert(make_hash(next++));
    int64_t num_remembered = 0, num_latest = 0;
    for (int i = 0; i < next; ++i) {
      if (!table.erase(make_hash(i))) continue;
      ++num_remembered;
      num_latest += i >= next - std::min<int64_t>(num_inserted, capacity);
      table.insert(make_hash(i));  // at another place
      REQUIRE(table.erase(make_hash(i)) == (capacity > 0));
    }
    CHECK(num_remembered <= capacity);
    CHECK(num_latest == std::min<int64_t>(num_inserted, capacity));
  }
}
