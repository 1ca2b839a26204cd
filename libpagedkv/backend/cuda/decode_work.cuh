// How a decode step is shared out. A unit of work is a tile of kTileKeys keys of one (sequence, KV head), and before
// its tiles each of those has kSegmentUnits for what its beginning and its end cost; units are numbered by sequence,
// then KV head, then key. The warps of the thread blocks that are active take equal, contiguous ranges of them.
// Everything is found from the lengths on the device: there is no plan on the host. The host has made sure that units
// are counted by 32 bits.
#pragma once

#include "backend/cuda/attend_tiles.cuh"
#include "backend/cuda/division.cuh"

namespace pkv {

// What a sequence asks for. Without query tokens it has no tiles, nor with more query rows than the kernel has room for,
// which is for others; else it has one at least, so that somebody writes its rows.
struct DecodeSequence {
  int32_t first_token, query_len;  // in the step
  int32_t begin, end;  // keys that any of its queries sees; the first one is that of a tile of the whole sequence
  int32_t num_tiles;

  // Of each of its KV heads.
  __device__ int32_t num_units() const { return num_tiles > 0 ? num_tiles + kSegmentUnits : 0; }
};

// Whether the query rows of a sequence are few enough.
template <int kRows>
__device__ inline bool is_decoded(const AttendParams &p, int32_t query_len) {
  return query_len > 0 && static_cast<int64_t>(query_len) * p.num_heads <= int64_t{kRows} * p.kv.num_kv_heads;
}

// Plain loads: what a launch waits for may write the tables while it is there already.
template <int kTileKeys, int kRows>
__device__ inline DecodeSequence read_sequence(const AttendParams &p, int32_t sequence) {
  DecodeSequence result;
  result.first_token = p.tables.cu_seqlens_q[sequence];
  result.query_len = p.tables.cu_seqlens_q[sequence + 1] - result.first_token;
  result.end = p.tables.seq_lens[sequence];
  result.begin = p.first_keys == nullptr ? 0 : p.first_keys[sequence];
  if (p.window > 0) {
    const int64_t lowest = result.end - result.query_len + 1 - p.window;
    result.begin = lowest > 0 ? static_cast<int32_t>(lowest) & -kTileKeys : 0;
  }
  const uint32_t num_keys = static_cast<uint32_t>(max(result.end - result.begin, 1));
  result.num_tiles = is_decoded<kRows>(p, result.query_len)
                         ? static_cast<int32_t>((num_keys + kTileKeys - 1) / kTileKeys)
                         : 0;
  return result;
}

// Where a warp stands. Not to be advanced past the last unit of the step.
template <int kTileKeys, int kRows>
struct DecodeCursor {
  int32_t sequence, kv_head, tile;
  DecodeSequence now;

  __device__ int32_t first_key() const { return now.begin + tile * kTileKeys; }

  // At the first tile from a unit of the sequence on, counted from its first one. Returns the units before that tile.
  __device__ int32_t enter(int32_t unit) {
    kv_head = static_cast<int32_t>(divide_small(static_cast<uint32_t>(unit), static_cast<uint32_t>(now.num_units())));
    const int32_t in_segment = unit - kv_head * now.num_units();
    tile = max(in_segment - kSegmentUnits, 0);
    return tile + kSegmentUnits - in_segment;
  }

