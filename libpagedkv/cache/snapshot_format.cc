// The bytes of a snapshot: see docs/snapshot-format.md, which this file follows.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>

#include "base/checked.h"
#include "base/crc32c.h"
#include "base/dtype.h"
#include "base/little_endian.h"
#include "cache/sequence.h"
#include "cache/snapshot.h"
#include "cache/snapshot_rows.h"

namespace pkv {
namespace {

constexpr char kMagic[] = "PKVSNAP\n";  // 8 bytes
constexpr uint32_t kVersion = 1;
constexpr size_t kChecksumBytes = 4;
constexpr size_t kHeaderSum = kSnapshotHeaderBytes - kChecksumBytes;
constexpr size_t kRegionBytes = 16;
constexpr size_t kLeastAtOnce = size_t{1} << 20;  // of what is read before its size is trusted
constexpr int32_t kMaxBlockSize = 65536;

// The members of the header that say what a layout is, with the names that refusals use.
struct LayoutField {
  const char *name;
  uint32_t value;
};
constexpr size_t kNumLayoutFields = 6;

void describe_layout(const Layout &layout, LayoutField *out) {  // [kNumLayoutFields]
  const PagedKv kv = layout.describe_kv(0);
  const LayoutField fields[kNumLayoutFields] = {{"num_layers", static_cast<uint32_t>(layout.num_layers())},
                                                {"num_kv_heads", static_cast<uint32_t>(kv.num_kv_heads)},
                                                {"head_dim", static_cast<uint32_t>(kv.head_dim)},
                                                {"v_head_dim", static_cast<uint32_t>(kv.v_head_dim)},
                                                {"dtype", static_cast<uint32_t>(kv.dtype)},
                                                {"kv_scales", static_cast<uint32_t>(kv.kv_scales)}};
  std::copy(fields, fields + kNumLayoutFields, out);
}

uint32_t checksum_block(int64_t index, const char *rows, size_t size) {
  uint8_t bytes[sizeof index];
  store_little_endian(index, bytes);
  return extend_crc32c(extend_crc32c(0, bytes, sizeof bytes), rows, size);
}

// Numbers one after another, at the end of a string of bytes.
template <class T>
void append_number(T value, std::vector<char> *out) {
  char bytes[sizeof value];
  store_little_endian(value, bytes);
  out->insert(out->end(), bytes, bytes + sizeof bytes);
}

template <class T>
T take_number(const char **from) {
  const T value = load_little_endian<T>(*from);
  *from += sizeof value;
  return value;
}

uint64_t count_index_bytes(const Snapshot &snapshot, const Layout &layout, uint64_t num_regions, uint64_t num_blocks) {
  uint64_t bytes = kRegionBytes * num_regions;
  if (snapshot.has_scales) {
    bytes += 8 * static_cast<uint64_t>(layout.num_layers()) * static_cast<uint64_t>(layout.num_kv_heads());
  }
  if (snapshot.kind == kSnapshotSequence) return bytes + 8 * static_cast<uint64_t>(snapshot.length);
  return bytes + num_blocks * (16 + 8 * static_cast<uint64_t>(snapshot.block_size));
}

// Grows with what has been read: a size that a damaged file claims costs nothing.
Status read_growing(const char *what, uint64_t size, SnapshotSource *source, std::vector<char> *out) {
  out->clear();
  while (out->size() < size) {
    const size_t done = out->size();
    const size_t count = static_cast<size_t>(std::min<uint64_t>(size - done, std::max(done, kLeastAtOnce)));
    out->resize(done + count);
    PKV_TRY(source->read(what, out->data() + done, count));
  }
  return PKV_OK;
}

Status read_checksum(const char *what, uint32_t expected, SnapshotSource *source) {
  char bytes[kChecksumBytes];
  PKV_TRY(source->read(what, bytes, sizeof bytes));
  if (load_little_endian<uint32_t>(bytes) == expected) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "the snapshot is damaged: the checksum of %s is %#x, but stored as %#x", what,
              expected, load_little_endian<uint32_t>(bytes));
}

struct Sizes {
  uint64_t num_blocks, num_regions, index_bytes;
};

Status read_header(SnapshotKind kind, const Layout &layout, SnapshotSource *source, Snapshot *out, Sizes *out_sizes) {
  char bytes[kSnapshotHeaderBytes];
  PKV_TRY(source->read("the header", bytes, sizeof bytes));
  const char *next = bytes;
  if (std::memcmp(next, kMagic, sizeof kMagic - 1) != 0) {
    return fail(PKV_INVALID_ARGUMENT, "this is no snapshot: it does not start with \"PKVSNAP\"");
  }
  next += sizeof kMagic - 1;
  const uint32_t version = take_number<uint32_t>(&next);
  const uint32_t sum = extend_crc32c(0, bytes, kHeaderSum), stored = load_little_endian<uint32_t>(bytes + kHeaderSum);
  if (sum != stored) {
    return fail(PKV_INVALID_ARGUMENT, "the snapshot is damaged: the checksum of the header is %#x, but stored as %#x",
                sum, stored);
  }
  if (version != kVersion) {
    return fail(PKV_UNSUPPORTED, "the snapshot has format version %u; this library reads version %u", version,
                kVersion);
  }
  const uint32_t given_kind = take_number<uint32_t>(&next);
  if (given_kind != kind) {
    static const char *const names[] = {"of an unknown kind", "of a sequence", "of a prefix tree"};
    return fail(PKV_INVALID_ARGUMENT, "the snapshot is one %s (%u), not one %s",
                names[given_kind <= kSnapshotPrefix ? given_kind : 0], given_kind, names[kind]);
  }
  LayoutField fields[kNumLayoutFields];
  describe_layout(layout, fields);
  for (const LayoutField &field : fields) {
    const uint32_t given = take_number<uint32_t>(&next);
    if (given != field.value) {
      return fail(PKV_UNSUPPORTED, "the snapshot has %s %u, but the cache %u", field.name, given, field.value);
    }
  }
  out->kind = kind;
  out->block_size = take_number<int32_t>(&next);
  if (out->block_size < 1 || out->block_size > kMaxBlockSize) {
    return fail(PKV_INVALID_ARGUMENT, "the snapshot has block_size %d, not in 1 to %d", out->block_size, kMaxBlockSize);
  }
  const uint32_t has_scales = take_number<uint32_t>(&next);
  out->has_scales = has_static_scales(layout);
  if (has_scales != static_cast<uint32_t>(out->has_scales)) {
    return fail(PKV_INVALID_ARGUMENT, "the snapshot has %u for whether it holds static scales, not %d", has_scales,
                out->has_scales);
  }
  out_sizes->num_blocks = take_number<uint64_t>(&next);
  out_sizes->index_bytes = take_number<uint64_t>(&next);
  out->namespace_id = take_number<uint64_t>(&next);
  out->tag = take_number<uint64_t>(&next);
  out->priority = take_number<int32_t>(&next);
  out_sizes->num_regions = take_number<uint32_t>(&next);
  out->length = take_number<int64_t>(&next);
  out->settled_length = take_number<int64_t>(&next);
  if (out->length < 0 || out->length > kMaxLength || out->settled_length < 0 || out->settled_length > out->length) {
    return fail(PKV_INVALID_ARGUMENT, "the snapshot has %" PRId64 " tokens, %" PRId64 " of them settled", out->length,
                out->settled_length);
  }
  const uint64_t most_blocks = kind == kSnapshotSequence
                                   ? static_cast<uint64_t>(divide_up(out->length, out->block_size))
                                   : static_cast<uint64_t>(INT32_MAX);
  if (out_sizes->num_blocks > most_blocks || (kind == kSnapshotSequence && out_sizes->num_blocks != most_blocks)) {
    return fail(PKV_INVALID_ARGUMENT, "the snapshot has %" PRIu64 " blocks, but %" PRId64 " tokens in blocks of %d",
                out_sizes->num_blocks, out->length, out->block_size);
  }
  const uint64_t expected = count_index_bytes(*out, layout, out_sizes->num_regions, out_sizes->num_blocks);
  if (out_sizes->index_bytes == expected) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "the snapshot has an index of %" PRIu64 " bytes, but its counts make %" PRIu64,
              out_sizes->index_bytes, expected);
}

