// The warps of the prefill kernel that load: one takes tiles of rows and loads queries, one loads K, one V.
#pragma once

#include "backend/cuda/prefill_work.cuh"

#ifdef PKV_IS_SM90A
namespace pkv {

constexpr uint32_t kLastWorks = 5;  // of a thread block, on average, that it takes late
constexpr int kClaimTiles = 2;      // of keys before the end of the loads of the one before

// Takes tiles of rows, as they come, and loads their queries.
template <class Traits>
__device__ void produce_tiles(const AttendParams &p, const PrefillLaunch &launch, const CUtensorMap &query_map,
                              PrefillShared<Traits> *shared, char *queries) {
  const int lane = threadIdx.x % 32;
  const PrefillShares &shares = shared->shares;
  const uint32_t num_works = static_cast<uint32_t>(shares.num_works) * static_cast<uint32_t>(p.kv.num_kv_heads);
  const int32_t group = launch.group;
  // Thread blocks that do not decode have one work to start with; all others are given out by the counter. It is asked
  // once for every work, by who has it, and once by those that decode.
  const uint32_t num_decode = Traits::kHasDecode ? static_cast<uint32_t>(shares.num_decode_blocks) : 0;
  const uint32_t num_given = gridDim.x - num_decode;
  const uint32_t last_count = num_works + num_decode - 1;
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  const auto take_work = [&] {
    uint32_t next = 0;
    if (lane == 0) next = atomicInc(launch.next_work, last_count);
    return __shfl_sync(0xffffffffu, next, 0) + num_given;
  };
  uint32_t work = static_cast<uint32_t>(block - (Traits::kHasDecode ? count_decoding(shares, block) : 0));
  if (Traits::kHasDecode && find_decode_share(shares, block) >= 0) work = take_work();
  RingCursor<Traits::kQuerySlots> slot;
  uint32_t wanted_phase = 0;
  while (true) {
    PrefillTile tile = {};
    if (work < num_works) {
      const bool has_keys = Traits::kTakesPrefixes && launch.plan.over_prefixes
                                ? find_prefix_work<Traits>(p, launch, shares, work, &tile)
                                : find_work<Traits>(p, launch, shares, work, &tile);
      if (!has_keys) {
        work = take_work();
        continue;
      }
    }
    // The last works are taken late, so that no thread block has another one in hand while others have none.
    tile.claim_tiles = work + kLastWorks * gridDim.x < num_works ? tile.num_key_tiles : kClaimTiles;
    wait_barrier(&shared->query_empty[slot.index], slot.phase ^ 1);
    if (lane == 0) {
      shared->tiles[slot.index] = tile;
      uint64_t *barrier = &shared->query_full[slot.index];
      arrive_barrier(&shared->tile_full[slot.index]);
      if (tile.num_key_tiles == 0) {
        arrive_barrier(barrier);
      } else {
        arrive_with_bytes(barrier, launch.plan.tile_tokens * group * Traits::kKeyDim * 2);
#pragma unroll
        for (int part = 0; part < Traits::kKeyDim / Traits::kPartDims; ++part) {
          copy_box(queries + slot.index * Traits::kQueryBytes + part * (kPrefillRows * 128), &query_map, barrier,
                   part * Traits::kPartDims, tile.kv_head * group, tile.first_token);
        }
      }
    }
    __syncwarp();
    if (tile.num_key_tiles == 0) return;
    slot.advance();
    wait_barrier(&shared->tile_wanted, wanted_phase);
    wanted_phase ^= 1;
    work = take_work();
  }
}

// Loads K or V of the tiles of rows. K of a tile of keys stands before V of the tile of keys that was walked before it:
// K, K, V, K, V and so on, each one's buffers two apart but for the first.
template <class Traits, bool kIsKey>
class KeyProducer {
  static constexpr int kDim = kIsKey ? Traits::kKeyDim : Traits::kValueDim;

 public:
  __device__ KeyProducer(const AttendParams &p, const PrefillLaunch &launch, PrefillShared<Traits> *shared,
                         char *buffers)
      : p_(p), launch_(launch), shared_(shared), buffers_(buffers), lane_(threadIdx.x % 32),
        lane_key_((threadIdx.x % 32) << launch.box_shift) {}

