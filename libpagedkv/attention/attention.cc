#include "attention/attention.h"

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <initializer_list>

#include "base/checked.h"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int64_t kMaxHeads = 65536;

// A tensor that was checked: where it is, and how far its rows are apart (elements).
struct Rows {
  void *data = nullptr;
  pkv_dtype dtype = PKV_DTYPE_NONE;
  int64_t strides[2] = {0, 0};  // of the first two dimensions
};

const char *name_or_unknown(pkv_dtype dtype) {
  const char *name = dtype_name(dtype);
  return name == nullptr ? "unknown" : name;
}

// Checks a tensor of exactly this shape; the last dimension must be contiguous. -1 accepts any size from 1 on.
Status check_tensor(const char *name, const pkv_tensor &tensor, std::initializer_list<int64_t> shape, Rows *out) {
  const int32_t ndim = static_cast<int32_t>(shape.size());
  if (tensor.ndim != ndim) return fail(PKV_INVALID_ARGUMENT, "%s has %d dimensions, not %d", name, tensor.ndim, ndim);
  if (dtype_bytes(tensor.dtype) == 0) {
    return fail(PKV_INVALID_ARGUMENT, "%s has dtype %d, unknown", name, static_cast<int>(tensor.dtype));
  }
  bool is_empty = false, has_strides = false;
  int32_t i = 0;
  for (int64_t size : shape) {
    const int64_t given = tensor.shape[i];
    if (size == -1 ? given < 1 : given != size) {
      if (size == -1) return fail(PKV_INVALID_ARGUMENT, "%s has shape[%d] = %" PRId64, name, i, given);
      return fail(PKV_INVALID_ARGUMENT, "%s has shape[%d] = %" PRId64 ", not %" PRId64, name, i, given, size);
    }
    is_empty = is_empty || given == 0;
    has_strides = has_strides || tensor.strides[i] != 0;
    ++i;
  }
  if (tensor.data == nullptr && !is_empty) return fail(PKV_INVALID_ARGUMENT, "%s has data NULL", name);
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(dtype_bytes(tensor.dtype)) != 0) {
    return fail(PKV_INVALID_ARGUMENT, "%s has data at %p, not aligned to its dtype %s", name, tensor.data,
                dtype_name(tensor.dtype));
  }
  out->data = tensor.data;
  out->dtype = tensor.dtype;
  if (!has_strides) {
    int64_t stride = 1;
    for (int32_t d = ndim - 1; d >= 0; --d) {
      if (d < 2) out->strides[d] = stride;
      if (!checked_multiply(stride, tensor.shape[d] == 0 ? 1 : tensor.shape[d], &stride)) {
        return fail(PKV_INVALID_ARGUMENT, "%s is larger than the address space", name);
      }
    }
    return PKV_OK;
  }
  if (tensor.shape[ndim - 1] > 1 && tensor.strides[ndim - 1] != 1) {
    return fail(PKV_INVALID_ARGUMENT, "%s has strides[%d] = %" PRId64 ", not 1: the last dimension must be contiguous",
                name, ndim - 1, tensor.strides[ndim - 1]);
  }
  for (int32_t d = 0; d < ndim && d < 2; ++d) {
    out->strides[d] = tensor.strides[d];
    int64_t span = 0;
    if (!checked_multiply(tensor.strides[d], tensor.shape[d], &span) || !checked_multiply(span, int64_t{8}, &span)) {
      return fail(PKV_INVALID_ARGUMENT, "%s has strides[%d] = %" PRId64 ", too large", name, d, tensor.strides[d]);
    }
  }
  return PKV_OK;
}

// A tensor that is written: no two of its elements may share memory, as in a broadcast.
Status check_written(const char *name, const pkv_tensor &tensor, std::initializer_list<int64_t> shape, Rows *out) {
  PKV_TRY(check_tensor(name, tensor, shape, out));
  for (int d = 0; d < 2; ++d) {
    if (out->strides[d] == 0 && tensor.shape[d] > 1) {
      return fail(PKV_INVALID_ARGUMENT, "%s has strides[%d] = 0: its rows overlap, but they are written", name, d);
    }
  }
  return PKV_OK;
}

