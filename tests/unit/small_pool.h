// The host pool of the unit tests that need no more than its blocks.
#pragma once

#include <doctest/doctest.h>

#include "pool/pool.h"

namespace pkv {

inline std::shared_ptr<Pool> make_pool(int64_t num_blocks) {
  Backend *backend = nullptr;
  REQUIRE(open_backend("host", &backend) == PKV_OK);
  PoolOptions options;
  options.block_bytes = 256;
  options.num_blocks = num_blocks;
  std::shared_ptr<Pool> pool;
  REQUIRE(Pool::create(backend, options, &pool) == PKV_OK);
  return pool;
}

}  // namespace pkv
