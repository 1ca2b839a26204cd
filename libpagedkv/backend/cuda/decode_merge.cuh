// The end of a decode step: parts of segments become rows of output. And the kernel as a whole.
#pragma once

#include "backend/cuda/attend_decode.cuh"
#include "backend/cuda/dependent_launch.cuh"

namespace pkv {

// The part of a slot: of a warp's first segment, or of its last one.
template <class Traits>
__device__ inline const float *find_part(const char *planes, int slot) {
  return reinterpret_cast<const float *>(slot % 2 == 0 ? planes + Traits::kWarps * Traits::kRingBytes +
                                                             slot / 2 * (Traits::kPartFloats * 4)
                                                       : planes + slot / 2 * Traits::kRingBytes);
}

// A row over some of its keys, or the piece of one that kRowParts makes of it, in kLanes lanes: four or eight dims in each,
// lane l has those from 4 l and from 4 (l + kLanes) on; the maximum and the sum of weights are those of all of them.
template <int kLanes>
struct DecodePartial {
  static constexpr int kVectors = 32 / kLanes;
  float largest, sum;
  float4 total[kVectors];
};

// kLanes lanes merge the parts of a row that the thread block has. The whole warp calls it.
template <class Traits, int kLanes>
__device__ inline DecodePartial<kLanes> merge_slots(uint32_t members, int32_t row, const char *planes) {
  constexpr int kAtOnce = 4, kVectors = DecodePartial<kLanes>::kVectors;
  static_assert(2 * Traits::kWarps <= kLanes);
  const int lane = threadIdx.x % kLanes;
  const auto row_of = [&](int index) { return find_part<Traits>(planes, index) + row * Traits::kPartStride; };
  float2 state = {kLowest, 0.0f};  // maximum and sum: a slot a lane
  if ((members >> lane & 1) != 0) state = *reinterpret_cast<const float2 *>(row_of(lane) + Traits::kPartDims);
  int slots[kAtOnce];
  float4 values[kAtOnce][kVectors];
  const auto load_next = [&] {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      slots[i] = __ffs(static_cast<int>(members)) - 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int dim = (lane + v * kLanes) * 4;
        values[i][v] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (members != 0 && dim < Traits::kPartDims) {
          values[i][v] = *reinterpret_cast<const float4 *>(row_of(slots[i]) + dim);
        }
      }
      members &= members - 1;
    }
  };
  load_next();
  DecodePartial<kLanes> result;
  result.largest = reduce_warp<kLanes>(state.x, [](float a, float b) { return fmaxf(a, b); });
  const float weight = raise_two(state.x - result.largest);
  result.sum = reduce_warp<kLanes>(weight * state.y, [](float a, float b) { return a + b; });
#pragma unroll
  for (int v = 0; v < kVectors; ++v) result.total[v] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float share = __shfl_sync(0xffffffffu, weight, slots[i], kLanes);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) add_share(&result.total[v], share, values[i][v]);
    }
    if (!__any_sync(0xffffffffu, members != 0)) return result;
    load_next();
  }
}

// Adds `next` to `total`, each lane for itself.
__device__ inline void merge_partial(DecodePartial<32> *total, const DecodePartial<32> &next) {
  const float largest = fmaxf(total->largest, next.largest);
  const float shrink = raise_two(total->largest - largest), weight = raise_two(next.largest - largest);
  const float4 before = total->total[0];
  *total = {largest, total->sum * shrink + next.sum * weight, {{0.0f, 0.0f, 0.0f, 0.0f}}};
  add_share(&total->total[0], shrink, before);
  add_share(&total->total[0], weight, next.total[0]);
}

template <class Traits, int kLanes>
__device__ inline void write_partial(const AttendParams &p, int32_t group, const DecodeSlot &slot, int32_t row,
                                     bool is_row, const DecodePartial<kLanes> &partial) {
  const int lane = threadIdx.x % kLanes;
  const int32_t piece = row % Traits::kRowParts;
  int64_t offset;
  const float factor = finish_decode_row(p, group, slot.first_token, row / Traits::kRowParts, is_row, slot.kv_head,
                                         slot.value_scale, partial.largest, partial.sum, lane == 0 && piece == 0,
                                         &offset);
#pragma unroll
  for (int v = 0; v < DecodePartial<kLanes>::kVectors; ++v) {
    const int32_t in_piece = (lane + v * kLanes) * 4, dim = piece * Traits::kPartDims + in_piece;
    const bool has_dims = in_piece < Traits::kPartDims && (!Traits::kIsPadded || dim < p.kv.head_dim);
    if (is_row && has_dims) write_dims<typename Traits::T>(p, offset + dim, partial.total[v], factor);
  }
}

