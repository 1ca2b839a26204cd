// What a router knows from a cache's events: the blocks that can be hit, by their public hashes.
#pragma once

#include <array>
#include <map>

#include "model.h"

namespace fuzz {

class Router {
 public:
  // num_events: made so far. The last ones may have been dropped.
  bool is_current(uint64_t num_events) const { return !is_lost_ && next_serial_ == num_events + 1; }
  void apply(const pkv_event &event);
  // The blocks that hold the tokens of a prompt, as far as an open takes full ones.
  std::vector<int32_t> find(const Model &model, const Prompt &prompt, int64_t block_size) const;

 private:
  using Hash = std::array<uint8_t, 32>;
  struct Place {
    uint64_t namespace_id;
    int32_t block;
  };
  std::map<Hash, Place> places_;
  uint64_t next_serial_ = 1;
  bool is_lost_ = false;  // events were dropped: nothing is known until the whole cache is cleared
};

}  // namespace fuzz
