/*
 * pagedkv.h - a paged KV cache for LLM inference: the C ABI of libpagedkv.
 *
 * Read from top to bottom:
 *   1. conventions, status codes, errors, log        7. prefixes and namespaces, without a sequence
 *   2. data types and tensors                        8. snapshots, events, traces
 *   3. devices, pool                                 9. kernels: write_kv, attend, merge_states
 *   4. layout, cache                                10. host backend settings
 *   5. sequences, one at a time and many in a call  11. transfers
 *   6. batch: one step's view of the cache         12. monitoring
 *
 * Conventions
 *   - Every call that can fail returns pkv_status. On failure nothing has changed, and pkv_last_error() says why.
 *   - Out parameters stand last. A NULL pointer argument is an error or, where it says so, a no-op; never a crash.
 *   - Option and statistics structs start with struct_size: set it to sizeof the struct and zero the rest; zero means
 *     the default. Structs grow at their end only; non-zero bytes beyond what this library knows are refused.
 *   - Handles are opaque. destroy() returns nothing and accepts NULL. A handle keeps alive what it was made from, so
 *     handles may be destroyed in any order.
 *   - A block holds a fixed number of token slots of all layers. Block ids are int32_t; slots (block * block_size +
 *     offset), byte offsets, lengths and strides are 64-bit.
 *   - A call that takes a stream queues its work there and does not wait. On the host backend the work is done when the
 *     call returns and streams are ignored.
 *   - Work of several streams on one cache is ordered by the library, as of each call: where a block goes from one stream
 *     to another, the second waits. Queue a step's kernels before the next call on another stream. A stream must exist
 *     while sequences are open whose last step was on it.
 *   - Threads: a pool may be used from any thread. A cache and its batches take one mutating thread at a time.
 *     pkv_write_kv and pkv_attend read the batch and constants of the cache only, so they may run while another thread
 *     mutates the cache. Functions that get statistics may be called from any thread at any time.
 *   - No exception, print, abort or exit crosses this interface, and no environment variable is read.
 */
#ifndef PAGEDKV_PAGEDKV_H_
#define PAGEDKV_PAGEDKV_H_

#include <stddef.h>
#include <stdint.h>

#define PKV_VERSION_MAJOR 0
#define PKV_VERSION_MINOR 1
#define PKV_VERSION_PATCH 0
#define PKV_VERSION_STRING "0.1.0"

#if defined(__GNUC__)
#define PKV_API __attribute__((visibility("default")))
#else
#define PKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Status, errors, log ---------------------------------------------------------------------------------- */

/* Values are pinned; new ones are only appended. */
typedef enum pkv_status {
  PKV_OK = 0,
  PKV_INVALID_ARGUMENT = 1, /* the call is wrong, whatever the state: a value, a shape, a NULL */
  PKV_NOT_FOUND = 2,        /* a sequence that was closed or never existed */
  PKV_OUT_OF_MEMORY = 3,    /* host or device memory could not be had */
  PKV_OUT_OF_BLOCKS = 4,    /* not now: close or preempt sequences, then retry; see pkv_last_shortage */
  PKV_NEVER_FITS = 5,       /* larger than the whole pool: retrying is in vain; see pkv_last_shortage */
  PKV_BUSY = 6,             /* refused while something is still in use */
  PKV_UNSUPPORTED = 7,      /* valid, but not available here; the text names the value */
  PKV_DEVICE_ERROR = 8,     /* the device or its driver failed */
  PKV_INTERNAL = 9          /* a broken invariant: a bug of this library */
} pkv_status;

/* "OUT_OF_BLOCKS" and so on; a constant string, also for unknown values. */
PKV_API const char *pkv_status_name(pkv_status status);
/* Version of the loaded library, "major.minor.patch". */
PKV_API const char *pkv_version(void);
/* Text of the last failure in the calling thread: one line with the offending value; "" before the first. Valid until
 * the thread's next failing call. */
PKV_API const char *pkv_last_error(void);

/* Numbers of the calling thread's last OUT_OF_BLOCKS or NEVER_FITS; zeros before the first. */
typedef struct pkv_shortage {
  size_t struct_size;
  int64_t needed;    /* blocks that the refused call needed */
  int64_t available; /* blocks it could have had: uncached and evictable ones, or the whole pool for NEVER_FITS */
  int64_t index;     /* position in the call of the first sequence that does not fit; 0 for single-sequence calls */
} pkv_shortage;
PKV_API pkv_status pkv_last_shortage(pkv_shortage *out);

typedef enum pkv_log_level {
  PKV_LOG_DEBUG = 0,
  PKV_LOG_INFO = 1,
  PKV_LOG_WARNING = 2,
  PKV_LOG_ERROR = 3
} pkv_log_level;

/* Called with one line of text and the pointer given at registration, from any thread, never from inside a call that
 * mutates a cache. It must not call the library and must not throw. */
typedef void (*pkv_log_callback)(pkv_log_level level, const char *message, void *user_data);

/* Sets the process-wide callback; NULL switches the log off (the default). */
PKV_API pkv_status pkv_set_log_callback(pkv_log_callback callback, void *user_data);

/* ---- 2. Data types and tensors ------------------------------------------------------------------------------- */

typedef enum pkv_dtype {
  PKV_DTYPE_NONE = 0,
  PKV_FLOAT32 = 1,
  PKV_FLOAT16 = 2,
  PKV_BFLOAT16 = 3,
  PKV_FLOAT8_E4M3 = 4, /* OCP E4M3 (no infinities, NaN = 0x7f / 0xff, largest 448) */
  PKV_FLOAT8_E5M2 = 5, /* OCP E5M2 (largest finite 57344) */
  PKV_INT8 = 6,
  PKV_INT32 = 7, /* tables only */
  PKV_INT64 = 8, /* tables only */
  PKV_BOOL = 9   /* masks only: a byte, any non-zero one is true */
} pkv_dtype;

/* "bfloat16" and so on, NULL for an unknown value; and back. */
PKV_API const char *pkv_dtype_name(pkv_dtype dtype);
PKV_API pkv_status pkv_dtype_parse(const char *name, pkv_dtype *out);

/* 0 is the library's choice in every struct. */
typedef enum pkv_toggle { PKV_DEFAULT = 0, PKV_ON = 1, PKV_OFF = 2 } pkv_toggle;

/* A stream of the device (cudaStream_t); NULL is the device's default stream. Of a cache over several devices every call
 * but the kernels takes NULL, the default stream of each device, or the address of an array of pkv_stream, one of each
 * device in order, that is read during the call. Kernels take the stream of the device that they run on. */
typedef void *pkv_stream;

/* Where a call takes a stream for a sequence: the stream of its last prepare. */
#define PKV_STREAM_OF_SEQUENCE ((pkv_stream)(intptr_t)-1)

/* A strided array that the caller owns, on the device of the call it is given to. The last dimension is contiguous. */
typedef struct pkv_tensor {
  void *data;
  pkv_dtype dtype;
  int32_t ndim;       /* 1 to 4 */
  int64_t shape[4];
  int64_t strides[4]; /* in elements; all zero: contiguous, row-major */
} pkv_tensor;

/* An array on the host that the library owns. It stays valid, whatever is closed, until it is released; its contents
 * follow the object it was taken from until that object moves or drops its table. */
typedef struct pkv_array {
  const void *data;
  pkv_dtype dtype;
  int32_t ndim;
  int64_t shape[2];
  int64_t strides[2]; /* in bytes */
  void *owner;        /* the library's */
} pkv_array;

/* Releases an array once and clears it; NULL and cleared arrays are no-ops. Any thread. */
PKV_API void pkv_array_release(pkv_array *array);

/* ---- 3. Devices and pool ------------------------------------------------------------------------------------- */

/* Devices are named by strings: "host", "cuda" (ordinal 0), "cuda:1", or "auto": cuda where it works, else host.
 * NULL is "auto". "host:0" to "host:63" are independent devices over the host's memory, for caches over several. */

typedef struct pkv_cuda_info {
  size_t struct_size;
  int32_t is_built;        /* this library contains the CUDA backend */
  int32_t is_usable;       /* and a device can be used here */
  int32_t built_version;   /* CUDA version built with, 1000 * major + 10 * minor; 0 without CUDA */
  int32_t driver_version;  /* CUDA version that the driver supports; 0 without a driver */
  int32_t num_devices;
  char reason[256];        /* why it is not usable, one line; "" if it is */
} pkv_cuda_info;
PKV_API pkv_status pkv_cuda_query(pkv_cuda_info *out);

