#include "api/parts.h"

#include <cinttypes>
#include <string>

#include "api/traced.h"
#include "base/checked.h"

namespace pkv {
namespace {

// What a call for many has for one part. places: of its sequences in the call.
struct Group {
  std::vector<pkv_sequence> ids;
  std::vector<int64_t> places;
  std::vector<int64_t> numbers, more_numbers;  // one of each sequence
  std::vector<int64_t> flat;                   // tokens or the like, of each sequence some
};

std::vector<Group> split(size_t num_parts, const pkv_sequence *ids, int64_t num_sequences) {
  std::vector<Group> groups(num_parts);
  for (int64_t i = 0; i < num_sequences; ++i) {
    Group &group = groups[part_of(num_parts, ids[i])];
    group.ids.push_back(ids[i]);
    group.places.push_back(i);
  }
  return groups;
}

int64_t size_of(const Group &group) { return static_cast<int64_t>(group.ids.size()); }

// The last failure, of what a part was asked for, as one of the whole call.
Status name_part(Status status, const Cache &part, const Group &group) {
  const char *device = part.backend()->device();
  const std::string text = last_error();
  if (status != PKV_OUT_OF_BLOCKS && status != PKV_NEVER_FITS) {
    return fail(status, "%s (counting the sequences on %s alone)", text.c_str(), device);
  }
  pkv_shortage shortage = {};
  get_last_shortage(&shortage);
  if (shortage.index >= 0 && shortage.index < size_of(group)) {
    shortage.index = group.places[static_cast<size_t>(shortage.index)];
  }
  return fail_shortage(status, shortage.needed, shortage.available, shortage.index,
                       "%s (counting the sequences on %s alone)", text.c_str(), device);
}

// call(part, group, extent) of each part that has sequences in the call: first the checks of all.
template <class Call>
Status call_parts(pkv_cache *cache, std::vector<Group> &groups, Call call) {
  size_t num_used = 0;
  for (const Group &group : groups) num_used += !group.ids.empty();
  for (const Extent extent : {Extent::kChecks, Extent::kAll}) {
    if (extent == Extent::kChecks && num_used <= 1) continue;
    for (size_t i = 0; i < groups.size(); ++i) {
      if (groups[i].ids.empty()) continue;
      const Status status = call(i, groups[i], extent);
      if (status != PKV_OK) return name_part(status, *cache->parts[i]->cache, groups[i]);
    }
  }
  return PKV_OK;
}

// Gives the groups their numbers of an array with one for each sequence.
void give_numbers(const int64_t *numbers, std::vector<int64_t> Group::*member, std::vector<Group> *groups) {
  for (Group &group : *groups) {
    for (const int64_t place : group.places) (group.*member).push_back(numbers[place]);
  }
}

// And what is flat: counts[i] entries of the i-th sequence.
Status give_flat(const char *name, const int64_t *flat, int64_t num_flat, const int64_t *counts, int64_t num_sequences,
                 std::vector<Group> *groups) {
  std::vector<int64_t> starts(static_cast<size_t>(num_sequences) + 1, 0);
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (counts[i] < 0) return fail(PKV_INVALID_ARGUMENT, "%s[%" PRId64 "] is %" PRId64 ", negative", name, i, counts[i]);
    if (!checked_add(starts[i], counts[i], &starts[i + 1]) || starts[i + 1] > num_flat) {
      return fail(PKV_INVALID_ARGUMENT, "%s add up to more than the %" PRId64 " entries given", name, num_flat);
    }
  }
  if (starts.back() != num_flat) {
    return fail(PKV_INVALID_ARGUMENT, "%s add up to %" PRId64 ", but %" PRId64 " entries are given", name, starts.back(),
                num_flat);
  }
  for (Group &group : *groups) {
    for (const int64_t place : group.places) {
      group.flat.insert(group.flat.end(), flat + starts[place], flat + starts[place + 1]);
    }
  }
  return PKV_OK;
}

Status check_count(int64_t num_sequences) {
  if (num_sequences >= 0) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "num_sequences is %" PRId64 ", negative", num_sequences);
}

}  // namespace

Status check_whole(const pkv_cache *cache, const char *call) {
  if (cache->parts.empty()) return PKV_OK;
  return fail(PKV_UNSUPPORTED, "%s: the cache's sequences are shared out over %zu devices; ask the part of one of them",
              call, cache->parts.size());
}

