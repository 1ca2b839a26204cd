// Attention of few query rows a sequence, at the memory's speed.
//
// Plan of attend_decode:
//   Up to 8 or 16 query rows (token, head of the group) of a sequence share each row of K and V. Every warp of a fixed
//   grid has an equal share of all keys of the step (decode_work.cuh), whatever sequences they belong to, and walks it
//   in tiles of 16 keys (32 of 8 bits). Each warp is for itself, without barriers: it copies rows of K and V to a ring
//   of its own in shared memory (decode_loader.cuh), piece by piece where a lane reads it as a factor of the
//   products (decode_products.cuh). K is asked for kStages tiles ahead as soon as the scores are made, V as soon as the
//   values are added.
//   Keys outside the sequence and released ones become zeros there, so that no bits of a slot reach a product, and are
//   masked by selection. The maximum of the online softmax moves only when a score passes it by 2^kSlack.
//   A segment, the keys of a (sequence, KV head), that a warp has whole is written straight away. Of the others the
//   thread block merges the parts it has, and where a segment reaches over thread blocks they leave a part each in the
//   workspace; the last of them, known by a ticket, merges those. Parts are merged in their order, so timing changes no
//   bit.
// Bound by memory bandwidth; see docs/kernels.md.
#pragma once

#include "backend/cuda/attend_combine.cuh"
#include "backend/cuda/decode_loader.cuh"

namespace pkv {

constexpr float kLowest = -1e38f;  // the maximum over no score: finite, so that differences are numbers
constexpr float kSlack = 8.0f;

// A part of a segment that a warp has left in shared memory.
struct DecodeSlot {
  int64_t first_unit;  // of the segment; -1: no part
  int32_t num_units;  // of the segment
  int32_t first_token, num_rows, kv_head;
};

// 2^value; what would be subnormal becomes 0.
__device__ inline float raise_two(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(value));
  return result;
}

// cap * tanh(score / cap) in base 2, without a branch.
__device__ inline float cap_score(float score, float cap) {
  const float power = raise_two(__fdividef(score, cap) * (2.0f * kLog2E));
  return cap * kLog2E * (1.0f - __fdividef(2.0f, power + 1.0f));
}