typedef struct pkv_device_info {
  size_t struct_size;
  char device[16]; /* the resolved name: "host", "cuda:0" */
  char name[128];  /* of the processor */
  uint64_t total_bytes;
  uint64_t free_bytes; /* what an allocation may hope for now */
  int32_t compute_capability; /* 10 * major + minor; 0 on the host */
  int32_t num_processors;     /* multiprocessors, or threads that the host kernels use */
} pkv_device_info;
PKV_API pkv_status pkv_device_query(const char *device, pkv_device_info *out);

/*
 * A pool: fixed-size blocks of one device, from one allocation up front. Blocks are handed out last in, first out, and
 * counted by owners. Every operation is O(1) a block; a double free, a foreign id or an id twice in one free is refused
 * before anything changes. Thread-safe.
 */
typedef struct pkv_pool pkv_pool;

typedef struct pkv_pool_options {
  size_t struct_size;
  uint64_t block_bytes; /* rounded up to a multiple of 256 */
  int64_t num_blocks;   /* up to 2^31 - 1; 0 with memory given: as many as fit */
  const char *device;
  void *memory;          /* not NULL: use this memory of the device, which the caller keeps until the pool is gone */
  uint64_t memory_bytes; /* its size; blocks start at the first multiple of 256 in it */
  int64_t max_num_blocks; /* not 0: the pool is to be resized, up to so many blocks. Not with memory */
} pkv_pool_options;

PKV_API pkv_status pkv_pool_create(const pkv_pool_options *options, pkv_pool **out);
PKV_API void pkv_pool_destroy(pkv_pool *pool);

/* Takes count blocks, all or none; each has one owner. out_blocks: [count]. */
PKV_API pkv_status pkv_pool_allocate(pkv_pool *pool, int64_t count, int32_t *out_blocks);
/* Adds an owner to each block. A block may appear more than once. */
PKV_API pkv_status pkv_pool_retain(pkv_pool *pool, const int32_t *blocks, int64_t count);
/* Drops one owner of each block; a block without owners is free. A block may appear only once in a call. */
PKV_API pkv_status pkv_pool_free(pkv_pool *pool, const int32_t *blocks, int64_t count);
/* Address of a block, a multiple of 256, whether it is free or not. */
PKV_API pkv_status pkv_pool_block_ptr(const pkv_pool *pool, int32_t block, void **out);

/* Grows the pool, or shrinks it where no block of the tail is owned (else BUSY). Addresses do not change; what is cut off
 * goes back to the system, on a device when everything that is queued there is done. UNSUPPORTED for adopted memory, and
 * for a device's memory without max_num_blocks, beyond it, or where the driver cannot. */
PKV_API pkv_status pkv_pool_resize(pkv_pool *pool, int64_t num_blocks);

/* Copies block source[i] to block destination[i] for all i as if at once: every source is read before any destination
 * is written. A destination may appear only once; all blocks must be owned. */
PKV_API pkv_status pkv_pool_copy_blocks(pkv_pool *pool, const int32_t *sources, const int32_t *destinations,
                                        int64_t count, pkv_stream stream);

/* Fills blocks with zeros. All must be owned; one may appear more than once. */
PKV_API pkv_status pkv_pool_zero_blocks(pkv_pool *pool, const int32_t *blocks, int64_t count, pkv_stream stream);

/* Blocks in all, and free ones; 0 for NULL. */
PKV_API int64_t pkv_pool_num_blocks(const pkv_pool *pool);
PKV_API int64_t pkv_pool_num_free(const pkv_pool *pool);

/* Counters, and the device's memory, which takes longer to find. */
typedef struct pkv_pool_stats {
  size_t struct_size;
  int64_t num_blocks;
  int64_t num_free;
  int64_t peak_used;     /* most blocks ever owned at once */
  int64_t allocations;   /* blocks handed out since the start */
  int64_t frees;         /* blocks that became free since the start */
  int64_t failures;      /* allocate calls refused for want of blocks */
  uint64_t block_bytes;
  uint64_t device_total_bytes;
  uint64_t device_free_bytes;
  void *base;            /* address of block 0 */
  char device[16];
  uint64_t copied_bytes; /* by pkv_pool_copy_blocks */
  uint64_t zeroed_bytes;
  int64_t free_tail_blocks; /* free blocks at the end: what the pool could shrink by now */
} pkv_pool_stats;
PKV_API pkv_status pkv_pool_get_stats(const pkv_pool *pool, pkv_pool_stats *out);

/* ---- 4. Layout, cache ---------------------------------------------------------------------------------------- */

/* Order of the two inner dimensions of a K or V plane: [token][head][dim] or [head][token][dim]. */
typedef enum pkv_kv_order { PKV_TOKEN_HEAD = 0, PKV_HEAD_TOKEN = 1 } pkv_kv_order;

/* Scales of quantised K and V (float8, int8): value = stored * scale.
 * STATIC: one float32 per layer and KV head, set by pkv_cache_set_kv_scales, 1 at first.
 * PER_TOKEN_HEAD: one float32 per token and KV head, found at writing from the row's largest magnitude, kept in the
 * block behind its planes: [layer][K | V] and the plane's order without dim. Quantised dtypes only. */
typedef enum pkv_kv_scales { PKV_SCALES_STATIC = 0, PKV_SCALES_PER_TOKEN_HEAD = 1 } pkv_kv_scales;

/* Layers that share a shape. */
typedef struct pkv_layer_group {
  size_t struct_size;
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t head_dim;   /* a multiple of 8 up to 256 */
  int32_t v_head_dim; /* 0: head_dim */
  pkv_dtype dtype;    /* of stored K and V */
  pkv_kv_order order;
  pkv_kv_scales kv_scales;
} pkv_layer_group;

typedef struct pkv_layout {
  size_t struct_size;
  int32_t block_size;            /* tokens per block, 1 to 65536 */
  int32_t num_groups;            /* 1 in this version */
  const pkv_layer_group *groups; /* [num_groups], groups[0].struct_size bytes apart; read during the call only */
} pkv_layout;

typedef struct pkv_layout_info {
  size_t struct_size;
  uint64_t block_bytes; /* all layers, K and V, padding and scales: a multiple of 256 */
  uint64_t token_bytes; /* of one token's K and V over all layers, without padding and scales */
} pkv_layout_info;
PKV_API pkv_status pkv_layout_describe(const pkv_layout *layout, pkv_layout_info *out);

/* Where one layer's K and V stand inside a block; the same in every block. Every plane starts at a multiple of 16. */
typedef struct pkv_layer_info {
  size_t struct_size;
  uint64_t k_offset, v_offset;             /* bytes from the start of the block */
  int64_t k_token_stride, k_head_stride;   /* elements */
  int64_t v_token_stride, v_head_stride;   /* elements */
  uint64_t k_scale_offset, v_scale_offset; /* bytes; 0 with static scales */
  int64_t scale_token_stride, scale_head_stride; /* float32 elements; 0 with static scales */
} pkv_layer_info;
PKV_API pkv_status pkv_layout_layer(const pkv_layout *layout, int32_t layer, pkv_layer_info *out);

/* Rotary position embedding of K rows. Pair i of rotary_dim / 2 turns by its angle at the token's position: a' = a cos
 * - b sin, b' = b cos + a sin. Dims from rotary_dim on stay as they are. */
typedef struct pkv_rope {
  size_t struct_size;
  const pkv_tensor *cos_sin; /* float32 [max_positions, rotary_dim] on the cache's device: of each position the cosines,
                                then the sines, of its rotary_dim / 2 angles; or NULL: angles by base */
  float base;                /* angle i of position p is p * base^(-2i / rotary_dim); 0: 10000. Unused with cos_sin */
  int32_t rotary_dim;        /* even, up to head_dim; 0: head_dim */
  pkv_toggle interleaved;    /* default off: dim i pairs with i + rotary_dim / 2 (NeoX). On: 2i with 2i + 1 (GPT-J) */
} pkv_rope;

/*
 * A cache: token sequences over the blocks of a pool of its own, with a prefix cache.
 *
 * Full blocks whose tokens are known are registered under the hash chain (namespace, parent block, tokens). A later
 * sequence with the same prefix takes them instead of computing them. A registered block that nobody holds is cached:
 * it stays findable until it is evicted, in the order of the eviction policy. At every moment uncached + cached + held
 * + pending == num_blocks.
 */
typedef struct pkv_cache pkv_cache;

/* Which cached block goes first. Whatever the policy, blocks of a lower retention priority go before those of a higher
 * one (pkv_sequence_set_retention; 0 without a hint), and of one sequence children go before their parents. */
typedef enum pkv_eviction {
  PKV_EVICTION_LRU = 0,      /* least recently released first */
  PKV_EVICTION_LFU = 1,      /* fewest hits first, then least recently released */
  PKV_EVICTION_PRIORITY = 2, /* lowest priority of the sequences that held it first, then least recently released */
  PKV_EVICTION_FIFO = 3,     /* first cached first; hits change nothing */
  PKV_EVICTION_SLRU = 4,     /* segmented LRU: a block that was hit is protected, up to 80 % of the pool */
  PKV_EVICTION_S3FIFO = 5    /* S3-FIFO (Yang et al., SOSP 2023): a small queue filters blocks that are never hit */
} pkv_eviction;

