#include "base/sha256.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

using namespace pkv;

namespace {

std::string hash_in_pieces(const std::string &text, size_t piece) {
  Sha256 sha;
  for (size_t i = 0; i < text.size(); i += piece) sha.update(text.data() + i, std::min(piece, text.size() - i));
  uint8_t digest[kSha256Bytes];
  sha.finish(digest);
  std::string out;
  for (const uint8_t byte : digest) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", byte);
    out += hex;
  }
  return out;
}

}  // namespace

TEST_CASE("Sha256: the vectors of FIPS 180-4") {
  const std::vector<std::pair<std::string, std::string>> vectors = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(1000000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
  for (const auto &[text, digest] : vectors) {
    for (const size_t piece : {size_t{1}, size_t{3}, size_t{55}, size_t{63}, size_t{64}, size_t{65}, size_t{1000}}) {
      CHECK(hash_in_pieces(text, piece) == digest);
    }
  }
}
