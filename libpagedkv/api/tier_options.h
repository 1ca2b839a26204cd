// The options of a cache's tiers, read and checked.
#pragma once

#include <string>

#include "api/abi.h"

namespace pkv {

// out->layout is read already. block_bytes: of a slot of the host tier, the parts of all devices.
Status read_tier_options(const pkv_cache_options &given, uint64_t block_bytes, CacheOptions *out);

// Of what was read, the share of one of the parts of a cache whose sequences are shared out. path is what out->disk_path
// points into.
Status share_tiers(const pkv_cache_options &given, const CacheOptions &options, size_t index, std::string *path,
                   TierOptions *out);

}  // namespace pkv