/* How one cache lies over several devices (docs/several-devices.md). With heads or layers one manager decides for all of
 * them: block ids are the same everywhere. num_kv_heads and layers are the whole model's. */
typedef enum pkv_shard {
  PKV_SHARD_NONE = 0,
  PKV_SHARD_HEADS = 1,  /* tensor parallel: each device has an equal share of the KV heads of every layer, in order */
  PKV_SHARD_LAYERS = 2, /* pipeline: each has layers in a row; the first num_layers % num_devices have one more */
  PKV_SHARD_SEQUENCES = 3 /* data parallel: each has whole sequences, with a manager and num_blocks of its own. open chooses
                             the longest hit, then the most free blocks, then the fewest open sequences. What asks for
                             blocks or pins by number is asked of a part (pkv_cache_get_part), else UNSUPPORTED */
} pkv_shard;

typedef struct pkv_cache_options {
  size_t struct_size;
  const pkv_layout *layout;  /* read during the call only */
  int64_t num_blocks;        /* or one of the next two */
  uint64_t pool_bytes;       /* as many blocks as fit into so many bytes; of each device */
  double memory_fraction;    /* of the device's free memory, in (0, 1] */
  const char *device;
  void *memory;              /* adopted like pkv_pool_options.memory */
  uint64_t memory_bytes;
  pkv_toggle prefix_caching; /* default on */
  pkv_eviction eviction;
  uint64_t hash_seed;        /* key of the local block hash; 0: random. Never changes results, only collisions */
  int64_t window;            /* 0, or the sliding window of the model in tokens: prepare and commit release blocks that
                                no later query can see. Their table entries become -1 and are attended by no kernel */
  int64_t sinks;             /* with window: so many first tokens are kept */
  pkv_toggle partial_reuse;  /* default off. On: open also takes the cached block that shares its first tokens with the
                                rest of the prompt; the first append copies it */
  const pkv_rope *rope;      /* how the caller rotates K (by base), for pkv_sequence_shift; NULL: it is UNSUPPORTED */
  int64_t low_water;         /* uncached blocks that pkv_cache_evict(-1) keeps ready */
  int64_t event_capacity;    /* events kept until they are read; 0: none are made */
  const char *const *devices; /* [num_devices] in place of device: a cache over several of one kind, host or CUDA. A device
                                may stand more than once */
  int32_t num_devices;       /* 0: device alone */
  pkv_shard shard;           /* what each of several devices holds */
  /* Tiers (docs/tiers.md): where evicted blocks go, so that a later open finds them again. Of several devices together;
   * with PKV_SHARD_SEQUENCES each has an equal share of the slots and of the bytes on disk, in a file of its own, whose
   * name is the path, a dot and the number of the device. */
  uint64_t host_tier_bytes;   /* pinned host memory for as many blocks as fit; 0: no host tier */
  int64_t host_tier_blocks;   /* or so many blocks */
  const char *disk_tier_path; /* NULL, or the file behind the host tier; made where there is none, kept at the end. One
                                 cache at a time. If it cannot be used the log says so and the cache goes on without */
  uint64_t disk_tier_bytes;   /* largest size of the file */
  const char *tier_identity;  /* NULL, or a name of the model and its weights: a file of another one is left alone */
  double recompute_tokens_per_second; /* only what is cheaper to fetch than to compute anew is offloaded; 0: everything */
  int64_t tier_min_hits;      /* blocks that were hit less often are not offloaded */
  pkv_toggle disk_tier_reset; /* default off. On: pkv_cache_reset empties the file, too */
  int64_t max_num_blocks;    /* not 0: the cache is to be resized, up to so many blocks. Not with memory */
} pkv_cache_options;

PKV_API pkv_status pkv_cache_create(const pkv_cache_options *options, pkv_cache **out);
PKV_API void pkv_cache_destroy(pkv_cache *cache);

/* Static scales of a layer, float32 [num_kv_heads] on the host, finite and positive; quantised dtypes only. */
PKV_API pkv_status pkv_cache_set_kv_scales(pkv_cache *cache, int32_t layer, const float *k_scale, const float *v_scale);

/* Makes n uncached blocks ready ahead of need, by evicting where there are fewer. OUT_OF_BLOCKS when fewer than n
 * blocks can be had. n = -1: as many as low_water, or as can be had. out_evicted may be NULL. */
PKV_API pkv_status pkv_cache_evict(pkv_cache *cache, int64_t n, int64_t *out_evicted);

/* Fills every uncached block with zeros, in idle time: what one tenant left behind no other one finds. Cached blocks
 * are not touched; pkv_cache_evict makes them uncached. stream: that of the steps, or one behind them. out_count: how
 * many blocks; may be NULL. */
PKV_API pkv_status pkv_cache_zero_uncached(pkv_cache *cache, pkv_stream stream, int64_t *out_count);

/* Forgets every cached block, in the host tier too, and every pin. BUSY while sequences or transfers are open. */
PKV_API pkv_status pkv_cache_reset(pkv_cache *cache);

/*
 * Resizing, of a cache made with max_num_blocks: prepare maps memory and takes nothing from the running cache, so it may
 * take its time in any thread; commit is the change, by the mutating thread between two steps, and is quick; destroy, in
 * any thread, gives back the memory that is not used any more, on a device when all that is queued there is done. Without
 * a commit it undoes the prepare. One resize of a cache at a time; a second prepare is BUSY.
 *
 * Growing changes no block and no table. Shrinking evicts what is cached in the tail, and is BUSY if something there is
 * held. With move it evicts as many cached blocks as the rest has no room for, by the policy, and moves all others of
 * the tail, held or cached, into free ones: tables, pins and the prefix index follow, and readers of events are told. It
 * is OUT_OF_BLOCKS if more is held than is to be left, and BUSY if a transfer uses a block of the tail. A shrink makes
 * steps prepared before it stale: they cannot be discarded or used by kernels (INVALID_ARGUMENT), and generation changes.
 * No kernel call of the cache may run meanwhile.
 *
 * Over several devices all are resized, or none. With PKV_SHARD_SEQUENCES each part gets num_blocks (stream: an array, as
 * everywhere); a part is resized by itself, too.
 */
typedef struct pkv_resize pkv_resize;

typedef struct pkv_resize_options {
  size_t struct_size;
  pkv_toggle move;   /* default off */
  pkv_stream stream; /* with move: where the copies are queued, behind all steps of before; later ones are behind it */
} pkv_resize_options;

/* INVALID_ARGUMENT or UNSUPPORTED for a size beyond what can be; OUT_OF_MEMORY. */
PKV_API pkv_status pkv_resize_prepare(pkv_cache *cache, int64_t num_blocks, pkv_resize **out);
/* options may be NULL. A refused one may be tried again. */
PKV_API pkv_status pkv_resize_commit(pkv_resize *resize, const pkv_resize_options *options);
PKV_API void pkv_resize_destroy(pkv_resize *resize);
/* The three in one call, by the mutating thread. */
PKV_API pkv_status pkv_cache_resize(pkv_cache *cache, int64_t num_blocks, const pkv_resize_options *options);

