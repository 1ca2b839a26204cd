// Loading: a snapshot is read and checked as a whole, then what is not here yet is added.
#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <unordered_map>

#include "base/checked.h"
#include "cache/cache.h"
#include "cache/snapshot.h"

namespace pkv {

// Stored values mean something with their scales only; requantising them would lose.
Status Cache::check_scales(const Snapshot &snapshot) const {
  std::vector<float> own;
  PKV_TRY(read_scales(&own));
  const size_t num_heads = static_cast<size_t>(layout_.num_kv_heads());
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i] == snapshot.scales[i]) continue;
    return fail(PKV_UNSUPPORTED, "the snapshot has %s_scale %.9g for layer %zu, head %zu, but the cache has %.9g",
                i / num_heads % 2 == 0 ? "k" : "v", static_cast<double>(snapshot.scales[i]), i / (2 * num_heads),
                i % num_heads, static_cast<double>(own[i]));
  }
  return PKV_OK;
}

// num_total blocks in all, num_needed of them new, while num_protected cached ones must stay.
Status Cache::check_room(int64_t num_total, int64_t num_needed, int64_t num_protected) {
  const int64_t available = blocks_.num_available() - num_protected;
  if (num_total <= num_blocks() && num_needed <= available) return PKV_OK;
  ++refusals_;
  publish();
  if (num_total > num_blocks()) {
    return fail_shortage(PKV_NEVER_FITS, num_total, num_blocks(), 0,
                         "the snapshot takes %" PRId64 " blocks of a pool of %" PRId64, num_total, num_blocks());
  }
  return fail_shortage(PKV_OUT_OF_BLOCKS, num_needed, available, 0,
                       "the snapshot takes %" PRId64 " new blocks, %" PRId64 " are available", num_needed, available);
}

Status Cache::load_sequence(const pkv_snapshot_io &io, const pkv_open_options *options, pkv_stream stream,
                            pkv_sequence *out) {
  PKV_TRY(check_usable());
  PKV_TRY(check_snapshot_stream(stream));
  Snapshot snapshot;
  SnapshotSource source(io);
  PKV_TRY(read_snapshot(kSnapshotSequence, layout_, &source, &snapshot));
  PKV_TRY(check_scales(snapshot));
  std::vector<char> block_memory(layout_.block_bytes());
  part_.reserve(layout_.block_bytes());
  const auto fill = [&](const int32_t *blocks, int64_t first, int64_t count) -> Status {
    for (int64_t i = first; i < first + count; ++i) {
      const int64_t start = i * layout_.block_size();
      const int64_t num_rows = std::min<int64_t>(layout_.block_size(), snapshot.length - start);
      const int64_t last = (start + num_rows - 1) / snapshot.block_size;
      fill_block(snapshot, layout_, last, last, start, num_rows, block_memory.data());
      PKV_TRY(upload_block(blocks[i - first], block_memory));
    }
    return PKV_OK;
  };
  return restore_sequence(snapshot, options, stream, fill, out);
}

// Opens a sequence with the tokens of a snapshot. fill(blocks, first, count) gives table entries [first, first + count),
// now these blocks, their K and V.
Status Cache::restore_sequence(const Snapshot &snapshot, const pkv_open_options *options, pkv_stream stream,
                               const FillBlocks &fill, pkv_sequence *out) {
  pkv_open_options saved = {};
  if (options == nullptr) {
    saved.namespace_id = snapshot.namespace_id;
    saved.priority = snapshot.priority;
    saved.tag = snapshot.tag;
    saved.regions = snapshot.regions.data();
    saved.num_regions = static_cast<int64_t>(snapshot.regions.size());
    options = &saved;
  }
  PKV_TRY(make_records(1));
  pkv_sequence id = 0;
  Sequence *sequence = closed_record(0, &id);
  static_cast<History &>(*sequence) = History();
  expire();
  PKV_TRY(make_chain(*options, &sequence->chain));
  const int32_t block_size = layout_.block_size();
  const int64_t num_total = divide_up(snapshot.length, block_size);
  // Nothing is left to compute, so all full blocks may be hits.
  int64_t num_hit = 0;
  match_prefix(*sequence, snapshot.tokens.data(), snapshot.settled_length / block_size * block_size + 1, &num_hit);
  int64_t num_protected = 0;
  for (const int32_t block : matched_) num_protected += blocks_.is_cached(block);
  PKV_TRY(check_room(num_total, num_total - num_hit, num_protected));
  ensure_table(sequence, num_total);
  if (blocks_.namespaces().has_quotas()) {
    quota_evictions_.clear();
    // Cached ones will be held, as new ones are; but they are counted already.
    const Growth growth = {num_hit - num_protected, num_total, -1, kNoBlock};
    const Status status = plan_quota_growth(*sequence, growth, 0, &quota_evictions_);
    for (const int32_t block : matched_) {
      NamespaceRecord &owner = blocks_.namespaces()[blocks_.record(block).namespace_index];
      if (blocks_.is_cached(block) && owner.planned > 0) --owner.planned;
    }
    finish_quota_plan(&quota_evictions_);
    if (status != PKV_OK) publish();
    PKV_TRY(status);
  }
  StreamSlot slot = kNoStream;
  PKV_TRY(begin_stream(stream, &slot));
  PKV_TRY(wait(stream));
  sequence->priority = options->priority;
  acquire_level(sequence);

  closed_.pop_back();
  ++num_open_;
  sequence->is_open = true;
  sequence->tag = options->tag;
  set_stream(sequence, stream, slot);
  sequence->num_steps = 0;
  enter_records(*sequence);
  take_prefix(sequence, matched_.data(), {sequence, id, num_hit, kNoBlock, 0});
  sequence->has_appended = snapshot.length > 0;
  if (blocks_.namespaces().has_quotas()) evict_over_quota(quota_evictions_);
  blocks_.take(num_total - num_hit, sequence->table.data() + num_hit, kNoNamespace);
  for (int64_t i = num_hit; i < num_total; ++i) own_block(*sequence, i, sequence->table[i]);
  sequence->num_blocks = static_cast<int32_t>(num_total);
  sequence->length = sequence->step_start = snapshot.length;
  Status status = order_loaded(sequence->table.data() + num_hit, num_total - num_hit, slot, stream);
  for (int64_t i = num_hit; i < num_total && status == PKV_OK; ++i) {
    const int32_t block = sequence->table[i];
    const int64_t start = i * block_size, count = std::min<int64_t>(block_size, snapshot.length - start);
    std::memcpy(blocks_.tokens(block), snapshot.tokens.data() + start, sizeof(int64_t) * static_cast<size_t>(count));
  }
  if (status == PKV_OK) status = fill(sequence->table.data() + num_hit, num_hit, num_total - num_hit);
  if (status != PKV_OK) {
    finish_close(sequence, index_of(id));  // nobody else knows it
    return mark_failed(status);
  }
  settle(sequence, 0, nullptr);
  *out = id;
  finish_call(sequence);
  sequence->opened_serial = sequence->stepped_serial = serial_;
  return PKV_OK;
}

