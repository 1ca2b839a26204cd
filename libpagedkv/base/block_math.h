// Token positions in blocks: divisions by the block size, which is nearly always a power of two. Positions are not
// negative.
#pragma once

#include <cstdint>

namespace pkv {

class BlockMath {
 public:
  explicit BlockMath(int32_t block_size)
      : size_(block_size), shift_((block_size & (block_size - 1)) == 0 ? __builtin_ctz(block_size) : -1) {}

  int64_t index_of(int64_t position) const { return shift_ >= 0 ? position >> shift_ : position / size_; }
  int64_t offset_of(int64_t position) const { return shift_ >= 0 ? position & (size_ - 1) : position % size_; }
  int64_t count_blocks(int64_t num_tokens) const { return index_of(num_tokens + size_ - 1); }

 private:
  int64_t size_;
  int32_t shift_;
};

}  // namespace pkv