Status check_float_dtype(const char *name, pkv_dtype dtype) {
  if (is_float_dtype(dtype)) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s has dtype %s, not float32, float16 or bfloat16", name, name_or_unknown(dtype));
}

Status check_same_dtype(const char *name, pkv_dtype dtype, const char *other_name, pkv_dtype other) {
  if (dtype == other) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s has dtype %s, but %s has %s", name, name_or_unknown(dtype), other_name,
              name_or_unknown(other));
}

Status check_float32(const char *name, const pkv_tensor &tensor, std::initializer_list<int64_t> shape, Rows *out) {
  PKV_TRY(check_tensor(name, tensor, shape, out));
  if (tensor.dtype == PKV_FLOAT32) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s has dtype %s, not float32", name, name_or_unknown(tensor.dtype));
}

Status check_per_head(const char *name, const pkv_tensor *tensor, int64_t num_heads, const float **out) {
  *out = nullptr;
  if (tensor == nullptr) return PKV_OK;
  Rows rows;
  PKV_TRY(check_float32(name, *tensor, {num_heads}, &rows));
  *out = static_cast<const float *>(rows.data);
  return PKV_OK;
}

// tree_mask: a row for each token of the step, wide enough for every sequence's new tokens.
Status check_tree_mask(const pkv_tensor &mask, const StepTables &tables, AttendParams *params) {
  Rows rows;
  PKV_TRY(check_tensor("tree_mask", mask, {tables.num_tokens, -1}, &rows));
  if (mask.dtype != PKV_BOOL) {
    return fail(PKV_INVALID_ARGUMENT, "tree_mask has dtype %s, not bool", name_or_unknown(mask.dtype));
  }
  if (mask.shape[1] < tables.max_count) {
    return fail(PKV_INVALID_ARGUMENT, "tree_mask has shape[1] = %" PRId64 ", but a sequence has %" PRId64 " new tokens",
                mask.shape[1], tables.max_count);
  }
  params->tree_mask = static_cast<const uint8_t *>(rows.data);
  params->tree_mask_stride = rows.strides[0];
  return PKV_OK;
}

Status check_toggle(const char *name, pkv_toggle toggle) {
  if (toggle == PKV_DEFAULT || toggle == PKV_ON || toggle == PKV_OFF) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s is %d, unknown", name, static_cast<int>(toggle));
}

Status check_row_dtypes(const pkv_tensor &k, const pkv_tensor &v, const PagedKv &kv) {
  if (!is_float_dtype(k.dtype) && k.dtype != kv.dtype) {
    return fail(PKV_INVALID_ARGUMENT, "k has dtype %s, neither float32, float16, bfloat16 nor the cache's %s",
                name_or_unknown(k.dtype), name_or_unknown(kv.dtype));
  }
  return check_same_dtype("v", v.dtype, "k", k.dtype);
}

// Rows to be written: all of the parameters but where they go.
Status read_rows(const pkv_tensor &k, const pkv_tensor &v, const PagedKv &kv, int64_t count, WriteKvParams *out) {
  Rows k_rows, v_rows;
  PKV_TRY(check_tensor("k", k, {count, kv.num_kv_heads, kv.head_dim}, &k_rows));
  PKV_TRY(check_tensor("v", v, {count, kv.num_kv_heads, kv.v_head_dim}, &v_rows));
  PKV_TRY(check_row_dtypes(k, v, kv));
  out->kv = kv;
  out->num_tokens = count;
  out->k = k_rows.data;
  out->v = v_rows.data;
  out->dtype = k.dtype;
  out->k_token_stride = k_rows.strides[0];
  out->k_head_stride = k_rows.strides[1];
  out->v_token_stride = v_rows.strides[0];
  out->v_head_stride = v_rows.strides[1];
  return PKV_OK;
}

