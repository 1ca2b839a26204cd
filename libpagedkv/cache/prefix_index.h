// From the hash of a block to the registered blocks that have it: an open-addressing table of cache lines.
//
// A line holds ten blocks with 16 bits of their hash each, so that a look-up of a hash that is not there reads one line
// and no record, and one that is there reads the line and the record. A block that finds its line full goes into the
// next one; each line counts how many blocks passed it on their way, and a look-up ends at a line that none passed.
// Deletion clears one slot and takes the block out of those counts: nothing is moved, there are no tombstones, and no
// other block is looked at. A line can be prefetched as soon as the hash is known.
//
// Allocates at construction alone.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/hash.h"
#include "base/large_array.h"

namespace pkv {

class PrefixIndex {
 public:
  // For up to num_blocks entries. Throws std::bad_alloc.
  explicit PrefixIndex(int64_t num_blocks) : lines_(num_blocks / kMeanFill + 1) {
    for (int64_t i = 0; i < lines_.size(); ++i) lines_[i] = Line();
  }

  void prefetch(const Hash128 &hash) const { __builtin_prefetch(&lines_[home(hash)], 1); }

  // The first entry with (the kept bits of) the hash that is_match(block) accepts, or -1.
  template <class IsMatch>
  int32_t find(const Hash128 &hash, IsMatch is_match) const {
    const uint16_t tag = tag_of(hash);
    int64_t i = home(hash);
    for (int64_t visited = 0; visited < lines_.size(); ++visited) {
      const Line &line = lines_[i];
      for (uint32_t slots = find_tag(line, tag); slots != 0; slots &= slots - 1) {
        const int32_t block = line.blocks[__builtin_ctz(slots)];
        if (is_match(block)) return block;
      }
      if (line.num_passed == 0) break;
      i = following(i);
    }
    return -1;
  }

  // The block must not be there. There is room for num_blocks of them.
  void insert(const Hash128 &hash, int32_t block) {
    int64_t i = home(hash);
    uint32_t slots;
    while ((slots = find_tag(lines_[i], 0)) == 0) {
      ++lines_[i].num_passed;
      i = following(i);
    }
    fill(&lines_[i], __builtin_ctz(slots), hash, block);
  }

  // insert(), if one look at one line shows that there is nothing with this hash and that there is room: nearly always.
  bool insert_if_new(const Hash128 &hash, int32_t block) {
    Line &line = lines_[home(hash)];
    const uint16_t tag = tag_of(hash);
    const uint32_t free_slots = find_tag(line, 0);
    if (line.num_passed != 0 || free_slots == 0 || find_tag(line, tag) != 0) return false;
    const int slot = __builtin_ctz(free_slots);
    line.blocks[slot] = block;
    line.tags[slot] = tag;
    return true;
  }

  // The block must be there.
  void erase(const Hash128 &hash, int32_t block) {
    const uint16_t tag = tag_of(hash);
    for (int64_t i = home(hash);; i = following(i)) {
      Line &line = lines_[i];
      for (uint32_t slots = find_tag(line, tag); slots != 0; slots &= slots - 1) {
        const int slot = __builtin_ctz(slots);
        if (line.blocks[slot] != block) continue;
        line.tags[slot] = 0;
        return;
      }
      --line.num_passed;
    }
  }

  // Audit: true if it holds num_entries blocks, each where its hash leads. hash_of(block) gives the hash.
  template <class HashOf>
  bool validate(int64_t num_entries, HashOf hash_of) const {
    LargeArray<uint32_t> passed(lines_.size());
    for (int64_t i = 0; i < lines_.size(); ++i) passed[i] = 0;
    int64_t num_found = 0;
    for (int64_t i = 0; i < lines_.size(); ++i) {
      for (int slot = 0; slot < kSlots; ++slot) {
        if (lines_[i].tags[slot] == 0) continue;
        const Hash128 hash = hash_of(lines_[i].blocks[slot]);
        if (lines_[i].tags[slot] != tag_of(hash)) return false;
        for (int64_t j = home(hash); j != i; j = following(j)) ++passed[j];
        ++num_found;
      }
    }
    for (int64_t i = 0; i < lines_.size(); ++i) {
      if (passed[i] != lines_[i].num_passed) return false;
    }
    return num_found == num_entries;
  }

 private:
  static constexpr int kSlots = 10;
  static constexpr int64_t kMeanFill = 4;  // when every block is registered: one line in 350 overflows
  struct alignas(64) Line {
    int32_t blocks[kSlots] = {};
    uint32_t num_passed = 0;
    uint16_t tags[kSlots] = {};  // 0: free
  };
  static_assert(sizeof(Line) == 64, "a line is a cache line");

  static void fill(Line *line, int slot, const Hash128 &hash, int32_t block) {
    line->blocks[slot] = block;
    line->tags[slot] = tag_of(hash);
  }
  int64_t home(const Hash128 &hash) const {
    return static_cast<int64_t>((static_cast<uint128_t>(hash.low) * static_cast<uint64_t>(lines_.size())) >> 64);
  }
  int64_t following(int64_t line) const { return line + 1 < lines_.size() ? line + 1 : 0; }
  static uint16_t tag_of(const Hash128 &hash) {
    const uint16_t tag = static_cast<uint16_t>(hash.high >> 48);
    return tag == 0 ? 1 : tag;
  }

  // The slots with this tag, as bits.
  static uint32_t find_tag(const Line &line, uint16_t tag) {
#if defined(__SSE2__)
    const __m128i wanted = _mm_set1_epi16(static_cast<int16_t>(tag));
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i *>(line.tags));  // slots 0 to 7
    const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i *>(line.tags + 2));  // slots 2 to 9
    const uint32_t bits = static_cast<uint32_t>(
        _mm_movemask_epi8(_mm_packs_epi16(_mm_cmpeq_epi16(first, wanted), _mm_cmpeq_epi16(last, wanted))));
    return (bits & 0xff) | ((bits >> 6) & 0x300);
#else
    uint32_t bits = 0;
    for (int slot = 0; slot < kSlots; ++slot) bits |= static_cast<uint32_t>(line.tags[slot] == tag) << slot;
    return bits;
#endif
  }

  LargeArray<Line> lines_;
};

}  // namespace pkv