  __device__ void run(const CUtensorMap &map) {
    RingCursor<Traits::kQuerySlots> slot;
    if (!kIsKey) ring_.advance(2);
    bool is_first_key = kIsKey;
    while (true) {
      wait_barrier(&shared_->tile_full[slot.index], slot.phase);
      const PrefillTile &tile = shared_->tiles[slot.index];
      const int32_t num_key_tiles = tile.num_key_tiles, seq_len = tile.seq_len, kv_head = tile.kv_head;
      const int32_t claimed_at = max(num_key_tiles - tile.claim_tiles, 0);
      if (num_key_tiles == 0) break;
      const int32_t *table = p_.tables.block_table + tile.sequence * p_.tables.table_stride;
      int32_t first_key = tile.last_key;
      slot.advance();
      int32_t entry = look_up(table, first_key, seq_len);
      for (int32_t i = 0; i < num_key_tiles; ++i, first_key -= Traits::kTile) {
        const int32_t next_entry =
            i + 1 < num_key_tiles ? look_up(table, first_key - Traits::kTile, seq_len) : -1;
        if (kIsKey && i == claimed_at && lane_ == 0) arrive_barrier(&shared_->tile_wanted);
        const int32_t key = first_key + lane_key_;
        // The last box of a sequence is moved down, so that slots beyond the sequence stay out of it.
        const int32_t offset = entry < 0 ? 0 : key % p_.kv.block_size - max(key + launch_.plan.box_rows - seq_len, 0);
        if constexpr (Traits::kIsWidened) {
          stage(map, {entry, offset, kv_head});
        } else {
          load(map, {entry, offset, kv_head});
          ring_.advance(is_first_key ? 1 : 2);
          is_first_key = false;
        }
        entry = next_entry;
      }
    }
  }

 private:
  // Of the lane's box.
  struct Place {
    int32_t block, offset, kv_head;
  };

  // The block of the lane's box; negative outside the sequence and where it was given back.
  __device__ int32_t look_up(const int32_t *table, int32_t first_key, int32_t seq_len) const {
    const int32_t key = first_key + lane_key_;
    return lane_key_ < Traits::kTile && key < seq_len ? table[key / p_.kv.block_size] : -1;
  }

  __device__ void load(const CUtensorMap &map, const Place &place) {
    wait_barrier(&shared_->empty[ring_.index], ring_.phase ^ 1);
    const uint32_t mask = __ballot_sync(0xffffffffu, place.block >= 0);
    uint64_t *barrier = &shared_->full[ring_.index];
    if (lane_ == 0) {
      shared_->box_masks[ring_.index] = mask;
      arrive_with_bytes(barrier, Traits::kTile * kDim * 2);
    }
    __syncwarp();
    if (lane_key_ < Traits::kTile) {
      char *target = buffers_ + ring_.index * Traits::kTileBytes + lane_key_ * 128;
#pragma unroll
      for (int part = 0; part < kDim / Traits::kPartDims; ++part) {
        copy_box(target + part * (Traits::kTile * 128), &map, barrier, part * Traits::kPartDims, place.offset,
                 place.kv_head, place.block < 0 ? -1 : place.block);
      }
    }
    __syncwarp();
  }

  // Brings K or V of 8 bits as they are, half a tile at a time.
  __device__ void stage(const CUtensorMap &map, const Place &place) {
    PrefillStaging &staging = shared_->staging[kIsKey ? 0 : 1];
    const uint32_t mask = __ballot_sync(0xffffffffu, place.block >= 0);
    char *stages = find_stages<Traits, kIsKey>(buffers_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      wait_barrier(&staging.empty[half], stage_phase_ ^ 1);
      if (lane_ == 0) {
        if (half == 0) staging.box_mask = mask;
        arrive_with_bytes(&staging.full[half], kPrefillStagedKeys * kDim);
      }
      __syncwarp();
      if (lane_key_ / kPrefillStagedKeys == half) {
        copy_box(stages + half * Traits::kStagedBytes + lane_key_ % kPrefillStagedKeys * kDim, &map,
                 &staging.full[half], 0, place.offset, place.kv_head, place.block < 0 ? -1 : place.block);
      }
      __syncwarp();
    }
    stage_phase_ ^= 1;
  }

  const AttendParams &p_;
  const PrefillLaunch &launch_;
  PrefillShared<Traits> *const shared_;
  char *const buffers_;
  const int lane_;
  const int32_t lane_key_;  // first of the lane's box in the tile
  RingCursor<Traits::kStages> ring_;
  uint32_t stage_phase_ = 0;
};

}  // namespace pkv
#endif  // PKV_IS_SM90A