Status parse_index(const char *next, const Layout &layout, const Sizes &sizes, Snapshot *out) {
  if (out->has_scales) {
    out->scales.resize(2 * static_cast<size_t>(layout.num_layers()) * static_cast<size_t>(layout.num_kv_heads()));
    for (float &scale : out->scales) {
      const uint32_t bits = take_number<uint32_t>(&next);
      std::memcpy(&scale, &bits, sizeof bits);
    }
  }
  out->regions.resize(sizes.num_regions);
  for (size_t i = 0; i < out->regions.size(); ++i) {
    out->regions[i].start = take_number<int64_t>(&next);
    out->regions[i].namespace_id = take_number<uint64_t>(&next);
    const int64_t start = out->regions[i].start, before = i == 0 ? 0 : out->regions[i - 1].start;
    const bool is_sequence = out->kind == kSnapshotSequence;
    if (is_sequence ? start <= before : start < before || start >= static_cast<int64_t>(sizes.num_blocks)) {
      return fail(PKV_INVALID_ARGUMENT, "the snapshot has region %zu at %" PRId64 ", out of order", i,
                  out->regions[i].start);
    }
  }
  const int64_t num_blocks = static_cast<int64_t>(sizes.num_blocks);
  if (out->kind == kSnapshotSequence) {
    out->tokens.resize(static_cast<size_t>(out->length));
    for (int64_t &token : out->tokens) token = take_number<int64_t>(&next);
    for (int64_t i = 0; i < out->settled_length; ++i) {
      if (out->tokens[i] >= 0) continue;
      return fail(PKV_INVALID_ARGUMENT, "the snapshot has token %" PRId64 " at %" PRId64 ", which is settled",
                  out->tokens[i], i);
    }
    for (int64_t i = 0; i < num_blocks; ++i) out->parents.push_back(i - 1);
    return PKV_OK;
  }
  const size_t block_size = static_cast<size_t>(out->block_size);
  out->tokens.reserve(static_cast<size_t>(num_blocks) * block_size);
  for (int64_t i = 0; i < num_blocks; ++i) {
    out->parents.push_back(take_number<int64_t>(&next));
    out->namespaces.push_back(take_number<uint64_t>(&next));
    if (out->parents.back() < -1 || out->parents.back() >= i) {
      return fail(PKV_INVALID_ARGUMENT, "the snapshot has block %" PRId64 " as the parent of block %" PRId64,
                  out->parents.back(), i);
    }
    for (size_t j = 0; j < block_size; ++j) {
      out->tokens.push_back(take_number<int64_t>(&next));
      if (out->tokens.back() >= 0) continue;
      return fail(PKV_INVALID_ARGUMENT, "the snapshot has token %" PRId64 " in block %" PRId64, out->tokens.back(), i);
    }
  }
  return PKV_OK;
}

}  // namespace

