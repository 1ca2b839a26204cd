// Attention spread over the threads.
//
// The unit of work is a query tile: up to kTileRows query rows of one sequence, over all keys they see; rows of one KV
// head where a sequence has many, of several neighbouring ones where it has few. Its keys are reduced in splits of
// kSplitKeys, which are merged in order. Where tiles are too few or too uneven for the threads, first all splits of all
// tiles are reduced, each into a state of its own, then the tiles merge theirs; where there are still too few, tiles
// have fewer heads. It is the same arithmetic in the same order, so the result does not depend on the choice.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "backend/host/kernels.h"
#include "backend/host/paged_address.h"
#include "backend/host/thread_pool.h"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int64_t kSmallWork = 1 << 19;                  // multiply-adds below which threads are not worth waking
constexpr int64_t kTasksPerThread = 4;                   // for an even end
constexpr uint64_t kMaxStateBytes = uint64_t{256} << 20; // of split states; beyond, tiles are not split
constexpr uint64_t kAlignment = 64;

// Memory that a calling thread keeps from step to step.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() { std::free(memory_); }
  Workspace(const Workspace &) = delete;
  Workspace &operator=(const Workspace &) = delete;

  // At least `bytes`, contents undefined; null when there is no memory.
  char *reserve(uint64_t bytes) {
    if (bytes <= bytes_) return memory_;
    std::free(memory_);
    bytes_ = (bytes + bytes / 4 + kAlignment - 1) / kAlignment * kAlignment;
    memory_ = static_cast<char *>(std::aligned_alloc(kAlignment, bytes_));
    if (memory_ == nullptr) bytes_ = 0;
    return memory_;
  }

 private:
  char *memory_ = nullptr;
  uint64_t bytes_ = 0;
};

thread_local Workspace workspace;

struct SplitRange {
  int64_t begin, end;
};

SplitRange splits_of(KeyRange keys) {
  if (keys.begin >= keys.end) return {0, 0};
  return {keys.begin / kSplitKeys, (keys.end + kSplitKeys - 1) / kSplitKeys};
}

class AttendPlan {
 public:
  explicit AttendPlan(const AttendParams &params)
      : params_(params), group_(params.num_heads / params.kv.num_kv_heads),
        out_stride_((params.kv.v_head_dim + 15) / 16 * 16) {}

  // Decides how to run.
  void plan(int32_t num_threads) {
    max_heads_ = params_.kv.num_kv_heads;
    for (;; max_heads_ = (max_heads_ + 1) / 2) {
      const int64_t num_tasks = count(num_threads);
      if (num_threads_ == 1 || max_heads_ == 1 || num_tasks >= kTasksPerThread * num_threads_) {
        num_threads_ = static_cast<int32_t>(std::min<int64_t>(num_threads_, std::max<int64_t>(1, num_tasks)));
        return;
      }
    }
  }

  Status reserve() {
    const uint64_t table_bytes =
        round_up(static_cast<uint64_t>(params_.tables.num_sequences + 1) * 2 * sizeof(int64_t));
    const uint64_t scratch_bytes = static_cast<uint64_t>(num_threads_) * sizeof(TileScratch);
    const uint64_t bytes = table_bytes + scratch_bytes + static_cast<uint64_t>(num_states_) * split_state_bytes();
    char *memory = workspace.reserve(bytes);
    if (memory == nullptr) {
      return fail(PKV_OUT_OF_MEMORY, "host: no memory for a workspace of %llu bytes",
                  static_cast<unsigned long long>(bytes));
    }
    first_tiles_ = reinterpret_cast<int64_t *>(memory);
    first_states_ = first_tiles_ + params_.tables.num_sequences + 1;
    scratch_ = reinterpret_cast<TileScratch *>(memory + table_bytes);
    states_ = memory + table_bytes + scratch_bytes;
    int64_t tile = 0, state = 0;
    for (int64_t sequence = 0; sequence <= params_.tables.num_sequences; ++sequence) {
      first_tiles_[sequence] = tile;
      first_states_[sequence] = state;
      if (sequence == params_.tables.num_sequences) break;
      const int64_t tiles = num_tiles(sequence);
      tile += tiles;
      state += tiles * num_states(sequence);
    }
    return PKV_OK;
  }

  void run(const IsaKernels &inner) {
    const int64_t num_tasks = first_tiles_[params_.tables.num_sequences];
    if (!is_split_) {
      auto run_tile = [&](int64_t index, int32_t worker) { attend_whole(inner, index, scratch_ + worker); };
      run_parallel(num_tasks, num_threads_, run_tile);
      return;
    }
    auto run_split = [&](int64_t index, int32_t worker) { attend_state(inner, index, scratch_ + worker); };
    run_parallel(first_states_[params_.tables.num_sequences], num_threads_, run_split);
    auto merge = [&](int64_t index, int32_t worker) { merge_states_of(inner, index, scratch_ + worker); };
    run_parallel(num_tasks, num_threads_, merge);
  }

