from pagedkv.abi cimport pkv_cache_options

cdef bytes as_path(object path, str name)
# What the options point to, to be kept until they have been used.
cdef tuple set_tiers(pkv_cache_options *options, object host_tier, object disk_tier, object disk_tier_bytes,
                     object tier_identity, object recompute_tokens_per_second, object tier_min_hits,
                     object disk_tier_reset)
