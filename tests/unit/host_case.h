// A random attention step for the host kernels: a pool full of NaN with K and V of some sequences in it, queries, and
// room for the results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/host/host.h"
#include "backend/host/number_formats.h"
#include "base/dtype.h"

namespace pkv {

struct CaseShape {
  pkv_dtype dtype = PKV_FLOAT32, kv_dtype = PKV_FLOAT32;
  pkv_kv_order order = PKV_TOKEN_HEAD;
  pkv_kv_scales kv_scales = PKV_SCALES_STATIC;
  int32_t block_size = 16, num_kv_heads = 1, group = 1, head_dim = 64, v_head_dim = 64;
  std::vector<int32_t> seq_lens, query_lens;
  int32_t padding_sequences = 0, padding_tokens = 0;
  bool is_causal = true, has_sinks = false, has_alibi = false, has_lse = true;
  bool is_window_released = false;  // blocks that no query sees are given back
  bool has_holes = false;           // some that queries would see, too
  int64_t window = 0;
  float softcap = 0;
};

inline std::string describe(const CaseShape &shape) {
  std::string text = std::string(dtype_name(shape.dtype)) + " over " + dtype_name(shape.kv_dtype) + ", order " +
                     std::to_string(shape.order) + ", scales " + std::to_string(shape.kv_scales) + ", block " +
                     std::to_string(shape.block_size) + ", heads " + std::to_string(shape.num_kv_heads) + " x " +
                     std::to_string(shape.group) + ", dims " + std::to_string(shape.head_dim) + "/" +
                     std::to_string(shape.v_head_dim) + ", causal " + std::to_string(shape.is_causal) + ", window " +
                     std::to_string(shape.window) + (shape.is_window_released ? " released" : "") +
                     (shape.has_holes ? " with holes" : "") + ", softcap " + std::to_string(shape.softcap) +
                     ", sinks " + std::to_string(shape.has_sinks) + ", alibi " + std::to_string(shape.has_alibi) +
                     ", lens";
  for (size_t i = 0; i < shape.seq_lens.size(); ++i) {
    text += " " + std::to_string(shape.query_lens[i]) + "/" + std::to_string(shape.seq_lens[i]);
  }
  return text;
}

class Case {
 public:
  Case(const CaseShape &shape, uint64_t seed) : shape_(shape), random_(seed) {
    make_layout();
    make_tables();
    write_all();
    if (shape.is_window_released) release_unseen();
    if (shape.has_holes) release_some();
    make_queries();
  }
  Case(const Case &) = delete;
  Case &operator=(const Case &) = delete;

  AttendParams params = {};
  WriteKvParams write_params = {};  // of all tokens of all sequences
  int64_t num_tokens, num_heads;
  std::vector<float> lse;
  std::vector<char> pool;

  int64_t out_count() const { return num_tokens * num_heads * shape_.v_head_dim; }

  // Results as float, out first, then lse. The output is dirty before.
  Status run(std::vector<float> *results) {
    std::fill(out_.begin(), out_.end(), static_cast<char>(0xa5));
    for (float &value : lse) value = 12345.0f;
    PKV_TRY(host_backend()->attend(params, nullptr));
    results->clear();
    for (int64_t i = 0; i < out_count(); ++i) results->push_back(decode_element(shape_.dtype, out_.data(), i));
    for (const float value : lse) results->push_back(value);
    return PKV_OK;
  }

 private:
  float draw() { return std::normal_distribution<float>()(random_); }

