// One thread publishes, others read: always one consistent set, never an older one than before.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cache/stats_board.h"

using namespace pkv;

TEST_CASE("StatsBoard: readers see whole sets, in order") {
  StatsBoard board;
  for (int64_t value : board.read()) CHECK(value == 0);
  constexpr int64_t kNumSets = 20000;
  std::atomic<bool> is_done{false};
  std::atomic<int64_t> num_torn{0}, num_older{0}, num_reads{0};
  const auto read = [&] {
    int64_t last = 0;
    while (!is_done) {
      const StatsBoard::Values values = board.read();
      for (int i = 1; i < kNumStatsFields; ++i) num_torn += values[i] != values[0] * (i + 1);
      num_older += values[0] < last;
      last = values[0];
      ++num_reads;
    }
  };
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) readers.emplace_back(read);
  while (num_reads == 0) std::this_thread::yield();
  for (int64_t set = 1; set <= kNumSets; ++set) {
    StatsBoard::Values values;
    for (int i = 0; i < kNumStatsFields; ++i) values[i] = set * (i + 1);
    board.publish(values);
    if (set % 64 == 0) std::this_thread::yield();
  }
  is_done = true;
  for (std::thread &reader : readers) reader.join();
  CHECK(num_torn == 0);
  CHECK(num_older == 0);
  CHECK(board.read()[0] == kNumSets);
}
