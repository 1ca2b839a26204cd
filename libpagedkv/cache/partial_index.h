// Candidates for a hit inside a block: registered blocks by the hash of their parent and their first token.
//
// Lists of blocks, the latest first, in buckets. A block stays in its list until it is registered again, so what a list
// gives may be of another parent, or not registered any more: who asks must check. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "base/hash.h"

namespace pkv {

class PartialIndex {
 public:
  // Throws std::bad_alloc.
  PartialIndex(int64_t num_blocks, int64_t max_num_blocks) {
    links_.reserve(static_cast<size_t>(max_num_blocks));
    links_.resize(static_cast<size_t>(num_blocks));
    size_t size = 2;
    while (size < static_cast<size_t>(max_num_blocks)) size *= 2;
    heads_.assign(size, kNone);
  }

  // Up to max_num_blocks; blocks beyond go.
  void resize(int64_t num_blocks) {
    for (size_t block = static_cast<size_t>(num_blocks); block < links_.size(); ++block) {
      remove(static_cast<int32_t>(block));
    }
    links_.resize(static_cast<size_t>(num_blocks));
  }

  // `to` stands where `from` did.
  void move(int32_t from, int32_t to) {
    remove(to);
    Link &link = links_[from];
    if (!link.is_listed) return;
    (link.previous == kNone ? heads_[link.bucket] : links_[link.previous].next) = to;
    if (link.next != kNone) links_[link.next].previous = to;
    links_[to] = link;
    link = Link();
  }

  // Audit: whether the lists are whole.
  bool validate() const {
    size_t num_listed = 0, num_seen = 0;
    for (const Link &link : links_) num_listed += link.is_listed;
    for (size_t bucket = 0; bucket < heads_.size(); ++bucket) {
      int32_t previous = kNone;
      for (int32_t block = heads_[bucket]; block != kNone; previous = block, block = links_[block].next) {
        if (static_cast<size_t>(block) >= links_.size() || ++num_seen > num_listed) return false;
        const Link &link = links_[block];
        if (!link.is_listed || link.bucket != bucket || link.previous != previous) return false;
      }
    }
    return num_seen == num_listed;
  }

  void insert(const Hash128 &parent, int64_t first_token, int32_t block) {
    Link &link = links_[block];
    remove(block);
    const uint32_t bucket = find_bucket(parent, first_token);
    link = {kNone, heads_[bucket], bucket, true};
    if (link.next != kNone) links_[link.next].previous = block;
    heads_[bucket] = block;
  }

  // Blocks that may be children of `parent` and start with first_token: the first, then next(block); -1 ends them.
  int32_t first(const Hash128 &parent, int64_t first_token) const { return heads_[find_bucket(parent, first_token)]; }
  int32_t next(int32_t block) const { return links_[block].next; }

 private:
  static constexpr int32_t kNone = -1;

  struct Link {
    int32_t previous = kNone, next = kNone;
    uint32_t bucket = 0;
    bool is_listed = false;
  };

  void remove(int32_t block) {
    Link &link = links_[block];
    if (!link.is_listed) return;
    (link.previous == kNone ? heads_[link.bucket] : links_[link.previous].next) = link.next;
    if (link.next != kNone) links_[link.next].previous = link.previous;
    link.is_listed = false;
  }

  uint32_t find_bucket(const Hash128 &parent, int64_t first_token) const {
    // parent is a keyed hash already; the multiplication spreads neighbouring tokens.
    uint64_t mixed = parent.low ^ (static_cast<uint64_t>(first_token) * 0x9e3779b97f4a7c15u);
    mixed ^= mixed >> 32;
    return static_cast<uint32_t>(mixed & (heads_.size() - 1));
  }

  std::vector<int32_t> heads_;
  std::vector<Link> links_;  // [num_blocks], capacity max_num_blocks
};

}  // namespace pkv