typedef struct pkv_cache_stats {
  size_t struct_size;
  int64_t num_blocks;
  int64_t uncached_blocks; /* free, nothing in them */
  int64_t cached_blocks;   /* free of sequences, findable */
  int64_t held_blocks;     /* by sequences, reserved ones included, and by pins */
  int64_t pending_blocks;  /* held by transfers alone */
  int64_t peak_held_blocks;
  int64_t num_sequences;
  int64_t queried_tokens;  /* tokens of all opened prompts */
  int64_t hit_tokens;      /* of those, found in the prefix cache */
  int64_t appended_tokens;
  int64_t registered;      /* blocks made findable */
  int64_t evictions;
  int64_t copies;          /* copy-on-write copies of blocks */
  int64_t prepares;
  int64_t refusals;        /* calls refused for want of blocks */
  uint64_t block_bytes;
  void *base;              /* address of block 0 */
  char device[16];
  int32_t is_failed;       /* a device error left the cache unusable */
  int32_t is_tracing;      /* calls are being recorded */
  int64_t num_pins;
  int64_t pinned_blocks;   /* held by pins, whoever else holds them */
  int64_t num_namespaces;  /* that have sequences, blocks or a quota */
  int64_t partial_hit_tokens; /* of hit_tokens, those inside a block (partial_reuse) */
  int64_t released_blocks; /* by the sliding window */
  uint64_t num_events;     /* made since the start */
  uint64_t dropped_events; /* of those, lost because nobody read them in time */
  /* Hits by reuse distance: [i] counts blocks hit again after 2^i to 2^(i + 1) - 1 other uses (hits and registrations)
   * of blocks; 0 and 1 in [0], the last one everything beyond. */
  int64_t reuse_distance[32];
  int64_t num_transfers;
  int64_t quarantined_blocks; /* of quarantined transfers, whoever else holds them */
  uint64_t copied_bytes;       /* of K and V inside the device: copies on write, rows moved by accept and shift */
  uint64_t uploaded_bytes;     /* of tables to the device; 0 on the host, which reads them where they are */
  uint64_t saved_bytes;        /* of blocks read for snapshots */
  uint64_t loaded_bytes;       /* of blocks written from snapshots */
  uint64_t device_total_bytes; /* asked when the cache is made, by pkv_cache_measure and for PKV_STATS_PROMETHEUS */
  uint64_t device_free_bytes;
  int64_t unused_slots;        /* by pkv_cache_measure; -1 before the first */
  int64_t free_tail_blocks;
  /* Tiers. Bytes are blocks times block_bytes. */
  int64_t host_tier_blocks;    /* room in the host tier */
  int64_t host_tier_resident;  /* of that, in use: findable, or of offloaded sequences */
  int64_t host_hit_tokens;     /* of hit_tokens, restored from the host tier */
  int64_t disk_hit_tokens;     /* of hit_tokens, restored from the disk tier */
  int64_t tier_misses;         /* prompts that no tier continued */
  int64_t offloaded_blocks;    /* copied from the device to the host tier */
  int64_t restored_blocks;     /* and back */
  int64_t skipped_offloads;    /* evicted blocks that were let go: by the policy, or for want of room */
  int64_t host_tier_evictions; /* blocks that the host tier gave up for others */
  int64_t offloaded_sequences; /* now */
  int64_t offload_rate;        /* measured, bytes per second; 0: not yet */
  int64_t restore_rate;
  int64_t is_disk_tier_on;     /* 0 without one, and after an error */
  int64_t disk_tier_blocks;
  int64_t disk_tier_resident;
  int64_t disk_writes;         /* blocks */
  int64_t disk_reads;
  int64_t disk_drops;          /* blocks that the host tier gave up before they were written */
  int64_t disk_damaged;        /* blocks of the file that were found damaged */
  int64_t disk_write_rate;
  int64_t disk_read_rate;
  int64_t max_num_blocks; /* that it may grow to */
  int64_t moved_blocks;   /* by resizes */
} pkv_cache_stats;
PKV_API pkv_status pkv_cache_get_stats(const pkv_cache *cache, pkv_cache_stats *out);

typedef enum pkv_stats_format { PKV_STATS_JSON = 1, PKV_STATS_PROMETHEUS = 2 } pkv_stats_format;

/* The statistics as one JSON object, or in the Prometheus text format (0.0.4), names pagedkv_*. Writes at most capacity
 * bytes, always terminated; out_length is the full length without the terminator. buffer may be NULL if capacity is 0.
 * Any thread. */
PKV_API pkv_status pkv_cache_format_stats(const pkv_cache *cache, pkv_stats_format format, char *buffer,
                                          size_t capacity, size_t *out_length);

/* Full audit of every count, list, table and hash; INTERNAL names the block or sequence that breaks an invariant. */
PKV_API pkv_status pkv_cache_check(const pkv_cache *cache);
/* One JSON object about a block: state, holders, hash, why it cannot be evicted. Buffers: see pkv_cache_format_stats. */
PKV_API pkv_status pkv_cache_explain(const pkv_cache *cache, int32_t block, char *buffer, size_t capacity,
                                     size_t *out_length);

/* Returns when what was offloaded has arrived in the host tier, and what is findable there has been written to the disk
 * tier; DEVICE_ERROR if that is switched off. A no-op without tiers. */
PKV_API pkv_status pkv_cache_flush_tiers(pkv_cache *cache);

/* Address of a block on the device; of several on the first (pkv_cache_get_shard has the others). */
PKV_API pkv_status pkv_cache_block_ptr(const pkv_cache *cache, int32_t block, void **out);

/* What the device_index-th device of a cache holds. Where layers stand in its blocks, pkv_layout_layer says of a layout
 * with so many layers and heads. */
typedef struct pkv_shard_info {
  size_t struct_size;
  char device[16];
  void *base;           /* address of block 0 */
  uint64_t block_bytes; /* of its part of a block */
  int32_t num_devices;  /* of the cache */
  pkv_shard shard;
  int32_t first_layer, num_layers;     /* of the model's, those that it holds */
  int32_t first_kv_head, num_kv_heads; /* likewise */
} pkv_shard_info;
PKV_API pkv_status pkv_cache_get_shard(const pkv_cache *cache, int32_t device_index, pkv_shard_info *out);

/* With PKV_SHARD_SEQUENCES, what one device holds, as a cache of its own: the same sequences under the same ids, its own
 * block ids, statistics, pins, victims, snapshots, events, traces. The handle belongs to the cache; destroying it does
 * nothing. The cache and its parts take one mutating thread together. */
PKV_API pkv_status pkv_cache_get_part(pkv_cache *cache, int32_t device_index, pkv_cache **out);

/* ---- 5. Sequences -------------------------------------------------------------------------------------------- */

/* A sequence: index and generation, never 0. One that was closed is NOT_FOUND, in O(1). */
typedef uint64_t pkv_sequence;

/* From token start on, a prompt belongs to another namespace: a system prompt that all share, then tails that only one
 * tenant finds. The block that start lies in belongs to the later namespace as a whole. */
typedef struct pkv_namespace_region {
  int64_t start; /* > 0, ascending */
  uint64_t namespace_id;
} pkv_namespace_region;

typedef struct pkv_open_options {
  size_t struct_size;
  uint64_t namespace_id; /* prompts of different namespaces never share blocks */
  int32_t priority;      /* larger is kept longer */
  uint64_t tag;          /* the caller's own number, shown in explain */
  const pkv_namespace_region *regions; /* [num_regions], copied; NULL if none */
  int64_t num_regions;
} pkv_open_options;

/* Opens a sequence and takes the longest cached prefix of tokens ([num_tokens], each >= 0), at most
 * floor((num_tokens - 1) / block_size) blocks: one token is always left to compute. Allocates nothing: append the rest
 * by prepare. options may be NULL; out_num_cached too. */
PKV_API pkv_status pkv_sequence_open(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                                     const pkv_open_options *options, pkv_sequence *out, int64_t *out_num_cached);

/* Before the first append: looks for a longer cached prefix of the same tokens, so that equal prompts that were opened
 * together share. INVALID_ARGUMENT after an append, or if tokens contradict the prefix already taken. */
PKV_API pkv_status pkv_sequence_rematch(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens,
                                        int64_t num_tokens, int64_t *out_num_cached);

/* A copy that shares every block of the first length tokens (-1: all), the partial last one too; the first of the
 * holders to write into it gets a copy. */
PKV_API pkv_status pkv_sequence_fork(pkv_cache *cache, pkv_sequence sequence, int64_t length, pkv_sequence *out);

/* Takes blocks ahead of need so that num_tokens more tokens can be appended without failing; all or none. They belong
 * to the sequence until it appends, is truncated or closed. A later fork inside a block may cost one block more. */
PKV_API pkv_status pkv_sequence_reserve(pkv_cache *cache, pkv_sequence sequence, int64_t num_tokens);

/* prepare of one sequence without a batch: takes blocks, copies on write, registers. tokens: [count], -1 for one that
 * is not known yet, or NULL for all unknown. */
PKV_API pkv_status pkv_sequence_append(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count,
                                       pkv_stream stream);

/* Settles the next count tokens from settled_length on: unknown ones get their name, known ones must be equal. Tokens
 * behind them that were appended known and with register_blocks on settle with them; full blocks of settled tokens
 * become findable. */
PKV_API pkv_status pkv_sequence_commit(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count);

/* Keeps the first length tokens; blocks wholly beyond them are released (registered ones stay cached), reserved ones
 * too. */
PKV_API pkv_status pkv_sequence_truncate(pkv_cache *cache, pkv_sequence sequence, int64_t length);

/* Releases everything, last block first. stream: where its last work was queued, or PKV_STREAM_OF_SEQUENCE. Another
 * stream than the sequence's goes behind that one. */
PKV_API pkv_status pkv_sequence_close(pkv_cache *cache, pkv_sequence sequence, pkv_stream stream);

