// Hits inside a block: of a prompt whose next full block is not cached, the cached one that starts with the same tokens
// is taken as its last block, and copied by the first write into it.
#include <algorithm>

#include "cache/cache.h"

namespace pkv {

// Looks for a block that goes on behind the full blocks in matched_. One token is always left to compute.
void Cache::match_partial(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens, OpenItem *item) const {
  item->partial_block = kNoBlock;
  item->partial_tokens = 0;
  if (partial_index_ == nullptr) return;
  const int64_t block_size = layout_.block_size();
  const int64_t index = sequence.length / block_size + item->num_hit;
  const int64_t start = index * block_size, most = std::min(num_tokens - 1 - start, block_size - 1);
  if (most <= 0) return;
  const Hash128 previous = matched_.empty() ? previous_hash(sequence, index) : blocks_.record(matched_.back()).hash;
  const Hash128 parent = chain_hash(sequence.chain, index, previous);
  const int32_t block = partial_index_->find(parent, tokens[start]);
  if (block == kNoBlock) return;
  // The entry may be of another parent, or stale.
  const BlockRecord &record = blocks_.record(block);
  if (!record.is_registered || record.is_stale || record.parent != parent) return;
  const int64_t *row = blocks_.tokens(block);
  int64_t count = 0;
  while (count < most && row[count] == tokens[start + count]) ++count;
  if (count == 0) return;
  item->partial_block = block;
  item->partial_tokens = count;
}

// Gives back the block that a lookup before the first append took in part.
void Cache::drop_partial(Sequence *sequence) {
  const int64_t block_size = layout_.block_size();
  int32_t *table = sequence->table.data();
  const int64_t index = sequence->length / block_size, dropped = sequence->length % block_size;
  blocks_.release(table + index, 1, sequence->level);
  std::copy(table + index + 1, table + sequence->num_blocks, table + index);  // reserved blocks
  --sequence->num_blocks;
  sequence->length -= dropped;
  sequence->settled_length = sequence->num_cached_tokens = sequence->step_start = sequence->length;
  sequence->borrows_last = false;
  ++sequence->table_version;
  hit_tokens_ -= dropped;
  blocks_.namespaces().change(sequence->chain.first.index).hit_tokens -= dropped;
  partial_hit_tokens_ -= dropped;
}

// Whether a write into this block of the sequence must copy it although nobody else may hold it.
bool Cache::is_borrowed(const Sequence &sequence, int64_t block_index) const {
  return sequence.borrows_last && block_index == block_math_.index_of(sequence.length) &&
         blocks_.record(sequence.table[block_index]).is_hashed;
}

}  // namespace pkv
