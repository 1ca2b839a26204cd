// The streams of a cache over several devices: one for each device, told apart by content. A set is named by the address
// of its array, which stays as long as the cache: sequences and steps remember it as they do a stream. One mutating
// thread, the cache's.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "pagedkv/pagedkv.h"

namespace pkv {

class StreamSets {
 public:
  explicit StreamSets(size_t num_devices) : num_devices_(num_devices) {}

  // The set equal to streams [num_devices]. Throws std::bad_alloc.
  pkv_stream find_or_add(const pkv_stream *streams) {
    for (const auto &set : sets_) {
      if (std::equal(streams, streams + num_devices_, set.get())) return set.get();
    }
    auto set = std::make_unique<pkv_stream[]>(num_devices_);
    std::copy_n(streams, num_devices_, set.get());
    sets_.push_back(std::move(set));
    return sets_.back().get();
  }

 private:
  const size_t num_devices_;
  std::vector<std::unique_ptr<pkv_stream[]>> sets_;
};

}  // namespace pkv
