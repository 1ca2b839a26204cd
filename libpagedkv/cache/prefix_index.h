// From the hash of a block to the registered blocks that have it: an open-addressing table of cache lines.
//
// A line holds ten blocks with 16 bits of their hash each, so that a look-up of a hash that is not there reads one line
// and no record, and one that is there reads the line and the record. Which line it is, the high bits of `low` say: the
// two blocks of a pair (base/hash.h) have one between them, so that a chain reads, writes and evicts half as many lines as
// it has blocks. A block that finds its line full goes into the line beside it, then to where the rest of `low` leads,
// which no other block shares, and on from there; each line counts how many blocks passed it on their way, and a look-up
// ends at a line that none passed. So it stays short however many blocks extend one parent. Deletion clears one slot and
// takes the block out of those counts: nothing is moved, there are no tombstones, and no other block is looked at. A line
// can be prefetched as soon as the hash is known.
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
  explicit PrefixIndex(int64_t num_blocks) : lines_(num_blocks / kPairFill * 2 + 2) {
    for (int64_t i = 0; i < lines_.size(); ++i) lines_[i] = Line();
  }

  // Whether two hashes lead to one line, as those of a pair do.
  static bool is_pair(const Hash128 &a, const Hash128 &b) { return ((a.low ^ b.low) >> 32) == 0; }

  void prefetch(const Hash128 &hash) const { __builtin_prefetch(&lines_[home(hash)], 1); }

  // The first entry with (the kept bits of) the hash that is_match(block) accepts, or -1.
  template <class IsMatch>
  int32_t find(const Hash128 &hash, IsMatch is_match) const {
    const uint16_t tag = tag_of(hash);
    int64_t i = home(hash);
    for (int64_t visited = 0; visited < lines_.size() + 2; ++visited) {
      const Line &line = lines_[i];
      for (uint32_t slots = find_tag(line, tag); slots != 0; slots &= slots - 1) {
        const int32_t block = line.blocks[__builtin_ctz(slots)];
        if (is_match(block)) return block;
      }
      if (line.num_passed == 0) break;
      i = next_line(hash, i, visited);
    }
    return -1;
  }

  // The block must not be there. There is room for num_blocks of them.
  void insert(const Hash128 &hash, int32_t block) {
    int64_t i = home(hash);
    uint32_t slots;
    for (int64_t visited = 0; (slots = find_tag(lines_[i], 0)) == 0; ++visited) {
      ++lines_[i].num_passed;
      i = next_line(hash, i, visited);
    }
    fill(&lines_[i], __builtin_ctz(slots), hash, block);
  }

  // insert(), if one look at one line shows that there is nothing with this hash and that there is room: nearly always.
  bool insert_if_new(const Hash128 &hash, int32_t block) {
    Line &line = lines_[home(hash)];
    const Tags tags(line);
    const uint32_t free_slots = tags.find(0);
    if (line.num_passed != 0 || free_slots == 0 || tags.find(tag_of(hash)) != 0) return false;
    fill(&line, __builtin_ctz(free_slots), hash, block);
    return true;
  }
  // The same for both of a pair.
  bool insert_pair_if_new(const Hash128 *hashes, const int32_t *blocks) {
    Line &line = lines_[home(hashes[0])];
    const Tags tags(line);
    const uint32_t free_slots = tags.find(0), others = free_slots & (free_slots - 1);
    if (line.num_passed != 0 || others == 0 || tags.has_either(tag_of(hashes[0]), tag_of(hashes[1]))) return false;
    fill(&line, __builtin_ctz(free_slots), hashes[0], blocks[0]);
    fill(&line, __builtin_ctz(others), hashes[1], blocks[1]);
    return true;
  }

  // The block must be there.
  void erase(const Hash128 &hash, int32_t block) {
    const uint16_t tag = tag_of(hash);
    for (int64_t i = home(hash), visited = 0;; i = next_line(hash, i, visited++)) {
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

  // erase() of each; those of a pair, if they follow each other, by one look. hash_of(block) gives the hash.
  template <class HashOf>
  void erase_run(const int32_t *blocks, int64_t count, HashOf hash_of) {
    for (int64_t i = 0; i < count;) {
      const Hash128 &first = hash_of(blocks[i]);
      Line &line = lines_[home(first)];
      const Tags tags(line);
      do {
        const Hash128 &hash = hash_of(blocks[i]);
        if (!is_pair(hash, first)) break;
        uint32_t slots = tags.find(tag_of(hash));
        while (slots != 0 && line.blocks[__builtin_ctz(slots)] != blocks[i]) slots &= slots - 1;
        if (slots != 0) {
          line.tags[__builtin_ctz(slots)] = 0;
        } else {
          erase(hash, blocks[i]);
        }
      } while (++i < count);
    }
  }

  // The entry `from`, which must be there, becomes `to`.
  void replace(const Hash128 &hash, int32_t from, int32_t to) {
    const uint16_t tag = tag_of(hash);
    for (int64_t i = home(hash), visited = 0;; i = next_line(hash, i, visited++)) {
      Line &line = lines_[i];
      for (uint32_t slots = find_tag(line, tag); slots != 0; slots &= slots - 1) {
        int32_t &block = line.blocks[__builtin_ctz(slots)];
        if (block != from) continue;
        block = to;
        return;
      }
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
        int64_t j = home(hash);
        for (int64_t visited = 0; j != i; ++visited) {
          ++passed[j];
          j = next_line(hash, j, visited);
        }
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
  static constexpr int64_t kPairFill = 5;  // of two lines side by side, when every block is registered: then one block in
                                           // 70 does not find its line with room and never passed, one in 800 not both
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
    return static_cast<int64_t>(((hash.low >> 32) * static_cast<uint64_t>(lines_.size())) >> 32);
  }
  int64_t own_home(const Hash128 &hash) const {
    return static_cast<int64_t>(((hash.low & 0xffffffffu) * static_cast<uint64_t>(lines_.size())) >> 32);
  }
  // After `visited` lines that were left before it.
  int64_t next_line(const Hash128 &hash, int64_t line, int64_t visited) const {
    if (visited == 0) return line ^ 1;
    if (visited == 1) return own_home(hash);
    return line + 1 < lines_.size() ? line + 1 : 0;
  }
  static uint16_t tag_of(const Hash128 &hash) {
    const uint16_t tag = static_cast<uint16_t>(hash.high >> 48);
    return tag == 0 ? 1 : tag;
  }

  // The tags of a line as they were when it was looked at: a tag that was just stored is slow to load as part of many.
  struct Tags {
#if defined(__SSE2__)
    explicit Tags(const Line &line)
        : first(_mm_loadu_si128(reinterpret_cast<const __m128i *>(line.tags))),
          last(_mm_loadu_si128(reinterpret_cast<const __m128i *>(line.tags + 2))) {}
    // The slots with this tag, as bits.
    uint32_t find(uint16_t tag) const {
      const __m128i wanted = _mm_set1_epi16(static_cast<int16_t>(tag));
      const uint32_t bits = static_cast<uint32_t>(
          _mm_movemask_epi8(_mm_packs_epi16(_mm_cmpeq_epi16(first, wanted), _mm_cmpeq_epi16(last, wanted))));
      return (bits & 0xff) | ((bits >> 6) & 0x300);
    }
    bool has_either(uint16_t tag, uint16_t other) const {
      const __m128i wanted = _mm_set1_epi16(static_cast<int16_t>(tag)), also = _mm_set1_epi16(static_cast<int16_t>(other));
      return _mm_movemask_epi8(
                 _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi16(first, wanted), _mm_cmpeq_epi16(last, wanted)),
                              _mm_or_si128(_mm_cmpeq_epi16(first, also), _mm_cmpeq_epi16(last, also)))) != 0;
    }
    const __m128i first, last;  // slots 0 to 7, 2 to 9
#else
    explicit Tags(const Line &line) : line(line) {}
    uint32_t find(uint16_t tag) const {
      uint32_t bits = 0;
      for (int slot = 0; slot < kSlots; ++slot) bits |= static_cast<uint32_t>(line.tags[slot] == tag) << slot;
      return bits;
    }
    bool has_either(uint16_t tag, uint16_t other) const { return (find(tag) | find(other)) != 0; }
    const Line &line;
#endif
  };
  static uint32_t find_tag(const Line &line, uint16_t tag) { return Tags(line).find(tag); }

  LargeArray<Line> lines_;
};

}  // namespace pkv
