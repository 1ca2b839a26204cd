#include "base/crc32c.h"

#include <doctest/doctest.h>

#include <vector>

using namespace pkv;

TEST_CASE("extend_crc32c: the vectors of RFC 3720") {
  std::vector<uint8_t> zeros(32, 0), ones(32, 0xff), up(32);
  for (size_t i = 0; i < up.size(); ++i) up[i] = static_cast<uint8_t>(i);
  CHECK(extend_crc32c(0, "123456789", 9) == 0xe3069283);
  CHECK(extend_crc32c(0, zeros.data(), zeros.size()) == 0x8a9136aa);
  CHECK(extend_crc32c(0, ones.data(), ones.size()) == 0x62a8ab43);
  CHECK(extend_crc32c(0, up.data(), up.size()) == 0x46dd794e);
  CHECK(extend_crc32c(0, nullptr, 0) == 0);
}

TEST_CASE("extend_crc32c: in pieces as in one") {
  std::vector<uint8_t> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * i + 3 * i);
  const uint32_t whole = extend_crc32c(0, bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); cut += 7) {
    CHECK(extend_crc32c(extend_crc32c(0, bytes.data(), cut), bytes.data() + cut, bytes.size() - cut) == whole);
  }
}
