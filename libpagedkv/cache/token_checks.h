// Checks of what the calls on sequences are given.
#pragma once

#include <cinttypes>

#include "base/status.h"
#include "base/tokens.h"
#include "cache/sequence.h"

namespace pkv {

inline Status check_known_tokens(const int64_t *tokens, int64_t num_tokens) {
  if (combine_signs(tokens, num_tokens) >= 0) return PKV_OK;
  int64_t i = 0;
  while (tokens[i] >= 0) ++i;
  return fail(PKV_INVALID_ARGUMENT, "tokens[%" PRId64 "] is %" PRId64 ", negative", i, tokens[i]);
}

// Of a step: -1 is a token that is not known yet.
inline Status check_step_tokens(const int64_t *tokens, int64_t num_tokens, bool *out_are_known) {
  *out_are_known = combine_signs(tokens, num_tokens) >= 0;
  if (*out_are_known) return PKV_OK;
  int64_t i = 0;
  while (i < num_tokens && tokens[i] >= kUnknownToken) ++i;
  if (i == num_tokens) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "tokens[%" PRId64 "] is %" PRId64 ", neither a token nor -1 (unknown)", i,
              tokens[i]);
}

inline Status check_count(const char *name, int64_t value) {
  if (value >= 0) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s is %" PRId64 ", negative", name, value);
}

// Of a prompt, before it is read: no sequence can be longer.
inline Status check_prompt_length(int64_t num_tokens) {
  PKV_TRY(check_count("num_tokens", num_tokens));
  if (num_tokens <= kMaxLength) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", more than %" PRId64, num_tokens, kMaxLength);
}

// Counts of a call for many: none negative or longer than a sequence can be, and num_tokens in all.
inline Status check_counts(const char *name, const int64_t *counts, int64_t num_sequences, int64_t num_tokens) {
  PKV_TRY(check_count("num_sequences", num_sequences));
  PKV_TRY(check_count("num_tokens", num_tokens));
  int64_t left = num_tokens;
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (counts[i] < 0 || counts[i] > kMaxLength) {
      return fail(PKV_INVALID_ARGUMENT, "%s[%" PRId64 "] is %" PRId64 ", not in 0 to %" PRId64, name, i, counts[i],
                  kMaxLength);
    }
    left -= counts[i] <= left ? counts[i] : left + 1;
    if (left < 0) break;
  }
  if (left == 0) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", but %s add up to %s", num_tokens, name,
              left < 0 ? "more" : "less");
}

}  // namespace pkv