Status Cache::upload_block(int32_t block, const std::vector<char> &bytes) {
  monitor_.loaded_bytes.add(bytes.size());
  if (!has_several_devices()) return backend_->upload(shard(0).block_address(block), bytes.data(), bytes.size());
  for (const auto &shard : shards_) {
    part_.resize(shard->plan.layout.block_bytes());
    cut_block(layout_, shard->plan, bytes.data(), part_.data());
    PKV_TRY(shard->backend->upload(shard->block_address(block), part_.data(), part_.size()));
  }
  return PKV_OK;
}

// Finds what is here of a tree that was cut into blocks of this cache. Equal blocks become one.
void Cache::plan_tree(const std::vector<ReblockedNode> &nodes, const std::vector<int64_t> &tokens,
                      std::vector<TreeBlock> *out) {
  const int32_t block_size = layout_.block_size();
  std::vector<int64_t> places(nodes.size());  // of a node in out
  std::unordered_multimap<uint64_t, int64_t> by_hash;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const int64_t *own_tokens = tokens.data() + static_cast<int64_t>(i) * block_size;
    const int64_t parent = nodes[i].parent < 0 ? -1 : places[nodes[i].parent];
    // As by enter_scopes.
    Hash128 extended = parent < 0 ? Hash128() : (*out)[parent].hash;
    uint32_t namespace_index = parent < 0 ? kNoNamespace : (*out)[parent].namespace_index;
    for (const uint64_t id : nodes[i].namespaces) {
      const uint32_t index = blocks_.namespaces().find_or_create(id);
      if (index == namespace_index) continue;
      const Hash128 root = hasher_.root(id, blocks_.namespaces()[index].epoch);
      extended = namespace_index == kNoNamespace ? root : hasher_.branch(extended, root);
      if (namespace_index != kNoNamespace) note_regions();
      namespace_index = index;
    }
    const Hash128 hash = hasher_.extend(extended, own_tokens);
    places[i] = -1;
    const auto [first, last] = by_hash.equal_range(hash.low);
    for (auto twin = first; twin != last && places[i] < 0; ++twin) {
      const TreeBlock &other = (*out)[twin->second];
      if (other.hash == hash && other.parent == parent &&
          std::equal(own_tokens, own_tokens + block_size, tokens.data() + other.node * block_size)) {
        places[i] = twin->second;
      }
    }
    if (places[i] >= 0) continue;
    places[i] = static_cast<int64_t>(out->size());
    by_hash.emplace(hash.low, places[i]);
    out->push_back({static_cast<int64_t>(i), parent, extended, hash, namespace_index, blocks_.find(hash, own_tokens)});
  }
}

