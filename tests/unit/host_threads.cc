// The thread pool: every task once, several callers, forks, settings.
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "backend/host/thread_pool.h"
#include "host_case.h"

using namespace pkv;

namespace {

// True if each of the tasks ran once and workers were told apart.
bool run_and_count(int64_t num_tasks, int32_t num_threads) {
  std::vector<std::atomic<int>> counts(static_cast<size_t>(num_tasks));
  std::vector<std::atomic<int>> inside(static_cast<size_t>(num_threads));
  std::atomic<bool> is_good{true};
  auto task = [&](int64_t index, int32_t worker) {
    if (worker < 0 || worker >= num_threads || inside[static_cast<size_t>(worker)].fetch_add(1) != 0) is_good = false;
    counts[static_cast<size_t>(index)].fetch_add(1);
    inside[static_cast<size_t>(worker)].fetch_sub(1);
  };
  run_parallel(num_tasks, num_threads, task);
  for (const std::atomic<int> &count : counts) {
    if (count != 1) is_good = false;
  }
  return is_good;
}

}  // namespace

TEST_CASE("host threads: every task runs once") {
  for (int round = 0; round < 50; ++round) {
    for (const int32_t threads : {1, 2, 7}) {
      for (const int64_t tasks : {0, 1, 2, 100, 1000}) REQUIRE(run_and_count(tasks, threads));
    }
  }
}

TEST_CASE("host threads: several callers at once") {
  std::vector<std::thread> callers;
  std::atomic<bool> is_good{true};
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        if (!run_and_count(50, 3)) is_good = false;
      }
    });
  }
  for (std::thread &caller : callers) caller.join();
  CHECK(is_good);
}

#if !defined(__SANITIZE_THREAD__)  // its runtime does not start threads after a fork
TEST_CASE("host threads: a forked child has threads of its own") {
  REQUIRE(run_and_count(100, 4));
  std::atomic<bool> is_stopping{false};
  std::thread busy([&] {
    while (!is_stopping) run_and_count(20, 3);
  });
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) _exit(run_and_count(1000, 4) && run_and_count(1000, 4) ? 0 : 1);
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
  is_stopping = true;
  busy.join();
}
#endif

TEST_CASE("host threads: settings") {
  HostSettings settings;
  CHECK(host_num_threads() >= 1);
  CHECK(set_host_num_threads(-1) == PKV_INVALID_ARGUMENT);
  CHECK(set_host_num_threads(1 << 20) == PKV_INVALID_ARGUMENT);
  CHECK(set_host_num_threads(3) == PKV_OK);
  CHECK(host_num_threads() == 3);
  CHECK(set_host_num_threads(0) == PKV_OK);

  CHECK(set_host_isa("sse9") == PKV_INVALID_ARGUMENT);
  CHECK(std::string(last_error()).find("sse9") != std::string::npos);
  CHECK(set_host_isa("") == PKV_INVALID_ARGUMENT);
  for (const char *isa : {"reference", "scalar"}) {
    CHECK(set_host_isa(isa) == PKV_OK);
    CHECK(std::string(host_isa()) == isa);
  }
  CHECK(set_host_isa("auto") == PKV_OK);
  CHECK(std::string(host_isa()) != "reference");
}
