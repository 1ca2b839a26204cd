#include "base/json.h"

#include <doctest/doctest.h>

using namespace pkv;

TEST_CASE("JsonWriter separates values and nests") {
  std::string text;
  JsonWriter json(&text);
  json.begin_object();
  json.key("a").value(int64_t{1});
  json.key("b").begin_array();
  json.value(true).value(false).null();
  json.begin_object().end_object();
  json.begin_array().end_array();
  json.end_array();
  json.key("c").begin_object().key("d").value("x").key("e").null().end_object();
  json.key("f").value(uint64_t{2});
  json.end_object();
  CHECK(text == R"({"a":1,"b":[true,false,null,{},[]],"c":{"d":"x","e":null},"f":2})");
}

TEST_CASE("JsonWriter writes the largest numbers") {
  std::string text;
  JsonWriter(&text).begin_array().value(INT64_MIN).value(INT64_MAX).value(UINT64_MAX).end_array();
  CHECK(text == "[-9223372036854775808,9223372036854775807,18446744073709551615]");
}

TEST_CASE("JsonWriter escapes what must be, and nothing else") {
  std::string text;
  JsonWriter(&text).begin_object().key("\"\\").value("\n\t\x01\x1f/\x7f \xc3\xa4").end_object();
  CHECK(text == "{\"\\\"\\\\\":\"\\u000a\\u0009\\u0001\\u001f/\x7f \xc3\xa4\"}");
}