  // To the next (sequence, KV head).
  __device__ void advance(const AttendParams &p) {
    tile = 0;
    if (++kv_head < p.kv.num_kv_heads) return;
    kv_head = 0;
    do {
      now = read_sequence<kTileKeys, kRows>(p, ++sequence);
    } while (now.num_tiles == 0);
  }
};

constexpr int kPartsAtOnce = 16;  // of a segment, from as many thread blocks
constexpr int kLongKeys = 192;    // of a warp, that are worth more of them

// Thread blocks that take part in a step. A few keys are not worth the merge of many; nor is it worth more parts of a
// segment than are taken at once, as long as half of the thread blocks do, which read nearly as fast as all where each
// has a port to memory of its own.
template <class Traits>
__device__ inline int32_t count_active(int32_t num_units, int32_t num_segments, int32_t num_blocks) {
  constexpr int32_t kLongUnits = kLongKeys / Traits::kTileKeys * Traits::kWarps;
  const int32_t most = min(max(num_units / Traits::kWarps, 1), num_blocks);
  const int32_t enough = max(kPartsAtOnce * max(min(num_segments, num_blocks), 1), num_units / kLongUnits);
  return enough <= num_blocks / 2 ? min(most, enough) : most;
}

// Equal ranges of units, in order. Those that are longer by one are spread evenly. Where each segment of a step could have
// a whole number of ranges, if all are of one length, ranges begin with segments, and what a beginning costs is left out:
// each of their warps has one. A tile is much for a warp that has thirty of them.
class DecodeShares {
 public:
  __device__ DecodeShares(int32_t num_units, int32_t num_ranges, int32_t num_segments)
      : group_units_(num_units), group_ranges_(num_ranges), lead_(0) {
    if (num_segments > 0 && num_segments < num_ranges) {
      const auto ranges = static_cast<int32_t>(divide_small(num_ranges, num_segments));
      const auto units = static_cast<int32_t>(divide_small(num_units, num_segments));
      if (ranges * num_segments == num_ranges && units * num_segments == num_units && units > kSegmentUnits) {
        group_units_ = units, group_ranges_ = ranges, lead_ = kSegmentUnits;
      }
    }
    size_ = static_cast<int32_t>(static_cast<uint32_t>(group_units_ - lead_) / static_cast<uint32_t>(group_ranges_));
    rest_ = group_units_ - lead_ - size_ * group_ranges_;
  }

  __device__ int32_t begin(int32_t range) const {
    const auto group = static_cast<int32_t>(divide_small(range, group_ranges_));
    const int32_t in_group = range - group * group_ranges_;
    const int32_t rests = static_cast<int32_t>(divide_small(in_group * rest_, group_ranges_));
    return group * group_units_ + (in_group > 0 ? lead_ + in_group * size_ + rests : 0);
  }
  __device__ int32_t owner(int32_t unit) const {
    const auto group = static_cast<int32_t>(divide_small(unit, group_units_));
    const auto in_group = static_cast<float>(max(unit - group * group_units_ - lead_, 0));
    const float mean = static_cast<float>(size_) + __fdividef(static_cast<float>(rest_), static_cast<float>(group_ranges_));
    int32_t range = group * group_ranges_ + static_cast<int32_t>(__fdividef(in_group, mean));  // or a neighbour
    while (begin(range) > unit) --range;
    while (begin(range + 1) <= unit) ++range;
    return range;
  }

 private:
  int32_t group_units_, group_ranges_;  // of a segment, or of the whole step
  int32_t lead_;                        // units of the first range of a group beyond its share
  int32_t size_, rest_;                 // of the ranges' equal shares
};

__device__ inline int32_t scan_warp(int32_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// Up to kMost sequences: every warp has them all, a lane as many neighbouring ones as it takes, and none waits for
// another.
template <int kTileKeys, int kRows, int kPerLane>
class DecodeLanes {
 public:
  static constexpr int kMost = 32 * kPerLane;

  // Returns the units of one KV head of all sequences.
  __device__ int32_t add_up(const AttendParams &p) {
    const int lane = threadIdx.x % 32;
    const int num_sequences = static_cast<int>(p.tables.num_sequences);
    per_lane_ = kPerLane == 1 ? 1 : (num_sequences + 31) / 32;
    int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      own_[i] = {};
      if (i >= per_lane_) continue;
      const int sequence = lane * per_lane_ + i;
      if (sequence < num_sequences) own_[i] = read_sequence<kTileKeys, kRows>(p, sequence);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) own += own_[i].num_units();
    end_unit_ = own;
#pragma unroll 1
    for (int distance = 1; distance < min(num_sequences, 32); distance *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffffu, end_unit_, distance);
      if (lane >= distance) end_unit_ += before;
    }
    first_unit_ = end_unit_ - own;
    return __shfl_sync(0xffffffffu, end_unit_, min(num_sequences - 1, 31));
  }