// --- Parts from one thread block to another. A word of zero bits is one that has not come: who leaves a part turns 0
// into -0, who takes it puts zeros back. So a part needs neither a fence nor a flag, and no round trip but its own. The
// thread block of a segment's last keys waits for those before it, which have been there before it; each leaves what it
// has to leave before it waits itself.

__device__ inline float as_come(float value) { return __float_as_uint(value) == 0 ? -0.0f : value; }

// 0 if one of the words has not come.
__device__ inline uint32_t find_least(const float4 &value) {
  return min(min(__float_as_uint(value.x), __float_as_uint(value.y)),
             min(__float_as_uint(value.z), __float_as_uint(value.w)));
}

__device__ inline float4 load_come(const float4 *source) {
  float4 result;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(result.x), "=f"(result.y), "=f"(result.z), "=f"(result.w)
               : "l"(source)
               : "memory");
  return result;
}

template <class Traits>
__device__ inline void leave_partial(float *part, const DecodePartial<32> &partial) {
  const int lane = threadIdx.x % 32;
  const float4 &total = partial.total[0];
  if (lane * 4 < Traits::kPartDims) {
    __stcg(reinterpret_cast<float4 *>(part + lane * 4),
           float4{as_come(total.x), as_come(total.y), as_come(total.z), as_come(total.w)});
  }
  if (lane == 0) {
    __stcg(reinterpret_cast<float4 *>(part + Traits::kPartDims),
           float4{as_come(partial.largest), as_come(partial.sum), 1.0f, 1.0f});
  }
}

// A warp takes what thread blocks `first` up to `end`, this one, have left of a row, kPartsAtOnce on their way together,
// and adds `own` to it.
template <class Traits>
__device__ DecodePartial<32> take_partials(float *parts, int32_t first, int32_t end, int32_t row,
                                           const DecodePartial<32> &own) {
  const int lane = threadIdx.x % 32;
  const bool has_dims = lane * 4 < Traits::kPartDims;
  DecodePartial<32> result = {kLowest, 0.0f, {{0.0f, 0.0f, 0.0f, 0.0f}}};
#pragma unroll 1
  for (int32_t base = first; base < end; base += kPartsAtOnce) {
    // Of the first thread block the part that leaves it, of the others the one that comes.
    float *const from = parts + static_cast<int64_t>(base) * (2 * Traits::kPartFloats) + row * Traits::kPartStride;
    const int first_offset = base == first ? Traits::kPartFloats : 0;
    const auto part_of = [&](int i) { return from + (i == 0 ? first_offset : i * (2 * Traits::kPartFloats)); };
    const bool has_state = lane < kPartsAtOnce && base + lane < end;
    const float4 zeros = {0.0f, 0.0f, 0.0f, 0.0f};
    const int count = has_dims ? min(end - base, kPartsAtOnce) : 0;
    float4 state = zeros, values[kPartsAtOnce];
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) values[i] = zeros;
    if (has_state) state = load_come(reinterpret_cast<const float4 *>(part_of(lane) + Traits::kPartDims));
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      if (i < count) values[i] = load_come(reinterpret_cast<const float4 *>(part_of(i) + lane * 4));
    }
    for (;;) {  // what has not come is asked for again
      bool is_late = has_state && find_least(state) == 0;
      if (is_late) state = load_come(reinterpret_cast<const float4 *>(part_of(lane) + Traits::kPartDims));
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        if (i < count && find_least(values[i]) == 0) {
          values[i] = load_come(reinterpret_cast<const float4 *>(part_of(i) + lane * 4));
          is_late = true;
        }
      }
      if (!__any_sync(0xffffffffu, is_late)) break;
    }
    if (!has_state) state.x = kLowest;
    if (has_state) *reinterpret_cast<float4 *>(part_of(lane) + Traits::kPartDims) = zeros;
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      if (has_dims && base + i < end) *reinterpret_cast<float4 *>(part_of(i) + lane * 4) = zeros;
    }
    DecodePartial<32> next;
    next.largest = reduce_warp(state.x, [](float a, float b) { return fmaxf(a, b); });
    const float weight = raise_two(state.x - next.largest);
    next.sum = reduce_warp(weight * state.y, [](float a, float b) { return a + b; });
    next.total[0] = zeros;
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) add_share(&next.total[0], __shfl_sync(0xffffffffu, weight, i), values[i]);
    merge_partial(&result, next);
  }
  merge_partial(&result, own);
  return result;
}

