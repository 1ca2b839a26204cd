// How the thread blocks of the prefill kernel are shared out in a step of decode tokens and tiles of rows: some decode
// first, the others begin with tiles, whose keys may be cut in parts. Lanes try how many and how they are cut, and what
// would be done first wins. Times are counted in what a thread block takes for a tile of keys.
#pragma once

#include "backend/cuda/prefill_tiles.cuh"

namespace pkv {

struct MixedStep {
  float decode_units;  // of all KV heads
  float key_tiles;     // of all tiles of rows
  float row_length;    // of a tile of rows, in tiles of keys: the mean of those that the tiles of keys belong to
};

struct MixedShares {
  int32_t num_decode_blocks;
  float most_tiles, part_tiles;  // of keys, that a tile of rows has without being cut, and its parts then
};

// What they cost beside their keys: decoding to begin and to end, a tile of rows to be written, a part that and its
// share of the merge.
constexpr float kDecodeEnds = 3.0f, kRowEnds = 2.0f, kPartEnds = 6.0f;
constexpr float kLeastPart = 3.0f;  // tiles of keys
constexpr int32_t kEvenBlocks = 16;
constexpr float kUnevenDecode = 1.03f;  // times as long, by other numbers of thread blocks
constexpr float kUnevenTie = 0.25f;     // of numbers that take equally long one is chosen that half of kEvenBlocks divides
constexpr float kDecodeMargin = 1.1f;   // who waits for decoding costs more than who has decoded and helps with tiles

// By `blocks` of `all` thread blocks. Two multiprocessors that share a port read less than two that do not, and all
// together no more than memory gives. Of a number that a power of two divides segments begin and end with ranges of warps
// where they are equally long, as with choose_even_blocks.
template <class Traits>
__device__ inline float find_decode_time(float units, float blocks, float all) {
  const float ports = fminf(blocks, 0.5f * all);
  const float rate = fminf(ports + Traits::kSecondShare * (blocks - ports), Traits::kMostDecode * all);
  const float time = kDecodeEnds + __fdividef(units, rate * Traits::kDecodeUnits);
  return static_cast<int32_t>(blocks) % kEvenBlocks == 0 ? time : kUnevenDecode * time;
}

// When so many works of one length are done, of `all` thread blocks of which `late` begin with them after `delay`.
__device__ inline float find_end(float works, float length, float all, float late, float delay) {
  const float soon = all - late, start = __fdividef(delay, length);
  const float even = __fdividef(works + late * start, all);  // if works were without end divisible
  if (even <= start) return length * fmaxf(start, fminf(ceilf(__fdividef(works, soon)), start + 1.0f));
  const float rounds = ceilf(even), late_rounds = ceilf(even - start), late_end = start + late_rounds;
  float end = fmaxf(rounds, late_end);
  if (soon * rounds + late * floorf(rounds - start) >= works) end = fminf(end, rounds);
  if (soon * floorf(late_end) + late * late_rounds >= works) end = fminf(end, late_end);
  return length * end;
}

// The lane with the least cost, and of those the first.
__device__ inline int find_least_lane(float cost) {
  const uint32_t units = static_cast<uint32_t>(fminf(cost * 16.0f, 134217727.0f));
  return static_cast<int>(__reduce_min_sync(0xffffffffu, units * 32 + threadIdx.x % 32) % 32);
}

// All lanes of a warp call it.
template <class Traits>
__device__ inline MixedShares share_mixed(const MixedStep &step) {
  const float lane = static_cast<float>(threadIdx.x % 32), all = static_cast<float>(gridDim.x);
  const float row_tiles = __fdividef(step.key_tiles, step.row_length);
  // Few of them close to each other, more of them farther apart.
  float blocks = ceilf((lane + 1.0f) * (lane + 1.0f) * all * (1.0f / 1024.0f)), cuts = 1.0f, least = 1e9f;
  const auto try_cuts = [&](float count, float decode) {
    const float part = __fdividef(step.row_length, count);
    if (count > 1.0f && part < kLeastPart) return;
    const float end = find_end(row_tiles * count, part + (count > 1.0f ? kPartEnds : kRowEnds), all, blocks, decode);
    const float cost = fmaxf(end, kDecodeMargin * decode);
    if (cost < least) least = cost, cuts = count;
  };
  const float decode = find_decode_time<Traits>(step.decode_units, blocks, all);
#pragma unroll 1
  for (float count = 1.0f; count <= 32.0f; count += count < 4.0f ? 1.0f : 0.5f * count) try_cuts(ceilf(count), decode);
  const int winner = find_least_lane(least);
  // And those beside the winner.
  cuts = __shfl_sync(0xffffffffu, cuts, winner);
  blocks = fminf(fmaxf(__shfl_sync(0xffffffffu, blocks, winner) + lane - 15.0f, 1.0f), all);
  least = 1e9f;
  try_cuts(cuts, find_decode_time<Traits>(step.decode_units, blocks, all));
  if (static_cast<int32_t>(blocks) % (kEvenBlocks / 2) != 0) least += kUnevenTie;
  MixedShares shares;
  shares.num_decode_blocks = static_cast<int32_t>(__shfl_sync(0xffffffffu, blocks, find_least_lane(least)));
  shares.part_tiles = __fdividef(step.row_length, cuts);
  shares.most_tiles = shares.part_tiles * (cuts > 1.0f ? 1.25f : 2.0f);
  return shares;
}

}  // namespace pkv
