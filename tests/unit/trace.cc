// The recorder by itself: what stands in the file, and what happens when the file takes no more.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "cache/trace.h"

using namespace pkv;

namespace {

// A file that goes when the test ends.
struct TemporaryFile {
  std::string path = "trace_unit.tmp";
  ~TemporaryFile() { std::remove(path.c_str()); }
  std::string read() const {
    std::string text;
    std::FILE *file = std::fopen(path.c_str(), "rb");
    REQUIRE(file != nullptr);
    for (int byte = std::fgetc(file); byte != EOF; byte = std::fgetc(file)) text.push_back(static_cast<char>(byte));
    std::fclose(file);
    return text;
  }
};

std::string record(const std::function<void(TraceRecorder *)> &write) {
  TemporaryFile file;
  TraceRecorder recorder;
  REQUIRE(recorder.start(file.path.c_str(), TraceHeader{}) == PKV_OK);
  const size_t header_bytes = file.read().size();
  write(&recorder);
  REQUIRE(recorder.stop() == PKV_OK);
  return file.read().substr(header_bytes);
}

std::string bytes_of(std::initializer_list<int> bytes) { return std::string(bytes.begin(), bytes.end()); }

}  // namespace

TEST_CASE("TraceRecorder: numbers") {
  CHECK(record([](TraceRecorder *r) { r->begin(TraceCall::kFork, PKV_BUSY); }) == bytes_of({18, 6}));
  CHECK(record([](TraceRecorder *r) { r->put_unsigned(127); }) == bytes_of({127}));
  CHECK(record([](TraceRecorder *r) { r->put_unsigned(300); }) == bytes_of({0xac, 2}));
  CHECK(record([](TraceRecorder *r) { r->put_unsigned(UINT64_MAX); }) == std::string(9, '\xff') + '\1');
  CHECK(record([](TraceRecorder *r) { r->put_signed(-1); }) == bytes_of({1}));
  CHECK(record([](TraceRecorder *r) { r->put_signed(64); }) == bytes_of({0x80, 1}));
  CHECK(record([](TraceRecorder *r) { r->put_signed(INT64_MIN); }) == std::string(9, '\xff') + '\1');
}

TEST_CASE("TraceRecorder: an array takes the fewest bytes that hold all of it") {
  const auto width_of = [](std::vector<int64_t> values) {
    const int64_t count = static_cast<int64_t>(values.size());
    const std::string text = record([&](TraceRecorder *r) { r->put_array(values.data(), count, false); });
    CHECK(text[0] == static_cast<char>(2 * count));
    CHECK(text.size() == 2 + values.size() * static_cast<size_t>(text[1]));
    return static_cast<int>(text[1]);
  };
  CHECK(width_of({-128, 127}) == 1);
  CHECK(width_of({128}) == 2);
  CHECK(width_of({-32768, 0}) == 2);
  CHECK(width_of({32768}) == 4);
  CHECK(width_of({-1, INT32_MAX}) == 4);
  CHECK(width_of({int64_t{INT32_MAX} + 1}) == 8);
  CHECK(width_of({INT64_MIN, 3}) == 8);
  const uint64_t ids[] = {255, 65535};
  CHECK(record([&](TraceRecorder *r) { r->put_array(ids, 1, false); }) == bytes_of({2, 1, 255}));
  CHECK(record([&](TraceRecorder *r) { r->put_array(ids, 2, false); }) == bytes_of({4, 2, 255, 0, 255, 255}));
  const int64_t *none = nullptr;
  CHECK(record([&](TraceRecorder *r) { r->put_array(none, 3, false); }) == bytes_of({6, 0}));
  CHECK(record([&](TraceRecorder *r) { r->put_array(ids, 0, false); }) == bytes_of({0, 1}));
  CHECK(record([&](TraceRecorder *r) { r->put_array(ids, -1, true); }) == bytes_of({1, 1}));
}

TEST_CASE("TraceRecorder: long arrays, and those of refused calls") {
  std::vector<int64_t> values((1 << 20) + 1, 1);
  const int64_t count = static_cast<int64_t>(values.size());
  const std::string whole = record([&](TraceRecorder *r) { r->put_array(values.data(), count, false); });
  CHECK(whole.size() == values.size() + 4 + 1);
  CHECK(whole.substr(5) == std::string(values.size(), '\1'));
  const std::string refused = record([&](TraceRecorder *r) { r->put_array(values.data(), count, true); });
  CHECK(refused == whole.substr(0, 4) + '\xff');
}

TEST_CASE("TraceRecorder: a file that takes no more ends the recording, and nothing else") {
  std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit old = {};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
  struct rlimit small = old;
  small.rlim_cur = 1 << 20;
  TemporaryFile file;
  TraceRecorder recorder;
  REQUIRE(recorder.start(file.path.c_str(), TraceHeader{}) == PKV_OK);
  const std::vector<int64_t> values(100000, INT64_MAX);
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  std::string text;
  for (int i = 0; i < 10; ++i) {
    recorder.begin(TraceCall::kAppend, PKV_OK);
    recorder.put_array(values.data(), static_cast<int64_t>(values.size()), false);
  }
  REQUIRE(setrlimit(RLIMIT_FSIZE, &old) == 0);
  CHECK(!recorder.is_recording());
  CHECK(recorder.take_failure(&text));
  CHECK(text.find("writing its file") != std::string::npos);
  CHECK(!recorder.take_failure(&text));
  CHECK(recorder.stop() == PKV_DEVICE_ERROR);
  CHECK(recorder.stop() == PKV_INVALID_ARGUMENT);
  REQUIRE(recorder.start(file.path.c_str(), TraceHeader{}) == PKV_OK);
  CHECK(recorder.stop() == PKV_OK);
}
