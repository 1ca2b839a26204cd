// Settling: tokens that are known and certain, and the hashes of the blocks that they complete.
#include <algorithm>
#include <cassert>

#include "cache/cache.h"

namespace pkv {

// Moves settled_length over the known tokens behind it and gives the blocks that it completes their hash. Those among
// them that hold tokens from position `first_new` on are added to hashed_blocks, if it is given.
void Cache::settle(Sequence *sequence, int64_t first_new, HashedBlocks *hashed_blocks) {
  const int32_t block_size = layout_.block_size();
  int64_t position = sequence->settled_length;
  while (position < sequence->length) {
    const int64_t *row = blocks_.tokens(sequence->table[position / block_size]);
    const int64_t start = position - position % block_size;
    const int64_t end = std::min<int64_t>(start + block_size, sequence->length);
    while (position < end && row[position - start] >= 0) ++position;
    if (position < end) break;
  }
  settle_to(sequence, position, first_new, hashed_blocks);
}

// The same where the tokens below `position` are known to be settled.
void Cache::settle_to(Sequence *sequence, int64_t position, int64_t first_new,
                      HashedBlocks *hashed_blocks) {
  const int64_t first = block_math_.index_of(sequence->settled_length);
  const int64_t end = block_math_.index_of(std::min(position, sequence->exact_length));
  sequence->settled_length = position;
  if (!prefix_caching_ || first >= end) return;
  assert(num_put_off_ == 0);  // they are in the run that this takes
  const int32_t *table = sequence->table.data();
  const Chain &chain = sequence->chain;
  const int64_t first_reported = hashed_blocks == nullptr ? end : block_math_.index_of(first_new);
  // A run of blocks to register. (Hash128 clears itself: arrays of it here would be cleared at each call.)
  SettledRun *run = &settled_runs_[0];
  int32_t *blocks = run->blocks;
  Hash128 *parents = run->parents, *hashes = run->hashes + 1;
  // Word by word: a hash that was just stored in halves and is loaded whole waits for the store.
  const Hash128 previous = previous_hash(*sequence, first);
  uint64_t low = previous.low, high = previous.high;
  for (int64_t i = first; i < end;) {
    // An event names its block's parent, which is told by the block named last.
    const int64_t run_end = std::min(end, events_ != nullptr ? i + 1 : i + kSettledRun);
    const bool was_stale = is_stale(chain, i);
    int64_t count = 0, num_unreported = 0;
    for (; i < run_end; ++i) {
      const int32_t block = table[i];
      const BlockRecord &record = blocks_.record(block);
      if (i > 0) blocks_.set_child(table[i - 1], block);
      const Hash128 parent = chain_hash(chain, i, {low, high});
      if (record.is_hashed) {  // a fork that shares the block has settled it already; its hash is the same
        low = record.hash.low;
        high = record.hash.high;
        continue;
      }
      if (!chain.regions.empty() && is_stale(chain, i) != was_stale) break;  // starts a run of its own
      if (events_ != nullptr) name_block(chain, table, i);
      const Hash128 hash = hasher_.extend(parent, blocks_.tokens(block));
      low = hash.low;
      high = hash.high;
      blocks_.prefetch_hash({low, high});
      blocks[count] = block;
      parents[count].low = parent.low;
      parents[count].high = parent.high;
      hashes[count].low = low;
      hashes[count++].high = high;
      num_unreported += i < first_reported;
    }
    blocks_.set_hashes(blocks, parents, hashes, count, was_stale);
    if (streams_.is_several()) streams_.note_written(blocks, count, sequence->stream_slot);
    if (partial_index_ != nullptr) {
      for (int64_t j = 0; j < count; ++j) note_registered(blocks[j], parents[j]);
    }
    if (num_unreported < count) {
      hashed_blocks->append(blocks + num_unreported, hashes + num_unreported, count - num_unreported);
    }
  }
}

// What a prompt mostly is: blocks [first, end) of a sequence, all taken by this step, whose tokens ([end - first,
// block_size]) are known. They are written, hashed and registered in one pass, run by run: a run is registered when the
// next one is hashed, so that its lines of the index are there by then.
void Cache::settle_new_blocks(Sequence *sequence, int64_t first, int64_t end, const int64_t *tokens, Step *step) {
  const int32_t block_size = layout_.block_size();
  const int32_t *table = sequence->table.data();
  const bool was_stale = is_stale(sequence->chain, first);
  const Hash128 parent = chain_hash(sequence->chain, first, previous_hash(*sequence, first));
  uint64_t low = parent.low, high = parent.high;
  const bool has_rows_ahead = !hasher_.streams_rows();
  const auto register_run = [&](const SettledRun &run, int64_t begin, int64_t count) {
    blocks_.register_new(begin == 0 ? kNoBlock : table[begin - 1], table + begin, run.hashes, count, was_stale);
    if (streams_.is_several()) streams_.note_written(table + begin, count, sequence->stream_slot);
    step->hashed_blocks.append(table + begin, run.hashes + 1, count);
    if (partial_index_ == nullptr) return;
    for (int64_t j = 0; j < count; ++j) note_registered(table[begin + j], run.hashes[j]);
  };
  SettledRun *run = &settled_runs_[0], *hashed_run = &settled_runs_[1];
  int64_t num_hashed = 0;  // blocks of hashed_run, just before block i
  uint64_t inherited = BlockHasher::inherited_bits(parent);
  for (int64_t i = first; i < end;) {
    const int64_t count = std::min(end - i, kSettledRun);
    const int32_t *blocks = table + i;
    hasher_.digest_and_store(tokens, blocks, count, blocks_.tokens(0), run->digests);
    // Word by word: a hash that was just stored in halves and is loaded whole waits for the store.
    run->hashes[0].low = low;
    run->hashes[0].high = high;
    for (int64_t j = 0; j < count; ++j) {
      if (i + j + kSettledRun < end) blocks_.prefetch_block(blocks[j + kSettledRun], has_rows_ahead);
      const Hash128 hash = hasher_.chain({low, high}, run->digests[j], inherited);
      inherited ^= BlockHasher::kPairBits;
      run->hashes[j + 1].low = low = hash.low;
      run->hashes[j + 1].high = high = hash.high;
      blocks_.prefetch_hash({low, high});
    }
    if (num_hashed > 0) register_run(*hashed_run, i - num_hashed, num_hashed);
    std::swap(run, hashed_run);
    num_hashed = count;
    tokens += count * block_size;
    i += count;
  }
  register_run(*hashed_run, end - num_hashed, num_hashed);
  if (streams_.is_several()) streams_.note_written(table + first, end - first, sequence->stream_slot);
  hasher_.finish_stores();
  sequence->settled_length = end * block_size;
}

bool Cache::can_put_off(const Sequence &sequence) const {
  return window_ == 0 && partial_index_ == nullptr && !streams_.is_several() && !is_stale(sequence.chain, 0);
}

void Cache::put_off(Sequence *sequence, int64_t block_index, Step *step) {
  const int32_t *table = sequence->table.data();
  const int32_t block = table[block_index];
  const Hash128 parent = chain_hash(sequence->chain, block_index, previous_hash(*sequence, block_index));
  const Hash128 hash = hasher_.extend(parent, blocks_.tokens(block));
  blocks_.prefetch_hash(hash);
  if (block_index > 0) blocks_.set_child(table[block_index - 1], block);
  if (num_put_off_ == kSettledRun) register_put_off(step);
  SettledRun *run = &settled_runs_[0];
  run->blocks[num_put_off_] = block;
  run->parents[num_put_off_] = parent;
  run->hashes[++num_put_off_] = hash;
  sequence->settled_length = sequence->length;
}

void Cache::register_put_off(Step *step) {
  if (num_put_off_ == 0) return;
  const SettledRun &run = settled_runs_[0];
  blocks_.set_hashes(run.blocks, run.parents, run.hashes + 1, num_put_off_, false);
  step->hashed_blocks.append(run.blocks, run.hashes + 1, num_put_off_);
  num_put_off_ = 0;
}

}  // namespace pkv
