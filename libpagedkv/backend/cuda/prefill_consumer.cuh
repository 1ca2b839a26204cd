// The warpgroups of the prefill kernel that compute.
#pragma once

#include "backend/cuda/attend_combine.cuh"
#include "backend/cuda/prefill_tiles.cuh"
#include "backend/cuda/warpgroup_product.cuh"

#ifdef PKV_IS_SM90A
namespace pkv {

template <class Traits>
class PrefillConsumer {
  using T = typename Traits::T;
  static constexpr int kScores = Traits::kTile / 2;  // of a thread
  static constexpr int kOutputs = Traits::kValueDim / 2;
  static constexpr int kKeySteps = Traits::kTile / 16;
  // Named barriers: one for each warpgroup's turn, one for its parts.
  static constexpr int kTurnName = 1, kPartsName = kTurnName + kPrefillWarpgroups;

 public:
  __device__ PrefillConsumer(const AttendParams &p, const PrefillLaunch &launch, PrefillShared<Traits> *shared,
                             const char *queries, const char *buffers, int warpgroup)
      : p_(p), launch_(launch), shared_(shared),
        queries_(name_matrix(shared_address(queries) + warpgroup * 64 * 128, 0)),
        keys_(name_matrix(shared_address(buffers), 0)), warpgroup_(warpgroup), lane_(threadIdx.x % 32) {
    const int32_t group = launch.group;
    const int warp_row = warpgroup * 64 + threadIdx.x % kWarpgroupThreads / 32 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      token_[i] = (warp_row + lane_ / 4 + i * 8) / group;
    }
    scale_log2_ = p.softcap > 0.0f ? kLog2E : p.scale * kLog2E;
  }