typedef struct pkv_sequence_info {
  size_t struct_size;
  int64_t length;            /* tokens stored */
  int64_t settled_length;    /* of those, the known and committed prefix */
  int64_t num_cached_tokens; /* what the prefix cache gave */
  int64_t num_blocks;        /* in its table, reserved ones included */
  uint64_t namespace_id;
  int32_t priority;
  uint64_t tag;
  int32_t device_index;      /* with PKV_SHARD_SEQUENCES, of the device that it is on; else 0 */
  int32_t is_offloaded;      /* its blocks are in the host tier */
} pkv_sequence_info;
PKV_API pkv_status pkv_sequence_get_info(const pkv_cache *cache, pkv_sequence sequence, pkv_sequence_info *out);

/* Its block table, int32 [num_blocks], reserved blocks last. A later call sees later blocks; a taken array does not. */
PKV_API pkv_status pkv_sequence_blocks(const pkv_cache *cache, pkv_sequence sequence, pkv_array *out);

/* Drops tokens [start, start + count) and moves the ones behind them down, K rotated to its new position by the cache's
 * rope: more room in a context that is full. What follows start is an approximation (its K and V were computed with the
 * dropped tokens in sight), so it is never registered. Shared blocks are copied first; all or none. UNSUPPORTED without
 * a rope in the cache's options. */
PKV_API pkv_status pkv_sequence_shift(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t count,
                                      pkv_stream stream);

/* Retention hint for the blocks of tokens [start, end) of a sequence (end -1: to its length): once cached, they go
 * before blocks of a larger priority and after those of a smaller one; blocks without a hint have 0, or with
 * PKV_EVICTION_PRIORITY the priority of their sequence. ttl_ms: 0, or the hint ends after so many milliseconds. */
PKV_API pkv_status pkv_sequence_set_retention(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t end,
                                              int32_t priority, int64_t ttl_ms);

/* Preemption: moves all blocks of a sequence to the host tier, the partial last one too, or none (OUT_OF_BLOCKS where it
 * has no room, NEVER_FITS where it is smaller; both count slots of the tier). The sequence stays open without blocks:
 * until it is restored it can be looked at and closed; all else is BUSY. UNSUPPORTED without a host tier. */
PKV_API pkv_status pkv_sequence_offload(pkv_cache *cache, pkv_sequence sequence);
/* Brings them back, all or none: into uncached and evictable blocks, but for those that the cache has still. */
PKV_API pkv_status pkv_sequence_restore(pkv_cache *cache, pkv_sequence sequence);
/* With PKV_SHARD_SEQUENCES, moves a sequence to another device: what is cached there is taken, the other blocks are copied
 * and findable there from then on, and here it is closed. Its id changes. All or none; OUT_OF_BLOCKS as in load. Waits
 * for the streams: that of its last prepare here, and on the other device `stream`, an array as everywhere, or NULL. */
PKV_API pkv_status pkv_sequence_migrate(pkv_cache *cache, pkv_sequence sequence, int32_t device_index,
                                        pkv_stream stream, pkv_sequence *out);

/* One JSON object about a sequence: lengths, blocks and who shares them, what closing it would free, why it is or is
 * not the next victim. Buffers as in pkv_cache_format_stats. */
PKV_API pkv_status pkv_sequence_explain(const pkv_cache *cache, pkv_sequence sequence, char *buffer, size_t capacity,
                                        size_t *out_length);

/* Many in one call, all or none: like the calls above in the order of the arrays, [num_sequences] each. A sequence may
 * stand only once in a call, except in fork. Flat tokens are [num_tokens], num_tokens the sum of counts. */

/* options: NULL, or [num_sequences], options[0].struct_size bytes apart. out_num_cached may be NULL. The sequences of
 * one call do not hit each other's blocks: nothing is appended yet. */
PKV_API pkv_status pkv_sequences_open(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                                      const int64_t *counts, int64_t num_sequences, const pkv_open_options *options,
                                      pkv_sequence *out, int64_t *out_num_cached);
/* lengths: NULL, or -1 for all tokens. The same sequence may be forked several times. */
PKV_API pkv_status pkv_sequences_fork(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths,
                                      int64_t num_sequences, pkv_sequence *out);
PKV_API pkv_status pkv_sequences_commit(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *counts,
                                        int64_t num_sequences, const int64_t *tokens, int64_t num_tokens);
PKV_API pkv_status pkv_sequences_truncate(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths,
                                          int64_t num_sequences);
PKV_API pkv_status pkv_sequences_close(pkv_cache *cache, const pkv_sequence *sequences, int64_t num_sequences,
                                       pkv_stream stream);

/* Beam search: sequences[i] becomes a fork of what sequences[sources[i]] was before the call, and keeps its id,
 * priority and tag. Reserved blocks of those that change are released. */
PKV_API pkv_status pkv_sequences_reorder(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *sources,
                                         int64_t num_sequences);

/* Speculative decoding: of the last num_drafts[i] tokens of sequences[i], a draft or the nodes of a token tree, the
 * num_kept[i] at `kept` (flat, [sum of num_kept], strictly ascending places in 0 to num_drafts[i] - 1) stay: their K
 * and V move together in one kernel on the stream, known tokens of them are settled, everything else is cut off. Shared
 * blocks that rows move into are copied first. The caller has rotated K by the place in the path, not in the tree. */
PKV_API pkv_status pkv_sequences_accept(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *num_drafts,
                                        const int64_t *num_kept, int64_t num_sequences, const int64_t *kept,
                                        int64_t num_kept_tokens, pkv_stream stream);

/* Which open sequences to close to gain n blocks, best victim first: the lowest priority, then by the eviction policy
 * (LRU: least recently stepped; FIFO: opened first; LFU, SLRU, S3FIFO: fewest steps), then the youngest. Writes at most
 * capacity ids; out_count is the full number. OUT_OF_BLOCKS if closing all would not gain n. */
PKV_API pkv_status pkv_cache_victims(const pkv_cache *cache, int64_t n, pkv_sequence *out_sequences, int64_t capacity,
                                     int64_t *out_count);

/* ---- 6. Batch ------------------------------------------------------------------------------------------------ */

/*
 * One step's view of the cache: tables at fixed addresses, refilled by each prepare. Steps that overlap use two
 * batches. Without max_sequence_length the tables grow on demand, and generation changes when an address does.
 */
typedef struct pkv_batch pkv_batch;

/* Table formats, a bit set; TABLE is always present. */
#define PKV_FORMAT_TABLE 1u    /* block_table int32 [num_sequences, longest] */
#define PKV_FORMAT_CSR 2u      /* indptr, indices, last_block_len */
#define PKV_FORMAT_POINTERS 4u /* block_pointers int64 [num_blocks]: the address of every block */

/* For measurements (docs/device-tables.md): MAPPED tables stay in pinned memory of the host, and kernels read them over
 * the link. On the host backend both are the same. */
typedef enum pkv_table_memory { PKV_TABLES_DEVICE = 0, PKV_TABLES_MAPPED = 1 } pkv_table_memory;

typedef struct pkv_batch_options {
  size_t struct_size;
  int64_t max_sequences;
  int64_t max_tokens;          /* new tokens of one step */
  int64_t max_sequence_length; /* 0: unbounded, tables grow on demand */
  int32_t num_heads;           /* query heads, for the attention workspace; 0: found at the first attend */
  uint32_t formats;            /* 0: PKV_FORMAT_TABLE */
  pkv_table_memory tables;     /* where kernels find the tables; default: in the device's memory */
  /* Default off. On: prepare finds neighbouring sequences of the step that begin with the same blocks, and attend reads
     those once for all of them where that is faster (a decode step on a CUDA device of compute capability 9.0). The
     result is the same but for rounding. Whoever orders the step keeps sequences with a common prefix together. */
  pkv_toggle shared_prefixes;
  int64_t min_shared_tokens; /* that a step must save the reading of, (sequences - 1) * common tokens of each run of
                                neighbours; 0: what pays */
} pkv_batch_options;

PKV_API pkv_status pkv_batch_create(pkv_cache *cache, const pkv_batch_options *options, pkv_batch **out);
PKV_API void pkv_batch_destroy(pkv_batch *batch);

typedef struct pkv_prepare_options {
  size_t struct_size;
  pkv_stream stream;
  pkv_toggle register_blocks; /* default on: blocks that become full with known tokens can be hit from now on.
                                 Off for drafts and uncertain steps: commit does it later */
  int64_t pad_sequences;      /* 0, or pad to so many sequences of length 0 */
  int64_t pad_tokens;         /* 0, or pad to so many tokens of slot -1 */
  int64_t max_query_len;      /* 0, or a bound on counts that the choice of kernel may depend on */
  int64_t steps_ahead;        /* 0, or so many further tokens of each sequence are prepared: see pkv_batch_advance */
} pkv_prepare_options;

