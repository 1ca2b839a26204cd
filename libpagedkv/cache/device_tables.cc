#include "cache/device_tables.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cache/shared_prefixes.h"

namespace pkv {
namespace {

constexpr int64_t kMinChanges = 4096;
constexpr uint64_t kPieceAlignment = 16;

// Hands out the pieces of a staging slot.
class StagingWriter {
 public:
  explicit StagingWriter(char *staging) : next_(staging) {}

  template <class T>
  T *take(int64_t count) {
    T *piece = reinterpret_cast<T *>(next_);
    next_ += bytes(count, sizeof(T));
    return piece;
  }

  template <class T>
  const T *write(const T *values, int64_t count) {
    T *piece = take<T>(count);
    if (count > 0) std::memcpy(piece, values, static_cast<size_t>(count) * sizeof(T));
    return piece;
  }

  static uint64_t bytes(int64_t count, uint64_t element_bytes) {
    const uint64_t size = static_cast<uint64_t>(count) * element_bytes;
    return (size + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  }

 private:
  char *next_;
};

uint64_t count_staging_bytes(const UploadTablesParams &params) {
  return StagingWriter::bytes(params.num_seq_lens, sizeof(int32_t)) +
         StagingWriter::bytes(params.num_cu_seqlens_q, sizeof(int32_t)) +
         StagingWriter::bytes(params.num_step_limits, sizeof(int32_t)) +
         StagingWriter::bytes(params.num_prefix_lens, sizeof(int32_t)) +
         StagingWriter::bytes(params.num_prefixes, sizeof(SharedPrefix)) +
         StagingWriter::bytes(params.num_changes, sizeof(int64_t)) +
         StagingWriter::bytes(params.num_changes, sizeof(int32_t));
}

}  // namespace

Status DeviceArray::allocate(Backend *backend, uint64_t bytes, bool is_mapped) {
  DeviceMemory memory;
  if (bytes > 0) {
    PKV_TRY(is_mapped ? backend->allocate_mapped_memory(bytes, &memory) : backend->allocate_memory(bytes, &memory));
  }
  reset();
  backend_ = backend;
  memory_ = memory;
  return PKV_OK;
}

void DeviceArray::swap(DeviceArray &other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(memory_, other.memory_);
}

void DeviceArray::reset() {
  if (backend_ != nullptr) backend_->release_memory(&memory_);
  memory_ = {};
}

int64_t SentExtent::advance(int64_t num_real, int64_t num_total) {
  const int64_t count = num_total > padded_end_ ? num_total : std::max(num_real, std::min(real_end_, num_total));
  padded_end_ = real_end_ > num_total ? num_total : std::max(padded_end_, num_total);
  real_end_ = num_real;
  return count;
}

Status DeviceTables::create(Backend *backend, int64_t max_sequences, int64_t max_tokens, int64_t num_blocks,
                            int32_t head_dim, bool is_mapped, std::unique_ptr<DeviceTables> *out) {
  const int64_t max_changes = std::max(kMinChanges, 2 * max_sequences);
  std::unique_ptr<DeviceTables> tables(new DeviceTables(backend, max_sequences, max_changes, is_mapped));
  const uint64_t sequences = static_cast<uint64_t>(max_sequences), tokens = static_cast<uint64_t>(max_tokens);
  PKV_TRY(tables->allocate_table(sequences * sizeof(int32_t), &tables->seq_lens_));
  PKV_TRY(tables->allocate_table((sequences + 1) * sizeof(int32_t), &tables->cu_seqlens_q_));
  PKV_TRY(backend->fill(tables->cu_seqlens_q_.as<void>(), 0, sizeof(int32_t)));  // of no sequences
  PKV_TRY(tables->allocate_table(tokens * sizeof(int64_t), &tables->slot_mapping_));
  PKV_TRY(tables->allocate_table(tokens * sizeof(int64_t), &tables->positions_));
  PKV_TRY(tables->block_pointers_.allocate(backend, static_cast<uint64_t>(num_blocks) * sizeof(int64_t)));
  const uint64_t workspace_bytes = backend->attend_workspace_bytes(head_dim);
  PKV_TRY(tables->workspace_.allocate(backend, workspace_bytes));
  PKV_TRY(backend->fill(tables->workspace_.as<void>(), 0, workspace_bytes));
  UploadTablesParams most = {};
  most.num_seq_lens = most.num_step_limits = max_sequences;
  most.num_cu_seqlens_q = max_sequences + 1;
  most.num_changes = max_changes;
  most.num_prefix_lens = max_sequences;
  most.num_prefixes = PrefixFinder::most_entries(max_sequences);
  PKV_TRY(backend->create_table_uploader(count_staging_bytes(most), &tables->uploader_));
  *out = std::move(tables);
  return PKV_OK;
}

Status DeviceTables::allocate_table(uint64_t bytes, DeviceArray *out) {
  return out->allocate(backend_, bytes, is_mapped_);
}

Status DeviceTables::allocate_csr(int64_t max_sequences) {
  const uint64_t bytes = static_cast<uint64_t>(max_sequences) * sizeof(int32_t);
  PKV_TRY(allocate_table(bytes + sizeof(int32_t), &indptr_));
  PKV_TRY(allocate_table(bytes, &last_block_len_));
  return backend_->fill(indptr_.as<void>(), 0, sizeof(int32_t));
}

Status DeviceTables::make_room(int64_t block_table_size, int64_t num_indices, Room *out) const {
  if (block_table_size > 0) {
    const uint64_t bytes = static_cast<uint64_t>(block_table_size) * sizeof(int32_t);
    PKV_TRY(out->block_table.allocate(backend_, bytes, is_mapped_));
    PKV_TRY(backend_->fill(out->block_table.as<void>(), 0xff, bytes));
  }
  if (num_indices == 0) return PKV_OK;
  return out->indices.allocate(backend_, static_cast<uint64_t>(num_indices) * sizeof(int32_t), is_mapped_);
}

void DeviceTables::adopt_room(Room *room) noexcept {
  if (room->block_table.as<void>() != nullptr) block_table_.swap(room->block_table);
  if (room->indices.as<void>() != nullptr) indices_.swap(room->indices);
}

Status DeviceTables::allocate_steps(int64_t max_sequences) {
  if (step_limits_.as<void>() != nullptr) return PKV_OK;
  PKV_TRY(allocate_table(sizeof(uint32_t), &num_refused_));
  return allocate_table(static_cast<uint64_t>(max_sequences) * sizeof(int32_t), &step_limits_);
}

Status DeviceTables::allocate_prefixes(int64_t max_sequences) {
  const size_t num_entries = static_cast<size_t>(PrefixFinder::most_entries(max_sequences));
  sent_prefix_lens_.resize(static_cast<size_t>(max_sequences), 0);
  sent_prefixes_.resize(num_entries, SharedPrefix{});
  PKV_TRY(allocate_table(static_cast<uint64_t>(max_sequences) * sizeof(int32_t), &prefix_lens_));
  PKV_TRY(allocate_table(num_entries * sizeof(SharedPrefix), &prefixes_));
  return backend_->fill(prefixes_.as<void>(), 0, sizeof(SharedPrefix));
}

void DeviceTables::describe_steps(AdvanceParams *out) const {
  out->step_limits = step_limits_.as<int32_t>();
  out->block_table = block_table_.as<int32_t>();
  out->seq_lens = seq_lens_.as<int32_t>();
  out->slot_mapping = slot_mapping_.as<int64_t>();
  out->positions = positions_.as<int64_t>();
  out->num_refused = num_refused_.as<uint32_t>();
}

Status DeviceTables::download_steps(int64_t num_sequences, pkv_stream stream, int32_t *out_seq_lens,
                                    uint32_t *out_num_refused) const {
  const uint64_t bytes = static_cast<uint64_t>(num_sequences) * sizeof(int32_t);
  if (is_mapped_) {
    PKV_TRY(backend_->wait(stream));
    if (bytes > 0) std::memcpy(out_seq_lens, seq_lens_.as<void>(), bytes);
    std::memcpy(out_num_refused, num_refused_.as<void>(), sizeof(uint32_t));
    return PKV_OK;
  }
  if (bytes > 0) PKV_TRY(backend_->download(out_seq_lens, seq_lens_.as<void>(), bytes, stream));
  return backend_->download(out_num_refused, num_refused_.as<void>(), sizeof(uint32_t), stream);
}

Status DeviceTables::upload_block_pointers(const int64_t *pointers, int64_t count) {
  return backend_->upload(block_pointers_.as<int64_t>(), pointers, static_cast<uint64_t>(count) * sizeof(int64_t));
}

Status DeviceTables::upload(const StepTables &host, int32_t block_size, int64_t num_items,
                            const std::vector<TableChange> &changes, const int32_t *step_limits, pkv_stream stream) {
  const int64_t num_sequences = host.num_sequences, num_changes = static_cast<int64_t>(changes.size());
  const int64_t num_real_tokens = host.cu_seqlens_q[num_sequences];
  const int64_t num_tokens = sent_tokens_.advance(num_real_tokens, host.num_tokens);
  UploadTablesParams params = {};
  params.num_sequences = num_sequences;
  params.table_stride = host.table_stride;
  params.block_size = block_size;
  params.num_seq_lens = sent_sequences_.advance(num_items, num_sequences);
  if (num_sequences >= num_sent_cu_seqlens_q_ ||
      !std::equal(host.cu_seqlens_q, host.cu_seqlens_q + num_sequences + 1, sent_cu_seqlens_q_.begin())) {
    params.num_cu_seqlens_q = num_sent_cu_seqlens_q_ = num_sequences + 1;
    std::copy_n(host.cu_seqlens_q, num_sequences + 1, sent_cu_seqlens_q_.begin());
  }
  params.num_step_limits = step_limits == nullptr ? 0 : num_sequences;
  if (host.prefixes.lens != nullptr) plan_prefixes(host, &params);
  uploaded_bytes_ = static_cast<uint64_t>(params.num_seq_lens + params.num_cu_seqlens_q + params.num_step_limits +
                                          params.num_prefix_lens) *
                        sizeof(int32_t) +
                    static_cast<uint64_t>(params.num_prefixes) * sizeof(SharedPrefix) +
                    static_cast<uint64_t>(num_changes) * (sizeof(int64_t) + sizeof(int32_t));
  params.to_seq_lens = seq_lens_.as<int32_t>();
  params.to_cu_seqlens_q = cu_seqlens_q_.as<int32_t>();
  params.to_slot_mapping = slot_mapping_.as<int64_t>();
  params.to_positions = positions_.as<int64_t>();
  params.to_block_table = block_table_.as<int32_t>();
  params.to_step_limits = step_limits_.as<int32_t>();
  params.to_prefix_lens = prefix_lens_.as<int32_t>();
  params.to_prefixes = prefixes_.as<SharedPrefix>();
  params.to_num_refused = step_limits == nullptr ? nullptr : num_refused_.as<uint32_t>();
  int64_t num_done = 0;
  do {
    // The arrays travel with the first slot; what changes do not fit follow in further ones.
    params.num_changes = std::min(num_changes - num_done, max_changes_);
    params.num_tokens = num_done + params.num_changes == num_changes ? num_tokens : 0;
    char *staging = nullptr;
    PKV_TRY(uploader_->acquire(count_staging_bytes(params), &staging));
    StagingWriter writer(staging);
    params.seq_lens = writer.write(host.seq_lens, params.num_seq_lens);
    params.cu_seqlens_q = writer.write(host.cu_seqlens_q, params.num_cu_seqlens_q);
    params.step_limits = writer.write(step_limits, params.num_step_limits);
    params.prefix_lens = writer.write(host.prefixes.lens, params.num_prefix_lens);
    params.prefixes = writer.write(params.num_prefixes == 0 ? nullptr : host.prefixes.items - 1, params.num_prefixes);
    int64_t *indices = writer.take<int64_t>(params.num_changes);
    int32_t *values = writer.take<int32_t>(params.num_changes);
    for (int64_t i = 0; i < params.num_changes; ++i) {
      indices[i] = changes[num_done + i].index;
      values[i] = changes[num_done + i].value;
    }
    params.change_indices = indices;
    params.change_values = values;
    PKV_TRY(uploader_->submit(params, stream));
    num_done += params.num_changes;
    params.num_seq_lens = params.num_cu_seqlens_q = params.num_step_limits = 0;
    params.num_prefix_lens = params.num_prefixes = 0;
    params.to_num_refused = nullptr;
  } while (num_done < num_changes);
  return PKV_OK;
}

// What the device has not got yet of the shared prefixes.
void DeviceTables::plan_prefixes(const StepTables &host, UploadTablesParams *params) {
  const int64_t num_sequences = host.num_sequences, num_entries = host.prefixes.num_prefixes + 2;
  if (num_sequences > num_sent_prefix_lens_ ||
      !std::equal(host.prefixes.lens, host.prefixes.lens + num_sequences, sent_prefix_lens_.begin())) {
    params->num_prefix_lens = num_sent_prefix_lens_ = num_sequences;
    std::copy_n(host.prefixes.lens, num_sequences, sent_prefix_lens_.begin());
  }
  const SharedPrefix *entries = host.prefixes.items - 1;  // the counts in front
  const size_t bytes = static_cast<size_t>(num_entries) * sizeof(SharedPrefix);
  if (num_entries == num_sent_prefixes_ && std::memcmp(entries, sent_prefixes_.data(), bytes) == 0) return;
  params->num_prefixes = num_sent_prefixes_ = num_entries;
  std::copy_n(entries, num_entries, sent_prefixes_.begin());
}

Status DeviceTables::build_csr(const StepTables &host, int32_t block_size, pkv_stream stream) {
  BuildCsrParams params = {};
  params.tables = view(host);
  params.block_size = block_size;
  params.to_indptr = indptr_.as<int32_t>();
  params.to_indices = indices_.as<int32_t>();
  params.to_last_block_len = last_block_len_.as<int32_t>();
  return backend_->build_csr(params, stream);
}

StepTables DeviceTables::view(const StepTables &host) const {
  StepTables tables = host;
  tables.block_table = block_table_.as<int32_t>();
  tables.seq_lens = seq_lens_.as<int32_t>();
  tables.cu_seqlens_q = cu_seqlens_q_.as<int32_t>();
  tables.slot_mapping = slot_mapping_.as<int64_t>();
  tables.positions = positions_.as<int64_t>();
  if (host.prefixes.lens != nullptr) {
    SharedPrefix *entries = prefixes_.as<SharedPrefix>();
    tables.prefixes = {prefix_lens_.as<int32_t>(), &entries->first_token, entries + 1, host.prefixes.num_prefixes};
  }
  return tables;
}

}  // namespace pkv
