#include "backend/host/kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "backend/host/host.h"
#include "backend/host/thread_pool.h"
#include "base/dtype.h"
#if PKV_HAVE_AVX2 || PKV_HAVE_AVX512
#include <cpuid.h>
#endif
#if PKV_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pkv {
namespace {

struct IsaRow {
  HostKernels kernels;
  bool (*is_supported)();
  bool (*is_fast)();  // where supported: faster than those below it
};

bool always() { return true; }
#if PKV_HAVE_AVX2 || PKV_HAVE_AVX512
// Not every compiler's __builtin_cpu_supports knows "f16c".
bool is_f16c_supported() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
bool is_avx2_supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && is_f16c_supported();
}
#endif
#if PKV_HAVE_AVX512
bool is_avx512_supported() {
  return is_avx2_supported() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif
#if PKV_HAVE_AVX512BF16
bool is_avx512bf16_supported() {
  return is_avx512_supported() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
// Of vdpbf16ps and of vpermi2b, Intel's processors begin one while they do four multiply-adds of float32: pairs are slower
// there. AMD's begin as many as multiply-adds.
bool is_avx512bf16_fast() { return __builtin_cpu_is("amd"); }
#endif
#if PKV_HAVE_AMX
// Linux gives a process the tiles when it asks, once for all threads.
bool is_amx_supported() {
  static const bool is_supported = [] {
    constexpr unsigned kBfloat16Tiles = 1u << 22, kTiles = 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!is_avx512bf16_supported() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    if ((edx & kBfloat16Tiles) == 0 || (edx & kTiles) == 0) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return is_supported;
}
#endif

// Best first.
constexpr IsaRow kIsas[] = {
#if PKV_HAVE_AMX
    {{"amx", &kAmxKernels}, is_amx_supported, always},
#endif
#if PKV_HAVE_AVX512BF16
    {{"avx512bf16", &kAvx512Bf16Kernels}, is_avx512bf16_supported, is_avx512bf16_fast},
#endif
#if PKV_HAVE_AVX512
    {{"avx512", &kAvx512Kernels}, is_avx512_supported, always},
#endif
#if PKV_HAVE_AVX2
    {{"avx2", &kAvx2Kernels}, is_avx2_supported, always},
#endif
#if PKV_HAVE_NEON
    {{"neon", &kNeonKernels}, always, always},
#endif
    {{"scalar", &kScalarKernels}, always, always},
    {{"reference", nullptr}, always, always},
};

const HostKernels *find_best() {
  for (const IsaRow &row : kIsas) {
    if (row.is_supported() && row.is_fast()) return &row.kernels;
  }
  return nullptr;
}

std::atomic<const HostKernels *> chosen{nullptr};

constexpr int64_t kBytesPerTask = 128 * 1024;

// Calls f(begin, end) for parts of [0, num_tokens), in parallel if there is enough to do.
template <class F>
void run_token_ranges(int64_t num_tokens, int64_t token_bytes, int32_t num_threads, F f) {
  const int64_t tokens_per_task = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, token_bytes));
  auto run_task = [&](int64_t index, int32_t) {
    const int64_t begin = index * tokens_per_task;
    f(begin, std::min(begin + tokens_per_task, num_tokens));
  };
  run_parallel((num_tokens + tokens_per_task - 1) / tokens_per_task, num_threads, run_task);
}

}  // namespace

const HostKernels &host_kernels() {
  const HostKernels *kernels = chosen.load(std::memory_order_acquire);
  if (kernels != nullptr) return *kernels;
  static const HostKernels *const best = find_best();
  return *best;
}

Status set_host_isa(const char *isa) {
  if (std::strcmp(isa, "auto") == 0) {
    chosen.store(nullptr, std::memory_order_release);
    return PKV_OK;
  }
  for (const IsaRow &row : kIsas) {
    if (std::strcmp(isa, row.kernels.name) != 0) continue;
    if (!row.is_supported()) return fail(PKV_UNSUPPORTED, "this processor does not have \"%s\"", row.kernels.name);
    chosen.store(&row.kernels, std::memory_order_release);
    return PKV_OK;
  }
  if (std::strcmp(isa, "avx2") == 0 || std::strcmp(isa, "avx512") == 0 || std::strcmp(isa, "avx512bf16") == 0 ||
      std::strcmp(isa, "amx") == 0 || std::strcmp(isa, "neon") == 0) {
    return fail(PKV_UNSUPPORTED, "\"%s\" is not built into this library", isa);
  }
  return fail(PKV_INVALID_ARGUMENT,
              "instruction set is \"%.32s\", not auto, reference, scalar, avx2, avx512, avx512bf16, amx or neon", isa);
}

const char *host_isa() { return host_kernels().name; }

void write_tokens(const IsaKernels &inner, const WriteKvParams &params, int32_t num_threads) {
  const int64_t token_bytes = params.kv.num_kv_heads * static_cast<int64_t>(params.kv.head_dim + params.kv.v_head_dim) *
                              dtype_bytes(params.dtype);
  run_token_ranges(params.num_tokens, token_bytes, num_threads,
                   [&](int64_t begin, int64_t end) { inner.write_tokens(params, begin, end); });
}

void gather_tokens(const IsaKernels &inner, const GatherKvParams &params, int32_t num_threads) {
  const int64_t token_bytes = params.kv.num_kv_heads * static_cast<int64_t>(params.kv.head_dim + params.kv.v_head_dim) *
                              dtype_bytes(params.dtype);
  run_token_ranges(params.num_tokens, token_bytes, num_threads,
                   [&](int64_t begin, int64_t end) { inner.gather_tokens(params, begin, end); });
}

void merge_tokens(const IsaKernels &inner, const MergeStatesParams &params, int32_t num_threads) {
  const int64_t token_bytes = static_cast<int64_t>(params.num_heads) * params.head_dim * dtype_bytes(params.dtype) * 3;
  run_token_ranges(params.num_tokens, token_bytes, num_threads,
                   [&](int64_t begin, int64_t end) { inner.merge_tokens(params, begin, end); });
}

}  // namespace pkv