/*
 * The one call of a step: appends counts[i] tokens (>= 0) to sequences[i], for all of them or none, and fills the
 * tables. tokens: flat in the order of the sequences, [num_tokens] with num_tokens the sum of counts; -1 is a token not
 * known yet; NULL with num_tokens 0 means that none is known. Copies on write are queued on the stream. OUT_OF_BLOCKS
 * names the first sequence that does not fit beside those before it, NEVER_FITS one that alone is too long for the pool
 * (pkv_last_shortage). A sequence twice is refused. options may be NULL.
 */
PKV_API pkv_status pkv_batch_prepare(pkv_batch *batch, const pkv_sequence *sequences, const int64_t *counts,
                                     int64_t num_sequences, const int64_t *tokens, int64_t num_tokens,
                                     const pkv_prepare_options *options);

/* The step failed: what the last prepare of this batch appended and registered is taken back. INVALID_ARGUMENT if there
 * is nothing to take back or if one of its sequences was changed since. Sequences closed since stay closed. A copy made
 * on write is kept if the cache was used in between. */
PKV_API pkv_status pkv_batch_discard(pkv_batch *batch);

typedef enum pkv_batch_table {
  PKV_BLOCK_TABLE = 0,    /* int32 [num_sequences, blocks of the longest]; -1 beyond a sequence's blocks */
  PKV_SEQ_LENS = 1,       /* int32 [num_sequences], the new tokens included */
  PKV_CU_SEQLENS_Q = 2,   /* int32 [num_sequences + 1] */
  PKV_SLOT_MAPPING = 3,   /* int64 [num_tokens]; -1 for padding */
  PKV_POSITIONS = 4,      /* int64 [num_tokens]; 0 for padding */
  PKV_INDPTR = 5,         /* int32 [num_sequences + 1] */
  PKV_INDICES = 6,        /* int32 [indptr of the end] */
  PKV_LAST_BLOCK_LEN = 7, /* int32 [num_sequences]; 0 for an empty sequence */
  PKV_BLOCK_POINTERS = 8, /* int64 [num_blocks of the cache]; it grows in place */
  /* Of a part (pkv_batch_get_part), on the host: where its sequences and tokens stand in the whole prepare. */
  PKV_SEQUENCE_PLACES = 9, /* int64 [num_sequences]; -1 for padding */
  PKV_TOKEN_PLACES = 10,   /* int64 [num_tokens]; -1 for padding */
  /* With shared_prefixes: tokens that a sequence begins with and that its neighbours of the step share; else 0. */
  PKV_SHARED_LENS = 11 /* int32 [num_sequences] */
} pkv_batch_table;

/* A table of the last prepare, on the host; release it with pkv_array_release. Its memory is refilled by the next
 * prepare. UNSUPPORTED for a format that the batch was not created with. */
PKV_API pkv_status pkv_batch_get_table(const pkv_batch *batch, pkv_batch_table table, pkv_array *out);

/* The same table on the device of the cache, whatever its format: data is an address there, valid while the batch lives
 * and its generation stays; owner is NULL. The work that fills it was queued on the stream of the last prepare. On the
 * host it is the table itself. */
PKV_API pkv_status pkv_batch_get_device_table(const pkv_batch *batch, pkv_batch_table table, pkv_array *out);
/* The same on the device_index-th of several devices; without an index it is the first. */
PKV_API pkv_status pkv_batch_get_shard_table(const pkv_batch *batch, pkv_batch_table table, int32_t device_index,
                                             pkv_array *out);

/* With PKV_SHARD_SEQUENCES, the step of one device, as a batch of the cache's part: the sequences that are there, in the
 * order of the prepare, padded as it is. All its tables are of them alone, and rows of tensors too; PKV_TOKEN_PLACES says
 * which rows of the whole they are. The handle belongs to the batch; only the whole can be prepared and discarded. */
PKV_API pkv_status pkv_batch_get_part(pkv_batch *batch, int32_t device_index, pkv_batch **out);

typedef struct pkv_batch_info {
  size_t struct_size;
  int64_t num_sequences; /* padding included */
  int64_t num_tokens;    /* padding included */
  int64_t max_query_len;
  int64_t max_seq_len;
  uint64_t generation;   /* changes when a table moves, or the cache shrinks */
  uint64_t uploaded_bytes; /* to the device by the last prepare; 0 on the host */
  int64_t num_shared_prefixes; /* that were found; 0 without shared_prefixes */
} pkv_batch_info;
PKV_API pkv_status pkv_batch_get_info(const pkv_batch *batch, pkv_batch_info *out);

/*
 * Steps without the host. A prepare with steps_ahead = K, of one new token for every sequence and in a batch with
 * max_sequence_length, also reserves the blocks of K further tokens, all or none, and shows them in the block table;
 * max_seq_len is then the bound with all K. After that step up to K times: advance makes the tables of the next one on
 * the device, write_kv and attend use them. All of it may be captured in one CUDA graph that is replayed, also after
 * later prepares of the same padded size. At the end settle tells the cache. What was reserved and not used stays with
 * the sequences for their next tokens; pkv_sequence_truncate to the same length gives it back. A prepare instead of
 * settle drops the steps.
 */

/* Queues: every active sequence gets a token more, at its next position and slot. One that is not active, or has no
 * room left, keeps its length and gets slot -1, which write_kv skips; its row of attend is one of its last position, to be
 * ignored. It may be active again later. is_active: bool or int32 [num_sequences, padding included] on the cache's
 * device, or NULL for all; of several devices [num_devices] tensors, one on each, which must be equal. stream: that of the
 * prepare. On a device the tables of the host stay those of the prepare. A sequence that was closed, truncated or
 * appended to since must not be active: its blocks may be others'. With PKV_SHARD_SEQUENCES the parts advance
 * (pkv_batch_get_part); of the whole it is UNSUPPORTED. */
PKV_API pkv_status pkv_batch_advance(pkv_batch *batch, const pkv_tensor *is_active, pkv_stream stream);

/* Waits for the stream. out_counts, [num_sequences] without padding: tokens that each sequence got by advance.
 * out_num_refused, how often an active one had no room, may be NULL. INVALID_ARGUMENT if of several devices one has
 * advanced another sequence than the others have. */
PKV_API pkv_status pkv_batch_get_advanced(const pkv_batch *batch, int64_t num_sequences, pkv_stream stream,
                                          int64_t *out_counts, int64_t *out_num_refused);

/* Appends counts[i] tokens, 0 to K, to the sequences of the prepare, all or none: as prepare would, but their K and V are
 * there, so no block is taken or copied. tokens as in prepare. A sequence that was changed since (forks are no change) is
 * INVALID_ARGUMENT, a closed one NOT_FOUND, unless its count is 0. Once for a prepare; there is nothing to discard then. */
PKV_API pkv_status pkv_batch_settle(pkv_batch *batch, const int64_t *counts, int64_t num_sequences,
                                    const int64_t *tokens, int64_t num_tokens);

/* ---- 7. Prefixes and namespaces ------------------------------------------------------------------------------ */

/* How many of the tokens ([num_tokens]) pkv_sequence_open would find cached now; takes nothing and counts as no use.
 * Any number of threads may probe at once, while none mutates the cache. options as in open; may be NULL. */
PKV_API pkv_status pkv_prefix_probe(const pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                                    const pkv_open_options *options, int64_t *out_num_cached);

/* Counts as a use of the cached full blocks of tokens, as if a sequence had taken and released them. out_num_touched,
 * in tokens, may be NULL. */
PKV_API pkv_status pkv_prefix_touch(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                                    const pkv_open_options *options, int64_t *out_num_touched);

/* A pin holds blocks like a sequence, so they are not evicted. Index and generation, never 0. */
typedef uint64_t pkv_pin;

/* Pins the cached full blocks of tokens until unpin, or for ttl_ms milliseconds if that is not 0; an expired pin is
 * released by the next call that may need its blocks. out_num_pinned, in tokens, may be NULL. Nothing cached is
 * NOT_FOUND. */
PKV_API pkv_status pkv_prefix_pin(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                                  const pkv_open_options *options, int64_t ttl_ms, pkv_pin *out,
                                  int64_t *out_num_pinned);
/* NOT_FOUND for one that was unpinned or has expired. */
PKV_API pkv_status pkv_prefix_unpin(pkv_cache *cache, pkv_pin pin);

/* Forgets everything cached in a namespace; pins on it are released. Blocks that open sequences hold stay theirs, but
 * nobody else finds them any more, then or later. out_count, cached blocks made uncached, may be NULL. */
PKV_API pkv_status pkv_namespace_invalidate(pkv_cache *cache, uint64_t namespace_id, int64_t *out_count);

/* The most blocks that a namespace may have, held and cached together; 0 for no limit. Beyond it the namespace's own
 * cached blocks are evicted first; if those do not do, calls that need blocks are OUT_OF_BLOCKS (NEVER_FITS where one
 * sequence alone passes the quota). A quota below what is held now stops growth only. */
