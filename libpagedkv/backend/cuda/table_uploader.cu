#include "backend/cuda/table_uploader.h"

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/device_context.h"

namespace pkv {
namespace {

constexpr int kThreads = 1024;  // at most
constexpr int kMaxBlocks = 64;
// Of what is done by one thread block, which need not wait for another launch to find slots.
constexpr int64_t kMostItems = 4 * kThreads;

template <class T>
__device__ inline void copy_array(T *to, const T *from, int64_t count, int64_t first, int64_t stride) {
  for (int64_t i = first; i < count; i += stride) to[i] = from[i];
}

__device__ inline void store(const UploadTablesParams &p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  copy_array(p.to_seq_lens, p.seq_lens, p.num_seq_lens, first, stride);
  copy_array(p.to_cu_seqlens_q, p.cu_seqlens_q, p.num_cu_seqlens_q, first, stride);
  copy_array(p.to_step_limits, p.step_limits, p.num_step_limits, first, stride);
  copy_array(p.to_prefix_lens, p.prefix_lens, p.num_prefix_lens, first, stride);
  copy_array(p.to_prefixes, p.prefixes, p.num_prefixes, first, stride);
  if (p.to_num_refused != nullptr && first == 0) *p.to_num_refused = 0;
  for (int64_t i = first; i < p.num_changes; i += stride) p.to_block_table[p.change_indices[i]] = p.change_values[i];
}

// The sequence of a token of the step: in most decode steps that of its number.
__device__ inline int64_t find_sequence(const UploadTablesParams &p, int64_t token) {
  const int32_t *starts = p.to_cu_seqlens_q;
  if (token < p.num_sequences && starts[token] == token && starts[token + 1] > token) return token;
  int64_t first = 0, end = p.num_sequences;  // the last sequence that starts at or before the token
  while (end - first > 1) {
    const int64_t middle = (first + end) / 2;
    (starts[middle] <= token ? first : end) = middle;
  }
  return first;
}

// Out of the other tables, as they stand.
__device__ inline void find_slots(const UploadTablesParams &p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  if (first >= p.num_tokens) return;
  const int32_t num_real = p.to_cu_seqlens_q[p.num_sequences];
  for (int64_t token = first; token < p.num_tokens; token += stride) {
    int64_t slot = -1, position = 0;
    if (token < num_real) {
      const int64_t sequence = find_sequence(p, token);
      position = p.to_seq_lens[sequence] - (p.to_cu_seqlens_q[sequence + 1] - token);
      const uint32_t place = static_cast<uint32_t>(position), size = static_cast<uint32_t>(p.block_size);
      const int64_t block = p.to_block_table[sequence * p.table_stride + place / size];
      slot = block * size + place % size;
    }
    p.to_slot_mapping[token] = slot;
    p.to_positions[token] = position;
  }
}

// A launch of one thread block finds the slots as well.
__device__ inline void store_and_find(const UploadTablesParams &p) {
  store(p);
  if (gridDim.x > 1) return;
  __syncthreads();
  find_slots(p);
}

// Plan: a grid-stride copy of every array, then of the changed entries. Bound by the latency of the bus, or by its
// bandwidth where much has changed.
__global__ void __launch_bounds__(kThreads) store_tables(const __grid_constant__ UploadTablesParams p) {
  store_and_find(p);
}

// Plan: a thread a token. Bound by the latency of two dependent reads, or of a bisection.
__global__ void __launch_bounds__(kThreads) find_all_slots(const __grid_constant__ UploadTablesParams p) { find_slots(p); }

template <uint64_t kBytes>
struct SizedArgument {
  UploadTablesParams params;      // its arrays are offsets into tables
  alignas(16) char tables[kBytes];
};

template <class T>
__device__ inline void move_into(const char *tables, const T **array) {
  *array = reinterpret_cast<const T *>(tables + reinterpret_cast<uintptr_t>(*array));
}

// The same with the arrays in the argument. Bound by the latency of a launch.
template <uint64_t kBytes>
__global__ void __launch_bounds__(kThreads) store_argument(const __grid_constant__ SizedArgument<kBytes> argument) {
  UploadTablesParams p = argument.params;
  move_into(argument.tables, &p.seq_lens);
  move_into(argument.tables, &p.cu_seqlens_q);
  move_into(argument.tables, &p.step_limits);
  move_into(argument.tables, &p.prefix_lens);
  move_into(argument.tables, &p.prefixes);
  move_into(argument.tables, &p.change_indices);
  move_into(argument.tables, &p.change_values);
  store_and_find(p);
}

// The driver copies all of an argument, and for more than these sizes takes longer than an event and staging memory do. An
// argument of more than 4 KiB needs CUDA 12.1.
constexpr uint64_t kSmallBytes = 3840, kLargeBytes = 7936;
constexpr int kLargeDriver = 12010;
static_assert(sizeof(SizedArgument<kSmallBytes>) <= 4096, "the bound of an argument");

template <class T>
void make_offset(const char *tables, const T **array) {
  *array = reinterpret_cast<const T *>(reinterpret_cast<const char *>(*array) - tables);
}

}  // namespace

struct TablesArgument : SizedArgument<kLargeBytes> {};

CudaTableUploader::CudaTableUploader(CUcontext context, uint64_t slot_bytes)
    : context_(context), slot_bytes_(slot_bytes), argument_(new TablesArgument) {}

Status CudaTableUploader::create(CUcontext context, uint64_t bytes, std::unique_ptr<TableUploader> *out) {
  const ContextScope scope(context);
  PKV_TRY(scope.status());
  std::unique_ptr<CudaTableUploader> uploader(new CudaTableUploader(context, bytes));
  int driver = 0;
  PKV_TRY_CUDA(cudaDriverGetVersion(&driver));
  uploader->max_argument_bytes_ = driver >= kLargeDriver ? kLargeBytes : kSmallBytes;
  PKV_TRY_CUDA(cudaHostAlloc(reinterpret_cast<void **>(&uploader->staging_), kNumSlots * bytes, cudaHostAllocMapped));
  for (cudaEvent_t &event : uploader->events_) {
    PKV_TRY_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  *out = std::move(uploader);
  return PKV_OK;
}

CudaTableUploader::~CudaTableUploader() {
  const ContextScope scope(context_);
  if (scope.status() != PKV_OK) return;
  for (cudaEvent_t event : events_) {
    if (event == nullptr) continue;
    cudaEventSynchronize(event);  // the device may still read the slot
    cudaEventDestroy(event);
  }
  if (staging_ != nullptr) cudaFreeHost(staging_);
  cudaGetLastError();
}

Status CudaTableUploader::acquire(uint64_t bytes, char **out_staging) {
  argument_bytes_ = bytes <= max_argument_bytes_ ? bytes : 0;
  if (argument_bytes_ > 0) {
    *out_staging = argument_->tables;
    return PKV_OK;
  }
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  PKV_TRY_CUDA(cudaEventSynchronize(events_[slot_]));  // returns at once for one never recorded
  *out_staging = staging_ + static_cast<uint64_t>(slot_) * slot_bytes_;
  return PKV_OK;
}

Status CudaTableUploader::submit(const UploadTablesParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  const auto queue = static_cast<cudaStream_t>(stream);
  const int64_t longest = std::max({params.num_seq_lens, params.num_cu_seqlens_q, params.num_tokens,
                                    params.num_step_limits, params.num_changes, int64_t{1}});
  const bool is_one_block = longest <= kMostItems;
  const int64_t threads = std::min<int64_t>((longest + 31) / 32 * 32, kThreads);
  const int64_t blocks = is_one_block ? 1 : std::min<int64_t>((longest + kThreads - 1) / kThreads, kMaxBlocks);
  const dim3 grid(static_cast<unsigned int>(blocks)), block(static_cast<unsigned int>(threads));
  void *arguments[] = {const_cast<UploadTablesParams *>(&params)};
  if (argument_bytes_ > 0) {
    PKV_TRY(submit_argument(params, grid, block, queue));
  } else {
    PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&store_tables), grid, block, arguments, 0, queue));
    PKV_TRY_CUDA(cudaEventRecord(events_[slot_], queue));
    slot_ = (slot_ + 1) % kNumSlots;
  }
  if (is_one_block || params.num_tokens == 0) return PKV_OK;
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&find_all_slots), grid, block, arguments, 0, queue));
  return PKV_OK;
}

Status CudaTableUploader::submit_argument(const UploadTablesParams &params, dim3 grid, dim3 block, cudaStream_t stream) {
  UploadTablesParams &p = argument_->params;
  p = params;
  make_offset(argument_->tables, &p.seq_lens);
  make_offset(argument_->tables, &p.cu_seqlens_q);
  make_offset(argument_->tables, &p.step_limits);
  make_offset(argument_->tables, &p.prefix_lens);
  make_offset(argument_->tables, &p.prefixes);
  make_offset(argument_->tables, &p.change_indices);
  make_offset(argument_->tables, &p.change_values);
  const void *kernel = argument_bytes_ <= kSmallBytes ? reinterpret_cast<const void *>(&store_argument<kSmallBytes>)
                                                     : reinterpret_cast<const void *>(&store_argument<kLargeBytes>);
  void *arguments[] = {argument_.get()};  // a smaller one begins like a large one
  PKV_TRY_CUDA(cudaLaunchKernel(kernel, grid, block, arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
