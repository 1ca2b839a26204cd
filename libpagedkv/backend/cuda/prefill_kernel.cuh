// Attention of long query runs on Hopper: K and V of the queries' dtype, head dims of 64, 80, 96, 112, 128, 192 and 256,
// and V of 128 under K of 192; K and V of 8 bits with static scales, head dims of 64 to 128. Between 64 and 128 rows end
// with zeros: they go through the instance of 128.
//
// Plan of prefill_rows:
//   A thread block a multiprocessor takes tiles of rows, or parts of their keys, until none is left: a counter in the
//   workspace gives them out, the longest of a sequence first. Row r of a tile is token r / group, head r % group of
//   the heads that share a KV head.
//   The first warpgroup loads: one warp finds tiles and brings their queries, up to one tile ahead; one brings K, one
//   V, tile of keys after tile of keys, into a ring of buffers. Rows come in boxes of a block through tensor maps,
//   swizzled. A block that is not there lies outside the map and arrives as zeros. The last box of a sequence is moved
//   down by the slots that hold nothing, whose place is taken by zeros or by rows of the same block: nothing that such
//   a slot may hold is ever loaded.
//   K and V of 8 bits come to stages beside the ring; another warpgroup widens them from there into the ring.
//   Two warpgroups compute: they have 64 rows each and walk the keys backwards, so that masks are needed in the first
//   steps alone. A step issues the scores of one tile of keys and the output of the one before it; softmax runs beside
//   the latter, and beside the products of the other warpgroup, as they issue in turn. The steps of one tile of rows run on
//   into those of the next one.
//   Where there are few tiles of rows their keys are cut in parts; the last one to finish merges them, in order.
// Bound by the tensor cores; see docs/kernels.md.
#pragma once

#include "backend/cuda/dependent_launch.cuh"
#include "backend/cuda/prefill_consumer.cuh"
#include "backend/cuda/prefill_producer.cuh"
#include "backend/cuda/prefill_widener.cuh"

namespace pkv {

constexpr int kDecodeName = 1 + 2 * kPrefillWarpgroups;  // of the barrier of those that decode: behind the consumers'

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    prefill_rows(const __grid_constant__ AttendParams p, const __grid_constant__ PrefillLaunch launch,
                 const __grid_constant__ CUtensorMap query_map, const __grid_constant__ CUtensorMap key_map,
                 const __grid_constant__ CUtensorMap value_map, const __grid_constant__ DecodeMaps decode_maps) {
#ifdef PKV_IS_SM90A
  extern __shared__ char dynamic_shared[];
  __shared__ PrefillShared<Traits> shared;
  // Swizzled rows stand in groups of 1024 bytes.
  char *queries = dynamic_shared + ((1024 - shared_address(dynamic_shared) % 1024) & 1023);
  char *buffers = queries + Traits::kQuerySlots * Traits::kQueryBytes;
  if (threadIdx.x == 0) {
    init_barrier(&shared.decode_done, kPrefillWarpgroups * 4);
    init_barrier(&shared.tile_wanted, 1);
    for (int i = 0; i < Traits::kStages; ++i) {
      init_barrier(&shared.full[i], Traits::kIsWidened ? kWideningThreads / 32 : 1);
      init_barrier(&shared.empty[i], kPrefillWarpgroups * 4);
    }
    for (int i = 0; i < Traits::kQuerySlots; ++i) {
      init_barrier(&shared.tile_full[i], 1);
      init_barrier(&shared.query_full[i], 1);
      init_barrier(&shared.query_empty[i], kPrefillWarpgroups * 4);
    }
    if constexpr (Traits::kIsWidened) {
      for (PrefillStaging &staging : shared.staging) {
        for (int i = 0; i < 2; ++i) {
          init_barrier(&staging.full[i], 1);
          init_barrier(&staging.empty[i], kWideningThreads / 32);
        }
      }
    }
    fence_barrier_init();
  }
  // Over prefixes the launch before is the decode kernel over what is not shared: it has waited for all that is read
  // here, and lets this one begin after that. Nothing of the one is of matter to the other.
  const bool over_prefixes = Traits::kTakesPrefixes && launch.plan.over_prefixes;
  if (!over_prefixes) wait_for_launch_before();
  if (threadIdx.x / 32 == 1) {
    if (over_prefixes) {
      find_prefix_shares<Traits>(p, launch, &shared.shares);
    } else {
      find_shares<Traits>(p, launch, &shared.shares);
    }
  }
  __syncthreads();
  if (p.lets_next) let_next_launch();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  // Of the decoding, if this thread block has some.
  const int32_t share =
      Traits::kHasDecode ? find_decode_share(shared.shares, static_cast<int32_t>(blockIdx.x)) : -1;
  const auto decode_first = [&] {
    using Decode = typename Traits::Decode;
    if (share < 0) return;
    const int thread = static_cast<int>(threadIdx.x) - Traits::kFirstConsumer * kWarpgroupThreads;
    auto *own = reinterpret_cast<DecodeShared<Decode> *>(queries + Traits::kDecodeBytes);
    start_decode<Decode>(decode_maps, own, thread);
    decode_share<Decode>(p, launch.decode, decode_maps, own, queries, thread, share, shared.shares.num_decode_blocks,
                         [] { sync_named(kDecodeName, Decode::kThreads); });
    if (thread % 32 == 0) {
#pragma unroll
      for (int i = 0; i < Decode::kPlanes; ++i) end_barrier(&own->warps[thread / 32].full[i]);
    }
    fence_shared_for_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_barrier(&shared.decode_done);
  };
  const auto await_decoding = [&] {
    if (share >= 0) await_barrier(&shared.decode_done, 0);
  };
  // Registers are shared out before anybody waits for the decoding, which needs those of the others.
  if (warpgroup == 0) {
    release_registers<Traits::kLoadingRegisters>();
    await_decoding();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      produce_tiles<Traits>(p, launch, query_map, &shared, queries);
    } else if (warp == 1) {
      KeyProducer<Traits, true>(p, launch, &shared, buffers).run(key_map);
    } else if (warp == 2) {
      KeyProducer<Traits, false>(p, launch, &shared, buffers).run(value_map);
    } else if (!over_prefixes) {
      clear_padding<typename Traits::T>(p, p.tables.cu_seqlens_q[p.tables.num_sequences], threadIdx.x % 32, 32);
    }
  } else if (warpgroup < Traits::kFirstConsumer) {
    if constexpr (Traits::kIsWidened) {
      release_registers<Traits::kWideningRegisters>();
      await_decoding();
      const int thread = threadIdx.x % kWarpgroupThreads;
      if (thread < kWideningThreads) {
        KeyWidener<Traits, true>(&shared, buffers, thread).run();
      } else {
        KeyWidener<Traits, false>(&shared, buffers, thread - kWideningThreads).run();
      }
    }
  } else {
    take_registers<Traits::kComputingRegisters>();
    if constexpr (Traits::kHasDecode) decode_first();
    PrefillConsumer<Traits>(p, launch, &shared, queries, buffers, warpgroup - Traits::kFirstConsumer).run();
  }
  if (over_prefixes) wait_for_launch_before();  // who waits for this launch waits for both
#endif
}

}  // namespace pkv
