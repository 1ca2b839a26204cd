// How the decode kernel comes to its rows: a warp looks keys up in the block table, a tile ahead of the copies that it
// then asks for, and keeps a ring of planes of K and V on their way to shared memory, with the scales of their rows if
// those stand in the blocks.
#pragma once

#include "backend/cuda/decode_products.cuh"
#include "backend/cuda/decode_work.cuh"
#include "backend/cuda/hopper.cuh"

namespace pkv {

// What a launch adds to the parameters.
struct DecodeLaunch {
  int32_t group;        // heads that share a KV head
  int32_t block_shift;  // block_size = 1 << block_shift
  int32_t box_rows;     // tokens that one copy brings: of a block, kTileKeys at most
  int32_t box_pieces;   // and pieces of their rows: one, or all
  // [gridDim.x, 2, kRows, kPartStride]: of the segment that comes to a thread block, of that which leaves it. Zeros
  // between launches (decode_merge.cuh).
  float *parts;
};

struct DecodeMaps {
  CUtensorMap keys, values;
};

// What a warp keeps in shared memory beside its ring. Cursors are those of the first tile of the present segment.
template <class Traits>
struct DecodeWarp {
  DecodeCursor<Traits::kTileKeys, Traits::kRows> ahead, now;  // of the block table, of the products
  int32_t begin, end;                          // units; begin is that of a tile
  uint32_t valid[Traits::kPlanes];             // of the tile whose K stands there: bit i for key i
  uint64_t full[Traits::kPlanes];              // barriers: the plane is there
  // Of the plane's rows, if they stand in the blocks; 0 without a row.
  float row_scales[Traits::kHasRowScales ? Traits::kPlanes : 1][Traits::kHasRowScales ? Traits::kTileKeys : 1];
};

// Where a key is: its block, negative outside the sequence and where it was given back, and its token there. The head
// is that of its tile; negative: there is no tile.
struct DecodePlace {
  int32_t block, offset, kv_head;
};

template <class Cursor>
__device__ __forceinline__ void advance_shared(const AttendParams &p, Cursor *shared_cursor) {
  Cursor cursor = *shared_cursor;
  cursor.advance(p);
  __syncwarp();
  *shared_cursor = cursor;
  __syncwarp();
}

template <class Cursor>
__device__ __noinline__ void call_advance(const AttendParams &p, Cursor *shared_cursor) {
  advance_shared(p, shared_cursor);
}

// To the next (sequence, KV head). Rare, so it does not stand in the loops. All lanes call it.
template <class Traits>
__device__ __forceinline__ void advance_cursor(const AttendParams &p,
                                               DecodeCursor<Traits::kTileKeys, Traits::kRows> *shared_cursor) {
  if constexpr (Traits::kCalls) {
    call_advance(p, shared_cursor);
  } else {
    advance_shared(p, shared_cursor);
  }
}

// Position in the ring.
template <int kPlanes>
struct DecodeRing {
  int plane = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++plane == kPlanes) plane = 0, phase ^= 1;
  }
};

template <class Traits>
class DecodeLoader {
 public:
  using Cursor = DecodeCursor<Traits::kTileKeys, Traits::kRows>;

  __device__ DecodeLoader(const AttendParams &p, const DecodeLaunch &launch, const DecodeMaps &maps,
                          DecodeWarp<Traits> *warp, char *ring)
      : p_(p), launch_(launch), maps_(maps), warp_(*warp), planes_(ring), num_units_(warp->end - warp->begin) {
    enter_segment();
  }

  __device__ void look_up_first() { next_ = look_up(); }

  // Asks for the first planes of the ring, from `first` up to `end`.
  __device__ void fill(int first, int end) {
#pragma unroll 1
    for (int plane = first; plane < end; ++plane) ask(plane % 2 == 0);
  }

  // After K of a tile was used, then after V: its plane is free for the next one in turn.
  __device__ void refill(bool after_keys) { ask((Traits::kPlanes % 2 == 0) == after_keys); }

