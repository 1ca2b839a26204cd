// Deadlines of pins and hints, the nearest first. What was ended before its time is taken out when its turn comes, or when
// half of them have become such. Not thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace pkv {

using Clock = std::chrono::steady_clock;

struct Deadline {
  Clock::time_point time;
  uint32_t index;
  uint32_t generation;
  bool is_pin;
};

class Deadlines {
 public:
  bool is_empty() const { return heap_.empty(); }
  // Room for one more. Throws std::bad_alloc.
  void reserve_one() {
    if (heap_.size() == heap_.capacity()) heap_.reserve(2 * heap_.size() + 16);
  }
  void push(const Deadline &deadline) {
    heap_.push_back(deadline);
    std::push_heap(heap_.begin(), heap_.end(), is_later);
  }
  // The first one that is over at `now`, if there is one.
  bool pop(Clock::time_point now, Deadline *out) {
    if (heap_.empty() || heap_.front().time > now) return false;
    *out = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), is_later);
    heap_.pop_back();
    return true;
  }
  // is_ended(deadline) says of each whether it means nothing any more.
  template <class IsEnded>
  void note_ended(IsEnded is_ended) {
    if (++num_ended_ <= 16 + heap_.size() / 2) return;
    heap_.erase(std::remove_if(heap_.begin(), heap_.end(), is_ended), heap_.end());
    std::make_heap(heap_.begin(), heap_.end(), is_later);
    num_ended_ = 0;
  }
  void clear() { heap_.clear(); }

  // now + milliseconds, which is positive; the end of time where that would overflow.
  static Clock::time_point after(Clock::time_point now, int64_t milliseconds) {
    const auto most = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - now);
    return milliseconds >= most.count() ? Clock::time_point::max() : now + std::chrono::milliseconds(milliseconds);
  }

 private:
  static bool is_later(const Deadline &first, const Deadline &second) { return first.time > second.time; }

  std::vector<Deadline> heap_;
  size_t num_ended_ = 0;
};

}  // namespace pkv
