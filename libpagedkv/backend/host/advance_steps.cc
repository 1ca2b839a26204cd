#include "backend/host/advance_steps.h"

namespace pkv {
namespace {

bool is_active(const AdvanceParams &p, int64_t index) {
  if (p.is_active == nullptr) return true;
  return p.is_active_wide ? static_cast<const int32_t *>(p.is_active)[index] != 0
                          : static_cast<const uint8_t *>(p.is_active)[index] != 0;
}

}  // namespace

void advance_host_steps(const AdvanceParams &p) {
  for (int64_t i = 0; i < p.num_sequences; ++i) {
    if (p.step_limits[i] < 0) continue;
    const int32_t length = p.seq_lens[i];
    const bool wants_more = is_active(p, i);
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