// Writes the lse of a row and returns the factor that its output wants.
__device__ inline float finish_decode_row(const AttendParams &p, int32_t first_token, int32_t row, int32_t kv_head,
                                          float largest, float sum, bool writes, int64_t *out_offset) {
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  const int64_t token = first_token + row / group;
  const int32_t head = kv_head * group + row % group;
  const float lse = sum == 0.0f ? -INFINITY : largest + log2f(sum);
  const float full = add_sink(p, head, lse);
  float factor = sum == 0.0f ? 0.0f : p.kv.v_scale[kv_head] / sum;
  if (full != lse) factor *= exp2f(lse - full);
  if (writes && p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = full * kLn2;
  *out_offset = token * p.out_token_stride + head * p.out_head_stride;
  return factor;
}

// Four dims of a row of output.
template <class T>
__device__ inline void write_dims(const AttendParams &p, int64_t offset, const float4 &value, float factor) {
  *reinterpret_cast<uint2 *>(static_cast<T *>(p.out) + offset) = {pack_pair<T>(value.x * factor, value.y * factor),
                                                                  pack_pair<T>(value.z * factor, value.w * factor)};
}

__device__ inline void add_share(float4 *total, float share, const float4 &value) {
  total->x += share * value.x, total->y += share * value.y;
  total->z += share * value.z, total->w += share * value.w;
}

__device__ inline float max_warp(float value) {
  return reduce_warp(value, [](float a, float b) { return fmaxf(a, b); });
}
__device__ inline float add_warp(float value) {
  return reduce_warp(value, [](float a, float b) { return a + b; });
}

// The walk of a warp over its units [unit, end); parts of segments go to two slots of shared memory.
template <class Traits>
class DecodeWalk {
 public:
  using Warp = DecodeWarp<Traits::kTileKeys>;
  using Cursor = DecodeCursor<Traits::kTileKeys>;

  __device__ DecodeWalk(const AttendParams &p, const DecodeLaunch &launch, Warp *warp)
      : p_(p),
        warp_(*warp),
        num_units_(static_cast<int32_t>(warp->end - warp->begin)),
        loader_(p, launch, &warp->ahead, num_units_) {}

  // shared: kWarpBytes of this warp. Copies come in the order K, V of a tile after the other; so many of them may be on
  // their way when the oldest is needed.
  __device__ void run(char *shared, DecodeSlot *slots) {
    constexpr int kStages = Traits::kStages, kPending = 2 * kStages - 1;
    const uint32_t ring = shared_address(shared);
    uint32_t valid[kStages];
    DecodePlace place = loader_.look_up();
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const DecodePlace next = loader_.look_up();
      loader_.resolve(place);
      place = next;
      loader_.copy_keys(ring + 2 * stage * Traits::kPlaneBytes);
      loader_.copy_values(ring + (2 * stage + 1) * Traits::kPlaneBytes);
      valid[stage] = loader_.valid();
    }
    start_segment();
    int stage = 0;
    for (;;) {
      const int plane = 2 * stage * Traits::kPlaneBytes;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      loader_.resolve(place);
      place = loader_.look_up();
      wait_copies<kPending>();
      __syncwarp();  // K was copied by other lanes too
      float scores[Traits::kKeyTiles][Traits::kRowTiles][4];
      multiply_keys<Traits>(shared + plane, query_, scores);
      __syncwarp();
      loader_.copy_keys(ring + plane);
      uint32_t weights[Traits::kKeyTiles][Traits::kRowTiles][2];
      weigh(valid[0], scores, weights);
      wait_copies<kPending>();
      multiply_values<Traits>(shared + plane + Traits::kPlaneBytes, weights, out_);
      loader_.copy_values(ring + plane + Traits::kPlaneBytes);
#pragma unroll
      for (int i = 0; i + 1 < kStages; ++i) valid[i] = valid[i + 1];
      valid[kStages - 1] = loader_.valid();
      key_ += Traits::kTileKeys;
      --num_units_;
      if (--num_tiles_ > 0) continue;
      finish_segment(shared, slots);
      if (num_units_ == 0) break;
      Cursor cursor = warp_.now;
      cursor.tile = cursor.now.num_tiles - 1;
      cursor.advance(p_);
      __syncwarp();
      warp_.now = cursor;
      start_segment();
    }
  }

 private:
  __device__ void start_segment() {
    const Cursor cursor = warp_.now;
    const int32_t group = p_.num_heads / p_.kv.num_kv_heads;
    load_query<Traits>(p_, cursor.now.first_token, cursor.now.query_len * group, cursor.kv_head, &query_, scales_);
    key_ = cursor.first_key();
    num_tiles_ = min(cursor.now.num_tiles - cursor.tile, num_units_);
    const int32_t first_position = cursor.now.end - cursor.now.query_len;
    plain_end_ = p_.is_causal ? min(first_position + 1, cursor.now.end) : cursor.now.end;
    plain_begin_ = p_.window > 0 ? static_cast<int32_t>(max(cursor.now.end - p_.window, int64_t{0})) : 0;
    const float scale = p_.scale * p_.kv.k_scale[cursor.kv_head];
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scales_[n][i] *= p_.softcap > 0.0f ? scale : scale * kLog2E;
        largest_[n][i] = kLowest;
        sum_[n][i] = 0.0f;
      }
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[n][d][i] = 0.0f;
      }
    }
  }

  __device__ void mask(uint32_t valid, float (&scores)[Traits::kKeyTiles][Traits::kRowTiles][4]) const {
    const int lane = threadIdx.x % 32;
    const int32_t group = p_.num_heads / p_.kv.num_kv_heads;
    const int32_t first_position = warp_.now.now.end - warp_.now.now.query_len;
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t position = first_position + (n * 8 + (lane % 4) * 2 + i) / group;
#pragma unroll
        for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int in_tile = m * 16 + half * 8 + lane / 4;
            const int32_t key = key_ + in_tile;
            const bool is_seen = (valid >> in_tile & 1) != 0 && (!p_.is_causal || key <= position) &&
                                 (p_.window <= 0 || key > position - p_.window);
            if (!is_seen) scores[m][n][half * 2 + i] = -INFINITY;
          }
        }
      }
    }
  }

  // Scores become weights, as right factors; the maxima and sums go along.
  __device__ void weigh(uint32_t valid, float (&scores)[Traits::kKeyTiles][Traits::kRowTiles][4],
                        uint32_t (&weights)[Traits::kKeyTiles][Traits::kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] *= scales_[n][i % 2];
      }
    }
    if (p_.softcap > 0.0f) {
#pragma unroll
      for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[m][n][i] = cap_score(scores[m][n][i], p_.softcap);
        }
      }
    }
    if (valid != 0xffffffffu || key_ + Traits::kTileKeys > plain_end_ || key_ < plain_begin_) mask(valid, scores);
    float tile_largest[Traits::kRowTiles][2];
    bool passes = false;
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = -INFINITY;
#pragma unroll
        for (int m = 0; m < Traits::kKeyTiles; ++m) most = fmaxf(most, fmaxf(scores[m][n][i], scores[m][n][2 + i]));
        tile_largest[n][i] = most;
        passes = passes || most > largest_[n][i] + kSlack;
      }
    }
    if (__any_sync(0xffffffffu, passes)) raise(tile_largest);
