#include "backend/host/advance_steps.h"

namespace pkv {
void advance_host_steps(const AdvanceParams &p) {
  for (int64_t i = 0; i < p.num_sequences; ++i) {
    if (p.step_limits[i] < 0) continue;
    const int32_t length = p.seq_lens[i];
    const bool wants_more = is_active_on_host(p, i);
    if (wants_more && length < p.step_limits[i]) {
      const int64_t block = p.block_table[i * p.table_stride + length / p.block_size];
      p.slot_mapping[i] = block * p.block_size + length % p.block_size;
      p.positions[i] = length;
      p.seq_lens[i] = length + 1;
    } else {
      p.slot_mapping[i] = -1;
      *p.num_refused += wants_more;
    }
  }
}

}  // namespace pkv
