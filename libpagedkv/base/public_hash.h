// The public block hash: what routers and other processes name a block by. docs/block-hash.md specifies it byte by
// byte.
#pragma once

#include <array>
#include <cstdint>

#include "base/sha256.h"

namespace pkv {

using PublicHash = std::array<uint8_t, kSha256Bytes>;

// parent: null for a first block. tokens: [num_tokens].
PublicHash hash_block(const PublicHash *parent, uint64_t namespace_id, const int64_t *tokens, int64_t num_tokens);

}  // namespace pkv
