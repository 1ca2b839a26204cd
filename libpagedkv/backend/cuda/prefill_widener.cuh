// The warps of the prefill kernel that widen K and V of 8 bits to the queries' dtype, from stages into the ring.
#pragma once

#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/prefill_producer.cuh"

#ifdef PKV_IS_SM90A
namespace pkv {

constexpr int kWideningThreads = 64;  // of K, and as many of V

// Goes through the tiles of keys as KeyProducer does. Eight elements at a time: 8 bytes of a stage, whose rows are
// contiguous, become 16 bytes of a row of 64 dims, swizzled as a copy would have written it. A stage is free again as
// soon as it has been read.
template <class Traits, bool kIsKey>
class KeyWidener {
  using T = typename Traits::T;
  static constexpr int kDim = kIsKey ? Traits::kKeyDim : Traits::kValueDim;
  static constexpr int kRowThreads = kDim / 8;
  static constexpr int kRowsAtOnce = kWideningThreads / kRowThreads;
  static constexpr int kRowsRead = 8;  // by a thread, before it writes them
  static_assert(kPrefillStagedKeys % (kRowsRead * kRowsAtOnce) == 0 && kRowsRead % (8 / kRowsAtOnce) == 0);

 public:
  // thread: of the kWideningThreads.
  __device__ KeyWidener(PrefillShared<Traits> *shared, char *buffers, int thread)
      : shared_(shared), buffers_(buffers), stages_(find_stages<Traits, kIsKey>(buffers)), thread_(thread) {}

  __device__ void run() {
    RingCursor<Traits::kQuerySlots> slot;
    if (!kIsKey) ring_.advance(2);
    bool is_first_key = kIsKey;
    while (true) {
      wait_barrier(&shared_->tile_full[slot.index], slot.phase);
      const int32_t num_key_tiles = shared_->tiles[slot.index].num_key_tiles;
      if (num_key_tiles == 0) break;
      slot.advance();
      for (int32_t i = 0; i < num_key_tiles; ++i) {
        widen_tile();
        ring_.advance(is_first_key ? 1 : 2);
        is_first_key = false;
      }
    }
  }

 private:
  __device__ void widen_tile() {
    PrefillStaging &staging = shared_->staging[kIsKey ? 0 : 1];
    char *tile = buffers_ + ring_.index * Traits::kTileBytes;
    wait_barrier(&shared_->empty[ring_.index], ring_.phase ^ 1);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      wait_barrier(&staging.full[half], stage_phase_);
      if (half == 0 && thread_ == 0) shared_->box_masks[ring_.index] = staging.box_mask;
      widen_stage(stages_ + half * Traits::kStagedBytes, tile + half * (kPrefillStagedKeys * 128));
      __syncwarp();
      if (thread_ % 32 == 0) arrive_barrier(&staging.empty[half]);
    }
    stage_phase_ ^= 1;
    fence_shared_writes();
    __syncwarp();
    if (thread_ % 32 == 0) arrive_barrier(&shared_->full[ring_.index]);
  }

  __device__ void widen_stage(const char *stage, char *target) const {
    const int unit = thread_ % kRowThreads, first_row = thread_ / kRowThreads;
    stage += first_row * kDim + unit * 8;
    target += unit / 8 * (Traits::kTile * 128) + first_row * 128;
    int chunks[8 / kRowsAtOnce];  // bytes from a row to its chunk: the same again after eight rows
#pragma unroll
    for (int i = 0; i < 8 / kRowsAtOnce; ++i) chunks[i] = (unit ^ (first_row + i * kRowsAtOnce)) % 8 * 16;
#pragma unroll 1
    for (int row = 0; row < kPrefillStagedKeys; row += kRowsRead * kRowsAtOnce) {
      uint2 codes[kRowsRead];
#pragma unroll
      for (int i = 0; i < kRowsRead; ++i) {
        codes[i] = *reinterpret_cast<const uint2 *>(stage + (row + i * kRowsAtOnce) * kDim);
      }
#pragma unroll
      for (int i = 0; i < kRowsRead; ++i) {
        const uint2 low = widen_codes<T, Traits::kStoredDtype>(codes[i].x);
        const uint2 high = widen_codes<T, Traits::kStoredDtype>(codes[i].y);
        char *const chunk = target + (row + i * kRowsAtOnce) * 128 + chunks[i % (8 / kRowsAtOnce)];
        *reinterpret_cast<uint4 *>(chunk) = {low.x, low.y, high.x, high.y};
      }
    }
  }

  PrefillShared<Traits> *const shared_;
  char *const buffers_;
  const char *const stages_;
  const int thread_;
  RingCursor<Traits::kStages> ring_;
  uint32_t stage_phase_ = 0;
};

}  // namespace pkv
#endif  // PKV_IS_SM90A
