#include <doctest/doctest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "cache/event_ring.h"

using namespace pkv;

namespace {

pkv_event make_event(int32_t number) {
  pkv_event event = {};
  event.kind = PKV_EVENT_STORED;
  event.block = number;
  event.namespace_id = static_cast<uint64_t>(number) * 3;
  std::memset(event.hash, number & 0xff, sizeof event.hash);
  return event;
}

// A whole event: no mixture of two.
bool is_whole(const pkv_event &event) {
  const pkv_event expected = make_event(event.block);
  return event.namespace_id == expected.namespace_id &&
         std::memcmp(event.hash, expected.hash, sizeof event.hash) == 0 &&
         event.serial == static_cast<uint64_t>(event.block) + 1;
}

}  // namespace

TEST_CASE("EventRing: in order, and new events are dropped while it is full") {
  EventRing ring(3);
  pkv_event events[5];
  CHECK(ring.read(events, 5) == 0);
  int32_t number = 0;
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 5; ++i) ring.push(make_event(number++));
    CHECK(ring.num_events() == static_cast<uint64_t>(number));
    CHECK(ring.num_dropped() == static_cast<uint64_t>(2 * (round + 1)));
    CHECK(ring.read(events, 0) == 0);
    CHECK(ring.read(events, 2) == 2);
    CHECK(ring.read(events + 2, 5) == 1);
    for (int i = 0; i < 3; ++i) {
      CHECK(events[i].block == number - 5 + i);
      CHECK(is_whole(events[i]));
    }
  }
}

TEST_CASE("EventRing: one thread pushes, one reads, one looks at the counts") {
  constexpr int32_t kNumEvents = 200000;
  EventRing ring(64);
  std::atomic<bool> is_done{false};
  std::thread writer([&] {
    for (int32_t number = 0; number < kNumEvents; ++number) ring.push(make_event(number));
    is_done = true;
  });
  std::thread watcher([&] {
    uint64_t last = 0;
    while (!is_done) {
      const uint64_t count = ring.num_events();
      CHECK(count >= last);
      last = count;
    }
  });
  std::vector<pkv_event> events(16);
  uint64_t num_read = 0, last_serial = 0;
  int64_t num_wrong = 0;
  for (bool was_done = false;;) {
    const int64_t count = ring.read(events.data(), static_cast<int64_t>(events.size()));
    for (int64_t i = 0; i < count; ++i) {
      num_wrong += !is_whole(events[i]) || events[i].serial <= last_serial;
      last_serial = events[i].serial;
    }
    num_read += static_cast<uint64_t>(count);
    if (count == 0 && was_done) break;
    was_done = is_done;
  }
  writer.join();
  watcher.join();
  CHECK(num_wrong == 0);
  CHECK(ring.num_events() == kNumEvents);
  CHECK(num_read + ring.num_dropped() == kNumEvents);
}
