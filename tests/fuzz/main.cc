// Runs a fuzz target without a fuzzer: on random bytes, or on files.
//   fuzz_cache [--seed N] [--runs N] [--calls N] [--seconds N]   seeds N, N + 1, ... until one of the limits
//   fuzz_cache FILE...                               inputs that a fuzzer has kept
// A failure prints its seed; --seed SEED --runs 1 repeats it, with --print so that every call is seen. For libFuzzer see
// cmake/PagedkvTests.cmake.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

namespace fuzz {
extern uint64_t num_calls;
extern bool prints_calls;
}

// Sanitizers then end like a failed requirement, with the seed.
extern "C" const char *__asan_default_options() { return "abort_on_error=1"; }
extern "C" const char *__ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

namespace {

constexpr size_t kMostBytes = 2000;
volatile uint64_t current_seed = 0;

void print_seed(int) {
  std::fprintf(stderr, "failed: --seed %llu --runs 1\n", static_cast<unsigned long long>(current_seed));
  std::_Exit(1);
}

std::vector<uint8_t> make_input(uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<uint8_t> bytes(generator() % kMostBytes);
  for (uint8_t &byte : bytes) byte = static_cast<uint8_t>(generator());
  return bytes;
}

bool run_file(const char *path) {
  std::FILE *file = std::fopen(path, "rb");
  if (file == nullptr) return false;
  std::vector<uint8_t> bytes;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) bytes.push_back(static_cast<uint8_t>(c));
  std::fclose(file);
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  uint64_t seed = 1, num_runs = UINT64_MAX, num_calls = UINT64_MAX, num_seconds = 5;
  for (int i = 1; i < argc; ++i) {
    uint64_t *number = std::strcmp(argv[i], "--seed") == 0      ? &seed
                       : std::strcmp(argv[i], "--runs") == 0    ? &num_runs
                       : std::strcmp(argv[i], "--calls") == 0   ? &num_calls
                       : std::strcmp(argv[i], "--seconds") == 0 ? &num_seconds
                                                                : nullptr;
    if (std::strcmp(argv[i], "--print") == 0) {
      fuzz::prints_calls = true;
      std::setvbuf(stdout, nullptr, _IONBF, 0);
    } else if (number != nullptr && i + 1 < argc) {
      *number = std::strtoull(argv[++i], nullptr, 10);
    } else if (!run_file(argv[i])) {
      std::fprintf(stderr, "cannot read %s\n", argv[i]);
      return 2;
    } else {
      num_runs = 0;
    }
  }
  std::signal(SIGABRT, print_seed);
  std::signal(SIGSEGV, print_seed);
  const std::time_t end = std::time(nullptr) + static_cast<std::time_t>(num_seconds);
  uint64_t run = 0;
  for (; run < num_runs && fuzz::num_calls < num_calls && std::time(nullptr) <= end; ++run) {
    current_seed = seed + run;
    const std::vector<uint8_t> input = make_input(current_seed);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%llu calls in %llu runs from seed %llu on\n", static_cast<unsigned long long>(fuzz::num_calls),
              static_cast<unsigned long long>(run), static_cast<unsigned long long>(seed));
  return 0;
}
