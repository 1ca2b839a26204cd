// Steps: prepare and its tables, and discard.
#include "driver.h"

namespace fuzz {
namespace {

struct Table {
  pkv_array array = {};
  Table(pkv_batch *batch, pkv_batch_table table) { REQUIRE(pkv_batch_get_table(batch, table, &array) == PKV_OK); }
  ~Table() { pkv_array_release(&array); }
  Table(const Table &) = delete;
  int64_t at(int64_t row, int64_t column = 0) const {
    REQUIRE(row < array.shape[0] && (array.ndim == 1 || column < array.shape[1]));
    const char *entry = static_cast<const char *>(array.data) + row * array.strides[0] + column * array.strides[1];
    return array.dtype == PKV_INT32 ? *reinterpret_cast<const int32_t *>(entry)
                                    : *reinterpret_cast<const int64_t *>(entry);
  }
};

}  // namespace

// Prepares and, where it is not refused, notes what discard takes back. The model does not know it yet.
pkv_status Driver::prepare_step(int which, const std::vector<Sequence *> &members, const std::vector<int64_t> &counts,
                                const std::vector<int64_t> &told, const pkv_prepare_options &options) {
  const std::vector<pkv_sequence> ids = ids_of(members);
  const pkv_status status =
      pkv_batch_prepare(batches_[which], ids.data(), counts.data(), static_cast<int64_t>(ids.size()), told.data(),
                        static_cast<int64_t>(told.size()), &options);
  if (status != PKV_OK) return status;
  PreparedStep step;
  for (const Sequence *member : members) step.items.push_back({member->id, member->length()});
  step.can_discard = true;
  steps_[which] = step;
  return status;
}

void Driver::prepare() {
  const int which = static_cast<int>(bytes_.take(kNumBatches));
  const std::vector<Sequence *> members = pick_some(limits_.num_per_step);
  std::vector<int64_t> counts, tokens;
  const bool completes_blocks = is_large() && bytes_.take(2) == 0;  // one of each member
  for (size_t i = 0; i < members.size(); ++i) {
    counts.push_back(i == 0 ? take_count(7) : bytes_.take(7));
    if (completes_blocks) counts.back() = setup_.block_size - members[i]->length() % setup_.block_size;
    const std::vector<int64_t> own = take_tokens(counts.back());
    tokens.insert(tokens.end(), own.begin(), own.end());
  }
  const std::vector<int64_t> told = conceal(tokens);
  pkv_prepare_options options = {};
  options.struct_size = sizeof options;
  const int64_t mode = bytes_.take(6);
  options.register_blocks = mode == 0 ? PKV_OFF : PKV_DEFAULT;
  options.pad_sequences = mode == 1 ? limits_.num_per_step : 0;
  options.pad_tokens = mode == 1 ? limits_.tokens_per_step : 0;
  const pkv_status status = prepare_step(which, members, counts, told, options);
  if (status != PKV_OK) return check_shortage(status);
  const bool fails = bytes_.take(5) == 0;
  for (size_t i = 0, next = 0; i < members.size(); next += static_cast<size_t>(counts[i++])) {
    const int64_t first = members[i]->length();
    model_->extend(members[i], {tokens.begin() + next, tokens.begin() + next + counts[i]}, told.data() + next);
    model_->write(*members[i], first, fails);
  }
  check_tables(which, members, counts);
  if (fails) discard_step(which, true);
}

void Driver::check_tables(int which, const std::vector<Sequence *> &members, const std::vector<int64_t> &counts) {
  pkv_batch *batch = batches_[which];
  const int64_t block_size = setup_.block_size;
  pkv_batch_info info = {};
  info.struct_size = sizeof info;
  REQUIRE(pkv_batch_get_info(batch, &info) == PKV_OK);
  const Table table(batch, PKV_BLOCK_TABLE), lengths(batch, PKV_SEQ_LENS), starts(batch, PKV_CU_SEQLENS_Q);
  const Table slots(batch, PKV_SLOT_MAPPING), positions(batch, PKV_POSITIONS), indptr(batch, PKV_INDPTR);
  const Table indices(batch, PKV_INDICES), last_lengths(batch, PKV_LAST_BLOCK_LEN);
  int64_t token = 0, entry = 0;
  for (int64_t i = 0; i < info.num_sequences; ++i) {
    const bool is_padding = i >= static_cast<int64_t>(members.size());
    const std::vector<int32_t> blocks = is_padding ? std::vector<int32_t>() : model_->blocks(*members[i]);
    const int64_t length = is_padding ? 0 : members[i]->length();
    const int64_t num_used = (length + block_size - 1) / block_size;
    REQUIRE(lengths.at(i) == length && starts.at(i) == token && indptr.at(i) == entry);
    REQUIRE(last_lengths.at(i) == (length == 0 ? 0 : (length - 1) % block_size + 1));
    for (int64_t j = 0; j < table.array.shape[1]; ++j) REQUIRE(table.at(i, j) == (j < num_used ? blocks[j] : -1));
    for (int64_t j = 0; j < num_used; ++j) REQUIRE(indices.at(entry++) == blocks[j]);
    for (int64_t position = is_padding ? length : length - counts[i]; position < length; ++position, ++token) {
      REQUIRE(positions.at(token) == position);
      const int64_t block = blocks[position / block_size];
      REQUIRE(slots.at(token) == (block == -1 ? -1 : block * block_size + position % block_size));
    }
  }
  REQUIRE(starts.at(info.num_sequences) == token && indptr.at(info.num_sequences) == entry);
  for (; token < info.num_tokens; ++token) REQUIRE(slots.at(token) == -1 && positions.at(token) == 0);

  // What is shared is shared with a neighbour, and no new token is in it.
  const Table shared(batch, PKV_SHARED_LENS);
  for (int64_t i = 0; i < info.num_sequences; ++i) {
    const int64_t length = shared.at(i), num_blocks = length / block_size;
    if (length == 0) continue;
    REQUIRE(length % block_size == 0 && length <= lengths.at(i) - (starts.at(i + 1) - starts.at(i)));
    bool is_shared = false;
    for (const int64_t other : {i - 1, i + 1}) {
      if (other < 0 || other >= info.num_sequences || shared.at(other) != length) continue;
      int64_t same = 0;
      while (same < num_blocks && table.at(i, same) >= 0 && table.at(i, same) == table.at(other, same)) ++same;
      is_shared = is_shared || same == num_blocks;
    }
    REQUIRE(is_shared);
  }
}

void Driver::discard() { discard_step(static_cast<int>(bytes_.take(kNumBatches + 1)), false); }

void Driver::discard_step(int which, bool must_succeed) {
  PreparedStep &step = steps_[which];
  const pkv_status status = pkv_batch_discard(batches_[which]);
  if (status != PKV_OK) {
    REQUIRE(!must_succeed);
    REQUIRE(status == PKV_INVALID_ARGUMENT || (step.can_discard && status == PKV_BUSY));
    return check_refusal(status);
  }
  REQUIRE(step.can_discard);
  step.can_discard = false;
  if (which == kStepper) end_stepping();
  for (const PreparedStep::Item &item : step.items) {
    for (Sequence &sequence : model_->sequences) {
      if (sequence.id == item.id) sequence.cut(item.old_length);
    }
  }
}

}  // namespace fuzz
