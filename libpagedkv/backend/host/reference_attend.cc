#include <cmath>
#include <limits>

#include "backend/host/number_formats.h"
#include "backend/host/paged_address.h"
#include "backend/host/reference.h"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// One query head of one token: its sequence, its visible keys, its addresses.
struct QueryRow {
  const int32_t *blocks;  // the sequence's row of the block table
  KeyRange keys;
  int64_t position;
  int64_t head, kv_head;
  const char *q;
  int64_t first_new;          // position of the sequence's first new token
  const uint8_t *tree_mask;   // the token's row, or null
};

const char *q_address(const AttendParams &params, int64_t token, int64_t head) {
  return static_cast<const char *>(params.q) +
         (token * params.q_token_stride + head * params.q_head_stride) * dtype_bytes(params.dtype);
}

double row_scale(const PagedKv &kv, const char *block, uint64_t plane, int64_t offset, int64_t head,
                 const float *static_scale) {
  if (kv.kv_scales != PKV_SCALES_PER_TOKEN_HEAD) return static_scale[head];
  return decode_element(PKV_FLOAT32, block + plane + scale_row_offset(kv, offset, head), 0);
}

// The score of a key, or minus infinity where its block was given back or the tree mask hides it.
double score_of_key(const AttendParams &params, const QueryRow &row, int64_t key) {
  if (row.tree_mask != nullptr && key >= row.first_new && row.tree_mask[key - row.first_new] == 0)
    return kMinusInfinity;
  const PagedKv &kv = params.kv;
  const int32_t id = row.blocks[key / kv.block_size];
  if (id < 0) return kMinusInfinity;
  const char *block = block_address(kv, id);
  const int64_t offset = key % kv.block_size;
  const char *k = block + k_row_offset(kv, offset, row.kv_head, dtype_bytes(kv.dtype));
  double sum = 0;
  for (int64_t d = 0; d < kv.head_dim; ++d) {
    sum += static_cast<double>(decode_element(params.dtype, row.q, d)) * decode_element(kv.dtype, k, d);
  }
  double score = sum * params.scale * row_scale(kv, block, kv.k_scale_offset, offset, row.kv_head, kv.k_scale);
  if (params.softcap > 0) score = params.softcap * std::tanh(score / params.softcap);
  if (params.alibi_slopes != nullptr)
    score += static_cast<double>(params.alibi_slopes[row.head]) * (key - row.position);
  return score;
}

void add_value(const AttendParams &params, const QueryRow &row, int64_t key, double weight, double *out) {
  const PagedKv &kv = params.kv;
  const char *block = block_address(kv, row.blocks[key / kv.block_size]);
  const int64_t offset = key % kv.block_size;
  const char *v = block + v_row_offset(kv, offset, row.kv_head, dtype_bytes(kv.dtype));
  const double scale = row_scale(kv, block, kv.v_scale_offset, offset, row.kv_head, kv.v_scale);
  for (int64_t d = 0; d < kv.v_head_dim; ++d) out[d] += weight * scale * decode_element(kv.dtype, v, d);
}

void store_row(const AttendParams &params, int64_t token, int64_t head, const double *out, double lse) {
  char *row = static_cast<char *>(params.out) +
              (token * params.out_token_stride + head * params.out_head_stride) * dtype_bytes(params.dtype);
  for (int64_t d = 0; d < params.kv.v_head_dim; ++d) {
    encode_element(params.dtype, row, d, static_cast<float>(out[d]));
  }
  if (params.lse != nullptr) {
    params.lse[token * params.lse_token_stride + head * params.lse_head_stride] = static_cast<float>(lse);
  }
}

// Two passes: the largest score, then the sums relative to it.
void attend_row(const AttendParams &params, const QueryRow &row, int64_t token) {
  double out[kMaxHeadDim] = {};
  double largest = kMinusInfinity;
  bool is_any_attended = false;
  for (int64_t key = row.keys.begin; key < row.keys.end; ++key) {
    const double score = score_of_key(params, row, key);
    if (score != kMinusInfinity) is_any_attended = true;
    if (score > largest) largest = score;
  }
  if (!is_any_attended) {
    store_row(params, token, row.head, out, kMinusInfinity);
    return;
  }
  if (params.sinks != nullptr && params.sinks[row.head] > largest) largest = params.sinks[row.head];
  double denominator = params.sinks == nullptr ? 0.0 : std::exp(params.sinks[row.head] - largest);
  for (int64_t key = row.keys.begin; key < row.keys.end; ++key) {
    const double score = score_of_key(params, row, key);
    if (score == kMinusInfinity) continue;
    const double weight = std::exp(score - largest);
    denominator += weight;
    add_value(params, row, key, weight, out);
  }
  for (int64_t d = 0; d < params.kv.v_head_dim; ++d) out[d] /= denominator;
  store_row(params, token, row.head, out, largest + std::log(denominator));
}

}  // namespace

void reference_attend(const AttendParams &params) {
  const StepTables &tables = params.tables;
  const int64_t group = params.num_heads / params.kv.num_kv_heads;
  for (int64_t sequence = 0; sequence < tables.num_sequences; ++sequence) {
    const int64_t begin = tables.cu_seqlens_q[sequence], num_queries = tables.cu_seqlens_q[sequence + 1] - begin;
    const int64_t seq_len = tables.seq_lens[sequence];
    for (int64_t i = 0; i < num_queries; ++i) {
      for (int64_t head = 0; head < params.num_heads; ++head) {
        QueryRow row;
        row.blocks = tables.block_table + sequence * tables.table_stride;
        row.keys = visible_keys(params, seq_len, num_queries, i);
        row.position = seq_len - num_queries + i;
        row.head = head;
        row.kv_head = head / group;
        row.q = q_address(params, begin + i, head);
        row.first_new = seq_len - num_queries;
        row.tree_mask =
            params.tree_mask == nullptr ? nullptr : params.tree_mask + (begin + i) * params.tree_mask_stride;
        attend_row(params, row, begin + i);
      }
    }
  }
  const double zeros[kMaxHeadDim] = {};
  for (int64_t token = tables.cu_seqlens_q[tables.num_sequences]; token < tables.num_tokens; ++token) {
    for (int64_t head = 0; head < params.num_heads; ++head) store_row(params, token, head, zeros, kMinusInfinity);
  }
}

}  // namespace pkv
