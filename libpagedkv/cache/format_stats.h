// The statistics of a cache as text. One table names every member of pkv_cache_stats, its unit and its meaning.
#pragma once

#include <string>

#include "pagedkv/pagedkv.h"

namespace pkv {

// One JSON object; the keys are the members of pkv_cache_stats.
void format_stats_json(const pkv_cache_stats &stats, std::string *out);

// The Prometheus text format 0.0.4. reuse_distance_sum: of all distances in stats.reuse_distance.
void format_stats_prometheus(const pkv_cache_stats &stats, int64_t reuse_distance_sum, std::string *out);

}  // namespace pkv