  __device__ void run() {
    if (warpgroup_ != 0) give_turn();
    wait_barrier(&shared_->query_full[0], 0);
    if (shared_->tiles[0].num_key_tiles == 0) return;
    Keys keys = find_keys(0);
    take_scales(0);
    float scores[kScores];
    uint32_t weights[kKeySteps][4];
    float out[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;

    // The first tile of keys.
    int32_t key_tiles_left = shared_->tiles[0].num_key_tiles, first_key = shared_->tiles[0].last_key;
    RingCursor<Traits::kQuerySlots> query_slot;
    wait_barrier(&shared_->full[ring_.index], ring_.phase);
    wait_turn();
    fence_products();
    multiply_queries(scores, query_slot.index, ring_.index);
    commit_products();
    give_turn();
    wait_products<0>();
    pin_registers(scores);
    uint32_t box_mask = shared_->box_masks[ring_.index];
    release_buffer(ring_.index);
    ring_.advance();
    prepare_scores(scores, query_slot.index, keys, first_key, box_mask);
    weigh(scores);
    pin_registers(scores);

    // At the head the products of the last tile of keys but one may be under way, from value_buffer.
    bool is_under_way = false;
    int value_buffer = 0;
    while (true) {
      const bool is_new = --key_tiles_left == 0;
      Keys next = keys;
      if (is_new) {
        query_slot.advance();
        wait_barrier(&shared_->query_full[query_slot.index], query_slot.phase);
        next = find_keys(query_slot.index);
        key_tiles_left = shared_->tiles[query_slot.index].num_key_tiles;
        first_key = shared_->tiles[query_slot.index].last_key;
      } else {
        first_key -= Traits::kTile;
      }
      const bool is_end = key_tiles_left == 0;
      const int key_buffer = ring_.index;
      if (!is_end) wait_barrier(&shared_->full[key_buffer], ring_.phase);
      // Behind a branch: the compiler would move this wait in front of the softmax otherwise.
      wait_products<0>();
      pin_registers(out);
      if (is_under_way) release_buffer(value_buffer);
      shrink_output(out);
      pack(scores, weights);
      if (is_end) break;
      ring_.advance();
      value_buffer = ring_.index;
      wait_turn();
      fence_products();
      multiply_queries(scores, query_slot.index, key_buffer);
      commit_products();
      wait_barrier(&shared_->full[value_buffer], ring_.phase);
      ring_.advance();
      fence_products();
      multiply_values(out, weights, value_buffer);
      commit_products();
      give_turn();
      wait_products<1>();
      pin_registers(scores);
      box_mask = shared_->box_masks[key_buffer];
      release_buffer(key_buffer);
      is_under_way = !is_new;
      if (is_new) {
        wait_products<0>();
        pin_registers(out);
        release_buffer(value_buffer);
        finish_tile(out, query_slot.index ^ 1);
        release_query(query_slot.index ^ 1);
        keys = next;
        take_scales(query_slot.index);
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
        largest_[0] = largest_[1] = -INFINITY;
        sum_[0] = sum_[1] = 0.0f;
      }
      prepare_scores(scores, query_slot.index, keys, first_key, box_mask);
      weigh(scores);
      pin_registers(scores);
    }
    ring_.advance();  // V of the last tile of keys comes after a buffer that no K was brought to
    wait_barrier(&shared_->full[ring_.index], ring_.phase);
    fence_products();
    multiply_values(out, weights, ring_.index);
    commit_products();
    wait_products<0>();
    pin_registers(out);
    finish_tile(out, query_slot.index ^ 1);
  }

 private:
  // What every step needs of a tile: keys in [plain_begin, plain_end) are seen by all rows of the warp. The rest of it
  // stays in shared memory.
  struct Keys {
    int32_t plain_begin, plain_end;
  };

  __device__ Keys find_keys(int slot) const {
    const PrefillTile &tile = shared_->tiles[slot];
    const int32_t first_token = __shfl_sync(0xffffffffu, token_[0], 0);  // of the warp's rows
    const int32_t last_token = __shfl_sync(0xffffffffu, token_[1], 31);
    const int32_t end = p_.is_causal ? min(tile.first_position + first_token + 1, tile.seq_len) : tile.seq_len;
    const int64_t begin = p_.window > 0 ? tile.first_position + last_token + 1 - p_.window : int64_t{0};
    return {static_cast<int32_t>(max(begin, int64_t{0})), end};
  }

  // Warpgroups issue their products in turn, so that the one's softmax runs beside the other's products.
  __device__ void wait_turn() const { sync_named(kTurnName + warpgroup_, 2 * kWarpgroupThreads); }

  __device__ void give_turn() const { arrive_named(kTurnName + (warpgroup_ ^ 1), 2 * kWarpgroupThreads); }

  __device__ void release_buffer(int index) const {
    __syncwarp();
    if (lane_ == 0) arrive_barrier(&shared_->empty[index]);
  }

  __device__ void release_query(int index) const {
    __syncwarp();
    if (lane_ == 0) arrive_barrier(&shared_->query_empty[index]);
  }

  __device__ void multiply_queries(float (&scores)[kScores], int query_index, int buffer) const {
    const uint32_t query = queries_ + query_index * matrix_words(Traits::kQueryBytes);
    const uint32_t keys = keys_ + buffer * matrix_words(Traits::kTileBytes);
#pragma unroll
    for (int step = 0; step < Traits::kKeyDim / 16; ++step) {
      const int part = step / 4, in_part = step % 4 * 32;
      multiply_shared<T>(scores, describe_matrix(query + matrix_words(part * (kPrefillRows * 128) + in_part)),
                         describe_matrix(keys + matrix_words(part * (Traits::kTile * 128) + in_part)), step > 0);
    }
  }

  __device__ void multiply_values(float (&out)[kOutputs], const uint32_t (&weights)[kKeySteps][4], int buffer) const {
    const uint32_t values =
        keys_ + name_matrix(0, Traits::kTile * 128) + buffer * matrix_words(Traits::kTileBytes);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      multiply_registers<T>(out, weights[step], describe_matrix(values + matrix_words(step * 16 * 128)));
    }
  }

  // K and V of 8 bits have scales: those of the tile's KV head.
  __device__ void take_scales(int slot) {
    if constexpr (Traits::kIsWidened) {
      const int32_t kv_head = shared_->tiles[slot].kv_head;
      score_scale_ = p_.scale * p_.kv.k_scale[kv_head];
      value_scale_ = p_.kv.v_scale[kv_head];
      scale_log2_ = is_scaled_first() ? kLog2E : score_scale_ * kLog2E;
    }
  }

  __device__ float score_scale() const { return Traits::kIsWidened ? score_scale_ : p_.scale; }

  // Whether scores are scaled before the softmax finds their maximum: it scales them itself, if that keeps their order.
  __device__ bool is_scaled_first() const { return p_.softcap > 0.0f || !(score_scale() > 0.0f); }