constexpr float kDefaultRopeBase = 10000;

// The table of a rope, if it has one: it must reach to every position of the step.
Status read_angles(const pkv_rope &rope, const StepTables &tables, RopeParams *out) {
  if (rope.cos_sin == nullptr) return PKV_OK;
  Rows rows;
  PKV_TRY(check_float32("cos_sin", *rope.cos_sin, {-1, out->rotary_dim}, &rows));
  if (tables.max_position >= rope.cos_sin->shape[0]) {
    return fail(PKV_INVALID_ARGUMENT, "cos_sin has %" PRId64 " positions, but the step goes to %" PRId64,
                rope.cos_sin->shape[0], tables.max_position);
  }
  out->cos_sin = static_cast<const float *>(rows.data);
  out->cos_sin_stride = rows.strides[0];
  return PKV_OK;
}

}  // namespace

Status read_rope(const pkv_rope &rope, int32_t head_dim, RopeParams *out) {
  const int32_t rotary_dim = rope.rotary_dim == 0 ? head_dim : rope.rotary_dim;
  if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2 != 0) {
    return fail(PKV_INVALID_ARGUMENT, "rotary_dim is %d, not even and up to head_dim, %d", rope.rotary_dim, head_dim);
  }
  PKV_TRY(check_toggle("interleaved", rope.interleaved));
  if (!std::isfinite(rope.base) || rope.base < 0) {
    return fail(PKV_INVALID_ARGUMENT, "base is %g, not finite and positive", static_cast<double>(rope.base));
  }
  out->rotary_dim = rotary_dim;
  out->is_interleaved = rope.interleaved == PKV_ON;
  out->base = static_cast<double>(rope.base == 0 ? kDefaultRopeBase : rope.base);
  return PKV_OK;
}

Status write_kv(Backend *backend, const PagedKv &kv, const StepTables &tables, const pkv_tensor &k,
                const pkv_tensor &v, const pkv_rope *rope, pkv_toggle pdl, pkv_stream stream) {
  WriteKvParams params = {};
  PKV_TRY(read_rows(k, v, kv, tables.num_tokens, &params));
  PKV_TRY(check_toggle("pdl", pdl));
  params.is_beside = params.lets_next = pdl == PKV_ON;
  if (rope != nullptr) {
    PKV_TRY(read_rope(*rope, kv.head_dim, &params.rope));
    if (!is_float_dtype(k.dtype)) {
      return fail(PKV_INVALID_ARGUMENT, "k has dtype %s, which rope cannot rotate", name_or_unknown(k.dtype));
    }
    PKV_TRY(read_angles(*rope, tables, &params.rope));
  }
  if (tables.num_tokens == 0) return PKV_OK;
  params.slot_mapping = tables.slot_mapping;
  params.positions = tables.positions;
  return backend->write_kv(params, stream);
}

Status scatter_kv(Backend *backend, const PagedKv &kv, const SequenceRows &sequence, int64_t count, const pkv_tensor &k,
                  const pkv_tensor &v, pkv_stream stream) {
  WriteKvParams params = {};
  PKV_TRY(read_rows(k, v, kv, count, &params));
  if (count == 0) return PKV_OK;
  params.sequence = sequence;
  return backend->write_kv(params, stream);
}