#pragma unroll
    for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float first = raise_two(scores[m][n][half * 2] - largest_[n][0]);
          const float second = raise_two(scores[m][n][half * 2 + 1] - largest_[n][1]);
          sum_[n][0] += first, sum_[n][1] += second;
          weights[m][n][half] = transpose_matrix(pack_pair<typename Traits::Factor>(first, second));
        }
      }
    }
  }

  __device__ void raise(const float (&tile_largest)[Traits::kRowTiles][2]) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      float shrink[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = fmaxf(largest_[n][i], tile_largest[n][i]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
        }
        shrink[i] = exp2f(largest_[n][i] - most);
        largest_[n][i] = most;
        sum_[n][i] *= shrink[i];
      }
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[n][d][i] *= shrink[i % 2];
      }
    }
  }

  __device__ void finish_segment(char *shared, DecodeSlot *slots) {
    using T = typename Traits::T;
    const int lane = threadIdx.x % 32;
    const Cursor cursor = warp_.now;
    const int32_t group = p_.num_heads / p_.kv.num_kv_heads;
    const int32_t num_rows = cursor.now.query_len * group;
    const int32_t num_done = (key_ - cursor.first_key()) / Traits::kTileKeys;
    const int64_t entered = warp_.end - num_units_ - num_done;
    const bool is_whole = num_done == cursor.now.num_tiles;
    const int index = entered > warp_.begin ? 1 : 0;
    // The ring is free then: nothing but zeros is on its way behind the last segment.
    float *state = reinterpret_cast<float *>(shared + (index == 0 ? Traits::kRingBytes : 0));
    if (!is_whole && index == 1) {
      wait_copies<0>();
      __syncwarp();
    }
    if (!is_whole && lane == 0) {
      slots[index] = {entered - cursor.tile, cursor.now.num_tiles, cursor.now.first_token, num_rows, cursor.kv_head};
    }
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = sum_[n][i];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        const int32_t row = n * 8 + (lane % 4) * 2 + i;
        if (row >= num_rows) continue;
        float factor = 1.0f;
        int64_t offset = 0;
        if (is_whole) {
          factor = finish_decode_row(p_, cursor.now.first_token, row, cursor.kv_head, largest_[n][i], sum,
                                     lane / 4 == 0, &offset);
        } else if (lane / 4 == 0) {
          state[Traits::kRows * Traits::kDim + row] = largest_[n][i];
          state[Traits::kRows * (Traits::kDim + 1) + row] = sum;
        }
#pragma unroll
        for (int d = 0; d < Traits::kDimTiles; d += 2) {
          const int unit = d * 2 / Traits::kValueDims, in_unit = d * 2 % Traits::kValueDims;
          const int dim = unit * 8 * Traits::kValueDims + (lane / 4) * Traits::kValueDims + in_unit;
          const float4 value = {out_[n][d][i], out_[n][d][2 + i], out_[n][d + 1][i], out_[n][d + 1][2 + i]};
          if (is_whole) {
            write_dims<T>(p_, offset + dim, value, factor);
          } else {
            *reinterpret_cast<float4 *>(state + row * Traits::kDim + dim) = value;
          }
        }
      }
    }
  }

  const AttendParams &p_;
  Warp &warp_;
  int32_t num_units_, num_tiles_;  // left, with the present one: of the walk, of the segment
  int32_t key_;  // first of the tile
  int32_t plain_begin_, plain_end_;  // keys that every query of the sequence sees, if they are valid
  DecodeLoader<Traits> loader_;
  DecodeQuery<Traits> query_;
  float out_[Traits::kRowTiles][Traits::kDimTiles][4];
  float largest_[Traits::kRowTiles][2], sum_[Traits::kRowTiles][2], scales_[Traits::kRowTiles][2];
};

}  // namespace pkv