Status check_part_index(size_t num_parts, int32_t device_index) {
  if (device_index >= 0 && static_cast<size_t>(device_index) < num_parts) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "device_index is %d, but the cache has %zu devices", device_index, num_parts);
}

size_t find_emptiest_part(const pkv_cache *cache) {
  size_t best = 0;
  for (size_t i = 1; i < cache->parts.size(); ++i) {
    const Cache &part = *cache->parts[i]->cache, &other = *cache->parts[best]->cache;
    if (part.num_available() > other.num_available() ||
        (part.num_available() == other.num_available() && part.num_open() < other.num_open())) {
      best = i;
    }
  }
  return best;
}

namespace {

// What an open goes by. In a call for many, pending counts what the sequences before it will need.
struct Pending {
  int64_t blocks = 0, sequences = 0;
};

Status choose(const pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options,
              const std::vector<Pending> *pending, size_t *out, int64_t *out_hit) {
  int64_t best_hit = -1, best_free = 0, best_open = 0;
  for (size_t i = 0; i < cache->parts.size(); ++i) {
    const Cache &part = *cache->parts[i]->cache;
    int64_t hit = 0;
    PKV_TRY(part.probe(tokens, num_tokens, options, &hit));
    const int64_t num_free = part.num_available() - (pending == nullptr ? 0 : (*pending)[i].blocks);
    const int64_t num_open = part.num_open() + (pending == nullptr ? 0 : (*pending)[i].sequences);
    if (hit < best_hit || (hit == best_hit && num_free < best_free) ||
        (hit == best_hit && num_free == best_free && num_open >= best_open)) {
      continue;
    }
    *out = i;
    *out_hit = best_hit = hit;
    best_free = num_free;
    best_open = num_open;
  }
  return PKV_OK;
}

}  // namespace

Status choose_part(const pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options,
                   size_t *out) {
  int64_t hit = 0;
  return choose(cache, tokens, num_tokens, options, nullptr, out, &hit);
}

Status open_in_parts(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const int64_t *counts,
                     int64_t num_sequences, const pkv_open_options *options, pkv_sequence *out,
                     int64_t *out_num_cached) {
  PKV_TRY(check_count(num_sequences));
  const size_t num_parts = cache->parts.size();
  const int32_t block_size = cache->cache->layout().block_size();
  std::vector<Group> groups(num_parts);
  std::vector<std::vector<pkv_open_options>> options_of(num_parts);
  std::vector<Pending> pending(num_parts);
  int64_t start = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (counts[i] < 0 || counts[i] > num_tokens - start) {
      return fail(PKV_INVALID_ARGUMENT, "counts[%" PRId64 "] is %" PRId64 ", but %" PRId64 " tokens are left", i,
                  counts[i], num_tokens - start);
    }
    const pkv_open_options given = options == nullptr ? pkv_open_options{} : options[i];
    size_t part = 0;
    int64_t hit = 0;
    if (const Status status = choose(cache, tokens + start, counts[i], given, &pending, &part, &hit); status != PKV_OK) {
      return fail(status, "sequences[%" PRId64 "]: %s", i, last_error());
    }
    pending[part].blocks += divide_up(counts[i], block_size) - hit / block_size;
    ++pending[part].sequences;
    Group &group = groups[part];
    group.ids.push_back(0);
    group.places.push_back(i);
    group.numbers.push_back(counts[i]);
    group.more_numbers.push_back(0);  // tokens that were cached
    group.flat.insert(group.flat.end(), tokens + start, tokens + start + counts[i]);
    options_of[part].push_back(given);
    start += counts[i];
  }
  if (start != num_tokens) {
    return fail(PKV_INVALID_ARGUMENT, "counts add up to %" PRId64 ", but num_tokens is %" PRId64, start, num_tokens);
  }
  std::vector<size_t> opened;  // parts
  opened.reserve(num_parts);
  const auto close_opened = [&] {
    for (const size_t i : opened) cache->parts[i]->cache->close_many(groups[i].ids.data(), size_of(groups[i]), nullptr);
  };
  Status status = PKV_OK;
  try {
    status = call_parts(cache, groups, [&](size_t i, Group &group, Extent extent) {
      Cache &part = *cache->parts[i]->cache;
      const int64_t num_flat = static_cast<int64_t>(group.flat.size()), count = size_of(group);
      const Status result = part.open_many(group.flat.data(), num_flat, group.numbers.data(), count,
                                           options_of[i].data(), group.ids.data(), group.more_numbers.data(), extent);
      if (extent == Extent::kChecks) return result;
      if (result == PKV_OK) opened.push_back(i);
      return traced(part, TraceCall::kOpenMany, result, array_of(group.flat.data(), num_flat),
                    array_of(group.numbers.data(), count), array_of(options_of[i].data(), count),
                    result_of(array_of(group.ids.data(), count)), result_of(array_of(group.more_numbers.data(), count)));
    });
  } catch (...) {
    close_opened();
    throw;
  }
  if (status != PKV_OK) {
    close_opened();
    return status;
  }
  for (const Group &group : groups) {
    for (size_t j = 0; j < group.places.size(); ++j) {
      out[group.places[j]] = group.ids[j];
      if (out_num_cached != nullptr) out_num_cached[group.places[j]] = group.more_numbers[j];
    }
  }
  return PKV_OK;
}

