#include "cache/format_stats.h"

#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <iterator>

#include "base/json.h"

namespace pkv {
namespace {

enum class Kind { kGauge, kCounter, kFlag, kAddress, kText, kHistogram };
enum class Type { kInt32, kInt64, kUint64, kPointer, kText };

struct Field {
  const char *key;     // of the JSON, and the struct's member
  const char *metric;  // of Prometheus, between "pagedkv_" and "_total"; nullptr if it is none
  Kind kind;
  Type type;
  size_t offset;
  const char *help;
};

constexpr Type type_of(int32_t *) { return Type::kInt32; }
constexpr Type type_of(int64_t *) { return Type::kInt64; }
constexpr Type type_of(uint64_t *) { return Type::kUint64; }
constexpr Type type_of(void **) { return Type::kPointer; }
template <size_t kSize>
constexpr Type type_of(char (*)[kSize]) { return Type::kText; }
template <size_t kSize>
constexpr Type type_of(int64_t (*)[kSize]) { return Type::kInt64; }

#define PKV_FIELD(member, metric, kind, help)                                                             \
  {                                                                                                       \
    #member, metric, Kind::kind, type_of(static_cast<decltype(pkv_cache_stats::member) *>(nullptr)),      \
        offsetof(pkv_cache_stats, member), help                                                           \
  }

constexpr Field kFields[] = {
    PKV_FIELD(num_blocks, "num_blocks", kGauge, "Blocks of the pool."),
    PKV_FIELD(uncached_blocks, "uncached_blocks", kGauge, "Free blocks with nothing in them."),
    PKV_FIELD(cached_blocks, "cached_blocks", kGauge, "Free blocks that the prefix cache can find."),
    PKV_FIELD(held_blocks, "held_blocks", kGauge, "Blocks held by sequences and pins."),
    PKV_FIELD(pending_blocks, "pending_blocks", kGauge, "Blocks waiting for transfers."),
    PKV_FIELD(peak_held_blocks, "peak_held_blocks", kGauge, "Most blocks ever held at once."),
    PKV_FIELD(num_sequences, "num_sequences", kGauge, "Open sequences."),
    PKV_FIELD(queried_tokens, "queried_tokens", kCounter, "Tokens of all opened prompts."),
    PKV_FIELD(hit_tokens, "hit_tokens", kCounter, "Of those, tokens found in the prefix cache."),
    PKV_FIELD(appended_tokens, "appended_tokens", kCounter, "Tokens appended to sequences."),
    PKV_FIELD(registered, "registered_blocks", kCounter, "Blocks made findable."),
    PKV_FIELD(evictions, "evictions", kCounter, "Cached blocks taken for something else."),
    PKV_FIELD(copies, "copies", kCounter, "Blocks copied on write."),
    PKV_FIELD(prepares, "prepares", kCounter, "Steps prepared."),
    PKV_FIELD(refusals, "refusals", kCounter, "Calls refused for want of blocks."),
    PKV_FIELD(block_bytes, "block_bytes", kGauge, "Bytes of a block."),
    PKV_FIELD(base, nullptr, kAddress, "Address of block 0."),
    PKV_FIELD(device, "device_info", kText, "The device of the cache, in a label."),
    PKV_FIELD(is_failed, "is_failed", kFlag, "1 if a device error left the cache unusable."),
    PKV_FIELD(is_tracing, "is_tracing", kFlag, "1 while calls are being recorded."),
    PKV_FIELD(num_pins, "num_pins", kGauge, "Pins on prefixes."),
    PKV_FIELD(pinned_blocks, "pinned_blocks", kGauge, "Blocks held by pins."),
    PKV_FIELD(num_namespaces, "num_namespaces", kGauge, "Namespaces that have sequences, blocks or a quota."),
    PKV_FIELD(partial_hit_tokens, "partial_hit_tokens", kCounter, "Of the hit tokens, those inside a block."),
    PKV_FIELD(released_blocks, "released_blocks", kCounter, "Blocks released by the sliding window."),
    PKV_FIELD(num_events, "events", kCounter, "Events made."),
    PKV_FIELD(dropped_events, "dropped_events", kCounter, "Of those, events lost because nobody read them in time."),
    PKV_FIELD(reuse_distance, "reuse_distance", kHistogram, "Uses of blocks between two uses of a block that was hit."),
    PKV_FIELD(num_transfers, "transfers", kGauge, "Open transfers."),
    PKV_FIELD(quarantined_blocks, "quarantined_blocks", kGauge, "Blocks of quarantined transfers."),
    PKV_FIELD(copied_bytes, "copied_bytes", kCounter, "Bytes of K and V copied or moved inside the device."),
    PKV_FIELD(uploaded_bytes, "uploaded_bytes", kCounter, "Bytes of tables sent to the device."),
    PKV_FIELD(saved_bytes, "saved_bytes", kCounter, "Bytes of blocks read for snapshots."),
    PKV_FIELD(loaded_bytes, "loaded_bytes", kCounter, "Bytes of blocks written from snapshots."),
    PKV_FIELD(device_total_bytes, "device_total_bytes", kGauge, "Memory of the device."),
    PKV_FIELD(device_free_bytes, "device_free_bytes", kGauge, "Of that, free when it was asked last."),
    PKV_FIELD(unused_slots, "unused_slots", kGauge, "Token slots of held blocks without a token; -1 before a measure."),
    PKV_FIELD(free_tail_blocks, "free_tail_blocks", kGauge, "Blocks at the pool's end held by nobody; -1 before a measure."),
    PKV_FIELD(host_tier_blocks, "host_tier_blocks", kGauge, "Room in the host tier, in blocks."),
    PKV_FIELD(host_tier_resident, "host_tier_resident_blocks", kGauge, "Blocks in the host tier."),
    PKV_FIELD(host_hit_tokens, "host_hit_tokens", kCounter, "Of the hit tokens, those restored from the host tier."),
    PKV_FIELD(disk_hit_tokens, "disk_hit_tokens", kCounter, "Of the hit tokens, those restored from the disk tier."),
    PKV_FIELD(tier_misses, "tier_misses", kCounter, "Prompts that no tier continued."),
    PKV_FIELD(offloaded_blocks, "offloaded_blocks", kCounter, "Blocks copied from the device to the host tier."),
    PKV_FIELD(restored_blocks, "restored_blocks", kCounter, "Blocks copied from the host tier to the device."),
    PKV_FIELD(skipped_offloads, "skipped_offloads", kCounter, "Evicted blocks that were not offloaded."),
    PKV_FIELD(host_tier_evictions, "host_tier_evictions", kCounter, "Blocks that the host tier gave up for others."),
    PKV_FIELD(offloaded_sequences, "offloaded_sequences", kGauge, "Sequences whose blocks are in the host tier."),
    PKV_FIELD(offload_rate, "offload_bytes_per_second", kGauge, "Measured rate of copies to the host tier."),
    PKV_FIELD(restore_rate, "restore_bytes_per_second", kGauge, "Measured rate of copies from the host tier."),
    PKV_FIELD(is_disk_tier_on, "is_disk_tier_on", kFlag, "1 while the disk tier is in use."),
    PKV_FIELD(disk_tier_blocks, "disk_tier_blocks", kGauge, "Room in the disk tier, in blocks."),
    PKV_FIELD(disk_tier_resident, "disk_tier_resident_blocks", kGauge, "Blocks in the disk tier."),
    PKV_FIELD(disk_writes, "disk_writes", kCounter, "Blocks written to the disk tier."),
    PKV_FIELD(disk_reads, "disk_reads", kCounter, "Blocks read from the disk tier."),
    PKV_FIELD(disk_drops, "disk_drops", kCounter, "Blocks that the host tier gave up unwritten."),
    PKV_FIELD(disk_damaged, "disk_damaged", kCounter, "Blocks of the disk tier that were found damaged."),
    PKV_FIELD(disk_write_rate, "disk_write_bytes_per_second", kGauge, "Measured rate of writes to the disk tier."),
    PKV_FIELD(disk_read_rate, "disk_read_bytes_per_second", kGauge, "Measured rate of reads from the disk tier."),
    PKV_FIELD(max_num_blocks, "max_num_blocks", kGauge, "Blocks that the pool may grow to."),
    PKV_FIELD(moved_blocks, "moved_blocks", kCounter, "Blocks moved by a resize."),
};

#undef PKV_FIELD

// The struct has no member that the table has not.
static_assert(kFields[std::size(kFields) - 1].offset + sizeof(pkv_cache_stats::moved_blocks) == sizeof(pkv_cache_stats),
              "the last member of pkv_cache_stats stands last in the table");

constexpr int kNumBuckets = static_cast<int>(std::size(decltype(pkv_cache_stats::reuse_distance){}));

template <class T>
const T &read(const pkv_cache_stats &stats, const Field &field) {
  return *reinterpret_cast<const T *>(reinterpret_cast<const char *>(&stats) + field.offset);
}

uint64_t read_unsigned(const pkv_cache_stats &stats, const Field &field) {
  if (field.type == Type::kUint64) return read<uint64_t>(stats, field);
  return reinterpret_cast<uintptr_t>(read<void *>(stats, field));
}

int64_t read_signed(const pkv_cache_stats &stats, const Field &field) {
  return field.type == Type::kInt32 ? read<int32_t>(stats, field) : read<int64_t>(stats, field);
}

bool is_unsigned(const Field &field) { return field.type == Type::kUint64 || field.type == Type::kPointer; }

class PrometheusWriter {
 public:
  explicit PrometheusWriter(std::string *out) : out_(out) {}

