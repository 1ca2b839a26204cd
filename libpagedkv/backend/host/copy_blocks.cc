#include "backend/host/copy_blocks.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "backend/host/host.h"
#include "backend/host/thread_pool.h"

namespace pkv {
namespace {

constexpr uint64_t kPieceBytes = 256 * 1024;  // work for one thread at a time

char *address_of(const CopyBlocksParams &params, int64_t block) {
  return static_cast<char *>(params.base) + static_cast<uint64_t>(block) * params.block_bytes;
}

// Copies that do not touch each other, cut into pieces for the threads.
void copy_independent(const CopyBlocksParams &params) {
  const int64_t pieces_per_block = static_cast<int64_t>((params.block_bytes + kPieceBytes - 1) / kPieceBytes);
  auto copy_piece = [&](int64_t index, int32_t) {
    const int64_t i = index / pieces_per_block;
    if (params.sources[i] == params.destinations[i]) return;
    const uint64_t offset = static_cast<uint64_t>(index % pieces_per_block) * kPieceBytes;
    const uint64_t bytes = std::min(kPieceBytes, params.block_bytes - offset);
    std::memcpy(address_of(params, params.destinations[i]) + offset, address_of(params, params.sources[i]) + offset,
                bytes);
  };
  const int64_t num_pieces = params.count * pieces_per_block;
  if (params.block_bytes * static_cast<uint64_t>(params.count) <= 2 * kPieceBytes) {
    for (int64_t i = 0; i < num_pieces; ++i) copy_piece(i, 0);
  } else {
    run_parallel(num_pieces, host_num_threads(), copy_piece);
  }
}

// The pairs of a call as a graph: every block has at most one pair that writes it, and any number that read it.
class CopyGraph {
 public:
  explicit CopyGraph(const CopyBlocksParams &params) : params_(params) {
    by_destination_.reserve(static_cast<size_t>(params.count));
    for (int64_t i = 0; i < params.count; ++i) {
      if (params.sources[i] != params.destinations[i]) by_destination_.push_back(i);
    }
    std::sort(by_destination_.begin(), by_destination_.end(),
              [&](int64_t a, int64_t b) { return params.destinations[a] < params.destinations[b]; });
  }

  bool is_independent() const {
    return std::none_of(by_destination_.begin(), by_destination_.end(),
                        [&](int64_t pair) { return find_writer(params_.sources[pair]) >= 0; });
  }

  // A pair may be copied once nobody has to read its destination any more. What is left then are cycles; the contents
  // of one block of each are put aside, which opens it.
  void copy_all() {
    const size_t count = by_destination_.size();
    num_readers_.assign(count, 0);
    is_done_.assign(count, 0);
    for (const int64_t pair : by_destination_) {
      const int64_t writer = find_writer(params_.sources[pair]);
      if (writer >= 0) ++num_readers_[static_cast<size_t>(writer)];
    }
    for (size_t i = 0; i < count; ++i) copy_chain(i);
    for (size_t i = 0; i < count; ++i) {
      if (!is_done_[i]) copy_cycle(i);
    }
  }

 private:
  int32_t source(size_t i) const { return params_.sources[by_destination_[i]]; }
  int32_t destination(size_t i) const { return params_.destinations[by_destination_[i]]; }

  // Index into by_destination_ of the pair that writes `block`, or -1.
  int64_t find_writer(int32_t block) const {
    const auto found = std::lower_bound(by_destination_.begin(), by_destination_.end(), block,
                                        [&](int64_t pair, int32_t id) { return params_.destinations[pair] < id; });
    if (found == by_destination_.end() || params_.destinations[*found] != block) return -1;
    return found - by_destination_.begin();
  }

  // Copies the pair if it may be, then the pair that writes its source if that was the last read, and so on.
  void copy_chain(size_t i) {
    while (!is_done_[i] && num_readers_[i] == 0) {
      std::memcpy(address_of(params_, destination(i)), address_of(params_, source(i)), params_.block_bytes);
      is_done_[i] = 1;
      const int64_t writer = find_writer(source(i));
      if (writer < 0) return;
      i = static_cast<size_t>(writer);
      --num_readers_[i];
    }
  }

  void copy_cycle(size_t first) {
    if (staging_ == nullptr) staging_.reset(new char[params_.block_bytes]);
    std::memcpy(staging_.get(), address_of(params_, destination(first)), params_.block_bytes);
    size_t i = first;
    for (;;) {
      is_done_[i] = 1;
      const size_t writer = static_cast<size_t>(find_writer(source(i)));
      const bool is_last = writer == first;
      std::memcpy(address_of(params_, destination(i)), is_last ? staging_.get() : address_of(params_, source(i)),
                  params_.block_bytes);
      if (is_last) return;
      i = writer;
    }
  }

  const CopyBlocksParams &params_;
  std::vector<int64_t> by_destination_;  // pairs that move anything, in the order of their destinations
  std::vector<int32_t> num_readers_;     // pairs yet to read the destination of by_destination_[i]
  std::vector<char> is_done_;
  std::unique_ptr<char[]> staging_;
};

}  // namespace

Status copy_host_blocks(const CopyBlocksParams &params) {
  if (params.count <= 0) return PKV_OK;
  if (params.count == 1 || params.is_disjoint) {
    copy_independent(params);
    return PKV_OK;
  }
  try {
    CopyGraph graph(params);
    if (graph.is_independent()) {
      copy_independent(params);
    } else {
      graph.copy_all();
    }
  } catch (const std::bad_alloc &) {
    return fail(PKV_OUT_OF_MEMORY, "host: no memory to order %lld block copies", static_cast<long long>(params.count));
  }
  return PKV_OK;
}

}  // namespace pkv
