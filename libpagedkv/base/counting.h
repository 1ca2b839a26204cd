// Tables of consecutive numbers, which every step fills for all its new tokens: by wide vectors where the processor has
// them.
#pragma once

#include <cstdint>

namespace pkv {

// first, first + 1, ... to: [count]
void fill_counting(int64_t first, int64_t count, int64_t *to);

// The slots of whole blocks. to: [count, block_size]
void fill_slots(const int32_t *blocks, int64_t count, int32_t block_size, int64_t *to);

}  // namespace pkv