Status fork_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths, int64_t num_sequences,
                     pkv_sequence *out) {
  PKV_TRY(check_count(num_sequences));
  std::vector<Group> groups = split(cache->parts.size(), sequences, num_sequences);
  if (lengths != nullptr) give_numbers(lengths, &Group::numbers, &groups);
  std::vector<std::vector<pkv_sequence>> forks(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) forks[i].resize(groups[i].ids.size());
  PKV_TRY(call_parts(cache, groups, [&](size_t i, Group &group, Extent extent) {
    Cache &part = *cache->parts[i]->cache;
    const int64_t *own_lengths = lengths == nullptr ? nullptr : group.numbers.data();
    const Status status = part.fork_many(group.ids.data(), own_lengths, size_of(group), forks[i].data(), extent);
    if (extent == Extent::kChecks) return status;
    return traced(part, TraceCall::kForkMany, status, array_of(group.ids.data(), size_of(group)),
                  array_of(own_lengths, size_of(group)), result_of(array_of(forks[i].data(), size_of(group))));
  }));
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < forks[i].size(); ++j) out[groups[i].places[j]] = forks[i][j];
  }
  return PKV_OK;
}

Status commit_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *counts, int64_t num_sequences,
                       const int64_t *tokens, int64_t num_tokens) {
  PKV_TRY(check_count(num_sequences));
  std::vector<Group> groups = split(cache->parts.size(), sequences, num_sequences);
  give_numbers(counts, &Group::numbers, &groups);
  PKV_TRY(give_flat("counts", tokens, num_tokens, counts, num_sequences, &groups));
  return call_parts(cache, groups, [&](size_t i, Group &group, Extent extent) {
    Cache &part = *cache->parts[i]->cache;
    const int64_t num_flat = static_cast<int64_t>(group.flat.size());
    const Status status =
        part.commit_many(group.ids.data(), group.numbers.data(), size_of(group), group.flat.data(), num_flat, extent);
    if (extent == Extent::kChecks) return status;
    return traced(part, TraceCall::kCommitMany, status, array_of(group.ids.data(), size_of(group)),
                  array_of(group.numbers.data(), size_of(group)), array_of(group.flat.data(), num_flat));
  });
}

Status truncate_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths,
                         int64_t num_sequences) {
  PKV_TRY(check_count(num_sequences));
  std::vector<Group> groups = split(cache->parts.size(), sequences, num_sequences);
  give_numbers(lengths, &Group::numbers, &groups);
  return call_parts(cache, groups, [&](size_t i, Group &group, Extent extent) {
    Cache &part = *cache->parts[i]->cache;
    const Status status = part.truncate_many(group.ids.data(), group.numbers.data(), size_of(group), extent);
    if (extent == Extent::kChecks) return status;
    return traced(part, TraceCall::kTruncateMany, status, array_of(group.ids.data(), size_of(group)),
                  array_of(group.numbers.data(), size_of(group)));
  });
}

Status close_in_parts(pkv_cache *cache, const pkv_sequence *sequences, int64_t num_sequences, pkv_stream stream) {
  PKV_TRY(check_count(num_sequences));
  std::vector<Group> groups = split(cache->parts.size(), sequences, num_sequences);
  return call_parts(cache, groups, [&](size_t i, Group &group, Extent extent) {
    Cache &part = *cache->parts[i]->cache;
    const Status status = part.close_many(group.ids.data(), size_of(group), stream_of_part(stream, i), extent);
    if (extent == Extent::kChecks) return status;
    return traced(part, TraceCall::kCloseMany, status, array_of(group.ids.data(), size_of(group)));
  });
}

