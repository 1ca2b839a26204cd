// Where K and V of every layer stand inside a block. A block holds [layer][K | V] planes, each a multiple of 16 bytes
// from the start, then (with scales per token and head) the float32 scales [layer][K | V], padded to a multiple of 256.
// A plane is [token][head][dim] or [head][token][dim]. Immutable once made.
#pragma once

#include "backend/params.h"
#include "base/status.h"

namespace pkv {

class Layout {
 public:
  // Checks a description of the ABI; the pointers in it are not kept.
  static Status create(const pkv_layout &description, Layout *out);

  // The same of fewer layers and heads.
  Status cut(int32_t num_layers, int32_t num_kv_heads, Layout *out) const;

  int32_t block_size() const { return block_size_; }
  int32_t num_layers() const { return num_layers_; }
  int32_t num_kv_heads() const { return num_kv_heads_; }
  uint64_t block_bytes() const { return block_bytes_; }
  uint64_t token_bytes() const;

  // All but struct_size. layer is in range.
  void describe_layer(int32_t layer, pkv_layer_info *out) const;

  // Everything but base, num_blocks and the static scales. layer is in range.
  PagedKv describe_kv(int32_t layer) const;

  // Of the layout and of what names the model, [model_bytes], byte by byte as docs/transfers.md has it. out: [32].
  void make_fingerprint(const void *model, size_t model_bytes, uint8_t *out) const;

  // Bytes from a layer's planes, and its scales in the block, to those of the next layer.
  uint64_t layer_bytes() const { return k_plane_bytes_ + v_plane_bytes_; }
  uint64_t layer_scale_bytes() const;

 private:
  int32_t block_size_ = 0;
  int32_t num_layers_ = 0;
  int32_t num_kv_heads_ = 0;
  int32_t head_dim_ = 0;
  int32_t v_head_dim_ = 0;
  pkv_dtype dtype_ = PKV_DTYPE_NONE;
  pkv_kv_order order_ = PKV_TOKEN_HEAD;
  pkv_kv_scales kv_scales_ = PKV_SCALES_STATIC;
  uint64_t k_plane_bytes_ = 0;
  uint64_t v_plane_bytes_ = 0;
  uint64_t scales_offset_ = 0;  // of the first scale plane; 0 with static scales
  uint64_t block_bytes_ = 0;
};

}  // namespace pkv