  void clear_padding() const {
    const StepTables &tables = params_.tables;
    const int64_t element_bytes = dtype_bytes(params_.dtype);
    for (int64_t token = tables.cu_seqlens_q[tables.num_sequences]; token < tables.num_tokens; ++token) {
      for (int64_t head = 0; head < params_.num_heads; ++head) {
        const int64_t offset = token * params_.out_token_stride + head * params_.out_head_stride;
        std::memset(static_cast<char *>(params_.out) + offset * element_bytes, 0,
                    static_cast<size_t>(params_.kv.v_head_dim * element_bytes));
        if (params_.lse == nullptr) continue;
        params_.lse[token * params_.lse_token_stride + head * params_.lse_head_stride] = -__builtin_inff();
      }
    }
  }

 private:
  static uint64_t round_up(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  int64_t num_queries(int64_t sequence) const {
    return params_.tables.cu_seqlens_q[sequence + 1] - params_.tables.cu_seqlens_q[sequence];
  }
  // Tiles of one run of KV heads, and what there is of either.
  int64_t num_row_tiles(int64_t sequence) const { return (num_queries(sequence) * group_ + kTileRows - 1) / kTileRows; }
  int64_t heads_per_tile(int64_t sequence) const {
    const int64_t rows = std::min<int64_t>(num_queries(sequence) * group_, kTileRows);
    return std::min(max_heads_, kTileRows / std::max<int64_t>(1, rows));
  }
  int64_t num_tiles(int64_t sequence) const {
    const int64_t heads = heads_per_tile(sequence);
    return num_row_tiles(sequence) * ((params_.kv.num_kv_heads + heads - 1) / heads);
  }

  // Counts tiles and splits, chooses whether splits are tasks of their own, and returns the number of tasks.
  int64_t count(int32_t num_threads) {
    const StepTables &tables = params_.tables;
    int64_t work = 0, num_tiles_sum = 0, num_splits = 0, largest_tile = 0, weight = 0;
    for (int64_t sequence = 0; sequence < tables.num_sequences; ++sequence) {
      const int64_t rows = num_queries(sequence) * group_;
      if (rows == 0) continue;
      const int64_t rows_per_tile = std::min<int64_t>(rows, kTileRows) * heads_per_tile(sequence);
      const SplitRange splits = sequence_splits(sequence);
      const int64_t count = std::max<int64_t>(1, splits.end - splits.begin);
      num_tiles_sum += num_tiles(sequence);
      num_splits += num_tiles(sequence) * count;
      weight += rows * count * params_.kv.num_kv_heads;
      largest_tile = std::max(largest_tile, rows_per_tile * count);
      max_rows_ = std::max(max_rows_, rows_per_tile);
      const int64_t keys = std::min<int64_t>(tables.seq_lens[sequence], count * kSplitKeys);
      work += rows * keys * params_.kv.num_kv_heads * (params_.kv.head_dim + params_.kv.v_head_dim);
    }
    num_threads_ = work < kSmallWork ? 1 : num_threads;
    const bool is_uneven = largest_tile * kTasksPerThread * num_threads_ > weight;
    const uint64_t state_bytes = static_cast<uint64_t>(num_splits) * split_state_bytes();
    is_split_ = num_threads_ > 1 && num_splits > num_tiles_sum && is_uneven && state_bytes <= kMaxStateBytes;
    num_states_ = is_split_ ? num_splits : 0;
    return is_split_ ? num_splits : num_tiles_sum;
  }

  // Keys that queries [first, last] see together.
  KeyRange keys_of(int64_t sequence, int64_t first, int64_t last) const {
    const int64_t seq_len = params_.tables.seq_lens[sequence], queries = num_queries(sequence);
    return {visible_keys(params_, seq_len, queries, first).begin, visible_keys(params_, seq_len, queries, last).end};
  }
  SplitRange sequence_splits(int64_t sequence) const {
    return splits_of(keys_of(sequence, 0, num_queries(sequence) - 1));
  }
  int64_t num_states(int64_t sequence) const {
    if (!is_split_ || num_queries(sequence) == 0) return 0;
    const SplitRange splits = sequence_splits(sequence);
    return std::max<int64_t>(1, splits.end - splits.begin);
  }

  uint64_t split_state_bytes() const {
    return round_up(static_cast<uint64_t>(max_rows_ * (out_stride_ + 2)) * sizeof(float));
  }
  TileState state_at(int64_t index) const {
    float *memory = reinterpret_cast<float *>(states_ + static_cast<uint64_t>(index) * split_state_bytes());
    return {memory + max_rows_ * out_stride_, memory + max_rows_ * (out_stride_ + 1), memory, out_stride_};
  }
  TileState partial_state(TileScratch *scratch) const {
    return {scratch->largest, scratch->sum, scratch->out, out_stride_};
  }
  TileState total_state(TileScratch *scratch) const {
    return {scratch->total_largest, scratch->total_sum, scratch->total_out, out_stride_};
  }

  // The sequence whose range of `firsts` holds `index`.
  int64_t find_sequence(const int64_t *firsts, int64_t index) const {
    return std::upper_bound(firsts, firsts + params_.tables.num_sequences + 1, index) - firsts - 1;
  }

  // Tile `index` of the sequence's num_tiles. The last rows come first: if causal, they see most.
  QueryTile tile_at(int64_t sequence, int64_t index) const {
    const int64_t tiles = num_row_tiles(sequence), row_tile = tiles - 1 - index % tiles;
    const int64_t heads = heads_per_tile(sequence);
    QueryTile tile;
    tile.blocks = params_.tables.block_table + sequence * params_.tables.table_stride;
    tile.seq_len = params_.tables.seq_lens[sequence];
    tile.first_token = params_.tables.cu_seqlens_q[sequence];
    tile.num_queries = num_queries(sequence);
    tile.kv_head = index / tiles * heads;
    tile.group = group_;
    tile.first_row = row_tile * kTileRows;
    tile.num_heads = static_cast<int32_t>(std::min(heads, params_.kv.num_kv_heads - tile.kv_head));
    tile.num_rows = static_cast<int32_t>(std::min<int64_t>(kTileRows, tile.num_queries * group_ - tile.first_row));
    tile.is_whole = !is_split_;
    return tile;
  }
  SplitRange tile_splits(int64_t sequence, const QueryTile &tile) const {
    return splits_of(keys_of(sequence, tile.first_row / group_, (tile.first_row + tile.num_rows - 1) / group_));
  }

  void clear(const QueryTile &tile, const TileState &state) const {
    for (int32_t r = 0; r < tile.num_all_rows(); ++r) {
      state.largest[r] = -__builtin_inff();
      state.sum[r] = 0;
    }
    std::memset(state.out, 0, static_cast<size_t>(tile.num_all_rows() * state.out_stride) * sizeof(float));
  }

  void attend_whole(const IsaKernels &inner, int64_t index, TileScratch *scratch) const {
    const int64_t sequence = find_sequence(first_tiles_, index);
    const QueryTile tile = tile_at(sequence, index - first_tiles_[sequence]);
    const SplitRange splits = tile_splits(sequence, tile);
    const TileState total = total_state(scratch), partial = partial_state(scratch);
    clear(tile, total);
    for (int64_t split = splits.begin; split < splits.end; ++split) {
      inner.attend_split(params_, tile, split, scratch, partial);
      inner.merge_tile(tile, partial, total);
    }
    inner.finish_tile(params_, tile, total);
  }

  // States of a sequence stand by tile, then by split of the sequence.
  void attend_state(const IsaKernels &inner, int64_t index, TileScratch *scratch) const {
    const int64_t sequence = find_sequence(first_states_, index), states = num_states(sequence);
    const int64_t local = index - first_states_[sequence];
    const QueryTile tile = tile_at(sequence, local / states);
    inner.attend_split(params_, tile, sequence_splits(sequence).begin + local % states, scratch, state_at(index));
  }

  void merge_states_of(const IsaKernels &inner, int64_t index, TileScratch *scratch) const {
    const int64_t sequence = find_sequence(first_tiles_, index), states = num_states(sequence);
    const int64_t local = index - first_tiles_[sequence];
    const QueryTile tile = tile_at(sequence, local);
    const TileState total = total_state(scratch);
    clear(tile, total);
    for (int64_t i = 0; i < states; ++i) {
      inner.merge_tile(tile, state_at(first_states_[sequence] + local * states + i), total);
    }
    inner.finish_tile(params_, tile, total);
  }

  const AttendParams &params_;
  const int64_t group_, out_stride_;
  int64_t max_heads_ = 1;  // KV heads of a tile
  int64_t max_rows_ = 1;   // of a tile
  int64_t num_states_ = 0;
  int32_t num_threads_ = 1;
  bool is_split_ = false;
  int64_t *first_tiles_ = nullptr, *first_states_ = nullptr;  // [num_sequences + 1]
  TileScratch *scratch_ = nullptr;                            // [num_threads_]
  char *states_ = nullptr;                                    // [num_states_] of split_state_bytes() each
};

}  // namespace

Status attend_in_tiles(const IsaKernels &inner, const AttendParams &params, int32_t num_threads) {
  AttendPlan plan(params);
  plan.plan(num_threads);
  PKV_TRY(plan.reserve());
  plan.run(inner);
  plan.clear_padding();
  return PKV_OK;
}

}  // namespace pkv