PKV_API pkv_status pkv_namespace_set_quota(pkv_cache *cache, uint64_t namespace_id, int64_t max_blocks);

typedef struct pkv_namespace_stats {
  size_t struct_size;
  int64_t held_blocks;   /* of this namespace, pending ones included; a shared block belongs to the one that it was
                            appended in */
  int64_t cached_blocks;
  int64_t quota;         /* 0: none */
  int64_t num_sequences; /* opened in it (namespace_id, not a region) */
  int64_t queried_tokens;
  int64_t hit_tokens;
  int64_t evictions;
} pkv_namespace_stats;
/* Any thread, at any time. NOT_FOUND for a namespace that has neither sequences nor blocks nor a quota; counters start
 * again at 0 when it comes back. */
PKV_API pkv_status pkv_namespace_get_stats(const pkv_cache *cache, uint64_t namespace_id, pkv_namespace_stats *out);

/* ---- 8. Snapshots, events, traces ---------------------------------------------------------------------------- */

/* Take or give all of size bytes and return 0; anything else ends the call with DEVICE_ERROR. They must not call the
 * library and must not throw. */
typedef int32_t (*pkv_write_callback)(const void *data, size_t size, void *user_data);
typedef int32_t (*pkv_read_callback)(void *data, size_t size, void *user_data);

/* Where a snapshot goes to or comes from: a file, or the callback that the direction needs. */
typedef struct pkv_snapshot_io {
  size_t struct_size;
  const char *path; /* written under another name beside it and renamed when complete; NULL: callbacks */
  pkv_write_callback write;
  pkv_read_callback read;
  void *user_data;
} pkv_snapshot_io;

/*
 * Snapshots (docs/snapshot-format.md): versioned, a checksum per block, independent of block size, order and device. A
 * sequence with its tokens, K and V; or the prefix tree: everything cached or held that can be hit. save and load wait
 * for the stream. load reads and checks everything before it changes anything; the layouts must agree in layers, heads,
 * dims, dtype and kv_scales, else UNSUPPORTED; a damaged or cut file is INVALID_ARGUMENT, naming what is wrong.
 */
PKV_API pkv_status pkv_sequence_save(pkv_cache *cache, pkv_sequence sequence, const pkv_snapshot_io *io,
                                     pkv_stream stream);
/* Opens a sequence with the saved contents; a prefix that is cached here is taken instead. options: NULL for the saved
 * namespace, regions, priority and tag. */
PKV_API pkv_status pkv_sequence_load(pkv_cache *cache, const pkv_snapshot_io *io, const pkv_open_options *options,
                                     pkv_stream stream, pkv_sequence *out);
PKV_API pkv_status pkv_prefix_save(pkv_cache *cache, const pkv_snapshot_io *io, pkv_stream stream);
/* Adds the saved prefixes to the cache, into uncached and evictable blocks; what is cached already stays. OUT_OF_BLOCKS
 * when there is no room for all. out_num_blocks, those added, may be NULL. */
PKV_API pkv_status pkv_prefix_load(pkv_cache *cache, const pkv_snapshot_io *io, pkv_stream stream,
                                   int64_t *out_num_blocks);

/* The public block hash, for routers and other processes (docs/block-hash.md has it byte by byte, with test vectors):
 * SHA-256 over the parent's hash, the namespace and the tokens of a block. parent: [32], NULL for a first
 * block. out: [32]. Any thread. */
PKV_API pkv_status pkv_block_hash(const uint8_t *parent, uint64_t namespace_id, const int64_t *tokens,
                                  int64_t num_tokens, uint8_t *out);

typedef enum pkv_event_kind {
  PKV_EVENT_STORED = 1,  /* a block can be hit from now on */
  PKV_EVENT_REMOVED = 2, /* it cannot any more */
  PKV_EVENT_MOVED = 3,   /* the same content is now found in another block */
  PKV_EVENT_CLEARED = 4  /* everything in a namespace, or in the cache, cannot be hit any more */
} pkv_event_kind;

typedef struct pkv_event {
  uint64_t serial; /* 1, 2, 3, ...; where one is missing, events were dropped */
  int32_t kind;    /* pkv_event_kind */
  int32_t block;   /* where it is found (MOVED: from now on); CLEARED: -1 for a namespace, -2 for the whole cache */
  uint64_t namespace_id;
  uint8_t hash[32];   /* the block's public hash; zeros for CLEARED */
  uint8_t parent[32]; /* of the block before it; zeros for a first block, and for REMOVED and MOVED */
} pkv_event;

/* Takes the oldest events out of the cache's ring, at most capacity. The ring never waits: when it is full new events
 * are dropped and counted (pkv_cache_stats.dropped_events). One reading thread at a time, which need not be the
 * mutating one. UNSUPPORTED if event_capacity was 0. */
PKV_API pkv_status pkv_cache_read_events(pkv_cache *cache, pkv_event *out, int64_t capacity, int64_t *out_count);

/* Records every call that changes the cache into a file (docs/trace-formats.md), from a cache without open sequences,
 * pins and cached blocks (else BUSY). If the file cannot be written on, recording ends, the log says so and is_tracing
 * becomes 0; the cache's calls are not affected. stop reports whether all was written. */
PKV_API pkv_status pkv_trace_start(pkv_cache *cache, const char *path);
PKV_API pkv_status pkv_trace_stop(pkv_cache *cache);

/* ---- 9. Kernels ---------------------------------------------------------------------------------------------- */

typedef struct pkv_write_options {
  size_t struct_size;
  pkv_stream stream;
  const pkv_rope *rope; /* NULL: K is stored as given */
  int32_t device_index; /* of several devices, the one that the tensors are on and the kernel runs on; its heads or layers
                           only, layer counted as in the whole model */
  pkv_toggle pdl;       /* default off. On: the kernel may begin beside the end of the launch before it in the stream, and
                           lets the next one do so (programmatic dependent launch; where the device has it). It waits for
                           that launch before it reads or writes anything, so the result is the same */
} pkv_write_options;

/* Stores the rows of a step's new tokens at its slots. k: [num_tokens, num_kv_heads, head_dim], v: [num_tokens,
 * num_kv_heads, v_head_dim], both of one dtype: float32, float16 or bfloat16 (converted, or quantised by the scales),
 * or the cache's own dtype (stored as it is; scale 1 where scales are per token and head). Padding is skipped. With
 * rope K is rotated first, as float32; a quantised dtype is then refused, and so is a cos_sin that does not reach to
 * the step's largest position. (A captured graph is replayed without this check.) options may be NULL. */
PKV_API pkv_status pkv_write_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, const pkv_tensor *k,
                                const pkv_tensor *v, const pkv_write_options *options);

/* Rows [start, start + count) of one sequence of the batch's step, out of the cache and back into it: sequence_index is
 * its place in the prepare, and its length there bounds the range. k: [count, num_kv_heads, head_dim], v: [count,
 * num_kv_heads, v_head_dim], of one dtype: a float dtype (gathered: value = stored * scale, rounded; scattered: as in
 * write_kv), or the cache's own (bits as they are, without the scales of a block; scattered with scale 1 there).
 * scatter writes into the blocks of the sequence whoever else holds them; it takes no copy. */
PKV_API pkv_status pkv_gather_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index,
                                 int64_t start, int64_t count, const pkv_tensor *k, const pkv_tensor *v,
                                 pkv_stream stream);
PKV_API pkv_status pkv_scatter_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index,
                                  int64_t start, int64_t count, const pkv_tensor *k, const pkv_tensor *v,
                                  pkv_stream stream);
/* The same on the device_index-th of several devices, with its heads or layers; without an index it is the first. */
PKV_API pkv_status pkv_gather_shard_kv(pkv_cache *cache, int32_t device_index, int32_t layer, const pkv_batch *batch,
                                       int64_t sequence_index, int64_t start, int64_t count, const pkv_tensor *k,
                                       const pkv_tensor *v, pkv_stream stream);
PKV_API pkv_status pkv_scatter_shard_kv(pkv_cache *cache, int32_t device_index, int32_t layer, const pkv_batch *batch,
                                        int64_t sequence_index, int64_t start, int64_t count, const pkv_tensor *k,
                                        const pkv_tensor *v, pkv_stream stream);