  // Caps and masks.
  __device__ void prepare_scores(float (&scores)[kScores], int slot, const Keys &keys, int32_t first_key,
                                 uint32_t box_mask) const {
    if (p_.softcap > 0.0f) {
      const float inner = 2.0f * kLog2E * score_scale() / p_.softcap;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = p_.softcap - 2.0f * p_.softcap * __fdividef(1.0f, 1.0f + raise_two(scores[i] * inner));
      }
    }
    if (Traits::kIsWidened && !(p_.softcap > 0.0f) && is_scaled_first()) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= score_scale_;
    }
    const bool all_boxes = box_mask == (1u << (Traits::kTile >> launch_.box_shift)) - 1;
    if (all_boxes && first_key + Traits::kTile <= keys.plain_end && first_key >= keys.plain_begin) return;
    const int32_t first_position = shared_->tiles[slot].first_position, seq_len = shared_->tiles[slot].seq_len;
    // Columns that a row sees, counted from the lane's first one: those from low to below high.
    int32_t low[2], high[2];
    const int32_t lane_column = lane_ % 4 * 2;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int32_t position = first_position + token_[row];
      high[row] = (p_.is_causal ? min(position + 1, seq_len) : seq_len) - first_key - lane_column;
      const int64_t lowest = p_.window > 0 ? position + 1 - p_.window - first_key : int64_t{0};
      low[row] = static_cast<int32_t>(min(max(lowest, int64_t{0}), int64_t{Traits::kTile})) - lane_column;
    }
    // In the last box of a sequence keys stand `beyond` columns higher up than elsewhere.
    const int32_t last_box = (seq_len - 1) & ~(launch_.plan.box_rows - 1);  // its first key
    const int32_t beyond = last_box + launch_.plan.box_rows - seq_len;
    const int32_t tail = beyond > 0 ? last_box - first_key : Traits::kTile;  // first column of the last box
    if (all_boxes && tail >= Traits::kTile && p_.window <= 0) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (i / 4 * 8 + i % 2 >= high[i / 2 % 2]) scores[i] = -INFINITY;
      }
      return;
    }