Status reorder_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *sources,
                        int64_t num_sequences) {
  PKV_TRY(check_count(num_sequences));
  std::vector<Group> groups = split(cache->parts.size(), sequences, num_sequences);
  std::vector<int64_t> places_there(static_cast<size_t>(num_sequences));
  for (const Group &group : groups) {
    for (size_t j = 0; j < group.places.size(); ++j) places_there[group.places[j]] = static_cast<int64_t>(j);
  }
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (sources[i] < 0 || sources[i] >= num_sequences) {
      return fail(PKV_INVALID_ARGUMENT, "sources[%" PRId64 "] is %" PRId64 ", not in 0 to %" PRId64, i, sources[i],
                  num_sequences - 1);
    }
    const size_t part = part_of(cache, sequences[i]);
    if (part_of(cache, sequences[sources[i]]) != part) {
      return fail(PKV_UNSUPPORTED, "sources[%" PRId64 "] is %" PRId64 ", which is on another device", i, sources[i]);
    }
    groups[part].numbers.push_back(places_there[sources[i]]);
  }
  return call_parts(cache, groups, [&](size_t i, Group &group, Extent extent) {
    Cache &part = *cache->parts[i]->cache;
    const Status status = part.reorder(group.ids.data(), group.numbers.data(), size_of(group), extent);
    if (extent == Extent::kChecks) return status;
    return traced(part, TraceCall::kReorder, status, array_of(group.ids.data(), size_of(group)),
                  array_of(group.numbers.data(), size_of(group)));
  });
}

Status accept_in_parts(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *num_drafts,
                       const int64_t *num_kept, int64_t num_sequences, const int64_t *kept, int64_t num_kept_tokens,
                       pkv_stream stream) {
  PKV_TRY(check_count(num_sequences));
  std::vector<Group> groups = split(cache->parts.size(), sequences, num_sequences);
  give_numbers(num_drafts, &Group::numbers, &groups);
  give_numbers(num_kept, &Group::more_numbers, &groups);
  PKV_TRY(give_flat("num_kept", kept, num_kept_tokens, num_kept, num_sequences, &groups));
  return call_parts(cache, groups, [&](size_t i, Group &group, Extent extent) {
    Cache &part = *cache->parts[i]->cache;
    const int64_t num_flat = static_cast<int64_t>(group.flat.size());
    const Status status = part.accept(group.ids.data(), group.numbers.data(), group.more_numbers.data(), size_of(group),
                                      group.flat.data(), num_flat, stream_of_part(stream, i), extent);
    if (extent == Extent::kChecks) return status;
    return traced(part, TraceCall::kAccept, status, array_of(group.ids.data(), size_of(group)),
                  array_of(group.numbers.data(), size_of(group)), array_of(group.more_numbers.data(), size_of(group)),
                  array_of(group.flat.data(), num_flat));
  });
}

// Every part has a step, also of no sequences: tables that are read are those of this prepare.
Status prepare_parts(pkv_batch *batch, const pkv_sequence *sequences, const int64_t *counts, int64_t num_sequences,
                     const int64_t *tokens, int64_t num_tokens, const PrepareOptions &options) {
  PKV_TRY(check_count(num_sequences));
  std::vector<Group> groups = split(batch->parts.size(), sequences, num_sequences);
  give_numbers(counts, &Group::numbers, &groups);
  std::vector<std::vector<int64_t>> token_places(groups.size());
  int64_t total = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (counts[i] < 0) return fail(PKV_INVALID_ARGUMENT, "counts[%" PRId64 "] is %" PRId64 ", negative", i, counts[i]);
    if (counts[i] > batch->options.max_tokens) {
      return fail(PKV_INVALID_ARGUMENT, "counts[%" PRId64 "] is %" PRId64 ": more than max_tokens, %" PRId64
                  ", in one step", i, counts[i], batch->options.max_tokens);
    }
    const size_t part = part_of(batch->parts.size(), sequences[i]);
    for (int64_t j = 0; j < counts[i]; ++j) token_places[part].push_back(total + j);
    total += counts[i];
  }
  if ((tokens != nullptr || num_tokens != 0) && num_tokens != total) {
    return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", but counts add up to %" PRId64, num_tokens, total);
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    Group &group = groups[i];
    if (tokens != nullptr) {
      for (const int64_t place : token_places[i]) group.flat.push_back(tokens[place]);
    }
    PrepareOptions own = options;
    own.stream = stream_of_part(options.stream, i);
    const Status status = batch->parts[i]->batch->plan(group.ids.data(), group.numbers.data(), size_of(group),
                                                       tokens == nullptr ? nullptr : group.flat.data(),
                                                       static_cast<int64_t>(group.flat.size()), own);
    if (status != PKV_OK) return name_part(status, *batch->parts[i]->cache, group);
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    Group &group = groups[i];
    pkv_batch &part = *batch->parts[i];
    const Status status = part.batch->apply(tokens == nullptr ? nullptr : group.flat.data());
    const auto ids = array_of(group.ids.data(), size_of(group));
    const auto own_counts = array_of(group.numbers.data(), size_of(group));
    const auto own_tokens = array_of(group.flat.data(), static_cast<int64_t>(group.flat.size()));
    if (options.steps_ahead != 0) {
      traced(part, TraceCall::kPrepareAhead, status, ids, own_counts, own_tokens, options.registers,
             options.pad_sequences, options.pad_tokens, options.max_query_len, options.steps_ahead);
    } else {
      traced(part, TraceCall::kPrepare, status, ids, own_counts, own_tokens, options.registers, options.pad_sequences,
             options.pad_tokens, options.max_query_len);
    }
    PKV_TRY(status);
    part.batch->set_places(group.places.data(), token_places[i].data());
  }
  return PKV_OK;
}

