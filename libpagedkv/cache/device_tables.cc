#include "cache/device_tables.h"

#include <algorithm>
#include <cstring>
#include <utility>

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

}  // namespace

Status DeviceArray::allocate(Backend *backend, uint64_t bytes) {
  DeviceMemory memory;
  if (bytes > 0) PKV_TRY(backend->allocate_memory(bytes, &memory));
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

Status DeviceTables::create(Backend *backend, int64_t max_sequences, int64_t max_tokens, int64_t num_blocks,
                            int32_t head_dim, std::unique_ptr<DeviceTables> *out) {
  const int64_t max_changes = std::max(kMinChanges, 2 * max_sequences);
  std::unique_ptr<DeviceTables> tables(new DeviceTables(backend, max_changes));
  const uint64_t sequences = static_cast<uint64_t>(max_sequences), tokens = static_cast<uint64_t>(max_tokens);
  PKV_TRY(tables->seq_lens_.allocate(backend, sequences * sizeof(int32_t)));
  PKV_TRY(tables->cu_seqlens_q_.allocate(backend, (sequences + 1) * sizeof(int32_t)));
  PKV_TRY(backend->fill(tables->cu_seqlens_q_.as<void>(), 0, sizeof(int32_t)));  // of no sequences
  PKV_TRY(tables->slot_mapping_.allocate(backend, tokens * sizeof(int64_t)));
  PKV_TRY(tables->positions_.allocate(backend, tokens * sizeof(int64_t)));
  PKV_TRY(tables->block_pointers_.allocate(backend, static_cast<uint64_t>(num_blocks) * sizeof(int64_t)));
  const uint64_t workspace_bytes = backend->attend_workspace_bytes(head_dim);
  PKV_TRY(tables->workspace_.allocate(backend, workspace_bytes));
  PKV_TRY(backend->fill(tables->workspace_.as<void>(), 0, workspace_bytes));
  const uint64_t staging_bytes =
      StagingWriter::bytes(max_sequences, sizeof(int32_t)) + StagingWriter::bytes(max_sequences + 1, sizeof(int32_t)) +
      2 * StagingWriter::bytes(max_tokens, sizeof(int64_t)) + StagingWriter::bytes(max_changes, sizeof(int64_t)) +
      StagingWriter::bytes(max_changes, sizeof(int32_t));
  PKV_TRY(backend->create_table_uploader(staging_bytes, &tables->uploader_));
  *out = std::move(tables);
  return PKV_OK;
}

Status DeviceTables::allocate_csr(int64_t max_sequences) {
  const uint64_t bytes = static_cast<uint64_t>(max_sequences) * sizeof(int32_t);
  PKV_TRY(indptr_.allocate(backend_, bytes + sizeof(int32_t)));
  PKV_TRY(last_block_len_.allocate(backend_, bytes));
  return backend_->fill(indptr_.as<void>(), 0, sizeof(int32_t));
}

Status DeviceTables::make_room(int64_t block_table_size, int64_t num_indices, Room *out) const {
  if (block_table_size > 0) {
    const uint64_t bytes = static_cast<uint64_t>(block_table_size) * sizeof(int32_t);
    PKV_TRY(out->block_table.allocate(backend_, bytes));
    PKV_TRY(backend_->fill(out->block_table.as<void>(), 0xff, bytes));
  }
  if (num_indices > 0) PKV_TRY(out->indices.allocate(backend_, static_cast<uint64_t>(num_indices) * sizeof(int32_t)));
  return PKV_OK;
}

void DeviceTables::adopt_room(Room *room) noexcept {
  if (room->block_table.as<void>() != nullptr) block_table_.swap(room->block_table);
  if (room->indices.as<void>() != nullptr) indices_.swap(room->indices);
}

Status DeviceTables::upload_block_pointers(const int64_t *pointers, int64_t count) {
  return backend_->upload(block_pointers_.as<int64_t>(), pointers, static_cast<uint64_t>(count) * sizeof(int64_t));
}

Status DeviceTables::upload(const StepTables &host, const std::vector<TableChange> &changes, pkv_stream stream) {
  int64_t num_done = 0;
  const int64_t num_changes = static_cast<int64_t>(changes.size());
  do {
    // The arrays travel with the first slot; what changes do not fit follow in further ones.
    const bool is_first = num_done == 0;
    char *staging = nullptr;
    PKV_TRY(uploader_->acquire(&staging));
    StagingWriter writer(staging);
    UploadTablesParams params = {};
    params.num_sequences = is_first ? host.num_sequences : -1;
    params.num_tokens = is_first ? host.num_tokens : 0;
    params.num_changes = std::min(num_changes - num_done, max_changes_);
    if (is_first) {
      params.seq_lens = writer.write(host.seq_lens, host.num_sequences);
      params.cu_seqlens_q = writer.write(host.cu_seqlens_q, host.num_sequences + 1);
      params.slot_mapping = writer.write(host.slot_mapping, host.num_tokens);
      params.positions = writer.write(host.positions, host.num_tokens);
    }
    int64_t *indices = writer.take<int64_t>(params.num_changes);
    int32_t *values = writer.take<int32_t>(params.num_changes);
    for (int64_t i = 0; i < params.num_changes; ++i) {
      indices[i] = changes[num_done + i].index;
      values[i] = changes[num_done + i].value;
    }
    params.change_indices = indices;
    params.change_values = values;
    params.to_seq_lens = seq_lens_.as<int32_t>();
    params.to_cu_seqlens_q = cu_seqlens_q_.as<int32_t>();
    params.to_slot_mapping = slot_mapping_.as<int64_t>();
    params.to_positions = positions_.as<int64_t>();
    params.to_block_table = block_table_.as<int32_t>();
    PKV_TRY(uploader_->submit(params, stream));
    num_done += params.num_changes;
  } while (num_done < num_changes);
  return PKV_OK;
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
  return tables;
}

}  // namespace pkv
