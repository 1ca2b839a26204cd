// Hits inside a block: of a prompt whose next full block is not cached, the cached one that starts with the same tokens
// is taken as its last block, and copied by the first write into it.
#include <algorithm>

#include "cache/cache.h"

namespace pkv {
namespace {

constexpr int kMostCandidates = 8;  // that a lookup compares

}  // namespace

// Looks for a block that goes on behind the full blocks in matched_.
void Cache::match_partial(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens, OpenItem *item) const {
  const int64_t index = block_math_.index_of(sequence.length) + item->num_hit;
  const Hash128 previous = matched_.empty() ? previous_hash(sequence, index) : blocks_.record(matched_.back()).hash;
  item->partial_tokens = find_partial(sequence.chain, previous, index, tokens, num_tokens, &item->partial_block);
}

// The cached block for table entry `index`, behind a block of hash `previous`, that shares most of its first tokens with
// the prompt, or kNoBlock; how many they are. One token is always left to compute.
int64_t Cache::find_partial(const Chain &chain, const Hash128 &previous, int64_t index, const int64_t *tokens,
                            int64_t num_tokens, int32_t *out_block) const {
  *out_block = kNoBlock;
  if (partial_index_ == nullptr) return 0;
  const int64_t block_size = layout_.block_size();
  const int64_t start = index * block_size, most = std::min(num_tokens - 1 - start, block_size - 1);
  if (most <= 0) return 0;
  const Hash128 parent = chain_hash(chain, index, previous);
  int64_t num_shared = 0;
  int32_t block = partial_index_->first(parent, tokens[start]);
  for (int i = 0; i < kMostCandidates && block != kNoBlock; ++i, block = partial_index_->next(block)) {
    // It may be of another parent, or stale.
    const BlockRecord &record = blocks_.record(block);
    if (!record.is_registered || record.is_stale || record.parent != parent) continue;
    const int64_t *row = blocks_.tokens(block);
    int64_t count = 0;
    while (count < most && row[count] == tokens[start + count]) ++count;
    if (count <= num_shared) continue;
    *out_block = block;
    num_shared = count;
  }
  return num_shared;
}

// Gives back the block that a lookup before the first append took in part.
void Cache::drop_partial(Sequence *sequence) {
  const int64_t block_size = layout_.block_size();
  int32_t *table = sequence->table.data();
  const int64_t index = sequence->length / block_size, dropped = sequence->length % block_size;
  release_used(*sequence, table + index, 1);
  std::copy(table + index + 1, table + sequence->num_blocks, table + index);  // reserved blocks
  --sequence->num_blocks;
  sequence->length -= dropped;
  sequence->settled_length = sequence->num_cached_tokens = sequence->step_start = sequence->length;
  sequence->borrows_last = false;
  ++sequence->table_version;
}

// Whether a write into this block of the sequence must copy it although nobody else may hold it.
bool Cache::is_borrowed(const Sequence &sequence, int64_t block_index) const {
  return sequence.borrows_last && block_index == block_math_.index_of(sequence.length) &&
         blocks_.record(sequence.table[block_index]).is_hashed;
}

}  // namespace pkv