Status discard_parts(pkv_batch *batch) {
  for (const Extent extent : {Extent::kChecks, Extent::kAll}) {
    for (const auto &part : batch->parts) {
      const Status status = part->batch->discard(extent);
      if (extent == Extent::kAll) traced(*part, TraceCall::kDiscard, status);
      PKV_TRY(status);
    }
  }
  return PKV_OK;
}

namespace {

Status check_num_items(const pkv_batch *batch, int64_t num_sequences) {
  int64_t num_items = 0;
  for (const auto &part : batch->parts) num_items += part->batch->num_items();
  if (num_sequences == num_items) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "num_sequences is %" PRId64 ", but the step has %" PRId64 " sequences", num_sequences,
              num_items);
}

}  // namespace

Status get_advanced_of_parts(const pkv_batch *batch, int64_t num_sequences, pkv_stream stream, int64_t *out_counts,
                             int64_t *out_num_refused) {
  PKV_TRY(check_num_items(batch, num_sequences));
  std::vector<int64_t> counts;
  int64_t total_refused = 0;
  for (size_t i = 0; i < batch->parts.size(); ++i) {
    const Batch &part = *batch->parts[i]->batch;
    counts.resize(static_cast<size_t>(part.num_items()));
    int64_t num_refused = 0;
    PKV_TRY(part.get_advanced(part.num_items(), stream_of_part(stream, i), counts.data(), &num_refused));
    for (int64_t j = 0; j < part.num_items(); ++j) out_counts[part.sequence_place(j)] = counts[static_cast<size_t>(j)];
    total_refused += num_refused;
  }
  if (out_num_refused != nullptr) *out_num_refused = total_refused;
  return PKV_OK;
}

Status settle_parts(pkv_batch *batch, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                    int64_t num_tokens) {
  PKV_TRY(check_num_items(batch, num_sequences));
  std::vector<Group> groups(batch->parts.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const Batch &part = *batch->parts[i]->batch;
    for (int64_t j = 0; j < part.num_items(); ++j) groups[i].places.push_back(part.sequence_place(j));
  }
  give_numbers(counts, &Group::numbers, &groups);
  if (tokens != nullptr || num_tokens != 0) PKV_TRY(give_flat("counts", tokens, num_tokens, counts, num_sequences, &groups));
  for (const Extent extent : {Extent::kChecks, Extent::kAll}) {
    for (size_t i = 0; i < groups.size(); ++i) {
      const Group &group = groups[i];
      const int64_t count = static_cast<int64_t>(group.places.size()), num_flat = static_cast<int64_t>(group.flat.size());
      const int64_t *flat = tokens == nullptr ? nullptr : group.flat.data();
      pkv_batch &part = *batch->parts[i];
      const Status status = part.batch->settle(group.numbers.data(), count, flat, num_flat, extent);
      if (extent == Extent::kAll) {
        traced(part, TraceCall::kSettle, status, array_of(group.numbers.data(), count), array_of(flat, num_flat));
      }
      if (status != PKV_OK) return name_part(status, *part.cache, group);
    }
  }
  return PKV_OK;
}

