// Calls that move rows: acceptance of drafts, context shift.
#include <algorithm>

#include "driver.h"

namespace fuzz {
namespace {

// Drafts of one sequence: nodes of a tree, each behind its parent (-1: the sequence's last token).
struct Drafts {
  Sequence *sequence;
  int64_t base;
  std::vector<int64_t> parents, depths, kept;
};

// NEVER_FITS: into a quota.
bool is_shortage(pkv_status status) { return status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS; }

}  // namespace

// A step appends a token tree to each of some sequences, and a path of each is kept. In between some are forked, so that
// rows move into blocks that are shared.
void Driver::accept() {
  const int which = static_cast<int>(bytes_.take(kNumBatches));
  std::vector<Drafts> all;
  std::vector<int64_t> counts, tokens;
  const std::vector<Sequence *> members = pick_some(3);
  for (Sequence *member : members) {
    Drafts drafts = {member, member->length(), {}, {}, {}};
    counts.push_back(bytes_.take(7));
    for (int64_t i = 0; i < counts.back(); ++i) {
      drafts.parents.push_back(bytes_.take(i + 1) - 1);
      drafts.depths.push_back(drafts.parents[i] < 0 ? 0 : drafts.depths[drafts.parents[i]] + 1);
    }
    for (int64_t node = bytes_.take(counts.back() + 1) - 1; node >= 0; node = drafts.parents[node]) {
      drafts.kept.insert(drafts.kept.begin(), node);
    }
    const std::vector<int64_t> own = take_tokens(counts.back());
    tokens.insert(tokens.end(), own.begin(), own.end());
    all.push_back(drafts);
  }
  const std::vector<int64_t> told = conceal(tokens);
  pkv_prepare_options options = {};
  options.struct_size = sizeof options;
  options.register_blocks = PKV_OFF;
  const pkv_status prepared = prepare_step(which, members, counts, told, options);
  if (prepared != PKV_OK) return check_shortage(prepared);
  size_t next = 0;
  for (const Drafts &drafts : all) {
    Sequence *sequence = drafts.sequence;
    for (size_t i = 0; i < drafts.parents.size(); ++i, ++next) {
      const int64_t previous = drafts.parents[i] < 0 ? drafts.base - 1 : drafts.base + drafts.parents[i];
      sequence->rows.push_back(model_->make_row(*sequence, drafts.base + drafts.depths[i],
                                                previous < 0 ? 0 : sequence->rows[previous], tokens[next]));
      sequence->tokens.push_back(tokens[next]);
      sequence->was_told.push_back(told[next] != -1);
    }
    model_->write(*sequence, drafts.base);
  }
  std::vector<Sequence> forks;
  for (const Drafts &drafts : all) {
    if (!bytes_.take_one_in(3)) continue;
    forks.push_back(*drafts.sequence);
    REQUIRE(pkv_sequence_fork(cache_, drafts.sequence->id, -1, &forks.back().id) == PKV_OK);
  }
  const size_t num_before = model_->sequences.size();
  std::vector<pkv_sequence> ids = ids_of(members);
  std::vector<int64_t> num_kept, kept;
  for (const Drafts &drafts : all) {
    num_kept.push_back(static_cast<int64_t>(drafts.kept.size()));
    kept.insert(kept.end(), drafts.kept.begin(), drafts.kept.end());
  }
  before_ = model_->stats();
  bool is_bad = spoil(&ids);
  if (!kept.empty() && bytes_.take_one_in(8)) {
    is_bad = true;
    kept.back() = bytes_.take(2) == 0 ? -1 : 7;
  }
  const pkv_status status = pkv_sequences_accept(cache_, ids.data(), counts.data(), num_kept.data(),
                                                 static_cast<int64_t>(ids.size()), kept.data(),
                                                 static_cast<int64_t>(kept.size()), nullptr);
  if (status != PKV_OK) {
    REQUIRE(is_bad || is_shortage(status) || (status == PKV_INVALID_ARGUMENT && setup_.window > 0));
    check_refusal(status);
  } else {
    REQUIRE(!is_bad);
  }
  for (const Drafts &drafts : all) {
    Sequence *sequence = drafts.sequence;
    if (status == PKV_OK) {
      const Sequence before = *sequence;
      sequence->cut(drafts.base);
      sequence->num_exact = before.num_exact;
      for (const int64_t node : drafts.kept) {
        sequence->tokens.push_back(before.tokens[drafts.base + node]);
        sequence->was_told.push_back(before.was_told[drafts.base + node]);
        sequence->rows.push_back(before.rows[drafts.base + node]);
      }
      if (sequence->length() <= sequence->num_exact) sequence->num_exact = INT64_MAX;
    }
  }
  // The forks have what they had.
  model_->sequences.insert(model_->sequences.end(), forks.begin(), forks.end());
  read_events();
  model_->check();
  model_->sequences.resize(num_before);
  for (const Sequence &fork : forks) REQUIRE(pkv_sequence_close(cache_, fork.id, nullptr) == PKV_OK);
  if (status == PKV_OK) return;
  for (const Drafts &drafts : all) {  // none is kept
    REQUIRE(pkv_sequence_truncate(cache_, drafts.sequence->id, drafts.base) == PKV_OK);
    drafts.sequence->cut(drafts.base);
  }
}

void Driver::shift() {
  if (!has_sequences()) return open();
  Sequence &sequence = pick();
  const int64_t start = bytes_.take(sequence.length() + 1), count = bytes_.take(sequence.length() - start + 1);
  const bool is_bad = bytes_.take_one_in(8);
  const pkv_status status =
      pkv_sequence_shift(cache_, sequence.id, start, is_bad ? sequence.length() - start + 1 : count, nullptr);
  if (status != PKV_OK) {
    REQUIRE(status == PKV_UNSUPPORTED ? !setup_.has_rope
                                      : is_bad || is_shortage(status) || may_refuse_cut(sequence, status));
    return check_refusal(status);
  }
  REQUIRE(!is_bad);
  if (count == 0) return;
  const int64_t length = sequence.length() - count;
  const auto drop = [&](auto *list) { list->erase(list->begin() + start, list->begin() + start + count); };
  drop(&sequence.tokens);
  drop(&sequence.was_told);
  drop(&sequence.rows);
  if (start < length) {
    sequence.num_exact = std::min(sequence.num_exact, start);
  } else {
    sequence.cut(length);
  }
}

}  // namespace fuzz
