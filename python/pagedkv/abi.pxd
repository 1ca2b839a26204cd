# The C ABI of libpagedkv, as in include/pagedkv/pagedkv.h and in its order. The only `cdef extern` of the package: the
# header is its documentation.
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "pagedkv/pagedkv.h" nogil:
    const int PKV_VERSION_MAJOR
    const int PKV_VERSION_MINOR
    const int PKV_VERSION_PATCH
    const char *PKV_VERSION_STRING

    # ---- 1. Status, errors, log
    ctypedef enum pkv_status:
        PKV_OK
        PKV_INVALID_ARGUMENT
        PKV_NOT_FOUND
        PKV_OUT_OF_MEMORY
        PKV_OUT_OF_BLOCKS
        PKV_NEVER_FITS
        PKV_BUSY
        PKV_UNSUPPORTED
        PKV_DEVICE_ERROR
        PKV_INTERNAL
    const char *pkv_status_name(pkv_status status)
    const char *pkv_version()
    const char *pkv_last_error()

    ctypedef struct pkv_shortage:
        size_t struct_size
        int64_t needed
        int64_t available
        int64_t index
    pkv_status pkv_last_shortage(pkv_shortage *out)

    ctypedef enum pkv_log_level:
        PKV_LOG_DEBUG
        PKV_LOG_INFO
        PKV_LOG_WARNING
        PKV_LOG_ERROR

    ctypedef void (*pkv_log_callback)(pkv_log_level level, const char *message, void *user_data) noexcept
    pkv_status pkv_set_log_callback(pkv_log_callback callback, void *user_data)

    # ---- 2. Data types and tensors
    ctypedef enum pkv_dtype:
        PKV_DTYPE_NONE
        PKV_FLOAT32
        PKV_FLOAT16
        PKV_BFLOAT16
        PKV_FLOAT8_E4M3
        PKV_FLOAT8_E5M2
        PKV_INT8
        PKV_INT32
        PKV_INT64
        PKV_BOOL
    const char *pkv_dtype_name(pkv_dtype dtype)
    pkv_status pkv_dtype_parse(const char *name, pkv_dtype *out)

    ctypedef enum pkv_toggle:
        PKV_DEFAULT
        PKV_ON
        PKV_OFF

    ctypedef void *pkv_stream
    pkv_stream PKV_STREAM_OF_SEQUENCE

    ctypedef struct pkv_tensor:
        void *data
        pkv_dtype dtype
        int32_t ndim
        int64_t shape[4]
        int64_t strides[4]

    ctypedef struct pkv_array:
        const void *data
        pkv_dtype dtype
        int32_t ndim
        int64_t shape[2]
        int64_t strides[2]
        void *owner
    void pkv_array_release(pkv_array *array)

    # ---- 3. Devices and pool
    ctypedef struct pkv_cuda_info:
        size_t struct_size
        int32_t is_built
        int32_t is_usable
        int32_t built_version
        int32_t driver_version
        int32_t num_devices
        char reason[256]
    pkv_status pkv_cuda_query(pkv_cuda_info *out)

    ctypedef struct pkv_device_info:
        size_t struct_size
        char device[16]
        char name[128]
        uint64_t total_bytes
        uint64_t free_bytes
        int32_t compute_capability
        int32_t num_processors
    pkv_status pkv_device_query(const char *device, pkv_device_info *out)

    ctypedef struct pkv_pool:
        pass

    ctypedef struct pkv_pool_options:
        size_t struct_size
        uint64_t block_bytes
        int64_t num_blocks
        const char *device
        void *memory
        uint64_t memory_bytes
        int64_t max_num_blocks
    pkv_status pkv_pool_create(const pkv_pool_options *options, pkv_pool **out)
    void pkv_pool_destroy(pkv_pool *pool)
    pkv_status pkv_pool_allocate(pkv_pool *pool, int64_t count, int32_t *out_blocks)
    pkv_status pkv_pool_retain(pkv_pool *pool, const int32_t *blocks, int64_t count)
    pkv_status pkv_pool_free(pkv_pool *pool, const int32_t *blocks, int64_t count)
    pkv_status pkv_pool_block_ptr(const pkv_pool *pool, int32_t block, void **out)
    pkv_status pkv_pool_resize(pkv_pool *pool, int64_t num_blocks)
    pkv_status pkv_pool_copy_blocks(pkv_pool *pool, const int32_t *sources, const int32_t *destinations, int64_t count,
                                    pkv_stream stream)
    pkv_status pkv_pool_zero_blocks(pkv_pool *pool, const int32_t *blocks, int64_t count, pkv_stream stream)
    int64_t pkv_pool_num_blocks(const pkv_pool *pool)
    int64_t pkv_pool_num_free(const pkv_pool *pool)

    ctypedef struct pkv_pool_stats:
        size_t struct_size
        int64_t num_blocks
        int64_t num_free
        int64_t peak_used
        int64_t allocations
        int64_t frees
        int64_t failures
        uint64_t block_bytes
        uint64_t device_total_bytes
        uint64_t device_free_bytes
        void *base
        char device[16]
        uint64_t copied_bytes
        uint64_t zeroed_bytes
        int64_t free_tail_blocks
    pkv_status pkv_pool_get_stats(const pkv_pool *pool, pkv_pool_stats *out)

    # ---- 4. Layout, cache
    ctypedef enum pkv_kv_order:
        PKV_TOKEN_HEAD
        PKV_HEAD_TOKEN

    ctypedef enum pkv_kv_scales:
        PKV_SCALES_STATIC
        PKV_SCALES_PER_TOKEN_HEAD

    ctypedef struct pkv_layer_group:
        size_t struct_size
        int32_t num_layers
        int32_t num_kv_heads
        int32_t head_dim
        int32_t v_head_dim
        pkv_dtype dtype
        pkv_kv_order order
        pkv_kv_scales kv_scales

    ctypedef struct pkv_layout:
        size_t struct_size
        int32_t block_size
        int32_t num_groups
        const pkv_layer_group *groups

    ctypedef struct pkv_layout_info:
        size_t struct_size
        uint64_t block_bytes
        uint64_t token_bytes
    pkv_status pkv_layout_describe(const pkv_layout *layout, pkv_layout_info *out)

    ctypedef struct pkv_layer_info:
        size_t struct_size
        uint64_t k_offset
        uint64_t v_offset
        int64_t k_token_stride
        int64_t k_head_stride
        int64_t v_token_stride
        int64_t v_head_stride
        uint64_t k_scale_offset
        uint64_t v_scale_offset
        int64_t scale_token_stride
        int64_t scale_head_stride
    pkv_status pkv_layout_layer(const pkv_layout *layout, int32_t layer, pkv_layer_info *out)

    ctypedef struct pkv_rope:
        size_t struct_size
        const pkv_tensor *cos_sin
        float base
        int32_t rotary_dim
        pkv_toggle interleaved

    ctypedef struct pkv_cache:
        pass

    ctypedef enum pkv_eviction:
        PKV_EVICTION_LRU
        PKV_EVICTION_LFU
        PKV_EVICTION_PRIORITY
        PKV_EVICTION_FIFO
        PKV_EVICTION_SLRU
        PKV_EVICTION_S3FIFO

    ctypedef enum pkv_shard:
        PKV_SHARD_NONE
        PKV_SHARD_HEADS
        PKV_SHARD_LAYERS
        PKV_SHARD_SEQUENCES

    ctypedef struct pkv_cache_options:
        size_t struct_size
        const pkv_layout *layout
        int64_t num_blocks
        uint64_t pool_bytes
        double memory_fraction
        const char *device
        void *memory
        uint64_t memory_bytes
        pkv_toggle prefix_caching
        pkv_eviction eviction
        uint64_t hash_seed
        int64_t window
        int64_t sinks
        pkv_toggle partial_reuse
        const pkv_rope *rope
        int64_t low_water
        int64_t event_capacity
        const char *const *devices
        int32_t num_devices
        pkv_shard shard
        uint64_t host_tier_bytes
        int64_t host_tier_blocks
        const char *disk_tier_path
        uint64_t disk_tier_bytes
        const char *tier_identity
        double recompute_tokens_per_second
        int64_t tier_min_hits
        pkv_toggle disk_tier_reset
        int64_t max_num_blocks
    pkv_status pkv_cache_create(const pkv_cache_options *options, pkv_cache **out)
    void pkv_cache_destroy(pkv_cache *cache)
    pkv_status pkv_cache_set_kv_scales(pkv_cache *cache, int32_t layer, const float *k_scale, const float *v_scale)
    pkv_status pkv_cache_evict(pkv_cache *cache, int64_t n, int64_t *out_evicted)
    pkv_status pkv_cache_zero_uncached(pkv_cache *cache, pkv_stream stream, int64_t *out_count)
    pkv_status pkv_cache_reset(pkv_cache *cache)

    ctypedef struct pkv_resize:
        pass

    ctypedef struct pkv_resize_options:
        size_t struct_size
        pkv_toggle move
        pkv_stream stream
    pkv_status pkv_resize_prepare(pkv_cache *cache, int64_t num_blocks, pkv_resize **out)
    pkv_status pkv_resize_commit(pkv_resize *resize, const pkv_resize_options *options)
    void pkv_resize_destroy(pkv_resize *resize)
    pkv_status pkv_cache_resize(pkv_cache *cache, int64_t num_blocks, const pkv_resize_options *options)

    ctypedef struct pkv_cache_stats:
        size_t struct_size
        int64_t num_blocks
        int64_t uncached_blocks
        int64_t cached_blocks
        int64_t held_blocks
        int64_t pending_blocks
        int64_t peak_held_blocks
        int64_t num_sequences
        int64_t queried_tokens
        int64_t hit_tokens
        int64_t appended_tokens
        int64_t registered
        int64_t evictions
        int64_t copies
        int64_t prepares
        int64_t refusals
        uint64_t block_bytes
        void *base
        char device[16]
        int32_t is_failed
        int32_t is_tracing
        int64_t num_pins
        int64_t pinned_blocks
        int64_t num_namespaces
        int64_t partial_hit_tokens
        int64_t released_blocks
        uint64_t num_events
        uint64_t dropped_events
        int64_t reuse_distance[32]
        int64_t num_transfers
        int64_t quarantined_blocks
        uint64_t copied_bytes
        uint64_t uploaded_bytes
        uint64_t saved_bytes
        uint64_t loaded_bytes
        uint64_t device_total_bytes
        uint64_t device_free_bytes
        int64_t unused_slots
        int64_t free_tail_blocks
        int64_t host_tier_blocks
        int64_t host_tier_resident
        int64_t host_hit_tokens
        int64_t disk_hit_tokens
        int64_t tier_misses
        int64_t offloaded_blocks
        int64_t restored_blocks
        int64_t skipped_offloads
        int64_t host_tier_evictions
        int64_t offloaded_sequences
        int64_t offload_rate
        int64_t restore_rate
        int64_t is_disk_tier_on
        int64_t disk_tier_blocks
        int64_t disk_tier_resident
        int64_t disk_writes
        int64_t disk_reads
        int64_t disk_drops
        int64_t disk_damaged
        int64_t disk_write_rate
        int64_t disk_read_rate
        int64_t max_num_blocks
        int64_t moved_blocks
    pkv_status pkv_cache_get_stats(const pkv_cache *cache, pkv_cache_stats *out)

    ctypedef enum pkv_stats_format:
        PKV_STATS_JSON
        PKV_STATS_PROMETHEUS
    pkv_status pkv_cache_format_stats(const pkv_cache *cache, pkv_stats_format format, char *buffer, size_t capacity,
                                      size_t *out_length)
    pkv_status pkv_cache_check(const pkv_cache *cache)
    pkv_status pkv_cache_explain(const pkv_cache *cache, int32_t block, char *buffer, size_t capacity,
                                 size_t *out_length)
    pkv_status pkv_cache_flush_tiers(pkv_cache *cache)
    pkv_status pkv_cache_block_ptr(const pkv_cache *cache, int32_t block, void **out)

    ctypedef struct pkv_shard_info:
        size_t struct_size
        char device[16]
        void *base
        uint64_t block_bytes
        int32_t num_devices
        pkv_shard shard
        int32_t first_layer, num_layers
        int32_t first_kv_head, num_kv_heads
    pkv_status pkv_cache_get_shard(const pkv_cache *cache, int32_t device_index, pkv_shard_info *out)
    pkv_status pkv_cache_get_part(pkv_cache *cache, int32_t device_index, pkv_cache **out)

    # ---- 5. Sequences
    ctypedef uint64_t pkv_sequence

    ctypedef struct pkv_namespace_region:
        int64_t start
        uint64_t namespace_id

    ctypedef struct pkv_open_options:
        size_t struct_size
        uint64_t namespace_id
        int32_t priority
        uint64_t tag
        const pkv_namespace_region *regions
        int64_t num_regions
    pkv_status pkv_sequence_open(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                                 const pkv_open_options *options, pkv_sequence *out, int64_t *out_num_cached)
    pkv_status pkv_sequence_rematch(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t num_tokens,
                                    int64_t *out_num_cached)
    pkv_status pkv_sequence_fork(pkv_cache *cache, pkv_sequence sequence, int64_t length, pkv_sequence *out)
    pkv_status pkv_sequence_reserve(pkv_cache *cache, pkv_sequence sequence, int64_t num_tokens)
    pkv_status pkv_sequence_append(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count,
                                   pkv_stream stream)
    pkv_status pkv_sequence_commit(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count)
    pkv_status pkv_sequence_truncate(pkv_cache *cache, pkv_sequence sequence, int64_t length)
    pkv_status pkv_sequence_close(pkv_cache *cache, pkv_sequence sequence, pkv_stream stream)

    ctypedef struct pkv_sequence_info:
        size_t struct_size
        int64_t length
        int64_t settled_length
        int64_t num_cached_tokens
        int64_t num_blocks
        uint64_t namespace_id
        int32_t priority
        uint64_t tag
        int32_t device_index
        int32_t is_offloaded
    pkv_status pkv_sequence_get_info(const pkv_cache *cache, pkv_sequence sequence, pkv_sequence_info *out)
    pkv_status pkv_sequence_blocks(const pkv_cache *cache, pkv_sequence sequence, pkv_array *out)
    pkv_status pkv_sequence_shift(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t count,
                                  pkv_stream stream)
    pkv_status pkv_sequence_set_retention(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t end,
                                          int32_t priority, int64_t ttl_ms)
    pkv_status pkv_sequence_offload(pkv_cache *cache, pkv_sequence sequence)
    pkv_status pkv_sequence_restore(pkv_cache *cache, pkv_sequence sequence)
    pkv_status pkv_sequence_migrate(pkv_cache *cache, pkv_sequence sequence, int32_t device_index, pkv_stream stream,
                                    pkv_sequence *out)
    pkv_status pkv_sequence_explain(const pkv_cache *cache, pkv_sequence sequence, char *buffer, size_t capacity,
                                    size_t *out_length)
    pkv_status pkv_sequences_open(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const int64_t *counts,
                                  int64_t num_sequences, const pkv_open_options *options, pkv_sequence *out,
                                  int64_t *out_num_cached)
    pkv_status pkv_sequences_fork(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths,
                                  int64_t num_sequences, pkv_sequence *out)
    pkv_status pkv_sequences_commit(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *counts,
                                    int64_t num_sequences, const int64_t *tokens, int64_t num_tokens)
    pkv_status pkv_sequences_truncate(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths,
                                      int64_t num_sequences)
    pkv_status pkv_sequences_close(pkv_cache *cache, const pkv_sequence *sequences, int64_t num_sequences,
                                   pkv_stream stream)
    pkv_status pkv_sequences_reorder(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *sources,
                                     int64_t num_sequences)
    pkv_status pkv_sequences_accept(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *num_drafts,
                                    const int64_t *num_kept, int64_t num_sequences, const int64_t *kept,
                                    int64_t num_kept_tokens, pkv_stream stream)
    pkv_status pkv_cache_victims(const pkv_cache *cache, int64_t n, pkv_sequence *out_sequences, int64_t capacity,
                                 int64_t *out_count)

    # ---- 6. Batch
    ctypedef struct pkv_batch:
        pass

    const uint32_t PKV_FORMAT_TABLE
    const uint32_t PKV_FORMAT_CSR
    const uint32_t PKV_FORMAT_POINTERS

    ctypedef enum pkv_table_memory:
        PKV_TABLES_DEVICE
        PKV_TABLES_MAPPED

    ctypedef struct pkv_batch_options:
        size_t struct_size
        int64_t max_sequences
        int64_t max_tokens
        int64_t max_sequence_length
        int32_t num_heads
        uint32_t formats
        pkv_table_memory tables
        pkv_toggle shared_prefixes
        int64_t min_shared_tokens
    pkv_status pkv_batch_create(pkv_cache *cache, const pkv_batch_options *options, pkv_batch **out)
    void pkv_batch_destroy(pkv_batch *batch)

    ctypedef struct pkv_prepare_options:
        size_t struct_size
        pkv_stream stream
        pkv_toggle register_blocks
        int64_t pad_sequences
        int64_t pad_tokens
        int64_t max_query_len
        int64_t steps_ahead
    pkv_status pkv_batch_prepare(pkv_batch *batch, const pkv_sequence *sequences, const int64_t *counts,
                                 int64_t num_sequences, const int64_t *tokens, int64_t num_tokens,
                                 const pkv_prepare_options *options)
    pkv_status pkv_batch_discard(pkv_batch *batch)

    ctypedef enum pkv_batch_table:
        PKV_BLOCK_TABLE
        PKV_SEQ_LENS
        PKV_CU_SEQLENS_Q
        PKV_SLOT_MAPPING
        PKV_POSITIONS
        PKV_INDPTR
        PKV_INDICES
        PKV_LAST_BLOCK_LEN
        PKV_BLOCK_POINTERS
        PKV_SEQUENCE_PLACES
        PKV_TOKEN_PLACES
        PKV_SHARED_LENS
    pkv_status pkv_batch_get_table(const pkv_batch *batch, pkv_batch_table table, pkv_array *out)
    pkv_status pkv_batch_get_device_table(const pkv_batch *batch, pkv_batch_table table, pkv_array *out)
    pkv_status pkv_batch_get_shard_table(const pkv_batch *batch, pkv_batch_table table, int32_t device_index,
                                         pkv_array *out)

    pkv_status pkv_batch_get_part(pkv_batch *batch, int32_t device_index, pkv_batch **out)

    ctypedef struct pkv_batch_info:
        size_t struct_size
        int64_t num_sequences
        int64_t num_tokens
        int64_t max_query_len
        int64_t max_seq_len
        uint64_t generation
        uint64_t uploaded_bytes
        int64_t num_shared_prefixes
    pkv_status pkv_batch_get_info(const pkv_batch *batch, pkv_batch_info *out)

    pkv_status pkv_batch_advance(pkv_batch *batch, const pkv_tensor *is_active, pkv_stream stream)
    pkv_status pkv_batch_get_advanced(const pkv_batch *batch, int64_t num_sequences, pkv_stream stream,
                                      int64_t *out_counts, int64_t *out_num_refused)
    pkv_status pkv_batch_settle(pkv_batch *batch, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                                int64_t num_tokens)

    # ---- 7. Prefixes and namespaces
    pkv_status pkv_prefix_probe(const pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                                const pkv_open_options *options, int64_t *out_num_cached)
    pkv_status pkv_prefix_touch(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                                const pkv_open_options *options, int64_t *out_num_touched)

    ctypedef uint64_t pkv_pin
    pkv_status pkv_prefix_pin(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                              const pkv_open_options *options, int64_t ttl_ms, pkv_pin *out, int64_t *out_num_pinned)
    pkv_status pkv_prefix_unpin(pkv_cache *cache, pkv_pin pin)
    pkv_status pkv_namespace_invalidate(pkv_cache *cache, uint64_t namespace_id, int64_t *out_count)
    pkv_status pkv_namespace_set_quota(pkv_cache *cache, uint64_t namespace_id, int64_t max_blocks)

    ctypedef struct pkv_namespace_stats:
        size_t struct_size
        int64_t held_blocks
        int64_t cached_blocks
        int64_t quota
        int64_t num_sequences
        int64_t queried_tokens
        int64_t hit_tokens
        int64_t evictions
    pkv_status pkv_namespace_get_stats(const pkv_cache *cache, uint64_t namespace_id, pkv_namespace_stats *out)

    # ---- 8. Snapshots, events, traces
    ctypedef int32_t (*pkv_write_callback)(const void *data, size_t size, void *user_data) noexcept
    ctypedef int32_t (*pkv_read_callback)(void *data, size_t size, void *user_data) noexcept

    ctypedef struct pkv_snapshot_io:
        size_t struct_size
        const char *path
        pkv_write_callback write
        pkv_read_callback read
        void *user_data
    pkv_status pkv_sequence_save(pkv_cache *cache, pkv_sequence sequence, const pkv_snapshot_io *io, pkv_stream stream)
    pkv_status pkv_sequence_load(pkv_cache *cache, const pkv_snapshot_io *io, const pkv_open_options *options,
                                 pkv_stream stream, pkv_sequence *out)
    pkv_status pkv_prefix_save(pkv_cache *cache, const pkv_snapshot_io *io, pkv_stream stream)
    pkv_status pkv_prefix_load(pkv_cache *cache, const pkv_snapshot_io *io, pkv_stream stream, int64_t *out_num_blocks)
    pkv_status pkv_block_hash(const uint8_t *parent, uint64_t namespace_id, const int64_t *tokens, int64_t num_tokens,
                              uint8_t *out)

    ctypedef enum pkv_event_kind:
        PKV_EVENT_STORED
        PKV_EVENT_REMOVED
        PKV_EVENT_MOVED
        PKV_EVENT_CLEARED

    ctypedef struct pkv_event:
        uint64_t serial
        int32_t kind
        int32_t block
        uint64_t namespace_id
        uint8_t hash[32]
        uint8_t parent[32]
    pkv_status pkv_cache_read_events(pkv_cache *cache, pkv_event *out, int64_t capacity, int64_t *out_count)
    pkv_status pkv_trace_start(pkv_cache *cache, const char *path)
    pkv_status pkv_trace_stop(pkv_cache *cache)

    # ---- 9. Kernels
    ctypedef struct pkv_write_options:
        size_t struct_size
        pkv_stream stream
        const pkv_rope *rope
        int32_t device_index
        pkv_toggle pdl
    pkv_status pkv_write_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, const pkv_tensor *k,
                            const pkv_tensor *v, const pkv_write_options *options)
    pkv_status pkv_gather_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index,
                             int64_t start, int64_t count, const pkv_tensor *k, const pkv_tensor *v, pkv_stream stream)
    pkv_status pkv_scatter_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index,
                              int64_t start, int64_t count, const pkv_tensor *k, const pkv_tensor *v, pkv_stream stream)
    pkv_status pkv_gather_shard_kv(pkv_cache *cache, int32_t device_index, int32_t layer, const pkv_batch *batch,
                                   int64_t sequence_index, int64_t start, int64_t count, const pkv_tensor *k,
                                   const pkv_tensor *v, pkv_stream stream)
    pkv_status pkv_scatter_shard_kv(pkv_cache *cache, int32_t device_index, int32_t layer, const pkv_batch *batch,
                                    int64_t sequence_index, int64_t start, int64_t count, const pkv_tensor *k,
                                    const pkv_tensor *v, pkv_stream stream)

    ctypedef struct pkv_attend_options:
        size_t struct_size
        pkv_stream stream
        float scale
        pkv_toggle causal
        int64_t window
        float softcap
        const pkv_tensor *sinks
        const pkv_tensor *alibi_slopes
        const pkv_tensor *lse
        const pkv_tensor *tree_mask
        pkv_toggle invariant
        int32_t device_index
        pkv_toggle pdl
    pkv_status pkv_attend(pkv_cache *cache, int32_t layer, const pkv_batch *batch, const pkv_tensor *q,
                          const pkv_tensor *out, const pkv_attend_options *options)
    pkv_status pkv_merge_states(const char *device, const pkv_tensor *out_a, const pkv_tensor *lse_a,
                                const pkv_tensor *out_b, const pkv_tensor *lse_b, const pkv_tensor *out,
                                const pkv_tensor *lse, pkv_stream stream)

    # ---- 10. Host backend settings
    pkv_status pkv_host_set_num_threads(int32_t num_threads)
    int32_t pkv_host_num_threads()
    pkv_status pkv_host_set_isa(const char *isa)
    const char *pkv_host_isa()

    # ---- 11. Transfers
    ctypedef uint64_t pkv_transfer
    pkv_status pkv_transfer_send(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t end,
                                 pkv_stream stream, pkv_transfer *out, pkv_array *out_blocks)
    pkv_status pkv_transfer_receive(pkv_cache *cache, int64_t num_blocks, const pkv_open_options *options,
                                    pkv_stream stream, pkv_transfer *out, pkv_array *out_blocks)
    pkv_status pkv_transfer_commit(pkv_cache *cache, pkv_transfer transfer, const int64_t *tokens,
                                   int64_t num_tokens, pkv_stream stream, pkv_sequence *out)
    pkv_status pkv_transfer_quarantine(pkv_cache *cache, pkv_transfer transfer)
    pkv_status pkv_transfer_finish(pkv_cache *cache, pkv_transfer transfer)

    ctypedef struct pkv_memory_region:
        size_t struct_size
        void *base
        uint64_t bytes
        uint64_t block_bytes
        int64_t first_block
        int64_t num_blocks
        char device[16]
    pkv_status pkv_cache_get_regions(const pkv_cache *cache, pkv_memory_region *out, int64_t capacity,
                                     int64_t *out_count)
    pkv_status pkv_layout_fingerprint(const pkv_layout *layout, const void *model, size_t model_bytes, uint8_t *out)

    # ---- 12. Monitoring
    ctypedef struct pkv_cache_fragmentation:
        size_t struct_size
        int64_t held_blocks
        int64_t unused_slots
        int64_t reserved_blocks
        int64_t free_tail_blocks
        int64_t num_free_runs
        int64_t longest_free_run
    pkv_status pkv_cache_measure(pkv_cache *cache, pkv_cache_fragmentation *out)
    pkv_status pkv_cache_publish_stats(pkv_cache *cache, const char *path)
    pkv_status pkv_cache_unpublish_stats(pkv_cache *cache)

    ctypedef void (*pkv_range_push_callback)(const char *name, void *user_data) noexcept
    ctypedef void (*pkv_range_pop_callback)(void *user_data) noexcept
    pkv_status pkv_set_range_callbacks(pkv_range_push_callback push, pkv_range_pop_callback pop, void *user_data)
    pkv_status pkv_nvtx_enable(const char *path)
