// From tensors of the ABI to kernel parameters: checks every shape, dtype and stride once, then calls the backend.
// Stateless.
#pragma once

#include "backend/backend.h"

namespace pkv {

// A rope without its table of angles.
Status read_rope(const pkv_rope &rope, int32_t head_dim, RopeParams *out);

// k, v: one row per token of the step. rope may be null.
Status write_kv(Backend *backend, const PagedKv &kv, const StepTables &tables, const pkv_tensor &k,
                const pkv_tensor &v, const pkv_rope *rope, pkv_toggle pdl, pkv_stream stream);

// Rows of one sequence out of the cache and back, as many as k and v have to be: count.
Status gather_kv(Backend *backend, const PagedKv &kv, const SequenceRows &sequence, int64_t count, const pkv_tensor &k,
                 const pkv_tensor &v, pkv_stream stream);
Status scatter_kv(Backend *backend, const PagedKv &kv, const SequenceRows &sequence, int64_t count, const pkv_tensor &k,
                  const pkv_tensor &v, pkv_stream stream);

// options: as in the ABI; its tensors may be null. workspace: of the batch, Backend::attend_workspace_bytes.
Status attend(Backend *backend, const PagedKv &kv, const StepTables &tables, void *workspace, const pkv_tensor &q,
              const pkv_tensor &out, const pkv_attend_options &options);

// Who advances, of params->num_sequences.
Status read_active(const char *name, const pkv_tensor &is_active, AdvanceParams *params);

// lse may be null.
Status merge_states(Backend *backend, const pkv_tensor &out_a, const pkv_tensor &lse_a, const pkv_tensor &out_b,
                    const pkv_tensor &lse_b, const pkv_tensor &out, const pkv_tensor *lse, pkv_stream stream);

}  // namespace pkv