  void make_layout() {
    const CaseShape &s = shape_;
    PagedKv &kv = params.kv;
    const int64_t bytes = dtype_bytes(s.kv_dtype), planes = s.block_size * s.num_kv_heads;
    kv = PagedKv();
    kv.block_size = s.block_size;
    kv.num_kv_heads = s.num_kv_heads;
    kv.head_dim = s.head_dim;
    kv.v_head_dim = s.v_head_dim;
    kv.dtype = s.kv_dtype;
    const auto round_up = [](int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; };
    kv.k_offset = 32;
    kv.v_offset = static_cast<uint64_t>(round_up(32 + planes * s.head_dim * bytes, 16));
    const bool is_token_first = s.order == PKV_TOKEN_HEAD;
    kv.k_token_stride = is_token_first ? int64_t{s.num_kv_heads} * s.head_dim : s.head_dim;
    kv.k_head_stride = is_token_first ? s.head_dim : int64_t{s.block_size} * s.head_dim;
    kv.v_token_stride = is_token_first ? int64_t{s.num_kv_heads} * s.v_head_dim : s.v_head_dim;
    kv.v_head_stride = is_token_first ? s.v_head_dim : int64_t{s.block_size} * s.v_head_dim;
    kv.kv_scales = s.kv_scales;
    kv.k_scale_offset =
        static_cast<uint64_t>(round_up(static_cast<int64_t>(kv.v_offset) + planes * s.v_head_dim * bytes, 16));
    kv.v_scale_offset = kv.k_scale_offset + static_cast<uint64_t>(planes) * 4;
    kv.scale_token_stride = is_token_first ? s.num_kv_heads : 1;
    kv.scale_head_stride = is_token_first ? 1 : s.block_size;
    kv.block_bytes = static_cast<uint64_t>(round_up(static_cast<int64_t>(kv.v_scale_offset) + planes * 4, 256));
    std::uniform_real_distribution<float> scales(0.02f, 0.05f);
    for (int32_t head = 0; head < s.num_kv_heads; ++head) {
      k_scale_.push_back(is_quantised_dtype(s.kv_dtype) ? scales(random_) : 1.0f);
      v_scale_.push_back(is_quantised_dtype(s.kv_dtype) ? scales(random_) : 1.0f);
    }
    if (s.kv_scales == PKV_SCALES_STATIC) {
      kv.k_scale = k_scale_.data();
      kv.v_scale = v_scale_.data();
    }
  }

  void make_tables() {
    const size_t num_real = shape_.seq_lens.size();
    int64_t total_blocks = 0, stride = 1;
    for (const int32_t len : shape_.seq_lens) {
      const int64_t blocks = (len + shape_.block_size - 1) / shape_.block_size;
      total_blocks += blocks;
      stride = std::max(stride, blocks + 1);
    }
    const int64_t num_blocks = total_blocks + 3;
    std::vector<int32_t> ids(static_cast<size_t>(num_blocks));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::shuffle(ids.begin(), ids.end(), random_);
    pool.assign(static_cast<size_t>(num_blocks) * params.kv.block_bytes, static_cast<char>(0xff));
    params.kv.base = pool.data();
    params.kv.num_blocks = num_blocks;

    const size_t num_sequences = num_real + static_cast<size_t>(shape_.padding_sequences);
    table_.assign(num_sequences * static_cast<size_t>(stride), -1);
    seq_lens_ = shape_.seq_lens;
    seq_lens_.resize(num_sequences, 0);
    cu_seqlens_q_.assign(1, 0);
    size_t next = 0;
    for (size_t i = 0; i < num_sequences; ++i) {
      const int32_t blocks = (seq_lens_[i] + shape_.block_size - 1) / shape_.block_size;
      for (int32_t b = 0; b < blocks; ++b)
        table_[i * static_cast<size_t>(stride) + static_cast<size_t>(b)] = ids[next++];
      cu_seqlens_q_.push_back(cu_seqlens_q_.back() + (i < num_real ? shape_.query_lens[i] : 0));
    }
    num_tokens = cu_seqlens_q_.back() + shape_.padding_tokens;
    StepTables &tables = params.tables;
    tables = StepTables();
    tables.num_sequences = static_cast<int64_t>(num_sequences);
    tables.num_tokens = num_tokens;
    tables.block_table = table_.data();
    tables.table_stride = stride;
    tables.seq_lens = seq_lens_.data();
    tables.cu_seqlens_q = cu_seqlens_q_.data();
    for (size_t i = 0; i < num_sequences; ++i) {
      tables.max_seq_len = std::max<int64_t>(tables.max_seq_len, seq_lens_[i]);
      tables.max_query_len = std::max<int64_t>(tables.max_query_len, cu_seqlens_q_[i + 1] - cu_seqlens_q_[i]);
    }
  }

