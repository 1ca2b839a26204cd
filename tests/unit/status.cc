#include "base/status.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <thread>

using namespace pkv;

TEST_CASE("fail stores one line for the calling thread") {
  CHECK(fail(PKV_NOT_FOUND, "sequence %d\nis closed", 7) == PKV_NOT_FOUND);
  CHECK(std::string(last_error()) == "sequence 7 is closed");
  std::thread([] { CHECK(std::string(last_error()).empty()); }).join();
}

TEST_CASE("fail cuts a text that is too long") {
  const std::string text(5000, 'x');
  fail(PKV_INTERNAL, "%s", text.c_str());
  CHECK(std::strlen(last_error()) == 511);
}

TEST_CASE("fail takes the last text as an argument") {
  fail(PKV_INTERNAL, "inner");
  fail(PKV_INTERNAL, "outer: %s", last_error());
  CHECK(std::string(last_error()) == "outer: inner");
}

TEST_CASE("fail_shortage stores the numbers, which fail leaves alone") {
  CHECK(fail_shortage(PKV_OUT_OF_BLOCKS, 5, 3, 1, "no blocks") == PKV_OUT_OF_BLOCKS);
  fail(PKV_INTERNAL, "another");
  pkv_shortage shortage = {};
  get_last_shortage(&shortage);
  CHECK(shortage.needed == 5);
  CHECK(shortage.available == 3);
  CHECK(shortage.index == 1);
}

TEST_CASE("every status has a name") {
  for (int status = PKV_OK; status <= PKV_INTERNAL; ++status) {
    CHECK(std::string(status_name(static_cast<Status>(status))) != "UNKNOWN");
  }
  CHECK(std::string(status_name(static_cast<Status>(99))) == "UNKNOWN");
}
