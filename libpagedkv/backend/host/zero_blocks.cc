#include "backend/host/zero_blocks.h"

#include <algorithm>
#include <cstring>

#include "backend/host/host.h"
#include "backend/host/thread_pool.h"

namespace pkv {
namespace {

constexpr uint64_t kPieceBytes = 256 * 1024;  // work for one thread at a time

}  // namespace

void zero_host_blocks(const ZeroBlocksParams &params) {
  const int64_t pieces_per_block = static_cast<int64_t>((params.block_bytes + kPieceBytes - 1) / kPieceBytes);
  auto zero_piece = [&](int64_t index, int32_t) {
    const uint64_t offset = static_cast<uint64_t>(index % pieces_per_block) * kPieceBytes;
    char *block = static_cast<char *>(params.base) +
                  static_cast<uint64_t>(params.blocks[index / pieces_per_block]) * params.block_bytes;
    std::memset(block + offset, 0, std::min(kPieceBytes, params.block_bytes - offset));
  };
  const bool is_small = params.block_bytes * static_cast<uint64_t>(params.count) <= 2 * kPieceBytes;
  run_parallel(params.count * pieces_per_block, is_small ? 1 : host_num_threads(), zero_piece);
}

}  // namespace pkv