typedef struct pkv_attend_options {
  size_t struct_size;
  pkv_stream stream;
  float scale;                    /* of the scores; 0: 1 / sqrt(head_dim) */
  pkv_toggle causal;              /* default on, aligned to the end of the sequence */
  int64_t window;                 /* 0: none; else a query sees its own and the window - 1 tokens before it */
  float softcap;                  /* 0: none; else scores become softcap * tanh(score / softcap) */
  const pkv_tensor *sinks;        /* float32 [num_heads]: logits that join the denominator only */
  const pkv_tensor *alibi_slopes; /* float32 [num_heads]: adds slope * (key position - query position) */
  const pkv_tensor *lse;          /* float32 [num_tokens, num_heads], written: natural log-sum-exp of the scores,
                                     sinks included; -inf where nothing is attended */
  const pkv_tensor *tree_mask;    /* bool [num_tokens, W], W at least the largest count of the step: whether a token
                                     attends the j-th new token of its own sequence. In place of causal among the new
                                     tokens; all earlier tokens are seen, window still applies */
  pkv_toggle invariant;           /* default off. On: a sequence's result does not depend, by a bit, on the step's other
                                     sequences (on the host it never does) */
  int32_t device_index;           /* as in pkv_write_options; num_heads is that of the device */
  pkv_toggle pdl;                 /* likewise */
} pkv_attend_options;

/*
 * Attention of a step's new tokens over their sequences. q: [num_tokens, num_heads, head_dim], out: [num_tokens,
 * num_heads, v_head_dim], both of one dtype: float32, float16 or bfloat16; num_heads is a multiple of num_kv_heads, and
 * query head h reads KV head h / (num_heads / num_kv_heads). Scores are scaled, then soft-capped, then biased (ALiBi),
 * then masked. Over nothing the result is 0. Slots past a sequence's length never reach a result, whatever they hold.
 * options may be NULL.
 */
PKV_API pkv_status pkv_attend(pkv_cache *cache, int32_t layer, const pkv_batch *batch, const pkv_tensor *q,
                              const pkv_tensor *out, const pkv_attend_options *options);

/* Combines attention over two disjoint KV sets: out_*: [num_tokens, num_heads, dim] of one dtype, lse_*: float32
 * [num_tokens, num_heads]. out and lse may be the same memory as one of the inputs; lse may be NULL. device: where the
 * tensors are, "host" or "cuda:N". */
PKV_API pkv_status pkv_merge_states(const char *device, const pkv_tensor *out_a, const pkv_tensor *lse_a,
                                    const pkv_tensor *out_b, const pkv_tensor *lse_b, const pkv_tensor *out,
                                    const pkv_tensor *lse, pkv_stream stream);

/* ---- 10. Host backend settings ------------------------------------------------------------------------------- */

/* Threads of the host kernels; 0: one per processor that the process may use (the default). Process-wide. */
PKV_API pkv_status pkv_host_set_num_threads(int32_t num_threads);
PKV_API int32_t pkv_host_num_threads(void);

/* Instruction set of the host kernels: "auto", "reference" (the plain specification, single-threaded), "scalar",
 * "avx2", "avx512", "avx512bf16", "amx", "neon". UNSUPPORTED where the processor or the build lacks it. Process-wide. */
PKV_API pkv_status pkv_host_set_isa(const char *isa);
PKV_API const char *pkv_host_isa(void);

/* ---- 11. Transfers ------------------------------------------------------------------------------------------- */

/*
 * Blocks that a transfer engine reads or writes, outside of the order of streams (docs/transfers.md). A transfer holds
 * its blocks until it is known to be over, whatever happens to sequences meanwhile. Held by transfers alone they are
 * pending: not evictable, not reusable, and, while they are being received, in no table and hit by nobody. An engine
 * cannot take back what it has begun: what missed its deadline may still land. Index and generation, never 0; one that
 * is over is NOT_FOUND.
 */
typedef uint64_t pkv_transfer;

/* The blocks of tokens [start, end) of a sequence (end -1: to its length) are going to be read. Who writes into them
 * meanwhile gets a copy. They hold what is sent once `stream` has come this far; PKV_STREAM_OF_SEQUENCE is the
 * sequence's own. out_blocks: int32 [blocks], in the order of the tokens. */
PKV_API pkv_status pkv_transfer_send(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t end,
                                     pkv_stream stream, pkv_transfer *out, pkv_array *out_blocks);
/* Takes uncached and evictable blocks, all or none, that are going to be written: once `stream` has come this far.
 * options: of the sequence that comes of it; may be NULL. */
PKV_API pkv_status pkv_transfer_receive(pkv_cache *cache, int64_t num_blocks, const pkv_open_options *options,
                                        pkv_stream stream, pkv_transfer *out, pkv_array *out_blocks);
/* All bytes of the first num_tokens tokens are there, or will be when `stream` has come this far, and nothing more will
 * land: they become an open sequence of these settled tokens on that stream, full blocks can be hit, and the blocks
 * behind them are released. Ends the transfer. BUSY for a quarantined one. */
PKV_API pkv_status pkv_transfer_commit(pkv_cache *cache, pkv_transfer transfer, const int64_t *tokens,
                                       int64_t num_tokens, pkv_stream stream, pkv_sequence *out);
/* Its deadline has passed, but it may still go on: its blocks stay, and commit is refused from now on. */
PKV_API pkv_status pkv_transfer_quarantine(pkv_cache *cache, pkv_transfer transfer);
/* It is known to be over, well or not: its blocks are released. */
PKV_API pkv_status pkv_transfer_finish(pkv_cache *cache, pkv_transfer transfer);

/* Memory that holds blocks [first_block, first_block + num_blocks) of a cache, for an engine to register. */
typedef struct pkv_memory_region {
  size_t struct_size;
  void *base;
  uint64_t bytes;
  uint64_t block_bytes;
  int64_t first_block, num_blocks;
  char device[16];
} pkv_memory_region;
/* out: [capacity], out[0].struct_size bytes apart; NULL if capacity is 0. out_count is the full number: one of
 * each device. */
PKV_API pkv_status pkv_cache_get_regions(const pkv_cache *cache, pkv_memory_region *out, int64_t capacity,
                                         int64_t *out_count);

/* Names a layout and what is stored in it, for peers to compare before they exchange blocks: SHA-256 over the layout and
 * over what identifies the model, [model_bytes], which may be NULL (docs/transfers.md has it byte by byte). out: [32]. */
PKV_API pkv_status pkv_layout_fingerprint(const pkv_layout *layout, const void *model, size_t model_bytes,
                                          uint8_t *out);

/* ---- 12. Monitoring ------------------------------------------------------------------------------------------ */

/* How well the blocks of a cache are used. Any free block serves any sequence, so nothing is lost between blocks; what is
 * lost lies inside held ones, and what a pool can give back lies at its end. */
typedef struct pkv_cache_fragmentation {
  size_t struct_size;
  int64_t held_blocks;
  int64_t unused_slots;     /* token slots of held blocks that hold no token of any holder, reserved blocks included */
  int64_t reserved_blocks;  /* held ahead of need */
  int64_t free_tail_blocks; /* blocks behind the last held one: cached or uncached */
  int64_t num_free_runs;    /* stretches of blocks that nobody holds */
  int64_t longest_free_run;
} pkv_cache_fragmentation;

/* Measures what is too costly to keep up to date: fragmentation, in time proportional to the blocks, and the memory of the
 * device; statistics have both from now on. A mutating call for threads; it changes nothing else. out may be NULL. */
PKV_API pkv_status pkv_cache_measure(pkv_cache *cache, pkv_cache_fragmentation *out);

/* Writes the statistics into a file of one page too, which other processes map and read at any time without a word to
 * this one (docs/stats-page.md): after every call that changes the cache, by plain stores. path: best on a memory file
 * system; /dev/shm/NAME is the POSIX shared memory /NAME. A file there is BUSY. It is readable by its owner alone, and
 * removed by unpublish and destroy; a process that is killed leaves it behind. Measures are made anew now and then. */
PKV_API pkv_status pkv_cache_publish_stats(pkv_cache *cache, const char *path);
/* OK if there is none. */
PKV_API pkv_status pkv_cache_unpublish_stats(pkv_cache *cache);

/* Ranges of time for a profiler, around prepare, copies, snapshots and kernels (on a device: around queueing them), named
 * "pagedkv.prepare" and so on, nested by thread; every push has its pop, on failures too. The callbacks come from inside
 * calls, in their threads, and must neither call the library nor throw. */
typedef void (*pkv_range_push_callback)(const char *name, void *user_data);
typedef void (*pkv_range_pop_callback)(void *user_data);
/* Process-wide; both or neither. NULL, NULL switches ranges off (the default). An open range ends where it began. */
PKV_API pkv_status pkv_set_range_callbacks(pkv_range_push_callback push, pkv_range_pop_callback pop, void *user_data);
/* Has ranges sent to a profiler as NVTX ranges. path: its injection library, which the profiler names in the environment
 * variable NVTX_INJECTION64_PATH, or one with nvtxRangePushA and nvtxRangePop. UNSUPPORTED where that cannot be loaded or
 * takes none. */
PKV_API pkv_status pkv_nvtx_enable(const char *path);

#ifdef __cplusplus
}
#endif

#endif /* PAGEDKV_PAGEDKV_H_ */