  // The cursor of the first tile from a unit on that exists, which becomes the unit of that tile.
  __device__ DecodeCursor<kTileKeys, kRows> find(const AttendParams &p, int32_t *unit) const {
    constexpr uint32_t kAll = 0xffffffffu;
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAll, end_unit_ * p.kv.num_kv_heads > *unit))) - 1;
    // What the lane would take for the one, if it was the owner.
    DecodeSequence own = own_[0];
    int32_t before = first_unit_, index = 0;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (i >= per_lane_) break;
      const int32_t end = before + own.num_units();
      if (index == i - 1 && end * p.kv.num_kv_heads <= *unit) before = end, own = own_[i], index = i;
    }
    DecodeCursor<kTileKeys, kRows> cursor;
    cursor.sequence = owner * per_lane_ + __shfl_sync(kAll, index, owner);
    cursor.now.first_token = __shfl_sync(kAll, own.first_token, owner);
    cursor.now.query_len = __shfl_sync(kAll, own.query_len, owner);
    cursor.now.begin = __shfl_sync(kAll, own.begin, owner);
    cursor.now.end = __shfl_sync(kAll, own.end, owner);
    cursor.now.num_tiles = __shfl_sync(kAll, own.num_tiles, owner);
    *unit += cursor.enter(*unit - __shfl_sync(kAll, before, owner) * p.kv.num_kv_heads);
    return cursor;
  }

 private:
  int32_t per_lane_;  // the lane has sequences lane * per_lane_ and on
  DecodeSequence own_[kPerLane];
  int32_t first_unit_, end_unit_;  // of one KV head, before and behind them; of lanes without one they mean nothing
};

// More of them. Units of the sequences, summed up by strips: thread t has sequences t * strip and on. In shared memory.
template <int kThreads>
struct DecodeStrips {
  int32_t first_unit[kThreads];  // units of one KV head before the strip
  int32_t warp_units[kThreads / 32];

  // All threads call it; returns the units of one KV head of all sequences. sync: their barrier.
  template <int kTileKeys, int kRows, class Sync>
  __device__ int32_t add_up(const AttendParams &p, int32_t strip, int thread, Sync sync) {
    const int warp = thread / 32, lane = thread % 32;
    const int32_t first = thread * strip, end = min(first + strip, static_cast<int32_t>(p.tables.num_sequences));
    int32_t own = 0;
    for (int32_t s = first; s < end; ++s) own += read_sequence<kTileKeys, kRows>(p, s).num_units();
    const int32_t sum = scan_warp(own, lane);
    if (lane == 31) warp_units[warp] = sum;
    sync();
    int32_t before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w == warp) before = total;
      total += warp_units[w];
    }
    first_unit[thread] = before + sum - own;
    sync();
    return total;
  }

  // As that of DecodeLanes; whole warps call it.
  template <int kTileKeys, int kRows>
  __device__ DecodeCursor<kTileKeys, kRows> find(const AttendParams &p, int32_t strip, int32_t *unit) const {
    constexpr uint32_t kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    const int32_t num_heads = p.kv.num_kv_heads;
    // The last strip that starts at or before the unit.
    const bool is_warp = lane < kThreads / 32 && first_unit[min(lane, kThreads / 32 - 1) * 32] * num_heads <= *unit;
    const int group = 31 - __clz(static_cast<int>(__ballot_sync(kAll, is_warp)));
    const bool is_strip = first_unit[group * 32 + lane] * num_heads <= *unit;
    const int in_group = 31 - __clz(static_cast<int>(__ballot_sync(kAll, is_strip)));
    const int32_t index = group * 32 + in_group;
    int32_t before = first_unit[index];
    DecodeCursor<kTileKeys, kRows> cursor;
    cursor.sequence = index * strip;
    for (;;) {  // from strip to sequence
      cursor.now = read_sequence<kTileKeys, kRows>(p, cursor.sequence);
      if ((before + cursor.now.num_units()) * num_heads > *unit) break;
      before += cursor.now.num_units();
      ++cursor.sequence;
    }
    *unit += cursor.enter(*unit - before * num_heads);
    return cursor;
  }
};

}  // namespace pkv