  // # HELP and # TYPE of the metric that the following samples belong to.
  void begin(const Field &field) {
    name_ = "pagedkv_";
    name_ += field.metric;
    if (field.kind == Kind::kCounter) name_ += "_total";
    const char *type = field.kind == Kind::kCounter ? "counter" : field.kind == Kind::kHistogram ? "histogram" : "gauge";
    *out_ += "# HELP " + name_ + " " + field.help + "\n# TYPE " + name_ + " " + type + "\n";
  }

  // suffix: "", "_sum" or the like; labels: "" or with their braces.
  void sample(const char *suffix, const std::string &labels, const std::string &value) {
    *out_ += name_ + suffix + labels + " " + value + "\n";
  }

  void histogram(const int64_t *counts, int64_t sum) {  // counts: [kNumBuckets]
    int64_t total = 0;
    for (int i = 0; i < kNumBuckets; ++i) {
      total += counts[i];
      const bool is_last = i == kNumBuckets - 1;
      const std::string bound = is_last ? "+Inf" : std::to_string((int64_t{1} << (i + 1)) - 1);
      sample("_bucket", "{le=\"" + bound + "\"}", std::to_string(total));
    }
    sample("_sum", "", std::to_string(sum));
    sample("_count", "", std::to_string(total));
  }

