// Saving: a sequence, or the tree of all that can be hit.
#include <algorithm>
#include <cinttypes>

#include "cache/cache.h"
#include "cache/snapshot.h"
#include "cache/snapshot_rows.h"

namespace pkv {

Status Cache::check_snapshot_stream(pkv_stream stream) const {
  if (stream == PKV_STREAM_OF_SEQUENCE) {
    return fail(PKV_INVALID_ARGUMENT, "stream is PKV_STREAM_OF_SEQUENCE, but there is no sequence yet");
  }
  return check_not_capturing(stream);
}

// As in a snapshot: [num_layers, K | V, num_kv_heads], or empty.
Status Cache::read_scales(std::vector<float> *out) const {
  out->clear();
  if (!has_static_scales(layout_)) return PKV_OK;
  out->resize(2 * static_cast<size_t>(layout_.num_layers()) * static_cast<size_t>(layout_.num_kv_heads()));
  for (const auto &shard : shards_) {
    const size_t num_layers = static_cast<size_t>(shard->plan.layout.num_layers());
    const size_t num_heads = static_cast<size_t>(shard->plan.layout.num_kv_heads());
    std::vector<float> part(2 * num_layers * num_heads);
    PKV_TRY(shard->backend->download(part.data(), shard->scales.as<float>(), part.size() * sizeof(float), nullptr));
    for (size_t i = 0; i < 2 * num_layers; ++i) {  // a layer's K, or V
      const size_t row = 2 * static_cast<size_t>(shard->plan.first_layer) + i;
      std::copy_n(part.data() + i * num_heads, num_heads,
                  out->data() + row * static_cast<size_t>(layout_.num_kv_heads()) + shard->plan.first_kv_head);
    }
  }
  return PKV_OK;
}

Status Cache::write_blocks(const Snapshot &snapshot, const int32_t *blocks, pkv_stream stream, SnapshotSink *sink) {
  const uint64_t row_bytes = snapshot_row_bytes(layout_);
  std::vector<char> block(layout_.block_bytes()), rows(static_cast<size_t>(layout_.block_size()) * row_bytes);
  for (int64_t i = 0; i < snapshot.num_blocks(); ++i) {
    PKV_TRY(download_block(blocks[i], stream, &block));
    const int64_t count = snapshot.count_rows(i);
    pack_rows(layout_, block.data(), count, rows.data());
    PKV_TRY(write_block(i, rows.data(), static_cast<size_t>(count) * row_bytes, sink));
  }
  PKV_TRY(sink->finish());
  monitor_.saved_bytes.add(static_cast<uint64_t>(snapshot.num_blocks()) * layout_.block_bytes());
  return PKV_OK;
}

// Of several devices, the parts joined.
Status Cache::download_block(int32_t block, pkv_stream stream, std::vector<char> *out) {
  if (!has_several_devices()) {
    return backend_->download(out->data(), shard(0).block_address(block), out->size(), stream);
  }
  for (int32_t i = 0; i < num_devices(); ++i) {
    part_.resize(shard(i).plan.layout.block_bytes());
    PKV_TRY(shard(i).backend->download(part_.data(), shard(i).block_address(block), part_.size(), stream_of(stream, i)));
    join_block(layout_, shard(i).plan, part_.data(), out->data());
  }
  return PKV_OK;
}

// A sequence, but for K and V. UNSUPPORTED where those are not whole or not exact.
Status Cache::describe_sequence(const Sequence &described, Snapshot *out) const {
  const Sequence *sequence = &described;
  Snapshot &snapshot = *out;
  const int32_t block_size = layout_.block_size();
  snapshot.kind = kSnapshotSequence;
  snapshot.block_size = block_size;
  snapshot.namespace_id = sequence->chain.first.id;
  for (const Scope &region : sequence->chain.regions) snapshot.regions.push_back({region.start, region.id});
  snapshot.tag = sequence->tag;
  snapshot.priority = sequence->priority;
  snapshot.length = sequence->length;
  snapshot.settled_length = sequence->settled_length;
  if (sequence->exact_length < sequence->length) {
    return fail(PKV_UNSUPPORTED, "tokens from %" PRId64 " on were shifted: K and V are approximations, which a snapshot "
                "does not tell from exact ones", sequence->exact_length);
  }
  snapshot.tokens.resize(static_cast<size_t>(sequence->length));
  for (int64_t start = 0; start < sequence->length; start += block_size) {
    const int32_t block = sequence->table[start / block_size];
    if (block < 0) {
      return fail(PKV_UNSUPPORTED,
                  "tokens from %" PRId64
                  " on were released by the sliding window: the sequence "
                  "cannot be saved",
                  start);
    }
    snapshot.parents.push_back(start / block_size - 1);
    const int64_t *row = blocks_.tokens(block);
    std::copy(row, row + snapshot.count_rows(start / block_size), snapshot.tokens.data() + start);
  }
  return PKV_OK;
}

Status Cache::save_sequence(pkv_sequence id, const pkv_snapshot_io &io, pkv_stream stream) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  if (stream == PKV_STREAM_OF_SEQUENCE) stream = sequence->stream;
  PKV_TRY(check_snapshot_stream(stream));
  Snapshot snapshot;
  PKV_TRY(describe_sequence(*sequence, &snapshot));
  snapshot.has_scales = has_static_scales(layout_);
  PKV_TRY(read_scales(&snapshot.scales));
  SnapshotSink sink(io);
  PKV_TRY(sink.open());
  PKV_TRY(write_index(snapshot, layout_, &sink));
  PKV_TRY(order_snapshot(sequence, sequence->table.data(), snapshot.num_blocks(), stream));
  return write_blocks(snapshot, sequence->table.data(), stream, &sink);
}

Status Cache::save_prefixes(const pkv_snapshot_io &io, pkv_stream stream) {
  PKV_TRY(check_usable());
  PKV_TRY(check_snapshot_stream(stream));
  Snapshot snapshot;
  snapshot.kind = kSnapshotPrefix;
  snapshot.block_size = layout_.block_size();
  std::vector<TreeEntry> tree;
  collect_tree(kNoNamespace, &tree);
  std::vector<int32_t> blocks;
  for (const TreeEntry &entry : tree) {
    const int64_t *tokens = blocks_.tokens(entry.block);
    blocks.push_back(entry.block);
    for (const uint64_t id : entry.passed) snapshot.regions.push_back({snapshot.num_blocks(), id});
    snapshot.parents.push_back(entry.parent);
    snapshot.namespaces.push_back(blocks_.namespaces()[blocks_.record(entry.block).namespace_index].id);
    snapshot.tokens.insert(snapshot.tokens.end(), tokens, tokens + layout_.block_size());
  }
  snapshot.has_scales = has_static_scales(layout_);
  PKV_TRY(read_scales(&snapshot.scales));
  SnapshotSink sink(io);
  PKV_TRY(sink.open());
  PKV_TRY(write_index(snapshot, layout_, &sink));
  PKV_TRY(order_snapshot(nullptr, blocks.data(), snapshot.num_blocks(), stream));
  return write_blocks(snapshot, blocks.data(), stream, &sink);
}

}  // namespace pkv