#pragma unroll
    for (int column = 0; column < kScores / 4; ++column) {
      const bool has_box = (box_mask >> (column * 8 >> launch_.box_shift) & 1) != 0;
      const bool is_tail = column * 8 >= tail;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i / 2;
        const int32_t lowest = is_tail ? max(low[row], tail - lane_column) + beyond : low[row];
        const int32_t end = !has_box ? INT32_MIN : is_tail ? high[row] + beyond : high[row];
        const int32_t place = column * 8 + i % 2;
        if (place < lowest || place >= end) scores[column * 4 + i] = -INFINITY;
      }
    }
  }

  // The online softmax: scores become weights.
  __device__ void weigh(float (&scores)[kScores]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most = scores[2 * row];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        most = fmaxf(most, scores[i + 2 * row]);
        most = fmaxf(most, scores[i + 2 * row + 1]);
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      most = fmaxf(most, largest_[row]);
      const float base = most == -INFINITY ? 0.0f : most * scale_log2_;
      shrink_[row] = raise_two(largest_[row] * scale_log2_ - base);
      largest_[row] = most;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float &score = scores[i + 2 * row + j];
          score = raise_two(fmaf(score, scale_log2_, -base));
          sum += score;
        }
      }
      sum_[row] = sum_[row] * shrink_[row] + sum;
    }
  }

  __device__ static void pack(const float (&scores)[kScores], uint32_t (&weights)[kKeySteps][4]) {
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] = pack_pair<T>(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1]);
      }
    }
  }

  __device__ void shrink_output(float (&out)[kOutputs]) const {
    if (!__any_sync(0xffffffffu, shrink_[0] != 1.0f || shrink_[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= shrink_[i / 2 % 2];
  }

  // Of the thread's two rows, in the tile. Found anew where it is needed, so that it takes no register for long.
  __device__ int32_t find_row(int row) const {
    int32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
    return warpgroup_ * 64 + thread % kWarpgroupThreads / 32 * 16 + lane_ / 4 + row * 8;
  }

  __device__ void finish_tile(const float (&out)[kOutputs], int slot) {
    const PrefillTile &tile = shared_->tiles[slot];
    const int32_t group = launch_.group;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = sum_[row];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const bool is_inside = token_[row] < tile.num_tokens;
      const int64_t token = tile.first_token + token_[row];
      const int32_t tile_row = find_row(row);
      const int32_t head = tile.kv_head * group + tile_row - token_[row] * group;
      // One operation: this is compiled in two places, and which of them a tile comes by is a matter of timing.
      const float lse = sum == 0.0f ? -INFINITY : __fmaf_rn(largest_[row], scale_log2_, log2f(sum));
      float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (Traits::kIsWidened) factor *= value_scale_;
      if (tile.num_parts > 1 || over_prefixes()) {
        if (is_inside) write_part(out, row, tile, tile_row, lse, factor);
        continue;
      }
      const float full = add_sink(p_, head, lse);
      if (full != lse) factor *= exp2f(lse - full);
      if (is_inside && lane_ % 4 == 0 && p_.lse != nullptr) {
        p_.lse[token * p_.lse_token_stride + head * p_.lse_head_stride] = full * kLn2;
      }
      T *target = static_cast<T *>(p_.out) + token * p_.out_token_stride + head * p_.out_head_stride + lane_ % 4 * 8;
#pragma unroll
      for (int column = 0; column < kOutputs / 4; column += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = (column + i) * 4 + 2 * row;
          words[i] = pack_pair<T>(out[first] * factor, out[first + 1] * factor);
        }
        transpose_quad(words);
        const bool is_in_row = !Traits::kIsPadded || column * 8 + lane_ % 4 * 8 < p_.kv.v_head_dim;
        if (is_inside && is_in_row) {
          *reinterpret_cast<uint4 *>(target + column * 8) = {words[0], words[1], words[2], words[3]};
        }
      }
    }
    if (tile.num_parts > 1 && !over_prefixes() && is_last_of_parts(tile)) combine_tile(tile);
  }

  // Then all are parts, in the order of the step's tokens and heads, and somebody else merges them.
  __device__ bool over_prefixes() const { return Traits::kTakesPrefixes && launch_.plan.over_prefixes; }

  // The warps merge the parts of the warpgroup's rows, kRowsAtOnce of them together.
  __device__ void combine_tile(const PrefillTile &tile) const {
    constexpr int kRowsAtOnce = Traits::kHasDecode ? 2 : 4, kWarpRows = 16;
    const int32_t group = launch_.group;
    const PartRows parts = {launch_.partial_out, launch_.partial_lse, tile.part_stride};
    const int32_t first = find_row(0) - lane_ / 4;  // of the warp
    const int32_t num_rows = min(first + kWarpRows, tile.num_tokens * group) - first;
    for (int32_t base = 0; base < num_rows; base += kRowsAtOnce) {
      CombinedRow rows[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int32_t row = first + base + i, token = row / group;
        rows[i] = {tile.first_row + row, tile.first_token + token, tile.kv_head * group + row - token * group};
      }
      combine_parts<T>(p_, parts, tile.num_parts, rows, num_rows - base);
    }
  }

  __device__ void write_part(const float (&out)[kOutputs], int row, const PrefillTile &tile, int32_t tile_row,
                             float lse, float factor) const {
    int64_t index = tile.first_row + tile.part * tile.part_stride + tile_row;
    if (over_prefixes()) index += token_[row] * (p_.num_heads - launch_.group);
    if (lane_ % 4 == 0) launch_.partial_lse[index] = lse;
    const int32_t num_dims = Traits::kIsPadded ? p_.kv.v_head_dim : Traits::kValueDim;
    float *target = launch_.partial_out + index * num_dims + lane_ % 4 * 2;
#pragma unroll
    for (int column = 0; column < kOutputs / 4; ++column) {
      if (Traits::kIsPadded && column * 8 >= num_dims) break;
      const float2 pair = {out[column * 4 + 2 * row] * factor, out[column * 4 + 2 * row + 1] * factor};
      *reinterpret_cast<float2 *>(target + column * 8) = pair;
    }
  }

  // Whether this warpgroup is the last one to come here with a part of its rows: then it sees those of the others. The
  // ticket is zero again afterwards.
  __device__ bool is_last_of_parts(const PrefillTile &tile) const {
    __threadfence();
    sync_named(kPartsName + warpgroup_, kWarpgroupThreads);
    if (threadIdx.x % kWarpgroupThreads == 0) {
      const uint32_t most = static_cast<uint32_t>(tile.num_parts) - 1;
      // Of the tile's first row, in a part for each warpgroup: there are two parts at least.
      uint32_t *ticket = launch_.tickets + tile.first_row + warpgroup_ * tile.part_stride;
      shared_->is_last[warpgroup_] = atomicInc(ticket, most) == most;
      __threadfence();
    }
    sync_named(kPartsName + warpgroup_, kWarpgroupThreads);
    return shared_->is_last[warpgroup_];
  }

  // Word i of lane j of a quad becomes word j of lane i, so that a lane has 16 neighbouring bytes.
  __device__ void transpose_quad(uint32_t (&words)[4]) const {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool is_upper = (lane_ & bit) != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((i & bit) != 0) continue;
        const uint32_t other = __shfl_xor_sync(0xffffffffu, is_upper ? words[i] : words[i + bit], bit);
        words[i] = is_upper ? other : words[i];
        words[i + bit] = is_upper ? words[i + bit] : other;
      }
    }
  }

  const AttendParams &p_;
  const PrefillLaunch &launch_;
  PrefillShared<Traits> *const shared_;
  const uint32_t queries_, keys_;  // matrices: of the warpgroup's rows, and of the first buffer
  const int warpgroup_, lane_;
  int32_t token_[2];  // of the thread's two rows, in the tile
  float scale_log2_;
  float score_scale_ = 1.0f, value_scale_ = 1.0f;  // with K and V of 8 bits
  float largest_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0.0f, 0.0f}, shrink_[2];
  RingCursor<Traits::kStages> ring_;
};

}  // namespace pkv
#endif  // PKV_IS_SM90A
