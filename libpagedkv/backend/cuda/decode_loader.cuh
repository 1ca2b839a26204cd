// How the decode kernel comes to its rows: a warp looks keys up in the block table, a tile ahead of the copies that it
// then asks for.
#pragma once

#include "backend/cuda/decode_products.cuh"
#include "backend/cuda/decode_work.cuh"

namespace pkv {

// What a launch adds to the parameters.
struct DecodeLaunch {
  int32_t block_shift;  // block_size = 1 << block_shift
  uint32_t *tickets;    // [gridDim.x]: thread blocks that are done with the segment that starts in one and leaves it
  // [gridDim.x, 2, kRows, kPartStride]: of the segment that comes to a thread block, of that which leaves it
  float *parts;
};

// What a warp keeps in shared memory, to have registers left: where it stands with the block table and with the
// products, in units [begin, end).
template <int kTileKeys>
struct DecodeWarp {
  DecodeCursor<kTileKeys> ahead, now;  // as of the first tile of the present segment
  int64_t begin, end;
};

// Where a key is: its block, negative outside the sequence and where it was given back, and bytes in the block.
struct DecodePlace {
  int32_t block;
  uint32_t offset;
};

// Finds the rows of the tiles and loads them. Lane l knows key l % kTileKeys of a tile.
template <class Traits>
class DecodeLoader {
 public:
  using Cursor = DecodeCursor<Traits::kTileKeys>;
  static constexpr bool kSplitsLanes = Traits::kTileKeys == 16;  // upper lanes have V's addresses

  __device__ DecodeLoader(const AttendParams &p, const DecodeLaunch &launch, Cursor *ahead, int32_t num_units)
      : p_(p), launch_(launch), ahead_(*ahead), num_units_(num_units) {
    enter_segment(*ahead);
  }

  // Looks up the next tile. Nothing here waits for the table.
  __device__ DecodePlace look_up() {
    if (num_units_ == 0) return {-1, 0};
    DecodePlace place = {-1, 0};
    const uint32_t key = key_ + threadIdx.x % Traits::kTileKeys;
    if (key < end_) {
      const uint32_t index = key >> launch_.block_shift;
      const uint32_t token_bytes = static_cast<uint32_t>(p_.kv.k_token_stride) * Traits::kBytes;
      place = {__ldg(blocks_ + index), plane_ + (key - (index << launch_.block_shift)) * token_bytes};
    }
    key_ += Traits::kTileKeys;
    --num_units_;
    if (--num_tiles_ == 0 && num_units_ > 0) {
      Cursor cursor = ahead_;
      cursor.tile = cursor.now.num_tiles - 1;
      cursor.advance(p_);
      __syncwarp();
      ahead_ = cursor;
      enter_segment(cursor);
    }
    return place;
  }

  // The rows of a tile that was looked up; then loads may follow.
  __device__ void resolve(const DecodePlace &place) {
    const bool is_valid = place.block >= 0;
    const char *base = static_cast<const char *>(p_.kv.base);  // an address that nothing is read from
    const char *row = block_address(p_.kv, place.block) + place.offset;
    rows_[0] = is_valid ? row : base;
    if constexpr (!kSplitsLanes) rows_[1] = is_valid ? row + (p_.kv.v_offset - p_.kv.k_offset) : base;
    valid_ = __ballot_sync(0xffffffffu, is_valid);
  }

  __device__ uint32_t valid() const { return valid_; }  // bit i: key i of the resolved tile

  // Asks for K of the resolved tile, into a plane of the ring. Lanes beside each other take neighbouring pieces of a
  // row, which other lanes may read.
  __device__ void copy_keys(uint32_t plane) const {
    constexpr int kRowPieces = 4 * Traits::kKeyUnits;
    const int lane = threadIdx.x % 32;
    const int piece = lane % kRowPieces;
#pragma unroll
    for (int i = 0; i < Traits::kTileKeys * kRowPieces / 32; ++i) {
      const int key = i * (32 / kRowPieces) + lane / kRowPieces;
      const int target = piece_offset<4>(key / 8 * Traits::kKeyUnits + piece / 4, key % 8 * 4 + piece % 4);
      copy_stream<4>(plane + target, shuffle(rows_[0], key) + piece * 16, is_valid(key));
    }
    commit_copies();
  }

  // The same of V; a lane reads what it has copied itself.
  __device__ void copy_values(uint32_t plane) const {
    constexpr int kWords = Traits::kValueWords;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4 * Traits::kKeyTiles; ++i) {
      const int key = i / 4 * 16 + (lane % 4) * 2 + i % 2 + i / 2 % 2 * 8;
      const char *row = shuffle(rows_[kSplitsLanes ? 0 : 1], kSplitsLanes ? key + 16 : key) + (lane / 4) * kWords * 4;
#pragma unroll
      for (int unit = 0; unit < Traits::kValueUnits; ++unit) {
        copy_stream<kWords>(plane + piece_offset<kWords>(i * Traits::kValueUnits + unit, lane),
                            row + unit * 32 * kWords, is_valid(key));
      }
    }
    commit_copies();
  }

 private:
  __device__ void enter_segment(const Cursor &cursor) {
    key_ = static_cast<uint32_t>(cursor.first_key());
    end_ = static_cast<uint32_t>(cursor.now.end);
    num_tiles_ = cursor.now.num_tiles - cursor.tile;
    blocks_ = p_.tables.block_table + cursor.sequence * p_.tables.table_stride;
    const bool is_value = kSplitsLanes && threadIdx.x % 32 >= 16;
    plane_ = static_cast<uint32_t>(is_value ? v_row_offset(p_.kv, 0, cursor.kv_head, Traits::kBytes)
                                            : k_row_offset(p_.kv, 0, cursor.kv_head, Traits::kBytes));
  }

  __device__ bool is_valid(int key) const { return (valid_ >> key & 1) != 0; }

  __device__ static const char *shuffle(const char *row, int lane) {
    return reinterpret_cast<const char *>(
        __shfl_sync(0xffffffffu, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(row)), lane));
  }

  const AttendParams &p_;
  const DecodeLaunch &launch_;
  Cursor &ahead_;
  int32_t num_units_, num_tiles_;  // left to be looked up: of the walk, of the segment
  uint32_t key_, end_, plane_;  // first key of the next tile, end of the sequence, bytes to the head's rows
  const int32_t *blocks_;  // of the sequence
  const char *rows_[kSplitsLanes ? 1 : 2];
  uint32_t valid_;
};

}  // namespace pkv
