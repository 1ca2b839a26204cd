// The end of a decode step: parts of segments become rows of output. And the kernel as a whole.
#pragma once

#include "backend/cuda/attend_decode.cuh"

namespace pkv {

// The part of a slot: of a warp's first segment, or of its last one.
template <class Traits>
__device__ inline const float *find_part(const char *planes, int slot) {
  return reinterpret_cast<const float *>(slot % 2 == 0 ? planes + Traits::kWarps * Traits::kRingBytes +
                                                             slot / 2 * (Traits::kPartFloats * 4)
                                                       : planes + slot / 2 * Traits::kRingBytes);
}

// A warp merges the parts of a row that the thread block has, and writes it, or a part of it to the workspace.
template <class Traits>
__device__ inline void merge_slots(const AttendParams &p, const DecodeSlot &slot, uint32_t members, int32_t row,
                                   bool is_whole, const char *planes, float *part) {
  constexpr int kSlots = 2 * Traits::kWarps;
  const int lane = threadIdx.x % 32;
  const bool has_dims = lane * 4 < Traits::kDim;
  const auto row_of = [&](int index) { return find_part<Traits>(planes, index) + row * Traits::kPartStride; };
  float2 state = {kLowest, 0.0f};  // maximum and sum: a slot a lane
  if ((members >> lane & 1) != 0) state = *reinterpret_cast<const float2 *>(row_of(lane) + Traits::kDim);
  float4 values[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    values[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (has_dims && (members >> i & 1) != 0) values[i] = *reinterpret_cast<const float4 *>(row_of(i) + lane * 4);
  }
  const float largest = max_warp(state.x), weight = raise_two(state.x - largest);
  const float sum = add_warp(weight * state.y);
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kSlots; ++i) add_share(&total, __shfl_sync(0xffffffffu, weight, i), values[i]);
  if (is_whole) {
    int64_t offset;
    const float factor = finish_decode_row(p, slot.first_token, row, true, slot.kv_head, slot.value_scale, largest, sum,
                                           lane == 0, &offset);
    if (has_dims) write_dims<typename Traits::T>(p, offset + lane * 4, total, factor);
  } else {
    float *const row_part = part + row * Traits::kPartStride;
    if (has_dims) *reinterpret_cast<float4 *>(row_part + lane * 4) = total;
    if (lane == 0) *reinterpret_cast<float2 *>(row_part + Traits::kDim) = {largest, sum};
  }
}

// A warp merges the parts of a row that thread blocks first to last have left: kAtOnce are on their way together.
template <class Traits>
__device__ void merge_blocks(const AttendParams &p, const DecodeSlot &slot, int32_t first, int32_t last, int32_t row,
                             const float *parts) {
  constexpr int kAtOnce = 20;
  const int lane = threadIdx.x % 32;
  const bool has_dims = lane * 4 < Traits::kDim;
  float largest = kLowest, sum = 0.0f;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int32_t base = first; base <= last; base += kAtOnce) {
    // Of the first thread block the part that leaves it, of the others the one that comes.
    const float *const from =
        parts + static_cast<int64_t>(base) * (2 * Traits::kPartFloats) + row * Traits::kPartStride;
    const int first_offset = base == first ? Traits::kPartFloats : 0;
    float2 state = {kLowest, 0.0f};
    if (lane < kAtOnce && base + lane <= last) {
      const int offset = lane == 0 ? first_offset : lane * (2 * Traits::kPartFloats);
      state = __ldcg(reinterpret_cast<const float2 *>(from + offset + Traits::kDim));
    }
    float4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float *const own = i == 0 ? from + first_offset : from + i * (2 * Traits::kPartFloats);
      values[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (has_dims && base + i <= last) values[i] = __ldcg(reinterpret_cast<const float4 *>(own + lane * 4));
    }
    const float before = largest;
    largest = fmaxf(largest, max_warp(state.x));
    const float shrink = raise_two(before - largest), weight = raise_two(state.x - largest);
    sum = sum * shrink + add_warp(weight * state.y);
    total = {total.x * shrink, total.y * shrink, total.z * shrink, total.w * shrink};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) add_share(&total, __shfl_sync(0xffffffffu, weight, i), values[i]);
  }
  int64_t offset;
  const float factor = finish_decode_row(p, slot.first_token, row, true, slot.kv_head, slot.value_scale, largest, sum,
                                         lane == 0, &offset);
  if (has_dims) write_dims<typename Traits::T>(p, offset + lane * 4, total, factor);
}

