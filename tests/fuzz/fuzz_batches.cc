// Calls for many sequences: as those for one in the order of the arrays, all or none.
#include <algorithm>

#include "driver.h"

namespace fuzz {

bool Driver::spoil(std::vector<pkv_sequence> *ids) {
  if (ids->empty() || !bytes_.take_one_in(8)) return false;
  const size_t index = static_cast<size_t>(bytes_.take(static_cast<int64_t>(ids->size())));
  if (ids->size() > 1 && bytes_.take(2) == 0) {
    (*ids)[index] = (*ids)[(index + 1) % ids->size()];  // twice
  } else {
    (*ids)[index] += uint64_t{1} << 40;  // of another generation
  }
  return true;
}

void Driver::open_many() {
  const int64_t room = limits_.num_sequences - static_cast<int64_t>(model_->sequences.size());
  const int64_t num_sequences = std::min(bytes_.take(limits_.num_many + 1), room);
  std::vector<Prompt> prompts;
  std::vector<std::unique_ptr<OpenOptions>> own_options;
  std::vector<pkv_open_options> options;
  std::vector<int64_t> tokens, counts, probed;
  for (int64_t i = 0; i < num_sequences; ++i) {
    prompts.push_back(take_prompt());
    own_options.push_back(std::make_unique<OpenOptions>(prompts.back()));
    options.push_back(*own_options.back());
    tokens.insert(tokens.end(), prompts.back().tokens.begin(), prompts.back().tokens.end());
    counts.push_back(static_cast<int64_t>(prompts.back().tokens.size()));
    probed.push_back(probe(cache_, prompts.back()));
  }
  const int64_t bad = bytes_.take(16);
  if (num_sequences > 0 && bad == 0) counts.back() -= 1;
  if (!tokens.empty() && bad == 1) tokens.back() = -1;
  const bool is_bad = bad == 0 ? num_sequences > 0 : bad == 1 && !tokens.empty();
  std::vector<pkv_sequence> ids(static_cast<size_t>(num_sequences));
  std::vector<int64_t> num_cached(ids.size());
  const pkv_status status = pkv_sequences_open(cache_, tokens.data(), static_cast<int64_t>(tokens.size()), counts.data(),
                                               num_sequences, options.data(), ids.data(), num_cached.data());
  REQUIRE(status == (is_bad ? PKV_INVALID_ARGUMENT : PKV_OK));
  if (status != PKV_OK) return check_refusal(status);
  REQUIRE(num_cached == probed);
  for (size_t i = 0; i < ids.size(); ++i) adopt(prompts[i], ids[i], num_cached[i]);
}

void Driver::fork_many() {
  const int64_t room = limits_.num_sequences - static_cast<int64_t>(model_->sequences.size());
  const int64_t num_sequences = std::min(bytes_.take(limits_.num_many + 1), room);
  if (!has_sequences()) return open();
  std::vector<Sequence> children;
  std::vector<pkv_sequence> parents;
  std::vector<int64_t> lengths;
  bool may_be_refused = false;
  for (int64_t i = 0; i < num_sequences; ++i) {
    const Sequence &parent = pick();
    children.push_back(parent);
    parents.push_back(parent.id);
    lengths.push_back(bytes_.take(parent.length() + 2) - 1);
    may_be_refused = may_be_refused || may_refuse_cut(parent, PKV_INVALID_ARGUMENT);
  }
  const bool is_bad = num_sequences > 0 && bytes_.take_one_in(8);
  if (is_bad) lengths.back() = children.back().length() + 1;
  std::vector<pkv_sequence> ids(parents.size());
  const pkv_status status = pkv_sequences_fork(cache_, parents.data(), lengths.data(), num_sequences, ids.data());
  if (status != PKV_OK) {
    REQUIRE(status == PKV_INVALID_ARGUMENT && (is_bad || may_be_refused));
    return check_refusal(status);
  }
  REQUIRE(!is_bad);
  for (size_t i = 0; i < children.size(); ++i) {
    children[i].id = ids[i];
    children[i].cut(lengths[i] < 0 ? children[i].length() : lengths[i]);
    model_->sequences.push_back(children[i]);
  }
}

void Driver::commit_many() {
  const std::vector<Sequence *> members = pick_some(limits_.num_sequences);
  std::vector<pkv_sequence> ids = ids_of(members);
  std::vector<int64_t> firsts, counts, tokens;
  for (const Sequence *member : members) {
    firsts.push_back(model_->info(*member).settled_length);
    counts.push_back(bytes_.take(member->length() - firsts.back() + 1));
    const auto first = member->tokens.begin() + firsts.back();
    tokens.insert(tokens.end(), first, first + counts.back());
  }
  bool is_bad = spoil(&ids);
  if (!members.empty() && !is_bad && bytes_.take_one_in(8)) {
    is_bad = true;
    const int64_t excess = members.back()->length() - firsts.back() + 1 - counts.back();
    counts.back() += excess;
    tokens.insert(tokens.end(), static_cast<size_t>(excess), 0);
  }
  const pkv_status status =
      pkv_sequences_commit(cache_, ids.data(), counts.data(), static_cast<int64_t>(ids.size()), tokens.data(),
                           static_cast<int64_t>(tokens.size()));
  REQUIRE((status != PKV_OK) == is_bad);
  if (status != PKV_OK) {
    REQUIRE(status == PKV_INVALID_ARGUMENT || status == PKV_NOT_FOUND);
    return check_refusal(status);
  }
  for (size_t i = 0; i < members.size(); ++i) {
    REQUIRE(model_->info(*members[i]).settled_length >= firsts[i] + counts[i]);
    std::fill_n(members[i]->was_told.begin() + firsts[i], counts[i], true);
  }
}

void Driver::truncate_many() {
  const std::vector<Sequence *> members = pick_some(limits_.num_sequences);
  std::vector<pkv_sequence> ids = ids_of(members);
  std::vector<int64_t> lengths;
  bool may_be_refused = false;
  for (const Sequence *member : members) {
    lengths.push_back(bytes_.take(member->length() + 1));
    may_be_refused = may_be_refused || may_refuse_cut(*member, PKV_INVALID_ARGUMENT);
  }
  bool is_bad = spoil(&ids);
  if (!members.empty() && bytes_.take_one_in(8)) {
    is_bad = true;
    lengths.back() = bytes_.take(2) == 0 ? -1 : members.back()->length() + 1;
  }
  const pkv_status status =
      pkv_sequences_truncate(cache_, ids.data(), lengths.data(), static_cast<int64_t>(ids.size()));
  if (status != PKV_OK) {
    REQUIRE(is_bad || (may_be_refused && status == PKV_INVALID_ARGUMENT));
    REQUIRE(status == PKV_INVALID_ARGUMENT || status == PKV_NOT_FOUND);
    return check_refusal(status);
  }
  REQUIRE(!is_bad);
  for (size_t i = 0; i < members.size(); ++i) members[i]->cut(lengths[i]);
}

void Driver::close_many() {
  std::vector<pkv_sequence> ids = ids_of(pick_some(4));
  const bool is_bad = spoil(&ids);
  const pkv_status status =
      pkv_sequences_close(cache_, ids.data(), static_cast<int64_t>(ids.size()), PKV_STREAM_OF_SEQUENCE);
  REQUIRE((status != PKV_OK) == is_bad);
  if (status != PKV_OK) {
    REQUIRE(status == PKV_INVALID_ARGUMENT || status == PKV_NOT_FOUND);
    return check_refusal(status);
  }
  const auto is_closed = [&](const Sequence &sequence) {
    return std::find(ids.begin(), ids.end(), sequence.id) != ids.end();
  };
  for (const Sequence &sequence : model_->sequences) {
    if (is_closed(sequence)) remember(sequence);
  }
  model_->sequences.erase(std::remove_if(model_->sequences.begin(), model_->sequences.end(), is_closed),
                          model_->sequences.end());
}

void Driver::reorder() {
  const std::vector<Sequence *> members = pick_some(limits_.num_sequences);
  std::vector<pkv_sequence> ids = ids_of(members);
  std::vector<int64_t> sources;
  for (size_t i = 0; i < members.size(); ++i) sources.push_back(bytes_.take(static_cast<int64_t>(members.size())));
  bool is_bad = spoil(&ids);
  if (!members.empty() && bytes_.take_one_in(8)) {
    is_bad = true;
    sources.front() = bytes_.take(2) == 0 ? -1 : static_cast<int64_t>(members.size());
  }
  const pkv_status status =
      pkv_sequences_reorder(cache_, ids.data(), sources.data(), static_cast<int64_t>(ids.size()));
  REQUIRE((status != PKV_OK) == is_bad);
  if (status != PKV_OK) {
    REQUIRE(status == PKV_INVALID_ARGUMENT || status == PKV_NOT_FOUND);
    return check_refusal(status);
  }
  std::vector<Sequence> before;
  for (const Sequence *member : members) before.push_back(*member);
  for (size_t i = 0; i < members.size(); ++i) {
    *members[i] = before[static_cast<size_t>(sources[i])];
    members[i]->id = ids[i];
  }
}

}  // namespace fuzz
