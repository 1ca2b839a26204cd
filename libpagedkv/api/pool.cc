#include "api/abi.h"
#include "backend/backend.h"

using namespace pkv;

namespace {

Status check_pool(const pkv_pool *pool) { return check_pointer("pool", pool); }

}  // namespace

pkv_status pkv_pool_create(const pkv_pool_options *options, pkv_pool **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("out", out));
    *out = nullptr;
    pkv_pool_options given;
    PKV_TRY(read_struct("options", options, &given));
    Backend *backend = nullptr;
    PKV_TRY(open_backend(given.device, &backend));
    const PoolOptions pool_options = {given.block_bytes, given.num_blocks, given.memory, given.memory_bytes,
                                      given.max_num_blocks};
    auto handle = std::make_unique<pkv_pool>();
    PKV_TRY(Pool::create(backend, pool_options, &handle->pool));
    *out = handle.release();
    return PKV_OK;
  });
}

void pkv_pool_destroy(pkv_pool *pool) { delete pool; }

pkv_status pkv_pool_allocate(pkv_pool *pool, int64_t count, int32_t *out_blocks) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pool(pool));
    PKV_TRY(check_array("out_blocks", out_blocks, count));
    return pool->pool->allocate(count, out_blocks);
  });
}

pkv_status pkv_pool_retain(pkv_pool *pool, const int32_t *blocks, int64_t count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pool(pool));
    PKV_TRY(check_array("blocks", blocks, count));
    return pool->pool->retain(blocks, count);
  });
}

pkv_status pkv_pool_free(pkv_pool *pool, const int32_t *blocks, int64_t count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pool(pool));
    PKV_TRY(check_array("blocks", blocks, count));
    return pool->pool->free(blocks, count);
  });
}

pkv_status pkv_pool_block_ptr(const pkv_pool *pool, int32_t block, void **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pool(pool));
    PKV_TRY(check_pointer("out", out));
    return pool->pool->block_ptr(block, out);
  });
}

pkv_status pkv_pool_resize(pkv_pool *pool, int64_t num_blocks) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pool(pool));
    return pool->pool->resize(num_blocks);
  });
}

pkv_status pkv_pool_copy_blocks(pkv_pool *pool, const int32_t *sources, const int32_t *destinations, int64_t count,
                                pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pool(pool));
    PKV_TRY(check_array("sources", sources, count));
    PKV_TRY(check_array("destinations", destinations, count));
    return pool->pool->copy_blocks(sources, destinations, count, stream);
  });
}

pkv_status pkv_pool_zero_blocks(pkv_pool *pool, const int32_t *blocks, int64_t count, pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pool(pool));
    PKV_TRY(check_array("blocks", blocks, count));
    return pool->pool->zero_blocks(blocks, count, stream);
  });
}

int64_t pkv_pool_num_blocks(const pkv_pool *pool) { return pool == nullptr ? 0 : pool->pool->num_blocks(); }

int64_t pkv_pool_num_free(const pkv_pool *pool) { return pool == nullptr ? 0 : pool->pool->num_free(); }

pkv_status pkv_pool_get_stats(const pkv_pool *pool, pkv_pool_stats *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pool(pool));
    PKV_TRY(check_struct("out", out));
    pkv_pool_stats stats = {};
    pool->pool->get_stats(&stats);
    write_struct(stats, out);
    return PKV_OK;
  });
}