  // Waits for the scales of the plane whose turn it is: kPlanes were asked for from it on.
  __device__ void await_row_scales() const {
    wait_copies<Traits::kPlanes - 1>();
    __syncwarp();
  }

 private:
  // Looks up the next tile; lane l has key l % kTileKeys. Nothing here waits for the table.
  __device__ DecodePlace look_up() {
    DecodePlace place = {-1, 0, -1};
    if (num_units_ <= 0) return place;
    const int32_t key = key_ + static_cast<int32_t>(threadIdx.x % Traits::kTileKeys);
    place.kv_head = kv_head_;
    if (key < end_) {
      const int32_t index = key >> launch_.block_shift;
      place.block = blocks_[index];
      place.offset = key - (index << launch_.block_shift);
    }
    key_ += Traits::kTileKeys;
    --num_units_;
    if (--num_tiles_ == 0) {
      num_units_ -= kSegmentUnits;
      if (num_units_ > 0) {
        advance_cursor<Traits>(p_, &warp_.ahead);
        enter_segment();
      }
    }
    return place;
  }

  // Asks for K of the next tile, or then for its V. Boxes are in the hands of the lanes that have their first keys.
  __device__ void ask(bool is_key) {
    if (is_key) place_ = next_, next_ = look_up();
    if (Traits::kHasRowScales) ask_row_scales(is_key);
    if (place_.kv_head < 0) return;
    const int lane = threadIdx.x % 32;
    uint64_t *barrier = &warp_.full[ring_.plane];
    char *target = planes_ + ring_.plane * Traits::kPlaneBytes + lane * Traits::kPieceBytes;
    const uint32_t valid = __ballot_sync(0xffffffffu, place_.block >= 0);
    if (lane == 0) {
      if (is_key) warp_.valid[ring_.plane] = valid;
      arrive_with_bytes(barrier, Traits::kPlaneBytes);
    }
    if (launch_.box_rows < Traits::kTileKeys) __syncwarp();
    if (lane < Traits::kTileKeys && (lane & (launch_.box_rows - 1)) == 0) {
      const int32_t block = max(place_.block, -1);  // -1 lies outside and arrives as zeros
#pragma unroll 1
      for (int piece = 0; piece < Traits::kRowPieces; piece += launch_.box_pieces) {
        copy_box_once(target + piece * (Traits::kTileKeys * Traits::kPieceBytes), is_key ? &maps_.keys : &maps_.values,
                      barrier, piece * Traits::kPieceBytes, place_.offset, 0, place_.kv_head, block);
      }
    }
    ring_.advance();
  }

  // One group of copies a plane, empty ones too: their count is that of the planes.
  __device__ void ask_row_scales(bool is_key) {
    if (place_.kv_head >= 0) {
      const bool is_valid = place_.block >= 0;
      const int32_t block = is_valid ? place_.block : 0, lane = threadIdx.x % 32;
      const float *source = is_key ? k_scale_address(p_.kv, block, place_.offset, place_.kv_head)
                                   : v_scale_address(p_.kv, block, place_.offset, place_.kv_head);
      if (lane < Traits::kTileKeys) copy_async_4(&warp_.row_scales[ring_.plane][lane], source, is_valid);
    }
    commit_copies();
  }

  __device__ void enter_segment() {
    const Cursor &cursor = warp_.ahead;
    key_ = cursor.first_key();
    end_ = cursor.now.end;
    num_tiles_ = cursor.now.num_tiles - cursor.tile;
    blocks_ = p_.tables.block_table + cursor.sequence * p_.tables.table_stride;
    kv_head_ = cursor.kv_head;
  }

  const AttendParams &p_;
  const DecodeLaunch &launch_;
  const DecodeMaps &maps_;
  DecodeWarp<Traits> &warp_;
  char *const planes_;
  DecodeRing<Traits::kPlanes> ring_;
  int32_t num_units_, num_tiles_;  // left to be looked up: of the walk, of the segment
  int32_t key_, end_, kv_head_;    // first key of the next tile, end of the sequence
  const int32_t *blocks_;          // of the sequence
  DecodePlace place_, next_;       // of the tile that is asked for, of the one after it
};

}  // namespace pkv
