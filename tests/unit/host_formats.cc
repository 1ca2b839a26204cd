// Number formats: all codes, and rounding against arithmetic in double.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backend/host/number_formats.h"

using namespace pkv;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A format as its finite values in ascending order, codes beside them.
struct Format {
  const char *name;
  int num_codes;
  double (*value)(int code);  // NaN and infinities too
  float (*decode)(int code);
  int (*encode)(float value);
  bool is_saturating;
};

double value_of(int code, int mantissa_bits, int bias, int num_bits) {
  const int sign = code >> (num_bits - 1) & 1, mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = code >> mantissa_bits & ((1 << (num_bits - 1 - mantissa_bits)) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return sign ? -magnitude : magnitude;
}

double ieee_value(int code, int mantissa_bits, int bias, int num_bits) {
  const int magnitude = code & ((1 << (num_bits - 1)) - 1);
  const int infinity = ((1 << (num_bits - 1 - mantissa_bits)) - 1) << mantissa_bits;
  if (magnitude > infinity) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == infinity) return code >> (num_bits - 1) ? -kInfinity : kInfinity;
  return value_of(code, mantissa_bits, bias, num_bits);
}

const Format kFormats[] = {
    {"float16", 65536, [](int c) { return ieee_value(c, 10, 15, 16); },
     [](int c) { return decode_float16(static_cast<uint16_t>(c)); }, [](float v) { return int{encode_float16(v)}; },
     false},
    {"bfloat16", 65536, [](int c) { return ieee_value(c, 7, 127, 16); },
     [](int c) { return decode_bfloat16(static_cast<uint16_t>(c)); }, [](float v) { return int{encode_bfloat16(v)}; },
     false},
    {"float8_e4m3", 256,
     [](int c) { return (c & 0x7f) == 0x7f ? std::numeric_limits<double>::quiet_NaN() : value_of(c, 3, 7, 8); },
     [](int c) { return decode_e4m3(static_cast<uint8_t>(c)); }, [](float v) { return int{encode_e4m3(v)}; }, true},
    {"float8_e5m2", 256, [](int c) { return ieee_value(c, 2, 15, 8); },
     [](int c) { return decode_e5m2(static_cast<uint8_t>(c)); }, [](float v) { return int{encode_e5m2(v)}; }, true},
};

}  // namespace

TEST_CASE("host formats: every code decodes to its value and encodes back to itself") {
  for (const Format &format : kFormats) {
    INFO(format.name);
    for (int code = 0; code < format.num_codes; ++code) {
      const double value = format.value(code);
      const float decoded = format.decode(code);
      if (std::isnan(value)) {
        REQUIRE(std::isnan(decoded));
        REQUIRE(std::isnan(format.value(format.encode(decoded))));
        REQUIRE(std::signbit(decoded) == (code >= format.num_codes / 2));
        continue;
      }
      REQUIRE(static_cast<double>(decoded) == value);
      REQUIRE(std::signbit(decoded) == (code >= format.num_codes / 2));
      if (std::isinf(value) && format.is_saturating) {
        REQUIRE(format.encode(decoded) == code - 1);
      } else {
        REQUIRE(format.encode(decoded) == code);
      }
    }
  }
}

TEST_CASE("host formats: between two codes the nearer is taken, of equally near ones the even") {
  for (const Format &format : kFormats) {
    INFO(format.name);
    for (int code = 0; code + 1 < format.num_codes / 2; ++code) {
      const double low = format.value(code), high = format.value(code + 1);
      if (!std::isfinite(low) || !std::isfinite(high)) continue;
      // Exact in float for all but bfloat16's smallest and largest; those midpoints are exact too, at 9 bits.
      const float middle = static_cast<float>((low + high) / 2);
      REQUIRE(static_cast<double>(middle) == (low + high) / 2);
      const int even = code % 2 == 0 ? code : code + 1, sign = format.num_codes / 2;
      REQUIRE(format.encode(middle) == even);
      REQUIRE(format.encode(std::nextafter(middle, -kInfinity)) == code);
      REQUIRE(format.encode(std::nextafter(middle, kInfinity)) == code + 1);
      REQUIRE(format.encode(-middle) == even + sign);
      REQUIRE(format.encode(std::nextafter(-middle, -kInfinity)) == code + 1 + sign);
      REQUIRE(format.encode(std::nextafter(-middle, kInfinity)) == code + sign);
    }
  }
}

TEST_CASE("host formats: overflow") {
  CHECK(encode_float16(65519.99f) == 0x7bff);
  CHECK(encode_float16(65520.0f) == 0x7c00);
  CHECK(encode_float16(-1e30f) == 0xfc00);
  CHECK(encode_bfloat16(std::numeric_limits<float>::max()) == 0x7f80);
  for (const float value : {448.0f, 449.0f, 464.0f, 465.0f, 1e30f, kInfinity}) {
    CHECK(encode_e4m3(value) == 0x7e);
    CHECK(encode_e4m3(-value) == 0xfe);
  }
  for (const float value : {57344.0f, 61440.0f, 65536.0f, 1e30f, kInfinity}) {
    CHECK(encode_e5m2(value) == 0x7b);
    CHECK(encode_e5m2(-value) == 0xfb);
  }
  CHECK(encode_e4m3(std::numeric_limits<float>::denorm_min()) == 0);
  CHECK(encode_e5m2(-std::numeric_limits<float>::min()) == 0x80);
}

TEST_CASE("host formats: int8 rounds to nearest even, clamps, and takes NaN for 0") {
  for (int i = -127; i <= 127; ++i) {
    CHECK(encode_int8(static_cast<float>(i)) == i);
    const float half = static_cast<float>(i) + 0.5f;
    if (i < 127) CHECK(encode_int8(half) == (i % 2 == 0 ? i : i + 1));
    CHECK(decode_element(PKV_INT8, std::vector<int8_t>{static_cast<int8_t>(i)}.data(), 0) == static_cast<float>(i));
  }
  CHECK(encode_int8(127.5f) == 127);
  CHECK(encode_int8(-128.0f) == -127);
  CHECK(encode_int8(1e30f) == 127);
  CHECK(encode_int8(-kInfinity) == -127);
  CHECK(encode_int8(std::numeric_limits<float>::quiet_NaN()) == 0);
}
