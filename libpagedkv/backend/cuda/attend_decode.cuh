// Attention of few query rows a sequence, at the memory's speed.
//
// Plan of attend_decode:
//   Up to 8 or 16 query rows (token, head of the group) of a sequence share each row of K and V. Every warp of a fixed grid
//   has an equal share of all keys of the step (decode_work.cuh), whatever sequences they belong to, and walks it in
//   tiles of 16 keys (32 of 8 bits). Rows of K and V go from memory straight to the registers that are factors of the
//   products (decode_products.cuh): no shared memory, no barrier, every warp for itself. K of the next tile is asked for
//   as soon as the scores are made, V as soon as the values are added, the block table two tiles ahead.
//   Keys outside the sequence and released ones are read from a row of zeros, so that no bits of a slot reach a product,
//   and masked by selection. The maximum of the online softmax moves only when a score passes it by 2^kSlack.
//   A segment, the keys of a (sequence, KV head), that a warp has whole is written straight away. Of the others the thread
//   block merges the parts it has, and where a segment reaches over thread blocks they leave one part each in the workspace; the
//   last of them, known by a ticket, merges those. Parts are merged in their order, so timing changes no bit.
#pragma once

#include "backend/cuda/attend_combine.cuh"
#include "backend/cuda/decode_products.cuh"
#include "backend/cuda/decode_work.cuh"

namespace pkv {

constexpr float kLowest = -1e38f;  // the maximum over no score: finite, so that differences are numbers
constexpr float kSlack = 8.0f;

// What a launch adds to the parameters.
struct DecodeLaunch {
  int32_t block_shift;  // block_size = 1 << block_shift, or -1
  uint32_t *tickets;    // [gridDim.x]: thread blocks that are done, of the segment that starts in a thread block and leaves it
  const char *zeros;    // a row of zeros
  float *parts;         // [gridDim.x, 2, kRows, kPartStride]: of the segment that comes from another thread block, of that which leaves
};

// A part of a segment that a warp has left in shared memory.
struct DecodeSlot {
  int64_t first_unit;  // of the segment; -1: no part
  int32_t num_units;   // of the segment
  int32_t first_token, num_rows, kv_head;
};

// Where the keys of a tile are; a lane knows that of one key.
struct DecodePlace {
  int32_t block, offset, kv_head;
};

template <class Traits>
class DecodeLoader {
 public:
  using Cursor = DecodeCursor<Traits::kTileKeys>;
  static constexpr bool kSplitsLanes = Traits::kTileKeys == 16;  // upper lanes have V's addresses

  __device__ DecodeLoader(const AttendParams &p, const DecodeLaunch &launch) : p_(p), launch_(launch) {}

  __device__ DecodePlace look_up(const Cursor &cursor) const {
    const uint32_t key = static_cast<uint32_t>(cursor.first_key()) + threadIdx.x % Traits::kTileKeys;
    if (key >= static_cast<uint32_t>(cursor.now.end)) return {-1, 0, 0};
    const uint32_t size = static_cast<uint32_t>(p_.kv.block_size);
    const uint32_t index = launch_.block_shift >= 0 ? key >> launch_.block_shift : key / size;
    return {__ldg(p_.tables.block_table + cursor.sequence * p_.tables.table_stride + index),
            static_cast<int32_t>(key - index * size), cursor.kv_head};
  }

  // The rows of a tile that was looked up; then loads may follow.
  __device__ void resolve(const DecodePlace &place) {
    const bool is_valid = place.block >= 0;
    const char *block = block_address(p_.kv, place.block);
    const char *key = block + k_row_offset(p_.kv, place.offset, place.kv_head, Traits::kBytes);
    const char *value = block + v_row_offset(p_.kv, place.offset, place.kv_head, Traits::kBytes);
    if constexpr (kSplitsLanes) {
      rows_[0] = !is_valid ? launch_.zeros : threadIdx.x % 32 < 16 ? key : value;
    } else {
      rows_[0] = is_valid ? key : launch_.zeros;
      rows_[1] = is_valid ? value : launch_.zeros;
    }
    valid_ = __ballot_sync(0xffffffffu, is_valid);
  }

  __device__ uint32_t valid() const { return valid_; }  // bit i: key i of the resolved tile

  __device__ void load_keys(DecodeTile<Traits> *tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char *row = shuffle(rows_[0], m * 16 + half * 8 + lane / 4) + (lane % 4) * 16;
#pragma unroll
        for (int unit = 0; unit < Traits::kKeyUnits; ++unit) load_stream(tile->keys[m][half][unit], row + unit * 64);
      }
    }
  }

  __device__ void load_values(DecodeTile<Traits> *tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = m * 16 + (lane % 4) * 2 + i % 2 + i / 2 * 8;
        const char *row = shuffle(rows_[kSplitsLanes ? 0 : 1], kSplitsLanes ? key + 16 : key) +
                          (lane / 4) * Traits::kValueWords * 4;
#pragma unroll
        for (int unit = 0; unit < Traits::kValueUnits; ++unit) {
          load_stream(tile->values[m][i][unit], row + unit * 32 * Traits::kValueWords);
        }
      }
    }
  }

 private:
  __device__ static const char *shuffle(const char *row, int lane) {
    return reinterpret_cast<const char *>(
        __shfl_sync(0xffffffffu, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(row)), lane));
  }

  const AttendParams &p_;
  const DecodeLaunch &launch_;
  const char *rows_[kSplitsLanes ? 1 : 2];
  uint32_t valid_;
};

