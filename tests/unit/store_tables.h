// What a device does with an upload of tables, for backends of tests.
#pragma once

#include <algorithm>

#include "backend/params.h"

namespace pkv {

template <class T>
void store_array(T *to, const T *from, int64_t count) {
  if (count > 0) std::copy_n(from, count, to);
}

inline void store_tables(const UploadTablesParams &p) {
  store_array(p.to_seq_lens, p.seq_lens, p.num_seq_lens);
  store_array(p.to_cu_seqlens_q, p.cu_seqlens_q, p.num_cu_seqlens_q);
  store_array(p.to_step_limits, p.step_limits, p.num_step_limits);
  store_array(p.to_prefix_lens, p.prefix_lens, p.num_prefix_lens);
  store_array(p.to_prefixes, p.prefixes, p.num_prefixes);
  if (p.to_num_refused != nullptr) *p.to_num_refused = 0;
  for (int64_t i = 0; i < p.num_changes; ++i) p.to_block_table[p.change_indices[i]] = p.change_values[i];
  int64_t token = 0;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    for (; token < std::min<int64_t>(p.to_cu_seqlens_q[s + 1], p.num_tokens); ++token) {
      const int64_t position = p.to_seq_lens[s] - (p.to_cu_seqlens_q[s + 1] - token);
      const int64_t block = p.to_block_table[s * p.table_stride + position / p.block_size];
      p.to_slot_mapping[token] = block * p.block_size + position % p.block_size;
      p.to_positions[token] = position;
    }
  }
  for (; token < p.num_tokens; ++token) p.to_slot_mapping[token] = -1, p.to_positions[token] = 0;
}

}  // namespace pkv