// What a thread block keeps in shared memory beside planes and parts.
template <class Traits>
struct DecodeShared {
  DecodeStrips<Traits::kThreads> strips;
  DecodeSlot slots[2 * Traits::kWarps];
  DecodeWarp<Traits> warps[Traits::kWarps];
};

// Before anything that the device may have written is read.
template <class Traits>
__device__ __forceinline__ void start_decode(const DecodeMaps &maps, DecodeShared<Traits> *shared, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  if (thread == 0) prefetch_map(&maps.keys), prefetch_map(&maps.values);
  if (lane < 2) shared->slots[2 * warp + lane].first_unit = -1;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < Traits::kPlanes; ++i) init_barrier(&shared->warps[warp].full[i], 1);
  }
  fence_barrier_init();
  __syncwarp();
}

// The share of thread block `block` of num_blocks in a decode step, for kThreads threads, numbered by `thread`, whose
// barrier is `sync`: all of them pass it once at least. planes: aligned to 1024 bytes; rings
// [kWarps, kPlanes, kPlaneBytes], then parts [kWarps, kRows, kPartStride].
template <class Traits, class Sync>
__device__ __forceinline__ void decode_share(const AttendParams &p, const DecodeLaunch &launch, const DecodeMaps &maps,
                                             DecodeShared<Traits> *shared, char *planes, int thread, int32_t block,
                                             int32_t num_blocks, Sync sync) {
  constexpr int kTileKeys = Traits::kTileKeys, kRows = Traits::kRows;
  const int warp = thread / 32, lane = thread % 32;
  DecodeSlot *const slots = shared->slots;

  const int32_t num_sequences = static_cast<int32_t>(p.tables.num_sequences);
  DecodeLanes<kTileKeys, kRows, 1> few;
  DecodeLanes<kTileKeys, kRows, 4> more;
  const bool is_few = num_sequences <= few.kMost, is_more = num_sequences <= more.kMost;
  const int32_t strip = (num_sequences + Traits::kThreads - 1) / Traits::kThreads;
  const int32_t num_units =
      p.kv.num_kv_heads * (is_few    ? few.add_up(p)
                           : is_more ? more.add_up(p)
                                     : shared->strips.template add_up<kTileKeys, kRows>(p, strip, thread, sync));
  const int32_t num_segments = num_sequences * p.kv.num_kv_heads;
  const int32_t num_active = count_active<Traits>(num_units, num_segments, num_blocks);
  const DecodeShares shares(num_units, num_active * Traits::kWarps, num_segments);
  const int32_t first_warp = block * Traits::kWarps;
  const int32_t begin = shares.begin(first_warp), end = shares.begin(first_warp + Traits::kWarps);
  const bool has_units = block < num_active && end > begin;
  if (has_units) {
    int32_t warp_begin = shares.begin(first_warp + warp);
    const int32_t warp_end = shares.begin(first_warp + warp + 1);
    if (warp_begin < warp_end) {
      const auto cursor = is_few    ? few.find(p, &warp_begin)
                          : is_more ? more.find(p, &warp_begin)
                                    : shared->strips.template find<kTileKeys, kRows>(p, strip, &warp_begin);
      if (warp_begin < warp_end) {
        DecodeWarp<Traits> &own = shared->warps[warp];  // written by every lane, the same
        own.ahead = own.now = cursor;
        own.begin = warp_begin, own.end = warp_end;
        __syncwarp();
        DecodeWalk<Traits> walk(p, launch, maps, &own, planes + warp * Traits::kRingBytes,
                                reinterpret_cast<float *>(planes + Traits::kWarps * Traits::kRingBytes) +
                                    warp * Traits::kPartFloats);
        walk.run(slots + 2 * warp);
      }
    }
  }
  sync();
  if (!has_units) return;

  // Parts of one segment stand in neighbouring slots that are in use; a lane has a slot.
  constexpr uint32_t kAll = 0xffffffffu;
  const int32_t own_unit = lane < 2 * Traits::kWarps ? slots[lane].first_unit : -1;
  const uint32_t used = __ballot_sync(kAll, own_unit >= 0);
  if (used == 0) return;
  const uint32_t below = used & ((1u << lane) - 1);
  const int32_t before = __shfl_sync(kAll, own_unit, below == 0 ? lane : 31 - __clz(static_cast<int>(below)));
  const uint32_t firsts = __ballot_sync(kAll, own_unit >= 0 && (below == 0 || before != own_unit));
  const auto members_of = [&](int first) {
    const uint32_t from = ~0u << first, later = firsts & (from << 1);  // slots from it on; where later segments begin
    return used & from & ((later & -later) - 1);
  };
  float *const parts = launch.parts + static_cast<int64_t>(block) * (2 * Traits::kPartFloats);
  const int leaving = 31 - __clz(static_cast<int>(firsts)), coming = __ffs(static_cast<int>(firsts)) - 1;
  const DecodeSlot last = slots[leaving];
  const bool comes = slots[coming].first_unit + kSegmentUnits < begin, leaves = last.first_unit + last.num_units > end;

  // What leaves the thread block comes first, since others wait for it; a warp has a row.
  const bool passes = comes && leaves && coming == leaving;  // one segment, which has the thread block whole
  if (leaves) {
    float *const left = parts + (passes ? 0 : Traits::kPartFloats);
#pragma unroll 1
    for (int32_t row = warp; row < last.num_rows * Traits::kRowParts; row += Traits::kWarps) {
      leave_partial<Traits>(left + row * Traits::kPartStride, merge_slots<Traits, 32>(members_of(leaving), row, planes));
    }
  }

  // Rows of segments that the thread block has whole; half a warp has a row.
  const uint32_t whole = firsts & ~(leaves ? 1u << leaving : 0u) & ~(comes ? 1u << coming : 0u);
  if (whole != 0) {
    const int32_t own_rows = (whole >> lane & 1) != 0 ? slots[lane].num_rows * Traits::kRowParts : 0;
    const int32_t end_row = scan_warp(own_rows, lane), num_rows = __shfl_sync(kAll, end_row, 31);
#pragma unroll 1
    for (int32_t base = 2 * warp; base < num_rows; base += 2 * Traits::kWarps) {
      const int32_t index = min(base + lane / 16, num_rows - 1);
      const uint32_t lower = __ballot_sync(kAll, end_row > base);
      const uint32_t upper = __ballot_sync(kAll, end_row > min(base + 1, num_rows - 1));
      const int first = __ffs(static_cast<int>(lane < 16 ? lower : upper)) - 1;
      const int32_t row = index - __shfl_sync(kAll, end_row - own_rows, first);
      const auto partial = merge_slots<Traits, 16>(members_of(first), row, planes);
      write_partial<Traits>(p, launch.group, slots[first], row, base + lane / 16 < num_rows, partial);
    }
  }

  // What the thread block waits for comes last.
  if (comes && !passes) {
    const DecodeSlot slot = slots[coming];
    const int32_t first_block = shares.owner(slot.first_unit + kSegmentUnits) / Traits::kWarps;
#pragma unroll 1
    for (int32_t row = warp; row < slot.num_rows * Traits::kRowParts; row += Traits::kWarps) {
      const auto own = merge_slots<Traits, 32>(members_of(coming), row, planes);
      write_partial<Traits>(p, launch.group, slot, row, true,
                            take_partials<Traits>(launch.parts, first_block, block, row, own));
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
  const int thread = static_cast<int>(threadIdx.x);
  start_decode<Traits>(maps, &shared, thread);
  wait_for_launch_before();
  if (p.lets_next) let_next_launch();
  if (thread == 0) num_tokens = p.tables.cu_seqlens_q[p.tables.num_sequences];
  decode_share<Traits>(p, launch, maps, &shared, planes, thread, static_cast<int32_t>(blockIdx.x),
                       static_cast<int32_t>(gridDim.x), [] { __syncthreads(); });
  clear_padding<typename Traits::T>(p, num_tokens, threadIdx.x, blockDim.x);  // there since a barrier
#endif
}

}  // namespace pkv
