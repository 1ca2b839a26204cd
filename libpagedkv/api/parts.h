// A cache whose sequences are shared out over several devices: one handle over a cache for each, its parts. Their sequences
// have ids that tell the part, so a call about one sequence goes to the cache that has it; calls for many are cut by
// device, and made on none before all have checked them.
#pragma once

#include <vector>

#include "api/abi.h"

namespace pkv {

constexpr int kPartShift = 26;  // of an id's index: the part stands above

inline size_t part_of(size_t num_parts, pkv_sequence id) {
  const size_t index = static_cast<uint32_t>(id) >> kPartShift;
  return index < num_parts ? index : 0;  // of no part: it is not found in any
}
inline size_t part_of(const pkv_cache *cache, pkv_sequence id) { return part_of(cache->parts.size(), id); }

// The cache that has the sequence.
inline Cache &owner_of(const pkv_cache *cache, pkv_sequence id) {
  return cache->parts.empty() ? *cache->cache : *cache->parts[part_of(cache, id)]->cache;
}

// Of an array with a stream of each device, that of a part.
inline pkv_stream stream_of_part(pkv_stream stream, size_t part) {
  if (stream == nullptr || stream == PKV_STREAM_OF_SEQUENCE) return stream;
  return static_cast<const pkv_stream *>(stream)[part];
}

// Makes the caller's stream one of the cache that has the sequence.
inline Status adopt_stream(const pkv_cache *cache, pkv_sequence id, pkv_stream *stream) {
  if (cache->parts.empty()) return cache->cache->adopt_stream(stream);
  *stream = stream_of_part(*stream, part_of(cache, id));
  return PKV_OK;
}

// UNSUPPORTED where sequences are shared out: the call is for one of the parts.
Status check_whole(const pkv_cache *cache, const char *call);
// INVALID_ARGUMENT where there is no such part.
Status check_part_index(size_t num_parts, int32_t device_index);

// The part that a new sequence goes to. options: as read.
Status choose_part(const pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options,
                   size_t *out);
size_t find_emptiest_part(const pkv_cache *cache);

// The calls for many of a cache with parts; arguments checked for NULL.
Status open_in_parts(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const int64_t *counts,
                     int64_t num_sequences, const pkv_open_options *options, pkv_sequence *out,
                     int64_t *out_num_cached);
Status fork_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths, int64_t num_sequences,
                     pkv_sequence *out);
Status commit_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *counts, int64_t num_sequences,
                       const int64_t *tokens, int64_t num_tokens);
Status truncate_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths, int64_t num_sequences);
Status close_in_parts(pkv_cache *cache, const pkv_sequence *sequences, int64_t num_sequences, pkv_stream stream);
Status reorder_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *sources, int64_t num_sequences);
Status accept_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *num_drafts,
                       const int64_t *num_kept, int64_t num_sequences, const int64_t *kept, int64_t num_kept_tokens,
                       pkv_stream stream);

Status prepare_parts(pkv_batch *batch, const pkv_sequence *sequences, const int64_t *counts, int64_t num_sequences,
                     const int64_t *tokens, int64_t num_tokens, const PrepareOptions &options);
Status discard_parts(pkv_batch *batch);
Status get_advanced_of_parts(const pkv_batch *batch, int64_t num_sequences, pkv_stream stream, int64_t *out_counts,
                             int64_t *out_num_refused);
Status settle_parts(pkv_batch *batch, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                    int64_t num_tokens);

// Sums over the parts; what names memory is the first one's.
void sum_stats(const pkv_cache *cache, pkv_cache_stats *out);
void sum_batch_info(const pkv_batch *batch, pkv_batch_info *out);

// What a device index of a cache, and of a batch of it, means: a part and a device of it, or nothing but the device.
struct Place {
  const Cache *cache;
  const Batch *batch;
  int32_t device_index;
};
Status find_place(const pkv_cache *cache, const pkv_batch *batch, int32_t device_index, Place *out);

}  // namespace pkv
