// Attention of few query rows a sequence, at the memory's speed.
//
// Plan of attend_decode:
//   Up to 8 or 16 query rows (token, head of the group) of a sequence share each row of K and V. Every warp of a fixed
//   grid has an equal share of all keys of the step (decode_work.cuh), whatever sequences they belong to, and walks it
//   in tiles of 16 keys (32 of 8 bits). Each warp is for itself, without barriers: one lane asks for boxes of rows
//   through tensor maps, K of a tile after V of the one before it, into a ring of planes of its own in shared memory
//   (decode_loader.cuh); as soon as a plane was used for the products (decode_products.cuh) it asks for the next one.
//   Released blocks arrive as zeros; rows of V behind the end of a sequence become zeros before they are used, so that
//   no bits of a slot reach a product. Scores of keys that are not there are masked by selection. The maximum of the
//   online softmax moves only when a score passes it by 2^kSlack.
//   A segment, the keys of a (sequence, KV head), that a warp has whole is written straight away. Of the others the
//   thread block merges the parts it has, and where a segment reaches over thread blocks they leave a part each in the
//   workspace; that of its last keys waits for the others' and merges them. Parts are merged in their order, so timing
//   changes no bit.
// Bound by memory bandwidth; see docs/kernels.md.
#pragma once

#include "backend/cuda/attend_combine.cuh"
#include "backend/cuda/decode_loader.cuh"
#include "backend/cuda/decode_masks.cuh"