Status write_index(const Snapshot &snapshot, const Layout &layout, SnapshotSink *sink) {
  const uint64_t num_regions = snapshot.regions.size(), num_blocks = snapshot.parents.size();
  const uint64_t index_bytes = count_index_bytes(snapshot, layout, num_regions, num_blocks);
  std::vector<char> bytes;
  bytes.reserve(static_cast<size_t>(std::max<uint64_t>(index_bytes, kSnapshotHeaderBytes)) + kChecksumBytes);
  bytes.insert(bytes.end(), kMagic, kMagic + sizeof kMagic - 1);
  append_number(kVersion, &bytes);
  append_number(static_cast<uint32_t>(snapshot.kind), &bytes);
  LayoutField fields[kNumLayoutFields];
  describe_layout(layout, fields);
  for (const LayoutField &field : fields) append_number(field.value, &bytes);
  append_number(snapshot.block_size, &bytes);
  append_number(static_cast<uint32_t>(snapshot.has_scales), &bytes);
  append_number(num_blocks, &bytes);
  append_number(index_bytes, &bytes);
  append_number(snapshot.namespace_id, &bytes);
  append_number(snapshot.tag, &bytes);
  append_number(snapshot.priority, &bytes);
  append_number(static_cast<uint32_t>(num_regions), &bytes);
  append_number(snapshot.length, &bytes);
  append_number(snapshot.settled_length, &bytes);
  bytes.resize(kHeaderSum);
  append_number(extend_crc32c(0, bytes.data(), bytes.size()), &bytes);
  PKV_TRY(sink->write(bytes.data(), bytes.size()));

  bytes.clear();
  for (const float scale : snapshot.scales) {
    uint32_t bits = 0;
    std::memcpy(&bits, &scale, sizeof bits);
    append_number(bits, &bytes);
  }
  for (const pkv_namespace_region &region : snapshot.regions) {
    append_number(region.start, &bytes);
    append_number(region.namespace_id, &bytes);
  }
  if (snapshot.kind == kSnapshotSequence) {
    for (const int64_t token : snapshot.tokens) append_number(token, &bytes);
  } else {
    const int64_t *token = snapshot.tokens.data();
    for (size_t i = 0; i < num_blocks; ++i) {
      append_number(snapshot.parents[i], &bytes);
      append_number(snapshot.namespaces[i], &bytes);
      for (int32_t j = 0; j < snapshot.block_size; ++j) append_number(*token++, &bytes);
    }
  }
  append_number(extend_crc32c(0, bytes.data(), bytes.size()), &bytes);
  return sink->write(bytes.data(), bytes.size());
}

Status write_block(int64_t index, const char *rows, size_t size, SnapshotSink *sink) {
  PKV_TRY(sink->write(rows, size));
  char bytes[kChecksumBytes];
  store_little_endian(checksum_block(index, rows, size), bytes);
  return sink->write(bytes, sizeof bytes);
}

Status read_snapshot(SnapshotKind kind, const Layout &layout, SnapshotSource *source, Snapshot *out) {
  PKV_TRY(source->open());
  Sizes sizes = {};
  PKV_TRY(read_header(kind, layout, source, out, &sizes));
  std::vector<char> index;
  PKV_TRY(read_growing("the index", sizes.index_bytes, source, &index));
  PKV_TRY(read_checksum("the index", extend_crc32c(0, index.data(), index.size()), source));
  PKV_TRY(parse_index(index.data(), layout, sizes, out));
  const uint64_t row_bytes = snapshot_row_bytes(layout);
  for (int64_t i = 0; i < out->num_blocks(); ++i) {
    char what[40];
    std::snprintf(what, sizeof what, "block %" PRId64, i);
    uint64_t size = 0;
    if (!checked_multiply(static_cast<uint64_t>(out->count_rows(i)), row_bytes, &size)) {
      return fail(PKV_INVALID_ARGUMENT, "the snapshot's %s is larger than the address space", what);
    }
    std::vector<char> rows;
    PKV_TRY(read_growing(what, size, source, &rows));
    PKV_TRY(read_checksum(what, checksum_block(i, rows.data(), rows.size()), source));
    out->rows.push_back(std::move(rows));
  }
  return source->finish();
}

}  // namespace pkv
