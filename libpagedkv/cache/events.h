// What becomes findable and what does not any more, told to a reader outside. Exists only where events are on: it keeps
// the public hash of every hashed block, which nothing else needs. The cache names a block before it gives it a hash;
// the block store tells what happens to it. The cache's mutating thread, but for ring().
#pragma once

#include <vector>

#include "base/public_hash.h"
#include "cache/event_ring.h"

namespace pkv {

class EventLog {
 public:
  // Throws std::bad_alloc.
  EventLog(int64_t capacity, int64_t num_blocks, int64_t max_num_blocks);

  // Up to max_num_blocks. Blocks that go have nothing to tell any more.
  void resize(int64_t num_blocks) { hashes_.resize(static_cast<size_t>(num_blocks)); }
  // The name of a block goes along with its content.
  void copy_name(int32_t from, int32_t to) { hashes_[to] = hashes_[from]; }

  // Finds the public hash of a full block that is about to be hashed: begin with the block before it, which was named,
  // or a negative one; pass the namespaces that end inside it; end with its own. tokens: [num_tokens]
  void begin_name(int32_t parent);
  void pass_namespace(uint64_t namespace_id);
  void end_name(int32_t block, uint64_t namespace_id, const int64_t *tokens, int64_t num_tokens);

  // Of the block named last.
  void tell_stored(int32_t block, uint64_t namespace_id);
  void tell_removed(int32_t block, uint64_t namespace_id);
  // Found in `block` now, which was named with the same content.
  void tell_moved(int32_t block, uint64_t namespace_id);
  // Everything; what is removed until resume() goes without saying.
  void tell_all_cleared();
  void tell_namespace_cleared(uint64_t namespace_id);
  void resume() { is_silent_ = false; }

  EventRing &ring() { return ring_; }

 private:
  void push(pkv_event_kind kind, int32_t block, uint64_t namespace_id, const PublicHash &hash,
            const PublicHash &parent);

  EventRing ring_;
  std::vector<PublicHash> hashes_;  // [num_blocks], capacity max_num_blocks
  PublicHash last_parent_ = {};  // of the block named last
  PublicHash extended_ = {};  // what its hash extends: the same, but for namespaces that it passes
  bool is_silent_ = false;
};

}  // namespace pkv