Status gather_kv(Backend *backend, const PagedKv &kv, const SequenceRows &sequence, int64_t count, const pkv_tensor &k,
                 const pkv_tensor &v, pkv_stream stream) {
  Rows k_rows, v_rows;
  PKV_TRY(check_written("k", k, {count, kv.num_kv_heads, kv.head_dim}, &k_rows));
  PKV_TRY(check_written("v", v, {count, kv.num_kv_heads, kv.v_head_dim}, &v_rows));
  PKV_TRY(check_row_dtypes(k, v, kv));
  if (count == 0) return PKV_OK;
  GatherKvParams params = {};
  params.kv = kv;
  params.num_tokens = count;
  params.sequence = sequence;
  params.k = k_rows.data;
  params.v = v_rows.data;
  params.dtype = k.dtype;
  params.k_token_stride = k_rows.strides[0];
  params.k_head_stride = k_rows.strides[1];
  params.v_token_stride = v_rows.strides[0];
  params.v_head_stride = v_rows.strides[1];
  return backend->gather_kv(params, stream);
}

Status attend(Backend *backend, const PagedKv &kv, const StepTables &tables, void *workspace, const pkv_tensor &q,
              const pkv_tensor &out, const pkv_attend_options &options) {
  Rows q_rows, out_rows;
  PKV_TRY(check_tensor("q", q, {tables.num_tokens, -1, kv.head_dim}, &q_rows));
  PKV_TRY(check_float_dtype("q", q.dtype));
  const int64_t num_heads = q.shape[1];
  if (num_heads > kMaxHeads || num_heads % kv.num_kv_heads != 0) {
    return fail(PKV_INVALID_ARGUMENT, "q has %" PRId64 " heads, not a multiple of num_kv_heads, %d, up to %" PRId64,
                num_heads, kv.num_kv_heads, kMaxHeads);
  }
  PKV_TRY(check_written("out", out, {tables.num_tokens, num_heads, kv.v_head_dim}, &out_rows));
  PKV_TRY(check_same_dtype("out", out.dtype, "q", q.dtype));
  AttendParams params = {};
  PKV_TRY(check_per_head("sinks", options.sinks, num_heads, &params.sinks));
  PKV_TRY(check_per_head("alibi_slopes", options.alibi_slopes, num_heads, &params.alibi_slopes));
  if (options.lse != nullptr) {
    Rows lse_rows;
    PKV_TRY(check_written("lse", *options.lse, {tables.num_tokens, num_heads}, &lse_rows));
    PKV_TRY(check_float32("lse", *options.lse, {tables.num_tokens, num_heads}, &lse_rows));
    params.lse = static_cast<float *>(lse_rows.data);
    params.lse_token_stride = lse_rows.strides[0];
    params.lse_head_stride = lse_rows.strides[1];
  }
  if (options.tree_mask != nullptr) PKV_TRY(check_tree_mask(*options.tree_mask, tables, &params));
  PKV_TRY(check_toggle("causal", options.causal));
  PKV_TRY(check_toggle("invariant", options.invariant));
  PKV_TRY(check_toggle("pdl", options.pdl));
  if (!std::isfinite(options.scale)) {
    return fail(PKV_INVALID_ARGUMENT, "scale is %g, not finite", static_cast<double>(options.scale));
  }
  if (!std::isfinite(options.softcap) || options.softcap < 0) {
    return fail(PKV_INVALID_ARGUMENT, "softcap is %g, not finite and positive", static_cast<double>(options.softcap));
  }
  if (options.window < 0) return fail(PKV_INVALID_ARGUMENT, "window is %" PRId64 ", negative", options.window);
  if (tables.num_tokens == 0) return PKV_OK;
  params.kv = kv;
  params.tables = tables;
  params.num_heads = static_cast<int32_t>(num_heads);
  params.q = q_rows.data;
  params.out = out_rows.data;
  params.dtype = q.dtype;
  params.q_token_stride = q_rows.strides[0];
  params.q_head_stride = q_rows.strides[1];
  params.out_token_stride = out_rows.strides[0];
  params.out_head_stride = out_rows.strides[1];
  params.scale = options.scale == 0 ? 1.0f / std::sqrt(static_cast<float>(kv.head_dim)) : options.scale;
  params.is_causal = options.causal != PKV_OFF;
  params.is_invariant = options.invariant == PKV_ON;
  params.is_beside = params.lets_next = options.pdl == PKV_ON;
  params.window = options.window;
  params.softcap = options.softcap;
  params.workspace = workspace;
  return backend->attend(params, options.stream);
}