// Loaded blocks of a namespace must be within its quota beside what is held there; its other cached blocks give way.
Status Cache::check_tree_quotas(const std::vector<TreeBlock> &tree) {
  quota_evictions_.clear();
  Namespaces &namespaces = blocks_.namespaces();
  if (!namespaces.has_quotas()) return PKV_OK;
  quota_evictions_.reserve(namespaces.num_records());
  Status status = PKV_OK;
  for (const TreeBlock &node : tree) {
    NamespaceRecord &record = namespaces[node.namespace_index];
    const bool is_held = node.block != kNoBlock && blocks_.record(node.block).holders > 0;
    if (record.quota == 0 || is_held || status != PKV_OK) continue;
    if (record.planned++ == 0) quota_evictions_.push_back({node.namespace_index, 0});
    if (record.held + record.planned <= record.quota) continue;
    const int64_t available = std::max<int64_t>(record.quota - record.held, 0);
    status = fail_shortage(PKV_OUT_OF_BLOCKS, record.planned, available, 0,
                           "the snapshot takes %" PRId64 " blocks and more of namespace %" PRIu64
                           ", which holds %" PRId64 " of its quota of %" PRId64,
                           record.planned, record.id, record.held, record.quota);
    ++refusals_;
  }
  for (const TreeBlock &node : tree) {  // cached ones are there already: they are kept, not added
    if (node.block != kNoBlock && blocks_.is_cached(node.block)) {
      NamespaceRecord &record = namespaces[node.namespace_index];
      if (record.quota != 0 && status == PKV_OK) --record.planned;
    }
  }
  finish_quota_plan(&quota_evictions_);
  if (status != PKV_OK) publish();
  return status;
}

Status Cache::load_prefixes(const pkv_snapshot_io &io, pkv_stream stream, int64_t *out_num_blocks) {
  PKV_TRY(check_usable());
  PKV_TRY(check_snapshot_stream(stream));
  if (!prefix_caching_) return fail(PKV_UNSUPPORTED, "the cache was made without prefix caching: nothing can be added");
  Snapshot snapshot;
  SnapshotSource source(io);
  PKV_TRY(read_snapshot(kSnapshotPrefix, layout_, &source, &snapshot));
  PKV_TRY(check_scales(snapshot));
  const int32_t block_size = layout_.block_size();
  std::vector<ReblockedNode> nodes;
  std::vector<int64_t> tokens;
  reblock_tree(snapshot, block_size, &nodes, &tokens);
  std::vector<TreeBlock> tree;
  plan_tree(nodes, tokens, &tree);
  const int64_t num_total = static_cast<int64_t>(tree.size());
  int64_t num_needed = 0, num_protected = 0;
  for (const TreeBlock &node : tree) {
    num_needed += node.block == kNoBlock;
    num_protected += node.block != kNoBlock && blocks_.is_cached(node.block);
  }
  expire();
  PKV_TRY(check_room(num_total, num_needed, num_protected));
  PKV_TRY(check_tree_quotas(tree));
  std::vector<int32_t> blocks(tree.size()), new_blocks(static_cast<size_t>(num_needed));
  std::vector<char> block_memory(layout_.block_bytes());
  part_.reserve(layout_.block_bytes());
  StreamSlot slot = kNoStream;
  PKV_TRY(begin_stream(stream, &slot));
  PKV_TRY(wait(stream));

  for (const TreeBlock &node : tree) {
    if (node.block != kNoBlock) blocks_.hit(&node.block, 1);
  }
  evict_over_quota(quota_evictions_);
  blocks_.take(num_needed, new_blocks.data(), kNoNamespace);
  // After a failure the rest is given back as it is.
  Status status = order_loaded(new_blocks.data(), num_needed, slot, stream);
  const int32_t *next_new = new_blocks.data();
  for (int64_t i = 0; i < num_total; ++i) {
    const TreeBlock &node = tree[i];
    blocks[i] = node.block;
    if (node.block != kNoBlock) continue;
    const int32_t block = blocks[i] = *next_new++;
    blocks_.set_owner(block, node.namespace_index);
    if (status != PKV_OK) continue;
    std::memcpy(blocks_.tokens(block), tokens.data() + node.node * block_size,
                sizeof(int64_t) * static_cast<size_t>(block_size));
    const ReblockedNode &cut = nodes[static_cast<size_t>(node.node)];
    fill_block(snapshot, layout_, cut.source, cut.depth, cut.start, block_size, block_memory.data());
    status = upload_block(block, block_memory);
    if (status != PKV_OK) continue;
    if (events_ != nullptr) {
      events_->begin_name(node.parent < 0 ? kNoBlock : blocks[node.parent]);
      uint64_t before = node.parent < 0 ? 0 : blocks_.namespaces()[tree[node.parent].namespace_index].id;
      bool has_entered = false;
      for (const uint64_t id : cut.namespaces) {
        if ((node.parent >= 0 || has_entered) && id == before) continue;
        if (has_entered) events_->pass_namespace(before);
        has_entered = true;
        before = id;
      }
      events_->end_name(block, blocks_.namespaces()[node.namespace_index].id, blocks_.tokens(block), block_size);
    }
    blocks_.set_hash(block, node.extended, node.hash, false);
    note_registered(block, node.extended);
  }
  blocks_.release(blocks.data(), num_total, kNoLevel);  // last to first: parents outlive children
  ++serial_;
  if (status != PKV_OK) return mark_failed(status);
  publish();
  *out_num_blocks = num_needed;
  return PKV_OK;
}

}  // namespace pkv