// Whether `most` others have come before; the ticket is zero again then. What the thread block has written before its
// last barrier is seen by those that come later, and the other way round.
__device__ inline bool take_ticket(uint32_t *ticket, uint32_t most) {
  uint32_t before;
  asm volatile("fence.acq_rel.gpu;\natom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(ticket), "r"(most)
               : "memory");
  return before == most;
}

// What a thread block keeps in shared memory beside planes and parts.
template <class Traits>
struct DecodeShared {
  DecodeStrips<Traits::kThreads> strips;
  DecodeSlot slots[2 * Traits::kWarps];
  DecodeWarp<Traits> warps[Traits::kWarps];
  bool are_last[2];
};

// The share of thread block `block` of num_blocks in a decode step, for kThreads threads, numbered by `thread`, whose
// barrier is `sync`. planes: aligned to 1024 bytes; rings [kWarps, kPlanes, kPlaneBytes], then parts
// [kWarps, kRows, kPartStride].
template <class Traits, class Sync>
__device__ __forceinline__ void decode_share(const AttendParams &p, const DecodeLaunch &launch, const DecodeMaps &maps,
                                             DecodeShared<Traits> *shared, char *planes, int thread, int32_t block,
                                             int32_t num_blocks, Sync sync) {
  constexpr int kTileKeys = Traits::kTileKeys, kRows = Traits::kRows;
  const int warp = thread / 32, lane = thread % 32;
  DecodeWarp<Traits> *const own = &shared->warps[warp];
  DecodeSlot *const slots = shared->slots;
  if (thread == 0) prefetch_map(&maps.keys), prefetch_map(&maps.values);
  if (lane < 2) slots[2 * warp + lane].first_unit = -1;
  if (lane < Traits::kPlanes) init_barrier(&own->full[lane], 1);
  fence_barrier_init();
  __syncwarp();

  const int32_t num_sequences = static_cast<int32_t>(p.tables.num_sequences);
  const bool is_small = num_sequences <= 32;
  const int32_t strip = (num_sequences + Traits::kThreads - 1) / Traits::kThreads;
  DecodeLanes<kTileKeys, kRows> lanes;
  const int32_t num_tiles =
      is_small ? lanes.add_up(p) : shared->strips.template add_up<kTileKeys, kRows>(p, strip, thread, sync);
  const int32_t num_units = num_tiles * p.kv.num_kv_heads;
  // A few keys are not worth the merge of many thread blocks.
  const int32_t num_active = min(max(num_units / Traits::kWarps, 1), num_blocks);
  const DecodeShares shares(num_units, num_active * Traits::kWarps);
  const int32_t first_warp = block * Traits::kWarps;
  const int32_t begin = shares.begin(first_warp), end = shares.begin(first_warp + Traits::kWarps);
  const bool has_units = block < num_active && end > begin;
  if (has_units) {
    const int32_t warp_begin = shares.begin(first_warp + warp), warp_end = shares.begin(first_warp + warp + 1);
    if (warp_begin < warp_end) {
      const auto cursor = is_small ? lanes.find(p, warp_begin)
                                   : shared->strips.template find<kTileKeys, kRows>(p, strip, warp_begin);
      own->ahead = own->now = cursor;  // by every lane, the same
      own->begin = warp_begin, own->end = warp_end;
      __syncwarp();
      DecodeWalk<Traits> walk(p, launch, maps, own, planes + warp * Traits::kRingBytes,
                              reinterpret_cast<float *>(planes + Traits::kWarps * Traits::kRingBytes) +
                                  warp * Traits::kPartFloats);
      walk.run(slots + 2 * warp);
    }
  }
  sync();
  if (!has_units) return;

  // Parts of one segment stand in neighbouring slots that are in use.
  const int32_t own_unit = lane < 2 * Traits::kWarps ? slots[lane].first_unit : -1;
  const uint32_t used = __ballot_sync(0xffffffffu, own_unit >= 0);
  const uint32_t below = used & ((1u << lane) - 1);
  const int32_t before = __shfl_sync(0xffffffffu, own_unit, below == 0 ? lane : 31 - __clz(static_cast<int>(below)));
  const uint32_t firsts = __ballot_sync(0xffffffffu, own_unit >= 0 && (below == 0 || before != own_unit));
  float *parts = launch.parts + static_cast<int64_t>(block) * (2 * Traits::kPartFloats);
  int task = 0;
#pragma unroll 1
  for (uint32_t rest = firsts; rest != 0; rest &= rest - 1) {
    const int first = __ffs(static_cast<int>(rest)) - 1;
    const uint32_t next = rest & (rest - 1);
    const uint32_t members = used & ~((1u << first) - 1) & (next == 0 ? 0xffffffffu : (next & -next) - 1);
    const DecodeSlot &slot = slots[first];
    const bool comes = slot.first_unit < begin, leaves = slot.first_unit + slot.num_units > end;
#pragma unroll 1
    for (int32_t row = 0; row < slot.num_rows; ++row) {
      if (task++ % Traits::kWarps != warp) continue;
      merge_slots<Traits>(p, slot, members, row, !comes && !leaves, planes,
                          parts + (comes ? 0 : Traits::kPartFloats));
    }
  }
  if (firsts == 0) return;

  // Only the first group can come from another thread block, only the last one leave without having come.
  const int ends[2] = {__ffs(static_cast<int>(firsts)) - 1, 31 - __clz(static_cast<int>(firsts))};
  bool crosses[2];
  int32_t first_block[2], last_block[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const DecodeSlot &slot = slots[ends[i]];
    const bool comes = slot.first_unit < begin, leaves = slot.first_unit + slot.num_units > end;
    crosses[i] = i == 0 ? comes : !comes && leaves;
    if (!crosses[i]) continue;
    first_block[i] = shares.owner(slot.first_unit) / Traits::kWarps;
    last_block[i] = shares.owner(slot.first_unit + slot.num_units - 1) / Traits::kWarps;
  }
  if (!crosses[0] && !crosses[1]) return;
  sync();
  if (thread < 2) {
    const int i = thread;
    const bool is_crossing = i == 0 ? crosses[0] : crosses[1];
    const int32_t first = i == 0 ? first_block[0] : first_block[1], last = i == 0 ? last_block[0] : last_block[1];
    shared->are_last[i] = is_crossing && take_ticket(&launch.tickets[first], static_cast<uint32_t>(last - first));
  }
  sync();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!shared->are_last[i]) continue;
    const DecodeSlot slot = slots[ends[i]];
    for (int32_t row = warp; row < slot.num_rows; row += Traits::kWarps) {
      merge_blocks<Traits>(p, slot, first_block[i], last_block[i], row, launch.parts);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    attend_decode(const __grid_constant__ AttendParams p, const __grid_constant__ DecodeLaunch launch,
                  const __grid_constant__ DecodeMaps maps) {
#ifdef PKV_IS_SM90A
  extern __shared__ char dynamic_shared[];
  __shared__ DecodeShared<Traits> shared;
  __shared__ int32_t num_tokens;  // without padding
  // Swizzled rows stand in groups of 1024 bytes.
  char *planes = dynamic_shared + ((1024 - shared_address(dynamic_shared) % 1024) & 1023);
  if (threadIdx.x == 0) num_tokens = __ldg(p.tables.cu_seqlens_q + p.tables.num_sequences);
  decode_share<Traits>(p, launch, maps, &shared, planes, static_cast<int>(threadIdx.x),
                       static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x), [] { __syncthreads(); });
  clear_padding<typename Traits::T>(p, num_tokens, threadIdx.x, blockDim.x);  // there since a barrier
#endif
}

}  // namespace pkv