Status read_active(const char *name, const pkv_tensor &is_active, AdvanceParams *params) {
  Rows rows;
  PKV_TRY(check_tensor(name, is_active, {params->num_sequences}, &rows));
  if (is_active.dtype != PKV_BOOL && is_active.dtype != PKV_INT32) {
    return fail(PKV_INVALID_ARGUMENT, "%s has dtype %s, neither bool nor int32", name, name_or_unknown(is_active.dtype));
  }
  params->is_active = rows.data;
  params->is_active_wide = is_active.dtype == PKV_INT32;
  return PKV_OK;
}

Status merge_states(Backend *backend, const pkv_tensor &out_a, const pkv_tensor &lse_a, const pkv_tensor &out_b,
                    const pkv_tensor &lse_b, const pkv_tensor &out, const pkv_tensor *lse, pkv_stream stream) {
  if (out_a.ndim != 3) return fail(PKV_INVALID_ARGUMENT, "out_a has %d dimensions, not 3", out_a.ndim);
  const int64_t num_tokens = out_a.shape[0], num_heads = out_a.shape[1], head_dim = out_a.shape[2];
  if (num_tokens < 0 || num_heads < 1 || num_heads > kMaxHeads || head_dim < 1 || head_dim > kMaxHeads) {
    return fail(PKV_INVALID_ARGUMENT, "out_a has shape [%" PRId64 ", %" PRId64 ", %" PRId64 "]", num_tokens, num_heads,
                head_dim);
  }
  Rows a, b, merged, a_lse, b_lse, merged_lse;
  PKV_TRY(check_tensor("out_a", out_a, {num_tokens, num_heads, head_dim}, &a));
  PKV_TRY(check_tensor("out_b", out_b, {num_tokens, num_heads, head_dim}, &b));
  PKV_TRY(check_written("out", out, {num_tokens, num_heads, head_dim}, &merged));
  PKV_TRY(check_float_dtype("out_a", out_a.dtype));
  PKV_TRY(check_same_dtype("out_b", out_b.dtype, "out_a", out_a.dtype));
  PKV_TRY(check_same_dtype("out", out.dtype, "out_a", out_a.dtype));
  PKV_TRY(check_float32("lse_a", lse_a, {num_tokens, num_heads}, &a_lse));
  PKV_TRY(check_float32("lse_b", lse_b, {num_tokens, num_heads}, &b_lse));
  if (lse != nullptr) {
    PKV_TRY(check_written("lse", *lse, {num_tokens, num_heads}, &merged_lse));
    PKV_TRY(check_float32("lse", *lse, {num_tokens, num_heads}, &merged_lse));
  }
  if (num_tokens == 0) return PKV_OK;
  MergeStatesParams params = {};
  params.num_tokens = num_tokens;
  params.num_heads = static_cast<int32_t>(num_heads);
  params.head_dim = static_cast<int32_t>(head_dim);
  params.dtype = out_a.dtype;
  params.out_a = a.data;
  params.out_b = b.data;
  params.out = merged.data;
  params.lse_a = static_cast<const float *>(a_lse.data);
  params.lse_b = static_cast<const float *>(b_lse.data);
  params.lse = static_cast<float *>(merged_lse.data);
  for (int i = 0; i < 2; ++i) {
    params.out_a_strides[i] = a.strides[i];
    params.out_b_strides[i] = b.strides[i];
    params.out_strides[i] = merged.strides[i];
    params.lse_a_strides[i] = a_lse.strides[i];
    params.lse_b_strides[i] = b_lse.strides[i];
    params.lse_strides[i] = merged_lse.strides[i];
  }
  return backend->merge_states(params, stream);
}

}  // namespace pkv
