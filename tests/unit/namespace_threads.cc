// The records of namespaces: found by id, given back, and read from other threads while they change.
#include "cache/namespaces.h"

#include <doctest/doctest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

using namespace pkv;

TEST_CASE("Namespaces are found by id, and given back when nothing refers to them") {
  Namespaces namespaces;
  std::map<uint64_t, uint32_t> expected;
  std::mt19937_64 generator(3);
  for (int round = 0; round < 3000; ++round) {
    const uint64_t id = generator() % 300 * (generator() % 2 == 0 ? 1 : 0x100000000u);
    const auto found = expected.find(id);
    CHECK(namespaces.find(id) == (found == expected.end() ? kNoNamespace : found->second));
    if (found == expected.end()) {
      expected[id] = namespaces.find_or_create(id);
      ++namespaces.change(expected[id]).references;
    } else if (generator() % 2 == 0) {
      --namespaces.change(found->second).references;
      expected.erase(found);
    }
    namespaces.publish();
    CHECK(namespaces.num_live() == static_cast<int64_t>(expected.size()));
  }
  NamespaceBoard::Values values;
  for (uint64_t id = 0; id < 300; ++id) CHECK(namespaces.read_stats(id, &values) == (expected.count(id) > 0));
  CHECK(namespaces.find_or_create(12345) != kNoNamespace);  // never referred to
  namespaces.publish();
  CHECK(namespaces.find(12345) == kNoNamespace);
}

TEST_CASE("Namespaces: statistics are read from other threads as consistent sets") {
  Namespaces namespaces;
  const uint32_t steady = namespaces.find_or_create(7);
  ++namespaces.change(steady).references;
  namespaces.publish();
  std::atomic<bool> is_done{false};
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!is_done.load()) {
        NamespaceBoard::Values values = {};
        if (!namespaces.read_stats(7, &values)) ++num_wrong;
        if (values[kNamespaceHeld] + values[kNamespaceCached] != 0) ++num_wrong;
        if (namespaces.read_stats(1000, &values) && values[kNamespaceId] != 1000) ++num_wrong;
      }
    });
  }
  for (int64_t round = 1; round < 4000; ++round) {
    namespaces.change(steady).held = round;
    namespaces.change(steady).cached = -round;
    // Others come and go, so that the table of records grows.
    const uint32_t other = namespaces.find_or_create(1000 + static_cast<uint64_t>(round % 200));
    ++namespaces.change(other).references;
    namespaces.publish();
    if (round % 3 == 0) --namespaces.change(other).references;
  }
  is_done.store(true);
  for (std::thread &reader : readers) reader.join();
  CHECK(num_wrong.load() == 0);
}