 private:
  std::string *const out_;
  std::string name_;
};

// Of a label's value.
std::string escape_label(const char *text) {
  std::string escaped;
  for (; *text != '\0'; ++text) {
    if (*text == '\\' || *text == '"') escaped += '\\';
    if (*text == '\n') {
      escaped += "\\n";
    } else {
      escaped += *text;
    }
  }
  return escaped;
}

}  // namespace

void format_stats_json(const pkv_cache_stats &stats, std::string *out) {
  JsonWriter json(out);
  json.begin_object();
  for (const Field &field : kFields) {
    json.key(field.key);
    if (field.kind == Kind::kText) {
      json.value(&read<char>(stats, field));
    } else if (field.kind == Kind::kFlag) {
      json.value(read_signed(stats, field) != 0);
    } else if (field.kind == Kind::kHistogram) {
      json.begin_array();
      for (int i = 0; i < kNumBuckets; ++i) json.value((&read<int64_t>(stats, field))[i]);
      json.end_array();
    } else if (is_unsigned(field)) {
      json.value(read_unsigned(stats, field));
    } else {
      json.value(read_signed(stats, field));
    }
  }
  json.end_object();
}

void format_stats_prometheus(const pkv_cache_stats &stats, int64_t reuse_distance_sum, std::string *out) {
  PrometheusWriter writer(out);
  for (const Field &field : kFields) {
    if (field.metric == nullptr) continue;
    writer.begin(field);
    if (field.kind == Kind::kText) {
      writer.sample("", "{device=\"" + escape_label(&read<char>(stats, field)) + "\"}", "1");
    } else if (field.kind == Kind::kHistogram) {
      writer.histogram(&read<int64_t>(stats, field), reuse_distance_sum);
    } else if (is_unsigned(field)) {
      writer.sample("", "", std::to_string(read_unsigned(stats, field)));
    } else {
      writer.sample("", "", std::to_string(read_signed(stats, field)));
    }
  }
}

}  // namespace pkv
