#include "api/tier_options.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "cache/disk_tier.h"

namespace pkv {

Status read_tier_options(const pkv_cache_options &given, uint64_t block_bytes, CacheOptions *out) {
  TierOptions &tiers = out->tiers;
  if (given.host_tier_blocks < 0 || given.host_tier_blocks > kMaxBlocks) {
    return fail(PKV_INVALID_ARGUMENT, "host_tier_blocks is %" PRId64 ", not in 0 to %" PRId64, given.host_tier_blocks,
                kMaxBlocks);
  }
  if (given.host_tier_blocks != 0 && given.host_tier_bytes != 0) {
    return fail(PKV_INVALID_ARGUMENT, "host_tier_blocks (%" PRId64 ") and host_tier_bytes (%" PRIu64
                ") exclude each other", given.host_tier_blocks, given.host_tier_bytes);
  }
  tiers.num_host_slots = given.host_tier_blocks;
  if (given.host_tier_bytes != 0) {
    tiers.num_host_slots = static_cast<int64_t>(std::min<uint64_t>(given.host_tier_bytes / block_bytes, kMaxBlocks));
    if (tiers.num_host_slots == 0) {
      return fail(PKV_INVALID_ARGUMENT, "host_tier_bytes is %" PRIu64 ", less than one block of %" PRIu64,
                  given.host_tier_bytes, block_bytes);
    }
  }
  if (given.tier_min_hits < 0 || given.tier_min_hits > UINT8_MAX) {
    return fail(PKV_INVALID_ARGUMENT, "tier_min_hits is %" PRId64 ", not in 0 to %d", given.tier_min_hits, UINT8_MAX);
  }
  tiers.min_hits = given.tier_min_hits;
  if (!std::isfinite(given.recompute_tokens_per_second) || given.recompute_tokens_per_second < 0) {
    return fail(PKV_INVALID_ARGUMENT, "recompute_tokens_per_second is %g, not a rate or 0",
                given.recompute_tokens_per_second);
  }
  tiers.recompute_tokens_per_second = given.recompute_tokens_per_second;
  PKV_TRY(read_toggle("disk_tier_reset", given.disk_tier_reset, false, &tiers.resets_disk));
  if (given.disk_tier_path == nullptr) {
    if (given.disk_tier_bytes == 0) return PKV_OK;
    return fail(PKV_INVALID_ARGUMENT, "disk_tier_bytes is %" PRIu64 ", but there is no disk_tier_path",
                given.disk_tier_bytes);
  }
  if (tiers.num_host_slots == 0) {
    return fail(PKV_INVALID_ARGUMENT, "a disk tier stands behind a host tier: host_tier_bytes is 0");
  }
  tiers.disk_path = given.disk_tier_path;
  tiers.identity = given.tier_identity;
  tiers.num_disk_slots = DiskTier::count_slots(out->layout, given.disk_tier_bytes);
  if (tiers.num_disk_slots > 0) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "disk_tier_bytes is %" PRIu64 ", too little for one block of %" PRIu64,
              given.disk_tier_bytes, block_bytes);
}

// The host's memory and the disk are shared by all devices: each part has its share of the slots, and a file of its own.
Status share_tiers(const pkv_cache_options &given, const CacheOptions &options, size_t index, std::string *path,
                   TierOptions *out) {
  const int64_t num_parts = static_cast<int64_t>(options.devices.size()), i = static_cast<int64_t>(index);
  const int64_t num_slots = options.tiers.num_host_slots;
  if (num_slots == 0) return PKV_OK;
  if (num_slots < num_parts) {
    return fail(PKV_INVALID_ARGUMENT, "the host tier has room for %" PRId64 " blocks, fewer than the %" PRId64
                " devices that share it", num_slots, num_parts);
  }
  out->num_host_slots = num_slots / num_parts + (i < num_slots % num_parts);
  if (options.tiers.disk_path == nullptr) return PKV_OK;
  *path = options.tiers.disk_path + ("." + std::to_string(index));
  out->disk_path = path->c_str();
  out->num_disk_slots = DiskTier::count_slots(options.layout, given.disk_tier_bytes / static_cast<uint64_t>(num_parts));
  if (out->num_disk_slots > 0) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "disk_tier_bytes is %" PRIu64 ", too little for one block of %" PRIu64
              " in each of %" PRId64 " files", given.disk_tier_bytes, options.layout.block_bytes(), num_parts);
}

}  // namespace pkv