namespace pkv {

constexpr float kLowest = -1e38f;  // the maximum over no score: finite, so that differences are numbers
constexpr float kSlack = 8.0f;
// With scales of rows: where the largest product of weight and scale stands, with room for kSlack and the mantissa of the
// scale below the end of float16; and the exponent that smaller scales count as, so that no sum passes float32.
constexpr int kScaledTop = 6, kLeastExponent = -84;

// A part of a segment that a warp has left in shared memory.
struct DecodeSlot {
  int32_t first_unit;  // of the segment; -1: no part
  int32_t num_units;  // of the segment
  int32_t first_token, num_rows, kv_head;
  float value_scale;
};

// Returns the factor that the output of a row wants, and where it goes; writes its lse. Rows that are not there
// (is_row) have neither.
__device__ inline float finish_decode_row(const AttendParams &p, int32_t group, int32_t first_token, int32_t row,
                                          bool is_row, int32_t kv_head, float value_scale, float largest, float sum,
                                          bool writes, int64_t *out_offset) {
  *out_offset = 0;
  if (!is_row) return 0.0f;
  const int32_t in_query = static_cast<int32_t>(divide_small(static_cast<uint32_t>(row), static_cast<uint32_t>(group)));
  const int64_t token = first_token + in_query;
  const int32_t head = kv_head * group + (row - in_query * group);
  *out_offset = token * p.out_token_stride + head * p.out_head_stride;
  float factor = sum == 0.0f ? 0.0f : __fdividef(value_scale, sum);
  if (p.lse == nullptr && p.sinks == nullptr) return factor;
  const float lse = sum == 0.0f ? -INFINITY : largest + log2f(sum);
  const float full = add_sink(p, head, lse);
  if (full != lse) factor *= exp2f(lse - full);
  if (writes && p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = full * kLn2;
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

// The walk of a warp over its units [begin, end); parts of segments go to two slots of shared memory.
template <class Traits>
class DecodeWalk {
 public:
  using Warp = DecodeWarp<Traits>;
  using Cursor = DecodeCursor<Traits::kTileKeys, Traits::kRows>;

  // planes: the ring; part: where that of the first segment goes.
  __device__ DecodeWalk(const AttendParams &p, const DecodeLaunch &launch, const DecodeMaps &maps, Warp *warp,
                        char *planes, float *part)
      : p_(p), group_(launch.group), warp_(*warp), planes_(planes), part_(part),
        first_keys_(shared_address(planes) + lane_offset<Traits>(true)),
        first_values_(shared_address(planes) + lane_offset<Traits>(false)),
        num_units_(warp->end - warp->begin), loader_(p, launch, maps, warp, planes) {}

  __device__ void run(DecodeSlot *slots) {
    loader_.look_up_first();
    loader_.fill(0, 2);
    load_segment();  // behind the first copies, but before it would have to wait for all of them
    loader_.fill(2, Traits::kPlanes);
    start_segment();
    for (;;) {
      wait_barrier(&warp_.full[ring_.plane], ring_.phase);
      const uint32_t valid = warp_.valid[ring_.plane];
      float scores[Traits::kKeyTiles][Traits::kRowTiles][4];
      multiply_keys<Traits>(first_keys_ + ring_.plane * Traits::kPlaneBytes, query_, scores);
      if (Traits::kHasRowScales) scale_keys(scores);
      ring_.advance();
      __syncwarp();  // all lanes have used it
      loader_.refill(true);
      uint32_t weights[Traits::kKeyTiles][Traits::kRowTiles][2];
      weigh(valid, scores, weights);
      wait_barrier(&warp_.full[ring_.plane], ring_.phase);
      if (valid != 0xffffffffu) clear_rows(planes_ + ring_.plane * Traits::kPlaneBytes, valid);
      multiply_values<Traits>(first_values_ + ring_.plane * Traits::kPlaneBytes, weights, out_);
      ring_.advance();
      __syncwarp();
      loader_.refill(false);
      key_ += Traits::kTileKeys;
      --num_units_;
      if (--num_tiles_ > 0) continue;
      finish_segment(slots);
      num_units_ -= kSegmentUnits;
      if (num_units_ <= 0) break;
      advance_cursor<Traits>(p_, &warp_.now);
      load_segment();
      start_segment();
    }
  }

 private:
  // Asks for what start_segment wants of memory.
  __device__ void load_segment() {
    const Cursor &cursor = warp_.now;
    load_query<Traits>(p_, group_, cursor.now.first_token, cursor.now.query_len * group_, cursor.kv_head, &query_);
    key_scale_ = value_scale_ = 1.0f;
    if (!Traits::kHasRowScales) {
      key_scale_ = p_.kv.k_scale[cursor.kv_head];
      value_scale_ = p_.kv.v_scale[cursor.kv_head];
    }
  }

  __device__ void start_segment() {
    const Cursor cursor = warp_.now;
    scale_query<Traits>(&query_, scales_);
    key_ = cursor.first_key();
    num_tiles_ = min(cursor.now.num_tiles - cursor.tile, num_units_);
    const int32_t first_position = cursor.now.end - cursor.now.query_len;
    plain_end_ = p_.is_causal ? min(first_position + 1, cursor.now.end) : cursor.now.end;
    if (has_tree<Traits>(p_)) plain_end_ = first_position;
    if (has_bias<Traits>(p_)) plain_end_ = 0;
    plain_begin_ = p_.window > 0 ? static_cast<int32_t>(max(cursor.now.end - p_.window, int64_t{0})) : 0;
    const float scale = p_.scale * key_scale_;
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

  // Rows of keys that are not there: a slot may hold anything.
  __device__ void clear_rows(char *plane, uint32_t valid) const {
    constexpr int kChunks = Traits::kPieceBytes / 16;
    for (int i = threadIdx.x % 32; i < Traits::kPlaneBytes / 16; i += 32) {
      if ((valid >> (i / kChunks % Traits::kTileKeys) & 1) == 0) reinterpret_cast<uint4 *>(plane)[i] = {0, 0, 0, 0};
    }
    fence_shared_for_copies();
    __syncwarp();
  }

  // Of the plane whose turn it is, for the key of this lane's scores [m][..][half].
  __device__ float row_scale(int m, int half) const {
    return warp_.row_scales[ring_.plane][m * 16 + half * 8 + threadIdx.x % 32 / 4];
  }

  // Scales of the rows of K join the scores.
  __device__ void scale_keys(float (&scores)[Traits::kKeyTiles][Traits::kRowTiles][4]) const {
    loader_.await_row_scales();
#pragma unroll
    for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = row_scale(m, half);
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n) {
          scores[m][n][half * 2] *= scale;
          scores[m][n][half * 2 + 1] *= scale;
        }
      }
    }
  }

  // Scores become weights, as right factors; the maxima and sums go along. With scales of rows the weights are
  // multiplied by those of V, and the maximum is that of the products: so the largest weight of a row stands at
  // 2^kScaledTop, or up to 2^(kSlack + 1) above it, however large or small the scales are, and all that counts has the
  // bits that float16 has.
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
    if (valid != 0xffffffffu || key_ + Traits::kTileKeys > plain_end_ || key_ < plain_begin_) {
      mask_scores<Traits>(p_, warp_.now, key_, valid, scores);
    }
    float value_scales[Traits::kKeyTiles][2], lifts[Traits::kKeyTiles][2];
    if constexpr (Traits::kHasRowScales) {
      loader_.await_row_scales();
#pragma unroll
      for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float scale = row_scale(m, half);
          const int exponent = static_cast<int>(__float_as_uint(scale) >> 23 & 255) - 127;
          value_scales[m][half] = scale;
          lifts[m][half] = static_cast<float>(max(exponent, kLeastExponent) - kScaledTop);
        }
      }
    }
    float tile_largest[Traits::kRowTiles][2];
    bool passes = false;
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = -INFINITY;
#pragma unroll
        for (int m = 0; m < Traits::kKeyTiles; ++m) {
          const float first = scores[m][n][i], second = scores[m][n][2 + i];
          most = fmaxf(most, Traits::kHasRowScales ? fmaxf(first + lifts[m][0], second + lifts[m][1])
                                                   : fmaxf(first, second));
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
          float first = raise_two(scores[m][n][half * 2] - largest_[n][0]);
          float second = raise_two(scores[m][n][half * 2 + 1] - largest_[n][1]);
          sum_[n][0] += first, sum_[n][1] += second;
          if constexpr (Traits::kHasRowScales) first *= value_scales[m][half], second *= value_scales[m][half];
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

  __device__ void finish_segment(DecodeSlot *slots) {
    const int lane = threadIdx.x % 32;
    const Cursor &cursor = warp_.now;
    const int32_t num_rows = cursor.now.query_len * group_;
    const int32_t num_done = (key_ - cursor.first_key()) / Traits::kTileKeys;
    const int32_t entered = warp_.end - num_units_ - num_done;
    const bool is_whole = num_done == cursor.now.num_tiles;
    const int index = entered > warp_.begin ? 1 : 0;
    // Nothing is on its way behind the last segment.
    float *part = index == 0 ? part_ : reinterpret_cast<float *>(planes_);
    if (!is_whole && lane == 0) {
      slots[index] = {entered - cursor.tile - kSegmentUnits, cursor.now.num_units(), cursor.now.first_token, num_rows,
                      cursor.kv_head, value_scale_};
    }
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      float factors[2];
      int64_t offsets[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = sum_[n][i];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        const int32_t row = n * 8 + (lane % 4) * 2 + i;
        if (is_whole) {
          factors[i] = finish_decode_row(p_, group_, cursor.now.first_token, row, row < num_rows, cursor.kv_head,
                                         value_scale_, largest_[n][i], sum, lane / 4 == 0, &offsets[i]);
        } else {
          float *const row_part = part + row * (Traits::kRowParts * Traits::kPartStride);
#pragma unroll
          for (int piece = 0; piece < Traits::kRowParts; ++piece) {
            float *const state = row_part + piece * Traits::kPartStride + Traits::kPartDims;
            if (lane / 4 == 0) state[0] = largest_[n][i], state[1] = sum;
          }
#pragma unroll
          for (int d = 0; d < Traits::kDimTiles; ++d) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              constexpr int kPieceTiles = Traits::kDimTiles / Traits::kRowParts;
              const int skipped = d / kPieceTiles * (Traits::kPartStride - Traits::kPartDims);
              row_part[output_dim<Traits>(d, half) + skipped] = out_[n][d][half * 2 + i];
            }
          }
        }
      }
      if (is_whole) write_rows(n, num_rows, factors, offsets);
    }
  }

  // Two neighbouring dims of a row at a time.
  __device__ void write_rows(int n, int32_t num_rows, const float (&factors)[2], const int64_t (&offsets)[2]) const {
    using T = typename Traits::T;
    const int lane = threadIdx.x % 32;
    T *const out = static_cast<T *>(p_.out);
    if constexpr (Traits::kIsWidened) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (n * 8 + (lane % 4) * 2 + i >= num_rows) continue;
#pragma unroll
        for (int d = 0; d < Traits::kDimTiles; ++d) {
          if (Traits::kIsPadded && d * 16 >= p_.kv.head_dim) break;
          *reinterpret_cast<uint32_t *>(out + offsets[i] + output_dim<Traits>(d, 0)) =
              pack_pair<T>(out_[n][d][i] * factors[i], out_[n][d][2 + i] * factors[i]);
        }
      }
    } else {
      // A lane has two rows of one dim; transposed, two dims of one row: row lane / 4, which lane lane / 8 knows.
      const int64_t first = __shfl_sync(0xffffffffu, offsets[0], lane / 8);
      const int64_t second = __shfl_sync(0xffffffffu, offsets[1], lane / 8);
      T *const row = out + (lane / 4 % 2 == 0 ? first : second);
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair = transpose_matrix(
              pack_pair<T>(out_[n][d][half * 2] * factors[0], out_[n][d][half * 2 + 1] * factors[1]));
          if (n * 8 + lane / 4 < num_rows && (!Traits::kIsPadded || d * 16 < p_.kv.head_dim)) {
            *reinterpret_cast<uint32_t *>(row + d * 16 + half * 8 + (lane % 4) * 2) = pair;
          }
        }
      }
    }
  }

  const AttendParams &p_;
  const int32_t group_;
  Warp &warp_;
  char *const planes_;
  float *const part_;
  const uint32_t first_keys_, first_values_;  // what the lane loads first of the ring's first plane
  DecodeRing<Traits::kPlanes> ring_;
  int32_t num_units_, num_tiles_;  // left, with the present one: of the walk, of the segment
  int32_t key_;  // first of the tile
  float key_scale_, value_scale_;
  int32_t plain_begin_, plain_end_;  // keys that every query of the sequence sees as they are, if they are valid
  DecodeLoader<Traits> loader_;
  DecodeQuery<Traits> query_;
  float out_[Traits::kRowTiles][Traits::kDimTiles][4];
  float largest_[Traits::kRowTiles][2], sum_[Traits::kRowTiles][2], scales_[Traits::kRowTiles][2];
};

}  // namespace pkv
