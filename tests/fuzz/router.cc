#include "router.h"

#include <algorithm>

namespace fuzz {

void Router::apply(const pkv_event &event) {
  REQUIRE(event.serial >= next_serial_);
  if (event.serial != next_serial_) is_lost_ = true;
  next_serial_ = event.serial + 1;
  Hash hash;
  std::copy_n(event.hash, hash.size(), hash.begin());
  const bool is_known = places_.count(hash) != 0;
  switch (event.kind) {
    case PKV_EVENT_STORED:
      REQUIRE(is_lost_ || !is_known);
      places_[hash] = {event.namespace_id, event.block};
      break;
    case PKV_EVENT_REMOVED:
      REQUIRE(is_lost_ || (is_known && places_[hash].block == event.block));
      places_.erase(hash);
      break;
    case PKV_EVENT_MOVED:
      REQUIRE(is_lost_ || (is_known && places_[hash].block != event.block));
      places_[hash] = {event.namespace_id, event.block};
      break;
    default:
      REQUIRE(event.kind == PKV_EVENT_CLEARED && (event.block == -1 || event.block == -2));
      if (event.block == -2) {
        places_.clear();
        is_lost_ = false;
        break;
      }
      for (auto place = places_.begin(); place != places_.end();) {
        place = place->second.namespace_id == event.namespace_id ? places_.erase(place) : std::next(place);
      }
  }
}

std::vector<int32_t> Router::find(const Model &model, const Prompt &prompt, int64_t block_size) const {
  std::vector<int32_t> found;
  Hash hash = {};
  for (int64_t end = block_size; end < static_cast<int64_t>(prompt.tokens.size()); end += block_size) {
    std::vector<Scope> scopes = model.scopes_of(prompt, end / block_size - 1);
    const uint64_t own = scopes.back().id;
    scopes.pop_back();
    const auto extend = [&](uint64_t namespace_id, const int64_t *tokens, int64_t num_tokens) {
      const Hash parent = hash;
      REQUIRE(pkv_block_hash(parent.data(), namespace_id, tokens, num_tokens, hash.data()) == PKV_OK);
    };
    for (const Scope &scope : scopes) extend(scope.id, nullptr, 0);
    extend(own, &prompt.tokens[end - block_size], block_size);
    const auto place = places_.find(hash);
    if (place == places_.end()) break;
    found.push_back(place->second.block);
  }
  return found;
}

}  // namespace fuzz