  void write_all() {
    for (size_t i = 0; i < seq_lens_.size(); ++i) {
      const int32_t *blocks = table_.data() + static_cast<int64_t>(i) * params.tables.table_stride;
      for (int64_t position = 0; position < seq_lens_[i]; ++position) {
        slots_.push_back(blocks[position / shape_.block_size] * int64_t{shape_.block_size} +
                         position % shape_.block_size);
      }
    }
    slots_.push_back(-1);
    const size_t rows = slots_.size() * static_cast<size_t>(shape_.num_kv_heads);
    k_.resize(rows * static_cast<size_t>(shape_.head_dim));
    v_.resize(rows * static_cast<size_t>(shape_.v_head_dim));
    for (float &value : k_) value = draw();
    for (float &value : v_) value = draw();
    write_params = WriteKvParams();
    write_params.kv = params.kv;
    write_params.num_tokens = static_cast<int64_t>(slots_.size());
    write_params.slot_mapping = slots_.data();
    write_params.k = k_.data();
    write_params.v = v_.data();
    write_params.dtype = PKV_FLOAT32;
    write_params.k_token_stride = int64_t{shape_.num_kv_heads} * shape_.head_dim;
    write_params.k_head_stride = shape_.head_dim;
    write_params.v_token_stride = int64_t{shape_.num_kv_heads} * shape_.v_head_dim;
    write_params.v_head_stride = shape_.v_head_dim;
    host_backend()->write_kv(write_params, nullptr);
  }

  // Blocks wholly below the window of the first query go, and are filled with NaN.
  void release_unseen() {
    for (size_t i = 0; i < shape_.seq_lens.size(); ++i) {
      const int64_t begin = seq_lens_[i] - shape_.query_lens[i] - shape_.window + 1;
      int32_t *blocks = table_.data() + static_cast<int64_t>(i) * params.tables.table_stride;
      for (int64_t b = 0; (b + 1) * shape_.block_size <= begin; ++b) release(blocks + b);
    }
  }

  void release_some() {
    for (int32_t &block : table_) {
      if (block >= 0 && random_() % 4 == 0) release(&block);
    }
  }

  void release(int32_t *block) {
    std::memset(pool.data() + static_cast<uint64_t>(*block) * params.kv.block_bytes, 0xff, params.kv.block_bytes);
    *block = -1;
  }

  void make_queries() {
    num_heads = int64_t{shape_.num_kv_heads} * shape_.group;
    const int64_t q_row = shape_.head_dim + 8;  // rows apart, so that strides matter
    const size_t bytes = static_cast<size_t>(dtype_bytes(shape_.dtype));
    q_.assign(static_cast<size_t>(num_tokens * num_heads * q_row) * bytes + 64, static_cast<char>(0xff));
    for (int64_t row = 0; row < num_tokens * num_heads; ++row) {
      for (int64_t d = 0; d < shape_.head_dim; ++d) encode_element(shape_.dtype, q_.data(), row * q_row + d, draw());
    }
    out_.resize(static_cast<size_t>(out_count()) * bytes);
    lse.resize(shape_.has_lse ? static_cast<size_t>(num_tokens * num_heads) : 0);
    for (int64_t head = 0; head < num_heads; ++head) {
      sinks_.push_back(draw() * 2);
      slopes_.push_back(std::exp2(-8.0f * static_cast<float>(head + 1) / static_cast<float>(num_heads)));
    }
    params.num_heads = static_cast<int32_t>(num_heads);
    params.q = q_.data();
    params.out = out_.data();
    params.dtype = shape_.dtype;
    params.q_token_stride = num_heads * q_row;
    params.q_head_stride = q_row;
    params.out_token_stride = num_heads * shape_.v_head_dim;
    params.out_head_stride = shape_.v_head_dim;
    params.lse = shape_.has_lse ? lse.data() : nullptr;
    params.lse_token_stride = num_heads;
    params.lse_head_stride = 1;
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    params.is_causal = shape_.is_causal;
    params.window = shape_.window;
    params.softcap = shape_.softcap;
    params.sinks = shape_.has_sinks ? sinks_.data() : nullptr;
    params.alibi_slopes = shape_.has_alibi ? slopes_.data() : nullptr;
  }

  const CaseShape shape_;
  std::mt19937_64 random_;
  std::vector<char> q_, out_;
  std::vector<float> k_, v_, k_scale_, v_scale_, sinks_, slopes_;
  std::vector<int32_t> table_, seq_lens_, cu_seqlens_q_;
  std::vector<int64_t> slots_;
};

// The instruction sets besides the reference that work here.
inline std::vector<const char *> available_isas() {
  std::vector<const char *> isas;
  for (const char *isa : {"scalar", "avx2", "avx512", "avx512bf16", "amx", "neon"}) {
    if (set_host_isa(isa) == PKV_OK) isas.push_back(isa);
  }
  set_host_isa("auto");
  return isas;
}

// Back to the defaults at the end of a test.
struct HostSettings {
  ~HostSettings() {
    set_host_isa("auto");
    set_host_num_threads(0);
  }
};

}  // namespace pkv
