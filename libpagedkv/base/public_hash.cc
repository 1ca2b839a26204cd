#include "base/public_hash.h"

#include "base/little_endian.h"

namespace pkv {
namespace {

constexpr char kDomain[] = "pagedkv-block-v1";
constexpr int64_t kTokensAtOnce = 64;

}  // namespace

PublicHash hash_block(const PublicHash *parent, uint64_t namespace_id, const int64_t *tokens, int64_t num_tokens) {
  PublicHash hash = {};
  Sha256 sha;
  sha.update(kDomain, sizeof kDomain - 1);
  sha.update((parent != nullptr ? *parent : hash).data(), hash.size());
  uint8_t bytes[kTokensAtOnce * sizeof(int64_t)];
  store_little_endian(namespace_id, bytes);
  sha.update(bytes, sizeof namespace_id);
  for (int64_t i = 0; i < num_tokens; i += kTokensAtOnce) {
    const int64_t count = num_tokens - i < kTokensAtOnce ? num_tokens - i : kTokensAtOnce;
    for (int64_t j = 0; j < count; ++j) store_little_endian(tokens[i + j], bytes + sizeof(int64_t) * j);
    sha.update(bytes, sizeof(int64_t) * static_cast<size_t>(count));
  }
  sha.finish(hash.data());
  return hash;
}

}  // namespace pkv
