// The rows of tokens as a snapshot holds them, whatever block and order they stand in:
//   K and V:  [layer][K | V][token][head][dim], of the cache's dtype
//   scales:   [layer][K | V][token][head], float32, with scales per token and head
// as little-endian bits. A block is its bytes on the host.
#pragma once

#include "cache/layout.h"

namespace pkv {

// Of one token, scales included.
uint64_t snapshot_row_bytes(const Layout &layout);

// The first count tokens of a block, to out [count * snapshot_row_bytes].
void pack_rows(const Layout &layout, const char *block, int64_t count, char *out);

// Rows first, first + 1, ... of num_rows packed ones, to the count slots of a block from `offset` on.
void unpack_rows(const Layout &layout, const char *rows, int64_t num_rows, int64_t first, int64_t count, char *block,
                 int64_t offset);

}  // namespace pkv
