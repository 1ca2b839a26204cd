// explain: one sequence, its blocks and who shares them, in words.
#include <algorithm>

#include "base/checked.h"
#include "base/json.h"
#include "cache/cache.h"

namespace pkv {

Status Cache::explain_sequence(pkv_sequence id, std::string *out) const {
  Sequence *found = nullptr;
  PKV_TRY(find_any(id, &found));
  const Sequence &sequence = *found;
  const int64_t num_used = divide_up(sequence.length, layout_.block_size());
  int64_t num_own = 0, num_shared = 0, num_registered = 0, num_released = 0;
  for (int32_t i = 0; i < sequence.num_blocks; ++i) {
    if (sequence.table[i] < 0) {  // behind the sliding window
      ++num_released;
      continue;
    }
    const BlockRecord &record = blocks_.record(sequence.table[i]);
    ++(record.holders > 1 ? num_shared : num_own);
    num_registered += record.is_registered;
  }
  std::vector<uint32_t> order;
  order_victims(&order);
  const auto place = std::find(order.begin(), order.end(), static_cast<uint32_t>(id)) - order.begin();

  JsonWriter json(out);
  json.begin_object();
  json.key("sequence").value(static_cast<uint64_t>(id));
  json.key("tag").value(sequence.tag);
  json.key("priority").value(int64_t{sequence.priority});
  json.key("namespace").value(sequence.chain.first.id);
  json.key("regions").begin_array();
  for (const Scope &region : sequence.chain.regions) {
    json.begin_object();
    json.key("first_block").value(region.first_block);
    json.key("namespace").value(region.id);
    json.end_object();
  }
  json.end_array();
  json.key("length").value(sequence.length);
  json.key("settled_length").value(sequence.settled_length);
  json.key("num_cached_tokens").value(sequence.num_cached_tokens);
  json.key("num_blocks").value(int64_t{sequence.num_blocks});
  json.key("num_own_blocks").value(num_own);
  json.key("num_shared_blocks").value(num_shared);
  json.key("num_registered_blocks").value(num_registered);
  json.key("num_reserved_blocks").value(sequence.num_blocks - num_used);
  json.key("num_released_blocks").value(num_released);
  json.key("freed_by_close").value(num_own);
  json.key("blocks").begin_array();
  for (int32_t i = 0; i < sequence.num_blocks; ++i) {
    const int32_t block = sequence.table[i];
    json.begin_object();
    json.key("block").value(int64_t{block});
    if (block >= 0) {
      const BlockRecord &record = blocks_.record(block);
      json.key("num_holders").value(int64_t{record.holders});
      json.key("is_registered").value(record.is_registered);
      json.key("is_reserved").value(i >= num_used);
    }
    json.end_object();
  }
  json.end_array();
  json.key("victim_order").value(int64_t{place});
  json.key("num_sequences").value(static_cast<int64_t>(order.size()));
  json.key("is_offloaded").value(sequence.is_offloaded);
  json.key("why").value(sequence.is_offloaded ? "offloaded: its blocks are in the host tier, restore() brings them back"
                        : num_own == 0 ? "closing it frees nothing: all of its blocks are shared, or it has none"
                        : place == 0 ? "the first victim"
                                     : "others are victims before it: of a lower priority, or first by the policy");
  json.end_object();
  return PKV_OK;
}

}  // namespace pkv