// 2^value; what would be subnormal becomes 0.
__device__ inline float raise_two(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(value));
  return result;
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
  using Cursor = DecodeCursor<Traits::kTileKeys>;

  __device__ DecodeWalk(const AttendParams &p, const DecodeLaunch &launch) : p_(p), loader_(p, launch) {}

  __device__ void run(const Cursor &first, int64_t begin, int64_t end, float *states, DecodeSlot *slots) {
    Cursor ahead = first, cursor = first;
    int32_t num_ahead = static_cast<int32_t>(end - begin);  // units from `ahead` on
    const auto look_up = [&] {
      if (num_ahead == 0) return DecodePlace{-1, 0, 0};
      const DecodePlace place = loader_.look_up(ahead);
      if (--num_ahead > 0) ahead.advance(p_);
      return place;
    };
    const DecodePlace first_place = look_up();
    DecodePlace place = look_up();
    loader_.resolve(first_place);
    loader_.load_keys(&tile_);
    loader_.load_values(&tile_);
    uint32_t valid = loader_.valid();
    loader_.resolve(place);
    place = look_up();
    start_segment(cursor);
    int64_t segment = begin - cursor.tile;
    for (int64_t unit = begin; unit < end; ++unit) {
      const bool has_next = unit + 1 < end;
      float scores[Traits::kKeyTiles][Traits::kRowTiles][4];
      multiply_keys<Traits>(tile_, query_, scores);
      if (has_next) loader_.load_keys(&tile_);
      uint32_t weights[Traits::kKeyTiles][Traits::kRowTiles][2];
      weigh(cursor, valid, scores, weights);
      multiply_values<Traits>(tile_, weights, out_);
      if (has_next) loader_.load_values(&tile_);
      valid = loader_.valid();
      loader_.resolve(place);
      place = look_up();
      if (has_next && cursor.tile + 1 < cursor.now.num_tiles) {
        ++cursor.tile;
        continue;
      }
      finish_segment(cursor, begin, end, segment, states, slots);
      if (!has_next) break;
      cursor.advance(p_);
      segment = unit + 1;
      start_segment(cursor);
    }
  }

 private:
  __device__ void start_segment(const Cursor &cursor) {
    const int32_t group = p_.num_heads / p_.kv.num_kv_heads;
    load_query<Traits>(p_, cursor.now.first_token, cursor.now.query_len * group, cursor.kv_head, &query_, scales_);
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

  // Scores become weights, as right factors; the maxima and sums go along.
  __device__ void weigh(const Cursor &cursor, uint32_t valid, float (&scores)[Traits::kKeyTiles][Traits::kRowTiles][4],
                        uint32_t (&weights)[Traits::kKeyTiles][Traits::kRowTiles][2]) {
    const int lane = threadIdx.x % 32;
    const int32_t first_key = cursor.first_key();
    const int32_t first_position = cursor.now.end - cursor.now.query_len;
    const bool is_edge = valid != 0xffffffffu || (p_.is_causal && first_key + Traits::kTileKeys - 1 > first_position) ||
                         (p_.window > 0 && first_key <= cursor.now.end - 1 - p_.window);
    float tile_largest[Traits::kRowTiles][2];
    bool passes = false;
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = -INFINITY;
        int32_t position = 0;
        if (is_edge) {
          const int32_t row = n * 8 + (lane % 4) * 2 + i;
          position = first_position + row / (p_.num_heads / p_.kv.num_kv_heads);
        }
#pragma unroll
        for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float &score = scores[m][n][half * 2 + i];
            score *= scales_[n][i];
            if (p_.softcap > 0.0f) score = p_.softcap * kLog2E * tanhf(score / p_.softcap);
            if (is_edge) {
              const int in_tile = m * 16 + half * 8 + lane / 4;
              const int32_t key = first_key + in_tile;
              const bool is_seen = (valid >> in_tile & 1) != 0 && (!p_.is_causal || key <= position) &&
                                   (p_.window <= 0 || key > position - p_.window);
              score = is_seen ? score : -INFINITY;
            }
            most = fmaxf(most, score);
          }
        }
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

  __device__ void finish_segment(const Cursor &cursor, int64_t begin, int64_t end, int64_t segment, float *states,
                                 DecodeSlot *slots) {
    using T = typename Traits::T;
    const int lane = threadIdx.x % 32;
    const int32_t group = p_.num_heads / p_.kv.num_kv_heads;
    const int32_t num_rows = cursor.now.query_len * group;
    const bool is_whole = segment >= begin && segment + cursor.now.num_tiles <= end;
    const int index = segment > begin ? 1 : 0;
    float *state = states + index * Traits::kStateFloats;
    if (!is_whole && lane == 0) {
      slots[index] = {segment, cursor.now.num_tiles, cursor.now.first_token, num_rows, cursor.kv_head};
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
          factor = finish_decode_row(p_, cursor.now.first_token, row, cursor.kv_head, largest_[n][i], sum, lane / 4 == 0,
                                     &offset);
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
  DecodeLoader<Traits> loader_;
  DecodeTile<Traits> tile_;
  DecodeQuery<Traits> query_;
  float out_[Traits::kRowTiles][Traits::kDimTiles][4];
  float largest_[Traits::kRowTiles][2], sum_[Traits::kRowTiles][2], scales_[Traits::kRowTiles][2];
};

}  // namespace pkv
