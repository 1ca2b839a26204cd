// A transfer: blocks that somebody outside is reading or writing, who does not go by streams. It holds them until it is
// known to be over, whoever closes or cuts what they belong to.
#pragma once

#include <cstdint>

#include "base/shared_array.h"
#include "cache/sequence.h"

namespace pkv {

struct Transfer {
  uint32_t generation = 1;
  bool is_open = false;
  bool is_receiving = false;    // else the blocks are being read
  bool is_quarantined = false;  // it missed its deadline, but bytes may still land
  SharedArray<int32_t> blocks;  // [its size], in the order of the tokens
  // Of a receiving one: what the sequence is opened with, and the stream behind which its bytes are written.
  Chain chain;
  int32_t priority = 0;
  uint64_t tag = 0;
  StreamSlot stream_slot = kNoStream;

  const char *state_name() const {
    return is_quarantined ? "quarantined" : is_receiving ? "receiving" : "sending";
  }
};

}  // namespace pkv