void sum_stats(const pkv_cache *cache, pkv_cache_stats *out) {
  cache->parts[0]->cache->get_stats(out);
  for (size_t i = 1; i < cache->parts.size(); ++i) {
    pkv_cache_stats part = {};
    cache->parts[i]->cache->get_stats(&part);
    for (int64_t pkv_cache_stats::*member :
         {&pkv_cache_stats::num_blocks, &pkv_cache_stats::uncached_blocks, &pkv_cache_stats::cached_blocks,
          &pkv_cache_stats::held_blocks, &pkv_cache_stats::pending_blocks, &pkv_cache_stats::peak_held_blocks,
          &pkv_cache_stats::num_sequences, &pkv_cache_stats::queried_tokens, &pkv_cache_stats::hit_tokens,
          &pkv_cache_stats::appended_tokens, &pkv_cache_stats::registered, &pkv_cache_stats::evictions,
          &pkv_cache_stats::copies, &pkv_cache_stats::prepares, &pkv_cache_stats::refusals, &pkv_cache_stats::num_pins,
          &pkv_cache_stats::pinned_blocks, &pkv_cache_stats::num_namespaces, &pkv_cache_stats::partial_hit_tokens,
          &pkv_cache_stats::released_blocks, &pkv_cache_stats::num_transfers, &pkv_cache_stats::quarantined_blocks,
          &pkv_cache_stats::unused_slots, &pkv_cache_stats::free_tail_blocks, &pkv_cache_stats::max_num_blocks,
          &pkv_cache_stats::moved_blocks, &pkv_cache_stats::host_tier_blocks, &pkv_cache_stats::host_tier_resident,
          &pkv_cache_stats::host_hit_tokens, &pkv_cache_stats::disk_hit_tokens, &pkv_cache_stats::tier_misses,
          &pkv_cache_stats::offloaded_blocks, &pkv_cache_stats::restored_blocks, &pkv_cache_stats::skipped_offloads,
          &pkv_cache_stats::host_tier_evictions, &pkv_cache_stats::offloaded_sequences, &pkv_cache_stats::offload_rate,
          &pkv_cache_stats::restore_rate, &pkv_cache_stats::disk_tier_blocks, &pkv_cache_stats::disk_tier_resident,
          &pkv_cache_stats::disk_writes, &pkv_cache_stats::disk_reads, &pkv_cache_stats::disk_drops,
          &pkv_cache_stats::disk_damaged, &pkv_cache_stats::disk_write_rate, &pkv_cache_stats::disk_read_rate}) {
      out->*member += part.*member;
    }
    out->is_disk_tier_on &= part.is_disk_tier_on;  // of all
    out->is_failed |= part.is_failed;
    out->is_tracing |= part.is_tracing;
    for (uint64_t pkv_cache_stats::*member :
         {&pkv_cache_stats::num_events, &pkv_cache_stats::dropped_events, &pkv_cache_stats::copied_bytes,
          &pkv_cache_stats::uploaded_bytes, &pkv_cache_stats::saved_bytes, &pkv_cache_stats::loaded_bytes,
          &pkv_cache_stats::device_total_bytes, &pkv_cache_stats::device_free_bytes}) {
      out->*member += part.*member;
    }
    for (int j = 0; j < kNumReuseDistances; ++j) out->reuse_distance[j] += part.reuse_distance[j];
  }
}

// A member that is new has to be summed above.
static_assert(offsetof(pkv_cache_stats, moved_blocks) + sizeof(pkv_cache_stats::moved_blocks) == sizeof(pkv_cache_stats),
              "moved_blocks is the last member of pkv_cache_stats");

void sum_batch_info(const pkv_batch *batch, pkv_batch_info *out) {
  for (const auto &part : batch->parts) {
    pkv_batch_info info = {};
    part->batch->get_info(&info);
    out->num_sequences += info.num_sequences;
    out->num_tokens += info.num_tokens;
    out->max_query_len = std::max(out->max_query_len, info.max_query_len);
    out->max_seq_len = std::max(out->max_seq_len, info.max_seq_len);
    out->generation += info.generation;
    out->num_shared_prefixes += info.num_shared_prefixes;
  }
}

Status find_place(const pkv_cache *cache, const pkv_batch *batch, int32_t device_index, Place *out) {
  if (cache->parts.empty()) {
    *out = {cache->cache.get(), batch->batch.get(), device_index};
    return PKV_OK;
  }
  PKV_TRY(check_part_index(cache->parts.size(), device_index));
  const size_t part = static_cast<size_t>(device_index);
  *out = {cache->parts[part]->cache.get(), batch->parts[part]->batch.get(), 0};
  return PKV_OK;
}

}  // namespace pkv
